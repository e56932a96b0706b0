"""The limit on open files of this process. No torch."""

from __future__ import annotations

import resource

from fivefold.errors import UserError

LEAST, PER_RANK = 128, 8
"""Files that a process has open, and those for its connections to each other rank, in several groups."""


def ensure_open_files(ranks: int) -> None:
    """Raises the soft limit on open files as far as a rank of so many may need it.

    Raises:
        UserError: the hard limit is too low for any run.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = float("inf") if hard == resource.RLIM_INFINITY else hard
    if most < LEAST:
        raise UserError(
            f"the limit of open files is {hard} (ulimit -n), and a run needs {LEAST}. Nearest valid: ulimit -n {LEAST}"
        )
    wanted = int(min(most, LEAST + PER_RANK * ranks))
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
