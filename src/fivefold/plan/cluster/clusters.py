"""Clusters by name: presets from data sheets, this machine, and clusters described in TOML files. Their links, which
`schedules/collectives` simulates messages on."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fivefold.errors import UserError, did_you_mean
from fivefold.files import parse_toml, read_bytes
from fivefold.host import cores, memory_bytes, tables
from fivefold.host.devices import BY_NAME, GB, GIB, PCIE, sheet_of
from fivefold.plan.cluster import measured
from fivefold.plan.cluster.devices import Cluster, Device, Link, Storage, Wiring, copies, of_table
from fivefold.precision import DTYPES
from fivefold.schedules.collectives import Wire
from fivefold.schedules.collectives.cost import Topology
from fivefold.sharding.layout_rules import MOST_RANKS

MOST_BYTES = 64 << 10
"""Size of a cluster's file."""
RATED = tuple(DTYPES)
"""The dtypes whose rates a cluster has."""

# Specifications come from the data sheets (host/devices.py). These are the rates that programs reach.
# "matmul" is the highest bf16 rate that a search over shapes found (stas00/ml-engineering, "MAMF" table). B200's rate
# falls under its power limit when large matmuls follow one another, so its rate is that of large shapes in a published
# sweep (MooreThreads/SimuMax, configs/system/b200_bf16_ceperm.json, also for its attention and streaming shares).
# NVLink's share is what nccl-tests' rings reach with 16 GiB on 8 devices (ml-engineering, network/README.md).
# InfiniBand's is NVIDIA's 24 of 25 and 48 of 50 GB/s. Latencies per hop come from NCCL's own tuning model (ring,
# "Simple": 3.4 us NVLink, 14 us network). Attention is FlashAttention-2, as in PyTorch: on A100 arXiv 2307.08691,
# figures 5 and 6, on H100 figure 7. Devices of one chip (A100 with 40 GB, A800, H800) reach the same shares.
_HOP, _NETWORK_HOP = 3.4e-6, 14e-6
_EDR, _HDR, _NDR, _XDR = (Link(rate * GB, 24 / 25, _NETWORK_HOP) for rate in (12.5, 25, 50, 100))
_A100_MATMUL, _HOPPER_MATMUL, _B200_MATMUL = 271.2 / 312, 794.5 / 989.4, 1125 / 2250
_A100_RING, _HOPPER_RING, _B200_RING = 234.9 / 300, 367.2 / 450, 682.2 / 900
_A100_ATTENTION, _HOPPER_ATTENTION = (0.60, 0.55), (0.37, 0.31)
# cuDNN's: forward and backward together as measured on an H100 (benchmarks/results/gpu_h100.json, heads of 128 and 8192
# tokens: 3.55 ms, where FlashAttention-2 takes 6.72), divided between them as in FlashAttention-2.
_HOPPER_CUDNN = (0.66, 0.553)
# What computation does not hide of messages between nodes, of two sources (benchmarks/planner/published.py): plans of
# torchtitan's runs of 8B are as far off on 128 devices as on 8 with 0.2 (eager) and 0.1 (compiled); those of
# llm-foundry's 13B on 16 and 64 as those of its 7B and 1B on 8 with 0.3, of its 7B on 256 as on 8 with 0.2. Nothing
# was seen on A100.
_HOPPER_CONTENDED = 0.2
_HOPPER: dict[str, Any] = {"cudnn": _HOPPER_CUDNN, "contended": _HOPPER_CONTENDED}
# What is assumed of devices that nobody has measured for us: round shares below those of the measured ones.
_MATMUL, _RING, _ATTENTION = 0.75, 0.75, (0.40, 0.30)


def _preset(
    name: str,
    network: Link,
    matmul: float | None = None,
    ring: float | None = None,
    attention: tuple[float, float] | None = None,
    *,
    cudnn: tuple[float, float] | None = None,
    contended: float = 0.0,
    per_node: int = 8,
    cards: int = 0,
    reduce: float | None = None,
    mesh: bool = False,
    streaming: float = Device.streaming,
    **host: Any,
) -> Cluster:
    """A cluster of the nodes that a device is usually sold in. matmul, ring, attention: shares of the sheet's rates;
    None: assumed. Devices without links to a whole node send over PCIe, by way of the host."""
    sheet = BY_NAME[name]
    peak = {dtype: rate for dtype in RATED if (rate := sheet.rate(dtype))}
    shares = {"matmul": matmul, "attention": attention, "ring": ring}
    assumed = tuple(what for what, share in shares.items() if not share)
    rates = matmul or _MATMUL, sheet.units, sheet.memory, sheet.bandwidth, streaming, attention or _ATTENTION
    device = Device(
        name, peak, *rates, cudnn=cudnn, assumed=assumed, contended=contended, watts=sheet.watts, sheet=name
    )
    wire = (not sheet.linked and sheet.link) or PCIE[sheet.pcie]
    link, to_host = Link(wire, ring or _RING, _HOP, reduce, mesh), copies(sheet.to_host)
    return Cluster(name, device, 0, per_node, link, network, wiring=Wiring(cards), host_link=to_host, **host)


def _tpu(name: str) -> Cluster:
    """Hosts of 4 chips in a torus that needs no other network: a ring sends both ways along one of three axes."""
    axis = Link(BY_NAME[name].link / 3, 0.9, 1e-6)
    return replace(_preset(name, axis, ring=0.9, per_node=4), intra=axis)


# Networks: of DGX-1 and DGX A100 to B300 (one card per device from A100 on); GB200: of an NVL72 rack, whose hosts are
# linked to the devices by NVLink-C2C; GH200: of four superchips with NVLink between all pairs and 200 Gb/s each, as in
# JUPITER and Alps (servers of one: gh200:8x1); MI250X: of Frontier's nodes, whose 4 modules are 8 devices. The others
# are the builder's choice; what is common is assumed.
PRESETS = {
    cluster.name: cluster
    for cluster in (
        _preset("p100", _EDR, cards=4),
        _preset("v100", _EDR, cards=4),
        _preset("t4", _EDR, cards=1),
        _preset("a100-40gb", _HDR, _A100_MATMUL, _A100_RING, _A100_ATTENTION),
        _preset("a100", _HDR, _A100_MATMUL, _A100_RING, _A100_ATTENTION),
        _preset("a800", _HDR, _A100_MATMUL, _A100_RING, _A100_ATTENTION),
        _preset("l4", _EDR, cards=1),
        _preset("l40s", _HDR, cards=4),
        _preset("rtx4090", _EDR, cards=1),
        _preset("h100-nvl", _NDR, cards=4, contended=_HOPPER_CONTENDED),
        _preset("h200-nvl", _NDR, cards=4, contended=_HOPPER_CONTENDED),
        _preset("h100-pcie", _NDR, cards=4, contended=_HOPPER_CONTENDED),
        _preset("h100", _NDR, _HOPPER_MATMUL, _HOPPER_RING, _HOPPER_ATTENTION, **_HOPPER, reduce=480 * GB),
        _preset("h800", _NDR, _HOPPER_MATMUL, _HOPPER_RING, _HOPPER_ATTENTION, **_HOPPER),
        _preset(
            "gh200", _HDR, _HOPPER_MATMUL, None, _HOPPER_ATTENTION, **_HOPPER,
            per_node=4, mesh=True, host_memory=4 * 480 * GB, host_bandwidth=4 * 384 * GB,
        ),
        _preset("h200", _NDR, _HOPPER_MATMUL, _HOPPER_RING, _HOPPER_ATTENTION, **_HOPPER, reduce=480 * GB),
        _preset("b200", _NDR, _B200_MATMUL, _B200_RING, (0.52, 0.42), reduce=845 * GB, streaming=0.67),
        _preset("gb200", _NDR, per_node=72, host_memory=36 * 480 * GB, host_bandwidth=36 * 400 * GB),
        _preset("b300", _XDR),
        _preset("mi250x", _HDR, cards=4, host_memory=512 * GIB),
        # All 8 devices reach 312.9 GB/s. The network is the builder's choice; 400 Gb/s per device are assumed.
        _preset("mi300x", _NDR, 668.4 / 1307.4, 312.9 / 448, (0.40, 0.27), streaming=0.8, mesh=True),
        _preset("mi325x", _NDR, mesh=True),
        _preset("mi355x", _NDR, mesh=True),
        _tpu("tpu-v4"),
        _tpu("tpu-v5p"),
    )
}  # fmt: skip


_PAIRED = ("a100-40gb", "a100", "h100", "h200")
"""Devices that are also sold on boards of 4 without switches, where each pair has a third of a device's links (NVIDIA,
"Introducing NVIDIA HGX H100")."""
LOCAL = "local"
_BASES = f"a preset, one of {', '.join(PRESETS)}, or local"


def of_gpu(name: str) -> Cluster:
    """The preset of the GPU that calls itself `name`. Raises UserError: there is none."""
    sheet = sheet_of(name)
    if sheet is None or sheet.name not in PRESETS:
        raise UserError(f"the planner has no figures of {name} (it has those of {', '.join(PRESETS)})")
    return PRESETS[sheet.name]


def with_margin(cluster: Cluster, percent: float | None) -> Cluster:
    """The cluster whose plans leave this share of memory free (None: its own)."""
    return (
        cluster if percent is None else replace(cluster, device=replace(cluster.device, margin=percent / 100))
    )


def parse(text: str, rough: bool = False) -> Cluster:
    """Reads `h100:64` or `64xh100` (64 devices, in nodes as they are sold), `h100:8x4` (8 nodes of 4), or `my.toml`,
    `my.toml:64`.

    Without a number `devices` is 0, and the cluster has as many devices as the layout needs. rough: as for `local`.
    Raises UserError: unknown cluster, impossible number of devices, broken file."""
    text = canonical(text)
    name, colon, count = (text, "", "") if text.endswith(".toml") else text.rpartition(":")
    if not colon:
        name, count = text, ""
    key = device_name(name)
    if name.endswith(".toml"):
        cluster, _ = _described(Path(name), "cluster")
    elif key in PRESETS:
        cluster = PRESETS[key]
    elif key == LOCAL:
        cluster = local(rough)
    else:
        near = did_you_mean(key, [*PRESETS, LOCAL])
        raise UserError(
            f"cluster '{text}': unknown name '{name}'{near} (valid: {', '.join(PRESETS)}, {LOCAL}, with a "
            "number of devices such as h100:64, or the path of a .toml file; `fivefold clusters` describes them)"
        )
    if colon and not count:
        raise UserError(f"cluster '{text}': the number of devices is missing, such as {name}:8")
    return _sized(cluster, count, text) if count else cluster


def local(rough: bool = False) -> Cluster:
    """The cluster `local`: this machine with its measured table. rough: else with one in round numbers. Raises
    UserError: it has not been measured."""
    table = measured.load() or (measured.assumed_table(cores(), memory_bytes()) if rough else None)
    if table is None:
        raise UserError(
            "cluster 'local': this machine has not been measured; run `fivefold bench hardware` first"
        )
    return of_table(table)


def device_name(text: str) -> str:
    """The name of a device as the table has it: `h100` for `H100 SXM`, `a100` for `A100-80GB`."""
    name = re.sub(r"[ _]", "-", text.strip().lower())
    return next((name.removesuffix(end) for end in ("-sxm", "-80gb", "-nvl72") if name.endswith(end)), name)


def canonical(text: str) -> str:
    """`64xH100` and `h100x64` as `h100:64`; `8x4xh100` as `h100:8x4`. Everything else stays as it is."""
    if text.endswith(".toml") or ":" in text:
        return text
    if found := re.fullmatch(r"(\d+(?:x\d+)?)x([a-z].*)", text, re.ASCII | re.IGNORECASE):
        return f"{found[2]}:{found[1]}"
    found = re.fullmatch(r"(.+?)x(\d+(?:x\d+)?)", text, re.ASCII | re.IGNORECASE)
    return f"{found[1]}:{found[2]}" if found and device_name(found[1]) in PRESETS else text


def _sized(cluster: Cluster, count: str, text: str) -> Cluster:
    found = re.fullmatch(r"(\d{1,9})(?:x(\d{1,9}))?", count, re.ASCII)
    if not found:
        raise UserError(
            f"cluster '{text}': '{count}' is not a number of devices; write 64, or 8x4 for 8 nodes of 4"
        )
    devices = int(found[1]) * int(found[2] or 1)
    if not 1 <= devices <= MOST_RANKS:
        limit = f"at most {MOST_RANKS:,}" if devices else "at least 1"
        raise UserError(f"cluster '{text}': {devices:,} devices; {limit}")
    if found[2] and not cluster.connected:
        raise UserError(f"cluster '{text}': this machine is one node; write local:{devices}")
    sized = cluster.for_ranks(devices)
    return _in_nodes(sized, int(found[2])) if found[2] else sized


def _in_nodes(cluster: Cluster, per_node: int) -> Cluster:
    """The cluster with so many devices on each node, on boards as they are sold unless its links were stated."""
    sized = replace(cluster, per_node=per_node)
    if cluster.device.sheet not in _PAIRED or per_node == cluster.per_node or sized.wiring.domain:
        return sized
    switched = PRESETS[cluster.device.sheet].intra
    board = replace(switched, mesh=True, reduce=None)
    stated = cluster.intra not in (switched, board)
    return sized if stated else replace(sized, intra=board if per_node == 4 else switched)


@dataclass(frozen=True)
class _Key:
    """A key of a cluster file. part, field: what it sets ("" is the cluster). factor: to SI units. least: allowed
    itself; None: above 0."""

    part: str
    field: str
    factor: float = 1.0
    least: float | None = None
    most: float = math.inf
    whole: bool = False


_COUNT: dict[str, Any] = {"most": MOST_RANKS, "whole": True}
_LATENCY: dict[str, Any] = {"factor": 1e-6, "least": 0.0}
_KEYS = {
    "devices": _Key("", "devices", **_COUNT),
    "devices_per_node": _Key("", "per_node", **_COUNT),
    "memory_gb": _Key("device", "memory", GB),
    "memory_margin_percent": _Key("device", "margin", 0.01, least=0.0, most=99),
    "memory_bandwidth_tb_s": _Key("device", "bandwidth", 1e12),
    **{f"{dtype}_tflops": _Key("peak", dtype, 1e12) for dtype in RATED},
    "matmul_share": _Key("device", "matmul", most=1.0),
    "fp8_matmul_share": _Key("device", "matmul_fp8", most=1.0),
    "units": _Key("device", "units", whole=True),
    "attention_forward_share": _Key("attention", "forward", most=1.0),
    "attention_backward_share": _Key("attention", "backward", most=1.0),
    "intra_gb_s": _Key("intra", "bandwidth", GB),
    "intra_share": _Key("intra", "share", most=1.0),
    "intra_latency_us": _Key("intra", "latency", **_LATENCY),
    "switch_gb_s": _Key("intra", "reduce", GB),
    "inter_gb_s": _Key("inter", "bandwidth", GB),
    "inter_share": _Key("inter", "share", most=1.0),
    "inter_latency_us": _Key("inter", "latency", **_LATENCY),
    "nics_per_node": _Key("wiring", "cards", **_COUNT),
    "nvlink_domain": _Key("wiring", "domain", **_COUNT),
    "pcie_gb_s": _Key("pcie", "bandwidth", GB),
    "pcie_latency_us": _Key("pcie", "latency", **_LATENCY),
    "nodes_per_leaf": _Key("wiring", "leaf", **_COUNT),
    "oversubscription": _Key("wiring", "oversubscription", least=1.0),
    "hosts_per_machine": _Key("", "hosts", **_COUNT),
    "host_gb_s": _Key("host", "rate", GB),
    "host_memory_gb": _Key("", "host_memory", GB),
    "host_bandwidth_gb_s": _Key("", "host_bandwidth", GB),
    "disk_read_gb_s": _Key("disk", "read", GB),
    "disk_write_gb_s": _Key("disk", "write", GB),
    "disk_both_gb_s": _Key("disk", "both", GB),
    "device_watts": _Key("device", "watts"),
    "price_per_hour": _Key("", "price"),
    "mtbf_hours": _Key("", "mtbf", 3600.0),
    "restart_minutes": _Key("", "restart", 60.0, least=0.0),
}
_SHARES = {"matmul": "matmul_share", "ring": "intra_share", "attention": "attention_forward_share"}
"""Keys that replace what a preset assumes."""
_OF_HOSTS = (
    "devices", "devices_per_node", "inter_gb_s", "inter_share", "inter_latency_us", "nics_per_node", "nodes_per_leaf",
    "oversubscription", "hosts_per_machine",
)  # fmt: skip
"""Keys of a file whose base is this machine: each node is like it, or several are on it."""
_ALONE = {
    "devices_per_node": (),
    "intra_gb_s": (),
    "intra_latency_us": (),
    "inter_gb_s": ("inter_latency_us", "nics_per_node", "nodes_per_leaf", "oversubscription"),
    "inter_latency_us": ("inter_gb_s",),
    "pcie_gb_s": ("pcie_latency_us",),
}
"""Keys that a file without a base must have: always (), or if it has one of those."""


def _described(path: Path, what: str) -> tuple[Cluster, bool]:
    """(the cluster of a file, whether its nodes are connected). A file has `base = "h100"` and the keys of `_KEYS` that
    differ from it. what: "cluster", or "topology", of which only the links count, so that it may have no base. Raises
    UserError: the file is broken, or a link is missing."""
    base, values, torus = _read(path)
    if base is None and what == "cluster":
        raise UserError(f"cluster '{path}': base: must be {_BASES}")
    if base is None:
        for key, others in _ALONE.items():
            because = next((other for other in others if other in values), None)
            if key not in values and (because or not others):
                reason = f" (there is {because})" if because else ""
                raise UserError(
                    f"topology '{path}': {key} is missing{reason}: give it, or a base, one of {', '.join(PRESETS)}"
                )
        bare = replace(PRESETS["h100"], intra=Link(0, 1, 0), inter=Link(0, 1, 0))
        whole = {"intra_share": 1.0, "inter_share": 1.0} | values
        return _changed(bare, whole, torus, path.stem), "inter_gb_s" in values
    if base != LOCAL:
        cluster = PRESETS[base]
        if not torus and not values.keys() & {"intra_gb_s", "switch_gb_s", "nvlink_domain"}:
            cluster = _in_nodes(cluster, int(values.get("devices_per_node", cluster.per_node)))
        return _changed(cluster, values, torus, path.stem), True
    if wrong := ["torus"] * bool(torus) + [key for key in values if key not in _OF_HOSTS]:
        raise UserError(
            f"cluster '{path}': {wrong[0]}: the base is this machine, as it was measured "
            f"(keys besides base: {', '.join(_OF_HOSTS)})"
        )
    for key in ("devices_per_node", "inter_gb_s", "inter_latency_us"):
        if key not in values:
            raise UserError(f"cluster '{path}': {key} is missing: hosts like this machine need it")
    cluster = replace(local(), name=path.stem, inter=Link(0, 1, 0))
    changed = _changed(cluster, {"nics_per_node": 1} | values, (), path.stem)
    return replace(changed, device=cluster.device), True


def _read(path: Path) -> tuple[str | None, dict[str, float], tuple[int, ...]]:
    """(base, values in SI units, sizes of the torus) of a file."""
    try:
        table = parse_toml(read_bytes(path, MOST_BYTES).decode("utf-8"))
    except OSError as error:
        raise UserError(f"cluster '{path}': cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"cluster '{path}': not valid TOML: {str(error)[:200]}") from None
    base, torus = table.pop("base", None), table.pop("torus", [])
    if base is not None and (not isinstance(base, str) or base not in (*PRESETS, LOCAL)):
        raise UserError(f"cluster '{path}': base: must be {_BASES}")
    if base != LOCAL and "hosts_per_machine" in table:
        raise UserError(f"cluster '{path}': hosts_per_machine: only with base = \"{LOCAL}\"")
    sizes = isinstance(torus, list) and all(
        isinstance(size, int) and 1 < size <= MOST_RANKS for size in torus
    )
    if not sizes:
        raise UserError(
            f"cluster '{path}': torus: must be a list of sizes of at least 2, such as [4, 4], not {torus!r:.60}"
        )
    return base, {key: _number(path, key, value) for key, value in table.items()}, tuple(torus)


def _number(path: Path, key: str, value: Any) -> float:
    if key not in _KEYS:
        near = did_you_mean(key, _KEYS)
        raise UserError(
            f"cluster '{path}': unknown key '{key}'{near} (keys: base, torus, {', '.join(_KEYS)})"
        )
    rule = _KEYS[key]
    whole = not rule.whole or isinstance(value, int)
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    enough = number and (value > 0 if rule.least is None else value >= rule.least)
    if not (enough and whole and value <= rule.most):
        kind = "whole number" if rule.whole else "number"
        limits = "above 0" if rule.least is None else f"of at least {rule.least:g}"
        limits += f" and at most {rule.most:g}" if math.isfinite(rule.most) else ""
        raise UserError(f"cluster '{path}': {key}: must be a {kind} {limits}, not {str(value)[:60]}")
    return value * rule.factor


def _changed(cluster: Cluster, values: dict[str, float], torus: tuple[int, ...], name: str) -> Cluster:
    """The cluster with other values, by the parts that they set."""
    parts: dict[str, dict[str, Any]] = {key.part: {} for key in _KEYS.values()}
    for key, value in values.items():
        rule = _KEYS[key]
        parts[rule.part][rule.field] = int(value) if rule.whole else value
    for side in ("intra", "inter"):
        if given := parts[side]:
            parts[""][side] = replace(getattr(cluster, side), **({"reduce": None} | given))
    assumed = tuple(what for what in cluster.device.assumed if _SHARES.get(what) not in values)
    peak = cluster.device.peak | parts["peak"]
    if rates := parts["attention"]:  # of whatever library runs there
        shares = dict(zip(("forward", "backward"), cluster.device.attention, strict=True)) | rates
        parts["device"] |= {"attention": tuple(shares.values()), "cudnn": None}
    device = replace(cluster.device, name=name, peak=peak, assumed=assumed, **parts["device"])
    pcie = replace(Link(0.0, 1.0, 0.0), **parts["pcie"]) if "pcie_gb_s" in values else None
    wiring = replace(cluster.wiring, torus=torus, pcie=pcie, **parts["wiring"])
    if rate := parts["host"].get("rate"):  # both directions of PCIe at once
        parts[""]["host_link"] = Storage(rate, rate, 2 * rate)
    if disk := parts["disk"]:
        alike = dict.fromkeys(("read", "both"), disk.get("write", cluster.storage.write))
        parts[""]["storage"] = replace(cluster.storage, **(alike | disk))
    return replace(cluster, name=name, device=device, wiring=wiring, **parts[""])


def topology(text: str, ranks: int) -> Topology:
    """Reads `h100`, `h100:8x4`, `my.toml` or `local` as the topology of `ranks` ranks. Raises UserError: unknown
    cluster, broken file, missing link, more ranks than devices, or a machine without table."""
    if text.lower() == LOCAL:
        return of_fit(_fit(ranks), ranks)
    file = text.endswith(".toml")
    cluster, connected = _described(Path(text), "topology") if file else (parse(text), True)
    if cluster.machine and not cluster.connected:
        return of_fit(_fit(ranks), ranks)
    if 0 < cluster.devices < ranks:
        raise UserError(
            f"topology '{text}': {ranks} ranks need as many devices, but it has {cluster.devices}"
        )
    x = cluster.wiring
    if cluster.machine:
        fit = _fit(min(ranks, cluster.per_node * cluster.hosts))
        fit = fit | {"far_alpha": cluster.inter.latency, "far_beta": 1 / cluster.inter.achieved}
        hosts = of_fit(fit, ranks, cluster.per_node, cluster.hosts)
        own = {"cards": x.cards, "leaf": x.leaf, "oversubscription": x.oversubscription}
        return replace(hosts, name=cluster.name, **own)
    far = cluster.inter.wire if connected else None
    wiring: dict[str, Any] = vars(x) | {"pcie": x.pcie and x.pcie.wire}
    near, pairs = cluster.intra.wire, cluster.intra.mesh
    switch = cluster.intra.switch(ranks) if ranks == cluster.per_node else None
    return Topology(cluster.name, ranks, cluster.per_node, near, far, pairs=pairs, switch=switch, **wiring)


def _fit(ranks: int) -> dict[str, float]:
    """What messages cost where so many ranks share this machine, or the nearest number that was measured."""
    table = tables.load_collectives()
    if table is None:
        raise UserError(
            "topology 'local': this machine's messages have not been measured; run `fivefold bench collectives` first"
        )
    fits = table["fit"]
    return fits[min(fits, key=lambda measured: abs(math.log(int(measured) / ranks)))]


def of_fit(fit: dict[str, float], ranks: int, local: int = 0, hosts: int = 1) -> Topology:
    """The topology of ranks that share a machine, or several: each message costs it time for itself and for its bytes.

    fit: of `bench/collectives.py`. local: ranks on each node, 0 for all. hosts: nodes on each machine.
    """
    far = Wire(fit["far_alpha"], 1 / fit["far_beta"]) if "far_alpha" in fit else None
    return Topology(
        "local",
        ranks,
        local or max(ranks, 1),
        Wire(fit["alpha"], 1 / fit["beta"]),
        far,
        cards=1 if far else 0,
        bus=Wire(fit["bus_alpha"], 1 / fit["bus_beta"]),
        hosts=hosts,
        reduce_s=fit["gamma"],
    )
