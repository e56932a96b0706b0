"""Fused kernels, each with a plain fallback. They are functions of tensors, and know nothing of models or ranks."""
