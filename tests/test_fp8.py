"""Training in fp8: rounding and matmuls, the self-test, layouts against one process."""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from layouts import MOE, compared, side, tiny
from marks import only, slow
from parity import joined, steps
from pool_runs import assert_same_tensors, lines, ranks_of, train_rank
from ranks import run_ranks
from steps import counted, planned
from torch._dynamo.backends.common import aot_autograd

from fivefold.comm import axis as comm_axis
from fivefold.comm import everyone
from fivefold.data import prepare
from fivefold.errors import UserError
from fivefold.kernels import fp8, matmul, mxfp8, native, rounded
from fivefold.kernels.fp8 import Fp8, NarrowRows, decode_rows, encode, encode_rows
from fivefold.kernels.mxfp8 import Mxfp8
from fivefold.kernels.rounded import E4M3, RoundedMatmuls, round_tiles, rounded_matmuls
from fivefold.models.base import build, init_part
from fivefold.models.card import card_of
from fivefold.models.mixture import grouped_linear
from fivefold.parallel import parallelize as parallelize_
from fivefold.parallel.parallelize import rounded_layers
from fivefold.precision import PRECISIONS
from fivefold.precision.formats import FORMATS, Format
from fivefold.precision.fp8 import SCALINGS, row_bytes
from fivefold.recipe import Recipe, change, load, resolve
from fivefold.sharding.layout import Layout
from fivefold.sharding.units import FsdpUnit
from fivefold.step.state import build_state
from fivefold.train import differences
from fivefold.train.self_test import fall_back, self_test
from fivefold.train.share import batches_of
from fivefold.train.verify import reference_name
from fivefold_plan.messages import volume

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
    x[5, 5], x[260, 650] = float("nan"), float("inf")
    whole = round_tiles(x, *tile, form)
    for row, column in ((5, 5), (260, 650)):
        top, left = row // tile[0] * tile[0], column // tile[1] * tile[1]
        assert whole[top : top + tile[0], left : left + tile[1]].isnan().all()
    with monkeypatch.context() as patch:
        patch.setattr(native, "usable", lambda *_: False)
        assert torch.equal(round_tiles(x, *tile, form).isnan(), whole.isnan())


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


@pytest.mark.parametrize(
    ("dtype", "stops"), [("float8_e4m3fn", 16), ("float8_e5m2", 8), ("bfloat16", 256), ("float32", 2**24)]
)
def test_where_a_sum_of_ones_stops(dtype: str, stops: int) -> None:
    """At 2 / epsilon, as docs/lectures/17_fp8.md says: the reason for sums in fp32."""
    kind = getattr(torch, dtype)
    assert 2 / torch.finfo(kind).eps == stops
    for sum_ in (stops - 1, stops):
        assert torch.tensor(float(sum_ + 1)).double().to(kind).double() == stops


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("form", [E4M3, E5M2], ids=lambda form: form.name)
def test_emulation_equals_the_matmul_of_fp8(scaling: str, form: Format) -> None:
    """`scaled_mm`, which GPUs use. This CPU has it, too; of blocks only the shapes can be checked."""
    a, b = numbers(256, 384), numbers(128, 384, seed=1)
    how = Fp8(form, scaling=scaling)
    a8, scale = encode(a, *how.tile(a.shape), form)
    tiles = scale.repeat_interleave(256 // len(scale), 0).repeat_interleave(384 // scale.shape[1], 1)
    assert (a8.float() * tiles).bfloat16().equal(how.round(a, form))
    if scaling == "block":
        for weight in (False, True):
            assert how.multiply(a.to("meta"), how.narrow(b.to("meta"), weight), form).shape == (256, 128)
        return
    if not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm_v2", "CPU"):
        pytest.skip(f"torch {torch.__version__} multiplies fp8 on GPUs only")
    found, wanted = RoundedMatmuls.product(how, a, b, form), how.multiply(a, how.narrow(b), form)
    torch.testing.assert_close(found, wanted, rtol=2**-7, atol=2**-9 * wanted.abs().max().item())


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("backward", [E4M3, E5M2], ids=lambda form: form.name)
def test_the_three_products(scaling: str, backward: Format) -> None:
    """Through autograd, with a bias, and as errors in the bounds of rounding both factors."""
    how = Fp8(backward, scaling=scaling)
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
    how, counts = Fp8(E5M2, scaling=scaling), torch.tensor([128, 0, 256])
    rows, weight, dy = (
        t.bfloat16() for t in (torch.randn(384, 128), torch.randn(3, 256, 128), torch.randn(384, 256))
    )
    rows.requires_grad_(), weight.requires_grad_()
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


@pytest.mark.parametrize("form", [E4M3, E5M2], ids=lambda form: form.name)
def test_rows_travel_in_8_bits(form: Format) -> None:
    """As one rank rounds them, a byte per number and four per 128 of them; also none at all."""
    for M, D in ((70, 256), (5, 200), (0, 128)):
        x = numbers(M, D, spread=30)
        sent = encode_rows(x, form)
        assert sent.shape == (M, D + 8 - 4 * (D == 128)) == (M, row_bytes(D))
        assert torch.equal(decode_rows(sent, D, form, x.dtype), round_tiles(x, 1, 128, form) if M else x)


def test_rows_are_gathered_in_8_bits() -> None:
    """Of each rank: exactly what a whole weight is rounded to, in messages of the size that the plan has."""
    whole = {
        "norm": numbers(70),
        "down": numbers(256, 384),
        "experts": numbers(4, 128, 256),
        "out": numbers(96, 40),
    }
    for scaling, narrow in (("block", {"down", "experts"}), ("tensor", {"down", "out"})):
        parts = {name: torch.stack(weight.chunk(2)) for name, weight in whole.items()}
        pieces = tuple(tuple(part.shape[1:]) for part in parts.values())
        unit = FsdpUnit(0, "", "shard", tuple(parts), pieces, 0, 0, ())
        tiles = unit.narrow(scaling, {"down", "experts", "out"}, Layout())
        assert tiles.keys() == narrow
        R = unit.message(tiles, 2)
        shares = {name: part[0].numel() for name, part in parts.items()}
        bits = sum(share * (1 if name in narrow else 2) for name, share in shares.items())
        scales = 3 * 1 + 2 * 1 * 2 if scaling == "block" else 1 + 1
        assert 0 <= R - bits - 4 * scales < 4
        code = NarrowRows([(n, parts[n].shape[1:], tiles.get(n)) for n in parts], int(R), 2)
        largest = {n: whole[n].abs().max().float() for n in narrow if scaling == "tensor"}
        ranks = [torch.cat([part[rank].flatten() for part in parts.values()]) for rank in (0, 1)]
        out = torch.empty(2, len(ranks[0]), dtype=torch.bfloat16)
        code.decode(torch.stack([code.encode(rank, largest) for rank in ranks]), out)
        for name, found in zip(parts, out.split(list(shares.values()), 1), strict=True):
            wanted, how = whole[name], Fp8(scaling=scaling)
            if name in narrow:
                matrices = wanted if wanted.dim() == 3 else wanted[None]
                wanted = torch.stack([how.round(one, weight=True) for one in matrices]).view(wanted.shape)
            assert torch.equal(found.reshape(wanted.shape), wanted), (scaling, name)


def test_experts_are_multiplied_in_fp8_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """By PyTorch's grouped matmul, whose demands on types, orders and scales its own meta function checks; a plain one
    gives the emulation's numbers."""
    how, ends = Fp8(E4M3, scaling="row"), torch.tensor([128, 128, 384], dtype=torch.int32)
    rows, weight, dy = numbers(384, 128), numbers(3, 256, 128, seed=1), numbers(384, 256, seed=2)
    wanted = how.grouped(rows, weight, ends), how.grouped_input_gradient(dy, weight, ends)
    monkeypatch.setattr(Fp8, "multiplies", lambda *_: True)
    monkeypatch.setattr(fp8, "capability", lambda _: (9, 0))

    def plain(a: Any, b: Any, a_scale: Any, b_scale: Any, ends: Any, dtype: torch.dtype) -> torch.Tensor:
        meta = [t.to("meta") for t in (a, b, a_scale, b_scale)]
        assert torch._scaled_grouped_mm(*meta, offs=ends.to("meta"), out_dtype=dtype).shape == (
            384,
            b.shape[2],
        )
        whole, b = a.float() * a_scale[:, None], b.float() * b_scale[:, None]
        pairs = zip(whole.tensor_split(ends.tolist()), [*b, b[0]], strict=True)
        return torch.cat([part @ w for part, w in pairs]).to(dtype)

    monkeypatch.setattr(fp8, "scaled_grouped_mm", plain)
    kept = replace(how, kept=(how.keep(weight),))
    assert kept.kept[0].output.numbers.dtype == kept.kept[0].gradient.numbers.dtype == torch.float8_e4m3fn
    for one in (how, kept):
        found = one.grouped(rows, weight, ends), one.grouped_input_gradient(dy, weight, ends)
        for there, here in zip(wanted, found, strict=True):
            torch.testing.assert_close(here, there, rtol=2**-7, atol=2**-9 * there.abs().max().item())
    monkeypatch.undo()
    monkeypatch.setattr(fp8, "capability", lambda _: (9, 0))
    on_gpu = cast(
        "torch.Tensor", SimpleNamespace(device=torch.device("cuda"), shape=weight.shape, dim=weight.dim)
    )
    assert how.multiplies(on_gpu)
    assert not replace(how, gradients=E5M2).multiplies(on_gpu), "PyTorch multiplies E4M3 only"
    assert not replace(how, scaling="block").multiplies(on_gpu), "by one scale per row"


@pytest.mark.parametrize("compiled", [True, False])
def test_mxfp8_rounds_blocks_of_32(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each to E4M3 under a power of two of its own, without saturation, along the sum of each matmul."""
    if not compiled:
        monkeypatch.setattr(native, "usable", lambda *_: False)
    how = rounded_matmuls(PRECISIONS["mxfp8"], None)
    assert how is not None
    x = numbers(64, 96, spread=30).float()
    x[0, :32], x[1, 3], x[2, 40] = 0, float("inf"), float("nan")
    x[3, :3] = torch.tensor([449.0, 500.0, -(2.0**-10)])  # 449 would saturate under the scale 1
    x[4, :3] = torch.tensor([448.0, 17.0, 2.0**-9])
    found = how.round(x, how.inputs)
    assert not found[0, :32].any()
    assert found.isnan().nonzero().tolist() == [[1, i] for i in range(32)] + [[2, i] for i in range(32, 64)]
    assert found[3, :3].tolist() == [448, 512, 0], (
        "the next numbers are 416 and 480 under the scale 1, 448 and 512 under 2"
    )
    assert found[4, :3].tolist() == [448, 16, 2.0**-9]
    for block in range(3):
        part = x[5:, 32 * block : 32 * block + 32]
        scale = 2.0 ** torch.ceil(torch.log2(part.abs().amax(1, keepdim=True) / E4M3.largest))
        assert torch.equal(
            found[5:, 32 * block : 32 * block + 32], (part / scale).to(torch.float8_e4m3fn).float() * scale
        )
    x = x[5:37]
    assert torch.equal(how.round(x.t(), how.inputs), how.round(x.t().contiguous(), how.inputs)), (
        "as in memory"
    )
    weight = torch.randn(48, 96)
    y, dy = how.forward(x, weight), torch.randn(32, 48)
    assert torch.equal(y, how.round(x, E4M3) @ how.round(weight, E4M3).t())
    assert torch.equal(how.input_gradient(dy, weight), how.round(dy, E4M3) @ how.round(weight.t(), E4M3).t())
    assert torch.equal(how.weight_gradient(dy, x), how.round(dy.t(), E4M3) @ how.round(x.t(), E4M3).t())


def test_mxfp8_on_blackwell(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's matmul, whose demands on types and scales its own meta function checks, gets the emulation's numbers,
    and scales where NVIDIA's documentation has that of each row and block."""
    how = rounded_matmuls(PRECISIONS["mxfp8"], None)
    assert isinstance(how, Mxfp8)
    x, weight, dy = numbers(160, 192), numbers(96, 192, seed=1), numbers(160, 96, seed=2)
    wanted = how.forward(x, weight), how.input_gradient(dy, weight), how.weight_gradient(dy, x)
    monkeypatch.setattr(Mxfp8, "multiplies", lambda *_: True)

    def plain(a: Any, b: Any, a_scale: Any, b_scale: Any, dtype: torch.dtype) -> torch.Tensor:
        meta = [t.to("meta") for t in (a, b, a_scale, b_scale)]
        assert torch._scaled_mm(*meta, out_dtype=dtype).shape == (len(a), b.shape[1])

        def whole(numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
            tiles_along = -(-numbers.shape[1] // 128)
            row, block = torch.meshgrid(
                *(torch.arange(n) for n in (len(numbers), numbers.shape[1] // 32)), indexing="ij"
            )
            tile = row // 128 * tiles_along + block // 4
            at = tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4
            return numbers.float() * scales.float()[at].repeat_interleave(32, 1)

        return (whole(a, a_scale) @ whole(b.t(), b_scale).t()).to(dtype)

    monkeypatch.setattr(fp8, "scaled_mm", plain)
    kept = replace(how, kept=(how.keep(weight),))
    for one in (how, kept):
        found = one.forward(x, weight), one.input_gradient(dy, weight), one.weight_gradient(dy, x)
        for there, here in zip(wanted, found, strict=True):
            torch.testing.assert_close(here, there, rtol=2**-7, atol=2**-9 * there.abs().max().item())
    monkeypatch.undo()
    for major, shape, whole in ((10, (96, 192), True), (9, (96, 192), False), (10, (96, 200), False)):
        monkeypatch.setattr(mxfp8, "capability", lambda _, major=major: (major, 0))
        on_gpu = SimpleNamespace(device=torch.device("cuda"), shape=shape, dim=lambda: 2)
        assert how.multiplies(cast("torch.Tensor", on_gpu)) == whole


def weights_rounded(rank: int, world: int, recipe: Recipe, folder: Path) -> int:
    """How many weights the layers of a rank round in a step."""
    count, factor = [0], RoundedMatmuls.factor

    def counted(how: RoundedMatmuls, b: torch.Tensor, weight: bool = False) -> Any:
        count[0] += weight
        return factor(how, b, weight)

    with mock.patch.object(RoundedMatmuls, "factor", counted):
        side(rank, world, recipe, 1, folder)
    return count[0]


@pytest.mark.slow
def test_chunks_share_a_rounded_weight(tmp_path: Path) -> None:
    """Layers whose weights are gathered round them once in forward and once in backward, whatever they are cut into."""
    found = [
        run_ranks(
            4,
            weights_rounded,
            tiny(tmp_path, f"tp=2,dp=2,zero=3,sp=true,tp_chunks={n}", mode="fp8"),
            tmp_path / f"{n}",
        )
        for n in (1, 4)
    ]
    assert found[0] == found[1]
    assert min(found[0]) > 0


IN_FP32 = {name: replace(PRECISIONS[name], working="fp32") for name in ("fp8", "mxfp8", "nanotron")}
"""Round matmuls to 8 bits and nothing else, so layouts differ only where fp32's roundings tip one of fp8."""
LAYOUTS = [
    "dp=2,zero=1", "dp=2,zero=3", "tp=2", "tp=2,sp=true", "cp=2", "dp=2,ep=2", "dp=2,ep=2,tp=2",
    "pp=2,schedule=zbv,virtual_stages=2,recompute=full", "dp=2,tp=2,pp=2,zero=1,sp=true",
    "tp=2,dp=2,zero=3,sp=true,sp_regather=true,tp_chunks=2",
]  # fmt: skip
QUICK = {
    "dp=2,zero=3",
    "tp=2,sp=true",
    "cp=2",
    "dp=2,ep=2",
    "pp=2,schedule=zbv,virtual_stages=2,recompute=full",
}
CASES = [
    *(pytest.param("fp8", one, [], marks=[] if one in QUICK else pytest.mark.slow) for one in LAYOUTS),
    ("mxfp8", "tp=2,sp=true", []),
    *(
        pytest.param("mxfp8", layout, [], marks=pytest.mark.slow)
        for layout in ("dp=2,zero=3", "cp=2", "dp=2,ep=2,tp=2", "dp=2,tp=2,pp=2,zero=1,sp=true")
    ),
    ("nanotron", "dp=2,zero=3", []),
    *(
        pytest.param("nanotron", layout, [], marks=pytest.mark.slow)
        for layout in (
            "dp=2", "dp=2,zero=1", "tp=2", "tp=2,sp=true", "pp=2,schedule=zbv,virtual_stages=2,recompute=full",
            "dp=2,tp=2,pp=2,zero=1,sp=true",
        )
    ),
    *(
        pytest.param("fp8", layout, ["precision.fp8_dispatch=true"], marks=pytest.mark.slow)
        for layout in ("dp=4,ep=4", "dp=2,ep=2,expert_chunks=3,recompute=full", "dp=2,tp=2,ep=2,sp=true,zero=3")
    ),
    ("fp8", "tp=2", ["precision.fp8_scaling=tensor"]),  # each rank has the largest number of its part
    *(
        pytest.param("fp8", layout, [f"precision.fp8_{set_}"], marks=pytest.mark.slow)
        for layout, set_ in (
            ("dp=2", "scaling=row"), ("dp=2,zero=2", "scaling=row"), ("cp=2,cp_method=ulysses", "scaling=row"),
            ("cp=2,cp_method=all_gather", "scaling=row"),
            ("dp_replicate=2,dp_shard=2,zero=3", "scaling=tensor"), ("tp=2,sp=true", "backward=e4m3"),
            ("pp=2", "backward=e4m3"),
        )
    ),
]  # fmt: skip


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fp8")


def side_in_fp32(rank: int, world: int, recipe: Recipe, steps: int, folder: Path) -> None:
    mode = recipe.precision.mode
    own, PRECISIONS[mode] = PRECISIONS[mode], IN_FP32.get(mode, PRECISIONS[mode])
    try:
        side(rank, world, recipe, steps, folder)
    finally:
        PRECISIONS[mode] = own


@only("nanotron-dp=2,zero=3*", "fp8-dp=2,zero=3*", "fp8-tp=2,sp=true*", "fp8-dp=2,ep=2*")
@pytest.mark.parametrize(("mode", "layout", "sets"), CASES)
def test_layouts_round_as_one_process_does(
    room: Path, mode: str, layout: str, sets: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the same numbers: otherwise the errors of both would be independent, and their difference larger than either.
    Now and then fp32's rounding tips a number to its neighbour, and the layers behind enlarge that, to about a tenth of
    fp8's own error."""
    monkeypatch.setitem(PRECISIONS, mode, IN_FP32[mode])
    recipe, model = change(tiny(room, layout, mode=mode), sets), "moe" if "ep=" in layout else "dense"
    folder = room / "-".join([model, mode, "fp32", *sets])
    compared(recipe, folder=folder, part=side_in_fp32)
    alone, exact = (folder / reference_name(recipe, 3, one) for one in (mode, "fp32"))
    found = dict(differences.between(folder / "layout", alone, together=True))
    own = dict(differences.between(alone, exact, together=True))
    for (kind, where), difference in found.items():
        if kind == "gradients":
            assert difference < max(1e-5, own[kind, where] / 2), (where, own[kind, where])
        elif kind == "loss":
            assert difference < PRECISIONS[mode].roundoff, where
    assert max(error for (kind, _), error in own.items() if kind == "gradients") > 0.02, "fp8 rounds"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "layout"),
    [
        ("fp8", "tp=2,sp=true"),
        *(
            pytest.param(mode, layout, marks=pytest.mark.slow)
            for mode in ("fp8", "mxfp8")
            for layout in ("dp=2,tp=2,pp=2", "dp=4,ep=2,zero=3")
        ),
    ],
)
def test_verify_takes_fp8(room: Path, mode: str, layout: str) -> None:
    model = "moe" if "ep=" in layout else "dense"
    report = compared(tiny(room, layout, mode=mode), folder=room / f"{model}-{mode}-bf16")
    assert report.passed, report


def test_a_replica_keeps_weights_in_fp8_beside_bf16_masters(room: Path) -> None:
    """Of the layers that round; they compute with the numbers that each matmul would round anew. Sums are in fp32."""
    recipe = tiny(room, "dp=1", mode="nanotron")
    state = build_state(resolve(recipe, vocab_size=256), ranks_of(0, 1))
    (stage,), (replica,) = state.parallel.stages, state.parallel.replicas
    layers, fresh = dict(rounded_layers(stage)), rounded_matmuls(PRECISIONS["nanotron"], recipe.precision)
    assert len(layers) == 4 * 4
    assert {w.dtype for w in replica.masters.values()} == {torch.bfloat16}
    assert {g.dtype for g in replica.gradients.values()} == {torch.float32}
    x, dy = torch.randn(3, 32).bfloat16(), torch.randn(3, 64 * 2).bfloat16()
    assert fresh is not None
    for name, parameter in stage.named_parameters():
        layer = layers.get(name.removesuffix(".weight"))
        assert parameter.dtype == (torch.bfloat16 if layer is None else torch.float8_e4m3fn), name
        if layer is None or tuple(parameter.shape) != (128, 32):
            continue
        master = replica.masters[name]
        assert torch.equal(layer.rounded.forward(x, parameter), fresh.forward(x, master))
        assert torch.equal(layer.rounded.input_gradient(dy, parameter), fresh.input_gradient(dy, master))
        gradient = fresh.weight_gradient(dy, x)
        assert torch.equal(gradient, round_tiles(Fp8.weight_gradient(fresh, dy, x), 128, 32, E4M3)), "rounded"
    name = "blocks.1.mlp.gate_up"
    fall_back(state, {name})
    parameter, master = stage.get_parameter(f"{name}.weight"), replica.masters[f"{name}.weight"]
    assert parameter.data_ptr() == master.data_ptr(), "a layer that failed computes with its master"
    assert sum(p.dtype == torch.float8_e4m3fn for p in stage.parameters()) == 15
    state.parallel.close()


@pytest.mark.parametrize(
    ("mode", "sets"),
    [
        ("fp8", []), ("mxfp8", MOE),
        *slow(
            ("fp8", ["precision.fp8_scaling=row"]), ("fp8", ["precision.fp8_scaling=tensor"]), ("mxfp8", []),
            ("fp8", MOE),
        ),
    ],
)  # fmt: skip
def test_weights_are_rounded_once_per_step(
    room: Path, mode: str, sets: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For all microbatches, forward and backward: to the same bits as in each matmul. 4 microbatches per step."""
    recipe, again = change(tiny(room, "dp=1", "train.microbatch_size=2", mode=mode), sets), list[str]()
    data = prepare(recipe)
    recipe, plain = resolve(recipe, vocab_size=data.vocab_size), RoundedMatmuls.round
    batches = batches_of(recipe, data)

    def counted(how: RoundedMatmuls, x: torch.Tensor, form: Format | None = None, weight: bool = False):
        again.extend(["weight"] * weight)
        return plain(how, x, form, weight)

    monkeypatch.setattr(RoundedMatmuls, "round", counted)
    found = steps(0, 1, recipe, batches, 2)
    assert not again, "matmuls round no weight"
    monkeypatch.setattr(rounded, "refresh", lambda *_: None)
    wanted = steps(0, 1, recipe, batches, 2)
    assert len(again) > 2 * 4 * 2 * 4 * 4, "each matmul of steps, microbatches, ways, blocks, layers"
    assert (found["loss"], found["norm"]) == (wanted["loss"], wanted["norm"])
    assert found["validation"] == wanted["validation"]
    for key in ("gradients", "weights"):
        assert_same_tensors(joined([found], key), joined([wanted], key))


@pytest.mark.parametrize("scaling", SCALINGS)
def test_what_shares_a_tensor_shares_its_rounding(
    scaling: str, room: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries, keys and values are one product, and so are gate and up: forward rounds their input once. Backward
    rounds a gradient once for both of its products if a whole tensor shares the scale. To the same bits."""
    recipe = change(tiny(room, "dp=1", mode="fp8"), [f"precision.fp8_scaling={scaling}"])
    state, found = build_state(resolve(recipe, vocab_size=256), ranks_of(0, 1)), list[str]()
    (stage,), plain = state.parallel.stages, RoundedMatmuls.round

    def counted(how: RoundedMatmuls, x: torch.Tensor, form: Format | None = None, weight: bool = False):
        found.append((form or how.inputs).name)
        return plain(how, x, form, weight)

    monkeypatch.setattr(RoundedMatmuls, "round", counted)
    tokens, layers = torch.arange(32).view(2, 16), 4 * 4  # blocks; qkv, out, gate and up, down

    def gradients() -> list[torch.Tensor]:
        found.clear()
        loss = stage(tokens, tokens)
        assert found == layers * [E4M3.name]
        return list(torch.autograd.grad(loss, list(stage.parameters())))

    shared = gradients()
    assert found.count(E4M3.name) == 2 * layers
    assert found.count(E5M2.name) == (1 if scaling == "tensor" else 2) * layers
    monkeypatch.setattr(RoundedMatmuls, "both", lambda how, x, form=None: x)
    assert all(map(torch.equal, shared, gradients()))
    assert found.count(E5M2.name) == 2 * layers
    state.parallel.close()


def test_8_bits_are_rounded_once_for_both_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that multiplies them: weight and input in forward; weight, input and gradient in backward."""
    if not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm_v2", "CPU"):
        pytest.skip(f"torch {torch.__version__} multiplies fp8 on GPUs only")
    how, encoded, plain = Fp8(E5M2, scaling="tensor"), list[torch.Size](), encode
    monkeypatch.setattr(Fp8, "multiplies", lambda *_: True)
    monkeypatch.setattr(fp8, "encode", lambda x, *rest: encoded.append(x.shape) or plain(x, *rest))
    x, w, dy = numbers(2, 80, 192), numbers(144, 192, seed=1), numbers(2, 80, 144, seed=2)
    inputs = x.requires_grad_(), w.requires_grad_()
    shared = torch.autograd.grad(matmul.linear(x, w, None, how), inputs, dy)
    assert encoded == [(144, 192), (160, 192), (160, 144), (192, 144), (160, 192)]
    monkeypatch.setattr(RoundedMatmuls, "both", lambda how, x, form=None: x)
    apart = torch.autograd.grad(matmul.linear(x, w, None, how), inputs, dy)
    assert len(encoded) == 5 + 6
    assert all(map(torch.equal, shared, apart))


def test_no_rows_are_rounded_to_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of experts that nobody has chosen, on a device that multiplies 8 bits."""
    monkeypatch.setattr(Fp8, "multiplies", lambda *_: True)
    how, none = Fp8(E5M2, scaling="tensor"), torch.zeros(0, 144, dtype=torch.bfloat16)
    assert how.both(none).shape == none.shape


def test_compiled_blocks_round_what_shares_a_tensor_once() -> None:
    """The whole joint graph of forward and backward: a compiler sees that an input is rounded twice, and does it once;
    not with other scales, whose tiles of an input and of its transpose differ."""
    found = dict[str, int]()

    def compiler(way: str) -> Any:
        def count(graph: torch.fx.GraphModule, _: Any) -> Any:
            found[way] = sum(node.target is torch.ops.aten.amax.default for node in graph.graph.nodes)
            return make_boxed_func(graph.forward)

        return count

    for scaling, rounded_ in (("tensor", (2, 2)), ("block", (2, 6))):
        how, x = Fp8(E5M2, scaling=scaling), torch.randn(2, 128, 256).bfloat16().requires_grad_()
        first, second = (
            torch.randn(*shape).bfloat16().requires_grad_() for shape in ((384, 256), (256, 384))
        )
        ways = [replace(how, kept=(how.keep(weight.detach()),)) for weight in (first, second)]

        def layers(x: torch.Tensor, one: Any, two: Any, ways: Any = ways) -> torch.Tensor:
            inner = torch.nn.functional.silu(matmul.linear(x.sin(), one, None, ways[0]))
            return matmul.linear(inner, two, None, ways[1])

        backend = aot_autograd(fw_compiler=compiler("forward"), bw_compiler=compiler("backward"),
                               partition_fn=min_cut_rematerialization_partition)  # fmt: skip
        torch._dynamo.reset()
        torch.compile(layers, backend=backend)(x, first, second).sum().backward()
        assert (found["forward"], found["backward"]) == rounded_


def test_a_skipped_update_changes_no_rounded_weight(room: Path) -> None:
    """They are rounded from the masters, never from what was rounded along the other dim."""
    recipe = change(tiny(room, "dp=1", mode="fp8"), ["precision.fp8_scaling=row"])
    state = build_state(resolve(recipe, vocab_size=256), ranks_of(0, 1))
    (stage,), (replica,) = state.parallel.stages, state.parallel.replicas
    found = list[list[torch.Tensor]]()
    for master in replica.masters.values():  # many numbers are subnormal along one dim only
        master.mul_(torch.randint(-20, 1, master.shape[:1]).exp2().view(-1, *[1] * (master.dim() - 1)))
    for skip in (0.0, 1.0, 0.0):
        for gradient in replica.gradients.values():
            gradient.normal_()
        replica.update(1e-4, None, torch.tensor(skip))
        kept = [how for _, layer in rounded_layers(stage) for how in layer.rounded.kept]
        found.append([t.clone() for one in kept for t in one.tensors()])
    once, skipped, twice = found
    assert len(once) == 2 * 4 * 4, "two ways, blocks, layers"
    assert all(map(torch.equal, once, skipped))
    assert not any(map(torch.equal, once, twice))
    state.parallel.close()


WIDE = ["model.layers=2", "model.dim=256", "model.ffn_dim=256", "train.global_batch_size=4"]
"""Rows of two ranks are whole blocks."""
GATHERS = [
    ("fp8", "dp=2,zero=3", WIDE),
    *slow(
        ("nanotron", "dp=2,zero=3", []), ("fp8", "dp=2,zero=3", ["precision.fp8_scaling=tensor"]),
        ("fp8", "dp=2,zero=1", WIDE), ("fp8", "dp=2,zero=2", WIDE),
        ("fp8", "dp=2,zero=3,recompute=full", WIDE), ("fp8", "dp=2,zero=3,all_gather=ring", WIDE),
        ("fp8", "tp=2,dp=2,zero=3,sp=true", ["precision.fp8_scaling=tensor"]),
        ("fp8", "dp_replicate=2,dp_shard=2,zero=3", WIDE),
        ("fp8", "pp=2,dp=2,zero=1,schedule=zbv,virtual_stages=2",
         ["precision.fp8_scaling=tensor", "model.tie_embeddings=false"]),
        ("fp8", "dp=2,zero=3", [*WIDE, "precision.fp8_skip_first=1"]),
        ("fp8", "dp=4,ep=2,zero=3", ["precision.fp8_scaling=tensor"]),
    ),
]  # fmt: skip


def gathered(rank: int, world: int, recipe: Recipe, narrow: bool) -> dict[str, Any]:
    """`parity.steps`, with the bytes of shared states. narrow: False: weights are gathered as they are."""
    sent = [0]

    def seen(axis: Any, operation: str, size: int) -> None:
        sent[0] += size * axis.name.endswith("shard")

    patch = nullcontext() if narrow else mock.patch.object(FsdpUnit, "narrow", return_value={})
    with patch, mock.patch.object(comm_axis, "counters", [seen]):
        data = prepare(recipe)
        recipe = resolve(recipe, vocab_size=data.vocab_size)
        return {**steps(rank, world, recipe, batches_of(recipe, data), 2), "sent": sent[0]}


@pytest.mark.parametrize(("mode", "layout", "sets"), GATHERS)
def test_gathers_in_8_bits_change_no_bit(room: Path, mode: str, layout: str, sets: list[str]) -> None:
    """Of losses, norms, gradients and weights, with fewer bytes, which are those of the plan."""
    recipe = change(tiny(room, layout, mode=mode), sets)
    world = Layout.from_recipe(recipe.layout).ranks
    found, wanted = (run_ranks(world, gathered, recipe, narrow, timeout_s=300) for narrow in (True, False))
    for here, there in zip(found, wanted, strict=True):
        assert (here["loss"], here["norm"]) == (there["loss"], there["norm"])
        assert here["validation"] == there["validation"]
        assert here["sent"] < there["sent"]
    for key in ("gradients", "weights"):
        assert_same_tensors(joined(found, key), joined(wanted, key))
    planned_ = planned(recipe)
    for rank, step in enumerate(run_ranks(world, counted, recipe, timeout_s=300)):
        assert volume.counted(planned_, rank) == step.sent, f"rank {rank}"


@pytest.mark.parametrize("arch", ["llama", "gpt2", "deepseek", "qwen3_moe"])
def test_the_card_knows_the_rounded_matrices(arch: str) -> None:
    recipe = resolve(load("quickstart", [f"model.arch={arch}", "precision.mode=fp8"], "dp=1"), vocab_size=256)
    module = build(recipe.model)
    parallelize_.round_matmuls(module, recipe)
    found = {f"{n}.{one}" for n, layer in rounded_layers(module) for one in rounded.matrices(layer)}
    assert found == card_of(recipe.model).rounded


def run_of(room: Path, layout: str, *sets: str) -> Recipe:
    more = ["train.steps=4", "observe.tracker=none", "train.val_sequences=4", "optim.schedule=constant"]
    return change(tiny(room, layout, mode="fp8"), [*more, *sets])


def test_a_run_resumes_exactly_and_keeps_its_layers(room: Path, tmp_path: Path) -> None:
    """A layer that failed the self-test stays in bf16 when the run resumes."""
    recipe = run_of(room, "dp=2,zero=2")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run_ranks(2, train_rank, recipe, whole)
    found = json.loads((whole / "fp8.json").read_text())
    assert found["in_bf16"] == {}
    assert len(found["errors"]) == 4 * 4
    assert all(
        0 < error < bound
        for row in found["errors"].values()
        for error, bound in zip(row, found["allowed"], strict=True)
    )
    run_ranks(2, train_rank, change(recipe, ["train.steps=2"]), parts)
    run_ranks(2, train_rank, recipe, parts, True)
    assert lines(parts, "loss") == lines(whole, "loss")
    other = tmp_path / "other"
    run_ranks(2, train_rank, change(recipe, ["train.steps=2"]), other)
    found["in_bf16"] = {f"blocks.{i}.{name}": "" for i in range(4) for name in ("mlp.down", "attention.qkv")}
    (other / "fp8.json").write_text(json.dumps(found))
    run_ranks(2, train_rank, recipe, other, True)
    assert lines(other, "loss")[:2] == lines(whole, "loss")[:2]
    assert lines(other, "loss")[2:] != lines(whole, "loss")[2:]


def broken(rank: int, world: int, recipe: Recipe) -> tuple[dict[str, str], list[str], list[str]]:
    """Rank 1's weights of block 2 are such that fp8 cannot hold them: one is far larger than the others."""
    recipe = resolve(recipe, vocab_size=256)
    ranks = ranks_of(rank, world)
    state = build_state(recipe, ranks)
    before = [name for stage in state.parallel.stages for name, _ in rounded_layers(stage)]
    if rank == 1:
        master = state.masters()["blocks.2.mlp.down.weight"]
        master[0, 0] = 2.0**28
    tested = self_test(state, recipe, everyone(ranks))
    fall_back(state, set(tested.failed))
    return (
        tested.failed,
        before,
        [name for stage in state.parallel.stages for name, _ in rounded_layers(stage)],
    )


def test_layers_that_fail_fall_back_on_all_ranks(room: Path) -> None:
    recipe = change(tiny(room, "tp=2", mode="fp8"), ["precision.fp8_scaling=tensor"])
    for failed, before, after in run_ranks(2, broken, recipe):
        assert list(failed) == ["blocks.2.mlp.down"]
        assert "off, allowed" in failed["blocks.2.mlp.down"]
        assert set(before) - set(after) == {"blocks.2.mlp.down"}
        assert len(before) == 4 * 4


def test_a_run_says_which_layers_fell_back(
    room: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the console and in fp8.json, and again when it resumes."""
    recipe = run_of(room, "dp=1", "precision.fp8_scaling=tensor")

    def with_an_outlier(seed: int, name: str, *rest: Any) -> torch.Tensor:
        made = init_part(seed, name, *rest)
        if name == "blocks.2.mlp.down.weight":
            made[0, 0] = 2.0**28
        return made

    monkeypatch.setattr(parallelize_, "init_part", with_an_outlier)
    train_rank(0, 1, change(recipe, ["train.steps=1"]), tmp_path / "run")
    said = " ".join(capsys.readouterr().out.split())
    assert "WARNING: blocks.2.mlp.down failed the self-test of fp8 and computes in bf16: the " in said
    assert said.count("failed the self-test") == 1
    assert [*json.loads((tmp_path / "run" / "fp8.json").read_text())["in_bf16"]] == ["blocks.2.mlp.down"]
    train_rank(0, 1, change(recipe, ["train.steps=2"]), tmp_path / "run", True)
    assert "fp8, except in blocks.2.mlp.down, as before" in " ".join(capsys.readouterr().out.split())


def test_blocks_and_sensitive_layers_stay_in_bf16(room: Path) -> None:
    recipe = run_of(room, "dp=1", "model.arch=moe", "model.experts=4", "precision.fp8_skip_first=1")
    state = build_state(
        resolve(change(recipe, ["precision.fp8_skip_last=2"]), vocab_size=256), ranks_of(0, 1)
    )
    names = {name for name, _ in rounded_layers(state.module)}
    assert names == {"blocks.1.attention.qkv", "blocks.1.attention.out", "blocks.1.mlp.experts"}


def test_what_fp8_refuses() -> None:
    with pytest.raises(UserError, match="has no effect: it needs"):
        load("quickstart", ["precision.mode=fp32", "precision.fp8_scaling=row"])
    with pytest.raises(UserError, match="fp4"):
        load("quickstart", ["precision.mode=fp4"])
    recipe = resolve(load("quickstart", ["precision.mode=fp8"], "dp=1"), vocab_size=256)
    with pytest.raises(UserError, match="custom modules do not train in fp8"):
        build_state(recipe, ranks_of(0, 1), torch.nn.Linear(4, 4))
