"""Data sheets of accelerators: the table that MFU, the planner's clusters and `fivefold formats` read
(devices.toml). No torch.

Rates are dense: data sheets of NVIDIA from 2023 on count sparsity, so theirs are halved. Matmuls add in fp32. Rates of
fp64 are those of matrix units, where they compute it. Turing and Ada have two units for it per multiprocessor: a 32nd
and a 64th of the rate of fp32 (NVIDIA's papers on these architectures). A format without a rate is not in a device's
table: it computes it by another, or not at all.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GIB, GB = 2**30, 1e9
PCIE = {3: 15.75 * GB, 4: 31.5 * GB, 5: 63.0 * GB, 6: 121.0 * GB}
"""Bytes/s of 16 lanes of PCI Express in one direction, by generation: transfers without their encoding (128b/130b; in
the 6th, 242 of 256 bytes)."""


@dataclass(frozen=True)
class Sheet:
    """A device's data sheet.

    pattern: found in the name that the device gives itself, in small letters. year: of the first data sheet.
    generation: its architecture, with that one's year. units: streaming multiprocessors, compute units, or matrix
    units. memory: bytes. bandwidth: bytes/s of memory. link: bytes/s that it sends to the other devices of its node
    over links of their own, such as NVLink; 0: it has none. pcie: generation of PCI Express, with 16 lanes. peak: dense
    FLOP/s by format. source: of these figures. host: bytes/s to its host, if it is linked to that by more than PCIe.
    linked: devices that such links join, 0 for a whole node. dies: devices in a package, as programs count them; the
    figures are those of one. watts: the most power that the sheet lets it draw (gh200: with its host; TPU v4: the most
    that arXiv 2304.01433 measured); 0: none was found.
    """

    name: str
    pattern: str
    year: int
    generation: str
    units: int
    memory: float
    bandwidth: float
    link: float
    pcie: int
    peak: dict[str, float]
    source: str
    host: float = 0.0
    linked: int = 0
    dies: int = 1
    watts: float = 0.0

    @property
    def maker(self) -> str:
        return self.source.partition(" ")[0]

    @property
    def to_host(self) -> float:
        """Bytes/s between the device and its host in one direction."""
        return self.host or PCIE[self.pcie]

    def rate(self, dtype: str) -> float | None:
        """Dense FLOP/s; None: the sheet has none."""
        return self.peak.get(dtype)


def _sheet(row: dict[str, Any]) -> Sheet:
    number, unit = row.pop("memory").split()
    return Sheet(memory=int(number) * {"GiB": GIB, "GB": GB}[unit], **row)


_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
SHEETS = tuple(map(_sheet, _TABLE["sheet"]))
CORES: dict[str, list[str]] = _TABLE["cores"]
"""What CUDA cores and what tensor cores of NVIDIA's architectures multiply."""
BY_NAME = {sheet.name: sheet for sheet in SHEETS}


def sheet_of(device: str) -> Sheet | None:
    """The data sheet of the GPU that calls itself `device`; None: not known.

    A slice of a GPU (MIG) is not known: its share of the multiprocessors is not in the data sheet.
    """
    device = device.lower()
    if "mig" in device.split():
        return None
    return next((sheet for sheet in SHEETS if re.search(sheet.pattern, device)), None)
