"""The GPU's path of a step, traced on a machine without a GPU: every operator takes its tensors where they are and has
a kernel for GPUs, the host waits only where docs/gpu.md says, and streams wait for each other."""

import fcntl
import json
import math
import os
from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from families import FAMILIES, overrides
from marks import only

from fivefold.errors import UserError
from fivefold.kernels import native
from fivefold.models.card import card_of
from fivefold.optim import OPTIMIZERS
from fivefold.precision import DTYPES, PRECISIONS, chosen
from fivefold.recipe import Recipe, load, microbatches_per_step, resolve
from fivefold.schedules.pipeline import SCHEDULES
from fivefold.schedules.timelines import AWAY
from fivefold.sharding.layout import Layout
from fivefold.sharding.parts import stages_of
from fivefold.sharding.tiers import BEHIND, WINDOW, tiers
from fivefold.sharding.units import scattered_once
from fivefold_plan.cluster.clusters import parse
from fivefold_plan.memory.memory import Memory
from fivefold_plan.memory.model_states import outside_blocks
from fivefold_plan.predict import predict
from fivefold_plan.trace import gpu
from fivefold_plan.trace.depth import exact
from fivefold_plan.trace.fake import CPU, Fake, FakeMode
from fivefold_plan.trace.step import DEVICE, firsts
from fivefold_plan.trace.traffic import flops_of

V = 96
TINY = [
    "model.dim=32", "model.heads=4", "model.kv_heads=2", "model.ffn_dim=80",
    "model.seq_len=32", f"model.vocab_size={V}", "train.global_batch_size=8", "train.microbatch_size=2",
    "train.sample_every=0", "train.steps=4", "optim.warmup_steps=0", "model.tie_embeddings=true",
    "data.document_masks=true",
]  # fmt: skip
ARCHS = {
    "llama": [],
    "gpt2": ["model.kv_heads=4", "model.dropout=0.1"],
    "bert": ["model.kv_heads=4", "model.dropout=0.1"],
    "moe": ["model.experts=4", "model.experts_per_token=2", "model.shared_experts=1", "model.balance=bias"],
}
MORE_ARCHS = {"qwen3": ["model.head_dim=12"], "olmo2": []} | {arch: overrides(arch)[1:] for arch in FAMILIES}
PIPELINES = [
    f"pp=2,schedule={name},virtual_stages={max(1, min(2, schedule.stages[1] or 2))}"
    for name, schedule in SCHEDULES.items()
]
LAYOUTS = [
    "dp=1", "dp=1,recompute=full", "dp=1,recompute=selective", "dp=2",
    "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "dp_replicate=2,dp_shard=2,zero=2",
    "tp=2", "tp=2,sp=true", "tp=2,sp=true,recompute=selective", "cp=2", "cp=2,cp_method=ulysses",
    "cp=2,cp_method=all_gather", *PIPELINES,
    "dp=2,tp=2,pp=2,zero=1,schedule=1f1b",
    "dp=2,tp=2,pp=2,sp=true,zero=3,schedule=zbv,virtual_stages=2,recompute=full",
    "dp=2,cp=2,tp=2,pp=2,sp=true,zero=2,schedule=gpipe",
]  # fmt: skip
EXPERTS = [
    "dp=2,ep=2", "dp=2,ep=2,zero=3", "dp=2,tp=2,ep=2,sp=true,recompute=full",
    "dp=2,cp=2,tp=2,pp=2,ep=2,sp=true,zero=1,schedule=1f1b", "dp=2,ep=2,expert_buffer=2",
]  # fmt: skip
SAME = {text for text in PIPELINES if "=1f1b" not in text and "=zbv" not in text}
"""Schedules move activations of any architecture alike: two of these trace them all."""
CASES = [
    *(
        (arch, layout)
        for arch in ARCHS
        for layout in LAYOUTS
        if arch in ("llama", "moe") or layout not in SAME
    ),
    *(("moe", layout) for layout in EXPERTS),
    *((arch, layout) for arch in MORE_ARCHS for layout in ("dp=2,zero=3", "tp=2,sp=true", "cp=2")),
    ("llama", "tp=2,sp=true,sp_regather=true,tp_chunks=2"),
]
FEW = {"dp=2,zero=3", "tp=2,sp=true", EXPERTS[1], EXPERTS[-1]}
"""Layouts of `make test` for architectures that others resemble; `make test-all` has all of them."""
SLOW = {text for text in PIPELINES if "=zbv" not in text} | {
    "dp=1", "dp=2", "dp=2,zero=1", "dp=1,recompute=full", "dp=1,recompute=selective", "tp=2", LAYOUTS[-2], LAYOUTS[-3],
    "cp=2,cp_method=all_gather", "tp=2,sp=true,sp_regather=true,tp_chunks=2",
}  # fmt: skip
"""Layouts whose operators others have, too."""
SPARED = {(arch, "dp=2,zero=3") for arch in ("moe", *MORE_ARCHS) if arch not in ("gpt_oss", "qwen3_next")}
"""Others show how these gather weights: experts of two ranks, of fp8, and the models of `ARCHS`."""
SPARED |= {(arch, "tp=2,sp=true") for arch in ("mistral", "qwen2", "smollm3", "olmo3", "phi3", "glm4")}
"""Their windows, biases, scaled positions and norms are in gemma3, gpt_oss, qwen3_next and olmo2, too."""
SOME = [
    (arch, layout)
    if (layout in FEW and (arch, layout) not in SPARED) or (arch == "llama" and layout not in SLOW)
    else pytest.param(arch, layout, marks=pytest.mark.slow)
    for arch, layout in CASES
]
COMPARED = ("dp=2", "tp=2,sp=true", "dp=2,zero=3")
FOR_BLOCKS = ("dim=256", "kv_heads=4", "ffn_dim=256", "seq_len=64")
PLANNED = ("none", "states:host", "states:disk", "all:disk")
WIDE = [
    "model.dim=1024",
    "model.ffn_dim=4096",
    "model.vocab_size=32000",
    "model.seq_len=128",
    "layout.recompute=full",
]
"""A model of which the plan and the trace are compared."""
LARGE = ["model.seq_len=512", "model.dim=64", "model.vocab_size=4096"]
"""A model of which some activations are large enough to leave the device."""
WHOLE = ["data.document_masks=false"]
OTHERS = {  # in a case of their own: precision, optimizer, fields of a model
    "fp32": ("dp=2,zero=3", "llama", ["precision.mode=fp32"]),
    "fp32 ring": ("cp=2", "llama", ["precision.mode=fp32"]),
    "fp32, as many keys": ("dp=1", "gpt2", ["precision.mode=fp32", "model.seq_len=20"]),
    "whole sequences": ("dp=1", "llama", WHOLE),
    "whole sequences, fp32": ("dp=1", "gpt2", ["precision.mode=fp32", *WHOLE]),
    "whole sequences, ring": ("cp=2", "llama", WHOLE),
    "whole sequences, gathered": ("cp=2,cp_method=all_gather", "llama", WHOLE),
    "fp32, gathered": ("cp=2,cp_method=all_gather", "bert", ["precision.mode=fp32"]),
    "diloco": ("dp_replicate=2", "llama", ["sync.method=diloco", "sync.every=2"]),
    "diloco in fragments": (
        "dp_replicate=2,dp_shard=2,zero=3",
        "llama",
        [
            "sync.method=diloco",
            "sync.every=2",
            "sync.fragments=2",
            "sync.overlap=1",
            "sync.outer_dtype=int8",
        ],
    ),
    "auto": ("dp=1", "llama", ["precision.mode=auto"]),
    "zero++": ("dp=4,zero=3,ranks_per_node=2,zeropp=weights,hier,gradients", "llama", []),
    "bf16 sums": ("dp=2,zero=1", "llama", ["precision.reduce=bf16"]),
    "untied": ("tp=2", "llama", ["model.tie_embeddings=false"]),
    "fp8 blocks": ("tp=2,sp=true", "llama", ["precision.mode=fp8", *(f"model.{x}" for x in FOR_BLOCKS)]),
    "fp8 blocks, gathered": (
        "dp=2,zero=3",
        "llama",
        ["precision.mode=fp8", *(f"model.{x}" for x in FOR_BLOCKS)],
    ),
    "fp8 tensors, gathered": ("dp=2,zero=3", "llama", ["precision.mode=nanotron"]),
    "fp8 rows": ("dp=2,zero=3", "moe", ["precision.mode=fp8", "precision.fp8_scaling=row"]),
    "fp8 tensors": ("dp=1", "llama", ["precision.mode=fp8", "precision.fp8_scaling=tensor"]),
    "tf32": ("dp=2", "llama", ["precision.mode=tf32"]),
    "fp16": ("dp=1", "llama", ["precision.mode=fp16"]),
    "fp16 rows": ("dp=2,zero=3", "llama", ["precision.mode=fp16"]),
    **{
        f"bf16_pure {how}": (layout, "llama", ["precision.mode=bf16_pure", f"precision.rounding={how}"])
        for how, layout in (("nearest", "dp=1"), ("stochastic", "dp=2,zero=2"), ("kahan", "tp=2"))
    },
    "no clipping": ("dp=1", "llama", ["optim.grad_clip=0"]),
    **{
        name: ("dp=1" if card.rule else "dp=2,zero=2", "llama", [f"optim.name={name}"])
        for name, card in OPTIMIZERS.items()
    },
    "whole matrices": ("dp=2,zero=2", "llama", ["optim.name=muon"]),
    "new bases": ("tp=2", "llama", ["optim.name=soap", "optim.basis_every=1"]),
    "capacity": ("dp=1", "moe", ["model.capacity_factor=1.0"]),
    **{
        f"{offload}, {layout}": (layout, "llama", [f"layout.offload={offload}", "model.layers=4", *LARGE])
        for offload, layout in (
            ("activations", "dp=1"),
            ("activations", "tp=2,recompute=full"),
            ("activations", "dp=2,zero=3"),
            ("states:host", "dp=1"),
            ("states:host", "tp=2,sp=true"),
            ("states:host", "dp=2,zero=1"),
            ("states:host", "dp=2,zero=2"),
            ("all:disk", "dp=2,zero=3"),
            ("states:disk", "dp=1"),
            ("all:disk", "dp=1"),
            ("all:host", "dp=1"),
            ("all:host", "dp=2,zero=3"),
        )
    },
    **{
        f"bf16_pure, {offload}": (
            "dp=1",
            "llama",
            [f"layout.offload={offload}", "precision.mode=bf16_pure", *LARGE],
        )
        for offload in ("states:disk", "all:disk")
    },
}
AS_PLANNED = {
    f"{offload}, as planned": ("dp=1", "llama", [f"layout.offload={offload}", *WIDE]) for offload in PLANNED
}
pytestmark = pytest.mark.skipif(bool(gpu.why_not()), reason=gpu.why_not())


def recipe_of(layout: str, arch: str, *overrides: str) -> Recipe:
    few = [] if "pp=" in layout or "dp" in layout.replace("dp=1", "") else ["train.global_batch_size=4"]
    sets = [
        *TINY,
        f"model.layers={4 if 'pp=' in layout else 2}",  # as many as a pipeline has stages
        *few,
        f"model.arch={arch}",
        "precision.mode=bf16",
        *{**ARCHS, **MORE_ARCHS}.get(arch, ARCHS["moe"]),
        *overrides,
    ]
    recipe = load("quickstart", sets, layout)
    return resolve(recipe, vocab_size=recipe.model.vocab_size or V)


@pytest.fixture(scope="module")
def traced(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """The answers of one process for all cases that run. The last rank computes the loss, also in a pipeline. The
    first of pytest's workers that needs them has them traced.
    """
    run = [getattr(item, "callspec", None) for item in request.session.items if item.fspath == request.fspath]
    given = [spec.params for spec in run if spec is not None]
    cases = [(one["arch"], one["layout"]) for one in given if {"arch", "layout"} <= one.keys()]
    recipes = {(arch, layout): recipe_of(layout, arch) for arch, layout in cases}
    others = {one["name"]: OTHERS[one["name"]] for one in given if "name" in one}
    planned = {
        f"{offload}, as planned" for one in given if "offload" in one for offload in ("none", one["offload"])
    }
    others |= {name: one for name, one in AS_PLANNED.items() if name in planned}
    recipes |= {name: recipe_of(layout, arch, *sets) for name, (layout, arch, sets) in others.items()}
    place = tmp_path_factory.getbasetemp()
    place = place.parent if "PYTEST_XDIST_WORKER" in os.environ else place
    answers = place / "traced.json"
    with (place / "traced.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not answers.exists():
            jobs = ((r, Layout.from_recipe(r.layout).ranks - 1) for r in recipes.values())
            answers.write_text(json.dumps(gpu.on_gpu((), in_python=jobs)))
        found = json.loads(answers.read_text())
    return {key: (recipe, answer) for (key, recipe), answer in zip(recipes.items(), found, strict=True)}


def syncs(answer: dict) -> Counter[tuple[str, str]]:
    """Host syncs by operation and file."""
    found = Counter()
    for sync in answer["exact"]["host_syncs"]:
        found[sync["operation"], sync["at"].split(":")[0]] += sync["times"]
    return found


def expected(recipe: Recipe) -> dict[tuple[str, str], int]:
    """What the table of docs/gpu.md says of the last rank."""
    model, layout = recipe.model, Layout.from_recipe(recipe.layout)
    microbatches = microbatches_per_step(recipe)
    mine = stages_of(layout, layout.pp - 1)
    stages = layout.pp * layout.stages_per_rank
    found = {("event", "step/step.py"): 1}
    if model.arch == "bert" and stages - 1 in mine:
        found["nonzero", "models/bert/module.py"] = microbatches
    blocks = model.layers * len(mine) // stages * microbatches
    repeated = 1 + (recipe.layout.recompute == "full")
    if layout.ep > 1 and not layout.expert_buffer:
        found["event", "parallel/expert.py"] = blocks * repeated
    return found | of_offload(recipe)


def of_offload(recipe: Recipe) -> dict[tuple[str, str], int]:
    """Waits of a streamed update, and copies that the threads of I/O wait for: of each parameter between the device and
    the update, of each unit's gradients and weights."""
    layout, m = Layout.from_recipe(recipe.layout), microbatches_per_step(recipe)
    mode = PRECISIONS[chosen(recipe.precision.mode, fast_bf16=True)]
    away, L = tiers(layout.offload, mode.copies), recipe.model.layers
    if not away.streams:
        return {}
    params, outside = len([*card_of(recipe.model).table()]), 2  # the tied embedding and the last norm
    moved = params if away.masters != "device" else 0  # working weights, from the update
    moved += params * (
        (away.gradients == "device") + 2 * (away.masters == "device")
    )  # gradients to it, masters there and back
    found = {("item", "parallel/offload/update.py"): 1, ("to_copy", "parallel/offload/update.py"): 1}
    if away.working != "device":
        moved, found["copy_", "parallel/offload/update.py"] = 0, outside
    sums = 1 if layout.zero and scattered_once(layout.zero, layout.pp) else m
    if away.gradients == "disk":
        moved += (L + 1) * (sums + sums - 1)
    if away.working == "disk":
        moved += m * (L + L - WINDOW * (not layout.zero))  # the last blocks' stay for backward
    if moved:
        found["copy_", "parallel/offload/disk.py"] = moved
    if (
        away.gradients == "host"
    ):  # in streams: backward waits for all but the last ones, and its end for each unit's
        events = sums * (L + 1) - BEHIND + (L + 1)
        if layout.zero:  # FSDP2's streams wait for no other
            events += (sums - 1) * (L + 1) + m * 2 * L * (away.working == "host")
        found["event", "parallel/offload/disk.py"] = events
    if (
        layout.tp > 1 and away.gradients != "device"
    ):  # sums of norms' gradients; the norms of all, as one message
        found |= {("to_copy", "parallel/tensor.py"): 1, ("copy_", "parallel/tensor.py"): 2 * L + 1}
        found["to_copy", "optim/scaling.py"] = 2
    return found


@pytest.mark.parametrize(("arch", "layout"), SOME)
def test_every_layout_and_architecture(traced, arch: str, layout: str) -> None:
    check(*traced[arch, layout])


LIKE = {
    "fp32, gathered", "adam", "adamw", "momentum", "adagrad", "rmsprop", "radam", "nadam", "adamsage", "lion",
    "soap", "muon", "fp16 rows",
    "bf16_pure nearest", "bf16_pure kahan", "bf16_pure, all:disk", "activations, dp=2,zero=3",
    "fp8 tensors", "fp8 tensors, gathered", "fp8 blocks, gathered", "diloco", "sgd",
    "activations, tp=2,recompute=full", "states:host, tp=2,sp=true", "states:host, dp=2,zero=1",
    "states:host, dp=2,zero=2", "all:disk, dp=2,zero=3", "all:host, dp=2,zero=3", "all:host, dp=1",
}  # fmt: skip
"""Others resemble them: `make test-all`."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in LIKE else name for name in OTHERS]
)
def test_other_settings(traced, name: str) -> None:
    check(*traced[name])


def check(recipe: Recipe, answer: dict) -> None:
    assert "error" not in answer, answer["error"]
    assert answer["exact"]["device"] == "cuda"
    memory = answer["exact"]["memory"]
    where = recipe.layout.offload
    assert (memory["at_peak"]["optimizer"] > 0) == keeps_states(recipe)
    assert (memory["away"]["host"] > 1e6, memory["away"]["disk"] > 1e6) == (where != "none", "disk" in where)
    assert syncs(answer) == expected(recipe)
    assert answer["exact"]["races"] == []
    assert not {name for name in answer["operators"] if not runs_on_gpus(name)}
    fused = {name for name in answer["operators"] if "attention" in name or "attn" in name}
    assert fused == attention(recipe), "as the table of docs/gpu.md says"


def attention(recipe: Recipe) -> set[str]:
    """The fused kernels of attention. None: matmuls, by tiles where a rank has some of the queries."""
    model, layout = recipe.model, Layout.from_recipe(recipe.layout)
    size = DTYPES[PRECISIONS[chosen(recipe.precision.mode, fast_bf16=True)].working].bytes
    some = layout.cp > 1 and layout.cp_method != "ulysses"
    windows = [card_of(model).window(number) for number in range(model.layers)]
    if model.score_cap or (some and layout.cp_method == "ring" and all(windows)):
        return set()
    if (some or card_of(model).sinks) and size == 2 and model.head_width % 8 == 0:
        return set(INSIDE.values())
    if recipe.data.document_masks and not some and size == 2 and model.head_width % 8 == 0:
        kernel = VARLEN
    elif size == 2 and not some and not recipe.data.document_masks:
        kernel = "aten::_scaled_dot_product_flash_attention"
    elif some or model.kv_heads != model.heads or model.head_width * size % 16:
        return set()
    else:
        kernel = "aten::_scaled_dot_product_efficient_attention"
    return {kernel, f"{kernel}_backward"}


def keeps_states(recipe: Recipe) -> bool:
    """True if masters or the optimizer's states are on the device."""
    away = tiers(recipe.layout.offload)
    return "device" in (away.masters, away.states)


@cache
def operators_of_pytorch() -> dict[str, dict]:
    """PyTorch's own list of its operators and the devices of their kernels, by name and overload."""
    import torchgen

    path = Path(torchgen.__file__).with_name("packaged") / "ATen" / "native" / "native_functions.yaml"
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return {entry["func"].split("(")[0]: entry for entry in yaml.load(path.read_text(), loader)}


VARLEN = "torch_attn::_varlen_attn"
INSIDE = {VARLEN: "aten::_flash_attention_forward", f"{VARLEN}_backward": "aten::_flash_attention_backward"}
"""What PyTorch's operators for documents call."""


def runs_on_gpus(name: str) -> bool:
    """True if PyTorch has a kernel for CUDA, or composes the operator of others."""
    table = operators_of_pytorch()
    entry = table[INSIDE.get(name, name).removeprefix("aten::")]
    entries = [entry, table[entry["structured_delegate"]]] if "structured_delegate" in entry else [entry]
    if any("ufunc_inner_loop" in one for one in entries):  # generated for CPUs and GPUs from one formula
        return True
    kernels = [
        device.strip()
        for one in entries
        for devices in one.get("dispatch", ())
        for device in devices.split(",")
    ]
    composed = not kernels and "structured_delegate" not in entry
    return composed or any(device == "CUDA" or device.startswith("Composite") for device in kernels)


def test_the_list_of_operators_tells_devices_apart() -> None:
    assert runs_on_gpus("aten::_scaled_dot_product_flash_attention")
    assert runs_on_gpus("aten::add.Tensor")
    assert not runs_on_gpus("aten::_scaled_dot_product_flash_attention_for_cpu")
    assert not runs_on_gpus("aten::mkldnn_linear")


@pytest.mark.parametrize(("arch", "layout"), [("llama", layout) for layout in COMPARED])
def test_messages_and_flops_are_those_of_a_cpu(traced, arch: str, layout: str) -> None:
    """But for the algorithm of a scatter, which is an all-to-all on CPUs, and for attention, whose kernels differ."""
    recipe, answer = traced[arch, layout]
    cpu = exact(recipe, 1, kept=False).as_json()
    there, here = (
        {(e["operation"], e["axis"]): (e["calls"], e["bytes"]) for e in found["communication"]}
        for found in (answer["exact"], cpu)
    )
    if "zero" in layout:
        there["all_to_all", "shard"] = there.pop(("reduce_scatter", "shard"))
    assert there == here
    for category in ("params", "gradients", "optimizer"):
        assert answer["exact"]["memory"]["at_peak"][category] == cpu["memory"]["at_peak"][category]


@pytest.mark.slow
def test_gradients_of_a_split_backward_wait_where_the_plan_says() -> None:
    """On the device, from a stage's I until its W: norms have gradients before matmuls. But for what is outside of
    blocks, which is not always there, and for padding."""
    sets = [
        "model.dim=128",
        "model.ffn_dim=512",
        "model.vocab_size=512",
        "model.seq_len=64",
        "model.layers=8",
    ]
    sets += ["train.global_batch_size=4", "train.microbatch_size=1", "layout.offload=states:host"]
    recipes = [recipe_of(f"pp=2,schedule={name}", "llama", *sets) for name in ("zb_h1", "zbv")]
    jobs = [(recipe, position) for recipe in recipes for position in (0, 1)]
    for (recipe, position), answer in zip(jobs, gpu.on_gpu((), in_python=jobs), strict=True):
        plan = predict(recipe, parse("h100:2"))
        found, planned = answer["exact"]["memory"]["highest"]["gradients"], plan.memory[position].gradients
        outside = 4 * outside_blocks(plan.setting, position).computes
        assert planned - outside <= found <= 1.02 * planned


@only("states:host", "all:disk")
@pytest.mark.parametrize("offload", PLANNED[1:])
def test_offload_takes_off_the_device_what_the_plan_says(traced, offload: str) -> None:
    """Without torch.compile, which the plan counts on, a step takes more: the same with offload and without. The plan
    also counts blocks under way, which the peak need not have: gradients in fp32 and weights in bf16 of two."""

    def both(offload: str) -> tuple[dict, Memory]:
        recipe, answer = traced[f"{offload}, as planned"]
        return answer["exact"]["memory"], predict(recipe, parse("h100")).memory[0]

    (whole, planned), (found, less) = both("none"), both(offload)
    table = card_of(traced["none, as planned"][0].model).table()
    block = sum(math.prod(shape) for name, shape in dict(table).items() if name.startswith("blocks.0."))
    saved = whole["peak_bytes"] - found["peak_bytes"]
    assert 0 <= saved - (planned.total - less.total) <= 12 * block
    for tier in AWAY:
        assert found["away"][tier] == pytest.approx(getattr(less, tier), rel=0.01, abs=80e6)


@pytest.mark.parametrize(("arch", "layout", "name"), [("llama", "cp=2", "whole sequences, ring")])
def test_flops_of_a_ring(traced, arch: str, layout: str, name: str) -> None:
    """Those of each pair of a query and a key in the same document that a turn's kernel computes, from the lengths that
    the host sends. The last rank's queries are in the middle."""
    recipe, answer = traced[arch, layout]
    whole = traced[name][1]
    first_T, T = firsts(1, 32)[0], 32
    own, early = np.arange(T // 4, 3 * T // 4), np.arange(T // 4)
    pairs = sum(int((first_T[own][:, None] == first_T[there]).sum()) for there in (own, early))
    every = len(own) ** 2 + len(own) * len(early)
    model, sequences = recipe.model, recipe.train.global_batch_size
    fewer = 14 * (every - pairs) * sequences * model.layers * model.heads * model.head_width
    assert whole["exact"]["flops"] - answer["exact"]["flops"] == fewer > 0


def test_flops_of_documents() -> None:
    """Those of each pair of tokens in the same document, seen or not."""
    from torch.nn.attention.varlen import varlen_attn  # makes the operators

    assert varlen_attn
    B, T, H, d = 2, 32, 4, 8
    lengths = [n for row in firsts(B, T) for n in np.unique(row, return_counts=True)[1].tolist()]
    assert lengths == [11, 11, 10] * B
    q, ends = torch.empty(B * T, H, d, device="meta"), torch.empty(len(lengths) + 1, device="meta")
    forward, backward = (
        getattr(torch.ops.torch_attn, name).default for name in ("_varlen_attn", "_varlen_attn_backward")
    )
    pairs = sum(n * n for n in lengths)
    assert flops_of(forward, (q, q, q, ends), {}, None) == 4 * H * d * pairs
    assert flops_of(backward, (q, q, q, q, q, None, ends), {}, None) == 10 * H * d * pairs


def test_devices_do_not_mix() -> None:
    with FakeMode():
        here, there = torch.empty(2), Fake(torch.empty(2, device="meta"), DEVICE)
        assert (there + torch.tensor(1.0)).device == DEVICE, "a number goes anywhere"
        assert there.to("cpu").device == CPU
        with pytest.raises(RuntimeError, match=r"aten.add.Tensor does not take tensors on cpu, cuda:0"):
            here.add(there)
        with pytest.raises(RuntimeError, match="_for_cpu"):
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*[there.view(1, 1, 1, 2)] * 3)
        with pytest.raises(AssertionError, match="swiglu_forward is a kernel for CPUs"):
            native.call("swiglu_forward", torch.float32, there, there, 1, 1)


def test_without_a_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    gpu.guard.cache_clear()
    with pytest.raises(UserError, match=r"no C\+\+ compiler found \(looked for \$CXX, c\+\+, g\+\+\)"):
        gpu.on_gpu([(recipe_of("dp=1", "llama"), 0)])
    monkeypatch.undo()
    gpu.guard.cache_clear()
    assert not gpu.why_not()
