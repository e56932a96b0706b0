"""A launch that is one site of several joins the others (`--site`, `--meet`)."""

from __future__ import annotations

import sys

from fivefold.comm.membership import Membership
from fivefold.step.state import State
from fivefold.train.job import Job
from fivefold.train.saved import shared


def join(state: State, job: Job) -> Membership:
    """Joins the other sites, and sets the state to theirs if they are further. Returns once this site trains with them.

    Raises:
        UserError: the others cannot be reached, or train something else.
    """
    seat, recipe, mesh = job.seat, job.recipe, state.mesh
    assert seat is not None
    assert state.outer is not None
    inside, count = mesh.axis("all"), recipe.sites.count
    if inside.index == 0:
        print(f"site {seat.site} of {count}: meets the others at {seat}", file=sys.stderr, flush=True)
    membership = Membership(seat, count, inside, recipe.sync.patience, shared(job))
    state.step = state.outer.join(membership, state.step, recipe.train.steps or 0)
    return membership
