"""The kernels of kernels/gpu, compiled for GPUs that are not here: registers, spills and shared memory beside each
device's limits. Needs Triton, and no GPU.

    python benchmarks/triton_kernels.py [--out benchmarks/results/triton_kernels.json]

NVIDIA's figures are those of `cuobjdump -res-usage`, which Triton brings along; AMD's those of the assembly's metadata.
The exit status is 1 if a kernel spills registers or needs more than a device has.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch


class Device(NamedTuple):
    """shared: bytes of shared memory (AMD: LDS) that a program may use. registers: of a thread."""

    backend: str
    arch: int | str
    warp: int
    shared: int
    registers: int


KIB = 1024
DEVICES = {
    "sm_80": Device("cuda", 80, 32, 163 * KIB, 255),
    "sm_90a": Device("cuda", 90, 32, 227 * KIB, 255),
    "sm_100a": Device("cuda", 100, 32, 227 * KIB, 255),
    "gfx942": Device("hip", "gfx942", 64, 64 * KIB, 512),
}
"""CUDA's programming guide, table of compute capabilities; AMD's CDNA 3 instruction set, sections 1 and 3."""
POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}


def sources() -> dict[str, tuple[Any, dict[str, str], dict[str, Any]]]:
    """By name: the kernel, the types of its arguments, and what it is compiled for with its options."""
    from fivefold.kernels.gpu import loss

    found = roundings() | combines()
    for dtype in (torch.bfloat16, torch.float32):
        numbers, tile = POINTERS[dtype], loss.tile(dtype) | {"BIASED": False}
        common = dict.fromkeys(("x", "weight", "bias"), numbers) | {"targets": "*i64", "out": "*fp32"}
        common |= dict.fromkeys(("N", "V", "D", "first", "span"), "i32")
        rows = dict.fromkeys(("top", "dtotal", "dat"), "*fp32")
        found[f"loss: statistics, {numbers[1:]}"] = loss._statistics_kernel, common, tile
        found[f"loss: gradient, {numbers[1:]}"] = (
            loss._gradient_kernel,
            common | rows | {"out": numbers},
            tile,
        )
    return found


def roundings() -> dict[str, tuple[Any, dict[str, str], dict[str, Any]]]:
    from fivefold.kernels.gpu import rounding
    from fivefold.precision.formats import FORMATS

    found, form = {}, FORMATS["fp8 e4m3"]
    types = {"x": "*bf16", "out": "*u8", "turned": "*u8", "factors": "*fp32", "turned_factors": "*fp32"}
    types |= {"R": "i32", "C": "i32"}
    for kind, turned in (("row", False), ("row", True), ("block", False), ("block", True), ("tensor", True)):
        name = f"fp8 rounding: {kind}{' and transpose' * turned}, bf16"
        given = types | {"largest": "*fp32" if kind == "tensor" else "*bf16"}
        found[name] = rounding._round_kernel, given, rounding.compiled(form, kind, True, turned)
    return found


def combines() -> dict[str, tuple[Any, dict[str, str], dict[str, Any]]]:
    from fivefold.kernels.gpu import combine

    rows = dict.fromkeys(("rows", "weights", "out", "dout", "drows"), "*bf16")
    types = rows | {"places": "*i64", "order": "*i64", "dweights": "*fp32"}
    types |= dict.fromkeys(("M", "N", "D"), "i32")
    given = {"WEIGHTED": True, "K": 8, "COLUMNS": combine.COLUMNS}
    return {
        "combine: sum, bf16": (combine._sum_kernel, types, given),
        "combine: gradients, bf16": (combine._spread_kernel, types, given),
    }


def built(kernel: Any, types: dict[str, str], compiled: dict[str, Any], device: Device) -> Any:
    """Compiled as a launch compiles it with tensors at multiples of 16 bytes and sizes that are multiples of 16."""
    from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]
    from triton.compiler import ASTSource, compile  # pyright: ignore[reportMissingImports]

    options = {name: value for name, value in compiled.items() if name.islower()}
    constants = {name: compiled[name] for name in kernel.arg_names if name in compiled}
    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    whole = [
        i
        for i, name in enumerate(kernel.arg_names)
        if signature[name][0] == "*" or name in ("N", "V", "D", "R", "C", "size")
    ]
    attributes = {(i,): [["tt.divisibility", 16]] for i in whole}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    return compile(source, target=GPUTarget(device.backend, device.arch, device.warp), options=options)


def usage(program: Any, device: Device) -> dict[str, int]:
    """registers of a thread, bytes of spills of a thread, bytes of shared memory of a program."""
    if device.backend == "hip":
        said = dict(re.findall(r"\.(\w+):\s+(\d+)", program.asm["amdgcn"]))
        spills = 4 * (int(said["vgpr_spill_count"]) + int(said["sgpr_spill_count"]))
        registers = int(said["vgpr_count"]) + int(said.get("agpr_count", 0))
        return {"registers": registers, "spilled": spills, "shared": program.metadata.shared}
    import triton  # pyright: ignore[reportMissingImports]

    tool = Path(triton.__path__[0]) / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(program.asm["cubin"])
        file.flush()
        text = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    said = {name: int(value) for name, value in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", text)}
    shared = max(program.metadata.shared, said["SHARED"])
    return {"registers": said["REG"], "spilled": said["STACK"] + said["LOCAL"], "shared": shared}


def trouble(found: dict[str, int], device: Device) -> list[str]:
    limits = {"registers": device.registers, "spilled": 0, "shared": device.shared}
    return [f"{found[name]} {name}, at most {most}" for name, most in limits.items() if found[name] > most]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    os.environ.pop("TRITON_INTERPRET", None)
    import triton  # pyright: ignore[reportMissingImports]

    kernels: dict[str, dict[str, dict[str, int]]] = {}
    wrong = []
    for name, source in sources().items():
        for arch, device in DEVICES.items():
            found = usage(built(*source, device), device)
            kernels.setdefault(name, {})[arch] = found
            wrong += [f"{name} on {arch}: {text}" for text in trouble(found, device)]
            print(f"{name:40} {arch:8} {found}", flush=True)
    limits = {name: {"registers": one.registers, "shared": one.shared} for name, one in DEVICES.items()}
    report = {"triton": triton.__version__, "limits": limits, "kernels": kernels}
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    sys.exit("\n".join(wrong) or 0)


if __name__ == "__main__":
    main()
