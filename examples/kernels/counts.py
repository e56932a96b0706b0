"""What the compiler makes of this folder's kernels, without a GPU: registers, shared memory, occupancy, instructions.

python examples/kernels/counts.py h100
python examples/kernels/counts.py h100 --ptx --only add
python examples/kernels/counts.py h100 --outline --only flash
python examples/kernels/counts.py a100 --instructions
"""

import argparse
import os
import re
from itertools import groupby
from typing import Any, NamedTuple

os.environ["TRITON_INTERPRET"] = "0"  # kernels to compile

import elementwise
import flash
import lab
import matmul
import rope
import rows
from occupancy import DEVICES, KIB, Block, limits_of, occupancy, waves

HALF, INT = "*fp16", "i32:16"
N, BLOCK = 4096, 1024  # rows and columns of a matrix; elements of a program
HEADS, TOKENS, HEAD = 32, 8192, 128  # of attention


class Case(NamedTuple):
    """A kernel with its arguments, the warps of a block, the tiles in flight, and the blocks of a launch."""

    kernel: Any
    arguments: dict[str, Any]
    warps: int
    stages: int
    blocks: int


def _product(rows: int, columns: int, warps: int) -> Case:
    sizes = {"M": INT, "N": INT, "K": INT, "ROWS": rows, "COLUMNS": columns, "DEPTH": matmul.DEPTH}
    arguments = {"a": HALF, "b": HALF, "out": HALF, **sizes}
    return Case(matmul.matmul, arguments, warps, matmul.STAGES, N // rows * (N // columns))


def _attention(kernel: Any, tensors: str, lists: str, tiles: flash.Tiles, per_block: int) -> Case:
    """tensors: in 16 bits. lists: numbers per query, in fp32. per_block: tokens."""
    pointers = dict.fromkeys(tensors.split(), HALF) | dict.fromkeys(lists.split(), "*fp32")
    names = [name for name in kernel.arg_names if name in pointers]
    sizes = {"T": INT, "scale": "fp32", "HEAD": HEAD, "ROWS": tiles.rows, "KEYS": tiles.keys}
    arguments = {name: pointers[name] for name in names} | sizes
    return Case(kernel, arguments, tiles.warps, tiles.stages, HEADS * TOKENS // per_block)


def _elements(kernel: Any, tensors: str, **constants: int) -> Case:
    """An elementwise kernel on a matrix, in fp32."""
    arguments = dict.fromkeys(tensors.split(), "*fp32") | {"n": INT} | constants | {"BLOCK": BLOCK}
    return Case(kernel, arguments, 4, 1, N * N // BLOCK)


def _rows(kernel: Any, tensors: str, **numbers: str) -> Case:
    arguments = dict.fromkeys(tensors.split(), HALF) | {"columns": INT} | numbers | {"BLOCK": N}
    return Case(kernel, arguments, 4, 1, N)


_TABLES = {"x": HALF, "cos": "*fp32", "sin": "*fp32", "out": HALF}
CASES = {
    "add": _elements(elementwise.add, "x y out", stride=1),
    "add, stride 8": _elements(elementwise.add, "x y out", stride=8),
    "elu": _elements(elementwise.elu, "x out"),
    "softmax": _rows(rows.softmax, "x out"),
    "rmsnorm": _rows(rows.rmsnorm, "x weight out", eps="fp32"),
    "rope": Case(
        rope.rope, {**_TABLES, "T": INT, "HEADS": HEADS, "HALF": HEAD // 2, "BACK": 0}, 4, 1, TOKENS
    ),
    "matmul 32x32": _product(32, 32, 4),
    "matmul 64x64": _product(64, 64, 4),
    "matmul 128x128": _product(128, 128, 4),
    "matmul 128x128, 8 warps": _product(128, 128, 8),
    "matmul 256x128": _product(256, 128, 4),
    "flash, first version": _attention(flash.first, "q k v", "out sums largest", flash.FIRST, TOKENS),
    "flash": _attention(flash.second, "q k v out", "lse", flash.FORWARD, flash.FORWARD.rows),
    "flash dq": _attention(
        flash.for_queries, "q k v dout dq", "lse delta", flash.FOR_QUERIES, flash.FOR_QUERIES.rows
    ),
    "flash dk dv": _attention(
        flash.for_keys, "q k v dout dk dv", "lse delta", flash.FOR_KEYS, flash.FOR_KEYS.keys
    ),
}
COUNTED = {
    "read": r"ld\.global", "ahead": r"cp\.async\.c", "stored": r"st\.global", "shared": r"[dt]\.shared|[dt]matrix",
    "shuffles": r"shfl", "barriers": r"bar\.sync|barrier", "mma": r"mma\.sync", "wgmma": r"wgmma\.mma",
}  # fmt: skip
"""Kinds of instructions, by how PTX writes them."""
OUTLINED = r"[dt]\.(global|shared)|[dt]matrix|^cp\.async|mma|^ex2|^bar\.|^shfl|^bra"
"""What moves, multiplies in tensor cores, takes exponentials, waits or jumps."""


def compiled(name: str, device: str) -> lab.Compiled:
    """A case for this device's generation."""
    case = CASES[name]
    arch = int(limits_of(DEVICES[device]).capability.replace(".", ""))
    return lab.Compiled(case.kernel, arch, case.warps, case.stages, case.arguments)


def instructions(ptx: str) -> list[str]:
    """The lines that are executed: no directives, labels or comments."""
    lines = (re.sub(r"\s+", " ", line).strip() for line in re.sub(r"//.*", "", ptx).splitlines())
    return [line for line in lines if line.endswith(";") and not line.startswith(".")]


def outline(lines: list[str]) -> list[str]:
    """Instructions of these kinds in their order, without operands; those that follow each other alike in one line."""
    bare = (re.sub(r"^@\S+ ", "", line).rstrip(";") for line in lines)
    words = (re.match(r"\S+( \d+$)?", line) for line in bare)  # with the number of a wait
    kinds = [word[0] for word in words if word and re.search(OUTLINED, word[0])]
    return [f"{len(list(group)):>3} x {kind}" for kind, group in groupby(kinds)]


def main() -> None:
    parser = argparse.ArgumentParser(description="Registers, shared memory and occupancy of the kernels.")
    parser.add_argument("device", choices=DEVICES)
    parser.add_argument("--only", default="", help="this kernel, or those whose name begins so")
    parser.add_argument("--ptx", action="store_true", help="the instructions of these kernels")
    parser.add_argument(
        "--outline", action="store_true", help="those that move, multiply, wait or jump, in short"
    )
    parser.add_argument("--instructions", action="store_true", help="how many of each kind")
    given = parser.parse_args()
    sheet = DEVICES[given.device]
    names = [given.only] if given.only in CASES else [name for name in CASES if name.startswith(given.only)]
    if given.instructions:
        print(f"{'kernel':<25}" + "".join(f"{kind:>10}" for kind in COUNTED))
    elif not given.ptx and not given.outline:
        print(f"Triton {lab.triton.__version__}, {given.device}: {sheet.units} SMs")
        print("kernel                   threads  registers  spilled  shared KiB  blocks/SM  occupancy  limit      "
              "    waves   used")  # fmt: skip
    for name in names:
        made = compiled(name, given.device)
        if given.ptx:
            print(f"{name}:", *instructions(made.ptx), sep="\n  ")
        elif given.outline:
            print(f"{name}:", *outline(instructions(made.ptx)), sep="\n")
        elif given.instructions:
            lines = instructions(made.ptx)
            found = (sum(bool(re.search(kind, line)) for line in lines) for kind in COUNTED.values())
            print(f"{name:<25}" + "".join(f"{count:>10}" for count in found))
        else:
            there = occupancy(limits_of(sheet), Block(made.threads, made.registers, made.shared))
            count, used = waves(CASES[name].blocks, there.blocks * sheet.units)
            print(f"{name:<25}{made.threads:>7}{made.registers:>11}{made.spilled:>9}{made.shared / KIB:>12.2f}"
                  f"{there.blocks:>11}{there.share:>11.0%}  {there.limit:<13}{count:>7}{used:>7.1%}")  # fmt: skip


if __name__ == "__main__":
    main()
