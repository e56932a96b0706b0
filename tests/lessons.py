"""What the programs of examples/kernels need beside Fivefold, and how tests run them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from commands import REPO, TIMEOUT_S

FOLDER = REPO / "examples" / "kernels"
SHOWN = re.compile(r"^Triton (\S+), ", re.MULTILINE)
"""Whose counts a page shows."""


def without_triton() -> str:
    """Why kernels cannot be run here; "": they can."""
    try:
        metadata.version("triton")
    except metadata.PackageNotFoundError:
        return "examples/kernels needs Triton: pip install triton"
    return ""


def without_compiler() -> str:
    """Why an extension cannot be compiled here; "": it can."""
    missing = [tool for tool in ("c++", "ninja") if shutil.which(tool) is None]
    return f"an extension needs {' and '.join(missing)}" if missing else ""


def without(page: str) -> str:
    """Why a page's commands cannot be run here, or would print other counts; "": they can."""
    if "$ python examples/kernels/" not in page:
        return ""
    if reason := without_triton() or without_compiler():
        return reason
    shown = {version for version in SHOWN.findall(page) if version != metadata.version("triton")}
    return f"the page has counts of Triton {shown.pop()}, not {metadata.version('triton')}" if shown else ""


def kernels(program: str, *arguments: str, cache: Path) -> tuple[int, str]:
    """Runs a program in the interpreter: its exit code, and what it printed. program: in examples/kernels, or a path.
    cache: a folder for what Triton compiles."""
    env = os.environ | {"TRITON_INTERPRET": "1", "TRITON_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(FOLDER / program), *arguments]
    done = subprocess.run(command, cwd=REPO, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
    return done.returncode, done.stdout + done.stderr
