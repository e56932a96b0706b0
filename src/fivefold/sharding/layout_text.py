"""A layout as text: as a user writes it, and in words."""

from __future__ import annotations

from dataclasses import asdict, fields

from fivefold.errors import LONGEST_WORD, UserError, did_you_mean, shortened
from fivefold.schedules.collectives.registry import AUTO
from fivefold.schedules.compression import NONE
from fivefold.sharding.layout import Layout
from fivefold.sharding.shares import BUCKET_BYTES
from fivefold.sharding.tiers import NOT_OFFLOADED

ELSEWHERE = {"fsdp": "dp={},zero=3", "ddp": "dp={}", "tensor": "tp={}"}
"""Names of axes in other programs, and what they are here."""


def parse(text: str) -> dict[str, int | float | bool | str]:
    """Reads a layout such as `dp=2,tp=2,zero=1` into fields of `[layout]`; returns only the fields that are named.

    `dp=N` means N replicas (`dp_replicate`) with `zero=0`, and N ranks that share states (`dp_shard`) with
    `zero>=1`.

    Raises:
        UserError: listing every part that is not understood.
    """
    defaults = asdict(Layout())
    found: dict[str, int | float | bool | str] = {}
    problems = []
    for whole in _parts(text):
        part = shortened(whole, LONGEST_WORD)
        key, equals, value = (p.strip() for p in part.partition("="))
        if not equals or not value:
            problems.append(f"'{part}' is not of the form key=value")
        elif "=" in value:
            problems.append(f"'{part}': parts are separated by commas: {','.join(part.split())}")
        elif key in ELSEWHERE:
            problems.append(f"'{key}' is not an axis here; did you mean '{ELSEWHERE[key].format(value)}'?")
        elif key != "dp" and key not in defaults:
            problems.append(f"'{key}' is not an axis or option{did_you_mean(key, defaults)}")
        elif key in found:
            problems.append(f"'{key}' is given twice")
        else:
            try:
                found[key] = _value(value, defaults.get(key, 1))
            except ValueError as error:
                problems.append(f"'{part}': {error}")
    if "dp" in found:
        if "dp_replicate" in found or "dp_shard" in found:
            problems.append("'dp' stands for dp_replicate or dp_shard: give either dp or those")
        found["dp_shard" if found.get("zero", 0) else "dp_replicate"] = found.pop("dp")
    if problems:
        keys = ", ".join(["dp", *defaults])
        raise UserError(f"layout '{shortened(text, 2 * LONGEST_WORD)}': {'; '.join(problems)} (keys: {keys})")
    return found


def _parts(text: str) -> list[str]:
    """Splits a layout at its commas, except at those within the list of `zeropp`."""
    found: list[str] = []
    for part in filter(None, (p.strip() for p in text.split(","))):
        if found and "=" not in part and found[-1].partition("=")[0].strip() == "zeropp":
            found[-1] += f",{part}"
        else:
            found.append(part)
    return found


def _value(text: str, default: int | float | bool | str | None) -> int | float | bool | str:
    """Reads one value in the type of its default (None stands for an optional integer)."""
    if isinstance(default, bool):
        if text.lower() not in ("true", "false"):
            raise ValueError("must be true or false")
        return text.lower() == "true"
    if isinstance(default, str):
        return text
    if isinstance(default, float):
        try:
            return float(text)
        except ValueError:
            raise ValueError("must be a number") from None
    if not text.isascii() or not text.isdigit():
        raise ValueError("must be a whole number")
    return int(text)


def to_text(layout: Layout) -> str:
    """Formats the layout as `parse` reads it, without defaults: `dp=4,tp=2,zero=3`. One rank is `dp=1`."""
    parts = {f.name: getattr(layout, f.name) for f in fields(layout) if getattr(layout, f.name) != f.default}
    name = "dp_shard" if layout.zero else "dp_replicate"
    if name in parts and not ("dp_replicate" in parts and "dp_shard" in parts):
        parts = {"dp" if key == name else key: value for key, value in parts.items()}
    words = {
        key: f"{value:g}" if isinstance(value, float) else str(value).lower() for key, value in parts.items()
    }
    text = ",".join(f"{key}={value}" for key, value in words.items())
    return text or "dp=1"


def describe(layout: Layout) -> str:
    """One line for people: `8 ranks: dp_shard 4 x tp 2, ZeRO 3, recompute full`."""
    axes = " x ".join(f"{axis} {size}" for axis, size in layout.sizes.items() if size > 1)
    words = [f"{layout.ranks} rank{'s' * (layout.ranks > 1)}" + (f": {axes}" if axes else "")]
    if layout.ep > 1:
        words.append(f"ep {layout.ep}" + f" in {layout.expert_chunks} chunks" * (layout.expert_chunks > 1))
    if layout.zero:
        words.append(f"ZeRO {layout.zero}")
    if layout.cp > 1:
        words.append(f"context by {layout.cp_method}")
    if layout.sp:
        words.append("sequence parallel" + ", gathered again in backward" * layout.sp_regather)
    if layout.pp > 1:
        stages = f"{layout.stages_per_rank} stage{'s' * (layout.stages_per_rank > 1)}"
        words.append(f"schedule {layout.schedule} with {stages} per rank")
    if layout.recompute != "none":
        words.append(f"recompute {layout.recompute}")
    if layout.offload != NOT_OFFLOADED:
        words.append(f"offload {layout.offload}")
    if layout.all_reduce != AUTO:
        words.append(f"gradients summed by {layout.all_reduce}")
    if layout.compress != NONE:
        after = f" after step {layout.compress_after}" if layout.compress_after else ""
        words.append(f"gradients compressed by {layout.compress}{after}")
    if layout.zeropp != NONE:
        words.append(f"ZeRO++ with {layout.zeropp}")
    if layout.bucket_mib != BUCKET_BYTES / 2**20:
        words.append(
            f"buckets of {layout.bucket_mib:g} MiB" if layout.bucket_mib else "gradients in one message"
        )
    return ", ".join(words)


def equation(layout: Layout) -> str:
    """`pp 1 x dp_replicate 1 x dp_shard 4 x cp 1 x tp 2 = 8 ranks`."""
    axes = " x ".join(f"{axis} {size}" for axis, size in layout.sizes.items())
    return f"{axes} = {layout.ranks} rank{'s' * (layout.ranks > 1)}"
