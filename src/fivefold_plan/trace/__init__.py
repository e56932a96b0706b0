"""The trainer's own step on fake tensors: memory, traffic and FLOPs, exactly."""
