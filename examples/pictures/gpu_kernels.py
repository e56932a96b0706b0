"""Three pictures of how a GPU runs a kernel: what a warp's load fetches by stride, occupancy by registers, and how much
of a device waves of blocks use.

python examples/pictures/gpu_kernels.py gpu_kernels.svg
"""

from __future__ import annotations

import argparse
import runpy
from pathlib import Path
from typing import Any

from fivefold.draw.canvas import COLORS, Axes, Canvas, Line, Scale, draw_line, stacked, tick_labels

OCCUPANCY: dict[str, Any] = runpy.run_path(str(Path(__file__).parents[1] / "kernels" / "occupancy.py"))
Block = OCCUPANCY["Block"]
DEVICE = "h100"
WARP, SECTOR, FP32 = OCCUPANCY["WARP"], 32, 4  # threads; bytes
STRIDES = (1, 2, 4, 8)
WIDE, HIGH, LEFT, TOP = 640, 190, 56, 40  # pixels: a picture, its axes, margins
REGISTERS = range(16, 256)
BLOCKS = {"128 threads": (128, 0), "256 threads": (256, 0), "128 threads, 48 KiB shared": (128, 48 * 1024)}
"""(threads, bytes of shared memory)."""
PER_SM = (1, 3)  # blocks
LAUNCHED = range(4, 1601, 4)  # blocks


def fetched(stride: int) -> set[int]:
    """Sectors that hold the numbers of a warp whose thread i reads number i * stride, in fp32."""
    return {thread * stride * FP32 // SECTOR for thread in range(WARP)}


def shares(threads: int, shared: int) -> list[tuple[float, float]]:
    """(registers per thread, percent of an SM's warps)."""
    limits = OCCUPANCY["limits_of"](OCCUPANCY["DEVICES"][DEVICE])
    return [
        (registers, 100 * OCCUPANCY["occupancy"](limits, Block(threads, registers, shared)).share)
        for registers in REGISTERS
    ]


def used(per_sm: int) -> list[tuple[float, float]]:
    """(blocks of a launch, percent of the places of its waves that are used)."""
    at_once = per_sm * OCCUPANCY["DEVICES"][DEVICE].units
    return [(blocks, 100 * OCCUPANCY["waves"](blocks, at_once)[1]) for blocks in LAUNCHED]


def loads_svg() -> str:
    """A strip of memory for each stride: what the warp wants, and what comes with it."""
    canvas = Canvas("What comes from memory when a warp reads 32 numbers, by formula", width=WIDE)
    canvas.legend(
        20,
        TOP + 6,
        [("blue", "wanted"), ("blue half", "in the same sector of 32 bytes"), ("idle", "not read")],
    )
    numbers = max(STRIDES) * WARP
    each, y = (WIDE - 40) / numbers, TOP + 34
    for stride in STRIDES:
        sectors = fetched(stride)
        bytes_of = len(sectors) * SECTOR
        words = f"{len(sectors)} sectors, {bytes_of:,} bytes for {WARP * FP32}"
        canvas.text(20, y, f"stride {stride}: {words}: {WARP * FP32 / bytes_of:.1%} used")
        canvas.rect("idle", 20, y + 8, numbers * each, 16)
        for sector in sorted(sectors):
            wide = SECTOR // FP32 * each
            canvas.rect("blue half", 20 + sector * wide, y + 8, wide - 0.6, 16, f"sector {sector}")
        for thread in range(WARP):
            canvas.rect("blue", 20 + thread * stride * each, y + 8, each - 0.4, 16, f"thread {thread}")
        y += 50
    return canvas.svg()


def curves_svg(
    title: str, across: str, xs: range, gap: int, lines: dict[str, list[tuple[float, float]]]
) -> str:
    """Curves from 0 to 100%."""
    canvas = Canvas(title, width=WIDE)
    top = TOP + 18 * len(lines) + 12
    ticks = [mark for mark in range(0, xs[-1] + 1, gap) if mark >= xs[0]]
    axes = Axes(
        LEFT, top, WIDE - 36, top + HIGH, Scale(xs[0], xs[-1], ticks), Scale(0, 100, range(0, 101, 20))
    )
    canvas.levels(axes, tick_labels(axes.up.ticks, "%"))
    canvas.columns(axes, [f"{mark:,}" for mark in ticks], across)
    for number, (color, (name, points)) in enumerate(zip(COLORS, lines.items(), strict=False)):
        canvas.legend(20, TOP + 18 * number + 6, [(f"line {color}", name)])
        draw_line(canvas, axes, Line(name, points, number), points)
    return canvas.svg()


def to_svg() -> str:
    """The three pictures, one under the other."""
    units = OCCUPANCY["DEVICES"][DEVICE].units
    by_registers = {f"blocks of {name}": shares(*given) for name, given in BLOCKS.items()}
    by_blocks = {f"blocks per SM: {per_sm}, so {per_sm * units:,} at once": used(per_sm) for per_sm in PER_SM}
    return stacked([
        loads_svg(),
        curves_svg(f"Occupancy of an SM of {DEVICE}, by formula", "registers per thread", REGISTERS, 32, by_registers),
        curves_svg(f"Places used in all waves, {units} SMs, by formula", "blocks launched", LAUNCHED, 200, by_blocks),
    ])  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Loads, occupancy and waves, as an SVG picture.")
    parser.add_argument("svg", type=Path)
    parser.parse_args().svg.write_text(to_svg(), encoding="utf-8")
