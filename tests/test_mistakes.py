"""Common mistakes, as other trainers' trackers have them: each is one message that names the fix, before any process
starts. `check` says what `train` would say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from data_recipes import write

from fivefold.cli.main import main

TEXT = "The quick brown fox jumps over the lazy dog.\n" * 200
SMALL = [
    "data.tokenizer=bytes",
    "model.seq_len=16",
    "train.steps=1",
    "train.global_batch_size=2",
    "data.cache=cache",
]


def texts(here: Path) -> None:
    write(here / "texts" / "a.txt", TEXT)


def documents(here: Path) -> None:
    write(here / "texts" / "report.docx", b"PK")


def other_key(here: Path) -> None:
    write(here / "texts" / "a.jsonl", json.dumps({"content": TEXT}) + "\n")


def latin(here: Path) -> None:
    write(here / "texts" / "a.txt", TEXT.encode() + b"caf\xe9\n" + TEXT.encode())


def conversations(here: Path) -> None:
    rows = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    write(here / "texts" / "a.jsonl", json.dumps({"messages": rows}) + "\n")


def few(here: Path) -> None:
    write(here / "texts" / "a.txt", "too short")


def a_run(here: Path) -> None:
    texts(here)
    write(here / "runs" / "first" / "recipe.toml", "[train]\nsteps = 1\n")


def pickled(here: Path) -> None:
    sizes = {"vocab_size": 64, "n_embd": 8, "n_head": 1, "n_layer": 1, "n_positions": 16}
    write(here / "model" / "config.json", json.dumps({"model_type": "gpt2", **sizes}))
    write(here / "model" / "pytorch_model.bin", b"\x80")


BOTH = ("train", "check")
TRAIN = ("train",)
# what was done, the files, the command's name and what follows it, what it says: the fault and the fix
MISTAKES: dict[str, tuple[Callable[[Path], None], tuple[str, ...], list[str], tuple[str, ...]]] = {
    "files of another kind (torchtitan#311, litgpt#767)": (
        documents, BOTH, ["quickstart"], ("texts: ", "1 .docx", "known: .txt"),
    ),
    "text under another key (litgpt#1231)": (
        other_key, BOTH, ["quickstart"], ("a.jsonl: line 1", "no field 'text' (fields: content); set data.text_key"),
    ),
    "text in another encoding": (
        latin, BOTH, ["quickstart"], ("a.txt: byte 9003: not UTF-8: byte 0xe9", "data.max_bad_fraction"),
    ),
    "conversations as texts (torchtune#1397)": (
        conversations, BOTH, ["quickstart"], ("'messages': a conversation needs data.chat_template",),
    ),
    "too little text (nanotron: dataset is too small)": (
        few, BOTH, ["quickstart"], ("fewer than one batch of train.global_batch_size = 2", "or more text"),
    ),
    "a vocabulary smaller than the tokenizer's (an assertion on the device elsewhere)": (
        texts, BOTH, ["quickstart", "--set", "model.vocab_size=128"],
        ("model.vocab_size = 128 is smaller than the vocabulary of data.tokenizer = 'bytes': 257", "Leave it unset"),
    ),
    "a misspelt field (DeepSpeed#653)": (
        texts, BOTH, ["quickstart", "--set", "optim.learning_rate=1e-3"],
        ("optim.learning_rate", "did you mean 'optim.lr'?"),
    ),
    "a batch that ranks and microbatches do not divide": (
        texts, BOTH, ["quickstart", "--set", "train.global_batch_size=10", "--set", "train.microbatch_size=4"],
        ("train.global_batch_size = 10 must be divisible by 4", "Nearest valid: train.global_batch_size = 8"),
    ),
    "more tensor-parallel ranks than heads": (
        texts, BOTH, ["quickstart", "--layout", "tp=5"],
        ("layout.tp = 5 must divide model.heads", "Nearest valid: layout.tp"),
    ),
    "ZeRO without ranks to share states with": (
        texts, BOTH, ["quickstart", "--set", "layout.zero=1"],
        ("zero=1 shards states between ranks: it needs dp_shard > 1",),
    ),
    "a data set of the hub without its library": (
        texts, BOTH, ["quickstart", "--set", "data.source=hf:some/set"], ("pip install 'fivefold[hf]'",),
    ),
    "a run folder used twice": (
        a_run, TRAIN, ["quickstart", "--out", "runs/first"], ("already holds a run; add --resume", "another --out"),
    ),
    "a run trained again by its folder": (
        a_run, TRAIN, ["runs/first"],
        ("this is a run folder. Resume the run with `fivefold train runs/first --resume`",),
    ),
    "another number of processes than the layout has": (
        texts, TRAIN, ["quickstart", "--layout", "tp=2", "--nproc", "3"], ("3 rank", "tp=2"),
    ),
    "a model in pickles": (
        pickled, ("import",), ["model", "--out", "runs/new"], ("pickle files are refused", "safetensors"),
    ),
}  # fmt: skip


def started(*_: object, **__: object) -> None:
    raise AssertionError("a process was started")


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_message_that_names_the_fix(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    files, commands, arguments, said = MISTAKES[name]
    files(tmp_path)
    monkeypatch.chdir(tmp_path)
    for place in ("fivefold.train.start.launch", "fivefold.train.start.ranks_.join", "subprocess.Popen"):
        monkeypatch.setattr(place, started)
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    before = sorted(tmp_path.rglob("runs/*"))
    small = (
        [] if commands == ("import",) else [x for s in ["data.source=texts", *SMALL] for x in ("--set", s)]
    )
    given = [*arguments[:1], *small, *arguments[1:]]
    for command in commands:
        with pytest.raises(SystemExit) as stop:
            main([command, *given])
        error = capsys.readouterr().err
        assert stop.value.code == 2
        assert all(words in error for words in said), error
        assert error.startswith("error: ") or "data: " in error
        assert "Traceback" not in error
    assert sorted(tmp_path.rglob("runs/*")) == before


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        (["optim.lr=3"], "optim.lr = 3: training will most likely diverge; adamw is used with 1e-06 to 0.03"),
        (["optim.name=lion", "optim.lr=0.02"], "lion is used with 1e-06 to 0.005"),
        (["optim.lr=1e-9"], "the weights will hardly change"),
        (["train.steps=50", "train.val_every=100"], "train.val_every = 100 is more than the run's 50 steps"),
        (
            ["train.steps=50", "train.global_batch_size=4", "train.batch_ramp=2:50"],
            'train.batch_ramp = "2:50" lasts 50 steps, and the run has 50: '
            "no step has train.global_batch_size = 4. Shorten the ramp, or train longer",
        ),
        (
            ["train.steps=50", "model.arch=mistral", "model.sliding_window=64", "model.window_ramp=8:51"],
            'model.window_ramp = "8:51" lasts 51 steps, and the run has 50: '
            "no step has model.sliding_window = 64. Shorten the ramp, or train longer",
        ),
        (
            ["train.steps=50", "checkpoint.every=100"],
            "only the end is saved, beside what is due by checkpoint.minutes",
        ),
        (["train.steps=50", "optim.warmup_steps=40"], "the learning rate is below its peak most of the run"),
        (["launch.timeout=20"], "launch.timeout = 20 is not longer than observe.hang_s = 30: a message"),
        (["train.steps=5000"], "passes over the same text: beyond 4"),
    ],
)
def test_check_warns(
    changes: list[str],
    warning: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    texts(tmp_path)
    monkeypatch.chdir(tmp_path)
    given = ["data.source=texts", *SMALL, *changes]
    with pytest.raises(SystemExit) as stop:
        main(["check", "quickstart", "--json", *(x for s in given for x in ("--set", s))])
    assert not stop.value.code
    found = json.loads(capsys.readouterr().out)["warnings"]
    assert any(warning in each for each in found), found


def test_shipped_recipes_have_no_warnings(capsys: pytest.CaptureFixture[str]):
    from fivefold.recipe import load
    from fivefold.recipe.load import shipped
    from fivefold.recipe.resolve import warnings

    assert {name: found for name in shipped() if (found := list(warnings(load(name))))} == {}
