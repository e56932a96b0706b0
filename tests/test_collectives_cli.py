"""`fivefold collectives`: table, pictures, page, and what it says about bad input."""

import json
import re
from pathlib import Path

import pytest

from fivefold.cli.main import main
from fivefold.cli.options import bytes_of
from fivefold.errors import UserError


def run(*words: str) -> int:
    try:
        main(["collectives", *words])
    except SystemExit as exit_:
        return int(exit_.code or 0)
    return 0


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--ranks", "8", "--size", "4K", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in found["algorithms"]}
    assert (found["size"], found["refused"], len(rows)) == (4096, {}, 15)
    assert found["algorithms"][0]["name"] == "butterfly"
    assert rows["ring"]["rounds"] == 14
    assert rows["ring"]["bytes_per_rank"] == pytest.approx(2 * 7 / 8 * 4096)
    assert rows["ring"]["seconds"] == pytest.approx(14 * (3.4e-6 + 512 / 367.2e9))
    assert run("--ranks", "7", "--size", "4K") == 0
    text = capsys.readouterr().out
    assert "all_reduce of 4.00 KiB on 7 ranks; h100: 367.2 GB/s, 3.4 µs inside a node" in text
    assert re.search(r"butterfly +4 +12.0 KiB +13.6 µs +rank 0 in +small messages", text)
    assert re.search(r"torus_3d +- +needs a product of three numbers, not 7", text)
    assert re.search(r"in_network +- +needs a switch that adds$", text, re.M)
    assert "fastest by size: 4.00 KiB butterfly 13.6 µs" in text


@pytest.mark.parametrize("primitive", ["all_gather", "broadcast", "barrier", "all_to_all"])
@pytest.mark.parametrize("ranks", ["1", "6"])
def test_other_primitives(capsys: pytest.CaptureFixture[str], primitive: str, ranks: str) -> None:
    assert run("--ranks", ranks, "--primitive", primitive, "--topology", "h100:3x2", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert all(row["rounds"] > 0 for row in found["algorithms"]) == (ranks == "6")


def test_drawing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    svg, html = tmp_path / "ring.svg", tmp_path / "ring.html"
    words = ["--ranks", "4", "--draw", "ring", "--svg", str(svg), "--html", str(html)]
    assert run(*words) == 0
    text = capsys.readouterr().out
    assert text.startswith("all_reduce 'ring': 4 ranks, 4 chunks, 6 rounds\nstart ")
    assert text.splitlines()[-2:] == [str(svg), str(html)]
    assert svg.read_text().startswith("<svg ")
    assert "http" not in html.read_text().replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")
    assert run("--ranks", "4", "--svg", str(svg)) == 0  # the fastest
    assert "rabenseifner" in svg.read_text() or "halving_doubling" in svg.read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--draw", "rnig"], "algorithm 'rnig' is unknown; did you mean 'ring'"),
        (["--primitive", "all_redcue"], "primitive: 'all_redcue' is unknown; did you mean 'all_reduce'"),
        (["--ranks", "0"], "--ranks: 0 is not possible; must be at least 1 and at most 128"),
        (["--ranks", "1000"], "--ranks: 1000 is not possible"),
        (["--ranks", "7", "--draw", "torus_2d"], "not 7; the nearest: 6 or 8"),
        (["--size", "16X"], "--size: '16X' is not a size; write 4K, 16M, 1G or a number of bytes"),
        (["--size", "0"], "--size: 0 is not possible; must be at least 1 byte"),
        (["--size", "99999T"], "--size: 99999T is not possible"),
        (["--topology", "h10"], "unknown name 'h10'; did you mean 'h100'"),
        (["--topology", "h100:4"], "topology 'h100:4': 8 ranks need as many devices, but it has 4"),
        (["--topology", "none.toml"], "cluster 'none.toml': cannot be read"),
        (
            ["--html", "nowhere/page.html"],
            "--html nowhere/page.html: cannot be written: there is no folder nowhere",
        ),
    ],
)
def test_bad_input(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert run(*words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1


def test_a_machine_without_table(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FIVEFOLD_CACHE", str(tmp_path))
    assert run("--topology", "local") == 2
    assert "run `fivefold bench collectives` first" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("4K", 4096), ("1.5M", 3 << 19), ("2GiB", 2 << 30), ("16mb", 16 << 20), ("1T", 1 << 40)],
)
def test_sizes(text: str, size: int) -> None:
    assert bytes_of("--size", text) == size


@pytest.mark.parametrize("text", ["", "K", "-4K", "4KK", "1e6", "٤"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(UserError, match="is not a size"):
        bytes_of("--size", text)
