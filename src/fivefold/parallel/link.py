"""What a parameter server and a worker say to each other, over sockets of their own.

Three axes, each of one worker and all servers: short notes, gradients on their way up, weights on their way down. So no
note waits behind data, and a request for weights does not wait behind gradients. A worker that is lost, or silent
for longer than the axis' time-out, harms no axis of the others.
"""

from __future__ import annotations

import threading
from collections import deque
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from fivefold.comm import Axis, Started
from fivefold.launch.ranks import Ranks
from fivefold.parallel.mesh import axis_between

FIGURES = 8  # of a note
KEPT = 32  # notes whose sending nobody has waited for


Kind = IntEnum(
    "Kind",
    "PUSHED PULL COMPUTED APPLIED TEXT ACKNOWLEDGED UPDATED TRAIN VALIDATE SAMPLE END BYE ALIVE",
    start=0,
)
"""Notes. From a worker: PUSHED (a part of a gradient is on its way), PULL (send a message's weights), COMPUTED (a
share's gradient is computed, and all servers have all of it), APPLIED (all servers have applied its gradient), TEXT
(answers an order), BYE. From a server: ACKNOWLEDGED (a part has arrived), UPDATED (a message's weights are new),
the orders TRAIN, VALIDATE, SAMPLE, END, and BYE. ALIVE is answered with ALIVE: a receive that lasts fails."""
ORDERS = (Kind.TRAIN, Kind.VALIDATE, Kind.SAMPLE, Kind.END)
TEXT_TAG = 1  # of the text after a TEXT note; notes have 0, gradients and weights what follows


class Note(NamedTuple):
    """first, second: numbers of a message and its part, or of a step and its share."""

    kind: Kind
    first: int = 0
    second: int = 0
    step: int = 0
    figures: tuple[float, ...] = ()


class Link:
    """One end of the line between a worker and a server. peer: the other's index on the axes. rank: in the run."""

    def __init__(self, notes: Axis, up: Axis, down: Axis, peer: int):
        self.notes, self.up, self.down, self.peer = notes, up, down, peer
        self.rank = notes.ranks[peer]
        self._lock, self._sent = threading.Lock(), deque[Started]()

    def tell(
        self, kind: Kind, first: int = 0, second: int = 0, step: int = 0, figures: tuple[float, ...] = ()
    ) -> None:
        """Sends a note, and does not wait until it is read. Any thread may call it."""
        note = as_tensor(Note(kind, first, second, step, figures))
        with self._lock:
            self._sent.append(self.notes.start_send(note, self.peer))
            if len(self._sent) > KEPT:
                self._sent.popleft()()

    def hear(self) -> Note:
        """Waits for the other's next note."""
        found = torch.empty(4 + FIGURES, dtype=torch.float64)
        return as_note(self.notes.start_receive(found, self.peer)())

    def flush(self) -> None:
        """Waits until all notes are sent."""
        with self._lock:
            while self._sent:
                self._sent.popleft()()


def links(ranks: Ranks, servers: int) -> list[Link]:
    """A server's link to each worker, or a worker's to each server. The first ranks are the servers. All ranks call it
    at the same time, before anything else makes groups."""
    found = list[Link]()
    for worker in range(servers, ranks.world):
        members, names = [*range(servers), worker], ("notes", "push", "pull")
        notes, up, down = (axis_between(n, members, ranks, everywhere=True) for n in names)
        if notes and up and down:
            peers = [servers] if ranks.rank < servers else range(servers)
            found += [Link(notes, up, down, peer) for peer in peers]
    return found


def tag_of(message: int, part: int, parts: int, down: bool = False) -> int:
    """Of a part of a message, on its way up or down. parts: most that a message has."""
    return 2 + 2 * (message * parts + part) + down


def as_tensor(note: Note) -> Tensor:
    """(4 + FIGURES) in fp64."""
    filled = (*note.figures, *[0.0] * (FIGURES - len(note.figures)))
    return torch.tensor([*note[:4], *filled], dtype=torch.float64)


def as_note(numbers: Tensor) -> Note:
    kind, first, second, step, *figures = numbers.tolist()
    return Note(Kind(int(kind)), int(first), int(second), int(step), tuple(figures))
