"""Recompute: the gradients of recompute=none bit for bit, dropout included, and less memory."""

import re
from typing import get_args

import pytest
import torch
from marks import only, slow_but
from pool_runs import ranks_of
from ranks import run_ranks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from fivefold.errors import UserError
from fivefold.kernels import blockwise_attention, matmul
from fivefold.models.base import build
from fivefold.models.card import card_of
from fivefold.models.layers import AttentionCore
from fivefold.models.operations import Part, Program, Role, Sizes
from fivefold.models.recomputation import EVERY, MODES, OPERATIONS, PARTS, PREFIX, REGIONS, chosen, region
from fivefold.parallel import recompute
from fivefold.parallel.mesh import divided
from fivefold.recipe import Recipe, change, load, resolve
from fivefold.sharding.layout import Layout
from fivefold.step.state import build_state
from fivefold.step.step import forward_backward
from fivefold_plan.trace.memory import Tracker
from fivefold_plan.trace.traffic import Collectives

TINY = [
    "model.layers=4", "model.dim=32", "model.heads=4", "model.kv_heads=4", "model.seq_len=32", "model.vocab_size=128",
    "model.dropout=0.1", "train.global_batch_size=8", "train.microbatch_size=2", "precision.mode=fp32",
    "train.sample_every=0",
]  # fmt: skip
LAYOUTS = [
    "dp=1", "dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "tp=2", "tp=2,sp=true",
    "tp=2,sp=true,sp_regather=true", "cp=2",
    "cp=2,cp_method=ulysses", "cp=2,cp_method=all_gather",
    "pp=2,schedule=1f1b", "pp=2,schedule=zbv,virtual_stages=2", "dp=2,tp=2,zero=3",
    "dp=2,ep=2",
]  # fmt: skip
QUICK = {
    "dp=2,zero=3", "tp=2,sp=true,sp_regather=true", "cp=2", "pp=2,schedule=zbv,virtual_stages=2", "dp=2,tp=2,zero=3",
    "dp=2,ep=2",
}  # fmt: skip


def recipe_of(layout: str, *overrides: str) -> Recipe:
    base = [o for o in TINY if "ep=" not in layout or "kv_heads" not in o]
    moe = ["model.arch=moe", "model.experts=4", "model.experts_per_token=2"] if "ep=" in layout else []
    return resolve(load("quickstart", [*base, *moe, *overrides], layout), vocab_size=128)


Sent = dict[tuple[str, str], list[int]]


def gradients(rank: int, world: int, recipe: Recipe) -> tuple[dict[str, torch.Tensor], Sent]:
    """This rank's gradients after two steps' backward, of which the second starts from the same weights; calls and
    bytes of its messages."""
    state = build_state(recipe, ranks_of(rank, world))
    tokens = torch.arange(8 * 33).view(8, 33) * 7919 % 128
    dp = state.mesh.index("dp")
    rows = tokens[8 // state.mesh.size("dp") * dp :][: 8 // state.mesh.size("dp")]
    parts = [rows[i : i + 2] for i in range(0, len(rows), 2)]
    microbatches = [divided(part[:, :-1], part[:, 1:], None, state.mesh) for part in parts]
    try:
        with Collectives(state.mesh) as sent:
            for _ in range(2):
                forward_backward(state, microbatches, 0)
        return {name: gradient.clone() for name, gradient in state.gradients().items()}, sent.found
    finally:
        for replica in state.parallel.replicas:
            replica.close()


@only(
    "fp32-llama-*",
    "bf16-gpt2-ops*",
    "bf16-qwen3-selective",
    "bf16-olmo2-full",
)
@pytest.mark.parametrize("how", ["full", "selective", "ops:attention+gate+norm"])
@pytest.mark.parametrize(
    ("mode", "arch"),
    [
        pytest.param(mode, arch, marks=pytest.mark.slow if mode == "fp32" and arch != "llama" else ())
        for mode in ("fp32", "bf16")
        for arch in ("llama", "gpt2", "bert", "qwen3", "olmo2")
    ],
)
def test_gradients_are_those_of_none_on_one_process(arch, how, mode):
    recipe = recipe_of("dp=1", f"model.arch={arch}", f"precision.mode={mode}")
    wanted, _ = gradients(0, 1, recipe)
    got, _ = gradients(0, 1, change(recipe, [f"layout.recompute={how}"]))
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)
    assert all(g.norm() > 0 for g in wanted.values())


@only("tp=2,sp=true,sp_regather=true-*", "dp=2,ep=2-*", "pp=2,*")
@pytest.mark.parametrize(
    "hows",
    [
        ("full", "ops:attention+gate+norm"),
        pytest.param(("selective", "ops:norm"), marks=pytest.mark.slow),
    ],
    ids=["all", "some"],
)
@pytest.mark.parametrize("layout", slow_but(QUICK, LAYOUTS))
def test_gradients_are_those_of_none_on_every_axis(layout, hows):
    """With dropout 0.1, whatever is computed again and whatever talks while it is. "selective" and norms talk no more
    than without them."""
    recipe = recipe_of(layout)
    world = Layout.from_recipe(recipe.layout).ranks
    wanted = run_ranks(world, gradients, recipe, timeout_s=60)
    for how in hows:
        got = run_ranks(world, gradients, change(recipe, [f"layout.recompute={how}"]), timeout_s=60)
        for rank in range(world):
            (found, sent), (plain, before) = got[rank], wanted[rank]
            wrong = [n for n in plain if not torch.equal(found[n], plain[n])]
            assert not wrong, f"{how}, rank {rank}: {wrong}"
            if how in ("selective", "ops:norm"):
                assert sent == before, f"{how}, rank {rank} sends something twice"


def kept(how: str, *overrides: str) -> tuple[int, dict[str, int]]:
    """Bytes alive between forward and backward, and how often parts of a block have computed to their end."""
    recipe = recipe_of("dp=1", "model.dropout=0.0", "model.seq_len=256", "model.layers=4", *overrides)
    module = build(recipe.model, device="cpu", seed=0)
    recompute.apply(module, [how] * len(module.blocks))  # type: ignore[arg-type]
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


SIZES = Sizes(recipe_of("dp=1", "model.dropout=0.0", "model.seq_len=256").model, 2, e=4)


def planned(roles: set[Role]) -> int:
    """Bytes that the planner's operations keep in these roles, in four blocks."""
    ops = card_of(SIZES.model).block_operations(SIZES, Program(attention="blocks"))
    return round(4 * sum(saved.size for op in ops for saved in op.saved if saved.role in roles))


def test_what_is_kept_and_what_is_computed_again():
    """Each mode frees the bytes that the planner says. "selective" frees the whole core and runs no module again."""
    none, once = kept("none")
    core, nothing = kept("selective")
    assert none - core == planned({"core"}) > 0.2 * none
    assert nothing == once == dict.fromkeys(once, 1)
    attention, some = kept("ops:attention")
    assert none - attention == planned({"core", "inner"}) - planned({"copied"})
    assert some == once | {"attention.core": 2}
    gate, some = kept("ops:gate")
    assert none - gate == planned({"gate"})
    assert some == once
    norm, some = kept("ops:norm")
    assert none - norm == planned({"norm"}) > 0
    assert some == once
    every, _ = kept("ops:norm+gate+attention")
    assert every == attention + gate + norm - 2 * none
    full, twice = kept("full")
    assert full < 0.5 * every
    assert [twice[name] for name in ("attention.qkv", "attention.out", "mlp.gate_up", "norm1")] == [2] * 4
    assert twice["mlp.down"] == 1, "stopped before the last one"


def test_what_is_computed_again_stops_before_a_product(monkeypatch):
    """No matmul of a layer is repeated except by "full", whether oneDNN or MKL computes it, and of attention's only the
    scores by "selective"."""
    counts = {}
    for way in ("onednn", "mkl"):
        if way == "mkl":
            monkeypatch.setattr(matmul, "_onednn", lambda *given, **named: False)
        for how in ("none", "selective", "full", "ops:attention+gate+norm"):
            counts[way, how] = products(how)
    for how in ("none", "selective", "full"):
        assert counts["onednn", how] == counts["mkl", how]
    layers, core = counts["mkl", "none"]
    assert counts["mkl", "selective"] == (layers, core + 4), "the scores of four blocks"
    assert (
        counts["mkl", "ops:attention+gate+norm"][0]
        == counts["onednn", "ops:attention+gate+norm"][0]
        == layers
    )


def products(how: str) -> tuple[int, int]:
    """Matrix products of a step in fp32: of layers, and of attention's core."""
    module = build(recipe_of("dp=1", "model.dropout=0.0").model, device="cpu", seed=0)
    recompute.apply(module, [how] * len(module.blocks))
    tokens = torch.arange(2 * 32).view(2, 32) % 128
    with Products() as counted:
        module(tokens, tokens).backward()
    return counted.layers, counted.core


class Products(TorchDispatchMode):
    layers = core = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        self.layers += name in ("mm", "addmm", "_linear_pointwise")
        self.core += name == "bmm"
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
def test_plain_attention_frees_what_the_paper_says(monkeypatch):
    """arXiv 2205.05198, section 5: at T 2048 the core has most of the activations of attention without fused kernels.
    Nothing that grows with T^2 is kept."""
    monkeypatch.setattr(blockwise_attention.native, "usable", lambda *tensors: False)
    with sdpa_kernel(SDPBackend.MATH):
        (none, wanted), (selective, got) = (plain_block(how, 2048) for how in ("none", "selective"))
        assert torch.equal(wanted, got)
        half = plain_block("selective", 1024)[0]
    assert selective < 0.4 * none
    assert selective == pytest.approx(2 * half, rel=0.01)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        flash = plain_block("none", 2048)[0]
        assert plain_block("selective", 2048)[0] == flash
    assert none - selective >= 0.95 * (none - flash), "bytes of the core"


def plain_block(how: str, length: int) -> tuple[int, torch.Tensor]:
    """Bytes kept by attention of 12 heads, and the gradient of its input."""
    draw = torch.Generator().manual_seed(0)
    qkv = torch.randn(1, length, 3 * 12 * 8, generator=draw).requires_grad_()
    core = AttentionCore(12, 12)
    core.recompute = how == "selective"
    with Tracker() as tracker:
        found = core(qkv)
        size = tracker.made()
    found.sum().backward()
    assert qkv.grad is not None
    return size, qkv.grad


def test_nothing_is_kept_for_later_without_gradients():
    """Validation runs a block once, and as it is."""
    recipe = recipe_of("dp=1")
    module = build(recipe.model, device="cpu", seed=0).eval()
    tokens = torch.arange(64).view(2, 32)
    with torch.no_grad():
        wanted = module(tokens)
        recompute.apply(module, ["full"] * len(module.blocks))  # type: ignore[arg-type]
        assert torch.equal(module(tokens), wanted)


def test_one_table_names_the_modes():
    named = [region(f"{PREFIX}{name}") for name in OPERATIONS]
    assert chosen("ops:norm+attention") == ("attention", "norm")
    assert all(chosen(mode) == () for mode in MODES)
    assert {role for found in (*REGIONS.values(), *named) for role in found.keeps} == set(get_args(Role))
    assert set(get_args(Role)) - {"copied"} == EVERY
    assert {*PARTS, "never"} == set(get_args(Part))


@pytest.mark.parametrize("mode", ["some", "ops:", "ops:attention+", "ops:gelu", "ops:gate+gate", "attention"])
def test_what_no_mode_is_called(mode):
    with pytest.raises(
        UserError, match=f'layout.recompute = "{re.escape(mode)}" is unknown: it must be "none", '
    ):
        recipe_of("dp=1", f"layout.recompute={mode}")
