"""Packed documents: what attention sees, what a step learns from them in any layout, and how they are packed."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import flash_twin
import hypothesis.strategies as st
import numpy as np
import pyarrow.parquet
import pytest
import torch
from families import overrides
from hypothesis import given, settings
from marks import all_but, slow, slow_but
from parity import assert_equal, state_of, steps
from ranks import run_ranks
from torch.nn.functional import scaled_dot_product_attention

from fivefold.data import NOT_COUNTED, Batches, prepare
from fivefold.data.batches import Concatenated
from fivefold.data.dataset import Packed, best_fit, cut_of, pieces
from fivefold.data.kinds.token_files import write_indexed
from fivefold.data.tokens import COUNTED, ENDS, Shard, Tokens
from fivefold.errors import UserError
from fivefold.kernels import native, partial_attention
from fivefold.kernels.blockwise_attention import Documents, qkv_attention
from fivefold.kernels.fused_attention import Sees
from fivefold.kernels.partial_attention import attend, attend_backward, queries
from fivefold.kernels.tiling import Columns, Sample, scores, shared_spans
from fivefold.models.base import build
from fivefold.parallel import context
from fivefold.recipe import Recipe, change, flops_per_token, load, resolve
from fivefold.sharding.layout import Layout
from fivefold.sharding.sequence import ring_columns, token_spans
from fivefold.step.step import take_step
from fivefold.train.share import share_of
from fivefold_plan.advice.explain import summary
from fivefold_plan.cluster.clusters import parse
from fivefold_plan.predict import predict
from fivefold_plan.setting import FIVEFOLD, documents_of
from fivefold_plan.setting import Documents as PlannedDocuments

ROWS, T, V, END = 8, 32, 96, 0
MODELS = {
    "llama": ["model.heads=4", "model.kv_heads=2"],
    "gpt2": ["model.arch=gpt2"],
    "bert": ["model.arch=bert"],
    "olmo2": ["model.arch=olmo2"],
    "smollm3": overrides("smollm3"),
    "gemma3": overrides("gemma3"),
    "qwen3_next": [*overrides("qwen3_next"), "model.balance=none"],
    "deepseek": [
        "model.arch=deepseek", "model.query_rank=20", "model.kv_rank=12", "model.nope_dim=8", "model.rope_dim=4",
        "model.value_dim=6", "model.experts=4", "model.experts_per_token=2", "model.expert_ffn_dim=24",
        "model.expert_groups=1", "model.groups_per_token=1", "model.dense_layers=1", "model.balance=none",
    ],
}  # fmt: skip
TINY = [
    "model.layers=2", "model.dim=32", "model.heads=4", f"model.seq_len={T}", f"model.vocab_size={V}",
    "model.init_std=0.1", "train.steps=6", f"train.global_batch_size={ROWS}", "train.microbatch_size=2",
    "train.sample_every=0", "optim.lr=1e-3", "optim.warmup_steps=1", "optim.grad_clip=0.5", "precision.mode=fp32",
    "optim.eps=1e-4", "layout.dp_replicate=1",
]  # fmt: skip


def recipe_of(model: str, *overrides: str) -> Recipe:
    return resolve(change(load("quickstart", TINY), [*MODELS[model], *overrides]), vocab_size=V)


def tokens_of(tmp_path: Path, ids: list[int]) -> Tokens:
    path = tmp_path / "ids.bin"
    np.array(ids, "<u2").tofile(path)
    return Tokens([Shard(path, "<u2", 0, len(ids))])


class Source:
    """Random documents of 1 to 40 tokens, one behind the other, cut by sequences. Targets count unevenly often, and in
    one sequence of eight never."""

    uneven = True

    def batch(self, i: int, rows: range) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        draw = np.random.default_rng(i)
        tokens = draw.integers(0, V, (ROWS, T + 1))
        begins = draw.random((ROWS, T)) < draw.choice([0.02, 0.1, 0.4], (ROWS, 1))
        first = np.maximum.accumulate(np.where(begins, np.arange(T), 0), axis=1)
        targets = np.where(draw.random((ROWS, T)) < draw.random((ROWS, 1)), tokens[:, 1:], NOT_COUNTED)
        targets[3] = NOT_COUNTED
        return tokens[rows, :-1], targets[rows], first[rows]

    def counted(self, i: int, size: int) -> int:
        return int((self.batch(i, range(size))[1] >= 0).sum())


class BestFit(Source):
    """Random documents of up to two sequences, packed with `best_fit`. batches: as `Packed` reads them."""

    def __init__(self) -> None:
        draw = np.random.default_rng(0)
        documents = [[*draw.integers(1, V, draw.integers(1, 2 * T)), END] for _ in range(4 * ROWS)]
        with TemporaryDirectory() as folder:
            packed = Packed(tokens_of(Path(folder), [int(i) for one in documents for i in one]), T, END)
            self.batches = [packed.read(np.arange(i * ROWS, (i + 1) * ROWS)) for i in range(4)]

    def batch(self, i: int, rows: range) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        inputs, targets, first = self.batches[i]
        assert first is not None
        return inputs[rows], targets[rows], first[rows]


SOURCES = {"concat": Source, "best_fit": BestFit}


# ------------------------------------------------------------------------------------------ attention


@pytest.fixture(params=["native", "plain"])
def path(request, monkeypatch):
    if request.param == "plain":
        monkeypatch.setattr(native, "usable", lambda *tensors: False)
    elif native.why_not():
        pytest.skip(f"native kernels: {native.why_not()}")


def firsts(B: int, T: int, share: float) -> np.ndarray:
    begins = np.random.default_rng(0).random((B, T)) < share
    return np.maximum.accumulate(np.where(begins, np.arange(T), 0), axis=1)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 4e-6), (torch.bfloat16, 8 * 2**-9)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("length", "share"), [(37, 0.2), (300, 0.01), (300, 0.2)])
def test_a_query_sees_its_own_document(path, dtype, tolerance, causal, length, share):
    """Values and gradients, against fp64. Heads share keys; blocks of queries cross the borders of documents."""
    torch.manual_seed(0)
    B, H, K, d = 3, 4, 2, 16
    first = firsts(B, length, share)
    documents = Documents(first)
    qkv = torch.randn(B, length, (H + 2 * K) * d).to(dtype)
    given_, wanted_ = qkv.clone().requires_grad_(), qkv.double().requires_grad_()
    dout = torch.randn(B, length, H * d)
    got = qkv_attention(given_, H, K, None, None, causal, False, documents)
    got.backward(dout.to(dtype))
    q, k, v = (x.transpose(1, 2) for x in wanted_.view(B, length, -1, d).split([H, K, K], 2))
    at = torch.from_numpy(first)
    seen = at[:, :, None] == at[:, None, :]
    seen = (seen.tril() if causal else seen)[:, None]
    wanted = scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True).transpose(1, 2).flatten(2)
    wanted.backward(dout.to(dtype).double())
    for a, b in ((got, wanted), (given_.grad, wanted_.grad)):
        assert (a.double() - b).abs().max() < tolerance * b.abs().max()


def test_keys_of_other_documents_are_skipped():
    """Tiles have few keys in vain, and a batch without borders has the tiles of whole sequences."""
    T = 1024
    first = np.tile(np.arange(T) // 64 * 64, (4, 1))
    tiles = Documents(first).tiles(((0, T),), ((0, T),), True, 4)
    computed = sum((t.rows.stop - t.rows.start) * (t.end - t.start) * (t.high - t.low) for t in tiles)
    assert computed == 4 * T * 64  # blocks of 64 queries see 64 keys each
    assert len(tiles) == T // 64, "all sequences in one matmul"
    plain = Documents(np.zeros((4, T), np.int64)).tiles(((0, T),), ((0, T),), True, 4)
    assert [t[:5] for t in plain] == [(slice(0, 4), s, s + 64, 0, s + 64) for s in range(0, T, 64)]


def test_spans_are_shared_while_little_is_computed_in_vain():
    assert shared_spans([0, 0, 0], [10, 10, 9]) == [(0, 3, 0, 10)]
    assert shared_spans([0, 90, 90], [10, 100, 100]) == [(0, 1, 0, 10), (1, 3, 90, 100)]
    assert shared_spans([0, 5, 0], [10, 5, 10]) == [(0, 1, 0, 10), (2, 3, 0, 10)], (
        "empty spans are in no tile"
    )


def test_gpus_take_documents_of_any_length():
    """Without a GPU only their shapes can be checked, on "meta"."""
    documents = Documents(firsts(2, 64, 0.2), "meta")
    qkv = torch.empty(2, 64, (4 + 2 * 2) * 16, dtype=torch.bfloat16, device="meta", requires_grad=True)
    out = qkv_attention(qkv, 4, 2, None, None, True, False, documents)
    assert out.shape == (2, 64, 4 * 16)
    out.sum().backward()
    assert qkv.grad is not None
    assert qkv.grad.shape == qkv.shape
    lengths = [n for row in documents.first_BT for n in np.unique(row, return_counts=True)[1].tolist()]
    assert Documents(documents.first_BT).cumulative.diff().tolist() == lengths
    assert sum(lengths) == 2 * 64


SHARES = (0.02, 0.2, 0.6, 1.0)
"""Of tokens that begin a document."""
TURNS = {
    "own": (((0, 8), (56, 64)), ((0, 8), (56, 64)), True),
    "late queries": (((56, 64),), ((8, 16), (48, 56)), False),
    "early keys": (((8, 16), (48, 56)), ((0, 8),), False),
    "gathered": (((24, 40),), ((0, 40),), True),
    "any": (((0, 32),), ((0, 64),), False),
}
"""Columns of 64: what a rank of a ring multiplies in a turn, and of gathered keys."""


@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize("share", SHARES)
def test_flash_attention_computes_what_tiles_do(share, turn):
    """Values, log-sum-exp and gradients of the GPUs' path, by a twin of PyTorch's operators; borders of ranks cut
    documents. And the pairs that the planner counts."""
    torch.manual_seed(0)
    queries_, keys, causal = TURNS[turn]
    (B, H, K, d), documents = (3, 4, 2, 16), Documents(firsts(3, 64, share))
    at, there = (torch.cat([torch.arange(*span) for span in columns]) for columns in (queries_, keys))
    q, dout, out = torch.randn(3, B, H, len(at), d)
    k, v = torch.randn(2, B, K, len(there), d)
    tiles = documents.shared(queries_, keys, causal, q)
    found = attend(q, k, v, causal, tiles)
    rows = queries(q, dout, out, torch.logaddexp(found[1], torch.zeros(())))
    wanted = [*found, *attend_backward(rows, k, v, causal, tiles)]
    with flash_twin.on_cpu() as calls:
        lengths = documents.shared(queries_, keys, causal, q)
        got = [*attend(q, k, v, causal, lengths), *attend_backward(rows, k, v, causal, lengths)]
    seen = documents.mask(causal)[:, 0][:, at][:, :, there]
    assert [call[1] for call in calls] == ([B * len(at)] * 2 if seen.any() else [])
    shared = sum(len(np.intersect1d(row[at], row[there])) for row in documents.first_BT)
    assert all(n <= 3 * shared + 2 for n, _ in calls), "others are joined"
    for a, b in zip(got, wanted, strict=True):
        assert torch.allclose(a, b, atol=1e-5)
    assert documents.tiling.pairs(queries_, keys, causal).sum() == int(seen.sum())


@pytest.mark.parametrize("model", MODELS)
def test_a_document_is_as_it_is_alone(model):
    """Loss and gradients of a packed sequence are those of its documents, each computed by itself from position 0."""
    recipe = recipe_of(model)
    module = build(recipe.model, device="cpu", seed=0).train()
    tokens = torch.randint(0, V, (1, T), generator=torch.Generator().manual_seed(1))
    targets = tokens.roll(-1)
    borders = [0, 5, 6, 20, T]
    first = np.repeat(borders[:-1], np.diff(borders))[None]
    packed = module(tokens, targets, documents=Documents(first))
    wanted = torch.autograd.grad(packed, list(module.parameters()), allow_unused=True)
    alone = torch.zeros(())
    for start, stop in pairwise(borders):
        alone = alone + module(tokens[:, start:stop], targets[:, start:stop]) * (stop - start) / T
    found = torch.autograd.grad(alone, list(module.parameters()), allow_unused=True)
    assert alone.item() == pytest.approx(packed.item(), rel=1e-6)
    assert module(tokens, targets).item() != pytest.approx(packed.item(), rel=1e-4)
    for a, b in zip(found, wanted, strict=True):
        assert (a is None) == (b is None)
        assert a is None or (a - b).abs().max() <= 2e-5 * b.abs().max() + 1e-8


# -------------------------------------------------------------------------------------------- layouts

LAYOUTS = [
    (model, layout, "concat")
    for model, layout in (
    ("llama", "dp_replicate=2"), ("llama", "dp_shard=2,zero=3"), ("llama", "tp=2,sp=true"), ("llama", "cp=2"),
    ("llama", "cp=4"), ("llama", "cp=2,cp_method=ulysses"), ("llama", "pp=2"), ("llama", "recompute=full"),
    ("llama", "pp=2,schedule=zb_h1,recompute=ops:attention"), ("gpt2", "cp=2,tp=2,sp=true"), ("bert", "cp=2"),
    ("bert", "tp=2,sp=true"), ("gpt2", "pp=2,cp=2,cp_method=ulysses"), ("deepseek", "tp=2,sp=true"),
    ("deepseek", "cp=2"), ("llama", "dp_replicate=2,cp=2"), ("llama", "cp=2,cp_method=all_gather"),
    ("llama", "cp=4,cp_method=all_gather"), ("bert", "cp=2,cp_method=all_gather"),
    ("gpt2", "cp=2,cp_method=all_gather,tp=2,sp=true"), ("gpt2", "pp=2,cp=2,cp_method=all_gather"),
    ("gemma3", "cp=4"), ("gemma3", "cp=2,cp_method=ulysses"), ("gemma3", "cp=4,cp_method=all_gather"),
    ("deepseek", "cp=2,cp_method=all_gather"), ("llama", "dp_shard=2,cp=2,cp_method=all_gather,zero=3"),
    ("qwen3_next", "cp=2"), ("qwen3_next", "cp=2,cp_method=all_gather"), ("qwen3_next", "tp=2,sp=true"),
    )
] + [("llama", layout, "best_fit") for layout in ("dp_shard=2,zero=3", "tp=2,sp=true", "cp=2", "pp=2")]  # fmt: skip


@cache
def one_process(model: str, packing: str) -> dict:
    return steps(0, 1, recipe_of(model, f"train.microbatch_size={ROWS}"), SOURCES[packing]())


SLOW = {
    ("llama", "dp_replicate=2", "concat"), ("llama", "cp=4", "concat"), ("bert", "tp=2,sp=true", "concat"),
    ("llama", "dp_replicate=2,cp=2", "concat"), ("deepseek", "cp=2", "concat"), ("llama", "tp=2,sp=true", "best_fit"),
    ("llama", "cp=2", "best_fit"), ("llama", "pp=2", "best_fit"), ("llama", "cp=4,cp_method=all_gather", "concat"),
    ("bert", "cp=2,cp_method=all_gather", "concat"), ("gpt2", "pp=2,cp=2,cp_method=all_gather", "concat"),
    ("gpt2", "cp=2,cp_method=all_gather,tp=2,sp=true", "concat"), ("deepseek", "cp=2,cp_method=all_gather", "concat"),
    ("llama", "dp_shard=2,cp=2,cp_method=all_gather,zero=3", "concat"), ("qwen3_next", "cp=2", "concat"),
    ("qwen3_next", "tp=2,sp=true", "concat"), ("gpt2", "cp=2,tp=2,sp=true", "concat"),
}  # fmt: skip
"""Their parts are in the others, too: `make test-all`."""


@all_but("llama-dp_shard=2,zero=3-concat", "bert-cp=2-concat", "llama-tp=2,sp=true-concat")
@pytest.mark.parametrize(
    ("model", "layout", "packing"),
    slow_but(set(LAYOUTS) - SLOW, LAYOUTS),
)
def test_layouts_equal_one_process(model, layout, packing):
    """One process computes the whole batch at once. So the loss is the mean over all targets that count, however they
    are spread over microbatches and ranks."""
    recipe = recipe_of(model, *(f"layout.{part}" for part in layout.split(",")))
    world = Layout.from_recipe(recipe.layout).ranks
    source = SOURCES[packing]()
    found = run_ranks(world, steps, recipe, source) if world > 1 else [steps(0, 1, recipe, source)]
    assert_equal(found, one_process(model, packing))


def steps_by_flash(rank: int, world: int, recipe: Recipe, source: Source) -> dict:
    """`steps` on the path for GPUs."""
    with flash_twin.on_cpu() as calls:
        found = steps(rank, world, recipe, source)
    assert calls
    return found


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("llama", "cp=2"),
        *slow(
            ("llama", "cp=4"), ("bert", "cp=2"), ("gpt2", "cp=2,recompute=full"), ("bert", "cp=4,cp_method=all_gather"),
            ("llama", "cp=2,cp_method=all_gather"),
        ),
    ],
)  # fmt: skip
def test_flash_attention_of_ranks_equals_one_process(model, layout):
    recipe = recipe_of(model, *(f"layout.{part}" for part in layout.split(",")))
    world = Layout.from_recipe(recipe.layout).ranks
    assert_equal(run_ranks(world, steps_by_flash, recipe, Source()), one_process(model, "concat"))


class Given:
    """One batch, of these documents."""

    def __init__(self, first: np.ndarray) -> None:
        self.first = first

    def batch(self, i: int, rows: range) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return 0 * self.first, 0 * self.first, self.first


def counted_scores(rank: int, world: int, recipe: Recipe, first: np.ndarray) -> tuple[int, int]:
    """Scores that attention of a rank computes in one forward and in its backward, of these documents."""
    state, found, kernels = state_of(rank, world, recipe), [0, 0], (context.attend, context.attend_backward)

    def counted(at: int, kernel):
        def call(q, k, v, causal, tiles, soft_cap):
            found[at] += sum(
                (t.rows.stop - t.rows.start) * (t.end - t.start) * (t.high - t.low) for t in tiles
            )
            return kernel(q, k, v, causal, tiles, soft_cap)

        return call

    try:
        context.attend, context.attend_backward = counted(0, kernels[0]), counted(1, kernels[1])
        take_step(state, recipe, share_of(Given(first), 0, len(first), len(first), state.mesh))
    finally:
        context.attend, context.attend_backward = kernels
    return found[0], found[1]


def test_ranks_compute_what_was_dealt_and_equally_much():
    """On real ranks, in forward and backward: the scores of the tiles that the planner counts."""
    first = firsts(2, 256, 0.02)
    layout = Layout(cp=4, cp_method="all_gather")
    sizes = ["model.seq_len=256", "model.layers=1", "train.global_batch_size=2"]
    recipe = recipe_of("llama", "layout.cp=4", "layout.cp_method=all_gather", *sizes)
    turns = Documents(first).tiling.turns(layout, True)
    wanted = [scores(Documents(first).tiling, of, True, 4) for (of,) in turns]
    assert run_ranks(4, counted_scores, recipe, first) == [(count, count) for count in wanted]


def work_of(first: np.ndarray, every: Sequence[Columns], causal: bool) -> list[int]:
    """Pairs of a query and a key that each rank has."""
    seen = Documents(first).mask(causal)[:, 0].sum(2).sum(0)
    return [sum(int(seen[a:b].sum()) for a, b in columns) for columns in every]


@settings(deadline=None, max_examples=8)
@given(st.integers(0, 99), st.sampled_from([2, 3, 4]), st.integers(1, 3), st.booleans())
def test_every_rank_is_dealt_equally_many_tokens(seed, ranks, B, causal):
    """Each column once. The work of ranks differs by less than in a zig-zag, and by little."""
    T, draw = 256 * ranks, np.random.default_rng(seed)
    begins = draw.random((B, T)) < draw.choice([0.003, 0.03], (B, 1))
    first = np.maximum.accumulate(np.where(begins, np.arange(T), 0), axis=1)
    every = Documents(first).tiling.dealt(ranks, causal)
    assert sorted(at for columns in every for span in columns for at in range(*span)) == list(range(T))
    assert {sum(b - a for a, b in columns) for columns in every} == {256}
    zigzag = [tuple(token_spans(Layout(cp=ranks), T, rank)) for rank in range(ranks)]
    work, before = work_of(first, every, causal), work_of(first, zigzag, causal)
    assert max(work) <= max(1.05 * np.mean(work), max(before))
    assert max(work) <= 1.15 * np.mean(work)


# ----------------------------------------------------------------------------------------------- data


def test_documents_begin_at_the_end_token_before_them(tmp_path):
    ids = [5, 6, END, 7, 8, 9, END, END, 4, 3, 2, 1, 5]
    causal = Concatenated(tokens_of(tmp_path, ids), 6, end=END).read(np.array([0, 1]))
    assert causal.inputs.tolist() == [[5, 6, END, 7, 8, 9], [END, END, 4, 3, 2, 1]]
    assert causal.first is not None
    assert causal.first.tolist() == [[0, 0, 2, 2, 2, 2], [0, 1, 1, 1, 1, 1]]
    masked = Concatenated(tokens_of(tmp_path, ids), 6, "mlm", END).read(np.array([0]))
    assert masked.first is not None
    assert masked.first.tolist() == [[0, 0, 0, 3, 3, 3]], "there the end token ends its document"
    for end in (None, 999):  # not known, or in none of these sequences: nothing is masked
        assert Concatenated(tokens_of(tmp_path, ids), 6, end=end).read(np.array([0, 1])).first is None


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_flags_say_what_counts_and_where_documents_end(tmp_path, packing):
    """Conversations hold end tokens inside, and begin with their own first token. Only answers count."""
    ids = [5, END, 7, 8, END, 4, END, 2, END]
    (tmp_path / "flags").mkdir()
    flags = tokens_of(tmp_path / "flags", [0, COUNTED, 0, 1, COUNTED | ENDS, 0, 0, 1, ENDS])
    tokens = Tokens(tokens_of(tmp_path, ids).shards, flags=flags)
    cut = Concatenated(tokens, 8, end=END) if packing == "concat" else Packed(tokens, 8, END)
    assert cut.uneven
    found = cut.read(np.arange(cut.count))
    assert found.first is not None
    if packing == "concat":
        assert found.targets.tolist() == [[END, -100, 8, END, -100, -100, 2, -100]]
        assert found.first.tolist() == [[0, 0, 0, 0, 0, 5, 5, 5]]
        texts = Tokens(tokens.shards, flags=tokens_of(tmp_path / "flags", [1, COUNTED | ENDS] + [1] * 7))
        read = Concatenated(texts, 3, end=END).read(np.array([0]))
        assert read.targets.tolist() == [[END, -100, 8]], "nothing of the document before a text predicts it"
        assert Concatenated(texts, 3).read(np.array([0])).targets.tolist() == [[END, 7, 8]]
    else:
        assert found.inputs.tolist() == [[5, END, 7, 8, 4, END, 2, END]]
        assert found.targets.tolist() == [[END, -100, 8, END, -100, 2, -100, -100]]
        assert found.first.tolist() == [[0, 0, 0, 0, 4, 4, 4, 7]]


def naive(lengths: list[int], capacity: int) -> list[int]:
    room: list[int] = []
    for length in sorted(lengths, reverse=True):
        fits = [r for r in room if r >= length]
        if fits:
            room[room.index(min(fits))] -= length
        else:
            room.append(capacity - length)
    return sorted(room)


@settings(deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=60), st.integers(20, 40))
def test_best_fit_decreasing(lengths, capacity):
    bins = best_fit(np.array(lengths), capacity)
    filled = np.bincount(bins, np.array(lengths))
    assert sorted((capacity - filled).astype(int).tolist()) == naive(lengths, capacity)


@pytest.mark.parametrize("ends", [True, False])
def test_packing_loses_no_token(tmp_path, ends):
    draw = np.random.default_rng(0)
    ids: list[int] = []
    for length in draw.integers(0, 60, 200).tolist():
        ids += [*draw.integers(1, 500, length).tolist(), END]
    ids = ids if ends else ids[:-1]
    tokens = tokens_of(tmp_path, ids)
    starts, lengths = pieces(tokens, 24, END)
    assert lengths.max() <= 24
    assert sorted(
        np.concatenate([np.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)])
    ) == list(range(len(ids)))
    packed = Packed(tokens, 24, END, folder=tmp_path / "kept")
    assert packed.fill > 0.99
    again = Packed(tokens, 24, END, folder=tmp_path / "kept")  # from its file
    found = again.read(np.arange(packed.count))
    counted = found.targets >= 0
    assert counted.sum() == len(ids)
    assert sorted(found.targets[counted].tolist()) == sorted(ids)
    assert found.first is not None
    inner = counted & (
        found.first < np.arange(24)
    )  # behind the first token of a piece: its neighbour in the text
    assert (found.inputs[:, 1:][inner[:, 1:]] == found.targets[:, :-1][inner[:, 1:]]).all()
    assert (found.inputs[~counted] == END).all()
    cut = found.inputs[counted & (found.first == np.arange(24))]
    whole = sum(
        length for length in np.diff(np.flatnonzero(np.array([END, *ids, END]) == END)) if length > 24
    )
    assert (cut != END).sum() <= whole // 24, "only documents longer than a sequence are cut"
    assert (
        Batches(packed, 24, 4, seed=0).counted(0, 4)
        == (Batches(packed, 24, 4, seed=0).batch(0)[1] >= 0).sum()
    )


def test_a_recipe_says_how_documents_are_cut(tmp_path):
    for name, text in (("a.txt", "one two\n" * 40), ("b.txt", "three\n" * 30), ("c.txt", "four five\n" * 50)):
        (tmp_path / name).write_text(text)
    sets = [f"data.source={tmp_path}", "data.tokenizer=bytes", "data.val_fraction=0", f"model.seq_len={T}"]
    recipe = load("quickstart", [*sets, "data.document_masks=true", "train.global_batch_size=4"])
    data = prepare(recipe)
    whole = cut_of(recipe, data, data.train)
    seen = whole.read(np.arange(whole.count))
    assert seen.first is not None
    assert (seen.first > 0).any()
    off = change(recipe, ["data.document_masks=false"])
    assert cut_of(off, data, data.train).read(np.arange(whole.count)).first is None
    assert cut_of(recipe, data, data.train, apart=False).read(np.arange(whole.count)).first is None
    best = cut_of(change(recipe, ["data.packing=best_fit"]), data, data.train)
    assert (best.read(np.arange(best.count)).targets >= 0).sum() == len(data.train)


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (["data.packing=best_fit", "data.source=tokens:x.bin"], "needs data.end_token"),
        (["data.packing=best_fit", "model.arch=bert"], "equally many tokens"),
        (["data.packing=best_fit", "data.stream=true"], "not supported with data.stream"),
        (["data.end_token=3"], "data.end_token"),
    ],
)
def test_what_is_refused(sets, said):
    with pytest.raises(UserError, match=said):
        load("quickstart", sets)


def test_the_planner_counts_the_tiles_that_kernels_compute():
    """In whole sequences, in each turn of a ring, and of dealt queries; pairs are those of the mask."""
    first, B = firsts(8, 256, 0.03), 2
    sample, zeros = Sample(first), np.zeros((B, 256), np.int64)

    def scores_of(of: np.ndarray, turn: tuple[Columns, Columns]) -> int:
        tiles = Documents(of).tiles(*turn, True, 2)
        return sum((t.rows.stop - t.rows.start) * (t.end - t.start) * (t.high - t.low) for t in tiles)

    whole = [[(((0, 256),), ((0, 256),))]]
    ring = [ring_columns(Layout(cp=4), 256, rank, True) for rank in range(4)]
    batches = [first[at : at + B] for at in range(0, 8, B)]
    for ranks, asked in ((whole, Layout()), (ring, Layout(cp=4))):
        found, most = (
            sum(
                max(scores_of(of, turn) for turn in turns)
                for of in several
                for turns in zip(*ranks, strict=True)
            )
            for several in (batches, [zeros] * len(batches))
        )
        assert sample.computed(B, True, 2, asked) == found / most
        assert found < 0.9 * most

    def slowest(of: np.ndarray) -> int:
        dealt = Documents(of).tiling.dealt(4, True)
        return max(sum(scores_of(of, ((span,), ((0, 256),))) for span in columns) for columns in dealt)

    found, most = (sum(map(slowest, several)) for several in (batches, [zeros] * len(batches)))
    assert sample.computed(B, True, 2, Layout(cp=4, cp_method="all_gather")) == found / most
    assert found < 0.9 * most
    mask = Documents(first).mask(True).view(4, B, 256, 256)
    own = [torch.cat([torch.arange(*span) for span in token_spans(Layout(cp=4), 256, r)]) for r in range(4)]

    def pairs(turn: int) -> int:
        """Of the rank that has the most in each batch."""
        of = [mask[:, :, own[rank]][..., own[(rank + turn) % 4]].sum((1, 2, 3)) for rank in range(4)]
        return int(torch.stack(of).amax(0).sum())

    whole_sequence = 64 * 65 // 2 + 3 * 64 * 32
    found = sum(map(pairs, range(4)))
    assert sample.in_turns(B, True, Layout(cp=4)) == found / (8 * whole_sequence)
    for causal in (True, False):
        mask, all_of_it = Documents(first).mask(causal), Documents(np.zeros_like(first)).mask(causal)
        assert sample.pairs(causal) == pytest.approx((mask.sum() / all_of_it.sum()).item())
    lengths = [b - a for row in first for a, b in pairwise([*np.unique(row), 256])]
    assert sample.tokens == pytest.approx(np.mean(lengths))
    assert sample.seen == pytest.approx(np.dot(lengths, lengths) / np.sum(lengths))


class Alone:
    """An axis on which nothing is sent."""

    key = "alone"

    def __init__(self, size: int, index: int) -> None:
        self.size, self.index = size, index

    def start_moves(self, sends: Sequence[Any], receives: Sequence[Any]) -> Any:
        return lambda: None

    def run(self, _: Any, x: torch.Tensor, backward: bool = False) -> torch.Tensor:
        rows = len(x) // self.size if backward else len(x) * self.size
        return x.new_empty(rows, *x.shape[1:])


@pytest.mark.parametrize("method", ["ring", "all_gather"])
@pytest.mark.parametrize("B", [1, 2])
def test_plan_counts_what_flash_attention_copies(
    method: str, B: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several sequences it wants the tokens in a row. Heads of query, key and value stand before tokens."""
    layout, heads, keys, t = Layout(cp=2, cp_method=method), 4, 2, 128
    first, copied = firsts(B, 2 * t, 0.05), list[int]()
    tokens = partial_attention._tokens

    def counted(x: torch.Tensor, lengths: Any) -> torch.Tensor:
        y = tokens(x, lengths)
        copied[-1] += 2 * y.nbytes * (y.untyped_storage()._cdata != x.untyped_storage()._cdata)
        return y

    monkeypatch.setattr(partial_attention, "_tokens", counted)
    documents, each = Documents(first, "meta"), list[list[int]]()
    documents.columns = documents.tiling.dealt(2, True) if method == "all_gather" else ()
    for rank in range(2):
        core: Any = SimpleNamespace(heads=heads, kv_heads=keys, causal=True)
        axis: Any = Alone(2, rank)
        attention: Any = context.METHODS[method](core, axis, layout)
        q = torch.empty(B, heads, t, 16, dtype=torch.bfloat16, device="meta")
        kv = torch.empty(2, B, keys, t, 16, dtype=torch.bfloat16, device="meta")
        copied.append(0)
        sees = Sees(documents)
        out, lse = attention.attend(q, kv, sees)
        copied.append(0)
        attention.backward((q, kv, out, lse, documents.number), torch.empty_like(out), sees)
        each.append(copied[-2:])
    sets = ["model.arch=llama", f"model.heads={heads}", f"model.kv_heads={keys}", f"model.seq_len={2 * t}"]
    sets += ["model.head_dim=16", "model.dim=64", f"train.microbatch_size={B}", "precision.mode=bf16"]
    recipe = load("quickstart", [*sets, f"train.global_batch_size={B}"], f"cp=2,cp_method={method}")
    moved = []
    for seen in (PlannedDocuments("data", Sample(first)), None):
        s = predict(recipe, parse("h100:2"), replace(FIVEFOLD, documents=seen)).setting
        moved.append(next((op.forward, op.backward) for op in s.last_block if op.attention))
    assert [a - b for a, b in zip(*moved, strict=True)] == max(each, key=sum)
    assert (sum(max(each)) > 0) == (B > 1)


def test_the_planner_knows_the_documents_of_tokenized_text(tmp_path, monkeypatch):
    """A plan is faster and its MFU counts fewer FLOPs once they are known, and it says what it knows."""
    (tmp_path / "texts.jsonl").write_text(
        "".join(f'{{"text": "{"word " * (n % 40)}"}}\n' for n in range(1, 900))
    )
    sets = [
        f"data.source={tmp_path / 'texts.jsonl'}", "data.tokenizer=bytes", "data.document_masks=true",
        f"data.cache={tmp_path}", "model.vocab_size=320", "model.seq_len=2048", "train.global_batch_size=16",
        "data.val_fraction=0", "train.steps=5", "train.microbatch_size=16", "model.dim=2048", "model.heads=16",
    ]  # fmt: skip
    recipe = load("quickstart", sets, "dp=1")

    def found_in(recipe: Recipe) -> PlannedDocuments:
        found = documents_of(recipe)
        assert found is not None
        return found

    def planned(recipe: Recipe, tokens: float | None = None):
        software = replace(FIVEFOLD, documents=documents_of(recipe, tokens))
        return predict(recipe, parse("h100"), software)

    unknown = planned(recipe)
    assert summary(unknown)[5].startswith("attention     whole sequences, an upper bound")
    data = prepare(recipe)
    found = planned(recipe)
    told = found.as_json()["attention"]
    assert told["documents"] == "data"
    assert told["document_tokens"] == pytest.approx(
        len(data.train) / 877, rel=0.15
    )  # 22 of 899 texts are empty
    assert 0.03 < told["pairs"] == told["work"] < 0.1
    assert "tokens on average" in summary(found)[5]
    assert found.step.seconds < unknown.step.seconds
    counted = [one.mfu * one.step.seconds for one in (found, unknown)]
    model = found.setting.model
    fewer = flops_per_token(model, lambda _: told["pairs"]) / flops_per_token(model)
    assert counted[0] / counted[1] == pytest.approx(fewer)
    assert fewer < 0.95
    near = planned(recipe, told["document_tokens"])
    assert near.step.seconds == pytest.approx(found.step.seconds, rel=0.02)
    for layout in ("cp=2", "cp=2,cp_method=all_gather"):
        alone, ring = (planned(change(recipe, layout=layout), tokens) for tokens in (None, 2048))
        assert 0.03 < alone.as_json()["attention"]["work"] < 0.15 < ring.as_json()["attention"]["work"]
        assert alone.step.seconds < ring.step.seconds
    exact = change(recipe, ["precision.mode=fp32"], layout="cp=2")
    assert "no price" in " ".join(summary(planned(exact)))
    assert found_in(change(recipe, ["model.seq_len=1048576"])).source == "unknown", (
        "there is not one sequence"
    )
    apart = change(recipe, ["data.document_masks=false"])
    assert "attention" not in planned(apart).as_json()
    with pytest.raises(UserError, match="has no effect"):
        planned(apart, 100)
    with pytest.raises(UserError, match="Nearest valid: 2048"):
        planned(recipe, 4096)
    files = change(recipe, [f"data.source=tokens:{next(tmp_path.glob('data/*/train-*.bin'))}"])
    assert found_in(files).pairs(recipe.model) == 1, "nobody said which token ends a document"
    own = change(files, ["data.end_token=256"])
    assert found_in(own).pairs(recipe.model) == pytest.approx(told["pairs"], rel=0.2)
    assert isinstance(data.train, Tokens)
    write_indexed(tmp_path / "indexed.bin", data.train, 320, 256)
    indexed = change(files, [f"data.source=tokens:{tmp_path / 'indexed.bin'}"])
    assert found_in(indexed).pairs(recipe.model) == pytest.approx(told["pairs"], rel=0.2)
    pyarrow.parquet.write_table(pyarrow.table({"input_ids": [[7] * 99] * 999}), tmp_path / "ids.parquet")
    rows = change(own, [f"data.source=tokens:{tmp_path / 'ids.parquet'}"])
    assert found_in(rows).source == "unknown", "its ids are not copied for a plan"
    packed = change(recipe, ["data.packing=best_fit"])
    assert found_in(packed).source == "data"
    monkeypatch.setattr("fivefold.data.facts.MOST_PACKED", len(data.train) - 1)
    assert found_in(packed).source == "unknown", "nor are so many tokens packed"
    with open(data.train.shards[0].path, "r+b") as file:
        file.write(b"\xff\xff")
    assert found_in(recipe).source == "unknown", "the disk has damaged them"
