"""Processes, groups and links between ranks."""
