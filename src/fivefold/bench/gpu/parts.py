"""The parts of `fivefold bench gpu` as data: their trials, their shares of the time, shapes and layouts. No torch.

Without a GPU, two ranks on the CPU run the trials at tiny sizes. That shows that the instrument works, but no speed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from fivefold.precision import MASTER, PRECISIONS
from fivefold.recipe import Recipe, load

OK, SHORT, WRONG = "ok", "short", "wrong"
ON_CPU = 2  # ranks


class Row(NamedTuple):
    """A result. measured: a figure in `unit`, or words. expected: what it is compared with. verdict: OK, SHORT of what
    was expected, WRONG, or "" where nothing is judged. advice: what to do about it."""

    name: str
    measured: float | str
    unit: str = ""
    expected: float | None = None
    verdict: str = ""
    advice: str = ""


def judged(
    name: str, measured: float, unit: str, expected: float | None, good: bool | None, advice: str
) -> Row:
    """A row with its verdict, and advice if it is not good. Nothing is judged without anything expected, nor (`good` is
    None) speed at tiny sizes."""
    if expected is None or good is None:
        return Row(name, measured, unit, expected)
    return Row(name, measured, unit, expected, OK if good else SHORT, "" if good else advice)


LLAMA_1B = ("model.layers=16", "model.dim=2048", "model.ffn_dim=8192")
SHAPES = {"gpt2-124m": ("gpt2-124m", ()), "llama-1b": ("llama3-8b", LLAMA_1B), "llama3-8b": ("llama3-8b", ())}
"""Recipes, and what differs from them. The second is Llama 3.2's shape with an output layer of its own."""
TINY = (
    "model.layers=2", "model.dim=64", "model.heads=4", "model.kv_heads=4", "model.ffn_dim=256", "model.vocab_size=512",
    "model.seq_len=64",
)  # fmt: skip
LAYOUTS = {
    2: ("dp=2,zero=3", "tp=2,sp=true", "cp=2", "pp=2", "dp=2,ep=2", "dp=2", "dp=2,zero=1", "dp=2,zero=2", "tp=2",
        "cp=2,cp_method=ulysses", "pp=2,schedule=zbv,virtual_stages=2"),
    4: ("dp=2,tp=2,sp=true,zero=3", "pp=2,tp=2"),
    8: ("dp=2,tp=2,pp=2,zero=1", "dp_replicate=2,dp_shard=4,zero=3"),
}  # fmt: skip
"""By number of ranks. Two share a GPU where there is one."""
UNFUSED = "unfused"


def recipe_of(shape: str, layout: str, gpus: int) -> Recipe:
    """The recipe of a shape in a layout, without warm-up: plain PyTorch has none."""
    name, sets = SHAPES[shape]
    return load(name, [*sets, *(() if gpus else TINY), "optim.warmup_steps=0"], layout)


def _verified(gpus: int) -> list[str]:
    """Layouts with modes, the most usual first."""
    alone = [f"dp=1 {mode}{more}" for mode in (MASTER, "bf16") for more in ("", f" {UNFUSED}")]
    if not gpus:
        return [*alone[:2], f"{LAYOUTS[2][0]} bf16", f"pp=2 {MASTER}"]
    several = [layout for ranks, some in LAYOUTS.items() if ranks <= max(2, gpus) for layout in some]
    rest = [f"dp=1 {mode}" for mode in PRECISIONS if mode not in (MASTER, "bf16")]
    return (
        alone + [f"{layout} bf16" for layout in several] + rest + [f"{layout} {MASTER}" for layout in several]
    )


def _memory(gpus: int) -> list[str]:
    n = gpus or ON_CPU
    layouts = (
        (f"dp={n},zero=1", f"dp={n},zero=3,recompute=full") if n > 1 else ("dp=1", "dp=1,recompute=full")
    )
    return [f"{shape} {layout}" for shape in SHAPES for layout in layouts]


class Part(NamedTuple):
    """share: of the time, relative to other parts. trials: their names, given the number of GPUs."""

    about: str
    share: float
    trials: Callable[[int], list[str]]


PARTS = {
    "doctor": Part("Drivers, libraries, settings and limits.", 1, lambda gpus: ["machine"]),
    "links": Part("Collectives, beside the cluster's description.", 2, lambda gpus: ["collectives"]),
    "kernels": Part(
        "Forward and backward of operations, beside the roofline and PyTorch's own.", 3,
        lambda gpus: [f"{shape} {dtype}" for shape in ("llama-1b", "llama3-8b") for dtype in ("bf16", MASTER)],
    ),
    "verify": Part("Layouts, beside one process: relative differences and what is allowed.", 9, _verified),
    "memory": Part("Runs, beside their plans.", 5, _memory),
    "train": Part("Speed, beside plain PyTorch in the same process and beside the plan.", 8, lambda gpus: list(SHAPES)),
}  # fmt: skip
