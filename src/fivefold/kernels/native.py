"""What kernels for CPUs ask of this machine: native.c, compiled, and which library multiplies.

native.c has the element-wise kernels. The machine's C compiler builds it at first use (about a second) for the
machine's vector units. The library is kept in the cache folder; its name contains a hash of the source, the flags and
the processor. Without a compiler, or with FIVEFOLD_NATIVE=0, PyTorch's own operations are used: slower, with the same
results up to rounding. `why_not()` gives the reason, and the training log prints it.

PyTorch's own library multiplies (MKL for fp32; for bf16 oneDNN, which first copies a bias into every row), or oneDNN
called directly, where that is clearly faster. This is measured once per machine, in about a second, and kept in the
cache folder. oneDNN takes 0.4 to 1.6 times MKL's time, by processor and product (benchmarks/products.py). The choice
changes the rounding. So the file decides, even for the process that measured: all processes of the machine compute the
same bits. A run holds the table of its first rank, on all ranks, and again when it resumes.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import math
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.files import cache_folder, flush, locked, make_folder, remove, rename, write_atomically
from fivefold.host import cpu_model
from fivefold.host.machine import cpu_flags, has_cpu_bf16
from fivefold.kernels.gpu import registry

_FLAGS = [
    "-O3",
    "-march=native",
    "-fopenmp",
    "-fPIC",
    "-shared",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-signed-zeros",
] + (["-mprefer-vector-width=512"] if platform.machine() == "x86_64" else [])
_SOURCE = Path(__file__).with_name("native.c")
_SUFFIX = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@functools.cache
def _load() -> tuple[ctypes.CDLL | None, str]:
    """The library, or None and the reason."""
    if os.environ.get("FIVEFOLD_NATIVE", "1") == "0":
        return None, "switched off by FIVEFOLD_NATIVE=0"
    if platform.system() != "Linux":
        return None, f"built on Linux only, this is {platform.system()}"
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if not compiler:
        return None, "no C compiler found (looked for $CC, cc, gcc)"
    parts = [_SOURCE.read_text(), *_FLAGS, compiler, _features()]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    library = cache_folder() / "kernels" / f"native-{key}.so"
    command = [compiler, *_FLAGS, str(_SOURCE), "-lm"]
    try:
        build(library, command)
        try:
            return ctypes.CDLL(str(library)), ""
        except OSError:  # e.g. truncated by a full disk
            remove(library)
            build(library, command)
            return ctypes.CDLL(str(library)), ""
    except (OSError, subprocess.SubprocessError) as error:
        return None, f"compiling the kernels failed: {error}"


def _features() -> str:
    """The features of this machine's processor; empty if they cannot be read."""
    return " ".join(sorted(cpu_flags()))


def build(library: Path, command: list[str]) -> None:
    """Compiles a library, unless it is there. command: without the output.

    Raises:
        OSError, subprocess.SubprocessError: it cannot be built, or another user could have written it.
    """
    if not library.exists():
        make_folder(library.parent, mode=0o700)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            built = Path(folder) / library.name
            whole = [*command, "-o", str(built)]
            done = subprocess.run(whole, capture_output=True, text=True, timeout=120, check=False)
            if done.returncode:
                raise OSError(f"{command[0]} said: {done.stderr.strip()[:300]}")
            built.chmod(0o700)
            flush(built)
            rename(built, library)  # atomic: several ranks may compile at once
    for path in (library, library.parent):
        status = path.stat()
        if status.st_uid != os.getuid() or status.st_mode & 0o022:
            raise OSError(f"{path} belongs to another user or can be written by others; not loaded")


def why_not() -> str:
    """The reason why the native kernels are not used; empty if they are."""
    return _load()[1]


def usable(*tensors: Tensor) -> bool:
    """True if the native kernels can take these tensors: on the CPU, fp32, bf16 or fp16, all of one dtype. PyTorch's
    compiler cannot trace them."""
    return (
        not torch.compiler.is_compiling()
        and all(t.device.type == "cpu" and t.dtype == tensors[0].dtype for t in tensors)
        and tensors[0].dtype in _SUFFIX
        and _load()[0] is not None
    )


def call(name: str, dtype: torch.dtype, *arguments: Tensor | int | float | None) -> None:
    """Runs kernel `name` of native.c for `dtype`. Tensors go as pointers (None: null), int as int64, float as float.
    Fake tensors have no memory, so the call does nothing: a trace takes the same path with the same shapes."""
    if getattr(arguments[0], "fake", False):  # not every argument: this is per call of every kernel
        assert isinstance(arguments[0], Tensor)
        assert arguments[0].device.type == "cpu", f"{name} is a kernel for CPUs"
        return
    library = _load()[0]
    assert library is not None
    function = getattr(library, f"{name}_{_SUFFIX[dtype]}")
    function.restype = None
    function(*[_argument(a) for a in arguments])


def _argument(value: Tensor | int | float | None):
    if value is None:
        return ctypes.c_void_p(0)
    if isinstance(value, Tensor):
        return ctypes.c_void_p(value.data_ptr())
    return ctypes.c_float(value) if isinstance(value, float) else ctypes.c_int64(value)


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
    """processor: where it was measured, or the GPU. onednn: the cases in which oneDNN multiplies. triton: the kernels
    for GPUs that compute, by dtype (kernels/gpu/registry.py)."""

    processor: str
    onednn: Sequence[str]
    triton: Sequence[str] = ()


UNMEASURED = Table("", [name for name in CASES if WEIGHT_GRADIENT not in name])
"""Of traces, and where nothing can be kept."""
_held: list[Table] = []


@functools.cache
def has_onednn(dtype: torch.dtype) -> bool:
    """True if this processor has oneDNN for this dtype, not emulated."""
    fits = dtype == torch.float32 or (dtype == torch.bfloat16 and has_cpu_bf16())
    return fits and torch.backends.mkldnn.is_available()


def hold(table: Table | None) -> None:
    """Sets the table of this process's run. None: there is none, and the machine's own counts again."""
    _held[:] = [table] if table else []


def table() -> Table:
    """The table by which this process multiplies."""
    return _held[0] if _held else machines(torch.get_num_threads())


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias by oneDNN, without autograd. PyTorch does not document it. Without it fp32 on CPUs goes to
    MKL, slower on some."""
    bias = None if bias is None else bias.contiguous()  # the kernel ignores its stride
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def by_onednn(products: tuple[str, ...], x: Tensor, elements: int, bias: bool) -> bool:
    """True if oneDNN multiplies x in any of these products of a layer whose weight has so many elements."""
    now, large = UNMEASURED if getattr(x, "fake", False) else table(), elements >= LARGE_WEIGHT
    return any(case(one, x.dtype, bias and one == OUTPUT, large) in now.onednn for one in products)


def in_triton(kernel: str, x: Tensor) -> bool:
    """True if this process's run computes with a kernel of kernels/gpu/registry.py, and x lies on a GPU."""
    there = x.is_cuda and not getattr(x, "fake", False)
    return bool(_held) and there and registry.case(kernel, x.dtype) in _held[0].triton


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
    return f"{cpu_model()}, {hashlib.sha256(_features().encode()).hexdigest()[:8]}"


def clearly_faster() -> Iterator[str]:
    """The cases in which oneDNN is clearly faster, by the shortest times."""
    for name, (product, dtype, bias, large) in CASES.items():
        if not has_onednn(dtype):
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
