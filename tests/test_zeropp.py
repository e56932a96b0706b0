"""ZeRO++: less traffic between nodes, and what it changes: nothing (hier), or values by a known quantisation.

Four ranks stand for two nodes of two, as two machines of torchrun would say it.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import tiny
from marks import all_but, slow
from ranks import run_ranks
from steps import counted, planned
from test_zero import joined, recipe_of, sent, share, steps, worst
from torch import Tensor

from fivefold.errors import UserError
from fivefold.kernels import native
from fivefold.kernels.rounded import Quantizer
from fivefold.launch.ranks import Ranks
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.zero import Gathers, Scatters
from fivefold.recipe import Recipe, change, count_parameters, load
from fivefold.recipe.rules.combinations import notes
from fivefold.schedules.compression import INT4, INT8, LARGEST, Blocks
from fivefold.sharding.layout import Layout, describe, parse, to_text
from fivefold.sharding.units import syncs, zeropp
from fivefold.step.state import build_state
from fivefold.step.step import take_step
from fivefold.train.verify import prepared
from fivefold_plan.cluster.clusters import parse as parse_cluster
from fivefold_plan.messages import volume
from fivefold_plan.predict import predict

CPU = torch.device("cpu")
ALL = "weights,hier,gradients"
NODES = "dp=4,zero=3,ranks_per_node=2"
SHARES = (300, 7, 512, 0, 1)  # elements of each parameter on a rank: whole blocks, part of one, none


def quantised(x: Tensor, sizes: tuple[int, ...], blocks: Blocks) -> Tensor:
    """What arrives of rows (r, S), block by block."""
    found = []
    for row in x.float():
        for parameter in row.split(sizes):
            for block in parameter.split(blocks.block):
                scale = block.abs().max() * (1 / LARGEST[blocks.bits]) if len(block) else torch.zeros(())
                found.append((block / scale.clamp(min=1e-38)).round() * scale)
    return torch.cat(found).view(x.shape)


@settings(max_examples=30, deadline=None)
@given(
    bits=st.sampled_from([4, 8]),
    sizes=st.lists(st.integers(0, 700), min_size=1, max_size=4).filter(any),
    half=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_quantised_rows(bits: int, sizes: list[int], half: bool, seed: int) -> None:
    """The native kernel writes the bytes of PyTorch's operations; each element is off by half a step of its block."""
    generator = torch.Generator().manual_seed(seed)
    dtype, S = torch.bfloat16 if half else torch.float32, sum(sizes)
    x = (torch.randn(3, 2, S, generator=generator) * 10 ** torch.randn(3, 2, 1, generator=generator)).to(
        dtype
    )[:, 1]
    code = Quantizer(bits, 256, sizes, CPU)
    encoded, decoded, added = torch.empty(3, code.R, dtype=torch.uint8), torch.empty(3, S), x.float().clone()
    code.encode(x, encoded)
    code.decode(encoded, decoded)
    code.decode(encoded, added, add=True)
    torch.testing.assert_close(added, x.float() + decoded)
    assert torch.equal(decoded, quantised(x, tuple(sizes), INT8 if bits == 8 else INT4))
    for (start, end), column in ((pair, slice(*pair)) for pair in pairwise(code.starts.tolist())):
        assert end - start <= 256
        step = x[:, column].float().abs().amax(1, keepdim=True) / LARGEST[bits]
        assert ((decoded - x.float())[:, column].abs() <= 0.5 * step * (1 + 1e-5)).all()
    usable, native.usable = native.usable, lambda *tensors: False
    try:
        plain, back = torch.empty_like(encoded), torch.empty_like(decoded)
        code.encode(x, plain)
        code.decode(plain, back)
    finally:
        native.usable = usable
    assert torch.equal(encoded, plain)
    assert torch.equal(decoded, back)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("bits", [4, 8])
def test_what_is_not_finite_arrives(bits: int, bad: float) -> None:
    """In its block, whatever lies beside it; others are untouched."""
    code, x = Quantizer(bits, 256, [600], CPU), torch.ones(1, 600)
    x[0, 300] = bad
    encoded, decoded = torch.empty(1, code.R, dtype=torch.uint8), torch.empty(1, 600)
    code.encode(x, encoded)
    code.decode(encoded, decoded)
    assert not decoded[0, 256:512].isfinite().any()
    assert torch.equal(decoded[0, :256], torch.ones(256))


def mesh_on(rank: int, world: int, per_node: int, text: str) -> Mesh:
    return Mesh(
        Layout(dp_shard=world, zero=3, zeropp=text), Ranks(rank, world, rank % per_node, per_node, CPU)
    )


def given_to(rank: int, world: int) -> tuple[Tensor, Tensor]:
    """A rank's weights (S), bf16, and its gradients (n, S)."""
    generator = torch.Generator().manual_seed(rank)
    S = sum(SHARES)
    return torch.randn(S, generator=generator).bfloat16(), torch.randn(world, S, generator=generator)


def messages(rank: int, world: int, per_node: int, text: str) -> dict[str, Any]:
    """Two gathers of a unit, one with its place in the output as FSDP2 gives it, and a sum."""
    plus, mesh = zeropp(text), mesh_on(rank, world, per_node, text)
    weights, gradients = given_to(rank, world)
    found: dict[str, Any] = {}
    if plus.two_gathers:
        gathers = Gathers(plus, mesh, "unit", SHARES)
        for name in ("first", "again"):
            out = torch.zeros(world, len(weights), dtype=weights.dtype)
            out[rank] = weights
            gathers.start(out[rank], out.view(-1))()
            found[name] = out
        found["copy"] = gathers.copy
        gathers.copy = None
    if plus.gradients:
        out = torch.empty(len(weights))
        found["sum"] = Scatters(plus, mesh, "unit", SHARES).sum(gradients.view(-1), out)
    return found


def summed(rank: int, world: int, per_node: int, blocks: Blocks) -> Tensor:
    """What `Scatters` computes, in one process: sums inside each node, then across, each from the owner's own part."""
    given_ = [given_to(r, world)[1] for r in range(world)]

    def inside(owner: int) -> Tensor:
        """The sum of the gradients of `rank`'s rows on the node of `owner`, which has its place there."""
        node = range(owner // per_node * per_node, (owner // per_node + 1) * per_node)
        total = given_[owner][rank].clone()
        for other in node:
            if other != owner:
                total += quantised(given_[other][rank : rank + 1], SHARES, blocks)[0]
        return total

    total = inside(rank)
    for owner in range(rank % per_node, world, per_node):
        if owner != rank:
            total += quantised(inside(owner)[None], SHARES, blocks)[0]
    return total


@pytest.mark.parametrize("per_node", [1, 2, 4])
@pytest.mark.parametrize("text", ["hier", "weights", ALL, "gradients:int8"])
def test_messages_are_those_of_one_process(per_node: int, text: str) -> None:
    plus, S = zeropp(text), sum(SHARES)
    weights = torch.stack([given_to(r, 4)[0] for r in range(4)])
    if plus.weights:
        weights = quantised(weights, SHARES, plus.weights).bfloat16()
    for rank, found in enumerate(run_ranks(4, messages, per_node, text)):
        if plus.two_gathers:
            assert torch.equal(found["first"], weights)
            assert torch.equal(found["again"], weights)
            kept = plus.hier and per_node < 4
            row = INT8.row(INT8.chunk([(share,) for share in SHARES], 1)) if plus.weights else 2 * S
            assert (found["copy"] is not None) == kept
            assert not kept or found["copy"].nbytes == 4 // per_node * row
        if plus.gradients:
            wanted = summed(rank, 4, per_node, plus.gradients)
            torch.testing.assert_close(found["sum"], wanted, rtol=1e-5, atol=1e-5)


def test_hier_changes_no_bit() -> None:
    """Losses, norms, gradients and weights, also of uneven rows, with one microbatch and with several."""
    for microbatches, sets in ((1, ["precision.mode=bf16"]), (3, [])):
        plain = recipe_of("llama", "layout.zero=3", "layout.dp_shard=4", *sets)
        recipe = change(plain, ["layout.zeropp=hier", "layout.ranks_per_node=2"])
        found, wanted = (run_ranks(4, steps, one, microbatches, 2) for one in (recipe, plain))
        for rank in range(4):
            assert found[rank]["losses"] == wanted[rank]["losses"]
            assert found[rank]["norms"] == wanted[rank]["norms"]
            for kind in ("gradients", "weights"):
                for name, tensor in wanted[rank][kind].items():
                    assert (found[rank][kind][name] == tensor).all(), name


@pytest.mark.parametrize(
    ("mode", "text", "least", "most"),
    [
        pytest.param(mode, *case, marks=[] if mode == "fp32" else pytest.mark.slow)
        for mode in ("fp32", "bf16_pure", "fp16")
        for case in (("weights", 1e-4, 0.05), ("gradients:int8", 1e-3, 0.02), ("gradients", 0.02, 0.3))
    ],
)
def test_gradients_are_off_by_the_quantisation(mode: str, text: str, least: float, most: float) -> None:
    """Of each parameter by no more than that of its blocks, and not by nothing."""
    plain = recipe_of("llama", "layout.zero=3", "layout.dp_shard=4", f"precision.mode={mode}")
    recipe = change(plain, [f"layout.zeropp={text}", "layout.ranks_per_node=2"])
    found, wanted = (joined(run_ranks(4, steps, one, 1, 1), one, "gradients") for one in (recipe, plain))
    error, name = worst(found, wanted)
    assert least < error < most, name


def losses(rank: int, world: int, recipe: Recipe, count: int) -> list[float]:
    """Of some steps on the same batch, so that there is something to learn."""
    state = build_state(recipe, Ranks(rank, world, rank % 2, 2, CPU))
    batch = share(state, recipe, 1)
    return [take_step(state, recipe, batch).loss for _ in range(count)]


@pytest.mark.slow
def test_a_short_run_learns_as_zero_3_does() -> None:
    plain = recipe_of("llama", "layout.zero=3", "layout.dp_shard=4", "train.steps=100", "optim.lr=1e-2")
    recipe = change(plain, [f"layout.zeropp={ALL}"])
    (found, *_), (wanted, *_) = (run_ranks(4, losses, one, 12) for one in (recipe, plain))
    assert wanted[-1] < 0.7 * wanted[0]
    assert found[0] == pytest.approx(wanted[0], rel=5e-3)
    assert found[-1] == pytest.approx(wanted[-1], rel=0.02)


@all_but("dp=2,tp=2*", "dp=2,pp=2*")
@pytest.mark.parametrize(
    "layout",
    [
        f"{NODES},zeropp={ALL}",
        f"{NODES},zeropp=weights,gradients:int8",
        *slow(
            f"{NODES},zeropp=hier",
            f"dp=4,zero=3,ranks_per_node=4,zeropp={ALL}",
            f"dp=4,zero=3,ranks_per_node=1,zeropp={ALL}",
        ),
        f"dp=2,tp=2,zero=3,ranks_per_node=2,zeropp={ALL}",
        f"dp_replicate=2,dp_shard=2,zero=3,ranks_per_node=1,all_reduce=library,zeropp={ALL}",
        f"dp=2,pp=2,zero=3,ranks_per_node=1,zeropp={ALL}",
    ],
)
def test_bytes_are_those_counted(tmp_path, layout: str) -> None:
    recipe = tiny(tmp_path, layout)
    s = planned(recipe)
    for rank, step in enumerate(run_ranks(4, counted, recipe)):
        assert volume.counted(s, rank) == step.sent, f"rank {rank}"


@pytest.mark.slow
def test_traffic_between_nodes_falls_from_3_to_three_quarters() -> None:
    """In Psi, bf16 gathers or sums of the whole model, as in the paper's table: what the ranks of a node send to others
    in a step of one microbatch. Scales are 1.6% of int8, and 3.1% of int4."""
    wide = [
        "model.vocab_size=512",
        "model.dim=512",
        "model.ffn_dim=1024",
        "layout.zero=3",
        "layout.dp_shard=4",
    ]
    recipe = recipe_of("llama", *wide, "precision.mode=bf16", "precision.reduce=bf16")
    psi = 2 * count_parameters(recipe.model)
    plain = run_ranks(4, sent, recipe, 1)[0]
    assert plain == {("all_gather", "shard"): [6, 2 * psi], ("all_to_all", "shard"): [3, psi]}
    for text, gather, scatter in ((ALL, 0.508, 0.258), ("weights,hier,gradients:int8", 0.508, 0.508)):
        ranks = run_ranks(4, sent, change(recipe, [f"layout.zeropp={text}", "layout.ranks_per_node=2"]), 1)
        for node in (0, 2):
            across = {
                what: sum(ranks[node + i][what, "across"][1] for i in range(2)) / psi
                for what in ("all_gather", "all_to_all")
            }
            assert across == pytest.approx({"all_gather": gather, "all_to_all": scatter}, rel=0.01)


def test_messages_of_a_step() -> None:
    def table(text: str) -> list[tuple[str, str, int, float]]:
        fields: dict[str, Any] = parse(text)
        return [(x.what, x.group, x.each, x.part) for x in syncs(Layout(**fields))]

    inside, own = ("gather", "inside", 2, 1.0), ("scatter", "shard", 1, 1.0)
    assert table(f"{NODES},zeropp=hier") == [("gather", "across", 0, 0.5), inside, own]
    assert table(f"{NODES},zeropp=weights") == [("gather", "across", 2, 0.5), inside, own]
    assert table(f"{NODES},zeropp=gradients") == [
        ("gather", "shard", 2, 1.0),
        ("scatter", "inside", 1, 1.0),
        ("scatter", "across", 1, 0.5),
    ]


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("dp=4,zero=3,zeropp=weigths", "zeropp: 'weigths' is unknown; did you mean 'weights'?"),
        ("dp=4,zero=3,zeropp=hier,gradients:int2", "zeropp: 'gradients:int2' is unknown; did you mean"),
        (
            "dp=4,zero=3,zeropp=gradients,gradients:int8",
            "zeropp: 'gradients,gradients:int8' has a part twice",
        ),
        ("dp=4,zero=2,zeropp=hier", "zeropp=hier changes what zero=3 sends: it needs zero=3, not zero=2"),
        (
            "dp=6,zero=3,zeropp=hier,ranks_per_node=4",
            "but 6 ranks share them and a node has 4 (ranks_per_node)",
        ),
        (
            "dp=6,tp=2,zero=3,zeropp=hier,ranks_per_node=8",
            "6 ranks with 2 tensor-parallel ranks each share them",
        ),
    ],
)
def test_refusals(layout: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        load("quickstart", [], layout)
    assert message in str(error.value)


def test_where_it_does_not_combine_or_has_no_effect() -> None:
    moe = ["model.arch=moe", "model.experts=4", "model.experts_per_token=2"]
    with pytest.raises(
        UserError, match="zeropp=hier does not combine with ep=2: experts are shared by groups"
    ):
        load("quickstart", moe, "dp=4,ep=2,zero=3,zeropp=hier")
    with pytest.raises(UserError, match=r"noise_scale = true is not supported with layout\.zeropp"):
        load("quickstart", ["observe.noise_scale=true"], "dp=2,zero=3,zeropp=gradients")
    load("quickstart", ["observe.noise_scale=true"], "dp=2,zero=3,zeropp=hier")
    assert notes(load("quickstart", [], "dp=1,zero=3,zeropp=hier"))[1:] == [
        'layout.zeropp = "hier" has no effect in this layout: one rank shares its states with nobody'
    ]
    assert notes(load("quickstart", [], "dp=2,ranks_per_node=2")) == [
        "layout.ranks_per_node = 2 has no effect in this layout: only zeropp asks which ranks are a node's"
    ]
    assert any(
        "layout.zeropp says what is sent" in note
        for note in notes(load("quickstart", ["precision.reduce=bf16"], "dp=2,zero=3,zeropp=gradients"))
    )
    recipe, said = prepared(load("quickstart", [], f"dp=2,zero=3,zeropp={ALL}"), None, 3, "fp32")
    assert recipe.layout.zeropp == "hier", "the part that verify can compare"
    assert 'layout.zeropp = "hier" here: quantised weights and gradients are not exact' in said


def refused(rank: int, world: int, layout: Layout, per_node: int) -> str:
    try:
        Mesh(layout, Ranks(rank, world, rank % per_node, per_node, CPU))
    except UserError as error:
        return str(error)
    return ""


def test_a_cluster_whose_nodes_do_not_fit_is_refused() -> None:
    with pytest.raises(UserError, match="12 ranks share them and a node has 8"):
        predict(
            load("quickstart", ["train.global_batch_size=24"], "dp=12,zero=3,zeropp=hier"),
            parse_cluster("h100:12"),
        )


def test_nodes_that_the_run_does_not_have() -> None:
    """Without ranks_per_node the nodes are those of the launcher."""
    layout = Layout(dp_shard=4, zero=3, zeropp="hier", ranks_per_node=4)
    assert "ranks_per_node=4 must divide the 2 ranks on a node of this run" in refused(0, 4, layout, 2)
    assert "but 3 ranks share them and a node has 2" in refused(
        0, 3, Layout(dp_shard=3, zero=3, zeropp="hier"), 2
    )


def test_text_and_words() -> None:
    for text in (ALL, "hier", "gradients:int8", "weights,gradients"):
        layout = Layout(dp_shard=4, zero=3, zeropp=text, ranks_per_node=2)
        assert to_text(layout) == f"dp=4,zero=3,zeropp={text},ranks_per_node=2"
        fields: dict[str, Any] = parse(to_text(layout))
        assert Layout(**fields) == layout
        assert f"ZeRO++ with {text}" in describe(layout)
