"""The packages and rooms of the program, line by line, with the path of a batch through them."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from sources import LINES

from fivefold.draw.canvas import Canvas

PACKAGES = (("green", "fivefold_play"), ("orange", "fivefold_plan"), ("blue", "fivefold, the trainer"))
COLORS = {"play": "green", "plan": "orange"}
BATCH = {"data": "1, 2", "models": "3", "kernels": "3", "parallel": "4, 5, 6", "optim": "6", "observe": "7"}
"""Where the steps of docs/architecture.md, "The path of a batch", happen."""
LEFT, TOP, HIGH, GAP, WIDE = 20.0, 66.0, 24.0, 5.0, 640.0


def house() -> str:
    """The picture. A room imports rooms below it only."""
    canvas = Canvas("rooms: each imports those below it; numbers: the path of a batch", LEFT)
    canvas.legend(LEFT, 46, PACKAGES)
    for number, rooms in enumerate(rooms for rooms in LINES if "__main__" not in rooms):
        wide = (WIDE - GAP * (len(rooms) - 1)) / len(rooms)
        for place, room in enumerate(sorted(rooms)):
            words = f"{room}   {BATCH[room]}" if room in BATCH else room
            color = COLORS.get(room.partition(".")[0], "blue")
            x, y = LEFT + place * (wide + GAP), TOP + number * (HIGH + GAP)
            canvas.box(color if room not in BATCH else f"{color} strong", x, y, wide, HIGH, room, words)
    return canvas.svg()
