"""`fivefold report RUN --live`: serves a run's page on this machine while it trains. The page loads itself again.

Only this machine can ask: the server listens on 127.0.0.1, and answers no request that names another host. (A page
elsewhere could have its own name resolve to 127.0.0.1, and read what is answered: DNS rebinding.) It serves one page
and no files.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable
from html import escape
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from fivefold.errors import UserError, printable
from fivefold.files import in_use
from fivefold.observe.format import asset, document
from fivefold.observe.metrics import FILE, last_line
from fivefold.observe.report import page, run_recipe

ADDRESS = "127.0.0.1"
NAMES = (ADDRESS, "localhost", "[::1]")
"""Hosts that a request may name: a tunnel may end at another port, or at ::1."""
PORT = 6007
REFRESH_S = 5
WATCH_S = 1.0
HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
}


class Server(ThreadingHTTPServer):
    """Serves the page of a run as it is now, and says what the run is doing. port: 0 takes a free one. Raises
    UserError: the port is taken."""

    daemon_threads = True

    def __init__(self, run: Path, port: int = PORT):
        self.run, recipe = run, run_recipe(run)
        self.steps = recipe.train.steps if recipe else None
        self._lock = threading.Lock()
        self._made: tuple[object, bytes] | None = None
        try:
            super().__init__((ADDRESS, port), _Handler)
        except OSError as error:
            raise UserError(
                f"--port {port}: cannot listen on {ADDRESS}: {error.strerror}. Use another port; 0 takes a free one"
            ) from None

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.server_address[1]}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that leaves before it has the page is no error."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)

    def state(self) -> tuple[bool, str]:
        """(True if steps may follow, the state in words)."""
        line, going = last_line(self.run), in_use(self.run)
        step = line["step"] if line else 0
        where = f"step {step:,}" + (f" of {self.steps:,}" if self.steps else "")
        if going:
            return True, f"training, {where}"
        if not step:
            return True, "not started yet"
        complete = self.steps is not None and step >= self.steps
        return not complete, f"complete, {where}" if complete else f"stopped after {where}"

    def content(self) -> tuple[bool, bytes]:
        """(True if steps may follow, the page). It is made again when the metrics or the state have changed."""
        with self._lock:
            more, words = self.state()
            try:
                file = (self.run / FILE).stat()
                key: object = (words, file.st_mtime_ns, file.st_size)
            except OSError:
                key = words
            if self._made is None or self._made[0] != key:
                try:
                    text = page(self.run, words)
                except (UserError, OSError) as error:  # no metrics yet
                    name = printable(self.run.resolve().name)
                    body = escape(printable(f"{name}: {words}. {error}"))
                    text = document(name, f"<main><p>{body}</p></main>", asset("report.css"), "")
                self._made = key, text.encode("utf-8", "replace")
            return more, self._made[1]


class _Handler(BaseHTTPRequestHandler):
    server_version, sys_version = "Fivefold", ""
    timeout = 10  # a connection that asks nothing

    def do_GET(self) -> None:
        assert isinstance(self.server, Server)
        hosts = self.headers.get_all("Host", [])
        host = re.sub(r":\d+$", "", hosts[0]) if len(hosts) == 1 else ""
        if host.lower() not in NAMES:
            self.send_error(HTTPStatus.FORBIDDEN, "This server answers for 127.0.0.1 and localhost only")
            return
        if self.path.partition("?")[0] != "/":
            self.send_error(HTTPStatus.NOT_FOUND, "There is one page, /")
            return
        more, content = self.server.content()
        again = {"Refresh": str(REFRESH_S)} if more else {}
        headers = HEADERS | {"Content-Length": str(len(content))} | again
        self.send_response(HTTPStatus.OK)
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


def serve(run: Path, port: int = PORT, tell: Callable[[str], None] = print) -> None:
    """Serves until Ctrl-C. tell: is told the address, and when the run begins or ends."""
    with Server(run, port) as server:
        threading.Thread(target=server.serve_forever, name="live report", daemon=True).start()
        tell(f"{server.url} shows {run} while it trains. Ctrl-C ends this")
        last, waiting = "", threading.Event()
        try:
            while True:
                _, words = server.state()
                state = words.partition(",")[0]
                if state != last:
                    tell(f"{run}: {words}")
                    last = state
                waiting.wait(WATCH_S)
        except KeyboardInterrupt:
            server.shutdown()
