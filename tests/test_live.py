"""`fivefold report RUN --live`: the page of a run that trains, for this machine only."""

import http.client
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from observe_run import make_run
from typer.testing import CliRunner

from fivefold.cli.main import app
from fivefold.errors import UserError
from fivefold.files import owned
from fivefold.observe import live


@pytest.fixture
def server(tmp_path: Path) -> Iterator[live.Server]:
    with live.Server(make_run(tmp_path / "run", steps=40), 0) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


def ask(
    server: live.Server, path: str = "/", method: str = "GET", **headers: str
) -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection(live.ADDRESS, server.server_address[1], timeout=10)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    return answer.status, dict(answer.getheaders()), answer.read().decode()


def test_the_page_of_a_run_that_trains_loads_itself_again(server: live.Server) -> None:
    run = server.run
    whole = (run / "metrics.jsonl").read_text()
    metrics = [line for line in whole.splitlines(keepends=True) if "step_s" in line]
    (run / "metrics.jsonl").write_text("".join(metrics[:10]))
    with owned(run):
        code, headers, text = ask(server)
        assert (code, headers["Refresh"]) == (200, str(live.REFRESH_S))
        assert "Training report: training, step 10 of 40" in text
        (run / "metrics.jsonl").write_text("".join(metrics[:20]))
        assert "training, step 20 of 40" in ask(server)[2]
    code, headers, text = ask(server)
    assert "stopped after step 20 of 40" in text
    assert "Refresh" in headers, "it may be resumed"
    (run / "metrics.jsonl").write_text(whole)
    code, headers, text = ask(server)
    assert "complete, step 40 of 40" in text
    assert "Refresh" not in headers
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]


def test_a_run_without_a_step_has_a_page(server: live.Server) -> None:
    (server.run / "metrics.jsonl").unlink()
    code, headers, text = ask(server)
    assert (code, "Refresh" in headers) == (200, True)
    assert "not started yet" in text


def test_other_hosts_and_paths_are_refused(server: live.Server) -> None:
    port = server.server_address[1]
    assert server.server_address[0] == "127.0.0.1"
    for host in ("localhost", f"localhost:{port}", "127.0.0.1:9", "[::1]:9", "LOCALHOST"):
        assert ask(server, Host=host)[0] == 200, host
    for host in (
        "evil.example",
        f"evil.example:{port}",
        "127.0.0.1.evil.example",
        "127.0.0.1:80@evil.example",
        "",
        ":",
    ):
        code, _, text = ask(server, Host=host)
        assert (code, "Curves" in text) == (403, False), host
    with socket.create_connection((live.ADDRESS, port), timeout=10) as line:
        line.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\nConnection: close\r\n\r\n")
        assert line.makefile("rb").readline().split()[1] == b"403"
    for path in ("/recipe.toml", "/../recipe.toml", "/%2e%2e/metrics.jsonl"):
        assert ask(server, path)[0] == 404, path
    assert ask(server, method="POST")[0] == 501
    code, headers, text = ask(server, method="HEAD")
    assert (code, text) == (200, "")
    assert int(headers["Content-Length"]) > 1000


def test_a_browser_that_leaves_is_no_error(server: live.Server, capfd: pytest.CaptureFixture[str]) -> None:
    for error in (ConnectionResetError, BrokenPipeError, TimeoutError, ZeroDivisionError):
        try:
            raise error
        except error:
            server.handle_error(None, ("127.0.0.1", 1))
        assert ("Traceback" in capfd.readouterr().err) == (error is ZeroDivisionError), error


def test_a_port_that_is_taken_is_an_error(server: live.Server) -> None:
    port = server.server_address[1]
    with pytest.raises(UserError, match=rf"--port {port}: cannot listen on 127.0.0.1: .* 0 takes a free one"):
        live.Server(server.run, port)


def test_it_says_when_the_run_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends the server, not the run."""
    run, said = make_run(tmp_path / "run", steps=40), list[str]()
    lines = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(lines[: len(lines) // 2] + "\n")
    training = owned(run)
    training.__enter__()

    def tell(text: str) -> None:
        said.append(text)
        if len(said) == 2:
            (run / "metrics.jsonl").write_text(lines)
            training.__exit__(None, None, None)
        if len(said) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(live, "WATCH_S", 0.01)
    live.serve(run, 0, tell)
    assert f"shows {run} while it trains. Ctrl-C ends this" in said[0]
    assert [text.removeprefix(f"{run}: ") for text in said[1:]][1] == "complete, step 40 of 40"
    assert said[1].startswith(f"{run}: training, step ")


def test_the_command_refuses_what_it_cannot_serve(tmp_path: Path) -> None:
    run = str(make_run(tmp_path / "run", steps=4))
    for words in ([run, run, "--live"], [run, "--live", "--json"], [run, "--port", "7"]):
        result = CliRunner().invoke(app, ["report", *words])
        assert isinstance(result.exception, UserError), words
