"""Draws the pictures of docs with the program's own drawing functions.

python docs/make_pictures.py
python docs/make_pictures.py runs/quickstart-1    # README's picture of a report, from this run: needs Chromium
"""

from __future__ import annotations

import contextlib
import io
import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import house_picture
import loss_pictures
import terminal_picture

from fivefold.cli.main import main as fivefold
from fivefold.draw.canvas import stacked
from fivefold.observe import (
    collective_picture,
    layout_picture,
    memory_picture,
    number_formats,
    timelines,
)
from fivefold.observe.number_formats import from_json as histogram_of
from fivefold.observe.report import write_report
from fivefold.observe.timelines import pipeline_svg, step_svg, utilisation_svg
from fivefold.optim import OPTIMIZERS
from fivefold.recipe import load, resolve
from fivefold.recipe.schema import PrecisionSection
from fivefold.recipe.sweep import Row, Sweep
from fivefold.schedules import collectives
from fivefold.schedules.pipeline import SCHEDULES, Costs, build, simulate
from fivefold.schedules.timelines import StepTimeline
from fivefold.sharding.layout import Layout
from fivefold_plan.advice.scaling import results as results_of
from fivefold_plan.cluster.clusters import parse
from fivefold_plan.lessons import optimizer_paths
from fivefold_plan.lessons import pictures as lesson_pictures
from fivefold_plan.lessons.compare import compare
from fivefold_plan.lessons.optimizer_paths import SURFACES, tuned
from fivefold_plan.pages.pictures import as_rows, frontier_svg, memory_svg, pictures, roofline_svg
from fivefold_plan.pages.sweep import curve_picture, iso_flop_picture, length_picture
from fivefold_plan.predict import predict
from fivefold_plan.search.search import frontier, search
from fivefold_plan.time.timeline import timeline
from fivefold_plan.trace.depth import timelines as timelines_of_memory

FOLDER = Path(__file__).absolute().with_name("parallelism") / "pictures"
PLAN_FOLDER = Path(__file__).absolute().with_name("pictures")
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
PLAN = ("llama-7b", "pp=4,dp=4,zero=1")  # on 16 H100, drawn in planner.md
LAYOUTS = {
    "hybrid": ("quickstart", "dp_replicate=2,dp_shard=2,zero=2"),
    "tensor": ("quickstart", "dp=2,tp=2,sp=true"),
    "expert": ("moe-tiny", "dp=4,ep=2"),
    "combined": ("quickstart", "pp=2,cp=2,tp=2"),
}
COLLECTIVES = {
    "ring": ("Ring all-reduce on 4 ranks", collectives.shape_of(4)),
    "rabenseifner": ("Rabenseifner's all-reduce on 8 ranks", collectives.shape_of(8)),
    "hierarchical": ("Hierarchical all-reduce on 2 nodes of 2 ranks", collectives.shape_of(4, 2)),
}
MEASURED = Path(__file__).parents[1] / "benchmarks" / "results" / "timelines.json"
TIMELINES = {
    "replicas": ("Two replicas, with buckets and without", ("dp=2,bucket_mib=4", "dp=2,bucket_mib=0")),
    "zero": ("ZeRO 1, 2 and 3 on two ranks", ("dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3")),
    "model": ("Context and tensor parallelism on two ranks", ("cp=2", "tp=2", "tp=2,sp=true")),
}
DEVICES = ("dp=8", "dp=8,bucket_mib=0", "dp=8,zero=3", "dp=4,tp=2,zero=3")  # drawn on 8 H100
STAGES = {name: made.stages[0] for name, made in SCHEDULES.items()}  # per rank
OFFLOADED = (
    "dp=1,offload=states:host,recompute=full --set train.global_batch_size=8 --set train.microbatch_size=4"
)
COMMANDS = {
    PLAN_FOLDER / "lecture_zero.svg": (
        "plan terms llama2-7b --layout dp=64 --psi 7.5e9 --as paper --only states --svg states.svg",
        "states.svg",
    ),
    PLAN_FOLDER / "lecture_activations.svg": (
        "plan terms gpt3-175b --layout tp=8 --as paper --only activations --svg activations.svg",
        "activations.svg",
    ),
    FOLDER / "context.svg": ("draw llama2-7b --layout cp=4 --out .", "context.svg"),
    PLAN_FOLDER / "bits.svg": ("formats --svg bits.svg", "bits.svg"),
    PLAN_FOLDER / "offload.svg": (
        f"draw llama2-13b --cluster h100:1 --layout {OFFLOADED} --out .",
        "offload.svg",
    ),
    PLAN_FOLDER / "sum_orders.svg": (
        "draw gpt2-124m --cluster h100:8x1 --layout dp=8 --set train.global_batch_size=8 --out .",
        "orders.svg",
    ),
}
"""Pictures that commands of the lectures' pages draw: (command, the file that it writes)."""


def main() -> None:
    if sys.argv[1:]:
        report(Path(sys.argv[1]), PLAN_FOLDER / "report.png")
        return
    paths = {name: {one: tuned(one, surface) for one in OPTIMIZERS} for name, surface in SURFACES.items()}
    (PLAN_FOLDER / "optimizers.svg").write_text(optimizer_paths.to_svg(paths), encoding="utf-8")
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, (recipe, layout) in LAYOUTS.items():
        loaded = resolve(load(recipe, [], layout), vocab_size=4096)
        picture = layout_picture.to_svg(loaded, Layout.from_recipe(loaded.layout), f"{recipe}: {layout}")
        (FOLDER / f"{name}.svg").write_text(picture, encoding="utf-8")
    (FOLDER / "schedules.svg").write_text(schedules(4, 8), encoding="utf-8")
    for name, (title, shape) in COLLECTIVES.items():
        picture = collective_picture.to_svg(collectives.build("all_reduce", name, shape), title)
        (PLAN_FOLDER / f"collective_{name}.svg").write_text(picture, encoding="utf-8")
    for name, picture in workers().items():
        (PLAN_FOLDER / f"server_{name}.svg").write_text(picture, encoding="utf-8")
    for name, picture in offloaded().items():
        (PLAN_FOLDER / f"offload_{name}.svg").write_text(picture, encoding="utf-8")
    for name, picture in step_timelines().items():
        (PLAN_FOLDER / f"timeline_{name}.svg").write_text(picture, encoding="utf-8")
    found = json.loads((RESULTS / "histogram.json").read_text())
    picture = number_formats.histogram_svg(
        histogram_of(found["kinds"]), f"quickstart, step {found['step']}: numbers by exponent, measured"
    )
    (PLAN_FOLDER / "formats.svg").write_text(picture, encoding="utf-8")
    (PLAN_FOLDER / "memory_step.svg").write_text(memory(), encoding="utf-8")
    (PLAN_FOLDER / "precision.svg").write_text(loss_pictures.precision(), encoding="utf-8")
    (PLAN_FOLDER / "optimizer_losses.svg").write_text(loss_pictures.optimizers(), encoding="utf-8")
    for name, picture in scaling().items():
        (PLAN_FOLDER / f"scaling_{name}.svg").write_text(picture, encoding="utf-8")
    for name, picture in compared().items():
        (PLAN_FOLDER / f"{name}.svg").write_text(picture, encoding="utf-8")
    for name, picture in plans().items():
        (PLAN_FOLDER / f"plan_{name}.svg").write_text(picture, encoding="utf-8")
    (PLAN_FOLDER / "house.svg").write_text(house_picture.house(), encoding="utf-8")
    (PLAN_FOLDER / "first_run.svg").write_text(terminal_picture.first_run(), encoding="utf-8")
    (PLAN_FOLDER / "talk.svg").write_text(terminal_picture.talk(), encoding="utf-8")
    for name, picture in examples().items():
        (PLAN_FOLDER / f"{name}.svg").write_text(picture, encoding="utf-8")
    for path, (command, drawn) in COMMANDS.items():
        by_command(command, drawn, path)


def report(run: Path, picture: Path) -> None:
    """The beginning of the report of a run, as a browser shows it."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    browser = next((path for path in map(shutil.which, names) if path), None)
    if browser is None:
        sys.exit(f"{picture.name} needs one of {', '.join(names)}")
    page = write_report(run).absolute()
    with TemporaryDirectory() as profile:
        flags = ["--headless", "--no-sandbox", "--hide-scrollbars", "--window-size=1100,1350"]
        options = [*flags, f"--user-data-dir={profile}", f"--screenshot={picture}", page.as_uri()]
        subprocess.run([browser, *options], check=True, capture_output=True, timeout=60)


def by_command(command: str, drawn: str, path: Path) -> None:
    """Runs a command of `COMMANDS` in a folder of its own, and keeps the picture `drawn` that it writes there."""
    with TemporaryDirectory() as folder, contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()):
        try:
            fivefold(shlex.split(command))
        except SystemExit as stop:
            if stop.code:
                raise
        path.write_text(Path(drawn).read_text(encoding="utf-8"), encoding="utf-8")


def compared() -> dict[str, str]:
    """The three criteria of each form of parallelism on 8 H100, and when its messages hide."""
    recipe = load("llama-7b", ["train.microbatch_size=1"], "dp=1")
    rows, title = compare(recipe, parse("h100:8"), 8), "llama-7b on h100:8"
    return {
        "criteria": lesson_pictures.criteria(rows, title),
        "overlap": lesson_pictures.overlap(rows, title),
    }


def examples() -> dict[str, str]:
    """What programs of examples/pictures draw."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "pictures"))
    import gpu_kernels
    import precision_step
    import years

    flows = {m: precision_step.parts(PrecisionSection.model_validate({"mode": m})) for m in ("bf16", "fp8")}
    steps = {f"step_{mode}": precision_step.to_svg(flow, f"A step in {mode}") for mode, flow in flows.items()}
    return {"gpu_kernels": gpu_kernels.to_svg(), "years": years.to_svg(), **steps}


def memory() -> str:
    """Memory over a step of a small model on a rank of ZeRO 3, traced."""
    recipe = resolve(load("quickstart", ["precision.mode=bf16"], "dp=2,zero=3"), vocab_size=4096)
    return memory_picture.to_svg(
        timelines_of_memory(recipe), "quickstart, dp=2,zero=3: tensors of rank 0, traced"
    )


def workers() -> dict[str, str]:
    """Runs with parameter servers, as benchmarks/parameter_server.py measured them."""
    sys.path.insert(0, str(RESULTS.parent / "planner"))
    from worker_rows import traced_worker

    found = {
        name: json.loads((RESULTS / f"parameter_server{name}.json").read_text())
        for name in ("", "_stragglers")
    }
    orders = {f"sync.order = {name}": traced_worker(trace) for name, trace in found[""]["traces"]}
    lagging = {name: timelines.worker_shares(lines) for name, lines in found["_stragglers"]["traces"]}
    return {
        "order": timelines.workers_svg(
            orders, "Two steps of a worker, measured: units of the model, and their messages"
        ),
        "stragglers": timelines.workers_svg(
            lagging, "Three workers, the last one slow, measured: shares with their step"
        ),
    }


def scaling() -> dict[str, str]:
    """The law of benchmarks/scaling.py with the largest run held out, and its learning rates."""
    found, drawn = json.loads((RESULTS / "scaling.json").read_text()), {}
    for name in ("law", "rates"):
        rows = [Row(r["name"], r["settings"], r["status"], figures=r) for r in found[name]["runs"]]
        drawn[name] = results_of(Sweep("quickstart", [], None, [], rows, ""), "largest")
    curves = drawn["rates"].curves
    return {
        "flops": iso_flop_picture(drawn["law"]),
        "tokens": length_picture(drawn["law"]),
        "rates": curve_picture(curves[0].key, curves),
    }


def plans() -> dict[str, str]:
    """The pictures of one plan, and the frontier of a search."""
    recipe, layout = PLAN
    loaded = load(recipe, ["train.global_batch_size=256", "train.microbatch_size=2"], layout)
    cluster, title = parse("h100:16"), f"{recipe} on 16 H100, {layout}"
    found = pictures(predict(loaded, cluster))
    assert found.timeline is not None
    fastest = as_rows(frontier(search(loaded, cluster)))
    return {
        "memory": memory_svg(found.plan, title),
        "timeline": pipeline_svg(found.timeline, "8 of 32 microbatches, planned", width=760),
        "roofline": roofline_svg(found.roofline, found.plan.step.seconds, title),
        "frontier": frontier_svg(
            fastest, found.plan.limit, f"{recipe} on 16 H100: the fastest layout for each memory"
        ),
    }


def offloaded() -> dict[str, str]:
    """A step with states and weights on disk, as benchmarks/timelines.py --offload measured it."""
    found = json.loads((RESULTS / "timeline_offload.json").read_text(encoding="utf-8"))
    step = StepTimeline.from_json(found["measured"])
    drawn, name = [("rank 0, measured", step)], f"{found['layout']}, step {step.step}"
    return {
        "timeline": step_svg(drawn, f"{name}: computing and messages"),
        "utilisation": utilisation_svg(drawn, f"{name}: utilisation over a step"),
    }


def step_timelines() -> dict[str, str]:
    """Steps of two ranks, measured and planned, and planned ones of many devices."""
    runs, found = json.loads(MEASURED.read_text(encoding="utf-8"))["runs"], {}
    for name, (title, layouts) in TIMELINES.items():
        both = [
            (f"{x}, {kind}", StepTimeline.from_json(runs[x][kind]))
            for x in layouts
            for kind in ("measured", "planned")
        ]
        found[name] = step_svg(both, title)
    planned = []
    for layout in DEVICES:
        recipe = load("llama-7b", ["train.global_batch_size=16", "train.microbatch_size=2"], layout)
        drawn = timeline(predict(recipe, parse("h100:8")).setting)
        assert drawn is not None
        planned.append((layout, drawn))
    return found | {"h100": step_svg(planned, "llama-7b on 8 H100, planned")}


def schedules(ranks: int, microbatches: int) -> str:
    """All schedules one under the other, on one scale. A rank's stages together take the same time in each: F 1,
    B 2 (I 1 and W 1)."""
    timelines = []
    for name, stages in STAGES.items():
        part = 1 / stages
        timelines.append((name, simulate(build(name, ranks, microbatches, stages), costs(part))))
    longest = max(timeline.makespan for _, timeline in timelines)
    pictures = [
        pipeline_svg(timeline, f"{name}, simulated", seconds=longest, unit="forward")
        for name, timeline in timelines
    ]
    return stacked(pictures)


def costs(part: float) -> Costs:
    return Costs(forward=part, input=part, weight=part)


if __name__ == "__main__":
    main()
