"""`fivefold chat RUN`: a conversation with a trained model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

from fivefold.cli.options import (
    SAMPLING,
    JsonOption,
    RunArgument,
    SeedOption,
    StepOption,
    StopOption,
    TemperatureOption,
    TopKOption,
    TopPOption,
    option,
    print_json,
    require_run,
    shown,
)
from fivefold.cli.problems import print_problems
from fivefold.errors import UserError

if TYPE_CHECKING:
    from fivefold.train.generate import Chat

EXAMPLES = [
    "fivefold chat runs/answers",
    "fivefold chat runs/answers --system 'Answer in one sentence.' --temperature 0.3",
    "echo 'What is a list?' | fivefold chat runs/answers",
]
GROUPS = SAMPLING
HELP = "/reset forgets what was said, /quit ends. Ctrl-C stops an answer."
BASE = (
    "note: this is a base model. It was trained on texts and not on conversations, so it continues what you write "
    "instead of answering. For answers train it on conversations: data.chat_template (docs/chat.md)"
)


def chat(
    run: RunArgument,
    system: Annotated[str, option("TEXT", "How to answer, as the first message.", show_default=False)] = "",
    max_tokens: Annotated[int, option("N", "Maximum number of tokens per answer.")] = 512,
    temperature: TemperatureOption = 0.8,
    top_k: TopKOption = 0,
    top_p: TopPOption = 1.0,
    stop: StopOption = None,
    seed: SeedOption = 0,
    step: StepOption = None,
    json: JsonOption = False,
) -> None:
    """Talk to a trained model.

    Each line is a message; with --json each answer is a JSON object, and so is an error. What was said is kept, as far
    as it fits into the model's context. /reset forgets it, /quit ends.
    """
    require_run(run, look=False)
    from fivefold.checkpoint import store
    from fivefold.train.generate import Sampling, open_chat

    settings = Sampling(max_tokens, temperature, top_k, top_p, seed, tuple(stop or ()))
    found = open_chat(run, store.chosen(run, step), settings, system)
    if found.template is None:
        print(BASE, file=sys.stderr)
    if sys.stdin.isatty():
        print(HELP, file=sys.stderr)
    for line in _lines():
        if line == "/quit":
            return
        if line == "/reset":
            found.reset()
        elif line.startswith("/"):
            print(f"unknown command {line.split()[0]}. {HELP}", file=sys.stderr)
        elif line:
            _answer(found, line, json)


def _lines() -> Iterator[str]:
    """The lines of stdin, without blanks around them; on a terminal with a prompt, and with editing."""
    if not sys.stdin.isatty():
        try:
            yield from (line.strip() for line in sys.stdin)
        except UnicodeDecodeError as error:
            raise UserError(f"stdin is not {error.encoding} text") from None
        return
    with suppress(ImportError):
        import readline  # noqa: F401  (arrow keys, history)
    while True:
        try:
            yield input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return


def _answer(found: Chat, line: str, json: bool) -> None:
    show = shown()
    pieces: list[str] = []
    try:
        for piece in found.ask(line):
            pieces.append(piece)
            if not json:
                print(show(piece), end="", flush=True)
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
    except UserError as error:  # such as a message that is too long: the conversation goes on
        if json:
            print_problems(str(error), error.problems, message=line)
        else:
            print(f"error: {error}", file=sys.stderr)
        return
    print_json({"message": line, "answer": "".join(pieces)}) if json else print()
