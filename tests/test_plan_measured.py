"""The machine at hand: its table read, interpolated, shared between ranks, priced and calibrated."""

import io
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from fivefold.errors import BusyError, UserError
from fivefold.host import tables
from fivefold.models.operations import Matmul
from fivefold.recipe import Recipe, load
from fivefold.schedules.pipeline import Costs, build, simulate, simulate_oversubscribed
from fivefold_plan.bench import machine as bench
from fivefold_plan.cluster import measured
from fivefold_plan.cluster.calibrate import FinishedRun, fit
from fivefold_plan.cluster.clusters import parse
from fivefold_plan.cluster.devices import Storage, of_table
from fivefold_plan.cluster.measured import ASSUMED_FLOPS, assumed_table
from fivefold_plan.commands import bench as commands_of_bench
from fivefold_plan.messages import communication
from fivefold_plan.messages.communication import Group, collective
from fivefold_plan.predict import Plan, predict
from fivefold_plan.search.search import search
from fivefold_plan.time import cost

SETS = [
    "train.sample_every=0",
    "model.vocab_size=4096",
    "model.layers=8",
    "train.microbatch_size=2",
    "precision.mode=bf16",
]


def recipe(layout: str, *sets: str) -> Recipe:
    return load("quickstart", [*SETS, *sets], layout)


def plan(layout: str, *sets: str, cores: int = 2) -> Plan:
    return predict(recipe(layout, *sets), of_table(assumed_table(cores)))


def test_rates_between_and_beyond_what_was_measured() -> None:
    share = assumed_table().shares[1]
    grid = share.products["bf16"]["forward"]
    grid["512x512x512"], grid["1536x512x512"], grid["4096x192x512"] = 1e11, 4e11, 7e11
    assert share.product(512, 512, 512, "bf16", "forward") == pytest.approx(1e11)
    middle = (512 * 1536) ** 0.5  # half-way in the logarithm: the geometric mean
    assert share.product(middle, 512, 512, "bf16", "forward") == pytest.approx(2e11)
    assert share.product(10**6, 192, 512, "bf16", "forward") == pytest.approx(7e11)


def test_a_product_too_large_to_measure_has_the_rate_of_a_smaller_one() -> None:
    share = assumed_table().shares[1]
    assert "4096x4096x4096" not in share.products["fp32"]["forward"]
    share.products["fp32"]["forward"]["1536x192x1536"] = 3e11
    assert share.product(4096, 192, 4096, "fp32", "forward") == pytest.approx(3e11)


def test_messages_follow_their_points() -> None:
    machine = assumed_table()
    for size, seconds in (
        (1, 1e-4 + 4096 / 1e9),
        (3 << 20, 1e-4 + (3 << 20) / 1e9),
        (1 << 30, 1e-4 + (1 << 30) / 1e9),
    ):
        assert machine.message("all_gather", size, 2, 2) == pytest.approx(seconds)
    # parts of parameter servers' messages also have a price per byte if they are as small as the smallest
    for size in (1024.0, 4096.0, 1e6):
        latency, per_byte = communication.send_line(size, False, of_table(machine))
        assert latency == machine.message("send", 1, 2, 2)
        assert per_byte == pytest.approx(1e-9)
    # two pairs of ranks on two cores get half of them each; on four cores they do not meet
    assert machine.message("all_gather", 1 << 20, 2, 4) == 2 * machine.message("all_gather", 1 << 20, 2, 2)
    four = assumed_table(4)
    assert four.message("all_gather", 1 << 20, 2, 4) == four.message("all_gather", 1 << 20, 2, 2)


def test_waits_of_an_axis_are_added_to_each_block_and_microbatch() -> None:
    machine = assumed_table(4)
    points = [[0.0, 1e-3], [1e9, 1e-3]]
    waiting = replace(machine, axes={2: {"tp": points}, 4: {"tp": [[0.0, -9.0], [1e9, -9.0]]}})
    for layout, more in (("dp=2", 0.0), ("tp=2", 8 * 1e-3), ("tp=2,recompute=full", 8 * 1.4e-3)):
        plain, found = (predict(recipe(layout), of_table(m)) for m in (machine, waiting))
        m = plain.setting.microbatches
        assert found.step.seconds - plain.step.seconds == pytest.approx(m * more, rel=1e-6, abs=1e-9)
    # ranks on oversubscribed cores may wait for less than their messages take alone, but not for less than nothing
    plain, found = (predict(recipe("dp=2,tp=2"), of_table(m)) for m in (machine, waiting))
    assert 0 <= found.step.exposed["model"] < plain.step.exposed["model"]


def test_part_of_a_message_cannot_be_hidden() -> None:
    copying = communication.held(1.0, Group(2, 2), of_table(assumed_table()))
    assert communication.exposed(1.0, copying, 100.0) == pytest.approx(0.75)
    assert communication.exposed(1.0, copying, 0.0) == pytest.approx(1.0)
    assert communication.exposed(1.0, communication.held(1.0, Group(2, 2), parse("h100:8")), 100.0) == 0.0


def test_ranks_share_the_machine() -> None:
    cluster = of_table(assumed_table(4))
    product = Matmul(512, 512, 512)
    for ranks, cores in ((1, 4), (2, 2), (3, 1), (4, 1), (8, 1)):
        device = cluster.for_ranks(ranks).device
        assert device.memory == 16e9 / ranks
        assert device.peak["fp32"] == pytest.approx(4 * ASSUMED_FLOPS["fp32"] / ranks)
        seconds = cost.products(product, device, "fp32", 4)[0]
        assert seconds == pytest.approx(2 * 512**3 / (ASSUMED_FLOPS["fp32"] * cores))
    assert cluster.for_ranks(3).oversubscription == 1
    assert cluster.for_ranks(8).oversubscription == 2


def test_mfu_is_at_most_all_of_it() -> None:
    """Also if the peak was measured on a busy machine, or calibration says that all is faster."""
    for factor in (1.0, 0.5):
        machine = replace(assumed_table(), peak=dict.fromkeys(ASSUMED_FLOPS, 1e9))
        machine = replace(machine, factors=machine.factors | {"compute": factor})
        plan = predict(recipe("dp=2"), of_table(machine).for_ranks(2))
        assert 0.05 < plan.mfu <= 1
    assert of_table(machine).device.peak["fp32"] == pytest.approx(2 * 2 * ASSUMED_FLOPS["fp32"])


def test_a_machine_is_measured_only_if_a_person_says_so(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    commands = []
    monkeypatch.setattr(measured, "load", lambda: None)
    monkeypatch.setattr(
        commands_of_bench.subprocess,
        "run",
        lambda words, **_: commands.append(words[-3:]) or SimpleNamespace(returncode=0),
    )
    with pytest.raises(UserError, match=r"'local:2': .* not been measured; run `fivefold bench hardware`"):
        commands_of_bench.ensure_measured("local:2")
    commands_of_bench.ensure_measured("h100:2")
    answers = io.StringIO("n\n\n")
    monkeypatch.setattr(answers, "isatty", lambda: True)
    monkeypatch.setattr(commands_of_bench.sys, "stdin", answers)
    monkeypatch.setattr(commands_of_bench.sys.stderr, "isatty", lambda: True)
    with pytest.raises(UserError, match="not been measured"):
        commands_of_bench.ensure_measured("local")
    assert commands == []
    commands_of_bench.ensure_measured("local")
    assert commands == [["bench", "hardware", "--json"]]
    assert "Measure it now? It takes about two minutes" in capfd.readouterr().err


def test_a_busy_machine_is_not_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "measure_apart", lambda dtype, threads: {"rate": 1e9, "share": 0.6})
    monkeypatch.setattr(bench, "keep_freed_memory", lambda: None)
    with pytest.raises(BusyError, match=r"take 40% of this machine's cores.* at most 7% .* --busy"):
        bench.measure()


def test_a_gradient_reduction_of_zero_is_not_gloo_s() -> None:
    machine = assumed_table()
    machine.links[2]["scatter_gradients"] = [[4096.0, 5.0], [8192.0, 5.0]]
    cluster = of_table(machine).for_ranks(2)
    assert communication.scatter_gradients(4096, Group(2, 2), cluster) == 5.0
    assert collective("reduce_scatter", 4096, Group(2, 2), cluster) < 1.0


def test_a_step_is_its_flops_where_nothing_else_takes_time() -> None:
    machine = assumed_table()
    for share in machine.shares.values():
        for kinds in share.streams.values():
            kinds |= {kind: [1e30, 1e30] for kind in kinds}
        for parts in (*share.attention.values(), *share.ring.values()):
            parts |= {name: [1e30, 1e30] for name in parts}
    found = predict(recipe("dp=1"), of_table(machine))
    model = found.setting.model
    products = 8 * (4 * model.dim**2 + 3 * model.dim * (model.ffn_dim or 0)) + 4096 * model.dim
    seconds = 6 * products * found.tokens / (2 * ASSUMED_FLOPS["bf16"])
    assert found.step.seconds == pytest.approx(seconds, rel=0.03)  # kv_heads, norms


def test_more_ranks_than_cores_do_no_more_work() -> None:
    one, four = plan("dp=1"), plan("dp=4")
    assert four.step.compute == pytest.approx(one.step.compute, rel=0.15)
    # of a pipeline's four ranks only two compute at a time
    assert plan("pp=4", "train.microbatch_size=1").step.seconds > 0.95 * one.step.seconds


def test_pipelines_on_oversubscribed_cores() -> None:
    schedule = build("1f1b", 4, 8)
    plain = simulate(schedule, Costs(transfer=0.1)).makespan
    assert simulate_oversubscribed(schedule, Costs(transfer=0.1), 4).makespan == pytest.approx(plain)
    work = 4 * 8 * 3.0  # seconds of all ranks
    shared = simulate_oversubscribed(schedule, Costs(), 2).makespan
    assert shared >= work / 2
    assert shared < work / 2 + 4 * 3
    assert simulate_oversubscribed(schedule, Costs(), 1).makespan == pytest.approx(work)


def test_zero_pipelines_and_recompute_add_their_python() -> None:
    machine = assumed_table()
    base = {
        layout: predict(recipe(layout), of_table(machine)).step.seconds for layout in ("dp=2,zero=3", "pp=2")
    }
    more = replace(machine, host=machine.host | {"zero3": 1e-3, "stage": 1e-3})
    microbatches, blocks = 4, 8  # quickstart's 16 sequences in microbatches of 2, on 2 ranks
    zero = predict(recipe("dp=2,zero=3"), of_table(more)).step.seconds
    assert zero - base["dp=2,zero=3"] == pytest.approx(1e-3 * blocks * microbatches, rel=0.1)
    piped = predict(recipe("pp=2"), of_table(more)).step.seconds
    assert piped - base["pp=2"] == pytest.approx(1e-3 * 8, rel=0.2)


@pytest.mark.parametrize("arch", ["llama", "gpt2", "bert", "moe", "deepseek"])
def test_every_layout_has_a_price(arch: str) -> None:
    sets = [
        f"model.arch={arch}",
        *(["model.experts=4", "model.experts_per_token=2"] if arch in ("moe", "deepseek") else []),
    ]
    layouts = [
        "dp=1",
        "dp=4",
        "dp=2,zero=1",
        "dp=4,zero=2",
        "dp_replicate=2,dp_shard=2,zero=3",
        "tp=2,dp=2",
        "tp=4,sp=true",
    ]
    layouts += [
        "pp=4",
        "pp=2,virtual_stages=2,schedule=interleaved",
        "pp=4,schedule=zbv",
        "pp=2,schedule=dualpipev",
    ]
    layouts += ["cp=4", "cp=2,cp_method=ulysses", "dp=2,recompute=full", "tp=2,recompute=selective"]
    layouts += ["dp=2,ep=2", "dp=4,ep=2,zero=3"] if arch in ("moe", "deepseek") else []
    for mode in ("fp32", "bf16"):
        for layout in layouts:
            found = plan(layout, *sets, f"precision.mode={mode}")
            assert 1e-4 < found.step.seconds < 60, layout


def test_saved_and_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIVEFOLD_CACHE", str(tmp_path))
    assert measured.load() is None
    with pytest.raises(UserError, match="bench hardware"):
        parse("local")
    measured.save(assumed_table())
    measured.save(replace(assumed_table(), machine="another"))
    assert measured.as_json(measured.load() or assumed_table(4)) == measured.as_json(assumed_table())
    assert parse("local:4").devices == 4
    with pytest.raises(UserError, match="one node"):
        parse("local:2x2")
    tables.path().write_text(json.dumps({tables.key(): {"cores": 2}}))
    assert measured.load() is None
    tables.path().write_text("{")
    assert measured.load() is None


def test_calibration_finds_the_factors() -> None:
    machine = assumed_table()
    machine.host.update(block=2e-3, step=5e-3)
    true = replace(machine, factors={"compute": 1.2, "messages": 0.7, "host": 1.5})
    layouts = ["dp=1", "dp=2", "tp=2", "tp=2,sp=true", "dp=2,zero=3", "cp=2", "pp=2"]
    runs = [
        FinishedRun(name, recipe(name), predict(recipe(name), of_table(true)).step.seconds)
        for name in layouts
    ]
    found = fit(machine, runs)
    assert max(map(abs, found.before)) > 0.1
    assert max(map(abs, found.after)) < 0.03
    assert found.table.factors["compute"] == pytest.approx(1.2, rel=0.05)
    assert found.table.factors["messages"] < 0.9
    assert [run["run"] for run in found.table.fitted] == layouts
    again = fit(found.table, runs)  # starts from the plain table, not from the last fit
    assert again.before == pytest.approx(found.before)


def test_checkpoints_and_data_hold_up_a_run() -> None:
    found = plan("dp=2", "checkpoint.every=10").stalls
    assert found is not None
    assert found.saving == pytest.approx(found.checkpoint / 1e9)
    assert found.per_step == pytest.approx(found.saving / 10)
    assert found.waiting == 0
    by_time = plan("dp=2", "checkpoint.minutes=1", "train.steps=100000")
    assert by_time.stalls is not None
    assert by_time.stalls.every == pytest.approx(60 / by_time.step.seconds, abs=1)
    short = plan("dp=2", "train.steps=2").stalls
    assert short is not None
    assert short.every == 0, "it ends before"
    slow = replace(assumed_table(), disk=1000.0)
    waits = predict(recipe("dp=2"), of_table(slow)).stalls
    assert waits is not None
    assert waits.waiting == pytest.approx(
        waits.reading - predict(recipe("dp=2"), of_table(slow)).step.seconds
    )


def test_each_way_of_the_disk_has_its_rate() -> None:
    """Also for hosts like this machine. A table of an older version has one rate for all."""
    old = {
        k: v
        for k, v in measured.as_json(replace(assumed_table(), disk=2e9)).items()
        if not k.startswith("disk_")
    }
    loaded = measured.from_json(json.loads(json.dumps(old)))
    assert loaded is not None
    assert of_table(loaded).for_ranks(2).storage == Storage(2e9, 2e9, 2e9)
    new = replace(assumed_table(), disk=2.03e9, disk_read=1.08e9, disk_both=1.53e9)
    cluster = of_table(new).for_ranks(2)
    assert cluster.storage == Storage(read=1.08e9, write=2.03e9, both=1.53e9)
    reading = [predict(recipe("dp=2"), of_table(one)).stalls.reading for one in (new, replace(new, disk=1e3))]
    assert reading[0] == reading[1] > 0, "data are read"
    away = recipe("dp=1", "layout.offload=all:disk")
    quick = replace(assumed_table(), disk=1e12, disk_read=1e12, disk_both=1e12)
    fast = predict(away, of_table(quick)).step.seconds
    slower = [
        predict(away, of_table(one)).step.seconds
        for one in (replace(quick, disk=1e6), replace(quick, disk_read=1e6), replace(quick, disk_both=1e6))
    ]
    assert min(slower) > 2 * fast
    assert slower[2] == max(slower)


def test_the_search_knows_the_machine() -> None:
    found = search(recipe("dp=1"), of_table(assumed_table()).for_ranks(2), top=3)
    best = found.plans[0]
    assert best.layout.ranks == 2
    assert best.setting.cluster.name == "local"
    assert [p.step.seconds for p in found.plans] == sorted(p.step.seconds for p in found.plans)
