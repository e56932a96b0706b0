"""What a terminal cannot show: pictures in ASCII in C locales, and escapes for what its encoding lacks."""

from __future__ import annotations

import codecs
import io
import os
import sys
from collections.abc import Sequence

ASCII = dict(
    zip(
        "▁▂▃▄▅▆▇█·─═╌┄│┃└┘╱▓▒░∙→µ–",
        "_:-=+*%#.-=~.||++/%x.o>u-",
        strict=True,
    )
)
"""The characters of timelines and bars, and the nearest in ASCII."""
_ESCAPE, _KEEP = "fivefold.escape", "fivefold.keep"  # error handlers of encodings
_COERCED = (
    "C.UTF-8",
    "C.utf8",
    "UTF-8",
)  # Python itself sets LC_CTYPE to one of these where the locale is C (PEP 538)


def in_c_locale() -> bool:
    """True if the user has set the locale C or POSIX. (Without any setting Python assumes UTF-8, as terminals do.)"""
    words = (os.environ.get(name, "") for name in ("LC_ALL", "LC_CTYPE", "LANG"))
    return next((word for word in words if word and word not in _COERCED), "") in ("C", "POSIX")


def prepare(words: Sequence[str]) -> None:
    """Sets standard output and error for the command `words`. In a C locale pictures are drawn in ASCII; text from
    elsewhere stays UTF-8 there, as Python has it."""
    codecs.register_error(_ESCAPE, _escaped)
    codecs.register_error(_KEEP, _kept)
    for stream in (sys.stdout, sys.stderr):
        if not isinstance(stream, io.TextIOWrapper):
            continue
        unicode = stream.encoding.lower().replace("-", "") == "utf8"
        models_text = words[:1] in (["generate"], ["chat"])  # and no pictures
        if unicode and in_c_locale() and not models_text:
            stream.reconfigure(encoding="ascii", errors=_KEEP)
        else:
            stream.reconfigure(errors=_ESCAPE)


def _escaped(error: UnicodeError) -> tuple[str | bytes, int]:
    assert isinstance(error, UnicodeEncodeError)
    missing = error.object[error.start : error.end]
    return "".join(ASCII.get(c) or c.encode("ascii", "backslashreplace").decode() for c in missing), error.end


def _kept(error: UnicodeError) -> tuple[str | bytes, int]:
    assert isinstance(error, UnicodeEncodeError)
    missing = "".join(ASCII.get(c, c) for c in error.object[error.start : error.end])
    return missing.encode("utf-8", "backslashreplace"), error.end
