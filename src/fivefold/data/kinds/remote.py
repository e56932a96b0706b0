"""Files at an address: https://, http://, s3:// and memory://, through fsspec (the extra `remote`).

Only these protocols are opened, each alone. fsspec knows others that run code or chain one to the next. Credentials
come from the environment (AWS_..., ~/.netrc). An address that holds a secret is refused, because a run folder keeps the
recipe. What breaks off is tried again, from where it broke off.
"""

from __future__ import annotations

import importlib
import io
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

from fivefold.errors import UserError, shortened

PROTOCOLS = {"https": "", "http": "", "s3": "s3fs", "memory": ""}
"""Those that are opened, and the package that fsspec needs for it beside its own extras."""
MOST_FILES, MOST_FOLDERS, MOST_DEEP = 1 << 20, 1 << 14, 64
DELAYS = (1.0, 2.0, 4.0, 8.0)
"""Seconds before the second, third ... attempt. A test puts its own here."""
CHUNK = 1 << 20
ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://", re.ASCII)
_USER = re.compile(r"(?<=://)[^/@\s]+@")
_QUERY = re.compile(r"(?<=://)([^\s?#'\"]+)[?#][^\s'\"]*")
_VERSIONS = ("ETag", "etag", "Content-MD5", "Last-Modified", "LastModified", "created")
T = TypeVar("T")


class Entry(NamedTuple):
    """A file at an address. name: below the address that was asked for. version: changes with the content."""

    name: str
    url: str
    size: int
    version: str


def entries(spec: str) -> list[Entry]:
    """The files at an address: one, those of a folder (ending in / where the server has no folders), or of a glob.
    Raises UserError: there are none, or they cannot be listed."""
    system = _system(spec)
    system.invalidate_cache()  # a process may ask again after a change

    def listed() -> dict[str, dict[str, Any]]:
        if any(sign in spec for sign in "*["):
            return system.glob(spec, detail=True)
        if not spec.endswith("/") and (info := system.info(spec))["type"] == "file":
            return {info["name"]: info}
        return _linked(system, spec) if spec.startswith("http") else system.find(spec, detail=True)

    listing = {
        name: info
        for name, info in attempted(spec, listed).items()
        if info.get("type") == "file"
        and not (spec.startswith("http") and "?" in name)  # a page in other orders
    }
    if not listing:
        raise UserError(f"data.source: no file at {shown(spec)}")
    if len(listing) > MOST_FILES:
        raise UserError(f"data.source: {shown(spec)} has more than {MOST_FILES:,} files")
    with ThreadPoolExecutor(16) as pool:  # a page of links says no sizes
        infos = pool.map(
            lambda n: listing[n] if listing[n].get("size") else attempted(n, lambda: system.info(n)), listing
        )
        urls = [system.unstrip_protocol(name) for name in listing]
    # names are what is behind all that is fixed of the address
    fixed = re.split(r"[*\[]", spec, maxsplit=1)[0]
    folder = system.unstrip_protocol(system._strip_protocol(fixed))  # as it writes its own
    if (fixed != spec and not fixed.endswith("/")) or folder in urls:
        folder = folder.rpartition("/")[0]
    files = []
    for url, info in zip(urls, infos, strict=True):
        size = 1 if info.get("size") is None else int(info["size"])  # 1: not known, but not empty
        version = next((str(info[key]) for key in _VERSIONS if info.get(key)), "")
        files.append(Entry(url.removeprefix(folder.rstrip("/") + "/"), url, size, version))
    return files


def _linked(system: Any, spec: str) -> dict[str, dict[str, Any]]:
    """The files that pages link to, page by page: a server may have pages without end."""
    linked: dict[str, dict[str, Any]] = {}
    for number, (_, _, files) in enumerate(system.walk(spec, maxdepth=MOST_DEEP, detail=True)):
        linked |= {info["name"]: info for info in files.values()}
        if number >= MOST_FOLDERS or len(linked) > MOST_FILES:
            what = f"{MOST_FOLDERS:,} folders" if number >= MOST_FOLDERS else f"{MOST_FILES:,} files"
            raise UserError(
                f"data.source: {shown(spec)} has more than {what}. Name a folder in it, or a file"
            )
    return linked


class Remote(io.RawIOBase):
    """A file at an address, to read from the start, or from anywhere if its server lets it. It opens the address again
    where reading broke off."""

    def __init__(self, url: str):
        self._system = _system(url)
        self.url, self.at = url, 0
        self._file: Any = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        size = attempted(self.url, lambda: self._opened().size) if whence == io.SEEK_END else 0
        self.at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: size}[whence]
        return self.at

    def readinto(self, buffer: Any) -> int:
        content = attempted(self.url, lambda: self._read(len(buffer)), f" at byte {self.at:,}")
        buffer[: len(content)] = content
        self.at += len(content)
        return len(content)

    def _opened(self) -> Any:
        if self._file is None:
            self._file = self._system.open(self.url, "rb", block_size=4 * CHUNK)
        return self._file

    def _read(self, size: int) -> bytes:
        try:
            file = self._opened()
            if (here := file.tell() if getattr(file, "size", None) is not None else file.loc) != self.at:
                if getattr(file, "size", None) is not None:
                    file.seek(self.at)
                else:  # a server without ranges: from the start again
                    if here > self.at:
                        self._close()
                        file = self._opened()
                    while (left := self.at - file.loc) > 0 and file.read(min(left, CHUNK)):
                        pass
            return file.read(size)
        except BaseException:
            self._close()
            raise

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def close(self) -> None:
        self._close()
        super().close()


def attempted(where: str, act: Callable[[], T], place: str = "") -> T:
    """act(), again after a pause if it fails. What the libraries raise has no common class. Raises UserError: there is
    no such file, it may not be read, or the last attempt failed."""
    for delay in (*DELAYS, None):
        try:
            return act()
        except UserError:
            raise
        except (FileNotFoundError, PermissionError) as error:
            what = "no such file" if isinstance(error, FileNotFoundError) else "not allowed"
            raise UserError(f"data.source: {shown(where)}: {what}") from None
        except ImportError as error:
            raise UserError(_missing(where, error)) from None
        except Exception as error:
            if delay is None:
                raise UserError(
                    f"data.source: {shown(where)}: reading failed{place}, {len(DELAYS) + 1} times in a row: "
                    f"{type(error).__name__}: {shortened(shown(str(error)), 200)}. Run again when the network is back: "
                    "it goes on from where it was"
                ) from None
            time.sleep(delay)
    raise AssertionError


def shown(text: str) -> str:
    """A text without what may be secret in addresses: users, passwords, queries."""
    return _QUERY.sub(r"\1", _USER.sub("", text))


def _system(spec: str) -> Any:
    """fsspec's file system for an address. Raises UserError: it is not allowed, or a library is missing."""
    protocol = spec.partition("://")[0].lower()
    if protocol not in PROTOCOLS or "::" in spec:
        known = " ".join(f"{p}://" for p in PROTOCOLS)
        raise UserError(f"data.source: {shown(spec)}: no such protocol; known: {known}")
    if _USER.search(spec) or "?" in spec or "#" in spec:
        raise UserError(
            f"data.source: the address {shown(spec)} has a user, a password or a query, which the run folder would "
            "keep. Leave it out; credentials come from the environment (AWS_..., ~/.netrc)"
        )
    try:
        fsspec = importlib.import_module("fsspec")
        options = {"client_kwargs": {"trust_env": True}} if protocol in ("http", "https") else {}
        return fsspec.filesystem(protocol, **options)
    except ImportError as error:
        raise UserError(_missing(spec, error)) from None


def _missing(spec: str, error: ImportError) -> str:
    return (
        f"data.source: {shown(spec)} needs the extra `remote`: pip install 'fivefold[remote]' "
        f"({shortened(str(error), 100)})"
    )
