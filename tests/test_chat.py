"""Conversations: templates as Hugging Face renders them, loss on answers only, chat, samples, prompts from a file."""

from __future__ import annotations

import datetime
import io
import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import stored
from data_recipes import recipe_of, write
from hypothesis import given
from hypothesis import strategies as st
from pool_runs import assert_close_tensors, lines, train_rank

from fivefold.checkpoint import store
from fivefold.checkpoint import write as write_checkpoint
from fivefold.checkpoint.source import export_run, import_folder
from fivefold.cli.main import main
from fivefold.data import NOT_COUNTED, Batches, chat, prepare
from fivefold.data.chat import TEMPLATES, ChatTemplate, NotAConversation, messages_of, open_template
from fivefold.data.dataset import cut_of
from fivefold.data.tokenizer import Tokenizer, bytes_tokenizer, load_tokenizer, train_bpe
from fivefold.errors import UserError
from fivefold.files import write_atomically
from fivefold.models.base import build
from fivefold.recipe import DataSection, ModelSection, Recipe, TrainSection, load, resolve, to_toml
from fivefold.train.generate import Chat, Sampling, open_chat, until
from fivefold.train.job import Job
from fivefold.train.run import _next_commands

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is <|im_end|> for?  "},
    {"role": "assistant", "content": "It ends a message."},
    {"role": "user", "content": "Größe?"},
    {"role": "assistant", "content": "  Size\n\n"},
]
# As Qwen3's: the reasoning of earlier answers is left out, and the last answer begins with an empty one.
FORGETFUL = """{%- for message in messages %}
{%- set content = message.content %}
{%- if message.role == "assistant" and not loop.last %}
{%- set content = content.split("</think>")[-1].lstrip("\\n") %}
{%- elif message.role == "assistant" and "</think>" not in content %}
{%- set content = "<think>\\n\\n</think>\\n\\n" + content %}
{%- endif %}
{{- "<|im_start|>" + message.role + "\\n" + content + "<|im_end|>" + "\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|im_start|>assistant\\n" }}{%- endif %}"""
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>{% generation %}{{ m.content }}<|im_end|>"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>"
    "{% endif %}"
)


def bpe() -> Tokenizer:
    return train_bpe(["It ends a message. What is the size of it? user assistant system\n" * 20], 320)


def template(source: str = "chatml") -> ChatTemplate:
    if source in TEMPLATES:
        return open_template(source, "bpe:320", bpe())
    return ChatTemplate(source, open_template("chatml", "bpe:320", bpe()).tokenizer)


def answers(chat: ChatTemplate, messages: list[dict[str, str]]) -> list[str]:
    """The texts that count, with their special tokens."""
    found = chat.encode(messages)
    names = {number: text for text, number in chat.tokenizer.special_tokens.items()}
    texts, edges = [], np.flatnonzero(np.diff(found.counted, prepend=False, append=False))
    for start, stop in edges.reshape(-1, 2):
        ids = found.ids[start:stop].tolist()
        texts.append("".join(names.get(i) or chat.tokenizer.decode([i]) for i in ids))
    return texts


@pytest.mark.parametrize(
    "source", ["chatml", "plain", FORGETFUL, MARKED], ids=["chatml", "plain", "qwen3", "marked"]
)
def test_ids_and_answers_are_those_of_transformers(tmp_path: Path, source: str):
    transformers = pytest.importorskip("transformers")
    chat = template(source)
    chat.tokenizer.chat_template = chat.source
    chat.tokenizer.save(tmp_path / "tokenizer.json")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    plain = [{**m, "content": m["content"].replace("<|im_end|>", "that")} for m in TALK]
    for messages in (plain, plain[:3], plain[1:]):
        assert chat.render(messages) == theirs.apply_chat_template(messages, tokenize=False)
        wanted = theirs.apply_chat_template(messages, add_generation_prompt=False, return_dict=True)
        got = chat.encode(messages)
        assert theirs.decode(got.ids) == theirs.decode(wanted["input_ids"])
        if source != "plain":  # there a border of an answer may lie inside a token of theirs
            assert got.ids.tolist() == wanted["input_ids"]
        asked = theirs.apply_chat_template(messages[:-1], add_generation_prompt=True, return_dict=True)
        assert theirs.decode(chat.prompt(messages[:-1])) == theirs.decode(asked["input_ids"])
    if source == MARKED:
        marked = theirs.apply_chat_template(plain, return_dict=True, return_assistant_tokens_mask=True)
        assert chat.encode(plain).counted.tolist() == [bool(m) for m in marked["assistant_masks"]]


def test_tokens_of_data_do_not_depend_on_the_day():
    chat = template("{{ strftime_now('%Y') }} " + TEMPLATES["chatml"].source)
    assert chat.tokenizer.decode(chat.encode(TALK).ids.tolist()).startswith("2024 ")
    assert chat.render(TALK).startswith(f"{datetime.datetime.now():%Y} ")


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("chatml", ["It ends a message.<|im_end|>\n", "  Size\n\n<|im_end|>\n"]),
        ("plain", [" It ends a message.<|end|>\n", "   Size\n\n<|end|>\n"]),
        (FORGETFUL, ["It ends a message.<|im_end|>\n", "<think>\n\n</think>\n\n  Size\n\n<|im_end|>\n"]),
        (MARKED, ["It ends a message.<|im_end|>", "  Size\n\n<|im_end|>"]),
    ],
    ids=["chatml", "plain", "qwen3", "marked"],
)
def test_answers_count_with_what_ends_them(source: str, wanted: list[str]):
    assert answers(template(source), TALK) == wanted


def test_an_answer_follows_the_ids_of_its_prompt():
    """Training and chat see the same ids in front of an answer."""
    for source in ("chatml", "plain"):
        chat = template(source)
        whole, prompt = chat.encode(TALK), chat.prompt(TALK[:4])
        assert whole.ids[: len(prompt)].tolist() == prompt
        assert not whole.counted[len(prompt) - 1]
        assert whole.counted[len(prompt) :].all()


def test_text_never_becomes_a_special_token():
    chat = template()
    end = chat.tokenizer.special_tokens["<|im_end|>"]
    ids = chat.encode(TALK).ids.tolist()
    assert ids.count(end) == len(TALK)
    assert "What is <|im_end|> for?" in chat.tokenizer.decode(ids)


def test_templates_end_answers():
    assert template().end_ids == {
        template().tokenizer.special_tokens["<|im_end|>"],
        template().tokenizer.end_id,
    }
    assert template("plain").end_ids == {bpe().end_id}
    words = ChatTemplate(
        "{% for m in messages %}[{{ m.content }}]{% endfor %}{% if add_generation_prompt %}[{% endif %}",
        bpe(),
    )
    assert words.end_text == "]"
    assert template().end_text == ""


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("hi", "must be a list"),
        ([], "must be a list"),
        (["hi"], "message 1 is no object"),
        ([{"from": "human", "value": "hi"}], "message 1: 'role' must be text (its keys: from, value)"),
        ([{"role": "user", "content": None}], "message 1: 'content' must be text"),
        ([{"role": "user", "content": "\ud800"}], "not valid Unicode"),
    ],
)
def test_what_is_no_conversation(value: object, reason: str):
    with pytest.raises(NotAConversation, match=reason.replace("(", r"\(").replace(")", r"\)")):
        messages_of(value)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ messages.__doc__.text }}", "unsafe"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[99].content }}", "refuses it"),
        ("{% for a in range(20) %}{{ 'x' * 100 }}{% endfor %}", "more than 1,000 characters"),
        ("{% for %}", "not a Jinja template"),
    ],
)
def test_a_template_is_rendered_in_a_sandbox(source: str, reason: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(chat, "MOST_TEXT", 1000)
    with pytest.raises(UserError, match=f"data.chat_template: .*{reason}"):
        ChatTemplate(source, bpe())


# Data


def lines_of(path: Path) -> Path:
    rows = [{"messages": TALK[:3]}, {"text": "A text."}, {"messages": TALK[3:]}]
    return write(path, "".join(json.dumps(row) + "\n" for row in rows))


def test_only_answers_and_texts_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    recipe = recipe_of(
        lines_of(tmp_path / "a.jsonl"),
        tmp_path / "cache",
        seq_len=4,
        val_fraction=0.0,
        chat_template="chatml",
    )
    data = prepare(recipe)
    chat = ChatTemplate(data.tokenizer.chat_template, data.tokenizer)
    assert data.vocab_size == 259  # bytes, the end and two tokens of chatml
    batches = Batches(data.train, 4, 1, 0, shuffle=False)
    inputs, targets = (
        np.concatenate(x) for x in zip(*(batches.batch(i)[:2] for i in range(batches.sequences)), strict=True)
    )
    inputs, targets = inputs.reshape(-1), targets.reshape(-1)
    names = {number: text for text, number in data.tokenizer.special_tokens.items()}
    spelled = [names.get(i) or bytes([i]).decode("latin1") for i in targets.tolist() if i != NOT_COUNTED]
    assert (
        "".join(spelled)
        == "It ends a message.<|im_end|>\nA text.<|end|>  Size\n\n<|im_end|>\n"[: len("".join(spelled))]
    )
    assert np.array_equal(targets[targets >= 0], data.train[1 : 1 + len(targets)][targets >= 0])
    assert chat.encode(TALK[:3]).ids.tolist() == data.train[: len(chat.encode(TALK[:3]).ids)].tolist()
    assert prepare(recipe).info["cached"]
    # Several threads, and rows of parquet, give the same.
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    pq.write_table(
        pa.Table.from_pylist([{"messages": None, "text": None, **row} for row in rows]),
        tmp_path / "b.parquet",
    )
    other = recipe_of(
        tmp_path / "b.parquet", tmp_path / "cache", seq_len=4, val_fraction=0.0, chat_template="chatml"
    )
    again = prepare(other, workers=2)
    assert again.train[:].tolist() == data.train[:].tolist()
    assert again.train.flags is not None
    assert data.train.flags is not None
    assert again.train.flags[:].tolist() == data.train.flags[:].tolist()


@pytest.mark.parametrize(
    ("row", "template", "reason"),
    [
        ({"messages": TALK[:2]}, "chatml", "line 1 (byte 0): no message has the role 'assistant'"),
        ({"messages": [{"role": "user"}]}, "chatml", "message 1: 'content' must be text"),
        ({"messages": TALK}, "", "a conversation needs data.chat_template"),
        (
            {"messages": TALK},
            "nowhere.jinja",
            "must be chatml, plain, tokenizer, or the path of a Jinja file",
        ),
        ({"messages": TALK}, "tokenizer", "no chat template beside data.tokenizer"),
    ],
)
def test_bad_conversations_are_named(tmp_path: Path, row: object, template: str, reason: str):
    path = write(tmp_path / "a.jsonl", json.dumps(row))
    with pytest.raises(UserError) as error:
        prepare(recipe_of(path, tmp_path / "cache", chat_template=template))
    assert reason in str(error.value)


def test_a_vocabulary_without_room_for_the_templates_tokens(tmp_path: Path):
    bpe().save(tmp_path / "tokenizer.json")
    source = lines_of(tmp_path / "a.jsonl")
    how = {"tokenizer": str(tmp_path), "seq_len": 4, "val_fraction": 0.0, "vocab_size": bpe().vocab_size}
    with pytest.raises(
        UserError, match=r"with <\|im_start\|>, <\|im_end\|> of data.chat_template.*\"plain\""
    ):
        prepare(recipe_of(source, tmp_path / "cache", chat_template="chatml", **how))
    assert prepare(recipe_of(source, tmp_path / "cache", chat_template="plain", **how)).vocab_size <= 320


# Chat and generate


def make_run(out: Path, source: str = "", seq_len: int = 64) -> Path:
    """A run folder with an untrained model and bytes as tokens."""
    tokenizer = open_template(source, "bytes", bytes_tokenizer()).tokenizer if source else bytes_tokenizer()
    tokenizer.chat_template = TEMPLATES[source].source if source else ""
    model = ModelSection(layers=1, dim=16, heads=2, seq_len=seq_len, init_std=0.5)
    recipe = Recipe(
        model=model, data=DataSection(tokenizer="bytes", chat_template=source), train=TrainSection(steps=1)
    )
    recipe = resolve(recipe, vocab_size=tokenizer.vocab_size)
    out.mkdir(parents=True)
    write_atomically(out / "recipe.toml", to_toml(recipe))
    tokenizer.save(out / "tokenizer.json")
    weights = build(recipe.model, device="cpu", seed=3).state_dict()
    write_checkpoint.save(store.folder_of(out, 0), weights, None, {"step": 0, "tokens": 0})
    return out


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("chat")
    return {
        source or "base": make_run(folder / (source or "base"), source) for source in ("", "chatml", "plain")
    }


def say(chat: Chat, text: str) -> str:
    return "".join(chat.ask(text))


def test_history_stays_within_the_context(runs: dict[str, Path]):
    chat = open_chat(runs["plain"], sampling=Sampling(max_tokens=8, seed=1), system="Be kind.")
    assert chat.template is not None
    for number in range(6):
        answer = say(chat, f"question {number}")
        assert chat.messages[-1] == {"role": "assistant", "content": answer.strip()}
        kept = [m["content"] for m in chat.messages if m["role"] == "user"]
        assert kept == [f"question {n}" for n in range(number + 1)][-len(kept) :]
        prompt = chat.template.prompt([{"role": "system", "content": "Be kind."}, *chat.messages[:-1]])
        assert len(prompt) + 8 <= chat.model.seq_len
    assert len(chat.messages) < 12
    before = list(chat.messages)
    with pytest.raises(UserError, match="the model sees at most 64, its answer included"):
        say(chat, "long " * 40)
    assert chat.messages == before
    chat.reset()
    first = say(chat, "question 0")
    chat.reset()
    assert say(chat, "question 0") == first  # the seed decides


def test_an_answer_that_is_broken_off_counts_as_it_is(runs: dict[str, Path]):
    chat = open_chat(runs["chatml"], sampling=Sampling(max_tokens=20))
    pieces = chat.ask("Hello")
    first = next(pieces)
    pieces.close()
    assert chat.messages[-1]["content"] == first.strip()


def test_a_base_model_continues_what_is_said(runs: dict[str, Path]):
    chat = open_chat(runs["base"], sampling=Sampling(max_tokens=5))
    assert chat.template is None
    one = say(chat, "Once")
    two = say(chat, "upon")
    assert chat.text == f"Once{one}\nupon{two}"


def command(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[str, str]:
    with pytest.raises(SystemExit) as stop:
        main(list(map(str, arguments)))
    assert not stop.value.code
    captured = capsys.readouterr()
    return captured.out, captured.err


def test_chat_reads_lines_from_a_pipe(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    how = ("--max-tokens", 6, "--seed", 2)
    long = "long " * 500
    asked = f"Hello\n\n/reset\nHello\n{long}\n/what\n/quit\nnever\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(asked))
    out, err = command(capsys, "chat", runs["chatml"], *how, "--json")
    found = [json.loads(line) for line in out.splitlines()]
    assert [row["message"] for row in found] == ["Hello", "Hello", long.strip()]
    assert "the model sees at most" in found[2]["error"]["message"]
    assert found[0]["answer"] == found[1]["answer"]  # forgotten
    assert "unknown command /what" in err
    assert "base model" not in err
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n"))
    out, err = command(capsys, "chat", runs["base"], *how)
    assert "this is a base model" in err
    assert "data.chat_template" in err
    assert out.endswith("\n")


def test_samples_prompts_and_stop(runs: dict[str, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path):
    how = ("--max-tokens", 12, "--json")
    three = json.loads(command(capsys, "generate", runs["chatml"], "--prompt", "ab", "--samples", 3, *how)[0])
    one = json.loads(command(capsys, "generate", runs["chatml"], "--prompt", "ab", "--seed", 1, *how)[0])
    assert three["texts"][1] == one["text"]
    assert len(set(three["texts"])) == 3
    stop = one["text"][3:5]
    cut = json.loads(
        command(capsys, "generate", runs["chatml"], "--prompt", "ab", "--seed", 1, "--stop", stop, *how)[0]
    )
    assert cut["text"] == one["text"].partition(stop)[0]
    write(tmp_path / "p.txt", "ab\n\ncd\n")
    out = command(capsys, "generate", runs["base"], "--prompts", tmp_path / "p.txt", "--max-tokens", 4)[0]
    assert [json.loads(line)["prompt"] for line in out.splitlines()] == ["ab", "cd"]
    write(
        tmp_path / "p.jsonl", json.dumps({"prompt": "ab"}) + "\n" + json.dumps({"messages": TALK[1:2]}) + "\n"
    )
    out = command(
        capsys,
        "generate",
        runs["chatml"],
        "--prompts",
        tmp_path / "p.jsonl",
        "--samples",
        2,
        "--max-tokens",
        4,
    )[0]
    assert [len(json.loads(line)["texts"]) for line in out.splitlines()] == [2, 2]
    assert json.loads(out.splitlines()[1])["messages"] == TALK[1:2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--prompts", "p.jsonl"],
            "p.jsonl, prompt 1: 'messages' need a model that was trained on conversations",
        ),
        (
            ["--prompts", "bad.jsonl"],
            "bad.jsonl, line 1: needs the text 'prompt', or 'messages' (its keys: ask)",
        ),
        (["--prompts", "none.txt"], "no such file: 'none.txt'"),
        (["--prompts", "p.jsonl", "--prompt", "a"], "--prompt and --prompts"),
        (["--stop", ""], "stop = "),
        (["--step", "7"], "7"),
    ],
)
def test_what_generate_refuses(
    runs: dict[str, Path],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "p.jsonl", json.dumps({"messages": TALK[1:2]}))
    write(tmp_path / "bad.jsonl", json.dumps({"ask": "a"}))
    with pytest.raises(SystemExit) as stop:
        main(["generate", str(runs["base"]), *arguments])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@given(
    text=st.text("ab<", max_size=12),
    cuts=st.lists(st.integers(0, 12)),
    stop=st.text("ab<", min_size=1, max_size=3),
)
def test_text_ends_before_the_first_stop(text: str, cuts: list[int], stop: str):
    edges = sorted({0, len(text), *(c for c in cuts if c < len(text))})
    pieces = [text[a:b] for a, b in pairwise(edges)]
    found = list(until(pieces, [stop, "never"]))
    assert "".join(found) == text.partition(stop)[0]
    assert all(found)


def test_an_export_holds_the_template_and_what_ends_an_answer(runs: dict[str, Path], tmp_path: Path):
    folder = export_run(runs["chatml"], tmp_path / "hf")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert config["chat_template"] == TEMPLATES["chatml"].source
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    ends = sorted((tokenizer.end_id, tokenizer.special_tokens["<|im_end|>"]))
    for name in ("generation_config.json", "config.json"):
        assert json.loads((folder / name).read_text())["eos_token_id"] == ends
    again = import_folder(folder, tmp_path / "again")
    assert say(open_chat(again, sampling=Sampling(max_tokens=9)), "Hi") == say(
        open_chat(runs["chatml"], sampling=Sampling(max_tokens=9)), "Hi"
    )
    write(folder / "chat_template.jinja", TEMPLATES["plain"].source)  # newer folders have it in a file
    chat = open_chat(import_folder(folder, tmp_path / "file"))
    assert chat.template is not None
    assert chat.template.source == TEMPLATES["plain"].source


def test_a_conversation_is_trained_as_it_is_asked(tmp_path: Path):
    """The ids and positions in front of an answer are those of a chat's prompt, whatever stands before it."""
    source = lines_of(tmp_path / "a.jsonl")
    recipe = recipe_of(source, tmp_path / "cache", seq_len=129, val_fraction=0.0, chat_template="chatml")
    data = prepare(recipe)
    assert data.tokenizer is not None
    chat = ChatTemplate(data.tokenizer.chat_template, data.tokenizer)
    x, y, first = cut_of(recipe, data, data.train).read(np.array([0]))
    assert first is not None
    prompt = chat.prompt(TALK[3:4])
    begin = int(first[0, -1])
    assert x[0, begin : begin + len(prompt)].tolist() == prompt
    assert (y[0, begin : begin + len(prompt) - 1] == NOT_COUNTED).all()
    assert y[0, begin + len(prompt) - 1] == chat.encode(TALK[3:]).ids[len(prompt)]


def test_a_step_weighs_all_answer_tokens_alike(tmp_path: Path):
    """Microbatches hold unequal numbers of them: loss and weights are those of one microbatch."""
    rows = [
        [{"role": "user", "content": "q" * n}, {"role": "assistant", "content": "a" * (30 - n)}]
        for n in range(1, 29)
    ]
    source = write(tmp_path / "a.jsonl", "".join(json.dumps({"messages": row}) + "\n" for row in rows))
    losses, weights = [], []
    for micro in (1, 4):
        recipe = recipe_of(
            source, tmp_path / "cache", seq_len=48, batch=4, steps=2, val_fraction=0.0, chat_template="plain"
        )
        recipe = recipe.model_copy(
            update={
                "model": ModelSection(layers=1, dim=16, heads=2, seq_len=48),
                "train": recipe.train.model_copy(update={"microbatch_size": micro}),
                "precision": recipe.precision.model_copy(update={"mode": "fp32"}),
            }
        )
        run = tmp_path / f"run-{micro}"
        train_rank(0, 1, recipe, run)
        losses.append(lines(run, "loss"))
        weights.append(stored.load(store.latest(run), kinds=("model",)).model)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert_close_tensors(*weights)


@pytest.mark.parametrize(("template", "command"), [("", "generate"), ("chatml", "chat")])
def test_chat_is_offered_after_conversations_only(template: str, command: str) -> None:
    """The tokenizer of a base model may have a template, too."""
    recipe = load("quickstart", [f"data.chat_template={template}"])
    data: Any = SimpleNamespace(tokenizer=SimpleNamespace(chat_template=TEMPLATES["chatml"].source))
    assert _next_commands(Job(recipe, Path("r"), data))[0].startswith(f"fivefold {command} r")
