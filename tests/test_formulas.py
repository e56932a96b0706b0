"""The paper's formulas beside what autograd saves: equal but for the statistics of two norms."""

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fivefold.cli.main import app
from fivefold.cli.plan_terms import DRAWN
from fivefold.errors import UserError
from fivefold.lessons.formulas import STATISTICS, Shape, rows

GPT3 = [
    "model.layers=96",
    "model.dim=12288",
    "model.heads=96",
    "model.seq_len=2048",
    "train.microbatch_size=1",
]


@pytest.mark.parametrize(
    "shape", [Shape(2048, 1, 12288, 96, 8), Shape(64, 2, 32, 4, 2), Shape(1024, 4, 768, 12)]
)
def test_measured_bytes_are_the_formulas(shape: Shape) -> None:
    found = {row.name: row for row in rows(shape)}
    assert len(found) == (9 if shape.t > 1 else 6)
    tokens = STATISTICS * shape.s * shape.b
    for name, row in found.items():
        pieces = shape.t if "sp" in name else 1
        more = 0 if name in ("attention", "MLP", "full") else tokens / pieces
        assert row.measured == row.bytes + more, name
        assert bool(row.why) == bool(more)


@pytest.mark.parametrize("option", ["--flops 1e12", "--cluster a100:8", "--terms"])
def test_options_that_formulas_ignore_are_refused(option: str) -> None:
    result = CliRunner().invoke(app, ["plan", "gpt2-124m", "--formulas", *option.split()])
    assert isinstance(result.exception, UserError)
    assert f"{option.split()[0]} has no effect with --formulas" in str(result.exception)


def test_formulas_are_drawn(tmp_path: Path) -> None:
    """Bars as long as their bytes, of the recipe's sizes; without tensor ranks only those of one."""
    lengths = {}
    for tp in (8, 1):
        path = tmp_path / f"{tp}.svg"
        command = [
            "plan",
            "gpt3-175b",
            "--layout",
            f"tp={tp}",
            "--formulas",
            "--set",
            "train.microbatch_size=1",
        ]
        result = CliRunner().invoke(app, [*command, "--svg", str(path)])
        assert result.output.endswith(f"{path}\n"), result.output
        bars = [node for node in ET.parse(path).findall(".//{*}rect") if node.find("{*}title") is not None]
        lengths[tp] = [float(bar.get("width", 0)) + 0.6 for bar in bars]  # with the gap behind each
        words = " ".join(node.text or "" for node in ET.parse(path).findall(".//{*}text"))
        assert "a block (1): 34 s b h + 5 a b s^2" in words
        assert "2.9 GB" in words
    found = {row.name: row.bytes for row in rows(Shape(2048, 1, 12288, 96, 8))}
    wanted = [found[name] for name in DRAWN]
    assert [one / lengths[8][0] for one in lengths[8]] == pytest.approx(
        [one / wanted[0] for one in wanted], abs=1e-3
    )
    assert len(lengths[1]) == 3


def test_command_prints_those_of_gpt3() -> None:
    """The lecture: 34 s b h + 5 a b s^2 of GPT-3, 2.87 GB a block."""
    command = [
        "plan",
        "gpt2-124m",
        "--layout",
        "tp=8",
        "--formulas",
        *(x for one in GPT3 for x in ("--set", one)),
    ]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "2,868,903,936" in result.output
    assert "96 blocks without recomputation (5): 256.50 GiB per microbatch" in result.output
    found = json.loads(CliRunner().invoke(app, [*command, "--json"]).output)
    assert found["sizes"] == {"s": 2048, "b": 1, "h": 12288, "a": 96, "t": 8}
    assert found["formulas"][-1]["bytes"] == 34 * 2048 * 12288 / 8
