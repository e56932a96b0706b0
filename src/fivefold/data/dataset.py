"""What a run trains on: its data set, how tokens become sequences, and what stands at each place of the run.

`order_of` follows from the recipe and from how much there is of each source. What a run sees of each source follows
from it, before the run and after.

Documents may be packed whole into sequences (`data.packing = "best_fit"`). Best-fit packing (arXiv 2404.10830) cuts
documents only where they are longer than a sequence. All pieces, longest first, go into the fullest sequence that has
room for them. Each token of the source is a target exactly once.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fivefold.data import batches
from fivefold.data.kinds.kind import TOKENS
from fivefold.data.stream import ENDLESS, Stream
from fivefold.data.tokenizer import Tokenizer
from fivefold.data.tokens import COUNTED, ENDS, Tokens
from fivefold.errors import UserError
from fivefold.files import cache_folder, locked, writable, write_atomically
from fivefold.recipe import LeftOut, Recipe, batch_size, place, run_steps, sequences_before
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

    def read(self, numbers_R: np.ndarray) -> batches.Batch:
        shape = len(numbers_R), self.seq_len
        inputs, targets = np.full(shape, self.end, np.int64), np.full(shape, batches.NOT_COUNTED, np.int64)
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
                    targets[row, here][~counted] = batches.NOT_COUNTED
                at += length
        return batches.Batch(inputs, targets, first if self.masked else None)


def cut_of(recipe: Recipe, data: DataSet, tokens: Tokens | Stream, apart: bool = True) -> batches.Cut:
    """How tokens of a recipe become sequences. apart: False: documents are one text, whatever the recipe says."""
    section, seq_len = recipe.data, recipe.model.seq_len
    end, apart = end_of(recipe, data), apart and section.document_masks
    if section.packing == "best_fit":
        assert end is not None, "refused by the recipe's rules"
        assert isinstance(tokens, Tokens), "so is this for streams"
        return Packed(tokens, seq_len, end, apart, cache_folder(section.cache) / "packing")
    indexed = isinstance(tokens, Tokens) and tokens.indexed
    return batches.Concatenated(
        tokens, seq_len, batches.objective_of(recipe), end, apart and (end is not None or indexed)
    )


def unseparated(recipe: Recipe, tokens: Tokens | Stream, end: int | None) -> str:
    """A warning that no document of these token files ends with the end token; "" if one does, or if it has no use."""
    data, looked = recipe.data, min(len(tokens), SCANNED)
    separates = end is not None and (data.document_masks or data.packing == "best_fit")
    if not separates or isinstance(tokens, Stream) or not looked or len(tokens.ends(0, looked, end)):
        return ""
    return (
        f"data.end_token = {end}: none of the first {looked:,} tokens of {tokens.shards[0].path.parent} is it, so "
        "documents are not separated. Set the id with which the files' own tokenizer ends a document"
    )


def unseparated_parts(recipe: Recipe, data: DataSet) -> Iterator[str]:
    """`unseparated` of each source that is token files."""
    end = end_of(recipe, data)
    files = (part.train for part in data.parts if part.info["source"].startswith(TOKENS))
    yield from filter(None, (unseparated(recipe, tokens, end) for tokens in files))


def end_of(recipe: Recipe, data: DataSet) -> int | None:
    """The id of the token between documents; None: it is not known."""
    return recipe.data.end_token if data.tokenizer is None else data.tokenizer.end_id


def _index(tokens: Tokens, seq_len: int, end: int, folder: Path | None) -> np.ndarray:
    """Sequence, first target and length of each piece, sorted by sequence: int64 (3, pieces)."""

    def packed() -> np.ndarray:
        starts, lengths = pieces(tokens, seq_len, end)
        bins = best_fit(lengths, seq_len)
        order = np.argsort(bins, kind="stable")
        return np.stack([bins[order], starts[order], lengths[order]])

    if folder is None or not len(tokens):
        return packed()
    asked = hashlib.sha256(repr((tokens.identity(), seq_len, end)).encode()).hexdigest()[:32]
    path = folder / f"{asked}.bin"
    if not path.exists():
        with writable(folder), locked(path.with_suffix(".lock")):
            if not path.exists():
                write_atomically(path, packed().astype("<i8").tobytes())
    return np.memmap(path, "<i8", "r").reshape(3, -1)


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
    spaces = 0  # bit r is set if there are bins with r left
    decreasing = lengths[order]
    begins = np.flatnonzero(np.diff(decreasing, prepend=-1))  # of runs of equal lengths
    runs = decreasing[begins].tolist(), np.diff(begins, append=len(lengths)).tolist()
    for length, items in zip(*runs, strict=True):
        while items:
            if fits := spaces >> length:
                space = length + (fits & -fits).bit_length() - 1  # the smallest that is enough
                arrays = room.pop(space)
                there = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
                spaces ^= 1 << space
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
            for rest, numbers in rests:
                if rest and len(numbers):
                    room.setdefault(rest, []).append(numbers)
                    spaces |= 1 << rest
    return bins


class Amount(NamedTuple):
    """How much there is of a source: tokens to train on, items (sequences of an epoch), tokens held out (None: nothing
    shall be) and documents, if they are known."""

    tokens: int
    items: int
    held_out: int | None
    documents: int | None = None


def require_sequence(recipe: Recipe, name: str, tokens: int, items: int) -> None:
    """Raises UserError if a validation set has no sequence."""
    if not items:
        raise UserError(
            f"data.validation, {name}: {tokens:,} tokens, fewer than one sequence of model.seq_len = "
            f"{recipe.model.seq_len}"
        )


def weights_of(
    recipe: Recipe, sizes: Sequence[float], per_weight: Sequence[float] = ()
) -> Iterator[tuple[float, list[float]]]:
    """(share of the run, share of each source in it) of each stage. sizes: weights where the recipe gives none.
    per_weight: tokens per unit of a weight, if not the same for all."""
    section = recipe.data
    factors = per_weight or [1.0] * len(sizes)
    base = {entry.name: entry.weight for entry in section.sources}
    for share, changed in [(stage.share, stage.weights) for stage in section.stages] or [(1.0, None)]:
        weights = base if changed is None else {name: changed.get(name, 0.0) for name in base}
        weighted = [
            size if weight is None else weight * factor
            for weight, size, factor in zip(weights.values(), sizes, factors, strict=True)
        ]
        total = math.fsum(weighted)
        yield share, [weight / total for weight in weighted]


def amounts(recipe: Recipe, data: DataSet) -> dict[str, Amount]:
    """How much there is of each source."""
    return {
        part.name: Amount(
            len(part.train),
            cut_of(recipe, data, part.train).count,
            None if part.val is None else len(part.val),
            part.info.get("documents", {}).get("train"),
        )
        for part in data.parts
    }


def order_of(recipe: Recipe, amounts: Mapping[str, Amount]) -> batches.Order:
    """The order of a run over its sources. Raises UserError: weights are those of documents, and a source does not know
    its own."""
    if not recipe.data.sources:
        return batches.Order()
    per_weight: list[float] = []
    if recipe.data.weigh_by == "documents":
        for name, amount in amounts.items():
            if not amount.documents:
                raise UserError(
                    f'data.weigh_by = "documents": the number of documents of {name} is not known. Nearest valid: '
                    'weigh_by = "tokens"'
                )
            per_weight.append(amount.tokens / amount.documents)
    steps = run_steps(recipe)
    begins = recipe.data.first_steps(steps) if steps else [0]
    stages = weights_of(recipe, [float(amount.items) for amount in amounts.values()], per_weight)
    return batches.Order(
        [
            batches.Stage(sequences_before(recipe.train, begin), batches.whole_weights(shares))
            for begin, (_, shares) in zip(begins, stages, strict=False)
        ]
    )


class Seen(NamedTuple):
    """What a run has seen of a source. share: of all its items."""

    items: int
    tokens: int
    epochs: float
    share: float


def seen(
    recipe: Recipe,
    amounts: Mapping[str, Amount],
    step: int,
    left_out: LeftOut = (),
    order: batches.Order | None = None,
) -> dict[str, Seen]:
    """What the first `step` steps of a run see of each source. order: of `order_of`, if it is known."""
    order = order or order_of(recipe, amounts)
    end = place(recipe.train, step - 1, left_out) + batch_size(recipe.train, step - 1) if step else 0
    used, skipped = order.before(end), 0
    for after, size in left_out:
        if after < step:
            begin = sequences_before(recipe.train, after) + skipped
            parts = zip(used, order.before(begin + size), order.before(begin), strict=True)
            used, skipped = [n - (high - low) for n, high, low in parts], skipped + size
    return {
        name: Seen(
            count, count * recipe.model.seq_len, count / max(1, amount.items), count / max(1, sum(used))
        )
        for (name, amount), count in zip(amounts.items(), used, strict=True)
    }


def stages_in_words(recipe: Recipe, amounts: Mapping[str, Amount]) -> list[str]:
    """A line per stage: its first step, and the share of each source."""
    order, steps = order_of(recipe, amounts), run_steps(recipe)
    begins = recipe.data.first_steps(steps) if steps else [0]
    lines = []
    for begin, stage in zip(begins, order.stages, strict=True):
        whole = sum(stage.weights)
        shares = ", ".join(
            f"{name} {100 * weight / whole:.3g}%"
            for name, weight in zip(amounts, stage.weights, strict=True)
            if weight
        )
        lines.append(f"from step {begin + 1:,}: {shares}")
    return lines


def facts(recipe: Recipe, data: DataSet) -> dict[str, Any]:
    """What RUN/data.json keeps: how much there was of each source and validation set."""
    known, specs = amounts(recipe, data), recipe.data.specs
    sources = [
        {
            "name": part.name,
            "source": specs[part.name],
            "fingerprint": part.info.get("fingerprint"),
            **amount._asdict(),
            **({"tokens": None, "items": None} if amount.tokens == ENDLESS else {}),  # a stream's end
        }
        for part, amount in zip(data.parts, known.values(), strict=True)
    ]
    sets = [{"name": name, "tokens": len(tokens)} for name, tokens in data.validation_sets.items()]
    return {
        "sources": sources,
        "stages": stages_in_words(recipe, known) if data.mixed else [],
        "validation": sets,
    }


def require_enough(recipe: Recipe, amounts: Mapping[str, Amount], limited: bool = True) -> None:
    """Checks that there is enough data. limited: for the limits of epochs, too. Raises UserError: training has fewer
    sequences than one global batch, a source or what is held out of it has none, or the steps need more passes over a
    source than max_epochs allows."""
    T, B, data = recipe.model.seq_len, recipe.train.global_batch_size, recipe.data
    specs, tokens = data.specs, sum(amount.tokens for amount in amounts.values())
    named = {n: f"data.sources, {n}: {spec}" if n else f"data.source: {spec}" for n, spec in specs.items()}
    sequences = sum(amount.items for amount in amounts.values())
    if sequences < B:
        raise UserError(
            f"{named.get('', 'data.sources: their sum')} has {tokens:,} training tokens, "
            f"{sequences:,} sequences of model.seq_len = {T}: fewer than one batch of "
            f"train.global_batch_size = {B}. "
            + (f"Use at most {sequences} sequences per batch" if sequences else "Use a shorter model.seq_len")
            + ", or more text"
        )
    steps = run_steps(recipe)
    limits = {entry.name: entry.max_epochs for entry in data.sources}
    for name, row in seen(recipe, amounts, steps or 0).items():
        amount, count = amounts[name], row.items
        if amount.items < 1:
            raise UserError(
                f"{named[name]} has {amount.tokens:,} training tokens, fewer than one sequence of model.seq_len = {T}"
            )
        limit = (data.max_epochs if limits.get(name) is None else limits[name]) if limited else 0
        if limit and count > limit * amount.items:
            raise UserError(
                f"{named[name]} is too small for this run: {steps:,} steps of {B} sequences are "
                f"{count / amount.items:.2f} passes over its {amount.items:,} sequences, but "
                + (
                    f"its max_epochs allows {limit}. Give it a smaller weight. "
                    if limits.get(name) is not None
                    else f"data.max_epochs allows {limit}. "
                )
                + f"Use train.steps <= {int((steps or 0) * limit * amount.items / count):,}"
            )
        if amount.held_out is not None and batches.items_in(recipe, amount.held_out) < 1:
            what = f"the validation part of {name}" if name else "the validation part"
            raise UserError(
                f"data.source: {what} has {amount.held_out:,} tokens, fewer than one sequence of "
                f"model.seq_len = {T}. Increase data.val_fraction = {data.val_fraction}, or set it to 0"
            )
