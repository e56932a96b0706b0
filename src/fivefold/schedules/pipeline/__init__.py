"""Pipeline schedules: generated, checked, completed with transfers, simulated and drawn; and the cut of a
model into stages. No torch."""

from fivefold.schedules.pipeline.action import Action, Kind, parse
from fivefold.schedules.pipeline.check import check
from fivefold.schedules.pipeline.check_transfers import check_transfers
from fivefold.schedules.pipeline.communication import receives_ahead, with_transfers
from fivefold.schedules.pipeline.cut import cut
from fivefold.schedules.pipeline.draw_svg import to_svg
from fivefold.schedules.pipeline.draw_text import to_text
from fivefold.schedules.pipeline.memory import peak_live
from fivefold.schedules.pipeline.registry import SCHEDULES, build, stages_a_rank
from fivefold.schedules.pipeline.schedule import Schedule, from_csv, place, to_csv
from fivefold.schedules.pipeline.simulate import Costs, simulate, simulate_crowded
from fivefold.schedules.pipeline.timeline import Event, Timeline

__all__ = [
    "SCHEDULES",
    "Action",
    "Costs",
    "Event",
    "Kind",
    "Schedule",
    "Timeline",
    "build",
    "check",
    "check_transfers",
    "cut",
    "from_csv",
    "parse",
    "peak_live",
    "place",
    "receives_ahead",
    "simulate",
    "simulate_crowded",
    "stages_a_rank",
    "to_csv",
    "to_svg",
    "to_text",
    "with_transfers",
]
