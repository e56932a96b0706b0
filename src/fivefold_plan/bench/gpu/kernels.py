"""The part `kernels`: the trainer's operations beside PyTorch's own and the roofline, at the shapes of a model.

The roofline (Williams et al., CACM 2009): FLOPs by the dense peak, or bytes by the memory's bandwidth, whichever takes
longer. Bytes: inputs are read in forward and in backward, and their gradients written; outputs are written, and their
gradients read. A trainer compiles blocks on GPUs, so element-wise operations are compiled here, on both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fivefold.host.devices import sheet_of
from fivefold.kernels import adamw, elementwise
from fivefold.kernels.blockwise_attention import qkv_attention
from fivefold.kernels.gpu import registry
from fivefold.kernels.matmul import linear, linear_cross_entropy
from fivefold.models.section import ModelSection, known
from fivefold.precision import torch_dtype
from fivefold.precision.formats import FORMATS
from fivefold.precision.fp8 import BLOCK
from fivefold.train.peak import device_peak
from fivefold_plan.bench.gpu.report import Row
from fivefold_plan.bench.hardware import timed

SLOWER, SHARE = 1.1, 0.8  # of PyTorch's own time; of the data sheet's bandwidth
FAR = {torch.float32: 1e-5, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}  # of two kernels' results
COPIED = 2**28  # bytes of the copy that shows the bandwidth
Call = Callable[..., Any]
Case = tuple[Call, Call, list[tuple[int, ...]], float]
"""(ours, PyTorch's own, shapes of the inputs, FLOPs of forward and backward)."""


def kernels(model: ModelSection, dtype: str, gpus: int) -> Iterator[Row]:
    """Milliseconds of forward and backward, for one sequence of a resolved model."""
    device = torch.device("cuda" if gpus else "cpu")
    sheet = sheet_of(torch.cuda.get_device_name()) if gpus else None
    target, source = (torch.empty(COPIED, dtype=torch.uint8, device=device) for _ in range(2))
    copied = 2 * COPIED / timed([partial(target.copy_, source)], device)
    peak, bandwidth = device_peak(device.type, dtype), sheet.bandwidth if sheet else copied
    slow = "memory is slower than its data sheet: look at ECC, clocks and other processes"
    listed = bandwidth / 1e9 if sheet else None
    yield Row("copy", copied / 1e9, "GB/s", listed, slow * (copied < SHARE * bandwidth))
    for what, (ours, own, shapes, flops) in cases(model, device).items():
        inputs = [torch.randn(size, device=device).to(torch_dtype(dtype)).requires_grad_() for size in shapes]
        roof = 1e3 * max(flops / peak, both(own, inputs) / bandwidth)
        mine, theirs = (1e3 * timed([partial(both, call, inputs)], device) for call in (ours, own))
        slower = f"{mine / theirs:.2f} times PyTorch's own; please report it" * (mine > SLOWER * theirs)
        yield Row(what, mine, "ms", roof, slower * (gpus > 0))
        yield Row(f"{what}: PyTorch's own", theirs, "ms", roof)
    if gpus:
        yield from one_pass(model, device)
    yield from in_triton(model, torch_dtype(dtype), device)


def one_pass(model: ModelSection, device: torch.device) -> Iterator[Row]:
    """Milliseconds of an update of one matrix, compiled in one pass, beside PyTorch's fused AdamW with passes of their
    own for the factor, the working weights and the largest."""
    p, g, m, v = torch.rand(4, 2 * known(model.ffn_dim) * model.dim, device=device)
    working, zero, one = p.bfloat16(), torch.zeros((), device=device), torch.ones((), device=device)
    factors = torch.stack([one, one, one, 1e-3 * one, one])

    def fused() -> None:
        torch._foreach_mul_([g], one)
        torch._fused_adamw_(
            [p], [g], [m], [v], [], [one], lr=1e-4, beta1=0.9, beta2=0.95, weight_decay=0.0, eps=1e-8, amsgrad=False,
            maximize=False, found_inf=zero,
        )  # fmt: skip
        working.copy_(p)
        torch._foreach_norm([p], torch.inf)

    ours = partial(adamw.update, p, g, m, v, working, zero.clone(), factors, 0.1, 0.05, 1e-8)
    mine, theirs = (1e3 * timed([call], device) for call in (ours, fused))
    yield Row("AdamW in one pass", mine, "ms", theirs, "please report it" * (mine > SLOWER * theirs))


def in_triton(model: ModelSection, dtype: torch.dtype, device: torch.device) -> Iterator[Row]:
    """Milliseconds of kernels in Triton beside what computes without them. Runs read the ratios."""
    from fivefold.kernels.gpu.language import runs

    if not runs(torch.empty(0, device=device)):
        yield Row("kernels in Triton", f"not measured: {registry.why_not()}")
        return
    for kernel, shape, calls in pairs(model, dtype, device):
        results = zip(*(call() for call in calls), strict=True)
        close = [(a.float() - b.float()).norm() <= FAR[dtype] * b.float().norm() for a, b in results]
        wrong = not all(close)  # or NaN
        mine, other = (1e3 * timed([call], device) for call in calls)
        case = registry.case(kernel, dtype)
        registry.record(case, shape, 0.0 if wrong else other / mine)
        said = "its results differ from PyTorch's own; please report it" * wrong
        yield Row(f"{case}, {shape}: in Triton, beside what computes without it", mine, "ms", other, said)


def pairs(
    model: ModelSection, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, str, tuple[Call, Call]]]:
    """(kernel, shape, calls with and without it), which return tuples of tensors."""
    from fivefold.kernels.gpu import combine, loss

    n, D, V = model.seq_len, model.dim, known(model.vocab_size)
    x, weight = (torch.randn(size, device=device).to(dtype).requires_grad_() for size in ((n, D), (V, D)))
    targets = torch.randint(V, (n,), device=device)

    def gradients(call: Call) -> tuple[Tensor, ...]:
        loss_ = call(x, weight, targets)
        return (loss_.detach(), *torch.autograd.grad(loss_, (x, weight)))

    mine, other = (partial(gradients, call) for call in (loss.linear_cross_entropy, linear_cross_entropy))
    yield registry.LOSS, f"{n} x {D} x {V}", (mine, other)
    in_a_block: Any = partial(torch.compile, dynamic=False) if device.type == "cuda" else lambda call: call
    y = x.detach()[:, : D - D % BLOCK][: n - n % BLOCK].contiguous()
    if dtype != torch.float16 and y.numel():  # scales of fp16 may overflow
        for name, calls in roundings(y, in_a_block):
            yield registry.ROUNDING, f"{len(y)} x {y.shape[1]} by {name}", calls
    places = torch.randperm(8 * n, device=device).view(n, 8)
    weights = torch.rand(n, 8, device=device).to(dtype)
    rows, order = x.detach().repeat(8, 1), places.t().flatten().argsort()

    def summed(add: Call, spread: Call) -> tuple[Tensor, ...]:
        return add(rows, places, weights, False), *spread(x.detach(), rows, weights, order)

    twins = in_a_block(elementwise.sum_rows), in_a_block(elementwise.spread)
    mine, other = (partial(summed, *way) for way in ((combine.sum_rows, combine.spread), twins))
    yield registry.COMBINE, f"8 x {n} x {D}", (mine, other)


def roundings(y: Tensor, in_a_block: Callable[[Call], Call]) -> Iterator[tuple[str, tuple[Call, Call]]]:
    """Of y, of y.T, and of both, by each tile. in_a_block: compiles a function as a block's."""
    from fivefold.kernels.gpu.rounding import encode
    from fivefold.kernels.rounded import encode_tiles

    def one_by_one(straight: tuple[Any, ...], turned: tuple[Any, ...]) -> tuple[Tensor, ...]:
        return *encode_tiles(*straight), *encode_tiles(*turned)

    plain, twice, form = in_a_block(encode_tiles), in_a_block(one_by_one), FORMATS["fp8 e4m3"]
    tiles = {"1 x 128": (1, BLOCK), "128 x 128": (BLOCK, BLOCK), "the whole tensor": tuple(y.shape)}
    for name, tile in tiles.items():
        straight = y, *tile, form
        turned = y.t(), *(tile[::-1] if tile == tuple(y.shape) else tile), form
        yield name, (partial(encode, *straight), partial(plain, *straight))
        yield f"{name}, turned", (partial(encode, *turned), partial(plain, *turned))
        yield f"{name}, both", (partial(encode, *straight, both=True), partial(twice, straight, turned))


def both(call: Call, inputs: Sequence[Tensor]) -> int:
    """Forward and backward; returns the bytes of the roofline."""
    out = call(*inputs)
    outputs = out if isinstance(out, tuple) else (out,)
    torch.autograd.grad(outputs, inputs, [torch.ones_like(one) for one in outputs])
    return sum(3 * one.nbytes for one in inputs) + sum(2 * one.nbytes for one in outputs)


def cases(model: ModelSection, device: torch.device) -> dict[str, Case]:
    """n tokens, D width, f feed-forward, H query and K key-value heads of d, V vocabulary."""
    n, D, f, V = model.seq_len, model.dim, known(model.ffn_dim), known(model.vocab_size)
    H, K, d = model.heads, known(model.kv_heads), model.head_width
    compiled: Callable[[Call], Call] = torch.compile if device.type == "cuda" else lambda call: call
    targets = torch.randint(V, (n,), device=device)

    def attended(qkv: Tensor) -> Tensor:
        q, k, v = qkv.unflatten(2, (H + 2 * K, d)).transpose(1, 2).split([H, K, K], dim=1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=K < H)

    def gated(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    return {
        "matmul to gate and up": (linear, F.linear, [(n, D), (2 * f, D)], 12.0 * n * f * D),
        "attention": (
            lambda qkv: qkv_attention(qkv, H, K, None, None, True), attended, [(1, n, (H + 2 * K) * d)],
            7.0 * H * n * n * d,
        ),
        "residual sum, RMSNorm": (
            compiled(lambda x, y, w: elementwise.add_norm(x, y, w, None, 1e-5)),
            compiled(lambda x, y, w: (total := x + y, F.rms_norm(total, (D,), w, 1e-5))),
            [(n, D), (n, D), (D,)], 0.0,
        ),
        "SwiGLU": (compiled(elementwise.swiglu), compiled(gated), [(n, 2 * f)], 0.0),
        "output layer, cross-entropy": (
            lambda x, w: linear_cross_entropy(x, w, targets),
            lambda x, w: F.cross_entropy(F.linear(x, w).float(), targets), [(n, D), (V, D)], 6.0 * n * V * D,
        ),
    }  # fmt: skip
