"""Multi-token prediction: its definition, layouts against one process, the plan against the trainer, files."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from layouts import compared, compiled, tiny
from marks import only, slow_but
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from steps import counted, planned, recipe_of
from test_plan_memory import at_peak
from torch import Tensor
from torch.nn import functional as F

from fivefold.checkpoint import store
from fivefold.checkpoint.source import Source, export_run, import_folder
from fivefold.errors import UserError
from fivefold.kernels.blockwise_attention import Documents
from fivefold.models.ahead import further
from fivefold.models.base import build
from fivefold.models.card import card_of, count_parameters, resolve_model
from fivefold.models.hf import from_hf, from_hf_config, hf_config, to_hf
from fivefold.models.section import ModelSection
from fivefold.parallel.mesh import divided
from fivefold.parallel.parallelize import rounded_blocks
from fivefold.recipe import load
from fivefold.sharding.layout import Layout, to_text
from fivefold.sharding.parts import stage_blocks
from fivefold_plan.messages import volume
from fivefold_plan.setting import _rounded
from fivefold_plan.trace.blocks import kinds
from fivefold_plan.trace.depth import exact

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


@pytest.mark.parametrize("index", [0, 1])
def test_a_rank_gets_its_columns_of_whole_sequences(index) -> None:
    """Of a ring: the first quarter and the last, or both in the middle; the shift crosses their borders."""
    inputs, targets, first = batch()
    one, two = (
        SimpleNamespace(further=2, device="cpu", causal=True, layout=Layout(cp=c), size=lambda _, c=c: c,
                        index=lambda _: index) for c in (1, 2)
    )  # fmt: skip
    whole, found = (divided(inputs, targets, first, mesh).further for mesh in (one, two))
    expected = further(inputs, targets, torch.as_tensor(first), 2)
    q = T // 4
    columns = [*range(q), *range(3 * q, T)] if index == 0 else list(range(q, 3 * q))
    for mine, all_of_it, by_hand in zip(found[:2], whole[:2], expected[:2], strict=True):
        assert torch.equal(all_of_it, by_hand)
        assert torch.equal(mine, by_hand[:, :, columns])
    assert torch.equal(found.counts, expected.counts)


def test_modules_round_as_the_last_block_does() -> None:
    fp8 = ["precision.mode=fp8", "model.arch=deepseek", "model.mtp_depth=1", "model.layers=4"]
    for skip, blocks in ((0, range(5)), (1, range(3))):
        recipe = load("quickstart", [*fp8, f"precision.fp8_skip_last={skip}"])
        model = resolve_model(recipe.model, vocab_size=128)
        assert rounded_blocks(recipe) == blocks
        rounded = _rounded(model, 0, skip)
        for block in (3, 4):
            assert any(name.startswith(f"blocks.{block}.") for name in rounded) == (skip == 0)


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
    """Which has fewer blocks for it."""
    sizes = {"layers": 16, "dense_layers": 0}
    without, blocks = (stage_blocks(card_of(model_of(mtp_depth=d, **sizes)), Layout(pp=4)) for d in (0, 2))
    assert list(map(len, without)) == [4, 4, 4, 4]
    assert list(map(len, blocks)) == [5, 5, 5, 3]  # two of them modules, each with an output layer
    assert [number for part in blocks for number in part] == list(range(18))


def test_modules_are_blocks_of_their_own_kind_in_traces(room) -> None:
    """They keep more than other blocks, so their graphs are not those of others."""
    found = kinds(tiny(room, "dp=1", *MODEL))
    assert [kind.endswith("for a further token") for kind in found] == [False] * 4 + [True] * 2
    assert len(set(found[-2:])) == 1


QUICK = ["pp=2", "cp=2", "tp=2,sp=true", "dp=2,ep=2,zero=3"]
LAYOUTS = [
    *QUICK, "dp=1", "dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "tp=2", "cp=2,cp_method=ulysses",
    "cp=2,cp_method=all_gather", "cp=4", "dp=3,zero=3", "dp=2,ep=2", "dp=1,recompute=full", "dp=1,recompute=selective",
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


def files_of(model: ModelSection, fp8: bool = False) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights of ours, random in bf16, and the tensors of a folder with them; fp8: matrices of blocks in 8 bits."""
    ours = build(model, device="cpu", seed=3)
    random = torch.Generator().manual_seed(1)
    state = {n: torch.randn(t.shape, generator=random).bfloat16() for n, t in ours.state_dict().items()}
    theirs = to_hf(state, model)
    for name in list(theirs) if fp8 else ():
        if "_proj.weight" in name and "eh_proj" not in name:
            R, C = theirs[name].shape
            theirs[name] = theirs[name].float().to(torch.float8_e4m3fn)
            theirs[f"{name}_scale_inv"] = 0.01 + torch.rand(-(-R // 128), -(-C // 128), generator=random)
    return state, theirs


def test_modules_are_layers_of_their_files(tmp_path) -> None:
    model = model_of()
    state, theirs = files_of(model)
    names = {name.removeprefix("model.layers.2.") for name in theirs if name.startswith("model.layers.2.")}
    assert names > {"enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight", "mlp.gate.weight",
                    "embed_tokens.weight", "shared_head.head.weight", "self_attn.kv_b_proj.weight"}  # fmt: skip
    assert torch.equal(theirs["model.layers.3.embed_tokens.weight"], state["embed.weight"])
    assert torch.equal(theirs["model.layers.3.shared_head.head.weight"], state["head.weight"])
    back = from_hf(theirs, model)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) for name in state)
    config = hf_config(model)
    assert config["num_nextn_predict_layers"] == 2
    assert from_hf_config(config) == model.model_copy(update={"mtp_weight": 0.3})
    run = import_folder(write_folder(tmp_path / "a", model, theirs), tmp_path / "run")
    export_run(run, tmp_path / "out")
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert after.keys() == theirs.keys()
    assert all(torch.equal(after[name], theirs[name]) for name in theirs)


def test_a_folder_without_the_modules_has_none(tmp_path) -> None:
    """transformers writes the key, and not their weights."""
    model = model_of()
    theirs = {name: w for name, w in files_of(model)[1].items() if not name.startswith("model.layers.2.")}
    kept = {name: w for name, w in theirs.items() if not name.startswith("model.layers.3.")}
    folder = write_folder(tmp_path / "a", model, kept)
    assert from_hf_config(json.loads((folder / "config.json").read_text()), folder).mtp_depth == 0
    run = import_folder(folder, tmp_path / "run")
    assert not any(name.startswith("blocks.2") for name in store.Reader(store.latest(run)).names("model"))


def write_folder(folder: Path, model: ModelSection, theirs: dict[str, Tensor], **config: object) -> Path:
    folder.mkdir()
    save_file(theirs, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(hf_config(model, "bfloat16") | config))
    return folder


def test_a_copy_that_differs_is_refused() -> None:
    model = model_of()
    _, theirs = files_of(model)
    theirs["model.layers.2.shared_head.head.weight"][0, 0] += 1
    with pytest.raises(
        UserError, match=r"model.layers.2.shared_head.head.weight differs from lm_head.weight"
    ):
        from_hf(theirs, model)


WIDE = {"dim": 192, "heads": 2, "nope_dim": 72, "rope_dim": 4, "value_dim": 70, "query_rank": 136, "ffn_dim": 136,
        "expert_ffn_dim": 144, "mtp_depth": 1}  # fmt: skip
QUANTISED = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
    "activation_scheme": "dynamic",
}


def test_weights_in_8_bits_are_read_block_by_block(tmp_path) -> None:
    """Matrices whose edges are no multiples of a block; by boxes, as ranks read them."""
    model = model_of(**WIDE)
    _, theirs = files_of(model, fp8=True)
    plain = {name: tensor for name, tensor in theirs.items() if not name.endswith("_scale_inv")}
    for name, tensor in plain.items():
        if tensor.dtype == torch.float8_e4m3fn:
            scale, wide = theirs[f"{name}_scale_inv"], tensor.float()
            for r in range(0, wide.shape[0], 128):
                for c in range(0, wide.shape[1], 128):
                    wide[r : r + 128, c : c + 128] *= scale[r // 128, c // 128]
            plain[name] = wide.bfloat16()
    expected = from_hf(plain, model)
    found = from_hf(theirs, model)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    folder = write_folder(tmp_path / "fp8", model, theirs, quantization_config=QUANTISED)
    source = Source(folder, None)
    for name, box in {
        "blocks.1.mlp.experts.gate_up": ((2, 5), (10, 150), (3, 190)),
        "blocks.1.mlp.experts.down": ((7, 8), (0, 192), (0, 144)),
        "blocks.0.attention.latents.weight": ((100, 150), (1, 99)),
        "blocks.2.ahead.project.weight": ((5, 9), (0, 384)),
    }.items():
        part = expected[name][tuple(slice(*span) for span in box)]
        assert torch.equal(source.read(name, box), part), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_method": "gptq"}, "quantization_config has quant_method = gptq; only fp8 is supported"),
        ({"weight_block_size": [64, 64]}, r"has weight_block_size = \[64, 64\]; only \[128, 128\]"),
        ({"fmt": "e5m2"}, "has fmt = e5m2; only e4m3"),
    ],
)
def test_other_quantised_files_are_refused(change, message) -> None:
    with pytest.raises(UserError, match=message):
        from_hf_config(hf_config(model_of()) | {"quantization_config": QUANTISED | change})


def test_scales_of_other_blocks_are_refused() -> None:
    model = model_of(**WIDE)
    _, theirs = files_of(model, fp8=True)
    name = "model.layers.0.self_attn.o_proj.weight"
    theirs[f"{name}_scale_inv"] = torch.ones(4, 4)
    with pytest.raises(UserError, match=rf"weight {name} has dtype float8_e4m3fn .* scales float32 \(4, 4\)"):
        from_hf(theirs, model)
    del theirs[f"{name}_scale_inv"]
    with pytest.raises(UserError, match=rf"weight {name} has dtype float8_e4m3fn; allowed"):
        from_hf(theirs, model)


MEMORY = [
    ("bf16", "dp=1"), ("fp32", "dp=1"), ("bf16", "dp=1,recompute=full"), ("bf16", "dp=2,zero=3"),
    ("bf16", "tp=2,sp=true"), ("bf16", "pp=2"), ("bf16", "pp=2,recompute=full"), ("bf16", "cp=2"),
]  # fmt: skip


@only("bf16-dp=1,recompute=full")
@pytest.mark.parametrize(("mode", "layout"), slow_but({("bf16", "dp=1,recompute=full")}, MEMORY))
def test_memory_is_close_to_a_traced_step(mode, layout) -> None:
    s = planned(recipe := recipe_of("deepseek", mode, layout, "model.mtp_depth=2"))
    for rank in range(s.layout.pp):
        traced, found = exact(recipe, rank).step.memory, at_peak(s)[rank]
        assert found.total == pytest.approx(traced.total, rel=0.04)
        assert found.params == traced.at_peak["params"]


@pytest.mark.slow
def test_what_modules_keep_is_counted() -> None:
    planned_bytes, traced_bytes = [], []
    for depth in (0, 2):
        recipe = recipe_of("deepseek", "fp32", "dp=1", f"model.mtp_depth={depth}")
        found, traced = at_peak(planned(recipe))[0], exact(recipe).step.memory.at_peak
        planned_bytes.append(found.activations + found.buffers)
        traced_bytes.append(traced["activations"] + traced["buffers"])
    assert planned_bytes[1] - planned_bytes[0] == pytest.approx(traced_bytes[1] - traced_bytes[0], rel=0.02)


def test_flops_are_those_of_the_formula() -> None:
    """But for the keys that the mask hides within a block of queries, and for the values' padding."""
    from test_trace import recipe_of

    fields = (f"model.{name}={value}" for name, value in ODD.items())
    few = "train.global_batch_size=4"
    recipe = recipe_of("dp=1", "fp32", "model.arch=deepseek", *fields, "model.kv_heads=4", few)
    model, found = recipe.model, exact(recipe)
    more = 12 * model.head_width - 3 * (model.head_width + (model.value_dim or 0))
    tokens = recipe.train.global_batch_size * model.seq_len
    assert found.step.flops == found.formula + model.blocks * tokens * model.seq_len * model.heads * more
