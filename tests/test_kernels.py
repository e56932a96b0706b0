"""Fused kernels against plain PyTorch in fp64: values and gradients, in fp32, bf16 and fp16, native and fallback."""

import itertools
from functools import cache, partial

import pytest
import torch
import torch.nn.functional as F
from marks import slow

from fivefold.host.machine import has_cpu_bf16
from fivefold.kernels import cross_entropy, elementwise, matmul, native, partial_attention, sizes
from fivefold.kernels.blockwise_attention import qkv_attention
from fivefold.kernels.matmul import linear_cross_entropy, widened
from fivefold.models.mixture import grouped_linear
from fivefold_plan.trace.memory import Tracker

# bf16 keeps 8 bits: an operation rounds by up to 2^-9, and the longest chain here (PyTorch's own attention with
# grouped queries: scores, probabilities, their gradients, a sum over heads) rounds about ten times.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 10 * 2**-9, torch.float16: 10 * 2**-12}


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(params=["native", "plain"])
def path(request, monkeypatch):
    """Runs a test on the native kernels and on PyTorch's own operations."""
    if request.param == "plain":
        monkeypatch.setattr(native, "usable", lambda *tensors: False)
    elif native.why_not():
        pytest.skip(f"native kernels: {native.why_not()}")
    return request.param


def close(got, wanted, dtype):
    """Relative to the largest element: bf16 results are rounded elementwise."""
    assert got.shape == wanted.shape
    error = (got.double() - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30)
    assert error < TOLERANCE[dtype], f"relative error {error:.2e}"


def check(fused, plain, inputs, dtype):
    """fused(*inputs) and its gradients against plain in fp64, from the same rounded inputs."""
    low = [x.to(dtype).requires_grad_() for x in inputs]
    high = [x.detach().double().requires_grad_() for x in low]
    got, wanted = fused(*low), plain(*high)
    got = got if isinstance(got, tuple) else (got,)
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    weights = [torch.randn(w.shape, dtype=torch.float64) for w in wanted]
    sum((g.double() * w).sum() for g, w in zip(got, weights, strict=True)).backward()
    sum((v * w).sum() for v, w in zip(wanted, weights, strict=True)).backward()
    for g, w in zip(got, wanted, strict=True):
        assert g.dtype == dtype
        close(g, w, dtype)
    for a, b in zip(low, high, strict=True):
        close(a.grad, b.grad, dtype)


def plain_rms_norm(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(3, 5, 64), (1, 7), (40, 531)])
def test_rms_norm(path, dtype, shape):
    x, weight = torch.randn(shape), torch.randn(shape[-1])
    check(lambda x, w: elementwise.norm(x, w, None, 1e-5), plain_rms_norm, [x, weight], dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_add_rms_norm(path, dtype):
    x, residual, weight = torch.randn(4, 9, 96), torch.randn(4, 9, 96), torch.randn(96)
    check(
        lambda x, r, w: elementwise.add_norm(x, r, w, None, 1e-5),
        lambda x, r, w: (x + r, plain_rms_norm(x + r, w)),
        [x, residual, weight],
        dtype,
    )


def test_sum_and_norm_when_only_one_output_is_used(path):
    for used in (0, 1):
        for vectors in (1, 2):
            x, residual, weight = (torch.randn(3, 8, requires_grad=True) for _ in range(3))
            bias = weight[1] if vectors == 2 else None
            elementwise.add_norm(x, residual, weight[0], bias, 1e-5)[used].square().sum().backward()
            assert x.grad is not None
            assert torch.equal(x.grad, residual.grad)


def plain_layer_norm(x, weight, bias):
    return F.layer_norm(x, x.shape[-1:], weight, bias, 1e-5)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(3, 5, 64), (1, 7), (40, 531)])
def test_layer_norm(path, dtype, shape):
    x, weight, bias = 3 + torch.randn(shape), torch.randn(shape[-1]), torch.randn(shape[-1])
    if (
        path == "plain" and dtype != torch.float32
    ):  # PyTorch keeps the mean in 16 bits, and adds up rows in 16 bits
        x = x[:9] - 3
    check(lambda x, w, b: elementwise.norm(x, w, b, 1e-5), plain_layer_norm, [x, weight, bias], dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_add_layer_norm(path, dtype):
    x, residual, weight, bias = torch.randn(4, 9, 96), torch.randn(4, 9, 96), torch.randn(96), torch.randn(96)
    check(
        lambda x, r, w, b: elementwise.add_norm(x, r, w, b, 1e-5),
        lambda x, r, w, b: (x + r, plain_layer_norm(x + r, w, b)),
        [x, residual, weight, bias],
        dtype,
    )


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("approximate", ["tanh", "none"])
def test_gelu(path, dtype, approximate):
    """Within 1.5e-7 of the exact one: erf's polynomial."""
    x = torch.cat([torch.linspace(-12, 12, 4001), torch.tensor([-1e4, 1e4, -0.0])])
    check(
        lambda x: elementwise.gelu(x, approximate),
        lambda x: F.gelu(x, approximate=approximate),
        [x[:-3]],
        dtype,
    )
    far = elementwise.gelu(x[-3:].to(dtype), approximate)
    assert far[1] == x[-2].to(dtype)
    assert far[::2].abs().max().double() < 1e-30


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_swiglu(path, dtype):
    def plain(gate_up):
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up

    x = torch.randn(2, 5, 2 * 531) * 4
    x[0, 0, :4] = torch.tensor([-100.0, 100.0, -30.0, 0.0])
    check(elementwise.swiglu, plain, [x], dtype)


def plain_attention(qkv, heads, kv_heads, cos, sin, causal):
    B, T, width = qkv.shape
    q, k, v = qkv.view(B, T, -1, width // (heads + 2 * kv_heads)).split([heads, kv_heads, kv_heads], 2)
    if cos is not None:
        q, k = (
            torch.cat((x[..., :h] * c - x[..., h:] * s, x[..., h:] * c + x[..., :h] * s), -1)
            for x, h, c, s in (
                (x, x.shape[-1] // 2, cos[:, None].double(), sin[:, None].double()) for x in (q, k)
            )
        )
    k, v = (x.repeat_interleave(heads // kv_heads, 2) for x in (k, v))
    scores = torch.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
    if causal:
        scores = scores.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), float("-inf"))
    return torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v).reshape(B, T, -1)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("rotary", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("T", [1, 37, *slow(128), 300])
def test_qkv_attention(path, dtype, causal, rotary, heads, kv_heads, T):
    d = 16
    angles = torch.outer(torch.arange(T).float(), 100.0 ** -(torch.arange(d // 2) / (d // 2)))
    cos, sin = (angles.cos(), angles.sin()) if rotary else (None, None)
    check(
        lambda x: qkv_attention(x, heads, kv_heads, cos, sin, causal),
        lambda x: plain_attention(x, heads, kv_heads, cos, sin, causal),
        [torch.randn(2, T, (heads + 2 * kv_heads) * d)],
        dtype,
    )


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_softmax_of_long_rows(dtype):
    """Rows that do not stay in fp32 between their two passes, and keys that begin and end anywhere."""
    if native.why_not():
        pytest.skip(f"native kernels: {native.why_not()}")
    K = 2 * 2048 + 21
    bounds = torch.tensor([[0, K], [5, 41], [7, K - 3], [9, 9]], dtype=torch.int32)
    scores = (4 * torch.randn(4, K)).to(dtype)
    got, lse, columns = scores.clone(), torch.empty(4), torch.arange(K)
    native.call("softmax_forward", dtype, got, lse, 1, 4, K, 0, 0, 0.3, bounds, 1)
    seen = (columns >= bounds[:, :1]) & (columns < bounds[:, 1:])
    exponents = (0.3 * scores.double()).masked_fill(~seen, -torch.inf)
    for row in range(3):
        close(got[row], exponents[row].softmax(0), dtype)
    assert not got[~seen].any()
    assert lse.tolist() == pytest.approx(exponents.logsumexp(1).tolist(), rel=1e-6)


def test_long_attention_computes_probabilities_again(path, monkeypatch):
    """Beyond KEEP nothing of size T x T is kept for backward, and nothing changes."""
    x = torch.randn(1, 640, 3 * 2 * 16)

    def run():
        leaf = x.clone().requires_grad_()
        qkv_attention(leaf, 2, 2, None, None, True).square().sum().backward()
        return leaf.grad

    kept = run()
    monkeypatch.setattr(sizes, "KEEP", 256)
    assert torch.equal(kept, run())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("chunk_bytes", [1, 1 << 30])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("z_loss", [0.0, 0.05])
def test_linear_cross_entropy(path, dtype, chunk_bytes, with_bias, z_loss, monkeypatch):
    monkeypatch.setitem(sizes.LOGITS_BYTES, "cpu", chunk_bytes)
    monkeypatch.setattr(sizes, "MIN_ROWS", 7)
    monkeypatch.setattr(sizes, "SUM_SIZE", 0)
    N, D, V = 33, 24, 50
    targets = torch.randint(V, (N, 2))[:, 0]  # a column of a batch
    targets[::5] = -100
    bias = [torch.randn(V)] if with_bias else []

    def plain(x, weight, *bias):
        logits = x @ weight.t() + (bias[0] if bias else 0)
        return F.cross_entropy(logits, targets) + z_loss * logits.logsumexp(1)[targets >= 0].square().mean()

    low = [t.to(dtype).requires_grad_() for t in (torch.randn(N, D), torch.randn(V, D), *bias)]
    high = [t.detach().double().requires_grad_() for t in low]
    got = linear_cross_entropy(low[0], low[1], targets, low[2] if bias else None, z_loss)
    wanted = plain(*high)
    assert got.dtype == torch.float32
    close(got, wanted, dtype)
    (3 * got).backward()
    (3 * wanted).backward()
    for a, b in zip(low, high, strict=True):
        close(a.grad, b.grad, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("chunks", [1, 4])
def test_the_loss_holds_what_is_counted(path, dtype, chunks, monkeypatch):
    """A chunk of logits, fp32 tensors of a part of it if there is no fused kernel, and what is given or returned."""
    rows, D, V, e = sizes.MIN_ROWS, 8, 2048, dtype.itemsize
    monkeypatch.setitem(sizes.LOGITS_BYTES, "cpu", rows * V * e)
    monkeypatch.setattr(sizes, "FP32_BYTES", 64 * V * 4)
    x, weight = (torch.randn(n, D, dtype=dtype, requires_grad=True) for n in (chunks * rows, V))
    with Tracker() as tracker:
        linear_cross_entropy(x, weight, torch.arange(chunks * rows))
    wide = widened(x)  # the product is rounded, its gradient converted
    copies = 1 if e == 4 else 2  # and exponentials; in fp32 the logits need no copy
    plain = 4 * copies * 64 * V if path == "plain" else 0  # 64 rows at once
    logits = rows * V * e + max(plain, 4 * rows * V * wide)
    around = (2 * x.numel() + 2 * weight.numel()) * e + weight.numel() * (4 if chunks > 1 else 0)
    around += len(x) * (8 + 4)  # targets and losses
    around += 4 * wide * (weight.numel() + rows * D)
    assert logits < tracker.peak().total < logits + 1.1 * around


def test_linear_cross_entropy_where_nothing_counts(path):
    x, weight = torch.randn(4, 8, requires_grad=True), torch.randn(6, 8, requires_grad=True)
    loss = linear_cross_entropy(x, weight, torch.full((4,), -100))
    loss.backward()
    assert loss.item() == 0
    assert x.grad is not None
    assert not x.grad.any()


def test_nan_stays_visible(path):
    """A diverged model must show it: no kernel may turn NaN into a number."""
    nan = torch.full((4, 8), float("nan"))
    assert elementwise.norm(nan, torch.ones(8), None, 1e-5).isnan().all()
    assert elementwise.norm(nan, torch.ones(8), torch.ones(8), 1e-5).isnan().all()
    assert elementwise.gelu(nan, "none").isnan().all()
    assert elementwise.gelu(nan, "tanh").isnan().all()
    assert elementwise.swiglu(nan).isnan().all()
    assert qkv_attention(nan.view(1, 4, 8).repeat(1, 1, 3), 2, 2, None, None, True).isnan().all()
    assert linear_cross_entropy(nan, torch.ones(6, 8), torch.zeros(4, dtype=torch.int64)).isnan()


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_add_gradient(path, dtype):
    total, grad = torch.full((12,), 5.0), torch.randn(3, 4).to(dtype)
    elementwise.add_gradient(total, grad, first=True)
    assert torch.equal(total, grad.float().reshape(-1))
    elementwise.add_gradient(total, grad.t().contiguous().t(), first=False)
    assert torch.equal(total, 2 * grad.float().reshape(-1))


def test_full_logits_are_never_kept():
    """V = 128k, N = 2048 in bf16: full logits are 512 MiB, and their gradient as much again."""
    import subprocess
    import sys

    program = """
import resource, torch
from fivefold.kernels.matmul import linear_cross_entropy
x = torch.randn(2048, 64).bfloat16().requires_grad_()
weight = torch.randn(131072, 64).bfloat16().requires_grad_()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
linear_cross_entropy(x, weight, torch.randint(131072, (2048,))).backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 256, f"{done.stdout} MiB more than before"


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(3, 5, 64), (1, 7), (130, 384), (0, 4, 16)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_linear(dtype, shape, with_bias):
    inputs = [torch.randn(shape), torch.randn(24, shape[-1])] + [torch.randn(24)] * with_bias
    if shape[0] == 0:
        assert matmul.linear(*[x.to(dtype) for x in inputs]).shape == (*shape[:-1], 24)
        return
    check(matmul.linear, F.linear, inputs, dtype)


@pytest.mark.parametrize("shape", [(1, 1, 64), (7,)])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_linear_of_one_row(path, shape, with_bias, dtype):
    """As in generation: another kernel for 16 bits."""
    inputs = [torch.randn(shape), torch.randn(23, shape[-1])] + [torch.randn(23)] * with_bias
    low = [x.to(dtype) for x in inputs]
    with torch.no_grad():
        got = matmul.linear(*low)
    close(got, F.linear(*[x.double() for x in low]), dtype)


def test_linear_of_views():
    """As the gradient of an input is computed: with a transposed weight, and of a tensor that is not contiguous."""
    weight, dy = torch.randn(24, 16), torch.randn(16, 40).t()
    wide = torch.randn(40, 48)[:, ::2]
    with torch.no_grad():
        close(matmul.linear(wide, weight.t()), wide.double() @ weight.double(), torch.float32)
        close(matmul.linear(dy, weight), dy.double() @ weight.double().t(), torch.float32)


@pytest.mark.parametrize("bias", [torch.randn(48)[::2], torch.randn(1).expand(24)])
def test_linear_with_a_bias_that_is_a_view(bias):
    check(lambda x, w: matmul.linear(x, w, bias), lambda x, w: F.linear(x, w, bias.double()),
          [torch.randn(3, 16), torch.randn(24, 16)], torch.float32)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("x", "weight"), [((16,), (24, 16)), ((3, 16), (0, 16)), ((3, 0), (24, 0))])
def test_linear_of_a_vector_and_of_nothing(x, weight, dtype):
    inputs = [torch.randn(size, dtype=dtype, requires_grad=True) for size in (x, weight)]
    got, wanted = matmul.linear(*inputs), F.linear(*inputs)
    assert torch.equal(got, wanted)
    gradients = (torch.autograd.grad(y.sum(), inputs) for y in (got, wanted))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_fp16_is_multiplied_in_fp32():
    """Sums are not rounded before the end, and nothing in fp32 is kept for backward."""
    if not widened(torch.ones(1, dtype=torch.float16)):
        pytest.skip("this processor multiplies fp16")
    x, weight, bias = (torch.randn(size).half().requires_grad_() for size in ((5, 7, 512), (24, 512), (24,)))
    dy, kept = torch.randn(5, 7, 24).half(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.dtype) or t, lambda t: t):
        got = matmul.linear(x, weight, bias)
        rows = qkv_attention(got, 2, 1, None, None, True)
        experts = grouped_linear(x[0], weight[None], torch.tensor([7]))
    assert set(kept) <= {torch.float16, torch.int32}
    assert experts.dtype == rows.dtype == torch.float16
    found = got, *torch.autograd.grad(got, (x, weight, bias), dy)
    (a, b, c), d = (t.detach().double() for t in (x, weight, bias)), dy.double()
    exact = F.linear(a, b, c), d @ b, d.flatten(0, 1).t() @ a.flatten(0, 1), d.sum((0, 1))
    for one, true in zip(found, exact, strict=True):
        spacing = torch.nextafter(true.abs().half(), torch.tensor(torch.inf).half()) - true.abs().half()
        assert ((one.double() - true).abs() <= 0.51 * spacing + 2e-5 * true.abs().max()).all()


def test_numbers_of_fp16(path):
    """All of them are read, and what lies between is rounded as PyTorch does: subnormal, too large, a tie, NaN."""
    if path == "plain":
        pytest.skip("PyTorch's own")
    numbers = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.float16)
    read = torch.empty(65536)
    native.call("accumulate", numbers.dtype, read, numbers, 65536, 1)
    torch.testing.assert_close(read, numbers.float(), rtol=0, atol=0, equal_nan=True)
    low, one, out = numbers[:0x7C01].float(), torch.ones(1).half(), torch.empty(1).half()
    low[-1] = 2.0**16
    for share in (0.25, 0.5, 0.75):
        between = (low[:-1] + share * low.diff())[::97]
        for value in torch.cat(
            (between, -between, torch.tensor([65519.0, 65520.0, 7e4, torch.inf, torch.nan]))
        ):
            native.call("matrix_vector", out.dtype, one, value.view(1), None, out, 1, 1)
            assert torch.equal(out, value.half().view(1)) or (out.isnan() and value.isnan())


def test_linear_says_what_does_not_fit():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        matmul.linear(torch.randn(3, 16), torch.randn(24, 8))


def test_linear_under_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        assert matmul.linear(torch.randn(3, 16), torch.randn(24, 16)).dtype == torch.bfloat16


@pytest.mark.parametrize("held", [(), *native.CASES, tuple(native.CASES)], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("lead", [(130,), (3, 43)])
def test_products_of_a_linear_layer(held, dtype, lead, monkeypatch):
    """Whichever library computes them: F.linear up to rounding, and gradients that autograd computes, to the bit."""
    monkeypatch.setattr(native, "LARGE_WEIGHT", 1000)
    names = [held] if isinstance(held, str) else held
    monkeypatch.setattr(native, "table", lambda: native.Table("", names))
    called = []
    monkeypatch.setattr(matmul, "onednn_linear", lambda *t: called.append(1) or native.onednn_linear(*t))
    for features, biased in itertools.product((8, 24), (False, True)):  # a small weight and a large one
        bias = torch.randn(features).to(dtype) if biased else None
        x, weight = torch.randn(*lead, 64).to(dtype), torch.randn(features, 64).to(dtype)
        dy = torch.randn(*lead, features).to(dtype)
        leaves = [x.requires_grad_(), weight.requires_grad_()]
        out = matmul.linear(*leaves, bias)
        close(out, F.linear(x.double(), weight.double(), None if bias is None else bias.double()), dtype)
        wanted = torch.autograd.grad(out, leaves, dy)
        with torch.no_grad():
            assert torch.equal(matmul.linear(*leaves, bias), out)
            assert torch.equal(matmul.input_gradient(dy, weight), wanted[0])
            assert torch.equal(matmul.weight_gradient(dy, x), wanted[1])
            close(wanted[0], dy.double() @ weight.double(), dtype)
            close(wanted[1], dy.flatten(0, -2).double().t() @ x.flatten(0, -2).double(), dtype)
    if dtype == torch.float32 or (dtype == torch.bfloat16 and has_cpu_bf16()):
        assert bool(called) == any(name.startswith(str(dtype)) for name in names)


def test_exponentials_of_all_sizes():
    """By the fused SwiGLU of (x, 1): a sigmoid is right to a few units in the last place, also where its exponential
    is too large or too small for fp32, and NaN stays NaN."""
    if native.why_not():
        pytest.skip(f"native kernels: {native.why_not()}")
    x = torch.cat([torch.linspace(-100, 100, 20001), torch.tensor([-1e30, 1e30, 0.0, torch.nan])])
    got = elementwise.swiglu(torch.stack([x, torch.ones_like(x)], 1))[:, 0].double()
    wanted = x.double() * x.double().sigmoid()
    usual = x > -87
    assert ((got - wanted).abs() <= 6e-7 * wanted.abs())[usual].all()
    assert (got.abs() <= 1e-30)[(x < -87) & (x > -200)].all()
    assert got[-1].isnan()
    assert not got[:-1].isnan().any()


def test_a_choice_is_measured_once_per_machine(monkeypatch, tmp_path):
    """Also by the process that measured: another rank may have been first."""
    monkeypatch.setenv("FIVEFOLD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(native, "machines", native.machines.__wrapped__)
    name = next(iter(native.CASES))
    monkeypatch.setattr(native, "clearly_faster", lambda: iter([name]))
    found = native.machines(1)
    assert found == (native.place(), [name], ())
    monkeypatch.setattr(native, "clearly_faster", lambda: iter([]))
    assert native.machines(1) == found
    next((tmp_path / "cache" / "kernels").glob("*.json")).write_text('["this')
    assert native.machines(1).onednn == native.UNMEASURED.onednn
    monkeypatch.setenv("FIVEFOLD_CACHE", "/proc/nowhere")
    assert native.machines(1).onednn == native.UNMEASURED.onednn


def test_only_what_is_clearly_faster_is_chosen(monkeypatch):
    """By the shortest times of ways that take turns."""
    now, turns = [0.0], {"own": 0, "onednn": 0}

    def takes(way, *seconds):
        def work(*factors):
            now[0] += seconds[min(turns[way], len(seconds) - 1)]
            turns[way] += 1

        return work

    monkeypatch.setattr(native.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(native, "CASES", dict(list(native.CASES.items())[:1]))
    for own, chosen in ((1.06, True), (1.04, False)):
        turns.update(own=0, onednn=0)
        monkeypatch.setattr(native.F, "linear", takes("own", 9.0, own, 2.0))
        monkeypatch.setattr(native, "onednn_linear", takes("onednn", 3.0, 2.0, 1.0))
        assert bool([*native.clearly_faster()]) == chosen
        assert turns == {"own": native.REPEATS, "onednn": native.REPEATS}
    monkeypatch.setattr(native, "SECONDS", -1.0)
    turns.update(own=0, onednn=0)
    assert not [*native.clearly_faster()]
    assert turns == {"own": 2, "onednn": 2}


def test_what_is_used_of_pytorch_that_is_not_documented():
    """Raising torch: each private name that kernels use is there, and does what its line says."""
    x, weight, bias = torch.randn(6, 16), torch.randn(24, 16), torch.randn(24)
    close(native.onednn_linear(x, weight, bias), F.linear(x, weight, bias).double(), torch.float32)
    q, k = (torch.empty(2, 4, n, 16, dtype=torch.bfloat16, device="meta") for n in (64, 32))
    out, lse = partial_attention.flash(q, k, k, False)  # it has no CPU kernel: shapes only
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, q.shape[:3], torch.float32)
    gradients = partial_attention.flash_backward(
        partial_attention.Queries(q, out, out, lse, lse), k, k, False
    )
    assert [g.shape for g in gradients] == [q.shape, k.shape, k.shape]


@pytest.mark.slow  # the compiler takes seconds to import
def test_the_loss_as_gpus_compute_it(monkeypatch):
    """Both passes give what they give without PyTorch's compiler, for any number of rows."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(native, "usable", lambda *_: False)
    monkeypatch.setattr(cross_entropy, "compiled", cache(partial(torch.compile, backend=backend)))
    first, scale = 10, torch.tensor(0.25)
    for rows in (33, 40, 1):
        logits, targets = (
            torch.randn(rows, 50).bfloat16(),
            torch.randint(100, (rows,)),
        )  # some in other columns
        targets[::5] = -100
        statistics = cross_entropy.vocabulary_statistics(logits, targets, first)
        torch.testing.assert_close(cross_entropy._statistics_on_gpu(logits, targets, first), statistics)
        lse, found = statistics[0] + statistics[1].log(), logits.clone()
        cross_entropy._gradient_on_gpu(found, targets, lse, first, scale)
        assert torch.equal(
            found, cross_entropy.vocabulary_gradient(logits.clone(), targets, lse, first, scale)
        )
    assert 2 <= len(graphs) <= 6


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a GPU adds in the matmul")
@pytest.mark.parametrize("z_loss", [0.0, 0.05])
def test_the_loss_on_a_gpu(z_loss, monkeypatch):
    monkeypatch.setitem(sizes.LOGITS_BYTES, "accelerator", 1)
    monkeypatch.setattr(sizes, "MIN_ROWS", 64)
    monkeypatch.setattr(sizes, "SUM_SIZE", 0)
    x, weight = (torch.randn(n, 96, device="cuda").bfloat16().requires_grad_() for n in (200, 512))
    targets = torch.randint(512, (200,), device="cuda")
    targets[::5] = -100
    high = [t.detach().double().requires_grad_() for t in (x, weight)]
    logits = high[0] @ high[1].t()
    wanted = F.cross_entropy(logits, targets) + z_loss * logits.logsumexp(1)[targets >= 0].square().mean()
    got = linear_cross_entropy(x, weight, targets, None, z_loss)
    close(got, wanted, torch.bfloat16)
    for a, b in zip(torch.autograd.grad(got, [x, weight]), torch.autograd.grad(wanted, high), strict=True):
        close(a, b, torch.bfloat16)
