"""Exchange with Hugging Face `transformers`, both ways: names and shapes of weights, and config.json.

Each architecture states its weights as a list of `Entry`, and keys of config.json as a table, FIELDS (`hf.py` in its
folder). Export and import read the same, so they cannot drift apart. What the table cannot say is in `to_config` (more
keys) and `from_config` (more fields, or other values). `transformers` itself is not needed, and torch only to change
weights.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pydantic
from safetensors import SafetensorError, safe_open

from fivefold.errors import UserError
from fivefold.files import MOST_INDEX, read_json
from fivefold.models import EXCHANGED, file_of
from fivefold.models.card import card_of, resolve_model
from fivefold.models.rules import model_rules
from fivefold.models.section import ModelSection
from fivefold.models.weights import FP8, NAMES, QUANTISED, Weight, blocks_of, held, name_of, plain, unlike
from fivefold.sharding.parts import Shape

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class Entry:
    """One weight of ours and its counterpart there: one tensor, or several that ours stacks along dim 0."""

    ours: str
    theirs: tuple[str, ...]
    rows: tuple[int, ...] = ()
    """Rows of our weight for each of several tensors there."""
    transpose: bool = False
    """True if it is stored transposed there (the `Conv1D` of GPT-2)."""
    order: tuple[int, ...] = ()
    """Of each of our rows its number there, if rows stand in another order."""
    stacked: bool = False
    """True if it is one tensor of all experts there, too. `transpose` and `order` are of each of them."""
    shape: Shape = ()
    """The shape of a single tensor there, if it has other dims."""

    def shapes(self, ours: Shape) -> list[Shape]:
        """The shapes of the tensors there."""
        if self.shape:
            return [self.shape]
        if self.stacked:
            return [(ours[0], *(ours[:0:-1] if self.transpose else ours[1:]))]
        shape = ours[::-1] if self.transpose else ours
        whole, rest = math.prod(shape[:-1] or shape), shape[-1:] if len(shape) > 1 else ()
        return [(rows, *rest) for rows in self.rows or (whole,)]


def same(ours: str, theirs: str, *kinds: str) -> list[Entry]:
    """Weights that differ in name only: `ours.kind` and `theirs.kind` for each kind (`weight`, `bias`)."""
    return [Entry(f"{ours}.{kind}", (f"{theirs}.{kind}",)) for kind in kinds or ("weight",)]


def every_nth(which: Sequence[bool], key: str) -> int:
    """The n of a pattern in which every n-th is True; 0: none is. Raises UserError: there is no such n."""
    n = which.index(True) + 1 if True in which else 0
    if list(which) != [n > 0 and (number + 1) % n == 0 for number in range(len(which))]:
        raise UserError(
            f"config.json: {key} has another pattern than one block in every n; only that is supported"
        )
    return n


def every_nth_full(config: Mapping[str, Any], full: str, other: str, every: int) -> int:
    """`full_every`, by the layer_types of config.json. full, other: their words for both kinds. every: of a file that
    does not say them. Raises UserError: there are other kinds, or they have another pattern."""
    if (kinds := config.get("layer_types")) is None:
        return every
    if {*kinds} - {full, other} or len(kinds) != config["num_hidden_layers"]:
        raise UserError(
            f"config.json: layer_types must say {full} or {other} for each of the {config['num_hidden_layers']} "
            f"layers, not {', '.join(sorted(map(str, {*kinds})))} for {len(kinds)}"
        )
    return every_nth([kind == full for kind in kinds], "layer_types")


@lru_cache(maxsize=64)
def rotary_order(heads: int, others: int, d: int, turned: int, interleaved: bool = False) -> tuple[int, ...]:
    """`Entry.order` of queries and keys (so many `heads` of width d) and of `others`, which stay. Of a head, the first
    `turned` features rotate there, in pairs (i, i + turned / 2), or (2 i, 2 i + 1) if interleaved; ours are pairs
    (i, i + d / 2), of which the last ones do not."""
    half, pairs = d // 2, turned // 2
    first = [2 * i if interleaved else i for i in range(pairs)]
    second = [2 * i + 1 if interleaved else i + pairs for i in range(pairs)]
    still = list(range(turned, d))
    one = [*first, *still[: half - pairs], *second, *still[half - pairs :]]
    rows = [head * d + i for head in range(heads) for i in one]
    return (*rows, *range(heads * d, (heads + others) * d))


def experts(
    ours: str,
    theirs: str,
    model: ModelSection,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> list[Entry]:
    """The weights of routed experts, which have three matrices each there. names: gate, up, down."""
    D, F, E = model.dim, model.expert_ffn_dim or 0, model.experts or 0
    each, (gate, up, down) = [f"{theirs}.{number}" for number in range(E)], names
    both = tuple(f"{expert}.{name}.weight" for expert in each for name in (gate, up))
    return [
        Entry(f"{ours}.gate_up", both, (F,) * (2 * E)),
        Entry(f"{ours}.down", tuple(f"{expert}.{down}.weight" for expert in each), (D,) * E),
    ]


def mixture(ours: str, theirs: str, model: ModelSection, shared: str = "") -> list[Entry]:
    """The weights of a router and of its experts. shared: their name of the shared experts, if there are any."""
    table = [
        *same(f"{ours}.router", f"{theirs}.gate"),
        *experts(f"{ours}.experts", f"{theirs}.experts", model),
    ]
    if not shared:
        return table
    both = tuple(f"{theirs}.{shared}.{kind}_proj.weight" for kind in ("gate", "up"))
    width = (model.expert_ffn_dim or 0) * (model.shared_experts or 0)
    down = same(f"{ours}.shared.down", f"{theirs}.{shared}.down_proj")
    return [*table, Entry(f"{ours}.shared.gate_up.weight", both, (width, width)), *down]


def _exchange_of(model: ModelSection) -> ModuleType:
    """The map of a model's architecture. Raises UserError: fields have other values than the format can express (its
    table EXPRESSED)."""
    if model.arch not in EXCHANGED:
        raise UserError(f"this model cannot be exported: Hugging Face's formats have none like {model.arch}")
    exchange = file_of(model.arch, "hf")
    lacks = [
        f"model.{field} = {json.dumps(getattr(model, field))}"
        for field, values in getattr(exchange, "EXPRESSED", {}).items()
        if getattr(model, field) not in values
    ]
    if lacks:
        raise UserError(
            f"this model cannot be exported: {exchange.ARCHITECTURE}'s format has no {', '.join(lacks)}"
        )
    return exchange


WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
Fields = dict[str, tuple[str, Any]]
"""Of a key of config.json: our field, and the value that a file without the key means; NEEDED: no file is without it. A
fraction that is meant says that any number is read as one."""
NEEDED = object()
ANYWHERE = {"transformers_version", "use_cache", "bos_token_id", "eos_token_id", "dtype", "_name_or_path"}
"""Keys of config.json that change nothing of the computation, whatever the kind."""
WRONG = "config.json has a wrong value (fields named as in our recipes)"


def to_hf(state: Mapping[str, Tensor], model: ModelSection) -> dict[str, Tensor]:
    """Our weights by name -> theirs, in the same dtypes. Fused matrices are split into views. Raises as
    `require_weights` and `hf_config`."""
    return {name: weight.read() for name, weight in for_hf(held(state), model).items()}


def for_hf(state: Mapping[str, Weight], model: ModelSection) -> dict[str, Weight]:
    """The same, each weight read when it is needed, and only its rows."""
    require_weights(state, model)
    theirs: dict[str, Weight] = {}
    for entry in _exchange_of(model).entries(model):
        weight, start = state[entry.ours], 0
        order = sorted(range(len(entry.order)), key=entry.order.__getitem__)
        shapes = entry.shapes(weight.shape)
        if entry.stacked:
            read = partial(_stack, weight, order, entry.transpose, False)
            theirs[entry.theirs[0]] = Weight(shapes[0], weight.dtype, read)
            continue
        if order:
            weight = replace(weight, read=partial(_reordered, weight, order))
        for name, shape in zip(entry.theirs, shapes, strict=True):
            read = partial(_theirs, weight, entry.transpose, start, shape)
            theirs[name], start = Weight(shape, weight.dtype, read), start + shape[0]
    for name, original in _copies(_exchange_of(model), model).items():
        weight = theirs[original]  # files have no two names for one weight
        theirs[name] = replace(weight, read=lambda weight=weight: weight.read().clone())
    return theirs


def _theirs(weight: Weight, transpose: bool, start: int, shape: Shape) -> Tensor:
    """A tensor of theirs of this shape: rows of ours, from `start` on."""
    stop = start + shape[0]
    if transpose:
        return weight.read().t().contiguous()[start:stop]
    each = weight.shape[1] if len(weight.shape) == 3 else 1  # experts, one under the other
    first = start // each
    tensor = weight.read((first, -(-stop // each)))
    tensor = tensor.flatten(0, 1) if tensor.ndim == 3 else tensor
    return tensor[start - first * each : stop - first * each].reshape(shape)


def _stack(
    weight: Weight,
    order: Sequence[int],
    transpose: bool,
    inwards: bool,
    rows: tuple[int, int] | None = None,
) -> Tensor:
    """All experts' matrices (E, R, C) or biases (E, R), or some of them: each transposed, with its rows in another
    order. inwards: of theirs; those of ours are transposed last."""
    tensor = weight.read(rows)
    tensor = tensor.transpose(1, 2) if transpose and inwards else tensor
    tensor = tensor[:, order] if order else tensor
    return (tensor.transpose(1, 2) if transpose and not inwards else tensor).contiguous()


def require_weights(state: Mapping[str, Tensor | Weight], model: ModelSection) -> None:
    """Raises UserError: names or shapes are not those of the model that `model` describes."""
    shapes = card_of(model).parameters | card_of(model).buffers
    if state.keys() != shapes.keys():
        raise UserError(f"the weights belong to a custom module, not to the recipe's {model.arch}")
    for name, shape in shapes.items():
        if (found := tuple(state[name].shape)) != tuple(shape):
            raise UserError(
                f"weight {name} has shape {found}, but [model] in recipe.toml asks for {tuple(shape)}. Restore [model]"
            )


def from_hf(state: Mapping[str, Tensor], model: ModelSection) -> dict[str, Tensor]:
    """Their weights by name -> ours, in the same dtypes. Raises as `made_from_hf`."""
    return {name: weight.read() for name, weight in made_from_hf(held(state), model).items()}


def made_from_hf(state: Mapping[str, Weight], model: ModelSection) -> dict[str, Weight]:
    """Our weights of theirs, by name, each read and made when it is needed. Weights in 8 bits with a scale per block
    become those of the embedding's dtype. Raises UserError: weights are missing, unknown, of another shape or dtype
    than `model` says, or stored twice with different values; all of it in one message."""
    exchange = file_of(model.arch, "hf")
    rename = getattr(exchange, "rename", str)
    given = {new: tensor for name, tensor in state.items() if (new := rename(name)) is not None}
    entries, copies = exchange.entries(model), exchange.TIED | _copies(exchange, model)
    wanted = {name for entry in entries for name in entry.theirs}
    blocks = blocks_of(given, wanted - {*entries[0].theirs})  # the embedding is never in 8 bits or fewer
    problems = [f"weight {name} is missing" for name in sorted(wanted - given.keys() - blocks.keys())]
    for name in sorted(given.keys() - wanted):
        original = copies.get(name)
        if original is None:
            problems.append(f"weight {name} is not part of {exchange.ARCHITECTURE}")
        elif original in given and not given[name].read().equal(given[original].read()):
            problems.append(
                f"weight {name} differs from {original}, though config.json says that they are one"
            )
    _raise_all("the weights do not fit config.json", problems)

    problems += (problem for name, some in blocks.items() for problem in unlike(name, some))
    _raise_all("the weights do not fit config.json", problems)
    wide = given[entries[0].theirs[0]].dtype
    given |= {name: plain(some, wide) for name, some in blocks.items()}
    shapes = card_of(model).parameters | card_of(model).buffers
    ours: dict[str, Weight] = {}
    for entry in entries:
        parts = [given[name] for name in entry.theirs]
        expected = shapes[entry.ours]
        for name, part, shape in zip(entry.theirs, parts, entry.shapes(expected), strict=True):
            if tuple(part.shape) != shape:
                problems.append(f"weight {name} has shape {tuple(part.shape)}, config.json asks for {shape}")
            elif name_of(part.dtype) not in NAMES or part.dtype != parts[0].dtype:
                allowed = f"{', '.join(NAMES)}, the same for {' and '.join(entry.theirs)}"
                problems.append(f"weight {name} has dtype {name_of(part.dtype)}; allowed: {allowed}")
        read = partial(_ours, parts, expected, entry)
        if entry.stacked:
            read = partial(_stack, parts[0], entry.order, entry.transpose, True)
        ours[entry.ours] = Weight(expected, parts[0].dtype, read)
    _raise_all("the weights do not fit config.json", problems)
    return ours


def _ours(parts: list[Weight], shape: Shape, entry: Entry, rows: tuple[int, int] | None = None) -> Tensor:
    """Ours, or of a stack of several the `rows` of its first dim, from no more of their `parts` than needed."""
    import torch

    if len(parts) == 1 or entry.order or rows is None:
        tensor = torch.cat([part.read() for part in parts]) if len(parts) > 1 else parts[0].read()
        tensor = tensor[list(entry.order)] if entry.order else tensor
        tensor = tensor.t().contiguous() if entry.transpose else tensor.view(shape)
        return tensor if rows is None else tensor[slice(*rows)]
    each, at, found = math.prod(shape[1:-1]), 0, []
    start, stop = each * rows[0], each * rows[1]
    for part in parts:
        count = part.shape[0]
        if max(start, at) < min(stop, at + count):
            found.append(part.read()[max(start - at, 0) : min(stop - at, count)])
        at += count
    return torch.cat(found).view(rows[1] - rows[0], *shape[1:])


def _reordered(weight: Weight, order: list[int], rows: tuple[int, int] | None = None) -> Tensor:
    """A weight with its rows in another order."""
    tensor = weight.read()[order]
    return tensor[slice(*rows)] if rows else tensor


def _copies(exchange: ModuleType, model: ModelSection) -> dict[str, str]:
    """Their weights that are copies of others, though none is tied."""
    return exchange.copies(model) if hasattr(exchange, "copies") else {}


def hf_config(model: ModelSection, dtype: torch.dtype | str = "float32") -> dict[str, Any]:
    """Content of config.json for a resolved `[model]` section, except for the ids of special tokens.

    Raises:
        UserError: the format cannot express the model.
    """
    exchange = _exchange_of(model)
    return {
        "architectures": [exchange.ARCHITECTURE],
        "model_type": exchange.MODEL_TYPE,
        **{key: getattr(model, field) for key, (field, _) in exchange.FIELDS.items()},
        **(exchange.to_config(model) if hasattr(exchange, "to_config") else {}),
        "torch_dtype": name_of(dtype),
    }


def from_hf_config(config: Mapping[str, Any], folder: Path | None = None) -> ModelSection:
    """Resolved `[model]` section from the content of config.json. folder: where the weights are; their names tell how
    an unknown kind of model differs. Raises UserError: keys are missing, or ask for something that our models do not
    compute; names every one."""
    kind = config.get("model_type")
    kinds: dict[str, str] = {}
    for arch in EXCHANGED:
        kinds[file_of(arch, "hf").MODEL_TYPE] = arch
    if not isinstance(kind, str) or kind not in kinds:
        near = _nearest(config, _weight_names(folder) if folder else set())
        raise UserError(
            f'config.json: model_type = "{kind}" is not supported; {near}. Supported: {", ".join(kinds)}'
        )
    fields, problems = _read(kinds[kind], config)
    names, behind = _weight_names(folder) if folder else set(), f"model.layers.{fields.get('layers')}."
    if fields.get("mtp_depth") and names and not any(name.startswith(behind) for name in names):
        fields["mtp_depth"] = 0  # transformers leaves out the weights of these modules, and not the key
    quantised = config.get("quantization_config") or {}
    for key, value in QUANTISED.get(str(quantised.get("quant_method")), FP8).items() if quantised else ():
        if quantised.get(key, value if key == "fmt" else None) != value:
            problems.append(
                f"quantization_config has {key} = {quantised.get(key)}; only {value} is supported"
            )
    _raise_all("config.json asks for what our model does not compute", problems)
    try:
        model = ModelSection(**fields)
    except pydantic.ValidationError as error:
        _raise_all(WRONG, [f"{'.'.join(map(str, e['loc']))} {e['msg']}".strip() for e in error.errors()])
        raise
    if model.vocab_size is None:
        raise UserError(f"{WRONG}: vocab_size must be set")
    _raise_all(WRONG, [message for _, message in model_rules(model)])
    return resolve_model(model, vocab_size=model.vocab_size)


def _read(arch: str, config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The fields of `[model]`, and what of the config our model does not compute. Raises UserError for a key that is
    missing or has a value of the wrong type."""
    exchange, found = file_of(arch, "hf"), []
    fields: dict[str, Any] = {"arch": arch}
    for key, allowed in exchange.SUPPORTED.items():
        if config.get(key, allowed[0]) not in allowed:
            values = " or ".join(_text(value) for value in allowed if value is not None) or "null"
            found.append(f"{key} = {_text(config[key])}; only {values} is supported")
    try:
        more = exchange.problems(config) if hasattr(exchange, "problems") else []
        for key, (field, meant) in exchange.FIELDS.items():
            value = config[key] if meant is NEEDED else config.get(key, meant)
            fields[field] = float(value) if isinstance(meant, float) else value
        if hasattr(exchange, "from_config"):
            fields |= exchange.from_config(config)
        return fields, found + more
    except UserError:
        raise
    except KeyError as error:
        raise UserError(f"config.json: key {error} is missing") from error
    except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
        raise UserError(f"config.json: a value has the wrong type: {error}") from error


def _nearest(config: Mapping[str, Any], weights: Set[str]) -> str:
    """The kind of ours that is most like an unknown one, by keys of config.json and names of weights (none: not known),
    and the first difference."""
    best, found, masked = -1.0, "", "MaskedLM" in str(config.get("architectures"))
    for arch in EXCHANGED:
        exchange, model = file_of(arch, "hf"), resolve_model(ModelSection(arch=arch), vocab_size=2)
        written = hf_config(model)
        keys = {key for key, value in written.items() if value}
        ours = _of_one_block([*(t for e in exchange.entries(model) for t in e.theirs), *exchange.TIED])
        theirs = _of_one_block(filter(None, map(getattr(exchange, "rename", str), weights)))
        like = sum(len(a & b) / len(a | b) for a, b in ((config.keys(), keys), (theirs, ours)))
        if like <= best or card_of(model).causal == masked:
            continue
        try:
            first = _read(arch, config)[1]
        except UserError as error:
            first = [str(error).removeprefix("config.json: ")]
        first += [f"{name} is no weight of {exchange.ARCHITECTURE}" for name in sorted(theirs - ours)]
        more = sorted(config.keys() - written.keys() - exchange.SUPPORTED.keys() - ANYWHERE)
        if named := [f"{key} = {_text(config[key]):.60}" for key in more if config[key]]:
            first.append(f"{exchange.MODEL_TYPE} has no {', '.join(named[:4])}")
        first.append("neither config.json nor the names of weights tell it")
        best, found = like, f"the nearest kind is {exchange.MODEL_TYPE}, and the first difference: {first[0]}"
    return found


def _of_one_block(names: Iterable[str]) -> set[str]:
    return {re.sub(r"\.\d+(?=\.)", ".0", name) for name in names}


def _weight_names(folder: Path) -> set[str]:
    """The names of a folder's weights; none if they cannot be read."""
    with suppress(OSError, UserError, SafetensorError, KeyError, TypeError):
        if (folder / INDEX).is_file():
            return set(read_json(folder / INDEX, MOST_INDEX)["weight_map"])
        with safe_open(folder / WEIGHTS, "np") as opened:
            return set(opened.keys())
    return set()


def _text(value: object) -> str:
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value)


def _raise_all(title: str, problems: list[str]) -> None:
    """One error for all problems; a long list is cut."""
    if problems:
        more = [f"... and {len(problems) - 8} more"] if len(problems) > 8 else []
        raise UserError("\n  ".join([f"{title}:", *problems[:8], *more]))
