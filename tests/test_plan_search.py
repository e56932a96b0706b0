"""The search, beside pricing every valid layout one by one."""

import gc
import itertools
import json
import math
import tomllib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from multiprocessing import active_children
from pathlib import Path

import pytest
from marks import only, slow
from search_speed import cases

from fivefold.errors import UserError
from fivefold.recipe import Recipe, change, load
from fivefold.recipe.rules import contradictions, with_layout
from fivefold.schedules.pipeline import SCHEDULES
from fivefold.sharding.layout import Layout, divisors, largest, to_text
from fivefold.sharding.sequence import METHODS
from fivefold_plan import setting
from fivefold_plan.advice.explain import fold, reasons, summary
from fivefold_plan.cluster.clusters import parse, with_margin
from fivefold_plan.cluster.devices import MARGIN, Cluster, of_table
from fivefold_plan.cluster.measured import assumed_table
from fivefold_plan.predict import FRAGMENTS, Plan, held, limit, predict, price
from fivefold_plan.search import best_first, bound_bytes, halves
from fivefold_plan.search import search as searching
from fivefold_plan.search.best_first import Search
from fivefold_plan.search.bound import Bounds
from fivefold_plan.search.halves import Halves, Told, choice_of
from fivefold_plan.search.search import Found, apply, search, space_of
from fivefold_plan.search.shared import SharedCosts
from fivefold_plan.search.space import SEQUENCES, Choice, Space
from fivefold_plan.setting import documents_of

PUBLISHED = json.loads(
    (Path(__file__).parents[1] / "benchmarks/results/planner_published.json").read_text(encoding="utf-8")
)
RECORDED = json.loads(
    (Path(__file__).parents[1] / "benchmarks/results/planner_search.json").read_text(encoding="utf-8")
)
LLAMA = load("llama-7b", ["train.global_batch_size=512"])
SMALL = [
    "model.layers=3", "model.dim=512", "model.heads=4", "model.kv_heads=2", "model.ffn_dim=1024", "model.seq_len=256",
    "model.vocab_size=4096", "train.global_batch_size=2", "train.microbatch_size=none", "precision.mode=bf16",
]  # fmt: skip
SEVEN = [
    "train.global_batch_size=7",
    "model.layers=1",
    "model.heads=3",
    "model.kv_heads=none",
    "model.dim=384",
]
MOE = ["model.arch=moe", "model.experts=4", "model.dense_layers=1", "model.ffn_dim=512"]
CASES = {
    "llama": ([], "h100:8"),
    "two dtypes, tied": (["precision.mode=auto", "model.tie_embeddings=true"], "h100:2x2"),
    "the machine at hand": (["train.global_batch_size=4"], "local:2"),
}
SLOW = {
    "long sequences": (["model.seq_len=32768", "train.global_batch_size=4"], "a100:2x2"),
    "no pipelines": (["model.arch=speedrun", "optim.name=muon", "train.global_batch_size=8"], "h100:4"),
    "moe": ([*MOE, "model.layers=2"], "a100:4"),
    "experts over nodes": ([*MOE, "model.layers=3"], "h100:2x2"),
    "fp8": (["precision.mode=fp8"], "h100:4"),
    "larger batch": (["train.global_batch_size=12"], "h100:8"),
    "experts of eight": ([*MOE, "model.layers=4"], "h100:4x2"),
    "gpt2, six": (["model.arch=gpt2", "model.kv_heads=none", "train.global_batch_size=6"], "a100:6"),
    "latent attention": (
        [*MOE, "model.arch=deepseek", "model.kv_heads=none", "model.layers=2", "train.global_batch_size=4"],
        "h100:4",
    ),
    "multi-token prediction": (
        [
            *MOE,
            "model.arch=deepseek",
            "model.kv_heads=none",
            "model.layers=2",
            "model.mtp_depth=1",
            "train.global_batch_size=4",
        ],
        "h100:4",
    ),
    "experts in every block": ([*MOE, "model.dense_layers=0", "train.global_batch_size=8"], "h100:4x2"),
    "experts of a long sequence": ([*MOE, "model.layers=4", "model.seq_len=16384"], "a100:2x4"),
    "long sequences, more blocks": (["model.layers=6", "model.seq_len=65536"], "h100:2x4"),
    "the machine at hand, experts": (MOE, "local:4"),
}


def small(overrides: list[str]) -> Recipe:
    return load("quickstart", [*SMALL, *overrides], "dp=1")


def every_valid(recipe: Recipe, devices: int, modes: list[str]) -> Iterator[tuple[Layout, int]]:
    """Layouts of so many ranks and microbatches that break no rule, by trying all; of those that are the same by other
    words one."""
    model, batch, sizes = recipe.model, recipe.train.global_batch_size, divisors(devices)
    for pp, replicate, shard, cp, tp in itertools.product(sizes, repeat=5):
        if pp * replicate * shard * cp * tp != devices:
            continue
        options = itertools.product(
            METHODS if cp > 1 else ("ring",),
            range(1, (model.experts or 1) + 1),
            range(4),
            SEQUENCES,
            [name for name, made in SCHEDULES.items() if not made.varies] if pp > 1 else ("1f1b",),
            range(1, model.layers + 1) if pp > 1 else (1,),
            modes,
            (False, True),
        )
        for method, ep, zero, (sp, again), schedule, virtual, recompute, folds in options:
            if folds and (ep == 1 or tp == 1):
                continue  # no effect
            how = {"schedule": schedule, "virtual_stages": virtual, "recompute": recompute, "ep_fold": folds}
            layout = Layout(pp, replicate, shard, cp, method, tp, ep, zero, sp, again, **how)
            least, most = SCHEDULES[schedule].stages
            if not least <= virtual <= (most or virtual):
                continue  # refused; or 1 means 2
            if SCHEDULES[schedule].paired and ep == 1:
                continue  # nothing to hide
            for B in divisors(batch):
                if largest(batch // B, layout.dp) * B > largest(batch, layout.dp):
                    continue  # gives one rank more sequences than need be
                if not any(contradictions(with_layout(recipe, layout, microbatch_size=B))):
                    yield layout, B


def choices(space: Space) -> Iterator[Choice]:
    """All that a search considers, none left out."""
    for shape in space.shapes:
        for B, recompute, mode in itertools.product(space.microbatches(shape), space.modes, space.precisions):
            for way in space.schedules(shape):
                changed = replace(shape, recompute=recompute, **way)
                for layout in space.sharings(changed):
                    yield space.choice(layout, B, mode)


_priced: dict[str, tuple[Space, Bounds, list[tuple[Choice, Plan]]]] = {}


def priced(case: str) -> tuple[Space, Bounds, list[tuple[Choice, Plan]]]:
    """Every layout of a case, predicted in full."""
    if case not in _priced:
        overrides, cluster = (CASES | SLOW)[case]
        machine = (
            replace(of_table(assumed_table(4)), devices=int(cluster[6:]))
            if cluster[:6] == "local:"
            else parse(cluster)
        )
        space = space_of(small(overrides), machine)
        bounds = bounds_of(space)
        _priced[case] = space, bounds, [(c, price(bounds.setting(c))) for c in choices(space)]
    return _priced[case]


every_case = pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(c, marks=pytest.mark.slow) for c in SLOW)]
)


@only("the machine at hand", "two dtypes, tied")
@every_case
def test_every_valid_layout_is_considered_once(case: str) -> None:
    space, _, all_of_them = priced(case)
    found = [(c.layout, c.B, c.mode) for c, _ in all_of_them]
    wanted = {
        (layout, B, mode)
        for layout, B in every_valid(space.recipe, space.cluster.devices, space.modes)
        for mode in space.precisions
    }
    assert set(found) == wanted
    assert len(found) == len(wanted) == space.size


def test_experts_whose_features_do_not_divide_need_sequence_parallelism() -> None:
    recipe = load(
        "quickstart", ["model.arch=moe", "model.expert_ffn_dim=24", "model.vocab_size=4096"], "dp=1"
    )
    ways = list(space_of(recipe, parse("h100:2")).ways())
    assert {way.sp for way in ways if way.tp == 2} == {True}


def test_the_bound_of_a_first_rank_that_ends_early_but_has_most_to_sum() -> None:
    """In zero bubble any rank may be the last; a large vocabulary gives the first one more to sum and update."""
    sets = [
        "model.layers=32",
        "model.dim=4096",
        "model.heads=32",
        "model.vocab_size=128000",
        "model.seq_len=256",
    ]
    sets += ["model.tie_embeddings=false", "train.global_batch_size=64", "precision.mode=bf16"]
    space = space_of(load("quickstart", sets, "dp=1"), parse("h100:32"))
    bounds, seen = Bounds(space.recipe.model, space.cluster, setting.FIVEFOLD), 0
    for shape in (one for one in space.shapes if one.tp * one.cp == 1 and one.pp == 8):
        for schedule in ("zb_h1", "zbv", "1f1b"):
            virtual = 2 if schedule == "zbv" else 1
            for zero in (0, 1):
                layout = replace(shape, schedule=schedule, virtual_stages=virtual, zero=zero)
                if zero:
                    layout = replace(layout, dp_shard=layout.dp, dp_replicate=1)
                for B in space.microbatches(shape)[:2]:
                    c = space.choice(layout, B, "bf16")
                    assert bounds.sharing(c) <= price(bounds.setting(c)).step.seconds, c
                    seen += 1
    assert seen >= 12


def test_the_bound_of_one_microbatch_is_its_way_through_all_stages() -> None:
    """No rank computes while another does, so with several stages per rank its own work is a fraction of the step."""
    sets = ["train.global_batch_size=16", "train.microbatch_size=1"]
    space = space_of(load("llama-7b", sets, "dp=1"), parse("h100:32"))
    bounds, layout = Bounds(space.recipe.model, space.cluster, setting.FIVEFOLD), Layout(pp=2)
    for schedule in ("interleaved", "looped_bfs"):
        one = replace(layout, dp_replicate=16, schedule=schedule, virtual_stages=2)
        c = Choice(one, 1, 1, "bf16")
        assert 0.95 <= bounds.sharing(c) / price(bounds.setting(c)).step.seconds <= 1


@every_case
def test_no_bound_exceeds_what_it_is_a_bound_of(case: str) -> None:
    space, bounds, all_of_them = priced(case)
    for c, plan in all_of_them:
        shape = replace(c, layout=replace(c.layout, dp_replicate=c.layout.dp, dp_shard=1, zero=0))
        lean = replace(c, layout=space.leanest(shape.layout))
        assert bounds.bytes.shape(shape, space) <= plan.peak_bytes + 1, c
        assert bounds.bytes.of(lean, buffers=False) <= plan.peak_bytes + 1, c
        assert bounds.bytes.of(c) <= plan.peak_bytes + 1, c
        way = next(
            n for n, way in enumerate(space.schedules(shape.layout)) if replace(c.layout, **way) == c.layout
        )
        own = {number: seconds for seconds, number in bounds.schedules(shape, space)}[way]
        assert own <= bounds.schedule(c, space), c
        of_time = (
            bounds.shape(shape, space),
            own,
            bounds.schedule(c, space),
            bounds.sharing(c),
            bounds.simulated(c),
        )
        assert max(of_time) <= plan.step.seconds, c


def bounds_of(space: Space) -> Bounds:
    return Bounds(space.recipe.model, space.cluster, setting.software_of(space.cluster))


@pytest.mark.parametrize(
    ("name", "sets", "cluster"),
    [
        ("llama3-8b", ["model.layers=4", "model.seq_len=65536", "train.global_batch_size=4"], "h100:8x2"),
        pytest.param(
            "deepseek-v3",
            ["model.layers=8", "train.global_batch_size=24", "precision.mode=fp8"],
            "h100:8x2",
            marks=pytest.mark.slow,
        ),
        ("mixtral-8x7b", ["model.layers=2", "train.global_batch_size=4"], "h100:4"),
        pytest.param("mixtral-8x7b", ["model.layers=6"], "a100:8x8", marks=pytest.mark.slow),
        (
            "llama3-8b",
            [
                "model.arch=mistral",
                "model.dim=1024",
                "model.ffn_dim=4096",
                "model.layers=12",
                "model.sliding_window=128",
                "model.seq_len=262144",
                "train.global_batch_size=4",
            ],
            "h100:4",
        ),
    ],
)
def test_what_a_sequence_takes_in_a_huge_microbatch_bounds_all_sizes(
    name: str, sets: list[str], cluster: str
) -> None:
    """Of models of real widths, where matmuls fill the device and single sequences are copied less (`batch_first`):
    no bound of a family exceeds that of any of its starts, nor one of these that of any of its sizes."""
    space = space_of(load(name, ["train.microbatch_size=none", *sets], "dp=1"), parse(cluster))
    bounds, fastest = bounds_of(space), math.inf
    for number in range(len(space.families)):
        for ((seconds, _), *_), size, start in bounds.starts(space, number):
            assert bounds.family(space, number) <= seconds, start
            sizes = {at: bound for bound, at in bounds.sizes(start, space)}
            for at, c in enumerate(space.sizes(start)):
                assert seconds <= sizes[at] <= bounds.shape(c, space), c
                assert size <= bounds.bytes.start(c, space) <= bounds.bytes.shape(c, space), c
            fastest = min(fastest, seconds)
    assert bounds.least(space) == fastest


@pytest.mark.parametrize("pp", [2, *slow(8, 16)])
def test_bounds_of_bytes_under_all_schedules(pp: int) -> None:
    """With few and many microbatches, as with one and two copies of the model; for a microbatch as large as it is, and
    by what a sequence takes in a huge one."""
    space = space_of(load("llama-7b", ["train.global_batch_size=960"], "dp=1"), parse("h100:16"))
    bounds = bounds_of(space)
    for way, count, zero in itertools.product(space.schedules(Layout(pp=pp)), (1, 2, 5, 4 * pp), (0, 1, 3)):
        plain = Layout(pp=pp, dp_replicate=16 // pp)
        if zero and pp == 16:
            continue
        dp = {"dp_replicate": 1, "dp_shard": 16 // pp} if zero else {}
        c = Choice(replace(plain, **way, **dp, zero=zero), 2, count, "bf16")
        peak = max(found.total for found in held(bounds.setting(c)))
        shape = replace(c, layout=plain)
        assert bounds.bytes.of(c) <= peak + 1, c
        assert bounds.bytes.start(shape, space) <= bounds.bytes.shape(shape, space) <= peak + 1, c


def test_a_rank_holds_as_much_with_more_microbatches_than_fill_the_pipeline() -> None:
    space = space_of(load("llama-7b", ["train.global_batch_size=960"], "dp=1"), parse("h100:16"))
    bounds, seen = bounds_of(space), 0
    for pp, count in itertools.product((1, 2, 4), (1, 3, 4, 5, 8, 9, 10, 15, 16)):
        for way in space.schedules(Layout(pp=pp)):
            c = Choice(replace(Layout(pp=pp, dp_replicate=16 // pp), **way), 1, count, "bf16")
            for at in bounds.shared.positions(c.layout):
                assert bounds.bytes.held(c, at) == bound_bytes.held_by(c, at), c
                seen += 1
    assert seen > 1000


def test_searches_find_what_was_recorded() -> None:
    _found_as_recorded("llama 7B", "llama 7B, batch of 16384")


@pytest.mark.slow
def test_long_searches_find_what_was_recorded() -> None:
    _found_as_recorded(*(name for name in cases() if not name.startswith("llama 7B")))


def _found_as_recorded(*names: str) -> None:
    """The best plans are those of benchmarks/results/planner_search.json."""
    recorded = {one["model"]: one for one in RECORDED}
    for name in names:
        recipe, cluster = cases()[name]
        best = search(recipe, parse(cluster)).plans[0]
        layout = f"{to_text(best.layout)} with microbatches of {best.setting.sizes.B}"
        assert (layout, round(best.mfu, 4)) == (recorded[name]["best"], recorded[name]["mfu"])


@every_case
@pytest.mark.parametrize("program", [setting.FIVEFOLD, setting.FIVEFOLD_CPU], ids=["gpu", "cpu"])
def test_no_bound_of_bytes_exceeds_the_formula(case: str, program: setting.Software) -> None:
    """Of the program on GPUs and on CPUs, whatever the cluster."""
    space, _, all_of_them = priced(case)
    bounds, some = (
        Bounds(space.recipe.model, space.cluster, program),
        all_of_them[:: 1 + len(all_of_them) // 2000],
    )
    for c, _ in some:
        peak = max(found.total for found in held(bounds.setting(c))) + 1
        shape = replace(c, layout=replace(c.layout, dp_replicate=c.layout.dp, dp_shard=1, zero=0))
        lean = replace(c, layout=space.leanest(shape.layout))
        assert bounds.bytes.shape(shape, space) <= peak, c
        assert bounds.bytes.of(lean, buffers=False) <= peak, c
        assert bounds.bytes.of(c) <= peak, c


@every_case
@pytest.mark.parametrize("share", [1.0, 0.3, 0.02])
def test_the_search_finds_the_best_of_all(case: str, share: float) -> None:
    """In order, under limits of memory that this share of the layouts keeps."""
    space, bounds, all_of_them = priced(case)
    plans = [plan for _, plan in all_of_them]
    most = sorted(plan.peak_bytes for plan in plans)[math.ceil(share * len(plans)) - 1]
    wanted = sorted(plan.step.seconds for plan in plans if plan.peak_bytes <= most)[:20]
    run = Search(space, bounds, most)
    found = list(itertools.islice(run.plans(), 20))
    assert [plan.step.seconds for plan in found] == pytest.approx(wanted, rel=1e-12)
    assert all(plan.peak_bytes <= most for plan in found)


def test_two_processes_find_what_one_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a search that nobody took to its end, or that one began; and they end with whoever asked them."""
    space, bounds, all_of_them = priced("the machine at hand")
    most = sorted(plan.peak_bytes for _, plan in all_of_them)[len(all_of_them) // 2]
    before = set(active_children())
    one, two = Halves(space, bounds, two=False), Halves(space, bounds, two=True)
    processes = set(active_children()) - before
    assert len(processes) == 2
    for many in (3, 20, None):
        wanted, found = ([*itertools.islice(run.plans(most), many)] for run in (one, two))
        assert [*map(choice_of, found)] == [*map(choice_of, wanted)]
    assert one.lost == two.lost > 0
    for name, value in (("LONG", 9), ("cores", lambda: 2)):
        monkeypatch.setattr(halves, name, value)
    monkeypatch.setattr(halves.threading, "active_count", lambda: 1)
    late = Halves(space, bounds)
    assert [*map(choice_of, late.plans(most))] == [*map(choice_of, wanted)]
    assert late.lost == one.lost
    assert len(set(active_children()) - before - processes) == 2, "it took long"
    del late
    fastest = two.glimpse(most, math.inf)
    assert fastest is not None
    assert fastest.step.seconds == wanted[0].step.seconds
    assert two.glimpse(0, math.inf) is None
    del two
    assert not any(process.is_alive() for process in processes)


def test_two_processes_order_equal_plans_as_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """By their bytes and then their place in the space, whichever process found them."""
    space, bounds, ((_, first), (_, second), *_) = priced("llama")
    run, end = Halves(space, bounds, two=False), Told(math.inf, 0, None)
    told = [Told(1.0, 0, second, 1, 5.0, (2,)), Told(1.0, 0, first, 1, 5.0, (1, 7))]
    monkeypatch.setattr(run, "_answers", lambda asked: [iter((one, end)) for one in told])
    assert [*run.plans(math.inf)] == [first, second]


@pytest.mark.parametrize("take", [lambda run: next(run.plans()), Search.glimpse])
def test_a_search_is_freed_without_the_collector(take: Callable[[Search], Plan]) -> None:
    """`search` turns it off."""
    space, bounds, _ = priced("llama")
    gc.disable()
    try:
        run = Search(space, bounds, math.inf)
        assert take(run)
        assert len(run._heap) > 9
        left = weakref.ref(run)
        del run
        assert left() is None
    finally:
        gc.enable()


def test_what_does_not_fit_is_counted() -> None:
    """Where nothing fits, everything is counted, and the smallest is named."""
    space, bounds, all_of_them = priced("llama")
    least = min(plan.peak_bytes for _, plan in all_of_them)
    run = Search(space, bounds, least - 1)
    assert not list(run.plans())
    assert run.lost == space.size
    smallest, known = run.smallest()
    assert (smallest.peak_bytes, known) == (least, True)


@pytest.mark.parametrize(
    "case", ["two dtypes, tied", *(pytest.param(c, marks=pytest.mark.slow) for c in CASES | SLOW)]
)
def test_by_bytes_no_layout_takes_less_than_was_said_of_those_to_come(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All come once; with a limit, all that fit. So the smallest is sure when it is said to be, and only then."""
    space, bounds, all_of_them = priced(case)
    peaks = {(c.layout, c.B, c.mode): plan.peak_bytes for c, plan in all_of_them}
    rest, found, limited = 0.0, dict[object, float](), sorted(peaks.values())[len(peaks) // 3]
    for size, least, c in Search(space, bounds, 0).by_bytes():
        assert rest <= size + 1
        assert round(size) == peaks[c.layout, c.B, c.mode]
        rest, found[c.layout, c.B, c.mode] = least, size
    assert found.keys() == peaks.keys()
    few = {(c.layout, c.B, c.mode) for _, _, c in Search(space, bounds, 0).by_bytes(limited)}
    assert few >= {key for key, peak in peaks.items() if peak < limited}
    assert len(few) < len(peaks)
    said = dict[int, bool]()
    for counted in (1, len(peaks)):
        monkeypatch.setattr(best_first, "COUNTED", counted)
        plan, said[counted] = Search(space, bounds, 0).smallest()
        assert not said[counted] or plan.peak_bytes == min(peaks.values())
    size, rest, _ = next(Search(space, bounds, 0).by_bytes())
    assert said == {1: size <= rest, len(peaks): True}


def test_best_first_and_all_fit() -> None:
    frozen = gc.get_freeze_count()
    found = search(LLAMA, parse("a100:64"), top=8)
    assert gc.isenabled(), "a search stops it, but for itself"
    assert gc.get_freeze_count() == frozen, "what it leaves can be collected"
    seconds = [p.step.seconds for p in found.plans]
    assert seconds == sorted(seconds)
    assert all(p.fits and p.layout.ranks == 64 and p.tokens == 512 * 4096 for p in found.plans)
    assert found.considered == len(found.plans) + sum(found.rejected.values())
    assert found.reasons[0] == ""
    assert all(found.reasons[1:])


def test_only_a_sample_of_documents_is_priced_for_each_microbatch() -> None:
    """Where documents end is mostly not known. Then attention is priced as of whole sequences, by the same bounds."""
    cluster, none = parse("h100:8"), setting.FIVEFOLD
    unknown, assumed = (replace(none, documents=documents_of(LLAMA, tokens)) for tokens in (None, 512))
    exact = [SharedCosts(LLAMA.model, cluster, program).exact for program in (none, unknown, assumed)]
    assert exact == [False, False, True]
    small, few = change(LLAMA, ["model.layers=4", "train.global_batch_size=16"], "dp=1"), parse("h100:2")
    one, other = (search(small, few, 3, program).plans for program in (none, unknown))
    assert [(p.layout, p.step.seconds) for p in one] == [(p.layout, p.step.seconds) for p in other]


def test_layouts_as_fast_that_differ_little_are_one_line() -> None:
    """No two of a list are; what is folded is no faster and takes no less memory."""
    recipe = change(load("llama3-8b"), ["train.microbatch_size=none", "model.layers=8"], "dp=1")
    found = search(recipe, parse("h100:8"), top=6)
    assert len(found.plans) == len(found.same) == 6
    assert fold(found.plans) == (found.plans, [[]] * 6)
    assert sum(map(len, found.same)) == found.rejected["as fast as one listed"] > 6
    for plan, others in zip(found.plans, found.same, strict=True):
        for other in others:
            assert plan.step.seconds <= other.step.seconds <= 1.001 * plan.step.seconds
            assert other.peak_bytes > 0.96 * plan.peak_bytes
            assert (other.layout.tp, other.layout.pp) == (plan.layout.tp, plan.layout.pp)
    assert found.considered == len(found.plans) + sum(found.rejected.values())
    assert found.as_json()["plans"][0]["same"] == [to_text(other.layout) for other in found.same[0]]


def test_a_layout_that_waits_for_its_disk_is_not_as_fast() -> None:
    layouts = ("cp=8,zero=3,recompute=full", "cp=8,zero=3,recompute=full,offload=states:disk")
    sets = ["train.global_batch_size=8", "train.microbatch_size=1"]
    plans = [predict(change(LLAMA, sets, layout), parse("h100:8")) for layout in layouts]
    slower = plans[1].step.seconds / plans[0].step.seconds - 1
    assert slower > 0.5
    name, share = reasons(plans)[1].rsplit(" +", 1)
    assert name == "waits for offload"
    assert float(share[:-1]) / 100 == pytest.approx(slower, rel=0.1)


@pytest.mark.slow
def test_what_binds_an_offloaded_layout_is_named() -> None:
    file = replace(parse("h100:1"), host_memory=1e9)  # only the disk is left
    found = search(change(LLAMA, ["train.global_batch_size=16"], "dp=1"), file, 2)
    assert "offload=states:disk" in to_text(found.plans[0].layout)
    assert any(text.startswith("disk: twice the speed would give ") for text in found.bottlenecks)


@cache
def on_sixteen() -> Found:
    return search(LLAMA, parse("h100:16"), 1)


def test_beats_or_equals_any_single_layout() -> None:
    best = on_sixteen().plans[0].step.seconds
    for layout in (
        "dp=16,zero=1",
        "dp=16,zero=3",
        "tp=8,dp=2,zero=1,sp=true",
        "pp=4,dp=4,zero=1",
        "pp=2,dp=8,zero=1",
    ):
        for B in (1, 2, 4):
            one = predict(change(LLAMA, [f"train.microbatch_size={B}"], layout), parse("h100:16"))
            assert not one.fits or one.step.seconds >= best


@pytest.mark.parametrize(
    ("vocab", "memory", "field", "first"),
    [
        (256_000, 0.05, "bare_ends=true", True),
        (32_000, 0.05, "round_microbatches=3", False),
        (32_000, 0.5, "schedule=dualpipe,", False),
    ],
)
def test_the_second_round_finds_what_the_first_leaves_out(
    vocab: int, memory: float, field: str, first: bool
) -> None:
    """Ends without blocks, other numbers of microbatches in a round, two copies: among the ten best where memory is
    short or the vocabulary large. Each is priced as `fivefold plan` would."""
    shape = [f"model.vocab_size={vocab}", "model.layers=6", "model.dim=2048", "model.heads=16"]
    recipe = change(LLAMA, [*shape, "model.ffn_dim=5632", "train.global_batch_size=32"], "dp=1")
    cluster = replace(parse("a100:16"), per_node=1)
    cluster = replace(cluster, device=replace(cluster.device, memory=cluster.device.memory * memory))
    found = search(recipe, cluster)
    has = [field in to_text(plan.layout) for plan in found.plans]
    assert has[0] if first else any(has)
    for plan in found.plans:
        alone = predict(apply(recipe, plan), cluster)
        assert (alone.step.seconds, alone.peak_bytes) == (plan.step.seconds, plan.peak_bytes)
        assert plan.fits


@pytest.mark.slow
def test_search_of_16384_devices() -> None:
    """How long it takes is for benchmarks/planner/search_speed.py to say."""
    shape = ["dim=16384", "layers=126", "heads=128", "kv_heads=8", "ffn_dim=53248", "vocab_size=128256"]
    sets = ["train.global_batch_size=16384", "model.seq_len=8192", *(f"model.{field}" for field in shape)]
    found = search(change(LLAMA, sets), parse("h100:16384"))
    assert found.considered > 100_000
    assert len(found.plans) == 10


def test_precision_is_searched_where_the_recipe_leaves_it_open() -> None:
    recipe = small(["precision.mode=auto"])
    assert space_of(recipe, parse("h100:2")).precisions == ("bf16", "fp32")
    assert space_of(small([]), parse("h100:2")).precisions == ("bf16",)
    found = search(change(LLAMA, ["precision.mode=auto"], "dp=1"), parse("h100:8"), 1)
    assert found.plans[0].setting.mode == "bf16"
    assert apply(recipe, found.plans[0]).precision.mode == "bf16"


def test_memory_that_binds_is_named() -> None:
    """With less memory another layout is best, and the sentence names the one that is not to be had."""
    recipe, roomy = change(LLAMA, ["train.global_batch_size=64"], "dp=1"), parse("h100:8")
    best = search(recipe, roomy, 1).plans[0]
    tight = replace(roomy, device=replace(roomy.device, memory=roomy.device.memory * 0.6))
    found = search(recipe, tight, 1)
    assert found.plans[0].step.seconds > best.step.seconds
    huge = search(recipe, _huge(roomy), 1)
    most = found.plans[0].step.seconds / huge.plans[0].step.seconds - 1
    text = next(text for text in found.bottlenecks if text.startswith("memory: "))
    assert 0 < float(text.split(" would be ")[1].split("%")[0]) / 100 <= most + 1e-3
    takes, has = text.split(" takes ")[1].removesuffix(" GiB").split(" of ")
    assert float(has) < float(takes) <= 2 * float(has) + 0.1, "no device has much more"
    for text in found.bottlenecks:
        assert text.startswith(("memory: ", "margin: ")) or text.endswith(("listed here", "with this layout"))
    assert not any(text.startswith("memory: ") for text in huge.bottlenecks)


def test_a_margin_of_memory_is_kept() -> None:
    """The published peaks need it; without it another layout is first, which the search names."""
    recipe, cluster = load("qwen3-8b", ["train.microbatch_size=none"], "dp=1"), parse("h100:8")
    whole = limit(with_margin(cluster, 0))
    assert limit(cluster) == pytest.approx((1 - MARGIN) * whole)
    careful, bold = search(recipe, cluster, 1), search(recipe, with_margin(cluster, 0), 1)
    first, other = careful.plans[0], bold.plans[0]
    assert first.peak_bytes <= limit(cluster) < other.peak_bytes <= whole
    gain = 100 * (first.step.seconds / other.step.seconds - 1)
    (text,) = (text for text in careful.bottlenecks if text.startswith("margin: "))
    assert f"{to_text(other.layout)} with microbatches of {other.setting.sizes.B}" in text
    assert f"would be {gain:.1f}% faster; it fits without the margin of 7% (--margin 0)" in text
    assert not any(text.startswith("margin: ") for text in bold.bottlenecks)
    verdict = "DOES NOT FIT; it does without the margin of 7% (--margin 0)"
    assert verdict in summary(predict(apply(recipe, other), cluster))[2]
    assert "fits, near the limit (" in summary(predict(apply(recipe, other), with_margin(cluster, 0)))[2]
    assert summary(predict(apply(recipe, first), cluster))[2].endswith(": fits")
    needed = [peaks["margin"]["needed"] for name, peaks in PUBLISHED.items() if name.startswith("simumax")]
    assert MARGIN - 0.01 < max(needed) <= MARGIN


@pytest.mark.slow
def test_a_margin_that_excludes_every_layout_is_named() -> None:
    recipe = change(LLAMA, ["train.global_batch_size=64"], "dp=1")
    roomy = with_margin(parse("h100:8"), 0)
    least = search(recipe, replace(roomy, device=replace(roomy.device, memory=2e9)), 1)
    smallest = float(least.nothing.split(" needs ")[1].split()[0]) * 2**30
    memory = 1.03 * smallest * (1 + FRAGMENTS) + roomy.device.reserve
    tight = replace(roomy, device=replace(roomy.device, memory=memory, margin=0.07))
    assert search(recipe, tight, 1).nothing.endswith(
        " GiB per device. It fits without the margin of 7% (--margin 0)"
    )
    assert search(recipe, with_margin(tight, 0), 1).plans


def test_measured_cpus_keep_no_margin_unless_asked() -> None:
    machine = replace(of_table(assumed_table(4)), devices=4)
    assert limit(machine) == limit(machine, margin=False)
    assert limit(with_margin(machine, 5).for_ranks(2)) == pytest.approx(0.95 * limit(machine.for_ranks(2)))


def _huge(cluster: Cluster) -> Cluster:
    return replace(cluster, device=replace(cluster.device, memory=1e15))


def test_divisibility_that_binds_is_named() -> None:
    """A model with 7 heads over 8 devices of a node, and one sequence: no tensor parallelism but 7's."""
    sets = [
        "model.heads=7",
        "model.dim=7168",
        "model.ffn_dim=28672",
        "train.global_batch_size=1",
        "model.layers=3",
        "train.microbatch_size=1",
    ]
    found = search(change(LLAMA, sets, "dp=1"), parse("h100:8"), 1)
    text = next(text for text in found.bottlenecks if text.startswith("divisibility: "))
    assert "does not divide the model" in text


def test_small_batches_bind() -> None:
    found = search(change(LLAMA, ["train.global_batch_size=8"], "dp=1"), parse("h100:16"), 1)
    assert any(text.startswith("batch size: ") for text in found.bottlenecks)


def test_within_less_memory() -> None:
    found = on_sixteen()
    best = found.plans[0]
    other = found.within(0.8 * best.peak_bytes)
    assert other is not None
    assert other.peak_bytes <= 0.8 * best.peak_bytes
    assert other.step.seconds >= best.step.seconds
    assert found.within(1.0) is None


@pytest.mark.parametrize(
    ("sets", "cluster", "message"),
    [
        ([], "h100", "a search needs a number of devices, such as h100:64"),
        (SEVEN, "h100:11", "Nearest valid: train.global_batch_size = 11, or h100:7"),
        (["precision.mode=bf16"], "nobf16.toml:8", "the planner prices"),
    ],
)  # fmt: skip
def test_nothing_to_search(
    sets: list[str], cluster: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("nobf16.toml").write_text('base = "h100"\n')
    machine = parse(cluster)
    if cluster.startswith("nobf16"):
        machine = replace(machine, device=replace(machine.device, peak={"fp32": 1e13}))
    with pytest.raises(UserError) as error:
        search(small(sets), machine)
    assert message in str(error.value)


def test_the_nearest_valid_batch_and_number_are_valid() -> None:
    sets = [
        "train.global_batch_size=7",
        "model.layers=1",
        "model.heads=3",
        "model.kv_heads=none",
        "model.dim=384",
    ]
    assert search(small(sets), parse("h100:7")).plans
    assert search(small([*sets, "train.global_batch_size=11"]), parse("h100:11")).plans


def test_a_model_that_fits_nowhere_says_how_many_devices_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """And on so many it fits, on one fewer it does not."""
    recipe = change(LLAMA, ["train.global_batch_size=64"], "dp=1")
    found = search(recipe, parse("h100:1"))
    text = found.nothing
    assert all(plan.layout.offload != "none" for plan in found.plans)
    assert text.startswith("no layout fits: ")
    assert "GiB per device" in text
    enough = int(text.split("h100:")[1].split()[0])
    assert not search(recipe, parse(f"h100:{enough}"), 1).nothing
    assert search(recipe, parse(f"h100:{enough - 1}"), 1).nothing
    assert "if not fewer" not in text
    monkeypatch.setattr(searching, "TRIED", 0)  # only doublings are tried
    assert f"h100:{enough} would be enough, if not fewer (" in search(recipe, parse("h100:1")).nothing


def test_a_device_without_memory(tmp_path: Path) -> None:
    file = tmp_path / "tiny.toml"
    file.write_text('base = "h100"\nmemory_gb = 1.0\n')
    assert "the runtime takes" in search(small([]), parse(f"{file}:4")).nothing


def test_saved_recipes_load(tmp_path: Path) -> None:
    from fivefold.recipe import to_toml

    plan = on_sixteen().plans[0]
    file = tmp_path / "best.toml"
    file.write_text(to_toml(apply(LLAMA, plan)))
    assert tomllib.loads(file.read_text())["layout"]["pp"] == plan.layout.pp
    again = predict(load(file), parse("h100:16"))
    assert again.step.seconds == pytest.approx(plan.step.seconds)


@pytest.mark.slow
def test_fp8_is_searched_when_asked_for() -> None:
    """It wins where the device multiplies it faster, and loses where it is emulated."""
    best = {
        name: search(LLAMA, parse(name), 1, modes=("bf16", "fp8")).plans[0] for name in ("h100:8", "a100:8")
    }
    assert {name: plan.setting.mode for name, plan in best.items()} == {"h100:8": "fp8", "a100:8": "bf16"}
    plain = search(LLAMA, parse("h100:8"), 1, modes=("bf16",)).plans[0]
    assert 0.5 < best["h100:8"].step.seconds / plain.step.seconds < 0.9
    assert apply(LLAMA, best["h100:8"]).precision.mode == "fp8"
    same = [
        predict(change(LLAMA, [f"precision.mode={m}"], "dp=8,zero=3"), parse("h100:8"))
        for m in ("fp8", "bf16")
    ]
    assert same[0].memory[0].params == same[1].memory[0].params
    assert same[0].memory[0].optimizer == same[1].memory[0].optimizer
    with pytest.raises(UserError, match="fp7"):
        search(LLAMA, parse("h100:8"), modes=("fp7",))


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_offload_that_is_offered_is_one_that_trains(name: str) -> None:
    """Updates by rules are not streamed, so there is nothing to offer with muon."""
    recipe = change(load("llama-7b", []), [f"optim.name={name}"])
    found = search(recipe, parse("h100:1"), 3)
    assert bool(found.plans) == (name == "adamw")
    assert not any(any(contradictions(apply(recipe, plan))) for plan in found.plans)
