"""The base of all language models: a beginning, a stack of blocks, an end. And their initial weights: each element
depends only on (seed, parameter name, element index).

So a recipe starts from the same weights on every layout, device and shard, and a rank can make its own part of a
tensor without the rest. Element i of parameter `name` is a standard normal number. It comes from a 64-bit hash of i
under keys derived from (seed, name) (kernels/hashing.py), then Box-Muller (1958).

Only integer operations and the floating-point operations that IEEE 754 rounds exactly (+ - * / sqrt) are used;
logarithm and sine are polynomials of them. A library's logarithm differs in the last bit between CPU and GPU and
between versions; these do not.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fivefold.kernels.hashing import hash_, indices, keys
from fivefold.models import file_of
from fivefold.models.ahead import Ahead, Further, loss_with_further
from fivefold.models.layers import AddNorm, Output
from fivefold.models.mup import into_residual, scales
from fivefold.models.section import ModelSection
from fivefold.sharding.parts import Part, Shape, boxes, local_shape

if TYPE_CHECKING:
    from fivefold.kernels.blockwise_attention import Documents
    from fivefold.models.layers import Cache


class LanguageModel(nn.Module, ABC):
    """A language model, or a run of its blocks.

    `begin`, `context`, each of `blocks`, and `end` are called in this order. A part of a model (a pipeline stage) is
    the same module with only some of `blocks`. Its `first` or `last` is False if it lacks the beginning or the end.
    Parameters keep the names that they have in the whole. `blocks` is keyed by the block's number as text.
    """

    blocks: nn.ModuleDict
    mtp_loss: Tensor | float = 0.0
    """The loss of multi-token prediction, added up over microbatches by their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.last = True
        self.output = Output()

    @abstractmethod
    def begin(self, tokens_BT: Tensor, positions_T: Tensor) -> Tensor:
        """Embeds tokens at these positions, (T) or (B, T): (B, T, D)."""

    def context(self, positions_T: Tensor) -> tuple[Tensor, ...]:
        """Arguments of every block besides x, such as the rotary table."""
        return ()

    @abstractmethod
    def end(self, x_BTD: Tensor, targets_BT: Tensor | None) -> Tensor:
        """(B, T, D) -> logits (B, T, V) in fp32; with targets -> mean loss over targets other than -100."""

    def forward(
        self,
        inputs: Tensor,
        targets_BT: Tensor | None = None,
        cache: Cache | None = None,
        positions_T: Tensor | None = None,
        documents: Documents | None = None,
        further: Further | None = None,
    ) -> Tensor:
        """Tokens (B, T) -> logits (B, T, V), fp32; with targets (B, T) -> mean loss over targets other than -100.

        inputs: tokens, or (B, T, D) from the previous blocks if the model has no beginning. cache: the tokens follow
        those in the cache. Without targets only the logits of the last position are returned, (B, 1, V), which sampling
        needs.
        positions_T: the tokens' positions in their sequence; None: 0, 1, 2, ... after the cache. documents: those in
        the sequences. Attention does not cross them, and learned positions begin anew in each. (Rotary ones need not:
        attention sees their differences only.) further: tokens and targets of multi-token prediction, which runs in
        training only.
        """
        if positions_T is None:
            start = 0 if cache is None else cache.length
            positions_T = torch.arange(start, start + inputs.shape[1], device=inputs.device)
        x_BTD = inputs
        if self.first:
            x_BTD = self.begin(inputs, documents.positions(positions_T) if documents else positions_T)
        context = self.context(positions_T)
        apart = {} if documents is None else {"documents": documents}
        options = lambda number: apart | ({} if cache is None else {"cache": cache[number]})  # noqa: E731
        x_BTD = self.through(x_BTD, inputs, context, options)
        if not self.last:
            return x_BTD
        if further is not None and targets_BT is not None and self.training:
            return loss_with_further(self, x_BTD, targets_BT, further, positions_T, *context, **apart)
        if cache is not None and targets_BT is None:
            x_BTD = x_BTD[:, -1:]
        return self.end(x_BTD, targets_BT)

    def through(
        self,
        x_BTD: Tensor,
        tokens_BT: Tensor,
        context: tuple[Tensor, ...],
        options: Callable[[int], Mapping[str, Any]],
    ) -> Tensor:
        """The blocks, one after the other. tokens_BT: the model's inputs. options: of a block, by its number."""
        for number, block in self.blocks.items():
            if getattr(block, "ahead", None) is not None:  # it runs behind the model's end
                break
            x_BTD = block(x_BTD, *context, **options(int(number)))
        return x_BTD

    def besides(
        self, block: nn.Module, x_BTD: Tensor, tokens_BT: Tensor
    ) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """What `through` gives a block besides x, context and options: tensors of these shapes, behind the context and
        by name. For traces of single blocks."""
        return (), {}


class PreNormBlock(nn.Module):
    """x + attention(norm1(x)), then the same with the feed-forward layer. norm2 adds first, in one pass over memory."""

    norms = (("norm1", "attention"), ("norm2", "mlp"))
    """The norm before each sublayer."""

    def __init__(
        self, norm1: nn.Module, attention: nn.Module, norm2: AddNorm, mlp: nn.Module, dropout: float
    ) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2, self.mlp = norm1, attention, norm2, mlp
        self.dropout = dropout
        self.ahead: Ahead | None = None  # set in blocks of multi-token prediction

    def forward(self, x_BTD: Tensor, *tables: Tensor, tokens: Tensor | None = None, **options: Any) -> Tensor:
        """tables: the model's `context`. tokens: embedded, (B, T, D), for multi-token prediction. options: cache and
        documents, if there are any."""
        if self.ahead is not None and tokens is not None:
            x_BTD = self.ahead(x_BTD, tokens)
        attended_BTD = self.attention(self.norm1(x_BTD), *tables, **options)
        x_BTD, normed_BTD = self.norm2(x_BTD, F.dropout(attended_BTD, self.dropout, self.training))
        x_BTD = x_BTD + F.dropout(self.mlp(normed_BTD), self.dropout, self.training)
        return x_BTD if self.ahead is None else self.ahead.norm(x_BTD)


def block_dict(blocks: list[nn.Module]) -> nn.ModuleDict:
    """Blocks keyed by their number, so that a part of them keeps its names: blocks.7.attention..."""
    return nn.ModuleDict({str(number): block for number, block in enumerate(blocks)})


def init_weights(module: nn.Module, seed: int, model: ModelSection) -> None:
    """Fills every parameter of a module in place; buffers get zeros."""
    with torch.no_grad():
        for buffer in module.buffers():
            buffer.zero_()
        for name, parameter in module.named_parameters():
            whole = [(0, size) for size in parameter.shape]
            init_box_(parameter, seed, name, parameter.shape, model, whole)


def init_part(
    seed: int, name: str, model: ModelSection, part: Part, device: torch.device | str = "cpu"
) -> Tensor:
    """Initial values of a rank's part of parameter `name`: fp32, in the shape of `part.keeps`."""
    out = torch.empty(local_shape(part.keeps), dtype=torch.float32, device=device)
    if not getattr(out, "fake", False):  # a trace's has a shape but no values
        for where, box in boxes(part.keeps):
            init_box_(out[where], seed, name, part.shape, model, box)
    return out


def init_box_(
    out: Tensor, seed: int, name: str, shape: Shape, model: ModelSection, box: Sequence[tuple[int, int]]
) -> None:
    """Fills `out` with the box [box[0][0]:box[0][1], box[1][0]:box[1][1], ...] of parameter `name`, of this shape.

    Matrices: normal with standard deviation `init_std`, divided by sqrt(2 L) for the projections back into the residual
    stream (GPT-2). Scales of norms: ones. Biases, and scales that are added to 1: zeros. The decays of linear attention
    are spread over its heads (`_spread`). With `base_dim` all of them are those of a model of that width (and
    `base_layers`) times the factors of `mup.scales`.
    """
    factor, _ = scales(model, name, shape)
    if name.endswith(SPREAD):
        first, last = box[0]
        out.copy_(torch.tensor([_spread(name, (i + 0.5) / shape[0]) for i in range(first, last)]))
    elif name.endswith(("bias", "delta")):
        out.zero_()
    elif len(shape) == 1:
        out.fill_(factor)
    elif model.zero_init and into_residual(name):
        out.zero_()
    else:
        branches = 2 * (model.base_layers or model.layers) if into_residual(name) else 1
        std = model.init_std / math.sqrt(branches) * factor
        fill_normal_(out, keys(f"{seed}/{name}"), std, shape, box)


SPREAD = ("attention.a_log", "attention.dt")


def _spread(name: str, share: float) -> float:
    """The initial value of a head's decay, by its place among the heads, from 0 to 1. A token leaves exp(-exp(a_log)
    softplus(dt)) of the state. The first factor goes evenly up to 16, the second evenly in its logarithm from 0.001 to
    0.1: the ranges that the paper's code (arXiv 2412.06464) draws them from, so that heads remember for a few tokens
    to many thousands."""
    if name.endswith(SPREAD[0]):
        return math.log(16 * share)
    return math.log(math.expm1(10 ** (2 * share - 3)))  # the inverse of softplus


def fill_normal_(
    out: Tensor, key: tuple[int, int], std: float, shape: Shape, box: Sequence[tuple[int, int]]
) -> None:
    """Fills `out` with a box of normal numbers, in chunks."""
    if out.is_contiguous() and tuple(out.shape) == tuple(shape):  # flat: rows of experts are large
        out, shape, box = out.view(-1), (out.numel(),), [(0, out.numel())]
    for rows, index in indices(shape, box, out.device):
        part = out[rows]
        part.copy_(_standard_normal(index, *key).mul_(std).view_as(part))


def _standard_normal(index: Tensor, key_a: int, key_b: int) -> Tensor:
    """Hashes int64 indices (which are overwritten) and turns each into one standard normal number, fp32."""
    bits = hash_(index, key_a, key_b)
    # Two uniform numbers from the two halves. Conversion to fp32 rounds exactly, on every device.
    radius_uniform = (bits >> 32).bitwise_and_(0xFFFFFFFF).float().add_(0.5).mul_(2.0**-32)  # (0, 1]
    angle_uniform = bits.bitwise_and_(0xFFFFFFFF).sub_(1 << 31).float().mul_(2.0**-32)  # [-1/2, 1/2]
    radius = _minus_log(radius_uniform).mul_(2.0).sqrt_()
    # sin of a uniform angle in [-pi/2, pi/2] has the same distribution as on the whole circle. It is computed by its
    # Taylor series up to x^11, error < 3e-7.
    x = angle_uniform.mul_(math.pi)
    series = [(-1) ** (n // 2) / math.factorial(n) for n in (11, 9, 7, 5, 3, 1)]
    return _horner(x * x, series).mul_(x).mul_(radius)


def _minus_log(x: Tensor) -> Tensor:
    """-log(x) for fp32 x in (0, 1], error < 1.1e-6 and never below 0: exponent * log 2 + log of the mantissa m in [1,
    2), as 2 (z + z^3/3 + z^5/5 + ...) with z = (m - 1) / (m + 1) <= 1/3."""
    bits = x.view(torch.int32)
    exponent = (bits >> 23).sub_(127).float()
    mantissa = bits.bitwise_and(0x7FFFFF).bitwise_or_(0x3F800000).view(torch.float32)
    z = (mantissa - 1.0).div_(mantissa.add_(1.0))
    series = _horner(z * z, [1 / n for n in (11, 9, 7, 5, 3, 1)]).mul_(z).mul_(2.0)
    return exponent.mul_(math.log(2)).add_(series).neg_().clamp_(min=0.0)


def _horner(x: Tensor, coefficients: Sequence[float]) -> Tensor:
    """coefficients[0] x^n + ... + coefficients[n]."""
    total = x * coefficients[0]
    for coefficient in coefficients[1:-1]:
        total.add_(coefficient).mul_(x)
    return total.add_(coefficients[-1])


def build(model: ModelSection, *, device: torch.device | str = "meta", seed: int | None = 0) -> LanguageModel:
    """Builds the model of a resolved `[model]` section, in fp32.

    On device "meta" (the default) it has shapes and no memory. On others it is made on "meta" first, so that no weight
    is set twice, and then gets its initial weights (see `init_weights`). `seed=None` leaves its memory uninitialised,
    for a caller that loads weights at once.
    """
    with torch.device("meta"):
        module = file_of(model.arch, "module").Model(model)
    if torch.device(device).type == "meta":
        return module
    module.to_empty(device=device)
    if seed is not None:
        init_weights(module, seed, model)
    return module
