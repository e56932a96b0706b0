"""The tables of `fivefold compare`: the criteria of each layout, and when its communication hides."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fivefold.lessons.compare import Row
    from fivefold.lessons.overlap import Rule

REASONS = {"operations": "norms", "recompute": "recompute", "sums": "sums", "update": "updates"}


def criteria_table(rows: list[Row], title: str) -> list[str]:
    """The criteria of each layout as a table, and what is to be said of some of them."""
    measured = any(row.measured for row in rows)
    head = ["", "layout", "redundant", "memory", "sent", "exposed", "idle", "step s", "MFU", "fits"]
    if measured:
        head += ["memory here", "sent here", "step s here"]
    cells = [head, *(_cells(row, measured) for row in rows)]
    widths = [max(len(row[i]) for row in cells if i < len(row)) for i in range(len(head))]
    lines = [f"{title}: three criteria of each layout, predicted per device and step"]
    if any(row.plan for row in rows):
        lines.append(f"  {_setting(rows)}")
    lines.append("")
    for row in cells:
        aligned = (
            f"{cell:{width}}" if i < 2 else f"{cell:>{width}}"
            for i, (cell, width) in enumerate(zip(row, widths, strict=False))
        )
        lines.append(f"  {'  '.join(aligned)}".rstrip())
    return [*lines, "", *_notes(rows)]


def _setting(rows: list[Row]) -> str:
    """What the layouts have in common, or several values of it."""
    settings = [row.plan.setting for row in rows if row.plan]
    sizes = sorted({s.sizes.B for s in settings})
    words = f"microbatches of {' or '.join(map(str, sizes))} sequence{'s' * (sizes != [1])}"
    words += "".join({f" of {s.model.seq_len:,} tokens in {s.mode}" for s in settings})
    again = {s.layout.recompute for s in settings}
    return words + (f", recompute {again.pop()}" if len(again) == 1 else "")


def _cells(row: Row, measured: bool) -> list[str]:
    from fivefold.observe.format import memory_text, size

    plan = row.plan
    if plan is None:
        return [row.technique, row.short, "not possible"]
    most = max(row.redundant.parts.items(), key=lambda part: part[1])
    reason = f" {REASONS[most[0]]}" if most[1] >= 0.0005 else ""
    cells = [
        row.technique,
        row.short,
        f"{row.redundant.share:.1%}{reason}",
        memory_text(plan.peak_bytes),
        " + ".join(f"{axis} {size(most)}" for axis, most in row.sent(measured).items()) or "nothing",
        f"{row.exposed:.1%}",
        f"{row.idle:.1%}",
        f"{plan.step.seconds:.4g}",
        f"{plan.mfu:.1%}",
        "yes" if plan.fits else "no",
    ]
    if not measured:
        return cells
    if not isinstance(row.measured, dict):
        return [*cells, "-", "-", "-"]
    return cells + _here(row.measured)


def _here(figures: dict[str, Any]) -> list[str]:
    """What was measured, as cells."""
    from fivefold.observe.format import memory_text, size

    held, seconds, sent = (figures.get(name) for name in ("memory_bytes", "step_s", "sent_bytes"))
    return [
        memory_text(held) if held else "-",
        " + ".join(f"{axis} {size(most)}" for axis, most in (sent or {}).items()) or "nothing",
        f"{seconds:.4g}" if seconds else "-",
    ]


def _notes(rows: list[Row]) -> list[str]:
    """Sentences behind the table: what does not divide, what a word means."""
    lines = []
    for row in rows:
        if row.why:
            instead = f"; {row.short} is shown" if row.plan else ""
            lines.append(f"  {row.technique}: {row.why}{instead}")
        share, modules = row.undivided if row.plan else (0.0, [])
        if share:
            lines.append(
                f"  {row.technique}: tp does not divide {share:.1%} of the parameters ({', '.join(modules)}): "
                "with sp its ranks have different tokens there"
            )
        if isinstance(row.measured, str):
            lines.append(f"  {row.technique}: was not measured: {row.measured}")
    return [
        *lines,
        "  redundant: work that one process would not do, as a share of its work, and the largest cause: norms and",
        "  other activations that all ranks have, recompute, sums of gradients, updates",
        "  sent: bytes that leave a device, by axis; exposed, idle: shares of the step that wait for messages, or for "
        "other stages",
    ]


def overlap_table(rows: list[Row], title: str) -> list[str]:
    """The rules of all layouts as a table, and their formulas."""
    cells = [("", "what hides", "needs", "planner", "has", "now", "")]
    for row in rows:
        for rule in row.rules if row.plan else ():
            cells.append(
                (
                    rule.technique,
                    rule.what,
                    f"{rule.variable} >= {_count(rule.needed)}",
                    _crossing(rule),
                    _count(rule.now),
                    f"{rule.planned:.2g}",
                    rule.verdict,
                )
            )
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    lines = [f"{title}: when communication hides behind computing", ""]
    for row in cells:
        lines.append("  " + "  ".join(f"{c:{w}}" for c, w in zip(row, widths, strict=True)).rstrip())
    lines += ["", "  formulas, and where they come from:"]
    rules = [rule for row in rows if row.plan for rule in row.rules]
    lines += dict.fromkeys(f"    {rule.technique}: {rule.formula}; {rule.source}" for rule in rules)
    return [
        *lines,
        "  needs: by the formula; planner: with all that it prices; now: seconds of messages over those of computing",
        "  F: FLOP/s of matmuls (CP: of attention). W, W': bytes/s of the collectives of weights and of gradients.",
        "  e, g: bytes of a number, of a gradient. P: parameters sent. A: those that multiply a token. n: ranks.",
    ]


def _crossing(rule: Rule) -> str:
    """The planner's threshold, or the end of the sizes that it was asked for."""
    sizes = [size for size, _ in rule.points]
    if not rule.crossing:
        return f"< {_count(min(sizes))}"
    return _count(rule.crossing) if math.isfinite(rule.crossing) else f"> {_count(max(sizes))}"


def _count(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
