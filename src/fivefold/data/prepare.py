"""Prepares a recipe's data: finds the source, tokenizes it once into the cache, and memory-maps it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fivefold.data import tokenfiles
from fivefold.data.batches import objective_of
from fivefold.data.build import Progress, build, is_named, require_few_bad
from fivefold.data.conversations import beside, read_template, special_of
from fivefold.data.fingerprint import Memo, remembered, sha256_file
from fivefold.data.sources import Source, find
from fivefold.data.tasks import hub_fingerprint
from fivefold.data.tokenizer import check_bpe_size, load_tokenizer
from fivefold.data.tokens import (
    FORMAT,
    NAMES,
    DataSet,
    add_digests,
    open_tokens,
    read_manifest,
    write_manifest,
)
from fivefold.errors import UserError
from fivefold.files import cache_folder, flush_all, locked, make_folder, own_word, remove, rename, writable
from fivefold.host import cores
from fivefold.recipe import DataSection, Recipe


def prepare_source(recipe: Recipe, progress: Progress | None = None, workers: int | None = None) -> DataSet:
    """The data of `data.source`. It is tokenized first, unless the cache has this content with these settings.

    Several processes may call it at once. One works, the others wait and read its result. The result does not depend on
    `workers` (processes; None: all cores). progress(stage, done, total) is called with bytes. Raises UserError for
    every fault of the source, with file and offset.
    """
    tell = progress or (lambda stage, done, total: None)
    if recipe.data.source.startswith("tokens:"):
        data = tokenfiles.open_files(recipe, tell)
    else:
        data = _prepare_text(recipe, tell, workers or cores())
    require_vocabulary(recipe, data.vocab_size)
    return data


def require_vocabulary(recipe: Recipe, size: int) -> None:
    """Raises UserError if the model has fewer ids than the tokenizer, which has `size`."""
    limit, data = recipe.model.vocab_size, recipe.data
    if limit is None or size <= limit:
        return
    special = special_of(data.chat_template)
    added = f" with {', '.join(special)} of data.chat_template" if special else ""
    other = ', or use data.chat_template = "plain", which needs no special tokens' if special else ""
    raise UserError(
        f"model.vocab_size = {limit} is smaller than the vocabulary of data.tokenizer = {data.tokenizer!r}{added}: "
        f"{size} tokens. Leave it unset, or set at least that{other}"
    )


def _prepare_text(recipe: Recipe, tell: Progress, workers: int) -> DataSet:
    data, mask = recipe.data, objective_of(recipe) == "mlm"
    root, began = cache_folder(data.cache) / "data", time.perf_counter()
    check_tokenizer(data, mask)
    source = find(data.source)
    with writable(root):
        key = cache_key(source, data, mask, root, tell)
        folder = root / key
        manifest = read_manifest(folder)
        cached = True
        if manifest is None:
            with locked(root / f"{key}.lock", lambda: tell("waiting for another process", 0, None)) as alone:
                manifest = read_manifest(folder)  # another process may just have made it
                if manifest is None:
                    manifest = _make(source, data, mask, root, key, alone, workers, tell)
                    cached = False
        elif not all("digests" in entry for split in NAMES for entry in manifest["shards"][split]):
            manifest = _with_digests(folder, root / f"{key}.lock", manifest, tell)
    require_few_bad(manifest["skipped"], data.max_bad_fraction)
    tokenizer = load_tokenizer(folder / "tokenizer.json", mask)
    tokenizer.chat_template = beside(folder) or ""
    train, val = (open_tokens(folder, manifest, split) for split in NAMES)
    facts = {k: manifest[k] for k in ("files", "documents", "bytes", "tokens", "skipped")}
    info = {"source": data.source, "fingerprint": key, "folder": str(folder), "cached": cached, **facts}
    info["seconds"] = round(time.perf_counter() - began, 3)
    held_out = val if data.val_fraction > 0 else None
    return DataSet(train, held_out, tokenizer, tokenizer.vocab_size, tokenizer.mask_id, info)


def _with_digests(folder: Path, lock: Path, manifest: dict[str, Any], tell: Progress) -> dict[str, Any]:
    """The manifest of an older version's folder, with digests from now on; as it is if the folder cannot be written."""
    tell("hashing shards", 0, None)
    with contextlib.suppress(OSError), locked(lock):
        manifest = read_manifest(folder) or manifest  # another process may just have added them
        add_digests(folder, manifest)
    return manifest


def _make(
    source: Source,
    data: DataSection,
    mask: bool,
    root: Path,
    key: str,
    alone: bool,
    workers: int,
    tell: Progress,
) -> dict[str, Any]:
    """Builds in a temporary folder and renames it, so that a folder with the key's name is always complete."""
    folder, temporary = root / key, root / f"{key}.tmp-{own_word()}"
    if alone:  # anything here was left by a killed run or has been damaged
        for left in [folder, *root.glob(f"{key}.tmp-*")]:
            remove(left)
    make_folder(temporary, new=True)
    try:
        manifest = build(source, data, mask, temporary, workers, tell)
        if not source.hub and cache_key(source, data, mask, root, tell) != key:
            raise UserError(f"data.source: {data.source}: a file changed while it was tokenized; run again")
        write_manifest(temporary, manifest)
        flush_all(temporary)
        try:
            rename(temporary, folder)
        except OSError:
            if read_manifest(folder) is None:  # otherwise another process without a lock was first
                raise
        return manifest
    finally:
        remove(temporary)


def cache_key(source: Source, data: DataSection, mask: bool, root: Path, tell: Progress) -> str:
    """Hash of everything that determines the shards: format, content of the source, tokenizer, settings."""
    if source.hub:
        content: Any = hub_fingerprint(source.hub)
    else:
        done = 0

        def count(size: int) -> None:
            nonlocal done
            done += size
            tell("reading", done, source.size)

        where = hashlib.sha256(os.path.abspath(data.source).encode("utf-8", "surrogateescape")).hexdigest()
        memo = Memo(root / f"files-{where[:16]}.json")
        hashes = remembered(
            [f.path for f in source.files],
            memo,
            lambda p: sha256_file(p, count),
            lambda e: f"unreadable: {e.strerror}",
        )
        content = [[f.name, f.kind, h] for f, h in zip(source.files, hashes, strict=True)]
    tokenizer = data.tokenizer
    if not is_named(tokenizer):
        tokenizer = hashlib.sha256(
            load_tokenizer(Path(tokenizer).expanduser(), mask).to_json().encode()
        ).hexdigest()
    settings = [FORMAT, content, tokenizer, mask, data.val_fraction, data.text_key]
    if data.chat_template:
        settings.append(read_template(data.chat_template, data.tokenizer))
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:32]


def check_tokenizer(data: DataSection, mask: bool) -> None:
    """Raises UserError unless data.tokenizer is `bpe:N` with enough tokens, `bytes`, `chars` or an existing path, and
    data.chat_template a template."""
    spec = data.tokenizer
    if data.chat_template:
        read_template(data.chat_template, spec)
    if spec.startswith("bpe:"):
        check_bpe_size(int(spec[4:]), (2 if mask else 1) + len(special_of(data.chat_template)))
    elif spec not in ("bytes", "chars") and not (spec and Path(spec).expanduser().exists()):
        raise UserError(
            f"data.tokenizer = {spec!r}: must be bpe:N, bytes, chars, or the path of a tokenizer.json"
        )


@contextlib.contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int | None], None]]:
    """A progress callback for `prepare`: shows a bar on a terminal, and one line per stage elsewhere (on stderr)."""
    if not sys.stderr.isatty():
        seen: set[str] = set()

        def line(stage: str, done: int, total: int | None) -> None:
            if stage not in seen:
                seen.add(stage)
                print(
                    f"data: {stage}" + (f" ({total / 1e6:.1f} MB)" if total else ""),
                    file=sys.stderr,
                    flush=True,
                )

        yield line
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = [
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    ]
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks = {}

        def show(stage: str, done: int, total: int | None) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done, total=total)

        yield show
