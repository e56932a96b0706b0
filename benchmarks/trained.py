"""Trains shipped recipes with real shapes on real text, and the same steps in plain PyTorch.

    python benchmarks/trained.py prepare [--bytes 8000000] [--packages torch numpy ...]
    python benchmarks/trained.py run --shape gpt2-124m --device cuda [--modes fp32 bf16] [--steps 300] [--resume]
    python benchmarks/trained.py table [--write docs/models.md]

`prepare` collects text from the standard library of this Python and from installed packages into one file, and lets
`fivefold tokenize` train the recipes' tokenizers on it (there is no download). `run` trains with `fivefold train`, then
in a process that imports PyTorch only. That one gets three things as files: the initial weights (`fivefold export` of
step 0), the batches, with BERT's masked ones, and the numbers of `[optim]`. Its model is made of PyTorch's own
`TransformerEncoderLayer`. Steps have 2,048 tokens. The first 30 losses in fp32 must agree to 1e-4 of their value, else
the exit code is 1. On a CPU a shape takes an hour or more, so both programs save every 25 steps, and `--resume` goes on
where a run was interrupted. `table` prints what the JSON holds, and what the whole recipes need, by `fivefold plan`.

In bf16 the two programs round in different places: Fivefold keeps the residual stream in bf16, autocast in fp32. So
there the yardstick is how far plain PyTorch in bf16 is from plain PyTorch in fp32.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
import sysconfig
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "trained"
OUT = ROOT / "benchmarks" / "results" / "trained.json"
PACKAGES = ["torch", "numpy", "pydantic"]
KINDS = {".py", ".md", ".rst", ".txt"}
TOKENS = 2048
"""Tokens of a step."""
SAVE_EVERY = 25
FIRST, BOUND = 30, 1e-4
"""The first losses in fp32, and how far they may be apart, relative to their value."""
MODES = ["fp32", "tf32", "bf16"]


class Shape(NamedTuple):
    recipe: str
    steps: int


SHAPES = {
    "gpt2-124m": Shape("gpt2-124m", 300),
    "bert-base": Shape("bert-base-mlm", 300),
    "gpt2-355m": Shape("gpt2-355m", 20),
}
SMALL = {"layers": 2, "dim": 64, "heads": 2, "seq_len": 128, "vocab_size": 1024, "init_std": 0.1}
"""A model of seconds on a CPU, with everything else of the recipe. Weights are larger, because a layer so narrow would
hardly leave the linear part of its GELU."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("prepare", help="collect the text and train the tokenizers")
    one.add_argument("--bytes", type=int, default=8_000_000, help="size of the text [default: 8,000,000]")
    one.add_argument("--packages", nargs="*", default=PACKAGES, help=f"installed packages [{PACKAGES}]")
    one.add_argument("--folder", type=Path, default=BUILD)
    one = commands.add_parser("run", help="train with both programs")
    one.add_argument("--shape", choices=SHAPES, required=True)
    one.add_argument("--steps", type=int, help="[default: 300; 20 of gpt2-355m]")
    one.add_argument("--device", choices=["cuda", "cpu"], required=True)
    one.add_argument("--modes", nargs="+", choices=MODES, default=["fp32"])
    one.add_argument("--small", action="store_true", help="2 layers of width 64, for a CPU")
    one.add_argument("--resume", action="store_true", help="continue an interrupted run")
    one.add_argument("--folder", type=Path, default=BUILD, help="where `prepare` has written")
    one.add_argument("--out", type=Path, help=f"[default: {OUT.relative_to(ROOT)}; needed with --small]")
    one = commands.add_parser("table", help="print results and plans as Markdown")
    one.add_argument("--out", type=Path, default=OUT)
    one.add_argument("--write", type=Path, help="also put it between the marks of this page")
    one = commands.add_parser("plain")
    one.add_argument("work", type=Path)
    one.add_argument("--device", required=True)
    one.add_argument("--mode", required=True)
    args = parser.parse_args()
    if args.command == "prepare":
        return prepare(args.folder, args.bytes, args.packages)
    if args.command == "run":
        if args.small and args.out is None:
            parser.error("--small needs --out: the default file has the real shapes")
        args.out = args.out or OUT
        return run(args)
    if args.command == "plain":
        print(json.dumps(plain(args.work, args.device, args.mode)))
        return 0
    lines = measured(json.loads(args.out.read_text())) if args.out.exists() else NOTHING
    lines += (
        "\n\nThe whole recipes, planned for 8 H100 with `dp=8`, whole sequences in attention:\n\n" + planned()
    )
    print(lines)
    if args.write:
        args.write.write_text(between(args.write.read_text(), lines))
    return 0


# The text


def prepare(folder: Path, size: int, packages: Sequence[str]) -> int:
    """Writes FOLDER/text.txt and what is in it (text.json), and trains the tokenizers of the recipes."""
    folder.mkdir(parents=True, exist_ok=True)
    places = {"stdlib": Path(sysconfig.get_paths()["stdlib"])} | {name: place_of(name) for name in packages}
    text, parts = collect(places, size)
    (folder / "text.txt").write_bytes(text)
    found = {"bytes": len(text), "sha256": hashlib.sha256(text).hexdigest(), "parts": parts}
    found["python"] = sys.version.split()[0]
    (folder / "text.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))
    for recipe in dict.fromkeys(shape.recipe for shape in SHAPES.values() if shape.recipe != "gpt2-355m"):
        fivefold(["tokenize", recipe, *sets(text_settings(folder))])
    return 0


def place_of(package: str) -> Path:
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        raise SystemExit(f"error: no package {package!r} in this environment")
    return Path(found.origin).parent


def collect(places: dict[str, Path], size: int) -> tuple[bytes, dict[str, dict[str, int]]]:
    """At most `size` bytes of the text files in these folders, an equal share of each, and what was taken. Files come
    in the order of a hash of their path below the folder, so that the same installation gives the same text."""
    taken, parts = [], {}
    for name, place in places.items():
        left, number = size // len(places), 0
        for path in sorted(text_files(place), key=lambda path: order_of(path.relative_to(place))):
            try:
                text = path.read_bytes()
                text.decode("utf-8")
            except (OSError, UnicodeDecodeError):
                continue
            if 200 <= len(text) + 2 <= left:
                taken.append(text + b"\n\n")
                left, number = left - len(text) - 2, number + 1
        parts[name] = {"files": number, "bytes": size // len(places) - left}
    return b"".join(taken), parts


def text_files(place: Path) -> Iterator[Path]:
    """Text files below a folder, without tests and without packages that are installed in it."""
    for folder, below, names in os.walk(place):
        below[:] = [name for name in below if name not in {"test", "tests", "site-packages", "__pycache__"}]
        yield from (Path(folder, name) for name in names if Path(name).suffix in KINDS)


def order_of(path: Path) -> str:
    return hashlib.sha256(path.as_posix().encode()).hexdigest()


# Both programs


def text_settings(folder: Path) -> dict[str, Any]:
    """One text without documents, so none has to be masked; nothing of it is held out."""
    return {
        "data.source": folder / "text.txt",
        "data.cache": folder / "cache",
        "data.val_fraction": 0,
        "data.document_masks": "false",
    }


def settings(args: argparse.Namespace, mode: str) -> dict[str, Any]:
    """What differs from the shipped recipe. A run that may go back saves step 0: its weights are those that plain
    PyTorch starts from."""
    from fivefold.recipe import load

    model = SMALL if args.small else {}
    seq_len = model.get("seq_len") or load(SHAPES[args.shape].recipe).model.seq_len
    return {
        **text_settings(args.folder),
        **({"data.tokenizer": "bpe:1000"} if args.small else {}),
        **{f"model.{key}": value for key, value in model.items()},
        "train.steps": args.steps or SHAPES[args.shape].steps,
        "train.global_batch_size": TOKENS // seq_len,
        "train.sample_tokens": 1,
        "precision.mode": mode,
        "faults.on_nonfinite": "rollback",
        "checkpoint.minutes": 0,
        "checkpoint.every": SAVE_EVERY,
        "checkpoint.keep_last": 1,
        "checkpoint.keep_every": 10**6,  # step 0
        "observe.tracker": "none",
    }


def sets(values: dict[str, Any]) -> list[str]:
    return [part for key, value in values.items() for part in ("--set", f"{key}={value}")]


def fivefold(arguments: Sequence[Any], device: str = "cpu") -> None:
    subprocess.run(
        [sys.executable, "-P", "-m", "fivefold", *map(str, arguments)],
        env=environment(device),
        stdout=sys.stderr,
        check=True,
    )


def environment(device: str) -> dict[str, str]:
    """This checkout comes first. A run on the CPU sees no GPU."""
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), *bare(), os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": path} | ({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {})


def bare() -> list[str]:
    """Where Fivefold is not installed: a folder that says its version, which reports print."""
    if any(metadata.distributions(name="fivefold")):
        return []
    about = BUILD / "bare" / "fivefold.dist-info" / "METADATA"
    about.parent.mkdir(parents=True, exist_ok=True)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    about.write_text(f"Metadata-Version: 2.1\nName: fivefold\nVersion: {version}\n")
    return [str(about.parents[1])]


def run(args: argparse.Namespace) -> int:
    sys.path.insert(0, str(ROOT / "src"))
    result = json.loads(args.out.read_text()) if args.out.exists() else {"shapes": {}}
    text = args.folder / "text.json"
    result["text"] = json.loads(text.read_text()) if text.exists() else {}
    work, failed = args.folder / args.shape, False
    if not args.resume:
        shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True, exist_ok=True)
    for mode in args.modes:
        pair = train_both(args, mode, work)
        shape = result["shapes"].setdefault(args.shape, {"modes": {}})
        shape |= {"recipe": SHAPES[args.shape].recipe, "small": args.small, "tokens_per_step": TOKENS}
        shape["parameters"] = pair["plain"].pop("parameters")
        shape["modes"][mode] = pair
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result).replace('"fivefold"', '\n"fivefold"') + "\n")
        apart = difference(pair["fivefold"]["losses"], pair["plain"]["losses"])
        print(args.shape, mode, json.dumps({**apart, **speeds(pair)}), flush=True)
        failed |= mode == "fp32" and not apart["first"] <= BOUND
    shutil.rmtree(work)
    if failed:
        print(f"error: the first {FIRST} losses in fp32 are more than {BOUND} apart", file=sys.stderr)
    return int(failed)


def train_both(args: argparse.Namespace, mode: str, work: Path) -> dict[str, Any]:
    """The same steps by both programs, one after the other. Initial weights and batches are those of every mode."""
    values, recipe = settings(args, mode), SHAPES[args.shape].recipe
    ran, done = work / f"run-{mode}", work / f"fivefold-{mode}.json"
    if not done.exists():
        train = ["train", recipe, "--quiet", "--layout", "dp=1", "--out", ran, "--resume-from", "auto"]
        fivefold([*train, *sets(values)], args.device)
        lines = [json.loads(line) for line in (ran / "metrics.jsonl").read_text().splitlines()]
        steps = [line for line in lines if "loss" in line]
        ours = figures(*([line[key] for line in steps] for key in ("loss", "grad_norm", "step_s")))
        if not (work / "batches.npz").exists():
            fivefold(["export", ran, work / "initial", "--step", 0])
            write_batches(recipe, values, work / "batches.npz")
        shutil.copy(ran / "recipe.toml", work)
        shutil.rmtree(ran)
        done.write_text(json.dumps(ours))
    command = [sys.executable, "-P", __file__, "plain", work, "--device", args.device, "--mode", mode]
    plain = subprocess.run(
        command, env=environment(args.device), stdout=subprocess.PIPE, text=True, check=True
    )
    return {"fivefold": json.loads(done.read_text()), "plain": json.loads(plain.stdout)}


def write_batches(recipe: str, values: dict[str, Any], path: Path) -> None:
    """All batches of the run by Fivefold's own loader: inputs and targets, (N, R, T) int32."""
    import numpy as np

    from fivefold.data import prepare as prepare_data
    from fivefold.recipe import load, resolve
    from fivefold.train.share import batches_of

    loaded = load(recipe, sets(values)[1::2], "dp=1")
    data = prepare_data(loaded)
    resolved = resolve(loaded, vocab_size=data.vocab_size)
    batches = batches_of(resolved, data)
    read: list[Any] = [batches.batch(i) for i in range(resolved.train.steps or 0)]
    assert all(batch.first is None for batch in read), "the text has no documents"
    inputs, targets = (np.stack([batch[k] for batch in read]).astype(np.int32) for k in (0, 1))
    np.savez(path, inputs=inputs, targets=targets)


def figures(losses: Sequence[float], norms: Sequence[float], seconds: Sequence[float]) -> dict[str, Any]:
    """What one program's steps came to. The speed leaves out the first steps, of which some compile."""
    rest = list(seconds)[min(10, len(seconds) // 2) :]
    return {
        "losses": [float(f"{x:.8g}") for x in losses],
        "grad_norms": [float(f"{x:.6g}") for x in norms],
        "tokens_per_s": round(TOKENS * len(rest) / sum(rest)),
        "seconds": round(sum(seconds), 1),
    }


# Plain PyTorch, in a process of its own


def plain(work: Path, device: str, mode: str) -> dict[str, Any]:
    """Trains on WORK/batches.npz from the weights in WORK/initial, by the numbers of WORK/recipe.toml."""
    import numpy as np
    import torch
    from safetensors.torch import load_file

    config = json.loads((work / "initial" / "config.json").read_text())
    optim = tomllib.loads((work / "recipe.toml").read_text())["optim"]
    stored = np.load(work / "batches.npz")
    inputs, targets = (torch.from_numpy(stored[name]).long().to(device) for name in ("inputs", "targets"))
    torch.set_float32_matmul_precision("high" if mode == "tf32" else "highest")
    model = model_of(config)
    load_weights(model, config, load_file(work / "initial" / "model.safetensors"))
    model.to(device)
    matrices, vectors = ([p for p in model.parameters() if (p.dim() > 1) == big] for big in (True, False))
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(
        groups, lr=0.0, betas=tuple(optim["betas"]), eps=optim["eps"], weight_decay=optim["weight_decay"],
        fused=device == "cuda",
    )  # fmt: skip
    losses, norms, seconds = [], [], []
    state = work / f"plain-{mode}.pt"
    if state.exists():  # interrupted
        stored = torch.load(state, map_location=device, weights_only=True)
        model.load_state_dict(stored["model"])
        optimizer.load_state_dict(stored["optimizer"])
        losses, norms, seconds = stored["figures"]
    for step in range(len(losses), len(inputs)):
        tokens, labels = inputs[step], targets[step]
        start = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = rate(step, len(inputs), optim)
        with torch.autocast(device, torch.bfloat16, enabled=mode == "bf16"):
            loss = model(tokens, labels)
        loss.backward()
        norm = clip([*model.parameters()], optim["grad_clip"])
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # waits for the device
        norms.append(norm.item())
        seconds.append(time.perf_counter() - start)
        if (step + 1) % SAVE_EVERY == 0:
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(saved | {"figures": (losses, norms, seconds)}, state.with_suffix(".new"))
            state.with_suffix(".new").rename(state)
    assert "fivefold" not in sys.modules
    found = figures(losses, norms, seconds)
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    found |= {"device": name, "torch": torch.__version__, "python": sys.version.split()[0]}
    return found | {"parameters": sum(p.numel() for p in model.parameters())}


def rate(step: int, steps: int, optim: dict[str, Any]) -> float:
    """The learning rate of a step: linear warm-up, then a cosine or a line to `min_lr` at the last step."""
    warmup, lr, low = optim["warmup_steps"], optim["lr"], optim.get("min_lr", optim["lr"] / 10)
    if step < warmup:
        return lr * (step + 1) / warmup
    done = (step + 1 - warmup) / (steps - warmup)
    shape = {"cosine": (1 + math.cos(math.pi * done)) / 2, "linear": 1 - done}[optim["schedule"]]
    return low + (lr - low) * shape


def clip(parameters: Sequence[Any], most: float) -> Any:
    """Scales the gradients so that the norm of all of them is at most `most`. Returns their norm, summed in fp64: on
    CPUs, fp32 loses a thousandth of the square of an embedding."""
    import torch

    norms = [torch.linalg.vector_norm(p.grad, dtype=torch.float64) for p in parameters]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    scale = (most / norm).clamp(max=1.0).float()
    for p in parameters:
        p.grad.mul_(scale)
    return norm


def model_of(config: dict[str, Any]) -> Any:
    """GPT-2 or BERT of a Hugging Face config, of PyTorch's own layers."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    bert = config["model_type"] == "bert"
    D, L, H, T, eps = (
        config[key]
        for key in (
            ["hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings", "layer_norm_eps"]
            if bert
            else ["n_embd", "n_layer", "n_head", "n_positions", "layer_norm_epsilon"]
        )
    )  # fmt: skip
    V = config["vocab_size"]
    gelu: Callable[..., Any] = F.gelu if bert else partial(F.gelu, approximate="tanh")

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.positions = nn.Embedding(V, D), nn.Embedding(T, D)
            self.blocks = nn.ModuleList(
                nn.TransformerEncoderLayer(
                    D, H, 4 * D, dropout=0.0, activation=gelu, layer_norm_eps=eps, batch_first=True,
                    norm_first=not bert,
                )
                for _ in range(L)
            )  # fmt: skip
            self.norm = nn.LayerNorm(D, eps)
            if bert:
                self.types, self.embed_norm = nn.Embedding(2, D), nn.LayerNorm(D, eps)
                self.transform, self.head_bias = nn.Linear(D, D), nn.Parameter(torch.zeros(V))

        def forward(self, tokens: Any, targets: Any) -> Any:
            x = self.embed(tokens) + self.positions.weight[: tokens.shape[1]]
            if bert:
                x = self.embed_norm(x + self.types(torch.zeros_like(tokens)))
                mask = None
            else:
                mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], tokens.device)
            for block in self.blocks:
                x = block(x, src_mask=mask, is_causal=not bert)
            if bert:
                masked = targets != -100
                x, targets = F.gelu(self.transform(x[masked])), targets[masked]
            logits = F.linear(self.norm(x), self.embed.weight, self.head_bias if bert else None)
            return F.cross_entropy(logits.float().flatten(0, -2), targets.flatten())

    return Plain()


def load_weights(model: Any, config: dict[str, Any], weights: dict[str, Any]) -> None:
    """Fills the model with the tensors of a Hugging Face folder, each of which must be used."""
    import torch

    bert, own = config["model_type"] == "bert", {}
    weights = dict(weights)

    def take(name: str, theirs: str, *kinds: str, transposed: bool = False) -> None:
        for kind in kinds or ("weight", "bias"):
            one = weights.pop(f"{theirs}.{kind}")
            own[f"{name}.{kind}"] = one.t() if transposed else one

    if bert:
        table = "bert.embeddings"
        take("embed", f"{table}.word_embeddings", "weight")
        take("positions", f"{table}.position_embeddings", "weight")
        take("types", f"{table}.token_type_embeddings", "weight")
        take("embed_norm", f"{table}.LayerNorm")
        take("transform", "cls.predictions.transform.dense")
        take("norm", "cls.predictions.transform.LayerNorm")
        own["head_bias"] = weights.pop("cls.predictions.bias")
    else:
        take("embed", "transformer.wte", "weight")
        take("positions", "transformer.wpe", "weight")
        take("norm", "transformer.ln_f")
    names = (
        "attention.output.dense attention.output.LayerNorm intermediate.dense output.dense output.LayerNorm"
        if bert
        else "attn.c_proj ln_1 mlp.c_fc mlp.c_proj ln_2"
    ).split()
    mine = ("self_attn.out_proj", "norm1", "linear1", "linear2", "norm2")
    for i in range(len(model.blocks)):
        theirs = f"bert.encoder.layer.{i}" if bert else f"transformer.h.{i}"
        for name, other in zip(mine, names, strict=True):
            take(f"blocks.{i}.{name}", f"{theirs}.{other}", transposed=not bert)
        for kind in ("weight", "bias"):
            if bert:
                whole = torch.cat(
                    [weights.pop(f"{theirs}.attention.self.{x}.{kind}") for x in ("query", "key", "value")]
                )
            else:
                whole = weights.pop(f"{theirs}.attn.c_attn.{kind}").t()
            own[f"blocks.{i}.self_attn.in_proj_{kind}"] = whole
    assert not weights, f"not used: {[*weights]}"
    model.load_state_dict(own)


# The result


def difference(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """How far two curves are apart: the largest and the mean |difference|, and the largest one of the first steps
    relative to the loss."""
    apart = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
    first = most(d / b for d, b in zip(apart[:FIRST], theirs[:FIRST], strict=True))
    return {"largest": most(apart), "mean": sum(apart) / len(apart), "first": first}


def most(values: Iterable[float]) -> float:
    """The largest; NaN if any is."""
    found = [*values]
    return next((value for value in found if value != value), max(found))


def speeds(pair: dict[str, Any]) -> dict[str, Any]:
    found = {f"{name}_tokens_per_s": each["tokens_per_s"] for name, each in pair.items()}
    return found | {f"{name}_seconds": each["seconds"] for name, each in pair.items()}


BEGIN, END = "<!-- trained: written by benchmarks/trained.py table --write -->", "<!-- /trained -->"
NOTHING = "No run of these is recorded yet."


def measured(result: dict[str, Any]) -> str:
    """What `run` found, as Markdown."""
    head = (
        f"| Recipe | Precision | Steps | Loss, first to last | Loss of plain PyTorch | First {FIRST} losses, relative "
        "| Largest difference | Mean difference | tok/s | tok/s of plain PyTorch |"
    )
    lines, machines, yardsticks = [head, "|" + "---|" * 10], dict[str, None](), list[str]()
    for shape in result["shapes"].values():
        exact = shape["modes"].get("fp32", {}).get("plain", {}).get("losses", ())
        for mode, pair in shape["modes"].items():
            ours, theirs = pair["fivefold"]["losses"], pair["plain"]["losses"]
            apart = difference(ours, theirs)
            on_cpu = pair["plain"]["device"].startswith("CPU")  # for hours, beside other programs
            rates = [pair[name]["tokens_per_s"] for name in ("fivefold", "plain")]
            speed = " | ".join("" if on_cpu else f"{rate:,}" for rate in rates)
            lines.append(
                f"| `{shape['recipe']}` | {mode} | {len(ours)} | {ours[0]:.4f} to {ours[-1]:.4f} | {theirs[0]:.4f} to "
                f"{theirs[-1]:.4f} | {apart['first']:.1e} | {apart['largest']:.1e} | {apart['mean']:.1e} | {speed} |"
            )
            machines[f"{pair['plain']['device']}, PyTorch {pair['plain']['torch']}"] = None
            if mode == "bf16" and len(exact) == len(ours):
                yardsticks.append(yardstick(shape["recipe"], ours, theirs, exact))
    text = result["text"]
    parts = ", ".join(f"{each['bytes'] / 1e6:.1f} MB of {name}" for name, each in text["parts"].items())
    note = f"Measured on {'; '.join(machines)}. The text: {parts} (SHA-256 `{text['sha256'][:16]}...`)."
    return "\n".join([*lines, "", note, *yardsticks])


def yardstick(recipe: str, ours: Sequence[float], theirs: Sequence[float], exact: Sequence[float]) -> str:
    """How far both programs in bf16 are from plain PyTorch in fp32."""
    plain_, own = difference(theirs, exact), difference(ours, exact)
    return (
        f"`{recipe}` in bf16 beside plain PyTorch in fp32: plain PyTorch differs by {plain_['mean']:.1e} in the mean "
        f"and {plain_['largest']:.1e} at most, Fivefold by {own['mean']:.1e} and {own['largest']:.1e}."
    )


def planned() -> str:
    """What the whole recipe needs on 8 H100, by `fivefold plan`, as Markdown."""
    lines = ["| Recipe | Tokens | tok/s on 8 H100, planned | MFU | Days | Device-hours |", "|" + "---|" * 6]
    for shape in SHAPES.values():
        command = ["plan", shape.recipe, "--cluster", "h100:8", "--layout", "dp=8", "--price", 1, "--json"]
        done = subprocess.run(
            [sys.executable, "-P", "-m", "fivefold", *map(str, command)],
            env=environment("cpu"), stdout=subprocess.PIPE, text=True, check=True,
        )  # fmt: skip
        plan = json.loads(done.stdout)
        budget = plan["budget"]
        lines.append(
            f"| `{shape.recipe}` | {budget['tokens'] / 1e9:,.0f} billion | {plan['tokens_per_s'] / 1e6:.2f} million | "
            f"{100 * plan['mfu']:.0f}% | {budget['days']:.2g} | {budget['device_hours']:.3g} |"
        )
    return "\n".join(lines)


def between(page: str, lines: str) -> str:
    """The page with these lines between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    assert END in rest, f"the page lacks {BEGIN} and {END}"
    return f"{before}{BEGIN}\n\n{lines}\n\n{END}{after}"


if __name__ == "__main__":
    sys.exit(main())
