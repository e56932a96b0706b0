"""Collectives as operators of PyTorch's, so that compiled code does not end where a message is sent.

A collective is two operators: its start, which returns a ticket, and the wait for it. What stands between them in the
code overlaps with the message. The wait is given what was sent and what it should come after: so PyTorch's compiler
neither reuses the memory of a message under way, nor moves the overlapped work behind the wait.

An operator cannot take an `Axis`, so it takes the key of one that was registered in this process. Code that is not
compiled calls the axis itself. So do the operators: counting, time-outs and timelines see no difference.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.library import custom_op

from fivefold.comm import Axis, Started
from fivefold.sharding.units import Collective, What

Wait = Callable[..., Tensor]
"""Waits for a message that was started, and returns its result. Compiled code does so after it has computed the tensors
that it is given."""
axes: WeakValueDictionary[str, Axis] = WeakValueDictionary()
"""All axes by their keys, which operators take instead of the objects."""
MESSAGES = {f"fivefold::{name}" for name in ("start_sum", "await_sum", "start_message", "await_message")}
"""The operators below."""
_under_way: dict[int, Started] = {}
"""Messages that compiled code has started, by the number on their tickets."""
_numbers = count()


def start(axis: Axis, operation: What, x: Tensor, *after: Tensor) -> Wait:
    """Starts a collective of one tensor (contiguous), which may be overwritten. axis: registered in `axes`.
    after: tensors that the start reads. Backward sends again what forward has sent; without one of its own tensors here
    a compiler would send it once and keep the result, or take two such sends for one."""
    if not torch.compiler.is_compiling():
        started: Started = getattr(axis, f"start_{operation}")(x)
        return lambda *_: started()
    if operation != "all_reduce":
        ticket = start_message(x, [*after], operation, axis.key)
        return lambda *behind: await_message(ticket, [x, *behind], operation, axis.key)
    ticket = start_sum(x, axis.key)

    def wait(*behind: Tensor) -> Tensor:
        await_sum(x, ticket, [*behind])
        return x

    return wait


def run(axis: Axis, collective: Collective, x: Tensor, backward: bool = False) -> Tensor:
    """`Axis.run`, which compiled code may call, too."""
    if not torch.compiler.is_compiling():
        return axis.run(collective, x, backward=backward)
    operation = collective.backward if backward else collective.forward
    assert operation is not None, f"{collective}: nothing is sent back"
    return start(axis, operation, x)()


def _started(message: Started) -> Tensor:
    number = next(_numbers)
    _under_way[number] = message
    return torch.tensor(number)


@custom_op("fivefold::start_sum", mutates_args=("x",))
def start_sum(x: Tensor, axis: str) -> Tensor:
    """Starts the sum of every rank's x, in place."""
    return _started(axes[axis].start_all_reduce(x))


@custom_op("fivefold::await_sum", mutates_args=("x",))
def await_sum(x: Tensor, ticket: Tensor, behind: list[Tensor]) -> None:
    """Waits for the sum in x. A compiler may have made a copy of what `start_sum` sums."""
    total = _under_way.pop(int(ticket))()
    if x.data_ptr() != total.data_ptr():
        x.copy_(total)


@custom_op("fivefold::start_message", mutates_args=())
def start_message(x: Tensor, after: list[Tensor], operation: str, axis: str) -> Tensor:
    """Starts another collective of x."""
    return _started(getattr(axes[axis], f"start_{operation}")(x))


@custom_op("fivefold::await_message", mutates_args=())
def await_message(ticket: Tensor, behind: list[Tensor], operation: str, axis: str) -> Tensor:
    """Waits for its result. behind: what it sends, and what is computed before."""
    return _under_way.pop(int(ticket))()


@start_sum.register_fake
@start_message.register_fake
def _(x: Tensor, *_: Any) -> Tensor:
    return torch.empty((), dtype=torch.int64)


@await_sum.register_fake
def _(x: Tensor, ticket: Tensor, behind: list[Tensor]) -> None: ...


@await_message.register_fake
def _(ticket: Tensor, behind: list[Tensor], operation: str, axis: str) -> Tensor:
    x, n = behind[0], axes[axis].size
    rows = {"all_gather": n * x.shape[0], "reduce_scatter": x.shape[0] // n, "all_to_all": x.shape[0]}
    return x.new_empty(rows[operation], *x.shape[1:])
