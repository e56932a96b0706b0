"""Pipeline schedules: generated, checked, completed with transfers and simulated. This folder also cuts a model into
stages. No torch."""

from fivefold.schedules.pipeline.generators import (
    DEFAULT,
    FILLING,
    SCHEDULES,
    TUNED,
    build,
    copies_problem,
    ends_upwards,
    few,
    holds_again,
    holds_all,
    most_live,
    shown,
    splits_backward,
    stages_per_rank,
    tuning_problem,
)
from fivefold.schedules.pipeline.schedule import Action, Schedule, check, cut, live_phases, peak_live, place
from fivefold.schedules.pipeline.simulate import (
    SENDS_PER_RANK,
    Costs,
    Event,
    Timeline,
    executed,
    receives_ahead,
    simulate,
    simulate_oversubscribed,
    with_transfers,
)
from fivefold.schedules.pipeline.zero_bubble import costs_of
