"""Conversations in rows of data, and the chat templates that a recipe may name. No torch.

A chat template is a Jinja text that turns messages into the text that a model reads, as Hugging Face's tokenizers have
it (`chat_template`). `chat.py` renders it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

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
    """The messages of a row, checked.

    Raises:
        NotAConversation: they are no list of objects with the texts `role` and `content`.
    """
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
    """The Jinja text that data.chat_template names. tokenizer_spec: `data.tokenizer`.

    Raises:
        UserError: there is none.
    """
    if spec in TEMPLATES:
        return TEMPLATES[spec].source
    if spec == OWN:
        found = beside(expanded("data.tokenizer", tokenizer_spec))
        if found is None:
            raise UserError(
                f"data.chat_template = 'tokenizer': there is no chat template beside data.tokenizer = "
                f"{tokenizer_spec!r}. Use one of {', '.join(TEMPLATES)}, or the path of a Jinja file"
            )
        return found
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
    found = read_json(config).get("chat_template")
    if isinstance(found, list):  # several by name
        named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None
