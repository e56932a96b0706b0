"""Which kernels in Triton there are, and which of them compute here.

A kernel is used where it was measured to be faster than PyTorch's own. `fivefold bench gpu --part kernels` measures,
and writes the names of the faster ones into the cache folder, by GPU and by versions of PyTorch and Triton. A run holds
the list of its first rank, as it does with libraries for CPUs (native.py). Nothing measured: PyTorch's own compute.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from fivefold.files import cache_folder, make_folder, write_atomically

LOSS, ADAMW, ROUNDING = "loss", "adamw", "rounding"
KERNELS = {
    LOSS: "the output layer and its cross-entropy without logits in memory",
    ADAMW: "AdamW, the factor on gradients, the working weights and their largest in one pass",
    ROUNDING: "numbers of 8 bits and their transposed copy in one pass",
}


def why_not() -> str:
    """The reason why no kernel can compute here; empty if they can."""
    if not torch.cuda.is_available():
        return "no GPU"
    return "" if _triton() else "Triton is not installed"


def faster() -> list[str]:
    """The kernels that were measured to be faster on this GPU; none where nothing was measured."""
    try:
        return [] if why_not() else [name for name in _read() if name in KERNELS]
    except (OSError, ValueError, TypeError):
        return []


def measured() -> bool:
    """True if kernels were measured on this GPU, with these versions."""
    return not why_not() and _path().exists()


def write(names: Sequence[str]) -> None:
    """Keeps the names of the kernels that were faster, for later runs."""
    make_folder(_path().parent, mode=0o700)
    write_atomically(_path(), json.dumps([*names]))


def _read() -> list[str]:
    return [str(name) for name in json.loads(_path().read_text(encoding="utf-8"))]


def _path() -> Path:
    here = f"{torch.cuda.get_device_name()}\0{torch.__version__}\0{_triton()}"
    return cache_folder() / "kernels" / f"triton-{hashlib.sha256(here.encode()).hexdigest()[:16]}.json"


def _triton() -> str:
    """Its version; "" without it."""
    for name in ("triton", "pytorch-triton-rocm", "triton-rocm"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return ""
