"""Schedules as plain data. They are generated, checked, simulated and drawn without torch; `parallel` runs them."""
