"""Where the planner's constants are from, what published runs say of plans, and programs that keep and send less."""

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import constants  # benchmarks/planner
import leave_one_out
import published
import pytest

from fivefold.models.recomputation import region
from fivefold.recipe import load, resolve_model
from fivefold.sharding.layout import Layout
from fivefold.sharding.units import ROWS
from fivefold_plan.cluster.clusters import parse
from fivefold_plan.cluster.devices import Device, Link
from fivefold_plan.memory import memory
from fivefold_plan.predict import predict
from fivefold_plan.setting import Setting, Software, setting
from fivefold_plan.software import PROGRAMS, Evidence, evidence, said
from fivefold_plan.time import time

RESULTS = Path(published.__file__).parents[1] / "results"
SHEET = {"peak", "units", "memory", "bandwidth", "watts", "measured", "reduce", "mesh"}
"""What data sheets or a measured machine say of a device or a link."""


def result(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", constants.listed())
def test_constants_are_of_two_sources_or_of_none_that_was_compared(name: str) -> None:
    one = constants.listed()[name]
    assert one.source
    if one.origin == "fitted":
        assert len(one.rows) >= 2
        assert min(one.rows.values()) >= 2
    else:
        assert not one.rows


def test_all_constants_of_devices_links_and_programs_are_listed() -> None:
    def numbers(kind: Any) -> set[str]:
        hints = get_type_hints(kind)
        own = {each.name for each in fields(kind)} - SHEET
        return {f"{kind.__name__}.{name}" for name in own if "float" in str(hints[name])}

    # what bytes a program keeps and sends is counted, not fitted
    counted = {"Software.chunk_bytes", "Link.bandwidth"}
    names = {name.partition(" ")[0] for name in constants.CONSTANTS}
    assert numbers(Device) | numbers(Link) | numbers(Software) <= names | counted


def test_committed_constants_are_those_of_the_package() -> None:
    committed = {
        name: (row["value"], row["origin"])
        for name, row in result("planner_constants.json")["constants"].items()
    }
    assert committed == {
        name: (constants.shown(one.value), one.origin) for name, one in constants.listed().items()
    }


def test_a_source_does_not_choose_what_it_is_planned_with() -> None:
    """Its own runs would choose 1, the others' choose 2."""
    s = setting_of()
    every = [leave_one_out.Run(source, s, 1.0) for source in ("a", "b", "b")]
    table: Mapping[float, list[float]] = {1.0: [1.0, 1.3, 1.3], 2.0: [1.5, 1.1, 1.1], 3.0: [2.0, 1.2, 1.2]}
    assert leave_one_out.chosen(every, table, even=False) == 1.0
    others = {value: offs[1:] for value, offs in table.items()}
    assert leave_one_out.chosen(every[1:], others, even=False) == 2.0


def test_runs_that_differ_in_their_devices_only_choose_what_makes_them_evenly_far_off() -> None:
    """Both are twice too slow with 3; with 1 they disagree. Another model says nothing."""
    s = setting_of()
    every = [leave_one_out.Run("a", s, 1.0), leave_one_out.Run("a", s, 1.0)]
    every.append(leave_one_out.Run("a", replace(s, model=s.model.model_copy(update={"layers": 4})), 1.0))
    table: Mapping[float, list[float]] = {1.0: [1.0, 1.1, 1.0], 3.0: [2.0, 2.0, 9.0]}
    assert leave_one_out.chosen(every, table, even=True) == 3.0
    assert leave_one_out.chosen(every, table, even=False) == 1.0


def test_the_committed_leave_one_out_is_of_the_committed_tables() -> None:
    sources = result("planner_leave_one_out.json")["sources"]
    tables = result("planner_published.json")
    for table in ("sc21", "torchtitan", "nemo_fp8", "pytorch_tp", "foundry", "deepseek_v3", "own_h100"):
        found = sources[leave_one_out.SOURCES[table]]["shipped"]
        assert found["rows"] == tables[table]["rows"]
        if table != "torchtitan":  # whose table compares tokens per second
            assert found["bias"] == pytest.approx(tables[table]["bias"])


def test_a_plan_says_what_was_published_of_its_memory() -> None:
    def words(layout: str, recipe: str = "llama3-8b") -> str:
        return said(predict(load(recipe, [], layout), parse("h100:8")).setting)[0]

    assert "(18 published runs of this kind on 1 to 8 devices: SimuMax, Fivefold)" in words("dp=8,zero=1")
    assert "on 2 to 128 devices" in words("dp=8,zero=3")
    assert words("dp=8,ep=8,zero=3", "mixtral-8x7b").startswith("memory not known: nobody has published")
    assert Evidence("A", 8, 8, 1, 0.05, 0.05).says("time") == (
        "time 5% off (1 published run of this kind on 8 devices: A)"
    )
    plan = predict(load("llama3-8b", [], "dp=8,zero=1"), parse("h100:8"))
    assert (found := evidence(plan.setting, "memory"))
    assert plan.as_json()["memory"]["error"] == found.mean


def setting_of(
    software: Software = PROGRAMS["megatron-core"], mode: str = "bf16", recompute: str = "none"
) -> Setting:
    """DeepSeek-V3's shape, with experts over 64 of 128 devices."""
    layout = Layout(pp=2, dp_shard=64, ep=64, zero=1, recompute=recompute)
    model = resolve_model(load("deepseek-v3").model, vocab_size=129280)
    return setting(model, layout, parse("h800"), 1, 2, mode, software)


def rows_sent(s: Setting) -> float:
    return sum(m.size for op in s.last_block for m in op.sent_forward if m.axis == ROWS.axis and m.size > 1e6)


def test_a_row_crosses_to_a_node_once() -> None:
    plain, once = setting_of(), setting_of(replace(PROGRAMS["megatron-core"], once_per_node=True))
    assert rows_sent(once) == pytest.approx(rows_sent(plain) * 4 / 8)
    assert time.step(once).seconds < time.step(plain).seconds


def test_kept_activations_are_as_narrow_as_the_program_keeps_them() -> None:
    """Per token of a block with experts: inputs of matmuls, and of gates, in one byte instead of two."""
    fp8 = replace(PROGRAMS["nemo"], name="other")
    model = setting_of().model
    N, k, D, F = 4096, 8, model.dim, model.expert_ffn_dim or 0

    def kept(**changes: bool) -> float:
        s = setting_of(replace(fp8, **changes), "fp8")
        return sum(saved.size for op in s.last_block for saved in op.saved)

    factors = 2 * D + k * D + (k + 1) * F  # of both norms, rows, what gates give
    assert kept() - kept(narrow_factors=True) == N * factors
    assert kept() - kept(narrow_gates=True) == N * (k + 1) * 2 * F
    assert kept() - kept(early_weights=True) == 2 * N * k * D
    assert setting_of(replace(fp8, narrow_factors=True)).sizes.kept(True) == 2  # nothing is rounded in bf16


def test_weight_gradients_of_experts_wait_only_where_a_program_defers_them() -> None:
    """Inputs and gradients of outputs, which wait as narrow as the program keeps them."""

    def owed(**changes: bool) -> float:
        s = setting_of(replace(PROGRAMS["nemo"], **changes), "fp8")
        return memory.sums(s).block[s.kind(True, "none")].owed

    s = setting_of()
    N, k, D, F = s.sizes.N, 8, s.model.dim, s.model.expert_ffn_dim or 0
    assert owed(late_experts=True) - owed() == 2 * N * k * ((D + 2 * F) + (F + D))
    assert owed(narrow_factors=True) == owed() / 2


def test_norms_and_what_latent_vectors_are_made_into_are_computed_again() -> None:
    """arXiv 2412.19437, section 3.2.3: attention's result is kept, and it does not run again."""
    software = replace(PROGRAMS["megatron-core"], selective="latent")
    again = region("selective", software)
    block = setting_of(software).last_block
    repeated = {op.name for op in block if again.repeated(op, False)}
    assert repeated == {
        "norm1",
        "latent norms",
        "query up",
        "key-value up",
        "heads",
        "norm2",
        "experts gate",
        "shared gate",
    }
    freed = {saved.name for op in block for saved in op.saved if saved.role not in again.keeps}
    assert {"norm1 output", "norm2 output", "router input in fp32", "qkv", "normed latents"} <= freed
    assert not freed & {"latents", "attention output", "log-sum-exp", "routed", "experts up"}
    few, many = (
        max(m.total for m in memory.predict(setting_of(software, recompute=how)))
        for how in ("selective", "none")
    )
    assert few < many


def test_experts_multiply_at_the_rate_of_8_bits_where_the_program_does() -> None:
    narrow = setting_of(replace(PROGRAMS["nemo"], narrow_experts=True), "fp8")
    assert time.step(narrow).seconds < time.step(setting_of(PROGRAMS["nemo"], "fp8")).seconds
    h100 = parse("h100").device
    assert h100.multiplies("fp8") == h100.multiplies("bf16") == h100.matmul
    measured = replace(h100, matmul_fp8=0.7)
    assert (measured.multiplies("fp8"), measured.multiplies("bf16")) == (0.7, h100.matmul)
