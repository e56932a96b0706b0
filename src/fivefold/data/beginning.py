"""What stands before a text, as a tokenizer.json's post-processor says it: read, and written for other programs."""

from __future__ import annotations

import itertools
from typing import Any


def begin_template(end: str, end_id: int) -> dict[str, Any]:
    """The post-processor that puts the end token before a text, and before each of a pair."""
    token, first, second = (
        {kind: {"id": name, "type_id": 0}}
        for kind, name in (("SpecialToken", end), ("Sequence", "A"), ("Sequence", "B"))
    )
    known = {end: {"id": end, "ids": [end_id], "tokens": [end]}}
    pair = [token, first, token, second]
    return {"type": "TemplateProcessing", "single": pair[:2], "pair": pair, "special_tokens": known}


def starts(processor: dict[str, Any]) -> list[int]:
    """The ids that a tokenizer.json's post-processor puts before a text."""
    found: list[int] = []
    for part in processor.get("processors", [processor]):
        if part.get("type") == "TemplateProcessing":
            names = [next(iter(piece.items())) for piece in part["single"]]
            before = itertools.takewhile(lambda piece: piece[0] == "SpecialToken", names)
            found = [i for _, t in before for i in part["special_tokens"][t["id"]]["ids"]] + found
        elif "cls" in part:  # BERT's and RoBERTa's
            found = [part["cls"][1], *found]
    return found
