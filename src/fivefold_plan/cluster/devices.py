"""Devices, links and clusters, from data sheets or from measurements of this machine."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from fivefold.host.devices import GB, GIB, PCIE
from fivefold.models.operations import Library
from fivefold.schedules.collectives import Line, Wire
from fivefold_plan.cluster.measured import Measured, Share

RUNTIME = 0.25 * GIB
"""Bytes per process for Python and PyTorch's libraries on a CPU."""
MARGIN = 0.07
"""Share of an accelerator's memory that plans leave free for errors of the memory formula, beside `Device.reserve` and
`predict.FRAGMENTS`. Of 22 published peaks none was planned more than 6.7% too low (benchmarks/planner/published.py)."""


@dataclass(frozen=True, eq=False)  # compared by identity, so that prices can be cached
class Device:
    """One accelerator.

    peak: dense FLOP/s by dtype, of the data sheet. matmul: share of it that the best matrix products reach;
    matmul_fp8: those of 8 bits, None: the same. units: processors that share a product's tiles. memory: bytes.
    bandwidth: bytes/s of memory, of the data sheet; streaming: share of it that element-wise operations reach.
    attention: shares of `peak` that fused attention reaches in forward
    and backward, on long sequences with heads of 128, with FlashAttention-2; cudnn: with cuDNN's, None: it is not
    faster there, or not measured. reserve: bytes that the program's runtime and the network library
    take (an estimate; reported as it is). spread: standard deviation of the speed of devices of one model on dense
    products; of several hundred the fastest and the slowest differ by about 8% (Sinha et al., SC 2022, "Not All GPUs
    Are Created Equal"). measured: what takes the place of all these rates. assumed: shares that nobody has measured,
    "matmul", "attention" or "ring" (of the links within a node). margin: the share of memory that plans leave free.
    contended: the share of a message of blocks or of data parallelism between nodes that computation does not hide,
    since both need the device's memory and processors. What pipelines hide shows nothing.
    watts: the most that it draws; 0: not known. sheet: the name of its data sheet, also if a file changes it.
    """

    name: str
    peak: dict[str, float]
    matmul: float
    units: int
    memory: float
    bandwidth: float
    streaming: float = 0.85
    attention: tuple[float, float] = (0.6, 0.5)
    cudnn: tuple[float, float] | None = None
    matmul_fp8: float | None = None
    reserve: float = 1.5 * GIB
    spread: float = 0.015
    measured: Share | None = None
    assumed: tuple[str, ...] = ()
    margin: float = MARGIN
    contended: float = 0.0
    watts: float = 0.0
    sheet: str = ""

    def multiplies(self, dtype: str) -> float:
        """Share of `peak` that the best matmuls reach."""
        return self.matmul_fp8 if self.matmul_fp8 and dtype == "fp8" else self.matmul

    def attends(self, library: Library) -> tuple[float, float]:
        """Shares of `peak` that this library's attention reaches."""
        return self.cudnn or self.attention if library == "cudnn" else self.attention


SWITCH = 25e-6
"""Latency of sums in NVLink's switches (NCCL's tuning model, "NVLS")."""


@dataclass(frozen=True)
class Link:
    """A device's link into one level of the network, in one direction.

    bandwidth: bytes/s of the data sheet. share: the part of it that large collectives reach. latency: seconds per hop.
    reduce: bytes/s ("bus bandwidth") of an all-reduce over a whole node if the switch reduces; None: as the others.
    mesh: every pair of devices has its own wire, so a group uses only the wires between its members.
    """

    bandwidth: float
    share: float
    latency: float
    reduce: float | None = None
    mesh: bool = False

    @property
    def achieved(self) -> float:
        """Bytes/s of a large collective."""
        return self.bandwidth * self.share

    def switch(self, ranks: int) -> Wire | None:
        """The links of a whole node of so many ranks to a switch that adds, if it does. Bus bandwidth is 2 (n-1)/n S by
        the seconds of an all-reduce."""
        if self.reduce is None or ranks == 1:
            return None
        return Wire(SWITCH, self.reduce * ranks / (2 * (ranks - 1)))

    @property
    def wire(self) -> Wire:
        """The link as collectives are simulated on it."""
        return Wire(self.latency, self.achieved)


@dataclass(frozen=True)
class Storage:
    """A link to another tier of memory. read, write: bytes/s alone; both: of reading and writing at once, together."""

    read: float
    write: float
    both: float

    def seconds(self, read: float, written: float) -> float:
        """Seconds to read and write so many bytes at the same time."""
        return max(read / self.read, written / self.write, (read + written) / self.both)

    def shared(self, ranks: float) -> Storage:
        return Storage(self.read / ranks, self.write / ranks, self.both / ranks)


def copies(rate: float) -> Storage:
    """What copies between a GPU and pinned memory reach on a link of so many bytes/s each way: 25 GB/s on PCIe 4.0."""
    reached = rate * 25 / 31.5
    return Storage(reached, reached, 2 * reached)


PINNED = copies(PCIE[4])
"""Of a device that is not in the table."""


@dataclass(frozen=True)
class Wiring:
    """What is between the devices of a node, and between nodes, besides `Cluster.intra` and `Cluster.inter`.

    cards: network cards per node, 0 for one per device. domain: devices that `intra` connects, 0 for a whole node.
    pcie: the link to the cards, and to devices beyond the domain; None: as `intra`. leaf: nodes on a leaf switch, 0 for
    all. oversubscription: what the cards below a leaf switch can send, by what its links to the spine carry. torus:
    sizes of a torus inside the node, in which `intra` is the link to one neighbour.
    """

    cards: int = 0
    domain: int = 0
    pcie: Link | None = None
    leaf: int = 0
    oversubscription: float = 1.0
    torus: tuple[int, ...] = ()


DISK = 2 * GB
"""Bytes/s of a local NVMe drive, sustained."""


@dataclass(frozen=True)
class Cluster:
    """`devices` equal devices, `per_node` on each node.

    0 devices means as many as a layout has ranks. intra, inter: a device's links within a node and between nodes.
    machine: the table of a measured machine, which each node is like, or on which `hosts` nodes are (namespaces,
    containers). storage: the disk of a node. host_link: between a device and host memory (PCIe). host_memory: bytes per
    node. host_bandwidth: bytes/s of it, by which the update on CPUs is bounded. price: of a device-hour; mtbf: seconds
    between failures of a device, on average; 0: not known. restart: seconds from a failure until it begins to read its
    last checkpoint, an assumption.
    """

    name: str
    device: Device
    devices: int
    per_node: int
    intra: Link
    inter: Link
    machine: Measured | None = None
    storage: Storage = Storage(DISK, DISK, DISK)
    wiring: Wiring = Wiring()
    hosts: int = 1
    host_link: Storage = PINNED
    host_memory: float = 1024 * GIB
    host_bandwidth: float = 300 * GB
    price: float = 0.0
    mtbf: float = 0.0
    restart: float = 600.0

    @property
    def on_cpu(self) -> bool:
        """True if the devices are the cores of a measured machine: device and host memory are the same."""
        return self.machine is not None and self.machine.on_cpu

    @property
    def connected(self) -> bool:
        """False for a machine alone."""
        return math.isfinite(self.inter.bandwidth)

    @property
    def on_machine(self) -> int:
        """Devices on one machine."""
        return min(self.devices, self.per_node * self.hosts)

    @property
    def nodes(self) -> int:
        return math.ceil(self.devices / self.per_node)

    @cached_property
    def lines(self) -> dict[tuple[str, int, int], tuple[Line, ...]]:
        """Prices of messages by collective and group (`communication.py`), kept here since the search asks often."""
        return {}

    @property
    def cards(self) -> int:
        """Network cards per node."""
        return self.wiring.cards or self.per_node

    @cached_property
    def rail(self) -> float:
        """Bytes/s that each device sends to other nodes if all do so at once."""
        beyond = bool(self.wiring.leaf) and self.nodes > self.wiring.leaf
        each = self.inter.achieved * self.cards / self.per_node
        return each / (self.wiring.oversubscription if beyond else 1)

    @property
    def oversubscription(self) -> float:
        """Ranks per core where there are more ranks than cores, otherwise 1."""
        return max(1.0, self.on_machine / self.machine.cores) if self.machine else 1.0

    @property
    def free(self) -> float:
        """Share of a message's time in which a device is free to compute."""
        return self.machine.free if self.machine else 1.0

    def for_ranks(self, ranks: int) -> Cluster:
        """The cluster with one device per rank. Local ranks share the machine."""
        if self.machine:
            return shared(self, ranks)
        return self if self.devices == ranks else replace(self, devices=ranks)


def of_table(table: Measured) -> Cluster:
    """The cluster that a table describes, before the number of ranks is known."""
    wire = Link(math.inf, 1.0, 0.0)  # unused, because the table prices messages
    return shared(Cluster("local", _device(table, 1), 0, 10**9, wire, wire, table), 1, 0)


@lru_cache(maxsize=64)
def shared(cluster: Cluster, ranks: int, devices: int | None = None) -> Cluster:
    """The cluster shared by `ranks` ranks. Each gets its share of its machine's cores and memory."""
    assert cluster.machine is not None
    table, count = cluster.machine, ranks if devices is None else devices
    storage = Storage(table.disk_read or table.disk, table.disk, table.disk_both or table.disk)
    sized = replace(cluster, storage=storage, devices=count)
    device = _device(table, min(ranks, cluster.per_node * cluster.hosts))
    return replace(sized, device=replace(device, margin=cluster.device.margin))


def _device(table: Measured, ranks: int) -> Device:
    on_each = max(1, ranks) if table.on_cpu else table.cores
    share = table.share(ranks)
    copied = min(rates["copy"][0] for rates in share.streams.values())
    return Device(
        name=f"local ({share.threads} core{'s' * (share.threads > 1)})" if table.on_cpu else "local",
        peak={dtype: table.fastest(dtype) / on_each for dtype in table.peak},
        matmul=1.0,
        units=1,
        memory=table.memory / on_each,
        bandwidth=copied * share.speed,
        streaming=1.0,
        reserve=RUNTIME,
        spread=table.spread,
        measured=share,
        margin=0.0 if table.on_cpu else MARGIN,
    )
