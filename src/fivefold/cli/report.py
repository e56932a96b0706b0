"""`fivefold report RUN`: writes the report page of a run."""

from __future__ import annotations

from fivefold.cli.options import JsonOption, RunArgument, print_json, require_run

EXAMPLES = ["fivefold report runs/first"]


def report(run: RunArgument, json: JsonOption = False) -> None:
    """Write the report of a run: one HTML file that opens offline."""
    require_run(run)
    from fivefold.observe.report import write_report

    path = write_report(run)
    print_json({"report": str(path)}) if json else print(path)
