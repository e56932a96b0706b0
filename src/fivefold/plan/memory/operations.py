"""The tensors that operations keep for backward on a rank, and the operations that it recomputes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fivefold.models.operations import Operation, Role, Work
from fivefold.models.recomputation import region
from fivefold.plan.setting import Software

ByRole = dict[Role, float]
"""Bytes of saved tensors by their role."""


@dataclass(frozen=True)
class Sums:
    """Sums over a microbatch's operations. The memory of every recomputation mode follows from them.

    block: saved bytes by role, of a block without experts (False) and with (True). begin, end: the same before and
    behind the blocks. owed: see `owed`. parts: the last block's backward, cut at the matmuls of its sublayers: saved
    bytes, those of them that exist at once if attention's core is recomputed, largest workspace. loss: workspace of the
    loss.
    """

    block: dict[bool, ByRole]
    begin: ByRole
    end: ByRole
    owed: dict[bool, float]
    parts: list[tuple[ByRole, ByRole, float]]
    loss: float


def sums(work: Work, e: float, mixed: bool, narrow: float = 0.0) -> Sums:
    """mixed: True if the last block has experts. e: bytes per element. narrow: of rounded factors."""
    parts: list[list[Operation]] = [[]]
    for op in work.block[mixed]:
        if any(saved.role in ("product", "copied") for saved in op.saved):
            parts.append([])
        parts[-1].append(op)
    return Sums(
        {kind: saved(block) for kind, block in work.block.items()},
        saved(work.begin),
        saved(work.end),
        {kind: owed(block, e) for kind, block in work.block.items()},
        [
            (saved(part), saved(part, True), max(_workspace(op, narrow) for op in part))
            for part in parts
            if part
        ],
        max(op.workspace for op in work.end),
    )


def _workspace(op: Operation, narrow: float) -> float:
    """Bytes that its backward holds besides saved tensors. The rounded factors of one matmul exist at once."""
    return op.workspace + narrow * max(op.matmul.rounded) if op.matmul and narrow else op.workspace


def saved(operations: Iterable[Operation], once: bool = False) -> ByRole:
    """Bytes of the saved tensors of each role. once: those that exist at once if they are recomputed."""
    found: ByRole = {}
    for op in operations:
        for tensor in op.saved:
            size = tensor.size if tensor.once is None or not once else tensor.once
            found[tensor.role] = found.get(tensor.role, 0.0) + size
    return found


def kept(operations: Iterable[Operation] | ByRole, recompute: str, software: Software) -> float:
    """Bytes kept from forward to backward, from operations or from their sums by role."""
    found: ByRole = operations if isinstance(operations, dict) else saved(operations)  # pyright: ignore[reportAssignmentType]
    return _of(found, region(recompute, software).keeps)


def owed(operations: Iterable[Operation], e: float) -> float:
    """Bytes kept for deferred weight gradients: the input of each matmul with weights, and the gradient of its
    output."""
    products = (op.matmul for op in operations if op.matmul and op.matmul.weight)
    return sum(m.count * m.m * (m.k + m.n) * e for m in products)


def largest_backward(found: Sums, recompute: str, software: Software) -> tuple[float, float]:
    """(recomputed bytes, workspace) at the moment when their sum is largest. Full recomputation repeats the whole
    block, the other modes one part at a time."""
    used = region(recompute, software)
    again = region("none").keeps - used.keeps
    workspace = max(workspace for *_, workspace in found.parts)
    if not again:
        return 0.0, workspace
    made = [(_of(once if used.core else sizes, again), most) for sizes, once, most in found.parts]
    return (sum(size for size, _ in made), workspace) if recompute == "full" else max(made, key=sum)


def flops(op: Operation) -> float:
    """FLOPs of an operation in forward."""
    m = op.matmul
    return op.attention + (2 * m.count * m.m * m.n * m.k if m else 0.0)


def _of(sizes: ByRole, roles: frozenset[Role]) -> float:
    return sum(size for role, size in sizes.items() if role in roles)
