"""`fivefold draw RECIPE --layout L`: draws which rank holds what, and timelines of a step. `fivefold draw RUN`: the
measured timeline of a run."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from fivefold.cli import options
from fivefold.cli.options import option, print_json
from fivefold.errors import UserError, printable
from fivefold.files import guard, make_folder, understood

if TYPE_CHECKING:
    from fivefold.kernels.tiling import Tiling
    from fivefold.recipe import Recipe
    from fivefold.sharding.layout import Layout
    from fivefold_plan.setting import Setting
    from fivefold_plan.time.servers import Service

DRAWN = 3  # microbatches of a planned timeline
MOST_MOVING = 32  # microbatches of a page that steps through a pipeline
VOCABULARY = 32000  # used for the picture when only the tokenizer's file knows the real size


def draw(
    recipe: options.RecipeArgument,
    set_: options.SetOption = None,
    layout: options.LayoutOption = None,
    out: Annotated[
        Path | None,
        option(
            "DIR",
            "Also write the pictures to DIR: layout, schedule, context, timeline, offload, orders, memory, workers.",
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        option(
            "NAME[:N]",
            "Also draw the planned timeline of computing and messages on these devices. See `fivefold plan`.",
        ),
    ] = None,
    html: Annotated[
        Path | None,
        option("FILE", "Write a page that steps through the pipeline, ZeRO 3's gathers, and the ring."),
    ] = None,
    json: options.JsonOption = False,
) -> None:
    """Draw a layout: what each rank computes and stores, and timelines of a step.

    With cp > 1 also which queries see which keys on each rank. On a --cluster also the planned step: with offload the
    link and the ways to order updates on the host, with parameter servers what a worker pushes and pulls.

    For the folder of a run: computing and messages of its measured step (observe.trace_step), and the plan; memory over
    a step (observe.memory_step); with parameter servers the shares of each worker.
    """
    if (Path(recipe) / "recipe.toml").is_file():
        guard(Path(recipe))
        if set_ or layout or cluster or html:
            raise UserError(f"{recipe} is a run: leave --set, --layout, --cluster and --html out")
        with understood(Path(recipe) / "traces"):
            drawn = of_run(Path(recipe))
        return _show(*drawn, out, json)
    from fivefold.observe import layout_picture
    from fivefold.recipe import expected_vocab_size, load, resolve
    from fivefold.sharding.layout import Layout

    loaded = load(recipe, set_ or [], layout)
    loaded = resolve(loaded, vocab_size=expected_vocab_size(loaded) or VOCABULARY)
    wanted = Layout.from_recipe(loaded.layout)
    title = Path(recipe).stem
    tiling = first_sequence(loaded, wanted)
    parts = [
        (layout_picture.to_text(loaded, wanted, tiling), {}),
        pipeline(loaded, wanted, sys.stdout.isatty() and not json),
        context(loaded, wanted, title, tiling),
        *([planned(loaded, cluster, title)] if cluster is not None else []),
        ("", {"layout": layout_picture.to_svg(loaded, wanted, title, tiling)}),
    ]
    pictures = {name: picture for _, drawn in parts for name, picture in drawn.items()}
    if html is not None:
        options.require_writable(html=html)
        options.save_as("--html", html, moving(loaded, wanted, title))
    _show("".join(text for text, _ in parts), pictures, out, json)


def _show(text: str, pictures: dict[str, str], out: Path | None, json: bool) -> None:
    """Prints the text, writes the pictures to `out`, and prints their paths."""
    paths = {}
    if out is not None:
        make_folder(out)
        paths = {name: out / f"{name}.svg" for name in pictures}
        for name, path in paths.items():
            options.save_as("--out", path, printable(pictures[name]))
    if json:
        print_json({"text": text, "pictures": {name: str(path) for name, path in paths.items()}})
        return
    print(printable(text), end="")
    for path in paths.values():
        print(path)


def of_run(run: Path) -> tuple[str, dict[str, str]]:
    """(text, pictures) of a run: computing and messages of its measured step beside the plan, memory, and the shares of
    workers. Raises UserError: no step was measured."""
    from fivefold.observe import memory_picture, timelines

    name, texts, pictures = run.resolve().name, [], {}
    if found := timelines.read(run):
        title = f"{name}, step {found[0][1].step}: computing and messages"
        texts.append(f"{timelines.LEGEND}\n\n{timelines.words(found, options.columns(40, 160, 48))}")
        pictures["timeline"] = timelines.step_svg(found, title)
        pictures["utilisation"] = timelines.utilisation_svg(found, f"{name}: utilisation over a step")
    if held := memory_picture.read(run):
        texts.append(memory_picture.to_text(held, options.columns(40, 160, 16)))
        pictures["memory"] = memory_picture.to_svg(
            held, f"{name}: bytes of the tensors of rank 0 over a step, measured"
        )
    if workers := timelines.read_workers(run):
        text = timelines.workers_text(workers, options.columns(40, 160, 16))
        texts.append(
            f"shares of the last steps, A and B in turn, . waits; {timelines.waited(workers)}\n{text}"
        )
        title = f"{name}: shares of each worker with their step, measured"
        pictures["workers"] = timelines.workers_svg({"": workers}, title)
    if not texts:
        raise UserError(
            f"{run}: no step was measured. Train with --set observe.trace_step=N, such as 3, or "
            f"observe.memory_step=N (on CPUs), which write {run / 'traces'}"
        )
    return "\n".join(texts), pictures


def planned(recipe: Recipe, cluster: str, title: str) -> tuple[str, dict[str, str]]:
    """(text, pictures) of the planned step on a cluster. Of many microbatches, the first ones are drawn. Raises
    UserError: the layout has a pipeline, whose timeline is drawn without --cluster, or does not fit the cluster."""
    from fivefold.observe.timelines import LEGEND, step_svg, step_text, summary
    from fivefold_plan.cluster.clusters import parse
    from fivefold_plan.predict import predict
    from fivefold_plan.time.timeline import timeline

    plan = predict(recipe, parse(cluster))
    if plan.service is not None:
        return served(plan.service, cluster, title)
    found = plan.setting
    drawn, most = timeline(found, DRAWN), found.microbatches
    if drawn is None:
        raise UserError(
            "--cluster: with pp > 1 the timeline is that of the pipeline; `fivefold plan --html FILE` draws it with "
            "planned times, `fivefold draw` without --cluster with equal ones"
        )
    words = f"planned on {cluster}"
    if most > DRAWN:
        words += f", {DRAWN} of {most} microbatches of a step of {plan.step.seconds:.4g} s"
    text = f"\n{words}: {summary(drawn)}\n{step_text(drawn, options.columns(40, 160, 48))}{LEGEND}\n"
    picture = step_svg([(words, drawn)], f"{title}: computing and messages")
    ways, orders = offloaded(found, title), ordered(found, title)
    return text + ways[0] + orders[0], {"timeline": picture} | ways[1] | orders[1]


def offloaded(s: Setting, title: str) -> tuple[str, dict[str, str]]:
    """(text, picture) of the ways to order updates on the host; neither if the host does not update."""
    from fivefold.observe.timelines import step_svg
    from fivefold_plan.time.offload import of, ways

    if not (found := ways(s)):
        return "", {}
    lines = [(f"{name}: device busy {line.busy:.0%}", line) for name, line in found.items()]
    stays = of(s).working == "device"
    own = ("early" if stays else "window") if s.layout.early else "beside" * stays
    text = "ways to order updates on the host, a step of one microbatch:\n"
    for (name, line), way in zip(lines, found, strict=True):
        text += f"  {name}, {line.seconds:.3g} s{' (the trainer)' * (way == own)}\n"
    return text, {
        "offload": step_svg(lines, f"{title}: updates on the host, a step of one microbatch, planned")
    }


def ordered(s: Setting, title: str) -> tuple[str, dict[str, str]]:
    """(text, picture) of two planned steps in each order of gradient sums; neither where replicas sum nothing."""
    from fivefold.observe.timelines import rows_of, workers_svg
    from fivefold.schedules.priority import SUM_ORDERS
    from fivefold_plan.time.servers import sums

    if not (runs := sums(s)):
        return "", {}
    rows = {SUM_ORDERS[o]: rows_of(run.events, run.ends[-3], run.ends[-1]) for o, run in runs.items()}
    text = "orders of gradient sums, seconds per step by the simulator:\n"
    text += "".join(f"  {SUM_ORDERS[order]:36}{run.seconds:9.4g}\n" for order, run in runs.items())
    text += f"  {'ideal: everything overlaps':36}{next(iter(runs.values())).ideal:9.4g}\n"
    shown = {name: {row: boxes for row, boxes in found.items() if boxes} for name, found in rows.items()}
    return text, {"orders": workers_svg(shown, f"{title}: two steps by the order of gradient sums, planned")}


def served(s: Service, cluster: str, title: str) -> tuple[str, dict[str, str]]:
    """(text, picture) of two planned steps of a worker, in each order of its messages."""
    from fivefold.observe.timelines import end_of, rows_of, workers_svg, workers_text
    from fivefold.schedules.priority import ORDERS
    from fivefold_plan.time.servers import simulation, step

    order = s.servers.order
    ways = {name: replace(s, servers=replace(s.servers, order=order._replace(name=name))) for name in ORDERS}
    runs = {order: simulation(one) for order, one in ways.items()}
    # from the end of the backward before the last two steps
    rows = {order: rows_of(run.events, run.ends[-3], run.ends[-1]) for order, run in runs.items()}
    seconds, text = max(map(end_of, rows.values())), "\n"
    for order, one in ways.items():
        text += f"planned on {cluster}, sync.order = {order}: {step(one).seconds:.4g} s per step; two steps\n"
        text += workers_text(rows[order], options.columns(40, 160, 16), seconds)
    text += "A forward, B backward, > push, < pull\n"
    named = {f"sync.order = {order}": found for order, found in rows.items()}
    return text, {"workers": workers_svg(named, f"{title}: two steps of a worker, planned")}


def first_sequence(recipe: Recipe, layout: Layout) -> Tiling | None:
    """The documents of the run's first sequence, where they decide who has which tokens and are known."""
    from fivefold.kernels.tiling import Tiling
    from fivefold.sharding.sequence import deals
    from fivefold_plan.setting import documents_of

    documents = documents_of(recipe) if deals(layout) else None
    return Tiling(documents.sample.tiling.first_BT[:1]) if documents and documents.sample else None


def context(recipe: Recipe, layout: Layout, title: str, tiling: Tiling | None) -> tuple[str, dict[str, str]]:
    """(text, picture) of who computes which queries and keys, where ranks have some of the queries."""
    from fivefold.models.card import card_of
    from fivefold.observe import layout_picture

    causal = card_of(recipe.model).causal
    found = layout_picture.divisions(layout, causal, tiling)
    if not found:
        return "", {}
    chunks = len(found["zig-zag"])
    seen, text = layout_picture.seen_pairs(chunks, causal, tiling), "\n"
    for name, owners in found.items():
        shares = ", ".join(f"{part:.0%}" for part in layout_picture.work_shares(owners, seen))
        text += f"attention of a sequence, share of each rank, {name}: {shares}\n"
    if chunks > layout_picture.MOST_CHUNKS:
        return text, {}
    words = f"{title}: attention of a sequence on {layout.cp} ranks"
    return text, {"context": layout_picture.context_svg(found, seen, words)}


def moving(recipe: Recipe, layout: Layout, title: str) -> str:
    """The page that steps through what ranks do. Raises UserError: the layout has nothing that moves."""
    from fivefold.models.card import card_of
    from fivefold.observe import player
    from fivefold.recipe import microbatches_per_step
    from fivefold.schedules.pipeline import simulate
    from fivefold.sharding.units import keepings

    card, found = card_of(recipe.model), list[player.Player]()
    if layout.pp > 1:
        most = microbatches_per_step(recipe)
        schedule = layout.pipeline(min(MOST_MOVING, layout.shown(most)))
        found.append(player.pipeline(simulate(schedule), schedule.rank_of, layout.schedule, most))
    if layout.zero == 3 and layout.shards > 1:
        found.append(player.zero(keepings(card, layout, [0])[0].units, layout.shards))
    if layout.cp > 1 and layout.cp_method == "ring":
        found.append(player.ring(layout.cp, card.causal))
    if not found:
        raise UserError(
            "--html: nothing moves in this layout; use one with pp > 1, zero = 3 of several ranks, or a ring (cp > 1)"
        )
    return player.page(title, "Step by step", found)


def pipeline(recipe: Recipe, layout: Layout, color: bool) -> tuple[str, dict[str, str]]:
    """(text, picture) of the simulated schedule; neither without a pipeline. Forward takes 1, backward 2, transfers 0.
    Of many microbatches, only some are simulated: further ones take as long each, and no rank waits for them."""
    from fivefold.observe.timelines import pipeline_svg, pipeline_text
    from fivefold.recipe import microbatches_per_step
    from fivefold.schedules.pipeline import simulate

    if layout.pp == 1:
        return "", {}
    title, most = f"{layout.schedule}, simulated", microbatches_per_step(recipe)
    few = layout.shown(most)
    timeline = simulate(layout.pipeline(few))
    waits = timeline.bubble * timeline.makespan
    idle = waits / (waits + (timeline.makespan - waits) * most / few)
    text = f"\nschedule {layout.schedule}: {idle:.1%} idle, if backward takes twice as long as forward\n"
    if few < most:
        text += f"{few} of {most} microbatches are drawn: {timeline.bubble:.1%} idle in these, {idle:.1%} in the step\n"
        title += f", {few} of {most} microbatches (whole step: {idle:.1%} idle)"
    text += pipeline_text(timeline, options.columns(40, 160, 24), color)
    return text, {"schedule": pipeline_svg(timeline, title, unit="forward")}
