"""Colours of several curves in one picture, for light and dark pages."""

from __future__ import annotations

LIGHT = ("#1d5b9c", "#b5651d", "#2c7a5b", "#9b2f4a", "#7b4fa3", "#66625b", "#0f8a9d")
DARK = ("#7fb2ea", "#f0b06a", "#79c9a3", "#ef8fa6", "#c3a1e0", "#b5b0a6", "#6fd3e3")


def css() -> str:
    """The classes c0, c1, ... of lines, dots, swatches and legends."""
    light, dark = (
        " ".join(f"--c{i}: {color};" for i, color in enumerate(colors)) for colors in (LIGHT, DARK)
    )
    classes = "".join(
        f".line.c{i}, .dots.c{i} {{ stroke: var(--c{i}); }} .swatch.c{i}, .legend .c{i}::before "
        f"{{ background: var(--c{i}); }}\n"
        for i in range(len(LIGHT))
    )
    return f":root {{ {light} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n{classes}"
