"""What a run does beside its steps, traced as a GPU computes it. Run by `python FILE` after gpu.libraries() are loaded,
with a folder to write to; prints one line of JSON: {name: {"operation file": times that the host waits}}."""

import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from test_trace_gpu import recipe_of

from fivefold.observe.faults import SHARED_EVERY
from fivefold.parallel.mesh import Microbatch
from fivefold.recipe import Recipe
from fivefold.sharding.layout import Layout
from fivefold.step.state import State
from fivefold.step.step import ValidationSet, own_seconds, validate
from fivefold.trace.fake import Fake
from fivefold.trace.step import DEVICE, probe
from fivefold.train.evaluate import Request, score
from fivefold.train.faults import corrupted, weights_fault
from fivefold.train.generate import Sampling, generate
from fivefold.train.saver import Saver

TOKENS = 4  # that are generated
MICROBATCHES = 2


def waits_of(recipe: Recipe, work: Callable[[State, list[Microbatch]], object]) -> dict[str, int]:
    """Host syncs by operation and file, on the last rank."""
    found, ranks = Counter[str](), Layout.from_recipe(recipe.layout).ranks
    for (name, place), times in probe(recipe, ranks - 1, MICROBATCHES, DEVICE, work=work).syncs.items():
        found[f"{name} {place.split(':')[0]}"] += times
    return dict(found)


def validation(state: State, batch: list[Microbatch]) -> None:
    token_bytes = torch.ones(96, dtype=torch.int64, device=DEVICE)
    validate(state, [ValidationSet(name, True, batch, token_bytes) for name in ("one", "other")])


def checks(recipe: Recipe) -> Callable[[State, list[Microbatch]], None]:
    """Those before a save, and those of ranks that must be alike."""

    def work(state: State, batch: list[Microbatch]) -> None:
        assert weights_fault(state, recipe.faults), "a trace's numbers are 1, and so is this answer"
        corrupted(state)

    return work


def shares(state: State, batch: list[Microbatch]) -> None:
    assert own_seconds(state.mesh.axis("all"), SHARED_EVERY - 1) is not None


def samples(recipe: Recipe) -> Callable[[State, list[Microbatch]], None]:
    def work(state: State, batch: list[Microbatch]) -> None:
        assert len([*generate(state.module, recipe.model, [5, 6], Sampling(TOKENS), vocab_size=96)]) == TOKENS

    return work


def scores(recipe: Recipe) -> Callable[[State, list[Microbatch]], None]:
    """As `fivefold evaluate` scores texts: one batch."""

    def work(state: State, batch: list[Microbatch]) -> None:
        request = Request(np.arange(9), 8)
        assert len([*score(state.module, recipe.model, [request, request], 64)]) == 2

    return work


def saves(recipe: Recipe, out: Path, ends: bool) -> Callable[[State, list[Microbatch]], None]:
    def work(state: State, batch: list[Microbatch]) -> None:
        alarms: list[str] = []
        job: Any = SimpleNamespace(recipe=recipe, out=out / f"{ends}")
        saver = Saver(state, job, lambda step, text: alarms.append(text))
        saver.save({"tokens": 0}, ends=ends)
        if not ends:
            saver.begin_update(state)  # the next step waits on the device
            saver.settle()
        assert not alarms, alarms
        assert list(job.out.rglob("manifest.json")), "it is whole"

    return work


def main(out: Path) -> None:
    Fake.numpy = lambda self: np.zeros(tuple(self.shape), np.uint8)  # what a file gets
    dense, several = recipe_of("dp=1", "llama"), recipe_of("dp=2,zero=3", "llama")
    found = {
        "validation": waits_of(dense, validation),
        "validation, cp": waits_of(recipe_of("cp=2", "llama"), validation),
        "validation, pp": waits_of(recipe_of("pp=2,schedule=1f1b", "llama"), validation),
        "validation, bert": waits_of(recipe_of("dp=1", "bert"), validation),
        "checks": waits_of(several, checks(several)),
        "shares": waits_of(several, shares),
        "samples": waits_of(dense, samples(dense)),
        "evaluate": waits_of(dense, scores(dense)),
        "save": waits_of(dense, saves(dense, out, ends=False)),
        "last save": waits_of(dense, saves(dense, out, ends=True)),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
