"""Document masks and best-fit packing: training speed, tokens lost and documents cut, validation loss.

    python benchmarks/document_masks.py PATH/TO/tinyshakespeare.txt [--parts kernel speed ...] [--out FILE.json]

The text is cut into documents of whole lines. Their lengths are drawn from an exponential distribution, and their
order is shuffled, so neighbours in a sequence have nothing to do with each other. Short documents have an eighth of a
sequence on average, long ones two sequences.

- speed: the common work of `train_speed.py`, with sequences of 256 and of 2048 tokens. One process holds one model.
  Steps with masks, without and with packing take turns on it, on sequences of the same text. Ratios are taken within a
  round.
- packing: targets that no sequence has, places without a target, documents cut that would have fitted into a
  sequence.
- loss: a small Llama, equal numbers of places in each run, several seeds. All runs are judged alike: by the mean loss
  of held-out documents, each read by itself (`fivefold eval`). Beside it the validation loss of the run itself, where a
  sequence holds several documents. `--runs N` ends after N runs; what --out has is not run again.

- kernel: processor time of attention alone on one core, forward and backward, over documents that change from call to
  call, beside that of whole sequences and beside the share of the scores that its tiles have.
- plan: seconds per step of `fivefold train`, predicted and measured. `fivefold bench hardware` measures the machine
  first, into a cache of its own.

About a minute for speed and packing and three for plan, which should run alone, and half a minute for each of the 18
runs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from train_speed import WARM_UP, B, D, F, H, L, V

SHAPES = {"T 256": (256, B, 8), "T 2048": (2048, 2, 1)}  # tokens, sequences of a batch and of a microbatch
TEXTS = {"short": 1 / 8, "long": 2.0}  # mean length of a document, in sequences
WAYS = {"off": (False, "concat"), "on": (True, "concat"), "packed": (True, "best_fit")}
PLANNED = [
    ("T 256", "short", True),
    *(("T 2048", *case) for case in (("short", False), ("short", True), ("long", True))),
]
LOSS = {"layers": 4, "dim": 192, "heads": 4, "seq_len": 256, "tie_embeddings": "true"}
STEPS, VOCABULARY = 300, 2048


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("text", type=Path)
    parser.add_argument("--parts", nargs="*", default=["kernel", "speed", "packing", "plan", "loss"])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--runs", type=int, default=1000, help="of the part loss, at most")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if not args.text.is_file():
        parser.error(f"{args.text}: no such file; give the path of tinyshakespeare.txt")
    found: dict[str, Any] = json.loads(args.out.read_text()) if args.out and args.out.exists() else {}
    with tempfile.TemporaryDirectory(prefix="fivefold-masks-") as folder:
        if {"speed", "packing"} & {*args.parts}:
            measured = [(shape, text, prepared(args.text, Path(folder), *SHAPES[shape], text)) for shape in SHAPES
                        for text in TEXTS]  # fmt: skip
            for part, work in (("packing", packing), ("speed", lambda recipes: speed(recipes, args.rounds))):
                if part in args.parts:
                    found[part] = {f"{shape}, {text}": work(recipes) for shape, text, recipes in measured}
        if "kernel" in args.parts:
            found["kernel"] = {
                f"{shape}, {text}": kernel(*SHAPES[shape], text) for shape in SHAPES for text in TEXTS
            }
        if "plan" in args.parts:
            found["plan"] = plans(args.text, Path(folder))
        save(found, args.out)
        if "loss" in args.parts:
            for _ in losses(args.text, Path(folder), args.seeds, args.runs, found.setdefault("loss", {})):
                save(found, args.out)
    print(report(found))


def save(found: dict[str, Any], out: Path | None) -> None:
    from fivefold.host.machine import describe

    if out:
        out.write_text(json.dumps(found | {"machine": describe()}, indent=1) + "\n")


def documents_of(text: str, characters: float) -> list[str]:
    """The text as documents of whole lines, of so many characters on average, shuffled."""
    dice, found = random.Random(0), [""]
    wanted = dice.expovariate(1 / characters)
    for line in text.splitlines(keepends=True):
        if found[-1] and len(found[-1]) + len(line) / 2 > wanted:
            found.append("")
            wanted = dice.expovariate(1 / characters)
        found[-1] += line
    found = [one for one in found if one.strip()]
    dice.shuffle(found)
    return found


def write(documents: list[str], path: Path) -> None:
    path.write_text("".join(json.dumps({"text": one}) + "\n" for one in documents))


PER_TOKEN = 3.2  # characters of this text, by a BPE of a few thousand tokens


def prepared(text: Path, folder: Path, T: int, batch: int, microbatch: int, kind: str) -> dict[str, Any]:
    """The common work on this text, in each way: recipe and data."""
    from fivefold.data import prepare
    from fivefold.recipe import load, resolve

    sets, found = common(text, folder, T, batch, microbatch, kind), {}
    for way, (masks, packed) in WAYS.items():
        own = [f"data.document_masks={str(masks).lower()}", f"data.packing={packed}"]
        recipe = load("quickstart", sets + own, "dp=1")
        data = prepare(recipe)
        found[way] = resolve(recipe, vocab_size=data.vocab_size), data
    return found


def common(text: Path, folder: Path, T: int, batch: int, microbatch: int, kind: str) -> list[str]:
    """The common work on this text, as settings of the recipe quickstart."""
    path = folder / f"{kind}-{T}.jsonl"
    write(documents_of(text.read_text(encoding="utf-8"), TEXTS[kind] * T * PER_TOKEN), path)
    shape = {"layers": L, "dim": D, "heads": H, "ffn_dim": F, "seq_len": T}
    sets = [f"model.{key}={value}" for key, value in shape.items()]
    sets += [f"data.source={path}", f"data.tokenizer=bpe:{V}", f"data.cache={folder}", "data.val_fraction=0"]
    sets += [f"train.global_batch_size={batch}", f"train.microbatch_size={microbatch}", "train.steps=1000"]
    return [*sets, "precision.mode=bf16"]


def speed(recipes: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Tokens per second of each way, and how many times as fast as without masks, within a round."""
    import torch

    from fivefold.host.machine import keep_freed_memory
    from fivefold.launch import ranks as ranks_
    from fivefold.step.state import build_state
    from fivefold.step.step import take_step
    from fivefold.train.share import batches_of, share_of

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    keep_freed_memory()
    seconds: dict[str, list[float]] = {way: [] for way in recipes}
    with ranks_.join() as ranks:
        recipe = recipes["off"][0]
        state, train = build_state(recipe, ranks), recipe.train
        batches = {way: batches_of(*one) for way, one in recipes.items()}
        for number in range(WARM_UP + rounds):
            order = list(batches) if number % 2 else list(reversed(batches))
            for way in order:
                share = share_of(
                    batches[way], number, train.global_batch_size, train.microbatch_size, state.mesh
                )
                began = time.perf_counter()
                take_step(state, recipe, share)
                seconds[way].append(time.perf_counter() - began)
    tokens = train.global_batch_size * recipe.model.seq_len
    kept = {way: times[WARM_UP:] for way, times in seconds.items()}
    return {
        way: {
            "tokens_per_s": tokens / median(times),
            "x off": median(off / own for off, own in zip(kept["off"], times, strict=True)),
            "quartiles": quartiles([off / own for off, own in zip(kept["off"], times, strict=True)]),
        }
        for way, times in kept.items()
    }  # fmt: skip


def quartiles(values: list[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered[len(ordered) // 4], ordered[-1 - len(ordered) // 4]]


def kernel(T: int, batch: int, microbatch: int, kind: str, calls: int = 12) -> dict[str, float]:
    """Processor time of attention over documents, and their share of the scores, by those of whole sequences."""
    import torch

    from fivefold.kernels.blockwise_attention import Documents, qkv_attention
    from fivefold.kernels.tiling import assumed

    torch.set_num_threads(1)
    sample = assumed(T, TEXTS[kind] * T)
    firsts = sample.tiling.first_BT[: microbatch * calls].reshape(-1, microbatch, T)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for first in firsts:
        for masked in seconds:
            documents = Documents(first) if masked else None
            qkv = torch.randn(microbatch, T, 3 * D, dtype=torch.bfloat16, requires_grad=True)
            began = time.process_time()
            out = qkv_attention(qkv, H, H, None, None, True, False, documents)
            out.backward(torch.ones_like(out))
            seconds[masked].append(time.process_time() - began)
    some = len(firsts) // 4  # the first calls make the programs of their shapes
    time_of = {masked: median(times[some:]) for masked, times in seconds.items()}
    return {"seconds": time_of[True] / time_of[False], "scores": sample.computed(microbatch, True, 2)}


def packing(recipes: dict[str, Any]) -> dict[str, Any]:
    """What plain cutting and packing make of the documents."""
    from fivefold.data.dataset import Packed, cut_of, end_of, pieces

    (recipe, data), T = recipes["packed"], recipes["packed"][0].model.seq_len
    end, n = end_of(recipe, data), len(data.train)
    assert end is not None
    starts, lengths = pieces(data.train, n + 1, end)  # of whole documents
    stops = starts + lengths
    fits = lengths <= T
    plain = cut_of(*recipes["on"][:2], tokens=data.train)
    packed = cut_of(recipe, data, data.train)
    assert isinstance(packed, Packed)
    cut = fits & (starts // T != (stops - 1) // T)
    whole = dict(zip(packed.starts.tolist(), packed.lengths.tolist(), strict=True))
    ours = starts[fits].tolist(), lengths[fits].tolist()
    return {
        "documents": len(lengths),
        "tokens": n,
        "mean_tokens": float(lengths.mean()),
        "longer_than_a_sequence": float((~fits).mean()),
        "concat": {
            "targets_lost": 1 - plain.count * T / n,
            "places_empty": 0.0,
            "fitting_documents_cut": float(cut.sum() / max(1, fits.sum())),
        },
        "best_fit": {
            "targets_lost": 1 - float(packed.lengths.sum()) / n,
            "places_empty": 1 - packed.fill,
            "fitting_documents_cut": fmean(whole.get(a, 0) != b for a, b in zip(*ours, strict=True)),
        },
    }


def plans(text: Path, folder: Path) -> dict[str, Any]:
    """Seconds per step with and without masks, as plan.json has them."""
    command, found = [sys.executable, "-m", "fivefold.cli.main"], {}
    environment = os.environ | {"FIVEFOLD_CACHE": str(folder / "machine")}
    subprocess.run(
        [*command, "bench", "hardware", "--json"], check=True, env=environment, stdout=subprocess.DEVNULL
    )
    for shape, kind, masks in PLANNED:
        sets = common(text, folder, *SHAPES[shape], kind)
        sets += [f"data.document_masks={str(masks).lower()}", "train.val_every=0", "train.sample_every=0"]
        run = folder / f"{shape}-{kind}-{masks}"
        options = [part for one in [*sets, "train.steps=14"] for part in ("--set", one)]
        train = ["train", "quickstart", "--layout", "dp=1", "--nproc", "1", "--out", str(run), *options]
        subprocess.run([*command, *train], check=True, env=environment, stdout=subprocess.DEVNULL)
        plan = json.loads((run / "plan.json").read_text())
        said, came = plan["predicted"]["time"]["step_s"], plan["measured"]["step_s"]
        row = {"predicted_s": said, "measured_s": came, "error": said / came - 1}
        found[f"{shape}, {kind}, masks {'on' if masks else 'off'}"] = row | plan["predicted"].get(
            "attention", {}
        )
    return found


def losses(text: Path, folder: Path, seeds: int, most: int, found: dict[str, Any]) -> Iterator[None]:
    """Trains what is missing in `found`."""
    wanted = [(kind, seed, way) for kind in TEXTS for seed in range(seeds) for way in WAYS]
    for kind, seed, way in [one for one in wanted if " ".join(map(str, one)) not in found][:most]:
        documents = documents_of(text.read_text(encoding="utf-8"), TEXTS[kind] * LOSS["seq_len"] * PER_TOKEN)
        held_out = len(documents) // 10
        write(documents[held_out:], folder / f"{kind}.jsonl")
        write(documents[:held_out], folder / f"{kind}-held-out.jsonl")
        found[f"{kind} {seed} {way}"] = trained(folder, kind, seed, way)
        print(kind, seed, way, json.dumps(found[f"{kind} {seed} {way}"]), flush=True)
        yield


def trained(folder: Path, kind: str, seed: int, way: str) -> dict[str, float]:
    """Trains, and judges the model."""
    from fivefold.train.evaluate import evaluate

    run, (masks, packed) = folder / f"{kind}-{seed}-{way}", WAYS[way]
    recipe = folder / f"{kind}-{seed}-{way}.toml"
    recipe.write_text(
        '[model]\narch = "llama"\ninit_std = 0.05\n'
        + "".join(f"{key} = {value}\n" for key, value in LOSS.items())
        + f'[data]\nsource = "{folder / kind}.jsonl"\ntokenizer = "bpe:{VOCABULARY}"\ncache = "{folder}"\n'
        f'val_fraction = 0.0\ndocument_masks = {str(masks).lower()}\npacking = "{packed}"\n'
        f'[[data.validation]]\nname = "held-out"\nsource = "{folder / kind}-held-out.jsonl"\n'
        f"[train]\nsteps = {STEPS}\nglobal_batch_size = 16\nval_every = {STEPS}\nval_sequences = 512\nseed = {seed}\n"
        'sample_every = 0\n[optim]\nlr = 2.5e-3\nschedule = "wsd"\n'
    )
    command = [
        sys.executable,
        "-m",
        "fivefold.cli.main",
        "train",
        str(recipe),
        "--nproc",
        "1",
        "--out",
        str(run),
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    own = [line["val_loss"] for line in lines if "val_loss" in line][-1]
    (alone,) = evaluate(run, [folder / f"{kind}-held-out.jsonl"])["texts"]
    return {"documents_alone": alone["nats"] / alone["tokens"], "as_trained": own}


def report(found: dict[str, Any]) -> str:
    lines = []
    for where, ways in found.get("speed", {}).items():
        for way, one in ways.items():
            low, high = one["quartiles"]
            lines.append(
                f"{where:14} {way:7} {one['tokens_per_s']:8,.0f} tok/s  x {one['x off']:.3f} ({low:.3f} to {high:.3f})"
            )
    for where, one in found.get("packing", {}).items():
        lines.append(f"{where}: {one['documents']:,} documents of {one['mean_tokens']:.0f} tokens on average")
        for name in ("concat", "best_fit"):
            shares = ", ".join(f"{what.replace('_', ' ')} {100 * x:.2f}%" for what, x in one[name].items())
            lines.append(f"  {name}: {shares}")
    for where, one in found.get("kernel", {}).items():
        lines.append(
            f"{where}: attention takes x {one['seconds']:.2f}, with x {one['scores']:.2f} of the scores"
        )
    for where, one in found.get("plan", {}).items():
        said = f"predicted {one['predicted_s']:.3f} s, measured {one['measured_s']:.3f} s ({100 * one['error']:+.1f}%)"
        lines.append(
            f"{where}: {said}"
            + (f", {100 * one['work']:.0f}% of the work of attention" if "work" in one else "")
        )
    runs = found.get("loss", {})
    for kind in TEXTS:
        for way in WAYS:
            mine = [run for name, run in runs.items() if name.split()[::2] == [kind, way]]
            for what in ("documents_alone", "as_trained") if len(mine) > 1 else ():
                values = [run[what] for run in mine]
                lines.append(
                    f"loss, {kind} {way:7} {what:16} {fmean(values):.4f} +- {stdev(values):.4f} ({len(values)} seeds)"
                )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
