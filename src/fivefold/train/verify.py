"""Checks that a layout computes what one process computes.

The reference is one process with the whole model and plain autograd (`reference.py`). A layout of one rank is compared,
too: it shows whether the trainer keeps weights and gradients correctly.

Both sides train the same few steps from the same initial weights on the same batches, without dropout. Each writes into
a folder: the whole gradient of the first step; loss and gradient norm of each step; weights and moments after the last.
Ranks write only what they own, so a piece that is missing, or owned twice, shows too. One process then reads both
folders and compares them, tensor by tensor. Gradients are compared in the first step, when both sides have the same
weights. Errors in later steps show in losses, norms and the final weights.

Differences are relative: the norm of a tensor's difference divided by the norm of the reference tensor.

fp32: the tolerances are TOLERANCE. Adam divides an update by the size of the gradient, so an element whose true
gradient is zero, such as a key bias in attention, moves by rounding noise alone. Therefore each element of a weight is
weighted by the size of its gradients: the root of the second moment, if the optimizer has one.

Other modes: the reference is one process in fp32. A layout may differ from it TIMES as much as one process in the mode
does, so the mode's own rounding is measured, not guessed (`precision.Mode`). Weights are compared all together here:
rounding flips the sign of some small gradients, and with it Adam's whole step of those elements; how many is chance.
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
from torch import Tensor

from fivefold.checkpoint import store, write
from fivefold.comm import everyone
from fivefold.data import DataSet
from fivefold.errors import UserError
from fivefold.launch import ranks as ranks_
from fivefold.launch.local import start_ranks
from fivefold.launch.ranks import Ranks
from fivefold.optim import OPTIMIZERS
from fivefold.precision import FIELDS, MASTER, PRECISIONS
from fivefold.recipe import Recipe, batch_size, change, resolve
from fivefold.recipe.rules import allows, synchronous
from fivefold.recipe.schema import LayoutSection
from fivefold.recipe.unused_fields import PLAIN
from fivefold.schedules.compression import NONE
from fivefold.sharding.layout import Layout
from fivefold.sharding.layout_rules import validate
from fivefold.sharding.layout_text import to_text
from fivefold.sharding.units import zeropp
from fivefold.step.state import build_state
from fivefold.step.step import take_step
from fivefold.train.reference import reference_state
from fivefold.train.saved import buffer_pieces, moment_pieces, owned_pieces
from fivefold.train.share import batches_of, share_of
from fivefold.train.start import prepare_data

TOLERANCE = {"loss": 1e-6, "gradients": 1e-5, "grad_norm": 1e-5, "weights": 1e-5}
TIMES = 3.0  # tensor and sequence parallelism round elsewhere: up to 1.7 in tensors of 32 elements


@dataclass(frozen=True)
class Side:
    """Runs one side: `steps` steps of a resolved recipe, written into `folder`."""

    recipe: Recipe
    data: DataSet
    steps: int
    folder: Path


@dataclass
class Figure:
    """The largest relative difference of one kind, its place, and the tolerance there."""

    max_rel: float = 0.0
    worst: str = ""
    allowed: float = 0.0

    @property
    def passed(self) -> bool:
        return self.max_rel <= self.allowed

    @property
    def share(self) -> float:
        """The difference as a share of the tolerance."""
        return self.max_rel / self.allowed if self.allowed else math.inf if self.max_rel else 0.0

    def worse(self, other: Figure) -> Figure:
        """Returns the figure that is worse relative to its tolerance."""
        return other if not self.worst or other.share > self.share else self


@dataclass
class Report:
    """The result of `fivefold verify`. `passed`: every figure is within its tolerance."""

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
        """The object that `fivefold verify --json` prints. `tolerance` is the one at each figure's worst place."""
        figures = {
            name: {"max_rel": f.max_rel, "worst": f.worst, "passed": f.passed}
            for name, f in self.figures.items()
        }
        tolerance = {name: figure.allowed for name, figure in self.figures.items()}
        facts = {k: v for k, v in asdict(self).items() if k not in figures}
        return {"passed": self.passed, **figures, "tolerance": tolerance, **facts}


def verify(
    recipe: Recipe, layout: str | None = None, *, steps: int = 3, mode: str = MASTER, fork: bool = False
) -> Report | None:
    """Compares a layout with one process, over `steps` steps of a recipe in `mode`.

    layout: as `--layout` takes it; None: the recipe's. Its ranks are started here. Under torchrun or Slurm the launched
    ranks are used, and all but the first return None. fork: see `run_command`.

    Raises:
        UserError: the recipe, the layout or the data is not valid.
        SystemExit: a signal stopped it.
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
            start_ranks(partial(compute, side), wanted.ranks, fork)
        else:
            compute(Side(recipe, data, steps, folder / "layout"), alone())
        report = compare_with_one_process(recipe, data, steps, folder)
    report.notes = notes
    return report


def prepared(recipe: Recipe, layout: str | None, steps: int, mode: str) -> tuple[Recipe, list[str]]:
    """(the recipe as it is compared, notes on the fields that were changed for that)."""
    if mode not in PRECISIONS:
        raise UserError(f"mode '{mode}': must be {' or '.join(PRECISIONS)}")
    if steps < 1:
        raise UserError(f"steps {steps}: must be at least 1")
    changes, notes = [f"precision.mode={mode}"], []
    if mode != recipe.precision.mode:
        changes += [f"precision.{key}={getattr(PLAIN.precision, key)}" for key in FIELDS]
    if recipe.sync.method != PLAIN.sync.method:
        notes.append(
            f'all ranks sum gradients in every step here (the recipe has sync.method = "{recipe.sync.method}")'
        )
        recipe = synchronous(recipe)
    if recipe.model.dropout:
        changes.append("model.dropout=0.0")
        notes.append(
            f"dropout is 0 here (the recipe has {recipe.model.dropout}): layouts drop different elements"
        )
    if mode == MASTER and recipe.precision.reduce != MASTER:
        changes.append(f"precision.reduce={MASTER}")
        notes.append(f"gradients are summed in {MASTER} here; --mode bf16 compares them")
    if (why := OPTIMIZERS[recipe.optim.name].jumps) and steps > 1:
        notes.append(
            f"{recipe.optim.name}: {why}, so weights may differ after the second step; compare one (--steps 1)"
        )
    if recipe.train.steps and recipe.train.steps < steps:
        changes.append(f"train.steps={steps}")
    found = change(recipe, changes, layout)
    if found.layout.compress != NONE:
        notes.append(
            f"gradients are summed whole here: layout.compress = {found.layout.compress} is not exact"
        )
        found = change(found, [f"layout.compress={NONE}"])
    plus = zeropp(found.layout.zeropp)
    if plus.weights or plus.gradients:
        exact = "hier" if plus.hier else NONE
        notes.append(f'layout.zeropp = "{exact}" here: quantised weights and gradients are not exact')
        found = change(found, [f"layout.zeropp={exact}"])
    return found, notes


def alone() -> Ranks:
    """One process, with all cores unless the environment says otherwise."""
    torch.set_num_threads(ranks_.threads_of(1))
    return Ranks(0, 1, 0, 1, ranks_.device_for(0))


def _common(folder: Path, ranks: Ranks) -> Path:
    """Rank 0's folder, on every rank. The ranks share the disk."""
    text = torch.zeros(4096, dtype=torch.uint8, device=ranks.device)
    raw = str(folder).encode()
    text[: len(raw)] = torch.tensor(list(raw), dtype=torch.uint8)
    everyone(ranks).broadcast(text, 0)
    return Path(bytes(text.tolist()).rstrip(b"\0").decode())


def compute(side: Side, ranks: Ranks, reference: bool = False) -> None:
    """Computes one rank's part of a side: of the layout, or of the reference."""
    recipe, train = side.recipe, side.recipe.train
    batches = batches_of(recipe, side.data)
    state = reference_state(recipe, ranks) if reference else build_state(recipe, ranks)
    found: dict[str, list[float]] = {"loss": [], "grad_norm": []}

    def write_first_gradient() -> None:
        if state.step == 0:
            pieces = owned_pieces(state, state.gradients())
            write.save(side.folder / "first", pieces, [], {}, axis=state.mesh.axis("run"), finite=False)

    try:
        for step in range(side.steps):
            share = share_of(batches, step, batch_size(train, step), train.microbatch_size or 1, state.mesh)
            done = take_step(state, recipe, share, inspect=write_first_gradient)
            found["loss"].append(done.loss)
            found["grad_norm"].append(done.norm)
        moments = moment_pieces(state)
        weights = owned_pieces(state, state.masters()) + buffer_pieces(state)
        write.save(
            side.folder / "end", weights, moments, found, axis=state.mesh.axis("run"), finite=False
        )  # what diverged is compared, too
    finally:
        state.parallel.close()


def compare_with_one_process(recipe: Recipe, data: DataSet, steps: int, folder: Path) -> Report:
    """Computes the reference in this process, unless it exists, and compares it with `folder`/layout, which the
    layout's ranks wrote. Below fp32 there are two references, one in fp32 and one in the mode."""
    layout, mode = Layout.from_recipe(recipe.layout), recipe.precision.mode
    for other in {MASTER, mode}:
        if not (folder / other).exists():
            precision = recipe.precision.model_copy(update={"mode": other})
            one = recipe.model_copy(update={"layout": LayoutSection(), "precision": precision})
            compute(Side(one, data, steps, folder / other), alone(), reference=True)
    report = Report(to_text(layout), layout.ranks, mode, steps)
    second = OPTIMIZERS[recipe.optim.name].second_moment
    own = {} if mode == MASTER else dict(_differences(folder / mode, folder / MASTER, second, together=True))
    for (kind, where), rel in _differences(folder / "layout", folder / MASTER, second, bool(own)):
        allowed = TOLERANCE[kind]
        if kind in ("loss", "grad_norm") and own:
            allowed = max(
                PRECISIONS[mode].roundoff, *(TIMES * rel for (k, _), rel in own.items() if k == kind)
            )
        elif own:
            allowed = TIMES * own[kind, where]
        setattr(report, kind, getattr(report, kind).worse(Figure(rel, where, allowed)))
    return report


def _differences(
    side: Path, reference: Path, second: str | None, together: bool
) -> Iterator[tuple[tuple[str, str], float]]:
    """((kind, where), relative difference) of everything that both sides wrote. second: the optimizer's second moment.
    together: see _weight_differences."""
    mine, theirs = (store.Reader(one / "end", finite=False) for one in (side, reference))
    for kind in ("loss", "grad_norm"):
        for step, (a, b) in enumerate(zip(mine.meta[kind], theirs.meta[kind], strict=True), 1):
            yield (kind, f"step {step}"), _relative(torch.tensor(a), torch.tensor(b))
    yield from _weight_differences(mine, theirs, second, together)
    mine, theirs = (store.Reader(one / "first", finite=False) for one in (side, reference))
    for name in _names(mine, theirs):
        yield ("gradients", name), _relative(mine.read("model", name), theirs.read("model", name))


def _weight_differences(
    mine: store.Reader, theirs: store.Reader, second: str | None, together: bool
) -> Iterator[tuple[tuple[str, str], float]]:
    """The difference of each tensor, with elements weighted by the size of their gradients; or of all tensors together,
    unweighted."""
    difference = size = 0.0
    for name in _names(mine, theirs):
        a, b = mine.read("model", name), theirs.read("model", name)
        if together:
            difference += (a.double() - b.double()).square().sum().item()
            size += b.double().square().sum().item()
            continue
        root = torch.maximum(*(_root(s, second, name, a) for s in (mine, theirs)))
        root = torch.where(root > 0, root, root.max().clamp(min=1e-30))  # no gradient: counts fully
        yield ("weights", name), _relative(a * root, b * root)
    if together:
        yield (
            ("weights", "all together"),
            math.sqrt(difference / size) if difference == difference else math.inf,
        )


def _root(side: store.Reader, second: str | None, name: str, like: Tensor) -> Tensor:
    """About the size of each element's gradients. Ones for a buffer, and with an optimizer without a second moment. The
    caller takes the larger of both sides: if a gradient is truly zero, one side may have rounding noise for it."""
    moment = f"{second}.{name}"
    if second is None or moment not in side.names("optimizer"):
        return torch.ones_like(like)
    return side.read("optimizer", moment).sqrt()


def _names(mine: store.Reader, theirs: store.Reader) -> list[str]:
    names = theirs.names("model")
    assert set(mine.names("model")) == set(names), "both sides have the same parameters"
    return names


def _relative(a: Tensor, b: Tensor) -> float:
    """Norm of the difference divided by the norm of the reference, b. Infinite if only the reference is zero, or if a
    norm is not finite."""
    difference, size = (a.double() - b.double()).norm().item(), b.double().norm().item()
    if difference == 0:
        return 0.0
    return difference / size if size and math.isfinite(difference / size) else math.inf
