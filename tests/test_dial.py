"""One dial (`model.depth`) and mu-P (`model.base_dim`): what they set, that features change alike at every width, and
that every layout trains the same."""

import math
from operator import attrgetter

import pytest
import torch
from layouts import compared, tiny
from marks import only
from torch import nn

from fivefold.errors import UserError
from fivefold.launch.ranks import Ranks
from fivefold.models.base import build
from fivefold.models.card import card_of
from fivefold.models.hf import from_hf, from_hf_config, hf_config, to_hf
from fivefold.models.mup import kind, scales
from fivefold.parallel.mesh import Microbatch
from fivefold.recipe import change, explain, load, resolve, to_toml
from fivefold.recipe.dial import SETTINGS
from fivefold.step.state import build_state, updater_arguments
from fivefold.step.step import take_step


def test_a_depth_sets_a_whole_run() -> None:
    recipe = load("dial", ["model.depth=12"])
    model, train = recipe.model, recipe.train
    assert (model.layers, model.dim, model.heads) == (12, 768, 12)
    assert (model.base_dim, model.base_layers, model.init_std) == (256, 4, 0.05)
    blocks = 12 * (4 * 768**2 + 3 * 768 * 2048 + 2 * 768)
    assert train.tokens == 20 * blocks, "with the architecture's own F of 2048"
    tokens = 4096 * (train.tokens / (600 * 4096)) ** 0.383
    assert train.global_batch_size == 2 ** round(math.log2(tokens / 256))
    rate = recipe.optim.lr
    longer = change(
        recipe, [f"train.tokens={4 * train.tokens}", "model.depth=12", "train.global_batch_size=64"]
    )
    same_batch = change(recipe, ["model.depth=12", "train.global_batch_size=64"])
    assert longer.optim.lr / same_batch.optim.lr == pytest.approx(4**-0.32, rel=1e-2)
    double = change(recipe, ["model.depth=12", f"train.global_batch_size={4 * train.global_batch_size}"])
    assert double.optim.lr / rate == pytest.approx(2, rel=1e-2)


def test_what_is_set_beside_it_stays_and_the_rest_follows(tmp_path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('base = "quickstart"\n[model]\ndepth = 3\nheads = 8\n[optim]\nlr = 7e-3\n')
    mine = load(path)
    assert (mine.model.layers, mine.model.dim, mine.model.heads) == (3, 192, 8)
    assert mine.optim.lr == 7e-3
    assert mine.train.steps is None
    assert mine.train.tokens == load("dial", ["model.depth=3"]).train.tokens, "quickstart's steps give way"
    assert mine.model.tie_embeddings, "what the dial does not set is quickstart's"
    wide = load("dial", ["model.dim=128", "model.depth=4"])
    assert (wide.model.dim, wide.model.layers, wide.model.heads) == (128, 4, 2)
    assert wide.train.tokens is not None
    assert wide.train.tokens < (load("dial", ["model.depth=4"]).train.tokens or 0)
    tiny_run = load("dial", ["train.tokens=1"])
    assert (tiny_run.train.global_batch_size, tiny_run.optim.lr) == (
        8,
        pytest.approx(2.7e-3 * 0.5**0.5 * 0.1**-0.32, rel=1e-2),
    )
    short = load("dial", ["train.steps=100", "model.depth=4"])
    assert (short.train.steps, short.train.tokens) == (100, None)
    explicit = resolve(short, vocab_size=4096)
    assert change(explicit, ["optim.lr=1e-3"]).model == explicit.model
    deeper = change(explicit, ["model.depth=8"])
    assert (deeper.model.dim, deeper.model.layers, deeper.train.steps) == (512, 8, 100), (
        "anew, but for what was set"
    )


def test_another_depth_sets_what_a_written_recipe_has_from_its_own(tmp_path) -> None:
    """Such a recipe names every field. What was set by hand is no value of its depth, and stays."""
    path = tmp_path / "recipe.toml"
    asked = ["model.depth=4", "optim.lr=1e-3", "model.arch=moe"]
    path.write_text(to_toml(resolve(load("dial", asked), vocab_size=4096)))
    assert load(path).model.layers == 4
    for deeper in (load(path, ["model.depth=8"]), change(load(path), ["model.depth=8"])):
        fresh = load("dial", [*asked, "model.depth=8", "model.vocab_size=4096"])
        assert (deeper.model.layers, deeper.optim.lr) == (8, 1e-3)
        again = resolve(deeper, vocab_size=4096)
        wanted = resolve(fresh, vocab_size=4096)
        assert again.model == wanted.model
        assert (again.train.steps, again.train.global_batch_size) == (
            wanted.train.steps,
            wanted.train.global_batch_size,
        )


def test_a_value_that_a_file_names_by_hand_stays_also_if_it_is_that_of_its_depth(tmp_path) -> None:
    """Every field of the dial. Each file names one of them, and leaves the others to its depth."""
    shallow, deeper = (resolve(load("dial", [f"model.depth={n}"]), vocab_size=4096) for n in (4, 8))
    path, moved = tmp_path / "mine.toml", set[str]()
    for key in (*(one.key for one in SETTINGS), "train.steps"):
        value = attrgetter(key)(shallow)
        if value is None:
            continue
        moved |= {key} if value != attrgetter(key)(deeper) else set()
        path.write_text(f'base = "dial"\nmodel.depth = 4\n{key} = {value}\n')
        assert attrgetter(key)(load(path, ["model.depth=8"])) == value, key
    assert {"model.layers", "model.dim", "model.heads", "train.global_batch_size", "optim.lr"} <= moved


def test_a_message_says_what_the_dial_has_set() -> None:
    with pytest.raises(
        UserError, match=r"mu-P is not known for bert.* \(model.depth = 4 sets model.base_dim\)"
    ):
        load("dial", ["model.arch=bert", "train.sample_every=0", "model.depth=4"])


def test_the_source_of_each_default_is_named() -> None:
    recipe = load("dial", ["optim.lr=1e-3", "model.depth=4"])
    docs = {field.key: field.doc for field in explain(recipe)}
    for setting in SETTINGS:
        said = f"Here by `model.depth`: {setting.source}." in docs[setting.key]
        assert said == (setting.key != "optim.lr")
    assert not any("Here by" in field.doc for field in explain(load("quickstart")))
    assert "Here by" not in docs["model.seq_len"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            ["model.base_dim=64", "model.arch=bert", "train.sample_every=0"],
            "not known for bert, only for decoders",
        ),
        (["model.base_dim=64", "model.arch=olmo2"], "not known for olmo2"),
        (["model.base_dim=64", "model.arch=gemma3"], "not known for gemma3"),
        (["model.zero_init=true", "model.arch=glm4"], "glm4 norms what a projection gives"),
        (["model.base_dim=64", "model.arch=deepseek"], "not known for deepseek"),
        (["model.base_dim=64", "optim.name=sgd"], 'not known for the optimizer "sgd"'),
        (["model.base_layers=2"], "needs model.base_dim"),
        (["model.depth=0"], "must be a whole number >= 1"),
    ],
)
def test_what_is_not_known_is_refused(changes: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        load("quickstart", changes)


def test_a_depth_has_a_model_of_its_own(tmp_path) -> None:
    (tmp_path / "recipe.toml").write_text("[model]\ndepth = 3\nlayers = 3\n")
    with pytest.raises(UserError, match=r"model.depth = 2 .*train.init_from"):
        load("dial", [f"train.init_from={tmp_path}"])
    assert load("continue", [f"train.init_from={tmp_path}"]).model.layers == 3


def test_modules_and_optimizers_of_the_users_own_have_no_table() -> None:
    recipe = load("quickstart", ["model.base_dim=64", "model.vocab_size=256"])
    with pytest.raises(UserError, match="mu-P is not known for modules and optimizers of your own"):
        updater_arguments(resolve(recipe, vocab_size=256), {"weight": (4, 4)}, frozenset())


# mu-P

SIZES = ["model.base_dim=32", "model.base_layers=2", "model.vocab_size=256", "model.seq_len=32"]


def model_of(width: int, layers: int = 2, *changes: str):
    sets = [f"model.dim={width}", f"model.heads={width // 16}", f"model.layers={layers}", *changes]
    return resolve(load("quickstart", [*SIZES, *sets], "dp=1"), vocab_size=256)


def test_nothing_changes_at_the_base() -> None:
    ours, plain = model_of(32), model_of(32, 2, "model.base_dim=none", "model.base_layers=none")
    for name, shape in card_of(ours.model).parameters.items():
        assert scales(ours.model, name, shape) == (1, 1)
    mine, theirs = (build(one.model, device="cpu").state_dict() for one in (ours, plain))
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize("tied", [False, True])
def test_what_starts_smaller_and_learns_slower(tied: bool) -> None:
    """Table 3 of arXiv 2203.03466 and CompleteP (arXiv 2505.01618, alpha = 1): 4 times the width, twice the depth. The
    rate of embeddings is that of arXiv 2407.17465."""
    recipe = model_of(128, 4, f"model.tie_embeddings={str(tied).lower()}")
    model, table = recipe.model, card_of(recipe.model).parameters
    ends = {"norm.weight": (1 / 4, 1 / 4)} if tied else {"norm.weight": (1, 1), "head.weight": (1 / 4, 1 / 4)}
    blocks = {
        "attention.qkv.weight": (1 / 2, 1 / 4),
        "attention.out.weight": (1 / 4, 1 / 8),
        "mlp.gate_up.weight": (1 / 2, 1 / 4),
        "mlp.down.weight": (1 / 4, 1 / 8),
        "norm1.weight": (1, 1),
        "norm2.weight": (1, 1),
    }
    wanted = {"embed.weight": (1, 1 if tied else 1 / 2)} | ends
    wanted |= {f"blocks.{n}.{name}": both for n in range(4) for name, both in blocks.items()}
    assert {name: scales(model, name, shape) for name, shape in table.items()} == wanted
    given = updater_arguments(recipe, table)
    assert given["rates"] == {name: rate for name, (_, rate) in wanted.items()}
    for name in table:
        assert given["rates"][name] * given["weight_decay"][name] == recipe.optim.weight_decay
    weights = build(model, device="cpu").state_dict()
    base = build(model_of(32, 2).model, device="cpu").state_dict()
    for name, (init, _) in wanted.items():
        if name in base:
            ratio = weights[name].square().mean().sqrt() / base[name].square().mean().sqrt()
            assert ratio == pytest.approx(init, rel=0.1), name
    muon = updater_arguments(model_of(128, 4, "optim.name=muon"), table)["rates"]
    assert muon["blocks.0.mlp.gate_up.weight"] == pytest.approx(0.5)
    assert muon["blocks.0.mlp.down.weight"] == pytest.approx(0.25)
    assert kind(model, "blocks.0.mlp.router.weight", (8, 128)) == "output"


def trained(recipe, steps: int = 4):
    """The model's module after some steps on one batch, the losses before each, and the logits before and after."""
    state = build_state(recipe, Ranks(0, 1, 0, 1, torch.device("cpu")))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(256, (8, recipe.model.seq_len + 1), generator=generator)
    batch = Microbatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    losses, before = [], logits_of(state.module, batch.inputs)
    for _ in range(steps):
        losses.append(float(take_step(state, recipe, [batch]).loss))
    return losses, before, logits_of(state.module, batch.inputs)


@torch.no_grad()
def logits_of(module, tokens):
    return module.output(module.norm(hidden(module, tokens)), (module.head or module.embed).weight, None)


def hidden(module, tokens):
    positions = torch.arange(tokens.shape[1])
    x, context = module.begin(tokens, positions), module.context(positions)
    for block in module.blocks.values():
        x = block(x, *context)
    return x


def change_of_logits(width: int, layers: int, *changes: str) -> float:
    recipe = model_of(width, layers, "optim.lr=4e-3", "optim.warmup_steps=0", "precision.mode=fp32", *changes)
    _, before, after = trained(recipe)
    return (after - before).square().mean().sqrt().item()


PLAIN = ("model.base_dim=none", "model.base_layers=none")


@only("muon-true", "adamw-false")
@pytest.mark.parametrize("tied", ["true", "false"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_features_change_alike_at_every_width(tied: str, optimizer: str) -> None:
    """The coordinate check of appendix D.1 of arXiv 2203.03466: how far the first steps move the logits. It nears a
    limit from above (measured 1.3 to 1.5 between these widths), and grows on in the plain form (2.8 to 3.1)."""
    changes = f"model.tie_embeddings={tied}", f"optim.name={optimizer}"
    narrow, wide = (change_of_logits(width, 2, *changes) for width in (64, 256))
    assert 1 / 1.6 < wide / narrow < 1.6
    narrow, wide = (change_of_logits(width, 2, *changes, *PLAIN) for width in (64, 256))
    assert wide / narrow > 2.5


def test_features_change_alike_at_every_depth() -> None:
    """Figure 1 of arXiv 2505.01618 in small: measured 1.02, and 1.15 in the plain form."""
    shallow, deep = (change_of_logits(64, layers) for layers in (2, 8))
    assert deep / shallow == pytest.approx(1, abs=0.05)
    shallow, deep = (change_of_logits(64, layers, *PLAIN) for layers in (2, 8))
    assert deep / shallow > 1.1


@pytest.mark.parametrize("tied", [True, False])
def test_it_trains_as_with_the_factors_of_the_forward_pass(tied: bool) -> None:
    """The papers' form in plain PyTorch: branches divided by the depth, logits by the width (with tied embeddings,
    table 8 of arXiv 2203.03466), and no such factors on initial values and learning rates."""
    still = ["optim.schedule=constant", "optim.warmup_steps=0", "optim.grad_clip=0", "optim.eps=1e-20"]
    changes = [f"model.tie_embeddings={str(tied).lower()}", "precision.mode=fp32", "optim.lr=1e-2", *still]
    recipe = model_of(64, 4, *changes)
    ours, _, logits = trained(recipe, 6)
    module = build(recipe.model, device="cpu", seed=recipe.train.seed)
    width, depth, lr = 2.0, 2.0, recipe.optim.lr
    rates, factors = {}, {}
    for name in module.state_dict():
        factors[name] = 1 / depth if name.endswith(("out.weight", "down.weight")) else 1.0
        rates[name] = lr / width if ("blocks" in name and "norm" not in name) or "head" in name else lr
    rates["embed.weight"] = lr if tied else lr / width**0.5
    if tied:
        factors["norm.weight"] = 1 / width
    own = {name: nn.Parameter(p.detach() / factors[name]) for name, p in module.named_parameters()}
    groups = [
        {
            "params": [p],
            "lr": rates[n],
            "weight_decay": (p.dim() > 1) * recipe.optim.weight_decay * lr / rates[n],
        }
        for n, p in own.items()
    ]
    optimizer = torch.optim.AdamW(groups, betas=recipe.optim.betas, eps=1e-20)
    tokens = torch.randint(256, (8, recipe.model.seq_len + 1), generator=torch.Generator().manual_seed(0))
    for loss in ours:
        scaled = {name: p * factors[name] for name, p in own.items()}
        found = torch.func.functional_call(
            module, scaled, (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        )
        assert loss == pytest.approx(found.item(), rel=1e-5)
        optimizer.zero_grad()
        found.backward()
        optimizer.step()
    with torch.no_grad():
        for name, p in module.named_parameters():
            p.copy_(own[name] * factors[name])
    assert torch.allclose(logits, logits_of(module, tokens[:, :-1]), atol=1e-4)


def test_an_exported_model_has_the_same_logits() -> None:
    """There is nothing to fold: config.json has no factor, and the weights are those that were trained."""
    model = model_of(64, 4).model
    module, tokens = build(model, device="cpu"), torch.arange(32)[None]
    read = from_hf_config(hf_config(model))
    assert (read.base_dim, read.base_layers, read.depth) == (None, None, None)
    again = build(read, device="cpu")
    again.load_state_dict(from_hf(to_hf(module.state_dict(), model), read))
    assert torch.equal(logits_of(module, tokens), logits_of(again, tokens))


@only("dp=2,tp=2,zero=1-adamw", "pp=2-muon")
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize(
    "layout", ["dp=2,zero=3", "dp=2,tp=2,zero=1", "pp=2", "cp=2", "tp=2,sp=true", "dp=2,ep=2"]
)
def test_layouts_train_the_same(tmp_path, layout: str, optimizer: str) -> None:
    changes = ["model.base_dim=8", "model.base_layers=2", f"optim.name={optimizer}"]
    report = compared(tiny(tmp_path, layout, *changes))
    assert report.passed, report


def test_offloaded_states_train_the_same(tmp_path) -> None:
    changes = ["model.base_dim=8", "model.base_layers=2", "layout.offload=states:disk"]
    report = compared(tiny(tmp_path, "dp=1", *changes))
    assert report.passed, report
