"""The planner's commands, those of one subject in a file."""

from fivefold_plan.commands import bench, catalogs, draw, lessons, plan

COMMANDS = {
    "plan": plan.plan,
    "plan search": plan.search,
    "plan terms": lessons.terms,
    "plan trace": plan.trace,
    "plan calibrate": bench.calibrate,
    "compare": lessons.compare,
    "draw": draw.draw,
    "collectives": catalogs.collectives,
    "clusters": catalogs.clusters,
    "optimizers": catalogs.optimizers,
    "bench": bench.bench,
}
