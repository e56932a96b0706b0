"""Small programs on several streams, and what a trace must say of each. In a process that stands for a GPU:

    python stream_cases.py LIBRARY...

It answers one object of JSON: for each program the races that were found, or how it failed; and `heard`.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

if __name__ == "__main__":  # before PyTorch
    for library in sys.argv[1:]:
        ctypes.CDLL(library, ctypes.RTLD_GLOBAL)

import torch
import torch.distributed as dist
from torch import Tensor, cuda

from fivefold.comm.axis import ALONE, Axis
from fivefold.models.mixture import Assignment
from fivefold.parallel.expert import AllToAll
from fivefold.sharding.layout import Layout
from fivefold_plan.trace.fake import FakeMode
from fivefold_plan.trace.races import Races
from fivefold_plan.trace.step import DEVICE, Creating, Probe, a_gpu, one_of

STATE: Any = SimpleNamespace(
    mesh=SimpleNamespace(device=DEVICE, layout=Layout(), axis=lambda name: ALONE),
    parallel=SimpleNamespace(replicas=[], pipeline=None, disk=None, activations=None, offloads={}),
    masters=dict,
    outer=None,
)
"""Nothing is trained."""
CASES: dict[str, tuple[str, int, Callable[..., Any]]] = {}
"""By name: words of a race that must be found, the number of races; and the program. It gets a tensor and a stream, and
returns what must live until the end."""
OLDER: list[Tensor] = []
"""A pinned buffer that was there before the trace."""


@contextmanager
def watched(before: Callable[[], object] = lambda: None) -> Iterator[Races]:
    """before: runs on the GPU ahead of the trace."""
    fake = FakeMode()
    with a_gpu() as races, Creating(fake), fake:
        before()
        with Probe(STATE, fake, races):
            yield races


def case(expected: str = "", races: int = 1) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def keep(function: Callable[..., Any]) -> Callable[..., Any]:
        CASES[function.__name__] = expected, races if expected else 0, function
        return function

    return keep


def axis(name: str) -> Axis:
    """Two ranks, of which this is the first."""
    group = dist.new_group([0, 1])
    assert isinstance(group, dist.ProcessGroup)
    return Axis(name, (0, 1), 0, DEVICE, group, watched=False)


def on_host(size: int = 4, pinned: bool = True) -> Tensor:
    return torch.empty(size, pin_memory=pinned)


# What another stream has made


@case("aten::mul.Tensor on stream 1 of")
def read_without_a_wait(x: Tensor, side: cuda.Stream) -> Any:
    with cuda.stream(side):
        return x, x * 2


@case()
def read_behind_a_wait(x: Tensor, side: cuda.Stream) -> Any:
    side.wait_stream(cuda.current_stream())
    with cuda.stream(side):
        return x, x * 2


@case("reads float32 (4,), which aten::add_.Tensor on the default stream (autograd) writes")
def event_recorded_too_early(x: Tensor, side: cuda.Stream) -> Any:
    event = cuda.Event()
    event.record()
    x.add_(1)
    side.wait_event(event)
    with cuda.stream(side):
        return x, x * 2


@case("aten::mul.Tensor on stream 1")
def event_of_another_stream(x: Tensor, side: cuda.Stream) -> Any:
    event = cuda.Stream().record_event()
    side.wait_event(event)
    with cuda.stream(side):
        return x, x * 2


@case("aten::mul.Tensor on stream 1")
def event_that_was_never_recorded(x: Tensor, side: cuda.Stream) -> Any:
    side.wait_event(cuda.Event())
    with cuda.stream(side):
        return x, x * 2


@case()
def event_behind_the_write(x: Tensor, side: cuda.Stream) -> Any:
    x.add_(1)
    event = cuda.current_stream().record_event()
    with cuda.stream(side):
        event.wait()
        return x, x * 2


@case()
def wait_for_one_that_has_waited(x: Tensor, side: cuda.Stream) -> Any:
    between = cuda.Stream()
    between.wait_stream(cuda.default_stream())
    side.wait_stream(between)
    with cuda.stream(side):
        return x, x * 2


@case("writes float32 (4,), which aten::mul.Tensor on stream 1")
def write_while_another_reads(x: Tensor, side: cuda.Stream) -> Any:
    side.wait_stream(cuda.current_stream())
    with cuda.stream(side):
        y = x * 2
    return x.add_(1), y


@case()
def two_that_read(x: Tensor, side: cuda.Stream) -> Any:
    side.wait_stream(cuda.current_stream())
    with cuda.stream(side):
        y = x * 2
    return x * 3, y, x


@case("aten::zero_ on stream 1")
def write_into_fresh_memory(x: Tensor, side: cuda.Stream) -> Any:
    y = torch.empty(4, device=DEVICE)
    with cuda.stream(side):
        return y.zero_()


@case("writes float32 (4,), which aten::zero_ on the default stream")
def write_as_output(x: Tensor, side: cuda.Stream) -> Any:
    y = torch.ones(4, device=DEVICE)
    side.wait_stream(cuda.current_stream())
    x.zero_()
    with cuda.stream(side):
        return torch.mul(y, y, out=x), y


@case()
def a_view_reads_nothing(x: Tensor, side: cuda.Stream) -> Any:
    with cuda.stream(side):
        y = x.view(2, 2).t()
    return y * 2


@case()
def a_shape_is_not_read(x: Tensor, side: cuda.Stream) -> Any:
    with cuda.stream(side):
        y = x.new_zeros(4)
    return torch.ones_like(y), y


@case()
def another_part(x: Tensor, side: cuda.Stream) -> Any:
    with cuda.stream(side):
        y = torch.zeros(4, device=DEVICE)
        left = y[:2]
    cuda.current_stream().wait_stream(side)
    with cuda.stream(side):
        left.add_(1)
    return y[2:].add_(1), left


@case("aten::add_.Tensor on the default stream")
def a_part_in_common(x: Tensor, side: cuda.Stream) -> Any:
    with cuda.stream(side):
        y = torch.zeros(4, device=DEVICE)
        left = y[:3]
    cuda.current_stream().wait_stream(side)
    with cuda.stream(side):
        left.add_(1)
    return y[2:].add_(1), left


# What the allocator gives away


@case("memory of the default stream is freed")
def freed_while_another_reads(x: Tensor, side: cuda.Stream) -> Any:
    y = x * 2
    side.wait_stream(cuda.current_stream())
    with cuda.stream(side):
        return y + 1


@case()
def freed_with_record_stream(x: Tensor, side: cuda.Stream) -> Any:
    y = x * 2
    side.wait_stream(cuda.current_stream())
    with cuda.stream(side):
        y.record_stream(side)
        return y + 1


@case("memory of the default stream is freed")
def record_stream_of_another(x: Tensor, side: cuda.Stream) -> Any:
    y = x * 2
    y.record_stream(cuda.Stream())
    side.wait_stream(cuda.current_stream())
    with cuda.stream(side):
        return y + 1


@case()
def freed_behind_a_wait(x: Tensor, side: cuda.Stream) -> Any:
    y = x * 2
    side.wait_stream(cuda.current_stream())
    with cuda.stream(side):
        z = y + 1
    cuda.current_stream().wait_stream(side)
    return z


@case("memory of the default stream is freed")
def storage_freed_while_another_reads(x: Tensor, side: cuda.Stream) -> Any:
    y = x * 2
    side.wait_stream(cuda.current_stream())
    with cuda.stream(side):
        z = y + 1
    y.untyped_storage().resize_(0)
    return y, z


@case("on stream 1 of")
def storage_with_memory_of_another(x: Tensor, side: cuda.Stream) -> Any:
    y = x * 2
    side.wait_stream(cuda.current_stream())
    y.untyped_storage().resize_(0)
    y.untyped_storage().resize_(16)
    with cuda.stream(side):
        return y.zero_()


# Host memory


@case("aten::sum on the host")
def read_before_the_copy_arrives(x: Tensor, side: cuda.Stream) -> Any:
    return x.to("cpu", non_blocking=True).sum()


@case("aten::sum on the host")
def read_from_a_pinned_buffer(x: Tensor, side: cuda.Stream) -> Any:
    return on_host().copy_(x, non_blocking=True).sum()


@case()
def read_after_its_event(x: Tensor, side: cuda.Stream) -> Any:
    here, event = x.to("cpu", non_blocking=True), cuda.Event()
    event.record()
    event.synchronize()
    return here.sum()


@case("aten::sum on the host")
def read_after_an_earlier_event(x: Tensor, side: cuda.Stream) -> Any:
    event = cuda.current_stream().record_event()
    here = x.to("cpu", non_blocking=True)
    event.synchronize()
    return here.sum()


@case()
def read_after_its_stream(x: Tensor, side: cuda.Stream) -> Any:
    here = x.to("cpu", non_blocking=True)
    cuda.current_stream().synchronize()
    return here.sum()


@case("aten::sum on the host")
def read_after_another_stream(x: Tensor, side: cuda.Stream) -> Any:
    here = x.to("cpu", non_blocking=True)
    side.synchronize()
    return here.sum()


@case()
def read_after_the_device(x: Tensor, side: cuda.Stream) -> Any:
    here = x.to("cpu", non_blocking=True)
    cuda.synchronize()
    return here.sum()


@case()
def read_after_another_value(x: Tensor, side: cuda.Stream) -> Any:
    here = x.to("cpu", non_blocking=True)
    x.sum().item()
    return here.sum()


@case()
def read_a_copy_that_waits(x: Tensor, side: cuda.Stream) -> Any:
    return x.to("cpu").sum(), on_host().copy_(x).sum()


@case("writes float32 (4,), which aten::copy_")
def reuse_of_a_pinned_buffer(x: Tensor, side: cuda.Stream) -> Any:
    here = on_host()
    x.copy_(here, non_blocking=True)
    return here.zero_()


@case("aten::zero_ on the host")
def reuse_of_a_buffer_of_earlier_steps(x: Tensor, side: cuda.Stream) -> Any:
    here = OLDER[0]
    x.copy_(here, non_blocking=True)
    return here.zero_()


@case("writes float32 (4,), which aten::copy_")
def reuse_of_what_has_arrived(x: Tensor, side: cuda.Stream) -> Any:
    """PyTorch pins the result of a copy that does not wait."""
    here = x.to("cpu", non_blocking=True)
    cuda.synchronize()
    x.copy_(here, non_blocking=True)
    return here.zero_()


@case("aten::zero_ on the host")
def reuse_of_memory_that_was_pinned(x: Tensor, side: cuda.Stream) -> Any:
    here = on_host(pinned=False).pin_memory()
    x.copy_(here, non_blocking=True)
    return here.zero_()


@case()
def reuse_of_other_host_memory(x: Tensor, side: cuda.Stream) -> Any:
    here = on_host(pinned=False)
    x.copy_(here, non_blocking=True)
    return here.zero_()


@case()
def the_host_comes_first(x: Tensor, side: cuda.Stream) -> Any:
    here = on_host().zero_()
    with cuda.stream(side):
        return here.to(DEVICE, non_blocking=True), here


@case()
def queued_after_the_host_has_waited(x: Tensor, side: cuda.Stream) -> Any:
    cuda.synchronize()
    with cuda.stream(side):
        y = x * 2
    with cuda.stream(cuda.Stream()):  # made after that
        return x * 2, x, y


# Collectives


@case("on the default stream (autograd) reads float32 (4,), which c10d::allreduce_ on NCCL's stream of")
def sum_not_waited_for(x: Tensor, side: cuda.Stream) -> Any:
    started = axis("dp").start_all_reduce(x)
    return x * 2, started


@case()
def sum_waited_for(x: Tensor, side: cuda.Stream) -> Any:
    return axis("dp").all_reduce(x) * 2


@case("aten::mul.Tensor on the default stream", races=2)  # memory is freed, too
def sum_another_stream_waits_for(x: Tensor, side: cuda.Stream) -> Any:
    started = axis("dp").start_all_reduce(x)
    with cuda.stream(side):
        started()
    return x * 2


@case("c10d::allreduce_ on NCCL's stream")
def sum_started_on_another_stream(x: Tensor, side: cuda.Stream) -> Any:
    with cuda.stream(side):
        return axis("dp").all_reduce(x)


@case()
def sum_of_another_part(x: Tensor, side: cuda.Stream) -> Any:
    started = axis("dp").start_all_reduce(x[:2])
    x[2:].add_(1)
    return started(), x


@case()
def two_sums_of_one_group(x: Tensor, side: cuda.Stream) -> Any:
    dp = axis("dp")
    first, second = dp.start_all_reduce(x), dp.start_all_reduce(x)
    second()
    return x * 2, first


@case("c10d::allreduce_ on NCCL's stream")
def two_sums_of_two_groups(x: Tensor, side: cuda.Stream) -> Any:
    first, second = axis("dp").start_all_reduce(x), axis("tp").start_all_reduce(x)
    return first(), second()


@case("writes float32 (4,), which c10d::send on NCCL's stream")
def change_of_what_is_sent(x: Tensor, side: cuda.Stream) -> Any:
    started = axis("pp").start_send(x, 1)
    return x * 2, x.add_(1), started


@case("reads float32 (4,), which c10d::recv_ on NCCL's stream")
def read_before_it_is_received(x: Tensor, side: cuda.Stream) -> Any:
    started = axis("pp").start_receive(x, 1)
    return x * 2, started


@case("reads float32 (8,), which c10d::_allgather_base_")
def gathered_weights_not_waited_for(x: Tensor, side: cuda.Stream) -> Any:
    started = axis("shard").start_all_gather(x)
    return x * 2, started.result * 2, started


def begun_rows(x: Tensor, beside: cuda.Stream | None) -> Any:
    numbers, each = torch.arange(4, device=DEVICE), torch.full((1, 2), 2, device=DEVICE)
    sends = AllToAll(axis("ep"), beside=beside)
    sends.splits = lambda rows_2CG, rows: [[[2, 2]], [[2, 2]]]
    return (
        sends,
        *sends.begin(x[:, None], Assignment(numbers, numbers[:, None], each, each[0])),
        numbers,
        each,
    )


@case("aten::mul_.Tensor on the default stream")
def rows_leave_beside_what_is_queued_after_begin(x: Tensor, side: cuda.Stream) -> Any:
    """They wait for no shared expert: here it would change them."""
    sends, tokens, begun, *kept = begun_rows(x, side)
    kept += [tokens, begun.rows_MD.mul_(2)]
    sends.depart(begun)
    return begun.there[0].wait(), kept, begun


@case()
def rows_leave_at_once_without_a_stream(x: Tensor, side: cuda.Stream) -> Any:
    _, *kept = begun_rows(x, None)
    assert kept[1].rows_MD is None
    return kept[1].there[0].wait() * 2, kept


# Backward


@case()
def backward_runs_where_forward_did(x: Tensor, side: cuda.Stream) -> Any:
    w, seen = x.requires_grad_(), []
    side.wait_stream(cuda.current_stream())
    with cuda.stream(side):
        y = w * w
        y.register_hook(lambda _: seen.append(cuda.current_stream()))
        loss, one = y.sum(), torch.ones((), device=DEVICE)
    loss.backward(one)
    assert w.grad is not None
    assert seen == [side]
    assert cuda.current_stream() is cuda.default_stream()
    cuda.current_stream().wait_stream(side)
    return w.grad * 2, w, y, loss, one, seen


@case("which aten::add.Tensor on stream 1")
def gradients_of_another_stream(x: Tensor, side: cuda.Stream) -> Any:
    """The engine waits where its streams meet. The checker does not see that, and so finds one race too many."""
    w = x.requires_grad_()
    side.wait_stream(cuda.current_stream())
    with cuda.stream(side):
        y = w * w
        loss, one = y.sum(), torch.ones((), device=DEVICE)
    loss.backward(one)
    assert w.grad is not None
    return w.grad * 2, w, y, loss, one


def run(name: str) -> dict[str, int] | str:
    with watched(lambda: OLDER.append(on_host())) as races:
        kept = CASES[name][2](torch.zeros(4, device=DEVICE), cuda.Stream())
    OLDER.clear()
    del kept
    return dict(races.found)


def heard() -> list[str]:
    """The waits that a trace counts, one in the step and one behind it."""
    fake = FakeMode()
    with a_gpu() as races, Creating(fake), fake:
        with Probe(STATE, fake, races) as instrument:
            cuda.synchronize()
        cuda.current_stream().synchronize()
    return [name for name, _ in instrument.syncs]


def main() -> None:
    found: dict[str, Any] = {}
    with one_of(0, 2, DEVICE):
        for name in CASES:
            try:
                found[name] = run(name)
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}"
        found["heard"] = heard()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(
        0
    )  # as fivefold_plan/trace/gpu.py ends: autograd's thread for the device may still let go of tensors
