"""What commands do with a recipe: `fivefold recipes` lists the shipped ones or prints one, `fivefold check RECIPE`
validates one and its data, and summarizes the training run, `fivefold tokenize RECIPE` tokenizes its text ahead of
training."""

from __future__ import annotations

import os
import shutil
from math import inf
from pathlib import Path
from textwrap import fill, wrap
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fivefold.cli import options
from fivefold.cli.options import flag, option, print_json
from fivefold.errors import UserError

if TYPE_CHECKING:
    from fivefold.recipe import Recipe


def check(
    recipe: options.RecipeArgument,
    set_: options.SetOption = None,
    layout: options.LayoutOption = None,
    no_data: Annotated[bool, flag("Skip the data.", "--no-data")] = False,
    explain: Annotated[bool, flag("Print every field and its meaning.", "--explain")] = False,
    json: options.JsonOption = False,
) -> None:
    """Check a recipe and its data, and summarize the training run."""
    from fivefold.models.card import card_of, resolve_model
    from fivefold.recipe import entries, load
    from fivefold.recipe import explain as explained
    from fivefold.recipe.load import required
    from fivefold.recipe.rules.texts import wrong_patterns

    loaded = load(recipe, set_ or [], layout)
    entries.require(entries.chosen(loaded.observe.tracker))
    if loaded.train.init_from:
        required(loaded.train.init_from)
    if loaded.model.freeze or loaded.optim.groups:
        model = resolve_model(loaded.model, vocab_size=loaded.model.vocab_size or 2)
        if wrong := wrong_patterns(loaded, card_of(model).parameters):
            raise UserError(wrong)
    result = summary(loaded)
    result["memory"] = _memory(loaded)
    result["environment"] = _machine(result)
    from fivefold.data.facts import WARNING, without_data
    from fivefold.data.facts import check as check_data

    if no_data:
        result["warnings"] += without_data(loaded)
    else:
        try:
            facts = check_data(loaded)
            result["data"] = [fact for fact in facts if not fact.startswith(WARNING)]
            result["warnings"] += [fact.removeprefix(WARNING) for fact in facts if fact.startswith(WARNING)]
        except UserError as error:
            raise UserError(f"{error}\nThe recipe itself is valid; --no-data skips the data.") from None
    if json:
        fields = {"fields": [field._asdict() for field in explained(loaded)]} if explain else {}
        print_json({"recipe": recipe, "valid": True, **result, **fields})
        return
    print("\n".join(_summary_text(recipe, loaded, result)))
    if explain:
        print("\n".join(["", *_explain_text(loaded)]))


def summary(recipe: Recipe) -> dict[str, Any]:
    """The numbers of a recipe, as `check --json` prints them. Those that need an unknown vocabulary are None."""
    from fivefold.models.recomputation import budget_of
    from fivefold.recipe import (
        active_parameters,
        count_parameters,
        expected_vocab_size,
        flops_per_token,
        tokens_before,
        tokens_per_step,
        total_steps,
    )
    from fivefold.recipe.resolve import warnings
    from fivefold.recipe.rules.combinations import notes
    from fivefold.sharding.layout import Layout, to_text

    layout, steps, size = Layout.from_recipe(recipe.layout), total_steps(recipe), expected_vocab_size(recipe)
    total, lines = tokens_before(recipe, steps), notes(recipe)
    parameters = active = flops = recompute = None
    if size is None:
        lines.append(
            "the model's size depends on the vocabulary, which is not known yet; set model.vocab_size"
        )
    else:
        model = recipe.model.model_copy(update={"vocab_size": size})
        parameters, active, flops = count_parameters(model), active_parameters(model), flops_per_token(model)
        if budget_of(recipe.layout.recompute) is not None:  # what it comes to on this machine's CPUs
            from fivefold.train.forecast import forecast

            found = forecast().choose(recipe.model_copy(update={"model": model}))
            line = f"{found.line}, on CPUs; `fivefold plan` has GPUs"
            recompute = {"blocks": found.recompute, "predicted_peak_bytes": found.peak_bytes, "line": line}
    return {
        "arch": recipe.model.arch,
        "vocab_size": size,
        "parameters": parameters,
        "active_parameters": active,
        "steps": steps,
        "tokens_per_step": tokens_per_step(recipe),
        "total_tokens": total,
        "tokens_per_parameter": total / parameters if parameters else None,
        "flops_per_token": flops,
        "total_flops": flops * total if flops else None,
        "layout": to_text(layout),
        "ranks": layout.ranks,
        "notes": lines,
        "warnings": list(warnings(recipe)),
        "recompute": recompute,
    }


def _machine(result: dict[str, Any]) -> list[dict[str, str]]:
    """The variables that change how GPUs compute and NCCL communicates. Adds to `result` what to know of the GPUs."""
    from fivefold.host import gpus

    found = gpus.variables(os.environ)
    result["warnings"] += [setting["warning"] for setting in found if setting["warning"]]
    for note in gpus.notes():
        kind = "warnings" if note.startswith(gpus.WARNING) else "notes"
        result[kind].append(note.removeprefix(gpus.WARNING))
    return found


def _memory(recipe: Recipe) -> dict[str, Any] | None:
    """What the ranks' tensors need on CPUs, beside what this machine has; None if either is not known."""
    from fivefold.host.machine import limit
    from fivefold.observe.format import size
    from fivefold.train.forecast import forecast

    here = limit()
    try:
        each, ranks = forecast().on_cpus(recipe)
    except UserError:
        return None
    if here is None:
        return None
    every = each * ranks
    fits = (every if here.shared else each) <= here.bytes
    line = (
        f"{size(each)} of tensors per rank on CPUs, {size(every)} in all; {here.what} is {size(here.bytes)}"
    )
    line += "" if fits else ": too little"
    return {"rank_bytes": each, "here_bytes": here.bytes, "fits": fits, "line": line}


def _summary_text(name: str, recipe: Recipe, result: dict[str, Any]) -> list[str]:
    from fivefold.observe.format import short_number
    from fivefold.sharding.layout import Layout, describe

    short = {key: short_number(value) for key, value in result.items() if type(value) in (int, float)}
    model = recipe.model
    shape = f"{model.arch}, {model.layers} layers, D {model.dim}, {model.heads} heads, T {model.seq_len}"
    run = f"{result['steps']:,} steps x {result['tokens_per_step']:,} tokens = {short['total_tokens']} tokens"
    rows = [("layout", describe(Layout.from_recipe(recipe.layout)))]
    if count := recipe.servers.count:
        rows.append(("servers", f"{count} besides: {count + result['ranks']} ranks in all"))
    if result["parameters"] is None:
        rows = [("model", shape), ("run", run), *rows]
    else:
        sparse = result["active_parameters"] != result["parameters"]
        active = f", {short['active_parameters']} active per token" if sparse else ""
        rows = [
            ("model", f"{shape}, V {result['vocab_size']}: {short['parameters']} parameters{active}"),
            ("run", f"{run} ({result['tokens_per_parameter']:,.3g} per parameter)"),
            ("compute", "{flops_per_token:.3g} FLOPs per token, {total_flops:.3g} in total".format(**result)),
            *rows,
        ]
    if (memory := result["memory"]) is not None:
        rows.append(("memory", memory["line"]))
    if result["recompute"]:
        rows.append(("memory", result["recompute"]["line"]))
    rows += [
        ("data" if i == 0 else "", fact.removeprefix("data: "))
        for i, fact in enumerate(result.get("data", []))
    ]
    rows += [("variable", f"{one['name']}={one['value']}: {one['does']}") for one in result["environment"]]
    rows += [("note", note) for note in result["notes"]]
    rows += [("WARNING", warning) for warning in result["warnings"]]
    but = "" if memory is None or memory["fits"] else ", but needs more memory than this machine has"
    return [f"{name}: the recipe is valid{but}", *(f"  {label:8} {text}" for label, text in rows)]


def _explain_text(recipe: Recipe) -> list[str]:
    """Every field, those that most runs set first, then section by section. `*` marks values that differ from the
    default."""
    from fivefold.recipe import explain
    from fivefold.recipe.messages import ESSENTIAL, toml_value

    width = min(shutil.get_terminal_size().columns, 110)
    lines, title = ["Fields (* marks values that differ from the default)"], ""
    for field in explain(recipe):
        section, _, name = field.key.partition(".")
        first = field.key in ESSENTIAL
        if title != (title := "What most runs set:" if first else f"[{section}]"):
            lines += ["", title]
        value, default = ("unset" if v is None else toml_value(v) for v in (field.value, field.default))
        mark = " " if field.is_default else "*"
        was = "" if field.is_default else f"; default {default}"
        lines.append(f"{mark} {field.key if first else name} = {value}   ({field.type}{was})")
        lines += wrap(field.doc, width, initial_indent="      ", subsequent_indent="      ")
    return lines


def recipes(
    name: Annotated[
        str | None, typer.Argument(help="Print this recipe's TOML as a start for your own.")
    ] = None,
    fields: Annotated[
        bool, flag("Print the ten fields that most runs set, then all others by name.", "--fields")
    ] = False,
    json: options.JsonOption = False,
) -> None:
    """List the shipped recipes by family with their parameters, or print one of them."""
    from fivefold.observe.format import short_number
    from fivefold.recipe import families, load, parameters, shipped, source
    from fivefold.recipe.load import FIRST, published

    if fields:
        if name is not None:
            raise UserError(
                f"--fields: leave {name} out; `fivefold check {name} --explain` has the values of a recipe"
            )
        return _print_fields(json)
    if name is not None:
        text = source(name)
        print_json({"name": name, "toml": text}) if json else print(text, end="")
        return
    found = shipped()
    sizes = {name: parameters(load(name)) for name in found}
    groups = {
        family: sorted(names, key=lambda name: (name != FIRST, sizes[name] or inf))
        for family, names in families().items()
    }
    if json:
        print_json({"recipes": found, "families": groups, "parameters": sizes, "published": published()})
        return
    width = max(map(len, found))
    for family, names in groups.items():
        print(family)
        for name in names:
            count = sizes[name]
            size = short_number(count) if count else "folder's" if load(name).train.init_from else ""
            print(f"  {name:{width}} {size:>8}  {found[name]}")


def _print_fields(json: bool) -> None:
    """The essential fields, the most important first, and the names of all others by section."""
    from fivefold.recipe import explain
    from fivefold.recipe.messages import ESSENTIAL, toml_value
    from fivefold.recipe.schema import Sections

    known = {field.key: field for field in explain(Sections())}
    others: dict[str, list[str]] = {}
    for key in known:
        section, _, name = key.partition(".")
        if key not in ESSENTIAL:
            others.setdefault(section, []).append(name)
    if json:
        rows = [known[key]._asdict() for key in ESSENTIAL]
        essential = [{name: row[name] for name in ("key", "default", "type", "doc")} for row in rows]
        print_json({"essential": essential, "others": others})
        return
    print(
        "The fields that most runs set, with their defaults. --layout sets [layout], such as dp=8,zero=3.\n"
    )
    for field in map(known.__getitem__, ESSENTIAL):
        default = "unset" if field.default is None else toml_value(field.default)
        sentence = field.doc.partition(". ")[0].partition(": `")[0].removesuffix(".")
        print(f"  {field.key:25} {default:9} {sentence}.")
    print(
        "\nAll others. `fivefold check RECIPE --explain` says what they mean, and so does docs/recipes.md.\n"
    )
    for section, names in others.items():
        print(fill(", ".join(names), 110, initial_indent=f"  [{section}] ", subsequent_indent="    "))


def tokenize(
    recipe: options.RecipeArgument,
    set_: options.SetOption = None,
    layout: options.LayoutOption = None,
    megatron: Annotated[
        Path | None,
        option(
            "NAME",
            "Also write NAME_train and NAME_val, .bin and .idx, which Megatron-LM reads.",
            "--megatron",
        ),
    ] = None,
    json: options.JsonOption = False,
) -> None:
    """Tokenize a recipe's text ahead of training.

    The tokens go to the cache, where `fivefold train` finds them. An interrupted command resumes where it stopped.
    """
    from fivefold.data import prepare, progress_bar
    from fivefold.data.preparation import finished, write_megatron
    from fivefold.recipe import load

    loaded = load(recipe, set_ or [], layout)
    with progress_bar() as progress:
        data = finished(prepare(loaded, progress), loaded, progress)
        info = dict(data.info)
        if megatron is not None:
            info["megatron"] = [str(path) for path in write_megatron(data, loaded, megatron)]
    if json:
        print_json(info)
        return
    for key, value in info.items():
        print(f"{key:12}  {_fact(value)}")


def _fact(value: Any) -> str:
    """A fact as text: 1,234 or yes or `train 1,234, val 56`."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {_fact(each)}" for key, each in value.items() if each != "")
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)
