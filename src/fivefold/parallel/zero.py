"""Sharded states (ZeRO stages 1 to 3, arXiv 1910.02054), and hybrids of them with replicas, on PyTorch's FSDP2.

The ranks of a "shard" group divide the rows of every parameter (for few experts, the rows of each: `parts.shard_dim`).
Each rank keeps the master weights, gradients and moments of its rows only, in fp32 in most modes (`precision`).
A block's weights are gathered, in the compute dtype or in 8 bits, before it runs. After its backward, its gradients
are summed and scattered to the owners of the rows. The stages are one engine with two switches:

| Stage | gathered weights | gradients are scattered | Elements sent per step of m microbatches |
|---|---|---|---|
| 1 | stay until the optimizer's step | in the last microbatch (they add up whole until then) | 2 Psi |
| 2 | stay until the optimizer's step | in every microbatch | (1 + m) Psi |
| 3 | are freed after a block's forward, and gathered again for its backward | in every microbatch | 3 m Psi |

Psi is the number of parameters; a gather or a scatter of all of them counts Psi, as in the paper. In a hybrid, the
replicas sum their shards once per step, in fp32. In a pipeline, every stage scatters as stage 1 (`scattered_once`).

FSDP2's units send their messages over our axes, by the library or by schedules (`layout.all_gather`,
`layout.reduce_scatter`). ZeRO++ (arXiv 2306.10209) sends fewer bytes of ZeRO 3 between nodes. A
unit's weights are gathered in two messages: across the nodes, between ranks with the same place on each; then inside
each node. Gradients go the opposite way. `layout.zeropp` says what else:

- weights (qwZ): a rank's weights travel as int8, encoded once. All ranks, their owner too, compute with what is
  decoded.
- hier (hpZ): what the message across has brought is a share of all weights, and a node's ranks together have them once.
  Each rank keeps its share until the weights change, so all later gathers stay inside the node.
- gradients (qgZ): ranks exchange encoded gradients inside the node and sum them in fp32, then do the same across. So
  each gradient is encoded twice, whatever the number of ranks. What a rank keeps for itself is never encoded.

Legend: p ranks on each of k nodes share a unit; S elements of a rank's share; R the same as sent, in bytes or elements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from fivefold.comm import Axis, Started
from fivefold.kernels import private
from fivefold.kernels.fp8 import NarrowRows
from fivefold.kernels.rounded import Quantizer, matrices
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.replica import Replica
from fivefold.precision.fp8 import TENSOR
from fivefold.schedules.collectives.registry import LIBRARY
from fivefold.schedules.compression import Blocks
from fivefold.sharding.parts import Part, local_shape, shard_dim
from fivefold.sharding.units import FsdpUnit, ZeroPP, syncs, zeropp


def shard(
    stage: nn.Module,
    units: Sequence[FsdpUnit],
    mesh: Mesh,
    compute_dtype: torch.dtype,
    reduce: torch.dtype = torch.float32,
    away: bool = False,
    summed: torch.dtype | None = None,
) -> list[UnitMessages]:
    """Shards the parameters of a stage on "meta": those of its units become DTensors, and each rank has its rows of
    them. Parameters that are in no unit stay unchanged. away: masters lie elsewhere, so the rows are those of weights
    that compute. summed: the dtype of gradients; None: the masters'. Returns the messages of each unit."""
    divided = {name for unit in units for name in unit.names}
    whole, sent = {p for name, p in stage.named_parameters() if name not in divided}, []
    for unit in units:
        module = stage.get_submodule(unit.module)
        here = {p for p in module.parameters() if not isinstance(p, DTensor)} - whole
        assert here == {stage.get_parameter(name) for name in unit.names}, (
            f"{unit.module or 'the stage'} has others"
        )
        (masters,) = {p.dtype for p in here} or {torch.float32}  # a stage may have nothing but its blocks
        for p in here if away else ():
            p.data = p.data.to(compute_dtype)
        sent.append(UnitMessages(mesh, unit, reduce))
        # The inputs are not cast: the rotary table stays fp32.
        ranks = mesh.size(unit.group)
        policy = MixedPrecisionPolicy(compute_dtype, summed or masters, cast_forward_inputs=False)
        fully_shard(
            module,
            mesh=mesh.device_mesh(unit.group),
            reshard_after_forward=True,
            shard_placement_fn=lambda p, ranks=ranks: Shard(shard_dim(tuple(p.shape), ranks)),
            mp_policy=policy,
            ignored_params=whole,
        )
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)  # a sum: the losses are already scaled
        module.set_force_sum_reduction_for_comms(True)
        sent[-1].attach(module)
    return sent


class Sharded(Replica):
    """ZeRO stage 1, 2 or 3 for modules that `shard` has divided.

    The masters are FSDP2's rows, as plain tensors that share their memory. messages: what `shard` returned for these
    stages. defer: gradients add up whole on each rank, and are scattered once per step. again: weights are freed after
    forward, and gathered again for backward. layers: those that round weights, by their names.
    initial: this rank's rows of a parameter, which gets memory and these values; None: it has them. summed: as in
    `shard`.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        parts: dict[str, Part],
        compute_dtype: torch.dtype,
        messages: Sequence[UnitMessages],
        initial: Callable[[str], Tensor] | None,
        summed: torch.dtype | None = None,
        layers: Mapping[str, Any] | None = None,
    ):
        mesh = messages[0].mesh
        sent, self.pipeline = syncs(mesh.layout), mesh.layout.pp > 1
        self.again = any(sync.what == "gather" and sync.each == 2 for sync in sent)
        self.defer = all(sync.each == 0 for sync in sent if sync.what == "scatter")
        self.roots = [_units(stage)[0] for stage in stages]
        self.units = [unit for stage in stages for unit in _units(stage)]
        self.compute_dtype, self.messages, self.summed = compute_dtype, messages, summed
        for stage in stages if initial is not None else ():
            private.give_memory(stage, mesh.device)
        self._params: dict[str, list[DTensor]] = {}  # two where stages share a parameter
        for name, parameter in (pair for stage in stages for pair in stage.named_parameters()):
            if isinstance(parameter, DTensor):  # others are not divided
                self._params.setdefault(name, []).append(parameter)
                if initial is not None:
                    rows(parameter).copy_(initial(name))
        for first, *others in self._params.values():
            for parameter in others:  # a tied embedding, if a rank has the first and the last stage
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
        for stage in stages:  # while a block computes, the weights of the next one are gathered
            named = [(n, unit) for n, unit in stage.named_modules() if isinstance(unit, FSDPModule)]
            (_, root), *inner = named
            blocks = [unit for n, unit in inner if not any(n.startswith(f"{other}.") for other, _ in inner)]
            for before, after in pairwise([root, *blocks]):
                before.set_modules_to_forward_prefetch(_units(after))
            for _, unit in inner:  # itself: else what ran before it, in pipelines of another microbatch
                unit.set_modules_to_backward_prefetch([unit])
            for before, after in pairwise([*blocks, root]):
                after.set_modules_to_backward_prefetch(_units(before))
            if next(stage.parameters()).device.type == "cpu":  # on GPUs, streams do it
                private.gather_in_background(root)
            if summed is not None:
                private.keep_sums(_units(root), summed)
        self.layers, self._largest = layers or {}, dict[str, Tensor]()
        self.narrow()

    def narrow(self) -> None:
        """Lets the weights that layers round be gathered in 8 bits, where scales allow it."""
        rounds = {n: one for n, one in self.layers.items() if one.rounded}
        rounded = {f"{name}.{matrix}" for name, layer in rounds.items() for matrix in matrices(layer)}
        scaling = next((getattr(layer.rounded, "scaling", "") for layer in rounds.values()), "")
        width, self.agreed = self.compute_dtype.itemsize, list[str]()
        names = {id(parameter): name for name, same in self._params.items() for parameter in same}
        for messages in self.messages if self.layers else ():
            table, order = messages.table, [names[id(p)] for p, _ in private.rows(messages.module)]
            tiles = table.narrow(scaling, rounded, messages.mesh.layout)
            shapes, R = dict(zip(table.names, table.pieces, strict=True)), round(table.message(tiles, width))
            pieces = [(name, shapes[name], tiles.get(name)) for name in order]
            messages.code = NarrowRows(pieces, R, width) if tiles else None
            messages.largest = self.largest
            self.agreed += tiles if scaling == TENSOR else ()

    def largest(self) -> Mapping[str, Tensor]:
        """The largest number (fp32) of each matrix that has one scale. The ranks that divide its rows agree on it when
        they first gather weights after these have changed."""
        if self.agreed and not self._largest:
            rows = (self.masters[name] for name in self.agreed)
            mine = torch.stack([x.abs().amax() if x.numel() else x.new_zeros(()) for x in rows])
            axis = self.messages[0].mesh.axis("shard").for_purpose("scales")
            most = axis.all_reduce(mine.to(self.compute_dtype).float(), "max")
            self._largest = dict(zip(self.agreed, most, strict=True))
        return self._largest

    def start_step(self) -> None:
        """Forgets the gradients of the last step, and frees their memory."""
        self.gradients.clear()
        self.forget_rows()

    def forget_rows(self) -> None:
        for name, same in self._params.items():
            self.masters[name].grad = None
            for parameter in same:
                parameter.grad = None
        for root in self.roots:
            root.set_requires_gradient_sync(not self.defer)
        for messages in self.messages:
            messages.last, messages.arrived = False, None

    def enable_sync(self) -> None:
        for root in self.roots:
            root.set_requires_gradient_sync(True)
        for messages in self.messages:
            messages.last = True

    def collect(self) -> None:
        for unit in self.units:
            private.take_deferred_gradients(unit)

    def finish(self) -> None:
        """Collects the summed gradients."""
        self.scatter_rest()
        for messages in self.messages:
            messages.finish()
            assert messages.arrived is None, f"{messages.axis.purpose}: no gradients in the last microbatch"
        lacking = list[str]()
        for name, same in self._params.items():
            if self.parts[name].frozen:
                continue
            found = [rows(p.grad) for p in same if isinstance(p.grad, DTensor)]
            if not found:
                lacking.append(name)
                found = [torch.zeros_like(self.masters[name], dtype=self.summed)]
            self.gradients[name] = found[0]
            for other in found[1:]:
                found[0].add_(other)
        self.allow_zeros(lacking)

    def scatter_rest(self) -> None:
        """In a pipeline, some stages had their last backward before `enable_sync`: scatters their gradients."""
        if self.pipeline:
            self.enable_sync()
            for root in self.roots:
                private.end_backward(root)

    def update(self, lr: float, scale: Tensor | None, skip: Tensor) -> None:
        self.updater.step(self.gradients, lr, scale, skip)
        self.updater.settle()  # the next forward gathers ahead
        self.forget_gathered()

    def refresh(self) -> None:
        self.narrow()
        self.forget_gathered()

    def forget_gathered(self) -> None:
        """Frees the gathered weights after the masters have changed; the next forward gathers them again."""
        self._largest = {}
        for unit in self.units:
            unit.reshard()
        for messages in self.messages:
            if messages.gathers is not None:
                messages.gathers.copy = None

    def kept(self) -> dict[str, list[Tensor]]:
        """Gathered weights stay for the step, except under stage 3, which may keep a node's share of them (ZeRO++).
        Without a cast the rows compute themselves. Gradients are those that add up before they are summed."""
        adding = [messages.arrived for messages in self.messages if messages.arrived is not None]
        by = (one for messages in self.messages for one in (messages.gathered, messages.scattered))
        scratch = {id(x): x for scheduled in by for x in scheduled.scratch.kept()}  # which units share
        if self.defer:
            adding += [gradient for unit in self.units for gradient in private.whole_gradients(unit)]
        gathered = [tensor for unit in self.units for tensor in private.gathered(unit)]
        copies = [m.gathers.copy for m in self.messages if m.gathers and m.gathers.copy is not None]
        rows = self.masters if self.working is None else self.working
        own = [weight for weight in rows.values() if self.compute_dtype == weight.dtype]
        return {
            "params": own + copies + ([] if self.again else gathered),
            "buffers": [*scratch.values(), *(gathered if self.again else [])],
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


def _units(module: Any) -> list[FSDPModule]:
    """The FSDP2 units of a module, itself first if it is one."""
    return [unit for unit in module.modules() if isinstance(unit, FSDPModule)]


class UnitMessages:
    """The messages of one unit. sent: dtype of gradient messages. gathers, scatters: those of ZeRO++,
    which take the place of the axis' own. code, largest: of weights that are gathered in 8 bits (`Sharded.narrow`).
    taken: called with the rows that a scatter has brought, before FSDP2 gets them, if they leave the device
    (offload/rows.py).

    In a hybrid the replicas sum their gradients once per step: in the `last` microbatch, together with the gradients
    that earlier microbatches have scattered (stages 2 and 3). FSDP2 adds these up in the buffer that `arrived` first;
    the gradients of the rows are views of it.
    """

    gathers: Gathers | None = None
    scatters: Scatters | None = None
    code: NarrowRows | None = None
    largest: Callable[[], Mapping[str, Tensor]]
    taken: Callable[[Tensor], None] | None = None

    def __init__(self, mesh: Mesh, unit: FsdpUnit, sent: torch.dtype):
        self.name = name = unit.module or "outside of blocks"
        self.axis, self.replicas = (mesh.axis(n).of_unit(name) for n in (unit.group, "replicate"))
        self.mesh, self.table, self.sent, self.last = mesh, unit, sent, True
        self.sums = mesh.sums("replicate")
        self.gathered = mesh.scheduled("all_gather", unit.group)
        self.scattered = mesh.scheduled("reduce_scatter", unit.group)
        self.seen: Callable[[Tensor], None] | None = None
        self.arrived: Tensor | None = None
        self._summing: Started | None = None

    def attach(self, module: FSDPModule) -> None:
        """Makes FSDP2 send the messages of a unit through this object."""
        self.module = module
        shares = [size for _, size in private.rows(module)]
        plus = zeropp(self.mesh.layout.zeropp)
        assert sorted(shares) == sorted(self.table.shares), f"{self.name}: FSDP2 sends {shares}"
        if plus.two_gathers:
            self.gathers = Gathers(plus, self.mesh, self.name, shares)
        if plus.gradients:
            self.scatters = Scatters(plus, self.mesh, self.name, shares)
        module.set_custom_all_gather(_Collective(self.gather))  # pyright: ignore[reportArgumentType]
        module.set_custom_reduce_scatter(_Collective(self.scatter))  # pyright: ignore[reportArgumentType]
        if self.replicas.size > 1:
            module.set_all_reduce_hook(self.sum_replicas)

    def gather(
        self, output_tensor: Tensor, input_tensor: Tensor, group: object, async_op: bool = False
    ) -> _Waits | None:
        """FSDP2's all-gather of a unit's weights."""
        if self.gathers is not None:
            finish = self.gathers.start(input_tensor, output_tensor)
        elif (code := self.code) is not None:
            sent, ranks = code.encode(input_tensor, self.largest()), self.axis.size
            arrived = self._gather(sent, sent.new_empty(ranks * code.R))
            finish = lambda: code.decode(arrived().view(ranks, -1), output_tensor.view(ranks, -1))  # noqa: E731
        else:
            finish = self._gather(input_tensor, output_tensor)
        if async_op:
            return _Waits(finish)
        finish()
        return None

    def _gather(self, x: Tensor, out: Tensor) -> Started:
        """Starts to gather every rank's x by the layout's algorithm."""
        if self.gathered.name != LIBRARY:
            return self.gathered.start(x, self.axis.purpose, out)
        return self.axis.start_all_gather(x, out)

    def scatter(self, output_tensor: Tensor, input_tensor: Tensor, group: object, op: object) -> None:
        """FSDP2's reduce-scatter of a unit's gradients."""
        assert op == dist.ReduceOp.SUM, op
        if self.seen is not None:
            self.seen(input_tensor)
        if self.scatters is not None:
            self.scatters.sum(input_tensor, output_tensor)
        elif self.scattered.name != LIBRARY:
            self.scattered.start(input_tensor.to(self.sent), self.axis.purpose, output_tensor)()
        else:
            self.axis.sum_scatter(input_tensor, output_tensor, self.sent)
        if self.taken is not None and self.replicas.size == 1:
            self.taken(output_tensor)

    def sum_replicas(self, rows: Tensor) -> None:
        """Sums a microbatch's gradients over replicas. rows: flat; FSDP2 is about to add them to the gradients of
        earlier microbatches. On GPUs it has allocated them on its scatter stream and calls this on another one, so the
        allocator is told who else reads them."""
        for gradients in (rows, self.arrived):
            if gradients is not None and gradients.is_cuda:
                gradients.record_stream(torch.cuda.current_stream())
        if self.taken is not None:
            self.taken(rows)
            return
        if not self.last:
            self.arrived = rows if self.arrived is None else self.arrived
            return
        if self.arrived is not None:
            rows += self.arrived
            self.arrived = None
            private.forget_gradients(self.module)
        self.finish()
        self._summing = self.sums.start(rows, self.replicas.purpose)
        if rows.is_cuda:  # FSDP2 called this on a stream, which waits instead of the host
            self.finish()

    def finish(self) -> None:
        """Waits for the sum over replicas. On CPUs it overlaps with the rest of backward: gradients are views of the
        rows, and nobody reads them before."""
        if self._summing is not None:
            self._summing()
            self._summing = None


class _Collective:
    """What FSDP2 calls in place of a collective of its own, and asks for buffers."""

    def __init__(self, send: Callable[..., object]):
        self.send = send

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, **given: Any) -> Any:
        return self.send(**given)


class _Waits(dist.Work):
    """Wraps a started message as a `Work` that FSDP2 can wait for."""

    def __init__(self, started: Callable[[], object]):
        super().__init__()
        self.started = started

    def wait(self, timeout: Any = None) -> bool:
        self.started()
        return True


class Gathers:
    """ZeRO++'s weight gathers of one unit. shares: elements of each of its parameters on a rank. copy: of `hier`, until
    the weights change."""

    def __init__(self, plus: ZeroPP, mesh: Mesh, unit: str, shares: Sequence[int]):
        self.inside, self.across = (mesh.axis(name).of_unit(unit) for name in ("inside", "across"))
        self.hier, self.code = plus.hier and self.across.size > 1, _quantizer(plus.weights, shares, mesh)
        self.copy: Tensor | None = None

    def start(self, mine: Tensor, out: Tensor) -> Callable[[], object]:
        """Starts to gather every rank's `mine` (S) into `out` (k p S); returns what finishes it. The first message is
        under way meanwhile."""
        if self.copy is not None:
            everyone = self.inside.start_all_gather(self.copy)
            return lambda: self._place(everyone(), out)
        first = self.across.start_all_gather(self.code.encoded(mine[None])[0] if self.code else mine)

        def finish() -> None:
            share = first()  # (k R)
            if self.hier:
                self.copy = share
            self._place(self.inside.all_gather(share), out)

        return finish

    def _place(self, gathered: Tensor, out: Tensor) -> None:
        """Puts what the node's ranks have of all nodes (p k R) in the order of ranks (k p S)."""
        k, p = self.across.size, self.inside.size
        gathered, out = gathered.view(p, k, -1), out.view(k, p, -1)
        if self.code is None:
            out.copy_(gathered.transpose(0, 1))
            return
        for place in range(p):
            self.code.decode(gathered[place], out[:, place])


class Scatters:
    """ZeRO++'s gradient sums of one unit."""

    def __init__(self, plus: ZeroPP, mesh: Mesh, unit: str, shares: Sequence[int]):
        self.inside, self.across = (mesh.axis(name).of_unit(unit) for name in ("inside", "across"))
        self.code = _quantizer(plus.gradients, shares, mesh)

    def sum(self, x: Tensor, out: Tensor) -> Tensor:
        """Sums every rank's x (k p S) and writes this rank's share into `out` (S). Both: fp32."""
        k, p = self.across.size, self.inside.size
        of_place = x.view(k, p, -1).transpose(0, 1)  # (p, k, S)
        mine = self._exchanged(of_place, self.inside)  # (k, S)
        return out.copy_(self._exchanged(mine[:, None], self.across)[0])

    def _exchanged(self, x: Tensor, axis: Axis) -> Tensor:
        """Sends x[i] (r, S) to rank i of the axis, and sums what all ranks have sent to this one, itself first."""
        total, others = x[axis.index].clone(), [rank for rank in range(axis.size) if rank != axis.index]
        if not others:
            return total
        assert self.code is not None
        sent = torch.empty(*x.shape[:2], self.code.R, dtype=torch.uint8, device=x.device)
        for rank in others:
            self.code.encode(x[rank], sent[rank])
        received = axis.all_to_all(sent)
        for rank in others:
            self.code.decode(received[rank], total, add=True)
        return total


def _quantizer(blocks: Blocks | None, shares: Sequence[int], mesh: Mesh) -> Quantizer | None:
    return blocks and Quantizer(blocks.bits, blocks.block, shares, mesh.device)
