"""Makes all ranks fail together: if one rank cannot do something, none continues."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fivefold.comm.axis import Axis
from fivefold.errors import CommunicationError, UserError


@contextmanager
def all_or_none(axis: Axis) -> Iterator[None]:
    """Turns an error inside, on one rank of the axis, into an error on every rank. Otherwise, where no launcher stops
    them (as under Slurm), the others would wait for that rank in their next message until it fails. All ranks call it,
    and code inside must not need another rank.

    Raises:
        UserError: the message of the last rank that failed. A rank whose own error is of another kind raises that.
        CommunicationError: the others are gone. A rank with an error of its own raises that.
    """
    error: BaseException | None = None
    try:
        yield
    except BaseException as found:  # also unexpected errors and signals: the others wait
        error = found
    failed = torch.tensor(-1 if error is None else axis.index, device=axis.device)
    try:
        index = int(axis.all_reduce(failed, "max"))
    except CommunicationError as lost:
        if error is None:
            raise
        raise error from lost  # it came first
    if index >= 0:
        text = str(error) if isinstance(error, UserError) else f"rank {axis.rank}: {error!r}"
        everywhere = UserError(told(text, index, axis))
        raise everywhere if error is None or (isinstance(error, UserError) and axis.size > 1) else error


def told(text: str, index: int, axis: Axis) -> str:
    """Gives every rank the text of the one with this index."""
    mine = torch.tensor(list(text.encode()), dtype=torch.uint8, device=axis.device)
    length = axis.broadcast(torch.tensor(len(mine), device=axis.device), index)
    content = mine if axis.index == index else mine.new_empty(int(length))
    return bytes(axis.broadcast(content, index).tolist()).decode()
