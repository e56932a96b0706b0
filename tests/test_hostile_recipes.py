"""Recipes made to hurt: one short message with key and hint, in a time and with a memory that their numbers cannot
raise."""

from __future__ import annotations

import json
import re
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from fivefold.cli.check import summary
from fivefold.errors import LONGEST_MESSAGE, UserError
from fivefold.models.hf import from_hf_config
from fivefold.models.section import LARGEST, MOST_LAYERS
from fivefold.recipe import load
from fivefold.recipe.messages import KEYS, plain_type
from fivefold.sharding.layout import Layout, divisors, largest_divisor
from fivefold.sharding.layout_rules import MOST_RANKS, nearest

sys.path.insert(0, str(Path(__file__).parent / "chaos"))
from fuzz_recipes import SLOWEST_S, fuzz

MILLIONS = {
    "tp=1000000007": "layout.tp = 1000000007: must be a whole number >= 1 and <= 1000000",
    "tp=999983": "layout.tp = 999983 must divide",
    "tp=999983,sp=true": "layout.tp = 999983 must divide",
    "cp=999983": "2 x layout.cp = 1999966 must divide",
    "cp=720720,cp_method=ulysses": "layout.cp = 720720 must divide",
    "dp=999983": "999983 data-parallel ranks need at least one sequence each",
    "pp=999983": "layout.pp = 999983",
    "ep=999983": "ep=999983",
    "dp_replicate=1000000,dp_shard=1000000,tp=1000000,zero=1": f"at most {MOST_RANKS:,}",
}


@pytest.mark.parametrize("layout", MILLIONS)
def test_layouts_of_many_ranks(layout: str) -> None:
    """The loops went over all numbers of ranks, for minutes. It takes some 10 ms."""
    load("quickstart")
    began = time.process_time()
    with pytest.raises(UserError, match=MILLIONS[layout].replace("+", ".")):
        load("quickstart", layout=layout)
    assert time.process_time() - began < 0.5


@pytest.mark.parametrize(
    ("sets", "part"),
    [
        (["model.dim=1000000000000000003"], "model.dim = 1000000000000000003: must be"),
        (["model.dim=1048573"], "model.dim = 1048573 must be divisible by model.heads"),
        (["model.heads=1000000007"], "model.heads = 1000000007: must be"),
        (["model.layers=10000000"], f"model.layers = 10000000: must be a whole number >= 1 and <= {MOST_LAYERS}"),
        (["train.steps=" + "9" * 5000], "train.steps = "),
        (["train.steps=0x" + "f" * 5000], "train.steps = a number of 20000 bits: must be a whole number"),
        (["train.steps=10000000000000000"], f"must be a whole number >= 1 and <= {LARGEST}"),
        (["train.batch_ramp=" + "9" * 5000 + ":1"], "must be text, such as \"4:100"),
        (["data.tokenizer=bpe:" + "9" * 5000], "N must be a whole number"),
        (["layout.recompute=budget:" + "9" * 5000 + "GiB"], "layout.recompute"),
        (["layout.compress=powersgd:" + "9" * 5000], "must be a number"),
        (["sync.method=diloco", "sync.replica_groups=999983"], "sync.replica_groups = 999983 must divide"),
        (["model.arch=moe", "model.experts=16383", "layout.ep=8"], "layout.ep = 8 must divide"),
        (["model.arch=moe", "model.expert_groups=16384"], "expert_groups = 8|expert_groups = 4"),
        (["optim.lr=\x1b]0;owned\x07"], r"optim.lr = \"\\u001b]0;owned|optim.lr = .*u001b"),
        (["x" * 300_000 + "=1"], "must have the form"),
        (["model." + "x" * 300_000 + "=1"], "unknown key"),
    ],
)  # fmt: skip
def test_numbers_and_texts_beyond_reason(sets: list[str], part: str) -> None:
    with pytest.raises(UserError, match=part) as caught:
        summary(load("quickstart", sets))
    assert len(str(caught.value)) <= LONGEST_MESSAGE


@pytest.mark.parametrize(
    "text",
    [b"a" * 300_000, b"[" * 101, b"x = " + b"[" * 101, b"\xff\xfe", b"[model]\nlayers = " + b"9" * 50, b""],
)  # fmt: skip
def test_files_that_are_no_recipe(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "recipe.toml"
    path.write_bytes(text)
    with pytest.raises(UserError, match="recipe"):
        load(path)


def test_every_whole_number_has_a_limit() -> None:
    """What is checked before it is bounded can keep a check from ending."""
    without = [
        key
        for key, field in KEYS.items()
        if plain_type(field.annotation) is int and not any(hasattr(bound, "le") for bound in field.metadata)
    ]
    assert without == []


def test_largest_divisors() -> None:
    for number in (1, 2, 12, 97, 360):
        for most in (1, 2, 5, 7, 400):
            assert largest_divisor(number, most) == max(n for n in range(1, most + 1) if number % n == 0)


def test_the_nearest_layout_of_many_ranks() -> None:
    """720720 ranks can be divided between five axes in 656250 ways."""
    assert len(divisors(720720)) == 240
    assert nearest(Layout(dp_replicate=720719), 720720, 1) == [Layout(dp_replicate=720720)]
    assert nearest(Layout(tp=8, dp_replicate=90000), 720720, 1) == [Layout(tp=8, dp_replicate=90090)]


def test_a_config_of_a_million_layers() -> None:
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
              "num_hidden_layers": 10**6, "vocab_size": 256, "max_position_embeddings": 64, 
              "rms_norm_eps": 1e-6}  # fmt: skip
    with pytest.raises(UserError, match="layers"):
        from_hf_config(config)
    for key in config:
        for value in (None, [], {}, "x", -1, 10**400, 1e308, True, [[]] * 3):
            with suppress(UserError):  # nothing else
                from_hf_config(json.loads(json.dumps(config | {"num_hidden_layers": 2, key: value})))


def test_random_recipes() -> None:
    """The long version: tests/chaos/fuzz_recipes.py."""
    found = fuzz(range(10_000, 10_150))
    failures = {seed: said for seed, said in found["failures"].items() if not re.match(r"[\d.]+ s: ", said)}
    assert not failures, failures
    assert found["refused"] > 75
    assert found["slowest_s"] < 10 * SLOWEST_S  # a check that does not end; not a measurement
