"""Kernels for GPUs in Triton, one in a file, with its plain PyTorch twin. registry.py lists them and says which compute
here."""
