"""Makes all ranks fail together: if one rank cannot do something, none continues."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fivefold.comm.axis import Axis
from fivefold.errors import PASSING, BusyError, CommunicationError, UserError

KINDS = (CommunicationError, BusyError, UserError)
"""What an error of one rank is on the others: a user's mistake, which stays one everywhere; something that may pass;
and everything else, after which a launcher starts the ranks again. A later one hides those before it."""


@contextmanager
def all_or_none(axis: Axis) -> Iterator[None]:
    """Turns an error inside, on one rank of the axis, into an error on every rank. Otherwise, where no launcher stops
    them (as under Slurm), the others would wait for that rank in their next message until it fails. All ranks call it,
    and code inside must not need another rank.

    Raises:
        UserError: a rank met one: the message of the last such rank.
        BusyError: a rank met something that may pass, and none a mistake of the user's.
        CommunicationError: a rank failed in another way, or the others are gone.
    A rank whose own error is not a UserError raises that.
    """
    error: BaseException | None = None
    try:
        yield
    except BaseException as found:  # also unexpected errors and signals: the others wait
        error = found
    mine = -1 if error is None else _kind(error) * axis.size + axis.index
    try:
        failed = int(axis.all_reduce(torch.tensor(mine, device=axis.device), "max"))
    except CommunicationError as lost:
        if error is None:
            raise
        raise error from lost  # it came first
    if failed >= 0:
        kind, index = divmod(failed, axis.size)
        text = str(error) if isinstance(error, UserError) else f"rank {axis.rank}: {error!r}"
        everywhere = KINDS[kind](told(text, index, axis))
        raise everywhere if error is None or (isinstance(error, UserError) and axis.size > 1) else error


def _kind(error: BaseException) -> int:
    """The number of its kind in `KINDS`."""
    if isinstance(error, OSError) and error.errno in PASSING:
        return 1
    return 1 if isinstance(error, BusyError) else 2 if isinstance(error, UserError) else 0


def told(text: str, index: int, axis: Axis) -> str:
    """Gives every rank the text of the one with this index."""
    mine = torch.tensor(list(text.encode()), dtype=torch.uint8, device=axis.device)
    length = axis.broadcast(torch.tensor(len(mine), device=axis.device), index)
    content = mine if axis.index == index else mine.new_empty(int(length))
    return bytes(axis.broadcast(content, index).tolist()).decode()
