"""Colours for light and dark mode: those of curves on pages, and the style sheet of pictures."""

from __future__ import annotations

from collections.abc import Mapping

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
    """The classes c0, c1, ... of lines, dots, swatches and legends of a page."""
    numbered = {f"c{number}": pair for number, pair in enumerate(COLORS.values())}
    classes = "".join(
        f".line.{name}, .dots.{name} {{ stroke: var(--{name}); }} .swatch.{name}, .legend .{name}::before "
        f"{{ background: var(--{name}); }}\n"
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
