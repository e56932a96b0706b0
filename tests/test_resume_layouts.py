"""A checkpoint knows no layout: a run saved at one goes on at another as it would have gone on in one process, and at
the same layout with the same bits."""

from __future__ import annotations

import errno
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import stored
import torch
from marks import slow
from pool_runs import assert_close_tensors, assert_same_tensors, lines, ranks_of, train_rank
from ranks import run_ranks

from fivefold.checkpoint import store, write
from fivefold.checkpoint.manifest import MANIFEST, unreadable
from fivefold.comm import all_or_none
from fivefold.data import prepare
from fivefold.errors import CommunicationError, UserError
from fivefold.launch.ranks import Ranks
from fivefold.models.card import Card, card_of
from fivefold.observe.console import Console
from fivefold.optim import OPTIMIZERS
from fivefold.parallel.mesh import Mesh
from fivefold.recipe import Recipe, change, load, resolve
from fivefold.sharding.layout import Layout
from fivefold.step.state import build_state
from fivefold.train import checked, hooks
from fivefold.train.resume import load_checkpoint

TINY = [
    "model.layers=2", "model.dim=32", "model.heads=4", "model.kv_heads=2", "model.ffn_dim=48", "model.seq_len=16",
    "data.tokenizer=bytes", "data.val_fraction=0.1", "train.global_batch_size=8", "train.microbatch_size=1",
    "train.steps=4", "train.val_sequences=7", "train.val_every=2", "train.sample_tokens=8", "train.sample_every=0",
    "optim.lr=1e-2", "optim.warmup_steps=0", "optim.schedule=constant", "observe.tracker=none",
    "precision.mode=fp32", "layout.dp_replicate=1",
    "optim.eps=1e-4",  # with a tiny one, an element without a gradient moves by rounding alone
]  # fmt: skip
ONE = "dp=1"


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Recipe:
    folder = tmp_path_factory.mktemp("data")
    text = folder / "text.txt"
    text.write_text("".join(f"{i} and {i * i % 89} make {i + i * i % 89}; " for i in range(900)))
    return load("quickstart", [*TINY, f"data.source={text}", f"data.cache={folder / 'cache'}"])


@pytest.fixture(scope="module")
def whole(base: Recipe, tmp_path_factory) -> Path:
    """The run in one process, from its first step to its last."""
    out = tmp_path_factory.mktemp("one") / "run"
    train_rank(0, 1, base, out)
    return out


def train(recipe: Recipe, layout: str, out: Path, steps: int, resume: bool = False) -> None:
    """Trains to a step with a layout's ranks."""
    recipe = change(recipe, [f"train.steps={steps}"], layout)
    ranks = Layout.from_recipe(recipe.layout).ranks
    if ranks == 1:
        assert train_rank(0, 1, recipe, out, resume) is None
    else:
        assert run_ranks(ranks, train_rank, recipe, out, resume, timeout_s=60) == [None] * ranks


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("dp=4,zero=1", "dp=2,tp=2"),
        ("pp=2,dp=2,zero=1", "cp=2,dp=2,zero=3"),
        *slow(
            ("dp=2,tp=2", ONE),
            (ONE, "dp=4,zero=3"),
            ("dp=4,zero=3", "dp=2,zero=2"),
            ("dp=2,zero=2", "dp_replicate=2,dp_shard=2,zero=1"),
            ("dp_replicate=2,dp_shard=2,zero=3", "dp=2"),
            ("dp=2", "pp=2,dp=2,zero=1"),
        ),
    ],
)
def test_goes_on_at_another_layout(
    base: Recipe, whole: Path, tmp_path: Path, first: str, second: str
) -> None:
    """Two steps at one layout, two at another: losses, norms, validation, weights and moments are those of one
    process, to rounding."""
    train(base, first, tmp_path, 2)
    train(base, second, tmp_path, 4, resume=True)
    for key in ("loss", "grad_norm"):
        assert lines(tmp_path, key) == pytest.approx(lines(whole, key), rel=1e-5), key
    assert lines(tmp_path, "val_loss") == pytest.approx(lines(whole, "val_loss"), rel=1e-5)
    assert len(lines(tmp_path, "val_loss")) == 2
    found, wanted = stored.load(store.latest(tmp_path)), stored.load(store.latest(whole))
    assert found.meta["step"] == wanted.meta["step"] == 4
    for kind in ("model", "optimizer"):
        assert_close_tensors(getattr(found, kind), getattr(wanted, kind))


FEW = [
    (f"schedule={schedule},zero={zero}{more}", ramp)
    for schedule, zero, more, ramp in (
        ("dualpipev", 1, "", "2:2+4:1"), ("dualpipe", 2, "", "2:1+6:2"), ("zbv", 3, "", "2:2+6:1"),
        ("dualpipev_paired", 3, ",offload=states:host", ""), ("dualpipe_paired", 1, "", ""), ("dualpipev", 1, "", ""),
    )
]  # fmt: skip


@pytest.mark.parametrize(("how", "ramp"), [FEW[0], *slow(*FEW[1:])])
def test_fewer_microbatches_than_at_first(base: Recipe, tmp_path: Path, how: str, ramp: str) -> None:
    """Than a pipeline has ranks, in the first phases of a ramp; or since the run goes on with twice the ranks that
    share a batch. The weights and moments are those of one process."""
    recipe = change(
        base, ["model.layers=4", f"train.batch_ramp={ramp}" if ramp else "train.global_batch_size=4"]
    )
    train(recipe, ONE, tmp_path / "one", 4)
    if not ramp:
        train(recipe, "pp=2", tmp_path / "other", 2)
    train(recipe, f"dp=2,pp=2,{how}", tmp_path / "other", 4, resume=not ramp)
    a, b = (stored.load(store.latest(tmp_path / name)) for name in ("one", "other"))
    for kind in ("model", "optimizer"):
        assert_close_tensors(getattr(b, kind), getattr(a, kind))


@pytest.mark.parametrize(
    "second",
    [
        *slow("dp=2,zero=2", "dp=2,tp=2,sp=true,ep=2,ep_fold=true", "dp=4,ep=2,zero=3"),
        "dp=2,tp=2,sp=true,ep=2,ep_fold=true,zero=3",
    ],
)
def test_experts_that_are_shared_another_way(base: Recipe, tmp_path: Path, second: str) -> None:
    """By the rows of each of six at one layout (dp 4: two whole and two halves would not do; ep 2: three for two
    ranks, perhaps of one tensor axis), whole ones at another (dp 2), and all in one process: the same run."""
    moe = ["model.arch=moe", "model.experts=6", "model.experts_per_token=2", "model.expert_ffn_dim=32"]
    recipe = change(base, [*moe, "train.microbatch_size=2"])
    train(recipe, ONE, tmp_path / "one", 4)
    train(recipe, "dp=4,zero=1", tmp_path / "other", 1)
    train(recipe, second, tmp_path / "other", 3, resume=True)
    train(recipe, ONE, tmp_path / "other", 4, resume=True)
    a, b = (stored.load(store.latest(tmp_path / name)) for name in ("one", "other"))
    for kind in ("model", "optimizer"):
        assert_close_tensors(getattr(b, kind), getattr(a, kind))


@pytest.mark.parametrize(
    ("layout", "mode"),
    [
        ("dp=2,zero=2", "bf16"),
        *slow(
            ("dp=2,zero=1", "fp32"),
            ("dp=4,zero=3,ranks_per_node=2,zeropp=weights,hier,gradients", "bf16"),
            ("dp=4,zero=3", "bf16"),
            ("dp=4,zero=3", "fp32"),
        ),
    ],
)
def test_same_layout_same_bits(base: Recipe, tmp_path: Path, layout: str, mode: str) -> None:
    recipe = change(base, [f"precision.mode={mode}", "model.dropout=0.1", "train.microbatch_size=2"])
    train(recipe, layout, tmp_path / "whole", 4)
    train(recipe, layout, tmp_path / "parts", 2)
    train(recipe, layout, tmp_path / "parts", 4, resume=True)
    a, b = (stored.load(store.latest(tmp_path / name)) for name in ("whole", "parts"))
    assert_same_tensors(a.model, b.model)
    assert_same_tensors(a.optimizer, b.optimizer)
    for key in ("loss", "grad_norm", "val_loss"):
        assert lines(tmp_path / "whole", key) == lines(tmp_path / "parts", key), key


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("nesterov", "dp=2,zero=3", "tp=2"),
        *slow(
            ("momentum", "tp=2", "dp=2,zero=1"),
            ("sgd", "dp=2,zero=1", "pp=2"),
            ("adam", "dp=2,zero=2", "tp=2"),
            ("adagrad", "tp=2", "dp=2,zero=3"),
            ("rmsprop", "dp=2,zero=3", "pp=2"),
            ("radam", "pp=2", "dp=2,zero=1"),
            ("nadam", "dp=2,zero=1", "tp=2"),
            ("adamsage", "tp=2", "dp=2,zero=3"),
            ("lion", "dp=2,zero=3", "tp=2"),
            ("sophia", "cp=2", "dp=2,zero=2"),
        ),
    ],
)
def test_other_optimizers_resume_too(
    base: Recipe, tmp_path: Path, name: str, first: str, second: str
) -> None:
    """In the same layout with the same bits, in another one to rounding."""
    card = OPTIMIZERS[name]
    eps = [] if "eps" in card.fields else ["optim.eps=none"]
    recipe = change(
        base, [f"optim.name={name}", *eps, *(["optim.lr=1e-3"] if name in ("lion", "sophia") else [])]
    )
    train(recipe, first, tmp_path / "whole", 4)
    for layout in (first, second):
        out = tmp_path / layout
        train(recipe, first, out, 2)
        train(recipe, layout, out, 4, resume=True)
        a, b = (stored.load(store.latest(folder)) for folder in (tmp_path / "whole", out))
        assert {key.partition(".")[0] for key in a.optimizer} == set(card.state_names)
        for kind in ("model", "optimizer"):
            equal = assert_same_tensors if layout == first else assert_close_tensors
            equal(getattr(b, kind), getattr(a, kind))
    other = "sgd" if name != "sgd" else "lion"
    unset = [f"optim.{field}=none" for field in card.fields]
    another = change(recipe, [*unset, f"optim.name={other}", "train.steps=5"], first)
    said = run_ranks(2, error_of, another, tmp_path / first)
    assert all(f"was trained with optim.name = {name}, and now it is {other}" in text for text in said)


def test_options_resume_too(base: Recipe, tmp_path: Path) -> None:
    """A batch that grows, and the statistics of loss and norm: the same bits."""
    recipe = change(base, ["train.batch_ramp=2:1+4:2", "faults.on_spike=skip", "train.z_loss=1e-3"])
    train(recipe, "dp=2", tmp_path / "whole", 4)
    train(recipe, "dp=2", tmp_path / "parts", 2)
    train(recipe, "dp=2", tmp_path / "parts", 4, resume=True)
    a, b = (stored.load(store.latest(tmp_path / name)) for name in ("whole", "parts"))
    assert_same_tensors(a.model, b.model)
    assert a.meta["usual"] == b.meta["usual"]
    assert a.meta["usual"][::3] == [4, 4]
    for key in ("loss", "grad_norm", "val_loss"):
        assert lines(tmp_path / "whole", key) == lines(tmp_path / "parts", key), key
    assert lines(tmp_path / "parts", "tokens") == [16 * n for n in (2, 6, 10, 18)]
    said = run_ranks(
        2, error_of, change(recipe, ["train.batch_ramp=4:1", "train.steps=5"], "dp=2"), tmp_path / "parts"
    )
    assert all("was trained with train.batch_ramp" in text for text in said)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("muon", "dp=2,tp=2,zero=3", "dp=2,zero=1"),
        pytest.param("soap", "tp=2", "dp=2,zero=3", marks=pytest.mark.slow),
        pytest.param("adafactor", "pp=2,dp=2,zero=1", "tp=2", marks=pytest.mark.slow),
        pytest.param("adamw8bit", "dp=2,zero=2", "tp=2", marks=pytest.mark.slow),
        pytest.param("soap", "dp=2,tp=2,zero=1", "pp=2", marks=pytest.mark.slow),
    ],
)
def test_states_of_whole_matrices_resume_too(
    base: Recipe, tmp_path: Path, name: str, first: str, second: str
) -> None:
    """In the same layout with the same bits. In another one the next step equals that of one process to rounding."""
    recipe = change(base, [f"optim.name={name}", *(["optim.eps=none"] if name == "adafactor" else [])])
    train(recipe, first, tmp_path / "whole", 3)
    train(recipe, first, tmp_path / "parts", 2)
    for layout in (second, ONE):
        shutil.copytree(tmp_path / "parts", tmp_path / layout)
        train(recipe, layout, tmp_path / layout, 3, resume=True)
    train(recipe, first, tmp_path / "parts", 3, resume=True)
    found = {key: stored.load(store.latest(tmp_path / key)) for key in ("whole", "parts", second, ONE)}
    for kind in ("model", "optimizer"):
        assert_same_tensors(getattr(found["parts"], kind), getattr(found["whole"], kind))
    assert {name.partition(".")[0] for name in found[ONE].optimizer} == set(OPTIMIZERS[name].state_names)
    assert found[second].optimizer.keys() == found[ONE].optimizer.keys()
    assert_close_tensors(found[second].model, found[ONE].model)
    if not OPTIMIZERS[name].jumps:
        assert_close_tensors(found[second].optimizer, found[ONE].optimizer)


@pytest.mark.parametrize("name", ["muon", *slow("soap", "adafactor")])
def test_states_of_joined_matrices_are_refused(
    base: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Older versions had one state for queries, keys and values together. One sentence says what to do."""
    recipe = change(base, [f"optim.name={name}", *(["optim.eps=none"] if name == "adafactor" else [])])
    with monkeypatch.context() as older:
        older.setattr(Card, "sections", {})
        card_of.cache_clear()
        train(recipe, ONE, tmp_path / "old", 1)
    card_of.cache_clear()
    with pytest.raises(UserError) as refused:
        train(recipe, ONE, tmp_path / "old", 2, resume=True)
    (sentence,) = str(refused.value).splitlines()
    assert "for several matrices, and now each is updated by itself" in sentence
    assert "train.init_from" in sentence
    assert "attention.qkv.weight" in sentence


def test_a_divided_run_samples_its_last_checkpoint(base: Recipe, tmp_path: Path) -> None:
    """No rank has the model: rank 0 reads what has just been saved."""
    train(base, "dp=2,zero=3", tmp_path / "divided", 2)
    train(base, ONE, tmp_path / "one", 2)
    assert lines(tmp_path / "divided", "sample") == lines(tmp_path / "one", "sample")
    assert len(lines(tmp_path / "divided", "sample")) == 1


def test_a_rank_reads_its_part_only(base: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Resuming at dp 4, ZeRO 3 reads a quarter of each tensor on each rank."""
    train(base, ONE, tmp_path, 1)
    read = run_ranks(4, elements_read, change(base, ["train.steps=1"], "dp=4,zero=3"), tmp_path)
    tensors = stored.load(store.latest(tmp_path))
    total = sum(t.numel() for kind in (tensors.model, tensors.optimizer) for t in kind.values())
    assert sum(read) == total
    assert max(read) < 1.1 * total / 4


def elements_read(rank: int, world: int, recipe: Recipe, out: Path) -> int:
    """How many elements of a checkpoint this rank reads when it resumes."""
    recipe = resolve(recipe, vocab_size=prepare(recipe).vocab_size)
    state = build_state(recipe, ranks_of(rank, world))
    reader, sizes = store.Reader(store.latest(out)), []
    read = reader.read

    def counted(kind: str, name: str, box: store.Box | None = None) -> torch.Tensor:
        found = read(kind, name, box)
        sizes.append(found.numel())
        return found

    reader.read = counted  # type: ignore[method-assign]
    load_checkpoint(state, reader)
    return sum(sizes)


def test_no_memory_for_a_sample_does_not_end_a_run(base: Recipe, tmp_path: Path) -> None:
    """Rank 0 has no room for the whole of a divided model: it says so, and the run goes on."""
    recipe = change(base, ["train.steps=2", "train.sample_every=1", "checkpoint.every=1"], "dp=2,zero=3")
    (stopped, notes), other = run_ranks(2, without_memory, recipe, tmp_path)
    assert stopped is None
    assert other == (None, [])
    said = [note for note in notes if "no sample" in note]
    assert said == [f"step {n}: no sample: not enough CPU memory for it during training" for n in (1, 2)]
    assert len(lines(tmp_path, "loss")) == 2
    assert lines(tmp_path, "sample") == []


def without_memory(rank: int, world: int, recipe: Recipe, out: Path) -> tuple[int | None, list[str]]:
    """A run in which no model can be loaded beside training, and what it says on the console."""
    notes: list[str] = []

    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("Tried to allocate 20.00 GiB")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hooks, "open_run", full)
        patch.setattr(Console, "note", lambda self, text: notes.append(text) if rank == 0 else None)
        return train_rank(rank, world, recipe, out), notes


# What is read is checked


@pytest.mark.parametrize(("machines", "times"), [(1, 1), (2, 2)])
def test_each_machine_checks_each_file_once(base: Recipe, tmp_path: Path, machines: int, times: int) -> None:
    """Four ranks, of which each needs parts of two files of four."""
    train(base, "dp=2,zero=1", tmp_path, 1)
    files = [p.name for p in store.latest(tmp_path).glob("*.safetensors")]
    assert len(files) == 4, "weights and moments of two ranks"
    recipe = change(base, ["train.steps=1"], "dp=4,zero=3")
    hashed = run_ranks(4, files_hashed, recipe, tmp_path, machines)
    assert sorted(name for mine in hashed for name in mine) == sorted(files * times)


def files_hashed(rank: int, world: int, recipe: Recipe, out: Path, machines: int) -> list[str]:
    """The files that this rank hashes when it resumes, if the ranks are on so many machines."""
    found, sha256 = [], store.sha256

    def counted(path: Path) -> str:
        found.append(path.name)
        return sha256(path)

    recipe = resolve(recipe, vocab_size=prepare(recipe).vocab_size)
    state = build_state(recipe, ranks_of(rank, world))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checked, "machine_id", lambda: bytes([rank % machines]))
        patch.setattr(store, "sha256", counted)
        load_checkpoint(state, store.Reader(store.latest(out)))
    return found


def test_a_damaged_file_stops_every_rank(base: Recipe, tmp_path: Path) -> None:
    train(base, ONE, tmp_path, 1)
    damaged = next(store.latest(tmp_path).glob("optimizer-*"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\xff")
    recipe = change(base, ["train.steps=2"], "dp=2,zero=1")
    said = run_ranks(2, error_of, recipe, tmp_path)
    assert said[0] == said[1]
    assert said[0].splitlines()[0].startswith(f"{tmp_path} has no valid checkpoint")
    assert said[0].splitlines()[1] == (
        f"  {damaged} is damaged: its content does not match the hash in the manifest"
    )


def error_of(rank: int, world: int, recipe: Recipe, out: Path) -> str:
    with pytest.raises(UserError) as error:
        train_rank(rank, world, recipe, out, True)
    return str(error.value)


def test_ranks_that_see_different_checkpoints_stop(base: Recipe, tmp_path: Path) -> None:
    """Each on a disk of its own: of another step, of the same step with other weights, of none."""
    for name, sets in (
        ("one", ["train.steps=1"]),
        ("two", ["train.steps=2"]),
        ("seed", ["train.steps=1", "train.seed=1"]),
    ):
        train_rank(0, 1, change(base, sets), tmp_path / name)
    recipe = change(base, ["train.steps=2"], "dp=2")
    for other, difference in (
        ("two", ": step 1 to step 2"),
        ("seed", " of step 1"),
        ("none", ": none to step 1"),
    ):
        said = run_ranks(2, error_at, recipe, [tmp_path / "one", tmp_path / other])
        assert said == [f"ranks see different checkpoints{difference}. Is the disk shared?"] * 2


def error_at(rank: int, world: int, recipe: Recipe, folders: list[Path]) -> str:
    return error_of(rank, world, recipe, folders[rank])


def test_what_one_rank_cannot_read_stops_every_rank(base: Recipe, tmp_path: Path) -> None:
    """Each with the same message, at once: a manifest that one rank may not read; a tensor of another shape that only
    the last stage has."""
    train(base, "pp=2", tmp_path, 1)
    recipe = change(base, ["train.steps=2"], "pp=2")
    said = run_ranks(2, error_with_another_manifest, recipe, tmp_path)
    folder = store.latest(tmp_path)
    assert said == [f"{folder / MANIFEST} cannot be read: Permission denied"] * 2
    saved = stored.load(folder)
    saved.model["norm.weight"] = torch.ones(33)
    write.save(folder, saved.model, saved.optimizer, saved.meta)
    said = run_ranks(2, error_of, recipe, tmp_path)
    why = "these weights do not fit the model: norm.weight"
    assert said == [f"{folder} does not fit the recipe: {why}"] * 2


def error_with_another_manifest(rank: int, world: int, recipe: Recipe, out: Path) -> str:
    read = store.read

    def forbidden(folder: Path) -> object:
        raise unreadable(folder / MANIFEST, PermissionError(errno.EACCES, "Permission denied"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "read", forbidden if rank == 1 else read)
        return error_of(rank, world, recipe, out)


def test_what_nobody_expected_on_one_rank_stops_the_others_too(tmp_path: Path) -> None:
    assert run_ranks(2, unexpected_error) == [
        "CommunicationError: rank 1: KeyError('lost')",
        "KeyError: 'lost'",
    ]


def unexpected_error(rank: int, world: int) -> str:
    mesh = Mesh(Layout(dp_replicate=world), Ranks(rank, world, rank, world, torch.device("cpu")))
    try:
        with all_or_none(mesh.axis("all")):
            if rank == 1:
                raise KeyError("lost")
    except (CommunicationError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def machines(rank: int, world: int) -> list[int]:
    """The ranks on each rank's machine, of two. Parameter servers call it without their workers."""
    if rank == 3:
        return []
    mesh = Mesh(Layout(dp_replicate=3), replace(ranks_of(rank, world), world=3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checked, "machine_id", lambda: bytes([rank % 2]))
        return checked._on_this_machine(mesh.axis("run"))


def test_ranks_of_a_machine_find_each_other_without_the_rest_of_the_launch() -> None:
    assert run_ranks(4, machines) == [[0, 2], [1], [0, 2], []]
