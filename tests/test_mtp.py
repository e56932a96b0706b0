"""Multi-token prediction: its definition, layouts against one process, the plan against the trainer, files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from layouts import compared, compiled, tiny
from marks import only, slow_but
from ranks import run_ranks
from steps import counted, planned
from torch import Tensor
from torch.nn import functional as F

from fivefold.errors import UserError
from fivefold.kernels.blockwise_attention import Documents
from fivefold.models.ahead import further
from fivefold.models.base import build
from fivefold.models.card import card_of, count_parameters, resolve_model
from fivefold.models.section import ModelSection
from fivefold.plan.messages import volume
from fivefold.recipe import load
from fivefold.sharding.layout import Layout, to_text
from fivefold.sharding.parts import stage_blocks

ODD = {
    "query_rank": 20, "kv_rank": 12, "nope_dim": 7, "rope_dim": 4, "value_dim": 5, "experts": 8, "experts_per_token": 3,
    "expert_ffn_dim": 16, "dense_layers": 1, "expert_groups": 4, "groups_per_token": 2, "mtp_depth": 2,
    "mtp_weight": 0.7,
}  # fmt: skip
MODEL = ["model.arch=deepseek", *(f"model.{name}={value}" for name, value in ODD.items()), "model.layers=4"]
T = 24


def model_of(**fields: object) -> ModelSection:
    sizes = {"layers": 2, "dim": 40, "heads": 4, "ffn_dim": 72, "seq_len": T, "init_std": 0.3}
    return resolve_model(ModelSection(arch="deepseek", **{**ODD, **sizes, **fields}), vocab_size=128)


def batch(B: int = 2) -> tuple[Tensor, Tensor, np.ndarray]:
    """Tokens, targets of which some do not count, and documents."""
    random = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 128, (B, T + 1), generator=random)
    targets = tokens[:, 1:].masked_fill(torch.rand(B, T, generator=random) < 0.2, -100)
    first = np.zeros((B, T), np.int64)
    first[0, 5:], first[0, 16:], first[1, 11:] = 5, 16, 11
    return tokens[:, :-1], targets, first


def by_definition(model, inputs: Tensor, targets: Tensor, first: np.ndarray) -> tuple[Tensor, Tensor]:
    """The main loss and the mean of the modules' losses, position by position, as section 2.2 of the paper says."""
    documents, (B, _) = Documents(first), inputs.shape
    tables, counted = model.context(torch.arange(T)), (targets >= 0).sum()
    embedded, blocks = model.embed(inputs), list(model.blocks.values())
    x = embedded
    for block in blocks[: model.section.layers]:
        x = block(x, *tables, documents=documents)
    y = model.norm(x)

    def loss(y: Tensor, k: int) -> Tensor:
        total = torch.zeros(())
        for b in range(B):
            for t in range(T - k):
                if first[b, t + k] == first[b, t] and targets[b, t + k] >= 0:
                    logits = model.head.weight @ y[b, t]
                    total = total + F.cross_entropy(logits[None], targets[b, t + k][None])
        return total / counted

    main, losses = loss(y, 0), []
    for k, block in enumerate(blocks[model.section.layers :], 1):
        token = torch.stack([embedded.roll(-k, 1)[:, t] if t < T - k else model.embed(torch.zeros(B, dtype=torch.long))
                             for t in range(T)], 1)  # fmt: skip
        ahead = block.ahead
        joined = torch.cat([ahead.token_norm(token), ahead.hidden_norm(y)], -1)
        block.ahead = None
        y = ahead.norm(block(F.linear(joined, ahead.project.weight), *tables, documents=documents))
        block.ahead = ahead
        losses.append(loss(y, k))
    return main, sum(losses) / len(losses)


def test_loss_and_gradients_are_those_of_the_definition() -> None:
    inputs, targets, first = batch()
    model = build(model_of(), device="cpu", seed=3)
    main, more = by_definition(model, inputs, targets, first)
    (main + 0.7 * more).backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    ahead = further(inputs, targets, torch.as_tensor(first), 2)
    found = model(inputs, targets, documents=Documents(first), further=ahead)
    found.backward()
    torch.testing.assert_close(found, main)
    torch.testing.assert_close(model.mtp_loss, more.detach())
    for name, parameter in model.named_parameters():
        scale = expected[name].abs().max()
        assert scale > 0, name
        torch.testing.assert_close(
            parameter.grad, expected[name], atol=2e-5 * float(scale), rtol=1e-4, msg=name
        )


def test_only_the_main_head_is_evaluated_and_generates() -> None:
    inputs, targets, first = batch()
    whole, main = (build(model_of(mtp_depth=depth), device="cpu", seed=3).eval() for depth in (2, 0))
    ahead = further(inputs, targets, torch.as_tensor(first), 2)
    assert torch.equal(whole(inputs, targets, further=ahead), main(inputs, targets))
    assert torch.equal(whole(inputs), main(inputs))


def test_targets_end_with_their_document() -> None:
    tokens = torch.arange(10)[None]
    ahead = further(tokens[:, :-1], tokens[:, 1:], torch.tensor([[0, 0, 0, 0, 4, 4, 4, 4, 4]]), 2)
    assert ahead.targets[0].tolist() == [
        [2, 3, 4, -100, 6, 7, 8, 9, -100],
        [3, 4, -100, -100, 7, 8, 9, -100, -100],
    ]
    assert ahead.tokens[0].tolist() == [[1, 2, 3, 4, 5, 6, 7, 8, 0], [2, 3, 4, 5, 6, 7, 8, 0, 0]]
    assert ahead.counts.tolist() == [9, 7, 5]


def test_names_and_shapes_are_the_modules() -> None:
    for model in (model_of(), model_of(tie_embeddings=True, mtp_depth=1)):
        card, module = card_of(model), build(model)
        assert [(n, tuple(p.shape)) for n, p in module.named_parameters()] == list(card.parameters.items())
        assert count_parameters(model) == sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["model.mtp_depth=1"], "model.mtp_depth: llama has no modules for multi-token prediction"),
        (
            ["model.arch=deepseek", "model.mtp_weight=0.1"],
            "mtp_weight = 0.1 has no effect: model.mtp_depth = 0",
        ),
        (
            ["model.arch=deepseek", "model.mtp_depth=3", "model.seq_len=4"],
            "leaves no target .* Nearest valid: 2",
        ),
    ],
)
def test_what_cannot_be_is_refused(sets, message) -> None:
    with pytest.raises(UserError, match=message):
        load("quickstart", sets)


def test_modules_stay_on_the_last_stage() -> None:
    model = model_of(layers=7)
    blocks = stage_blocks(card_of(model), Layout(pp=4))
    assert blocks[-1].stop == 9
    assert len(blocks[-1]) == 3  # cheaper than the others without them
    assert [number for part in blocks for number in part] == list(range(9))


QUICK = ["pp=2", "cp=2", "tp=2,sp=true", "dp=2,ep=2,zero=3"]
LAYOUTS = [
    *QUICK, "dp=1", "dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "tp=2", "cp=2,cp_method=ulysses",
    "cp=2,cp_method=all_gather", "cp=4", "dp=2,ep=2", "dp=1,recompute=full", "dp=1,recompute=selective",
    "dp=2,zero=3,recompute=full", "tp=2,sp=true,recompute=ops:attention+gate+norm", "tp=2,sp=true,tp_chunks=2",
    "pp=2,schedule=gpipe", "pp=2,schedule=interleaved,virtual_stages=2", "pp=2,schedule=zb_h1",
    "pp=2,schedule=zbv,virtual_stages=2", "pp=2,schedule=dualpipe", "pp=2,schedule=dualpipev",
    "pp=2,cp=2", "pp=2,tp=2,sp=true", "pp=2,dp=2,zero=2", "pp=2,dp=2,ep=2,zero=3", "cp=2,tp=2,sp=true",
    "dp=2,tp=2,pp=2", "pp=2,recompute=full", "pp=4,bare_ends=true",
]  # fmt: skip


@pytest.fixture(scope="module")
def room(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("mtp")


@only("pp=2", "cp=2")
@pytest.mark.parametrize("layout", slow_but(QUICK, LAYOUTS))
def test_layouts_compute_what_one_process_computes(room, layout) -> None:
    report = compared(tiny(room, layout, *MODEL, "model.tie_embeddings=false"), folder=room / "reference")
    assert report.passed, report


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", ["pp=2", "dp=2,zero=3", "tp=2,sp=true", "pp=2,schedule=zbv,virtual_stages=2"]
)
def test_tied_embeddings(room, layout) -> None:
    report = compared(tiny(room, layout, *MODEL), folder=room / "tied")
    assert report.passed, report


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp=2", "tp=2,sp=true", "cp=2", "dp=2,recompute=full"])
def test_compiled_blocks_equal_one_process(room, layout) -> None:
    report = compared(tiny(room, layout, *MODEL, "data.document_masks=false"), part=compiled)
    assert report.passed, report


@only("pp=2")
@pytest.mark.parametrize("layout", slow_but(QUICK, LAYOUTS))
def test_bytes_are_those_counted(room, layout) -> None:
    recipe = tiny(room, layout, *MODEL, "model.tie_embeddings=false")
    s = planned(recipe)
    if s.layout.ranks == 1:
        return
    for rank, step in enumerate(run_ranks(s.layout.ranks, counted, recipe, timeout_s=300)):
        assert volume.counted(s, rank) == step.sent, f"rank {rank} of {to_text(s.layout)}"
