"""Tokenizes a source into shards: learns the vocabulary, encodes on all cores, counts documents and tokens.

Every few seconds a journal beside the shards says how far they are. Who continues an interrupted folder cuts the shards
there, and starts with the next task.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fivefold.data.conversations import read_template, special_of
from fivefold.data.encode import (
    MIN_PARALLEL,
    Chunk,
    Setup,
    Summary,
    run,
    summary_from,
    training_texts,
)
from fivefold.data.kinds import Fields, File, Task, describe_bad
from fivefold.data.kinds.kind import SPAN, VAL
from fivefold.data.sources import Source
from fivefold.data.tasks import Place, samples, split_files, tasks
from fivefold.data.tokenizer import (
    Tokenizer,
    bytes_tokenizer,
    chars_tokenizer,
    cut_text,
    load_tokenizer,
    train_bpe,
)
from fivefold.data.tokens import FLAGS, FORMAT, NAMES, ShardWriter
from fivefold.errors import UserError
from fivefold.files import BROKEN, expanded, read_json, remove, write_atomically
from fivefold.precision import token_bytes
from fivefold.recipe.schema import DataSection

Progress = Callable[[str, int, int | None], None]  # (stage, bytes done, total bytes if known)
BPE_SAMPLE = 16 << 20  # characters of training text that BPE learns from; more hardly changes the merges
BPE_SAMPLE_PER_TASK = 2 << 20  # keeps one task with a huge row group from being the whole sample
JOURNAL = "journal.json"
JOURNAL_S = 5.0  # seconds of work that an interruption may cost


class Work:
    """The tasks of a source. files: what they name."""

    def __init__(self, source: Source, data: DataSection):
        self.hub, self.fields = source.hub, Fields(data.text_key, bool(data.chat_template))
        self.files, self.size = source.files, None if source.hub else source.size
        self.split = split_files(self.files, data.val_fraction, data.stream)

    def tasks(self, start: Place) -> Iterator[tuple[Task, Place]]:
        """Those from a place on, and the place behind each."""
        return tasks(self.split, self.fields, start)

    def samples(self, wanted: int) -> Iterator[Task]:
        """About so many, spread over the source; a hub data set gives its beginning."""
        if self.hub:
            return (task for task, _ in self.tasks([]))
        return samples(self.split, self.fields, wanted)


def noted(work: Iterable[tuple[Task, Place]], places: deque[Place]) -> Iterator[Task]:
    """The tasks, whose places go to `places` first."""
    for task, place in work:
        places.append(place)
        yield task


def build(
    source: Source, data: DataSection, mask: bool, folder: Path, workers: int, tell: Progress
) -> dict[str, Any]:
    """Writes tokenizer.json and the shards into `folder` and returns their manifest.

    Raises UserError for the first bad document if max_bad_fraction is 0, and for a source without text.
    """
    work = Work(source, data)
    files, size = work.files, work.size
    workers = workers if source.hub or source.size >= MIN_PARALLEL or any(f.url for f in files) else 1
    setup, journal = setup_of(files, data), _read_journal(folder)
    template = setup.template
    if journal:
        threshold, cut = journal["rule"]
        setup = dataclasses.replace(setup, threshold=threshold, cut=cut)
    while True:  # a second time if validation got no document or all of them
        if journal is None:
            _save_tokenizer(data, mask, Text(setup, work), folder, workers, tell)
        setup = with_tokenizer(setup, folder)
        summary, shards = _encode(work, setup, folder, journal, data.max_bad_fraction, workers, size, tell)
        other = _other_rule(setup, summary, data.val_fraction)
        if other is None:
            break
        setup, journal = other, None
    if sum(summary.documents) == 0 and not summary.bad_count:
        raise UserError(f"data.source: {data.source} holds no text; empty files: {max(1, len(files))}")
    return {
        "format": FORMAT,
        "source": data.source,
        "files": len(source.counted),
        "documents": dict(zip(NAMES, summary.documents, strict=True)),
        "bytes": dict(zip(NAMES, summary.bytes, strict=True)),
        "tokens": {split: sum(e["tokens"] for e in shards[split]) for split in NAMES},
        "skipped": {
            "bad": summary.bad_count,
            "pieces": summary.pieces,
            "first_bad": describe_bad(files, summary.bad[0]) if summary.bad else "",
            "empty": summary.empty + sum(f.size == 0 for f in source.counted),
            "ignored": sum(source.unknown.values()),
        },
        "dtype": setup.dtype,
        "shards": {name: shards[name] for name in NAMES},
        **({"flags": {name: shards[FLAGS + name] for name in NAMES}} if template else {}),
    }


def _save_tokenizer(
    data: DataSection, mask: bool, text: Text, folder: Path, workers: int, tell: Progress
) -> None:
    """Writes the tokenizer of a source. Nothing of it stays in memory while the workers encode."""
    tokenizer = learn(data, mask, [text], workers, tell)
    if data.chat_template:
        from fivefold.data.chat import open_template  # Jinja takes a moment to import

        tokenizer = open_template(data.chat_template, data.tokenizer, tokenizer).tokenizer
        tokenizer.chat_template = text.setup.template
    tokenizer.save(folder / "tokenizer.json")


def setup_of(files: list[File], data: DataSection) -> Setup:
    template = read_template(data.chat_template, data.tokenizer) if data.chat_template else ""
    return Setup(files, data.text_key, "encode", threshold=int(data.val_fraction * 2**64), template=template)


def with_tokenizer(setup: Setup, folder: Path) -> Setup:
    """The setup with the tokenizer of a folder."""
    path = folder / "tokenizer.json"
    item = token_bytes(load_tokenizer(path).vocab_size)
    return dataclasses.replace(setup, tokenizer=str(path), dtype=f"<u{item}")


def is_named(tokenizer: str) -> bool:
    """True if data.tokenizer is one of Fivefold's own, not a path."""
    return tokenizer in ("bytes", "chars") or tokenizer.startswith("bpe:")


def require_few_bad(skipped: dict[str, Any], max_bad_fraction: float) -> None:
    """Raises UserError if more documents are bad than the recipe allows."""
    if skipped["bad"] > max_bad_fraction * skipped["pieces"]:
        raise UserError(
            f"data.source: {skipped['bad']} of {skipped['pieces']} documents cannot be read, more than "
            f"data.max_bad_fraction = {max_bad_fraction} allows. The first: {skipped['first_bad']}"
        )


class Text(NamedTuple):
    """A source to learn a tokenizer from, and its share of what is learned from."""

    setup: Setup
    work: Work
    share: float = 1.0


def text_of(source: Source, data: DataSection, share: float) -> Text:
    """A source of several, from whose training part a common tokenizer is learned."""
    work = Work(source, data)
    return Text(setup_of(work.files, data), work, share)


def learn(data: DataSection, mask: bool, texts: Sequence[Text], workers: int, tell: Progress) -> Tokenizer:
    """The tokenizer that `data.tokenizer` names, learned from the texts if it asks for that."""
    if data.tokenizer == "bytes":
        return bytes_tokenizer(mask)
    if data.tokenizer == "chars":
        # Collect characters from all text, as nanoGPT does: those that only validation has need an id, too.
        found = Summary()
        for text in texts:
            own = workers if text.work.size is None or text.work.size >= MIN_PARALLEL else 1
            everything = (task for task, _ in text.work.tasks([]))
            for result in run(everything, dataclasses.replace(text.setup, mode="characters"), own):
                if isinstance(result, Summary):
                    found.add(result)
                    tell("collecting characters", found.read, text.work.size if len(texts) == 1 else None)
        return chars_tokenizer(found.characters, mask)
    if data.tokenizer.startswith("bpe:"):
        sample = (piece for text in texts for piece in _sample(text, tell))
        size = int(data.tokenizer.removeprefix("bpe:"))
        return train_bpe(sample, size, mask, special_of(data.chat_template))
    return load_tokenizer(expanded("data.tokenizer", data.tokenizer), mask)


def _sample(text: Text, tell: Progress) -> Iterator[str]:
    """About BPE_SAMPLE characters of training text, or a source's share of them. The same source gives the same."""
    most, size, taken = int(BPE_SAMPLE * text.share), text.work.size, 0
    for task in text.work.samples(max(1, most // SPAN)):
        here = 0
        for document in training_texts(task, text.setup):
            for piece in cut_text(document):
                yield piece
                here += len(piece)
                if here >= BPE_SAMPLE_PER_TASK:
                    break
            if here >= BPE_SAMPLE_PER_TASK:
                break
        taken += here
        tell("learning the vocabulary", taken, min(size or most, most))
        if taken >= most:
            return


def _read_journal(folder: Path) -> dict[str, Any] | None:
    """How far an interrupted folder is; None: it begins."""
    try:
        journal = read_json(folder / JOURNAL)
        summary_from(journal["summary"])
        shards = [folder / f"{name}-00000.bin" for name, n in journal["tokens"].items() if n]
        return journal if journal["format"] == FORMAT and all(path.exists() for path in shards) else None
    except (OSError, UserError, *BROKEN):
        return None


def _encode(
    work: Work,
    setup: Setup,
    folder: Path,
    journal: dict[str, Any] | None,
    max_bad_fraction: float,
    workers: int,
    size: int | None,
    tell: Progress,
) -> tuple[Summary, dict[str, list[dict[str, Any]]]]:
    """Writes the shards, from where the journal ends."""
    if journal is None:
        for left in [folder / JOURNAL, *folder.glob("*-*.bin"), *folder.glob("*-*.digests")]:
            remove(left)
    begun = journal or {"place": [], "tokens": {}, "summary": dataclasses.asdict(Summary())}
    total, place, saved = summary_from(begun["summary"]), begun["place"], time.monotonic()
    dtypes = dict.fromkeys(NAMES, setup.dtype)
    if setup.template:
        dtypes |= dict.fromkeys((FLAGS + name for name in NAMES), "|u1")
    writers = {
        name: ShardWriter(folder, name, dtype, count=begun["tokens"].get(name, 0))
        for name, dtype in dtypes.items()
    }
    if journal:
        tell(f"note: continuing after {total.read / 1e6:,.1f} MB that are tokenized", 0, None)
    places: deque[Place] = deque()
    try:
        for result in run(noted(work.tasks(place), places), setup, workers):
            if isinstance(result, Chunk):
                writers[NAMES[result.split]].write(np.asarray(result.ids))
                if result.flags is not None:
                    writers[FLAGS + NAMES[result.split]].write(result.flags)
                continue
            total.add(result)
            place = places.popleft()
            tell("tokenizing", total.read, size)
            if result.bad and max_bad_fraction == 0:
                raise UserError(
                    f"{describe_bad(setup.files, result.bad[0])} "
                    "(set data.max_bad_fraction to skip a share of bad documents)"
                )
            if time.monotonic() - saved >= JOURNAL_S:
                _write_journal(folder, setup, writers, total, place)
                saved = time.monotonic()
    finally:
        for writer in writers.values():
            writer.close()
    return total, {name: writer.entries() for name, writer in writers.items()}


def _write_journal(
    folder: Path, setup: Setup, writers: dict[str, ShardWriter], total: Summary, place: Place
) -> None:
    for writer in writers.values():
        writer.flush()
    journal = {
        "format": FORMAT,
        "rule": [setup.threshold, setup.cut],
        "place": place,
        "tokens": {name: writer.count for name, writer in writers.items()},
        "summary": dataclasses.asdict(total),
    }
    write_atomically(folder / JOURNAL, json.dumps(journal))


def _other_rule(setup: Setup, summary: Summary, val_fraction: float) -> Setup | None:
    """Another split rule if the hashes of few documents left one side empty, or None if both have documents."""
    if val_fraction == 0 or setup.cut or summary.low is None or summary.high is None:
        return None
    if sum(summary.documents) == 1:
        return dataclasses.replace(setup, cut=val_fraction)
    if summary.documents[VAL] == 0:
        return dataclasses.replace(setup, threshold=summary.low + 1)
    if summary.documents[VAL] == sum(summary.documents):
        return dataclasses.replace(setup, threshold=summary.high)
    return None
