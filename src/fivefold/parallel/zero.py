"""Shared states (ZeRO stages 1 to 3, arXiv 1910.02054), and hybrids of them with replicas, on PyTorch's FSDP2.

The ranks of a "shard" group divide the rows of every parameter (of few experts those of each: `sharding.shard_dim`):
each keeps the fp32 master weights, gradients and moments of its rows only. A block's weights are gathered, in the
compute dtype, when it is about to run; its gradients are summed and scattered to the rows' keepers when its backward is
done. The stages are one engine with two switches:

| Stage | weights, once gathered | gradients are scattered | Elements sent a step of m microbatches |
|---|---|---|---|
| 1 | stay until the optimizer's step | in the last microbatch (they add up whole until then) | 2 Psi |
| 2 | stay until the optimizer's step | in every microbatch | (1 + m) Psi |
| 3 | are freed after a block's forward, and gathered again for its backward | in every microbatch | 3 m Psi |

Psi is the number of parameters; a gather or a scatter of all of them counts Psi, as in the paper. In a hybrid, the
replicas add up their shards once a step, in fp32. In a pipeline, whose microbatches overlap and may leave weight
gradients for later, every stage scatters the gradients once a step, as stage 1 does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from fivefold.models import LanguageModel
from fivefold.models.moe import Experts
from fivefold.parallel.mesh import Mesh
from fivefold.sharding import Part, local_shape, shard_dim

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup


def shard(
    stage: LanguageModel, mesh: Mesh, compute_dtype: torch.dtype, reduce: torch.dtype = torch.float32
) -> None:
    """Divides the parameters of a module on "meta" between the ranks of the "shard" group: they become DTensors of
    which each rank has its rows. A block is a unit of communication; so is what the module has besides blocks."""
    names = ("replicate", "shard") if mesh.size("replicate") > 1 else ("shard",)
    shards = mesh.device_mesh(*names)
    whole = _shard_experts(stage, mesh, compute_dtype, reduce)
    for block in stage.blocks.values():
        _shard(block, shards, compute_dtype, reduce, whole)
    _shard(stage, shards, compute_dtype, reduce, whole)


def _shard_experts(
    stage: LanguageModel, mesh: Mesh, compute_dtype: torch.dtype, reduce: torch.dtype
) -> set[nn.Parameter]:
    """Experts that are divided between ranks are shared by fewer: those of "eshard". Returns their parameters where
    that is one rank, which keeps them whole."""
    if mesh.size("ep") == 1:
        return set()
    found = [module for module in stage.modules() if isinstance(module, Experts)]
    if mesh.size("eshard") == 1:
        return {parameter for module in found for parameter in module.parameters()}
    names = ("replicate", "eshard") if mesh.size("replicate") > 1 else ("eshard",)
    shards = mesh.device_mesh(*names)
    for module in found:
        _shard(module, shards, compute_dtype, reduce)
    return set()


def _shard(
    module: nn.Module,
    shards: DeviceMesh,
    compute_dtype: torch.dtype,
    reduce: torch.dtype,
    whole: set[nn.Parameter] | None = None,
) -> None:
    """whole: parameters of it that stay as they are."""
    # The inputs are not cast: the rotary table stays fp32.
    policy = MixedPrecisionPolicy(compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    fully_shard(
        module,
        mesh=shards,
        reshard_after_forward=True,
        shard_placement_fn=lambda parameter: Shard(shard_dim(tuple(parameter.shape), shards.size(-1))),
        mp_policy=policy,
        ignored_params=whole,
    )
    assert isinstance(module, FSDPModule)
    module.set_gradient_divide_factor(1.0)  # a sum: the loop has scaled the losses
    module.set_force_sum_reduction_for_comms(True)
    module.set_custom_reduce_scatter(ReduceScatter(reduce))  # pyright: ignore[reportArgumentType]


class ReduceScatter:
    """The sum over ranks of a fp32 tensor, of which each rank gets its part; sent in dtype `sent` (FSDP2's interface).

    gloo has no reduce-scatter of its own: its stand-in is an all-reduce, which sends twice as much. Here every rank
    sends each other one its part, and adds up what it receives, in the order of ranks, in fp32.
    """

    def __init__(self, sent: torch.dtype):
        self.sent = sent
        self.seen: Callable[[Tensor], None] | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> None:
        assert op == dist.ReduceOp.SUM, op
        assert not async_op
        if self.seen is not None:
            self.seen(input_tensor)
        given = input_tensor.to(self.sent)
        if given.is_cuda:
            part = output_tensor.to(self.sent)
            dist.reduce_scatter_single(part, given, group=group)
            output_tensor.copy_(part)
            return
        received = torch.empty_like(given)
        dist.all_to_all_single(received, given, group=group)
        torch.sum(received.view(group.size(), -1), 0, dtype=torch.float32, out=output_tensor)


class Sharded:
    """ZeRO stage 1, 2 or 3 (see `replica.Replica`) of modules that `shard` has divided and that have their values.

    The masters are the rows that FSDP2 holds, as plain tensors of the same memory. defer: gradients add up whole on
    each rank, and are scattered once a step.
    """

    def __init__(
        self, stages: Sequence[LanguageModel], parts: dict[str, Part], zero: int, pipeline: bool = False
    ):
        assert zero in (1, 2, 3), zero
        self.zero, self.defer, self.pipeline = zero, zero == 1 or pipeline, pipeline
        self.roots = [_unit(stage) for stage in stages]
        self.units = [unit for root in self.roots for unit in _units(root)]
        self._params: dict[str, list[DTensor]] = {}  # two where stages share one
        for name, parameter in (pair for stage in stages for pair in stage.named_parameters()):
            if isinstance(parameter, DTensor):  # others are not divided
                self._params.setdefault(name, []).append(parameter)
        for same in self._params.values():
            self._share(same)
        self.parts = {name: parts[name] for name in self._params}
        self.masters = {name: rows(same[0]) for name, same in self._params.items()}
        self.gradients: dict[str, Tensor] = {}
        for name, master in self.masters.items():
            kept = local_shape(self.parts[name].keeps)
            assert tuple(master.shape) == kept, f"{name}: FSDP2 holds {tuple(master.shape)}, not {kept}"
        for root in self.roots:
            root.set_reshard_after_forward(zero == 3)
            root.set_reshard_after_backward(zero == 3)
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
            root.set_requires_all_reduce(False)

    def arm(self) -> None:
        """The next backward is the last of the step."""
        for root in self.roots:
            root.set_requires_gradient_sync(True)

    def collect(self) -> None:
        """Takes gradients that no backward through the module has made: a pipeline's separate weight gradients."""
        for unit in self.units:
            for group in _groups(unit):
                for (
                    parameter
                ) in group.fsdp_params:  # norms have theirs in fp32 since I: FSDP2 wants one dtype
                    if hasattr(parameter, "_unsharded_param"):
                        parameter.accumulate_unsharded_grad_if_needed()
                        parameter.to_accumulated_grad_if_needed()
                group.post_backward()

    def finish(self) -> None:
        """Gradients are summed when backward is done, but for those of a pipeline's stages that had their last
        backward before `arm`; here they get their place."""
        if self.pipeline:
            self.arm()
            for root in self.roots:
                root._get_fsdp_state()._root_post_backward_final_callback()
        for name, same in self._params.items():
            found = [rows(p.grad) for p in same if isinstance(p.grad, DTensor)]
            self.gradients[name] = found[0] if found else torch.zeros_like(self.masters[name])
            for other in found[1:]:
                found[0].add_(other)

    def refresh(self) -> None:
        """The masters have changed: the next forward gathers them anew."""
        for unit in self.units:
            unit.reshard()

    def kept(self) -> dict[str, list[Tensor]]:
        """Gathered weights, which stay for the step but under stage 3; gradients that add up before they are summed."""
        groups = [group for unit in self.units for group in _groups(unit)]
        params = [parameter for group in groups for parameter in group.fsdp_params]
        gathered = [tensor for parameter in params for tensor in parameter.all_gather_outputs]
        adding = [group._partial_reduce_output for group in groups]
        if self.defer:
            adding += [parameter.unsharded_accumulated_grad for parameter in params]
            adding += [p._unsharded_param.grad for p in params if hasattr(p, "_unsharded_param")]
        return {
            "buffers" if self.zero == 3 else "params": gathered,
            "gradients": [gradient for gradient in adding if gradient is not None],
        }

    def watch(self, seen: Callable[[Tensor], None], names: set[str]) -> None:
        """Shows what is scattered: all parameters of a unit of communication at once."""
        assert names == self.parts.keys(), "a unit cannot be seen in part"
        for group in (group for unit in self.units for group in _groups(unit)):
            assert isinstance(group._reduce_scatter_comm, ReduceScatter)
            group._reduce_scatter_comm.seen = seen

    def _share(self, same: list[DTensor]) -> None:
        """Gives one memory to parameters that are one: a tied embedding, where a rank has the first and last stage."""
        owners = {id(p.sharded_param): p for unit in self.units for g in _groups(unit) for p in g.fsdp_params}
        for parameter in same[1:]:
            owners[id(parameter)]._sharded_param_data = owners[id(same[0])]._sharded_param_data
            parameter._local_tensor = same[0]._local_tensor

    def close(self) -> None:
        """Nothing: a module that was built divided is not used apart from this."""


def rows(tensor: DTensor) -> Tensor:
    """This rank's rows, as a plain tensor of the same memory."""
    with torch.no_grad():
        return tensor.to_local().detach()


def _unit(module: nn.Module) -> FSDPModule:
    assert isinstance(module, FSDPModule)
    return module


def _units(unit: FSDPModule) -> list[FSDPModule]:
    """The units of communication in one, itself the first."""
    assert isinstance(unit, nn.Module)
    return [module for module in unit.modules() if isinstance(module, FSDPModule)]


def _groups(unit: FSDPModule) -> list[FSDPParamGroup]:
    return unit._get_fsdp_state()._fsdp_param_groups


def _prefetch(stage: LanguageModel) -> None:
    """While a block computes, the weights of the one that comes next are on their way."""
    root, blocks = _unit(stage), [_unit(block) for block in stage.blocks.values()]
    for before, after in pairwise([root, *blocks]):
        before.set_modules_to_forward_prefetch(_units(after))
    for before, after in pairwise([*blocks, root]):
        after.set_modules_to_backward_prefetch(_units(before))
    if next(stage.parameters()).device.type == "cpu":  # on GPUs streams do it
        root._set_unshard_async_op(True)
