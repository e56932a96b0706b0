"""An optimizer as data. Trainer, checkpoints, verify, recipes and planner all read its card. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fivefold.precision import DTYPES, MASTER

if TYPE_CHECKING:
    import torch

Build = Callable[..., "torch.optim.Optimizer"]
"""build(groups, lr, **fields). groups: as torch's optimizers take them ({"params": [...], "weight_decay": ...}).
fields: the card's fields, with a recipe's values. It must run one fused kernel over all weights, which changes nothing
where the optimizer's `found_inf` is 1, and import torch itself."""


@dataclass(frozen=True)
class OptimizerState:
    """A tensor per parameter, of the parameter's shape. name: the key in torch's optimizer, and in a checkpoint
    (`NAME.PARAMETER`). dtype: of its elements."""

    name: str
    dtype: str = MASTER

    @property
    def bytes(self) -> float:
        """Bytes per element."""
        return DTYPES[self.dtype].bytes


@dataclass(frozen=True)
class OptimizerCard:
    """The description of an optimizer.

    name: the value of `optim.name`. source: the paper. build: see `Build`. fields: its own fields of [optim] with their
    defaults; learning rate, weight decay and clipping are common to all. states: the tensors it keeps besides the
    masters. counts: True if torch keeps the number of steps with every tensor ("step", one fp32). second_moment: the
    state that averages the squared gradient, if the update divides by its root. elementwise: the update of an element
    depends on nothing but that element's weight, gradient and states (and on scalars), so it can run in parts.
    """

    name: str
    source: str
    build: Build
    fields: Mapping[str, Any] = field(default_factory=dict)
    states: Sequence[OptimizerState] = ()
    counts: bool = False
    second_moment: str | None = None
    elementwise: bool = True

    @property
    def state_names(self) -> tuple[str, ...]:
        return tuple(state.name for state in self.states)

    @property
    def bytes(self) -> float:
        """Bytes per parameter of all states."""
        return sum(state.bytes for state in self.states)


def update_traffic(gradient: float, master: float, states: float, working: float) -> float:
    """Bytes per parameter that an update moves to and from memory. Arguments: bytes per parameter of each.

    The gradient is read twice: for its norm and for the update. Masters and states are read and written. Working
    weights are written, unless they are the masters.
    """
    return 2 * gradient + 2 * master + 2 * states + working
