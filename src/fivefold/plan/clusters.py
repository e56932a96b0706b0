"""Machines: what a device computes and holds, and what links devices. Presets, and own clusters in TOML."""

from __future__ import annotations

import math
import re
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fivefold.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from fivefold.plan.measured import Measured, Share

GIB = 2**30
GB = 1e9
MOST_DEVICES = 1_000_000


@dataclass(frozen=True, eq=False)  # compared by identity, so that prices can be cached
class Device:
    """One accelerator.

    peak: dense FLOP/s by dtype, of the data sheet. matmul: share of it that the best matrix products reach. units:
    processors that share a product's tiles. memory: bytes. bandwidth: bytes/s of memory, of the data sheet; streaming:
    share of it that element-wise operations reach. attention: shares of `peak` that fused attention reaches in forward
    and backward, on long sequences with heads of 128. reserve: bytes that the program's runtime and the network library
    take (an estimate; reported as it is). spread: standard deviation of the speed of devices of one model on dense
    products; of several hundred the fastest and the slowest differ by about 8% (Sinha et al., SC 2022, "Not All GPUs
    Are Created Equal"). measured: what takes the place of all these rates.
    """

    name: str
    peak: dict[str, float]
    matmul: float
    units: int
    memory: float
    bandwidth: float
    streaming: float = 0.85
    attention: tuple[float, float] = (0.6, 0.5)
    reserve: float = 1.5 * GIB
    spread: float = 0.015
    measured: Share | None = None


@dataclass(frozen=True)
class Link:
    """What a device sends into one level of the network, in one direction.

    bandwidth: bytes/s of the data sheet; share: of it that large collectives reach. latency: seconds a hop. reduce:
    bytes/s ("bus bandwidth") of an all-reduce of a whole node where the switch adds up; None: like the others. mesh:
    every pair of devices has its own wire, so that a group uses only the wires between its members.
    """

    bandwidth: float
    share: float
    latency: float
    reduce: float | None = None
    mesh: bool = False

    @property
    def achieved(self) -> float:
        """bytes/s of a large collective."""
        return self.bandwidth * self.share


@dataclass(frozen=True)
class Cluster:
    """`devices` equal devices, `per_node` a node; `intra` links those of a node, `inter` the nodes (both: what one
    device sends). 0 devices: as many as a layout has ranks. machine: its table, where it was measured. disk: bytes/s a
    node writes."""

    name: str
    device: Device
    devices: int
    per_node: int
    intra: Link
    inter: Link
    machine: Measured | None = None
    disk: float = 2 * GB  # a local NVMe drive's, sustained

    @property
    def nodes(self) -> int:
        return math.ceil(self.devices / self.per_node)


# The specifications are those of the makers' data sheets (dense, no sparsity). "matmul": the highest bf16 rate that
# a search over shapes found (stas00/ml-engineering, "MAMF" table); on B200, whose rate falls under its power limit when
# large products follow one another, what large shapes reached in a published sweep (MooreThreads/SimuMax,
# configs/system/b200_bf16_ceperm.json, as are its attention and streaming shares). NVLink's share is what nccl-tests'
# rings reach with 16 GiB on 8 devices (ml-engineering, network/README.md); InfiniBand's is NVIDIA's 24 of 25 and 48 of
# 50 GB/s. Latencies of a hop are those of NCCL's own tuning model (ring, "Simple": 3.4 us NVLink, 14 us network).
# Attention: FlashAttention-2, which is PyTorch's: on A100 (arXiv 2307.08691, figures 5 and 6), on H100 (figure 7).
_A100 = Device("a100", {"bf16": 312e12, "fp16": 312e12, "fp32": 19.5e12}, 271.2 / 312, 108, 80 * GIB, 2.039e12,
               attention=(0.60, 0.55))  # fmt: skip
_HOPPER = {"bf16": 989.4e12, "fp16": 989.4e12, "fp32": 66.9e12, "fp8": 1978.9e12}
_H100 = Device("h100", _HOPPER, 794.5 / 989, 132, 80 * GIB, 3.35e12, attention=(0.37, 0.31))
_H200 = replace(_H100, name="h200", memory=141e9, bandwidth=4.8e12)
_BLACKWELL = {"bf16": 2250e12, "fp16": 2250e12, "fp32": 75e12, "fp8": 4500e12}
_B200 = Device("b200", _BLACKWELL, 0.50, 148, 180e9, 8.0e12, streaming=0.67, attention=(0.52, 0.42))
_CDNA3 = {"bf16": 1307.4e12, "fp16": 1307.4e12, "fp32": 163.4e12, "fp8": 2614.9e12}
_MI300X = Device("mi300x", _CDNA3, 668.4 / 1307.4, 304, 192e9, 5.3e12, streaming=0.8, attention=(0.40, 0.27))
_HOP, _NETWORK_HOP = 3.4e-6, 14e-6
_NVLINK4 = Link(450 * GB, 367.2 / 450, _HOP, reduce=480 * GB)
_NDR = Link(50 * GB, 48 / 50, _NETWORK_HOP)

PRESETS = {
    "a100": Cluster(
        "a100", _A100, 0, 8, Link(300 * GB, 234.9 / 300, _HOP), Link(25 * GB, 24 / 25, _NETWORK_HOP)
    ),
    "h100": Cluster("h100", _H100, 0, 8, _NVLINK4, _NDR),
    "h200": Cluster("h200", _H200, 0, 8, _NVLINK4, _NDR),
    "b200": Cluster("b200", _B200, 0, 8, Link(900 * GB, 682.2 / 900, _HOP, reduce=845 * GB), _NDR),
    # Infinity Fabric: 64 GB/s a pair of devices, 7 pairs each; 312.9 GB/s reached by all 8. The network is the
    # builder's choice: 400 Gb/s a device assumed.
    "mi300x": Cluster("mi300x", _MI300X, 0, 8, Link(448 * GB, 312.9 / 448, _HOP, mesh=True), _NDR),
}


def parse(text: str) -> Cluster:
    """Reads `h100:64` (64 devices, 8 a node), `h100:8x4` (8 nodes of 4), or `my.toml`, `my.toml:64`.

    Without a number the cluster has as many devices as the layout needs (0).

    Raises:
        UserError: unknown cluster, a number of devices that cannot be, a broken file.
    """
    name, colon, count = (text, "", "") if text.endswith(".toml") else text.rpartition(":")
    if not colon:
        name, count = text, ""
    cluster = _own(Path(name)) if name.endswith(".toml") else _preset(name, text)
    if colon and not count:
        raise UserError(f"cluster '{text}': the number of devices is missing, for example {name}:8")
    return _sized(cluster, count, text) if count else cluster


def for_ranks(cluster: Cluster, ranks: int) -> Cluster:
    """The cluster with as many devices as a layout has ranks; local ranks share the machine."""
    from fivefold.plan.local import shared

    if cluster.machine:
        return shared(cluster, ranks)
    return cluster if cluster.devices == ranks else replace(cluster, devices=ranks)


def _preset(name: str, text: str) -> Cluster:
    from fivefold.plan.local import cluster as local

    if name.lower() == "local":
        return local()
    if name.lower() not in PRESETS:
        known = [*PRESETS, "local"]
        near = did_you_mean(name.lower(), known)
        raise UserError(
            f"cluster '{text}': '{name}' is not known{near} (one of {', '.join(known)}, with a "
            "number of devices such as h100:64; or the path of a .toml file)"
        )
    return PRESETS[name.lower()]


def _sized(cluster: Cluster, count: str, text: str) -> Cluster:
    found = re.fullmatch(r"(\d{1,9})(?:x(\d{1,9}))?", count, re.ASCII)
    if not found:
        raise UserError(
            f"cluster '{text}': '{count}' is not a number of devices: 64, or 8x4 for 8 nodes of 4"
        )
    devices = int(found[1]) * int(found[2] or 1)
    if not 1 <= devices <= MOST_DEVICES:
        limit = f"at most {MOST_DEVICES:,}" if devices else "at least 1"
        raise UserError(f"cluster '{text}': {devices:,} devices; {limit}")
    if cluster.machine and found[2]:
        raise UserError(f"cluster '{text}': the machine at hand is one node: local:{devices}")
    sized = for_ranks(cluster, devices)
    return replace(sized, per_node=int(found[2])) if found[2] else sized


@dataclass(frozen=True)
class _Key:
    """A key of an own cluster's file: its factor to SI units, and what it must be above."""

    factor: float = 1.0
    above: float = 0.0
    most: float = math.inf


_KEYS = {
    "devices": _Key(most=MOST_DEVICES),
    "devices_per_node": _Key(most=MOST_DEVICES),
    "memory_gb": _Key(GB),
    "memory_bandwidth_tb_s": _Key(1e12),
    "bf16_tflops": _Key(1e12),
    "fp16_tflops": _Key(1e12),
    "fp32_tflops": _Key(1e12),
    "fp8_tflops": _Key(1e12),
    "matmul_share": _Key(most=1.0),
    "units": _Key(),
    "intra_gb_s": _Key(GB),
    "intra_share": _Key(most=1.0),
    "intra_latency_us": _Key(1e-6, above=-1e-9),
    "inter_gb_s": _Key(GB),
    "inter_share": _Key(most=1.0),
    "inter_latency_us": _Key(1e-6, above=-1e-9),
}
_WHOLE = ("devices", "devices_per_node", "units")


def _own(path: Path) -> Cluster:
    """A cluster described in a file: `base = "h100"` and what differs from it (keys of `_KEYS`)."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cluster '{path}': cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"cluster '{path}': not valid TOML: {str(error)[:200]}") from None
    base = table.pop("base", None)
    if not isinstance(base, str) or base not in PRESETS:
        raise UserError(
            f"cluster '{path}': base: must be the preset that it resembles, one of {', '.join(PRESETS)}"
        )
    values = {key: _number(path, key, value) for key, value in table.items()}
    return _changed(PRESETS[base], values, path.stem)


def _number(path: Path, key: str, value: Any) -> float:
    if key not in _KEYS:
        near = did_you_mean(key, _KEYS)
        raise UserError(f"cluster '{path}': '{key}' is not known{near} (keys: base, {', '.join(_KEYS)})")
    rule = _KEYS[key]
    whole = key not in _WHOLE or isinstance(value, int)
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not (number and whole and rule.above < value <= rule.most):
        kind = "whole number" if key in _WHOLE else "number"
        limits = "of at least 0" if rule.above < 0 else "above 0"
        limits += f" and at most {rule.most:g}" if math.isfinite(rule.most) else ""
        raise UserError(f"cluster '{path}': {key}: must be a {kind} {limits}, not {str(value)[:60]}")
    return value * rule.factor


def _changed(cluster: Cluster, values: dict[str, float], name: str) -> Cluster:
    device, link = cluster.device, {"intra": cluster.intra, "inter": cluster.inter}
    peak = {d: values.get(f"{d}_tflops", device.peak.get(d, 0.0)) for d in ("bf16", "fp16", "fp32", "fp8")}
    for side, old in link.items():
        changed = any(key.startswith(side) for key in values)
        link[side] = replace(
            old,
            bandwidth=values.get(f"{side}_gb_s", old.bandwidth),
            share=values.get(f"{side}_share", old.share),
            latency=values.get(f"{side}_latency_us", old.latency),
            reduce=None if changed else old.reduce,
        )
    device = replace(
        device,
        name=name,
        peak={dtype: rate for dtype, rate in peak.items() if rate},
        matmul=values.get("matmul_share", device.matmul),
        units=int(values.get("units", device.units)),
        memory=values.get("memory_gb", device.memory),
        bandwidth=values.get("memory_bandwidth_tb_s", device.bandwidth),
    )
    return Cluster(
        name,
        device,
        int(values.get("devices", cluster.devices)),
        int(values.get("devices_per_node", cluster.per_node)),
        link["intra"],
        link["inter"],
    )
