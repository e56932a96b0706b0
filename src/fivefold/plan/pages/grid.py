"""A bounded grid of sizes around a recipe with their predictions, for the sliders of a plan's page.

Each cell holds the prediction of `predict` for these sizes, or the reason why they are invalid. Sizes are those of the
recipe, halved and doubled. Heads and feed-forward width grow with the model's dim. tp and pp take their ranks from data
parallelism, which fills the devices.

`as_data` packs them into one JSON object (observe/page/plan.js reads it). A valid cell is a run of 32-bit floats: HEAD,
the seconds of each of `shares`, the five parts of MEMORY of each position in the pipeline, with a pipeline the seconds
of F, I and W of each stage, and the seconds of each operation in a step. With a pipeline it also is a run of 16-bit
numbers: the start of each action of the drawn timeline, rank by rank, in 65535ths of its length. Both are base64 of
little-endian arrays, cell after cell.
"""

from __future__ import annotations

import base64
import itertools
import math
import shlex
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from fivefold.errors import UserError
from fivefold.models.card import card_of
from fivefold.plan.cluster.clusters import canonical, parse, with_margin
from fivefold.plan.cluster.devices import Cluster
from fivefold.plan.pages.pictures import Pictures, pictures
from fivefold.plan.predict import Plan, predict, resolved, with_load
from fivefold.plan.setting import Documents, Software, documents_of, software_of
from fivefold.plan.time.stage_costs import Parts
from fivefold.recipe import Recipe
from fivefold.schedules.pipeline import TUNED
from fivefold.schedules.timelines import CATEGORIES
from fivefold.sharding.layout import Layout, to_text
from fivefold.sharding.layout_rules import validate

BUDGET = 6500
"""Limit of a grid's work, in cells without a pipeline: less than 20 seconds and 3 MB (tests/test_plan_page.py)."""
LABELS = {
    "devices": "Devices",
    "layers": "Layers",
    "dim": "Width of the model (dim)",
    "seq_len": "Tokens in a sequence",
    "global_batch_size": "Global batch, sequences",
    "microbatch_size": "Microbatch, sequences",
    "tp": "Tensor parallel (tp)",
    "pp": "Pipeline stages (pp)",
    "zero": "ZeRO stage of data parallelism",
}
TURNS = ("tp", "pp", "zero", "microbatch_size", "devices", "seq_len", "global_batch_size", "layers", "dim")
"""The order in which sliders get further values."""
MODEL, BATCH, AXES = (
    ("layers", "dim", "seq_len"), ("global_batch_size", "microbatch_size"), ("tp", "pp", "zero")
)  # fmt: skip
"""The sliders of a model, of its batches, of its layout."""
Values = dict[str, int]


@dataclass(frozen=True)
class Slider:
    """A slider: its values, ascending, and the index of the recipe's own."""

    key: str
    values: tuple[int, ...]
    at: int


@dataclass(frozen=True)
class Base:
    """The center of the grid.

    recipe: as given, with unset fields. full: the resolved recipe. layout: its layout. cluster: with its devices.
    named: the value of `--cluster`. software: the program's. tokens: the value of `--document-tokens`. documents: by
    length of a sequence and batch, which say what a run reads. known: see `predict`."""

    recipe: Recipe
    full: Recipe
    layout: Layout
    cluster: Cluster
    named: str
    software: Software
    tokens: float | None = None
    documents: dict[tuple[int, int], Documents | None] = field(default_factory=dict, compare=False)
    known: dict[object, Parts] = field(default_factory=dict, compare=False)

    @property
    def values(self) -> Values:
        sections = ((self.full.model, MODEL), (self.full.train, BATCH), (self.layout, AXES))
        sizes = {name: getattr(section, name) for section, names in sections for name in names}
        return {"devices": self.layout.ranks} | sizes


def base(recipe: Recipe, cluster: str, given: Mapping[str, float]) -> Base:
    """The center of a grid. cluster: the value of `--cluster`. given: those of `--expert-load` and the like. Raises
    UserError: as `parse` and `predict`."""
    full, machine = resolved(recipe), with_margin(parse(cluster), given.get("--margin"))
    layout = Layout.from_recipe(full.layout)
    validate(layout, machine.devices or layout.ranks)
    software = with_load(software_of(machine), full.model, given.get("--expert-load"))
    sized = replace(machine, devices=layout.ranks)
    return Base(recipe, full, layout, sized, canonical(cluster), software, given.get("--document-tokens"))


def axes(center: Base, budget: float = BUDGET) -> list[Slider]:
    """The sliders. Each starts with one value and gets more in turn, nearest first, within the budget of work."""
    own = center.values

    def near(key: str, value: int) -> tuple[float, int]:
        """Doublings from the recipe's own value, the larger of two first. ZeRO stages by how common they are."""
        return ((1, 3, 0, 2).index(value), 0) if key == "zero" else (abs(math.log2(value / own[key])), -value)

    chosen = {key: [value] for key, value in own.items()}
    waiting = {key: sorted({*_possible(center, key)} - {own[key]}, key=partial(near, key)) for key in TURNS}
    while any(waiting.values()):
        for key, values in waiting.items():
            if values:
                more = chosen | {key: [*chosen[key], values.pop(0)]}
                others = math.prod(len(some) for name, some in more.items() if name != "pp")
                if others * sum(1 + pp * pp / 40 for pp in more["pp"]) <= budget:
                    chosen = more
    return [
        Slider(key, tuple(sorted(values)), sorted(values).index(own[key])) for key, values in chosen.items()
    ]


def cells(center: Base, sliders: Sequence[Slider]) -> Iterator[tuple[Values, Plan | str]]:
    """All combinations with their plan, or the reason why they are invalid. The last slider varies fastest."""
    for combination in itertools.product(*(axis.values for axis in sliders)):
        values = {axis.key: value for axis, value in zip(sliders, combination, strict=True)}
        try:
            yield values, plan_at(center, values)
        except UserError as error:
            yield values, str(error).removeprefix("recipe: ")


def plan_at(center: Base, values: Values) -> Plan:
    """The prediction for these sizes. Raises UserError: they make no valid recipe."""
    recipe = center.recipe
    changed = {
        "model": recipe.model.model_copy(update=model_at(center, values)),
        "train": recipe.train.model_copy(update={name: values[name] for name in BATCH}),
        "layout": recipe.layout.model_copy(update=vars(layout_at(center, values))),
    }
    cluster = replace(center.cluster, devices=values["devices"])
    recipe = recipe.model_copy(update=changed)
    read = recipe.model.seq_len, recipe.train.global_batch_size
    if read not in center.documents:
        center.documents[read] = documents_of(recipe, center.tokens)
    return predict(recipe, cluster, replace(center.software, documents=center.documents[read]), center.known)


def model_at(center: Base, values: Values) -> Values:
    """Fields of `[model]`. Fields of the recipe that depend on the dim change with it."""
    model = center.recipe.model
    fields = {name: values[name] for name in MODEL}
    for name in card_of(model).widths:
        if given := getattr(model, name):
            fields[name] = given * values["dim"] // model.dim
    return fields


def layout_at(center: Base, values: Values) -> Layout:
    """The recipe's layout with these axes. Data parallelism gets the remaining devices. Raises UserError: these are not
    a whole number."""
    own, tp, pp, zero = center.layout, values["tp"], values["pp"], values["zero"]
    others = tp * pp * own.cp
    replicas = own.dp_replicate if own.dp_shard > 1 and zero else 1  # a hybrid stays one
    if values["devices"] % (others * replicas):
        words = f"tp x pp x cp = {others}" + (f", times {replicas} replicas" if replicas > 1 else "")
        raise UserError(f"{values['devices']} devices cannot be divided by {words}")
    dp = values["devices"] // others
    unset = () if pp > 1 else ("schedule", "virtual_stages", "bare_ends", *TUNED)
    pipeline = {name: getattr(Layout(), name) for name in unset}
    layout = replace(
        own,
        pp=pp,
        tp=tp,
        sp=tp > 1 and (own.sp or own.tp == 1),
        sp_regather=tp > 1 and own.sp_regather,
        zero=zero,
        dp_replicate=replicas if zero else dp,
        dp_shard=dp // replicas if zero else 1,
        microbatches=None,
        **pipeline,
    )
    return replace(layout, tp_chunks=layout.chunks_of(values["seq_len"]))


def options(center: Base, key: str, value: int) -> str:
    """The options of `fivefold plan` for this value, besides the layout."""
    if key == "devices":
        name, _, count = ("", "", "") if center.named.endswith(".toml") else center.named.rpartition(":")
        per_node = center.cluster.per_node
        sized = f"{value // per_node}x{per_node}" if "x" in count else value
        return f"--cluster {shlex.quote(f'{name or center.named}:{sized}')}"
    if key == "microbatch_size":  # always: the recipe may leave it open, to follow from the batch
        return f"--set train.microbatch_size={value}"
    own = center.values
    if value == own[key] or key in AXES:
        return ""
    if key == "global_batch_size":
        return f"--set train.global_batch_size={value}"
    before, after = model_at(center, own), model_at(center, own | {key: value})
    return " ".join(f"--set model.{name}={new}" for name, new in after.items() if new != before[name])


def command(recipe: str, sets: Sequence[str], given: Mapping[str, float]) -> str:
    """The start of a `fivefold plan` command. given: values of further options. The layout and `options` follow."""
    words = ["fivefold plan", shlex.quote(recipe), *(f"--set {shlex.quote(text)}" for text in sets)]
    return " ".join(words + [f"{name} {value:.12g}" for name, value in given.items()])


def _possible(center: Base, key: str) -> list[int]:
    """Possible values of a slider besides the recipe's own."""
    own, model, cluster = center.values[key], center.full.model, center.cluster
    powers = [2**i for i in range(17)]
    if key == "zero":
        return [0, 1, 2, 3]
    if key == "tp":
        heads = math.gcd(model.heads, model.kv_heads or model.heads)
        return [n for n in powers if n <= cluster.per_node and heads % n == 0]
    if key == "pp":
        return [n for n in powers if n <= min(8, model.layers)]
    sizes = [own * 2**i for i in range(1, 4)]
    sizes += [own // 2**i for i in range(1, 4) if own % 2**i == 0]
    if key == "dim":
        given = [size for name in card_of(model).widths if (size := getattr(center.recipe.model, name))]
        sizes = [value for value in sizes if all(size * value % model.dim == 0 for size in given)]
    if key == "devices" and "x" in center.named.rpartition(":")[2]:
        sizes = [value for value in sizes if value % cluster.per_node == 0]
    return sizes


HEAD = (
    "step", "tokens_per_s", "mfu", "limit", "flops", "bandwidth", "microbatches", "drawn", "makespan", "stages",
)  # fmt: skip
MEMORY = tuple(CATEGORIES)
PLACE = ("devices", "tp", "pp", "zero")
"""The sliders that a layout depends on."""
WORK = ("devices", "dim", "seq_len", "microbatch_size", "tp")
"""The sliders that an operation's FLOPs per byte and its rate depend on."""


def as_data(center: Base, command: str, sliders: Sequence[Slider]) -> dict[str, Any]:
    """Everything that the page's script needs. command: see `command`."""
    index: list[int] = []  # of each cell: 0 where it is valid, else the number of its message, from 1
    messages: dict[str, int] = {}
    heads: list[list[float]] = []
    seconds: list[dict[str, float]] = []  # of each valid cell's operations
    work: dict[str, dict[str, tuple[float, float]]] = {}
    schedules: dict[str, list[list[tuple[str, int, int]]]] = {}
    shares, starts = list[str](), array("H")
    for values, plan in cells(center, sliders):
        if isinstance(plan, str):
            index.append(messages.setdefault(plan, len(messages) + 1))
            continue
        index.append(0)
        drawn, s = pictures(plan), plan.setting
        heads.append(_head(plan, drawn))
        shares, points, timeline = list(drawn.shares), drawn.roofline.points, drawn.timeline
        seconds.append({point.name: point.seconds for point in points})
        of_key = work.setdefault(_key(values, WORK), {})
        of_key |= {p.name: (float(f"{p.intensity:.5g}"), float(f"{p.rate:.5g}")) for p in points}
        if timeline:
            if (key := f"{s.layout.pp},{s.layout.shown(s.microbatches)}") not in schedules:
                actions = [[event.action for event in row] for row in timeline.rows]
                schedules[key] = [[(a.kind, a.stage, a.microbatch) for a in row] for row in actions]
            scale, begin = 65535 / timeline.makespan, timeline.start
            starts.extend(round((event.start - begin) * scale) for row in timeline.rows for event in row)
    operations = list(dict.fromkeys(name for of_cell in seconds for name in of_cell))
    floats = array("f")
    for head, of_cell in zip(heads, seconds, strict=True):
        floats.extend(head)
        floats.extend(of_cell.get(name, 0.0) for name in operations)
    return {
        "axes": [
            vars(axis)
            | {
                "label": LABELS[axis.key],
                "options": [options(center, axis.key, value) for value in axis.values],
            }
            for axis in sliders
        ],
        "command": command,
        "layouts": _layouts(center, sliders),
        "head": HEAD,
        "memory": MEMORY,
        "place": PLACE,
        "workKey": WORK,
        "shares": shares,
        "operations": operations,
        "work": {key: [of_key.get(name) for name in operations] for key, of_key in work.items()},
        "schedules": schedules,
        "index": index,
        "messages": list(messages),
        "floats": _base64(floats),
        "starts": _base64(starts),
    }


def _head(plan: Plan, drawn: Pictures) -> list[float]:
    """The first numbers of a cell: HEAD, seconds by share, parts of memory, seconds of each stage."""
    s, roof = plan.setting, drawn.roofline
    length, stages = (drawn.timeline.makespan, plan.step.costs) if drawn.timeline else (0.0, [])
    head = [plan.step.seconds, plan.tokens_per_s, plan.mfu, plan.limit, roof.peak, roof.bandwidth]
    head += [s.microbatches, s.layout.shown(s.microbatches), length, len(stages), *drawn.shares.values()]
    head += [getattr(held, name) for held in plan.memory for name in MEMORY]
    return head + [seconds for c in stages for seconds in (c.forward, c.input, c.weight)]


def _layouts(center: Base, sliders: Sequence[Slider]) -> dict[str, str]:
    """The value of `--layout` for each valid cell."""
    layouts, places = {}, [axis for axis in sliders if axis.key in PLACE]
    for sizes in itertools.product(*(axis.values for axis in places)):
        values = {axis.key: size for axis, size in zip(places, sizes, strict=True)}
        with suppress(UserError):  # its cells say why
            layouts[_key(values, PLACE)] = to_text(layout_at(center, center.values | values))
    return layouts


def _key(values: Values, names: Sequence[str]) -> str:
    return ",".join(str(values[name]) for name in names)


def _base64(numbers: array[Any]) -> str:
    """The numbers in little-endian order as base64."""
    if sys.byteorder == "big":
        numbers.byteswap()
    return base64.b64encode(numbers.tobytes()).decode()
