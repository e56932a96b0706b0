"""Random recipes: each is accepted, or refused in less than a second by one message with a key and what is allowed.

    python tests/chaos/fuzz_recipes.py --seeds 0:8000 --out benchmarks/results/fuzz_recipes.json

A seed always gives the same recipe. Where a message says "Nearest valid: KEY = VALUE", this is tried.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from fivefold.cli.check import summary
from fivefold.errors import LONGEST_MESSAGE, UserError, printable
from fivefold.recipe import load
from fivefold.recipe.load import shipped, source
from fivefold.recipe.messages import KEYS, plain_type
from fivefold.sharding.layout import AXES

SLOWEST_S = 1.0
HANGS_S = 20
WHOLE = [0, -1, 1, 2, 3, 5, 7, 8, 12, 64, 96, 100, 127, 384, 1000, 4096, 65537, 2**31 - 1, 2**31, 2**53 + 1, 2**63,
         10**6, 10**7, 1_000_000_007, 10**15 + 3, 10**18 + 9, 10**100, -(10**30), 720720]  # fmt: skip
USUAL = [0, 1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64, 96, 100, 128, 256, 512, 1000]
NUMBERS = [0.0, -0.0, 0.5, 1.0, 1.5, 1e-3, 5e-324, 1e-300, 1e300, 1.7e308, -1.0, 2.0**24, 65536.0]
WORDS = """none auto bpe:0 bpe:300 bpe:99999999999999999999 bpe:² bytes chars tokens:x budget:6GiB budget:1e9GiB
full*3/none*3 full*999999/none*1 ops:attention+gate ops: topk:0.01 topk:nan powersgd:4 4:100+8:200 zbv 1f1b ../../x
ulysses lion moe gpt2 weights,hier,gradients states:disk hierarchical server diloco"""
TEXTS = ["", " ", *WORDS.split(), "powersgd:" + "9" * 50, "9" * 50 + ":1", "e" * 5000, "x" * 100_000, "\x00",
         "\x1b]0;owned\x07", "\u202eevil", "\U0001f600" * 50, "a\nerror: all is well"]  # fmt: skip
RAW = ["inf", "-inf", "nan", "true", "[]", "[1, 2]", "{}", "{a = 1}", "[" * 101, "1979-05-27", "0x" + "f" * 50,
       "9" * 50, "0.1" + "0" * 3000, '"' + "\\u0000" + '"', "'''", "[[1], [2]]", "1e400", "0o17", "'\\'"]  # fmt: skip
HINTS = re.compile(
    r"must|give |keys: |[Nn]earest valid|did you mean|valid|at most|at least|needs?\b|only|leave|unknown|known|"
    r"not supported|expected|set |use |more than|has no|combine|cannot be measured|too long|no effect|nothing|UTF-8"
)
NEAREST = re.compile(r"Nearest valid: (\w+\.\w+) ?= ?(\"[^\"]*\"|[\w.]+)")


@dataclass
class Case:
    """What is loaded. touched: the fields that were changed, as `section.field`; empty if the text itself is
    damaged."""

    text: str | None
    name: str
    sets: list[str]
    layout: str | None
    touched: set[str] = field(default_factory=set)


def fitting(known: str, at: random.Random) -> str:
    """A value of the field's type, often one of those that people use."""
    type_ = plain_type(KEYS[known].annotation)
    if type_ is bool:
        return at.choice(["true", "false"])
    if type_ is int:
        return str(at.choice(USUAL) if at.random() < 0.8 else at.randrange(0, 1 << at.randrange(1, 24)))
    if type_ is float:
        return repr(at.choice([*NUMBERS, 0.1, 0.25, 0.9, 0.99]))
    if choices := get_args(type_):
        return json.dumps(at.choice(choices)) if isinstance(choices[0], str) else "[0.5, 0.9]"
    return json.dumps(at.choice(TEXTS))


def literal(at: random.Random) -> str:
    """A value as TOML writes it, or something else."""
    kind = at.random()
    if kind < 0.35:
        return str(at.choice(WHOLE)) if at.random() < 0.7 else str(at.randrange(1, 1 << at.randrange(1, 80)))
    if kind < 0.5:
        return repr(at.choice(NUMBERS))
    if kind < 0.8:
        return json.dumps(at.choice(TEXTS), ensure_ascii=at.random() < 0.5)
    return at.choice(RAW)


def key(at: random.Random) -> str:
    known = at.choice(list(KEYS))
    section, _, name = known.partition(".")
    kind = at.random()
    if kind < 0.85:
        return known
    if kind < 0.93:  # a slip of the pen
        place = at.randrange(len(name))
        return f"{section}.{name[:place]}{at.choice('xyz_')}{name[place + at.randrange(2) :]}"
    return f"{at.choice(['model', 'layout', 'nowhere'])}.{name}"


def layout(at: random.Random) -> str:
    parts = []
    for axis in at.sample(["dp", *AXES, "zero", "ep"], at.randrange(1, 5)):
        parts.append(f"{axis}={at.choice([1, 2, 3, 4, 8])}")
    if at.random() < 0.4:
        name = at.choice(
            ["schedule", "virtual_stages", "sp", "tpp", "", "recompute", "offload", "compress", "tp", "dp"]
        )
        parts.append(f"{name}={at.choice([*map(str, WHOLE), 'true', 'zbv', '', 'full', 'x' * 3000, '²'])}")
    return ",".join(parts)


def damaged(text: str, at: random.Random) -> str:
    """The text with some of its characters changed, cut or repeated."""
    for _ in range(at.randrange(1, 4)):
        place, length = at.randrange(len(text)), at.choice([1, 1, 3, 20, 200])
        new = at.choice(
            [
                "",
                "\x1b[2J",
                "=",
                "[",
                '"',
                "\n",
                "\x00",
                "9" * 50,
                "[a.b]\n",
                text[place : place + length] * 2,
            ]
        )
        text = text[:place] + new + text[place + length :]
    return text


def case(seed: int) -> Case:
    at = random.Random(seed)
    name = at.choice([*shipped(), "quickstart", "quickstart", "quickstart"])
    if at.random() < 0.15:
        return Case(damaged(source(name), at), name, [], None)
    pairs = []
    for _ in range(at.choice([1, 1, 1, 2, 3, 6])):
        known = key(at)
        pairs.append((known, fitting(known, at) if known in KEYS and at.random() < 0.7 else literal(at)))
    chosen = layout(at) if at.random() < 0.3 else None
    touched = {known for known, _ in pairs}
    names = {part.partition("=")[0] for part in (chosen or "").split(",") if part}
    touched |= {
        f"layout.{name}" for name in names | ({"dp_replicate", "dp_shard"} if "dp" in names else set())
    }
    if at.random() < 0.5:  # in the file: the changed keys stand in its sections, in place of what was there
        text = source(name)
        for known, value in pairs:
            section, _, field_ = known.partition(".")
            text = re.sub(rf"(?m)^{re.escape(field_)} *=.*\n", "", text)
            head = f"[{section}]\n"
            line = f"{field_} = {value}\n"
            text = text.replace(head, head + line, 1) if head in text else f"{text}\n{head}{line}"
        return Case(text, name, [], chosen, touched)
    return Case(None, name, [f"{known}={value}" for known, value in pairs], chosen, touched)


def outcome(one: Case, folder: Path, more: list[str] | None = None) -> str:
    """The message of the error; "" if the recipe is valid."""
    recipe: Any = one.name
    if one.text is not None:
        recipe = folder / "fuzzed.toml"
        recipe.write_bytes(one.text.encode("utf-8", "surrogatepass"))
    try:
        summary(load(recipe, [*one.sets, *(more or [])], one.layout))
    except UserError as error:
        return str(error)
    return ""


def named(one: Case, message: str) -> bool:
    """True if a message says where to look: a touched field by its full name, as `--layout` has it in a sentence on the
    layout, or the recipe's file with a line. A damaged text has touched any field."""
    fields = set(one.touched or KEYS)
    if any(re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", message) for name in fields):
        return True
    parts = [name.removeprefix("layout.") for name in fields if name.startswith("layout.")]
    sentences = re.findall(r"(?m)\blayout(?: '|: ).*", message)
    if any(re.search(rf"\b{re.escape(part)}\b", text) for part in parts for text in sentences):
        return True
    return bool(re.search(r"\.toml:(\d+| line \d+)|(?m:^  \d+\. line \d+)", message))


def problem(one: Case, message: str) -> str:
    """What is wrong with a message."""
    if printable(message) != message or len(message) >= LONGEST_MESSAGE:
        return "not printable, or cut"
    if not HINTS.search(message):
        return "no hint"
    if not named(one, message):
        return "names no key that was touched, and no line"
    return ""


def advice(one: Case, message: str, folder: Path) -> str | None:
    """What is wrong with the nearest valid value that a message with one problem proposes; None: it proposes none."""
    found = NEAREST.search(message)
    if not found or " problems" in message.partition("\n")[0] or found[1] not in KEYS:
        return None
    after = outcome(one, folder, [f"{found[1]}={found[2]}"])
    return (
        f"{found[0]} gives: {after}" if after and after.split(":", 1)[1:] == message.split(":", 1)[1:] else ""
    )


def fuzz(seeds: range, tell: bool = False) -> dict[str, Any]:
    """Loads the recipes of these seeds. `failures` says what went wrong, by seed."""
    counts: Counter[str] = Counter()
    failures: dict[int, str] = {}
    slowest, longest = (0.0, -1), 0

    def alarm(*_: object) -> None:
        raise TimeoutError(f"more than {HANGS_S} s")

    before = signal.signal(signal.SIGALRM, alarm)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for seed in seeds:
            one = case(seed)
            signal.alarm(HANGS_S)
            began = time.process_time()
            try:
                message = outcome(one, folder)
                took = time.process_time() - began
                slowest, longest = max(slowest, (took, seed)), max(longest, len(message))
                counts["refused" if message else "valid"] += 1
                wrong = problem(one, message) if message else ""
                if took > SLOWEST_S:
                    wrong = f"{took:.2f} s"
                if message and not wrong and (said := advice(one, message, folder)) is not None:
                    counts["advice tried"] += 1
                    wrong = said
                if wrong:
                    failures[seed] = f"{wrong}: {message[:400]}"
            except Exception as error:
                last = traceback.extract_tb(error.__traceback__)[-1]
                failures[seed] = f"{type(error).__name__}: {str(error)[:200]} ({last.filename}:{last.lineno})"
            finally:
                signal.alarm(0)
            if tell and seed in failures:
                print(seed, failures[seed], file=sys.stderr)
    signal.signal(signal.SIGALRM, before)
    return {
        "seeds": [seeds.start, seeds.stop],
        "recipes": len(seeds),
        **counts,
        "slowest_s": round(slowest[0], 3),
        "slowest_seed": slowest[1],
        "longest_message": longest,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "failures": failures,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0:8000", metavar="FROM:TO")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    start, stop = map(int, arguments.seeds.split(":"))
    found = fuzz(range(start, stop), tell=True)
    command = f"python tests/chaos/fuzz_recipes.py --seeds {arguments.seeds}"
    text = json.dumps({"command": command, **found}, indent=1)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")
    sys.exit(bool(found["failures"]))


if __name__ == "__main__":
    main()
