"""How long this process' connections have had data that the network did not take: a slow link, seen from its sender.

Linux keeps the figures for each TCP connection (TCP_INFO, linux/tcp.h), gloo's and NCCL's alike. Elsewhere, and without
TCP, there are none.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import sys
from contextlib import suppress

_TCP_INFO, _SIZE = 11, 192
_TIMES = struct.Struct("168x3Q")  # microseconds: busy_time, rwnd_limited, sndbuf_limited
_ADDRESS = 16  # bytes of a sockaddr_in


class Sending:
    """Seconds that the busiest connection was held up by the network, since the last look."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None) if sys.platform == "linux" else None
        self._info, self._length = ctypes.create_string_buffer(_SIZE), ctypes.c_uint32()
        self._before: dict[int, int] = {}

    def look(self) -> tuple[float, int]:
        """(seconds, IPv4 address of the other end as a number). A receiver that does not read is not the network."""
        if self._libc is None:
            return 0.0, 0
        before, self._before, most, busiest = self._before, {}, 0, -1
        with suppress(OSError):
            for name in os.listdir("/proc/self/fd"):
                file = int(name)
                self._length.value = _SIZE
                given = self._info, ctypes.byref(self._length)
                if (
                    self._libc.getsockopt(file, socket.IPPROTO_TCP, _TCP_INFO, *given)
                    or self._length.value < _SIZE
                ):
                    continue
                busy, unread, unsent = _TIMES.unpack(self._info.raw)
                self._before[file] = busy - unread - unsent
                if (since := self._before[file] - before.get(file, self._before[file])) > most:
                    most, busiest = since, file
        return 1e-6 * most, self._peer(busiest) if most else 0

    def _peer(self, file: int) -> int:
        assert self._libc is not None
        self._length.value = _ADDRESS
        if self._libc.getpeername(file, self._info, ctypes.byref(self._length)):
            return 0
        family, _, address = struct.unpack("=HHI", self._info.raw[:8])
        return socket.ntohl(address) if family == socket.AF_INET else 0
