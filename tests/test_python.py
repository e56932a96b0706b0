"""What Python adds to the commands: callbacks, metrics, a loss, an optimizer, a schedule; and the run as an object."""

import math
import pickle
import re
import sys
import traceback
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import brought
import numpy as np
import pytest
import torch
from pool_runs import lines, train_rank
from ranks import run_ranks
from torch.nn import functional as F

import fivefold
from fivefold.errors import UserError
from fivefold.optim.custom import card_from
from fivefold.optim.updater import Updater
from fivefold.recipe import Recipe
from fivefold.train.user_hooks import brings

TINY = [
    "model.layers=2", "model.dim=32", "model.heads=4", "model.kv_heads=2", "model.seq_len=16", "precision.mode=fp32",
    "data.tokenizer=bytes", "train.global_batch_size=8", "train.microbatch_size=2", "train.steps=3",
    "train.val_every=3", "train.val_sequences=8", "train.sample_tokens=8", "optim.lr=1e-2", "observe.tracker=none",
]  # fmt: skip
CROSS_ENTROPY = "torch.nn.functional:cross_entropy"


def recipe_of(folder: Path, *sets: str, layout: str = "dp=1") -> Recipe:
    text = folder / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    more = [f"data.source={text}", f"data.cache={folder / 'cache'}", "data.val_fraction=0.1", *sets]
    return fivefold.load("quickstart", [*TINY, *more], layout)


def in_layouts(rank: int, world: int, recipes: dict[str, Recipe], folder: Path) -> None:
    for number, (layout, recipe) in enumerate(recipes.items()):
        own = brings(
            metrics={"same": CROSS_ENTROPY, "accuracy": "brought:accuracy"},
            loss=CROSS_ENTROPY,
            optimizer=None if layout == "dp=2" else "brought:LION",
            schedule="brought:up",
        )
        assert train_rank(rank, world, recipe, folder / str(number), own=own) is None


def test_own_loss_metrics_optimizer_and_schedule_in_every_layout(tmp_path: Path) -> None:
    """They are what the recipe has, written by hand, so the figures are those of one process without them."""
    layouts = ["dp=2", "dp=2,zero=3", "tp=2,sp=true", "cp=2", "pp=2,schedule=zb_h1"]
    recipes = {layout: recipe_of(tmp_path, layout=layout) for layout in layouts}
    run_ranks(2, in_layouts, recipes, tmp_path, timeout_s=60)
    plain = {}
    for name in ("adamw", "lion"):
        sets = ["optim.schedule=constant", "optim.warmup_steps=3", "optim.lr=3e-3", f"optim.name={name}"]
        train_rank(0, 1, recipe_of(tmp_path, *sets), tmp_path / name)
        plain[name] = tmp_path / name
    for number, layout in enumerate(layouts):
        run, one = tmp_path / str(number), plain["adamw" if layout == "dp=2" else "lion"]
        assert lines(run, "lr") == pytest.approx([1e-3, 2e-3, 3e-3])
        assert lines(run, "lr") == pytest.approx(lines(one, "lr"))
        assert lines(run, "loss") == pytest.approx(lines(one, "loss"), rel=1e-5), layout
        assert lines(run, "val_loss") == pytest.approx(lines(one, "val_loss"), rel=1e-5), layout
        assert lines(run, "val_same") == pytest.approx(lines(run, "val_loss"), rel=1e-5), layout
        assert lines(run, "val_accuracy") == pytest.approx(lines(tmp_path / "0", "val_accuracy"), abs=0.1), (
            layout
        )
        assert 0 < lines(run, "val_accuracy")[0] < 1


def test_callbacks_are_told_and_stop_a_run(tmp_path: Path) -> None:
    sets = ["train.steps=9", "train.val_every=2", "checkpoint.every=2", "checkpoint.asynchronous=false"]
    recipe = recipe_of(tmp_path, *sets)
    notes = brought.Notes(stop_after=3)
    run = fivefold.train(recipe, tmp_path / "run", nproc=1, callbacks=[notes, fivefold.Callback], quiet=True)
    assert [what for what, step in notes.told if step == 2] == ["step", "validation", "save"]
    assert notes.told[-3:] == [("step", 4), ("save", 4), ("end", 4)]
    assert [step for what, step in notes.told if what == "step"] == [1, 2, 3, 4]
    assert notes.seen["val_loss"] > 0
    assert notes.seen["complete"] is False
    assert lines(run.path, "double") == [2.0, 4.0, 6.0, 8.0]
    again = brought.Notes()
    fivefold.resume(run.path, nproc=1, callbacks=[again], quiet=True)
    assert [step for what, step in again.told if what == "step"] == [5, 6, 7, 8, 9]
    assert again.told[-1] == ("end", 9)
    assert again.seen["complete"] is True


def stopping(rank: int, world: int, recipe: Recipe, out: Path) -> int | None:
    own = pickle.loads(pickle.dumps(brings(callbacks=[partial(brought.Notes, stop_after=1)])))
    return train_rank(rank, world, recipe, out, own=own)


def test_a_callback_stops_all_ranks(tmp_path: Path) -> None:
    assert run_ranks(2, stopping, recipe_of(tmp_path, layout="dp=2"), tmp_path / "run") == [None, None]
    assert lines(tmp_path / "run", "double") == [2.0, 4.0]


class Broken(fivefold.Callback):
    def on_step(self, event: fivefold.Event) -> Any:
        return {"loss": 1.0} if event.step == 2 else None

    def on_validation(self, event: fivefold.Event) -> Any:
        raise ValueError("no such thing")


class Unbuilt(fivefold.Callback):
    def __init__(self, times: int):
        self.times = times

    def on_validation(self, event: fivefold.Event) -> Any:
        return {"loss": 1.0}  # a reader would take the line for a step


def test_what_a_callback_does_wrong_is_an_error(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, "train.steps=2")
    for every, message in (
        (
            1,
            r"Broken.on_validation in step 1 failed: ValueError: no such thing \(.*test_python.py:\d",
        ),
        (2, r"Broken.on_step: a figure's name must be a new word; 'loss' is not"),
    ):
        often = fivefold.change(recipe, [f"train.val_every={every}"])
        with pytest.raises(UserError, match=message):
            fivefold.train(often, tmp_path / str(every), nproc=1, callbacks=[Broken()], quiet=True)
    for number, (callback, message) in enumerate(
        (
            (Unbuilt, r"callbacks: test_python:Unbuilt\(\) failed: TypeError: .* 'times'"),
            (Unbuilt(1), r"on_validation: a figure's name must be a new word; 'loss' is not"),
        )
    ):
        with pytest.raises(UserError, match=message):
            fivefold.train(recipe, tmp_path / f"unbuilt-{number}", nproc=1, callbacks=[callback], quiet=True)


@pytest.mark.parametrize(
    ("what", "given", "message"),
    [
        ("loss", lambda logits, targets: logits.sum(), "a lambda has no name to import"),
        ("schedule", "brought:down", "schedule = 'brought:down' cannot be imported: AttributeError"),
        ("schedule", "up", "must have the form module:name"),
        ("optimizer", partial(torch.optim.SGD, foo=torch.ones(1)), "what its partial binds is no number"),
        ("callbacks", [brought.Notes()], r"this object cannot travel to them. Pass the class Notes, or partial\(N"),
        ("callbacks", [math.sqrt], "has none of on_step, on_validation, on_save, on_end"),
        ("metrics", {"loss": brought.accuracy}, "metrics: 'loss' must be a word"),
        ("metrics", {"a": 3}, "cannot travel|must be a function"),
    ],
)  # fmt: skip
def test_what_cannot_travel_is_refused_before_any_process_starts(
    what: str, given: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        fivefold.train(recipe_of(tmp_path), tmp_path / "run", nproc=2, **{what: given})
    assert not (tmp_path / "run").exists()


def test_what_a_notebook_defines_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits, targets)

    loss.__module__, loss.__qualname__ = "__main__", "loss"
    import __main__

    monkeypatch.delattr(__main__, "__file__", raising=False)
    (found,) = brings(loss=loss).everything
    with pytest.raises(
        UserError, match=r"in a notebook .* Put it into a file, such as mine.py, and pass 'mine:loss'"
    ):
        found.travel()


@pytest.mark.parametrize(
    ("sets", "layout", "brings_it", "message"),
    [
        ([], "dp=2,zero=1", {"optimizer": torch.optim.Adamax}, r"plain data parallelism only \(dp=N\)"),
        (["layout.offload=states:host"], "dp=1", {"optimizer": "brought:LION"}, "layout.offload = "),
        (["train.z_loss=1e-4"], "dp=1", {"loss": F.cross_entropy}, "Nearest valid: train.z_loss = 0"),
        (["sync.method=server"], "dp=2", {"schedule": brought.up}, 'not supported with sync.method = "server"'),
        ([], "dp=1", {"optimizer": torch.optim.LBFGS}, "a step on small weights fails: "),
        ([], "dp=1", {"optimizer": torch.optim.NAdam}, 'checkpoints have no place for its state "mu_product"'),
        ([], "dp=1", {"optimizer": brought.Counting}, r'it counts in its groups \("k"\)'),
        ([], "dp=1", {"optimizer": brought.Late}, 'checkpoints have no place for its state "slow"'),
    ],
)  # fmt: skip
def test_what_does_not_combine_is_refused(
    sets: list[str], layout: str, brings_it: dict[str, Any], message: str, tmp_path: Path
) -> None:
    recipe = recipe_of(tmp_path, *sets, layout=layout)
    with pytest.raises(UserError, match=message):
        fivefold.train(recipe, tmp_path / "run", nproc=2 if "2" in layout else 1, **brings_it)


def test_a_torch_optimizer_trains_and_resumes(tmp_path: Path) -> None:
    recipe = recipe_of(
        tmp_path, "train.steps=4", "checkpoint.every=2", "optim.schedule=constant", "train.val_every=4"
    )
    adam = partial(torch.optim.AdamW, betas=recipe.optim.betas or (0.9, 0.95), eps=recipe.optim.eps or 1e-8)
    run = fivefold.train(recipe, tmp_path / "torch", nproc=1, optimizer=adam, quiet=True)
    ours = fivefold.train(recipe, tmp_path / "ours", nproc=1, quiet=True)
    assert lines(run.path, "loss") == pytest.approx(lines(ours.path, "loss"), rel=1e-5)
    weights, moments = run.weights(), sorted((run.checkpoint).iterdir())
    assert moments
    with pytest.raises(
        UserError, match=r"was trained with optim.name = torch.optim.adamw:AdamW\(betas=.* now it is adamw"
    ):
        fivefold.resume(run.path, nproc=1, checkpoint=run.checkpoints()[0], quiet=True)
    again = fivefold.resume(run.path, nproc=1, checkpoint=run.at(2).checkpoint, optimizer=adam, quiet=True)
    assert all(torch.equal(weights[name], tensor) for name, tensor in again.weights().items())


@pytest.mark.parametrize(
    "make", [torch.optim.RMSprop, torch.optim.Adagrad, partial(torch.optim.SGD, momentum=0.9)]
)
def test_a_torch_optimizer_leaves_everything_as_it_is_where_a_step_is_skipped(make: Any) -> None:
    card = card_from(make, "mine")
    weights = {"w": torch.ones(3, 2), "v": torch.ones(3)}
    updater = Updater(card, weights, 0.1, 0.0, {})
    for skip in (0.0, 1.0):
        before = {name: t.clone() for name, t in (weights | updater.states()).items()}
        updater.step({name: torch.ones_like(w) for name, w in weights.items()}, 0.1, None, torch.tensor(skip))
        after = weights | updater.states()
        same = before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in after)
        assert same == bool(skip)
    assert {name.partition(".")[0] for name in updater.states()} == set(card.state_names) != set()


def test_a_wrong_loss_or_schedule_is_an_error(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, "train.steps=1")
    wrong: tuple[tuple[str, Any, str], ...] = (
        (
            "loss",
            partial(F.cross_entropy, reduction="none"),
            r"loss\(.*\) = a tensor .32,.: must be",
        ),
        (
            "loss",
            lambda logits, targets: 1 / 0,
            r"loss\(.*\) failed: ZeroDivisionError: .* \(.*test_python.py:",
        ),
        ("metrics", {"none": lambda logits, targets: 1 / 0}, r"metric none failed: ZeroDivisionError"),
        ("schedule", lambda step, steps: 1 / 0, r"schedule failed: ZeroDivisionError"),
        ("schedule", lambda step, steps: math.nan, r"schedule\(0, 1\) = nan: a learning rate must be"),
        (
            "metrics",
            {"none": lambda logits, targets: logits},
            r"metric none\(.*\) = .*: must be one number",
        ),
    )
    for number, (name, given, message) in enumerate(wrong):
        brought_: dict[str, Any] = {name: given}
        with pytest.raises(UserError, match=message):
            fivefold.train(recipe, tmp_path / str(number), nproc=1, quiet=True, **brought_)


def test_the_run_as_an_object(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of(tmp_path, "checkpoint.every=1", "checkpoint.keep_last=9")
    shell = type(
        "Shell", (type("ZMQInteractiveShell", (), {}),), {}
    )  # a hosted notebook's derives from Jupyter's
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=shell))
    run = fivefold.train(recipe, tmp_path / "run", nproc=1)
    (said,) = capsys.readouterr().out.splitlines()
    assert said.startswith("validation  step 3  loss ")
    assert repr(run).startswith(f"Run('{run.path}'): llama, ")
    assert "step 3 of 3, validation loss " in repr(run)
    assert "<td style='text-align:left'>3</td>" in run._repr_html_()
    assert "<pre>[model]\narch = &quot;llama&quot;\n" in run.recipe._repr_html_()
    assert run.recipe._repr_html_().startswith("<details><summary>Recipe: llama, ")
    assert re.fullmatch(r"Recipe: llama, .*; 3 steps, batch \d+; 1 rank", repr(run.recipe))
    first = run.at(1)
    assert "step=1" in repr(first)
    assert run.checkpoint.name == "step-00000003"
    assert run.model is run.model
    weight = next(iter(run.weights()))
    assert torch.equal(run.model.state_dict()[weight], run.weights()[weight])
    assert not torch.equal(first.model.state_dict()[weight], run.model.state_dict()[weight])
    tokens = torch.tensor([run.tokenizer.encode("the fox")])
    assert run.model(tokens).shape[:2] == tokens.shape
    one, two = run.generate(["the ", "fox"], max_tokens=5, temperature=0)
    assert run.generate("fox", max_tokens=5, temperature=0) == two
    assert isinstance(one, str)
    assert len(run.generate("the ", samples=3, max_tokens=5)) == 3
    assert run.generate(["the "], samples=1, max_tokens=5, temperature=0) == [[one]]
    both = [of.evaluate(tmp_path / "text.txt", dtype="fp32")["step"] for of in (first, run)]
    assert both == [1, 3]
    with pytest.raises(UserError, match=r"step = 7: .* has no checkpoint of this step; it has 1, 2, 3"):
        run.at(7)


def test_a_mistake_ends_near_the_users_line() -> None:
    """Of our own frames a traceback has the one that raises, and none of what is behind it."""
    with pytest.raises(UserError) as caught:
        fivefold.load("quickstart", ["train.steps=many"])
    home = str(Path(fivefold.__file__).parent)  # a clone's folder may be called fivefold, too
    ours = [frame for frame in traceback.extract_tb(caught.tb) if frame.filename.startswith(home + "/")]
    assert [frame.name for frame in ours] == ["outer"]


def test_a_run_of_an_own_module_says_so(tmp_path: Path) -> None:
    """Its recipe names an architecture that it does not have."""

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(16, 16)

        def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(self.table(inputs).flatten(0, 1), targets.flatten())

    class Ones:
        def batch(self, step: int, rows: range) -> tuple[Any, Any]:
            ids = np.ones((len(rows), 8), dtype=np.int32)
            return ids, ids

    sets = [
        "model.vocab_size=16",
        "model.seq_len=8",
        "train.steps=1",
        "observe.tracker=none",
        "layout.dp_replicate=1",
    ]
    run = fivefold.train(
        fivefold.load("quickstart", sets), tmp_path / "run", model=Net(), data=Ones(), quiet=True
    )
    for shown in (repr(run), repr(fivefold.Run(run.path))):
        assert "llama" not in shown
        assert "a module of your own, 256 parameters" in shown
