"""Kernels in Triton: their algorithms by their PyTorch twins, everywhere; the kernels themselves in Triton's
interpreter and through its compilers, where Triton is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import REPO
from ranks import run_ranks

from fivefold.comm import Axis
from fivefold.errors import UserError
from fivefold.kernels import fp8, matmul, native, sizes
from fivefold.kernels.gpu import combine, language, loss, registry, rounding
from fivefold.models import mixture
from fivefold.precision.formats import FORMATS
from fivefold.train import self_test

needs_triton = pytest.mark.skipif(
    find_spec("triton") is None, reason="Triton is not installed: pip install -e '.[test,triton]'"
)
TOLERANCE = {"torch.float32": 4e-6, "torch.float16": 2e-3}
"""Sums in another order; a gradient of a logit in fp16, then its matmuls."""


@pytest.mark.parametrize("z_loss", [0.0, 0.05])
@pytest.mark.parametrize("biased", [False, True])
def test_loss_by_slabs(biased: bool, z_loss: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin: loss and gradients of `matmul.linear_cross_entropy`, backward twice, and where nothing counts."""
    monkeypatch.setitem(sizes.LOGITS_BYTES, "cpu", 1)
    torch.manual_seed(0)
    leaves = [torch.randn(33, 24), torch.randn(300, 24), torch.randn(300)]
    targets = torch.randint(300, (33,))
    targets[::5] = -100
    results = []
    for compute in (matmul.linear_cross_entropy, loss.linear_cross_entropy):
        x, weight, bias = (t.clone().requires_grad_() for t in leaves)
        found = compute(x, weight, targets, bias if biased else None, z_loss)
        (3 * found).backward(retain_graph=compute is loss.linear_cross_entropy)
        results.append([found.detach(), *(t.grad.clone() for t in (x, weight, bias)[: 2 + biased])])
        if compute is loss.linear_cross_entropy:
            (3 * found).backward()
            assert torch.equal(x.grad, 2 * results[-1][1])
    for a, b in zip(*results, strict=True):
        assert (a - b).norm() <= 2e-6 * a.norm()
    for wanted in (0, 1):  # the other has no gradient, and none is computed
        x, weight = (t.clone().requires_grad_(i == wanted) for i, t in enumerate(leaves[:2]))
        with monkeypatch.context() as patch:
            patch.setattr(loss, ("weight_gradient", "add_product")[wanted], None)
            (
                3 * loss.linear_cross_entropy(x, weight, targets, leaves[2] if biased else None, z_loss)
            ).backward()
        found = (x, weight)[wanted].grad
        assert found is not None
        assert torch.equal(found, results[1][1 + wanted])
    nothing = loss.linear_cross_entropy(leaves[0], leaves[1], torch.full((33,), -100))
    assert nothing.item() == 0


def loss_of_parts(rank: int, world: int, tensors: list[torch.Tensor], sp: bool, fused: bool) -> list[Any]:
    import torch.distributed as dist

    from fivefold.parallel.autograd import TensorAxis
    from fivefold.parallel.tensor import VocabularyOutput

    x, weight, bias, targets = tensors
    rows, T = len(weight) // world, x.shape[1] // world
    own = x[:, T * rank : T * (rank + 1)] if sp else x
    leaves = [own, weight[rows * rank : rows * (rank + 1)], bias[rows * rank : rows * (rank + 1)]]
    leaves = [t.clone().requires_grad_() for t in leaves]
    axis = Axis("tp", range(world), rank, torch.device("cpu"), dist.group.WORLD)
    output = VocabularyOutput(TensorAxis(axis, sp=sp))
    output.z_loss = 0.01
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "in_triton", lambda kernel, x: fused and kernel == registry.LOSS)
        patch.setitem(sizes.LOGITS_BYTES, "cpu", 1)
        found = output(leaves[0], leaves[1], targets, leaves[2])
        assert (type(found.grad_fn).__name__ == "_LossBackward") != fused
        found.backward(torch.tensor(0.5))
    return [found.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("sp", [False, True])
def test_loss_by_slabs_of_a_vocabulary_that_ranks_share(sp: bool) -> None:
    """Equal to the loss by chunks, whose equality with one process test_tensor.py shows."""
    torch.manual_seed(0)
    tensors = [torch.randn(3, 10, 16), torch.randn(600, 16), torch.randn(600)]
    tensors.append(torch.randint(600, (3, 10)).masked_fill(torch.rand(3, 10) < 0.3, -100))
    wanted, found = (run_ranks(2, loss_of_parts, tensors, sp, fused) for fused in (False, True))
    for a, b in zip(wanted, found, strict=True):
        for one, other in zip(a, b, strict=True):
            assert (one - other).norm() <= 2e-6 * one.norm()


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What tests/triton_program.py prints."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    program = Path(__file__).with_name("triton_program.py")
    done = subprocess.run(
        [sys.executable, program], env=environment, capture_output=True, text=True, cwd=REPO
    )
    assert not done.returncode, done.stderr
    return json.loads(done.stdout)


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["loss", "combine"])
def test_forward_and_backward_in_the_interpreter(kernel: str, interpreted: dict[str, Any]) -> None:
    """They equal PyTorch in fp64 within rounding, in fp32 and fp16."""
    cases = {name: errors for name, errors in interpreted.items() if name.startswith(kernel)}
    assert len(cases) == (8 if kernel == "loss" else 4)
    for name, errors in cases.items():
        assert max(errors) < TOLERANCE[name.rpartition(" ")[2]], (name, errors)


@needs_triton
@pytest.mark.slow
def test_rounding_in_the_interpreter(interpreted: dict[str, Any]) -> None:
    """Every bit is the twin's."""
    cases = {name: errors for name, errors in interpreted.items() if name.startswith("rounding")}
    assert len(cases) == 16
    assert not any(map(any, cases.values())), cases


@pytest.mark.parametrize("scaling", ["block", "row", "tensor"])
def test_rounding_by_a_kernel_that_computes(scaling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its twin here: what fp8 rounds, also transposed, a kept weight in both orders, and in a compiled graph."""
    how, form = fp8.Fp8(scaling=scaling), FORMATS["fp8 e4m3"]
    torch.manual_seed(0)
    x = torch.randn(256, 384, dtype=torch.bfloat16)
    monkeypatch.setattr(fp8.Fp8, "multiplies", lambda self, b: True)

    def found() -> list[torch.Tensor]:
        numbers = [t for y in (x, x.t()) for t in fp8.encode(y, *how.tile(y.shape), form)]
        kept = how.keep(x)
        for factor in (kept.output, kept.gradient):
            numbers += [factor.numbers, factor.scale]
        return [*numbers, *encode(x)]

    encode = torch.compile(
        lambda y: fp8.encode(y, *how.tile(y.shape), form), backend="aot_eager", fullgraph=True
    )
    wanted, calls = found(), list[tuple[int, int]]()
    monkeypatch.setattr(native, "in_triton", lambda kernel, y: kernel == registry.ROUNDING)
    plain = rounding.rounded
    monkeypatch.setattr(rounding, "rounded", lambda *given: (calls.append(given[1:3]), plain(*given))[1])
    torch._dynamo.reset()
    for a, b in zip(found(), wanted, strict=True):
        assert torch.equal(a.float(), b.float())
    tiles = {"block": {(1, 128), (128, 128)}, "row": set[tuple[int, int]](), "tensor": {(0, 0)}}
    assert set(calls) == tiles[scaling]  # PyTorch's operations round tiles as long as rows
    assert len(calls) == (0 if scaling == "row" else 4)


def test_combining_by_a_kernel_that_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its twin here: experts' rows in forward and backward, with dropped ones and in a compiled graph."""
    torch.manual_seed(0)
    leaves = [torch.randn(30, 8), torch.rand(30, 2)]
    chosen = torch.rand(30, 4).topk(2).indices
    results, calls = [], list[str]()

    monkeypatch.setattr(combine, "runs", lambda *tensors: calls.append("an operator"))  # and returns None
    for kernels in (False, True):
        monkeypatch.setattr(
            native, "in_triton", lambda kernel, y, on=kernels: on and kernel == registry.COMBINE
        )
        for way in (mixture.assign(chosen, 4), mixture.assign(chosen, 4, capacity=12)):

            def both(x: torch.Tensor, weights: torch.Tensor, w: mixture.Assignment = way) -> torch.Tensor:
                return mixture.combine(mixture.dispatch(x, w).square(), weights, w)

            torch._dynamo.reset()
            for run in (both, torch.compile(both, backend="aot_eager", fullgraph=True)):
                given = [t.clone().requires_grad_() for t in leaves]
                results.append([out := run(given[0], given[1]), *torch.autograd.grad(out.sum(), given)])
        assert len(calls) == (12 if kernels else 0), "a sum and two gradients, each time"
    for one, other in zip(results[:4], results[4:], strict=True):
        assert all(map(torch.equal, one, other))


@needs_triton
@pytest.mark.slow
def test_what_the_interpreter_computes_wrongly_is_refused(interpreted: dict[str, Any]) -> None:
    assert "multiplies bf16 wrongly" in interpreted["bf16"]


def test_only_what_was_measured_on_this_gpu_computes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing measured, measured, another GPU, damaged: and the console says which."""
    monkeypatch.setenv("FIVEFOLD_CACHE", str(tmp_path))
    says = partial(self_test._kernels, native.Table("", []))
    assert registry.why_not() in ("no GPU", "")
    assert registry.why_not() in says()
    assert registry._triton() == language.VERSION
    name = ["One GPU"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name[0])
    monkeypatch.setattr(language, "VERSION", "")
    assert registry.why_not() == "Triton is not installed"
    monkeypatch.setattr(language, "VERSION", "3.7.1")
    assert registry.faster() == []
    assert "has not measured" in says()
    loss_in = registry.case(registry.LOSS, torch.bfloat16)
    registry.record(loss_in, "small", 1.01)
    assert registry.faster() == []
    assert "PyTorch has been faster" in says()
    registry.record(loss_in, "small", 1.2)
    assert registry.faster() == [loss_in]
    assert self_test._kernels(native.Table("", [], [loss_in])) == f"kernels in Triton: {loss_in}"
    registry.record(loss_in, "large", 0.0)
    assert registry.faster() == [], "slower or wrong at another shape"
    registry.record(loss_in, "large", 1.3)
    name[0] = "Another"
    assert registry.faster() == []
    registry._path().write_text('["lo')
    assert registry.faster() == []
    monkeypatch.setattr(language, "VERSION", "")
    with pytest.raises(UserError, match="Triton is not installed on this machine"):
        self_test._kernels(native.Table("", [], [loss_in]))


def test_a_kernel_computes_on_a_gpu_of_a_run_that_holds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnGpu:
        is_cuda, dtype = True, torch.bfloat16

    for table, uses in (
        (None, False),
        (native.Table("", []), False),
        (native.Table("", [], ["loss, torch.float32"]), False),
        (native.Table("", [], ["loss, torch.bfloat16"]), True),
    ):
        native.hold(table)
        assert native.in_triton(registry.LOSS, OnGpu()) == uses  # pyright: ignore[reportArgumentType]
        assert not native.in_triton(registry.LOSS, torch.ones(1))
    native.hold(None)


@needs_triton
@pytest.mark.slow
def test_kernels_compiled_for_gpus_fit_them(tmp_path: Path) -> None:
    """No spills, and no more registers and shared memory than the devices have: benchmarks/triton_kernels.py fails
    otherwise."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    command = [sys.executable, REPO / "benchmarks/triton_kernels.py", "--out", tmp_path / "found.json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert not done.returncode, done.stdout + done.stderr
    kernels = json.loads((tmp_path / "found.json").read_text())["kernels"]
    assert all(set(kinds) == {"sm_80", "sm_90a", "sm_100a", "gfx942"} for kinds in kernels.values())
