"""Modules as a user writes them, for tests on several ranks."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fivefold.models.base import LanguageModel, block_dict
from fivefold.models.layers import AttentionCore, Positions
from fivefold.sharding.parts import Cut

V, T, D, H = 64, 16, 32, 4


class Mixer(nn.Module):
    """Two linear layers over the features."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(D), nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(F.gelu(self.wide(self.norm(x))))


class Plain(nn.Module):
    """No base class of ours, no card. The output layer shares the embedding's weight; the table of positions is
    frozen; `count` is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(V, D)
        self.table = nn.Parameter(torch.randn(T, D), requires_grad=False)
        self.layers = nn.ModuleList(Mixer() for _ in range(4))
        self.last = nn.Linear(D, V, bias=False)
        self.last.weight = self.tokens.weight
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(inputs) + self.table
        x = x + x.cumsum(1) / T  # tokens see those before them
        for layer in self.layers:
            x = layer(x)
        self.count += self.training
        return F.cross_entropy(self.last(x).flatten(0, 1), targets.flatten())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.qkv, self.core = (
            nn.LayerNorm(D),
            nn.Linear(D, 3 * D, bias=False),
            AttentionCore(H, H),
        )
        self.out, self.mixer = nn.Linear(D, D), Mixer()

    def forward(self, x: Tensor) -> Tensor:
        return self.mixer(x + self.out(self.core(self.qkv(self.norm1(x)))))


class Decoder(LanguageModel):
    """A user's decoder of PyTorch's own layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.embed_positions = nn.Embedding(V, D), Positions(T, D)
        nn.init.normal_(self.embed_positions.weight)
        self.blocks = block_dict([Block() for _ in range(4)])
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, V, bias=False)
        for p in self.parameters():
            if p.dim() == 1:
                nn.init.normal_(p, 0.5, 0.1)  # a frozen bias of zeros would be no proof

    def begin(self, tokens_BT: Tensor, positions_T: Tensor) -> Tensor:
        return self.embed(tokens_BT) + self.embed_positions(positions_T)

    def end(self, x_BTD: Tensor, targets_BT: Tensor | None) -> Tensor:
        return self.output(self.norm(x_BTD), self.head.weight, targets_BT)


def cut(name: str, shape: tuple[int, ...]) -> Cut | None:
    """The cuts of `Decoder`."""
    match name:
        case "embed.weight" | "head.weight":
            return Cut("vocab", 0, shape[:1])
        case "qkv.weight":
            return Cut("column", 0, (D, D, D))
        case "mixer.wide.weight" | "mixer.wide.bias":
            return Cut("column", 0, shape[:1])
        case "out.weight" | "mixer.narrow.weight":
            return Cut("row", 1, shape[1:])
    return None


class Numbers:
    """Random tokens; batch i depends on i alone."""

    def batch(self, i: int, rows: range) -> tuple[np.ndarray, np.ndarray]:
        block = np.random.default_rng(i).integers(0, V, (8, T + 1))[rows.start : rows.stop]
        return np.ascontiguousarray(block[:, :-1]), np.ascontiguousarray(block[:, 1:])
