"""Does a layout compute what one process computes?

The reference is one process with the whole model and plain autograd (`reference.py`); so a layout of one rank is
compared, too: it shows whether the trainer's own way of keeping weights and gradients is right.

Both sides train the same few steps from the same initial weights on the same batches, with dropout off, and write
what they have into a folder: the whole gradient of the first step; of each step the loss and the gradient's norm;
weights and moments after the last. Ranks write only what they own, so a piece that is missing, or owned twice, shows
too. One process then reads both folders and compares them, tensor by tensor. Gradients are compared in the first
step, when both sides have the same weights; what goes wrong in later ones shows in losses and norms, and in the
weights at the end.

Differences are relative: the norm of a tensor's difference by the norm of the reference's tensor.

fp32: the tolerances are TOLERANCE. In weights each element counts by the size of its gradients (the root of Adam's
second moment): Adam divides by that size, so an element whose true gradient is zero, such as a bias of attention's
keys, moves by rounding noise alone.

bf16: the reference is one process in fp32, and a layout may differ from it TIMES_BF16 as much as one process in bf16
does; so bf16's own rounding is measured, not guessed. Weights are compared all together here: bf16's rounding
turns the sign of some small gradients, and with it Adam's whole step of those elements, few or many by chance.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.checkpoint import store
from fivefold.data import DataSet
from fivefold.errors import UserError
from fivefold.host import cores
from fivefold.layout import Layout, to_text, validate
from fivefold.optim import state_tensors
from fivefold.parallel import ranks as ranks_
from fivefold.parallel.ranks import Ranks
from fivefold.parallel.replica import clip_
from fivefold.recipe import Recipe, change, resolve
from fivefold.recipe.rules import allows
from fivefold.recipe.schema import LayoutSection
from fivefold.train.launch import prepare_data, start_ranks
from fivefold.train.loop import agree, forward_backward, update
from fivefold.train.reference import reference_state
from fivefold.train.saved import buffer_pieces, owned_pieces, write_pieces
from fivefold.train.share import batches_of, share_of
from fivefold.train.state import build_state

TOLERANCE = {"loss": 1e-6, "gradients": 1e-5, "grad_norm": 1e-5, "weights": 1e-5}
TIMES_BF16 = 3.0  # tensor and sequence parallelism round in other places: up to 1.7 in tensors of 32 elements
FLOOR_BF16 = 2.0**-8  # of single numbers, in which roundings may cancel by chance: bf16's spacing


@dataclass(frozen=True)
class Side:
    """What one side computes: `steps` steps of a resolved recipe, written into `folder`."""

    recipe: Recipe
    data: DataSet
    steps: int
    folder: Path


@dataclass
class Figure:
    """The largest relative difference of one kind, where it is, and what is allowed there."""

    max_rel: float = 0.0
    worst: str = ""
    allowed: float = 0.0

    @property
    def passed(self) -> bool:
        return self.max_rel <= self.allowed

    @property
    def share(self) -> float:
        """Of what is allowed."""
        return self.max_rel / self.allowed if self.allowed else math.inf if self.max_rel else 0.0

    def worse(self, other: Figure) -> Figure:
        """The one that is worse by what is allowed."""
        return other if not self.worst or other.share > self.share else self


@dataclass
class Report:
    """What `fivefold verify` found. `passed`: every figure is within what is allowed."""

    layout: str
    ranks: int
    mode: str
    steps: int
    loss: Figure = field(default_factory=Figure)
    gradients: Figure = field(default_factory=Figure)
    grad_norm: Figure = field(default_factory=Figure)
    weights: Figure = field(default_factory=Figure)
    notes: list[str] = field(default_factory=list)

    @property
    def figures(self) -> dict[str, Figure]:
        return {name: getattr(self, name) for name in TOLERANCE}

    @property
    def passed(self) -> bool:
        return all(figure.passed for figure in self.figures.values())

    def as_json(self) -> dict[str, Any]:
        """As `fivefold verify --json` prints it; `tolerance` is what was allowed where each difference is worst."""
        figures = {
            name: {"max_rel": f.max_rel, "worst": f.worst, "passed": f.passed}
            for name, f in self.figures.items()
        }
        tolerance = {name: figure.allowed for name, figure in self.figures.items()}
        facts = {k: v for k, v in asdict(self).items() if k not in figures}
        return {"passed": self.passed, **figures, "tolerance": tolerance, **facts}


def verify(
    recipe: Recipe, layout: str | None = None, *, steps: int = 3, mode: str = "fp32", fork: bool = False
) -> Report | None:
    """Compares a layout with one process, over `steps` steps of a recipe in `mode` ("fp32" or "bf16").

    layout: as `--layout` takes it; None: the recipe's. Its ranks are started here; under torchrun or Slurm theirs are
    used, and ranks other than the first return None. fork: see `run_command`.

    Raises:
        UserError: the recipe, the layout or the data does not do.
        SystemExit: it was stopped by a signal.
    """
    recipe, notes = prepared(recipe, layout, steps, mode)
    wanted, launched = Layout.from_recipe(recipe.layout), ranks_.found()
    validate(wanted, launched[1] if launched else wanted.ranks, partial(allows, recipe))
    data = prepare_data(recipe, quiet=launched is not None and launched[0] != 0)
    recipe = resolve(recipe, vocab_size=data.vocab_size)
    with tempfile.TemporaryDirectory(prefix="fivefold-verify-") as name:
        folder = Path(name)
        if launched:
            with ranks_.join() as ranks:
                folder = _common(folder, ranks)
                compute(Side(recipe, data, steps, folder / "layout"), ranks)
            if launched[0]:
                return None
        elif wanted.ranks > 1:
            side = Side(recipe, data, steps, folder / "layout")
            stopped = start_ranks(partial(compute, side), wanted.ranks, fork)
            if stopped is not None:
                raise SystemExit(128 + stopped)
        else:
            compute(Side(recipe, data, steps, folder / "layout"), alone())
        report = compare_with_one_process(recipe, data, steps, folder)
    report.notes = notes
    return report


def prepared(recipe: Recipe, layout: str | None, steps: int, mode: str) -> tuple[Recipe, list[str]]:
    """The recipe as it is compared, and what was changed for that."""
    if mode not in ("fp32", "bf16"):
        raise UserError(f"mode '{mode}': must be fp32 or bf16")
    if steps < 1:
        raise UserError(f"steps {steps}: must be at least 1")
    changes, notes = [f"precision.mode={mode}"], []
    if recipe.model.dropout:
        changes.append("model.dropout=0.0")
        notes.append(f"dropout is 0 here, not {recipe.model.dropout}: ranks draw other elements to drop")
    if mode == "fp32" and recipe.precision.reduce != "fp32":
        changes.append("precision.reduce=fp32")
        notes.append("gradients are summed in fp32 here; --mode bf16 compares bf16 sums")
    if recipe.train.steps and recipe.train.steps < steps:
        changes.append(f"train.steps={steps}")
    return change(recipe, changes, layout), notes


def alone() -> Ranks:
    """One process, with all cores."""
    torch.set_num_threads(cores())
    return Ranks(0, 1, 0, 1, ranks_.device_for(0))


def _common(folder: Path, ranks: Ranks) -> Path:
    """Rank 0's folder, on every rank: they share the disk."""
    text = torch.zeros(4096, dtype=torch.uint8, device=ranks.device)
    raw = str(folder).encode()
    text[: len(raw)] = torch.tensor(list(raw), dtype=torch.uint8)
    if ranks.world > 1:
        dist.broadcast(text, 0)
    return Path(bytes(text.tolist()).rstrip(b"\0").decode())


def compute(side: Side, ranks: Ranks, reference: bool = False) -> None:
    """One rank's part of a side: of a layout's, or the reference."""
    recipe, train = side.recipe, side.recipe.train
    batches = batches_of(recipe, side.data, side.data.train, train.global_batch_size, shuffle=True)
    state = reference_state(recipe, ranks) if reference else build_state(recipe, ranks)
    found: dict[str, list[float]] = {"loss": [], "grad_norm": []}
    try:
        for step in range(side.steps):
            share = share_of(batches, step, train.global_batch_size, train.microbatch_size or 1, state.mesh)
            loss = forward_backward(state, share, train.seed)
            if step == 0:
                pieces = owned_pieces(state, state.gradients())
                write_pieces(side.folder / "first", pieces, [], {}, state.mesh)
            norm = clip_(state.parallel.replicas, recipe.optim.grad_clip, state.mesh)
            update(state, recipe.optim, norm, train.steps or side.steps)
            found["loss"].append(agree(loss, False, state.mesh)[0])
            found["grad_norm"].append(norm)
            state.step += 1
        moments = owned_pieces(state, state_tensors(state.optimizer, state.masters()))
        weights = owned_pieces(state, state.masters())
        weights += buffer_pieces(state)
        write_pieces(side.folder / "end", weights, moments, found, state.mesh)
    finally:
        for replica in state.parallel.replicas:
            replica.close()


def compare_with_one_process(recipe: Recipe, data: DataSet, steps: int, folder: Path) -> Report:
    """Computes the reference in this process, unless it is there, and compares it with `folder`/layout, where the
    layout's ranks left theirs. In bf16 there are two references, of fp32 and of bf16."""
    layout, mode = Layout.from_recipe(recipe.layout), recipe.precision.mode
    for other in {"fp32", mode}:
        if not (folder / other).exists():
            precision = recipe.precision.model_copy(update={"mode": other})
            one = recipe.model_copy(update={"layout": LayoutSection(), "precision": precision})
            compute(Side(one, data, steps, folder / other), alone(), reference=True)
    report = Report(to_text(layout), layout.ranks, mode, steps)
    own = {} if mode == "fp32" else dict(_differences(folder / mode, folder / "fp32", together=True))
    for (kind, where), rel in _differences(folder / "layout", folder / "fp32", bool(own)):
        allowed = TOLERANCE[kind]
        if kind in ("loss", "grad_norm") and own:
            allowed = max(FLOOR_BF16, *(TIMES_BF16 * rel for (k, _), rel in own.items() if k == kind))
        elif own:
            allowed = TIMES_BF16 * own[kind, where]
        setattr(report, kind, getattr(report, kind).worse(Figure(rel, where, allowed)))
    return report


def _differences(side: Path, reference: Path, together: bool) -> Iterator[tuple[tuple[str, str], float]]:
    """((kind, where), relative difference) of everything that both sides wrote. together: see _weight_differences."""
    mine, theirs = store.Reader(side / "end"), store.Reader(reference / "end")
    for kind in ("loss", "grad_norm"):
        for step, (a, b) in enumerate(zip(mine.meta[kind], theirs.meta[kind], strict=True), 1):
            yield (kind, f"step {step}"), _relative(torch.tensor(a), torch.tensor(b))
    yield from _weight_differences(mine, theirs, together)
    mine, theirs = store.Reader(side / "first"), store.Reader(reference / "first")
    for name in _names(mine, theirs):
        yield ("gradients", name), _relative(mine.read("model", name), theirs.read("model", name))


def _weight_differences(
    mine: store.Reader, theirs: store.Reader, together: bool
) -> Iterator[tuple[tuple[str, str], float]]:
    """Of each tensor, its elements weighted by the size of their gradients; or of all together, unweighted."""
    difference = size = 0.0
    for name in _names(mine, theirs):
        a, b = mine.read("model", name), theirs.read("model", name)
        if together:
            difference += (a.double() - b.double()).square().sum().item()
            size += b.double().square().sum().item()
            continue
        root = torch.maximum(*(_root(s, name, a) for s in (mine, theirs)))
        root = torch.where(root > 0, root, root.max().clamp(min=1e-30))  # no gradient: no excuse
        yield ("weights", name), _relative(a * root, b * root)
    if together:
        yield (
            ("weights", "all together"),
            math.sqrt(difference / size) if difference == difference else math.inf,
        )


def _root(side: store.Reader, name: str, like: Tensor) -> Tensor:
    """About the size of each element's gradients; of a buffer, which has none, ones. The larger of both sides counts:
    where a gradient is truly zero, one side may have rounding noise for it."""
    moment = f"exp_avg_sq.{name}"
    return (
        side.read("optimizer", moment).sqrt() if moment in side.names("optimizer") else torch.ones_like(like)
    )


def _names(mine: store.Reader, theirs: store.Reader) -> list[str]:
    names = theirs.names("model")
    assert set(mine.names("model")) == set(names), "both sides have the same parameters"
    return names


def _relative(a: Tensor, b: Tensor) -> float:
    """Norm of the difference by norm of the reference, b. Infinite where only the reference is zero, or where one is
    not finite."""
    difference, size = (a.double() - b.double()).norm().item(), b.double().norm().item()
    if difference == 0:
        return 0.0
    return difference / size if size and math.isfinite(difference / size) else math.inf
