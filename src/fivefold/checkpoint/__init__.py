"""Checkpoints: safetensors and JSON. `dcp` reads and writes those of PyTorch, without unpickling."""
