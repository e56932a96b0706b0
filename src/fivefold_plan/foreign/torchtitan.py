"""torchtitan's TOML files, which it read until February 2026; since then its configurations are programs in Python,
which are refused. Keys are `section.name`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fivefold.errors import UserError, did_you_mean
from fivefold.files import parse_toml
from fivefold_plan.foreign.reading import Reading

NAME = "torchtitan"


def given(path: Path) -> dict[str, Any]:
    try:
        return _flat(parse_toml(path.read_text("utf-8")))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid TOML: {error!s:.200}") from None


def _flat(table: dict[str, Any], above: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in table.items():
        found |= _flat(value, f"{above}{name}.") if isinstance(value, dict) else {above + name: value}
    return found


def derive(reading: Reading) -> None:
    reading.fields = fields = _model(reading) | reading.fields
    get, pp = reading.given.get, fields.get("layout.pp", 1)
    fields.setdefault("layout.zero", 2 if pp > 1 else 3)
    fields["data.document_masks"] = str(get("model.flavor")).endswith(("_flex", "_varlen"))
    fields["optim.betas"] = (get("optimizer.beta1", 0.9), get("optimizer.beta2", 0.95))
    fields["optim.min_lr"] *= fields["optim.lr"]
    fields["optim.warmup_steps"] = min(
        fields["optim.warmup_steps"], fields["train.steps"]
    )  # as torchtitan does
    if fields.get("model.experts"):
        reading.cut_experts("parallelism.expert_tensor_parallel_degree", 1)
    if "optim.decay_fraction" in fields:
        if fields["optim.schedule"] != "linear":
            reading.lacks("lr_scheduler.decay_type", "optim.schedule = wsd decays linearly")
        fields["optim.schedule"] = "wsd"
    if not get("checkpoint.enable"):
        del fields["checkpoint.every"]
    if pp > 1:  # a local batch is what the pipeline cuts
        micro = reading.number("parallelism.pipeline_parallel_microbatch_size", 1, 1)
        fields["layout.microbatches"], rest = divmod(fields["train.microbatch_size"], micro)
        fields["train.microbatch_size"] = micro
        if rest or not fields["layout.microbatches"]:
            raise UserError(f"{reading.path}: training.local_batch_size: must be a multiple of {micro}")
    if fields["layout.recompute"] == "selective":
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
