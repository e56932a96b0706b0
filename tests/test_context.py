"""Context parallelism computes what one process computes: attention, logits, loss, gradients, weights, validation."""

from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import only, slow
from parity import assert_equal, joined, state_of, steps
from ranks import run_ranks
from torch import Tensor

from fivefold.comm import Axis
from fivefold.errors import UserError
from fivefold.kernels import matmul, native, partial_attention
from fivefold.kernels.blockwise_attention import qkv_attention
from fivefold.kernels.partial_attention import attend, attend_backward, merge, queries
from fivefold.parallel import context, mesh
from fivefold.recipe import Recipe, change, load, resolve
from fivefold.sharding.layout import Layout
from fivefold.sharding.sequence import METHODS, token_spans
from fivefold.step.step import forward_backward
from fivefold.train.share import share_of

ROWS, MICROBATCH, T, V = 8, 4, 32, 96
MODELS = {
    "llama": ["model.kv_heads=4"],
    "llama gqa": ["model.heads=8", "model.kv_heads=4", "model.tie_embeddings=true"],
    "gpt2": ["model.arch=gpt2"],
    "bert": ["model.arch=bert"],
}
TINY = [
    "model.layers=2", "model.dim=32", "model.heads=4", f"model.seq_len={T}", f"model.vocab_size={V}",
    "model.init_std=0.1", "train.steps=6", f"train.global_batch_size={ROWS}", f"train.microbatch_size={MICROBATCH}",
    "train.sample_every=0", "optim.lr=1e-3", "optim.warmup_steps=1", "optim.grad_clip=0.5", "precision.mode=fp32",
    "layout.dp_replicate=1",
    # Adam divides a gradient by its size. That of a key's bias is 0 but for rounding (softmax does not see it), and
    # its updates would be noise as large as any: eps is above the noise.
    "optim.eps=1e-4",
]  # fmt: skip


class Source:
    """Random sequences. Targets that count: every one; or unevenly many at some places, in some sequences none; or
    those in front only, which are all on the first rank."""

    def __init__(self, targets: str = "all"):
        self.targets = targets

    def batch(self, i: int, rows: range) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(i)
        tokens = torch.randint(0, V, (ROWS, T + 1), generator=draw)
        inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
        kept = torch.ones(ROWS, T, dtype=torch.bool)
        if self.targets == "front":
            kept[:] = torch.arange(T) < T // 8
        if (
            self.targets == "uneven"
        ):  # of four sequences one has them in front, one at its end, one some, one none
            kept = torch.rand(ROWS, T, generator=draw) < 0.3
            kept[0::4], kept[1::4], kept[3::4] = torch.arange(T) < 5, torch.arange(T) > 25, False
        targets[~kept] = -100
        return inputs[list(rows)], targets[list(rows)]


def recipe_of(model: str, *overrides: str) -> Recipe:
    return resolve(change(load("quickstart", TINY), [*MODELS[model], *overrides]), vocab_size=V)


def on(layout: str, model: str, *overrides: str) -> tuple[int, Recipe]:
    """(ranks, recipe) of a model on a layout."""
    recipe = recipe_of(model, *(f"layout.{part}" for part in layout.split(",")), *overrides)
    return Layout.from_recipe(recipe.layout).ranks, recipe


@cache
def one_process(model: str, targets: str = "all", mode: str = "fp32") -> dict:
    return steps(0, 1, recipe_of(model, f"precision.mode={mode}"), Source(targets))


LAYOUTS = [
    f"{sizes},cp_method={method}" for sizes in ("cp=2", "cp=4", "cp=2,dp_replicate=2") for method in METHODS
]


def quick(layout: str, model: str) -> bool:
    """`make test` has it."""
    if "all_gather" in layout:
        return model == "llama gqa" and layout.startswith("cp=2,cp")
    return model == "llama" or "cp=2,cp" in layout


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        pytest.param(layout, model, marks=[] if quick(layout, model) else pytest.mark.slow)
        for model in MODELS
        for layout in LAYOUTS
    ],
)
def test_equals_one_process(layout, model):
    world, recipe = on(layout, model)
    targets = "uneven" if model == "bert" else "all"  # bert has masked tokens only
    assert_equal(run_ranks(world, steps, recipe, Source(targets)), one_process(model, targets))


@pytest.mark.parametrize(
    "layout", ["cp=4", "cp=2,cp_method=ulysses,dp_replicate=2", *slow("cp=4,cp_method=all_gather")]
)
def test_ignored_targets_may_lie_anywhere(layout):
    """A rank may have none that count: still the mean is over those of all."""
    world, recipe = on(layout, "llama")
    assert_equal(run_ranks(world, steps, recipe, Source("uneven")), one_process("llama", "uneven"))


@only("llama-cp=2,zero=2", "bert-cp=2")
@pytest.mark.parametrize("layout", ["cp=2", "cp=2,zero=2", "cp=4,zero=3", "cp=2,zero=2,cp_method=ulysses"])
@pytest.mark.parametrize("model", ["bert", "llama"])
def test_a_rank_without_targets(layout, model):
    """In no microbatch of any step: it still has zeros to sum, and takes part in everything."""
    world, recipe = on(layout, model)
    assert_equal(run_ranks(world, steps, recipe, Source("front")), one_process(model, "front"))


@pytest.mark.parametrize(
    ("layout", "overrides"),
    [
        ("cp=2,zero=1", []),
        ("cp=2,zero=3,dp_shard=2", []),
        ("cp=2,tp=2,sp=true", []),
        ("cp=2,tp=2,cp_method=ulysses", []),
        pytest.param("cp=2,tp=2,cp_method=all_gather,sp=true", [], marks=pytest.mark.slow),
        pytest.param("cp=2,cp_method=all_gather,recompute=full", [], marks=pytest.mark.slow),
        pytest.param("cp=2,cp_method=all_gather,zero=3,dp_shard=2", [], marks=pytest.mark.slow),
        pytest.param("cp=8,cp_method=all_gather", [], marks=pytest.mark.slow),
        ("cp=2,recompute=full", []),
        pytest.param("cp=2,tp=2,dp_replicate=2,sp=true", [], marks=pytest.mark.slow),
        pytest.param("cp=4,zero=2,dp_replicate=2", [], marks=pytest.mark.slow),
        pytest.param("cp=8", ["model.seq_len=32"], marks=pytest.mark.slow),
    ],
)
def test_with_other_axes(layout, overrides):
    world, recipe = on(layout, "llama gqa", *overrides)
    assert_equal(run_ranks(world, steps, recipe, Source(), timeout_s=60), one_process("llama gqa"))


@pytest.mark.parametrize("layout", ["cp=4", "cp=4,cp_method=ulysses", *slow("cp=4,cp_method=all_gather")])
def test_in_bf16_no_worse_than_one_process(layout):
    """Both in bf16, against one process in fp32: the difference over all gradients may be a quarter larger, that of
    the losses by bf16's spacing. The ring rounds the sums over the keys of each rank (and with four ranks a key's
    gradient four times) where one process rounds one."""
    world, recipe = on(layout, "llama gqa", "precision.mode=bf16")
    answers = run_ranks(world, steps, recipe, Source())
    true, plain = one_process("llama gqa"), one_process("llama gqa", mode="bf16")
    errors = [distance(joined(a, "gradients"), joined([true], "gradients")) for a in (answers, [plain])]
    assert errors[0] < 1.25 * errors[1], errors
    assert answers[0]["loss"] == pytest.approx(true["loss"], rel=2**-8)


def distance(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Relative, over all tensors together."""
    difference = sum((got[name] - wanted[name]).square().sum() for name in wanted)
    return float((difference / sum(tensor.square().sum() for tensor in wanted.values())) ** 0.5)


# ------------------------------------------------------------------------------------ places and seams


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("cp", [2, 3, 4])
def test_ranks_divide_the_sequence(method, cp):
    layout, T = Layout(cp=cp, cp_method=method), 12 * cp
    places = [[p for span in token_spans(layout, T, i) for p in range(*span)] for i in range(cp)]
    assert sorted(p for mine in places for p in mine) == list(range(T))
    assert all(mine == sorted(mine) and len(mine) == 12 for mine in places)
    if method != "ulysses":  # a chunk and its mirror image
        assert all(a + b == T - 1 for mine in places for a, b in zip(mine, reversed(mine), strict=True))


def seams(rank: int, world: int, recipe: Recipe) -> tuple[list, list, list, Tensor]:
    """(positions, inputs, targets, logits) of this rank, of the first two sequences."""
    state = state_of(rank, world, recipe)
    (microbatch,) = share_of(Source(), 0, 2, 2, state.mesh)
    where = microbatch.positions
    assert where is not None
    with torch.no_grad():
        logits = state.module.eval()(microbatch.inputs, **microbatch.options())
    return where.tolist(), microbatch.inputs.tolist(), microbatch.targets.tolist(), logits


@pytest.mark.parametrize(
    "layout", ["cp=2", "cp=4", "cp=4,cp_method=ulysses", *slow("cp=4,cp_method=all_gather")]
)
@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_every_position_is_right_at_the_seams(layout, model):
    """Each token's position, target and logits are those it has in the whole sequence."""
    tokens, following = Source().batch(0, range(2))
    with torch.no_grad():
        wanted = state_of(0, 1, recipe_of(model)).module.eval()(tokens)
    world, recipe = on(layout, model)
    for where, inputs, targets, logits in run_ranks(world, seams, recipe):
        assert inputs == tokens[:, where].tolist()
        assert targets == following[:, where].tolist()
        error = (logits - wanted[:, where]).norm(dim=-1) / wanted[:, where].norm(dim=-1)
        assert error.max() < 1e-5


# ------------------------------------------------------------------------------------------- the ring


def count_work(rank: int, world: int, recipe: Recipe) -> tuple[int, int, int]:
    """(query-key pairs of one head in one forward, in one backward, bytes sent in both) on this rank."""
    state = state_of(rank, world, recipe)
    pairs, sent, exchange = {"forward": 0, "backward": 0}, [], Axis.start_moves

    def counted(name, function):
        def call(rows, k, v, causal, tiles, soft_cap):
            Q, S = (rows if isinstance(rows, Tensor) else rows.q).shape[2], k.shape[2]
            pairs[name] += Q * (Q + 1) // 2 if causal else Q * S
            return function(rows, k, v, causal, tiles, soft_cap)

        return call

    def spy(self, sends, receives):
        sent.extend(leaving.nbytes for leaving, _ in sends)
        return exchange(self, sends, receives)

    try:
        context.attend = counted("forward", attend)
        context.attend_backward = counted("backward", attend_backward)
        Axis.start_moves = spy  # type: ignore[method-assign]
        forward_backward(state, share_of(Source(), 0, 1, 1, state.mesh), seed=0)
    finally:
        context.attend, context.attend_backward = attend, attend_backward
        Axis.start_moves = exchange  # type: ignore[method-assign]
    return pairs["forward"], pairs["backward"], sum(sent)


@pytest.mark.parametrize(
    ("cp", "method"), [(2, "ring"), (4, "ring"), (4, "all_gather"), *slow((2, "all_gather"))]
)
def test_every_rank_computes_the_same_number_of_pairs(cp, method):
    """Exactly a share of the causal half, T (T + 1) / 2: nothing masked is computed but within a rank's own part."""
    world, recipe = on(f"cp={cp},cp_method={method}", "llama", "model.layers=1")
    answers = run_ranks(world, count_work, recipe)
    assert [answer[:2] for answer in answers] == [(T * (T + 1) // 2 // cp,) * 2] * cp


@pytest.mark.parametrize("cp", [2, 4])
def test_the_ring_carries_only_keys_that_are_needed(cp):
    """Of the (cp - 1) ranks that a rank's keys visit, those after it need half of them: in sum over the ranks three
    quarters. They travel in forward and again in backward, and their gradients travel back once."""
    world, recipe = on(f"cp={cp}", "llama", "model.layers=1")
    keys_and_values = 2 * (T // cp) * 32 * 4  # bytes of a rank's, fp32, at dim 32
    total = sum(answer[2] for answer in run_ranks(world, count_work, recipe))
    assert total == 3 * cp * (cp - 1) * keys_and_values * 3 // 4


# ------------------------------------------------------------------------------------------- memory


def saved_bytes(rank: int, world: int, recipe: Recipe) -> int:
    """Bytes of activations that one microbatch keeps for backward, each storage once, without weights."""
    state, kept = state_of(rank, world, recipe), {}
    module: Any = state.module
    weights = {p.untyped_storage().data_ptr() for p in module.parameters()}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, V, (1, recipe.model.seq_len), generator=generator)
    inputs = mesh.divided(tokens, tokens, None, state.mesh).inputs
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        hidden = module.begin(inputs, torch.arange(inputs.shape[1]))
        tables = module.context(torch.arange(inputs.shape[1]))
        for block in module.blocks.values():
            hidden = block(hidden, *tables)
    return sum(kept.values())


@pytest.mark.parametrize("method", ["ring", "ulysses", *slow("all_gather")])
def test_activations_take_a_share_of_the_memory(method):
    """Of one process's, which keeps no probabilities either at this length."""
    long = ["model.seq_len=2048", "train.microbatch_size=1"]
    alone = saved_bytes(0, 1, recipe_of("llama", *long))
    for cp in (2, 4):
        world, recipe = on(f"cp={cp},cp_method={method}", "llama", *long)
        most = max(run_ranks(world, saved_bytes, recipe))
        assert most < 1.02 * alone / cp, f"cp {cp}: {most / alone:.3f} of one process"


# ------------------------------------------------------------------------------------------- kernels


@pytest.fixture(params=["native", "plain"])
def path(request, monkeypatch):
    """Runs a test on the native kernels and on PyTorch's own operations."""
    if request.param == "plain":
        monkeypatch.setattr(native, "usable", lambda *tensors: False)
    elif native.why_not():
        pytest.skip(f"native kernels: {native.why_not()}")


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float16, 4 * 2**-11)])
def test_other_dtypes_have_blocks_too(dtype, tolerance):
    """As on a GPU that computes in fp16 without flash attention; the softmax is in fp32 in any case."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 150, 8, dtype=torch.float64).to(dtype)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        *(x.double() for x in (q, k, v)), is_causal=True
    )
    assert (attend(q, k, v, True)[0].double() - wanted).abs().max() < tolerance * wanted.abs().max()


# bf16 rounds the scores, the probabilities, their gradients and the results, by up to 2^-9 of the largest each.
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 4e-6), (torch.bfloat16, 8 * 2**-9), (torch.float16, 8 * 2**-12)]
)
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize(("Q", "S"), [(40, 40), (300, 300), (300, 70)])
def test_parts_put_together_are_attention(path, dtype, tolerance, kv_heads, Q, S):
    """Queries that see their own keys (causal) and all of another block: values and gradients, against fp64."""
    torch.manual_seed(0)
    B, H, d = 2, 4, 16
    q, dout = torch.randn(2, B, H, Q, d).to(dtype)
    own, other = torch.randn(2, B, kv_heads, Q, d).to(dtype), torch.randn(2, B, kv_heads, S, d).to(dtype)
    out, lse = attend(q, own[0], own[1], True)
    out = out.float()
    merge(out, lse, *attend(q, other[0], other[1], False))
    rows = queries(q, dout, out.to(dtype), lse)
    first, second = (
        attend_backward(rows, own[0], own[1], True),
        attend_backward(rows, other[0], other[1], False),
    )
    got = [out, first[0].float() + second[0].float(), *first[1:], *second[1:]]

    inputs = [x.double().requires_grad_() for x in (q, *own, *other)]
    q64, k, v, k2, v2 = inputs
    mask = torch.cat([torch.ones(Q, Q).tril(), torch.ones(Q, S)], dim=1).bool()
    keys, values = torch.cat([k, k2], dim=2), torch.cat([v, v2], dim=2)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        q64, keys, values, attn_mask=mask, enable_gqa=True
    )
    gradients = torch.autograd.grad(wanted, inputs, dout.double())
    for a, b in zip(got, [wanted, *gradients], strict=True):
        assert a.shape == b.shape
        error = ((a.double() - b).abs().max() / b.abs().max()).item()
        assert error < tolerance, f"{error:.1e}"


def test_scores_of_any_size_are_merged():
    """Neither part of a sum may overflow, nor vanish beside one that is far larger."""
    out, lse = torch.zeros(1, 1, 3, 2), torch.tensor([[[-500.0, 500.0, 3.0]]])
    merge(out, lse, torch.ones(1, 1, 3, 2), torch.tensor([[[500.0, -500.0, 3.0]]]))
    assert out[0, 0, :, 0].tolist() == [1.0, 0.0, 0.5]
    assert lse[0, 0].tolist() == pytest.approx([500.0, 500.0, 3.0 + torch.tensor(2.0).log().item()])


def test_gpu_kernels_are_called_with_the_right_shapes():
    """Without a GPU only their shapes can be checked, on "meta"."""
    q, kv = torch.empty(2, 4, 64, 16, dtype=torch.bfloat16, device="meta"), torch.empty(2, 2, 2, 32, 16)
    kv = kv.to("meta", torch.bfloat16)
    assert partial_attention.has_flash(q)
    out, lse = attend(q, kv[0], kv[1], False)
    assert (out.shape, lse.shape) == (q.shape, q.shape[:3])
    dq, dk, dv = attend_backward(queries(q, out, out, lse), kv[0], kv[1], False)
    assert (dq.shape, dk.shape, dv.shape) == (q.shape, kv[0].shape, kv[1].shape)


def exchange_there_and_back(rank: int, world: int) -> bool:
    """Ulysses alone against attention of one process over the same sequence, fp64."""
    torch.manual_seed(0)
    assert dist.group.WORLD is not None
    axis = Axis("cp", range(world), rank, torch.device("cpu"), dist.group.WORLD)
    x = torch.randn(2, 8 * world, 3 * 4 * 6, dtype=torch.float64)
    core = SimpleNamespace(heads=4, kv_heads=4, causal=True)
    mine = x[:, 8 * rank : 8 * (rank + 1)].clone().requires_grad_()
    whole = x.clone().requires_grad_()
    out = context.Ulysses(core, axis, Layout(cp=world))(mine)  # type: ignore[arg-type]
    wanted = qkv_attention(whole, 4, 4, None, None, True)
    weight = torch.randn_like(wanted)
    part = slice(8 * rank, 8 * (rank + 1))
    (out * weight[:, part]).sum().backward()
    (wanted * weight).sum().backward()
    assert mine.grad is not None
    assert whole.grad is not None
    return torch.allclose(out, wanted[:, part]) and torch.allclose(mine.grad, whole.grad[:, part])


@pytest.mark.parametrize("world", [2, 4])
def test_heads_and_sequence_change_places_and_back(world):
    assert run_ranks(world, exchange_there_and_back) == [True] * world


# ------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["layout.cp=4", "model.seq_len=36"],
         r"2 x layout.cp = 8 must divide model.seq_len = 36: .* layout.cp = 3, or model.seq_len = 40"),
        (["layout.cp=3", "layout.cp_method=ulysses", "model.seq_len=32", "model.heads=6", "model.dim=48"],
         r"layout.cp = 3 must divide model.seq_len = 32: .* layout.cp = 2, or model.seq_len = 33"),
        (["layout.cp=4", "layout.cp_method=ulysses", "model.kv_heads=2"],
         r"layout.cp x layout.tp = 4 must divide model.kv_heads = 2: .* layout.cp = 2, or layout.cp_method = ring"),
        (["layout.cp=4", "layout.tp=2", "layout.cp_method=ulysses"],
         r"layout.cp x layout.tp = 8 must divide model.heads = 4: .* layout.cp = 2, or"),
        (["layout.cp_method=star"], '"star": must be one of "ring", "ulysses", "all_gather"'),
    ],
)  # fmt: skip
def test_what_cannot_be_divided_is_refused(overrides, message):
    with pytest.raises(UserError, match=message):
        change(load("quickstart", TINY), overrides)


def test_sums_of_fp16_where_the_processor_multiplies_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then a tile's gradients are fp32, and a sum over two tiles is fp16."""
    monkeypatch.setattr(matmul, "has_cpu_fp16", lambda: False)
    torch.manual_seed(0)
    T = next(
        T
        for T in range(64, 8192, 64)
        if len(
            {
                tile.start
                for tile in partial_attention._tiles(torch.empty(1, 2, T, 16), torch.empty(1, 2, T, 16), True)
            }
        )
        == 2
    )
    q, k, v, dout = torch.randn(4, 1, 2, T, 16).half()
    got, wanted = (
        attend_backward(queries(*(x.to(dtype) for x in (q, dout, out)), lse), k.to(dtype), v.to(dtype), True)
        for dtype in (torch.float16, torch.float32)
        for out, lse in [attend(q.float(), k.float(), v.float(), True)]
    )
    assert got[1].dtype == torch.float16
    for a, b in zip(got, wanted, strict=True):
        assert ((a.float() - b).norm() / b.norm()).item() < 2e-3
