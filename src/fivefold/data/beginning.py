"""What a tokenizer.json puts before a text: read, and written for other programs."""

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


def adds_blank(spec: dict[str, Any]) -> bool:
    """True if a text's beginning gets a blank that is not there, as SentencePiece's and RoBERTa's does."""
    parts = parts_of(spec, "pre_tokenizer", "normalizer")
    return any(part.get("type") in ("Metaspace", "Prepend") or part.get("add_prefix_space") for part in parts)


def parts_of(spec: dict[str, Any], *names: str) -> list[dict[str, Any]]:
    """These parts of a tokenizer.json, and those that a sequence has."""
    parts = [spec.get(name) or {} for name in names]
    return parts + [
        p for part in parts for key in ("normalizers", "pretokenizers", "decoders") for p in part.get(key, [])
    ]


def types_of(spec: dict[str, Any], *names: str) -> set[str]:
    return {part.get("type", "") for part in parts_of(spec, *names)}
