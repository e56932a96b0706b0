"""Who has started these ranks again, by the variables of torchrun, Slurm and Kubernetes. No torch."""

from __future__ import annotations

import os
import sys

COUNTS = {"TORCHELASTIC_RESTART_COUNT": "torchrun", "SLURM_RESTART_COUNT": "Slurm"}


def restarted_by() -> str | None:
    """The launcher that has started these ranks before; None if none says so."""
    for name, launcher in COUNTS.items():
        count = os.environ.get(name, "")
        if count.isdigit() and int(count):
            return launcher
    return None


def in_pod() -> bool:
    """True in a pod of Kubernetes where nobody types: it may be a retry, and does not know."""
    return "KUBERNETES_SERVICE_HOST" in os.environ and not (sys.stdin and sys.stdin.isatty())
