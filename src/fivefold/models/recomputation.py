"""What backward recomputes in each mode, as one table. `parallel/recompute.py` executes it; the planner reads what is
kept and repeated. No torch.

A mode is "none", "selective", "full", or operations by their names: "ops:attention+gate+norm". Blocks may have several:
"full*3/none*9" is that of the first three and of the nine behind them. "budget:6GiB" becomes such a text before a run
(`fivefold_plan/search/recompute_budget.py`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Literal

from fivefold.errors import UserError
from fivefold.host.devices import GIB
from fivefold.models.operations import Operation, Part, Program, Role


@dataclass(frozen=True)
class Recomputed:
    """An operation that backward can run again, from tensors that are kept anyway.

    frees: roles of the tensors that are not kept. keeps: those that are kept instead. repeats: parts of the operations
    that run again. last: the one of them that runs again only if its layer saves its input after its matmul, because
    recomputation stops at the last tensor that is needed. Layers that communicate or defer their weight gradient do.
    host: share of a block's Python that runs again.
    """

    frees: frozenset[Role]
    repeats: frozenset[Part]
    keeps: frozenset[Role] = frozenset()
    last: Part | None = None
    host: float = 0.25


OPERATIONS = {
    "attention": Recomputed(
        frozenset({"latent", "core", "inner", "attended"}),
        frozenset({"latent", "core", "inner", "out"}),
        frozenset({"copied"}),
        "out",
    ),
    "gate": Recomputed(frozenset({"gate", "fed"}), frozenset({"gate", "down"}), last="down"),
    "norm": Recomputed(frozenset({"norm"}), frozenset({"norm"}), host=0.0),
}
"""attention: all behind the first matmul: norms of queries and keys, rotation, the core, the core's result. gate: the
gate or GELU. norm: the norms before attention and feed-forward, from their own inputs. Compiled code keeps no result
of what it makes again: it repeats the last matmul, too, if something else reads that."""


@dataclass(frozen=True)
class Region:
    """What is kept from forward, and what backward repeats. The fields are sums over `Recomputed`.

    matmuls: share of the matmuls that are repeated. core: True if fused attention repeats its scores and their softmax
    only, and these only if forward would have kept them. collectives: "all" of the repeated parts are repeated;
    or "gathers", which a layer would repeat anyway, beside its matmul: recomputation runs them before.
    """

    keeps: frozenset[Role]
    repeats: frozenset[Part] = frozenset()
    lasts: frozenset[Part] = frozenset()
    host: float = 0.0
    matmuls: float = 1.0
    core: bool = False
    collectives: Literal["all", "gathers"] = "all"

    def repeated(self, op: Operation, saves_late: bool) -> float:
        """Average number of times that backward repeats an operation's forward, besides its messages. saves_late: True
        if layers save their inputs after their matmuls."""
        if op.part not in self.repeats or (op.part in self.lasts and not saves_late):
            return 0.0
        if self.matmuls < 1 and op.attention:
            return 0.0  # its result is kept
        if self.core and op.attention:
            return SCORES * any(saved.role == "core" for saved in op.saved)
        return self.matmuls if op.matmul else 1.0

    def repeats_messages(self, op: Operation) -> bool:
        """True if backward repeats an operation's forward messages."""
        return self.collectives == "all" and not self.core and op.part in self.repeats


SCORES = 0.5
"""Share of fused attention's forward that computes probabilities. The rest multiplies them with the values."""
EVERY: frozenset[Role] = frozenset(
    {"input", "stream", "norm", "normed", "product", "latent", "core", "inner", "gate", "attended", "fed"}
)
"""Roles of the tensors that are kept if nothing is recomputed."""
PARTS: frozenset[Part] = frozenset({"", "norm", "normed", "latent", "core", "inner", "out", "gate", "down"})
NEVER: frozenset[Part] = frozenset({"never"})
REGIONS = {
    "nothing": Region(EVERY),
    "block": Region(frozenset({"input"}), PARTS, host=1.0),
    "core": Region(EVERY - {"core"}, frozenset({"core"}), core=True),
    "operations": Region(
        frozenset({"input", "product", "copied"}),
        PARTS | NEVER,
        host=0.5,
        matmuls=0.5,
        collectives="gathers",
    ),
    "latent": Region(
        EVERY - {"norm", "normed", "latent", "gate"}, frozenset({"norm", "normed", "latent", "gate"})
    ),
}
"""core: attention's scores, softmax and dropout (arXiv 2205.05198, section 5). latent: norms, what latent vectors are
made into, and gates (arXiv 2412.19437, sections 3.2.3 and 3.3.3). operations: every second matmul and all
operations between matmuls. That is torchtitan's default. It keeps the results of attention and of reduce-scatters."""
MODES: dict[str, str | None] = {"none": "nothing", "selective": None, "full": "block"}
"""The region that each mode of `layout.recompute` repeats. None: the program says it (`Program.selective`)."""
PREFIX = "ops:"
BUDGET = "budget:"
_BUDGET = re.compile(rf"{BUDGET}(\d{{1,15}}(?:\.\d{{1,15}})?)(B|KiB|MiB|GiB|TiB)", re.ASCII)
_RUN = re.compile(r"(.+)\*([1-9]\d{0,5})", re.ASCII)
UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": GIB, "TiB": 2**10 * GIB}


def chosen(mode: str) -> tuple[str, ...]:
    """The operations that the mode of a block names, in the table's order; none if it is one of `MODES`. Raises
    UserError: the mode is neither."""
    if mode in MODES:
        return ()
    names = mode.removeprefix(PREFIX).split("+")
    if not mode.startswith(PREFIX) or not set(names) <= set(OPERATIONS) or len(names) > len(set(names)):
        modes = ", ".join(f'"{name}"' for name in MODES)
        raise UserError(
            f'layout.recompute = "{mode}" is unknown: it must be {modes}, "{PREFIX}" and some of '
            f'{", ".join(OPERATIONS)}, joined by + (such as "{PREFIX}{"+".join(OPERATIONS)}"), "{BUDGET}" and bytes '
            f'(such as "{BUDGET}6GiB"), or modes of runs of blocks (such as "full*3/none*9")'
        )
    return tuple(name for name in OPERATIONS if name in names)


def budget_of(recompute: str) -> int | None:
    """The bytes that `layout.recompute` allows on a rank; None if it is no budget."""
    found = _BUDGET.fullmatch(recompute)
    return int(float(found[1]) * UNITS[found[2]]) if found else None


def of_blocks(recompute: str, layers: int) -> tuple[str, ...]:
    """The mode of each block. A budget that is not resolved yet has none. Raises UserError: a mode is unknown, or the
    runs are not those of so many blocks."""
    runs = [_RUN.fullmatch(run) for run in recompute.split("/")]
    if not all(runs):
        chosen(recompute)
        return (recompute,) * layers
    found = [(run[1], int(run[2])) for run in runs if run]
    for mode, _ in found:
        chosen(mode)
    if (count := sum(number for _, number in found)) != layers:
        modes = [mode for mode, number in found[:layers] for _ in range(min(number, layers))]
        nearest = (modes + [found[-1][0]] * layers)[:layers]  # the last run is made longer or shorter
        raise UserError(
            f'layout.recompute = "{recompute}" has modes of {count} blocks, but the model has {layers}. Nearest valid: '
            f'"{runs_of(nearest)}"'
        )
    return tuple(mode for mode, number in found for _ in range(number))


def runs_of(modes: Sequence[str]) -> str:
    """The inverse of `of_blocks`: one mode if all blocks have it."""
    if len(set(modes)) == 1:
        return modes[0]
    return "/".join(f"{mode}*{len(list(equal))}" for mode, equal in groupby(modes))


def region(mode: str, program: Program | None = None) -> Region:
    """The region of a mode, by the program's meaning of "selective"; None: this program's."""
    if mode in MODES:
        return REGIONS[MODES[mode] or (program or Program()).selective]
    return _together(chosen(mode))


@lru_cache(maxsize=64)
def _together(names: tuple[str, ...]) -> Region:
    """The region of several operations."""
    parts = [OPERATIONS[name] for name in names]
    return Region(
        EVERY.difference(*(part.frees for part in parts)).union(*(part.keeps for part in parts)),
        frozenset[Part]().union(*(part.repeats for part in parts)),
        frozenset(part.last for part in parts if part.last),
        sum(part.host for part in parts),
    )
