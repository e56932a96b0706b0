"""The long form of the chaos tests. Kills, elastic runs and layouts go in pieces: each call continues the last one.

    python tests/chaos/run.py kills --number 300 --seed 1 --seconds 200
    python tests/chaos/run.py elastic --number 10
    python tests/chaos/run.py damage --number 1000
    python tests/chaos/run.py soak --number 5000
    python tests/chaos/run.py layouts

Results are in benchmarks/results/chaos_kills.json and the like.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
RESULTS = HERE.parent.parent / "benchmarks" / "results"
NUMBERS = {"kills": 100, "elastic": 10, "damage": 1000, "soak": 5000, "layouts": 0}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=NUMBERS)
    parser.add_argument("--number", type=int, help="kills, damages, steps, or runs")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1e9, help="no new trial begins after so many")
    parser.add_argument(
        "--first", type=int, default=0, help="kills: number of the first trial, by which its layout goes"
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leaves no process behind
    number, seed = options.number or NUMBERS[options.what], options.seed
    command = f"python tests/chaos/run.py {options.what} --number {number} --seed {seed}"
    command += f" --first {options.first}" if options.first else ""
    path = options.results / f"chaos_{options.what}.json"
    folder = Path(tempfile.gettempdir(), "fivefold-chaos")
    folder.mkdir(exist_ok=True)
    if options.what == "kills":
        return kills(path, command, number, (seed, options.first), options.seconds, folder)
    if options.what == "elastic":
        import elastic

        trial = partial(elastic.trial, seed, folder=folder)
        return pieces(
            path, command, options.seconds, lambda runs: len(runs) >= number, trial, elastic.figures
        )
    if options.what == "layouts":
        return layouts(path, command, options.seconds)
    found = damages(number, seed) if options.what == "damage" else soak(number, folder)
    path.write_text(json.dumps({"command": command, "figures": found}, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    return int(bool(found.get("accepted")))


def kills(
    path: Path, command: str, number: int, trials: tuple[int, int], seconds: float, folder: Path
) -> int:
    """trials: seed, and number of the first one."""
    import kills

    seed, first = trials

    return pieces(
        path,
        command,
        seconds,
        lambda runs: sum(len(run["kills"]) for run in runs) >= number,
        lambda trial: kills.trial(seed, first + trial, folder),
        kills.figures,
    )


def damages(number: int, seed: int) -> dict[str, Any]:
    """How many damages were found, and what came of them."""
    from damage import Harness, count
    from test_power import TINY

    from fivefold.recipe import load

    with tempfile.TemporaryDirectory(prefix="fivefold-chaos-") as name:
        text = Path(name, "text.txt")
        text.write_text("".join(f"{i} and {i * i % 89}; " for i in range(300)))
        sets = [*TINY, f"data.source={text}", f"data.cache={name}/cache"]
        harness = Harness(load("quickstart", sets), Path(name))
        found = [harness.damaged(one, seed) for one in range(number)]
    accepted = [f"{kind}: {outcome}" for kind, outcome in found if outcome.startswith("accepted")]
    return {"damages": number, "found": number - len(accepted), "accepted": accepted, "by_kind": count(found)}


def soak(steps: int, folder: Path) -> dict[str, Any]:
    import soak

    return soak.soak(steps, folder)


def layouts(path: Path, command: str, seconds: float) -> int:
    import pairs

    def row(number: int) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix="fivefold-chaos-") as name:
            return pairs.row(number, Path(name))

    rows = len(pairs.LAYOUTS) + len(pairs.EXPERTS)
    return pieces(path, command, seconds, lambda runs: len(runs) >= rows, row, pairs.figures)


def pieces(
    path: Path,
    command: str,
    seconds: float,
    enough: Callable[[list[dict[str, Any]]], bool],
    trial: Callable[[int], dict[str, Any]],
    figures: Callable[[list[dict[str, Any]]], dict[str, Any]],
) -> int:
    """Runs trials until there are enough, or the time is over. Returns 3 if more are needed, 1 if one failed."""
    from kills import commit

    began = time.monotonic()
    found = json.loads(path.read_text()) if path.exists() else {"runs": []}
    if found.get("command") != command:
        found = {"runs": []}
    runs = found["runs"]
    while not enough(runs) and time.monotonic() - began < seconds:
        runs.append(trial(len(runs)) | {"commit": commit()})
        print(json.dumps(runs[-1]), flush=True)
        text = json.dumps({"command": command, "figures": figures(runs), "runs": runs}, indent=1)
        path.write_text(text + "\n")
    print(json.dumps(figures(runs), indent=1))
    return 3 if not enough(runs) else int(any("lost" in run for run in runs))


if __name__ == "__main__":
    sys.exit(main())
