"""Attention on a fused projection by what a core computes, on one rank or over several: with sinks, and caps on scores.

A core (such as `OneRank`) computes attention of queries, keys and values with its log-sum-exp. A sink is then one more
score of each query, whatever the core computed the others by.

Legend: B batch, T sequence, t = T/c tokens of a rank, H query heads, K key-value heads, d head size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.library import custom_op

from fivefold.kernels.blockwise_attention import (
    NOT_CAUSAL,
    PLAIN,
    Documents,
    Scores,
    Shared,
    numbered,
    one_document,
)
from fivefold.kernels.partial_attention import (
    Queries,
    attend,
    attend_backward,
    queries,
    split_heads,
    split_heads_backward,
)


class Sees(NamedTuple):
    """What queries see: documents; window, cap and sink."""

    documents: Documents | None
    scores: Scores = PLAIN

    def parts(self, q: Tensor, T: int) -> Documents | None:
        """The documents of sequences of T tokens, q (B, ...); one each, if only a window hides keys."""
        hides = self.documents is None and 0 < self.scores.window < T
        return one_document(len(q), T, q.device) if hides else self.documents


class Core(ABC):
    """Computes attention of queries, keys and values, which are contiguous. Inside compiled code that is one operator,
    with all its messages. A sink is not its concern. key: equal in all blocks."""

    heads: int
    kv_heads: int
    causal: bool
    key: str

    def attended(self, q: Tensor, kv: Tensor, sees: Sees) -> tuple[Tensor, Tensor]:
        """(out, lse) of queries (B, H, t, d), keys and values (2, B, K, t, d): (B, t, H d), and (B, H, t) in fp32. All
        ranks call it."""
        if not torch.compiler.is_compiling():
            return self.attend(q, kv, sees)
        number = None if sees.documents is None else sees.documents.number
        return _attend(q, kv, number, self.key, *sees.scores[:2])

    def backward(self, kept: Sequence[Any], dout: Tensor, sees: Sees) -> tuple[Tensor, Tensor]:
        """`gradients`, contiguous and in the dtype of q. kept: q, kv, out, lse, and the number of the documents, if
        there are any (`numbered`)."""
        (q, kv, out, lse, number) = kept
        if torch.compiler.is_compiling():
            return _attend_backward(q, kv, out, lse, dout, number, self.key, *sees.scores[:2])
        dq, dkv = self.gradients(of_output(q, kv, out, lse, dout), kv, sees)
        return dq.to(q.dtype).contiguous(), dkv.to(q.dtype).contiguous()

    @abstractmethod
    def attend(self, q: Tensor, kv: Tensor, sees: Sees) -> tuple[Tensor, Tensor]:
        """`attended`, outside of compiled code. scores: window and cap."""

    @abstractmethod
    def gradients(self, rows: Queries, kv: Tensor, sees: Sees) -> tuple[Tensor, Tensor]:
        """Returns those of q and of kv, the sums of all ranks."""


cores: WeakValueDictionary[str, Core] = WeakValueDictionary()
"""All cores by their keys. An operator cannot take an object, so it takes the key. The cores of all blocks compute the
same."""


@custom_op("fivefold::attend", mutates_args=())
def _attend(
    q: Tensor, kv: Tensor, documents: Tensor | None, core: str, window: int, soft_cap: float
) -> tuple[Tensor, Tensor]:
    """`Core.attend`. documents: their number."""
    return cores[core].attend(q, kv, Sees(numbered(documents), Scores(window, soft_cap)))


@_attend.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    B, H, t, d = q.shape
    return q.new_empty(B, t, H * d), q.new_empty(B, H, t, dtype=torch.float32)


@custom_op("fivefold::attend_backward", mutates_args=())
def _attend_backward(
    q: Tensor, kv: Tensor, out: Tensor, lse: Tensor, dout: Tensor, documents: Tensor | None, core: str,
    window: int, soft_cap: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    sees = Sees(numbered(documents), Scores(window, soft_cap))
    return cores[core].backward((q, kv, out, lse, documents), dout, sees)


@_attend_backward.register_fake
def _(q: Tensor, kv: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(kv)


@dataclass(frozen=True)
class OneRank(Core):
    """The core of a rank that has whole sequences."""

    heads: int
    kv_heads: int
    causal: bool

    @property
    def key(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return f"one rank {self.causal}"

    def attend(self, q: Tensor, kv: Tensor, sees: Sees) -> tuple[Tensor, Tensor]:
        out, lse = attend(q, kv[0], kv[1], self.causal, self._tiles(q, sees), sees.scores.soft_cap)
        return out.transpose(1, 2).flatten(2), lse

    def gradients(self, rows: Queries, kv: Tensor, sees: Sees) -> tuple[Tensor, Tensor]:
        tiles, cap = self._tiles(rows.q, sees), sees.scores.soft_cap
        dq, dk, dv = attend_backward(rows, kv[0], kv[1], self.causal, tiles, cap)
        return dq, torch.stack((dk, dv))

    def _tiles(self, q: Tensor, sees: Sees) -> Shared | None:
        documents, whole = sees.parts(q, q.shape[2]), ((0, q.shape[2]),)
        return documents and documents.shared(whole, whole, self.causal, q, sees.scores)


ONE_RANK = [OneRank(1, 1, causal) for causal in (False, True)]
"""Of any heads: operators ask `cores` for these."""
cores.update({core.key: core for core in ONE_RANK})


def of_output(q: Tensor, kv: Tensor, out: Tensor, lse: Tensor, dout: Tensor) -> Queries:
    """The `Queries` of a backward pass. out, dout: (B, T, H d)."""
    out, dout = (x.unflatten(2, (q.shape[1], -1)).transpose(1, 2).contiguous() for x in (out, dout))
    return queries(q, dout, out, lse)


def attended(qkv: Tensor, cos: Tensor | None, sin: Tensor | None, core: Any, sees: Sees) -> Tensor:
    """Attention on one fused projection (B, t, (H + 2K) d), by a core, with a sink if there is one: (B, t, H d). Raises
    UserError: a window without a causal mask."""
    if not core.causal:
        sees.scores.refuse(NOT_CAUSAL, ["window"])
    sink, scores = sees.scores.sink, sees.scores._replace(sink=None)
    return _Attended.apply(qkv, sink, cos, sin, core, Sees(sees.documents, scores))


class _Attended(Function):
    """Only this rank's queries, keys and values are kept. A sink takes a share of each query's probabilities, whatever
    the core computes them by."""

    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        sink: Tensor | None,
        cos: Tensor | None,
        sin: Tensor | None,
        core: Any,
        sees: Sees,
    ):
        q, kv = split_heads(qkv, core.heads, core.kv_heads, cos, sin)
        out, lse = core.attended(q, kv, sees)
        if sink is not None:
            whole = torch.logaddexp(lse, sink.float()[:, None])  # (B, H, t)
            kept_BtH1 = (lse - whole).exp_().transpose(1, 2)[..., None]
            out, lse = (out.unflatten(2, (core.heads, -1)) * kept_BtH1).to(out.dtype).flatten(2), whole
        number = None if sees.documents is None else sees.documents.number
        ctx.save_for_backward(q, kv, out, lse, number, cos, sin, sink)
        ctx.core, ctx.sees = core, sees
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor):
        *kept, cos, sin, sink = ctx.saved_tensors
        dsink = None
        if sink is not None:  # its value is 0
            (_, _, out, lse, _), heads = kept, len(sink)
            delta_BtH = (grads[0].float() * out).unflatten(2, (heads, -1)).sum(-1)
            probability_BHt = (sink.float()[:, None] - lse).exp()
            dsink = -(probability_BHt * delta_BtH.transpose(1, 2)).sum((0, 2)).to(sink.dtype)
        dq, dkv = ctx.core.backward(kept, grads[0], ctx.sees)
        return split_heads_backward(dq, dkv, cos, sin), dsink, *[None] * 4
