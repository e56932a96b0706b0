"""`fivefold draw`: what the picture says is what the ranks hold."""

import json
import re
import xml.etree.ElementTree as ET
from collections import Counter

import pytest

from fivefold.cli.main import main
from fivefold.observe.holding import holding
from fivefold.observe.layout_picture import to_svg, to_text
from fivefold.recipe import count_parameters, load, resolve
from fivefold.spread.layout import Layout
from fivefold.spread.layout_text import equation

SETS = ["model.layers=8", "model.heads=4", "model.tie_embeddings=false", "train.global_batch_size=16"]
LAYOUTS = [
    "dp=1", "dp=2,tp=2,zero=3", "dp_replicate=2,dp_shard=2,zero=1,cp=2", "pp=4,tp=2", "cp=4,cp_method=ulysses",
    "pp=2,schedule=interleaved,virtual_stages=2,dp=2", "pp=2,schedule=zbv,virtual_stages=2",
]  # fmt: skip


def recipe_of(layout: str, *sets: str):
    recipe = resolve(load("quickstart", [*SETS, *sets], layout), vocab_size=4096)
    return recipe, Layout.from_recipe(recipe.layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_ranks_together_hold_everything_once(layout):
    """Sequences x tokens are cut among data and context ranks; blocks among stages; what is kept adds up."""
    recipe, wanted = recipe_of(layout)
    ranks = [holding(recipe, wanted, rank) for rank in range(wanted.ranks)]
    copies = wanted.tp * wanted.pp
    cells = [
        (row, token)
        for found in ranks
        for row in range(*found.rows)
        for start, stop in found.tokens
        for token in range(start, stop)
    ]
    assert sorted(cells) == sorted([(row, token) for row in range(16) for token in range(256)] * copies)
    blocks = [block for found in ranks for part in found.stages.values() for block in part]
    assert sorted(blocks) == sorted([*range(8)] * (wanted.ranks // wanted.pp))
    assert (
        sum(found.first for found in ranks) == sum(found.last for found in ranks) == wanted.ranks // wanted.pp
    )
    if wanted.tp == 1:  # norms are whole on every tensor rank
        groups = wanted.ranks // (wanted.pp * max(1, wanted.dp_shard * wanted.cp if wanted.zero else 1))
        assert sum(found.keeps for found in ranks) == groups * count_parameters(recipe.model)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pictures_name_every_rank(layout):
    recipe, wanted = recipe_of(layout)
    text, svg = to_text(recipe, wanted), to_svg(recipe, wanted, "<title>")
    assert equation(wanted) in text
    root = ET.fromstring(svg)
    names = [node.text for node in root.iter() if node.get("class") == "name"]
    assert names == [f"rank {rank}" for rank in range(wanted.ranks)]
    assert len(re.findall(r"(?m)^\d+ ", text[text.index("rank  ") :])) == wanted.ranks
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    for box in root.iter("{http://www.w3.org/2000/svg}rect"):
        if box.get("class") != "paper":
            assert float(box.get("x", 0)) + float(box.get("width", 0)) <= width
            assert float(box.get("y", 0)) + float(box.get("height", 0)) <= height


def test_experts_are_shown():
    recipe, wanted = recipe_of("dp=4,ep=2", "model.arch=moe", "model.experts=8")
    assert [holding(recipe, wanted, rank).experts for rank in range(4)] == [range(4), range(4, 8)] * 2
    assert "experts 4-7" in to_svg(recipe, wanted)


def boxes(kind: str, svg: str) -> list[list[float]]:
    """[x, width] of the rectangles of a kind, without the legend's."""
    found = [
        node for node in ET.fromstring(svg).iter() if node.get("class") == kind and node.get("y") != "56"
    ]
    return [[float(node.get("x", 0)), float(node.get("width", 0))] for node in found]


def test_experts_and_their_states_are_pictured_as_divided():
    """Layers: embedding, 8 blocks, head. The lower half of a block is its experts: half of them on each rank, with
    states that no other rank shares; those of everything else are shared by two."""
    recipe, wanted = recipe_of("dp=2,ep=2,zero=1", "model.arch=moe", "model.experts=8")
    svg = to_svg(recipe, wanted)
    kinds = (("has", {74.0: 20, 37.0: 16}), ("keeps", {37.0: 36}))
    for kind, widths in kinds:
        assert dict(Counter(width for _, width in boxes(kind, svg))) == widths
    lent = to_svg(recipe_of("dp=2,zero=3")[0], recipe_of("dp=2,zero=3")[1])
    assert [len(boxes(kind, lent)) for kind in ("has", "lent", "keeps")] == [0, 20, 20]
    assert "gathered for each use" in lent


def test_the_sequence_is_pictured_as_divided():
    """cp=2 as a ring, and sp in it: each rank's piece of its own tokens, in their order."""
    recipe, wanted = recipe_of("cp=2,tp=2,sp=true")
    ranks = [holding(recipe, wanted, rank) for rank in range(4)]
    assert [found.tokens for found in ranks[::2]] == [((0, 64), (192, 256)), ((64, 192),)]
    assert [found.between for found in ranks] == [((0, 64),), ((192, 256),), ((64, 128),), ((128, 192),)]
    assert "0-63 and 192-255  192-255" in to_text(recipe, wanted)
    svg = to_svg(recipe, wanted)
    assert sum(width for _, width in boxes("sees", svg)) == pytest.approx(74)
    assert sum(width for _, width in boxes("whole", svg)) == pytest.approx(2 * 74)


def test_sites_are_consecutive_ranks():
    """As the mesh numbers them: a site has a whole pipeline."""
    recipe, wanted = recipe_of("pp=2,dp_replicate=2", "sync.method=diloco")
    ranks = [holding(recipe, wanted, rank) for rank in range(4)]
    assert [(found.site, found.coordinates["pp"]) for found in ranks] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [found.rows for found in ranks] == [(0, 8), (0, 8), (8, 16), (8, 16)]
    assert [found.first for found in ranks] == [True, False, True, False]
    assert "site 1, pp 0, dp_replicate 1" in to_text(recipe, wanted)


def test_large_layouts_are_cut_short():
    recipe, wanted = recipe_of("dp=16,tp=4,cp=4", "train.global_batch_size=16")
    assert "... and 192 more ranks" in to_text(recipe, wanted)
    assert "... and 192 more ranks" in to_svg(recipe, wanted)


def test_command(tmp_path, capsys):
    sets = [f"--set={change}" for change in SETS]
    main_(["draw", "quickstart", *sets, "--layout", "pp=2", "--out", str(tmp_path / "out"), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert "pp 2 x dp_replicate 1 x dp_shard 1 x cp 1 x tp 1 = 2 ranks" in found["text"]
    assert "schedule 1f1b" in found["text"]
    for path in found["pictures"].values():
        ET.parse(path)
    assert set(found["pictures"]) == {"layout", "schedule"}


def main_(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code in (0, None)
