"""The pictures of docs are what docs/make_pictures.py draws now."""

import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from commands import REPO

from fivefold.host.devices import SHEETS
from fivefold.recipe.load import published

DOCS = REPO / "docs"
SLOW = "optimizers.svg"  # hundreds of paths for each surface
AGAIN = "run: python docs/make_pictures.py"
NUMBER = r"-?\d+(?:\.\d+)?"
SAYS = re.compile(r"\b(planned|predicted|simulated|measured|traced|by formula)\b", re.IGNORECASE)
NO_FIGURES = {
    "bits": "what the formats are",
    "collective_hierarchical": "who sends what in which round",
    "collective_rabenseifner": "who sends what in which round",
    "collective_ring": "who sends what in which round",
    "combined": "who holds what, counted from the recipe",
    "context": "who attends to what, counted from the recipe",
    "expert": "who holds what, counted from the recipe",
    "house": "the program's rooms and their lines",
    "hybrid": "who holds what, counted from the recipe",
    "optimizers": "paths on given functions, taken while it is drawn",
    "step_bf16": "which tensor has which format",
    "step_fp8": "which tensor has which format",
    "talk": "what a model answered",
    "tensor": "who holds what, counted from the recipe",
    "years": "published sizes and data sheets",
}
"""Pictures with nothing that was measured or planned, and what they show instead."""


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(DOCS))
        yield importlib.import_module("make_pictures")


@pytest.fixture(scope="module")
def drawn(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all pictures but the slow one, at their places in docs."""
    folder = tmp_path_factory.mktemp("docs")

    def moved(path: Path) -> Path:
        return folder / path.absolute().relative_to(DOCS)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["make_pictures.py"])
        patch.setattr(script, "tuned", lambda *_: None)
        patch.setattr(script, "optimizer_paths", SimpleNamespace(to_svg=lambda _: ""))
        for name in ("FOLDER", "PLAN_FOLDER"):
            patch.setattr(script, name, moved(getattr(script, name)))
            getattr(script, name).mkdir(parents=True)
        patch.setattr(script, "COMMANDS", {moved(path): how for path, how in script.COMMANDS.items()})
        script.main()
    return folder


def test_pictures_are_drawn_as_committed(drawn: Path) -> None:
    made = {path: DOCS / path.relative_to(drawn) for path in drawn.rglob("*.svg") if path.name != SLOW}
    assert len(made) > 30
    stale = [c.name for path, c in made.items() if not c.exists() or path.read_bytes() != c.read_bytes()]
    assert stale == [], AGAIN


def test_every_picture_of_the_lectures_is_drawn(drawn: Path) -> None:
    pages = (page.read_text(encoding="utf-8") for page in (DOCS / "lectures").glob("*.md"))
    shown = {name for page in pages for name in re.findall(r"!\[[^\]]*\]\(\.\./(\S+?)\)", page)}
    assert len(shown) > 20
    assert {name for name in shown if not (drawn / name).is_file()} == set()


def says(words: str) -> set[str]:
    return {word.lower() for word in SAYS.findall(words)}


def test_pictures_and_captions_say_where_figures_come_from() -> None:
    """A caption says nothing that its picture does not say."""
    pictures = {
        path.stem: says(" ".join(re.findall(r"<text[^>]*>([^<]*)", path.read_text(encoding="utf-8"))))
        for path in DOCS.rglob("*.svg")
    }
    assert {name for name, words in pictures.items() if not words} == NO_FIGURES.keys()
    captions = [
        (name, says(words))
        for page in DOCS.rglob("*.md")
        for words, name in re.findall(r"!\[([^\]]*)\]\(\S*?(\w+)\.svg\)", page.read_text(encoding="utf-8"))
    ]
    assert len(captions) > 40
    silent = [name for name, words in captions if name not in NO_FIGURES and not words]
    assert silent == []
    assert [name for name, words in captions if not words <= pictures[name]] == []


def test_the_years_show_every_model_and_device(drawn: Path) -> None:
    """A dot for each model and each device at its size; records grow from year to year."""
    tips = re.findall(r"<circle[^>]*><title>([^<]*)</title>", (drawn / "pictures" / "years.svg").read_text())
    sizes = {tip.split(", ")[0]: tip for tip in reversed(tips)}  # the first panel's
    for sheet in SHEETS:
        assert sizes[sheet.name] == f"{sheet.name}, {sheet.year}: {sheet.memory / 1e9:.3g}"
    assert sizes["gpt3-175b"] == "gpt3-175b, 2020: 349"
    assert published().keys() < sizes.keys()
    assert len(sizes) == len(SHEETS) + len(published())
    years = importlib.import_module("years")  # make_pictures.py has put its folder on the path
    for kind, marks in years.growth().items():
        best = [mark.value for mark in years.records(marks)]
        assert best == sorted(set(best)), kind
        assert best[0] == 1.0
        assert best[-1] == max(mark.value for mark in marks)


def test_no_picture_has_lost_a_label() -> None:
    counts: dict[str, int] = json.loads((REPO / "tests" / "picture_labels.json").read_text())
    texts = r"<text[^>]*>[^<]"
    found = {path.name: len(re.findall(texts, path.read_text("utf-8"))) for path in DOCS.rglob("*.svg")}
    assert {name: found.get(name) for name, count in counts.items() if found.get(name, 0) < count} == {}


@pytest.mark.slow
def test_paths_of_optimizers_are_drawn_as_committed(script: ModuleType) -> None:
    paths = {
        name: {one: script.tuned(one, surface) for one in script.OPTIMIZERS}
        for name, surface in script.SURFACES.items()
    }
    committed = (DOCS / "pictures" / SLOW).read_text(encoding="utf-8").splitlines()
    made = script.optimizer_paths.to_svg(paths).splitlines()
    # SOAP divides what it does not know of the other direction by its size: rounding, which depends on the processor
    for before, line, old in zip(["", *made], made, committed, strict=False):
        if not any("<title>soap" in one for one in (before, line)):  # its path, or the circle at the end
            assert re.sub(NUMBER, "", line) == re.sub(NUMBER, "", old), AGAIN
            assert numbers(line) == pytest.approx(numbers(old), abs=0.05), AGAIN
    assert len(made) == len(committed), AGAIN


def numbers(line: str) -> list[float]:
    """Those of a line of SVG, in pixels."""
    return [float(number) for number in re.findall(NUMBER, line)]
