"""Checkpoints of runs: written beside the steps, failing saves, damaged ones, going back, and the command."""

import errno
import json
import os
import re
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import stored
import torch
from marks import only
from pool_runs import after_each_step, assert_same_tensors, lines, mend, ranks_of, train_rank
from ranks import run_ranks
from typer.testing import CliRunner

from fivefold.checkpoint import keep, store, write
from fivefold.cli.main import app, main
from fivefold.data import prepare
from fivefold.errors import UserError
from fivefold.observe.report import page
from fivefold.recipe import Recipe, change, load, resolve
from fivefold.step.state import build_state
from fivefold.train import saver
from fivefold.train.checked import meta_of
from fivefold.train.job import Job
from fivefold.train.resume import resume
from fivefold.train.run import run_rank
from fivefold.train.start import run_command

TINY = [
    "model.layers=1", "model.dim=16", "model.heads=2", "model.kv_heads=2", "model.seq_len=16",
    "data.tokenizer=bytes", "data.val_fraction=0.1", "train.global_batch_size=4", "train.microbatch_size=2",
    "train.steps=6", "train.val_sequences=4", "train.sample_tokens=4", "train.sample_every=0", "optim.lr=1e-2",
    "optim.schedule=constant", "observe.tracker=none", "layout.dp_replicate=1", "checkpoint.every=2",
    "checkpoint.keep_last=9",
]  # fmt: skip


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Recipe:
    folder = tmp_path_factory.mktemp("data")
    text = folder / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 100)
    return load("quickstart", [*TINY, f"data.source={text}", f"data.cache={folder / 'cache'}"])


@pytest.fixture(scope="module")
def whole(recipe, tmp_path_factory) -> Path:
    """A run without disturbances, whose saves wait."""
    out = tmp_path_factory.mktemp("whole") / "run"
    train_rank(0, 1, change(recipe, ["checkpoint.asynchronous=false"]), out)
    return out


def names(run: Path) -> list[str]:
    return sorted(p.name for p in (run / "checkpoints").iterdir())


def assert_same_checkpoints(run: Path, other: Path) -> None:
    """The same steps with the same content."""
    assert [p.name for p in store.checkpoints(run)] == [p.name for p in store.checkpoints(other)]
    for one, two in zip(store.checkpoints(run), store.checkpoints(other), strict=True):
        assert store.Reader(one).manifest.files == store.Reader(two).manifest.files, one.name


# Beside the steps


@pytest.mark.parametrize("world", [1, 2])
def test_a_save_beside_the_steps_holds_the_state_of_its_step(recipe, tmp_path, monkeypatch, world):
    """Though the copy begins late, and the file is written later still."""
    two = change(recipe, [f"layout.dp_replicate={world}", "train.microbatch_size=1"])
    late = change(two, ["checkpoint.asynchronous=false"])
    run_ranks(world, train_rank, late, tmp_path / "waits")
    said = run_ranks(world, slow_copies, two, tmp_path / "beside")
    assert all(threads >= {"checkpoint"} for threads in said)
    assert_same_checkpoints(tmp_path / "beside", tmp_path / "waits")
    assert not list((tmp_path / "beside" / "checkpoints").glob(".*"))


def slow_copies(rank: int, world: int, recipe: Recipe, out: Path) -> set[str]:
    """Trains with copies that begin when the next step is almost done. Returns the threads that copied."""
    run, seen = write.Copy.run, set[str]()

    def slowly(copy: write.Copy) -> write.Pieces:
        seen.add(threading.current_thread().name)
        time.sleep(0.1)
        return run(copy)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write.Copy, "run", slowly)
        train_rank(rank, world, recipe, out)
    return seen


def test_at_most_one_save_is_under_way(recipe, tmp_path, monkeypatch):
    under_way, most = 0, 0
    part = write.Writing.write_part

    def slow_part(writing):
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        time.sleep(0.05)
        part(writing)
        under_way -= 1

    monkeypatch.setattr(write.Writing, "write_part", slow_part)
    train_rank(0, 1, change(recipe, ["checkpoint.every=1"]), tmp_path / "run")
    assert most == 1
    assert names(tmp_path / "run") == [f"step-{step:08d}" for step in range(1, 7)]


def test_without_room_for_a_copy_the_step_waits(recipe, whole, tmp_path, monkeypatch):
    monkeypatch.setattr(saver, "available", lambda: 1000)
    monkeypatch.setattr(write.Copy, "run", lambda copy: pytest.fail("there is no room for a copy"))
    train_rank(0, 1, recipe, tmp_path / "run")
    assert_same_checkpoints(tmp_path / "run", whole)


def test_a_copy_that_cannot_be_made_is_an_alarm(recipe, whole, tmp_path, monkeypatch):
    """Though there seemed to be room, as under a limit on address space."""
    hosts, calls = write._hosts, iter([0, 1, 0, 0])

    def full_once(tensors):
        if next(calls):
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return hosts(tensors)

    monkeypatch.setattr(write, "_hosts", full_once)
    assert train_rank(0, 1, recipe, tmp_path / "run") is None
    assert names(tmp_path / "run") == ["step-00000002", "step-00000005", "step-00000006"]
    (alarm,) = lines(tmp_path / "run", "alarm")
    assert "no room for a copy: [Errno 12] Cannot allocate memory" in alarm


# By time


SAVES_BY_TIME = {
    "dp=2": [], "dp=2,zero=3": [], "pp=2": ["model.layers=2"], "replica_groups": ["sync.method=diloco", "sync.every=4"],
}  # fmt: skip


@only("dp=2-true")
@pytest.mark.parametrize("asynchronous", ["true", pytest.param("false", marks=pytest.mark.slow)])
@pytest.mark.parametrize("layout", SAVES_BY_TIME)
def test_saves_are_due_by_time_on_all_ranks_at_once(recipe, tmp_path, layout, asynchronous):
    """The first rank's time decides. A run resumes exactly from such a save."""
    sets = ["checkpoint.every=0", "train.microbatch_size=1", f"checkpoint.asynchronous={asynchronous}"]
    base = change(recipe, [*sets, *SAVES_BY_TIME[layout]], layout.replace("replica_groups", "dp=2"))
    timed = change(base, ["checkpoint.minutes=1e-9"])
    out, plain = tmp_path / "run", tmp_path / "plain"
    run_ranks(2, with_another_clock, timed, out)
    run_ranks(2, train_rank, change(base, ["checkpoint.minutes=15"]), plain)
    assert names(plain) == ["step-00000006"]
    assert lines(out, "loss") == lines(plain, "loss")
    saved = names(out)
    if asynchronous == "false":
        assert saved == [f"step-{step:08d}" for step in range(1, 7)]
    assert len(saved) > 1
    for later in saved[1:]:
        shutil.rmtree(out / "checkpoints" / later)
    run_ranks(2, train_rank, change(base, ["checkpoint.minutes=0"]), out, True)
    assert names(out) == [saved[0], "step-00000006"]
    assert lines(out, "loss") == lines(plain, "loss")
    ends = [store.Reader(run / "checkpoints" / "step-00000006").manifest.files for run in (out, plain)]
    assert ends[0] == ends[1]


def with_another_clock(rank: int, world: int, recipe: Recipe, out: Path) -> None:
    """Trains; for all ranks but the first no time passes."""
    with pytest.MonkeyPatch.context() as patch:
        if rank:
            patch.setattr(saver.Saver, "is_time", lambda saver: False)
        train_rank(rank, world, recipe, out)


# Saves that fail


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device", "model-00000-00001.safetensors")


@pytest.mark.parametrize("asynchronous", ["true", "false"])
def test_a_save_that_fails_is_an_alarm_and_the_next_one_works(
    recipe, whole, tmp_path, monkeypatch, capsys, asynchronous
):
    part = write.Writing.write_part

    def full_once(writing):
        with writing._explained():
            full() if writing.meta["step"] == 4 else part(writing)

    monkeypatch.setattr(write.Writing, "write_part", full_once)
    out = tmp_path / "run"
    assert train_rank(0, 1, change(recipe, [f"checkpoint.asynchronous={asynchronous}"]), out) is None
    saved = ["step-00000002", "step-00000005", "step-00000006"]
    assert names(out) in (saved, saved[::2]), "nothing incomplete is left"
    assert asynchronous == "true" or names(out) == saved
    assert lines(out, "loss") == lines(whole, "loss")
    (alarm,) = lines(out, "alarm")
    assert re.search(r"cannot write the checkpoint .*step-00000004: .*No space left on device", alarm)
    assert re.search("; step [567] tries again", alarm)
    assert re.search(f"alarm: step [456]: {alarm[:20]}", capsys.readouterr().out)
    assert "No space left on device" in page(out)


@pytest.mark.parametrize("asynchronous", ["true", "false"])
def test_a_failed_save_is_tried_again_after_1_2_and_4_steps(recipe, tmp_path, monkeypatch, asynchronous):
    """Beside the steps the run learns a step later that it failed. After a save that works the distance is 1 again."""
    part, tried = write.Writing.write_part, list[int]()

    def full_for_long(writing):
        tried.append(writing.meta["step"])
        with writing._explained():
            full() if writing.meta["step"] in (8, 9, 10, 11, 12, 24) else part(writing)

    monkeypatch.setattr(write.Writing, "write_part", full_for_long)
    sets = ["train.steps=26", "checkpoint.every=8", f"checkpoint.asynchronous={asynchronous}"]
    assert train_rank(0, 1, change(recipe, sets), tmp_path / "run") is None
    if asynchronous == "false":
        assert tried == [8, 9, 11, 15, 16, 24, 25, 26]
    assert tried[0] == 8
    assert 3 <= sum(8 <= step < 16 for step in tried) <= 4
    assert [int(name[5:]) for name in names(tmp_path / "run")] == [
        s for s in tried if s not in range(8, 13) and s != 24
    ]


def test_a_retry_that_is_under_way_does_not_begin_again(recipe, tmp_path, monkeypatch):
    part, tried = write.Writing.write_part, list[int]()

    def slow(writing):
        tried.append(writing.meta["step"])
        with writing._explained():
            full() if writing.meta["step"] == 8 else part(writing)
        time.sleep(0.5)

    monkeypatch.setattr(write.Writing, "write_part", slow)
    sets = ["train.steps=14", "checkpoint.every=8"]
    assert train_rank(0, 1, change(recipe, sets), tmp_path / "run") is None
    assert len(tried) == 3, tried
    assert tried[0] == 8
    assert tried[-1] == 14


def full_at_the_end(rank: int, world: int, recipe: Recipe, out: Path, times: int) -> tuple[Any, int]:
    """The last rank's disk is full in so many tries of the last save. Told to stop in the second one. Returns what the
    run returned, or its error, and the steps that were trained."""
    part, tried, steps = write.Writing.write_part, list[int](), list[int]()

    def full_then(writing: write.Writing) -> None:
        last = writing.meta["step"] == 6 and rank == world - 1
        tried.extend([6] * last)
        if last and len(tried) == 2 < times:
            os.kill(os.getpid(), signal.SIGTERM)
        with writing._explained():
            full() if last and len(tried) <= times else part(writing)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write.Writing, "write_part", full_then)
        patch.setattr(saver, "AGAIN_S", 1)
        with after_each_step(lambda state, when: steps.append(state.step)):
            try:
                return train_rank(rank, world, recipe, out), max(steps)
            except UserError as error:
                return error, max(steps)


def test_a_last_save_that_fails_keeps_what_is_trained(recipe, tmp_path):
    """All ranks wait, and save when there is room. Told to stop meanwhile, all leave with the reason."""
    two = change(recipe, ["layout.dp_shard=2", "layout.zero=1", "train.microbatch_size=1"])
    assert run_ranks(2, full_at_the_end, two, tmp_path / "run", 2) == [(None, 6)] * 2
    assert names(tmp_path / "run") == [f"step-0000000{step}" for step in (2, 4, 6)]
    (alarm,) = lines(tmp_path / "run", "alarm")
    assert "step-00000006: [Errno 28] No space left on device" in alarm
    assert "The run waits with what it has trained, and tries again every" in alarm
    for error, _ in run_ranks(2, full_at_the_end, two, tmp_path / "stopped", 10**9):
        assert re.search("cannot write the checkpoint .*step-00000006: .*No space left on device", str(error))
    assert names(tmp_path / "stopped") == ["step-00000002", "step-00000004"]


def test_a_save_that_fails_on_one_rank_fails_on_all(recipe, tmp_path):
    """The last rank has no part in step 4. The first neither waits for it for ever nor keeps what is incomplete."""
    two = change(recipe, ["layout.dp_shard=2", "layout.zero=1", "train.microbatch_size=1"])
    assert run_ranks(2, fails_once, two, tmp_path / "run") == [None, None]
    saved = ["step-00000002", "step-00000005", "step-00000006"]
    assert names(tmp_path / "run") in (saved, saved[::2])
    (alarm,) = lines(tmp_path / "run", "alarm")
    assert "step-00000004: [Errno 28] No space left on device" in alarm


def fails_once(rank: int, world: int, recipe: Recipe, out: Path) -> int | None:
    part = write.Writing.write_part

    def full_once(writing: write.Writing) -> None:
        with writing._explained():
            full() if writing.meta["step"] == 4 and rank == world - 1 else part(writing)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write.Writing, "write_part", full_once)
        return train_rank(rank, world, recipe, out)


# Damaged ones


def copy_of(run: Path, folder: Path) -> Path:
    """A copy that may be damaged."""
    return Path(shutil.copytree(run, folder / "run"))


def cut(folder: Path) -> None:
    path = next(folder.glob("optimizer-*"))
    path.write_bytes(path.read_bytes()[:-1])


def flip(folder: Path) -> None:
    content = bytearray((folder / "manifest.json").read_bytes())
    content[len(content) // 2] ^= 4
    (folder / "manifest.json").write_bytes(content)


@pytest.mark.parametrize("damage", [cut, flip, lambda folder: (folder / "manifest.json").unlink()])
def test_the_one_before_a_damaged_checkpoint_is_used(recipe, whole, tmp_path, capsys, damage):
    run = copy_of(whole, tmp_path)
    damage(store.latest(run))
    train_rank(0, 1, recipe, run, resume=True)
    assert names(run) == ["damaged-step-00000006", *(f"step-0000000{n}" for n in (2, 4, 6))]
    assert_same_checkpoints(run, whole)
    assert lines(run, "loss") == lines(whole, "loss"), "the rows of steps that ran again are there once"
    (alarm,) = lines(run, "alarm")
    assert "Resumed from step 4 instead of step-00000006, set aside as damaged-step-00000006" in alarm
    assert alarm in capsys.readouterr().out


def test_ranks_agree_on_the_checkpoint_before(recipe, tmp_path):
    """Only one of them reads the damaged file."""
    two = change(recipe, ["layout.dp_replicate=2", "train.microbatch_size=1", "checkpoint.keep_last=2"])
    run_ranks(2, train_rank, two, tmp_path / "run")
    before = stored.load(store.latest(tmp_path / "run"))
    cut(store.latest(tmp_path / "run"))
    assert run_ranks(2, train_rank, two, tmp_path / "run", True) == [None, None]
    after = stored.load(store.latest(tmp_path / "run"))
    assert_same_tensors(after.model, before.model)
    assert "damaged-step-00000006" in names(tmp_path / "run")


def test_if_all_are_damaged_nothing_is_touched(recipe, whole, tmp_path):
    run = copy_of(whole, tmp_path)
    for folder in store.checkpoints(run):
        cut(folder)
    before, metrics = names(run), (run / "metrics.jsonl").read_bytes()
    with pytest.raises(UserError, match=r"(?s)has no valid checkpoint.*step-00000006.*step-00000002"):
        train_rank(0, 1, recipe, run, resume=True)
    assert names(run) == before
    assert (run / "metrics.jsonl").read_bytes() == metrics


def test_damage_is_found_before_weights_change(recipe, whole, tmp_path, monkeypatch):
    """Here in the last file that is read."""
    run = copy_of(whole, tmp_path)
    for folder in store.checkpoints(run)[:-1]:
        cut(folder)
    cut(store.latest(run))
    data = prepare(recipe)
    resolved = resolve(recipe, vocab_size=data.vocab_size)
    state = build_state(resolved, ranks_of(0, 1))
    before = {name: weight.clone() for name, weight in state.masters().items()}
    with pytest.raises(UserError, match="no valid checkpoint"):
        resume(state, Job(resolved, run, data, resume=True))
    assert_same_tensors(state.masters(), before)


def test_a_checkpoint_that_was_being_replaced_gets_its_name_back(recipe, whole, tmp_path):
    """Killed between two renames: the old one has no name any more, the new one none yet."""
    run = copy_of(whole, tmp_path)
    store.latest(run).rename(run / "checkpoints" / ".step-00000006.replaced")
    train_rank(0, 1, recipe, run, resume=True)
    assert_same_checkpoints(run, whole)
    assert names(run) == names(whole)


@pytest.mark.parametrize(
    "change_",
    [
        {"noise": [1, "x"]},
        {"usual": [1]},
        {"replica_groups": []},
        {"replica_groups": {"count": 0}},
        {"loss_scale": 3},
        {"products": []},
        {"products": {"processor": "x", "onednn": [1]}},
    ],
)
def test_other_values_of_a_manifest_are_checked(whole, change_):
    reader = store.Reader(store.latest(whole))
    reader.meta.update(change_)
    with pytest.raises(UserError, match=r"manifest\.json is damaged: "):
        meta_of(reader)


def test_more_updates_than_sequences_are_damage(recipe, whole, tmp_path):
    run, most = copy_of(whole, tmp_path), 6 * recipe.train.global_batch_size
    mend(store.latest(run), lambda found: found["meta"].update(updates=most + 1))
    train_rank(0, 1, recipe, run, resume=True)
    assert f"meta.updates is {most + 1}, and step 6 has at most {most}" in lines(run, "alarm")[0]
    assert_same_tensors(*(stored.load(store.latest(one)).model for one in (run, whole)))


# Going back, and on


def test_resume_from_a_chosen_checkpoint(recipe, whole, tmp_path, capsys):
    run = copy_of(whole, tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(["train", str(run), "--resume-from", str(run / "checkpoints" / "step-00000002")])
    assert not stop.value.code
    assert names(run) == [
        *(f"later-step-0000000{n}" for n in (4, 6)),
        *(f"step-0000000{n}" for n in (2, 4, 6)),
    ]
    assert_same_checkpoints(run, whole)
    assert lines(run, "loss") == lines(whole, "loss")
    said = capsys.readouterr()
    assert "later than step-00000002, so it is set aside" in said.err
    assert "resuming after step 2" in said.out
    with pytest.raises(UserError, match=r"is not a checkpoint of .*, which has its own"):
        run_command(recipe, out=run, resume_from=whole / "checkpoints" / "step-00000002")
    with pytest.raises(UserError, match="this is a run; name one of its checkpoints"):
        run_command(recipe, out=run, resume_from=whole)
    with pytest.raises(UserError, match="there is no such folder"):
        run_command(recipe, out=run, resume_from=tmp_path / "nothing")


def test_a_chosen_checkpoint_that_is_damaged_is_an_error(recipe, whole, tmp_path):
    """The user chose it, so no older one is taken."""
    run = copy_of(whole, tmp_path)
    cut(run / "checkpoints" / "step-00000004")
    with pytest.raises(UserError, match="has no valid checkpoint"):
        run_command(recipe, out=run, resume_from=run / "checkpoints" / "step-00000004")


def test_a_new_run_from_another_runs_checkpoint(recipe, whole, tmp_path):
    out = run_command(recipe, out=tmp_path / "new", resume_from=whole / "checkpoints" / "step-00000004")
    assert names(out) == ["step-00000006"]
    assert store.Reader(store.latest(out)).manifest.files == store.Reader(store.latest(whole)).manifest.files


def test_resume_from_auto_starts_or_goes_on(recipe, whole, tmp_path, capsys):
    out = tmp_path / "run"
    run_command(change(recipe, ["train.steps=2"]), out=out, resume_from="auto")
    assert "no checkpoint yet: starting from step 0" in capsys.readouterr().out
    run_command(recipe, out=out, resume_from="auto")
    assert "resuming after step 2" in capsys.readouterr().out
    assert_same_checkpoints(out, whole)


def test_a_run_that_ended_by_skipped_steps_may_go_on(recipe, tmp_path):
    class Diverges(torch.nn.Module):
        bad = 0

        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3))

        def forward(self, inputs, targets):
            loss = (self.weight * inputs.float().mean()).square().sum()
            return loss * torch.nan if Diverges.bad else loss

    Diverges.bad, out = 1, tmp_path / "run"
    with pytest.raises(UserError, match="not finite in 5 steps in a row"):
        run_command(change(recipe, ["train.steps=9"]), out=out, module=Diverges())
    Diverges.bad = 0
    module = Diverges()
    assert store.Reader(store.latest(out)).meta["skipped"] == 5
    data = prepare(recipe)
    resolved = resolve(change(recipe, ["train.steps=9"]), vocab_size=data.vocab_size)
    job = Job(resolved, out, data, module, resume=True)

    class OnceBad(Diverges):
        def forward(self, inputs, targets):
            Diverges.bad = len(lines(out, "loss")) == 5  # the first step after resuming
            return super().forward(inputs, targets)

    module.__class__ = OnceBad
    assert run_rank(job, ranks_of(0, 1)) is None, "one more bad step does not end it"
    assert store.Reader(store.latest(out)).meta["step"] == 9


def test_keep_every(recipe, tmp_path):
    every = change(recipe, ["checkpoint.every=1", "checkpoint.keep_last=1", "checkpoint.keep_every=3"])
    train_rank(0, 1, change(every, ["train.steps=7"]), tmp_path / "run")
    assert names(tmp_path / "run") == [f"step-0000000{n}" for n in (3, 6, 7)]


# The command


def command(*arguments: object) -> tuple[int, dict]:
    done = CliRunner().invoke(app, ["checkpoints", *map(str, arguments), "--json"], catch_exceptions=True)
    return done.exit_code, json.loads(done.stdout or "{}")


def test_the_command_lists_verifies_copies_and_prunes(recipe, whole, tmp_path):
    run = copy_of(whole, tmp_path)
    code, found = command(run, "--verify")
    assert code == 0
    assert [row["step"] for row in found["checkpoints"]] == [2, 4, 6]
    assert all(row["verified"] and not row["damage"] and row["format"] == 4 for row in found["checkpoints"])
    code, found = command(run, "--copy", tmp_path / "backup", "--step", 4)
    assert found["copied"] == str(tmp_path / "backup" / "step-00000004")
    assert stored.load(Path(found["copied"])).meta["step"] == 4
    cut(run / "checkpoints" / "step-00000002")
    assert command(run)[0] == 0, "without --verify only manifests are read"
    code, found = command(run, "--verify")
    assert code == 1
    assert "bytes, the manifest says" in found["checkpoints"][0]["damage"]
    (run / "checkpoints" / "later-step-00000009").mkdir()
    text = (run / "recipe.toml").read_text()
    (run / "recipe.toml").write_text(text.replace("keep_last = 9", "keep_last = 1"))
    assert [Path(p).name for p in command(run, "--prune")[1]["removed"]] == [
        "step-00000002",
        "step-00000004",
        "later-step-00000009",
    ]
    assert names(run) == ["step-00000006"]


@pytest.mark.parametrize("moment", ["_check", "__init__", "_tensors"])
def test_a_checkpoint_that_is_removed_while_it_is_looked_at_is_not_damaged(
    whole, tmp_path, monkeypatch, moment
):
    """Nor is one of which something is left."""
    run, plain = copy_of(whole, tmp_path), getattr(store.Reader, moment)

    def late(*arguments):
        keep.prune(run, 1)
        return plain(*arguments)

    monkeypatch.setattr(keep, "remove", lambda path: None)
    monkeypatch.setattr(store.Reader, moment, late)
    code, found = command(run, "--verify")
    assert (code, [row["step"] for row in found["checkpoints"]]) == (0, [6])


def test_pruning_keeps_valid_ones_where_those_that_would_stay_are_damaged(whole, tmp_path):
    run = copy_of(whole, tmp_path)
    text = (run / "recipe.toml").read_text()
    (run / "recipe.toml").write_text(text.replace("keep_last = 9", "keep_last = 1"))
    cut(run / "checkpoints" / "step-00000006")
    assert command(run, "--prune")[0] == 1
    assert names(run) == ["step-00000002", "step-00000004", "step-00000006"]


@pytest.mark.parametrize("there", [True, False])
def test_pruning_keeps_what_was_set_aside_where_nothing_else_is_valid(whole, tmp_path, there):
    """Also where no checkpoint is too many, or none is left."""
    run = copy_of(whole, tmp_path)
    for step in (2, 4, 6):
        shutil.move(run / f"checkpoints/step-{step:08d}", run / f"checkpoints/later-step-{step:08d}")
    if there:
        shutil.copytree(run / "checkpoints/later-step-00000002", run / "checkpoints/step-00000002")
        cut(run / "checkpoints/step-00000002")
    before = names(run)
    assert command(run, "--prune")[0] == 1
    assert names(run) == before


def test_the_format_can_be_read_with_numpy_alone(whole):
    """The code of docs/checkpoint-format.md."""
    text = (Path(__file__).parent.parent / "docs" / "checkpoint-format.md").read_text(encoding="utf-8")
    reads, checks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len([line for line in reads.splitlines() if line.startswith("    ")]) == 10
    assert "torch" not in reads
    known: dict[str, object] = {}
    exec(reads + checks, known)
    folder = store.latest(whole)
    found, wanted = known["read"](folder), stored.load(folder)  # type: ignore[operator]
    both = {**wanted.model, **wanted.optimizer}
    assert found.keys() == both.keys()
    assert all(torch.equal(torch.from_numpy(found[name].copy()), tensor) for name, tensor in both.items())
    flip(copy := copy_of(whole, whole.parent / "changed") / "checkpoints" / folder.name)
    assert known["intact"](folder)  # type: ignore[operator]
    assert not known["intact"](copy)  # type: ignore[operator]
