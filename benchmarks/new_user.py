"""What a new user does with the README alone: trains on a folder of mixed files, samples, evaluates, talks, exports.

    python benchmarks/new_user.py --python python3.11 --python python3.12 --out benchmarks/results/new_user.json

For each Python it makes an environment, installs the wheel of this repository with constraints.txt, and runs the
commands of the README in a folder of its own with an empty cache. --environments FOLDER: keeps the environments there,
and uses those that are there already. Results of a Python that the file has already are replaced, others stay.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import subprocess
import tempfile
import time
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
COMMANDS = (
    "fivefold recipes quickstart > my.toml",
    "fivefold check my.toml --set data.source=my_texts/",
    "fivefold train my.toml --set data.source=my_texts/ --set train.steps={steps} --out runs/mine",
    'fivefold generate runs/mine --prompt "def " --max-tokens 100 --temperature 0.7',
    "fivefold eval runs/mine my_texts/one.txt",
    "echo 'A layout is' | fivefold chat runs/mine --max-tokens 60",
    "fivefold report runs/mine",
    "fivefold export runs/mine exported/",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", action="append", required=True, help="an interpreter; repeatable")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--environments", type=Path)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        here = Path(temporary)
        wheel = build_wheel(here)
        rows = [
            row_of(python, wheel, given.environments or here, here, given.steps) for python in given.python
        ]
    print(json.dumps(rows, indent=1))
    if given.out:
        before = json.loads(given.out.read_text()) if given.out.exists() else []
        new = {row["python"] for row in rows}
        rows = [row for row in before if row["python"] not in new] + rows
        given.out.write_text(json.dumps(sorted(rows, key=lambda row: row["python"]), indent=1) + "\n")


def build_wheel(folder: Path) -> Path:
    command = ["pip", "wheel", "-q", "--no-deps", "-w", str(folder), str(REPO)]
    subprocess.run(["python3", "-m", *command], check=True)
    return next(folder.glob("*.whl"))


def row_of(python: str, wheel: Path, environments: Path, folder: Path, steps: int) -> dict[str, object]:
    version = subprocess.run([python, "-V"], capture_output=True, text=True, check=True).stdout.split()[1]
    environment, began = environments / version, time.perf_counter()
    fresh = not environment.exists()
    if fresh:
        subprocess.run([python, "-m", "venv", environment], check=True)
    pip = [environment / "bin" / "pip", "install", "-q"]
    subprocess.run([*pip, "-c", REPO / "constraints.txt", wheel], check=True)
    subprocess.run([*pip, "--force-reinstall", "--no-deps", wheel], check=True)
    installed, home = time.perf_counter() - began, folder / f"user-{version}"
    mixed_files(home / "my_texts")
    seconds = {}
    for command in COMMANDS:
        began = time.perf_counter()
        said = run(command.format(steps=steps), home, environment / "bin")
        seconds[re.sub(r"^.*?(fivefold \w+).*$", r"\1", command)] = round(time.perf_counter() - began, 1)
        print(f"{version}: {command} ({seconds[list(seconds)[-1]]} s)\n{said[-600:]}", flush=True)
    metrics = [
        json.loads(line) for line in (home / "runs" / "mine" / "metrics.jsonl").read_text().splitlines()
    ]
    return {
        "python": version,
        "steps": steps,
        "install_s": round(installed, 1) if fresh else None,
        "seconds": seconds,
        "total_s": round(sum(seconds.values()), 1),
        "val_bits_per_byte": [m["val_bits_per_byte"] for m in metrics if "val_bits_per_byte" in m][-1],
    }


def mixed_files(folder: Path) -> None:
    """Markdown, Python, text, JSON lines, a compressed text, and a file of another kind."""
    for source in [*sorted((REPO / "docs").glob("*.md")), *sorted((REPO / "src").rglob("*.py"))]:
        name = folder / str(source.relative_to(REPO)).replace("/", "_")
        name.parent.mkdir(parents=True, exist_ok=True)
        name.write_bytes(source.read_bytes())
    (folder / "one.txt").write_bytes((REPO / "README.md").read_bytes())
    (folder / "notes.jsonl").write_text(
        "".join(f'{{"text": "Note {i} of a hundred."}}\n' for i in range(100))
    )
    (folder / "changes.txt.gz").write_bytes(gzip.compress((REPO / "CHANGELOG.md").read_bytes()))
    (folder / "manual.pdf").write_bytes(b"%PDF-1.4")


def run(command: str, folder: Path, programs: Path) -> str:
    environment = os.environ | {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "FIVEFOLD_CACHE": str(folder / "cache"),
    }
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        ["bash", "-euc", command], cwd=folder, env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


if __name__ == "__main__":
    main()
