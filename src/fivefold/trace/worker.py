"""The process in which GPUs are traced: python -m fivefold.trace.worker LIBRARY... (see gpu.py).

It reads one job per line and writes one answer per line, both in JSON."""

from __future__ import annotations

import ctypes
import json
import os
import sys
import traceback
from typing import Any


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library or a compiler prints is no answer
    for library in sys.argv[1:]:
        ctypes.CDLL(library, ctypes.RTLD_GLOBAL)  # before torch is imported
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=answers, flush=True)


def answer(job: dict[str, Any]) -> dict[str, Any]:
    """Returns {"exact": as `depth.Exact.as_json`, "operators": those that ran on the GPU}, {"timelines": ...} or
    {"error": ...}."""
    from fivefold.recipe import Recipe
    from fivefold.trace.depth import exact, timelines
    from fivefold.trace.standins import DEVICE
    from fivefold.trace.step import operators

    operators.clear()
    try:
        recipe, rank = Recipe.model_validate_json(job["recipe"]), job["rank"]
        if job.get("timelines"):
            return {"timelines": [(name, t.as_json()) for name, t in timelines(recipe, rank, DEVICE)]}
        found = exact(recipe, rank, kept=False, device=DEVICE)
    except Exception:
        return {"error": traceback.format_exc()}
    return {"exact": found.as_json(), "operators": sorted(operators)}


if __name__ == "__main__":
    main()
