"""The private parts of PyTorch (torch 2.13) that comm/ uses. tests/test_membership.py calls them."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist


def gloo_group(
    store: dist.Store, name: str, index: int, size: int, address: str, timeout_s: float
) -> dist.ProcessGroup:
    """A process group of gloo that does not belong to the launch's world: `size` processes that share a store. address:
    of this host, where gloo listens. Without it: sites cannot be launches of their own."""
    inside = dist.PrefixStore(name, store)
    options = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
    options._timeout = timedelta(seconds=timeout_s)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    backend = dist.ProcessGroupGloo(inside, index, size, options)
    backend._set_sequence_number_for_group()
    group, kind = dist.ProcessGroup(inside, index, size), dist.ProcessGroup.BackendType.GLOO
    group._set_default_backend(kind)
    group._register_backend(torch.device("cpu"), kind, backend)
    group._set_group_name(name)  # pyright: ignore[reportArgumentType]
    return group


def default_store() -> dist.Store:
    """The store in which the ranks of this launch have met. Without it: ranks of several hosts that hang would wait for
    gloo's time-out."""
    return dist.distributed_c10d._get_default_store()
