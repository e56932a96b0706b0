"""Schedules as plain data: generated, checked, simulated and drawn without torch; run by `parallel`."""
