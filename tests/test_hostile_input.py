"""Data, tokenizers, models and run folders made to hurt: each is one short message, in bounded time and memory."""

from __future__ import annotations

import base64
import json
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
from data_recipes import recipe_of, write
from hypothesis import given
from hypothesis import strategies as st
from marks import slow
from test_hostile_folders import run as run  # the fixture
from typer.testing import CliRunner

from fivefold import files
from fivefold.cli.main import app
from fivefold.data import prepare, stream, tokenizer
from fivefold.data.tokenizer import bytes_tokenizer, load_tokenizer, train_bpe
from fivefold.errors import LONGEST_MESSAGE, UserError, printable
from fivefold.files import reading
from fivefold.files.reading import DEEPEST, LONGEST_NUMBER
from fivefold.observe.metrics import last_line

DEEP = "[" * (DEEPEST + 1)
OBJECTS = '{"a": ' * (DEEPEST + 1)
DIGITS = "9" * (LONGEST_NUMBER + 1)


def refused(*arguments: str) -> str:
    """The message of a command that fails."""
    result = CliRunner().invoke(app, [*arguments])
    assert isinstance(result.exception, UserError), (arguments, result.output, result.exception)
    message = str(result.exception)
    assert len(message) <= LONGEST_MESSAGE
    assert printable(message) == message
    return message


# Tokenizers


def tokenizer_json(path: Path, **parts: Any) -> Path:
    """A plain tokenizer of bytes with other parts."""
    spec = json.loads(bytes_tokenizer().to_json()) | parts
    return write(path, json.dumps(spec))


def charsmap(longest: int) -> str:
    return base64.b64encode(struct.pack("<I", 0) + b"a\0" + b"b" * longest + b"\0").decode()


BEYOND: dict[str, tuple[dict[str, Any], str]] = {
    "a letter becomes sixteen": (
        {"normalizer": {"type": "Replace", "pattern": {"String": "e"}, "content": "x" * 16}},
        "normalizer makes a text up to 16 times as long; at most 8",
    ),
    "again and again": (
        {
            "normalizer": {
                "type": "Sequence",
                "normalizers": [{"type": "Replace", "pattern": {"Regex": "."}, "content": "xxx"}] * 2,
            }
        },
        "normalizer makes a text up to 16 times",
    ),
    "a prefix": ({"normalizer": {"type": "Prepend", "prepend": "x" * 20}}, "21 times as long"),
    "a map of characters": (
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": charsmap(16)}},
        "times as long",
    ),
    "a decoder": (
        {"decoder": {"type": "Replace", "pattern": {"String": "e"}, "content": "x" * 16}},
        "decoder makes a text",
    ),
    "an id above the limit": (
        {
            "added_tokens": [
                {
                    "id": 1001,
                    "content": "<|end|>",
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": False,
                    "normalized": False,
                    "special": True,
                }
            ]
        },
        "it has the id 1,001; ids must be below 1,000",
    ),
    "a negative id": ({"added_tokens": [{"id": -1, "content": "<|end|>"}]}, "not a tokenizer.json"),
    "no vocabulary": ({"model": {"type": "BPE", "vocab": [], "merges": []}}, "not a tokenizer.json"),
    "an unknown model": ({"model": {"type": "Evil"}}, "not a tokenizer.json"),
    "a list for a model": ({"model": []}, "not a tokenizer.json|refused"),
    "a map that is none": (
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "###"}},
        "not a tokenizer.json",
    ),
}


@pytest.mark.parametrize("name", BEYOND)
def test_tokenizers_beyond_the_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(tokenizer, "MOST_GROWTH", 8)
    monkeypatch.setattr(tokenizer, "MOST_IDS", 1000)
    parts, message = BEYOND[name]
    path = tokenizer_json(tmp_path / "tokenizer.json", **parts)
    with pytest.raises(UserError, match=message):
        load_tokenizer(path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "null",
        DEEP,
        OBJECTS,
        f'{{"model": {DIGITS}}}',
        '{"model": {"vocab": {"a": "b"}}}',
        "\x00",
    ],
)
def test_files_that_are_no_tokenizer(tmp_path: Path, text: str) -> None:
    path = write(tmp_path / "tokenizer.json", text)
    with pytest.raises(UserError, match="tokenizer"):
        load_tokenizer(path)
    if not text.endswith("}"):
        tokenizer_json(path)
        write(tmp_path / "tokenizer_config.json", text)
        with pytest.raises(UserError, match="tokenizer_config"):
            load_tokenizer(path)


def test_a_tokenizer_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with pytest.raises(UserError, match="not a regular file"):
        load_tokenizer(fifo)
    source = write(tmp_path / "a.txt", "text " * 100)
    assert "not a regular file" in refused(
        "check", "quickstart", "--set", f"data.tokenizer={fifo}", "--set", f"data.source={source}"
    )
    monkeypatch.setattr(tokenizer, "MOST_BYTES", 1 << 10)
    (tmp_path / "tokenizer.json").write_bytes(bytes((1 << 10) + 1))
    with pytest.raises(UserError, match="more than 1,024 bytes"):
        load_tokenizer(tmp_path)


def test_only_foreign_tokenizers_are_tried_in_a_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once each: what has passed is remembered by its hash."""
    tried: list[bytes] = []
    real = tokenizer._try
    monkeypatch.setattr(tokenizer, "_try", lambda content: tried.append(content) or real(content))
    monkeypatch.setattr(tokenizer, "_passed", set())
    monkeypatch.setenv("FIVEFOLD_CACHE", str(tmp_path / "cache"))
    for number, ours in enumerate((bytes_tokenizer(), train_bpe(["some text " * 50], 300))):
        write(tmp_path / f"{number}.json", ours.to_json())
        load_tokenizer(tmp_path / f"{number}.json")
    assert tried == []
    path = tokenizer_json(tmp_path / "tokenizer.json", normalizer={"type": "Lowercase"})
    for _ in range(2):
        assert load_tokenizer(path).decode(load_tokenizer(path).encode("ABC")) == "abc"
    assert len(tried) == 1
    tokenizer._passed.clear()
    load_tokenizer(path)
    assert len(tried) == 1, "the mark in the cache says that it has passed"
    monkeypatch.setattr(tokenizer, "_try", lambda content: "too much")
    with pytest.raises(UserError, match="is refused: too much"):
        load_tokenizer(tokenizer_json(path, normalizer={"type": "NFC"}))


@pytest.mark.parametrize(
    ("limit", "value", "code", "message"),
    [
        ("CHILD_BYTES", 1 << 30, "x = bytearray((1 << 30) + 1)", "more than 1 GiB of memory"),
        ("CHILD_SECONDS", 1, "import time\nwhile time.process_time() < 4: pass", "more than 1 seconds"),
        ("CHILD_BYTES", 2 << 30, "open('out', 'w').write('x' * 10000)", "crashes"),
    ],
)
def test_the_child_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: int, code: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tokenizer, limit, value)
    setup = (
        f"import importlib.util as u; s = u.spec_from_file_location('t', {tokenizer.__file__!r}); "
        f"t = u.module_from_spec(s); s.loader.exec_module(t); t.{limit} = {value}; t.limit(); {code}"
    )
    monkeypatch.setattr(
        tokenizer, "COMMAND", [tokenizer.COMMAND[0], "-c", setup.replace("; import time", "\nimport time")]
    )
    assert message in tokenizer._try(b"")
    assert not list(tmp_path.glob("out")) or (tmp_path / "out").stat().st_size == 0


def test_children_import_nothing_from_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`fivefold import .` may be called in the folder of a stranger's model."""
    write(tmp_path / "base64.py", "raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    assert tokenizer._try(bytes_tokenizer().to_json().encode()) == ""
    assert "-P" in stream.COMMAND


# Data


@pytest.mark.parametrize("name", ["a.txt", "b.jsonl", "c.parquet"])
def test_data_that_is_a_pipe(tmp_path: Path, name: str) -> None:
    (tmp_path / "data").mkdir()
    os.mkfifo(tmp_path / "data" / name)
    (tmp_path / "data" / "z.txt").symlink_to("/dev/null")
    with pytest.raises(UserError, match="not a regular file"):
        prepare(recipe_of(tmp_path / "data", tmp_path / "cache"))
    os.mkfifo(tmp_path / "tokens.bin")
    with pytest.raises(UserError, match=r"no token file|not a regular file"):
        prepare(recipe_of(f"tokens:{tmp_path / 'tokens.bin'}", tmp_path / "cache"))
    with pytest.raises(UserError, match=r"data.source: '/dev/null' is neither a regular file nor a folder$"):
        prepare(recipe_of("/dev/null", tmp_path / "cache"))
    with pytest.raises(UserError, match=r"/dev/null exists, but is not a regular file$"):
        prepare(recipe_of("tokens:/dev/null", tmp_path / "cache"))


@pytest.mark.parametrize(
    "line",
    [
        DEEP,
        DIGITS,
        f'{{"text": {DIGITS}}}',
        OBJECTS,
        "[]",
        '{"text": [1]}',
        '{"text": "\\ud800"}',
        '{"\x1b[2J": 1}',
    ],
)
def test_lines_that_are_no_document(tmp_path: Path, line: str) -> None:
    path = write(tmp_path / "a.jsonl", f'{line}\n{{"text": "good"}}\n')
    with pytest.raises(UserError, match="line 1") as caught:
        prepare(recipe_of(path, tmp_path / "cache"))
    assert printable(str(caught.value)) == str(caught.value)


def npy(shape: str) -> bytes:
    head = f"{{'descr': '<u2', 'fortran_order': False, 'shape': {shape}, }}".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head) + 1) + head + b"\n" + b"\0" * 64


@pytest.mark.parametrize(
    "shape",
    [
        "(-5,)",
        "(100,)",
        "(2**6,)",
        "(1e1,)",
        "((1,),)",
        "None",
        "(10, 10)",
        "'a text'",
    ],
)
def test_arrays_of_no_length(tmp_path: Path, shape: str) -> None:
    path = write(tmp_path / "a.npy", npy(shape))
    with pytest.raises(UserError, match=r"a\.npy"):
        prepare(recipe_of(f"tokens:{path}", tmp_path / "cache"))


# Run folders and models

JSONS = ["[]", "null", DEEP, f'{{"step": {DIGITS}}}', OBJECTS, '{"spans": 3}', "\x00"]


@pytest.mark.parametrize("name", ["data.json", *slow("plan.json", "machine.json")])
def test_a_page_of_broken_facts(run: Path, tmp_path: Path, name: str) -> None:
    """The report leaves them out."""
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    for text in JSONS:
        write(copy / name, text)
        assert CliRunner().invoke(app, ["report", str(copy)]).exit_code == 0, text[:40]
    for text in (
        '{"predicted": {"time": []}, "measured": {}}',
        '{"predicted": {"time": {"step_s": "x"}}, "measured": {"step_s": []}}',
    ):
        write(copy / "plan.json", text)
        result = CliRunner().invoke(app, ["report", str(copy)])
        assert isinstance(result.exception, UserError | None | SystemExit), result.exception


def test_pages_and_pictures_show_what_a_run_hides(run: Path, tmp_path: Path) -> None:
    """Names and sentences of its JSON are text: no markup, and nothing that controls a terminal or turns the text."""
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    evil = "<s>\x1b[2J\u202eevil"
    predicted = {
        "time": {"step_s": 1.0},
        "memory": {"per_stage": [{"total": 1}]},
        "sent_as_counted": {evil: 1},
    }
    plan = {"predicted": predicted, "measured": {"step_s": 1.0, "memory_bytes": 1, "sent_bytes": {evil: 1}}}
    for content in (plan, {"why": evil}):
        write(copy / "plan.json", json.dumps(content))
        assert CliRunner().invoke(app, ["report", str(copy)]).exit_code == 0
        page = (copy / "report.html").read_text()
        assert r"&lt;s&gt;\x1b[2J\u202eevil" in page
        assert not any(one in page for one in ("<s>", "\x1b", "\u202e"))
    spans = [["compute" + evil, "forward", "head", 0.0, 1.0], ["data", "", "shard", 0.0, 0.5]]
    write(
        copy / "traces" / "timeline-step-00000001-rank-0.json",
        json.dumps({"rank": 0, "step": 1, "spans": spans}),
    )
    drawn = CliRunner().invoke(app, ["draw", str(copy), "--out", str(tmp_path / "drawn")])
    assert r"compute<s>\x1b[2J" in drawn.output
    for text in (drawn.output, (tmp_path / "drawn" / "timeline.svg").read_text()):
        assert not any(one in text for one in ("\x1b", "\u202e"))


@pytest.mark.parametrize(
    "name",
    [
        "histogram-step-00000001",
        "profile-step-00000001-00000001",
        *slow("timeline-step-00000001-rank-0", "memory-step-00000001-rank-0"),
    ],
)
def test_broken_traces(run: Path, tmp_path: Path, name: str) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    command = ["formats", "--run", str(copy)] if name.startswith("hist") else ["report", str(copy)]
    for text in [
        *JSONS,
        '{"spans": [[1, 2]]}',
        '{"bytes": {}, "phases": []}',
        '{"step": 1, "kinds": {"x": 1}}',
    ]:
        write(copy / "traces" / f"{name}.json", text)
        assert "traces" in refused(*command)


@pytest.mark.parametrize(
    "line",
    [
        "7",
        "[]",
        '{"step": "x"}',
        '{"step": 1, "loss": [1]}',
        '{"step": 1, "loss": {"a": {"b": 1}}}',
        f'{{"step": {DIGITS}}}',
        DEEP,
        '{"step": 1, "\x1b[2J',
    ],
)
def test_broken_metrics(run: Path, tmp_path: Path, line: str) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    write(copy / "metrics.jsonl", line + "\n")
    assert "metrics.jsonl, line 1" in refused("report", str(copy))


@pytest.mark.parametrize(
    "line",
    ['{"step": 1, "spike": 1, "loss": 2, "usual_loss": "x"}', '{"step": 1, "slow_rank": {"rank": "x"}}'],
)
def test_metrics_of_the_wrong_kind(run: Path, tmp_path: Path, line: str) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    write(copy / "metrics.jsonl", line + "\n")
    assert "metrics.jsonl is damaged" in refused("report", str(copy))


def test_broken_notes_of_a_run(run: Path, tmp_path: Path) -> None:
    """The report leaves out what a crash, or anybody, has cut."""
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    write(copy / "restarts.jsonl", "\n".join([*JSONS, '{"why": "\x1b]0;owned\x07"}', '{"why": {"a": 1}}']))
    assert CliRunner().invoke(app, ["report", str(copy)]).exit_code == 0
    assert "\x1b" not in (copy / "report.html").read_text()
    write(copy / "metrics.jsonl", '{"step": 1, "step_s": 1}\n' + DEEP + "\n")
    assert last_line(copy) == {"step": 1, "step_s": 1}


@pytest.mark.parametrize("name", ["config.json", *slow("model.safetensors.index.json", "model.safetensors")])
def test_broken_models(run: Path, tmp_path: Path, name: str) -> None:
    assert CliRunner().invoke(app, ["export", str(run), str(tmp_path / "model")]).exit_code == 0
    for number, text in enumerate(
        [*JSONS, '{"model_type": []}', '{"weight_map": []}', '{"weight_map": {"a": "../x"}}']
    ):
        write(tmp_path / "model" / name, text)
        message = refused("import", str(tmp_path / "model"), "--out", str(tmp_path / f"out-{number}"))
        assert name in message or "model_type" in message


PARTS = [*"[]{}", "1", '"a"', '"[{"', '"\\""', '"\\\\"']


@given(st.lists(st.sampled_from(PARTS), max_size=20), st.integers(1, 4))
def test_depth_is_counted_before_a_parser_sees_the_text(parts: list[str], most: int) -> None:
    """Beside a count by hand, of texts that may end anywhere. Brackets within texts do not count."""
    depth = deepest = 0
    for part in parts:
        depth = max(0, depth + (part in ("[", "{")) - (part in ("]", "}")))
        deepest = max(deepest, depth)
    text = "".join(parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "DEEPEST", most)
        for whole in (text, text.encode()):
            try:
                reading.refuse_depth(whole)
                assert deepest <= most
            except RecursionError:
                assert deepest > most or depth  # what is not closed may count twice: it is refused anyway


def test_a_file_that_grows_while_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(bytes(1025))
    with pytest.raises(UserError, match="has more than"):
        files.read_json(tmp_path / "a.json", 1024)
