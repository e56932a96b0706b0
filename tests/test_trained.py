"""benchmarks/trained.py: shipped recipes beside plain PyTorch, small, and what docs/models.md says of them."""

import importlib.util
import json
import pydoc_data.topics
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[1]
SPEC = importlib.util.spec_from_file_location("trained", REPO / "benchmarks" / "trained.py")
assert SPEC is not None
assert SPEC.loader is not None
trained = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(trained)


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["gpt2-124m", "bert-base"])
def test_losses_of_plain_pytorch(shape, tmp_path):
    """The recipe with two small blocks, in fp32: losses and gradient norms of twelve steps are those of a process that
    has PyTorch's own layers, AdamW and files with the weights and batches."""
    text = Path(pydoc_data.topics.__file__).read_bytes()
    (tmp_path / "text.txt").write_bytes(text)
    out = tmp_path / "found.json"
    sizes = ["--small", "--steps", "12", "--device", "cpu", "--folder", tmp_path, "--out", out]
    subprocess.run(
        [sys.executable, trained.__file__, "run", "--shape", shape, *sizes], check=True, timeout=280
    )
    pair = json.loads(out.read_text())["shapes"][shape]["modes"]["fp32"]
    ours, theirs = pair["fivefold"], pair["plain"]
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-6)
    assert ours["grad_norms"] == pytest.approx(theirs["grad_norms"], rel=1e-5)
    assert len(ours["losses"]) == 12
    assert ours["losses"][-1] < ours["losses"][0] - 0.01


def test_text_is_the_same_again(tmp_path):
    """The same folders give the same bytes, in a limit, without tests, and an equal share of each."""
    for name in ("a.py", "b.md", "c.png", "tests/d.py", "sub/e.txt"):
        path = tmp_path / "one" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name[-4] * 498)
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "g.rst").write_text("g" * 298)
    (tmp_path / "two" / "h.txt").write_bytes(b"\xff" * 298)  # not UTF-8
    places = {name: tmp_path / name for name in ("one", "two")}
    text, parts = trained.collect(places, 2 * 1200)
    assert parts == {"one": {"files": 2, "bytes": 1000}, "two": {"files": 1, "bytes": 300}}
    assert len(text) == 1300
    assert trained.collect(places, 2 * 1200)[0] == text
    assert len(trained.collect(places, 2 * 1500)[0]) == 1800


def test_page_says_what_was_measured():
    """docs/models.md has the table of the recorded runs, or says that there are none."""
    page = (REPO / "docs" / "models.md").read_text()
    out = REPO / "benchmarks" / "results" / "trained.json"
    assert (trained.measured(json.loads(out.read_text())) if out.exists() else trained.NOTHING) in page
    assert out.exists() != (trained.NOTHING in page)


@pytest.mark.slow
def test_page_says_what_is_planned():
    assert trained.planned() in (REPO / "docs" / "models.md").read_text()
