"""Weights to start from (`train.init_from`): found and checked before any rank starts, then read by each rank for its
part, in any layout."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from fivefold.checkpoint import store
from fivefold.checkpoint.source import Elsewhere, Source
from fivefold.comm import all_or_none
from fivefold.data.tokenizer import Tokenizer, load_tokenizer
from fivefold.errors import UserError, did_you_mean
from fivefold.files import expanded, guard, make_folder, read_json, write_atomically
from fivefold.models.card import card_of, resolve_model
from fivefold.models.custom import CustomModel, buffers_of
from fivefold.models.rules import differences
from fivefold.models.section import ModelSection
from fivefold.observe.report import INITIAL
from fivefold.recipe import Recipe, load
from fivefold.recipe.load import hf_model, required
from fivefold.sharding.parts import Shape, boxes
from fivefold.step.state import State
from fivefold.train.checked import check_files, meta_of

Rename = Callable[[str], str]


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


def initial(recipe: Recipe, tokenizer: Tokenizer | None = None, own: CustomModel | None = None) -> Initial:
    """Finds and checks `train.init_from` of a resolved recipe. tokenizer: of the run's data, if it has one. own: the
    user's own module.

    Raises:
        UserError: there is no such folder or checkpoint, or its model or vocabulary is another.
    """
    where = recipe.train.init_from
    folder = required(where)
    guard(folder)
    checkpoint = _checkpoint(expanded("train.init_from", where), folder)
    source, changed = Source(folder, checkpoint), tuple[str, ...]()
    if source.reader is not None and not meta_of(source.reader).aligned:
        raise UserError(
            f"train.init_from = {checkpoint} lies between outer steps: its sites have different weights. Take the "
            "checkpoint of an outer step, or the last one"
        )
    if source.reader is not None and Elsewhere.of(source.reader.folder, source.reader.meta):
        raise UserError(
            f"train.init_from = {where}: its checkpoints lack the frozen weights (checkpoint.frozen = false). Export "
            "it first (docs/own_model.md)"
        )
    said = f"train.init_from = {where}"
    # A run's weights may be those of a user's own module, which its recipe does not describe
    if own is None and (source.reader is None or set(source.names()) == set(_names(_model(folder)))):
        changed = _same_model(said, recipe.model, _model(folder))
    new = _same_shapes(said, recipe, source, own)
    _same_vocabulary(said, folder, recipe, tokenizer)
    at = str(checkpoint.resolve()) if checkpoint is not None else ""
    still, named = (card_of(recipe.model).frozen, str) if own is None else (own.frozen, own.card.named)
    frozen = {name: named(name) for name in sorted(still) if name not in new}
    return Initial(str(folder.resolve()), at, source.fingerprint(), new, changed, frozen)


def _checkpoint(path: Path, folder: Path) -> Path | None:
    """The checkpoint that is meant; None: a Hugging Face folder."""
    if path.absolute() != folder.absolute():
        found = store.checkpoints(folder)
        if path.absolute() not in [one.absolute() for one in found]:
            there = ", ".join(one.name for one in found[-5:])
            hint = did_you_mean(path.name, [one.name for one in found])
            listed = hint or f"; there are {there or 'none'}"
            raise UserError(f"train.init_from = {path}: no such checkpoint{listed}")
        return path
    return store.latest(folder) if (folder / "recipe.toml").is_file() else None


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


def _same_model(said: str, mine: ModelSection, theirs: ModelSection) -> tuple[str, ...]:
    """Fields that differ on purpose, in words.

    Raises:
        UserError: another field differs. The message has the first one, with both values.
    """
    changed, wrong = differences(mine, theirs)
    if wrong:
        ours, other = getattr(mine, wrong), getattr(theirs, wrong)
        raise UserError(
            f"{said}: its model has {wrong} = {other}, and this recipe model.{wrong} = {ours}. Leave [model] out of "
            f"the recipe to take over the folder's (the recipe `continue` does), or set model.{wrong}={other}"
        )
    return tuple(f"model.{name} = {getattr(mine, name)} (there {getattr(theirs, name)})" for name in changed)


def _same_shapes(said: str, recipe: Recipe, source: Source, own: CustomModel | None) -> tuple[str, ...]:
    """The parameters that the source lacks; only a user's own module may have any.

    Raises:
        UserError: a weight has another shape, or only one side has it.
    """
    mine, named = (_names(recipe.model), str) if own is None else (own.tensors, own.card.named)
    known, used, new = set(source.names()), set[str](), []
    for name, shape in mine.items():
        there = named(name)
        if there not in known:
            new.append(name)
            continue
        used.add(there)
        if source.shape(there) != shape:
            raise UserError(f"{said}: {there} has the shape {source.shape(there)} there, and {shape} here")
    left = sorted(known - used - ({named(name) for name in buffers_of(own.module)[1]} if own else set()))
    if (left and own is None) or len(left) == len(known):
        raise UserError(f"{said}: the model here has no parameter {left[0]}" + did_you_mean(left[0], mine))
    if left:
        raise UserError(
            f"{said}: your module has no parameter {left[0]}{did_you_mean(left[0], mine)}. It may have more parameters "
            "than the folder, and must have all of these. `named` of its card translates names"
        )
    if new and own is None:
        raise UserError(f"{said}: it has no weight {new[0]}" + did_you_mean(new[0], known))
    return tuple(new)


def _same_vocabulary(said: str, folder: Path, recipe: Recipe, tokenizer: Tokenizer | None) -> None:
    path = folder / "tokenizer.json"
    if tokenizer is None or not path.is_file():
        return
    theirs = load_tokenizer(path).vocabulary()
    for token, number in tokenizer.vocabulary().items():
        if theirs.get(token) != number:
            other = theirs.get(token, "not a token")
            raise UserError(
                f"{said}: its vocabulary is another: {token!r:.60} is token {number} of data.tokenizer = "
                f"{recipe.data.tokenizer}, and there {other}. Leave data.tokenizer out of the recipe, or set "
                f"data.tokenizer={path}"
            )


def load_initial(state: State, found: Initial, named: Rename = str, keep: bool = True) -> None:
    """Sets the weights. All ranks call it, and each reads its own part. keep: checkpoints keep frozen weights, too.

    Raises:
        UserError: a file is damaged or cannot be read. On all ranks.
    """
    run = state.mesh.axis("run")
    masters, disk = state.masters(), state.parallel.disk
    parts, buffers = state.parts(), state.buffers()
    with all_or_none(run):
        source = Source(Path(found.where), Path(found.checkpoint) if found.checkpoint else None)
        mine = [name for name in masters if name not in found.new]
        theirs = [name for name in buffers if name not in found.new]
    if source.reader is not None:
        reader = source.reader
        needed = {
            file
            for name in mine
            for _, box in boxes(parts[name].keeps)
            for file in reader.files_of("model", named(name), box)
        }
        needed = needed.union(*(reader.files_of("model", named(name)) for name in theirs))
        check_files(reader, needed, run)
    with all_or_none(run):
        for name in mine:
            weight = masters[name]
            for place, box in boxes(parts[name].keeps):
                weight[place].copy_(source.read(named(name), box))
            if disk is not None:
                disk.touched(weight.nbytes)
        for name in theirs:
            buffers[name].copy_(source.read(named(name), store.all_of(buffers[name].shape)))
    for replica in state.parallel.replicas:
        replica.refresh()
    if state.outer is not None:
        state.outer.start_from_masters()
    if found.frozen and not keep:
        state.elsewhere = Elsewhere(found.where, found.checkpoint, found.fingerprint, found.frozen)


def write(out: Path, found: Initial) -> None:
    """Notes in the run folder where its weights came from."""
    make_folder(out)
    told = {key: value for key, value in asdict(found).items() if key != "frozen"}
    write_atomically(out / INITIAL, json.dumps(told, indent=2) + "\n")


def recorded(out: Path) -> str | None:
    """The hash of the weights with which the run in this folder began; None: they were random."""
    with suppress(UserError, OSError, KeyError, TypeError):
        return str(read_json(out / INITIAL)["fingerprint"])
    return None
