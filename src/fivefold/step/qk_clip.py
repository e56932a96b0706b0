"""QK-clip (Kimi K2, arXiv 2507.20534, section 2.1): after a step, queries and keys of heads whose scores grew too large
get smaller weights.

The paper takes the largest score of the step. Fused attention does not tell it, and no layout has all of it. Here it
is an upper bound by norms: the largest |q| of a head in the batch, times the largest |k|, times 1 / sqrt(d). Rotations
keep norms, but for the factor of their tables, and a maximum over tokens is the same however ranks divide them. So
every layout clips by the same numbers, for one pass over queries and keys per forward, and one small message per step.

Where query heads share a key head, the largest bound among them counts for all, as in Megatron-LM.

Shapes: B batch, T tokens, H query heads, K key heads, d width of a head, L blocks; h, k those of this rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fivefold.models.card import Card, ScoreRows
from fivefold.models.layers import AttentionCore
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.replica import Replica
from fivefold.sharding.parts import Part


class QKClip:
    """limit: of a head's bound. A step is: start_step, forward and backward of the microbatches, finish, update.
    counts: False in microbatches without targets. figures: valid from `finish`. score_bound: the largest bound;
    clipped_heads: how many key heads are above the limit."""

    def __init__(
        self, limit: float, card: Card, stages: Iterable[Any], replicas: Sequence[Replica], mesh: Mesh
    ) -> None:
        self.limit, self.replicas, self.mesh, self.rows = limit, replicas, mesh, card.score_rows()
        # Of queries and of keys, (2, L, K)
        self.norms = torch.zeros(2, *card.score_maxima, device=mesh.device)
        self.bounds = self.norms[0]
        self.counts, self.figures = True, dict[str, Tensor]()
        for stage in stages:
            model, amplitude = card.model, getattr(stage, "amplitude", 1.0)
            turned = model.rotary_width == model.head_width and all(map(model.rotates, range(model.blocks)))
            rotated = amplitude if turned else max(1.0, amplitude)  # what does not rotate has factor 1
            self.scale = rotated**2 / math.sqrt(model.head_width)
            for number, block in stage.blocks.items():
                core = block.attention.core
                first = mesh.index("tp") * core.kv_heads
                mine_2k = self.norms[:, int(number), first : first + core.kv_heads]
                core.register_forward_pre_hook(partial(self._see, mine_2k))

    @torch.no_grad()
    def _see(self, norms_2k: Tensor, core: AttentionCore, args: tuple[Tensor, ...]) -> None:
        """Notes the largest norms of a forward's queries and keys (B, T, (h + 2k) d)."""
        if core.training and self.counts:
            heads, kv_heads = core.heads, core.kv_heads
            each_BTNd = args[0].unflatten(-1, (heads + 2 * kv_heads, -1))[..., : heads + kv_heads, :]
            largest_N = torch.linalg.vector_norm(each_BTNd, dim=-1, dtype=torch.float32).amax((0, 1))
            q_k = largest_N[:heads].view(kv_heads, -1).amax(1)
            norms_2k.copy_(torch.maximum(norms_2k, torch.stack((q_k, largest_N[heads:]))))

    def start_step(self) -> None:
        self.norms.zero_()

    def finish(self) -> None:
        self.mesh.axis("all").all_reduce(self.norms, "max")
        self.bounds = self.norms.prod(0) * self.scale
        above = (self.bounds > self.limit).sum()
        self.figures = {"score_bound": self.bounds.max(), "clipped_heads": above}

    @torch.no_grad()
    def update(self, skip: Tensor) -> None:
        """Scales rows of the masters, after their update. skip: 1: not in this step (fp32 scalar)."""
        above = (self.bounds > self.limit) & (skip == 0)
        if self.mesh.device.type == "cpu" and not getattr(skip, "fake", False) and not above.any():
            return
        factors_LK = torch.where(above, self.limit / self.bounds, 1.0)
        for replica in self.replicas:
            for name, master in replica.masters.items():
                number, _, local = name.removeprefix("blocks.").partition(".")
                rows = self.rows.get(local.rpartition(".")[0])
                if rows and name.startswith("blocks.") and not replica.parts[name].frozen:
                    _scale(master, replica.parts[name], factors_LK[int(number)], rows)
            replica.refresh()


def _scale(master: Tensor, part: Part, factor_K: Tensor, rows: ScoreRows) -> None:
    """Scales the rows of this rank's part of a parameter."""
    whole = []
    for heads, sections in rows:
        factor_h1 = factor_K.repeat_interleave(heads // len(factor_K))[:, None]
        whole.append(torch.cat([factor_h1.pow(power).expand(-1, width) for width, power in sections], 1))
    every = torch.cat([each.flatten() for each in whole])
    assert len(every) == part.shape[0], "all rows of the weight"
    mine = torch.cat([every[:0], *(every[start:stop] for start, stop in part.keeps[0])])
    master.mul_(mine.view(-1, *(1,) * (master.dim() - 1)))
