"""Recipe fields and command options are frozen: a new one is entered in `options.toml` with its reason.

A field or an option costs every reader of a recipe, of a help text and of the code that combines it with all others.
`python tests/test_options.py` writes what there is, and keeps the reasons.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.main import get_command

from fivefold.cli.main import app
from fivefold.recipe.messages import KEYS

LIST = Path(__file__).with_name("options.toml")
LONG_ENOUGH = 30  # characters of a reason


def there() -> dict[str, list[str]]:
    """All fields by their section, and all options and arguments by their command."""
    found: dict[str, list[str]] = {}
    for key in KEYS:
        section, _, name = key.partition(".")
        found.setdefault(f"[{section}]", []).append(name)
    return {name: sorted(fields) for name, fields in (found | dict(options(get_command(app)))).items()}


def options(command, name: str = "fivefold") -> Iterator[tuple[str, list[str]]]:
    """The options and arguments of a command and of those below it."""
    names = (text for param in command.params for text in (*param.opts, *param.secondary_opts))
    yield name, [text for text in names if text not in ("-h", "--help")]
    for word, below in getattr(command, "commands", {}).items():
        yield from options(below, f"{name} {word}")


def wrong(known: dict[str, dict], now: dict[str, list[str]]) -> list[str]:
    """What the list does not say of the fields and options that there are."""
    reasons, frozen = known["reasons"], known["frozen"]
    listed = {f"{place} {name}" for place, names in frozen.items() for name in names}
    found = {f"{place} {name}" for place, names in now.items() for name in names}
    lines = [f"{name}: it is frozen, and needs no reason" for name in listed & reasons.keys()]
    lines += [f"{name}: say what it is good for" for name, why in reasons.items() if len(why) < LONG_ENOUGH]
    new, gone = found - listed - reasons.keys(), (listed | reasons.keys()) - found
    lines += [f"{name}: enter it in {LIST.name} under [reasons], with its reason" for name in new]
    return lines + [f"{name}: it is gone; take it out of {LIST.name}" for name in gone]


def test_a_new_field_or_option_has_a_reason() -> None:
    assert wrong(tomllib.loads(LIST.read_text()), there()) == []


def test_the_most_important_fields_are_ten_and_come_first() -> None:
    from fivefold.recipe import explain, load
    from fivefold.recipe.messages import ESSENTIAL

    assert len(ESSENTIAL) == 10
    assert [row.key for row in explain(load("quickstart"))][:10] == list(ESSENTIAL)


@pytest.mark.parametrize(
    ("now", "reasons", "words"),
    [
        ({"[model]": ["dim", "new"]}, {}, "[model] new: enter it"),
        ({"[model]": ["dim", "new"]}, {"[model] new": "useful"}, "[model] new: say what"),
        ({"[model]": []}, {}, "[model] dim: it is gone"),
        ({"[model]": ["dim"]}, {"[model] dim": "a reason that is long enough"}, "[model] dim: it is frozen"),
    ],
)
def test_what_is_new_gone_or_without_a_reason_is_found(now: dict, reasons: dict, words: str) -> None:
    lines = wrong({"frozen": {"[model]": ["dim"]}, "reasons": reasons}, now)
    assert any(line.startswith(words) for line in lines)


def write() -> None:
    reasons = tomllib.loads(LIST.read_text())["reasons"] if LIST.exists() else {}
    lines = [
        "# Recipe fields and command options; see test_options.py. Nothing is added to `frozen`.",
        "[frozen]",
    ]
    for place, names in there().items():
        kept = [name for name in names if f"{place} {name}" not in reasons]
        lines += [f'"{place}" = [', *(f'    "{name}",' for name in kept), "]"]
    lines += ["", "[reasons]", *(f'"{name}" = "{why}"' for name, why in reasons.items())]
    LIST.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    write()
