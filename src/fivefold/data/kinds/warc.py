"""Web archives (WARC, ISO 28500). A record of plain text is a document, as all pages of Common Crawl's .wet files are.
Its .warc files have the same pages in HTML, which is no text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, BinaryIO

from fivefold.data.kinds.kind import LONGEST_LINE, SPAN, Fields, File, Rows

PAGES = "conversion", "resource", "response"  # types of records; others say how the archive was made
MOST_FIELDS = 100  # of a record's header, which are held in memory


class Warc(Rows):
    name = "warc"
    suffixes = (".wet", ".warc")

    def rows(self, file: File, fields: Fields, done: int) -> Iterator[tuple[int, dict[str, Any] | str]]:
        number = 0
        with file.open() as f:
            while record := _record(f):
                if any(record):
                    yield number, record[1] or {fields.text: record[0]}
                number += 1


def _record(f: BinaryIO) -> tuple[str, str] | None:
    """The text of the next record, and why it has none; of one that is no page neither. None: there is no record.
    Raises OSError: where the next one begins is not known."""
    header = dict[str, str]()
    while (line := f.readline(SPAN)) in (b"\r\n", b"\n"):
        pass
    if not line:
        return None
    if not line.startswith(b"WARC/"):
        raise OSError(f"not WARC: a record begins with {line[:20]!r}")
    while len(header) < MOST_FIELDS and (line := f.readline(SPAN)).strip():
        name, _, value = line.decode("utf-8", "replace").partition(":")
        header[name.strip().lower()] = value.strip()
    length, kind = header.get("content-length", ""), header.get("content-type", "none").lower()
    if line.strip() or not (length.isascii() and length.isdigit() and len(length) < 19):
        raise OSError(f"not WARC: a header without an end or a length (Content-Length: {length[:20]!r})")
    left, fault, content = int(length), "", bytearray()
    wanted = header.get("warc-type") in PAGES
    if wanted and not kind.startswith("text/plain"):
        fault = f"{kind[:40]!r} is no plain text; that of Common Crawl's pages is in its .wet files"
    elif wanted and left > LONGEST_LINE:
        fault = f"a text of more than {LONGEST_LINE >> 20} MiB"
    while left and (chunk := f.read(min(left, SPAN))):
        left -= len(chunk)
        content += chunk if wanted and not fault else b""
    if left:
        raise OSError("the file ends within a record")
    try:
        return content.decode("utf-8"), fault
    except UnicodeDecodeError as error:
        return "", f"not UTF-8: byte 0x{content[error.start]:02x} at {error.start} in the record"
