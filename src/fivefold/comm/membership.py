"""Replica groups that start, fail and return by themselves: who takes part in an outer step, and the axis between them.

Each is a launch of its own, with its own process groups. They know each other only through a TCP store, which group 0
serves at an address that all are given. So group 0 must stay; any other may end, hang or return at any time.

A **meeting** is one outer step. Its attempts are numbered:

1. Members say that they are here. Group 0 waits for them, adds those that ask to join, and writes who is a member now.
   Who comes later is left out, and may join again.
2. Members make process groups of this attempt, and send what they have to. A newcomer gets the common state.
3. Each rank votes whether it received everything. Only if all have, the step counts. Otherwise the groups whose ranks
   have voted meet for another attempt.

So they always agree on what the common weights are, whenever one is lost. All waiting times form one chain (`Waits`).

Keys name groups, not meetings, so the store stays small. A value says of which meeting it is (`Meeting.at`), and is
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
class Endpoint:
    """This launch's group in a run of several launches. group: its number. host, port: where group 0 serves the
    store."""

    group: int
    host: str
    port: int

    @classmethod
    def parse(cls, group: int, address: str) -> Endpoint:
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise UserError(
                f"--meet {address}: it must be HOST:PORT, where replica group 0 can be reached, as node0:29600"
            )
        return cls(group, host.strip("[]"), int(port))

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def options(self) -> tuple[str, ...]:
        """The options of `fivefold train` that name it."""
        return "--replica-group", str(self.group), "--meet", str(self)


class Waits:
    """How long each one waits when groups meet, in seconds. The times form one chain: each wait is longer than the
    waits that it waits for. So no values of the fields let the loss of a group end another one. patience:
    `sync.patience`, of group 0 for members, for making a process group between them, and for each message over it.
    timeout: `launch.timeout`, for what the ranks of a group do at about the same time."""

    def __init__(self, patience: float, timeout: float):
        self.patience, self.timeout = patience, timeout
        self.members = patience + timeout  # for group 0 to say who is a member
        self.exchange = 2 * patience  # of group 0 for others' votes: a late group, then a message that fails
        self.inside = self.exchange + timeout  # of group 0 for votes of its own ranks, without which it ends
        self.outcome = self.inside + self.exchange  # for group 0 to say whether the step counts


@dataclass(frozen=True)
class Meeting:
    """An attempt of an outer step. step: the inner step after which it is; the members' first meeting has none, and is
    about state only (`first`). members: the groups that take part. new: those of them that bring nothing, and
    need the common state."""

    step: int
    first: bool
    attempt: int
    members: tuple[int, ...]
    new: tuple[int, ...]

    @property
    def giving(self) -> tuple[int, ...]:
        """The members that bring an outer gradient."""
        return tuple(group for group in self.members if group not in self.new)

    @property
    def at(self) -> list[int]:
        """Grows from meeting to meeting."""
        return [self.step, self.attempt]


class Membership:
    """One rank's part of a group's membership. inside: the axis of all ranks of the group, whose
    time-out is `launch.timeout`. patience_s: `sync.patience`. said: what all groups must have in common, by
    name.

    Raises:
        UserError: the address cannot be served.
        BusyError: it does not answer.
    """

    def __init__(
        self, endpoint: Endpoint, groups: int, inside: Axis, patience_s: float, said: Mapping[str, Any]
    ):
        self.endpoint, self.groups, self.inside, self.said = endpoint, groups, inside, said
        self.waits = Waits(patience_s, inside.timeout_s)
        self.leads, self.hosts = inside.index == 0, endpoint.group == 0
        self.members: tuple[int, ...] = ()  # whom group 0 waits for
        self._new: set[int] = set()  # those of them that have no common state yet
        self._tokens: dict[int, str] = {}  # the starts of groups that group 0 has answered
        where, serves = (endpoint.host, endpoint.port), self.hosts and self.leads
        wait_s = min(60.0, self.waits.timeout) if self.hosts else self.waits.patience
        try:  # it serves at this address only
            alone = endpoint.host in LOOPBACK
            at = launchers.listening(*where, alone) if serves else launchers.wait_for(*where, wait_s)
            wait = timedelta(seconds=wait_s)
            store = dist.TCPStore(*where, None, serves, wait, wait_for_workers=False, master_listen_fd=at)
        except RuntimeError as error:
            kind, why = (
                (UserError, "cannot serve the others") if serves else (BusyError, "finds no replica group 0")
            )
            text = str(error).splitlines()[0][:200]
            raise kind(f"replica group {endpoint.group} {why} at {endpoint}: {text}") from None
        store.set_timeout(timedelta(seconds=self.waits.timeout))
        self.store = Sealed(store)
        self.address = launchers.own_address(endpoint.host)  # group 0 answers: there is a way to it

    def come(self, step: int, digest: str) -> Meeting:
        """Asks to join, after inner step `step`, with a common state of this digest. Returns the first meeting: groups
        that start together have it at once, others in the next outer step of the members. Raises UserError: this group
        does not train the same as group 0."""
        number = torch.tensor(secrets.randbits(62), device=self.inside.device)  # of this start, on all ranks
        token, group = f"{int(self.inside.broadcast(number, 0)):x}", self.endpoint.group
        if self.leads:
            self._ask(self.store.delete_key, f"left/{group}")
            wish = {"group": group, "token": token, "step": step, "digest": digest, "said": self.said}
            self._set(f"come/{group}", at=None, **wish)
            if self.hosts:  # waits for all to start; those whose state differs from group 0's get it
                wishes = {
                    group: self._read(f"come/{group}") for group in self._present("come", range(self.groups))
                }
                wishes = {group: wish for group, wish in wishes.items() if self._fits(wish)}
                state = [wishes[0]["step"], wishes[0]["digest"]]
                new = [group for group, wish in wishes.items() if [wish["step"], wish["digest"]] != state]
                self.members, self._new = tuple(wishes), {*new}
                for other, wish in wishes.items():
                    self._answer(other, wish, Meeting(wishes[0]["step"], True, 0, self.members, tuple(new)))
        return self._meeting(f"answer/{group}", math.inf, lambda found: found["token"] == token)

    def meet(self, step: int, attempt: int = 0) -> Meeting:
        """The meeting of a member after inner step `step`. Raises BusyError: the others have not waited for this
        group."""
        at = [step, attempt]
        if self.leads:
            self._set(f"here/{self.endpoint.group}", at=at)
            if self.hosts:  # waits for the members, and adds the groups that ask to join
                present = self._present("here", self.members, at)
                joining = {group: wish for group, wish in self._wishes().items() if self._fits(wish)}
                members = tuple(sorted({*present, *joining}))
                self._new = {*joining, *(self._new & {*present})}
                meeting = Meeting(step, False, attempt, members, tuple(sorted(self._new)))
                self._set("members", at=meeting.at, **asdict(meeting))
                for group, wish in joining.items():
                    self._answer(group, wish, meeting)
        meeting = self._meeting("members", self.waits.members, lambda found: found["at"] >= at)
        if meeting.at != at or self.endpoint.group not in meeting.members:
            raise BusyError(
                f"replica group {self.endpoint.group} came too late to the outer step after inner step "
                f"{step}: the others wait for sync.patience = {self.waits.patience:g} s, and have gone on. Resume this "
                "replica group to join again"
            )
        return meeting

    def again(self, meeting: Meeting) -> Meeting:
        """Another attempt of a meeting that did not count."""
        if not meeting.first:
            return self.meet(meeting.step, meeting.attempt + 1)
        raise CommunicationError(
            f"the replica groups {meeting.members} lost each other at their first meeting"
        )

    def axis(self, meeting: Meeting) -> Axis:
        """The axis of this rank and its counterparts in the other members, over gloo on CPUs. Raises
        CommunicationError: one of them does not answer."""
        index, made = meeting.members.index(self.endpoint.group), None
        if len(meeting.members) > 1:
            name = f"groups/{meeting.step}/{meeting.attempt}/{self.inside.index}"
            size, patience = len(meeting.members), self.waits.patience
            try:
                made = gloo_group(self.store, name, index, size, self.address, patience)
            except RuntimeError as error:
                raise CommunicationError(
                    f"replica group {self.endpoint.group} cannot reach the others: {error}"
                ) from error
        return Axis("replica_groups", meeting.members, index, CPU, made, self.waits.patience, watched=False)

    def vote(self, meeting: Meeting, received: bool) -> bool:
        """Says whether this rank received everything. Returns whether all ranks of all members did."""
        self._set(f"vote/{self.endpoint.group}/{self.inside.index}", at=meeting.at, yes=received)
        if self.leads and self.hosts:
            self._count(meeting)
        found = self._get("outcome", self.waits.outcome, lambda found: found["at"] >= meeting.at)
        with suppress(CommunicationError):  # group 0 may have left since
            self._ask(self.store.forget, "groups/")
        return found["at"] == meeting.at and found["counts"]

    def leave(self, complete: bool) -> None:
        """Ends this group's part. At the end of the run group 0 waits until the others have read what
        it wrote last."""
        self.inside.barrier()
        if self.leads and self.hosts:
            self._present("left", [group for group in self.members if group and complete])
        elif self.leads:
            with suppress(CommunicationError):  # group 0 has waited long enough
                self._set(f"left/{self.endpoint.group}", at=None)

    # On group 0's first rank

    def _count(self, meeting: Meeting) -> None:
        """Waits for the votes, and writes whether the step counts."""
        if not self._present("vote", [0], meeting.at, self.waits.inside):
            raise CommunicationError(f"ranks of replica group 0 have not voted for {self.waits.inside:g} s")
        voted = self._present("vote", meeting.members, meeting.at, self.waits.exchange)
        votes = [self._read(key)["yes"] for group in voted for key in self._keys("vote", group)]
        counts = len(voted) == len(meeting.members) and all(votes)
        self.members, self._new = voted, set() if counts else self._new & {*voted}
        self._set("outcome", at=meeting.at, counts=counts)

    def _wishes(self) -> dict[int, dict[str, Any]]:
        """By group, the wishes to join that have no answer yet."""
        asked = {group: self._read(f"come/{group}") for group in range(1, self.groups)}
        return {group: one for group, one in asked.items() if one and one["token"] != self._tokens.get(group)}

    def _fits(self, wish: Mapping[str, Any]) -> bool:
        """True if a group that asks to join trains the same. Otherwise it is told why not."""
        theirs = wish["said"]
        other = [
            f"{k} = {theirs.get(k)!r}, not {own!r}" for k, own in self.said.items() if theirs.get(k) != own
        ]
        if other:
            self._tokens[wish["group"]] = wish["token"]
            text = f"it does not fit replica group 0: {', '.join(other[:5])}"
            self._set(f"answer/{wish['group']}", token=wish["token"], refused=text)
        return not other

    def _answer(self, group: int, wish: Mapping[str, Any], meeting: Meeting) -> None:
        self._tokens[group] = wish["token"]
        self._set(f"answer/{group}", token=wish["token"], **asdict(meeting))

    def _present(
        self, kind: str, groups: Sequence[int], at: list[int] | None = None, wait_s: float | None = None
    ) -> tuple[int, ...]:
        """Those of these groups that have written their keys of this kind, for the meeting `at`. Waits for all,
        but not for groups that have left or started again, and for `wait_s` at most (`sync.patience` if not
        given)."""
        until = time.monotonic() + (self.waits.patience if wait_s is None else wait_s)
        while True:
            said = {group: [self._read(key) for key in self._keys(kind, group)] for group in groups}
            here = tuple(s for s, every in said.items() if all(one.get("at", ()) == at for one in every))
            left = [group for group in groups if self._has(f"left/{group}")]
            gone = {*left, *self._wishes()} if self.members else ()
            if {*here, *gone} >= {*groups} or time.monotonic() > until:
                return here
            time.sleep(POLL_S)

    # The store

    def _keys(self, kind: str, group: int) -> list[str]:
        """Each rank of a group votes; otherwise its first one speaks for it."""
        ranks = [f"/{rank}" for rank in range(self.inside.size)] if kind == "vote" else [""]
        return [f"{kind}/{group}{rank}" for rank in ranks]

    def _meeting(self, key: str, wait_s: float, fits: Fits) -> Meeting:
        found = self._get(key, wait_s, fits)
        if "refused" in found:
            raise UserError(
                f"replica group {self.endpoint.group} cannot join at {self.endpoint}: {found['refused']}"
            )
        step, first, attempt = (found[name] for name in ("step", "first", "attempt"))
        return Meeting(step, first, attempt, tuple(found["members"]), tuple(found["new"]))

    def _get(self, key: str, wait_s: float, fits: Fits) -> dict[str, Any]:
        """What a key says. Waits until it says what fits."""
        until = time.monotonic() + wait_s
        while not ((found := self._read(key)) and fits(found)):
            if time.monotonic() > until:
                raise CommunicationError(
                    f"replica group 0 at {self.endpoint} has not answered for {wait_s:g} s"
                )
            time.sleep(POLL_S)
        return found

    def _read(self, key: str) -> dict[str, Any]:
        """What a key says now; empty: nothing."""
        if not self._has(key):
            return {}
        try:
            return json.loads(self._ask(self.store.get, key))
        except (json.JSONDecodeError, UnicodeDecodeError):
            text = f"a message to '{key}' is not understood; do all replica groups have the same {SECRET}?"
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
            reason = str(error).splitlines()[0][:200]
            raise CommunicationError(
                f"replica group {self.endpoint.group}: replica group 0 at {self.endpoint} has ended, or cannot "
                f"be reached. The store said: {reason}"
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
        """The value of a key. Raises UserError: who wrote it does not know the secret."""
        found = self.store.get(key)
        size = len(self._code(key, b""))
        code, content = found[:size], found[size:]
        if not hmac.compare_digest(code, self._code(key, content)):
            raise UserError(
                f"a message to '{key}' was not written with our {SECRET}. All replica groups need the same one; or "
                "somebody else writes there"
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
