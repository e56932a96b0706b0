"""Applies wrong lines to a copy of the program, one at a time, and runs the tests that should notice.

    python tests/mutations/run.py [--only WORD] [--jobs 2] [--out FILE]
    python tests/mutations/run.py --check

mutations.toml lists them: `file` below src, what stands there (`old`, exactly once), what it becomes (`new`),
and at most three test files, or tests in them. A mutation is caught if a test fails or takes longer than LIMIT_S. What
survives is printed, and the exit status is 1 if more survive than ALLOWED. Where a mutation changes nothing that a test
could see, `equivalent` says why, and it is not run. --check runs nothing: it says which entries no longer fit the
program, in a second. `make test` does that, too.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

sys.path.insert(0, str(Path(__file__).parents[1]))

from sources import FILES, name_of, room_of

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 240
ALLOWED = 3


@dataclass(frozen=True)
class Mutation:
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    equivalent: str = ""

    def wrong(self, root: Path) -> str:
        """The text of the file with the wrong line.

        Raises:
            ValueError: `old` does not stand there exactly once.
        """
        text = (root / "src" / self.file).read_text(encoding="utf-8")
        if (times := text.count(self.old)) != 1:
            raise ValueError(f"{self.file} has {times} times: {self.old}")
        return text.replace(self.old, self.new)


def mutations() -> list[Mutation]:
    table = tomllib.loads((Path(__file__).parent / "mutations.toml").read_text(encoding="utf-8"))
    return [Mutation(**{**row, "tests": tuple(row["tests"])}) for row in table["mutation"]]


def faults() -> list[str]:
    """What no longer fits the program: lines that have changed, tests that have gone, rooms without a mutation."""
    found, table = [], mutations()
    for one in table:
        try:
            if one.wrong(ROOT) == (ROOT / "src" / one.file).read_text(encoding="utf-8"):
                found.append(f"{one.file}: `new` is `old`: {one.old}")
        except (OSError, ValueError) as error:
            found.append(str(error))
        if not 1 <= len(one.tests) <= 3:
            found.append(f"{one.file}: {len(one.tests)} tests; name one to three: {one.old}")
        for test in one.tests:
            name, _, function = test.partition("::")
            file = ROOT / "tests" / name
            if not file.is_file() or f"def {function}(".replace("def (", "") not in file.read_text(
                encoding="utf-8"
            ):
                found.append(f"{one.file}: there is no test {test}")
    bare = {room_of(name_of(file)) for file in FILES if len(Path(name_of(file)).parts) > 2}
    bare -= {room_of(one.file) for one in table}
    return found + [f"no mutation in {room}" for room in sorted(bare)]


def copy(folder: Path) -> Path:
    """A copy of what git tracks, beside a link to what the tests share."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / "copy" / name)
    if (ROOT.parent / "shared").is_dir():
        (folder / "shared").symlink_to(ROOT.parent / "shared")
    return folder / "copy"


def environment(root: Path) -> dict[str, str]:
    """In which Python imports the copy at `root`."""
    own = {"PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1"}
    own |= {"PYTHONDONTWRITEBYTECODE": "1", "FIVEFOLD_MUTATED": "1"}  # a wrong line leaves no bytecode behind
    return os.environ | own


def require_import(root: Path) -> None:
    """Raises ValueError: Python imports the program from elsewhere, so that no test would see a wrong line."""
    ask = [sys.executable, "-c", "import fivefold; print(fivefold.__file__)"]
    found = subprocess.run(ask, cwd=root, env=environment(root), capture_output=True, text=True, check=True)
    if not Path(found.stdout.strip()).is_relative_to(root / "src"):
        raise ValueError(
            f"{sys.executable} imports {found.stdout.strip()}, not the copy. Use another environment"
        )


def survives(mutation: Mutation, root: Path) -> bool:
    """Runs the tests in the copy at `root`, whose file is put back."""
    file = root / "src" / mutation.file
    right = file.read_text(encoding="utf-8")
    file.write_text(mutation.wrong(root), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    command += [f"tests/{test}" for test in mutation.tests]

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, *options],
            cwd=root,
            env=environment(root),
            timeout=LIMIT_S,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    try:
        ran = run()
        if ran.returncode in (0, 5):  # perhaps a slow one of them sees it
            ran = run("-m", "")
    except subprocess.TimeoutExpired:
        return False
    finally:
        file.write_text(right, encoding="utf-8")
    if ran.returncode not in (0, 1):  # 2: a file cannot even be imported; 4, 5: no such test
        raise ValueError(
            f"{mutation.file}: {mutation.old}: pytest ends with {ran.returncode}:\n{ran.stdout[-2000:]}"
        )
    return ran.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="those whose file or line has this word")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument(
        "--out", type=Path, help="JSON: each mutation with its seconds and whether it was caught"
    )
    parser.add_argument("--check", action="store_true", help="only say which entries do not fit the program")
    given = parser.parse_args()
    if given.check:
        print("\n".join(found := faults()) or f"{len(mutations())} mutations fit the program")
        return int(bool(found))
    todo = [m for m in mutations() if given.only in f"{m.file} {m.old}"]
    tried = [m for m in todo if not m.equivalent]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(given.jobs) as pool:
        free: SimpleQueue[Path] = SimpleQueue()
        for number in range(given.jobs):
            free.put(root := copy(Path(folder) / str(number)))
            require_import(root)

        def one(mutation: Mutation) -> dict[str, object]:
            root, began = free.get(), time.monotonic()
            try:
                caught = not survives(mutation, root)
            finally:
                free.put(root)
            seconds = round(time.monotonic() - began, 1)
            print(
                f"{'caught' if caught else 'SURVIVES'} {seconds:6.1f} s  {mutation.file}: {mutation.old}",
                flush=True,
            )
            return {"file": mutation.file, "old": mutation.old, "caught": caught, "seconds": seconds}

        rows = list(pool.map(one, tried))
    survivors = sum(not row["caught"] for row in rows)
    print(f"{len(rows) - survivors} of {len(rows)} caught; {len(todo) - len(tried)} equivalent ones not run")
    if given.out:
        given.out.write_text(json.dumps({"mutations": rows}, indent=1) + "\n", encoding="utf-8")
    return int(survivors > ALLOWED)


if __name__ == "__main__":
    sys.exit(main())
