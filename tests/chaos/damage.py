"""Random damage of checkpoints: each is found before a weight changes, and the checkpoint before it is used."""

from __future__ import annotations

import os
import random
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from pool_runs import ranks_of, train_rank
from ranks import run_ranks

from fivefold.checkpoint import store
from fivefold.data import prepare
from fivefold.errors import UserError
from fivefold.recipe import Recipe, change, resolve
from fivefold.step.state import State, build_state
from fivefold.train.job import Job
from fivefold.train.resume import resume

OLDER, NEWEST = 1, 2


def flip(newest: Path, older: Path, at: random.Random) -> str:
    return _in_a_file(
        newest, at, lambda data, i: data[:i] + bytes([data[i] ^ 1 << at.randrange(8)]) + data[i + 1 :]
    )


def overwrite(newest: Path, older: Path, at: random.Random) -> str:
    return _in_a_file(newest, at, lambda data, i: data[:i] + bytes(len(data[i : i + 512])) + data[i + 512 :])


def truncate(newest: Path, older: Path, at: random.Random) -> str:
    return _in_a_file(newest, at, lambda data, i: data[:i])


def extend(newest: Path, older: Path, at: random.Random) -> str:
    return _in_a_file(newest, at, lambda data, i: data + at.randbytes(i % 100 + 1))


def remove(newest: Path, older: Path, at: random.Random) -> str:
    file = at.choice(_files(newest))
    file.unlink()
    return file.name


def exchange(newest: Path, older: Path, at: random.Random) -> str:
    a, b = at.sample([file for file in _files(newest) if file.suffix != ".json"], 2)
    a.rename(newest / "x")
    b.rename(a)
    (newest / "x").rename(b)
    return f"{a.name}, {b.name}"


def of_another_step(newest: Path, older: Path, at: random.Random) -> str:
    file = at.choice(_files(newest))
    _write(file, (older / file.name).read_bytes())
    return file.name


def rename(newest: Path, older: Path, at: random.Random) -> str:
    """Another step's name for the folder."""
    name = store.folder_of(newest.parent.parent, at.choice([3, 20, 99999999])).name
    newest.rename(newest.with_name(name))
    return name


def digit(newest: Path, older: Path, at: random.Random) -> str:
    """Another digit in the manifest, which stays JSON."""
    return _in_manifest(newest, at, r"\d", lambda text: str((int(text) + at.randint(1, 9)) % 10))


def word(newest: Path, older: Path, at: random.Random) -> str:
    """A word of the manifest in another's place."""
    words = re.findall(r'"[^"]+"', (newest / store.MANIFEST).read_text())
    return _in_manifest(newest, at, r'"[^"]+"', lambda text: at.choice([w for w in words if w != text]))


KINDS: tuple[Callable[[Path, Path, random.Random], str], ...] = (
    flip, flip, flip, flip, overwrite, truncate, extend, remove, exchange, of_another_step, rename, digit, word,
)  # fmt: skip


def _files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def _write(file: Path, data: bytes) -> None:
    file.unlink()  # it may be linked to the intact one
    file.write_bytes(data)


def _in_a_file(newest: Path, at: random.Random, change: Callable[[bytes, int], bytes]) -> str:
    """Changes a file at a random byte: the manifest as often as all others together."""
    files = _files(newest)
    file = at.choice(files) if at.random() < 0.5 else newest / store.MANIFEST
    data, i = file.read_bytes(), at.randrange(file.stat().st_size)
    found = change(data, i)
    if found == data:  # zeros over zeros
        found = data[:-1]
    _write(file, found)
    return f"{file.name}, byte {i}"


def _in_manifest(newest: Path, at: random.Random, pattern: str, change: Callable[[str], str]) -> str:
    text = (newest / store.MANIFEST).read_text()
    place = at.choice(list(re.finditer(pattern, text)))
    _write(newest / store.MANIFEST, (text[: place.start()] + change(place[0]) + text[place.end() :]).encode())
    return f"{place[0]} at {place.start()}"


class Harness:
    """A run with two checkpoints of so many ranks, and one state into which it is resumed after each damage."""

    def __init__(self, recipe: Recipe, folder: Path, ranks: int = 2):
        self.run, self.intact = folder / "run", folder / "intact"
        sets = ["checkpoint.every=1", f"train.steps={NEWEST}"]
        if ranks == 1:
            train_rank(0, 1, change(recipe, sets), self.intact)
        else:
            shared = change(recipe, sets, f"dp={ranks},zero=3")
            run_ranks(ranks, train_rank, shared, self.intact, timeout_s=60)
        data = prepare(recipe)
        alone = change(resolve(recipe, vocab_size=data.vocab_size), [f"train.steps={NEWEST}"])
        self.job = Job(alone, self.run, data, resume=True)
        self.state = build_state(alone, ranks_of(0, 1))
        self.older = self._values_of(OLDER)
        self.newest = self._values_of(NEWEST)

    def _values_of(self, step: int) -> dict[str, torch.Tensor]:
        shutil.rmtree(self.run, ignore_errors=True)
        shutil.copytree(self.intact, self.run)
        for other in {OLDER, NEWEST} - {step}:
            shutil.rmtree(store.folder_of(self.run, other))
        assert resume(self.state, self.job) is not None
        assert self.state.step == step
        return values(self.state)

    def damaged(self, number: int, seed: int) -> tuple[str, str]:
        """(kind of damage, what came of it: "refused", "fell back", or "accepted ..." if it was not found)."""
        at = random.Random(f"{seed}-{number}")
        shutil.rmtree(self.run)
        shutil.copytree(self.intact, self.run, copy_function=os.link)
        kind = KINDS[number % len(KINDS)]
        where = kind(store.folder_of(self.run, NEWEST), store.folder_of(self.run, OLDER), at)
        before = values(self.state)
        try:
            resume(self.state, self.job)
        except UserError:
            same, outcome = before, "refused"
        else:
            same, outcome = self.older, "fell back"
            if self.state.step != OLDER:
                outcome = f"accepted as step {self.state.step} ({where})"
        now = values(self.state)
        if not outcome.startswith("accepted") and any(
            not torch.equal(now[name], same[name]) for name in same
        ):
            outcome = f"accepted: {outcome}, with other weights ({where})"
        return kind.__name__, outcome


def values(state: State) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in {**state.masters(), **state.moments()}.items()}


def count(found: list[tuple[str, str]]) -> dict[str, dict[str, int]]:
    """How often each outcome came of each kind."""
    table: dict[str, Counter[str]] = {}
    for kind, outcome in found:
        table.setdefault(kind, Counter())[outcome] += 1
    return {kind: dict(outcomes) for kind, outcomes in sorted(table.items())}
