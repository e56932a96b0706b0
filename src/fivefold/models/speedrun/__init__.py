"""Techniques of speedruns."""
