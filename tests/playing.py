"""A server of `fivefold play` in this process, and plain requests to it."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from observe_browser import Browser
from patience import PATIENCE

from fivefold_play.server import ADDRESS, Guard, Server, listen, make_app

TOKEN = "a-token-of-the-tests"
IDLE = "document.querySelector('.panel') && !document.querySelector('.panel[aria-busy]')"
"""True in the page when the part Machine awaits no answer."""


class Play:
    """The page's server. answers are (status, headers, body)."""

    def __init__(self, app: Guard, port: int) -> None:
        self.app, self.port = app, port
        self.origin = f"http://{ADDRESS}:{port}"
        self.url = f"{self.origin}/?token={TOKEN}"
        self.cookie = f"{app.cookie}={TOKEN}"

    def ask(
        self, path: str, method: str = "GET", body: bytes | None = None, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        """A request with no more than these headers."""
        line = http.client.HTTPConnection(ADDRESS, self.port, timeout=20 * PATIENCE)
        line.request(method, path, body, {name.replace("_", "-"): text for name, text in headers.items()})
        answer = line.getresponse()
        found = answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
        line.close()
        return found

    def get(self, path: str, code: int = 200) -> Any:
        status, _, text = self.ask(f"/api/{path}", Cookie=self.cookie)
        assert status == code, text
        return json.loads(text)

    def post(self, path: str, given: Any, code: int = 200) -> Any:
        body = json.dumps(given).encode()
        status, _, text = self.ask(f"/api/{path}", "POST", body, Cookie=self.cookie, Origin=self.origin)
        assert status == code, text
        return json.loads(text)

    def events(self, path: str) -> Iterator[Any]:
        """The values of a stream of events, until it ends or the caller leaves."""
        line = http.client.HTTPConnection(ADDRESS, self.port, timeout=20 * PATIENCE)
        try:
            line.request("GET", f"/api/{path}", headers={"Cookie": self.cookie})
            answer = line.getresponse()
            assert answer.status == 200, answer.read()
            while text := answer.readline():
                if text.startswith(b"data: ") and text != b"data: {}\n":
                    yield json.loads(text[6:])
        finally:
            line.close()


@contextmanager
def playing(*folders: Path, host: str = ADDRESS, jobs: bool = False, **limits: float) -> Iterator[Play]:
    """Serves these folders. jobs: starts those that wait. limits: of connections."""
    line, stop = listen(ADDRESS, 0), threading.Event()
    app = make_app(folders, TOKEN, host)
    server = Server(app, **limits)
    threads = [threading.Thread(target=server.run, args=([line],), daemon=True)]
    threads += [threading.Thread(target=app.state.jobs.follow, args=(stop,), daemon=True)] * jobs
    for thread in threads:
        thread.start()
    until = time.monotonic() + 20 * PATIENCE
    while not server.started:
        assert time.monotonic() < until
        time.sleep(0.01)
    try:
        yield Play(app, line.getsockname()[1])
    finally:
        stop.set()
        server.should_exit = True
        for thread in threads:
            thread.join(10 * PATIENCE)


def until(browser: Browser, condition: str, seconds: float = 60) -> None:
    """Waits until a condition holds in the page."""
    end = time.monotonic() + seconds * PATIENCE
    while not browser.evaluate(f"Boolean({condition})"):
        assert time.monotonic() < end, (condition, browser.evaluate("document.body.innerText")[:2000])
        time.sleep(0.05)


def press(browser: Browser, words: str) -> None:
    """Presses the button with these words, once it is there."""
    shown = f"one.textContent === {words!r} && one.checkVisibility() && !one.disabled"
    found = f"[...document.querySelectorAll('button')].find((one) => {shown})"
    until(browser, found)
    browser.evaluate(f"{found}.click()")


def give(browser: Browser, label: str, value: object) -> None:
    """Fills the visible field with this label, or chooses an option of it that contains the value."""
    field = f"""[...document.querySelectorAll('.field')].find((e) => e.checkVisibility()
      && e.querySelector('span').textContent === {json.dumps(label)})?.querySelector('input, select, textarea')"""
    until(browser, field)
    browser.evaluate(f"""(() => {{
      const value = {json.dumps(str(value))}, input = {field};
      input.value = input.options ? [...input.options].find((o) => o.textContent.includes(value)).value : value;
      for (const kind of ['input', 'change']) input.dispatchEvent(new Event(kind));
    }})()""")


def slide(browser: Browser, label: str, value: str, panel: int = 0) -> None:
    """Moves the slider of this label in a panel of Machine, -1: of the model, to a value in words."""
    where = (
        "document.querySelector('.model')" if panel < 0 else f"document.querySelectorAll('.panel')[{panel}]"
    )
    browser.evaluate(f"""(() => {{
      const label = {json.dumps(label)}, value = {json.dumps(value)};
      const row = [...{where}.querySelectorAll('.slider')].find((row) => row.firstChild.textContent === label);
      const input = row.querySelector('input, select'), moved = () => input.dispatchEvent(new Event('input'));
      if (input.tagName === 'SELECT') input.value = value;
      else for (input.value = 0, moved(); row.querySelector('output').textContent !== value; moved()) input.stepUp();
      moved();
    }})()""")
    until(browser, IDLE)


def drop(browser: Browser, files: Sequence[tuple[str, str]]) -> None:
    """Drops files, (name, text), on the part Text."""
    browser.evaluate(f"""(() => {{
      const moved = new DataTransfer();
      for (const [name, text] of {json.dumps(files)}) moved.items.add(new File([text], name));
      document.querySelector('.drop').dispatchEvent(new DragEvent('drop', {{ dataTransfer: moved, bubbles: true }}));
    }})()""")
