"""Sends a run's numbers to the trackers of `observe.tracker`, beside metrics.jsonl, which stays the record.

A tracker that fails is left out from then on, with one warning: training does not stop for it. Those that use a network
or a library of their own work on a thread, so that no step waits for them.
"""

from __future__ import annotations

import csv
import io
import json
import math
import netrc
import os
import re
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from queue import Full, Queue
from threading import Thread
from typing import Any, Protocol
from urllib.parse import urlsplit

from fivefold.files import (
    UNOPENED,
    Lines,
    guard,
    inside,
    make_folder,
    open_file,
    read_facts,
    stream,
    write_atomically,
)

Line = Mapping[str, Any]

TAGS = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "lr": "train/lr",
    "val_loss": "val/loss",
    "val_bits_per_byte": "val/bits_per_byte",
    "step_s": "speed/step_s",
    "data_wait_s": "speed/data_wait_s",
    "tokens_per_s": "speed/tokens_per_s",
    "mfu": "speed/mfu",
    "hfu": "speed/hfu",
    "noise_scale": "train/noise_scale",
    "loss_scale": "train/loss_scale",
    "skipped_steps": "train/skipped_steps",
    "compression_error": "train/compression_error",
    "peak_memory_bytes": "memory/peak_bytes",
    "tokens": "train/tokens",
}
"""Names of metrics in trackers, which group charts by the part before the slash."""
TAGS_BY_NAME = {
    "val_losses": "val/loss",
    "val_bits": "val/bits_per_byte",
    "source_tokens": "train/tokens",
}
"""Of values that are numbers by name: a chart for each."""
IDS = "trackers.json"
"""File of a run folder: the names that trackers have given the run, so that a resumed run continues them."""
MOST_WAITING = 10_000
"""Lines that wait for a tracker at most. A slower one loses lines, and it is said."""
AT_ONCE = 64
CLOSE_S = 30.0
"""Seconds that the end of a run waits for a tracker."""
FILE_STORE = "MLFLOW_ALLOW_FILE_STORE"
"""Newer MLflow wants a database for all runs, and asks for this where files are meant."""
SECRETS = ("WANDB_API_KEY", "MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_USERNAME")


class Sink(Protocol):
    """A tracker that is open."""

    def write(self, lines: Sequence[Line]) -> None: ...
    def rewind(self, step: int) -> None:
        """The steps after this one run again. By default its curves show them twice."""

    def close(self) -> None: ...


class Trackers:
    """The trackers of a run. names: of `KINDS`. step: after which the run starts. about: its recipe, by section."""

    def __init__(self, names: Sequence[str], folder: Path, step: int, about: Mapping[str, Any]) -> None:
        self._open: dict[str, Sink] = {}
        self._news: list[str] = []
        for name in names:
            make, apart = KINDS[name]
            with self._reported(name, step):
                begin = partial(make, folder, step, about)
                self._open[name] = Behind(begin) if apart else begin()

    def write(self, line: Line) -> None:
        for name, sink in list(self._open.items()):
            with self._reported(name, line["step"]):
                sink.write([line])

    def rewind(self, step: int) -> None:
        for name, sink in list(self._open.items()):
            with self._reported(name, step):
                sink.rewind(step)

    def close(self) -> None:
        """Sends what is left. Further calls do nothing."""
        for name, sink in list(self._open.items()):
            with self._reported(name, None):
                sink.close()
        self._open.clear()

    def news(self) -> list[str]:
        """What to tell the user since the last call."""
        news, self._news = self._news, []
        return news

    @contextmanager
    def _reported(self, name: str, step: int | None) -> Iterator[None]:
        """A tracker that fails here is left out from now on, and there is news of it."""
        try:
            yield
        except Exception as error:
            self._open.pop(name, None)
            where = "is incomplete" if step is None else f"ends at step {step}"
            why = without_secrets(f"{type(error).__name__}: {error}".strip().splitlines()[0][:300])
            self._news.append(f"tracker {name} {where}: {why}. metrics.jsonl has every line")


class Behind(Sink):
    """A tracker on a thread. An error there is raised by the next call here."""

    def __init__(self, make: Callable[[], Sink]) -> None:
        self._waiting: Queue[Line | None] = Queue(MOST_WAITING)
        self._error: Exception | None = None
        self._thread = Thread(target=self._run, args=(make,), name="tracker", daemon=True)
        self._thread.start()

    def _run(self, make: Callable[[], Sink]) -> None:
        try:
            sink, lines = make(), list[Line | None]()
            while None not in lines:
                lines = [self._waiting.get()]
                while len(lines) < AT_ONCE and not self._waiting.empty():
                    lines.append(self._waiting.get())
                sink.write([line for line in lines if line is not None])
            sink.close()
        except Exception as error:
            self._error = error

    def write(self, lines: Sequence[Line]) -> None:
        if self._error is not None:
            raise self._error
        try:
            for line in lines:
                self._waiting.put_nowait(line)
        except Full:
            raise TimeoutError(f"{MOST_WAITING:,} lines wait for it") from None

    def close(self) -> None:
        with suppress(Full):
            self._waiting.put(None, timeout=CLOSE_S)
        self._thread.join(CLOSE_S)
        if self._error is not None:
            raise self._error
        if self._thread.is_alive():
            raise TimeoutError(f"it has not taken every line within {CLOSE_S:g} s")


def numbers(line: Line) -> dict[str, float]:
    """The numbers of a line, as trackers take them."""
    figures: dict[str, float] = {}
    for key, value in line.items():
        if key in TAGS_BY_NAME and isinstance(value, Mapping):
            parts = {f"{TAGS_BY_NAME[key]}/{name}": part for name, part in value.items()}
        else:
            parts = {TAGS.get(key) or (f"val/{key[4:]}" if key.startswith("val_") else f"other/{key}"): value}
        if key != "step":
            figures |= {name: float(part) for name, part in parts.items() if isinstance(part, int | float)}
    return figures


def without_secrets(text: str) -> str:
    """The text without logins: those of the environment, and the user and query parts of addresses."""
    for name in SECRETS:
        if value := os.environ.get(name):
            text = text.replace(value, f"${name}")
    text = re.sub(r"(\b[\w+.-]+://)[^/@\s]*@", r"\1", text)
    return re.sub(r"(\b[\w+.-]+://[^\s?'\"]*)\?[^\s'\"]*", r"\1", text)


def fields(about: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe's fields by "section.key", without logins."""
    return {
        f"{section}.{key}": _clean(value)
        for section, values in about.items()
        for key, value in values.items()
        if value is not None
    }


def _clean(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _clean(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(part) for part in value]
    return without_secrets(value) if isinstance(value, str) else value


def remembered(folder: Path) -> dict[str, str]:
    """What trackers have called this run before."""
    names, plain = read_facts(folder / IDS), re.compile(r"[\w-]{1,64}", re.ASCII)
    return {kind: name for kind, name in names.items() if isinstance(name, str) and plain.fullmatch(name)}


def remember(folder: Path, kind: str, name: str) -> None:
    write_atomically(folder / IDS, json.dumps(remembered(folder) | {kind: name}) + "\n")


class TensorBoard(Sink):
    """One event file in RUN/tensorboard, written with TensorBoard's own record writer.

    It is imported here, which takes 0.2 s. The writer in torch.utils.tensorboard starts a thread and takes ten times as
    long.
    """

    def __init__(self, folder: Path, step: int, about: Mapping[str, Any]) -> None:
        # Any, because the generated protobuf modules define their classes at run time.
        event_pb2: Any = import_module("tensorboard.compat.proto.event_pb2")
        summary_pb2: Any = import_module("tensorboard.compat.proto.summary_pb2")
        self._event, self._summary, self._log = event_pb2.Event, summary_pb2.Summary, event_pb2.SessionLog
        self._folder = folder / "tensorboard"
        self._begin(step)

    def _begin(self, step: int) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        make_folder(self._folder)
        earlier = any(self._folder.iterdir())
        # TensorBoard sorts a folder's files by name, so the time comes first, then host and process.
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}.{time.time_ns()}"
        self._file = stream(self._folder / name)
        self._records = RecordWriter(self._file)
        self._put(self._event(wall_time=time.time(), file_version="brain.Event:2"))
        if earlier:  # tells TensorBoard to hide what earlier files say about the steps from here on
            start = self._log(status=self._log.START)
            self._put(self._event(wall_time=time.time(), step=step + 1 if step else 0, session_log=start))

    def write(self, lines: Sequence[Line]) -> None:
        """Writes every number as a scalar, and a `sample` as text."""
        for line in lines:
            summary = self._summary()
            for name, value in numbers(line).items():
                summary.value.add(tag=name, simple_value=value)
            if "sample" in line:
                entry = summary.value.add(tag="sample")
                entry.metadata.plugin_data.plugin_name = "text"
                entry.tensor.dtype = 7  # DT_STRING
                entry.tensor.tensor_shape.dim.add(size=1)
                # The text plugin renders Markdown, and an indented block shows the sample as it is.
                text = "".join(f"    {row}\n" for row in str(line["sample"]).splitlines())
                entry.tensor.string_val.append(text.encode())
            if summary.value:
                self._put(self._event(wall_time=time.time(), step=line["step"], summary=summary))

    def _put(self, event: Any) -> None:
        self._records.write(event.SerializeToString())
        self._file.flush()

    def rewind(self, step: int) -> None:
        self.close()
        self._begin(step)

    def close(self) -> None:
        with suppress(OSError):
            self._file.close()


class Csv(Sink):
    """RUN/metrics.csv: a row per line of metrics.jsonl, a column per number. A new column rewrites the file."""

    def __init__(self, folder: Path, step: int, about: Mapping[str, Any]) -> None:
        self._path = folder / "metrics.csv"
        self.rewind(step)

    def rewind(self, step: int) -> None:
        rows = self._rows() if step and self._path.is_file() else []
        self._columns = list(dict.fromkeys(["step", *(key for row in rows for key in row)]))
        self._rewrite([row for row in rows if row["step"].isdigit() and int(row["step"]) <= step])

    def _rows(self) -> list[dict[str, str]]:
        with open_file(self._path) as file:
            text = file.read().decode("utf-8", "replace")
        complete = text[: text.rfind("\n") + 1]
        return [row for row in csv.DictReader(io.StringIO(complete)) if row.get("step")]

    def _rewrite(self, rows: Sequence[Mapping[str, Any]]) -> None:
        text = ",".join(self._columns) + "\n" + "".join(f"{self._row(row)}\n" for row in rows)
        write_atomically(self._path, text)
        self._file = Lines(self._path)

    def _row(self, row: Mapping[str, Any]) -> str:
        return ",".join("" if row.get(name) is None else str(row[name]) for name in self._columns)

    def write(self, lines: Sequence[Line]) -> None:
        for line in lines:
            row = {k: v for k, v in line.items() if isinstance(v, int | float)}
            named = {key: line[key] for key in TAGS_BY_NAME if isinstance(line.get(key), Mapping)}
            row |= {f"{key}.{name}": v for key, parts in named.items() for name, v in parts.items()}
            if len(row) < 2:
                continue  # a sample, an alarm
            new = [name for name in row if name not in self._columns]
            if new:
                self._file.close()
                rows = self._rows()
                self._columns += new
                self._rewrite(rows)
            self._file.write(self._row(row))

    def close(self) -> None:
        self._file.close()


class Wandb(Sink):
    """A run of Weights & Biases. Its settings come from their own environment variables. Without a login it works
    offline, into RUN/wandb, which `wandb sync` uploads."""

    def __init__(self, folder: Path, step: int, about: Mapping[str, Any]) -> None:
        wandb: Any = import_module("wandb")
        for home in UNOPENED:
            _require_unlinked(folder / home)
        name = remembered(folder).get("wandb") or uuid.uuid4().hex[:12]
        remember(folder, "wandb", name)
        mode = os.environ.get("WANDB_MODE") or ("online" if _logged_in(wandb) else "offline")
        # What it would note of its own: the command line and the git remote, which may hold a login.
        settings = wandb.Settings(
            console="off",
            silent=True,
            disable_git=True,
            x_disable_meta=True,
            disable_code=True,
            symlink=False,
        )
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or "fivefold",
            name=os.environ.get("WANDB_NAME") or folder.absolute().name,
            id=name,
            resume="allow",
            dir=str(inside(folder)),
            config=fields(about),
            settings=settings,
            mode=mode,
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")  # a resumed run repeats steps

    def write(self, lines: Sequence[Line]) -> None:
        for line in lines:
            if figures := numbers(line):
                self._run.log(figures | {"step": line["step"]})

    def close(self) -> None:
        self._run.finish()


def _require_unlinked(home: Path) -> None:
    """wandb writes into home/[offline-]run-TIME-ID as it finds it, and `guard` has not looked there. Raises UserError:
    somebody has put links that lead out into such a folder of a time to come."""
    now = time.strftime("%Y%m%d_%H%M%S")
    for path in inside(home).glob("*run-*-*"):
        if path.name.partition("run-")[2] >= now:
            guard(inside(path))


def _logged_in(wandb: Any) -> bool:
    """True if wandb finds a login without asking for it: it would wait for an answer."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(wandb.setup().settings.base_url).hostname or ""
    with suppress(OSError, netrc.NetrcParseError):
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    return False


class MLflow(Sink):
    """A run of MLflow, at $MLFLOW_TRACKING_URI, else in files below RUN/mlruns."""

    def __init__(self, folder: Path, step: int, about: Mapping[str, Any]) -> None:
        mlflow: Any = import_module("mlflow")
        self._entities: Any = import_module("mlflow.entities")
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            os.environ.setdefault(FILE_STORE, "true")
            uri = inside(folder.absolute() / "mlruns").as_uri()
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        self._id = remembered(folder).get("mlflow")
        if self._id is None:
            experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "fivefold"
            known = self._client.get_experiment_by_name(experiment)
            number = known.experiment_id if known else self._client.create_experiment(experiment)
            run = self._client.create_run(number, run_name=folder.absolute().name)
            self._id = str(run.info.run_id)
            remember(folder, "mlflow", self._id)
            rows = [self._entities.Param(key, str(value)[:500]) for key, value in fields(about).items()]
            for start in range(0, len(rows), 100):  # as many as it takes at once
                self._client.log_batch(self._id, params=rows[start : start + 100])
        else:
            self._client.update_run(self._id, status="RUNNING")

    def write(self, lines: Sequence[Line]) -> None:
        now = int(time.time() * 1000)
        rows = [
            self._entities.Metric(name, value, now, line["step"])
            for line in lines
            for name, value in numbers(line).items()
            if math.isfinite(value)
        ]
        for start in range(0, len(rows), 1000):
            self._client.log_batch(self._id, metrics=rows[start : start + 1000])

    def close(self) -> None:
        self._client.set_terminated(self._id)


KINDS: dict[str, tuple[Callable[[Path, int, Mapping[str, Any]], Sink], bool]] = {
    "tensorboard": (TensorBoard, False),
    "csv": (Csv, False),
    "wandb": (Wandb, True),
    "mlflow": (MLflow, True),
}
"""How each tracker of `recipe/entries.py` is opened, and if it works on a thread."""
