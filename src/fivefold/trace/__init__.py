"""The trainer's own step on hollow tensors: memory, traffic and FLOPs, exactly."""
