"""Makes the questions of the set `talk`, src/fivefold/data/talk.json, always the same, from talk_questions.toml.

    python benchmarks/talk_questions.py

Held-out questions of facts have wordings that are two words or more from any trained one; those of other kinds have
numbers or words that are not trained on.
"""

from __future__ import annotations

import json
import random
import tomllib
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from fivefold.data.talk import FILE

TRAINED, HELD_OUT = 1200, 150
"""Questions of each kind."""
PLAIN, FRAMED, NAMED = 3, 5, 5
"""Wordings of a fact; wordings of facts that ask about an invented name."""
Item = TypeVar("Item")
Row = tuple[str, str, str]
"""Question, reply, answer."""


def questions(kind: str, held_out: bool) -> list[Row]:
    """The questions of a kind that are trained on, or those that are not."""
    count, rows = HELD_OUT if held_out else TRAINED, KINDS[kind](held_out)
    unique = {row[0]: row for row in _shuffled(rows, f"{kind} {held_out}")}
    assert len(unique) >= count, f"{kind}: {len(unique)} questions"
    return [*unique.values()][:count]


def written() -> str:
    """The file: by kind, the questions that are trained on, then those that are held out, one a line."""
    kinds = []
    for kind in KINDS:
        parts = (",\n".join(map(json.dumps, questions(kind, held_out))) for held_out in (False, True))
        kinds.append(json.dumps(kind) + ": [[\n" + "\n], [\n".join(parts) + "\n]]")
    return "{" + ",\n".join(kinds) + "}\n"


def _sums(held_out: bool) -> Iterator[Row]:
    """Sums and differences up to 99. a + b and b + a are in the same part."""
    rng, pairs = random.Random("sums"), [(a, b) for a in range(100) for b in range(a + 1)]
    sums = _part([(a, b) for a, b in pairs if a + b < 100], held_out)
    for a, b in [*sums, *((b, a) for a, b in sums)]:
        ones, carried = a % 10 + b % 10, " + 1" * (a % 10 + b % 10 > 9)
        steps = f"{a % 10} + {b % 10} = {ones}, {a // 10} + {b // 10}{carried} = {(a + b) // 10}, so "
        yield _worded(rng, "sum", a=a, b=b), f"{steps * (a + b > 9)}{a} + {b} = {a + b}.", str(a + b)
    for a, b in _part(pairs, held_out):
        borrowed = a % 10 < b % 10
        steps = f"{a % 10 + 10 * borrowed} - {b % 10} = {(a - b) % 10}, "
        steps += f"{a // 10 - borrowed} - {b // 10} = {(a - b) // 10}, so "
        yield _worded(rng, "difference", a=a, b=b), f"{steps * (a > 9)}{a} - {b} = {a - b}.", str(a - b)


def _spelling(held_out: bool) -> Iterator[Row]:
    for word in _words(held_out):
        for wording in _tables()["wordings"]["spell"]:
            spelled = "-".join(word)
            yield wording.format(w=word), f"{spelled}.", spelled


def _counting(held_out: bool) -> Iterator[Row]:
    """How many letters a word has, and how often it has one."""
    rng = random.Random("counting")
    for word in 2 * _words(held_out):
        steps = ", ".join(f"{letter} {number}" for number, letter in enumerate(word, 1))
        yield _worded(rng, "length", w=word), f"{steps}, so {len(word)}.", str(len(word))
        letter = rng.choice([*"aeinorst", *rng.sample(word, 3), *3 * max(word, key=word.count)])
        steps = ", ".join(f"{c} {word[: i + 1].count(c)}" if c == letter else c for i, c in enumerate(word))
        found = str(word.count(letter))
        yield _worded(rng, "count", w=word, l=letter), f"{steps}, so {found}.", found


def _units(held_out: bool) -> Iterator[Row]:
    """Factors of ten, a hundred and a thousand are asked in both directions. Others are a digit followed by zeros."""
    rng, units = random.Random("units"), [entry.split() for entry in _tables()["units"].split(",")]
    for large, small, factor, n in _part([(*unit, n) for unit in units for n in range(2, 100)], held_out):
        digit, (tens, ones), product = int(factor[0]), divmod(n, 10), n * int(factor)
        steps, back = f"1 {large} is {factor} {small}", f"{factor} {small} is 1 {large}"
        if digit > 1:
            carried = digit * ones // 10
            steps = (
                f"{digit} x {ones} = {digit * ones}, {digit} x {tens} + {carried} = {digit * tens + carried}"
            )
        yield _converted(rng, steps, (n, large), (product, small))
        if digit == 1:
            yield _converted(rng, back, (product, small), (n, large))


def _converted(rng: random.Random, steps: str, given: tuple[int, str], found: tuple[int, str]) -> Row:
    (a, x), (b, y) = given, found
    return _worded(rng, "convert", a=a, x=x, y=y), f"{steps}, so {a} {x} are {b} {y}.", f"{b} {y}"


def _facts(held_out: bool) -> Iterator[Row]:
    rng = random.Random("facts")
    pairs: list[list[str]] = []
    for table in _tables()["facts"]:
        turned = "pairs" not in table  # the pairs of the table before, from the other side
        pairs = [pair[::-1] for pair in pairs] if turned else [p.split() for p in table["pairs"].split(",")]
        for x, y in pairs:
            for wording in table["held_out"] if held_out else _wordings(rng, table):
                yield wording.format(x=x, y=y), table["reply"].format(x=x, y=y), y


def _wordings(rng: random.Random, table: dict[str, Any]) -> list[str]:
    """How a fact is asked in training: PLAIN of its table's questions, FRAMED phrases in frames."""
    plain, frames = rng.sample(table["asked"], PLAIN), rng.sample(_tables()["frames"], FRAMED)
    framed = [frame.replace("{p}", rng.choice(table["phrases"])) for frame in frames]
    before, after = _tables()["before"], _tables()["after"]
    return [rng.choice(before) + wording + rng.choice(after) for wording in plain + framed]


def _asking(held_out: bool) -> Iterator[Row]:
    """Questions that lack something, or ask about an invented name. The answer says which."""
    operands = {"{a}": list(range(2, 100)), "{w}": [word.capitalize() for word in _unknown("names", 400)]}
    for asked, reply in _tables()["asking"].items():
        mark = "{a}" if "{a}" in asked else "{w}"
        for operand in map(str, _part(operands[mark], held_out)):
            yield asked.replace(mark, operand), (answer := reply.replace(mark, operand)), answer
    rng = random.Random("asking")
    if held_out:
        return
    for name in _part(operands["{w}"], held_out):  # wordings of facts: the name has to be known
        for wording in rng.sample(_wordings(rng, rng.choice(_tables()["facts"])), NAMED):
            said = rng.choice((name, name.lower()))
            yield wording.format(x=said), (answer := f"I don't know {said}."), answer


KINDS: dict[str, Callable[[bool], Iterable[Row]]] = {
    "sums": _sums, "spelling": _spelling, "counting": _counting, "units": _units, "facts": _facts, "asking": _asking,
}  # fmt: skip


@cache
def _tables() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text())


def _worded(rng: random.Random, name: str, **values: Any) -> str:
    return rng.choice(_tables()["wordings"][name]).format(**values)


def _words(held_out: bool) -> list[str]:
    """Words. In training half of them are invented, so that any letter may follow any other."""
    words = _tables()["words"].split()
    return _part(words, held_out) + [
        w for w in _unknown("words", len(words)) if not held_out and w not in words
    ]


def _unknown(seed: str, count: int) -> list[str]:
    """Invented words of three to nine letters."""
    rng, letters = random.Random(seed), ("aeiou", "bcdfghjklmnpqrstvwxyz")
    made = (
        "".join(rng.choice(rng.choice(letters)) for _ in range(rng.randint(3, 9))) for _ in range(2 * count)
    )
    return list(dict.fromkeys(made))[:count]


def _part(items: list[Item], held_out: bool) -> list[Item]:
    """The items that are trained on, or the sixth that is not."""
    mixed, cut = _shuffled(items, "parts"), len(items) // 6
    return mixed[:cut] if held_out else mixed[cut:]


def _shuffled(items: Iterable[Item], seed: str) -> list[Item]:
    found = list(items)
    random.Random(seed).shuffle(found)
    return found


if __name__ == "__main__":
    FILE.write_text(written(), encoding="utf-8")
