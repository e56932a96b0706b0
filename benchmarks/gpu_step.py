"""Where a step on a GPU spends its time, and what libraries make of its parts. The figures of docs/gpu.md come from it.

    python benchmarks/gpu_step.py step [--shape llama-1b] [--microbatch 2]   time, memory, the longest kernels
    python benchmarks/gpu_step.py loss         the output layer's loss by the size of its chunks, beside PyTorch's own
    python benchmarks/gpu_step.py attention    flash attention, cuDNN's, and flash attention by documents
    python benchmarks/gpu_step.py fp8          products against emulation, and their rates

One GPU, PyTorch 2.11 or newer. Each takes less than a minute.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

GPU = torch.device("cuda", 0)


def milliseconds(work: Callable[[], object], times: int = 8) -> float:
    """Mean of some calls after three."""
    for _ in range(3):
        work()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(times):
        work()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / times


def step(shape: str, size: int) -> None:
    """One microbatch of random tokens in a step, without documents, on one GPU."""
    from torch.profiler import ProfilerActivity, profile

    from fivefold.host.machine import let_segments_grow
    from fivefold.launch.ranks import Ranks
    from fivefold.step.state import build_state
    from fivefold.step.step import take_step
    from fivefold_plan.bench.gpu import plain, trials

    let_segments_grow()
    ranks, recipe = Ranks(0, 1, 0, 1, GPU), trials.recipe_of(shape, "dp=1,recompute=none", 1, size)
    state, tokens = build_state(recipe, ranks), plain.random_tokens(recipe, ranks)

    def one() -> None:
        take_step(state, recipe, [trials.Microbatch(tokens, tokens)])

    began = time.perf_counter()
    one()
    torch.cuda.synchronize()
    print(f"first step, which compiles: {time.perf_counter() - began:.1f} s")
    seconds = plain.seconds_per_step(one, GPU)
    began = time.perf_counter()
    one()
    host = time.perf_counter() - began
    print(
        f"step {seconds:.4f} s, of which the host needs {host:.3f}; {tokens.numel() / seconds:,.0f} tokens/s"
    )
    print(f"peak {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        one()
        torch.cuda.synchronize()
    kernels = [e for e in seen.key_averages() if e.device_type != torch.autograd.DeviceType.CPU]
    for kernel in sorted(kernels, key=lambda e: -e.self_device_time_total)[:25]:
        print(f"{kernel.self_device_time_total / 1e3:9.3f} ms {kernel.count:5d}  {kernel.key[:100]}")
    state.parallel.close()


def loss() -> None:
    """8,192 tokens of width 2,048 in bf16, a vocabulary of 128,256."""
    from fivefold.kernels import sizes
    from fivefold.kernels.matmul import linear_cross_entropy

    x, weight = (torch.randn(n, 2048, device=GPU).bfloat16().requires_grad_() for n in (8192, 128256))
    targets = torch.randint(len(weight), (len(x),), device=GPU)

    def both(forward: Callable[[], torch.Tensor]) -> float:
        return milliseconds(lambda: torch.autograd.grad(forward(), [x, weight]))

    def own() -> torch.Tensor:
        return F.cross_entropy(F.linear(x, weight).float(), targets)

    print(f"PyTorch's own, whole logits: {both(own):.1f} ms")
    wanted = torch.autograd.grad(own(), [x, weight])
    found = torch.autograd.grad(linear_cross_entropy(x, weight, targets), [x, weight])
    for name, a, b in zip(("input", "weight"), found, wanted, strict=True):
        print(f"gradient of the {name}: {((a - b).float().norm() / b.float().norm()).item():.1e} apart")
    for chunk in (128, 256, 512, 1024, 2048):
        sizes.LOGITS_BYTES["accelerator"] = chunk << 20
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        took = both(lambda: linear_cross_entropy(x, weight, targets))
        peak = (torch.cuda.max_memory_allocated() - before) / 2**20
        print(f"chunks of {chunk} MiB: {took:.1f} ms, at most {peak:,.0f} MiB")


def attention() -> None:
    """Forward and backward of one causal sequence of 8,192 tokens in bf16."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.varlen import varlen_attn

    T = 8192
    for H, K, d in ((32, 8, 64), (32, 8, 128), (12, 12, 64)):
        q, k, v = (torch.randn(1, n, T, d, device=GPU).bfloat16().requires_grad_() for n in (H, K, K))

        def by_sdpa(q: torch.Tensor = q, k: torch.Tensor = k, v: torch.Tensor = v) -> object:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
            return torch.autograd.grad(out, [q, k, v], out)

        for library in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
            with sdpa_kernel(library):
                took = milliseconds(by_sdpa)
            flops = 7 * H * T * T * d
            print(f"{H}/{K} heads of {d}, {library.name}: {took:.2f} ms, {flops / took / 1e9:.0f} TFLOP/s")
        q, k, v = (torch.randn(T, n, d, device=GPU).bfloat16().requires_grad_() for n in (H, H, H))
        ends = torch.tensor([0, T], device=GPU, dtype=torch.int32)

        def by_documents(
            q: torch.Tensor = q, k: torch.Tensor = k, v: torch.Tensor = v, ends: torch.Tensor = ends
        ) -> object:
            out = varlen_attn(q, k, v, ends, ends, T, T, window_size=(-1, 0))
            return torch.autograd.grad(out, [q, k, v], out)  # pyright: ignore[reportArgumentType, reportCallIssue]

        print(f"{H}/{H} heads of {d}, flash attention by documents: {milliseconds(by_documents):.2f} ms")


def fp8() -> None:
    """Relative differences, which are those of rounding the result to bf16; TFLOP/s of a Llama 8B's gate and up."""
    from fivefold.kernels.fp8 import Fp8
    from fivefold.kernels.rounded import RoundedMatmuls
    from fivefold.precision.fp8 import GRADIENTS

    a, b = torch.randn(512, 1024, device=GPU).bfloat16(), torch.randn(256, 1024, device=GPU).bfloat16()
    for scaling in ("tensor", "row", "block"):
        for name, form in GRADIENTS.items():
            how = Fp8(form, scaling=scaling)
            wanted = RoundedMatmuls.product(how, a, b, form).float()
            apart = (how.multiply(a, how.narrow(b), form).float() - wanted).norm() / wanted.norm()
            print(f"{scaling}, gradients in {name}: {apart.item():.1e}")
    M, K, N = 8192, 4096, 14336
    a, b = torch.randn(M, K, device=GPU).bfloat16(), torch.randn(N, K, device=GPU).bfloat16()
    print(f"bf16: {2 * M * K * N / milliseconds(lambda: a @ b.t()) / 1e9:.0f} TFLOP/s")
    for scaling in ("tensor", "block"):
        how, form = Fp8(GRADIENTS["e4m3"], scaling=scaling), GRADIENTS["e4m3"]
        compiled = torch.compile(lambda a, b, how=how, form=form: how.multiply(a, how.narrow(b), form))
        rate = 2 * M * K * N / milliseconds(lambda compiled=compiled: compiled(a, b)) / 1e9
        print(f"{scaling}, compiled, with rounding: {rate:.0f} TFLOP/s")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=["step", "loss", "attention", "fp8"])
    parser.add_argument("--shape", default="llama-1b")
    parser.add_argument("--microbatch", type=int, default=2)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("error: PyTorch finds no GPU here")
    torch.cuda.set_device(GPU)
    if args.part == "step":
        step(args.shape, args.microbatch)
    else:
        {"loss": loss, "attention": attention, "fp8": fp8}[args.part]()


if __name__ == "__main__":
    main()
