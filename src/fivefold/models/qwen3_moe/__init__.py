"""Qwen3 with a mixture of experts."""
