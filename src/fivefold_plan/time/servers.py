"""Predicts training with parameter servers: a worker's step by the simulator of its messages, memory of both kinds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from fivefold.optim import update_traffic
from fivefold.precision import DTYPES, MASTER
from fivefold.schedules.compression import NONE
from fivefold.schedules.priority import PRIORITY, SUM_ORDERS, Layer, Line, Simulation, Sums
from fivefold.sharding.layout import summing_groups
from fivefold.sharding.parts import local_parameters
from fivefold.sharding.sync import Servers, messages, units
from fivefold_plan.memory import memory
from fivefold_plan.memory.memory import Memory
from fivefold_plan.messages import communication
from fivefold_plan.setting import Setting
from fivefold_plan.time import stage_costs, time
from fivefold_plan.time.cost import Cost, slowest, stream


@dataclass(frozen=True)
class Service:
    """What servers add to a setting, whose layout is that of all workers.

    worker: the setting of one worker. pushed: bytes per gradient on its way."""

    servers: Servers
    worker: Setting
    workers: int
    pushed: float

    @property
    def ranks(self) -> int:
        return self.workers + self.servers.count

    @property
    def elements(self) -> list[int]:
        card = self.worker.card
        return [sum(math.prod(card.parameters[name]) for name in names) for names in units(card)]

    @property
    def pulled(self) -> float:
        """Bytes per weight on its way."""
        return DTYPES[self.worker.dtype].bytes

    @property
    def rows(self) -> int:
        """Elements of the server that has most."""
        found = [0] * self.servers.count
        for message in messages(self.worker.card, self.servers):
            found[message.server] += message.size
        return max(found)

    def sent(self) -> dict[str, int]:
        """Bytes per step that leave the rank that sends most: a worker that pushes, or the server that all pull
        from."""
        most = max(sum(self.elements) * self.pushed, self.rows * self.workers * self.pulled)
        return {"servers": round(most)}


def service(whole: Setting, servers: Servers, reduce: str) -> Service:
    """whole: the setting of all workers."""
    workers = whole.layout.ranks
    alone = replace(whole.layout, dp_replicate=1)
    worker = replace(whole, layout=alone, cluster=whole.cluster.for_ranks(workers + servers.count))
    return Service(servers, worker, workers, DTYPES[reduce].bytes)


def line(s: Service) -> Line:
    """The line of one worker while all workers push and pull. A server updates while more arrives, so an update delays
    a part by its own time only; where it waits for the norm, by that of all its rows."""
    cluster = s.worker.cluster
    elements = min(s.servers.order.partition / DTYPES[MASTER].bytes, max(s.elements))
    size = elements * s.pushed
    crosses = s.ranks > cluster.per_node  # workers and servers do not fit into one node
    latency, per_byte = communication.send_line(size, crosses, cluster)
    per_byte *= max(1.0, s.workers / s.servers.count)  # workers share the link of a server
    states = s.worker.states
    moved = update_traffic(states.gradient, DTYPES[MASTER].bytes, states.moments, s.pulled)
    moved += s.worker.software.check_traffic(cluster.on_cpu)
    moved += s.workers * s.pushed if s.servers.synchronous else s.pushed
    update = stream(elements * moved, cluster.device, "optimizer", s.worker.dtype) / size
    if s.servers.judging:
        update /= s.servers.count
    return Line(
        up=1 / per_byte, down=1 / per_byte, latency=latency, update=update,
        partition=size,
        together=s.servers.judging, order=s.servers.order.name,
    )  # fmt: skip


def simulation(s: Service) -> Simulation:
    """What a worker computes and exchanges in several steps, but for the fixed time of each (`time.fixed`): seconds and
    bytes of each unit. Pulls end before the first microbatch's forward, pushes begin in the last one's backward; the
    microbatches between them count as the last layer's."""
    sizes = [(size * s.pushed, size * s.pulled) for size in s.elements]
    return Simulation(layers(s.worker, sizes, s.ranks), line(s), iterations=8)


def sums(s: Setting) -> dict[str, Sums]:
    """What a rank of replicas computes and sums in several steps, without updates, by the order of the sums. Empty in
    other layouts, and where all ranks share one machine's cores."""
    axes = summing_groups(s.layout)
    if len(axes) != 1 or s.layout.zero or s.layout.pp > 1 or s.layout.compress != NONE or s.cluster.on_cpu:
        return {}
    among, local = s.group(axes[0]), local_parameters(s.card, s.layout)
    sizes = [(sum(local[n].size for n in names) * s.states.reduce, 0.0) for names in units(s.card)]
    costs = layers(s, sizes, s.layout.ranks)

    def simulated(order: str, partition: float) -> Sums:
        takes = partial(communication.sum_gradients, group=among, cluster=s.cluster, by=s.layout.all_reduce)
        return Sums(costs, Line(1.0, 1.0, partition=partition, order=order), takes=takes)

    found = {order: simulated(order, math.inf) for order in SUM_ORDERS}
    cut = (simulated(PRIORITY, part * 2**20) for part in PARTS_MIB)
    return found | {PRIORITY: min((found[PRIORITY], *cut), key=lambda run: run.seconds)}


PARTS_MIB = (2, 8, 32)
"""Sizes of parts that are tried for sums by priority: small ones are overtaken sooner, and cost more."""


def layers(w: Setting, sizes: Sequence[tuple[float, float]], ranks: int) -> list[Layer]:
    """The units of a model. sizes: bytes of gradients and of weights of each. ranks: the slowest of so many counts."""
    shared, slower = stage_costs.parts(w), slowest(ranks, w.cluster.device.spread)
    block, begins = stage_costs.block_cost(w, 0, shared), shared.begin
    costs, found = list[Cost](), list[Layer]()
    for names in units(w.card):
        if names[0].startswith("blocks."):
            costs.append(block)
        elif names[0].startswith("embed"):  # of several parts of an embedding, the first one counts
            costs.append(begins)
            begins = Cost()
        else:
            costs.append(Cost())
    costs[-1] += shared.end
    whole = sum((cost.seconds for cost in costs), 0.0) * slower
    for number, (cost, size) in enumerate(zip(costs, sizes, strict=True)):
        slow = cost.slowed(slower)
        between = (w.microbatches - 1) * whole if number == len(costs) - 1 else 0.0
        forward, backward = slow.forward + between, slow.input + slow.weight
        found.append(Layer(forward, backward, *size))
    return found


def step(s: Service) -> time.Step:
    """The time of a step: of as many shares as there are workers."""
    run = simulation(s)
    compute = sum(layer.forward + layer.backward for layer in run.layers) + time.fixed(s.worker)
    seconds = run.seconds + time.fixed(s.worker)
    pushed, pulled = (sum(getattr(layer, name) for layer in run.layers) for name in ("pushed", "pulled"))
    terms = [
        ("a worker's forward and backward", compute),
        ("gradients on their way, if nothing ran beside them", pushed / run.line.up),
        ("weights on their way, if nothing ran beside them", pulled / run.line.down),
        ("a step, by the simulator", seconds),
    ]
    return time.Step(seconds, compute, {"servers": max(0.0, seconds - compute)}, 0.0, terms)


def held(s: Service) -> list[Memory]:
    """Memory of a worker and of a server."""
    w, total, rows, fp32 = s.worker, sum(s.elements), s.rows, DTYPES[MASTER].bytes
    (states,) = memory.predict(w)
    several = s.servers.count > 1
    packed = total * ((s.pushed if several or s.pushed != fp32 else 0) + several * s.pulled)
    worker = replace(states, optimizer=0.0, buffers=states.buffers + packed)
    copies = (s.pulled != fp32) if s.servers.synchronous else s.workers
    buffers = rows * (s.workers * s.pushed + copies * s.pulled)
    return [worker, Memory(0.0, rows * fp32, rows * (fp32 + w.states.moments), 0.0, buffers)]
