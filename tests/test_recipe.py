"""Recipes: strict reading, all errors at once, overrides, TOML out and in again, derived numbers."""

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from fivefold.errors import UserError
from fivefold.files.reading import DEEPEST
from fivefold.models.card import card_of
from fivefold.models.section import FACTS
from fivefold.optim import DEFAULT, FIELDS, OPTIMIZERS, OUTER
from fivefold.recipe import (
    DataSection,
    ModelSection,
    OptimSection,
    Recipe,
    TrainSection,
    change,
    count_parameters,
    expected_vocab_size,
    explain,
    families,
    flops_per_token,
    load,
    resolve,
    shipped,
    to_toml,
    tokens_per_step,
    total_steps,
)
from fivefold.recipe.messages import ESSENTIAL, KEYS
from fivefold.recipe.resolve import warnings
from fivefold.recipe.rules.combinations import REFUSED, UNUSED, notes
from fivefold.schedules.pipeline import TUNED

SHIPPED = [
    "bert-base-mlm", "bert-large-mlm", "bert-tiny", "continue", "deepseek-v3", "dial", "gpt2-1.5b", "gpt2-124m",
    "gpt2-355m", "gpt2-774m", "gpt3-175b", "llama2-13b", "llama2-70b", "llama2-7b", "llama3-405b", "llama3-70b",
    "llama3-8b", "mixtral-8x7b", "moe-tiny", "mt-nlg-530b", "quickstart", "qwen3-30b-a3b", "qwen3-8b", "shakespeare",
    "speedrun", "t-nlg-17b", "talk",
]  # fmt: skip


def write(folder: Path, text: str) -> Path:
    path = folder / "recipe.toml"
    path.write_text(text, encoding="utf-8")
    return path


def errors(*args: Any, **kwargs: Any) -> str:
    with pytest.raises(UserError) as error:
        load(*args, **kwargs)
    return str(error.value)


# Reading


def test_minimal(tmp_path: Path) -> None:
    recipe = load(write(tmp_path, "[train]\nsteps = 3\n"))
    assert recipe == Recipe(train=TrainSection(steps=3))


def test_the_recipe_of_an_earlier_version(tmp_path: Path) -> None:
    """A field that is gone may stand in it with the value by which it did nothing."""
    recipe = load(write(tmp_path, "[train]\nsteps = 3\n[model]\nuntie_step = 0\n"))
    assert recipe == Recipe(train=TrainSection(steps=3))
    with pytest.raises(UserError, match=r"untie_step = 2: unknown key"):
        load(write(tmp_path, "[train]\nsteps = 3\n[model]\nuntie_step = 2\n"))


def test_toml_has_no_tuples_and_integers_may_stand_for_numbers(tmp_path: Path) -> None:
    recipe = load(write(tmp_path, "[train]\nsteps = 3\n[optim]\nlr = 1\nbetas = [0, 0.5]\n"))
    assert recipe.optim.lr == 1.0
    assert isinstance(recipe.optim.lr, float)
    assert recipe.optim.betas == (0.0, 0.5)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped(name: str) -> None:
    recipe = load(name)
    assert len(shipped()[name]) > 40
    resolved = resolve(recipe, vocab_size=256)
    assert total_steps(resolved) == total_steps(recipe)
    assert load(name, ["train.steps=10"]).train.steps == 10
    assert load(name, layout="dp=2").layout.dp_replicate == 2


def test_shipped_is_complete() -> None:
    assert list(shipped()) == SHIPPED
    assert sorted(name for names in families().values() for name in names) == SHIPPED


def test_llama_7b_is_the_real_one() -> None:
    recipe = load("llama2-7b")
    assert recipe == load("llama-7b"), "its earlier name"
    assert (recipe.model.layers, recipe.model.dim, recipe.model.seq_len) == (32, 4096, 4096)
    assert tokens_per_step(recipe) == 2**22


def test_a_base_gives_what_a_recipe_leaves_out(tmp_path: Path) -> None:
    text = 'base = "llama2-7b"\n[model]\nlayers = 2\n[train]\nsteps = 3\n'
    recipe, base = load(write(tmp_path, text)), load("llama2-7b")
    assert (recipe.model.layers, recipe.model.dim) == (2, 4096)
    assert (recipe.train.steps, recipe.train.tokens) == (3, None)
    assert (recipe.optim, recipe.layout) == (base.optim, base.layout)
    own = load(write(tmp_path, text + "[layout]\ntp = 2\n")).layout
    assert own == load("llama2-7b", layout="tp=2").layout, "a layout replaces the base's as a whole"


@pytest.mark.parametrize("base", ['"lama2-7b"', "3", '"recipe.toml"', '["llama2-7b"]'])
def test_a_base_is_a_shipped_recipe(tmp_path: Path, base: str) -> None:
    message = errors(write(tmp_path, f"base = {base}\n"))
    assert f"line 1: base = {base}: must be the name of a shipped recipe" in message
    assert ("did you mean 'llama2-7b'?" in message) == (base == '"lama2-7b"')


def test_errors_in_a_recipe_with_a_base_name_its_lines(tmp_path: Path) -> None:
    message = errors(write(tmp_path, 'base = "llama2-7b"\nmodel = 3\n[optim]\nlrr = 1\n'))
    assert "line 2: model = 3: must be a section" in message
    assert "line 4: optim.lrr = 1: unknown key" in message


def test_not_found() -> None:
    message = errors("quikstart")
    assert "did you mean 'quickstart'?" in message
    assert "`fivefold recipes` lists the shipped ones" in message
    assert len(message) < 200
    assert len(errors("quickstart", layout="fsdp=2")) < 250, "the hint, and where the others are"


def test_a_microbatch_that_is_too_large_becomes_smaller() -> None:
    for layout, nearest in (("dp=1", 16), ("dp=2", 16), ("dp=2,tp=2", 16)):
        message = errors("quickstart", ["train.global_batch_size=16", "train.microbatch_size=100000"], layout)
        assert f"Nearest valid: train.microbatch_size = {nearest}" in message


EVERY = ("train.val_every", "train.sample_every", "checkpoint.every")


@pytest.mark.parametrize("key", EVERY)
def test_what_a_short_run_does_every_so_many_steps(key: str) -> None:
    """Nobody is warned of what a shipped recipe says, but of what the user has said."""
    section, _, name = key.partition(".")
    short = load("quickstart", ["train.steps=60"])
    assert getattr(getattr(short, section), name) <= 60
    assert not any(warning.startswith(EVERY) for warning in warnings(short))
    asked = load("quickstart", ["train.steps=60", f"{key}=100"])
    assert getattr(getattr(asked, section), name) == 100
    assert [warning for warning in warnings(asked) if warning.startswith(key)]
    assert getattr(getattr(change(asked, ["train.seed=1"]), section), name) == 100


def test_a_folder_is_no_recipe(tmp_path: Path) -> None:
    assert "a folder, not a recipe file" in errors(tmp_path)
    path = write(tmp_path, "[train]\nsteps = 3\n")
    assert f"or pass its recipe, {path}" in errors(tmp_path)  # a run's folder


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("[model]\ndim = = 3\n", "2:7"),
        ("model:\n  dim: 3\n", "1:6"),
        ('[model]\ndim = "', "2:8"),
        ("[model]\n[model]\n", "2:7"),
    ],
)
def test_syntax_error_names_file_line_and_column(tmp_path: Path, text: str, place: str) -> None:
    path = write(tmp_path, text)
    found = errors(path)
    assert found.startswith(f"{path}:{place}: not valid TOML: ")
    assert found.endswith("A recipe is TOML: a line [train], below it lines such as steps = 100") == (
        ":" in text
    )


def test_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_bytes(b"# \xff")
    assert "not UTF-8 text at byte 2" in errors(path)


# Errors


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[model]\nheadz = 3", "line 2: model.headz = 3: unknown key; did you mean 'heads'?"),
        ("[model]\nlr = 3", "line 2: model.lr = 3: unknown key; did you mean 'optim.lr'?"),
        ("[modle]\ndim = 3", "line 1: [modle]: unknown section; did you mean 'model'?"),
        ("lr = 3", "line 1: lr = 3: this key is in no section; did you mean 'optim.lr'?"),
        ("model = 3", "line 1: model = 3: must be a section; write a line [model], then its keys"),
        ('[model]\ndim = "big"', 'line 2: model.dim = "big": must be a whole number >= 1'),
        ("[model]\ndim = true", "model.dim = true: must be a whole number >= 1"),
        ("[model]\ndim = 0", "model.dim = 0: must be a whole number >= 1"),
        ("[model]\ndim = 512.5", "model.dim = 512.5: must be a whole number >= 1 and <= 1048576"),
        ("[train]\nval_every = 1e300", "train.val_every = 1e+300: must be a whole number >= 0"),
        ('[model]\narch = "lama"', "did you mean 'llama'?"),
        ("[optim]\nlr = nan", "optim.lr = nan: must be a number > 0"),
        ("[optim]\nlr = inf", "optim.lr = inf: must be a number > 0"),
        ("[optim]\nbetas = [0.9, 1]", "betas = [0.9, 1]: must be a list of 2, each a number >= 0 and < 1"),
        ("[optim]\nbetas = [0.9]", "betas = [0.9]: must be a list of 2"),
        ("[observe]\nnoise_scale = 1", "observe.noise_scale = 1: must be true or false"),
        (
            '[observe]\ntracker = "wandbb"',
            "there is no tracker \"wandbb\"; did you mean 'wandb'?; must be one or",
        ),
        ("[observe]\ntracker = [3]", "observe.tracker = [3]: must be text"),
        ("[data]\nsource = 1979-05-27", "data.source = datetime.date(1979, 5, 27): must be text"),
        # Rules between fields
        ("[model]\ndim = 10", "model.dim = 10 must be divisible by model.heads = 6"),
        ("[model]\ndim = 18", "model.dim / model.heads = 3 must be even"),
        ("[model]\nkv_heads = 4", "model.kv_heads = 4 must divide model.heads = 6"),
        ('[model]\narch = "gpt2"\nkv_heads = 3', "gpt2 needs kv_heads = heads"),
        ('[model]\narch = "gpt2"\nrope_theta = 5e5', "gpt2 has no rotary positions"),
        ('[model]\narch = "bert"\n[train]\nsample_every = 5', "it is bidirectional"),
        ("[optim]\nwarmup_steps = 30", "optim.warmup_steps = 30 must be at most the run's 20 steps"),
        (
            "[optim]\ndecay_fraction = 0.5",
            'decay_fraction = 0.5 has no effect: only schedule = "wsd" decays in a share of the run. Nearest valid: '
            "leave decay_fraction out, or change optim.schedule",
        ),
        (
            '[optim]\nschedule = "constant"\nmin_lr = 1e-5',
            'min_lr = 1e-05 has no effect: schedule = "constant"',
        ),
        ("[model]\nrope_low = 2.0", "model.rope_low = 2.0 has no effect: model.rope_factor = 1"),
        ("[optim]\nmin_lr = 1", "optim.min_lr = 1.0 must be at most optim.lr = 0.001"),
        (
            "[train]\nglobal_batch_size = 9\nmicrobatch_size = 2",
            "global_batch_size = 9 must be divisible by 2",
        ),
        (
            "[layout]\ndp_replicate = 17",
            "global_batch_size = 16: 17 data-parallel ranks need at least one sequence each (layout.dp_replicate 17). "
            "Nearest valid: train.global_batch_size = 17",
        ),
        (
            "[train]\nmicrobatch_size = 8\n[layout]\ndp_replicate = 3",
            "16 with train.microbatch_size = 8: 3 data-parallel ranks need at least one microbatch each "
            "(layout.dp_replicate 3). Nearest valid: train.global_batch_size = 24, or train.microbatch_size = 4",
        ),
        (
            "[layout]\ndp_replicate = 3\nmicrobatches = 2",
            "global_batch_size = 16 must be divisible by 6 (layout.dp_replicate 3 x layout.microbatches 2)",
        ),
        (
            '[layout]\ndp_replicate = 3\n[sync]\nmethod = "diloco"',
            "global_batch_size = 16 must be divisible by 3 (layout.dp_replicate 3)",
        ),
        (
            "[layout]\ndp_replicate = 3\n[observe]\nnoise_scale = true",
            "layout.dp_shard = 1: ranks have unequal shares of the batch",
        ),
        ("[train]\nmicrobatch_size = 2\n[layout]\nmicrobatches = 2", "global_batch_size = 16 must be 4"),
        ("[layout]\ndp_shard = 2", "layout: dp_shard=2 shards states between ranks"),
        ("[layout]\ntp = 4", "layout.tp = 4 must divide model.heads = 6"),
        ("[layout]\ncp = 3", "2 x layout.cp = 6 must divide model.seq_len = 256"),
        (
            '[layout]\npp = 4\nschedule = "interleaved"\nvirtual_stages = 2',
            "= 8 stages, more than model.layers = 6",
        ),
        (
            '[layout]\npp = 8\nschedule = "zbv"',
            "pp = 8 x zbv's 2 = 16 stages, more than model.layers = 6: each stage has at "
            "least one block. Nearest valid: layout.pp = 3",
        ),
    ],
)
def test_one_error(tmp_path: Path, text: str, message: str) -> None:
    # the length of the run comes from outside, to be the same for all
    found = errors(write(tmp_path, text), ["train.steps=20"])
    assert message in found
    assert "problems" not in found  # and nothing else is wrong


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("source", 'source = "a\\u0000"'),
        ("sources", '[[data.sources]]\nname = "a"\nsource = "a\\u0000"'),
        (
            "stages",
            '[[data.sources]]\nname = "a"\nsource = "a"\n[[data.stages]]\nshare = 1\nweights = {"\\u0000" = 1}',
        ),
    ],
    ids=["a text", "an entry", "a key"],
)
def test_no_text_has_the_character_0(tmp_path: Path, field: str, text: str) -> None:
    said = errors(write(tmp_path, f"[data]\n{text}"))
    assert f"data.{field} must be valid Unicode, without the character 0" in said


def test_length_must_be_given_once(tmp_path: Path) -> None:
    assert "set train.steps or train.tokens" in errors(write(tmp_path, ""))
    assert "are both set" in errors(write(tmp_path, "[train]\nsteps = 3\ntokens = 3\n"))


def test_all_errors_together(tmp_path: Path) -> None:
    model = '[model]\ndim = "big"\nheads = 4\nkv_heads = 3\nhedas = 1\n'
    text = model + "[optmi]\nlr = 3\n[optim]\nlr = 0\nmin_lr = 1\n[train]\nsteps = 1"
    found = errors(write(tmp_path, text), ["optim.eps=x", "foo", "data.surce=x"], layout="tp=x")
    assert "9 problems" in found
    assert len(found.splitlines()) == 10
    for part in (
        "layout 'tp=x'",
        "--set foo: must have the form section.key=value",
        "line 6: [optmi]",
        'line 2: model.dim = "big"',
        "line 5: model.hedas = 1",
        "--set data.surce=x: data.surce",
        "line 9: optim.lr = 0",
        '--set optim.eps=x: optim.eps = "x"',
        "model.kv_heads = 3 must divide model.heads = 4",
    ):
        assert part in found
    assert "must be at most" not in found  # min_lr <= lr cannot be judged: lr itself is wrong


def test_python_values_are_checked_too() -> None:
    with pytest.raises(ValidationError, match="dim"):
        ModelSection(dim="big")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValidationError, match="hedas"):
        ModelSection(hedas=3)  # pyright: ignore[reportCallIssue]
    with pytest.raises(ValidationError, match=r"must be divisible by model.heads"):
        Recipe(model=ModelSection(dim=10))
    with pytest.raises(ValidationError, match="frozen"):
        Recipe().model.dim = 3  # pyright: ignore[reportAttributeAccessIssue]


# Overrides


def test_overrides() -> None:
    recipe = load(
        "quickstart",
        [
            "optim.lr=3e-4",
            "data.source=my.txt",
            "data.tokenizer=12",
            "optim.betas=[0.8, 0.9]",
            "layout.sp = false",
        ],
    )
    assert recipe.optim.lr == 3e-4
    assert recipe.data.source == "my.txt"
    assert recipe.data.tokenizer == "12"  # the field wants text
    assert recipe.optim.betas == (0.8, 0.9)
    assert load("quickstart", ['data.source="a = b"']).data.source == "a = b"
    assert load("quickstart", ["data.source=a = b"]).data.source == "a = b"
    assert load("quickstart", ["train.sample_prompt="]).train.sample_prompt == ""


def test_whole_numbers_may_be_written_as_floats(tmp_path: Path) -> None:
    tokens = load("quickstart", ["train.tokens=1e6"]).train.tokens
    assert (tokens, type(tokens)) == (1_000_000, int)
    assert load(str(write(tmp_path, "[model]\ndim = 384.0\n[train]\nsteps = 2e1"))).train.steps == 20
    message = "train.tokens = 1.5: must be a whole number >= 1"
    assert message in errors("quickstart", ["train.tokens=1.5"])
    message = "data.document_masks = 1.0: must be true or false"
    assert message in errors("quickstart", ["data.document_masks=1.0"])


def test_the_last_override_counts() -> None:
    assert load("quickstart", ["train.steps=5", "train.steps=7"]).train.steps == 7


def test_none_unsets() -> None:
    assert load("llama2-7b", ["model.ffn_dim=none"]).model.ffn_dim is None
    assert load("llama2-7b", ["layout.recompute=none"]).layout.recompute == "none"  # here it is a word
    assert "optim.lr" in errors("quickstart", ["optim.lr=none"])


def test_steps_and_tokens_replace_each_other() -> None:
    assert load("gpt2-124m", ["train.steps=10"]).train.tokens is None
    recipe = load("quickstart", ["train.tokens=10000"])
    assert (recipe.train.steps, recipe.train.tokens) == (None, 10_000)
    assert total_steps(recipe) == math.ceil(10_000 / tokens_per_step(recipe))
    assert "are both set" in errors("quickstart", ["train.tokens=10000", "train.steps=3"])


def test_layout_replaces_the_section() -> None:
    layout = load("llama2-7b", layout="dp=8,tp=2,zero=1").layout
    assert (layout.dp_shard, layout.tp, layout.zero, layout.recompute) == (8, 2, 1, "none")
    assert load("llama2-7b", ["layout.recompute=full"], layout="dp=8").layout.recompute == "full"
    assert "--layout: layout.zero = 7" in errors("llama2-7b", layout="zero=7")


def test_change() -> None:
    recipe = change(load("quickstart"), ["train.steps=3"], layout="dp=2")
    assert (recipe.train.steps, recipe.layout.dp_replicate) == (3, 2)
    with pytest.raises(UserError, match="must be a whole number >= 1"):
        change(recipe, ["train.steps=0"])


# Out and in again

_texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)
_recipes = st.builds(
    Recipe,
    model=st.builds(
        ModelSection,
        arch=st.sampled_from(["llama", "gpt2"]),
        heads=st.just(6),
        dim=st.integers(1, 9).map(lambda n: 12 * n),
        vocab_size=st.none() | st.integers(2, 10**6),
        tie_embeddings=st.none() | st.booleans(),
        norm_eps=st.none() | st.floats(1e-30, 1.0),
    ),
    data=st.builds(DataSection, source=_texts, tokenizer=_texts, text_key=_texts, cache=st.none() | _texts),
    train=st.builds(TrainSection, steps=st.integers(1, 2**53), sample_prompt=_texts),
    optim=st.builds(
        OptimSection,
        lr=st.floats(min_value=0, exclude_min=True, allow_infinity=False),
        betas=st.tuples(st.floats(0, 1, exclude_max=True), st.floats(0, 1, exclude_max=True)),
    ),
)


@given(_recipes)
@settings(max_examples=100, deadline=None)
def test_toml_round_trip(tmp_path_factory: pytest.TempPathFactory, recipe: Recipe) -> None:
    path = tmp_path_factory.getbasetemp() / "round-trip.toml"
    path.write_text(to_toml(recipe, comment="a\nb"), encoding="utf-8", newline="")
    assert load(path) == recipe


@given(_recipes, st.integers(2, 10**6))
@settings(max_examples=50, deadline=None)
def test_resolve_fills_everything_and_is_idempotent(recipe: Recipe, vocab_size: int) -> None:
    assume(recipe.model.vocab_size is None or vocab_size <= recipe.model.vocab_size)
    resolved = resolve(recipe, vocab_size=vocab_size)
    assert resolve(resolved, vocab_size=vocab_size) == resolved
    assert Recipe.model_validate(resolved.model_dump()) == resolved  # what was filled in keeps the rules
    left_open = {row.key for row in explain(resolved) if row.value is None}
    card = card_of(recipe.model)
    allowed = {f"model.{name}" for name, fact in FACTS.items() if not getattr(card, fact)}
    allowed |= {f"optim.{name}" for name in FIELDS if name not in OPTIMIZERS[recipe.optim.name].fields}
    outer = OUTER.get(recipe.sync.method)
    own = {"lr", *outer.fields} if outer else set()
    allowed |= {"sync.replica_groups"} | {f"sync.outer_{name}" for name in {"lr", "momentum"} - own}
    allowed |= {"optim.lr_embeddings", "optim.lr_vectors"}  # those of optim.lr
    allowed |= {"optim.restart_steps"} if recipe.optim.schedule != "restarts" else set()
    allowed |= {"data.end_token", "data.token_dtype"}  # only token files have them
    allowed |= {"model.depth", "model.base_dim", "model.base_layers"}  # unset: no dial, no mu-P
    allowed |= {f"layout.{name}" for name in TUNED}  # each of some pipeline schedules
    allowed |= {"layout.compress_after"} if recipe.layout.compress == "none" else set()
    assert (
        left_open
        <= {"train.tokens", "layout.microbatches", "layout.ranks_per_node", "data.cache", "model.head_dim"}
        | allowed
    )


def test_what_the_layout_does_not_use_is_noted() -> None:
    """And not refused: the same recipe serves many ranks."""
    written = {
        "layout.schedule": "zbv", "layout.virtual_stages": "2", "layout.cp_method": "ulysses", "layout.zero": "3",
        "precision.reduce": "bf16",
    }  # fmt: skip
    recipe = load("quickstart", [f"{key}={value}" for key, value in written.items()], "dp=1")
    assert [note.partition(" = ")[0] for note in notes(recipe)] == list(written)
    assert notes(recipe)[0] == 'layout.schedule = "zbv" has no effect in this layout: a schedule needs pp > 1'
    assert notes(change(recipe, ["layout.pp=2", "layout.cp=2"])) == []
    assert notes(load("quickstart")) == []
    pieces = [f"layout.sp_regather={again}" for again in ("false", "true")]
    found = [notes(load("quickstart", [piece], "tp=2,sp=true,recompute=ops:norm")) for piece in pieces]
    assert [len(some) for some in found] == [1, 0]


def test_a_resolved_recipe_may_get_another_learning_rate() -> None:
    recipe = resolve(load("quickstart", ["optim.schedule=constant"]), vocab_size=300)
    assert change(recipe, ["optim.lr=0.5"]).optim.min_lr is None
    saved = change(recipe, [f"optim.min_lr={recipe.optim.lr}"])  # as runs of older versions have it
    assert resolve(saved, vocab_size=300).optim.min_lr == recipe.optim.lr


def test_resolve_values() -> None:
    recipe = Recipe(train=TrainSection(steps=1000, global_batch_size=24), optim=OptimSection(lr=1e-2))
    resolved = resolve(change(recipe, layout="dp=2"), vocab_size=4001)
    assert resolved.model.kv_heads == 6
    assert resolved.model.ffn_dim == 1024
    assert resolved.model.vocab_size == 4032
    assert resolved.model.tie_embeddings is False
    assert resolved.optim.warmup_steps == 20
    assert resolved.optim.min_lr == pytest.approx(1e-3)
    assert (resolved.optim.betas, resolved.optim.eps) == ((0.9, 0.95), 1e-8)
    assert resolved.optim.momentum is None
    assert resolved.train.val_every == 100
    assert resolved.train.microbatch_size == 6  # 12 a rank, at most 8 at once
    gpt2 = resolve(
        Recipe(model=ModelSection(arch="gpt2", heads=4, dim=64), train=TrainSection(steps=1)), vocab_size=9
    )
    assert (gpt2.model.ffn_dim, gpt2.model.tie_embeddings, gpt2.model.vocab_size) == (256, True, 64)
    assert gpt2.optim.warmup_steps == 1


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_gets_its_own_fields(name: str) -> None:
    resolved = resolve(Recipe(train=TrainSection(steps=1), optim=OptimSection(name=name)), vocab_size=9)
    found = {field: getattr(resolved.optim, field) for field in FIELDS}
    assert {field: v for field, v in found.items() if v is not None} == OPTIMIZERS[name].fields


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (
            ["optim.momentum=0.9"],
            'optim.momentum = 0.9: the optimizer "adamw" has no such field (its own fields: betas, eps). Nearest '
            'valid: leave it out (--set optim.momentum=none), or optim.name = "momentum"',
        ),
        (
            ["optim.name=sgd", "optim.betas=[0.9, 0.99]"],
            'optim.betas = [0.9, 0.99]: the optimizer "sgd" has no such field (it has no field of its own). Nearest '
            'valid: leave it out (--set optim.betas=none), or optim.name = "adamw"',
        ),
        (
            ["optim.name=nesterov", "optim.gamma=0.1"],
            "(its own fields: momentum). Nearest valid: leave it out",
        ),
        (["optim.name=adadelta"], 'optim.name = "adadelta": must be one of "adamw", "adam"'),
        (
            ["optim.name=muon", "sync.method=server"],
            "its update needs whole matrices. Nearest valid: optim.name",
        ),
        (
            ["train.z_loss=1e-4", "sync.method=server"],
            "train.z_loss = 0.0001 is not supported with sync.method",
        ),
        (["optim.restart_steps=5"], 'only schedule = "restarts" has cycles'),
        (
            ["train.batch_ramp=1:5", "layout.dp_replicate=2"],
            "1 sequences must be at least 2 (layout.dp_replicate 2)",
        ),
        (
            ["train.batch_ramp=6:5", "train.microbatch_size=4"],
            "6 sequences must be a multiple of 4, and at least 8",
        ),
        (["optim.name=nestrov", "optim.momentum=0.5"], "did you mean 'nesterov'?"),
        (["optim.name=momentum", "optim.momentum=1"], "optim.momentum = 1: must be a number > 0 and < 1"),
    ],
)
def test_a_field_that_the_optimizer_does_not_have_is_refused(sets: list[str], message: str) -> None:
    found = errors("quickstart", sets)
    assert message in found
    assert "problems" not in found


def test_docs_of_optimizer_fields_are_those_of_the_cards() -> None:
    docs = {row.key: row.doc for row in explain(load("quickstart"))}
    for field in FIELDS:
        cards = [card for card in OPTIMIZERS.values() if field in card.fields]
        doc, _, unset = docs[f"optim.{field}"].partition("Unset: ")
        if len(cards) < 4:
            names = [f"`{card.name}`" for card in cards]
            joined = ", ".join(names[:-1]) + " and " + names[-1] if names[1:] else names[0]
            assert f"{joined} only." in doc
        usual = OPTIMIZERS[DEFAULT].fields.get(field, cards[0].fields[field])
        for card in cards:
            value = str(card.fields[field]).replace("(", "[").replace(")", "]")
            other = card.fields[field] != usual and card.name != "adagrad"
            assert value in unset
            assert not other or f"`{card.name}`" in unset, card.name


def test_resolve_respects_microbatches() -> None:
    recipe = change(Recipe(train=TrainSection(steps=1)), layout="dp=2,microbatches=4")
    resolved = resolve(recipe, vocab_size=64)
    assert (resolved.train.microbatch_size, resolved.layout.microbatches) == (2, None)


def test_vocabulary_too_small() -> None:
    with pytest.raises(UserError, match=r"model.vocab_size = 100 is smaller than the tokenizer's 257"):
        resolve(load("quickstart", ["model.vocab_size=100"]), vocab_size=257)


def test_tokens_round_up_to_steps() -> None:
    recipe = Recipe(train=TrainSection(tokens=4097))
    assert total_steps(recipe) == 2
    with pytest.raises(UserError, match=r"train.steps or train.tokens"):
        total_steps(Recipe())


# What follows from the numbers


def test_parameters_of_published_models() -> None:
    gpt2 = ModelSection(arch="gpt2", layers=12, dim=768, heads=12, seq_len=1024, vocab_size=50257)
    bert = ModelSection(arch="bert", layers=12, dim=768, heads=12, seq_len=512, vocab_size=30522)
    llama2 = load("llama2-7b").model
    llama3 = ModelSection(
        layers=32, dim=4096, heads=32, kv_heads=8, ffn_dim=14336, vocab_size=128256, seq_len=8192
    )
    assert count_parameters(gpt2) == 124_439_808
    assert count_parameters(bert) == 109_514_298
    assert count_parameters(llama2) == 6_738_415_616
    assert count_parameters(llama3) == 8_030_261_248
    assert (
        count_parameters(llama3.model_copy(update={"tie_embeddings": True})) == 8_030_261_248 - 128256 * 4096
    )


@pytest.mark.parametrize("arch", ["llama", "gpt2", "bert"])
@pytest.mark.parametrize("tied", [None, True, False])
def test_numbers_are_those_of_the_modules(arch: Any, tied: bool | None) -> None:
    from fivefold.models.base import build
    from fivefold.models.card import flops_per_token as flops_of_module

    model = ModelSection(arch=arch, layers=3, dim=24, heads=4, vocab_size=70, seq_len=16, tie_embeddings=tied)
    if arch == "llama":
        model = model.model_copy(update={"kv_heads": 2})
    resolved = resolve(Recipe(model=model, train=TrainSection(steps=1)), vocab_size=70).model
    assert count_parameters(model) == sum(p.numel() for p in build(resolved).parameters())
    assert flops_per_token(model) == pytest.approx(flops_of_module(resolved), rel=1e-12)


def test_expected_vocabulary() -> None:
    assert expected_vocab_size(load("quickstart")) == 4096
    assert expected_vocab_size(load("quickstart", ["data.tokenizer=bytes"])) == 320
    assert expected_vocab_size(load("quickstart", ["data.tokenizer=bpe:1000"])) == 1024
    assert expected_vocab_size(load("shakespeare")) is None
    assert expected_vocab_size(load("quickstart", ["data.source=tokens:x.bin"])) is None
    assert expected_vocab_size(load("gpt2-124m")) == 50304


def test_every_field_is_explained() -> None:
    rows = explain(load("quickstart", ["optim.eps=1e-6"]))
    assert all(len(row.doc) > 10 and row.type for row in rows)
    assert {row.key for row in rows if row.key.startswith("optim.") and not row.is_default} == {
        "optim.eps",
        "optim.lr",
        "optim.schedule",
    }
    by_key = {row.key: row for row in rows}
    assert by_key["model.kv_heads"].type == "a whole number >= 1 and <= 1048576, or unset"
    assert by_key["layout.zero"].type == "a whole number >= 0 and <= 3"


@pytest.fixture
def fewest_digits() -> Iterator[int]:
    """Python reads no whole number of more digits, while this is used."""
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(640)
    yield 640
    sys.set_int_max_str_digits(before)


@pytest.mark.parametrize("value", ["a number", "[" * (DEEPEST + 1) + "]" * (DEEPEST + 1)])
def test_what_python_cannot_read_is_a_clear_error(tmp_path: Path, value: str, fewest_digits: int) -> None:
    value = value.replace("a number", "1" * (fewest_digits + 1))
    with pytest.raises(UserError, match=r"toml:\d+: a number is too long, or lists are nested too deeply"):
        load(write(tmp_path, f"[train]\nsteps = {value}\n"))


def test_unsetting_the_steps_keeps_the_tokens() -> None:
    assert load("gpt2-124m", ["train.steps=none"]) == load("gpt2-124m")


def test_tables_of_rules_name_fields() -> None:
    named = {key for row in REFUSED for key in (row.key, *row.others.split())}
    named |= {f"{row.section}.{name}" for row in UNUSED for name in row.names.split()}
    named |= {row.by for row in UNUSED if row.by}
    assert named | {*ESSENTIAL} <= KEYS.keys()
