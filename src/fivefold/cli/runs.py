"""What is done with a run. `fivefold checkpoints RUN` lists, verifies, prunes and copies its checkpoints. `fivefold
export RUN DIR` writes a model as a Hugging Face or DCP folder, `fivefold import DIR` makes a run of one. `fivefold
report RUN ...` writes the page of a run, of several runs side by side, or of a sweep. `fivefold eval RUN`: perplexity
of texts, multiple choice and completions by likelihood. `fivefold formats` lists the formats of numbers, and how the
numbers of a run lie in their ranges."""

from __future__ import annotations

import json as json_
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from fivefold import wings
from fivefold.cli import options
from fivefold.cli.options import flag, option, print_json
from fivefold.cli.train import HoldOutOption
from fivefold.errors import CheckFailed, UserError, printable, several

GROUPS = {
    "Tasks": ("task", "shots", "shots_from", "seed", "limit"),
    "Scoring": ("context", "stride", "batch_tokens", "dtype", "text_key"),
}


def checkpoints(
    run: options.RunArgument,
    verify: Annotated[bool, flag("Read every file and compare it with the manifest.", "--verify")] = False,
    prune: Annotated[
        bool,
        flag(
            "Remove those that checkpoint.keep_last and keep_every do not keep, and those set aside.",
            "--prune",
        ),
    ] = False,
    copy: Annotated[Path | None, option("DIR", "Copy a checkpoint into this folder, checked.")] = None,
    step: Annotated[int | None, option("N", "With --copy: its step. [default: the newest]", min=0)] = None,
    json: options.JsonOption = False,
) -> None:
    """List, verify, prune or copy the checkpoints of a run.

    Checkpoints that were set aside (damaged-..., later-...) are listed, too. No run resumes from one unless you rename
    it.
    """
    options.require_run(run)
    from fivefold.checkpoint import keep, store
    from fivefold.observe.format import size

    found: dict[str, Any] = {"run": str(run)}
    if step is not None and copy is None:
        raise UserError("--step: only with --copy")
    if copy is not None:
        source = store.latest(run) if step is None else store.folder_of(run, step)
        found["copied"] = str(keep.copy(source, copy))
    if prune:
        found["removed"] = [str(folder) for folder in _prune(run)]
    rows = [(folder, _row(folder, verify)) for folder in (*store.checkpoints(run), *keep.aside(run))]
    # a run that trains has removed others meanwhile
    found["checkpoints"] = [row for folder, row in rows if folder.exists()]
    if json:
        print_json(found)
    else:
        if "copied" in found:
            print(f"copied to {found['copied']}")
        for folder in found.get("removed", ()):
            print(f"removed {folder}")
        if not found["checkpoints"]:
            print(f"{found['run']} has no checkpoint yet")
        for row in found["checkpoints"]:
            parts = [f"{row['name']:<24}"]
            if "bytes" in row:
                parts += [f"{size(row['bytes']):>10}", f"format {row['format']}", row["saved"]]
            if row["damage"]:
                parts.append(row["damage"])
            elif row.get("verified"):
                parts.append("verified")
            print("  ".join(parts))
    damaged = [row for row in found["checkpoints"] if row["damage"] and not row["aside"]]
    if damaged:
        raise CheckFailed(f"{len(damaged)} checkpoints are damaged: {', '.join(r['name'] for r in damaged)}")


def _prune(run: Path) -> list[Path]:
    from fivefold.checkpoint import keep, store
    from fivefold.files import owned, remove
    from fivefold.recipe import load

    section = load(str(run / "recipe.toml")).checkpoint
    with owned(run):
        there = store.checkpoints(run)
        old, aside = keep.old_ones(there, section.keep_last, section.keep_every), keep.aside(run)
        stay = [folder for folder in there if folder not in old]
        if (old or aside) and all(keep.verify(folder) for folder in stay[::-1]):  # also where none would stay
            said = "are damaged" if stay else "do not exist"
            raise UserError(f"{run}: the checkpoints that would stay {said}, so none is removed")
        for folder in aside:
            remove(folder)
        return [*keep.prune(run, section.keep_last, section.keep_every), *aside]


def _row(folder: Path, verify: bool) -> dict[str, Any]:
    """What there is to say about a checkpoint. damage: what is wrong, as far as it was looked at."""
    from fivefold.checkpoint import keep, store
    from fivefold.checkpoint.manifest import FORMAT, MANIFEST, Damaged, step_of

    row: dict[str, Any] = {"name": folder.name, "aside": step_of(folder.name) is None, "damage": ""}
    try:
        reader = store.Reader(folder)
        when = datetime.fromtimestamp((folder / MANIFEST).stat().st_mtime).astimezone()
    except (Damaged, FileNotFoundError) as error:
        return row | {"damage": str(error)}
    row |= {
        "step": reader.meta.get("step"),
        "tokens": reader.meta.get("tokens"),
        "format": FORMAT,
        "files": len(reader.files),
        "bytes": reader.manifest.bytes,
        "saved": when.isoformat(timespec="seconds"),
    }
    try:
        return row | {"damage": keep.verify(folder), "verified": True} if verify else row
    except UserError:
        if folder.exists():
            raise
        return row  # removed meanwhile, so it is not shown


def export(
    run: options.RunArgument,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write.")],
    step: options.StepOption = None,
    dcp: Annotated[bool, flag("PyTorch's distributed format, as torchtitan loads it.", "--dcp")] = False,
    json: options.JsonOption = False,
) -> None:
    """Export a model as a Hugging Face folder.

    The folder holds safetensors weights, config.json and the tokenizer. transformers loads it as it is.
    """
    options.require_run(run, look=False)
    from fivefold.checkpoint import store
    from fivefold.checkpoint.source import export_run

    export_run(run, folder, checkpoint=store.chosen(run, step), dcp=dcp)
    print_json({"folder": str(folder)}) if json else print(folder)


def import_(
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="A folder with config.json and safetensors, or a DCP folder."),
    ],
    out: Annotated[Path, option("RUN", "Run folder to write.")],
    json: options.JsonOption = False,
) -> None:
    """Import a Hugging Face folder as a run.

    Works for Llama, Mistral, Phi-3, Qwen, SmolLM3, OLMo, Gemma 3, GLM-4, Mixtral, GPT-2 and BERT models, and for
    torchtitan's Llama 3 checkpoints with the model's config.json beside them. Generate from the run, or train on.
    """
    if not (folder / "config.json").is_file():
        dcp = ". Put the model's beside the DCP checkpoint" if (folder / ".metadata").exists() else ""
        raise UserError(f"'{folder}' is not a Hugging Face model: it has no config.json{dcp}")
    from fivefold.checkpoint.source import import_folder, left_out

    import_folder(folder, out)
    left = left_out(folder)
    if left and not json:
        print(f"left out: {', '.join(f'{n:,} of {name}' for name, n in left.items())}", file=sys.stderr)
    print_json({"run": str(out), "left_out": left}) if json else print(out)


COMPARISON = Path("comparison.html")


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN", help="Run folders, or a sweep's folder.", autocompletion=options.run_folders
        ),
    ],
    out: Annotated[Path | None, option("FILE", f"Page of several runs. [default: {COMPARISON}]")] = None,
    hold_out: HoldOutOption = None,
    json: options.JsonOption = False,
) -> None:
    """Write the report of a run: one HTML file that opens offline.

    Several runs are compared: losses over steps, tokens, time and FLOPs, figures, and where their recipes differ.
    A sweep's page has its law, isoFLOP curves and the best value of each field.
    """
    from fivefold.recipe import sweep as table

    sweeps = [run for run in runs if table.is_sweep(run)]
    if sweeps and len(runs) > 1:
        raise UserError(
            f"'{sweeps[0]}' is a sweep, which has a page of its own; compare its runs: {sweeps[0]}/*/"
        )
    if hold_out is not None and not sweeps:
        raise UserError(f"--hold-out {hold_out}: only a sweep has a fit; '{runs[0]}' is none")
    if out is not None and len(runs) == 1:
        raise UserError(f"--out {out}: the page of one run or sweep lies in its folder, as report.html")
    if sweeps:
        return _sweep(sweeps[0], hold_out, json)
    for run in runs:
        options.require_run(run, look=False)
    if len(runs) > 1:
        from fivefold.observe import compare

        path = out or COMPARISON
        options.require_writable(out=path)
        found = compare.read_runs(runs)
        options.save_as("--out", path, wings.part("pages").of_runs(found, compare.text(found)))
        if json:
            return print_json({"report": str(path), **compare.as_json(found)})
        return print(compare.text(found), path, sep="\n")
    from fivefold.observe.report import write_report

    path = write_report(runs[0])
    print_json({"report": str(path)}) if json else print(path)


def _sweep(folder: Path, hold_out: str | None, json: bool) -> None:
    from fivefold.files import guard
    from fivefold.recipe import sweep as table

    guard(folder)
    scaling, pages = wings.part("scaling"), wings.part("pages")
    found = scaling.results(table.read(folder), hold_out)
    path = pages.write_sweep(folder, found)
    if json:
        print_json({"report": str(path), **found.as_json()})
    else:
        print(scaling.rows_text(found.sweep), found.text(), path, sep="\n")


def formats(
    run: Annotated[
        Path | None, option("RUN", "Compare with the numbers of a run trained with observe.histogram_step.")
    ] = None,
    svg: Annotated[
        Path | None, option("FILE", "Also draw them to FILE: bits, or the numbers of --run.")
    ] = None,
    json: options.JsonOption = False,
) -> None:
    """List the formats of numbers, from fp64 to fp4: bits, range, precision, hardware.

    With --run: weights, activations and gradients of a step by exponent, and what each format makes of them.
    """
    from fivefold.observe import number_formats

    options.require_writable(svg=svg)
    facts: dict[str, Any] = {"formats": number_formats.table()}
    text, picture = number_formats.to_text(), number_formats.bits_svg
    if run is not None:
        step, found = number_formats.read(options.require_run(run))
        title = f"{run.resolve().name}, step {step}: numbers by exponent, measured"
        facts = {"step": step, "kinds": found.as_json()}
        text = f"{title}\n\n{number_formats.histogram_text(found)}"
        picture = partial(number_formats.histogram_svg, found, title)
    if svg is not None:
        options.save_as("--svg", svg, picture())
        text += f"{svg}\n"
    print_json(facts | {"svg": svg}) if json else print(text, end="")


def eval_(
    run: options.RunArgument,
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
            "published; `talk`: held-out questions of the shipped conversations. Repeatable.",
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
    step: options.StepOption = None,
    out: Annotated[Path | None, option("FILE", "Write the figures here as JSON, with each item's.")] = None,
    json: options.JsonOption = False,
) -> None:
    """Evaluate a trained model: perplexity, bits per byte, accuracy.

    Multiple choice goes by the likelihood of the choices. Tasks in which the model writes freely are not supported.
    A run of any layout is evaluated in one process.
    """
    options.require_run(run, look=False)
    options.require_writable(out=out)
    from fivefold.train.evaluate import Evaluation, evaluate

    how = Evaluation(shots, shots_from, seed, limit, context, stride, batch_tokens, dtype, text_key)
    with _progress() as tell:
        found = evaluate(run, texts or (), task or (), how, step=step, tell=tell)
    if out is not None:
        options.save_as("--out", out, json_.dumps(found, indent=1) + "\n")
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
        lines += [
            f"    {kind:12} "
            + ", ".join(f"{name} {value:.3f}" for name, value in figures.items() if name != "items")
            for kind, figures in row["kinds"].items()
        ]
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
