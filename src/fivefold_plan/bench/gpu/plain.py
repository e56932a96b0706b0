"""A recipe's model as a careful user trains it without a framework: FSDP2 over several ranks, autocast on one, compiled
blocks of PyTorch's own modules and attention, whole logits, fused AdamW.

Shapes: B batch, T tokens, D width, d width of a head.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fivefold.launch.ranks import Ranks
from fivefold.models.base import LanguageModel, block_dict, build
from fivefold.models.card import card_of
from fivefold.models.section import ModelSection, known
from fivefold.precision import torch_dtype
from fivefold.recipe import Recipe
from fivefold.step.state import compute_mode

WARM_UP, STEPS = 3, 10


class Block(nn.Module):
    """again: backward recomputes it."""

    def __init__(self, model: ModelSection, again: bool):
        super().__init__()
        D, inner, K, card = model.dim, known(model.ffn_dim), known(model.kv_heads), card_of(model)
        self.heads, self.gated, self.again = [model.heads, K, K], card.gated, again
        norm = partial(nn.LayerNorm if card.biased else nn.RMSNorm, D, known(model.norm_eps))
        line, width = partial(nn.Linear, bias=card.biased), model.head_width
        self.norm1, self.norm2 = norm(), norm()
        self.qkv, self.out = line(D, sum(self.heads) * width), line(model.heads * width, D)
        self.up, self.down = line(D, inner * (1 + card.gated)), line(inner, D)

    def forward(self, x: Tensor, *table: Tensor) -> Tensor:
        """x (B, T, D); table: cosines and sines (T, d/2) of rotary positions, if they rotate."""
        if self.again:
            return checkpoint(self.compute, x, *table, use_reentrant=False)
        return self.compute(x, *table)

    def compute(self, x: Tensor, *table: Tensor) -> Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(2, (sum(self.heads), -1)).transpose(1, 2)
        q, k, v = heads.split(self.heads, dim=1)
        if table:
            q, k = rotate(q, *table), rotate(k, *table)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads[0] != self.heads[1])
        x = x + self.out(y.transpose(1, 2).flatten(2))
        h = self.up(self.norm2(x))
        if not self.gated:
            return x + self.down(F.gelu(h, approximate="tanh"))
        gate, up = h.chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def plain_model(model: ModelSection, again: bool) -> LanguageModel:
    """On "meta"."""
    with torch.device("meta"):
        whole = build(model)
        whole.blocks = block_dict([Block(model, again) for _ in range(model.layers)])
    return whole


def plain(recipe: Recipe, ranks: Ranks) -> dict[str, float]:
    """step_s of a resolved recipe."""
    kind, optim, tokens = ranks.device.type, recipe.optim, random_tokens(recipe, ranks)
    dtype = torch_dtype(compute_mode(recipe, ranks.device).working)
    model = plain_model(recipe.model, recipe.layout.recompute == "full")
    if kind == "cuda":
        for block in model.blocks.values():
            block.compile()
    if ranks.world > 1:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        mesh = init_device_mesh(kind, (ranks.world,))
        for module in (*model.blocks.values(), model):
            fully_shard(module, mesh=mesh, mp_policy=policy)
    model.to_empty(device=ranks.device)
    for p in model.parameters():
        nn.init.normal_(p, std=recipe.model.init_std)
    optimizer = torch.optim.AdamW(model.parameters(), optim.lr, optim.betas or (0.9, 0.999), fused=True)

    def step() -> None:
        with torch.autocast(kind, dtype, enabled=ranks.world == 1 and dtype != torch.float32):
            loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return {"step_s": seconds_per_step(step, ranks.device)}


def random_tokens(recipe: Recipe, ranks: Ranks) -> Tensor:
    """A rank's microbatch (B, T)."""
    seeded = torch.Generator().manual_seed(ranks.rank)
    size = recipe.train.microbatch_size or 1, recipe.model.seq_len
    return torch.randint(known(recipe.model.vocab_size), size, generator=seeded).to(ranks.device)


def seconds_per_step(step: Callable[[], object], device: torch.device) -> float:
    began = 0.0
    for steps in (WARM_UP, STEPS):
        began = time.perf_counter()
        for _ in range(steps):
            step()
        if device.type == "cuda":
            torch.cuda.synchronize()
    return (time.perf_counter() - began) / STEPS
