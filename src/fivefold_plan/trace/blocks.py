"""What a trace knows of a compiled block, and how it keeps for backward what that keeps (see compiled.py)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch.autograd import Variable
from torch.autograd.graph import saved_tensors_hooks

from fivefold.errors import several
from fivefold.models.card import card_of
from fivefold.models.recomputation import of_blocks
from fivefold.parallel.parallelize import rounded_blocks
from fivefold.recipe import Recipe
from fivefold.sharding.layout import Layout
from fivefold.sharding.parts import stage_blocks
from fivefold_plan.trace.memory import Tracker


@dataclass
class Block:
    """What one kind of block is compiled to. compiled: False if the trainer leaves it to Python. breaks: "at" which
    "file:line" it returns to Python, and "why": the first line of Dynamo's reason. kernels: in forward and in backward,
    without messages. moved: bytes that all of them but matmuls and attention read and write. kept: bytes of the
    storages that graphs keep for backward, weights left out."""

    compiled: bool
    graphs: int = 0
    breaks: list[dict[str, str]] = field(default_factory=list)
    kernels: list[int] = field(default_factory=lambda: [0, 0])
    moved: list[int] = field(default_factory=lambda: [0, 0])
    kept: list[int] = field(default_factory=list)

    def count(self, backward: bool, kernels: int, moved: int) -> None:
        self.kernels[backward] += kernels
        self.moved[backward] += moved

    @property
    def whole(self) -> bool:
        """True if one graph has all of it. Else code between graphs keeps tensors for backward, too."""
        return self.graphs == 1 and not self.breaks

    @property
    def text(self) -> str:
        kernels = "{} kernels in forward, {} in backward".format(*self.kernels)
        if not self.compiled:
            return f"{kernels}; it is not compiled"
        places = "".join(f", at {one['at']}" for one in self.breaks)
        count = f"{several(self.graphs, 'graph')}, {several(len(self.breaks), 'break')}{places}"
        keeps = f"; keeps {sum(self.kept) / 2**20:,.1f} MiB for backward" if self.whole else ""
        return f"{kernels}; {count}{keeps}"


Blocks = Mapping[str, Block]
"""By their kind."""


def kinds(recipe: Recipe) -> list[str]:
    """The kind of each block of a recipe's model, by all that its graphs depend on: its mode of recomputation, whether
    it has experts or a window, whether it multiplies in bf16 though others round, and what of it gets no gradient."""
    card, modes = card_of(recipe.model), of_blocks(recipe.layout.recompute, recipe.model.blocks)
    rounded, trained, found = rounded_blocks(recipe), trained_inputs(recipe), list[str]()
    for number, mode in enumerate(modes):
        block = f"{card.stack}.{number}."
        weights = sorted(name.removeprefix(block) for name in card.frozen if name.startswith(block))
        fixed = ["its input"] * (not trained[number]) + weights
        kind = f"{mode}, {card.words_of(number)}" + " for a further token" * (number >= recipe.model.layers)
        kind += " in bf16" * (len(rounded) > 0 and number not in rounded)
        found.append(kind + f" without gradients of {', '.join(fixed)}" * bool(fixed))
    return found


def trained_inputs(recipe: Recipe) -> list[bool]:
    """True for each block whose input gets a gradient: something before it is trained, or a pipeline brings it."""
    card, layers = card_of(recipe.model), range(recipe.model.blocks)
    first = stage_blocks(card, Layout.from_recipe(recipe.layout))[0]
    trained = [name for name in card.parameters if name not in card.frozen]
    before = any(name.startswith(card.beginning) for name in trained)
    blocks = {int(name.split(".")[1]) for name in trained if name.startswith(f"{card.stack}.")}
    return [before or number not in first or any(other < number for other in blocks) for number in layers]


def living_on(block: nn.Module, tables: Iterable[Tensor], options: Mapping[str, Any]) -> list[Tensor]:
    """What lives longer than a pass of a block: weights, and inputs of all blocks. options: may have "documents"."""
    documents = options.get("documents")
    given = [documents.first, documents.cumulative, documents.number] if documents is not None else []
    return [*block.parameters(), *block.buffers(), *tables, *given]


class Kept:
    """The tensors that one pass of a compiled block keeps. Operations that run one by one offer other tensors to
    autograd than the block's graphs keep. Of those, each storage whose size a graph keeps is kept; others are dropped,
    and made again when backward asks. What graphs keep and no operation offers is allocated in the end.

    sizes: bytes of the graphs' storages. living: what lives longer anyway, see `living_on`; asked at each tensor, since
    weights may be gathered within the pass.
    """

    def __init__(self, sizes: Iterable[int], living: Callable[[], Iterable[Tensor]]) -> None:
        self.left, self.living, self.others = Counter(sizes), living, list[Any]()
        self.there = set[int]()  # storages of the sizes
        self.away = set[int]()  # storages that have left the device
        self.outer = _top_saved_tensors_default_hooks(True)
        """Those of offloaded activations, which get what is kept."""

    def pack(self, tensor: Tensor) -> Any:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        new = key not in self.there and all(key != t.untyped_storage()._cdata for t in self.living())
        if new and (not self.left[size] or key in self.away):
            shape, stride = tensor.shape, tensor.stride()
            return partial(torch.empty_strided, shape, stride, dtype=tensor.dtype, device=tensor.device)
        packed = self.pack_outside(tensor)
        if new:
            self.left[size] -= 1
            (self.there if packed is tensor else self.away).add(key)
        return packed

    def unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, partial):
            return packed()
        return self.unpack_outside(packed)

    def pack_outside(self, tensor: Tensor) -> Any:
        """`pack` of code between graphs, which keeps all."""
        return self.outer[0](tensor) if self.outer else tensor

    def unpack_outside(self, packed: Any) -> Tensor:
        return self.outer[1](packed) if self.outer else packed

    def rest(self, x: Tensor) -> None:
        """Keeps what no operation has offered: the block's input, or memory of the size."""
        storage = x.untyped_storage()
        for size in self.left.elements():
            own = size == storage.nbytes() and storage._cdata not in self.there | self.away
            other = x.detach() if own else torch.empty(size, dtype=torch.uint8, device=x.device)
            if own:
                self.there.add(storage._cdata)
            self.others.append(self.outer[0](other) if self.outer else other)


def keep_as_compiled(stages: Iterable[nn.Module], recipe: Recipe, blocks: Blocks, tracker: Tracker) -> None:
    """Lets the compiled blocks of a rank's stages keep for backward what their graphs keep. tracker: learns when
    their code runs."""
    by_number, stack = kinds(recipe), card_of(recipe.model).stack
    for stage in stages:
        for number, block in stage.get_submodule(stack).named_children():
            if blocks[by_number[int(number)]].graphs:
                _keep(block, blocks[by_number[int(number)]], tracker)


def _keep(module: nn.Module, block: Block, tracker: Tracker) -> None:
    forward: Callable[..., Any] = module.forward

    @wraps(forward)
    def run(x: Tensor, *tables: Tensor, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(x, *tables, **options)
        kept = Kept(block.kept, partial(living_on, module, tables, options))
        tracker.enter_code(kept)
        with saved_tensors_hooks(kept.pack, kept.unpack):
            out = forward(x, *tables, **options)
        first = not x.requires_grad  # no earlier block has a backward
        if out.requires_grad:
            kept.rest(x)
        tracker.leave_code(kept)

        def begins(_: Tensor) -> None:  # without x: the graph may live on until the next one is done
            tracker.enter_code(kept)
            kept.others = list(map(kept.unpack, kept.others))
            if first:
                Variable._execution_engine.queue_callback(ended)

        def ended(_: Tensor | None = None) -> None:
            tracker.leave_code(kept)
            kept.others.clear()

        if out.requires_grad:
            out.register_hook(begins)
        if not first:
            x.register_hook(ended)
        return out

    module.forward = run  # pyright: ignore[reportAttributeAccessIssue]


def outside_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """In place of `torch.compiler.disable`: code between graphs, which keeps what its operations keep."""
    return _kept_by(function, lambda kept: (kept.pack_outside, kept.unpack_outside))


def inside_graphs(function: Callable[..., Any], **_: Any) -> Callable[..., Any]:
    """In place of `torch.compile`: code between graphs calls a graph."""
    return _kept_by(function, lambda kept: (kept.pack, kept.unpack))


def _kept_by(function: Callable[..., Any], hooks: Callable[[Kept], Any]) -> Callable[..., Any]:
    @wraps(function)
    def run(*args: Any, **options: Any) -> Any:
        there = _top_saved_tensors_default_hooks(True)
        kept = getattr(there[0], "__self__", None) if there else None
        if not isinstance(kept, Kept):
            return function(*args, **options)  # not those of recomputation
        with saved_tensors_hooks(*hooks(kept)):
            return function(*args, **options)

    return run
