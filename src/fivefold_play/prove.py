"""Prove: `fivefold verify` of a layout; and a collective, round by round, with its values."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from starlette.routing import Route

from fivefold.errors import UserError
from fivefold.host import memory_bytes
from fivefold.observe import player
from fivefold.observe.collective_picture import player as of_collective
from fivefold.observe.format import size
from fivefold.precision import PRECISIONS
from fivefold.recipe import count_parameters
from fivefold.schedules.collectives import ALGORITHMS, algorithm, build, shape_of
from fivefold_plan.predict import resolved
from fivefold_play.state import Params, State, events, get, post
from fivefold_play.train import chosen, command

MOST_STEPS, MOST_RANKS, MOST_PIECES = 20, player.MOST_RANKS, 4
REFERENCE = 16
"""Bytes per parameter of one process: weight, gradient and Adam's moments in fp32."""
KIND = "proof"


def routes(state: State) -> list[Route]:
    return [
        post("/api/prove/start", lambda given: start(state, given)),
        post("/api/prove/stop", lambda given: state.commands.stop(KIND) or {}),
        events("/api/prove/watch", lambda given: watched(state, str(given.get("name")))),
        get("/api/prove/choices", lambda given: choices()),
        get("/api/prove/collective", lambda given: {"player": collective(given)}),
    ]


def choices() -> dict[str, Any]:
    """{modes, collectives: {primitive: {algorithm: when to use it}}}."""
    found = {key: {name: made.when for name, made in known.items()} for key, known in ALGORITHMS.items()}
    return {"modes": [*PRECISIONS], "collectives": found}


def start(state: State, given: Params) -> dict[str, Any]:
    """Starts a proof, and ends the one before. given: as for `train.chosen`; steps, mode. Returns {name, command}."""
    steps, mode = given.get("steps"), given.get("mode")
    if type(steps) is not int or not 1 <= steps <= MOST_STEPS or mode not in [*PRECISIONS]:
        raise UserError(f"steps: 1 to {MOST_STEPS}; mode: {', '.join(PRECISIONS)}")
    asked, _, recipe = chosen(state, given)
    needed, there = 0, memory_bytes()
    with suppress(UserError):  # its vocabulary is not known yet
        needed = REFERENCE * count_parameters(resolved(recipe).model)
    if needed > there:
        raise UserError(
            f"one process needs {size(needed)}, and this machine has {size(there)}: take a smaller model"
        )
    words = ["verify", *asked, "--steps", str(steps), "--mode", mode]
    return {"name": state.commands.start(KIND, words).name, "command": command(words)}


def watched(state: State, name: str) -> Iterator[Any]:
    """What a proof does, whenever it changes: {is: runs or ended; said; report: of `fivefold verify --json`, or
    null}."""
    last, runs, proof = dict[str, Any](), True, state.commands.last(KIND)
    if proof is None or proof.name != name:
        raise UserError("there is no such proof any more")
    while runs:
        runs = proof.runs
        found: dict[str, Any] = {"is": "runs" if runs else "ended", "said": proof.said(), "report": None}
        if not runs:
            try:
                found["report"] = proof.result()
            except UserError as error:
                found["said"] = str(error)
        yield found if found != last else None
        last = found


def collective(given: Params) -> str:
    """The player of a collective, as HTML for page/player.js. given: primitive, algorithm, ranks, local (ranks of a
    node; 0: all)."""
    numbers = [str(given.get(key)) for key in ("ranks", "local")]
    if not all(re.fullmatch(r"\d{1,2}", text, re.ASCII) for text in numbers) or int(numbers[0]) > MOST_RANKS:
        raise UserError(f"ranks: 1 to {MOST_RANKS}; local: 0, or the ranks of a node")
    made = algorithm(str(given.get("primitive")), str(given.get("algorithm")))
    ranks, local = map(int, numbers)
    shape = shape_of(ranks, local, pieces=min(MOST_PIECES, max(made.pieces)))
    built = build(made.primitive, made.name, shape)
    return player.part(
        of_collective(built, [""] * len(built.rounds), f"{made.when[:1].upper()}{made.when[1:]}.")
    )
