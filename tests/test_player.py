"""Pages that step through what ranks do: their frames are those of the objects that run."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import observe_browser
import pytest
from observe_page import check_drawn
from test_draw import recipe_of

from fivefold.cli.main import main
from fivefold.models.card import card_of
from fivefold.observe import player
from fivefold.observe.collective_picture import player as of_collective
from fivefold.observe.format import asset
from fivefold.schedules.collectives import build as collective
from fivefold.schedules.pipeline import build, simulate
from fivefold.schedules.pipeline.schedule import peak_live
from fivefold.schedules.ring_attention import messages
from fivefold.sharding.units import keepings

PROGRAM = observe_browser.find()
RING = of_collective(collective("all_reduce", "ring", 3), [f"{i} µs" for i in range(1, 5)])


class Parts(HTMLParser):
    """Classes of a page, and what it would load."""

    def __init__(self, text: str):
        super().__init__()
        self.classes: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.classes += [found["class"] or ""] if "class" in found else []
        self.loads += [found[name] or "" for name in ("src", "href") if name in found]


def data(text: str) -> list[str]:
    return re.findall(r'<script type="application/json" class="data">(.*?)</script>', text, re.S)


def shown(one: player.Player, folder: Path) -> list[dict[str, Any]]:
    """What the page's script draws: each frame, and the one before the last again."""
    text = player.page("title", "kicker", [one])
    facts, script = folder / "data.json", folder / "page.js"
    facts.write_text(data(text)[0])
    script.write_text(asset("player.js"))
    command = ["node", str(Path(__file__).with_name("player_page.js")), facts, script, *Parts(text).classes]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def test_a_collective_has_all_rounds() -> None:
    [facts] = map(json.loads, data(player.page("title", "kicker", [RING])))
    frames = facts["frames"]
    assert [len(frame["moves"]) for frame in frames] == [0, 3, 3, 3, 3]
    assert frames[1]["moves"][0] == [2, 0, True]
    assert frames[-1]["cells"] == [[1.0] * 3] * 3
    assert frames[-1]["title"] == "round 4 of 4, 4 µs"


def test_page_is_whole() -> None:
    """Each part that the script looks for is in each player once, and nothing is loaded."""
    parts = Parts(player.page("title", "kicker", [RING, RING]))
    sought = re.findall(r'find\("(\w+)"\)', asset("player.js"))
    assert sought
    assert all(parts.classes.count(name) == 2 for name in [*sought, "player"])
    assert parts.loads == []


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node to run the script")
def test_page_steps_through_the_rounds(tmp_path: Path) -> None:
    seen = shown(RING, tmp_path)
    assert [step["where"] for step in seen[:5]] == [
        "start",
        *(f"round {i} of 4, {i} µs" for i in range(1, 5)),
    ]
    assert [step["arrows"] for step in seen[:5]] == [[], *[["reduce"] * 3] * 2, *[["copy"] * 3] * 2]
    assert all(step["ranks"] == 3 for step in seen)
    filled = [sum(step["full"]) for step in seen[:5]]
    assert filled == sorted(filled)
    assert filled[-1] == pytest.approx(3 * filled[0])  # of a third of each sum all
    assert (seen[5]["frame"], seen[5]["where"]) == (3, "round 3 of 4, 3 µs")


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node to run the script")
def test_page_steps_through_a_pipeline(tmp_path: Path) -> None:
    schedule = build("1f1b", 2, 3, 1)
    seen = shown(player.pipeline(simulate(schedule), schedule.rank_of, "1f1b"), tmp_path)[:-1]
    assert {step["boxes"] for step in seen} == {12}
    later = [step["later"] for step in seen]
    assert later == sorted(later, reverse=True)
    assert (later[0], later[-1]) == (11, 0)
    assert [step["busy"] for step in seen[:3]] == [1, 2, 1]
    assert seen[-1]["busy"] == 0


def press(browser: observe_browser.Browser, number: int, button: str) -> None:
    """Clicks where the middle of a player's button is on the screen."""
    found = f"document.querySelectorAll('.player')[{number}].querySelector('.{button}')"
    x, y, wide, high = browser.evaluate(
        f"(e => {{ e.scrollIntoView({{block: 'center'}}); const r = e.getBoundingClientRect();"
        f"return [r.x + r.width / 2, r.y + r.height / 2, r.width, r.height] }})({found})"
    )
    assert min(wide, high) >= 32, f"{button} is too small for a finger"
    for kind in ("mousePressed", "mouseReleased"):
        browser.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)


@pytest.mark.skipif(PROGRAM is None, reason=observe_browser.MISSING)
def test_pages_step_on_a_phone(tmp_path: Path) -> None:
    """390 pixels wide: nothing is beside the screen, and each player has buttons of its own that step it."""
    schedule, (recipe, layout) = build("1f1b", 4, 8, 1), recipe_of("dp=4,zero=3")
    units = keepings(card_of(recipe.model), layout, [0])[0].units
    pipeline = player.pipeline(simulate(schedule), schedule.rank_of, "1f1b")
    players = [RING, player.ring(4, True), player.zero(units, 4), pipeline]
    path = tmp_path / "page.html"
    path.write_text(player.page("title", "kicker", players), encoding="utf-8")
    where = "[...document.querySelectorAll('.where')].map(e => e.textContent)"
    drawn = "[...document.querySelectorAll('.stage')].map(e => e.innerHTML)"
    assert PROGRAM
    with observe_browser.Browser(PROGRAM) as browser:
        check_drawn(browser, path, 390, dark=False)
        for number, one in enumerate(players):
            titles, pictures = browser.evaluate(where), browser.evaluate(drawn)
            assert titles[number] == one.frames[0].title
            press(browser, number, "next")
            titles[number] = one.frames[1].title
            assert browser.evaluate(where) == titles, "the others stay"
            assert [a != b for a, b in zip(browser.evaluate(drawn), pictures, strict=True)].index(
                True
            ) == number
            press(browser, number, "back")
            assert browser.evaluate(drawn) == pictures
            for word in ("Stop", "Play"):
                press(browser, number, "play")
                assert browser.evaluate(f"document.querySelectorAll('.play')[{number}].textContent") == word
        assert browser.errors == []


@pytest.mark.parametrize(
    ("name", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zbv", 2), ("dualpipev", 2)]
)
def test_a_pipeline_keeps_what_its_schedule_says(name: str, chunks: int) -> None:
    """Activations of the fullest frame are the schedule's peak; gradients go back as often as activations go on."""
    schedule = build(name, 4, 10, chunks)
    found = player.pipeline(simulate(schedule), schedule.rank_of, name)
    most = [max(chunks * sum(frame.cells[rank]) for frame in found.frames) for rank in range(4)]
    assert most == pytest.approx(peak_live(schedule))
    assert not any(map(sum, found.frames[-1].cells))
    moves = [move for frame in found.frames for move in frame.moves]
    on, back = ([(a, b) for a, b, adds in moves if adds is way] for way in (False, True))
    assert sorted(on) == sorted((b, a) for a, b in back)
    assert len(on) == 10 * sum(a != b for a, b in zip(schedule.rank_of, schedule.rank_of[1:], strict=False))


@pytest.mark.parametrize("causal", [True, False])
def test_the_ring_sends_what_the_trainer_sends(causal: bool) -> None:
    frames = player.ring(4, causal).frames
    assert [frame.title for frame in frames][::4] == ["forward, turn 1 of 4", "backward, turn 1 of 4"]
    for rank in range(4):
        sent = [share for share, _ in messages(4, rank, causal, backward=False)]
        drawn = [(rank, (rank - 1) % 4, False) in frame.moves for frame in frames[:4]]
        assert drawn == [*map(bool, sent), False]
    seen = [[max(range(4), key=row.__getitem__) for row in frame.cells] for frame in frames[:4]]
    assert [sorted(ranks) for ranks in zip(*seen, strict=True)] == [[0, 1, 2, 3]] * 4, (
        "each rank sees all keys"
    )
    assert sum(adds for frame in frames for *_, adds in frame.moves) == 4 * 3


def test_zero_holds_one_unit_at_a_time() -> None:
    recipe, layout = recipe_of("dp=4,zero=3")
    found = player.zero(keepings(card_of(recipe.model), layout, [0])[0].units, layout.shards)
    names = [frame.title for frame in found.frames]
    assert names[:4] == ["start", "forward: gather the rest", "forward: gather 0", "forward: compute 0"]
    assert len(found.frames[0].cells[0]) == 1 + player.MOST_BLOCKS
    for frame in found.frames:
        assert sum(share == 1 for share in frame.cells[0][1:]) <= 1
    assert found.frames[-1].cells == found.frames[0].cells == [[0.25] * 7] * 4
    gathers, scatters = (
        [f for f in found.frames if any(adds is way for *_, adds in f.moves)] for way in (False, True)
    )
    assert (len(gathers), len(scatters)) == (13, 7), "every block twice; gradients once"


def test_many_ranks_are_left_out_and_said() -> None:
    [facts] = map(json.loads, data(player.page("title", "kicker", [player.ring(33, True)])))
    assert {len(frame["cells"]) for frame in facts["frames"]} == {len(facts["frames"][0]["now"])} == {32}
    assert max(max(move[:2]) for frame in facts["frames"] for move in frame["moves"]) == 31
    for ranks, said in ((33, True), (32, False)):
        text = player.page("title", "kicker", [player.ring(ranks, True)])
        assert ("The first 32 of 33 ranks are drawn" in text) is said


def test_draw_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "moving.html"
    words = ["draw", "llama-7b", "--layout", "pp=2,dp=2,cp=2,zero=3", "--html", str(page)]
    with pytest.raises(SystemExit, match="0"):
        main([*words, "--set", "model.layers=4"])
    assert len(data(page.read_text())) == 3
    for layout in ("dp=2", "dp=1,zero=3"):  # one rank has all of its states
        with pytest.raises(SystemExit, match="2"):
            main(["draw", "llama-7b", "--layout", layout, "--html", str(page)])
        assert "nothing moves in this layout" in capsys.readouterr().err


def test_nothing_to_show_is_no_player() -> None:
    with pytest.raises(ValueError, match="player 'Ring' has no frames"):
        player.Player("Ring", "words", [])
