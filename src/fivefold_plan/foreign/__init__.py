"""Configurations of other programs, read as recipes. A kind is a module with its NAME, `given` (keys and values of a
file) and `derive` (which sets our fields that no table can say), and a TOML file of tables beside it. No torch."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fivefold.errors import UserError, did_you_mean
from fivefold.files import read_text
from fivefold.recipe.messages import SECTIONS, wrong
from fivefold.recipe.rules.combinations import unused
from fivefold.recipe.schema import Sections
from fivefold_plan.foreign import hugging_face, megatron, torchtitan
from fivefold_plan.foreign.reading import Reading

KINDS: tuple[Any, ...] = (hugging_face, torchtitan, megatron)
MOST_BYTES, SMALL, STEPS = 256 << 10, 4096, 1000
"""Of a file. The default tokenizer's size, beyond a smaller vocabulary. Steps of a run whose file does not say them."""


@cache
def tables(kind: Any) -> Mapping[str, Any]:
    return tomllib.loads(Path(kind.__file__).with_suffix(".toml").read_text("utf-8"))


def kind_of(path: Path) -> tuple[Any, Path] | None:
    """The kind of another program's configuration, and its file: a Hugging Face folder has one. Raises UserError: the
    file cannot be read."""
    file = path / "config.json" if path.is_dir() and not (path / "recipe.toml").exists() else path
    for kind in KINDS:
        sign = tables(kind)["signs"].get(file.suffix)
        if sign and file.is_file() and re.search(sign, read_text(file, MOST_BYTES), re.MULTILINE):
            return kind, file
    return None


def refuse(path: Path) -> None:
    """Raises UserError: this is a configuration of another program, which only `fivefold plan` reads."""
    if found := kind_of(path):
        raise UserError(
            f"{path}: this is a configuration of {found[0].NAME}, not a recipe. `fivefold plan {path} --cluster "
            "h100:64 --save recipe.toml` writes what it understands of it as one"
        )


def read(path: Path, devices: int, model_of: Callable[[str], dict[str, Any]]) -> Reading | None:
    """Reads a configuration of another program (see `Reading`); None: it is none. Raises UserError: it is malformed, or
    its model is of no architecture here. The tables of a kind:

    signs: {end of a file's name: what is in it}. refused: {end of a name: why}. earlier: {an older key: the key, or
    key=value}. copied: {their key: our field}, in the order in which they count. words: for some of these, {their
    value: ours, or {our field: value}}; "*" are all others. derived: {their key: our fields} that `derive` sets. meant:
    our fields in a file without their keys. unused: {why they change no plan: patterns of keys}. lacking: {what is here
    instead: patterns}.
    """
    if (found := kind_of(path)) is None:
        return None
    kind, path = found
    table, given = tables(kind), dict[str, Any]()
    if why := table["refused"].get(path.suffix):
        raise UserError(f"{path}: {why}")
    for key, value in kind.given(path).items():
        name, _, word = (key if value is False else table["earlier"].get(key, key)).partition("=")
        given[name] = word or value
    said = {key: value for key, value in given.items() if "$" not in str(value)}
    reading = Reading(kind.NAME, path, table, said, devices, model_of, dict(table["meant"]))
    for key, ours in table["copied"].items():
        if said.get(key) is not None and said[key] is not False:
            _copy(reading, key, ours, table["words"].get(key))
    reading.understood |= {key: ours for key, ours in table["derived"].items() if key in said}
    kind.derive(reading)
    _complete(reading)
    told = {*reading.understood, *(text.partition(" = ")[0] for text in reading.missing)}
    known = {*table["copied"], *table["derived"], *table["earlier"]}
    for key in (key for key in given if key not in told):
        if (why := _named(table["unused"], key)) or given[key] in (None, False, "", [], {}):
            reading.unused.setdefault(why or "switched off", []).append(key)
        else:
            why = _named(table["lacking"], key) or f"not known here{did_you_mean(key, known, 0.9)}"
            reading.missing[f"{key} = {given[key]!s:.60}"] = (
                why if key in said else "the file does not say its value"
            )
    return reading


def _copy(reading: Reading, key: str, ours: str, words: Mapping[str, Any] | None) -> None:
    """Sets our field. Raises UserError: it cannot have this value."""
    given, reading.understood[key] = reading.given[key], ours
    for value in given if words and isinstance(given, list) else [given]:
        text = "true" if value is True else str(value)
        word = value if words is None else words.get(text, value if "*" in words else None)
        if word is None:
            why = f"{ours} has only what stands for {', '.join(words or ())}"
            return reading.lacks(key, _named(reading.tables["lacking"], key) or why)
        for name, one in (word if isinstance(word, dict) else {ours: word}).items():
            section, _, field = name.partition(".")
            for text in wrong(SECTIONS[section], {field: one}):
                raise UserError(f"{reading.path}: {key}: {text}")
            reading.fields[name] = one


def _complete(reading: Reading) -> None:
    """Sets what follows from the number of devices, and what a recipe needs. Drops what has no effect in it."""
    fields = reading.fields
    tp, pp, cp, replicas = (fields.get(f"layout.{axis}", 1) for axis in ("tp", "pp", "cp", "dp_replicate"))
    dp = fields.get("layout.dp_shard") or max(1, reading.devices // (tp * pp * cp * replicas))
    zero = fields.get("layout.zero", 0) if dp * cp > 1 else 0
    if not reading.devices and "layout.dp_shard" not in fields:
        reading.notes.append(f"planned for {tp * pp * cp * replicas} devices, the fewest (--cluster h100:64)")
    fields |= {"layout.zero": zero, "layout.dp_shard": dp if zero else 1}
    fields["layout.dp_replicate"] = replicas if zero else replicas * dp
    dropped = {"layout.sp", "layout.sp_regather"} if tp == 1 else set()
    dropped |= set() if fields.get("model.experts") else {"layout.ep"}
    local = fields.get("train.microbatch_size", 1) * fields.pop("layout.microbatches", 1)
    fields.setdefault("train.global_batch_size", local * dp * replicas)
    if (size := fields.get("model.vocab_size", 0)) == 0:
        reading.notes.append(f"the file does not say the vocabulary: {SMALL:,} (--set model.vocab_size=N)")
    elif size < SMALL:
        fields.setdefault("data.tokenizer", f"bpe:{size}")
    if not {"train.steps", "train.tokens"} & fields.keys():
        fields["train.steps"] = STEPS
        reading.notes.append(f"train.steps = {STEPS}: the file does not say how long the run is")
    with suppress(ValidationError):  # whoever makes a recipe of the fields says what is wrong
        dropped |= {key for key, *_ in unused(Sections.model_validate(reading.table()))}
    reading.fields = {key: value for key, value in fields.items() if key not in dropped}


def _named(table: Mapping[str, str], key: str) -> str | None:
    return next(
        (why for why, names in table.items() if any(fnmatchcase(key, n) for n in names.split())), None
    )
