"""Terms of a plan by the conventions of papers and courses: the courses' numbers, each by one command."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from fivefold.cli.main import app
from fivefold.errors import UserError
from fivefold.models.card import card_of
from fivefold.recipe import load
from fivefold_plan.cluster.clusters import parse
from fivefold_plan.lessons.terms import Asked, evaluate, part_of, terms
from fivefold_plan.predict import predict

DOCS = Path(__file__).parent.parent / "docs" / "planner.md"
PIPELINE = "llama2-7b --set train.global_batch_size=8 --set train.microbatch_size=1"
INTERLEAVED = f"{PIPELINE} --layout pp=4,schedule=interleaved,virtual_stages=2"


def run(command: str) -> str:
    found = CliRunner().invoke(app, ["plan", *command.split()])
    assert found.exit_code == 0, found.output
    return found.output


def counted(command: str) -> dict[str, Any]:
    return json.loads(run(f"terms {command} --json"))


# (command, section, {term: the courses' value})
COURSES = [
    ("gpt3-175b", "parameters", {"model": 174.6e9, "plain GPT": 174.6e9}),
    (
        "gpt3-175b --psi 175e9 --deadline 30d --flops 160e12",
        "flops",
        {"run": 6 * 175e9 * 300e9, "devices": 760, "run, full recomputation": 8 * 175e9 * 300e9},
    ),
    (
        "gpt3-175b --psi 175e9 --as paper",
        "states",
        {
            "parameters": 350e9,
            "gradients": 350e9,
            "fp32 copy": 700e9,
            "momentum": 700e9,
            "variance": 700e9,
            "all states": 2800e9,
        },
    ),
    (
        "llama2-7b --layout dp=64 --psi 7.5e9 --as paper",
        "states",
        {"ZeRO 0": 120e9, "ZeRO 1": 31.4e9, "ZeRO 2": 16.6e9, "ZeRO 3": 1.88e9},
    ),
    (
        "llama2-7b --layout dp=1 --psi 7e9 --set precision.mode=fp32",
        "states",
        {"all states": 112e9},
    ),
    (
        "llama2-7b --layout dp=1 --psi 10e9 --set precision.mode=bf16_pure",
        "states",
        {"all states": 80e9},
    ),
    ("llama2-7b --layout dp=8 --psi 10e9 --as paper", "states", {"all states": 160e9, "at most": 200e9}),
    (  # messages are those of 16 bits
        "llama2-7b --layout dp=8 --psi 10e9 --as paper",
        "messages",
        {"gradients": 20e9, "ring all-reduce of them": 35e9},
    ),
    (
        "llama2-7b --layout dp=1 --as paper",
        "activations",
        {"one activation": 16 * 2**30, "one activation, fp32": 64 * 2**30},
    ),
    (
        "gpt3-175b --layout dp=1 --as paper --set train.global_batch_size=1562",
        "activations",
        {"batch": 430.2e12, "block": 2868903936},
    ),
    ("gpt3-175b --layout tp=8 --flops 160e12", "flops", {"time, full recomputation": 0.319}),  # of 30 to 40%
    (f"{PIPELINE} --layout pp=4", "bubble", {"1f1b, ideal": 0.375, "formula, ideal": 0.375}),
    (f"{PIPELINE} --layout pp=4", "bubble", {"1f1b, step": 3 / 11, "live microbatches": 4}),
    (f"{PIPELINE} --layout pp=4,schedule=gpipe", "bubble", {"live microbatches": 8}),
    (INTERLEAVED, "bubble", {"interleaved, ideal": 0.1875, "formula, ideal": 0.1875}),
    (
        "gpt3-175b --layout dp=8 --psi 175e9 --as paper",
        "messages",
        {"gradients": 350e9, "ring all-reduce of them": 2 * 7 / 8 * 350e9},
    ),
]


@pytest.mark.parametrize(("command", "section", "values"), COURSES)
def test_numbers_of_the_courses(command: str, section: str, values: dict[str, float]) -> None:
    found = counted(f"{command} --only {section}")[section]
    for name, value in values.items():
        assert found[name]["value"] == pytest.approx(value, rel=0.003), name


@pytest.mark.parametrize("layout", ["dp=64", "dp=4,tp=2,pp=2", "dp=2,zero=1"])
@pytest.mark.parametrize("how", ["paper", "fivefold"])
def test_drawn_states_are_the_terms(layout: str, how: str, tmp_path: Path) -> None:
    """The bars of a stage add up to its term: weights, gradients, and the optimizer's, of which each stage shards
    one more."""
    path = tmp_path / "states.svg"
    found = counted(f"llama2-7b --layout {layout} --psi 7.5e9 --as {how} --only states --svg {path}")
    assert found["svg"] == str(path)
    wanted = [found["states"][f"ZeRO {zero}"]["value"] for zero in range(4)]
    bars = [
        node for node in ElementTree.parse(path).findall(".//{*}rect") if node.find("{*}title") is not None
    ]
    assert len(bars) == 3 * 4
    lengths = [float(bar.get("width", 0)) + 0.6 for bar in bars]  # each with the gap behind it
    stages = [sum(lengths[3 * zero : 3 * zero + 3]) for zero in range(4)]
    assert [one / stages[0] for one in stages] == pytest.approx([one / wanted[0] for one in wanted], abs=2e-3)
    if (layout, how) == ("dp=64", "paper"):
        assert lengths[:3] == pytest.approx([stages[0] / 8, stages[0] / 8, stages[0] * 3 / 4], abs=0.02)
        assert lengths[5] == pytest.approx(lengths[2] / 64, abs=0.02)
        words = [node.text for node in ElementTree.parse(path).findall(".//{*}text")]
        assert {"120.0 GB", "31.4 GB", "16.6 GB", "1.9 GB", "weights"} <= {*words}


@pytest.mark.parametrize(
    ("layout", "sizes"),
    [("dp=1", ["2.9 GB", "855.6 MB", "50.3 MB"]), ("tp=8", ["578.8 MB", "358.6 MB", "107.0 MB"])],
)
def test_drawn_activations_are_the_formulas(layout: str, sizes: list[str], tmp_path: Path) -> None:
    """Bars as long as their bytes; without tensor ranks only those of one."""
    path = tmp_path / "activations.svg"
    counted(f"gpt3-175b --layout {layout} --as paper --only activations --svg {path}")
    bars = [
        node for node in ElementTree.parse(path).findall(".//{*}rect") if node.find("{*}title") is not None
    ]
    assert len(bars) == (3 if layout == "dp=1" else 7)
    lengths = [float(bar.get("width", 0)) + 0.6 for bar in bars]
    assert lengths[1] / lengths[0] == pytest.approx(855638016 / 2868903936, abs=1e-3)
    words = [node.text or "" for node in ElementTree.parse(path).findall(".//{*}text")]
    assert "a block: 34 s b h + 5 a b s^2" in words
    assert {*sizes} <= {*words}
    if layout == "tp=8":
        assert "tp, sp: (34 s b h + 5 a b s^2) / t" in words
        assert "tp, sp, selective: 34 s b h / t" in words


def test_text_has_the_courses_digits() -> None:
    text = run("terms gpt3-175b --psi 175e9 --as paper --only states")
    for line in ("2 Psi   350.0 GB", "4 Psi   700.0 GB", "16 Psi 2,800.0 GB (2,607.7 GiB)"):
        assert " ".join(line.split()) in " ".join(text.split())
    text = run("terms llama2-7b --layout dp=64 --psi 7.5e9 --as paper --only states")
    assert all(f" {size} GB" in text for size in ("120.0", "31.4", "16.6", "1.9"))
    documented = DOCS.read_text(encoding="utf-8").partition("  states\n")[2].partition("```")[0]
    assert len(documented.splitlines()) == 12
    assert documented in text
    assert "760 devices" in run("terms gpt3-175b --psi 175e9 --deadline 30d --flops 160e12")


def test_parts_of_gpt3() -> None:
    """Parameters, activations and FLOPs of a plain GPT are formulas to the last number."""
    found = counted("gpt3-175b --layout dp=1 --as paper")
    parts = {name: part["formula"] for name, part in found["parameters"].items() if part["formula"]}
    assert parts == {
        "embedding": "n_v d",
        "positions": "s d",
        "attention": "L (4 d^2 + 4 d)",
        "MLP": "L (8 d^2 + 5 d)",
        "norms": "L 4 d + 2 d",
        "plain GPT": "n_v d + L (12 d^2 + 5 d)",
    }
    kept = {name: part["formula"] for name, part in found["activations"].items()}
    assert kept["attention"] == "11 s b h + 5 a b s^2"
    assert (kept["MLP"], kept["norms"]) == ("19 s b h", "4 s b h")
    assert kept["block"] == "34 s b h + 5 a b s^2"
    assert (kept["selective"], kept["full"]) == ("34 s b h", "2 s b h")
    assert found["flops"]["attention"]["formula"] == "6 L h s D_1"


@pytest.mark.parametrize("t", [1, 8])
def test_tensor_ranks_keep_a_share(t: int) -> None:
    """arXiv 2205.05198, equations 2, 4 and 6: 10 + 24 / t, and with sequence parallelism 34 / t."""
    layout = f"--layout tp={t} --as paper --only activations"
    found = counted(f"gpt3-175b {layout}")["activations"]
    if t == 1:
        assert found["block"]["formula"] == "34 s b h + 5 a b s^2"
        return
    assert found["block"]["formula"] == "10 s b h + (24 s b h + 5 a b s^2) / t"
    found = counted(f"gpt3-175b {layout.replace('tp=8', 'tp=8,sp=true')}")["activations"]
    assert found["block"]["formula"] == "(34 s b h + 5 a b s^2) / t"
    assert found["selective"]["formula"] == "34 s b h / t"


def test_messages_in_units_of_psi() -> None:
    """DP and ZeRO 1 send 2 Psi, ZeRO 2 1 + m, ZeRO 3 3 m, ZeRO++ 0.75 (arXiv 1910.02054, 2306.10209). Sequence
    parallelism sends as much as tensor parallelism, unless backward gathers again."""
    found = counted("llama2-7b --layout dp=8,tp=8")["messages"]
    units = {
        name: (one["formula"], one["one_microbatch"])
        for name, one in found.items()
        if "one_microbatch" in one
    }
    assert units == {
        "DP": ("2 Psi", 2),
        "ZeRO 1": ("2 Psi", 2),
        "ZeRO 2": ("(1 + m) Psi", 2),
        "ZeRO 3": ("3 m Psi", 3),
        "ZeRO++, between nodes": ("(0.5 + 0.25 m) Psi", 0.75),
    }
    assert found["ZeRO 3"]["value"] == 3 * 64  # microbatches
    assert found["TP"]["formula"] == found["TP + SP"]["formula"] == "8 s b h (t - 1) / t"
    assert found["TP"]["bytes"] == found["TP + SP"]["bytes"]
    assert found["TP + SP, sp_regather"]["formula"] == "10 s b h (t - 1) / t"
    assert "forward 2 all_reduce; backward 2 all_reduce" in found["TP"]["note"]
    sent = [
        json.loads(run(f"llama2-7b --layout tp=8{sp} --json"))["communication"]["bytes_per_rank"]
        for sp in ("", ",sp=true")
    ]
    assert sent[1]["tp"] == pytest.approx(sent[0]["tp"], rel=0.01)


def test_messages_of_context_and_expert_ranks() -> None:
    """The terms are what a block adds to the bytes that the plan predicts for the axis."""
    for layout, name, formula in (
        ("llama2-7b --layout cp=8", "CP, ring", "1 s b h (6 c - 7) / c"),
        ("llama2-7b --layout cp=8,cp_method=ulysses", "CP, ulysses", "8 s b h (c - 1) / c^2"),
        ("llama3-8b --layout cp=8,cp_method=ulysses", "CP, ulysses", "5 s b h (c - 1) / c^2"),
        ("llama2-7b --layout cp=8,cp_method=all_gather", "CP, all_gather", "6 s b h (c - 1) / c"),
        ("llama3-8b --layout cp=8,cp_method=all_gather", "CP, all_gather", "1.5 s b h (c - 1) / c"),
        ("mixtral-8x7b --layout dp=8,ep=8", "EP", "4 k s b h (e - 1) / e"),
        ("mixtral-8x7b --layout dp=4,tp=2,sp=true,ep=4", "EP", "4 k s b h (e - 1) / e / t"),
        ("mixtral-8x7b --layout dp=4,tp=2,sp=true,ep=8,ep_fold=true", "EP", "4 k s b h (e - 1) / e / t"),
    ):
        sizes = "--set layout.recompute=none --set train.global_batch_size=32 --set train.microbatch_size=1"
        found = counted(f"{layout} {sizes}")["messages"]
        assert found[name]["formula"] == formula, layout
        axis, microbatches = ("cp", 32) if "cp=" in layout else ("ep", 4 if "dp=8" in layout else 8)
        whole = microbatches * 32 * found[name]["bytes"]
        assert found[f"this plan, {axis}"]["value"] == pytest.approx(whole, rel=0.02), layout
    assert (
        "forward 7 send; backward 14 send"
        in counted("llama2-7b --layout cp=8")["messages"]["CP, ring"]["note"]
    )


def test_interleaving_multiplies_the_messages() -> None:
    """By v for a rank between others; over all boundaries from p - 1 to p v - 1."""
    plain, looped = (counted(layout)["messages"] for layout in (f"{PIPELINE} --layout pp=4", INTERLEAVED))
    assert looped["this plan, pp"]["value"] == 2 * plain["this plan, pp"]["value"]
    assert plain["PP"]["formula"] == looped["PP"]["formula"] == "2 s b h m (p v - 1)"
    assert looped["PP"]["value"] / plain["PP"]["value"] == 7 / 3


def test_utilisation_of_the_hardware() -> None:
    """Full recomputation repeats forward: 4 / 3 of the blocks' FLOPs. Without it both are equal."""
    for mode, low, high in (("none", 1.0, 1.0), ("selective", 1.0, 1.0), ("full", 1.32, 4 / 3)):
        found = json.loads(run(f"llama2-7b --layout dp=8,zero=3,recompute={mode} --json"))
        assert low <= found["hfu"] / found["mfu"] <= high
    assert "HFU" in run("llama2-7b --layout dp=8,zero=3")


@pytest.mark.parametrize("option", ["--as paperr", "--only x", "--flops 0", "--psi nan"])
def test_conventions_that_there_are_not(option: str) -> None:
    result = CliRunner().invoke(app, ["plan", "terms", "llama2-7b", "--layout", "dp=1", *option.split()])
    assert isinstance(result.exception, UserError)
    assert option in str(result.exception)


@pytest.mark.parametrize(
    "name", ["bert-base-mlm", "deepseek-v3", "llama2-7b", "mixtral-8x7b", "moe-tiny", "quickstart"]
)
def test_terms_of_every_architecture(name: str) -> None:
    """Parts add up to the model, and states of this program to what is predicted."""
    recipe = load(name, ["model.vocab_size=32000", "train.microbatch_size=1"], "dp=1")
    plan = predict(recipe, parse("h100"))
    found = terms(Asked(plan, "fivefold", 1e9))
    model = plan.setting.model
    parts = {one.name: one.value for one in found["parameters"]}
    names = {part_of(name) for name in card_of(model).parameters}
    assert sum(parts[part] for part in names) == parts["model"]
    kept = {one.name: one.value for one in found["states"]}
    assert kept["ZeRO 0"] == pytest.approx(kept["this plan"], rel=1e-6)
    symbols = Asked(plan, "fivefold", 1e9).symbols
    for section in found.values():
        for one in section:
            if one.formula and one.unit != "Psi":
                assert evaluate(one.formula, symbols) == pytest.approx(one.value, rel=1e-6), one.name


def test_experts_have_ranks_of_their_own() -> None:
    """With expert parallelism the formulas of the states are the prediction, too; with sp ranks have whole experts."""
    more = ("tp=2,zero=0", "tp=2,zero=1", "tp=2,zero=2", "tp=2,zero=3", "tp=2,sp=true,zero=1")
    for layout in (*more, "tp=2,sp=true,ep_fold=true,zero=1", "tp=4,sp=true,ep_fold=true,zero=2"):
        zero = int(layout[-1])
        found = counted(f"mixtral-8x7b --layout dp=16,ep=8,{layout} --only states")["states"]
        assert found[f"ZeRO {zero}"]["value"] == pytest.approx(found["this plan"]["value"], rel=0.001)


def test_formulas_are_read_as_printed() -> None:
    sizes = {"L": 3.0, "d": 2.0, "n": 4.0, "Psi": 5.0}
    assert evaluate("L (4 d^2 + 4 d)", sizes) == 3 * (16 + 8)
    assert evaluate("2 (n - 1) / n 2 Psi", sizes) == 15


def test_defaults_of_adam() -> None:
    """The paper's (arXiv 1412.6980), but for beta2: docs/optimizers.md says why."""
    found = json.loads(CliRunner().invoke(app, ["optimizers", "--json", "--only", "adam,radam"]).output)
    adam, radam = (one["fields"] for one in found["optimizers"])
    assert (adam["betas"], adam["eps"]) == ([0.9, 0.95], 1e-8)
    assert radam["betas"] == [0.9, 0.999]
