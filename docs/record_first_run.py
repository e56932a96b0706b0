"""Records what the first run prints, for the picture of the README.

    python docs/record_first_run.py

It runs `fivefold train quickstart` with an empty cache and notes when each line came. docs/make_pictures.py draws
benchmarks/results/first_run.json. It prints a line a step, as on a terminal; a few of them are kept. Nothing else
should run meanwhile.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from fivefold.host import cpu_model

RESULT = Path(__file__).parents[1] / "benchmarks" / "results" / "first_run.json"
COMMAND = "fivefold train quickstart"
FIRST, EVERY = 4, 40  # steps whose lines are kept: the first ones, then each so many
STEP = re.compile(r"^step +(\d+)")


def main() -> None:
    began, lines = time.monotonic(), list[tuple[float, str]]()
    with tempfile.TemporaryDirectory() as folder:
        program = [sys.executable, "-c", "from fivefold.cli.main import main; main()", *COMMAND.split()[1:]]
        program.append("--set=observe.log_every=1")
        environment = os.environ | {"PYTHONUNBUFFERED": "1", "FIVEFOLD_CACHE": f"{folder}/cache"}
        with subprocess.Popen(
            program, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as process:
            assert process.stdout
            for line in process.stdout:
                lines.append((round(time.monotonic() - began, 2), line.rstrip().replace(folder, "~")))
    if process.returncode:
        sys.exit(
            "\n".join([f"{COMMAND} ended with {process.returncode}:", *(text for _, text in lines[-20:])])
        )
    made = {"command": COMMAND, "by": "python docs/record_first_run.py", "processor": cpu_model()}
    found = made | {
        "seconds": round(time.monotonic() - began, 1),
        "lines": [line for line in lines if kept(line[1])],
    }
    RESULT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def kept(text: str) -> bool:
    """True but for most lines of single steps."""
    step = STEP.match(text)
    return not step or int(step[1]) <= FIRST or int(step[1]) % EVERY == 0


if __name__ == "__main__":
    main()
