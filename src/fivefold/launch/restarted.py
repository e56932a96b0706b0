"""Who has started these ranks again, by the variables of torchrun, Slurm and Kubernetes. No torch."""

from __future__ import annotations

import os

COUNTS = {"TORCHELASTIC_RESTART_COUNT": "torchrun", "SLURM_RESTART_COUNT": "Slurm"}


def restarted_by() -> str | None:
    """The launcher that starts these ranks again, or None. A Kubernetes pod does not know whether it is the first: it
    may always be a retry."""
    for name, launcher in COUNTS.items():
        count = os.environ.get(name, "")
        if count.isdigit() and int(count):
            return launcher
    return "Kubernetes" if "KUBERNETES_SERVICE_HOST" in os.environ else None
