"""The server of `fivefold play`: the page's files, the parts' answers, and who may ask.

Everybody on this machine can reach a port of it, and so can pages that a browser shows: so a request must name this
machine as its host (else a page elsewhere could have its own name resolve to 127.0.0.1: DNS rebinding), know the token
of the address that was printed, and come from this page.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from ipaddress import ip_address
from pathlib import Path
from typing import Any, cast
from urllib.parse import parse_qs

import uvicorn
from anyio import to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, cookie_parser
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from fivefold.draw.canvas import STYLE, css
from fivefold.errors import UserError
from fivefold.launch.verdict import stopping_signals
from fivefold.observe.format import asset
from fivefold_play.connections import Connection
from fivefold_play.state import MOST_BYTES, State, get

ADDRESS = "127.0.0.1"
NAMES = {ADDRESS, "localhost", "[::1]"}
"""Hosts that a request may name: a tunnel may end at another port, or at ::1."""
PORT = 6007
PARTS = {
    "text": "Text",
    "train": "Train",
    "talk": "Talk",
    "runs": "Runs",
    "machine": "Machine",
    "prove": "Prove",
}
"""In the order of the work, which is the page's. Each is a file `play/PART.py` with `routes(state)`, and
`play/page/PART.js` with `show`. A part may limit what is sent to it by its own `MOST_BYTES`."""
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
UNKNOWN = "Open the address that `fivefold play` has printed: it ends in a token."


def make_app(folders: Sequence[Path], token: str, host: str = ADDRESS) -> Guard:
    """The application. folders: what it shows; no request reaches any other. token: what a browser has to know. host:
    where it listens."""
    state = State(folders)
    here = Path(__file__).parent
    modules = {
        part: import_module(f"fivefold_play.{part}") for part in PARTS if (here / f"{part}.py").is_file()
    }
    limits = {f"/api/{part}/": getattr(module, "MOST_BYTES", MOST_BYTES) for part, module in modules.items()}
    there = {"parts": [{"name": part, "title": PARTS[part]} for part in modules]}
    files = {file.name: file.read_bytes() for file in (here / "page").iterdir() if file.suffix in TYPES}
    # The style of reports and of pictures, then the page's own
    style = (asset("report.css"), asset("player.css"), css(), STYLE, "")
    files["play.css"] = "\n".join(style).encode() + files["play.css"]
    files["player.js"] = f"{asset('player.js')}export {{ player }};\n".encode()

    def file(name: str) -> Response:
        if name not in files:
            raise HTTPException(404)
        return Response(files[name], media_type=TYPES[Path(name).suffix])

    routes = [
        Route("/", lambda request: file("index.html")),
        Route("/page/{name}", lambda request: file(request.path_params["name"])),
        get("/api/parts", lambda given: there),
        *(route for module in modules.values() for route in module.routes(state)),
    ]
    return Guard(Starlette(routes=routes), token, host, limits, state)


class Guard:
    """Answers those who may ask, and refuses the others."""

    def __init__(self, app: Any, token: str, host: str, limits: dict[str, int], state: State) -> None:
        self.app, self.token, self.limits, self.state = app, token, limits, state
        self.cookie = f"fivefold-{hashlib.sha256(token.encode()).hexdigest()[:8]}"  # ports share cookies
        self.anywhere = not is_loopback(host)
        self.names = NAMES | {host, f"[{host}]"}
        self.names |= {socket.gethostname(), socket.getfqdn()} if self.anywhere else set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":
            return
        headers, more = dict(HEADERS), dict[str, str]()
        refused = self._refused(scope, more)

        async def answer(message: Any) -> None:
            if message["type"] == "http.response.start":
                own = [(key.lower().encode(), value.encode()) for key, value in (headers | more).items()]
                kept = [pair for pair in message["headers"] if pair[0] not in dict(own)]
                message = {**message, "headers": kept + own}
            await send(message)

        if refused is not None:
            return await refused(scope, receive, answer)
        left = next(
            (most for path, most in self.limits.items() if scope["path"].startswith(path)), MOST_BYTES
        )

        async def limited() -> Any:
            nonlocal left
            message = await receive()
            left -= len(message.get("body", b""))
            if left < 0:
                raise HTTPException(413, "this is more than the page takes")
            return message

        with suppress(ClientDisconnect):  # nobody is there to be answered
            await self.app(scope, limited, answer)

    def _refused(self, scope: Any, more: dict[str, str]) -> Response | None:
        """What is answered in place of what was asked for; None: it may be answered. more: gets headers of the
        answer."""

        def sent(name: bytes) -> list[str]:
            return [value.decode("latin-1") for key, value in scope["headers"] if key == name]

        hosts, origins = sent(b"host"), sent(b"origin")
        if len(hosts) != 1 or not self._named(re.sub(r":\d+$", "", hosts[0])):
            return PlainTextResponse("This server answers for 127.0.0.1 and localhost only", 403)
        own = origins in ([f"http://{hosts[0]}"], [f"https://{hosts[0]}"])
        if (origins or scope["method"] not in ("GET", "HEAD")) and not own:
            return PlainTextResponse("This comes from another page", 403)
        if scope["path"] != "/" and not {*sent(b"sec-fetch-site")} <= {"same-origin", "none"}:
            return PlainTextResponse("This comes from another page", 403)
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if scope["path"] == "/" and hmac.compare_digest(given.encode(), self.token.encode()):
            more["Set-Cookie"] = f"{self.cookie}={self.token}; HttpOnly; SameSite=Strict; Path=/"
            return None
        known = cookie_parser("; ".join(sent(b"cookie"))).get(self.cookie, "")
        if not hmac.compare_digest(known.encode(), self.token.encode()):
            return PlainTextResponse(UNKNOWN, 401)
        return None

    def _named(self, host: str) -> bool:
        """True if a request may name this host. Numbers resolve to themselves, so they may where others may ask."""
        if host.lower() in {name.lower() for name in self.names}:
            return True
        try:
            return self.anywhere and bool(ip_address(host.strip("[]")))
        except ValueError:
            return False


def is_loopback(host: str) -> bool:
    """True if only this machine reaches a server that listens there."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def listen(host: str, port: int | None) -> socket.socket:
    """A socket that listens. port: 0 takes a free one; None: PORT, or a free one if that is taken. Raises UserError:
    the port is taken, or the host is not this machine."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    line = socket.socket(family, socket.SOCK_STREAM)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    problem = OSError()
    for wanted in (PORT, 0) if port is None else (port,):
        try:
            line.bind((host, wanted))
            line.listen(100)
            return line
        except OSError as error:
            problem = error
    line.close()
    advice = "--port 0 takes a free one" if port else "name an address of this machine"
    raise UserError(
        f"--host {host} --port {port or PORT}: cannot listen: {problem.strerror}; {advice}"
    ) from None


class Server(uvicorn.Server):
    """Serves the application, and says nothing about each request. limits: of a `Connection`."""

    def __init__(self, app: Guard, **limits: Any) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                ws="none",
                http=cast("Any", partial(Connection, **limits)),
                backlog=8,  # so many connections are taken at once, before one of them can be counted
                timeout_graceful_shutdown=3,
            )
        )
        self.app = app

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Ends streams of events and commands, too, which would not end by themselves."""
        self.app.app.state.ending = True
        await to_thread.run_sync(self.app.state.commands.end)
        await super().shutdown(sockets)


def serve(
    folders: Sequence[Path], host: str = ADDRESS, port: int | None = None, tell: Callable[[str], None] = print
) -> None:
    """Serves until Ctrl-C, SIGTERM or a closed terminal. tell: is told the address, once it answers there."""
    token, stop = secrets.token_urlsafe(32), threading.Event()
    line = listen(host, port)
    app = make_app(folders, token, host)
    server = Server(app)
    for number in stopping_signals():  # it would raise them again when it has ended
        signal.signal(number, server.handle_exit)
    jobs = threading.Thread(target=app.state.jobs.follow, args=(stop,), name="jobs", daemon=True)
    jobs.start()
    shown = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(
        host, f"[{host}]" if ":" in host else host
    )
    tell(f"http://{shown}:{line.getsockname()[1]}/?token={token}")
    try:
        server.run(sockets=[line])
    finally:
        stop.set()
        jobs.join(5)
