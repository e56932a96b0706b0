"""A canvas for SVG pictures in light and dark mode, in pixels: colours, text, shapes, bars and legends, scales with
round ticks, axes, and curves over them.

It knows how wide words are, and grows with what is drawn, so nothing is outside the picture.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from fivefold.errors import printable

COLORS = {
    "blue": ("#1d5b9c", "#7fb2ea"),
    "orange": ("#a85b16", "#f0b06a"),
    "green": ("#2c7a5b", "#79c9a3"),
    "red": ("#9b2f4a", "#ef8fa6"),
    "purple": ("#7b4fa3", "#c3a1e0"),
    "grey": ("#66625b", "#b5b0a6"),
    "teal": ("#0f8a9d", "#6fd3e3"),
}
"""(light, dark), in the order in which curves take them."""
GROUND = {
    "paper": ("#fdfcf9", "#171614"),
    "ink": ("#22211f", "#e9e6df"),
    "soft": ("#66625b", "#a49f95"),
    "rule": ("#d8d3c8", "#45423b"),
    "idle": ("#f0ede5", "#24221f"),
    "limit": ("#c22f2f", "#ff7b72"),
}
NAMES = tuple(COLORS)
LIGHT, DARK = zip(*COLORS.values(), strict=True)


def css() -> str:
    """The classes c0, c1, ... of lines, dots and legends of a page."""
    numbered = {f"c{number}": pair for number, pair in enumerate(COLORS.values())}
    classes = "".join(
        f".line.{name}, .dots.{name} {{ stroke: var(--{name}); }} "
        f".legend .{name}::before {{ background: var(--{name}); }}\n"
        for name in numbered
    )
    return f"{_variables(':root', numbered)}{classes}"


def _variables(selector: str, colors: Mapping[str, tuple[str, str]]) -> str:
    light, dark = (" ".join(f"--{name}: {pair[mode]};" for name, pair in colors.items()) for mode in (0, 1))
    return f"{selector} {{ {light} }}\n@media (prefers-color-scheme: dark) {{ {selector} {{ {dark} }} }}\n"


STYLE = (
    _variables(".canvas", COLORS | GROUND)
    + "".join(f".canvas .{name} {{ color: var(--{name}); }}\n" for name in COLORS | GROUND)
    + """.canvas { color-scheme: light dark; color: var(--ink);
  font: 12px system-ui, "Segoe UI", Roboto, "Liberation Sans", Arial, sans-serif; }
.canvas text { font-variant-numeric: tabular-nums; }
.canvas text, .canvas rect, .canvas circle, .canvas .area { fill: currentColor; }
.canvas .title { font-size: 15px; font-weight: 600; } .canvas .name { font-weight: 600; }
.canvas .small { font-size: 11px; } .canvas .end { text-anchor: end; } .canvas .middle { text-anchor: middle; }
.canvas .inside { pointer-events: none; }
.canvas .line { fill: none; stroke: currentColor; stroke-width: 1.6; stroke-linejoin: round; }
.canvas .wide { stroke-width: 4.5; stroke-opacity: 0.5; }
.canvas .grid, .canvas .frame { fill: none; stroke: var(--rule); }
.canvas .ring { fill: none; stroke: currentColor; stroke-width: 1.75; }
.canvas .dashed { stroke-dasharray: 5 4; } .canvas .dotted { stroke-dasharray: 2 3; }
.canvas .now { color: var(--soft); stroke-dasharray: 3 3; }
.canvas .pale { opacity: 0.78; } .canvas .half { opacity: 0.5; } .canvas .faint { opacity: 0.2; }
"""
)
"""Every shape has the class of its colour. It is the same in all pictures, so that a page may hold several."""

Point = tuple[float, float]
LETTER, LINE = 12, 14  # pixels: the font's size, from line to line
SIZES = {"title": 15, "small": 11}
BOLD = {"title", "name"}
_ADVANCES = {  # at most of DejaVu Sans, the widest of usual fonts, in thousandths of the size; other letters: 1000
    300: "ijlIJ'",
    340: " .,·:;/\\|",
    400: 'ft-()[]!"',
    420: "r",
    530: "sz?_*",
    595: "ckvxyFL",
    640: "abdeghnopquEPSTYµ$0123456789",
    700: "ABCKRVXZ",
    790: "DGHNOQU&",
    840: "w+=<>#^~×→",
    890: "M",
    980: "mW%",
}
_ADVANCE = {letter: advance / 1000 for advance, letters in _ADVANCES.items() for letter in letters}


def text_width(words: str, kind: str = "") -> float:
    """Pixels that words take at most, in the size and weight of their kind."""
    kinds = set(kind.split())
    size = next((SIZES[name] for name in kinds if name in SIZES), LETTER) * (1.13 if kinds & BOLD else 1.0)
    return size * sum(_ADVANCE.get(letter, 1.0) for letter in words)


TINY = 1e-300
"""Differences below it are none: powers of ten beside them are not normal numbers."""


@dataclass(frozen=True)
class Scale:
    """A vertical scale: its lowest and highest value, and its ticks."""

    low: float
    high: float
    ticks: Sequence[float]
    log: bool = False

    def height(self, value: float) -> float:
        """Position of `value`: 0 at the bottom, 1 at the top."""
        low, high, value = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        return (value - low) / (high - low)


def linear_scale(low: float, high: float, zero: bool) -> Scale:
    """A linear scale between round numbers. It starts at 0 if `zero` is set and no value is negative."""
    if zero and low >= 0:
        low = 0.0
    if high - low <= max(1e-12 * max(abs(high), abs(low)), TINY):
        margin = abs(high) / 10 or 1.0
        low, high = (low, high + margin) if low == 0 else (low - margin, high + margin)
    marks = ticks(low, high, count=5)
    gap = marks[1] - marks[0] if len(marks) > 1 else high - low
    low, high = gap * math.floor(low / gap + 1e-9), gap * math.ceil(high / gap - 1e-9)
    return Scale(low, high, [m for m in ticks(low, high, count=5) if low - gap / 9 <= m <= high + gap / 9])


def log_scale(low: float, high: float) -> Scale:
    """A logarithmic scale with ticks at powers of ten, also at 2 and 5 if they are few, or at round numbers."""
    decades = math.log10(high / low)
    if decades < 1:
        marks = ticks(low, high, count=6)
    else:
        within = (1, 2, 5) if decades < 3 else (1,)
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        marks = [float(m * 10.0**p) for p in powers for m in within]
        marks = marks[:: math.ceil(len(marks) / 12)]
    margin = (high / low) ** 0.03
    low, high = low / margin, high * margin
    return Scale(low, high, [m for m in marks if low <= m <= high], log=True)


def ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers (1, 2 or 5 times a power of ten apart) in [low, high]."""
    raw = (high - low) / count
    if not raw > TINY:
        return [low]
    power = 10.0 ** math.floor(math.log10(raw))
    gap = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first, last = math.ceil(low / gap - 1e-9), math.floor(high / gap + 1e-9)
    return [round(i * gap, 12 - math.floor(math.log10(gap))) for i in range(first, last + 1)]


def tick_labels(values: Sequence[float], unit: str = "") -> list[str]:
    """Labels with enough decimals to tell the values apart, all in one form: 0.5, 1,500, 20k, 3e-4.

    The unit is added only if it is %.
    """
    suffix = "%" if unit == "%" else ""
    largest = max(map(abs, values), default=0.0)
    gap = min((b - a for a, b in pairwise(values) if b > a), default=largest)
    if largest >= 1e15 or 0 < largest < 0.01:
        return [_power(value) + suffix for value in values]
    factor, letter = next(
        ((f, c) for f, c in _THOUSANDS if largest >= f * (10 if c == "k" else 1)), (1.0, "")
    )
    decimals = _decimals(gap / factor) if gap else 2
    places = [max(decimals, _decimals(v / factor)) if abs(v) < gap else decimals for v in values]
    return [
        f"{value / factor:,.{min(place, 6)}f}{letter * bool(value)}{suffix}"
        for value, place in zip(values, places, strict=True)
    ]


def _decimals(value: float) -> int:
    """Those of the first digit that is not 0."""
    return max(0, -math.floor(math.log10(abs(value)) + 1e-9)) if value else 0


_THOUSANDS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def _power(value: float) -> str:
    """3e-4 rather than 3e-04."""
    if not value:
        return "0"
    digits, power = f"{value:.3g}".split("e") if "e" in f"{value:.3g}" else f"{value:.2e}".split("e")
    digits = digits.rstrip("0").rstrip(".") if "." in digits else digits
    return f"{digits}e{int(power)}"


@dataclass(frozen=True)
class Axes:
    """A rectangle of a picture with a scale across and one upwards."""

    left: float
    top: float
    right: float
    bottom: float
    across: Scale
    up: Scale

    def x(self, value: float) -> float:
        return self.left + (self.right - self.left) * self.across.height(value)

    def y(self, value: float) -> float:
        return self.bottom - (self.bottom - self.top) * self.up.height(value)

    def at(self, point: Point) -> Point:
        return self.x(point[0]), self.y(point[1])


class Canvas:
    """One picture. Kinds are classes of `STYLE`: a colour such as `blue`, with others such as `pale`.

    A tip is what a browser shows over a shape. All words are escaped here.
    """

    def __init__(self, title: str = "", left: float = 20, width: float = 0, about: str = "") -> None:
        """left: of the title. width: at least. about: what the picture's name says besides its title."""
        self.about, self.parts = f"{title}{about}", list[str]()
        self.names: list[tuple[float, float, float]] = []  # left, right and lower edge
        self.width, self.height = width, 0.0
        self.text(left, 22, title, "title")

    def svg(self) -> str:
        size = f'width="{self.width:.0f}" height="{self.height + 12:.0f}"'
        box = f'viewBox="0 0 {self.width:.0f} {self.height + 12:.0f}"'
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="canvas" role="img" {size} {box}>\n'
            f"{_tip(self.about)}<style>{STYLE}</style>\n"
            '<rect class="paper" width="100%" height="100%"/>\n' + "\n".join([*self.parts, "</svg>"]) + "\n"
        )

    def text(self, x: float, y: float, words: str, kind: str = "", turned: bool = False) -> None:
        """Words whose lower edge is at `y`; from `x`, or with the kinds `end` and `middle` up to it or around it.

        turned: they read upwards.
        """
        if not words:
            return
        kinds, wide = kind.split(), text_width(words, kind)
        if not turned:
            self.reach(x + wide * ("end" not in kinds) * (0.5 if "middle" in kinds else 1.0), y)
        around = f' transform="rotate(-90 {_px(x)} {_px(y)})"' if turned else ""
        self.parts.append(
            f'<text class="{kind}" x="{_px(x)}" y="{_px(y)}"{around}>{escape(printable(words))}</text>'
        )

    def name(self, x: float, y: float, words: str, kind: str = "") -> bool:
        """`text`, unless it would cover another name. Returns whether it is there."""
        wide, kinds = text_width(words, kind), kind.split()
        left = x - wide * ("end" in kinds or 0.5 * ("middle" in kinds))
        near = (left < b + 4 and a < left + wide + 4 and abs(y - at) < LINE for a, b, at in self.names)
        if free := not any(near):
            self.names.append((left, left + wide, y))
            self.text(x, y, words, kind)
        return free

    def rect(self, kind: str, x: float, y: float, wide: float, high: float, tip: str = "") -> None:
        self.reach(x + wide, y + high)
        size = f'width="{_px(max(0.0, wide))}" height="{_px(high)}"'
        self._shape("rect", kind, f'x="{_px(x)}" y="{_px(y)}" {size}', tip)

    def box(
        self, kind: str, x: float, y: float, wide: float, high: float, tip: str = "", label: str = ""
    ) -> None:
        """A rectangle, and its label in it if there is room."""
        self.rect(kind, x, y, wide, high, tip)
        if wide >= text_width(label, "small") + 2:
            self.text(x + wide / 2, y + high / 2 + 4, label, "paper small middle inside")

    def circle(self, kind: str, x: float, y: float, radius: float, tip: str = "") -> None:
        self._shape("circle", kind, f'cx="{_px(x)}" cy="{_px(y)}" r="{_px(radius)}"', tip)

    def path(self, kind: str, data: str, tip: str = "") -> None:
        """A path by its `d`."""
        self._shape("path", kind, f'd="{data}"', tip)

    def line(self, kind: str, points: Iterable[Point], tip: str = "") -> None:
        """A line through points; with the kind `area`, the inside of its ends."""
        self.path(kind, "M" + "L".join(f"{_px(x)} {_px(y)}" for x, y in points), tip)

    def arrow(self, color: str, start: Point, end: Point) -> None:
        """A line that ends in a tip."""
        (x0, y0), (x, y) = start, end
        far = math.hypot(x - x0, y - y0) or 1.0
        dx, dy = (x - x0) / far, (y - y0) / far
        self.line(f"line {color}", [start, (x - 5 * dx, y - 5 * dy)])
        base = x - 6 * dx, y - 6 * dy
        sides = [(base[0] + side * dy, base[1] - side * dx) for side in (3.5, -3.5)]
        self.line(f"area tip {color}", [end, *sides])

    def _shape(self, tag: str, kind: str, attributes: str, tip: str) -> None:
        end = f">{_tip(tip)}</{tag}>" if tip else "/>"
        self.parts.append(f'<{tag} class="{kind}" {attributes}{end}')

    def bar(
        self,
        x: float,
        y: float,
        high: float,
        parts: Iterable[tuple[str, float, str]],
        words: str,
        beside: float = -1.0,
    ) -> None:
        """Parts (kind, pixels, tip) side by side, with words behind them. beside: an upright line that words avoid."""
        for kind, wide, tip in parts:
            self.rect(kind, x, y, wide - 0.6, high, tip)
            x += wide
        crossed = x + 2 < beside < x + 8 + text_width(words)
        self.text(beside + 6 if crossed else x + 6, y + high / 2 + 5, words)

    def legend(self, x: float, y: float, items: Iterable[tuple[str, str]]) -> float:
        """A sample and words for each (kind, words), on a line of text at `y`. Returns where it ends."""
        for kind, words in items:
            if "line" in kind.split():
                self.path(kind, f"M{_px(x - 3)} {_px(y - 4)}h18")
            elif "dot" in kind.split():
                self.circle(kind, x + 6, y - 4, 3.5)
            else:
                self.rect(kind, x, y - 10, 12, 12)
            self.text(x + 18, y, words, "soft")
            x += 34 + text_width(words)
        return x

    def axes(self, axes: Axes, across: str, up: str) -> None:
        """Lines and labels of both scales, and what they count: `up` above the labels at the left."""
        self.levels(axes, tick_labels(axes.up.ticks))
        self.columns(axes, tick_labels(axes.across.ticks), across)
        self.text(axes.left, axes.top - 10, up, "soft")

    def levels(self, axes: Axes, labels: Sequence[str]) -> None:
        """A line across at each tick of the scale upwards, with its label."""
        for mark, words in zip(axes.up.ticks, labels, strict=True):
            self.path("grid", f"M{_px(axes.left)} {_px(axes.y(mark))}H{_px(axes.right)}")
            self.text(axes.left - 8, axes.y(mark) + 4, words, "soft end")

    def columns(self, axes: Axes, labels: Sequence[str], across: str, lines: bool = True) -> None:
        """A line upwards at each tick of the scale across, with its label, and what it counts.

        Labels that would overlap are left out.
        """
        taken = float("-inf")
        for mark, words in zip(axes.across.ticks, labels, strict=True):
            x, half = axes.x(mark), text_width(words) / 2
            if lines:
                self.path("grid", f"M{_px(x)} {_px(axes.top)}V{_px(axes.bottom)}")
            if x - half > taken:
                self.text(x, axes.bottom + 17, words, "soft middle")
                taken = x + half + 4
        self.text(axes.right, axes.bottom + 34, across, "soft end")

    def inset(self, x: float, y: float, inner: Canvas, wide: float, high: float) -> None:
        """Another canvas's shapes, cut off at the edges of a rectangle."""
        self.reach(x + wide, y + high)
        size = f'width="{_px(wide)}" height="{_px(high)}"'
        self.parts += [f'<svg x="{_px(x)}" y="{_px(y)}" {size}>', *inner.parts, "</svg>"]

    def reach(self, right: float, bottom: float) -> None:
        """The picture is at least as wide and high, with a margin at the right."""
        self.width, self.height = max(self.width, right + 12), max(self.height, bottom)


def stacked(pictures: Iterable[str]) -> str:
    """Documents of `Canvas.svg`, one under the other."""
    parts, width, top = list[str](), 0, 0
    for picture in pictures:
        size = re.search('width="([0-9]+)" height="([0-9]+)"', picture)
        assert size is not None
        parts.append(picture.replace("<svg", f'<svg y="{top}"', 1))
        width, top = max(width, int(size[1])), top + int(size[2])
    size = f'width="{width}" height="{top}" viewBox="0 0 {width} {top}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n' + "".join(parts) + "</svg>\n"


def _tip(words: str) -> str:
    return f"<title>{escape(printable(words))}</title>"


def _px(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 400, 70, 200, 50, 46  # pixels, margins
DASHES = ("", " dashed", " dotted")


@dataclass(frozen=True)
class Line:
    """Points in the order of x. dots: drawn as points. line: drawn as a line. color: a number; dashes tell those apart
    that are more than there are colours. marks: points with a ring. name: of the legend; "": not in it."""

    name: str
    points: Sequence[Point]
    color: int = 0
    dots: bool = False
    line: bool = True
    marks: Sequence[Point] = ()

    @property
    def kind(self) -> str:
        dashes, color = divmod(self.color, len(NAMES))
        return f"{NAMES[color]}{DASHES[dashes % len(DASHES)]}"


def picture(
    title: str, lines: Sequence[Line], across: str, up: str, log: tuple[bool, bool] = (False, False)
) -> str:
    """The picture; "" without a point. across, up: what the axes show. log: which of them are logarithmic."""
    shown = [[p for p in line.points if all(map(math.isfinite, p))] for line in lines]
    points = [p for drawn in shown for p in drawn] + [p for line in lines for p in line.marks]
    if not points:
        return ""
    scales = (_scale([p[i] for p in points], log[i]) for i in (0, 1))
    axes = Axes(LEFT, TOP, WIDTH - RIGHT, HEIGHT - BOTTOM, *scales)
    canvas = Canvas(title, width=WIDTH)
    canvas.axes(axes, across, up)
    for line, drawn in zip(lines, shown, strict=True):
        draw_line(canvas, axes, line, drawn)
    legend(canvas, WIDTH - RIGHT + 14, TOP + 8, lines)
    return canvas.svg()


def draw_line(canvas: Canvas, axes: Axes, line: Line, points: Sequence[Point]) -> None:
    """A line through some of its points, its dots with their values, and its marks."""
    if line.line and len(points) > 1:
        canvas.line(f"line {line.kind}", map(axes.at, points))
    if line.dots or len(points) == 1:
        for point in points:
            canvas.circle(line.kind, *axes.at(point), 3.5, f"{line.name}: {point[0]:.4g}, {point[1]:.4g}")
    for mark in line.marks:
        canvas.circle(f"ring {line.kind}", *axes.at(mark), 7)


def legend(canvas: Canvas, left: float, top: float, lines: Sequence[Line]) -> None:
    """The names, one under the other, as far as there is room."""
    named = [line for line in lines if line.name]
    for number, line in enumerate(named[: (HEIGHT - TOP) // 17]):
        y = top + 17 * number
        if line.line and line.dots:
            canvas.circle(line.kind, left + 6, y - 4, 3.5)
        canvas.legend(left, y, [(f"{'line' if line.line else 'dot'} {line.kind}", line.name)])


def _scale(values: Sequence[float], log: bool) -> Scale:
    low, high = min(values), max(values)
    return log_scale(low, high) if log and 0 < low < high else linear_scale(low, high, False)
