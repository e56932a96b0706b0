"""`fivefold compare`: three criteria of each form of parallelism, when messages are sent, and when they hide."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import observe_browser
import pytest
from observe_page import check_contrast, check_drawn, check_structure
from typer.testing import CliRunner

from fivefold.cli.main import app, main
from fivefold.errors import UserError
from fivefold.models.section import ModelSection
from fivefold.observe import format as words_of
from fivefold.recipe import Recipe, count_parameters, load, resolve_model
from fivefold.schedules.timelines import COMPUTE, WAIT
from fivefold.sharding.layout import Layout, to_text
from fivefold.sharding.layout import parse as fields
from fivefold_plan.cluster import measured
from fivefold_plan.cluster.clusters import parse
from fivefold_plan.cluster.devices import Cluster, of_table
from fivefold_plan.cluster.measured import assumed_table
from fivefold_plan.commands.lessons import criteria_table
from fivefold_plan.lessons import overlap, pictures
from fivefold_plan.lessons.compare import (
    DIMENSION_OF,
    TECHNIQUES,
    Row,
    compare,
    data_units,
    moments,
    named,
    redundant,
)
from fivefold_plan.lessons.compare import words as message_words
from fivefold_plan.memory import memory, model_states
from fivefold_plan.messages import volume
from fivefold_plan.predict import predict
from fivefold_plan.setting import FIVEFOLD, Setting, setting
from fivefold_plan.time import cost, stage_costs, time
from fivefold_plan.time.cost import stream
from fivefold_plan.time.timeline import timeline

RUNNER = CliRunner()
PROGRAM = observe_browser.find()
PLAIN = ["layout.recompute=none", "train.microbatch_size=1"]


def model(**changes: Any) -> ModelSection:
    sizes: dict[str, Any] = {"layers": 8, "dim": 1024, "heads": 8, "ffn_dim": 4096, "seq_len": 1024} | changes
    return resolve_model(ModelSection(**sizes), vocab_size=64)


def of(layout: str, m: int = 4, on: Cluster | None = None, **changes: Any) -> Setting:
    values: dict[str, Any] = fields(layout)
    return setting(model(**changes), Layout(**values), on or parse("h100"), 1, m)


def rows_of(recipe: str, ranks: int, *sets: str) -> dict[str, Row]:
    found = compare(load(recipe, [*PLAIN, *sets], "dp=1"), parse(f"h100:{ranks}"), ranks)
    return {row.technique: row for row in found}


@pytest.fixture(scope="module")
def llama() -> dict[str, Row]:
    return rows_of("llama-7b", 8)


def test_it_answers_without_torch(tmp_path: Path) -> None:
    """Table, picture, page and thresholds of a recipe, in one process."""
    code = (
        "import sys; from fivefold.cli.main import main\n"
        "for more in (['--picture', 'a.svg', '--page', 'b.html'], ['--overlap', '--picture', 'c.svg']):\n"
        "    try: main(['compare', 'llama-7b', '--cluster', 'h100:8', *more])\n"
        "    except SystemExit as end: assert not end.code, end.code\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {file.name for file in tmp_path.iterdir()} == {"a.svg", "b.html", "c.svg"}


def test_it_answers_within_two_seconds() -> None:
    """Of the processor, which other programs do not slow down: a process of its own, with all imports."""
    process = subprocess.Popen(
        [sys.executable, "-m", "fivefold", "compare", "llama-7b", "--cluster", "h100:8"],
        stdout=subprocess.DEVNULL,
    )
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    assert used.ru_utime + used.ru_stime <= 2.0


def test_a_row_for_each_technique(llama: dict[str, Row]) -> None:
    assert list(llama) == ["one device", *(technique.name for technique in TECHNIQUES)]
    assert {name for name, row in llama.items() if row.plan is None} == {"EP"}
    assert llama["EP"].why == "the model has no experts"
    assert all(
        row.plan and row.plan.ranks == 8 for name, row in llama.items() if name not in ("EP", "one device")
    )
    assert {row.plan.setting.sizes.B for row in llama.values() if row.plan} == {1}


def test_what_does_not_divide_is_said() -> None:
    rows = rows_of("llama-7b", 64)
    assert rows["TP"].layout == "dp=2,tp=32"  # 32 heads
    assert rows["TP"].why.startswith("layout.tp = 64 must divide model.heads = 32")
    assert rows["PP"].layout == "pp=32,dp=2"
    assert "more than model.layers = 32" in rows["PP"].why
    assert not rows["CP"].why
    small = rows_of("llama-7b", 64, "train.global_batch_size=7")
    assert small["DDP"].plan is None
    assert "64 data-parallel ranks need at least one microbatch each" in small["DDP"].why


def test_what_sequence_parallelism_leaves_whole_is_said() -> None:
    rows = rows_of("mixtral-8x7b", 8)
    share, modules = rows["TP + SP"].undivided
    assert modules == ["mlp.experts"]
    parts = {name: model_states.rank_elements(row.plan.setting)[0].computes
             for name, row in rows.items() if row.plan}  # fmt: skip
    more = (parts["TP + SP"] - parts["TP"]) / parts["DDP"]
    assert share * 7 / 8 == pytest.approx(more, rel=1e-9)
    assert [name for name, row in rows.items() if row.plan and row.undivided[0]] == ["TP + SP"]
    said = "\n".join(criteria_table([*rows.values()], ""))
    assert f"TP + SP: mlp.experts ({share:.1%} of the parameters) are not cut by tp, so with sp" in said


def test_redundant_computing_by_reason(llama: dict[str, Row]) -> None:
    """Each technique repeats what it is known to repeat, and nothing else."""
    reasons = {
        name: {part for part, share in row.redundant.parts.items() if share > 1e-12}
        for name, row in llama.items()
        if row.plan
    }
    assert reasons["one device"] == reasons["ZeRO-1"] == reasons["ZeRO-2"] == reasons["ZeRO-3"] == set()
    assert reasons["PP"] == set()  # its idle time is apart
    assert reasons["DDP"] == {"update"}
    assert reasons["CP"] == {"sums", "update"}
    assert reasons["TP"] == {"operations", "sums", "update"}  # of norms, which are whole everywhere
    assert llama["TP"].redundant.operations > 10 * llama["TP + SP"].redundant.operations > 0
    assert llama["PP"].idle > 0
    assert llama["DDP"].idle == 0


def test_ranks_do_together_what_one_process_does(llama: dict[str, Row]) -> None:
    """With ZeRO AdamW does not find the largest weight on its way: the masters are read once more."""
    one, s = (
        llama["one device"].redundant.useful,
        predict(load("llama-7b", PLAIN, "dp=1"), parse("h100")).setting,
    )
    read = stream(4 * count_parameters(s.model), s.cluster.device, "optimizer", s.dtype)
    for name, more in (("DDP", 0.0), ("ZeRO-1", read), ("ZeRO-3", read), ("PP", 0.0)):
        assert 8 * llama[name].redundant.useful == pytest.approx(one + more, rel=1e-9), name


def test_replicas_repeat_the_update() -> None:
    s = of("dp=4")
    (own,) = model_states.rank_elements(s)
    assert redundant(s).update == pytest.approx(3 / 4 * time.update(s, own))
    assert redundant(of("dp=4,zero=1")).update == 0


def test_full_recomputation_repeats_forward() -> None:
    none, full = (replace(of(f"dp=1,recompute={mode}"), software=QUIET) for mode in ("none", "full"))
    _, costs = stage_costs.parts(full).operations[False, False]
    forward = full.microbatches * full.model.layers * sum(c.forward for c in costs)
    found = redundant(full)
    assert found.recompute == pytest.approx(forward)
    assert found.recompute == pytest.approx(time.step(full).seconds - time.step(none).seconds)


def test_what_sequence_parallelism_saves() -> None:
    """Two norms and two residual sums of each block, of activations that all ranks have: 5 and 6 passes over N D e
    bytes each, and their kernels' starts. And the last norm, which is not compiled: 38 passes."""
    one, cut = (
        redundant(replace(of(f"tp=4{sp}"), software=replace(FIVEFOLD, kernel=0.0))) for sp in ("", ",sp=true")
    )
    s = of("tp=4")
    device = s.cluster.device
    passes = s.model.layers * (2 * 5 + 2 * 6) + 38
    size = passes * s.sizes.N * s.model.dim * s.sizes.e
    seconds = s.microbatches * size / (device.bandwidth * device.streaming)
    assert one.operations - cut.operations == pytest.approx(3 / 4 * seconds)


def test_context_ranks_add_up_whole_gradients() -> None:
    s = of("cp=4")
    blocks, _, end, _ = model_states.elements(s.model, s.layout)
    size = sum(block.computes for block in blocks) + end.computes
    assert redundant(s).sums == pytest.approx(3 / 4 * s.microbatches * stage_costs.accumulate(size, s).weight)


@pytest.mark.parametrize(("m", "passes"), [(1, (2, 2, 2, 3)), (4, (2, 2, 5, 12))])
def test_passes_of_the_model(m: int, passes: tuple[float, ...]) -> None:
    """The lectures' 2 Psi of DDP and ZeRO-1/2, 3 Psi of ZeRO-3; (1 + m) and 3 m with m microbatches."""
    units = [data_units(of(f"dp=8,zero={zero}", m).layout) for zero in range(4)]
    assert tuple(once + m * each for once, each in units) == passes
    for zero in range(4):  # bytes of the planner, by the width of each message
        s = of(f"dp=8,zero={zero}", m)
        gathers = {0: 0, 1: 1, 2: 1, 3: 2 * m}[zero]
        psi = model_states.elements(s.model, Layout())
        whole = sum(block.computes for block in psi[0]) + psi[1].computes + psi[2].computes
        sent = 7 / 8 * whole * (gathers * 2 + (passes[zero] - gathers) * 4)
        assert volume.sent(s)["dp"] == pytest.approx(sent, rel=1e-3)


@pytest.mark.parametrize(
    ("layout", "live"),
    [
        ("pp=4,schedule=gpipe", 16),
        ("pp=4", 4),
        ("pp=4,schedule=interleaved,virtual_stages=2", 5.5),
        ("dp=4", 1),
    ],
)
def test_live_microbatches(layout: str, live: float) -> None:
    """GPipe keeps all m, 1F1B as many as there are ranks."""
    assert memory.live_microbatches(of(layout, 16).layout, 16) == live


def test_messages_of_tensor_parallelism() -> None:
    """Two all-reduces in the forward of a block, two in its backward; with sequence parallelism as many bytes."""
    found = {(one.when, one.what): one for one in moments(of("tp=4"))}
    forward = found["forward of a block", "all_reduce"]
    assert forward.calls == found["backward of a block", "all_reduce"].calls == 2
    assert message_words(forward) == "2 all_reduce over tp"
    assert forward.times == 8 * 4  # blocks and microbatches
    s, cut = of("tp=4"), of("tp=4,sp=true")
    assert volume.sent(cut)["tp"] == pytest.approx(volume.sent(s)["tp"], rel=0.02)


def test_messages_of_data_parallelism() -> None:
    """ZeRO 3 gathers a block before forward and before backward of each microbatch, and scatters its gradients."""
    found = {(one.when, one.what): one for one in moments(of("dp=4,zero=3"))}
    for moment in (("forward", "all_gather"), ("backward", "all_gather"), ("backward", "reduce_scatter")):
        one = found[f"{moment[0]} of a block", moment[1]]
        assert (one.calls, one.times) == (1, 8 * 4)  # blocks and microbatches
    (summed,) = moments(of("dp=4"))
    assert (summed.when, summed.what, summed.times) == ("last backward", "all_reduce", 1)


def test_names_of_layouts() -> None:
    def name(text: str) -> tuple[str, str]:
        values: dict[str, Any] = fields(text)
        return named(Layout(**values))

    assert name("dp=1") == ("one device", "")
    assert name("dp=8,ep=8") == ("EP", "expert")
    assert name("ep=8") == ("EP", "expert")  # its row says why it is impossible
    assert name("dp=8,ep=8,zero=1") == ("ZeRO-1 + EP", "")
    assert name("dp=4,tp=2,sp=true") == ("DDP + TP + SP", "")
    assert name("pp=4,dp=2,zero=1") == ("ZeRO-1 + PP", "")
    assert name("cp=4") == ("CP", "context")


# When messages hide


def ideal(**changes: Any) -> Cluster:
    """A cluster as the formulas assume it: element-wise work, attention and starting cost nothing, all devices are
    equal, and matmuls reach one rate. Links have their bandwidth only."""
    found = parse("h100:8")
    device = replace(
        found.device,
        bandwidth=1e30,
        streaming=1.0,
        attention=(1e9, 1e9),
        units=1,
        spread=0.0,
        matmul=0.75,
        **changes,
    )
    return replace(found, device=device, intra=replace(found.intra, latency=0.0, reduce=None))


QUIET = replace(FIVEFOLD, kernel=0.0, host=0.0, step=0.0)
LARGE = {"layers": 4, "dim": 8192, "heads": 64, "ffn_dim": 32768, "seq_len": 8192}


def ideally(layout: str, m: int = 1, on: Cluster | None = None, B: int = 4, **changes: Any) -> Setting:
    values: dict[str, Any] = fields(layout)
    s = setting(model(**LARGE | changes), Layout(**values), on or ideal(), B, m)
    return replace(s, software=QUIET)


@pytest.mark.parametrize(
    ("layout", "formula"),
    [  # seconds of messages over those of matmuls: F FLOP/s, W bytes/s of a ring, c parameters of a block over D^2
        ("dp=8", lambda s, F, W: 4 * (2 * 7 / 8 / W) * F / (4 * s.sizes.N)),
        ("tp=8", lambda s, F, W: 2 * 2 * (2 * 7 / 8 / W) * 8 * F / (2 * 16 * s.model.dim)),
        ("pp=4", lambda s, F, W: 3 / s.microbatches),
        ("dp=2,pp=2,schedule=interleaved,virtual_stages=2", lambda s, F, W: 1 / (2 * s.microbatches)),
    ],
)
def test_the_planner_has_the_papers_thresholds_under_their_assumptions(
    layout: str, formula: Callable[[Setting, float, float], float]
) -> None:
    """Within 5%: matmuls start and end their tiles, and stages with the embedding or the output layer have more to
    do."""
    s = ideally(layout, 8)
    axis = layout.rpartition("pp" if "pp" in layout else layout[:2])[1]
    rule = next(rule for rule in overlap.rules(s) if rule.axis == axis)
    rates = s.cluster.device.peak[s.rate] * s.cluster.device.matmul, s.cluster.intra.achieved
    assert rule.planned == pytest.approx(formula(s, *rates), rel=0.05)


def test_experts_hide_by_their_width() -> None:
    recipe = load("mixtral-8x7b", PLAIN)
    (row,) = compare(recipe, parse("h100:8"), 8, ["dp=8,ep=8,expert_chunks=4"])
    (rule,) = row.rules
    assert 0 < rule.needed < rule.now == 14336
    assert rule.verdict == "hides"


def tokens(layout: str, share: float, m: int = 1) -> tuple[Setting, float]:
    """(a setting with so many times the tokens from which messages hide, the threshold)."""
    needed = overlap.rules(ideally(layout, m, B=64, seq_len=128))[0].needed
    return ideally(layout, m, B=1, seq_len=round(share * needed / 128) * 128), needed


def test_replicas_hide_from_the_threshold_on() -> None:
    """In the planner's simulation of the step: below it more than the last bucket sticks out."""
    for share, more in ((0.85, True), (1.15, False)):
        s, _ = tokens("dp=8", share)
        (own,) = model_states.rank_elements(s)
        last = sum(seconds for _, seconds, _ in stage_costs.synced(own, s)) / stage_costs.summed_pieces(
            s, own
        )
        waited = timeline(s).waited  # pyright: ignore[reportOptionalMemberAccess]
        assert (waited > 1.05 * last) is more, share


def test_sharded_weights_hide_from_the_threshold_on() -> None:
    """In the planner's simulation: below it a rank waits in the middle of forward or backward for a block."""
    for share, waits in ((0.9, True), (1.1, False)):
        s, _ = tokens("dp=8,zero=3", share, 2)
        found = timeline(s)
        assert found is not None
        middle = [
            span
            for span in found.of(COMPUTE)
            if span.kind == WAIT and "blocks.2" in span.name and span.seconds > 1e-6
        ]
        assert bool(middle) is waits, share


def test_a_ring_hides_from_the_threshold_on() -> None:
    """Exposed seconds of attention, by the planner, with 64 sequences: starting a message counts little then."""
    on = replace(ideal(), device=replace(ideal().device, attention=(0.6, 0.6)))
    needed = overlap.rules(ideally("cp=4", 1, on, 64))[-1].needed
    for share, exposed in ((0.9, True), (1.1, False)):
        s = ideally("cp=4", 1, on, 64, seq_len=round(share * needed / 64) * 64)
        (op,) = (op for op in s.work.block[False, False] if op.name == "attention")
        assert (cost.operation(op, s).sent > 0) is exposed


@pytest.mark.parametrize("width", [512, 16384])
@pytest.mark.parametrize("shared", [0, 1])
def test_rows_hide_behind_a_shared_expert_without_chunks(width: int, shared: int) -> None:
    """The verdict is the planner's: whether it waits for rows on their way to experts."""
    section = ModelSection(
        arch="moe", layers=2, dim=2048, heads=16, seq_len=4096, experts=16, experts_per_token=4, expert_ffn_dim=width,
        shared_experts=shared,
    )  # fmt: skip
    s = setting(resolve_model(section, vocab_size=2048), Layout(dp_replicate=8, ep=8), parse("h100:8"), 2, 1)
    (rule,) = (rule for rule in overlap.rules(s) if rule.technique == "EP")
    (arrival,) = (op for op in s.last_block if op.name == "arrival")
    assert rule.overlaps is bool(shared)
    assert (
        (rule.verdict == "hides") is (cost.operation(arrival, s).sent_forward == 0) is (shared * width > 512)
    )


def test_the_threshold_of_ulysses_hardly_depends_on_the_ranks() -> None:
    """A rank computes 1 / n of the attention and exchanges 1 / n of the tokens, of which it keeps 1 / n. In a ring it
    sends n - 1 times as many. The program waits for Ulysses' messages."""
    on, needed = (
        replace(ideal(), device=replace(ideal().device, attention=(0.6, 0.6))),
        dict[str, list[float]](),
    )
    for method in ("ring", "ulysses"):
        for n in (2, 8):
            rule = overlap.rules(ideally(f"cp={n},cp_method={method}", 1, on))[-1]
            assert rule.overlaps is (method == "ring")
            needed.setdefault(method, []).append(rule.planned)
    few, many = needed["ulysses"]
    assert 1.5 < many / few < 2  # (1 - 1 / 8) / (1 - 1 / 2), and what many messages cost
    few, many = needed["ring"]
    assert many / few > 6


# The command


def test_the_table() -> None:
    done = RUNNER.invoke(app, ["compare", "llama-7b", "--ranks", "8"])
    assert done.exit_code == 0
    for name in ("DDP", "ZeRO-3", "TP + SP", "CP", "PP"):
        assert f"\n  {name} " in done.output
    assert "EP: the model has no experts" in done.output
    assert ", recompute ops:attention+gate" in done.output


def test_the_json() -> None:
    layouts = "pp=4,schedule=gpipe pp=4 dp=2,tp=2"
    done = RUNNER.invoke(
        app,
        [
            "compare",
            "llama-7b",
            "--cluster",
            "h100:4",
            "--layouts",
            layouts,
            "--layouts",
            "dp=8",
            "--overlap",
            "--json",
        ],
    )
    found = json.loads(done.output)
    assert [row["technique"] for row in found["rows"]] == ["PP", "PP", "DDP + TP", "DDP"]
    gpipe, one, both, wrong = found["rows"]
    assert gpipe["live_microbatches"] > one["live_microbatches"] == 4
    assert {rule["technique"] for rule in both["overlap"]} == {"DDP", "TP"}
    assert wrong["layout"] is None
    assert "there are 4 ranks" in wrong["why"]
    assert one["plan"]["memory"]["peak_bytes"] > 0
    assert (
        sum(v for k, v in one["redundant"].items() if k not in ("share", "seconds"))
        == one["redundant"]["share"]
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--layouts", "dq=8"], "'dq' is not an axis"),
        (["--layouts", " "], "no layout is named"),
        (["--cluster", "h100:8", "--ranks", "4"], "has 8 devices"),
        (["--cluster", "h100:8", "--measure"], "--measure runs the layouts here"),
        (["--picture", "/no/such/folder/a.svg"], "there is no folder"),
        (["--set", "model.vocab_size=none", "--set", "data.tokenizer=a.json"], "set model.vocab_size"),
    ],
)
def test_mistakes_are_named(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["compare", "llama-7b", *options])
    assert end.value.code == 2
    assert words in capsys.readouterr().err


def test_the_recipes_own_layout_is_left_out() -> None:
    """llama-7b has 64 ranks, which eight sequences are too few for. Its recomputation stays."""
    sets = ["--set", "train.global_batch_size=8", "--set", "train.microbatch_size=1"]
    done = RUNNER.invoke(app, ["compare", "llama-7b", "--cluster", "h100:8", *sets])
    assert done.exit_code == 0, done.output
    assert ", recompute ops:attention+gate" in done.output


def test_parameter_servers_are_not_compared_with() -> None:
    """The rows are of synchronous ranks, whatever the recipe's are."""
    recipe = load("quickstart", ["sync.method=server", "sync.servers=1"])
    rows = compare(recipe, parse("h100:2"), 2)
    assert all(row.plan is None or row.plan.service is None for row in rows)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("nutshell") / "page.html"
    sets = [part for text in ("model.layers=4", "train.global_batch_size=64") for part in ("--set", text)]
    done = RUNNER.invoke(app, ["compare", "mixtral-8x7b", "--ranks", "8", *sets, "--page", str(path)])
    assert done.exit_code == 0
    return path


def test_the_page_has_five_dimensions(page: Path) -> None:
    text = page.read_text("utf-8")
    for name in ("data", "tensor", "context", "pipeline", "expert"):
        assert f'id="h-{name}"' in text
    assert text.count("<h3>What is sent when</h3>") == text.count("<h3>When it hides</h3>") == 5
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in text


@pytest.mark.skipif(PROGRAM is None, reason=observe_browser.MISSING)
def test_the_page_in_a_browser(page: Path) -> None:
    assert PROGRAM
    with observe_browser.Browser(PROGRAM) as browser:
        for width in (1200, 390):
            for dark in (False, True):
                check_drawn(browser, page, width, dark)
        check_structure(browser)
        parts = [("h2", "color", 7.0), ("td", "color", 7.0), (".aside", "color", 4.5)]
        check_contrast(browser, page, parts)


# The picture, and what --measure adds


class Drawn:
    """A picture as its elements: (class, attributes, title)."""

    def __init__(self, svg: str) -> None:
        every = [(one.tag.partition("}")[2], one) for one in ElementTree.fromstring(svg).iter()]
        self.words = [one.text or "" for tag, one in every if tag == "text"]
        self.bars, self.circles, self.paths = (
            [one for tag, one in every if tag == wanted] for wanted in ("rect", "circle", "path")
        )

    def bar(self, technique: str, kinds: Iterable[str]) -> float:
        """Pixels of a row's bar in a panel: its parts, with the gaps between them."""
        starts = tuple(f"{technique}: {kind} " for kind in kinds)
        return sum(float(one.attrib["width"]) + 0.6 for one in self.bars if title(one).startswith(starts))


def title(one: ElementTree.Element) -> str:
    return "".join(child.text or "" for child in one)


def test_a_bar_for_each_row_and_criterion(llama: dict[str, Row]) -> None:
    """As long as its value, on a scale per panel. A row that is not possible has its reason."""
    drawn = Drawn(pictures.criteria(list(llama.values()), "<title> & more"))
    assert "<title> & more, planned" in drawn.words
    planned = {name: row for name, row in llama.items() if row.plan}
    for kinds, value in (
        (pictures.REASONS, lambda row: row.redundant.share),
        (pictures.COLORS, lambda row: row.plan.peak_bytes),
        (DIMENSION_OF, lambda row: sum(row.plan.sent.values())),
    ):
        most = max(value(row) for row in planned.values())
        for name, row in planned.items():
            wide = drawn.bar(name, kinds)
            assert wide == pytest.approx(pictures.BAR * value(row) / most, abs=2.5), (name, kinds)
    assert drawn.bar("EP", (*pictures.REASONS, *pictures.COLORS, *DIMENSION_OF)) == 0
    assert set(llama) | {"the model has no experts"} <= set(drawn.words)
    assert not drawn.circles


def test_a_curve_for_each_rule(llama: dict[str, Row]) -> None:
    rules = [rule for row in llama.values() if row.plan for rule in row.rules]
    drawn = Drawn(pictures.overlap(list(llama.values()), "title"))
    assert {"title, planned", "planned"} <= set(drawn.words)
    key = 1  # in the picture's legend
    for kind in ("blue", "now", "limit"):
        assert sum(kind in one.get("class", "").split() for one in drawn.paths) == len(rules) + key > 6, kind
    assert len(drawn.circles) == sum(ratio > 0 for rule in rules for _, ratio in rule.points)
    assert {f"{rule.technique}: {rule.what}" for rule in rules} <= set(drawn.words)


@pytest.fixture
def measured_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "load", lambda: assumed_table(cores=2))


HERE = {"memory_bytes": 40 * 2**20, "sent_bytes": {"dp": 5 * 2**20}, "step_s": 1.25}
MEASURE = [
    "compare",
    "quickstart",
    "--ranks",
    "2",
    "--layouts",
    "dp=2 tp=2 dp=3 dp=2",
    "--measure",
    "--steps",
    "5",
]


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch, measured_machine: None) -> list[tuple[list[Layout], int]]:
    """`bench.layouts.measure` without runs: what it was asked for. Tensor parallelism fails."""
    asked: list[tuple[list[Layout], int]] = []

    def measure(recipe: Recipe, layouts: list[Layout], steps: int) -> Iterator[tuple[Layout, Any]]:
        asked.append((layouts, steps))
        yield from ((layout, HERE if layout.tp == 1 else "no room") for layout in layouts)

    monkeypatch.setattr("fivefold_plan.bench.machine.measure_layouts", measure)
    return asked


def test_measure_adds_columns(replaced: list[tuple[list[Layout], int]]) -> None:
    """Each layout runs once. One that failed has a reason; one that is not possible does not run."""
    done = RUNNER.invoke(app, MEASURE)
    assert done.exit_code == 0, done.output
    ((layouts, steps),) = replaced
    assert [(one.dp, one.tp) for one in layouts] == [(2, 1), (1, 2)]
    assert steps == 5
    assert done.stderr.splitlines() == [f"ran {to_text(layout)}" for layout in layouts]
    lines = {line.split()[0]: line.rstrip() for line in done.stdout.splitlines()[3:8] if line.strip()}
    assert re.search(r"fits +memory here +sent here +step s here$", done.stdout.splitlines()[3])
    here = f"yes +{words_of.memory_text(40 * 2**20)} +dp {words_of.size(5 * 2**20)} +1.25$".replace(
        ".", r"\."
    )
    assert re.search(here, lines["DDP"]), lines
    assert re.search(r"yes +- +- +-$", lines["TP"]), lines
    assert "  TP: was not measured: no room" in done.stdout


def test_measure_in_json(replaced: list[tuple[list[Layout], int]]) -> None:
    """`sent_as_counted` is what the measurement would count, if the prediction is right."""
    done = RUNNER.invoke(app, [*MEASURE, "--json"])
    rows = json.loads(done.stdout)["rows"]
    assert [row.get("measured") for row in rows] == [HERE, "no room", None, HERE]
    expected = compare(load("quickstart"), parse("local:2"), 2, ["dp=2", "tp=2"])
    assert [row["sent_as_counted"] for row in rows[:2]] == [row.sent(as_counted=True) for row in expected]
    assert "sent_as_counted" not in rows[2]


def test_measure_draws_rings(replaced: list[tuple[list[Layout], int]], tmp_path: Path) -> None:
    """One for memory and one for bytes sent of each measured row, on the scale of the bars."""
    path = tmp_path / "criteria.svg"
    assert RUNNER.invoke(app, [*MEASURE, "--picture", str(path)]).exit_code == 0
    drawn = Drawn(path.read_text("utf-8"))
    rings = [one for one in drawn.circles if "ring" in one.get("class", "")]
    assert [title(one) for one in rings] == [f"measured: {words_of.memory_text(40 * 2**20)}"] * 2 + [
        f"measured: {words_of.size(5 * 2**20)}"
    ] * 2
    rows = compare(load("quickstart"), parse("local:2"), 2, ["dp=2", "tp=2"])
    plan = rows[0].plan
    assert plan is not None
    pairs = (pictures.COLORS, plan.peak_bytes), (DIMENSION_OF, sum(plan.sent.values()))
    for panel, ((kinds, predicted), value) in enumerate(zip(pairs, (40 * 2**20, 5 * 2**20), strict=True), 1):
        place = float(rings[2 * panel - 2].attrib["cx"]) - pictures.LEFT - panel * pictures.PANEL
        wide = drawn.bar("DDP", kinds) / 2  # of two rows with this layout
        assert place / wide == pytest.approx(value / predicted, rel=0.05)
    assert any("rings: measured here" in words for words in drawn.words)


@pytest.mark.slow
def test_the_command_measures(measured_machine: None) -> None:
    """Two layouts, run by `fivefold compare`: bytes are the predicted ones, and the table has them."""
    sets = ["model.layers=2", "model.dim=64", "model.heads=2", "model.ffn_dim=128", "model.seq_len=64",
            "train.global_batch_size=4", "train.microbatch_size=1"]  # fmt: skip
    command = ["compare", "quickstart", "--ranks", "2", "--layouts", "dp=2 tp=2", "--measure", "--steps", "4"]
    done = RUNNER.invoke(app, [*command, *(word for one in sets for word in ("--set", one)), "--json"])
    assert done.exit_code == 0, done.output
    for row in json.loads(done.stdout)["rows"]:
        assert row["measured"]["sent_bytes"] == row["sent_as_counted"]
        assert row["measured"]["memory_bytes"] == pytest.approx(row["plan"]["memory"]["peak_bytes"], rel=0.2)
        assert row["measured"]["step_s"] > 0


@pytest.mark.slow
def test_measured_beside_predicted() -> None:
    """Real ranks: bytes are those that were predicted, memory is near them."""
    from fivefold_plan.bench.machine import measure_layouts

    sets = [
        "model.layers=2", "model.dim=64", "model.heads=2", "model.ffn_dim=128", "model.seq_len=64",
        "train.global_batch_size=4", "train.microbatch_size=1", "optim.warmup_steps=1",
    ]  # fmt: skip
    recipe, machine = load("quickstart", sets), replace(of_table(assumed_table(2)), devices=2)
    found = dict(measure_layouts(recipe, [Layout(dp_replicate=2), Layout(tp=2), Layout(tp=3)], 4))
    rows = compare(recipe, machine, 2, ["dp=2", "tp=2"])
    for layout, row in zip(found, rows, strict=False):
        figures = found[layout]
        assert isinstance(figures, dict)
        assert figures["sent_bytes"] == row.sent(as_counted=True)
        assert row.plan is not None
        assert figures["memory_bytes"] == pytest.approx(row.plan.peak_bytes, rel=0.05)
        assert figures["step_s"] > 0
    assert "layout.tp = 3 must divide model.heads = 2" in str(found[Layout(tp=3)])


def test_a_layout_that_cannot_be_read_is_no_row() -> None:
    with pytest.raises(UserError, match="not of the form"):
        compare(load("quickstart"), parse("h100:2"), 2, ["dp"])
