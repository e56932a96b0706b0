"""Sites that start, fail and return by themselves: who takes part in an outer step, and the axis between them.

Each site is a launch of its own, with its own process groups. The sites know each other only through a TCP store, which
site 0 serves at an address that all are given. So site 0 must stay; any other may end, hang or return at any time.

A **meeting** is one outer step. Its attempts are numbered, and each has keys of its own in the store:

1. Members say that they are here. Site 0 waits for them, for `patience_s` at most, adds the sites that ask to join,
   and writes who is a member now. Who comes later is left out, and may join again.
2. Members make process groups of this attempt, and send what they have to. A newcomer gets the common state.
3. Each site votes whether it received everything. Only if all have, the step counts. Otherwise those that have voted
   meet for another attempt.

So sites always agree on what the common weights are, whenever one is lost.
"""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fivefold.comm.axis import Axis
from fivefold.comm.private import gloo_group
from fivefold.comm.progress import progress
from fivefold.comm.sealed import SECRET, sealed
from fivefold.errors import CommunicationError, UserError
from fivefold.launch import network

POLL_S = 0.02
CPU = torch.device("cpu")
LOOPBACK = ("localhost", "127.0.0.1", "::1")


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
    def key(self) -> str:
        return f"{'first' if self.first else self.step}/{self.attempt}"


class Membership:
    """One rank's part of a site's membership. inside: the axis of all ranks of the site. said: what all sites must have
    in common, by name.

    Raises:
        UserError: the address cannot be served, or does not answer.
    """

    def __init__(self, seat: Seat, sites: int, inside: Axis, patience_s: float, said: Mapping[str, Any]):
        self.seat, self.sites, self.inside, self.patience_s, self.said = seat, sites, inside, patience_s, said
        self.leads, self.hosts = inside.index == 0, seat.site == 0
        self.members: tuple[int, ...] = ()  # whom site 0 waits for
        self._new: set[int] = set()  # those of them that have no common state yet
        self._tokens: dict[int, str] = {}  # the starts of sites that site 0 has answered
        self.store = self._connect()
        self.address = network.own_address(seat.host)

    def _connect(self) -> dist.Store:
        serves = self.hosts and self.leads
        wait = timedelta(seconds=self.patience_s if not self.hosts else min(60.0, self.inside.timeout_s))
        seat, at = self.seat, None
        if serves:  # at this address only
            at = network.listening(seat.host, seat.port, alone=seat.host in LOOPBACK)
        try:
            store = dist.TCPStore(
                seat.host, seat.port, None, serves, wait, wait_for_workers=False, master_listen_fd=at
            )
        except RuntimeError as error:
            said = str(error).splitlines()[0][:200]
            why = "cannot serve the other sites" if serves else "finds no site 0"
            raise UserError(f"site {self.seat.site} {why} at {self.seat}: {said}") from None
        store.set_timeout(timedelta(seconds=self.inside.timeout_s))
        return sealed(store)

    def come(self, step: int, digest: str) -> Meeting:
        """Asks to join, after inner step `step`, with a common state of this digest. Returns the first meeting: sites
        that start together have it at once, others in the next outer step of the members.

        Raises:
            UserError: this site does not train the same as site 0.
        """
        token, site = self._token(), self.seat.site
        if self.leads:
            if self._has(f"left/{site}"):
                self._ask(self.store.delete_key, f"left/{site}")
            self._set(f"come/{site}", site=site, token=token, step=step, digest=digest, said=self.said)
            if self.hosts:
                self._gather_first()
        return self._meeting(f"seat/{token}", math.inf)

    def meet(self, step: int, attempt: int = 0) -> Meeting:
        """The meeting of a member after inner step `step`.

        Raises:
            UserError: the others have not waited for this site.
        """
        if self.leads:
            self._set(f"here/{step}/{attempt}/{self.seat.site}")
            if self.hosts:
                self._gather(step, attempt)
        meeting = self._meeting(f"members/{step}/{attempt}", self.inside.timeout_s)
        if self.seat.site not in meeting.members:
            raise UserError(
                f"site {self.seat.site} came too late to the outer step after inner step {step}: the others wait for "
                f"sync.patience = {self.patience_s:g} s, and have gone on. Resume this site to join again"
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
        index = meeting.members.index(self.seat.site)
        group = None
        if len(meeting.members) > 1:
            name = f"groups/{meeting.key}/{self.inside.index}"
            size, patience = len(meeting.members), self.patience_s
            try:
                group = gloo_group(self.store, name, index, size, self.address, patience)
            except RuntimeError as error:
                raise CommunicationError(f"site {self.seat.site} cannot reach the others: {error}") from error
        return Axis("sites", meeting.members, index, CPU, group, self.patience_s, watched=False)

    def vote(self, meeting: Meeting, received: bool) -> bool:
        """Says whether this rank received everything. Returns whether all ranks of all members did."""
        yes = torch.tensor(int(received), device=self.inside.device)
        self.inside.all_reduce(yes, "min")
        if self.leads:
            self._set(f"vote/{meeting.key}/{self.seat.site}", yes=bool(yes))
        if self.leads and self.hosts:
            voted = self._present(f"vote/{meeting.key}", meeting.members, 2 * self.patience_s)
            votes = [self._get(f"vote/{meeting.key}/{site}")["yes"] for site in voted]
            counts = len(voted) == len(meeting.members) and all(votes)
            self.members, self._new = voted, set() if counts else self._new & {*voted}
            self._set(f"outcome/{meeting.key}", counts=counts)
        return self._get(f"outcome/{meeting.key}")["counts"]

    def leave(self, complete: bool) -> None:
        """Ends this site's part. At the end of the run site 0 waits until the others have read what it wrote last."""
        self.inside.barrier()
        if not self.leads:
            return
        if self.hosts:
            self._present("left", [site for site in self.members if site and complete])
            return
        with suppress(CommunicationError):  # site 0 has waited long enough
            self._set(f"left/{self.seat.site}")

    # On site 0's first rank

    def _gather_first(self) -> None:
        """Waits for all sites to start. Those whose state differs from site 0's get it."""
        found = self._present("come", range(self.sites))
        wishes = {site: self._get(f"come/{site}") for site in found}
        own = wishes[0]
        fitting = [site for site in found if self._fits(wishes[site])]
        new = [site for site in fitting if any(wishes[site][key] != own[key] for key in ("step", "digest"))]
        self.members, self._new = tuple(fitting), {*new}
        for site in fitting:
            self._seat(site, wishes[site], Meeting(own["step"], True, 0, self.members, tuple(new)))

    def _gather(self, step: int, attempt: int) -> None:
        """Waits for the members, and adds the sites that ask to join."""
        present = self._present(f"here/{step}/{attempt}", self.members)
        joining = {site: wish for site, wish in self._wishes().items() if self._fits(wish)}
        members = tuple(sorted({*present, *joining}))
        self._new = {*joining, *(self._new & {*present})}
        meeting = Meeting(step, False, attempt, members, tuple(sorted(self._new)))
        self._set(f"members/{meeting.key}", **asdict(meeting))
        for site, wish in joining.items():
            self._seat(site, wish, meeting)

    def _wishes(self) -> dict[int, dict[str, Any]]:
        """By site, the wishes to join that have no answer yet."""
        asked = [site for site in range(1, self.sites) if self._has(f"come/{site}")]
        wishes = {site: self._get(f"come/{site}") for site in asked}
        return {site: wish for site, wish in wishes.items() if wish["token"] != self._tokens.get(site)}

    def _fits(self, wish: Mapping[str, Any]) -> bool:
        """True if a site that asks to join trains the same. Otherwise it is told why not."""
        said = {key: (wish["said"].get(key), value) for key, value in self.said.items()}
        other = [
            f"{key} = {theirs!r}, not {ours!r}" for key, (theirs, ours) in said.items() if theirs != ours
        ]
        if other:
            self._tokens[wish["site"]] = wish["token"]
            self._set(f"seat/{wish['token']}", refused=f"it does not fit site 0: {', '.join(other[:5])}")
        return not other

    def _seat(self, site: int, wish: Mapping[str, Any], meeting: Meeting) -> None:
        self._tokens[site] = wish["token"]
        self._set(f"seat/{wish['token']}", **asdict(meeting))

    def _present(self, key: str, sites: Iterable[int], wait_s: float | None = None) -> tuple[int, ...]:
        """Those of these sites that have written `key`. Waits for all of them, but not for those that have left or
        started again, and for `wait_s` at most (`patience_s` if not given)."""
        until = time.monotonic() + (self.patience_s if wait_s is None else wait_s)
        sites = [*sites]
        while True:
            here = tuple(site for site in sites if self._has(f"{key}/{site}"))
            gone = (
                {site for site in sites if self._has(f"left/{site}")} | {*self._wishes()}
                if self.members
                else ()
            )
            if {*here, *gone} >= {*sites} or time.monotonic() > until:
                return here
            time.sleep(POLL_S)

    # The store

    def _token(self) -> str:
        """A name for this start of the site, the same on all of its ranks."""
        number = torch.tensor(secrets.randbits(62), device=self.inside.device)
        return f"{int(self.inside.broadcast(number, 0)):x}"

    def _meeting(self, key: str, wait_s: float) -> Meeting:
        found = self._get(key, wait_s)
        if "refused" in found:
            raise UserError(f"site {self.seat.site} cannot join at {self.seat}: {found['refused']}")
        step, first, attempt = (found[name] for name in ("step", "first", "attempt"))
        return Meeting(step, first, attempt, tuple(found["members"]), tuple(found["new"]))

    def _get(self, key: str, wait_s: float | None = None) -> dict[str, Any]:
        """What a key says. Waits until it says something."""
        limit = self.inside.timeout_s if wait_s is None else wait_s
        until = time.monotonic() + limit
        while not self._has(key):
            if time.monotonic() > until:
                raise CommunicationError(f"site 0 at {self.seat} has not answered for {limit:g} s")
            time.sleep(POLL_S)
        try:
            return json.loads(self._ask(self.store.get, key))
        except UserError:
            raise
        except ValueError:
            raise UserError(
                f"a message to '{key}' is not understood; do all sites have the same {SECRET}?"
            ) from None

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
