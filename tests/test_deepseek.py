"""DeepSeek-V3: values and gradients of transformers, layouts against one process, the planner against the trainer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from exported import read_by_transformers
from layouts import compared, tiny
from marks import only, slow_but
from ranks import run_ranks
from safetensors.torch import load_file
from steps import counted, planned
from torch.nn import functional as F

from fivefold.checkpoint.source import export_run, import_folder
from fivefold.errors import UserError
from fivefold.kernels import elementwise
from fivefold.models.base import build
from fivefold.models.card import card_of
from fivefold.models.deepseek.module import latent_heads
from fivefold.models.hf import from_hf_config, hf_config, to_hf
from fivefold.models.layers import rope_table
from fivefold.models.mixture import best_groups
from fivefold.models.section import ModelSection
from fivefold.recipe import active_parameters, count_parameters, load, resolve_model
from fivefold.sharding.layout import to_text
from fivefold_plan.messages import volume
from fivefold_plan.trace.depth import exact

ODD = {
    "query_rank": 20, "kv_rank": 12, "nope_dim": 7, "rope_dim": 4, "value_dim": 5, "experts": 8, "experts_per_token": 3,
    "expert_ffn_dim": 16, "dense_layers": 1, "expert_groups": 4, "groups_per_token": 2, "router_scale": 2.5,
}  # fmt: skip
SMALL = {
    "arch": "deepseek",
    "layers": 3,
    "dim": 40,
    "heads": 4,
    "vocab_size": 128,
    "seq_len": 32,
    "ffn_dim": 72,
}
MODELS = {
    "odd": ModelSection(**SMALL, **ODD, norm_eps=1e-4, init_std=0.3),
    "tied": ModelSection(**SMALL, tie_embeddings=True, shared_experts=2, router_normalize=False, init_std=0.3),
    "wide values": ModelSection(**SMALL, nope_dim=8, rope_dim=4, value_dim=12, rope_factor=8.0, rope_context=16,
                                init_std=0.3),
    "direct queries": ModelSection(**SMALL | {"heads": 3, "layers": 2}, query_rank=0, nope_dim=5, rope_dim=10,
                                   value_dim=9, rope_factor=6.0, rope_scaling="yarn", rope_context=16, rope_theta=50.0,
                                   rope_low=0.5, rope_mscale=1.5, experts_per_token=1, init_std=0.3),
    "one block": ModelSection(**SMALL | {"layers": 1, "heads": 5}, kv_rank=3, nope_dim=1, rope_dim=2, value_dim=1,
                              experts=6, expert_groups=3, groups_per_token=1, init_std=0.3),
}  # fmt: skip


@pytest.fixture(params=MODELS, scope="module")
def pair(request, tmp_path_factory):
    """(our module, theirs that is read from the exported folder, the model section, the folder)."""
    model = resolve_model(MODELS[request.param], vocab_size=128)
    ours, random = build(model, device="cpu", seed=3), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in [*ours.named_parameters(), *ours.named_buffers()]:
            if tensor.ndim == 1:
                tensor += 0.2 * torch.randn(tensor.shape, generator=random)
            assert tensor.any(), name
    folder = tmp_path_factory.mktemp("deepseek")
    return ours, read_by_transformers(ours, model, folder), model, folder


YARN = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}


def tokens_of(seed: int = 7) -> torch.Tensor:
    return torch.randint(0, 128, (3, 32), generator=torch.Generator().manual_seed(seed))


def test_logits_are_theirs(pair):
    ours, theirs, _, _ = pair
    with torch.no_grad():
        got, expected = ours(tokens_of()), theirs(tokens_of()).logits
    assert expected.std() > 0.3
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_loss_and_gradients_are_theirs(pair):
    ours, theirs, model, _ = pair
    ours.zero_grad()
    theirs.zero_grad()
    loss = ours(tokens_of(), tokens_of(8))
    expected = F.cross_entropy(theirs(tokens_of()).logits.flatten(0, 1), tokens_of(8).flatten())
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)
    loss.backward()
    expected.backward()
    state = {name: p.grad for name, p in ours.named_parameters()} | dict(ours.named_buffers())
    got, named = to_hf(state, model), dict(theirs.named_parameters())
    for name, parameter in named.items():
        if name.endswith("gate_up_proj"):
            mlp = name.removesuffix("experts.gate_up_proj")
            experts = [
                torch.cat([got[f"{mlp}experts.{e}.{kind}_proj.weight"] for kind in ("gate", "up")])
                for e in range(model.experts or 0)
            ]
            gradient = torch.stack(experts)
        elif name.endswith("experts.down_proj"):
            mlp = name.removesuffix("experts.down_proj")
            gradient = torch.stack(
                [got[f"{mlp}experts.{e}.down_proj.weight"] for e in range(model.experts or 0)]
            )
        else:
            gradient = got[name]
        assert parameter.grad is not None, name
        difference = (gradient - parameter.grad).norm() / parameter.grad.norm()
        assert difference < 2e-5, f"{name}: relative difference {difference:.2e}"


def test_bytes_survive_the_way_in_and_out(pair, tmp_path):
    """A folder of theirs becomes a run and a folder again."""
    _, theirs, model, folder = pair
    export_run(import_folder(folder, tmp_path / "run"), tmp_path / "out")
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert from_hf_config(hf_config(model)) == model
    assert from_hf_config(theirs.config.to_dict()) == model
    assert from_hf_config(json.loads((tmp_path / "out" / "config.json").read_text())) == model


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_interleave": False}, "rope_interleave = false"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 40.0}}, 'rope_scaling has rope_type "dynamic"'),
        (
            {"rope_scaling": YARN},
            "rope_scaling has mscale None and mscale_all_dim None; only the same number",
        ),
        (
            {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}},
            "rope_parameters has mscale 1.0 and",
        ),
        ({"attention_bias": True}, "attention_bias = true"),
        ({"num_key_value_heads": 2}, "num_key_value_heads = 2; only 4"),
        ({"n_shared_experts": 0}, "n_shared_experts = 0"),
        ({"scoring_func": "softmax"}, "scoring_func = softmax"),
    ],
)
def test_what_differs_is_refused(change, message):
    config = hf_config(resolve_model(MODELS["odd"], vocab_size=128)) | change
    with pytest.raises(UserError, match=message):
        from_hf_config(config)


def test_the_published_config_is_read():
    """That of DeepSeek-V3, with its fp8, is the recipe's model and back."""
    config = {
        "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "num_attention_heads": 128,
        "num_key_value_heads": 128, "num_hidden_layers": 61, "vocab_size": 129280, "max_position_embeddings": 163840,
        "rms_norm_eps": 1e-6, "rope_theta": 10000, "tie_word_embeddings": False, "initializer_range": 0.006,
        "num_nextn_predict_layers": 1, "quantization_config": {
            "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
        },
        "rope_scaling": {
            "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
        },
    }  # fmt: skip
    given, shipped = from_hf_config(config), resolve_model(load("deepseek-v3").model, vocab_size=129280)
    scaled = {"rope_scaling": "yarn", "rope_factor": 40.0, "rope_high": 32.0, "rope_context": 4096}
    assert given == shipped.model_copy(update=scaled | {"seq_len": 163840})
    assert from_hf_config(hf_config(given)) == given


@pytest.mark.parametrize(
    ("name", "value"), [("balance", "aux"), ("router_score", "softmax"), ("shared_experts", 0)]
)
def test_what_their_format_lacks_is_not_exported(name, value):
    model = resolve_model(MODELS["odd"].model_copy(update={name: value}), vocab_size=128)
    with pytest.raises(UserError, match=f"format has no model.{name}"):
        hf_config(model)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rope_dim=3"], "rope_dim = 3 must be even: .* Nearest valid: 2"),
        (["value_dim=12"], "value_dim = 12 must be at most nope_dim . rope_dim = 11. Nearest valid: 11"),
        (["expert_groups=3"], "expert_groups = 3 must divide model.experts = 8 .* expert_groups = 2"),
        (["expert_groups=8"], "groups of two or more. Nearest valid: expert_groups = 4"),
        (["groups_per_token=1"], "groups_per_token = 1 must be .* Nearest valid: groups_per_token = 2"),
        (["groups_per_token=5"], "groups_per_token = 5 must be .* Nearest valid: groups_per_token = 4"),
        (["kv_heads=2"], "needs kv_heads = heads"),
        (["head_dim=16"], "deepseek has no heads of their own width"),
        (["aux_loss_weight=0.1"], 'needs model.balance = "aux", not "bias"'),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(overrides, message):
    fields = [f"model.{name}={value}" for name, value in ODD.items()]
    base = [*fields, "model.arch=deepseek", "model.dim=40", "model.heads=4", "model.layers=3"]
    with pytest.raises(UserError, match=message):
        load("quickstart", [*base, *(f"model.{one}" for one in overrides)])


def test_none_is_a_way_of_balancing():
    """It does not unset the field."""
    assert load("moe-tiny", ["model.balance=none"]).model.balance == "none"


def test_published_sizes():
    """671B parameters, of which 37B compute a token; 236B and 21B."""
    common = {
        "arch": "deepseek", "heads": 128, "query_rank": 1536, "kv_rank": 512, "nope_dim": 128, "rope_dim": 64,
        "value_dim": 128,
    }  # fmt: skip
    v3 = ModelSection(
        layers=61, dim=7168, ffn_dim=18432, vocab_size=129280, experts=256, experts_per_token=8, shared_experts=1,
        expert_ffn_dim=2048, dense_layers=3, expert_groups=8, groups_per_token=4, **common,
    )  # fmt: skip
    v2 = ModelSection(
        layers=60, dim=5120, ffn_dim=12288, vocab_size=102400, experts=160, experts_per_token=6, shared_experts=2,
        expert_ffn_dim=1536, dense_layers=1, **common,
    )  # fmt: skip
    found = [round(size(model) / 1e9) for model in (v3, v2) for size in (count_parameters, active_parameters)]
    assert found == [671, 38, 236, 21]  # the report's 37B leave out the embedding


def test_names_and_shapes_are_the_modules():
    for section in MODELS.values():
        model = resolve_model(section, vocab_size=128)
        card, module = card_of(model), build(model)
        assert [(n, tuple(p.shape)) for n, p in module.named_parameters()] == list(card.parameters.items())
        assert {n: tuple(b.shape) for n, b in module.named_buffers()} == card.buffers


def test_groups_are_those_with_the_best_two():
    scores = torch.tensor([[9.0, -1, 5, 5, 4, 3, 8, 1], [0.0, 1, 2, 3, 4, 5, 6, 7]])
    kept = best_groups(scores, 4, 2) > -torch.inf
    assert kept.int().tolist() == [[0, 0, 1, 1, 0, 0, 1, 1], [0, 0, 0, 0, 1, 1, 1, 1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_are_put_together(dtype):
    """Values and gradients of the plain way."""
    B, T, H, nope, rope, value, scale = 2, 6, 3, 5, 4, 3, 2.0
    random = torch.Generator().manual_seed(0)
    shapes = ((B, T, H, nope + rope), (B, T, H, nope + value), (B, T, rope))
    parts = [torch.randn(shape, generator=random).to(dtype).requires_grad_() for shape in shapes]
    cos, sin = rope_table(torch.arange(T), ModelSection(head_dim=rope, rope_theta=100.0))

    def plain(q, kv, key):
        q = q.float() * scale

        def turned(x):
            return elementwise.rope(torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1), cos, sin)

        k = torch.cat((kv[..., :nope], turned(key[:, :, None]).expand(-1, -1, H, -1)), dim=-1)
        q = torch.cat((q[..., :nope], turned(q[..., nope:])), dim=-1)
        return torch.cat((q.to(dtype), k, F.pad(kv[..., nope:], (0, nope + rope - value))), dim=2).flatten(2)

    got, expected = latent_heads(*parts, cos, sin, value, scale), plain(*parts)
    assert torch.equal(got, expected)
    direction = torch.randn(got.shape, generator=random).to(dtype)
    for mine, theirs in zip(
        torch.autograd.grad(got, parts, direction),
        torch.autograd.grad(expected, parts, direction),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, atol=0.05 if dtype == torch.bfloat16 else 1e-6, rtol=0.01)


TINY = ["model.arch=deepseek", *(f"model.{name}={value}" for name, value in ODD.items())]
DIRECT = [
    *TINY,
    "model.query_rank=0",
    "model.rope_scaling=yarn",
    "model.rope_factor=4",
    "model.rope_context=8",
]
QUICK = [
    "dp=2,zero=3", "tp=2,sp=true", "cp=2", "cp=2,cp_method=ulysses", "dp=2,ep=2",
    "pp=2,schedule=zbv,virtual_stages=2,recompute=selective",
]  # fmt: skip
LAYOUTS = [
    *QUICK, "dp=1", "dp=2", "dp=2,zero=1", "dp=2,zero=2", "tp=2", "tp=2,sp=true,recompute=selective", "pp=2",
    "dp=2,recompute=full", "dp=2,recompute=selective", "cp=2,tp=2,sp=true", "dp=4,ep=2,zero=3", "dp=2,tp=2,pp=2",
    "cp=2,cp_method=all_gather", "cp=2,tp=2,sp=true,cp_method=all_gather",
    "dp=2,tp=2,sp=true,ep=4,ep_fold=true,zero=1",
]  # fmt: skip


@pytest.fixture(scope="module")
def room(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("deepseek")


@only("tp=2,sp=true", "dp=2,ep=2")
@pytest.mark.parametrize("layout", slow_but(QUICK, LAYOUTS))
def test_layouts_compute_what_one_process_computes(room, layout):
    report = compared(tiny(room, layout, *TINY), folder=room / "reference")
    assert report.passed, report


@pytest.mark.parametrize(
    "layout",
    [
        *(
            pytest.param(layout, marks=pytest.mark.slow)
            for layout in (
                "tp=2,sp=true,recompute=selective",
                "dp=2,zero=2",
                "tp=2",
                "pp=2,schedule=zbv,virtual_stages=2",
                "cp=2",
                "dp=2,ep=2",
            )
        ),
    ],
)
def test_queries_from_the_input_itself(tmp_path, layout):
    recipe = tiny(tmp_path, layout, *DIRECT)
    assert (report := compared(recipe)).passed, report
    s = planned(recipe)
    for rank, step in enumerate(run_ranks(s.layout.ranks, counted, recipe, timeout_s=300)):
        assert volume.counted(s, rank) == step.sent, f"rank {rank} of {to_text(s.layout)}"


@pytest.mark.slow
def test_bf16_passes(room):
    """With all experts: rounding may choose others for a token, and how often in so few tokens is chance."""
    every = ["model.experts_per_token=8", "model.expert_groups=1", "model.groups_per_token=1"]
    report = compared(tiny(room, "tp=2,sp=true", *TINY, *every, mode="bf16"))
    assert report.passed, report


@only("dp=2,ep=2")
@pytest.mark.parametrize("layout", slow_but({"tp=2,sp=true", "cp=2", "dp=2,ep=2"}, LAYOUTS))
def test_bytes_are_those_counted(room, layout):
    recipe = tiny(room, layout, *TINY)
    s = planned(recipe)
    for rank, step in enumerate(run_ranks(s.layout.ranks, counted, recipe, timeout_s=300)):
        assert volume.counted(s, rank) == step.sent, f"rank {rank} of {to_text(s.layout)}"


def test_flops_are_those_of_the_formula():
    """But for the keys that the mask hides within a block of queries, and for the values' padding."""
    from test_trace import recipe_of

    recipe = recipe_of("dp=1", "fp32", *TINY, "model.kv_heads=4")
    model, found = recipe.model, exact(recipe)
    computed = 12 * model.head_width
    formula = 3 * (model.head_width + (model.value_dim or 0))
    tokens = recipe.train.global_batch_size * model.seq_len
    assert found.step.flops == found.formula + model.layers * tokens * model.seq_len * model.heads * (
        computed - formula
    )
