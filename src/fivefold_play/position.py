"""Where the sliders of the part "Machine" stand, how they move, and what they offer.

A position is what `fivefold plan` is asked: recipe, fields, layout, cluster, price. A move changes one of them or one
axis of the layout.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from fivefold.errors import UserError, did_you_mean
from fivefold.models.card import card_of
from fivefold.models.recomputation import MODES
from fivefold.precision import PRECISIONS
from fivefold.recipe import Recipe, load
from fivefold.recipe.rules import allows
from fivefold.schedules.pipeline import SCHEDULES, TUNED
from fivefold.sharding.layout import Layout, parse, to_text
from fivefold.sharding.layout_rules import MOST_RANKS, nearest
from fivefold_plan.asked import Typed, read
from fivefold_plan.cluster.clusters import LOCAL, PRESETS
from fivefold_plan.cluster.devices import Cluster
from fivefold_plan.predict import resolved

FIELDS = {
    "depth": "model.depth",
    "seq_len": "model.seq_len",
    "batch": "train.global_batch_size",
    "microbatch": "train.microbatch_size",
    "precision": "precision.mode",
}
"""Moves that set a field of the recipe."""
AXES = ("dp", "tp", "cp", "pp", "ep", "zero", "virtual_stages")
FOLD = {"false": False, "true": True}
LABELS = {
    "depth": "Size: depth",
    "seq_len": "Tokens in a sequence",
    "batch": "Batch (sequences)",
    "device": "Device",
    "devices": "Devices",
    "dp": "Data parallel (dp)",
    "zero": "ZeRO stage",
    "tp": "Tensor parallel (tp)",
    "cp": "Context parallel (cp)",
    "pp": "Pipeline (pp)",
    "schedule": "Schedule",
    "virtual_stages": "Stages per rank",
    "ep": "Expert parallel (ep)",
    "ep_fold": "Experts over tp, too (ep_fold)",
    "recompute": "Recomputation",
    "microbatch": "Microbatch",
    "precision": "Precision",
}
SHARED = ("depth", "seq_len", "batch")
"""Moves of the model, which all machines of the page share."""
DEPTHS = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64)
RANKS_HERE, MOST = 4, 2**14  # on this machine, of a slider
OPEN = ""
"""A field that is left to the recipe."""


@dataclass(frozen=True)
class Position:
    """What a plan is asked for: the words of `fivefold plan`. layout: OPEN is the recipe's. price: per device-hour, or
    OPEN. given, software: of the command line only."""

    recipe: str
    sets: tuple[str, ...] = ()
    layout: str = OPEN
    cluster: str = f"{LOCAL}:2"
    price: str = OPEN
    given: Mapping[str, float] = field(default_factory=dict)
    software: str = ""

    @property
    def typed(self) -> Typed:
        return Typed(self.recipe, [*self.sets], self.cluster, self.given, self.software, rough=True)

    @property
    def device(self) -> str:
        return self.cluster.rpartition(":")[0] if ":" in self.cluster else self.cluster

    @property
    def devices(self) -> int:
        """Their number; 0: the cluster names none."""
        count = self.cluster.rpartition(":")[2] if ":" in self.cluster else ""
        return math.prod(map(int, count.split("x"))) if re.fullmatch(r"\d+(x\d+)?", count, re.ASCII) else 0

    def on(self, devices: int) -> Position:
        """On so many devices, in nodes of as many as before."""
        each = self.cluster.rpartition("x")[2] if re.search(r":\d+x\d+$", self.cluster) else "0"
        nodes, left = divmod(devices, int(each) or 1)
        sized = f"{nodes}x{each}" if int(each) and not left else devices
        return replace(self, cluster=f"{self.device}:{sized}")

    def to(self, name: str, value: str) -> Position:
        """With this field of the recipe; OPEN: with the recipe's own. A depth sets batches anew."""
        gone = {FIELDS[name]} | ({FIELDS["batch"], FIELDS["microbatch"]} if name == "depth" else set())
        kept = [text for text in self.sets if text.partition("=")[0].strip() not in gone]
        return replace(self, sets=(*kept, *([f"{FIELDS[name]}={value}"] if value else [])))

    def as_json(self) -> dict[str, str]:
        sets = "\n".join(self.sets)
        return {"recipe": self.recipe, "sets": sets, "layout": self.layout, "cluster": self.cluster,
                "price": self.price}  # fmt: skip


def moved(at: Position, moves: Mapping[str, str]) -> tuple[Position, Layout, Recipe, Cluster]:
    """(the position behind moves, its layout, the recipe with dp=1, the cluster). The layout may be invalid. Raises
    UserError: a move is none, or the recipe is invalid with any layout."""
    devices = 0
    for key, value in moves.items():
        at, devices = other(at, key, value, devices)
    base, machine, _ = read(at.typed, "dp=1")
    layout = _possible(replace(Layout(), **parse(at.layout)), base) if at.layout else _own(at, base)
    devices = devices or machine.devices or layout.ranks
    for key, value in (({} if at.layout else {"": ""}) | dict(moves)).items():
        layout, devices = layout_moved(layout, devices, key, value, base)
    layout = _possible(layout, base)
    return replace(at.on(devices), layout=to_text(layout)), layout, base, machine


def _possible(layout: Layout, base: Recipe) -> Layout:
    """Raises UserError: a field of it is no value that any layout has."""
    try:
        type(base.layout)(**vars(layout))
    except ValueError as error:  # of pydantic
        names = ", ".join(re.findall(r"^\w+$", str(error), re.MULTILINE))
        raise UserError(f"layout '{to_text(layout)}': out of range: {names}") from None
    return layout


def whole(key: str, value: str) -> int:
    """Raises UserError: it is no number of the sliders."""
    if not re.fullmatch(r"\d{1,7}", value, re.ASCII) or int(value) > MOST_RANKS:
        raise UserError(f"{key} = {value[:40]}: must be a whole number of at most {MOST_RANKS:,}")
    return int(value)


def other(at: Position, key: str, value: str, devices: int) -> tuple[Position, int]:
    """The position behind a move that leaves the layout alone, and the number of devices; 0: as the cluster says."""
    if key in FIELDS:
        return at.to(key, value), devices
    if key == "price":
        with suppress(ValueError):
            if value == OPEN or 0 < float(value) < math.inf:
                return replace(at, price=value), devices
        raise UserError(f"price {value[:40]}: must be a number above 0")
    if key == "device":
        if value not in (LOCAL, *PRESETS):  # any other names a file
            raise UserError(
                f"'{value[:60]}' is no device of the page{did_you_mean(value, [LOCAL, *PRESETS])}"
            )
        devices = devices or min(at.devices or 1, RANKS_HERE if value == LOCAL else MOST)
        return replace(at, cluster=f"{value}:{devices}"), devices
    if key == "devices":
        devices = max(1, whole(key, value))
        return at.on(devices), devices
    if key not in (*AXES, "schedule", "recompute", "ep_fold"):
        raise UserError(f"'{key[:40]}' is no slider{did_you_mean(key, LABELS)}")
    return at, devices


def _own(at: Position, base: Recipe) -> Layout:
    """The recipe's own layout; replicas only, if its sizes allow no such layout."""
    with suppress(UserError):
        return Layout.from_recipe(load(at.recipe, [*at.sets], devices=0).layout)
    return Layout.from_recipe(base.layout)


def layout_moved(layout: Layout, devices: int, key: str, value: str, base: Recipe) -> tuple[Layout, int]:
    """The layout behind a move, and the number of devices, which follows dp. Behind every other move dp takes the
    devices that the other axes leave, if these are a whole number; else the layout stays and is refused. Other numbers
    of devices take the valid layout that is most like it."""
    if key in ("price", *FIELDS):
        return layout, devices
    if key == "schedule" and value in SCHEDULES:
        unset = {name: getattr(Layout(), name) for name in ("bare_ends", *TUNED)}
        stages = SCHEDULES[value].stages[0]
        return replace(layout, schedule=value, virtual_stages=stages, **unset), devices
    if key in ("schedule", "recompute", "ep_fold"):
        return replace(layout, **{key: FOLD.get(value, value) if key == "ep_fold" else value}), devices
    if key == "virtual_stages":
        return replace(layout, virtual_stages=whole(key, value)), devices
    if key == "zero":
        return _with_dp(replace(layout, zero=whole(key, value)), layout.dp), devices
    if key == "dp":
        dp = max(1, whole(key, value))
        return _with_dp(layout, dp), dp * layout.tp * layout.cp * layout.pp
    if key in AXES:
        layout = _on_axis(layout, key, max(1, whole(key, value)), base.model.seq_len)
    if layout.ranks == devices:
        return layout, devices
    others = layout.tp * layout.cp * layout.pp
    filled = _with_dp(layout, devices // others) if devices % others == 0 else layout
    if key in AXES or (filled.ranks == devices and allows(base, filled)):
        return filled, devices
    return next(iter(nearest(filled, devices, 1, partial(allows, base))), filled), devices


def _with_dp(layout: Layout, dp: int) -> Layout:
    """With so many data-parallel ranks, as replicas or, with ZeRO, as ranks that share states. A hybrid stays one."""
    replicas = layout.dp_replicate if layout.dp_shard > 1 and dp % layout.dp_replicate == 0 else 1
    replicas = replicas if layout.zero else dp
    return replace(layout, dp_replicate=replicas, dp_shard=dp // replicas, microbatches=None)


def _on_axis(own: Layout, axis: str, size: int, seq_len: int) -> Layout:
    """With this size of an axis, and with what another size of it cannot keep as plain as it is by default."""
    layout, plain = replace(own, **{axis: size}), Layout()
    layout = replace(layout, ep_fold=layout.ep_fold and layout.tp > 1 and layout.ep > 1)
    if axis == "tp":
        several = size > 1
        layout = replace(
            layout, sp=several and (own.sp or own.tp == 1), sp_regather=several and own.sp_regather
        )
    if layout.pp == 1:
        names = ("schedule", "virtual_stages", "bare_ends", *TUNED)
        layout = replace(layout, **{name: getattr(plain, name) for name in names})
    return replace(layout, tp_chunks=layout.chunks_of(seq_len))


def _powers(most: int, *own: int) -> list[int]:
    return sorted({*(2**i for i in range(max(1, most).bit_length())), *own})


def controls(at: Position, base: Recipe, machine: Cluster, layout: Layout) -> list[dict[str, Any]]:
    """The sliders at a position: their values, and the index of the one that is."""
    full, others = resolved(base), layout.tp * layout.cp * layout.pp
    most = RANKS_HERE if at.device == LOCAL else MOST
    each, made = min(at.devices, 64), SCHEDULES.get(layout.schedule)
    sets = {text.partition("=")[0]: text.partition("=")[2] for text in at.sets}
    micro = sets.get(FIELDS["microbatch"], OPEN)
    modes = [name for name, mode in PRECISIONS.items() if mode.rate in machine.device.peak]
    depth = base.model.depth
    own = [OPEN] if not depth or FIELDS["depth"] in sets else []
    sizes: dict[str, tuple[Sequence[Any], Any]] = {
        "depth": ([*own, *sorted({*DEPTHS, depth or 1})], depth or OPEN),
        "seq_len": ([n for n in _powers(2**17, full.model.seq_len) if n >= 64], full.model.seq_len),
        "batch": (_powers(MOST, full.train.global_batch_size), full.train.global_batch_size),
        "device": ([LOCAL, *PRESETS], at.device),
        "devices": (_powers(most, *range(1, RANKS_HERE + 1), at.devices), at.devices),
        "dp": (_powers(most // others, layout.dp), layout.dp),
        "zero": (range(4), layout.zero),
        "tp": (_powers(each, layout.tp), layout.tp),
        "cp": (_powers(each, layout.cp), layout.cp),
        "pp": (_powers(each, layout.pp), layout.pp),
        "recompute": (list(dict.fromkeys((*MODES, layout.recompute))), layout.recompute),
        "microbatch": ([OPEN, *_powers(64, *([int(micro)] if micro.isdigit() else []))], micro),
        "precision": (list(dict.fromkeys((base.precision.mode, "auto", *modes))), base.precision.mode),
    }  # fmt: skip
    if layout.pp > 1:
        sizes["schedule"] = [*SCHEDULES], layout.schedule
        if made and made.stages[1] is None:
            last = max(made.stages[0], full.model.layers // layout.pp)
            sizes["virtual_stages"] = range(made.stages[0], last + 1), layout.virtual_stages
    if card_of(full.model).has_experts:
        sizes["ep"] = _powers(full.model.experts or 1, layout.ep), layout.ep
        if layout.tp > 1 and layout.ep > 1:
            sizes["ep_fold"] = [*FOLD], str(layout.ep_fold).lower()
    return [control(key, *sizes[key]) for key in LABELS if key in sizes]


def control(key: str, values: Sequence[Any], now: Any) -> dict[str, Any]:
    """One slider. now: the value at which it stands."""
    texts, numbers = [str(value) for value in values], all(isinstance(v, int) or v == OPEN for v in values)
    words = [f"{value:,}" if isinstance(value, int) else value or "as in the recipe" for value in values]
    return {
        "key": key,
        "label": LABELS[key],
        "shared": key in SHARED,
        "range": numbers,
        "values": texts,
        "words": words,
        "at": texts.index(str(now)) if str(now) in texts else 0,
    }
