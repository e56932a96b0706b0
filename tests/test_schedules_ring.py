"""Turns of ring attention: every query meets every key that it may see, once, and all gradients come home."""

import pytest

from fivefold.schedules.ring_attention import messages, turns


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
