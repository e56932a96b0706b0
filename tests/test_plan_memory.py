"""Memory: the published formulas exactly, the tables of what the trainer keeps, and its own steps closely."""

import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
from marks import only, slow
from ranks import run_ranks
from steps import CASES, planned, recipe_of, tracked

from fivefold.models.card import card_of
from fivefold.models.operations import Sizes
from fivefold.models.section import ModelSection
from fivefold.optim import OPTIMIZERS
from fivefold.recipe import Recipe, count_parameters, load, resolve_model
from fivefold.sharding.layout import Layout
from fivefold.sharding.parts import held, size_of
from fivefold.train.user_hooks import WITHOUT
from fivefold_plan.cluster.clusters import parse
from fivefold_plan.cluster.devices import of_table
from fivefold_plan.cluster.measured import assumed_table
from fivefold_plan.forecast import run as prediction
from fivefold_plan.memory import memory, model_states
from fivefold_plan.messages import volume
from fivefold_plan.predict import held as at_peak
from fivefold_plan.predict import predict
from fivefold_plan.search.search import apply, search
from fivefold_plan.setting import FIVEFOLD, FIVEFOLD_CPU, PAPER, Software, own_states, setting
from fivefold_plan.trace.depth import exact

BF16, FP32 = own_states("bf16"), own_states("fp32")
# arXiv 1910.02054, table 1: GB of model states by data-parallel size; ZeRO stages 1, 2, 3 of 7.5B, 128B, 1T.
ZERO = """dp,7.5B 1,7.5B 2,7.5B 3,128B 1,128B 2,128B 3,1T 1,1T 2,1T 3
1,120,120,120,2048,2048,2048,16000,16000,16000
4,52.5,41.3,30,896,704,512,7000,5500,4000
16,35.6,21.6,7.5,608,368,128,4750,2875,1000
64,31.4,16.6,1.88,536,284,32,4187,2218,250
256,30.4,15.4,0.47,518,263,8,4046,2054,62.5
1024,30.1,15.1,0.12,513,257,2,4011,2013,15.6
"""
SIZES = {"7.5B": 7.5e9, "128B": 128e9, "1T": 1e12}


@pytest.mark.parametrize("row", list(csv.DictReader(io.StringIO(ZERO))), ids=lambda row: f"dp{row['dp']}")
def test_zero_table(row: dict[str, str]) -> None:
    """To the last digit printed: the paper rounds decimals and cuts off what follows a whole number."""
    shards = int(row.pop("dp"))
    for key, printed in row.items():
        name, zero = key.split()
        found = sum(model_states.state_bytes(PAPER, int(zero), SIZES[name], SIZES[name] / shards)) / 1e9
        digits = len(printed.partition(".")[2])
        if digits:
            assert abs(found - float(printed)) <= 0.5 * 10**-digits + 1e-9
        else:
            assert int(found) == int(printed)


MEGATRON = Software(attention="plain", probability_dropout=True, selective="core", loss="plain")


def gpt(
    layers: int = 4, dim: int = 1024, heads: int = 16, seq_len: int = 2048, V: int = 51200
) -> ModelSection:
    model = ModelSection(arch="gpt2", layers=layers, dim=dim, heads=heads, seq_len=seq_len, dropout=0.1)
    return resolve_model(model, vocab_size=V)


@pytest.mark.parametrize("t", [1, 2, 8])
@pytest.mark.parametrize("b", [1, 4])
def test_activations_of_a_layer_are_those_of_the_formulas(t: int, b: int) -> None:
    """arXiv 2205.05198, table 2."""
    model = gpt()
    s, h, a = model.seq_len, model.dim, model.heads

    def layer(recompute: str, sp: bool) -> float:
        ops = card_of(model).block_operations(
            Sizes(model, b, tp=t, sp=sp and t > 1, sp_regather=sp), MEGATRON
        )
        return memory.kept(ops, recompute, MEGATRON)

    assert layer("none", False) == s * b * h * (10 + 24 / t + 5 * a * s / (h * t))
    assert layer("none", True) == s * b * h * (34 / t + 5 * a * s / (h * t))
    assert layer("selective", False) == s * b * h * (10 + 24 / t)
    assert layer("selective", True) == s * b * h * 34 / t
    assert layer("full", False) == s * b * h * 2


@pytest.mark.parametrize(("p", "t"), [(1, 8), (1, 2)])
def test_what_comes_besides_the_layers(p: int, t: int) -> None:
    """Section 4.3 there: the mask of the embedding, the last norm, the output layer's input and fp32 logits."""
    model, b = gpt(), 2
    s, h, L, v = model.seq_len, model.dim, model.layers, model.vocab_size or 0
    sizes = Sizes(model, b, tp=t, sp=True)
    work = card_of(model).work(sizes, MEGATRON)
    extra = sum(memory.kept(ops, "none", MEGATRON) for ops in (work.begin, work.end))
    assert extra == s * b * h * L / t * (p / L + (4 / L) * (1 + v / h))


def test_live_microbatches_of_the_first_stage() -> None:
    """1F1B keeps p microbatches of L/p layers: L layers; interleaved 1 + (p-1)/(pm) times as much."""
    model, p = gpt(layers=16), 4
    per_layer = memory.kept(card_of(model).block_operations(Sizes(model, 1), MEGATRON), "none", MEGATRON)
    plain, _ = memory.live_schedule(Layout(pp=p), 32)
    looped, _ = memory.live_schedule(Layout(pp=p, schedule="interleaved", virtual_stages=2), 32)
    assert plain is not None
    assert looped is not None
    assert memory.peak_live(plain, [per_layer * 4] * 4)[0] == per_layer * 16
    assert memory.peak_live(looped, [per_layer * 2] * 8)[0] == per_layer * 16 * (1 + (p - 1) / (p * 2))


@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        Layout(tp=2),
        Layout(pp=2, tp=2),
        Layout(dp_shard=4, zero=1),
        Layout(pp=2, dp_shard=3, zero=3, schedule="interleaved", virtual_stages=2),
        Layout(pp=2, dp_shard=2, cp=2, tp=2, zero=2, schedule="zbv"),
        Layout(dp_replicate=2),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "arch", ["llama", "gpt2", "bert", "moe", "qwen3", "olmo2", "deepseek", "qwen3_moe", "speedrun"]
)
def test_elements_are_those_of_the_sharding_table(layout: Layout, arch: str) -> None:
    section = ModelSection(arch=arch, layers=7, dim=64, heads=4, seq_len=32, ffn_dim=96)  # pyright: ignore[reportArgumentType]
    model = resolve_model(section, vocab_size=256)
    for position, own in enumerate(model_states.rank_elements(setting(model, layout, parse("h100"), 1, 1))):
        rank = layout.rank({"pp": position})
        parts = held(card_of(model), layout, rank).values()
        assert own.computes == sum(size_of(part.computes) for part in parts)
        assert own.keeps == sum(size_of(part.keeps) for part in parts)


def test_parts_of_a_prediction_add_up() -> None:
    model = resolve_model(ModelSection(layers=8, dim=512, heads=8, seq_len=1024), vocab_size=32000)
    layout = Layout(pp=2, dp_shard=4, zero=1)
    s = setting(model, layout, parse("h100"), 2, 8)
    first, last = memory.predict(s)
    for found, own in zip((first, last), model_states.rank_elements(s), strict=True):
        assert found.params == 2 * own.computes
        assert found.gradients == 4 * own.computes  # whole while microbatches add up
        assert found.optimizer == 12 * own.keeps
        parts = [v for k, v in found.as_json().items() if k != "total"]
        assert found.total == pytest.approx(sum(parts), abs=5)
    assert first.activations > last.activations  # two live microbatches against one


def test_recomputation_takes_less() -> None:
    """Fused attention of GPUs keeps nothing that "selective" could free."""
    model = resolve_model(ModelSection(layers=8, dim=512, heads=8, seq_len=1024), vocab_size=32000)
    for software, core in ((FIVEFOLD_CPU, True), (FIVEFOLD, False)):
        none, selective, norm, ops, full = (
            memory.predict(setting(model, Layout(recompute=how), parse("h100"), 4, 1, software=software))[
                0
            ].activations
            for how in ("none", "selective", "ops:norm", "ops:attention+gate+norm", "full")
        )
        assert none > norm > ops > full
        assert (none > selective > ops) if core else (none == selective)


def test_states_of_the_trainer() -> None:
    """bf16: 18 bytes a parameter (weights 2, masters 4, gradients 4, moments 8). Under ZeRO as FSDP2 has them: masters,
    moments and gradients of the own rows, weights whole while they are gathered."""
    psi, n = 1000.0, 4
    assert sum(model_states.state_bytes(BF16, 0, psi, psi)) == 18 * psi
    assert sum(model_states.state_bytes(BF16, 1, psi, psi / n)) == (2 + 4) * psi + 12 * psi / n
    assert sum(model_states.state_bytes(BF16, 1, psi, psi / n, microbatches=1)) == 2 * psi + 16 * psi / n
    assert sum(model_states.state_bytes(BF16, 2, psi, psi / n)) == 2 * psi + 16 * psi / n
    assert sum(model_states.state_bytes(BF16, 3, psi, psi / n)) == 16 * psi / n
    for zero, weights in ((1, 2), (2, 2), (3, 0)):  # in a pipeline gradients add up whole under every stage
        whole = sum(model_states.state_bytes(BF16, zero, psi, psi / n, pp=2))
        assert whole == (weights + 4) * psi + 12 * psi / n
    assert sum(model_states.state_bytes(FP32, 0, psi, psi)) == 16 * psi
    assert sum(model_states.state_bytes(FP32, 3, psi, psi / n)) == 16 * psi / n


TRACKED = Path(__file__).parents[1] / "benchmarks" / "results" / "planner_own_memory.json"


def errors(recipe: Recipe, peaks: list[int]) -> list[float]:
    """Of the formula, by the peak of every rank."""
    s = planned(recipe)
    positions = at_peak(s)
    return [positions[s.layout.coordinates(rank)["pp"]].total / peak - 1 for rank, peak in enumerate(peaks)]


def test_the_error_is_the_one_that_plans_state() -> None:
    """Over the layouts that benchmarks/planner/own_memory.py has tracked."""
    rows = json.loads(TRACKED.read_text(encoding="utf-8"))["rows"]
    found = [errors(recipe_of(row["arch"], row["mode"], row["layout"]), row["tracked"]) for row in rows]
    every = [error for row in found for error in row]
    assert len(found) == len(CASES)
    assert fmean(map(abs, every)) <= memory.ERROR
    assert max(map(abs, every)) <= 0.05


TRACED = [
    ("llama", "bf16", "dp=1,recompute=selective"),
    ("llama", "bf16", "dp=1,zero=3"),
    ("qwen3", "bf16", "dp=1"),
    ("qwen3", "fp32", "tp=2,sp=true,recompute=selective"),
    ("llama", "bf16", "tp=2,sp=true,sp_regather=true"),
    ("llama", "fp32", "tp=2,sp=true,sp_regather=true,recompute=ops:norm"),
    ("gpt2", "bf16", "dp=1,recompute=ops:gate+norm"),
    ("qwen3", "bf16", "cp=2,cp_method=ulysses,recompute=selective"),
    ("deepseek", "bf16", "tp=2,sp=true,sp_regather=true"),
    ("llama", "bf16", "cp=2,cp_method=all_gather"),
    ("llama", "bf16", "dp=4,zero=3,ranks_per_node=2,zeropp=weights,hier,gradients"),
    ("llama", "fp8", "tp=2,sp=true,recompute=full"),
    ("llama", "mxfp8", "dp=1"),
    ("moe", "fp8", "dp=2,ep=2,zero=2"),
    ("moe", "fp32", "dp=2,ep=2,expert_chunks=4"),
    ("moe", "bf16", "dp=2,tp=2,sp=true,ep=2,ep_fold=true,zero=2"),
    ("llama", "bf16", "tp=2,recompute=full,offload=activations:tp"),
    ("speedrun", "bf16", "dp=1"),
]
TRACED_SLOW = [
    ("moe", "fp32", "dp=2,ep=2,zero=1"),
    ("deepseek", "bf16", "cp=2"),
    ("deepseek", "bf16", "dp=1"),
    ("olmo2", "bf16", "dp=2,zero=3,recompute=full"),
    ("moe", "bf16", "dp=2,ep=2,zero=3"),
    ("llama", "fp32", "dp=2,zero=3,recompute=full"),
    ("speedrun", "fp32", "tp=2,sp=true,recompute=selective"),
    ("speedrun", "fp32", "dp=2,zero=3,recompute=full"),
    ("gpt2", "bf16", "pp=2,schedule=zb_h1"),
    ("moe", "bf16", "dp=2,ep=2,zero=2"),
    ("moe", "fp32", "dp=2,ep=2,expert_buffer=1.5"),
    ("moe", "bf16", "tp=2,sp=true,ep=2,ep_fold=true"),
    ("moe", "fp32", "dp=2,tp=2,sp=true,ep=4,ep_fold=true,zero=3"),
    ("llama", "fp32", "dp=1,zero=1"),
    ("olmo2", "bf16", "dp=1"),
    ("olmo2", "fp32", "dp=1,recompute=selective"),
    ("olmo2", "bf16", "tp=2"),
    ("olmo2", "fp32", "tp=2,sp=true"),
    ("llama", "bf16", "tp=2,sp=true,recompute=ops:attention+gate"),
    ("gpt2", "fp32", "dp=2,recompute=selective"),
    ("olmo2", "bf16", "tp=2,sp=true,recompute=full"),
    ("gpt2", "fp32", "tp=2,sp=true,recompute=full"),
    ("deepseek", "fp32", "dp=1,recompute=selective"),
    ("deepseek", "bf16", "tp=2,sp=true"),
    ("deepseek", "bf16", "dp=2,ep=2,zero=2"),
    ("llama", "fp32", "dp=4,zero=3,ranks_per_node=2,zeropp=hier"),
    ("llama", "bf16", "dp=4,zero=3,ranks_per_node=2,zeropp=weights,gradients:int8"),
    ("moe", "bf16", "tp=2"),
    ("llama", "fp8", "dp=1"),
    ("moe", "bf16", "tp=2,sp=true,recompute=full"),
    ("llama", "fp32", "cp=4,cp_method=all_gather"),
    ("deepseek", "bf16", "cp=2,cp_method=all_gather"),
    ("gpt2", "bf16", "cp=2,cp_method=all_gather,recompute=full"),
    ("llama", "bf16", "tp=2,sp=true,tp_chunks=2"),
    ("llama", "bf16", "tp=2,sp=true,sp_regather=true,tp_chunks=4"),
    ("deepseek", "bf16", "tp=2,sp=true,tp_chunks=4"),
    ("llama", "fp8", "tp=2,dp=2,zero=3,sp=true,tp_chunks=4"),
    ("llama", "nanotron", "dp=2,zero=3"),
    ("gpt2", "bf16", "tp=2,sp=true,tp_chunks=4,recompute=full"),
]
"""Their parts are in the others, too: `make test-all`."""


@pytest.mark.parametrize(("arch", "mode", "layout"), [*TRACED, *slow(*TRACED_SLOW)])
def test_the_formula_is_close_to_a_traced_step(arch: str, mode: str, layout: str) -> None:
    recipe = recipe_of(arch, mode, layout)
    traced, found = exact(recipe).step.memory, at_peak(planned(recipe))[0]
    assert abs(found.total / traced.total - 1) <= 0.05
    assert found.params == traced.at_peak["params"]
    assert found.gradients == traced.at_peak["gradients"]
    scales = 2 * (mode == "nanotron")  # of moments of 8 bits, beside a count of steps
    once = 4 * (1 + scales) * len(card_of(recipe.model).parameters)
    assert found.optimizer == pytest.approx(traced.at_peak["optimizer"], rel=1e-4, abs=once), (
        "it leaves out what a tensor has once"
    )


def test_chunks_round_a_weight_once() -> None:
    model = resolve_model(load("llama-7b").model, vocab_size=32000)
    layouts = [Layout(tp=2, dp_shard=8, zero=3, sp=True, tp_chunks=n) for n in (1, 8)]
    settings = [setting(model, layout, parse("h100:2x8"), 1, 1, "fp8") for layout in layouts]
    once, cut = ([part[2] for part in memory.sums(s).block[False, False].parts] for s in settings)
    assert max(cut) == max(once) > 0
    assert all(after <= 1.5 * before for before, after in zip(once, cut, strict=True))


@pytest.mark.parametrize("schedule", ["zb_h1", "zbv,virtual_stages=2,sp_regather=true"])
def test_deferred_weight_gradients_are_activations(schedule: str) -> None:
    """Of the last rank, which defers most; the whole sequences that sequence parallelism gathers are kept until W."""
    recipe = recipe_of("llama", "bf16", f"pp=2,tp=2,sp=true,schedule={schedule}", "model.layers=8")
    traced, found = exact(recipe, 2).step.memory, at_peak(planned(recipe))[1]
    assert found.total == pytest.approx(traced.total, rel=0.05)
    assert found.activations == pytest.approx(traced.at_peak["activations"], rel=0.08)


VIRTUAL = "pp=2,dp=2,zero=1,schedule=interleaved,virtual_stages=4,round_microbatches=4"


@pytest.mark.parametrize("rank", [0, *slow(2)])
def test_gradients_of_virtual_stages_do_not_all_exist_at_once(rank: int) -> None:
    """When most microbatches are live, those of one or two of a rank's four stages do."""
    recipe = recipe_of("llama", "bf16", VIRTUAL, "model.layers=8")
    s, traced = planned(recipe), exact(recipe, rank).step.memory
    found, position = at_peak(s)[rank // 2], model_states.rank_elements(s)[rank // 2]
    _, every, _ = model_states.rank_states(s, position)
    assert found.total == pytest.approx(traced.total, rel=0.01)
    assert found.gradients == traced.at_peak["gradients"] < 0.4 * every


@pytest.mark.slow
@pytest.mark.parametrize(("zero", "rank"), [(0, 0), (1, 0), (1, 2), (3, 4)])
def test_two_copies_of_the_model_take_twice_the_states(zero: int, rank: int) -> None:
    recipe = recipe_of("llama", "bf16", f"pp=4,dp=2,zero={zero},schedule=dualpipe", "model.layers=8")
    one = recipe_of("llama", "bf16", f"pp=4,dp=2,zero={zero}", "model.layers=8")
    traced, found = exact(recipe, rank).step.memory, at_peak(planned(recipe))[rank // 2]
    assert found.total == pytest.approx(traced.total, rel=0.05)
    assert found.optimizer == pytest.approx(traced.at_peak["optimizer"], rel=1e-4)
    states = [sum(held.optimizer for held in at_peak(planned(r))) for r in (recipe, one)]
    tied = BF16.optimizer * (recipe.model.vocab_size or 0) * recipe.model.dim / (2 if zero else 1)
    assert states[0] == 2 * (states[1] - tied), (
        "a rank with both ends of the model has one embedding for them"
    )


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 2])
def test_stages_without_blocks_take_little(rank: int) -> None:
    recipe = recipe_of("llama", "bf16", "pp=4,dp=2,zero=1,bare_ends=true", "model.layers=2")
    traced, found = exact(recipe, rank).step.memory, at_peak(planned(recipe))[rank // 2]
    assert found.total == pytest.approx(traced.total, rel=0.05)
    assert found.params == traced.at_peak["params"]


@pytest.mark.slow
def test_outputs_of_stages_are_not_kept() -> None:
    """What a stage has sent on is the next one's."""
    recipe = recipe_of("llama", "bf16", f"{VIRTUAL},recompute=full", "model.layers=8")
    kept = exact(recipe).step.memory.highest["activations"]
    s = planned(recipe)
    assert kept < 9e6 < kept + len(s.stages) / 2 * s.microbatches * s.activation


@pytest.mark.parametrize(("name", "layout"), [("sgd", "dp=1"), ("nesterov", "dp=2,zero=3")])
def test_other_optimizers_are_priced(name: str, layout: str) -> None:
    """Memory is that of a traced step; checkpoints, memory and time follow the states' bytes."""
    adamw = recipe_of("llama", "bf16", layout)
    recipe = recipe_of("llama", "bf16", layout, f"optim.name={name}")
    assert abs(errors(recipe, [exact(recipe).step.memory.total])[0]) <= 0.05
    s = planned(recipe)
    ours, plain = (predict(r, parse("h100")) for r in (recipe, adamw))
    card, kept = OPTIMIZERS[name], model_states.rank_elements(s)[0].keeps
    saved = OPTIMIZERS["adamw"].bytes - card.bytes
    assert plain.memory[0].optimizer - ours.memory[0].optimizer == pytest.approx(saved * kept)
    assert ours.stalls
    assert plain.stalls
    parameters = count_parameters(recipe.model)
    assert ours.stalls.checkpoint == (4 + card.bytes) * parameters
    assert plain.stalls.checkpoint - ours.stalls.checkpoint == saved * parameters
    assert ours.step.seconds < plain.step.seconds


@pytest.mark.parametrize(
    ("name", "layout"),
    [("adafactor", "tp=2"), ("adamw8bit", "dp=2,zero=1"), ("muon", "dp=2,tp=2,zero=3"), ("soap", "pp=2")],
)
def test_states_of_other_shapes_are_counted(name: str, layout: str) -> None:
    """Their bytes on the first rank, and the messages that bring matrices together, are those of a traced step."""
    recipe = recipe_of("llama", "bf16", layout, f"optim.name={name}")
    traced, s = exact(recipe), planned(recipe)
    found = memory.predict(s)[0]
    kept = traced.step.memory.at_peak["optimizer"]
    assert found.optimizer == pytest.approx(kept, rel=1e-4), "it leaves out the count of steps"
    assert found.total == pytest.approx(traced.step.memory.total, rel=0.02)
    assert volume.counted(s) == traced.step.sent


@pytest.mark.slow
def test_the_formula_is_close_to_tracked_steps() -> None:
    every = []
    for case in CASES:
        recipe = recipe_of(*case)
        ranks = Layout.from_recipe(recipe.layout).ranks
        found = [tracked(0, 1, recipe)] if ranks == 1 else run_ranks(ranks, tracked, recipe, timeout_s=120)
        every += errors(recipe, [step.peak for step in found])
    assert fmean(map(abs, every)) <= memory.ERROR


@only("llama-fp32-local:4", "moe-bf16-a100:2x2", "llama-bf16-h100:4")
@pytest.mark.parametrize(
    ("arch", "dtype", "cluster"),
    [
        (arch, dtype, cluster)
        if cluster != "local:4" or (arch, dtype) in (("llama", "fp32"), ("moe", "bf16"))
        else pytest.param(
            arch, dtype, cluster, marks=pytest.mark.slow
        )  # the search of this machine takes seconds
        for arch in ("llama", "moe")
        for dtype in ("bf16", "fp32")
        for cluster in ("local:4", "h100:4", "a100:2x2")
    ],
)
def test_search_plan_and_run_say_the_same(
    arch: str, dtype: str, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One formula: `plan search`, `plan` and plan.json, on this machine and on GPUs."""
    sets = [f"model.arch={arch}", "model.layers=4", "model.vocab_size=4096", f"precision.mode={dtype}"]
    recipe = load("quickstart", [*sets, "train.global_batch_size=16", "train.microbatch_size=none"], "dp=1")
    machine = replace(of_table(assumed_table(4)), devices=4) if cluster == "local:4" else parse(cluster)
    found = search(recipe, machine, 12)
    assert len({plan.layout for plan in found.plans}) > 4
    for plan in found.plans:
        chosen = apply(recipe, plan)
        assert predict(chosen, machine).memory == plan.memory
        monkeypatch.setattr(prediction.Prediction, "_cluster", lambda self: machine)
        written = prediction.Prediction(_Job(chosen), None, 0)._predicted()  # pyright: ignore[reportArgumentType]
        assert written["memory"]["per_stage"] == [m.as_json() for m in plan.memory]


class _Job:
    """Of a run, what its prediction looks at."""

    module = data = batches = None
    own = WITHOUT

    def __init__(self, recipe: Recipe):
        self.recipe = recipe


def test_gpipe_keeps_the_gradients_of_every_loss() -> None:
    """The loss makes its gradients in forward: of all microbatches before the first backward."""
    model = resolve_model(ModelSection(layers=4, dim=64, heads=4, seq_len=64), vocab_size=50000)
    few, many = (
        memory.predict(setting(model, Layout(pp=2, schedule="gpipe"), parse("h100"), 1, count))[-1]
        for count in (2, 4)
    )
    assert many.activations - few.activations > 2 * 2 * 64 * 50000


def test_deferred_weight_gradients_keep_their_products_factors() -> None:
    """Under full recomputation a block keeps its input until I, and more until W."""
    model = resolve_model(ModelSection(layers=8, dim=64, heads=4, seq_len=64), vocab_size=512)
    split, whole = (
        memory.predict(setting(model, Layout(pp=4, recompute="full", schedule=name), parse("h100"), 1, 8))[0]
        for name in ("zb_h1", "1f1b")
    )
    assert split.activations > 2 * whole.activations
