"""Compiles and loads native.c: the element-wise kernels for CPUs.

The machine's C compiler builds it at first use (about a second) for the machine's vector units. The library is kept in
the cache folder; its name contains a hash of the source, the flags and the processor. Without a compiler, or with
FIVEFOLD_NATIVE=0, PyTorch's own operations are used: slower, with the same results up to rounding. `why_not()` gives
the reason, and the training log prints it.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from fivefold.files import cache_folder, flush, make_folder, remove, rename

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
    parts = [_SOURCE.read_text(), *_FLAGS, compiler, processor()]
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


def processor() -> str:
    """The line of this machine's first processor that lists its features; empty if it cannot be read."""
    found = Path("/proc/cpuinfo")
    rows = found.read_text().splitlines() if found.is_file() else []
    return next((row for row in rows if row.startswith(("flags", "Features"))), "")


def build(library: Path, command: list[str]) -> None:
    """Compiles a library, unless it is there. command: without the output.

    Raises:
        OSError, subprocess.SubprocessError: it cannot be built, or another user could have written it.
    """
    if not library.exists():
        _compile(command, library)
    for path in (library, library.parent):
        status = path.stat()
        if status.st_uid != os.getuid() or status.st_mode & 0o022:
            raise OSError(f"{path} belongs to another user or can be written by others; not loaded")


def _compile(command: list[str], library: Path) -> None:
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


def why_not() -> str:
    """The reason why the native kernels are not used; empty if they are."""
    return _load()[1]


def usable(*tensors: torch.Tensor) -> bool:
    """True if the native kernels can take these tensors: on the CPU, fp32, bf16 or fp16, all of one dtype."""
    return (
        all(t.device.type == "cpu" and t.dtype == tensors[0].dtype for t in tensors)
        and tensors[0].dtype in _SUFFIX
        and _load()[0] is not None
    )


def call(name: str, dtype: torch.dtype, *arguments: torch.Tensor | int | float | None) -> None:
    """Runs kernel `name` of native.c for `dtype`. Tensors go as pointers (None: null), int as int64, float as float.
    Fake tensors have no memory, so the call does nothing: a trace takes the same path with the same shapes."""
    if getattr(arguments[0], "fake", False):  # not every argument: this is per call of every kernel
        assert isinstance(arguments[0], torch.Tensor)
        assert arguments[0].device.type == "cpu", f"{name} is a kernel for CPUs"
        return
    library = _load()[0]
    assert library is not None
    function = getattr(library, f"{name}_{_SUFFIX[dtype]}")
    function.restype = None
    function(*[_argument(a) for a in arguments])


def _argument(value: torch.Tensor | int | float | None):
    if value is None:
        return ctypes.c_void_p(0)
    if isinstance(value, torch.Tensor):
        return ctypes.c_void_p(value.data_ptr())
    return ctypes.c_float(value) if isinstance(value, float) else ctypes.c_int64(value)
