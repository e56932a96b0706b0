"""What a run says when memory runs out: what the planner predicts, what the machine has, and the nearest changes that
need less. Instead of a traceback."""

from __future__ import annotations

import gc
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch

from fivefold.errors import UserError
from fivefold.host import memory
from fivefold.observe.format import size
from fivefold.plan.advice.remedies import remedies
from fivefold.plan.predict import priced_here
from fivefold.plan.search.recompute_budget import MARGIN
from fivefold.schedules.timelines import CATEGORIES
from fivefold.train.hooks import RunHooks, out_of_memory
from fivefold.train.job import Job

_ASKED = re.compile(r"tried to allocate (\d+) bytes|Tried to allocate ([\d.]+ [KMG]iB)")


@dataclass
class Told:
    """A rank that says what to do when its memory runs out. base: bytes that count before it has tensors. hooks: of its
    loop, when there is one."""

    job: Job
    rank: int
    local_ranks: int
    base: int
    hooks: RunHooks | None = None


@contextmanager
def told(job: Job, rank: int = 0, local_ranks: int = 1) -> Iterator[Told]:
    """Turns an allocator's error into one message.

    Raises:
        UserError: memory ran out.
    """
    limit = memory.limit()
    one = Told(job, rank, local_ranks, limit.held if limit else 0)
    try:
        yield one
    except (MemoryError, RuntimeError, OSError) as error:
        if not out_of_memory(error):
            raise
        message = _first_line(one, error)
        traceback.clear_frames(error.__traceback__)  # they hold the step's tensors
        error.__traceback__ = None
    else:
        return
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    saved = _save(one)
    raise UserError("\n".join([message, *advice(job, local_ranks, one.base), *saved])) from None


def _first_line(one: Told, error: BaseException) -> str:
    when = f"in step {one.hooks.state.step + 1}" if one.hooks else "before the first step"
    asked = _ASKED.search(str(error))
    more = ""
    if asked:
        more = f", asking for {size(int(asked[1])) if asked[1] else asked[2]} more"
    return f"rank {one.rank} ran out of memory {when}{more}"


def _save(one: Told) -> list[str]:
    """Saves what is trained, if this rank has all of it and no update was under way."""
    hooks = one.hooks
    if hooks is None or one.local_ranks > 1 or hooks.state.mesh.axis("run").size > 1 or hooks.updating:
        return [f"Nothing that was saved is lost. {_resume(one.job)}"] if hooks else []
    with suppress(Exception):
        hooks.save(hooks.state.step, ends=True, waits=False)
        return [f"Step {hooks.state.step} is saved. {_resume(one.job)}"]
    return [f"Step {hooks.state.step} could not be saved. {_resume(one.job)}"]


def _resume(job: Job) -> str:
    if not (job.out / "checkpoints").exists():
        return "There is no checkpoint yet."
    return f"Resume with the change: {job.resume_command}"


def foreseen(job: Job, peak_bytes: int, local_ranks: int, base: int) -> list[str]:
    """Lines that say before the first step that memory will run out; none if it suffices. The system may kill a process
    later, without a word. peak_bytes: of a rank's tensors, as planned."""
    there, what, each, _ = _limit(local_ranks)
    if not there or peak_bytes + base <= there / each:
        return []
    return [f"memory will run out: {what} is {size(there)}", *advice(job, local_ranks, base)]


def _limit(local_ranks: int) -> tuple[int, str, int, str]:
    """(bytes of the limit or 0, its name, ranks that share it, the GPU's name or "")."""
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
        return torch.cuda.mem_get_info()[1], name, 1, name
    if (limit := memory.limit()) is not None:
        return limit.bytes, limit.what, local_ranks if limit.shared else 1, ""
    return 0, "", 1, ""


def advice(job: Job, local_ranks: int, base: int = 0) -> list[str]:
    """Lines: predicted memory of the rank with most beside what there is, and changes that need less."""
    if job.module is not None:
        return ["The planner does not know a module of your own. Try a smaller train.microbatch_size"]
    there, what, each, name = _limit(local_ranks)
    on_gpu = bool(name)
    room = there / each - base
    try:
        plan, found = remedies(job.recipe, *priced_here(name), room * (1 - MARGIN) if there else 0, on_gpu)
    except UserError as error:
        return [f"(no prediction: {error})"]
    held = max(plan.memory, key=lambda one: one.total)
    parts = ", ".join(f"{words} {size(getattr(held, name))}" for name, words in CATEGORIES.items())
    has = f" There are {size(there)} ({what})" if there else ""
    shared = f" for {each} ranks" if each > 1 else ""
    took = f"; {size(base)} of it were taken before the first tensor" if there and base else ""
    lines = [f"Predicted for a rank: {parts}: {size(held.total)} of tensors.{has}{shared}{took}"]
    if there == memory.address_space() and held.total <= room * (1 - MARGIN):
        return [*lines, f"The tensors fit, and {memory.little_space()}"]
    if not found:
        return [*lines, "The planner knows no change that needs less; use more ranks or a smaller model"]
    lines.append("Changes that need less, as predicted:")
    width = max(len(one.options) for one in found)
    for one in found:
        fits = "" if not there else ": fits" if one.peak <= room * (1 - MARGIN) else ": may not fit"
        lines.append(f"  {one.options:{width}}  {size(one.peak)}, {one.slower:.2f} times the step{fits}")
    return lines
