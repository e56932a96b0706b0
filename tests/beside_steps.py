"""What a run does beside its steps, traced as a GPU computes it, and a step that does all for which a host waits.

Its process has loaded `gpu.libraries()`. `main` prints a line of JSON, {case: {"operation file": host syncs}}.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from test_trace_gpu import recipe_of

from fivefold.checkpoint import write
from fivefold.comm import Axis
from fivefold.models.base import LanguageModel
from fivefold.observe.faults import SHARED_EVERY
from fivefold.parallel.mesh import Microbatch
from fivefold.recipe import Recipe
from fivefold.sharding.layout import Layout
from fivefold.step import step
from fivefold.step.state import State
from fivefold.step.step import own_seconds
from fivefold.step.validation import ValidationSet, validate
from fivefold.train import saver
from fivefold.train.evaluate import Request, score
from fivefold.train.faults import weights_fault
from fivefold.train.generate import Sampling, generate
from fivefold_plan.trace.fake import Fake
from fivefold_plan.trace.step import DEVICE, probe, trace

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


def checks(recipe: Recipe) -> Callable[[State, list[Microbatch]], object]:
    """Those before a save. (Numbers of a trace are 1, and so is the answer.)"""
    return lambda state, batch: weights_fault(state, recipe.faults)


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
        assert isinstance(state.module, LanguageModel)
        assert len([*score(state.module, recipe.model, [request, request], 64)]) == 2

    return work


def nowhere(flag: bool, axis: Axis) -> bool:
    """`anywhere` of ranks that all say no. A number of a trace, which is 1, would say yes."""
    int(axis.all_reduce(torch.tensor(int(flag), device=axis.device), "max"))
    return False


@contextmanager
def nobody_fails(axis: Axis) -> Iterator[None]:
    """`all_or_none` of ranks that all succeed."""
    yield
    nowhere(False, axis)


def saves(recipe: Recipe, out: Path, ends: bool) -> Callable[[State, list[Microbatch]], None]:
    def work(state: State, batch: list[Microbatch]) -> None:
        alarms: list[str] = []
        job: Any = SimpleNamespace(recipe=recipe, out=out / f"{ends}")
        saves = saver.Saver(state, job, lambda step, text: alarms.append(text))
        saves.save({"tokens": 0}, ends=ends)
        if not ends:
            saves.begin_update(state)  # the next step waits on the device
            saves.settle()
        assert not alarms, alarms
        assert list(job.out.rglob("manifest.json")), "it is whole"

    return work


def what_waits(recipe: Recipe) -> dict[str, int]:
    """Host syncs by operation of a step that does everything for which a host waits, and some for which it does not.
    Masks choose tokens of the recipe's model."""

    def clumsy(*given: Any) -> Any:
        loss, norm, stop, ruined = agree(*given)
        three, tokens = torch.ones(3, device=DEVICE, dtype=torch.int64), torch.tensor([2])
        _ = loss.item(), norm.cpu(), loss.to("cpu", non_blocking=True), torch.tensor([1.0], device=DEVICE)
        _ = tokens.to(DEVICE), torch.cuda.synchronize(), torch.cuda.current_stream().synchronize()
        _ = tokens.to(DEVICE, non_blocking=True), tokens.pin_memory().to(DEVICE, non_blocking=True)
        pinned, pageable = torch.zeros(6, pin_memory=True)[2:4], torch.zeros(2)
        for host in (pinned, pageable):
            host.copy_(torch.stack([loss, norm]), non_blocking=True)
        _ = torch.linalg.eigh(torch.ones(2, 2, device=DEVICE)), torch.stack([loss, norm]).isnan().nonzero()
        _ = three.repeat_interleave(three, output_size=3)
        return loss, norm, stop, ruined

    agree, step.agree = step.agree, clumsy
    try:
        syncs = trace(recipe, 0, 1, DEVICE).syncs
    finally:
        step.agree = agree
    found = Counter[str]()
    for (name, _), times in syncs.items():
        found[name] += times
    return dict(found)


def main(out: Path) -> None:
    # What a file gets.
    Fake.numpy = lambda self: np.zeros(tuple(self.shape), np.uint8)  # pyright: ignore[reportAttributeAccessIssue]
    write.all_or_none = saver.all_or_none = nobody_fails
    saver.anywhere = nowhere
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
    found["what waits"] = what_waits(recipe_of("dp=1", "bert"))
    assert torch.get_float32_matmul_precision() == "highest"
    trace(recipe_of("dp=1", "llama", "precision.mode=tf32"), 0, 1, DEVICE)
    assert torch.get_float32_matmul_precision() == "high", "where a GPU computes"
    print(json.dumps(found))
