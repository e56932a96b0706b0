"""The part "Text" of the page: what a source holds, and what may be looked at and sent."""

import http.client
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from patience import PATIENCE
from playing import Play, playing

from fivefold.recipe import load
from fivefold_plan.cluster import measured
from fivefold_plan.cluster.clusters import LOCAL, parse
from fivefold_plan.predict import predict
from fivefold_play import text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("text") / "runs"


@pytest.fixture(scope="module")
def play(folder: Path) -> Iterator[Play]:
    with playing(folder) as play:
        yield play


def about(play: Play, source: object, code: int = 200) -> dict[str, Any]:
    return play.get(f"text/about?{urlencode({'source': str(source)})}", code)


def send(play: Play, name: str, content: bytes, folder: str = "", code: int = 200) -> dict[str, Any]:
    path = f"/api/text/upload?{urlencode({'name': name, 'folder': folder})}"
    status, _, answer = play.ask(path, "POST", content, Cookie=play.cookie, Origin=play.origin)
    assert status == code, answer
    return json.loads(answer)


def test_dropped_files_are_text(play: Play, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = b"".join(json.dumps({"text": f"row {n} <b>bold</b> " * 9}).encode() + b"\n" for n in range(90))
    made = send(play, "../../a b\u202e<img>/\x1b.JSONL", rows)
    assert made["folder"] == "texts-1"
    assert Path(made["source"]) == folder / ".play" / "texts-1"
    assert made["name"] == "1-..-..-a-b-img-.JSONL"
    assert send(play, ".md", b"# Title\n" * 300, "texts-1")["name"] == "2-.md"
    (folder / ".play" / "texts-1" / made["name"]).rename(folder / ".play" / "texts-1" / "3-again.txt")
    assert send(play, "again.txt", b"again", "texts-1")["name"] == "4-again.txt", (
        "no file takes another's place"
    )
    (folder / ".play" / "texts-1" / "3-again.txt").rename(folder / ".play" / "texts-1" / made["name"])
    (folder / ".play" / "texts-1" / "4-again.txt").unlink()
    assert send(play, "x" * 300 + ".txt", b"more " * 300, "texts-1")["name"] == "3-" + "x" * 76 + ".txt"
    found = about(play, made["source"])
    assert (found["files"], found["documents"]) == (3, 92)
    assert found["tokens"] > 500
    assert [name for name, _ in found["samples"]] == [made["name"]] * 3
    assert found["samples"][0][1] == "row 0 <b>bold</b> " * 9
    assert load("quickstart", [found["set"]]).data.source == made["source"]
    recipe = load("quickstart", [found["set"]])
    assert ("not measured" in found["why"]) == (measured.load() is None)
    planned = predict(recipe, parse(LOCAL, rough=True)).tokens_per_s
    assert found["seconds"] == pytest.approx(found["tokens"] / planned)
    monkeypatch.setattr(text, "COUNTED", 10)
    found = about(play, made["source"])
    assert (found["tokens"], found["seconds"]) == (None, None)
    assert any("for training" in line for line in found["facts"])


def test_conversations_are_counted_with_a_template(play: Play) -> None:
    talk = [{"role": "user", "content": "Which?"}, {"role": "assistant", "content": "This one. " * 9}]
    made = send(play, "talk.jsonl", (json.dumps({"messages": talk}).encode() + b"\n") * 60)
    found = about(play, made["source"])
    assert (found["documents"], found["samples"][0][1]) == (60, "Which?\n" + talk[1]["content"])
    data = load("quickstart", found["set"].split("\n")).data
    assert (data.source, data.chat_template) == (made["source"], text.CHAT)


def test_what_is_not_taken(play: Play, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = send(play, "a.txt", b"a text " * 900)
    for name in ("x.py", "x.txt.gz", "x.bin", "", ".txt/", "x", "x.tar"):
        assert "only .txt" in send(play, name, b"x", made["folder"], 400)["error"]
    for other in ("texts-99", "../texts-1", "..", "/tmp", ".", "texts-1/..", "texts-\u0661"):
        assert "no such folder" in send(play, "a.txt", b"x", other, 400)["error"]
    os.symlink("/tmp", folder / ".play" / "texts-77")
    assert "no such folder" in send(play, "a.txt", b"x", "texts-77", 400)["error"]
    there = {file.name for file in Path(made["source"]).iterdir()}
    monkeypatch.setattr(play.app, "limits", {"/api/text/": 1000})
    line = http.client.HTTPConnection("127.0.0.1", play.port, timeout=20 * PATIENCE)
    path = f"/api/text/upload?{urlencode({'name': 'big.txt', 'folder': made['folder']})}"
    line.request("POST", path, iter([b"y" * 900] * 4), {"Cookie": play.cookie, "Origin": play.origin})
    assert line.getresponse().status == 413
    line.close()
    assert {file.name for file in Path(made["source"]).iterdir()} == there
    sets = {*(folder / ".play").iterdir()}
    send_nowhere = http.client.HTTPConnection("127.0.0.1", play.port, timeout=20 * PATIENCE)
    new = path.partition("&folder=")[0]
    send_nowhere.request("POST", new, iter([b"y" * 900] * 4), {"Cookie": play.cookie, "Origin": play.origin})
    assert send_nowhere.getresponse().status == 413
    send_nowhere.close()
    assert {*(folder / ".play").iterdir()} == sets, "no empty folder stays"
    monkeypatch.setattr(text, "MOST_FILES", 1)
    assert "at most 1 files" in send(play, "b.txt", b"x", made["folder"], 400)["error"]
    assert play.ask(path, "POST", b"x", Cookie=play.cookie)[0] == 403  # it does not come from the page


def test_a_link_in_place_of_the_texts_is_refused(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "other").mkdir()
    os.symlink(tmp_path / "other", tmp_path / "runs" / ".play")
    with playing(tmp_path / "runs") as play:
        assert "is a link" in send(play, "a.txt", b"x", code=400)["error"]
    assert [*(tmp_path / "other").iterdir()] == []


def test_no_text_outside_of_the_folders(play: Play, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("a secret " * 2000)
    mine = folder / "mine"
    mine.mkdir(parents=True)
    (mine / "a.txt").write_text("a text " * 2000)
    os.symlink(tmp_path / "secret.txt", mine / "b.txt")
    os.symlink(tmp_path, folder / "linked")
    hostile = [
        "/etc",
        "~",
        "hf:org/name",
        "https://x.example/a.txt",
        f"tokens:{mine}",
        f"{mine}\0",
        f"{mine}\n",
    ]
    links = [folder / "linked", f"{folder}/linked/*", f"{folder}/*/../../*", f"{folder}/../.."]
    for source in (tmp_path, mine, *links, *hostile):
        answer = about(play, source, 400)
        assert re.search("outside of the page's folders|in the page's folders only", answer["error"]), source
    wanted = f"fivefold play {folder} {tmp_path}"
    for source in (mine, tmp_path, tmp_path / "secret.txt", folder / "linked"):
        assert about(play, source, 400)["error"].endswith(wanted), source
    (mine / "b.txt").unlink()
    (mine / ".venv").mkdir()
    os.symlink(tmp_path / "secret.txt", mine / ".venv" / "python.txt")  # nobody reads it
    assert about(play, mine)["documents"] == 1
    assert "no such file" in about(play, folder / "none", 400)["error"]
    (mine / "c.jsonl").write_text("no row\n")
    assert "c.jsonl" in about(play, mine, 400)["error"]
    assert about(play, "", 400)["error"]
