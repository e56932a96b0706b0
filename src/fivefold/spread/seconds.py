"""What the ranks of a layout tell each other about the time of their steps. No torch."""

from __future__ import annotations

SECONDS = ("computing", "data", "messages", "network", "to")
"""Seconds of a step of one rank. `network`: of `messages`, in which the network took no data from this rank; `to`: from
it to which IPv4 address, as a number."""
SHARED_EVERY = 10
"""Steps between two times that they do."""
