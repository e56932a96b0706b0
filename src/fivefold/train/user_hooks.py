"""What a user brings to a run in Python: callbacks, metrics, a loss, an optimizer, a schedule.

Ranks are processes of their own, and nothing of a user's is pickled on its way to them. A name travels,
`module:name`, which each rank imports.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from inspect import isclass
from pathlib import Path
from typing import Any, cast

from torch import nn

from fivefold.comm.progress import progress
from fivefold.errors import UserError
from fivefold.observe.faults import KINDS, ROLLBACK, USUAL
from fivefold.observe.trackers import TAGS, TAGS_BY_NAME
from fivefold.optim import OptimizerCard
from fivefold.optim.custom import Make, card_from
from fivefold.precision import PRECISIONS
from fivefold.recipe import Recipe
from fivefold.sharding.layout import Layout
from fivefold.sharding.tiers import NOT_OFFLOADED
from fivefold.step.custom import NOTHING, Loss, Metric, Schedule, UserFunctions, called

Optimizer = OptimizerCard | Make
MOMENTS = ("on_step", "on_validation", "on_save", "on_end")


@dataclass(frozen=True)
class Event:
    """What a callback is told.

    figures: of on_step the step's line of metrics.jsonl, of on_validation the validation's, of on_end the summary of
    the run. model: this rank's model as it is now, which a callback must not change; None where ranks divide it.
    checkpoint: of on_save, its folder. stop(why): ends the run after the next step, with everything saved.
    """

    step: int
    steps: int
    run: Path
    figures: Mapping[str, Any] = field(default_factory=dict[str, Any])
    model: nn.Module | None = None
    checkpoint: Path | None = None
    stop: Callable[[str], None] = lambda why: None


class Callback:
    """Is called around the steps of a run, on rank 0 only. Override what you need.

    The figures that `on_step` and `on_validation` return are added to the line in metrics.jsonl. An error ends the run.
    """

    def on_step(self, event: Event) -> Mapping[str, float] | None:
        """A step is done."""

    def on_validation(self, event: Event) -> Mapping[str, float] | None:
        """A validation is done."""

    def on_save(self, event: Event) -> None:
        """A checkpoint is complete. It may have been written beside some steps."""

    def on_end(self, event: Event) -> None:
        """The run has ended, complete or stopped; its report is written."""


CallbackLike = Callback | type[Callback] | partial[Callback] | str


@dataclass(frozen=True)
class Ref:
    """Something of the user's. what: the argument that it was given as. name: `module:name`. bound: positional and
    named arguments of a `functools.partial`. value: the object itself, in the process that it was given in."""

    what: str
    name: str
    bound: tuple[Sequence[Any], Mapping[str, Any]] = ((), {})
    value: Any = field(default=None, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"value": None}

    def get(self) -> Any:
        """The object: in another process, what is imported under its name.

        Raises:
            UserError: it cannot be imported.
        """
        if self.value is not None:
            return self.value
        found, (args, named) = imported(self.what, self.name), self.bound
        return partial(found, *args, **named) if args or named else found

    def travel(self) -> None:
        """Checks that another process can import it.

        Raises:
            UserError: it cannot. The message says what to do.
        """
        module, _, name = self.name.partition(":")
        main = getattr(sys.modules["__main__"], "__file__", None)
        kind, why = type(self.value).__name__, ""
        if not name and isinstance(self.value, Callback):
            why = (
                f"this object cannot travel to them. Pass the class {kind}, or partial({kind}, ...) of functools with "
                "numbers and texts"
            )
        elif not name:
            why = "this object cannot travel to them. Assign it at the top of a module and pass 'module:name'"
        elif "<lambda>" in name:
            why = "a lambda has no name to import. Write a function at the top of a module"
        elif "<locals>" in name:
            why = "what is defined inside a function cannot be imported. Move it to the top of its module"
        elif module == "__main__" and not (main and Path(main).is_file()):
            why = (
                "what is defined in a notebook or at the prompt cannot be imported. Put it into a file, such as "
                f"mine.py, and pass 'mine:{name}'"
            )
        elif not _is_plain(self.bound):
            why = "what its partial binds is no number, text or list of them. Bind such values only"
        elif imported(self.what, self.name) is not getattr(self.value, "func", self.value):
            why = f"'{self.name}' is another object. Pass the name of this one"
        if why:
            raise UserError(
                f"{self.what} = {self.word}: ranks are processes of their own, and {why}, or train with nproc=1"
            )

    @property
    def word(self) -> str:
        """Its name with what it binds, for messages."""
        args, named = self.bound
        bound = [*map(repr, args), *(f"{key}={value!r}" for key, value in named.items())]
        return (self.name or type(self.value).__name__) + (f"({', '.join(bound)})" if bound else "")


def _is_plain(bound: object) -> bool:
    with suppress(TypeError, ValueError):
        return bool(json.dumps(bound))
    return False


def ref(what: str, given: Any) -> Ref:
    """What a user has given: an object, or its name.

    Raises:
        UserError: the name cannot be imported.
    """
    if isinstance(given, str):
        return Ref(what, given, value=imported(what, given))
    bound: tuple[Sequence[Any], Mapping[str, Any]] = ((), {})
    inner = given
    if isinstance(given, partial):
        inner, bound = given.func, (given.args, given.keywords)
    module, name = getattr(inner, "__module__", None), getattr(inner, "__qualname__", None)
    return Ref(what, f"{module}:{name}" if module and name else "", bound, given)


def imported(what: str, name: str) -> Any:
    """The object of a name `module:name`.

    Raises:
        UserError: there is none.
    """
    module, colon, path = name.partition(":")
    if not (module and colon and path):
        raise UserError(f"{what} = '{name:.100}': must have the form module:name, such as mine.losses:focal")
    try:
        found = import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise UserError(f"{what} = '{name:.100}' cannot be imported: {why}") from error
    return found


@dataclass(frozen=True)
class UserHooks:
    """What a user brings. It travels to other ranks by names."""

    callbacks: tuple[Ref, ...] = ()
    metrics: Mapping[str, Ref] = field(default_factory=dict[str, Ref])
    loss: Ref | None = None
    optimizer: Ref | None = None
    schedule: Ref | None = None

    @property
    def everything(self) -> list[Ref]:
        single = [one for one in (self.loss, self.optimizer, self.schedule) if one is not None]
        return [*self.callbacks, *self.metrics.values(), *single]

    @property
    def unplanned(self) -> str:
        """What the planner does not know, or ""."""
        one = self.optimizer or self.loss
        return "" if one is None else f"{'an optimizer' if one is self.optimizer else 'a loss'} of your own"

    def identity(self) -> dict[str, str]:
        """What a resumed run has to bring again."""
        named = {"loss": self.loss, "schedule": self.schedule}
        found = {key: "the recipe's" if one is None else one.word for key, one in named.items()}
        return found if self.optimizer is None else found | {"optim.name": self.optimizer.word}

    def functions(self) -> UserFunctions:
        """What takes the place of the recipe's on this rank."""
        if not (self.loss or self.optimizer or self.schedule):
            return NOTHING
        card = None
        if self.optimizer is not None:
            card = replace(card_from(self.optimizer.get(), self.optimizer.word), name=self.optimizer.word)
        return UserFunctions(self.loss and self.loss.get(), card, self.schedule and self.schedule.get())

    def check(self, recipe: Recipe, module: nn.Module | None, travels: bool) -> None:
        """Refuses what cannot be trained, before any process starts. travels: ranks are started from this process.

        Raises:
            UserError: what does not combine, or cannot travel.
        """
        if not self.everything:
            return
        for one in self.everything:
            if travels:
                one.travel()
            if one not in self.callbacks and one is not self.optimizer and not callable(one.get()):
                raise UserError(f"{one.what} must be a function, not {one.get()!r:.60}")
        for one in self.callbacks:
            found = getattr(one.get(), "func", one.get())
            if not any(callable(getattr(found, moment, None)) for moment in MOMENTS):
                raise UserError(
                    f"callbacks: {one.word} has none of {', '.join(MOMENTS)}; derive it from fivefold.Callback"
                )
        if recipe.servers.count:
            raise UserError(
                f'{self.everything[0].what} of your own: not supported with sync.method = "server". Nearest valid: '
                'sync.method = "all"'
            )
        if module is not None and (self.loss or self.metrics):
            one = self.loss or next(iter(self.metrics.values()))
            raise UserError(
                f"{one.what}: a module of your own computes its loss itself and has no logits to measure. Compute it "
                "in the module, or in a callback"
            )
        if self.loss is not None and recipe.train.z_loss:
            raise UserError(
                f"train.z_loss = {recipe.train.z_loss} is a part of the recipe's loss, and loss = {self.loss.word} "
                "takes its place. Nearest valid: train.z_loss = 0"
            )
        if self.optimizer is not None:
            _check_optimizer(recipe, self.optimizer)


def _check_optimizer(recipe: Recipe, optimizer: Ref) -> None:
    given, layout = optimizer.get(), Layout.from_recipe(recipe.layout)
    card_from(given, optimizer.word)
    if layout.offload != NOT_OFFLOADED:
        raise UserError(
            f'layout.offload = "{layout.offload}" is not supported with an optimizer of your own. Nearest valid: "none"'
        )
    mode = recipe.precision.mode
    if mode != "auto" and PRECISIONS[mode].rounds:
        raise UserError(
            f'precision.mode = "{mode}" is not supported with an optimizer of your own. Nearest valid: "bf16"'
        )
    if not isinstance(given, OptimizerCard) and layout.divided:
        raise UserError(
            f"optimizer = {optimizer.word}: a torch optimizer supports plain data parallelism only (dp=N). Nearest "
            "valid: --layout dp=N, or an OptimizerCard (docs/add/optimizer.md)"
        )


WITHOUT = UserHooks()
_LINES = "step", "sample", "alarm", "slow_rank", "compression_errors"
RUNS_OWN = {*TAGS, *TAGS_BY_NAME, *KINDS, *USUAL, ROLLBACK, *_LINES}
"""Figures of metrics.jsonl that readers take for the run's own, in whatever line they are."""
MEASURED = ("loss", "bits_per_byte")
"""Metrics of every validation."""


def brings(
    callbacks: Sequence[CallbackLike] = (),
    metrics: Mapping[str, Metric | str] | None = None,
    loss: Loss | str | None = None,
    optimizer: Optimizer | str | None = None,
    schedule: Schedule | str | None = None,
) -> UserHooks:
    """What a user has given, as the arguments of `fivefold.train`.

    Raises:
        UserError: a name cannot be imported, or a metric has no usable name.
    """
    for name in metrics or {}:
        if not name.isidentifier() or name in MEASURED:
            raise UserError(
                f"metrics: {name!r:.60} must be a word of letters, digits and _, and none of {', '.join(MEASURED)}"
            )
    if isinstance(callbacks, str | Callback | type | partial):
        callbacks = [callbacks]
    return UserHooks(
        tuple(ref("callbacks", one) for one in callbacks),
        {name: ref(f"metrics[{name!r}]", one) for name, one in (metrics or {}).items()},
        None if loss is None else ref("loss", loss),
        None if optimizer is None else ref("optimizer", optimizer),
        None if schedule is None else ref("schedule", schedule),
    )


class Callbacks:
    """The callbacks of a run, on rank 0. stopped: why one of them has stopped the run."""

    def __init__(self, own: UserHooks, run: Path, steps: int) -> None:
        self.run, self.steps, self.stopped = run, steps, ""
        self._all: list[tuple[str, Any]] = []
        for one in own.callbacks:
            callback: Any = one.get()
            build = isclass(callback) or hasattr(callback, "func")  # a class, or a partial of one
            self._all.append((one.word, called(f"callbacks: {one.word}()", callback) if build else callback))

    def __bool__(self) -> bool:
        return bool(self._all)

    def tell(self, moment: str, step: int, **more: Any) -> dict[str, float]:
        """Calls one of `MOMENTS`. Returns the figures that they gave. Other ranks wait longer meanwhile.

        Raises:
            UserError: a callback has failed, or its figures are none.
        """
        added: dict[str, float] = {}
        for name, callback in self._all:
            event = Event(step, self.steps, self.run, stop=partial(self._stop, name), **more)
            call, who = getattr(callback, moment, None), f"callback {name}.{moment}"
            if call is None:
                continue
            with progress.phase("a callback"):
                figures: Any = called(f"{who} in step {step}", call, event)
            if not isinstance(figures, Mapping | None):
                raise UserError(f"{who} returned {figures!r:.60}: must be None or numbers by name")
            for key, value in cast("Mapping[Any, Any]", figures or {}).items():
                taken = key in event.figures or key in added or key in RUNS_OWN
                if taken or not isinstance(key, str) or not key.isidentifier():
                    raise UserError(f"{who}: a figure's name must be a new word; {key!r:.60} is not")
                if not isinstance(value, int | float):
                    raise UserError(f"{who}: {key} = {value!r:.60} must be a number")
                added[key] = value
        return added

    def _stop(self, name: str, why: str = "") -> None:
        self.stopped = self.stopped or (f"{name}: {why}" if why else name)
