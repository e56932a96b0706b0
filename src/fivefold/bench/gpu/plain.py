"""Plain PyTorch that trains the same shape, as a careful user writes it without a framework: FSDP2 over several ranks,
autocast on one, compiled blocks on GPUs, PyTorch's attention, whole logits, fused AdamW.

Shapes: B batch, T tokens, D width, d width of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fivefold.launch.ranks import Ranks
from fivefold.models.card import card_of
from fivefold.models.layers import rope_table
from fivefold.models.section import ModelSection, known
from fivefold.recipe import Recipe


class Block(nn.Module):
    def __init__(self, model: ModelSection):
        super().__init__()
        D, inner, d, card = model.dim, known(model.ffn_dim), model.head_width, card_of(model)
        self.heads, self.gated = [model.heads, known(model.kv_heads), known(model.kv_heads)], card.gated
        line = partial(nn.Linear, bias=card.biased)
        self.norm1, self.norm2 = norm(model), norm(model)
        self.qkv, self.out = line(D, sum(self.heads) * d), line(model.heads * d, D)
        self.up, self.down = line(D, 2 * inner if card.gated else inner), line(inner, D)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor] | None) -> Tensor:
        """x (B, T, D); turn: cosines and sines (T, d) of rotary positions."""
        qkv = self.qkv(self.norm1(x)).unflatten(2, (sum(self.heads), -1)).transpose(1, 2)
        q, k, v = qkv.split(self.heads, dim=1)
        if turn is not None:
            q, k = rotate(q, *turn), rotate(k, *turn)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads[0] != self.heads[1])
        x = x + self.out(y.transpose(1, 2).flatten(2))
        h = self.up(self.norm2(x))
        if not self.gated:
            return x + self.down(F.gelu(h, approximate="tanh"))
        gate, up = h.chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def norm(model: ModelSection) -> nn.Module:
    return (nn.LayerNorm if card_of(model).biased else nn.RMSNorm)(model.dim, known(model.norm_eps))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return (x * cos + torch.cat([-b, a], -1) * sin).to(x.dtype)


class Plain(nn.Module):
    """A decoder. again: backward recomputes blocks."""

    def __init__(self, model: ModelSection, again: bool):
        super().__init__()
        V, D = known(model.vocab_size), model.dim
        self.section, self.again = model, again
        self.embed = nn.Embedding(V, D)
        self.places = None if card_of(model).rotary else nn.Embedding(model.seq_len, D)
        self.blocks = nn.ModuleList(Block(model) for _ in range(model.layers))
        self.norm = norm(model)
        self.head = None if model.tie_embeddings else nn.Linear(D, V, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of (B, T) tokens."""
        x, turn, places = self.embed(tokens), None, torch.arange(tokens.shape[1], device=tokens.device)
        if self.places is not None:
            x = x + self.places(places)
        else:
            cos, sin = rope_table(places, self.section, self.section.rotary_width)
            turn = cos.repeat(1, 2), sin.repeat(1, 2)
        for block in self.blocks:
            x = checkpoint(block, x, turn, use_reentrant=False) if self.again else block(x, turn)
        logits = F.linear(self.norm(x), (self.head or self.embed).weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def plain_step(recipe: Recipe, ranks: Ranks, dtype: torch.dtype, tokens: Tensor) -> Callable[[], Tensor]:
    """A function that takes a step of a resolved recipe on these tokens (B, T), and returns the loss."""
    with torch.device("meta"):
        model = Plain(recipe.model, recipe.layout.recompute == "full")
    kind, optim = ranks.device.type, recipe.optim
    if kind == "cuda":
        for block in model.blocks:
            block.compile()
    if ranks.world > 1:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        mesh = init_device_mesh(kind, (ranks.world,))
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh, mp_policy=policy)
    model.to_empty(device=ranks.device)
    for name, p in model.named_parameters():
        if p.dim() > 1:
            nn.init.normal_(p, std=recipe.model.init_std)
        else:
            nn.init.constant_(p, 0.0 if name.endswith("bias") else 1.0)
    first, second = optim.betas or (0.9, 0.999)
    optimizer = torch.optim.AdamW(model.parameters(), optim.lr, (first, second), fused=True)

    def step() -> Tensor:
        with torch.autocast(kind, dtype, enabled=ranks.world == 1 and dtype != torch.float32):
            loss = model(tokens, tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
