"""The trainer: it learns; data parallelism and accumulation compute what one process computes; resuming is exact."""

import json
import math
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

import numpy as np
import pytest
import stored
import torch
from launched import command
from marks import only, slow
from pool_runs import after_each_step, assert_same_tensors, lines, ranks_of, train_rank
from ranks import run_ranks

from fivefold.checkpoint import keep, store
from fivefold.data import prepare
from fivefold.errors import UserError
from fivefold.host import machine
from fivefold.kernels import native
from fivefold.parallel.mesh import axis_between
from fivefold.recipe import OptimSection, Recipe, change, count_parameters, load, resolve
from fivefold.sharding.layout import Layout
from fivefold.step.state import build_state
from fivefold.step.step import forward_backward
from fivefold.train.job import Job
from fivefold.train.loop import train_loop
from fivefold.train.run import run_rank
from fivefold.train.share import share_of
from fivefold.train.start import run_command
from fivefold.train.user_hooks import brings

TINY = [
    "model.layers=2", "model.dim=32", "model.heads=4", "model.kv_heads=2", "model.seq_len=16",
    "data.tokenizer=bytes", "train.global_batch_size=8", "train.microbatch_size=2", "train.steps=6",
    "train.val_sequences=8", "train.sample_tokens=8", "train.sample_every=0", "optim.lr=1e-2",
    "observe.tracker=none", "layout.dp_replicate=1",
]  # fmt: skip


@pytest.fixture
def text(tmp_path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    return path


def tiny(text: Path, *overrides: str) -> Recipe:
    base = load(
        "quickstart",
        [*TINY, f"data.source={text}", f"data.cache={text.parent / 'cache'}", "data.val_fraction=0.1"],
    )
    return change(base, overrides)


def stopped_rank(rank: int, world: int, recipe: Recipe, out: Path, stop_at: int) -> int | None:
    """A run to whose last rank a SIGTERM comes while step `stop_at` is computed."""
    data = prepare(recipe)
    if rank == world - 1:
        before = data.train.rows
        calls = iter(range(10**6))

        def rows(starts: np.ndarray, length: int) -> np.ndarray:
            if next(calls) // (8 // world // 2) == stop_at:
                os.kill(os.getpid(), signal.SIGTERM)
            return before(starts, length)

        object.__setattr__(data.train, "rows", rows)
    return train_rank(rank, world, recipe, out, data=data)


@pytest.mark.slow
def test_pulse(text, tmp_path):
    """A tiny model learns a sentence by heart in seconds."""
    recipe = tiny(
        text, "train.steps=60", "model.seq_len=48", "train.global_batch_size=16", "train.val_every=60"
    )
    train_rank(0, 1, recipe, tmp_path / "run")
    losses = lines(tmp_path / "run", "loss")
    assert losses[0] > 4.5
    assert losses[-1] < 0.3
    assert lines(tmp_path / "run", "val_loss")[-1] < 0.3
    assert 0 < lines(tmp_path / "run", "val_bits_per_byte")[-1] < 0.3 / math.log(2) * 1.01


@pytest.mark.parametrize("arch", ["bert", *slow("gpt2")])
def test_other_architectures_learn(text, tmp_path, arch):
    train_rank(0, 1, tiny(text, f"model.arch={arch}", "train.steps=25", "model.kv_heads=4"), tmp_path / "run")
    losses = lines(tmp_path / "run", "loss")
    assert sum(losses[-3:]) / 3 < losses[0] - 1


@only("2-bf16", "1-fp32")
@pytest.mark.parametrize("mode", ["fp32", "bf16"])
@pytest.mark.parametrize("world", [1, 2])
def test_resume_is_bit_for_bit(text, tmp_path, mode, world):
    """Stopped by SIGTERM and resumed: weights, moments and losses equal an uninterrupted run's."""
    recipe = tiny(text, f"precision.mode={mode}", f"layout.dp_replicate={world}", "model.dropout=0.1")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run_ranks(world, train_rank, recipe, whole) == [None] * world
    stopped = run_ranks(world, stopped_rank, recipe, parts, 2)
    assert stopped == [signal.SIGTERM] * world
    at = store.latest(parts).name
    assert "step-00000001" <= at < "step-00000006", at
    assert run_ranks(world, train_rank, recipe, parts, True) == [None] * world
    a, b = stored.load(store.latest(whole)), stored.load(store.latest(parts))
    assert a.meta["step"] == b.meta["step"] == 6
    assert_same_tensors(a.model, b.model)
    assert_same_tensors(a.optimizer, b.optimizer)
    assert len(a.optimizer) == 2 * len(a.model)
    assert lines(whole, "loss") == lines(parts, "loss")
    assert lines(whole, "grad_norm") == lines(parts, "grad_norm")


def on_other_machines(rank: int, world: int, recipe: Recipe, out: Path, tables: list[list[str]]) -> list[str]:
    """A run, resumed if it can be, whose ranks' machines have these tables of libraries. Returns what held on this
    rank."""
    held = list[list[str]]()
    own = native.Table(f"processor {rank}, 0", tables[rank])
    with (
        patch.object(native, "machines", lambda threads: own),
        after_each_step(lambda state, when: held.append([*native.table().onednn])),
    ):
        train_rank(rank, world, recipe, out, resume=True)
        assert native.table() == own, "not after the run"
    assert held == held[:1] * len(held)
    return held[0]


def test_all_ranks_multiply_as_the_first_does_and_so_does_a_resumed_run(text, tmp_path, capsys):
    """Though their machines differ, and though the first one has changed, which a line says."""
    mine, other = ["float32, small: output"], ["float32, small: weight gradient"]
    recipe = tiny(text, "precision.mode=fp32", "train.steps=2", "optim.schedule=constant")
    two = change(recipe, ["layout.dp_replicate=2"])
    assert run_ranks(2, on_other_machines, two, tmp_path / "run", [mine, other]) == [mine, mine]
    facts = {"processor": "processor 0, 0", "onednn": mine, "triton": []}
    assert json.loads((tmp_path / "run" / "products.json").read_text()) == facts
    with patch.object(native, "place", lambda: "processor 0, 0"):
        on_other_machines(0, 1, change(recipe, ["train.steps=3"]), tmp_path / "run", [other])
        assert "processor 0" not in capsys.readouterr().out
    assert on_other_machines(0, 1, change(recipe, ["train.steps=4"]), tmp_path / "run", [other]) == mine
    said = "this run began on another processor (processor 0), so its last bits may differ here"
    assert said in capsys.readouterr().out
    assert store.Reader(store.latest(tmp_path / "run")).meta["products"] == facts


def gradients(rank: int, world: int, recipe: Recipe, bucket_bytes: int) -> tuple[float, dict]:
    """Loss and gradients of batch 0, on `world` ranks."""
    from fivefold.data import Batches
    from fivefold.parallel.data import DataParallel, GradientSum

    data = prepare(recipe)
    recipe = resolve(recipe, vocab_size=data.vocab_size)
    ranks = ranks_of(rank, world)
    state = build_state(recipe, ranks)
    (replica,) = state.parallel.replicas
    assert isinstance(replica, DataParallel)
    replica.sum = GradientSum(replica, state.mesh.sums("batch"), torch.float32, bucket_bytes)
    batches = Batches(data.train, recipe.model.seq_len, 8, seed=0)
    loss = forward_backward(state, share_of(batches, 0, 8, recipe.train.microbatch_size or 1, state.mesh), 0)
    return loss.item(), {name: grad.clone() for name, grad in state.gradients().items()}


@only("llama-*-2-*", "gpt2-20000-1-4")
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("microbatch", [1, 2])
@pytest.mark.parametrize("bucket_bytes", [1, 20_000, 1 << 30])
@pytest.mark.parametrize("arch", ["llama", "gpt2"])
def test_data_parallel_gradients_are_those_of_one_process(text, world, microbatch, bucket_bytes, arch):
    recipe = tiny(
        text,
        "precision.mode=fp32",
        f"model.arch={arch}",
        "model.kv_heads=4",
        f"train.microbatch_size={microbatch}",
    )
    loss, wanted = gradients(0, 1, change(recipe, ["train.microbatch_size=8"]), 1 << 30)
    answers = run_ranks(world, gradients, change(recipe, [f"layout.dp_replicate={world}"]), bucket_bytes)
    assert sum(answer[0] for answer in answers) == pytest.approx(loss, rel=1e-6)
    for _, got in answers:
        for name, gradient in wanted.items():
            error = (got[name] - gradient).norm() / gradient.norm()
            assert error < 1e-5, f"{name}: {error:.2e}"
            assert torch.equal(got[name], answers[0][1][name]), "all ranks hold the same bits"


@pytest.mark.parametrize("how", ["ring", "halving_doubling"])
def test_buckets_are_summed_by_other_algorithms(text, how):
    recipe = tiny(text, "precision.mode=fp32", "model.kv_heads=4", "train.microbatch_size=2")
    _, wanted = gradients(0, 1, change(recipe, ["train.microbatch_size=8"]), 1 << 30)
    recipe = change(recipe, ["layout.dp_replicate=4", f"layout.all_reduce={how}"])
    first, second = (run_ranks(4, gradients, recipe, 20_000) for _ in range(2))
    for name, gradient in wanted.items():
        error = (first[0][1][name] - gradient).norm() / gradient.norm()
        assert error < 1e-5, f"{name}: {error:.2e}"
        for _, got in (*first, *second):
            assert torch.equal(got[name], first[0][1][name]), "the same bits every time and on every rank"


@pytest.mark.parametrize("world", [2, 4])
def test_data_parallel_training_is_that_of_one_process(text, tmp_path, world):
    recipe = tiny(text, "precision.mode=fp32", "train.microbatch_size=1")
    train_rank(0, 1, recipe, tmp_path / "one")
    run_ranks(world, train_rank, change(recipe, [f"layout.dp_replicate={world}"]), tmp_path / "many")
    one, many = stored.load(store.latest(tmp_path / "one")), stored.load(store.latest(tmp_path / "many"))
    for name, weight in one.model.items():
        assert torch.allclose(weight, many.model[name], rtol=0, atol=2e-5), name
    assert lines(tmp_path / "one", "loss") == pytest.approx(lines(tmp_path / "many", "loss"), rel=1e-5)
    assert lines(tmp_path / "one", "grad_norm") == pytest.approx(
        lines(tmp_path / "many", "grad_norm"), rel=1e-4
    )
    assert lines(tmp_path / "one", "val_loss") == pytest.approx(
        lines(tmp_path / "many", "val_loss"), rel=1e-5
    )


def count_reductions(rank: int, world: int, recipe: Recipe) -> list[int]:
    """Bytes of each all-reduce that one step of forward and backward issues."""
    import torch.distributed as dist

    sizes, reduce = [], dist.all_reduce

    def counted(tensor, *how, **options):
        if tensor.is_floating_point():  # not the check that ranks own each element once
            sizes.append(tensor.nbytes)
        return reduce(tensor, *how, **options)

    dist.all_reduce = counted
    try:
        gradients(rank, world, recipe, 1 << 30)
    finally:
        dist.all_reduce = reduce
    return sizes


def test_accumulation_communicates_once(text):
    """Four microbatches, one bucket: one all-reduce of exactly the gradient's bytes."""
    recipe = tiny(text, "train.microbatch_size=1", "layout.dp_replicate=2")
    data = prepare(recipe)
    model = resolve(recipe, vocab_size=data.vocab_size).model
    assert run_ranks(2, count_reductions, recipe) == [[4 * count_parameters(model)]] * 2


def test_bf16_keeps_fp32_masters(text):
    """An update far below bf16's resolution must not be lost."""
    recipe = tiny(text, "precision.mode=bf16")
    state = build_state(resolve(recipe, vocab_size=257), ranks_of(0, 1))
    (replica,) = state.parallel.replicas
    name = "blocks.0.mlp.down.weight"
    working = dict(state.module.named_parameters())[name]
    assert working.dtype == torch.bfloat16
    assert replica.masters[name].dtype == torch.float32
    before = replica.masters[name].clone()
    for _ in range(10):
        replica.masters[name].mul_(1 + 1e-4)
        replica.refresh()
    assert torch.allclose(replica.masters[name], before * (1 + 1e-4) ** 10)
    assert torch.equal(working, replica.masters[name].bfloat16())


class Drawing(torch.nn.Module):
    """Notes the random numbers of each forward."""

    def __init__(self):
        super().__init__()
        self.weight, self.draws = torch.nn.Parameter(torch.ones(1)), []

    def forward(self, inputs, targets):
        self.draws.append(torch.rand(1).item())
        return (self.weight * inputs.sum()).sum()


def draws(rank, world, recipe) -> list[float]:
    """Of three microbatches in each of the steps 0, 1 and 1 again."""
    module = Drawing()
    state = build_state(resolve(recipe, vocab_size=257), ranks_of(rank, world), module)
    for state.step in (0, 1, 1):
        forward_backward(state, [(torch.ones(1, 2), torch.ones(1, 2))] * 3, 5)
    return module.draws


def test_random_numbers_depend_on_the_place_in_the_run(text):
    """On step, microbatch and rank: none are drawn twice. The same place draws the same ones."""
    found = run_ranks(2, draws, tiny(text, "layout.dp_replicate=2", "train.microbatch_size=1"))
    assert all(of_rank[3:6] == of_rank[6:] for of_rank in found)
    assert len({draw for of_rank in found for draw in of_rank[:6]}) == 12


def test_a_parameter_without_gradient_has_zeros(text):
    """Its place in the flat buffer must hold zeros, not the last step's gradient."""

    class Half(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.used = torch.nn.Parameter(torch.ones(3))
            self.unused = torch.nn.Parameter(torch.ones(2))

        def forward(self, inputs, targets):
            return (self.used * inputs.sum()).sum()

    state = build_state(resolve(tiny(text), vocab_size=257), ranks_of(0, 1), Half())
    for gradient in state.gradients().values():
        gradient.fill_(7.0)
    forward_backward(state, [(torch.ones(1, 2), torch.ones(1, 2))] * 2, 0)
    assert state.gradients()["unused"].tolist() == [0, 0]
    assert state.gradients()["used"].tolist() == [2, 2, 2]


def test_divergence_is_an_error_and_destroys_nothing(text, tmp_path):
    class Diverged(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3))

        def forward(self, inputs, targets):
            return (self.weight * float("nan")).sum()

    recipe, module = tiny(text), Diverged()
    with pytest.raises(UserError, match="not finite in 5 steps in a row"):
        run_command(recipe, out=tmp_path / "run", module=module)
    assert module.weight.isfinite().all()


def test_a_version_of_torch_that_nobody_tried_gets_one_line(text, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(machine, "TORCH", ("2.0", "2.1"))
    out = run_command(tiny(text, "train.steps=1"), out=tmp_path / "run", module=OnceNotFinite())
    assert capsys.readouterr().out.count("has not been tried; Fivefold was tested with 2.0 to 2.1\n") == 1
    assert len(lines(out, "loss")) == 1


class OnceNotFinite(torch.nn.Module):
    """Its third loss is not finite: all of it, or with `hidden` the loss alone and no gradient."""

    def __init__(self, hidden: bool = False):
        super().__init__()
        self.weight, self.calls, self.hidden = torch.nn.Parameter(torch.ones(3)), 0, hidden

    def forward(self, inputs, targets):
        self.calls += 1
        loss = (self.weight * inputs.float().mean()).square().sum()
        if self.calls != 3:
            return loss
        return loss + torch.tensor(torch.inf) if self.hidden else loss * torch.nan


@pytest.mark.parametrize("hidden", [False, True])
def test_a_step_that_is_not_finite_is_skipped(text, tmp_path, hidden, capsys):
    """The device decides it; the host learns of it a step later, and every step is written down."""
    recipe = tiny(text, "train.microbatch_size=8", "checkpoint.every=2", "checkpoint.keep_last=3")
    out = run_command(recipe, out=tmp_path / "run", module=OnceNotFinite(hidden))
    losses = lines(out, "loss")
    assert [loss is not None for loss in losses] == [True, True, False, True, True, True], "JSON has no NaN"
    assert "step 3: loss or gradient is not finite; the update is skipped" in capsys.readouterr().out
    for folder, updates in zip(store.checkpoints(out), (2, 3, 5), strict=True):
        found = stored.load(folder)
        assert (found.meta["updates"], found.meta["skipped"]) == (updates, 0)
        assert all(tensor.isfinite().all() for tensor in (*found.model.values(), *found.optimizer.values()))


class Recorder:
    """Hooks of the loop that write down what is called, and fail where there are no more batches."""

    def __init__(self, batches, due=0, wanted=0):
        self.batches, self.calls, self.due, self.wanted = iter(batches), [], due, wanted

    def next_batch(self):
        return [next(self.batches)], 0.0

    def stop_wanted(self):
        return False

    def save_due(self, step):
        return step == self.due

    def save_wanted(self):
        return self.calls.count("begin") == self.wanted

    def begin_step(self, microbatches):
        self.calls.append("begin")

    def inspect(self):
        return None

    def end_step(self):
        return {}

    def compare(self, step):
        return None

    def record(self, line):
        self.calls.append(f"record {line['step']}")

    def __getattr__(self, name):  # validate, sample, save
        return lambda step, **_: self.calls.append(f"{name} {step}")


@pytest.mark.parametrize("saves", [{"due": 3}, {"wanted": 2}])
def test_a_step_is_read_while_the_next_one_runs(text, saves):
    """So that a GPU does not wait for the host. Before a checkpoint, and after an error, nothing is left unread. That
    one is due by time is learned a step late."""
    recipe = resolve(tiny(text, "train.microbatch_size=8", "train.val_every=100"), vocab_size=257)
    state = build_state(recipe, ranks_of(0, 1))
    tokens = torch.ones(8, 16, dtype=torch.int64)
    hooks: Any = Recorder([(tokens, tokens)] * 5, **saves)
    with pytest.raises(StopIteration):
        train_loop(state, recipe, hooks, behind=1)
    first = ["begin", "begin", "record 1", "begin", "record 2", "record 3", "save 3"]
    assert hooks.calls == [*first, "begin", "begin", "record 4", "record 5"]


def test_run_folder_and_its_errors(text, tmp_path, monkeypatch):
    recipe = tiny(text, "train.steps=2", "checkpoint.every=1", "checkpoint.keep_last=1")
    out = run_command(recipe, out=tmp_path / "run")
    for name in ("recipe.toml", "machine.json", "metrics.jsonl", "report.html", "tokenizer.json"):
        assert (out / name).is_file(), name
    assert [p.name for p in (out / "checkpoints").iterdir()] == ["step-00000002"]
    with pytest.raises(UserError, match="already holds a run"):
        run_command(recipe, out=out)
    with pytest.raises(UserError, match="is not a run folder"):
        run_command(recipe, out=tmp_path / "other", resume=True)
    with pytest.raises(UserError, match="does not fit the recipe"):
        run_command(change(recipe, ["model.dim=64", "train.steps=3"]), out=out, resume=True)
    monkeypatch.chdir(tmp_path)
    again = run_command(load(str(out / "recipe.toml")))
    assert again == Path("runs/run-1")
    assert lines(again, "loss") == lines(out, "loss"), "the saved recipe starts the same run"


def test_forked_ranks_and_their_errors(text, tmp_path):
    """`--nproc 2`: real ranks of the launcher; what goes wrong in a rank is one clear error here."""

    def fivefold(code: int, *arguments: str) -> str:
        sets = [f"--set={o}" for o in (*TINY, f"data.source={text}", f"data.cache={text.parent / 'cache'}")]
        (log := tmp_path / "printed").unlink(missing_ok=True)
        done = command(log, "train", "quickstart", *sets, *arguments)
        assert done.wait(120) == code, done.said
        assert "Traceback" not in done.said
        return done.said

    out = tmp_path / "run"
    assert "2 ranks on CPU" in fivefold(0, "--nproc", "2", "--out", str(out))
    assert len(lines(out, "loss")) == 6
    assert "global_batch_size" in fivefold(2, "--nproc", "17", "--out", str(tmp_path / "many"))
    next(store.latest(out).glob("model-*")).write_bytes(b"broken")
    said = fivefold(2, "--nproc", "2", "--out", str(out), "--resume", "--set=train.steps=8")
    assert "is damaged" in said


def test_resume_on_another_number_of_ranks(text, tmp_path):
    """One recipe, fp32: the losses go on as they would have, to rounding; also where the power failed, which left zeros
    in metrics.jsonl and half of tokenizer.json."""
    recipe = tiny(text, "precision.mode=fp32", "train.microbatch_size=1")
    train_rank(0, 1, recipe, tmp_path / "whole")
    train_rank(0, 1, change(recipe, ["train.steps=3", "optim.schedule=constant"]), tmp_path / "parts")
    two = change(recipe, ["layout.dp_replicate=2", "optim.schedule=constant"])
    tokenizer = (tmp_path / "parts" / "tokenizer.json").read_text()
    (tmp_path / "parts" / "tokenizer.json").write_text(tokenizer[: len(tokenizer) // 2])
    with (tmp_path / "parts" / "metrics.jsonl").open("ab") as metrics:
        metrics.write(bytes(64))
    run_ranks(2, train_rank, two, tmp_path / "parts", True)
    assert (tmp_path / "parts" / "tokenizer.json").read_text() == tokenizer
    train_rank(0, 1, change(recipe, ["optim.schedule=constant"]), tmp_path / "constant")
    assert lines(tmp_path / "parts", "loss") == pytest.approx(lines(tmp_path / "constant", "loss"), rel=1e-5)


def test_resume_refuses_what_would_be_another_run(text, tmp_path):
    recipe, out = tiny(text, "train.steps=2", "data.tokenizer=chars"), tmp_path / "run"
    train_rank(0, 1, recipe, out)
    for changed, named in (
        ("train.seed=1", "train.seed"),
        ("train.global_batch_size=4", "global_batch_size"),
    ):
        with pytest.raises(UserError, match=named):
            train_rank(0, 1, change(recipe, [changed, "train.steps=3"]), out, True)
    with pytest.raises(UserError, match="set at least 2"):
        train_rank(0, 1, change(recipe, ["train.steps=1"]), out, True)
    tokenizer = (out / "tokenizer.json").read_text()
    text.write_text(text.read_text() + "ZYX" * 50)
    with pytest.raises(UserError, match=r"the data changed since .*cannot resume exactly"):
        train_rank(0, 1, change(recipe, ["train.steps=3"]), out, True)
    assert (out / "tokenizer.json").read_text() == tokenizer


def test_fewer_validation_sequences_than_ranks(text, tmp_path):
    recipe = tiny(
        text, "train.val_sequences=1", "layout.dp_replicate=2", "train.val_every=1", "train.steps=2"
    )
    assert run_ranks(2, train_rank, recipe, tmp_path / "run") == [None, None]
    assert len(lines(tmp_path / "run", "val_loss")) == 2


class Counting(torch.nn.Module):
    """A user's module with a buffer; targets may come in any integer dtype."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(16, 16)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs, targets):
        self.calls += self.training
        return torch.nn.functional.cross_entropy(self.table(inputs).flatten(0, 1), targets.flatten())


class Ones:
    def batch(self, i, rows):
        ids = np.full((len(rows), 16), i % 16, dtype=np.int32)
        return ids, (ids + 1) % 16


class Talking(Counting):
    """It talks over a group of its own, which the mesh does not know."""

    def forward(self, inputs, targets):
        loss = super().forward(inputs, targets)
        torch.distributed.all_reduce(loss.detach().clone(), group=self.group)
        return loss


def talking_rank(rank: int, world: int, recipe: Recipe, out: Path) -> int | None:
    torch.manual_seed(0)
    module = Talking()
    # not by torch.distributed.new_group: it counts groups to name them, and ranks of a pool may have made others before
    module.group = axis_between("talk", range(world), ranks_of(rank, world)).group
    job = Job(resolve(recipe, vocab_size=16), out, None, module, Ones(), Ones())
    return run_rank(job, ranks_of(rank, world))


def test_own_module_may_talk_over_a_group_of_its_own(text, tmp_path):
    recipe = tiny(text, "layout.dp_replicate=2", "train.steps=1")
    assert run_ranks(2, talking_rank, recipe, tmp_path) == [None, None]


def test_own_module_is_resumed_with_its_buffers(text, tmp_path):
    recipe, module = tiny(text, "train.steps=2"), Counting()
    run_command(recipe, out=tmp_path / "run", module=module, batches=Ones())
    assert module.calls == 2 * 4, "four microbatches a step"
    again = Counting()
    run_command(
        change(recipe, ["train.steps=3"]), out=tmp_path / "run", resume=True, module=again, batches=Ones()
    )
    assert again.calls == 3 * 4
    run_command(recipe, out=tmp_path / "same", module=again, batches=Ones())  # the same object, a second time


class Masked(Counting):
    """Its loss depends on its buffers: a causal mask of -inf, one of the lowest number, and one that no checkpoint
    has."""

    def __init__(self, value: complex = -torch.inf) -> None:
        super().__init__()
        mask = torch.full((16, 16), value).triu(1)
        self.register_buffer("mask", mask)
        self.register_buffer("low", mask.real.bfloat16().nan_to_num())
        self.register_buffer("unsaved", mask.clone(), persistent=False)

    def forward(self, inputs, targets):
        weights = sum(m.float().softmax(1) for m in (self.mask, self.low, self.unsaved))
        out = weights @ self.table(inputs)
        self.calls += self.training
        return torch.nn.functional.cross_entropy(out.flatten(0, 1), targets.flatten())


def falling(step: int, steps: int) -> float:
    return 1e-3 * (1 - step / steps)


LONGER = {  # what depends on the length of the run, and what does not
    "cosine": (["optim.schedule=cosine"], True),
    "linear": (["optim.schedule=linear"], True),
    "linear to 0": (["optim.schedule=linear", "optim.min_lr=0"], True),
    "wsd": (["optim.schedule=wsd"], True),
    "constant": (["optim.schedule=constant"], False),
    "restarts": (["optim.schedule=restarts", "optim.restart_steps=3"], False),
    "one's own": ([], True),
}


def test_every_schedule_is_a_case():
    assert set(get_args(OptimSection.model_fields["schedule"].annotation)) <= LONGER.keys()


@only("wsd", "constant")
@pytest.mark.parametrize("name", LONGER)
def test_a_longer_run_says_how_its_rate_jumps(text, tmp_path, capsys, name):
    sets, depends = LONGER[name]
    own = brings(schedule=falling if name == "one's own" else None)
    recipe = tiny(text, "train.steps=4", "optim.warmup_steps=1", "optim.lr=1e-3", *sets)
    out = run_command(recipe, out=tmp_path / "run", brings=own)
    again = partial(run_command, out=out, resume=True, brings=own)
    again(recipe)
    assert "the learning rate goes" not in capsys.readouterr().out, "nothing is longer"
    again(change(recipe, ["train.steps=8"]))
    said = capsys.readouterr().out
    assert ("the learning rate goes" in said) == depends
    before, after = lines(out, "lr")[3:5]
    assert (f"the learning rate goes from {before:.2e} to {after:.2e}, as" in said) == depends


def masked_rank(rank: int, world: int, recipe: Recipe, out: Path, resume: bool) -> int | None:
    torch.manual_seed(0)
    job = Job(resolve(recipe, vocab_size=16), out, module=Masked(), batches=Ones(), resume=resume)
    return run_rank(job, ranks_of(rank, world))


def test_own_module_is_resumed_with_infinite_and_unsaved_buffers(text, tmp_path):
    """Bit for bit."""
    recipe = tiny(text, "train.steps=2", "layout.dp_replicate=2", "optim.schedule=constant")
    longer = change(recipe, ["train.steps=4"])
    run_ranks(2, masked_rank, longer, tmp_path / "whole", False)
    run_ranks(2, masked_rank, recipe, tmp_path / "resumed", False)
    run_ranks(2, masked_rank, longer, tmp_path / "resumed", True)
    whole, found = (store.Reader(store.latest(tmp_path / run)) for run in ("whole", "resumed"))
    assert found.manifest.files == whole.manifest.files
    assert {"mask", "low", "calls"} == set(found.names("model")) - {"table.weight"}
    assert keep.verify(found.folder) == ""
    assert bool((stored.load(found.folder).model["mask"] == Masked().mask).all())


def test_a_buffer_that_no_checkpoint_holds_is_refused_before_anything_is_trained(text, tmp_path):
    for value, why in ((torch.nan, "holds NaN"), (1j, "is of torch.complex64")):
        with pytest.raises(UserError, match=rf"Masked: the buffer mask {why}, .*persistent=False"):
            run_command(tiny(text), out=tmp_path / "run", module=Masked(value=value), batches=Ones())
    assert not (tmp_path / "run").exists()


class Spoiled(Counting):
    """A buffer turns into NaN in the second step."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, inputs, targets):
        loss = super().forward(inputs, targets)
        self.mean[1] = torch.nan if self.calls > 4 else 0.0
        return loss


def test_a_buffer_that_turns_into_nan_is_never_saved(text, tmp_path):
    recipe = tiny(text, "train.steps=3", "checkpoint.every=1")
    with pytest.raises(UserError, match=r"after step 2 .* a buffer holds NaN.* Resume from step 1 with"):
        run_command(recipe, out=tmp_path / "run", module=Spoiled(), batches=Ones())
    assert [folder.name for folder in store.checkpoints(tmp_path / "run")] == ["step-00000001"]


def test_ranks_start_equal(tmp_path, text):
    """A module that was initialised differently on every rank trains as rank 0's."""
    recipe = tiny(text, "train.steps=2", "layout.dp_replicate=2")
    sums = run_ranks(2, _train_own, recipe, tmp_path / "run")
    assert sums[0] == sums[1]


def _train_own(rank: int, world: int, recipe: Recipe, out: Path) -> float:
    torch.manual_seed(rank)
    module = Counting()
    job = Job(resolve(recipe, vocab_size=16), out, module=module, batches=Ones())
    run_rank(job, ranks_of(rank, world))
    return module.table.weight.double().sum().item()


def test_layouts_that_cannot_be_trained_are_refused(text):
    with pytest.raises(UserError, match=r"layout.tp = 4 must divide model.kv_heads = 2"):
        tiny(text, "layout.tp=4")
    assert Layout.from_recipe(tiny(text).layout).ranks == 1
