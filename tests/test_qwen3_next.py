"""Qwen3-Next: the gated delta rule in chunks against token by token, values, gradients and bytes of transformers, the
plan. Its layouts against one process are in test_families.py, its documents in test_documents.py."""

from __future__ import annotations

import json

import pytest
import torch
from exported import read_by_transformers
from families import overrides
from layouts import compared, tiny
from marks import only
from ranks import run_ranks
from safetensors.torch import load_file
from steps import counted, planned
from torch import Tensor
from torch.nn import functional as F

from fivefold.checkpoint.source import export_run, import_folder
from fivefold.errors import UserError
from fivefold.kernels.blockwise_attention import Documents
from fivefold.kernels.delta_rule import causal_convolution, gated_delta_rule, unit
from fivefold.kernels.elementwise import gated
from fivefold.kernels.sizes import DELTA_CHUNK
from fivefold.models.base import build
from fivefold.models.card import card_of, flops_per_token
from fivefold.models.hf import from_hf_config, hf_config, to_hf
from fivefold.models.section import ModelSection
from fivefold.optim import OPTIMIZERS
from fivefold.recipe import active_parameters, count_parameters, load, resolve_model
from fivefold.sharding.layout import Layout
from fivefold_plan.cluster.clusters import parse
from fivefold_plan.messages import volume
from fivefold_plan.setting import setting

SIZES = {
    "arch": "qwen3_next",
    "layers": 4,
    "dim": 48,
    "heads": 4,
    "kv_heads": 2,
    "vocab_size": 128,
    "seq_len": 32,
}
# norm_eps: as in families.py
MODELS = {
    "odd": ModelSection(**SIZES, head_dim=16, rotary_dim=4, full_every=2, experts=8, experts_per_token=3,
                        expert_ffn_dim=16, shared_experts=2, linear_heads=6, linear_key_heads=3, linear_key_dim=10,
                        linear_value_dim=7, linear_conv=3, norm_eps=0.01, init_std=0.2),
    "one to one": ModelSection(**SIZES | {"layers": 3}, full_every=3, ffn_dim=48, experts=4, linear_heads=4,
                               tie_embeddings=True, norm_eps=0.1, init_std=0.2),
    "all linear": ModelSection(**SIZES | {"layers": 2}, ffn_dim=48, linear_conv=6, norm_eps=0.1, init_std=0.2),
}  # fmt: skip


def token_by_token(q, k, v, decay, beta, state=None, first=None) -> tuple[Tensor, Tensor]:
    """The rule as the paper writes it, in fp64. first: as in `gated_delta_rule`."""
    (B, T, K, d), (H, e) = q.shape, v.shape[2:]
    q, k = (unit(x).double().repeat_interleave(H // K, 2) for x in (q, k))
    S = torch.zeros(B, H, d, e, dtype=torch.double) if state is None else state.double()
    outputs = []
    for t in range(T):
        if first is not None:
            S = S * ((first[:, t] < t) | (t == 0)).view(-1, 1, 1, 1)
        S = S * decay[:, t].double().exp()[..., None, None]
        error = (v[:, t] - torch.einsum("bhde,bhd->bhe", S, k[:, t])) * beta[:, t, :, None]
        S = S + torch.einsum("bhd,bhe->bhde", k[:, t], error)
        outputs.append(torch.einsum("bhde,bhd->bhe", S, q[:, t]) * d**-0.5)
    return torch.stack(outputs, 1), S


@pytest.mark.parametrize(
    ("T", "chunk", "documents", "begun"),
    [(37, 8, False, False), (40, 8, True, False), (150, DELTA_CHUNK, True, True), (1, 64, False, True)],
)
def test_chunks_equal_token_by_token(T: int, chunk: int, documents: bool, begun: bool) -> None:
    """Outputs, the last state, all gradients. Documents begin within chunks, at their edges, one after another."""
    B, K, H, d, e = 2, 2, 4, 6, 5
    random = torch.Generator().manual_seed(T)
    q, k, v = (torch.randn(B, T, *size, generator=random) for size in ((K, d), (K, d), (H, e)))
    decay, beta = -3 * torch.rand(B, T, H, generator=random), torch.rand(B, T, H, generator=random)
    given = [q, k, v, decay, beta, *([torch.randn(B, H, d, e, generator=random)] if begun else [])]
    first = None
    if documents:
        starts = torch.zeros(B, T, dtype=torch.long)
        for row, at in ((0, 8), (0, 9), (0, 20), (1, 3), (1, 16), (1, T - 1)):
            starts[row, at] = at
        first = starts.cummax(1).values
    inputs = [x.requires_grad_() for x in given]
    state = inputs[5] if begun else None
    found = gated_delta_rule(*inputs[:5], state, first, chunk)
    expected = token_by_token(*inputs[:5], state, first)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b.float(), atol=5e-6, rtol=1e-5)
    factors = [torch.randn(x.shape, generator=random) for x in found]
    of = [torch.autograd.grad(sum((x * f).sum() for x, f in zip(pair, factors, strict=True)), inputs)
          for pair in (found, expected)]  # fmt: skip
    for a, b in zip(*of, strict=True):
        assert (a - b).norm() <= 2e-5 * b.norm()


def test_the_convolution_is_pytorchs_and_stops_at_documents() -> None:
    random = torch.Generator().manual_seed(0)
    x, weight, tail = (torch.randn(size, generator=random) for size in ((2, 9, 5), (5, 4), (2, 3, 5)))
    whole = F.conv1d(torch.cat((tail, x), 1).mT, weight[:, None], groups=5).mT
    torch.testing.assert_close(causal_convolution(x, weight, tail), whole)
    first = torch.tensor([[0, 0, 0, 3, 3, 5, 5, 5, 5]] * 2)
    apart = torch.cat([causal_convolution(part, weight) for part in x.split([3, 2, 4], 1)], 1)
    torch.testing.assert_close(causal_convolution(x, weight, None, first), apart)


@pytest.mark.parametrize("silu", [False, True])
def test_gradients_of_gates(silu: bool) -> None:
    inputs = [
        x.requires_grad_() for x in torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(0)).unbind()
    ]
    ours = torch.autograd.grad(gated(*inputs, silu).square().sum(), inputs)
    x, gate = inputs
    plain = x * (F.silu(gate) if silu else gate.sigmoid())
    theirs = torch.autograd.grad(plain.square().sum(), inputs)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


@pytest.fixture(params=MODELS, scope="module")
def pair(request, tmp_path_factory):
    """(our module, theirs that is read from the exported folder, the model section, the folder)."""
    model = resolve_model(MODELS[request.param], vocab_size=128)
    ours, random = build(model, device="cpu", seed=3), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in ours.parameters():
            if parameter.ndim == 1:
                parameter += 0.2 * torch.randn(parameter.shape, generator=random)
    folder = tmp_path_factory.mktemp("qwen3_next")
    return ours, read_by_transformers(ours, model, folder), model, folder


def tokens_of(seed: int = 7, length: int = 80) -> Tensor:
    """More than a chunk."""
    return torch.randint(0, 128, (3, length), generator=torch.Generator().manual_seed(seed))


def test_logits_are_theirs(pair) -> None:
    ours, theirs, _, _ = pair
    with torch.no_grad():
        got, expected = ours(tokens_of()), theirs(tokens_of(), use_cache=False).logits
    assert expected.std() > 0.3
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_loss_and_gradients_are_theirs(pair) -> None:
    """Without the router's term, which they compute over all blocks together."""
    ours, theirs, model, _ = pair
    ours.zero_grad()
    theirs.zero_grad()
    for block in ours.blocks.values():
        block.mlp.aux_weight = 0.0
    loss = ours(tokens_of(), tokens_of(8))
    expected = F.cross_entropy(
        theirs(tokens_of(), use_cache=False).logits.flatten(0, 1), tokens_of(8).flatten()
    )
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)
    loss.backward()
    expected.backward()
    got = to_hf({name: p.grad for name, p in ours.named_parameters()}, model)
    for name, parameter in theirs.named_parameters():
        mlp, _, kind = name.rpartition("experts.")
        if mlp:
            kinds = ("gate", "up") if kind == "gate_up_proj" else ("down",)
            each = [
                [got[f"{mlp}experts.{n}.{one}_proj.weight"] for one in kinds]
                for n in range(model.experts or 0)
            ]
            gradient = torch.stack([torch.cat(parts) for parts in each])
        else:
            gradient = got[name]
        assert parameter.grad is not None, name
        difference = (gradient - parameter.grad).norm() / parameter.grad.norm()
        assert difference < 2e-5, f"{name}: relative difference {difference:.2e}"


def test_bytes_survive_the_way_in_and_out(pair, tmp_path) -> None:
    """A folder of theirs becomes a run and a folder again."""
    _, theirs, model, folder = pair
    export_run(import_folder(folder, tmp_path / "run"), tmp_path / "out")
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert from_hf_config(hf_config(model)) == model
    assert from_hf_config(theirs.config.to_dict()) == model
    assert from_hf_config(json.loads((tmp_path / "out" / "config.json").read_text())) == model


def test_the_published_config_is_read() -> None:
    """That of Qwen3-Next-80B-A3B: 80 billion parameters, of which 3 billion compute a token."""
    config = {
        "model_type": "qwen3_next", "hidden_size": 2048, "intermediate_size": 5120, "num_attention_heads": 16,
        "num_hidden_layers": 48, "vocab_size": 151936, "max_position_embeddings": 262144, "rms_norm_eps": 1e-6,
        "rope_theta": 10000000, "partial_rotary_factor": 0.25, "full_attention_interval": 4, "num_key_value_heads": 2,
    }  # fmt: skip
    model = from_hf_config(config)
    assert (model.full_every, model.rotary_dim, model.head_width, model.shared_experts) == (4, 64, 256, 1)
    assert round(count_parameters(model) / 1e9, 1) == 79.7
    assert round(active_parameters(model) / 1e9, 1) == 3.9  # the published 3B leave out embeddings
    assert from_hf_config(hf_config(model)) == model
    assert card_of(model).second == (False, False, False, True) * 12


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"layer_types": ["chunked_attention"] * 4},
            "layer_types must say full_attention or linear_attention",
        ),
        ({"shared_expert_intermediate_size": 20}, "must be a multiple of moe_intermediate_size = 16"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step = 2"),
    ],
)
def test_what_differs_is_refused(change, message) -> None:
    with pytest.raises(UserError, match=message):
        from_hf_config(hf_config(resolve_model(MODELS["odd"], vocab_size=128)) | change)


@pytest.mark.parametrize(
    ("fields", "layout", "message"),
    [
        ("model.linear_heads=5", "dp=1", "linear_key_heads = 6 must divide model.linear_heads = 5. .* = 5"),
        ("", "tp=4", "layout.tp = 4 must divide model.linear_key_heads = 6: each rank has whole heads"),
        ("", "cp=4", "layout.cp x layout.tp = 4 must divide model.linear_key_heads = 6: context ranks exchange .*"
                     "Nearest valid: layout.cp = 2"),
        ("model.arch=llama", "dp=1", "linear_conv: llama has no linear attention"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(fields: str, layout: str, message: str) -> None:
    base = [
        "model.arch=qwen3_next",
        "model.heads=4",
        "model.kv_heads=4",
        "model.dim=64",
        "model.linear_conv=3",
    ]
    heads = [] if fields.endswith("llama") else ["model.linear_key_heads=6"]
    with pytest.raises(UserError, match=message):
        load("quickstart", [*base, *heads, *([fields] if fields else [])], layout)


def test_documents_are_as_sequences_of_their_own() -> None:
    model = resolve_model(MODELS["odd"], vocab_size=128)
    module, tokens = build(model, device="cpu", seed=3).eval(), tokens_of()
    documents = Documents(torch.tensor([0] * 13 + [13] * 50 + [63] * 17).expand(3, -1).numpy())
    with torch.no_grad():
        targets = tokens_of(8)
        whole = module(tokens, targets, documents=documents)
        parts = [
            module(*two)
            for two in zip(tokens.split([13, 50, 17], 1), targets.split([13, 50, 17], 1), strict=True)
        ]
    expected = sum(part * n for part, n in zip(parts, (13, 50, 17), strict=True)) / 80
    torch.testing.assert_close(whole, expected, atol=1e-5, rtol=1e-5)


@only("cp=2,tp=2,sp=true,recompute=full")
@pytest.mark.parametrize(
    "layout", ["cp=2,tp=2,sp=true,recompute=full", "cp=4,cp_method=all_gather", "dp=2,ep=2", "pp=2,cp=2"]
)
def test_bytes_are_those_counted(tmp_path, layout: str) -> None:
    few = "train.global_batch_size=4"
    recipe = tiny(tmp_path, layout, *overrides("qwen3_next"), "model.kv_heads=2", few)
    s = planned(recipe)
    for rank, step in enumerate(run_ranks(s.layout.ranks, counted, recipe, timeout_s=300)):
        assert volume.counted(s, rank) == step.sent, rank


def test_vectors_in_one_tensor_are_no_matrices() -> None:
    """The filters of the convolution and the row of the gate: AdamW updates them, nothing decays or rounds them."""
    card, muon = card_of(resolve_model(MODELS["odd"], vocab_size=128)), OPTIMIZERS["muon"]
    blocks = {name: shape for name, shape in card.parameters.items() if name.startswith("blocks.")}
    left = {name for name, shape in blocks.items() if len(shape) > 1 and muon.of(name, shape) is not muon}
    linear = {f"blocks.{n}.attention.conv_vectors" for n in (0, 2)}
    assert left == linear | {f"blocks.{n}.mlp.shared_gate_vectors" for n in range(4)}
    assert card.rounded.isdisjoint(left)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp=2,tp=2,zero=1", "dp=2,ep=2,zero=3", "tp=2,sp=true", "cp=2", "pp=2"])
def test_muon_on_layouts(tmp_path, layout: str) -> None:
    """Vectors in one tensor are updated whole or in parts, matrices are not."""
    recipe = tiny(tmp_path, layout, *overrides("qwen3_next"), "model.kv_heads=2", "optim.name=muon")
    report = compared(recipe)
    assert report.passed, report.figures


def test_flops_are_those_of_the_rule() -> None:
    """Documents change those of attention only. The plan multiplies chunks: more FLOPs than the rule itself."""
    model = resolve_model(MODELS["odd"], vocab_size=128)
    card, (H, d, e) = card_of(model), (6, 10, 7)
    assert card.attention_flops(0) == 3 * (2 * 3 * (2 * 3 * d + H * e) + 6 * H * d * e)  # convolution, rule
    assert card.attention_flops(1) == 6 * 4 * 16 * 32
    whole, apart = flops_per_token(model), flops_per_token(model, lambda window: 0.25)
    assert whole - apart == pytest.approx(0.75 * 2 * card.attention_flops(1))
    s = setting(model, Layout(), parse("h100:1"), 1, 1, "bf16")
    again = [op for op in s.work.block[s.kind(False, "none")] if op.again]
    flops = sum(2 * op.matmul.count * op.matmul.m * op.matmul.n * op.matmul.k for op in again if op.matmul)
    tokens, C, K = 32, 32, 3
    assert flops == tokens * (2 * C * d * 2 * K + H * (C * (d + e) + 2 * C * e + 6 * d * e))
    assert all(op.matmul and op.matmul.wide for op in again)
