"""`fivefold bench hardware`: measures this machine for the planner."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import typer

from fivefold.cli.options import JsonOption, print_json

if TYPE_CHECKING:
    from fivefold.plan.measured import Measured

EXAMPLES = ["fivefold bench hardware", "fivefold bench hardware --json"]

bench = typer.Typer(help="Measure this machine.", no_args_is_help=True, rich_markup_mode=None)


@bench.callback()
def _group() -> None:
    """Measure this machine."""


@bench.command("hardware", epilog="\b\nExamples:" + "".join(f"\n  {example}" for example in EXAMPLES))
def hardware(json: JsonOption = False) -> None:
    """Measure matrix products, attention, memory, Python and local messages, for `fivefold plan --cluster local`.

    Takes about two minutes, in which nothing else should run. The table is kept in the cache folder; calibration of an
    older one is forgotten.
    """
    from fivefold.plan import measured
    from fivefold.train.hardware import measure

    table = measure(lambda text: print(f"measuring {text}", file=sys.stderr))
    if json:
        print_json(measured.as_json(table) | {"path": str(measured.path())})
        return
    print("\n".join(_text(table)))
    print(f"\nkept in {measured.path()}, for `fivefold plan RECIPE --cluster local`")


def _text(table: Measured) -> list[str]:
    """The table for people: a few of its figures."""
    return [table.machine, "", *_products(table), "", *_others(table), "", *_links(table), "", *_host(table)]


def _products(table: Measured) -> list[str]:
    lines = ["products, GFLOP/s a rank (forward, gradient of the input, of the weight)"]
    lines.append(
        f"  {'ranks x threads':16} {'m x n x k':>15}" + "".join(f"{dtype:>27}" for dtype in table.peak)
    )
    for n, share in table.shares.items():
        for m, size, k in ((64, 64, 64), (512, 512, 512), (4096, 512, 192), (512, 1536, 512)):
            cells = [
                "".join(
                    f"{share.product(m, size, k, d, role) / 1e9:9.1f}"
                    for role in ("forward", "input", "weight")
                )
                for d in table.peak
            ]
            lines.append(f"  {f'{n} x {share.threads}':16} {f'{m}x{size}x{k}':>15}" + "".join(cells))
    return lines


def _others(table: Measured) -> list[str]:
    lines = ["attention, GFLOP/s a rank, and element-wise operations, GB/s a rank: forward / backward"]
    for n, share in table.shares.items():
        for dtype in table.peak:
            cells = [
                f"{T} tokens {share.attended(T, 64, dtype, False, False) / 1e9:.0f} / "
                f"{share.attended(T, 64, dtype, True, False) / 1e9:.0f}"
                for T in (128, 512, 2048)
            ]
            cells += [
                f"{kind} {rates[0] / 1e9:.1f} / {rates[1] / 1e9:.1f}"
                for kind, rates in share.streams[dtype].items()
                if kind != "random"
            ]
            lines.append(f"  {n} x {share.threads} {dtype}: " + ", ".join(cells))
    return lines


def _links(table: Measured) -> list[str]:
    lines = ["messages between local ranks: ms of 4 KiB, of 1 MiB, of 8 MiB"]
    for n, found in table.links.items():
        for name, points in found.items():
            cells = "".join(f"{1e3 * seconds:9.3f}" for size, seconds in points if size != 64 << 10)
            lines.append(f"  {n} ranks  {name:20}{cells}")
    return [
        *lines,
        f"  the processor is free to compute in {100 * table.free:.0f}% of a large message's time",
    ]


def _host(table: Measured) -> list[str]:
    cells = [f"{name} {1e3 * seconds:.2f}" for name, seconds in table.host.items()]
    waits = [
        f"{axis} {' / '.join(f'{1e3 * seconds:.2f}' for _, seconds in points)}"
        + (f" ({ranks} ranks)" if ranks > 2 else "")
        for ranks, axes in table.axes.items()
        for axis, points in axes.items()
    ]
    return [
        "Python and dispatch, ms: " + ", ".join(cells),
        *(["waiting for one another in a block, ms, small / large: " + ", ".join(waits)] if waits else []),
        f"memory {table.memory / 2**30:.1f} GiB; disk {table.disk / 1e9:.2f} GB/s written; "
        + ", ".join(f"{dtype} peak {rate / 1e9:.0f} GFLOP/s" for dtype, rate in table.peak.items()),
    ]
