"""Maps our `olmo3` to `Olmo3ForCausalLM` and back: OLMo 2's weights, windows, and rotary positions by kind of block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fivefold.models.hf import Fields, every_nth_full
from fivefold.models.llama import hf as llama
from fivefold.models.olmo2 import hf as olmo2
from fivefold.models.section import ModelSection

MODEL_TYPE = "olmo3"
ARCHITECTURE = "Olmo3ForCausalLM"
TIED, entries, rename = olmo2.TIED, olmo2.entries, olmo2.rename
SUPPORTED = olmo2.SUPPORTED
FIELDS: Fields = olmo2.FIELDS
FULL, NEAR = "full_attention", "sliding_attention"


def to_config(model: ModelSection) -> dict[str, Any]:
    return olmo2.to_config(model) | windows(model)


def windows(model: ModelSection) -> dict[str, Any]:
    """The keys of windows, and of rotary positions of both kinds of blocks."""
    near = llama.decoder(model.local or model)["rope_parameters"]
    rope = {FULL: llama.decoder(model)["rope_parameters"], NEAR: near}
    return kinds(model) | {"rope_parameters": rope}


def kinds(model: ModelSection) -> dict[str, Any]:
    """The keys of windows alone."""
    each = [NEAR if model.window(number) else FULL for number in range(model.layers)]
    return {"sliding_window": model.sliding_window or None, "layer_types": each}


def from_config(config: Mapping[str, Any]) -> dict[str, Any]:
    return from_windows(config, every=4, theta=500000.0, local=None)


def from_windows(config: Mapping[str, Any], every: int, theta: float, local: float | None) -> dict[str, Any]:
    """The fields of a decoder with windows. every, theta, local: what a file means that names no pattern and no bases,
    of the blocks with a window too (None: the same)."""
    full, near = rope_of(config, theta, local)
    fields = llama.from_config({**config, "rope_parameters": full, "rope_scaling": None})
    if near != full:
        fields["rope_local_theta"] = float(near["rope_theta"])
    return fields | from_kinds(config, every)


def from_kinds(config: Mapping[str, Any], every: int, width: int = 4096) -> dict[str, Any]:
    """The inverse of `kinds`. every, width: what a file means that names no pattern and no window."""
    every = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or every
    every = every_nth_full(config, FULL, NEAR, every)
    window = config.get("sliding_window", width) or 0
    if every == 1:  # all of them
        window = every = 0
    return {"sliding_window": window, "full_every": every if window else 0}


def rope_of(config: Mapping[str, Any], theta: float, local: float | None) -> tuple[dict[str, Any], ...]:
    """Rotary parameters of blocks that see all, and of those with a window. Older files have the former's alone."""
    given = config.get("rope_parameters") or {}
    if FULL in given:
        return tuple({"rope_theta": theta} | (given.get(kind) or given[FULL]) for kind in (FULL, NEAR))
    base = {"rope_type": "default", "rope_theta": config.get("rope_theta") or theta}
    near = {"rope_theta": config.get("rope_local_base_freq") or local or base["rope_theta"]}
    return base | given | (config.get("rope_scaling") or {}), base | near


def problems(config: Mapping[str, Any]) -> list[str]:
    """Those of Llama, and windows whose rotary positions are scaled in their own way."""
    full, near = rope_of(config, 1.0, None)
    found = llama.problems({"rope_parameters": full})
    if near != full and near.get("rope_type", "default") != "default":
        found.append(f"rope_parameters scale {NEAR} by themselves; only {FULL} may be scaled, or both alike")
    return found
