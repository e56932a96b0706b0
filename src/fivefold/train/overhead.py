"""Seconds of a step that no operation takes: Python, autograd, dispatch. Measured on models so small that nothing else
is left, with the trainer's own step."""

from __future__ import annotations

import time
from statistics import median

import torch

from fivefold.layout import Layout
from fivefold.parallel.ranks import Ranks
from fivefold.parallel.replica import clip_
from fivefold.recipe import load, resolve
from fivefold.train.loop import Microbatch, agree, forward_backward, update
from fivefold.train.state import build_state

T, DIM, VOCABULARY = 32, 64, 64
STEPS, WARM_UP = 14, 3
AXES = {
    "tp": ("tp=2", {"all_reduce fp32": 4}),
    "sp": ("tp=2,sp=true", {"all_gather": 6, "reduce_scatter fp32": 4}),
    "ring": ("cp=2", {"send": 3}),
    "ulysses": ("cp=2,cp_method=ulysses", {"all_to_all": 4}),
}
"""Layouts of two ranks, and the messages of a block, forward and backward."""
BLOCKS, MICROBATCHES = (2, 6), (1, 3)


def plain(ranks: Ranks, layout: str = "dp=1", steps: int = STEPS) -> dict[str, float]:
    """Of a step with L blocks and m microbatches: "step" + L "block step" + m ("microbatch" + L "block")."""
    (l1, l2), (m1, m2) = BLOCKS, MICROBATCHES
    took = {
        (layers, m): _step_seconds(ranks, layout, layers, m, steps) for layers in BLOCKS for m in MICROBATCHES
    }
    block = (took[l2, m2] - took[l2, m1] - took[l1, m2] + took[l1, m1]) / (l2 - l1) / (m2 - m1)
    microbatch = (took[l1, m2] - took[l1, m1]) / (m2 - m1) - l1 * block
    a_step = (took[l2, m1] - took[l1, m1]) / (l2 - l1) - m1 * block
    rest = took[l1, m1] - l1 * a_step - m1 * (microbatch + l1 * block)
    found = {"block": block, "microbatch": microbatch, "block step": a_step, "step": rest}
    return {name: max(0.0, seconds) for name, seconds in found.items()}


def added(ranks: Ranks, links: dict[str, list[list[float]]], steps: int = STEPS) -> dict[str, float]:
    """What the axes add on two ranks, besides the time of their messages, one after the other (`links`): for a block
    and microbatch, for ZeRO also for a block and step ("zero3 step"); for a pipeline's stage and microbatch."""
    assert ranks.world == 2, ranks.world
    base, found = plain(ranks, "dp=2", steps), {}
    gather, scatter, send = (links[name][0][1] for name in ("all_gather", "scatter_gradients", "send"))
    sent = {1: (0.0, gather + scatter), 2: (scatter, gather), 3: (2 * gather + scatter, 0.0)}
    for zero, (a_microbatch, a_step) in sent.items():
        mine = plain(ranks, f"dp=2,zero={zero}", steps)
        found[f"zero{zero}"] = max(0.0, mine["block"] - base["block"] - a_microbatch)
        found[f"zero{zero} step"] = max(0.0, mine["block step"] - base["block step"] - a_step)
    for name, (layout, messages) in AXES.items():
        sent_here = sum(count * links[what][0][1] for what, count in messages.items())
        few, many = (_step_seconds(ranks, layout, layers, MICROBATCHES[1], steps // 2) for layers in BLOCKS)
        block = (many - few) / (BLOCKS[1] - BLOCKS[0]) / MICROBATCHES[1] - base["block step"] / MICROBATCHES[
            1
        ]
        found[name] = max(0.0, block - base["block"] - sent_here)
    few, many = (_step_seconds(ranks, "pp=2", 2, m, steps) for m in (4, 12))
    found["stage"] = max(0.0, (many - few) / 8 - base["block"] - base["microbatch"] / 2 - 2 * send)
    return found


def _step_seconds(ranks: Ranks, layout: str, layers: int, microbatches: int, steps: int) -> float:
    sets = [f"model.layers={layers}", f"model.dim={DIM}", "model.heads=2", f"model.ffn_dim={DIM}"]
    sets += [f"model.seq_len={T}", "precision.mode=fp32", "train.steps=1000", "train.microbatch_size=1"]
    dp = Layout.from_recipe(load("quickstart", [], layout).layout).dp
    sets += [f"train.global_batch_size={dp * microbatches}"]
    recipe = resolve(load("quickstart", sets, layout), vocab_size=VOCABULARY)
    state = build_state(recipe, ranks)
    tokens = torch.zeros(1, T, dtype=torch.int64, device=ranks.device)
    batch: list[Microbatch] = [(tokens, tokens)] * microbatches
    laps = []
    for _ in range(steps):
        began = time.perf_counter()
        loss = forward_backward(state, batch, 0)
        norm = clip_(state.parallel.replicas, recipe.optim.grad_clip, state.mesh)
        update(state, recipe.optim, norm, 1000)
        agree(loss, False, state.mesh)
        state.step += 1
        laps.append(time.perf_counter() - began)
    for replica in state.parallel.replicas:
        replica.close()
    return median(laps[min(WARM_UP, steps - 1) :])
