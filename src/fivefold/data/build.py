"""Tokenizes a source into shards: learns the vocabulary, encodes on all cores, counts documents and tokens.

One thread reads documents and hands them out in groups of about a megabyte; a thread per core encodes them, since the
tokenizers' library works without Python's lock. Results come in the order of documents, so shards do not depend on
timing. Few groups are under way, so memory is bounded.

Every few seconds a journal beside the shards says how far they are. Who continues an interrupted folder cuts the shards
there, and starts with the next document.
"""

from __future__ import annotations

import dataclasses
import json
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fivefold.data.conversations import NotAConversation, read_template, special_of
from fivefold.data.kinds import describe_bad
from fivefold.data.kinds.kind import BY_RULE, SPAN, TRAIN, VAL, Bad, Document, Fields, File
from fivefold.data.sources import FileSplit, Place, Source, document_hash, split_files
from fivefold.data.tokenizer import (
    Tokenizer,
    bytes_tokenizer,
    chars_tokenizer,
    cut_text,
    load_tokenizer,
    train_bpe,
)
from fivefold.data.tokens import COUNTED, ENDS, FLAGS, FORMAT, NAMES, ShardWriter, Tell
from fivefold.errors import UserError
from fivefold.files import BROKEN, expanded, read_json, remove, write_atomically
from fivefold.precision import token_bytes
from fivefold.recipe.schema import DataSection

if TYPE_CHECKING:
    from fivefold.data.chat import ChatTemplate, Encoded

BPE_SAMPLE = 16 << 20  # characters of training text that BPE learns from; more hardly changes the merges
BPE_PIECES = 16  # of a document, each of 128 Ki characters, so that a huge one is not the whole sample
JOURNAL = "journal.json"
JOURNAL_S = 5.0  # seconds of work that an interruption may cost
REPORTED_BAD = 20  # bad documents that are described; further ones are only counted


@dataclass
class Summary:
    """Counts of documents.

    documents, bytes (of UTF-8 text): for train and validation. pieces: documents, where each piece of a long text
    counts as one. low, high: lowest and highest hash of documents split by rule. characters: the distinct ones, if they
    are collected.
    """

    documents: list[int] = field(default_factory=lambda: [0, 0])
    bytes: list[int] = field(default_factory=lambda: [0, 0])
    empty: int = 0
    pieces: int = 0
    bad_count: int = 0
    bad: list[Bad] = field(default_factory=list)
    low: int | None = None
    high: int | None = None
    characters: str = ""

    def add(self, other: Summary) -> None:
        self.documents = [a + b for a, b in zip(self.documents, other.documents, strict=True)]
        self.bytes = [a + b for a, b in zip(self.bytes, other.bytes, strict=True)]
        self.empty += other.empty
        self.pieces += other.pieces
        self.bad_count += other.bad_count
        self.bad = [*self.bad, *other.bad][:REPORTED_BAD]
        self.low = min((x for x in (self.low, other.low) if x is not None), default=None)
        self.high = max((x for x in (self.high, other.high) if x is not None), default=None)
        if not set(other.characters) <= set(self.characters):
            self.characters = "".join(sorted(set(self.characters) | set(other.characters)))

    @classmethod
    def of(cls, value: dict[str, Any]) -> Summary:
        """From JSON."""
        return cls(**{**value, "bad": [Bad(*bad) for bad in value["bad"]]})


class Encoder(NamedTuple):
    """What turns documents into ids. template: for conversations."""

    tokenizer: Tokenizer
    template: ChatTemplate | None = None


@dataclass(frozen=True)
class Work:
    """A source to tokenize, and how. size: its bytes; None: they are not known.

    Documents marked BY_RULE go to validation if their hash is below `threshold`. If the source is one such document,
    the share `cut` at its end goes to validation. template: the Jinja text for conversations; "": all rows are texts.
    encoder: None: only characters are collected.
    """

    split: FileSplit
    fields: Fields
    size: int | None
    threshold: int
    cut: float = 0.0
    template: str = ""
    encoder: Encoder | None = None

    @classmethod
    def of(cls, source: Source, data: DataSection) -> Work:
        template = read_template(data.chat_template, data.tokenizer) if data.chat_template else ""
        split = split_files(source.files, data.val_fraction, data.stream)
        threshold, size = int(data.val_fraction * 2**64), None if source.hub else source.size
        return cls(split, Fields(data.text_key, bool(template)), size, threshold, template=template)

    def with_tokenizer(self, folder: Path) -> Work:
        """Encodes by the tokenizer of a folder."""
        tokenizer, template = load_tokenizer(folder / "tokenizer.json"), None
        if self.template:
            from fivefold.data.chat import ChatTemplate  # Jinja takes a moment to import

            template = ChatTemplate(self.template, tokenizer)
        return dataclasses.replace(self, encoder=Encoder(tokenizer, template))

    @property
    def dtype(self) -> str:
        """Of the ids."""
        assert self.encoder is not None
        return f"<u{token_bytes(self.encoder.tokenizer.vocab_size)}"


class Chunk(NamedTuple):
    """Consecutive ids of one split, and their flags (uint8) if some rows may be conversations."""

    split: int
    ids: np.ndarray
    flags: np.ndarray | None = None


class Group(NamedTuple):
    """A group of documents as ids. place: where reading continues behind it."""

    chunks: list[Chunk]
    summary: Summary
    place: Place


def run(work: Work, start: Place, workers: int) -> Iterator[Group]:
    """The documents from a place on, encoded in groups."""
    ahead: deque[Future[Group]] = deque()
    stopped = threading.Event()
    with _in_its_thread(), ThreadPoolExecutor(workers, "fivefold-tokenize") as pool:
        try:
            for documents, place in _groups(work, start):
                ahead.append(pool.submit(_encoded, documents, place, work, stopped))
                if len(ahead) > 2 * workers:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            stopped.set()
            for group in ahead:
                group.cancel()


@contextmanager
def _in_its_thread() -> Iterator[None]:
    """The library encodes a text in the thread that asks: threads of its own would only wait for one another."""
    name = "TOKENIZERS_PARALLELISM"
    if name in os.environ:
        yield
        return
    os.environ[name] = "false"
    try:
        yield
    finally:
        os.environ.pop(name, None)


def _groups(work: Work, start: Place) -> Iterator[tuple[list[Document | Bad], Place]]:
    """Documents of about SPAN characters, and the place behind them. Bad ones count more, so that the first groups of a
    source that is all bad end early: then it is refused. A bad piece of a text ends no group, since its place is that
    before it."""
    documents: list[Document | Bad] = []
    size, place = 0, start
    for document, behind in work.split.documents(work.fields, start):
        documents.append(document)
        size += 1 + len(document.text) if isinstance(document, Document) else SPAN // REPORTED_BAD
        moved, place = behind != place, behind
        if size >= SPAN and moved:
            yield documents, place
            documents, size = [], 0
    if documents:
        yield documents, place


def _encoded(
    documents: Sequence[Document | Bad], place: Place, work: Work, stopped: threading.Event
) -> Group:
    """stopped: nobody waits for the group any more."""
    summary, encoder = Summary(), work.encoder
    ids: tuple[list[np.ndarray], ...] = ([], [])
    flags: tuple[list[np.ndarray], ...] = ([], [])
    for document in documents:
        if stopped.is_set():
            break
        summary.pieces += 1
        talk: Encoded | None = None
        if isinstance(document, Document) and document.messages is not None and encoder is not None:
            assert encoder.template is not None
            try:
                talk = encoder.template.encode(document.messages)
            except (NotAConversation, UserError) as error:
                document = Bad(document.file, document.place, str(error))
        if isinstance(document, Bad):
            summary.bad_count += 1
            summary.bad = [*summary.bad, document][:REPORTED_BAD]
            continue
        if encoder is None:
            summary.characters = "".join(set(summary.characters).union(*_characters(document, work)))
        for split, text, end in _parts(document, work, summary):
            if encoder is not None:
                tokens, counted = _tokens(text, talk, end, encoder)
                ids[split].append(tokens.astype(work.dtype))
                flags[split].append(counted)
    chunks = []
    for split in (TRAIN, VAL):
        if ids[split]:
            counted = np.concatenate(flags[split]) if work.template else None
            chunks.append(Chunk(split, np.concatenate(ids[split]), counted))
    return Group(chunks, summary, place)


def _tokens(text: str, talk: Encoded | None, end: bool, encoder: Encoder) -> tuple[np.ndarray, np.ndarray]:
    """Ids and flags of a text, or of a conversation, whose end token does not count."""
    if talk is not None:
        ids, counted = [talk.ids], talk.counted * np.uint8(COUNTED)
    else:  # rows of .jsonl and .parquet can be longer than a span
        starts = range(0, len(text), SPAN)
        ids = [encoder.tokenizer.encode_array(text[start : start + SPAN]) for start in starts]
        counted = np.full(sum(map(len, ids)), COUNTED, np.uint8)
    if end:
        ids.append(np.array([encoder.tokenizer.end_id]))
        counted = np.append(counted, np.uint8(ENDS if talk is not None else ENDS | COUNTED))
    return np.concatenate([np.empty(0, np.uint8), *ids]), counted.astype(np.uint8)


def _characters(document: Document, work: Work) -> list[str]:
    """Texts that hold all characters of a document, also of its rendered form."""
    roles = [str(message["role"]) for message in document.messages or ()]
    return [document.text, *([work.template, *roles, *map(str.title, roles)] if roles else [])]


def _parts(document: Document, work: Work, summary: Summary) -> Iterator[tuple[int, str, bool]]:
    """(split, text, whether an end token follows) for a document, or for both parts of one that is cut."""
    text, split, ends = document.text, document.split, document.ends
    if split == BY_RULE and not text:
        summary.empty += 1
        return
    parts = [(split, text, ends)]
    if split == BY_RULE and work.cut and document.messages is None:
        at = int(len(text) * (1 - work.cut))
        parts = [(TRAIN, text[:at], False), (VAL, text[at:], False)]
    elif split == BY_RULE:
        number = document_hash(work.split.files[document.file].name, document.place)
        summary.low = number if summary.low is None else min(summary.low, number)
        summary.high = number if summary.high is None else max(summary.high, number)
        parts = [(VAL if number < work.threshold else TRAIN, text, ends)]
    summary.documents[parts[0][0]] += document.begins
    for part in parts:
        summary.bytes[part[0]] += len(part[1].encode())
        yield part


def build(
    source: Source, data: DataSection, mask: bool, folder: Path, workers: int, tell: Tell
) -> dict[str, Any]:
    """Writes tokenizer.json and the shards into `folder` and returns their manifest.

    Raises UserError for the first bad document if max_bad_fraction is 0, and for a source without text.
    """
    work, journal = Work.of(source, data), _read_journal(folder)
    if journal:
        threshold, cut = journal["rule"]
        work = dataclasses.replace(work, threshold=threshold, cut=cut)
    while True:  # a second time if validation got no document or all of them
        if journal is None:
            save_tokenizer(data, mask, work, folder, workers, tell)
        work = work.with_tokenizer(folder)
        summary, shards = _write_shards(work, folder, journal, data.max_bad_fraction, workers, tell)
        other = _other_rule(work, summary, data.val_fraction)
        if other is None:
            break
        work, journal = other, None
    files = source.files
    if sum(summary.documents) == 0 and not summary.bad_count:
        raise UserError(f"data.source: {data.source} holds no text; empty files: {max(1, len(files))}")
    return {
        "format": FORMAT,
        "source": data.source,
        "files": len(source.counted),
        "documents": dict(zip(NAMES, summary.documents, strict=True)),
        "bytes": dict(zip(NAMES, summary.bytes, strict=True)),
        "tokens": {split: sum(e["tokens"] for e in shards[split]) for split in NAMES},
        "skipped": skipped(summary, files)
        | {
            "empty": summary.empty + sum(f.size == 0 for f in source.counted),
            "ignored": sum(source.unknown.values()),
        },
        "dtype": work.dtype,
        "shards": {name: shards[name] for name in NAMES},
        **({"flags": {name: shards[FLAGS + name] for name in NAMES}} if work.template else {}),
    }


def skipped(summary: Summary, files: list[File]) -> dict[str, Any]:
    """How many documents were bad, for `require_few_bad`."""
    first = describe_bad(files, summary.bad[0]) if summary.bad else ""
    return {"bad": summary.bad_count, "pieces": summary.pieces, "first_bad": first}


def require_few_bad(skipped: dict[str, Any], max_bad_fraction: float) -> None:
    """Raises UserError if more documents are bad than the recipe allows."""
    if skipped["bad"] > max_bad_fraction * skipped["pieces"]:
        raise UserError(
            f"data.source: {skipped['bad']} of {skipped['pieces']} documents cannot be read, more than "
            f"data.max_bad_fraction = {max_bad_fraction} allows. The first: {skipped['first_bad']}"
        )


def require_good(files: list[File], bad: Sequence[Bad], max_bad_fraction: float) -> None:
    """Raises UserError for the first bad document if none is allowed."""
    if bad and max_bad_fraction == 0:
        raise UserError(
            f"{describe_bad(files, bad[0])} (set data.max_bad_fraction to skip a share of bad documents)"
        )


def is_named(tokenizer: str) -> bool:
    """True if data.tokenizer is one of Fivefold's own, not a path."""
    return tokenizer in ("bytes", "chars") or tokenizer.startswith("bpe:")


def save_tokenizer(data: DataSection, mask: bool, work: Work, folder: Path, workers: int, tell: Tell) -> None:
    """Writes the tokenizer of a source."""
    tokenizer = learn(data, mask, [(work, 1.0)], workers, tell)
    if data.chat_template:
        from fivefold.data.chat import open_template  # Jinja takes a moment to import

        tokenizer = open_template(data.chat_template, data.tokenizer, tokenizer).tokenizer
        tokenizer.chat_template = work.template
    tokenizer.save(folder / "tokenizer.json")


def learn(
    data: DataSection, mask: bool, texts: Sequence[tuple[Work, float]], workers: int, tell: Tell
) -> Tokenizer:
    """The tokenizer that `data.tokenizer` names, learned from sources if it asks for that: each by its share."""
    if data.tokenizer == "bytes":
        return bytes_tokenizer(mask)
    if data.tokenizer == "chars":
        # Collect characters from all text, as nanoGPT does: those that only validation has need an id, too.
        total = Summary()
        for work, _ in texts:
            for group in run(dataclasses.replace(work, encoder=None), [], workers):
                total.add(group.summary)
                tell("collecting characters", sum(total.bytes), work.size if len(texts) == 1 else None)
        return chars_tokenizer(total.characters, mask)
    if data.tokenizer.startswith("bpe:"):
        sample = (piece for work, share in texts for piece in _sample(work, share, tell))
        size = int(data.tokenizer.removeprefix("bpe:"))
        return train_bpe(sample, size, mask, special_of(data.chat_template))
    return load_tokenizer(expanded("data.tokenizer", data.tokenizer), mask)


def _sample(work: Work, share: float, tell: Tell) -> Iterator[str]:
    """About BPE_SAMPLE characters of training text, or a source's share of them. The same source gives the same."""
    most, taken = int(BPE_SAMPLE * share), 0
    for document in work.split.samples(work.fields, max(1, most // SPAN)):
        for split, text, _ in _parts(document, work, Summary()):
            for piece in islice(cut_text(text), BPE_PIECES) if split == TRAIN else ():
                yield piece
                taken += len(piece)
        tell("learning the vocabulary", taken, min(work.size or most, most))
        if taken >= most:
            return


def _read_journal(folder: Path) -> dict[str, Any] | None:
    """How far an interrupted folder is; None: it begins."""
    try:
        journal = read_json(folder / JOURNAL)
        Summary.of(journal["summary"])
        shards = [folder / f"{name}-00000.bin" for name, n in journal["tokens"].items() if n]
        whole = "done" in journal and all(path.exists() for path in shards)
        return journal if journal["format"] == FORMAT and whole else None
    except (OSError, UserError, *BROKEN):
        return None


def _write_shards(
    work: Work,
    folder: Path,
    journal: dict[str, Any] | None,
    max_bad_fraction: float,
    workers: int,
    tell: Tell,
) -> tuple[Summary, dict[str, list[dict[str, Any]]]]:
    """Writes the shards, from where the journal ends."""
    if journal is None:
        for left in [folder / JOURNAL, *folder.glob("*-*.bin"), *folder.glob("*-*.digests")]:
            remove(left)
    begun = journal or {"done": [], "tokens": {}, "summary": dataclasses.asdict(Summary())}
    total, saved = Summary.of(begun["summary"]), time.monotonic()
    dtypes = dict.fromkeys(NAMES, work.dtype)
    if work.template:
        dtypes |= dict.fromkeys((FLAGS + name for name in NAMES), "|u1")
    writers = {
        name: ShardWriter(folder, name, dtype, count=begun["tokens"].get(name, 0))
        for name, dtype in dtypes.items()
    }
    if journal:
        tell(f"note: continuing after {sum(total.bytes) / 1e6:,.1f} MB that are tokenized", 0, None)
    try:
        for group in run(work, begun["done"], workers):
            for split, ids, flags in group.chunks:
                writers[NAMES[split]].write(ids)
                if flags is not None:
                    writers[FLAGS + NAMES[split]].write(flags)
            total.add(group.summary)
            tell("tokenizing", sum(total.bytes), work.size)
            require_good(work.split.files, group.summary.bad, max_bad_fraction)
            if time.monotonic() - saved >= JOURNAL_S:
                _write_journal(folder, work, writers, total, group.place)
                saved = time.monotonic()
    finally:
        for writer in writers.values():
            writer.close()
    return total, {name: writer.entries() for name, writer in writers.items()}


def _write_journal(
    folder: Path, work: Work, writers: dict[str, ShardWriter], total: Summary, done: Place
) -> None:
    for writer in writers.values():
        writer.flush()
    journal = {
        "format": FORMAT,
        "rule": [work.threshold, work.cut],
        "done": done,
        "tokens": {name: writer.count for name, writer in writers.items()},
        "summary": dataclasses.asdict(total),
    }
    write_atomically(folder / JOURNAL, json.dumps(journal))


def _other_rule(work: Work, summary: Summary, val_fraction: float) -> Work | None:
    """Another split rule if the hashes of few documents left one side empty, or None if both have documents."""
    if val_fraction == 0 or work.cut or summary.low is None or summary.high is None:
        return None
    if sum(summary.documents) == 1:
        return dataclasses.replace(work, cut=val_fraction)
    if summary.documents[VAL] == 0:
        return dataclasses.replace(work, threshold=summary.low + 1)
    if summary.documents[VAL] == sum(summary.documents):
        return dataclasses.replace(work, threshold=summary.high)
    return None
