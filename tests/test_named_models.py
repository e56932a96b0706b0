"""Recipes of named models: parameters as published, and a plan on a cluster of the size that they are for."""

import pytest

from fivefold.models.card import card_of
from fivefold.recipe import active_parameters, count_parameters, load, shipped
from fivefold.sharding.layout import Layout
from fivefold.sharding.parts import stage_blocks
from fivefold_plan.cluster.clusters import parse, with_margin
from fivefold_plan.predict import predict

# Recipe: (parameters, vocabulary, source). Vocabulary: the published one, where the recipe rounds it up to a multiple
# of 64. "HF": elements of the published weights on Hugging Face, without tied copies.
EXACT = {
    "gpt2-124m": (124_439_808, 50257, "HF openai-community/gpt2"),
    "gpt2-355m": (354_823_168, 50257, "HF openai-community/gpt2-medium"),
    "gpt2-774m": (774_030_080, 50257, "HF openai-community/gpt2-large"),
    "gpt2-1.5b": (1_557_611_200, 50257, "HF openai-community/gpt2-xl"),
    "llama2-7b": (6_738_415_616, None, "HF meta-llama/Llama-2-7b-hf"),
    "llama2-13b": (13_015_864_320, None, "HF meta-llama/Llama-2-13b-hf"),
    "llama2-70b": (68_976_648_192, None, "HF meta-llama/Llama-2-70b-hf"),
    "llama3-8b": (8_030_261_248, None, "HF meta-llama/Meta-Llama-3-8B"),
    "llama3-70b": (70_553_706_496, None, "HF meta-llama/Meta-Llama-3-70B"),
    "llama3-405b": (
        405_853_388_800,
        None,
        "HF meta-llama/Llama-3.1-405B, with 8 key-value heads as in the paper",
    ),
    "mixtral-8x7b": (46_702_792_704, None, "HF mistralai/Mixtral-8x7B-v0.1"),
    "qwen3-8b": (8_190_735_360, None, "HF Qwen/Qwen3-8B-Base"),
    "qwen3-30b-a3b": (30_532_122_624, None, "HF Qwen/Qwen3-30B-A3B-Base"),
}
# Recipe: (published number, largest relative difference, source and why it is not exact).
ROUNDED = {
    "gpt3-175b": (
        175.0e9,
        3e-3,
        "arXiv 2005.14165, table 2.1: three digits; V and norms as GPT-2's give 174.6e9",
    ),
    "t-nlg-17b": (17e9, 0.02, "Microsoft's announcement, 2020: two digits; its vocabulary is not published"),
    "mt-nlg-530b": (
        530e9,
        2e-3,
        "arXiv 2201.11990: two digits; the vocabulary is padded for tensor parallelism",
    ),
    "deepseek-v3": (
        682.5e9,
        1e-3,
        "arXiv 2412.19437: 671B; and 11.5B for a second token, by the README of its weights",
    ),
    "bert-base-mlm": (
        110e6,
        5e-3,
        "arXiv 1810.04805: two digits, with pooler and next-sentence task; ours has neither",
    ),
    "bert-large-mlm": (340e6, 0.015, "arXiv 1810.04805: two digits, likewise"),
}
ACTIVE = {
    "mixtral-8x7b": (12.9e9, "arXiv 2401.04088: 13B; Mistral's announcement: 12.9B"),
    "deepseek-v3": (37e9, "arXiv 2412.19437"),
    "qwen3-30b-a3b": (3.3e9, "Qwen's announcement, 2025: 3.3B"),
}
CLUSTERS = {
    "a100:8": ("gpt2-124m", "gpt2-355m", "gpt2-774m", "gpt2-1.5b", "bert-base-mlm", "bert-large-mlm"),
    "a100:256": ("t-nlg-17b",),
    "a100:1024": ("gpt3-175b",),
    "a100:2240": ("mt-nlg-530b",),
    "h100:64": ("llama2-7b", "llama2-13b", "qwen3-8b", "mixtral-8x7b"),
    "h100:128": ("llama3-8b", "qwen3-30b-a3b"),
    "h100:256": ("llama2-70b",),
    "h100:512": ("llama3-70b",),
    "h100:2048": ("deepseek-v3",),
    "h100:16384": ("llama3-405b",),
}
PLACES = {name: cluster for cluster, names in CLUSTERS.items() for name in names}
ON_A_NODE = ("gpt2-124m", "gpt2-355m", "bert-base-mlm", "bert-large-mlm")
"""Recipes without a layout: one process, or as many replicas as there are GPUs."""
SMALL = {"quickstart", "shakespeare", "moe-tiny", "bert-tiny", "continue", "dial", "speedrun", "talk"}


@pytest.mark.parametrize("name", EXACT)
def test_parameters_are_the_published_ones(name: str) -> None:
    count, vocabulary, _ = EXACT[name]
    model = load(name).model
    if vocabulary:
        assert model.vocab_size == -(-vocabulary // 64) * 64
        model = model.model_copy(update={"vocab_size": vocabulary})
    assert count_parameters(model) == count


@pytest.mark.parametrize("name", ROUNDED)
def test_parameters_are_near_what_was_published_in_round_numbers(name: str) -> None:
    count, difference, _ = ROUNDED[name]
    assert count_parameters(load(name).model) == pytest.approx(count, rel=difference)


@pytest.mark.parametrize("name", ACTIVE)
def test_active_parameters(name: str) -> None:
    assert active_parameters(load(name).model) == pytest.approx(ACTIVE[name][0], rel=0.02)


def test_berts_weights_but_for_what_only_its_second_task_needs() -> None:
    """HF google-bert/bert-*-uncased, as `BertForMaskedLM`."""
    for name, count in (("bert-base-mlm", 109_514_298), ("bert-large-mlm", 335_174_458)):
        assert count_parameters(load(name, ["model.vocab_size=30522"]).model) == count


def test_the_published_405b_layout_needs_no_recomputation() -> None:
    """Table 4 of arXiv 2407.21783: tp 8, pp 16, dp 128, 16 sequences per group; 400 TFLOP/s, 41%. A stage per block."""
    recipe = load("llama3-405b", ["layout.recompute=none"])
    layout, cluster = Layout.from_recipe(recipe.layout), with_margin(parse("h100:16384"), 0.0)
    assert (layout.tp, layout.cp, layout.pp, layout.dp) == (8, 1, 16, 128)
    assert recipe.train.global_batch_size == 16 * layout.dp
    blocks = stage_blocks(card_of(recipe.model), layout)
    assert list(map(len, blocks)) == [0, *[1] * 126, 0]
    plan = predict(recipe, cluster)
    assert plan.fits
    assert 0.41 < plan.mfu == plan.hfu < 1.15 * 0.41


@pytest.mark.parametrize("name", PLACES)
def test_it_fits_on_its_cluster(name: str) -> None:
    plan = predict(load(name, layout="dp=8" if name in ON_A_NODE else None), parse(PLACES[name]))
    assert plan.fits, f"{plan.peak_bytes / 2**30:.1f} of {plan.limit / 2**30:.1f} GiB"
    assert 0.1 < plan.mfu < 0.7


def test_every_named_model_is_tested() -> None:
    assert EXACT.keys() | ROUNDED.keys() == PLACES.keys() == shipped().keys() - SMALL
