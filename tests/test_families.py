"""Families that differ from others by few options: on every axis as on one process, planned as traced and sent."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from families import FAMILIES, overrides, small
from layouts import tiny
from marks import only
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from steps import counted, planned, recipe_of
from test_layouts import passes

from fivefold.checkpoint.source import export_run, import_folder
from fivefold.errors import UserError
from fivefold.kernels.blockwise_attention import Documents
from fivefold.kernels.cross_entropy import drawn
from fivefold.kernels.matmul import linear_cross_entropy
from fivefold.kernels.tiling import Sample, Tiling, max_pairs, max_scores
from fivefold.models.base import build
from fivefold.models.card import active_parameters, card_of, flops_per_token
from fivefold.models.hf import from_hf_config, hf_config, made_from_hf, to_hf
from fivefold.models.rules import model_rules
from fivefold.models.weights import held
from fivefold.recipe import ModelSection, load, resolve_model
from fivefold.schedules.collectives.collective import joined
from fivefold.schedules.ring_attention import reach_of, slowest
from fivefold.sharding.layout import Layout
from fivefold.sharding.sequence import token_spans
from fivefold_plan.cluster.clusters import parse
from fivefold_plan.messages import volume
from fivefold_plan.predict import held as at_peak
from fivefold_plan.setting import FIVEFOLD, FIVEFOLD_CPU, setting
from fivefold_plan.trace.depth import exact

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


def test_published_configurations_are_read() -> None:
    """gpt-oss-20b's and Gemma 2 27B's, with the keys of older versions."""
    kinds = ["sliding_attention", "full_attention"] * 12
    gpt = from_hf_config(
        {
            "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880,
            "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
            "num_local_experts": 32, "num_experts_per_tok": 4, "experts_per_token": 4, "sliding_window": 128,
            "layer_types": kinds, "attention_bias": True, "hidden_act": "silu", "rms_norm_eps": 1e-5,
            "rope_theta": 150000, "router_aux_loss_coef": 0.9, "swiglu_limit": 7.0, "tie_word_embeddings": False,
            "max_position_embeddings": 131072, "initial_context_length": 4096,
            "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
                             "original_max_position_embeddings": 4096, "truncate": False},
            "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
        }
    )  # fmt: skip
    assert (gpt.full_every, gpt.sliding_window, gpt.rope_truncate, gpt.rope_mscale) == (2, 128, False, 1.0)
    assert (gpt.rope_theta, gpt.rope_factor, gpt.experts, gpt.expert_ffn_dim) == (150000.0, 32.0, 32, 2880)
    assert card_of(gpt).count == pytest.approx(20.9e9, rel=0.005)
    assert active_parameters(gpt) == pytest.approx(3.6e9 + 201088 * 2880, rel=0.01), (
        "the paper leaves embeddings out"
    )
    gemma = from_hf_config(
        {
            "model_type": "gemma2", "vocab_size": 256000, "hidden_size": 4608, "intermediate_size": 36864,
            "num_hidden_layers": 46, "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128,
            "query_pre_attn_scalar": 144, "attn_logit_softcapping": 50.0, "sliding_window": 4096,
            "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
        }
    )  # fmt: skip
    assert (gemma.score_cap, gemma.logit_cap, gemma.score_width, gemma.full_every) == (50.0, 30.0, 144, 2)
    assert card_of(gemma).count == pytest.approx(27.2e9, rel=0.005)
    assert from_hf_config(hf_config(gemma)) == gemma


def packed(E: int, R: int, C: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks and scales of random MXFP4, (E, R, C / 32, 16) and (E, R, C / 32)."""
    return torch.randint(0, 256, (E, R, C // 32, 16), dtype=torch.uint8), torch.randint(
        117, 124, (E, R, C // 32), dtype=torch.uint8
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_mxfp4_is_read(tmp_path: Path, dtype: torch.dtype) -> None:
    """As transformers reads it; it is exported as plain weights, the same bits."""
    reference = pytest.importorskip("transformers.integrations.mxfp4").convert_moe_packed_tensors
    fields = {
        "layers": 2,
        "dim": 64,
        "heads": 4,
        "vocab_size": 64,
        "seq_len": 16,
        "ffn_dim": 32,
        "expert_ffn_dim": 32,
    }
    model = resolve_model(small("gpt_oss", **fields), vocab_size=64)
    plain = {n: t.to(dtype) for n, t in to_hf(build(model, device="cpu").state_dict(), model).items()}
    stored = dict(plain)
    for name in [name for name in plain if name.endswith("_proj") and ".experts." in name]:
        E, C, R = stored.pop(name).shape
        blocks, scales = packed(E, R, C)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = reference(blocks, scales, dtype=dtype)
    source = tmp_path / "theirs"
    source.mkdir()
    save_file(stored, source / "model.safetensors")
    config = hf_config(model) | {"quantization_config": {"quant_method": "mxfp4"}}
    (source / "config.json").write_text(json.dumps(config))
    run = import_folder(source, tmp_path / "run")
    exported = export_run(run, tmp_path / "ours")
    found = load_file(exported / "model.safetensors")
    assert found.keys() == plain.keys()
    for name, tensor in plain.items():
        assert found[name].dtype == dtype
        assert torch.equal(found[name], tensor), name
    assert "quantization_config" not in json.loads((exported / "config.json").read_text())
    whole = made_from_hf(held(stored), model)["blocks.1.mlp.experts.gate_up"]
    assert torch.equal(whole.read((1, 3)), whole.read()[1:3]), "experts are read one by one"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"gate_up_proj_scales": None}, "gate_up_proj is missing"),
        (
            {"gate_up_proj_scales": torch.zeros(4, 64, 1, dtype=torch.uint8)},
            "allowed: uint8, with a scale for each 32",
        ),
        ({"gate_up_proj_blocks": torch.zeros(4, 64, 2, 16)}, "_blocks has dtype float32 and shape"),
    ],
)
def test_broken_mxfp4_is_named(change: dict, said: str) -> None:
    fields = {
        "layers": 1,
        "dim": 64,
        "heads": 4,
        "vocab_size": 64,
        "seq_len": 16,
        "ffn_dim": 32,
        "expert_ffn_dim": 32,
    }
    model = resolve_model(small("gpt_oss", **fields), vocab_size=64)
    stored, prefix = to_hf(build(model, device="cpu").state_dict(), model), "model.layers.0.mlp.experts."
    del stored[f"{prefix}gate_up_proj"]
    whole = dict(zip(("gate_up_proj_blocks", "gate_up_proj_scales"), packed(4, 64, 64), strict=True)) | change
    stored |= {prefix + name: tensor for name, tensor in whole.items() if tensor is not None}
    with pytest.raises(UserError, match=said):
        made_from_hf(held(stored), model)


@pytest.mark.parametrize("draws", [False, True])
def test_the_loss_of_capped_logits(draws: bool) -> None:
    """In chunks: values and gradients of the plain formula, in fp64, with z-loss; of drawn labels, too."""
    torch.manual_seed(0)
    x, weight = (torch.randn(n, 8).requires_grad_() for n in (600, 40))
    targets = torch.randint(-1, 40, (600,))
    key, z, cap = ((1, 2) if draws else None), 0.0 if draws else 0.1, 1.5
    loss = linear_cross_entropy(x, weight, targets, None, z, key, cap)
    exact_x, exact_weight = (t.detach().double().requires_grad_() for t in (x, weight))
    logits = cap * (exact_x @ exact_weight.T / cap).tanh()
    labels = targets if key is None else targets.where(targets < 0, drawn(logits.float(), targets, key)[1])
    each = torch.nn.functional.cross_entropy(logits, labels.clamp(min=0), reduction="none")
    wanted = ((each + z * logits.logsumexp(1).square()) * (labels >= 0)).sum() / (labels >= 0).sum()
    loss.backward()
    wanted.backward()
    pairs = [(loss, wanted), (x.grad, exact_x.grad), (weight.grad, exact_weight.grad)]
    for got, expected in pairs:
        assert got is not None
        assert expected is not None
        assert (got - expected).abs().max() < 2e-6 * expected.abs().max()


@only("dp=2,ep=2")
@pytest.mark.parametrize(
    "layout",
    [
        "dp=2,ep=2",
        "dp=2,tp=2,ep=2",
        "dp=2,tp=2,ep=2,sp=true,zero=3",
        "pp=2,dp=2,ep=2,expert_chunks=2",
        "dp=2,tp=2,ep=4,sp=true,ep_fold=true",
    ],
)
def test_experts_with_biases_over_ranks(room: Path, layout: str) -> None:
    passes(room, layout, *overrides("gpt_oss"), "model.kv_heads=2", "model.init_std=0.2")


def test_dropped_tokens_have_no_bias() -> None:
    model = resolve_model(small("gpt_oss", dim=32, layers=1, capacity_factor=0.25), vocab_size=64)
    mixture = build(model, device="cpu").blocks["0"].mlp.train()
    with torch.no_grad():
        for name in ("gate_up", "down"):
            getattr(mixture.experts, name).zero_()
        mixture.down_bias.fill_(1.0)
        y_BTD = mixture(torch.randn(1, 16, 32))
    kept = int(mixture.capacity(16) * mixture.count)
    assert 0 < kept < 32
    assert float(y_BTD[..., 0].sum()) < kept, "each kept row adds a weight below 1"
    assert (y_BTD == 0).any(), "a token without experts"


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


def test_blocks_of_more_than_two_kinds_are_refused() -> None:
    sets = ["model.arch=gpt_oss", "model.sliding_window=32", "model.full_every=2", "model.dense_layers=1"]
    with pytest.raises(UserError, match=r"model.full_every = 2 makes more than two kinds"):
        load("quickstart", sets)
