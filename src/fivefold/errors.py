"""The errors that a user sees. They carry one clear message and never a traceback on the command line.

Messages quote what others wrote: file names, keys, values. So every message is made printable and short when it is
raised. Whoever prints it, or passes it on in a file, needs no care.
"""

from __future__ import annotations

import errno
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec, TypeVar

LONGEST_MESSAGE = 4000
"""Characters of an error message."""
LONGEST_WORD = 100
"""Characters of a word for which a similar one is searched. The search takes quadratic time."""


def printable(text: str) -> str:
    """`text` with escapes (`\\x1b`) for everything that could control a terminal.

    Kept: printable characters, newlines, tabs. Escaped: C0 and C1 controls (a terminal obeys escape
    sequences), format characters (they reverse or hide text: "Trojan Source", arXiv 2111.00169), lone
    surrogates, and separators that end a line outside of `\\n`.
    """
    return re.sub(r"[^\n\t -~]", lambda found: _escaped(found[0]), text)


def _escaped(character: str) -> str:
    if unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Zl", "Zp"):
        return character
    return character.encode("unicode_escape").decode("ascii")


def shortened(text: str, most: int) -> str:
    """`text`, or its beginning and its end (which has the advice) if it has more than `most` characters."""
    if len(text) <= most:
        return text
    middle = f" [... {len(text):,} characters ...] "
    kept = most - len(middle)
    return f"{text[: kept * 3 // 4]}{middle}{text[-(kept - kept * 3 // 4) :]}"


class _Message(Exception):
    """An error with a message that can be printed on any terminal."""

    def __init__(self, message: object = "") -> None:
        text = printable(shortened(str(message), LONGEST_MESSAGE))
        super().__init__(shortened(text, LONGEST_MESSAGE))  # escapes are longer than what they stand for


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, for programs. key: the field, option or section. value: what it was given. allowed,
    nearest: what it may hold, and what was probably meant. None: the message does not say."""

    key: str | None
    value: Any
    message: str
    allowed: str | None
    nearest: str | None


_OPTION = re.compile(r"^(--[a-z-]+):?(?: '?([^\s']+)'?(?=:| is | cannot))?")
_FIELD = re.compile(r"(?:^|: )([a-z_]+\.[a-z_0-9]+)(?: = (.+?))?(?= must|: | is | has )")
_NAMED = re.compile(r"^(recipe|layout|cluster) '(.*?)'")
_ALLOWED = re.compile(
    r"must be (.+?)(?=; |\. |: |\.?$)|[ ;]valid [a-z]+(?: in \S+)?: (.+?)\.?$|is not in the range (.+?)\.?$"
    r"|Input should be (.+?)(?=, unable|\.?$)"
    r"|is not (one of .+?|a valid .+?)\.?$"
    r"|\((?:(?:valid|known|keys)(?: [a-z]+)*:|it has those of) (.+?)(?:; .*)?\)\.?$"
    r"|[;,] (?:known(?: words)?:|there are|it has) (.+?)(?=; |\. |\.?$)",
    re.MULTILINE,
)
_NEAREST = re.compile(
    r"[Dd]id you mean '?(.+?)'?\?|[Nn]earest valid: (.+?)(?=\. |\.?$)|Use (--.+?)(?=\. |\.?$)", re.MULTILINE
)


def problem(message: str, key: str | None = None, value: Any = None, allowed: str | None = None) -> Problem:
    """The parts of an error message, by the words that all of them use. What is given here counts more."""

    def first(pattern: re.Pattern[str]) -> str | None:
        found = pattern.search(message)
        return next((part for part in found.groups() if part), None) if found else None

    found = _OPTION.search(message) or _NAMED.search(message) or _FIELD.search(message)
    if key is None and found is not None:
        key, value = found[1], found[2] and found[2].strip("'\"")
    return Problem(key, value, message, allowed or first(_ALLOWED), first(_NEAREST))


class UserError(_Message, ValueError):
    """Bad input: a recipe key, a file, a layout. The command line prints the message and exits with 2. problems: its
    parts, where a message lists several."""

    def __init__(self, message: object = "", problems: Sequence[Problem] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems) or (problem(str(self)),)


class MemoryRanOut(UserError):
    """Memory ran out in a rank of our launcher, which adds the planner's advice: the last line is what it needs."""


class BusyError(UserError):
    """Something outside of the recipe that may pass: a full disk, a folder in use, a host that does not answer yet.
    Launchers try again. The exit code is 74."""


PASSING = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EIO,
    errno.ESTALE,
    errno.EBUSY,
    errno.ENFILE,
    errno.EADDRINUSE,
}
"""Errors of the system that may pass by themselves."""


def system_error(message: str, error: OSError) -> UserError:
    """The error to raise for one of the system's: a BusyError if it may pass."""
    return BusyError(message) if error.errno in PASSING else UserError(message)


class CheckFailed(_Message):
    """A check failed, such as `fivefold verify` beyond its tolerance. The exit code is 1."""


class CommunicationError(_Message):
    """A message between ranks timed out or a rank has gone. It names rank, axis, operation and line: exit code 1."""


class RankFailed(_Message):
    """A rank died or hung, and the run was not restarted. One message, which names the rank: exit code 1."""


def several(number: int, word: str) -> str:
    """A number of things: `1 rank`, `1,024 ranks`."""
    return f"{number:,} {word}{'s' * (number != 1)}"


P = ParamSpec("P")
R = TypeVar("R")


def brief(function: Callable[P, R]) -> Callable[P, R]:
    """The function, from which our errors come without its own frames: a traceback ends at the user's line."""

    @wraps(function)
    def outer(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except _Message as error:
            raise error.with_traceback(None) from None

    return outer


def did_you_mean(word: str, choices: Iterable[str], alike: float = 0.6) -> str:
    """`; did you mean 'x'?` with the most similar choice, or an empty string. alike: at least, from 0 to 1."""
    from difflib import get_close_matches

    near = get_close_matches(word[:LONGEST_WORD], list(choices), 1, alike)
    return f"; did you mean '{near[0]}'?" if near else ""
