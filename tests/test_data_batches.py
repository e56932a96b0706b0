"""Order and batches: pure functions of (seed, step), whoever asks for which rows."""

from __future__ import annotations

import threading
import time
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.data import NOT_COUNTED, Batches, Prefetch, Tokens
from fivefold.data.batches import item_numbers, permute
from fivefold.data.tokens import Shard
from fivefold.recipe.rules.texts import batch_size, sequences_before, steps_for
from fivefold.recipe.schema import TrainSection


@given(st.integers(1, 5000), st.integers(0, 2**63), st.integers(0, 100))
@settings(max_examples=60, deadline=None)
def test_the_order_is_a_permutation(n: int, seed: int, epoch: int):
    assert sorted(permute(np.arange(n), n, seed, epoch).tolist()) == list(range(n))


def test_the_order_looks_random_and_differs_by_seed_and_epoch():
    n = 1000
    orders = [permute(np.arange(n), n, seed, epoch) for seed in range(3) for epoch in range(3)]
    for i, a in enumerate(orders):
        assert abs(np.corrcoef(np.arange(n), a)[0, 1]) < 0.12  # 3.8 sigma of a random order
        assert all((a == b).mean() < 0.01 for b in orders[:i])
    # Each place is reached from everywhere: over many seeds the first is uniform (chi square, 9 d.o.f.).
    firsts = [int(permute(np.array([0]), 10, seed, 0)[0]) for seed in range(2000)]
    assert ((np.bincount(firsts, minlength=10) - 200) ** 2 / 200).sum() < 27.9  # p = 0.001


def test_the_order_of_a_huge_set_needs_no_memory_of_it():
    n = 10**15 + 7
    few = permute(np.arange(1000), n, 1, 0)
    assert len(set(few.tolist())) == 1000
    assert few.min() >= 0
    assert few.max() < n
    assert few.std() > n / 5  # spread over the whole range


def write_shards(folder: Path, ids: np.ndarray, sizes: list[int]) -> Tokens:
    shards, at = [], 0
    for k, size in enumerate([*sizes, len(ids) - sum(sizes)]):
        path = folder / f"{k}.bin"
        ids[at : at + size].astype("<u2").tofile(path)
        shards.append(Shard(path, "<u2", 0, size))
        at += size
    return Tokens(shards)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=5), st.data())
@settings(max_examples=40, deadline=None)
def test_tokens_read_across_shards(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], data: st.DataObject
):
    ids = np.arange(sum(sizes) + 5)
    tokens = write_shards(tmp_path_factory.mktemp("shards"), ids, sizes)
    a = data.draw(st.integers(0, len(ids)))
    b = data.draw(st.integers(a, len(ids)))
    assert len(tokens) == len(ids)
    np.testing.assert_array_equal(tokens[a:b], ids[a:b])
    window = Tokens(tokens.shards, a, b)
    np.testing.assert_array_equal(window[: len(window)], ids[a:b])


def test_more_shards_than_open_files_allow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fivefold.data.tokens.OPEN_MAPS", 2)
    tokens = write_shards(tmp_path, np.arange(100), [10] * 9)
    for start in (0, 55, 5, 91):
        assert tokens[start : start + 9].tolist() == list(range(start, start + 9))
    assert len(tokens._maps) <= 2


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    return write_shards(tmp_path_factory.mktemp("tokens"), np.arange(1000), [333, 400])


@given(
    st.integers(0, 40), st.integers(1, 12), st.integers(0, 3), st.sampled_from(["causal", "mlm"]), st.data()
)
@settings(max_examples=60, deadline=None)
def test_rows_cut_over_ranks_equal_the_whole_batch(
    tokens: Tokens, i: int, size: int, seed: int, objective, data: st.DataObject
):
    def make() -> Batches:
        return Batches(tokens, 10, size, seed, objective, mask_id=1001, vocab_size=1000)

    x, y, _ = make().batch(i)
    cuts = sorted(data.draw(st.lists(st.integers(0, size), max_size=3)))
    borders = [0, *cuts, size]
    parts = [make().batch(i, range(a, b)) for a, b in pairwise(borders)]
    np.testing.assert_array_equal(x, np.concatenate([p[0] for p in parts]))
    np.testing.assert_array_equal(y, np.concatenate([p[1] for p in parts]))
    assert x.dtype == y.dtype == np.int64
    assert x.shape == y.shape == (size, 10)
    assert x.flags.c_contiguous


def test_an_epoch_shows_every_sequence_once_and_targets_are_the_next_tokens(tokens: Tokens):
    batches = Batches(tokens, 10, 7, seed=3)
    assert batches.sequences == 99  # 999 // 10: the last tokens make no whole sequence
    pairs = [batches.batch(i) for i in range(2 * 99)]  # 14 epochs, whose borders fall inside batches
    assert all((y == x + 1).all() for x, y, _ in pairs)  # the ids are 0, 1, 2, ...
    starts = np.concatenate([x[:, 0] for x, *_ in pairs]).reshape(14, 99)
    for epoch in starts:
        assert sorted(epoch.tolist()) == list(range(0, 990, 10))
    assert not (starts[0] == starts[1]).all()


def test_a_batch_that_grows_walks_the_same_sequences(tokens: Tokens):
    """Its place is a function of the sequences before it; tokens become as many steps as they need."""
    train = TrainSection(batch_ramp="1:3+2:2", global_batch_size=4, steps=8)
    assert [batch_size(train, i) for i in range(7)] == [1, 1, 1, 2, 2, 4, 4]
    assert [sequences_before(train, i) for i in range(8)] == [0, 1, 2, 3, 5, 7, 11, 15]
    assert [steps_for(train, n) for n in (1, 3, 4, 5, 7, 8, 11, 12)] == [1, 3, 4, 4, 5, 6, 6, 7]
    growing = Batches(tokens, 8, 4, 0, begins=partial(sequences_before, train))
    even = Batches(tokens, 8, 1, 0)
    wanted = [even.batch(i)[0] for i in range(11)]
    found = [growing.batch(i, range(batch_size(train, i)))[0] for i in range(6)]
    assert np.array_equal(np.concatenate(found), np.concatenate(wanted))
    for text in ("4", "4:0", "a:1"):
        with pytest.raises(ValueError, match="pattern"):
            TrainSection(batch_ramp=text)


def test_validation_keeps_the_order(tokens: Tokens):
    x, *_ = Batches(tokens, 10, 4, seed=0, shuffle=False).batch(2)
    assert x[:, 0].tolist() == [80, 90, 100, 110]


def test_masking_hides_exactly_15_percent_as_bert_does(tokens: Tokens):
    batches = Batches(tokens, 100, 10, seed=0, objective="mlm", mask_id=5000, vocab_size=1000)
    assert batches.sequences == 10
    results = [batches.batch(i) for i in range(60)]
    plain = np.concatenate([tokens.rows(_starts(batches, i), 100) for i in range(60)])
    shown, targets = (np.concatenate(parts) for parts in list(zip(*results, strict=True))[:2])
    counted = targets != NOT_COUNTED
    assert (counted.sum(1) == 15).all()
    np.testing.assert_array_equal(targets[counted], plain[counted])
    np.testing.assert_array_equal(shown[~counted], plain[~counted])
    masked = (shown[counted] == 5000).mean()  # of 9000: 3 sigma = 0.013
    kept = (shown[counted] == plain[counted]).mean()
    assert masked == pytest.approx(0.8, abs=0.013)
    assert kept == pytest.approx(0.1, abs=0.01)
    assert shown[counted & (shown != 5000)].max() < 1000
    # Positions are uniform, and the same sequence is masked elsewhere in its next epoch.
    assert counted.sum(0).min() > 45  # of 90 expected
    assert (counted[:10].argmax(1) != counted[10:20].argmax(1)).any()


def _starts(batches: Batches, i: int) -> np.ndarray:
    counters = i * batches.batch_size + np.arange(batches.batch_size)
    return item_numbers(counters, batches.sequences, batches.seed) * batches.seq_len


def test_prefetch_gives_batches_in_order_and_ends():
    with Prefetch(lambda i: i * i, start=3, stop=6) as ready:
        assert [ready.next()[0] for _ in range(3)] == [9, 16, 25]
        with pytest.raises(StopIteration):
            ready.next()


def test_prefetch_works_ahead_and_says_how_long_it_waited():
    made = []

    def fetch(i: int) -> int:
        time.sleep(0.2)
        made.append(i)
        return i

    with Prefetch(fetch, depth=2) as ready:
        first, waited = ready.next()
        assert first == 0
        assert waited > 0.1
        while len(made) < 3:  # two more, without being asked
            time.sleep(0.01)
        second, waited = ready.next()
        assert second == 1
        assert waited < 0.1
    assert not any(t.name.startswith("fivefold-prefetch") for t in threading.enumerate())


def test_prefetch_raises_what_fetch_raised():
    def fetch(i: int) -> int:
        if i == 1:
            raise OSError("disk gone")
        return i

    with Prefetch(fetch) as ready:
        assert ready.next()[0] == 0
        with pytest.raises(OSError, match="disk gone"):
            ready.next()
