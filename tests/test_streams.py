"""Work on several streams of a GPU is in order: the checker of traces sees what is not, and each wait of the program is
one that it would miss."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import stream_cases
from without_waits import RARE, TRACES, places

from fivefold_plan.trace import gpu

pytestmark = pytest.mark.skipif(bool(gpu.why_not()), reason=gpu.why_not())
MEASURES = "measures time only"
IO = "waits for a thread of I/O, which a trace does not have"
UNSEEN = "the update on the host reads what this waits for, and no trace counts its reads"
HOSTS = "processes and threads of the host wait for each other"
ELSEWHERE = {
    "fivefold_plan/bench/collectives.py _collectives.around wait": MEASURES,
    "fivefold_plan/bench/gpu/plain.py seconds_per_step synchronize": MEASURES,
    "fivefold_plan/bench/gpu/trials.py _trials wait": HOSTS,
    "fivefold_plan/bench/gpu/trials.py _start.end wait": HOSTS,
    "fivefold_plan/bench/hardware.py _wait synchronize": MEASURES,
    "fivefold_plan/bench/machine.py _seconds wait": MEASURES,
    "train/peak.py _measure synchronize": MEASURES,
    "checkpoint/write.py Background.wait_for_copy wait": "calls Copy.wait, which is tried",
    "checkpoint/write.py Background._run wait": HOSTS,
    "checkpoint/write.py Copy.wait wait": "on CPUs",
    "comm/axis.py Axis._post wait": "gloo's messages between GPUs, through host memory",
    "comm/membership.py Sealed.wait wait": HOSTS,
    "comm/membership.py Sealed.wait wait 2": HOSTS,
    "comm/progress.py Watch.follow.run wait": "on CPUs: a step is recorded on no GPU",
    "comm/watchdog.py Store.claim wait": HOSTS,
    "comm/watchdog.py Store._run wait": HOSTS,
    "data/stream.py Stream.whole wait": HOSTS,
    "data/stream.py Stream.stop wait": HOSTS,
    "data/stream.py open_stream wait": HOSTS,
    "launch/local.py launch wait": HOSTS,
    "launch/ranks.py _meet wait": HOSTS,
    "fivefold_play/commands.py Command.result wait": HOSTS,
    "fivefold_play/commands.py Command.stop wait": HOSTS,
    "fivefold_play/jobs.py Jobs.follow wait": HOSTS,
    "fivefold_play/talk.py Talker._read wait": HOSTS,
    "parallel/expert.py AllToAll.forward wait": "calls Leaving.wait, which is tried: here for padded messages",
    "parallel/offload/disk.py Disk.arrive wait": IO,
    "parallel/offload/pages.py Pages.free wait": "no step reads weights in vain",
    "parallel/offload/pages.py Pages.refresh wait": "not within a step",
    "parallel/offload/pages.py Pages.write wait": UNSEEN,
    "parallel/offload/pages.py Pages.written wait": UNSEEN,
    "parallel/offload/rows.py Rows.wait wait": "the host has waited",
    "parallel/offload/update.py StreamedUpdater.ready wait": IO,
    "parallel/offload/update.py StreamedUpdater.ready.done wait": IO,
    "parallel/offload/update.py StreamedUpdater.settle wait": IO,
    "parallel/pipeline.py _Run._clock synchronize": MEASURES,
    "train/instruments.py ProfileWatch.begin_step synchronize": MEASURES,
    "launch/ranks.py connect synchronize": "before the first step",
    "train/share.py reader.next_batch wait": HOSTS,
    "train/loop.py _Late._wait wait": "calls Done.wait, which is tried",
    "train/loop.py _Late._record record": "writes metrics",
    "fivefold_plan/bench/gpu/kernels.py in_triton record": "writes a ratio",
}
"""Calls that no trace needs, and why."""
STOPS = {"parallel/expert.py _wait_for_all wait", "parallel/offload/disk.py Disk.start record_event"}
"""Calls that give what the trace needs. Their waits are tried as those for messages."""
UNHEARD = {"parallel/pipeline.py _Run._wait_for_sends": "bounds the memory of sends under way"}
"""Waits for messages that no trace needs, and why."""
FEW = [
    "checkpoint/write.py Copy.__init__ wait_stream",
    "checkpoint/write.py Copy.run synchronize",
    "comm/execute.py Beside.start record_stream",
    "parallel/diloco.py Outer._start.wait record_stream",
    "parallel/zero.py UnitMessages.sum_replicas record_stream",
    "step/step.py moment record",
]
"""Those that `make test` tries."""


def answers(script: str, given: object = None) -> str:
    """What a script prints in a process of its own that stands for a GPU."""
    done = subprocess.run(
        [sys.executable, script, *gpu.libraries()],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def without(tried: list[str]) -> dict[str, Any]:
    """What is found without each of these calls: races, or the words of the error that ended the trace."""
    return dict(zip(tried, map(json.loads, answers("without_waits.py", tried).splitlines()), strict=True))


def test_small_programs() -> None:
    found, wrong = json.loads(answers("stream_cases.py").splitlines()[-1]), {}
    for name, (expected, races, _) in stream_cases.CASES.items():
        right = isinstance(found[name], dict) and sum(found[name].values()) == races
        if not right or expected not in str(found[name]):
            wrong[name] = found[name]
    assert not wrong
    assert found["heard"] == ["device"], "what a trace hears behind the step"


@pytest.fixture(scope="module")
def quick(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What one process finds for the two tests of `make test`, or for the one of them that runs."""
    run, tried = {getattr(item, "obj", None) for item in request.session.items}, list[str]()
    if test_the_program_as_it_is_has_no_race in run:
        tried += {trace: file for file, trace in TRACES.items()}.values()  # some share a trace
    if test_waits_that_are_missed in run:
        tried += FEW
    return without(tried)


def test_the_program_as_it_is_has_no_race(quick: dict[str, Any]) -> None:
    found = {file: races for file, races in quick.items() if file not in FEW}
    assert {TRACES[file] for file in found} == {*TRACES.values()}
    assert not any(found.values()), found


def test_waits_that_are_missed(quick: dict[str, Any]) -> None:
    found = [quick[place] for place in FEW]
    assert all(isinstance(races, dict) and races for races in found), found


@pytest.mark.slow
def test_every_wait_is_missed() -> None:
    """Or listed, with a reason; the list has nothing that is."""
    tried = [place for place in places() if place.split()[0] in TRACES]
    rare = [f"parallel/offload/pages.py {function}" for function in RARE]
    found = without([*rare, *tried])
    assert not any(found[place] for place in rare), "as they are"
    assert {place for place in tried if isinstance(found[place], str)} == STOPS
    assert {place for place in tried if not found[place]} == {place for place in tried if place in ELSEWHERE}


@pytest.mark.parametrize(
    "files",
    [["parallel/expert.py", "parallel/data.py"], pytest.param(sorted(TRACES), marks=pytest.mark.slow)],
    ids=["few", "all"],
)
@pytest.mark.slow
def test_every_message_is_waited_for(files: list[str]) -> None:
    """Line by line, also where what waits is handed on. One trace of a line that finds a race is enough: in another a
    later wait for the same stream may do."""
    lines, heard = set[str](), set[str]()
    for answer in without([f"{file} messages" for file in files]).values():
        assert all(isinstance(races, dict) for races in answer.values()), answer
        lines |= answer.keys()
        heard |= {line for line, races in answer.items() if races}
    assert len(lines) >= 8
    missed = {re.sub(r":\d+", "", line.split(" < ")[0]) for line in lines - heard}
    assert missed == {name for name in UNHEARD if name.split()[0] in files}


def test_the_list_of_other_waits() -> None:
    known = set(places())
    assert set(FEW) <= known
    assert set(ELSEWHERE) <= known, "no such call"
    assert {place for place in known if place.split()[0] not in TRACES} <= set(ELSEWHERE), "nothing tries it"
