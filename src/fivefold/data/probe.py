"""Reads the beginning of a source, so that what would stop its tokenizing is said at once."""

from __future__ import annotations

from itertools import islice

from fivefold.data.build import describe_bad, is_named
from fivefold.data.conversations import special_of
from fivefold.data.documents import Bad
from fivefold.data.encode import read_task
from fivefold.data.one_source import require_vocabulary
from fivefold.data.sources import Source
from fivefold.data.tasks import BY_RULE, FileSpan, first_task
from fivefold.data.tokenizer import load_tokenizer
from fivefold.errors import UserError
from fivefold.files import expanded
from fivefold.recipe import Recipe

PROBED = 16 << 20
"""Bytes that are read in all: about 0.1 s."""
LEAST = 1 << 16
"""Bytes of each file."""
ROWS = 64
"""Rows of a file whose bytes cannot be counted."""


def require_readable(recipe: Recipe, source: Source) -> None:
    """Raises UserError if a document in the beginning of the source cannot be read and none may be bad."""
    data = recipe.data
    if data.max_bad_fraction:
        return
    each = max(LEAST, PROBED // max(1, len(source.files)))
    whole = source.size <= PROBED
    for number, file in enumerate(source.files[: PROBED // LEAST] if not whole else source.files):
        stop = file.size if whole else min(file.size, each)
        by_bytes = file.kind in ("text", "jsonl") and not file.from_start
        span = FileSpan(number, 0, stop if by_bytes else 1, 0, file.size if by_bytes else 1, BY_RULE, True)
        chat = bool(data.chat_template)
        if file.url:  # `check` uses no network but to list them
            continue
        task = first_task(source.files, number, data.text_key, chat) if file.from_start else [span]
        found = read_task(task, source.files, data.text_key, chat)
        for document in found if by_bytes else islice(found, ROWS):
            if isinstance(document, Bad):
                raise UserError(
                    f"{describe_bad(source.files, document)} "
                    "(set data.max_bad_fraction to skip a share of bad documents)"
                )


def require_ids(recipe: Recipe, source: Source, mask: bool) -> None:
    """Raises UserError if the model certainly has fewer ids than the tokenizer."""
    data = recipe.data
    special = (2 if mask else 1) + len(special_of(data.chat_template))
    if data.tokenizer == "bytes":
        require_vocabulary(recipe, 256 + special)
    elif data.tokenizer.startswith("bpe:"):
        size = int(data.tokenizer.removeprefix("bpe:"))
        if source.size > ENOUGH * size:
            require_vocabulary(recipe, size)
    elif not is_named(data.tokenizer):
        tokenizer = load_tokenizer(expanded("data.tokenizer", data.tokenizer), mask)
        if data.chat_template:
            from fivefold.data.chat import open_template  # Jinja takes a moment to import

            tokenizer = open_template(data.chat_template, data.tokenizer, tokenizer).tokenizer
        require_vocabulary(recipe, tokenizer.vocab_size)


ENOUGH = 100
"""Bytes of text per token with which BPE finds as many tokens as it may."""
