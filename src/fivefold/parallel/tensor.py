"""Tensor parallelism: each rank has some of the heads, of the feed-forward columns and of the vocabulary.

A column-parallel layer (rows of its weight: output features) reads whole activations and gives this rank's features; a
row-parallel layer reads them and gives a partial sum. Between them only a norm over all heads communicates.
Forward has one sum behind attention and one behind the feed-forward; backward has as many (Shoeybi et al., arXiv
1909.08053). With `sp`, activations between the regions are cut along the sequence (Korthikanti et al., arXiv
2205.05198); see autograd.py.

The embedding and the loss are sharded over the vocabulary. The loss never gathers logits: for each token a rank sends
its largest logit, its sum of exponentials and the target's logit, three numbers instead of V.

Legend: B batch, T sequence, N tokens, D input features or the model, F output features, V vocabulary, v = V/tp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from fivefold.comm import Axis, Started
from fivefold.kernels import cross_entropy, matmul
from fivefold.kernels.cross_entropy import cap_
from fivefold.kernels.matmul import assert_on_device, loss_and_gradient, mean_by_chunks
from fivefold.kernels.rounded import RoundedMatmuls
from fivefold.models.base import LanguageModel
from fivefold.models.layers import (
    Core,
    Embedding,
    Output,
    Positions,
    RegionInput,
    RegionOutput,
    WideRMSNorm,
)
from fivefold.models.mixture import Mixture
from fivefold.parallel import operators
from fivefold.parallel.autograd import (
    Deferred,
    Leave,
    LinearFunction,
    TensorAxis,
    enter,
    join,
    piece,
    sent,
    whole,
)
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.replica import Replica
from fivefold.sharding.parts import Model, boxes, cuts_in, local_shape, parts, summed_over_tp
from fivefold.sharding.units import LOSS_STATISTICS, SQUARES, STATISTICS


def apply(stage: nn.Module, mesh: Mesh, card: Model) -> list[str]:
    """Shards a model over the tensor axis, in place. On "meta" it stays there; a user's module keeps its values.

    Returns the names of parameters that are whole on every rank but have partial gradients, from this rank's heads or,
    with sp, from its piece of the sequence.
    """
    sp, regather = mesh.layout.sp, mesh.layout.sp_regather
    axis = TensorAxis(mesh.axis("tp"), sp, regather=regather)
    assert axis.size > 1, "one rank needs no tensor parallelism"
    operators.axes[axis.axis.key] = axis.axis
    cuts = {name: cuts_in(cut, sp) for name, cut in card.cuts.items()}
    table = {name: cut for name, some in cuts.items() for cut in some if cut.axis == "tp"}
    mixtures = tuple(f"{name}." for name, module in stage.named_modules() if isinstance(module, Mixture))
    for name, module in list(stage.named_modules()):
        if name.startswith(mixtures):  # a region of its own
            if not sp and isinstance(module, RegionInput | RegionOutput):
                stage.set_submodule(
                    name, Region(axis, enter if isinstance(module, RegionInput) else Leave.apply)
                )
        elif isinstance(module, Core):
            module.heads, module.kv_heads = module.heads // axis.size, module.kv_heads // axis.size
        else:
            cut = table.get(f"{name}.weight")
            ordered = replace(axis, ordered=_attends(stage, name), chunks=mesh.layout.tp_chunks)
            if (other := _replacement(module, "" if cut is None else cut.kind, ordered, axis)) is not None:
                stage.set_submodule(name, other)
    if any(cut.kind == "vocab" for cut in table.values()):
        assert isinstance(stage, LanguageModel)
        if sp and stage.last and card.whole_sequences:  # gathered before the first module that needs them
            first = stage.get_submodule(card.whole_sequences[0].removesuffix("."))
            first.register_forward_pre_hook(lambda _, inputs: (whole(inputs[0], axis), *inputs[1:]))
        assert type(stage.output) is Output, "replaced before"
        stage.output = VocabularyOutput(replace(axis, sp=sp and not card.whole_sequences), stage.output.cap)
    computes = {n: p.computes for n, p in parts(card, mesh.layout, mesh.rank).items() if n in table}
    for name, parameter in list(stage.named_parameters()):
        if name in computes:  # it becomes this rank's part
            owner, _, leaf = name.rpartition(".")
            local = torch.empty(local_shape(computes[name]), dtype=parameter.dtype, device=parameter.device)
            if not local.is_meta:
                for where, box in boxes(computes[name]):
                    local[where] = parameter.detach()[tuple(slice(*span) for span in box)]
            setattr(stage.get_submodule(owner), leaf, nn.Parameter(local))
    return summed_over_tp(card, mesh.layout, [name for name, _ in stage.named_parameters()])


def _replacement(module: nn.Module, cut: str, ordered: TensorAxis, axis: TensorAxis) -> nn.Module | None:
    """What takes the place of a module outside of mixtures; None: it stays. cut: the kind of its weight's; "": it has
    none. ordered: the axis for linear layers."""
    match module:
        case nn.Embedding() if cut == "vocab":
            return VocabularyEmbedding(module, axis)
        case Positions() if axis.sp:
            return PiecePositions(module, axis)
        case WideRMSNorm() if cut:
            return CutRMSNorm(module, axis.axis)
        case RegionInput():
            return Region(axis, enter)
        case nn.Linear() if cut in LINEAR:
            return LINEAR[cut](module, ordered)
    return None


def _attends(stage: nn.Module, name: str) -> bool:
    """True for a linear layer of attention, also inside another module there: it needs the tokens in order."""
    while name:
        name = name.rpartition(".")[0]
        if any(isinstance(child, Core) for child in stage.get_submodule(name).children()):
            return True
    return False


def sum_gradients(replicas: Sequence[Replica], messages: list[list[str]], mesh: Mesh) -> Callable[[], None]:
    """Returns the reduction over the tensor axis for the messages of `parts.tensor_sums`."""

    def reduction() -> None:
        axis, gradients = mesh.axis("tp"), {n: g for r in replicas for n, g in r.gradients.items()}
        started: list[tuple[Started, list[Tensor]]] = []
        for names in messages:
            parts = [gradients[name] for name in names]
            if sum(part.numel() for part in parts):
                flat = parts[0] if len(parts) == 1 else torch.cat([part.reshape(-1) for part in parts])
                # Offloaded gradients come to the device for the sum: NCCL sends nothing else.
                started.append((axis.start_all_reduce(flat.to(mesh.device)), parts))
                if flat.device != mesh.device:  # one message at a time: together they may not fit
                    settle(started)
        settle(started)

    def settle(started: list[tuple[Started, list[Tensor]]]) -> None:
        while started:
            wait, parts = started.pop(0)
            total = wait()
            if total is not parts[0]:
                each = total.flatten().split([part.numel() for part in parts])
                for part, summed in zip(parts, each, strict=True):
                    part.copy_(summed.view(part.shape))

    return reduction


class CutLinear(nn.Module):
    """A linear layer of which this rank has some features."""

    def __init__(self, linear: nn.Linear, axis: TensorAxis):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.rounded: RoundedMatmuls | None = getattr(linear, "rounded", None)
        self.deferred: Deferred | None = None  # set if a pipeline defers weight gradients
        self.axes: tuple[TensorAxis | None, TensorAxis | None] = axis, None

    def forward(self, x: Tensor) -> Tensor:
        return LinearFunction.apply(x, self.weight, self.bias, self.deferred, self.rounded, *self.axes)


class ColumnLinear(CutLinear):
    """A linear layer with this rank's output features. x whole, or with sp a piece of the sequence -> (B, T, F/tp)."""


class RowLinear(CutLinear):
    """A linear layer with this rank's input features. x (B, T, D/tp) -> the sum over ranks, whole (B, T, F) or with sp
    a piece of the sequence. The bias is added once, after the sum."""

    def __init__(self, linear: nn.Linear, axis: TensorAxis):
        super().__init__(linear, axis)
        self.axes = None, axis


LINEAR = {"column": ColumnLinear, "row": RowLinear}


class Region(nn.Module):
    """Replaces `models.layers.RegionInput` by `enter`: x whole, or with sp a piece of the sequence -> whole (B, T, D);
    and `RegionOutput` by `Leave`: the sum over ranks of x, which is overwritten."""

    def __init__(self, axis: TensorAxis, function: Callable[[Tensor, TensorAxis], Tensor]):
        super().__init__()
        self.axis, self.function = axis, function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.axis)


class PiecePositions(nn.Module):
    """Learned positions of this rank's piece of the sequence: (T) -> (t, D), or (B, T) -> (B, t, D)."""

    def __init__(self, embedding: Embedding, axis: TensorAxis):
        super().__init__()
        self.weight, self.axis = embedding.weight, axis

    def forward(self, positions_T: Tensor) -> Tensor:
        return F.embedding(piece(positions_T, self.axis, -1), self.weight)


class CutRMSNorm(nn.Module):
    """`WideRMSNorm` over features that tensor parallelism cuts, such as those of all heads: this rank's features of
    each vector, and their weights."""

    def __init__(self, norm: WideRMSNorm, axis: Axis):
        super().__init__()
        self.weight, self.eps, self.axis = norm.weight, norm.eps, axis

    def forward(self, *vectors: Tensor) -> tuple[Tensor, ...]:
        return _CutRMSNorm.apply(self.eps, self.axis, self.weight, *vectors)


class _CutRMSNorm(Function):
    """Each rank has the same share of every vector. The sums over all features, one number per vector, are those of the
    ranks: in forward of the squares, in backward of the products of gradient and vector.

        y = x r w,  r = (sum(x^2) / F + eps)^(-1/2)
        dx = r (dy w - x r^2 sum(dy w x) / F)
    """

    @staticmethod
    def forward(ctx: Any, eps: float, axis: Axis, *tensors: Tensor):
        # In one: PyTorch's compiler drops `ctx` where two arguments are given for the last.
        weight, *vectors = tensors
        if not torch.compiler.is_compiling():
            vectors = [x.contiguous() for x in vectors]
        norms = [torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32) for x in vectors]
        squares = operators.run(axis, SQUARES, torch.stack(norms).square_()).unbind()
        rs = [
            torch.rsqrt(square / (axis.size * x.shape[-1]) + eps)[..., None]
            for square, x in zip(squares, vectors, strict=True)
        ]
        ctx.save_for_backward(weight, *rs, *vectors)
        ctx.axis = axis
        each = zip(vectors, rs, _weights(weight, vectors), strict=True)
        return tuple((x * r).mul_(w).to(x.dtype) for x, r, w in each)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor):
        weight, *saved = ctx.saved_tensors
        axis, rs, vectors = ctx.axis, saved[: len(grads)], saved[len(grads) :]
        weights, products, dweights = _weights(weight, vectors), [], []
        for dy, x, r, w in zip(grads, vectors, rs, weights, strict=True):
            product = (r * dy).mul_(x)  # not with the x r of forward, which a compiler would keep in fp32
            dweights.append(product.flatten(0, -2).sum(0))
            products.append(product.mul_(w).sum(-1))  # r sum(dy w x)
        sums = operators.run(axis, SQUARES, torch.stack(products), backward=True).unbind()
        dxs = []
        for dy, x, r, w, total in zip(grads, vectors, rs, weights, sums, strict=True):
            shrunk = x * (r * total[..., None] / (axis.size * x.shape[-1]))
            dxs.append((dy * w).sub_(shrunk).mul_(r).to(x.dtype))
        return None, None, torch.cat(dweights).to(weight.dtype), *dxs


def _weights(weight: Tensor, vectors: Any) -> tuple[Tensor, ...]:
    """The section of each vector, in fp32."""
    return weight.float().split([x.shape[-1] for x in vectors])


class VocabularyEmbedding(nn.Module):
    """Tokens (B, T) -> (B, T, D), with sp (B, t, D). `weight` has the rows of this rank. Tokens of other ranks give
    zeros here, and the sum over ranks combines them."""

    def __init__(self, embedding: nn.Embedding, axis: TensorAxis):
        super().__init__()
        self.weight, self.axis = embedding.weight, axis

    def forward(self, tokens_BT: Tensor) -> Tensor:
        rows = self.weight.shape[0]
        local_BT = tokens_BT - self.axis.index * rows
        elsewhere_BT = (local_BT < 0) | (local_BT >= rows)
        x_BTD = F.embedding(local_BT.masked_fill_(elsewhere_BT, 0), self.weight)
        return Leave.apply(x_BTD.masked_fill(elsewhere_BT[..., None], 0.0), self.axis)


class VocabularyOutput(Output):
    """Replaces `models.layers.Output`. weight and bias: the rows of this rank. x: whole, or with sp cut along the
    sequence. Targets and logits are always whole."""

    def __init__(self, axis: TensorAxis, cap: float = 0.0):
        super().__init__()
        self.axis, self.cap = axis, cap

    def forward(
        self, x: Tensor, weight_vD: Tensor, targets_BT: Tensor | None, bias_v: Tensor | None = None
    ) -> Tensor:
        if targets_BT is None:
            logits = matmul.linear(enter(x, self.axis), weight_vD, bias_v)
            return join(self.capped(logits.float()), self.axis)
        targets, axis = targets_BT.long(), self.axis
        if axis.sp:  # targets follow the order of the pieces, which saves copies of x
            axis = replace(axis, ordered=False)
            targets = torch.cat(targets.chunk(axis.size, dim=1))  # (tp B, t)
        if self.in_triton(x):
            return self._by_tiles(enter(x, axis), weight_vD, targets.flatten(), bias_v)
        grad = torch.is_grad_enabled()
        return _Loss.apply(x, weight_vD, targets, bias_v, axis, grad, self.z_factor, self.drawing, self.cap)

    def _by_tiles(self, x: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None) -> Tensor:
        """`_Loss` as kernels/gpu/loss.py computes it: backward computes the gradients. x whole (B, T, D)."""
        from fivefold.kernels.gpu import loss  # with Triton, which takes half a second

        rank, ranks, v = self.axis.index, self.axis.size, len(weight)
        assert_on_device((targets < v * ranks).all(), "a target beyond the vocabulary")

        def gathered(own: Tensor) -> Tensor:
            return self.axis.axis.run(STATISTICS, own).view(ranks, LOSS_STATISTICS, -1)

        own = loss.statistics(x.flatten(0, 1), weight, targets, bias, rank * v)
        return loss.mean_loss(sent(gathered, lambda d: d[rank], own), targets, self.z_factor)


class _Loss(Function):
    """Mean cross-entropy over targets other than -100, as `kernels/matmul.py` has it. Forward computes the
    gradients, chunk by chunk. The sum of dx over the ranks runs until backward needs it. Backward frees the gradients,
    so it runs only once."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        bias: Tensor | None,
        axis: TensorAxis,
        grad: bool,
        z_loss: float,
        drawing: cross_entropy.Keys | None,
        cap: float,
    ) -> Tensor:
        whole = axis.start_whole(x)().contiguous()  # (B, T, D) or (tp B, t, D)
        x_ND, targets_N = whole.flatten(0, 1), targets.flatten()
        v, first = len(weight), axis.index * len(weight)
        if drawing is None:
            assert_on_device((targets_N < v * axis.size).all(), "a target beyond the vocabulary")
        ctx.dx, ctx.gone = (lambda: torch.zeros_like(x)) if ctx.needs_input_grad[0] and grad else None, False

        def chunk(part: slice, losses: Tensor, scale: Tensor) -> Tensor:
            logits, targets = matmul.linear(x_ND[part], weight, bias), targets_N[part]
            slope = cap_(logits, cap) if cap else None
            if drawing is not None:
                targets = targets.where(targets < 0, _drawn(logits, targets, drawing, first, axis))
            return loss_and_gradient(logits, targets, losses, scale, z_loss, first, together, slope)

        def together(statistics: Tensor) -> Tensor:
            return axis.axis.run(STATISTICS, statistics).view(axis.size, LOSS_STATISTICS, -1)

        def start_sum(dx: Tensor) -> None:  # it overlaps with the last weight gradient
            ctx.dx = axis.start_sum(dx.view_as(whole))

        loss, _, dweight, dbias = mean_by_chunks(ctx, x_ND, weight, targets_N, bias, grad, chunk, start_sum)
        ctx.save_for_backward(dweight, dbias)
        ctx.dtype = weight.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor):
        if ctx.gone:
            raise RuntimeError(
                "a second backward of the same loss: the first has freed its gradients. Compute the loss again"
            )
        factor = grads[0] if ctx.ahead is None else grads[0] / ctx.ahead
        dweight, dbias = ctx.saved_tensors
        found = [None if ctx.dx is None else ctx.dx(), dweight, dbias]
        ctx.dx = None  # the loss keeps this context, and so the gradient, until the next loss
        ctx.gone = True
        dx, dweight, dbias = (None if g is None else matmul.times(g, factor, ctx.dtype) for g in found)
        return dx, dweight, None, dbias, *[None] * 5


def _drawn(logits: Tensor, tokens: Tensor, key: cross_entropy.Keys, first: int, axis: TensorAxis) -> Tensor:
    """The labels (n) of `cross_entropy.drawn` over the vocabulary of all ranks. fp32 holds every number of it."""
    highest, numbers = cross_entropy.drawn(logits, tokens, key, first)
    own = torch.stack([highest, numbers.float()])  # (2, n)
    best, labels = axis.axis.run(STATISTICS, own).view(axis.size, 2, -1).unbind(1)
    return labels.gather(0, best.argmax(0, keepdim=True))[0].long()
