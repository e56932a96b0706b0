"""Every fault of a source is one clear message that names file and offset, or is skipped in the budget."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from data_recipes import recipe_of, write

from fivefold.data import check, prepare
from fivefold.data.build import run
from fivefold.errors import UserError
from fivefold.files.reading import DEEPEST

GOOD = json.dumps({"text": "a good document"})


def error_of(recipe) -> str:
    with pytest.raises(UserError) as caught:
        prepare(recipe)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_text_that_is_not_utf8(tmp_path: Path):
    path = write(tmp_path / "a.txt", b"abc\xffdef")
    message = error_of(recipe_of(path, tmp_path / "cache"))
    assert f"{path}: byte 3: not UTF-8: byte 0xff" in message
    assert "data.max_bad_fraction" in message


@pytest.mark.parametrize("workers", [1, 2])
def test_the_offset_in_a_later_piece_of_a_large_file(tmp_path: Path, workers: int):
    good = "línea\n".encode() * 300_000
    path = write(tmp_path / "a.txt", good + b"\xc3(" + good)
    with pytest.raises(UserError, match=f"a.txt: byte {len(good)}: not UTF-8: byte 0xc3"):
        prepare(recipe_of(path, tmp_path / "cache", val_fraction=0.0), workers=workers)
    assert not list((tmp_path / "cache" / "data").glob("*.tmp-*"))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "cut', "not JSON: Unterminated string starting at (character 9)"),
        (b'{"text": "\xff"}', "not UTF-8: byte 0xff at 10 in the line"),
        (b'{"content": "x", "id": 1}', "no field 'text' (fields: content, id); set data.text_key"),
        (b'{"text": 5}', "the field 'text' holds int, not text"),
        (b'{"text": null}', "the field 'text' holds NoneType, not text"),
        (b'["text"]', "a JSON list; expected an object"),
        (b'{"text": "\\ud800"}', "a lone surrogate at character 0"),
        (b"[" * (DEEPEST + 1), "not JSON: nested too deeply"),
    ],
)
def test_a_bad_line_of_json(tmp_path: Path, line: bytes, reason: str):
    path = write(tmp_path / "a.jsonl", f"{GOOD}\n\n{GOOD}\n".encode() + line + f"\n{GOOD}\n".encode())
    message = error_of(recipe_of(path, tmp_path / "cache"))
    assert f"{path}: line 4 (byte {2 * len(GOOD) + 3}): {reason}" in message


def test_a_json_line_too_long_is_not_held_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fivefold.data.kinds.json.LONGEST_LINE", 1 << 20)
    path = write(tmp_path / "a.jsonl", f"{GOOD}\n" + "x" * 3_000_000 + f"\n{GOOD}\n")
    assert f"line 2 (byte {len(GOOD) + 1}): a line of more than 1 MiB" in error_of(
        recipe_of(path, tmp_path / "cache")
    )
    data = prepare(recipe_of(path, tmp_path / "cache", max_bad_fraction=0.5, seq_len=2, val_fraction=0.0))
    assert data.info["documents"]["train"] == 2
    assert data.info["skipped"]["bad"] == 1


def test_parquet_faults(tmp_path: Path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"content": ["x"], "id": [1]}), path)
    assert f"{path}: row 0: no column 'text' (columns: content, id)" in error_of(
        recipe_of(path, tmp_path / "cache")
    )
    pq.write_table(pa.table({"text": ["x", None]}), path)
    assert "row 1: the field 'text' holds NoneType" in error_of(recipe_of(path, tmp_path / "cache"))
    path.write_bytes(path.read_bytes()[:-20])
    assert "a broken parquet file" in error_of(recipe_of(path, tmp_path / "cache"))


def test_the_budget_skips_and_counts(tmp_path: Path):
    lines = [GOOD] * 9 + ["broken"]
    path = write(tmp_path / "a.jsonl", "\n".join(lines))
    data = prepare(recipe_of(path, tmp_path / "cache", max_bad_fraction=0.1, val_fraction=0.0))
    skipped = data.info["skipped"]
    assert (skipped["bad"], skipped["pieces"]) == (1, 10)
    assert f"{path}: line 10" in skipped["first_bad"]
    assert data.info["documents"]["train"] == 9
    message = error_of(recipe_of(path, tmp_path / "cache", max_bad_fraction=0.05, val_fraction=0.0))
    assert "1 of 10 documents cannot be read" in message
    assert "data.max_bad_fraction = 0.05" in message
    assert f"{path}: line 10" in message
    assert "0.0" not in error_of(
        recipe_of(path, tmp_path / "other", val_fraction=0.0)
    )  # nothing cached: names the line


def test_a_bad_file_among_good_ones_is_skipped(tmp_path: Path):
    for name, content in (
        ("a.txt", b"good " * 9),
        ("b.txt", b"\xff\xfe"),
        ("c.txt", b"fine " * 9),
        ("d.txt", b""),
    ):
        write(tmp_path / "in" / name, content)
    data = prepare(recipe_of(tmp_path / "in", tmp_path / "cache", max_bad_fraction=0.4, val_fraction=0.0))
    assert bytes(data.train[:].astype("u1")) == b"good " * 9 + b"\0" + b"fine " * 9 + b"\0"  # 256 = 0 mod 256
    assert {k: data.info["skipped"][k] for k in ("bad", "pieces", "empty")} == {
        "bad": 1,
        "pieces": 3,
        "empty": 1,
    }


@pytest.mark.parametrize("fraction", [0.0, 0.5])
def test_a_file_that_cannot_be_read(tmp_path: Path, fraction: float):
    write(tmp_path / "in" / "a.txt", "good text")
    (tmp_path / "in" / "b.txt").symlink_to(tmp_path / "nowhere")
    recipe = recipe_of(tmp_path / "in", tmp_path / "cache", max_bad_fraction=fraction, val_fraction=0.0)
    if fraction == 0:
        assert "b.txt: byte 0: cannot be read: No such file or directory" in error_of(recipe)
    else:
        assert prepare(recipe).info["skipped"]["bad"] == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission(tmp_path: Path):
    write(tmp_path / "a.txt", "secret").chmod(0)
    assert "a.txt: byte 0: cannot be read: Permission denied" in error_of(
        recipe_of(tmp_path / "a.txt", tmp_path / "cache")
    )


def test_empty_sources(tmp_path: Path):
    path = write(tmp_path / "in" / "a.txt", "")
    assert "holds no text; empty files: 1" in error_of(recipe_of(path, tmp_path / "cache"))
    write(tmp_path / "in" / "b.jsonl", "\n\n" + json.dumps({"text": ""}))
    assert "holds no text" in error_of(recipe_of(tmp_path / "in", tmp_path / "cache"))
    (tmp_path / "nothing").mkdir()
    assert "no file of a known kind; found nothing" in error_of(
        recipe_of(tmp_path / "nothing", tmp_path / "cache")
    )


@pytest.mark.parametrize("look", [check, prepare])
def test_sources_that_do_not_exist(tmp_path: Path, look):
    write(tmp_path / "corpus" / "books.txt", "text")
    write(tmp_path / "corpus" / "image.png", "x")
    write(tmp_path / "corpus" / "train.bin", "xx")
    for source, parts in {
        tmp_path / "corpus" / "book.txt": ["no such file", "did you mean", "corpus/books.txt"],
        tmp_path / "copus" / "deep" / "x.txt": [
            "no such file",
            f"{tmp_path} exists",
            "did you mean",
            "corpus",
        ],
        "stdlbi": ["no such file", "known words: stdlib"],
        tmp_path / "corpus" / "*.md": ["no file matches", f"{tmp_path / 'corpus'} exists"],
        tmp_path / "*": ["only folders match"],
        tmp_path / "corpus" / "image.png": [
            "unknown kind of file .png",
            ".txt .md .py .json .csv .jsonl .parquet",
        ],
        tmp_path / "corpus" / "*.png": ["found 1 .png", ".txt .md .py .json .csv .jsonl .parquet"],
        tmp_path / "corpus" / "train.bin": ["unknown kind of file .bin", "write tokens:PATH"],
        "hf:": ["the name is missing"],
    }.items():
        with pytest.raises(UserError) as caught:
            look(recipe_of(source, tmp_path / "cache"))
        for part in parts:
            assert part in str(caught.value), source


@pytest.mark.parametrize("look", [check, prepare])
def test_tokenizers_that_do_not_exist(tmp_path: Path, look):
    path = write(tmp_path / "a.txt", "text " * 100)
    for tokenizer, part in {
        "bpe:100": "at least 257",
        "byte": "must be bpe:N, bytes, chars, or the path",
    }.items():
        with pytest.raises(UserError, match=part):
            look(recipe_of(path, tmp_path / "cache", tokenizer=tokenizer))


def test_a_model_vocabulary_that_is_too_small(tmp_path: Path):
    path = write(tmp_path / "a.txt", "text " * 100)
    message = error_of(recipe_of(path, tmp_path / "cache", vocab_size=256))
    assert "model.vocab_size = 256 is smaller" in message
    assert "257" in message


def test_sets_that_are_too_small(tmp_path: Path):
    path = write(tmp_path / "a.txt", "x" * 1000)
    cache = tmp_path / "cache"
    message = error_of(recipe_of(path, cache, seq_len=9, batch=200, val_fraction=0.0))
    assert "1,000 training tokens, 111 sequences" in message
    assert "Use at most 111 sequences per batch" in message
    message = error_of(recipe_of(path, cache, seq_len=2000, val_fraction=0.0))
    assert "0 sequences of model.seq_len = 2000" in message
    message = error_of(recipe_of(path, cache, seq_len=100, val_fraction=0.05))
    assert "validation part has 50 tokens" in message
    assert "data.val_fraction = 0.05" in message
    message = error_of(recipe_of(path, cache, seq_len=9, batch=10, steps=23, val_fraction=0.0, max_epochs=2))
    assert "23 steps of 10 sequences are 2.07 passes over its 111 sequences" in message
    assert "Use train.steps <= 22" in message
    prepare(recipe_of(path, cache, seq_len=9, batch=10, steps=22, val_fraction=0.0, max_epochs=2))
    prepare(recipe_of(path, cache, seq_len=9, batch=10, steps=5000, val_fraction=0.0))


def test_check_sees_a_set_that_cannot_be_large_enough(tmp_path: Path):
    path = write(tmp_path / "a.txt", "x" * 100)
    with pytest.raises(UserError, match=r"fewer than one batch of train\.global_batch_size = 64"):
        check(recipe_of(path, tmp_path / "cache", batch=64))


def test_a_cache_that_cannot_be_written(tmp_path: Path):
    path = write(tmp_path / "a.txt", "x" * 100)
    blocked = write(tmp_path / "file", "not a folder")
    message = error_of(recipe_of(path, blocked))
    assert str(blocked) in message
    assert "set data.cache or $FIVEFOLD_CACHE" in message


def test_a_source_that_changes_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = write(tmp_path / "a.txt", "x" * 100)

    def run_and_change(*arguments):
        yield from run(*arguments)
        path.write_text("y" * 100)

    monkeypatch.setattr("fivefold.data.build.run", run_and_change)
    assert "a file changed while it was tokenized" in error_of(recipe_of(path, tmp_path / "cache"))


def test_a_hub_set_needs_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    assert "pip install 'fivefold[hf]'" in error_of(recipe_of("hf:some/set", tmp_path / "cache"))
