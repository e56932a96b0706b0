"""How far two sides of `fivefold verify` are apart, and how far rounding may bring them.

Differences are relative: the norm of a tensor's difference divided by the norm of the reference tensor.

fp32: a difference within TOLERANCE is rounding. A larger one may be rounding, too, because optimizers amplify it: Adam
divides by the size of the gradient, so an element whose gradient is 0 but for rounding, such as a key bias, moves by
the whole learning rate, up or down. How far rounding may bring an element is computed, not guessed. Two more references
begin with weights whose last digit differs, and add to each gradient, or subtract, what is allowed between gradients:
each element's share is TOLERANCE times the gradient's root mean square, with a sign of its own. The reach of an element
is the larger of their distances from the reference. So whatever sign or threshold the optimizer depends on, one of the
two crosses it wherever rounding can. Elements that no token has met have no gradient, and get no share.

TIMES the reach is taken off each element's difference: rounding is not spread evenly, and three times its root mean
square covers nearly all of a normal distribution. A reach counts as at least its tensor's median, as later gradients
answer differently to other weights. What remains has to be within TOLERANCE of the tensor. A loss, a norm and a first
gradient may differ by TIMES what those of the two references do.

Other modes: the reference is one process in fp32. A layout may differ from it TIMES as much as one process in the mode
does, so the mode's own rounding is measured, not guessed (`precision.Mode`). Weights are compared all together here,
and so is each state of the optimizer: rounding flips the sign of some small gradients, and with it Adam's whole step of
those elements; how many is chance. Rounding is independent of the gradient, so nearly all of it is across the gradient.
The part along it is compared as well, `gradient_scale`. There a layout may be apart from one process in the mode by
TIMES the mode's own part, or its root mean square over all gradients: half a percent in bf16, where a wrong factor
shows. Of n elements' rounding about 1 / sqrt(n) falls along the gradient by chance, which counts in small tensors.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fivefold.checkpoint import store
from fivefold.kernels.hashing import keys
from fivefold.precision import PRECISIONS

TOLERANCE = {
    "loss": 1e-6, "gradients": 1e-5, "grad_norm": 1e-5, "weights": 1e-5, "gradient_scale": 1e-5, "moments": 1e-5,
    "auxiliary": 1e-5, "validation": 1e-6, "copies": 0.0,
}  # fmt: skip
SCALARS = ("loss", "grad_norm", "auxiliary", "validation")
LOSSES = {"loss", "validation"}  # the same number of other tokens
TIMES = 3.0  # tensor and sequence parallelism round elsewhere: up to 1.7 in tensors of 32 elements
FIRST, AFTER, END = "first", "after-", "end"
"""Folders of a side: the first gradient; the state after step N, where one follows the other; after the last."""
Key = tuple[str, str]
"""The kind of a figure, and its place."""


@dataclass
class Figure:
    """The largest relative difference of one kind, its place, and the tolerance there."""

    max_rel: float = 0.0
    worst: str = ""
    allowed: float = 0.0

    @property
    def passed(self) -> bool:
        return self.max_rel <= self.allowed

    def worse(self, other: Figure) -> Figure:
        """Returns the figure that is worse relative to its tolerance."""
        mine, theirs = (
            figure.max_rel / figure.allowed if figure.allowed else math.inf if figure.max_rel else 0.0
            for figure in (self, other)
        )
        return other if not self.worst or theirs > mine else self


class Limits:
    """What rounding may do. own: a mode's own differences from fp32. others: the two disturbed references. exact: the
    reference in fp32."""

    def __init__(
        self,
        mode: str,
        exact: Path,
        own: Iterable[tuple[Key, float]] = (),
        others: Sequence[Path] = (),
    ):
        self.mode, self.own, self.others = mode, dict(own), others
        self.first = store.Reader(exact / FIRST, finite=False)
        self.found: dict[Key, float] = {}  # of the disturbed references
        for other in others:
            for key, rel in between(other, exact, False):
                self.found[key] = max(self.found.get(key, 0.0), abs(rel))

    def figure(self, key: Key, rel: float) -> Figure:
        """A difference beside what is allowed."""
        kind, where = key
        if not self.own:
            # Elements have their own reach
            wide = 0.0 if kind in ("weights", "moments") else self.found.get(key, 0.0)
            return Figure(abs(rel), where, max(TOLERANCE[kind], TIMES * wide))
        alike = [other for (one, _), other in self.own.items() if one == kind or {one, kind} == LOSSES]
        if kind in SCALARS:  # a single number may be right by chance
            return Figure(rel, where, max(PRECISIONS[self.mode].roundoff, TIMES * max(alike)))
        if kind == "gradient_scale":
            usual = math.sqrt(sum(one * one for one in alike) / len(alike))
            by_chance = self.own["gradients", where] / math.sqrt(math.prod(self.first.shape("model", where)))
            return Figure(abs(rel - self.own[key]), where, TIMES * max(usual, abs(self.own[key]), by_chance))
        return Figure(rel, where, TIMES * self.own[key])


def between(
    side: Path, reference: Path, together: bool, others: Sequence[Path] = ()
) -> Iterator[tuple[Key, float]]:
    """((kind, where), relative difference) of everything that both sides wrote. together: all weights together, and
    each state of the optimizer. others: the references whose reach is taken off weights and states."""
    mine, theirs = (store.Reader(folder / END, finite=False) for folder in (side, reference))
    for kind in SCALARS:
        own, others_ = mine.meta[kind], theirs.meta[kind]
        assert together or own.keys() == others_.keys(), "both sides have the same figures"
        for where in own.keys() & others_.keys():  # a mode may have further ones
            yield (
                (kind, where),
                _relative(torch.tensor(own[where] - others_[where]), torch.tensor(others_[where])),
            )
    for state in sorted(path.name for path in reference.iterdir() if path.name != FIRST):
        yield from _of_states(state, [side, reference, *others], together)
    mine, theirs = (store.Reader(folder / FIRST, finite=False) for folder in (side, reference))
    for name in _names(mine, theirs, "model"):
        a, b = mine.read("model", name).double(), theirs.read("model", name).double()
        yield ("gradients", name), _relative(a - b, b)
        if size := b.square().sum().item():
            along = ((a - b) * b).sum().item() / size
            yield ("gradient_scale", name), along if math.isfinite(along) else math.inf


def _of_states(state: str, folders: Sequence[Path], together: bool) -> Iterator[tuple[Key, float]]:
    """The differences of weights and states of the optimizer."""
    readers = [store.Reader(folder / state, finite=False) for folder in folders]
    behind = "" if state == END else f", after step {state.removeprefix(AFTER)}"
    sums: dict[Key, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for kind, stored in (("weights", "model"), ("moments", "optimizer")):
        for name in _names(readers[0], readers[1], stored, together):
            a, b, *rest = (compared(name, one.read(stored, name).double()) for one in readers)
            if not together:
                reach = torch.stack(rest).sub_(b).abs().amax(0) if rest else None
                yield (kind, name + behind), _relative(beyond(a, b, reach), b)
                continue
            group = "all together" if kind == "weights" else name.partition(".")[0]
            for place, value in enumerate((a - b, b)):
                sums[kind, group + behind][place] += value.square().sum().item()
    for key, (difference, size) in sums.items():
        yield key, math.sqrt(difference / size) if size and math.isfinite(difference) else math.inf


def beyond(a: Tensor, b: Tensor, reach: Tensor | None) -> Tensor:
    """What remains of each element's difference without what rounding may do to it. reach: of each element; None: do
    not ask."""
    if reach is None:
        return a - b
    moved = reach[reach > 0]
    usual = moved.median() if moved.numel() else 0.0
    return ((a - b).abs() - TIMES * reach.clamp(min=usual)).clamp(min=0)


def compared(name: str, x: Tensor) -> Tensor:
    """The numbers of a state that are compared. Of a basis the products of its columns: rounding chooses eigenvectors,
    always their sign, but not that they are orthonormal."""
    return x.mT @ x if name.partition(".")[0].endswith("_basis") else x


@torch.no_grad()
def round_otherwise(weights: Mapping[str, Tensor], sign: int) -> None:
    """Moves each weight to its next or its previous number."""
    for name, weight in weights.items():
        weight.copy_(torch.nextafter(weight, _signs(name, weight) * (sign * math.inf)))


def disturb(gradients: Mapping[str, Tensor], sign: int) -> None:
    """Adds to each element of a gradient its share of what is allowed between gradients, or subtracts it. Rows without
    any gradient, such as those of tokens that no sequence has, get none."""
    for name, gradient in gradients.items():
        met = (gradient != 0).any(-1, keepdim=True).expand(gradient.shape)
        share = TOLERANCE["gradients"] * gradient.norm() / met.sum().clamp(min=1).sqrt()
        gradient.add_(_signs(name, gradient) * met * share, alpha=sign)


def _signs(name: str, like: Tensor) -> Tensor:
    """1 or -1 for each element."""
    drawn = torch.Generator(like.device).manual_seed(keys(name)[0])
    return torch.randint(0, 2, like.shape, generator=drawn, device=like.device, dtype=like.dtype) * 2 - 1


def _names(mine: store.Reader, theirs: store.Reader, kind: str, common: bool = False) -> list[str]:
    """common: those that both have; a mode may keep further states."""
    own, names = set(mine.names(kind)), theirs.names(kind)
    assert common or own == set(names), "both sides have the same parameters"
    return [name for name in names if name in own]


def _relative(rest: Tensor, b: Tensor) -> float:
    """Norm of a difference divided by the norm of the reference, b. Infinite if only the reference is zero, or if a
    norm is not finite."""
    difference, size = rest.double().norm().item(), b.double().norm().item()
    if difference == 0:
        return 0.0
    return difference / size if size and math.isfinite(difference / size) else math.inf
