"""Prepares a recipe's data: finds the source, tokenizes it once into the cache, and memory-maps it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fivefold.data import token_source
from fivefold.data.batches import objective_of
from fivefold.data.build import build, is_named, require_few_bad
from fivefold.data.chat import beside, read_template, special_of
from fivefold.data.kinds import hub
from fivefold.data.kinds.kind import TOKENS
from fivefold.data.packing import DataSet
from fivefold.data.sources import Source, find, remembered, sampled_sha256, sha256_file
from fivefold.data.stream import open_stream
from fivefold.data.tokenizer import check_bpe_size, load_tokenizer
from fivefold.data.tokens import (
    FORMAT,
    JOURNAL,
    MANIFEST,
    NAMES,
    Tell,
    open_tokens,
    read_manifest,
)
from fivefold.errors import UserError
from fivefold.files import (
    cache_folder,
    expanded,
    flush_all,
    locked,
    make_folder,
    own_word,
    remove,
    rename,
    writable,
    write_atomically,
)
from fivefold.host import cores
from fivefold.recipe import DataSection, Recipe


def prepare_source(recipe: Recipe, progress: Tell | None = None, workers: int | None = None) -> DataSet:
    """The data of `data.source`. It is tokenized first, unless the cache has this content with these settings.

    Several processes may call it at once. One works, the others wait and read its result. The result does not depend on
    `workers` (threads; None: one per core). progress(stage, done, total) is called with bytes. Raises UserError for
    every fault of the source, with file and offset.
    """
    tell = progress or (lambda stage, done, total: None)
    if not recipe.data.source.startswith(TOKENS):
        check_tokenizer(recipe.data, objective_of(recipe) == "mlm")
    source = find(recipe.data.source)
    if source.ids:
        data = token_source.open_files(source, recipe, tell)
    else:
        data = _prepare_text(source, recipe, tell, workers or cores())
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
    said, do = f"model.vocab_size = {limit}", f"Leave it unset, or set at least that{other}"
    if (where := recipe.train.init_from) and not special:
        said += f", that of train.init_from = {where},"
        do = "Leave data.tokenizer out to take over its own"
    raise UserError(
        f"{said} is smaller than the vocabulary of data.tokenizer = {data.tokenizer!r}{added}: {size} tokens. {do}"
    )


def _prepare_text(source: Source, recipe: Recipe, tell: Tell, workers: int) -> DataSet:
    data, mask = recipe.data, objective_of(recipe) == "mlm"
    root, began = cache_folder(data.cache) / "data", time.perf_counter()
    if data.stream:
        if any(f.url.startswith("memory:") for f in source.files):
            raise UserError(f"data.stream: another process tokenizes, and cannot read {data.source}")
        if source.left_out:
            tell(f"note: {source.left_out}", 0, None)
        with writable(root):
            key = cache_key(source, data, mask, root, tell)
            stream, val, info = open_stream(recipe, mask, root, key, tell)
        tokenizer = load_tokenizer(stream.folder / "tokenizer.json", mask)
        info |= {"files": len(source.counted)}
        return DataSet.of_one(stream, val, tokenizer, tokenizer.vocab_size, tokenizer.mask_id, info)
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
    require_few_bad(manifest["skipped"], data.max_bad_fraction)
    tokenizer = load_tokenizer(folder / "tokenizer.json", mask)
    tokenizer.chat_template = beside(folder) or ""
    train, val = (open_tokens(folder, manifest, split) for split in NAMES)
    facts = {k: manifest[k] for k in ("files", "documents", "bytes", "tokens", "skipped")}
    info = {"source": data.source, "fingerprint": key, "folder": str(folder), "cached": cached, **facts}
    info["seconds"] = round(time.perf_counter() - began, 3)
    held_out = val if data.val_fraction > 0 else None
    return DataSet.of_one(train, held_out, tokenizer, tokenizer.vocab_size, tokenizer.mask_id, info)


def _make(
    source: Source,
    data: DataSection,
    mask: bool,
    root: Path,
    key: str,
    alone: bool,
    workers: int,
    tell: Tell,
) -> dict[str, Any]:
    """Builds in a temporary folder and renames it, so that a folder with the key's name is always complete.

    alone: nobody else does. Then the temporary folder stays if this is interrupted, and the next call continues it.
    """
    folder, temporary = root / key, root / (f"{key}.part" if alone else f"{key}.tmp-{own_word()}")
    if alone:  # anything here was left by a killed run or has been damaged
        for left in [folder, *root.glob(f"{key}.tmp-*")]:
            remove(left)
    make_folder(temporary, new=not alone)
    if source.left_out:
        tell(f"note: {source.left_out}", 0, None)
    try:
        manifest = build(source, data, mask, temporary, workers, tell)
        now = find(data.source) if any(file.url for file in source.files) else source
        if not source.hub and cache_key(now, data, mask, root, tell) != key:
            remove(temporary)
            raise UserError(f"data.source: {data.source}: a file changed while it was tokenized; run again")
        remove(temporary / JOURNAL)
        write_atomically(temporary / MANIFEST, json.dumps(manifest, indent=1))
        flush_all(temporary)
        try:
            rename(temporary, folder)
        except OSError:
            if read_manifest(folder) is None:  # otherwise another process without a lock was first
                raise
        return manifest
    finally:
        if not alone:
            remove(temporary)


def cache_key(source: Source, data: DataSection, mask: bool, root: Path, tell: Tell) -> str:
    """Hash of everything that determines the shards: format, content of the source, tokenizer, settings."""
    if source.hub:
        content: Any = hub.fingerprint(source.spec)
    else:
        local, done = [f for f in source.files if not f.url], 0

        def count(size: int) -> None:
            nonlocal done
            done += size
            tell("reading", done, source.size)

        where = hashlib.sha256(os.path.abspath(data.source).encode("utf-8", "surrogateescape")).hexdigest()
        memo = root / f"files-{where[:16]}{'-sampled' * data.stream}.json"
        hashes = remembered(
            [f.path for f in local],
            memo,
            sampled_sha256 if data.stream else (lambda p: sha256_file(p, count)),
            lambda e: f"unreadable: {e.strerror}",
        )
        known = dict(zip(local, hashes, strict=True))
        content = [[f.name, f.kind, known.get(f) or [f.url, f.size, f.version]] for f in source.files]
    tokenizer = data.tokenizer
    if not is_named(tokenizer):
        tokenizer = hashlib.sha256(
            load_tokenizer(expanded("data.tokenizer", tokenizer), mask).to_json().encode()
        ).hexdigest()
    settings = [FORMAT, content, tokenizer, mask, data.val_fraction, data.text_key] + [
        "streams"
    ] * data.stream
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
    elif spec not in ("bytes", "chars") and not (spec and expanded("data.tokenizer", spec).exists()):
        name = "OWNER/NAME" if not spec or spec.endswith(".json") else spec
        raise UserError(
            f"data.tokenizer = {spec!r}: no such file; must be bpe:N, bytes, chars, or the path of a tokenizer.json. "
            f"Of a Hugging Face repository: `hf download {name} tokenizer.json tokenizer_config.json --local-dir DIR`, "
            "then --set data.tokenizer=DIR/tokenizer.json"
        )


@contextlib.contextmanager
def progress_bar() -> Iterator[Tell]:
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
    from rich import progress
    from rich.console import Console

    columns = [*progress.Progress.get_default_columns(), progress.TransferSpeedColumn()]
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks = {}

        def show(stage: str, done: int, total: int | None) -> None:
            if stage.startswith("note: "):
                bars.console.print(f"data: {stage}", markup=False, highlight=False)
                return
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done, total=total)

        yield show
