"""Which library multiplies on this processor: PyTorch's own (MKL for fp32; for bf16 oneDNN, which first copies a bias
into every row), or oneDNN called directly, where that is clearly faster. Measured once per machine, in about a second,
and kept in the cache folder.

oneDNN takes 0.4 to 1.6 times MKL's time, by processor and product (benchmarks/products.py). The choice changes the
rounding. So the file decides, even for the process that measured: all processes of the machine compute the same bits.
A run holds the table of its first rank, on all ranks, and again when it resumes.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.files import cache_folder, locked, make_folder, write_atomically
from fivefold.host import cpu_model
from fivefold.host.machine import has_cpu_bf16
from fivefold.kernels.native import processor
from fivefold.kernels.private import onednn_linear

PRODUCTS = OUTPUT, INPUT_GRADIENT, WEIGHT_GRADIENT = "output", "input gradient", "weight gradient"
ROWS, SMALL, LARGE, LARGE_WEIGHT = 512, (768, 384), (1536, 768), 1 << 20
"""Tokens, and output and input features of a small and of a large weight, of the products that are measured; elements
from which a weight counts as large."""
CLEARLY, REPEATS, SECONDS = 1.05, 8, 0.1
"""oneDNN is taken if PyTorch's own way takes more than CLEARLY times as long. They take turns: REPEATS, or as many as
fit into SECONDS of this thread's time, but at least two."""


@functools.cache
def case(product: str, dtype: torch.dtype, bias: bool, large: bool) -> str:
    """The name of a class of products."""
    return f"{dtype}, {'large' if large else 'small'}: {product}{' and bias' if bias else ''}"


_MEASURED = [(product, torch.float32, False) for product in PRODUCTS]
_MEASURED += [(OUTPUT, torch.float32, True), (OUTPUT, torch.bfloat16, True)]
CASES = {case(*one, large): (*one, large) for large in (False, True) for one in _MEASURED}


class Table(NamedTuple):
    """processor: where it was measured. onednn: the cases in which oneDNN multiplies."""

    processor: str
    onednn: Sequence[str]


UNMEASURED = Table("", [name for name in CASES if WEIGHT_GRADIENT not in name])
"""Of traces, and where nothing can be kept."""
_held: list[Table] = []


@functools.cache
def usable(dtype: torch.dtype) -> bool:
    """True if this processor has oneDNN for this dtype, not emulated."""
    fits = dtype == torch.float32 or (dtype == torch.bfloat16 and has_cpu_bf16())
    return fits and torch.backends.mkldnn.is_available()


def hold(table: Table | None) -> None:
    """Sets the table of this process's run. None: there is none, and the machine's own counts again."""
    _held[:] = [table] if table else []


def table() -> Table:
    """The table by which this process multiplies."""
    return _held[0] if _held else machines(torch.get_num_threads())


def by_onednn(products: tuple[str, ...], x: Tensor, elements: int, bias: bool) -> bool:
    """True if oneDNN multiplies x in any of these products of a layer whose weight has so many elements."""
    now, large = UNMEASURED if getattr(x, "fake", False) else table(), elements >= LARGE_WEIGHT
    return any(case(one, x.dtype, bias and one == OUTPUT, large) in now.onednn for one in products)


@functools.cache
def machines(threads: int) -> Table:
    """This machine's table, measured if there is none yet."""
    here = place()
    key = hashlib.sha256(f"{here}\0{torch.__version__}\0{threads}".encode()).hexdigest()[:16]
    path = cache_folder() / "kernels" / f"products-{key}.json"
    try:
        make_folder(path.parent, mode=0o700)
        with locked(path.with_suffix(".lock")):
            if not path.exists():
                with ThreadPoolExecutor(1) as thread:  # PyTorch's modes, such as a trace, are this thread's
                    write_atomically(path, json.dumps(thread.submit(lambda: [*clearly_faster()]).result()))
            return Table(here, [*map(str, json.loads(path.read_text(encoding="utf-8")))])
    except (OSError, ValueError, TypeError):
        return Table(here, UNMEASURED.onednn)


def place() -> str:
    """A name of this processor: its model and a hash of its features."""
    return f"{cpu_model()}, {hashlib.sha256(processor().encode()).hexdigest()[:8]}"


def clearly_faster() -> Iterator[str]:
    """The cases in which oneDNN is clearly faster, by the shortest times."""
    for name, (product, dtype, bias, large) in CASES.items():
        if not usable(dtype):
            continue
        features, width = LARGE if large else SMALL
        x, dy = (torch.ones(ROWS, size, dtype=dtype) for size in (width, features))
        weight, added = torch.ones(features, width, dtype=dtype), torch.ones(features, dtype=dtype)
        factors = {OUTPUT: (x, weight), INPUT_GRADIENT: (dy, weight.t()), WEIGHT_GRADIENT: (dy.t(), x.t())}
        shortest, end = [math.inf, math.inf], time.thread_time() + SECONDS
        for turn in range(REPEATS):
            for way, multiply in enumerate((F.linear, onednn_linear)):
                began = time.perf_counter()
                multiply(*factors[product], added if bias else None)
                shortest[way] = min(shortest[way], time.perf_counter() - began)
            if turn and time.thread_time() > end:
                break
        if shortest[1] * CLEARLY < shortest[0]:
            yield name
