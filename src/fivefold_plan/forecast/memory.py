"""What held a rank's memory when it ran out, and what to try."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from fivefold.errors import UserError
from fivefold.host import machine
from fivefold.observe.format import size
from fivefold.schedules.timelines import CATEGORIES
from fivefold.sharding.layout import to_text
from fivefold.train.forecast import Held, Room
from fivefold.train.job import Job
from fivefold_plan.advice.explain import LESS, Remedy
from fivefold_plan.advice.explain import remedies as changes_of
from fivefold_plan.memory.memory import sums
from fivefold_plan.predict import Plan, limit, priced_here
from fivefold_plan.search.recompute_budget import MARGIN
from fivefold_plan.search.search import search

LAYOUTS = 2  # other layouts that are named


def remedies(job: Job, room: Room, local_ranks: int, base: int, held: Held | None) -> list[str]:
    """See `Forecast.remedies`."""
    there, what, each, gpu = room
    cluster, software = priced_here(gpu)
    least = (there / each - base) * (1 - MARGIN) if there else 0
    if gpu:
        cluster = replace(cluster, device=replace(cluster.device, memory=there), per_node=local_ranks)
        base, least = 0, limit(cluster)
    try:
        plan, changes = changes_of(job.recipe, cluster, software, least, bool(gpu))
    except UserError as error:
        return [f"(no prediction: {error})"]
    lines = _table(plan, held)
    if there:
        taken = f"; {size(base)} of it were taken before the first tensor" if base else ""
        lines.append(f"There are {size(there)} ({what}){f' for {each} ranks' if each > 1 else ''}{taken}")
    if there == machine.address_space() and plan.peak_bytes <= least:
        return [*lines, f"The tensors fit, and {machine.little_space()}"]
    if there and cluster.name:  # else the prices are those of another device
        asked = job.recipe, cluster.for_ranks(plan.ranks), LAYOUTS, software, (plan.setting.mode,)
        with suppress(UserError):  # groups or servers that no search compares
            for one in search(*asked, most=min(least, LESS * plan.peak_bytes)).plans:
                sets, slower = (
                    f"train.microbatch_size={one.setting.sizes.B}",
                    one.step.seconds / plan.step.seconds,
                )
                changes.append(Remedy((sets,), one.peak_bytes, slower, to_text(one.layout)))
    if not changes:
        return [*lines, "The planner knows no change that needs less; use more ranks or a smaller model"]
    changes.sort(key=lambda one: one.rank(least))
    begun = f"{job.resume_command} " if (job.out / "recipe.toml").is_file() else ""
    lines.append(f"Changes that need less, as planned{'' if begun else ', for the same command'}:")
    for one in changes:
        time = f"{one.slower:.2f} times the step"
        if cluster.name:
            time += f" ({one.slower * plan.step.seconds:.3g} instead of {plan.step.seconds:.3g} s)"
        fits = (", fits" if one.peak <= least else ", may not fit") if there else ""
        lines.append(f"  {size(one.peak)}, {time}{fits}: {begun}{one.options}")
    return lines


def _table(plan: Plan, held: Held | None) -> list[str]:
    """A table of planned bytes by category, beside those that the rank held."""
    worst = max(range(len(plan.memory)), key=lambda i: plan.memory[i].total)
    number, sizes = held if held is not None and not plan.service else (worst, {})
    rank, now = plan.memory[number], {kind: size(bytes) for kind, bytes in sizes.items()}
    if "buffers" in now:
        now |= {"buffers": f"{now['buffers']} with activations", "total": size(sum(sizes.values()))}
    rows = [(words, getattr(rank, kind), now.get(kind, "")) for kind, words in CATEGORIES.items()]
    if not plan.service and plan.setting.ends(number)[1]:
        rows.append(("of these the loss", sums(plan.setting).loss, ""))
    rows.append(("all tensors", rank.total, now.get("total", "")))
    lines = [f"  {words:28}{size(bytes):>10}  {text}".rstrip() for words, bytes, text in rows]
    return [f"{'Tensors of a rank:':30}{'planned':>10}{'  held then' if now else ''}", *lines]
