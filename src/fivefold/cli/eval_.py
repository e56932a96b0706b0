"""`fivefold eval RUN`: perplexity of texts, multiple choice and completions by likelihood."""

from __future__ import annotations

import json as json_
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from fivefold.cli.options import (
    JsonOption,
    RunArgument,
    StepOption,
    option,
    print_json,
    require_run,
    require_writable,
    save_as,
)
from fivefold.errors import printable, several

EXAMPLES = [
    "fivefold eval runs/first my_texts/*.txt",
    "fivefold eval runs/first --task hellaswag_val.jsonl --limit 1000",
    "fivefold eval runs/first --task ARC-Easy-Test.jsonl --shots 5 --shots-from ARC-Easy-Train.jsonl --json",
]
GROUPS = {
    "Tasks": ("task", "shots", "shots_from", "seed", "limit"),
    "Scoring": ("context", "stride", "batch_tokens", "dtype", "text_key"),
}


def eval_(
    run: RunArgument,
    texts: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="FILE",
            help="Text files: perplexity and bits per byte. A .jsonl holds one document per line.",
        ),
    ] = None,
    task: Annotated[
        list[Path] | None,
        option(
            "FILE",
            "Task file: JSON lines in our own form (docs/evaluation.md) or as HellaSwag, ARC and LAMBADA are "
            "published. Repeatable.",
        ),
    ] = None,
    shots: Annotated[int, option("K", "Solved examples in front of each item of a task.")] = 0,
    shots_from: Annotated[
        Path | None, option("FILE", "Task file that examples are drawn from. [default: the task's own]")
    ] = None,
    seed: Annotated[int, option("N", "Random seed of the examples.")] = 1234,
    limit: Annotated[int, option("N", "First N items of each task; 0: all.")] = 0,
    context: Annotated[
        int | None, option("N", "Tokens that the model sees at most. [default: model.seq_len]")
    ] = None,
    stride: Annotated[
        int | None, option("N", "Tokens that a window of a long text scores. [default: --context]")
    ] = None,
    batch_tokens: Annotated[
        int | None, option("N", "Tokens per batch: bounds the memory. [default: 8192]")
    ] = None,
    dtype: Annotated[
        str | None, option("fp32|bf16|fp16", "Dtype to compute in. [default: as the run's validation]")
    ] = None,
    text_key: Annotated[
        str | None, option("KEY", "Field of a .jsonl that holds the text. [default: data.text_key]")
    ] = None,
    step: StepOption = None,
    out: Annotated[Path | None, option("FILE", "Write the figures here as JSON, with each item's.")] = None,
    json: JsonOption = False,
) -> None:
    """Evaluate a trained model: perplexity, bits per byte, accuracy.

    Multiple choice goes by the likelihood of the choices. Tasks in which the model writes freely are not supported.
    A run of any layout is evaluated in one process.
    """
    require_run(run, look=False)
    require_writable("--out", out)
    from fivefold.train.evaluate import Evaluation, evaluate

    how = Evaluation(shots, shots_from, seed, limit, context, stride, batch_tokens, dtype, text_key)
    with _progress() as tell:
        found = evaluate(run, texts or (), task or (), how, step=step, tell=tell)
    if out is not None:
        save_as("--out", out, json_.dumps(found, indent=1) + "\n")
    for row in found["tasks"]:
        del row["details"]
    print_json(found) if json else print("\n".join(_lines(found)))


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """On a terminal, a line that says twice a second what has been done."""
    last = time.monotonic()

    def tell(text: str) -> None:
        nonlocal last
        if time.monotonic() - last > 0.5:
            last = time.monotonic()
            print(f"\r\033[K{printable(text)[-100:]}", end="", file=sys.stderr, flush=True)

    try:
        yield tell if sys.stderr.isatty() else lambda text: None
    finally:
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def _lines(found: dict[str, Any]) -> list[str]:
    """The figures for people."""
    lines = [
        f"{found['run']}, step {found['step']:,}, in {found['dtype']} on {found['device']}, context "
        f"{found['context']:,} tokens, stride {found['stride']:,}"
    ]
    for row in found["texts"]:
        lines.append(
            f"  {row['file']}: perplexity {_number(row['perplexity'])}, bits per byte {row['bits_per_byte']:.4f}  "
            f"({several(row['documents'], 'document')}, {row['tokens']:,} tokens, {row['bytes']:,} bytes)"
        )
    for row in found["tasks"]:
        figures = f"accuracy {_share(row, 'accuracy')}"
        if "accuracy_norm" in row:
            figures += f", by length {_share(row, 'accuracy_norm')}"
        else:
            figures += f", perplexity {_number(row['perplexity'])}"
        lines.append(
            f"  {row['file']}: {figures}  ({row['schema']}, {row['items']:,} items, {row['shots']} shots)"
        )
        if row["cut"]:
            lines.append(
                f"    the prompts of {row['cut']:,} items are longer than the context: their beginnings were cut off"
            )
    return lines


def _number(value: float | None) -> str:
    return "beyond 1e300" if value is None else f"{value:.4g}"


def _share(row: dict[str, Any], name: str) -> str:
    error = row[f"{name}_stderr"]
    return f"{row[name]:.3f}" + ("" if error is None else f" +- {error:.3f}")
