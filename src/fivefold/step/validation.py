"""The loss of held-out text, and its bits per byte."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fivefold.comm.progress import progress
from fivefold.models.layers import Output
from fivefold.parallel.mesh import Microbatch
from fivefold.step.state import State
from fivefold.step.step import counted_once


class Unspoken(Output):
    """Replaces an output layer meanwhile. It adds up the nats of the targets that are no text, such as end tokens: bits
    per byte are those of a text alone, as `fivefold eval` and lm-evaluation-harness count them."""

    def __init__(self, output: Output, is_text_V: Tensor):
        super().__init__()
        self.output, self.is_text_V = output, is_text_V
        self.nats = torch.zeros((), dtype=torch.float64, device=is_text_V.device)

    def forward(
        self, x_BTD: Tensor, weight_VD: Tensor, targets_BT: Tensor | None, bias_V: Tensor | None = None
    ) -> Tensor:
        found = self.output(x_BTD, weight_VD, targets_BT, bias_V)
        if targets_BT is None:
            return found
        marks_BT = targets_BT.masked_fill(self.is_text_V[targets_BT.clamp(min=0)], -100)
        # On a GPU it would be a host sync
        if x_BTD.device.type == "cpu" and x_BTD.shape[:2] == marks_BT.shape:
            x_BTD, marks_BT = x_BTD[marks_BT >= 0][None], marks_BT[marks_BT >= 0][None]
        if marks_BT.numel():
            self.nats += self.output(x_BTD, weight_VD, marks_BT, bias_V).double() * (marks_BT >= 0).sum()
        return found


class ValidationSet(NamedTuple):
    """A rank's microbatches of a validation set. name: "" for the only one. headline: it counts for val_loss.
    token_bytes (V): bytes of text per token id, if known."""

    name: str
    headline: bool
    microbatches: list[Microbatch]
    token_bytes: Tensor | None


def validate(state: State, sets: Sequence[ValidationSet]) -> dict[str, Any]:
    """Validates on every rank's microbatches. Returns val_loss (nats per target over the sets that are headlines) and
    val_bits_per_byte (see `Unspoken`), if it is known; and if there are several sets val_losses and val_bits of each by
    its name."""
    sums = {each.name: _sums(state, each.microbatches, each.token_bytes) for each in sets}
    headlines = [sums[each.name] for each in sets if each.headline]
    figures: dict[str, Any] = _losses(*map(sum, zip(*headlines, strict=True)))
    if len(sets) > 1:
        by_name = {name: _losses(*parts) for name, parts in sums.items()}
        figures["val_losses"] = {name: losses["val_loss"] for name, losses in by_name.items()}
        bits = "val_bits_per_byte"
        figures["val_bits"] = {name: losses[bits] for name, losses in by_name.items() if bits in losses}
    return figures


def _losses(nats: float, targets: float, size: float, unspoken: float) -> dict[str, float]:
    found = {"val_loss": nats / max(1, targets)}
    if size:
        found["val_bits_per_byte"] = (nats - unspoken) / size / math.log(2)
    return found


@torch.no_grad()
def _sums(
    state: State, microbatches: list[Microbatch], token_bytes: Tensor | None
) -> tuple[float, float, float, float]:
    """Sums over every rank's microbatches: nats, targets, and given token_bytes (V) bytes of text, and the nats of
    targets that are none."""
    parallel, mesh = state.parallel, state.mesh
    apart = []
    for stage in parallel.stages:
        if token_bytes is not None and isinstance(output := getattr(stage, "output", None), Output):
            stage.output = Unspoken(output, token_bytes > 0)
            apart.append(stage)
        stage.eval()
    if parallel.pipeline is not None:  # only the last stage has losses
        losses = parallel.pipeline.losses(microbatches)
    else:
        losses = (
            (number, state.module(one.inputs, one.targets, **one.options()))
            for number, one in enumerate(microbatches)
        )
    sums = torch.zeros(4, dtype=torch.float64, device=mesh.device)  # as they are returned
    for number, loss in losses:
        progress.mark()
        targets = microbatches[number].targets
        counted = targets >= 0
        sums[0] += loss.double() * counted.sum()
        sums[1] += counted.sum()
        if token_bytes is not None:
            # To choose by the mask would be a host sync.
            sums[2] += (token_bytes[targets.clamp(min=0)] * counted).sum()
    for stage in apart:
        sums[3] += stage.output.nats
        stage.output = stage.output.output
    for stage in parallel.stages:
        stage.train()
    sums = mesh.axis("run").all_reduce(sums * counted_once(mesh))
    nats, targets, size, unspoken = sums.tolist()
    return nats, targets, size, unspoken
