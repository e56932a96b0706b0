"""How a run multiplies, settled when it starts, for all ranks, so that it multiplies as before when it resumes: which
library does (RUN/products.json and checkpoints), and which layers round factors, by a test (RUN/fp8.json)."""

from __future__ import annotations

import json

import torch

from fivefold.comm import Axis, everyone, told
from fivefold.files import make_folder, read_json, understood, write_atomically
from fivefold.kernels import fastest
from fivefold.launch.ranks import Ranks
from fivefold.models.card import card_of
from fivefold.parallel.parallelize import rounding
from fivefold.precision import PRECISIONS, Mode
from fivefold.step.self_test import PRODUCTS, Tested, fall_back, self_test
from fivefold.step.state import State
from fivefold.train.job import Job

FILE, LIBRARY = "fp8.json", "products.json"


def settle(state: State, job: Job, ranks: Ranks, resumed: bool) -> list[str]:
    """Decides which library multiplies, and which layers round factors. Returns what the console shall say. All ranks
    call it together.

    resumed: rank 0's counts."""
    return [*_settle_library(state, job, ranks), *_settle_rounded(state, job, ranks, resumed)]


def _settle_library(state: State, job: Job, ranks: Ranks) -> list[str]:
    """Rank 0's checkpoint decides, or else its machine."""
    if ranks.device.type != "cpu":
        return []
    mine = (state.products or fastest.table()) if ranks.first else fastest.UNMEASURED
    text = told(json.dumps(mine._asdict(), indent=1), 0, everyone(ranks))
    fastest.hold(now := fastest.Table(**json.loads(text)))
    state.products = now
    if ranks.first:
        write_atomically(job.out / LIBRARY, text + "\n")
    if now.processor == fastest.place():
        return []
    began = now.processor.rpartition(", ")[0]
    return [f"this run began on another processor ({began}), so its last bits may differ here"]


def _settle_rounded(state: State, job: Job, ranks: Ranks, resumed: bool) -> list[str]:
    if job.module is not None or rounding(job.recipe) is None:
        return []
    axis = everyone(ranks)
    if (kept := _read(axis, job, resumed)) is not None:
        fall_back(state, kept)
        mode = job.recipe.precision.mode
        return [f"{mode}, except in {', '.join(sorted(kept))}, as before"] if kept else []
    tested = self_test(state, job.recipe, axis)
    assert tested is not None
    fall_back(state, set(tested.failed))
    if ranks.first:
        _write(job, tested)
    return _lines(tested, PRECISIONS[job.recipe.precision.mode])


def _lines(tested: Tested, mode: Mode) -> list[str]:
    if not tested.errors:
        return [f"WARNING: precision.fp8_skip_first and fp8_skip_last leave no block in {mode.name}"]
    largest = [max(errors) for errors in zip(*tested.errors.values(), strict=True)]
    errors = ", ".join(
        f"{product} {error:.1%} (allowed {bound:.1%})"
        for product, error, bound in zip(PRODUCTS, largest, tested.allowed, strict=True)
    )
    lines = [f"self-test of {mode.name} in {len(tested.errors)} weights, largest relative errors: {errors}"]
    for name, why in tested.failed.items():
        lines.append(
            f"WARNING: {name} failed the self-test of {mode.name} and computes in {mode.working}: {why}"
        )
    return lines


def _write(job: Job, tested: Tested) -> None:
    make_folder(job.out)
    found = {
        "products": PRODUCTS,
        "allowed": tested.allowed,
        "errors": {
            name: [str(e) if e == float("inf") else e for e in errors]
            for name, errors in tested.errors.items()
        },
        "in_bf16": tested.failed,
    }
    write_atomically(job.out / FILE, json.dumps(found, indent=1) + "\n")


def _read(axis: Axis, job: Job, resumed: bool) -> set[str] | None:
    """The layers that an earlier part of the run computes in bf16, as rank 0 reads them; None: there is no file, or no
    such part."""
    names = list(card_of(job.recipe.model).parameters)
    flags = torch.zeros(len(names) + 1, device=axis.device)
    path = job.out / FILE
    if axis.rank == 0 and resumed and path.is_file():
        with understood(path):
            kept = {str(name) for name in read_json(path)["in_bf16"]}
        flags[-1] = 1
        for place, name in enumerate(names):
            flags[place] = name.rpartition(".")[0] in kept
    flags = axis.all_reduce(flags).tolist()
    if not flags[-1]:
        return None
    return {name.rpartition(".")[0] for name, flag in zip(names, flags, strict=False) if flag}
