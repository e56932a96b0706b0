"""The named devices and clusters as tables: data sheets (host/devices.py) and what the planner makes of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fivefold.host.devices import BY_NAME, GB, GIB, PCIE, SHEETS, Sheet
from fivefold.observe.format import aligned
from fivefold.precision.formats import FORMATS
from fivefold_plan.cluster.clusters import PRESETS
from fivefold_plan.cluster.devices import Cluster, Link

RATED = tuple(dict.fromkeys(form.multiplied for form in FORMATS.values()))
"""The formats whose rates data sheets state, from the widest."""
LINKS = {"NVIDIA": "NVLink", "AMD": "Infinity Fabric", "Google": "ICI"}
"""A maker's links between devices."""
TO_HOST = {"NVIDIA": "NVLink-C2C", "AMD": "Infinity Fabric to the host"}
"""A maker's links to the host that are not PCIe."""


@dataclass(frozen=True)
class Row:
    """A link of a cluster, or a memory. each_way, both_ways: bytes/s of the data sheet; a memory has one number.
    reached: what programs get of `each_way`. latency_s: seconds per hop. None: the planner needs none."""

    link: str
    each_way: float
    both_ways: float | None = None
    reached: float | None = None
    latency_s: float | None = None
    note: str = ""


def _sheet(cluster: Cluster) -> Sheet | None:
    """The data sheet of a preset's device; None: a file or a measurement describes the device."""
    preset = PRESETS.get(cluster.device.name)
    return BY_NAME[cluster.device.name] if preset and preset.device is cluster.device else None


def device_json(sheet: Sheet) -> dict[str, Any]:
    """A data sheet. Rates that it does not state are null."""
    return {
        "name": sheet.name,
        "year": sheet.year,
        "generation": sheet.generation,
        "units": sheet.units,
        "memory_bytes": sheet.memory,
        "memory_bytes_per_s": sheet.bandwidth,
        "flops": {dtype: sheet.rate(dtype) for dtype in RATED},
        "link": LINKS[sheet.maker] if sheet.link else None,
        "link_bytes_per_s": sheet.link or None,
        "linked_devices": sheet.linked or None,
        "pcie_generation": sheet.pcie,
        "pcie_bytes_per_s": PCIE[sheet.pcie],
        "host_bytes_per_s": sheet.to_host,
        "dies_per_package": sheet.dies,
        "watts": sheet.watts or None,
        "source": sheet.source,
    }


def cluster_json(cluster: Cluster) -> dict[str, Any]:
    device, sheet = cluster.device, _sheet(cluster)
    own = {  # of a cluster file, or this machine's
        "name": device.name,
        "memory_bytes": device.memory,
        "memory_bytes_per_s": device.bandwidth,
        "flops": {dtype: device.peak.get(dtype) for dtype in RATED},
    }
    return {
        "name": cluster.name,
        "devices": cluster.devices or None,
        "devices_per_node": cluster.per_node if cluster.machine is None else None,
        "cards_per_node": cluster.cards if cluster.connected else None,
        "host_memory_bytes": cluster.host_memory if cluster.machine is None else None,
        "links": [asdict(row) for row in links(cluster)],
        "device": device_json(sheet) if sheet else own,
        "shares": {"matmul": device.matmul, "attention": device.attention, "memory": device.streaming},
        "assumed": list(device.assumed),
    }


def links(cluster: Cluster) -> list[Row]:
    """Memory, the links within a node and between nodes, host memory and disk, from the device outwards."""
    device, sheet, disk, x = cluster.device, _sheet(cluster), cluster.storage, cluster.wiring
    rows = [Row("memory", device.bandwidth, reached=device.bandwidth * device.streaming)]
    if math.isfinite(cluster.intra.bandwidth):
        rows += _within(cluster)
    if cluster.machine is None:
        name, speed = "PCIe to the host", cluster.host_link.read
        if sheet:
            name, speed = TO_HOST[sheet.maker] if sheet.host else f"PCIe {sheet.pcie}.0 x16", sheet.to_host
        rows.append(Row(name, speed, 2 * speed, cluster.host_link.read))
    if x.pcie:
        rows.append(_row("PCIe to the cards", x.pcie))
    if cluster.connected:
        link, cards = cluster.inter, cluster.cards
        note = f"{link.bandwidth * 8 / 1e9:,.0f} Gb/s, {cards} card{'s' * (cards > 1)} per node"
        note += f", {x.leaf} nodes per leaf switch" if x.leaf else ""
        note += f", oversubscribed {x.oversubscription:g} times" if x.oversubscription > 1 else ""
        rows.append(_row("ICI to other hosts" if link == cluster.intra else "network (RDMA)", link, note))
    if cluster.machine is None:
        note = f"{_memory(cluster.host_memory)} per node"
        rows.append(Row("host memory", cluster.host_bandwidth, note=note))
    speeds = {"reading": disk.read, "writing": disk.write, "both at once": disk.both}
    return rows + [Row(f"disk, {way}", speed) for way, speed in speeds.items()]


def _within(cluster: Cluster) -> list[Row]:
    link, sheet, rows = cluster.intra, _sheet(cluster), list[Row]()
    name = "links within a node"
    if sheet:
        name = LINKS[sheet.maker] if sheet.link and not sheet.linked else "PCIe between devices"
    if sheet and sheet.linked:
        note = f"between {sheet.linked} devices; the planner sends over PCIe"
        rows.append(Row(LINKS[sheet.maker], sheet.link, 2 * sheet.link, note=note))
    note = f"{cluster.per_node} devices per node"
    if cluster.wiring.torus:
        note += f", a torus of {' x '.join(map(str, cluster.wiring.torus))}"
    if link.mesh and cluster.per_node > 1:
        note += f", {_gb(link.bandwidth / (cluster.per_node - 1))} GB/s to each other one"
    if link.reduce:
        note += f", the switch adds at {_gb(link.reduce)} GB/s"
    return [*rows, _row(name, link, note)]


def _row(name: str, link: Link, note: str = "") -> Row:
    return Row(name, link.bandwidth, 2 * link.bandwidth, link.achieved, link.latency, note)


def listing() -> str:
    """All devices, then the clusters that are made of them."""
    devices = [["device", "year", "generation", "memory", "GB/s", *RATED, "links", "PCIe", "host"]]
    clusters = [["cluster", "per node", "within, GB/s", "network, Gb/s", "cards", "host memory", "assumed"]]
    for sheet in SHEETS:
        cluster = PRESETS[sheet.name]
        devices.append(
            [
                sheet.name, str(sheet.year), sheet.generation.partition(" (")[0], _memory(sheet.memory),
                _gb(sheet.bandwidth), *(_tera(sheet.rate(dtype)) for dtype in RATED), _gb(sheet.link),
                f"{sheet.pcie}.0", _gb(sheet.to_host),
            ]
        )  # fmt: skip
        clusters.append(
            [
                cluster.name, str(cluster.per_node), _gb(cluster.intra.bandwidth),
                f"{cluster.inter.bandwidth * 8 / 1e9:,.0f}", str(cluster.cards), _memory(cluster.host_memory),
                ", ".join(cluster.device.assumed),
            ]
        )  # fmt: skip
    dies = "".join(
        f"  {sheet.name}: one of the {sheet.dies} dies of a package; programs see each as a device\n"
        for sheet in SHEETS
        if sheet.dies > 1
    )
    return (
        "Dense TFLOP/s by format (-: the data sheet has no rate). Links to other devices and to the host: GB/s in one\n"
        "direction. The host is linked by 16 lanes of PCIe of this generation, if not by faster links of the maker.\n\n"
        f"{_aligned(devices, (0, 2))}{dies}\n"
        "Clusters: nodes as they are sold. --cluster h100:64 or 64xh100 are 64 devices, h100:8x4 are 8 nodes of 4.\n\n"
        f"{_aligned(clusters, (0, 6))}\n"
        "assumed: shares of the data sheet's rates that were not measured. `local` is this machine. One with its "
        "links: fivefold clusters h100\n"
    )


def description(cluster: Cluster) -> str:
    """One cluster: its device, and each of its links."""
    device, sheet = cluster.device, _sheet(cluster)
    head = [cluster.name + (f": {sheet.generation}, {sheet.units} units" if sheet else "")]
    if cluster.devices:
        nodes = f" on {cluster.nodes} nodes" if cluster.machine is None else ""
        head.append(f"{cluster.devices:,} devices{nodes}")
    rates = device.peak if sheet is None else sheet.peak
    power = f", at most {device.watts:,.0f} W" if device.watts else ""
    head.append(f"memory {_memory(device.memory)} per device{power}")
    head.append("dense TFLOP/s: " + ", ".join(f"{d} {_tera(rates[d])}" for d in RATED if d in rates))
    if missing := [dtype for dtype in RATED if dtype not in rates]:
        head.append(f"without a rate: {', '.join(missing)}")
    if cluster.machine is not None:
        head.append("as measured, with its messages (fivefold bench hardware)")
    else:
        narrow = f" ({device.matmul_fp8:.0%} in fp8)" if device.matmul_fp8 else ""
        head += ["share of that which is reached", f"  matmul             {device.matmul:.0%}{narrow}"]
        for name, found in (("attention", device.attention), ("cuDNN's attention", device.cudnn)):
            if found:
                head.append(f"  {name:17}  {found[0]:.0%} forward, {found[1]:.0%} backward")
    if device.assumed:
        head.append(f"assumed, not measured: {', '.join(device.assumed)}")
    if sheet:
        head.append(f"source: {sheet.source}")
    if sheet and sheet.dies > 1:
        head.append(f"one of the {sheet.dies} dies of a package: programs see each as a device")
    table = [["link", "GB/s each way", "both ways", "reached", "latency", ""]]
    for row in links(cluster):
        speeds = (_gb(speed) if speed else "" for speed in (row.each_way, row.both_ways, row.reached))
        latency = f"{row.latency_s * 1e6:.1f} us" if row.latency_s is not None else ""
        table.append([row.link, *speeds, latency, row.note])
    return "\n  ".join(head) + "\n\n" + _aligned(table, (0, 5))


def _gb(size: float) -> str:
    """Bytes in GB, three or four digits; `-` for none."""
    return f"{size / GB:,.4g}" if 0 < size < 1e4 * GB else f"{size / GB:,.0f}" if size else "-"


def _memory(size: float) -> str:
    """As the maker counts it: `80 GiB`, `141 GB`."""
    return f"{size / GB:,.4g} GB" if size % GIB else f"{size // GIB:,.0f} GiB"


def _tera(rate: float | None) -> str:
    return "-" if rate is None else f"{rate / 1e12:,.5g}"


def _aligned(rows: Sequence[Sequence[str]], left: Sequence[int]) -> str:
    """left: the columns of text; those of numbers end below each other."""
    return "".join(f"  {line}\n" for line in aligned(rows, left))
