"""The private parts of PyTorch that comm/ uses, and public ones that have other names in other versions.
tests/test_membership.py and tests/test_comm.py call them."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

# Before torch 2.13 these had longer names, which later versions may drop.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


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
