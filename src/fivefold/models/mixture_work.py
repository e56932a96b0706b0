"""The operations of a mixture of experts for one microbatch on a rank, for the cards. No torch. Legend: as in
work.py."""

from __future__ import annotations

from dataclasses import replace

from fivefold.models.operations import Matmul, Operation, Program, Role, Saved, Sizes, travel
from fivefold.models.section import expert_capacity
from fivefold.models.work import activation
from fivefold.sharding.units import COUNTS, loads


def _router(s: Sizes, k: float, program: Program) -> Operation:
    """The scores of all experts for each token, of which k are taken."""
    N, D, e, E = s.n, s.model.dim, s.e, s.model.experts or 1
    alone = program.compiles and not s.model.shared_experts  # then nothing keeps the input itself
    wide = N * D * (4 - e if alone else 4 * (e != 4))
    # all of a token, the k largest by weight, number and row; and the router's weight in fp32
    scores = (N * (4 * E + 30 * k) + 4 * E * D) * program.compiles
    kept = Saved("router input in fp32", wide, "normed"), Saved("scores", scores, "stream")
    moved = 8 * N * E * 4
    return Operation("router", Matmul(N, E, D, sensitive=True), 0.0, moved, moved, 8, saved=kept)


def mixture(s: Sizes, program: Program, gated: bool = False) -> list[Operation]:
    """The routed feed-forward: tokens go to their experts and come back. A rank sends the tokens that it has outside
    tensor-parallel regions. Tensor-parallel ranks with the same tokens have some features of every expert. The order is
    that of `models.mixture.Mixture`, and in backward its reverse. gated: the shared experts' result has a gate."""
    model, D, e, N = s.model, s.model.dim, s.e, s.n
    E, k, F = model.experts or 1, model.experts_per_token or 1, model.expert_ffn_dim or model.ffn_dim or 0
    summed = () if s.sp else s.sum()
    weights = (replace(summed[0], size=N * k * 4),) if summed else ()  # the gradient of the router's weights
    F /= 1 if s.sp else s.tp
    if program.compiles and model.capacity_factor:  # every expert has as many rows as it may
        k = E * expert_capacity(model.capacity_factor, N, k, E) / N
    routed, received, here = N * k, N * k * (s.load if s.ep > 1 else 1.0), E / s.ep
    order = 2 * received * D * e if s.ep > 1 else 0.0  # rows arrive by rank; they are put in order, and back
    experts = _swiglu("experts", received, F, s, program, here, s.chunks)
    shared = _swiglu("shared", N, model.shared_experts * F, s, program) if model.shared_experts else []
    role: Role = "fed" if program.joined else "stream"
    if gated and shared:
        size = N * D * e
        shared.append(Operation("shared gate", forward=3 * size, backward=5 * size, kernels=4,
                                saved=(Saved("ungated shared output", size, role),)))  # fmt: skip
    combine = Operation(
        "combine",
        forward=3 * routed * D * e + order,
        backward=3 * routed * D * e + order,
        kernels=4,
        saved=() if program.early_weights else (Saved("experts' output", routed * D * e, role),),
    )
    hides, crossing = tuple(shared) if program.rows_beside else (), 1.0
    if program.once_per_node and model.expert_groups > 1:
        crossing = min(k, model.groups_per_token) / k
    sent = s.rows_sent(crossing * max(routed, received))
    waits, combine = travel(*sent, hides, tuple(experts), s.chunks, combine)
    ops = [
        _router(s, k, program),
        Operation(
            "dispatch",
            forward=2 * routed * D * e + order,
            backward=2 * routed * D * e + order,
            kernels=4,
            sent_forward=s.sends(COUNTS, s.chunks * E)[0],
            sent_backward=(*summed, *weights),
            saved=(Saved("routed", received * D * s.kept(program.narrow_factors), "stream"),),
        ),
        *shared,
        *waits,
        *experts,
        combine,
    ]
    learns = (model.balance == "aux" and model.aux_loss_weight > 0) or model.z_loss_weight > 0
    sums = [Operation("experts' sum", kernels=0, sent_forward=summed)] if summed else []
    # The counts of each expert in a microbatch, over ranks that have parts of a sequence, for the balance term.
    each = model.balance_scope == "microbatch"
    total = tuple(m for load in loads(s.sp) for m in s.sends(load, E)[0] if each)
    sums += [Operation("balance", kernels=0, sent_forward=total)] if total else []
    # Only if the router's own loss terms have a gradient does recomputation get this far.
    return [*ops, *(replace(op, part="" if learns else "never") for op in sums)]


def _swiglu(
    name: str, rows: float, F: float, s: Sizes, program: Program, count: float = 1, chunks: int = 1
) -> list[Operation]:
    """A SwiGLU with F features on this rank, or `count` of them that share the rows. chunks: of the rows; each has a
    gradient of the weights, which is added to that of the others."""
    D, e = s.model.dim, s.e
    added = 3 * (chunks - 1) * count * D * F * e
    each, count, grouped = rows / count / chunks, count * chunks, name == "experts"
    return [
        Operation(
            f"{name} up",
            Matmul(each, 2 * F, D, count, grouped=grouped),
            backward=2 * added,
            saved=(Saved(f"{name} up", rows * 2 * F * s.kept(program.narrow_gates), "product"),),
        ),
        activation(
            f"{name} ",
            program,
            rows * F * e,
            2 * rows / chunks * F * e,
            part=s.kept(program.narrow_factors) / e,
        ),
        Operation(
            f"{name} down",
            Matmul(each, D, F, count, grouped=grouped),
            backward=added,
            part="gate" if program.joined and grouped else "",  # see "fed" in `Saved`
        ),
    ]
