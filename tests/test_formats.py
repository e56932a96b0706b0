"""Formats of numbers, computed from their bits; numbers of a step, counted once in every layout."""

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch
from pool_runs import train_rank
from ranks import run_ranks
from steps import Numbers, _state, recipe_of

from fivefold.cli.main import main
from fivefold.host.devices import CORES, SHEETS
from fivefold.observe import number_formats
from fivefold.observe.number_formats import BINS, KINDS, LOWEST, Histogram, from_json
from fivefold.precision.formats import BLOCKS, E8M0, FORMATS, Format
from fivefold.recipe import Recipe, load
from fivefold.step.recorder import Counter, count
from fivefold.step.step import take_step
from fivefold.train.share import share_of


@pytest.mark.parametrize("form", [*FORMATS.values(), E8M0], ids=lambda form: form.name)
def test_figures_follow_from_bits(form: Format) -> None:
    """torch's own, or those of all numbers of the format, one by one."""
    if form.torch:
        info = torch.finfo(getattr(torch, form.torch))
        assert (form.bits, form.largest, form.smallest_normal) == (info.bits, info.max, info.tiny)
        if form.fraction:
            assert (form.epsilon, form.smallest) == (info.eps, info.smallest_normal * info.eps)
    elif form.bits < 8:
        numbers = sorted(
            2.0 ** (max(e, 1) - form.bias) * ((e > 0) + f / 2**form.fraction)
            for e in range(2**form.exponent)
            for f in range(2**form.fraction)
        )
        assert (numbers[1], numbers[-1]) == (form.smallest, form.largest)
        assert min(x for x in numbers if x > 1) == 1 + form.epsilon


def test_formats_that_torch_lacks() -> None:
    """The OCP Microscaling specification's ranges, and the bits that scales add."""
    largest = {name: FORMATS[name].largest for name in ("fp6 e3m2", "fp6 e2m3", "fp4 e2m1", "fp16")}
    assert largest == {"fp6 e3m2": 28.0, "fp6 e2m3": 7.5, "fp4 e2m1": 6.0, "fp16": 65504.0}
    assert FORMATS["tf32"].bits == 19
    assert {block.name: block.bits for block in BLOCKS} == {
        "mxfp8 e4m3": 8.25, "mxfp8 e5m2": 8.25, "mxfp6 e3m2": 6.25, "mxfp6 e2m3": 6.25, "mxfp4 e2m1": 4.25,
        "nvfp4": 4.5,
    }  # fmt: skip


def test_what_a_format_makes_of_numbers_is_what_torch_makes_of_them() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20000, generator=generator) * torch.randint(-30, 20, (20000,), generator=generator).exp2()
    x = torch.cat([x, torch.tensor([0.0, -0.0, float("inf"), float("nan"), 2.0**-149, -(2.0**127)])])
    counts = count(x)
    assert len(counts) == BINS
    assert counts[0] == counts[-1] == 2
    assert counts.sum() == len(x)
    found = Histogram({"weights": counts.tolist()})
    assert from_json(json.loads(json.dumps(found.as_json()))) == found
    assert found.exponents("weights")[LOWEST] == 1
    finite = x[x.isfinite() & (x != 0)]
    for name in ("fp16", "fp8 e5m2", "bf16"):
        form = FORMATS[name]
        rounded = finite.to(getattr(torch, form.torch)).float()
        fate = found.fate("weights", form)
        assert fate.zero == pytest.approx((rounded == 0).double().mean().item(), abs=1e-4)
        small = (
            (rounded.abs() <= form.smallest_normal) & (finite.abs() < form.smallest_normal) & (rounded != 0)
        )
        assert fate.subnormal == pytest.approx(small.double().mean().item(), abs=1e-4)
        assert fate.large == pytest.approx((finite.abs() >= 2.0 ** (form.highest + 1)).double().mean().item())
    shift = Histogram({"weights": count(torch.tensor([3.0, 2.0**-20])).tolist()})
    assert shift.headroom("weights", FORMATS["fp16"]) == 13
    assert shift.fate("weights", FORMATS["fp16"], 13).zero == 0


def counted(rank: int, world: int, recipe: Recipe) -> dict[str, object]:
    state = _state(rank, world, recipe)
    train, numbers = recipe.train, Numbers(recipe)
    counter, found = Counter(state), list[dict[str, object]]()

    def inspect() -> None:
        found.append(counter.take().as_json())

    share = share_of(numbers, 0, train.global_batch_size, train.microbatch_size or 1, state.mesh)
    take_step(state, recipe, share, inspect=inspect)
    return found[0]


def totals(found: dict[str, dict[str, object]]) -> dict[str, int]:
    return {
        kind: sum([one["zero"], one["not_finite"], *one["exponents"].values()])  # pyright: ignore
        for kind, one in found.items()
    }


CASES = [
    ("llama", "tp=2"), ("llama", "tp=2,sp=true,recompute=full"), ("llama", "cp=2,zero=1"),
    ("llama", "pp=2,schedule=zbv,virtual_stages=2"), ("moe", "dp=2,ep=2,expert_buffer=2"), ("moe", "tp=2"),
    ("deepseek", "tp=2,sp=true"),
]  # fmt: skip
SMALL = [
    "model.layers=4", "model.dim=64", "model.heads=4", "model.kv_heads=4", "model.ffn_dim=96", "model.seq_len=32",
]  # fmt: skip


def small(arch: str, layout: str, mode: str = "fp32") -> Recipe:
    more = ["model.expert_ffn_dim=32"] * (arch in ("moe", "deepseek"))
    recipe = recipe_of(arch, mode, layout, *SMALL, *more)
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"global_batch_size": 8})})


@pytest.mark.parametrize("arch", ["llama", "moe", "deepseek"])
def test_every_number_counts_once(arch: str) -> None:
    alone = counted(0, 1, small(arch, "dp=1"))
    for layout in [layout for name, layout in CASES if name == arch]:
        found = run_ranks(2, counted, small(arch, layout))
        assert found[0] == found[1]
        assert totals(found[0]) == totals(alone), layout
        assert totals(alone).keys() == set(KINDS)
        for kind in KINDS:  # the same numbers, up to rounding
            one, two = (Histogram({kind: from_json(a).counts[kind]}) for a in (alone, found[0]))
            moved = [abs(one.exponents(kind).get(e, 0) - n) for e, n in two.exponents(kind).items()]
            assert sum(moved) < 0.01 * totals(alone)[kind], (layout, kind)


def test_rows_that_fill_up_are_not_counted() -> None:
    """In bf16 on CPUs experts get more rows than they have (`mixture.evened`)."""
    assert totals(counted(0, 1, small("moe", "dp=1", "bf16"))) == totals(counted(0, 1, small("moe", "dp=1")))


def test_a_run_writes_and_shows_its_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "text.txt"
    source.write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    sets = [
        *SMALL,
        f"data.source={source}",
        "data.tokenizer=bytes",
        "train.steps=2",
        "observe.histogram_step=2",
        "model.freeze=embed*",
    ]
    sets += [
        "train.global_batch_size=4",
        "train.sample_every=0",
        "train.val_sequences=4",
        "observe.tracker=none",
        "checkpoint.every=0",
    ]
    run, empty = tmp_path / "run", tmp_path / "empty"
    run_ranks(2, train_rank, load("quickstart", sets, "dp=2"), run)
    empty.mkdir()
    (empty / "recipe.toml").touch()
    main_ends(["formats", "--run", str(run), "--svg", str(tmp_path / "formats.svg")])
    out = capsys.readouterr().out
    step, found = number_formats.read(run)
    assert step == 2
    assert "fp16: zero, with the best scale" in out
    assert all(kind in out for kind in KINDS)
    tips = [
        tip.text or "" for tip in ET.parse(tmp_path / "formats.svg").getroot().iter() if "title" in tip.tag
    ]
    bars = [tip for tip in tips if tip.startswith("2^")]
    assert len(bars) <= sum(len(found.exponents(kind)) for kind in KINDS)
    assert len(bars) > 40
    main_ends(["formats", "--run", str(empty)], 2)
    assert (
        "no step's numbers were counted. Train with --set observe.histogram_step" in capsys.readouterr().err
    )


def main_ends(arguments: list[str], code: int = 0) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert (ended.value.code or 0) == code


def test_cores_multiply_what_data_sheets_have_a_rate_for() -> None:
    """Each format of an NVIDIA sheet is one of its architecture's; fp64 of Turing and Ada is that of CUDA cores."""
    nvidia = [sheet for sheet in SHEETS if sheet.maker == "NVIDIA"]
    assert {sheet.generation for sheet in nvidia} == CORES.keys()
    for sheet in nvidia:
        cuda, tensor = (kinds.split(", ") for kinds in CORES[sheet.generation])
        assert {dtype.removeprefix("mx") for dtype in sheet.peak} <= {*cuda, *tensor}, sheet.name
        assert ("tf32" in sheet.peak) == ("tf32" in tensor), sheet.name
    for name in ("Turing (2018)", "Ada (2022)"):
        assert "fp64" in CORES[name][0]
        assert "fp64" not in CORES[name][1]


def test_formats_names_ranges_and_hardware(capsys: pytest.CaptureFixture[str]) -> None:
    main_ends(["formats"])
    out = capsys.readouterr().out
    assert "65504" in out
    assert "3.4e+38" in out
    assert "fp4 e2m1  Blackwell, Blackwell Ultra, CDNA 4" in out
    main_ends(["formats", "--json"])
    rows = {row["format"]: row for row in json.loads(capsys.readouterr().out)["formats"]}
    assert "Turing (2018)           fp64, fp32, fp16, int8        fp16, int8, int4" in out
    assert rows["fp16"]["computed_by"][0] == "Pascal (2016)"
    assert rows["bf16"]["computed_by"][0] == "Ampere (2020)"
    assert rows["fp4 e2m1"]["devices"] == ["gb200", "b200", "b300", "mi355x"]
    assert rows["fp4 e2m1"]["modes"] == []
    assert (rows["fp8 e4m3"]["modes"], rows["fp8 e5m2"]["modes"]) == (
        ["fp8", "nanotron", "mxfp8"],
        ["fp8", "nanotron"],
    )
    assert "shown, not trained" in out
