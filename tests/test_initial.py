"""`train.init_from`: new training from the weights of a run, a checkpoint or a Hugging Face folder, in any layout."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import stored
import torch
from marks import only
from pool_runs import assert_same_tensors, lines, mend, ranks_of
from ranks import run_ranks

from fivefold.checkpoint import store
from fivefold.checkpoint.source import export_run, import_folder, weights_of
from fivefold.data import prepare
from fivefold.data.one_source import require_vocabulary
from fivefold.errors import UserError
from fivefold.observe.report import page
from fivefold.recipe import Recipe, change, load, resolve
from fivefold.recipe.resolve import warnings
from fivefold.train.job import Job, initial
from fivefold.train.run import run_rank
from fivefold.train.start import run_command

SMALL = ["model.layers=2", "model.dim=32", "model.heads=4", "model.seq_len=32", "model.init_std=0.1"]
SHORT = [
    "data.tokenizer=bytes", "train.steps=3", "train.global_batch_size=4", "train.val_sequences=4",
    "precision.mode=fp32", "observe.tracker=none", "train.sample_every=1000", "train.sample_tokens=4",
]  # fmt: skip


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 2000)
    return path


@pytest.fixture(scope="module")
def base(text, tmp_path_factory) -> Path:
    """A run of three steps, and its export."""
    folder = tmp_path_factory.mktemp("base")
    recipe = load("quickstart", [*SMALL, *SHORT, f"data.source={text}", "optim.lr=0.01"], "dp=1")
    run_command(recipe, out=folder / "run-1", nproc=1)
    export_run(folder / "run-1", folder / "exported")
    return folder / "run-1"


def continued(where: Path, text: Path, *more: str, layout: str = "dp=1") -> Recipe:
    short = [one for one in SHORT if "tokenizer" not in one]
    return load("continue", [*short, f"data.source={text}", f"train.init_from={where}", *more], layout)


def started(rank: int, world: int, recipe: Recipe, out: Path, resume: bool = False) -> int | None:
    """A rank's part of a run, as `train/start.py` starts it."""
    data = prepare(recipe)
    recipe = resolve(recipe, vocab_size=data.vocab_size)
    found = None if resume else initial(recipe, data.tokenizer)
    return run_rank(Job(recipe, out, data, resume=resume, initial=found), ranks_of(rank, world))


def test_a_run_continues_from_the_weights_of_another(base, text, tmp_path):
    """The model and the tokenizer are its own. Step, schedule and moments are new. A validation before any update
    would be the old run's last; here a learning rate of nearly 0 shows it."""
    recipe = continued(base, text, "optim.lr=1e-20", "optim.weight_decay=0")
    assert recipe.model.layers == 2
    assert recipe.data.tokenizer == str(base / "tokenizer.json")
    assert recipe.optim.warmup_steps is None, "what follows from other fields is open"
    out = run_command(recipe, out=tmp_path / "run", nproc=1)
    assert lines(out, "val_loss")[-1] == pytest.approx(lines(base, "val_loss")[-1], rel=1e-6)
    assert_same_tensors(weights_of(store.latest(out)), weights_of(store.latest(base)))
    told = json.loads((out / "initial.json").read_text())
    assert told["checkpoint"] == str(store.latest(base).resolve())
    html = page(out)
    assert told["fingerprint"] in html
    assert told["checkpoint"] in html
    assert load(out / "recipe.toml").train.init_from == str(base)


def test_a_hugging_face_folder_gives_the_same(base, text, tmp_path):
    outs = []
    for name, where in (("run", store.latest(base)), ("hf", base.parent / "exported")):
        outs.append(run_command(continued(where, text), out=tmp_path / name, nproc=1))
    assert lines(outs[0], "loss") == lines(outs[1], "loss")
    imported = import_folder(base.parent / "exported", tmp_path / "imported")
    recipe = load(imported / "recipe.toml")
    assert (recipe.optim.warmup_steps, recipe.optim.min_lr, recipe.train.microbatch_size) == (
        None,
        None,
        None,
    )


def test_a_shipped_recipes_model_and_tokenizer_give_way(base, tmp_path):
    """What the user has written, in a file or by --set, stays."""
    where = f"train.init_from={base.parent / 'exported'}"
    tokenizer = str(base.parent / "exported" / "tokenizer.json")
    own = tmp_path / "own.toml"
    own.write_text(
        f'base = "quickstart"\ntrain = {{steps = 3, init_from = "{base}"}}\nmodel = {{seq_len = 16}}\n'
    )
    taken = [load("quickstart", [where]), load(own), load("bert-tiny", [where])]
    assert [(one.model.arch, one.model.layers, one.model.dim) for one in taken] == [("llama", 2, 32)] * 3
    assert [one.model.seq_len for one in taken] == [32, 16, 32]
    assert [one.data.tokenizer for one in taken] == [tokenizer, str(base / "tokenizer.json"), tokenizer]
    assert any("`continue` has a lower one" in warning for warning in warnings(taken[0]))
    kept = load("quickstart", [where, "model.layers=3", "data.tokenizer=bpe:300"])
    assert (kept.model.layers, kept.model.dim, kept.data.tokenizer) == (3, 32, "bpe:300")
    with pytest.raises(UserError, match=r"that of train.init_from = .*Leave data.tokenizer out"):
        require_vocabulary(kept, 4096)


@only("run")
@pytest.mark.parametrize("source", ["run", "hf"])
def test_any_layout_reads_its_part(base, text, tmp_path, source):
    where = base if source == "run" else base.parent / "exported"
    wanted = lines(run_command(continued(where, text), out=tmp_path / "one", nproc=1), "loss")
    for layout in ("tp=2", "dp=2,zero=3", "pp=2"):
        run_ranks(2, started, continued(where, text, layout=layout), tmp_path / layout)
        assert lines(tmp_path / layout, "loss") == pytest.approx(wanted, rel=1e-5), layout


@pytest.mark.parametrize(("where", "sets", "message"), [
    ("run-2", [], r"run-2: no such folder; did you mean '\S*run-1'\?"),
    ("run-1/checkpoints/step-00000009", [], r"no such checkpoint; did you mean 'step-00000003'\?"),
    ("run-1", ["model.layers=3"], r"its model has layers = 2, and this recipe model.layers = 3"),
    ("run-1", ["model.ffn_dim=48"], r"its model has ffn_dim = \d+, and this recipe model.ffn_dim = 48"),
    ("exported", ["model.arch=gpt2"], r"its model has arch = llama, and this recipe model.arch = gpt2"),
    ("run-1", ["data.tokenizer=bpe:300"], r"its vocabulary is another: .* Leave data.tokenizer out"),
    ("run-1", ["model.freeze=blcks.*"], r"no parameter of the model is called 'blcks.\*'"),
    ("run-1", ["model.freeze=*"], r"every parameter is frozen"),
    ("run-1", ["optim.groups=head*: speed=2"], r"'speed=2' must be lr=FACTOR or decay=FACTOR"),
])  # fmt: skip
def test_what_does_not_fit_is_said_before_any_process_starts(
    base, text, tmp_path, monkeypatch, where, sets, message
):
    monkeypatch.chdir(base.parent)
    monkeypatch.setattr("fivefold.train.start.launch", None)
    with pytest.raises(UserError, match=message):
        run_command(continued(base.parent / where, text, *sets, layout="dp=2"), out=tmp_path / "run", nproc=2)
    assert not (tmp_path / "run").exists()


WRONG_SOURCES: list[tuple[Callable[[Any], object], str]] = [
    (lambda found: found.update(checkpoint="/gone"), "/gone is gone: the frozen weights"),
    (lambda found: found.update(checkpoint="", where="/dev"), "/dev has neither"),
    (lambda found: found.update(checkpoint="/dev"), "/dev: cannot be read"),
    (lambda found: found.update(where="a\0b", checkpoint=""), "is gone"),
    (lambda found: found.update(fingerprint="0"), "has other weights"),
    (lambda found: found["names"].update({"embed.weight": "none"}), "has no weight 'none'"),
    (lambda found: found.update(names=["embed.weight"]), "must say where weights are"),
    (lambda found: found.pop("where"), "must say where weights are"),
]
"""Changes of what a checkpoint says about its frozen weights, and the messages."""


def test_checkpoints_without_frozen_weights_are_small_and_resume(base, text, tmp_path):
    """Bit for bit, in bf16, where frozen weights are kept as they compute. The whole model comes back for export."""
    sets = ["model.freeze=embed*, blocks.0.*", "checkpoint.frozen=false", "precision.mode=bf16"]
    recipe = continued(base, text, *sets, "optim.schedule=constant", layout="dp=2")
    one, parts = tmp_path / "one", tmp_path / "parts"
    run_ranks(2, started, recipe, one)
    run_ranks(2, started, change(recipe, ["train.steps=2"]), parts)
    run_ranks(2, started, recipe, parts, True)
    names = store.Reader(store.latest(parts)).names("model")
    assert names
    assert not any(name.startswith(("embed", "blocks.0")) for name in names)
    assert_same_tensors(weights_of(store.latest(parts)), weights_of(store.latest(one)))
    assert weights_of(store.latest(one)).keys() == weights_of(store.latest(base)).keys()
    export_run(one, tmp_path / "exported")
    moments = store.Reader(store.latest(one)).names("optimizer")
    assert moments
    assert not any("blocks.0." in name for name in moments)
    for wrong, says in WRONG_SOURCES:
        shutil.copytree(store.latest(one), tmp_path / "wrong")
        mend(tmp_path / "wrong", lambda found, wrong=wrong: wrong(found["meta"]["weights_elsewhere"]))
        with pytest.raises(UserError, match=says):
            weights_of(tmp_path / "wrong")
        shutil.rmtree(tmp_path / "wrong")


def test_frozen_weights_are_kept_as_they_compute_in_every_layout(base, text, tmp_path):
    """FSDP2 has their rows in fp32."""
    recipe = continued(
        base, text, "model.freeze=embed*", "precision.mode=bf16", "train.steps=1", layout="dp=2,zero=3"
    )
    run_ranks(2, started, recipe, tmp_path / "run")
    found = stored.load(store.latest(tmp_path / "run"), kinds=("model",)).model
    assert {t.dtype for name, t in found.items() if name.startswith("embed")} == {torch.bfloat16}
    assert {t.dtype for name, t in found.items() if not name.startswith("embed")} == {torch.float32}
    was = weights_of(store.latest(base))
    assert_same_tensors(
        {n: t for n, t in found.items() if n.startswith("embed")},
        {n: t.bfloat16() for n, t in was.items() if n.startswith("embed")},
    )


UPCYCLED = ["model.arch=moe", "model.experts=4", "model.experts_per_token=2", "train.microbatch_size=1"]


@pytest.mark.slow
def test_each_expert_is_a_copy_of_a_dense_layer(base, text, tmp_path):
    """Sparse upcycling: with normalised weights the model computes at first what the dense one does."""
    still = ["optim.lr=1e-20", "optim.weight_decay=0", *UPCYCLED]
    out = run_command(continued(base, text, *still), out=tmp_path / "run", nproc=1)
    dense, found = weights_of(store.latest(base)), weights_of(store.latest(out))
    for name, weight in found.items():
        if ".experts." in name:
            weight, name = weight[2], name.replace(".experts.", ".") + ".weight"
        if ".router." not in name:
            assert torch.equal(weight, dense[name]), name
    routers = [found[f"blocks.{i}.mlp.router.weight"] for i in range(2)]
    assert all(0.05 < router.std() < 0.2 for router in routers)
    assert not torch.equal(*routers)
    assert lines(out, "val_loss")[-1] == pytest.approx(lines(base, "val_loss")[-1], rel=1e-5)
    assert "feed-forward layer" in (out / "initial.json").read_text()


def test_checkpoints_keep_frozen_experts_that_the_source_has_not(base, text, tmp_path):
    sets = [*UPCYCLED, "model.freeze=embed*, *.experts.*", "checkpoint.frozen=false"]
    out = run_command(continued(base, text, *sets), out=tmp_path / "run", nproc=1)
    names = store.Reader(store.latest(out)).names("model")
    assert "embed.weight" not in names
    assert "blocks.0.mlp.experts.down" in names
    assert torch.equal(
        weights_of(store.latest(out))["embed.weight"], weights_of(store.latest(base))["embed.weight"]
    )


@only("dp=2,ep=2")
@pytest.mark.parametrize("layout", ["dp=2,ep=2", "dp=2,ep=2,zero=3", "tp=2", "pp=2"])
def test_upcycling_reads_the_same_in_every_layout(base, text, tmp_path, layout):
    """Of a Hugging Face folder; a learning rate of nearly 0 leaves the weights as they were read."""
    still = [*UPCYCLED, "optim.lr=1e-20", "optim.weight_decay=0"]
    recipe = continued(base.parent / "exported", text, *still, layout=layout)
    run_ranks(2, started, recipe, tmp_path / "run")
    dense, found = weights_of(store.latest(base)), weights_of(store.latest(tmp_path / "run"))
    for name, weight in found.items():
        if ".experts." in name:
            every = [dense[name.replace(".experts.", ".") + ".weight"]] * 4
            assert torch.equal(weight, torch.stack(every)), name
        elif ".router." not in name:
            assert torch.equal(weight, dense[name]), name


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ["model.expert_ffn_dim=64"],
            r"mlp.gate_up.weight has the shape \(\d+, 32\) there, and \(128, 32\) here",
        ),
        (["model.shared_experts=1"], "it has no weight blocks.0.mlp.shared.gate_up.weight"),
        (["model.arch=qwen3_moe"], "it has no weight blocks.0.attention.norm_q.weight"),
    ],
)
def test_what_cannot_be_upcycled_is_refused(base, text, more, message):
    recipe = resolve(continued(base, text, *UPCYCLED, *more), vocab_size=257)
    with pytest.raises(UserError, match=message):
        initial(recipe)
