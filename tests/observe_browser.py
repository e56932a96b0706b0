"""A headless Chromium, driven over its debugging pipe: enough to look at a page. No library needed."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from patience import PATIENCE

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--mute-audio",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


MISSING = (
    "no Chromium or Chrome in PATH; on Debian: apt install chromium (Ubuntu's is a snap; take Google's .deb)"
)
"""Why the tests of pages are skipped."""


def find() -> str | None:
    """The Chromium or Chrome on this machine, if there is one."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return next((path for path in map(shutil.which, names) if path), None)


class Browser:
    """One tab of a Chromium of its own, with a fresh profile. Use it in a `with` statement."""

    def __init__(self, program: str, timeout: float = 20.0 * PATIENCE) -> None:
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        read_here, write_there = os.pipe()
        read_there, write_here = os.pipe()
        # Chromium reads commands from descriptor 3 and writes answers to 4: JSON, each ended by a zero byte.
        plumbing = f"import os; os.dup2({read_there}, 100); os.dup2({write_there}, 4); os.dup2(100, 3)"
        start = f"{plumbing}; import sys; os.execv(sys.argv[1], sys.argv[1:])"
        command = [sys.executable, "-c", start, program, *FLAGS, f"--user-data-dir={self._profile.name}"]
        self._process = subprocess.Popen(
            command, pass_fds=(read_there, write_there), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(read_there)
        os.close(write_there)
        self._in, self._out, self._timeout = read_here, write_here, timeout
        self._buffer, self._last, self._session = b"", 0, None
        self.requests: list[str] = []
        self.errors: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and wait for its answer; events that arrive meanwhile are noted."""
        self._last += 1
        message = {"id": self._last, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        answer = self._until(lambda m: m.get("id") == self._last)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def open(self, page: Path | str, width: int = 1400, height: int = 900, dark: bool = False) -> None:
        """Show `page`, a file or an address, in a window of this size and wait until it is loaded."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 500,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        url = page if isinstance(page, str) else page.resolve().as_uri()
        for place in (*["about:blank"] * ("#" in url), url):  # another part of the same page is no navigation
            self.requests.clear()
            self.errors.clear()
            self.call("Page.navigate", url=place)
            self._until(lambda m: m.get("method") == "Page.loadEventFired")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(f"{expression}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def screenshot(self, path: Path, whole: bool = True) -> None:
        """Write what the page shows as PNG; `whole`: down to its end."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _until(self, wanted: Any) -> dict[str, Any]:
        """Read messages up to the wanted one; requests and errors of the page are kept."""
        end = time.monotonic() + self._timeout
        while True:
            while b"\0" not in self._buffer:
                ready, _, _ = select.select([self._in], [], [], max(0.0, end - time.monotonic()))
                chunk = os.read(self._in, 1 << 20) if ready else b""
                if not chunk:
                    raise TimeoutError(
                        "the browser does not answer" if not ready else "the browser has ended"
                    )
                self._buffer += chunk
            raw, self._buffer = self._buffer.split(b"\0", 1)
            message = json.loads(raw)
            if message.get("method") == "Network.requestWillBeSent":
                self.requests.append(message["params"]["request"]["url"])
            elif message.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.errors.append(json.dumps(message["params"]))
            if wanted(message):
                return message

    def close(self) -> None:
        os.close(self._out)  # Chromium ends with its pipe
        try:
            self._process.wait(5 * PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)
        self._profile.cleanup()

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
