"""The part `doctor`: what is wrong with a machine's drivers, libraries, GPUs and limits, and what to do about it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import permutations

import torch
from torch.cuda import nccl

from fivefold.bench.gpu.parts import OK, SHORT, Row, judged
from fivefold.files import cache_folder
from fivefold.host import cores
from fivefold.host.machine import untried_torch

GIB = 2**30
DISK_GIB, CORES = 20, 4  # free for caches and checkpoints; per GPU: the rank, its prefetch, its compilers
FREE = 0.95  # of a GPU's memory: the driver and this process take some hundred MiB
SETTINGS = {
    "driver_version": ("", ""),
    "clocks.sm": ("", ""),
    "clocks.max.sm": ("", ""),
    "power.limit": ("power.default_limit", "a power cap slows matmuls: nvidia-smi -pl, as root"),
    "pcie.link.width.current": ("pcie.link.width.max", "fewer lanes than it has: look at slot, riser, BIOS"),
    "persistence_mode": ("Enabled", "each start takes seconds longer: nvidia-smi -pm 1, as root"),
    "ecc.mode.current": ("Enabled", "memory errors go unnoticed: nvidia-smi -e 1, as root"),
    "mig.mode.current": ("Disabled", "slices are in no data sheet, and NCCL cannot send between them"),
    "compute_mode": ("Default", "ranks cannot share a GPU, as some of verify's do: nvidia-smi -c 0, as root"),
}
"""Fields of `nvidia-smi`: what they should be (a value, or that of another field; "": anything), and what to do."""


def doctor(gpus: int, name: str) -> Iterator[Row]:
    """Facts, and what is wrong with them."""
    yield fact("PyTorch", torch.__version__, untried_torch(torch.__version__))
    sends = ".".join(map(str, nccl.version())) if gpus else "not used"
    yield fact("CUDA, NCCL", f"{torch.version.cuda or torch.version.hip or 'not in this build'}, {sends}")
    triton = find_spec("triton") is not None
    uncompiled = "blocks cannot be compiled" * (gpus > 0 and not triton)
    yield fact("Triton", "there" if triton else "missing", uncompiled)
    yield from _settings(gpus)
    for gpu in range(gpus):
        label, (major, minor) = f"GPU {gpu}", torch.cuda.get_device_capability(gpu)
        slow = "" if torch.version.hip or major >= 8 else "it has no matrix units for bf16: train in fp16"
        yield fact(f"{label}: capability", f"{torch.cuda.get_device_name(gpu)}, {major}.{minor}", slow)
        free, total = (size / GIB for size in torch.cuda.mem_get_info(gpu))
        taken = "another process holds memory of this GPU; nvidia-smi lists it"
        yield judged(f"{label}: free memory", free, "GiB", total, free >= FREE * total, taken)
    for a, b in permutations(range(gpus), 2):
        if not torch.cuda.can_device_access_peer(a, b):
            hidden = "messages go through host memory; virtual machines, IOMMU and ACS hide peers"
            yield fact(f"peer access from GPU {a} to {b}", "none", hidden)
    wanted, few = CORES * gpus or 1, "look at the affinity and the control group of this process"
    yield judged("cores of this process", cores(), "", wanted, cores() >= wanted, few)
    folder = next(folder for folder in (cache_folder(), *cache_folder().parents) if folder.exists())
    space, full = shutil.disk_usage(folder).free / GIB, "make room, or set FIVEFOLD_CACHE to a larger disk"
    yield judged("free disk for caches", space, "GiB", DISK_GIB, space >= DISK_GIB, full)


def fact(name: str, words: str, wrong: str = "") -> Row:
    """wrong: what is wrong with it, or what to do about it; "" if it is as it should be."""
    return Row(name, words, "", None, SHORT if wrong else OK, wrong)


def _settings(gpus: int) -> Iterator[Row]:
    """What NVIDIA's tool says of each GPU of the machine."""
    fields = [*SETTINGS, *(wanted for wanted, _ in SETTINGS.values() if "." in wanted)]
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        printed = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        yield fact("nvidia-smi", str(error), "look at the driver" * bool(gpus and torch.version.cuda))
        return
    lines = printed.splitlines()
    if lines and not gpus:
        unseen = "install a build of PyTorch for CUDA that the driver knows; look at CUDA_VISIBLE_DEVICES"
        yield fact("GPUs that PyTorch does not see", str(len(lines)), unseen)
    for gpu, line in enumerate(lines):
        values = dict(zip(fields, (value.strip() for value in line.split(",")), strict=True))
        for field, (wanted, advice) in SETTINGS.items():
            value, should = values[field], values.get(wanted, wanted)
            if not value.startswith("["):  # [N/A], [Not Supported]
                good = should in ("", value) or should.startswith("[")
                more = f" ({wanted}: {should})" if wanted in values else ""
                yield fact(f"GPU {gpu}: {field}", f"{value}{more}", "" if good else advice)
