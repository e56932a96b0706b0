"""Writes a run's numbers: RUN/metrics.jsonl, one JSON object per line, and to the trackers of `observe.tracker`.

Strict JSON has no NaN and no infinity. A value that is not finite is written as `null` and read back as NaN. A value
that was not measured (`None`) is left out of its line. So every JSON reader accepts the file, and "the loss was NaN"
differs from "no loss here".
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fivefold.errors import UserError
from fivefold.files import Lines, make_folder, open_file, parse_json, write_atomically
from fivefold.observe.trackers import TAGS, Trackers
from fivefold.recipe.entries import chosen

FILE = "metrics.jsonl"
LONGEST_LINE = 16 << 20


class MetricsWriter:
    """Appends lines to `folder`/metrics.jsonl and sends them to trackers. One process writes.

    tracker: as in `observe.tracker`. about: the recipe by section, which trackers show beside the curves. step: the
    step from which this run starts (0: the beginning). Lines of later steps are dropped, because these steps run again.
    An interrupted run leaves such lines after its last checkpoint. damaged: earlier lines that could not be read and
    are dropped, too. A power cut leaves such lines where no checkpoint flushed them.
    """

    def __init__(
        self,
        folder: Path | str,
        tracker: str = "tensorboard",
        *,
        step: int = 0,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        folder = Path(folder)
        make_folder(folder)
        path = folder / FILE
        self.damaged = drop_after(path, step) if path.exists() else 0
        self._folder = folder
        self._file = Lines(path)  # a killed run loses at most the line that it was writing
        self._trackers = Trackers(chosen(tracker), folder, step, about or {})
        self._told = False

    def rewind(self, step: int) -> None:
        """Drops the lines of the steps after this one, which run again."""
        with suppress(OSError):
            self._file.close()
        drop_after(self._folder / FILE, step, whole=False)
        self._file = Lines(self._folder / FILE)
        self._trackers.rewind(step)

    def write(self, metrics: Mapping[str, Any]) -> str:
        """Write one line. `metrics` has an integer `step`; its other values are numbers (also 0-d tensors and
        arrays), text, None, or numbers by name.

        A full or read-only disk is no error: the lines follow when they can be written. Returns what to tell the user
        about that, and about trackers, once; otherwise "".
        """
        line = {key: _plain(value) for key, value in metrics.items() if value is not None}
        assert isinstance(line.get("step"), int), f"a metrics line needs an integer step: {metrics}"
        self._file.write(_text(line))
        self._trackers.write(line)
        problems = self._trackers.news()
        told, self._told = self._told, bool(self._file.error)
        if self._told > told:
            problems.append(f"{self._file.path}: {self._file.error}; lines are kept and written later")
        return "; ".join(problems)

    def require(self) -> None:
        """Raises UserError: the file was removed or renamed, perhaps with the run's folder."""
        self._file.require()

    def flush(self) -> None:
        """Forces the lines to the disk: a checkpoint that survives a power cut needs those before it."""
        self._file.flush()

    def close(self) -> None:
        """Flushes and closes the file and the trackers, and says what they could not take. Further calls do nothing.
        A full disk was said where lines were written."""
        with suppress(OSError):
            self._file.close()
        self._trackers.close()
        for said in self._trackers.news():
            print(f"WARNING: {said}", file=sys.stderr)


def read_metrics(path: Path | str) -> list[dict[str, Any]]:
    """The lines of a metrics file, in order; `path` is the file or its run folder. Null becomes NaN.

    An incomplete last line is left out (the run was killed while writing, or is still writing).
    Raises: UserError if there is no such file, or if another line is not a JSON object with a step.
    """
    path = Path(path)
    path = path / FILE if path.is_dir() else path
    if not path.is_file():
        raise UserError(f"{path}: no metrics here; pass a run folder made by `fivefold train`")
    lines = []
    for number, (raw, line) in enumerate(_parsed(path), 1):
        if line is None:
            shown = raw[:60].decode("utf-8", "backslashreplace").strip()
            raise UserError(f"{path}, line {number}: not a JSON object with an integer `step`: {shown!r}")
        lines.append(line)
    return lines


def last_line(run: Path, tail: int = 1 << 16) -> dict[str, Any] | None:
    """The newest line of a step in a run that may be under way, or None."""
    try:
        with open_file(run / FILE) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - tail))
            lines = file.read().split(b"\n")
    except OSError:
        return None
    for raw in reversed(lines[:-1]):
        line = json_object(raw)
        if line is not None and isinstance(line.get("step"), int) and "step_s" in line:
            return line
    return None


def write_trace(run: Path, name: str, facts: Any) -> Path:
    """Writes RUN/traces/NAME.json, and returns its path."""
    make_folder(run / "traces")
    path = run / "traces" / f"{name}.json"
    write_atomically(path, json.dumps(facts) + "\n")
    return path


def json_object(raw: bytes) -> dict[str, Any] | None:
    """The JSON object of a line; None if it is damaged."""
    try:
        line = parse_json(raw)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) else None


def _parsed(path: Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Each complete line of `path` with its values, or None if it is damaged. It reads bytes, so that a cut UTF-8
    character is harmless."""
    with open_file(path) as file:
        while raw := file.readline(LONGEST_LINE):
            if not raw.endswith(b"\n") and len(raw) < LONGEST_LINE:
                return
            line = json_object(raw)
            if line and isinstance(line.get("step"), int) and all(map(_is_metric, line, line.values())):
                yield raw, {key: math.nan if value is None else value for key, value in line.items()}
            else:
                yield raw, None


def _is_metric(key: str, value: Any) -> bool:
    """True for null and numbers; outside of `TAGS` also for text, and for a list or numbers by name."""
    if key in TAGS:
        return value is None or isinstance(value, int | float)
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
    return all(part is None or isinstance(part, int | float | str) for part in parts)


def drop_after(path: Path, step: int, whole: bool = True) -> int:
    """Rewrites `path` without the lines after `step` and without damaged ones. A crash here loses nothing.

    whole: step 0 drops all lines. Returns the number of damaged lines before kept ones."""
    kept: list[str] = []
    damaged = dropped = 0
    for _, line in _parsed(path) if step > 0 or not whole else ():
        if line is None:
            damaged += 1
        elif line["step"] <= step:
            kept.append(_text(line))
            dropped = damaged
    write_atomically(path, "".join(f"{line}\n" for line in kept))
    return dropped


def _text(line: Mapping[str, Any]) -> str:
    return json.dumps(_no_nan(line), allow_nan=False, ensure_ascii=False)


def _plain(value: Any) -> Any:
    """A tensor's or array's value as a Python number. Lone surrogates become escapes, because UTF-8 has none."""
    if hasattr(value, "item"):
        value = value.item()
    return value.encode("utf-8", "backslashreplace").decode("utf-8") if isinstance(value, str) else value


def _no_nan(line: Mapping[str, Any]) -> dict[str, Any]:
    return {
        k: _no_nan(v) if isinstance(v, dict) else None if isinstance(v, float) and not math.isfinite(v) else v
        for k, v in line.items()
    }
