"""Generates text: samples token by token with a key-value cache, and streams the text."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from fivefold.checkpoint import store
from fivefold.checkpoint.source import tokenizer_of, weights_of
from fivefold.data.chat import ANSWER, ChatTemplate, Message, NotAConversation, beside
from fivefold.data.kinds.kind import TOKENS
from fivefold.data.tokenizer import Tokenizer
from fivefold.errors import UserError
from fivefold.files import guard
from fivefold.launch.ranks import device_for
from fivefold.models.base import LanguageModel, build
from fivefold.models.card import card_of
from fivefold.models.hf import require_weights
from fivefold.models.layers import Cache
from fivefold.models.rules import having
from fivefold.models.section import ModelSection
from fivefold.recipe import Recipe, load

BROKEN = "\ufffd"  # what a decoder gives for bytes that are no whole character (yet)
BASE = (
    "this is a base model. It was trained on texts and not on conversations, so it continues what you write instead of "
    "answering. For answers train it on conversations: data.chat_template (docs/chat.md)"
)
Seen = Callable[[Tensor, int], object]
"""Is shown the logits (V,) from which each token was sampled, and its id; that of the token that ends the text, too."""


@dataclass(frozen=True)
class Sampling:
    """Sampling settings."""

    max_tokens: int = 128
    """Maximum number of new tokens. The text may end earlier."""
    temperature: float = 0.8
    """Sampling temperature; 0 is greedy, 1 samples from the model's distribution."""
    top_k: int = 0
    """Sample from the k likeliest tokens; 0: from all."""
    top_p: float = 1.0
    """Sample from the likeliest tokens with this total probability (arXiv 1904.09751); 1: from all."""
    seed: int = 0
    """The same seed gives the same text."""
    stop: tuple[str, ...] = ()
    """Texts that end the new text. They are no part of it."""

    def __post_init__(self) -> None:
        for name, valid, allowed in (
            ("max_tokens", self.max_tokens >= 1, "1 or more"),
            ("temperature", 0 <= self.temperature < float("inf"), "0 or more"),
            ("top_k", self.top_k >= 0, "0 (all) or more"),
            ("top_p", 0 < self.top_p <= 1, "more than 0, at most 1"),
            ("seed", 0 <= self.seed < 2**63, "0 to 2^63 - 1"),
            ("stop", all(self.stop), "texts that are not empty"),
        ):
            if not valid:
                raise UserError(f"{name} = {getattr(self, name)}: must be {allowed}")


def open_run(
    run: Path,
    *,
    checkpoint: Path | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> tuple[LanguageModel, Recipe, Tokenizer | None]:
    """The model of a run with the weights of a checkpoint (None: the latest), its recipe and its tokenizer.

    Args:
        dtype: of the weights; None: as stored. Buffers always stay as stored.

    Raises:
        UserError: the folder is not a run, has no checkpoint, or its weights are not those of the recipe's model, or
            its tokenizer is not the checkpoint's.
    """
    guard(run)
    recipe = load(run / "recipe.toml")
    checkpoint = checkpoint or store.latest(run)
    state = weights_of(checkpoint)
    require_weights(state, recipe.model)
    module = build(recipe.model)
    buffers = card_of(recipe.model).buffers
    module.load_state_dict(
        {name: t.to(device, None if name in buffers else dtype) for name, t in state.items()}, assign=True
    )
    return module.eval(), recipe, tokenizer_of(run, checkpoint)


def require_tokenizer(run: Path, tokenizer: Tokenizer | None) -> Tokenizer:
    """Raises UserError if a run has no tokenizer."""
    if tokenizer is None:
        recipe = load(run / "recipe.toml")
        sources = [recipe.data.source, *(each.source for each in recipe.data.sources)]
        why = "it was trained on token files"
        if not any(source.startswith(TOKENS) for source in sources):
            why = "its folder has no tokenizer.json. Put the model's tokenizer.json and tokenizer_config.json there"
        raise UserError(f"'{run}' has no tokenizer to encode text with: {why}")
    return tokenizer


def generate_text(
    module: nn.Module,
    model: ModelSection,
    tokenizer: Tokenizer,
    prompt: str | Sequence[int],
    sampling: Sampling,
    ends: Collection[int] = (),
    seen: Seen | None = None,
) -> Iterator[str]:
    """Continues a prompt, text or ids, and yields the new text in pieces of whole characters.

    A prompt of text begins as in training, and an empty one starts a document. The text stops at the end token, at one
    of `ends`, or before one of the texts `sampling.stop`.
    """
    ids = tokenizer.begun(prompt) if isinstance(prompt, str) else prompt or tokenizer.begin_ids
    ends = {*tokenizer.end_ids, *ends}
    tokens = generate(module, model, ids, sampling, vocab_size=tokenizer.vocab_size, end_id=ends, seen=seen)
    return until(stream_text(tokens, tokenizer.decode, ids, tokenizer.byte_ids), sampling.stop)


def samples_of(
    module: nn.Module,
    model: ModelSection,
    tokenizer: Tokenizer,
    prompt: str | Sequence[int],
    sampling: Sampling,
    samples: int,
    ends: Collection[int] = (),
) -> list[str]:
    """Several continuations of a prompt, as `generate_text` writes them: with the seed, the next one, and so on."""
    seeds = [(sampling.seed + i) % 2**63 for i in range(samples)]
    found = (replace(sampling, seed=seed) for seed in seeds)
    return ["".join(generate_text(module, model, tokenizer, prompt, how, ends)) for how in found]


def until(pieces: Iterable[str], stops: Sequence[str]) -> Iterator[str]:
    """The pieces up to the first of the texts `stops`. What may be the beginning of one is held back."""
    held = ""
    for piece in pieces:
        held += piece
        found = [at for stop in stops if (at := held.find(stop)) >= 0]
        if found:
            if min(found):
                yield held[: min(found)]
            return
        kept = max((n for stop in stops for n in range(1, len(stop)) if held.endswith(stop[:n])), default=0)
        if len(held) > kept:
            yield held[: len(held) - kept]
            held = held[len(held) - kept :]
    if held:
        yield held


def generate(
    module: nn.Module,
    model: ModelSection,
    prompt: Sequence[int],
    sampling: Sampling,
    *,
    vocab_size: int | None = None,
    end_id: int | Collection[int] = (),
    seen: Seen | None = None,
) -> Iterator[int]:
    """Continues a prompt of token ids and yields the new ids one by one. `end_id`, or each of several, ends the text
    and is not yielded.

    The model sees at most `model.seq_len` tokens, the last ones of a longer prompt. When the text grows longer, it
    continues from its last half, which is recomputed. The module is in evaluation mode meanwhile.

    Args:
        vocab_size: only ids below it are sampled (a model's vocabulary may be padded). None: all.

    Raises:
        UserError: the model is bidirectional, the prompt is empty or holds an id that the model lacks, or the
            model's output is not finite.
    """
    _check(model, prompt)
    ends = {end_id} if isinstance(end_id, int) else frozenset(end_id)
    text, weight, was_training = list(prompt[-model.seq_len :]), next(module.parameters()), module.training
    capacity = min(model.seq_len, len(text) + sampling.max_tokens)
    cache = Cache(model, capacity=capacity, dtype=weight.dtype, device=weight.device)
    randomness = torch.Generator().manual_seed(sampling.seed)
    module.eval()
    try:
        new = text
        for _ in range(sampling.max_tokens):
            if cache.length + len(new) > cache.capacity:
                cache.clear()
                new = text[-(cache.capacity // 2) :]
            tokens_1T = torch.tensor([new], device=weight.device)
            with torch.no_grad():  # not around the yield, where it would stay on for the caller
                logits = module(tokens_1T, cache=cache)[0, -1].cpu()
            token = sample(logits[:vocab_size], sampling, randomness)
            if seen is not None:
                seen(logits[:vocab_size], token)
            if token in ends:
                return
            yield token
            text.append(token)
            new = [token]
    finally:
        module.train(was_training)


def sample(logits_V: Tensor, sampling: Sampling, randomness: torch.Generator) -> int:
    """Samples one token id from fp32 logits (V,)."""
    if not logits_V.isfinite().all():
        raise UserError("cannot sample: the model's output is not finite (its training has diverged)")
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    k = min(sampling.top_k or len(logits_V), len(logits_V))
    values_k, ids_k = logits_V.topk(k)  # from the likeliest down
    # Less the largest, in fp64: at a temperature near 0 the quotient would overflow, and its softmax be NaN.
    p_k = ((values_k - values_k[0]).double() / sampling.temperature).softmax(0)
    likelier_k = p_k.cumsum(0) - p_k  # probability of all before: 0 for the first, which always stays
    p_k = p_k.where(likelier_k < sampling.top_p, 0.0)
    return int(ids_k[torch.multinomial(p_k, 1, generator=randomness)])


def stream_text(
    tokens: Iterable[int],
    decode: Callable[[Sequence[int]], str],
    before: Sequence[int] = (),
    together: Collection[int] = (),
) -> Iterator[str]:
    """Text of token ids in pieces, each as soon as it is certain. The joined pieces are the decoded whole.

    A character of several bytes may span several tokens, which are held back until it is complete. Some tokenizers
    decode a token differently at the start of a text, so tokens are decoded after those before them.

    Args:
        before: ids of the text in front, which is not yielded (the prompt).
        together: ids that decode as a whole run: one that is no text makes none of those before it.
    """
    front, held, sent = list(before), [], 0
    start = len(decode(front))  # where the text of the held tokens begins
    text = ""
    for token in tokens:
        held.append(token)
        text = decode(front + held)[start:]
        if token in together:
            continue
        certain = text.removesuffix(BROKEN)  # only the last character can still be completed
        if len(certain) > sent:
            yield certain[sent:]
            sent = len(certain)
        if text and text == certain:
            front, held, sent, text = held, [], 0, ""
            start = len(decode(front))
    if len(text) > sent:
        yield text[sent:]


def _check(model: ModelSection, prompt: Sequence[int]) -> None:
    if not card_of(model).causal:
        raise UserError(
            f"{model.arch} is bidirectional and generates no text; use a run of {having('causal', 'or')}"
        )
    if not prompt:
        raise UserError("cannot generate from an empty prompt: give at least one token")
    worst = max(prompt, key=lambda token: token if token >= 0 else float("inf"))
    if not 0 <= worst < (model.vocab_size or 0):
        raise UserError(
            f"prompt holds token id {worst}; the model knows ids 0 to {(model.vocab_size or 0) - 1}"
        )


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

    def ask(self, said: str, seen: Seen | None = None) -> Iterator[str]:
        """Yields the answer to what is said, in pieces of text. An answer that is not read to its end counts as it is.
        Raises UserError: it is longer than the model's context, or the chat template refuses it."""
        ends, stop, template = frozenset[int](), list[str](), self.template
        if template is None:
            text = f"{self.text}\n{said}" if self.text else said
            prompt = self.tokenizer.begun(text)
            self.text = text
        else:
            self.messages.append({"role": "user", "content": said})
            try:
                prompt = self._fit(template)
            except (NotAConversation, UserError) as error:
                self.messages.pop()
                raise UserError(str(error)) from None
            ends, stop = template.end_ids, [template.end_text] if template.end_text else []
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
            for piece in generate_text(self.module, self.model, self.tokenizer, prompt, how, ends, seen):
                piece = piece if pieces or not self.template else piece.lstrip()
                if piece:
                    pieces.append(piece)
                    yield piece
        finally:
            answer = "".join(pieces)
            self.text += answer
            self.messages.append({"role": ANSWER, "content": answer.strip()})

    def _fit(self, template: ChatTemplate) -> list[int]:
        """The prompt, without the oldest questions and answers if there would be no room for an answer."""
        most = self.model.seq_len - min(self.sampling.max_tokens, self.model.seq_len // 2)
        first = [{"role": "system", "content": self.system}] if self.system else []
        messages = self.messages
        prompt = template.prompt([*first, *messages])
        while len(prompt) > most and len(messages) > 1:
            messages = messages[2:]
            prompt = template.prompt([*first, *messages])
        if len(prompt) >= self.model.seq_len:
            raise UserError(
                f"this has {len(prompt):,} tokens; the model sees at most {self.model.seq_len:,}, its answer included"
            )
        self.messages = messages
        return prompt


def open_chat(
    run: Path, checkpoint: Path | None = None, sampling: Sampling | None = None, system: str = ""
) -> Chat:
    """A conversation with a run's model. Raises UserError: the run has no checkpoint or no tokenizer, or its chat
    template cannot be used."""
    module, recipe, tokenizer = open_run(run, checkpoint=checkpoint, device=device_for(0))
    tokenizer = require_tokenizer(run, tokenizer)
    return Chat(module, recipe.model, tokenizer, template_of(run, tokenizer), sampling or Sampling(), system)


def template_of(run: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The chat template that a run has learned from; None: a base model."""
    found = beside(run)
    return ChatTemplate(found, tokenizer) if found else None
