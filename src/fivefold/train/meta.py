"""What a checkpoint says besides tensors: counts, averages, where it was made. Checked before anything is set by it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fivefold.checkpoint.manifest import MANIFEST, Damaged
from fivefold.checkpoint.store import Reader
from fivefold.kernels.fastest import Table


@dataclass(frozen=True)
class Meta:
    """step: optimizer steps. updates: those that changed the weights. skipped: the last ones in a row that did not.
    noise, usual, left_out, loss_scale: as in `step.State`; None: not saved. sites: how many the run has, whether all
    have the common weights, steps between outer steps, fragments. compression: the layout whose residuals are saved.
    products: which library multiplies; None: not saved."""

    step: int
    updates: int
    skipped: int
    noise: tuple[float, ...] | None
    usual: tuple[float, ...] | None
    left_out: tuple[tuple[int, int], ...]
    loss_scale: tuple[float, ...] | None
    sites: int
    aligned: bool
    every: int
    fragments: int
    compression: str | None
    products: Table | None


def meta_of(checkpoint: Reader) -> Meta:
    """Raises Damaged: something is missing, or not of its type or range."""
    meta, where = checkpoint.meta, checkpoint.folder / MANIFEST
    if "step" not in meta:
        raise Damaged(f"{where} is damaged: meta.step is missing")
    step = int(meta["step"])
    sites = meta.get("sites", {})
    if not isinstance(sites, dict):
        raise Damaged(f"{where} is damaged: meta.sites is not an object")
    compression = meta.get("compression")
    layout = compression.get("layout") if isinstance(compression, dict) else compression
    if layout is not None and not isinstance(layout, str):
        raise Damaged(f"{where} is damaged: meta.compression is not a layout")
    return Meta(
        step,
        int(meta.get("updates", step)),
        int(meta.get("skipped", 0)),
        _numbers(where, meta, "noise", 2),
        _numbers(where, meta, "usual", 6),
        _left_out(where, meta),
        _numbers(where, meta, "loss_scale", 2, 3),
        _whole(where, sites, "count", 1),
        bool(sites.get("aligned", True)),
        _whole(where, sites, "every", 1),
        _whole(where, sites, "fragments", 1),
        layout,
        _products(where, meta),
    )


def _products(where: Path, found: Mapping[str, Any]) -> Table | None:
    match found.get("products"):
        case None:
            return None
        case {"processor": str(processor), "onednn": [*names]} if all(type(name) is str for name in names):
            return Table(processor, names)
    raise Damaged(f"{where} is damaged: meta.products must name a processor and a list of matmuls")


def _whole(where: Path, found: Mapping[str, Any], name: str, default: int) -> int:
    value = found.get(name, default)
    if type(value) is not int or value < 1:
        raise Damaged(f"{where} is damaged: {name} must be a whole number >= 1, not {value!r:.40}")
    return value


def _left_out(where: Path, found: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
    flat = found.get("left_out", [])
    if not isinstance(flat, list) or len(flat) % 2 or not all(type(n) is int and n >= 0 for n in flat):
        raise Damaged(f"{where} is damaged: left_out must be pairs of whole numbers, not {flat!r:.80}")
    return tuple(zip(flat[::2], flat[1::2], strict=True))


def _numbers(where: Path, found: Mapping[str, Any], name: str, *counts: int) -> tuple[float, ...] | None:
    values = found.get(name)
    if values is None:
        return None
    known = isinstance(values, list) and len(values) in counts
    if not known or not all(type(n) in (int, float) and math.isfinite(n) for n in values):
        raise Damaged(f"{where} is damaged: {name} must be {counts[0]} finite numbers, not {values!r:.80}")
    return tuple(map(float, values))
