"""Who has started these ranks again, by the variables of torchrun, Slurm and Kubernetes. No torch."""

from __future__ import annotations

import os
import sys

COUNTS = {"TORCHELASTIC_RESTART_COUNT": "torchrun", "SLURM_RESTART_COUNT": "Slurm"}
MOST = "TORCHELASTIC_MAX_RESTARTS"  # torchrun's --max-restarts
LAUNCH = "TORCHELASTIC_RUN_ID"  # its --rdzv-id


def restarted_by() -> str | None:
    """The launcher that says that it has started this rank before; None if none does. torchrun counts on each host by
    itself, and not what another host caused, so its ranks may differ in this."""
    for name, launcher in COUNTS.items():
        count = os.environ.get(name, "")
        if count.isdigit() and int(count):
            return launcher
    return None


def may_be_again() -> bool:
    """True if the ranks may have been started before, also if no count says so: under torchrun that may restart them,
    in a job that Slurm has started again, in a pod of Kubernetes where nobody types. The same on all ranks."""
    return os.environ.get(MOST, "0") != "0" or restarted_by() is not None or in_pod()


def in_pod() -> bool:
    """True in a pod of Kubernetes where nobody types: it may be a retry, and does not know."""
    typed = hasattr(sys, "ps1") or (sys.stdin and sys.stdin.isatty())  # ps1: also in a notebook
    return "KUBERNETES_SERVICE_HOST" in os.environ and not typed


def launch_id() -> str:
    """torchrun's name of all starts of one launch; "" if it was given none."""
    name = os.environ.get(LAUNCH, "")
    return "" if name == "none" else name
