"""Tensor parallelism: each rank has some of the heads, of the feed-forward columns and of the vocabulary.

A column-parallel layer (rows of its weight: output features) reads whole activations and gives this rank's features; a
row-parallel layer reads them and gives a partial sum. Between them nothing is communicated: one sum behind attention
and one behind the feed-forward in forward, as many in backward (Shoeybi et al., arXiv 1909.08053). With `sp` what lies
between the regions is cut along the sequence (Korthikanti et al., arXiv 2205.05198); see sequence.py.

Local tensors throughout: which part of a parameter a rank has is said by `sharding.cuts`, and the data axes shard what
is left as plain parameters.

Legend: B batch, T sequence, D input features, F output features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fivefold import kernels
from fivefold.models.layers import AttentionCore, Embedding, Linear, Output
from fivefold.models.model import LanguageModel
from fivefold.parallel.later import Later, weight_gradient
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.replica import Replica
from fivefold.parallel.sequence import TensorAxis, Whole, piece, start_gather
from fivefold.parallel.vocabulary import VocabularyEmbedding, VocabularyOutput
from fivefold.recipe.schema import ModelSection
from fivefold.sharding import cuts, local_shape, parts


def apply(stage: LanguageModel, mesh: Mesh, model: ModelSection, sp: bool) -> list[str]:
    """Divides a model that is on "meta" between the ranks of the tensor axis, in place.

    Returns the names of parameters that are whole on every rank while their gradients are partial sums, each from this
    rank's piece of the sequence: `sum_gradients` makes them whole. None without sp.
    """
    group = mesh.group("tp")
    assert group is not None, "one rank needs no tensor parallelism"
    axis = TensorAxis(group, mesh.size("tp"), mesh.index("tp"), sp)
    table = {name: cut for name, cut in cuts(model).items() if cut.axis == "tp"}
    for name, module in list(stage.named_modules()):
        cut = table.get(f"{name}.weight")
        if isinstance(module, AttentionCore):
            module.heads, module.kv_heads = module.heads // axis.size, module.kv_heads // axis.size
        elif isinstance(module, Embedding) and cut is not None:
            stage.set_submodule(name, VocabularyEmbedding(module, axis))
        elif isinstance(module, Linear) and cut is not None and cut.kind in ("column", "row"):
            kind = ColumnLinear if cut.kind == "column" else RowLinear
            attends = hasattr(stage.get_submodule(name.rpartition(".")[0]), "core")
            stage.set_submodule(name, kind(module, replace(axis, ordered=attends)))
    replicated = _outside_blocks(stage, axis)
    _cut_parameters(
        stage, {n: p.computes for n, p in parts(model, mesh.layout, mesh.rank).items() if n in table}
    )
    if mesh.device.type == "cuda":
        _compile_around(stage)
    return [n for n, _ in stage.named_parameters() if sp and n not in table and not n.startswith(replicated)]


def _outside_blocks(stage: LanguageModel, axis: TensorAxis) -> tuple[str, ...]:
    """Beginning and end of the model. Returns the prefixes of parameters that compute with whole activations."""
    output, replicated = axis, ()
    if axis.sp:
        positions, select = getattr(stage, "embed_positions", None), getattr(stage, "select", None)
        if positions is not None:
            stage.embed_positions = PiecePositions(positions, axis)
        if (
            select is not None
        ):  # BERT's head picks masked tokens, unevenly many in each piece: it works on the whole
            stage.select = WholeFirst(select, axis)
            output, replicated = (
                replace(axis, sp=False),
                ("transform.", "norm."),
            )
    assert type(stage.output) is Output, "replaced before"
    stage.output = VocabularyOutput(output)
    return replicated


def _cut_parameters(stage: nn.Module, computes: dict[str, Any]) -> None:
    """Parameters of this rank's shape, still on "meta"."""
    for name, whole in list(stage.named_parameters()):
        if name in computes:
            owner, _, leaf = name.rpartition(".")
            local = torch.empty(local_shape(computes[name]), dtype=whole.dtype, device="meta")
            setattr(stage.get_submodule(owner), leaf, nn.Parameter(local))


def _compile_around(stage: nn.Module) -> None:
    """The compiler leaves the layers that communicate as they are and compiles what lies between them."""
    for module in stage.modules():
        if isinstance(module, ColumnLinear | RowLinear):
            as_it_is: Any = torch.compiler.disable(module.forward)
            module.forward = as_it_is


def sum_gradients(replicas: Sequence[Replica], names: list[str], mesh: Mesh) -> Callable[[], None]:
    """The reduction of what `apply` returned: one all-reduce over the tensor axis of all these gradients."""

    def reduction() -> None:
        found = [r.gradients[name] for r in replicas for name in r.gradients if name in wanted]
        if not found:
            return
        flat = torch.cat([gradient.reshape(-1) for gradient in found])
        dist.all_reduce(flat, group=mesh.group("tp"))
        for gradient, total in zip(found, flat.split([g.numel() for g in found]), strict=True):
            gradient.copy_(total.view(gradient.shape))

    wanted = set(names)
    return reduction


class ColumnLinear(nn.Module):
    """This rank's output features. x whole, or with sp a piece of the sequence -> (B, T, F/tp)."""

    def __init__(self, linear: Linear, axis: TensorAxis):
        super().__init__()
        self.weight, self.bias, self.axis = linear.weight, linear.bias, axis
        self.later: Later | None = None  # set where a pipeline computes weight gradients apart

    def forward(self, x: Tensor) -> Tensor:
        return _Column.apply(x, self.weight, self.bias, self.axis, self.later)


class RowLinear(nn.Module):
    """This rank's input features. x (B, T, D/tp) -> the sum over ranks, whole (B, T, F) or with sp a piece of the
    sequence. The bias is added once, behind the sum."""

    def __init__(self, linear: Linear, axis: TensorAxis):
        super().__init__()
        self.weight, self.bias, self.axis = linear.weight, linear.bias, axis
        self.later: Later | None = None  # set where a pipeline computes weight gradients apart

    def forward(self, x: Tensor) -> Tensor:
        return _Row.apply(x, self.weight, self.bias, self.axis, self.later)


class _Column(Function):
    """With sp it is the piece that is kept for backward, and gathered again there while dx is computed."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, axis: TensorAxis, later: Later | None
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.axis, ctx.has_bias, ctx.later = weight, axis, bias is not None, later
        return kernels.linear(start_gather(x, axis)() if axis.sp else x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor):
        (x,), weight, axis, dy = ctx.saved_tensors, ctx.weight, ctx.axis, grads[0].contiguous()
        whole = start_gather(x, axis) if axis.sp else lambda: x
        dx = kernels.linear(dy, weight.t())
        x = whole()
        dx = axis.start_sum(dx)  # while it runs, the gradients that need no communication
        dweight = weight_gradient(ctx.later, weight, dy, x)
        dbias = dy.sum((0, 1)) if ctx.has_bias else None
        return dx(), dweight, dbias, None, None


class _Row(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, axis: TensorAxis, later: Later | None
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.axis, ctx.has_bias, ctx.later = weight, axis, bias is not None, later
        y = axis.start_sum(kernels.linear(x, weight))()
        return y if bias is None else y.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor):
        (x,), weight, axis, dy = ctx.saved_tensors, ctx.weight, ctx.axis, grads[0].contiguous()
        dbias = dy.sum((0, 1)) if ctx.has_bias else None  # with sp of this piece
        if axis.sp:
            dy = start_gather(dy, axis)()
        return kernels.linear(dy, weight.t()), weight_gradient(ctx.later, weight, dy, x), dbias, None, None


class PiecePositions(nn.Module):
    """Learned positions of this rank's piece of the sequence: (T) -> (t, D)."""

    def __init__(self, embedding: Embedding, axis: TensorAxis):
        super().__init__()
        self.weight, self.axis = embedding.weight, axis

    def forward(self, positions_T: Tensor) -> Tensor:
        return nn.functional.embedding(piece(positions_T, self.axis, 0), self.weight)


class WholeFirst(nn.Module):
    """Gathers the sequence before another module sees it."""

    def __init__(self, inner: nn.Module, axis: TensorAxis):
        super().__init__()
        self.inner, self.axis = inner, axis

    def forward(self, x_BtD: Tensor, targets_BT: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return self.inner(Whole.apply(x_BtD, self.axis), targets_BT)
