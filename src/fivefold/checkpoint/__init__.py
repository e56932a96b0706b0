"""Checkpoints: safetensors and JSON, never pickle."""
