"""The bits of formats and the numbers of a step as pictures: those of the tables, and of the trainer's own step."""

import sys
import xml.etree.ElementTree as ET
from collections import Counter
from itertools import groupby
from pathlib import Path

import pytest
import torch
from commands import REPO
from steps import Numbers, _state, recipe_of

from fivefold.cli.main import main
from fivefold.kernels import rounded
from fivefold.kernels.matmul import input_gradient, linear, weight_gradient
from fivefold.observe.number_formats import PARTS, bits_svg
from fivefold.precision import DTYPES, PRECISIONS
from fivefold.precision.formats import E8M0, FORMATS
from fivefold.recipe.schema import PrecisionSection
from fivefold.step.step import take_step
from fivefold.train.share import share_of

sys.path.insert(0, str(REPO / "examples" / "pictures"))

import precision_step as step

SVG = "{http://www.w3.org/2000/svg}"
SMALL = [
    "model.layers=2", "model.dim=64", "model.heads=4", "model.kv_heads=4", "model.ffn_dim=96", "model.seq_len=32",
]  # fmt: skip


def flow_of(mode: str, **options: str) -> list[step.Part]:
    return step.parts(PrecisionSection.model_validate({"mode": mode} | options))


def boxes(picture: str) -> list[tuple[str, str, float, float]]:
    """(tip, class, x, y) of each box."""
    return [
        (box[0].text or "", box.get("class", ""), float(box.get("x", "")), float(box.get("y", "")))
        for box in ET.fromstring(picture).iter(f"{SVG}rect")
        if len(box)
    ]


def test_a_box_for_each_bit() -> None:
    """Sign, exponent and fraction, in this order, and as many as the format has."""
    drawn = {name: [*bits] for name, bits in groupby(boxes(bits_svg()), lambda box: box[0].split(": ")[0])}
    assert drawn.keys() == {*FORMATS, E8M0.name}
    for form in (*FORMATS.values(), E8M0):
        found = drawn[form.name]
        assert len(found) == form.bits
        runs = [(color, len([*run])) for color, run in groupby(color for _, color, _, _ in found)]
        wanted = [("sign", form.signed), ("exponent", form.exponent), ("fraction", form.fraction)]
        assert runs == [(PARTS[part], n) for part, n in wanted if n], form.name
        places = [x for _, _, x, _ in found]
        assert places == sorted(set(places))
        assert len({y for _, _, _, y in found}) == 1


@pytest.mark.parametrize("name", PRECISIONS)
def test_a_step_shows_every_format_of_its_mode(name: str) -> None:
    mode, flow = PRECISIONS[name], flow_of(name)
    dtypes = {mode.working, mode.master, mode.gradient, mode.state, *([mode.rate] if not mode.kernel else [])}
    there = {step.NAMES.get(dtype) or step.NAMES[DTYPES[dtype].torch] for dtype in dtypes} | {"fp32"}
    rows = [(part.color, *one) for part in flow for row in part.rows for one in row]
    assert {form for *_, form in rows} == there | ({*mode.formats} if mode.kernel else set())
    picture = step.to_svg(flow, name)
    assert Counter((color, tip) for tip, color, _, _ in boxes(picture)) == Counter(
        (color, f"{tensor} in {form}") for color, tensor, form in rows
    )
    texts = {text.text for text in ET.fromstring(picture).iter(f"{SVG}text")}
    assert {form for *_, form in rows} | {tensor for _, tensor, _ in rows} <= texts
    lefts = {x for _, _, x, _ in boxes(picture)}
    assert max(lefts) < 360  # a phone's width
    assert all(part.title in step.to_text(flow) for part in flow)


def forms(flow: list[step.Part], title: str) -> dict[str, list[str]]:
    """The formats of each tensor of a part, in the order of its rows."""
    (part,) = (part for part in flow if part.title.startswith(title))
    found: dict[str, list[str]] = {}
    for row in part.rows:
        for name, form in row:
            found.setdefault(name, []).append(form)
    return found


@pytest.mark.parametrize("name", [name for name, mode in PRECISIONS.items() if not mode.gpu])
def test_the_trainer_has_what_is_drawn(name: str) -> None:
    """Dtypes in a step of the trainer: weights, inputs, outputs and their gradients, sums, states, masters."""
    recipe = recipe_of("llama", name, "dp=1", *SMALL)
    state, seen = _state(0, 1, recipe), dict[str, torch.Tensor]()

    def look(module: torch.nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        seen.update(X=inputs[0].detach(), W=module.weight.detach(), Y=output.detach())  # pyright: ignore
        output.register_hook(lambda dY: seen.update(dY=dY))

    layer = state.module.get_submodule("blocks.0.mlp.down")
    layer.register_forward_hook(look)
    layer.weight.register_hook(lambda dW: seen.update(dW=dW))  # pyright: ignore
    share = share_of(Numbers(recipe), 0, recipe.train.global_batch_size, 2, state.mesh)
    take_step(state, recipe, share)
    (replica,) = state.parallel.replicas
    weight = "blocks.0.mlp.down.weight"
    seen |= {"sum": replica.gradients[weight], "master": replica.masters[weight]}
    shape = replica.masters[weight].shape
    states = [x for x in replica.updater.kept() if x.shape == shape]
    assert len({x.dtype for x in states}) == 1
    seen["states"] = states[0]
    found = {key: step.NAMES[str(x.dtype).removeprefix("torch.")] for key, x in seen.items()}
    flow = flow_of(name)
    ahead, back, update = forms(flow, "Forward"), forms(flow, "Backward: dW"), forms(flow, "Update")
    wanted = {key: ahead[key][0] for key in "XWY"} | {"dY": back["dY"][0], "dW": back["dW"][0]}
    wanted |= {"sum": update["sum"][0], "states": update["states"][0], "master": update["W"][-1]}
    assert found == wanted
    summed, loss = forms(flow, "dW"), forms(flow, "Loss")
    assert (summed["dW"], summed["sum"][0]) == (back["dW"][-1:], found["sum"])
    if back["dW"][1:]:  # of 8 bits, which bf16 holds exactly
        assert len(seen["dW"].unique()) <= 256
    assert (loss["Y"][0], loss["dY"][0]) == (found["Y"], found["dY"])


@pytest.mark.parametrize(
    ("name", "backward"), [("fp8", "e5m2"), ("fp8", "e4m3"), ("mxfp8", ""), ("nanotron", "")]
)
def test_matmuls_round_to_what_is_drawn(name: str, backward: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = PrecisionSection.model_validate(
        {"mode": name} | ({"fp8_backward": backward} if backward else {})
    )
    flow, used, plain = step.parts(options), list[tuple[str, tuple[int, int]]](), rounded.round_tiles

    def spy(x: torch.Tensor, rows: int, columns: int, form: object) -> torch.Tensor:
        used.append((form.name, tuple(sorted((rows, columns)))))  # pyright: ignore
        return plain(x, rows, columns, form)  # pyright: ignore

    monkeypatch.setattr(rounded, "round_tiles", spy)
    x, w, dy = (torch.randn(256, n, dtype=torch.bfloat16) for n in (128, 128, 256))
    by = rounded.rounded_matmuls(PRECISIONS[name], options)
    with torch.no_grad():
        calls = {
            "Forward": lambda: linear(x, w, None, by),
            "Backward: dX": lambda: input_gradient(dy, w, by),
            "Backward: dW": lambda: weight_gradient(dy, x, by),
        }
        for title, call in calls.items():
            used.clear()
            call()
            drawn = [tensor for key, tensor in forms(flow, title).items() if len(tensor) == 2]
            assert sorted(form for form, _ in used) == sorted(tensor[1] for tensor in drawn), title
            (note,) = (part.title for part in flow if part.title.startswith("A scale"))
            for _, (rows, columns) in used:
                assert ("all of X" if name == "nanotron" else f" {rows} x {columns} of") in note


def test_sums_are_apart_from_factors() -> None:
    for name in PRECISIONS:
        for title in ("Forward", "Backward: dX", "Backward: dW"):
            assert forms(flow_of(name), title)[step.SUM] == ["fp32"]


def test_options_of_a_recipe_are_drawn() -> None:
    assert forms(flow_of("bf16", reduce="bf16"), "dW")["sent"] == ["bf16"]
    assert forms(flow_of("bf16"), "dW")["sent"] == ["fp32"]
    assert "kahan" in step.to_text(flow_of("bf16_pure", rounding="kahan"))
    assert "A scale for all of X, dY; all of W" in step.to_text(flow_of("fp8", fp8_scaling="tensor"))
    assert "Loss x 65536" in step.to_text(flow_of("fp16"))


def test_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bits, drawn = tmp_path / "bits.svg", tmp_path / "step.svg"
    with pytest.raises(SystemExit) as ended:
        main(["formats", "--svg", str(bits)])
    assert not ended.value.code
    assert capsys.readouterr().out.endswith(f"{bits}\n")
    assert bits.read_text("utf-8") == bits_svg()
    for fields, flow in (([], flow_of("fp8")), (["fp8_backward=e4m3"], flow_of("fp8", fp8_backward="e4m3"))):
        monkeypatch.setattr(sys, "argv", ["precision_step.py", "fp8", *fields, "--svg", str(drawn)])
        step.main()
        assert capsys.readouterr().out == step.to_text(flow) + f"{drawn}\n"
        assert drawn.read_text("utf-8") == step.to_svg(flow, "A step in fp8")
