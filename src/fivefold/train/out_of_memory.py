"""Memory that runs out: whether it will, what held it when it did, and what to try, as the planner finds it.

On a GPU PyTorch's allocator adds its own figures. That has not run on one.
"""

from __future__ import annotations

import gc
import json
import os
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch

from fivefold.errors import MemoryRanOut, UserError
from fivefold.host import machine
from fivefold.launch import verdict
from fivefold.launch.ranks import Ranks
from fivefold.observe.format import size
from fivefold_plan.advice.explain import LESS, Remedy, remedies
from fivefold_plan.memory.memory import sums
from fivefold_plan.predict import Plan, limit, priced_here
from fivefold_plan.search.recompute_budget import MARGIN
from fivefold_plan.search.search import search
from fivefold.schedules.timelines import CATEGORIES
from fivefold.sharding.layout import to_text
from fivefold.step.state import State
from fivefold_plan.trace.memory import Tracker, states_of
from fivefold.train.job import Job

NO_MEMORY = ("not enough memory", "can't allocate memory", "Cannot allocate memory", "std::bad_alloc")
NO_SPACE = ("can't start new thread", "could not create a primitive")  # stacks and code take address space
LAYOUTS = 2  # other layouts that are named


def out_of_memory(error: BaseException) -> bool:
    """True for an out-of-memory error. torch has a class for it on GPUs; its CPU allocator and NCCL only say so."""
    if any(words in str(error) for words in NO_SPACE):
        return machine.address_space() is not None
    known = isinstance(error, MemoryError | torch.OutOfMemoryError) or "out of memory" in str(error)
    return known or any(words in str(error) for words in NO_MEMORY)


def held_by(state: State) -> tuple[int, dict[str, int]]:
    """A rank's place in the pipeline, and its bytes of tensors by category. buffers: the rest, if that is known."""
    device = state.mesh.device
    with Tracker(states_of(state), on=device.type) as tracker:
        pass
    sizes = tracker.peak().at_peak
    held = {kind: sizes[kind] for kind in ("params", "gradients", "optimizer")}
    if device.type == "cuda":
        held["buffers"] = torch.cuda.memory_allocated(device) - sum(held.values())
    return state.mesh.index("pp"), held


def allocator(device: torch.device) -> list[str]:
    """The figures of PyTorch's allocator on a GPU."""
    stats, (free, total) = torch.cuda.memory_stats(device), map(size, torch.cuda.mem_get_info(device))
    now, most = (size(stats[f"allocated_bytes.all.{which}"]) for which in ("current", "peak"))
    held = f"{now} of tensors ({most} at most) in {size(stats['reserved_bytes.all.current'])}"
    return [f"The allocator has {held}. The device has {free} of {total} free"]


def foreseen(job: Job, peak_bytes: int, local_ranks: int, base: int) -> list[str]:
    """Lines that say before the first step that memory will run out; none if it suffices. The system may kill a process
    later, without a word. peak_bytes: of a rank's tensors, as planned."""
    there, what, each, gpu = _limit(local_ranks)
    if not there or peak_bytes + base * (not gpu) <= there / each:
        return []
    return [f"memory will run out: {what} is {size(there)}", *advice(job, local_ranks, base)]


def _limit(local_ranks: int) -> tuple[int, str, int, str]:
    """(bytes of the limit or 0, its name, ranks that share it, the GPU's name or "")."""
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
        return torch.cuda.mem_get_info()[1], name, 1, name
    if (limit := machine.limit()) is not None:
        return limit.bytes, limit.what, local_ranks if limit.shared else 1, ""
    return 0, "", 1, ""


def advice(
    job: Job, local_ranks: int, base: int = 0, held: tuple[int, dict[str, int]] | None = None
) -> list[str]:
    """Lines: planned memory of a rank beside what it held and what there is, and changes that need less, as commands.
    held: of `held_by`; None: that is not known, and the rank is the one with most."""
    if job.module is not None:
        return ["The planner does not know a module of your own. Try a smaller train.microbatch_size"]
    there, what, each, gpu = _limit(local_ranks)
    cluster, software = priced_here(gpu)
    room = (there / each - base) * (1 - MARGIN) if there else 0
    if gpu:
        cluster = replace(cluster, device=replace(cluster.device, memory=there), per_node=local_ranks)
        base, room = 0, limit(cluster)
    try:
        plan, changes = remedies(job.recipe, cluster, software, room, bool(gpu))
    except UserError as error:
        return [f"(no prediction: {error})"]
    lines = _parts(plan, held)
    if there:
        taken = f"; {size(base)} of it were taken before the first tensor" if base else ""
        lines.append(f"There are {size(there)} ({what}){f' for {each} ranks' if each > 1 else ''}{taken}")
    if there == machine.address_space() and plan.peak_bytes <= room:
        return [*lines, f"The tensors fit, and {machine.little_space()}"]
    if there and cluster.name:  # else the prices are those of another device
        asked = job.recipe, cluster.for_ranks(plan.ranks), LAYOUTS, software, (plan.setting.mode,)
        with suppress(UserError):  # groups or servers that no search compares
            for one in search(*asked, most=min(room, LESS * plan.peak_bytes)).plans:
                sets, slower = (
                    f"train.microbatch_size={one.setting.sizes.B}",
                    one.step.seconds / plan.step.seconds,
                )
                changes.append(Remedy((sets,), one.peak_bytes, slower, to_text(one.layout)))
    if not changes:
        return [*lines, "The planner knows no change that needs less; use more ranks or a smaller model"]
    changes.sort(key=lambda one: one.rank(room))
    begun = f"{job.resume_command} " if (job.out / "recipe.toml").is_file() else ""
    lines.append(f"Changes that need less, as planned{'' if begun else ', for the same command'}:")
    for one in changes:
        time = f"{one.slower:.2f} times the step"
        if cluster.name:
            time += f" ({one.slower * plan.step.seconds:.3g} instead of {plan.step.seconds:.3g} s)"
        fits = (", fits" if one.peak <= room else ", may not fit") if there else ""
        lines.append(f"  {size(one.peak)}, {time}{fits}: {begun}{one.options}")
    return lines


def what_is_saved(job: Job, saved: str = "Nothing that was saved is lost") -> str:
    """The line that ends the advice."""
    there = (job.out / "checkpoints").exists()
    resumes = f"Resume with a change: {job.resume_command}" if there else "There is no checkpoint yet."
    return f"{saved}. {resumes}"


def _parts(plan: Plan, held: tuple[int, dict[str, int]] | None) -> list[str]:
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


_ASKED = re.compile(r"tried to allocate (\d+) bytes|Tried to allocate ([\d.]+ [KMG]iB)")


@contextmanager
def explains_memory(job: Job, ranks: Ranks, base: int) -> Iterator[list[Any]]:
    """Turns an allocator's error into one message that says what held the memory and what to do; our launcher, which
    has memory, adds that. Saves what is trained, if this rank has all of it and no update was under way. Yields a list
    for the hooks of the rank's loop. base: bytes that count before it has tensors. Raises UserError: memory ran out."""
    running, held = list[Any](), None
    try:
        yield running
    except (MemoryError, RuntimeError, OSError) as error:
        if not out_of_memory(error):
            raise
        where = "before the first step"
        for hooks in running:
            step = hooks.state.step
            where = f"in {'the update of ' if hooks.inspected == step else ''}step {step + 1}"
        lines = [f"rank {ranks.rank} ran out of memory {where}"]
        if asked := _ASKED.search(str(error)):
            lines[0] += f", asking for {size(int(asked[1])) if asked[1] else asked[2]} more"
        try:  # the error's frames still hold the step's tensors
            lines += allocator(ranks.device) if ranks.device.type == "cuda" else []
            held = held_by(running[0].state) if running else None
        except Exception as another:
            lines.append(f"(what held it is not known: {another})")
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
    else:
        return
    if verdict.FOLDER in os.environ:
        raise MemoryRanOut("\n".join([*lines, json.dumps([base, held])])) from None
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    saved = "Nothing that was saved is lost"
    for hooks in running:
        step = hooks.state.step
        alone = ranks.local_world == 1 and hooks.state.mesh.axis("run").size == 1
        if alone and hooks.inspected != step:  # in an update no consistent state can be saved
            saved = f"Step {step} could not be saved"
            with suppress(Exception):
                hooks.save(step, ends=True, waits=False)
                saved = f"Step {step} is saved"
    try:
        lines += advice(job, ranks.local_world, base, held)
    except (MemoryError, RuntimeError, OSError) as another:
        lines.append(f"(no memory is left for the planner's advice: {another or NO_MEMORY[0]})")
    raise UserError("\n".join([*lines, *([what_is_saved(job, saved)] if running else [])])) from None
