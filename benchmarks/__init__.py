"""Comparisons, each in one run and by turns; ratios and medians, never a test."""
