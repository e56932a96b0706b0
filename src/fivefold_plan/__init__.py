"""Predicts memory, time and communication of a layout before it runs, and searches for the best one. No torch."""
