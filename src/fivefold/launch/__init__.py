"""Finds the ranks of a run, or starts and stops them on this machine."""
