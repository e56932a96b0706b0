"""Parameters that consist of several matrices or vectors (queries, keys, values; gates and what they gate): optimizers
update each as if it were a parameter of its own, whatever the model and the optimizer."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate, pairwise

import pytest
import torch
from families import FAMILIES
from layouts import tiny
from pool_runs import ranks_of
from steps import planned
from torch import Tensor

from fivefold.models import ARCHITECTURES, EXCHANGED, file_of
from fivefold.models.card import Card, card_of, resolve_model
from fivefold.models.section import ModelSection
from fivefold.optim import OPTIMIZERS
from fivefold.optim.updater import Updater
from fivefold.recipe import resolve
from fivefold.sharding.parts import Shape, is_matrix
from fivefold.step.state import build_state
from fivefold_plan.time import time

SIZES = {"layers": 2, "dim": 32, "heads": 4, "vocab_size": 96, "seq_len": 16, "ffn_dim": 48}
MORE = {
    "llama": {"kv_heads": 2, "attention_bias": True},
    "moe": {"experts": 4, "expert_ffn_dim": 16, "shared_experts": 2, "kv_heads": 2},
    "deepseek": {"experts": 4, "expert_ffn_dim": 16, "mtp_depth": 1, "dense_layers": 1},
    "qwen3_moe": {"experts": 4, "expert_ffn_dim": 16},
    "gpt2": {},
    "bert": {},
    "speedrun": {"squared_relu": False},
}
"""Fields that have every kind of parameter in the model."""


def spec_of(arch: str, **changes: object) -> Card:
    fields = SIZES | (FAMILIES.get(arch, {}) | {"kv_heads": 2} if arch in FAMILIES else MORE.get(arch, {}))
    return card_of(resolve_model(ModelSection(**{"arch": arch} | fields | changes), vocab_size=96))


def apart(model: ModelSection, name: str, shape: Shape) -> tuple[int, tuple[int, ...]] | None:
    """By hand: the dim along which a parameter holds several matrices, and their sizes."""
    H, K, d = model.heads, model.kv_heads or model.heads, model.head_width
    keys, values = (
        (model.linear_key_heads or 0) * (model.linear_key_dim or 0),
        (model.linear_heads or 0) * (model.linear_value_dim or 0),
    )
    half = {dim: (dim, (size // 2, size // 2)) for dim, size in enumerate(shape)}
    found = {
        "attention.qkv.weight": (0, (H * d, K * d, K * d, *(H * d,) * (model.arch == "qwen3_next"))),
        "mlp.gate_up.weight": half[0],
        "mlp.shared.gate_up.weight": half[0],
        "mlp.experts.gate_up": half.get(1),
        "attention.in_proj.weight": (
            0, (keys, keys, values, model.linear_heads, model.linear_heads, values),
        ),
        "attention.conv_vectors": (0, (keys, keys, values)),
        "attention.norm_qk.weight": (0, (H * d, K * d)),
        "embed_values.weight": (1, (K * d,) * model.layers),
    }  # fmt: skip
    if model.query_rank:
        found["attention.latents.weight"] = (
            0,
            (model.query_rank, (model.kv_rank or 0) + (model.rope_dim or 0)),
        )
    found["attention.qkv.bias"] = found["attention.qkv.weight"]
    found["mlp.experts.gate_up_bias"] = found["mlp.experts.gate_up"]
    return found.get(name.split(".", 2)[-1] if name.startswith("blocks.") else name)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_model_says_of_what_its_parameters_consist(arch: str) -> None:
    for spec in (spec_of(arch), *([spec_of(arch, query_rank=0)] if arch == "deepseek" else [])):
        wanted = {n: found for n, shape in spec.parameters.items() if (found := apart(spec.model, n, shape))}
        assert {name: (one.dim, one.sizes) for name, one in spec.sections.items()} == wanted
        for name, one in spec.sections.items():
            assert sum(one.sizes) == spec.parameters[name][one.dim]


@pytest.mark.parametrize("arch", EXCHANGED)
def test_what_hugging_face_keeps_apart_is_apart(arch: str) -> None:
    """No matrix of ours has rows of two weights there: in a new architecture, its table of weights says so."""
    spec = spec_of(arch)
    for entry in file_of(arch, "hf").entries(spec.model):
        if len(entry.theirs) < 2 or entry.ours not in spec.parameters:
            continue
        *stack, rows, _ = (
            (1, *spec.parameters[entry.ours])[-3:] if spec.parameters[entry.ours][1:] else (1, 0, 0)
        )
        if not rows:
            rows = spec.parameters[entry.ours][0]
        one, ends = spec.sections.get(entry.ours), list(accumulate(entry.rows))
        sizes = one.sizes if one else (rows,)
        for number in range(math.prod(stack)):
            for start, stop in pairwise(accumulate((number * rows, *sizes))):
                places = range(start, stop)
                there = {bisect_right(ends, entry.order[row] if entry.order else row) for row in places}
                assert len(there) == 1, f"{entry.ours}: rows {start} to {stop} are of {there}"


def fused_tensors() -> Iterator[tuple[str, Shape, Card]]:
    """One parameter of each name, kind and shape that consists of several, over all architectures."""
    seen = set[object]()
    for arch in ARCHITECTURES:
        spec = spec_of(arch)
        for name in spec.sections:
            key = name.split(".", 2)[-1], spec.parameters[name], spec.sections[name]
            if key not in seen:
                seen.add(key)
                yield name, spec.parameters[name], spec


def pieces(tensor: Tensor, spec: Card, name: str) -> list[Tensor]:
    """Copies of the matrices of a parameter, one by one, also those of a stack of experts; of sections of vectors."""
    stack = tensor.dim() > 2
    dim, sizes = apart(spec.model, name, tuple(tensor.shape)) or (int(stack), tensor.shape[stack : stack + 1])
    one_by_one = tensor.unbind(0) if stack else [tensor]
    return [t.clone() for one in one_by_one for t in one.split(sizes, dim - stack)]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_is_updated_as_if_it_were_alone(name: str) -> None:
    """All optimizers, all parameters that consist of several: those of a stack, too. SOAP's bases are equal where
    eigenvalues differ."""
    card, generator = OPTIMIZERS[name], torch.Generator().manual_seed(0)
    fields = card.fields | {"basis_every": 2} if name == "soap" else dict(card.fields)
    for parameter, shape, spec in fused_tensors():
        make = lambda w, parameter=parameter, **more: Updater(card, {parameter: w}, 0.01, 0.1, fields, **more)  # noqa: E731
        w = torch.randn(shape, generator=generator)
        others = pieces(w, spec, parameter)
        whole = make(w, sections=spec.sections)
        alone = [make(one) for one in others]
        for _ in range(3):
            scale = (
                torch.logspace(-2, 2, shape[0])[:, None]
                if len(shape) > 1
                else torch.logspace(-2, 2, shape[0])
            )
            g = torch.randn(shape, generator=generator) * scale.view(-1, *(1,) * (len(shape) - 1))
            for one, gradient in zip(alone, pieces(g, spec, parameter), strict=True):
                one.step({parameter: gradient}, 0.01)
            whole.step({parameter: g}, 0.01)
        for one, other in zip(pieces(w, spec, parameter), others, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=2e-6, msg=lambda m: f"{parameter}: {m}")  # noqa: B023


def muon_moves(start: Tensor, gradients: list[Tensor], lr: float) -> list[Tensor]:
    """Where torch.optim.Muon brings a matrix."""
    w, found = start.clone(), list[Tensor]()
    theirs = torch.optim.Muon([w], lr=lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    for gradient in gradients:
        w.grad = gradient.clone()
        theirs.step()
        found.append(w.clone())
    return found


def adafactor_moves(start: Tensor, gradients: list[Tensor], lr: float) -> list[Tensor]:
    """Where torch.optim.Adafactor brings a weight; its rate is relative to the weight's size, which is undone."""
    w, found = start.clone(), list[Tensor]()
    theirs = torch.optim.Adafactor([w], lr=1e-2, weight_decay=0.0)
    for gradient in gradients:
        before, w.grad = w.clone(), gradient.clone()
        theirs.step()
        size = max(before.square().mean().sqrt().item(), 1e-3)
        w.copy_(before + (w - before) * (lr / (1e-2 * size)))
        found.append(w.clone())
    return found


@pytest.mark.parametrize("arch", ["llama", "moe", "gpt2", "qwen3_next", "deepseek"])
@pytest.mark.parametrize("name", ["muon", "adafactor"])
def test_updates_are_those_of_torch_on_separate_weights(tmp_path, name: str, arch: str) -> None:
    """Three updates of a whole model, beside an optimizer of each matrix alone. Rows of queries, keys and values, of
    gates and what they gate have gradients of different sizes, as a model's do. Muon's matmuls round to bf16: every
    matrix is as near as those that were never fused."""
    spec, lr = spec_of(arch), 1e-2
    changed = {
        n: v for n, v in spec.model.model_dump().items() if v != getattr(ModelSection(), n) and v is not None
    }
    sets = [f"model.{n}={str(v).lower() if isinstance(v, bool) else v}" for n, v in changed.items()]
    recipe = tiny(tmp_path, "dp=1", *sets, f"optim.name={name}", "optim.weight_decay=0", mode="bf16")
    state = build_state(resolve(recipe, vocab_size=96), ranks_of(0, 1))
    (replica,), generator = state.parallel.replicas, torch.Generator().manual_seed(0)
    start = {n: w.clone() for n, w in replica.masters.items()}
    given = [{n: gradient(n, w, spec, generator) for n, w in start.items()} for _ in range(3)]
    card, moves, off = OPTIMIZERS[name], {"muon": muon_moves, "adafactor": adafactor_moves}[name], {}
    for number, gradients in enumerate(given):
        replica.updater.step({n: g.clone() for n, g in gradients.items()}, lr)
        for n, w in replica.masters.items():
            if card.of(n, tuple(w.shape)) is not card or (w.dim() > 1 and not is_matrix(n, tuple(w.shape))):
                continue
            seen = (pieces(one[n], spec, n) for one in (start, *given, replica.masters))
            for piece, (first, *gs, now) in enumerate(zip(*seen, strict=True)):
                theirs = moves(first, gs[: number + 1], lr)[-1]
                off[n, piece] = ((now - theirs).norm() / (theirs - first).norm()).item()
        plain = max(value for (n, _), value in off.items() if n not in spec.sections)
        fused = max(value for (n, _), value in off.items() if n in spec.sections)
        assert plain < (0.05 if name == "muon" else 1e-4), "what rounding alone does"
        assert fused < 1.5 * plain + 1e-5


def gradient(name: str, w: Tensor, spec: Card, generator: torch.Generator) -> Tensor:
    """Of each section ten times that of the one before."""
    g = torch.randn(w.shape, generator=generator)
    dim, sizes = apart(spec.model, name, tuple(w.shape)) or (0, w.shape[:1])
    for number, section in enumerate(g.split(sizes, dim)):
        section.mul_(10.0**number)
    return g


def test_a_plan_prices_each_matrix(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Muon's FLOPs in llama's blocks, by hand. With a stack of experts, as many of each."""
    monkeypatch.setattr(time, "products", lambda one, *_: (2.0 * one.m * one.n * one.k,))
    D, F, rows = 32, 48, (32, 16, 16)  # of queries, keys, values
    for sets, shapes in (
        ([], [*((row, D) for row in rows), (D, D), (F, D), (F, D), (D, F)]),
        (["model.arch=moe", "model.experts=4", "model.expert_ffn_dim=16"],
         [*((row, D) for row in rows), (D, D), (4, D), *((16, D), (16, D), (D, 16)) * 4]),
    ):  # fmt: skip
        sizes = [f"model.{name}={value}" for name, value in SIZES.items() if name != "vocab_size"]
        s = planned(tiny(tmp_path, "dp=1", *sizes, "model.kv_heads=2", *sets, "optim.name=muon"))
        wanted = sum(5 * (4.0 * min(one) ** 2 * max(one) + 2.0 * min(one) ** 3) for one in shapes)
        assert time.whole_matrices(s, 0) == pytest.approx(2 * wanted * s.cluster.oversubscription)
