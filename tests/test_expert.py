"""Expert parallelism computes what one process computes, with every way of balancing, and communicates what it says."""

from collections.abc import Callable
from pathlib import Path

import pytest
import stored
import torch
import torch.distributed as dist
from layouts import TINY, compared, compiled, side, tiny
from marks import only, slow
from pool_runs import lines, train_rank
from ranks import RankFailed, run_ranks
from steps import counted, planned
from torch.autograd import Function

from fivefold.checkpoint import store
from fivefold.checkpoint.source import weights_of
from fivefold.comm import Axis
from fivefold.data import prepare
from fivefold.errors import UserError
from fivefold.models.card import card_of
from fivefold.models.layers import SwiGLU
from fivefold.models.mixture import Assignment, Experts, grouped_linear
from fivefold.parallel.expert import AllToAll, Transfer, Turns
from fivefold.parallel.mesh import Mesh
from fivefold.recipe import Recipe, change, load, resolve
from fivefold.schedules.pipeline import build
from fivefold.sharding.layout import Layout
from fivefold.sharding.parts import local_shape, parts
from fivefold.train import verify
from fivefold.train.verify import alone, compute
from fivefold_plan.cluster.clusters import parse
from fivefold_plan.messages import volume
from fivefold_plan.setting import setting

# Terms that are large enough to be seen in every gradient.
MODEL = [
    "model.arch=moe", "model.layers=2", "model.experts=8", "model.expert_ffn_dim=32", "model.shared_experts=1",
    "model.z_loss_weight=0.01",
]  # fmt: skip
AUX, BIAS = ["model.aux_loss_weight=0.3"], ["model.balance=bias", "model.balance_rate=0.05"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("expert")


OPTIONS = {
    "aux": AUX,
    "bias": BIAS,
    "capacity": [*AUX, "model.capacity_factor=1.0", "train.microbatch_size=2"],
    "sigmoid": [
        *AUX, "model.router_score=sigmoid", "model.dense_layers=1", "model.experts_per_token=3",
    ],
}  # fmt: skip


def check(folder: Path, layout: str, kind: str = "aux", *overrides: str) -> Recipe:
    overrides = (*overrides, "model.layers=4") if "zbv" in layout else overrides  # two stages a rank
    recipe = tiny(folder, layout, *MODEL, *OPTIONS[kind], *overrides)
    place = folder / "-".join((kind, *overrides))  # where one process leaves its side for the next layout
    report = compared(recipe, folder=place)
    assert report.passed, report.as_json()
    return recipe


@only("dp=2,ep=2-*", "dp=4,ep=2,expert_chunks=3-aux")
@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("layout", ["dp=2,ep=2", "dp=4,ep=2,expert_chunks=3"])
def test_equals_one_process(folder, layout, kind):
    """Loss, every gradient, its norm and, after 3 steps, every weight; with every way of balancing."""
    check(folder, layout, kind)


@only("cp=2,ep=2", "dp=4,ep=4,expert_buffer=3", "dp=2,tp=2,ep=2,expert_chunks=2")
@pytest.mark.parametrize(
    "layout",
    [
        "dp=4,ep=4", "dp=2,ep=2,zero=1", "dp=4,ep=2,zero=3,expert_chunks=2", "dp=2,pp=2,ep=2,expert_chunks=2",
        "cp=2,ep=2", "dp=2,tp=2,ep=2,expert_chunks=2", "dp=4,ep=4,expert_buffer=3",
        "dp=4,ep=4,zero=3,recompute=full,expert_buffer=3",
    ],
)  # fmt: skip
def test_other_axes_equal_one_process(folder, layout):
    check(folder, layout)


WHOLE = [*AUX, "model.aux_loss_weight=1", "model.balance_scope=batch"]


@only("dp=2,ep=2")
@pytest.mark.parametrize(
    "layout",
    [
        "dp=2,ep=2",
        "dp=2,zero=3",
        "tp=2,sp=true",
        "cp=2,ep=2",
        "dp=2,pp=2,ep=2,zero=3",
        "pp=2,schedule=dualpipe",
    ],
)
def test_balance_over_whole_batches_equals_one_process(folder, layout):
    recipe = tiny(folder, layout, *MODEL, *WHOLE)
    report = compared(recipe, folder=folder / "whole batches")
    assert report.passed, report.as_json()
    s = planned(recipe)
    if layout == "cp=2,ep=2":  # no counts are summed in forward
        for rank, step in enumerate(run_ranks(s.layout.ranks, counted, recipe, timeout_s=300)):
            assert volume.counted(s, rank) == step.sent


def test_balance_over_whole_batches_does_not_depend_on_microbatches(folder, tmp_path):
    """That over microbatches does."""
    for sets, same in ((WHOLE, True), ([*AUX, "model.aux_loss_weight=1"], False)):
        found = []
        for size in (1, 4):
            recipe = tiny(
                folder, "dp=1", *MODEL, *sets, f"train.microbatch_size={size}", "data.document_masks=false"
            )
            data = prepare(recipe)
            resolved = resolve(recipe, vocab_size=data.vocab_size)
            compute(resolved, data, 3, tmp_path / f"{size} {same}", alone())
            found.append(weights_of(tmp_path / f"{size} {same}" / "end"))
        apart = max((found[0][name] - found[1][name]).abs().max().item() for name in found[0])
        assert (apart < 1e-4) == same, apart
    load = weights_of(tmp_path / "1 True" / "end")["blocks.0.mlp.router.load"]
    assert load.sum() == pytest.approx(1)
    assert load.std() > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        "dp=4,ep=2,zero=1", "dp=4,ep=2,zero=2", "dp=4,ep=4,zero=3", "dp_replicate=2,dp_shard=2,ep=2,zero=3",
        "dp=2,ep=2,recompute=full", "dp=2,ep=2,recompute=selective", "dp=4,ep=2,zero=3,recompute=full", "tp=2",
        "dp=4,ep=2,expert_chunks=2,recompute=full", "dp=2,ep=2,expert_chunks=4,recompute=ops:gate",
        "dp=2,tp=2,ep=2,zero=3,recompute=full", "pp=2,tp=2,schedule=zb_h1", "cp=2,tp=2", "tp=4",
        "tp=2,sp=true", "dp=2,tp=2,ep=2", "dp=2,tp=2,ep=2,sp=true", "dp=2,cp=2,ep=4", "dp=2,cp=2,ep=2,zero=3",
        "cp=2,tp=2,sp=true,ep=2", "dp=2,pp=2,ep=2,schedule=zbv", "dp=2,pp=2,ep=2,zero=1",
    ],
)  # fmt: skip
def test_pairs_and_triples_equal_one_process(folder, layout):
    check(folder, layout)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        "dp=8,ep=2", "dp=8,ep=4", "dp=8,ep=8", "dp=8,ep=4,zero=3", "dp_replicate=2,dp_shard=4,ep=2,zero=2",
        "dp=2,tp=2,cp=2,ep=4,sp=true", "dp=4,pp=2,ep=2,zero=1", "dp=4,tp=2,ep=4,zero=3", "dp=4,pp=2,ep=4,schedule=zbv",
    ],
)  # fmt: skip
def test_eight_ranks_equal_one_process(folder, layout):
    check(folder, layout)


FOLD = "sp=true,ep_fold=true"


@pytest.mark.parametrize(
    "layout",
    [
        f"dp=2,tp=2,ep=4,{FOLD},zero=3",
        *slow(
            f"tp=2,ep=2,{FOLD}", f"dp=2,tp=2,ep=2,{FOLD}", f"dp=2,tp=2,ep=4,{FOLD}", f"dp=2,tp=2,ep=4,{FOLD},zero=1",
            f"dp=2,tp=2,ep=2,{FOLD},zero=1", f"dp=2,tp=2,ep=2,{FOLD},zero=2,expert_chunks=2",
            f"dp=2,tp=2,ep=2,{FOLD},zero=3,recompute=full", f"tp=4,ep=2,{FOLD}", f"tp=4,ep=4,{FOLD},expert_buffer=4",
            f"cp=2,tp=2,ep=4,{FOLD}", f"cp=2,cp_method=ulysses,tp=2,ep=2,{FOLD},zero=2",
            f"cp=2,cp_method=all_gather,tp=2,ep=4,{FOLD},zero=3,sp_regather=true",
            f"pp=2,tp=2,ep=2,{FOLD}", f"pp=2,tp=2,ep=2,{FOLD},schedule=zbv,recompute=full",
            f"dp=2,pp=2,tp=2,ep=4,{FOLD},zero=1", f"dp=2,pp=2,tp=2,ep=2,{FOLD},zero=3", f"dp=4,tp=2,ep=4,{FOLD},zero=2",
            f"dp_replicate=2,dp_shard=2,tp=2,ep=2,{FOLD},zero=2", f"dp_replicate=2,dp_shard=2,tp=2,ep=4,{FOLD},zero=3",
            f"dp=2,cp=2,tp=2,ep=8,{FOLD},zero=1", f"dp=2,cp=2,tp=2,ep=4,{FOLD},zero=3", f"dp=3,tp=2,ep=2,{FOLD}",
        ),
    ],
)  # fmt: skip
def test_experts_folded_over_the_tensor_axis_equal_one_process(folder, layout):
    """Ranks of the expert axis are those of tp, too: its gradients are summed over the others only, if there are any,
    and ZeRO shares states over these."""
    check(folder, layout)


def test_rows_without_room_end_the_run(folder, tmp_path):
    """Not one is dropped silently: no weights are saved."""
    recipe = tiny(folder, "dp=2,ep=2,expert_buffer=1", *MODEL, *AUX)
    with pytest.raises(RankFailed, match=r"step 1: layout.expert_buffer = 1 had no room for \d"):
        run_ranks(2, train_rank, recipe, tmp_path / "run")
    assert not list((tmp_path / "run").rglob("*.bin"))


def test_rows_without_room_in_a_frozen_block_end_the_run(folder, tmp_path):
    frozen = "model.freeze=['embed*', 'blocks.*']"
    recipe = tiny(folder, "dp=2,ep=2,expert_buffer=1", *MODEL, *AUX, frozen)
    with pytest.raises(RankFailed, match=r"layout.expert_buffer = 1 had no room for \d"):
        run_ranks(2, train_rank, recipe, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "sets"),
    [
        ("dp=2", AUX), ("dp=2,zero=3", BIAS), ("dp=2,recompute=full", AUX), ("dp=2,recompute=ops:attention+gate", AUX),
        ("dp=2,ep=2", AUX), ("dp=2,ep=2,expert_buffer=2", AUX), ("dp=4,ep=2,zero=3,expert_chunks=2", AUX),
        ("dp=2", ["model.arch=deepseek", "data.document_masks=false"]),
        ("dp=2", [*AUX, "model.capacity_factor=1.0"]),
        ("tp=2", AUX), ("tp=2,sp=true", AUX), ("tp=2,dp=2,ep=2", BIAS), ("cp=2", AUX), ("cp=2,cp_method=ulysses", AUX),
        ("tp=2,recompute=full", AUX), 
        ("tp=2,sp=true,recompute=full", AUX), ("cp=2,recompute=full", BIAS),
        ("tp=2", ["model.arch=deepseek", "data.document_masks=false"]),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0].rpartition("=")[2],
)  # fmt: skip
def test_compiled_blocks_equal_one_process(folder, layout, sets):
    """As a GPU's run compiles them."""
    report = compared(tiny(folder, layout, *MODEL, *sets), part=compiled)
    assert report.passed, report.as_json()


@only("dp=4,ep=2,zero=3-6")
@pytest.mark.parametrize(
    ("layout", "experts"),
    [
        ("dp=4,ep=2,zero=1", 2),
        ("dp=4,ep=2,zero=2", 6),
        ("dp=4,ep=2,zero=3", 6),
        pytest.param("dp=4,ep=2,zero=1", 6, marks=pytest.mark.slow),
        pytest.param("dp=4,ep=2,zero=3", 2, marks=pytest.mark.slow),
        pytest.param("dp=4,zero=1", 6, marks=pytest.mark.slow),
        pytest.param("dp=4,zero=3", 2, marks=pytest.mark.slow),
        pytest.param("dp_replicate=2,dp_shard=4,ep=2,zero=2", 2, marks=pytest.mark.slow),
        pytest.param("dp=4,pp=2,ep=2,zero=3,schedule=zbv", 2, marks=pytest.mark.slow),
        pytest.param("dp=4,ep=2,zero=3,recompute=full", 6, marks=pytest.mark.slow),
    ],
)
def test_experts_shared_by_their_rows_equal_one_process(folder, layout, experts):
    """Fewer experts on a rank than ranks that share them, or not a multiple: each is divided."""
    recipe = check(folder, layout, "aux", f"model.experts={experts}")
    model = resolve(recipe, vocab_size=prepare(recipe).vocab_size).model
    part = parts(card_of(model), Layout.from_recipe(recipe.layout), 0)["blocks.0.mlp.experts.down"]
    kept, local = local_shape(part.keeps), local_shape(part.computes)
    assert kept[0] == local[0]
    assert kept[1] < local[1]


def test_bf16_is_as_close_as_bf16_can_be(folder):
    report = compared(tiny(folder, "dp=2,ep=2", *MODEL, *AUX, mode="bf16"))
    assert report.passed, report.as_json()


def forgetful(rank: int, world: int, recipe: Recipe, steps: int, where: Path) -> None:
    """Experts' gradients are not summed over the ranks that have the same experts."""
    axis, alone = Mesh.axis, Axis("edp", [rank], 0, torch.device("cpu"), None)
    Mesh.axis = lambda mesh, name: alone if name == "edp" else axis(mesh, name)  # type: ignore[method-assign]
    try:
        side(rank, world, recipe, steps, where)
    finally:
        Mesh.axis = axis  # type: ignore[method-assign]


def test_a_forgotten_sum_shows(folder):
    report = compared(tiny(folder, "dp=4,ep=2", *MODEL, *AUX), part=forgetful)
    assert not report.gradients.passed
    assert "experts" in report.gradients.worst


class Noted(Function):
    """Identity, which notes when it is computed, in forward and in backward."""

    @staticmethod
    def forward(ctx, x, notes):
        ctx.notes = notes
        notes.append("compute")
        return x.clone()

    @staticmethod
    def backward(ctx, *grads):
        ctx.notes.append("compute")
        return grads[0], None


def exchange(
    rank: int, world: int, counts: list[list[int]], chunks: int
) -> tuple[list[torch.Tensor], list[str]]:
    """This rank's rows through all experts, which the ranks divide, and back: rows, their experts, results, gradients
    of weights. And the order of messages and computations."""
    cut = [[n * (i + 1) // chunks - n * i // chunks for n in counts[rank]] for i in range(chunks)]
    mine, notes = torch.tensor(cut), list[str]()
    experts = mine.shape[1]
    weights = torch.randn(experts, 4, 4, generator=torch.Generator().manual_seed(0))
    own = weights.view(world, -1, 4, 4)[rank].clone().requires_grad_()
    rows = torch.randn(int(mine.sum()), 4, generator=torch.Generator().manual_seed(1 + rank)).requires_grad_()
    assert dist.group.WORLD is not None
    axis = Axis("ep", range(world), rank, torch.device("cpu"), dist.group.WORLD)
    start = axis.start
    axis.start = lambda *args, **options: (notes.append("start"), start(*args, **options))[1]  # type: ignore
    numbers = torch.arange(len(rows))  # each row is a token of its own
    way = Assignment(numbers, numbers[:, None], mine, mine.sum(0))
    sends = AllToAll(axis, chunks)
    leaving, begun = sends.begin(rows, way)
    assert notes == ["start"] * (1 + chunks), "the counts, and all rows"
    compute = lambda x, c: Noted.apply(grouped_linear(x, own, c), notes)  # noqa: E731
    out = sends(leaving, compute, begun)
    of = torch.arange(experts).repeat(chunks).repeat_interleave(mine.flatten())
    wanted = torch.einsum("md,mfd->mf", rows, weights[of])
    torch.testing.assert_close(out, wanted)
    drows, dweights = torch.autograd.grad(out, [rows, own], 2 * out.detach())
    torch.testing.assert_close(drows, torch.einsum("mf,mfd->md", 2 * wanted.detach(), weights[of]))
    return [rows.detach(), of, out.detach(), dweights], notes


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize(
    "counts",
    [
        [[3, 1, 2, 4], [5, 0, 0, 1]],
        [[3, 1, 0, 0], [0, 0, 2, 2]],  # all stay at home
        [[4, 2, 0, 0], [3, 3, 0, 0]],  # one rank computes all
        [[0, 0, 0, 0], [0, 7, 1, 0]],  # a rank without rows
        [[0, 0, 0, 0], [0, 0, 0, 0]],
    ],
)
def test_rows_go_out_and_come_back(counts, chunks):
    """Uneven splits, also of nothing: results and gradients are those of whole weights. And messages of other chunks
    are under way while one is computed, in forward and in backward."""
    found = run_ranks(2, exchange, counts, chunks)
    for e in range(4):
        total = torch.zeros(4, 4)
        for (rows, of, out, _), _ in found:
            total += 2 * out[of == e].t() @ rows[of == e]
        torch.testing.assert_close(found[e // 2][0][3][e % 2], total)
    way = ["start"] * chunks + ["compute", "start"] * chunks
    assert [notes for _, notes in found] == [["start", *way, *way]] * 2, "the counts, forward, backward"


def paired(rank: int, world: int, recipe: Recipe, steps: int, where: Path) -> None:
    """As `side`. In every pair, each part gives way to the other."""
    found, both, give_way = [], Turns.both, Turns.give_way

    def noted(turns: Turns, first: Callable[[], object], second: Callable[[], object]) -> tuple[float, float]:
        found.append([0, 0])
        return both(turns, first, second)

    def counted(turns: Turns) -> None:
        if turns._running is not None:
            found[-1][turns._running] += 1
        give_way(turns)

    Turns.both, Turns.give_way = noted, counted  # type: ignore[method-assign]
    try:
        side(rank, world, recipe, steps, where)
    finally:
        Turns.both, Turns.give_way = both, give_way  # type: ignore[method-assign]
    pairs = build("dualpipev_paired", 2, 4).pairs
    assert len(found) == steps * sum(action.stage in ((0, 3) if rank < 2 else (1, 2)) for action in pairs)
    assert all(ahead and behind for ahead, behind in found), "one did not give way"


ORDER = {"dispatch": ("start",), "shared up": ("shared",), "arrival": ("wait",), "experts up": ("experts",),
         "combine": ("start", "wait")}  # fmt: skip
"""What a rank does where the planner has an operation, in forward. In backward it waits where it started, and starts
where it waited."""


def ordered(rank: int, world: int, recipe: Recipe, steps: int, where: Path) -> None:
    """As `side`. Each block computes and sends in the order of the planner's operations."""
    notes = list[str]()

    def noted(name: str, function: Callable) -> Callable:
        def run(*inputs, **options):
            notes.append(name)
            found = function(*inputs, **options)
            if name in ("shared", "experts") and found.requires_grad:
                found.register_hook(lambda _: notes.append(name))
            return found

        return run

    def unnoted(function: Callable) -> Callable:
        def run(*inputs):
            begun = len(notes)
            found = function(*inputs)
            del notes[begun:]
            return found

        return run

    with pytest.MonkeyPatch.context() as patch:
        for kind, method, name in (
            (Transfer, "start", "start"),
            (Transfer, "wait", "wait"),
            (SwiGLU, "forward", "shared"),
            (Experts, "compute", "experts"),
        ):
            patch.setattr(kind, method, noted(name, getattr(kind, method)))
        patch.setattr(verify, "validation_loss", unnoted(verify.validation_loss))
        side(rank, world, recipe, steps, where)
    model = resolve(recipe, vocab_size=64).model
    planned = setting(model, Layout.from_recipe(recipe.layout), parse("h100:2"), 1, 4).last_block
    forward = [note for op in planned for note in ORDER.get(op.name, ())]
    turned = {"start": "wait", "wait": "start"}
    backward = [turned.get(note, note) for note in reversed(forward)]
    blocks = [*forward * model.layers, *backward * model.layers]
    assert notes == blocks * (len(notes) // len(blocks)), notes[: len(blocks)]
    assert len(notes) >= steps * len(blocks)


@pytest.mark.parametrize("buffer", [0, 2])
def test_rows_travel_beside_the_shared_expert(folder, buffer):
    """They leave before it computes, and are waited for behind it, and the plan has the same order."""
    sets = ["model.arch=deepseek", "model.layers=2", "data.document_masks=false"]
    recipe = tiny(folder, f"dp=2,ep=2,expert_buffer={buffer}", *sets, steps=1)
    assert compared(recipe, steps=1, part=ordered).passed


PAIRED = "dp=2,pp=2,ep=2,schedule=dualpipev_paired"


@pytest.mark.parametrize(
    "layout",
    [
        f"{PAIRED},expert_chunks=2",
        pytest.param(f"{PAIRED},zero=3", marks=pytest.mark.slow),
        pytest.param(f"{PAIRED},recompute=full", marks=pytest.mark.slow),
    ],
)
def test_forward_and_backward_take_turns(folder, layout):
    """Each gives way where it would wait for rows, and all is as in one process."""
    recipe = tiny(folder, layout, *MODEL, *AUX, "model.layers=4")
    report = compared(recipe, part=paired, folder=folder / "paired")
    assert report.passed, report.as_json()


def test_turns_end_with_an_error_of_either():
    """The other one ends at once: its messages would wait for ranks that wait for this one's."""
    turns, order = Turns(), list[str]()

    def steps(name: str, count: int, fails: bool = False) -> Callable[[], None]:
        def run() -> None:
            for i in range(count):
                order.append(f"{name}{i}")
                turns.give_way()
            if fails:
                raise ValueError(name)

        return run

    seconds = turns.both(steps("a", 3), steps("b", 1))
    assert order == ["a0", "b0", "a1", "a2"]
    assert min(seconds) > 0
    for fails in ("a", "b"):
        order.clear()
        with pytest.raises(ValueError, match=fails):
            turns.both(steps("a", 2, fails == "a"), steps("b", 3, fails == "b"))
        assert order == ["a0", "b0", "a1", "b1", "b2"][: 4 if fails == "a" else 5]
    order.clear()
    with pytest.raises(ValueError, match="b"):
        turns.both(steps("a", 9), steps("b", 1, fails=True))
    assert order == ["a0", "b0", "a1"]
    turns.give_way()  # outside it does nothing


def shares(layout: str) -> list[dict[str, tuple[int, ...]]]:
    """What each rank computes with of the experts of a block."""
    recipe = resolve(load("quickstart", [*TINY, *MODEL], layout), vocab_size=64)
    axes, names = (
        Layout.from_recipe(recipe.layout),
        ("experts.gate_up", "experts.down", "shared.gate_up.weight"),
    )
    every = [parts(card_of(recipe.model), axes, rank) for rank in range(axes.ranks)]
    return [{name: local_shape(table[f"blocks.0.mlp.{name}"].computes) for name in names} for table in every]


def test_tensor_parallel_ranks_have_some_features_of_every_expert():
    """With sequence parallelism they have tokens of their own, and whole experts."""
    whole = {"experts.gate_up": (4, 64, 32), "experts.down": (4, 32, 32), "shared.gate_up.weight": (64, 32)}
    cut = {"experts.gate_up": (4, 32, 32), "experts.down": (4, 32, 16), "shared.gate_up.weight": (32, 32)}
    assert shares("dp=2,ep=2,tp=2") == [cut] * 4
    assert shares("dp=2,ep=2,tp=2,sp=true") == [whole] * 4


def test_features_that_do_not_divide_are_refused():
    wanted = "Nearest valid: layout.tp = 1, layout.sp = true, or model.expert_ffn_dim = 32"
    with pytest.raises(UserError, match=wanted):
        load("quickstart", [*TINY, *MODEL, "model.expert_ffn_dim=24"], "tp=2")
    load("quickstart", [*TINY, *MODEL, "model.expert_ffn_dim=24"], "tp=2,sp=true")


def test_gradients_of_experts_stay_with_those_who_have_them(folder):
    """dp 2, ep 2: a layer sends its tokens' rows out and back, in forward and in backward, and before them how many
    there are; the all-reduce holds no expert's gradient, for each is on one rank only."""
    recipe = tiny(folder, "dp=2,ep=2", *MODEL, "train.microbatch_size=4", steps=1)
    model = resolve(recipe, vocab_size=prepare(recipe).vocab_size).model
    E, table = model.experts or 0, card_of(model).cuts
    rest = [
        torch.Size(shape).numel()
        for name, shape in card_of(model).parameters.items()
        if name not in table or table[name].kind != "expert"
    ]
    rows = 4 * (2 * 4 * 16) * model.dim  # 2 experts a token, 4 sequences a rank of 16 tokens
    agreed = [
        8 * model.layers * (E + 4),
        32,
    ]  # fp64: load of the experts; loss, what ranks ask for, norm, whether the last update destroyed weights
    axis = "replicate"  # all groups have the same two ranks
    wanted = {
        ("all_reduce", axis): (1 + len(agreed), 4 * sum(rest) + sum(agreed)),
        ("all_to_all", axis): (5 * model.layers, model.layers * (4 * rows + 8 * E)),
    }
    assert [step.sent for step in run_ranks(2, counted, recipe)] == [wanted] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        "dp=2,ep=2",
        pytest.param("dp=4,ep=2,zero=3", marks=pytest.mark.slow),
        pytest.param("dp=2,pp=2,ep=2", marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_in_one_process(folder, tmp_path, layout):
    """Four steps on the layout, saved; two more by one process. Losses, balance, validation, weights and the routers'
    biases are those of a run by one."""
    sets = ["optim.schedule=constant", "data.val_fraction=0.1", "train.val_every=3", "train.sample_tokens=4"]
    one = change(tiny(folder, "dp=1", *MODEL, *BIAS, *sets), ["train.steps=6"])
    many = change(one, ["train.steps=4"], layout)
    train_rank(0, 1, one, tmp_path / "one")
    run_ranks(Layout.from_recipe(many.layout).ranks, train_rank, many, tmp_path / "many")
    train_rank(0, 1, one, tmp_path / "many", True)
    for key in ("loss", "grad_norm", "aux_loss", "z_loss"):
        assert lines(tmp_path / "many", key) == pytest.approx(lines(tmp_path / "one", key), rel=1e-5), key
    for key in ("expert_load_max", "expert_load_min", "dropped_share"):
        assert lines(tmp_path / "many", key) == lines(tmp_path / "one", key), key
    assert lines(tmp_path / "many", "val_loss")[-1] == pytest.approx(
        lines(tmp_path / "one", "val_loss")[-1], rel=1e-5
    )
    a, b = (stored.load(store.latest(tmp_path / name)).model for name in ("one", "many"))
    assert a.keys() == b.keys()
    for name, weight in a.items():
        if name.endswith("router.bias"):
            assert torch.equal(weight, b[name]), name
            assert weight.any()
        else:
            assert (weight - b[name]).norm() / weight.norm() < 1e-5, name
