"""The lectures' programs without Fivefold (examples/lectures) compute what Fivefold computes: from the same weights and
data the same losses, gradients, outputs and weights.

Programs that need ranks run on the rank pool, beside Fivefold's own code on the same ranks. Tolerances: `EXACT` where
both add the same numbers in another order in fp64; `assert_close_tensors` (1e-5 of a tensor's norm) in fp32; none where
the order is the same, too.
"""

from __future__ import annotations

import ast
import runpy
from typing import Any

import pytest
import torch
from commands import REPO
from marks import all_but, only
from parity import joined, pieces, share
from pool_runs import assert_close_tensors, ranks_of
from ranks import run_ranks
from torch import Tensor, nn
from torch.autograd import grad

from fivefold.comm import everyone
from fivefold.comm.execute import Executor
from fivefold.kernels.blockwise_attention import qkv_attention
from fivefold.kernels.rounded import Quantizer
from fivefold.models.layers import AttentionCore, Linear
from fivefold.models.mixture import Mixture
from fivefold.parallel.autograd import TensorAxis
from fivefold.parallel.context import RingAttention
from fivefold.parallel.expert import AllToAll
from fivefold.parallel.recompute import apply as recompute
from fivefold.parallel.tensor import ColumnLinear, RowLinear
from fivefold.recipe import load, resolve
from fivefold.schedules.collectives.registry import build, shape_of
from fivefold.schedules.compression import Blocks, compressor
from fivefold.sharding.layout import Layout
from fivefold.sharding.sequence import token_spans
from fivefold.step.state import build_state
from fivefold.step.step import take_step

FOLDER = REPO / "examples" / "lectures"
BY_HAND = (
    "adam_and_muon", "collectives", "experts", "flash_attention", "levels", "mixed_precision", "recomputation",
    "ring_attention", "sequence_parallel", "zero",
)  # fmt: skip
RANKS = 4
EXACT = 1e-12


def program(name: str) -> dict[str, Any]:
    """What a program defines."""
    return runpy.run_path(str(FOLDER / f"{name}.py"))


def close(got: list[Tensor], wanted: list[Tensor], most: float = EXACT) -> None:
    """Each within `most` of the wanted one's norm."""
    for number, (g, w) in enumerate(zip(got, wanted, strict=True)):
        assert g.shape == w.shape
        assert (error := ((g - w).norm() / w.norm()).item()) <= most, f"tensor {number}: {error:.1e}"


def imports(name: str) -> set[str]:
    """The packages that a program imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add("." * node.level + (node.module or "").split(".")[0])
    return found


@pytest.mark.parametrize("name", BY_HAND)
def test_a_program_is_short_and_by_hand(name: str) -> None:
    text = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    assert 60 <= len(text.splitlines()) <= 150
    assert imports(name) <= {"torch", "typing", "math", "time", "dataclasses", "collections"}
    assert not {"__import__", "import_module", "exec", "eval"} & {
        node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)
    }
    how = f"torchrun --nproc-per-node {RANKS}" if "init_process_group" in text else "python"
    assert f"\n{how} examples/lectures/{name}.py\n" in text


def test_the_other_programs_import_fivefold() -> None:
    """So the two kinds of programs are told apart: those of `BY_HAND` are all that do not."""
    names = {path.stem for path in FOLDER.glob("*.py")}
    assert {name for name in names if "fivefold" not in imports(name)} == set(BY_HAND)


class Batches:
    """A program's batches as Fivefold takes them."""

    def __init__(self, module: dict[str, Any]) -> None:
        self.module = module

    def batch(self, i: int, rows: range) -> tuple[Tensor, Tensor]:
        rows_of = slice(rows.start, rows.stop)
        if "rows" in self.module["batch"].__annotations__:
            return self.module["batch"](i, rows_of)
        return tuple(x[rows_of] for x in self.module["batch"](i))


def trained(
    rank: int, world: int, module: dict[str, Any], model: nn.Module, layout: str, *sets: str
) -> dict[str, Any]:
    """Fivefold trains a program's model on its batches: losses, first gradients, weights, factors on the loss."""
    steps, rows = module["STEPS"], module["ROWS"]
    settings = [
        f"model.seq_len={module['T']}", f"train.global_batch_size={rows}", f"train.microbatch_size={rows // world}",
        f"train.steps={steps}", "optim.schedule=constant", "optim.warmup_steps=0", "optim.grad_clip=0",
        f"optim.lr={module['LR']}", f"optim.betas=[{module['B1']},{module['B2']}]", f"optim.eps={module['EPS']}",
        f"optim.weight_decay={module.get('DECAY', 0)}", "precision.mode=fp32", "observe.tracker=none",
    ]  # fmt: skip
    recipe = resolve(load("quickstart", [*settings, *sets], layout), vocab_size=module["V"])
    state = build_state(recipe, ranks_of(rank, world), model)
    found: dict[str, Any] = {"loss": [], "factor": [], "updates": []}

    def keep() -> None:
        if state.step == 0:
            found["gradients"] = pieces(state, state.gradients())

    for step in range(steps):
        if state.loss_scale is not None:
            found["factor"].append(state.loss_scale.factor.item())
        done = take_step(state, recipe, share(state, recipe, Batches(module), step), inspect=keep)
        found["loss"].append(done.loss)
        found["updates"].append(state.updates)
    found["weights"] = pieces(state, state.masters())
    state.parallel.close()
    return found


def collectives(rank: int, world: int) -> None:
    """Every primitive beside the schedule that Fivefold runs for it. Whole numbers, and for the ring numbers whose sum
    depends on the order: the same bits, because it adds in the same order."""
    module, axis = program("collectives"), everyone(ranks_of(rank, world))
    x = module["own"](rank, world)

    def ours(primitive: str, algorithm: str, x: Tensor, root: int = 0) -> Tensor:
        return Executor(axis, build(primitive, algorithm, shape_of(world, root=root)))(x.clone())

    assert torch.equal(module["broadcast"](x, 1), ours("broadcast", "binomial", x, 1))
    assert torch.equal(module["scatter"](x, 2), ours("scatter", "binomial", x, 2))
    assert torch.equal(module["all_reduce"](x), ours("all_reduce", "tree", x))
    reduced, gathered = module["reduce"](x, 0), module["gather"](x[:1], 3)
    total, all_parts = ours("reduce", "binomial", x), ours("gather", "binomial", x[:1], 3)
    if rank == 0:
        assert torch.equal(reduced, total)
    if rank == 3:
        assert torch.equal(torch.cat(gathered), all_parts)
    assert (reduced is None, gathered is None) == (rank != 0, rank != 3)

    numbers = torch.randn(40, generator=torch.Generator().manual_seed(rank))
    by_hand, sent = module["ring_all_reduce"](numbers)
    assert torch.equal(by_hand, ours("all_reduce", "ring", numbers))
    assert sent == 2 * (world - 1) * 40 // world
    assert module["waited"](0.2) > 0.15 or rank == world - 1


def ring(rank: int, world: int) -> tuple[list[Tensor], list[Any], Tensor]:
    """By hand: a rank's part of the output and of the gradients of q, k and v (B, H, t, d). By Fivefold: the spans of
    its tokens, and all of these (4, B, H, t, d)."""
    module = program("ring_attention")
    B, H, T, d = (module[name] for name in ("B", "H", "T", "HEAD"))
    draw = torch.Generator().manual_seed(0)
    whole = torch.randn(4, B, H, T, d, dtype=torch.float64, generator=draw)  # q, k, v, dout
    q, k, v, dout = (x.chunk(world, 2)[rank].clone().requires_grad_() for x in whole)
    out = module["RingAttention"].apply(q, k, v)
    by_hand = [out.detach(), *grad(out, (q, k, v), dout.detach())]

    layout = Layout(cp=world)
    spans = token_spans(layout, T, rank)
    mine = torch.cat([whole[:, :, :, slice(*span)] for span in spans], 3)  # (4, B, H, t, d)
    qkv = mine[:3].permute(1, 3, 0, 2, 4).flatten(2).contiguous().requires_grad_()  # (B, t, 3 H d)
    out = RingAttention(AttentionCore(H, H), everyone(ranks_of(rank, world)), layout)(qkv)
    (dqkv,) = grad(out, qkv, mine[3].transpose(1, 2).flatten(2))
    results = torch.cat([out.detach(), dqkv], -1).unflatten(2, (4, H, d)).permute(2, 0, 3, 1, 4)
    return by_hand, spans, results


@pytest.mark.slow
def test_ring_attention() -> None:
    answers = run_ranks(RANKS, ring)
    by_hand = torch.cat([torch.stack(hand) for hand, _, _ in answers], 3)  # (4, B, H, T, d)
    ours = torch.full_like(by_hand, torch.nan)
    for _, spans, results in answers:
        for span, part in zip(spans, results.chunk(len(spans), 3), strict=True):
            ours[:, :, :, slice(*span)] = part
    close(list(by_hand), list(ours), 1e-6)  # Fivefold merges the turns in fp32


def sequence(rank: int, world: int) -> None:
    module = program("sequence_parallel")
    D, F, draw = module["D"], module["F"], torch.Generator().manual_seed(0)
    whole = [torch.randn(*shape, generator=draw).double() / 4 for shape in
             ((module["B"], module["T"], D), (D,), (D, F), (F, D), (module["B"], module["T"], D))]  # fmt: skip
    dims = 1, None, 1, 0, 1  # of tokens, nothing, columns, rows, tokens
    x, norm, a, b, dy = (
        t if dim is None else t.chunk(world, dim)[rank].contiguous()
        for t, dim in zip(whole, dims, strict=True)
    )
    mine = [t.clone().requires_grad_() for t in (x, norm, a, b)]
    y, dx, dnorm, da, db = module["gradients"](*mine, dy)

    axis = TensorAxis(everyone(ranks_of(rank, world)), sp=True)
    up, down = Linear(D, F, bias=False), Linear(F, D, bias=False)  # their weights are (out, in)
    up.weight, down.weight = (nn.Parameter(t.T.contiguous()) for t in (a, b))
    inputs, weight = x.clone().requires_grad_(), norm.clone().requires_grad_()
    normed = nn.functional.layer_norm(inputs, (D,), weight)
    ours = inputs + RowLinear(down, axis)(nn.functional.gelu(ColumnLinear(up, axis)(normed)))
    dinputs, dweight, dup, ddown = grad(ours, (inputs, weight, up.weight, down.weight), dy)
    axis.axis.all_reduce(dweight)
    close([y, dx, dnorm, da, db], [ours, dinputs, dweight, dup.T, ddown.T])


def experts(rank: int, world: int) -> None:
    """Each rank has tokens of its own; the last one's all prefer few experts, so counts are uneven."""
    module = program("experts")
    E, K, D, F = (module[name] for name in "EKDF")
    each = E // world
    layer = module["Experts"](rank * each, (rank + 1) * each)
    draw = torch.Generator().manual_seed(rank)
    x, dy = torch.randn(2, module["N"], D, generator=draw) + (rank == world - 1)
    inputs = x.clone().requires_grad_()
    y, _ = module["mixture"](layer, inputs)
    by_hand = [y, *grad(y, (inputs, layer.router, layer.gate_up, layer.down), dy)]

    fields = (
        f"model.experts={E} model.experts_per_token={K} model.expert_ffn_dim={F} model.dim={D} model.heads=2"
    )
    recipe = resolve(
        load("moe-tiny", [*fields.split(), "model.shared_experts=0", "model.router_normalize=true"]),
        vocab_size=64,
    )
    mixture = Mixture(recipe.model).eval()  # in training the router has losses of its own
    mixture.experts.exchange = AllToAll(everyone(ranks_of(rank, world)))
    weights = mixture.router.weight, mixture.experts.gate_up, mixture.experts.down
    for parameter, value in zip(weights, (layer.router, layer.gate_up, layer.down), strict=True):
        parameter.data = value.detach().clone()
    inputs = x.clone().requires_grad_()
    ours = mixture(inputs[None])[0]
    close(by_hand, [ours, *grad(ours, (inputs, *weights), dy)], 1e-5)  # fp32


ON_RANKS = {"collectives": collectives, "sequence_parallel": sequence, "experts": experts}


@all_but("sequence_parallel")
@pytest.mark.parametrize("name", ON_RANKS)
def test_on_ranks(name: str) -> None:
    run_ranks(RANKS, ON_RANKS[name])


def zero(rank: int, world: int, stage: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """By hand: losses, and this rank's parts of each layer's first gradients and last weights, flat. By Fivefold."""
    module = program("zero")
    Unit, first = module["Unit"], []
    update = Unit.update

    def updated(unit: Any, step: int) -> None:
        if step == 1:
            first.append(unit.gradient.clone())
        update(unit, step)

    Unit.update = updated
    torch.manual_seed(0)
    model = module["Model"]()
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    units, losses, _ = module["train"](model, stage)
    torch.manual_seed(0)
    ours = trained(rank, world, module, module["Model"](), f"dp={world},zero={stage}", "optim.name=adam")
    shapes = [[(name, tuple(w.shape)) for name, w in start.items() if name.startswith(f"{layer}.")]
              for layer, m in model.named_modules() if not list(m.children())]  # fmt: skip
    return {"loss": losses, "gradients": first, "weights": [u.part for u in units], "shapes": shapes}, ours


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero(stage: int) -> None:
    answers = run_ranks(RANKS, zero, stage)
    hands, ours = [hand for hand, _ in answers], [found for _, found in answers]
    assert hands[0]["loss"] == pytest.approx(ours[0]["loss"], rel=1e-6)
    for key in ("gradients", "weights"):
        whole = {}
        for unit, layer in enumerate(hands[0]["shapes"]):
            flat, at = torch.cat([hand[key][unit] for hand in hands]), 0
            for name, shape in layer:
                size = torch.Size(shape).numel()
                whole[name], at = flat[at : at + size].view(shape), at + size
        assert_close_tensors(whole, joined(ours, key), key)


@pytest.mark.slow
def test_mixed_precision() -> None:
    """The same losses and masters; over more steps the same factors, and the same steps skipped.

    Masters differ by rounding in fp32, 2e-8 of their norm. Once one of them lies so near to the middle of two fp16
    numbers that the copies round apart, later gradients differ as fp16 does. So values are compared before that."""
    module = program("mixed_precision")
    sets = [f"precision.loss_scale={module['FIRST']}", f"precision.loss_scale_every={module['EVERY']}"]
    for steps in (7, module["STEPS"]):
        done, masters = module["train"](module["Model"](), steps)
        known = {**module, "STEPS": steps}
        ours = trained(
            0, 1, known, module["Model"](), "dp=1", "optim.name=adam", "precision.mode=fp16", *sets
        )
        assert done.factors == ours["factor"]
        updates = [0, *ours["updates"]]
        assert [step for step in range(steps) if updates[step] == updates[step + 1]] == done.skipped
        if steps == 7:
            assert updates[-1] == 3
            assert done.losses == pytest.approx(ours["loss"], rel=1e-6)
            assert_close_tensors(masters, joined([ours], "weights"), "masters")
        else:
            assert max(done.factors[4:]) > done.factors[4], "it grows"
            assert max(done.skipped) > 4, "and overflows again"


def test_levels() -> None:
    """What arrives of the same numbers, by every compressor."""
    module = program("levels")
    x = module["gradient"](0)
    by_hand = {"int4": module["equal"](4), "nf4": module["normal"](), "int8": module["equal"](8)}
    for name, levels in (by_hand | {"dynamic8": module["dynamic"]()}).items():
        blocks = compressor(name)
        assert isinstance(blocks, Blocks)
        assert blocks.block == module["BLOCK"]
        quantizer = Quantizer(blocks.bits, blocks.block, [len(x)], x.device, blocks.levels)
        ours = torch.empty_like(x[None])
        quantizer.decode(quantizer.encoded(x[None]), ours)
        close([module["rounded"](x, levels)], [ours[0]], 1e-6)


@only("adam")
@pytest.mark.parametrize("name", ["adam", "muon"])
def test_adam_and_muon(name: str) -> None:
    """30 steps of each: losses and weights."""
    module = program("adam_and_muon")
    model = module["Model"]()
    losses, _ = module["train"](model, name)
    ours_by = {"adam": "adamw", "muon": "muon"}[name]
    ours = trained(0, 1, module, module["Model"](), "dp=1", f"optim.name={ours_by}")
    assert losses == pytest.approx(ours["loss"], rel=1e-4)
    assert_close_tensors(
        {n: p.detach() for n, p in model.named_parameters()}, joined([ours], "weights"), "weights"
    )


def test_recomputation() -> None:
    """The same bits as Fivefold's full recomputation, and as without; as many bytes kept."""
    module = program("recomputation")
    x = torch.randn(module["B"], module["T"], module["D"])
    models = [module["Model"]() for _ in range(3)]
    module["recompute"](models[0])
    recompute(models[1], ["full"] * module["BLOCKS"])
    hand, ours, plain = (module["step"](model, x) for model in models)
    for other in (ours, plain):
        assert hand[0] == other[0]
        assert hand[1].keys() == other[1].keys()
        assert all(torch.equal(g, other[1][name]) for name, g in hand[1].items())
    # PyTorch's checkpoint hides from hooks what a block keeps: the input of the loss is left
    assert hand[2] == (module["BLOCKS"] + 1) * x.nbytes < plain[2] / 5


def test_flash_attention() -> None:
    module = program("flash_attention")
    B, H, T, d = (module[name] for name in ("B", "H", "T", "HEAD"))
    q, k, v, dout = torch.randn(4, B, H, T, d, generator=torch.Generator().manual_seed(0)).unbind()
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    out = module["FlashAttention"].apply(*inputs)
    by_hand = [out, *grad(out, inputs, dout)]
    qkv = torch.stack((q, k, v)).permute(1, 3, 0, 2, 4).flatten(2).contiguous().requires_grad_()
    ours = qkv_attention(qkv, H, H, None, None, True)
    (dqkv,) = grad(ours, qkv, dout.transpose(1, 2).flatten(2))
    parts = [x.unflatten(2, (H, d)).transpose(1, 2) for x in (ours, *dqkv.chunk(3, -1))]
    close(by_hand, parts, 1e-6)  # fp32
