"""What the parts of the page share: the run folders, and how functions answer requests.

A run is asked for by its name and looked up among those that were found, so no request can name another path.
"""

from __future__ import annotations

import json
import math
import os
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

import anyio
from anyio import to_thread
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from fivefold.data import talk
from fivefold.data.sources import TOKENS, Source, find
from fivefold.errors import CheckFailed, UserError, did_you_mean, printable
from fivefold.files import UNOPENED, guard, in_use, parse_json
from fivefold.observe.metrics import FILE, last_line
from fivefold.observe.report import run_recipe
from fivefold.recipe.sweep import is_sweep
from fivefold_play.commands import Commands
from fivefold_play.jobs import Jobs

SHIPPED = ("stdlib", talk.NAME)
"""Sources of text that are there everywhere."""
PAUSE_S = 0.5
"""Between two looks at what may have changed."""
MOST_BYTES = 1 << 20
"""Of a request's body, unless its part says otherwise."""
Params = Mapping[str, Any]


@dataclass
class State:
    """The folders that the page shows: run folders, or folders of runs. New runs go into the first one."""

    folders: Sequence[Path]
    jobs: Jobs = field(init=False)
    commands: Commands = field(default_factory=Commands, init=False)

    def __post_init__(self) -> None:
        self.jobs = Jobs(self.home)

    @property
    def home(self) -> Path:
        """Where new runs go."""
        first = self.folders[0]
        return first.parent if _is_run(first) else first

    @property
    def texts(self) -> Path:
        """Where dropped texts go. Raises UserError: it is a link, which may lead anywhere."""
        if (folder := self.home / ".play").is_symlink():
            raise UserError(f"{folder} is a link: remove it, and dropped files go there")
        return folder

    def name(self, run: str) -> str:
        """The name of an absolute path, as the page's folders begin."""
        for folder in (*self.folders, self.home):
            if (path := Path(run)).is_relative_to(there := os.path.abspath(folder)):
                return printable(str(folder / path.relative_to(there)))
        return printable(run)

    def runs(self) -> dict[str, Path]:
        """All runs by name, the newest first, guarded. Those of a sweep stand in its folder."""
        found = set[Path]()
        for folder in self.folders:
            levels = [folder, *_folders(folder)]
            found |= {run for run in (*levels, *(x for y in levels[1:] for x in _folders(y))) if _is_run(run)}
        for run in found:
            guard(run, look=False)
        dated = sorted(found, key=lambda run: (_born(run), str(run)), reverse=True)
        return {printable(str(run)): run for run in dated}

    def sweeps(self) -> dict[str, Path]:
        """The folders of sweeps with runs, by name."""
        found = {run.parent for run in self.runs().values() if is_sweep(run.parent)}
        inside = [one for one in sorted(found) if any(map(one.is_relative_to, self.folders))]
        return {printable(str(one)): one for one in inside}

    def run(self, name: object) -> Path:
        """The run of this name. Raises UserError: there is none."""
        runs = self.runs()
        if not isinstance(name, str) or name not in runs:
            raise UserError(f"there is no run '{name}'{did_you_mean(str(name), runs)}")
        return runs[name]

    def require(self, *paths: Path | str, links: bool = True) -> None:
        """Raises UserError: one of them leads out of the page's folders, by itself or by a link below it. links: looks
        for those."""
        homes = [folder.resolve() for folder in (*self.folders, self.home)]
        for path in map(Path, paths):
            try:
                places = chain([path := path.expanduser()], _links(path) if links else ())
                outside = next(
                    (at for at in places if not any(map(at.resolve().is_relative_to, homes))), None
                )
            except (RuntimeError, ValueError):  # no such home folder, links in a circle, a NUL
                raise UserError(f"{printable(str(path))[:500]} cannot be a path on this machine") from None
            if outside is not None:
                there = outside.resolve()
                needed = there if there.is_dir() else there.parent
                given = shlex.join(map(str, (*self.folders, needed)))
                raise UserError(
                    f"{outside} lies outside of the page's folders. Start it with this folder, too: fivefold play "
                    f"{given}"
                )

    def source(self, spec: str) -> Source:
        """The files of a source of text. Raises UserError: it, or one of them, leads out of the page's folders."""
        if spec in SHIPPED:
            return find(spec)
        self.require(spec.removeprefix(TOKENS), links=False)
        found = find(spec)
        paths = [file.path for file in found.files]
        self.require(*paths, *(path.with_suffix(".idx") for path in paths if found.ids), links=False)
        return found


def _links(folder: Path) -> Iterator[Path]:
    """All links below a folder, in what is opened there."""
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in UNOPENED or Path(place, name).is_symlink()]
        yield from (one for name in (*folders, *names) if (one := Path(place, name)).is_symlink())


def _is_run(folder: Path) -> bool:
    return (folder / "recipe.toml").is_file()


def _folders(folder: Path) -> list[Path]:
    """Folders in a folder, without hidden ones, links, and what a command would take for an option."""
    with suppress(OSError):
        return [x for x in folder.iterdir() if x.name[0] not in ".-" and x.is_dir() and not x.is_symlink()]
    return []


def _born(run: Path) -> float:
    """When the run began: its machine's facts are written once."""
    for name in ("machine.json", "recipe.toml"):
        with suppress(OSError):
            return (run / name).stat().st_mtime
    return 0.0


def stamp(run: Path) -> tuple[object, ...]:
    """Changes with the run's metrics or recipe."""
    found = list[object]()
    for name in ("recipe.toml", FILE):
        with suppress(OSError):
            there = os.stat(run / name)
            found += [there.st_ino, there.st_size, there.st_mtime_ns]
    return tuple(found)


@lru_cache(1000)
def _steps(run: Path, stamp: tuple[object, ...]) -> tuple[int, int | None]:
    """The last step of a run, and how many it shall have. Unknown if a file of it leads elsewhere, which its figures
    say: one run does not hide the others."""
    try:
        line, recipe = last_line(run), run_recipe(run)
    except UserError:
        return 0, None
    return line["step"] if line else 0, recipe.train.steps if recipe else None


def condition(run: Path) -> dict[str, Any]:
    """What a run is doing. kind: training, stopped, complete, or new, which has no step yet."""
    step, steps = _steps(run, stamp(run))
    kind = "training" if in_use(run) else "stopped" if step else "new"
    if kind == "stopped" and steps is not None and step >= steps:
        kind = "complete"
    return {"kind": kind, "step": step, "steps": steps}


def as_json(content: Any) -> bytes:
    """JSON in UTF-8. What JSON lacks becomes null (NaN, infinity), or an escape (lone surrogates)."""
    try:
        text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    except ValueError:
        text = json.dumps(_finite(content), allow_nan=False, separators=(",", ":"))
    return text.encode()


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def as_answer(content: Any, code: int = 200) -> Response:
    return Response(as_json(content), code, media_type="application/json")


async def called(answer: Awaitable[Any]) -> tuple[Any, int]:
    """What an answer is, and 200; or what is wrong, of the request or of this machine, and 400."""
    try:
        return await answer, 200
    except UserError as error:
        return {"error": str(error), "key": error.problems[0].key}, 400
    except CheckFailed as error:
        return {"error": str(error)}, 400
    except OSError as error:
        return {"error": printable(f"{error.filename or 'this machine'}: {error.strerror}")}, 400


def _called(function: Callable[..., Any], *given: Any) -> Awaitable[tuple[Any, int]]:
    """The same of a function, which is called in a thread."""
    return called(to_thread.run_sync(function, *given))


def _route(method: str, path: str, function: Callable[[Params], Any]) -> Route:
    """A question (GET) or an order (POST). function: makes the answer, JSON values or a Response, of the parameters or
    of the JSON object that was sent; it runs in a thread."""

    async def answer(request: Request) -> Response:
        given: Any = dict(request.query_params)
        if method == "POST":
            given = None
            with suppress(ValueError, RecursionError):
                given = parse_json(await request.body())
        if not isinstance(given, dict):
            return as_answer({"error": "the request's body must be a JSON object"}, 400)
        found, code = await _called(function, given)
        return found if isinstance(found, Response) else as_answer(found, code)

    return Route(path, answer, methods=[method])


get, post = partial(_route, "GET"), partial(_route, "POST")


def events(path: str, function: Callable[[Params], Iterator[Any]]) -> Route:
    """A stream of server-sent events. function: yields their JSON values, each in a thread; None: nothing is new now.
    An error of the user's ends the stream, and says why. A stream that ends says so: a browser would ask again."""

    async def lines(given: Params, server: Any) -> AsyncIterator[bytes]:
        end = object()
        source, code = await _called(function, given)
        if code != 200:
            yield b"data: %s\n\n" % as_json(source)
        while code == 200 and not getattr(server, "ending", False):
            found, code = await _called(partial(next, source, end))
            if found is end:
                break
            yield b":\n\n" if found is None else b"data: %s\n\n" % as_json(found)
            if found is None:
                await anyio.sleep(PAUSE_S)
        if not getattr(server, "ending", False):
            yield b"event: end\ndata: {}\n\n"

    async def answer(request: Request) -> Response:
        given = dict(request.query_params)
        return StreamingResponse(lines(given, request.app.state), media_type="text/event-stream")

    return Route(path, answer)
