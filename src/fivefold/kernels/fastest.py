"""Which of two libraries is faster on this processor: measured once per machine, kept in the cache folder.

The choice changes the rounding. So the file decides, even for the process that measured: all ranks and all later runs
on the machine compute the same bits.
"""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch

from fivefold.files import cache_folder, locked, make_folder, write_atomically
from fivefold.kernels.native import processor
from fivefold.kernels.private import onednn_linear

Ways = Mapping[str, Callable[[], object]]
ROWS, WIDE, NARROW, REPEATS = 1024, 768, 384, 4
"""The matmul that is measured: tokens, output and input features; and how often."""


@functools.cache
def weight_gradient() -> str:
    """ "onednn", or else MKL, for fp32. oneDNN is 1.3 to 1.8 times as fast on Zen 5, 0.6 to 1 times on Zen 4."""
    return chosen("fp32-weight-gradient", _weight_gradients)


def _weight_gradients() -> Ways:
    dy, x = torch.ones(ROWS, WIDE), torch.ones(ROWS, NARROW)
    return {"mkl": lambda: dy.t() @ x, "onednn": lambda: onednn_linear(dy.t(), x.t())}


def chosen(name: str, ways: Callable[[], Ways]) -> str:
    """The fastest way, or the one that the machine's file has; "" if there can be no file, on every rank."""
    key = hashlib.sha256(
        f"{processor()}\0{torch.__version__}\0{torch.get_num_threads()}".encode()
    ).hexdigest()[:16]
    path = cache_folder() / "kernels" / f"{name}-{key}"
    try:
        make_folder(path.parent, mode=0o700)
        with locked(path.with_suffix(".lock")):
            if not path.exists():
                with ThreadPoolExecutor(1) as thread:  # PyTorch's modes, such as a trace, are this thread's
                    write_atomically(path, thread.submit(lambda: measured(ways())).result())
            return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def measured(ways: Ways) -> str:
    """The way with the shortest time. They take turns."""
    shortest = dict.fromkeys(ways, float("inf"))
    for _ in range(REPEATS):
        for name, work in ways.items():
            began = time.perf_counter()
            work()
            shortest[name] = min(shortest[name], time.perf_counter() - began)
    return min(shortest, key=lambda name: shortest[name])
