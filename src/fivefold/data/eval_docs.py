"""What evaluations read: whole documents, and items of multiple-choice and completion tasks with their prompts.

Training keeps tokens only. An evaluation also needs the raw text, whose bytes it counts, and says where an error stands
by the number of its line.

A task is a file of JSON lines in one of the schemas of `SCHEMAS`: two of our own, and those in which HellaSwag (arXiv
1905.07830), ARC (arXiv 1803.05457) and LAMBADA (arXiv 1606.06031) are published. The prompts of the published ones are
those of lm-evaluation-harness 0.4.13 (lm_eval/tasks/hellaswag, arc and lambada), so that accuracies compare.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from fivefold.data import talk
from fivefold.data.chat import ANSWER, MESSAGES, Message, NotAConversation, messages_of
from fivefold.data.kinds.json import objects
from fivefold.data.sources import nearest
from fivefold.errors import UserError, did_you_mean, shortened
from fivefold.files import open_file, read_text

MOST_ITEMS = 1_000_000
MOST_CHOICES = 100
BETWEEN = "\n\n"
"""Text between the examples of a few-shot prompt."""


@dataclass(frozen=True)
class Item:
    """A question: which of `choices` continues context + join? Their number `answer` does.

    An item with a single choice is a completion: is it what the model would write? line: where it stands in its file.
    messages: a conversation; the run's chat template makes the prompt, and the last answer is the choice. kind: the
    group that it also counts for. guesses: whether simple guesses are right.
    """

    context: str
    choices: tuple[str, ...]
    answer: int
    join: str = " "
    line: int = field(default=0, compare=False)
    messages: tuple[Message, ...] = field(default=(), compare=False)
    kind: str = ""
    guesses: Mapping[str, bool] = field(default_factory=dict, compare=False)

    @property
    def solved(self) -> str:
        """The text with the right choice, as an example of a few-shot prompt."""
        return f"{self.context}{self.join}{self.choices[self.answer]}"


@dataclass(frozen=True)
class Schema:
    """One form of items. mark: the key that only this schema has. keys: all that a row may have; (): any."""

    name: str
    mark: str
    item: Callable[[Mapping[str, Any]], Item]
    keys: tuple[str, ...] = ()


def read_items(path: Path) -> tuple[str, list[Item]]:
    """The name of a task file's schema, and its items. The first row decides the schema. Raises UserError: the file
    cannot be read, or a row is not of the schema. The message names file and line."""
    if str(path) == talk.NAME and not path.exists():
        return "conversation", _talk()
    schema: Schema | None = None
    items: list[Item] = []
    for number, row in json_lines(path):
        try:
            schema = schema or next((schema for schema in SCHEMAS if schema.mark in row), None)
            if schema is None:
                known = ", ".join(f"'{schema.mark}' ({schema.name})" for schema in SCHEMAS)
                raise UserError(f"an item of no known schema: it has none of the fields {known}")
            for key in row if schema.keys else ():
                if key not in schema.keys:
                    near = did_you_mean(key, schema.keys)
                    known = ", ".join(schema.keys)
                    raise UserError(f"unknown field '{shortened(key, 100)}'; known: {known}{near}")
            item = schema.item(row)
            if not 1 <= len(item.choices) <= MOST_CHOICES:
                raise UserError(f"{len(item.choices)} choices; must be 1 to {MOST_CHOICES}")
            if not all(item.choices):
                raise UserError(f"choice {item.choices.index('')} is empty")
            items.append(replace(item, line=number))
        except UserError as error:
            raise UserError(f"{path}, line {number}: {error}") from None
        if len(items) > MOST_ITEMS:
            raise UserError(f"{path} has more than {MOST_ITEMS:,} items")
    if schema is None:
        raise UserError(f"{path} has no items")
    return schema.name, items


def prompts(
    items: Sequence[Item], shots: int, pool: Sequence[Item], seed: int, *, same: bool
) -> Iterator[str]:
    """The context of each item behind `shots` solved examples that are drawn from the pool.

    same: the pool is the file of the items, and an item is no example of itself. One generator draws for all items in
    turn, in the way of lm-evaluation-harness 0.4.13 (lm_eval/api/samplers.py, ContextSampler). So its prompts with
    `fewshot_random_seed` = seed are these.
    """
    randomness = random.Random(seed)
    for item in items:
        drawn: list[Item] = []
        if shots and not same:
            drawn = randomness.sample(pool, shots)
        elif shots:
            drawn = [other for other in randomness.sample(pool, shots + 1) if other != item][:shots]
            if len(drawn) < shots:  # the pool has the item more than once
                drawn = randomness.sample([other for other in pool if other != item], shots)
        yield "".join(example.solved + BETWEEN for example in drawn) + item.context


def require_enough(shots: int, path: Path, pool: Sequence[Item], *, same: bool) -> None:
    """Raises UserError if the pool, which `path` holds, has fewer than `shots` examples for some item."""
    enough = len(pool) - (max(Counter(pool).values()) if same else 0)
    if shots > enough:
        raise UserError(
            f"shots = {shots}: {path} has {enough} examples for an item; name more with shots_from"
        )


def _talk() -> list[Item]:
    """The held-out questions of the set `talk`."""
    rows = [
        row for kind in talk.KINDS for row in zip(talk.questions(kind, True), talk.guesses(kind), strict=True)
    ]
    found = [
        (_conversation({MESSAGES: asked.messages, "kind": asked.kind}), guesses) for asked, guesses in rows
    ]
    return [replace(item, guesses=guesses, line=number) for number, (item, guesses) in enumerate(found, 1)]


def _conversation(row: Mapping[str, Any]) -> Item:
    try:
        messages = messages_of(_field(row, MESSAGES))
    except NotAConversation as error:
        raise UserError(str(error)) from None
    if messages[-1]["role"] != ANSWER:
        raise UserError(
            f"the last message has the role '{shortened(messages[-1]['role'], 20)}'; must be '{ANSWER}'"
        )
    return Item("", (messages[-1]["content"],), 0, messages=tuple(messages), kind=_text(row, "kind", ""))


def _own_choices(row: Mapping[str, Any]) -> Item:
    choices = _texts(row, "choices")
    if len(choices) < 2:
        raise UserError("choices must be 2 or more; a single text to complete with is called 'target'")
    answer = _index(_field(row, "answer"), "answer", len(choices))
    return Item(_text(row, "context"), choices, answer, _text(row, "join", " "))


def _hellaswag(row: Mapping[str, Any]) -> Item:
    """{"activity_label", "ctx_a", "ctx_b", "endings": [4 texts], "label": 0 to 3, ...}"""
    if "label" not in row:
        raise UserError(
            "no 'label': HellaSwag's test split is published without answers. Use hellaswag_val.jsonl"
        )
    endings = _texts(row, "endings")
    begun = f"{_text(row, 'activity_label')}: {_text(row, 'ctx_a')} {_text(row, 'ctx_b').capitalize()}"
    return Item(_cleaned(begun), tuple(map(_cleaned, endings)), _index(row["label"], "label", len(endings)))


def _cleaned(text: str) -> str:
    """WikiHow's text without its marks: "[title]" begins a sentence, other brackets go."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


def _arc(row: Mapping[str, Any]) -> Item:
    """{"question": {"stem", "choices": [{"text", "label"}, ...]}, "answerKey": a label}. On the Hugging Face hub the
    same has the form {"question": text, "choices": {"text": [...], "label": [...]}, "answerKey"}."""
    question, key = _field(row, "question"), _text(row, "answerKey")
    if isinstance(question, dict):
        stem, given = _text(question, "stem"), _field(question, "choices")
        if not isinstance(given, list) or not all(isinstance(choice, dict) for choice in given):
            raise UserError("question.choices must be a list of objects with 'text' and 'label'")
        texts = tuple(_text(choice, "text") for choice in given)
        labels = tuple(_text(choice, "label") for choice in given)
    else:
        stem, given = _text(row, "question"), _field(row, "choices")
        if not isinstance(given, dict):
            raise UserError("choices must be an object with the lists 'text' and 'label'")
        texts, labels = _texts(given, "text"), _texts(given, "label")
    if len(texts) != len(labels) or key not in labels:
        raise UserError(
            f"answerKey = '{shortened(key, 20)}' must be one of the labels {', '.join(labels)[:200]}"
        )
    return Item(f"Question: {stem}\nAnswer:", texts, labels.index(key))


def _lambada(row: Mapping[str, Any]) -> Item:
    """{"text"}: its last word is the target."""
    context, blank, word = _text(row, "text").rpartition(" ")
    if not blank or not word:
        raise UserError("text must have a last word behind a blank")
    return Item(context, (word,), 0)


SCHEMAS = (
    Schema("hellaswag", "endings", _hellaswag),
    Schema("arc", "answerKey", _arc),
    Schema("choices", "choices", _own_choices, ("context", "choices", "answer", "join")),
    Schema(
        "completion",
        "target",
        lambda row: Item(_text(row, "context"), (_text(row, "target"),), 0, _text(row, "join", " ")),
        ("context", "target", "join"),
    ),
    Schema("conversation", MESSAGES, _conversation, (MESSAGES, "kind")),
    Schema("lambada", "text", _lambada),
)


def _field(row: Mapping[str, Any], key: str) -> Any:
    if key not in row:
        raise UserError(f"no field '{key}'{did_you_mean(key, row)}")
    return row[key]


def _text(row: Mapping[str, Any], key: str, default: str | None = None) -> str:
    value = _field(row, key) if default is None else row.get(key, default)
    if not isinstance(value, str):
        raise UserError(f"{key} = {shortened(repr(value), 60)} must be text")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise UserError(f"{key} holds a lone surrogate: not valid Unicode")
    return value


def _texts(row: Mapping[str, Any], key: str) -> tuple[str, ...]:
    values = _field(row, key)
    if not isinstance(values, list):
        raise UserError(f"{key} must be a list of texts")
    return tuple(_text({key: value}, key) for value in values)


def _index(value: Any, key: str, count: int) -> int:
    """A whole number below `count`; as text, too, which is how the Hugging Face hub has HellaSwag's labels."""
    is_text = isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 9
    number = int(value) if is_text else value
    if type(number) is not int or not 0 <= number < count:
        raise UserError(f"{key} = {shortened(repr(value), 60)} must be a whole number from 0 to {count - 1}")
    return number


MOST_TEXT = 1 << 30
"""Bytes of a text file, which is held in memory as a whole."""
MOST_LINE = 64 << 20
"""Bytes of a line of JSON."""


def documents(path: Path, text_key: str = "text") -> Iterator[str]:
    """The documents of a file: the text under `text_key` of each line of a .jsonl; all of any other file. Raises
    UserError: the file cannot be read, is not UTF-8 or JSON, or a line has no such text."""
    if path.suffix.lower() != ".jsonl":
        require_readable(path)
        yield read_text(path, MOST_TEXT)
        return
    for number, row in json_lines(path):
        try:
            text = _text(row, text_key)
        except UserError as error:
            raise UserError(f"{path}, line {number}: {error}") from None
        yield text


def require_readable(path: Path) -> None:
    """Raises UserError if a file cannot be opened."""
    with _opened(path):
        pass


def json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number from 1, object) of each line of a file that is not blank. Raises UserError: the file cannot be read,
    or a line is not a JSON object."""
    with _opened(path) as file:
        for number, (row, _) in enumerate(objects(file, most=MOST_LINE), 1):
            if isinstance(row, str):
                raise UserError(f"{path}, line {number}: {row}")
            if row is not None:
                yield number, row


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        with open_file(path) as file:
            yield file
    except FileNotFoundError:
        raise UserError(f"no such file: '{path}'; {nearest(path)}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
