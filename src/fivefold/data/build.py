"""Tokenizes a source into shards: learns the vocabulary, encodes on all cores, counts documents and tokens.

One thread reads documents and hands them out in groups of about a megabyte; a thread per core encodes them, since the
tokenizers' library works without Python's lock. Results come in the order of documents, so shards do not depend on
timing. Few groups are under way, so memory is bounded.

Every few seconds a journal beside the shards says how far they are. Who continues an interrupted folder cuts the shards
there, and starts with the next document.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fivefold.data.chat import (
    ChatTemplate,
    Encoded,
    NotAConversation,
    open_template,
    read_template,
    special_of,
)
from fivefold.data.kinds import describe_bad
from fivefold.data.kinds.kind import BY_RULE, SPAN, TRAIN, VAL, Bad, Document, Fields, File
from fivefold.data.pieces import cut_text
from fivefold.data.sources import FileSplit, Place, Source, document_hash, split_files
from fivefold.data.tokenizer import (
    Tokenizer,
    bytes_tokenizer,
    chars_tokenizer,
    load_tokenizer,
    train_bpe,
)
from fivefold.data.tokens import (
    COUNTED,
    ENDS,
    FLAGS,
    FORMAT,
    JOURNAL,
    NAMES,
    Commit,
    Journal,
    ShardWriter,
    Tell,
    continued,
    has_tokenizer,
    seal_tokenizer,
)
from fivefold.errors import UserError
from fivefold.files import expanded, remove
from fivefold.precision import token_bytes
from fivefold.recipe.schema import DataSection

BPE_SAMPLE = 16 << 20  # characters of training text that BPE learns from; more hardly changes the merges
BPE_PIECES = 16  # of a document, each of 128 Ki characters, so that a huge one is not the whole sample
THREADS = "TOKENIZERS_PARALLELISM"  # a variable of the environment
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
    def of(cls, value: dict[str, Any] | None) -> Summary:
        """From JSON; None: of no documents."""
        return cls(**{**value, "bad": [Bad(*bad) for bad in value["bad"]]}) if value else cls()


@dataclass(frozen=True)
class Work:
    """A source to tokenize, and how. size: its bytes; None: they are not known.

    Documents marked BY_RULE go to validation if their hash is below `threshold`. If the source is one such document,
    the share `cut` at its end goes to validation. template: the Jinja text for conversations; "": all rows are texts.
    tokenizer: None: only characters are collected. chat: renders and encodes conversations.
    """

    split: FileSplit
    fields: Fields
    size: int | None
    threshold: int
    cut: float = 0.0
    template: str = ""
    tokenizer: Tokenizer | None = None
    chat: ChatTemplate | None = None

    @classmethod
    def of(cls, source: Source, data: DataSection) -> Work:
        template = read_template(data.chat_template, data.tokenizer) if data.chat_template else ""
        split = split_files(source.files, data.val_fraction, data.stream)
        threshold, size = int(data.val_fraction * 2**64), None if source.hub else source.size
        return cls(split, Fields(data.text_key, bool(template)), size, threshold, template=template)

    def with_tokenizer(self, folder: Path) -> Work:
        """Encodes by the tokenizer of a folder."""
        tokenizer = load_tokenizer(folder / "tokenizer.json")
        chat = ChatTemplate(self.template, tokenizer) if self.template else None
        return dataclasses.replace(self, tokenizer=tokenizer, chat=chat)

    @property
    def dtype(self) -> str:
        """Of the ids."""
        assert self.tokenizer is not None
        return f"<u{token_bytes(self.tokenizer.vocab_size)}"


class Chunk(NamedTuple):
    """Consecutive ids of one split, and their flags (uint8) if some rows may be conversations."""

    split: int
    ids: np.ndarray
    flags: np.ndarray | None = None


Group = tuple[list[Chunk], Summary, Place]
"""A group of documents as ids, their counts, and where reading continues behind it."""


def run(work: Work, start: Place, workers: int) -> Iterator[Group]:
    """The documents from a place on, encoded in groups."""
    ahead: deque[Future[Group]] = deque()
    stopped = threading.Event()
    # The library encodes a text in the thread that asks: threads of its own would only wait for one another.
    library_threads = os.environ.get(THREADS)
    os.environ.setdefault(THREADS, "false")
    with ThreadPoolExecutor(workers, "fivefold-tokenize") as pool:
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
            if library_threads is None:
                os.environ.pop(THREADS, None)


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
    summary = Summary()
    ids: tuple[list[np.ndarray], ...] = ([], [])
    flags: tuple[list[np.ndarray], ...] = ([], [])
    for document in documents:
        if stopped.is_set():
            break
        summary.pieces += 1
        messages = None if isinstance(document, Bad) else document.messages
        conversation: Encoded | None = None
        if messages is not None and work.chat is not None:
            try:
                conversation = work.chat.encode(messages)
            except (NotAConversation, UserError) as error:
                document = Bad(document.file, document.place, str(error))
        if isinstance(document, Bad):
            summary.bad_count += 1
            summary.bad = [*summary.bad, document][:REPORTED_BAD]
            continue
        if work.tokenizer is None:  # collect characters, also those of the rendered form
            roles = [str(message["role"]) for message in messages or ()]
            texts = [document.text, *([work.template, *roles, *map(str.title, roles)] if roles else [])]
            summary.characters = "".join(set(summary.characters).union(*texts))
        for split, text, end in _parts(document, work, summary):
            if work.tokenizer is not None:
                tokens, counted = _tokens(text, conversation, end, work.tokenizer, not document.begins)
                ids[split].append(tokens.astype(work.dtype))
                flags[split].append(counted)
    chunks = []
    for split in (TRAIN, VAL):
        if ids[split]:
            counted = np.concatenate(flags[split]) if work.template else None
            chunks.append(Chunk(split, np.concatenate(ids[split]), counted))
    return chunks, summary, place


def _tokens(
    text: str, conversation: Encoded | None, end: bool, tokenizer: Tokenizer, continues: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Ids and flags of a text, or of a conversation, whose end token does not count."""
    if conversation is not None:
        ids, counted = [conversation.ids], conversation.counted * np.uint8(COUNTED)
    else:
        ids = [tokenizer.encode_array(text, continues)]
        counted = np.full(len(ids[0]), COUNTED, np.uint8)
    if end:
        ids.append(np.array([tokenizer.end_id]))
        counted = np.append(counted, np.uint8(ENDS if conversation is not None else ENDS | COUNTED))
    return np.concatenate([np.empty(0, np.uint8), *ids]), counted.astype(np.uint8)


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
    work, files = Work.of(source, data), source.files
    prefixes = ("", FLAGS) if work.template else ("",)
    journal = continued(folder, prefixes)
    if journal is not None and not has_tokenizer(folder):
        remove(folder / JOURNAL)
        journal = continued(folder, prefixes)
    if journal is not None:
        threshold, cut = journal.rule
        work = dataclasses.replace(work, threshold=threshold, cut=cut)
    while True:  # a second time if validation got no document or all of them
        if journal is None:
            save_tokenizer(data, mask, work, folder, workers, tell)
        work = work.with_tokenizer(folder)
        summary, writers = _write_shards(work, folder, journal, data.max_bad_fraction, workers, tell)
        other = _other_rule(work, summary, data.val_fraction)
        if other is None:
            break
        remove(folder / JOURNAL)
        work, journal = other, continued(folder)
    if sum(summary.documents) == 0 and not summary.bad_count:
        raise UserError(f"data.source: {data.source} holds no text; empty files: {max(1, len(files))}")
    shards = {prefix: {split: writers[prefix + split].entries() for split in NAMES} for prefix in prefixes}
    return {
        "format": FORMAT,
        "source": data.source,
        "files": len(source.counted),
        "documents": dict(zip(NAMES, summary.documents, strict=True)),
        "bytes": dict(zip(NAMES, summary.bytes, strict=True)),
        "tokens": {split: writers[split].count for split in NAMES},
        "skipped": skipped(summary, files)
        | {
            "empty": summary.empty + sum(f.size == 0 for f in source.counted),
            "ignored": sum(source.unknown.values()),
        },
        "dtype": work.dtype,
        "shards": shards[""],
        **({"flags": shards[FLAGS]} if work.template else {}),
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


def is_learned(tokenizer: str) -> bool:
    """True if data.tokenizer is learned from the text."""
    return tokenizer == "chars" or tokenizer.startswith("bpe:")


def save_tokenizer(data: DataSection, mask: bool, work: Work, folder: Path, workers: int, tell: Tell) -> None:
    tokenizer = learn(data, mask, [(work, 1.0)], workers, tell)
    if data.chat_template:
        tokenizer = open_template(data.chat_template, data.tokenizer, tokenizer).tokenizer
        tokenizer.chat_template = work.template
    tokenizer.save(folder / "tokenizer.json")
    seal_tokenizer(folder)


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
            for _, summary, _ in run(dataclasses.replace(work, tokenizer=None, chat=None), [], workers):
                total.add(summary)
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


def tokenized(
    work: Work, begun: Journal, write: Callable[[Chunk, int], None], max_bad_fraction: float, workers: int
) -> Iterator[Journal]:
    """Hands the ids behind the last border of a folder to `write`, with the number of those before. Yields the border
    behind each group, and the counts of documents before it. Raises UserError: a document is bad, and none may be."""
    total, counts = Summary.of(begun.summary), [begun.at.train, begun.at.val]
    for chunks, summary, place in run(work, begun.at.place, workers):
        for chunk in chunks:
            write(chunk, counts[chunk.split])
            counts[chunk.split] += len(chunk.ids)
        total.add(summary)
        require_good(work.split.files, summary.bad, max_bad_fraction)
        yield begun._replace(
            at=Commit(counts[TRAIN], counts[VAL], tuple(place)), summary=dataclasses.asdict(total)
        )


def _write_shards(
    work: Work,
    folder: Path,
    begun: Journal | None,
    max_bad_fraction: float,
    workers: int,
    tell: Tell,
) -> tuple[Summary, dict[str, ShardWriter]]:
    """Writes the shards, from where the journal ends."""
    start = journal = begun or Journal(work.dtype, rule=(work.threshold, work.cut))
    writers = {
        name: ShardWriter(folder, name, work.dtype, count=count)
        for name, count in zip(NAMES, (journal.count, journal.val), strict=True)
    }
    if work.template:
        writers |= {
            FLAGS + name: ShardWriter(folder, FLAGS + name, "|u1", count=writer.count)
            for name, writer in writers.items()
        }
    if begun:
        tell(f"note: continuing after {begun.read / 1e6:,.1f} MB that are tokenized", 0, None)

    def write(chunk: Chunk, before: int) -> None:
        writers[NAMES[chunk.split]].write(chunk.ids)
        if chunk.flags is not None:
            writers[FLAGS + NAMES[chunk.split]].write(chunk.flags)

    saved = time.monotonic()
    try:
        for journal in tokenized(work, start, write, max_bad_fraction, workers):
            tell("tokenizing", journal.read, work.size)
            if time.monotonic() - saved >= JOURNAL_S:
                for writer in writers.values():
                    writer.flush()
                journal._replace(count=journal.at.train, val=journal.at.val).write(folder)
                saved = time.monotonic()
    finally:
        for writer in writers.values():
            writer.close()
    return Summary.of(journal.summary), writers


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
