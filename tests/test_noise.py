"""The gradient noise scale: of a problem whose own is known, and on every layout that it can be measured on."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from marks import all_but
from pool_runs import mend
from ranks import run_ranks
from torch import Tensor, nn

from fivefold.errors import UserError
from fivefold.launch.ranks import Ranks
from fivefold.parallel.mesh import Microbatch
from fivefold.recipe import Recipe, change, load, resolve
from fivefold.sharding.layout import Layout
from fivefold.step.state import State, build_state
from fivefold.step.step import agree, forward_backward
from fivefold.train.instruments import SQUARES, UNEVEN, NoiseScale
from fivefold.train.start import run_command

V, T, B = 64, 8, 8
TINY = [
    "model.layers=2", "model.dim=32", "model.heads=4", "model.ffn_dim=64", f"model.seq_len={T}",
    f"train.global_batch_size={B}", "train.steps=10", "precision.mode=fp32", "model.tie_embeddings=false",
    "model.init_std=0.2", "observe.noise_scale=true",
]  # fmt: skip


class Chosen(nn.Module):
    """The loss of a sequence is w . x of its first token, so its gradient is that row of a fixed table."""

    def __init__(self, table: Tensor):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(table.shape[1]))
        self.table = table

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return (self.table[inputs[:, 0]] @ self.w).mean()


def recipe_of(layout: str, microbatch: int = 1) -> Recipe:
    return resolve(load("quickstart", [*TINY, f"train.microbatch_size={microbatch}"], layout), vocab_size=V)


def alone(recipe: Recipe, module: nn.Module | None = None) -> State:
    return build_state(recipe, Ranks(0, 1, 0, 1, torch.device("cpu")), module)


@pytest.mark.slow
@pytest.mark.parametrize("microbatch", [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2)), 4])
def test_the_scale_of_a_known_problem(microbatch: int) -> None:
    """Rows of mean 0.5 and standard deviation 2 in 100 dims, each drawn as often: tr(Sigma) / |G|^2 is that of the
    table."""
    generator = torch.Generator().manual_seed(0)
    table = 0.5 + 2 * torch.randn(V, 100, generator=generator)
    known = (table.var(0, unbiased=False).sum() / table.mean(0).square().sum()).item()
    recipe = recipe_of("dp=1", microbatch)
    state = alone(recipe, Chosen(table))
    noise = NoiseScale(state, recipe, memory=0.999)
    figures = {}
    for _ in range(1500):
        rows = torch.randint(0, V, (B, T), generator=generator)
        batch = [Microbatch(part, part) for part in rows.split(microbatch)]
        noise.begin_step(state, batch)
        forward_backward(state, batch, 0)
        figures = noise.figures(line_of(state, noise))
    assert figures["noise_scale"] / T == pytest.approx(known, rel=0.1)


def line_of(state: State, noise: NoiseScale) -> dict[str, float]:
    norm = agree(state, torch.zeros(()), 0.0)[1]
    return {name: x.item() for name, x in {"grad_norm": norm, **noise.begin_update(state)}.items()}


def tokens() -> Tensor:
    return torch.randint(0, V, (B, T + 1), generator=torch.Generator().manual_seed(1))


def measured(rank: int, world: int, recipe: Recipe, sizes: list[int]) -> tuple[float, float]:
    """The two estimates of one step. sizes: sequences of each of a data-parallel rank's microbatches."""
    state = build_state(recipe, Ranks(rank, world, rank, world, torch.device("cpu")))
    noise = NoiseScale(state, recipe, memory=0.0)
    own = tokens().chunk(state.mesh.size("dp"))[state.mesh.index("dp")]
    average = len(own) / len(sizes)
    batch = [
        Microbatch(rows[:, :-1], rows[:, 1:], weight=len(rows) / average)
        for rows in own.split([size * len(own) // sum(sizes) for size in sizes])
    ]
    noise.begin_step(state, batch)
    forward_backward(state, batch, 0)
    noise.figures(line_of(state, noise))
    for replica in state.parallel.replicas:
        replica.close()
    return state.noise


def expected(parts: list[int]) -> tuple[float, float]:
    """From the whole gradients of parts of so many sequences, each computed by itself."""
    found, shares = [], torch.tensor(parts) / B
    for rows in tokens().split(parts):
        state = alone(recipe_of("dp=1", len(rows)))
        forward_backward(state, [Microbatch(rows[:, :-1], rows[:, 1:])], 0)
        found.append(torch.cat([state.gradients()[name].flatten() for name in sorted(state.gradients())]))
    gradients = torch.stack(found).double()
    whole = (shares @ gradients.float()).double().square().sum().item()
    squares = gradients.square().sum(1)
    # E sum w^2 |g|^2 = q |G|^2 + tr / B, and E |sum w g|^2 = |G|^2 + tr / B
    q, small = shares.square().sum().item(), (shares.square() * squares).sum().item()
    gradient = (whole - small) / (1 - q)
    return gradient, whole - gradient


@all_but("dp_replicate*", "dp=2,zero=2*", "dp=2,tp=2*", "pp=2,schedule*")
@pytest.mark.parametrize(
    ("layout", "parts"),
    [
        ("dp=1", 8),
        ("dp=2", 8),
        ("dp=2,zero=1", 2),
        ("dp=2,zero=2", 8),
        ("dp=2,zero=3", 8),
        ("tp=2", 8),
        ("pp=2", 8),
        ("pp=2,schedule=zb_h1", 8),
        ("pp=2,dp=2,zero=1", 2),
        ("dp_replicate=2,dp_shard=2,zero=3", 8),
        ("dp=2,tp=2", 8),
    ],
)
def test_every_layout_measures_the_same(layout: str, parts: int) -> None:
    recipe = recipe_of(layout)
    size = Layout.from_recipe(recipe.layout)
    sizes = [1] * (B // (recipe.layout.dp_replicate * recipe.layout.dp_shard))
    found = (
        run_ranks(size.ranks, measured, recipe, sizes) if size.ranks > 1 else [measured(0, 1, recipe, sizes)]
    )
    assert found[0] == pytest.approx(expected([B // parts] * parts), rel=1e-4)
    assert all(pair == pytest.approx(found[0]) for pair in found)


@pytest.mark.parametrize("layout", ["dp=1", "pp=2"])
def test_parts_count_by_their_targets(layout: str) -> None:
    recipe, sizes = recipe_of(layout), [1, 4, 1, 2]
    ranks = Layout.from_recipe(recipe.layout).ranks
    found = run_ranks(ranks, measured, recipe, sizes) if ranks > 1 else [measured(0, 1, recipe, sizes)]
    assert found[0] == pytest.approx(expected(sizes), rel=1e-4)
    whole = {"grad_norm": 1.0, SQUARES: 1.0, UNEVEN: 1.0}
    assert NoiseScale.figures(SimpleNamespace(), whole) == {}, "one part says nothing"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("layout", "extra", "message"),
    [
        ("cp=2", [], "a rank sees parts of sequences"),
        ("tp=2,sp=true", [], "gradients of norms are sums"),
        ("dp=2,tp=2,zero=1", [], "Nearest valid: layout.zero = 0"),
        ("pp=2", ["model.tie_embeddings=true"], "two stages each have a part"),
        ("dp=2,ep=2", ["model.arch=moe"], "tokens of several ranks"),
    ],
)
def test_where_it_cannot_be_measured(layout: str, extra: list[str], message: str) -> None:
    with pytest.raises(UserError, match=r"observe\.noise_scale = true is not supported with") as error:
        load("quickstart", [*TINY, *extra], layout)
    assert message in str(error.value)


def test_one_gradient_has_no_noise() -> None:
    recipe = recipe_of("dp=1", B)
    with pytest.raises(UserError, match=r"train\.microbatch_size = 4, or two data-parallel ranks"):
        NoiseScale(alone(recipe), recipe)


def run_recipe(folder: Path) -> Recipe:
    text = folder / "text.txt"
    text.write_text("".join(f"{i} squared is {i * i}, and the next one follows. " for i in range(600)))
    sets = [*TINY, f"data.source={text}", f"data.cache={folder / 'cache'}", "data.tokenizer=bytes"]
    sets += ["train.microbatch_size=2", "train.sample_every=0", "train.val_every=10"]
    return load("quickstart", sets, "dp=1")


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_its_average(tmp_path: Path) -> None:
    """Stopped behind step 4, it measures what an unbroken run does. A checkpoint of before has no average: it starts
    anew."""
    from fivefold.checkpoint import store
    from fivefold.observe.metrics import read_metrics

    recipe = run_recipe(tmp_path)
    recipe = change(recipe, ["optim.schedule=constant", "optim.warmup_steps=0", "checkpoint.every=4"])
    shorter = change(recipe, ["train.steps=4"])

    def scales(out: Path) -> dict[int, Any]:
        return {
            line["step"]: line.get("noise_scale")
            for line in read_metrics(out / "metrics.jsonl")
            if "loss" in line
        }

    unbroken = scales(run_command(recipe, out=tmp_path / "unbroken"))
    out, old = tmp_path / "run", tmp_path / "old"
    run_command(shorter, out=out)
    run_command(shorter, out=old)
    assert scales(run_command(recipe, out=out, resume=True)) == unbroken
    mend(store.latest(old), lambda found: found["meta"].pop("noise"))
    anew = scales(run_command(recipe, out=old, resume=True))
    assert anew[10] != unbroken[10]
    assert set(anew) == set(unbroken)


def test_a_run_writes_it(tmp_path: Path) -> None:
    from fivefold.observe.console import summary_rows
    from fivefold.observe.metrics import read_metrics
    from fivefold.observe.summary import summarize

    out = run_command(run_recipe(tmp_path), out=tmp_path / "run")
    lines = read_metrics(out / "metrics.jsonl")
    values: list[Any] = [line["noise_scale"] for line in lines if "noise_scale" in line]
    assert values
    assert all(value > 0 for value in values)
    assert summarize(lines)["noise_scale"] == values[-1]
    assert any(name == "noise scale" for name, _ in summary_rows(summarize(lines)))
    assert "Noise scale" in (out / "report.html").read_text()
