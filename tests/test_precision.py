"""Precision modes: what is rounded, how, and the same on every layout; resuming; loss scaling; states in the plan."""

import math
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import stored
import torch
from layouts import compared, tiny
from marks import only, slow
from parity import joined, pieces
from pool_runs import after_each_step, assert_same_tensors, lines, ranks_of, train_rank
from ranks import run_ranks
from steps import planned

from fivefold.checkpoint import store
from fivefold.data import prepare
from fivefold.errors import UserError
from fivefold.kernels import native
from fivefold.kernels.hashing import keys
from fivefold.kernels.rounded import E4M3, round_tiles
from fivefold.optim import OPTIMIZERS, kept_in
from fivefold.optim.rounding import Rounder, round_stochastic_
from fivefold.optim.scaling import HIGHEST, LOWEST, LossScale
from fivefold.optim.updater import Rounded, Updater
from fivefold.precision import DTYPES, PRECISIONS, torch_dtype
from fivefold.recipe import Recipe, change, count_parameters, load, resolve
from fivefold.sharding.layout import Layout
from fivefold.sharding.parts import Part, boxes, local_shape, whole
from fivefold.step.state import State, build_state
from fivefold.step.step import take_step
from fivefold.train.differences import TIMES
from fivefold_plan.cluster.clusters import parse
from fivefold_plan.predict import held, predict
from fivefold_plan.setting import own_states
from fivefold_plan.trace.step import trace


def rounded(x: torch.Tensor, keys: tuple[int, int], box=None, shape=None) -> torch.Tensor:
    out = x.clone()
    shape = tuple(x.shape) if shape is None else shape
    round_stochastic_(out, shape, box or tuple((0, n) for n in shape), *keys)
    return out


def test_stochastic_rounding_takes_a_neighbour_and_is_right_on_average():
    low, step = 1.0, 2.0**-7  # bf16 numbers between 1 and 2
    x = torch.full((1 << 16,), low + 0.3 * step)
    found = rounded(x, (1, 2))
    assert set(found.unique().tolist()) == {low, low + step}
    share = (found > low).float().mean().item()
    assert share == pytest.approx(0.3, abs=4 * math.sqrt(0.21 / x.numel()))
    exact = torch.randn(1000).bfloat16().float()
    assert torch.equal(rounded(exact, (1, 2)), exact), (
        "a bf16 number is not rounded: skipped updates change nothing"
    )
    special = torch.tensor([math.inf, -math.inf, 0.0])
    assert torch.equal(rounded(special, (1, 2)), special)
    assert rounded(-x, (1, 2)).mean() == -rounded(x, (1, 2)).mean()


def test_pytorch_rounds_as_the_kernel_for_cpus_does(monkeypatch):
    """Bit for bit, so also at random by all of the 16 bits that are cut off."""
    x = torch.randn(33, 129) * torch.logspace(-30, 30, 129)
    kernel = rounded(x, (3, 4))
    monkeypatch.setattr(native, "usable", lambda *tensors: False)
    assert torch.equal(rounded(x, (3, 4)), kernel)
    test_stochastic_rounding_takes_a_neighbour_and_is_right_on_average()


def test_what_is_not_a_number_stays_so(monkeypatch):
    """Also where all its bits are ones, as GPUs make it: a carry would leave -0."""
    x = torch.tensor([0x7FFFFFFF, -1, 0x7FC00000], dtype=torch.int32).view(torch.float32).repeat(64)
    assert rounded(x, (1, 2)).isnan().all()
    monkeypatch.setattr(native, "usable", lambda *tensors: False)
    assert rounded(x, (1, 2)).isnan().all()


def test_a_scalar_is_rounded(monkeypatch):
    """Modules of a user's own have some."""
    x = torch.tensor([1.003, 2.5])
    for usable in (native.usable, lambda *tensors: False):
        monkeypatch.setattr(native, "usable", usable)
        assert rounded(x[0], (1, 2)) == rounded(x[:1], (1, 2))[0] != x[0]


def test_random_bits_depend_on_key_and_index_alone():
    whole_x = torch.randn(12, 10)
    found = rounded(whole_x, (5, 6))
    box = ((3, 9), (2, 7))
    part = rounded(whole_x[3:9, 2:7].contiguous(), (5, 6), box, (12, 10))
    assert torch.equal(part, found[3:9, 2:7])
    other = rounded(whole_x, (5, 7))
    assert 0.2 < (found != other).float().mean() < 0.8


@pytest.mark.parametrize(
    "box",
    [((0, 4), (0, 6), (0, 5)), ((1, 3), (0, 6), (0, 5)), ((1, 3), (2, 5), (0, 5)), ((0, 4), (1, 6), (2, 4))],
)
def test_the_fused_kernel_draws_the_same_bits(box, monkeypatch):
    shape = (4, 6, 5)
    x = torch.randn(shape)[tuple(slice(*span) for span in box)].contiguous()
    fused = rounded(x, (-7, 1 << 60), box, shape)
    monkeypatch.setattr(native, "usable", lambda *tensors: False)
    assert torch.equal(fused, rounded(x, (-7, 1 << 60), box, shape))


def test_pieces_of_a_part_draw_the_bits_of_the_whole():
    """Wherever a streamed update cuts a part, whose rows come from several spans."""
    keeps = ((1, 3),), ((0, 2), (3, 6)), ((0, 5),)
    part = Part((4, 6, 5), keeps, keeps, True)
    rounder = Rounder("stochastic", torch.bfloat16, 1, OPTIMIZERS["adamw"], {"w": part})
    x = torch.randn(local_shape(keeps))
    wanted = torch.cat(
        [rounded(x[w].contiguous(), keys("1/0/w"), box, part.shape) for w, box in boxes(keeps)], 1
    )

    def piece(start: int, stop: int) -> torch.Tensor:
        return rounder.round(x.view(-1)[start:stop].clone(), "w", "w", torch.bfloat16, start)

    assert torch.equal(piece(0, 50), wanted.bfloat16().view(-1))
    for first in range(1, 25):
        cuts = (0, first, 2 * first, 50)
        assert torch.equal(torch.cat([piece(*two) for two in pairwise(cuts)]), piece(0, 50)), cuts


def updater(
    how: str, masters: dict[str, torch.Tensor], optimizer: str = "adamw", mode: str = "bf16_pure"
) -> Rounded:
    card, dtypes = OPTIMIZERS[optimizer], PRECISIONS[mode]
    parts = {
        n: Part(tuple(w.shape), whole(tuple(w.shape)), whole(tuple(w.shape)), True)
        for n, w in masters.items()
    }
    rounder = Rounder(how, torch_dtype(dtypes.state), 1, kept_in(card, dtypes, how), parts)
    return Rounded(rounder, masters, lambda some: Updater(card, some, 1e-3, 0.0, card.fields))


def drift(how: str) -> tuple[float, Rounded]:
    """How far 200 updates of a 1/5 spacing each bring weights of 1, in shares of the exact way."""
    masters = {"a.weight": torch.ones(64, 64).bfloat16(), "b.weight": torch.ones(8).bfloat16()}
    updates = updater(how, masters, "sgd")
    gradient = {name: torch.full_like(w, -1.0) for name, w in masters.items()}
    for _ in range(200):
        updates.step(gradient, 2.0**-7 / 5)
    moved = torch.cat([w.float().view(-1) - 1 for w in masters.values()]).mean().item()
    return moved / (200 * 2.0**-7 / 5), updates


def test_small_updates_are_lost_only_to_nearest():
    assert drift("nearest")[0] == 0
    assert drift("stochastic")[0] == pytest.approx(1, abs=0.02)
    assert drift("kahan")[0] == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("how", ["nearest", "stochastic", "kahan"])
def test_states_are_bf16_and_a_skipped_update_changes_nothing(how):
    torch.manual_seed(0)
    masters = {"a.weight": torch.randn(64, 48).bfloat16(), "b.weight": torch.randn(48).bfloat16()}
    updates = updater(how, masters)

    def step(skip: float) -> None:
        gradients = {name: torch.randn_like(w) for name, w in masters.items()}
        updates.step(gradients, 1e-2, None, torch.tensor(skip))

    step(0.0)
    elements = sum(w.numel() for w in masters.values())
    states = updates.states()
    assert all(t.dtype == torch.bfloat16 for t in states.values())
    expected = kept_in(OPTIMIZERS["adamw"], PRECISIONS["bf16_pure"], how).bytes
    assert sum(t.nbytes for t in states.values()) == expected * elements
    assert sum(t.nbytes for t in updates.kept()) == expected * elements + 4 * len(masters), (
        "and the step counts"
    )
    before = {n: t.clone() for n, t in (masters | states).items()}
    step(1.0)
    assert all(torch.equal(t, before[n]) for n, t in (masters | updates.states()).items())
    step(0.0)
    assert not torch.equal(masters["a.weight"], before["a.weight"])


def test_moments_in_fp8_stay_as_they_are_if_skipped_or_saved():
    """Two bytes per parameter, and a scale for each moment. They are rounded to nearest, and none that divides is 0."""
    torch.manual_seed(0)
    masters = {"a.weight": torch.randn(64, 48).bfloat16(), "b.weight": torch.randn(48).bfloat16()}
    updates, again = (
        updater("stochastic", {n: w.clone() for n, w in masters.items()}, mode="nanotron") for _ in "ab"
    )
    first = {name: torch.randn_like(w).float() * torch.logspace(-8, 0, 48) for name, w in masters.items()}
    updates.step({name: gradient.clone() for name, gradient in first.items()}, 1e-2, None, torch.tensor(0.0))
    elements = sum(w.numel() for w in masters.values())
    assert sum(t.nbytes for t in updates.kept() if t.dim()) == 2 * elements
    assert sum(t.nbytes for t in updates.kept() if not t.dim()) == 3 * 4 * len(masters), (
        "scales, and step counts"
    )
    before = updates.states()
    mean = (first["a.weight"] * 0.1).view(1, -1)
    nearest = round_tiles(mean, 1, mean.numel(), E4M3).view(64, 48)
    assert (before["exp_avg.a.weight"].float() != nearest).float().mean() < 0.001
    assert all(state.min() > 0 for name, state in before.items() if "exp_avg_sq" in name)
    updates.step({n: torch.randn_like(g) for n, g in first.items()}, 1e-2, None, torch.tensor(1.0))
    assert_same_tensors(updates.states(), before)
    for name, weight in again.masters.items():
        weight.copy_(updates.masters[name])
    again.load(before, 1, 2)
    assert_same_tensors(again.states(), before)
    assert updates.rounder is not None
    assert again.rounder is not None
    again.rounder.steps = updates.rounder.steps
    for one in (updates, again):
        one.step({name: gradient.clone() for name, gradient in first.items()}, 1e-2)
    assert_same_tensors(again.states(), updates.states())
    assert_same_tensors(dict(again.masters), dict(updates.masters))


def test_loss_scale():
    scale = LossScale(8.0, 2, torch.device("cpu"))
    good, bad = torch.tensor(0.0), torch.tensor(1.0)
    seen = []
    for skip in (good, good, good, bad, good, good, bad, bad, bad, bad, bad, bad):
        lowered = scale.update(skip)
        seen.append((scale.factor.item(), lowered.item()))
    assert [factor for factor, _ in seen] == [8, 16, 16, 8, 8, 16, 8, 4, 2, 1, LOWEST, LOWEST]
    assert [int(lowered) for _, lowered in seen] == [0, 0, 0, 1, 0, 0, 1, 1, 1, 1, 0, 0]
    scale.set(HIGHEST, 1.0)
    scale.update(good)
    assert scale.factor == HIGHEST


def test_ten_billion_parameters_in_pure_bf16_take_80_gb():
    """CMU's lecture: 10 billion parameters, 8 bytes each."""
    sets = ["model.layers=40", "model.dim=4480", "model.heads=35", "model.kv_heads=35", "model.ffn_dim=12352",
            "model.vocab_size=32000", "model.seq_len=512", "train.global_batch_size=1"]  # fmt: skip
    recipe = load("quickstart", [*sets, "precision.mode=bf16_pure"], "dp=1")
    plan = predict(recipe, parse("h100"))
    (found,) = plan.memory
    parameters = count_parameters(recipe.model)
    assert parameters == pytest.approx(10e9, rel=0.01)
    states = found.params + found.gradients + found.optimizer
    assert states == 8 * parameters
    assert states == pytest.approx(80e9, rel=0.01)
    kahan = predict(change(recipe, ["precision.rounding=kahan"]), parse("h100"))
    assert kahan.memory[0].optimizer - found.optimizer == 2 * parameters
    mixed = predict(change(recipe, ["precision.mode=bf16"]), parse("h100")).memory[0]
    assert mixed.params + mixed.gradients + mixed.optimizer == 18 * parameters


@only("tp=2,sp=true-nanotron", "dp=2,zero=2-*")
@pytest.mark.parametrize("mode", ["bf16_pure", "nanotron"])
@pytest.mark.parametrize("layout", ["dp=2", "tp=2,sp=true", "dp=2,zero=2"])
def test_the_plan_is_the_traced_step(tmp_path, layout, mode):
    """States exactly; the peak, which is the update of a model this small, within 2%; messages of gradients in the
    dtype of their sum."""
    recipe = tiny(tmp_path, layout, mode=mode)
    recipe = resolve(recipe, vocab_size=prepare(recipe).vocab_size)
    setting = planned(recipe)
    found, expected = trace(recipe, 0, setting.microbatches), held(setting)[0]
    memory = found.memory.at_peak
    assert (memory["params"], memory["gradients"]) == (expected.params, expected.gradients)
    steps = memory["optimizer"] - expected.optimizer  # torch counts them with every tensor
    assert 0 < steps < 200 * (1 + 2 * (mode == "nanotron")), "and the scales of two moments"
    assert found.memory.total == pytest.approx(expected.total, rel=0.02)
    if layout == "dp=2":
        sent = sum(size for (what, _), (_, size) in found.sent.items() if what == "all_reduce")
        assert sent == expected.gradients + 32, (
            "and loss, norm, whether to stop, whether weights are destroyed"
        )


@pytest.mark.skipif(bool(native.why_not()), reason="PyTorch's own operations keep other tensors")
def test_fp16_keeps_what_bf16_keeps(tmp_path):
    """On CPUs that multiply it in fp32, too: copies in fp32 are freed at once."""
    found = {}
    for mode in ("bf16", "fp16"):
        recipe = tiny(tmp_path, "dp=1", f"precision.mode={mode}", mode=mode)
        recipe = resolve(recipe, vocab_size=prepare(recipe).vocab_size)
        found[mode] = trace(recipe, 0, planned(recipe).microbatches).memory.highest
    found["bf16"]["activations"] += 4  # the scaled loss
    kinds = ("params", "gradients", "optimizer", "activations")
    assert [found["fp16"][kind] for kind in kinds] == [found["bf16"][kind] for kind in kinds]


QUICK = {
    ("bf16_pure", "dp=2,zero=2"), ("bf16_pure", "pp=2,schedule=zb_h1"), ("fp16", "tp=2,sp=true"), ("fp16", "dp=2,ep=2"),
}  # fmt: skip


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    """Where text, cache and the references stay."""
    return tmp_path_factory.mktemp("precision")


@only("fp16-tp=2,sp=true", "bf16_pure-dp=2,zero=2")
@pytest.mark.parametrize(
    ("mode", "layout"),
    [
        pytest.param(mode, layout, marks=[] if (mode, layout) in QUICK else pytest.mark.slow)
        for mode in ("bf16_pure", "fp16", "nanotron")
        for layout in (
            "dp=1", "dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "dp_replicate=2,dp_shard=2,zero=1",
            "dp_replicate=2,dp_shard=2,zero=3", "tp=2", "tp=2,sp=true", "cp=2", "cp=2,cp_method=ulysses",
            "cp=2,cp_method=all_gather", "pp=2",
            "pp=2,schedule=zb_h1", "pp=2,schedule=zbv,virtual_stages=2", "pp=2,dp=2,zero=1", "dp=2,ep=2",
            "dp=2,ep=2,zero=1", "dp=2,tp=2,zero=3", "dp=4,zero=3,ranks_per_node=2,zeropp=hier",
        )
        if not (mode == "nanotron" and "ep=" in layout)
    ],
)  # fmt: skip
def test_layouts_compute_what_one_process_computes(room, mode, layout):
    """Loss, norm, every gradient and the weights after three steps, within the mode's own error. That of one number,
    the norm, is close to zero by chance in `nanotron` and `fp16` with the seed 0."""
    seed = int(mode in ("nanotron", "fp16"))
    recipe = tiny(room, layout, f"precision.mode={mode}", f"train.seed={seed}", mode=mode)
    report = compared(recipe, folder=room / f"{'moe' if 'ep=' in layout else 'llama'}-{mode}")
    assert report.passed, report


RULES = [
    ("adagrad", "dp=2,zero=2"), ("rmsprop", "tp=2"), ("radam", "dp=2,zero=1"), ("nadam", "pp=2"),
    ("adamsage", "dp=2,tp=2,zero=3"), ("lion", "cp=2"), ("sophia", "dp=2,zero=3"),
]  # fmt: skip
LR = {"adagrad": 0.05, "rmsprop": 1e-4}


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, marks=[] if name == "sophia" and layout != "dp=1" else pytest.mark.slow)
        for name, one in RULES
        for layout in ("dp=1", one)
    ],
)
def test_rules_compute_what_one_process_computes(tmp_path, name, layout):
    """In bf16_pure, the optimizers without a kernel."""
    sets = ["precision.mode=bf16_pure", f"optim.name={name}", f"optim.lr={LR.get(name, 1e-3)}"]
    report = compared(tiny(tmp_path, layout, *sets, mode="bf16_pure"))
    assert report.passed, report


def after_a_step(rank: int, world: int, recipe: Recipe, draws: int = 0) -> dict[str, Any]:
    """The masters after a step: the pieces that this rank owns, and all that it keeps. draws: of the rounding before
    it."""
    state = build_state(recipe, ranks_of(rank, world))
    state.go_to(draws)
    state.step = 0
    generator = torch.Generator().manual_seed(0)
    batch = torch.randint(0, 200, (8, recipe.model.seq_len + 1), generator=generator)
    rows = batch.chunk(state.mesh.size("batch"))[state.mesh.index("batch")]
    take_step(state, recipe, [(rows[:, :-1], rows[:, 1:])])
    masters = state.masters()
    return {"weights": pieces(state, masters), "all": {name: w.clone() for name, w in masters.items()}}


def test_layouts_draw_the_same_random_bits(tmp_path):
    """Gradients differ by rounding, so few elements round to the other side. With other bits many would."""
    sets = ["precision.mode=bf16_pure", "optim.name=sgd", "optim.lr=0.1", "train.microbatch_size=8"]
    recipe = tiny(tmp_path, "dp=1", *sets, mode="bf16_pure")
    recipe = resolve(recipe, vocab_size=prepare(recipe).vocab_size)
    one = joined([after_a_step(0, 1, recipe)], "weights")

    def others(answers: list[dict[str, Any]]) -> float:
        """The share of elements that are others than in one process."""
        found = joined(answers, "weights")
        return sum((found[name] != one[name]).sum().item() for name in one) / count_parameters(recipe.model)

    by_chance = others([after_a_step(0, 1, recipe, draws=1)])
    for layout in ("dp=2", "tp=2", "dp=2,zero=3"):
        other = resolve(
            change(recipe, ["train.microbatch_size=none"], layout), vocab_size=recipe.model.vocab_size
        )
        answers = run_ranks(2, after_a_step, other)
        assert others(answers) < by_chance / 5, layout
        if layout == "dp=2":
            assert_same_tensors(answers[0]["all"], answers[1]["all"])


def trained(recipe: Recipe, layout: str, out: Path, steps: int, resume: bool = False) -> stored.Checkpoint:
    recipe = change(recipe, [f"train.steps={steps}"], layout)
    ranks = Layout.from_recipe(recipe.layout).ranks
    if ranks == 1:
        train_rank(0, 1, recipe, out, resume)
    else:
        run_ranks(ranks, train_rank, recipe, out, resume, timeout_s=60)
    return stored.load(store.latest(out))


RESUMED = ["optim.schedule=constant", "observe.tracker=none", "model.layers=2"]


@only("dp=2,zero=1*")
@pytest.mark.parametrize(
    ("layout", "sets"),
    [
        ("dp=2,zero=1", ["precision.mode=bf16_pure", "precision.rounding=kahan"]),
        pytest.param("tp=2", ["precision.mode=bf16_pure"], marks=pytest.mark.slow),
        *slow(*((layout, ["precision.mode=nanotron"]) for layout in ("dp=2", "dp=2,zero=1", "tp=2", "pp=2"))),
        *(
            pytest.param(
                layout,
                ["precision.mode=bf16_pure", f"optim.name={name}"],
                marks=[] if name == "sophia" else pytest.mark.slow,
            )
            for name, layout in RULES
        ),
        ("dp=1", ["precision.mode=fp16", "precision.loss_scale=16777216", "precision.loss_scale_every=2"]),
    ],
)
def test_resumes_with_the_same_bits(tmp_path, layout, sets):
    recipe = tiny(tmp_path, "dp=1", *sets, *RESUMED, mode=sets[0].partition("=")[2])
    whole_run = trained(recipe, layout, tmp_path / "whole", 4)
    trained(recipe, layout, tmp_path / "parts", 2)
    found = trained(recipe, layout, tmp_path / "parts", 4, resume=True)
    assert_same_tensors(found.model, whole_run.model)
    assert_same_tensors(found.optimizer, whole_run.optimizer)
    assert found.meta.get("loss_scale") == whole_run.meta.get("loss_scale")
    if "precision.mode=fp16" in sets:
        out = tmp_path / "whole"
        scales, skipped = lines(out, "loss_scale"), lines(out, "skipped_steps")
        assert scales[0] == 2.0**24
        assert skipped[-1] > 0, "gradients of a loss of 2^24 overflow"
        assert found.meta["updates"] == 4 - skipped[-1]
        assert scales[-1] == 2.0 ** (24 - skipped[-2])
    else:
        assert {t.dtype for t in found.model.values()} == {torch.bfloat16}
        assert any(name.startswith("compensation.") for name in found.optimizer) == (
            "precision.rounding=kahan" in sets
        )
        other = trained(recipe, "dp=1", tmp_path / "parts", 5, resume=True)  # another layout
        again = trained(recipe, "dp=1", tmp_path / "whole", 5, resume=True)
        assert_same_tensors(other.model, again.model)


def overflowing_rank(
    rank: int, world: int, recipe: Recipe, out: Path, at: list[int], resume: bool = False
) -> dict[str, Any]:
    """A run in which one gradient of the last rank alone is not finite in these steps. Returns what this rank knows
    after each step, the scale with its history and the number of updates, and its masters at the end."""
    found: dict[str, Any] = {"scales": [], "updates": []}

    def after(state: State, when: str) -> None:
        if when == "gradient" and rank == world - 1 and state.step + 1 in at:
            state.parallel.replicas[-1].gradients["blocks.3.mlp.down.weight"].fill_(math.inf)
        if when == "end":
            found["scales"].append(state.loss_scale.values.tolist() if state.loss_scale else [])
            found["updates"].append(state.updates)
            found["masters"] = {name: w.clone() for name, w in state.masters().items()}
            if state.loss_scale is None:
                state.set_counts(state.updates, 0)  # in fp32 five such steps in a row would end the run

    with after_each_step(after):
        train_rank(rank, world, recipe, out, resume)
    return found


def apart(a: Path, b: Path) -> float:
    """The relative difference of two runs' last weights, all together."""
    mine, theirs = (stored.load(store.latest(out)).model for out in (a, b))
    square = sum((mine[name] - w).double().square().sum() for name, w in theirs.items())
    return float((square / sum(w.double().square().sum() for w in theirs.values())).sqrt())


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Recipe, dict[str, Any], float]:
    """Steps from a scale of 2^24, at which gradients overflow by themselves, as they do when it grows again; in step 11
    those of one parameter are made to. And how far the last weights are from those in fp32 with the same steps skipped.
    """
    folder = tmp_path_factory.mktemp("overflows")
    sets = ["precision.loss_scale=16777216", "precision.loss_scale_every=2", "train.steps=14", *RESUMED[:2]]
    recipe = change(tiny(folder, "dp=1", mode="fp16"), sets)
    found = overflowing_rank(0, 1, recipe, folder / "fp16", [11])
    updates = [0, *found["updates"]]
    skipped = [step for step in range(1, 15) if updates[step] == updates[step - 1]]
    assert skipped[0] == 1, "gradients of a loss of 2^24 overflow"
    assert 11 in skipped
    assert len(skipped) < 11
    in_fp32 = change(tiny(folder, "dp=1"), sets[2:])
    overflowing_rank(0, 1, in_fp32, folder / "fp32", skipped)
    return folder, recipe, found, apart(folder / "fp16", folder / "fp32")


@pytest.mark.parametrize("layout", ["dp=2,zero=2", *slow("tp=2", "pp=2")])
def test_ranks_decide_on_the_loss_scale_together(one_process, tmp_path, layout):
    """Also where one of them alone overflows: scales and weights are those of one process, which resumes the run."""
    folder, recipe, one, own = one_process
    run, alone = tmp_path / "run", tmp_path / "alone"
    ranks = run_ranks(2, overflowing_rank, change(recipe, [], layout), run, [11], timeout_s=60)
    for found in ranks:
        assert found["scales"] == one["scales"]
        assert found["updates"] == one["updates"]
    a, b = (found["masters"] for found in ranks)
    both = [name for name in a.keys() & b.keys() if a[name].shape == one["masters"][name].shape]
    assert len(both) == {"dp=2,zero=2": 0, "tp=2": 9, "pp=2": 1}[layout], "norms, or the tied embedding"
    assert all(torch.equal(a[name], b[name]) for name in both)
    assert 0 < apart(run, folder / "fp16") < TIMES * own
    shutil.copytree(run, alone)
    longer = change(recipe, ["train.steps=16"])
    resumed = overflowing_rank(0, 1, longer, alone, [], True)
    for found in run_ranks(2, overflowing_rank, change(longer, [], layout), run, [], True, timeout_s=60):
        assert found["scales"] == resumed["scales"]
        assert found["updates"] == resumed["updates"]
    assert (
        apart(run, alone) < TIMES * own
    )  # on some processors both steps are those of one process to the bit


@pytest.mark.slow
def test_replica_groups(tmp_path):
    """The common weights are fp32, the replica groups' own bf16: a resumed run validates and goes on with the same
    bits."""
    recipe = tiny(tmp_path, "dp=1", "precision.mode=bf16_pure", *RESUMED, mode="bf16_pure")
    recipe = change(recipe, ["sync.method=diloco", "sync.every=2", "train.val_every=1"], "dp=2")
    whole_run = trained(recipe, "dp=2", tmp_path / "whole", 4)
    trained(recipe, "dp=2", tmp_path / "parts", 2)
    found = trained(recipe, "dp=2", tmp_path / "parts", 4, resume=True)
    assert_same_tensors(found.model, whole_run.model)
    assert_same_tensors(found.optimizer, whole_run.optimizer)
    assert {t.dtype for t in found.model.values()} == {torch.float32}
    assert lines(tmp_path / "whole", "val_loss") == lines(tmp_path / "parts", "val_loss")
    with pytest.raises(UserError, match='Nearest valid: rounding = "stochastic"'):
        change(recipe, ["precision.rounding=kahan"], "dp=2")


def test_a_run_of_another_rounding_goes_on(tmp_path):
    """A checkpoint without compensation: it starts from zero."""
    recipe = tiny(tmp_path, "dp=1", "precision.mode=bf16_pure", *RESUMED, mode="bf16_pure")
    trained(recipe, "dp=1", tmp_path / "run", 1)
    kahan = change(recipe, ["precision.rounding=kahan"])
    assert any(
        n.startswith("compensation.") for n in trained(kahan, "dp=1", tmp_path / "run", 2, True).optimizer
    )


@pytest.mark.parametrize(
    ("sets", "layout", "says"),
    [
        (["precision.mode=fp16", "layout.compress=int8"], "dp=2", 'mode = "bf16"'),
        (["precision.mode=bf16_pure", "layout.compress=int8"], "dp=2", 'mode = "bf16"'),
        (["precision.mode=fp16", "sync.method=server"], "dp=2", 'mode = "bf16"'),
        (["precision.mode=nanotron", "layout.compress=int8"], "dp=2", 'mode = "bf16"'),
        (["precision.mode=nanotron", "sync.method=server"], "dp=2", 'mode = "bf16"'),
        (
            ["precision.mode=nanotron", "layout.offload=states:host"],
            "dp=1",
            'offload = "none", or mode = "fp8"',
        ),
        (["precision.mode=nanotron", "model.arch=moe"], "dp=1", 'arch = "llama", or mode = "fp8"'),
        (["precision.mode=nanotron", "optim.name=muon"], "dp=1", 'optim.name = "adamw"'),
        (["precision.mode=nanotron", "precision.fp8_scaling=row"], "dp=1", "leave fp8_scaling out"),
        (["precision.mode=bf16_pure", "sync.method=server"], "dp=2", 'mode = "bf16"'),
        (["precision.mode=fp16", "precision.loss_scale=1000"], "dp=1", "Nearest valid: 1024"),
        (["precision.mode=bf16", "precision.rounding=kahan"], "dp=1", "leave rounding out"),
        (["precision.mode=fp32", "precision.loss_scale=8"], "dp=1", "leave loss_scale out"),
    ],
)
def test_what_makes_no_sense_is_refused(sets, layout, says):
    with pytest.raises(UserError, match=says):
        load("quickstart", sets, layout)


def test_tf32_needs_a_gpu(tmp_path):
    recipe = tiny(tmp_path, "dp=1", "precision.mode=tf32", mode="tf32")
    recipe = resolve(recipe, vocab_size=256)
    with pytest.raises(UserError, match=r'Nearest valid: precision\.mode = "fp32"'):
        build_state(recipe, ranks_of(0, 1))


def test_bytes_of_recipes_in_8_bits() -> None:
    """The table of docs/precision.md: each row is the sum of its dtypes, and our modes are what the planner counts."""
    page = (Path(__file__).parents[1] / "docs" / "precision.md").read_text(encoding="utf-8")
    table = page.split("## Bytes of recipes in 8 bits")[1].split("|---|---|---|---|---|---|---|---|---|\n")[1]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.split("\n\n")[0].splitlines()]
    assert len(rows) == 9
    modes = 0
    for name, matmuls, *kept, total, _ in rows:
        names = [dtype for cell in kept for dtype in cell.split(" + ") if dtype != "-"]
        assert sum(DTYPES[dtype].bytes for dtype in names) == float(total), name
        if (mode := PRECISIONS.get(name.strip("`"))) is not None:
            modes += 1
            states, card = own_states(mode.name), kept_in(OPTIMIZERS["adamw"], mode, "nearest")
            kept = states.working + states.rounded + states.master + states.gradient
            assert kept + card.bytes == float(total), name
            assert matmuls == mode.rate
    assert modes == 4
