"""Long texts are encoded in pieces, and have the ids that the library gives the whole."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from marks import only
from test_begin import FAMILIES, made
from tokenizers import models, normalizers, pre_tokenizers

from fivefold.data import pieces
from fivefold.data.pieces import Pieces
from fivefold.data.tokenizer import load_tokenizer, train_bpe

N = 30_000
WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "the",
    "mat",
    "and",
    "def",
    "return",
    "'x'",
    "12345",
    "naïve",
    "日本語",
    "☂",
    "",
]


def texts() -> dict[str, str]:
    draw = random.Random(0)
    letters = "".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=N))
    lines = "".join(
        "    " * draw.randrange(3) + " ".join(draw.choices(WORDS, k=8)) + "\n" for _ in range(N // 40)
    )
    return {
        "letters": letters,
        "one letter": "a" * N,
        "blanks": " " * N,
        "blanks and words": "".join(" " * draw.randrange(1, 3000) + draw.choice(WORDS) for _ in range(20)),
        "line breaks": "\n" * N,
        "CJK": "".join(draw.choices("日本語中文字", k=N)),
        "words": " ".join(draw.choices(WORDS, k=N // 4)),
        "digits": "".join(draw.choices("0123456789", k=N)),
        "signs": "".join(draw.choices("=-*/#!?", k=N)),
        "emoji": "".join(draw.choices("🙂🙃👩‍👩‍👧", k=N // 2)),
        "lines": lines,
        "indented": "".join("    " + line + "\n" for line in lines.split("\n")),
        "Windows": lines.replace("\n", "\r\n"),
    }


TEXTS = texts()


def unigram() -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(
        models.Unigram(
            [
                ("<unk>", 0.0),
                *((c, -3.0) for c in "▁abcdefghijklmnopqrstuvwxyz"),
                ("▁the", -2.0),
                ("at", -4.0),
            ],
            0,
        )
    )
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    return inner


def t5() -> tokenizers.Tokenizer:
    """Line breaks are lost, and each word gets a blank."""
    inner = unigram()
    inner.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Strip(left=False)])
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    )
    return inner


def kinds() -> dict[str, tokenizers.Tokenizer]:
    found = {name: made(FAMILIES[name]) for name in ("llama2", "mistral", "gemma", "llama3", "qwen2", "gpt2")}
    own = train_bpe([TEXTS["lines"], "a" * 300], 400)
    lower = tokenizers.Tokenizer.from_str(made(FAMILIES["gpt2"]).to_str())
    lower.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    roberta = made(FAMILIES["gpt2"])
    roberta.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    split = made(FAMILIES["mistral"])
    split.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="always", split=True)
    return found | {
        "ours": own._inner,
        "lower-case": lower,
        "roberta": roberta,
        "metaspace-split": split,
        "unigram": unigram(),
        "t5": t5(),
    }


KINDS = kinds()


@only(
    "llama2-*",
    "ours-letters",
    "mistral-CJK",
    "gpt2-blanks",
    "gpt2-indented",
    "gemma-one letter",
    "t5-letters",
)
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_ids_are_those_of_the_whole(
    kind: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(pieces, "PIECE", 6000)  # as 2^17 for longer texts
    path = tmp_path / "tokenizer.json"
    path.write_text(KINDS[kind].to_str())
    known = KINDS[kind].get_vocab()
    end = next(
        t for t in ("</s>", "<eos>", "<|endoftext|>", "<|end_of_text|>", "<|end|>", "<unk>") if t in known
    )
    path.with_name("tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    ours = load_tokenizer(path)
    expected = ours._inner.encode(TEXTS[text], add_special_tokens=False).ids
    longest = []
    whole = Pieces._encoded
    monkeypatch.setattr(
        Pieces, "_encoded", lambda self, text, *a: longest.append(len(text)) or whole(self, text, *a)
    )
    np.testing.assert_array_equal(ours.encode(TEXTS[text]), expected)
    assert max(longest) <= 6000  # memory stays bounded
    if text not in ("letters", "blanks"):
        return
    assert sum(longest) < 3 * len(TEXTS[text]) + 128 * 4 * pieces.SEAM * (N // 6000 + 1)
