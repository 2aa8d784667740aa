"""Lockstep: pipeline-parallel serving of language models whose stages stay in agreement."""
