"""The report page: complete, safe against what a model or a recipe writes, and robust against scarce runs."""

from __future__ import annotations

import fnmatch
import html
import json
import math
import re
import tomllib
from contextlib import closing
from html.parser import HTMLParser
from pathlib import Path

import pytest
from observe_run import make_run
from sources import PACKAGES, SRC

from fivefold.draw.canvas import linear_scale, log_scale, tick_labels, ticks
from fivefold.errors import UserError
from fivefold.observe.chart import Chart, Series, draw, smooth, thin
from fivefold.observe.metrics import MetricsWriter
from fivefold.observe.report import write_report


class Page(HTMLParser):
    """What a page holds: tags with attributes, text outside of script and style; checks that tags nest."""

    VOID = ("meta", "input", "path", "br")

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text, self._open = "", []
        self.feed(text)
        self.close()
        assert not self._open, f"left open: {self._open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self._open, f"</{tag}> without a start"
        assert self._open.pop() == tag

    def handle_data(self, data):
        if not {"script", "style"} & set(self._open):
            self.text += data

    def with_class(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for _, attributes in self.tags if name in (attributes.get("class") or "").split()]


def page_of(run: Path) -> Page:
    path = write_report(run)
    assert path == run / "report.html"
    return Page(path.read_text("utf-8"))


def write_run(folder: Path, *lines: dict) -> Path:
    with closing(MetricsWriter(folder, tracker="none")) as writer:
        for line in lines:
            writer.write(line)
    return folder


def test_a_run_has_all_its_parts(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path / "my run", 200))
    titles = re.findall(
        r"(?m)^(Loss|Bits per byte|Learning rate|Gradient norm|Tokens per second and MFU)", page.text
    )
    assert len(set(titles)) == 5
    assert len(page.with_class("plot")) == 7
    assert len(page.with_class("sample")) == 5
    for part in (
        "my run",
        "A llama model of 13.77M parameters",
        "Example CPU 9000",
        "Validation loss",
        "819.2k",
    ):
        assert part in page.text
    assert "fivefold train 'my run' --resume" in page.text
    assert "steps = 200" in page.text
    assert not list(tmp_path.rglob("*.tmp"))


def test_changed_fields_are_marked(tmp_path: Path) -> None:
    text = write_report(make_run(tmp_path, 20)).read_text("utf-8")
    changed = re.findall(r"<span class=changed[^>]*>([^<]*)</span>", text)
    assert "schedule = &quot;wsd&quot;" in changed
    assert not any(line.startswith(("layers", "vocab_size", "beta")) for line in changed)
    shown, folded = text.partition("Fields that differ from their defaults.")[2].split(
        "<summary>All fields</summary>"
    )
    assert re.findall(r"<span[^>]*>([a-z]\w* = [^<]*)</span>", shown) == changed
    assert "vocab_size" not in shown
    assert "vocab_size" in folded
    assert not re.search(r'class="section">[^<]*</span>\s*</div>', shown), "no heading without a field"


def test_nothing_is_loaded_from_elsewhere(tmp_path: Path) -> None:
    path = write_report(make_run(tmp_path, 50))
    text = path.read_text("utf-8")
    page = Page(text)
    loading = {"src", "href", "srcset", "data", "action", "poster", "xlink:href", "background"}
    assert not [tag for tag, attributes in page.tags if loading & attributes.keys()]
    assert not re.search(r"https?://|url\(|@import|fetch\(|XMLHttpRequest|import\(", text)
    assert path.stat().st_size < 300_000
    (policy,) = [a["content"] for tag, a in page.tags if tag == "meta" and "http-equiv" in a]
    assert policy
    assert policy.startswith("default-src 'none';")
    assert "script-src 'sha256-" in policy


EVIL = (
    "</pre></script><script>alert(1)</script><img src=x onerror=alert(2)>\"' onload='x' &lt; \x1b[m\x00\u202e"
)


def test_data_is_never_markup(tmp_path: Path) -> None:
    run = make_run(tmp_path / "<b onclick=alert(3)>&run", 5)
    harmless = page_of(run)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    write_run(run, *map(json.loads, lines), {"step": 5, "sample": EVIL}, {"step": 5, "<i>": 1.0, "loss": 1.0})
    (run / "machine.json").write_text(json.dumps({"cpu": EVIL, "<u>key</u>": [EVIL, {EVIL: EVIL}]}))
    (run / "recipe.toml").write_text(f"# {EVIL!r}\n[data]\nsource = {json.dumps(EVIL)}\n[{EVIL!r}]\n")
    page = page_of(run)
    tags = {tag for tag, _ in page.tags}
    assert tags == {tag for tag, _ in harmless.tags}, "no element that a page without evil data lacks"
    assert sum(tag == "script" for tag, _ in page.tags) == 1
    assert not [a for _, a in page.tags if any(name.startswith("on") for name in a)]
    shown = EVIL.replace("\x1b", r"\x1b").replace("\x00", r"\x00").replace("\u202e", r"\u202e")
    assert page.text.count(shown) >= 4, "shown as text: sample, and machine"
    assert "<b onclick=alert(3)>&run" in page.text


def test_nan_losses_are_told_and_marked(tmp_path: Path) -> None:
    lines = [{"step": s, "loss": math.nan if 40 <= s < 45 else 5 / s, "lr": 0.1} for s in range(1, 101)]
    path = write_report(write_run(tmp_path, *lines))
    text = path.read_text("utf-8")
    assert "NaN or infinite in 5 steps, first at step 40" in text
    (bad,) = set(re.findall(r'<path class="bad" d="([^"]*)"', text))
    assert bad.count("M") == 5
    line = re.search(r'<path class="line faint" d="([^"]*)"', text)
    assert line
    assert line[1].count("M") == 2, "the line has a gap, it does not bridge it"
    for attribute in re.findall(r' (?:style|d|data-chart)="([^"]*)"', text):
        assert "nan" not in attribute.lower()


@pytest.mark.parametrize(
    "lines",
    [
        [],
        [{"step": 1, "loss": 2.0}],
        [{"step": 1, "loss": 2.0, "val_loss": math.nan, "grad_norm": 0.0, "lr": 0.0, "tokens_per_s": 1e12}],
        [{"step": 7, "loss": math.inf}, {"step": 8, "loss": math.nan, "mfu": math.nan, "tokens_per_s": 0.0}],
        [{"step": 0, "val_loss": 3.0}, {"step": 0, "sample": ""}],
        [{"step": s, "loss": -1e30 if s % 2 else 1e-30, "step_s": 0.0, "data_wait_s": 1.0} for s in range(3)],
        [{"step": 2, "loss": 1.0}, {"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.5}],
        [{"step": s, "loss": 3.0, "peak_memory_bytes": 5} for s in range(200)],
    ],
    ids=["empty", "one", "zeros", "not-finite", "no-training", "extremes", "unordered", "constant"],
)
def test_scarce_and_odd_runs(tmp_path: Path, lines: list[dict]) -> None:
    page = page_of(write_run(tmp_path, *lines))
    for label in ("This run has no recipe.toml", "This run has no machine.json", "This run has no samples"):
        assert (label in page.text) == ("samples" not in label or not any("sample" in line for line in lines))
    for _, attributes in page.tags:
        for text in (attributes.get("style") or "", attributes.get("d") or ""):
            assert "nan" not in text
            assert "inf" not in text
            assert all(abs(float(n)) <= 1000.1 for n in re.findall(r"-?[\d.]+(?:e[+-]?\d+)?", text))


def test_a_recipe_of_another_version_is_shown_as_it_is(tmp_path: Path) -> None:
    run = write_run(tmp_path, {"step": 1, "loss": 2.0})
    (run / "recipe.toml").write_text("[model]\nfrom_the_future = 3\n[broken")
    (run / "machine.json").write_text("{broken")
    page = page_of(run)
    assert "from_the_future = 3" in page.text
    assert not page.with_class("changed")


def test_no_metrics_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no metrics here"):
        write_report(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_long_run_stays_small_and_keeps_its_spikes(tmp_path: Path) -> None:
    series = Series("loss", range(100_000), [2.0] * 100_000)
    values = list(series.values)
    values[77_777] = 9.0
    chart = Chart("c", "Loss", [Series("loss", series.steps, values), series], (0, 99_999), log=True)
    text = draw(chart)
    assert len(text) < 200_000
    data = re.search(r'data-chart="([^"]*)"', text)
    assert data
    line = json.loads(html.unescape(data[1]))["lines"][0]
    assert line["y"][line["x"].index(77_777)] == 9
    assert (line["x"][0], line["x"][-1]) == (0, 99_999)


def test_thin_keeps_gaps_and_extremes_of_each_stretch(monkeypatch: pytest.MonkeyPatch) -> None:
    values = [math.sin(i) for i in range(10_000)]
    values[5000:5100] = [math.nan] * 100
    monkeypatch.setattr("fivefold.observe.chart.STRETCHES", 100)
    found = thin(Series("s", range(10_000), values), (0, 9999))
    assert len(found.steps) <= 500
    pairs = dict(zip(found.steps, found.values, strict=True))
    for start in range(0, 10_000, 100):
        part = [v for s, v in pairs.items() if start <= s < start + 100 and not math.isnan(v)]
        whole = [v for v in values[start : start + 100] if not math.isnan(v)]
        assert not whole or (min(part), max(part)) == (min(whole), max(whole))
    assert any(math.isnan(v) for s, v in pairs.items() if 5000 <= s < 5100)


def test_smooth_is_a_centred_mean_of_finite_values() -> None:
    assert smooth([1.0, 2.0, 3.0, 4.0, 5.0], 3) == pytest.approx([1, 2, 3, 4, 4.5])
    found = smooth([1.0, math.nan, 3.0, 5.0, 7.0, 9.0, 11.0], 5)
    assert math.isnan(found[1])
    assert found[2] == pytest.approx((1 + 3 + 5 + 7) / 4)
    assert smooth([4.0], 1) == [4.0]
    assert smooth([9.0, 1.0, 1.0, 1.0, 1.0, 5.0], 5)[-1] == pytest.approx(7 / 3), "the end is a mean, too"


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (1.2, 8.7), (-3, 5), (5, 5), (0, 0), (1e-5, 2e-3), (1e9, 1e12), (-1e30, 1e30)]
)
def test_axes_hold_the_data_and_have_round_ticks(low: float, high: float) -> None:
    for zero in (False, True):
        scale = linear_scale(low, high, zero)
        assert scale.low <= low
        assert scale.high >= high
        assert 2 <= len(scale.ticks) <= 9
        assert all(-0.001 <= scale.height(tick) <= 1.001 for tick in scale.ticks)
        labels = tick_labels(scale.ticks)
        assert len(set(labels)) == len(labels)
    if 0 < low < high:
        scale = log_scale(low, high)
        assert 0 <= scale.height(low) < scale.height(high) <= 1
        assert 2 <= len(scale.ticks) <= 13


def test_tick_labels_and_ticks() -> None:
    assert ticks(0, 10, 5) == [0, 2, 4, 6, 8, 10]
    assert tick_labels([0, 0.05, 0.1]) == ["0.00", "0.05", "0.10"]
    assert tick_labels([0, 5000, 10_000]) == ["0", "5k", "10k"]
    assert tick_labels([0, 5e-4, 1e-3]) == ["0", "5e-4", "1e-3"]
    assert tick_labels([0.5, 5, 50]) == ["0.5", "5", "50"], "of a logarithmic scale"
    assert tick_labels([0, 50, 100], "%") == ["0%", "50%", "100%"]


def test_page_pieces_are_in_the_wheel() -> None:
    """And all other files that are no modules."""
    settings = tomllib.loads((SRC.parent / "pyproject.toml").read_text())["tool"]["setuptools"]
    for package in PACKAGES:
        patterns = settings["package-data"][package]
        for piece in (SRC / package).rglob("*.*"):
            if piece.is_file() and piece.suffix not in (".py", ".pyc"):
                name = piece.relative_to(SRC / package).as_posix()
                assert any(fnmatch.fnmatch(name, pattern) for pattern in patterns), name
