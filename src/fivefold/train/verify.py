"""Checks that a layout computes what one process computes.

The reference is one process with the whole model and plain autograd. It shares the models' code, the step and the
optimizer with the trainer, but not the way weights are kept: it has no flat buffers, no buckets, no sharding, no
recomputation and no compilation. Each parameter has its own master and gradient. A layout of one rank is compared, too:
it shows whether the trainer keeps weights and gradients correctly.

Both sides train the same few steps from the same initial weights on the same batches, without dropout. The steps are
the recipe's first ones, and a further one for each number of microbatches that they lack (`sizes`). What a recipe does
every few steps is done every second one (`events`). Each side writes into a folder: the whole gradient of the first
step; loss, gradient norm and further figures of each step; the loss of a validation batch, weights and the optimizer's
states after the last. Ranks write only what they own, so a piece that is missing, or owned twice, shows too. What
several ranks keep is compared among them, bit by bit. One process then reads both folders and compares them, tensor by
tensor (train/differences.py). Gradients are compared in the first step, when both sides have the same weights. Errors
in later steps show in losses, norms, states and the final weights.

Some optimizers jump: where rounding chooses among eigenvectors of equal eigenvalues, both choices are right, and the
steps behind them differ. The reference then compares its weights and states with the layout's after every step, and
goes on from the layout's.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fivefold.checkpoint import store, write
from fivefold.comm import everyone, told
from fivefold.data import Batches, DataSet
from fivefold.errors import UserError
from fivefold.files import remove
from fivefold.launch import ranks as ranks_
from fivefold.launch.local import start_ranks
from fivefold.launch.ranks import Ranks
from fivefold.models.base import LanguageModel, build
from fivefold.models.card import card_of
from fivefold.models.section import phases
from fivefold.observe.faults import USUAL
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
from fivefold.recipe.rules.texts import ramp
from fivefold.recipe.schema import LayoutSection
from fivefold.schedules.compression import NONE
from fivefold.sharding import layout_rules
from fivefold.sharding.layout import Layout, to_text
from fivefold.sharding.parts import Part, held
from fivefold.sharding.units import zeropp
from fivefold.step.state import State, build_state, compute_mode, with_optimizer
from fivefold.step.step import take_step
from fivefold.step.validation import ValidationSet, validate
from fivefold.train import differences
from fivefold.train.differences import TOLERANCE, Figure, Limits
from fivefold.train.faults import corrupted
from fivefold.train.saver import buffer_pieces, moment_pieces, owned_pieces
from fivefold.train.share import batches_of, rows_of, share_of
from fivefold.train.start import prepare_data

EVERY = 2
"""What begins later than the compared steps, or comes again after many, begins or comes again after so many here."""


@dataclass
class Report:
    """The result of `fivefold verify`. `passed`: every figure is within its tolerance.

    gradient_scale: of a gradient, along itself. moments: of the optimizer's states. auxiliary: of further figures of a
    step, such as the load of experts. validation: of the loss of a validation batch. copies: infinite if ranks that
    keep the same part of a weight or a state have different bits.
    """

    layout: str
    ranks: int
    mode: str
    steps: int
    loss: Figure = field(default_factory=Figure)
    gradients: Figure = field(default_factory=Figure)
    grad_norm: Figure = field(default_factory=Figure)
    weights: Figure = field(default_factory=Figure)
    gradient_scale: Figure = field(default_factory=Figure)
    moments: Figure = field(default_factory=Figure)
    auxiliary: Figure = field(default_factory=Figure)
    validation: Figure = field(default_factory=Figure)
    copies: Figure = field(default_factory=Figure)
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
    layout_rules.validate(wanted, launched[1] if launched else wanted.ranks, partial(allows, recipe))
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
            f"{recipe.optim.name}: {why}. So each step is compared, and one process goes on from the layout's state"
        )
    for key, value in events(recipe, steps, mode):
        changes.append(f"{key}={value}")
        notes.append(f"{key} = {value} here, because few steps are compared")
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


def events(recipe: Recipe, steps: int, mode: str) -> Iterator[tuple[str, str]]:
    """(key, value) of the fields that say when something happens, where the compared steps would not contain it. The
    factor of the loss never exceeds the recipe's: there one order of a sum may overflow where another does not."""
    if steps <= EVERY:
        return
    fields = [f"optim.{name}" for name in OPTIMIZERS[recipe.optim.name].fields]
    fields += [f"precision.{name}" for name in PRECISIONS[mode].fields]
    yield from ((key, str(EVERY)) for key in fields if key.endswith("_every"))
    if PRECISIONS[mode].scaled:
        usual = (recipe if recipe.precision.mode == mode else PLAIN).precision.loss_scale
        doublings = (steps + len(ramp(recipe.train)) + 1) // EVERY  # with the steps that `sizes` adds
        yield "precision.loss_scale", str(max(1.0, usual / 2**doublings))
    for key, text, _ in recipe.model.ramps:
        if text:
            yield key, toml_value("+".join(f"{value}:1" for value, _ in phases(text)))


def sizes(recipe: Recipe, steps: int) -> list[int]:
    """Sequences of each compared step of a resolved recipe: of its first steps; then of a step for each other size of
    `train.batch_ramp`; and for pipelines of one in which every rank has a single microbatch, if the layout allows
    that."""
    train, usual = recipe.train, [batch_size(recipe.train, step) for step in range(steps)]
    further = {train.global_batch_size, *(size for size, _ in ramp(train))}
    if recipe.layout.pp > 1:
        least = (train.microbatch_size or 1) * Layout.from_recipe(recipe.layout).dp
        with suppress(UserError):
            change(recipe, [f"train.global_batch_size={least}", 'train.batch_ramp=""'])
            further.add(least)
    return usual + sorted(further.difference(usual), reverse=True)


def alone() -> Ranks:
    """One process, with all cores unless the environment says otherwise."""
    torch.set_num_threads(ranks_.threads_of(1))
    return Ranks(0, 1, 0, 1, ranks_.device_for(0))


def compute(
    recipe: Recipe,
    data: DataSet,
    steps: int,
    folder: Path,
    ranks: Ranks,
    reference: bool = False,
    disturbed: int = 0,
) -> None:
    """Computes one rank's part of a side, of the layout or the reference: `steps` steps of a resolved recipe, or a few
    more (`sizes`), written into `folder`. disturbed: 1 or -1: of the reference, see `disturb`."""
    train, batches, plan = recipe.train, batches_of(recipe, data), sizes(recipe, steps)
    follows = bool(OPTIMIZERS[recipe.optim.name].jumps)
    if reference:
        recipe = recipe.model_copy(update={"layout": LayoutSection()})
    state = reference_state(recipe, ranks) if reference else build_state(recipe, ranks)

    def disturb_weights() -> None:
        if disturbed:
            differences.round_otherwise(state.masters(), disturbed)
            for replica in state.parallel.replicas:
                replica.refresh()

    disturb_weights()
    figures: dict[str, dict[str, float]] = {kind: {} for kind in differences.SCALARS}

    def inspect() -> None:
        if state.step == 0:
            pieces = owned_pieces(state, state.gradients())
            write.save(folder / differences.FIRST, pieces, [], {}, axis=state.mesh.axis("run"), finite=False)
        if disturbed:
            differences.disturb(state.gradients(), disturbed)

    def write_state(name: str, meta: dict[str, Any]) -> None:
        weights = owned_pieces(state, state.masters()) + buffer_pieces(state)
        # What diverged is compared, too
        axis = state.mesh.axis("run")
        write.save(folder / name, weights, moment_pieces(state), meta, axis=axis, finite=False)

    try:
        for step, size in enumerate(plan, 1):
            share = share_of(batches, step - 1, size, train.microbatch_size or 1, state.mesh)
            done, when = take_step(state, recipe, share, inspect=inspect), f"step {step}"
            figures["loss"][when], figures["grad_norm"][when] = done.loss, done.norm
            more = {
                name: value for name, value in done.more.items() if name not in USUAL
            }  # averages of those two
            figures["auxiliary"] |= {f"{name}, {when}": value for name, value in more.items()}
            if follows and step < len(plan):
                write_state(f"{differences.AFTER}{step}", {})
                if reference:
                    follow(state, folder.parent / "layout" / f"{differences.AFTER}{step}")
                    disturb_weights()
        figures["validation"] = {"the last weights": validation_loss(state, recipe, batches)}
        write_state(differences.END, {**figures, "copies": corrupted(state, moments=True)})
    finally:
        state.parallel.close()


def validation_loss(state: State, recipe: Recipe, batches: Batches) -> float:
    """The loss of a batch that ranks cannot share evenly, as a run validates."""
    rows = max(1, recipe.train.global_batch_size - 1)
    share = rows_of(batches, rows, recipe.train.microbatch_size or 1, state.mesh, state.mesh.divided)
    return validate(state, [ValidationSet("", True, share, None)])["val_loss"]


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


@torch.no_grad()
def follow(state: State, folder: Path) -> None:
    """The reference goes on from the weights and states that a layout wrote."""
    there = store.Reader(folder, finite=False)
    for kind, tensors in (("model", {**state.masters(), **state.buffers()}), ("optimizer", state.moments())):
        for name, tensor in tensors.items():
            tensor.copy_(there.read(kind, name))
    for replica in state.parallel.replicas:
        replica.refresh()


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
    layout's ranks wrote. Below fp32 there are two references, one in fp32 and one in the mode. In fp32 there are two
    more, which are `disturbed`, if the layout differs by more than TOLERANCE."""
    layout, mode = Layout.from_recipe(recipe.layout), recipe.precision.mode

    def reference(mode: str, disturbed: int = 0) -> Path:
        place = folder / reference_name(recipe, steps, mode, disturbed)
        if OPTIMIZERS[recipe.optim.name].jumps:  # it followed another layout
            remove(place)
        if not place.exists():
            precision = recipe.precision.model_copy(update={"mode": mode})
            one = recipe.model_copy(update={"precision": precision})
            compute(one, data, steps, place, alone(), reference=True, disturbed=disturbed)
        return place

    report, exact = Report(to_text(layout), layout.ranks, mode, steps), reference(MASTER)
    own = differences.between(reference(mode), exact, True) if mode != MASTER else ()
    limits = Limits(mode, exact, own)
    judge(report, folder / "layout", exact, limits)
    if mode == MASTER and not all(f.passed for kind, f in report.figures.items() if kind != "copies"):
        report = Report(to_text(layout), layout.ranks, mode, steps)
        others = [reference(MASTER, sign) for sign in (1, -1)]
        judge(report, folder / "layout", exact, Limits(mode, exact, others=others))
    return report


def reference_name(recipe: Recipe, steps: int, mode: str, disturbed: int = 0) -> str:
    """The folder of a reference, in which layouts share it that take the same steps."""
    further = sizes(recipe, steps)[steps:]
    return "-".join([mode, *map(str, further), *(["disturbed", f"{disturbed:+}"] if disturbed else [])])


def judge(report: Report, layout: Path, reference: Path, limits: Limits) -> None:
    """Writes into the report how far a layout's side is from the reference."""
    for key, rel in differences.between(layout, reference, bool(limits.own), limits.others):
        setattr(report, key[0], getattr(report, key[0]).worse(limits.figure(key, rel)))
    if odd := str(store.Reader(layout / differences.END, finite=False).meta["copies"]):
        report.copies = Figure(math.inf, odd, 0.0)
