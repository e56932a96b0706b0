"""Pipeline schedules: generated, checked, completed with transfers, simulated and drawn. This folder also cuts a model
into stages. No torch."""

from fivefold.schedules.pipeline.check import check
from fivefold.schedules.pipeline.cut import cut
from fivefold.schedules.pipeline.draw import to_svg, to_text
from fivefold.schedules.pipeline.facts import (
    FILLING,
    ends_upwards,
    few,
    holds_all,
    most_live,
    peak_live,
    shown,
    splits_backward,
)
from fivefold.schedules.pipeline.registry import DEFAULT, SCHEDULES, build, stages_per_rank
from fivefold.schedules.pipeline.schedule import Action, Kind, Schedule, place
from fivefold.schedules.pipeline.simulate import Costs, Event, Timeline, simulate, simulate_oversubscribed
from fivefold.schedules.pipeline.transfers import (
    SENDS_PER_RANK,
    executed,
    receives_ahead,
    with_transfers,
)
