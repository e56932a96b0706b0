"""What follows from a recipe: its unset fields, so that a saved recipe is explicit; the nearest layout for another
number of ranks, which an elastic run takes when ranks leave or join; warnings of what is most likely not meant."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import Any, TypeVar

from fivefold.errors import UserError, several
from fivefold.models.card import card_of, count_parameters, resolve_model
from fivefold.models.section import phases
from fivefold.optim import DEFAULT, OPTIMIZERS, OUTER, lowest_rate
from fivefold.recipe.entries import steps as profiled_steps
from fivefold.recipe.load import Recipe
from fivefold.recipe.rules import contradictions, with_layout
from fivefold.recipe.rules.texts import expected_vocab_size, ramp, run_steps, sequences_before
from fivefold.schedules.compression import compressor
from fivefold.sharding.layout import Layout, divisors, largest, to_text
from fivefold.sharding.layout_rules import PLAIN

FLOPS = 6.0
"""Of training, per parameter and token: two in forward, four in backward (Kaplan et al., arXiv 2001.08361)."""


def parameters(recipe: Recipe) -> int | None:
    """Parameters of the recipe's model. None: it is that of a folder, or its vocabulary that of a file."""
    size = None if recipe.train.init_from else expected_vocab_size(recipe)
    return count_parameters(recipe.model.model_copy(update={"vocab_size": size})) if size else None


def total_steps(recipe: Recipe) -> int:
    """Optimizer steps of the run: `train.steps`, or `train.tokens` rounded up to whole steps. Raises UserError: the
    recipe gives neither."""
    if steps := run_steps(recipe):
        return steps
    raise UserError("recipe: set train.steps or train.tokens, the length of the run")


def tokens_per_step(recipe: Recipe) -> int:
    """Tokens in an optimizer step with the full batch, over all ranks: B x T."""
    return recipe.train.global_batch_size * recipe.model.seq_len


def training_flops(parameters: float, tokens: float, recompute: bool = False) -> float:
    """6 N D: two FLOPs per weight and token in forward, four in backward (Kaplan et al., arXiv 2001.08361). Full
    recomputation repeats forward."""
    return (FLOPS + 2.0 * recompute) * parameters * tokens


def tokens_before(recipe: Recipe, step: int) -> int:
    """Tokens of all steps before this one (0, 1, ...), over all ranks."""
    return sequences_before(recipe.train, step) * recipe.model.seq_len


def microbatches_per_step(recipe: Recipe) -> int:
    """Microbatches in an optimizer step of the data-parallel rank that has most."""
    train, layout = recipe.train, recipe.layout
    whole = train.global_batch_size // (train.microbatch_size or 1)
    return largest(whole, layout.dp)


def resolve(recipe: Recipe, *, vocab_size: int) -> Recipe:
    """Fills in every unset field of a recipe. Set fields stay. Resolving twice changes nothing.

    `layout.microbatches` becomes `train.microbatch_size`, and `train.tokens` becomes `train.steps`. `data.cache` and
    `precision.mode = "auto"` stay as they are, because they depend on the machine.

    Args:
        vocab_size: number of token ids in the data (the tokenizer's size).

    Raises:
        UserError: `model.vocab_size` is smaller than `vocab_size`, the length of the run is not given, or the layout
            cannot divide a size that is known only now.
    """
    steps = total_steps(recipe)
    train: dict[str, Any] = {
        "steps": steps,
        "tokens": None,
        "microbatch_size": microbatch_size(recipe),
        "val_every": recipe.train.val_every or max(1, steps // 10),
    }
    layout: dict[str, int | None] = {"microbatches": None}
    compress = compressor(recipe.layout.compress)
    if compress is not None and recipe.layout.compress_after is None:
        layout["compress_after"] = int(compress.whole * steps)
    own = OPTIMIZERS[recipe.optim.name].fields
    optim: dict[str, Any] = {name: v for name, v in own.items() if getattr(recipe.optim, name) is None}
    sync: dict[str, Any] = {}
    if outer := OUTER.get(recipe.sync.method):
        own = {"outer_lr": outer.lr} | {f"outer_{name}": value for name, value in outer.fields.items()}
        sync = {name: value for name, value in own.items() if getattr(recipe.sync, name) is None}
    if recipe.optim.min_lr is None and recipe.optim.schedule != "constant":
        optim["min_lr"] = lowest_rate(recipe.optim.lr)
    if recipe.optim.schedule == "restarts" and recipe.optim.restart_steps is None:
        optim["restart_steps"] = max(1, steps // 4)
    if recipe.optim.warmup_steps is None:
        optim["warmup_steps"] = min(max(1, round(0.02 * steps)), 2000)
    resolved = recipe.model_copy(
        update={
            "model": resolve_model(recipe.model, vocab_size=vocab_size),
            "train": recipe.train.model_copy(update=train),
            "optim": recipe.optim.model_copy(update=optim),
            "layout": recipe.layout.model_copy(update=layout),
            "sync": recipe.sync.model_copy(update=sync),
        }
    )
    found = [message for _, message in contradictions(resolved)]
    if found:
        raise UserError(f"recipe: {'; '.join(found)}")
    return resolved


def microbatch_size(recipe: Recipe) -> int:
    """The microbatch size: the recipe's, or the one that `layout.microbatches` implies. Without either, it is the
    largest up to 8 that divides the batches and gives no rank more sequences than single ones would. A pipeline gets at
    least two microbatches per rank, if possible."""
    if recipe.train.microbatch_size:
        return recipe.train.microbatch_size
    if recipe.layout.microbatches:
        return recipe.train.global_batch_size // recipe.layout.dp // recipe.layout.microbatches
    return best_microbatch_size(recipe, 8)


def best_microbatch_size(recipe: Recipe, most: int) -> int:
    """The largest microbatch size up to `most` that delays no step."""
    dp = recipe.layout.dp
    sizes = [recipe.train.global_batch_size, *(size for size, _ in ramp(recipe.train))]
    slowest = [largest(size, dp) for size in sizes]
    share = math.gcd(*slowest)
    most = min(share, most) if recipe.layout.pp == 1 else max(1, min(most, share // (2 * recipe.layout.pp)))
    both = list(zip(sizes, slowest, strict=True))
    return next(
        B
        for B in range(most, 0, -1)
        if all(size % B == 0 and largest(size // B, dp) * B == least for size, least in both)
    )


MOST_TRIED = 2000  # layouts: each takes about a millisecond
TRIED = 3  # numbers of data-parallel ranks for one division of the model: some algorithms do not take every number
R = TypeVar("R", bound=Recipe)


@dataclass(frozen=True)
class Fit:
    """The recipe in the nearest layout for some ranks. ranks: those that it uses; the others are spare. line: what is
    different from the recipe, for people; "" if nothing is."""

    recipe: Recipe
    ranks: int
    line: str


def nearest_layout(recipe: Recipe, ranks: int) -> Fit:
    """The nearest valid layout of at most `ranks` ranks. It trains the same: the same batches in the same order.

    What divides the model (pp, cp, tp, ep) stays as it is if that many ranks are left, and becomes smaller by the
    fewest doublings if not. As many data-parallel ranks as possible share the batch, in unequal shares if need be. A
    mixture of experts keeps its microbatches, over which it computes its balance loss. Raises UserError: there is none;
    or the number of ranks is part of what is trained."""
    asked = Layout.from_recipe(recipe.layout)
    if asked.ranks == ranks:
        return Fit(recipe, ranks, "")
    if recipe.replica_groups.count > 1 or recipe.servers.count:
        raise UserError(
            f'the recipe has {asked.ranks} ranks and not {ranks}: with sync.method = "{recipe.sync.method}" their '
            "number changes what is trained"
        )
    pinned = with_layout(recipe, replace(asked, microbatches=None), microbatch_size=microbatch_size(recipe))
    for layout in islice(_nearest(asked, ranks, recipe), MOST_TRIED):
        fitting = in_layout(pinned, layout)
        if any(contradictions(fitting)):
            continue
        names = [to_text(Layout.from_recipe(changed.layout)) for changed in (fitting, pinned)]
        line = f"{several(ranks, 'rank')} instead of {asked.ranks:,}: layout {' for '.join(names)}"
        if spare := ranks - layout.ranks:
            line += f"; {several(spare, 'rank')} left over"
        old, new = pinned.train.microbatch_size, fitting.train.microbatch_size
        if old != new:
            line += f"; microbatches of {new} for {old}"
            if card_of(fitting.model).has_experts:
                line += ", which changes the balance loss of experts"
        return Fit(fitting, layout.ranks, line)
    raise UserError(
        f"layout '{to_text(asked)}': none of the {MOST_TRIED:,} nearest layouts of {ranks} or fewer ranks is valid for "
        "this recipe"
    )


def in_layout(recipe: R, layout: Layout) -> R:
    """The recipe in another layout, not checked. A microbatch size of the recipe's is the most that fits into memory:
    it becomes smaller where that makes shares more equal, or where there would be fewer microbatches than ranks."""
    changed = with_layout(recipe, replace(layout, microbatches=None))
    most = recipe.train.microbatch_size
    if most is None:
        return changed
    if card_of(recipe.model).has_experts:  # the balance loss of a microbatch is part of what is trained
        sizes = [recipe.train.global_batch_size, *(size for size, _ in ramp(recipe.train))]
        ranks = layout.dp  # whole microbatches, at least one for each
        wanted = (
            B for B in range(most, 1, -1) if all(size % B == 0 and size // B >= ranks for size in sizes)
        )
        size = next(wanted, 1)
    else:
        size = best_microbatch_size(changed, most)
    return with_layout(changed, Layout.from_recipe(changed.layout), microbatch_size=size)


def _nearest(asked: Layout, ranks: int, recipe: Recipe) -> Iterator[Layout]:
    """Layouts of at most `ranks` ranks, the nearest first: those that divide the model with the fewest halvings, and of
    these those that leave fewest ranks over."""
    before = (asked.pp, asked.cp, asked.tp, asked.ep)
    sizes = product(*(range(1, size + 1) for size in before[:3]), divisors(asked.ep))

    def distance(after: tuple[int, ...]) -> tuple[float, int]:
        halvings = sum(math.log2(old / new) for old, new in zip(before, after, strict=True))
        return round(halvings, 6), ranks % math.prod(after[:3])

    for pp, cp, tp, ep in sorted((s for s in sizes if math.prod(s[:3]) <= ranks), key=distance):
        layout = replace(asked, pp=pp, cp=cp, tp=tp, ep=ep)
        if tp == 1:
            layout = replace(layout, sp=False, sp_regather=False)
        if tp == 1 or ep == 1:
            layout = replace(layout, ep_fold=False)
        layout = replace(layout, tp_chunks=layout.chunks_of(recipe.model.seq_len))
        most = min(ranks // (pp * cp * tp), recipe.train.global_batch_size)
        for dp in islice((dp for dp in range(most, 0, -1) if dp * cp * layout.folded % ep == 0), TRIED):
            for sharing in _sharings(layout, dp):
                yield sharing
                yield replace(sharing, **PLAIN)


def _sharings(layout: Layout, dp: int) -> Iterator[Layout]:
    """The layout with so many data-parallel ranks: with as many shards as before; with all ranks as shards; without."""
    if layout.zero:
        for shards in dict.fromkeys((layout.dp_shard, dp)):
            if dp % shards == 0 and shards * layout.cp > 1:
                yield replace(layout, dp_replicate=dp // shards, dp_shard=shards)
    yield replace(layout, dp_replicate=dp, dp_shard=1, zero=0)


MOST_WARMUP = 0.5
"""Share of the run."""
MOST_CONTINUED = 6e-4
"""The highest peak learning rate of GPT-3's table: that of 125M parameters with Adam (arXiv 2005.14165)."""


def warnings(recipe: Recipe) -> Iterator[str]:
    """One sentence per value that is most likely not meant, and what to do."""
    optim, train, checkpoint, steps = recipe.optim, recipe.train, recipe.checkpoint, total_steps(recipe)
    least, most = OPTIMIZERS[optim.name].usual_lr
    for key in ("lr", "lr_embeddings", "lr_vectors"):
        lr = getattr(optim, key)
        if lr is not None and not least <= lr <= most:
            effect = "training will most likely diverge" if lr > most else "the weights will hardly change"
            yield f"optim.{key} = {lr:g}: {effect}; {optim.name} is used with {least:g} to {most:g}"
    if train.init_from and optim.name == DEFAULT and optim.lr > MOST_CONTINUED:
        why = "a rate for random weights, which may undo what those of train.init_from know"
        yield f"optim.lr = {optim.lr:g} is {why}; the recipe `continue` has a lower one"
    saved = "only the end is saved" + ", beside what is due by checkpoint.minutes" * (checkpoint.minutes > 0)
    for key, every, what in (
        ("train.val_every", train.val_every, "it is validated at the end only"),
        ("train.sample_every", train.sample_every, "a sample is written at the end only"),
        ("checkpoint.every", checkpoint.every, saved),
    ):
        if every > steps:
            yield f"{key} = {every:,} is more than the run's {steps:,} steps: {what}"
    size = f"train.global_batch_size = {train.global_batch_size:,}"
    for key, text, full in (("train.batch_ramp", train.batch_ramp, size), *recipe.model.ramps):
        if (taken := sum(count for _, count in phases(text))) >= steps:
            lasts = f'{key} = "{text}" lasts {taken:,} steps, and the run has {steps:,}'
            yield f"{lasts}: no step has {full}. Shorten the ramp, or train longer"
    if (profiled := profiled_steps(recipe.observe.profile_steps)) and profiled[-1] > steps:
        yield f"observe.profile_steps = {recipe.observe.profile_steps}: the run has {steps:,} steps"
    if (warmup := optim.warmup_steps or 0) > MOST_WARMUP * steps:
        yield f"optim.warmup_steps = {warmup:,} of {steps:,} steps: the learning rate is below its peak most of the run"
    timeout, hang_s = recipe.launch.timeout, recipe.observe.hang_s
    if timeout <= hang_s:
        what = f"launch.timeout = {timeout:g} is not longer than observe.hang_s = {hang_s:g}"
        yield f"{what}: a message fails before the rank that is missing can be named. Nearest valid: {hang_s + 1:g}"
