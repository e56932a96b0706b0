"""Llama."""
