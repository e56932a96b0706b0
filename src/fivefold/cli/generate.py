"""`fivefold generate RUN` samples text from a trained model, `fivefold chat RUN` is a conversation with one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from fivefold.cli import options
from fivefold.cli.options import option, print_json
from fivefold.errors import UserError, printable, shortened

if TYPE_CHECKING:
    from fivefold.data.chat import ChatTemplate
    from fivefold.train.generate import Chat

TemperatureOption = Annotated[float, option("X", "Sampling temperature; 0 is greedy.")]
TopKOption = Annotated[int, option("K", "Sample from the K likeliest tokens; 0: from all.")]
TopPOption = Annotated[float, option("P", "Sample from the likeliest tokens with total probability P.")]
SeedOption = Annotated[int, option("N", "Random seed; the same seed gives the same text.")]
StopOption = Annotated[list[str] | None, option("TEXT", "Stop before this text. Repeatable.")]
GROUPS = {"Sampling": ("max_tokens", "temperature", "top_k", "top_p", "stop", "seed")}


def generate(
    run: options.RunArgument,
    prompt: Annotated[str, option("TEXT", "Prompt.", show_default=False)] = "",
    prompts: Annotated[
        Path | None,
        option(
            "FILE",
            "A prompt per line, or .jsonl with 'prompt' or 'messages'. Prints a JSON object per prompt.",
        ),
    ] = None,
    samples: Annotated[int, option("N", "Number of texts per prompt.", min=1)] = 1,
    max_tokens: Annotated[int, option("N", "Maximum number of new tokens.")] = 200,
    temperature: TemperatureOption = 0.8,
    top_k: TopKOption = 0,
    top_p: TopPOption = 1.0,
    stop: StopOption = None,
    seed: SeedOption = 0,
    step: options.StepOption = None,
    json: options.JsonOption = False,
) -> None:
    """Generate text with a trained model."""
    options.require_run(run, look=False)
    if prompts and prompt:
        raise UserError("--prompt and --prompts: give one of them")
    rows = list(_rows(prompts)) if prompts else [{"prompt": prompt}]
    from fivefold.checkpoint import store
    from fivefold.launch.ranks import device_for
    from fivefold.train.generate import (
        Sampling,
        generate_text,
        open_run,
        require_tokenizer,
        samples_of,
        template_of,
    )

    settings = Sampling(max_tokens, temperature, top_k, top_p, seed, tuple(stop or ()))
    module, recipe, tokenizer = open_run(run, checkpoint=store.chosen(run, step), device=device_for(0))
    tokenizer = require_tokenizer(run, tokenizer)
    if not prompts and not json and samples == 1:
        print(shown(prompt), end="", flush=True)
        for piece in generate_text(module, recipe.model, tokenizer, prompt, settings):
            print(shown(piece), end="", flush=True)
        print()
        return
    template = template_of(run, tokenizer) if any("messages" in row for row in rows) else None
    for number, row in enumerate(rows, 1):
        ids, ends = _encoded(row, template, f"{prompts}, prompt {number}")
        texts = samples_of(module, recipe.model, tokenizer, ids, settings, samples, ends)
        if prompts or json:
            print_json({**row, **({"text": texts[0]} if samples == 1 else {"texts": texts})})
            continue
        for index, text in enumerate(texts, 1):
            print(f"--- {index} of {samples}")
            print(shown(prompt + text), flush=True)


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """The prompts of a file, as {"prompt": text} or {"messages": [...]}. Raises UserError: the file cannot be read, or
    a line has neither."""
    from fivefold.data.chat import NotAConversation, messages_of
    from fivefold.data.eval_docs import documents, json_lines

    if path.suffix.lower() != ".jsonl":
        for text in documents(path):
            yield from ({"prompt": line} for line in text.splitlines() if line.strip())
        return
    for number, row in json_lines(path):
        try:
            if "messages" in row:
                yield {"messages": messages_of(row["messages"])}
            elif isinstance(row.get("prompt"), str):
                yield {"prompt": row["prompt"]}
            else:
                keys = shortened(", ".join(row) or "none", 100)
                raise NotAConversation(f"needs the text 'prompt', or 'messages' (its keys: {keys})")
        except NotAConversation as error:
            raise UserError(f"{path}, line {number}: {error}") from None


def _encoded(row: dict[str, Any], template: ChatTemplate | None, where: str) -> tuple[Any, frozenset[int]]:
    """The prompt, as text or ids, and the tokens that end its continuation."""
    if "prompt" in row:
        return row["prompt"], frozenset()
    if template is None:
        raise UserError(
            f"{where}: 'messages' need a model that was trained on conversations (data.chat_template); this is a base "
            "model. Use 'prompt'"
        )
    from fivefold.data.chat import NotAConversation

    try:
        return template.prompt(row["messages"]), template.end_ids
    except NotAConversation as error:
        raise UserError(f"{where}: {error}") from None


def shown(text: str) -> str:
    """A model's text as it is printed: a terminal would obey escape codes in it."""
    return printable(text) if sys.stdout.isatty() else text


HELP = "/reset forgets what was said, /quit ends. Ctrl-C stops an answer."


def chat(
    run: options.RunArgument,
    system: Annotated[str, option("TEXT", "How to answer, as the first message.", show_default=False)] = "",
    max_tokens: Annotated[int, option("N", "Maximum number of tokens per answer.")] = 512,
    temperature: TemperatureOption = 0.8,
    top_k: TopKOption = 0,
    top_p: TopPOption = 1.0,
    stop: StopOption = None,
    seed: SeedOption = 0,
    step: options.StepOption = None,
    json: options.JsonOption = False,
) -> None:
    """Talk to a trained model.

    Each line is a message; with --json each answer is a JSON object, and so is an error. What was said is kept, as far
    as it fits into the model's context. /reset forgets it, /quit ends.
    """
    options.require_run(run, look=False)
    from fivefold.checkpoint import store
    from fivefold.train.generate import BASE, Sampling, open_chat

    settings = Sampling(max_tokens, temperature, top_k, top_p, seed, tuple(stop or ()))
    found = open_chat(run, store.chosen(run, step), settings, system)
    if found.template is None:
        print(f"note: {BASE}", file=sys.stderr)
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
    pieces: list[str] = []
    try:
        for piece in found.ask(line):
            pieces.append(piece)
            if not json:
                print(shown(piece), end="", flush=True)
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
    except UserError as error:  # such as a message that is too long: the conversation goes on
        if json:
            options.print_problems(str(error), error.problems, message=line)
        else:
            print(f"error: {error}", file=sys.stderr)
        return
    print_json({"message": line, "answer": "".join(pieces)}) if json else print()
