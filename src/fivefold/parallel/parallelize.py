"""Builds the part of a recipe's model that one rank computes. The order is fixed here, and only here:

1. cut the model into pipeline stages and keep this rank's (on "meta": no memory yet);
2. choose the layers that round the factors of their matmuls;
3. shard experts, tensors and the sequence: parameters become this rank's parts, with collectives between them;
4. recompute activations; 5. compile;
6. give memory and initial weights, shard states and sum gradients over the data axes: the replicas.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fivefold.errors import UserError
from fivefold.host.machine import trim_memory
from fivefold.kernels.rounded import RoundedMatmuls, matrices, rounded_matmuls
from fivefold.models.base import LanguageModel, build, init_part
from fivefold.models.card import Card, card_of
from fivefold.models.custom import CustomModel
from fivefold.models.layers import Linear
from fivefold.models.mixture import Experts
from fivefold.models.recomputation import of_blocks
from fivefold.parallel import context, expert, recompute, tensor
from fivefold.parallel.data import DataParallel, allocate
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.offload.activations import Activations, Parts
from fivefold.parallel.offload.disk import Disk, folder_of
from fivefold.parallel.offload.pages import Paged
from fivefold.parallel.offload.states import Offload
from fivefold.parallel.pipeline import Pipeline
from fivefold.parallel.replica import Frozen, Replica
from fivefold.precision import PRECISIONS, torch_dtype
from fivefold.recipe import Recipe
from fivefold.schedules.compression import compressor
from fivefold.sharding.layout import Layout
from fivefold.sharding.parts import (
    TIED,
    Part,
    ends_of,
    held,
    local_shape,
    stage_blocks,
    stage_parameters,
    stages_of,
    tensor_sums,
)
from fivefold.sharding.tiers import OFFLOADS, Tiers, partitions, tiers
from fivefold.sharding.units import FlatBuffer, FsdpUnit, Keeping, keepings

if TYPE_CHECKING:  # importing FSDP2 takes half a second
    from fivefold.parallel.zero import UnitMessages


Layer = Linear | tensor.CutLinear | Experts


@dataclass
class Parallel:
    """A rank's part of the model and its states.

    stages: the model, or this rank's pipeline stages.
    reductions: gradient sums beyond those of the replicas, called after these finish. pipeline: runs the stages if pp >
    1. balance: of the experts' load, if the model has experts. offloads: what replicas keep elsewhere, and the disk.
    computes: the dtype of weights that compute.
    """

    stages: list[nn.Module]
    replicas: list[Replica]
    reductions: list[Callable[[], None]] = field(default_factory=list)
    pipeline: Pipeline | None = None
    balance: expert.Balance | None = None
    offloads: dict[int, Offload] = field(default_factory=dict)
    disk: Disk | None = None
    activations: Parts | None = None
    computes: torch.dtype = torch.float32

    def saving(self) -> AbstractContextManager[object]:
        """The context of forward and backward, in which saved tensors may leave the device."""
        return self.activations.saving() if self.activations is not None else nullcontext()

    def saving_inputs(self) -> AbstractContextManager[object]:
        """The context in which the inputs of recomputed blocks are saved."""
        return self.activations.partitioned() if self.activations is not None else nullcontext()

    def notes(self) -> list[str]:
        """Where this rank's files are, for people; nothing without any."""
        if self.disk is None or not self.disk.bytes:
            return []
        size, where = self.disk.bytes / 2**30, self.disk.folder
        return [
            f"offload: {size:.2f} GiB per rank in {where}, in files without names that vanish with the process"
        ]

    def settle(self) -> None:
        """Waits until all updates that run beside the next step are done. Then raises the first one's error."""
        with ExitStack() as stack:  # also those behind one that fails: nothing may run on in closed files
            for offload in self.offloads.values():
                if offload.updater is not None:  # the first is the last to settle, so its error comes through
                    stack.callback(offload.updater.settle)

    def close(self) -> None:
        """Takes the hooks off the modules, and frees what is elsewhere."""
        try:
            self.settle()
        finally:
            for replica in self.replicas:
                replica.close()
            if self.disk is not None:
                self.disk.close()


def parallelize(
    recipe: Recipe,
    mesh: Mesh,
    compute_dtype: torch.dtype,
    reduce: torch.dtype,
    memory: AbstractContextManager[object] | None = None,
    masters: torch.dtype = torch.float32,
    own: CustomModel | None = None,
) -> Parallel:
    """Builds this rank's part of a resolved recipe's model, with its initial weights, whose masters have this dtype.

    memory: a context entered where the module gets memory; all steps before work on "meta". own: a user's own module
    instead of the recipe's model. It has its weights on the device from the start, and trains in place if no axis cuts
    it.
    """
    card: Card | CustomModel = card_of(recipe.model) if own is None else own
    table = held(card, mesh.layout, mesh.rank)
    numbered, parallel = cut(recipe, mesh, compute_dtype, masters, card, table)
    stages = parallel.stages
    kept = keepings(card, mesh.layout, list(numbered))
    filled = own is not None
    builder = _ReplicaBuilder(recipe, mesh, table, compute_dtype, reduce, masters, parallel, filled)
    builder.shard(numbered, kept)
    with memory or nullcontext():
        of_stage = builder.replicas(numbered, kept)
    if parallel.disk is not None and memory is None:
        trim_memory()  # initial values were there
    layout = mesh.layout
    alike = partitions(layout.offload, layout.recompute, layout.tp, layout.sp)
    axis = mesh.axis("tp") if alike else None
    if parallel.disk is not None and OFFLOADS[layout.offload].activations != "device":
        weights = (p for stage in stages for p in stage.parameters())
        parallel.activations = Activations(parallel.disk, mesh.device, weights, axis)
    elif axis is not None:
        parallel.activations = Parts(axis)
    if parallel.pipeline is not None:
        parallel.pipeline.replicas = of_stage
        if card.tied and TIED not in card.frozen:
            parallel.reductions += sum_tied(parallel.replicas, mesh, parallel.pipeline.rank_of)
        if layout.copies > 1:
            parallel.reductions.append(sum_copies(parallel.replicas, mesh))
    return parallel


def cut(
    recipe: Recipe,
    mesh: Mesh,
    compute_dtype: torch.dtype,
    masters: torch.dtype,
    card: Card | CustomModel,
    table: dict[str, Part],
) -> tuple[dict[int, Any], Parallel]:
    """Steps 1 to 5: this rank's stages by their number, divided and compiled, still on "meta". card: a recipe's model,
    or a user's own, which keeps its memory. table: this rank's parts of the parameters."""
    layout, model = mesh.layout, recipe.model
    own = card if isinstance(card, CustomModel) else None
    modes = of_blocks(layout.recompute, model.blocks if own is None else own.blocks)

    def whole() -> nn.Module:
        if own is None:
            return build(model, device="meta")
        return own.module if layout.pp == 1 else copy.deepcopy(own.module)

    numbered = split(card, layout, mesh.index("pp"), whole)
    stages = list(numbered.values())
    parallel = Parallel(list(stages), [], computes=compute_dtype)
    if not OFFLOADS[layout.offload].stays:
        parallel.disk = Disk(folder_of(layout.offload_dir))
    for stage in stages if own is None else ():
        round_matmuls(stage, recipe)
    _divide(parallel, recipe, mesh, card, table)
    if mesh.size("pp") > 1:
        again = set(modes) != {"none"} and model.dropout > 0
        parallel.pipeline = Pipeline(numbered, mesh, model.dim, compute_dtype, in_turns=not again)
    for stage in stages:
        recompute.apply(stage, modes, parallel.saving_inputs, card.stack)
        for name, parameter in stage.named_parameters():
            parameter.data = parameter.data.to(masters)
            if name in card.frozen:  # before anything is built around it
                parameter.requires_grad_(False)
    if mesh.device.type == "cuda":
        compile_blocks(stages, card, layout, modes)
    return numbered, parallel


def compile_blocks(
    stages: Sequence[nn.Module], card: Card | CustomModel, layout: Layout, modes: Sequence[str], **how: Any
) -> None:
    """Compiles the blocks that `Layout.compiles` says, at their first use. modes: of recomputation, of all blocks. how:
    options of `torch.compile`."""
    if layout.tp_chunks > 1 and how.get("backend", "inductor") == "inductor":
        # In graphs without gradients it would move the start of each message right before its wait.
        how["options"] = how.get("options", {}) | {"reorder_for_locality": False}
    for stage in stages:
        if not card.stack:  # a module without blocks is compiled as a whole
            stage.compile(**how)
            continue
        for number, block in stage.get_submodule(card.stack).named_children():
            mixed = isinstance(card, Card) and card.mixed[int(number)]
            if layout.compiles(mixed, modes[int(number)]):
                expert.keep_out(block, **how)
                block.compile(**how)


def _divide(
    parallel: Parallel, recipe: Recipe, mesh: Mesh, card: Card | CustomModel, table: dict[str, Part]
) -> None:
    """Divides experts, tensors and sequences: parameters become this rank's parts, with messages between them."""
    layout, model = mesh.layout, recipe.model
    stages: list[Any] = parallel.stages  # plain modules, or parts of a recipe's model
    if card.has_experts:
        parallel.balance = expert.Balance(stages, mesh, model)
        for stage in stages:
            expert.apply(stage, mesh, table)
    if mesh.size("tp") > 1:
        partial = [name for stage in stages for name in tensor.apply(stage, mesh, card)]
        messages = tensor_sums(card, layout, partial)
        parallel.reductions.append(tensor.sum_gradients(parallel.replicas, messages, mesh))
    if mesh.size("cp") > 1:
        for stage in stages:
            context.apply(stage, mesh)


def rounding(recipe: Recipe) -> RoundedMatmuls | None:
    """How the layers multiply, if the recipe's mode rounds the factors of matmuls. `auto` never does."""
    mode = PRECISIONS.get(recipe.precision.mode)
    return None if mode is None else rounded_matmuls(mode, recipe.precision)


def rounded_blocks(recipe: Recipe) -> range:
    """Numbers of the blocks that round the factors of matmuls."""
    first, last = recipe.precision.fp8_skip_first, recipe.precision.fp8_skip_last
    if rounding(recipe) is None:
        return range(0)
    return range(first, recipe.model.layers - last if last else recipe.model.blocks)


def round_matmuls(stage: nn.Module, recipe: Recipe) -> None:
    """Lets the linear layers and experts of a stage's blocks multiply as the recipe's mode says. Embedding, output
    layer, norms, routers and attention's own matmuls stay in the working dtype, and so do the blocks that the recipe
    excepts."""
    how, blocks = rounding(recipe), rounded_blocks(recipe)
    for name, module in stage.named_modules():
        if name.startswith("blocks.") and int(name.split(".")[1]) in blocks and isinstance(module, Layer):
            module.rounded = how


def rounded_layers(stage: nn.Module) -> Iterator[tuple[str, Layer]]:
    """The layers of a stage that round factors, with their names."""
    for name, module in stage.named_modules():
        if isinstance(module, Layer) and module.rounded is not None:
            yield name, module


def split(
    card: Card | CustomModel, layout: Layout, pp_index: int, made: Callable[[], nn.Module]
) -> dict[int, Any]:
    """The stages of the ranks with this index on the pp axis, by number, each cut from a whole module that `made`
    returns. Without a pipeline: {0: the whole module}. Parameters keep their names."""
    if layout.pp == 1:
        return {0: made()}
    names = stage_parameters(card, stage_blocks(card, layout))
    stages = {}
    for stage in stages_of(layout, pp_index):
        module = made()
        assert isinstance(module, LanguageModel)
        keep(module, set(names[stage]))
        module.first, module.last = ends_of(layout, [stage])
        stages[stage] = module
    return stages


def keep(module: LanguageModel, names: set[str]) -> None:
    """Drops each block, layer and parameter that has nothing in `names`."""
    for number in list(module.blocks):
        if not _any(names, f"blocks.{number}"):
            del module.blocks[number]
    for name, child in list(module.named_children()):
        if name != "blocks" and any(True for _ in child.parameters()) and not _any(names, name):
            setattr(module, name, None)
    for name, _ in list(module.named_parameters(recurse=False)):
        if name not in names:
            setattr(module, name, None)


def _any(names: set[str], module: str) -> bool:
    return any(name.startswith(f"{module}.") for name in names)


def sum_tied(replicas: Sequence[Replica], mesh: Mesh, rank_of: Sequence[int]) -> list[Callable[[], None]]:
    """Returns a reduction that sums the gradients of a tied embedding, if its first and last stage are on different
    ranks. Each rank sends its gradient and adds the other's, so both hold the same bits."""
    first, last = rank_of[0], rank_of[-1]
    if first == last or mesh.index("pp") not in (first, last):
        return []
    other = last if mesh.index("pp") == first else first

    def reduction() -> None:
        for replica in replicas:
            if TIED in replica.gradients:
                _add_others(replica.gradients[TIED], other, mesh)

    return [reduction]


def sum_copies(replicas: Sequence[Replica], mesh: Mesh) -> Callable[[], None]:
    """Returns a reduction that sums the gradients of both copies of the model (DualPipe). The rank at the same place
    from the other end of the pipeline has the same stages, of the other copies, and the same rows of them."""
    other = mesh.size("pp") - 1 - mesh.index("pp")

    def reduction() -> None:
        gradients = {name: gradient for replica in replicas for name, gradient in replica.gradients.items()}
        for name in sorted(gradients):
            _add_others(gradients[name], other, mesh)

    return reduction


def _add_others(gradient: Tensor, other: int, mesh: Mesh) -> None:
    """Exchanges a gradient with another pipeline rank, and adds its one: both then hold the same bits."""
    mine = gradient.to(mesh.device).contiguous()  # NCCL sends nothing from host memory
    theirs = torch.empty_like(mine)
    mesh.axis("pp").start_exchange(mine, other, theirs, other)()
    gradient.add_(theirs.to(gradient.device))


@dataclass
class _ReplicaBuilder:
    """Makes a rank's replicas: its stages on "meta" get memory and initial weights, and something that sums their
    gradients and updates them. into: gets them. filled: parameters have memory and values already. messages: of the
    units of each stage."""

    recipe: Recipe
    mesh: Mesh
    table: dict[str, Part]
    compute_dtype: torch.dtype
    reduce: torch.dtype
    masters: torch.dtype
    into: Parallel
    filled: bool
    messages: dict[int, list[UnitMessages]] = field(default_factory=dict)

    def shard(self, numbered: dict[int, Any], kept: Sequence[Keeping]) -> None:
        """Shards the units of FSDP2, which have no memory yet, so no rank ever holds all the weights in fp32."""
        for keeping in kept if any(keeping.units for keeping in kept) else ():
            from fivefold.parallel import zero  # here: importing FSDP2 takes half a second

            for number in keeping.stages:
                units = [unit for unit in keeping.units if unit.stage == number]
                away = self._tiers().masters != "device"
                sharded = zero.shard(
                    numbered[number], units, self.mesh, self.compute_dtype, self.reduce, away, self._summed()
                )
                self.messages[number] = sharded

    def replicas(self, numbered: dict[int, Any], kept: Sequence[Keeping]) -> dict[int, list[Replica]]:
        """The replicas of each stage, by its number."""
        of_stage: dict[int, list[Replica]] = {}
        if not self.filled:
            for module in (module for stage in numbered.values() for module in stage.modules()):
                for name, buffer in module.named_buffers(recurse=False):  # on "meta"
                    setattr(module, name, torch.zeros_like(buffer, device=self.mesh.device))
        for keeping in kept:
            stages = [numbered[number] for number in keeping.stages]
            made: list[Replica] = []
            if keeping.units:  # FSDP2 shards them
                made.append(self._sharded(stages, keeping.units))
            made += [self._whole(stages, buffer) for buffer in keeping.buffers]
            if keeping.frozen:
                frozen, _, _ = self._parameters(stages, keeping.frozen, None)
                made.append(Frozen(frozen, self.table, self.compute_dtype))
            self.into.replicas += made  # the list that `reductions` know
            of_stage |= dict.fromkeys(keeping.stages, made)
        return of_stage

    def _sharded(self, stages: list[nn.Module], units: Sequence[FsdpUnit]) -> Replica:
        """The replica of parameters that FSDP2 has sharded."""
        from fivefold.parallel import zero
        from fivefold.parallel.offload.rows import Rows

        numbers = sorted({unit.stage for unit in units})
        messages = [message for number in numbers for message in self.messages[number]]
        given, layout = (stages, self.table, self.compute_dtype, messages), self.mesh.layout
        if self._tiers().masters == "device":
            layers = dict(pair for stage in stages for pair in rounded_layers(stage))
            replica = zero.Sharded(*given, None if self.filled else self._initial, self._summed(), layers)
            offload = self._offload(replica.masters)
        else:
            room = {
                name: (unit.module, share)
                for unit in units
                for name, share in zip(unit.names, unit.shares, strict=True)
            }
            order = dict.fromkeys(
                name for stage in stages for name, _ in stage.named_parameters() if name in room
            )
            shapes = {name: local_shape(self.table[name].keeps) for name in order}
            like = {n: torch.empty(shape, dtype=self.masters, device="meta") for n, shape in shapes.items()}
            offload = self._offload(like, room)
            assert offload is not None
            replica = Rows(*given, self._initial, offload, layout.tp > 1 or layout.pp > 1)
        if offload is not None:
            self.into.offloads[id(replica)] = offload
        return replica

    def _whole(self, stages: list[nn.Module], buffer: FlatBuffer) -> Replica:
        """The replica of parameters that this rank has whole, in a flat buffer."""
        layout, sums = self.mesh.layout, self.mesh.sums(buffer.group)
        meta = {name: p for stage in stages for name, p in stage.named_parameters()}
        like = {name: meta[name] for name in buffer.names}
        offload = self._offload(like)
        params, flat, masters = self._parameters(stages, buffer.names, offload)
        shared = params, self.table, self.compute_dtype, sums, self.reduce
        if offload is None or offload.tiers.gradients == "device":
            given = flat, compressor(layout.compress), buffer.bucket_bytes, masters, self.mesh.device
            layers = {
                name: layer
                for stage in stages
                if masters is None  # else weights arrive while the model computes
                for name, layer in rounded_layers(stage)
                if all(f"{name}.{matrix}" in params for matrix in matrices(layer))
            }
            replica = DataParallel(*shared, *given, self._summed(), layers)
        else:
            assert masters is not None
            replica = Paged(*shared, masters, offload, layout.tp > 1 or layout.pp > 1)
        if offload is not None:
            self.into.offloads[id(replica)] = offload
            offload.attach(list(stages))
        if isinstance(replica, Paged):
            replica.attach(list(stages), layout.pp > 1, layout.splits_backward)
        return replica

    def _summed(self) -> torch.dtype | None:
        """The dtype of sums of gradients, if it is not the masters'. That of `auto` always is."""
        mode = PRECISIONS.get(self.recipe.precision.mode)
        return torch_dtype(mode.gradient) if mode and mode.gradient != mode.master else None

    def _tiers(self) -> Tiers:
        return tiers(self.mesh.layout.offload, own_masters=self.masters != self.compute_dtype)

    def _offload(
        self, like: Mapping[str, Tensor], sharded: Mapping[str, tuple[str, int]] | None = None
    ) -> Offload | None:
        """The tiers of parameters like these (see `Offload`); None: all is on the device."""
        where = self._tiers()
        if self.into.disk is None or not where.streams:
            return None
        layout = self.mesh.layout
        if not layout.offload_window and where.working != "device":
            raise UserError("layout.offload_window = 0 is sized when a run starts. Here it is 2 or more")
        how = self.mesh.device, sharded, layout.offload_window, layout.early
        return Offload(self.into.disk, where, like, *how)

    def _parameters(
        self, stages: list[nn.Module], names: Sequence[str], offload: Offload | None
    ) -> tuple[dict[str, nn.Parameter], Tensor | None, dict[str, Tensor] | None]:
        """Parameters with memory and values, and the flat buffer that they are views of (parallel/data.py); or masters
        that lie elsewhere. Stages that share a parameter compute with one tensor."""
        known = {name: p for stage in reversed(stages) for name, p in stage.named_parameters()}
        params = {name: known[name] for name in names}
        if self.filled:
            placed, flat, masters = params, None, None
        else:
            masters = offload.masters() if offload is not None else None
            flat, views = allocate(params, self.mesh.device) if masters is None else (None, masters)
            for name, view in views.items():
                view.copy_(self._initial(name))
                if masters is not None and offload is not None:
                    offload.disk.touched(view.nbytes)
            # Autograd counts the changes of `.data` apart: an update beside forward changes masters of later units.
            placed = {name: nn.Parameter(views[name].data) for name in params}
        for stage in stages:
            for name, parameter in list(stage.named_parameters()):
                if placed.get(name, parameter) is not parameter:
                    owner, _, leaf = name.rpartition(".")
                    setattr(stage.get_submodule(owner), leaf, placed[name])
        return placed, flat, masters

    def _initial(self, name: str) -> Tensor:
        """This rank's part of a parameter's initial weights."""
        return init_part(self.recipe.train.seed, name, self.recipe.model, self.table[name], self.mesh.device)
