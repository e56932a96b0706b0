"""`fivefold plan RECIPE --cluster h100:64`: predicts memory, time and communication of a layout."""

from __future__ import annotations

from fivefold.cli import plan_shared as shared
from fivefold.cli.options import (
    JsonOption,
    LayoutOption,
    RecipeArgument,
    SetOption,
    print_json,
    require_writable,
)
from fivefold.cli.plan_pictures import Wanted, draw_plan

EXAMPLES = [
    "fivefold plan llama-7b --cluster h100:64 --layout dp=64,zero=1 --set train.global_batch_size=1024",
    "fivefold plan my.toml --cluster lab.toml:16 --explain",
    "fivefold plan gpt2-124m --cluster h100:8 --layout dp=8 --html plan.html",
    "fivefold plan llama-7b --cluster h100:64 --tokens 1.4e12 --deadline 30d --price 2.5",
]
GROUPS = shared.GROUPS


def plan(
    recipe: RecipeArgument,
    set_: SetOption = None,
    layout: LayoutOption = None,
    cluster: shared.ClusterOption = "h100",
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
    """Predict memory, step time and communication of a recipe on a cluster, before anything runs.

    See also `plan search` for the fastest layouts, `plan terms` for the terms of papers and courses, `plan trace` for
    exact figures, and `plan calibrate`.
    """
    from fivefold.plan.advice.questions import answer
    from fivefold.plan.predict import predict

    for option, path in (("--save", save), ("--html", html)):
        require_writable(option, path)
    wanted = Wanted(pictures, html, json)
    typed = shared.Typed(recipe, set_ or [], cluster, expert_load, document_tokens)
    loaded, machine, software = shared.read(typed, layout, params)
    asked = shared.questions(loaded, tokens, deadline, price, noise_scale)
    result = predict(loaded, machine, software)
    answers = {"budget": answer(result, asked)} if asked else {}
    shared.save(save, loaded, result)
    if json:
        terms = {"terms": dict(result.step.terms)} if explain else {}
        print_json(result.as_json() | terms | answers)
    else:
        from fivefold.plan.advice.explain import explain as every_term

        lines = [*shared.summary(recipe, result), f"  {shared.accuracy(result)}; `plan trace` is exact"]
        lines += ["", *every_term(result)] if explain else []
        print("\n".join([*lines, *shared.budget_lines(answers)]))
    draw_plan(result, wanted, loaded, typed)
