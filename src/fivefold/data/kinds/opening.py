"""Opens files: compressed ones, those at an address, and any others."""

from __future__ import annotations

import gzip
import io
import zlib
from collections import deque
from pathlib import Path
from typing import Any, BinaryIO

from fivefold.data.kinds.remote import open_remote
from fivefold.errors import UserError
from fivefold.files import open_file

PACKED = (".gz", ".zst")
"""Compressions that are known."""
ZSTD_WINDOW = 1 << 27  # bytes that decompressing may need; those of `zstd --long=27`
ZSTD_READ = 1 << 12  # compressed bytes taken at once; they become 128 MiB at most


def opened(path: Path, packed: str = "", url: str = "") -> BinaryIO:
    """The content of a file, uncompressed. packed: one of PACKED, or "". url: where it lies, if elsewhere.

    Raises:
        UserError: an extra is missing, or the network failed.
        OSError: it cannot be opened. Reading raises it, too, where the compression is broken.
    """
    raw: Any = open_remote(url) if url else open_file(path)
    if not packed:
        return raw
    try:
        unpacked = gzip.GzipFile(fileobj=raw) if packed == ".gz" else _zstd(raw, url or str(path))
    except BaseException:
        raw.close()
        raise
    return io.BufferedReader(_Unpacked(raw, unpacked), 1 << 18)


def _zstd(raw: BinaryIO, where: str) -> Any:
    try:
        import zstandard
    except ImportError:
        raise UserError(
            f"data.source: {where} needs the extra `zstd`: pip install 'fivefold[zstd]'"
        ) from None
    return _Frames(raw, zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW))


class _Frames:
    """The content of a .zst. The library's own reader takes a file that was cut off for a shorter one."""

    def __init__(self, raw: BinaryIO, library: Any):
        self._raw, self._library = raw, library
        self._frame: Any = None  # the one that has begun
        self._ready: deque[memoryview] = deque()

    def read(self, size: int) -> bytes | memoryview:
        while not self._ready:
            packed = self._raw.read(ZSTD_READ)
            if not packed:
                if self._frame is not None:
                    raise EOFError("the file ends within a frame")
                return b""
            while packed:
                frame = self._frame = self._frame or self._library.decompressobj()
                if content := frame.decompress(packed):
                    self._ready.append(memoryview(content))
                packed = frame.unused_data if frame.eof else b""
                self._frame = None if frame.eof else frame
        content = self._ready.popleft()
        if len(content) > size:
            self._ready.appendleft(content[size:])
        return content[:size]


class _Unpacked(io.RawIOBase):
    """What is broken in a compressed file is an OSError."""

    def __init__(self, raw: BinaryIO, unpacked: Any):
        self._raw, self._unpacked = raw, unpacked

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            content = self._unpacked.read(len(buffer))
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise OSError(f"cannot be decompressed: {error}") from None
        except Exception as error:
            if type(error).__module__.startswith("zstandard"):
                raise OSError(f"cannot be decompressed: {error}") from None
            raise
        buffer[: len(content)] = content
        return len(content)

    def close(self) -> None:
        self._raw.close()
        super().close()
