"""Checks that a layout computes what one process computes.

The reference is one process with the whole model and plain autograd. It shares the models' code, the step and the
optimizer with the trainer, but not the way weights are kept: it has no flat buffers, no buckets, no sharding, no
recomputation and no compilation. Each parameter has its own master and gradient. A layout of one rank is compared, too:
it shows whether the trainer keeps weights and gradients correctly.

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
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fivefold.checkpoint import store, write
from fivefold.comm import everyone, told
from fivefold.data import DataSet
from fivefold.errors import UserError
from fivefold.launch import ranks as ranks_
from fivefold.launch.local import start_ranks
from fivefold.launch.ranks import Ranks
from fivefold.models.base import LanguageModel, build
from fivefold.models.card import card_of
from fivefold.optim import OPTIMIZERS
from fivefold.parallel.expert import Balance
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.parallelize import Parallel, round_matmuls
from fivefold.parallel.replica import Replica
from fivefold.precision import FIELDS, MASTER, PRECISIONS, Mode, torch_dtype
from fivefold.recipe import Recipe, batch_size, change, resolve
from fivefold.recipe.messages import toml_value
from fivefold.recipe.rules import allows, synchronous
from fivefold.recipe.rules.combinations import PLAIN
from fivefold.recipe.schema import LayoutSection
from fivefold.schedules.compression import NONE
from fivefold.sharding.layout import Layout, to_text
from fivefold.sharding.layout_rules import validate
from fivefold.sharding.parts import Part, held
from fivefold.sharding.units import zeropp
from fivefold.step.state import State, build_state, compute_mode, with_optimizer
from fivefold.step.step import take_step
from fivefold.train.saver import buffer_pieces, moment_pieces, owned_pieces
from fivefold.train.share import batches_of, share_of
from fivefold.train.start import prepare_data

TOLERANCE = {"loss": 1e-6, "gradients": 1e-5, "grad_norm": 1e-5, "weights": 1e-5}
TIMES = 3.0  # tensor and sequence parallelism round elsewhere: up to 1.7 in tensors of 32 elements


@dataclass
class Figure:
    """The largest relative difference of one kind, its place, and the tolerance there."""

    max_rel: float = 0.0
    worst: str = ""
    allowed: float = 0.0

    @property
    def passed(self) -> bool:
        return self.max_rel <= self.allowed

    def worse(self, other: Figure) -> Figure:
        """Returns the figure that is worse relative to its tolerance."""
        mine, theirs = (
            figure.max_rel / figure.allowed if figure.allowed else math.inf if figure.max_rel else 0.0
            for figure in (self, other)
        )
        return other if not self.worst or theirs > mine else self


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
        facts, tolerance = {"passed": self.passed, **asdict(self)}, dict[str, float]()
        for name, figure in self.figures.items():
            tolerance[name] = facts[name].pop("allowed")
            facts[name]["passed"] = figure.passed
        return facts | {"tolerance": tolerance}


def verify(
    recipe: Recipe,
    layout: str | None = None,
    *,
    steps: int = 3,
    mode: str = MASTER,
    fork: bool = False,
    share_gpus: bool = False,
) -> Report | None:
    """Compares a layout with one process, over `steps` steps of a recipe in `mode`.

    layout: as `--layout` takes it; None: the recipe's. Its ranks are started here. Under torchrun or Slurm the launched
    ranks are used, and all but the first return None. fork: see `run_command`. share_gpus: see `start_ranks`.

    Raises:
        UserError: the recipe, the layout or the data is not valid.
        SystemExit: a signal stopped it.
    """
    recipe, notes = prepared(recipe, layout, steps, mode)
    wanted, launched = Layout.from_recipe(recipe.layout), ranks_.found()
    if launched and share_gpus:
        raise UserError("--share-gpus is for ranks that `fivefold verify` starts itself; leave it out")
    validate(wanted, launched[1] if launched else wanted.ranks, partial(allows, recipe))
    data = prepare_data(recipe, quiet=launched is not None and launched[0] != 0)
    recipe = resolve(recipe, vocab_size=data.vocab_size)
    with tempfile.TemporaryDirectory(prefix="fivefold-verify-") as name:
        if launched:
            with ranks_.join() as ranks:  # they share the disk
                name = told(name, 0, everyone(ranks))
                compute(recipe, data, steps, Path(name, "layout"), ranks)
            if launched[0]:
                return None
        elif wanted.ranks > 1:
            work = partial(compute, recipe, data, steps, Path(name, "layout"))
            start_ranks(work, wanted.ranks, fork, share_gpus)
        else:
            compute(recipe, data, steps, Path(name, "layout"), alone())
        report = compare_with_one_process(recipe, data, steps, Path(name))
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
        changes += [f"precision.{key}={toml_value(getattr(PLAIN.precision, key))}" for key in FIELDS]
    if (method := recipe.sync.method) != PLAIN.sync.method:
        notes.append(f'all ranks sum gradients in every step here (the recipe has sync.method = "{method}")')
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
    exact, inexact = change(recipe, changes, layout), list[str]()
    if (compress := exact.layout.compress) != NONE:
        notes.append(f"gradients are summed whole here: layout.compress = {compress} is not exact")
        inexact.append(f"layout.compress={NONE}")
    plus = zeropp(exact.layout.zeropp)
    if plus.weights or plus.gradients:
        weaker = "hier" if plus.hier else NONE
        inexact.append(f"layout.zeropp={weaker}")
        notes.append(f'layout.zeropp = "{weaker}" here: quantised weights and gradients are not exact')
    return change(exact, inexact) if inexact else exact, notes


def alone() -> Ranks:
    """One process, with all cores unless the environment says otherwise."""
    torch.set_num_threads(ranks_.threads_of(1))
    return Ranks(0, 1, 0, 1, ranks_.device_for(0))


def compute(
    recipe: Recipe, data: DataSet, steps: int, folder: Path, ranks: Ranks, reference: bool = False
) -> None:
    """Computes one rank's part of a side, of the layout or the reference: `steps` steps of a resolved recipe, written
    into `folder`."""
    train, batches = recipe.train, batches_of(recipe, data)
    state = reference_state(recipe, ranks) if reference else build_state(recipe, ranks)
    figures: dict[str, list[float]] = {"loss": [], "grad_norm": []}

    def write_first_gradient() -> None:
        if state.step == 0:
            pieces = owned_pieces(state, state.gradients())
            write.save(folder / "first", pieces, [], {}, axis=state.mesh.axis("run"), finite=False)

    try:
        for step in range(steps):
            share = share_of(batches, step, batch_size(train, step), train.microbatch_size or 1, state.mesh)
            done = take_step(state, recipe, share, inspect=write_first_gradient)
            figures["loss"].append(done.loss)
            figures["grad_norm"].append(done.norm)
        moments = moment_pieces(state)
        weights = owned_pieces(state, state.masters()) + buffer_pieces(state)
        # What diverged is compared, too
        write.save(folder / "end", weights, moments, figures, axis=state.mesh.axis("run"), finite=False)
    finally:
        state.parallel.close()


class Plain(Replica):
    """The reference's replica. The module must be in fp32 when this is built; afterwards it computes as the mode
    says."""

    def __init__(self, module: nn.Module, parts: dict[str, Part], mode: Mode):
        self.parts, self.params = parts, dict(module.named_parameters())
        kept, working, sums = map(torch_dtype, (mode.master, mode.working, mode.gradient))
        self.masters = {
            name: p.detach().to(working if parts[name].frozen else kept, copy=True)
            for name, p in self.params.items()
        }
        self.gradients = {
            n: torch.zeros_like(w, dtype=sums) for n, w in self.masters.items() if not parts[n].frozen
        }
        for name, p in self.params.items():
            p.data = self.masters[name].to(working, copy=True)
            p.requires_grad_(not parts[name].frozen)
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(partial(self._add, name))

    def _add(self, name: str, p: Tensor) -> None:
        assert p.grad is not None
        self.gradients[name] += p.grad
        p.grad = None
        self._fresh.discard(name)

    def start_step(self) -> None:
        self._fresh = {*self.gradients}
        for gradient in self.gradients.values():
            gradient.zero_()

    def finish(self) -> None:
        self.allow_zeros(self._fresh)

    def update(self, lr: float, scale: Tensor | None, skip: Tensor) -> None:
        self.updater.step(self.gradients, lr, scale, skip)
        self.refresh()

    def refresh(self) -> None:
        for name, p in self.params.items():
            p.data.copy_(self.masters[name])

    def kept(self) -> dict[str, list[Tensor]]:
        return {"params": [p.data for p in self.params.values()]}

    def watch(self, seen: Callable[[Tensor], None], names: set[str]) -> None:
        for name in names:
            self.params[name].register_hook(seen)


def reference_state(recipe: Recipe, one: Ranks) -> State:
    """The state of a resolved recipe at step 0 on one process; the recipe's layout is ignored."""
    model, mesh = recipe.model, Mesh(Layout(), one, further=card_of(recipe.model).further)
    module = build(model, device=one.device, seed=recipe.train.seed)
    assert isinstance(module, LanguageModel)
    round_matmuls(module, recipe)
    mode = compute_mode(recipe, one.device)
    replica = Plain(module, held(card_of(model), Layout(), 0), mode)
    balance = Balance([module], mesh, model) if card_of(model).has_experts else None
    return with_optimizer(Parallel([module], [replica], balance=balance), mesh, recipe, mode)


def compare_with_one_process(recipe: Recipe, data: DataSet, steps: int, folder: Path) -> Report:
    """Computes the reference in this process, unless it exists, and compares it with `folder`/layout, which the
    layout's ranks wrote. Below fp32 there are two references, one in fp32 and one in the mode."""
    layout, mode = Layout.from_recipe(recipe.layout), recipe.precision.mode
    for other in {MASTER, mode}:
        if not (folder / other).exists():
            precision = recipe.precision.model_copy(update={"mode": other})
            one = recipe.model_copy(update={"layout": LayoutSection(), "precision": precision})
            compute(one, data, steps, folder / other, alone(), reference=True)
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
    """((kind, where), relative difference) of everything that both sides wrote. second: the optimizer's second moment,
    by which elements of weights count. together: all weights together, and all elements alike."""
    mine, theirs = (store.Reader(folder / "end", finite=False) for folder in (side, reference))
    for kind in ("loss", "grad_norm"):
        for step, (a, b) in enumerate(zip(mine.meta[kind], theirs.meta[kind], strict=True), 1):
            yield (kind, f"step {step}"), _relative(torch.tensor(a), torch.tensor(b))
    difference = size = 0.0
    for name in _names(mine, theirs):
        a, b = mine.read("model", name), theirs.read("model", name)
        if together:
            difference += (a.double() - b.double()).square().sum().item()
            size += b.double().square().sum().item()
            continue
        # About the size of each element's gradients: of both sides, as one may have rounding noise where it is zero
        moment = f"{second}.{name}"  # a buffer has none, and no parameter if `second` is None
        sides = (s for s in (mine, theirs) if moment in s.names("optimizer"))
        moments = [s.read("optimizer", moment) for s in sides]
        root = torch.stack(moments).abs().amax(0).sqrt() if moments else torch.ones_like(a)
        root = torch.where(root > 0, root, root.max().clamp(min=1e-30))  # no gradient: counts fully
        yield ("weights", name), _relative(a * root, b * root)
    if together:
        whole = math.sqrt(difference / size) if difference == difference else math.inf
        yield ("weights", "all together"), whole
    mine, theirs = (store.Reader(folder / "first", finite=False) for folder in (side, reference))
    for name in _names(mine, theirs):
        yield ("gradients", name), _relative(mine.read("model", name), theirs.read("model", name))


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
