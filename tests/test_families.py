"""Families that differ from others by few options: on every axis as on one process, planned as traced and sent."""

import re
from pathlib import Path

import numpy as np
import pytest
from families import FAMILIES, overrides, small
from layouts import tiny
from marks import only
from ranks import run_ranks
from steps import counted, planned, recipe_of
from test_layouts import passes

from fivefold.errors import UserError
from fivefold.kernels.blockwise_attention import Documents
from fivefold.kernels.tiling import Sample, Tiling, max_pairs, max_scores
from fivefold.models.card import card_of, flops_per_token
from fivefold.models.hf import from_hf_config, hf_config
from fivefold.models.rules import model_rules
from fivefold.plan.cluster.clusters import parse
from fivefold.plan.messages import volume
from fivefold.plan.predict import held as at_peak
from fivefold.plan.setting import FIVEFOLD, FIVEFOLD_CPU, setting
from fivefold.recipe import ModelSection, resolve_model
from fivefold.schedules.collectives.collective import joined
from fivefold.schedules.ring_attention import reach_of, slowest
from fivefold.sharding.layout import Layout
from fivefold.sharding.sequence import token_spans
from fivefold.trace.depth import exact

LAYOUTS = [
    "dp=2,zero=2", "dp=2,zero=3", "tp=2,sp=true,recompute=selective", "tp=2,recompute=full", "cp=2", "cp=4",
    "cp=2,cp_method=ulysses", "cp=4,cp_method=all_gather", "pp=2,schedule=zbv,virtual_stages=2",
    "pp=2,tp=2,cp=2,sp=true", "dp=2,tp=2,cp=2,cp_method=all_gather,zero=3",
]  # fmt: skip


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@only("olmo3-cp=4")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("arch", FAMILIES)
def test_layouts_equal_one_process(room: Path, arch: str, layout: str) -> None:
    passes(room, layout, *overrides(arch), "model.kv_heads=2")


TRACED = [
    *((arch, "bf16", "dp=1") for arch in FAMILIES),
    *((arch, "fp32", "tp=2,sp=true,recompute=selective") for arch in FAMILIES),
    ("gemma3", "bf16", "dp=2,zero=3,recompute=full"), ("glm4", "bf16", "tp=2"), ("mistral", "bf16", "cp=2"),
    ("olmo3", "bf16", "cp=2,cp_method=all_gather"), ("gemma3", "bf16", "cp=2,cp_method=ulysses"),
]  # fmt: skip


@only("gemma3-bf16-dp=1")
@pytest.mark.parametrize(("arch", "mode", "layout"), TRACED)
def test_memory_is_close_to_a_traced_step(arch: str, mode: str, layout: str) -> None:
    recipe = recipe_of(arch, mode, layout, *overrides(arch)[1:])
    traced, found = exact(recipe).step.memory, at_peak(planned(recipe))[0]
    assert found.total == pytest.approx(traced.total, rel=0.05)
    assert found.params == traced.at_peak["params"]


@only("mistral-cp=4")
@pytest.mark.parametrize("layout", ["cp=4", "cp=2,tp=2,recompute=full", "pp=2,cp=2,cp_method=all_gather"])
@pytest.mark.parametrize("arch", ["mistral", "olmo3", "gemma3"])
def test_bytes_are_those_counted(room: Path, arch: str, layout: str) -> None:
    """In a ring, those that windows leave. With a window of a chunk and a token, two of three turns of four ranks."""
    recipe = tiny(room, layout, *overrides(arch), "model.kv_heads=2", "model.sliding_window=3")
    s = planned(recipe)
    for rank, step in enumerate(run_ranks(s.layout.ranks, counted, recipe, timeout_s=300)):
        assert volume.counted(s, rank) == step.sent, rank
    assert len(slowest(4, True, False, reach_of(4, 16, 3))) == 2


def test_flops_are_those_of_the_pairs() -> None:
    """Of blocks with a window, and of documents within it."""
    T, window = 64, 10
    fields = {"layers": 4, "dim": 32, "heads": 4, "vocab_size": 64, "seq_len": T}
    model = ModelSection(arch="olmo3", sliding_window=window, full_every=4, **fields)
    seen = np.minimum(np.arange(T) + 1, window).sum()
    card = card_of(resolve_model(model, vocab_size=64))
    near, full = card.attention_flops(0), card.attention_flops(3)
    assert card.second == (False, False, False, True)
    assert near == pytest.approx(12 * 32 * seen / T, rel=0.06)
    assert full == 12 * 32 * T / 2
    sample = Sample(np.repeat([[0, 7, 40]], [7, 33, 24], axis=1))
    whole, apart = flops_per_token(model), flops_per_token(model, lambda w: sample.pairs(True, w))
    pairs = sum(min(i + 1, window) for length in (7, 33, 24) for i in range(length))
    every = sum(n * (n + 1) / 2 for n in (7, 33, 24))
    hidden = 3 * near * (1 - pairs / seen) + full * (1 - every / (T * (T + 1) / 2))
    assert whole - apart == pytest.approx(hidden)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"arch": "llama", "sliding_window": 8}, "model.sliding_window: llama has no sliding windows"),
        ({"arch": "mistral", "full_every": 2}, "model.full_every = 2 has no effect"),
        (
            {"arch": "mistral", "full_every": 1, "sliding_window": 8},
            "model.full_every = 1: every block sees the whole",
        ),
        (
            {"rope_factor": 2.0, "rope_scaling": "linear", "rope_high": 8.0},
            'model.rope_high = 8.0 has no effect: model.rope_scaling = "linear"',
        ),
        (
            {"arch": "speedrun", "skips": True, "layers": 1},
            "model.skips = true has no effect: model.layers = 1 has no two blocks",
        ),
        ({"arch": "phi3", "rotary_dim": 5}, "model.rotary_dim = 5 must be even .* Nearest valid: 4"),
        ({"arch": "olmo3", "rope_local_theta": 5.0}, "model.rope_local_theta = 5 has no effect"),
        ({"arch": "smollm3", "rotary_dim": 4}, "model.rotary_dim: smollm3 has no heads that rotate in part"),
    ],
)
def test_what_is_refused(fields: dict, said: str) -> None:
    [(_, message)] = model_rules(ModelSection(**fields))
    assert re.match(said, message), message


def test_files_mean_what_their_families_mean_by_default() -> None:
    """Configurations as published, without the keys that older versions do not write."""
    sizes = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }  # fmt: skip
    found = {
        kind: from_hf_config({"model_type": kind, **sizes, **more})
        for kind, more in {
            "mistral": {},
            "gemma3_text": {"head_dim": 256, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
            "smollm3": {},
            "olmo3": {"rope_theta": 500000, "rope_scaling": {"rope_type": "yarn", "factor": 8.0,
                      "original_max_position_embeddings": 8192}},
            "glm4": {"head_dim": 8},
            "phi3": {"partial_rotary_factor": 0.75},
        }.items()
    }  # fmt: skip
    assert found["mistral"].sliding_window == 4096
    gemma = found["gemma3_text"]
    assert (gemma.full_every, gemma.rope_theta, gemma.rope_local_theta) == (6, 1e6, 1e4)
    assert (gemma.rope_scaling, gemma.rope_factor, gemma.local and gemma.local.rope_factor) == (
        "linear",
        8.0,
        1.0,
    )
    assert (found["smollm3"].no_rope_every, found["smollm3"].rope_theta) == (4, 2e6)
    olmo = found["olmo3"]
    assert (olmo.full_every, olmo.rope_factor, olmo.rope_local_theta) == (4, 8.0, 500000.0)
    assert (found["glm4"].rotary_dim, found["glm4"].attention_bias) == (4, True)
    assert found["phi3"].rotary_dim == 6
    odd = ModelSection(arch="phi3", vocab_size=64, dim=88, heads=2, rotary_dim=30, tie_embeddings=False)
    again = from_hf_config(hf_config(resolve_model(odd, vocab_size=64)))
    assert again.rotary_dim == 30, "30 of 44: int(44 * (30 / 44)) is 29"
    assert small("phi3").rotary_dim == 4


@pytest.mark.parametrize(
    ("kinds", "said"),
    [
        (
            ["chunked_attention"] * 8,
            "layer_types must say full_attention or sliding_attention for each of the 8",
        ),
        (["sliding_attention"] * 7, "for each of the 8 layers, not sliding_attention for 7"),
        (["full_attention"] * 2 + ["sliding_attention"] * 6, "^config.json: layer_types has another pattern"),
    ],
)
def test_patterns_of_windows_are_read_or_refused(kinds: list[str], said: str) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    config = {"model_type": "olmo3", "num_hidden_layers": 8, "layer_types": kinds, **sizes}
    with pytest.raises(UserError, match=said):
        from_hf_config(config)


@pytest.mark.parametrize("layout", [Layout(), Layout(cp=4), Layout(cp=4, cp_method="all_gather")], ids=str)
def test_the_plan_prices_the_tiles_of_windows(layout: Layout) -> None:
    """On CPUs, in each turn those of the slowest rank; in the blocks that have a window."""
    T, window = 2048, 250
    section = ModelSection(
        arch="olmo3", layers=4, dim=64, heads=4, seq_len=T, sliding_window=window, full_every=4
    )
    model = resolve_model(section, vocab_size=64)
    s = setting(model, layout, parse(f"h100:{layout.ranks}"), 1, 1, "fp32", FIVEFOLD_CPU)
    near, full = (
        next(op for op in s.work.block[s.kind(second, "none")] if op.attention) for second in (False, True)
    )
    documents, found = Documents(np.zeros((1, T), np.int64)), []
    of_rank = Tiling(np.zeros((1, T), np.int64), fixed=True).turns(layout, True, window)
    if layout.cp_method == "all_gather":
        own = [tuple(span for ((span,), _) in products) for (products,) in of_rank]
        assert own == [joined(token_spans(layout, T, rank)) for rank in range(layout.cp)], "as trained"
    for limit in (window, 0):
        tiling = Tiling(np.zeros((1, T), np.int64), fixed=True)
        by_turn = zip(*tiling.turns(layout, True, limit), strict=True)
        turns = [
            [[documents.tiles(*of, True, 4, limit) for of in rank] for rank in ranks] for ranks in by_turn
        ]
        found.append(
            sum(
                max(
                    sum((t.end - t.start) * (t.high - t.low) for tiles in rank for t in tiles)
                    for rank in ranks
                )
                for ranks in turns
            )
        )
    assert near.attention / full.attention == pytest.approx(found[0] / found[1])
    assert [s.card.second[n] for n in range(4)] == [False, False, False, True]
    if layout.cp_method == "ring" and layout.cp > 1:
        on_gpu = setting(model, layout, parse(f"h100:{layout.ranks}"), 1, 1, "bf16", FIVEFOLD).sizes.near
        tiles = max_scores(tiling, layout, True, 2, window)
        assert on_gpu.share == tiles / max_pairs(tiling, 1, True, layout), "tiles there, too"
        (sent,), (whole,) = near.sent_forward, full.sent_forward
        assert (sent.size / whole.size, sent.reach) == (2 / 3, 1)


def test_flash_attention_copies_the_keys_of_windows_only() -> None:
    """With gathered keys, of several sequences; in a ring with windows it computes nothing."""
    model = resolve_model(
        small("mistral", layers=1, dim=64, heads=4, seq_len=256, sliding_window=40), vocab_size=64
    )
    for method, B in (("all_gather", 2), ("all_gather", 1), ("ring", 2)):
        layout = Layout(cp=2, cp_method=method)
        near = setting(model, layout, parse("h100:2"), B, 1, "bf16").sizes.near
        spans = [joined(token_spans(layout, 256, rank)) for rank in range(2)]
        keys = max(sum(b - max(0, a - 39) for a, b in some) for some in spans) / 128
        assert near.copied == ((1.0, keys) if (method, B) == ("all_gather", 2) else (0.0, 0.0))
