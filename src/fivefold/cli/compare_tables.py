"""The tables of `fivefold compare`: the criteria of each layout, and when its communication hides."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fivefold.lessons.compare import Row

REASONS = {"operations": "norms", "recompute": "recompute", "sums": "sums", "update": "updates"}


def criteria_table(rows: list[Row], title: str) -> list[str]:
    """The criteria of each layout as a table, and what is to be said of some of them."""
    measured = any(row.measured for row in rows)
    head = ["", "layout", "redundant", "memory", "sent", "exposed", "idle", "step s", "MFU", "fits"]
    head += ["memory here", "sent here", "step s here"] * measured
    lines = [f"{title}: three criteria of each layout, predicted per device and step"]
    if any(row.plan for row in rows):
        lines.append(f"  {_setting(rows)}")
    return [*lines, "", *_aligned([head, *(_cells(row, measured) for row in rows)], 2), "", *_notes(rows)]


def _aligned(cells: list[list[str]], words: int) -> Iterator[str]:
    """The rows of a table. words: columns at the left that are text; the others are numbers."""
    columns = range(len(cells[0]))
    widths = [max(len(row[i]) for row in cells if i < len(row)) for i in columns]
    for row in cells:
        padded = (
            f"{cell:{width}}" if i < words else f"{cell:>{width}}"
            for i, cell, width in zip(columns, row, widths, strict=False)
        )
        yield f"  {'  '.join(padded)}".rstrip()


def _setting(rows: list[Row]) -> str:
    """What the layouts have in common, or several values of it."""
    settings = [row.plan.setting for row in rows if row.plan]
    sizes = sorted({s.sizes.B for s in settings})
    words = f"microbatches of {' or '.join(map(str, sizes))} sequence{'s' * (sizes != [1])}"
    words += "".join({f" of {s.model.seq_len:,} tokens in {s.mode}" for s in settings})
    again = {s.layout.recompute for s in settings}
    return words + (f", recompute {again.pop()}" if len(again) == 1 else "")


def _cells(row: Row, measured: bool) -> list[str]:
    if row.plan is None:
        return [row.technique, row.short, "not possible"]
    words = row.words()
    reason, most = max(row.redundant.parts.items(), key=lambda part: part[1])
    redundant = words["redundant"] + f" {REASONS[reason]}" * (most >= 0.0005)
    cells = [row.technique, row.short, redundant, words["memory"], _sent(row.sent(measured))]
    cells += [words[name] for name in ("exposed", "idle", "step", "mfu", "fits")]
    if measured:
        cells += _here(row.measured) if isinstance(row.measured, dict) else ["-", "-", "-"]
    return cells


def _sent(by_axis: Mapping[str, int]) -> str:
    from fivefold.observe.format import size

    return " + ".join(f"{axis} {size(most)}" for axis, most in by_axis.items()) or "nothing"


def _here(figures: dict[str, Any]) -> list[str]:
    """What was measured, as cells."""
    from fivefold.observe.format import memory_text

    held, seconds, sent = (figures.get(name) for name in ("memory_bytes", "step_s", "sent_bytes"))
    return [memory_text(held) if held else "-", _sent(sent or {}), f"{seconds:.4g}" if seconds else "-"]


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
    """The rules of all layouts as a table."""
    from fivefold.lessons.overlap import count_text

    cells = [["", "what hides", "by the size of", "from", "has", "now", ""]]
    for rule in (rule for row in rows if row.plan for rule in row.rules):
        now = [rule.threshold, count_text(rule.now), f"{rule.planned:.2g}", rule.verdict]
        cells.append([rule.technique, rule.what, rule.variable, *now])
    return [
        f"{title}: when communication hides behind computing",
        "",
        *_aligned(cells, len(cells[0])),
        "",
        "  from: the size from which messages take less time than the computing beside them, by the planner; has: the",
        "  recipe's; now: seconds of messages over those of computing",
    ]
