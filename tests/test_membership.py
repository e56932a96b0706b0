"""Replica groups that are launches of their own: one dies in the middle of an outer step, the other goes on, and it
returns."""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import stored
import torch
import torch.distributed as dist
from layouts import tiny
from pool_runs import assert_close_tensors, assert_same_tensors, lines
from ranks import PATIENCE, _servers, run_ranks
from test_replica_groups import resolved, simulated

from fivefold.checkpoint import store
from fivefold.cli.train import endpoint_of
from fivefold.comm import ALONE, Axis
from fivefold.comm.membership import SECRET, Endpoint, Meeting, Membership, Waits
from fivefold.data import prepare
from fivefold.errors import BusyError, CommunicationError, UserError
from fivefold.launch.ranks import Ranks
from fivefold.recipe import Recipe, change
from fivefold.train import run as running
from fivefold.train.job import Initial, Job, write_initial

FITS = {"model.dim": 8}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def launch(recipe: Recipe, out: Path, endpoint: Endpoint, resume: bool, dead: Path, dies: bool) -> None:
    """Trains a replica group. dies: it ends without a word in its second outer step. Replica group 0 is patient until
    then, and after step 10 waits until the other wants to join again, so that the test does not depend on who is
    faster."""
    from fivefold.parallel.diloco import Outer
    from fivefold.train import loop
    from fivefold.train.run import run_rank

    torch.set_num_threads(1)
    take_step, means = loop.take_step, Outer._means

    def step(state, *arguments):
        if endpoint.group == 0 and state.step == 10:
            dead.with_name("alone").touch()
            while not state.outer.membership._wishes():
                time.sleep(0.02)
            state.outer.membership.waits = Waits(recipe.sync.patience, 60)
        return take_step(state, *arguments)

    def dying(self, flats, axis, count):
        if flats:  # not the first meeting
            calls.append(count)
        if len(calls) == 2 and dies:
            while not store.checkpoints(out):  # of step 3, which may still be under way
                time.sleep(0.02)
            dead.touch()
            os._exit(9)
        while len(calls) == 2 and not dead.exists():
            time.sleep(0.02)
        if len(calls) == 2:
            self.membership.waits = Waits(0.2, 60)  # for its vote
        return means(self, flats, axis, count)

    calls: list[int] = []
    if not resume:
        loop.take_step, Outer._means = step, dying
    run_rank(
        Job(recipe, out, prepare(recipe), resume=resume, endpoint=endpoint),
        Ranks(0, 1, 0, 1, torch.device("cpu")),
    )


def started(*arguments):
    process = _servers.Process(target=launch, args=arguments, daemon=True)
    process.start()
    return process


def test_a_replica_group_dies_and_returns(tmp_path: Path) -> None:
    """It is lost while sums are under way: the other tries again alone. Started again, it resumes its moments of step
    3, takes the common weights of step 12, and both end with the same. Equal to a simulation."""
    sets = ["sync.method=diloco", "sync.every=3", "sync.patience=20", "train.steps=15", "checkpoint.every=3"]
    more = ["checkpoint.keep_last=9", "optim.eps=1e-4", "observe.tracker=none", "train.val_every=15"]
    recipe = resolved(tmp_path, "dp=2", *sets, *more)
    endpoints, dead = (
        [Endpoint(replica_group, "127.0.0.1", free_port()) for replica_group in (0, 0)],
        tmp_path / "dead",
    )
    endpoints = [endpoints[0], Endpoint(1, endpoints[0].host, endpoints[0].port)]
    outs = [tmp_path / f"replica_group{replica_group}" for replica_group in (0, 1)]
    first, lost = (
        started(recipe, out, endpoint, False, dead, endpoint.group == 1)
        for out, endpoint in zip(outs, endpoints, strict=True)
    )
    lost.join(60 * PATIENCE)
    assert lost.exitcode == 9
    while first.is_alive() and not (tmp_path / "alone").exists():
        time.sleep(0.02)
    again = started(recipe, outs[1], endpoints[1], True, dead, False)
    for process in (first, again):
        process.join(60 * PATIENCE)
        assert process.exitcode == 0
    ends = [stored.load(store.folder_of(out, 15)) for out in outs]
    assert_same_tensors(ends[0].model, ends[1].model)
    names = [name for name in ends[0].optimizer if name.startswith("outer.")]
    assert names
    for name in names:
        assert torch.equal(ends[0].optimizer[name], ends[1].optimizer[name]), name
    assert len(lines(outs[0], "loss")) == 15
    assert lines(outs[0], "val_loss")[-1] == lines(outs[1], "val_loss")[-1], "of all validation sequences"
    wanted = simulated(recipe, 2, 15, away=lambda replica_group, step: replica_group == 1 and 3 <= step < 12)
    assert_close_tensors(ends[0].model, wanted["common"])


def member(
    port: int, replica_group: int, replica_groups: int = 2, patience_s: float = 20.0, **said: object
) -> Membership:
    return Membership(
        Endpoint(replica_group, "127.0.0.1", port), replica_groups, ALONE, patience_s, FITS | said
    )


def beside(function, *arguments) -> tuple[threading.Thread, list]:
    """Runs a function in a thread. The list gets its result or its error."""
    found: list = []

    def run() -> None:
        try:
            found.append(function(*arguments))
        except (UserError, CommunicationError) as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, found


def test_who_is_a_member() -> None:
    """Two replica groups meet, one is lost and returns: it is new until an attempt counts. One with another recipe is
    refused, one that comes too late is left out, and a member learns that replica group 0 has ended."""
    port = free_port()
    zero, one = member(port, 0), member(port, 1)
    thread, came = beside(one.come, 0, "same")
    assert zero.come(0, "same") == Meeting(0, True, 0, (0, 1), ())
    thread.join(20)
    assert came == [Meeting(0, True, 0, (0, 1), ())]

    other = member(
        port, 1, **{"model.dim": 9}
    )  # replica group 1 starts again, which replica group 0 does not wait for
    thread, came = beside(other.come, 0, "same")
    while not zero._wishes():
        time.sleep(0.01)
    assert zero.meet(3).members == (0,)
    thread.join(20)
    assert str(came[0]).endswith("it does not fit replica group 0: model.dim = 9, not 8")

    thread, came = beside(member(port, 1).come, 0, "another")
    while not zero._wishes():
        time.sleep(0.01)
    assert zero.meet(6) == Meeting(6, False, 0, (0, 1), (1,))
    thread.join(20)
    assert came == [Meeting(6, False, 0, (0, 1), (1,))]
    assert came[0].giving == (0,)
    zero.waits = Waits(0.1, 60)
    assert not zero.vote(Meeting(6, False, 0, (0, 1), (1,)), True), "replica group 1 does not vote"
    assert zero.meet(6, 1) == Meeting(6, False, 1, (0,), ())
    assert zero.vote(Meeting(6, False, 1, (0,), ()), True)
    with pytest.raises(BusyError, match="replica group 1 came too late to the outer step after inner step 6"):
        one.meet(6, 1)
    assert zero.meet(9).members == (0,)
    with pytest.raises(BusyError, match=r"too late .* Resume this replica group to join again"):
        one.meet(6, 1)


def outer_step(member: Membership, step: int) -> bool:
    meeting = member.meet(step)
    member.axis(meeting).all_reduce(torch.ones(1))
    return member.vote(meeting, True)


def test_the_store_stays_as_small_as_it_is() -> None:
    port, keys = free_port(), []
    zero, one = member(port, 0), member(port, 1)
    thread, _ = beside(one.come, 0, "same")
    zero.come(0, "same")
    thread.join(20)
    for step in range(1, 7):
        thread, counts = beside(outer_step, one, step)
        assert outer_step(zero, step)
        thread.join(20)
        assert counts == [True]
        keys.append(zero.store.store.num_keys())
    assert keys[1] == keys[5], keys


def loses_a_replica_group(rank: int, world: int, port: int) -> Any:
    """A rank of replica group 0. Replica group 1 comes, and is lost before it votes; then nothing is heard of it in a
    meeting."""
    inside = Axis("all", [*range(world)], rank, torch.device("cpu"), dist.group.WORLD, 0.3 * PATIENCE)
    if rank:
        inside.barrier()  # so that replica group 0 serves already
    mine = Membership(Endpoint(0, "127.0.0.1", port), 2, inside, 0.6 * PATIENCE, FITS)
    if not rank:
        inside.barrier()
        beside(member(port, 1).come, 0, "same")
    first = mine.come(0, "same")
    counted, mine.members = mine.vote(first, True), first.members
    second = mine.meet(3)
    inside.barrier()  # rank 0 serves until both have read this
    return first.members, counted, second.members


def test_a_lost_replica_group_ends_no_rank_whose_own_time_out_is_shorter() -> None:
    """The ranks of a replica group wait for one another for longer than their first one waits for other replica
    groups."""
    assert run_ranks(2, loses_a_replica_group, free_port()) == [((0, 1), False, (0,))] * 2


def test_a_secret_that_the_replica_groups_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it nobody makes a replica group believe anything: neither who is a member, nor where gloo listens."""
    monkeypatch.setenv(SECRET, "of both replica groups, and long")
    port = free_port()
    zero, one = member(port, 0), member(port, 1)
    thread, came = beside(one.come, 0, "same")
    meeting = zero.come(0, "same")
    thread.join(20)
    assert came == [meeting]
    thread, axes = beside(one.axis, meeting)  # gloo reads the sealed store, too
    mine = zero.axis(meeting)
    thread.join(20)
    thread, done = beside(axes[0].all_reduce, torch.ones(2))
    mine.all_reduce(found := torch.ones(2))
    thread.join(20)
    assert len(done) == 1
    assert found.tolist() == [2.0, 2.0]

    monkeypatch.delenv(SECRET)
    stranger = member(port, 1)
    stranger._set("members", at=[3, 0], step=3, first=False, attempt=0, members=[0], new=[])
    with pytest.raises(UserError, match=f"'members' was not written with our {SECRET}"):
        zero._read("members")
    zero._set("members", at=[4, 0], step=4, first=False, attempt=0, members=[0], new=[])
    with pytest.raises(UserError, match=f"not understood; do all replica groups have the same {SECRET}"):
        stranger._read("members")
    monkeypatch.setenv(SECRET, "short")
    with pytest.raises(UserError, match="5 characters; use at least 16"):
        member(port, 1)


def test_replica_groups_compare_contents_not_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights to start from, and folders for what is offloaded, may lie elsewhere on each machine."""

    def said(place: str, weights: str | None, *sets: str, fresh: bool = True) -> dict[str, Any]:
        found: dict[str, Any] = {}
        monkeypatch.setattr(running, "Membership", lambda *arguments: found.update(arguments[-1]))
        alone = SimpleNamespace(axis=lambda name: ALONE)
        state: Any = SimpleNamespace(mesh=alone, step=0, outer=SimpleNamespace(join=lambda *arguments: 0))
        sets = (f"train.init_from={place}", f"layout.offload_dir={place}", *sets)
        first = Initial(place, "", weights) if weights and fresh else None
        recipe = change(tiny(tmp_path, "dp=2"), ["sync.method=diloco", *sets])
        running.join(
            state, Job(recipe, tmp_path / place, endpoint=Endpoint(1, "node0", 29600), initial=first)
        )
        return found

    ours = said("here", "a hash")
    assert said("there", "a hash") == ours
    assert said("there", "other weights") != ours
    assert said("there", "a hash", "optim.lr=0.5") != ours
    write_initial(tmp_path / "resumed", Initial("there", "", "a hash"))
    assert said("resumed", "a hash", fresh=False) == ours, (
        "a replica group that resumes knows it from its run folder"
    )


def test_options(tmp_path: Path) -> None:
    recipe = change(tiny(tmp_path, "dp=2"), ["sync.method=diloco"])
    assert endpoint_of(recipe, None, None) is None
    assert endpoint_of(recipe, 1, "node0:29600") == Endpoint(1, "node0", 29600)
    for sets, replica_group, address, words in (
        ([], 1, None, "go together"),
        ([], 2, "node0:29600", "the recipe has 2, 0 to 1. Nearest valid: 1"),
        ([], 1, "node0", "--meet node0: it must be HOST:PORT"),
        (["sync.overlap=2"], 1, "node0:29600", "Nearest valid: sync.overlap = 0"),
        (["sync.method=all", "sync.overlap=0"], 0, "node0:29600", "the recipe has one. Add"),
    ):
        with pytest.raises(UserError, match=words):
            endpoint_of(change(recipe, sets), replica_group, address)
    with pytest.raises(UserError, match=r"patience = 1e\+30: must be a number > 0 and <= 10000000"):
        change(recipe, ["sync.patience=1e30"])
    with pytest.raises(BusyError, match="replica group 1 finds no replica group 0 at"):
        member(free_port(), 1, patience_s=0.2)


def test_a_group_waits_for_an_address_that_nobody_knows_yet() -> None:
    with pytest.raises(BusyError, match=r"replica group 1 finds no replica group 0 at nobody\.invalid:1"):
        Membership(Endpoint(1, "nobody.invalid", 1), 2, ALONE, 0.2, FITS)
