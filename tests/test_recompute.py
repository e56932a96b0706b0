"""Recompute: the gradients of recompute=none bit for bit, dropout included, and less memory."""

from typing import get_args

import pytest
import torch
from ranks import run_ranks
from runs import ranks_of
from torch.utils._python_dispatch import TorchDispatchMode

from fivefold.kernels import matmul
from fivefold.models.build import build
from fivefold.models.operations import Role
from fivefold.models.recomputation import MODES, REGIONS, region
from fivefold.parallel import recompute
from fivefold.recipe import Recipe, change, load, resolve
from fivefold.recipe.schema import LayoutSection
from fivefold.spread.layout import Layout
from fivefold.step.state import build_state
from fivefold.step.step import forward_backward
from fivefold.trace.memory import Tracker

TINY = [
    "model.layers=4", "model.dim=32", "model.heads=4", "model.kv_heads=4", "model.seq_len=32", "model.vocab_size=128",
    "model.dropout=0.1", "train.global_batch_size=8", "train.microbatch_size=2", "precision.mode=fp32",
    "train.sample_every=0",
]  # fmt: skip
LAYOUTS = [
    "dp=1", "dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "tp=2", "tp=2,sp=true",
    "tp=2,sp=true,sp_regather=true", "cp=2",
    "cp=2,cp_method=ulysses", "pp=2,schedule=1f1b", "pp=2,schedule=zbv,virtual_stages=2", "dp=2,tp=2,zero=3",
    "dp=2,ep=2",
]  # fmt: skip


def recipe_of(layout: str, *overrides: str) -> Recipe:
    base = [o for o in TINY if "ep=" not in layout or "kv_heads" not in o]
    moe = ["model.arch=moe", "model.experts=4", "model.experts_per_token=2"] if "ep=" in layout else []
    return resolve(load("quickstart", [*base, *moe, *overrides], layout), vocab_size=128)


def gradients(rank: int, world: int, recipe: Recipe) -> dict[str, torch.Tensor]:
    """This rank's gradients after two steps' backward, of which the second starts from the same weights."""
    state = build_state(recipe, ranks_of(rank, world))
    tokens = torch.arange(8 * 33).view(8, 33) * 7919 % 128
    dp, T = state.mesh.index("dp"), state.parallel.positions
    rows = tokens[8 // state.mesh.size("dp") * dp :][: 8 // state.mesh.size("dp")]
    inputs, targets = rows[:, :-1], rows[:, 1:]
    if T is not None:
        inputs, targets = inputs[:, T], targets[:, T]
    microbatches = [(inputs[i : i + 2], targets[i : i + 2]) for i in range(0, len(rows), 2)]
    try:
        for _ in range(2):
            forward_backward(state, microbatches, 0)
        return {name: gradient.clone() for name, gradient in state.gradients().items()}
    finally:
        for replica in state.parallel.replicas:
            replica.close()


@pytest.mark.parametrize("how", ["full", "selective"])
@pytest.mark.parametrize("arch", ["llama", "gpt2", "bert", "qwen3", "olmo2"])
@pytest.mark.parametrize("mode", ["fp32", "bf16"])
def test_gradients_are_those_of_none_on_one_process(arch, how, mode):
    recipe = recipe_of("dp=1", f"model.arch={arch}", f"precision.mode={mode}")
    wanted = gradients(0, 1, recipe)
    got = gradients(0, 1, change(recipe, [f"layout.recompute={how}"]))
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)
    assert all(g.norm() > 0 for g in wanted.values())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_those_of_none_on_every_axis(layout):
    """With dropout 0.1, whatever is computed again and whatever talks while it is."""
    recipe = recipe_of(layout)
    world = Layout.from_recipe(recipe.layout).ranks
    wanted = run_ranks(world, gradients, recipe, timeout_s=60)
    for how in ("full", "selective"):
        got = run_ranks(world, gradients, change(recipe, [f"layout.recompute={how}"]), timeout_s=60)
        for rank in range(world):
            wrong = [n for n in wanted[rank] if not torch.equal(got[rank][n], wanted[rank][n])]
            assert not wrong, f"{how}, rank {rank}: {wrong}"


def kept(how: str) -> tuple[int, dict[str, int]]:
    """Bytes alive between forward and backward, and how often parts of a block have computed to their end."""
    recipe = recipe_of("dp=1", "model.dropout=0.0", "model.seq_len=256", "model.layers=4")
    module = build(recipe.model, device="cpu", seed=0)
    recompute.apply(module, how)  # type: ignore[arg-type]
    calls: dict[str, int] = {}
    for name, part in module.named_modules():
        if name.startswith("blocks.1."):
            part.register_forward_hook(lambda *_, name=name[9:]: calls.update({name: calls.get(name, 0) + 1}))
    tokens = torch.arange(2 * 256).view(2, 256) % 128
    with Tracker() as tracker:
        loss = module(tokens, tokens)
        size = tracker.made()
    loss.backward()
    return size, calls


def test_what_is_kept_and_what_is_computed_again():
    """Less is kept, the more is computed again; "selective" repeats no matrix product of the layers."""
    none, once = kept("none")
    selective, some = kept("selective")
    full, twice = kept("full")
    assert full < 0.5 * selective
    assert selective < 0.8 * none
    assert once == dict.fromkeys(once, 1)
    assert some["attention.core"] == 2
    assert [some[name] for name in ("attention.qkv", "mlp.gate_up", "norm1", "norm2")] == [1] * 4
    assert [twice[name] for name in ("attention.qkv", "attention.out", "mlp.gate_up", "norm1")] == [2] * 4
    assert some["attention.out"] == some["mlp.down"] == twice["mlp.down"] == 1, "stopped before the last one"


def test_what_is_computed_again_stops_before_a_product(monkeypatch):
    """The last product of what is repeated is not, whether oneDNN or MKL computes it."""
    counts = {}
    for way in ("onednn", "mkl"):
        if way == "mkl":
            monkeypatch.setattr(matmul, "_onednn", lambda x, weight: False)
        for how in ("none", "selective", "full"):
            counts[way, how] = products(how)
    assert counts["onednn", "none"] == counts["mkl", "none"]
    assert counts["onednn", "selective"] == counts["mkl", "selective"] == counts["mkl", "none"]
    assert counts["onednn", "full"] == counts["mkl", "full"]


def products(how: str) -> int:
    """Matrix products of a step in fp32."""
    module = build(recipe_of("dp=1", "model.dropout=0.0").model, device="cpu", seed=0)
    recompute.apply(module, how)
    tokens = torch.arange(2 * 32).view(2, 32) % 128
    with Products() as counted:
        module(tokens, tokens).backward()
    return counted.count


class Products(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.__name__.split(".")[0] in ("mm", "addmm", "_linear_pointwise")
        return func(*args, **(kwargs or {}))


def test_nothing_is_kept_for_later_without_gradients():
    """Validation runs a block once, and as it is."""
    recipe = recipe_of("dp=1")
    module = build(recipe.model, device="cpu", seed=0).eval()
    tokens = torch.arange(64).view(2, 32)
    with torch.no_grad():
        wanted = module(tokens)
        recompute.apply(module, "full")  # type: ignore[arg-type]
        assert torch.equal(module(tokens), wanted)


def test_one_table_names_the_modes():
    assert set(MODES) == set(get_args(LayoutSection.model_fields["recompute"].annotation))
    assert [region(mode).runs for mode in MODES] == [None, ("sublayer", "finish"), ("block", "forward")]
    everything = {role for found in REGIONS.values() for role in found.keeps}
    assert everything == set(get_args(Role))
