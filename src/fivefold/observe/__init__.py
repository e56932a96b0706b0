"""Metrics files, console lines, and the pages of runs and plans."""
