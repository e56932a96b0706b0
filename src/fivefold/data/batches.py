"""Batch i of a run, as a pure function of (seed, i), whatever the number of ranks.

Sequence n of a set is tokens[n T : n T + T + 1]; a last partial one is dropped. The run walks through
positions 0, 1, 2, ... : batch i holds positions i B to (i + 1) B - 1, epoch e holds positions e N to
(e + 1) N - 1, and within an epoch the N sequences come in the order of a keyed permutation (`order.py`).
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from fivefold.data.order import hash_keys, permute
from fivefold.data.tokens import Tokens
from fivefold.recipe.count import MASKED_SHARE

NOT_COUNTED = -100  # a target that the loss leaves out (the convention of torch's cross entropy)
# Of the positions that BERT predicts (MASKED_SHARE of all) 80% become the mask token, 10% a random one, 10% stay.
MASK_TO_MASK, MASK_TO_RANDOM = 0.8, 0.1


def count_sequences(tokens: int, seq_len: int, objective: str) -> int:
    """Whole sequences in so many tokens: a causal one is T + 1 tokens (overlapping by 1), a masked one T."""
    return max(0, tokens - 1) // seq_len if objective == "causal" else tokens // seq_len


class Batches:
    """The batches of a set of tokens.

    objective: `causal` (the target is the next token) or `mlm` (the target is the hidden token; needs mask_id
    and vocab_size). shuffle=False: the sequences in their own order, for validation.
    `sequences` is N, the number of sequences in an epoch.
    """

    def __init__(
        self,
        tokens: Tokens,
        seq_len: int,
        batch_size: int,
        seed: int,
        objective: Literal["causal", "mlm"] = "causal",
        mask_id: int | None = None,
        vocab_size: int | None = None,
        shuffle: bool = True,
    ):
        self.tokens, self.seq_len, self.batch_size, self.seed = tokens, seq_len, batch_size, seed
        self.objective, self.mask_id, self.vocab_size, self.shuffle = objective, mask_id, vocab_size, shuffle
        self.sequences = count_sequences(len(tokens), seq_len, objective)
        assert self.sequences >= 1, "the set is smaller than one sequence: prepare() checks that"
        assert objective == "causal" or (mask_id is not None and vocab_size is not None)

    def batch(self, i: int, rows: range | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets of batch i, each (len(rows), T) int64. Target -100: not counted in the loss.

        rows: which of the B sequences of the global batch (all of them by default), so that ranks and
        microbatches cut the same batch in any way.
        """
        rows = range(self.batch_size) if rows is None else rows
        assert 0 <= rows.start <= rows.stop <= self.batch_size
        counters_R = i * self.batch_size + np.arange(rows.start, rows.stop, rows.step, dtype=np.int64)
        starts_R = self._sequence_numbers(counters_R) * self.seq_len
        if self.objective == "causal":
            block = self.tokens.rows(starts_R, self.seq_len + 1)  # (R, T + 1)
            return np.ascontiguousarray(block[:, :-1]), np.ascontiguousarray(block[:, 1:])
        return self._mask(self.tokens.rows(starts_R, self.seq_len), counters_R)

    def _sequence_numbers(self, counters_R: np.ndarray) -> np.ndarray:
        epochs_R, positions_R = np.divmod(counters_R, self.sequences)
        if not self.shuffle:
            return positions_R
        numbers_R = np.empty_like(positions_R)
        for epoch in np.unique(epochs_R).tolist():  # a batch spans one epoch, or two at a border
            here = epochs_R == epoch
            numbers_R[here] = permute(positions_R[here], self.sequences, self.seed, epoch)
        return numbers_R

    def _mask(self, tokens_RT: np.ndarray, counters_R: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Hides exactly round(0.15 T) positions of each sequence, so that every microbatch counts as many."""
        assert self.mask_id is not None
        assert self.vocab_size is not None
        hidden = max(1, round(MASKED_SHARE * self.seq_len))  # M positions a sequence
        columns_T = np.arange(self.seq_len)
        scores_RT = hash_keys(self.seed, 1, counters_R[:, None], columns_T)
        at_RM = np.sort(np.argpartition(scores_RT, hidden - 1, axis=1)[:, :hidden], axis=1)
        draw_RM = hash_keys(self.seed, 2, counters_R[:, None], at_RM)
        uniform_RM = draw_RM / np.float64(2**64)
        random_RM = (mix_again(draw_RM) % np.uint64(self.vocab_size)).astype(np.int64)
        original_RM = np.take_along_axis(tokens_RT, at_RM, 1)
        shown_RM = np.where(uniform_RM < MASK_TO_MASK + MASK_TO_RANDOM, random_RM, original_RM)
        shown_RM = np.where(uniform_RM < MASK_TO_MASK, self.mask_id, shown_RM)
        targets_RT = np.full_like(tokens_RT, NOT_COUNTED)
        np.put_along_axis(targets_RT, at_RM, original_RM, 1)
        np.put_along_axis(tokens_RT, at_RM, shown_RM, 1)
        return tokens_RT, targets_RT


def mix_again(draw: np.ndarray) -> np.ndarray:
    """A second number from the same draw, independent of the first for our purposes."""
    return hash_keys(3, draw)
