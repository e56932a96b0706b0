"""An optimizer over named masters: its step, and its states to and from checkpoints. Masters are fp32; those in lower
precision are updated as fp32 copies of a few parameters at a time (`Rounded`).

It is a fused kernel, or a rule (`card.Rule`) that runs tensor by tensor and returns a direction. The weights then move
by -lr times it, and by -lr * weight_decay of themselves. Where a rule's card needs whole matrices, the pieces of the
gradients come together first (`Gathering`). Then the rule runs on the matrices that this rank owns, and the pieces of
the directions go back. It runs on each of the matrices that a parameter consists of.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from fivefold.kernels.adamw import AdamW
from fivefold.optim.card import CODES, COMPENSATION, OptimizerCard, Update
from fivefold.optim.rounding import Rounder, cut_off, scale_
from fivefold.precision import torch_dtype
from fivefold.sharding.parts import Sections, is_matrix, local_shape
from fivefold.sharding.units import updated_together


class Gathering(Protocol):
    """Brings pieces of matrices together on their owners, and back (parallel/replica.py).

    shapes: of the gathered tensors that this rank owns, by parameter. members: all parameters that are gathered.
    """

    shapes: Mapping[str, tuple[int, ...]]
    members: frozenset[str]

    def bring(self, pieces: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What this rank owns, put together from the pieces of all ranks."""
        ...

    def back(self, wholes: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's pieces of what the owners have."""
        ...


class Rules:
    """The optimizer of a card with a rule, over some masters.

    decays: weight decay of each. gathering: None: every parameter is whole, or needs nothing. sections: of the
    parameters that consist of several matrices. states: by the names of `card.matrices`; empty before the first step.
    number: see `Update`. estimates: of the Hessian's diagonal by parameter, while a step has them (step/curvature.py).
    """

    def __init__(
        self,
        card: OptimizerCard,
        masters: Mapping[str, Tensor],
        decays: Mapping[str, float],
        fields: Mapping[str, Any],
        compute: torch.dtype,
        gathering: Gathering | None = None,
        tokens: int = 1,
        sections: Mapping[str, Sections] | None = None,
    ):
        assert card.rule is not None
        self.card, self.masters, self.decays, self.compute = card, masters, decays, compute
        self.fields, self.gathering, self.tokens = fields, gathering, tokens
        self.sections = sections or {}
        self.states: dict[str, dict[str, Tensor]] = {}
        self.number = 0
        self.constants: dict[Any, Tensor] = {}
        self.estimates: Mapping[str, Tensor] = {}

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor], rates: Mapping[str, float], skip: Tensor | None) -> None:
        """Updates the masters of these gradients. rates: the learning rate of each. skip: where it is 1, nothing
        changes."""
        away = self.gathering.members & gradients.keys() if self.gathering else frozenset()
        for name, gradient in gradients.items():
            if name not in away:
                self._apply(name, self._direction(name, gradient, rates[name], skip), rates[name], skip)
        if away:
            assert self.gathering is not None
            wholes = self.gathering.bring({n: g for n, g in gradients.items() if n in away})
            for name in list(wholes):
                wholes[name] = self._direction(name, wholes[name], rates[name], skip)
            for name, direction in self.gathering.back(wholes).items():
                self._apply(name, direction, rates[name], skip)

    def _direction(self, name: str, gradient: Tensor, lr: float, skip: Tensor | None) -> Tensor:
        sections = self.sections.get(name)
        names = self.card.matrices(name, tuple(gradient.shape), sections)
        if sections is None or len(names) == 1:
            return self._of_one(name, name, gradient, lr, skip)
        found = torch.empty_like(gradient)
        both = (each.split(sections.sizes, sections.dim) for each in (gradient, found))
        for own, one, direction in zip(names, *both, strict=True):
            direction.copy_(self._of_one(name, own, one, lr, skip))
        return found

    def _of_one(self, name: str, own: str, gradient: Tensor, lr: float, skip: Tensor | None) -> Tensor:
        """The direction of a parameter, or of one of its matrices. own: its name in `card.matrices`."""
        fresh = own not in self.states
        states = self.states.setdefault(own, {})
        if fresh:  # zeros; the parameter is whole, or needs no other part
            for state, _, shape in self.card.states_of(name, tuple(gradient.shape)):
                dtype = torch.uint8 if state.dtype == CODES else torch_dtype(state.dtype)
                states[state.name] = torch.zeros(shape, dtype=dtype, device=gradient.device)
            if self.card.counts:
                states["step"] = torch.zeros((), device=gradient.device)
        before = {key: t.clone() for key, t in states.items()} if skip is not None else {}
        step = torch.ones((), dtype=torch.float64, device=gradient.device)
        if self.card.counts:
            step = states["step"].add_(1).double()
        weight = self.masters[name] if self.card.needs == "elements" else None
        if weight is not None and self.card.coupled and self.decays[name]:
            gradient = gradient.add(weight, alpha=self.decays[name])
        update = Update(
            step, self.number, fresh, lr, self.compute, self.fields, self.tokens, weight, self.constants,
            self.estimates.get(name),
        )  # fmt: skip
        assert self.card.rule is not None
        direction = self.card.rule(gradient, states, update)
        for key, old in before.items():
            states[key].copy_(torch.where(skip.bool(), old, states[key]))  # pyright: ignore[reportOptionalMemberAccess]
        return direction

    def _apply(self, name: str, direction: Tensor, lr: float, skip: Tensor | None) -> None:
        weight = self.masters[name]
        decay = 0.0 if self.card.coupled else self.decays[name]
        if skip is None:
            weight.mul_(1 - lr * decay).add_(direction, alpha=-lr)
        else:
            moved = (weight * (1 - lr * decay)).add_(direction, alpha=-lr)
            weight.copy_(torch.where(skip.bool(), weight, moved))


class Updater:
    """Runs a card's optimizer over `masters`, in place: one fused kernel, a rule, or a rule for some parameters and the
    kernel of the card's `rest` for the others.

    fields: values of the card's fields. weight_decay: of all parameters, or of each. It applies to matrices only: norms
    and biases have one dim. rates: factors of the learning rate by parameter; 1 where one is not listed. compute: the
    dtype in which the model computes. gathering: of the parameters whose pieces have to come together. tokens: of a
    batch. sections: of the parameters that consist of several matrices. streamed: True if a step goes on beside the
    next forward, and writes the working weights itself (parallel/offload). working: weights in bf16 that a step may
    write on its way; written: True if the last one did. largest: the largest |master| after the last update, a scalar
    where the update runs, NaN if any is; None before one. rounder: rounds what is kept in a lower precision than fp32.
    """

    streamed = written = False
    rounder: Rounder | None = None
    largest: Tensor | None = None
    working: Mapping[str, Tensor] | None = None

    def __init__(
        self,
        card: OptimizerCard,
        masters: Mapping[str, Tensor],
        lr: float,
        weight_decay: float | Mapping[str, float],
        fields: Mapping[str, Any],
        rates: Mapping[str, float] | None = None,
        compute: torch.dtype = torch.float32,
        gathering: Gathering | None = None,
        tokens: int = 1,
        sections: Mapping[str, Sections] | None = None,
    ):
        assert fields.keys() == card.fields.keys(), f"{card.name} has {[*card.fields]}, not {[*fields]}"
        self.card, self.masters, self.rates = card, masters, dict(rates or {})
        each = weight_decay if isinstance(weight_decay, Mapping) else dict.fromkeys(masters, weight_decay)
        decays = {name: each[name] if is_matrix(name, w.shape) else 0.0 for name, w in masters.items()}
        ruled = {name: w for name, w in masters.items() if card.of(name, tuple(w.shape)) is card}
        self.rules: Rules | None = None
        fused, kernel = masters, card
        if card.rule is not None:
            self.rules = Rules(card, ruled, decays, fields, compute, gathering, tokens, sections)
            fused = {name: w for name, w in masters.items() if name not in ruled}
            kernel = card.rest
        self.optimizer: torch.optim.Optimizer | None = None
        if fused:
            assert kernel is not None
            assert kernel.build is not None
            groups: dict[tuple[float, float], list[Tensor]] = {}
            for name, weight in fused.items():
                groups.setdefault((decays[name], self.rates.get(name, 1.0)), []).append(weight)
            params = [
                {"params": weights, "weight_decay": decay, "rate": rate}
                for (decay, rate), weights in groups.items()
            ]
            self.optimizer = kernel.build(params, lr, **{name: fields[name] for name in kernel.fields})
        self.fused = fused
        self.begun = False  # it has updated; the same on all ranks, whatever they own

    def step(
        self,
        gradients: Mapping[str, Tensor],
        lr: float,
        scale: Tensor | None = None,
        skip: Tensor | None = None,
    ) -> None:
        """Updates the masters of these gradients with them times `scale`, which may change the gradients, too.

        skip: fp32 scalar; where it is 1, masters and states stay as they are. The fused kernels read it on the device,
        under the name that gradient scalers gave it. Only the first update is decided on the host: it also makes the
        states, and a momentum that starts from its gradient must not start from a skipped one. On CPUs a rule is
        decided on the host, too: nothing waits there.
        """
        if skip is not None and self.card.state_names and not self.begun and skip.item():
            self.written = False
            self._count()
            return
        self.begun = True
        self._scale(gradients, scale)
        if self.optimizer is not None:
            self.optimizer.found_inf = skip  # pyright: ignore[reportAttributeAccessIssue]
            for name, weight in self.fused.items():
                weight.grad = gradients[name]
            for group in self.optimizer.param_groups:
                group["lr"] = lr * group["rate"]
            self.optimizer.step()
            self.written &= getattr(self.optimizer, "largest", None) is not None  # else it was skipped
        if self.rules is not None:
            on_host = skip is not None and skip.device.type == "cpu" and not getattr(skip, "fake", False)
            if not (on_host and skip is not None and skip.item()):
                ruled = {name: gradients[name] for name in self.rules.masters}
                rates = {name: lr * self.rates.get(name, 1.0) for name in ruled}
                self.rules.step(ruled, rates, None if on_host else skip)
        self.largest = self._largest(self.masters)
        self._count()

    def _largest(self, masters: Mapping[str, Tensor]) -> Tensor | None:
        """The largest of the masters that were just updated. A kernel that took it on its way has written it down."""
        known = self.optimizer.largest if isinstance(self.optimizer, AdamW) else None
        if known is None:
            return largest([*masters.values()])
        return largest([known, *(w for name, w in masters.items() if name not in self.fused)])

    def _scale(self, gradients: Mapping[str, Tensor], scale: Tensor | None) -> None:
        """Scales the gradients, or has them scaled by a kernel that does so on its way."""
        rest, self.written = list(gradients.values()), False
        optimizer: Any = self.optimizer
        if isinstance(self.optimizer, AdamW) and self.optimizer.one_pass:
            rest = [gradient for name, gradient in gradients.items() if name not in self.fused]
            self.optimizer.scale = scale
            if self.working is not None and self.fused.keys() == self.working.keys():
                self.optimizer.working = {self.fused[name]: self.working[name] for name in self.fused}
                self.written = True
        elif getattr(optimizer, "_step_supports_amp_scaling", False):
            optimizer.grad_scale = None  # not that of the step before
            if scale is not None and scale.is_cuda:
                rest = [gradient for name, gradient in gradients.items() if name not in self.fused]
                optimizer.grad_scale = scale.reciprocal()  # its kernels divide by it
        if scale is not None and rest:
            torch._foreach_mul_(rest, scale)

    def _count(self) -> None:
        if self.rules is not None:
            self.rules.number, self.rules.estimates = self.rules.number + 1, {}
        if self.rounder is not None:
            self.rounder.steps += 1

    def expect(self, lr: float) -> None:
        """Announces a step with this learning rate, which scales and skips nothing: parts may begin before it."""

    def settle(self) -> None:
        """Waits until the last step is done. Here it is."""

    def states(self) -> dict[str, Tensor]:
        """The states under their checkpoint names, {"exp_avg.NAME": ..., "exp_avg_sq.NAME": ...}; empty before the
        first step. Those of a gathered matrix are on its owner."""
        found = {}
        for name, weight in self.masters.items():
            states = {name: self.optimizer.state.get(weight, {}) if self.optimizer else {}}
            if self.rules is not None and name in self.rules.masters:
                own = self.card.matrices(name, tuple(weight.shape), self.rules.sections.get(name))
                states = {each: self.rules.states.get(each, {}) for each in own}
            for own, kept in states.items():
                found |= {f"{state}.{own}": kept[state] for state in self.card.state_names if state in kept}
        return found

    def load(self, tensors: Mapping[str, Tensor], steps: int, number: int | None = None) -> None:
        """Restores the states from tensors named as in `states`, the number of updates, and how many steps have begun
        (None: as many). Raises KeyError: a state is missing."""
        self.begun, self.largest = True, None
        gathering = self.rules.gathering if self.rules is not None else None
        if self.rules is not None:
            self.rules.number = steps if number is None else number
        for name, weight in self.masters.items():
            if gathering is not None and name in gathering.members and name not in gathering.shapes:
                continue  # its owner has them
            shape, sections = tuple(weight.shape), self.rules and self.rules.sections.get(name)
            states: dict[str, dict[str, Tensor]] = {n: {} for n in self.card.matrices(name, shape, sections)}
            for state, own, _ in self.card.states_of(name, shape, sections):
                states[own][state.name] = tensors[f"{state.name}.{own}"].to(weight.device, copy=True)
            for kept in states.values() if self.card.of(name, shape).counts else ():
                kept["step"] = torch.tensor(float(steps), device=weight.device)
            if self.rules is not None and name in self.rules.masters:
                self.rules.states |= states
            else:
                assert self.optimizer is not None
                self.optimizer.state[weight] = states[name]

    def begin(self, number: int) -> None:
        """Forgets the states: none of the `number` steps that have begun has changed the weights."""
        self.clear()
        if self.rules is not None:
            self.rules.number = number

    def clear(self) -> None:
        """Forgets the states."""
        self.begun, self.largest = False, None
        if self.optimizer is not None:
            self.optimizer.state.clear()
        if self.rules is not None:
            self.rules.states.clear()

    def kept(self) -> list[Tensor]:
        """Every tensor that the optimizer keeps now, step counts included."""
        fused = self.optimizer.state.values() if self.optimizer else ()
        ruled = self.rules.states.values() if self.rules else ()
        return [t for values in (*fused, *ruled) for t in values.values() if isinstance(t, Tensor)]


@torch.no_grad()
def largest(tensors: Sequence[Tensor]) -> Tensor | None:
    """The largest absolute value of all elements, NaN if any is: an fp32 scalar on their device. None: no elements."""
    tensors = [tensor for tensor in tensors if tensor.numel()]
    if not tensors:
        return None
    if tensors[0].device.type == "cpu":  # PyTorch's norm is slow there
        both = [each for tensor in tensors for each in torch.aminmax(tensor)]
    else:
        both = list(torch._foreach_norm(tensors, torch.inf))
    return torch.stack(both).abs().amax().float()


class Rounded(Updater):
    """Updates masters that are kept in a lower precision, with any optimizer that updates element by element.

    make: the optimizer over some fp32 masters. It has them and its states only while it runs.
    """

    rules = None

    def __init__(
        self,
        rounder: Rounder,
        masters: Mapping[str, Tensor],
        make: Callable[[Mapping[str, Tensor]], Updater],
    ):
        self.rounder = self._rounder = rounder
        self.masters, self.parts, self.card = masters, rounder.parts, rounder.card
        self.rounded: dict[str, Tensor] = {}  # states, by their checkpoint names
        self.scales: dict[str, Tensor] = {}  # of those in fp8
        sizes = {name: math.prod(self.parts[name].shape) for name in masters}
        self.inner = [
            make({name: _no_memory(masters[name]) for name in names}) for names in updated_together(sizes)
        ]

    def step(
        self,
        gradients: Mapping[str, Tensor],
        lr: float,
        scale: Tensor | None = None,
        skip: Tensor | None = None,
    ) -> None:
        for inner in self.inner:
            for name, copy in inner.masters.items():  # it gets its masters and states in fp32
                exact = self.masters[name].float()
                if (compensation := self.rounded.get(f"{COMPENSATION}.{name}")) is not None:
                    exact += compensation
                copy.data = exact
            for name, state in inner.states().items():
                if name in self.rounded:
                    state.data = self.rounded[name].float().mul_(self.scales.get(name, 1.0))
            inner.step({name: gradients[name].float() for name in inner.masters}, lr, scale, skip)
            for name, copy in inner.masters.items():  # they are rounded back, and the copies freed
                exact, weight = copy.data, self.masters[name]
                weight.copy_(self._round(exact, name, name, weight.dtype))
                if self._rounder.how == "kahan":
                    self.rounded[f"{COMPENSATION}.{name}"] = cut_off(exact, weight)
                copy.data, copy.grad = _no_memory(copy), None
                del exact
            self._leave_states(inner)
        self.largest = largest([inner.largest for inner in self.inner if inner.largest is not None])
        self._count()

    def states(self) -> dict[str, Tensor]:
        exact = {name: t for inner in self.inner for name, t in inner.states().items()}
        in_bf16 = {n: self.rounded[n].bfloat16().mul_(scale) for n, scale in self.scales.items()}  # exactly
        return exact | self.rounded | in_bf16

    def load(self, tensors: Mapping[str, Tensor], steps: int, number: int | None = None) -> None:
        """Without a compensation, it starts from zero."""
        for inner in self.inner:
            names = [f"{state}.{name}" for name in inner.masters for state in inner.card.state_names]
            inner.load({name: tensors[name].float() for name in names}, steps, number)
            self._leave_states(inner)
            if self._rounder.how == "kahan":
                for name in inner.masters:
                    key, weight = f"{COMPENSATION}.{name}", self.masters[name]
                    saved = tensors.get(key)
                    self.rounded[key] = (
                        torch.zeros_like(weight) if saved is None else saved.to(weight, copy=True)
                    )

    def begin(self, number: int) -> None:
        self.clear()
        for inner in self.inner:
            inner.begin(number)

    def clear(self) -> None:
        self.rounded.clear()
        self.scales.clear()
        for inner in self.inner:
            inner.clear()

    def kept(self) -> list[Tensor]:
        states = [t for inner in self.inner for t in inner.states().values()]
        hidden = {id(t) for t in states if t.dim() and t.numel() > 1 and not any(t.stride())}
        kept = [t for inner in self.inner for t in inner.kept() if id(t) not in hidden]
        return [*kept, *self.rounded.values(), *self.scales.values()]

    def _leave_states(self, inner: Updater) -> None:
        owners = {f"{state}.{name}": name for name in inner.masters for state in self.card.state_names}
        for name, state in inner.states().items():
            if state.dtype != torch.float32:
                continue  # it has a format of its own
            if self._rounder.dtype.itemsize == 1:
                self.scales[name] = scale_(state, divides=name.startswith(f"{self.card.second_moment}."))
            found = self._round(state, name, owners[name], self._rounder.dtype)
            if name in self.rounded:
                self.rounded[name].copy_(found)
            else:
                self.rounded[name] = found
            state.data = _no_memory(state)

    def _round(self, exact: Tensor, key: str, name: str, dtype: torch.dtype) -> Tensor:
        """Rounds a weight or a state of parameter `name`, at random only if it has the shape of this rank's part."""
        if tuple(exact.shape) != local_shape(self.parts[name].keeps):
            return exact.to(dtype)
        return self._rounder.round(exact, key, name, dtype)


def _no_memory(like: Tensor) -> Tensor:
    """An fp32 tensor of the same shape, with the memory of one number."""
    return like.new_zeros((), dtype=torch.float32).expand(like.shape)
