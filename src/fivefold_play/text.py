"""Text: what a source of text holds, how long training on it takes, and files that are dropped on the page."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import islice
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fivefold.data import facts
from fivefold.data.kinds.kind import Fields
from fivefold.data.one_source import prepare_source
from fivefold.data.sources import FileSplit
from fivefold.errors import UserError, printable
from fivefold.files import make_folder, numbered_folder, own_word, remove, rename, stream
from fivefold.recipe import Recipe, load
from fivefold.recipe.messages import toml_value
from fivefold_plan.cluster import measured
from fivefold_plan.cluster.clusters import LOCAL, parse
from fivefold_plan.predict import predict
from fivefold_play.state import SHIPPED, State, as_answer, called, get

RECIPE, CHAT = "quickstart", "plain"
"""What the text is looked at for, and the template of conversations."""
KINDS = (".txt", ".md", ".jsonl", ".parquet", ".csv")
MOST_BYTES = 256 << 20
"""Of a file that is dropped."""
MOST_FILES, LONGEST_NAME = 1000, 80
COUNTED = 32 << 20
"""Bytes of a source that is tokenized to know its tokens. Those of a larger one are estimated."""
SAMPLES, LONGEST = 3, 1500
"""Documents that are shown, and characters of each."""


def routes(state: State) -> list[Route]:
    async def receive(request: Request) -> Response:
        return as_answer(*await called(received(state, request)))

    return [
        get("/api/text/about", lambda given: about(state, str(given.get("source", SHIPPED[0])))),
        Route("/api/text/upload", receive, methods=["POST"]),
    ]


def about(state: State, name: str) -> dict[str, Any]:
    """What a source holds: {facts: lines, set: fields of the recipe, one per line, files, documents, tokens (null: not
    counted), seconds (of one pass here; null: unknown), why (it is), samples: [[file, text]]}. Raises UserError: it
    lies outside of the page's folders, or holds no text."""
    if not name.isprintable() or re.match(r"\w+:", name):
        raise UserError(
            f"{printable(name)[:500]}: the page looks at files and folders in the page's folders only, and downloads "
            "nothing: `fivefold tokenize RECIPE --set data.source=SOURCE` does"
        )
    source, sets = state.source(name), [f"data.source={toml_value(name)}"]
    files, fields = FileSplit(source.files), Fields(load(RECIPE, sets).data.text_key, chat=True)
    documents = [*islice(files.samples(fields, SAMPLES), SAMPLES)]
    sets += [f"data.chat_template={CHAT}"] * any(one.messages is not None for one in documents)
    recipe, texts = load(RECIPE, sets), {"set": "\n".join(sets), "files": len(source.files)}
    answer: dict[str, Any] = texts | {"documents": None, "tokens": None}
    if source.size <= COUNTED:
        info = prepare_source(recipe, None, None).info
        answer |= {key: sum(info[key].values()) for key in ("documents", "tokens")}
    if files.single:  # of which a piece is held out
        answer["documents"] = 1
    samples = [[printable(source.files[one.file].name), printable(one.text[:LONGEST])] for one in documents]
    try:
        lines = facts.check(recipe)
    except UserError as error:  # too little for a step, for example
        lines = [f"{facts.WARNING}{error}"]
    return answer | {"samples": samples, "facts": lines} | _pass(recipe, answer["tokens"])


def _pass(recipe: Recipe, tokens: int | None) -> dict[str, Any]:
    """How long one pass over so many tokens takes, by the plan for this machine."""
    if tokens is None:
        return {"seconds": None, "why": "its tokens are counted when it is trained on"}
    why = f"{RECIPE}, as planned" + ", roughly: this machine was not measured" * (measured.load() is None)
    return {"seconds": tokens / predict(recipe, parse(LOCAL, rough=True)).tokens_per_s, "why": why}


async def received(state: State, request: Request) -> dict[str, str]:
    """Writes a file that is sent. Of the address: name, which is cleaned; folder, one that was answered, or "" for a
    new one. Returns {folder, source, name}. What is broken off leaves nothing."""
    given: Mapping[str, str] = request.query_params
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", given.get("name", ""))
    if not name.lower().endswith(KINDS):
        raise UserError(f"'{name[-LONGEST_NAME:]}': only {', '.join(KINDS)}")
    folder = given.get("folder", "")
    home = state.texts / folder
    if folder and (
        not re.fullmatch(r"texts-\d+", folder, re.ASCII) or not home.is_dir() or home.is_symlink()
    ):
        raise UserError("there is no such folder of dropped files")
    if (number := len([*home.iterdir()]) if folder else 0) >= MOST_FILES:
        raise UserError(f"at most {MOST_FILES:,} files at once; name their folder instead")
    make_folder(state.texts, mode=0o700)
    temporary = state.texts / f".{own_word()}"  # its folder is made only when the file is whole
    try:
        with stream(temporary) as file:
            async for piece in request.stream():
                file.write(piece)
        if not folder:
            home = numbered_folder(state.texts, "texts")
        while (target := home / f"{(number := number + 1)}-{name[-LONGEST_NAME:]}").exists():
            pass  # another one of this name came meanwhile
        rename(temporary, target)
    finally:
        remove(temporary)
    return {"folder": home.name, "source": str(home), "name": target.name}
