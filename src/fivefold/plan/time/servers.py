"""Predicts training with parameter servers: a worker's step by the simulator of its messages, memory of both kinds."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from fivefold.errors import UserError
from fivefold.optim import update_traffic
from fivefold.plan.memory import memory
from fivefold.plan.memory.memory import Memory
from fivefold.plan.messages import communication
from fivefold.plan.setting import Setting
from fivefold.plan.time import rates, stage_costs, time
from fivefold.plan.time.cost import Cost
from fivefold.precision import DTYPES, MASTER
from fivefold.schedules.priority import Layer, Line, Simulation
from fivefold.sharding.sync import Servers, messages, units


@dataclass(frozen=True)
class Service:
    """What servers add to a setting, whose layout is that of all workers.

    worker: the setting of one worker. clips: gradients are clipped. pushed: bytes per gradient on its way."""

    servers: Servers
    worker: Setting
    workers: int
    clips: bool
    pushed: float

    @property
    def ranks(self) -> int:
        return self.workers + self.servers.count

    @property
    def crosses(self) -> bool:
        """True if workers and servers do not fit into one node."""
        return self.ranks > self.worker.cluster.per_node

    @property
    def elements(self) -> list[int]:
        """Elements of each unit."""
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
        return {
            "servers": round(max(sum(self.elements) * self.pushed, self.rows * self.workers * self.pulled))
        }


def service(whole: Setting, servers: Servers, grad_clip: float, reduce: str) -> Service:
    """whole: the setting of all workers.

    Raises:
        UserError: the cluster has another number of devices than workers and servers together.
    """
    workers = whole.layout.ranks
    alone = replace(whole.layout, dp_replicate=1)
    worker = replace(whole, layout=alone, cluster=whole.cluster.for_ranks(workers + servers.count))
    return Service(servers, worker, workers, grad_clip > 0, DTYPES[reduce].bytes)


def assert_fits(workers: int, servers: int, devices: int) -> None:
    """Raises UserError if a cluster has another number of devices."""
    if devices and workers + servers != devices:
        raise UserError(
            f"{workers} workers and sync.servers = {servers} are {workers + servers} ranks, but there are {devices}. "
            f"Nearest valid: dp={max(1, devices - servers)}"
        )


def line(s: Service) -> Line:
    """The line of one worker while all workers push and pull. A server updates while more arrives, so an update delays
    a part by its own time only; where it waits for the norm, by that of all its rows."""
    cluster = s.worker.cluster
    elements = min(s.servers.order.partition / DTYPES[MASTER].bytes, max(s.elements))
    size = elements * s.pushed
    latency, per_byte = communication.send_line(size, s.crosses, cluster)
    per_byte *= max(1.0, s.workers / s.servers.count)  # workers share the link of a server
    states = s.worker.states
    moved = update_traffic(states.gradient, DTYPES[MASTER].bytes, states.moments, s.pulled)
    moved += s.worker.software.check_traffic(cluster.on_cpu)
    moved += s.workers * s.pushed if s.servers.synchronous else s.pushed
    update = rates.stream(elements * moved, cluster.device, "optimizer", s.worker.dtype) / size
    if s.clips:
        update /= s.servers.count
    return Line(
        up=1 / per_byte, down=1 / per_byte, latency=latency, update=update,
        partition=size,
        together=s.clips, order=s.servers.order.name,
    )  # fmt: skip


def layers(s: Service) -> list[Layer]:
    """Seconds and bytes of each unit. Pulls end before the first microbatch's forward, pushes begin in the last one's
    backward; the microbatches between them count as the last layer's."""
    w, shared = s.worker, stage_costs.parts(s.worker)
    slower = rates.slowest(s.ranks, w.cluster.device.spread)
    found: list[Layer] = []
    costs = _by_unit(s, shared.begin, stage_costs.block_cost(w, 0, shared), shared.end)
    whole = sum((cost.seconds for cost in costs), 0.0) * slower
    for number, (cost, size) in enumerate(zip(costs, s.elements, strict=True)):
        slow = cost.slowed(slower)
        between = (w.microbatches - 1) * whole if number == len(costs) - 1 else 0.0
        forward, backward = slow.forward + between, slow.input + slow.weight
        found.append(Layer(forward, backward, size * s.pushed, size * s.pulled))
    return found


def _by_unit(s: Service, begin: Cost, block: Cost, end: Cost) -> list[Cost]:
    """The costs of the model's parts by the units whose weights they need."""
    found, begun = [], False
    for some in units(s.worker.card):
        if some[0].startswith("blocks."):
            found.append(block)
        elif some[0].startswith("embed") and not begun:
            found.append(begin)
            begun = True
        else:
            found.append(Cost())
    found[-1] += end
    return found


def simulation(s: Service) -> Simulation:
    """What a worker computes and exchanges in several steps, but for the fixed time of each (`time.fixed`)."""
    return Simulation(layers(s), line(s), iterations=8)


def step(s: Service) -> time.Step:
    """The time of a step: of as many shares as there are workers."""
    run = simulation(s)
    some = run.layers
    compute = sum(one.forward + one.backward for one in some) + time.fixed(s.worker)
    seconds = run.seconds + time.fixed(s.worker)
    bytes_up, bytes_down = (sum(getattr(one, name) for one in some) for name in ("pushed", "pulled"))
    terms = [
        ("a worker's forward and backward", compute),
        ("gradients on their way, if nothing ran beside them", bytes_up / line(s).up),
        ("weights on their way, if nothing ran beside them", bytes_down / line(s).down),
        ("a step, by the simulator", seconds),
    ]
    return time.Step(seconds, compute, {"servers": max(0.0, seconds - compute)}, 0.0, terms)


def held(s: Service) -> list[Memory]:
    """Memory of a worker and of a server."""
    w, total = s.worker, sum(s.elements)
    (one,) = memory.predict(w)
    several = s.servers.count > 1
    packed = total * ((s.pushed if several or s.pushed != DTYPES[MASTER].bytes else 0) + several * s.pulled)
    worker = replace(one, optimizer=0.0, buffers=one.buffers + packed)
    rows = s.rows
    fp32, moments = DTYPES[MASTER].bytes, w.states.moments
    copies = (s.pulled != fp32) if s.servers.synchronous else s.workers
    buffers = rows * (s.workers * s.pushed + copies * s.pulled)
    return [worker, Memory(0.0, rows * fp32, rows * (fp32 + moments), 0.0, buffers)]
