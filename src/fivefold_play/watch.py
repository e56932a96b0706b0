"""What can be seen of a run from outside while it trains: the lines of its metrics as they come, and what its ranks do
now. Nothing is asked of the run itself."""

from __future__ import annotations

import math
import os
import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from fivefold.errors import UserError, printable
from fivefold.files import in_use, open_file, owner, parse_json, read_facts
from fivefold.observe import faults
from fivefold.observe.metrics import FILE, json_object
from fivefold.recipe import load
from fivefold.sharding.layout import Layout, to_text

CURVES = ("loss", "tokens_per_s", "mfu", "grad_norm", "lr", "step_s", "peak_memory_bytes")
"""Columns of the steps."""
DRAWN, MANY = ("loss", "tokens_per_s"), 5000
"""Columns that the page draws first, and the steps from which on these come before the others."""
VALIDATION = ("val_loss", "val_bits_per_byte")
ORDINARY = {"step", "tokens", "data_wait_s", *CURVES, *VALIDATION}
"""Keys of a line that tells nothing unusual."""
AT_ONCE = 256 << 20
"""Bytes of metrics that are read at once, at most."""
LONGEST_SAMPLE = 4000
LAST = 50
"""Samples, and alarms, that are sent of what has been."""
PHASES = {"sampling": "writes a sample", "saving": "saves a checkpoint", "starting": "starts"}


class Tail:
    """Reads the new lines of a run's metrics. A run that resumes writes its file anew, without the steps that run
    again: then `read` begins anew, too."""

    def __init__(self, run: Path) -> None:
        self.path, self.file, self.at = run / FILE, (0, 0), 0

    def read(self) -> Iterator[dict[str, Any]]:
        """What is new, if anything is: {again: True if the earlier lines do not count any more; columns, validation:
        {name: values}; samples, alarms: [[step, text]]}. Of many steps, further columns follow, behind {}."""
        try:
            with open_file(self.path) as file:
                there = os.fstat(file.fileno())
                again = (there.st_dev, there.st_ino) != self.file or there.st_size < self.at
                if again:
                    self.file, self.at = (there.st_dev, there.st_ino), 0
                file.seek(self.at)
                whole, newline, _ = file.read(AT_ONCE).rpartition(b"\n")
        except FileNotFoundError:
            return
        self.at += len(whole) + len(newline)
        if newline or again:
            yield from sorted_out(_parsed(whole), again)


def _parsed(whole: bytes) -> list[Any]:
    """The values of lines of JSON: all at once where that works, which is three times as fast."""
    try:
        return parse_json(b"[%s]" % whole.replace(b"\n", b","))
    except (ValueError, RecursionError):
        return [json_object(line) for line in whole.split(b"\n")]


def _numbers(lines: Sequence[Mapping[str, Any]], key: str) -> list[float | None]:
    """The values of a column to five digits; None where there is no finite number."""
    values = [line.get(key) for line in lines]
    found = np.array([v if type(v) in (int, float) else None for v in values], dtype=float)
    with np.errstate(all="ignore"):
        scale = 10.0 ** (4 - np.floor(np.log10(np.abs(found))))
        rounded = np.where(np.isfinite(scale) & (scale > 0), np.round(found * scale) / scale, found)
    return [v if math.isfinite(v) else None for v in rounded.tolist()]


def sorted_out(content: Sequence[Any], again: bool) -> Iterator[dict[str, Any]]:
    """The values of lines by column; samples and alarms (see `Tail.read`)."""
    lines = [line for line in content if isinstance(line, dict) and type(line.get("step")) is int]
    found, steps = dict[str, Any](again=again), [line for line in lines if CURVES[0] in line]
    first = CURVES if len(steps) < MANY else DRAWN
    others = [line for line in lines if VALIDATION[0] in line]
    for name, rows, keys in (("columns", steps, first), ("validation", others, VALIDATION)):
        found[name] = {"step": [row["step"] for row in rows]} | {key: _numbers(rows, key) for key in keys}
    texts = [(line["step"], line["sample"]) for line in lines if isinstance(line.get("sample"), str)][-LAST:]
    alarms = [[line["step"], text] for line in lines if not line.keys() <= ORDINARY for text in _wrong(line)]
    samples = [[step, printable(text[:LONGEST_SAMPLE])] for step, text in texts]
    yield found | {"samples": samples, "alarms": alarms[-LAST:]}
    if later := [key for key in CURVES if key not in first]:
        yield {}  # these can wait until the first ones are drawn
        yield {"columns": {key: _numbers(steps, key) for key in later}}


def _wrong(line: Mapping[str, Any]) -> Iterator[str]:
    """What went wrong in a step, in words."""
    if isinstance(text := line.get("alarm"), str):
        yield printable(text)
    with suppress(TypeError, ValueError):  # figures of another kind
        kinds = [kind for kind in faults.found_in(line) if kind != "overflow"]
        yield from (faults.described(kind, line) for kind in kinds)
    if isinstance(back := line.get(faults.ROLLBACK), dict):
        yield printable(f"{str(back.get('why'))[:300]}. The run went back to this step")


def ranks(run: Path) -> list[dict[str, Any]]:
    """The ranks of a run on this machine: {rank, memory (resident bytes), does (in words), step}. Empty: it does not
    train here, or the system does not show its processes."""
    if (first := owner(run)) is None:
        return []
    found, waiting = list[dict[str, Any]](), [first]
    while waiting:
        pid = waiting.pop()
        with suppress(OSError, ValueError):
            waiting += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
            post = _post(pid)
            if post is None and pid != first:
                continue
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            rank = {"rank": 0, "step": None, "does": "trains"} if post is None else _said(post)
            found.append(rank | {"memory": pages * os.sysconf("SC_PAGE_SIZE"), "own": post is not None})
    posted = [one for one in found if one["own"]]  # without the process that started them
    return sorted(posted or found, key=lambda one: one["rank"])


def _post(pid: int) -> dict[str, Any] | None:
    """What a rank last posted for the others (`comm/watchdog.py`), from the file that it holds open. A rank alone posts
    nothing."""
    for entry in os.scandir(f"/proc/{pid}/fd"):
        if re.search(r"\.ranks/\d+$", os.readlink(entry.path)):
            with suppress(OSError, ValueError), open(entry.path, "rb") as file:
                size = int(file.read(8))
                post = json_object(file.read(size))
                if post and post.get("pid") == pid:
                    return post
    return None


def _said(post: Mapping[str, Any]) -> dict[str, Any]:
    phase, wait, does = str(post["phase"]), post["wait"], "computes"
    if phase:
        does = PHASES.get(phase, f"does {phase}")
    elif wait:
        axis = f" over {wait['axis']}" * bool(wait["axis"])
        does = f"waits in {wait['operation']}{axis}"
    return {"rank": int(post["rank"]), "step": post["step"], "does": printable(does)[:200]}


def plan_of(run: Path) -> dict[str, Any]:
    """What was planned of a run: {step_s, tokens_per_s, mfu, memory}, as far as it was."""
    with suppress(UserError, OSError):
        facts = read_facts(run / "plan.json").get("predicted")
        if isinstance(facts, dict):
            time, memory = facts.get("time"), facts.get("memory")
            found = {key: facts.get(key) for key in ("tokens_per_s", "mfu")}
            found["step_s"] = time.get("step_s") if isinstance(time, dict) else None
            found["memory"] = memory.get("peak_bytes") if isinstance(memory, dict) else None
            return {key: value for key, value in found.items() if type(value) in (int, float)}
    return {}


def layout_of(run: Path) -> str:
    with suppress(UserError):
        return to_text(Layout.from_recipe(load(run / "recipe.toml").layout))
    return ""


def stop(run: Path) -> None:
    """Asks a run to finish its step, save and end: as Ctrl-C in its terminal. Asked again, seconds later, it ends at
    once. Raises UserError: it does not train on this machine."""
    pid = owner(run)
    try:
        if pid is None:
            raise ProcessLookupError
        handle = os.pidfd_open(pid)
        try:
            if owner(run) != pid:  # else it may be another process by now
                raise ProcessLookupError
            signal.pidfd_send_signal(handle, signal.SIGTERM)
        finally:
            os.close(handle)
    except ProcessLookupError:
        where = ", or not on this machine" if in_use(run) else ""
        raise UserError(f"{run} does not train now{where}") from None
