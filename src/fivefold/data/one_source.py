"""Prepares one source: text is tokenized once into the cache, files of ids (`tokens:PATH`) are scanned once and read in
place. Both are memory-mapped."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fivefold import files
from fivefold.data.batches import objective_of
from fivefold.data.build import build, is_learned, require_few_bad
from fivefold.data.chat import beside, read_template, special_of
from fivefold.data.dataset import DataSet, Part
from fivefold.data.kinds import TOKEN_KINDS, hub
from fivefold.data.kinds.kind import TOKENS, Shard
from fivefold.data.kinds.token_files import LARGEST_VOCABULARY
from fivefold.data.sources import Source, find, remembered, sampled_sha256, stat_of
from fivefold.data.stream import open_stream
from fivefold.data.tokenizer import check_bpe_size, load_tokenizer
from fivefold.data.tokens import (
    FORMAT,
    JOURNAL,
    MANIFEST,
    NAMES,
    BlockHasher,
    Tell,
    Tokens,
    has_tokenizer,
    open_tokens,
    read_digests,
    read_manifest,
)
from fivefold.errors import UserError
from fivefold.files import rename, sha256
from fivefold.host import cores
from fivefold.recipe import DataSection, Recipe

CHUNK = 1 << 24  # ids scanned at once
PROBED = 1 << 20  # ids of a file without a header that are looked at to see whether they are ids
DTYPE = "uint16"  # of files without a header, unless the recipe says another
CHANGED = "The file was changed after it was scanned, or the disk is failing. Restore it, and run again"
VALIDATION = re.compile(r"(^|[_.-])val(id|idation)?([_.-]|$)")  # val.bin, fineweb_val_000000.bin


def prepare_source(recipe: Recipe, progress: Tell | None = None, workers: int | None = None) -> DataSet:
    """The data of `data.source`, as in `preparation.prepare`."""
    tell = progress or (lambda stage, done, total: None)
    if not recipe.data.source.startswith(TOKENS):
        check_tokenizer(recipe.data, objective_of(recipe) == "mlm")
    source = find(recipe.data.source)
    data = (
        _open_files(source, recipe, tell)
        if source.ids
        else _prepare_text(source, recipe, tell, workers or cores())
    )
    require_vocabulary(recipe, data.vocab_size)
    return data


def require_vocabulary(recipe: Recipe, size: int) -> None:
    """Raises UserError if the model has fewer ids than the tokenizer, which has `size`."""
    limit, data = recipe.model.vocab_size, recipe.data
    if limit is None or size <= limit:
        return
    origin, added, do = "", "", "Leave it unset, or set at least that"
    if special := special_of(data.chat_template):
        added = f" with {', '.join(special)} of data.chat_template"
        do += ', or use data.chat_template = "plain", which needs no special tokens'
    elif where := recipe.train.init_from:
        origin, do = f", that of train.init_from = {where},", "Leave data.tokenizer out to take over its own"
    raise UserError(
        f"model.vocab_size = {limit}{origin} is smaller than the vocabulary of data.tokenizer = {data.tokenizer!r}"
        f"{added}: {size} tokens. {do}"
    )


def check_ids(recipe: Recipe, vocab_size: int, tokens: Tokens) -> None:
    """Raises UserError: what the recipe says of token files cannot be so, with that many ids."""
    data, unsaid = recipe.data, [shard.path for shard in tokens.shards if shard.assumed]
    if data.token_dtype is None and vocab_size > 1 << 16 and unsaid:
        raise UserError(
            f"data.source: {unsaid[0]} does not say the type of its ids, and uint16 has too few for a vocabulary of "
            f"{vocab_size:,}. Set data.token_dtype: uint32, or uint16 if the ids are all below 65,536"
        )
    if data.end_token is not None and data.end_token >= vocab_size:
        raise UserError(
            f"data.end_token = {data.end_token} is beyond the vocabulary of {vocab_size:,}. Set the id with which the "
            f"files' own tokenizer ends a document, or model.vocab_size to at least {data.end_token + 1}"
        )


def _prepare_text(source: Source, recipe: Recipe, tell: Tell, workers: int) -> DataSet:
    data, mask, began = recipe.data, objective_of(recipe) == "mlm", time.perf_counter()
    if data.stream:
        if any(f.url.startswith("memory:") for f in source.files):
            raise UserError(f"data.stream: another process tokenizes, and cannot read {data.source}")
        if source.left_out:
            tell(f"note: {source.left_out}", 0, None)
        with files.writable(root_of(data)):
            train, val, info = open_stream(recipe, mask, lookup(source, data, mask, tell)[0], tell)
        if not has_tokenizer(train.folder):
            raise UserError(
                f"data: the tokenizer in {train.folder} is damaged. Remove this folder, and run again"
            )
        tokenizer = load_tokenizer(train.folder / "tokenizer.json", mask)
        info |= {"files": len(source.counted)}
        return DataSet(
            (Part("", train, val, info),), tokenizer, tokenizer.vocab_size, tokenizer.mask_id, info
        )
    with files.writable(root_of(data)):
        folder, manifest = lookup(source, data, mask, tell)
        cached = manifest is not None
        if manifest is None:
            lock = folder.with_suffix(".lock")
            with files.locked(lock, lambda: tell("waiting for another process", 0, None)) as alone:
                manifest = read_manifest(folder)  # another process may just have made it
                cached = manifest is not None
                if manifest is None and folder.is_dir():
                    tell(f"note: {folder} is damaged, so the text is tokenized anew", 0, None)
                manifest = manifest or _make(source, data, mask, folder, alone, workers, tell)
    require_few_bad(manifest["skipped"], data.max_bad_fraction)
    tokenizer = load_tokenizer(folder / "tokenizer.json", mask)
    tokenizer.chat_template = beside(folder) or ""
    train, val = (open_tokens(folder, manifest, split) for split in NAMES)
    facts = {k: manifest[k] for k in ("files", "documents", "bytes", "tokens", "skipped")}
    info = {
        "source": data.source,
        "fingerprint": folder.name,
        "folder": str(folder),
        "cached": cached,
        **facts,
    }
    info["seconds"] = round(time.perf_counter() - began, 3)
    part = Part("", train, val if data.val_fraction > 0 else None, info)
    return DataSet((part,), tokenizer, tokenizer.vocab_size, tokenizer.mask_id, info)


def _make(
    source: Source, data: DataSection, mask: bool, folder: Path, alone: bool, workers: int, tell: Tell
) -> dict[str, Any]:
    """Builds in a temporary folder and renames it, so that a folder with the key's name is always complete.

    alone: nobody else does. Then the temporary folder stays if this is interrupted, and the next call continues it.
    """
    temporary = folder.with_suffix(".part" if alone else f".tmp-{files.own_word()}")
    if alone:  # anything here was left by a killed run or has been damaged
        for old in [folder, *folder.parent.glob(f"{folder.name}.tmp-*")]:
            files.remove(old)
    files.make_folder(temporary, new=not alone)
    if source.left_out:
        tell(f"note: {source.left_out}", 0, None)
    try:
        manifest = build(source, data, mask, temporary, workers, tell)
        now = find(data.source) if any(file.url for file in source.files) else source
        if not source.hub and lookup(now, data, mask, tell)[0] != folder:
            files.remove(temporary)
            raise UserError(f"data.source: {data.source}: a file changed while it was tokenized; run again")
        files.remove(temporary / JOURNAL)
        files.write_atomically(temporary / MANIFEST, json.dumps(manifest, indent=1))
        files.flush_all(temporary)
        try:
            rename(temporary, folder)
        except OSError:
            if read_manifest(folder) is None:  # otherwise another process without a lock was first
                raise
        return manifest
    finally:
        if not alone:
            files.remove(temporary)


def root_of(data: DataSection) -> Path:
    """The folder of the cache that holds data."""
    return files.cache_folder(data.cache) / "data"


def lookup(source: Source, data: DataSection, mask: bool, tell: Tell) -> tuple[Path, dict[str, Any] | None]:
    """The folder of a source's tokens in the cache, and its manifest if they are there. Its name is a hash of all that
    determines them: format, content of the source, tokenizer, settings."""
    if source.hub:
        content: Any = hub.fingerprint(source.spec)
    else:
        local, done = [f for f in source.files if not f.url], 0

        def count(size: int) -> None:
            nonlocal done
            done += size
            tell("reading", done, source.size)

        where = hashlib.sha256(os.path.abspath(data.source).encode("utf-8", "surrogateescape")).hexdigest()
        memo = root_of(data) / f"files-{where[:16]}{'-sampled' * data.stream}.json"
        hashes = remembered(
            [f.path for f in local],
            memo,
            sampled_sha256 if data.stream else (lambda p: sha256(p, count)),
            lambda e: f"unreadable: {e.strerror}",
        )
        known = dict(zip(local, hashes, strict=True))
        content = [[f.name, f.kind, known.get(f) or [f.url, f.size, f.version]] for f in source.files]
    tokenizer = data.tokenizer
    if tokenizer != "bytes" and not is_learned(tokenizer):
        content_of_file = load_tokenizer(files.expanded("data.tokenizer", tokenizer), mask).to_json()
        tokenizer = hashlib.sha256(content_of_file.encode()).hexdigest()
    settings = [FORMAT, content, tokenizer, mask, data.val_fraction, data.text_key]
    if data.stream:
        settings.append("streams")
    if data.chat_template:
        settings.append(read_template(data.chat_template, data.tokenizer))
    folder = root_of(data) / hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:32]
    return folder, read_manifest(folder)


def check_tokenizer(data: DataSection, mask: bool) -> None:
    """Raises UserError unless data.tokenizer is `bpe:N` with enough tokens, `bytes`, `chars` or an existing path, and
    data.chat_template a template."""
    spec = data.tokenizer
    if data.chat_template:
        read_template(data.chat_template, spec)
    if spec.startswith("bpe:"):
        check_bpe_size(int(spec[4:]), (2 if mask else 1) + len(special_of(data.chat_template)))
    elif spec not in ("bytes", "chars") and not (spec and files.expanded("data.tokenizer", spec).exists()):
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
                size = f" ({total / 1e6:.1f} MB)" if total else ""
                print(f"data: {stage}{size}", file=sys.stderr, flush=True)

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
            else:
                if stage not in tasks:
                    tasks[stage] = bars.add_task(stage, total=total)
                bars.update(tasks[stage], completed=done, total=total)

        yield show


def _open_files(source: Source, recipe: Recipe, tell: Tell) -> DataSet:
    """The token files of a recipe, memory-mapped in place.

    Files named val (val.bin, x_val_000.bin) are the validation set. Without one, the last val_fraction of the
    tokens is. Every id is scanned once, and the result is remembered. The vocabulary is model.vocab_size, or one
    more than the highest id. Training on masked tokens adds a last id for the mask, which the files must not hold.
    Raises UserError for truncated files and for ids beyond the vocabulary.
    """
    began, root, data = time.perf_counter(), root_of(recipe.data), recipe.data
    with files.writable(root):
        shards = [
            _copied(shard, file.kind, data.end_token, root, tell) if TOKEN_KINDS[file.kind].copied else shard
            for shard, file in zip(headers(source, recipe), source.files, strict=True)
        ]
        highest, hashes, shards = _scan(shards, data.token_dtype or DTYPE, root, tell)
        if data.document_masks or data.packing == "best_fit":
            paths = [shard.index[0] for shard in shards if shard.index]
            memo = root / f"indexes-{_short(str(shards[0].path.parent))}.json"
            indexes = dict(zip(paths, remembered(paths, memo, sha256, _unreadable), strict=True))
            shards = [s._replace(index=s.index and (s.index[0], indexes[s.index[0]])) for s in shards]
            hashes += [indexes[path] for path in paths]
    reserved = 1 if objective_of(recipe) == "mlm" else 0
    needed = min(max([1, *highest]) + 1 + reserved, LARGEST_VOCABULARY)
    vocab_size = recipe.model.vocab_size or needed
    for shard, top in zip(shards, highest, strict=True):
        if top >= vocab_size - reserved:
            _refuse(shard, vocab_size, reserved)
    train, val = split(shards, data.val_fraction)
    info = {
        "source": source.spec,
        "fingerprint": hashlib.sha256("".join(hashes).encode()).hexdigest()[:32],
        "folder": str(shards[0].path.parent),
        "cached": True,
        "files": len(shards),
        "tokens": {"train": len(train), "val": len(val) if val else 0},
        "skipped": {"bad": 0, "empty": sum(s.tokens == 0 for s in shards)},
        "seconds": round(time.perf_counter() - began, 3),
    }
    mask_id = vocab_size - 1 if reserved else None
    return DataSet((Part("", train, val, info),), None, vocab_size, mask_id, info)


def headers(source: Source, recipe: Recipe) -> list[Shard]:
    """Where the ids of a source lie, by its files' beginnings. Raises UserError: a file cannot be read, or is not what
    the recipe says."""
    shards = list[Shard]()
    for file in source.files:
        try:
            with files.open_file(file.path):  # a pipe would block
                shards.append(TOKEN_KINDS[file.kind].shard(file.path, recipe.data.token_dtype or DTYPE))
        except OSError as error:
            raise UserError(f"data.source: {file.path}: cannot be read: {error.strerror}") from None
        if shards[-1].assumed:
            _require_type(shards[-1])
    if recipe.model.vocab_size:
        check_ids(recipe, recipe.model.vocab_size, Tokens(shards))
    return shards


def _require_type(shard: Shard) -> None:
    """Raises UserError: every other id is 0 or nearly so, and the others are not. Then it is the upper half of a wider
    one."""
    ids = Tokens([shard])[:PROBED]
    upper, lower = ids[1::2] < 16, ids[::2] < 16  # up to a million ids
    zeros = ids[::2].any() and not ids[1::2].any()
    if len(ids) > 3 and upper.mean() > 0.99 and (zeros or lower.mean() < 0.9):
        wider = "uint32: set data.token_dtype to that" if shard.dtype == "<u2" else "int64: write it as .npy"
        raise UserError(
            f"data.source: {shard.path}: read as {np.dtype(shard.dtype).name}, every other id is nearly 0, so it seems "
            f"to hold {wider}. If these are its ids, write them as .npy, which says its type"
        )


def _copied(shard: Shard, kind: str, end: int | None, root: Path, tell: Tell) -> Shard:
    """The copy of a file's ids in the cache."""
    path = shard.path
    copy = root / f"{path.stem}-{_short(f'{path} {stat_of(path)} {end}')}.bin"
    if not copy.is_file():
        temporary, done = copy.with_suffix(f".{files.own_word()}"), 0
        try:
            with files.stream(temporary) as target:
                for ids in TOKEN_KINDS[kind].pieces(path, end):
                    target.write(ids.data)
                    done += ids.nbytes
                    tell(f"copying {kind}", done, 4 * shard.tokens)
            files.flush(temporary)
            rename(temporary, copy)
        finally:
            files.remove(temporary)
    return shard._replace(path=copy, tokens=copy.stat().st_size // 4)


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _unreadable(error: OSError) -> Any:
    raise UserError(f"data.source: {error.filename}: cannot be read: {error.strerror}")


def _scan(
    shards: list[Shard], dtype: str, root: Path, tell: Tell
) -> tuple[list[int], list[str], list[Shard]]:
    """Highest id and content hash of each file, remembered, and the shards with the digests of their blocks. Ids count
    as unsigned, so a negative one is huge."""
    total, done = sum(s.path.stat().st_size for s in shards), 0
    by_path = {s.path: s for s in shards}

    def scan(path: Path) -> list[Any]:
        nonlocal done
        top, digest, hasher = 0, hashlib.sha256(), BlockHasher()
        for chunk in _chunks(by_path[path]):
            top = max(top, int(_unsigned(chunk).max()))
            content = np.ascontiguousarray(chunk).view(np.uint8).data
            digest.update(content)
            hasher.update(content)
            done += chunk.nbytes
            tell("scanning tokens", done, total)
        blocks = hasher.digests()
        files.write_atomically(digests_of(path), blocks)
        return [top, digest.hexdigest(), hashlib.sha256(blocks).hexdigest()]

    def digests_of(path: Path) -> Path:
        return root / f"tokens-{_short(str(path))}.digests"

    def blocks_of(path: Path, value: list[Any]) -> bytes | None:
        """None: somebody has removed them."""
        shard = by_path[path]
        return read_digests(digests_of(path), shard.tokens * np.dtype(shard.dtype).itemsize, value[2])

    memo = root / f"tokens-{_short(f'{dtype} {shards[0].path.parent}')}.json"
    values = remembered(list(by_path), memo, scan, _unreadable, lambda p, v: blocks_of(p, v) is not None)
    scanned = [
        shard._replace(digests=blocks_of(path, value), advice=CHANGED)
        for (path, shard), value in zip(by_path.items(), values, strict=True)
    ]
    return [value[0] for value in values], [value[1] for value in values], scanned


def _chunks(shard: Shard) -> Iterator[np.ndarray]:
    if shard.tokens:
        ids = np.memmap(shard.path, shard.dtype, "r", shard.offset, (shard.tokens,)).view(np.ndarray)
        for start in range(0, shard.tokens, CHUNK):
            yield ids[start : start + CHUNK]


def _unsigned(ids: np.ndarray) -> np.ndarray:
    return ids.view(ids.dtype.str.replace("i", "u"))


def _refuse(shard: Shard, vocab_size: int, reserved: int) -> None:
    """Raises an error that locates the first id beyond the vocabulary."""
    start = 0
    for chunk in _chunks(shard):
        beyond = np.flatnonzero(_unsigned(chunk) >= vocab_size - reserved)
        if len(beyond):
            at, item = start + int(beyond[0]), np.dtype(shard.dtype).itemsize
            narrow = shard.assumed and shard.dtype == "<u4"
            hint = "; if the file holds uint16, set data.token_dtype to that" if narrow else ""
            last = " (the last id is reserved for the mask token)" if reserved else ""
            raise UserError(
                f"data.source: {shard.path}: token {at:,} (byte {shard.offset + at * item:,}) has id "
                f"{int(chunk[beyond[0]]):,}, beyond the vocabulary of {vocab_size:,}{last}; "
                f"set model.vocab_size to at least the number of ids{hint}"
            )
        start += len(chunk)
    raise AssertionError("the scan found an id that the file does not hold")


def split(shards: list[Shard], val_fraction: float) -> tuple[Tokens, Tokens | None]:
    held_out = [s for s in shards if VALIDATION.search(s.path.stem)]
    training = [s for s in shards if s not in held_out]
    if held_out and training:
        return Tokens(training), Tokens(held_out) if val_fraction > 0 else None
    if val_fraction == 0:
        return Tokens(shards), None
    cut = int(sum(s.tokens for s in shards) * (1 - val_fraction))
    return Tokens(shards, 0, cut), Tokens(shards, cut)
