"""Parameters and FLOPs that the recipe's formulas give, against those of the built modules."""

from __future__ import annotations

import math

import pytest
import torch
from families import FAMILIES, small
from torch.utils.flop_counter import FlopCounterMode

from fivefold.models.base import build
from fivefold.models.card import card_of, flops_per_token
from fivefold.recipe import ModelSection, count_parameters, load, resolve_model, shipped

SMALL = {"layers": 3, "dim": 64, "heads": 4, "vocab_size": 256, "seq_len": 40}
MODELS = [
    ModelSection(arch="llama", **SMALL),
    ModelSection(arch="llama", kv_heads=1, tie_embeddings=True, **SMALL),
    ModelSection(arch="gpt2", **SMALL),
    ModelSection(arch="bert", ffn_dim=96, **SMALL),
    ModelSection(arch="qwen3", kv_heads=2, head_dim=24, **SMALL),
    ModelSection(arch="olmo2", kv_heads=2, **SMALL),
    *(
        small(arch, **SMALL) for arch in FAMILIES if "experts" not in FAMILIES[arch]
    ),  # torch counts none of these
    ModelSection(arch="speedrun", kv_heads=2, **SMALL),
]


@pytest.mark.parametrize("name", shipped())
def test_shipped_models_have_as_many_parameters_as_counted(name):
    model = load(name).model
    model = resolve_model(model, vocab_size=model.vocab_size or 4096)
    model = model.model_copy(update={"layers": min(model.layers, model.dense_layers + 3)})  # blocks are alike
    assert sum(p.numel() for p in build(model).parameters()) == count_parameters(model)


def test_known_models_have_their_published_size():
    gpt2 = ModelSection(arch="gpt2", layers=12, dim=768, heads=12, vocab_size=50257, seq_len=1024)
    llama = ModelSection(layers=32, dim=4096, heads=32, ffn_dim=11008, vocab_size=32000, seq_len=4096)
    bert = ModelSection(arch="bert", layers=12, dim=768, heads=12, vocab_size=30522, seq_len=512)
    qwen3 = ModelSection(
        arch="qwen3", layers=28, dim=1024, heads=16, kv_heads=8, head_dim=128, ffn_dim=3072, vocab_size=151936,
        tie_embeddings=True,
    )  # fmt: skip
    olmo2 = ModelSection(arch="olmo2", layers=16, dim=2048, heads=16, ffn_dim=8192, vocab_size=100352)
    sizes = [
        sum(p.numel() for p in build(resolve_model(m, vocab_size=2)).parameters())
        for m in (gpt2, llama, bert, qwen3, olmo2)
    ]
    assert sizes == [124_439_808, 6_738_415_616, 109_514_298, 596_049_920, 1_484_916_736]


@pytest.mark.parametrize("section", MODELS, ids=lambda m: f"{m.arch}-{m.kv_heads}")
def test_flops_are_those_that_torch_counts(section):
    """Matrix products of forward and backward; attention's own two are left out of both sides, for torch sees
    only some implementations of them. Every token is a target, of bert's 40 the 6 that are masked."""
    model = resolve_model(section, vocab_size=256)
    module = build(model, device="cpu")
    tokens = torch.randint(0, 256, (2, 40))
    targets = tokens.clone()
    if model.arch == "bert":
        targets[:, 6:] = -100
    # what `kernels/matmul.py` takes for fp32 on CPUs, which the counter does not know
    onednn = {torch.ops.mkldnn._linear_pointwise: lambda x, w, *_, **__: 2 * math.prod(x) * w[0]}
    with FlopCounterMode(display=False, custom_mapping=onednn) as counter:
        module(tokens, targets).backward()
    counts = counter.get_flop_counts()["Global"]
    counted = sum(
        flops for op, flops in counts.items() if op in (torch.ops.aten.mm, torch.ops.aten.addmm, *onednn)
    )
    card = card_of(model)
    attention = sum(map(card.attention_flops, range(model.layers)))
    width = 12 * model.layers * model.heads * model.head_width * model.seq_len
    assert attention == width * (0.5 if card.causal else 1.0) or card.narrow
    assert counted / tokens.numel() == pytest.approx(flops_per_token(model) - attention, rel=1e-12)


def test_flops_of_the_common_work():
    """77 MFLOP a token: the figure that this project's benchmarks use."""
    model = ModelSection(layers=6, dim=384, heads=6, ffn_dim=1024, vocab_size=4096, seq_len=256)
    assert flops_per_token(model) == pytest.approx(76.7e6, rel=1e-3)
