"""Training programs by name, as data: what each computes, keeps, overlaps and sends. A TOML file describes another one.
`benchmarks/planner/published.py` compares them with published runs, and writes how far plans of each kind were off."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_origin, get_type_hints

from pydantic import Field, create_model

from fivefold.errors import UserError, did_you_mean, several
from fivefold.files import parse_toml, read_json, read_text
from fivefold.host.devices import BY_NAME
from fivefold.models.operations import TensorWay
from fivefold.precision import DTYPES
from fivefold.recipe.messages import wrong
from fivefold.recipe.schema import Section
from fivefold.sharding.tiers import NOT_OFFLOADED
from fivefold_plan.cluster.devices import Cluster
from fivefold_plan.setting import Setting, Software, States, software_of

OWN = "fivefold"
MOST_BYTES = 64 << 10
"""Size of a program's file."""
MOST_PIECES = 64
_LIMITS: dict[Any, dict[str, Any]] = {int: {"ge": 0, "le": MOST_PIECES}, float: {"ge": 0, "le": 1e15}}
_KEYS: dict[str, Any] = {
    name: (kind | None, Field(None, **_LIMITS.get(kind, {})))
    for kinds in (get_type_hints(Software), get_type_hints(TensorWay))
    for name, kind in kinds.items()
    if kind in (bool, int, float) or get_origin(kind) is Literal
    if name not in ("expert_load", "estimates", "fp8_dispatch", "qk_clip")
}
_FILE = create_model("_FILE", __base__=Section, **_KEYS)
"""What a file may say besides `base`; not what a recipe or another option says."""


def program(name: str, cluster: Cluster) -> Software:
    """The program with this name, or that a TOML file describes: `base`, a name, and keys of `Software`, `Program` and
    `TensorWay` that differ. Raises UserError: there is none; the file has a wrong key or value."""
    known = [OWN, *PROGRAMS]
    if name in known:
        return PROGRAMS.get(name) or software_of(cluster)
    if not name.endswith(".toml"):
        near = did_you_mean(name, known)
        raise UserError(
            f"--software {name}: no such program{near} (known: {', '.join(known)}, or a .toml file)"
        )
    path = Path(name)
    try:
        given = parse_toml(read_text(path, MOST_BYTES))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid TOML: {error!s:.200}") from None
    base = given.pop("base", OWN)
    if base not in known:
        raise UserError(f"{path}: base: must be one of {', '.join(known)}, not {base!r:.60}")
    for text in wrong(_FILE, given):
        raise UserError(f"{path}: {text}")
    return _changed(program(base, cluster), path.stem, given)


def _changed(base: Software, name: str, given: dict[str, Any]) -> Software:
    way = {key: given.pop(key) for key in TensorWay._fields if key in given}
    return replace(base, name=name, tensor=base.tensor._replace(**way), **given)


def _others() -> dict[str, Software]:
    found = dict[str, Software]()
    for name, given in tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")).items():
        given["states"] = {mode: States(**states) for mode, states in given["states"].items()}
        base = found[given.pop("base")] if "base" in given else Software()
        found[name] = _changed(base, name, given)
    return found


PROGRAMS = _others()
"""Other programs (software.toml). Our own one depends on the devices (`setting.software_of`)."""
PUBLISHED = Path(__file__).with_name("published.json")
"""For time and for memory, of each kind of published run: [the kind, then what `Evidence` has]. For traced steps, with
and without offload, the same of benchmarks/planner/gpu_memory.py."""
Kind = tuple[Any, ...]
FAR = 0.06
"""A plan whose kind was at worst further off than this says so."""


class Evidence(NamedTuple):
    """How far plans were off, in seconds of a step or in bytes. sources: whose runs. fewest, most: devices of a run.
    mean, worst: relative errors."""

    sources: str
    fewest: int
    most: int
    rows: int
    mean: float
    worst: float

    def says(self, what: str) -> str:
        """In words. what: "time" or "memory"."""
        devices = f"{self.fewest:,} to " * (self.most > self.fewest) + several(self.most, "device")
        runs = f"{several(self.rows, 'published run')} of this kind on {devices}: {self.sources}"
        if self.rows == 1:
            return f"{what} {100 * self.mean:.2g}% off ({runs})"
        return f"{what} {100 * self.mean:.2g}% off on average, {100 * self.worst:.2g}% at worst ({runs})"


def kind_of(s: Setting, what: str) -> Kind:
    """What a published run and a plan must share, so that one says how far the other may be off. In time: generation of
    the devices ("": they have no data sheet), bytes per element of what matmuls multiply, experts, operations in one
    pass. In memory: experts, weights that are gathered for each use (ZeRO 3)."""
    if what == "memory":
        return s.card.has_experts, s.layout.zero == 3
    sheet = BY_NAME.get(s.cluster.device.sheet)
    return sheet.generation if sheet else "", DTYPES[s.rate].bytes, s.card.has_experts, s.software.fused


def evidence(s: Setting, what: str) -> Evidence | None:
    """What published runs of the same kind say of a plan on GPUs. None: nobody published such a run."""
    return _published()[what].get(kind_of(s, what))


def said(s: Setting) -> list[str]:
    """The same in words, of memory and of time; and how far off the memory of traced steps was, if it was far."""
    memory, time = [
        found.says(what)
        if (found := evidence(s, what))
        else f"{what} not known: nobody has published a run of this kind"
        for what in ("memory", "time")
    ]
    away = s.layout.offload != NOT_OFFLOADED
    traced = _published()["traced"][away,]
    if traced.worst > FAR:
        off = f"{100 * traced.mean:.2g}% on average, {100 * traced.worst:.2g}% at worst"
        memory += f"; {off} in {traced.rows} traced steps {'with' if away else 'without'} offload"
    return [memory, time]


@cache
def _published() -> dict[str, dict[Kind, Evidence]]:
    own = len(Evidence._fields)
    return {
        what: {tuple(row[:-own]): Evidence(*row[-own:]) for row in rows}
        for what, rows in read_json(PUBLISHED).items()
    }
