"""The tables of parameters and cuts, against the built modules."""

from __future__ import annotations

import pytest
import torch
from families import FAMILIES, small
from hypothesis import given
from hypothesis import strategies as st

from fivefold.models.base import build
from fivefold.models.card import card_of
from fivefold.recipe import ModelSection, resolve_model
from fivefold.sharding.layout import Layout, to_text
from fivefold.sharding.parts import (
    Cut,
    boxes,
    divide,
    local_shape,
    narrow,
    parts,
    shard_dim,
    size_of,
    whole,
)

SMALL = {"layers": 2, "dim": 32, "heads": 4, "vocab_size": 64, "seq_len": 16}
MODELS = [
    ModelSection(arch="llama", **SMALL),
    ModelSection(arch="llama", kv_heads=2, tie_embeddings=True, **SMALL),
    ModelSection(arch="gpt2", **SMALL),
    ModelSection(arch="gpt2", tie_embeddings=False, **SMALL),
    ModelSection(arch="bert", **SMALL),
    ModelSection(arch="llama", head_dim=6, attention_bias=True, **SMALL),
    ModelSection(arch="qwen3", head_dim=16, tie_embeddings=True, **SMALL),
    ModelSection(arch="olmo2", **SMALL),
    ModelSection(arch="speedrun", kv_heads=2, **SMALL),
    ModelSection(arch="qwen3_moe", head_dim=16, experts=4, expert_ffn_dim=16, **SMALL),
    ModelSection(arch="deepseek", rope_dim=6, value_dim=5, dense_layers=1, **SMALL),
    *(small(arch, **SMALL) for arch in FAMILIES),
]


@pytest.mark.parametrize("section", MODELS, ids=lambda m: f"{m.arch}-{m.kv_heads}-{m.tie_embeddings}")
def test_names_and_shapes_are_the_modules(section):
    model = resolve_model(section, vocab_size=64)
    module = build(model)
    assert [(n, tuple(p.shape)) for n, p in module.named_parameters()] == list(
        card_of(model).parameters.items()
    )


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("section", [MODELS[0], MODELS[2], *MODELS[4:10]], ids=lambda m: m.arch)
def test_parts_of_all_ranks_are_the_whole(section, ranks):
    model = resolve_model(section, vocab_size=64)
    for name, cut in card_of(model).cuts.items():
        shape = card_of(model).parameters[name]
        seen = torch.zeros(shape)
        for index in range(ranks):
            part = divide(whole(shape), cut, index, ranks)
            assert torch.Size(local_shape(part)).numel() * ranks == seen.numel()
            for _, box in boxes(part):
                seen[tuple(slice(*span) for span in box)] += 1
        assert (seen == 1).all(), name


@pytest.mark.parametrize(
    ("shape", "ranks", "dim"),
    [
        ((8, 64, 32), 1, 0),
        ((8, 64, 32), 4, 0),
        ((8, 64, 32), 16, 1),  # fewer experts than ranks
        ((6, 64, 32), 4, 1),  # two of four would have half of them
        ((8, 50, 32), 16, 0),  # rows of an expert do not divide either: as FSDP2 does
        ((6, 64), 4, 0),  # no stack
        ((6,), 4, 0),
    ],
)
def test_dim_along_which_states_are_shared(shape, ranks, dim):
    assert shard_dim(shape, ranks) == dim


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp_shard=4, ep=2, zero=3),
        Layout(dp_shard=8, zero=1),
        Layout(dp_replicate=2, dp_shard=4, ep=2, zero=2),
        Layout(dp_shard=2, tp=4, sp=True, ep=2, ep_fold=True, zero=3),
        Layout(dp_replicate=2, dp_shard=2, tp=2, sp=True, ep=2, ep_fold=True, zero=1),
        Layout(dp_replicate=2, tp=2, sp=True, ep=2, ep_fold=True),
    ],
    ids=to_text,
)
def test_few_experts_are_shared_evenly(layout):
    """Each element of them is owned once, and no rank keeps more than its share."""
    section = ModelSection(arch="moe", experts=2, experts_per_token=1, expert_ffn_dim=16, **SMALL)
    model = resolve_model(section, vocab_size=64)
    seen = {
        name: torch.zeros(shape) for name, shape in card_of(model).parameters.items() if ".experts." in name
    }
    for rank in range(layout.ranks):
        for name, part in parts(card_of(model), layout, rank).items():
            if name in seen and part.owned:
                for _, box in boxes(part.keeps):
                    seen[name][tuple(slice(*span) for span in box)] += 1
            if name in seen:
                assert size_of(part.keeps) == seen[name].numel() // (layout.expert_shards * layout.ep)
    assert all((count == 1).all() for count in seen.values())


def test_fused_rows_are_cut_section_by_section():
    part = divide(whole((12, 5)), Cut("column", 0, (8, 2, 2)), 1, 2)
    assert part == (((4, 8), (9, 10), (11, 12)), ((0, 5),))
    assert narrow(part, 0, 3, 6) == (((7, 8), (9, 10), (11, 12)), ((0, 5),))
    assert narrow(part, 0, 6, 6)[0] == ()


@given(st.integers(0, 8), st.integers(0, 8), st.integers(0, 1))
def test_narrowing_a_part_is_slicing_its_tensor(a, b, index):
    start, stop = min(a, b), max(a, b)
    full = torch.arange(16 * 3).view(16, 3)
    part = divide(whole((16, 3)), Cut("column", 0, (8, 4, 4)), index, 2)

    def local(ranges):
        out = torch.empty(local_shape(ranges), dtype=torch.int64)
        for where, box in boxes(ranges):
            out[where] = full[tuple(slice(*span) for span in box)]
        return out

    assert torch.equal(local(narrow(part, 0, start, stop)), local(part)[start:stop])
