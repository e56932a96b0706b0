"""A user's own module as data: its parameters, its blocks, and the card that its user gives for more axes.

Data parallelism, ZeRO and recomputation of blocks need the module alone. Tensor parallelism needs cuts; pipelines and
context parallelism need a `LanguageModel`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from weakref import ref

from torch import Tensor, nn

from fivefold.models.base import LanguageModel
from fivefold.models.card import cached
from fivefold.models.layers import AttentionCore, Linear, Sublayer
from fivefold.models.recomputation import of_blocks
from fivefold.sharding.layout import Layout
from fivefold.sharding.parts import TIED, Cut, Shape, block_of, matching, sections_by


def _whole(name: str, shape: Shape) -> Cut | None:
    return None


@dataclass(frozen=True)
class ModuleCard:
    """What a user says of an own module.

    cut: how tensor parallelism divides a parameter, given its name (within its block) and shape; None: it is whole on
    every rank. Each of its sections is a matrix of its own, also for optimizers of whole matrices, in any layout. tied:
    the output layer shares `embed.weight`. beginning: what names of parameters before the blocks begin with, in a
    pipeline. whole_sequences, regional: as in `models.card.Card`. named: the name of a parameter in `train.init_from`.
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


class CustomModel:
    """A user's own module with its card. It is a `Model` of `sharding/parts.py`. patterns: `model.freeze`.

    parameters: their shapes. tensors: those of buffers that checkpoints keep, too. frozen: parameters that are not
    trained. shared: the names of each parameter that has several. stack: the name of the modules that repeat, "" if
    there are none. blocks: their number. cuts: the parameters that the card cuts. The other attributes are the card's.
    """

    has_experts = False
    further = 0

    def __init__(self, module: nn.Module, card: ModuleCard | None = None, patterns: str = "") -> None:
        self._module = ref(module)  # tables are cached by their model, and must not keep weights
        self.card = card = card or ModuleCard()
        self.tied, self.whole_sequences, self.regional = card.tied, card.whole_sequences, card.regional
        self.beginning = card.beginning
        self.parameters: Mapping[str, Shape] = {n: tuple(p.shape) for n, p in module.named_parameters()}
        buffers = {name: tuple(buffer.shape) for name, buffer in buffers_of(module)[0].items()}
        self.tensors: Mapping[str, Shape] = {**self.parameters, **buffers}
        untrained = {name for name, p in module.named_parameters() if not p.requires_grad}
        self.frozen = matching(patterns, self.parameters) | untrained
        names: dict[int, list[str]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        self.shared = tuple(tuple(several) for several in names.values() if len(several) > 1)
        self.stack = self._largest_stack()
        self.blocks = len(list(module.get_submodule(self.stack).children())) if self.stack else 0
        self.cuts: dict[str, Cut] = {}
        for name, shape in self.parameters.items():
            number = block_of(self, name)
            within = name[len(f"{self.stack}.{number}.") :] if number else name
            if (cut := card.cut(within, shape)) is not None:
                self.cuts[name] = cut
        self.sections = sections_by(self.cuts)

    @property
    def module(self) -> nn.Module:
        module = self._module()
        assert module is not None, "whoever has the table has the module"
        return module

    def _largest_stack(self) -> str:
        """The list or dict of modules with most parameters whose children are of one class, are called 0, 1, ... and
        share no parameter with anything else; "" if there is none."""
        sizes = {"": 0}
        for name, container in self.module.named_modules():
            children = dict(container.named_children())
            if (
                name
                and isinstance(container, nn.ModuleList | nn.ModuleDict | nn.Sequential)
                and len(children) > 1
                and list(container._modules) == [str(n) for n in range(len(children))]
                and len({type(child) for child in children.values()}) == 1
                and all(any(True for _ in child.parameters()) for child in children.values())
                and not any(shared.startswith(f"{name}.") for names in self.shared for shared in names)
            ):
                sizes[name] = sum(p.numel() for p in container.parameters())
        return max(sizes, key=lambda name: sizes[name])

    @cached
    def costs(self) -> tuple[list[float], float, float]:
        """FLOPs per token of the matrices: 6 per element. A beginning reads rows."""
        blocks, end = [0.0] * self.blocks, 0.0
        for name, shape in self.parameters.items():
            size = 6.0 * math.prod(shape) if len(shape) > 1 else 0.0
            if number := block_of(self, name):
                blocks[int(number)] += size
            elif not name.startswith(self.beginning) or (name == TIED and self.tied):
                end += size
        return blocks, 0.0, end


def problems(model: CustomModel, layout: Layout, given: bool) -> Iterator[str]:
    """Yields why the module does not train in this layout. given: the user gave a card."""
    module, name, full = model.module, type(model.module).__name__, isinstance(model.module, LanguageModel)
    custom, parts = f"{name} is a module of your own", [*module.modules()]

    def refused(field: str, why: str, nearest: str) -> str:
        return f"layout.{field} = {json.dumps(getattr(layout, field))}: {why}. Nearest valid: {nearest}"

    if model.parameters.keys() <= model.frozen:
        yield f"{name}: every parameter is frozen, so there is nothing to train"
    if layout.ep > 1:
        yield refused("ep", f"{custom}; ep needs an architecture", "ep=1")
    if layout.tp > 1 and not any(cut.axis == "tp" for cut in model.cuts.values()):
        has = "whose cut() cuts none of its parameters" if given else "and there is no card"
        yield (
            f"layout.tp = {layout.tp}: {custom}, {has}. Give its cuts: fivefold.train(..., "
            f"card=fivefold.ModuleCard(cut=...)) (docs/own_model.md), or use ZeRO: --layout dp={layout.tp},zero=3"
        )
    for axis in ("pp", "cp"):
        if (size := getattr(layout, axis)) > 1 and not (full and given):
            card = "must be a fivefold.LanguageModel", "needs a card: fivefold.train(..., card=...)"
            why = f"{custom}, and {card[not given]} (docs/own_model.md)"
            yield refused(axis, why, f"--layout dp={size},zero=3")
    partly = {*of_blocks(layout.recompute, model.blocks)} - {"none", "full"} if model.blocks else set()
    if layout.recompute != "none" and not model.blocks:
        why = f"{name} has no blocks to recompute: an nn.ModuleList of at least two modules of one class"
        yield refused("recompute", why, "recompute=none")
    elif partly and not any(isinstance(part, AttentionCore | Sublayer) for part in parts):
        yield (
            f'layout.recompute: "{min(partly)}" recomputes a part of each block, and {name} has neither AttentionCore '
            "nor Sublayer of fivefold.models.layers. Nearest valid: recompute=full"
        )
    scalars = [parameter for parameter, shape in model.parameters.items() if not shape]
    if layout.shards > 1 and scalars:
        why = f"{name}.{scalars[0]} is a scalar, which has no rows to divide. Give it the shape (1,)"
        yield refused("zero", why, "zero=0")
    vocabulary = any(cut.kind == "vocab" for cut in model.cuts.values())
    if layout.tp > 1:
        yield from _cuts(model, layout)
    if layout.sp and not (full and vocabulary):
        why = f"{name} needs to be a fivefold.LanguageModel whose card cuts the vocabulary"
        yield refused("sp", why, "sp=false")
    if layout.cp > 1 and not any(isinstance(part, AttentionCore) for part in parts):
        why = f"{name} has no fivefold.models.layers.AttentionCore, which context parallelism replaces"
        yield refused("cp", why, "cp=1")
    if model.shared and (layout.tp > 1 or layout.pp > 1):
        yield (
            f"{name}: {' and '.join(model.shared[0][:2])} are one parameter. With tp or pp, use it by one name (`tied` "
            "of the card). Nearest valid: zero=3"
        )
    stages = layout.pp * layout.stages_per_rank
    if layout.pp > 1 and model.blocks < layout.fewest_blocks:
        why = f"{name} has {model.blocks} blocks for {stages} pipeline stages"
        yield refused("pp", why, f"pp={max(1, model.blocks // layout.stages_per_rank)}")
    if layout.pp > 1 and model.stack != "blocks":
        called = "must be called blocks.0, blocks.1, ... (fivefold.models.base.block_dict)"
        yield refused("pp", f"the blocks of {name} {called}", "pp=1")


def _cuts(model: CustomModel, layout: Layout) -> Iterator[str]:
    """What tensor parallelism cannot cut as the card says."""
    for name, cut in model.cuts.items():
        shape = model.parameters[name]
        if len(shape) <= cut.dim or sum(cut.sections) != shape[cut.dim]:
            yield (
                f"the card's cut of {name}, of the shape {shape}: the sections {cut.sections} must add up to its dim "
                f"{cut.dim}"
            )
        if wrong := [size for size in cut.sections if size % layout.tp]:
            yield f"layout.tp = {layout.tp} must divide {wrong[0]}, a section of {name} in the card"
    for name, module in model.module.named_modules():
        if isinstance(module, AttentionCore) and (module.heads % layout.tp or module.kv_heads % layout.tp):
            heads = f"{module.heads} heads and {module.kv_heads} key-value heads"
            yield f"layout.tp = {layout.tp} must divide the {heads} of {name}"
        cut = model.cuts.get(f"{name}.weight")
        if cut is not None and (why := _not_replaced(model, name, module, cut)):
            yield f"layout.tp = {layout.tp}: {type(model.module).__name__}.{name} {why}. Nearest valid: zero=3"
    if "vocab" in (cut.kind for cut in model.cuts.values()) and not isinstance(model.module, LanguageModel):
        yield (
            f'{type(model.module).__name__}: cuts of the kind "vocab" need a fivefold.LanguageModel, whose output '
            "layer computes the loss from parts of the vocabulary"
        )


def _not_replaced(model: CustomModel, name: str, module: nn.Module, cut: Cut) -> str:
    """Why tensor parallelism cannot put its own layer in place of one whose weight is cut; "": it can. The new layer
    would silently compute something else."""
    kind, plain = type(module), ""
    if isinstance(module, nn.Linear) and cut.kind in ("column", "row"):
        if cut.dim != (0 if cut.kind == "column" else 1):
            dim = int(cut.kind == "row")
            return f'is an nn.Linear: its "{cut.kind}" cut must have dim {dim}, not {cut.dim}'
        bias = model.cuts.get(f"{name}.bias")
        alike = bias is not None and bias.sections == cut.sections
        if module.bias is not None and cut.kind == "column" and not alike:
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
