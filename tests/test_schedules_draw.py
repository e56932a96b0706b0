"""Timelines as text and as pictures."""

import re
from xml.etree import ElementTree

import pytest
from schedule_texts import parse
from test_schedules_pipeline import CASES

from fivefold.observe.timelines import pipeline_svg, pipeline_text
from fivefold.schedules.pipeline import Costs, Event, Timeline, build, simulate

SVG = "{http://www.w3.org/2000/svg}"


def test_text_of_a_small_timeline() -> None:
    assert pipeline_text(simulate(build("1f1b", 2, 2)), columns=27) == (
        "rank 0 │F0─F1─      B0════   B1════│  33.3% idle\nrank 1 │   F0─B0════F1─B1════      │  33.3% idle\n"
    )


@pytest.mark.parametrize(("name", "chunks"), CASES)
def test_text_has_a_line_a_rank_of_the_width_asked_for(name: str, chunks: int) -> None:
    for columns in (7, 40, 111):
        timeline = simulate(build(name, 3, 7, chunks))
        for color in (False, True):
            lines = re.sub(r"\x1b\[[\d;]*m", "", pipeline_text(timeline, columns, color)).splitlines()
            assert [len(line) for line in lines] == [len("rank 0 ││  12.3% idle") + columns] * 3
    assert "\x1b[" not in pipeline_text(timeline)


def test_text_of_later_stages_is_in_lower_case() -> None:
    drawn = pipeline_text(simulate(build("looped_bfs", 1, 1, 2)), columns=18)
    assert drawn == "rank 0 │F0─f0─b0════B0════│   0.0% idle\n"


@pytest.mark.parametrize(("name", "chunks"), CASES)
def test_picture_has_every_action(name: str, chunks: int) -> None:
    schedule = build(name, 3, 4, chunks)
    root = ElementTree.fromstring(
        pipeline_svg(simulate(schedule, Costs(0.003, 0.004, 0.002)), title="a <b> & c")
    )
    titles = [found.text or "" for found in root.iter(f"{SVG}title")]
    assert titles[0].startswith("a <b> & c (3 ranks, ")
    assert titles[0].endswith("idle)")
    assert [title.split(":")[0] for title in titles[1:]] == [
        str(action) for row in schedule.rows for action in row
    ]
    assert "prefers-color-scheme: dark" in (root.find(f"{SVG}style").text or "")  # type: ignore[union-attr]
    inside = [rect for rect in root.iter(f"{SVG}rect") if rect.get("x")]
    assert all(0 <= float(rect.get("x", "-1")) <= 960 for rect in inside)


def test_picture_of_a_measured_timeline() -> None:
    """Times need not start at 0, nor ranks together."""
    rows = ((Event(parse("0F0"), 5.0, 5.5), Event(parse("0B0"), 7.0, 8.0)), (Event(parse("1F0"), 5.6, 6.9),))
    drawn = pipeline_svg(Timeline(rows), "measured", seconds=6.0)
    assert "<title>0F0: 0 s to 0.5 s</title>" in drawn
    assert "2 ranks, 3 s, 53.3% idle" in drawn
    assert pipeline_text(Timeline(rows), 6) == "rank 0 │F   B0│  50.0% idle\nrank 1 │ F0─  │  56.7% idle\n"


@pytest.mark.parametrize(("seconds", "unit"), [(3.0, "s"), (3e-3, "ms"), (3e-6, "µs")])
def test_picture_in_the_unit_that_suits(seconds: float, unit: str) -> None:
    drawn = pipeline_svg(simulate(build("gpipe", 2, 2), Costs(seconds, seconds, seconds)))
    assert f"2 ranks, 27 {unit}" in drawn


def test_picture_of_nothing() -> None:
    assert "0 s" in pipeline_svg(Timeline(((),)))
