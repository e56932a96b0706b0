"""Sharded states (ZeRO stages 1 to 3, arXiv 1910.02054), and hybrids of them with replicas, on PyTorch's FSDP2.

The ranks of a "shard" group divide the rows of every parameter (for few experts, the rows of each: `parts.shard_dim`).
Each rank keeps the master weights, gradients and moments of its rows only, in fp32 in most modes (`precision`).
A block's weights are gathered, in the compute dtype, before it runs. After its backward, its gradients are summed and
scattered to the owners of the rows. The stages are one engine with two switches:

| Stage | gathered weights | gradients are scattered | Elements sent per step of m microbatches |
|---|---|---|---|
| 1 | stay until the optimizer's step | in the last microbatch (they add up whole until then) | 2 Psi |
| 2 | stay until the optimizer's step | in every microbatch | (1 + m) Psi |
| 3 | are freed after a block's forward, and gathered again for its backward | in every microbatch | 3 m Psi |

Psi is the number of parameters; a gather or a scatter of all of them counts Psi, as in the paper. In a hybrid, the
replicas sum their shards once per step, in fp32. In a pipeline, every stage of ZeRO scatters gradients once per step,
as stage 1 does, because microbatches overlap and may defer weight gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from fivefold.parallel import private
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.replica import Replica
from fivefold.parallel.unit_messages import UnitMessages
from fivefold.sharding.parts import Part, local_shape, shard_dim
from fivefold.sharding.units import FsdpUnit, Sync


def shard(
    stage: nn.Module,
    units: Sequence[FsdpUnit],
    mesh: Mesh,
    compute_dtype: torch.dtype,
    reduce: torch.dtype = torch.float32,
) -> list[UnitMessages]:
    """Shards the parameters of a stage on "meta": those of its units become DTensors, and each rank has its rows of
    them. Parameters that are in no unit stay unchanged. Returns the messages of each unit."""
    divided = {name for unit in units for name in unit.names}
    whole = {p for name, p in stage.named_parameters() if name not in divided}
    sent = []
    for unit in units:
        module = stage.get_submodule(unit.module)
        here = {p for p in module.parameters() if not isinstance(p, DTensor)} - whole
        assert here == {stage.get_parameter(name) for name in unit.names}, (
            f"{unit.module or 'the stage'} has others"
        )
        (masters,) = {p.dtype for p in here} or {torch.float32}  # a stage may have nothing but its blocks
        sent.append(UnitMessages(mesh, unit, reduce, masters))
        # The inputs are not cast: the rotary table stays fp32. Gradients are summed in the dtype of the masters.
        policy = MixedPrecisionPolicy(compute_dtype, reduce_dtype=masters, cast_forward_inputs=False)
        fully_shard(
            module,
            mesh=mesh.device_mesh(unit.group),
            reshard_after_forward=True,
            shard_placement_fn=partial(_placement, mesh.size(unit.group)),
            mp_policy=policy,
            ignored_params=whole,
        )
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)  # a sum: the losses are already scaled
        module.set_force_sum_reduction_for_comms(True)
        sent[-1].attach(module)
    return sent


def _placement(ranks: int, parameter: nn.Parameter) -> Shard:
    return Shard(shard_dim(tuple(parameter.shape), ranks))


def materialize(stages: Sequence[nn.Module], device: torch.device, initial: Callable[[str], Tensor]) -> None:
    """Gives memory and initial weights to the parameters that `shard` has divided. initial: this rank's rows of one."""
    for stage in stages:
        private.give_memory(stage, device)
        for name, parameter in stage.named_parameters():
            if isinstance(parameter, DTensor):
                rows(parameter).copy_(initial(name))


class Sharded(Replica):
    """ZeRO stage 1, 2 or 3 for modules that `shard` has divided and `materialize` has filled.

    The masters are FSDP2's rows, as plain tensors that share their memory. messages: what `shard` returned for these
    stages. sent: what they send in a step (`units.syncs`). defer: gradients add up whole on each rank, and are
    scattered once per step. again: weights are freed after forward, and gathered again for backward.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        parts: dict[str, Part],
        compute_dtype: torch.dtype,
        messages: Sequence[UnitMessages],
        sent: Sequence[Sync],
        pipeline: bool,
    ):
        self.again = any(one.what == "gather" and one.each == 2 for one in sent)
        self.defer, self.pipeline = all(one.each == 0 for one in sent if one.what == "scatter"), pipeline
        self.roots = [_unit(stage) for stage in stages]
        self.units = [unit for root in self.roots for unit in _units(root)]
        self.compute_dtype, self.messages = compute_dtype, messages
        self._params: dict[str, list[DTensor]] = {}  # two where stages share a parameter
        for name, parameter in (pair for stage in stages for pair in stage.named_parameters()):
            if isinstance(parameter, DTensor):  # others are not divided
                self._params.setdefault(name, []).append(parameter)
        for (
            first,
            *others,
        ) in self._params.values():  # a tied embedding, if a rank has the first and the last stage
            for parameter in others:
                private.share_memory(self.units, parameter, first)
        self.parts = {name: parts[name] for name in self._params}
        self.masters = {name: rows(same[0]) for name, same in self._params.items()}
        self.gradients: dict[str, Tensor] = {}
        for name, master in self.masters.items():
            kept = local_shape(self.parts[name].keeps)
            assert tuple(master.shape) == kept, f"{name}: FSDP2 holds {tuple(master.shape)}, not {kept}"
            if self.parts[name].frozen:  # as it computes: a layout without ZeRO keeps the same numbers
                master.copy_(master.to(compute_dtype))
        for root in self.roots:
            root.set_reshard_after_forward(self.again)
            root.set_reshard_after_backward(self.again)
        for stage in stages:
            _prefetch(stage)

    def start_step(self) -> None:
        """Forgets the gradients of the last step, and frees their memory."""
        self.gradients.clear()
        for name, same in self._params.items():
            self.masters[name].grad = None
            for parameter in same:
                parameter.grad = None
        for root in self.roots:
            root.set_requires_gradient_sync(not self.defer)
        for messages in self.messages:
            messages.last, messages.arrived = False, None

    def enable_sync(self) -> None:
        """Marks the next backward as the last of the step."""
        for root in self.roots:
            root.set_requires_gradient_sync(True)
        for messages in self.messages:
            messages.last = True

    def collect(self) -> None:
        """Takes gradients that were set outside of the module's backward: a pipeline's deferred weight gradients."""
        for unit in self.units:
            private.take_deferred_gradients(unit)

    def finish(self) -> None:
        """Collects the summed gradients. In a pipeline, some stages had their last backward before `enable_sync`; their
        gradients are scattered now."""
        if self.pipeline:
            self.enable_sync()
            for root in self.roots:
                private.end_backward(root)
        for messages in self.messages:
            messages.finish()
            assert messages.arrived is None, f"{messages.axis.purpose}: no gradients in the last microbatch"
        for name, same in self._params.items():
            if self.parts[name].frozen:
                continue
            found = [rows(p.grad) for p in same if isinstance(p.grad, DTensor)]
            self.gradients[name] = found[0] if found else torch.zeros_like(self.masters[name])
            for other in found[1:]:
                found[0].add_(other)

    def update(self, lr: float, scale: Tensor | None, skip: Tensor) -> None:
        self.updater.step(self.gradients, lr, scale, skip)
        self.updater.settle()  # the next forward gathers ahead
        self.refresh()

    def refresh(self) -> None:
        """Frees the gathered weights after the masters have changed; the next forward gathers them again."""
        for unit in self.units:
            unit.reshard()
        for messages in self.messages:
            if messages.gathers is not None:
                messages.gathers.forget()

    def kept(self) -> dict[str, list[Tensor]]:
        """Tensors by category; see `Replica.kept`. Gathered weights stay for the step, except under stage 3, which
        may keep a node's share of them (ZeRO++). Without a cast the rows compute themselves. Gradients are those that
        add up before they are summed."""
        adding = [messages.arrived for messages in self.messages if messages.arrived is not None]
        if self.defer:
            adding += [gradient for unit in self.units for gradient in private.whole_gradients(unit)]
        gathered = [tensor for unit in self.units for tensor in private.gathered(unit)]
        copies = [m.gathers.copy for m in self.messages if m.gathers and m.gathers.copy is not None]
        own = [master for master in self.masters.values() if self.compute_dtype == master.dtype]
        return {
            "params": own + copies + ([] if self.again else gathered),
            "buffers": gathered if self.again else [],
            "gradients": adding,
        }

    def watch(self, seen: Callable[[Tensor], None], names: set[str]) -> None:
        """Calls `seen` before each scatter, with the gradients of all parameters of a unit at once."""
        assert names == self.parts.keys(), "a unit cannot be seen in part"
        for messages in self.messages:
            messages.seen = seen


def rows(tensor: DTensor) -> Tensor:
    """This rank's rows, as a plain tensor that shares their memory."""
    with torch.no_grad():
        return tensor.to_local().detach()


def _unit(module: object) -> FSDPModule:
    assert isinstance(module, FSDPModule)
    return module


def _units(unit: FSDPModule) -> list[FSDPModule]:
    """The FSDP2 units inside a unit, itself first."""
    assert isinstance(unit, nn.Module)
    return [module for module in unit.modules() if isinstance(module, FSDPModule)]


def _prefetch(stage: nn.Module) -> None:
    """Gathers the weights of the next block while a block computes."""
    root = _unit(stage)
    inner = [n for n, module in stage.named_modules() if n and isinstance(module, FSDPModule)]
    outer = [n for n in inner if not any(n.startswith(f"{other}.") for other in inner)]
    blocks = [_unit(stage.get_submodule(name)) for name in outer]
    for before, after in pairwise([root, *blocks]):
        before.set_modules_to_forward_prefetch(_units(after))
    for before, after in pairwise([*blocks, root]):
        after.set_modules_to_backward_prefetch(_units(before))
    if next(stage.parameters()).device.type == "cpu":  # on GPUs, streams do it
        private.gather_in_background(root)
