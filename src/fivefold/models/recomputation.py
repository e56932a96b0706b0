"""What backward recomputes in each mode, as one table. `parallel/recompute.py` wraps the methods that it names; the
planner reads what is kept and repeated. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fivefold.models.operations import Operation, Part, Program, Role


@dataclass(frozen=True)
class Region:
    """A part of the model that backward runs again from its input.

    runs: the module that is a region, and its method; None: this program cannot do it. keeps: roles of the tensors that
    are kept from forward. repeats: parts of the operations that backward repeats; `last` among them only if their layer
    saves its input after its matmul, because recomputation stops at the last tensor that is needed. Layers that
    communicate or defer their weight gradient do. matmuls: share of the matmuls that are repeated. collectives: "all"
    are repeated; or "gathers", which a layer would repeat anyway, beside its matmul: recomputation runs them before.
    """

    runs: tuple[Literal["block", "sublayer"], str] | None
    keeps: frozenset[Role]
    repeats: frozenset[Part]
    last: Part | None = None
    matmuls: float = 1.0
    collectives: Literal["all", "gathers"] = "all"

    def repeated(self, op: Operation, saves_late: bool) -> float:
        """Average number of times that backward repeats an operation's forward, besides its messages. saves_late: True
        if layers save their inputs after their matmuls."""
        if op.part not in self.repeats or (op.part == self.last and not saves_late):
            return 0.0
        if self.matmuls < 1 and op.attention:
            return 0.0  # its result is kept
        return self.matmuls if op.matmul else 1.0

    def repeats_messages(self, op: Operation) -> bool:
        """True if backward repeats an operation's forward messages."""
        return self.collectives == "all" and op.part in self.repeats


WITHIN: frozenset[Role] = frozenset({"core", "inner"})
BESIDES: frozenset[Role] = frozenset({"input", "stream", "product", "copied"})
"""Tensors saved in the second half of a sublayer; those saved outside of it, with its input."""
REGIONS = {
    "nothing": Region(None, (BESIDES | WITHIN) - {"copied"}, frozenset()),
    "block": Region(("block", "forward"), frozenset({"input"}), frozenset({"", "core", "inner", "out"})),
    "sublayer": Region(("sublayer", "finish"), BESIDES, frozenset({"core", "inner", "out"}), last="out"),
    "core": Region(None, (BESIDES | WITHIN) - {"core"}, frozenset({"core"})),
    "operations": Region(
        None,
        BESIDES - {"stream"},
        frozenset({"", "core", "inner", "out", "never"}),
        matmuls=0.5,
        collectives="gathers",
    ),
}
"""sublayer: everything behind a sublayer's first matmul. core: attention's core only (arXiv 2205.05198). operations:
every second matmul and all operations between matmuls. That is torchtitan's default, which keeps the results of
attention and of reduce-scatters."""
MODES: dict[str, str | None] = {"none": "nothing", "selective": None, "full": "block"}
"""The region that each mode of `layout.recompute` repeats. None: the program says it (`Program.selective`)."""


def region(mode: str, program: Program | None = None) -> Region:
    """The region of a mode, by the program's meaning of "selective"; None: this program's."""
    return REGIONS[MODES[mode] or (program or Program()).selective]
