"""Keeps and streams what `layout.offload` takes off the device. Which tier has what is a table (sharding/tiers.py)."""
