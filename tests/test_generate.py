"""Sampling, the key-value cache, and text that streams."""

from __future__ import annotations

import copy

import pytest
import torch
from families import FAMILIES
from families import small as small_model
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.data.tokenizer import bytes_tokenizer, train_bpe
from fivefold.errors import UserError
from fivefold.models.base import build
from fivefold.models.layers import Cache
from fivefold.recipe import ModelSection, resolve_model
from fivefold.train.differences import round_otherwise
from fivefold.train.generate import Sampling, generate, generate_text, sample, stream_text

MODELS = {
    "llama": ModelSection(arch="llama", layers=2, dim=32, heads=4, kv_heads=2, vocab_size=64, seq_len=24),
    "qwen3": ModelSection(
        arch="qwen3", layers=2, dim=32, heads=4, kv_heads=2, head_dim=12, vocab_size=64, seq_len=24
    ),
    "olmo2": ModelSection(arch="olmo2", layers=2, dim=32, heads=4, kv_heads=2, vocab_size=64, seq_len=24),
    "deepseek": ModelSection(
        arch="deepseek", layers=2, dim=32, heads=4, vocab_size=64, seq_len=24, rope_dim=4, value_dim=5
    ),
    "yarn": ModelSection(
        arch="deepseek",
        layers=2,
        dim=32,
        heads=3,
        vocab_size=64,
        seq_len=24,
        query_rank=0,
        nope_dim=9,
        rope_dim=4,
        rope_factor=3.0,
        rope_scaling="yarn",
        rope_context=8,
    ),
    "speedrun": ModelSection(
        arch="speedrun", layers=2, dim=32, heads=4, kv_heads=2, vocab_size=64, seq_len=24
    ),
    "gpt2": ModelSection(arch="gpt2", layers=2, dim=32, heads=4, vocab_size=64, seq_len=24),
    **{
        arch: small_model(arch, tie_embeddings=False, layers=2, dim=32, heads=4, vocab_size=64, seq_len=24)
        for arch in FAMILIES
    },
}
GREEDY = Sampling(max_tokens=18, temperature=0)


@pytest.fixture(params=MODELS, scope="module")
def small(request):
    """A model with weights so large that its choices are clear, and its section."""
    model = resolve_model(MODELS[request.param].model_copy(update={"init_std": 0.4}), vocab_size=64)
    return build(model, device="cpu", seed=4).eval(), model


@torch.no_grad()
def test_cached_logits_equal_recomputed_ones(small):
    """Prompt at once, then single tokens, then several at once. They may differ as much as logits do when the last
    digit of each weight changes, which is how far this model amplifies rounding."""
    module, model = small
    tokens = torch.randint(0, 64, (3, 24), generator=torch.Generator().manual_seed(0))
    whole, other = module(tokens), copy.deepcopy(module)
    round_otherwise(dict(other.named_parameters()), 1)
    rounding = (other(tokens) - whole).abs().max().item()
    assert rounding < 1e-4
    cache = Cache(model, batch=3)
    start = 0
    for stop in (5, 6, 7, 8, 13, 14, 24):
        logits = module(tokens[:, start:stop], cache=cache)
        assert logits.shape == (3, 1, 64)
        assert cache.length == stop
        torch.testing.assert_close(logits[:, 0], whole[:, stop - 1], atol=rounding, rtol=0)
        start = stop


@torch.no_grad()
def test_greedy_tokens_equal_those_without_a_cache(small):
    module, model = small
    text = [3, 1, 4]
    for _ in range(18):
        text.append(int(module(torch.tensor([text]))[0, -1].argmax()))
    got = list(generate(module, model, [3, 1, 4], GREEDY))
    assert got == text[3:]
    assert len(set(got)) > 3  # not one token over and over, which any cache would get right


@torch.no_grad()
def test_text_goes_on_beyond_the_context(small):
    module, model = small
    got = list(generate(module, model, [5] * 10, Sampling(max_tokens=60, temperature=0)))
    assert len(got) == 60
    text = [5] * 10 + got
    # The context is full at 24 tokens: then it is the last 12, which grow to 24 again.
    assert got[14] == int(module(torch.tensor([text[:24]]))[0, -1].argmax())
    assert got[15] == int(module(torch.tensor([text[13:25]]))[0, -1].argmax())
    assert got[27] == int(module(torch.tensor([text[13:37]]))[0, -1].argmax())
    assert got[28] == int(module(torch.tensor([text[26:38]]))[0, -1].argmax())


def test_long_prompt_keeps_its_end(small):
    module, model = small
    prompt = torch.randint(0, 64, (50,), generator=torch.Generator().manual_seed(1)).tolist()
    assert list(generate(module, model, prompt, GREEDY)) == list(
        generate(module, model, prompt[-24:], GREEDY)
    )


def test_seed_decides_and_state_of_torch_does_not(small):
    module, model = small
    texts = []
    for torch_seed, seed in ((0, 1), (5, 1), (0, 2)):
        torch.manual_seed(torch_seed)
        texts.append(list(generate(module, model, [1], Sampling(max_tokens=12, temperature=1.0, seed=seed))))
    assert texts[0] == texts[1] != texts[2]


def test_module_and_gradient_mode_are_left_as_they_were(small):
    module, model = small
    module.train()
    tokens = generate(module, model, [1], GREEDY)
    next(tokens)
    assert torch.is_grad_enabled()  # between two tokens, too
    tokens.close()
    assert module.training
    module.eval()


def test_dropout_does_not_disturb_generation():
    model = resolve_model(MODELS["llama"].model_copy(update={"dropout": 0.5, "init_std": 0.2}), vocab_size=64)
    module = build(model, device="cpu").train()
    assert list(generate(module, model, [1], GREEDY)) == list(generate(module, model, [1], GREEDY))


def test_end_token_ends_the_text_and_is_not_yielded(small):
    module, model = small
    whole = list(generate(module, model, [3, 1, 4], GREEDY))
    end = whole[5]
    assert list(generate(module, model, [3, 1, 4], GREEDY, end_id=end)) == whole[: whole.index(end)]


def test_padded_ids_are_never_sampled(small):
    module, model = small
    got = list(generate(module, model, [1], Sampling(max_tokens=80, temperature=10.0), vocab_size=7))
    assert set(got) == set(range(7))


def test_bf16_models_generate(small):
    _, model = small
    module = build(model, device="cpu", seed=4).to(torch.bfloat16)
    assert len(list(generate(module, model, [1, 2], GREEDY))) == 18


@pytest.mark.parametrize(
    ("prompt", "words"), [([], "empty prompt"), ([1, 64], "token id 64"), ([-1, 5], "token id -1")]
)
def test_bad_prompts_are_refused(small, prompt, words):
    with pytest.raises(UserError, match=words):
        next(generate(*small, prompt, GREEDY))


def test_bert_does_not_generate():
    model = resolve_model(ModelSection(arch="bert", layers=1, dim=8, heads=1, vocab_size=64), vocab_size=64)
    with pytest.raises(UserError, match="bert"):
        next(generate(build(model, device="cpu"), model, [1], GREEDY))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("max_tokens", 0),
    ],
)
def test_bad_settings_are_refused(name, value):
    with pytest.raises(UserError, match=f"{name} = {value}"):
        Sampling(**{name: value})


def frequencies(logits: torch.Tensor, sampling: Sampling, draws: int = 4000) -> torch.Tensor:
    randomness = torch.Generator().manual_seed(0)
    drawn = torch.tensor([sample(logits, sampling, randomness) for _ in range(draws)])
    return torch.bincount(drawn, minlength=len(logits)) / draws


LOGITS = torch.tensor([0.1, 0.4, 0.15, 0.05, 0.3]).log()


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(temperature=1.0), [0.1, 0.4, 0.15, 0.05, 0.3]),
        (Sampling(temperature=0.5), [0.01, 0.16, 0.0225, 0.0025, 0.09]),
        (Sampling(temperature=1.0, top_k=2), [0, 0.4, 0, 0, 0.3]),
        (Sampling(temperature=1.0, top_k=99), [0.1, 0.4, 0.15, 0.05, 0.3]),
        (Sampling(temperature=1.0, top_p=0.75), [0, 0.4, 0.15, 0, 0.3]),
        (Sampling(temperature=1.0, top_p=0.69), [0, 0.4, 0, 0, 0.3]),
        (Sampling(temperature=1.0, top_p=1e-9), [0, 1, 0, 0, 0]),
        (Sampling(temperature=1.0, top_k=4, top_p=0.5), [0, 0.4, 0, 0, 0.3]),
        (Sampling(temperature=0), [0, 1, 0, 0, 0]),
        (Sampling(temperature=1e-6), [0, 1, 0, 0, 0]),
    ],
)
def test_sampled_frequencies(sampling, expected):
    expected = torch.tensor(expected) / sum(expected)
    got = frequencies(LOGITS, sampling)
    assert (got[expected == 0] == 0).all()
    assert (got - expected).abs().max() < 4 * 0.5 / 4000**0.5


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-10])
def test_a_temperature_near_zero_takes_the_likeliest(temperature):
    logits = torch.tensor([1.0, 3.0, -50.0, 2.9])
    assert sample(logits, Sampling(temperature=temperature), torch.Generator().manual_seed(0)) == 1


def test_diverged_model_is_named():
    with pytest.raises(UserError, match="not finite"):
        sample(torch.tensor([0.0, float("nan")]), Sampling(), torch.Generator())


TOKENIZERS = {"bytes": bytes_tokenizer(), "bpe": train_bpe(["naïve café — 日本語 🙂🙃 " * 20], 290)}


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=30), kind=st.sampled_from(sorted(TOKENIZERS)))
def test_streamed_pieces_join_to_the_text(text, kind):
    tokenizer = TOKENIZERS[kind]
    pieces = list(stream_text(tokenizer.encode(text), tokenizer.decode))
    assert "".join(pieces) == text
    assert all(pieces)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=200, deadline=None)
@given(
    ids=st.lists(
        st.one_of(st.integers(0, 256), st.sampled_from([0xF0, 0x9F, 0x99, 0x82, 0xE2, 0xFF])), max_size=40
    )
)
def test_streamed_pieces_join_to_the_decoded_whole_for_any_bytes(ids):
    """What an untrained model writes: broken characters, end tokens."""
    tokenizer = TOKENIZERS["bytes"]
    assert "".join(stream_text(ids, tokenizer.decode)) == tokenizer.decode(ids)


def test_a_character_comes_as_soon_as_it_is_whole():
    tokenizer = TOKENIZERS["bytes"]
    seen: list[int] = []

    def feed():
        for token in tokenizer.encode("a🙂b"):
            seen.append(token)
            yield token

    assert [(piece, len(seen)) for piece in stream_text(feed(), tokenizer.decode)] == [
        ("a", 1),
        ("🙂", 5),
        ("b", 6),
    ]


def test_tokens_are_decoded_behind_those_before_them():
    """A decoder that drops the blank at the start of a text, as sentencepiece does."""
    words = ["", " the", " cat", " sat"]

    def decode(ids):
        return "".join(words[i] for i in ids).removeprefix(" ")

    assert list(stream_text([2, 0, 3], decode, before=[1])) == [" cat", " sat"]
    assert list(stream_text([0, 1, 2], decode)) == ["the", " cat"]


def test_generated_text_is_that_of_the_generated_tokens():
    model = resolve_model(
        ModelSection(layers=1, dim=32, heads=2, vocab_size=320, init_std=0.2), vocab_size=320
    )
    module, tokenizer = build(model, device="cpu"), TOKENIZERS["bytes"]
    settings = Sampling(max_tokens=50, temperature=1.5, seed=3)
    prompt = [tokenizer.end_id, *tokenizer.encode("hé")]  # as a document begins in training
    tokens = list(generate(module, model, prompt, settings, vocab_size=257, end_id=256))
    assert "".join(generate_text(module, model, tokenizer, "hé", settings)) == tokenizer.decode(tokens)
    assert "".join(
        generate_text(module, model, tokenizer, "", settings)
    )  # from the end token: a new document
