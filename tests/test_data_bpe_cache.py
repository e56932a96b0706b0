"""The table of words gives the ids that the library gives, for every text."""

from __future__ import annotations

import json
import random

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from fivefold.data import bpe_cache
from fivefold.data import tokenizer as ours
from fivefold.data.bpe_cache import LLAMA3, QWEN2, BpeCache, applies

TEXT = (
    "The quick brown fox can't jump; it'll WAIT for 12345 years, naïvely.\n\n    def f(self, x): return x\t# ümlaut\n"
    "\u0301combining e\u0301 \u212a \u017f's  double  blanks \u3000\r\n\r\n a\0b <|end|> 漢字 Straße I'M don't'x "
)
ALPHABET = [
    *TEXT,
    *"aaaabcdefgh  \n\n'''sStT",
    "\u1d2c",
    "\U0001f600",
    "x" * 70,
    " " * 70,
    "\n" * 70,
    "é" * 20,
    "word" * 5,
]


def trained(pattern: str | None) -> Tokenizer:
    inner: Tokenizer = Tokenizer(models.BPE())
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    split = [] if pattern is None else [pre_tokenizers.Split(Regex(pattern), "isolated"), as_bytes]
    inner.pre_tokenizer = pre_tokenizers.Sequence(split) if split else as_bytes  # type: ignore[assignment]
    inner.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|end|>"], initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )  # fmt: skip
    inner.train_from_iterator([TEXT * 3], trainer=trainer)
    inner.encode_special_tokens = True
    return inner


@pytest.mark.parametrize(
    "pattern", [ours.WORDS, LLAMA3, QWEN2, None], ids=["ours", "llama3", "qwen2", "gpt2"]
)
@pytest.mark.parametrize("slots", [1 << 18, 1 << 6])
def test_ids_are_those_of_the_library(pattern: str | None, slots: int, monkeypatch: pytest.MonkeyPatch):
    """Of random texts, again and again, so that words are looked up; with a table that is full, too."""
    monkeypatch.setattr(bpe_cache, "SLOTS", slots)
    monkeypatch.setattr(bpe_cache, "MOST_WORDS", slots)
    inner, randomness = trained(pattern), random.Random(slots)
    table = BpeCache(inner)
    for _ in range(150):
        text = "".join(randomness.choices(ALPHABET, k=randomness.randrange(120)))
        text += " ".join(randomness.choices(TEXT.split(" "), k=randomness.randrange(40)))
        assert table.encode(text).tolist() == inner.encode(text, add_special_tokens=False).ids, repr(text)
    assert table._known > 20


def test_a_tokenizer_of_ours_uses_the_table_and_others_do_not():
    bpe = ours.train_bpe([TEXT * 9], 400)
    text = TEXT * 20
    assert bpe._cache is None
    long = bpe.encode(text)
    assert bpe._cache is not None
    assert long == bpe._inner.encode(text, add_special_tokens=False).ids
    spec = json.loads(bpe.to_json())
    assert not applies(spec, ()), "another pattern"
    for change in (
        {"normalizer": {"type": "NFC"}},
        {"model": spec["model"] | {"dropout": 0.1}},
        {"pre_tokenizer": None},
    ):
        assert not applies(spec | change, (ours.WORDS,))
    whole = [spec["added_tokens"][0] | {"special": False}]
    assert not applies(spec | {"added_tokens": whole}, (ours.WORDS,))
