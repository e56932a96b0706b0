"""The errors that a user sees. They carry one clear message and never a traceback on the command line."""

from __future__ import annotations

from collections.abc import Iterable


class UserError(ValueError):
    """Bad input: a recipe key, a file, a layout. The command line prints the message and exits with 2."""


class CheckFailed(Exception):
    """A check failed, such as `fivefold verify` beyond its tolerance. The exit code is 1."""


class CommunicationError(Exception):
    """A message between ranks timed out or a rank has gone. It names rank, axis, operation and line: exit code 1."""


class RankFailed(Exception):
    """A rank died or hung, and the run was not restarted. One message, which names the rank: exit code 1."""


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """`; did you mean 'x'?` with the most similar choice, or an empty string."""
    from difflib import get_close_matches

    near = get_close_matches(word, list(choices), n=1)
    return f"; did you mean '{near[0]}'?" if near else ""
