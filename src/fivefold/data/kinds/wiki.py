"""Dumps of MediaWiki, such as Wikipedia's pages-articles.xml.bz2: an article is a document, in its markup. Redirects
are none. Of several revisions the last one in the file counts, also if its text was removed. A file with a page of more
than 16 MiB, which histories may have, ends there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, BinaryIO

from fivefold.data.kinds.kind import SPAN, Fields, File, Rows

BEGIN = b"<mediawiki"
DEEPEST = 10  # elements within each other; a dump has 4
LONGEST_PAGE = 1 << 24  # bytes; Wikipedia takes articles of 2 MiB


class Wiki(Rows):
    name = "wiki"
    suffixes = (".xml",)

    def claims(self, file: File) -> bool:
        try:
            with file.open() as f:
                return BEGIN in f.read(SPAN)
        except (OSError, ValueError, EOFError):
            return True  # its reader will report it

    def rows(self, file: File, fields: Fields, done: int) -> Iterator[tuple[int, dict[str, Any] | str]]:
        from xml.etree.ElementTree import ParseError, fromstring  # takes 10 ms, and few sources need it

        with file.open() as f:
            for number, xml in enumerate(_pages(f)):
                if _levels(xml) > DEEPEST:
                    yield number, f"not a page: elements are nested more than {DEEPEST} levels deep"
                    continue
                try:
                    page = fromstring(xml)
                except ParseError as error:
                    yield number, f"not XML: {error}"
                    continue
                *_, text = ["", *(revision.findtext("text") for revision in page.iterfind("revision"))]
                if text and page.findtext("ns", "0") == "0" and page.find("redirect") is None:
                    yield number, {fields.text: text}


def _levels(xml: bytes) -> int:
    """How many elements lie within each other, before a parser that keeps them all sees them."""
    depth = deepest = 0
    for end, alone in re.findall(rb"<(/?)[a-zA-Z][^<>]*?(/?)>", xml):
        depth += -1 if end else not alone
        deepest = max(deepest, depth)
    return deepest


def _pages(f: BinaryIO) -> Iterator[bytes]:
    """Each element `page` by itself, so no declaration of entities comes with it. Raises OSError: there are no more
    pages, but the dump has not ended."""
    chunk = held = f.read(SPAN)
    if BEGIN not in held:
        raise OSError("not a dump of MediaWiki: it does not begin with <mediawiki>")
    while chunk:
        *ended, held = held.split(b"</page>")
        for page in ended:
            start = page.find(b"<page>")
            yield (page[start:] if start >= 0 else b"") + b"</page>"
        if len(held) > LONGEST_PAGE:
            raise OSError(f"a page of more than {LONGEST_PAGE >> 20} MiB")
        chunk = f.read(SPAN)
        held += chunk
    if b"</mediawiki>" not in held:
        raise OSError("the file ends before </mediawiki>")
