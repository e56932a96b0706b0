"""The part `kernels`: the trainer's operations beside PyTorch's own and the roofline, at the shapes of a model.

The roofline (Williams et al., CACM 2009): FLOPs by the dense peak, or bytes by the memory's bandwidth, whichever takes
longer. The bytes are the least that forward and backward move. A trainer compiles blocks on GPUs, so element-wise
operations are compiled here, on both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fivefold.bench.gpu.parts import Row, judged, recipe_of
from fivefold.bench.hardware import timed
from fivefold.bench.peak import device_peak
from fivefold.host.devices import sheet_of
from fivefold.kernels import elementwise
from fivefold.kernels.blockwise_attention import qkv_attention
from fivefold.kernels.matmul import linear, linear_cross_entropy
from fivefold.models.section import ModelSection, known
from fivefold.optim import OPTIMIZERS, update_traffic
from fivefold.optim.updater import Updater
from fivefold.plan.predict import resolved
from fivefold.precision import DTYPES, MASTER, torch_dtype

SLOWER, SHARE = 1.1, 0.8  # of PyTorch's own time; of the data sheet's bandwidth
COPIED = 2**28  # bytes of the copy that shows the bandwidth
Call = Callable[..., Any]
Case = tuple[Call, Call, list[tuple[int, ...]], float, float]
"""(ours, PyTorch's own, shapes of the inputs, FLOPs, bytes)."""


def kernels(gpus: int, name: str) -> Iterator[Row]:
    """name: a shape and a dtype. Milliseconds of forward and backward."""
    shape, dtype = name.split()
    device = torch.device("cuda" if gpus else "cpu")
    sheet = sheet_of(torch.cuda.get_device_name()) if gpus else None
    target, source = (torch.empty(COPIED, dtype=torch.uint8, device=device) for _ in range(2))
    copied = 2 * COPIED / timed([partial(target.copy_, source)], device)
    listed = sheet.bandwidth if sheet else None
    slow = "memory is slower than its data sheet: look at ECC, clocks and other processes"
    yield judged("copy", copied / 1e9, "GB/s", listed and listed / 1e9, copied >= SHARE * (listed or 0), slow)
    peak, bandwidth = device_peak(device.type, dtype), listed or copied
    model = resolved(recipe_of(shape, "dp=1", gpus)).model
    for what, (ours, own, shapes, flops, moved) in cases(model, dtype, device).items():
        inputs = [torch.randn(size, device=device).to(torch_dtype(dtype)).requires_grad_() for size in shapes]
        mine, torchs = (timed([partial(_both, call, inputs)], device) for call in (ours, own))
        roof = max(flops / peak, moved / bandwidth)
        advice = f"{mine / torchs:.2f} times PyTorch's own; please report it"
        good = mine <= SLOWER * torchs if gpus else None
        yield judged(what, 1e3 * mine, "ms", 1e3 * roof, good, advice)
        yield Row(f"{what}: PyTorch's own", 1e3 * torchs, "ms", 1e3 * roof)


def _both(call: Call, inputs: Sequence[Tensor]) -> None:
    """Forward and backward; an update has no inputs."""
    out = call(*inputs)
    outputs = out if isinstance(out, tuple) else (out,)
    if inputs:
        torch.autograd.grad(outputs, inputs, [torch.ones_like(one) for one in outputs])


def cases(model: ModelSection, dtype: str, device: torch.device) -> dict[str, Case]:
    """A resolved model's operations on one sequence; the update is one of a block's matrices.

    n tokens, D width, f feed-forward, H query and K key-value heads of d, V vocabulary, e bytes per element.
    """
    n, D, f, V = model.seq_len, model.dim, known(model.ffn_dim), known(model.vocab_size)
    e = DTYPES[dtype].bytes
    H, K, d = model.heads, known(model.kv_heads), model.head_width
    compiled: Callable[[Call], Call] = torch.compile if device.type == "cuda" else lambda call: call
    targets = torch.randint(V, (n,), device=device)

    def product(out: int, features: int) -> Case:
        moved = 3 * e * (n * features + out * features + n * out)
        return linear, F.linear, [(n, features), (out, features)], 6.0 * n * out * features, moved

    def attended(qkv: Tensor) -> Tensor:
        q, k, v = qkv.unflatten(2, (H + 2 * K, d)).transpose(1, 2).split([H, K, K], dim=1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=K < H)

    def gated(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    card = OPTIMIZERS["adamw"]
    weight, gradient = (torch.randn(f, D, device=device) for _ in range(2))
    updater = Updater(card, {"w": weight}, 1e-3, 0.1, card.fields)
    copy = weight.clone().requires_grad_()
    copy.grad, own = gradient, torch.optim.AdamW([copy], 1e-3, fused=True)
    updated = f * D * update_traffic(DTYPES[MASTER].bytes, DTYPES[MASTER].bytes, card.bytes, 0)
    return {
        "matmul to queries, keys, values": product((H + 2 * K) * d, D),
        "matmul to gate and up": product(2 * f, D),
        "matmul down": product(D, f),
        "attention": (
            lambda qkv: qkv_attention(qkv, H, K, None, None, True), attended, [(1, n, (H + 2 * K) * d)],
            7.0 * H * n * n * d, 6.0 * e * n * (H + K) * d,
        ),
        "residual sum, RMSNorm": (
            compiled(lambda x, y, w: elementwise.add_norm(x, y, w, None, 1e-5)),
            compiled(lambda x, y, w: (total := x + y, F.rms_norm(total, (D,), w, 1e-5))),
            [(n, D), (n, D), (D,)], 0.0, 11.0 * e * n * D,
        ),
        "SwiGLU": (compiled(elementwise.swiglu), compiled(gated), [(n, 2 * f)], 0.0, 8.0 * e * n * f),
        "output layer, cross-entropy": (
            lambda x, w: linear_cross_entropy(x, w, targets),
            lambda x, w: F.cross_entropy(F.linear(x, w).float(), targets),
            [(n, D), (V, D)], 6.0 * n * V * D, 3.0 * e * (n + V) * D,
        ),
        "AdamW": (partial(updater.step, {"w": gradient}, 1e-3), own.step, [], 0.0, updated),
    }  # fmt: skip
