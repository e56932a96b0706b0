"""Draws the pictures of docs with the program's own drawing functions.

python docs/make_pictures.py
python docs/make_pictures.py runs/quickstart-1    # README's picture of a report, from this run: needs Chromium
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import loss_pictures
import terminal_picture
from loss_pictures import text

from fivefold.observe import layout_picture, memory_picture, number_formats, optimizer_paths, worker_picture
from fivefold.observe.report import write_report
from fivefold.optim import OPTIMIZERS
from fivefold.optim.surfaces import SURFACES, tuned
from fivefold.plan.clusters import parse
from fivefold.plan.compare import compare
from fivefold.plan.frontier import as_rows, frontier
from fivefold.plan.offload import units_of
from fivefold.plan.pages import criteria_svg
from fivefold.plan.pages import svg as plan_svg
from fivefold.plan.pages.sweep import curve_picture, iso_flop_picture, length_picture
from fivefold.plan.pictures import pictures
from fivefold.plan.predict import predict
from fivefold.plan.search import search
from fivefold.plan.software import PAPER
from fivefold.plan.stage_costs import stage_costs
from fivefold.plan.sweep_results import results as results_of
from fivefold.plan.timeline import timeline
from fivefold.precision.histogram import from_json as histogram_of
from fivefold.recipe import load, resolve
from fivefold.recipe.sweep import Row, Sweep
from fivefold.schedules import collectives
from fivefold.schedules.collectives import draw
from fivefold.schedules.offload import WAYS, busy
from fivefold.schedules.offload import simulate as simulate_offload
from fivefold.schedules.overlap import from_json
from fivefold.schedules.overlap_draw import to_svg as timelines_svg
from fivefold.schedules.pipeline import SCHEDULES, Costs, build, simulate, to_svg
from fivefold.spread.layout import Layout
from fivefold.spread.parts import token_spans
from fivefold.trace.depth import timelines as timelines_of_memory
from fivefold.trace.formulas import Shape, rows

FOLDER = Path(__file__).with_name("parallelism") / "pictures"
PLAN_FOLDER = Path(__file__).with_name("pictures")
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
COLORS = ("#1f5a9e", "#2c7a5a", "#b5651d", "#7b4fa3")


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
    (FOLDER / "context.svg").write_text(context(4), encoding="utf-8")
    for name, (title, shape) in COLLECTIVES.items():
        picture = draw.to_svg(collectives.build("all_reduce", name, shape), title)
        (PLAN_FOLDER / f"collective_{name}.svg").write_text(picture, encoding="utf-8")
    for name, picture in workers().items():
        (PLAN_FOLDER / f"server_{name}.svg").write_text(picture, encoding="utf-8")
    for name, picture in timelines().items():
        (PLAN_FOLDER / f"timeline_{name}.svg").write_text(picture, encoding="utf-8")
    (PLAN_FOLDER / "offload.svg").write_text(offloads(), encoding="utf-8")
    found = json.loads((RESULTS / "histogram.json").read_text())
    picture = number_formats.histogram_svg(
        histogram_of(found["kinds"]), f"quickstart, step {found['step']}: numbers by exponent"
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
    (PLAN_FOLDER / "first_run.svg").write_text(terminal_picture.first_run(), encoding="utf-8")
    for name, picture in lectures().items():
        (PLAN_FOLDER / f"lecture_{name}.svg").write_text(picture, encoding="utf-8")


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


def lectures() -> dict[str, str]:
    """States under ZeRO (arXiv 1910.02054, figure 1), and activations of a block (arXiv 2205.05198, figure 7)."""
    psi, ranks = 7.5e9, 64
    kinds = {
        "weights": PAPER.working,
        "gradients": PAPER.gradient,
        "masters, moments": PAPER.master + PAPER.moments,
    }
    first = {"weights": 3, "gradients": 2, "masters, moments": 1}  # the stage that shards them
    stages = {
        f"ZeRO {stage}" if stage else "data parallel": {
            kind: size * psi / (ranks if stage >= first[kind] else 1) / 1e9 for kind, size in kinds.items()
        }
        for stage in range(4)
    }
    saved = {row.name: row for row in rows(Shape(2048, 1, 12288, 96, 8))}
    names = ("a block (1)", "selective", "tp (2)", "tp, sp (4)", "tp, sp, selective (6)", "full")
    blocks = {
        f"{name.partition(' (')[0]}: {saved[name].formula}": {"": saved[name].bytes / 1e6} for name in names
    }
    return {
        "zero": bars("States of 7.5 billion parameters on 64 devices, per device", stages, "GB", 130),
        "activations": bars("Activations of a block of GPT-3, 16 bits, t = 8", blocks, "MB", 340),
    }


def bars(title: str, rows: dict[str, dict[str, float]], unit: str, left: int) -> str:
    """A bar for each row, of the values of its kinds, with their sum."""
    longest = max(sum(row.values()) for row in rows.values())
    kinds = list(next(iter(rows.values())))
    width, top, high = 760, 66 if len(kinds) > 1 else 44, 30
    parts = [text(20, 24, title, "600")]
    for number, kind in enumerate(kinds if len(kinds) > 1 else []):
        parts.append(f'<rect x="{20 + 170 * number}" y="38" width="12" height="12" fill="{COLORS[number]}"/>')
        parts.append(text(38 + 170 * number, 49, kind))
    for line, (name, row) in enumerate(rows.items()):
        x, y = float(left), top + line * high
        parts.append(text(20, y + 15, name))
        for color, value in zip(COLORS, row.values(), strict=False):
            wide = value / longest * (width - left - 90)
            parts.append(f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="20" fill="{color}"/>')
            x += wide
        parts.append(text(x + 8, y + 15, f"{sum(row.values()):,.4g} {unit}"))
    height = top + len(rows) * high + 10
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
        f'<rect width="100%" height="100%" fill="#fdfcf8"/>{"".join(parts)}</svg>\n'
    )


def compared() -> dict[str, str]:
    """The three criteria of each form of parallelism on 8 H100, and when its messages hide."""
    recipe = load("llama-7b", ["train.microbatch_size=1"], "dp=1")
    rows, title = compare(recipe, parse("h100:8"), 8), "llama-7b on h100:8"
    return {"criteria": criteria_svg.criteria(rows, title), "overlap": criteria_svg.overlap(rows, title)}


def offloads() -> str:
    """The ways to update on the host, with a 13B model's blocks, by their planned seconds on an H100."""
    sets = [
        "model.layers=40", "model.dim=5120", "model.heads=40", "model.kv_heads=40", "model.ffn_dim=13824",
        "model.vocab_size=32000", "model.seq_len=2048", "train.global_batch_size=8", "train.microbatch_size=8",
        "layout.recompute=full", "layout.offload=states:host", "precision.mode=bf16",
    ]  # fmt: skip
    planned = predict(load("quickstart", sets, "dp=1"), parse("h100"))
    units = units_of(planned.setting, stage_costs(planned.setting)[0], 8)
    lines = {name: simulate_offload(units, way) for name, way in WAYS.items()}
    drawn = [(f"{name}: device busy {busy(line):.0%}", line) for name, line in lines.items()]
    return timelines_svg(drawn, "Updates on the host: 13B parameters in 8 units, one H100 with PCIe 4.0")


def memory() -> str:
    """Memory over a step of a small model on a rank of ZeRO 3, traced."""
    recipe = resolve(load("quickstart", ["precision.mode=bf16"], "dp=2,zero=3"), vocab_size=4096)
    return memory_picture.to_svg(
        timelines_of_memory(recipe), "quickstart, dp=2,zero=3: tensors of rank 0, traced"
    )


def workers() -> dict[str, str]:
    """Runs with parameter servers, as benchmarks/parameter_server.py measured them."""
    found = {
        name: json.loads((RESULTS / f"parameter_server{name}.json").read_text())
        for name in ("", "_stragglers")
    }
    orders = {
        f"sync.order = {name}": worker_picture.one_at_a_time(worker_picture.exchange(trace))
        for name, trace in found[""]["traces"]
    }
    lagging = {name: worker_picture.shares(lines) for name, lines in found["_stragglers"]["traces"]}
    return {
        "order": worker_picture.to_svg(
            orders, "Two steps of a worker: units of the model, and their messages"
        ),
        "stragglers": worker_picture.to_svg(
            lagging, "Three workers, the last one slow: shares with their step"
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
        "memory": plan_svg.memory(found.plan, title),
        "timeline": to_svg(found.timeline, "8 of 32 microbatches", width=760),
        "roofline": plan_svg.roofline(found.roofline, found.plan.step.seconds, title),
        "frontier": plan_svg.frontier(
            fastest, found.plan.limit, f"{recipe} on 16 H100: the fastest layout for each memory"
        ),
    }


def timelines() -> dict[str, str]:
    """Steps of two ranks, measured and planned, and planned ones of many devices."""
    runs, found = json.loads(MEASURED.read_text(encoding="utf-8"))["runs"], {}
    for name, (title, layouts) in TIMELINES.items():
        both = [
            (f"{x}, {kind}", from_json(runs[x][kind])) for x in layouts for kind in ("measured", "planned")
        ]
        found[name] = timelines_svg(both, title)
    planned = []
    for layout in DEVICES:
        recipe = load("llama-7b", ["train.global_batch_size=16", "train.microbatch_size=2"], layout)
        drawn = timeline(predict(recipe, parse("h100:8")).setting)
        assert drawn is not None
        planned.append((layout, drawn))
    return found | {"h100": timelines_svg(planned, "llama-7b on 8 H100, planned")}


def schedules(ranks: int, microbatches: int) -> str:
    """All schedules one under the other, on one scale. A rank's stages together take the same time in each: F 1,
    B 2 (I 1 and W 1)."""
    timelines = []
    for name, stages in STAGES.items():
        part = 1 / stages
        timelines.append((name, simulate(build(name, ranks, microbatches, stages), costs(part))))
    longest = max(timeline.makespan for _, timeline in timelines)
    pictures = [to_svg(timeline, name, seconds=longest) for name, timeline in timelines]
    return stack(pictures)


def costs(part: float) -> Costs:
    return Costs(forward=part, input=part, weight=part)


def stack(pictures: list[str]) -> str:
    """SVG pictures of equal width, one under the other."""
    top, parts, width = 0.0, [], 0.0
    for picture in pictures:
        head = picture[: picture.index(">")]
        wide, high = (float(head.split(f'{key}="')[1].split('"')[0]) for key in ("width", "height"))
        parts.append(picture.replace("<svg", f'<svg y="{top}"', 1))
        top, width = top + high, max(width, wide)
    size = f'width="{width:g}" height="{top:g}" viewBox="0 0 {width:g} {top:g}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n' + "\n".join(parts) + "\n</svg>\n"


def context(ranks: int) -> str:
    """Queries down, keys across, a square for each pair of chunks that attention computes, coloured by the rank that
    computes it: neighbouring parts on the left, zig-zag on the right."""
    cell, chunks = 22, 2 * ranks
    zigzag = Layout(cp=ranks)
    owner = {a: rank for rank in range(ranks) for a, _ in token_spans(zigzag, chunks, rank)}
    plans = [("neighbouring parts", [chunk // 2 for chunk in range(chunks)])]
    plans.append(("zig-zag", [owner[chunk] for chunk in range(chunks)]))
    parts = []
    for column, (title, ranks_of) in enumerate(plans):
        left, top = 20 + column * (chunks * cell + 130), 50
        parts.append(text(left, 20, title, "600"))
        work = [0.0] * ranks
        for q in range(chunks):
            for k in range(q + 1):
                half = 0.5 if k == q else 1.0  # on the diagonal half of the pairs are seen
                work[ranks_of[q]] += half
                x, y, color = left + k * cell, top + q * cell, COLORS[ranks_of[q] % len(COLORS)]
                parts.append(
                    f'<rect x="{x}" y="{y}" width="{cell - 2}" height="{cell - 2}" fill="{color}" opacity="{half}"/>'
                )
        for rank, amount in enumerate(work):
            y = top + 20 + rank * 22
            x = left + chunks * cell + 8
            parts.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{COLORS[rank]}"/>')
            parts.append(text(x + 18, y, f"rank {rank}: {amount / sum(work):.0%}"))
    width, height = 2 * (chunks * cell + 130) + 20, 60 + chunks * cell
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
        f'<rect width="100%" height="100%" fill="#fdfcf8"/>{"".join(parts)}'
        f"{text(20, height - 4 - chunks * cell - 20, 'queries down, keys across; work of each rank')}</svg>\n"
    )


if __name__ == "__main__":
    main()
