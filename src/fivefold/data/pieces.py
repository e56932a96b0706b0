"""Encodes long texts in pieces, with the ids that the library gives the whole. So memory stays bounded.

A cut is right where what follows it has, by itself, the ids that it has in the whole. That is tried on a few hundred
characters: behind the end of a line, or else where a word begins (to the library: what merges do not cross), or at any
token of a text that is a single word. Ids that depend on what is further away are not found so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
import tokenizers

PIECE = 1 << 17  # characters encoded at once; the library takes about 100 bytes per character
SEAM = 1 << 9  # characters on each side by which a cut is tried
MOST_LINES, MOST_TOKENS = 4, 128  # places that are tried


def cut_text(text: str, size: int = PIECE) -> Iterator[str]:
    """Pieces of at most `size` characters, cut after a line break if there is one."""
    start = 0
    while start < len(text):
        stop = start + size
        if stop < len(text):
            line = text.rfind("\n", start, stop)
            stop = line + 1 if line >= 0 else stop
        yield text[start:stop]
        start = stop


@dataclass(frozen=True)
class Pieces:
    """prefixes: the tokenizer puts a blank before a text, or before each word."""

    inner: tokenizers.Tokenizer
    prefixes: bool

    def encode(self, text: str, continues: bool) -> np.ndarray:
        """Ids (int64). continues: the text is no beginning."""
        found, start = [np.empty(0, np.int64)], 0
        while start < len(text):
            ids, start = self._next(text, start, self._before(text, start) if continues or start else "")
            found.append(ids)
        return np.concatenate(found)

    def _next(self, text: str, start: int, before: str) -> tuple[np.ndarray, int]:
        """The ids of a text's next piece, and where it ends."""
        stop = start + PIECE
        if stop >= len(text):
            return self._ids(text[start:], before), len(text)
        for at in islice(_line_ends(text, start + SEAM, stop), MOST_LINES):
            if self._is_seam(text, at):
                return self._ids(text[start:at], before), at
        ids, places, words = self._placed(text[start:stop], before)
        left, begins = stop - start - places, np.diff(places, prepend=-1) > 0
        begins &= (left >= SEAM) & (left <= 4 * SEAM) & (places > 0)
        of_words = begins & (np.diff(words, prepend=-1) != 0)
        near = np.flatnonzero(of_words if of_words.any() else begins)[::-1][:MOST_TOKENS]
        tails = (k for k in near if self._is_tail(ids[k:], text, start + int(places[k]), stop))
        k = next(tails, near[0] if len(near) else len(ids))
        return ids[:k], start + int(places[k]) if k < len(ids) else stop

    def _is_tail(self, ids: np.ndarray, text: str, at: int, stop: int) -> bool:
        return np.array_equal(ids, self._ids(text[at:stop], self._before(text, at)))

    def _is_seam(self, text: str, at: int) -> bool:
        """True if a text has the same ids in two pieces, by what is around the cut."""
        low, before = at - SEAM, self._before(text, at - SEAM)
        ids, places, _ = self._placed(text[low : at + SEAM], before)
        parted = int((places < SEAM).sum())
        left = np.array_equal(ids[:parted], self._ids(text[low:at], before))
        return left and self._is_tail(ids[parted:], text, at, at + SEAM)

    def _before(self, text: str, at: int) -> str:
        """What keeps a blank away from a piece: a line break, or if that has no ids, the text before the piece."""
        if not self.prefixes:
            return ""
        return "\n" if self._line_has_ids else text[max(0, at - SEAM) : at]

    @cached_property
    def _line_has_ids(self) -> bool:
        return bool(self.inner.encode("\n", add_special_tokens=False).ids)

    def _ids(self, text: str, before: str) -> np.ndarray:
        found, skipped, _ = self._encoded(text, before, self.inner.encode_batch_fast)
        return np.array(found.ids[skipped:], np.int64)

    def _placed(self, text: str, before: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The ids, the character where each token begins, and the number of its word."""
        found, skipped, start = self._encoded(text, before, self.inner.encode_batch)
        places = np.array(found.offsets, np.int64).reshape(-1, 2)[skipped:, 0] - start
        return np.array(found.ids[skipped:], np.int64), places, np.array(found.word_ids[skipped:], np.int64)

    def _encoded(self, text: str, before: str, encode: Any) -> tuple[Any, int, int]:
        """The library's encoding, and how many ids and characters are not the text's but those of `before`."""
        ids = self.inner.encode(before, add_special_tokens=False).ids if before else []
        (found,) = encode([before + text], add_special_tokens=False)
        same = found.ids[: len(ids)] == ids
        return (found, len(ids), len(before)) if same else self._encoded(text, "", encode)


def _line_ends(text: str, start: int, stop: int) -> Iterator[int]:
    """Places behind a line break and before what is no blank, the last first."""
    at = stop
    while (at := text.rfind("\n", start, at)) >= 0:
        if not text[at + 1].isspace():
            yield at + 1
