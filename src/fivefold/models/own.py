"""A user's own module as data: its parameters, its blocks, and the card that its user gives for more axes.

Data parallelism, ZeRO and recomputation of blocks need the module alone. Tensor parallelism needs cuts; pipelines and
context parallelism need a `LanguageModel`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from weakref import ref

from torch import Tensor, nn

from fivefold.errors import UserError
from fivefold.models.base import LanguageModel
from fivefold.models.layers import AttentionCore, Linear, Sublayer
from fivefold.models.recomputation import of_blocks
from fivefold.spread.layout import Layout
from fivefold.spread.names import matching
from fivefold.spread.parts import TIED, Cut, Shape, block_of, stage_blocks, stage_parameters, stages_of


def _whole(name: str, shape: Shape) -> Cut | None:
    return None


@dataclass(frozen=True)
class ModuleCard:
    """What a user says of an own module.

    cut: how tensor parallelism divides a parameter, given its name (within its block) and shape; None: it is whole on
    every rank. tied: the output layer shares
    `embed.weight`. beginning: what names of parameters before the blocks begin with, in a pipeline.
    whole_sequences, regional: as in `models.card.Card`. named: the name of a parameter in `train.init_from`.
    """

    cut: Callable[[str, Shape], Cut | None] = _whole
    tied: bool = False
    beginning: tuple[str, ...] = ("embed",)
    whole_sequences: tuple[str, ...] = ()
    regional: tuple[str, ...] = ()
    named: Callable[[str], str] = str


def buffers_of(module: nn.Module) -> tuple[dict[str, Tensor], set[str]]:
    """The persistent buffers of a module by name, which checkpoints keep, and the names of others."""
    others = {
        f"{where}.{name}".lstrip(".")
        for where, part in module.named_modules()
        for name in part._non_persistent_buffers_set  # PyTorch has no public name for it
    }
    return {name: b for name, b in module.named_buffers() if name not in others}, others


class OwnModel:
    """A user's own module with its card. It is a `Model` of `spread/parts.py`. patterns: `model.freeze`."""

    has_experts = False

    def __init__(self, module: nn.Module, card: ModuleCard | None = None, patterns: str = "") -> None:
        self._module = ref(module)  # tables are cached by their model, and must not keep weights
        self.card, self.patterns = card or ModuleCard(), patterns

    @property
    def module(self) -> nn.Module:
        found = self._module()
        assert found is not None, "whoever has the table has the module"
        return found

    @property
    def parameters(self) -> Mapping[str, Shape]:
        return self._parameters

    @cached_property
    def _parameters(self) -> Mapping[str, Shape]:
        return {name: tuple(p.shape) for name, p in self.module.named_parameters()}

    @cached_property
    def tensors(self) -> Mapping[str, Shape]:
        """The shapes of parameters and of buffers that checkpoints keep."""
        return {**self.parameters, **{name: tuple(b.shape) for name, b in buffers_of(self.module)[0].items()}}

    @property
    def frozen(self) -> frozenset[str]:
        return self._frozen

    @cached_property
    def _frozen(self) -> frozenset[str]:
        still = {name for name, p in self.module.named_parameters() if not p.requires_grad}
        return matching(self.patterns, self.parameters) | still

    @property
    def stack(self) -> str:
        return self._stack

    @cached_property
    def _stack(self) -> str:
        """The name of the modules that repeat: the list or dict of modules with most parameters whose children are
        called 0, 1, ... and share no parameter with anything else; "" if there is none."""
        found = {
            name: sum(p.numel() for p in some.parameters())
            for name, some in self.module.named_modules()
            if name
            and isinstance(some, nn.ModuleList | nn.ModuleDict | nn.Sequential)
            and self._repeats(name, some)
        }
        return max(found, key=lambda name: found[name]) if found else ""

    def _repeats(self, name: str, some: nn.Module) -> bool:
        children = dict(some.named_children())
        if len(some._modules) < 2 or list(some._modules) != [str(n) for n in range(len(children))]:
            return False
        if len({type(child) for child in children.values()}) > 1:
            return False
        return all(any(True for _ in child.parameters()) for child in children.values()) and not any(
            shared.startswith(f"{name}.") for names in self.shared for shared in names
        )

    @cached_property
    def shared(self) -> tuple[tuple[str, ...], ...]:
        """The names of each parameter that has several."""
        names: dict[int, list[str]] = {}
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        return tuple(tuple(some) for some in names.values() if len(some) > 1)

    @cached_property
    def blocks(self) -> int:
        return len(list(self.module.get_submodule(self.stack).children())) if self.stack else 0

    @property
    def cuts(self) -> Mapping[str, Cut]:
        return self._cuts

    @cached_property
    def _cuts(self) -> Mapping[str, Cut]:
        prefix = len(f"{self.stack}.") if self.stack else 0
        found = {}
        for name, shape in self.parameters.items():
            number = block_of(self, name)
            cut = self.card.cut(name[prefix + len(number) + 1 :] if number else name, shape)
            if cut is not None:
                found[name] = cut
        return found

    @property
    def costs(self) -> tuple[list[float], float, float]:
        return self._costs

    @cached_property
    def _costs(self) -> tuple[list[float], float, float]:
        """FLOPs per token of the matrices: 6 per element. A beginning reads rows."""
        blocks, end = [0.0] * self.blocks, 0.0
        for name, shape in self.parameters.items():
            size = 6.0 * math.prod(shape) if len(shape) > 1 else 0.0
            if number := block_of(self, name):
                blocks[int(number)] += size
            elif not name.startswith(self.beginning) or (name == TIED and self.tied):
                end += size
        return blocks, 0.0, end

    @property
    def tied(self) -> bool:
        return self.card.tied

    @property
    def whole_sequences(self) -> tuple[str, ...]:
        return self.card.whole_sequences

    @property
    def regional(self) -> tuple[str, ...]:
        return self.card.regional

    @property
    def beginning(self) -> tuple[str, ...]:
        return self.card.beginning

    def split(
        self, layout: Layout, pp_index: int, keep: Callable[[LanguageModel, set[str]], None]
    ) -> dict[int, nn.Module]:
        """The stages of the ranks with this index on the pp axis, by number. Without a pipeline: {0: the module
        itself}. keep: drops what a stage does not have."""
        if layout.pp == 1:
            return {0: self.module}
        names = stage_parameters(self, stage_blocks(self, layout))
        found: dict[int, nn.Module] = {}
        for stage in stages_of(layout, pp_index):
            module = copy.deepcopy(self.module)
            assert isinstance(module, LanguageModel)
            keep(module, set(names[stage]))
            module.first, module.last = stage == 0, stage == len(names) - 1
            found[stage] = module
        return found


def refuse(own: OwnModel, layout: Layout, given: bool) -> None:
    """Raises UserError if the module does not train in this layout. given: the user gave a card."""
    name, full = type(own.module).__name__, isinstance(own.module, LanguageModel)
    if own.parameters.keys() <= own.frozen:
        raise UserError(f"{name}: every parameter is frozen, so there is nothing to train")
    if layout.ep > 1:
        raise UserError(
            f"layout.ep = {layout.ep}: {name} is a module of your own; ep needs an architecture. Nearest "
            "valid: ep=1"
        )
    if layout.tp > 1 and not any(cut.axis == "tp" for cut in own.cuts.values()):
        has = "whose cut() cuts none of its parameters" if given else "and there is no card"
        raise UserError(
            f"layout.tp = {layout.tp}: {name} is a module of your own, {has}. Give its cuts: fivefold.train(..., "
            f"card=fivefold.ModuleCard(cut=...)) (docs/own_model.md), or use ZeRO: --layout dp={layout.tp},zero=3"
        )
    for axis in ("pp", "cp"):
        if (size := getattr(layout, axis)) > 1 and not (full and given):
            need = (
                "must be a fivefold.LanguageModel" if given else "needs a card: fivefold.train(..., card=...)"
            )
            raise UserError(
                f"layout.{axis} = {size}: {name} is a module of your own, and {need} (docs/own_model.md). Nearest "
                f"valid: --layout dp={size},zero=3"
            )
    _recomputes(own, layout)
    scalars = [n for n, shape in own.parameters.items() if not shape]
    if layout.shards > 1 and scalars:
        raise UserError(
            f"layout.zero = {layout.zero}: {name}.{scalars[0]} is a scalar, which has no rows to divide. Give it the "
            "shape (1,). Nearest valid: zero=0"
        )
    if layout.tp > 1:
        _cuts_divide(own, layout)
    vocabulary = any(cut.kind == "vocab" for cut in own.cuts.values())
    if layout.tp > 1 and vocabulary and not full:
        raise UserError(
            f'{name}: cuts of the kind "vocab" need a fivefold.LanguageModel, whose output layer computes '
            "the loss from parts of the vocabulary"
        )
    if layout.sp and not (full and vocabulary):
        raise UserError(
            f"layout.sp = true: {name} needs to be a fivefold.LanguageModel whose card cuts the vocabulary. "
            "Nearest valid: sp=false"
        )
    if layout.cp > 1 and not any(isinstance(m, AttentionCore) for m in own.module.modules()):
        raise UserError(
            f"layout.cp = {layout.cp}: {name} has no fivefold.models.layers.AttentionCore, which context "
            "parallelism replaces. Nearest valid: cp=1"
        )
    if own.shared and (layout.tp > 1 or layout.pp > 1):
        one, other = own.shared[0][:2]
        raise UserError(
            f"{name}: {one} and {other} are one parameter. With tp or pp, use it by one name (`tied` of the "
            "card). Nearest valid: zero=3"
        )
    stages = layout.pp * layout.stages_per_rank
    if layout.pp > 1 and own.blocks < stages:
        raise UserError(
            f"layout.pp = {layout.pp}: {name} has {own.blocks} blocks for {stages} pipeline stages. Nearest "
            f"valid: pp={max(1, own.blocks // layout.stages_per_rank)}"
        )
    if layout.pp > 1 and own.stack != "blocks":
        raise UserError(
            f"layout.pp = {layout.pp}: the blocks of {name} must be called blocks.0, blocks.1, ... "
            "(fivefold.models.base.block_dict). Nearest valid: pp=1"
        )


def _recomputes(own: OwnModel, layout: Layout) -> None:
    if layout.recompute == "none":
        return
    name = type(own.module).__name__
    if not own.blocks:
        raise UserError(
            f'layout.recompute = "{layout.recompute}": {name} has no blocks to recompute: an nn.ModuleList of at least '
            "two modules of one class. Nearest valid: recompute=none"
        )
    kinds = {mode: mode not in ("none", "full") for mode in of_blocks(layout.recompute, own.blocks)}
    if any(kinds.values()) and not any(isinstance(m, AttentionCore | Sublayer) for m in own.module.modules()):
        mode = next(mode for mode, partly in kinds.items() if partly)
        raise UserError(
            f'layout.recompute: "{mode}" recomputes a part of each block, and {name} has neither AttentionCore nor '
            "Sublayer of fivefold.models.layers. Nearest valid: recompute=full"
        )


def _cuts_divide(own: OwnModel, layout: Layout) -> None:
    for name, core in own.module.named_modules():
        if isinstance(core, AttentionCore) and (core.heads % layout.tp or core.kv_heads % layout.tp):
            heads = f"{core.heads} heads and {core.kv_heads} key-value heads"
            raise UserError(f"layout.tp = {layout.tp} must divide the {heads} of {name}")
    for name, cut in own.cuts.items():
        if len(own.parameters[name]) <= cut.dim or sum(cut.sections) != own.parameters[name][cut.dim]:
            raise UserError(
                f"the card's cut of {name}, of the shape {own.parameters[name]}: the sections {cut.sections} must add "
                f"up to its dim {cut.dim}"
            )
        if wrong := [size for size in cut.sections if size % layout.tp]:
            raise UserError(
                f"layout.tp = {layout.tp} must divide {wrong[0]}, a section of {name} in the card"
            )
    for name, module in own.module.named_modules():
        if (cut := own.cuts.get(f"{name}.weight")) is not None and (
            why := _not_replaced(own, name, module, cut)
        ):
            raise UserError(
                f"layout.tp = {layout.tp}: {type(own.module).__name__}.{name} {why}. Nearest valid: zero=3"
            )


def _not_replaced(own: OwnModel, name: str, module: nn.Module, cut: Cut) -> str:
    """Why tensor parallelism cannot put its own layer in place of one whose weight is cut; "": it can. The new layer
    would silently compute something else."""
    kind, plain = type(module), ""
    if isinstance(module, nn.Linear) and cut.kind in ("column", "row"):
        if cut.dim != (0 if cut.kind == "column" else 1):
            return (
                f'is an nn.Linear: its "{cut.kind}" cut must have dim {int(cut.kind == "row")}, not {cut.dim}'
            )
        bias = own.cuts.get(f"{name}.bias")
        if (
            module.bias is not None
            and cut.kind == "column"
            and (bias is None or bias.sections != cut.sections)
        ):
            return "is cut by columns, and its bias is not: the card must cut both alike"
        if bias is not None and cut.kind == "row":
            return "is cut by rows: its bias must stay whole, and the card cuts it"
        plain = "nn.Linear" if kind.forward not in (nn.Linear.forward, Linear.forward) else ""
    elif isinstance(module, nn.Embedding) and cut.kind == "vocab":
        for option in ("padding_idx", "max_norm"):
            if (value := getattr(module, option)) is not None:
                return f"has {option} = {value}, which a cut vocabulary does not know"
        plain = "nn.Embedding" if kind.forward is not nn.Embedding.forward else ""
    else:
        return ""
    if plain:
        return f"is a {kind.__name__} with a forward of its own, and a cut weight needs a plain {plain}: put one inside"
    if module._forward_hooks or module._forward_pre_hooks:
        return "has forward hooks, and is replaced by a layer without them. Put them on the module around it"
    return ""
