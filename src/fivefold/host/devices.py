"""Data sheets of GPUs: the one table that MFU, the planner's presets and `fivefold formats` read. No torch.

Rates are dense: data sheets of NVIDIA from 2023 on count sparsity, so theirs are halved. Those of fp64 are of matrix
units. Sources: "NVIDIA V100" (2020), "NVIDIA A100 Tensor Core GPU" (2021), "NVIDIA H100 Tensor Core GPU" (2023),
"NVIDIA H200 Tensor Core GPU" (2024), "NVIDIA DGX B200", "NVIDIA HGX B200", "GB200 NVL72" (2024, per GPU), "NVIDIA L4",
"NVIDIA L40S" (2023), "AMD Instinct MI300X", "MI325X", "MI355X" (2023-2025), "MI250X" (2021; torch sees each half of it
as a device, so its rates are halved).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

GIB, GB = 2**30, 1e9


@dataclass(frozen=True)
class Sheet:
    """A GPU's data sheet.

    pattern: found in the name that the device gives itself, in small letters. generation: its architecture, and the
    year of its first data sheet. peak: dense FLOP/s by dtype. The rest is there where a preset of the planner needs it:
    units: streaming multiprocessors, or compute units. memory: bytes. bandwidth: bytes/s of memory. link: bytes/s that
    it sends to the other devices of its node.
    """

    name: str
    pattern: str
    generation: str
    peak: dict[str, float]
    units: int = 0
    memory: float = 0.0
    bandwidth: float = 0.0
    link: float = 0.0

    def rate(self, dtype: str) -> float | None:
        """Dense FLOP/s; None: the sheet has none. What multiplies bf16 multiplies fp16 as fast."""
        return self.peak.get(dtype, self.peak.get("bf16") if dtype == "fp16" else None)


_VOLTA, _AMPERE, _ADA = "Volta (2017)", "Ampere (2020)", "Ada (2022)"
_HOPPER, _BLACKWELL = "Hopper (2022)", "Blackwell (2024)"
_CDNA2, _CDNA3, _CDNA4 = "CDNA 2 (2021)", "CDNA 3 (2023)", "CDNA 4 (2025)"
_H100 = {"bf16": 989.4e12, "tf32": 494.7e12, "fp32": 66.9e12, "fp8": 1978.9e12, "fp64": 66.9e12}
_MI300 = {"bf16": 1307.4e12, "tf32": 653.7e12, "fp32": 163.4e12, "fp8": 2614.9e12, "fp64": 163.4e12}
# The first whose pattern is found counts.
SHEETS = (
    Sheet(
        "gb200", r"gb200", _BLACKWELL,
        {"bf16": 2500e12, "tf32": 1250e12, "fp32": 80e12, "fp8": 5000e12, "fp6": 5000e12, "fp4": 10000e12,
         "fp64": 40e12},
    ),
    Sheet(
        "b200", r"b200", _BLACKWELL,
        {"bf16": 2250e12, "tf32": 1125e12, "fp32": 75e12, "fp8": 4500e12, "fp6": 4500e12, "fp4": 9000e12,
         "fp64": 37e12},
        148, 180 * GB, 8.0e12, 900 * GB,
    ),
    Sheet("h100 nvl", r"h[12]00.*nvl", _HOPPER, {"bf16": 835.5e12, "tf32": 417.5e12, "fp32": 60e12}),
    Sheet("h100 pcie", r"h100.*pcie", _HOPPER, {"bf16": 756.5e12, "tf32": 378e12, "fp32": 51e12}),
    Sheet("h100", r"h100", _HOPPER, _H100, 132, 80 * GIB, 3.35e12, 450 * GB),
    Sheet("h200", r"h200", _HOPPER, _H100, 132, 141 * GB, 4.8e12, 450 * GB),
    Sheet(
        "a100", r"a100", _AMPERE, {"bf16": 312e12, "tf32": 156e12, "fp32": 19.5e12, "fp64": 19.5e12},
        108, 80 * GIB, 2.039e12, 300 * GB,
    ),
    Sheet("l40s", r"l40s", _ADA, {"bf16": 362.05e12, "tf32": 183e12, "fp32": 91.6e12, "fp8": 733e12}),
    Sheet("l4", r"\bl4\b", _ADA, {"bf16": 121e12, "tf32": 60e12, "fp32": 30.3e12, "fp8": 242.5e12}),
    Sheet("v100", r"v100", _VOLTA, {"fp16": 125e12, "fp32": 15.7e12, "fp64": 7.8e12}),
    Sheet(
        "mi355x", r"mi355x", _CDNA4,
        {"bf16": 2516.6e12, "fp32": 157.3e12, "fp8": 5033.2e12, "fp6": 10066.3e12, "fp4": 10066.3e12, "fp64": 78.6e12},
    ),
    # Infinity Fabric: 64 GB/s between each pair of eight devices.
    Sheet("mi300x", r"mi300x", _CDNA3, _MI300, 304, 192 * GB, 5.3e12, 448 * GB),
    Sheet("mi325x", r"mi325x", _CDNA3, _MI300),
    Sheet("mi250x", r"mi250x", _CDNA2, {"bf16": 191.5e12, "fp32": 47.9e12, "fp64": 47.9e12}),
)  # fmt: skip
BY_NAME = {sheet.name: sheet for sheet in SHEETS}


def sheet_of(device: str) -> Sheet | None:
    """The data sheet of the GPU that calls itself `device`; None: not known.

    A slice of a GPU (MIG) is not known: its share of the multiprocessors is not in the data sheet.
    """
    device = device.lower()
    if "mig" in device.split():
        return None
    return next((sheet for sheet in SHEETS if re.search(sheet.pattern, device)), None)
