"""Clusters by name: presets from data sheets, this machine, and clusters described in TOML files. Their links, which
`schedules/collectives` simulates messages on."""

from __future__ import annotations

import math
import re
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fivefold.errors import UserError, did_you_mean
from fivefold.files import parse_toml, read_bytes
from fivefold.host import cores, memory_bytes, tables
from fivefold.host.devices import BY_NAME, GB, PCIE, sheet_of
from fivefold.precision import DTYPES
from fivefold.schedules.collectives import Wire
from fivefold.schedules.collectives.cost import Topology
from fivefold.sharding.layout_rules import MOST_RANKS
from fivefold_plan.cluster import measured
from fivefold_plan.cluster.devices import Cluster, Device, Link, Storage, Wiring, copies, of_table

MOST_BYTES = 64 << 10
"""Size of a cluster's file."""
RATED = tuple(DTYPES)
"""The dtypes whose rates a cluster has."""

_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
"""Rates that programs reach on nodes as they are sold, with their sources."""


def _preset(name: str, row: dict[str, Any]) -> Cluster:
    """The cluster of a device, by its row of the table. Devices without links to a whole node send over PCIe, by way of
    the host."""
    sheet, row = BY_NAME[name], _TABLE["shares"].get(row.get("shares"), {}) | row
    assumed = tuple(what for what in ("matmul", "attention", "ring") if what not in row)
    own = _TABLE["assumed"] | row
    matmul, ring = (reached / of for reached, of in (own["matmul"], own["ring"]))
    device = Device(
        name,
        {dtype: rate for dtype in RATED if (rate := sheet.rate(dtype))},
        matmul,
        sheet.units,
        sheet.memory,
        sheet.bandwidth,
        own.get("streaming", Device.streaming),
        tuple(own["attention"]),
        cudnn=tuple(own["cudnn"]) if "cudnn" in own else None,
        assumed=assumed,
        contended=own.get("contended", 0.0),
        watts=sheet.watts,
        sheet=name,
    )
    if "axes" in own:  # a torus that needs no other network: a ring sends both ways along one axis
        link = network = Link(sheet.link / own["axes"], ring, 1e-6)
    else:
        wire = (not sheet.linked and sheet.link) or PCIE[sheet.pcie]
        link = Link(wire, ring, _TABLE["hop"], own.get("reduce"), own.get("mesh", False))
        network = Link(_TABLE["networks"][own["network"]] * GB, 24 / 25, _TABLE["network_hop"])
    host = {key: own[key] for key in ("host_memory", "host_bandwidth") if key in own}
    wiring, per_node = Wiring(own.get("cards", 0)), own.get("per_node", 8)
    return Cluster(
        name, device, 0, per_node, link, network, wiring=wiring, host_link=copies(sheet.to_host), **host
    )


PRESETS = {name: _preset(name, row) for name, row in _TABLE["clusters"].items()}


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


def _key(part: str, field: str, count: bool = False, **more: Any) -> _Key:
    """count: of devices, or of what is no more than they are."""
    return _Key(part, field, most=MOST_RANKS, whole=True) if count else _Key(part, field, **more)


_KEYS = {key: _key(**row) for key, row in _TABLE["keys"].items()}
_KEYS |= {f"{dtype}_tflops": _Key("peak", dtype, 1e12) for dtype in RATED}
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
