"""`fivefold plan search RECIPE --cluster h100:64`: the fastest layouts that fit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from fivefold.cli import plan as shared
from fivefold.cli.options import JsonOption, RecipeArgument, SetOption, option, print_json, require_writable
from fivefold.errors import UserError
from fivefold.precision import PRECISIONS

if TYPE_CHECKING:
    from fivefold.plan.advice.budget import Questions
    from fivefold.plan.cluster.devices import Cluster
    from fivefold.plan.search.search import Found
    from fivefold.plan.setting import Software
    from fivefold.recipe import Recipe

EXAMPLES = [
    "fivefold plan search llama-7b --cluster a100:64 --top 5 --save best.toml",
    "fivefold plan search llama-7b --cluster h100:64 --pictures --html plan.html",
    "fivefold plan search llama-7b --cluster h100:64 --tokens 1.4e12 --deadline 30d --price 2.5",
    "fivefold plan search quickstart --cluster local:2",
    "fivefold plan search mixtral-8x7b --cluster h100:64 --expert-load 1.3",
]
GROUPS = shared.GROUPS


def search(
    recipe: RecipeArgument,
    set_: SetOption = None,
    cluster: shared.ClusterOption = "h100",
    top: Annotated[int, option("N", "Number of layouts to list.", min=1, max=1000)] = 10,
    precision: Annotated[
        str | None, option("MODES", "Precision modes to consider, such as bf16,fp8. [default: the recipe's]")
    ] = None,
    params: shared.ParamsOption = None,
    expert_load: shared.ExpertLoadOption = None,
    document_tokens: shared.DocumentTokensOption = None,
    tokens: shared.TokensOption = None,
    deadline: shared.DeadlineOption = None,
    price: shared.PriceOption = None,
    noise_scale: shared.NoiseOption = None,
    explain: shared.ExplainOption = False,
    save: shared.SaveOption = None,
    pictures: shared.PicturesOption = False,
    html: shared.HtmlOption = None,
    json: JsonOption = False,
) -> None:
    """List the fastest layouts of a recipe that fit on a cluster.

    The recipe's own layout and microbatch size are ignored.
    """
    from fivefold.plan.search.search import apply, frontier
    from fivefold.plan.search.search import search as found_by

    for name, path in (("--save", save), ("--html", html)):
        require_writable(name, path)
    wanted = shared.Wanted(pictures, html, json)
    typed = shared.Typed(recipe, set_ or [], cluster, expert_load, document_tokens)
    loaded, machine, software = shared.read(typed, "dp=1", params, search=True)
    asked = shared.questions(loaded, tokens, deadline, price, noise_scale)
    modes = tuple(part.strip() for part in precision.split(",")) if precision is not None else ()
    found = found_by(loaded, machine, top, software, modes)
    if not found.plans and (save is not None or not json):
        raise UserError(f"{recipe} on {machine.name}:{machine.devices}: {found.nothing}")
    answers = _answers(asked, found, loaded, machine, software) if asked and found.plans else {}
    if found.plans:
        shared.save_plan(save, loaded, found.plans[0])
    if json:
        print_json(found.as_json() | answers)
    else:
        lines = [*_table(recipe, found, modes), *shared.budget_lines(answers)]
        if explain:
            from fivefold.plan.advice.explain import explain as every_term

            lines += ["", *shared.summary(recipe, found.plans[0]), "", *every_term(found.plans[0])]
        print("\n".join(lines))
    if found.plans:
        shared.draw_plan(found.plans[0], wanted, apply(loaded, found.plans[0]), typed, frontier(found))


def _answers(
    asked: Questions, found: Found, recipe: Recipe, machine: Cluster, software: Software
) -> dict[str, Any]:
    """The answers for the best plan, and the fewest devices whose best layout meets the deadline."""
    from fivefold.plan.advice.budget import answer
    from fivefold.plan.search.search import fewest_devices
    from fivefold.sharding.layout import to_text

    answers = answer(found.plans[0], asked)
    if asked.deadline:
        best = fewest_devices(recipe, machine, asked, answers["devices_for_deadline"], software)
        answers["searched_devices"] = best.layout.ranks if best else None
        answers["searched"] = "no number of whole nodes tried meets the deadline"
        if best:
            days = asked.tokens / best.tokens_per_s / 86400
            answers["searched"] = (
                f"searched: {best.layout.ranks} devices finish in {days:.4g} days with {to_text(best.layout)}"
            )
    return {"budget": answers}


def _table(name: str, found: Found, modes: tuple[str, ...]) -> list[str]:
    """The plans, best first, with the reason why each is slower. modes: those asked for, if any."""
    from fivefold.sharding.layout import to_text

    first = found.plans[0]
    where = f"{first.setting.cluster.name}:{first.layout.ranks}"
    lines = [f"without offload {found.nothing}", ""] if found.nothing else []
    lines += [
        f"{name} on {where}: the fastest of {found.considered} layouts, predicted",
        f"  {'step s':>9} {'MFU %':>6} {'tokens/s':>11} {'GiB':>6}  microbatches     layout",
    ]
    for plan, why in zip(found.plans, found.reasons, strict=True):
        s = plan.setting
        lines.append(
            f"  {plan.step.seconds:9.4g} {100 * plan.mfu:6.1f} {plan.tokens_per_s:11,.0f} "
            f"{plan.peak_bytes / 2**30:6.3g}  {s.microbatches:4} x {s.sizes.B:<3} {s.mode}  {to_text(plan.layout)}"
            + (f"  ({why})" if why else "")
        )
    reasons = ", ".join(f"{count} {reason}" for reason, count in found.rejected.items())
    room = f"usable memory {first.limit / 2**30:.1f} GiB per device"
    lines += [f"  other layouts: {reasons or 'none'}; {room}", f"  {shared.accuracy(first)}"]
    if first.attention:
        lines.append(f"  attention of the first: {first.attention}")
    for mode in PRECISIONS.values():
        if mode.kernel and mode.products in first.setting.cluster.device.peak and mode.name not in modes:
            names = f"{mode.working},{mode.name}"
            lines.append(f"  not considered: {mode.name}, which the device supports (--precision {names})")
    return [*lines, "  bottlenecks of the first:", *(f"    {text}" for text in found.bottlenecks or ["none"])]
