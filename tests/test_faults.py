"""Numbers that go wrong: what is not finite or a spike never changes the weights, a run goes back over it in every
layout, and a bit that flips on one rank is found and named."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import stored
import torch
from marks import slow
from pool_runs import after_each_step, lines, train_rank
from ranks import run_ranks
from torch import Tensor

from fivefold.checkpoint import store
from fivefold.errors import UserError
from fivefold.kernels.hashing import digest
from fivefold.observe import faults as observed
from fivefold.observe.report import page
from fivefold.recipe import FaultsSection, Recipe, change, leave_out, load, place
from fivefold.sharding.layout import Layout
from fivefold.step.state import State
from fivefold.step.step import destroyed, judge
from fivefold.train.start import run_command

TINY = [
    "model.layers=2", "model.dim=32", "model.heads=4", "model.kv_heads=2", "model.ffn_dim=48", "model.seq_len=16",
    "data.tokenizer=bytes", "data.val_fraction=0.1", "train.global_batch_size=8", "train.microbatch_size=2",
    "train.steps=6", "train.val_sequences=8", "train.val_every=100", "train.sample_tokens=8",
    "optim.lr=1e-2", "optim.warmup_steps=0", "optim.schedule=constant", "observe.tracker=none",
    "precision.mode=fp32", "layout.dp_replicate=1", "checkpoint.every=2", "checkpoint.keep_last=3",
]  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    folder = tmp_path_factory.mktemp("data")
    text = folder / "text.txt"
    text.write_text("".join(f"{i} and {i * i % 89} make {i + i * i % 89}; " for i in range(900)))
    return load("quickstart", [*TINY, f"data.source={text}", f"data.cache={folder / 'cache'}"])


def run_on(recipe: Recipe, out: Path, work: Callable[..., Any] = train_rank, *arguments: Any) -> list[Any]:
    ranks = Layout.from_recipe(recipe.layout).ranks
    if ranks == 1:
        return [work(0, 1, recipe, out, *arguments)]
    return run_ranks(ranks, work, recipe, out, *arguments, timeout_s=60)


def poisoned_rank(
    rank: int, world: int, recipe: Recipe, out: Path, at: list[int], resume: bool = False
) -> tuple[Any, str]:
    """A run in which one gradient of the first rank is not finite, once in each of these steps. Returns the error."""
    left = list(at)

    def poison(state: State, when: str) -> None:
        if when == "gradient" and left and state.step + 1 == left[0]:
            left.pop(0)
            if rank == 0:  # it owns what several ranks keep: its norm counts
                next(iter(state.gradients().values())).fill_(math.nan)

    with after_each_step(poison):
        try:
            return train_rank(rank, world, recipe, out, resume), ""
        except UserError as error:
            return None, str(error)


def test_judging_a_step() -> None:
    """Only what is far above the usual, and what the recipe says, masks the update."""
    usual, ruined = torch.zeros(2, 3, dtype=torch.float64), torch.zeros(())
    generator = torch.Generator().manual_seed(0)

    def of(loss: float, norm: float, on_spike: str = "skip") -> tuple[float, float, list[str]]:
        section = FaultsSection(on_spike=on_spike)  # pyright: ignore[reportArgumentType]
        found = judge(usual, *(torch.tensor(x, dtype=torch.float64) for x in (loss, norm)), section, ruined)
        wrong = observed.found_in({k: float(v) for k, v in found.figures.items()})
        return float(found.bad), float(found.skip), wrong

    for _ in range(60):
        loss, norm = (2 + 0.1 * torch.rand((), generator=generator) for _ in range(2))
        usual = judge(usual, loss.double(), norm.double(), FaultsSection(), ruined).usual
    assert of(2.0, 2.0) == (0, 0, [])
    assert of(2.3, 2.0) == (0, 0, []), "less than a fifth above the mean"
    assert of(5.8, 2.0) == (0, 1, ["spike"])
    assert of(2.0, 73.9) == (0, 1, ["outlier"])
    assert of(5.8, 73.9, "tell") == (0, 0, ["spike", "outlier"])
    assert of(math.nan, 2.0, "tell")[:2] == (1, 1)
    assert of(2.0, math.inf, "tell")[:2] == (1, 1)
    ruined = torch.ones(())
    assert of(2.0, 2.0, "tell") == (0, 1, ["destroyed"])


def test_when_an_update_has_destroyed_weights() -> None:
    """Not finite, beyond what a checkpoint takes, or grown 10,000-fold: of 1 if the weights were smaller."""

    def of(largest: float, limit: torch.Tensor | None = None) -> bool:
        return bool(destroyed(torch.tensor(largest), limit)[0])

    assert [of(x) for x in (0.0, 1e29, 1e31, math.inf, math.nan)] == [False, False, True, True, True]
    small, large = (destroyed(torch.tensor(x), None)[1] for x in (0.02, 30.0))
    assert [of(x, small) for x in (9e3, 2e4, math.nan)] == [False, True, True]
    assert [of(x, large) for x in (2e5, 4e5, math.inf)] == [False, True, True]


def test_data_that_are_left_out(base: Recipe) -> None:
    """Steps 5 and 6 are left out, later 3 to 8, with a batch that grows: no sequence comes twice."""
    train = change(base, ["train.batch_ramp=2:2+4:2"]).train
    once = leave_out(train, [], back_to=4, last=6)
    assert [place(train, i, once) for i in range(8)] == [0, 2, 4, 8, 28, 36, 44, 52]
    again = leave_out(train, once, back_to=2, last=8)
    assert [place(train, i, again) for i in range(6)] == [0, 2, 60, 64, 68, 76]
    assert place(train, 7, once) + 8 == place(train, 2, again), "where step 8 ended"


@pytest.mark.parametrize(
    "layout",
    [
        "dp=2,zero=3",
        *slow(
            "dp=1",
            "dp=2",
            "tp=2",
            "pp=2",
            "cp=2",
            "dp=2,zero=1",
            "dp_replicate=2,dp_shard=2,zero=2",
            "dp=2,tp=2",
        ),
    ],
)
def test_a_run_goes_back_over_a_step(base: Recipe, tmp_path: Path, layout: str) -> None:
    """Over step 5 to step 4, also when it is resumed: the same bits as a run that never saw these data. A checkpoint of
    step 4 that is damaged is said, and the one before taken."""
    recipe = change(base, ["faults.on_nonfinite=rollback", "train.steps=8"], layout)
    assert all(answer == (None, "") for answer in run_on(recipe, tmp_path / "one", poisoned_rank, [5]))
    past = json.loads((tmp_path / "one" / "rollbacks.json").read_text())
    assert past == {"rollbacks": [[5, 4]], "left_out": [[4, 8]]}
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "rollbacks.json").write_text(json.dumps(past))
    run_on(change(recipe, ["faults.on_nonfinite=skip"]), tmp_path / "other")
    assert lines(tmp_path / "one", "loss") == lines(tmp_path / "other", "loss")
    assert lines(tmp_path / "one", "val_loss") == lines(tmp_path / "other", "val_loss")
    (back,) = lines(tmp_path / "one", "rollback")
    assert back["from"] == 5
    assert "not finite" in back["why"]
    assert "The run went back" in page(tmp_path / "one")
    steps = [int(p.name.removeprefix("step-")) for p in store.checkpoints(tmp_path / "one")]
    assert steps == [4, 6, 8]
    assert stored.load(store.latest(tmp_path / "one")).meta["left_out"] == [4, 8]


def test_going_back_again_and_after_a_resume(base: Recipe, tmp_path: Path) -> None:
    """A second fault right after goes back further, over a checkpoint that may be bad itself, and sets it aside. A
    resume takes the same data as the run."""
    recipe = change(base, ["faults.on_nonfinite=rollback", "train.steps=8"])
    ((_, said),) = run_on(change(recipe, ["faults.rollbacks=1"]), tmp_path / "few", poisoned_rank, [5, 6])
    assert "has gone back 1 times, and faults.rollbacks = 1 allows no more" in said
    run_on(recipe, tmp_path / "run", poisoned_rank, [5, 5])
    past = json.loads((tmp_path / "run" / "rollbacks.json").read_text())
    assert past == {"rollbacks": [[5, 4], [5, 2]], "left_out": [[2, 32]]}
    assert (tmp_path / "run" / "checkpoints" / "later-step-00000004").is_dir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "rollbacks.json").write_text(json.dumps(past))
    run_on(change(recipe, ["train.steps=5"]), tmp_path / "other")
    run_on(recipe, tmp_path / "other", train_rank, True)
    assert lines(tmp_path / "run", "loss") == lines(tmp_path / "other", "loss")
    (tmp_path / "other" / "rollbacks.json").write_text('{"rollbacks": [[1]]}')
    with pytest.raises(UserError, match=r"rollbacks\.json is damaged"):
        train_rank(0, 1, change(recipe, ["train.steps=9"]), tmp_path / "other", True)


def test_a_damaged_checkpoint_is_not_gone_back_to(base: Recipe, tmp_path: Path) -> None:
    recipe = change(base, ["faults.on_nonfinite=rollback", "checkpoint.asynchronous=false"])

    def harm(state: State, when: str) -> None:
        folder = store.folder_of(tmp_path / "run", 4)
        if when == "gradient" and state.step == 4 and folder.exists() and not harmed:
            file = next(folder.glob("*.safetensors"))
            file.write_bytes(file.read_bytes()[:-1] + b"\xff")
            next(iter(state.gradients().values())).fill_(math.nan)
            harmed.append(folder)

    harmed: list[Path] = []
    with after_each_step(harm):
        train_rank(0, 1, recipe, tmp_path / "run")
    past = json.loads((tmp_path / "run" / "rollbacks.json").read_text())
    assert past == {"rollbacks": [[5, 2]], "left_out": [[2, 24]]}


@pytest.mark.parametrize("layout", [*slow("dp=1"), "dp=2,zero=1"])
def test_weights_that_an_update_destroys_are_never_saved(base: Recipe, tmp_path: Path, layout: str) -> None:
    """A learning rate of 1e300: the run says so at once, the checkpoint from before stays, and the advice works."""
    recipe = change(base, ["train.steps=2"], layout)
    run_on(recipe, tmp_path)
    wild = change(recipe, ["train.steps=6", "optim.lr=1e300"])
    for _, said in run_on(wild, tmp_path, poisoned_rank, [], True):
        assert said.startswith("step 4: the update of step 3 has destroyed weights: they are not finite")
        assert "They are not saved. Resume from step 2 with a smaller optim.lr" in said
    assert [folder.name for folder in store.checkpoints(tmp_path)] == ["step-00000002"]
    run_on(change(recipe, ["train.steps=6"]), tmp_path, train_rank, True)
    assert all(loss is not None for loss in lines(tmp_path, "loss"))
    assert len(lines(tmp_path, "loss")) == 6
    for _, said in run_on(wild, tmp_path / "at once", poisoned_rank, []):
        assert "They are not saved. Start again with a smaller optim.lr" in said


def destroyed_rank(rank: int, world: int, recipe: Recipe, out: Path, value: float) -> str:
    """The update of step 3 leaves this value in a weight of the last rank that no batch uses. Returns the error."""
    left = [3]

    def destroy(state: State, when: str) -> None:
        if when == "gradient" and state.step + 1 in left and rank == world - 1:
            left.clear()
            next(w for name, w in state.masters().items() if name.startswith("embed"))[-1, 0] = value

    with after_each_step(destroy):
        try:
            train_rank(rank, world, recipe, out)
        except UserError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("value", [1e8, pytest.param(math.nan, marks=pytest.mark.slow)])
@pytest.mark.parametrize("layout", ["dp=2,zero=1", *slow("dp=1", "tp=2")])
def test_an_update_that_destroys_weights_is_never_saved(
    base: Recipe, tmp_path: Path, layout: str, value: float
) -> None:
    """A save is due right after it."""
    recipe = change(base, ["train.steps=5", "checkpoint.every=1"], layout)
    for said in run_on(recipe, tmp_path / "one", destroyed_rank, value):
        assert said.startswith(
            "after step 3 weights or optimizer states are not finite, beyond 1e+30, or grew"
        )
    assert [folder.name for folder in store.checkpoints(tmp_path / "one")] == [
        "step-00000001",
        "step-00000002",
    ]


@pytest.mark.parametrize("value", [1e8, *slow(math.inf, math.nan)])
@pytest.mark.parametrize("layout", ["tp=2", *slow("dp=1", "dp=2,zero=1")])
def test_an_update_that_destroys_weights_is_found_in_the_next_step(
    base: Recipe, tmp_path: Path, layout: str, value: float
) -> None:
    recipe = change(base, ["train.steps=5"], layout)
    for said in run_on(recipe, tmp_path / "one", destroyed_rank, value):
        assert said.startswith(
            "step 4: the update of step 3 has destroyed weights: they are not finite, or grew"
        )
    assert [folder.name for folder in store.checkpoints(tmp_path / "one")] == ["step-00000002"]
    assert lines(tmp_path / "one", "destroyed") == [1]
    assert "has destroyed weights" in page(tmp_path / "one")
    if value == 1e8:
        back = change(recipe, ["faults.on_nonfinite=rollback"])
        assert not any(run_on(back, tmp_path / "two", destroyed_rank, value))
        past = json.loads((tmp_path / "two" / "rollbacks.json").read_text())
        assert past == {"rollbacks": [[4, 2]], "left_out": [[2, 16]]}
        assert len(lines(tmp_path / "two", "loss")) == 5


@pytest.mark.parametrize(
    "sets",
    [
        ["optim.name=muon"],
        ["precision.mode=bf16_pure"],
        *slow((["optim.name=sgd"],), (["precision.mode=bf16"],), (["layout.offload=states:disk"],)),
    ],
    ids=" ".join,
)
def test_every_optimizer_tells_the_largest_weight(base: Recipe, tmp_path: Path, sets: list[str]) -> None:
    if "layout.offload=states:disk" in sets:
        sets = [*sets, f"layout.offload_dir={tmp_path}"]
    ((said),) = run_on(change(base, sets), tmp_path / "run", destroyed_rank, 1e8)
    assert said.startswith("step 4: the update of step 3 has destroyed weights")


def test_a_run_that_diverged_has_all_its_tries_again(base: Recipe, tmp_path: Path) -> None:
    recipe = change(base, ["train.steps=9"])
    ((_, said),) = run_on(recipe, tmp_path, poisoned_rank, [2, 3, 4, 5, 6])
    assert "not finite in 5 steps in a row, up to step 6" in said
    found = stored.load(store.latest(tmp_path))
    assert (found.meta["step"], found.meta["updates"]) == (6, 1)
    ((_, said),) = run_on(recipe, tmp_path, poisoned_rank, [7, 8], True)
    assert said == ""
    assert stored.load(store.latest(tmp_path)).meta["updates"] == 2


def test_a_run_can_end_at_the_first_fault(base: Recipe, tmp_path: Path) -> None:
    recipe = change(base, ["faults.on_nonfinite=abort"])
    ((_, said),) = run_on(recipe, tmp_path, poisoned_rank, [3])
    assert said == "step 3: loss or gradient is not finite; the update is skipped"
    found = stored.load(store.latest(tmp_path))
    assert (found.meta["step"], found.meta["updates"]) == (3, 2)


def test_a_save_that_fails_does_not_hide_the_fault(base: Recipe, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("not a folder")
    recipe = change(base, ["faults.on_nonfinite=abort", "checkpoint.every=0"])
    ((_, said),) = run_on(recipe, tmp_path, poisoned_rank, [3])
    assert said.startswith(
        "step 3: loss or gradient is not finite; the update is skipped. The run ends here, and "
    )
    assert "cannot write the checkpoint" in said


def spoiled_rank(rank: int, world: int, recipe: Recipe, out: Path) -> str:
    """One gradient of the last rank, which it does not own, is not finite in step 2."""

    def spoil(state: State, when: str) -> None:
        if when == "gradient" and state.step == 1 and rank == world - 1:
            (replica,) = state.parallel.replicas
            name = next(name for name, part in replica.parts.items() if not part.owned)
            replica.gradients[name].fill_(math.inf)

    with after_each_step(spoil), pytest.raises(UserError) as caught:
        train_rank(rank, world, recipe, out)
    return str(caught.value)


def test_a_gradient_that_another_rank_owns_is_judged_in_the_same_step(base: Recipe, tmp_path: Path) -> None:
    recipe = change(base, ["faults.on_nonfinite=abort"], "tp=2")
    for said in run_on(recipe, tmp_path, spoiled_rank):
        assert said == "step 2: loss or gradient is not finite; the update is skipped"


class Spiking(torch.nn.Module):
    """Its loss is 50 times the usual one in call 30."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.calls = torch.nn.Parameter(torch.ones(3)), 0

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        return (self.weight.square().sum() + 1) * (50.0 if self.calls == 30 else 1 + 0.01 * (self.calls % 3))


@pytest.mark.parametrize("policy", ["tell", "skip", "abort"])
def test_spikes_are_said_and_counted(
    base: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str], policy: str
) -> None:
    sets = ["train.steps=32", "train.microbatch_size=8", "checkpoint.every=0", "optim.lr=1e-4"]
    recipe = change(base, [*sets, f"faults.on_spike={policy}", "observe.log_every=100"])
    if policy == "abort":
        with pytest.raises(UserError, match="step 30: the loss is "):
            run_command(recipe, out=tmp_path / "run", module=Spiking())
        return
    out = run_command(recipe, out=tmp_path / "run", module=Spiking())
    said = capsys.readouterr().out
    used = "used all the same" if policy == "tell" else "skipped"
    assert "step 30: the loss is 199.1, and about 4" in said
    assert f"is usual; the update is {used}" in said
    assert "unusual steps   1 spike of the loss, 1 outlier of the gradient's norm" in said
    assert stored.load(store.latest(out)).meta["updates"] == 32 - (policy == "skip")
    assert "Unusual steps" in page(out)
    assert [line["step"] for line in map(json.loads, (out / "metrics.jsonl").open()) if "spike" in line] == [
        30
    ]


def test_a_digest_sees_every_bit() -> None:
    """Also in the last, incomplete row, and a change of places; it does not depend on memory."""
    x = torch.randn(3, 5000, generator=torch.Generator().manual_seed(0))
    seen = {int(digest(x))}
    for element in (0, 4095, 4096, 14999):
        for bit in (0, 13, 31):
            other = x.clone()
            other.view(-1).view(torch.int32)[element] ^= 1 << bit if bit < 31 else -(1 << 31)
            seen.add(int(digest(other)))
    for one, two in ((0, 1), (0, 4096), (3, 12000)):
        other = x.clone().view(-1)
        other[[one, two]] = other[[two, one]]
        seen.add(int(digest(other)))
    assert len(seen) == 16
    assert digest(x.t().contiguous().t()) == digest(x)
    assert digest(torch.cat([x.view(-1)[:1], x.view(-1)])[1:]) == digest(x.view(-1))
    assert digest(x.bfloat16()) != digest(x.half())
    assert digest(torch.zeros(5)) != digest(torch.zeros(6))


def flipped_rank(
    rank: int, world: int, recipe: Recipe, out: Path, bad: int, at: int, word: str
) -> tuple[Any, str]:
    """A run in which a bit of a weight flips on one rank after a step, once."""
    left = [at]

    def flip(state: State, when: str) -> None:
        if when == "end" and left and state.step == left[0]:
            left.clear()
            if rank == bad:
                weight = next(w for n, w in state.masters().items() if word in n and w.numel())
                weight.view(-1).view(torch.int32)[3] ^= 1 << 5
                for replica in state.parallel.replicas:
                    replica.refresh()

    with after_each_step(flip):
        try:
            return train_rank(rank, world, recipe, out), ""
        except UserError as error:
            return None, str(error)


@pytest.mark.parametrize(
    ("layout", "bad", "word", "who"),
    [
        ("dp=2,tp=2", 2, "blocks.1.norm", "rank 2 has other bits than 3 other ranks"),
        ("dp_replicate=2,dp_shard=2,zero=3", 3, "embed", "1 and rank 3 have different bits"),
        *slow(
            ("dp=2", 1, "blocks.1.mlp.down", "0 and rank 1 have different bits"),
            ("dp=4", 3, "norm", "rank 3 has other bits than 3"),
        ),
    ],
)
def test_a_flipped_bit_is_named(
    base: Recipe, tmp_path: Path, layout: str, bad: int, word: str, who: str
) -> None:
    """Three steps after it happened, in the tensor in which it happened."""
    recipe = change(base, ["faults.hash_every=2"], layout)
    for _, said in run_on(recipe, tmp_path / "run", flipped_rank, bad, 3, word):
        assert f"after step 4 ranks differ in {word}" in said
        assert who in said
        assert "other tensors" not in said
    assert store.latest(tmp_path / "run").name == "step-00000002", "nothing is saved after it"


def test_a_run_goes_back_over_a_flipped_bit(base: Recipe, tmp_path: Path) -> None:
    """To the last step in which ranks were alike, with the same data: as if nothing had happened."""
    recipe = change(base, ["faults.hash_every=2", "faults.on_corruption=rollback"], "dp=2")
    run_on(recipe, tmp_path / "one")
    assert [said for _, said in run_on(recipe, tmp_path / "other", flipped_rank, 0, 3, "embed")] == ["", ""]
    assert lines(tmp_path / "one", "loss") == lines(tmp_path / "other", "loss")
    past = json.loads((tmp_path / "other" / "rollbacks.json").read_text())
    assert past == {"rollbacks": [[4, 2]], "left_out": []}


@pytest.mark.parametrize(
    ("layout", "sets"),
    [
        ("dp=2,zero=3", ["observe.noise_scale=true"]),
        *slow(
            (
                "dp_replicate=2,dp_shard=2,zero=1",
                ["model.arch=moe", "model.experts=4", "model.experts_per_token=2"],
            ),
            ("dp=2,cp=2", []),
            ("dp=2,tp=2,sp=true,zero=2", []),
            ("dp=2", ["precision.mode=bf16", "layout.recompute=full"]),
            ("dp=2", ["precision.mode=bf16", "layout.compress=powersgd:2"]),
            ("dp=2", ["precision.mode=bf16_pure"]),
            ("dp=4", ["sync.method=diloco", "sync.replica_groups=2", "sync.every=3"]),
            ("dp=2", ["optim.name=muon"]),
        ),
    ],
)
def test_checks_change_nothing_and_find_nothing(
    base: Recipe, tmp_path: Path, layout: str, sets: list[str]
) -> None:
    """A run that compares after every step is the same run."""
    recipe = change(base, ["train.steps=4", "train.microbatch_size=1", "model.dropout=0.1", *sets], layout)
    run_on(recipe, tmp_path / "plain")
    run_on(change(recipe, ["faults.hash_every=1"]), tmp_path / "checked")
    for key in ("loss", "grad_norm", "noise_scale", "expert_load_max"):
        assert lines(tmp_path / "plain", key) == lines(tmp_path / "checked", key), key


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", ["pp=2,dp=2", "pp=2,schedule=zbv", "tp=4", "dp=2,cp=2,zero=1", "dp=4,ep=2", "dp=4,ep=2,zero=2"]
)
def test_hashes_in_other_layouts(base: Recipe, tmp_path: Path, layout: str) -> None:
    moe = ["model.arch=moe", "model.experts=4", "model.experts_per_token=2"] if "ep" in layout else []
    sets = ["train.steps=3", "faults.hash_every=1", "model.kv_heads=4", "train.microbatch_size=1", *moe]
    if "pp" in layout:
        sets.append("model.layers=4")
    run_on(change(base, sets, layout), tmp_path)
    assert len(lines(tmp_path, "loss")) == 3


def test_what_cannot_be_checked_is_refused(base: Recipe) -> None:
    for sets, layout, said in (
        (
            ["faults.hash_every=1", "sync.method=server"],
            "dp=2",
            "faults.hash_every = 1 is not supported with sync",
        ),
        (
            ["faults.on_nonfinite=rollback", "sync.method=server"],
            "dp=2",
            'faults.on_nonfinite = "rollback" is not',
        ),
    ):
        with pytest.raises(UserError) as error:
            change(base, sets, layout)
        assert said in str(error.value)


def test_modules_of_ones_own(base: Recipe) -> None:
    """`lr_embeddings` is for embeddings and the output layer, not for all matrices."""
    from fivefold.step.state import embeddings_of, rate_of

    module = torch.nn.Sequential(torch.nn.Embedding(7, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 7))
    names = embeddings_of(module, 7)
    optim = change(base, ["optim.lr=0.01", "optim.lr_embeddings=0.02", "optim.lr_vectors=0.03"]).optim
    rates = {n: rate_of(optim, n, tuple(p.shape), names) for n, p in module.named_parameters()}
    assert rates == pytest.approx({"0.weight": 2, "1.weight": 1, "1.bias": 3, "2.weight": 2, "2.bias": 3})


@pytest.mark.parametrize("name", ["soap", *slow("sophia")])
def test_a_resume_where_all_steps_were_skipped(base: Recipe, tmp_path: Path, name: str) -> None:
    """What happens every so many steps counts from the run's first one, not from the resume."""
    every = "basis_every" if name == "soap" else "estimate_every"
    sets = [f"optim.name={name}", f"optim.{every}=3", "train.steps=6", "optim.lr=1e-3"]
    recipe = change(base, [*sets, *(["optim.eps=none"] if name == "sophia" else [])])
    run_on(recipe, tmp_path / "whole", poisoned_rank, [1, 2])
    run_on(change(recipe, ["train.steps=2"]), tmp_path / "parts", poisoned_rank, [1, 2])
    run_on(recipe, tmp_path / "parts", train_rank, True)
    assert lines(tmp_path / "whole", "loss") == lines(tmp_path / "parts", "loss")


def test_the_smallest_learning_rate_is_drawn(base: Recipe, tmp_path: Path) -> None:
    train_rank(0, 1, change(base, ["optim.lr=5e-324", "train.steps=2"]), tmp_path)
    assert "Learning rate" in page(tmp_path)
