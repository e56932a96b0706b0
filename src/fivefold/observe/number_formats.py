"""Formats of numbers, and how the numbers of a step, counted by their exponent, lie in their ranges: file in
RUN/traces, text, picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fivefold.draw.canvas import Canvas
from fivefold.errors import UserError
from fivefold.files import read_json, understood
from fivefold.host.devices import CORES, SHEETS
from fivefold.observe.format import aligned
from fivefold.observe.metrics import write_trace
from fivefold.precision import PRECISIONS
from fivefold.precision.formats import BLOCKS, E8M0, FORMATS, Format

RANGES = tuple(form for form in FORMATS.values() if form.bits <= 16)
"""The formats whose ranges a histogram is compared with. Those of fp32 and wider hold every number of a run."""
BARS = " ▁▂▃▄▅▆▇█"
DECADES = 8  # powers of ten of a bar's height
WIDTH, LEFT, TOP, HIGH, ROW = 760, 132, 40, 74, 18  # pixels


def generations(form: Format) -> list[str]:
    """The generations of devices with a data sheet that states a rate for a format, from the oldest."""
    names = {sheet.generation for sheet in SHEETS if sheet.rate(form.multiplied)}
    return sorted(names, key=lambda name: (name[-6:], name))


def modes(form: Format) -> list[str]:
    """The values of `precision.mode` that multiply in a format."""
    return [name for name, mode in PRECISIONS.items() if mode.multiplies(form)]


def table() -> list[dict[str, object]]:
    """Every format as a row."""
    return [
        {
            "format": form.name,
            "bits": form.bits,
            **form.parts,
            "largest": form.largest,
            "smallest_normal": form.smallest_normal,
            "smallest": form.smallest,
            "epsilon": form.epsilon,
            "computed_by": generations(form),
            "devices": [sheet.name for sheet in SHEETS if sheet.rate(form.multiplied)],
            "modes": modes(form),
        }
        for form in FORMATS.values()
    ]


def split(form: Format) -> str:
    """`1 + 8 + 7`: bits of sign, exponent and fraction."""
    return " + ".join(map(str, form.parts.values()))


def to_text() -> str:
    """The formats as a table for terminals."""
    titles = "format|bits|sign, exponent, fraction|largest|smallest normal|smallest|epsilon"
    rows: list[list[str]] = [[*titles.split("|")]]
    for form in FORMATS.values():
        limits = map(_number, (form.largest, form.smallest_normal, form.smallest, form.epsilon))
        rows.append([form.name, str(form.bits), split(form), *limits])
    scaled = [["in blocks", "size", "scale", "bits per number"]]
    for block in BLOCKS:
        scale = block.scale.name + (", fp32 per tensor" if block.tensor else "")
        scaled.append([block.name, str(block.size), scale, f"{block.bits:g}"])
    computed = [["format", "computed by", "precision.mode"]]
    for form in FORMATS.values():
        mode = ", ".join(modes(form)) or "shown, not trained"
        devices = ", ".join(name.partition(" (")[0] for name in generations(form))
        computed.append([form.name, devices, mode])
    cores = [["architecture", "CUDA cores multiply", "tensor cores multiply"]]
    cores += [[name, *(kinds or "(none)" for kinds in pair)] for name, pair in CORES.items()]
    return "\n\n".join("\n".join(aligned(part)) for part in (rows, scaled, computed, cores)) + "\n"


PARTS = {"sign": "red", "exponent": "blue", "fraction": "green"}
BIT = 5  # pixels: the widest format fits a phone


def bits_svg() -> str:
    """A bar for each format, with a box for each bit; last a scale of blocks."""
    canvas, top = Canvas("Bits of each format"), 74
    canvas.legend(20, 46, [(color, part) for part, color in PARTS.items()])
    for form in (*FORMATS.values(), E8M0):
        canvas.text(20, top, form.name, "name")
        canvas.text(110, top, f"{split(form)} = {form.bits}" + ", a scale" * (not form.signed), "soft")
        bits = [f"{part} {bit + 1} of {n}" for part, n in form.parts.items() for bit in range(n)]
        for place, bit in enumerate(bits):
            color = PARTS[bit.partition(" ")[0]]
            canvas.rect(color, 20 + place * BIT, top + 6, BIT - 1, 15, f"{form.name}: {bit}")
        top += 42
    return canvas.svg()


KINDS = ("weights", "activations", "activation gradients", "weight gradients")
LOWEST, HIGHEST = FORMATS["fp32"].lowest - FORMATS["fp32"].fraction, FORMATS["fp32"].highest
"""Exponents of fp32, with those of its subnormal numbers."""
BINS = HIGHEST - LOWEST + 3
"""Zeros, the exponents from `LOWEST` to `HIGHEST`, what is not finite."""


class Fate(NamedTuple):
    """Shares of the numbers that are not zero: those that a format rounds to zero, makes subnormal (with fewer bits),
    cannot hold because they are too large."""

    zero: float
    subnormal: float
    large: float


@dataclass(frozen=True)
class Histogram:
    """counts: by kind, of each of the `BINS`."""

    counts: dict[str, Sequence[int]]

    def exponents(self, kind: str) -> dict[int, int]:
        """Numbers by exponent, the whole part of log2 |x|, where there are any."""
        return {LOWEST + place: number for place, number in enumerate(self.counts[kind][1:-1]) if number}

    def fate(self, kind: str, form: Format, shift: int = 0) -> Fate:
        """What the format makes of the numbers, multiplied by 2^shift. One is rounded to zero if it is below half of
        the smallest."""
        shifted = [(e + shift, n) for e, n in self.exponents(kind).items()]
        total, smallest = sum(n for _, n in shifted) or 1, form.lowest - form.fraction
        zero = sum(n for e, n in shifted if e < smallest - 1)
        subnormal = sum(n for e, n in shifted if smallest - 1 <= e < form.lowest)
        large = sum(n for e, n in shifted if e > form.highest)
        return Fate(zero / total, subnormal / total, large / total)

    def headroom(self, kind: str, form: Format) -> int:
        """The largest power of two (its exponent) by which the numbers can be multiplied without one too large."""
        return form.highest - 1 - max(self.exponents(kind), default=form.highest - 1)

    def as_json(self) -> dict[str, object]:
        return {
            kind: {
                "zero": found[0],
                "not_finite": found[-1],
                "exponents": {str(e): n for e, n in self.exponents(kind).items()},
            }
            for kind, found in self.counts.items()
        }


def from_json(kinds: dict[str, dict[str, Any]]) -> Histogram:
    counts: dict[str, Sequence[int]] = {}
    for kind, figures in kinds.items():
        bins = [int(figures["zero"]), *[0] * (BINS - 2), int(figures["not_finite"])]
        for exponent, number in figures["exponents"].items():
            bins[int(exponent) - LOWEST + 1] = number
        counts[kind] = bins
    return Histogram(counts)


def write(run: Path, step: int, found: Histogram) -> Path:
    """Writes RUN/traces/histogram-step-N.json."""
    return write_trace(run, f"histogram-step-{step:08d}", {"step": step, "kinds": found.as_json()})


def read(run: Path) -> tuple[int, Histogram]:
    """(step, histogram) that a run wrote last. Raises UserError: it wrote none."""
    paths = sorted((run / "traces").glob("histogram-step-*.json"))
    if not paths:
        raise UserError(
            f"{run}: no step's numbers were counted. Train with --set observe.histogram_step=N, such as 3, which "
            f"writes {run / 'traces'}"
        )
    with understood(paths[-1]):
        found = read_json(paths[-1])
        return int(found["step"]), from_json(found["kinds"])


def histogram_text(found: Histogram, columns: int = 100) -> str:
    """The histogram over the formats' ranges, and what each format makes of the numbers.

    A bar's height is the logarithm of a share. `=` are a format's normal numbers, `-` its subnormal ones.
    """
    low, high = _ends(found)
    each = max(1, -(-(high - low + 1) // columns))  # exponents per column
    places = range(low, high + 1, each)
    width = max(map(len, KINDS))
    axis = ""  # a number about every ten columns
    for column, exponent in enumerate(places):
        if column % 10 == 0:
            axis = axis.ljust(column) + str(exponent)
    lines = [f"{'2^':>{width}}  {axis}"]
    for kind in KINDS:
        exponents = found.exponents(kind)
        total = sum(exponents.values()) or 1
        shares = [sum(exponents.get(p + i, 0) for i in range(each)) / total for p in places]
        bars = (BARS[math.ceil(_height(share) * (len(BARS) - 1))] for share in shares)
        lines.append(f"{kind:>{width}}  {''.join(bars)}".rstrip())
    for form in RANGES:
        lowest = form.lowest - form.fraction
        marks = "".join(
            "=" if form.lowest <= p <= form.highest else "-" if lowest <= p < form.lowest else " "
            for p in places
        )
        lines.append(f"{form.name:>{width}}  {marks}".rstrip())
    rows = [["share of the numbers that become", *KINDS]]
    for form in RANGES:
        fates = [found.fate(kind, form) for kind in KINDS]
        for what, word in (("zero", "zero"), ("subnormal", "subnormal"), ("large", "too large")):
            shares = [getattr(fate, what) for fate in fates]
            if any(shares):
                rows.append([f"{form.name}: {word}", *map(_share, shares)])
        powers = {kind: found.headroom(kind, form) for kind in KINDS}
        cells = [f"{_share(found.fate(kind, form, by).zero)} (x 2^{by})" for kind, by in powers.items()]
        rows.append([f"{form.name}: zero, with the best scale", *cells])
    return "\n".join([*lines, "", *aligned(rows), ""])


def histogram_svg(found: Histogram, title: str) -> str:
    """The same as a picture: a panel for each kind, and under them the formats' ranges on the same axis."""
    low, high = _ends(found)
    each = (WIDTH - LEFT - 24) / (high - low + 1)
    canvas, top = Canvas(title, width=WIDTH), TOP

    def bar(kind: str, first: int, last: int, y: float, tall: float, tip: str) -> None:
        """Over the exponents from `first` to `last`, as far as they are drawn."""
        first, last = max(first, low), min(last, high)
        if first <= last:
            canvas.rect(kind, LEFT + (first - low) * each, y, (last - first + 1) * each - 0.6, tall, tip)

    for kind in KINDS:
        canvas.text(LEFT - 10, top + HIGH - 4, kind, "end")
        canvas.text(LEFT - 10, top + 10, "log of the share", "soft small end")
        exponents = found.exponents(kind)
        total = sum(exponents.values()) or 1
        for e, n in exponents.items():
            tall = HIGH * _height(n / total)
            bar("blue", e, e, top + HIGH - tall, tall, f"2^{e}: {n / total:.3g} of {kind}")
        canvas.line("grid", [(LEFT, top + HIGH), (WIDTH - 24, top + HIGH)])
        top += HIGH + 16
    for form in RANGES:
        canvas.text(LEFT - 10, top + 13, form.name, "end")
        lowest = form.lowest - form.fraction
        bar("green half", lowest, form.lowest - 1, top + 3, ROW - 6, f"{form.name}: subnormal")
        bar("green", form.lowest, form.highest, top + 3, ROW - 6, f"{form.name}: normal")
        top += ROW
    for exponent in range(low - low % -10, high + 1, 10):
        x = LEFT + (exponent - low) * each
        canvas.line("grid", [(x, TOP), (x, top)])
        canvas.text(x, top + 14, f"2^{exponent}", "soft small middle")
    return canvas.svg()


def _ends(found: Histogram) -> tuple[int, int]:
    """The exponents drawn: those of fp16, and those of all kinds up to a share that has a bar."""
    low, high = FORMATS["fp16"].lowest - FORMATS["fp16"].fraction, FORMATS["fp16"].highest
    for kind in KINDS:
        exponents = found.exponents(kind)
        total = sum(exponents.values())
        drawn = [e for e, n in exponents.items() if _height(n / total) > 0]
        low, high = min([low, *drawn]), max([high, *drawn])
    return low - 1, high + 1


def _height(share: float) -> float:
    """A bar's height, 0 to 1."""
    return max(0.0, 1 + math.log10(share) / DECADES) if share else 0.0


def _share(share: float) -> str:
    return "0" if not share else f"{share:.1%}" if share >= 0.001 else f"{share:.1e}"


def _number(x: float) -> str:
    return f"{x:g}" if 1e-3 <= abs(x) < 1e6 else f"{x:.3g}"
