"""The set `talk`: a few thousand short questions with answers (talk.json), and held-out questions apart.

`data.source = "talk"` is the training part, `fivefold eval --task talk` asks the held-out part. Held-out questions of
facts have wordings that are two words or more from any trained one; those of other kinds have numbers or words that are
not trained on. Answers to arithmetic and counting show their steps: a small model learns steps from a few hundred
examples. benchmarks/talk_questions.py has made them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import cache
from itertools import islice
from pathlib import Path
from statistics import mode
from typing import Any, NamedTuple

from fivefold import files

NAME = "talk"
KINDS = ("sums", "spelling", "counting", "units", "facts", "asking")
FILE = Path(__file__).with_suffix(".json")
"""By kind: the questions that are trained on, and those that are not. Each has question, reply, answer."""
MOST_TURNS = 3
"""Questions of a conversation."""


class Question(NamedTuple):
    """reply: all that is said. answer: its end, which counts where a guess is judged."""

    kind: str
    asked: str
    reply: str
    answer: str

    @property
    def messages(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.asked}, {"role": "assistant", "content": self.reply}]


@cache
def questions(kind: str, held_out: bool = False) -> tuple[Question, ...]:
    """The questions of a kind that are trained on, or those that are not."""
    return tuple(Question(kind, *row) for row in _rows()[kind][held_out])


@cache
def _rows() -> dict[str, Any]:
    return files.read_json(FILE)


def conversations() -> Iterator[dict[str, Any]]:
    """The rows of the training part: all questions, shuffled, one to MOST_TURNS in a row."""
    every, turns = [each for kind in KINDS for each in questions(kind)], random.Random("turns")
    random.Random("rows").shuffle(every)
    left = iter(every)
    while row := list(islice(left, turns.randint(1, MOST_TURNS))):
        yield {"messages": [message for question in row for message in question.messages]}


def written() -> Path:
    """The file of the training part in the cache. It is written if it is not there, or not the same."""
    path = files.cache_folder() / NAME / f"{NAME}.jsonl"
    rows = "".join(json.dumps(row) + "\n" for row in conversations())
    with files.writable(path.parent):
        if not path.is_file() or files.read_text(path, 1 << 24) != rows:
            files.make_folder(path.parent)
            files.write_atomically(path, rows)
    return path


def guesses(kind: str) -> list[dict[str, bool]]:
    """Which held-out questions of a kind two guesses answer: the answer of the training question of the kind that
    shares most pairs of letters (`nearest`), and the kind's most frequent answer (`frequent`)."""
    known, asked = questions(kind), questions(kind, held_out=True)
    answers, pairs = [each.answer for each in known], [_pairs(each.asked) for each in known]
    likeness = [
        [len(mine & other) / len(mine | other) for other in pairs]
        for mine in (_pairs(q.asked) for q in asked)
    ]
    nearest = [answers[row.index(max(row))] for row in likeness]
    frequent = mode(answers)
    return [
        {"nearest": near == each.answer, "frequent": frequent == each.answer}
        for near, each in zip(nearest, asked, strict=True)
    ]


def _pairs(text: str) -> set[str]:
    return {text[at : at + 2] for at in range(len(text) - 1)}
