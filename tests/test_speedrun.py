"""Techniques of speedruns: squared ReLU, value embeddings, skips, projections that start at zero. Layouts against one
process, what is computed, what is refused."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from families import small
from layouts import compared, compiled, tiny
from marks import only
from torch.nn import functional as F

from fivefold.errors import UserError
from fivefold.kernels.blockwise_attention import heads_of
from fivefold.models import ARCHITECTURES, file_of
from fivefold.models.base import build
from fivefold.models.card import card_of
from fivefold.models.hf import hf_config
from fivefold.models.speedrun.module import SquaredReLU
from fivefold.recipe import change, load, resolve, resolve_model
from fivefold.sharding.layout import Layout
from fivefold.step.state import build_state
from fivefold.step.step import set_windows
from fivefold.train.verify import alone
from fivefold_plan.cluster.clusters import parse
from fivefold_plan.memory.model_states import rank_elements
from fivefold_plan.setting import FIVEFOLD, setting
from fivefold_plan.time.time import update

SPEEDRUN = ("model.arch=speedrun", "model.kv_heads=2", "model.ffn_dim=64")
LAYOUTS = [
    "dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "tp=2", "tp=2,sp=true", "cp=2", "cp=2,cp_method=ulysses",
    "cp=2,cp_method=all_gather", "dp=2,tp=2,zero=3", "dp=1,recompute=full", "dp=1,recompute=selective",
    "tp=2,sp=true,recompute=full", "tp=2,sp=true,recompute=ops:attention+gate+norm",
]  # fmt: skip


def model_of(*changes: str):
    sizes = ["model.layers=4", "model.dim=32", "model.heads=4", "model.seq_len=16", "model.init_std=0.2"]
    return resolve(load("quickstart", ["model.arch=speedrun", *sizes, *changes]), vocab_size=64).model


@pytest.fixture(scope="module")
def room(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("speedrun")


@only("tp=2,sp=true-muon", "dp=2,zero=3-adamw")
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(room: Path, layout: str, optimizer: str) -> None:
    recipe = tiny(room, layout, *SPEEDRUN, f"optim.name={optimizer}")
    report = compared(recipe, folder=room / optimizer)
    assert report.passed, report


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp=2,offload=states:disk", "dp=2,zero=3,offload=all:disk"])
def test_offload(room: Path, layout: str) -> None:
    report = compared(tiny(room, layout, *SPEEDRUN), folder=room / "adamw")
    assert report.passed, report


@only("dp=2,zero=3")
@pytest.mark.parametrize("layout", ["dp=2,zero=3", "tp=2,sp=true", "pp=2"])
def test_projections_that_start_at_zero(room: Path, layout: str) -> None:
    """An option of every architecture. Matrices behind which there is a zero have no gradient in the first step."""
    recipe = tiny(room, layout, "model.zero_init=true")
    weights = build(resolve(recipe, vocab_size=320).model, device="cpu").state_dict()
    zero = {name for name, weight in weights.items() if not weight.any()}
    assert zero == {n for n in weights if n.endswith(("attention.out.weight", "mlp.down.weight"))}
    report = compared(recipe, folder=room / "zero")
    assert report.passed, report


@pytest.mark.parametrize("layers", [4, 5])
@torch.no_grad()
def test_what_is_computed(layers: int) -> None:
    """The model by hand, in a few lines of PyTorch."""
    model = model_of(f"model.layers={layers}")
    module: Any = build(model, device="cpu", seed=3)
    for name, p in module.named_parameters():
        if "skip" in name:
            p.copy_(torch.linspace(0.5, 1.5, p.numel()))
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
    x, (cos, sin) = module.begin(tokens, torch.arange(16)), module.context(torch.arange(16))
    tables = F.embedding(tokens, module.embed_values.weight).unflatten(-1, (layers, 4, 8))
    assert (cos.shape, [n for n, b in module.blocks.items() if b.skip is not None]) == (
        (16, 4), [str(n) for n in range(layers - layers // 2, layers)],
    )  # fmt: skip
    outputs = []
    for number, block in enumerate(module.blocks.values()):
        if number >= layers - layers // 2:
            x = x + block.skip * outputs[layers - 1 - number]
        q, k, v = block.attention.qkv(block.norm1(x)).unflatten(-1, (12, 8)).split(4, dim=-2)
        v = v + tables[:, :, number]
        q, k = (
            turned(norm(y), cos, sin)
            for y, norm in ((q, block.attention.norm_q), (k, block.attention.norm_k))
        )
        y = F.scaled_dot_product_attention(*(one.transpose(1, 2) for one in (q, k, v)), is_causal=True)
        x = x + y.transpose(1, 2).flatten(2) @ block.attention.out.weight.T
        normed = F.rms_norm(x, (32,), block.norm2.weight, 1e-6)
        x = x + F.relu(normed @ block.mlp.up.weight.T).square() @ block.mlp.down.weight.T
        outputs.append(x)
    logits = F.rms_norm(x, (32,), module.norm.weight, 1e-6) @ module.embed.weight.T
    assert torch.allclose(logits, module(tokens), atol=1e-4)


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, dim=-1)
    c, s = cos[:, None], sin[:, None]
    return torch.cat((a * c - b * s, b * c + a * s), dim=-1)


def test_without_its_techniques_it_is_the_model_below() -> None:
    none = [
        "model.squared_relu=false",
        "model.value_embeddings=false",
        "model.skips=false",
        "model.seq_len=16",
    ]
    model = model_of(*none)
    below = model_of(*none[3:], "model.arch=qwen3")
    assert card_of(model).parameters == card_of(below).parameters
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
    ours, theirs = (build(one, device="cpu")(tokens) for one in (model, below))
    assert torch.equal(ours, theirs)
    assert not any(isinstance(one, SquaredReLU) for one in build(model).modules())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["layout.pp=2", "layout.dp_replicate=1"], "blocks of speedrun need what other stages have"),
        (["model.arch=llama", "model.skips=true"], "has no techniques of speedruns"),
    ],
)
def test_what_is_refused(changes: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        load("quickstart", ["model.arch=speedrun", *changes])


def test_it_is_not_exported() -> None:
    with pytest.raises(UserError, match="cannot be exported: Hugging Face's formats have none like speedrun"):
        hf_config(model_of())


LAYOUTS_OF_QK_CLIP = [
    "dp=2", "dp=2,zero=1", "dp=2,zero=3", "tp=2", "tp=2,sp=true", "cp=2", "cp=2,cp_method=ulysses", "pp=2",
    "dp=2,tp=2,zero=2", "tp=2,sp=true,recompute=full", "pp=2,schedule=interleaved,virtual_stages=2",
]  # fmt: skip
GROUPED = ("model.kv_heads=2", "optim.name=muon", "optim.qk_clip=0.4", "optim.lr=0.02", "model.init_std=0.3")
LATENT = ("model.arch=deepseek", "model.experts=4", "model.experts_per_token=2", "model.dense_layers=3")


@only("dp=2,tp=2,zero=2")
@pytest.mark.parametrize("layout", LAYOUTS_OF_QK_CLIP)
def test_qk_clip(room: Path, layout: str) -> None:
    report = compared(tiny(room, layout, *GROUPED), folder=room / "clip")
    assert report.passed, report


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp=2", "dp=2,zero=3"])
def test_qk_clip_of_latent_attention(room: Path, layout: str) -> None:
    report = compared(tiny(room, layout, *GROUPED[1:], *LATENT), folder=room / "latent")
    assert report.passed, report


@pytest.mark.slow
def test_qk_clip_in_compiled_blocks(room: Path) -> None:
    report = compared(tiny(room, "dp=2", *GROUPED), part=compiled, folder=room / "clip")
    assert report.passed, report


YARN = ("model.kv_heads=2", "model.rope_factor=4", "model.rope_scaling=yarn", "model.rope_context=8")


@pytest.mark.parametrize(
    "kind",
    [("model.arch=qwen2", "model.kv_heads=2"), LATENT, YARN, (*LATENT, *YARN[1:])],
    ids=["biases", "latent", "yarn", "latent yarn"],
)
def test_qk_clip_lowers_the_scores_of_single_heads(room: Path, kind: tuple[str, ...]) -> None:
    """Heads above the limit get scores that are smaller by limit / bound; all others keep theirs. Bounds are bounds."""
    recipe = resolve(tiny(room, "dp=1", *GROUPED[1:], *kind), vocab_size=320)
    state = build_state(recipe, alone())
    clip, module, seen = state.qk_clip, state.module, list[torch.Tensor]()
    assert clip is not None

    def keep(core: Any, args: tuple[Any, ...]) -> None:
        qkv, *angles = args
        q, k, _ = heads_of(qkv, core.heads, core.kv_heads, *(angles or (None, None)))
        scores = torch.einsum("bthd,bshd->hts", q, k.repeat_interleave(core.heads // core.kv_heads, 2))
        assert len(qkv) == 1
        seen.append((scores * q.shape[3] ** -0.5).detach())

    for block in module.blocks.values():
        block.attention.core.register_forward_pre_hook(keep)
    with torch.no_grad():
        for name, weight in state.masters().items():
            if name.endswith("bias"):
                weight.uniform_(-0.5, 0.5)
    tokens = torch.randint(320, (1, 16), generator=torch.Generator().manual_seed(0))
    clip.start_step()
    module(tokens)
    clip.finish()
    per_key = clip.bounds.shape[1]
    largest = torch.stack([scores.unflatten(0, (per_key, -1)).amax((1, 2, 3)) for scores in seen])
    assert (clip.bounds >= largest).all()
    clip.limit = float(clip.bounds[0].median())
    factors = (clip.limit / clip.bounds[0]).clamp(max=1)
    assert 0 < (factors < 0.999).sum() < len(factors)
    for skip in (1.0, 0.0):
        clip.update(torch.tensor(skip))
        module(tokens)
        changed = factors if not skip else torch.ones_like(factors)
        before, after = (one.unflatten(0, (per_key, -1)) for one in (seen[0], seen[-len(module.blocks)]))
        assert torch.allclose(after, before * changed[:, None, None, None], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["model.arch=qwen3"], "its norms of queries and keys limit the scores"),
        (["layout.offload=states:host"], "weights leave the device in their update"),
    ],
)
def test_qk_clip_is_refused(changes: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        load("quickstart", ["optim.qk_clip=100", *changes])


@pytest.mark.parametrize("arch", [arch for arch in ARCHITECTURES if file_of(arch, "card").Card.rotary])
def test_every_row_of_queries_and_keys_is_told(arch: str) -> None:
    """Also of models that QK-clip refuses today."""
    card = card_of(resolve_model(small(arch), vocab_size=64))
    for name, sections in card.score_rows().items():
        rows = sum(heads * sum(width for width, _ in each) for heads, each in sections)
        found = {s[0] for n, s in card.parameters.items() if n.endswith(f"{name}.weight")}
        assert found == {rows}, name


def test_qk_clip_is_priced() -> None:
    """A pass over queries and keys in each forward, and on GPUs without ZeRO the weights once more in each step."""
    model, found = model_of("model.kv_heads=2", "model.arch=llama"), {}
    for clip, zero in product((False, True), (0, 1)):
        software, layout = replace(FIVEFOLD, qk_clip=clip), Layout(dp_shard=2 if zero else 1, zero=zero)
        s = setting(model, layout, parse("h100:2"), 1, 1, "bf16", software)
        found[clip, zero] = s, update(s, rank_elements(s)[0])
    (op,) = [op for op in found[True, 0][0].last_block if op.attention]
    (plain,) = [op for op in found[False, 0][0].last_block if op.attention]
    assert (op.forward - plain.forward, op.backward) == (16 * (4 + 2) * 8 * 2, plain.backward)
    assert found[True, 1][1] == found[False, 1][1]
    assert 1.1 < found[True, 0][1] / found[False, 0][1] < 1.3


RAMPED = (
    *SPEEDRUN,
    "model.sliding_window=12",
    "model.full_every=2",
    "model.window_ramp=3:1+6:1",
    "model.layers=5",
)


@only("cp=2")
@pytest.mark.parametrize("layout", ["dp=2,zero=3", "tp=2,sp=true", "cp=2", "cp=2,cp_method=all_gather"])
def test_windows_that_grow(room: Path, layout: str) -> None:
    report = compared(tiny(room, layout, *RAMPED), folder=room / "ramped")
    assert report.passed, report


def test_a_step_has_its_window(room: Path) -> None:
    """Losses are those of models with one window each. It follows from the step, so a resumed run has the same."""
    found = {}
    recipe = tiny(room, "dp=1", *RAMPED)
    assert [recipe.model.ramped(step) for step in (0, 1, 2, 99)] == [3, 6, 12, 12]
    for window in (0, 3, 6, 12):
        ramp = ["model.window_ramp=", f"model.sliding_window={window}"] if window else []
        state = build_state(resolve(change(recipe, ramp), vocab_size=320), alone())
        tokens = torch.randint(320, (2, 17), generator=torch.Generator().manual_seed(0))
        for step in range(3):
            if not window:
                set_windows(state, recipe.model, recipe.model.ramped(step))
            found[window, step] = state.module(tokens[:, :-1], tokens[:, 1:]).item()
    assert [found[0, step] for step in range(3)] == [found[3, 0], found[6, 1], found[12, 2]]
    assert len(set(found.values())) == 3


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["model.sliding_window=8"], 'must have windows below model.sliding_window = 8.*Nearest valid: "4:2"'),
        ([], 'window_ramp = 8:2 has no effect: without model.sliding_window'),
        (["model.sliding_window=16", "model.window_ramp=2:2+4:2+8:2"], "at most 2: each compiles the blocks again"),
    ],
)  # fmt: skip
def test_ramps_that_are_refused(changes: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        load("quickstart", ["model.arch=speedrun", "model.window_ramp=8:2", *changes])
