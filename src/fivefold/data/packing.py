"""What a run trains on; documents that are packed whole into sequences (`data.packing = "best_fit"`).

Best-fit packing (arXiv 2404.10830) cuts documents only where they are longer than a sequence. All pieces, longest
first, go into the fullest sequence that has room for them. Each token of the source is a target exactly once.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fivefold.data.batches import NOT_COUNTED, Batch, Concatenated, Cut
from fivefold.data.stream import Stream
from fivefold.data.tokenizer import Tokenizer
from fivefold.data.tokens import COUNTED, ENDS, Tokens
from fivefold.files import cache_folder, locked, writable, write_atomically
from fivefold.models.card import card_of
from fivefold.recipe import Recipe
from fivefold.recipe.entries import HELD_OUT

SCANNED = 1 << 24  # tokens searched for the end token at once


class Part(NamedTuple):
    """A source with its two splits, or a validation set (all of it is `train`). name: "" of the only source. val: None
    if nothing is held out. info: as in `DataSet`."""

    name: str
    train: Tokens | Stream
    val: Tokens | None
    info: dict[str, Any]


@dataclass(frozen=True)
class DataSet:
    """The prepared data of a run.

    parts: the sources. train, val: the splits of the first one (train is a `Stream` with `data.stream`). validation:
    further sets. tokenizer: None for `tokens:` sources. vocab_size: all ids are below it. mask_id: the id of a hidden
    token, where the objective is `mlm`. info: source, fingerprint, folder, cached, documents / tokens / bytes per
    split, skipped documents.
    """

    parts: tuple[Part, ...]
    tokenizer: Tokenizer | None
    vocab_size: int
    mask_id: int | None
    info: dict[str, Any]
    validation: tuple[Part, ...] = ()

    @classmethod
    def of_one(
        cls,
        train: Tokens | Stream,
        val: Tokens | None,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        mask_id: int | None,
        info: dict[str, Any],
    ) -> DataSet:
        return cls((Part("", train, val, info),), tokenizer, vocab_size, mask_id, info)

    @property
    def mixed(self) -> bool:
        """There is a mixture, perhaps of one source."""
        return self.parts[0].name != ""

    @property
    def train(self) -> Tokens | Stream:
        return self.parts[0].train

    @property
    def val(self) -> Tokens | None:
        return self.parts[0].val

    @property
    def sources(self) -> dict[str, Tokens | Stream]:
        """The training split of each source by its name; the only one has none."""
        return {part.name: part.train for part in self.parts}

    @property
    def held_out(self) -> dict[str, Tokens]:
        """What is held out of each source, by the name of its validation set."""
        return {part.name or HELD_OUT: part.val for part in self.parts if part.val is not None}

    @property
    def validation_sets(self) -> dict[str, Tokens]:
        """All validation sets by name."""
        own = {part.name: part.train for part in self.validation if isinstance(part.train, Tokens)}
        assert len(own) == len(self.validation), "only training data are streamed"
        return self.held_out | own


class Packed:
    """Sequences of whole documents, and of pieces of those longer than a sequence; for the objective `causal`.

    A place that is left empty has the end token as input, is a document by itself and has no target that counts.
    masked: False: attention sees the whole sequence. `fill`: the share of places with a target.
    """

    uneven = True

    def __init__(
        self, tokens: Tokens, seq_len: int, end: int, masked: bool = True, folder: Path | None = None
    ):
        """folder: where the packing of these tokens is kept, once some process has computed it."""
        self.tokens, self.seq_len, self.end, self.masked = tokens, seq_len, end, masked
        index = _index(tokens, seq_len, end, folder)
        self.bins, self.starts, self.lengths = index[0], index[1], index[2]  # of each piece
        self.count = int(self.bins[-1]) + 1 if len(self.bins) else 0
        self.fill = len(tokens) / max(1, self.count * seq_len)

    def read(self, numbers_R: np.ndarray) -> Batch:
        shape = len(numbers_R), self.seq_len
        inputs, targets = np.full(shape, self.end, np.int64), np.full(shape, NOT_COUNTED, np.int64)
        first = np.tile(np.arange(self.seq_len), (len(numbers_R), 1))
        for row, number in enumerate(numbers_R.tolist()):
            pieces = slice(*np.searchsorted(self.bins, (number, number + 1)))
            at = 0
            for start, length in zip(
                self.starts[pieces].tolist(), self.lengths[pieces].tolist(), strict=True
            ):
                here = slice(at, at + length)
                seen = self.tokens[max(0, start - 1) : start + length]
                inputs[row, at : at + 1] = seen[0] if start else self.end
                inputs[row, at + 1 : at + length] = seen[-length:-1]
                targets[row, here], first[row, here] = seen[-length:], at
                if self.tokens.flags is not None:
                    counted = self.tokens.flags[start : start + length] & COUNTED > 0
                    targets[row, here][~counted] = NOT_COUNTED
                at += length
        return Batch(inputs, targets, first if self.masked else None)


def cut_of(recipe: Recipe, data: DataSet, tokens: Tokens | Stream, apart: bool = True) -> Cut:
    """How tokens of a recipe become sequences. apart: False: documents are one text, whatever the recipe says."""
    section, seq_len = recipe.data, recipe.model.seq_len
    end, apart = end_of(recipe, data), apart and section.document_masks
    if section.packing == "best_fit":
        assert end is not None, "refused by the recipe's rules"
        assert isinstance(tokens, Tokens), "so is this for streams"
        return Packed(tokens, seq_len, end, apart, cache_folder(section.cache) / "packing")
    objective = card_of(recipe.model).objective
    indexed = isinstance(tokens, Tokens) and tokens.indexed
    return Concatenated(tokens, seq_len, objective, end, apart and (end is not None or indexed))


def end_of(recipe: Recipe, data: DataSet) -> int | None:
    """The id of the token between documents; None: it is not known."""
    return recipe.data.end_token if data.tokenizer is None else data.tokenizer.end_id


def _index(tokens: Tokens, seq_len: int, end: int, folder: Path | None) -> np.ndarray:
    """Sequence, first target and length of each piece, sorted by sequence: int64 (3, pieces)."""
    if folder is None or not len(tokens):
        return _packed(tokens, seq_len, end)
    asked = hashlib.sha256(repr((tokens.identity(), seq_len, end)).encode()).hexdigest()[:32]
    path = folder / f"{asked}.bin"
    if not path.exists():
        with writable(folder), locked(path.with_suffix(".lock")):
            if not path.exists():
                write_atomically(path, _packed(tokens, seq_len, end).astype("<i8").tobytes())
    return np.memmap(path, "<i8", "r").reshape(3, -1)


def _packed(tokens: Tokens, seq_len: int, end: int) -> np.ndarray:
    starts, lengths = pieces(tokens, seq_len, end)
    bins = best_fit(lengths, seq_len)
    order = np.argsort(bins, kind="stable")
    return np.stack([bins[order], starts[order], lengths[order]])


def pieces(tokens: Tokens, seq_len: int, end: int) -> tuple[np.ndarray, np.ndarray]:
    """The first target and the number of targets of each document, with the end token behind it. Documents longer than
    a sequence are cut into pieces of T tokens, and a rest."""
    n, flags = len(tokens), tokens.flags

    def found(a: int) -> tuple[np.ndarray, np.ndarray]:
        """The last tokens of documents, and 1 for those behind which the next document's first token is no target."""
        here = slice(a, a + SCANNED)
        if flags is not None:
            ends = np.flatnonzero(flags[here] & ENDS > 0) + a
            return ends, np.ones_like(ends)
        if tokens.indexed:
            ends = tokens.ends(a, min(n, a + SCANNED), end)
            return ends, (tokens[here][ends - a] != end).astype(np.int64)
        ends = np.flatnonzero(tokens[here] == end) + a
        return ends, np.zeros_like(ends)

    none = np.empty(0, np.int64), np.empty(0, np.int64)
    ends, skipped = map(np.concatenate, zip(none, *(found(a) for a in range(0, n, SCANNED)), strict=True))
    stops = ends + 1
    starts = np.append(0, stops) + np.append(flags is not None, skipped)
    if len(stops) and stops[-1] == n:
        starts = starts[:-1]
    else:
        stops = np.append(stops, n)
    parts = -(-(stops - starts) // seq_len)
    number = np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)  # of a piece in its document
    first = np.repeat(starts, parts) + number * seq_len
    return first, np.minimum(np.repeat(stops, parts) - first, seq_len)


def best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Best-fit decreasing: the bin of each item, 0, 1, ... Each goes into the fullest bin that has room for it.

    Bins with equal room are filled together, so the work grows with the number of different lengths, not with that of
    items.
    """
    order = np.argsort(-lengths, kind="stable")
    bins, count, at = np.empty(len(lengths), np.int64), 0, 0
    room: dict[int, list[np.ndarray]] = {}  # bins by what is left in them
    left = 0  # bit r is set if there are bins with r left
    for length, items in zip(*_runs(lengths[order]), strict=True):
        while items:
            if fits := left >> length:
                space = length + (fits & -fits).bit_length() - 1  # the smallest that is enough
                there = _joined(room.pop(space))
                left ^= 1 << space
            else:
                space = capacity
                there = np.arange(count, count - (-items // (capacity // length)))
                count += len(there)
            each = space // length  # after the first item of a bin, none has less room than this one
            used, unused = np.split(there, [-(-items // each)])
            taken = np.repeat(used, each)[:items]
            bins[order[at : at + len(taken)]] = taken
            at, items = at + len(taken), items - len(taken)
            last = len(taken) - each * (len(used) - 1)
            rests = ((space - each * length, used[:-1]), (space - last * length, used[-1:]), (space, unused))
            for rest, some in rests:
                if rest and len(some):
                    room.setdefault(rest, []).append(some)
                    left |= 1 << rest
    return bins


def _joined(arrays: list[np.ndarray]) -> np.ndarray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _runs(values: np.ndarray) -> tuple[list[int], list[int]]:
    """The values of a sorted array, and how often each comes."""
    begins = np.flatnonzero(np.diff(values, prepend=-1))
    return values[begins].tolist(), np.diff(begins, append=len(values)).tolist()
