"""Rules of thumb for the size of a run: FLOPs, devices, tokens, cost; and the budget questions about a plan that they
answer. Scaling laws: the loss by parameters N and tokens D, and the best N and D for C = 6 N D FLOPs. No numpy."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass
from typing import Any

from fivefold.errors import UserError, several
from fivefold.models.card import card_of
from fivefold.models.section import ModelSection
from fivefold.observe.format import short_number
from fivefold.recipe import (
    FLOPS,
    active_parameters,
    count_parameters,
    flops_per_token,
    resolve_model,
    training_flops,
)
from fivefold_plan.advice import failures
from fivefold_plan.cluster.devices import Cluster
from fivefold_plan.predict import Plan
from fivefold_plan.time.time import Stalls

DAY = 86400.0
UNITS = {"m": 60.0, "h": 3600.0, "d": DAY, "w": 7 * DAY}


@dataclass(frozen=True)
class Optimum:
    """The best model size and number of tokens for a budget of FLOPs."""

    parameters: float
    tokens: float


@dataclass(frozen=True)
class Law:
    """L(N, D) = E + A / N^alpha + B / D^beta in nats per token (Hoffmann et al., arXiv 2203.15556, equation 2).

    N counts all parameters, embeddings too; of a mixture of experts those that a token uses.
    """

    E: float
    A: float
    B: float
    alpha: float
    beta: float

    def loss(self, parameters: float, tokens: float) -> float:
        return self.E + self.A / parameters**self.alpha + self.B / tokens**self.beta

    @property
    def constants(self) -> dict[str, float]:
        """Its constants, and `growth`, by name."""
        return vars(self) | {"growth": self.growth}

    @property
    def growth(self) -> float:
        """Exponent a of the best size, N ~ C^a. That of the best number of tokens is 1 - a."""
        return self.beta / (self.alpha + self.beta)

    def optimum(self, flops: float) -> Optimum:
        """The N and D with the lowest loss for C = 6 N D (equation 4 there)."""
        scale = (self.alpha * self.A / (self.beta * self.B)) ** (1 / (self.alpha + self.beta))
        parameters = scale * (flops / FLOPS) ** self.growth
        return Optimum(parameters, flops / FLOPS / parameters)


HOFFMANN = Law(1.69, 406.4, 410.7, 0.34, 0.28)
"""Of models up to 16B on MassiveText (arXiv 2203.15556, equation 10)."""
BESIROGLU = Law(1.8172, 482.01, 2085.43, 0.3478, 0.3658)
"""Fitted again to points read from the figures of the same paper (arXiv 2404.10102)."""


def devices_for(work: float, seconds: float, flops: float) -> int:
    """Devices that finish `work` FLOPs within `seconds` at `flops` FLOP/s each."""
    return math.ceil(work / (seconds * flops))


def chinchilla(flops: float, tokens_per_parameter: float = 20.0) -> Optimum:
    """Model and data grow alike, with about 20 tokens per parameter (Hoffmann et al., arXiv 2203.15556).

    With C = 6 N D this gives N = sqrt(C / 120).
    """
    parameters = math.sqrt(flops / (FLOPS * tokens_per_parameter))
    return Optimum(parameters, tokens_per_parameter * parameters)


def kaplan(flops: float) -> Optimum:
    """Most of a growing budget goes into the model: N = 1.3e9 (C / PF-day)^0.73 parameters without embeddings (Kaplan
    et al., arXiv 2001.08361, table 6 and appendix A)."""
    parameters = 1.3e9 * (flops / (1e15 * DAY)) ** 0.73
    return Optimum(parameters, flops / (FLOPS * parameters))


def critical_batch_tokens(loss: float) -> float:
    """The critical batch size in tokens, at a training loss in nats: 2e8 loss^-4.76 (arXiv 2001.08361, equation 1.4).

    It takes twice the fewest steps and twice the fewest tokens. arXiv 1812.06162 has the theory.
    """
    return 2e8 * loss**-4.76


def batch_cost(batch: float, critical: float) -> tuple[float, float]:
    """(steps, tokens) to reach a loss with a batch size, over the fewest possible (arXiv 1812.06162, eq. 2.11). Both
    sizes are in one unit.

    At the critical size both costs are 2. A larger batch saves steps, a smaller one tokens.
    """
    return 1.0 + critical / batch, 1.0 + batch / critical


WIDTH = 128.0  # of dim over layers: GPT-3 175B's 12288 / 96, Llama 7B's 4096 / 32


def shape(parameters: float, like: ModelSection) -> ModelSection:
    """A model with about `parameters` parameters, and with the vocabulary, length and architecture of `like`.

    Its ratio of width to depth is that of large published models. Heads are 128 wide (64 if that is too coarse). Raises
    UserError: `parameters` is out of range, or the vocabulary with the smallest block is larger already."""
    if not 1e5 <= parameters <= 1e14:
        raise UserError(f"--params {parameters:g}: must be between 1e5 and 1e14")
    found = []  # of each width the depth that comes nearest
    for head in (128, 64):
        for heads in range(1, 1 + round((parameters / 12 * WIDTH) ** (1 / 3) * 2 / head)):
            one, two = (count_parameters(_sized(like, layers, heads, head)) for layers in (1, 2))
            layers = 1 + round((parameters - one) / (two - one))
            if layers >= 1:
                found.append((layers, heads, head))
    if not found:
        smallest = count_parameters(_sized(like, 1, 1, 64))
        raise UserError(
            f"--params {parameters:g}: with a vocabulary of {like.vocab_size} the smallest {like.arch} has {smallest:,}"
        )

    def oddness(model: ModelSection) -> float:
        """Distance from the usual width and from the wanted size. 1% of size weighs as much as 10% of width."""
        wide = abs(math.log(model.dim / model.layers / WIDTH))
        return wide + 10 * abs(math.log(count_parameters(model) / parameters))

    # Those that are deeper than wide take long to count
    usual = [(layers, heads, head) for layers, heads, head in found if layers <= heads * head]
    return min((_sized(like, *one) for one in usual or found), key=oddness)


def _sized(like: ModelSection, layers: int, heads: int, head: int) -> ModelSection:
    ratio = (like.heads // like.kv_heads) if like.kv_heads else 1
    change: dict[str, Any] = {"layers": layers, "dim": heads * head, "heads": heads}
    change["kv_heads"] = heads // ratio if like.kv_heads and heads % ratio == 0 else None
    change |= card_of(like).resized(layers)
    return resolve_model(like.model_copy(update=change), vocab_size=2)


@dataclass(frozen=True)
class Questions:
    """Budget questions. tokens: of the run. deadline: seconds. noise_scale: in tokens. price: per device-hour; mtbf:
    seconds between failures of a device; restart: seconds from one until the last checkpoint begins to be read; None:
    the cluster's."""

    tokens: float
    deadline: float | None = None
    price: float | None = None
    noise_scale: float | None = None
    mtbf: float | None = None
    restart: float | None = None

    def given(self, cluster: Cluster) -> tuple[float, float, float]:
        """price, mtbf and restart on a cluster; 0: not known."""
        pairs = (self.price, cluster.price), (self.mtbf, cluster.mtbf), (self.restart, cluster.restart)
        price, mtbf, restart = (default if value is None else value for value, default in pairs)
        return price, mtbf, restart


def seconds_of(option: str, text: str, zero: bool = False) -> float:
    """Reads a time such as `30d`, `12h`, `90m`, `2w`. zero: it may be 0. Raises UserError: it is none."""
    read = re.fullmatch(r"(\d{1,15}(?:\.\d{0,15})?)([mhdw])", text.strip(), re.ASCII)
    seconds = float(read[1]) * UNITS[read[2]] if read else -1.0
    if seconds < 0 or (seconds == 0 and not zero):
        limit = "of at least 0" if zero else "above 0"
        raise UserError(f"{option} {text[:60]}: must be a number {limit} with m, h, d or w, such as 30d")
    return seconds


def ask(
    tokens: float | None,
    deadline: str | None,
    price: float | None,
    noise_scale: float | None,
    default: float,
    mtbf: str | None = None,
    restart: str | None = None,
) -> Questions:
    """Questions from the command line. deadline, mtbf, restart: as for `seconds_of`. default: tokens of the recipe.
    Raises UserError: a number is not positive and finite, or a time is none."""
    for name, value in (("tokens", tokens), ("price", price), ("noise-scale", noise_scale)):
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"--{name} {value:g}: must be above 0 and finite")
    times = (("--deadline", deadline, False), ("--mtbf", mtbf, False), ("--restart", restart, True))
    end, between, pause = (seconds_of(name, text, zero) if text else None for name, text, zero in times)
    return Questions(tokens or default, end, price, noise_scale, between, pause)


def answer(plan: Plan, q: Questions) -> dict[str, Any]:
    """Answers by the plan's model and speed, with its stalls and with failures if their rate is known. The critical
    batch size is the measured noise scale, or an estimate from the loss that such a model reaches. Raises UserError:
    failures come so often that the run never ends."""
    cluster, model, active = plan.setting.cluster, plan.setting.model, active_parameters(plan.setting.model)
    price, mtbf, restart = q.given(cluster)
    lost = _lost(plan, mtbf, restart)
    alone, flops = q.tokens / plan.tokens_per_s, training_flops(active, q.tokens)
    took = alone / lost["effective"]
    work, hours = flops_per_token(model) * q.tokens, plan.ranks * took / 3600
    answers: dict[str, Any] = {
        "tokens": q.tokens,
        "parameters": count_parameters(model),
        "active_parameters": active,
        "flops_6nd": flops,
        "flops_with_attention": work,
        "days": took / DAY,
        "training_days": alone / DAY,
        "tokens_per_day": q.tokens / took * DAY,
        "device_hours": hours,
        **lost,
    }
    if price:
        answers |= {
            "price": price,
            "cost": hours * price,
            "cost_per_1e9_tokens": hours * price / q.tokens * 1e9,
        }
    if watts := cluster.device.watts:
        answers |= {"device_watts": watts, "energy_mwh": hours * watts / 1e6}
    if q.deadline is not None:
        count = math.ceil(plan.ranks * took / q.deadline)
        each = cluster.per_node if cluster.connected and count > cluster.per_node else 1
        answers["deadline_days"] = q.deadline / DAY
        answers["devices_for_deadline"] = math.ceil(count / each) * each
    loss = HOFFMANN.loss(active, q.tokens)
    critical = q.noise_scale or critical_batch_tokens(loss)
    steps, tokens = batch_cost(plan.tokens, critical)
    return answers | {
        "optimal_tokens": 20.0 * active,
        "chinchilla": asdict(chinchilla(flops)),
        "kaplan": asdict(kaplan(flops)),
        "expected_loss": loss,
        "critical_batch_tokens": critical,
        "critical_batch_from": "noise scale" if q.noise_scale else "expected loss",
        "batch_tokens": plan.tokens,
        "steps_over_fewest": steps,
        "tokens_over_fewest": tokens,
    }


def _lost(plan: Plan, mtbf: float, restart: float) -> dict[str, Any]:
    """What stalls and failures take. effective: share of the time in which steps are taken that count."""
    stalls, step = plan.stalls, plan.step.seconds
    if stalls is None:
        return {"effective": 1.0}
    every, saving = stalls.every * (step + stalls.waiting), stalls.saving
    found = {
        "checkpoint_bytes": stalls.checkpoint,
        "checkpoint_every_s": every,
        "checkpoint_stall_s": saving,
        "checkpoint_writing_s": stalls.writing,
        "checkpoint_share": saving / (every + saving) if every else 0.0,
    }
    stalled = step / (step + stalls.waiting)
    if not mtbf:
        return found | {"effective": stalled * (1 - found["checkpoint_share"])}
    failing = _failing(plan, stalls, mtbf, restart)
    return found | failing | {"effective": stalled * failing["goodput"]}


def _failing(plan: Plan, stalls: Stalls, mtbf: float, restart: float) -> dict[str, float]:
    """What failures take. A checkpoint counts when it is written, and is read after a failure. Without an interval in
    the recipe failures meet the best, which is a whole number of steps. Raises UserError: the run never ends."""
    cluster, between, each = plan.setting.cluster, mtbf / plan.ranks, plan.step.seconds + stalls.waiting
    reading = stalls.checkpoint / max(1, cluster.nodes) / cluster.storage.read

    def back(steps: int) -> float:
        return restart + reading + max(0.0, stalls.writing - stalls.saved(steps))

    def goodput(steps: int) -> float:
        return failures.goodput(steps * each, stalls.saved(steps), between, back(steps))

    longest = max(failures.best_interval(stalls.copied, between), stalls.writing)
    best = failures.best_steps(goodput, 2 + math.ceil(2 * longest / each))
    every = stalls.every or best
    share, most = goodput(every), goodput(best)
    if share < 0.001:
        raise UserError(
            f"{plan.ranks:,} devices that each fail every {mtbf / DAY:.3g} days fail every {between / 60:.3g} minutes: "
            f"with a checkpoint every {every * each / 60:.3g} minutes the run never ends. "
            f"Best: checkpoint.minutes = {_minutes(best * each)}, with a goodput of {100 * most:.2g}%"
        )
    return {
        "mtbf_s": mtbf,
        "failure_every_s": between,
        "back_s": back(every),
        "goodput": share,
        "best_interval_s": best * each,
        "best_interval_steps": best,
        "best_goodput": most,
    }


def _minutes(seconds: float) -> str:
    """Rounded down to three digits: `checkpoint.minutes` is rounded up to whole steps."""
    unit = 10.0 ** (math.floor(math.log10(seconds / 60)) - 2)
    return f"{math.floor(seconds / 60 / unit) * unit:.3g}"


def lines(answers: dict[str, Any]) -> list[str]:
    cost, number = "", {k: short_number(v) for k, v in answers.items() if type(v) in (int, float)}
    if "cost" in answers:
        cost = f", {answers['cost']:,.0f} at this price ({answers['cost_per_1e9_tokens']:.4g} per 1B tokens)"
    text = [
        f"budget        {number['tokens']} tokens, {number['active_parameters']} active parameters: "
        f"{answers['flops_6nd']:.3g} FLOPs (6 N D), {answers['flops_with_attention']:.3g} with attention",
        f"time          {answers['days']:.4g} days at {number['tokens_per_day']} tokens per day, "
        f"{answers['device_hours']:,.0f} device-hours{cost}",
    ]
    if "energy_mwh" in answers:
        text.append(
            f"energy        at most {answers['energy_mwh']:,.4g} MWh, at {answers['device_watts']:,.0f} W per device: "
            "network, cooling, and hosts that the data sheet does not count are not in it"
        )
    text += _lost_lines(answers)
    if "devices_for_deadline" in answers:
        days, devices = answers["deadline_days"], answers["devices_for_deadline"]
        met = (
            f"met; {devices:,} devices would do"
            if answers["days"] <= days
            else f"not met; {devices:,} devices do"
        )
        text.append(f"deadline      {days:.4g} days: {met} at this speed per device")
    if "searched" in answers:
        text.append(f"              {answers['searched']}")
    best, other = ({k: short_number(v) for k, v in answers[law].items()} for law in ("chinchilla", "kaplan"))
    source = answers["critical_batch_from"]
    return [
        *text,
        f"compute       best for this model: {number['optimal_tokens']} tokens (20 per parameter); best for these "
        f"FLOPs: {best['parameters']} parameters on {best['tokens']} tokens (Chinchilla), "
        f"{other['parameters']} on {other['tokens']} (Kaplan)",
        f"batch         critical size {number['critical_batch_tokens']} tokens (from the {source}); this batch of "
        f"{answers['batch_tokens']:,} takes {answers['steps_over_fewest']:.3g} times the fewest steps and "
        f"{answers['tokens_over_fewest']:.3g} times the fewest tokens",
    ]


def _lost_lines(answers: dict[str, Any]) -> list[str]:
    if "checkpoint_bytes" not in answers:
        return []
    every, stall = answers["checkpoint_every_s"], answers["checkpoint_stall_s"]
    often = f"every {every / 60:.3g} minutes" if every else "at the end"
    text = (
        f"checkpoints   {answers['checkpoint_bytes'] / 1e9:,.4g} GB {often}: steps wait {stall:.3g} s for each, "
        f"{100 * answers['checkpoint_share']:.2g}% of the time; written in {answers['checkpoint_writing_s']:.3g} s"
    )
    if "goodput" not in answers:
        return [text, "failures      not counted (--mtbf TIME: between failures of one device)"]
    return [
        text,
        f"failures      one every {answers['failure_every_s'] / 3600:.3g} hours, with {answers['back_s'] / 60:.3g} "
        f"minutes until training goes on: goodput {100 * answers['goodput']:.1f}%; with a checkpoint every "
        f"{_minutes(answers['best_interval_s'])} minutes ({several(answers['best_interval_steps'], 'step')}), which is "
        f"best, {100 * answers['best_goodput']:.1f}%",
    ]
