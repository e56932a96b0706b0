"""`fivefold draw`: what the picture says is what the ranks hold."""

import json
import re
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fivefold.cli.main import main
from fivefold.kernels.tiling import Tiling
from fivefold.observe import layout_picture, timelines
from fivefold.observe.layout_picture import COLORS, holding, to_svg, to_text
from fivefold.parallel.mesh import divided
from fivefold.recipe import count_parameters, load, resolve
from fivefold.schedules.priority import Layer, Line, Simulation
from fivefold.sharding.layout import Layout, equation
from fivefold_plan.cluster.clusters import parse
from fivefold_plan.commands.draw import offloaded
from fivefold_plan.predict import predict
from fivefold_plan.time.offload import ways

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
    assert [holding(recipe, wanted, rank).experts for rank in range(4)] == [(0, 4), (4, 8)] * 2
    assert "experts 4-7" in to_svg(recipe, wanted)


def boxes(kind: str, svg: str) -> list[list[float]]:
    """[x, width] of the rectangles of a kind, without the legend's."""
    found = [
        node
        for node in ET.fromstring(svg).iter()
        if node.get("class") == COLORS[kind] and node.get("y") != "56"
    ]
    return [[float(node.get("x", 0)), float(node.get("width", 0))] for node in found]


def test_experts_and_their_states_are_pictured_as_divided():
    """Layers: embedding, 8 blocks, head. The lower half of a block is its experts: half of them on each rank, with
    states that no other rank shares; those of everything else are shared by two."""
    recipe, wanted = recipe_of("dp=2,ep=2,zero=1", "model.arch=moe", "model.experts=8")
    svg = to_svg(recipe, wanted)
    for kind, widths in (("has", {74.0: 20, 37.0: 16}), ("keeps", {37.0: 36})):
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


def test_replica_groups_are_consecutive_ranks():
    """As the mesh numbers them: a replica group has a whole pipeline."""
    recipe, wanted = recipe_of("pp=2,dp_replicate=2", "sync.method=diloco")
    ranks = [holding(recipe, wanted, rank) for rank in range(4)]
    assert [(found.replica_group, found.coordinates["pp"]) for found in ranks] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]
    assert [found.rows for found in ranks] == [(0, 8), (0, 8), (8, 16), (8, 16)]
    assert [found.first for found in ranks] == [True, False, True, False]
    assert "group 1, pp 0, dp_replicate 1" in to_text(recipe, wanted)


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


def test_a_few_of_many_microbatches_are_drawn(tmp_path, capsys):
    """1f1b with p ranks and m microbatches idles for (p - 1) / (m + p - 1) of the step."""
    sets = [f"--set={change}" for change in (*SETS, "train.global_batch_size=64", "train.microbatch_size=1")]
    text, pictures = drawn(capsys, tmp_path, "quickstart", *sets, "--layout=pp=2")
    assert f"schedule 1f1b: {1 / 65:.1%} idle" in text
    assert f"4 of 64 microbatches are drawn: 20.0% idle in these, {1 / 65:.1%} in the step" in text
    assert not {"F4", "F63"} & set(re.findall(r"F\d+", text))
    found = texts(pictures["schedule"])
    assert f"1f1b, simulated, 4 of 64 microbatches (whole step: {1 / 65:.1%} idle)" in found
    assert "2 ranks, 15 forwards, 20.0% idle" in found
    assert not [words for words in found if words.endswith(" s")]


def main_(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code in (0, None)


def drawn(capsys, out: Path, *arguments: str) -> tuple[str, dict[str, ET.Element]]:
    """(text, pictures by name) of a command."""
    main_(["draw", *arguments, "--out", str(out), "--json"])
    found = json.loads(capsys.readouterr().out)
    return found["text"], {name: ET.parse(path).getroot() for name, path in found["pictures"].items()}


def texts(root: ET.Element) -> list[str]:
    return [node.text or "" for node in root.findall(".//{*}text")]


def test_who_computes_which_queries_and_keys(tmp_path, capsys):
    """4 x 4 chunks under a causal mask: rank 0 has the first and the last one."""
    text, pictures = drawn(capsys, tmp_path, "llama-7b", "--layout", "cp=2")
    assert "share of each rank, zig-zag: 50%, 50%" in text
    assert "neighbouring parts: 25%, 75%" in text
    root = pictures["context"]
    tiles = [node.find("{*}title") for node in root.findall(".//{*}rect")]
    names = Counter(node.text for node in tiles if node is not None)
    assert len(names) == 16, "of 10 tiles the plans agree on 4"
    assert names["rank 0: queries 3, keys 0"] == 1
    assert names["rank 1: queries 3, keys 0"] == 1
    assert names["rank 0: queries 0, keys 0"] == 2
    halves = [node for node in root.findall(".//{*}rect") if "half" in node.get("class", "")]
    assert len(halves) == 2 * 4
    assert "rank 1: 75%" in texts(root)
    for layout in ("dp=2", "cp=2,cp_method=ulysses"):
        assert "context" not in drawn(capsys, tmp_path, "llama-7b", "--layout", layout)[1]


def test_attention_without_a_mask_is_even_in_both():
    found = layout_picture.divisions(Layout(cp=4), True)
    every, causal = (layout_picture.seen_pairs(8, mask) for mask in (False, True))
    assert [layout_picture.work_shares(owners, every) for owners in found.values()] == [[0.25] * 4] * 2
    assert layout_picture.work_shares(found["zig-zag"], causal) == pytest.approx([0.25] * 4)
    assert layout_picture.work_shares(found["neighbouring parts"], causal) == pytest.approx(
        [1 / 16, 3 / 16, 5 / 16, 7 / 16]
    )


@pytest.mark.parametrize("causal", [True, False])
def test_what_documents_deal_is_drawn(causal):
    """Of one sequence, in blocks: every pair that documents leave is in a square, and the shares are those dealt."""
    first = np.repeat([[0, 100, 400, 410]], [100, 300, 10, 102], axis=1)
    tiling, layout = Tiling(first), Layout(cp=2, cp_method="all_gather")
    found = layout_picture.divisions(layout, causal, tiling)
    seen = layout_picture.seen_pairs(16, causal, tiling)
    behind = np.arange(512) + 1 if causal else np.repeat([100, 400, 410, 512], [100, 300, 10, 102])
    assert seen.sum() * 32**2 == (behind - first[0]).sum()
    work = [sum((behind - first[0])[a:b].sum() for a, b in columns) for columns in tiling.dealt(2, causal)]
    shares = layout_picture.work_shares(found["dealt by documents"], seen)
    assert shares == pytest.approx([part / sum(work) for part in work])
    assert max(shares) < 0.52 < max(layout_picture.work_shares(found["zig-zag"], seen))
    root = ET.fromstring(layout_picture.context_svg(found, seen, "documents"))
    assert len(root.findall(".//{*}rect/{*}title")) == 3 * (seen > 0).sum()
    assert "dealt by documents" in texts(root)


@pytest.mark.parametrize("begins", [[0], [0, 20, 200, 212]])
def test_ranks_hold_the_tokens_that_the_trainer_deals_them(begins):
    """With gathered keys the documents decide; without masks a sequence is cut zig-zag."""
    documents = Tiling(np.repeat([begins], np.diff([*begins, 256]), axis=1))
    given = documents if len(begins) > 1 else None
    for masks in ("true", "false"):
        recipe, layout = recipe_of("cp=4,cp_method=all_gather,tp=2,sp=true", f"data.document_masks={masks}")
        first = documents.first_BT if masks == "true" else None
        for rank in (0, 3, 6):
            mesh: Any = SimpleNamespace(
                layout=layout,
                size={"cp": 4}.get,
                index={"cp": rank // 2}.get,
                causal=True,
                further=0,
                device=torch.device("cpu"),
            )
            batch: Any = divided(torch.zeros(1, 256), torch.zeros(1, 256), first, mesh)
            mine = batch.positions.tolist()
            holds = holding(recipe, layout, rank, given)
            assert [token for span in holds.tokens for token in range(*span)] == mine
            between = [token for span in holds.between for token in range(*span)]
            assert between == mine[rank % 2 * 32 :][:32]
        text, picture = (
            to_text(recipe, layout, given),
            texts(ET.fromstring(to_svg(recipe, layout, "", given))),
        )
        note = "tokens as dealt in " + ("one document" if given is None else "the run's first sequence")
        assert (note in text) == any(note in words for words in picture) == (masks == "true")


OFFLOADED = [
    "llama2-13b", "--cluster", "h100:1", "--set=train.global_batch_size=8", "--layout",
    "dp=1,recompute=full,offload=",
]  # fmt: skip


def test_offload_is_drawn_as_it_is_planned(tmp_path, capsys):
    """The lanes of the link and of the host's update, the whole step's seconds, and each way with its device's
    share."""
    *options, layout = OFFLOADED
    text, pictures = drawn(capsys, tmp_path, *options, f"{layout}states:host")
    plan = predict(load("llama2-13b", ["train.global_batch_size=8"], f"{layout}states:host"), parse("h100:1"))
    assert f"3 of 8 microbatches of a step of {plan.step.seconds:.4g} s" in text
    names = [node.text for node in pictures["timeline"].findall(".//{*}title")]
    assert sum(str(name).startswith("link of backward: ") for name in names) == 3
    assert sum(str(name).startswith("host of forward: ") for name in names) == 1
    found = ways(plan.setting)
    assert all("planned" in " ".join(texts(pictures[name])) for name in ("timeline", "offload"))
    shown = " ".join(texts(pictures["offload"]))
    for name, line in found.items():
        assert f"{name}: device busy {line.busy:.0%}" in shown
        assert f"{name}: device busy {line.busy:.0%}, {line.seconds:.3g} s" in text
    assert found["after"].busy < found["beside"].busy < found["early"].busy
    assert [line for line in text.splitlines() if "(the trainer)" in line] == [
        f"  beside: device busy {found['beside'].busy:.0%}, {found['beside'].seconds:.3g} s (the trainer)"
    ]
    text, pictures = drawn(capsys, tmp_path, *options, f"{layout}states:disk")
    assert re.search(r"(?m)^disk +│", text)
    assert "offload" not in pictures, "the ways are those of states in host memory"


@pytest.mark.parametrize(
    ("offload", "update", "own"),
    [("states:host", "beside", "beside"), ("states:host", "early", "early"), ("all:host", "early", "window")],
)
def test_what_the_trainer_does_is_marked(offload, update, own):
    """STRONGHOLD is early updates of blocks that leave. The trainer runs it, so its way is the trainer's."""
    sets = ["train.global_batch_size=8", "optim.grad_clip=0", "faults.on_nonfinite=abort"]
    layout = f"dp=1,recompute=full,offload={offload},offload_update={update}"
    text, _ = offloaded(predict(load("llama2-13b", sets, layout), parse("h100:1")).setting, "a model")
    marked = [line.split(":")[0].strip() for line in text.splitlines() if line.endswith("(the trainer)")]
    assert marked == [own]


def test_a_planned_worker_is_drawn_in_both_orders(tmp_path, capsys):
    options = [
        "gpt2-124m",
        "--layout",
        "dp=3",
        "--set=sync.method=server",
        "--set=train.global_batch_size=24",
    ]
    text, pictures = drawn(capsys, tmp_path, *options, "--cluster", "h100:4")
    sets = ["sync.method=server", "train.global_batch_size=24"]
    for order in ("fifo", "priority"):
        plan = predict(load("gpt2-124m", [*sets, f"sync.order={order}"], "dp=3"), parse("h100:4"))
        assert f"sync.order = {order}: {plan.step.seconds:.4g} s per step" in text
        assert f"sync.order = {order}" in texts(pictures["workers"])
    boxes = Counter(node.get("class") for node in pictures["workers"].findall(".//{*}rect"))
    blocks = 12
    for kind, least in (("a", 4), ("b", 4), ("push", 2), ("pull", 2)):  # two orders, two steps
        assert boxes[timelines.WORKER_COLORS[kind]] >= least * blocks


def test_a_simulated_worker_does_everything_once_per_step():
    layers = [Layer(1, 2, 4, 4), Layer(1, 2, 4, 4)]
    run = Simulation(layers, Line(1, 1, partition=4), iterations=6)
    rows = timelines.rows_of(run.events, run.ends[-3], run.ends[-1])
    assert [box.label for box in rows["computing"] if box.kind == "a"] == ["0", "1"] * 2
    assert [box.label for box in rows["computing"] if box.kind == "b"] == ["1", "0"] * 2
    assert max(box.end for box in rows["computing"]) == pytest.approx(run.ends[-1] - run.ends[-3])
    shown = timelines.workers_text(rows, 20, 2 * timelines.end_of(rows))
    assert [line[-11:] for line in shown.splitlines()] == [" " * 10 + "│"] * 3


def test_a_run_with_servers_is_drawn(tmp_path, capsys):
    """The last steps; who waits how long."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "recipe.toml").touch()
    rows = [
        {
            "worker": w,
            "step": step,
            "share": w,
            "begin": 100.0 + step + w / 4,
            "end": 101.0 + step,
            "waited_s": w / 4,
        }
        for step in range(1, 21)
        for w in (0, 1)
    ]
    path = run / timelines.WORKERS
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    text, pictures = drawn(capsys, tmp_path, str(run))
    steps = timelines.WORKER_STEPS
    assert f"worker 0: {steps} shares, waits 0%; worker 1: {steps} shares, waits 50%" in text
    first, second = (text[text.index(f"worker {w} │") :].splitlines()[0] for w in (0, 1))
    assert set(first[len("worker 0 │") : -1]) == {"A", "B"}
    assert "." in second
    boxes = Counter(node.get("class") for node in pictures["workers"].findall(".//{*}rect"))
    assert [boxes[timelines.WORKER_COLORS[kind]] for kind in ("a", "b", "wait")] == [steps] * 3
    titles = [node.text for node in pictures["workers"].findall(".//{*}title")]
    assert "20: 11 s to 12 s" in titles
    assert not [title for title in titles if str(title).startswith("8: ")]
    path.write_text('{"step": 1}\n')
    with pytest.raises(SystemExit):
        main(["draw", str(run)])
    assert f"{path} is damaged" in capsys.readouterr().err
