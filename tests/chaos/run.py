"""The long form of the chaos tests, in pieces: each call goes on where the last one ended.

    python tests/chaos/run.py kills --number 300 --seed 1 --seconds 200

Results are merged into benchmarks/results/chaos_kills.json and the like.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
RESULTS = HERE.parent.parent / "benchmarks" / "results"


def main() -> int:
    import kills

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["kills"])
    parser.add_argument("--number", type=int, default=100, help="kills")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1e9, help="no new trial begins after so many")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    command = f"python tests/chaos/run.py {options.what} --number {options.number} --seed {options.seed}"
    folder = Path(tempfile.gettempdir(), "fivefold-chaos")
    folder.mkdir(exist_ok=True)
    return pieces(
        options.results / f"chaos_{options.what}.json",
        command,
        options.seconds,
        lambda runs: sum(len(run["kills"]) for run in runs) >= options.number,
        lambda number: kills.trial(options.seed, number, folder),
        kills.figures,
    )


def pieces(
    path: Path,
    command: str,
    seconds: float,
    enough: Callable[[list[dict[str, Any]]], bool],
    trial: Callable[[int], dict[str, Any]],
    figures: Callable[[list[dict[str, Any]]], dict[str, Any]],
) -> int:
    """Runs trials until there are enough, or the time is over. Returns 3 if more are needed, 1 if one failed."""
    began = time.monotonic()
    found = json.loads(path.read_text()) if path.exists() else {"runs": []}
    if found.get("command") != command:
        found = {"runs": []}
    runs = found["runs"]
    while not enough(runs) and time.monotonic() - began < seconds:
        runs.append(trial(len(runs)))
        print(json.dumps(runs[-1]), flush=True)
        text = json.dumps({"command": command, "figures": figures(runs), "runs": runs}, indent=1)
        path.write_text(text + "\n")
    print(json.dumps(figures(runs), indent=1))
    return 3 if not enough(runs) else int(any("lost" in run for run in runs))


if __name__ == "__main__":
    sys.exit(main())
