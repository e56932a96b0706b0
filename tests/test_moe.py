"""The mixture of experts, in one process: it equals a plain loop over experts; its losses, limits and balance."""

import math
from pathlib import Path

import pytest
import stored
import torch
from exported import read_by_transformers
from pool_runs import train_rank
from torch import Tensor
from torch.nn import functional as F

from fivefold.errors import UserError
from fivefold.models.base import build
from fivefold.models.card import card_of
from fivefold.models.hf import from_hf, from_hf_config, hf_config, to_hf
from fivefold.models.layers import Cache
from fivefold.models.mixture import (
    Mixture,
    _Attach,
    assign,
    balance_loss,
    combine,
    dispatch,
    evened,
    filled,
    grouped_linear,
)
from fivefold.models.moe.module import Model as MoE
from fivefold.observe.metrics import read_metrics
from fivefold.parallel import recompute
from fivefold.recipe import (
    ModelSection,
    Recipe,
    active_parameters,
    change,
    count_parameters,
    flops_per_token,
    load,
    resolve_model,
)
from fivefold.sharding.layout import Layout
from fivefold_plan.cluster.clusters import parse
from fivefold_plan.setting import setting

SMALL = {"arch": "moe", "layers": 2, "dim": 32, "heads": 4, "kv_heads": 2, "vocab_size": 64, "seq_len": 16}
EXPERTS = {"experts": 6, "experts_per_token": 2, "expert_ffn_dim": 24}


def section(**changes) -> ModelSection:
    return resolve_model(ModelSection(**{**SMALL, **EXPERTS, "init_std": 0.2, **changes}), vocab_size=64)


def mixture(**changes) -> Mixture:
    """One mixture of experts, with its initial weights."""
    model = build(section(**changes), device="cpu", seed=1)
    assert isinstance(model, MoE)
    found = model.blocks["0"].mlp
    assert isinstance(found, Mixture)
    return found


def by_loop(layer: Mixture, x: Tensor, model: ModelSection, capacity: int | None = None) -> Tensor:
    """The definition, written plainly: every expert takes its tokens in order of choice, then of place."""
    x = x.flatten(0, 1)
    logits = F.linear(x.float(), layer.router.weight.float())
    scores = logits.sigmoid() if model.router_score == "sigmoid" else logits.softmax(-1)
    bias = torch.zeros(()) if layer.router.bias is None else layer.router.bias
    chosen = (scores + bias).topk(model.experts_per_token or 0, dim=-1).indices
    weights = scores.gather(1, chosen)
    if model.router_normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    out = torch.zeros(x.shape, dtype=torch.float32)
    for e in range(model.experts or 0):
        taken = [(int(n), s) for s in range(chosen.shape[1]) for n in (chosen[:, s] == e).nonzero()]
        for n, s in taken[:capacity]:
            gate, up = F.linear(x[n], layer.experts.gate_up[e]).chunk(2)
            y = F.linear(F.silu(gate) * up, layer.experts.down[e])
            out = out.index_add(0, torch.tensor([n]), (y.float() * weights[n, s])[None])
    if layer.shared is not None:
        out = out + layer.shared(x)
    return out.view(1, *x.shape).to(x.dtype)


def gradients(
    layer: Mixture, y: Tensor, tensors: list[Tensor], direction: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Those of the tensors; the layer counts, too."""
    assert layer.stats.facts is not None
    *found, layer.stats.facts.grad = torch.autograd.grad(y, [*tensors, layer.stats.facts], direction)
    return tuple(found)


KINDS = {
    "plain": {},
    "shared": {"shared_experts": 2},
    "sigmoid": {"router_score": "sigmoid", "router_normalize": False},
    "one": {"experts_per_token": 1},
    "bias": {"balance": "bias"},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("empty", [False, True])
def test_equals_a_loop_over_experts(kind, dtype, empty):
    """Output and all gradients; also where experts get no token."""
    model = section(aux_loss_weight=0.0, **KINDS[kind]) if kind != "bias" else section(**KINDS[kind])
    layer = mixture(**KINDS[kind]).to(dtype)
    layer.aux_weight = 0.0
    x = torch.randn(1, 40, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    with torch.no_grad():
        if layer.router.bias is not None:
            layer.router.bias.copy_(torch.tensor([0.3, -0.2, 0, 0, 0.1, 0]))
        if empty:  # experts 1 and 5 never win: all tokens agree on their first feature
            x[..., 0] = 6.0
            layer.router.weight[:, 0] = torch.tensor([1.0, -9, 1, 1, 1, -9])
    tensors = [x.requires_grad_(), *layer.parameters()]
    got, wanted = layer(x), by_loop(layer, x, model)
    sums = layer.stats
    direction = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    mine = gradients(layer, got, tensors, direction)
    theirs = torch.autograd.grad(wanted, tensors, direction)
    assert sums.sums is not None
    assert ((sums.sums[:6] == 0).tolist() == [False, True, False, False, False, True]) == empty
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.02, torch.float16: 0.0025}[dtype]
    names = ["output", "x", *(name for name, _ in layer.named_parameters())]
    for name, a, b in zip(names, [got, *mine], [wanted, *theirs], strict=True):
        assert b.norm() > 0, name
        assert (a - b).norm() / b.norm() < tolerance, name
    if empty:
        by_name = dict(zip(names[1:], mine, strict=True))
        assert not by_name["experts.gate_up"][[1, 5]].any()
        assert not by_name["experts.down"][[1, 5]].any()


@pytest.mark.parametrize("kind", [{"shared_experts": 1}, {"capacity_factor": 1.0, "balance": "bias"}])
def test_compiled_in_one_graph(kind):
    """Output, gradients and facts are those without the compiler, in the second pass, too."""
    torch._dynamo.reset()  # after another capacity it would trace this one as a variable
    found = []
    torch._dynamo.reset()
    for compiled in (False, True):
        layer = mixture(z_loss_weight=0.1, **kind)
        layer.stats.start(6, torch.tensor([0.7, 1.0]))
        run = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
        x = torch.randn(1, 40, 32, generator=torch.Generator().manual_seed(0), requires_grad=True)
        for _ in range(2):
            y = run(x)
            y.square().mean().backward(torch.tensor(0.7))
        found.append([y, x.grad, layer.stats.sums, *(p.grad for p in layer.parameters())])
    for a, b in zip(*found, strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm()


def test_no_rows_at_all():
    weight = torch.randn(3, 16, 8, requires_grad=True)
    out = grouped_linear(torch.zeros(0, 8, requires_grad=True), weight, torch.zeros(3, dtype=torch.int64))
    out.backward(torch.zeros(0, 16))
    assert out.shape == (0, 16)
    assert weight.grad is not None
    assert not weight.grad.any()


def test_the_way_there_and_back():
    """Slots are sorted by expert; each token's rows come back to it, weighted."""
    chosen = torch.tensor([[2, 0], [2, 1], [0, 2], [2, 0]])
    way = assign(chosen, 4)
    assert way.counts_CE[0].tolist() == way.chosen_E.tolist() == [3, 1, 4, 0]
    assert way.tokens_M.tolist() == [2, 0, 3, 1, 0, 1, 3, 2]  # first choices before second ones
    x = torch.randn(4, 5)
    assert torch.equal(dispatch(x, way), x[way.tokens_M])
    weights = torch.tensor([[0.5, 0.5], [0.25, 0.75], [1.0, 0.0], [0.1, 0.9]])
    torch.testing.assert_close(combine(dispatch(x, way), weights, way), x)
    limited = assign(chosen, 4, capacity=2)
    assert limited.tokens_M.tolist() == [2, 0, 1, 0, 1]
    assert limited.counts_CE[0].tolist() == [2, 1, 2, 0]
    kept = torch.tensor(
        [1.0, 1.0, 1.0, 0.0]
    )  # token 3: both its choices are full; token 2 loses one of weight 0
    torch.testing.assert_close(combine(dispatch(x, limited), weights, limited), x * kept[:, None])


def test_rows_that_are_nobodys_change_nothing():
    """bf16 on CPUs gets such rows, so that matmuls have few shapes. Results and gradients are the same."""
    generator = torch.Generator().manual_seed(0)
    x, weights = torch.randn(96, 16, generator=generator), torch.rand(96, 2, generator=generator)
    matrices = torch.randn(3, 16, 16, generator=generator)
    chosen = torch.rand(96, 3, generator=generator).topk(2).indices
    way = assign(chosen, 3)
    full = evened(way, torch.bfloat16)
    assert full.counts_CE[0].tolist() == [-(-count // 8) * 8 for count in way.counts_CE[0].tolist()]
    assert len(full.order_M) == full.counts_CE.sum() > len(way.order_M)
    assert evened(way, torch.float32) is way
    found = []
    for one in (full, way):
        leaves = [t.bfloat16().requires_grad_() for t in (x, weights, matrices)]
        rows = grouped_linear(dispatch(leaves[0], one), leaves[2], one.counts_CE[0])
        out = combine(rows, leaves[1], one)
        found.append([out, *torch.autograd.grad(out.float().square().sum(), leaves)])
    for a, b in zip(*found, strict=True):
        assert (a - b).norm() <= 0.004 * b.norm()
    dropping = assign(chosen, 3, capacity=40)
    assert evened(dropping, torch.bfloat16) is dropping


@pytest.mark.parametrize("chunks", [1, 3])
def test_experts_filled_up_to_their_capacity_give_the_same(chunks):
    """As GPUs have them: no shape depends on data."""
    generator = torch.Generator().manual_seed(0)
    x, weights = torch.randn(96, 16, generator=generator), torch.rand(96, 2, generator=generator)
    matrices, found = torch.randn(3, 16, 16, generator=generator), []
    chosen = torch.rand(96, 3, generator=generator).mul(torch.tensor([1, 1, 0.6])).topk(2).indices
    way = assign(chosen, 3, 70)
    full = filled(chosen, chosen.t().reshape(-1).argsort(stable=True), way.chosen_E, 70, chunks)
    assert full.counts_CE.sum(0).tolist() == [70] * 3
    assert way.counts_CE[0].tolist()[2] < 70 < way.chosen_E[0]
    for one in (full, way):
        leaves = [t.clone().requires_grad_() for t in (x, weights, matrices)]
        parts = dispatch(leaves[0], one).split(one.counts_CE.sum(1).tolist())
        pairs = zip(parts, one.counts_CE, strict=True)
        out = combine(torch.cat([grouped_linear(r, leaves[2], c) for r, c in pairs]), leaves[1], one)
        found.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for a, b in zip(*found, strict=True):
        assert (a - b).norm() <= 1e-6 * b.norm()


def test_no_expert_has_room_for_more_rows_than_there_are_tokens():
    """A token chooses an expert once. GPUs compute all the room that experts have, and the plan counts as much."""
    model, N = section(capacity_factor=8.0), 4 * 8
    assert mixture(capacity_factor=8.0).capacity(N) == N
    assert mixture(capacity_factor=1.25).capacity(N) == math.ceil(1.25 * N * 2 / 6)
    model = model.model_copy(update={"seq_len": 8})
    for factor, rows in ((8.0, N), (1.25, 14)):
        model = model.model_copy(update={"capacity_factor": factor})
        (up,) = (
            op for op in setting(model, Layout(), parse("h100"), 4, 1).last_block if op.name == "experts up"
        )
        assert up.matmul is not None
        assert (up.matmul.m, up.matmul.count) == (rows, 6)


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.25])
def test_capacity_drops_what_is_beyond(factor):
    changes = {"capacity_factor": factor, "shared_experts": 1}
    model, layer = section(**changes), mixture(**changes)
    layer.aux_weight = 0.0
    x = torch.randn(1, 30, 32, generator=torch.Generator().manual_seed(0), requires_grad=True)
    capacity = math.ceil(factor * 30 * 2 / 6)
    got, wanted = layer(x), by_loop(layer, x, model, capacity)
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
    tensors = [x, *layer.parameters()]
    for a, b in zip(
        gradients(layer, got.square().sum(), tensors),
        torch.autograd.grad(wanted.square().sum(), tensors),
        strict=True,
    ):
        assert (a - b).norm() <= 1e-5 * b.norm()
    assert layer.stats.sums is not None
    slots, dropped = layer.stats.sums[:6], layer.stats.sums[6].item()
    assert dropped == (slots - capacity).clamp(min=0).sum().item() > 0
    layer.eval()
    torch.testing.assert_close(layer(x), by_loop(layer, x, model), atol=1e-5, rtol=1e-5)


def test_balance_loss_is_one_at_even_load_and_e_at_worst():
    even = torch.full((12, 6), 1 / 6)
    assert balance_loss(even, torch.full((6,), 4)).item() == pytest.approx(1.0)
    one = F.one_hot(torch.zeros(12, dtype=torch.int64), 6).float()
    assert balance_loss(one, torch.tensor([24, 0, 0, 0, 0, 0])).item() == pytest.approx(6.0)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_scores_that_all_vanish_divide_by_no_zero(score):
    """Sigmoids of logits near -200 are 0 in fp32. As transformers' DeepSeek-V3 has it, such a token gets nothing from
    its experts, and gives them no gradient; a softmax is as ever, and so are other tokens."""
    layer = mixture(router_score=score, router_normalize=True, aux_loss_weight=0.1)
    x = torch.randn(1, 8, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        layer.router.weight[:, 0] = -200.0
        x[..., 0] = 0.0
        x[:, 3, 0] = 1.0
    x.requires_grad_()
    y = layer(x)
    y.sum().backward()
    assert y.isfinite().all()
    assert all(p.grad.isfinite().all() for p in (x, *layer.parameters()))
    assert (y[0, 3] == 0).all() == (score == "sigmoid")
    logits = F.linear(x[0], layer.router.weight)
    scores = logits.sigmoid() if score == "sigmoid" else logits.softmax(-1)
    topk_weights = scores.topk(2).values
    theirs = topk_weights / (topk_weights.sum(dim=-1, keepdim=True) + 1e-20)
    torch.testing.assert_close(layer.router(x[0])[1], theirs, rtol=0, atol=0)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_router_losses_have_their_gradient(score):
    """Without a term in the reported loss, gradients are those of loss + weights x terms, at any scale."""
    changes = {"router_score": score, "aux_loss_weight": 0.3, "z_loss_weight": 0.05}
    model, layer = section(**changes), mixture(**changes)
    x = torch.randn(1, 40, 32, generator=torch.Generator().manual_seed(0), requires_grad=True)
    logits = F.linear(x[0], layer.router.weight)
    scores = logits.sigmoid() if score == "sigmoid" else logits.softmax(-1)
    share = F.one_hot(scores.topk(2).indices, 6).sum((0, 1)) / 80
    mean = (scores / scores.sum(-1, keepdim=True)).mean(0)
    aux, z = 6 * (share * mean).sum(), logits.exp().sum(-1).log().square().mean()
    layer.stats.start(6, torch.tensor([0.7, 1.0]))
    whole = 0.7 * (by_loop(layer, x, model).square().mean() + 0.3 * aux + 0.05 * z)
    tensors = [x, *layer.parameters()]
    wanted = torch.autograd.grad(whole, tensors)
    got = gradients(layer, layer(x).square().mean(), tensors, torch.tensor(0.7))
    for a, b in zip(got, wanted, strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm()
    assert layer.stats.sums is not None
    assert layer.stats.sums[-3:].tolist() == pytest.approx([aux.item(), z.item(), 1.0], rel=1e-5)


@pytest.mark.parametrize("how", ["none", "full", "selective"])
def test_what_is_computed_again_counts_once(how):
    """Gradients and tallies of recomputation are those without it, bit for bit."""
    found = []
    for each in ("none", how):
        model = build(section(dropout=0.1, shared_experts=1), device="cpu", seed=0).train()
        assert isinstance(model, MoE)
        recompute.apply(model, [each] * len(model.blocks))
        torch.manual_seed(0)
        tokens = torch.randint(0, 64, (3, 16), generator=torch.Generator().manual_seed(2))
        model(tokens, tokens).backward()
        mixtures = [m for m in model.modules() if isinstance(m, Mixture)]
        found.append([*(m.stats.sums for m in mixtures), *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert found[0][0][-1] == 1


@pytest.mark.parametrize("third", [1.0, torch.inf, torch.nan])
def test_an_empty_microbatch_counts_nothing(third):
    """Whatever its facts are."""
    x, loss = torch.ones(2, requires_grad=True), torch.ones((), requires_grad=True)
    sums, facts = torch.zeros(3, dtype=torch.float64, requires_grad=True), torch.tensor([3.0, 0.0, third])
    _Attach.apply(x, loss, sums, facts, torch.tensor([0.5, 1.0])).sum().backward()
    assert loss.grad == 0.5
    assert torch.equal(sums.grad.nan_to_num(), facts.double().nan_to_num())
    sums.grad = loss.grad = None
    _Attach.apply(x, loss, sums, facts, torch.zeros(2)).sum().backward()
    assert loss.grad == 0
    assert not sums.grad.any()


def test_validation_counts_nothing():
    layer = mixture()
    with torch.no_grad():
        layer(torch.randn(1, 8, 32))
    assert layer.stats.sums is None


def test_the_cache_gives_the_logits_of_the_whole_text():
    model = section(capacity_factor=0.5, shared_experts=1, dense_layers=1, layers=3)
    module = build(model, device="cpu", seed=0).eval()
    tokens = torch.randint(0, 64, (1, 12), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        whole, cache = module(tokens), Cache(model)
        pieces = [module(tokens[:, a:b], cache=cache) for a, b in ((0, 5), (5, 6), (6, 7), (7, 12))]
    for piece, at in zip(pieces, (4, 5, 6, 11), strict=True):
        torch.testing.assert_close(piece[:, 0], whole[:, at], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dense", [0, 1])
def test_parameters_are_those_of_the_tables(dense):
    model = section(dense_layers=dense, shared_experts=2, ffn_dim=40)
    module = build(model)
    assert [(n, tuple(p.shape)) for n, p in module.named_parameters()] == list(
        card_of(model).parameters.items()
    )
    assert sum(p.numel() for p in module.parameters()) == count_parameters(model)
    assert count_parameters(model) - active_parameters(model) == (2 - dense) * 4 * 3 * 32 * 24


def test_known_models_have_their_published_size():
    mixtral = ModelSection(
        arch="moe", layers=32, dim=4096, heads=32, kv_heads=8, ffn_dim=14336, vocab_size=32000, seq_len=4096
    )
    deepseek = ModelSection(
        arch="moe", layers=28, dim=2048, heads=16, ffn_dim=10944, vocab_size=102400, seq_len=4096, dense_layers=1,
        experts=64, experts_per_token=6, shared_experts=2, expert_ffn_dim=1408,
    )  # fmt: skip
    assert (count_parameters(mixtral), active_parameters(mixtral)) == (46_702_792_704, 12_879_925_248)
    assert round(count_parameters(deepseek) / 1e9, 1) == 16.4
    assert round(active_parameters(deepseek) / 1e9, 1) == 2.8


def test_flops_are_those_of_the_dense_model_that_a_token_sees():
    """Two experts of width F/2 are the work of one feed-forward of width F; the router comes on top."""
    dense = ModelSection(layers=2, dim=64, heads=4, ffn_dim=96, vocab_size=256, seq_len=40)
    fields = {**dense.model_dump(), "arch": "moe", "experts": 16, "expert_ffn_dim": 48}
    assert flops_per_token(ModelSection(**fields)) == flops_per_token(dense) + 6 * 2 * 64 * 16


def recipe_of(text: Path, *overrides: str) -> Recipe:
    return load("quickstart", [
        "model.arch=moe", "model.layers=2", "model.dim=32", "model.heads=4", "model.experts=8",
        "model.expert_ffn_dim=32", "train.val_sequences=8", "optim.lr=1e-2", "observe.tracker=none",
        "model.seq_len=16", "data.tokenizer=bytes", "train.global_batch_size=8", "train.steps=40",
        "train.sample_tokens=8", "precision.mode=fp32", "layout.dp_replicate=1",
        f"data.source={text}", f"data.cache={text.parent / 'cache'}", "data.val_fraction=0.1", *overrides,
    ])  # fmt: skip


def train(text: Path, out: Path, *overrides: str) -> list[dict]:
    """A run; its metrics, a line a step."""
    train_rank(0, 1, recipe_of(text, *overrides), out)
    return [line for line in read_metrics(out / "metrics.jsonl") if "loss" in line]


@pytest.fixture
def text(tmp_path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    return path


def test_it_learns_and_reports_its_balance(text, tmp_path):
    lines = train(text, tmp_path / "run", "model.capacity_factor=1.0", "model.z_loss_weight=0.001")
    assert lines[-1]["loss"] < lines[0]["loss"] - 1
    for line in lines:
        assert line["expert_load_max"] >= 1 >= line["expert_load_min"] >= 0
        assert 0 < line["dropped_share"] < 0.9
        assert line["aux_loss"] > 0.9
        assert line["z_loss"] > 0


@pytest.mark.slow
def test_both_ways_of_balancing_work(text, tmp_path):
    """Towards the end of a run, the most loaded expert has less than without balancing."""
    steps = ["train.steps=60", "optim.lr=3e-2"]
    kinds = {"none": [], "aux": ["model.aux_loss_weight=0.05"], "bias": ["model.balance_rate=0.02"]}
    worst = {}
    for kind, options in kinds.items():
        lines = train(text, tmp_path / kind, *steps, f"model.balance={kind}", *options)
        worst[kind] = sum(line["expert_load_max"] for line in lines[-10:]) / 10
    assert worst["aux"] < 0.8 * worst["none"], worst
    assert worst["bias"] < 0.8 * worst["none"], worst


def test_a_bias_is_saved_and_goes_on(text, tmp_path):
    """Resumed after 3 of 6 steps: the same losses, to the bit; the biases have moved."""
    from fivefold.checkpoint import store

    options = ["model.balance=bias", "model.balance_rate=0.05", "optim.schedule=constant"]
    whole = train(text, tmp_path / "whole", *options, "train.steps=6")
    train(text, tmp_path / "parts", *options, "train.steps=3")
    train_rank(0, 1, recipe_of(text, *options, "train.steps=6"), tmp_path / "parts", True)
    a, b = (stored.load(store.latest(tmp_path / name)) for name in ("whole", "parts"))
    name = "blocks.1.mlp.router.bias"
    assert torch.equal(a.model[name], b.model[name])
    assert torch.equal(a.model["embed.weight"], b.model["embed.weight"])
    assert 0.05 <= a.model[name].abs().max() <= 0.3 + 1e-6
    assert len(whole) == 6


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.arch=llama", "model.experts=4"], "llama has no experts"),
        (["model.arch=llama", "layout.ep=2", "layout.dp_replicate=2"], "llama has no experts to divide"),
        (["model.experts_per_token=9"], "experts_per_token = 9 must be at most model.experts = 8"),
        (["model.experts_per_token=1", "model.router_normalize=true"], "the router would not learn"),
        (["model.dense_layers=2"], "must be less than model.layers = 2"),
        (["model.expert_ffn_dim=30"], "expert_ffn_dim = 30 must be a multiple of 8.*Nearest valid: 32"),
        (["model.balance=bias", "model.aux_loss_weight=0.1"], 'needs model.balance = "aux"'),
        (["model.balance_rate=0.1"], 'needs model.balance = "bias"'),
        (["layout.ep=4", "layout.dp_replicate=4", "model.experts=6"], "Nearest valid: layout.ep = 3, or model.exp.* 8"),
        (["layout.ep=2"], "ep=2 must divide dp_replicate x dp_shard x cp = 1"),
        (["layout.cp=2", "model.capacity_factor=1.0"], "Nearest valid: capacity_factor = 0"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(text, overrides, message):
    with pytest.raises(UserError, match=message):
        change(recipe_of(text), overrides)


@pytest.fixture(scope="module", params=["moe", "qwen3_moe"])
def mixtral(request, tmp_path_factory):
    """(our module, theirs with the same weights, read from the folder that is exported, the model section)."""
    model = section(arch=request.param, expert_ffn_dim=48, ffn_dim=48, rope_theta=500.0, aux_loss_weight=0.02)
    ours = build(model, device="cpu", seed=3)
    folder = tmp_path_factory.mktemp("mixtral")
    return ours, read_by_transformers(ours, model, folder), model


def test_logits_are_mixtrals(mixtral):
    ours, theirs, _ = mixtral
    tokens = torch.randint(0, 64, (3, 16), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        got, expected = ours(tokens), theirs(tokens).logits
    assert expected.std() > 0.3
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_gradients_are_mixtrals(mixtral):
    """Of the loss without the load-balance term, which they compute over all blocks together."""
    ours, theirs, model = mixtral
    tokens = torch.randint(0, 64, (3, 16), generator=torch.Generator().manual_seed(7))
    ours.zero_grad()
    theirs.zero_grad()
    for layer in ours.modules():
        if isinstance(layer, Mixture):
            layer.aux_weight = 0.0
    ours(tokens, tokens).backward()
    F.cross_entropy(theirs(tokens).logits.flatten(0, 1), tokens.flatten()).backward()
    got, expected = dict(ours.named_parameters()), dict(theirs.named_parameters())
    for i in range(model.layers):
        for mine, other in (("router.weight", "gate.weight"), ("experts.down", "experts.down_proj"),
                            ("experts.gate_up", "experts.gate_up_proj")):  # fmt: skip
            a, b = got[f"blocks.{i}.mlp.{mine}"].grad, expected[f"model.layers.{i}.mlp.{other}"].grad
            assert (a - b).norm() / b.norm() < 2e-5, (i, mine)


def test_mixtral_survives_the_way_out_and_back(mixtral):
    ours, theirs, model = mixtral
    state = ours.state_dict()
    back = from_hf(to_hf(state, model), model)
    assert all(torch.equal(back[name], state[name]) for name in state)
    assert from_hf_config(hf_config(model)) == model
    assert from_hf_config(theirs.config.to_dict()) == model


def test_what_mixtral_lacks_is_not_exported():
    model = section(shared_experts=1, balance="bias")
    with pytest.raises(UserError, match=r'format has no model.shared_experts = 1, model.balance = "bias"'):
        to_hf(build(model, device="cpu").state_dict(), model)
