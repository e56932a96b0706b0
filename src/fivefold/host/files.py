"""The limit on open files of this process. No torch."""

from __future__ import annotations

import resource

from fivefold.errors import UserError

EACH, PER_RANK = 128, 8
"""Files that a rank has open, and those for its connections to each other rank, in several groups."""


def ensure_open_files(ranks: int) -> None:
    """Raises the soft limit on open files, if a rank of so many needs more.

    Raises:
        UserError: the hard limit is lower.
    """
    needed = EACH + PER_RANK * ranks
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise UserError(
            f"the limit of open files is {hard} (ulimit -n), and {ranks} rank(s) need {needed}. "
            f"Nearest valid: ulimit -n {needed}"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
