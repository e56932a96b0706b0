"""What teaches and compares: forms of parallelism side by side, and a plan's terms as papers and courses count them.
It explains what the planner predicts; no prediction and no run depends on it."""
