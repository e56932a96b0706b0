"""A rank of torchrun in tests of several hosts: trains each layout for `compared`, and says what it sent and where it
listens.

    torchrun ... python tests/hosts_rank.py FOLDER LAYOUT...
"""

import json
import os
import sys
from pathlib import Path

from layouts import tiny
from test_launch import listening

from fivefold.data import prepare
from fivefold.launch.ranks import join
from fivefold.recipe import resolve
from fivefold.train.verify import compute

STEPS = 2


def sent() -> int:
    """Bytes that this host has sent to others."""
    line = next(line for line in Path("/proc/self/net/dev").read_text().splitlines() if "eth0:" in line)
    return int(line.split(":")[1].split()[8])


def main() -> None:
    folder, found = Path(sys.argv[1]), {}
    with join(timeout_s=30) as ranks:
        for number, layout in enumerate(sys.argv[2:]):
            recipe = tiny(folder, layout, steps=STEPS)
            data = prepare(recipe)
            recipe = resolve(recipe, vocab_size=data.vocab_size)
            before = sent()
            compute(recipe, data, STEPS, folder / str(number), ranks)
            found[layout] = sent() - before
        report = {"sent": found, "listens": sorted(listening({os.getpid()}))}
        (folder / f"rank-{ranks.rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
