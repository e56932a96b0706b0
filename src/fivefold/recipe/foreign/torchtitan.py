"""torchtitan's TOML files, which it read until February 2026; since then its configurations are programs in Python,
which are refused. Keys are `section.name`."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from fivefold.errors import UserError, did_you_mean
from fivefold.models.recomputation import runs_of
from fivefold.recipe.foreign.reading import Reading
from fivefold.schedules.pipeline import DEFAULT, SCHEDULES

NAME = "torchtitan"


def given(path: Path) -> dict[str, Any]:
    try:
        return _flat(tomllib.loads(path.read_text("utf-8")))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid TOML: {error!s:.200}") from None


def _flat(table: dict[str, Any], above: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in table.items():
        found |= _flat(value, f"{above}{name}.") if isinstance(value, dict) else {above + name: value}
    return found


def derive(reading: Reading) -> None:
    reading.fields = fields = _model(reading) | reading.fields
    get, layers, pp = reading.given.get, fields["model.layers"], fields.get("layout.pp", 1)
    fields.setdefault("layout.zero", 2 if pp > 1 else 3)
    fields["data.document_masks"] = str(get("model.flavor")).endswith(("_flex", "_varlen"))
    fields["optim.betas"] = (get("optimizer.beta1", 0.9), get("optimizer.beta2", 0.95))
    if isinstance(least := get("lr_scheduler.min_lr_factor", 0.0), int | float):
        fields["optim.min_lr"] = fields["optim.lr"] * least
    if "optim.decay_fraction" in fields:
        if fields["optim.schedule"] != "linear":
            reading.lacks("lr_scheduler.decay_type", "optim.schedule = wsd decays linearly")
        fields["optim.schedule"] = "wsd"
    if get("checkpoint.enable"):
        fields["checkpoint.every"] = reading.number("checkpoint.interval", 500)
    stage = "parallelism.pipeline_parallel_"
    if pp > 1:  # a local batch is what the pipeline cuts
        local, micro = fields["train.microbatch_size"], reading.number(f"{stage}microbatch_size", 1, 1)
        fields |= {"layout.microbatches": local // micro, "train.microbatch_size": micro}
    if SCHEDULES[fields.get("layout.schedule", DEFAULT)].stages[1] != 1:
        ends = sum(reading.number(f"{stage}{end}_stage_less_layers", 1) for end in ("first", "last"))
        each = reading.number(f"{stage}layers_per_stage", 0)
        fields["layout.virtual_stages"] = max(1, -(-(layers + ends) // each) // pp) if each else 2
    option = str(get("activation_checkpoint.selective_ac_option", "2"))
    if fields["layout.recompute"] == "selective" and re.fullmatch(r"[1-9]\d{0,3}", option):
        modes = ["none" if layer % int(option) else "full" for layer in range(1, layers + 1)]
        fields["layout.recompute"] = runs_of(modes)
    elif fields["layout.recompute"] == "selective":
        why = "recompute = selective repeats scores here, and torchtitan's operations with --software torchtitan"
        reading.lacks("activation_checkpoint.selective_ac_option", why)


def _model(reading: Reading) -> dict[str, Any]:
    """Fields of [model] by the name of a flavor. Raises UserError: its shape is not known."""
    known: dict[str, Any] = reading.tables["flavors"]
    for key, default in (("model.name", "llama3"), ("model.flavor", "debugmodel")):
        name = str(reading.given.get(key, default)).removesuffix("_flex").removesuffix("_varlen")
        if name not in known:
            near = did_you_mean(name, known)
            raise UserError(
                f"{reading.path}: {key} = {name!r:.60}: no such model here{near} (known: {', '.join(known)})"
            )
        known = known[name]
    model = reading.model_of(known["base"]) | {name: value for name, value in known.items() if name != "base"}
    return {f"model.{name}": value for name, value in model.items()}
