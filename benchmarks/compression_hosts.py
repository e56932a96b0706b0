"""Compressed gradient sums across hosts on a slow link: seconds in messages, and seconds of encoding apart.

    python benchmarks/compression_hosts.py [--hosts 2] [--ranks 2] [--rate 200mbit] [--out FILE.json]

The hosts are Linux namespaces (`tests/namespaces.py`). All ranks sum a bucket of 10 MB of fp32 gradients. They meet
before each message, so that nobody waits within one for a rank that still encodes. Medians; nothing else should run.
Encoding is slower here than in a run: all ranks do it at once on this machine's cores.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from namespaces import Hosts, Unavailable  # pyright: ignore[reportMissingImports]

TEXTS = ["none", "int8", "int4", "1bit", "topk:0.1", "topk:0.01", "randk:0.1", "randk:0.01", "powersgd:16",
         "powersgd:4"]  # fmt: skip
SHAPES = [(1024, 512), (512, 1024), (1024, 1024), (786, 512), (416,)]  # 2.5M elements
TIMES = 9


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2, help="ranks of each host")
    parser.add_argument("--rate", default="200mbit", help="of each host's link")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.worker)
        return 0
    try:
        with Hosts(args.hosts, args.rate) as hosts, tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "found.json")
            done = hosts.run([sys.executable, __file__, "--worker", str(file)], args.ranks)
            if done.code:
                raise SystemExit(f"measuring failed: {done}")
            found = json.loads(file.read_text())
    except Unavailable as reason:
        print(f"skipped: {reason}", file=sys.stderr)
        return 0
    found = {"hosts": args.hosts, "ranks": args.ranks, "rate": args.rate, **found}
    print(table(found))
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def worker(file: Path) -> None:
    """One rank's part. The first one writes what it found."""
    from fivefold.comm import everyone
    from fivefold.host.machine import describe
    from fivefold.launch.ranks import join

    with join(timeout_s=120) as ranks:
        rows = {text: measured(text, everyone(ranks)) for text in TEXTS}
    if ranks.first:
        file.write_text(
            json.dumps({"elements": sum(map(math.prod, SHAPES)), "rows": rows} | {"machine": describe()})
        )


def measured(text: str, axis: Any) -> dict[str, float]:
    """Seconds of a sum in messages and besides, medians; bytes that leave this rank, as the planner counts them."""
    import torch

    from fivefold.comm.compress import compressed_sum
    from fivefold.schedules.compression import compressor
    from fivefold_plan.messages.volume import SENT

    compress = compressor(text)
    gradients = torch.randn(sum(map(math.prod, SHAPES)), generator=torch.Generator().manual_seed(axis.rank))
    laps: list[tuple[float, float]] = []
    meeting: Any = Meeting(axis)
    one = None if compress is None else compressed_sum(compress, SHAPES, meeting, 0)
    for _ in range(TIMES + 1):
        given = gradients.clone()
        axis.barrier()
        began, messages = time.perf_counter(), 0.0
        running: Any = plain(given, meeting) if one is None else one.sum(given)
        started = next(running)
        while started is not None:
            result = started()
            messages += time.perf_counter() - started.began
            started = following(running, result)
        laps.append((messages, time.perf_counter() - began - messages))
    sizes = [("all_reduce", 4 * len(gradients))] if compress is None else compress.messages(SHAPES, axis.size)
    return {
        "bytes": sum(size * SENT[what](axis.size) for what, size in sizes),
        "messages_s": median(lap[0] for lap in laps[1:]),
        "encoding_s": median(lap[1] for lap in laps[1:]),
    }


def plain(gradients: Any, axis: Any) -> Any:
    yield axis.start_all_reduce(gradients)


def following(running: Any, result: Any) -> Any:
    try:
        return running.send(result)
    except StopIteration:
        return None


class Meeting:
    """An axis whose ranks meet before each message, and whose messages know when they began."""

    def __init__(self, axis: Any):
        self.axis = axis

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.axis, name)
        if not name.startswith("start_"):
            return found

        def start(*arguments: Any) -> Any:
            self.axis.barrier()
            return Timed(time.perf_counter(), found(*arguments))

        return start


class Timed:
    def __init__(self, began: float, started: Any):
        self.began, self.started = began, started

    def __call__(self) -> Any:
        return self.started()


def table(found: dict[str, Any]) -> str:
    rows, head = found["rows"], "| `compress` | MB leave a rank | messages, ms | fp32 by | encoding, ms |"
    lines = [
        f"{found['hosts']} hosts of {found['ranks']} ranks, {found['rate']} between them",
        "",
        head,
        "|" + "---|" * 5,
    ]
    for text, row in rows.items():
        ratio = rows["none"]["messages_s"] / row["messages_s"]
        lines.append(
            f"| `{text}` | {1e-6 * row['bytes']:.2f} | {1e3 * row['messages_s']:.0f} | {ratio:.1f} | "
            f"{1e3 * row['encoding_s']:.0f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
