"""Mistral."""
