"""A recipe: its sections, checked against each other. Read from a file, with overrides; all errors come at once.
What it leaves open is taken over from `train.init_from`."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from html import escape
from operator import attrgetter
from pathlib import Path
from typing import Any

from pydantic import ValidationError, model_validator

from fivefold.errors import LONGEST_WORD, Problem, UserError, brief, did_you_mean, problem, shortened
from fivefold.files import expanded, guard, parse_toml, read_text
from fivefold.models.section import LARGEST
from fivefold.recipe import dial, foreign, messages
from fivefold.recipe.dial import dialled
from fivefold.recipe.foreign.hugging_face import HERE, hf_model
from fivefold.recipe.messages import KEYS, SECTIONS, none_unsets, plain_type, to_toml, without_gone
from fivefold.recipe.rules import contradictions
from fivefold.recipe.rules.texts import run_steps, steps_for
from fivefold.recipe.schema import Sections
from fivefold.sharding.layout import Layout, describe
from fivefold.sharding.layout import parse as parse_layout

MOST_BYTES = 256 << 10
"""Size of a recipe's file. A long one has 5 KiB."""
REPLACED = {
    "train.steps": ("train.tokens",),
    "train.tokens": ("train.steps",),
    "data.source": ("data.sources", "data.stages", "data.weigh_by"),
    "data.sources": ("data.source",),
}
"""{a field: those that setting it unsets}."""
_SHIPPED = Path(__file__).parent.parent / "recipes"
"""A folder for each family of models."""
EARLIER = {"llama-7b": "llama2-7b"}
"""Names of shipped recipes in earlier versions."""
FIRST = "quickstart"
"""The recipe of who is new here."""
OURS = "a shipped recipe"
"""The origin of what a user has not written."""


@brief
def load(
    name_or_path: str | Path,
    overrides: Sequence[str] = (),
    layout: str | None = None,
    over: Sequence[str] = (),
    devices: int | None = None,
) -> Recipe:
    """Reads a recipe: a file, or the name of a shipped recipe.

    Args:
        name_or_path: `quickstart`, or `path/to/recipe.toml`.
        overrides: `section.key=value` texts as after `--set`; values are TOML (`3e-4`, `true`,
            `[0.9, 0.99]`), else plain text; `none` unsets a field that may be unset. Setting one of
            `train.steps` and `train.tokens` drops the other, and so does one of `data.source` and `data.sources`.
            `data.sources.web.weight=0.3` sets a field of the source with the name `web`.
        layout: text as after `--layout`, such as `dp=2,zero=1`. It replaces the whole `[layout]` section. Fields that
            it does not name have their defaults. `overrides` come after it.
        over: overrides of one run of a sweep, as after `--over`. They come last.
        devices: for how many a configuration of another program is read (0: not known); None: it is refused.

    Raises:
        UserError: it names the file and every wrong key, with its line, its value and what is allowed.
    """
    if devices is not None and (reading := read_foreign(name_or_path, devices)):
        return _Draft(reading.table(), {}).finish(f"{reading.path}", overrides, layout, over)
    table, origins = _with_base(find(name_or_path))
    return _Draft(table, origins).finish(f"recipe {name_or_path}", overrides, layout, over)


def read_foreign(name_or_path: str | Path, devices: int) -> foreign.Reading | None:
    """What is read of another program's configuration (see `foreign.read`); None: it is none."""
    if not is_foreign(name_or_path):
        return None
    return foreign.read(Path(name_or_path), devices, lambda base: _with_base(find(base))[0]["model"])


def is_foreign(name_or_path: str | Path) -> bool:
    """True if this is another program's configuration, and no recipe."""
    return str(name_or_path) not in _files() and foreign.kind_of(Path(name_or_path)) is not None


@brief
def change(recipe: Recipe, overrides: Sequence[str] = (), layout: str | None = None) -> Recipe:
    """Returns a copy of a recipe with overrides, as in `load`.

    Raises:
        UserError: as `load`.
    """
    table = recipe.model_dump(exclude_none=True)
    return _Draft(table, {}).finish("recipe", overrides, layout)


def shipped() -> dict[str, str]:
    """The shipped recipes: {name: first line of its comment}."""
    texts = {name: file.read_text(encoding="utf-8") for name, file in _files().items()}
    return {name: text.split("\n", 1)[0].lstrip("# ") for name, text in texts.items()}


def published() -> dict[str, int]:
    """The years in which models of shipped recipes were published: {name: year}, by the paper's number or the date in
    the first line of the comment."""
    pattern = re.compile(r"\((?:arXiv (\d\d)\d\d\.\d+|[^()]* (\d{4}))\)")
    found = {name: pattern.search(line) for name, line in shipped().items()}
    return {name: int(m[2] or f"20{m[1]}") for name, m in found.items() if m}


def families() -> dict[str, list[str]]:
    """The names of the shipped recipes by family, in alphabetical order; first the family of FIRST."""
    found: dict[str, list[str]] = {}
    for name, file in _files().items():
        found.setdefault(file.parent.name, []).append(name)
    return dict(sorted(found.items(), key=lambda item: (FIRST not in item[1], item[0])))


def _files() -> dict[str, Path]:
    return {file.stem: file for file in sorted(_SHIPPED.glob("*/*.toml"), key=lambda file: file.stem)}


def source(name_or_path: str | Path) -> str:
    """The text of a recipe, as it stands in its file.

    Raises:
        UserError: there is none, or it is not UTF-8 text.
    """
    return read_text(find(name_or_path), MOST_BYTES)


def find(name_or_path: str | Path) -> Path:
    """The file of a shipped name or a path.

    Raises:
        UserError: there is none; the message names the nearest shipped recipe.
    """
    files = _files()
    name = EARLIER.get(str(name_or_path), str(name_or_path))
    if name in files:
        return files[name]
    path = Path(name_or_path)
    foreign.refuse(path)
    if path.is_file():
        return path
    if (path / "recipe.toml").is_file():
        raise UserError(
            f"recipe '{path}': this is a run folder. Resume the run with `fivefold train {path} --resume`, or pass "
            f"its recipe, {path / 'recipe.toml'}"
        )
    what = "no such file, and no shipped recipe of this name"
    if path.is_dir():
        what = "this is a folder, not a recipe file"
    hint = did_you_mean(path.name.removesuffix(".toml"), files)
    raise UserError(f"recipe '{name_or_path}': {what}{hint or '.'} `fivefold recipes` lists the shipped ones")


def _with_base(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """(table, origins) of a file, with the fields of its base that it does not set. Its [layout] replaces the base's as
    a whole, and each of train.steps and train.tokens replaces the other. Raises UserError: the file is not valid TOML,
    or its base is no shipped recipe."""
    text = read_text(path, MOST_BYTES)
    try:
        table = parse_toml(text)
    except tomllib.TOMLDecodeError as error:
        message, _, place = str(error).partition(" (at ")
        # the place is "line 3, column 5", or "end of document"
        line, column = re.findall(r"\d+", place) or (text.count("\n") + 1, len(text) - text.rfind("\n"))
        colon = path.suffix != ".toml" or re.match(r"\s*[\w-]+\s*:", text.split("\n")[int(line) - 1])
        like = ". A recipe is TOML: a line [train], below it lines such as steps = 100" if colon else ""
        raise UserError(f"{path}:{line}:{column}: not valid TOML: {message}{like}") from None
    except (ValueError, RecursionError):
        # Beyond what Python reads: numbers of 4300 digits, 1000 nested lists
        counts = [len(re.findall(r"[\w\[{]", line)) for line in text.splitlines()]
        line = counts.index(max(counts)) + 1  # with the most digits or brackets
        raise UserError(f"{path}:{line}: a number is too long, or lists are nested too deeply") from None
    origins, files = _lines(text), _files()
    if path in files.values():
        origins = {f"{section}.{name}": OURS for section, fields in table.items() for name in fields}
    if "base" not in table:
        return table, origins
    base = table.pop("base")
    if not isinstance(base, str) or EARLIER.get(base, base) not in files:
        hint = did_you_mean(base, files) if isinstance(base, str) else ""
        raise UserError(
            f"recipe {path}: {origins.get('base', 'base')}: base = {messages.short(base)}: must be the name of a "
            f"shipped recipe{hint or ', one of ' + ', '.join(files)}"
        )
    below, _ = _with_base(files[EARLIER.get(base, base)])
    for key, others in REPLACED.items():
        section, name = key.split(".")
        own = table.get(section)
        if isinstance(own, dict) and name in own:
            below[section] = {
                k: v for k, v in below.get(section, {}).items() if f"{section}.{k}" not in others
            }
    for section, fields in below.items():
        own = table.get(section, {})
        if isinstance(own, dict) and (section != "layout" or section not in table):
            table[section] = fields | own
            origins |= {f"{section}.{name}": OURS for name in fields.keys() - own.keys()}
    return table, origins


def _lines(text: str) -> dict[str, str]:
    """Line of each key: `optim.lr` -> `line 12`. It parses the lines itself, because tomllib gives no positions."""
    found, section = {}, ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[+\s*([\w.-]+)\s*\]", line):
            section = header[1]
            for name in (section, section.partition(".")[0]):
                found.setdefault(name, f"line {number}")
        elif key := re.match(r"\s*([\w.-]+)\s*=", line):
            found.setdefault(f"{section}.{key[1]}" if section else key[1], f"line {number}")
    return found


class _Draft:
    """Turns a parsed table into a `Recipe` and collects its errors."""

    def __init__(self, table: dict[str, Any], origins: dict[str, str]):
        self.table = {key: without_gone(key, value) for key, value in table.items()}
        self.origins = origins  # key -> where it was written: a line, --set or --layout
        self.problems: list[Problem] = []
        self.wrong: set[str] = set()  # keys that have a problem of their own

    def finish(
        self, name: str, overrides: Sequence[str], layout: str | None, over: Sequence[str] = ()
    ) -> Recipe:
        """Applies layout and overrides, checks each field, then the rules between fields."""
        if layout is not None:
            try:
                self.table["layout"] = parse_layout(layout)
                self.origins |= {f"layout.{key}": "--layout" for key in self.table["layout"]}
            except UserError as error:
                self.problems += error.problems
        if any(text.partition("=")[0].strip() == dial.KEY for text in (*overrides, *over)):
            self._forget_dialled()
        self._override(overrides, "--set")
        self._override(over, "--over")
        self._take_over()
        for key, value in self.table.items():
            if key not in SECTIONS:
                self._problem(key, value, messages.unknown_section(key, value))
        sections = {section: self._section(section) for section in SECTIONS}
        draft = dialled(Recipe.model_construct(**sections), self._given())
        for keys, message in contradictions(draft):
            if not keys & self.wrong:
                if mine := sorted(keys & self._dialled()):
                    message += f" (model.depth = {draft.model.depth} sets {' and '.join(mine)})"
                first = min((key for key in keys if key in message), key=message.index, default=min(keys))
                section, _, field = first.partition(".")
                self.problems.append(
                    problem(message, first, getattr(getattr(draft, section, None), field, None))
                )
        if not (draft.train.steps or draft.train.tokens or {"train.steps", "train.tokens"} & self.wrong):
            message = "set train.steps or train.tokens, the length of the run"
            self.problems.append(problem(message, "train.steps"))
        if self.problems:
            raise UserError(
                messages.list_problems(name, [one.message for one in self.problems]), self.problems
            )
        return Recipe(**dict(self._shortened(draft)))

    def _shortened(self, draft: Recipe) -> Recipe:
        """The recipe of a run that is shorter than what it does every so many steps, where the user has not said it."""
        steps, given = run_steps(draft) or 0, self._given()
        for section, name in (("train", "val_every"), ("train", "sample_every"), ("checkpoint", "every")):
            fields = getattr(draft, section)
            if (getattr(fields, name) or 0) > steps and f"{section}.{name}" not in given:
                draft = draft.model_copy(update={section: fields.model_copy(update={name: steps})})
        return draft

    def _given(self) -> set[str]:
        """The fields that the dial leaves alone: what a shipped recipe says gives way to a user's depth."""
        tables = {section: fields for section, fields in self.table.items() if isinstance(fields, dict)}
        given = (f"{section}.{name}" for section, fields in tables.items() for name in fields)
        all_stay = self.origins.get(dial.KEY) == OURS
        return {key for key in given if all_stay or self.origins.get(key) != OURS}

    def _dialled(self) -> set[str]:
        """The fields that the dial sets here."""
        depth = "depth" in self.table.get("model", {}) if isinstance(self.table.get("model"), dict) else False
        return {*dial.KEYS} - self._given() if depth else set()

    def _forget_dialled(self) -> None:
        """Leaves open what a run's recipe, which names every field, has from a depth of its own: a new depth sets it.
        A recipe that leaves some of these fields open was written by hand, and what it names stays."""
        draft = _Draft(self.table, self.origins)
        found = Recipe.model_construct(**{section: draft._section(section) for section in SECTIONS})
        if found.model.depth is None or draft.problems:  # they are said later
            return
        given, full = self._given(), dialled(found, self._given())
        if any(attrgetter(key)(full) is not None for key in {*dial.KEYS} - given):
            return
        for key in dial.follows(full, steps_for):
            section, _, name = key.partition(".")
            self.table.get(section, {}).pop(name, None)

    def _take_over(self) -> None:
        """Fills what is open of the model and the tokenizer by `train.init_from`. What a shipped recipe says of them
        gives way."""
        train = self.table.get("train")
        where = train.get("init_from") if isinstance(train, dict) else None
        if not isinstance(where, str) or not where or "\0" in where:
            return
        try:
            found = taken_over(where)
        except UserError as error:
            self.problems.append(
                problem(f"train.init_from = {messages.short(where)}: {error}", "train.init_from")
            )
            return
        for section, fields in found.items():
            own = self.table.setdefault(section, {})
            if isinstance(own, dict) and fields:
                yielding = own.keys() - HERE if section == "model" else fields.keys()
                ours = {name for name in yielding if self.origins.get(f"{section}.{name}") == OURS}
                own = {name: value for name, value in own.items() if name not in ours}
                new = {name: value for name, value in fields.items() if name not in own}
                self.table[section] = own | new
                self.origins |= {f"{section}.{name}": f"train.init_from ({where})" for name in new}

    def _problem(self, key: str, value: Any, message: str) -> None:
        self.wrong.add(key)
        allowed = messages.allowed(KEYS[key]) if key in KEYS else None
        whole = f"{self.origins[key]}: {message}" if key in self.origins else message
        self.problems.append(problem(whole, key, value, allowed))

    def _override(self, overrides: Sequence[str], option: str) -> None:
        """Writes `section.key=value` texts, given after `option`, into the table."""
        given: set[str] = set()
        for text in overrides:
            key, equals, raw = (part.strip() for part in text.partition("="))
            value: Any = raw  # parsed as TOML; the text itself if it is none, or the field holds text
            with suppress(ValueError, RecursionError):  # not TOML, or beyond what Python reads
                parsed = parse_toml(f"v = {raw}")
                wants_text = key in KEYS and plain_type(KEYS[key].annotation) is str
                if parsed.keys() == {"v"} and (not wants_text or isinstance(parsed["v"], str)):
                    value = parsed["v"]
            section, dot, name = key.partition(".")
            if not (equals and section and dot and name):
                said = shortened(text, LONGEST_WORD)
                near = f"; did you mean {home}={raw}?" if (home := messages.home(key)) and raw else ""
                message = f"{option} {said}: must have the form section.key=value{near}"
                self.problems.append(problem(message, option, said, "section.key=value"))
                continue
            values = self.table.setdefault(section, {})
            if not isinstance(values, dict):
                continue  # the file has `section = ...`, which is reported as such
            origin = f"{option} {shortened(text, LONGEST_WORD)}"
            self.origins |= {key: origin, section: self.origins.get(section, origin)}
            if entry := self._entry_of(section, name):
                table, field = entry
                table[field] = value
                if raw.lower() == "none":
                    del table[field]
            elif raw.lower() == "none" and none_unsets(key):
                values.pop(name, None)
            else:
                given.add(key)
                values[name] = value
        for one, others in REPLACED.items():
            for other in others if one in given else ():
                if other not in given:
                    section, _, name = other.partition(".")
                    self.table[section].pop(name, None)

    def _entry_of(self, section: str, name: str) -> tuple[dict[str, Any], str] | None:
        """For `data` and `sources.web.weight`: the table of the source with the name `web`, and `weight`."""
        field, _, rest = name.partition(".")
        wanted, _, key = rest.rpartition(".")
        entries = self.table.get(section, {}).get(field)
        listed = messages.entry_type(f"{section}.{field}")
        if not (wanted and listed and isinstance(entries, list | tuple)):
            return None
        copies = [dict(entry) if isinstance(entry, dict) else entry for entry in entries]
        self.table[section][field] = copies
        found = [entry for entry in copies if isinstance(entry, dict) and entry.get("name") == wanted]
        return (found[0], key) if found else None

    def _section(self, section: str) -> Any:
        """Checks one section. A wrong field is reported and gets its default, so that checking can continue."""
        values, cls = self.table.get(section, {}), SECTIONS[section]
        if not isinstance(values, dict):
            said = f"{section} = {messages.short(values)}: must be a section"
            self._problem(section, values, f"{said}; write a line [{section}], then its keys")
            self.wrong |= {f"{section}.{name}" for name in cls.model_fields}
            return cls()
        values = dict(values)
        for name, value in values.items():  # a tuple for a list, and 1000000 for 1e6 where numbers are whole
            key = f"{section}.{name}"
            whole = key in KEYS and plain_type(KEYS[key].annotation) is int
            if isinstance(value, list):
                values[name] = tuple(value)
            elif whole and isinstance(value, float) and value.is_integer() and abs(value) <= LARGEST:
                values[name] = int(value)
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            names = dict.fromkeys(str(e["loc"][0]) for e in error.errors())
        for name in names:
            key, value = f"{section}.{name}", values[name]
            if messages.entry_type(key):
                for message in messages.bad_entries(key, value):
                    self._problem(key, value, message)
                continue
            self._problem(key, value, messages.bad_field(key, value))
        return cls.model_validate({name: v for name, v in values.items() if name not in names})


class Recipe(Sections):
    """A recipe. Sections may be left out, because every field but one of steps and tokens has a default.

    Raises:
        pydantic.ValidationError: a field is wrong, or fields contradict each other (see `rules/`).
    """

    @model_validator(mode="after")
    def _fields_agree(self) -> Recipe:
        found = [message for _, message in contradictions(self)]
        if found:
            raise ValueError("; ".join(found))
        return self

    def __repr__(self) -> str:
        model, train = self.model, self.train
        length = f"{train.steps:,} steps" if train.steps else f"{train.tokens:,} tokens"
        shape = f"{model.arch}, {model.layers} layers, D {model.dim}, T {model.seq_len}"
        layout = describe(Layout.from_recipe(self.layout))
        return f"Recipe: {shape}; {length}, batch {train.global_batch_size}; {layout}"

    def _repr_html_(self) -> str:
        """What a notebook shows: a line, and behind it the recipe as TOML."""
        return f"<details><summary>{escape(repr(self))}</summary><pre>{escape(to_toml(self))}</pre></details>"


def home(where: str) -> Path | None:
    """The folder that describes the model of `train.init_from`: a run folder, also for one of its checkpoints, or a
    Hugging Face folder. None: there is none."""
    with suppress(OSError, ValueError):  # no path at all
        path = expanded("train.init_from", where)
        run = path.absolute().parent.parent
        if (path / "recipe.toml").is_file() or (path / "config.json").is_file():
            return path
        if path.absolute().parent.name == "checkpoints" and (run / "recipe.toml").is_file():
            return run
    return None


def required(where: str) -> Path:
    """The same.

    Raises:
        UserError: there is none. The message names a similar one.
    """
    if (folder := home(where)) is not None:
        return folder
    path, known = expanded("train.init_from", where), dict[str, str]()
    with suppress(OSError):
        near = [folder for parent in (path.parent, Path("runs")) for folder in parent.glob("*")]
        known = {folder.name: str(folder) for folder in near if home(str(folder))}
    what = "has neither recipe.toml nor config.json" if path.exists() else "no such folder"
    hint = did_you_mean(path.name, known)
    listed = f". There are {', '.join(sorted(known.values())[-5:])}" if known and not hint else ""
    raise UserError(
        f"train.init_from = {where}: {what}{hint or listed}. It must be a run folder, one of its checkpoints, or a "
        "Hugging Face folder"
    )


def taken_over(where: str) -> dict[str, dict[str, Any]]:
    """Fields by section for a recipe that leaves them open.

    A folder that is gone gives nothing: the recipe of a run is explicit, and whoever starts a run says what is missing.
    """
    folder = home(where)
    if folder is None:
        return {}
    guard(folder, look=False)
    if (folder / "recipe.toml").is_file():
        model = _with_base(folder / "recipe.toml")[0].get("model", {})
        if not isinstance(model, dict):
            raise UserError("train.init_from: its recipe.toml has no section [model]")
        model = {name: value for name, value in model.items() if name not in HERE}
    else:
        model = hf_model(folder)
    tokenizer = folder / "tokenizer.json"
    data = {"tokenizer": str(tokenizer.absolute())} if tokenizer.is_file() else {}
    return {"model": model, "data": data}
