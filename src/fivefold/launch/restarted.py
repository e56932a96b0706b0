"""Who has started these ranks again, by the variables of torchrun, Slurm and Kubernetes. No torch."""

from __future__ import annotations

import os

COUNTS = {"TORCHELASTIC_RESTART_COUNT": "torchrun", "SLURM_RESTART_COUNT": "Slurm"}


def restarted_by() -> str | None:
    """The launcher that has started these ranks before; None if none says so."""
    for name, launcher in COUNTS.items():
        count = os.environ.get(name, "")
        if count.isdigit() and int(count):
            return launcher
    return None


def may_go_on() -> bool:
    """True if a run that is there is to be resumed without being asked for: the ranks have been started before, or they
    are in a pod of Kubernetes, which does not know whether it is the first."""
    return restarted_by() is not None or "KUBERNETES_SERVICE_HOST" in os.environ
