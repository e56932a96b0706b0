"""An optimizer as data, and which part of its states a rank keeps. Trainer, checkpoints, verify, recipes and planner
all read its card. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from fivefold.errors import UserError
from fivefold.precision import DTYPES, MASTER, Mode
from fivefold.sharding.layout import Layout
from fivefold.sharding.matrices import Needs, Outline, Route, outlines, routes
from fivefold.sharding.parts import Model, Part, Ranges, Shape, held, patterns, size_of, whole

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    Tensor = object  # the rules of this room name it in annotations, which nobody evaluates

Build = Callable[..., "torch.optim.Optimizer"]
"""build(groups, lr, **fields). groups: as torch's optimizers take them ({"params": [...], "weight_decay": ...}).
fields: the card's fields, with a recipe's values. It must run one fused kernel over all weights, which changes nothing
where the optimizer's `found_inf` is 1, and import torch itself."""


def fused(name: str, module: str = "torch.optim", **options: Any) -> Build:
    """A `Build` of a module's optimizer of this name, PyTorch's or one like it, with its fused kernel."""

    def build(groups: list[dict[str, Any]], lr: float, **fields: Any) -> torch.optim.Optimizer:
        return getattr(import_module(module), name)(groups, lr=lr, fused=True, **options, **fields)

    return build


@dataclass
class Update:
    """What a rule may read besides gradient and states.

    step: the number of this update of the tensor, from 1: an fp64 scalar on its device. number: how many steps the
    optimizer has begun, from 0, skipped ones included: the host knows it. fresh: True if the states were just made, all
    zeros. lr: the learning rate. compute: the dtype in which the model computes. fields: the card's. tokens: how
    many losses of the batch its mean gradient is of. weight: the master, if the rule's card needs elements only.
    constants: see `constant`; the same in all updates of an optimizer. estimate: of the Hessian's diagonal in this
    step, if its passes made one.
    """

    step: Tensor
    number: int
    fresh: bool
    lr: float
    compute: torch.dtype
    fields: Mapping[str, Any]
    tokens: int = 1
    weight: Tensor | None = None
    constants: dict[Any, Tensor] = field(default_factory=dict)
    estimate: Tensor | None = None

    def constant(self, values: tuple[float, ...], device: torch.device) -> Tensor:
        """These numbers in the device's memory, in fp32. They are copied there once: a copy waits for the device."""
        found = self.constants.get((values, device))
        if found is None:
            import torch

            found = self.constants[values, device] = torch.tensor(values, dtype=torch.float32, device=device)
        return found


Rule = Callable[["Tensor", dict[str, "Tensor"], Update], "Tensor"]
"""rule(gradient, states, update): changes the states in place, and returns the direction, which the learning rate
multiplies. It may change the gradient. It must wait for no value of the device."""

CODES = "uint8"
"""The dtype of quantised states, which no model computes in."""


def like_parameter(shape: Shape) -> Shape:
    return shape


@dataclass(frozen=True)
class OptimizerState:
    """A tensor per parameter. name: the key in the optimizer, and in a checkpoint (`NAME.PARAMETER`). dtype: of its
    elements. shape: its shape, given the parameter's, with as many dims. applies: which have it; None: all."""

    name: str
    dtype: str = MASTER
    shape: Callable[[Shape], Shape] = like_parameter
    applies: Callable[[str, Shape], bool] | None = None

    @property
    def bytes(self) -> float:
        """Bytes per element of the state."""
        return 1.0 if self.dtype == CODES else DTYPES[self.dtype].bytes


@dataclass(frozen=True)
class OptimizerCard:
    """The description of an optimizer.

    name: the value of `optim.name`. source: the paper. fields: its own fields of [optim] with their defaults; learning
    rate, weight decay and clipping are common to all. states: the tensors it keeps besides the masters. counts: True if
    the number of steps is kept with every tensor ("step", one fp32). second_moment: the state that averages the squared
    gradient, if the update divides by its root. usual_lr: the range of peak learning rates that are of use; `fivefold
    check` warns of others. width_power: mu-P divides the rate of a matrix between features by this power of its width
    (`models/mup.py`), which suits updates that do not depend on the gradient's size; None: not known.

    It is either fused (build: see `Build`) or a rule that runs tensor by tensor (rule: see `Rule`). Of a rule: needs:
    what the update of an element depends on. coupled: weight decay is added to the gradient; else it is decoupled.
    applies: the parameters that it updates; the others are left to the card `rest`, which is fused. reads: how often it
    reads and writes its memory, where a fused kernel does once. flops: those of an update, given a parameter's shape.
    jumps: why the rounding of a gradient may change an update by much; "": it does not. finds_largest: True if a
    kernel finds the largest weight on its way (`check_traffic`).
    """

    name: str
    source: str
    build: Build | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    states: Sequence[OptimizerState] = ()
    counts: bool = False
    second_moment: str | None = None
    rule: Rule | None = None
    needs: Needs = "elements"
    coupled: bool = False
    applies: Callable[[str, Shape], bool] = lambda name, shape: True
    rest: OptimizerCard | None = None
    reads: float = 1.0
    flops: Callable[[Shape], float] = lambda shape: 0.0
    jumps: str = ""
    usual_lr: tuple[float, float] = (1e-6, 0.03)
    width_power: float | None = None
    finds_largest: bool = False

    @property
    def state_names(self) -> tuple[str, ...]:
        """The names of all states that any parameter has."""
        rest = self.rest.state_names if self.rest else ()
        return tuple(dict.fromkeys((*(state.name for state in self.states), *rest)))

    @property
    def elementwise(self) -> bool:
        """True if any part of any parameter is updated alone, so that an update can run in chunks."""
        return self.build is not None or self.needs == "elements"

    @property
    def uniform(self) -> bool:
        """True if every state of every parameter has its shape."""
        return self.rest is None and all(s.shape is like_parameter and not s.applies for s in self.states)

    @property
    def bytes(self) -> float:
        """Bytes per parameter of all states, if the card is uniform."""
        assert self.uniform, f"{self.name}: see state_bytes"
        return sum(state.bytes for state in self.states)

    def check_traffic(self, one_pass: bool) -> float:
        """Bytes per parameter that are read behind an update to find the largest weight: masters, or fp32 copies.
        one_pass: the kernel could find it on its way, as on CPUs, and on GPUs if all masters lie in one buffer."""
        return 0.0 if one_pass and self.finds_largest else DTYPES[MASTER].bytes

    def of(self, name: str, shape: Shape) -> OptimizerCard:
        """The card that updates a parameter: this one, or `rest`."""
        if self.rest is None or self.applies(name, shape):
            return self
        return self.rest

    def states_of(self, name: str, shape: Shape) -> Iterator[tuple[OptimizerState, Shape]]:
        """The states of a parameter of this whole shape, with their shapes."""
        for state in self.of(name, shape).states:
            if state.applies is None or state.applies(name, shape):
                yield state, state.shape(shape)

    def state_bytes(self, name: str, shape: Shape) -> float:
        """Bytes of all states of a parameter."""
        return sum(state.bytes * math.prod(found) for state, found in self.states_of(name, shape))


COMPENSATION = "compensation"
"""The state of `precision.rounding = "kahan"`: what rounding has cut off a weight."""


def kept_in(card: OptimizerCard, mode: Mode, rounding: str) -> OptimizerCard:
    """The card with its states as a mode keeps them. Only elementwise cards are rounded."""
    if not mode.rounds or not card.elementwise:
        return card
    states = [replace(state, dtype=mode.state) if state.dtype == MASTER else state for state in card.states]
    if rounding == "kahan":
        states.append(OptimizerState(COMPENSATION, mode.master))
    return replace(card, states=tuple(states))


def rounding_traffic(copied: float) -> float:
    """Bytes per parameter that rounding adds to an update, besides random bits: fp32 copies, `copied` bytes, are
    written and read, and those of master and states are updated."""
    return 2 * copied + 2 * max(0.0, copied - DTYPES[MASTER].bytes)


def update_traffic(gradient: float, master: float, states: float, working: float) -> float:
    """Bytes per parameter that an update moves to and from memory. Arguments: bytes per parameter of each.

    The gradient is read twice: for its norm and for the update. Masters and states are read and written. Working
    weights are written, unless they are the masters.
    """
    return 2 * gradient + 2 * master + 2 * states + working


def ways(card: OptimizerCard, model: Model, layout: Layout, rank: int) -> dict[str, Route]:
    """How the pieces of matrices come together before an update, for the parameters whose update needs it."""
    return routes(model, layout, rank, needs) if (needs := _needs(card, model, layout)) else {}


def planned_ways(card: OptimizerCard, model: Model, layout: Layout, rank: int) -> dict[str, Outline]:
    """The same for the planner, which asks for sizes only."""
    return outlines(model, layout, rank, needs) if (needs := _needs(card, model, layout)) else {}


def _needs(card: OptimizerCard, model: Model, layout: Layout) -> dict[str, Needs]:
    if card.needs == "elements" or not (layout.tp > 1 or layout.zero):
        return {}
    return {
        n: card.needs
        for n, shape in model.parameters.items()
        if n not in model.frozen and card.of(n, shape).needs != "elements"
    }


def places(
    card: OptimizerCard, table: Mapping[str, Part], gathered: Mapping[str, Ranges | None]
) -> Iterator[tuple[OptimizerState, str, Part]]:
    """(state, parameter, the part of the state that this rank keeps). table: the rank's parts of the parameters.
    gathered: what it updates of those that come together; None: another rank does."""
    for name, part in table.items():
        kept = gathered.get(name, part.keeps)
        if kept is None or part.frozen:
            continue  # its states are on its owner, or nowhere
        for state, shape in card.states_of(name, part.shape):
            # Where the parameter is whole, so is the state; its other dims are divided alike.
            ranges = tuple(
                dim if dim != ((0, size),) else whole((own,))[0]
                for dim, size, own in zip(kept, part.shape, shape, strict=True)
            )
            yield state, name, replace(part, shape=shape, computes=ranges, keeps=ranges)


def gathered(found: Mapping[str, Route]) -> dict[str, Ranges | None]:
    """What a rank updates of each parameter with a way."""
    return {name: way.whole if way.mine else None for name, way in found.items()}


def state_bytes(card: OptimizerCard, model: Model, layout: Layout, rank: int) -> float:
    """Bytes of all states that a rank keeps."""
    table = held(model, layout, rank)
    if card.uniform:
        return card.bytes * sum(size_of(part.keeps) for part in table.values() if not part.frozen)
    found = {name: way.whole for name, way in planned_ways(card, model, layout, rank).items()}
    return sum(state.bytes * size_of(part.keeps) for state, _, part in places(card, table, found))


class Group(NamedTuple):
    """Parameters with factors of their own. pattern: of their names. lr: on the learning rate. decay: on the weight
    decay."""

    pattern: str
    lr: float = 1.0
    decay: float = 1.0


@lru_cache
def groups(text: str) -> tuple[Group, ...]:
    """The groups of `*.attention.*: lr=0.5 decay=0, head*: lr=2`. Raises UserError: the text is none."""
    found = []
    for part in patterns(text):
        pattern, colon, rest = (word.strip() for word in part.partition(":"))
        values: dict[str, float] = {}
        for word in rest.split():
            name, _, value = word.partition("=")
            try:
                number = float(value)
            except ValueError:
                number = -1.0
            if name not in ("lr", "decay") or name in values or not 0 <= number < float("inf"):
                raise UserError(
                    f"{part!r}: {word!r} must be lr=FACTOR or decay=FACTOR, a number of 0 or more"
                )
            values[name] = number
        if not (pattern and colon and values):
            raise UserError(f"{part!r}: must be a pattern with factors, such as 'head*: lr=0.5 decay=0'")
        found.append(Group(pattern, **values))
    return tuple(found)


def factors(text: str, name: str) -> tuple[float, float]:
    """The factors on a parameter's learning rate and weight decay: of the last group whose pattern matches its name."""
    matching = [group for group in groups(text) if fnmatchcase(name, group.pattern)]
    return matching[-1][1:] if matching else (1.0, 1.0)
