"""The undocumented parts of PyTorch that launch uses. A test calls each (test_private)."""

import torch.distributed as dist


def abort_groups() -> None:
    """Frees all process groups and ends their messages, whatever other ranks do. Without it: a process whose ranks have
    failed cannot train again, for NCCL's `destroy_process_group` waits for ranks that may never come."""
    dist.distributed_c10d._abort_process_group()
