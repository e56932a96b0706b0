"""Builds the part of a recipe's model that one rank computes. The order is fixed here, and only here:

1. cut the model into pipeline stages and keep this rank's (on "meta": no memory yet);
2. choose the layers that round factors;
3. shard experts, tensors and the sequence: parameters become this rank's parts, with collectives between them;
4. recompute activations; 5. compile; 6. shard states and sum gradients over the data axes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fivefold.models.base import LanguageModel
from fivefold.models.card import Card, card_of
from fivefold.models.custom import CustomModel
from fivefold.models.init import build
from fivefold.models.recomputation import of_blocks
from fivefold.models.section import ModelSection
from fivefold.parallel import context, expert, matmuls, recompute, tensor
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.offload.activations import Activations, Parts
from fivefold.parallel.offload.disk import Disk, folder_of
from fivefold.parallel.offload.states import Offload
from fivefold.parallel.pipeline import Pipeline
from fivefold.parallel.replica import Replica, stop_gradients
from fivefold.parallel.replica_builder import ReplicaBuilder
from fivefold.recipe import Recipe
from fivefold.sharding.layout import Layout
from fivefold.sharding.parts import TIED, Part, held, stage_blocks, stage_parameters, stages_of, tensor_sums
from fivefold.sharding.tiers import OFFLOADS, partitions
from fivefold.sharding.units import Keeping, keepings

if TYPE_CHECKING:  # importing FSDP2 takes half a second
    from fivefold.parallel.unit_messages import UnitMessages


@dataclass
class Parallel:
    """A rank's part of the model and its states.

    stages: the model, or this rank's pipeline stages. positions: (T), of this rank's tokens; None: all positions.
    reductions: gradient sums beyond those of the replicas, called after these finish. pipeline: runs the stages if pp >
    1. balance: of the experts' load, if the model has experts. offloads: what replicas keep elsewhere, and the disk.
    computes: the dtype of weights that compute.
    """

    stages: list[nn.Module]
    replicas: list[Replica]
    positions: Tensor | None = None
    reductions: list[Callable[[], None]] = field(default_factory=list)
    pipeline: Pipeline | None = None
    balance: expert.Balance | None = None
    offloads: dict[int, Offload] = field(default_factory=dict)
    disk: Disk | None = None
    activations: Activations | Parts | None = None
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
            for (
                offload
            ) in self.offloads.values():  # the first is the last to settle, so its error comes through
                if offload.updater is not None:
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
    layout, model = mesh.layout, recipe.model
    card: Card | CustomModel = card_of(model) if own is None else own
    modes = of_blocks(layout.recompute, model.layers if own is None else own.blocks)
    numbered: dict[int, Any] = (
        split(model, layout, mesh.index("pp")) if own is None else own.split(layout, mesh.index("pp"), keep)
    )
    stages = list(numbered.values())
    table = held(card, layout, mesh.rank)
    found = Parallel(list(stages), [], computes=compute_dtype)
    if not OFFLOADS[layout.offload].stays:
        found.disk = Disk(folder_of(layout.offload_dir))
    for stage in stages if own is None else ():
        matmuls.apply(stage, recipe)
    _divide(found, recipe, mesh, card, table)
    if mesh.size("pp") > 1:
        again = set(modes) != {"none"} and model.dropout > 0
        found.pipeline = Pipeline(numbered, mesh, model.dim, compute_dtype, in_turns=not again)
    for stage in stages:
        recompute.apply(stage, modes, mesh.device.type == "cuda", found.saving_inputs, card.stack)
    stop_gradients(stages, card.frozen)
    if mesh.device.type == "cuda" and not (found.pipeline and found.pipeline.splits_backward):
        _compile_blocks(stages, card.stack)
    for parameter in (p for stage in stages for p in stage.parameters()):
        parameter.data = parameter.data.to(masters)
    kept = keepings(card, layout, list(numbered))
    units = _shard(numbered, kept, mesh, compute_dtype, reduce)
    build = ReplicaBuilder(recipe, mesh, table, compute_dtype, reduce, found.disk, filled=own is not None)
    with memory or nullcontext():
        of_stage = build.replicas(numbered, kept, units)
    found.replicas += build.made  # the list that `reductions` know
    found.offloads = build.offloads
    found.activations = _activations(stages, mesh, found.disk)
    if found.pipeline is not None:
        found.pipeline.replicas = of_stage
        if card.tied and TIED not in card.frozen:
            found.reductions += sum_tied(found.replicas, mesh, found.pipeline.rank_of)
    return found


def _divide(
    found: Parallel, recipe: Recipe, mesh: Mesh, card: Card | CustomModel, table: dict[str, Part]
) -> None:
    """Divides experts, tensors and sequences: parameters become this rank's parts, with messages between them."""
    layout, model = mesh.layout, recipe.model
    stages: list[Any] = found.stages  # plain modules, or parts of a recipe's model
    if card.has_experts:
        found.balance = expert.Balance(stages, mesh, model)
        for stage in stages:
            expert.apply(stage, mesh, table)
    if mesh.size("tp") > 1:
        partial = [name for stage in stages for name in tensor.apply(stage, mesh, card)]
        messages = tensor_sums(card, layout, partial)
        found.reductions.append(tensor.sum_gradients(found.replicas, messages, mesh))
    if mesh.size("cp") > 1:
        found.positions = context.positions(model.seq_len, mesh)
        for stage in stages:
            context.apply(stage, mesh)


def _compile_blocks(stages: Sequence[nn.Module], stack: str) -> None:
    """Compiles the blocks without experts: their choice would break the compiled graph. A module without blocks is
    compiled as a whole."""
    for stage in stages:
        if not stack:
            stage.compile()
            continue
        mixed = (
            {int(number) for number, _ in expert.mixtures(stage)} if isinstance(stage, LanguageModel) else ()
        )
        for number, block in stage.get_submodule(stack).named_children():
            if int(number) not in mixed:
                block.compile()


def _shard(
    numbered: dict[int, Any],
    kept: Sequence[Keeping],
    mesh: Mesh,
    compute_dtype: torch.dtype,
    reduce: torch.dtype,
) -> dict[int, list[UnitMessages]]:
    """Shards the units of FSDP2 and returns their messages, by stage. The units have no memory yet, so no rank ever
    holds all the weights in fp32."""
    if not any(keeping.units for keeping in kept):
        return {}
    from fivefold.parallel import zero  # here: importing FSDP2 takes half a second

    found: dict[int, list[UnitMessages]] = {}
    for keeping in kept:
        for number in keeping.stages:
            units = [unit for unit in keeping.units if unit.stage == number]
            found[number] = zero.shard(numbered[number], units, mesh, compute_dtype, reduce)
    return found


def _activations(stages: Sequence[nn.Module], mesh: Mesh, disk: Disk | None) -> Activations | Parts | None:
    """Where activations lie in host memory or in parts; None: whole on the device."""
    layout = mesh.layout
    alike = partitions(layout.offload, layout.recompute, layout.tp, layout.sp)
    axis = mesh.axis("tp") if alike else None
    if disk is not None and OFFLOADS[layout.offload].activations != "device":
        return Activations(disk, mesh.device, (p for stage in stages for p in stage.parameters()), axis)
    return Parts(axis) if axis is not None else None


def split(model: ModelSection, layout: Layout, pp_index: int) -> dict[int, LanguageModel]:
    """The stages of the ranks with this index on the pp axis, by number, on "meta". Without a pipeline: {0: the whole
    model}. Parameters keep their names."""
    card = card_of(model)
    names = stage_parameters(card, stage_blocks(card, layout))
    found = {}
    for stage in stages_of(layout, pp_index):
        module = build(model, device="meta")
        assert isinstance(module, LanguageModel)
        keep(module, set(names[stage]))
        module.first, module.last = stage == 0, stage == len(names) - 1
        found[stage] = module
    return found


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
                gradient = replica.gradients[TIED]
                mine = gradient.to(mesh.device).contiguous()  # NCCL sends nothing from host memory
                theirs = torch.empty_like(mine)
                mesh.axis("pp").start_exchange(mine, other, theirs, other)()
                gradient.add_(theirs.to(gradient.device))

    return [reduction]
