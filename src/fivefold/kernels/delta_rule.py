"""Linear attention by the gated delta rule (arXiv 2412.06464): a head keeps a matrix S, the state, in place of keys and
values. A token shrinks it, replaces what it holds at the token's key by the token's value, and reads it:

    S_t = exp(g_t) S_(t-1) + k_t (beta_t (v_t - exp(g_t) S_(t-1)^T k_t))^T,   o_t = S_t^T q_t

Token by token that would be T small products. In chunks of C tokens the corrections of a chunk's values are the
solution of a triangular system (the WY form, section 3 there and arXiv 2406.06484), so all of it but the passing of the
state from chunk to chunk is batched matmuls. Sums and the state are fp32, whatever the dtype of the inputs.

Documents in packed sequences: a token reads no state of an earlier document, and the convolution before the rule reads
none of its tokens.

Legend: B batch, T tokens, K key heads, H value heads, G = H/K, d width of a key head, e of a value head, C tokens of a
chunk, N chunks, F features.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fivefold.kernels.sizes import DELTA_CHUNK

EPS = 1e-6
"""Added to the squared length of queries and keys."""


def causal_convolution(
    x_BTF: Tensor, weight_FW: Tensor, tail: Tensor | None = None, first_BT: Tensor | None = None
) -> Tensor:
    """A convolution of each feature with its own W weights over the last W tokens, the newest last: (B, T, F) in fp32.
    tail: the W - 1 tokens before (B, W - 1, F); None: zeros. first: the column at which the document of each token
    begins."""
    (B, T, _), W = x_BTF.shape, weight_FW.shape[1]
    if tail is None:
        tail = x_BTF.new_zeros(B, W - 1, x_BTF.shape[2])
    padded, weight = torch.cat((tail, x_BTF), 1), weight_FW.float()
    total = x_BTF * weight[:, -1]
    for back in range(1, W):
        product = padded[:, W - 1 - back : W - 1 - back + T] * weight[:, -1 - back]
        if first_BT is not None:
            inside_BT = torch.arange(T, device=x_BTF.device) - back >= first_BT
            product = product * inside_BT[..., None]
        total = total + product
    return total


def gated_delta_rule(
    q_BTKd: Tensor,
    k_BTKd: Tensor,
    v_BTHe: Tensor,
    decay_BTH: Tensor,
    beta_BTH: Tensor,
    state: Tensor | None = None,
    first_BT: Tensor | None = None,
    chunk: int = DELTA_CHUNK,
) -> tuple[Tensor, Tensor]:
    """The outputs (B, T, H, e) and the state after the last token (B, H, d, e), both fp32. Queries and keys are made
    unit vectors, and queries divided by sqrt(d). Each key head serves G value heads in a row.

    decay: g, the logarithm of what is left of the state, at most 0. beta: the share of a key's old value that is
    replaced. state: before the first token; None: zeros. first: the column at which the document of each token begins;
    the first one goes on from `state`."""
    (B, T, K, d), (H, e) = q_BTKd.shape, v_BTHe.shape[2:]
    C, G = min(chunk, T), H // K
    q, k = (_chunks(unit(x), C)[:, :, None] for x in (q_BTKd, k_BTKd))  # (B, K, 1, N, C, d)
    v, beta, g = (
        _chunks(x.float(), C).unflatten(1, (K, G))
        for x in (v_BTHe, beta_BTH[..., None], decay_BTH[..., None])
    )  # (B, K, G, N, C, e or 1)
    total = g.cumsum(-2)
    between, reads, writes, passes = _decays(total, first_BT, C)
    # What a token finds at its key that the tokens before it in the chunk have written: strictly lower triangular.
    system = (k * beta) @ k.mT * between
    solved = torch.linalg.solve_triangular(
        system, torch.cat((v * beta, k * (beta * reads)), -1), upper=False, unitriangular=True
    )
    values, seen = solved.split([e, d], -1)  # written values, and the factors of the old state in them
    scores = q @ k.mT * between * d**-0.5
    q, k = q * (reads * d**-0.5), k * writes
    S = v.new_zeros(B, K, G, d, e) if state is None else state.unflatten(1, (K, G))
    outputs = []
    for n in range(v.shape[3]):
        written = values[:, :, :, n] - seen[:, :, :, n] @ S
        outputs.append(q[:, :, :, n] @ S + scores[:, :, :, n] @ written)
        S = S * passes[:, :, :, n] + k[:, :, :, n].mT @ written
    out = torch.stack(outputs, 3).flatten(3, 4)[:, :, :, :T]  # (B, K, G, T, e)
    return out.flatten(1, 2).transpose(1, 2), S.flatten(1, 2)


def unit(x: Tensor) -> Tensor:
    """Vectors of length 1, in fp32."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)


def _chunks(x_BTHd: Tensor, C: int) -> Tensor:
    """(B, T, H, d) -> (B, H, N, C, d). The last chunk is filled up by tokens of zeros, which change no state."""
    x = x_BTHd.transpose(1, 2)
    return F.pad(x, (0, 0, 0, -x.shape[2] % C)).unflatten(2, (-1, C))


def _decays(total: Tensor, first_BT: Tensor | None, C: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What is left after the decay, by the sums of g since a chunk's start (B, K, G, N, C, 1): of what token j writes
    when token i reads it (..., C, C), of the old state at each token, of what a token writes at the chunk's end (both
    ..., C, 1), and of the old state there (..., 1, 1). Nothing passes into another document."""
    last = total[..., -1:, :]
    later = torch.ones(C, C, dtype=torch.bool, device=total.device).triu(1)
    reads, writes, passes = total.exp(), (last - total).exp(), last.exp()
    if first_BT is not None:
        T, N = first_BT.shape[1], total.shape[3]
        filled = torch.cat((first_BT, first_BT[:, -1:].expand(-1, N * C - T)), 1)
        first = filled.view(-1, 1, 1, N, C, 1)
        later = later | (first != first.mT)
        goes_on = first <= (torch.arange(N, device=total.device) * C - 1).clamp(min=0)[:, None, None]
        reads, writes = reads * goes_on, writes * (first == first[..., -1:, :])
        passes = passes * goes_on[..., -1:, :]
    return (total - total.mT).masked_fill(later, -torch.inf).exp(), reads, writes, passes
