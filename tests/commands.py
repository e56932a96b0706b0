"""Runs commands of the documentation and of examples/ in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
TIMEOUT_S = (
    300  # far beyond what a command takes: a machine that is busy with other things must not fail a test
)


def run(command: str, folder: Path) -> str:
    """Runs a line of shell in `folder`, with this environment's programs first in PATH; what it printed."""
    programs = Path(sys.executable).parent
    env = {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-euc", command],
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, f"{command}\nended with {done.returncode}:\n{done.stdout}"
    return done.stdout
