"""Turns of ring attention: every query meets every key that it may see, once, and all gradients come home."""

import pytest

from fivefold.schedules.ring_attention import messages, reach_of, slowest, turns


def halves(rank: int, ranks: int) -> tuple[int, int]:
    """The chunks of a sequence that a rank has: one from the front, its mirror image from the back."""
    return rank, 2 * ranks - 1 - rank


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_every_query_meets_every_key_once(ranks: int, causal: bool) -> None:
    for index in range(ranks):
        met = []
        for turn in turns(ranks, index, causal):
            keys = halves(turn.owner, ranks)[: 1 if turn.keys == 0.5 else 2]
            queries = halves(index, ranks)[1 if turn.late else 0 :]
            pairs = [(q, k) for q in queries for k in keys]
            met += [(q, k) for q, k in pairs if not causal or k <= q]
            if causal and turn.owner != index:  # nothing is computed in vain
                assert len(pairs) == len([1 for q, k in pairs if k < q]) == 2
        chunks = range(2 * ranks)
        wanted = [(q, k) for q in halves(index, ranks) for k in chunks if not causal or k <= q]
        assert sorted(met) == sorted(wanted)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_what_one_sends_another_receives(ranks: int, causal: bool) -> None:
    every = [turns(ranks, index, causal) for index in range(ranks)]
    for index, own in enumerate(every):
        before, behind = every[index - 1], every[(index + 1) % ranks]
        for number, turn in enumerate(own):
            assert turn.sends == before[number].receives
            assert turn.receives == behind[number].sends
            assert turn.sends <= turn.keys
            if number + 1 < ranks:
                assert turn.receives == own[number + 1].keys
            visited = every[turn.visited][number]
            assert visited.owner == index
            assert turn.comes_home == (visited.keys if number else 0)
        assert own[-1].sends == own[-1].receives == 0


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("causal", [True, False])
def test_the_ring_waits_for_whole_keys_in_every_message(ranks, causal):
    for backward in (False, True):
        of_ranks = [messages(ranks, index, causal, backward) for index in range(ranks)]
        assert all(max(one) == 1.0 for one in of_ranks[0])
        for some in zip(*of_ranks, strict=True):
            assert max(map(max, some)) == 1.0
            assert sum(sent for sent, _ in some) == sum(received for _, received in some)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("reach", [0, 1, 2, 5])
def test_with_a_window_only_keys_that_somebody_sees_are_sent(ranks: int, reach: int) -> None:
    """Straight from their owner; turns in which nobody sees any are left out, for all ranks alike."""
    every = [turns(ranks, index, True, reach) for index in range(ranks)]
    assert len({len(own) for own in every}) == 1
    for index, own in enumerate(every):
        met = []
        for number, turn in enumerate(own):
            keys = halves(turn.owner, ranks)[: int(2 * turn.keys)]
            queries = halves(index, ranks)[1 if turn.late else 0 :]
            met += [(q, k) for q in queries for k in keys if 0 <= q - k <= reach]
            to, source = every[turn.to][number], every[turn.source][number]
            assert turn.sends == to.receives * (number + 1 < len(own))
            assert turn.receives == source.sends
            assert turn.receives == (own[number + 1].keys if number + 1 < len(own) else 0)
            visited = every[turn.visited][number]
            assert visited.owner == index
            assert turn.comes_home == (visited.keys if number else 0)
        wanted = [(q, k) for q in halves(index, ranks) for k in range(2 * ranks) if 0 <= q - k <= reach]
        assert sorted(met) == sorted(wanted)
    for number in range(1, len(every[0])):
        assert any(own[number].keys for own in every), "a turn in which nobody sees anything"


def test_a_short_window_leaves_two_neighbours() -> None:
    """Of 8 ranks with 16 chunks of 512 tokens: those that have the chunks before a rank's own."""
    assert reach_of(8, 8192, 513) == 1
    assert reach_of(8, 8192, 514) == 2
    assert reach_of(8, 8192, 8192) is None
    assert [turn.owner for turn in turns(8, 3, True, 1)] == [3, 4, 2]
    assert slowest(8, True, False, 1) == (1.0, 0.5)
    assert slowest(8, True, True, 1) == (1.0, 0.5, 1.0, 0.5)
    assert slowest(8, True, True) == (1.0,) * 14
