"""Which rank is missing when others wait for a message: a verdict from what the ranks have posted.

A rank that waits in collective N of a group waits for those ranks that have begun fewer there. These may wait
themselves, in another group. The end of the chain is the rank that waits for nobody, that has stopped, or whose host
cannot be reached. If there is no such rank, the ranks wait for each other, or the network has lost a message.

A rank that hangs while nobody waits for it judges itself. On a GPU it waits for the device, though it has not said so:
its host may be stuck in the launch of a kernel, because the device waits for a message. Then those are missing that
have begun the fewest messages.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

DEVICE = "the device"
STEPS = 3  # usual steps that a message may take
STATES = {
    "T": "it is stopped (SIGSTOP)",
    "t": "a debugger holds it",
    "Z": "it has ended",
    "X": "it has ended",
}
"""States of /proc/PID/stat in which a process does nothing."""


@dataclass(frozen=True)
class Wait:
    """What a rank waits in. group, number: of a collective; peers: of a send or receive, by rank. at: the innermost
    line outside comm/."""

    operation: str
    axis: str = ""
    purpose: str = ""
    ranks: tuple[int, ...] = ()
    group: str = ""
    number: int = 0
    peers: tuple[int, ...] = ()
    began: str = ""
    at: str = ""

    def __str__(self) -> str:
        if not self.axis:
            return f"results of {DEVICE}"
        purpose, place = f", {self.purpose}" * bool(self.purpose), self.at
        if self.began and self.began != self.at:
            place = f"{self.began}, waited for at {self.at}"
        return f"{self.operation} over axis {self.axis} ({numbers(self.ranks)}){purpose}, at {place}"


@dataclass(frozen=True)
class Post:
    """What a rank says of itself. host: its name, and what tells it from others of that name. beat: grows with each
    post. step: the last one that is done. still_s: seconds since anything got done. patience: see `Progress.phase`.
    begun: collectives by group. at: where it is, innermost first. stack: a file into which it writes the stacks of all
    threads when it gets `signal`. usual_s: seconds of its usual step. role: such as "worker 1"; empty: as others."""

    rank: int
    host: str
    pid: int
    beat: int
    step: int
    phase: str
    patience: float
    still_s: float
    wait: Wait | None
    begun: dict[str, int] = field(default_factory=dict)
    at: tuple[str, ...] = ()
    stack: str = ""
    signal: int = 0
    usual_s: float = 0.0
    role: str = ""

    @classmethod
    def parse(cls, found: Mapping[str, Any]) -> Post:
        wait = found["wait"]
        if wait is not None:
            wait = Wait(**{**wait, "ranks": tuple(wait["ranks"]), "peers": tuple(wait["peers"])})
        return cls(**{**found, "at": tuple(found["at"]), "wait": wait})


class Seen(NamedTuple):
    """The last post of a rank; None: it has not posted yet. silent_s: seconds in which no new one came, as far as one
    has looked."""

    post: Post | None
    silent_s: float = 0.0


class Verdict(NamedTuple):
    """missing: the ranks that the others wait for; none if they wait for each other."""

    missing: tuple[int, ...]
    text: str


@dataclass
class Judge:
    """Judges the ranks as one of them sees them. rank, host: its own. limit_s: how long a message may take. silence_s:
    how long a rank may go without a post. apart_s: times its patience, how long a rank may work apart. ahead: hosts run
    ahead of their devices, which do the messages."""

    rank: int
    host: str
    seen: Mapping[int, Seen]
    limit_s: float
    silence_s: float
    apart_s: float
    ahead: bool = False

    def __post_init__(self) -> None:
        self.posts = {rank: one.post for rank, one in self.seen.items() if one.post}
        self.waits = {rank: post.wait for rank, post in self.posts.items() if post.wait}

    def verdict(self) -> Verdict | None:
        """None: nobody is missing, or the missing one still does something."""
        if self.rank in self.waits:
            ends, waiting = self._follow()
        else:
            # the ranks that wait for nobody, work on nothing apart, and get nothing done
            idle = [rank for rank, post in self.posts.items() if post.wait is None and not post.phase]
            ends = [rank for rank in idle if self._excuse(rank) is not None]
            if self.ahead:
                self.waits[self.rank] = Wait("step")
            followed, waiting = self._follow()
            if self.ahead:
                ends = self._first(followed or ends)
        return self._named(ends, waiting) if ends else self._nobody(waiting)

    def overseen(self, ranks: Iterable[int]) -> Verdict | None:
        """Of ranks that need not wait for each other, names those that get nothing done. Who waits, or works apart, is
        only missing if it is silent."""
        ends = []
        for rank in ranks:
            post = self.posts.get(rank)
            if post is None or rank == self.rank:
                continue
            works = rank not in self.waits and not post.phase
            idle_s = self.seen[rank].silent_s + (post.still_s if works else 0.0)
            if idle_s >= self._patience_s(post) and self._excuse(rank) is not None:
                ends.append(rank)
        return self._named(ends, {self.rank: self.waits.get(self.rank)}) if ends else None

    def store_lost(self, silent_s: float) -> Verdict | None:
        """The store, which is where rank 0 is, does not answer."""
        first, wait = self.posts.get(0), self.waits.get(self.rank)
        if first is None or wait is None:
            return None
        ranks = [rank for rank, post in sorted(self.posts.items()) if post.host == first.host]
        if first.host == self.host:
            ranks = [0]
        return Verdict((*ranks,), f"{self._lost(ranks, silent_s)}. {self._others({self.rank: wait})}")

    def _named(self, ends: list[int], waiting: Mapping[int, Wait | None]) -> Verdict | None:
        """None: one of them still does something."""
        missing, far = tuple(sorted(ends)), dict[str, list[int]]()
        why = {rank: self._excuse(rank) for rank in missing}
        if None in why.values():
            return None
        for rank in missing:
            if self._is_lost(rank):
                far.setdefault(self.posts[rank].host, []).append(rank)
        lost = {rank for ranks in far.values() for rank in ranks}
        roles = {rank: f" ({post.role})" if post.role else "" for rank, post in self.posts.items()}
        texts = [f"rank {rank}{roles.get(rank, '')} {why[rank]}" for rank in missing if rank not in lost]
        texts += [self._lost(ranks, self.seen[ranks[0]].silent_s) for ranks in far.values()]
        others = self._others({rank: wait for rank, wait in waiting.items() if rank not in missing})
        return Verdict(missing, f"{'; '.join(texts)}. {others}".strip(". "))

    def _first(self, ranks: list[int]) -> list[int]:
        """Those of these ranks that have begun no more messages than others of them."""
        begun = {rank: self.posts[rank].begun if rank in self.posts else {} for rank in ranks}
        first = [
            rank
            for rank, own in begun.items()
            if not any(
                theirs.get(group, number) < number
                for theirs in begun.values()
                for group, number in own.items()
            )
        ]
        return first or ranks

    def _is_lost(self, rank: int) -> bool:
        """True if another host is lost: nothing is heard of any of its ranks. A rank alone may only be held up, by
        something that holds its interpreter."""
        post = self.posts.get(rank)
        if post is None or post.host == self.host:
            return False
        if self.seen[rank].silent_s < self.silence_s * (post.patience if post.phase else 1):
            return False
        there = [self.seen[other] for other, theirs in self.posts.items() if theirs.host == post.host]
        return all(one.silent_s >= self.silence_s for one in there)

    def _lost(self, ranks: list[int], silent_s: float) -> str:
        """Says that the host of these ranks is lost."""
        post, verb = self.posts[ranks[0]], "are" if len(ranks) > 1 else "is"
        return (
            f"{numbers(ranks)} {verb} missing: nothing is heard of host {post.host.split(' ')[0]} for "
            f"{silent_s:.0f} s. It has stopped, or the network to it is lost. Rank {ranks[0]} "
            f"was last seen {_where(post)}"
        )

    def _follow(self) -> tuple[list[int], dict[int, Wait]]:
        """(ranks at the end of the chain, what the ranks before them wait in)."""
        ends, waiting, chain = list[int](), dict[int, Wait](), [self.rank]
        for rank in chain:  # it grows
            wait = self.waits.get(rank)
            if wait is None or (rank != self.rank and self.seen[rank].silent_s >= self.silence_s):
                ends.append(rank)
            else:
                waiting[rank] = wait
                chain += [other for other in self._behind(rank, wait) if other not in chain]
        return ends, waiting

    def _behind(self, rank: int, wait: Wait) -> list[int]:
        """The ranks that a rank waits for. Where all have begun a collective, those that are silent."""
        if wait.peers:
            return [*dict.fromkeys(wait.peers)]  # one rank may send several
        # they have begun what it waits for: a collective, or all that is before it on the device
        begun = {wait.group: wait.number} if wait.axis else self.posts[rank].begun
        others = [other for other in (wait.ranks or self.seen) if other != rank]
        behind = [
            other
            for other in others
            if (post := self.posts.get(other)) is None
            or any(
                post.begun.get(group, 0 if wait.axis else number) < number for group, number in begun.items()
            )
        ]
        return behind or [other for other in others if self.seen[other].silent_s >= self.silence_s]

    def _excuse(self, rank: int) -> str | None:
        """Why a rank counts as missing, in words; None if it still does something."""
        post = self.posts.get(rank)
        if post is None:
            return "is missing: it has not begun to train"
        if self._is_lost(rank):
            return "is missing"  # see `_lost`
        silent_s, where = self.seen[rank].silent_s, _where(post)
        if post.host == self.host and silent_s >= self.silence_s:
            state = state_of(post.pid)
            if state in STATES:
                return f"is missing: {STATES[state]}. It was last seen {where}"
        still_s = post.still_s + silent_s
        if still_s < self._patience_s(post):
            return None
        return f"is missing: it has done nothing for {still_s:.0f} s, {where}"

    def _patience_s(self, post: Post) -> float:
        """Seconds for which a rank may do nothing."""
        limit_s = max(self.limit_s, STEPS * post.usual_s)  # ranks with servers need not be equally fast
        return max(self.apart_s, limit_s) * post.patience if post.phase else limit_s

    def _nobody(self, waiting: Mapping[int, Wait]) -> Verdict | None:
        """All ranks of the chain wait, and have done so for long. In a phase, messages may be large, too."""
        if self.rank not in waiting:  # it got on meanwhile
            return None
        for rank in waiting:
            post = self.posts[rank]
            if post.still_s + self.seen[rank].silent_s < self._patience_s(post):
                return None
        wait, every = waiting[self.rank], dict(waiting)
        for rank in wait.ranks:
            theirs = self.waits.get(rank)
            if theirs and (theirs.group, theirs.number) == (wait.group, wait.number):
                every[rank] = theirs
        texts = "; ".join(f"rank {rank} waits in {one}" for rank, one in sorted(every.items()))
        same = {one.operation for one in every.values() if one.group == wait.group}
        if len(same) > 1 and not wait.peers:
            return Verdict((), f"ranks wait in different messages, so none of them ends: {texts}")
        hosts = {rank: self.posts[rank].host for rank in wait.ranks if rank in self.posts}
        far = tuple(rank for rank, host in hosts.items() if host != self.host)
        if not far:
            return Verdict((), f"ranks wait for each other: {texts}")
        names = ", ".join(sorted({hosts[rank].split(" ")[0] for rank in far}))
        return Verdict(
            far,
            f"messages of {numbers(far)} on host {names} do not arrive, though all ranks have begun this one: the "
            f"network is lost, or too slow. {self._others(waiting)}",
        )

    def _others(self, waiting: Mapping[int, Wait | None]) -> str:
        """What the others wait in: the judge's own wait, and by whom it is shared."""
        if (own := waiting.get(self.rank)) is None:
            return ""
        place = own.group, own.number
        who = numbers(rank for rank, wait in waiting.items() if wait and (wait.group, wait.number) == place)
        verb = "wait" if who.startswith("ranks") else "waits"
        return f"{who[:1].upper()}{who[1:]} {verb} in {own}"


def numbers(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0, 1, 2`; of many the first and last."""
    said = [str(rank) for rank in sorted(ranks)]
    if len(said) > 8:
        said = [*said[:4], "...", *said[-2:]]
    return f"rank{'s' * (len(said) > 1)} {', '.join(said)}"


def state_of(pid: int) -> str:
    """The letter of a process' state (Linux); "X" if there is none; "" if it cannot be known."""
    if not os.path.isdir("/proc/self"):
        return ""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return "X"


def _where(post: Post) -> str:
    """Says in which place: the innermost one of Fivefold outside comm/, and the innermost one if that is another's."""
    at = post.at
    own = [place for place in at if place.startswith("fivefold/") and not place.startswith("fivefold/comm/")]
    place = [*own, *at, "an unknown place"][0]
    if own and not at[0].startswith("fivefold/"):
        place = f"{place} (in {at[0]})"
    return f"{f'{post.phase}, ' * bool(post.phase)}after step {post.step}, at {place}"
