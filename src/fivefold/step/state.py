"""The training state of one rank: its part of the model, the master weights and the optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fivefold.checkpoint.source import Elsewhere
from fivefold.comm.compress import CompressedSum
from fivefold.errors import UserError, several
from fivefold.host import memory_bytes
from fivefold.host.machine import has_fast_bf16
from fivefold.kernels.native import Table
from fivefold.launch.ranks import Ranks
from fivefold.models import predicted
from fivefold.models.card import Card, card_of
from fivefold.models.custom import CustomModel, ModuleCard, buffers_of
from fivefold.models.layers import Output
from fivefold.models.mup import scales
from fivefold.optim import OPTIMIZERS, OUTER, kept_in
from fivefold.optim.card import OptimizerCard, factors, gathered, places, state_bytes, ways
from fivefold.optim.rounding import Rounder
from fivefold.optim.scaling import LossScale
from fivefold.optim.updater import Rounded, Updater
from fivefold.parallel.diloco import Outer
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.parallelize import Parallel, parallelize
from fivefold.parallel.replica import Gathered
from fivefold.precision import DTYPES, PRECISIONS, Mode, chosen, sent, torch_dtype
from fivefold.recipe import LeftOut, OptimSection, Recipe
from fivefold.sharding.layout import Layout
from fivefold.sharding.parts import Part, held, is_matrix, positions, size_of, whole
from fivefold.sharding.tiers import tiers
from fivefold.step.custom import NOTHING, UserFunctions, custom_model, make_equal, use_loss
from fivefold.step.qk_clip import QKClip

PRIME = (1 << 31) - 1  # sums of positions are compared modulo it: those of all ranks do not overflow


@dataclass
class State:
    """The training state. `step` counts optimizer steps.

    counts: (2) fp64, on the device, because the host learns of a step's result while a later one runs: the steps that
    changed the weights, and the steps skipped in a row since then (with loss scaling only those at its lowest factor).
    usual: statistics of loss and norm up to now (step/step.py). limit: of the largest weight of this rank
    (`step.destroyed`); None: not known. outer: the outer loop, if there are several replica groups.
    loss_scale: if the mode needs one. left_out: data that the run has left out: (step, sequences) says how many come
    between the batches of this step and the next. rollbacks: (step of a fault, step that the run went back to).
    """

    parallel: Parallel
    mesh: Mesh
    counts: Tensor
    outer: Outer | None = None
    loss_scale: LossScale | None = None
    qk_clip: QKClip | None = None
    grows: bool = False  # windows do, with the steps (`step.set_windows`)
    step: int = 0
    usual: Tensor = field(default_factory=lambda: torch.zeros(2, 3, dtype=torch.float64))
    limit: Tensor | None = None
    left_out: LeftOut = ()
    rollbacks: Sequence[tuple[int, int]] = ()
    # Numerator and denominator averages of the noise scale (`train.instruments`)
    noise: tuple[float, float] = (0.0, 0.0)
    elsewhere: Elsewhere | None = None  # where the frozen weights are that checkpoints leave out
    functions: UserFunctions = NOTHING  # the user's own in place of the recipe's
    figures: dict[str, Tensor] = field(default_factory=dict)  # further ones of a step, equal on all ranks
    forgotten: str = ""  # what a checkpoint had no place for, in words
    products: Table | None = None  # which library multiplies, on all ranks; None: not known yet

    @property
    def module(self) -> nn.Module:
        """The model, if this rank computes all of its blocks."""
        assert len(self.parallel.stages) == 1
        return self.parallel.stages[0]

    @property
    def updates(self) -> int:
        """The number of steps that changed the weights: those with a finite loss and gradient. Waits for the device."""
        return int(self.counts[0])

    @property
    def skipped(self) -> int:
        """The number of steps skipped in a row. Waits for the device."""
        return int(self.counts[1])

    def set_counts(self, updates: int, skipped: int) -> None:
        self.counts = torch.tensor([updates, skipped], dtype=torch.float64, device=self.mesh.device)

    def masters(self) -> dict[str, Tensor]:
        """This rank's part of the master weights, by name."""
        self.parallel.settle()
        return {name: w for replica in self.parallel.replicas for name, w in replica.masters.items()}

    def parts(self) -> dict[str, Part]:
        """This rank's part of each parameter, by name."""
        return {name: part for replica in self.parallel.replicas for name, part in replica.parts.items()}

    def buffers(self) -> dict[str, Tensor]:
        """The buffers of this rank's stages that checkpoints keep, by name."""
        return {name: b for stage in self.parallel.stages for name, b in buffers_of(stage)[0].items()}

    def gradients(self) -> dict[str, Tensor]:
        """The gradients of the masters, after a step's backward. With loss scaling: copies, without its factor."""
        self.parallel.settle()
        found = {name: g for replica in self.parallel.replicas for name, g in replica.gradients.items()}
        if self.loss_scale is None:
            return found
        return {name: g / self.loss_scale.factor for name, g in found.items()}

    def moments(self) -> dict[str, Tensor]:
        """This rank's optimizer states, named as in a checkpoint ("exp_avg.NAME"); empty before a step."""
        return {name: t for replica in self.parallel.replicas for name, t in replica.updater.states().items()}

    def moment_parts(self) -> dict[tuple[str, str], Part]:
        """This rank's part of each optimizer state, by (state, parameter)."""
        found = {}
        for replica in self.parallel.replicas:
            rules = replica.updater.rules
            routes = rules.gathering.routes if rules and isinstance(rules.gathering, Gathered) else {}
            for state, name, part in places(replica.updater.card, replica.parts, gathered(routes)):
                found[state.name, name] = part
        return found

    def unsent(self) -> dict[str, Tensor]:
        """What this rank keeps of compressed gradient sums, named as in a checkpoint; empty without compression."""
        return {
            f"unsent.{self.mesh.axis('run').rank}.{number}.{name}": tensor
            for number, replica in enumerate(self.parallel.replicas)
            for name, tensor in replica.unsent().items()
        }

    def compression_errors(self) -> dict[str, float]:
        """For each parameter of this rank the share of its gradient that the last step's compressed sum left out."""
        return {name: error for replica in self.parallel.replicas for name, error in replica.errors().items()}

    def go_to(self, step: int) -> None:
        """Sets the step, by which compressed sums begin, and random-k and stochastic rounding draw. Weights of another
        step are no measure of an update."""
        self.step, self.limit = step, None
        for one in self.compressed():
            one.steps = step
        for replica in self.parallel.replicas:
            replica.updater.largest = None
            if replica.updater.rounder is not None:
                replica.updater.rounder.steps = step

    def compressed(self) -> list[CompressedSum]:
        """The compressed gradient sums; none without compression."""
        return [one for replica in self.parallel.replicas for one in replica.compressed]


def build_state(
    recipe: Recipe,
    ranks: Ranks,
    module: nn.Module | None = None,
    replica_group: int | None = None,
    card: ModuleCard | None = None,
    functions: UserFunctions = NOTHING,
    memory: AbstractContextManager[object] | None = None,
) -> State:
    """Builds this rank's part of a resolved recipe's model, master weights and optimizer, at step 0. replica_group: as
    in `Mesh`. module, card: the user's own. functions: the user's own in place of the recipe's. memory: see
    `parallelize`; with one nothing is checked."""
    layout, replica_groups = Layout.from_recipe(recipe.layout), recipe.replica_groups
    if memory is None and module is None and functions.card is None and ranks.device.type == "cpu":
        _fits(recipe, layout, ranks)
    overlap, spec = bool(replica_groups.overlap), card_of(recipe.model)
    further = spec.further if module is None else 0
    mesh = Mesh(layout, ranks, replica_groups.count, replica_group, overlap, spec.causal, further)
    mode = compute_mode(recipe, ranks.device, module is not None)
    dtype, masters = torch_dtype(mode.working), torch_dtype(mode.master)
    reduce = torch_dtype(sent(mode, recipe.precision.reduce))
    own, embeddings = None, None
    if module is not None:
        own, embeddings = custom_model(recipe, module, card), embeddings_of(module, recipe.model.vocab_size)
        make_equal(module.float().to(mesh.device), mesh)
    parallel = parallelize(recipe, mesh, dtype, reduce, memory, masters, own)
    state = with_optimizer(parallel, mesh, recipe, mode, own, embeddings, functions, memory)
    for one in state.compressed():
        one.after = mesh.layout.compress_after or 0
    if replica_groups.count > 1:
        optimizer, sync = OUTER[recipe.sync.method], recipe.sync
        fields = {name: getattr(sync, f"outer_{name}") for name in optimizer.fields}
        assert sync.outer_lr, "a resolved recipe has the outer fields"
        assert None not in fields.values(), "a resolved recipe has the outer fields"
        state.outer = Outer(
            parallel.replicas, mesh.axis("outer"), replica_groups, optimizer, sync.outer_lr, fields
        )
    if memory is None:
        kept = kept_in(functions.card or OPTIMIZERS[recipe.optim.name], mode, recipe.precision.rounding)
        assert_whole(state, own or spec, kept)
    return state


def assert_whole(state: State, model: CustomModel | Card, card: OptimizerCard) -> None:
    """Asserts that exactly one rank owns each element of the weights and of the optimizer's states, so that the ranks
    can write whole checkpoints. card: with the states that are kept."""
    trained = {name: shape for name, shape in model.parameters.items() if name not in model.frozen}
    states = (of for n, shape in trained.items() for of in card.states_of(n, shape, model.sections.get(n)))
    wanted = {**model.parameters} | {f"{state.name}.{own}": shape for state, own, shape in states}
    mine = state.parts() | {f"{one}.{name}": part for (one, name), part in state.moment_parts().items()}
    rows = list[tuple[int, int, int]]()
    for name, shape in wanted.items():
        number, total, outside = 0, 0, False
        if (part := mine.get(name)) and part.owned:
            number, total = positions(part.keeps, shape)
            outside = any(b > n for dim, n in zip(part.keeps, shape, strict=True) for _, b in dim)
        rows.append((number, total % PRIME, outside))
    found = torch.tensor(rows, dtype=torch.int64, device=state.mesh.device)
    state.mesh.axis("all").all_reduce(found)
    for (name, shape), (number, total, outside) in zip(wanted.items(), found.tolist(), strict=True):
        size, sum_of = positions(whole(shape), shape)
        assert (number, total % PRIME, outside) == (size, sum_of % PRIME, 0), (
            f"the ranks could write no whole checkpoint: {name}, shape {list(shape)}: they own {number:,} of its "
            f"{size:,} elements"
        )


def with_optimizer(
    parallel: Parallel,
    mesh: Mesh,
    recipe: Recipe,
    mode: Mode,
    own: CustomModel | None = None,
    embeddings: frozenset[str] | None = None,
    functions: UserFunctions = NOTHING,
    memory: AbstractContextManager[object] | None = None,
) -> State:
    """The state at step 0, ready to train. own: a user's own module. embeddings: as in `rate_of`. memory: see
    `parallelize`."""
    if mesh.device.type == "cuda":
        torch.set_float32_matmul_precision("highest" if DTYPES[mode.rate].stored else "high")
    for stage in parallel.stages:
        stage.train()
        for module in stage.modules():
            if isinstance(module, Output):
                module.z_loss = recipe.train.z_loss
    if functions.loss is not None:
        use_loss(parallel.stages, functions.loss)
    compute, how = torch_dtype(mode.working), recipe.precision.rounding
    card = functions.card or OPTIMIZERS[recipe.optim.name]
    rounder = partial(Rounder, how, torch_dtype(mode.state), recipe.train.seed, kept_in(card, mode, how))
    model = own or card_of(recipe.model)
    found = ways(card, model, mesh.layout, mesh.rank) if mesh.divided else {}
    for replica in parallel.replicas:
        mine = {name: way for name, way in found.items() if name in replica.masters}
        gathering = Gathered(mine, mesh) if mine else None
        replica.conditional = own is not None
        trained = {name: w for name, w in replica.masters.items() if not replica.parts[name].frozen}
        shapes = {name: replica.parts[name].shape for name in trained}
        given: dict[str, Any] = updater_arguments(recipe, shapes, embeddings, functions)
        given["compute"] = compute
        if not trained:
            replica.updater = Updater(masters={}, **given)
        elif offload := parallel.offloads.get(id(replica)):
            given |= {"gradients": replica.gradients, "working": replica.working}
            given |= {"rounder": rounder(replica.parts) if mode.rounds else None}
            with memory or nullcontext():
                replica.updater = offload.update_by(masters=trained, **given)
        else:
            sections = {name: each for name in trained if (each := replica.parts[name].sections)}
            given |= {"gathering": gathering, "sections": sections}
            make = lambda masters, given=given: Updater(masters=masters, **given)  # noqa: E731
            rounds = mode.rounds
            replica.updater = Rounded(rounder(replica.parts), trained, make) if rounds else make(trained)
    counts, usual = (torch.zeros(*n, dtype=torch.float64, device=mesh.device) for n in ((2,), (2, 3)))
    state = State(parallel, mesh, counts, usual=usual, functions=functions)
    state.grows = recipe.model.ramped(0) > 0
    if own is not None and (recipe.optim.qk_clip or state.grows):
        raise UserError("modules of your own have no optim.qk_clip and no windows that grow; leave them out")
    if limit := recipe.optim.qk_clip:
        state.qk_clip = QKClip(limit, card_of(recipe.model), parallel.stages, parallel.replicas, mesh)
    if mode.scaled:
        precision = recipe.precision
        state.loss_scale = LossScale(precision.loss_scale, precision.loss_scale_every, mesh.device)
    return state


def updater_arguments(
    recipe: Recipe,
    shapes: Mapping[str, tuple[int, ...]],
    embeddings: frozenset[str] | None = None,
    functions: UserFunctions = NOTHING,
) -> dict[str, Any]:
    """The arguments of `Updater` that follow from the recipe, for parameters of these shapes, each undivided.
    embeddings: as in `rate_of`."""
    optim, card = recipe.optim, functions.card
    fields = dict(card.fields) if card else {n: getattr(optim, n) for n in OPTIMIZERS[optim.name].fields}
    assert card or None not in fields.values(), "a resolved recipe has the optimizer's fields"
    # with those that the data leaves out, such as prompts of conversations
    targets = predicted(card_of(recipe.model).objective, recipe.model.seq_len)
    targets *= recipe.train.global_batch_size
    used = card or OPTIMIZERS[optim.name]
    if recipe.model.base_dim and (embeddings is not None or used.width_power is None):
        raise UserError(
            f"model.base_dim = {recipe.model.base_dim}: mu-P is not known for modules and optimizers of your own. "
            "Nearest valid: leave base_dim out"
        )
    mup = {n: scales(recipe.model, n, shape, used.of(n, shape).width_power)[1] for n, shape in shapes.items()}
    return {
        "card": used,
        "lr": optim.lr,
        # Only matrices decay
        "weight_decay": {n: optim.weight_decay * factors(optim.groups, n)[1] / mup[n] for n in shapes},
        "fields": fields,
        "rates": {n: rate_of(optim, n, shape, embeddings) * mup[n] for n, shape in shapes.items()},
        "tokens": targets // recipe.replica_groups.count,
    }


def rate_of(
    optim: OptimSection, name: str, shape: tuple[int, ...], embeddings: frozenset[str] | None = None
) -> float:
    """The learning rate of a parameter, relative to `optim.lr`. embeddings: names of embeddings and output layer; None:
    our models have nothing else outside of blocks."""
    factor, _ = factors(optim.groups, name)
    if not is_matrix(name, shape):
        return factor * (optim.lr_vectors or optim.lr) / optim.lr
    if not name.startswith("blocks.") if embeddings is None else name in embeddings:
        return factor * (optim.lr_embeddings or optim.lr) / optim.lr
    return factor


def embeddings_of(module: nn.Module, vocab_size: int | None) -> frozenset[str]:
    """The names of embeddings and output layer in a user's own module: parameters of `nn.Embedding`, those that share
    their memory, and matrices with a row for each token."""
    inside = {id(p) for one in module.modules() if isinstance(one, nn.Embedding) for p in one.parameters()}
    return frozenset(
        name
        for name, p in module.named_parameters()
        if id(p) in inside
        or (p.dim() == 2 and (vocab_size or 0) > 2 and p.shape[0] == vocab_size)  # 2: not known
    )


def _fits(recipe: Recipe, layout: Layout, ranks: Ranks) -> None:
    """Refuses a model whose states alone do not fit into the machine."""
    card, mode = card_of(recipe.model), compute_mode(recipe, ranks.device)
    kept = sum(size_of(part.keeps) for part in held(card, layout, ranks.rank).values())
    away = tiers(layout.offload, mode.copies)
    optimizer = kept_in(OPTIMIZERS[recipe.optim.name], mode, recipe.precision.rounding)
    states = {
        "masters": DTYPES[mode.master].bytes * kept,
        "gradients": DTYPES[mode.gradient].bytes * kept,
        "states": state_bytes(optimizer, card, layout, ranks.rank),
    }
    needed = sum(size for kind, size in states.items() if getattr(away, kind) != "disk")
    if needed * ranks.local_world > memory_bytes():
        raise UserError(
            f"the model needs at least {needed / 2**30:,.1f} GiB per rank ({needed / kept:g} bytes per parameter) for "
            f"{several(ranks.local_world, 'rank')}, and this machine has {memory_bytes() / 2**30:,.1f} GiB"
        )


def compute_mode(recipe: Recipe, device: torch.device, own_module: bool = False) -> Mode:
    """The recipe's mode, or if that is auto, the one that is fast on the device. A user's own module
    runs in bf16 only if the recipe says so, because its buffers may need fp32."""
    mode = PRECISIONS[chosen(recipe.precision.mode, not own_module and has_fast_bf16(device.type))]
    if mode.gpu and device.type != "cuda":
        raise UserError(
            f'precision.mode = "{mode.name}" is a way in which GPUs multiply, and this run is on a CPU. Nearest valid: '
            f'precision.mode = "{mode.working}"'
        )
    return mode
