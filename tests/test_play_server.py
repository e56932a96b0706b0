"""`fivefold play`: who may ask, and what nobody can ask for."""

import errno
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from observe_run import make_run
from patience import PATIENCE
from playing import TOKEN, Play, playing
from typer.testing import CliRunner

from fivefold.cli.main import app
from fivefold.errors import UserError
from fivefold.files import owned, owner
from fivefold_play import runs
from fivefold_play import server as server_
from fivefold_play.jobs import MOST, Jobs
from fivefold_play.state import State, condition


@pytest.fixture(scope="module")
def play(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Play]:
    folder = tmp_path_factory.mktemp("play") / "runs"
    make_run(folder / "first", steps=20)
    with playing(folder) as play:
        yield play


def test_the_token_opens_the_page(play: Play) -> None:
    code, headers, text = play.ask(f"/?token={TOKEN}")
    assert (code, b"/page/play.js" in text) == (200, True)
    cookie = headers["set-cookie"]
    assert cookie.startswith(f"{play.cookie}; ")
    assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= {*cookie.split("; ")}
    policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
    assert (policy["default-src"], policy["script-src"], policy["style-src"]) == (
        "'none'",
        "'self'",
        "'self'",
    )
    assert policy["frame-ancestors"] == "'none'"
    assert headers["x-content-type-options"] == "nosniff"
    assert "server" not in headers
    for file in (
        "index.html",
        "play.js",
        "api.js",
        "kit.js",
        "play.css",
        "uPlot.iife.min.js",
        "uPlot.min.css",
    ):
        code, headers, text = play.ask(f"/page/{file}", Cookie=play.cookie)
        assert (code, len(text) > 100) == (200, True), file
        assert headers["content-type"].split(";")[0] in server_.TYPES.values()
    assert play.get("parts")["parts"] == [
        {"name": name, "title": title}
        for name, title in server_.PARTS.items()
        if (Path(server_.__file__).parent / f"{name}.py").exists()
    ]


@pytest.mark.parametrize(
    "path", ["/", "/page/play.js", "/api/parts", "/nothing", "/?token=", "/?token=a-token"]
)
def test_nothing_without_the_token(play: Play, path: str) -> None:
    for cookie in (
        "",
        f"{play.app.cookie}=",
        f"{play.app.cookie}={TOKEN[:-1]}",
        f"other={TOKEN}",
        "\x01;=,",
        "é",
    ):
        code, headers, text = play.ask(path, Cookie=cookie)
        assert (code, text.decode()) == (401, server_.UNKNOWN), cookie
        assert "set-cookie" not in headers
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert play.ask(f"/api/parts?token={TOKEN}")[0] == 401  # it is taken from the page's own address only


def test_other_hosts_are_refused(play: Play) -> None:
    for host in ("localhost", f"localhost:{play.port}", "127.0.0.1:9", "[::1]:9", "LOCALHOST"):
        assert play.ask("/api/parts", Cookie=play.cookie, Host=host)[0] == 200, host
    for host in ("evil.example", f"evil.example:{play.port}", "127.0.0.1.evil.example", "127.0.0.1:80@evil.example",
                 "", ":", "10.0.0.1", socket.gethostname()):  # fmt: skip
        code, _, text = play.ask("/api/parts", Cookie=play.cookie, Host=host)
        assert (code, b"parts" in text) == (403, False), host
    with socket.create_connection((server_.ADDRESS, play.port), timeout=10 * PATIENCE) as line:
        line.sendall(
            f"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\nCookie: {play.cookie}\r\n\r\n".encode()
        )
        assert line.makefile("rb").readline().split()[1] in (b"403", b"400")


def test_an_open_host_answers_by_number_and_name(tmp_path: Path) -> None:
    with playing(tmp_path, host="0.0.0.0") as play:
        for host in ("10.0.0.1:6007", socket.gethostname(), "[fe80::1]:7", "localhost"):
            assert play.ask("/api/parts", Cookie=play.cookie, Host=host)[0] == 200, host
        for host in ("evil.example", "10.0.0.1.evil.example", ""):
            assert play.ask("/api/parts", Cookie=play.cookie, Host=host)[0] == 403, host


@pytest.mark.parametrize("host", ["127.0.0.2", "::1"])
def test_all_of_loopback_is_this_machine(tmp_path: Path, host: str) -> None:
    with playing(tmp_path, host=host) as play:
        named = f"[{host}]:7" if ":" in host else f"{host}:7"
        assert play.ask("/api/parts", Cookie=play.cookie, Host=named)[0] == 200
        for other in ("10.0.0.1", socket.gethostname()):
            assert play.ask("/api/parts", Cookie=play.cookie, Host=other)[0] == 403
    assert server_.is_loopback(host)
    assert not any(map(server_.is_loopback, ("0.0.0.0", "::", "10.0.0.1", "node7", "")))


def test_cookies_of_other_servers_do_not_matter(play: Play) -> None:
    for other in ('a={"b": [1]}', "a[b]=c", "é", "x y=z", "=", "a=b=c"):
        assert play.ask("/api/parts", Cookie=f"{other}; {play.cookie}; {other}")[0] == 200, other


def test_other_pages_are_refused(play: Play) -> None:
    for origin in (
        "http://evil.example",
        f"http://127.0.0.1:{play.port + 1}",
        "null",
        f"http://localhost:{play.port}",
    ):
        for method in ("GET", "POST"):
            code, headers, _ = play.ask("/api/parts", method, Cookie=play.cookie, Origin=origin)
            assert code == 403, origin
            assert "access-control-allow-origin" not in headers
    assert (
        play.ask("/api/parts", "POST", b"{}", Cookie=play.cookie)[0] == 403
    )  # browsers say where orders come from
    for site in ("cross-site", "same-site"):
        assert play.ask("/api/parts", Cookie=play.cookie, Sec_Fetch_Site=site)[0] == 403
        assert play.ask("/", Cookie=play.cookie, Sec_Fetch_Site=site)[0] == 200  # a link to the page
    assert (
        play.ask("/api/parts", Cookie=play.cookie, Sec_Fetch_Site="same-origin", Origin=play.origin)[0] == 200
    )


def test_no_file_but_the_pages(play: Play) -> None:
    paths = "/recipe.toml /page/../server.py /page/%2e%2e/server.py /page/..%2fserver.py /page/ /page/uPlot.LICENSE"
    for path in f"{paths} //etc/passwd /page//etc/passwd /page/play.js%00 /api/ /api/none".split():
        code, headers, text = play.ask(path, Cookie=play.cookie)
        assert (code, b"import" in text) == (404, False), path
        assert "frame-ancestors 'none'" in headers["content-security-policy"]


def test_a_run_is_found_by_its_name_only(tmp_path: Path) -> None:
    folder, other = tmp_path / "runs", make_run(tmp_path / "other", steps=4)
    make_run(folder / "first", steps=4)
    make_run(folder / "sweep" / "inner", steps=4)
    make_run(folder / ".hidden", steps=4)
    os.symlink(other, folder / "linked")
    state = State([folder])
    assert {*state.runs()} == {str(folder / "first"), str(folder / "sweep" / "inner")}
    for name in (
        "first",
        str(folder / "linked"),
        str(other),
        f"{folder}/first/../../other",
        None,
        3,
        ["x"],
        "\0",
        "../other",
    ):
        with pytest.raises(UserError, match="there is no run"):
            state.run(name)
    assert {*State([folder / "first"]).runs()} == {str(folder / "first")}
    state.require(folder / "first" / "x", folder / "first")
    for path in (folder / "linked" / "recipe.toml", folder / ".." / "other", folder):
        with pytest.raises(UserError, match="lies outside of the page's folders"):
            state.require(path)
    for path in ("~nobody123/x", "a\0b"):
        with pytest.raises(UserError, match="cannot be a path"):
            state.require(path)


def test_a_link_in_a_run_is_not_followed(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "first", steps=4)
    (run / "metrics.jsonl").unlink()
    (tmp_path / "secret").write_text('{"step": 3, "step_s": 1}\n')
    os.symlink(tmp_path / "secret", run / "metrics.jsonl")
    other = make_run(tmp_path / "runs" / "other", steps=4)
    state = State([tmp_path / "runs"])
    assert condition(state.runs()[str(run)])["step"] == 0
    rows = {row["name"]: row for row in takewhile(bool, runs.rows(state)) if "name" in row}
    assert "leads out of" in rows[str(run)]["problem"], "it does not hide the others"
    assert rows[str(other)]["figures"]["steps"] == 4


def test_no_run_is_taken_for_an_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path / "--help", steps=4)
    make_run(tmp_path / "first", steps=4)
    monkeypatch.chdir(tmp_path)
    assert [*State([Path()]).runs()] == ["first"]


def test_what_a_run_does(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=8)
    assert condition(run) == {"kind": "complete", "step": 8, "steps": 8}
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:2]))
    assert condition(run)["kind"] == "stopped"
    with owned(run):
        assert condition(run)["kind"] == "training"
        assert owner(run) == os.getpid()
    assert owner(run) is None
    # Anybody may have written the file: only who has it open counts
    (run / ".lock").write_text(
        json.dumps({"host": socket.gethostname(), "pid": os.getppid(), "since": "now"})
    )
    assert owner(run) is None
    (run / "metrics.jsonl").unlink()
    (run / ".lock").unlink()
    assert condition(run)["kind"] == "new"


def test_bodies_are_limited(play: Play) -> None:
    headers = {"Cookie": play.cookie, "Origin": play.origin}
    for body in (b"x" * ((1 << 20) + 1), [b"y" * (1 << 19)] * 4):
        line = http.client.HTTPConnection(server_.ADDRESS, play.port, timeout=20 * PATIENCE)
        line.request("POST", "/api/train/start", iter(body) if isinstance(body, list) else body, headers)
        assert line.getresponse().status in (404, 413)
        line.close()


WRITING = {
    "/api/text/upload": None,
    "/api/train/start": {"recipe": "quickstart"},
    "/api/train/resume": {"run": "first"},
    "/api/train/stop": {"run": "first"},
    "/api/train/remove": {"id": "x"},
    "/api/runs/export": {"run": "first"},
    "/api/machine/search": {"recipe": "quickstart", "cluster": "h100:8"},
    "/api/machine/measure": {},
    "/api/machine/stop": {},
    "/api/prove/start": {"recipe": "quickstart", "steps": 1, "mode": "fp32"},
    "/api/prove/stop": {},
    "/api/talk/ask": {"run": "none"},
}
"""What each order is given. Those that stop something write nothing."""


@pytest.mark.parametrize("code", [errno.EROFS, errno.ENOSPC, errno.EACCES])
def test_what_cannot_be_written_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], code: int
) -> None:
    """By every order: a folder that is read-only, and a full disk, are no faults of the page."""
    make_run(tmp_path / "runs" / "first", steps=20)
    monkeypatch.setenv("FIVEFOLD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "runs"))
    real = os.open, os.mkdir

    def refuse(path: object) -> None:
        if str(path).startswith(str(tmp_path)):
            raise OSError(code, os.strerror(code), str(path))

    def opened(path: Any, flags: int, *mode: Any, **more: Any) -> int:
        if flags & (os.O_CREAT | os.O_WRONLY | os.O_RDWR):
            refuse(path)
        return real[0](path, flags, *mode, **more)

    def made(path: Any, *mode: Any, **more: Any) -> None:
        refuse(path)
        real[1](path, *mode, **more)

    with playing(tmp_path / "runs") as play:
        orders = {one.path for one in play.app.app.routes if "POST" in (one.methods or ())}
        assert orders == WRITING.keys()
        monkeypatch.setattr(os, "open", opened)
        monkeypatch.setattr(os, "mkdir", made)
        headers = {"Cookie": play.cookie, "Origin": play.origin}
        for path, given in WRITING.items():
            given = given and given | (
                {"run": str(tmp_path / "runs" / "first")} if given.get("run") == "first" else {}
            )
            body = b"a text" if given is None else json.dumps(given).encode()
            status, _, text = play.ask(path + "?name=a.txt" * (given is None), "POST", body, **headers)
            stops = path.endswith("stop")
            assert status == (200 if stops and not given else 400), (path, text)
            if not path.endswith(("stop", "remove", "ask")):
                assert os.strerror(code) in json.loads(text)["error"], path
        monkeypatch.undo()
    assert "Traceback" not in capfd.readouterr().err


def half_open(play: Play, text: str) -> socket.socket:
    """A connection that has sent so much of a request."""
    line = socket.create_connection((server_.ADDRESS, play.port), timeout=20 * PATIENCE)
    line.sendall(
        text.replace(
            "KNOWN", f"Host: localhost\r\nOrigin: http://localhost\r\nCookie: {play.cookie}"
        ).encode()
    )
    return line


def is_open(line: socket.socket) -> bool:
    """Whether the server has not ended this connection, on which it has said all."""
    line.settimeout(0.05)
    try:
        return line.recv(1) != b""
    except TimeoutError:
        return True
    except ConnectionError:
        return False


HALVES = [
    "",
    "GET /",
    "GET / HTTP/1.1\r\nHost: localhost\r\n",
    "POST /api/runs/export HTTP/1.1\r\nKNOWN\r\nContent-Length: 9\r\n\r\n{",  # its body is awaited
    "POST /api/text/upload?name=a.txt HTTP/1.1\r\nKNOWN\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n",
]


def test_a_request_that_does_not_end_is_ended(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "runs" / "first", steps=20)
    with playing(tmp_path / "runs", request_s=0.4) as play:
        stream = play.events("runs/rows")
        assert next(stream)["names"]
        lines = [half_open(play, text) for text in HALVES]
        slow = half_open(play, "GET / HTTP/1.1\r\n")
        assert all(map(is_open, lines))
        until = time.monotonic() + 20 * PATIENCE
        while any(map(is_open, [*lines, slow])):
            assert time.monotonic() < until
            with suppress(OSError):  # a byte now and then is not enough
                slow.sendall(b"x")
        assert play.get("parts")["parts"]
        make_run(tmp_path / "runs" / "second", steps=20)
        assert any("second" in str(found) for found in stream), "an answer may take long"
    assert "Traceback" not in capfd.readouterr().err


def test_only_so_many_connections_wait(play: Play, tmp_path: Path) -> None:
    with playing(tmp_path, most=3) as play:
        lines = [half_open(play, "GET /") for _ in range(6)]
        until = time.monotonic() + 20 * PATIENCE
        while sum(map(is_open, lines)) > 3:
            assert time.monotonic() < until
        assert play.get("parts")["parts"]
        assert [is_open(line) for line in lines] == [False] * 4 + [True] * 2, "the oldest has given way"
        for line in lines:
            line.close()


def test_jobs_wait_for_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second list of the same folder sees them, and starts none beside the one that runs."""
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    (tmp_path / "python").write_text(
        f'#!/bin/sh\nshift 3; echo "$@"; while [ -e "{tmp_path}/go-$2" ]; do sleep 0.05; done\n'
    )
    (tmp_path / "python").chmod(0o755)
    for name in "ab":
        (tmp_path / f"go-{name}").touch()
    jobs, others = Jobs(tmp_path), Jobs(tmp_path)
    jobs.add(["train", "a"], tmp_path / "a")
    jobs.add(["train", "b"], tmp_path / "b")
    third = others.add(["train", "c"], tmp_path / "c", first=True)
    assert [job["words"][1] for job in jobs.waiting()] == ["c", "b"]
    others.remove(third["id"])
    with pytest.raises(UserError, match="no longer queued"):
        jobs.remove(third["id"])
    others.start_next()
    assert [job["words"][1] for job in others.waiting()] == ["b"]
    (tmp_path / "go-a").unlink()
    stop = threading.Event()
    follower = threading.Thread(target=others.follow, args=(stop,), daemon=True)
    follower.start()
    for _ in range(int(200 * PATIENCE)):
        if others.said(tmp_path / "b") == "train b" and not jobs.waiting():
            break
        stop.wait(0.05)
    assert (jobs.said(tmp_path / "a"), others.said(tmp_path / "b")) == ("train a", "train b")
    assert jobs.waiting() == []
    (tmp_path / "go-b").unlink()
    stop.set()
    follower.join()
    assert others.said(tmp_path / "none") == ""


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"jobs": [1]}',
        '{"jobs": [{"id": 1, "run": "/x", "cwd": "/", "words": []}]}',
        '{"jobs": [{"id": "1", "run": "x", "cwd": "/", "words": []}]}',
        '{"jobs": [{"id": "1", "run": "/x", "words": []}]}',
        "\x00",
        '{"jobs": 3}',
    ],
)
def test_a_list_of_jobs_may_hold_anything(tmp_path: Path, text: str) -> None:
    jobs = Jobs(tmp_path)
    jobs.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    (jobs.folder / "waiting.json").write_text(text)
    assert jobs.waiting() == []


def test_nothing_starts_from_a_list_that_others_may_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a home folder the list is below a folder that everybody may write."""
    monkeypatch.setenv("FIVEFOLD_CACHE", str(tmp_path / "cache"))
    jobs = Jobs(tmp_path)
    jobs.folder.mkdir(parents=True, mode=0o700)
    job = {"id": "a", "run": "/x/a", "cwd": "/", "words": ["train", "a"]}
    (jobs.folder / "waiting.json").write_text(json.dumps({"jobs": [job]}))
    assert jobs.waiting() == [job]
    jobs.folder.chmod(0o777)
    assert jobs.waiting() == []
    with pytest.raises(UserError, match="is not this user's own folder"):
        jobs.add(["train", "b"], tmp_path / "b")
    jobs.folder.chmod(0o770)
    assert jobs.waiting() == []
    jobs.folder.chmod(0o700)
    for above, mode in ((jobs.folder.parent, 0o777), (jobs.folder.parents[1], 0o707)):
        before = above.stat().st_mode
        above.chmod(mode)
        assert jobs.waiting() == []
        above.chmod(0o775)
        assert jobs.waiting() == [job], "a group may share the cache"
        above.chmod(before)
    jobs.folder.rename(elsewhere := tmp_path / "elsewhere")
    jobs.folder.symlink_to(elsewhere)
    assert jobs.waiting() == []


def test_only_a_damaged_entry_is_dropped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And named, once."""
    jobs = Jobs(tmp_path)
    jobs.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    good = [{"id": name, "run": f"/x/{name}", "cwd": "/", "words": ["train", name]} for name in "abc"]
    listed = [good[0], {"id": "d", "words": "broken"}, good[1], 3, good[2]]
    (jobs.folder / "waiting.json").write_text(json.dumps({"jobs": listed}))
    assert jobs.waiting() == good
    jobs.remove("b")
    jobs.remove("c")
    assert jobs.waiting() == good[:1]
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(": ")[2] for line in said] == ['{"id": "d", "words": "broken"}', "3"]


@pytest.mark.parametrize("content", ["", '{"jobs": [{"id"', "[]", '{"jobs": null}', '{"jobs": "a"}', "{}"])
def test_a_list_that_is_damaged_as_a_whole_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    jobs = Jobs(tmp_path)
    jobs.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    (jobs.folder / "waiting.json").write_text(content)
    assert jobs.waiting() == []
    for _ in range(2):  # as the server does again and again
        jobs.start_next()
    (said,) = capsys.readouterr().err.splitlines()
    assert "queued runs were dropped" in said


def test_nothing_in_a_shown_folder_starts_or_is_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("subprocess.Popen", lambda *args, **more: pytest.fail("something was started"))
    folder, mine = tmp_path / "runs" / ".play", tmp_path / "mine"
    folder.mkdir(parents=True)
    mine.write_text("mine")
    job = {
        "id": "x",
        "run": str(tmp_path / "runs" / "a"),
        "cwd": str(tmp_path),
        "words": ["train", "quickstart"],
    }
    (folder / "waiting.json").write_text(json.dumps({"jobs": [job]}))
    for name in (".lock", "running"):
        os.symlink(mine, folder / name)
    jobs = State([tmp_path / "runs"]).jobs
    assert (jobs.waiting(), jobs.running()) == ([], None)
    jobs.start_next()
    with pytest.raises(UserError, match="no longer queued"):
        jobs.remove("x")
    assert mine.read_text() == "mine"
    assert not jobs.folder.is_relative_to(tmp_path)


def test_a_job_that_cannot_be_started_says_why_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of one name in two folders have their own logs, and a job starts in the folder where it was queued."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.executable", str(tmp_path / "none"))
    (tmp_path / "sweep").mkdir()
    (tmp_path / "a").mkdir()
    jobs = Jobs(tmp_path)
    jobs.add(["train", "a"], Path("a"))
    assert jobs.waiting() == []
    assert "cannot be started: " in jobs.said(tmp_path / "a")
    assert (jobs.running(), jobs.started()) == (None, [tmp_path / "a"])
    (tmp_path / "none").write_text("#!/bin/sh\npwd\n")
    (tmp_path / "none").chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setattr(Jobs, "start_next", lambda self: None)
        job = jobs.add(["train", "a"], Path("sweep/a"))
        assert (job["run"], job["cwd"]) == (str(tmp_path / "sweep" / "a"), str(tmp_path))
    monkeypatch.chdir("/")
    jobs.start_next()
    for child in jobs._children:
        child.wait(20 * PATIENCE)
    assert jobs.said(tmp_path / "sweep" / "a") == str(tmp_path)
    assert "cannot be started: " in jobs.said(tmp_path / "a")


def test_the_names_of_queued_runs_are_the_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    state = State([Path("runs")])
    assert state.name(str(tmp_path / "runs" / "a-1")) == "runs/a-1"
    assert state.name("/elsewhere/a") == "/elsewhere/a"


def test_there_is_an_end_to_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = Jobs(tmp_path)
    monkeypatch.setattr(Jobs, "start_next", lambda self: None)
    monkeypatch.setattr("fivefold_play.jobs.MOST", 2)
    jobs.add(["x"], tmp_path / "a")
    jobs.add(["x"], tmp_path / "b")
    with pytest.raises(UserError, match="wait already"):
        jobs.add(["x"], tmp_path / "c")
    assert MOST >= 10


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[object] = []

    def serve(folders: object, host: str, port: object, tell: object) -> None:
        served.append((folders, host, port))
        tell("http://127.0.0.1:1/?token=x")  # type: ignore[operator]

    monkeypatch.setattr(server_, "serve", serve)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["play", "--no-browser"])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "runs").is_dir()
    assert "token=x" in result.output
    assert "WARNING" not in result.output
    result = CliRunner().invoke(app, ["play", "--no-browser", "--host", "0.0.0.0", "--port", "7", "runs"])
    assert "WARNING: --host 0.0.0.0 lets other machines ask" in result.output
    assert served == [([Path("runs")], "127.0.0.1", None), ([Path("runs")], "0.0.0.0", 7)]
    assert "WARNING" not in CliRunner().invoke(app, ["play", "--no-browser", "--host", "::1"]).output
    result = CliRunner().invoke(app, ["play", "nowhere"])
    assert isinstance(result.exception, UserError)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_commands_end_with_the_server_by_any_signal(tmp_path: Path, number: signal.Signals) -> None:
    code = (
        "import signal, subprocess, sys; signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also under nohup\n"
        "from pathlib import Path; from fivefold_play import server\n"
        "made = server.make_app\n"
        "def make_app(*given):\n"
        "    app = made(*given)\n"
        "    popen, subprocess.Popen = subprocess.Popen, lambda line, **more: popen(['sleep', '60'], **more)\n"
        "    print(app.state.commands.start('x', []).process.pid)\n"
        "    subprocess.Popen = popen\n"
        "    return app\n"
        "server.make_app = make_app\n"
        "server.serve([Path('.')], port=0, tell=lambda url: print(url, flush=True))\n"
        "print('left')\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout
        late = threading.Timer(60, server.kill)
        late.start()
        child = int(server.stdout.readline())
        assert server.stdout.readline().startswith("http://")
        os.kill(child, 0)
        server.send_signal(number)
        assert server.stdout.read() == "left\n"
        late.cancel()
    assert server.returncode == 0
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_a_port_that_is_taken_is_an_error(play: Play) -> None:
    with pytest.raises(UserError, match=rf"--port {play.port}: cannot listen: .* 0 takes a free one"):
        server_.listen(server_.ADDRESS, play.port)
    with pytest.raises(UserError, match=r"--host 192.0.2.1 .*; name an address of this machine"):
        server_.listen("192.0.2.1", 0)


@pytest.mark.parametrize("name", ["a", "b-1-2", "x" * 50, "y" * 51, "z-" * 60, "w" * 255, "é" * 127])
def test_a_run_is_started_here_whatever_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("sys.executable", str(tmp_path / "none"))
    for folder in (tmp_path / "runs" / name, tmp_path / "runs" / "other"):
        folder.mkdir(parents=True)
    jobs = Jobs(tmp_path / "runs")
    jobs.add(["train", "a"], tmp_path / "runs" / name)
    assert jobs.started() == [tmp_path / "runs" / name]
    assert "cannot be started: " in jobs.said(tmp_path / "runs" / name)
