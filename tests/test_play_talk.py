"""The part "Talk" of the page: what it is asked, what the model's process says, and who ends it."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from observe_run import make_run as with_metrics
from patience import PATIENCE
from playing import Play, playing
from test_chat import make_run

from fivefold.checkpoint import store, write
from fivefold.train.generate import Sampling, generate_text, open_run
from fivefold_play.talk import KINDS, LIKELIEST, MOST_TEXT, Talker

HOSTILE = "<img src=x onerror=alert(1)> \x1b[31m {{ 7 * 7 }} ' \" </script>\n"


def metrics(run: Path) -> Path:
    """With the line of a step, as a run that has trained."""
    line = {"step": 1, "step_s": 0.1, "loss": 5.0, "tokens": 64, "tokens_per_s": 640.0}
    (run / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("talk") / "runs"
    for source in ("", "plain"):
        run = metrics(make_run(folder / (source or "base"), source))
        state = {name: 0.5 * tensor for name, tensor in open_run(run)[0].state_dict().items()}
        write.save(store.folder_of(run, 1), state, None, {"step": 1, "tokens": 64})
    with_metrics(folder / "empty", steps=4)  # it has no checkpoint
    return folder


@pytest.fixture(scope="module")
def play(folder: Path) -> Iterator[Play]:
    with playing(folder) as play:
        yield play


def ask(play: Play, **given: Any) -> list[dict[str, Any]]:
    """All lines of an answer."""
    name = play.post("talk/ask", given)["id"]
    return list(play.events(f"talk/answer?id={name}"))


def test_the_server_needs_no_torch() -> None:
    code = "import sys; from fivefold_play import server, talk; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_text_is_continued_as_the_command_does(play: Play, folder: Path) -> None:
    run = str(folder / "base")
    assert {one["name"] for one in play.get("talk/runs")["runs"]} == {
        str(folder / n) for n in ("base", "plain", "empty")
    }
    [about, end] = ask(play, run=run)
    assert about["about"] == {"step": 1, "steps": [0, 1], "chat": False, "context": 64}
    assert end == {"end": "complete"}
    module, recipe, tokenizer = open_run(folder / "base", checkpoint=store.chosen(folder / "base", 0))
    assert tokenizer is not None
    for temperature, seed in ((0, 0), (0.9, 3)):
        _, *pieces, end = ask(
            play, run=run, step=0, text=HOSTILE, max_tokens=12, temperature=temperature, seed=seed
        )
        assert end == {"end": "complete"}
        text = "".join(piece["text"] for piece in pieces)
        assert text == "".join(
            generate_text(module, recipe.model, tokenizer, HOSTILE, Sampling(12, temperature, seed=seed))
        )
        tokens = [token for piece in pieces for token in piece["tokens"]]
        assert len(tokens) == 12
        for token in tokens:
            assert len(token["others"]) == LIKELIEST
            chances = [p for _, p in token["others"]]
            assert chances == sorted(chances, reverse=True)
            assert token["p"] <= chances[0] <= sum(chances) <= 1
        if not temperature:
            assert all(token["p"] == token["others"][0][1] for token in tokens)
        logits = module(torch.tensor([tokenizer.encode(HOSTILE)]))[0, -1, : tokenizer.vocab_size]
        assert tokens[0]["others"][0][1] == pytest.approx(logits.softmax(0).max().item(), rel=1e-4)


def test_a_conversation_goes_on(play: Play, folder: Path) -> None:
    given = {"run": str(folder / "plain"), "step": 0, "max_tokens": 8, "system": "Be kind."}
    about, *pieces, _ = ask(play, **given, text="Hello")
    assert about["about"]["chat"]
    answer = "".join(piece["text"] for piece in pieces)
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": answer}]
    _, *again, _ = ask(play, **given, text="Hello")
    assert again == pieces
    _, *after, end = ask(play, **given, text="Hello", messages=messages)
    assert end == {"end": "complete"}
    assert after != pieces  # another seed, and other words before
    [*_, end] = ask(play, **given, text="long " * 80)
    assert "the model sees at most 64" in end["error"]


def test_the_next_question_ends_the_one_before(play: Play, folder: Path) -> None:
    given = {
        "run": str(folder / "base"),
        "text": "a",
        "max_tokens": 10_000,
        "temperature": 0,
    }  # no end is likeliest
    first = play.events(f"talk/answer?id={play.post('talk/ask', given)['id']}")
    assert "about" in next(first)
    [*_, end] = ask(play, **given | {"max_tokens": 3})
    assert end == {"end": "complete"}
    assert [*first][-1] == {"end": "another"}
    # One that nobody reads any more does, too
    long = play.events(f"talk/answer?id={play.post('talk/ask', given)['id']}")
    next(long)
    del long
    [*_, end] = ask(play, **given | {"max_tokens": 3})
    assert end == {"end": "complete"}
    assert list(play.events("talk/answer?id=999")) == [{"end": "another"}]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"run": "../base"}, "there is no run"),
        ({"run": ["base"]}, "there is no run"),
        ({"step": "1"}, "step: must be of type int or NoneType"),
        ({"step": True}, "step: must be of type int"),
        ({"text": 3}, "text: must be of type str or"),
        ({"temperature": "hot"}, "temperature: must be of type int or float"),
        ({"temperature": 10**30}, "temperature: at most 100"),
        ({"seed": True}, "seed: must be of type int"),
        ({"max_tokens": 10**6}, "max_tokens: at most 10,000"),
        ({"text": "x" * (MOST_TEXT + 1)}, "200,000 characters"),
    ],
)
def test_what_is_no_question(play: Play, folder: Path, given: dict[str, Any], words: str) -> None:
    assert words in play.post("talk/ask", {"run": str(folder / "base")} | given, 400)["error"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"run": "empty"}, "has no checkpoint yet"),
        ({"step": 7}, "has no checkpoint of this step; it has 0, 1"),
        ({"temperature": -1.0}, "temperature = -1.0: must be 0 or more"),
        ({"temperature": float("nan")}, "temperature = nan: must be"),
        ({"seed": 2**63}, "must be 0 to 2^63 - 1"),
        ({"max_tokens": 0}, "max_tokens = 0: must be 1 or more"),
        ({"messages": [{"role": 3}]}, "'role' must be text"),
        ({"messages": ["x"]}, "message 1 is no object"),
    ],
)  # fmt: skip
def test_what_the_model_refuses(play: Play, folder: Path, given: dict[str, Any], words: str) -> None:
    [*_, end] = ask(play, **{"text": "a"} | given | {"run": str(folder / given.get("run", "base"))})
    assert end["end"] == "error"
    assert words in end["error"]


def test_the_process_may_die(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It may be killed, or run out of memory: the page says so, and the next question starts another one."""
    talker = Talker()
    given = {"run": str(folder / "base")} | {key: default for key, (_, default) in KINDS.items()}
    long = given | {"text": "a", "max_tokens": 10_000, "temperature": 0}
    left = talker.answer(str(talker.ask(long)))
    assert "about" in next(line for line in left if line)
    del left  # nobody listens any more
    while "end" not in (line := talker.lines.get(timeout=20 * PATIENCE)):
        pass
    assert line == {"end": "stopped"}
    first = talker.answer(str(talker.ask(long)))
    assert "about" in next(line for line in first if line)
    assert talker.process is not None
    talker.process.kill()
    end = [line for line in first if line][-1]
    assert (end["end"], "was killed: the system may have run out of memory" in end["error"]) == (
        "error",
        True,
    )
    assert [*talker.answer(str(talker.ask(given)))][-1] == {"end": "complete"}
    assert talker.process.stdin is not None
    talker.process.stdin.close()
    assert talker.process.wait(20 * PATIENCE) == 0, "it ends with the server"


@pytest.mark.parametrize("why", ["idle", "closed", "the server was killed"])
def test_the_process_ends_without_a_word(why: str) -> None:
    """Python aborts where a thread waits for input, and a traceback tells nobody anything."""
    code = (
        "from contextlib import suppress; from fivefold_play import talk\n"
        f"talk.IDLE_S = {0.3 if why == 'idle' else 60}\n"
        "talk.answered = lambda *_: iter([{'text': 'x' * 100_000}] * 3)\n"
        "with suppress(BrokenPipeError): talk.main()"
    )
    line = [sys.executable, "-c", code]
    with subprocess.Popen(line, stdin=-1, stdout=-1, stderr=-1) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        if why == "the server was killed":  # while it answers
            process.stdin.write(b'{"id": 1}\n')
            process.stdin.flush()
            process.stdout.read(1)
            process.stdout.close()
        if why != "idle":
            process.stdin.close()
        assert process.stderr is not None
        assert (process.wait(20 * PATIENCE), process.stderr.read()) == (0, b"")


def test_half_a_line_is_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a process that ends while it writes, the page hears that it has ended."""
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    (tmp_path / "python").write_text(
        """#!/bin/sh\nread line; printf '{"id": 1, "text": "x", "to'; exit 3\n"""
    )
    (tmp_path / "python").chmod(0o755)
    talker = Talker()
    [end] = [line for line in talker.answer(str(talker.ask({"text": "a"}))) if line]
    assert (end["end"], "has ended (exit code 3)" in end["error"]) == ("error", True)
