"""Conversations in rows of data, their chat templates, and their token ids. No torch.

A chat template is a Jinja text that turns messages into the text that a model reads, as Hugging Face's tokenizers have
it (`chat_template`). It is rendered in Jinja's sandbox, with the names that Hugging Face's `apply_chat_template` gives
it. Special tokens come from the template alone: a message that contains `<|im_end|>` gets the ordinary tokens of these
characters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fivefold.data.tokenizer import Tokenizer, with_special
from fivefold.errors import UserError, shortened
from fivefold.files import expanded, read_json, read_text

ANSWER = "assistant"
"""The role whose messages count in the loss."""
MESSAGES = "messages"
"""The field of a row that holds a conversation."""
OWN, TEMPLATE_FILE = "tokenizer", "chat_template.jinja"
"""The name of the template beside `data.tokenizer`, and the file that may hold it."""
MOST_TEMPLATE = 1 << 20
OPEN, CLOSE, APART = "\ufdd0", "\ufdd1", "\ufdd2"
"""Unicode's noncharacters, which no text holds. The first two stand around an answer. The third cuts what looks like a
special token in a message."""
_MARKS = re.compile(f"[{OPEN}{CLOSE}{APART}]")
MOST_TEXT = 64 << 20
"""Characters of a rendered conversation."""

Message = Mapping[str, Any]


class NamedTemplate(NamedTuple):
    """A template of ours. special: the tokens that it needs, besides the tokenizer's own end."""

    source: str
    special: tuple[str, ...] = ()


TEMPLATES = {
    "chatml": NamedTemplate(
        "{% for message in messages %}"
        "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
        ("<|im_start|>", "<|im_end|>"),
    ),
    "plain": NamedTemplate(
        "{% for message in messages %}"
        "{{ message.role.capitalize() + ': ' + message.content }}"
        "{{ (eos_token if message.role == 'assistant' else '') + '\\n' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
    ),
}


class NotAConversation(Exception):
    """Why a row's messages cannot be used."""


def messages_of(value: Any) -> list[Message]:
    """The messages of a row, checked. Raises NotAConversation: they are no list of objects with the texts `role` and
    `content`."""
    if not isinstance(value, list) or not value:
        raise NotAConversation(f"'{MESSAGES}' must be a list of messages")
    for number, message in enumerate(value, 1):
        if not isinstance(message, dict):
            raise NotAConversation(f"message {number} is no object with 'role' and 'content'")
        for key in ("role", "content"):
            text = message.get(key)
            if not isinstance(text, str):
                keys = ", ".join(map(str, message)) or "none"
                raise NotAConversation(
                    f"message {number}: '{key}' must be text (its keys: {shortened(keys, 100)})"
                )
            if any("\ud800" <= c <= "\udfff" for c in text):
                raise NotAConversation(f"message {number}: '{key}' is not valid Unicode text")
    return value


def special_of(spec: str) -> tuple[str, ...]:
    """The special tokens that data.chat_template needs, if it is one of ours."""
    return TEMPLATES[spec].special if spec in TEMPLATES else ()


def read_template(spec: str, tokenizer_spec: str) -> str:
    """The Jinja text that data.chat_template names. tokenizer_spec: `data.tokenizer`. Raises UserError: there is
    none."""
    if spec in TEMPLATES:
        return TEMPLATES[spec].source
    if spec == OWN:
        template = beside(expanded("data.tokenizer", tokenizer_spec))
        if template is None:
            raise UserError(
                f"data.chat_template = 'tokenizer': there is no chat template beside data.tokenizer = "
                f"{tokenizer_spec!r}. Use one of {', '.join(TEMPLATES)}, or the path of a Jinja file"
            )
        return template
    path = expanded("data.chat_template", spec)
    if not path.is_file():
        raise UserError(
            f"data.chat_template = {spec!r}: must be {', '.join(TEMPLATES)}, {OWN}, or the path of a Jinja file"
        )
    return read_text(path, MOST_TEMPLATE, "data.chat_template: ")


def beside(path: Path) -> str | None:
    """The chat template of a tokenizer's folder, or of the folder of a tokenizer.json; None if it has none."""
    folder = path if path.is_dir() else path.parent
    if (folder / TEMPLATE_FILE).is_file():
        return read_text(folder / TEMPLATE_FILE, MOST_TEMPLATE, "data.chat_template: ")
    config = folder / "tokenizer_config.json"
    if not config.is_file():
        return None
    template = read_json(config).get("chat_template")
    if isinstance(template, list):  # several by name
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


@dataclass(frozen=True)
class Encoded:
    """Token ids, and True for those of answers: int64 and bool, (N,)."""

    ids: np.ndarray
    counted: np.ndarray


def _environment() -> Any:
    """Jinja's sandbox. It takes a moment to import."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Marked(Extension):
        """`{% generation %} ... {% endgeneration %}` around answers, as in Hugging Face's templates."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller: Any) -> str:
            return f"{OPEN}{caller()}{CLOSE}"

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def as_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **how: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **how)

    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Marked, loopcontrols]
    )
    for unused in ("lipsum", "cycler", "joiner"):
        del sandbox.globals[unused]
    sandbox.filters["tojson"] = as_json  # Jinja's own escapes HTML
    sandbox.globals["raise_exception"] = refuse
    sandbox.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return sandbox


def _date_of_data(form: str) -> str:
    """`strftime_now` in data, whose tokens must not depend on the day: the date that Llama 3.2's template falls back
    to."""
    return datetime(2024, 7, 26).strftime(form)


class ChatTemplate:
    """A chat template with the tokenizer that it is for.

    source: the Jinja text. tokenizer: with the special tokens that the template needs.
    """

    def __init__(self, source: str, tokenizer: Tokenizer):
        from jinja2 import TemplateError

        self.source, self.tokenizer = source, tokenizer
        try:
            self._template = _environment().from_string(source)
        except TemplateError as error:
            raise UserError(
                f"data.chat_template: not a Jinja template: {error.message or type(error).__name__}"
            ) from None
        longest_first = sorted(tokenizer.special_tokens, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)))
        special = {number: text for text, number in tokenizer.special_tokens.items()}
        self._names = {"eos_token": special[tokenizer.end_id], "bos_token": tokenizer.begin or ""}
        try:
            asked = [{"role": "user", "content": "Q"}]
            prompt = self.render(asked, answer_next=True)
            whole = self.render([*asked, {"role": ANSWER, "content": "unlikely"}])
        except NotAConversation as error:
            raise UserError(f"data.chat_template: a question and an answer: {error}") from None
        behind = whole[len(prompt) :] if whole.startswith(prompt) else whole
        self.ends = behind.rpartition("unlikely")[2]  # the text that the template puts behind an answer

    def render(self, messages: Sequence[Message], answer_next: bool = False) -> str:
        """The text of a conversation. answer_next: the beginning of an answer follows. Raises NotAConversation: the
        template refuses it."""
        return _MARKS.sub("", self._render(messages, answer_next))

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a conversation up to where an answer begins. Raises NotAConversation: the template refuses it."""
        text = self._render([self._cut(m) for m in messages], answer_next=True)
        return self._encode(_marked(text)[0], []).ids.tolist()

    def encode(self, messages: Sequence[Message]) -> Encoded:
        """Ids of a conversation. Its answers count. Raises NotAConversation: the template refuses it, or hides where
        answers are."""
        cut = [self._cut(message) for message in messages]
        text = self._render(cut, strftime_now=_date_of_data)
        if OPEN in text:
            return self._encode(*_marked(text))
        return self._encode(text, self._answers(cut, text))

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """The tokens that end an answer: the first special one behind it, and the tokenizer's end."""
        special = self._special.search(self.ends)
        first = {self.tokenizer.special_tokens[special[0]]} if special else set()
        return frozenset({*first, self.tokenizer.end_id})

    @cached_property
    def end_text(self) -> str:
        """The text that ends an answer where no special token does; else ""."""
        return "" if self._special.search(self.ends) else self.ends.strip() or self.ends

    def _render(self, messages: Sequence[Message], answer_next: bool = False, **names: Any) -> str:
        from jinja2 import TemplateError

        try:
            pieces, size = [], 0
            for piece in self._template.generate(
                messages=messages,
                add_generation_prompt=answer_next,
                tools=None,
                documents=None,
                **self._names,
                **names,
            ):
                pieces.append(piece)
                size += len(piece)
                if size > MOST_TEXT:
                    raise NotAConversation(f"the chat template gives more than {MOST_TEXT:,} characters")
            return "".join(pieces)
        except (TemplateError, ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
            reason = error.message if isinstance(error, TemplateError) else str(error)
            raise NotAConversation(
                f"the chat template refuses it: {shortened(reason or 'no reason given', 200)}"
            ) from None

    def _cut(self, value: Any) -> Any:
        """The message, where no text is a special token any more."""
        if isinstance(value, str):
            plain = _MARKS.sub("", value)
            return self._special.sub(lambda token: token[0][0] + APART + token[0][1:], plain)
        if isinstance(value, dict):
            return {key: self._cut(each) for key, each in value.items()}
        return [self._cut(each) for each in value] if isinstance(value, list) else value

    def _answers(self, messages: Sequence[Message], text: str) -> list[tuple[int, int]]:
        """Where answers begin and end in the text of all messages: behind the prompt that asks for each."""
        places = []
        for i, message in enumerate(messages):
            if message["role"] != ANSWER:
                continue
            prompt = self._render(messages[:i], answer_next=True, strftime_now=_date_of_data)
            last = i == len(messages) - 1
            through = text if last else self._render(messages[: i + 1], strftime_now=_date_of_data)
            stop = len(through)
            if not text.startswith(through):  # templates that drop the reasoning of earlier answers
                content = message["content"].strip() + self.ends
                at = text.find(content, len(prompt))
                stop = at + len(content)
                if at < 0:
                    raise NotAConversation(_LOST)
            if not text.startswith(prompt):
                raise NotAConversation(_LOST)
            places.append((len(prompt), stop))
        return places

    def _encode(self, text: str, answers: Sequence[tuple[int, int]]) -> Encoded:
        """Ids of a rendered text: special tokens, and the text between them. It is cut where answers begin and end, so
        an answer's tokens are those that follow its prompt."""
        ids: list[np.ndarray] = []
        counted: list[np.ndarray] = []
        borders = sorted({0, len(text), *(at for answer in answers for at in answer)})
        for low, high in pairwise(borders):
            counts = any(start <= low < stop for start, stop in answers)
            for piece in self._pieces(text[low:high]):
                ids.append(piece)
                counted.append(np.full(len(piece), counts))
        none: list[np.ndarray] = [np.empty(0, np.int64)]
        return Encoded(np.concatenate(none + ids), np.concatenate([np.empty(0, bool), *counted]))

    def _pieces(self, text: str) -> list[np.ndarray]:
        ids, start = [], 0
        for match in self._special.finditer(text):
            ids += [self._plain(text[start : match.start()])]
            ids += [np.array([self.tokenizer.special_tokens[match[0]]], np.int64)]
            start = match.end()
        return [*ids, self._plain(text[start:])]

    def _plain(self, text: str) -> np.ndarray:
        text = text.replace(APART, "")
        return self.tokenizer.encode_array(text, continues=True).astype(np.int64)


_LOST = (
    "the chat template writes earlier messages in another way once others follow, so an answer cannot be found. Put "
    "{% generation %} and {% endgeneration %} around answers in the template"
)


def _marked(text: str) -> tuple[str, list[tuple[int, int]]]:
    """The text without the marks of answers, and where these begin and end."""
    answers, plain, at = [], [], 0
    for piece in re.split(f"({OPEN}[^{CLOSE}]*{CLOSE})", text):
        if piece.startswith(OPEN):
            piece = piece[1:-1]
            answers.append((at, at + len(piece)))
        plain.append(piece)
        at += len(piece)
    return "".join(plain), answers


def open_template(spec: str, tokenizer_spec: str, tokenizer: Tokenizer) -> ChatTemplate:
    """The template that data.chat_template names, with a tokenizer that has its special tokens. Raises UserError: there
    is none, or it is not a Jinja template that answers a question."""
    return ChatTemplate(read_template(spec, tokenizer_spec), with_special(tokenizer, special_of(spec)))
