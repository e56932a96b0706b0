"""`fivefold verify`: passes what is right, and fails what is wrong, wherever the mistake sits."""

import json
import math
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from launched import Launched, command
from layouts import MOE, TINY, compared, side, tiny
from marks import only, slow
from torch import Tensor

import fivefold
from fivefold.data import NOT_COUNTED, prepare
from fivefold.errors import UserError
from fivefold.models.base import build
from fivefold.models.mixture import Router
from fivefold.optim import OPTIMIZERS
from fivefold.parallel import data
from fivefold.parallel.data import add_gradient
from fivefold.parallel.expert import Balance
from fivefold.parallel.replica import Gathered
from fivefold.precision import PRECISIONS
from fivefold.recipe import Recipe, resolve
from fivefold.step import state as state_module
from fivefold.step import step
from fivefold.step.state import State
from fivefold.step.step import take_step
from fivefold.train import differences, verify
from fivefold.train.differences import TOLERANCE, Figure, beyond, disturb
from fivefold.train.share import share_of
from fivefold.train.verify import alone, compute, prepared, reference_state, sizes


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where text, cache and the references stay."""
    return tmp_path_factory.mktemp("verify")


@only("fp32-deepseek", "fp32-llama")
@pytest.mark.parametrize("arch", ["llama", "gpt2", "bert", "moe", "deepseek"])
@pytest.mark.parametrize("mode", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_one_rank_passes(tmp_path, arch, mode):
    """The trainer on one rank against plain autograd."""
    report = compared(tiny(tmp_path, "dp=1", *(MOE if arch == "moe" else [f"model.arch={arch}"]), mode=mode))
    assert report.passed, report


@pytest.mark.parametrize("mode", ["fp32", *slow("bf16")])
def test_a_mistake_on_one_rank_shows(tmp_path, monkeypatch, mode):
    """The reference does not go through the trainer's sum of gradients: where that forgets a microbatch, it shows."""
    monkeypatch.setattr(data, "add_gradient", lambda total, grad, first: add_gradient(total, grad, True))
    report = compared(tiny(tmp_path, "dp=1", mode=mode))
    assert not report.gradients.passed
    assert report.gradients.max_rel > 0.1


@pytest.mark.parametrize("arch", ["llama", *slow("gpt2", "bert")])
def test_replicas_pass(room, arch):
    report = compared(tiny(room, "dp=2", f"model.arch={arch}"), folder=room / arch)
    assert report.passed, report
    assert report.gradients.max_rel > 0, "sums in another order differ by rounding"


def test_bf16_is_measured_against_its_own_rounding(tmp_path):
    report = compared(tiny(tmp_path, "dp=2", mode="bf16"))
    assert report.passed, report
    assert 1e-4 < report.gradients.max_rel < report.gradients.allowed < 0.2


# Mistakes: what a rank does, with one thing broken in it.


def forgets_the_sum(rank: int, world: int, recipe: Recipe, steps: int, folder: Path) -> None:
    """Takes part in the sum of gradients over the replicas and forgets the result, on the last rank only."""
    _with_all_reduce(lambda tensor: rank == world - 1, rank, world, recipe, steps, folder)


def forgets_the_sum_first(rank: int, world: int, recipe: Recipe, steps: int, folder: Path) -> None:
    """The same on the rank whose gradients are compared."""
    _with_all_reduce(lambda tensor: rank == 0, rank, world, recipe, steps, folder)


def _with_all_reduce(forgets, rank: int, world: int, recipe: Recipe, steps: int, folder: Path) -> None:
    reduce = dist.all_reduce

    def broken(tensor, *arguments, **options):
        large = tensor.is_floating_point() and tensor.numel() > 100 and forgets(tensor)  # gradients
        return reduce(tensor.clone() if large else tensor, *arguments, **options)

    dist.all_reduce = broken
    try:
        side(rank, world, recipe, steps, folder)
    finally:
        dist.all_reduce = reduce


def skips_reductions(rank: int, world: int, recipe: Recipe, steps: int, folder: Path) -> None:
    """Leaves out the sums besides those over replicas: of sequence parallelism, of tied embeddings over stages."""
    import fivefold.train.verify as module

    build = module.build_state

    def without(recipe, ranks):
        state = build(recipe, ranks)
        assert state.parallel.reductions
        state.parallel.reductions.clear()
        return state

    module.build_state = without
    try:
        side(rank, world, recipe, steps, folder)
    finally:
        module.build_state = build


def scales_by_replicas(rank: int, world: int, recipe: Recipe, steps: int, folder: Path) -> None:
    """Averages over the replicas once more: AdamW's update hardly feels it, the gradients do."""
    import fivefold.step.step as module

    run = module.forward_backward

    def halved(state, microbatches, seed):
        loss = run(state, microbatches, seed)
        torch._foreach_div_(list(state.gradients().values()), float(world))
        return loss

    module.forward_backward = halved
    try:
        side(rank, world, recipe, steps, folder)
    finally:
        module.forward_backward = run


@pytest.mark.slow
def test_a_reduction_that_the_first_rank_forgets_fails(room):
    report = compared(tiny(room, "dp=2"), part=forgets_the_sum_first, folder=room / "llama")
    assert not report.gradients.passed
    assert report.gradients.max_rel > 0.1
    assert not report.weights.passed


def test_a_reduction_that_another_rank_forgets_fails(room):
    """The gradients that are written are right in the first step; the ranks' weights part after it."""
    report = compared(tiny(room, "dp=2"), part=forgets_the_sum, folder=room / "llama")
    assert not report.passed
    assert report.gradients.passed
    assert not report.loss.passed
    assert report.loss.worst != "step 1"


def test_a_wrong_scale_fails(room):
    report = compared(tiny(room, "dp=2"), part=scales_by_replicas, folder=room / "llama")
    assert report.gradients.max_rel == pytest.approx(0.5, rel=1e-2)
    assert not report.grad_norm.passed


def test_a_missing_sum_of_sequence_parallelism_fails(room):
    report = compared(tiny(room, "tp=2,sp=true"), part=skips_reductions, folder=room / "llama")
    assert not report.gradients.passed
    assert "norm" in report.gradients.worst


def test_a_missing_sum_of_tied_embeddings_fails(room):
    report = compared(tiny(room, "pp=2"), part=skips_reductions, folder=room / "llama")
    assert not report.gradients.passed
    assert "embed.weight" in report.gradients.worst


# What a layout's rank may do wrong, one thing at a time.


@contextmanager
def put(place: Any, name: str, made: Callable[[Any], Any]) -> Iterator[None]:
    """Replaces `place.name` by what `made` makes of it."""
    with mock.patch.object(place, name, made(getattr(place, name))):
        yield


def after_step(change_: Callable[[State], None]) -> AbstractContextManager[None]:
    """Changes the state after each step."""

    def made(step: Any) -> Any:
        def stepped(state: State, *arguments: Any, **options: Any) -> Any:
            done = step(state, *arguments, **options)
            change_(state)
            return done

        return stepped

    return put(verify, "take_step", made)


def gradients(change_: Callable[[State, int], None]) -> AbstractContextManager[None]:
    """Changes the gradients of each step. change_: also gets the rank's number of microbatches."""

    def made(run: Any) -> Any:
        def changed(state: State, microbatches: Any, seed: int) -> Tensor:
            loss = run(state, microbatches, seed)
            change_(state, len(microbatches))
            return loss

        return changed

    return put(step, "forward_backward", made)


def scaled(name: str, by: float) -> AbstractContextManager[None]:
    def scale(state: State, microbatches: int) -> None:
        for key, gradient in state.gradients().items():
            if key == name:
                gradient.mul_(by)

    return gradients(scale)


def loses(microbatches: int) -> AbstractContextManager[None]:
    """The gradient of block 0 is lost in steps with so many microbatches."""

    def lose(state: State, number: int) -> None:
        for key, gradient in state.gradients().items():
            if number == microbatches and key.startswith("blocks.0."):
                gradient.zero_()

    return gradients(lose)


def of_others(tensors: str) -> AbstractContextManager[None]:
    """What a rank keeps without owning it: a little off after step 3."""

    def drift(state: State) -> None:
        if state.step == 3:
            kept, parts = getattr(state, tensors)(), state.parts()
            for name, tensor in kept.items():
                if not parts[name.removeprefix("exp_avg_sq.").removeprefix("exp_avg.")].owned:
                    tensor.mul_(1.001)

    return after_step(drift)


def of_buffers(by: float) -> AbstractContextManager[None]:
    """The routers' biases of the second rank, from step 1 on."""

    def drift(state: State) -> None:
        if state.mesh.axis("run").index == 1:
            for buffer in state.buffers().values():
                buffer.add_(by)

    return after_step(drift)


def shifted() -> AbstractContextManager[None]:
    """Pieces of directions come back one row too low."""
    made = lambda back: lambda self, wholes: {n: t.roll(1, 0) for n, t in back(self, wholes).items()}  # noqa: E731
    return put(Gathered, "back", made)


def figures(name: str) -> AbstractContextManager[None]:
    """A figure of the experts is a little off."""

    def made(finish: Any) -> Any:
        def finished(self: Balance) -> None:
            finish(self)
            self.figures[name] = self.figures[name] * 1.001

        return finished

    return put(Balance, "finish", made)


def times(by: float) -> Callable[[Any], Any]:
    """The function, with `by` times its result."""
    return lambda function: lambda *arguments: function(*arguments) * by


def moments_written(pieces: Any) -> Any:
    def written(state: State) -> Any:
        return [replace(one, tensor=one.tensor * 1.5) for one in pieces(state)]

    return written


def without_the_last(validate: Any) -> Any:
    """Validates without the rank's last microbatch."""
    return lambda state, sets: validate(state, [s._replace(microbatches=s.microbatches[:-1]) for s in sets])


def no_decay(arguments: Any) -> Any:
    def made(*given: Any) -> Any:
        found = arguments(*given)
        return found | {"weight_decay": dict.fromkeys(found["weight_decay"], 0.0)}

    return made


ATTENTION = "blocks.1.attention.out.weight"
MISTAKES: dict[str, tuple[str, list[str], str, Callable[[], AbstractContextManager[None]]]] = {
    "clip factor": ("dp=2", [], "moments", lambda: put(step, "clip_scale", times(1.01))),
    "no decay": ("dp=2", [], "weights", lambda: put(state_module, "updater_arguments", no_decay)),
    "rate": ("dp=2", [], "weights", lambda: put(step, "scheduled", times(1.01))),
    "a copy": ("dp=2", [], "copies", lambda: of_others("masters")),
    "a copy of moments": ("dp=2", [], "copies", lambda: of_others("moments")),
    "a copy, tp": ("tp=2", [], "copies", lambda: of_others("masters")),
    "a copy of buffers": ("dp=2,ep=2", ["model.balance=bias"], "copies", lambda: of_buffers(1e-6)),
    "moments": ("dp=2,zero=1", [], "moments", lambda: put(verify, "moment_pieces", moments_written)),
    "muon's pieces": ("tp=2", ["optim.name=muon"], "weights", shifted),
    "soap's pieces": ("tp=2", ["optim.name=soap"], "weights", shifted),
    "a gradient": ("dp=2", [], "gradients", lambda: scaled(ATTENTION, 1.0001)),
    "a gradient, bf16": ("dp=2", ["bf16"], "gradient_scale", lambda: scaled(ATTENTION, 1.02)),
    "a gradient, fp8": ("dp=2", ["fp8"], "gradient_scale", lambda: scaled(ATTENTION, 1.2)),
    "balance": ("dp=2,ep=2", [], "auxiliary", lambda: figures("aux_loss")),
    "load": ("dp=2,ep=2", [], "auxiliary", lambda: figures("expert_load_max")),
    "validation": ("dp=2", [], "validation", lambda: put(verify, "validate", without_the_last)),
    "one microbatch": ("pp=2", [], "moments", lambda: loses(1)),
    "a ramp": ("dp=2", ["train.batch_ramp=4:100"], "moments", lambda: loses(2)),
    "windows": (
        "dp=2",
        ["model.arch=mistral", "model.sliding_window=8", "model.window_ramp=4:100"],
        "loss",
        lambda: put(step, "set_windows", lambda _: lambda *given: None),
    ),
}
"""{name: (layout, overrides or the mode, the figure that must show it, the mistake)}."""


def mistaken(name: str, rank: int, world: int, recipe: Recipe, steps: int, folder: Path) -> None:
    with MISTAKES[name][-1]():
        side(rank, world, recipe, steps, folder)


@only("a copy of moments", "a copy of buffers", "moments", "one microbatch")
@pytest.mark.parametrize("name", MISTAKES)
def test_each_mistake_is_found(room, name):
    layout, sets, figure, _ = MISTAKES[name]
    mode = next((one for one in sets if one in PRECISIONS), "fp32")
    recipe = tiny(room, layout, *(one for one in sets if one != mode), mode=mode)
    place = room / "-".join(["moe" if "ep=" in layout else "llama", *sets])
    report = compared(recipe, part=partial(mistaken, name), folder=place, timeout_s=120)
    assert not report.figures[figure].passed, report


def rounded_otherwise(rank: int, world: int, recipe: Recipe, steps: int, folder: Path) -> None:
    """Gradients as another processor may round them: a tenth of what is allowed between gradients."""

    def add(state: State, microbatches: int) -> None:
        drawn = torch.Generator().manual_seed(state.step)
        for gradient in state.gradients().values():
            noise = torch.randn(gradient.shape, generator=drawn) * (
                gradient != 0
            )  # a sum of nothing is exact
            gradient.add_(noise, alpha=1e-6 * gradient.norm().item() / math.sqrt(gradient.numel()))

    with gradients(add):
        side(rank, world, recipe, steps, folder)


@only("adamw-gpt2")
@pytest.mark.parametrize(
    ("optimizer", "arch"),
    [
        ("adamw", "gpt2"), ("adafactor", "gpt2"), ("adafactor", "qwen2"), ("adafactor", "bert"), ("adamw", "llama"),
        *((name, "llama") for name in OPTIMIZERS if name != "adamw"),
    ],
)  # fmt: skip
def test_another_processors_rounding_is_no_mistake(tmp_path, optimizer, arch):
    """Adam moves an element whose gradient is 0 but for rounding by the whole rate, up or down."""
    sets = [f"optim.name={optimizer}", f"model.arch={arch}", "optim.lr=1e-2", "model.layers=2"]
    report = compared(tiny(tmp_path, "dp=2", *sets), part=rounded_otherwise, timeout_s=120)
    assert report.passed, report


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "sets"),
    [
        *(("tp=2", [f"model.arch={arch}", "optim.name=adafactor"]) for arch in ("gpt2", "qwen2", "bert")),
        *(
            (layout, ["model.arch=qwen3_next", "model.init_std=0.02"])
            for layout in ("tp=2", "cp=2", "dp=2,zero=3")
        ),
        ("tp=2", ["model.arch=qwen3_next", "optim.name=muon"]),  # its first gradients round by 3e-5
        *(("tp=2", [f"optim.name={name}"]) for name in ("soap", "adamw8bit", "muon")),
    ],
)
def test_layouts_round_otherwise(tmp_path, layout, sets):
    report = compared(tiny(tmp_path, layout, *sets, "optim.lr=1e-2"), timeout_s=300)
    assert report.passed, report


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "lion", "muon"])
def test_no_figure_is_judged_twice(tmp_path, optimizer):
    """What spikes are judged by are averages of loss and norm, which may be apart by more in a mode's first step."""
    report = compared(tiny(tmp_path, "tp=2", f"optim.name={optimizer}", mode="fp8"))
    assert report.passed, report


def test_what_rounding_may_do_is_taken_off_each_element():
    b = torch.full((4, 8), 1.0)
    reach = torch.full_like(b, 1e-7)
    reach[0, 0] = 0.1
    a = b.clone()
    a[0, 0] += 0.2
    assert beyond(a, b, reach).norm() == 0
    a[1, 1] += 0.2
    assert beyond(a, b, reach).norm().item() == pytest.approx(0.2, rel=1e-3)
    assert beyond(a, b, None).norm() > 0.28
    a[2, 2] = math.nan
    assert beyond(a, b, reach).norm().isnan()


@pytest.mark.parametrize("optimizer", ["adamw", "soap"])
def test_disturbed_references_compute_with_other_weights(tmp_path, optimizer):
    """In each step, also where they go on from a layout's weights."""
    recipe = tiny(tmp_path, "dp=1", f"optim.name={optimizer}", "model.layers=1", "train.global_batch_size=2")
    text = prepare(recipe)
    recipe = resolve(recipe, vocab_size=text.vocab_size)
    sides = [tmp_path / name for name in ("layout", "exact", "disturbed")]
    with mock.patch.object(differences, "disturb"):  # of gradients
        for side, reference, sign in zip(sides, (False, True, True), (0, 0, 1), strict=True):
            compute(recipe, text, 2, side, alone(), reference=reference, disturbed=sign)
    found = dict(differences.between(sides[2], sides[1], together=False))
    assert all(found["gradients", name] for name in ("blocks.0.mlp.down.weight", "embed.weight"))
    assert found["grad_norm", "step 1"]
    assert found["grad_norm", "step 2"]


def test_elements_without_a_gradient_are_not_disturbed():
    gradient = torch.randn(6, 16, dtype=torch.float64)
    gradient[2] = 0
    gradient[3, 3] = 0
    up, down = gradient.clone(), gradient.clone()
    disturb({"w": up}, 1)
    disturb({"w": down}, -1)
    assert torch.equal(up[2], gradient[2])
    assert up[3, 3] != 0, "a zero among others is rounding"
    torch.testing.assert_close((up + down) / 2, gradient)
    assert ((up - gradient).norm() / gradient.norm()).item() == pytest.approx(1e-5, rel=1e-3)


def test_the_compared_steps_contain_every_number_of_microbatches_and_what_comes_later(tmp_path):
    recipe = resolve(tiny(tmp_path, "pp=2", "train.batch_ramp=2:100+4:100"), vocab_size=300)
    assert sizes(recipe, 3) == [2, 2, 2, 8, 4, 1]
    assert sizes(resolve(tiny(tmp_path, "dp=2"), vocab_size=300), 2) == [8, 8]
    for name, key in (("soap", "basis_every"), ("sophia", "estimate_every")):
        changed, notes = prepared(fivefold.load("quickstart", [f"optim.name={name}"]), "dp=2", 3, "fp32")
        assert getattr(changed.optim, key) == 2
        assert any(key in note for note in notes)


class Unequal:
    """Batches whose sequences have unequally many targets."""

    uneven = True

    def batch(self, i: int, rows: range) -> tuple[np.ndarray, np.ndarray]:
        tokens = np.stack([np.random.default_rng(row).integers(0, 200, 17) for row in rows])
        targets = tokens[:, 1:].copy()
        for place, row in enumerate(rows):
            targets[place, : 2 * row] = NOT_COUNTED
        return tokens[:, :-1], targets

    def counted(self, i: int, size: int) -> int:
        return int((self.batch(i, range(size))[1] >= 0).sum())


@pytest.mark.parametrize(
    "sets", [[], [*MOE, "model.balance=aux", "model.z_loss_weight=0.01"]], ids=["dense", "moe"]
)
def test_the_references_step_is_plain_pytorchs(tmp_path, sets):
    """What both sides share: the weights of unequal microbatches, the factors of the balance terms."""
    recipe = resolve(tiny(tmp_path, "dp=1", "train.microbatch_size=2", *sets), vocab_size=200)
    state, found = reference_state(recipe, alone()), dict[str, Tensor]()
    share = share_of(Unequal(), 0, 8, 2, state.mesh)
    keep = lambda: found.update({n: g.clone() for n, g in state.gradients().items()})  # noqa: E731
    done = take_step(state, recipe, share, inspect=keep)
    model: Any = build(
        recipe.model, device=torch.device("cpu"), seed=recipe.train.seed
    ).eval()  # no terms of its own
    hidden, routed = list[Tensor](), list[Tensor]()
    model.norm.register_forward_hook(lambda module, given, made: hidden.append(made))
    for module in model.modules():
        if isinstance(module, Router):
            module.register_forward_hook(lambda module, given, made: routed.append(made[-1]))
    nats, terms = torch.zeros(()), torch.zeros(())
    for one in share:
        model(one.inputs, one.targets)
        logits = hidden.pop() @ model.embed.weight.t()
        nats = nats + F.cross_entropy(
            logits.flatten(0, 1), one.targets.flatten(), ignore_index=NOT_COUNTED, reduction="sum"
        )
        for scores in routed:
            E, K = 8, 2
            load = F.one_hot(scores.topk(K).indices, E).sum((0, 1)) / (len(scores) * K)
            terms = terms + recipe.model.aux_loss_weight * E * (
                load * scores.softmax(-1).mean(0)
            ).sum() / len(share)
            terms = terms + 0.01 * scores.logsumexp(-1).square().mean() / len(share)
        routed.clear()
    loss = nats / Unequal().counted(0, 8)
    (loss + terms).backward()
    assert done.loss == pytest.approx(loss.item(), rel=1e-6)
    for name, p in model.named_parameters():
        assert (found[name] - p.grad).norm() < 1e-5 * p.grad.norm(), name


def test_what_is_not_finite_or_missing_is_not_passed():
    assert Figure(0.0, "x", 0.0).passed
    assert not Figure(math.inf, "x", 1.0).passed
    worst = Figure().worse(Figure(0.0, "a", 0.0)).worse(Figure(1e-9, "b", 0.0)).worse(Figure(0.5, "c", 1.0))
    assert worst.worst == "b", "a difference where none is allowed is the worst"


def test_what_is_changed_for_the_comparison_is_said(tmp_path):
    recipe = tiny(tmp_path, "dp=2", "model.dropout=0.1", "precision.reduce=bf16")
    assert recipe.model.dropout == 0
    original = fivefold.load("quickstart", ["model.dropout=0.1", "precision.reduce=bf16"])
    changed, notes = prepared(original, "dp=2", 3, "fp32")
    assert changed.precision.reduce == "fp32"
    assert ["dropout" in notes[0], "summed in fp32" in notes[1]] == [True, True]
    with pytest.raises(UserError, match="must be fp32 or tf32 or bf16"):
        prepared(original, None, 3, "fp4")


def run(folder: Path, log: str, *arguments: str, **environment: str) -> Launched:
    tiny(folder, "dp=1")  # makes the text
    sets = [f"--set={o}" for o in (*TINY, f"data.source={folder}/text.txt", f"data.cache={folder}/cache")]
    return command(folder / log, "verify", "quickstart", *sets, *arguments, **environment)


def test_command(tmp_path):
    done = run(tmp_path, "right", "--layout", "dp=2", "--json", "--steps", "2")
    assert done.wait(120) == 0, done.said
    report = json.loads(done.said[done.said.index("{") : done.said.rindex("}") + 1])
    assert report["passed"] is True
    assert report["layout"] == "dp=2"
    assert report["steps"] == 2
    assert set(report["tolerance"]) == {*TOLERANCE}
    for kind, tolerance in report["tolerance"].items():
        assert report[kind]["max_rel"] <= tolerance
    assert report["gradients"]["worst"]
    done = run(tmp_path, "wrong", "--layout", "dp=64")
    assert done.wait(120) == 2
    assert "global_batch_size" in done.said
    assert "Traceback" not in done.said


def test_command_under_a_launcher(tmp_path):
    """Ranks of torchrun, by their variables, are used; the first compares and prints."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    names = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        run(tmp_path, rank, "--layout", "dp=2", RANK=rank, LOCAL_RANK=rank, GLOO_SOCKET_IFNAME="lo", **names)
        for rank in "01"
    ]
    assert [one.wait(120) for one in ranks] == [0, 0], ranks[0].said
    assert [one.said.count("dp=2 computes the same as one process") for one in ranks] == [1, 0]


def test_a_failed_check_exits_with_1(tmp_path, monkeypatch, capsys):
    """The command line's part, with a report that says no."""
    import fivefold.train.verify as module
    from fivefold.cli.main import main

    report = module.Report("dp=2", 2, "fp32", 3, gradients=Figure(0.5, "embed.weight", 1e-5))
    monkeypatch.setattr(module, "verify", lambda *_, **__: report)
    with pytest.raises(SystemExit) as stop:
        main(["verify", "quickstart", "--layout", "dp=2"])
    assert stop.value.code == 1
    printed = capsys.readouterr()
    assert "WRONG embed.weight" in printed.out
    assert "does not compute the same as one process: gradients" in printed.err
