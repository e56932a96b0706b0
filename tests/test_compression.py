"""Compression: equal to a simulation in one process, nothing lost, the bytes of the table, exact resumption."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import stored
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import only, slow, slow_but
from pool_runs import assert_same_tensors, lines, ranks_of, train_rank
from ranks import run_ranks
from steps import Numbers, planned, recipe_of
from test_trace import measured
from torch import Tensor

from fivefold.checkpoint import store
from fivefold.comm import Axis
from fivefold.comm.axis import counters
from fivefold.comm.compress import compressed_sum, uniform
from fivefold.data import prepare
from fivefold.errors import UserError
from fivefold.kernels.rounded import Quantizer
from fivefold.launch.ranks import Ranks
from fivefold.observe.report import page
from fivefold.parallel.mesh import Mesh
from fivefold.recipe import Recipe, change, count_parameters, load, resolve
from fivefold.recipe.rules.combinations import notes
from fivefold.schedules.compression import LARGEST, TEXTS, Blocks, LowRank, Sparse, TopK, compressor, normal
from fivefold.sharding.layout import Layout, describe, to_text
from fivefold.step.state import build_state
from fivefold.step.step import take_step
from fivefold.train.resume import load_checkpoint
from fivefold.train.share import share_of
from fivefold_plan.bench.hardware import encodings
from fivefold_plan.cluster.clusters import parse
from fivefold_plan.cluster.devices import of_table
from fivefold_plan.cluster.measured import assumed_table
from fivefold_plan.messages import volume
from fivefold_plan.messages.volume import SENT
from fivefold_plan.predict import held, predict
from fivefold_plan.trace.step import trace

V = 96

SHAPES = [(7,), (40, 30), (3, 16, 20), (2, 3), (300,)]
COMPRESS = ["int8", "int4", "nf4", "dynamic8", "1bit", "topk:0.01", "topk:0.2", "randk:0.05", "powersgd:2"]
STEPS = 3
CPU = torch.device("cpu")


def gradient(rank: int, step: int, shapes=SHAPES) -> Tensor:
    """Different sizes in each parameter, as in a model; the second step of rank 1 is zero."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    parts = [
        torch.randn(math.prod(shape), generator=generator) * 10.0 ** (i - 2) for i, shape in enumerate(shapes)
    ]
    return torch.cat(parts) * (0 if rank == step == 1 else 1)


def drive(messages) -> None:
    """Sends and waits for one message after the other."""
    try:
        started = next(messages)
        while True:
            started = messages.send(started())
    except StopIteration:
        pass


def axis_of(rank: int, world: int) -> Axis:
    return Mesh(Layout(dp_replicate=world), Ranks(rank, world, rank, world, CPU)).axis("replicate")


def summed(rank: int, world: int, text: str) -> tuple[list[Tensor], list[Tensor], list[tuple[str, int]]]:
    """The sums of some steps, this rank's residuals, and what it sent in the last step."""
    compress = compressor(text)
    assert compress is not None
    one = compressed_sum(compress, SHAPES, axis_of(rank, world), 5)
    assert sum(t.nbytes for t in one.state().values()) == compress.kept(SHAPES, world)
    sums, residuals, sent = [], [], []

    def count(axis: Axis, operation: str, size: int) -> None:
        sent.append((operation, size))

    for step in range(STEPS):
        total = gradient(rank, step)
        sent.clear()
        counters.append(count)
        drive(one.sum(total))
        counters.remove(count)
        sums.append(total)
        residuals.append(torch.cat(whole(one)))
    assert len(one.errors()) == len(SHAPES)
    assert all(0 <= error < 2 for error in one.errors())
    return sums, residuals, sent


def whole(one) -> list[Tensor]:
    """Residuals of all parameters; zeros of those that are sent whole."""
    pairs = zip(one.residuals, one.sizes, strict=True)
    return [r.clone() if len(r) else torch.zeros(size) for r, size in pairs]


class Simulation:
    """The same compression of `world` ranks in one process, written out by the definitions: parameter by parameter,
    block by block."""

    def __init__(self, text: str, world: int):
        self.compress, self.world, self.step = compressor(text), world, 0
        self.residuals = [[torch.zeros(shape).flatten() for shape in SHAPES] for _ in range(world)]
        self.q: dict[int, Tensor] = {}
        if isinstance(self.compress, LowRank):
            wide = [(i, two[1]) for i, shape in enumerate(SHAPES) if (two := self.compress.matrix(shape))]
            start = uniform(self.compress.rank * sum(n for _, n in wide), 0, 5, CPU).sub(0.5).float()
            rows = start.view(-1, self.compress.rank).split([n for _, n in wide])
            self.q = {i: q for (i, _), q in zip(wide, rows, strict=True)}

    def sum(self, gradients: list[Tensor]) -> Tensor:
        split = [g.split([math.prod(shape) for shape in SHAPES]) for g in gradients]
        for rank, index in itertools.product(range(self.world), range(len(SHAPES))):
            self.residuals[rank][index] += split[rank][index]
        compress = self.compress
        if isinstance(compress, Blocks):
            found = self._blocks(compress)
        elif isinstance(compress, Sparse):
            found = self._sparse(compress)
        else:
            assert isinstance(compress, LowRank)
            found = [self._low_rank(compress, index) for index in range(len(SHAPES))]
        self.step += 1
        return torch.cat(found)

    def _blocks(self, blocks: Blocks) -> list[Tensor]:
        cut = [[r.split(blocks.block) for r in residual] for residual in self.residuals]
        number, per_rank = 0, -(-sum(len(parts) for parts in cut[0]) // self.world)
        sums = []
        for index in range(len(SHAPES)):
            found = []
            for j in range(len(cut[0][index])):
                owner, total = number // per_rank, torch.zeros(())
                number += 1
                for rank in [owner, *(r for r in range(self.world) if r != owner)]:
                    block = cut[rank][index][j]  # a view of the residual
                    sent = block.clone() if rank == owner else rounded(block, blocks)
                    block -= sent
                    total = total + sent
                sent = rounded(total, blocks)
                cut[owner][index][j].copy_(total - sent)
                found.append(sent)
            sums.append(torch.cat(found))
        return sums

    def _sparse(self, sparse: Sparse) -> list[Tensor]:
        counts, sums = sparse.counts(SHAPES), []
        random = uniform(sum(counts), self.step, 5, CPU).split(counts)
        for index, count in enumerate(counts):
            size, total = math.prod(SHAPES[index]), torch.zeros(math.prod(SHAPES[index]))
            for rank in range(self.world):
                residual = self.residuals[rank][index]
                where = residual.abs().argsort(descending=True)[:count].tolist()
                if not isinstance(sparse, TopK):
                    ends = [j * size // count for j in range(count + 1)]
                    where = [ends[j] + int(random[index][j] * (ends[j + 1] - ends[j])) for j in range(count)]
                assert len(set(where)) == count
                for element in where:
                    sent = residual[element].clone()
                    if isinstance(sparse, TopK):
                        sent = sent.bfloat16().float()
                    total[element] += sent
                    residual[element] -= sent
            sums.append(total)
        return sums

    def _low_rank(self, low: LowRank, index: int) -> Tensor:
        mine = [residual[index] for residual in self.residuals]
        two = low.matrix(SHAPES[index])
        if two is None:
            total = torch.stack(mine).sum(0)
            for residual in mine:
                residual.zero_()
            return total
        M = [residual.view(two) for residual in mine]
        P = torch.linalg.qr(sum(x @ self.q[index] for x in M)).Q
        Q = [x.t() @ P for x in M]
        for x, q in zip(M, Q, strict=True):
            x -= P @ q.t()
        self.q[index] = torch.stack(Q).sum(0)
        return (P @ self.q[index].t()).flatten()


def rounded(block: Tensor, blocks: Blocks) -> Tensor:
    """What arrives of a block."""
    if blocks.bits == 1:
        return torch.where(block >= 0, 1.0, -1.0) * block.abs().sum().div(len(block))
    if blocks.levels:
        levels, largest = torch.tensor(blocks.levels), block.abs().max()
        share = block / largest.clamp(min=1e-38)
        return levels[(share[:, None] - levels).abs().argmin(1)] * largest
    scale = block.abs().max() * (1 / LARGEST[blocks.bits])
    return (block / scale.clamp(min=1e-38)).round() * scale


def test_levels_are_those_of_the_papers() -> None:
    """QLoRA's appendix E lists NF4. On normal numbers its levels err less than equal distances, and the dynamic map,
    which keeps small numbers, errs less in those below a hundredth of the largest."""
    published = [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ]  # fmt: skip
    assert normal() == pytest.approx(published, abs=1e-6)
    x = torch.randn(200, 256, generator=torch.Generator().manual_seed(0))
    found = {}
    for text in ("int4", "nf4", "int8", "dynamic8"):
        blocks = compressor(text)
        assert isinstance(blocks, Blocks)
        quantizer, back = Quantizer(blocks.bits, 256, [256], CPU, blocks.levels), torch.empty_like(x)
        quantizer.decode(quantizer.encoded(x), back)
        small = x.abs() < 0.01 * x.abs().amax(1, keepdim=True)
        found[text] = (back - x).norm() / x.norm(), (back - x)[small].norm() / x[small].norm()
    assert found["nf4"][0] < 0.8 * found["int4"][0]
    assert found["dynamic8"][1] < 0.5 * found["int8"][1]


@pytest.mark.parametrize("text", COMPRESS)
@pytest.mark.parametrize("world", [2, 3])
def test_equals_a_simulation_in_one_process(text: str, world: int) -> None:
    """Sums and residuals of some steps; all ranks have the same bits; nothing is lost; the bytes are the table's."""
    answers = run_ranks(world, summed, text)
    simulation, before = Simulation(text, world), torch.zeros(())
    for step in range(STEPS):
        gradients = [gradient(rank, step) for rank in range(world)]
        wanted = simulation.sum(gradients)
        for rank, (sums, residuals, _) in enumerate(answers):
            assert torch.equal(sums[step], answers[0][0][step]), "all ranks hold the same bits"
            torch.testing.assert_close(sums[step], wanted, rtol=1e-4, atol=1e-4)
            mine = torch.cat(simulation.residuals[rank])
            torch.testing.assert_close(residuals[step], mine, rtol=1e-4, atol=1e-4)
        left = torch.stack([residuals[step] for _, residuals, _ in answers]).double().sum(0)
        arrived = answers[0][0][step].double() + left
        given_ = torch.stack(gradients).double().sum(0) + before
        torch.testing.assert_close(arrived, given_, rtol=1e-5, atol=1e-4)
        before = left
    compress = compressor(text)
    assert compress is not None
    for _, _, sent in answers:
        assert sent == [tuple(wire) for wire in compress.messages(SHAPES, world)]


@dataclass
class Stated:
    """A message of `Lockstep`: what one rank gave."""

    what: str
    x: Tensor


@dataclass
class Lockstep:
    """An axis whose ranks are all in this process."""

    index: int
    size: int
    device: torch.device = CPU

    def start_all_reduce(self, x: Tensor) -> Any:
        return Stated("all_reduce", x)

    def start_all_gather(self, x: Tensor) -> Any:
        return Stated("all_gather", x)

    def start_all_to_all(self, x: Tensor) -> Any:
        return Stated("all_to_all", x)


def exchanged(messages: list[Stated]) -> list[Tensor]:
    (what,), given_ = {m.what for m in messages}, [m.x.clone() for m in messages]
    if what == "all_to_all":
        return [torch.stack([x[rank] for x in given_]) for rank in range(len(given_))]
    together = torch.stack(given_).sum(0) if what == "all_reduce" else torch.cat(given_)
    return [together.clone() for _ in given_]


def step_of(ones: list[Any], gradients: list[Tensor]) -> None:
    """One sum, in place, on all ranks."""
    running = [one.sum(g) for one, g in zip(ones, gradients, strict=True)]
    messages = [next(one) for one in running]
    while messages:
        results = zip(running, exchanged(messages), strict=True)
        messages = [m for one, result in results if (m := following(one, result)) is not None]


def following(messages: Any, result: Tensor) -> Any:
    try:
        return messages.send(result)
    except StopIteration:
        return None


def together(text: str, world: int, shapes: list[tuple[int, ...]]) -> list[Any]:
    compress, axes = compressor(text), [Lockstep(rank, world) for rank in range(world)]
    assert compress is not None
    return [compressed_sum(compress, shapes, axis, 0) for axis in axes]  # pyright: ignore[reportArgumentType]


dims = st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple)


@settings(max_examples=40, deadline=None)
@given(
    text=st.sampled_from(
        ["int8", "int4", "nf4", "dynamic8", "1bit", "topk:0.1", "randk:0.1", "powersgd:1", "powersgd:3"]
    ),
    world=st.integers(2, 5),
    shapes=st.lists(dims, min_size=1, max_size=4),
    seed=st.integers(0, 2**16),
)
def test_sent_and_residuals_are_the_gradients(
    text: str, world: int, shapes: list[tuple[int, ...]], seed: int
) -> None:
    """Over several steps: what arrived plus what is left is what was given."""
    ones, generator = together(text, world, shapes), torch.Generator().manual_seed(seed)
    elements, given_, arrived = sum(map(math.prod, shapes)), torch.zeros(()), torch.zeros(())
    for _ in range(3):
        gradients = [torch.randn(elements, generator=generator) for _ in range(world)]
        given_ = given_ + torch.stack(gradients).double().sum(0)
        step_of(ones, gradients)
        assert all(torch.equal(g, gradients[0]) for g in gradients)
        arrived = arrived + gradients[0].double()
    left = torch.stack([torch.cat(whole(one)) for one in ones]).double().sum(0)
    torch.testing.assert_close(arrived + left, given_, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "text", ["int8", "int4", "nf4", "dynamic8", "1bit", "topk:0.01", "randk:0.01", "powersgd:2"]
)
def test_a_gradient_that_is_not_finite_is_seen_by_all_ranks_and_forgotten(text: str, bad: float) -> None:
    """Even one element of one rank, in a parameter that random-k leaves out: the step's sum is not finite, and the next
    one is."""
    ones = together(text, 3, SHAPES)
    for rank, element, finite in ((None, 0, True), (1, 600, False), (None, 0, True), (None, 0, True)):
        gradients = [gradient(r, 0) for r in range(3)]
        if rank is not None:
            gradients[rank][element] = bad
        step_of(ones, gradients)
        for one, g in zip(ones, gradients, strict=True):
            assert bool(g.isfinite().all()) is finite
            assert all(tensor.isfinite().all() for tensor in one.state().values())
    assert sum(bool(one.residual.any()) for one in ones) == 3


def test_parameters_do_not_change_each_other() -> None:
    """Tensor-parallel ranks have different parameters beside one that they share: it gets the same bits on each."""
    for text in ("int8", "int4", "nf4", "dynamic8", "1bit", "topk:0.1", "randk:0.1", "powersgd:2"):
        found, gradients = [], list[Tensor]()
        for factor in (1.0, 100.0):  # of the others
            ones = together(text, 2, SHAPES)
            for step in range(2):
                gradients = [gradient(rank, step).mul_(factor) for rank in range(2)]
                for rank, g in enumerate(gradients):
                    g.split([math.prod(shape) for shape in SHAPES])[1].copy_(
                        gradient(rank, step).split([math.prod(shape) for shape in SHAPES])[1]
                    )
                step_of(ones, gradients)
            found.append(gradients[0].split([math.prod(shape) for shape in SHAPES])[1].clone())
        assert torch.equal(*found), text


def test_top_k_beyond_one_stretch() -> None:
    """Indices of 16 bits are those of a stretch: the largest of each arrive, wherever they are."""
    ones, gradients = (
        together("topk:0.0001", 2, [(70_000,), (3, 50_000)]),
        [torch.zeros(220_000) for _ in range(2)],
    )
    places = [[5, 65_500, 69_999, 70_000, 135_535, 135_536, 219_999], [6, 65_536, 219_999]]
    for g, where in zip(gradients, places, strict=True):
        g[where] = 100
    step_of(ones, gradients)
    assert {i: gradients[0][i].item() for i in {*places[0], *places[1]}} == {
        i: 100.0 * sum(i in where for where in places) for i in {*places[0], *places[1]}
    }


def test_random_k_reaches_every_element() -> None:
    """Within a few times 1 / share steps, each about equally often."""
    (one, _), hits = together("randk:0.1", 2, [(50,), (21,)]), torch.zeros(71)
    for one.steps in range(400):
        hits[one._drawn()] += 1
    assert hits.min() > 15
    assert hits[:50].mean() == 40
    assert hits.max() < 120


def test_power_iteration_finds_the_matrix() -> None:
    """A gradient of rank 2 that stays the same arrives whole by rank 2, from the second step on."""
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(30, 2, generator=generator), torch.randn(2, 20, generator=generator)
    ones, wanted, gradients = together("powersgd:2", 2, [(30, 20)]), (a @ b).flatten(), list[Tensor]()
    for _ in range(2):
        gradients = [wanted / 2, wanted / 2]
        step_of(ones, gradients)
    torch.testing.assert_close(gradients[0], wanted, rtol=1e-4, atol=1e-4)
    assert max(ones[0].errors()) < 1e-5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "int9",
            "compress: 'int9' is unknown; did you mean 'int8'? (valid: none, int8, int4, nf4, dynamic8, 1bit, ",
        ),
        ("topk", "compress: 'topk' must be written like 'topk:0.01'"),
        ("int8:4", "'int8:4' must be written like 'int8'"),
        ("topk:", "must be written like 'topk:0.01'"),
        ("topk:2", "'topk:2': what follows the colon must be a share of the elements, above 0 and at most 1"),
        ("randk:nan", "must be a share"),
        ("randk:x", "'randk:x': what follows the colon must be a number"),
        ("powersgd:0", "'powersgd:0': what follows the colon must be a rank, a whole number >= 1"),
    ],
)
def test_bad_text(text: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        load("quickstart", [], f"dp=2,compress={text}")
    assert message in str(error.value)


def test_every_text_is_read_back() -> None:
    for text in TEXTS[1:]:
        layout = Layout.from_recipe(load("quickstart", [], f"dp=2,compress={text}").layout)
        assert to_text(layout) == f"dp=2,compress={text}"
        assert text in describe(layout)
        compress = compressor(layout.compress)
        assert compress is not None
        assert compress.text == text


def test_the_first_steps_are_whole(base: Recipe, tmp_path: Path) -> None:
    """As without compression, and from then on not; a tenth of the run unless the recipe says otherwise."""
    for name, layout in (("plain", "dp=2"), ("late", "dp=2,compress=randk:0.1,compress_after=2")):
        train(base, layout, tmp_path / name, 4)
    a, b = (lines(tmp_path / name, "loss") for name in ("plain", "late"))
    assert a[:3] == b[:3]  # the third loss is that before the first compressed update
    assert a[3] != b[3]
    assert not any(lines(tmp_path / "late", "compression_errors")[0].values())
    for text, after in (("topk:0.1", 30), ("powersgd:4", 30), ("int8", 0), ("int4", 0)):
        found = resolve(load("quickstart", ["train.steps=300"], f"dp=2,compress={text}"), vocab_size=V)
        assert found.layout.compress_after == after
    assert notes(load("quickstart", [], "dp=2,compress_after=7")) == [
        "layout.compress_after = 7 has no effect in this layout: no gradients are compressed"
    ]


def test_where_it_does_not_work_or_has_no_effect() -> None:
    with pytest.raises(
        UserError, match="compress=int8 sums whole gradients of replicas: it needs zero=0, not zero=1"
    ):
        load("quickstart", [], "dp=2,zero=1,compress=int8")
    with pytest.raises(UserError, match=r"noise_scale = true is not supported with layout\.compress"):
        load("quickstart", ["observe.noise_scale=true"], "dp=2,compress=int8")
    assert notes(load("quickstart", [], "dp=1,compress=int8")) == [
        'layout.compress = "int8" has no effect in this layout: gradients are summed with dp > 1 or cp > 1 only '
        "(within a replica group)"
    ]
    assert any(
        "layout.compress says what is sent" in n
        for n in notes(load("quickstart", ["precision.reduce=bf16"], "dp=2,compress=int8"))
    )


def test_ratios() -> None:
    """Bytes that leave a rank, against fp32 sums, for a matrix (1024, 1024) on two ranks."""
    shapes, fp32 = [(1024, 1024)], 4 * 1024 * 1024 * SENT["all_reduce"](2)
    for text, ratio in (
        ("int8", 3.93),
        ("int4", 7.75),
        ("1bit", 21.3),
        ("topk:0.01", 100),
        ("randk:0.01", 99),
        ("powersgd:4", 127),
    ):
        compress = compressor(text)
        assert compress is not None
        sent = sum(wire.size * SENT[wire.what](2) for wire in compress.messages(shapes, 2))
        assert fp32 / sent == pytest.approx(ratio, rel=0.02), text


TINY = [
    "model.layers=2", "model.dim=32", "model.heads=4", "model.kv_heads=2", "model.ffn_dim=48", "model.seq_len=16",
    "data.tokenizer=bytes", "data.val_fraction=0.1", "train.global_batch_size=8", "train.microbatch_size=1",
    "train.steps=4", "train.val_sequences=7", "train.val_every=2", "train.sample_tokens=8", "train.sample_every=0",
    "optim.warmup_steps=0", "optim.schedule=constant", "observe.tracker=none", "precision.mode=fp32",
]  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Recipe:
    folder = tmp_path_factory.mktemp("data")
    text = folder / "text.txt"
    text.write_text("".join(f"{i} and {i * i % 89} make {i + i * i % 89}; " for i in range(900)))
    return load("quickstart", [*TINY, f"data.source={text}", f"data.cache={folder / 'cache'}"])


def train(recipe: Recipe, layout: str, out: Path, steps: int, resume: bool = False) -> None:
    recipe = change(recipe, [f"train.steps={steps}"], layout)
    ranks = Layout.from_recipe(recipe.layout).ranks
    assert run_ranks(ranks, train_rank, recipe, out, resume, timeout_s=60) == [None] * ranks


@pytest.mark.parametrize("text", ["int8", *slow("randk:0.1,compress_after=1"), "powersgd:2,compress_after=3"])
def test_resumes_with_the_same_bits(base: Recipe, tmp_path: Path, text: str) -> None:
    """Residuals and Q are in the checkpoint, and the first whole sums are those of the run. Per-parameter errors are in
    the metrics and the page."""
    layout = f"dp=2,compress={text}"
    train(base, layout, tmp_path / "whole", 4)
    train(base, layout, tmp_path / "parts", 2)
    train(base, f"{layout},recompute=full", tmp_path / "parts", 4, resume=True)
    a, b = (stored.load(store.latest(tmp_path / name)) for name in ("whole", "parts"))
    assert_same_tensors(a.model, b.model)
    assert_same_tensors(a.optimizer, b.optimizer)
    assert sum(name.startswith("unsent.") for name in a.optimizer) == 2 * (1 + text.startswith("powersgd"))
    assert lines(tmp_path / "whole", "loss") == lines(tmp_path / "parts", "loss")
    names = set(a.model)
    for run in ("whole", "parts"):
        errors = lines(tmp_path / run, "compression_errors")[-1]
        assert set(errors) == names
        assert max(errors.values()) > 0
        assert "blocks.1.attention.qkv.weight" in page(tmp_path / run)


def test_another_layout_starts_without_residuals(base: Recipe, tmp_path: Path, capfd) -> None:
    """And says so; weights and moments go on."""
    train(base, "dp=2,compress=int8", tmp_path, 1)
    recipe = change(base, ["train.steps=2"], "dp=2,tp=2,compress=int8")
    forgotten = run_ranks(4, resumed, recipe, tmp_path)
    assert all(
        "residuals start from zero, because the checkpoint is of the layout dp=2,compress=int8" in text
        for text, _ in forgotten
    )
    assert not any(left for _, left in forgotten)
    train(recipe, "dp=2,tp=2,compress=topk:0.1", tmp_path, 2, resume=True)
    assert stored.load(store.latest(tmp_path)).meta["step"] == 2
    same = run_ranks(4, resumed, change(recipe, [], "dp=2,tp=2,compress=topk:0.1"), tmp_path)
    assert [text for text, _ in same] == [""] * 4
    assert all(left > 0 for _, left in same)


def resumed(rank: int, world: int, recipe: Recipe, out: Path) -> tuple[str, float]:
    """What a rank says when it loads the latest checkpoint, and the size of its residuals."""
    recipe = resolve(recipe, vocab_size=prepare(recipe).vocab_size)
    state = build_state(recipe, ranks_of(rank, world))
    load_checkpoint(state, store.Reader(store.latest(out)))
    return state.forgotten, sum(
        t.abs().sum().item() for name, t in state.unsent().items() if "residual" in name
    )


@pytest.mark.slow
def test_trains_about_as_without(base: Recipe, tmp_path: Path) -> None:
    """Little is lost by int8; tensor-parallel ranks keep the same bits of what they share."""
    for name, layout in (("plain", "dp=2,tp=2"), ("int8", "dp=2,tp=2,compress=int8")):
        train(base, layout, tmp_path / name, 4)
    a, b = (lines(tmp_path / name, "loss") for name in ("plain", "int8"))
    assert a[0] == b[0]
    assert a != b
    assert a == pytest.approx(b, rel=2e-3)
    assert run_ranks(4, shared_bits, change(base, [], "dp=2,tp=2,compress=topk:0.1")) == [True] * 4


def shared_bits(rank: int, world: int, recipe: Recipe) -> bool:
    """After two steps: do the ranks of the tensor axis have the same norms, and replicas the same weights?"""
    recipe = resolve(recipe, vocab_size=V)
    state = build_state(recipe, ranks_of(rank, world))
    for step in range(2):
        share = share_of(Numbers(recipe), step, 8, 1, state.mesh)
        take_step(state, recipe, share)
    same = True
    for name, master in state.masters().items():
        for axis in ("tp", "batch") if name.endswith("norm.weight") else ("batch",):
            every = state.mesh.axis(axis).all_gather(master.flatten())
            same &= torch.equal(every, master.flatten().repeat(2))
    return same


LAYOUTS = ["dp=2,compress=int8", "dp=2,compress=nf4", "dp=2,compress=dynamic8", "dp=4,compress=1bit",
           "cp=2,compress=powersgd:2", "dp=2,tp=2,compress=topk:0.01", "dp=4,ep=2,compress=randk:0.01",
           "pp=2,dp=2,compress=int8"]  # fmt: skip


@only("cp=2,compress=powersgd:2")
@pytest.mark.parametrize("layout", slow_but(LAYOUTS[3:6], LAYOUTS))
def test_planner_trace_and_ranks_agree(layout: str) -> None:
    """Every message of a step and its bytes; the traced memory of a rank to the byte; residuals in the formula."""
    overrides = ["model.layers=4", "model.dim=128", "model.heads=4", "model.kv_heads=4", "model.seq_len=64"]
    recipe = recipe_of("moe" if "ep=" in layout else "llama", "bf16", layout, *overrides)
    world = Layout.from_recipe(recipe.layout).ranks
    s, steps = planned(recipe), run_ranks(world, measured, recipe, timeout_s=60)
    positions = held(s)
    for rank, step in enumerate(steps):
        assert volume.counted(s, rank) == step.sent, f"rank {rank}"
        assert trace(recipe, rank, s.microbatches) == step, f"rank {rank}"
        found, memory = positions[s.layout.coordinates(rank)["pp"]], step.memory
        assert found.gradients == memory.at_peak["gradients"]
        assert abs(found.total / memory.total - 1) <= 0.05


def test_prices() -> None:
    """Over a slow link compression is faster, and its encoding is listed; without it nothing changes."""
    sets = ["train.global_batch_size=8", "train.microbatch_size=1", "model.vocab_size=32000"]
    slow = parse("h100:8x1")
    cluster, plans = replace(slow, inter=replace(slow.inter, bandwidth=slow.inter.bandwidth / 100)), {}
    for text in TEXTS:
        recipe = resolve(load("gpt2-124m", sets, f"dp=8,compress={text}"), vocab_size=32000)
        plans[text] = predict(recipe, cluster)
    for text in TEXTS[1:]:
        terms = dict(plans[text].step.terms)
        assert 0 < terms["encoding of gradients, part of their sums"] < terms["exposed gradient sums"]
        assert plans[text].step.seconds < plans["none"].step.seconds / 3
        assert plans[text].memory[0].gradients > plans["none"].memory[0].gradients


def test_encoding_costs_what_was_measured() -> None:
    """Between measured numbers linearly; a table of an older version has none, and memory traffic is counted."""
    machine, points = assumed_table(2), {"topk": [[0.01, 2e-9], [0.11, 4e-9]], "int8": [[0.0, 1e-9]]}
    shares = {n: replace(share, encodings=points) for n, share in machine.shares.items()}
    cluster = of_table(replace(machine, shares=shares))
    recipe = load("quickstart", [], "dp=2")
    for text, each in (("topk:0.01", 2e-9), ("topk:0.06", 3e-9), ("int8", 1e-9)):
        recipe = resolve(change(recipe, [f"layout.compress={text}"]), vocab_size=4096)
        seconds = dict(predict(recipe, cluster).step.terms)["encoding of gradients, part of their sums"]
        assert seconds == pytest.approx(each * count_parameters(recipe.model), rel=1e-6)
    terms = dict(predict(recipe, of_table(machine)).step.terms)
    assert terms["encoding of gradients, part of their sums"] > 0


def test_encoding_is_measured() -> None:
    found = encodings(CPU)
    assert found.keys() == {text.partition(":")[0] for text in TEXTS[1:]}
    assert [number for number, _ in found["topk"]] == [0.01, 0.1]
    assert all(seconds > 0 for points in found.values() for _, seconds in points)
