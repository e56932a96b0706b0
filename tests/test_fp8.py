"""Training in fp8: rounding and matmuls, the self-test, layouts against one process."""

import pytest
import torch

from fivefold.kernels import fp8, matmul, native
from fivefold.kernels.fp8 import E4M3, Fp8, encode_rows, round_tiles
from fivefold.kernels.private import scaled_product
from fivefold.precision.formats import FORMATS, Format
from fivefold.precision.fp8 import SCALINGS

E5M2 = FORMATS["fp8 e5m2"]


def numbers(*shape: int, seed: int = 0, spread: int = 12) -> torch.Tensor:
    """Normal numbers, times powers of two: with subnormal ones and zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.randint(-spread, 3, shape, generator=generator).exp2()
    return (x * (torch.rand(shape, generator=generator) > 0.01)).bfloat16()


@pytest.mark.parametrize("form", [E4M3, E5M2], ids=lambda form: form.name)
@pytest.mark.parametrize("tile", [(1, 128), (128, 1), (128, 128), (1, 700), (300, 700), (300, 1)])
def test_the_compiled_kernel_rounds_as_torch_does(
    tile: tuple[int, int], form: Format, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = numbers(300, 700, spread=30)
    x[:128, :128] = 0
    x[7] *= 2.0**40
    x[9] *= 2.0**-80
    for one in (x, x.float()):
        compiled = round_tiles(one, *tile, form)
        assert compiled.dtype == one.dtype
        with monkeypatch.context() as patch:
            patch.setattr(native, "usable", lambda *_: False)
            assert torch.equal(round_tiles(one, *tile, form), compiled)
    error = (compiled - x).abs()
    assert (error <= x.abs() * 2.0 ** -(form.fraction + 1) + x.abs().max()).all()
    x[5, 5] = float("nan")
    assert round_tiles(x, *tile, form)[5, 5].isnan()


@pytest.mark.parametrize("form", [E4M3, E5M2], ids=lambda form: form.name)
def test_scales_change_subnormal_numbers_only(form: Format) -> None:
    """The reason why layouts agree: tiles of any size round to the same numbers, up to 2^-17 of the largest."""
    x = numbers(256, 512)
    whole = round_tiles(x, 256, 512, form)
    for tile in ((1, 128), (128, 128), (1, 512)):
        small = round_tiles(x, *tile, form)
        normal = x.abs() > x.abs().max() * 2.0 ** (form.lowest - form.highest + 1)
        assert torch.equal(small[normal], whole[normal])
        assert (small - whole).abs().max() <= x.abs().max() * 2 * form.smallest / form.largest


@pytest.mark.parametrize("scaling", ["tensor", "row"])
@pytest.mark.parametrize("form", [E4M3, E5M2], ids=lambda form: form.name)
def test_emulation_equals_the_matmul_of_fp8(scaling: str, form: Format) -> None:
    """`torch._scaled_mm`, which GPUs use and this CPU has, too."""
    a, b = numbers(64, 96), numbers(48, 96, seed=1)
    how = Fp8(scaling, form)
    a8, a_scale = encode_rows(a, form, scaling == "tensor")
    b8, b_scale = encode_rows(b, E4M3, scaling == "tensor")
    wanted = scaled_product(a8, b8, a_scale, b_scale, torch.bfloat16)
    found = how._product(a, b, form)
    torch.testing.assert_close(found, wanted, rtol=2**-7, atol=2**-9 * wanted.abs().max().item())
    assert (a8.float() * a_scale).bfloat16().equal(how.rounded(a, form))


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("backward", [E4M3, E5M2], ids=lambda form: form.name)
def test_the_three_products(scaling: str, backward: Format) -> None:
    """Through autograd, with a bias, and as errors in the bounds of rounding both factors."""
    how = Fp8(scaling, backward)
    x, w, dy = torch.randn(2, 80, 192), torch.randn(144, 192), torch.randn(2, 80, 144)
    x, w, dy = (t.bfloat16() for t in (x, w, dy))
    x.requires_grad_(), w.requires_grad_()
    bias = torch.randn(144).bfloat16().requires_grad_()
    y = matmul.linear(x, w, bias, how)
    y.backward(dy)
    with torch.no_grad():
        assert torch.equal(y, matmul.linear(x, w, bias, how))
        exact = (x.float() @ w.float().t() + bias.float(), dy.float() @ w.float(), None)
        assert x.grad is not None
        assert w.grad is not None
        assert bias.grad is not None
        exact = dy.flatten(0, 1).float().t() @ x.flatten(0, 1).float()
        for found, wanted, form in (
            (y, x.float() @ w.float().t() + bias.float(), E4M3),
            (x.grad, dy.float() @ w.float(), backward),
            (w.grad, exact, backward),
        ):
            error = ((found.float() - wanted).norm() / wanted.norm()).item()
            assert 0.01 < error < (2.0 ** (-2 * form.fraction - 2) + 2.0**-8) ** 0.5, error
        torch.testing.assert_close(bias.grad, dy.sum((0, 1)))
        assert torch.equal(x.grad, how.input_gradient(dy, w))
        assert torch.equal(w.grad, how.weight_gradient(dy, x))


@pytest.mark.parametrize("scaling", SCALINGS)
def test_experts_multiply_as_single_layers(scaling: str) -> None:
    how, counts = Fp8(scaling, E5M2), torch.tensor([128, 0, 256])
    rows, weight, dy = (
        t.bfloat16() for t in (torch.randn(384, 128), torch.randn(3, 256, 128), torch.randn(384, 256))
    )
    rows.requires_grad_(), weight.requires_grad_()
    from fivefold.kernels.mixture import grouped_linear

    y = grouped_linear(rows, weight, counts, how)
    y.backward(dy)
    assert rows.grad is not None
    assert weight.grad is not None
    for expert, part in ((0, slice(0, 128)), (2, slice(128, 384))):
        with torch.no_grad():
            x, w = rows[part], weight[expert]
            close = {"rtol": 2**-6, "atol": 0.05}
            torch.testing.assert_close(y[part], how.forward(x, w), **close)
            torch.testing.assert_close(rows.grad[part], how.input_gradient(dy[part], w), **close)
            torch.testing.assert_close(weight.grad[expert], how.weight_gradient(dy[part], x), **close)
    assert not weight.grad[1].any()
    assert fp8.BLOCK == 128
