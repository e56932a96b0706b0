"""The headline figures of a run from its metrics, for the end of the console and the head of the report."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from fivefold.observe.faults import counts

BUSY = "the peak was measured while the machine was busy"


def column(lines: Sequence[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """Steps and values of `key`, in order of steps; values may be NaN. `val_losses/web` is a value by its name."""
    group, _, name = key.partition("/")
    values = ((line["step"], by_name(line, group).get(name) if name else line.get(key)) for line in lines)
    pairs = [(step, float(value)) for step, value in values if isinstance(value, int | float)]
    pairs.sort(key=lambda pair: pair[0])
    return [step for step, _ in pairs], [value for _, value in pairs]


def by_name(line: Mapping[str, Any], key: str) -> dict[str, float]:
    """The numbers by name that a line has under a key; NaN for those that were not finite."""
    values = line.get(key)
    if not isinstance(values, dict):
        return {}
    return {
        name: math.nan if value is None else float(value)
        for name, value in values.items()
        if value is None or isinstance(value, int | float)
    }


def finite(values: Iterable[float]) -> list[float]:
    """`values` without NaN and infinities."""
    return [value for value in values if math.isfinite(value)]


def summarize(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Headline figures, without those that the lines do not give.

    steps, tokens; train_s (time in steps); loss (mean over the last 5% of the steps, 1 to 100 of them),
    val_loss (last), best_val_loss, best_val_step, val_bits_per_byte (last), best_val_bits_per_byte,
    val_losses (last, by validation set, if there are several), source_tokens (last, by source of a mixture),
    tokens_per_s, mfu and hfu (medians, after the first tenth of the steps, where caches and compilers warm up),
    peak_share (last: the share of the cores' time that MFU's peak was measured with, if others took the rest),
    data_wait (share of the time in steps), noise_scale (last; in tokens), loss_scale and skipped_steps (last), faults
    (`faults.counts`), alarms (step, text), peak_memory_bytes, nonfinite (number of steps whose loss is NaN or
    infinite), nonfinite_step (the first).
    """
    figures: dict[str, Any] = {}
    steps, losses = column(lines, "loss")
    if steps:
        last = losses[-min(100, max(1, len(losses) // 20)) :]
        figures["steps"] = steps[-1]
        figures["loss"] = math.fsum(last) / len(last) if finite(last) == last else math.nan
        if bad := [step for step, loss in zip(steps, losses, strict=True) if not math.isfinite(loss)]:
            figures["nonfinite"], figures["nonfinite_step"] = len(bad), bad[0]
    if tokens := finite(column(lines, "tokens")[1]):
        figures["tokens"] = int(max(tokens))
    for key in ("val_loss", "val_bits_per_byte"):
        steps, values = column(lines, key)
        if values:
            figures[key] = values[-1]
        if pairs := [
            (value, step) for step, value in zip(steps, values, strict=True) if math.isfinite(value)
        ]:
            figures[f"best_{key}"], best_step = min(pairs)
            if key == "val_loss":
                figures["best_val_step"] = best_step
    for key in ("tokens_per_s", "mfu", "hfu"):
        if values := finite(column(lines, key)[1]):
            figures[key] = median(values[len(values) // 10 :])
    if shares := column(lines, "peak_share")[1]:
        figures["peak_share"] = shares[-1]
    steps, seconds = column(lines, "step_s")
    total = math.fsum(finite(seconds))
    if total > 0:
        figures["data_wait"] = math.fsum(finite(column(lines, "data_wait_s")[1])) / total
        # Where only each n-th step was written, the others took as long.
        written = len(steps) / max(1, steps[-1] - steps[0] + 1)
        figures["train_s"] = total * (1 if written > 0.9 else 1 / written)
    for key in ("noise_scale", "loss_scale", "skipped_steps"):
        if values := finite(column(lines, key)[1]):
            figures[key] = values[-1]
    for key in ("val_losses", "source_tokens"):
        if named := [values for line in lines if (values := by_name(line, key))]:
            figures[key] = named[-1]
    if alarms := [(line["step"], str(line["alarm"])) for line in lines if "alarm" in line]:
        figures["alarms"] = alarms
    if wrong := counts(lines):
        figures["faults"] = wrong
    if memory := finite(column(lines, "peak_memory_bytes")[1]):
        figures["peak_memory_bytes"] = max(memory)
    return figures
