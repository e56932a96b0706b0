"""The part `doctor`: what is wrong with a machine's drivers, libraries, GPUs and variables, and what to do about it."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import permutations

import torch
from torch.cuda import nccl

from fivefold.host import gpus
from fivefold.host.devices import GIB, sheet_of
from fivefold.host.machine import untried_torch
from fivefold_plan.bench.gpu.report import Row

FREE = 0.95  # of a GPU's memory: the driver and this process take some hundred MiB
ASKED = ("driver_version", "power.limit", "power.default_limit")


def doctor(count: int, name: str) -> Iterator[Row]:
    """Yields facts about the machine, each with advice where it is wrong. count: number of GPUs."""
    yield Row("PyTorch", torch.__version__, advice=untried_torch(torch.__version__))
    sends = ".".join(map(str, nccl.version())) if count else "not used"
    yield Row("CUDA, NCCL", f"{torch.version.cuda or torch.version.hip or 'not in this build'}, {sends}")
    triton = find_spec("triton") is not None
    uncompiled = "neither blocks nor the loss can be compiled, so nothing trains: install it" * (
        count > 0 and not triton
    )
    yield Row("Triton", "there" if triton else "missing", advice=uncompiled)
    for note in gpus.notes():
        trouble = "docs/gpu.md says more, under `What check and the run say`" * note.startswith(gpus.WARNING)
        yield Row("GPUs", note.removeprefix(gpus.WARNING), advice=trouble)
    for one in gpus.variables(os.environ):
        yield Row(one["name"], one["value"], advice=f"{one['warning']}: unset it" * bool(one["warning"]))
    try:
        yield from _driver()
    except (OSError, subprocess.SubprocessError) as error:
        yield Row("nvidia-smi", str(error), advice="look at the driver" * bool(count and torch.version.cuda))
    for gpu in range(count):
        free, total = (size / GIB for size in torch.cuda.mem_get_info(gpu))
        taken = "another process holds memory of this GPU; nvidia-smi lists it" * (free < FREE * total)
        yield Row(f"GPU {gpu}: free memory", free, "GiB", total, taken)
    for a, b in permutations(range(count), 2):
        if not torch.cuda.can_device_access_peer(a, b):
            hidden = "messages go through host memory; virtual machines, IOMMU and ACS hide peers"
            yield Row(f"peer access from GPU {a} to {b}", "none", advice=hidden)


def _driver() -> Iterator[Row]:
    """What NVIDIA's tool says of all the machine's GPUs, by its own numbers: driver, power cap, rate of links."""

    def says(*options: str) -> str:
        command = ["nvidia-smi", *options]
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout

    asked = says(f"--query-gpu={','.join(ASKED)}", "--format=csv,noheader,nounits")
    for gpu, (driver, *watts) in enumerate(line.split(", ") for line in asked.splitlines()):
        yield Row(f"nvidia-smi {gpu}: driver", driver)
        if watts[0][0] != "[":  # [N/A]
            limit, usual = map(float, watts)
            capped = "a power cap slows matmuls: nvidia-smi -pl, as root" * (limit < usual)
            yield Row(f"nvidia-smi {gpu}: power limit", limit, "W", usual, capped)
    for gpu, said in enumerate(re.split(r"^GPU \d+: ", says("nvlink", "--status"), flags=re.MULTILINE)[1:]):
        rate = sum(map(float, re.findall(r"Link \d+: ([\d.]+) GB/s", said)))
        sheet = sheet_of(said.split(" (")[0])
        listed = sheet.link / 1e9 if sheet else 0.0
        down = "links are down: nvidia-smi nvlink --status; look at the fabric manager"
        if rate:  # else it has none, or no neighbour
            yield Row(f"nvidia-smi {gpu}: NVLink", rate, "GB/s", listed or None, down * (rate < 0.9 * listed))
