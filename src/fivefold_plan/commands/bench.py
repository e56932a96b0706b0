"""`fivefold bench`: measures this machine for the planner (`hardware`), and its collectives (`collectives`).
`fivefold plan calibrate` fits the table of the planner to finished runs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fivefold.cli import options
from fivefold.cli.options import flag, option, print_json
from fivefold.errors import CheckFailed, UserError

if TYPE_CHECKING:
    from fivefold_plan.cluster.measured import Measured

MOST = 64  # local ranks

bench = typer.Typer(help="Measure this machine.", no_args_is_help=True, rich_markup_mode=None)


@bench.command("hardware", epilog=options.examples("bench hardware"))
def hardware(
    busy: Annotated[bool, flag("Save the table even if other programs take the cores.", "--busy")] = False,
    json: options.JsonOption = False,
) -> None:
    """Measure matmuls, attention, memory, Python overhead and local messages for `fivefold plan --cluster local`.

    This takes about two minutes. Run nothing else meanwhile: if other programs take the cores, nothing is saved. The
    table goes to the cache folder and replaces an older one with its calibration.
    """
    from fivefold.host import tables
    from fivefold_plan.bench.machine import measure
    from fivefold_plan.cluster import measured

    table = measure(lambda text: print(f"measuring {text}", file=sys.stderr), busy)
    if json:
        print_json(measured.as_json(table) | {"path": str(tables.path())})
        return
    print("\n".join(_text(table)))
    print(f"\nsaved to {tables.path()}; used by `fivefold plan RECIPE --cluster local`")


@bench.command("collectives", epilog=options.examples("bench collectives"))
def collectives(
    ranks: Annotated[int, option("N", "Number of local ranks.")] = 4,
    sizes: Annotated[str, option("SIZES", "Sizes of the message, separated by commas.")] = "4K,64K,1M,4M,16M",
    json: options.JsonOption = False,
) -> None:
    """Measure every all-reduce between local ranks, and fit alpha, beta and gamma to single messages.

    This takes about a minute. Run nothing else meanwhile. The table goes to the cache folder, beside that of
    `bench hardware`. `fivefold collectives --topology local` predicts with its alpha and beta.
    """
    if not 2 <= ranks <= MOST:
        raise UserError(f"--ranks: {ranks} is not possible; must be at least 2 and at most {MOST}")
    wanted = sorted({options.bytes_of("--sizes", size) for size in sizes.split(",")})
    from fivefold.host import tables
    from fivefold.observe.format import size as size_text
    from fivefold_plan.bench.collectives import measure

    table = measure(ranks, wanted, lambda text: print(f"measuring {text}", file=sys.stderr))
    if json:
        print_json(table | {"path": str(tables.path())})
        return
    key = str(ranks)
    fit = table["fit"][key]
    print(
        f"{ranks} local ranks: alpha {1e6 * fit['alpha']:.1f} µs, 1/beta {1e-9 / fit['beta']:.2f} GB/s per rank; "
        f"shared by all: {1e6 * fit['bus_alpha']:.1f} µs per message, {1e-9 / fit['bus_beta']:.2f} GB/s; "
        f"adding {1e-9 / fit['gamma']:.1f} GB/s"
    )
    for size, times in table["seconds"][key].items():
        print(f"\nall_reduce of {size_text(int(size)):22}{'measured ms':>12}{'predicted ms':>14}{'error':>9}")
        for name, seconds in sorted(times.items(), key=lambda item: item[1]):
            line = f"  {name:34}{1e3 * seconds:12.3f}"
            if (predicted := table["predicted"][key][size].get(name)) is not None:
                line += f"{1e3 * predicted:14.3f}{100 * (predicted / seconds - 1):+8.0f}%"
            print(line)
    best = ", ".join(f"{size_text(int(size))} {name}" for size, name in table["best"][key].items())
    print(f'\nall_reduce = "auto" takes: {best}')
    print(f"\nsaved to {tables.path()}; used by `fivefold collectives --topology local`")


@bench.command("gpu", epilog=options.examples("bench gpu"))
def gpu(
    part: Annotated[
        str, option("PARTS", "Some of doctor,links,kernels,verify,memory,train. [default: all]")
    ] = "",
    out: Annotated[Path, option("DIR", "Folder for gpu.json and gpu.html.")] = Path("runs/gpu"),
    limit: Annotated[float, option("MINUTES", "Time for all parts.", min=0.1, max=1440)] = 8.0,
    json: options.JsonOption = False,
) -> None:
    """Examine this machine's GPUs: drivers, links, kernels, layouts, memory, and speed beside plain PyTorch.

    It needs no network. The same command again runs what failed or had no time. Without a GPU it runs on the CPU at
    tiny sizes. The exit code is 1 if a layout does not compute what one process computes.
    """
    from fivefold_plan.bench.gpu.trials import HTML, PARTS, measure

    parts = part.split(",") if part else [*PARTS]
    options.require_known("--part", parts, PARTS)
    report = measure(out, parts, 60 * limit, lambda line: print(line, file=sys.stderr, flush=True))
    print_json(report) if json else print(f"{out / HTML} shows all of it; gpu.json beside it is for an issue")
    if any(row["advice"] for found in report["parts"]["verify"].values() for row in found.get("rows", ())):
        raise CheckFailed("a layout does not compute what one process computes")


def _text(table: Measured) -> Iterator[str]:
    """A few figures of the table, for people."""
    from fivefold_plan.cluster.devices import of_table

    yield from (table.machine, "", "matmul, GFLOP/s per rank (forward, input gradient, weight gradient)")
    yield f"  {'ranks x threads':16} {'m x n x k':>15}" + "".join(f"{dtype:>27}" for dtype in table.peak)
    for n, share in table.shares.items():
        for m, size, k in ((64, 64, 64), (512, 512, 512), (4096, 512, 192), (512, 1536, 512)):
            roles = [(dtype, role) for dtype in table.peak for role in ("forward", "input", "weight")]
            cells = "".join(f"{share.product(m, size, k, *names) / 1e9:9.1f}" for names in roles)
            yield f"  {f'{n} x {share.threads}':16} {f'{m}x{size}x{k}':>15}{cells}"
    yield from (
        "",
        "attention (GFLOP/s per rank) and element-wise operations (GB/s per rank), forward / backward",
    )
    for n, share in table.shares.items():
        for dtype in table.peak:
            rates = {
                f"{T} tokens": [
                    f"{share.attended(T, 64, dtype, back, False) / 1e9:.0f}" for back in (False, True)
                ]
                for T in (128, 512, 2048)
            }
            rates |= {
                kind: [f"{rate / 1e9:.1f}" for rate in rates[:2]]
                for kind, rates in share.streams[dtype].items()
                if kind != "random"
            }
            cells = ", ".join(f"{name} {' / '.join(both)}" for name, both in rates.items())
            yield f"  {n} x {share.threads} {dtype}: {cells}"
    yield from ("", "messages between local ranks, ms for 4 KiB, 1 MiB and 8 MiB")
    for n, links in table.links.items():
        for name, points in links.items():
            cells = "".join(f"{1e3 * seconds:9.3f}" for size, seconds in points if size != 64 << 10)
            yield f"  {n} ranks  {name:20}{cells}"
    yield from (f"  the CPU is free to compute during {100 * table.free:.0f}% of a large message", "")
    yield "Python and dispatch, ms: " + ", ".join(f"{name} {1e3 * s:.2f}" for name, s in table.host.items())
    waits = [
        f"{axis} {' / '.join(f'{1e3 * seconds:.2f}' for _, seconds in points)}"
        + (f" ({ranks} ranks)" if ranks > 2 else "")
        for ranks, axes in table.axes.items()
        for axis, points in axes.items()
    ]
    if waits:
        yield "ranks wait for each other, ms per block, small / large: " + ", ".join(waits)
    disk = of_table(table).storage
    peaks = [f"{d} peak {rate / 1e9:.0f} GFLOP/s" for d, rate in table.peak.items()]
    yield (
        f"memory {table.memory / 2**30:.1f} GiB, disk writes {disk.write / 1e9:.2f}, reads {disk.read / 1e9:.2f}, "
        f"both at once {disk.both / 1e9:.2f} GB/s, {', '.join(peaks)}"
    )


def ensure_measured(cluster: str) -> None:
    """If `cluster` is `local` and there is no table yet, asks whether to measure this machine, in a separate process.
    Raises UserError: there is no terminal to ask, or the measurement failed."""
    from fivefold_plan.cluster import measured

    if cluster.lower().partition(":")[0] != "local" or measured.load() is not None:
        return
    missing = f"cluster '{cluster}': this machine has not been measured"
    if not (sys.stdin and sys.stdin.isatty() and sys.stderr.isatty()):
        raise UserError(f"{missing}; run `fivefold bench hardware` first, which takes about two minutes")
    print(
        f"{missing}. Measure it now? It takes about two minutes [Y/n] ", end="", file=sys.stderr, flush=True
    )
    if sys.stdin.readline().strip().lower() not in ("", "y", "yes"):
        raise UserError(f"{missing}; `fivefold bench hardware` does")
    command = [sys.executable, "-P", "-m", "fivefold", "bench", "hardware", "--json"]
    if subprocess.run(command, stdout=subprocess.DEVNULL).returncode:
        raise UserError(f"{missing}: that failed; see the message above")


def calibrate(
    runs: Annotated[list[str], typer.Argument(metavar="RUN", help="Run folders, or the word reset.")],
    json: options.JsonOption = False,
) -> None:
    """Fit this machine's table to finished runs, or remove what was fitted (`plan calibrate reset`)."""
    from fivefold.observe.metrics import read_metrics
    from fivefold.observe.prediction import step_seconds
    from fivefold.recipe import load
    from fivefold_plan.cluster import measured
    from fivefold_plan.cluster.calibrate import FinishedRun, describe, fit

    table = measured.load()
    if table is None:
        raise UserError(
            "plan calibrate: this machine has not been measured; run `fivefold bench hardware` first"
        )
    if runs == ["reset"]:
        measured.save(replace(table, factors=dict.fromkeys(measured.FACTORS, 1.0), fitted=[]))
        print_json({"factors": None}) if json else print(
            "calibration removed; predictions use the measured table alone"
        )
        return
    finished = []
    for run in map(Path, runs):
        options.require_run(run)
        seconds = step_seconds(read_metrics(run / "metrics.jsonl"))
        if seconds is None:
            raise UserError(f"plan calibrate: {run} has too few steps; it needs at least 3")
        finished.append(FinishedRun(run.name, load(str(run / "recipe.toml")), seconds))
    found = fit(table, finished)
    measured.save(found.table)
    print_json(found.as_json()) if json else print("\n".join(describe(found)))
