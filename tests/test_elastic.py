"""Ranks that leave and join: unequal shares of a batch, the layout for fewer ranks, and a run on 4, then 3, then 4."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from collections import Counter
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stored
import torch
import torch.distributed as dist
from launched import Launched, last_step
from layouts import compared, tiny
from marks import only
from pool_runs import assert_close_tensors, assert_same_tensors, lines, ranks_of, train_rank
from ranks import run_ranks

from fivefold.checkpoint import store
from fivefold.cli.train import between
from fivefold.errors import UserError
from fivefold.launch import ranks as ranks_
from fivefold.launch.local import Attempt, Outcome, launch
from fivefold.launch.ranks import Ranks
from fivefold.launch.verdict import Interrupt
from fivefold.recipe import Recipe, change, load, microbatches_per_step, resolve
from fivefold.recipe.resolve import nearest_layout
from fivefold.recipe.rules.combinations import notes
from fivefold.sharding import layout
from fivefold.sharding.layout import Layout, largest, to_text
from fivefold.train import restart, share
from fivefold.train.job import Job
from fivefold.train.restart import Elastic, Restarts, Slots
from fivefold.train.run import run_rank
from fivefold.train.start import run_command
from fivefold_plan.cluster.clusters import parse
from fivefold_plan.predict import predict

MOE = ["model.arch=moe", "model.experts=6", "model.experts_per_token=2"]


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where text, cache and the references stay."""
    return tmp_path_factory.mktemp("elastic")


def test_shares_are_whole_and_as_equal_as_can_be() -> None:
    for microbatches in range(1, 30):
        for ranks in range(1, microbatches + 1):
            each = [layout.share(microbatches, index, ranks) for index in range(ranks)]
            assert [number for one in each for number in one] == list(range(microbatches))
            sizes = {len(one) for one in each}
            assert max(sizes) == largest(microbatches, ranks)
            assert min(sizes) >= max(sizes) - 1
            assert min(sizes) > 0


UNEQUAL = [
    ("dp=3", []), ("dp=3,zero=1", []), ("dp=3,zero=2", []), ("dp=3,zero=3", []), ("dp=3,ep=3", MOE),
    ("dp=3,ep=3,zero=3", MOE), ("dp=3,ep=3,recompute=full", MOE), ("dp=3,tp=2,sp=true,zero=1", []),
    ("dp=3,cp=2,zero=3", []), ("dp=3,cp=2,ep=2,zero=2", MOE), ("pp=2,dp=3", []),
    ("pp=2,dp=3,zero=3,schedule=zbv,virtual_stages=2", []), ("pp=2,dp=3,ep=3,schedule=dualpipev,virtual_stages=2", MOE),
    ("dp_replicate=3,dp_shard=2,zero=3", []), ("dp_replicate=3,dp_shard=2,zero=1", []),
    ("dp=3", ["train.microbatch_size=2"]), ("dp=3,zero=3", ["train.microbatch_size=2"]),
    ("dp=3,ep=3", [*MOE, "train.microbatch_size=2", "model.balance=bias"]),
    ("dp=3,ep=3", [*MOE, "train.microbatch_size=2", "model.capacity_factor=1.0"]), ("dp=5", []),
    ("dp=3,zero=2", ["model.arch=bert"]), ("dp=3,zero=3", ["train.batch_ramp=4:1"]),
]  # fmt: skip
QUICK = {3, 10, 17}


@only("dp=3,zero=3*")
@pytest.mark.parametrize(
    ("layout", "overrides"),
    [case if i in QUICK else pytest.param(*case, marks=pytest.mark.slow) for i, case in enumerate(UNEQUAL)],
)
def test_unequal_shares_compute_what_one_process_computes(
    room: Path, layout: str, overrides: list[str]
) -> None:
    """Eight sequences for three ranks: every loss, the whole gradient, its norm, the weights (the core of `fivefold
    verify`, fp32, 3 steps)."""
    recipe = tiny(room, layout, *overrides)
    dp = Layout.from_recipe(recipe.layout).dp
    assert recipe.train.global_batch_size // (recipe.train.microbatch_size or 1) % dp, "unequal"
    found = compared(recipe, folder=room / "-".join(("moe" if "ep=" in layout else "dense", *overrides)))
    assert found.passed, found


def text_of(recipe: Recipe) -> str:
    return to_text(Layout.from_recipe(recipe.layout))


@pytest.mark.parametrize(
    ("layout", "ranks", "nearest", "says"),
    [
        ("dp=4", 3, "dp=3", "3 ranks instead of 4: layout dp=3 for dp=4"),
        ("dp=4,zero=3", 3, "dp=3,zero=3", "layout dp=3,zero=3"),
        ("dp=2,zero=3", 1, "dp=1", "1 rank instead of 2"),
        ("dp_replicate=2,dp_shard=2,zero=2", 3, "dp=3,zero=2", ""),
        ("dp_replicate=3,dp_shard=2,zero=2", 5, "dp=5,zero=2", ""),
        ("dp_replicate=3,dp_shard=2,zero=2", 4, "dp_replicate=2,dp_shard=2,zero=2", ""),
        ("dp=2,tp=2", 3, "tp=2", "1 rank left over"),
        ("dp=2,tp=2,sp=true,zero=1", 3, "tp=2,sp=true", "1 rank left over"),
        ("tp=4,sp=true", 3, "tp=2,sp=true", "1 rank left over"),
        ("tp=2", 1, "dp=1", ""),
        ("tp=2,sp=true", 1, "dp=1", ""),
        ("pp=4,schedule=interleaved,virtual_stages=2", 3, "pp=3,schedule=interleaved,virtual_stages=2", ""),
        ("pp=2,tp=2", 3, "tp=2", "1 rank left over"),
        ("cp=4", 3, "cp=2", "1 rank left over"),
        ("dp=4,all_reduce=torus_2d", 3, "dp=3", ""),
        ("dp=3", 4, "dp=4", "4 ranks instead of 3"),
        ("dp=2,tp=2", 7, "dp=3,tp=2", "1 rank left over"),
        ("dp=4", 64, "dp=16", "48 ranks left over"),
        ("dp=4", 4, "dp=4", ""),
    ],
)
def test_the_nearest_layout_keeps_what_divides_the_model(
    layout: str, ranks: int, nearest: str, says: str
) -> None:
    sets = ["model.layers=8", "model.heads=4", "model.kv_heads=4", "train.global_batch_size=16"]
    recipe = load("quickstart", sets, layout)
    found = nearest_layout(recipe, ranks)
    assert text_of(found.recipe) == nearest
    assert found.ranks == Layout.from_recipe(found.recipe.layout).ranks <= ranks
    assert says in found.line
    assert bool(found.line) == (layout != nearest)
    again = nearest_layout(change(found.recipe), ranks)  # it is a valid recipe, and nearest to itself
    assert text_of(again.recipe) == nearest


def test_chunks_divide_the_tokens_of_fewer_ranks() -> None:
    """12 tokens of a sequence on a rank become 16."""
    recipe = load("quickstart", ["model.seq_len=96"], "cp=4,tp=2,sp=true,tp_chunks=12")
    assert text_of(nearest_layout(recipe, 6).recipe) == "cp=3,tp=2,sp=true,tp_chunks=4"


def test_experts_keep_their_division_and_their_microbatches() -> None:
    """A microbatch's balance loss is part of what is trained; a dense model takes microbatches that delay nobody."""
    sets = ["model.experts=8", "train.global_batch_size=16", "train.microbatch_size=4"]
    recipe = load("moe-tiny", sets, "dp=4,ep=2")
    found = nearest_layout(recipe, 3)
    assert text_of(found.recipe) == "dp=2,ep=2"
    assert "1 rank left over" in found.line
    folded = load("moe-tiny", sets, "dp=2,tp=2,sp=true,ep=4,ep_fold=true")
    assert text_of(nearest_layout(folded, 2).recipe) == "tp=2,ep=2,sp=true,ep_fold=true"
    assert text_of(nearest_layout(folded, 1).recipe) == "dp=1"
    assert nearest_layout(load("moe-tiny", sets, "dp=4"), 3).recipe.train.microbatch_size == 4
    other = nearest_layout(load("moe-tiny", sets, "dp=4"), 8)
    assert (other.recipe.train.microbatch_size, other.ranks) == (2, 8)
    assert "which changes the balance loss" in other.line
    dense = nearest_layout(load("quickstart", sets[1:], "dp=4"), 3)
    assert dense.recipe.train.microbatch_size == 2
    assert "microbatches of 2 for 4" in dense.line


def test_the_search_for_a_layout_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing fits, whatever the size of what was asked."""
    seen, fit = [], import_module("fivefold.recipe.resolve")  # the package has a function of this name
    monkeypatch.setattr(fit, "in_layout", lambda recipe, layout: seen.append(layout) or recipe)
    monkeypatch.setattr(fit, "contradictions", lambda recipe: ["wrong"])
    recipe = load("quickstart", ["train.global_batch_size=64"])
    asked = recipe.layout.model_copy(update={"pp": 16, "tp": 8, "cp": 8, "dp_replicate": 4})
    with pytest.raises(UserError, match="none of the 2,000 nearest layouts of 4095 or fewer ranks is valid"):
        nearest_layout(recipe.model_copy(update={"layout": asked}), 4095)
    assert len(seen) == fit.MOST_TRIED


def test_a_spare_rank_leaves_no_mark(room: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others save then, and they alone can say 75. After a 75 of a rank that waits, Slurm would kill them."""
    recipe = change(recipe_of(room, "dp=1"), ["train.global_batch_size=1"])
    monkeypatch.setattr(ranks_, "found", lambda: (1, 2, 1, 2))
    monkeypatch.setattr(ranks_, "wait_as_spare", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    assert run_command(recipe, out=tmp_path, resume_from="auto") == tmp_path


def test_replica_groups_are_not_elastic() -> None:
    recipe = load("quickstart", ["sync.method=diloco"], "dp=4")
    with pytest.raises(UserError, match="their number changes what is trained"):
        nearest_layout(recipe, 3)


def test_the_slowest_rank_is_priced() -> None:
    """16 sequences for 3 ranks: a step takes as long as 6 on each, and sees 16."""
    sets = [
        "train.global_batch_size=16",
        "train.microbatch_size=1",
        "model.vocab_size=512",
        "data.tokenizer=bytes",
    ]
    recipe = load("quickstart", [*sets, "precision.mode=bf16"], "dp=3")
    equal = change(recipe, ["train.global_batch_size=18"])
    plans = [predict(one, parse("h100:3")) for one in (recipe, equal)]
    assert plans[0].step.seconds == plans[1].step.seconds
    assert [plan.tokens // recipe.model.seq_len for plan in plans] == [16, 18]
    assert microbatches_per_step(resolve(recipe, vocab_size=512)) == 6
    assert any("each has 5 or 6, and 11% of their time is spent waiting" in note for note in notes(recipe))
    assert not any("waiting" in note for note in notes(equal))


TINY = [
    "model.layers=2", "model.dim=32", "model.heads=4", "model.kv_heads=2", "model.ffn_dim=48", "model.seq_len=16",
    "data.tokenizer=bytes", "data.val_fraction=0.1", "train.global_batch_size=8", "train.microbatch_size=1",
    "train.steps=6", "train.val_sequences=7", "train.val_every=6", "train.sample_tokens=4", "optim.lr=1e-2",
    "optim.warmup_steps=0", "optim.schedule=constant", "observe.tracker=none", "precision.mode=fp32",
    "optim.eps=1e-4",  # with a tiny one, an element without a gradient moves by rounding alone
]  # fmt: skip


def recipe_of(room: Path, layout: str) -> Recipe:
    data = tiny(room, "dp=1").data
    return load("quickstart", [*TINY, f"data.source={data.source}", f"data.cache={data.cache}"], layout)


def seen_by_rank(
    rank: int, world: int, recipe: Recipe, out: Path, resume: bool
) -> dict[int, list[tuple[int, str]]]:
    """A run's part on this rank. Returns what it trained on: the row and the hash of each sequence, by step."""
    seen: dict[int, list[tuple[int, str]]] = {}

    def recorded(batches: Any, i: int, rows: range, mesh: Any) -> Any:
        found = plain(batches, i, rows, mesh)
        if batches.shuffle:
            hashes = (hashlib.sha256(np.asarray(row).tobytes()).hexdigest() for row in found[0].inputs)
            seen.setdefault(i, []).extend(zip(rows, hashes, strict=True))
        return found

    plain = share._rows
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(share, "_rows", recorded)
        assert train_rank(rank, world, recipe, out, resume) is None
    return seen


@pytest.mark.parametrize("zero", ["", pytest.param(",zero=3", marks=pytest.mark.slow)])
def test_four_ranks_then_three_then_four(room: Path, tmp_path: Path, zero: str) -> None:
    """Two steps on each number of ranks: the sequences of each global batch and their order, the losses, the norms and
    the weights are those of four ranks that nothing disturbed."""
    base = recipe_of(room, f"dp=4{zero}")
    run_ranks(4, seen_by_rank, base, tmp_path / "whole", False)
    batches: dict[int, Counter[tuple[int, str]]] = {}
    for ranks, steps in ((4, 2), (3, 4), (4, 6)):
        recipe = change(nearest_layout(base, ranks).recipe, [f"train.steps={steps}"])
        for seen in run_ranks(ranks, seen_by_rank, recipe, tmp_path / "parts", steps > 2):
            for step in (steps - 2, steps - 1):
                batches.setdefault(step, Counter()).update(seen[step])
    undisturbed = run_ranks(1, seen_by_rank, change(base, layout="dp=1"), tmp_path / "one", False)[0]
    for step in range(6):
        filling = sum(batches[step].values()) - 8  # an empty microbatch has the first row, and no targets
        assert filling == (1 if zero and step in (2, 3) else 0)
        assert set(batches[step]) == set(undisturbed[step])
    for key in ("loss", "grad_norm", "val_loss"):
        assert lines(tmp_path / "parts", key)[-1] == pytest.approx(
            lines(tmp_path / "whole", key)[-1], rel=1e-5
        )
    assert lines(tmp_path / "parts", "loss") == pytest.approx(lines(tmp_path / "whole", "loss"), rel=1e-6)
    found, wanted = (stored.load(store.latest(tmp_path / name)) for name in ("parts", "whole"))
    for kind in ("model", "optimizer"):
        assert_close_tensors(getattr(found, kind), getattr(wanted, kind))


def test_a_run_of_unequal_shares_is_exact_to_the_bit(room: Path, tmp_path: Path) -> None:
    """Stopped and resumed on three ranks: the same bits."""
    base = recipe_of(room, "dp=3,zero=2")
    for steps, out in ((4, "whole"), (2, "parts"), (4, "parts")):
        recipe = change(base, [f"train.steps={steps}"])
        resumed = (tmp_path / out).exists()
        run_ranks(3, seen_by_rank, recipe, tmp_path / out, resumed)
    a, b = (stored.load(store.latest(tmp_path / name)) for name in ("whole", "parts"))
    for kind in ("model", "optimizer"):
        assert_same_tensors(getattr(a, kind), getattr(b, kind))


# Local ranks that leave and join


def test_numbers_of_ranks() -> None:
    assert between("3") == 3
    assert between("2:4") == (2, 4)
    for text in ("", "0", "2:", ":4", "4:2", "0:2", "2:4:6", "-1", "²", "1" * 20):
        with pytest.raises(UserError, match="--nproc"):
            between(text)


def test_slots(tmp_path: Path) -> None:
    slots = Slots(tmp_path, 2, 4)
    assert slots.usable() == (0, 1, 2, 3)
    assert not slots.fail(1, progress=False)
    assert not slots.fail(2, progress=False), "another one"
    assert not slots.fail(2, progress=True), "it got on meanwhile"
    assert slots.fail(2, progress=False)
    assert slots.usable() == (0, 1, 3)
    for number, usable in (("3", (0, 1, 2)), ("1", (0, 1)), ("9", (0, 1, 2, 3))):
        (tmp_path / "slots").write_text(number)
        assert slots.usable() == usable, number
    for text in ("many", "-1", "3" * 60):
        (tmp_path / "slots").write_text(text)
        assert slots.usable() == (0, 1, 2, 3)
    for slot in (0, 0, 1, 1, 2, 2):
        slots.fail(slot, progress=False)
    assert slots.usable() == (2, 3), "two are the fewest"
    (tmp_path / "slots").unlink()
    (tmp_path / "slots").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").write_text("2")
    assert Slots(tmp_path, 1, 4).usable() == (0, 1, 2, 3), "no link is followed"


def post(out: Path, layout: str, ranks: Ranks) -> int | None:
    """Says where it is, and waits: to be asked to leave, or for the end. The rank on slot 1 dies while `bad` exists."""
    slot = os.environ["LOCAL_RANK"]
    if slot == "1" and (out / "bad").exists():
        os.kill(os.getpid(), signal.SIGKILL)
    (out / f"{layout} rank {ranks.rank} on {slot}").touch()
    with Interrupt() as interrupt:
        while not interrupt.wanted() and not (out / "end").exists():
            time.sleep(0.01)
    return interrupt.signal


def posted(out: Path) -> Outcome:
    restart.LONGEST_S = 0.0

    def attempt(ranks: int, job: Job) -> Attempt:
        layout = to_text(Layout.from_recipe(job.recipe.layout))
        return Attempt(partial(post, out, layout), ranks, grace_s=lambda: 20.0)

    job = Job(load("quickstart", layout="dp=3"), out)
    elastic = Elastic(job, 1, 3, attempt)
    restarts = Restarts(job, elastic.attempt, elastic.failed)
    return launch(restarts.attempt(job), True, restarts.again)


def test_ranks_leave_for_others(tmp_path: Path) -> None:
    """Slot 1 fails twice, so two ranks go on, on slots 0 and 2. When somebody says that three may run, they leave, and
    three go on."""
    (tmp_path / "bad").touch()
    (tmp_path / ".lock").touch()  # the folder is owned
    run = Launched(tmp_path / "log", posted, tmp_path)
    run.until(lambda: (tmp_path / "dp=2 rank 0 on 0").exists() and (tmp_path / "dp=2 rank 1 on 2").exists())
    (tmp_path / "bad").unlink()
    (tmp_path / "slots").write_text("3")
    run.until(lambda: (tmp_path / "dp=3 rank 1 on 1").exists())
    (tmp_path / "end").touch()
    assert run.value() == Outcome()
    found = [json.loads(line) for line in (tmp_path / "restarts.jsonl").open()]
    assert [(line["kind"], line["ranks"]) for line in found] == [("killed", 3), ("killed", 2), ("ranks", 3)]
    for text in (
        "slot 1 is given up",
        "2 ranks instead of 3: layout dp=2 for dp=3",
        "there are 3 slots",
        "as asked",
    ):
        assert text in run.said, run.said


class Breaking:
    """Batches of random tokens. While `bad` exists, the rank on slot 2 dies when it reads the fourth. Three ranks are
    slow at the end: they shall not reach it."""

    def __init__(self, bad: Path, pause_s: float = 0.1):
        self.bad, self.pause_s = bad, pause_s

    def batch(self, i: int, rows: range) -> Any:
        if i >= 3 and os.environ.get("LOCAL_RANK") == "2" and self.bad.exists():
            os.kill(os.getpid(), signal.SIGKILL)
        if i >= 8 and os.environ.get("WORLD_SIZE") == "3":
            time.sleep(self.pause_s)
        x = np.stack([np.random.default_rng((i, row)).integers(0, 40, 17) for row in rows])
        return x[:, :-1], x[:, 1:]


LONG = [*TINY, "model.vocab_size=64", "train.steps=24", "train.val_every=24", "checkpoint.every=2"]


def undisturbed(rank: int, world: int, recipe: Recipe, out: Path) -> None:
    job = Job(resolve(recipe, vocab_size=64), out, batches=Breaking(out / "never"))
    assert run_rank(job, ranks_of(rank, world)) is None


def elastic(recipe: Recipe, out: Path, bad: Path) -> None:
    restart.LONGEST_S = 0.0
    run_command(recipe, (2, 4), out, batches=Breaking(bad))


@pytest.mark.slow
def test_a_rank_that_cannot_come_back_is_left_out_until_it_can(tmp_path: Path) -> None:
    """Slot 2 kills its rank twice: three ranks go on. When the slot is mended, they save, and four go on. The losses
    are the same."""
    recipe, out, bad = load("quickstart", LONG, "dp=4,zero=1"), tmp_path / "run", tmp_path / "bad"
    bad.touch()
    run = Launched(tmp_path / "log", elastic, recipe, out, bad)
    run.until(lambda: last_step(out) >= 8)
    assert load(str(out / "recipe.toml")).layout.dp_shard == 4, "what was asked for stays"
    bad.unlink()
    (out / "slots").write_text("4")
    assert run.wait() == 0, run.said
    restarts = [json.loads(line) for line in (out / "restarts.jsonl").open()]
    assert [(line["kind"], line["ranks"]) for line in restarts] == [
        ("killed", 4),
        ("killed", 3),
        ("ranks", 4),
    ]
    for text in (
        "slot 2 is given up", "3 ranks instead of 4: layout dp=3,zero=1 for dp=4,zero=1", "there are 4 slots for ranks",
        "4 ranks, as asked for",
    ):  # fmt: skip
        assert text in run.said, run.said
    assert_same_losses(tmp_path, recipe)


def assert_same_losses(folder: Path, recipe: Recipe) -> None:
    """The losses of folder/run are those of four ranks that nothing disturbed, as far as the order of sums allows. How
    far this is, one rank shows."""
    run_ranks(4, undisturbed, recipe, folder / "four", timeout_s=60)
    undisturbed(0, 1, change(recipe, layout="dp=1"), folder / "one")
    one, four, mine = (np.array(lines(folder / name, "loss")) for name in ("one", "four", "run"))
    assert len(mine) == 24
    allowed = 8 * np.abs(one - four).max() / four.min()
    assert 0 < allowed < 1e-4
    assert np.abs(mine / four - 1).max() < allowed


def met(rank: int, world: int, members: int, port: int) -> tuple[str, int, float]:
    """One rank of a launcher whose store is there already. Those beyond `members` are spare."""
    names = {
        "RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": world,
        "MASTER_PORT": port,
    }
    os.environ |= {name: str(value) for name, value in names.items()}
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    if rank >= members:
        ranks_.wait_as_spare()
        return "spare", members, 0.0
    with ranks_.join(members=members) as ranks:
        total = torch.ones(())
        dist.all_reduce(total)
        time.sleep(1.0)  # a spare is still waiting meanwhile
        return "trains", ranks.world, total.item()


def test_ranks_of_a_later_start_meet_in_the_same_store(tmp_path: Path) -> None:
    """Under torchrun the store stays when ranks start again, with the addresses of those that are gone. Three ranks, of
    which two train; then three; then two."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for start, (world, members) in enumerate(((3, 2), (3, 3), (2, 2))):
        logs = [tmp_path / f"{start}-{rank}" for rank in range(world)]
        started = [Launched(log, met, rank, world, members, server.port) for rank, log in enumerate(logs)]
        found = [one.value(30) for one in started]
        assert found == [("trains", members, members)] * members + [("spare", members, 0.0)] * (
            world - members
        )
