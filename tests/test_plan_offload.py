"""Plans of layouts that offload: memory by tier, exposed I/O, and the search when nothing fits."""

from contextlib import suppress
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
from steps import planned, recipe_of

from fivefold.errors import UserError
from fivefold.recipe import change, load
from fivefold.recipe.rules import contradictions
from fivefold.sharding import tiers
from fivefold.sharding.tiers import OFFLOADS, flows
from fivefold_plan.cluster.clusters import parse
from fivefold_plan.cluster.devices import Storage
from fivefold_plan.predict import held, predict, price
from fivefold_plan.search.search import apply, search
from fivefold_plan.time import offload
from fivefold_plan.trace.step import trace

GIB = 2**30
LARGE = [
    "model.layers=40", "model.dim=5120", "model.heads=40", "model.kv_heads=40", "model.ffn_dim=13824",
    "model.vocab_size=32000", "model.seq_len=2048", "model.tie_embeddings=false", "train.global_batch_size=32",
    "train.microbatch_size=4", "layout.recompute=full", "precision.mode=bf16",
]  # fmt: skip


def plan_of(away: str, layout: str = "dp=1", cluster: str = "h100", sets: tuple[str, ...] = ()):
    return predict(load("quickstart", [*LARGE, f"layout.offload={away}", *sets], layout), parse(cluster))


def test_each_byte_is_in_one_tier():
    """13B parameters: 18 bytes each, wherever they lie; ZeRO-Offload trains such a model on one GPU."""
    none, host, disk = (plan_of(away).memory[0] for away in ("none", "states:host", "states:disk"))
    parameters = none.optimizer / 12
    assert host.host == pytest.approx(16 * parameters)
    assert host.params == none.params
    assert host.gradients < 0.1 * none.gradients
    assert disk.disk == pytest.approx(12 * parameters)
    assert (disk.params, disk.gradients, disk.optimizer) == (none.params, none.gradients, 0)
    assert not plan_of("none").fits
    assert plan_of("states:host").fits
    assert plan_of("all:disk").memory[0].total < 0.1 * none.total
    for zero, one in (
        (1, 2),
        (2, 2),
        (3, 2 / 8),
    ):  # weights: whole, or gathered for each use; and rows to gather from
        shared, infinity = (
            plan_of(away, f"dp=8,zero={zero}").memory[0] for away in ("states:host", "all:disk")
        )
        assert shared.host == pytest.approx(16 * parameters / 8, rel=1e-3), "gradients and masters, too"
        assert shared.params == pytest.approx((one + 2 / 8 * (zero < 3)) * parameters, rel=1e-3)
        assert shared.optimizer == infinity.optimizer == 0
        assert infinity.disk == pytest.approx(18 * parameters / 8, rel=1e-3)
        assert infinity.params < 0.1 * 2 * parameters / 8


@pytest.mark.parametrize("microbatches", [1, 2])
def test_rows_that_stay_have_a_place_beside_whole_sums(microbatches: int):
    """ZeRO 1 adds gradients up whole, if there are several microbatches; the update reads a rank's rows elsewhere."""
    sets = (f"train.global_batch_size={8 * 4 * microbatches}",)
    none, disk, rows = (
        plan_of(away, f"dp=8,zero={zero}", "h100:8", sets).memory[0].gradients
        for away, zero in (("none", 1), ("states:disk", 1), ("states:disk", 2))
    )
    assert none == pytest.approx((rows, 8 * rows)[microbatches > 1], rel=1e-3)
    assert disk == pytest.approx((rows, 9 * rows)[microbatches > 1], rel=1e-3)


def test_pure_bf16_takes_half():
    """Of the 16 bytes that leave the device, 8 do; Kahan's compensation is one state more."""
    pure = "precision.mode=bf16_pure"
    kahan = plan_of("states:disk", sets=(pure, "precision.rounding=kahan")).memory[0]
    none, host, disk = (plan_of(away, sets=(pure,)).memory[0] for away in ("none", "states:host", "all:disk"))
    parameters = none.params / 2
    assert (host.host, disk.disk) == (8 * parameters, 10 * parameters)
    assert (kahan.disk, kahan.optimizer) == (6 * parameters, 0)
    assert (kahan.params, kahan.gradients) == (none.params, none.gradients)
    assert not plan_of("none", sets=(pure,)).fits
    assert plan_of("states:host", sets=(pure,)).fits


@pytest.mark.parametrize(("away", "rounding"), [("states:disk", "kahan"), ("all:disk", "stochastic")])
def test_pure_bf16_takes_the_bytes_of_a_traced_step(tmp_path, away, rounding):
    """Of the plan's total, the fp32 copies of a chunk may be another peak's than the activations."""
    sets = [f"layout.offload={away}", f"precision.rounding={rounding}", f"layout.offload_dir={tmp_path}"]
    recipe = recipe_of("llama", "bf16_pure", "dp=1", "model.seq_len=64", *sets)
    setting = planned(recipe)
    cluster = replace(setting.cluster, machine=SimpleNamespace(on_cpu=True))
    expected = held(replace(setting, cluster=cluster))[0]
    found = trace(recipe, 0, setting.microbatches).memory
    assert found.away["disk"] == pytest.approx(expected.disk, rel=0.01), "each parameter begins at a page"
    assert expected.total - 16 * tiers.CHUNK < found.total < 1.01 * expected.total


def test_flows_of_zero_infinity():
    """With one microbatch a parameter in bf16 reads 2 + 2 for forward and backward and 16 for its update, and writes 4
    of gradients and 14 of update. Each further microbatch adds its weights, and gradients there and back."""

    def bytes_of(m: int, out: bool) -> float:
        found = [f for f in flows(OFFLOADS["all:disk"], 2, 8, m) if f.link == "disk" and f.out == out]
        return sum(f.bytes * (1 if f.phase == "update" else m) for f in found)

    assert [bytes_of(1, False), bytes_of(1, True)] == [20, 18]
    assert [bytes_of(3, False), bytes_of(3, True)] == [20 + 2 * (4 + 4), 18 + 2 * 4]
    assert flows(OFFLOADS["activations"], 2, 8, 1) == ()


def test_a_faster_disk_hides_more():
    slow, fast = (
        predict(
            load("quickstart", [*LARGE, "layout.offload=all:disk"], "dp=1"),
            replace(parse("h100"), storage=Storage(rate, rate, rate)),
        ).step
        for rate in (1e9, 1e13)
    )
    assert slow.exposed["offload"] > 50 * fast.exposed["offload"] > 0, (
        "what is left is the host's update and PCIe"
    )
    assert slow.seconds > fast.seconds


def test_a_phase_takes_as_long_as_its_computing_or_its_io():
    plan = plan_of("all:disk", sets=("train.global_batch_size=4",))
    cluster = replace(
        plan.setting.cluster,
        host_link=Storage(1e15, 1e15, 1e15),
        storage=Storage(1e9, 1e9, 1e9),
        host_bandwidth=1e15,
    )
    s = replace(plan.setting, cluster=cluster)
    own = plan_of("none").memory[0].params / 2
    elements = offload.Elements(own, own)
    assert offload.seconds(s, 1, 2, 0.5, elements) == pytest.approx((38 - 2 * 2 / 40) * own / 1e9), (
        "2 of 40 blocks stay"
    )
    assert offload.seconds(s, 1e6, 2e6, 0, elements) == pytest.approx(3e6)


NO_SKIPS = ("optim.grad_clip=0", "faults.on_nonfinite=abort")


def stronghold(cluster, window: int):
    sets = [*LARGE, *NO_SKIPS, "layout.offload_update=early", "train.global_batch_size=4"]
    return predict(
        load("quickstart", [*sets, f"layout.offload_window={window}"], "dp=1,offload=all:host"), cluster
    )


def test_a_window_has_as_few_blocks_as_hide_the_copying():
    """A link that copies a block while another one computes needs room for two. A slower one is waited for in any
    case, and least if blocks that need not come again fill the memory."""
    fast, slow = (replace(parse("h100"), host_link=Storage(rate, 1e13, 1e13)) for rate in (1e11, 1e10))
    assert stronghold(fast, 0).layout.offload_window == 2
    assert stronghold(fast, 0).step.seconds == pytest.approx(stronghold(fast, 40).step.seconds, rel=0.01)
    wide = stronghold(slow, 0)
    assert 10 < wide.layout.offload_window < 40
    assert wide.step.seconds < 0.9 * stronghold(slow, 2).step.seconds
    small = replace(slow.device, memory=20 * GIB)
    narrow = stronghold(replace(slow, device=small), 0)
    assert 2 < narrow.layout.offload_window < wide.layout.offload_window
    assert narrow.fits
    more = stronghold(replace(slow, device=small), narrow.layout.offload_window + 1)
    assert not more.fits


@pytest.mark.parametrize("window", [2, 3])
def test_a_window_takes_the_bytes_of_a_traced_step(tmp_path, window):
    sets = [
        f"layout.offload_window={window}",
        f"layout.offload_dir={tmp_path}",
        "model.layers=5",
        "model.seq_len=64",
    ]
    recipe = recipe_of("llama", "bf16", "dp=1,offload=all:disk", *sets)
    expected = held(planned(recipe))[0]
    found = trace(recipe, 0, planned(recipe).microbatches).memory.highest["params"]
    assert found == pytest.approx(expected.params, rel=0.03), "each parameter begins at a page"


def test_early_updates_run_beside_backward():
    """The host's update takes longer than forward, and less than backward."""
    early, beside = (stronghold(parse("h100"), 2), plan_of("all:host", sets=("train.global_batch_size=4",)))
    exposed = [plan.step.exposed["offload"] for plan in (early, beside)]
    assert exposed[0] < 0.5 * exposed[1]
    found = offload.loads(early.setting, offload.Elements(1e9, 1e9))
    assert found.update == "backward"
    assert found.backward[0]["host"] > 0 == found.forward[0].get("host", 0)


def test_a_search_offloads_where_nothing_fits():
    found = search(load("quickstart", LARGE, "dp=1"), parse("h100:1"))
    assert found.plans
    assert all(plan.fits and plan.layout.offload != "none" for plan in found.plans)
    assert found.plans[0].layout.offload in ("states:host", "activations")
    short = [*LARGE, "train.global_batch_size=4"]  # else a step hides the update anyway
    beside, early = (
        search(load("quickstart", [*short, *more], "dp=1"), parse("h100:1")) for more in ((), NO_SKIPS)
    )
    assert not any(plan.layout.early for plan in beside.plans)
    assert early.plans[0].layout.early, "no step may be skipped"
    assert early.plans[0].step.seconds < beside.plans[0].step.seconds
    without = search(load("quickstart", LARGE, "dp=1"), parse("h100:16"))
    assert {plan.layout.offload for plan in without.plans} == {"none"}


def by_hand(recipe, cluster):
    """Plans that offload, of layouts as one would write them down."""
    n, updates = cluster.devices, ("beside", "early")
    layouts = (f"dp={n}", f"dp={n},zero=1", f"dp={n},zero=3", f"tp={n},sp=true", f"pp={n}")
    layouts += ("pp=2,dp=2,zero=1",) * (n == 4)
    aways = [away for away in OFFLOADS if away not in ("none", "activations:tp")]
    for layout, away, update, rows, again in product(layouts, aways, updates, (1, 2, 4), ("none", "full")):
        sets = [f"train.microbatch_size={rows}", f"layout.offload_update={update}"]
        with suppress(UserError):  # early updates with what stays, or with tp
            yield predict(change(recipe, sets, f"{layout},offload={away},recompute={again}"), cluster)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 4])
def test_a_search_offloads_on_several_devices(devices, monkeypatch):
    """It prices ZeRO, pipelines and windows that the planner sizes, and finds nothing slower than what one finds by
    hand. A plan of the recipe that it writes says the same."""
    cluster, priced = parse(f"h100:{devices}"), []
    cluster = replace(cluster, device=replace(cluster.device, memory=160 * GIB / devices))
    recipe = load("quickstart", [*LARGE, *NO_SKIPS], "dp=1")

    def noted(s, *more):
        priced.append(s.layout)
        return price(s, *more)

    monkeypatch.setattr("fivefold_plan.search.search.price", noted)
    found = search(recipe, cluster, 3)
    away = [layout for layout in priced if layout.offload != "none"]
    assert {layout.zero for layout in away} >= {0, 3}
    assert {layout.pp for layout in away} >= {1, 2}
    paged = {layout.offload_window for layout in away if OFFLOADS[layout.offload].working != "device"}
    assert paged == {0}
    assert len(found.plans) == 3
    for plan in found.plans:
        applied = apply(recipe, plan)
        again = predict(applied, cluster)
        assert not any(contradictions(applied))
        assert plan.fits
        assert plan.layout.ranks == devices
        assert (again.step.seconds, again.peak_bytes) == (plan.step.seconds, plan.peak_bytes)
    fitting = [plan.step.seconds for plan in by_hand(recipe, cluster) if plan.fits]
    assert len(fitting) > 40
    assert found.plans[0].step.seconds <= min(fitting) * (1 + 1e-9)
