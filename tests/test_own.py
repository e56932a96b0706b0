"""A user's own module on every axis, frozen parameters and groups: the same losses, gradients and weights as plain
PyTorch in one process."""

from __future__ import annotations

import math
import runpy
import traceback
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from layouts import compared, tiny
from marks import only
from own_models import Decoder, Numbers, Plain, T, V, cut
from parity import evaluate, joined, pieces, share
from pool_runs import assert_close_tensors, ranks_of
from ranks import run_ranks
from steps import planned, tracked
from steps import recipe_of as planned_recipe
from torch import nn

import fivefold
from fivefold import ModuleCard
from fivefold.errors import UserError
from fivefold.models.card import card_of, cut_of
from fivefold.parallel.offload import activations
from fivefold.recipe import Recipe, load, resolve
from fivefold.sharding.parts import Cut
from fivefold.step.custom import custom_model
from fivefold.step.state import build_state
from fivefold.step.step import rate, take_step
from fivefold.train.start import run_command
from fivefold_plan.predict import held

SIZES = [
    "model.layers=4", "model.dim=32", "model.heads=4", "model.kv_heads=4", f"model.seq_len={T}",
    f"model.vocab_size={V}", "train.global_batch_size=8", "train.microbatch_size=2", "train.steps=6",
    "precision.mode=fp32", "optim.warmup_steps=0", "optim.grad_clip=0.5", "observe.tracker=none",
]  # fmt: skip
CARD = ModuleCard(cut=cut)
GROUPS = "*norm*: lr=3, *head*: lr=0.5 decay=0, *last*: decay=2"


def recipe_of(layout: str, *more: str) -> Recipe:
    """eps: Adam divides a gradient by its size. With 1e-8 an element whose gradient is 0 but for rounding (1e-10 here)
    moves by what was rounded, and two layouts differ in it."""
    return resolve(load("quickstart", [*SIZES, "optim.eps=1e-6", *more], layout), vocab_size=V)


def steps(
    rank: int, world: int, kind: type[nn.Module], card: ModuleCard | None, recipes: list[Recipe]
) -> list[dict]:
    """Three steps in each layout."""
    return [_steps(rank, world, kind, card, recipe) for recipe in recipes]


def _steps(
    rank: int, world: int, kind: type[nn.Module], card: ModuleCard | None, recipe: Recipe
) -> dict[str, Any]:
    activations.SMALLEST = 64  # so that small ones leave the device, too
    torch.manual_seed(rank)  # rank 0's weights count
    state = build_state(recipe, ranks_of(rank, world), kind(), card=card)
    found: dict[str, Any] = {"loss": [], "norm": []}

    def keep() -> None:
        if state.step == 0:
            found["gradients"] = pieces(state, state.gradients())

    for step in range(3):
        done = take_step(state, recipe, share(state, recipe, Numbers(), step), inspect=keep)
        found["loss"].append(done.loss)
        found["norm"].append(done.norm)
    found["weights"] = pieces(state, state.masters())
    found["states"] = sorted(state.moments())
    found["validation"] = evaluate(state, share(state, recipe, Numbers(), 3), None)["val_loss"]
    if state.parallel.activations is not None:
        assert state.parallel.activations.moved
    state.parallel.close()
    return found


def alone(kind: type[nn.Module], recipe: Recipe, frozen: str = "-", groups: bool = False) -> dict[str, Any]:
    """The same steps in plain PyTorch."""
    torch.manual_seed(0)
    module, optim = kind(), recipe.optim
    for name, p in module.named_parameters():
        if frozen in name:
            p.requires_grad_(False)
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    some = []
    for name, p in trained.items():
        lr = (3.0 if "norm" in name else 0.5 if "head" in name else 1.0) if groups else 1.0
        decay = (0.0 if "head" in name else 1.0) if groups else 1.0
        some.append({"params": [p], "weight_decay": decay * optim.weight_decay * (p.dim() > 1), "rate": lr})
    adamw = torch.optim.AdamW(some, lr=optim.lr, betas=optim.betas, eps=optim.eps)
    found: dict[str, Any] = {"loss": [], "norm": []}
    for step in range(3):
        inputs, targets = (torch.from_numpy(t) for t in Numbers().batch(step, range(8)))
        adamw.zero_grad()
        loss = module(inputs, targets)
        loss.backward()
        if step == 0:
            found["gradients"] = {name: p.grad.clone() for name, p in trained.items()}
        found["loss"].append(loss.item())
        found["norm"].append(nn.utils.clip_grad_norm_(trained.values(), optim.grad_clip).item())
        for group in adamw.param_groups:
            group["lr"] = rate(optim, step, recipe.train.steps or 0) * group["rate"]
        adamw.step()
    found["weights"] = {name: p.detach() for name, p in module.named_parameters()}
    with torch.no_grad():
        found["validation"] = module.eval()(
            *(torch.from_numpy(t) for t in Numbers().batch(3, range(8)))
        ).item()
    return found


def assert_alike(answers: list[list[dict]], recipes: list[Recipe], wanted: dict[str, Any]) -> None:
    for number, recipe in enumerate(recipes):
        mine, where = [answer[number] for answer in answers], str(recipe.layout)
        for answer in mine:
            assert answer["loss"] == pytest.approx(wanted["loss"], rel=1e-5), where
            assert answer["norm"] == pytest.approx(wanted["norm"], rel=1e-4), where
            assert answer["validation"] == pytest.approx(wanted["validation"], rel=1e-5), where
        for key in ("gradients", "weights"):
            assert_close_tensors(joined(mine, key), wanted[key], f"{where}: {key} of")
        states = {name for answer in mine for name in answer["states"]}
        trained = wanted["gradients"]
        assert states == {f"{s}.{n}" for n in trained for s in ("exp_avg", "exp_avg_sq")}, where


ZBV = "pp=2,schedule=zbv,virtual_stages=2"
DATA = [
    "dp=2,zero=1", "dp=2,zero=2,recompute=full", "dp=2,zero=3", "dp=2,recompute=full*1/none*3",
    "dp=2,zero=3,offload=activations",
]  # fmt: skip
TWO = ["tp=2", "tp=2,sp=true", "cp=2", "cp=2,cp_method=ulysses,recompute=full", "pp=2", ZBV]
FOUR = ["dp=2,tp=2,zero=3", "pp=2,tp=2,sp=true,recompute=selective", "pp=2,cp=2", "dp=2,pp=2,zero=1"]
FROZEN = ["dp=2", "dp=2,zero=1", "dp=2,zero=3,recompute=full", "tp=2,sp=true", ZBV]


# docs/make_support_matrix.py reads the parameters of these tests
@pytest.mark.parametrize("layouts", [DATA])
def test_a_plain_module_on_data_axes_with_recomputation(layouts):
    """Nothing but the module: a frozen parameter, a tied weight, a buffer."""
    recipes = [recipe_of(layout) for layout in layouts]
    assert_alike(run_ranks(2, steps, Plain, None, recipes), recipes, alone(Plain, recipes[0]))


@only("2-layouts0")
@pytest.mark.parametrize(
    ("world", "layouts"), [(2, TWO), (4, FOUR[:1]), pytest.param(4, FOUR[1:], marks=pytest.mark.slow)]
)
def test_a_decoder_with_a_card_on_every_axis(world, layouts):
    recipes = [recipe_of(layout) for layout in layouts]
    assert_alike(run_ranks(world, steps, Decoder, CARD, recipes), recipes, alone(Decoder, recipes[0]))


@pytest.mark.parametrize("layouts", [FROZEN])
def test_frozen_parameters_and_groups(layouts):
    """The whole beginning and the first blocks are frozen: no gradient goes there."""
    more = ["model.freeze=embed*, blocks.[01].*", f"optim.groups={GROUPS}"]
    recipes = [recipe_of(layout, *more) for layout in layouts]
    wanted = _alone_frozen(recipes[0])
    assert_alike(run_ranks(2, steps, Decoder, CARD, recipes), recipes, wanted)


def _alone_frozen(recipe: Recipe) -> dict[str, Any]:
    class Half(Decoder):
        def __init__(self) -> None:
            super().__init__()
            for name, p in self.named_parameters():
                p.requires_grad_(not name.startswith(("embed", "blocks.0", "blocks.1")))

    return alone(Half, recipe, groups=True)


@pytest.mark.parametrize(("kind", "card", "layout", "message"), [
    (Plain, None, "tp=2", r"layout.tp = 2: Plain is .* and there is no card.*card=fivefold.ModuleCard"),
    (Plain, CARD, "pp=2", r"layout.pp = 2: Plain is a module of your own, and must be a fivefold.LanguageModel"),
    (Decoder, None, "cp=2", r"layout.cp = 2: Decoder .* needs a card"),
    (Decoder, CARD, "pp=2,virtual_stages=4,schedule=interleaved", r"has 4 blocks for 8 pipeline stages"),
    (Plain, None, "dp=2,recompute=selective", r'"selective" recomputes a part of each block.*recompute=full'),
    (Plain, None, "dp=2,offload=states:host", r'custom modules keep their states on .*valid: "activations"'),
    (Decoder, CARD, "tp=2,offload=activations,recompute=full", r'valid: offload = "none", or recompute = "none"'),
])  # fmt: skip
def test_what_a_module_lacks_is_said_before_any_process_starts(kind, card, layout, message, tmp_path):
    more = ["model.layers=8"] if "virtual" in layout else []
    with pytest.raises(UserError, match=message):
        run_command(
            recipe_of(layout, *more), out=tmp_path / "run", module=kind(), card=card, batches=Numbers()
        )
    assert not (tmp_path / "run").exists()


class Lost(Plain):
    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs + V, targets)  # beyond its embedding


class Unsummed(Plain):
    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs, targets).expand(2)


class Kept(Plain):
    """The second backward goes through the first one's graph, too."""

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.loss = super().forward(inputs, targets) + getattr(self, "loss", 0.0)
        return self.loss


@pytest.mark.parametrize(("module", "message"), [
    (Lost(), r"Lost\(inputs, targets\) with tokens \d+ to \d+ of shape \(2, 16\) failed: IndexError: index out of "
     r"range .*own_models.py:\d+: x = self.tokens\(inputs\)"),
    (nn.Linear(3, 3), r"failed: TypeError: .*takes 2 positional arguments but 3 were given$"),
    (Unsummed(), r"= a tensor \(2,\): must be the mean loss, a scalar tensor"),
    (Kept(), r"backward of the loss of Kept failed: RuntimeError: .* a second time"),
])  # fmt: skip
def test_a_module_is_tried_before_anything_is_made(module, message, tmp_path):
    """What a script sees ends at its own line."""
    with pytest.raises(UserError, match=message) as raised:
        fivefold.train(recipe_of("dp=1"), tmp_path / "run", model=module, data=Numbers(), nproc=1)
    assert not (tmp_path / "run").exists()
    assert len(traceback.extract_tb(raised.value.__traceback__)) <= 3
    assert raised.value.__suppress_context__


class Scaled(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


def _with(change: Any) -> type[Decoder]:
    class Changed(Decoder):
        def __init__(self) -> None:
            super().__init__()
            change(self)

    return Changed


@pytest.mark.parametrize(("change", "message"), [
    (lambda m: setattr(m.blocks["1"].mixer, "wide", Scaled(32, 64)), r"blocks.1.mixer.wide is a Scaled with a forward"),
    (lambda m: setattr(m.blocks["0"], "out", Scaled(32, 32)), r"needs a plain nn.Linear.*Nearest valid: zero=3"),
    (lambda m: setattr(m.embed, "padding_idx", 0), r"embed has padding_idx = 0"),
    (lambda m: m.blocks["0"].out.register_forward_hook(lambda *_: None), r"blocks.0.out has forward hooks"),
    (lambda m: setattr(m.blocks["0"], "qkv", nn.Linear(32, 96)), r"qkv is cut by columns, and its bias is not"),
])  # fmt: skip
def test_layers_that_tensor_parallelism_would_silently_change_are_refused(change, message):
    """It puts its own linear layers and embeddings in place of those that are cut."""
    recipe = recipe_of("tp=2")
    custom_model(recipe, Decoder(), CARD)
    with pytest.raises(UserError, match=message):
        custom_model(recipe, _with(change)(), CARD)


def _lora() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "examples" / "lora.py")))


@cache
def one_rank() -> Recipe:
    return recipe_of("dp=1")


def lora_cut(name: str, shape: tuple[int, ...]) -> Cut | None:
    """The base's cut; of a column-parallel layer's adapter B is cut, of a row-parallel one's A."""
    layer, part, _ = name.rsplit(".", 2) if name.count(".") > 1 else (name, "", "")
    model = one_rank().model
    if part not in ("base", "lora_a", "lora_b"):
        return cut_of(name, shape, model)
    found = cut_of(f"{layer}.weight", shape, model)
    kinds = {"base": ("column", "row"), "lora_a": ("row",), "lora_b": ("column",)}[part]
    return found if found is not None and found.kind in kinds else None


def lora() -> tuple[nn.Module, ModuleCard]:
    """Adapters beside a frozen model, with the card of its cuts."""
    return _lora().adapted(one_rank()), ModuleCard(cut=lora_cut, tied=True)


def adapted_steps(rank: int, world: int, recipes: list[Recipe]) -> list[dict]:
    found = []
    for recipe in recipes:
        torch.manual_seed(0)
        model = _lora().adapted(recipe)
        for name, p in model.named_parameters():
            if "lora_b" in name:
                torch.nn.init.normal_(p, 0, 0.02, torch.Generator().manual_seed(len(name)))
        found.append(
            _steps(rank, world, lambda model=model: model, ModuleCard(cut=lora_cut, tied=True), recipe)
        )
    return found


@pytest.mark.parametrize("layouts", [["dp=2,zero=3", "tp=2,sp=true", "pp=2"]])
def test_adapters_on_every_axis(layouts):
    eps = "optim.eps=1e-5"  # an adapter's gradients are a tenth of a layer's, and what is rounded is as large
    (one,) = run_ranks(1, adapted_steps, [recipe_of("dp=1", eps)])
    wanted = one[0] | {key: joined(one, key) for key in ("gradients", "weights")}
    recipes = [recipe_of(layout, eps) for layout in layouts]
    answers = run_ranks(2, adapted_steps, recipes)
    assert wanted["gradients"]
    assert all("lora_" in name for name in wanted["gradients"])
    assert_alike(answers, recipes, wanted)


@pytest.mark.parametrize("layout", ["dp=1", pytest.param("dp=1,recompute=full", marks=pytest.mark.slow)])
def test_the_planner_counts_no_gradients_and_states_of_frozen_parameters(layout):
    recipe = planned_recipe("llama", "bf16", layout, "model.freeze=embed*, blocks.[0-4].*")
    whole = planned_recipe("llama", "bf16", layout)
    step, (mine,), (all_,) = tracked(0, 1, recipe), held(planned(recipe)), held(planned(whole))
    card = card_of(recipe.model)
    trained = sum(math.prod(shape) for name, shape in card.parameters.items() if name not in card.frozen)
    assert mine.gradients == 4 * trained == step.at_peak["gradients"]
    assert mine.optimizer == 12 * trained == pytest.approx(step.at_peak["optimizer"], rel=1e-3)
    assert mine.params == all_.params == step.at_peak["params"]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp=1", "dp=2,zero=3"])
def test_frozen_layouts_pass_the_comparison_with_plain_autograd(tmp_path, layout):
    report = compared(tiny(tmp_path, layout, "model.freeze=embed*, blocks.0.*", mode="bf16"))
    assert report.passed, report
