"""Data sheets of accelerators: the one table that MFU, the planner's clusters and `fivefold formats` read. No torch.

Rates are dense: data sheets of NVIDIA from 2023 on count sparsity, so theirs are halved. Matmuls add in fp32. Rates of
fp64 are those of matrix units, where they compute it. Turing and Ada have two units for it per multiprocessor: a 32nd
and a 64th of the rate of fp32 (NVIDIA's papers on these architectures). A format without a rate is not in a device's
table: it computes it by another, or not at all.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

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


_PASCAL, _VOLTA, _TURING = "Pascal (2016)", "Volta (2017)", "Turing (2018)"
_AMPERE, _ADA, _HOPPER = "Ampere (2020)", "Ada (2022)", "Hopper (2022)"
_BLACKWELL, _ULTRA = "Blackwell (2024)", "Blackwell Ultra (2025)"
_CDNA2, _CDNA3, _CDNA4 = "CDNA 2 (2021)", "CDNA 3 (2023)", "CDNA 4 (2025)"
_TPU4, _TPU5 = "TPU v4 (2021)", "TPU v5 (2023)"


def _rates(half: float, **others: float) -> dict[str, float]:
    """half: of bf16 and fp16, which matrix units multiply equally fast."""
    return {"bf16": half, "fp16": half, **others}


_A100 = _rates(312e12, tf32=156e12, fp32=19.5e12, fp64=19.5e12)
_H100 = _rates(989.4e12, tf32=494.7e12, fp32=66.9e12, fp8=1978.9e12, fp64=66.9e12)
_NVL = _rates(835.5e12, tf32=417.5e12, fp32=60e12, fp8=1670.5e12, fp64=60e12)
_MI300 = _rates(1307.4e12, tf32=653.7e12, fp32=163.4e12, fp8=2614.9e12, fp64=163.4e12)
# Sheets from the oldest architecture to the newest.
SHEETS = (
    Sheet(
        "p100", r"p100", 2016, _PASCAL, 56, 16 * GIB, 732 * GB, 80 * GB, 3,
        {"fp16": 21.2e12, "fp32": 10.6e12, "fp64": 5.3e12},  # no matrix units
        "NVIDIA Tesla P100 (SXM2, 2016)", watts=300,
    ),
    Sheet(
        "v100", r"v100", 2017, _VOLTA, 80, 32 * GIB, 900 * GB, 150 * GB, 3,
        {"fp16": 125e12, "fp32": 15.7e12, "fp64": 7.8e12},
        "NVIDIA V100 (SXM2, 2020); also sold with 16 GB", watts=300,
    ),
    Sheet(
        "t4", r"\bt4\b", 2018, _TURING, 40, 16 * GB, 320 * GB, 0, 3,
        {"fp16": 65e12, "fp32": 8.1e12, "fp64": 0.253e12},
        "NVIDIA T4 (2018)", watts=70,
    ),
    Sheet(
        "a100-40gb", r"a100.*40gb", 2020, _AMPERE, 108, 40 * GIB, 1.555e12, 300 * GB, 4, _A100,
        "NVIDIA A100 Tensor Core GPU (SXM4 40 GB, 2020)", watts=400,
    ),
    Sheet(
        "a100", r"a100", 2020, _AMPERE, 108, 80 * GIB, 2.039e12, 300 * GB, 4, _A100,
        "NVIDIA A100 Tensor Core GPU (SXM4 80 GB, 2021)", watts=400,
    ),
    Sheet(
        "a800", r"a800", 2022, _AMPERE, 108, 80 * GIB, 2.039e12, 200 * GB, 4, _A100,
        "NVIDIA A800 (SXM4 80 GB, 2022): A100 with NVLink of 400 GB/s", watts=400,
    ),
    Sheet(
        "l4", r"\bl4\b", 2023, _ADA, 58, 24 * GB, 300 * GB, 0, 4,
        _rates(121e12, tf32=60e12, fp32=30.3e12, fp8=242.5e12, fp64=0.473e12),
        "NVIDIA L4 (2023)", watts=72,
    ),
    Sheet(
        "l40s", r"l40s", 2023, _ADA, 142, 48 * GB, 864 * GB, 0, 4,
        _rates(362.05e12, tf32=183e12, fp32=91.6e12, fp8=733e12, fp64=1.43e12),
        "NVIDIA L40S (2023)", watts=350,
    ),
    Sheet(
        "rtx4090", r"rtx 4090$", 2022, _ADA, 128, 24 * GIB, 1.008e12, 0, 4,
        _rates(165.2e12, tf32=82.6e12, fp32=82.6e12, fp8=330.3e12, fp64=1.29e12),
        "NVIDIA Ada GPU Architecture (2022), appendix A: GeForce RTX 4090", watts=450,
    ),
    Sheet(
        "h100-nvl", r"h100.*nvl", 2023, _HOPPER, 132, 94 * GB, 3.9e12, 300 * GB, 5, _NVL,
        "NVIDIA H100 Tensor Core GPU (NVL, 2023); NVLink between two", linked=2, watts=400,
    ),
    Sheet(
        "h200-nvl", r"h200.*nvl", 2024, _HOPPER, 132, 141 * GB, 4.8e12, 450 * GB, 5, _NVL,
        "NVIDIA H200 Tensor Core GPU (NVL, 2024); NVLink between four", linked=4, watts=600,
    ),
    Sheet(
        "h100-pcie", r"h100.*pcie", 2022, _HOPPER, 114, 80 * GIB, 2.0e12, 300 * GB, 5,
        _rates(756.5e12, tf32=378e12, fp32=51e12, fp8=1513e12, fp64=51e12),
        "NVIDIA H100 Tensor Core GPU (PCIe, 2022); NVLink between two", linked=2, watts=350,
    ),
    Sheet(
        "h100", r"h100", 2022, _HOPPER, 132, 80 * GIB, 3.35e12, 450 * GB, 5, _H100,
        "NVIDIA H100 Tensor Core GPU (SXM5, 2023)", watts=700,
    ),
    Sheet(
        "h800", r"h800", 2023, _HOPPER, 132, 80 * GIB, 3.35e12, 200 * GB, 5, _H100 | {"fp64": 1e12},
        "NVIDIA H800 (SXM5, 2023): H100 with NVLink of 400 GB/s and without fast fp64", watts=700,
    ),
    Sheet(
        "gh200", r"gh200(?!.*144g)", 2023, _HOPPER, 132, 96 * GB, 4.0e12, 450 * GB, 5, _H100,
        "NVIDIA GH200 Grace Hopper Superchip (96 GB of HBM3, 2023); NVLink-C2C of 900 GB/s to its own host",
        450 * GB, watts=1000,
    ),
    Sheet(
        "h200", r"\bh200", 2023, _HOPPER, 132, 141 * GB, 4.8e12, 450 * GB, 5, _H100,
        "NVIDIA H200 Tensor Core GPU (SXM, 2024)", watts=700,
    ),
    Sheet(
        "gb200", r"gb200", 2024, _BLACKWELL, 152, 186 * GB, 8.0e12, 900 * GB, 5,
        _rates(2500e12, tf32=1250e12, fp32=80e12, fp8=5000e12, mxfp8=5000e12, fp6=5000e12, fp4=10000e12, fp64=40e12),
        "NVIDIA GB200 NVL72 (2024), per GPU; NVLink-C2C of 900 GB/s to the host of two", 225 * GB, watts=1200,
    ),
    Sheet(
        "b200", r"\bb200", 2024, _BLACKWELL, 148, 180 * GB, 8.0e12, 900 * GB, 5,
        _rates(2250e12, tf32=1125e12, fp32=75e12, fp8=4500e12, mxfp8=4500e12, fp6=4500e12, fp4=9000e12, fp64=37e12),
        "NVIDIA HGX B200 (2024), DGX B200", watts=1000,
    ),
    Sheet(
        "b300", r"\bb300", 2025, _ULTRA, 148, 270 * GB, 8.0e12, 900 * GB, 6,
        _rates(2250e12, tf32=1125e12, fp32=75e12, fp8=4500e12, mxfp8=4500e12, fp6=4500e12, fp4=13500e12, fp64=1.25e12),
        "NVIDIA HGX B300 (2025); of 288 GB on the package, 270 are usable",
    ),
    Sheet(
        "mi250x", r"mi250x", 2021, _CDNA2, 110, 64 * GIB, 1.6e12, 200 * GB, 4,
        _rates(191.5e12, fp32=47.9e12, fp64=47.9e12),
        "AMD Instinct MI250X (2021), halved; host: Frontier", 36 * GB, dies=2, watts=280,
    ),
    Sheet(
        "mi300x", r"mi300x", 2023, _CDNA3, 304, 192 * GB, 5.3e12, 448 * GB, 5, _MI300,
        "AMD Instinct MI300X (2023); 64 GB/s to each of seven others", watts=750,
    ),
    Sheet(
        "mi325x", r"mi325x", 2024, _CDNA3, 304, 256 * GB, 6.0e12, 448 * GB, 5, _MI300,
        "AMD Instinct MI325X (2024)", watts=1000,
    ),
    Sheet(
        "mi355x", r"mi355x", 2025, _CDNA4, 256, 288 * GB, 8.0e12, 537.6 * GB, 5,
        _rates(2516.6e12, fp32=157.3e12, fp8=5033.2e12, fp6=10066.3e12, fp4=10066.3e12, fp64=78.6e12),
        "AMD Instinct MI355X (2025)", watts=1400,
    ),
    Sheet(
        "tpu-v4", r"^tpu v4$", 2021, _TPU4, 8, 32 * GIB, 1.2e12, 300 * GB, 3, {"bf16": 275e12},
        "Google Cloud TPU v4; arXiv 2304.01433. 50 GB/s to each of six neighbours", watts=192,
    ),
    Sheet(
        "tpu-v5p", r"^tpu v5p$", 2023, _TPU5, 8, 95 * GIB, 2.765e12, 600 * GB, 3, {"bf16": 459e12},
        "Google Cloud TPU v5p. 100 GB/s to each of six neighbours; fp8 is no faster than bf16",
    ),
)  # fmt: skip
"""Of two that fit a device's name, the first counts."""
CORES = {
    _PASCAL: ("fp64, fp32, fp16", ""),
    _VOLTA: ("fp64, fp32, fp16, int8", "fp16"),
    _TURING: ("fp64, fp32, fp16, int8", "fp16, int8, int4"),
    _AMPERE: ("fp64, fp32, bf16, fp16, int8", "fp64, tf32, bf16, fp16, int8, int4"),
    _ADA: ("fp64, fp32, bf16, fp16, int8", "tf32, bf16, fp16, fp8, int8, int4"),
    _HOPPER: ("fp64, fp32, bf16, fp16, int8", "fp64, tf32, bf16, fp16, fp8, int8"),
    _BLACKWELL: ("fp64, fp32, bf16, fp16", "fp64, tf32, bf16, fp16, fp8, fp6, fp4, int8"),
    _ULTRA: ("fp64, fp32, bf16, fp16", "fp64, tf32, bf16, fp16, fp8, fp6, fp4, int8"),
}
"""What CUDA cores and what tensor cores of NVIDIA's architectures multiply: its page on tensor cores, and its papers on
Pascal (GP100) and Ada. Numbers of 1 bit are left out."""
BY_NAME = {sheet.name: sheet for sheet in SHEETS}


def sheet_of(device: str) -> Sheet | None:
    """The data sheet of the GPU that calls itself `device`; None: not known.

    A slice of a GPU (MIG) is not known: its share of the multiprocessors is not in the data sheet.
    """
    device = device.lower()
    if "mig" in device.split():
        return None
    return next((sheet for sheet in SHEETS if re.search(sheet.pattern, device)), None)
