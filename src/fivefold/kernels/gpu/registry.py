"""Which kernels in Triton there are, and which of them compute here.

A kernel is used where it was measured to be clearly faster than PyTorch's own. `fivefold bench gpu --part kernels`
measures, and keeps the ratios in the cache folder, by GPU and by versions of PyTorch and Triton. A run holds the list
of its first rank, as it does with libraries for CPUs (native.py). Nothing measured: PyTorch's own compute.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch

from fivefold.files import cache_folder, locked, make_folder, write_atomically

LOSS, ROUNDING, COMBINE = "loss", "fp8 rounding", "combine"
CLEARLY = 1.05
"""PyTorch's own has to take this many times as long, at every shape that was measured in a dtype."""


def case(kernel: str, dtype: torch.dtype) -> str:
    """The name of a kernel in a dtype, as tables have it."""
    return f"{kernel}, {dtype}"


def why_not() -> str:
    """The reason why no kernel can compute here; empty if they can."""
    if not torch.cuda.is_available():
        return "no GPU"
    return "" if _triton() else "Triton is not installed"


def faster() -> list[str]:
    """The `case`s that were measured to be clearly faster on this GPU; none where nothing was measured."""
    return [name for name, ratios in measured().items() if min(ratios.values(), default=0.0) >= CLEARLY]


def measured() -> dict[str, dict[str, float]]:
    """How many times as long PyTorch's own takes on this GPU with these versions, by `case` and by shape; 0 where
    the results differ."""
    if why_not():
        return {}
    try:
        return {str(name): {**ratios} for name, ratios in json.loads(_path().read_text()).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def record(name: str, shape: str, ratio: float) -> None:
    """Keeps a ratio of `measured` for later runs."""
    make_folder(_path().parent, mode=0o700)
    with locked(_path().with_suffix(".lock")):  # another process may measure, too
        found = measured()
        found.setdefault(name, {})[shape] = ratio
        write_atomically(_path(), json.dumps(found, indent=1))


def _path() -> Path:
    here = f"{torch.cuda.get_device_name()}\0{torch.__version__}\0{_triton()}"
    return cache_folder() / "kernels" / f"triton-{hashlib.sha256(here.encode()).hexdigest()[:16]}.json"


def _triton() -> str:
    """Its version; "" without it, or if it cannot be imported: then `language.jit` compiles nothing."""
    from fivefold.kernels.gpu import language  # which imports it: not where there is no GPU

    return language.VERSION
