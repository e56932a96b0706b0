"""What a trace knows of a compiled block, and how it keeps for backward what that keeps (see compiled.py)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch.autograd.graph import saved_tensors_hooks

from fivefold.models.card import card_of
from fivefold.models.recomputation import of_blocks
from fivefold.recipe import Recipe
from fivefold.trace.memory import Region


@dataclass(frozen=True)
class Break:
    """Where a compiled block returns to Python. why: the first line of Dynamo's reason. at: "file:line"."""

    why: str
    at: str


@dataclass
class Block:
    """What one kind of block is compiled to. compiled: False if the trainer leaves it to Python. forward, backward:
    kernels, without messages. moved: bytes that all of them but matmuls and attention read and write, in forward and in
    backward. kept: bytes of the storages that graphs keep for backward, weights left out."""

    compiled: bool
    graphs: int = 0
    breaks: list[Break] = field(default_factory=list)
    forward: int = 0
    backward: int = 0
    moved: list[int] = field(default_factory=lambda: [0, 0])
    kept: list[int] = field(default_factory=list)

    @property
    def text(self) -> str:
        kernels = f"{self.forward} kernels in forward, {self.backward} in backward"
        if not self.compiled:
            return f"{kernels}; it is not compiled"
        places = "".join(f", at {one.at}" for one in self.breaks)
        count = f"{self.graphs} graph{'s' * (self.graphs > 1)}, {len(self.breaks)} breaks{places}"
        return f"{kernels}; {count}; keeps {sum(self.kept) / 2**20:,.1f} MiB for backward"

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, kept: dict[str, Any]) -> Block:
        return cls(**{**kept, "breaks": [Break(**one) for one in kept["breaks"]]})


Blocks = Mapping[str, Block]
"""By their kind."""


def kinds(recipe: Recipe) -> list[str]:
    """The kind of each block of a recipe's model: its mode of recomputation, with " with experts" if it has any."""
    card, modes = card_of(recipe.model), of_blocks(recipe.layout.recompute, recipe.model.layers)
    return [mode + " with experts" * card.is_mixed(number) for number, mode in enumerate(modes)]


class Dropped(NamedTuple):
    """A tensor that backward makes again."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class Kept:
    """The tensors that one pass of a compiled block keeps. Operations that run one by one offer other tensors to
    autograd than the block's graphs keep. Of those, each storage whose size a graph keeps is kept; others are dropped,
    and made again when backward asks. What graphs keep and no operation offers is allocated in the end.

    sizes: bytes of the graphs' storages. there: storages that live longer anyway: weights, and inputs of all blocks.
    """

    def __init__(self, sizes: Iterable[int], there: set[int]) -> None:
        self.left, self.there, self.others = Counter(sizes), there, list[Tensor]()
        self.outer = _top_saved_tensors_default_hooks(True)
        """Those of offloaded activations, which get what is kept."""

    def pack(self, tensor: Tensor) -> Any:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.there:
            if not self.left[storage.nbytes()]:
                return self, Dropped(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
            self.left[storage.nbytes()] -= 1
            self.there.add(storage._cdata)
        return self, (self.outer[0](tensor) if self.outer else tensor)

    def unpack(self, packed: tuple[Kept, Any]) -> Tensor:
        given = packed[1]
        if isinstance(given, Dropped):
            return torch.empty_strided(given.shape, given.stride, dtype=given.dtype, device=given.device)
        return self.outer[1](given) if self.outer else given

    def rest(self, x: Tensor) -> None:
        """Keeps what no operation has offered: the block's input, or memory of the size."""
        for size in self.left.elements():
            own = size == x.untyped_storage().nbytes() and not self.others
            self.others.append(x.detach() if own else torch.empty(size, dtype=torch.uint8, device=x.device))


def keep_as_compiled(stages: Iterable[nn.Module], recipe: Recipe, blocks: Blocks, region: Region) -> None:
    """Lets the compiled blocks of a rank's stages keep for backward what their graphs keep. region: learns when their
    code runs."""
    by_number, stack = kinds(recipe), card_of(recipe.model).stack
    for stage in stages:
        for number, block in stage.get_submodule(stack).named_children():
            if blocks[by_number[int(number)]].graphs:
                _keep(block, blocks[by_number[int(number)]], region)


def _keep(module: nn.Module, block: Block, region: Region) -> None:
    forward: Callable[..., Any] = module.forward

    @wraps(forward)
    def run(x: Tensor, *tables: Tensor, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(x, *tables, **options)
        alive = [*module.parameters(), *module.buffers(), *tables]
        if (documents := options.get("documents")) is not None:
            alive += [documents.first, documents.cumulative]
        kept = Kept(block.kept, {tensor.untyped_storage()._cdata for tensor in alive})
        region.enter(kept)
        with saved_tensors_hooks(kept.pack, kept.unpack):
            out = forward(x, *tables, **options)
        kept.rest(x)
        region.leave(kept)

        def ended(_: Tensor) -> None:  # the graph may live on until the next one is done
            region.leave(kept)
            kept.others.clear()

        out.register_hook(lambda _: region.enter(kept))
        x.register_hook(ended)
        return out

    module.forward = run  # pyright: ignore[reportAttributeAccessIssue]


def outside_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """In place of `torch.compiler.disable`: code between graphs, which keeps what its operations keep."""

    def same(tensor: Tensor) -> Tensor:
        return tensor

    @wraps(function)
    def run(*args: Any, **options: Any) -> Any:
        hooks = _top_saved_tensors_default_hooks(True)
        if hooks is None or not isinstance(getattr(hooks[0], "__self__", None), Kept):
            return function(*args, **options)  # not those of recomputation
        with saved_tensors_hooks(same, same):
            return function(*args, **options)

    return run
