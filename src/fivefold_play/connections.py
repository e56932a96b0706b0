"""Connections to the page's server. One whose request does not become whole ends, and only so many may wait.

Everybody on this machine can open connections, without the token. uvicorn waits for ever for the rest of a request, so
they could take all handles of the process.
"""

from __future__ import annotations

import asyncio
import resource
from typing import Any, cast

from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_S, SLOWEST = 20.0, 16 << 10
"""Seconds until a request is whole, and bytes per second that make it more."""
MOST = 100
"""Connections that wait for a request, at most: the oldest of more ends. Never more than a quarter of the handles."""


class Connection(H11Protocol):
    """request_s, most: as `REQUEST_S` and `MOST`."""

    def __init__(self, *given: Any, request_s: float = REQUEST_S, most: int = MOST, **more: Any) -> None:
        super().__init__(*given, **more)
        self.request_s, self.most = request_s, min(most, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        self.began, self.received = self.loop.time(), 0

    @property
    def waits(self) -> bool:
        """True while a request, or the rest of one, is awaited; False while one is answered."""
        if self.transport.is_closing():
            return False
        return not self.cycle or self.cycle.response_complete or self.cycle.more_body

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore
        super().connection_made(transport)
        waiting = [one for one in cast("set[Connection]", self.connections) if one.waits]
        if len(waiting) > self.most:
            min(waiting, key=lambda one: one.began).transport.abort()
        self.look()

    def data_received(self, data: bytes) -> None:
        self.received += len(data)
        super().data_received(data)

    def on_response_complete(self) -> None:
        self.began, self.received = self.loop.time(), 0
        super().on_response_complete()

    def look(self) -> None:
        """Looks again and again whether the request is late."""
        if self.waits and self.loop.time() > self.began + self.request_s + self.received / SLOWEST:
            self.transport.abort()
        if not self.transport.is_closing():
            self.loop.call_later(self.request_s / 4, self.look)
