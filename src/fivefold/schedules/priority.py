"""The order in which a worker of parameter servers sends the parts of its messages. No torch."""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from itertools import count
from typing import Any


class Ready:
    """Parts of messages that may be sent, in the order in which they are: "fifo", as they became ready; "priority",
    those of the first layer (the lowest number) first."""

    def __init__(self, order: str):
        self.order, self._serial, self._heap = order, count(), list[tuple[int, int, Any]]()

    def add(self, part: Hashable, layer: int) -> None:
        rank = layer if self.order == "priority" else 0
        heapq.heappush(self._heap, (rank, next(self._serial), part))

    def pop(self) -> Any:
        return heapq.heappop(self._heap)[2]

    def __len__(self) -> int:
        return len(self._heap)
