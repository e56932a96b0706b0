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
from dataclasses import asdict, dataclass, field, replace
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

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def parse(cls, found: Mapping[str, Any]) -> Post:
        wait = found["wait"]
        lists = {key: tuple(found[key]) for key in ("at",)}
        if wait is not None:
            wait = Wait(**{**wait, "ranks": tuple(wait["ranks"]), "peers": tuple(wait["peers"])})
        return cls(**{**found, **lists, "wait": wait})


class Seen(NamedTuple):
    """The last post of a rank; None: it has not posted yet. silent_s: seconds in which no new one came, as far as one
    has looked."""

    post: Post | None
    silent_s: float = 0.0


class Verdict(NamedTuple):
    """missing: the ranks that the others wait for; none if they wait for each other."""

    missing: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class Judge:
    """Of the ranks as one of them sees them. rank, host: its own. limit_s: how long a message may take. silence_s: how
    long a rank may go without a post. apart_s: times its patience, how long a rank may work apart. ahead: hosts run
    ahead of their devices, which do the messages."""

    rank: int
    host: str
    limit_s: float
    silence_s: float
    apart_s: float
    ahead: bool = False

    def verdict(self, seen: Mapping[int, Seen]) -> Verdict | None:
        """None: nobody is missing, or the missing one still does something."""
        own, posted = seen[self.rank].post, seen
        assert own is not None, "a rank knows itself"
        if own.wait is None and self.ahead:
            seen = {**seen, self.rank: Seen(replace(own, wait=Wait("step")))}
        ends, waiting = self._follow(seen)
        if own.wait is None:
            still = self._still(posted)
            ends = self._first(ends or still, seen) if self.ahead else still
        if not ends:
            return self._nobody(waiting, seen)
        return self._named(ends, waiting, seen)

    def overseen(self, ranks: Iterable[int], seen: Mapping[int, Seen]) -> Verdict | None:
        """Of ranks that need not wait for each other, names those that get nothing done. Who waits, or works apart, is
        only missing if it is silent."""
        ends = []
        for rank in ranks:
            post, idle_s = seen.get(rank, Seen(None))
            if post is None or rank == self.rank:
                continue
            if post.wait is None and not post.phase:
                idle_s += post.still_s
            if idle_s >= self._patience_s(post) and self._excuse(rank, seen) is not None:
                ends.append(rank)
        own = seen[self.rank].post
        waiting = {self.rank: own.wait} if own and own.wait else {}
        return self._named(ends, waiting, seen) if ends else None

    def _named(
        self, ends: list[int], waiting: Mapping[int, Wait], seen: Mapping[int, Seen]
    ) -> Verdict | None:
        """None: one of them still does something."""
        missing, far = tuple(sorted(ends)), dict[str, list[int]]()
        why = {rank: self._excuse(rank, seen) for rank in missing}
        if any(reason is None for reason in why.values()):
            return None
        for rank in missing:
            post, silent_s = seen.get(rank, Seen(None))
            if post is not None and self._is_lost(post, silent_s, seen):
                far.setdefault(post.host, []).append(rank)
        lost = {rank for some in far.values() for rank in some}
        said = [f"rank {rank}{_role(rank, seen)} {why[rank]}" for rank in missing if rank not in lost]
        said += [self.lost(host, {rank: seen[rank] for rank in ranks}) for host, ranks in far.items()]
        others = self._others({rank: wait for rank, wait in waiting.items() if rank not in missing})
        return Verdict(missing, f"{'; '.join(said)}. {others}".strip(". "))

    def _still(self, seen: Mapping[int, Seen]) -> list[int]:
        """The ranks that wait for nobody, work on nothing apart, and get nothing done."""
        posts = {rank: one.post for rank, one in seen.items() if one.post}
        idle = [rank for rank, post in posts.items() if post.wait is None and not post.phase]
        return [rank for rank in idle if self._excuse(rank, seen) is not None]

    @staticmethod
    def _first(ranks: list[int], seen: Mapping[int, Seen]) -> list[int]:
        """Those of these ranks that have begun no more messages than others of them."""
        begun = {rank: one.post.begun for rank, one in seen.items() if one.post}

        def is_behind(rank: int, other: int) -> bool:
            theirs = begun.get(rank, {})
            return any(theirs.get(group, number) < number for group, number in begun.get(other, {}).items())

        return [r for r in ranks if not any(is_behind(other, r) for other in ranks)] or ranks

    def _is_lost(self, post: Post, silent_s: float, seen: Mapping[int, Seen]) -> bool:
        """True if another host is lost: nothing is heard of any of its ranks. A rank alone may only be held up, by
        something that holds its interpreter."""
        if post.host == self.host or silent_s < self.silence_s * (post.patience if post.phase else 1):
            return False
        there = [one for one in seen.values() if one.post and one.post.host == post.host]
        return all(one.silent_s >= self.silence_s for one in there)

    def lost(self, host: str, seen: Mapping[int, Seen]) -> str:
        """Says that a host is lost, with these ranks."""
        rank, first = min(seen.items())
        who = f"{numbers(seen)} {'are' if len(seen) > 1 else 'is'} missing"
        return (
            f"{who}: nothing is heard of host {_name(host)} for {first.silent_s:.0f} s. It has stopped, or the network "
            f"to it is lost. Rank {rank} was last seen {_where(first.post)}"
        )

    def _follow(self, seen: Mapping[int, Seen]) -> tuple[list[int], dict[int, Wait]]:
        """(ranks at the end of the chain, what the ranks before them wait in)."""
        ends, waiting, queue, known = list[int](), dict[int, Wait](), [self.rank], {self.rank}
        while queue:
            rank = queue.pop(0)
            post, silent_s = seen.get(rank, Seen(None, self.silence_s))
            silent = rank != self.rank and silent_s >= self.silence_s
            if silent or post is None or post.wait is None:
                ends.append(rank)
            else:
                waiting[rank] = post.wait
                behind = [other for other in self._behind(post, seen) if other not in known]
                queue += behind
                known |= {*behind}
        return ends, waiting

    def _behind(self, post: Post, seen: Mapping[int, Seen]) -> list[int]:
        """The ranks that a rank waits for. Where all have begun a collective, those that are silent."""
        wait = post.wait
        assert wait is not None
        if wait.peers:
            return [*dict.fromkeys(wait.peers)]  # one rank may send several
        others = [rank for rank in (wait.ranks or seen) if rank != post.rank]
        posts = {rank: seen[rank].post if rank in seen else None for rank in others}
        behind = [r for r, theirs in posts.items() if theirs is None or not _has_begun(theirs, wait, post)]
        return behind or [rank for rank in others if seen[rank].silent_s >= self.silence_s]

    def _excuse(self, rank: int, all_seen: Mapping[int, Seen]) -> str | None:
        """Why a rank counts as missing, in words; None if it still does something."""
        seen = all_seen.get(rank, Seen(None))
        post = seen.post
        if post is None:
            return "is missing: it has not begun to train"
        where = _where(post)
        if self._is_lost(post, seen.silent_s, all_seen):
            return "is missing"  # see `lost`
        if post.host == self.host and seen.silent_s >= self.silence_s:
            state = state_of(post.pid)
            if state in STATES:
                return f"is missing: {STATES[state]}. It was last seen {where}"
        still_s = post.still_s + seen.silent_s
        if still_s < self._patience_s(post):
            return None
        return f"is missing: it has done nothing for {still_s:.0f} s, {where}"

    def _patience_s(self, post: Post) -> float:
        """Seconds for which a rank may do nothing."""
        limit_s = max(self.limit_s, STEPS * post.usual_s)  # ranks with servers need not be equally fast
        return max(self.apart_s, limit_s) * post.patience if post.phase else limit_s

    def _nobody(self, waiting: Mapping[int, Wait], seen: Mapping[int, Seen]) -> Verdict | None:
        """All ranks of the chain wait, and have done so for long. In a phase, messages may be large, too."""
        posts = {rank: post for rank in waiting if (post := seen[rank].post)}
        if self.rank not in waiting:  # it got on meanwhile
            return None
        if any(post.still_s + seen[rank].silent_s < self._patience_s(post) for rank, post in posts.items()):
            return None
        wait, every = waiting[self.rank], dict(waiting)
        for rank in wait.ranks:
            post = seen[rank].post if rank in seen else None
            if post and post.wait and (post.wait.group, post.wait.number) == (wait.group, wait.number):
                every[rank] = post.wait
        waits = "; ".join(f"rank {rank} waits in {one}" for rank, one in sorted(every.items()))
        same = {one.operation for one in every.values() if one.group == wait.group}
        if len(same) > 1 and not wait.peers:
            return Verdict((), f"ranks wait in different messages, so none of them ends: {waits}")
        hosts = {r: post.host for r in wait.ranks if (seen_ := seen.get(r)) and (post := seen_.post)}
        far = tuple(rank for rank, host in hosts.items() if host != self.host)
        if far:
            names = ", ".join(sorted({_name(hosts[rank]) for rank in far}))
            return Verdict(
                far,
                f"messages of {numbers(far)} on host {names} do not arrive, though all ranks have begun this one: the "
                f"network is lost, or too slow. {self._others(waiting)}",
            )
        return Verdict((), f"ranks wait for each other: {waits}")

    def store_lost(self, seen: Mapping[int, Seen], silent_s: float) -> Verdict | None:
        """The store, which is where rank 0 is, does not answer."""
        first, own = seen.get(0, Seen(None)).post, seen[self.rank].post
        if first is None or own is None or own.wait is None:
            return None
        there = {
            rank: Seen(one.post, silent_s)
            for rank, one in seen.items()
            if one.post and one.post.host == first.host
        }
        if first.host == self.host:
            there = {0: there[0]}
        return Verdict((*there,), f"{self.lost(first.host, there)}. {self._others({self.rank: own.wait})}")

    def _others(self, waiting: Mapping[int, Wait]) -> str:
        """What the others wait in: the judge's own wait, and by whom it is shared."""
        if (own := waiting.get(self.rank)) is None:
            return ""
        same = [
            rank for rank, wait in waiting.items() if (wait.group, wait.number) == (own.group, own.number)
        ]
        who = numbers(same)
        verb = "waits" if len(same) == 1 else "wait"
        return f"{who[:1].upper()}{who[1:]} {verb} in {own}"


def _has_begun(theirs: Post, wait: Wait, own: Post) -> bool:
    """True if a rank has begun what another one waits for: a collective, or all that is before it on the device."""
    if wait.axis:
        return theirs.begun.get(wait.group, 0) >= wait.number
    return all(theirs.begun.get(group, number) >= number for group, number in own.begun.items())


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


def _role(rank: int, seen: Mapping[int, Seen]) -> str:
    post = seen.get(rank, Seen(None)).post
    return f" ({post.role})" if post and post.role else ""


def _name(host: str) -> str:
    return host.split(" ")[0]


def _where(post: Post | None) -> str:
    if post is None:
        return "nowhere"
    return f"{f'{post.phase}, ' * bool(post.phase)}after step {post.step}, at {_line(post.at)}"


def _line(at: tuple[str, ...]) -> str:
    """The innermost place of Fivefold outside comm/, and the innermost one if that is another's."""
    if not at:
        return "an unknown place"
    own = [place for place in at if place.startswith("fivefold/") and not place.startswith("fivefold/comm/")]
    if not own:
        return at[0]
    return own[0] if at[0].startswith("fivefold/") else f"{own[0]} (in {at[0]})"
