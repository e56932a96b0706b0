"""Tokenizers: round trips, bytes counted, and no special token out of plain text."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.data.pieces import cut_text
from fivefold.data.tokenizer import (
    Tokenizer,
    bytes_tokenizer,
    chars_tokenizer,
    load_tokenizer,
    train_bpe,
)
from fivefold.errors import UserError

TEXT = "def hello(name):\n    return f'Hello, {name}'\n\n\nZwölf Boxkämpfer: 12345 ☂\n" * 20
unicode_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=80)


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return train_bpe([TEXT], 300)


@given(unicode_text)
@settings(max_examples=150, deadline=None)
def test_any_text_survives_a_round_trip(bpe: Tokenizer, text: str):
    for tokenizer in (bpe, bytes_tokenizer(), chars_tokenizer(text)):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.token_bytes[ids].sum() == len(text.encode())
        assert tokenizer.end_id not in ids


@given(unicode_text)
@settings(max_examples=50, deadline=None)
def test_the_fast_ways_equal_the_library(text: str):
    for tokenizer in (bytes_tokenizer(), chars_tokenizer(text)):
        assert tokenizer.encode(text) == tokenizer._inner.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("text", ["<|end|>", "a<|end|><|mask|>b", "<|endoftext|>"])
def test_special_tokens_never_come_from_text(bpe: Tokenizer, text: str, tmp_path: Path):
    for tokenizer in (
        bpe,
        train_bpe([TEXT], 300, mask=True),
        bytes_tokenizer(mask=True),
        chars_tokenizer(text, True),
    ):
        tokenizer.save(tmp_path / "tokenizer.json")
        for one in (tokenizer, load_tokenizer(tmp_path / "tokenizer.json")):
            ids = one.encode(text)
            assert one.end_id not in ids
            assert one.mask_id not in ids
            assert one.decode(ids) == text


def test_a_foreign_file_gives_no_special_token_from_text_either(bpe: Tokenizer, tmp_path: Path):
    spec = json.loads(bpe.to_json())
    end = spec["added_tokens"][0]
    end["content"], end["special"] = "</s>", False  # as an added token that is not marked special
    spec["model"]["vocab"]["</s>"] = spec["model"]["vocab"].pop("<|end|>")
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.end_id == bpe.end_id
    assert tokenizer.end_id not in tokenizer.encode("x</s>y")
    assert tokenizer.decode(tokenizer.encode("x</s>y")) == "x</s>y"


def test_bytes_and_chars_ids():
    assert bytes_tokenizer().encode("hé") == [104, 195, 169]
    assert (bytes_tokenizer().vocab_size, bytes_tokenizer().end_id) == (257, 256)
    assert bytes_tokenizer(mask=True).mask_id == 257
    chars = chars_tokenizer("cab")
    assert chars.encode("abc") == [0, 1, 2]
    assert (chars.vocab_size, chars.end_id) == (4, 3)
    with pytest.raises(UserError, match="'d' at position 1"):
        chars.encode("ad")


def test_bpe_is_the_same_in_another_process(bpe: Tokenizer):
    code = (
        "import sys; from fivefold.data.tokenizer import train_bpe;"
        "print(train_bpe([sys.stdin.read()], 300).to_json(), end='')"
    )
    other = subprocess.run(
        [sys.executable, "-c", code], input=TEXT, capture_output=True, text=True, check=True
    )
    assert other.stdout == bpe.to_json()
    assert bpe.vocab_size == 300
    assert len(bpe.encode(TEXT)) < len(TEXT) / 2


def test_long_text_is_encoded_by_pieces():
    text = "line of text\n" * 30000 + "x" * 200_000
    assert "".join(cut_text(text)) == text
    assert max(map(len, cut_text(text))) <= 1 << 17
    assert all(piece.endswith("\n") for piece in list(cut_text(text))[:2])
    small = train_bpe([TEXT], 260)
    assert small.decode(small.encode(text)) == text


def test_ids_beyond_the_vocabulary_decode_to_nothing(bpe: Tokenizer):
    assert bpe.decode([*bpe.encode("ab"), bpe.end_id, 5000]) == "ab"


def test_lone_surrogates_are_refused(bpe: Tokenizer):
    with pytest.raises(UserError, match="lone surrogate at character 1"):
        bpe.encode("a\ud800")


@pytest.mark.parametrize("kind", ["bpe", "bytes", "chars"])
def test_save_and_load(kind: str, bpe: Tokenizer, tmp_path: Path):
    tokenizer = {"bpe": bpe, "bytes": bytes_tokenizer(True), "chars": chars_tokenizer(TEXT, True)}[kind]
    tokenizer.save(tmp_path / "tokenizer.json")
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    assert loaded.to_json() == tokenizer.to_json()
    assert loaded.encode(TEXT) == tokenizer.encode(TEXT)
    assert (loaded.end_id, loaded.mask_id) == (tokenizer.end_id, tokenizer.mask_id)
    np.testing.assert_array_equal(loaded.token_bytes, tokenizer.token_bytes)


def test_transformers_reads_the_file(bpe: Tokenizer, tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    bpe.save(tmp_path / "tokenizer.json")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert theirs(TEXT, add_special_tokens=False)["input_ids"] == bpe.encode(TEXT)
    assert theirs.eos_token_id == bpe.end_id
    assert theirs.decode(bpe.encode(TEXT), clean_up_tokenization_spaces=False) == TEXT


def test_a_wordpiece_file(tmp_path: Path):
    """BERT's kind: lower-cased words and ##continuations; [SEP] ends, [MASK] hides; bytes are an estimate."""
    vocab = {t: i for i, t in enumerate(["[UNK]", "[SEP]", "[MASK]", "play", "##ing", "the"])}
    spec = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [],
        "normalizer": {"type": "Lowercase"}, "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None,
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": False},
        "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
                  "max_input_chars_per_word": 100, "vocab": vocab},
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    tokenizer = load_tokenizer(tmp_path, mask=True)
    assert tokenizer.encode("The playing") == [5, 3, 4]
    assert tokenizer.decode([5, 3, 4]) == "the playing"
    assert (tokenizer.end_id, tokenizer.mask_id) == (1, 2)
    assert tokenizer.token_bytes.tolist() == [6, 0, 0, 5, 3, 4]


def test_errors_of_files_and_sizes(bpe: Tokenizer, tmp_path: Path):
    with pytest.raises(UserError, match=r"cannot read .*nowhere"):
        load_tokenizer(tmp_path / "nowhere.json")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"is not a tokenizer\.json"):
        load_tokenizer(tmp_path)
    with pytest.raises(UserError, match="at least 257"):
        train_bpe(["a"], 100)
    bpe.save(tmp_path / "tokenizer.json")
    with pytest.raises(UserError, match=r"has no mask token; .*\[MASK\]"):
        load_tokenizer(tmp_path, mask=True)
