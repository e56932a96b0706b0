"""What the trainer asks the planner, which is another package (`wings`). Without it a run trains, but nothing of it is
predicted. No torch."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from fivefold import wings
from fivefold.recipe import Recipe
from fivefold.schedules.timelines import MemoryTimeline

if TYPE_CHECKING:
    from fivefold.launch.ranks import Ranks
    from fivefold.step.state import State
    from fivefold.train.instruments import RunForecast
    from fivefold.train.job import Job


class Chosen(NamedTuple):
    """What a recipe leaves to the planner. window: of offload, in blocks. recompute: a mode for each block, and line:
    about it, in a sentence, if the recipe has a budget. peak_bytes: of a rank's tensors then."""

    window: int
    recompute: str
    line: str = ""
    peak_bytes: int = 0


class Room(NamedTuple):
    """The memory that ranks share. bytes: 0: not known. what: its name. ranks: that share it. gpu: its name or ""."""

    bytes: int
    what: str
    ranks: int
    gpu: str


Held = tuple[int, dict[str, int]]
"""A rank's place in the pipeline, and its bytes of tensors by category."""


class Tracked(Protocol):
    """Follows the tensors of a step on a device."""

    def begin_update(self) -> None: ...
    def peak(self) -> Any: ...
    def timeline(self, *, rank: int, step: int) -> MemoryTimeline: ...


class Forecast(Protocol):
    """The functions of the planner's part `forecast`."""

    def choose(self, recipe: Recipe, gpu: str = "", measured: bool = True) -> Chosen:
        """What `layout.offload_window = 0` and a budget of recomputation come to on this machine. measured: by its own
        table, if there is one. Raises UserError: the budget is too small."""
        ...

    def on_cpus(self, recipe: Recipe) -> tuple[int, int]:
        """(bytes of a rank's tensors on this machine's CPUs, number of ranks). Raises UserError: not known."""
        ...

    def of_run(self, job: Job, ranks: Ranks, start: int) -> RunForecast:
        """The prediction of a run that begins after step `start`."""
        ...

    def add_exact(self, job: Job) -> None:
        """Adds exact figures to a finished run, where they take about a second."""
        ...

    def remedies(self, job: Job, room: Room, local_ranks: int, base: int, held: Held | None) -> list[str]:
        """Lines: planned memory of a rank beside what it held and what there is, and changes that need less, as
        commands. base: bytes that were taken before the first tensor."""
        ...

    def tracker(self, state: State, device: str) -> AbstractContextManager[Tracked]:
        """Follows the tensors on a kind of device, from entering on."""
        ...


def forecast() -> Forecast:
    """The planner's part. Raises wings.Missing: there is none."""
    return wings.part("forecast")
