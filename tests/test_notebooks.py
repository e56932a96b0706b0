"""docs/make_notebooks.py: a notebook has all of its page, and its cells print what they say."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import REPO, TIMEOUT_S
from lessons import without

MAKER = runpy.run_path(str(REPO / "docs" / "make_notebooks.py"))
TOPICS = [page for page in MAKER["PAGES"]["pages"]() if page.name != "README.md"]
OUT = REPO / "build" / "notebooks"


def text_of(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


@pytest.mark.parametrize("page", TOPICS, ids=lambda page: page.stem)
def test_a_notebook_has_all_of_its_page(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = MAKER["notebook"](page, OUT)["cells"]
    assert len({cell["id"] for cell in cells}) == len(cells)
    first, *others = [text_of(cell) for cell in cells if cell["cell_type"] == "code"]
    monkeypatch.chdir(REPO / "docs")  # stands for the notebook's folder, as deep below the root as docs/x
    kept: dict[str, Any] = {"START": str(OUT)}
    for _ in range(2):  # run again, it stays there
        exec(first, kept)
        assert Path.cwd() == REPO
    page_text = page.read_text(encoding="utf-8")
    commands = [line.removeprefix("!") for cell in others for line in cell.splitlines() if line[0] == "!"]
    shell = re.findall(r"^```(?:sh|console)\n(.*?)^```", page_text, re.MULTILINE | re.DOTALL)
    assert all(any(command in block for block in shell) for command in commands)
    assert len(commands) >= sum(block.count("\n$ ") + block.startswith("$ ") for block in shell)
    prose = "\n".join(text_of(cell) for cell in cells if cell["cell_type"] == "markdown")
    links = [link for link in re.findall(r"\]\(([^)#]+)", prose) if "://" not in link]
    assert links
    assert [link for link in links if not (OUT / link).resolve().exists()] == []


@pytest.mark.slow
@pytest.mark.parametrize("page", TOPICS, ids=lambda page: page.stem)
def test_cells_print_what_they_say(page: Path, tmp_path: Path) -> None:
    """In a real shell, as a notebook has it."""
    if reason := without(page.read_text(encoding="utf-8")):
        pytest.skip(reason)
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "COLUMNS": "80"}
    env |= {"OMP_NUM_THREADS": "1", "PET_STANDALONE": "1"}  # PET_: torchrun takes any free port
    env |= {"TRITON_INTERPRET": "1", "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    MAKER["PAGES"]["place"](tmp_path)
    for cell in MAKER["notebook"](page, OUT)["cells"]:
        if not cell.get("outputs"):
            continue
        script = re.sub(r"^!", "", text_of(cell), flags=re.MULTILINE)
        shell = ["bash", "-c", script]
        done = subprocess.run(shell, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
        said = done.stdout or done.stderr  # of a command that is refused
        lines = [line.rstrip() for line in said.strip("\n").splitlines()]
        assert lines == cell["outputs"][0]["text"].strip("\n").splitlines(), script
