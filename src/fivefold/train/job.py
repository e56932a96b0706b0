"""The job that every rank of a run gets, with the user's own batches and module if there are any; what all of its
ranks, and the runs that resume it, must have in common; and the weights to start from (`train.init_from`), found and
checked before any rank starts."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from fivefold.checkpoint import store
from fivefold.checkpoint.source import TOKENIZER, Elsewhere, Source, fingerprint
from fivefold.comm.membership import Endpoint
from fivefold.data import DataSet
from fivefold.data.dataset import amounts, order_of
from fivefold.data.tokenizer import Tokenizer, load_tokenizer
from fivefold.errors import UserError, did_you_mean
from fivefold.files import expanded, guard, make_folder, read_json, write_atomically
from fivefold.models.card import card_of, copied, resolve_model
from fivefold.models.custom import CustomModel, ModuleCard, buffers_of
from fivefold.models.rules import differences, upcycled
from fivefold.models.section import ModelSection
from fivefold.observe.report import INITIAL
from fivefold.recipe import Recipe, load
from fivefold.recipe.hugging_face import hf_model
from fivefold.recipe.load import required
from fivefold.sharding.parts import Shape
from fivefold.train.checked import meta_of
from fivefold.train.user_hooks import WITHOUT, UserHooks

LOAD = ".router.load"
"""The end of the name of a buffer that a run may begin without."""
ROUTER = (".router.weight", ".router.bias", LOAD)
"""The ends of names that upcycling begins anew."""
FINGERPRINT = "the data's fingerprint"  # a key of `identity`, stored in checkpoints
STAGES = "data.stages"  # [place at which it begins, weight of each source] of each stage
OWN = ("data", "checkpoint", "observe", "launch", "train.init_from", "layout.offload_dir", "layout.recompute")
"""Sections and fields in which the machines of a run may differ: paths (their contents count), what is kept and shown,
how long ranks wait, and what is computed again, which each replica group may choose by its own speed."""


@dataclass(frozen=True)
class Initial:
    """where: the folder that was asked for. checkpoint: its checkpoint; "": a Hugging Face folder. fingerprint: a hash
    of all weights. new: parameters that it lacks, which keep their own initial values. changed: fields of the model
    that differ on purpose, in words. frozen: {a parameter that is not trained: its name there}."""

    where: str
    checkpoint: str
    fingerprint: str
    new: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    frozen: Mapping[str, str] = field(default_factory=dict)

    def line(self) -> str:
        """Where the weights come from, for people."""
        more = f"; {len(self.new)} parameters are new, such as {self.new[0]}" if self.new else ""
        other = f"; {', '.join(self.changed)}" if self.changed else ""
        return f"weights from {self.checkpoint or self.where} (sha256 {self.fingerprint[:12]}){more}{other}"


class BatchSource(Protocol):
    """A source of batches: `data.Batches`, or any object of the user with this method.

    Targets below 0 do not count. If microbatches may differ in how many do, a source also has `uneven = True` and
    `counted(i, size)`, their number in the first `size` rows of batch i. Without, all microbatches weigh the same.
    """

    def batch(self, i: int, rows: range) -> tuple[Any, ...]:
        """Inputs and targets (arrays or tensors, (len(rows), T) int64) of rows `rows` of global batch i. A third array
        of that shape, or None, has the column at which the document of each token begins."""
        ...


@dataclass(frozen=True)
class Job:
    """The job of every rank.

    recipe: resolved. data: the recipe's data set, or None if the user brings `batches`. module: the user's own model,
    in fp32 on the CPU, the same on every rank. resume: goes on from the newest valid checkpoint; without one it starts
    from step 0. resume_from: the checkpoint to go on from instead, while the run has no newer one. endpoint: this
    launch's replica group, if each replica group is a launch of its own. asked: the recipe with the layout that was
    asked for, if there are not as many ranks now: what the run folder keeps. initial: the weights to start from, if
    they are not random.
    card: of the module, if its user gave one. own: callbacks, metrics and the like."""

    recipe: Recipe
    out: Path
    data: DataSet | None = None
    module: nn.Module | None = None
    batches: BatchSource | None = None
    val_batches: BatchSource | None = None
    resume: bool = False
    endpoint: Endpoint | None = None
    resume_from: Path | None = None
    asked: Recipe | None = None
    initial: Initial | None = None
    card: ModuleCard | None = None
    own: UserHooks = WITHOUT

    @property
    def resume_command(self) -> str:
        # Only Python has the user's own model, data, callbacks
        if self.module is not None or self.batches is not None or self.own.everything:
            return f"fivefold.resume({str(self.out)!r}, ...)"
        options = self.endpoint.options if self.endpoint else ()
        return shlex.join(["fivefold", "train", str(self.out), "--resume", *options])


def tokenizer_to_keep(job: Job) -> Tokenizer | None:
    """The tokenizer whose file the run folder keeps. None: there is none, or `data.tokenizer` is that very file, as in
    an imported run."""
    own, named = job.out.absolute() / "tokenizer.json", job.recipe.data.tokenizer
    return job.data.tokenizer if job.data and expanded("data.tokenizer", named).absolute() != own else None


def shared(job: Job) -> dict[str, Any]:
    """What all ranks of a run must have in common, its replica groups and servers included, by name: the recipe's
    fields but those of `OWN`, and the contents of data and first weights, wherever they lie."""
    settings = {
        f"{section}.{key}": value
        for section, fields in job.recipe.model_dump(mode="json").items()
        if section not in OWN
        for key, value in fields.items()
        if f"{section}.{key}" not in OWN
    }
    first = job.initial.fingerprint if job.initial else recorded(job.out)
    return settings | {"the first weights": first} | identity(job)


def identity(job: Job) -> dict[str, Any]:
    """Those of the `shared` settings that determine the position in the data and the optimizer's states.

    A run cannot resume exactly if one of them has changed.
    """
    recipe = job.recipe
    facts: dict[str, Any] = {
        "model.seq_len": recipe.model.seq_len,
        "train.global_batch_size": recipe.train.global_batch_size,
        "train.batch_ramp": recipe.train.batch_ramp,
        "train.seed": recipe.train.seed,
        "optim.name": recipe.optim.name,
    }
    if job.data is not None:
        facts[FINGERPRINT] = job.data.info.get("fingerprint")
        facts["data.packing"] = recipe.data.packing
        if (tokenizer := tokenizer_to_keep(job)) is not None:
            facts[TOKENIZER] = tokenizer.fingerprint
        # The fingerprint is the files', and not that of the tokens which are taken of them
        if recipe.data.token_files:
            facts["data.val_fraction"] = recipe.data.val_fraction
            if recipe.data.packing == "best_fit":
                facts["data.end_token"] = recipe.data.end_token
        if job.data.mixed:
            stages = order_of(recipe, amounts(recipe, job.data)).stages
            facts[STAGES] = [[stage.begin, *stage.weights] for stage in stages]
    return facts | job.own.identity()


def initial(recipe: Recipe, tokenizer: Tokenizer | None = None, own: CustomModel | None = None) -> Initial:
    """Finds and checks `train.init_from` of a resolved recipe. tokenizer: of the run's data, if it has one. own: the
    user's own module. Raises UserError: there is no such folder or checkpoint, or its model or vocabulary is
    another."""
    where = recipe.train.init_from
    folder = required(where)
    guard(folder)
    path, checkpoint = expanded("train.init_from", where), None  # of a Hugging Face folder
    if path.absolute() != folder.absolute():
        checkpoint, folders = path, store.checkpoints(folder)
        if path.absolute() not in [each.absolute() for each in folders]:
            names = [each.name for each in folders]
            listed = did_you_mean(path.name, names) or f"; there are {', '.join(names[-5:]) or 'none'}"
            raise UserError(f"train.init_from = {path}: no such checkpoint{listed}")
    elif (folder / "recipe.toml").is_file():
        checkpoint = store.latest(folder)
    source, changed = Source(folder, checkpoint), tuple[str, ...]()
    if source.reader is not None and not meta_of(source.reader).replica_groups.aligned:
        raise UserError(
            f"train.init_from = {checkpoint} lies between outer steps: its replica groups have different weights. Take "
            "the checkpoint of an outer step, or the last one"
        )
    if source.reader is not None and Elsewhere.of(source.reader.folder, source.reader.meta):
        raise UserError(
            f"train.init_from = {where}: its checkpoints lack the frozen weights (checkpoint.frozen = false). Export "
            "it first (docs/own_model.md)"
        )
    asked = f"train.init_from = {where}"
    # A run's weights may be those of a user's own module, which its recipe does not describe
    if own is None and (source.reader is None or set(source.names()) == set(_names(_model(folder)))):
        here, dense = recipe.model, _model(folder)
        there = upcycled(dense, here)
        different, wrong = differences(here, there)
        if wrong:
            ours, theirs = getattr(here, wrong), getattr(there, wrong)
            raise UserError(
                f"{asked}: its model has {wrong} = {theirs}, and this recipe model.{wrong} = {ours}. Leave [model] out "
                f"of the recipe to take over the folder's (the recipe `continue` does), or set model.{wrong}={theirs}"
            )
        changed = tuple(f"model.{n} = {getattr(here, n)} (there {getattr(there, n)})" for n in different)
        changed += ("each expert a copy of its block's feed-forward layer",) * (there != dense)
    new = _same_shapes(asked, recipe, source, own)
    if tokenizer is not None and (folder / "tokenizer.json").is_file():
        _same_vocabulary(asked, folder / "tokenizer.json", recipe, tokenizer)
    at = str(checkpoint.resolve()) if checkpoint is not None else ""
    still, named = (card_of(recipe.model).frozen, str) if own is None else (own.frozen, own.card.named)
    there = set(source.names())  # copies that are experts here have no name there: checkpoints keep them
    frozen = {name: named(name) for name in sorted(still) if name not in new and named(name) in there}
    return Initial(str(folder.resolve()), at, fingerprint(folder, checkpoint), new, changed, frozen)


def _model(folder: Path) -> ModelSection:
    """The model of the folder, with every field set."""
    if (folder / "recipe.toml").is_file():
        model = load(str(folder / "recipe.toml")).model
    else:
        model = ModelSection(**hf_model(folder))
    return resolve_model(model, vocab_size=model.vocab_size or 2)


def _names(model: ModelSection) -> dict[str, Shape]:
    card = card_of(model)
    return card.parameters | card.buffers


def _same_shapes(said: str, recipe: Recipe, source: Source, own: CustomModel | None) -> tuple[str, ...]:
    """The parameters that the source lacks; only a user's own module may have any, and routers whose experts are copies
    (`upcycled`). Raises UserError: a weight has another shape, or only one side has it."""
    mine, named = (_names(recipe.model), str) if own is None else (own.tensors, own.card.named)
    known, used, new, fresh = set(source.names()), set[str](), [], (LOAD,)
    for name, shape in mine.items():
        there = named(name)
        if own is None and there not in known and copied(there) in known:
            there, shape, fresh = copied(there), shape[1:], ROUTER
        if there not in known:
            new.append(name)
            continue
        used.add(there)
        if source.shape(there) != shape:
            raise UserError(f"{said}: {there} has the shape {source.shape(there)} there, and {shape} here")
    left = sorted(known - used - ({named(name) for name in buffers_of(own.module)[1]} if own else set()))
    left = [name for name in left if own or not name.endswith(LOAD)]
    if (left and own is None) or len(left) == len(known):
        raise UserError(f"{said}: the model here has no parameter {left[0]}" + did_you_mean(left[0], mine))
    if left:
        raise UserError(
            f"{said}: your module has no parameter {left[0]}{did_you_mean(left[0], mine)}. It may have more parameters "
            "than the folder, and must have all of these. `named` of its card translates names"
        )
    if own is None and (lacks := [name for name in new if not name.endswith(fresh)]):
        raise UserError(f"{said}: it has no weight {lacks[0]}" + did_you_mean(lacks[0], known))
    return tuple(new)


def _same_vocabulary(said: str, path: Path, recipe: Recipe, tokenizer: Tokenizer) -> None:
    theirs = load_tokenizer(path).vocabulary()
    for token, number in tokenizer.vocabulary().items():
        if theirs.get(token) != number:
            other = theirs.get(token, "not a token")
            raise UserError(
                f"{said}: its vocabulary is another: {token!r:.60} is token {number} of data.tokenizer = "
                f"{recipe.data.tokenizer}, and there {other}. Leave data.tokenizer out of the recipe, or set "
                f"data.tokenizer={path}"
            )


def write_initial(out: Path, found: Initial) -> None:
    """Notes in the run folder where its weights came from."""
    make_folder(out)
    told = {key: value for key, value in asdict(found).items() if key != "frozen"}
    write_atomically(out / INITIAL, json.dumps(told, indent=2) + "\n")


def recorded(out: Path) -> str | None:
    """The hash of the weights with which the run in this folder began; None: they were random."""
    with suppress(UserError, OSError, KeyError, TypeError):
        return str(read_json(out / INITIAL)["fingerprint"])
    return None
