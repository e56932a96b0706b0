"""Predicts memory, time and communication of a layout before it runs, and searches for the best one. No torch.

Stands on `fivefold`, the trainer, which never imports it and asks for its parts by name (`fivefold/wings.py`).
"""

INTERFACE = 1  # of `fivefold.wings` that this is made for
