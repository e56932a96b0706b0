"""What holds for the repository as a whole: it names no machine, and its versions are pinned."""

import re
import runpy
import subprocess
import tomllib
from pathlib import Path

import pytest
from commands import REPO

# A home folder; a switch or variable that names a package index. Written so that this file holds none itself.
PRIVATE = re.compile(
    r"/(?:home|Users)/\w|(?<!\w)/roo[t]/|--(?:extra-)?index[-]url|--find[-]links|PIP_\w*INDEX[_]"
)


def tracked_files() -> list[Path]:
    if not (REPO / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPO, capture_output=True, text=True, check=True)
    return [REPO / name for name in listed.stdout.split("\0") if name and (REPO / name).is_file()]


def test_no_file_names_one_machine() -> None:
    found = []
    here = [f"{folder}/" for folder in (REPO, Path.home()) if len(folder.parts) > 2]  # not a mere /src/
    for path in tracked_files():
        text = path.read_bytes().decode("utf-8", errors="replace")
        for number, line in enumerate(text.splitlines(), 1):
            if PRIVATE.search(line) or any(folder in line for folder in here):
                found.append(f"{path.relative_to(REPO)}:{number}: {line.strip()[:120]}")
    assert found == []


def test_every_requirement_is_pinned() -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [
        *project["dependencies"],
        *(each for extra in ("test", "dev", "docs") for each in extras[extra]),
    ]
    lines = (REPO / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in pins), "exact, and of no one build (+cpu)"
    pinned = {re.split("==", pin)[0].lower().replace("_", "-") for pin in pins}
    assert {re.split(r"[<>=!~\[ ]", name)[0].lower() for name in wanted} <= pinned


def test_mutations_fit_the_program() -> None:
    """Each wrong line of tests/mutations has its place, and each room of the program has one."""
    module = runpy.run_path(str(REPO / "tests" / "mutations" / "run.py"))
    assert module["faults"]() == []


def test_waits_of_pages_take_patience() -> None:
    """A machine that is busy with other things waits longer (FIVEFOLD_TEST_PATIENCE) and fails no test of a page."""
    files = [*(REPO / "tests").glob("*play*.py"), *(REPO / "tests").glob("*browser.py")]
    fixed = re.compile(r"(?:timeout=|monotonic\(\) \+ |\.(?:join|wait)\()[1-9][\d.]*(?! \* PATIENCE)\b[,)\n]")
    assert len(files) > 10
    assert {file.name: found for file in files if (found := fixed.findall(file.read_text()))} == {}
