"""The page's parts Train and Runs, by plain requests: what they show of runs, also of hostile ones, and what they
start."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, urlencode

import pytest
from observe_run import make_run
from patience import PATIENCE
from playing import Play, playing

from fivefold.comm.watchdog import Files
from fivefold.errors import UserError
from fivefold.files import owned
from fivefold.files.reading import DEEPEST
from fivefold.observe import timelines
from fivefold.recipe import shipped, sweep
from fivefold.schedules.timelines import COMPUTE, Span, StepTimeline
from fivefold_play import train, watch
from fivefold_play.jobs import Jobs
from fivefold_play.state import State

SIZES = {"parameters": 1e4, "tokens": 1e5, "flops": 6e9, "val_loss": 2.0}
EVIL = "<img src=x onerror=alert(1)>"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_run(tmp_path / "runs" / "first", steps=40)
    return tmp_path / "runs"


@pytest.fixture
def play(folder: Path) -> Iterator[Play]:
    with playing(folder) as play:
        yield play


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Play, Path]]:
    """A server of a folder, for requests that change nothing."""
    folder = tmp_path_factory.mktemp("asked") / "runs"
    make_run(folder / "first", steps=40)
    with playing(folder) as play:
        yield play, folder


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs wait, and none starts."""
    monkeypatch.setattr(Jobs, "start_next", lambda self: None)


def named(run: Path, **more: str) -> str:
    return urlencode({"run": str(run), **more})


def test_a_run_is_watched_while_it_trains(play: Play, folder: Path) -> None:
    run = folder / "first"
    whole = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(whole[:10]) + whole[10][:9])  # the last line is being written
    with owned(run):
        told = play.events(f"train/watch?{named(run)}")
        first = next(told)
        assert first["condition"] == {"kind": "training", "step": 8, "steps": 40}
        assert first["again"]
        assert first["columns"]["step"] == [*range(1, 9)]
        assert first["validation"]["step"] == [4, 8]
        assert first["samples"] == []
        assert first["columns"]["loss"][0] == pytest.approx(json.loads(whole[0])["loss"], rel=1e-4)
        with (run / "metrics.jsonl").open("a") as file:
            file.write(whole[10][9:])
            file.write('{"step": 9, "loss": 2, "alarm": "the loss is odd"}\n')
        more = next(one for one in told if "columns" in one)
        assert (more["again"], more["columns"]["step"], more["alarms"]) == (
            False,
            [9],
            [[9, "the loss is odd"]],
        )
        assert [step for step, _ in more["samples"]] == [8]
        (run / "other").write_text("".join(whole[:4]))  # a run that resumes writes its lines anew
        (run / "other").replace(run / "metrics.jsonl")
        more = next(one for one in told if "columns" in one)
        assert (more["again"], more["columns"]["step"]) == (True, [1, 2, 3, 4])
        (run / "metrics.jsonl").write_text(whole[0])  # in place, too
        more = next(one for one in told if "columns" in one)
        assert (more["again"], more["columns"]["step"]) == (True, [1])
    assert next(one for one in told if "condition" in one)["condition"]["kind"] == "stopped"


def test_of_many_steps_columns_that_are_drawn_come_first(
    play: Play, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "MANY", 9)
    lines = [json.loads(line) for line in (folder / "first/metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    told = play.events(f"train/watch?{named(folder / 'first')}")
    first, more = next(told), next(told)
    assert ([*first["columns"]], first["again"]) == (["step", *watch.DRAWN], True)
    assert [*more] == ["columns"]
    assert {*first["columns"], *more["columns"]} == {"step", *watch.CURVES}
    assert more["columns"]["lr"] == pytest.approx([line["lr"] for line in steps], rel=1e-4)


def test_faults_and_restarts_are_told_in_words(play: Play, folder: Path) -> None:
    run = folder / "first"
    lines = [{"step": 1, "loss": None, "nonfinite": 1}, {"step": 2, "loss": 9.0, "usual_loss": 2.0, "spike": 1},
             {"step": 1, "rollback": {"from": 2, "why": "a spike"}}, {"step": 3, "overflow": 1}]  # fmt: skip
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "restarts.jsonl").write_text('{"time": "now", "why": "rank 1 died"}\n[1]\n')
    found = next(play.events(f"train/watch?{named(run)}"))
    assert [text for _, text in found["alarms"]] == [
        "loss or gradient is not finite",
        "the loss is 9, and about 2 is usual",
        "a spike. The run went back to this step",
    ]
    assert found["restarts"] == ["now: rank 1 died"]
    assert found["columns"]["loss"] == [None, 9.0]


LINES = (
    *(
        "\x00",
        "[]",
        "1",
        '{"step": "1"}',
        '{"step": true, "loss": 1}',
        '{"step": 1, "loss": "x"}',
        "[" * (DEEPEST + 1),
    ),
    *('{"step": 1, "loss": {"a": 1}}', '{"step": 1, "loss": 1e999}', '{"step": 1, "loss": NaN}'),
    *(
        f'{{"step": 1, "loss": 1{"0" * 39}}}',
        '{"step": 1, "rollback": 3, "alarm": [1]}',
        f'{{"step": 1, "loss": {"9" * 400}}}',
        '{"step": 1, "sample": 7}',
    ),
    *('{"step": 1, "spike": 1, "loss": {}}', '{"step": 1, "sample": "\\ud800\\u202e\\u001b[2J"}'),
)


@pytest.mark.parametrize("line", LINES)
def test_metrics_may_hold_anything(play: Play, folder: Path, line: str) -> None:
    run = folder / "first"
    (run / "metrics.jsonl").write_text(line + '\n{"step": 2, "loss": 3, "step_s": 1}\n')
    (run / "plan.json").write_text(
        '{"predicted": {"time": 3, "memory": [], "mfu": "x", "tokens_per_s": 1e999}}'
    )
    found = next(play.events(f"train/watch?{named(run)}"))
    assert (found["columns"]["step"][-1], found["columns"]["loss"][-1]) == (2, 3)
    assert not {"\x1b", "‮"} & {c for _, text in found["samples"] for c in text}
    told = play.events("runs/rows")
    assert next(told)["names"] == [str(run)]
    row = next(told)
    assert row["name"] == str(run)
    assert ("problem" in row) or row["figures"]["steps"] >= 2


@pytest.mark.parametrize("recipe", ["", "\x00", "[model]\narch = 3\n", "[[[", "x = 1"])
def test_recipes_may_hold_anything(play: Play, folder: Path, recipe: str) -> None:
    run = folder / "first"
    (run / "recipe.toml").write_text(recipe)
    assert next(play.events(f"train/watch?{named(run)}"))["condition"]["steps"] in (None, 0) or recipe == ""
    assert play.get(f"train/about?{named(run)}")["layout"] == "" or recipe == ""
    assert next(play.events("train/jobs"))["runs"][0]["name"] == str(run)
    play.post("train/start", {"recipe": str(run)}, 400)


def test_names_are_text(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / f"{EVIL}\x1b[2J\n;rm", steps=4)
    (run / "recipe.toml").write_text((run / "recipe.toml").read_text().replace("def ", EVIL))
    with playing(tmp_path / "runs") as play:
        (name,) = next(play.events("runs/rows"))["names"]
        assert EVIL in name
        assert "\x1b" not in name
        assert play.get(f"train/about?run={quote(name)}")["command"].startswith("fivefold train '")
        code, headers, text = play.ask(f"/api/runs/report?run={quote(name)}", Cookie=play.cookie)
        assert code == 200
        assert headers["content-disposition"] == (
            'attachment; filename="-img-src-x-onerror-alert-1----2J--rm-report.html"'
        )
        assert b"<img" not in text
        assert headers["content-security-policy"].startswith("default-src 'none'")


@pytest.mark.parametrize("path", ["train/about", "train/timeline", "runs/report"])
@pytest.mark.parametrize("name", ["", "/etc", "../runs/first", "first", "\x00", "x" * 5000])
def test_unknown_runs(asked: tuple[Play, Path], path: str, name: str) -> None:
    assert "there is no run" in asked[0].get(f"{path}?run={quote(name)}", 400)["error"]


def test_a_stream_of_an_unknown_run_says_so_and_ends(play: Play) -> None:
    code, _, text = play.ask("/api/train/watch?run=nope", Cookie=play.cookie)
    assert (code, text.endswith(b"event: end\ndata: {}\n\n")) == (200, True)
    assert "there is no run" in json.loads(text.split(b"\n")[0][6:])["error"]


def test_a_path_without_a_home_folder_is_an_error(play: Play) -> None:
    given = {"recipe": "quickstart", "set": ["data.source=~nobody123/x"], "layout": "dp=1"}
    assert "~nobody123/x" in play.post("train/start", given, 400)["error"]


def test_a_run_starts_by_the_command(play: Play, folder: Path, kept: None) -> None:
    found = play.post("train/start", {"recipe": "quickstart", "set": ["train.steps=3"], "layout": "dp=1"})
    assert found == {
        "run": f"{folder}/quickstart-1",
        "command": f"fivefold train quickstart --set train.steps=3 --layout dp=1 --out {folder}/quickstart-1",
    }
    again = play.post("train/start", {"recipe": str(folder / "first")})
    assert again["command"] == f"fivefold train {folder}/first/recipe.toml --out {folder}/first-1"
    waiting = next(play.events("train/jobs"))["waiting"]
    assert [job["run"] for job in waiting] == [found["run"], again["run"]]
    play.post("train/remove", {"id": waiting[0]["id"]})
    assert "no longer queued" in play.post("train/remove", {"id": waiting[0]["id"]}, 400)["error"]
    resumed = play.post("train/resume", {"run": str(folder / "first"), "layout": "dp=2"})
    assert resumed["command"] == f"fivefold train {folder}/first --resume --layout dp=2"
    assert [job["run"] for job in next(play.events("train/jobs"))["waiting"]] == [
        str(folder / "first"),
        again["run"],
    ]
    assert "waits" in play.post("train/resume", {"run": str(folder / "first")}, 400)["error"]
    found = play.get("train/recipes")
    assert found["recipes"] == shipped()
    assert {name for names in found["families"].values() for name in names} == {*shipped()}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "is no shipped recipe"),
        ({"recipe": "quickstar"}, "did you mean 'quickstart'"),
        ({"recipe": "/etc/passwd"}, "is no shipped recipe"),
        ({"recipe": ["quickstart"]}, "is no shipped recipe"),
        ({"recipe": "quickstart", "set": ["train.stepz=3"]}, "did you mean 'steps'"),
        ({"recipe": "quickstart", "set": ["--out=x"]}, "must have the form"),
        ({"recipe": "quickstart", "set": ["--json"]}, "must have the form"),
        ({"recipe": "quickstart", "set": "train.steps=3"}, "set: at most"),
        ({"recipe": "quickstart", "set": [3]}, "set: at most"),
        ({"recipe": "quickstart", "set": ["x=" + "y" * 2000]}, "set: at most"),
        ({"recipe": "quickstart", "set": ["train.steps=1"] * 200}, "set: at most"),
        ({"recipe": "quickstart", "layout": "dp=0"}, "dp"),
        ({"recipe": "quickstart", "layout": "--resume"}, "layout"),
        ({"recipe": "quickstart", "layout": {"dp": 2}}, "set: at most"),
        ({"recipe": "quickstart", "set": ["data.source=/etc"]}, "outside of the page's folders"),
        ({"recipe": "quickstart", "set": ["data.source=tokens:/etc/x"]}, "outside of the page's folders"),
        ({"recipe": "quickstart", "set": ["data.source=../*.txt"]}, "outside of the page's folders"),
        ({"recipe": "quickstart", "set": ["data.cache=/var/x"]}, "outside of the page's folders"),
        ({"recipe": "quickstart", "set": ["train.init_from=/"]}, "outside of the page's folders"),
        ({"recipe": "quickstart", "set": ["data.tokenizer=/etc/passwd"]}, "outside of the page's folders"),
        ({"recipe": "quickstart", "set": ["data.chat_template=~nobody123/x"]}, "no home folder ~nobody123"),
    ],
)  # fmt: skip
def test_what_does_not_start(asked: tuple[Play, Path], kept: None, given: object, said: str) -> None:
    play, folder = asked
    assert said in play.post("train/start", given, 400)["error"]
    assert [path.name for path in folder.iterdir() if path.name[0] != "."] == ["first"]


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"3", b"\xff", b"[" * (DEEPEST + 1)])
def test_orders_are_objects(asked: tuple[Play, Path], body: bytes) -> None:
    play, _ = asked
    code, _, text = play.ask("/api/train/start", "POST", body, Cookie=play.cookie, Origin=play.origin)
    assert (code, "JSON object" in text.decode()) == (400, True)


def test_texts_within_the_folders_are_taken(
    play: Play, folder: Path, kept: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "texts").mkdir()
    (folder / "texts" / "a.txt").write_text("a text")
    sources = ("texts", "texts/a.txt", "*/*.txt")
    asked = [{"recipe": "quickstart", "set": [f"data.source={folder}/{name}"]} for name in sources]
    for one in asked:
        play.post("train/start", one)
    play.post("train/start", {"recipe": "quickstart", "set": ["data.source=talk"]})
    (tmp_path / "secret.txt").write_text("a secret")
    os.symlink(tmp_path / "secret.txt", folder / "texts" / "b.txt")
    for one in (asked[0], asked[2]):  # each file counts, also behind links
        assert "b.txt lies outside of" in play.post("train/start", one, 400)["error"]
    monkeypatch.setenv("HOME", str(tmp_path))
    for field in ("data.tokenizer=~/secret.txt", f"train.init_from={folder}/texts", f"data.cache={folder}"):
        answer = play.post("train/start", {"recipe": "quickstart", "set": [field]}, 400)
        assert "outside of the page's folders" in answer["error"], field


def test_only_a_run_is_asked_to_stop(play: Play, folder: Path) -> None:
    """The lock's file may name any process."""
    run, program = folder / "first", "import time; time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", program]) as other:
        host = os.uname().nodename
        (run / ".lock").write_text(json.dumps({"host": host, "pid": other.pid, "since": "now"}))
        assert "does not train now" in play.post("train/stop", {"run": str(run)}, 400)["error"]
        assert next(play.events(f"train/watch?{named(run)}"))["ranks"] == []
        assert other.poll() is None
        other.kill()
    trains = (
        "from fivefold.files import owned; from pathlib import Path\n"
        f"with owned(Path({str(run)!r})): print(1, flush=True); {program}"
    )
    with subprocess.Popen([sys.executable, "-c", trains], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        ranks = next(play.events(f"train/watch?{named(run)}"))["ranks"]
        assert [(one["rank"], one["memory"] > 1 << 20) for one in ranks] == [(0, True)]
        play.post("train/stop", {"run": str(run)})
        assert process.wait(20 * PATIENCE) == -signal.SIGTERM


def test_ranks_say_what_they_do(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=4)
    board = Files(tmp_path / "store.ranks", 3, 1.0)
    post = {"rank": 3, "pid": os.getpid(), "step": 7, "phase": "", "wait": None}
    waits = {"operation": "all_reduce", "axis": "batch"}
    try:
        cases = {
            "computes": post,
            "saves a checkpoint": post | {"phase": "saving"},
            "waits in all_reduce over batch": post | {"wait": waits},
            "does a callback": post | {"phase": "a callback"},  # shorter than the one before
        }
        for words, said in cases.items():
            board.post(json.dumps(said))
            with owned(run):
                (rank,) = watch.ranks(run)
            assert (rank["rank"], rank["step"], rank["does"]) == (3, 7, words)
            assert rank["memory"] > 1 << 20
    finally:
        board.close()
    assert watch.ranks(run) == []


def test_a_timeline_is_shown(play: Play, folder: Path) -> None:
    run = folder / "first"
    told = play.events(f"train/watch?{named(run)}")
    assert not next(told)["timeline"]
    assert "no step" in play.get(f"train/timeline?{named(run)}", 400)["error"]
    spans = (Span(COMPUTE, "forward", "blocks.0", 0.0, 0.5), Span("batch", "message", EVIL, 0.2, 0.6, 8))
    for rank in range(6):
        timelines.write(run, StepTimeline(spans, rank, 20))
    timelines.write(run, StepTimeline(spans, 0, 20), planned=True)
    assert next(told)["timeline"]
    text = play.get(f"train/timeline?{named(run)}")["picture"]
    assert (text.count("measured"), text.count("planned")) == (train.RANKS_DRAWN, 1)
    assert EVIL not in text


def test_runs_with_their_figures(play: Play, folder: Path) -> None:
    make_run(folder / "second", steps=20)
    told = play.events("runs/rows")
    first = next(told)
    assert {*first["names"]} == {str(folder / "first"), str(folder / "second")}
    rows = {row["name"]: row for row in (next(told), next(told))}
    row = rows[str(folder / "first")]
    assert (row["kind"], row["layout"], row["arch"], row["figures"]["steps"]) == (
        "complete",
        "dp=1",
        "llama",
        40,
    )
    assert row["shown"].keys() == row["figures"].keys() <= first["figures"].keys()
    with (folder / "second" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 21, "loss": 1.0, "step_s": 1.0}\n')
    changed = next(told)
    assert (changed["name"], changed["figures"]["steps"]) == (str(folder / "second"), 21)
    (folder / "second" / "recipe.toml").unlink()
    assert next(told)["names"] == [str(folder / "first")]
    other = sweep.Row("a", {"optim.lr": "1"})
    sweep.write(folder / "swept", sweep.Sweep("quickstart", [], None, ["optim.lr=1,2"], [other], ""))
    make_run(folder / "swept" / "a", steps=4)
    assert next(told)["sweeps"] == [str(folder / "swept")], "while the page is open"


def test_runs_side_by_side(play: Play, folder: Path) -> None:
    make_run(folder / "second", steps=20)
    names = [str(folder / "first"), str(folder / "second")]
    for axis in ("step", "tokens", "seconds", "FLOPs"):
        found = play.get(f"runs/compare?{urlencode({'runs': json.dumps(names), 'axis': axis})}")
        assert [len(found["curves"][name]["loss"][0]) for name in names] == [40, 20]
        assert len(found["curves"][names[0]]["val_loss"][1]) == 10
    assert found["differences"]["train.steps"] == ["40", "20"]
    for bad in (
        "",
        "3",
        "[]",
        '["nowhere"]',
        "[3]",
        json.dumps(names[:1] * 51),
        json.dumps(names[:1] * 2),
        "[" * (DEEPEST + 1),
    ):
        play.get(f"runs/compare?{urlencode({'runs': bad})}", 400)
    play.get(f"runs/compare?{urlencode({'runs': json.dumps(names), 'axis': 'x'})}", 400)


def test_a_sweep_is_found_by_its_name(play: Play, folder: Path, tmp_path: Path) -> None:
    rows = [
        sweep.Row("lr1", {"optim.lr": "1"}, sweep.FINISHED, figures=SIZES),
        sweep.Row("lr2", {"optim.lr": "2"}),
    ]
    sweep.write(folder / "swept", sweep.Sweep("quickstart", [], None, ["optim.lr=1,2"], rows, ""))
    make_run(folder / "swept" / "lr1", steps=4)
    assert next(play.events("runs/rows"))["sweeps"] == [str(folder / "swept")]
    found = play.get(f"runs/sweep?{urlencode({'sweep': str(folder / 'swept')})}")
    assert found["lead"] == "quickstart: 1 of 2 runs are finished. They vary optim.lr."
    assert found["parts"][-1] == ["list", ["lr2: waiting"]]
    assert found["drawn"] == [str(folder / "swept" / "lr1")]
    for name in ("swept", str(folder), "../swept", ""):
        assert "there is no sweep" in play.get(f"runs/sweep?{urlencode({'sweep': name})}", 400)["error"]
    assert State([folder / "swept" / "lr1"]).sweeps() == {}, "it lies outside"
    (folder / "swept" / "sweep.json").write_text("{}")
    assert "sweep.json" in play.get(f"runs/sweep?{urlencode({'sweep': str(folder / 'swept')})}", 400)["error"]


def test_an_export_is_the_command(
    play: Play, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\nshift 3\n[ "$1" = export ] && touch "$3/config.json"; echo "{}"\n')
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    found = play.post("runs/export", {"run": str(folder / "first")})
    assert found == {
        "folder": f"{folder}/first-hf-1",
        "command": f"fivefold export {folder}/first {folder}/first-hf-1",
    }
    assert (folder / "first-hf-1" / "config.json").exists()
    program.write_text("#!/bin/sh\necho 'error: no checkpoint' >&2; exit 2\n")
    assert play.post("runs/export", {"run": str(folder / "first")}, 400)["error"] == "no checkpoint"
    assert not (folder / "first-hf-2").exists()
    program.write_text("#!/bin/sh\nsleep 60\n")
    assert play.app.state.commands.start("export", []).limit.interval > 1e6, "a large model takes long"
    assert "another export runs now" in play.post("runs/export", {"run": str(folder / "first")}, 400)["error"]
    play.app.state.commands.stop("export")


def test_a_run_from_the_page_is_the_commands_run(tmp_path: Path) -> None:
    """The same files and bytes; it goes on where the page stopped it, and trains without the server."""
    sizes = (
        "train.steps=24 model.layers=1 model.dim=32 model.heads=2 model.seq_len=32 train.global_batch_size=2"
    )
    rest = (
        "data.tokenizer=bytes train.val_every=0 train.val_sequences=4 train.sample_every=0 train.sample_tokens=4 "
        "checkpoint.every=8 observe.tracker=none"
    )
    sets = [*sizes.split(), *rest.split(), f"data.source={tmp_path}/runs/text.txt"]
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "text.txt").write_text("A text to train on, again and again. " * 300)
    with playing(tmp_path / "runs", jobs=True) as play:
        run = Path(play.post("train/start", {"recipe": "quickstart", "set": sets, "layout": "dp=1"})["run"])
        until = time.monotonic() + 120 * PATIENCE
        while not (run / "metrics.jsonl").exists():
            assert time.monotonic() < until, play.app.state.jobs.said(run)
            time.sleep(0.1)
    assert State([tmp_path / "runs"]).jobs.running() in (run, None)  # the server has gone, the run has not
    words = [word for text in sets for word in ("--set", text)]
    command = [
        sys.executable,
        "-m",
        "fivefold",
        "train",
        "quickstart",
        *words,
        "--layout",
        "dp=1",
        "--out",
        tmp_path / "own",
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=120 * PATIENCE)
    while State([tmp_path / "runs"]).jobs.running():
        assert time.monotonic() < until
        time.sleep(0.1)
    files = [
        sorted(str(p.relative_to(x)) for p in x.rglob("*") if p.is_file()) for x in (run, tmp_path / "own")
    ]
    assert files[0] == files[1]
    for name in files[0]:
        if name.endswith((".safetensors", "recipe.toml", "tokenizer.json")):
            assert (run / name).read_bytes() == (tmp_path / "own" / name).read_bytes(), name
    losses = [
        [json.loads(line).get("loss") for line in (x / "metrics.jsonl").open()]
        for x in (run, tmp_path / "own")
    ]
    assert losses[0] == losses[1]
    assert len({loss for loss in losses[0] if loss}) == 24


def test_stopping_where_processes_are_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "run", steps=4)
    with owned(run):
        monkeypatch.setattr(watch, "owner", lambda run: None)
        with pytest.raises(UserError, match="does not train now, or not on this machine"):
            watch.stop(run)
        state = State([tmp_path])
        with pytest.raises(UserError, match="does not train now, or not on this machine"):
            train.resume(state, {"run": str(run)})
        assert state.jobs.waiting() == []  # it would go on whenever the run ends
