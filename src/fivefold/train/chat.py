"""A conversation with a run's model. Its history stays within the context length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import nn

from fivefold.data.chat import ChatTemplate
from fivefold.data.conversations import ANSWER, Message, NotAConversation, beside
from fivefold.data.tokenizer import Tokenizer
from fivefold.errors import UserError
from fivefold.launch.ranks import device_for
from fivefold.models.section import ModelSection
from fivefold.train.generate import Sampling, generate_text, open_run, require_tokenizer


@dataclass
class Chat:
    """A model with its tokenizer, and what was said so far.

    template: None for a base model, which has learned from texts and not from conversations: it continues what is said.
    system: the first message, which tells the model how to answer.
    """

    module: nn.Module
    model: ModelSection
    tokenizer: Tokenizer
    template: ChatTemplate | None
    sampling: Sampling = field(default_factory=Sampling)
    system: str = ""
    messages: list[Message] = field(default_factory=list)
    text: str = ""
    turns: int = 0

    def reset(self) -> None:
        """Forgets what was said."""
        self.messages, self.text, self.turns = [], "", 0

    def ask(self, said: str) -> Iterator[str]:
        """Yields the answer to what is said, in pieces of text. An answer that is not read to its end counts as it is.

        Raises:
            UserError: it is longer than the model's context, or the chat template refuses it.
        """
        prompt, ends, stop = self._hear(said)
        room = self.model.seq_len - len(prompt) if self.template else self.sampling.max_tokens
        how = replace(
            self.sampling,
            max_tokens=min(self.sampling.max_tokens, room),
            seed=(self.sampling.seed + self.turns) % 2**63,
            stop=(*self.sampling.stop, *stop),
        )
        self.turns += 1
        pieces: list[str] = []
        try:
            for piece in generate_text(self.module, self.model, self.tokenizer, prompt, how, ends):
                piece = piece if pieces or not self.template else piece.lstrip()
                if piece:
                    pieces.append(piece)
                    yield piece
        finally:
            answer = "".join(pieces)
            self.text += answer
            self.messages.append({"role": ANSWER, "content": answer.strip()})

    def _hear(self, said: str) -> tuple[list[int], frozenset[int], Sequence[str]]:
        """The prompt's ids, the tokens and the texts that end the answer."""
        if self.template is None:
            text = f"{self.text}\n{said}" if self.text else said
            prompt = self.tokenizer.encode(text)
            self.text = text
            return prompt, frozenset(), ()
        self.messages.append({"role": "user", "content": said})
        try:
            prompt = self._fit(self.template)
        except (NotAConversation, UserError) as error:
            self.messages.pop()
            raise UserError(str(error)) from None
        return prompt, self.template.end_ids, [self.template.end_text] if self.template.end_text else []

    def _fit(self, template: ChatTemplate) -> list[int]:
        """The prompt, without the oldest questions and answers if there would be no room for an answer."""
        most = self.model.seq_len - min(self.sampling.max_tokens, self.model.seq_len // 2)
        first = [{"role": "system", "content": self.system}] if self.system else []
        kept = self.messages
        prompt = template.prompt([*first, *kept])
        while len(prompt) > most and len(kept) > 1:
            kept = kept[2:]
            prompt = template.prompt([*first, *kept])
        if len(prompt) >= self.model.seq_len:
            raise UserError(
                f"this has {len(prompt):,} tokens; the model sees at most {self.model.seq_len:,}, its answer included"
            )
        self.messages = kept
        return prompt


def open_chat(
    run: Path, checkpoint: Path | None = None, sampling: Sampling | None = None, system: str = ""
) -> Chat:
    """A conversation with a run's model.

    Raises:
        UserError: the run has no checkpoint or no tokenizer, or its chat template cannot be used.
    """
    module, recipe, tokenizer = open_run(run, checkpoint=checkpoint, device=device_for(0))
    tokenizer = require_tokenizer(run, tokenizer)
    return Chat(module, recipe.model, tokenizer, template_of(run, tokenizer), sampling or Sampling(), system)


def template_of(run: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The chat template that a run has learned from; None: a base model."""
    found = beside(run)
    return ChatTemplate(found, tokenizer) if found else None
