"""Training while the text is tokenized: tokens, their order, the bound, interruptions; tokenizing that continues."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from data_recipes import recipe_of, write
from pool_runs import lines, ranks_of
from ranks import run_ranks

from fivefold.data import Batches, DataSet, prepare
from fivefold.data.batches import shuffled_window
from fivefold.data.preparation import finished
from fivefold.data.stream import BUILDER, Stream, _started, commits
from fivefold.data.tokens import read_journal
from fivefold.errors import UserError
from fivefold.files import Post
from fivefold.observe.report import data_seen
from fivefold.recipe import Recipe, load, resolve
from fivefold.train.job import Job
from fivefold.train.run import run_rank
from fivefold.train.share import STREAMS

T = 16
WINDOW = 1 << 12
ROWS = [json.dumps({"text": f"document {i} " + "of some words " * (i % 60)}) for i in range(2500)]  # 1.1 MB


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("source") / "a.jsonl", "\n".join(ROWS))


@pytest.fixture
def streaming() -> Iterator[None]:
    yield
    for process in [*_started.values()]:
        process.kill()
        process.wait()
    _started.clear()


def streamed(source: Path, cache: Path, **data: object) -> Recipe:
    settings = {"stream": True, "stream_window": WINDOW, "val_fraction": 0.1, **data}
    recipe = recipe_of(source, cache, seq_len=T, batch=8, **settings)  # type: ignore[arg-type]
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"val_sequences": 16})})


def batches_of(data: DataSet, seed: int = 3) -> Batches:
    return Batches(data.train, T, 8, seed)


def stream_of(data: DataSet) -> Stream:
    assert isinstance(data.train, Stream)
    return data.train


def test_a_stream_has_the_tokens_of_the_whole(source: Path, tmp_path: Path, streaming: None):
    """In another order, in which each item comes once in an epoch, within its window; validation is the same."""
    recipe = streamed(source, tmp_path)
    plain = recipe.model_copy(update={"data": recipe.data.model_copy(update={"stream": False})})
    whole, data = prepare(plain), prepare(recipe)
    first = batches_of(data).batch(0)[0]
    done = finished(data, recipe, lambda *_: None)
    np.testing.assert_array_equal(done.train[:], whole.train[:])
    np.testing.assert_array_equal(data.val[:], whole.val[:][: 16 * T + 1])  # type: ignore[index]
    stream, count, W = stream_of(data), (len(whole.train) - 1) // T, WINDOW // T
    numbers = stream.numbers(np.arange(2 * count), partial(shuffled_window, 3))
    for epoch in np.split(numbers, 2):
        for begin in range(0, count, W):
            window = epoch[begin : begin + W]
            np.testing.assert_array_equal(np.sort(window), np.arange(begin, min(begin + W, count)))
    assert not np.array_equal(numbers[:W], np.arange(W))
    assert not np.array_equal(numbers[:W], numbers[count : count + W])
    np.testing.assert_array_equal(first, whole.train.rows(numbers[:8] * T, T))
    again = prepare(recipe)
    assert again.info["fingerprint"] == data.info["fingerprint"]
    np.testing.assert_array_equal(batches_of(again).batch(0)[0], first)


def test_the_cache_stays_within_its_bound(
    source: Path, tmp_path: Path, streaming: None, monkeypatch: pytest.MonkeyPatch
):
    """Through two epochs, and back: what was removed is tokenized anew, and is the same."""
    monkeypatch.setattr(sys.modules["fivefold.data.stream"], "LEAST_VAL", 1 << 10)
    size = (2 * WINDOW + 4 * WINDOW + (1 << 10)) * 2
    free, bound = streamed(source, tmp_path / "a"), streamed(source, tmp_path / "b", stream_gib=size / 2**30)
    free_data, data = prepare(free), prepare(bound)
    total = len(finished(free_data, free, lambda *_: None).train)
    assert 2 * total > 10 * size
    folder, steps = stream_of(data).folder, (total - 1) // T // 8 + 40
    wanted, got = batches_of(free_data), batches_of(data)
    largest = 0
    for step in [*range(0, steps, 211), 2]:
        np.testing.assert_array_equal(got.batch(step)[0], wanted.batch(step)[0], str(step))
        with suppress(FileNotFoundError):  # of a shard that makes room just now
            largest = max(largest, sum(path.stat().st_size for path in folder.glob("*-*.bin")))
    assert 0 < largest <= size
    with pytest.raises(UserError, match="are not kept"):
        finished(data, bound, lambda *_: None)
    with pytest.raises(
        UserError, match=r"data.stream_gib = 1e-06 is too small .* Nearest valid: stream_gib = "
    ):
        prepare(streamed(source, tmp_path / "c", stream_gib=1e-6))
    with pytest.raises(UserError, match="is too small"):  # where there are tokens already, too
        prepare(streamed(source, tmp_path / "b", stream_gib=1e-6))


@pytest.mark.slow
def test_a_killed_tokenizing_process_is_replaced(source: Path, tmp_path: Path, streaming: None):
    """It continues where it was: the folder keeps what it has."""
    monkeyed = streamed(source, tmp_path / "a", stream_gib=(12 * WINDOW + (1 << 16)) * 2 / 2**30)
    data = prepare(monkeyed)
    stream = stream_of(data)
    batches = batches_of(data)
    whole = prepare(monkeyed.model_copy(update={"data": monkeyed.data.model_copy(update={"stream": False})}))
    for step in range(0, 2000, 100):
        if step == 1000:
            _started[stream.folder].send_signal(signal.SIGKILL)
            _started[stream.folder].wait()
            assert (before := read_journal(stream.folder)) is not None
            assert before.first > 0
        uses = np.arange(8 * step, 8 * step + 8)
        numbers = stream.numbers(uses, partial(shuffled_window, 3))
        np.testing.assert_array_equal(batches.batch(step)[0], whole.train.rows(numbers * T, T))
        if step == 1000:
            assert (now := read_journal(stream.folder)) is not None
            assert now.first >= before.first
    assert (stream.folder / BUILDER).read_bytes() != b""


@pytest.mark.slow
def test_an_empty_cache_begins_where_the_checkpoint_says(tmp_path: Path, streaming: None):
    source = write(tmp_path / "a.jsonl", "\n".join(ROWS * 3))
    bound = (12 * WINDOW + (1 << 16)) * 2 / 2**30
    data = prepare(streamed(source, tmp_path / "a", stream_gib=bound))
    batches, step = batches_of(data), 10_000
    wanted = [batches.batch(step + i)[0] for i in range(3)]
    state = stream_of(data).state(8 * step)
    assert state.train > 0
    other = prepare(streamed(source, tmp_path / "b", stream_gib=bound))
    stream_of(other).begin_at(state)
    got = batches_of(other)
    for i in range(3):
        np.testing.assert_array_equal(got.batch(step + i)[0], wanted[i])
    assert state in commits(stream_of(other).folder)


def test_errors_of_the_tokenizing_process_are_the_runs(tmp_path: Path, streaming: None):
    """In the middle of training, too, with file and line; and a stream that is too small."""
    bad = write(tmp_path / "bad.jsonl", "\n".join([*ROWS, "broken"]))
    recipe = streamed(bad, tmp_path / "cache")
    with pytest.raises(UserError, match=r"bad.jsonl: line 2501 .*: not JSON"):
        finished(prepare(recipe), recipe, lambda *_: None)
    small = write(tmp_path / "small.jsonl", '{"text": "x"}')
    with pytest.raises(UserError, match=r"no document of .* was held out"):
        prepare(streamed(small, tmp_path / "cache", val_fraction=1e-6))
    with pytest.raises(UserError, match="has 2 training tokens, 0 sequences"):
        prepare(streamed(small, tmp_path / "cache", val_fraction=0.0))


def _read_on_rank(rank: int, world: int, recipe: Recipe, out: Path, steps: int, resume: bool) -> None:
    data = prepare(recipe)
    recipe = resolve(recipe, vocab_size=data.vocab_size)
    train = recipe.train.model_copy(update={"steps": steps})
    job = Job(recipe.model_copy(update={"train": train}), out, data, resume=resume)
    run_rank(job, ranks_of(rank, world))
    for tokens in data.sources.values():
        if isinstance(tokens, Stream):
            tokens.stop()


TINY = [
    "model.dim=16", "model.layers=1", "model.heads=2", "model.kv_heads=2", f"model.seq_len={T}",
    "data.tokenizer=bytes", "data.val_fraction=0.1", "train.global_batch_size=8", "train.microbatch_size=4",
    "train.val_sequences=16", "train.val_every=100", "precision.mode=fp32", "observe.tracker=none",
    "optim.schedule=constant", "data.stream=true", f"data.stream_window={WINDOW}", "train.sample_tokens=4",
]  # fmt: skip


@pytest.mark.slow
def test_two_ranks_train_from_streams_as_from_the_whole(source: Path, tmp_path: Path):
    """From a mixture of two; and resume from a checkpoint with an empty cache and other ranks, with the same losses."""
    other = write(tmp_path / "other.jsonl", "\n".join(reversed(ROWS[:400])))
    sources = ", ".join(
        f'{{name = "{path.stem}", source = "{path}", weight = {weight}}}'
        for path, weight in ((source, 3), (other, 1))
    )

    def recipe(cache: str, layout: str) -> Recipe:
        return load(
            "quickstart", [*TINY, f"data.sources=[{sources}]", f"data.cache={tmp_path / cache}"], layout
        )

    whole = finished(prepare(recipe("whole", "dp=1")), recipe("whole", "dp=1"), lambda *_: None)
    assert [part.info["tokens"]["train"] for part in whole.parts] == [len(p.train) for p in whole.parts]
    run_ranks(1, _read_on_rank, recipe("whole", "dp=1"), tmp_path / "whole-run", 8, False)
    run_ranks(2, _read_on_rank, recipe("growing", "dp=2"), tmp_path / "run", 4, False)
    meta = json.loads(next((tmp_path / "run" / "checkpoints").glob("*4/*.json")).read_text())
    assert STREAMS in json.dumps(meta)
    run_ranks(1, _read_on_rank, recipe("empty", "dp=1"), tmp_path / "run", 8, True)
    wanted, got = lines(tmp_path / "whole-run", "loss"), lines(tmp_path / "run", "loss")
    assert len(got) == 8
    np.testing.assert_allclose(got, wanted, rtol=1e-5)
    assert lines(tmp_path / "run", "source_tokens")[-1] == {"a": 48 * T, "other": 16 * T}


def test_nobody_waits_for_tokens_that_are_not_wanted(source: Path, tmp_path: Path, streaming: None):
    stream = stream_of(prepare(streamed(source, tmp_path)))
    stream.stop()
    stream.given_up = True
    with pytest.raises(UserError, match="the run ends while it waits"):
        stream._await(-1, 1)  # there are none


KILLED = """
import os, signal, sys
from pathlib import Path
from fivefold.data import build, prepare
from fivefold.recipe import load
build.JOURNAL_S = 0.0
write, written = build.Journal.write, []
def journal(self, folder):
    write(self, folder)
    written.append(1)
    if len(written) == 3:
        with open(folder / "train-00000.bin", "ab") as file:
            file.write(b"x" * 1000)  # what was under way
        os.kill(os.getpid(), signal.SIGKILL)
build.Journal.write = journal
prepare(load("quickstart", sys.argv[1:]))
"""


@pytest.mark.parametrize("kind", [pytest.param("a.txt", marks=pytest.mark.slow), "a.jsonl.gz"])
def test_tokenizing_that_was_killed_continues(tmp_path: Path, kind: str):
    import gzip

    text = "some words of a text\n" * 400_000  # 8 MB
    content = gzip.compress("\n".join(ROWS * 4).encode(), 1) if kind.endswith("gz") else text
    path = write(tmp_path / kind, content)
    given = [f"data.source={path}", "data.tokenizer=bytes"]
    command = [sys.executable, "-c", KILLED, *given, f"data.cache={tmp_path / 'cache'}"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run(command, env=environment, timeout=60).returncode == -signal.SIGKILL
    (part,) = (tmp_path / "cache" / "data").glob("*.part")
    assert (part / "journal.json").exists()
    told: list[str] = []
    data = prepare(
        load("quickstart", [*given, f"data.cache={tmp_path / 'cache'}"]), lambda s, *_: told.append(s)
    )
    at = 3 if kind.endswith("gz") else 5  # MB: a text's pieces end with a line, so a group has two
    assert [s for s in told if s.startswith(f"note: continuing after {at}.")], told
    assert not part.exists()
    whole = prepare(load("quickstart", [*given, f"data.cache={tmp_path / 'other'}"]))
    np.testing.assert_array_equal(data.train[:], whole.train[:])
    np.testing.assert_array_equal(data.val[:], whole.val[:])  # type: ignore[index]
    assert {k: data.info[k] for k in ("documents", "bytes", "tokens", "skipped")} == {
        k: whole.info[k] for k in ("documents", "bytes", "tokens", "skipped")
    }


def test_the_beginning_of_a_window_counts_the_token_that_sequences_share(tmp_path: Path):
    """1,600 tokens are 199 sequences of 8 and the token behind each: use 199 is the first of the second epoch."""
    facts = {"dtype": "<u2", "shard": 64, "count": 1600, "total": 1600, "at": [1600, 0, []]}
    write(tmp_path / "journal.json", json.dumps(facts))
    stream = Stream(tmp_path, 64, 8, 1, {})
    assert [stream._low(use) for use in (0, 8, 198, 199, 207)] == [0, 64, 1536, 0, 64]
    assert Stream(tmp_path, 64, 8, 0, {})._low(199) == 1536


def test_posts_of_dead_processes_are_removed(tmp_path: Path):
    from fivefold.files import posts

    mine = Post(tmp_path / "reading-a")
    mine.write({"low": 5})
    child = "import sys, pathlib; from fivefold.files import Post; p = Post(pathlib.Path(sys.argv[1])); p.write(1)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", child, str(tmp_path / "reading-b")], env=environment, check=True)
    assert posts(tmp_path, "reading-*") == [{"low": 5}]
    assert not (tmp_path / "reading-b").exists()
    mine.close()
    assert posts(tmp_path, "reading-*") == []


def test_the_report_of_a_stream_whose_end_is_not_known(tmp_path: Path):
    (tmp_path / "data.json").write_text(
        json.dumps({"sources": [{"name": "", "source": "x", "tokens": None}]})
    )
    assert "not known" in data_seen(tmp_path, [{"tokens": 9}])
