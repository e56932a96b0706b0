"""All that follows from a recipe without training it, and six steps of every architecture: tables that must be the same
before and after the code is arranged in another way.

    python tests/tables.py [--out benchmarks/results/tables.json] [--against FILE] [--folder FOLDER]

Of each architecture at a small size and of each recipe that comes along: parameters, buffers, cuts, sections, counts,
FLOPs, the operations of its blocks, the map to Hugging Face's names, and plans (bytes and seconds) in layouts on GPUs;
of each layout of `tests/sweep.py` its plan. Long tables are kept as digests. Of each architecture also what the third
checkpoint of a run of six steps has, and its losses, which only the same processor repeats.

--against prints what differs from an earlier table and exits with 1. --folder keeps the runs, or
resumes from the third step those that an earlier tree has left there.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import sweep
from layouts import tiny
from test_sharding import MODELS
from test_trace_gpu import ARCHS, CASES, MORE_ARCHS, recipe_of

from fivefold.checkpoint import manifest, store
from fivefold.errors import UserError
from fivefold.models.card import card_of
from fivefold.models.hf import EXCHANGED, _exchange_of, hf_config
from fivefold.models.operations import Program, Sizes
from fivefold.models.section import ModelSection
from fivefold.recipe import Recipe, flops_per_token, load, resolve, resolve_model
from fivefold.recipe.load import shipped
from fivefold.sharding.layout import Layout, to_text
from fivefold_plan.cluster.clusters import parse
from fivefold_plan.predict import predict

STEPS, KEPT = 6, 3
VOCAB = 64
TINY_MODEL = [
    "model.layers=2", "model.dim=32", "model.heads=4", "model.kv_heads=none", "model.ffn_dim=80", "model.seq_len=32",
    "model.tie_embeddings=none",
]  # fmt: skip
FURTHER = {
    "deepseek": ["model.rope_dim=6", "model.value_dim=5", "model.dense_layers=1"],
    "speedrun": [],
    "qwen3_moe": ["model.head_dim=16", "model.experts=4", "model.expert_ffn_dim=16"],
}
"""Architectures that test_trace_gpu.py does not have."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    made: dict[str, Any] = {"models": {}, "recipes": {}, "plans": {}, "layouts": {}, "runs": {}}
    for name, model in models().items():
        made["models"][name] = facts(model)
    for name in shipped():
        made["recipes"][name] = of_recipe(name)
    for arch, layout in CASES:
        made["plans"][f"{arch} {layout}"] = planned(recipe_of(layout, arch))
    with tempfile.TemporaryDirectory() as folder:
        made["layouts"] = dict(of_layouts(Path(folder)))
        made["processor"] = sweep.processor()
        for arch in [*ARCHS, *MORE_ARCHS, *FURTHER]:
            made["runs"][arch] = trained(arch, Path(folder), args.folder)
            print(arch, made["runs"][arch]["losses"], file=sys.stderr, flush=True)
    if args.out:
        args.out.write_text(json.dumps(made, indent=1, sort_keys=True) + "\n")
    if args.against:
        before = json.loads(args.against.read_text())
        if before["processor"] != made["processor"]:  # it rounds in another way
            for run in (*before["runs"].values(), *made["runs"].values()):
                run |= {"losses": [], "resumed": []}
        lines = list(differences(before, json.loads(json.dumps(made))))
        print("\n".join(lines) or "no difference")
        sys.exit(bool(lines))


def models() -> dict[str, ModelSection]:
    """The small models by their architectures, numbered where there are several of one."""
    named: dict[str, ModelSection] = {}
    for section in MODELS:
        number = sum(name.split(" ")[0] == section.arch for name in named)
        named[f"{section.arch} {number}"] = resolve_model(section, vocab_size=VOCAB)
    experts = ModelSection(arch="moe", layers=2, dim=32, heads=4, seq_len=16, experts=4, shared_experts=1)
    return named | {"moe 0": resolve_model(experts, vocab_size=VOCAB)}


def facts(model: ModelSection) -> dict[str, Any]:
    """What follows from a resolved model."""
    card = card_of(model)
    blocks, begin, end = card.costs
    table: dict[str, Any] = {
        "parameters": digest(list(card.parameters.items())),
        "buffers": digest(card.buffers),
        "cuts": digest(card.cuts),
        "sections": digest(dict(card.sections)),
        "count": card.count,
        "flops": [sum(blocks), begin, end, flops_per_token(model)],
        "operations": digest([
            card.block_operations(Sizes(model, 2, tp, 1, 1), Program(), number)
            for tp in (1, 2)
            for number in range(model.blocks)
        ]),
    }  # fmt: skip
    if model.arch in EXCHANGED:
        try:
            entries = _exchange_of(model).entries(model)
            table["hugging_face"] = digest([list(entries), hf_config(model)])
        except UserError as error:
            table["hugging_face"] = str(error)
    return table


def digest(table: Any) -> str:
    """A few digits that differ if anything in a table does."""
    return hashlib.sha256(json.dumps(plain(table)).encode()).hexdigest()[:16]


def plain(value: Any) -> Any:
    """A value as JSON has it. Dataclasses keep the order of their fields, not the names of their modules."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain({type(value).__name__: {f: getattr(value, f) for f in value.__dataclass_fields__}})
    if isinstance(value, dict):
        return [[plain(key), plain(one)] for key, one in value.items()]
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    return value if isinstance(value, (int, float, bool, str, type(None))) else str(value)


def of_recipe(name: str) -> dict[str, Any]:
    """A recipe's resolved fields, its model and its plan."""
    recipe = load(name)
    vocab = recipe.model.vocab_size or 32000
    full = resolve(recipe, vocab_size=vocab)
    return {"fields": digest(full.model_dump(mode="json")), **facts(full.model), "plan": planned(full)}


def planned(recipe: Recipe) -> Any:
    """Bytes and seconds on GPUs, or why there is no plan."""
    ranks = Layout.from_recipe(recipe.layout).ranks + recipe.servers.count
    try:
        plan = predict(recipe, parse(f"h100:{ranks}"))
    except UserError as error:
        return str(error)
    return {"bytes": plan.peak_bytes, "seconds": plan.step.seconds, "all": digest(plan.as_json())}


def of_layouts(folder: Path) -> Iterator[tuple[str, Any]]:
    """The plan of each layout of the sweep."""
    for layout in sweep.candidates():
        text = to_text(layout)
        layers, rows = sweep.sizes(layout)
        shape = [f"model.layers={layers}", f"train.microbatch_size={rows}"]
        try:
            recipe = resolve(tiny(folder, text, *sweep.MODEL, *shape), vocab_size=259)
        except UserError as error:
            yield text, str(error).replace(str(folder), "")
            continue
        yield text, planned(recipe)


def trained(arch: str, folder: Path, kept: Path | None) -> dict[str, Any]:
    """The losses of six steps, what the third checkpoint has, and the losses of a run that goes on from it (from that
    in `kept`, if an earlier tree has left one there)."""
    run, resumed = folder / "runs" / arch, folder / "resumed" / arch
    command("train", "quickstart", "--quiet", "--layout", "dp=1", "--out", run, *settings(arch, folder))
    if kept and not (kept / arch).exists():
        shutil.copytree(run, kept / arch)
    shutil.copytree(kept / arch if kept else run, resumed)
    recipe = resumed / "recipe.toml"  # an earlier tree's text, which was the same, is gone
    for name, at in (("source", folder / "text.txt"), ("cache", folder / "cache")):
        recipe.write_text(re.sub(rf'^{name} = ".*"$', f'{name} = "{at}"', recipe.read_text(), flags=re.M))
    command("train", resumed, "--quiet", "--resume-from", store.folder_of(resumed, KEPT))
    return {
        "losses": losses(run),
        "checkpoint": digest(manifest.read(store.folder_of(run, KEPT))[0].tensors),
        "resumed": losses(resumed)[-(STEPS - KEPT) :],
    }


def settings(arch: str, folder: Path) -> list[str]:
    """A small model of an architecture, and a text of its own."""
    text = folder / "text.txt"
    text.write_text("".join(f"{i} squared is {i * i}, and the next one follows. " for i in range(600)))
    own = [one for one in {**ARCHS, **MORE_ARCHS, **FURTHER}[arch] if "dropout" not in one]
    sets = [
        f"model.arch={arch}", *TINY_MODEL, *own,
        f"data.source={text}", "data.tokenizer=bytes", f"data.cache={folder / 'cache'}", "optim.warmup_steps=0",
        "train.global_batch_size=8", "train.microbatch_size=4", f"train.steps={STEPS}", "train.val_every=0",
        "train.sample_every=0", "train.sample_tokens=1", f"checkpoint.every={KEPT}", "observe.tracker=none",
    ]  # fmt: skip
    return [f"--set={one}" for one in sets]


def losses(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def command(*words: object) -> None:
    subprocess.run([sys.executable, "-m", "fivefold", *map(str, words)], check=True, capture_output=True)


def differences(before: Any, after: Any, place: str = "") -> Iterator[str]:
    """Each place where two tables differ, with both values."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted({*before, *after}):
            yield from differences(before.get(key), after.get(key), f"{place} / {key}" if place else key)
    elif before != after:
        yield f"{place}: {before} -> {after}"


if __name__ == "__main__":
    main()
