"""Llama with a mixture of experts."""
