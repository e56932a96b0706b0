"""What the kernels of this folder share: where they run, which bytes they move, what the compiler makes of them.

Without a GPU, Triton's interpreter runs a kernel: one program (a block of threads) after the other, in NumPy. So
kernels can be tried and tested on any CPU. The compiler needs no GPU either: it writes machine code for one elsewhere.
"""

import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

GPU = torch.cuda.is_available()
# Triton reads both when it is imported. A product and a sum may become one instruction; 3.10 changes the default.
os.environ.setdefault("TRITON_INTERPRET", str(int(not GPU)))
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
try:
    import triton  # pyright: ignore[reportMissingImports]
except ImportError:
    raise SystemExit("These kernels need Triton: pip install triton (Linux; no GPU is needed)") from None

INTERPRETED = os.environ["TRITON_INTERPRET"] == "1"
DEVICE = "cuda" if GPU and not INTERPRETED else "cpu"


def refuse_bf16(*factors: Tensor) -> None:
    """The interpreter (Triton 3.7 to 3.9) multiplies matrices in bf16 wrongly, and says nothing.

    Raises:
        ValueError: a factor is in bf16, and kernels are interpreted.
    """
    if INTERPRETED and any(x.dtype == torch.bfloat16 for x in factors):
        raise ValueError(
            "dtype = bfloat16: Triton's interpreter computes tl.dot wrongly; use float32 or float16"
        )


def farthest(found: Tensor, wanted: Tensor) -> float:
    """The largest difference, relative to the largest number that is wanted."""
    return ((found.double() - wanted.double()).abs().max() / wanted.double().abs().max()).item()


class Moved:
    """Bytes that kernels read from global memory and write to it inside a `with`, as the interpreter runs them.

    Every element that the mask of a load or store lets through counts, each time, also what a cache would answer.
    """

    def __init__(self) -> None:
        self.read = self.written = 0

    def __enter__(self) -> "Moved":
        if not INTERPRETED:
            raise RuntimeError("bytes are counted in the interpreter: set TRITON_INTERPRET=1")
        from triton.runtime.interpreter import (  # pyright: ignore[reportMissingImports]
            interpreter_builder as builder,
        )

        self.builder, load, store = builder, builder.create_masked_load, builder.create_masked_store

        def counted_load(pointers: Any, mask: Any, *others: Any) -> Any:
            self.read += _bytes(pointers, mask)
            return load(pointers, mask, *others)

        def counted_store(pointers: Any, value: Any, mask: Any, *others: Any) -> Any:
            self.written += _bytes(pointers, mask)
            return store(pointers, value, mask, *others)

        builder.create_masked_load, builder.create_masked_store = counted_load, counted_store
        return self

    def __exit__(self, *_: object) -> None:
        del self.builder.create_masked_load, self.builder.create_masked_store  # the class's own are back


def _bytes(pointers: Any, mask: Any) -> int:
    return int(mask.data.sum()) * pointers.get_element_ty().primitive_bitwidth // 8


class Compiled:
    """A kernel as the compiler made it for one generation of GPUs.

    registers: 32-bit ones per thread. spilled: bytes per thread without room in registers, kept in global memory.
    shared: bytes of shared memory per block. threads: per block. ptx: the assembly language of NVIDIA's GPUs.
    """

    def __init__(self, kernel: Any, arch: int, warps: int, stages: int, arguments: dict[str, Any]) -> None:
        """arguments: for each of the kernel's its type, as in `*fp16`, `i32` or `i32:16` (a number that 16 divides), or
        the value of a constant. Pointers are multiples of 16, as those of tensors are. stages: tiles of a loop that are
        read ahead. arch: 80 for Ampere, 90 for Hopper."""
        if INTERPRETED:
            raise RuntimeError("kernels to compile are imported with TRITON_INTERPRET=0")
        from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]
        from triton.compiler import ASTSource  # pyright: ignore[reportMissingImports]

        types = {
            name: x.partition(":")[0] if isinstance(x, str) else "constexpr" for name, x in arguments.items()
        }
        values = {name: x for name, x in arguments.items() if not isinstance(x, str)}
        sixteen = {(i,): [["tt.divisibility", 16]] for i, x in enumerate(arguments.values())
                   if isinstance(x, str) and (x.startswith("*") or x.endswith(":16"))}  # fmt: skip
        made = triton.compile(
            ASTSource(kernel, types, values, sixteen),
            target=GPUTarget("cuda", arch, 32),
            options={"num_warps": warps, "num_stages": stages},
        )
        self.ptx: str = made.asm["ptx"]
        self.layouts: str = made.asm["ttgir"]
        self.shared: int = made.metadata.shared
        self.threads = 32 * warps
        self.registers, stack, local = _usage(made.asm["cubin"])
        self.spilled = stack + local


def _usage(cubin: bytes) -> tuple[int, int, int]:
    """Registers, bytes of stack and of local memory per thread, as `cuobjdump` of Triton's wheel says."""
    program = Path(str(triton.__file__)).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run([program, "-res-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", said.stdout)
    if found is None:
        raise RuntimeError(f"cuobjdump says nothing of registers: {said.stdout}")
    return int(found[1]), int(found[2]), int(found[3])
