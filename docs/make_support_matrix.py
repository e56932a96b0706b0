"""Writes docs/support.md: what combines with what.

    python docs/make_support_matrix.py

The rules of a recipe (`recipe/rules`) say what is refused, and why. The parameters of tests say what was compared with
one process: each combination of a test in PROOFS is a recipe, and all pairs of options in it are proven. A pair that is
both would be a mistake, and is an error here.
"""

from __future__ import annotations

import importlib
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from torch import nn

from fivefold.errors import UserError
from fivefold.models import ARCHITECTURES
from fivefold.models.custom import ModuleCard
from fivefold.optim import OPTIMIZERS
from fivefold.precision import PRECISIONS
from fivefold.recipe import Recipe, load
from fivefold.recipe.rules import contradictions
from fivefold.schedules.pipeline import splits_backward
from fivefold.sharding.layout import Layout, parse
from fivefold.step.custom import custom_model

DOCS = Path(__file__).parent
PAGE, VERIFIED, TESTS = DOCS / "support.md", DOCS / "layouts_verified.md", DOCS.parent / "tests"
BASE = [
    "model.layers=8", "model.dim=64", "model.heads=8", "model.kv_heads=8", "model.ffn_dim=128", "model.seq_len=64",
    "model.tie_embeddings=false", "data.tokenizer=bytes", "train.global_batch_size=8", "train.microbatch_size=1",
    "train.sample_every=0", "precision.mode=fp32",
]  # fmt: skip
"""Sizes that every option divides, and the precision of a test that names none."""
EXPERTS = ["model.experts=8", "model.experts_per_token=2", "model.expert_ffn_dim=128"]
SIZES: dict[str, list[str]] = dict.fromkeys(("moe", "qwen3_moe", "deepseek", "gpt_oss"), EXPERTS)
"""Of architectures that need more."""
PROVEN, ACCEPTED = "**yes**", "yes"


@dataclass(frozen=True)
class Option:
    """Something that a recipe may use. sets: its fields. layout: its axes. has: a recipe uses it. own: a module of the
    user's that is trained instead of the recipe's, with its card."""

    name: str
    sets: Sequence[str]
    layout: Mapping[str, Any]
    has: Callable[[Recipe, Layout], bool]
    own: Callable[[], tuple[nn.Module, ModuleCard | None]] | None = None


def _value(recipe: Recipe, key: str) -> Any:
    """Of a field `section.name`."""
    section, name = key.split(".")
    return getattr(getattr(recipe, section), name)


def _field(key: str, value: str, name: str = "") -> Option:
    """An option that is the value of a field."""
    return Option(
        name or f"{key}={value}",
        [f"{key}={value.lower()}"],
        {},
        lambda r, one: str(_value(r, key)) == value,
    )


def _layout(name: str, value: str, **needs: Any) -> Option:
    """An option that is the value of a field of the layout. needs: axes beside it."""
    return Option(
        f"{name}={value}", [], {name: value, **needs}, lambda r, one: str(getattr(one, name)) == value
    )


def _own(name: str, made: Callable[[], tuple[nn.Module, ModuleCard | None]]) -> Option:
    """An option that no recipe has: Python brings the module."""
    return Option(name, ["model.layers=4"], {}, lambda r, one: False, cache(made))


def _tests(name: str) -> Any:
    """A module of the tests."""
    for folder in (TESTS, TESTS.parent / "benchmarks" / "planner"):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    return importlib.import_module(name)


def _zero(stage: int) -> Option:
    return Option(f"zero={stage}", [], {"dp": 2, "zero": stage}, lambda r, one: one.zero == stage)


def _splits(layout: Layout) -> bool:
    return layout.pp > 1 and splits_backward(layout.schedule, layout.pp, layout.stages_per_rank)


AXES = (
    Option("dp", [], {"dp": 2}, lambda r, one: one.dp > 1),
    *map(_zero, (1, 2, 3)),
    Option("tp", [], {"tp": 2}, lambda r, one: one.tp > 1 and not one.sp),
    Option("tp, sp", [], {"tp": 2, "sp": "true"}, lambda r, one: one.tp > 1 and one.sp),
    Option("cp", [], {"cp": 2}, lambda r, one: one.cp > 1 and one.cp_method == "ring"),
    Option(
        "cp, ulysses", [], {"cp": 2, "cp_method": "ulysses"},
        lambda r, one: one.cp > 1 and one.cp_method == "ulysses",
    ),
    Option(
        "cp, all_gather", [], {"cp": 2, "cp_method": "all_gather"},
        lambda r, one: one.cp > 1 and one.cp_method == "all_gather",
    ),
    Option("pp", [], {"pp": 2}, lambda r, one: one.pp > 1 and not _splits(one)),
    Option("pp, split backward", [], {"pp": 2, "schedule": "zb_h1"}, lambda r, one: _splits(one)),
    Option("ep", [], {"dp": 2, "ep": 2}, lambda r, one: one.ep > 1 and one.folded == 1),
    Option(
        "ep, ep_fold", [], {"tp": 2, "sp": "true", "ep": 2, "ep_fold": "true"}, lambda r, one: one.folded > 1
    ),
)  # fmt: skip
MODELS = tuple(_field("model.arch", arch, arch) for arch in ARCHITECTURES)
MODES = tuple(_field("precision.mode", mode, mode) for mode in PRECISIONS)
MEMORY = (
    _layout("recompute", "full"), _layout("recompute", "selective"), _layout("recompute", "ops:attention+gate+norm"),
    _layout("offload", "activations:tp", tp=2, recompute="full"),
    *(_layout("offload", name) for name in ("activations", "states:host", "states:disk", "all:host", "all:disk")),
    Option(
        "offload=all:host, early (STRONGHOLD)", ["optim.grad_clip=0", "faults.on_nonfinite=abort"],
        {"offload": "all:host", "offload_window": 3, "offload_update": "early"},
        lambda r, one: one.early and one.offload_window > 2,
    ),
)  # fmt: skip
MESSAGES = (
    _layout("all_reduce", "ring", dp=2),
    _layout("all_gather", "broadcasts", dp=2, zero=3), _layout("reduce_scatter", "ring", dp=2, zero=3),
    *(_layout("compress", name, dp=2) for name in ("int8", "1bit", "topk:0.01", "powersgd:2")),
    Option(
        "zeropp", [], {"dp": 4, "zero": 3, "ranks_per_node": 2, "zeropp": "weights,hier,gradients"},
        lambda r, one: one.zeropp != Layout().zeropp,
    ),
)  # fmt: skip
APART = tuple(
    Option(f"sync.method={name}", [f"sync.method={name}", *more], {"dp": 2}, lambda r, one, n=name: r.sync.method == n)
    for name, more in (("local", ["sync.every=2"]), ("diloco", ["sync.every=3"]), ("server", ["sync.servers=1"]))
)  # fmt: skip
UPDATES = tuple(_field("optim.name", name, name) for name in OPTIMIZERS)
DATA = (_field("data.document_masks", "True", "data.document_masks"), _field("data.packing", "best_fit"))
OWN = (
    _own("own module", lambda: (_tests("own_models").Plain(), None)),
    _own("own module, card", lambda: (_tests("own_models").Decoder(), _tests("test_own").CARD)),
    _own("adapters (LoRA)", lambda: _tests("test_own").lora()),
)
GROUPS = (
    Option("model.freeze", ["model.freeze=blocks.0.*"], {}, lambda r, one: bool(r.model.freeze)),
    Option("optim.groups", ["optim.groups=*norm*: lr=2"], {}, lambda r, one: bool(r.optim.groups)),
)
RUNS = (
    Option(
        "unequal shares", ["train.global_batch_size=9"], {"dp": 2},
        lambda r, one: r.train.global_batch_size // (r.train.microbatch_size or 1) % one.dp > 0,
    ),
    *(
        Option(name, [f"{name}={value}"], {}, lambda r, one, name=name: bool(_value(r, name)))
        for name, value in (
            ("train.batch_ramp", "4:1"), ("train.z_loss", "0.05"), ("observe.noise_scale", "true"),
            ("faults.hash_every", "2"),
        )
    ),
)  # fmt: skip
ROWS = {
    "Axes": AXES,
    "Models": MODELS,
    "Precision": MODES,
    "Memory": MEMORY,
    "Messages": MESSAGES,
    "Ranks that compute apart": APART,
    "Optimizers": UPDATES,
    "Data": DATA,
    "Your own modules": OWN,
    "Parameters apart": GROUPS,
    "Runs": RUNS,
}
OPTIONS = tuple(option for options in ROWS.values() for option in options)


# ---- what the rules refuse


@cache
def start(arch: str) -> Recipe:
    """The recipe without options."""
    return load("quickstart", [*BASE, f"model.arch={arch}", *SIZES.get(arch, ())], "dp=1")


@cache
def changes(name: str) -> dict[tuple[str, str], Any]:
    """The fields that an option sets, with their values."""
    option = BY_NAME[name]
    arch = arch_of([option])
    text = ",".join(f"{key}={value}" for key, value in option.layout.items()) or "dp=1"
    found = load("quickstart", [*BASE, f"model.arch={arch}", *SIZES.get(arch, ()), *option.sets], text)
    return {
        (section, key): value
        for section, fields in found
        for key, value in fields
        if value != getattr(getattr(start(arch), section), key)
    }


def arch_of(options: Sequence[Option]) -> str:
    """The model that options are tried with: their own, one with experts if they divide experts, else a llama."""
    named = [option.name for option in options if option in MODELS]
    return named[0] if named else "moe" if any("ep" in option.layout for option in options) else "llama"


def together(*options: Option) -> Recipe | None:
    """A recipe with these options, which no rule has checked; None if they are values of one field."""
    recipe, merged = start(arch_of(options)), dict[tuple[str, str], Any]()
    for option in options:
        for key, value in changes(option.name).items() if option not in MODELS else ():
            if merged.setdefault(key, value) != value:
                return None
    if sum(option in MODELS or option in OWN for option in options) > 1:
        return None
    sections = {name: dict[str, Any]() for name, _ in merged}
    for (name, key), value in merged.items():
        sections[name][key] = value
    return recipe.model_copy(
        update={name: getattr(recipe, name).model_copy(update=fields) for name, fields in sections.items()}
    )


def refusal(*options: Option) -> str | None:
    """Why a recipe with these options is refused; "" if it is not, None if they exclude each other as values of one
    field."""
    recipe = together(*options)
    if recipe is None:
        return None
    for option in options:
        if option.own is not None and (why := _refused(recipe, *option.own())):
            return why
    return next((_why(text) for _, text in contradictions(recipe)), "")


def _refused(recipe: Recipe, module: nn.Module, card: ModuleCard | None) -> str:
    """Why the module does not train with this recipe."""
    try:
        custom_model(recipe, module, card)
    except UserError as error:
        name = type(module).__name__
        text = str(error).replace(f"{name} is a module of your own", "the module is your own")
        return _why(re.sub(r"\. (Give|Use|Rename) .*| \(docs/.*?\)", "", text.replace(name, "the module")))
    return ""


def _why(text: str) -> str:
    """The reason without the proposals and without values, so that many pairs have one."""
    text = re.sub(r" \(layout\..*\)$", "", text.partition(". Nearest valid")[0])
    text = re.sub(r"^layout(\.ep = 2)?: ", "", text)
    text = re.sub(r"^\w+ has no experts", "the model has no experts", text)
    text = re.sub(
        r'(sync\.method|model\.arch|layout\.offload|layout\.compress|optim\.name) = "[\w:.]+"', r"\1", text
    )
    text = re.sub(r"(every|layout\.\w+) = 2", r"\1", text)
    text = re.sub(r"(\w+\.\w+) = true", r"\1", text)
    text = re.sub(r'the optimizer "\w+"', "this optimizer", text)
    return re.sub(r"\b(zero|pp|ep|compress|offload)=(?!0)[\w.]+(:[\w.]+)*", r"\1", text)


# ---- what the tests prove


@dataclass(frozen=True)
class Proof:
    """A test whose parameters are recipes. recipe: (fields, layout) of a combination of parameters. A parameter
    `layouts` has several. own: the option whose module is trained."""

    module: str
    test: str
    recipe: Callable[[dict[str, Any]], tuple[Sequence[str], str]]
    own: str = ""


def _but(sets: Sequence[str], section: str) -> list[str]:
    """The fields without those of a section, whose sizes are others here."""
    return [one for one in sets if not one.startswith(section)]


def _mode(p: dict[str, Any]) -> str:
    return f"precision.mode={p['mode']}"


PROOFS = (
    Proof("test_verify", "test_one_rank_passes", lambda p: ([_mode(p), f"model.arch={p['arch']}"], "dp=1")),
    Proof("test_verify", "test_replicas_pass", lambda p: ([f"model.arch={p['arch']}"], "dp=2")),
    Proof("test_layouts", "test_layouts", lambda p: ((), p["layout"])),
    Proof("test_layouts", "test_norms_of_queries_and_keys", lambda p: (p["overrides"], p["layout"])),
    Proof(
        "test_layouts", "test_norms_of_queries_and_keys_beside_experts",
        lambda p: (["model.arch=qwen3_moe"], p["layout"]),
    ),
    Proof(
        "test_expert", "test_experts_folded_over_the_tensor_axis_equal_one_process", lambda p: ((), p["layout"])
    ),
    Proof(
        "test_families", "test_layouts_equal_one_process", lambda p: ([f"model.arch={p['arch']}"], p["layout"])
    ),
    Proof(
        "test_speedrun", "test_layouts",
        lambda p: (["model.arch=speedrun", f"optim.name={p['optimizer']}"], p["layout"]),
    ),
    Proof("test_layouts", "test_other_architectures", lambda p: ([f"model.arch={p['arch']}"], p["layout"])),
    Proof(
        "test_layouts", "test_bf16_is_no_worse_than_one_process", lambda p: (["precision.mode=bf16"], p["layout"])
    ),
    Proof(
        "test_deepseek", "test_layouts_compute_what_one_process_computes",
        lambda p: (["model.arch=deepseek"], p["layout"]),
    ),
    Proof("test_precision", "test_layouts_compute_what_one_process_computes", lambda p: ([_mode(p)], p["layout"])),
    Proof(
        "test_precision", "test_rules_compute_what_one_process_computes",
        lambda p: (["precision.mode=bf16_pure", f"optim.name={p['name']}"], p["layout"]),
    ),
    Proof(
        "test_fp8", "test_layouts_round_as_one_process_does",
        lambda p: ([_mode(p), *p["sets"]], p["layout"]),
    ),
    Proof("test_optim", "test_equals_one_process", lambda p: ([f"optim.name={p['name']}"], p["layout"])),
    Proof("test_optim", "test_options_equal_one_process", lambda p: (_tests("test_optim").OPTIONS, p["layout"])),
    Proof(
        "test_recompute", "test_gradients_are_those_of_none_on_one_process",
        lambda p: ([f"model.arch={p['arch']}", _mode(p)], f"dp=1,recompute={p['how']}"),
    ),
    *(
        Proof(
            "test_recompute", "test_gradients_are_those_of_none_on_every_axis",
            lambda p, how=how: ((), f"{p['layout']},recompute={how}"),
        )
        for how in ("full", "selective", "ops:attention+gate+norm")
    ),
    Proof(
        "test_offload", "test_equals_in_memory_bit_for_bit",
        lambda p: ([_mode(p), *p["sets"]], f"{p['layout']},offload={p['offload']}"),
    ),
    Proof("test_all_reduce", "test_training_is_that_of_one_process", lambda p: ((), p["layout"])),
    Proof("test_zero_schedules", "test_training_is_that_of_one_process", lambda p: ((), p["layout"])),
    Proof(
        "test_compression", "test_equals_a_simulation_in_one_process",
        lambda p: ((), f"dp={p['world']},compress={p['text']}"),
    ),
    Proof(
        "test_zeropp", "test_gradients_are_off_by_the_quantisation",
        lambda p: ([_mode(p)], f"dp=4,zero=3,ranks_per_node=2,zeropp={p['text']}"),
    ),
    Proof("test_replica_groups", "test_equals_the_simulation", lambda p: (p["sync"], p["layout"])),
    Proof(
        "test_replica_groups", "test_local_sgd_in_every_step_is_data_parallelism",
        lambda p: (["sync.method=local", "sync.every=1", "optim.name=sgd", _mode(p)], "dp=2"),
    ),
    Proof(
        "test_server", "test_synchronous_equals_one_process",
        lambda p: (["sync.method=server", f"sync.servers={p['servers']}", *_but(p["sets"], "train.")], "dp=2"),
    ),
    Proof(
        "test_elastic", "test_unequal_shares_compute_what_one_process_computes",
        lambda p: (p["overrides"], p["layout"]),
    ),
    Proof(
        "test_documents", "test_layouts_equal_one_process",
        lambda p: (
            ["data.document_masks=true", f"data.packing={p['packing']}", f"model.arch={p['model']}"], p["layout"]
        ),
    ),
    Proof("test_own", "test_a_plain_module_on_data_axes_with_recomputation", lambda p: ((), p["layout"]), OWN[0].name),
    Proof("test_own", "test_a_decoder_with_a_card_on_every_axis", lambda p: ((), p["layout"]), OWN[1].name),
    Proof(
        "test_own", "test_frozen_parameters_and_groups",
        lambda p: ([field for one in GROUPS for field in one.sets], p["layout"]), OWN[1].name,
    ),
    Proof("test_own", "test_adapters_on_every_axis", lambda p: ((), p["layout"]), OWN[2].name),
    Proof(
        "test_own", "test_frozen_layouts_pass_the_comparison_with_plain_autograd",
        lambda p: (["precision.mode=bf16", *GROUPS[0].sets], p["layout"]),
    ),
)  # fmt: skip


def parameters(module: str, test: str) -> Iterator[dict[str, Any]]:
    """The combinations of a test's parameters."""
    marks = [mark for mark in getattr(_tests(module), test).pytestmark if mark.name == "parametrize"]
    rows = []
    for mark in marks:
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        found = [
            getattr(value, "values", tuple(value) if len(names) > 1 else (value,)) for value in mark.args[1]
        ]
        rows.append([dict(zip(map(str.strip, names), row, strict=True)) for row in found])
    for parts in product(*rows):
        yield {key: value for part in parts for key, value in part.items()}


def proofs() -> Iterator[set[str]]:
    """The options of each recipe that was compared: those of tests, and the rows of layouts_verified.md."""
    for proof in PROOFS:
        for values in parameters(proof.module, proof.test):
            for layout in values.pop("layouts", [values.get("layout")]):
                found = used(*proof.recipe(values | {"layout": layout}))
                yield (found - {one.name for one in MODELS}) | {proof.own} if proof.own else found
    for layout in re.findall(r"^\| `(.*?)` .*\| ok \|$", VERIFIED.read_text(encoding="utf-8"), re.MULTILINE):
        yield used((), layout)


_LOADED: dict[tuple[str, ...], Recipe] = {}


def used(sets: Sequence[str], layout: str) -> set[str]:
    """The options that a test's recipe has. As in the tests, a layout with ep gets a model with experts."""
    chosen = next((one.partition("=")[2] for one in sets if one.startswith("model.arch=")), None)
    arch = chosen or ("moe" if "ep=" in layout else "llama")
    recipe = start(arch)
    if sets and (recipe := _LOADED.get((arch, *sets))) is None:  # the layout is looked at apart, below
        recipe = load("quickstart", [*BASE, f"model.arch={arch}", *SIZES.get(arch, ()), *sets], layout)
        _LOADED[arch, *sets] = recipe
    values: dict[str, Any] = parse(layout)
    return {option.name for option in OPTIONS if option.has(recipe, Layout(**values))}


# ---- the page


def page() -> str:
    """The page.

    Raises:
        ValueError: a test compares what the rules refuse.
    """
    pairs = {pair for found in proofs() for pair in product(found, found)}
    reasons: dict[str, int] = {}
    parts = [INTRODUCTION]
    for title, columns, rows in TABLES:
        parts.append(f"## {title}\n")
        head = "| | " + " | ".join(f"`{option.name}`" for option in columns) + " |"
        lines = [head, "|---" * (len(columns) + 1) + "|"]
        for name in rows:
            if len(rows) > 1:
                lines.append(f"| **{name}** |" + " |" * len(columns))
            for row in ROWS[name]:
                cells = (_cell(row, column, pairs, reasons) for column in columns)
                lines.append(f"| `{row.name}` | " + " | ".join(cells) + " |")
        parts.append("\n".join(lines) + "\n")
    listed = "\n".join(f"{number}. {text}" for text, number in reasons.items())
    tests = ", ".join(f"`{name}`" for name in dict.fromkeys(f"tests/{proof.module}.py" for proof in PROOFS))
    parts.append(f"## Why not\n\n{listed}\n")
    parts.append(f"## Where it is proven\n\n{textwrap.fill(PROVEN_IN.format(tests=tests), 120)}\n")
    return "\n".join(parts)


def _cell(one: Option, other: Option, pairs: set[tuple[str, str]], reasons: dict[str, int]) -> str:
    if one is other:
        return ""
    why = refusal(one, other)
    if why and (one.name, other.name) in pairs:
        raise ValueError(f"{one.name} with {other.name} is refused ({why}), and a test compares it")
    if why is None:
        return ""
    if why:
        return f"no [{reasons.setdefault(why, len(reasons) + 1)}]"
    return PROVEN if (one.name, other.name) in pairs else ACCEPTED


BY_NAME = {option.name: option for option in OPTIONS}
TABLES = (
    ("Layouts", AXES, tuple(ROWS)),
    ("Precision", MODES, tuple(name for name in ROWS if name not in ("Axes", "Precision"))),
    ("Models", (*MODELS, *OWN), tuple(name for name in ROWS if ROWS[name] not in (AXES, MODES, MODELS, OWN))),
)
INTRODUCTION = f"""# What combines with what

Each cell is a pair of options. `python docs/make_support_matrix.py` writes this page: the rules of recipes say what is
refused, and the parameters of the tests say what was compared. A test checks that the page is current.

| | |
|---|---|
| {PROVEN} | a test compares a recipe that has both with one process, or with a simulation in one process |
| {ACCEPTED} | accepted; no test compares this pair by itself |
| no [n] | refused before anything runs, for [reason n](#why-not) |
| (empty) | both are values of one field, or need different values of it |

Pairs are not all: three options may be refused although each two of them combine. `fivefold check RECIPE` answers for a
whole recipe. The sizes here are such that every axis divides them. All of this ran on CPUs; see [GPUs](gpu.md).
"""
PROVEN_IN = """The comparisons are those of {tests}, and the [layouts that are verified](layouts_verified.md).
`make test` runs a part of them, `make test-all` all. `fivefold verify RECIPE --layout L` compares a recipe of yours.
"""

if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
