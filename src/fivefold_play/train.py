"""Train and watch: starts runs by the command line's words, and shows them while they train."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from starlette.routing import Route

from fivefold.data.kinds.hub import PREFIX
from fivefold.data.kinds.remote import ADDRESS
from fivefold.errors import UserError, did_you_mean, printable
from fivefold.files import expanded, in_use, numbered_folder, read_text
from fivefold.observe import faults, timelines
from fivefold.recipe import Recipe, families, load, shipped
from fivefold.recipe.load import MOST_BYTES
from fivefold_play import watch
from fivefold_play.state import Params, State, condition, events, get, post

LONGEST, MOST_SETS = 1000, 100
"""Characters of one of the recipe's fields that are set, and how many may be."""
RANKS_DRAWN = 4


def routes(state: State) -> list[Route]:
    return [
        get("/api/train/recipes", lambda given: {"recipes": shipped(), "families": families()}),
        events("/api/train/jobs", lambda given: jobs(state)),
        events("/api/train/watch", lambda given: watched(state, state.run(given.get("run")))),
        get("/api/train/about", lambda given: about(state.run(given.get("run")))),
        get("/api/train/timeline", lambda given: timeline(state.run(given.get("run")))),
        post("/api/train/start", lambda given: start(state, given)),
        post("/api/train/resume", lambda given: resume(state, given)),
        post("/api/train/stop", lambda given: {"stopping": watch.stop(state.run(given.get("run")))}),
        post("/api/train/remove", lambda given: {"removed": state.jobs.remove(given.get("id"))}),
    ]


def jobs(state: State) -> Iterator[Any]:
    """Whenever it changes: {runs: [{name, kind, step, steps}], waiting: [{id, run, command}], started: [{run, said,
    starts}], which have no recipe in their folder yet}."""
    last: Any = None
    while True:
        runs, waiting = state.runs(), state.jobs.waiting()
        known = {*runs, *(state.name(job["run"]) for job in waiting)}
        started = [run for run in state.jobs.started() if printable(str(run)) not in known]
        running = state.jobs.running()
        found = {
            "runs": [{"name": name, **condition(run)} for name, run in runs.items()],
            "waiting": [
                {"id": job["id"], "run": state.name(job["run"]), "command": command(job["words"])}
                for job in waiting
            ],
            "started": [
                {
                    "run": printable(str(run)),
                    "said": state.jobs.said(run),
                    "starts": Path(os.path.abspath(run)) == running,
                }
                for run in started
            ],
        }
        yield found if found != last else None
        last = found


def watched(state: State, run: Path) -> Iterator[Any]:
    """What is new of a run: its condition, metrics (`watch.Tail.read`), ranks, restarts, what it prints, and
    which step's timeline was measured last ("": none)."""
    tail, last = watch.Tail(run), dict[str, Any]()
    while True:
        now = {
            "condition": condition(run),
            "ranks": watch.ranks(run),
            "planned": watch.plan_of(run),
            "restarts": [
                f"{line.get('time')}: {printable(str(line.get('why')))[:300]}"
                for line in faults.read_restarts(run)[-5:]
            ],
            "said": state.jobs.said(run)[-1500:],
            "timeline": timelines.last_step(run),
        }
        new = {key: value for key, value in now.items() if value != last.get(key)}
        last = now
        for part in tail.read():
            yield new | part or None
            new = {}
        if new:
            yield new
        yield None


def about(run: Path) -> dict[str, Any]:
    """What changes only when the run is resumed: {recipe, layout, command, resume, generate}."""
    path = run / "recipe.toml"
    return {
        "recipe": printable(read_text(path, MOST_BYTES)),
        "layout": watch.layout_of(run),
        "command": command(["train", str(path)]),
        "resume": command(["train", str(run), "--resume"]),
        "generate": command(["generate", str(run)]),
    }


def timeline(run: Path) -> dict[str, Any]:
    """The measured timeline of a step, of the first ranks, above the planned one."""
    if not (found := timelines.read(run)):
        raise UserError("no step of this run was measured")
    measured = [one for one in found if one[0] != timelines.PLANNED]
    shown = measured[:RANKS_DRAWN] + found[len(measured) :]
    title = f"Step {found[0][1].step}: computing and messages"
    return {"picture": timelines.step_svg(shown, title)}


def command(words: Sequence[str]) -> str:
    return printable(f"fivefold {shlex.join(words)}")


def _changes(given: Params) -> tuple[list[str], str | None]:
    """The texts after `--set` and `--layout`."""
    sets, layout = given.get("set") or [], given.get("layout") or None
    texts = [*sets, layout or ""] if isinstance(sets, list) else [None]
    if len(texts) > MOST_SETS or not all(isinstance(text, str) and len(text) <= LONGEST for text in texts):
        raise UserError(
            f"set: at most {MOST_SETS} texts section.key=value; layout: a text. {LONGEST} characters each"
        )
    if wrong := next((text for text in sets if text.startswith("-") or "=" not in text), None):
        raise UserError(f"set: '{wrong}' must have the form section.key=value")
    return sets, layout


def chosen(state: State, given: Params) -> tuple[list[str], str, Recipe]:
    """(the words after a command, a name for its folder, the recipe). given: recipe, the name of a shipped one or of a
    run; set: texts; layout. Raises UserError: it is not valid, or reaches beyond the page's folders."""
    name, (sets, layout) = given.get("recipe"), _changes(given)
    if isinstance(name, str) and name in shipped():
        recipe, stem = name, name
    elif isinstance(name, str) and name in state.runs():
        recipe = str(state.run(name) / "recipe.toml")
        stem = re.sub(r"-\d+$", "", Path(name).name)
    else:
        raise UserError(
            f"recipe: '{name}' is no shipped recipe and no run{did_you_mean(str(name), shipped())}"
        )
    _require_within(state, loaded := load(recipe, sets, layout))
    return [recipe, *_options(sets, layout)], stem, loaded


def start(state: State, given: Params) -> dict[str, Any]:
    """Lets a run wait for its turn, which comes at once if nothing runs. given: as for `chosen`. Returns {run,
    command}."""
    asked, stem, _ = chosen(state, given)
    run = numbered_folder(state.home, stem)
    words = ["train", *asked, "--out", str(run)]
    state.jobs.add(words, run)
    return {"run": printable(str(run)), "command": command(words)}


def resume(state: State, given: Params) -> dict[str, Any]:
    """Lets a run go on from its last checkpoint, in another layout if one is given; if it trains, it saves and ends
    before. given: run, set, layout."""
    run, (sets, layout) = state.run(given.get("run")), _changes(given)
    if any(job["run"] == os.path.abspath(run) for job in state.jobs.waiting()):
        raise UserError(f"{run} waits to go on already")
    try:
        recipe = load(run / "recipe.toml", sets, layout)
    except UserError:  # the microbatch of the layout before may not fit
        recipe = load(run / "recipe.toml", ["train.microbatch_size=none", *sets], layout)
    _require_within(state, recipe)
    words = ["train", str(run), "--resume", *_options(sets, layout)]
    if in_use(run):
        watch.stop(run)
    state.jobs.add(words, run, first=True)
    return {"run": printable(str(run)), "command": command(words)}


def _options(sets: Sequence[str], layout: str | None) -> list[str]:
    return [word for text in sets for word in ("--set", text)] + (["--layout", layout] if layout else [])


def _require_within(state: State, recipe: Recipe) -> None:
    """Raises UserError: the recipe reads or writes beyond the page's folders."""
    for spec in (*recipe.data.specs.values(), *(entry.source for entry in recipe.data.validation)):
        if spec and not spec.startswith(PREFIX) and not ADDRESS.match(spec):
            state.source(spec)
    words = {"data.tokenizer": recipe.data.tokenizer, "data.chat_template": recipe.data.chat_template}
    files = [text for key, text in words.items() if expanded(key, text).exists()]
    places = (*files, recipe.train.init_from, recipe.data.cache, recipe.layout.offload_dir)
    state.require(*filter(None, places))
