"""`fivefold play`: a page on this machine that starts, shows and compares runs. What it runs are the commands.

Stands on `fivefold`, the trainer, and on `fivefold_plan`, the planner.
"""

INTERFACE = 1  # of `fivefold.wings` that this is made for
