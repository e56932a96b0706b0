"""The undocumented parts of PyTorch that comm and parallel use, and public ones with other names in other versions.
Where versions differ, the name that is there decides. Each comment says what breaks without it, and a test calls every
one (test_private, test_comm, test_membership): run them first when you upgrade torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

if TYPE_CHECKING:  # importing FSDP2 takes half a second
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.distributed.tensor import DTensor


def gloo_group(
    store: dist.Store, name: str, index: int, size: int, address: str, timeout_s: float
) -> dist.ProcessGroup:
    """A process group of gloo that does not belong to the launch's world: `size` processes that share a store. address:
    of this host, where gloo listens. Without it: replica groups cannot be launches of their own."""
    inside = dist.PrefixStore(name, store)
    options = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
    options._timeout = timedelta(seconds=timeout_s)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    backend = dist.ProcessGroupGloo(inside, index, size, options)
    backend._set_sequence_number_for_group()
    group, kind = dist.ProcessGroup(inside, index, size), dist.ProcessGroup.BackendType.GLOO
    group._set_default_backend(kind)
    group._register_backend(torch.device("cpu"), kind, backend)
    group._set_group_name(name)  # pyright: ignore[reportArgumentType]
    return group


def default_store() -> dist.Store:
    """The store in which the ranks of this launch have met. Without it: ranks of several hosts that hang would wait for
    gloo's time-out."""
    return dist.distributed_c10d._get_default_store()


def storage_of(x: Tensor) -> int:
    """A number of the tensor's storage while it lives, even of one without memory. Without it: `ops:norm` cannot tell a
    matmul's input from its weight among the tensors that autograd saves."""
    return x.untyped_storage()._cdata


def scaled_mm(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """a (M, K) @ b (K, N), both of 8 bits, times their scales, whose shapes say what shares one; summed in fp32.
    Without it: the public `torch.nn.functional.scaled_mm` multiplies no E5M2 by scales of blocks, and before PyTorch
    2.13 a compiled block breaks at it."""
    return torch._scaled_mm(a, b, a_scale, b_scale, out_dtype=dtype, use_fast_accum=False)


def scaled_grouped_mm(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, ends: Tensor, dtype: torch.dtype
) -> Tensor:
    """Rows a (M, K) in E groups that end at `ends` (int32), each @ its matrix of b (E, K, N), both E4M3, times the
    scales of rows (M) and columns (E, N); summed in fp32. Without it: all devices multiply experts in bf16."""
    return torch._scaled_grouped_mm(a, b, a_scale, b_scale, offs=ends, out_dtype=dtype, use_fast_accum=False)


def in_backward() -> bool:
    """True while autograd runs a backward in this thread. Without it: paged weights do not tell a recomputation from
    another microbatch's forward."""
    return torch._C._current_graph_task_id() != -1


def after_backward(call: Callable[[], None]) -> None:
    """Calls something at the end of the backward that autograd runs in this thread. Without it: weights of the block
    that a backward reaches last stay until their gradients are there, which a pipeline puts off."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def watched() -> bool:
    """True while a mode sees every operation of this thread, such as a trace. Without it: a trace would miss what a
    pipeline's pairs run on their second thread."""
    return _get_current_dispatch_mode() is not None


def give_memory(module: nn.Module, device: torch.device) -> None:
    """Gives memory to the parameters that FSDP2 has sharded; FSDP2 follows them. Without it: `to_empty`, which also
    gives memory to all other parameters."""
    from torch.distributed.tensor import DTensor

    module._apply(lambda t: torch.empty_like(t, device=device) if isinstance(t, DTensor) else t)


def groups(unit: FSDPModule) -> list[FSDPParamGroup]:
    """The parameter groups of a unit; none if all parameters belong to inner units. Without it: nothing else here."""
    state = unit._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    return [state._fsdp_param_group] if state._fsdp_param_group else []  # before torch 2.12: one at most


def rows(unit: FSDPModule) -> list[tuple[nn.Parameter, int]]:
    """Each parameter of a unit, as a DTensor, with the elements of its rows on a rank with padding, in the order of its
    messages. Without it a message says only which bytes it has, not of which parameters."""
    params = [p for group in groups(unit) for p in group.fsdp_params]
    return [(p.sharded_param, p.padded_sharded_param_size.numel()) for p in params]


def place(unit: FSDPModule, memory: Sequence[Tensor]) -> None:
    """Moves the rows of a unit's parameters, with padding, into flat tensors, in the order of `rows`. Without it:
    weights that leave the device cannot be read in one piece."""
    for p, flat in zip((p for group in groups(unit) for p in group.fsdp_params), memory, strict=True):
        parameter: Any = p.sharded_param
        local, dim = parameter._local_tensor, p.fsdp_placement.dim
        flat.copy_(p._sharded_param_data)
        p._sharded_param_data = flat
        placed = flat.view(p.padded_sharded_param_size).narrow(
            dim, 0, local.size(dim) if local.numel() else 0
        )
        parameter._local_tensor = placed


def around_gather(unit: FSDPModule, before: Callable[[bool], None], after: Callable[[], None]) -> None:
    """Calls `before`, told whether it is for a backward, when a unit begins to gather its weights, and `after` once its
    own rows are copied into the message. Without it: rows cannot leave the device."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    def around(group: FSDPParamGroup, unshard: Callable[[bool], None]) -> Any:
        def gather(async_op: bool = False) -> None:
            if group.is_unsharded or group._all_gather_result is not None:
                return
            backward = group._training_state == TrainingState.PRE_BACKWARD
            before(backward)
            unshard(async_op)
            if group.device.type == "cuda":
                copies, _ = group.comm_ctx.get_all_gather_streams(async_op, group._training_state)
                torch.cuda.current_stream().wait_stream(copies)
            after()

        return gather

    for group in groups(unit):
        group.unshard = around(group, group.unshard)


def begin(root: FSDPModule) -> None:
    """Lets FSDP2 look at its parameters now. Without it: it does so in the first forward, when rows may have left."""
    root._get_fsdp_state()._lazy_init()


def gathered(unit: FSDPModule) -> list[Tensor]:
    """The gathered weights, while they exist. Without it: the tracker counts them as activations."""
    return [tensor for group in groups(unit) for p in group.fsdp_params for tensor in p.all_gather_outputs]


def whole_gradients(unit: FSDPModule) -> list[Tensor]:
    """Gradients that add up before they are scattered. Without it: the tracker counts them as activations."""
    found = []
    for parameter in (p for group in groups(unit) for p in group.fsdp_params):
        found.append(parameter.unsharded_accumulated_grad)
        if hasattr(parameter, "_unsharded_param"):
            found.append(parameter._unsharded_param.grad)
    # since torch 2.15 both are one tensor
    return list({id(gradient): gradient for gradient in found if gradient is not None}.values())


def take_deferred_gradients(unit: FSDPModule) -> None:
    """Adds up gradients that were set outside of the module's backward, and scatters them if they are due. Without it:
    no ZeRO in pipelines that split backward."""
    for group in groups(unit):
        for parameter in group.fsdp_params:  # norms have fp32 gradients since I: FSDP2 wants one dtype
            if hasattr(parameter, "_unsharded_param") and hasattr(parameter, "to_accumulated_grad_if_needed"):
                parameter.accumulate_unsharded_grad_if_needed()
                parameter.to_accumulated_grad_if_needed()  # torch 2.15 casts them itself
        group.post_backward()


def end_backward(root: FSDPModule) -> None:
    """Scatters the gradients that are due and waits for them, as at the end of a backward. Without it: no ZeRO in
    pipelines."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    begin(root)  # a stage without microbatches had no forward
    state = root._get_fsdp_state()
    context = state._state_ctx
    module: Any = root
    for unit in module.modules():  # it passes over one that a deferred gradient left behind its backward
        for group in groups(unit) if isinstance(unit, FSDPModule) else ():
            group._training_state = TrainingState.IDLE
    if hasattr(context, "manual_backward_finalization_active"):  # torch 2.15 asks who ends a backward
        context.manual_backward_finalization_active = False  # pyright: ignore[reportAttributeAccessIssue]
    state._root_post_backward_final_callback()


def forget_gradients(unit: FSDPModule) -> None:
    """Drops the gradients of a unit's rows: the next scatter replaces them. Without it: hybrids with stages 2
    and 3 sum over replicas in every microbatch."""
    for group in groups(unit):
        for parameter in group.fsdp_params:
            parameter.sharded_param.grad = None


def keep_sums(units: Sequence[FSDPModule], dtype: torch.dtype) -> None:
    """Leaves the gradients of rows in the dtype of their sums. units: the root first. Without it: FSDP2 rounds sums in
    fp32 to the dtype of bf16 masters."""
    begin(units[0])
    for group in (group for unit in units for group in groups(unit)):
        group._orig_dtype = dtype
        for parameter in group.fsdp_params:
            parameter.sharded_param.grad_dtype = None


def share_memory(units: Iterable[FSDPModule], parameter: DTensor, other: DTensor) -> None:
    """Makes the rows of a parameter share the memory of another's. Without it: no ZeRO where one rank has both stages
    of a tied embedding."""
    owners = {id(p.sharded_param): p for unit in units for group in groups(unit) for p in group.fsdp_params}
    owners[id(parameter)]._sharded_param_data = owners[id(other)]._sharded_param_data
    parameter._local_tensor = other._local_tensor


def gather_in_background(root: FSDPModule) -> None:
    """Overlaps weight gathers with computation on devices without streams. Without it: ZeRO on CPUs waits for them."""
    root._set_unshard_async_op(True)
