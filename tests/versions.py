"""Runs the tests that depend on PyTorch's inside with several versions of it, each in an environment of its own.

    python tests/versions.py [--torch 2.11.0 ...] [--folder build/versions] [-- more arguments of pytest]

Builds for GPUs run here on the CPU; one takes about 5 GB of disk. An environment that is there is used again. All other
packages have the versions of constraints.txt. The exit status is 1 if a version's tests fail.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = ["2.11.0", "2.13.0", "2.15.0"]
FILES = [
    "private",
    "comm",
    "all_reduce",
    "layouts",
    "zero",
    "zeropp",
    "tensor",
    "context",
    "pipeline",
    "expert",
    "moe",
    "replica_groups",
    "server",
    "offload",
    "precision",
    "fp8",
    "optim",
    "recompute",
    "checkpoints",
    "store",
    "resume_layouts",
    "train",
    "documents",
    "units",
    "compression",
    "schedules_torch",
    "trace",
    "trace_gpu",
    "trace_beside",
    "compiled_blocks",
    "streams",
    "gpus",
]


def environment(version: str, folder: Path) -> Path:
    """The Python of an environment with this version of torch."""
    python = folder / version / "bin/python"
    done = folder / version / ".installed"
    if not done.exists():
        venv.create(folder / version, with_pip=True, clear=True)
        install = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as others:
            pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
            # old versions of torch want an older setuptools
            others.write(
                "\n".join(line for line in pinned if not line.startswith(("torch==", "setuptools==")))
            )
            others.flush()
            subprocess.run(
                [*install, "-c", others.name, f"torch=={version}", "-e", f"{ROOT}[test]"], check=True
            )
        done.touch()
    return python


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--torch", nargs="+", default=VERSIONS)
    parser.add_argument("--folder", type=Path, default=ROOT / "build/versions")
    parser.add_argument("more", nargs="*", help="arguments of pytest, behind --")
    given = parser.parse_args()
    files = [f"tests/test_{name}.py" for name in FILES]
    failed = []
    for version in given.torch:
        python = environment(version, given.folder)
        print(f"== torch {version}", flush=True)
        command = [str(python), "-m", "pytest", "-n", "2", "--dist", "loadfile", *files, *given.more]
        environ = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
        if subprocess.run(command, cwd=ROOT, env=environ).returncode:
            failed.append(version)
    print(f"failed with: {', '.join(failed)}" if failed else f"passed with: {', '.join(given.torch)}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
