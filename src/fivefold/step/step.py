"""One optimizer step: forward and backward of each microbatch, clipping, update. Gradients add up in fp32, and are
summed over the ranks while the last backward runs.

A step is judged by its loss and its gradient's norm (is it finite, is it a spike, may it change the weights?), and the
update before it by the largest weight: has it destroyed the weights? Loss and norm are sums over all ranks, so all of
them judge alike. The verdict masks the update, and stays on the device with loss and norm until `Done` is read. Then
the host acts (train/faults.py).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fivefold.checkpoint.store import LARGEST
from fivefold.comm import Axis
from fivefold.comm.progress import progress, span
from fivefold.kernels.elementwise import to_device
from fivefold.kernels.matmul import scaled
from fivefold.models.section import ModelSection
from fivefold.observe.faults import GROWTH, SECONDS, SHARED_EVERY, USUAL
from fivefold.optim import learning_rate
from fivefold.optim.scaling import clip_scale
from fivefold.optim.signs import LABELS
from fivefold.parallel.mesh import Mesh, Microbatch, Share
from fivefold.parallel.replica import gradient_square
from fivefold.recipe import FaultsSection, OptimSection, Recipe
from fivefold.step import curvature
from fivefold.step.state import State

OWN = ("loss", "norm", "asked", "skipped")
STOP, SAVE = 1.0, 2.0**-20
"""What a rank asks the others for. A sum tells both apart: only the first rank asks for a save, each stop saves."""

LOSS, NORM = range(2)  # rows of the statistics
STEPS = 50  # that their averages cover
FIRST = 20  # steps before anything is an outlier
LEAST = math.log(1.2)  # above the mean: a curve without noise has a tiny deviation


class Done:
    """A step that the host has queued. On a GPU it may not have run yet.

    Its figures travel to the host behind it. Reading one waits for this step alone, and not for later ones. So a loop
    that reads them after it has queued the next step keeps the GPU busy. lr: the learning rate. seconds: a row of
    `SECONDS` for each rank.
    """

    def __init__(self, lr: float, figures: Mapping[str, Tensor], seconds: Tensor | None = None):
        self.lr, self._names, self._ranks = lr, tuple(figures), 0 if seconds is None else len(seconds)
        device = torch.stack([figure.double() for figure in figures.values()])
        if seconds is not None:
            device = torch.cat([device, seconds.flatten()])
        self._host = device.to("cpu", non_blocking=True)
        self._arrived: Any = moment(device.device) if device.is_cuda else None

    def wait(self) -> None:
        """Waits until the step is done."""
        if self._arrived is not None:
            began = progress.enter((None, "step", None, 0, (), None))
            self._arrived.synchronize()
            progress.leave(began)

    @property
    def end(self) -> Any:
        """A `moment`: when the step was done on a GPU, else now."""
        return time.perf_counter() if self._arrived is None else self._arrived

    @cached_property
    def _figures(self) -> dict[str, float]:
        self.wait()
        return dict(zip(self._names, self._host.tolist(), strict=not self._ranks))

    @property
    def loss(self) -> float:
        """The mean loss of the global batch."""
        return self._figures["loss"]

    @property
    def norm(self) -> float:
        """The norm of the whole gradient; the mean norm of the replica groups."""
        return self._figures["norm"]

    @property
    def stop(self) -> bool:
        """True if any rank was asked to stop."""
        return self._figures["asked"] > SAVE

    @property
    def save(self) -> bool:
        """True if the state is to be saved: a checkpoint is due by time, or the run stops."""
        return self._figures["asked"] > 0

    @property
    def skipped(self) -> int:
        """Steps skipped in a row, up to this one."""
        return int(self._figures["skipped"])

    @property
    def seconds(self) -> list[list[float]]:
        """A row of `SECONDS` for each rank of the replica group, in every SHARED_EVERY-th step; else none."""
        self.wait()
        return self._host[len(self._names) :].view(self._ranks, len(SECONDS)).tolist() if self._ranks else []

    @property
    def more(self) -> dict[str, float]:
        """Further figures: the load of experts, and what `inspect` returned."""
        return {name: figure for name, figure in self._figures.items() if name not in OWN}


def moment(device: torch.device) -> Any:
    """Now; on a GPU when it gets there. So a step's time does not depend on when the host looks."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(begin: Any, end: Any) -> float:
    """Between two moments of one clock that are over."""
    return end - begin if isinstance(end, float) else begin.elapsed_time(end) / 1e3


def take_step(
    state: State,
    recipe: Recipe,
    microbatches: list[Microbatch],
    stop_wanted: Callable[[], bool] = lambda: False,
    inspect: Callable[[], Mapping[str, Tensor] | None] = lambda: None,
    save_wanted: Callable[[], bool] = lambda: False,
) -> Done:
    """Takes one step of a resolved recipe: gradients, clipping, update, and the outer steps that are due. The host
    waits for no result. A replica group clips by its own norm.

    stop_wanted: returns True if this rank was asked to stop. inspect: called when `state` has the whole gradient,
    before it is clipped; that of a tied embedding and output layer is the embedding's. It may return further figures of
    the step: scalars on the device, equal on all ranks. save_wanted: returns True on the first rank if a checkpoint is
    due by time.
    """
    assert recipe.train.steps, "a resolved recipe has steps"
    if state.grows:
        set_windows(state, recipe.model, recipe.model.ramped(state.step))
    if recipe.optim.estimator == LABELS:
        curvature.estimate(state, recipe, microbatches, forward_backward)
    for replica in state.parallel.replicas if recipe.layout.early else ():
        replica.updater.expect(scheduled(state, recipe.optim, recipe.train.steps))
    share = forward_backward(state, microbatches, recipe.train.seed)
    more = dict(inspect() or {})
    seconds = own_seconds(state.mesh.axis("all"), state.step)
    asks = STOP if stop_wanted() else SAVE if save_wanted() else 0.0
    loss, own_norm, asked, ruined = agree(state, share, asks, seconds)
    scaling = state.loss_scale
    if scaling is not None:
        own_norm = own_norm / scaling.factor
        more["loss_scale"] = scaling.factor
    norm, replica_groups = own_norm, state.mesh.axis("replica_groups")
    # One that is not finite makes the mean not finite, so all replica groups skip the same updates
    if replica_groups.size > 1:
        means = replica_groups.all_reduce(torch.stack([loss, norm, asked, ruined])) / replica_groups.size
        loss, norm, asked, ruined = means.unbind()
    verdict = judge(state.usual, loss, norm, recipe.faults, ruined)
    state.usual = verdict.usual
    with span("update"):
        lr, diverging = update(state, recipe.optim, own_norm, verdict.skip, recipe.train.steps, verdict.bad)
    more |= {**verdict.figures, "nonfinite": diverging}
    state.step += 1
    if scaling is not None:
        more |= {"overflow": verdict.bad - diverging, "skipped_steps": scaling.overflows}
    if state.outer is not None:
        state.outer.step(state.step, recipe.train.steps)
    own = zip(OWN, (loss, norm, asked, state.counts[1]), strict=True)
    balance = state.parallel.balance
    figures = (balance.figures if balance else {}) | state.figures
    figures |= state.qk_clip.figures if state.qk_clip else {}
    return Done(lr, {**dict(own), **figures, **more}, seconds)


def forward_backward(state: State, microbatches: Sequence[Microbatch], seed: int) -> Tensor:
    """Computes the mean gradient of the global batch in the replicas. Returns this rank's share of the mean loss
    (scalar); the shares of all ranks add up to it."""
    parallel, mesh = state.parallel, state.mesh
    factor = state.loss_scale.factor if state.loss_scale else None
    share = Share.of(microbatches, mesh)
    # Gradients and losses of all microbatches are summed; this makes the sum a mean.
    scale = 1 / (share.total * mesh.size("cp"))

    # Ranks of a tensor axis drop the same elements of activations that each has whole. With sp each has its own piece
    rank = mesh.axis("run").rank if mesh.layout.sp else mesh.axis("tp").ranks[0]
    rank += mesh.size("all") * mesh.replica_group * mesh.apart

    def seeds(microbatch: int, stage: int = 0) -> None:
        """Sets the random state from the position in the run, so a resumed run draws the same numbers. stage: which of
        this rank's."""
        number = rank + stage * mesh.replica_groups * mesh.size("all")
        mixed = (seed * 1_000_003 + state.step) * 1_000_003 + microbatch * 65_537 + number
        torch.manual_seed(mixed % 2**63)

    def begin(microbatch: int, stage: int = 0) -> None:
        """The forward of a microbatch begins."""
        seeds(microbatch, stage)
        if parallel.balance is not None:
            parallel.balance.count(microbatch < share.counted)
        if state.qk_clip is not None:
            state.qk_clip.counts = microbatch < share.counted

    for replica in parallel.replicas:
        replica.start_step()
    for stage in parallel.stages if mesh.further else ():
        stage.mtp_loss = 0.0  # pyright: ignore[reportArgumentType]
    if parallel.balance is not None:
        parallel.balance.start_step(scale if factor is None else factor * scale)
    if state.qk_clip is not None:
        state.qk_clip.start_step()
    with parallel.saving(), scaled(factor):
        if parallel.pipeline is not None:
            run = parallel.pipeline.forward_backward
            total = run(share, scale, begin, factor)
        else:
            total = accumulate(state, share, scale, begin, factor)
    for replica in parallel.replicas:
        replica.finish()
    for reduction in parallel.reductions:
        reduction()
    if parallel.balance is not None:
        parallel.balance.finish()
    if state.qk_clip is not None:
        state.qk_clip.finish()
    if mesh.further:
        own = sum(torch.as_tensor(stage.mtp_loss, device=mesh.device) for stage in parallel.stages)
        figure = torch.as_tensor(own * scale * counted_once(mesh)).double()
        state.figures = {"mtp_loss": mesh.axis("all").all_reduce(figure)}
    return total * scale * counted_once(mesh)


def accumulate(
    state: State,
    microbatches: Sequence[Microbatch],
    scale: float,
    seeds: Callable[[int], None],
    factor: Tensor | None = None,
) -> Tensor:
    """Runs forward and backward of one microbatch after the other, if this rank has the whole model. Returns the sum of
    their weighted losses."""
    parallel, total = state.parallel, torch.zeros((), device=state.mesh.device)
    for index, microbatch in enumerate(microbatches):
        progress.mark()
        seeds(index)
        if index == len(microbatches) - 1:
            for replica in parallel.replicas:
                replica.enable_sync()
        with span("forward, microbatch", index):
            loss = state.module(microbatch.inputs, microbatch.targets, **microbatch.options())
        gradient = torch.full_like(loss, scale * microbatch.weight)
        with span("backward, microbatch", index):
            loss.backward(gradient if factor is None else gradient * factor)
        total.add_(loss.detach(), alpha=microbatch.weight)
    return total


def set_windows(state: State, model: ModelSection, window: int) -> None:
    """Sets the windows of the blocks that have one."""
    for stage in state.parallel.stages:
        for number, block in stage.blocks.items():  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
            if model.window(int(number)):
                block.attention.window = window


def counted_once(mesh: Mesh) -> float:
    """1 on the rank that counts a loss which several ranks compute, else 0."""
    return float(mesh.index("tp") == 0)


def update(
    state: State, optim: OptimSection, norm: Tensor, skip: Tensor, steps: int, bad: Tensor | None = None
) -> tuple[float, Tensor]:
    """Clips the gradient, given its norm, and updates the weights. Returns the schedule's learning rate, and `bad`
    without the overflows that a lower factor of the loss may cure.

    skip: 1 if loss or gradient are not finite, or too large to be used: an fp32 scalar on the device. Then masters,
    moments and counts stay as they are: such a gradient would destroy them. The host does not know it yet, so it queues
    the update all the same. bad: 1 if they are not finite, which must not last; None: `skip`.
    """
    lr = scheduled(state, optim, steps)
    scale = clip_scale(norm, optim.grad_clip)
    if state.loss_scale is not None:
        scale = (1.0 if scale is None else scale) / state.loss_scale.factor
    for replica in state.parallel.replicas:
        replica.update(lr, scale, skip)
    if state.parallel.balance is not None:
        state.parallel.balance.update(skip)
    if state.qk_clip is not None:
        state.qk_clip.update(skip)
    updates, skipped = state.counts.unbind()
    if bad is None:
        bad = skip
    if state.loss_scale is not None:  # the run has not diverged where a lower factor may help
        bad = bad - state.loss_scale.update(bad)
    state.counts = torch.stack([updates + (1 - skip), (skipped + 1) * bad])
    return lr, bad


def scheduled(state: State, optim: OptimSection, steps: int, ahead: int = 0) -> float:
    """The learning rate of the step that is next, or comes so many later."""
    own, step = state.functions, state.step + ahead
    return rate(optim, step, steps) if own.schedule is None else own.rate(step, steps)


def rate(optim: OptimSection, step: int, steps: int) -> float:
    """The learning rate of a step (0, 1, ...) of a run of `steps`."""
    assert optim.warmup_steps is not None, "a resolved recipe has warmup_steps"
    lowest = optim.lr if optim.min_lr is None else optim.min_lr  # only a constant one has none
    return learning_rate(
        step, total=steps, warmup=optim.warmup_steps, lr=optim.lr, min_lr=lowest,
        schedule=optim.schedule, decay_fraction=optim.decay_fraction,
        cycle=optim.restart_steps or 0, growth=optim.restart_growth,
    )  # fmt: skip


def own_seconds(axis: Axis, step: int) -> Tensor | None:
    """This rank's row of a table that, summed, says how long each rank computed and waited (n, 5); None in steps that
    share nothing."""
    if axis.size == 1 or (step + 1) % SHARED_EVERY:
        return None
    rows = torch.zeros(axis.size, len(SECONDS), dtype=torch.float64)
    rows[axis.index] = torch.tensor(progress.share(), dtype=torch.float64)
    return to_device(rows, axis.device)


def last_update(state: State) -> tuple[Tensor, Tensor | None]:
    """(1 if the last update has destroyed weights of this rank, else 0: an fp32 scalar; `State.limit` after it)."""
    device, seen = state.mesh.device, [replica.updater.largest for replica in state.parallel.replicas]
    found = [to_device(one, device) for one in seen if one is not None]
    if not found:
        return torch.zeros((), device=device), state.limit
    return destroyed(torch.stack(found).amax(), state.limit)


def agree(
    state: State, share: Tensor, asks: float, seconds: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(mean loss, norm of the whole gradient, the sum of what ranks ask for: STOP, SAVE; > 0 if the last update has
    destroyed weights of any rank), equal on all ranks of a replica group: fp64 scalars.

    share: this rank's share of the loss. seconds: is summed, too. One message sums everything. Where states are not
    divided, all ranks have the same norm already, and take the mean: no rank may decide by a norm of its own.
    """
    mesh = state.mesh
    square = gradient_square(state.parallel.replicas, mesh)
    ruined, state.limit = last_update(state)
    sums = torch.stack([share.double(), torch.full_like(square, asks), square, ruined.double()])
    if seconds is not None:
        sums = torch.cat([seconds.flatten(), sums])
    mesh.axis("all").all_reduce(sums)
    if seconds is not None:
        seconds.copy_(sums[:-4].view_as(seconds))
    loss, asked, square, ruined = sums[-4:].unbind()
    if not mesh.divided:
        square = square / mesh.size("all")
    return loss.float().double(), square.sqrt(), asked, ruined


class Verdict(NamedTuple):
    """bad: 1 if loss or gradient are not finite. skip: 1 if the step may not change the weights. Both are fp32 scalars
    on the device. usual: the statistics with this step. figures: by their names in observe/faults.py."""

    bad: Tensor
    skip: Tensor
    usual: Tensor
    figures: dict[str, Tensor]


def destroyed(largest: Tensor, limit: Tensor | None) -> tuple[Tensor, Tensor]:
    """(1 if an update has destroyed weights of this rank, else 0; the limit for the next): fp32 scalars. largest: the
    largest |weight| after it, NaN if any is. limit: as returned after the update before; None: that is not known.

    Weights that are not finite or beyond LARGEST are destroyed, and so is what has grown to GROWTH times the largest
    one in a single step. Those below 1 count as 1: they may start at zero.
    """
    wrong = (~(largest <= (LARGEST if limit is None else limit))).float()
    return wrong, (GROWTH * largest).clamp(GROWTH, LARGEST)


def judge(usual: Tensor, loss: Tensor, norm: Tensor, faults: FaultsSection, ruined: Tensor) -> Verdict:
    """usual: (2, 3) fp64, the statistics of loss and norm (`State.usual`). loss, norm, ruined (> 0 if the last
    update has destroyed weights): fp64 scalars, equal on all ranks."""
    ruined = (ruined > 0).float()
    bad = 1 - (loss.isfinite() & norm.isfinite()).float()
    skip = torch.maximum(bad, ruined)
    if not faults.spike_limit:
        return Verdict(bad, skip, usual, {"destroyed": ruined})
    found, after = outlier(usual, torch.stack([loss, norm]), faults.spike_limit)
    if faults.on_spike != "tell":
        skip = torch.maximum(skip, found.amax().float())
    means = after[:, 1].exp()
    figures = {"destroyed": ruined, "spike": found[LOSS], "outlier": found[NORM]}
    return Verdict(bad, skip, after, {**figures, **dict(zip(USUAL, means.unbind(), strict=True))})


def outlier(stats: Tensor, value: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """(1 where a value is an outlier, else 0: fp64, the statistics with it). stats: (..., 3) fp64: how many values they
    have seen, mean and variance of their logarithms. value: (...). limit: in standard deviations.

    An outlier counts as one at the limit, so that a value which stays high becomes the usual one. A value that is not
    finite or 0 counts as nothing.
    """
    count, mean, variance = stats.unbind(-1)
    value = value.double().log()
    most = mean + (limit * variance.sqrt()).clamp(min=LEAST)
    found = (value > most) & (count >= FIRST) & value.isfinite()
    value = torch.where(found, most, value)
    share = (1 / (count + 1)).clamp(min=1 / STEPS)
    apart = value - mean
    after = torch.stack(
        [count + 1, mean + share * apart, (1 - share) * (variance + share * apart.square())], -1
    )
    return found.double(), torch.where(value.isfinite().unsqueeze(-1), after, stats)
