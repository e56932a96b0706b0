"""The environment variables that change how GPUs compute and how NCCL communicates, in one table. Sources: NVIDIA's
documentation of CUDA and NCCL, PyTorch's of its NCCL backend and allocator. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

ON, OFF, ONE = frozenset(("1", "y", "yes", "t", "true")), frozenset(("0", "n", "no", "f", "false")), {"1"}
_HOST = "the host waits at every message, so nothing overlaps with it"
_LOST = "no rank ends when its messages fail or hang"


class Variable(NamedTuple):
    """does: what it does. harm: what values in `values` (None: any) cost; "": nothing is known."""

    does: str
    harm: str = ""
    values: frozenset[str] | set[str] | None = ON


VARIABLES = {
    "CUDA_VISIBLE_DEVICES": Variable("the GPUs that a process sees, in this order"),
    "CUDA_LAUNCH_BLOCKING": Variable("the host waits for every kernel", "the GPU idles between kernels"),
    "CUDA_DEVICE_MAX_CONNECTIONS": Variable(
        "queues of a GPU", "streams overlap only in the order of calls", ONE
    ),
    "NVIDIA_TF32_OVERRIDE": Variable("0: no TF32 in NVIDIA's libraries", "mode tf32 is slow fp32", OFF),
    "OMP_NUM_THREADS": Variable("CPU threads of each rank"),
    "PYTORCH_ALLOC_CONF": Variable("PyTorch's allocator, in place of expandable_segments:True"),
    "PYTORCH_CUDA_ALLOC_CONF": Variable("the older name of PYTORCH_ALLOC_CONF"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": Variable(
        "no cache of memory", "each allocation calls the driver", None
    ),
    "NCCL_ALGO": Variable("restricts the algorithms; otherwise NCCL chooses by size"),
    "NCCL_ASYNC_ERROR_HANDLING": Variable("the older TORCH_NCCL_ASYNC_ERROR_HANDLING", _LOST, OFF),
    "NCCL_BLOCKING_WAIT": Variable("the older TORCH_NCCL_BLOCKING_WAIT", _HOST),
    "NCCL_DEBUG": Variable("how much NCCL logs"),
    "NCCL_IB_DISABLE": Variable("no InfiniBand or RoCE", "nodes communicate over TCP", ONE),
    "NCCL_IB_HCA": Variable("the adapters of InfiniBand or RoCE"),
    "NCCL_NET_GDR_LEVEL": Variable("how far an adapter may be from the GPU whose memory it reads"),
    "NCCL_P2P_DISABLE": Variable("no direct access between GPUs", "NVLink and PCIe are not used", ONE),
    "NCCL_P2P_LEVEL": Variable("how far apart GPUs may be that access each other directly"),
    "NCCL_PROTO": Variable("restricts the protocols; otherwise NCCL chooses by size"),
    "NCCL_SHM_DISABLE": Variable("no shared memory between ranks", "they use the network instead", ONE),
    "NCCL_SOCKET_IFNAME": Variable("the network interfaces by which ranks find each other"),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": Variable("3, the default: a failed message ends its rank", _LOST, OFF),
    "TORCH_NCCL_BLOCKING_WAIT": Variable("waiting for a message blocks the host", _HOST),
    "TORCH_NCCL_ENABLE_MONITORING": Variable("a thread ends a rank in which NCCL hangs", _LOST, OFF),
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": Variable("seconds after which that thread does so"),
}


def settings(environ: Mapping[str, str]) -> list[dict[str, str]]:
    """The variables of the table, and others of NCCL, that are set: name, value, what it `does`, and a `warning` if the
    value costs something, else ""."""
    found = list[dict[str, str]]()
    for name, value in sorted(environ.items()):
        if name in VARIABLES or name.startswith(("NCCL_", "TORCH_NCCL_")):
            known = VARIABLES.get(name, Variable("a setting of NCCL's that this table does not have"))
            hurts = bool(known.harm) and (known.values is None or value.strip().lower() in known.values)
            warning = f"{name}={value}: {known.harm}" if hurts else ""
            found.append({"name": name, "value": value, "does": known.does, "warning": warning})
    return found
