"""Tokenizes a source into shards: learns the vocabulary, encodes on all cores, counts documents and tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fivefold.data.conversations import read_template, special_of
from fivefold.data.documents import Bad, row_groups
from fivefold.data.encode import MIN_PARALLEL, Chunk, Setup, Summary, run, training_texts
from fivefold.data.sources import File, Source
from fivefold.data.tasks import VAL, Task, hub_tasks, split_files, tasks
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
from fivefold.precision import token_bytes
from fivefold.recipe.schema import DataSection

Progress = Callable[[str, int, int | None], None]  # (stage, bytes done, total bytes if known)
BPE_SAMPLE = 16 << 20  # characters of training text that BPE learns from; more hardly changes the merges
BPE_SAMPLE_PER_TASK = 2 << 20  # keeps one task with a huge row group from being the whole sample


def build(
    source: Source, data: DataSection, mask: bool, folder: Path, workers: int, tell: Progress
) -> dict[str, Any]:
    """Writes tokenizer.json and the shards into `folder` and returns their manifest.

    Raises UserError for the first bad document if max_bad_fraction is 0, and for a source without text.
    """
    files, work = _work(source, data)
    size = None if source.hub else source.size
    workers = workers if source.hub or source.size >= MIN_PARALLEL else 1
    setup = _setup(files, data)
    template = setup.template
    while True:  # a second time if validation got no document or all of them
        tokenizer = learn(data, mask, [Text(setup, work, size)], workers, tell)
        if data.chat_template:
            from fivefold.data.chat import open_template  # Jinja takes a moment to import

            tokenizer = open_template(data.chat_template, data.tokenizer, tokenizer).tokenizer
            tokenizer.chat_template = template
        tokenizer.save(folder / "tokenizer.json")
        dtype = f"<u{token_bytes(tokenizer.vocab_size)}"
        setup = dataclasses.replace(setup, tokenizer=str(folder / "tokenizer.json"), dtype=dtype)
        summary, shards = _encode(work(), setup, folder, data.max_bad_fraction, workers, size, tell)
        other = _other_rule(setup, summary, data.val_fraction)
        if other is None:
            break
        setup = other
    if sum(summary.documents) == 0 and not summary.bad_count:
        raise UserError(f"data.source: {data.source} holds no text: {max(1, len(files))} empty file(s)")
    return {
        "format": FORMAT,
        "source": data.source,
        "files": len(source.files),
        "documents": dict(zip(NAMES, summary.documents, strict=True)),
        "bytes": dict(zip(NAMES, summary.bytes, strict=True)),
        "tokens": {split: sum(e["tokens"] for e in shards[split]) for split in NAMES},
        "skipped": {
            "bad": summary.bad_count,
            "pieces": summary.pieces,
            "first_bad": describe_bad(files, summary.bad[0]) if summary.bad else "",
            "empty": summary.empty + sum(f.size == 0 for f in source.files),
            "ignored": source.ignored,
        },
        "dtype": setup.dtype,
        "shards": {name: shards[name] for name in NAMES},
        **({"flags": {name: shards[FLAGS + name] for name in NAMES}} if template else {}),
    }


def _setup(files: list[File], data: DataSection) -> Setup:
    template = read_template(data.chat_template, data.tokenizer) if data.chat_template else ""
    return Setup(files, data.text_key, "encode", threshold=int(data.val_fraction * 2**64), template=template)


def _work(source: Source, data: DataSection) -> tuple[list[File], Callable[[], Iterable[Task]]]:
    """The files of a source, and a function that lists its tasks from the start."""
    if source.hub:
        name = source.hub
        return [File(source.spec, Path(source.spec), "text", 0)], lambda: hub_tasks(
            name, data.text_key, bool(data.chat_template)
        )
    groups = {i: row_groups(f) for i, f in enumerate(source.files) if f.kind == "parquet"}
    split = split_files(source.files, data.val_fraction, groups)
    return source.files, lambda: tasks(split)


def is_named(tokenizer: str) -> bool:
    """True if data.tokenizer is one of Fivefold's own, not a path."""
    return tokenizer in ("bytes", "chars") or tokenizer.startswith("bpe:")


def describe_bad(files: list[File], bad: Bad) -> str:
    """Place and reason as text: 'FILE: line 3 (byte 120): not JSON: ...'."""
    file = files[bad.file]
    where = f"byte {bad.place}"
    if file.kind == "jsonl" and not bad.reason.startswith("cannot be read"):
        with open(file.path, "rb") as f:  # count lines only for the document that is shown
            line, left = 1, bad.place
            while left and (chunk := f.read(min(1 << 20, left))):
                line, left = line + chunk.count(b"\n"), left - len(chunk)
        where = f"line {line} ({where})"
    elif file.kind == "parquet" or file.size == 0:
        where = f"row {bad.place}"
    return f"{file.path}: {where}: {bad.reason}"


def require_few_bad(skipped: dict[str, Any], max_bad_fraction: float) -> None:
    """Raises UserError if more documents are bad than the recipe allows."""
    if skipped["bad"] > max_bad_fraction * skipped["pieces"]:
        raise UserError(
            f"data.source: {skipped['bad']} of {skipped['pieces']} documents cannot be read, more than "
            f"data.max_bad_fraction = {max_bad_fraction} allows. The first: {skipped['first_bad']}"
        )


class Text(NamedTuple):
    """A source to learn a tokenizer from: its tasks, its bytes if known, and its share of what is learned from."""

    setup: Setup
    work: Callable[[], Iterable[Task]]
    size: int | None
    share: float = 1.0


def text_of(source: Source, data: DataSection, share: float) -> Text:
    """A source of several, from whose training part a common tokenizer is learned."""
    files, work = _work(source, data)
    return Text(_setup(files, data), work, None if source.hub else source.size, share)


def learn(data: DataSection, mask: bool, texts: Sequence[Text], workers: int, tell: Progress) -> Tokenizer:
    """The tokenizer that `data.tokenizer` names, learned from the texts if it asks for that."""
    if data.tokenizer == "bytes":
        return bytes_tokenizer(mask)
    if data.tokenizer == "chars":
        # Collect characters from all text, as nanoGPT does: those that only validation has need an id, too.
        found = Summary()
        for text in texts:
            own = workers if text.size is None or text.size >= MIN_PARALLEL else 1
            for result in run(text.work(), dataclasses.replace(text.setup, mode="characters"), own):
                if isinstance(result, Summary):
                    found.add(result)
                    tell("collecting characters", found.read, text.size if len(texts) == 1 else None)
        return chars_tokenizer(found.characters, mask)
    if data.tokenizer.startswith("bpe:"):
        sample = (piece for text in texts for piece in _sample(text, tell))
        size = int(data.tokenizer.removeprefix("bpe:"))
        return train_bpe(sample, size, mask, special_of(data.chat_template))
    return load_tokenizer(Path(data.tokenizer).expanduser(), mask)


def _sample(text: Text, tell: Progress) -> Iterator[str]:
    """About BPE_SAMPLE characters of training text, or a source's share of them, from tasks spread evenly over it.

    A streamed set gives its beginning. The same source gives the same sample.
    """
    most, size = int(BPE_SAMPLE * text.share), text.size
    taken, every = 0, max(1, (size or 0) // max(1, most))
    for task in islice(text.work(), 0, None, every):
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


def _encode(
    work: Iterable[Task],
    setup: Setup,
    folder: Path,
    max_bad_fraction: float,
    workers: int,
    size: int | None,
    tell: Progress,
) -> tuple[Summary, dict[str, list[dict[str, Any]]]]:
    total = Summary()
    writers = {name: ShardWriter(folder, name, setup.dtype) for name in NAMES}
    if setup.template:
        writers |= {FLAGS + name: ShardWriter(folder, FLAGS + name, "|u1") for name in NAMES}
    try:
        for result in run(work, setup, workers):
            if isinstance(result, Chunk):
                writers[NAMES[result.split]].write(np.asarray(result.ids))
                if result.flags is not None:
                    writers[FLAGS + NAMES[result.split]].write(result.flags)
                continue
            total.add(result)
            tell("tokenizing", total.read, size)
            if result.bad and max_bad_fraction == 0:
                raise UserError(
                    f"{describe_bad(setup.files, result.bad[0])} "
                    "(set data.max_bad_fraction to skip a share of bad documents)"
                )
    finally:
        for writer in writers.values():
            writer.close()
    return total, {name: writer.entries() for name, writer in writers.items()}


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
