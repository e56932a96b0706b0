"""What a layout costs on a cluster: memory, time and communication of one recipe, as one object."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from fivefold.errors import UserError
from fivefold.layout import Layout, to_text, validate
from fivefold.plan import memory, volume
from fivefold.plan.clusters import Cluster, for_ranks
from fivefold.plan.cost import Setting
from fivefold.plan.memory import Memory
from fivefold.plan.operations import Sizes
from fivefold.plan.software import FIVEFOLD, Software, of
from fivefold.plan.stalls import Stalls, stalls
from fivefold.plan.time import Parts, Step, step
from fivefold.recipe import Recipe, expected_vocab_size, flops_per_token, resolve
from fivefold.recipe.rules import allows
from fivefold.recipe.schema import ModelSection

FRAGMENTS = 0.04
"""Share of what is allocated that the allocator keeps besides (reserved beside allocated: 3 to 6% in the published runs
of docs/planner.md)."""
BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0}


@dataclass(frozen=True)
class Plan:
    """A prediction. memory: of the ranks of each position in the pipeline. stalls: of a whole recipe."""

    setting: Setting
    memory: list[Memory]
    step: Step
    stalls: Stalls | None = None

    @cached_property
    def sent(self) -> dict[str, int]:
        """Bytes that leave a rank in a step, by axis: of the rank that sends most."""
        return volume.sent(self.setting)

    @property
    def layout(self) -> Layout:
        return self.setting.layout

    @property
    def peak_bytes(self) -> int:
        return round(max(m.total for m in self.memory))

    @property
    def limit(self) -> int:
        """Bytes that may be allocated on a device."""
        return limit(self.setting.cluster)

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.limit

    @property
    def tokens(self) -> int:
        """In a step, over all ranks."""
        s = self.setting
        return s.microbatches * s.sizes.B * s.layout.dp * s.model.seq_len

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.step.seconds

    @property
    def model_flops_per_gpu(self) -> float:
        """FLOP/s, of the model's own work."""
        return flops_per_token(self.setting.model) * self.tokens_per_s / self.layout.ranks

    @property
    def mfu(self) -> float:
        s = self.setting
        return self.model_flops_per_gpu / s.cluster.device.peak[s.dtype]

    def as_json(self) -> dict[str, Any]:
        """What `fivefold plan --json` prints."""
        step = self.step
        return {
            "layout": to_text(self.layout),
            "cluster": f"{self.setting.cluster.name}:{self.layout.ranks}",
            "microbatch_size": self.setting.sizes.B,
            "microbatches": self.setting.microbatches,
            "precision": self.setting.dtype,
            **(
                {"expert_load": self.setting.software.expert_load} if self.setting.model.arch == "moe" else {}
            ),
            "fits": self.fits,
            "ranks": self.layout.ranks,
            "memory": {
                "peak_bytes": self.peak_bytes,
                "limit_bytes": self.limit,
                "per_stage": [m.as_json() for m in self.memory],
            },
            "time": {
                "step_s": step.seconds,
                "compute_s": step.compute,
                "exposed_comm_s": sum(step.exposed.values()),
                "bubble_s": step.bubble,
            }
            | ({"stalls": self.stalls.as_json()} if self.stalls else {}),
            "mfu": self.mfu,
            "tokens_per_s": self.tokens_per_s,
            "tokens_per_s_per_gpu": self.tokens_per_s / self.layout.ranks,
            "model_tflops_per_gpu": self.model_flops_per_gpu / 1e12,
            "communication": {"bytes_per_rank": self.sent},
        }


def limit(cluster: Cluster) -> int:
    """Bytes of a device that a program's tensors may take."""
    return int((cluster.device.memory - cluster.device.reserve) / (1 + FRAGMENTS))


def predict(recipe: Recipe, cluster: Cluster, software: Software | None = None) -> Plan:
    """Predicts a recipe with its layout. software: None, this program on the cluster's devices.

    Raises:
        UserError: the layout does not fill the cluster; the vocabulary is unknown; the device lacks the dtype.
    """
    layout = Layout.from_recipe(recipe.layout)
    if cluster.devices:
        validate(layout, cluster.devices, partial(allows, recipe))
    full = resolved(recipe)
    B = full.train.microbatch_size
    assert B is not None
    count = full.train.global_batch_size // (layout.dp * B)
    software = with_reduce(software or of(cluster), recipe.precision.reduce)
    plan = price(setting(full.model, layout, cluster, B, count, dtype_of(recipe, cluster), software))
    return replace(plan, stalls=stalls(full, plan.setting, plan.step.seconds))


def setting(
    model: ModelSection,
    layout: Layout,
    cluster: Cluster,
    B: int,
    microbatches: int,
    dtype: str = "bf16",
    software: Software = FIVEFOLD,
) -> Setting:
    """B: sequences of a microbatch. The cluster gets as many devices as the layout has ranks."""
    sizes = Sizes(
        model,
        B,
        layout.tp,
        layout.cp,
        layout.ep,
        layout.sp,
        BYTES[dtype],
        layout.cp_method,
        software.expert_load,
    )
    return Setting(model, layout, for_ranks(cluster, layout.ranks), software, sizes, dtype, microbatches)


def price(s: Setting, shared: Parts | None = None) -> Plan:
    """Predicts memory, time and bytes sent. shared: as in `time.stage_costs`."""
    return Plan(s, held(s), step(s, shared=shared))


def held(s: Setting) -> list[Memory]:
    """Memory of the ranks of each position in the pipeline."""
    return memory.predict(s.model, s.layout, s.sizes, s.software, s.dtype, s.microbatches)


def resolved(recipe: Recipe) -> Recipe:
    """The recipe with every field filled in.

    Raises:
        UserError: the vocabulary is known only when the data is.
    """
    size = expected_vocab_size(recipe)
    if size is None:
        raise UserError(
            "plan: the size of the model is known only when the vocabulary is: set model.vocab_size, for example "
            "--set model.vocab_size=32000"
        )
    return resolve(recipe, vocab_size=size)


def with_reduce(software: Software, dtype: str) -> Software:
    """The software, sending gradients in this dtype."""
    sent = {name: replace(states, reduce=BYTES[dtype]) for name, states in software.states.items()}
    return replace(software, states=sent)


def with_load(software: Software, model: ModelSection, load: float | None) -> Software:
    """The software, its busiest rank's experts getting so many times the even share of rows; None, the even share.

    Raises:
        UserError: no load can be so uneven; the model has no experts.
    """
    if load is None:
        return software
    if model.arch != "moe":
        raise UserError(f"--expert-load: {model.arch} has no experts: leave it out")
    most = model.experts or 8
    if not 1 <= load <= most:
        raise UserError(
            f"--expert-load {load:g}: must be from 1, the even share, to {most}, where one of {most} experts gets all "
            f"rows. Nearest valid: {most if load > most else 1}"
        )
    return replace(software, expert_load=load)


def dtype_of(recipe: Recipe, cluster: Cluster) -> str:
    """The dtype that computes: of `auto`, bf16 where the device has it."""
    mode = recipe.precision.mode
    if mode == "auto":
        return "bf16" if "bf16" in cluster.device.peak else "fp32"
    if mode not in cluster.device.peak or mode not in BYTES:
        known = ", ".join(name for name in cluster.device.peak if name in BYTES)
        raise UserError(f"precision.mode = {mode}: the planner prices {known} on {cluster.device.name}")
    return mode
