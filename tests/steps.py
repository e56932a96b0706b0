"""A real step of training on ranks of the pool: what it sends, and what memory it takes."""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fivefold.data import prepare
from fivefold.data.batches import NOT_COUNTED
from fivefold.launch.ranks import Ranks
from fivefold.models import predicted
from fivefold.precision import PRECISIONS
from fivefold.recipe import Recipe, change, load, resolve
from fivefold.sharding.layout import Layout
from fivefold.step.state import State, build_state
from fivefold.step.step import take_step
from fivefold.train.share import batches_of, share_of
from fivefold_plan.cluster.clusters import parse
from fivefold_plan.predict import apart, for_recipe
from fivefold_plan.setting import FIVEFOLD_CPU, Setting, setting
from fivefold_plan.trace.memory import Tracker, states_of
from fivefold_plan.trace.step import firsts
from fivefold_plan.trace.traffic import Collectives

V = 2048
MODEL = [
    "model.layers=6", "model.dim=192", "model.heads=6", "model.kv_heads=6", "model.ffn_dim=512", "model.seq_len=256",
    f"model.vocab_size={V}", "train.microbatch_size=2", "train.sample_every=0", "train.steps=4",
    "optim.warmup_steps=0", "observe.tracker=none",
]  # fmt: skip
EXPERTS = ["model.experts=4", "model.expert_ffn_dim=256"]
CASES = [
    ("llama", "fp32", "dp=1"), ("llama", "bf16", "dp=1"), ("llama", "bf16", "dp=1,recompute=selective"),
    ("llama", "bf16", "dp=1,recompute=ops:attention+gate+norm"),
    ("llama", "fp32", "dp=1,recompute=full"), ("gpt2", "bf16", "dp=1"), ("bert", "fp32", "dp=1"),
    ("llama", "bf16", "dp=2"), ("llama", "fp32", "dp=2,zero=1"), ("llama", "bf16", "dp=2,zero=1"),
    ("llama", "bf16", "dp=2,zero=2"), ("llama", "fp32", "dp=2,zero=3"), ("llama", "bf16", "dp=2,zero=3"),
    ("llama", "bf16", "dp=2,zero=3,recompute=full"), ("llama", "bf16", "tp=2"), ("llama", "fp32", "tp=2,sp=true"),
    ("llama", "bf16", "tp=2,sp=true,recompute=selective"), ("gpt2", "bf16", "tp=2,sp=true"), ("bert", "bf16", "tp=2"),
    ("llama", "bf16", "cp=2"), ("llama", "fp32", "cp=2,cp_method=ulysses"), ("llama", "bf16", "pp=2"),
    ("llama", "fp32", "pp=2,schedule=zbv,virtual_stages=2"), ("moe", "fp32", "dp=1"), ("moe", "bf16", "dp=2,ep=2"),
    ("llama", "bf16", "dp=4,zero=3"), ("llama", "fp32", "dp_replicate=2,dp_shard=2,zero=2"),
    ("llama", "bf16", "dp=2,tp=2,sp=true,zero=1"), ("llama", "bf16", "cp=4"), ("llama", "bf16", "pp=2,dp=2,zero=1"),
    ("llama", "fp32", "pp=4"), ("moe", "bf16", "dp=4,ep=2,zero=3"), ("llama", "bf16", "pp=2,dp=2,tp=2,zero=3"),
    ("llama", "bf16", "pp=2,cp=2,tp=2,sp=true"), ("llama", "fp32", "dp=8,zero=3,recompute=selective"),
]  # fmt: skip
"""Runs whose memory is compared (benchmarks/planner/own_memory.py): model, dtype, layout."""


def recipe_of(arch: str, mode: str, layout: str, *overrides: str) -> Recipe:
    """Three microbatches of two sequences; a pipeline twice as many as it has ranks."""
    kind = [f"model.arch={arch}", *(EXPERTS if arch in ("moe", "deepseek") else [])]
    sets = [*MODEL, *kind, f"precision.mode={mode}", "train.global_batch_size=64", *overrides]
    recipe = load("quickstart", sets, layout)
    axes = Layout.from_recipe(recipe.layout)
    rows = 2 * axes.dp * (2 * axes.pp if axes.pp > 1 else 3)
    return resolve(change(recipe, [f"train.global_batch_size={rows}"]), vocab_size=V)


@dataclass
class Step:
    """What a rank had: calls and bytes by operation and axis, the peak of tracked bytes, and what it was made of."""

    sent: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    peak: int = 0
    at_peak: dict[str, int] = field(default_factory=dict)


class Evenly(TorchDispatchMode):
    """Every expert is chosen equally often, over the ranks of an expert group. In place: nothing is allocated."""

    def __init__(self, index: int):
        super().__init__()
        self.index = index

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.topk.default:
            chosen, experts = out[1], args[0].shape[-1]
            numbers = torch.arange(chosen.numel()) + self.index * chosen.numel()
            chosen.copy_((numbers % experts).view(chosen.shape))
        return out


def counted(rank: int, world: int, recipe: Recipe, evenly: bool = True) -> Step:
    """The second step of a recipe, on its data. The first one makes what it finds there: of one microbatch a rank."""
    data = prepare(recipe)
    recipe = resolve(recipe, vocab_size=data.vocab_size)
    state, found = _state(rank, world, recipe), Step()
    batches = batches_of(recipe, data)
    step = _steps(state, recipe, batches, evenly)
    step(None, (recipe.train.microbatch_size or 1) * state.mesh.axis("dp").size)
    with Collectives(state.mesh) as sent:
        step(None)
    assert not sent.other, f"sent past an axis: {sent.other}"
    found.sent = {key: (calls, size) for key, (calls, size) in sent.found.items()}
    return found


def tracked(rank: int, world: int, recipe: Recipe) -> Step:
    """The second step of a resolved recipe, on random tokens."""
    state, found = _state(rank, world, recipe), Step()
    step = _steps(state, recipe, Numbers(recipe), True)
    step(None)
    tracker = Tracker(states_of(state))
    step(tracker)
    peak = tracker.peak()
    found.peak, found.at_peak = peak.total, peak.at_peak
    return found


class Numbers:
    """Batches of random tokens; BERT's have as many targets as its data has. Sequences have the documents of a
    trace."""

    def __init__(self, recipe: Recipe):
        self.model, self.masks = recipe.model, recipe.data.document_masks

    def batch(self, i: int, rows: range) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        V, T = self.model.vocab_size or 0, self.model.seq_len
        block = np.random.default_rng((i, rows.start)).integers(0, V, (len(rows), T + 1))
        inputs, targets = np.ascontiguousarray(block[:, :-1]), np.ascontiguousarray(block[:, 1:])
        if self.model.arch == "bert":
            hidden = np.full_like(targets, NOT_COUNTED)
            every = np.linspace(0, T, predicted("mlm", T), endpoint=False).astype(int)
            hidden[:, every] = targets[:, every]
            targets = hidden
        return inputs, targets, firsts(len(rows), T) if self.masks else None


def take(ranks: Ranks, recipe: Recipe, batches, evenly: bool = True):
    """A resolved recipe's mesh on these ranks, and the function that takes its next step."""
    torch.manual_seed(0)
    state = build_state(recipe, ranks)
    return state.mesh, _steps(state, recipe, batches, evenly)


def _state(rank: int, world: int, recipe: Recipe) -> State:
    torch.manual_seed(0)
    return build_state(recipe, Ranks(rank, world, rank, world, torch.device("cpu")))


def _steps(state: State, recipe: Recipe, batches, evenly: bool):
    train, mesh = recipe.train, state.mesh

    def step(mode, rows: int = train.global_batch_size) -> None:
        share = share_of(batches, state.step, rows, train.microbatch_size or 1, mesh)
        modes = [Evenly(mesh.index("ep"))] if evenly and recipe.model.experts else []
        with _all([*modes, *([mode] if mode else [])]):
            take_step(state, recipe, share)

    return step


class _all:
    """Several context managers, the last innermost."""

    def __init__(self, modes):
        self.modes = modes

    def __enter__(self):
        for mode in self.modes:
            mode.__enter__()

    def __exit__(self, *error):
        for mode in reversed(self.modes):
            mode.__exit__(*error)


def planned(recipe: Recipe) -> Setting:
    """What the planner knows of a recipe's step. Unresolved recipes get the vocabulary of their data."""
    if recipe.model.vocab_size is None:
        recipe = resolve(recipe, vocab_size=prepare(recipe).vocab_size)
    layout, B = Layout.from_recipe(recipe.layout), recipe.train.microbatch_size or 1
    count = -(-recipe.train.global_batch_size // (layout.dp * B))  # of the ranks with most
    software = for_recipe(FIVEFOLD_CPU, recipe)
    mode = PRECISIONS.get(recipe.precision.mode)
    device = (
        "a100" if mode and mode.kernel else "h100"
    )  # which multiplies no 8 bits, as this machine does not
    whole = setting(recipe.model, layout, parse(device), B, count, recipe.precision.mode, software)
    return apart(whole, recipe.replica_groups) if recipe.replica_groups.count > 1 else whole
