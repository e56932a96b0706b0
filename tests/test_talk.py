"""The set `talk`: its parts are apart, its answers right, its guesses as said; evaluation of conversations."""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections import Counter
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest
import torch
from test_chat import make_run
from test_cli import run as command

from fivefold.checkpoint import store, write
from fivefold.data import sources, talk
from fivefold.errors import UserError
from fivefold.models.base import build
from fivefold.recipe import load
from fivefold.train.evaluate import Evaluation, evaluate
from fivefold.train.generate import Sampling, open_chat

MAKER = Path(__file__).parents[1] / "benchmarks" / "talk_questions.py"
PARTS = [talk.questions(kind, held_out) for held_out in (False, True) for kind in talk.KINDS]
QUESTIONS = [question for part in PARTS for question in part]


def test_kinds_have_equal_parts_without_duplicates() -> None:
    assert [len(part) for part in PARTS] == [1200] * 6 + [150] * 6
    assert max(Counter((question.kind, question.asked) for question in QUESTIONS).values()) == 1
    rows = list(talk.conversations())
    turns = Counter(len(row["messages"]) // 2 for row in rows)
    assert set(turns) == set(range(1, talk.MOST_TURNS + 1))
    asked = [message["content"] for row in rows for message in row["messages"][::2]]
    assert sorted(asked) == sorted(question.asked for part in PARTS[:6] for question in part)


def test_the_file_is_as_its_maker_writes_it() -> None:
    made = run_path(str(MAKER))
    assert tuple(made["KINDS"]) == talk.KINDS
    assert made["written"]() == talk.FILE.read_text(encoding="utf-8")


def test_the_rows_are_the_same_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIVEFOLD_CACHE", str(tmp_path))
    (file,) = sources.find("talk").files
    digest = hashlib.sha256(file.path.read_bytes()).hexdigest()
    assert digest.startswith("62c0593fe30a9b23"), "docs/chat.md has figures of other rows: measure again"
    file.path.write_text("changed")
    assert sources.find("talk").files[0].path.stat().st_size == file.size


def test_the_held_out_questions_stay() -> None:
    """Figures of two versions compare only if they were asked the same: no change of wordings touches these."""
    rows = json.dumps([tuple(question) for part in PARTS[6:] for question in part])
    assert hashlib.sha256(rows.encode()).hexdigest().startswith("c4f3b86f2ae7e4ce")


def operand(question: talk.Question) -> object:
    """What must not be in both parts."""
    reply = question.reply
    match question.kind:
        case "sums":
            a, sign, b = re.findall(r"(\d+) ([+-]) (\d+)", reply)[-1]
            return (sign, *(sorted((int(a), int(b))) if sign == "+" else (a, b)))
        case "spelling":
            return question.answer
        case "counting":
            return "".join(re.findall(r"([a-z])(?: \d+)?,", reply))
        case "units":
            return frozenset(re.findall(r"\d+ \w+", reply.rpartition("so ")[2]))
        case "facts":
            return question.asked.replace(operand_of_fact(question), "...")
        case _:
            found = re.search(r"\d+|know (\w+)", reply)
            return found and found[0], re.sub(r"\d+|(?<=know )\w+", "", reply)


def operand_of_fact(question: talk.Question) -> str:
    return max(set(re.findall(r"\w+", question.reply)) & set(re.findall(r"\w+", question.asked)), key=rarity)


def rarity(word: str) -> int:
    return -sum(word in question.asked for question in PARTS[4])


@pytest.mark.parametrize("kind", talk.KINDS)
def test_held_out_questions_are_apart(kind: str) -> None:
    trained, held_out = (talk.questions(kind, part) for part in (False, True))
    assert not {operand(question) for question in trained} & {operand(question) for question in held_out}
    if kind == "facts":
        assert {question.reply for question in held_out} <= {question.reply for question in trained}


def test_held_out_wordings_of_facts_are_two_words_from_every_trained_one() -> None:
    """Whatever they ask for; capitals and marks do not count. None is a part of a trained one."""
    tables = tomllib.loads(MAKER.with_suffix(".toml").read_text(encoding="utf-8"))
    held_out = [words_of(wording) for table in tables["facts"] for wording in table["held_out"]]
    unknown = re.compile(r"know (\w+)\.$")
    trained = [(q.asked, operand_of_fact(q)) for q in PARTS[4]]
    trained += [(q.asked, found[1]) for q in PARTS[5] if (found := unknown.search(q.reply))]
    wordings = {" ".join(words_of(asked.replace(name, "{x}"))) for asked, name in trained}
    wordings -= {" ".join(words_of(asked.replace("{w}", "{x}"))) for asked in tables["asking"]}
    assert len(wordings) > 500
    for held in held_out:
        near = [each for each in wordings if changes(held, each.split()) < 2]
        within = [each for each in wordings if f" {' '.join(held)} " in f" {each} "]
        assert not near + within, held


def words_of(wording: str) -> list[str]:
    return re.findall(r"[\w{}]+|'s", wording.lower())


def changes(one: list[str], other: list[str]) -> int:
    """Words to put in, leave out or replace, until one is the other (the Levenshtein distance)."""
    row = list(range(len(other) + 1))
    for before, word in enumerate(one, 1):
        above, row = row, [before]
        for at, also in enumerate(other):
            row.append(min(row[at] + 1, above[at + 1] + 1, above[at] + (word != also)))
    return row[-1]


def test_changes_of_words() -> None:
    asked = words_of("Tell me {x}'s capital.")
    others = (
        "tell me {x}'s capital",
        "Tell me {x}'s symbol",
        "{x}'s capital",
        "Can you tell me {x}'s capital?",
    )
    assert [changes(asked, words_of(other)) for other in others] == [0, 1, 2, 2]


def test_no_word_is_spelled_in_one_part_and_counted_in_the_other() -> None:
    of = {(q.kind, held_out): set() for q in QUESTIONS for held_out in (False, True)}
    for held_out in (False, True):
        for kind in ("spelling", "counting"):
            words = {operand(question) for question in talk.questions(kind, held_out)}
            of[kind, held_out] = {str(word).replace("-", "") for word in words}
    assert not (of["spelling", False] | of["counting", False]) & (of["spelling", True] | of["counting", True])


def test_answers_are_right() -> None:
    factors = {("m", "cm"): 100, ("km", "m"): 1000, ("cm", "mm"): 10, ("kg", "g"): 1000, ("l", "ml"): 1000}
    factors |= {("t", "kg"): 1000, ("hours", "minutes"): 60, ("minutes", "seconds"): 60, ("weeks", "days"): 7}
    for question in QUESTIONS:
        asked, reply = question.asked, question.reply
        assert reply[:-1].endswith(question.answer.rstrip(".?"))
        for a, sign, b, more, result in re.findall(r"(\d+) ([x+-]) (\d+)(?: \+ (\d+))? = (\d+)", reply):
            value = {"+": int(a) + int(b), "-": int(a) - int(b), "x": int(a) * int(b)}[sign]
            assert value + int(more or 0) == int(result), question
        numbers = [int(n) for n in re.findall(r"\d+", asked)]
        if question.kind == "sums":
            difference = "-" in asked or "minus" in asked or "Subtract" in asked
            assert int(question.answer) == (abs(numbers[0] - numbers[1]) if difference else sum(numbers))
            assert ("Subtract" in asked) == (difference and numbers[0] < numbers[1]) or numbers[0] >= numbers[
                1
            ]
        elif question.kind == "spelling":
            assert question.answer.replace("-", "") in re.findall(r"\w+", asked)
        elif question.kind == "counting":
            word = str(operand(question))
            assert word in re.findall(r"\w+", asked)
            letter = re.search(r"(?:many|often is|Count the|have) ([a-z])\b", asked)
            assert int(question.answer) == (word.count(letter[1]) if letter else len(word)), question
        elif question.kind == "units":
            (n, x), (m, y) = re.findall(r"(\d+) (\w+)", reply.rpartition("so ")[2])
            factor = factors.get((x, y)) or 1 / factors[y, x]
            assert int(m) == pytest.approx(int(n) * factor)
            assert (numbers[0], {x, y} <= set(re.findall(r"\w+", asked))) == (int(n), True)


def test_the_recorded_conversation_is_not_trained_on() -> None:
    path = Path(__file__).parents[1] / "benchmarks" / "results" / "talk.json"
    trained = {question.asked for part in PARTS[:6] for question in part}
    for run in json.loads(path.read_text())["runs"]:
        assert run["chat"]
        assert not {turn["message"] for turn in run["chat"]} & trained


def test_conversations_fit_into_a_sequence() -> None:
    longest = max(
        sum(len(f"Assistant: {m['content']}") + 3 for m in row["messages"]) for row in talk.conversations()
    )
    assert longest <= load("talk").model.seq_len


def test_guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {
        False: [("2 + 3", "5"), ("20 + 3", "23"), ("ab?", "7"), ("cd", "7")],
        True: [("20 + 31", "23"), ("2 + 3?", "5"), ("efab", "7")],
    }

    def given(kind: str, held_out: bool = False) -> list[talk.Question]:
        return [talk.Question(kind, asked, answer, answer) for asked, answer in rows[held_out]]

    monkeypatch.setattr(talk, "questions", given)
    found = talk.guesses("sums")
    assert [guess["nearest"] for guess in found] == [True, True, True]
    assert [guess["frequent"] for guess in found] == [False, False, True]


def test_a_reply_is_right_if_the_model_would_write_all_of_it(tmp_path: Path, capsys: Any) -> None:
    run = make_run(tmp_path / "run", "plain")
    right = talk.Question("sums", "2+3", "5.", "5").messages
    chat = open_chat(run)
    assert chat.template is not None
    encoded = chat.template.encode([*right, *right])
    tokens = torch.tensor([encoded.ids.tolist()])
    model = build(chat.model, device="cpu", seed=3)
    adam = torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(60):
        adam.zero_grad()
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        adam.step()
    write.save(store.folder_of(run, 1), model.state_dict(), None, {"step": 1, "tokens": 0})
    assert "".join(open_chat(run, sampling=Sampling(temperature=0)).ask("2+3")).strip() == "5."
    rows = [
        right,
        [*right, *right],
        [right[0], {"role": "assistant", "content": "5.."}],
        [right[0], right[0]],
    ]
    lines = [json.dumps({"messages": row, "kind": "ab"[len(row) > 2]}) + "\n" for row in rows]
    path = tmp_path / "asked.jsonl"
    path.write_text("".join(lines[:3]))
    found = evaluate(run, tasks=[path])["tasks"][0]
    assert [detail["right"] for detail in found["details"]] == [True, True, False]
    assert found["kinds"] == {"a": {"items": 2, "accuracy": 0.5}, "b": {"items": 1, "accuracy": 1.0}}
    with torch.no_grad():
        log_p = model.eval()(tokens[:, :-1])[0].double().log_softmax(-1)
    counted = encoded.counted.nonzero()[0][-len(" 5.") - 2 :]
    wanted = sum(log_p[at - 1, encoded.ids[at]].item() for at in counted)
    assert found["details"][1]["log_likelihoods"][0] == pytest.approx(wanted, abs=0.05)
    path.write_text(lines[3])
    with pytest.raises(UserError, match=r"line 1: the last message has the role 'user'; must be 'assistant'"):
        evaluate(run, tasks=[path])
    path.write_text(lines[0])
    with pytest.raises(UserError, match="conversations have no shots"):
        evaluate(run, tasks=[path], how=Evaluation(shots=1))
    with pytest.raises(UserError, match="the run has no chat template"):
        evaluate(make_run(tmp_path / "base"), tasks=[path])
    assert command("eval", str(run), "--task", "talk", "--limit", "2") == 0
    assert "sums         accuracy 0.000, nearest 0.0" in capsys.readouterr().out
