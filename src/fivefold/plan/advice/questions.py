"""Answers budget questions about a plan: time, cost, devices, and whether model, tokens and batch fit together."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Any

from fivefold.errors import UserError
from fivefold.plan.advice import budget
from fivefold.plan.cluster.devices import Cluster
from fivefold.plan.predict import Plan
from fivefold.plan.search.search import search
from fivefold.plan.setting import Software
from fivefold.recipe import Recipe, active_parameters, count_parameters, flops_per_token

UNITS = {"m": 60.0, "h": 3600.0, "d": budget.DAY, "w": 7 * budget.DAY}
MOST_SEARCHES = 8


@dataclass(frozen=True)
class Questions:
    """Budget questions. tokens: of the run. deadline: seconds. price: per device-hour. noise_scale: in tokens."""

    tokens: float
    deadline: float | None = None
    price: float | None = None
    noise_scale: float | None = None


def seconds(text: str) -> float:
    """Reads `30d`, `12h`, `90m`, `2w` as seconds.

    Raises:
        UserError: the text is no such time, or 0.
    """
    found = re.fullmatch(r"(\d+(?:\.\d*)?)([mhdw])", text.strip())
    if not found or not (value := float(found[1]) * UNITS[found[2]]) or not math.isfinite(value):
        raise UserError(f"--deadline {text}: must be a number above 0 with m, h, d or w, such as 30d")
    return value


def ask(
    tokens: float | None, deadline: str | None, price: float | None, noise_scale: float | None, default: float
) -> Questions:
    """Questions from the command line. default: tokens of the recipe.

    Raises:
        UserError: a number is not positive and finite.
    """
    for name, value in (("tokens", tokens), ("price", price), ("noise-scale", noise_scale)):
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"--{name} {value:g}: must be above 0 and finite")
    return Questions(tokens or default, seconds(deadline) if deadline else None, price, noise_scale)


def answer(plan: Plan, q: Questions) -> dict[str, Any]:
    """Answers by the plan's model and speed. Times count training alone, without stalls, restarts and validation."""
    model, devices = plan.setting.model, plan.layout.ranks
    parameters, active = count_parameters(model), active_parameters(model)
    took, flops = q.tokens / plan.tokens_per_s, budget.training_flops(active, q.tokens)
    found: dict[str, Any] = {
        "tokens": q.tokens,
        "parameters": parameters,
        "active_parameters": active,
        "flops_6nd": flops,
        "flops_with_attention": flops_per_token(model) * q.tokens,
        "days": took / budget.DAY,
        "device_hours": devices * took / 3600,
    }
    if q.price is not None:
        found["cost"] = budget.cost(devices, took, q.price)
    if q.deadline is not None:
        work = flops_per_token(model) * q.tokens
        found["deadline_days"] = q.deadline / budget.DAY
        found["devices_for_deadline"] = budget.devices_for(work, q.deadline, plan.model_flops_per_gpu)
    best, other = budget.chinchilla(flops), budget.kaplan(flops)
    found["optimal_tokens"] = 20.0 * active
    found["chinchilla"] = {"parameters": best.parameters, "tokens": best.tokens}
    found["kaplan"] = {"parameters": other.parameters, "tokens": other.tokens}
    return found | _batch(plan, q, active)


def _batch(plan: Plan, q: Questions, active: float) -> dict[str, Any]:
    """The critical batch size: the measured noise scale, or an estimate from the loss that such a model reaches."""
    loss = budget.HOFFMANN.loss(active, q.tokens)
    critical = q.noise_scale or budget.critical_batch_tokens(loss)
    steps, tokens = budget.batch_cost(plan.tokens, critical)
    return {
        "expected_loss": loss,
        "critical_batch_tokens": critical,
        "critical_batch_from": "noise scale" if q.noise_scale else "expected loss",
        "batch_tokens": plan.tokens,
        "steps_over_fewest": steps,
        "tokens_over_fewest": tokens,
    }


def fewest_devices(
    recipe: Recipe, cluster: Cluster, q: Questions, first: int, software: Software | None = None
) -> Plan | None:
    """The best plan on the fewest devices that meet the deadline, or None if no tried number does.

    It tries one node, two, four and so on, from about `first` devices."""
    assert q.deadline is not None
    devices = cluster.per_node * 2 ** max(0, math.ceil(math.log2(first / cluster.per_node)) - 1)
    for _ in range(MOST_SEARCHES):
        try:
            found = search(recipe, replace(cluster, devices=devices), 1, software)
        except UserError:  # no layout divides the batch, and none with twice the devices will
            return None
        if found.plans and q.tokens / found.plans[0].tokens_per_s <= q.deadline:
            return found.plans[0]
        devices *= 2
    return None


def lines(found: dict[str, Any]) -> list[str]:
    """The answers as lines of text."""
    text = [
        f"budget        {found['tokens']:.4g} tokens, {found['active_parameters']:.4g} active parameters: "
        f"{found['flops_6nd']:.3g} FLOPs (6 N D), {found['flops_with_attention']:.3g} with attention",
        f"time          {found['days']:.4g} days, {found['device_hours']:,.0f} device-hours"
        + (f", {found['cost']:,.0f} at this price" if "cost" in found else ""),
    ]
    if "devices_for_deadline" in found:
        text.append(
            f"deadline      {found['deadline_days']:.4g} days need {found['devices_for_deadline']:,} devices at this "
            "speed per device"
        )
    if "searched" in found:
        text.append(f"              {found['searched']}")
    best, other = found["chinchilla"], found["kaplan"]
    source = found["critical_batch_from"]
    return [
        *text,
        f"compute       best for this model: {found['optimal_tokens']:.3g} tokens (20 per parameter); best for these "
        f"FLOPs: {best['parameters']:.3g} parameters on {best['tokens']:.3g} tokens (Chinchilla), "
        f"{other['parameters']:.3g} on {other['tokens']:.3g} (Kaplan)",
        f"batch         critical size {found['critical_batch_tokens']:.3g} tokens (from the {source}); this batch of "
        f"{found['batch_tokens']:,} takes {found['steps_over_fewest']:.3g} times the fewest steps and "
        f"{found['tokens_over_fewest']:.3g} times the fewest tokens",
    ]
