"""Tensor parallelism: each rank has some of the heads, of the feed-forward columns and of the vocabulary.

A column-parallel layer (rows of its weight: output features) reads whole activations and gives this rank's features; a
row-parallel layer reads them and gives a partial sum. Between them only a norm over all heads communicates (norm.py).
Forward has one sum behind attention and one behind the feed-forward; backward has as many (Shoeybi et al., arXiv
1909.08053). With `sp`, activations between the regions are cut along the sequence (Korthikanti et al., arXiv
2205.05198); see sequence.py.

All tensors are local, not DTensors. The cuts of the model's card say which part of a parameter a rank has, and the data
axes shard the rest as plain parameters.

Legend: B batch, T sequence, D input features, F output features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fivefold import kernels
from fivefold.comm import Started
from fivefold.kernels.rounded import RoundedMatmuls
from fivefold.models.base import LanguageModel
from fivefold.models.layers import (
    AttentionCore,
    Embedding,
    Output,
    Positions,
    RegionInput,
    RegionOutput,
    WideRMSNorm,
)
from fivefold.models.mixture import Mixture
from fivefold.parallel.deferred import Deferred, weight_gradient
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.norm import CutRMSNorm
from fivefold.parallel.replica import Replica
from fivefold.parallel.sequence import Enter, Leave, TensorAxis, Whole, piece
from fivefold.parallel.vocabulary import VocabularyEmbedding, VocabularyOutput
from fivefold.spread.parts import Model, boxes, cuts_in, local_shape, parts, summed_over_tp


def apply(stage: nn.Module, mesh: Mesh, card: Model) -> list[str]:
    """Shards a model over the tensor axis, in place. On "meta" it stays there; a user's module keeps its values.

    Returns the names of parameters that are whole on every rank but have partial gradients, from this rank's heads or,
    with sp, from its piece of the sequence.
    """
    sp, regather = mesh.layout.sp, mesh.layout.sp_regather
    axis = TensorAxis(mesh.axis("tp"), sp, regather=regather)
    assert axis.size > 1, "one rank needs no tensor parallelism"
    cuts = {name: cuts_in(cut, sp) for name, cut in card.cuts.items()}
    table = {name: cut for name, some in cuts.items() for cut in some if cut.axis == "tp"}
    mixtures = tuple(f"{name}." for name, module in stage.named_modules() if isinstance(module, Mixture))
    for name, module in list(stage.named_modules()):
        if name.startswith(mixtures):  # a region of its own
            if not sp and isinstance(module, RegionInput | RegionOutput):
                kind = EnterRegion if isinstance(module, RegionInput) else LeaveRegion
                stage.set_submodule(name, kind(axis))
            continue
        cut = table.get(f"{name}.weight")
        if isinstance(module, AttentionCore):
            module.heads, module.kv_heads = module.heads // axis.size, module.kv_heads // axis.size
        elif isinstance(module, nn.Embedding) and cut is not None and cut.kind == "vocab":
            stage.set_submodule(name, VocabularyEmbedding(module, axis))
        elif isinstance(module, Positions) and sp:
            stage.set_submodule(name, PiecePositions(module, axis))
        elif isinstance(module, WideRMSNorm) and cut is not None:
            stage.set_submodule(name, CutRMSNorm(module, axis.axis))
        elif isinstance(module, RegionInput):
            stage.set_submodule(name, EnterRegion(axis))
        elif isinstance(module, nn.Linear) and cut is not None and cut.kind in ("column", "row"):
            kind = ColumnLinear if cut.kind == "column" else RowLinear
            stage.set_submodule(name, kind(module, replace(axis, ordered=_attends(stage, name))))
    if any(cut.kind == "vocab" for cut in table.values()):
        assert isinstance(stage, LanguageModel)
        if sp and stage.last:
            _gather_before(stage, card.whole_sequences, axis)
        assert type(stage.output) is Output, "replaced before"
        stage.output = VocabularyOutput(replace(axis, sp=sp and not card.whole_sequences))
    _cut_parameters(
        stage, {n: p.computes for n, p in parts(card, mesh.layout, mesh.rank).items() if n in table}
    )
    if mesh.device.type == "cuda":
        _compile_around(stage)
    return summed_over_tp(card, mesh.layout, [name for name, _ in stage.named_parameters()])


def _attends(stage: nn.Module, name: str) -> bool:
    """True for a linear layer of attention, also inside another module there: it needs the tokens in order."""
    while name:
        name = name.rpartition(".")[0]
        if any(isinstance(child, AttentionCore) for child in stage.get_submodule(name).children()):
            return True
    return False


def _gather_before(stage: LanguageModel, whole_sequences: tuple[str, ...], axis: TensorAxis) -> None:
    """Gathers the sequence before the first module that computes with whole sequences."""
    if whole_sequences:
        first = stage.get_submodule(whole_sequences[0].removesuffix("."))
        first.register_forward_pre_hook(lambda _, inputs: (Whole.apply(inputs[0], axis), *inputs[1:]))


def _cut_parameters(stage: nn.Module, computes: dict[str, Any]) -> None:
    """Replaces parameters by this rank's part of them."""
    for name, whole in list(stage.named_parameters()):
        if name in computes:
            owner, _, leaf = name.rpartition(".")
            local = torch.empty(local_shape(computes[name]), dtype=whole.dtype, device=whole.device)
            if not local.is_meta:
                for where, box in boxes(computes[name]):
                    local[where] = whole.detach()[tuple(slice(*span) for span in box)]
            setattr(stage.get_submodule(owner), leaf, nn.Parameter(local))


def _compile_around(stage: nn.Module) -> None:
    """Excludes the layers that communicate from compilation; the code between them is compiled."""
    for module in stage.modules():
        if isinstance(module, CutLinear | CutRMSNorm | EnterRegion | LeaveRegion):
            as_it_is: Any = torch.compiler.disable(module.forward)
            module.forward = as_it_is


def sum_gradients(replicas: Sequence[Replica], messages: list[list[str]], mesh: Mesh) -> Callable[[], None]:
    """Returns the reduction over the tensor axis for the messages of `units.tensor_sums`."""

    def reduction() -> None:
        axis, gradients = mesh.axis("tp"), {n: g for r in replicas for n, g in r.gradients.items()}
        started: list[tuple[Started, list[Tensor]]] = []
        for names in messages:
            found = [gradients[name] for name in names]
            if sum(gradient.numel() for gradient in found):
                flat = (
                    found[0] if len(found) == 1 else torch.cat([gradient.reshape(-1) for gradient in found])
                )
                # Offloaded gradients come to the device for the sum: NCCL sends nothing else.
                started.append((axis.start_all_reduce(flat.to(mesh.device)), found))
        for wait, found in started:
            total = wait()
            if total is not found[0]:
                for gradient, part in zip(found, total.split([g.numel() for g in found]), strict=True):
                    gradient.copy_(part.view(gradient.shape))

    return reduction


class _Column(Function):
    """The input is kept whole; or with `regather` as a piece, which backward gathers while dx is computed."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, axis: TensorAxis, *more: Any
    ) -> Tensor:
        """more: the deferred weight gradients and how the layer rounds."""
        whole = axis.start_whole(x)()
        ctx.save_for_backward(x if axis.regather else whole)
        ctx.weight, ctx.axis, ctx.has_bias, (ctx.deferred, ctx.rounded) = weight, axis, bias is not None, more
        return kernels.linear(whole, weight, bias, ctx.rounded)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor):
        (x,), weight, axis, dy = ctx.saved_tensors, ctx.weight, ctx.axis, grads[0].contiguous()
        whole = axis.start_again(x)
        dx = kernels.input_gradient(dy, weight, ctx.rounded)
        x = whole()
        dx = axis.start_sum(dx)  # overlaps with the gradients that need no communication
        dweight = weight_gradient(ctx.deferred, weight, dy, x, ctx.rounded)
        dbias = dy.sum((0, 1)) if ctx.has_bias else None
        return dx(), dweight, dbias, None, None, None


class _Row(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, axis: TensorAxis, *more: Any
    ) -> Tensor:
        """more: as of `_Column`."""
        ctx.save_for_backward(x)
        ctx.weight, ctx.axis, ctx.has_bias, (ctx.deferred, ctx.rounded) = weight, axis, bias is not None, more
        y = axis.start_sum(kernels.linear(x, weight, None, ctx.rounded))()
        return y if bias is None else y.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor):
        (x,), weight, axis, dy = ctx.saved_tensors, ctx.weight, ctx.axis, grads[0].contiguous()
        dbias = dy.sum((0, 1)) if ctx.has_bias else None  # with sp, of this piece
        dy = axis.start_whole(dy)()
        dx = kernels.input_gradient(dy, weight, ctx.rounded)
        return dx, weight_gradient(ctx.deferred, weight, dy, x, ctx.rounded), dbias, None, None, None


class CutLinear(nn.Module):
    """A linear layer of which this rank has some features. function: computes it, and its gradients."""

    function: type[Function]

    def __init__(self, linear: nn.Linear, axis: TensorAxis):
        super().__init__()
        self.weight, self.bias, self.axis = linear.weight, linear.bias, axis
        self.rounded: RoundedMatmuls | None = getattr(linear, "rounded", None)
        self.deferred: Deferred | None = None  # set if a pipeline defers weight gradients

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(x, self.weight, self.bias, self.axis, self.deferred, self.rounded)


class ColumnLinear(CutLinear):
    """A linear layer with this rank's output features. x whole, or with sp a piece of the sequence -> (B, T, F/tp)."""

    function = _Column


class RowLinear(CutLinear):
    """A linear layer with this rank's input features. x (B, T, D/tp) -> the sum over ranks, whole (B, T, F) or with sp
    a piece of the sequence. The bias is added once, after the sum."""

    function = _Row


class EnterRegion(nn.Module):
    """Replaces `models.layers.RegionInput`. x whole, or with sp a piece of the sequence -> whole (B, T, D)."""

    def __init__(self, axis: TensorAxis):
        super().__init__()
        self.axis = axis

    def forward(self, x: Tensor) -> Tensor:
        return Enter.apply(x, self.axis)


class LeaveRegion(nn.Module):
    """Replaces `models.layers.RegionOutput`: the sum over ranks of x, which is overwritten."""

    def __init__(self, axis: TensorAxis):
        super().__init__()
        self.axis = axis

    def forward(self, x: Tensor) -> Tensor:
        return Leave.apply(x, self.axis)


class PiecePositions(nn.Module):
    """Learned positions of this rank's piece of the sequence: (T) -> (t, D), or (B, T) -> (B, t, D)."""

    def __init__(self, embedding: Embedding, axis: TensorAxis):
        super().__init__()
        self.weight, self.axis = embedding.weight, axis

    def forward(self, positions_T: Tensor) -> Tensor:
        return nn.functional.embedding(piece(positions_T, self.axis, -1), self.weight)
