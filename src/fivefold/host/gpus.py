"""The GPUs of this machine: what a run sees of them, what keeps it from using them, the CPUs next to one, and the
environment variables that change how they compute and how NCCL communicates. torch is loaded only where there is a
driver."""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

NVIDIA, AMD, INTEL = Path("/dev/nvidiactl"), Path("/dev/kfd"), Path("/sys/module/xe")
"""Where there are drivers. A container has the first two if it was given GPUs."""
VISIBLE, WARNING = "CUDA_VISIBLE_DEVICES", "WARNING: "
SLICES = "a process sees one slice (MIG) of a GPU only, and NCCL cannot join slices"


def shown() -> str:
    """How many GPUs this process sees, and why not more, such as "1 (CUDA_VISIBLE_DEVICES=0)"."""
    import torch

    why = [f"{VISIBLE}={os.environ[VISIBLE]}"] if VISIBLE in os.environ else []
    if (count := torch.cuda.device_count()) and " MIG " in torch.cuda.get_device_name(0):
        why.append(SLICES)
    return f"{count} ({'; '.join(why)})" if why else f"{count}"


def notes() -> list[str]:
    """What to know of this machine's accelerators, in sentences. Those of trouble begin with WARNING."""
    if not any(path.exists() for path in (NVIDIA, AMD, INTEL)):
        return ["the CPU trains: GPUs of Apple are not supported"] if sys.platform == "darwin" else []
    import torch

    if not torch.cuda.is_available():
        return [_unused()]
    count, visible, found = torch.cuda.device_count(), os.environ.get(VISIBLE, ""), list[str]()
    names = [torch.cuda.get_device_name(index) for index in range(count)]
    if " MIG " not in names[0] and (wanted := len(visible.strip(",").split(","))) > count:
        said = f"{VISIBLE}={visible} names {wanted} GPUs, of which {count} can be used"
        found.append(f"{WARNING}{said}: one that does not exist hides those after it")
    if " MIG " in names[0]:
        found.append(f"{WARNING}{names[0]}: {SLICES}, so a run has one rank")
    if len({*names}) > 1:
        mixed = f"different GPUs ({', '.join(names)}): the slowest sets the pace"
        found.append(f"{WARNING}{mixed}, and bf16 is used only if all are fast in it")
    if torch.version.hip is not None:
        found.append(f"AMD's GPUs (ROCm {torch.version.hip}) take the same path as NVIDIA's, untried")
    return found


def _unused() -> str:
    """Why PyTorch uses no GPU although there is a driver."""
    import torch

    visible, reason = os.environ.get(VISIBLE), "PyTorch finds none"
    if not NVIDIA.exists():
        needed = f"AMD's GPUs need a build of PyTorch for ROCm, not {torch.__version__}"
        needed = "PyTorch's build for ROCm finds no GPU" if torch.version.hip else needed
        return f"the CPU trains: {needed if AMD.exists() else 'GPUs of Intel are not supported'}"
    if visible in ("", "-1", "NoDevFiles"):  # the last one is Slurm's
        return f"the CPU trains: {VISIBLE}={visible} hides all GPUs"
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:  # a build without CUDA; a driver that is too old
        forked = "forked" in str(error)  # from a process that has asked for GPUs: that hides the reason
        reason = "`fivefold check` says why" if forked else str(error).partition("\n")[0].rstrip(".")
    of = f", with {VISIBLE}={visible}" if visible else ""
    return f"{WARNING}the CPU trains, though there is a driver for NVIDIA's GPUs: {reason} ({torch.__version__}{of})"


@contextmanager
def near(index: int | None) -> Iterator[str]:
    """Keeps this thread, and those that it starts, on the CPUs of a GPU's NUMA node inside the block. index: the GPU's;
    None: there is none. Yields what was done, in words; "" where the node is not known or has all CPUs."""
    node, cpus, said = -1, set[int](), ""
    if index is not None and hasattr(os, "sched_setaffinity"):
        import torch

        gpu = torch.cuda.get_device_properties(index)
        node, cpus = cpus_near(f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0")
    if not cpus or (usable := os.sched_getaffinity(0)) <= cpus:
        yield said
        return
    if chosen := usable & cpus:
        os.sched_setaffinity(0, chosen)
        said = f"ranks stay on the CPUs next to their GPUs: this one on {len(chosen)}, of NUMA node {node}"
    else:
        said = f"{WARNING}the launcher gives this rank no CPU next to its GPU (NUMA node {node})"
    try:
        yield said
    finally:
        os.sched_setaffinity(0, usable)


def cpus_near(address: str, root: Path = Path("/sys")) -> tuple[int, set[int]]:
    """(NUMA node, its CPUs) of a PCI device, such as 0000:3b:00.0; (-1, none): the system does not say. root: of the
    tree that Linux shows at /sys."""
    with suppress(OSError, ValueError):
        node = int((root / "bus/pci/devices" / address / "numa_node").read_text())
        if node >= 0:  # else there is one node only
            spans = (root / f"devices/system/node/node{node}/cpulist").read_text().strip().split(",")
            ends = [span.split("-") for span in spans if span]
            return node, {cpu for end in ends for cpu in range(int(end[0]), int(end[-1]) + 1)}
    return -1, set()


VALUES = {"on": {"1", "y", "yes", "t", "true"}, "off": {"0", "n", "no", "f", "false"}, "1": {"1"}}
"""Values of a variable, by their word in gpus.toml."""


class Variable(NamedTuple):
    """does: what it does. harm: what the values `at` of VALUES cost ("any": all do); "": nothing is known."""

    does: str
    harm: str = ""
    at: str = "any"


VARIABLES = {
    name: Variable(**row)
    for name, row in tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")).items()
}


def variables(environ: Mapping[str, str]) -> list[dict[str, str]]:
    """The variables of the table, and others of NCCL, that are set: name, value, what it `does`, and a `warning` if the
    value costs something, else ""."""
    found = list[dict[str, str]]()
    for name, value in sorted(environ.items()):
        if name in VARIABLES or name.startswith(("NCCL_", "TORCH_NCCL_")):
            known = VARIABLES.get(name, Variable("a setting of NCCL's that this table does not have"))
            costly = known.at == "any" or value.strip().lower() in VALUES[known.at]
            warning = f"{name}={value}: {known.harm}" if known.harm and costly else ""
            found.append({"name": name, "value": value, "does": known.does, "warning": warning})
    return found
