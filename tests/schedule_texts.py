"""Pipeline schedules as text: a line per rank, as PyTorch's runtime writes them."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from fivefold.schedules.pipeline import Action, Schedule


def parse(text: str) -> Action:
    """Reads `0F3` or `1SEND_B2`."""
    found = re.fullmatch(r"(\d+)([A-Z_]+)(\d+)", text)
    assert found, text
    kind: Any = found[2]
    return Action(int(found[1]), kind, int(found[3]))


def read(text: str, name: str = "own") -> Schedule:
    """The computations of a schedule; transfers and PyTorch's other actions are left out."""
    cells = [re.findall(r"(?<!\w)\d+[FBIW]\d+", line) for line in text.splitlines() if line]
    rows = tuple(tuple(map(parse, row)) for row in cells)
    rank_of = {action.stage: rank for rank, row in enumerate(rows) for action in row}
    microbatches = 1 + max(action.microbatch for row in rows for action in row)
    places = tuple(rank_of[stage] for stage in range(len(rank_of)))
    return Schedule(name, microbatches, places, rows, paired="OVERLAP_F_B" in text)


def written(rows: Sequence[Iterable[Action]]) -> str:
    return "".join(",".join(map(str, row)) + "\n" for row in rows)
