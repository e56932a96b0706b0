"""Options of `fivefold plan`: names, types and help texts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

GROUPS = {
    "Search": ("search", "top", "precision"),
    "Budget": ("tokens", "deadline", "price", "noise_scale"),
    "The trainer's own step": ("exact", "memory_timeline", "rank"),
    "Terms of papers and courses": (
        "terms", "states", "activations", "bubble", "flops", "psi", "formulas", "svg",
    ),
    "Files": ("save", "pictures", "html", "json"),
}  # fmt: skip
"""Headings of the help, and the options below each."""

MoreArgument = Annotated[list[str] | None, typer.Argument(hidden=True)]
ClusterOption = Annotated[
    str,
    typer.Option(
        "--cluster",
        metavar="NAME:DEVICES",
        help="A name of `fivefold clusters`, local, or a .toml file. h100:64: 64 devices; h100:8x4: 8 nodes of 4.",
    ),
]
SearchOption = Annotated[bool, typer.Option("--search", help="Find the fastest layouts that fit.")]
TopOption = Annotated[
    int, typer.Option(min=1, max=1000, metavar="N", help="Number of layouts that --search lists.")
]
PrecisionOption = Annotated[
    str | None,
    typer.Option(
        "--precision",
        metavar="MODES",
        help="Precision modes that --search considers, such as bf16,fp8. [default: the recipe's]",
    ),
]
ExplainOption = Annotated[bool, typer.Option("--explain", help="Print every term of the prediction.")]
SaveOption = Annotated[
    Path | None,
    typer.Option(
        "--save", metavar="FILE", help="Write the recipe with the planned (best) layout to this file."
    ),
]
PicturesOption = Annotated[
    bool, typer.Option("--pictures", help="Draw all pictures, even into a file or a pipe.")
]
HtmlOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Write a page with the pictures and with sliders for the sizes."),
]
CalibrateOption = Annotated[
    bool,
    typer.Option(
        "--calibrate",
        help="Fit this machine's table to finished runs: --calibrate RUN...; undo: --calibrate reset.",
    ),
]
ExactOption = Annotated[
    bool,
    typer.Option(
        "--exact", help="Trace the trainer's own step on one rank: exact bytes, messages and FLOPs."
    ),
]
MemoryTimelineOption = Annotated[
    Path | None,
    typer.Option(
        "--memory-timeline",
        metavar="FILE.svg",
        help="Trace a step on one rank and draw its memory over time, by category, here and in FILE.",
    ),
]
FormulasOption = Annotated[
    bool,
    typer.Option(
        "--formulas",
        help="Print the activation formulas of arXiv 2205.05198 for the recipe's sizes, beside measured bytes.",
    ),
]
RankOption = Annotated[
    int, typer.Option("--rank", metavar="N", help="The rank that --exact and --memory-timeline trace.")
]
ExpertLoadOption = Annotated[
    float | None,
    typer.Option(
        "--expert-load",
        metavar="X",
        help="Load of the busiest expert rank relative to an even split. [default: 1]",
    ),
]
DocumentTokensOption = Annotated[
    float | None,
    typer.Option(
        "--document-tokens",
        metavar="N",
        help="Average length of the documents, which attention does not cross. [default: counted in the data if they "
        "are tokenized; else sequences count as whole]",
    ),
]
TokensOption = Annotated[
    float | None,
    typer.Option("--tokens", metavar="N", help="Tokens to train on, such as 1.4e12. [default: the recipe's]"),
]
DeadlineOption = Annotated[
    str | None,
    typer.Option(
        "--deadline",
        metavar="TIME",
        help="Devices needed to finish within TIME, such as 30d (m, h, d, w).",
    ),
]
PriceOption = Annotated[float | None, typer.Option("--price", metavar="X", help="Price per device-hour.")]
NoiseOption = Annotated[
    float | None,
    typer.Option("--noise-scale", metavar="N", help="Gradient noise scale in tokens, as a run measured it."),
]
ParamsOption = Annotated[
    float | None,
    typer.Option(
        "--params", metavar="N", help="Plan a model with about N parameters instead of the recipe's."
    ),
]
TermsOption = Annotated[
    bool,
    typer.Option(
        "--terms",
        help="Print parameters, states, activations, FLOPs, messages and bubble term by term, with formulas.",
    ),
]
StatesOption = Annotated[
    str | None,
    typer.Option(
        "--states",
        metavar="CONVENTION",
        help="Terms of the states: paper (2 + 2 + 12 bytes), fp32_sum (2 + 6 + 12), bf16_pure, fp32 or fivefold "
        "(the recipe's own).",
    ),
]
ActivationsOption = Annotated[
    str | None,
    typer.Option(
        "--activations",
        metavar="CONVENTION",
        help="Terms of the activations: plain (34sbh + 5abs^2), flash or fivefold (the recipe's own).",
    ),
]
BubbleOption = Annotated[
    str | None,
    typer.Option(
        "--bubble", metavar="CONVENTION", help="Terms of the bubble: over the ideal time, or over the step."
    ),
]
FlopsOption = Annotated[
    float | None,
    typer.Option(
        "--flops", metavar="RATE", help="Terms of the FLOPs, at this rate of a device in FLOP/s: 160e12."
    ),
]
PsiOption = Annotated[
    float | None,
    typer.Option(
        "--psi", metavar="N", help="Count terms with N parameters, such as 175e9, instead of the recipe's."
    ),
]
SvgOption = Annotated[
    Path | None,
    typer.Option(
        "--svg",
        metavar="FILE",
        help="Draw the states of --terms or --states by ZeRO stage, or the activations of --formulas.",
    ),
]
