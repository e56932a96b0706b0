"""Compiles and loads native.c: the element-wise kernels for CPUs.

The machine's own C compiler builds it at first use (about a second) for the machine's own vector units; the
library is kept in the cache folder under a name that holds the hash of the source, the flags and the processor.
Without a compiler, or with FIVEFOLD_NATIVE=0, everything runs on PyTorch's own operations: same results to
rounding, slower. `why_not()` says which of the two holds, and the training log prints it.
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
from torch._subclasses.fake_tensor import FakeTensor

from fivefold.files import cache_folder

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
    cpu = next(
        (
            row
            for row in Path("/proc/cpuinfo").read_text().splitlines()
            if row.startswith(("flags", "Features"))
        ),
        "",
    )
    key = hashlib.sha256("\0".join([_SOURCE.read_text(), *_FLAGS, compiler, cpu]).encode()).hexdigest()[:16]
    library = cache_folder() / "kernels" / f"native-{key}.so"
    try:
        if not library.exists():
            _compile(compiler, library)
        for path in (library, library.parent):
            _require_ours(path)
        try:
            return ctypes.CDLL(str(library)), ""
        except OSError:  # cut short by a full disk, say
            _compile(compiler, library)
            return ctypes.CDLL(str(library)), ""
    except (OSError, subprocess.SubprocessError) as error:
        return None, f"compiling the kernels failed: {error}"


def _require_ours(path: Path) -> None:
    """Code is loaded only from where nobody else can have put it."""
    status = path.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise OSError(f"{path} belongs to another user or can be written by others; not loaded")


def _compile(compiler: str, library: Path) -> None:
    library.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        built = Path(folder) / library.name
        command = [compiler, *_FLAGS, str(_SOURCE), "-o", str(built), "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode:
            raise OSError(f"{compiler} said: {done.stderr.strip()[:300]}")
        built.chmod(0o700)
        built.replace(library)  # atomic: several ranks may compile at once


def why_not() -> str:
    """Why the native kernels are not used; empty when they are."""
    return _load()[1]


def usable(*tensors: torch.Tensor) -> bool:
    """Whether the native kernels can take these tensors: on the CPU, fp32 or bf16, all of one dtype."""
    return (
        all(t.device.type == "cpu" and t.dtype == tensors[0].dtype for t in tensors)
        and tensors[0].dtype in (torch.float32, torch.bfloat16)
        and _load()[0] is not None
    )


def call(name: str, dtype: torch.dtype, *arguments: torch.Tensor | int | float | None) -> None:
    """Runs kernel `name` of native.c for `dtype`. Tensors go as pointers (None: null), int as int64, float as float.
    Fake tensors have no memory, and nothing is done with them: a dry run takes the same way, with the same shapes."""
    if any(isinstance(argument, FakeTensor) for argument in arguments):
        return
    library = _load()[0]
    assert library is not None
    function = getattr(library, f"{name}_{'bf16' if dtype == torch.bfloat16 else 'fp32'}")
    function.restype = None
    function(*[_argument(a) for a in arguments])


def _argument(value: torch.Tensor | int | float | None):
    if value is None:
        return ctypes.c_void_p(0)
    if isinstance(value, torch.Tensor):
        return ctypes.c_void_p(value.data_ptr())
    return ctypes.c_float(value) if isinstance(value, float) else ctypes.c_int64(value)
