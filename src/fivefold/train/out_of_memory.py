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
from typing import Any

import torch

from fivefold import wings
from fivefold.errors import MemoryRanOut, UserError
from fivefold.host import machine
from fivefold.launch import verdict
from fivefold.launch.ranks import Ranks
from fivefold.observe.format import size
from fivefold.step.state import State
from fivefold.train.forecast import Held, Room, forecast
from fivefold.train.job import Job

NO_MEMORY = ("not enough memory", "can't allocate memory", "Cannot allocate memory", "std::bad_alloc")
NO_SPACE = ("can't start new thread", "could not create a primitive")  # stacks and code take address space


def out_of_memory(error: BaseException) -> bool:
    """True for an out-of-memory error. torch has a class for it on GPUs; its CPU allocator and NCCL only say so."""
    if any(words in str(error) for words in NO_SPACE):
        return machine.address_space() is not None
    known = isinstance(error, MemoryError | torch.OutOfMemoryError) or "out of memory" in str(error)
    return known or any(words in str(error) for words in NO_MEMORY)


def held_by(state: State) -> Held:
    """A rank's place in the pipeline, and its bytes of tensors by category. buffers: the rest, if that is known."""
    device = state.mesh.device
    with forecast().tracker(state, device.type) as tracker:
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
    there, what, each, gpu = _room(local_ranks)
    if not there or peak_bytes + base * (not gpu) <= there / each:
        return []
    return [f"memory will run out: {what} is {size(there)}", *advice(job, local_ranks, base)]


def _room(local_ranks: int) -> Room:
    """The memory of this machine, as far as it is known."""
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
        return Room(torch.cuda.mem_get_info()[1], name, 1, name)
    if (limit := machine.limit()) is not None:
        return Room(limit.bytes, limit.what, local_ranks if limit.shared else 1, "")
    return Room(0, "", 1, "")


def advice(job: Job, local_ranks: int, base: int = 0, held: Held | None = None) -> list[str]:
    """Lines: planned memory of a rank beside what it held and what there is, and changes that need less, as commands.
    held: of `held_by`; None: that is not known, and the rank is the one with most."""
    if job.module is not None:
        return ["The planner does not know a module of your own. Try a smaller train.microbatch_size"]
    try:
        return forecast().remedies(job, _room(local_ranks), local_ranks, base, held)
    except wings.Missing as error:
        return [f"(no advice: {error})"]


def what_is_saved(job: Job, saved: str = "Nothing that was saved is lost") -> str:
    """The line that ends the advice."""
    there = (job.out / "checkpoints").exists()
    resumes = f"Resume with a change: {job.resume_command}" if there else "There is no checkpoint yet."
    return f"{saved}. {resumes}"


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
