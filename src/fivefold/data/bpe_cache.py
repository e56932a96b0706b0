"""Byte-level BPE by a table of words that were seen before, several times as fast as encoding each anew.

The patterns of GPT-2, Llama 3, Qwen 2 and our own cut a text into words, and BPE merges within a word only. None of
them has a word that goes from an ASCII letter to an ASCII character that is no letter, and none looks back. So the
text may be cut there first, and each chunk (" the", "(self", ".foo") has the same ids wherever it stands. Chunks of at
most 15 bytes are looked up all at once, by their bytes, in a table. Longer ones are looked up in a dict. What neither
has is encoded.
"""

from __future__ import annotations

from typing import Any

import numpy as np

GPT2 = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
AS_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
SLOTS = 1 << 18
MOST_WORDS = SLOTS
MOST_IDS = 8  # of a word in the table, on average
KEY = 16  # bytes of a chunk, zeros, and its length in the last one
MOST_PIECES = 1 << 24  # ids of a chunk: it is in a text of 128 Ki characters
LONGEST = 128  # bytes of a chunk that is kept
LETTER, OTHER = 1, 2  # ASCII letters, other ASCII


def _kinds() -> np.ndarray:
    kinds = np.zeros(256, np.uint8)
    kinds[:128] = OTHER
    for first, last in ("AZ", "az"):
        kinds[ord(first) : ord(last) + 1] = LETTER
    return kinds


KINDS = _kinds()
KEPT = np.where(np.arange(KEY) < np.arange(KEY)[:, None], 255, 0).astype(np.uint8)
"""KEPT[n] keeps the first n bytes."""


def applies(spec: dict[str, Any], patterns: tuple[str, ...]) -> bool:
    """Is this a tokenizer.json of a byte-level BPE with one of the known patterns, or of `patterns`?"""
    model, cutter = spec["model"], spec["pre_tokenizer"] or {}
    whole = any(not token["special"] for token in spec["added_tokens"])  # these are found in any text
    if model["type"] != "BPE" or model.get("dropout") or spec["normalizer"] or whole:
        return False
    if _like(cutter, GPT2):
        return True
    parts = cutter.get("pretokenizers", [])
    if len(parts) != 2 or parts[0].get("type") != "Split" or not _like(parts[1], AS_BYTES):
        return False
    isolated = parts[0].get("behavior") == "Isolated" and not parts[0].get("invert")
    return isolated and parts[0]["pattern"].get("Regex") in (*patterns, LLAMA3, QWEN2)


def _like(part: dict[str, Any], wanted: dict[str, Any]) -> bool:
    return all(part.get(key) == value for key, value in wanted.items())


class BpeCache:
    """A table of chunks and their ids. inner: the `tokenizers.Tokenizer` that encodes those which it lacks."""

    def __init__(self, inner: Any):
        self._inner = inner
        self._keys = np.zeros((SLOTS, 2), np.uint64)  # a length is never 0, so zeros are an empty slot
        self._offsets = np.zeros(SLOTS, np.int32)
        self._counts = np.zeros(SLOTS, np.int32)
        self._ids = np.empty(1 << 16, np.int32)
        self._used = self._known = 0
        self._others: dict[bytes, int] = {}  # chunk -> place of its ids x MOST_PIECES + their number
        vocabulary = inner.get_vocab(with_added_tokens=True)
        self._lengths = np.zeros(
            max(vocabulary.values()) + 1, np.int64
        )  # bytes of each token: a letter stands for one
        for token, number in vocabulary.items():
            self._lengths[number] = len(token)

    def encode(self, text: str) -> np.ndarray:
        """Ids of a text, (N,) int32."""
        raw = text.encode()
        if not raw:
            return np.empty(0, np.int32)
        padded_B = np.frombuffer(raw + bytes(KEY), np.uint8)
        kinds_B = KINDS[padded_B[: len(raw)]]
        cuts = np.flatnonzero((kinds_B[:-1] == LETTER) & (kinds_B[1:] == OTHER)) + 1
        begins_C = np.concatenate([np.zeros(1, np.int64), cuts])
        lengths_C = np.diff(begins_C, append=len(raw))
        keys_C2 = self._keys_of(padded_B, begins_C, lengths_C)
        slots_C, hit_C = self._find(keys_C2)
        hit_C &= lengths_C < KEY
        offsets_C, counts_C = self._offsets[slots_C], self._counts[slots_C]
        (missing,) = np.nonzero(~hit_C)
        kept = self._used
        if len(missing):
            ends = begins_C + lengths_C
            chunks = [
                raw[a:b] for a, b in zip(begins_C[missing].tolist(), ends[missing].tolist(), strict=True)
            ]
            offsets_C[missing], counts_C[missing], kept = self._encode(chunks, keys_C2[missing])
        starts_C = np.cumsum(counts_C) - counts_C
        index_N = np.repeat(offsets_C - starts_C, counts_C) + np.arange(counts_C.sum())
        found = self._ids[index_N]
        self._used = kept
        return found

    def _keys_of(self, padded_B: np.ndarray, begins_C: np.ndarray, lengths_C: np.ndarray) -> np.ndarray:
        short_C = np.minimum(lengths_C, KEY - 1)
        windows = np.lib.stride_tricks.sliding_window_view(padded_B, KEY)[begins_C] & KEPT[short_C]
        windows[:, -1] = short_C
        return windows.view(np.uint64)

    def _slots(self, keys_C2: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The two slots in which a key may stand."""
        mixed = keys_C2[:, 0] * np.uint64(0x9E3779B97F4A7C15) ^ keys_C2[:, 1] * np.uint64(0xC2B2AE3D27D4EB4F)
        mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(32)
        both = mixed, mixed >> np.uint64(32)
        return tuple((each & np.uint64(SLOTS - 1)).astype(np.int64) for each in both)  # type: ignore[return-value]

    def _find(self, keys_C2: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The slot of each key, and whether it stands there."""
        first, second = self._slots(keys_C2)
        at_first = (self._keys[first] == keys_C2).all(1)
        slots = np.where(at_first, first, second)
        return slots, at_first | (self._keys[second] == keys_C2).all(1)

    def _encode(self, chunks: list[bytes], keys: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
        """Chunks that the table lacks: (offsets, counts, end of the ids that stay)."""
        numbers: dict[bytes, int] = {}
        which = np.array([numbers.setdefault(chunk, len(numbers)) for chunk in chunks])
        places = [self._others.get(chunk, -1) for chunk in numbers]
        new = [number for number, place in enumerate(places) if place < 0]
        each = list(numbers)
        flat, sizes = self._at_once([each[i] for i in new]) if new else (np.empty(0, np.int32), [])
        end, kept = self._used + len(flat), self._used
        if end > len(self._ids):
            self._ids = np.concatenate([self._ids[: self._used], np.empty(2 * end, np.int32)])
        self._ids[self._used : end] = flat
        at = self._used
        for number, size in zip(new, sizes, strict=True):
            places[number] = at * MOST_PIECES + size
            at += size
        offsets, counts = np.divmod(np.array(places), MOST_PIECES)
        if new and self._known + len(self._others) < MOST_WORDS and self._used < MOST_IDS * MOST_WORDS:
            _, firsts = np.unique(which, return_index=True)
            inserted = self._insert(
                keys[firsts[new]], offsets[new], counts[new], np.array([len(each[i]) < KEY for i in new])
            )
            left = [
                i
                for i, there in zip(new, inserted.tolist(), strict=True)
                if not there and len(each[i]) <= LONGEST
            ]
            self._others |= {each[i]: places[i] for i in left}
            kept = end
        return offsets[which], counts[which], kept

    def _at_once(self, chunks: list[bytes]) -> tuple[np.ndarray, list[int]]:
        """Ids of chunks one behind the other, and the number of each one's. They are encoded as one text: an inner one
        begins with ASCII that is no letter and ends with a letter, so the text is cut between them."""
        (encoding,) = self._inner.encode_batch_fast([b"".join(chunks).decode()], add_special_tokens=False)
        flat = np.array(encoding.ids, np.int32)
        ends = np.cumsum(self._lengths[flat])
        borders = np.cumsum([len(chunk) for chunk in chunks])
        stops = np.searchsorted(ends, borders) + 1
        assert np.array_equal(ends[stops - 1], borders), "a token goes across the border of two chunks"
        return flat, np.diff(stops, prepend=0).tolist()

    def _insert(
        self, keys: np.ndarray, offsets: np.ndarray, counts: np.ndarray, short: np.ndarray
    ) -> np.ndarray:
        """Puts chunks into the table where one of their slots is free: True for these."""
        left = short.copy()
        for slots in self._slots(keys):
            (free,) = np.nonzero(left & (self._keys[slots, 1] == 0))
            _, one = np.unique(slots[free], return_index=True)  # of several for one slot, the first
            chosen = free[one]
            at = slots[chosen]
            self._keys[at], self._offsets[at], self._counts[at] = (
                keys[chosen],
                offsets[chosen],
                counts[chosen],
            )
            self._known += len(at)
            left[chosen] = False
        return short & ~left
