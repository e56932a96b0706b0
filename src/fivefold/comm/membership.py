"""Sites that start, fail and return by themselves: who takes part in an outer step, and the axis between them.

Each site is a launch of its own, with its own process groups. The sites know each other only through a TCP store, which
site 0 serves at an address that all are given. So site 0 must stay; any other may end, hang or return at any time.

A **meeting** is one outer step. Its attempts are numbered:

1. Members say that they are here. Site 0 waits for them, adds the sites that ask to join, and writes who is a member
   now. Who comes later is left out, and may join again.
2. Members make process groups of this attempt, and send what they have to. A newcomer gets the common state.
3. Each rank votes whether it received everything. Only if all have, the step counts. Otherwise the sites whose ranks
   have voted meet for another attempt.

So sites always agree on what the common weights are, whenever one is lost. How long who waits is one chain (`Waits`).

Keys name sites, not meetings, so the store stays small. A value says of which meeting it is (`Meeting.at`), and is
written again only after all ranks of the members have read it: they vote after that.
"""

from __future__ import annotations

import hmac
import json
import math
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fivefold.comm.axis import Axis
from fivefold.comm.progress import progress
from fivefold.errors import BusyError, CommunicationError, UserError
from fivefold.kernels.private import gloo_group
from fivefold.launch import launchers

POLL_S = 0.02
CPU = torch.device("cpu")
LOOPBACK = ("localhost", "127.0.0.1", "::1")
Fits = Callable[[Mapping[str, Any]], bool]


@dataclass(frozen=True)
class Seat:
    """This launch's site in a run of several launches. site: its number. host, port: where site 0 serves the store."""

    site: int
    host: str
    port: int

    @classmethod
    def parse(cls, site: int, address: str) -> Seat:
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise UserError(
                f"--meet {address}: it must be HOST:PORT, where site 0 can be reached, as node0:29600"
            )
        return cls(site, host.strip("[]"), int(port))

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def options(self) -> tuple[str, ...]:
        """The options of `fivefold train` that name it."""
        return "--site", str(self.site), "--meet", str(self)


class Waits:
    """How long who waits when sites meet, in seconds: one chain, in which each wait is longer than those that it waits
    for. So no values of the fields let the loss of a site end another one. patience: `sync.patience`, of site 0 for
    members, for making a group between sites, and for each message over it. timeout: `launch.timeout`, for what the
    ranks of a site do at about the same time."""

    def __init__(self, patience: float, timeout: float):
        self.patience, self.timeout = patience, timeout
        self.members = patience + timeout  # for site 0 to say who is a member
        self.exchange = 2 * patience  # of site 0 for votes of others: a late group, then a message that fails
        self.inside = self.exchange + timeout  # of site 0 for votes of its own ranks, without which it ends
        self.outcome = self.inside + self.exchange  # for site 0 to say whether the step counts


@dataclass(frozen=True)
class Meeting:
    """An attempt of an outer step. step: the inner step after which it is; the members' first meeting has none, and is
    about state only (`first`). members: the sites that take part. new: those of them that bring nothing, and need the
    common state."""

    step: int
    first: bool
    attempt: int
    members: tuple[int, ...]
    new: tuple[int, ...]

    @property
    def giving(self) -> tuple[int, ...]:
        """The members that bring an outer gradient."""
        return tuple(site for site in self.members if site not in self.new)

    @property
    def at(self) -> list[int]:
        """Grows from meeting to meeting."""
        return [self.step, self.attempt]


class Membership:
    """One rank's part of a site's membership. inside: the axis of all ranks of the site, whose time-out is
    `launch.timeout`. patience_s: `sync.patience`. said: what all sites must have in common, by name.

    Raises:
        UserError: the address cannot be served.
        BusyError: it does not answer.
    """

    def __init__(self, seat: Seat, sites: int, inside: Axis, patience_s: float, said: Mapping[str, Any]):
        self.seat, self.sites, self.inside, self.said = seat, sites, inside, said
        self.waits = Waits(patience_s, inside.timeout_s)
        self.leads, self.hosts = inside.index == 0, seat.site == 0
        self.members: tuple[int, ...] = ()  # whom site 0 waits for
        self._new: set[int] = set()  # those of them that have no common state yet
        self._tokens: dict[int, str] = {}  # the starts of sites that site 0 has answered
        self.address = launchers.own_address(seat.host)
        where, serves = (seat.host, seat.port), self.hosts and self.leads
        wait_s = min(60.0, self.waits.timeout) if self.hosts else self.waits.patience
        try:  # it serves at this address only
            alone = seat.host in LOOPBACK
            at = launchers.listening(*where, alone) if serves else launchers.wait_for(*where, wait_s)
            wait = timedelta(seconds=wait_s)
            store = dist.TCPStore(*where, None, serves, wait, wait_for_workers=False, master_listen_fd=at)
        except RuntimeError as error:
            kind, why = (UserError, "cannot serve the others") if serves else (BusyError, "finds no site 0")
            text = str(error).splitlines()[0][:200]
            raise kind(f"site {seat.site} {why} at {seat}: {text}") from None
        store.set_timeout(timedelta(seconds=self.waits.timeout))
        self.store = Sealed(store)

    def come(self, step: int, digest: str) -> Meeting:
        """Asks to join, after inner step `step`, with a common state of this digest. Returns the first meeting: sites
        that start together have it at once, others in the next outer step of the members.

        Raises:
            UserError: this site does not train the same as site 0.
        """
        number = torch.tensor(secrets.randbits(62), device=self.inside.device)  # of this start, on all ranks
        token, site = f"{int(self.inside.broadcast(number, 0)):x}", self.seat.site
        if self.leads:
            self._ask(self.store.delete_key, f"left/{site}")
            wish = {"site": site, "token": token, "step": step, "digest": digest, "said": self.said}
            self._set(f"come/{site}", at=None, **wish)
            if self.hosts:  # waits for all sites to start; those whose state differs from site 0's get it
                wishes = {
                    site: self._read(f"come/{site}") for site in self._present("come", range(self.sites))
                }
                wishes = {site: wish for site, wish in wishes.items() if self._fits(wish)}
                state = [wishes[0]["step"], wishes[0]["digest"]]
                new = [site for site, wish in wishes.items() if [wish["step"], wish["digest"]] != state]
                self.members, self._new = tuple(wishes), {*new}
                for other, wish in wishes.items():
                    self._seat(other, wish, Meeting(wishes[0]["step"], True, 0, self.members, tuple(new)))
        return self._meeting(f"seat/{site}", math.inf, lambda found: found["token"] == token)

    def meet(self, step: int, attempt: int = 0) -> Meeting:
        """The meeting of a member after inner step `step`.

        Raises:
            BusyError: the others have not waited for this site.
        """
        at = [step, attempt]
        if self.leads:
            self._set(f"here/{self.seat.site}", at=at)
            if self.hosts:
                self._gather(step, attempt)
        meeting = self._meeting("members", self.waits.members, lambda found: found["at"] >= at)
        if meeting.at != at or self.seat.site not in meeting.members:
            raise BusyError(
                f"site {self.seat.site} came too late to the outer step after inner step {step}: the others wait for "
                f"sync.patience = {self.waits.patience:g} s, and have gone on. Resume this site to join again"
            )
        return meeting

    def again(self, meeting: Meeting) -> Meeting:
        """Another attempt of a meeting that did not count."""
        if not meeting.first:
            return self.meet(meeting.step, meeting.attempt + 1)
        raise CommunicationError(f"the sites {meeting.members} lost each other at their first meeting")

    def axis(self, meeting: Meeting) -> Axis:
        """The axis of this rank and its counterparts in the other members, over gloo on CPUs.

        Raises:
            CommunicationError: one of them does not answer.
        """
        index, group = meeting.members.index(self.seat.site), None
        if len(meeting.members) > 1:
            name = f"groups/{meeting.step}/{meeting.attempt}/{self.inside.index}"
            size, patience = len(meeting.members), self.waits.patience
            try:
                group = gloo_group(self.store, name, index, size, self.address, patience)
            except RuntimeError as error:
                raise CommunicationError(f"site {self.seat.site} cannot reach the others: {error}") from error
        return Axis("sites", meeting.members, index, CPU, group, self.waits.patience, watched=False)

    def vote(self, meeting: Meeting, received: bool) -> bool:
        """Says whether this rank received everything. Returns whether all ranks of all members did."""
        self._set(f"vote/{self.seat.site}/{self.inside.index}", at=meeting.at, yes=received)
        if self.leads and self.hosts:
            self._count(meeting)
        found = self._get("outcome", self.waits.outcome, lambda found: found["at"] >= meeting.at)
        with suppress(CommunicationError):  # site 0 may have left since
            self._ask(self.store.forget, "groups/")
        return found["at"] == meeting.at and found["counts"]

    def leave(self, complete: bool) -> None:
        """Ends this site's part. At the end of the run site 0 waits until the others have read what it wrote last."""
        self.inside.barrier()
        if self.leads and self.hosts:
            self._present("left", [site for site in self.members if site and complete])
        elif self.leads:
            with suppress(CommunicationError):  # site 0 has waited long enough
                self._set(f"left/{self.seat.site}", at=None)

    # On site 0's first rank

    def _gather(self, step: int, attempt: int) -> None:
        """Waits for the members, and adds the sites that ask to join."""
        present = self._present("here", self.members, [step, attempt])
        joining = {site: wish for site, wish in self._wishes().items() if self._fits(wish)}
        members = tuple(sorted({*present, *joining}))
        self._new = {*joining, *(self._new & {*present})}
        meeting = Meeting(step, False, attempt, members, tuple(sorted(self._new)))
        self._set("members", at=meeting.at, **asdict(meeting))
        for site, wish in joining.items():
            self._seat(site, wish, meeting)

    def _count(self, meeting: Meeting) -> None:
        """Waits for the votes, and writes whether the step counts."""
        if not self._present("vote", [0], meeting.at, self.waits.inside):
            raise CommunicationError(f"ranks of site 0 have not voted for {self.waits.inside:g} s")
        voted = self._present("vote", meeting.members, meeting.at, self.waits.exchange)
        votes = [self._read(key)["yes"] for site in voted for key in self._keys("vote", site)]
        counts = len(voted) == len(meeting.members) and all(votes)
        self.members, self._new = voted, set() if counts else self._new & {*voted}
        self._set("outcome", at=meeting.at, counts=counts)

    def _wishes(self) -> dict[int, dict[str, Any]]:
        """By site, the wishes to join that have no answer yet."""
        asked = {site: self._read(f"come/{site}") for site in range(1, self.sites)}
        return {site: one for site, one in asked.items() if one and one["token"] != self._tokens.get(site)}

    def _fits(self, wish: Mapping[str, Any]) -> bool:
        """True if a site that asks to join trains the same. Otherwise it is told why not."""
        theirs = wish["said"]
        other = [
            f"{k} = {theirs.get(k)!r}, not {own!r}" for k, own in self.said.items() if theirs.get(k) != own
        ]
        if other:
            self._tokens[wish["site"]] = wish["token"]
            text = f"it does not fit site 0: {', '.join(other[:5])}"
            self._set(f"seat/{wish['site']}", token=wish["token"], refused=text)
        return not other

    def _seat(self, site: int, wish: Mapping[str, Any], meeting: Meeting) -> None:
        self._tokens[site] = wish["token"]
        self._set(f"seat/{site}", token=wish["token"], **asdict(meeting))

    def _present(
        self, kind: str, sites: Sequence[int], at: list[int] | None = None, wait_s: float | None = None
    ) -> tuple[int, ...]:
        """Those of these sites that have written their keys of this kind, for the meeting `at`. Waits for all, but not
        for sites that have left or started again, and for `wait_s` at most (`sync.patience` if not given)."""
        until = time.monotonic() + (self.waits.patience if wait_s is None else wait_s)
        while True:
            said = {site: [self._read(key) for key in self._keys(kind, site)] for site in sites}
            here = tuple(s for s, every in said.items() if all(one.get("at", ()) == at for one in every))
            left = [site for site in sites if self._has(f"left/{site}")]
            gone = {*left, *self._wishes()} if self.members else ()
            if {*here, *gone} >= {*sites} or time.monotonic() > until:
                return here
            time.sleep(POLL_S)

    # The store

    def _keys(self, kind: str, site: int) -> list[str]:
        """Each rank of a site votes; otherwise its first one speaks for it."""
        ranks = [f"/{rank}" for rank in range(self.inside.size)] if kind == "vote" else [""]
        return [f"{kind}/{site}{rank}" for rank in ranks]

    def _meeting(self, key: str, wait_s: float, fits: Fits) -> Meeting:
        found = self._get(key, wait_s, fits)
        if "refused" in found:
            raise UserError(f"site {self.seat.site} cannot join at {self.seat}: {found['refused']}")
        step, first, attempt = (found[name] for name in ("step", "first", "attempt"))
        return Meeting(step, first, attempt, tuple(found["members"]), tuple(found["new"]))

    def _get(self, key: str, wait_s: float, fits: Fits) -> dict[str, Any]:
        """What a key says. Waits until it says what fits."""
        until = time.monotonic() + wait_s
        while not ((found := self._read(key)) and fits(found)):
            if time.monotonic() > until:
                raise CommunicationError(f"site 0 at {self.seat} has not answered for {wait_s:g} s")
            time.sleep(POLL_S)
        return found

    def _read(self, key: str) -> dict[str, Any]:
        """What a key says now; empty: nothing."""
        if not self._has(key):
            return {}
        try:
            return json.loads(self._ask(self.store.get, key))
        except (json.JSONDecodeError, UnicodeDecodeError):
            text = f"a message to '{key}' is not understood; do all sites have the same {SECRET}?"
            raise UserError(text) from None

    def _has(self, key: str) -> bool:
        progress.mark()  # other launches take as long as they are given
        return self._ask(self.store.check, [key])

    def _set(self, key: str, **what: Any) -> None:
        self._ask(self.store.set, key, json.dumps(what))

    def _ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except RuntimeError as error:
            said = str(error).splitlines()[0][:200]
            raise CommunicationError(
                f"site {self.seat.site}: site 0 at {self.seat} has ended, or cannot be reached. The store said: {said}"
            ) from error


SECRET = "FIVEFOLD_SECRET"
LEAST = 16
"""Characters of a secret."""


class Sealed(dist.Store):
    """A store whose values only those can write who know the secret of the environment. Without one, values carry no
    code.

    PyTorch's stores believe everybody who reaches them. Here every value carries a code of its key and content (HMAC,
    RFC 2104). Others can still read values, remove keys, or keep the store busy. The store also knows which keys were
    written through it, gloo's too, so that they can be removed."""

    def __init__(self, store: dist.Store):
        """Raises UserError if the secret is short."""
        super().__init__()
        secret = os.environ.get(SECRET, "")
        if 0 < len(secret) < LEAST:
            raise UserError(
                f"the environment variable {SECRET} has {len(secret)} characters; use at least {LEAST}"
            )
        self.store, self.secret = store, secret.encode("utf-8", "surrogateescape")
        self.written = set[str]()

    def set(self, key: str, value: str | bytes) -> None:
        self.written.add(key)
        content = value.encode() if isinstance(value, str) else bytes(value)
        self.store.set(key, self._code(key, content) + content)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        """The value of a key.

        Raises:
            UserError: who wrote it does not know the secret.
        """
        found = self.store.get(key)
        size = len(self._code(key, b""))
        code, content = found[:size], found[size:]
        if not hmac.compare_digest(code, self._code(key, content)):
            raise UserError(
                f"a message to '{key}' was not written with our {SECRET}. All sites need the same one; or somebody "
                "else writes there"
            )
        return content

    def check(self, keys: list[str]) -> bool:
        return self.store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self.store.wait(keys) if timeout is None else self.store.wait(keys, timeout)

    def delete_key(self, key: str) -> bool:
        return self.store.delete_key(key)

    def forget(self, prefix: str) -> None:
        """Removes the keys with this prefix that were written here."""
        for key in [key for key in self.written if key.startswith(prefix)]:
            self.written.discard(key)
            self.store.delete_key(key)

    def set_timeout(self, timeout: timedelta) -> None:
        self.store.set_timeout(timeout)

    def _code(self, key: str, content: bytes) -> bytes:
        return b"" if not self.secret else hmac.digest(self.secret, key.encode() + b"\0" + content, "sha256")
