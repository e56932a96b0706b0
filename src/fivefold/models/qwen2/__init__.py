"""Qwen2."""
