"""Same weights, same logits and gradients as Hugging Face transformers, for small random models."""

from __future__ import annotations

import pytest
import torch
from families import FAMILIES, small

from fivefold.models.base import build
from fivefold.models.hf import from_hf, from_hf_config, hf_config, to_hf
from fivefold.models.layers import rope_frequencies, rope_table
from fivefold.recipe import ModelSection, count_parameters, resolve_model

transformers = pytest.importorskip("transformers")

SMALL = {"layers": 2, "dim": 48, "heads": 4, "vocab_size": 128, "seq_len": 32}
MODELS = {
    "llama": ModelSection(arch="llama", ffn_dim=96, **SMALL),
    "llama-gqa-tied": ModelSection(arch="llama", kv_heads=2, ffn_dim=80, tie_embeddings=True, **SMALL),
    "llama-mqa-theta": ModelSection(arch="llama", kv_heads=1, rope_theta=500.0, norm_eps=1e-6, **SMALL),
    "llama-wide-heads-biased": ModelSection(
        arch="llama", head_dim=20, kv_heads=2, attention_bias=True, **SMALL
    ),
    "llama-3.1": ModelSection(arch="llama", rope_factor=8.0, rope_context=16, rope_theta=100.0, **SMALL),
    "llama-yarn": ModelSection(
        arch="llama",
        head_dim=16,
        kv_heads=2,
        rope_factor=6.0,
        rope_scaling="yarn",
        rope_context=16,
        rope_theta=50.0,
        rope_low=0.5,
        rope_mscale=1.5,
        **SMALL,
    ),
    "qwen3": ModelSection(arch="qwen3", kv_heads=2, head_dim=16, ffn_dim=72, **SMALL),
    "qwen3-tied-odd": ModelSection(
        arch="qwen3", kv_heads=1, head_dim=6, tie_embeddings=True, **SMALL | {"layers": 1}
    ),
    "olmo2": ModelSection(arch="olmo2", ffn_dim=72, **SMALL),
    "olmo2-gqa-tied-biased": ModelSection(
        arch="olmo2", kv_heads=2, tie_embeddings=True, attention_bias=True, norm_eps=1e-6, **SMALL
    ),
    "olmo2-odd": ModelSection(
        arch="olmo2",
        heads=3,
        kv_heads=1,
        head_dim=10,
        ffn_dim=37,
        rope_factor=4.0,
        rope_context=16,
        **{k: v for k, v in SMALL.items() if k != "heads"},
    ),
    "gpt2": ModelSection(arch="gpt2", **SMALL),
    "gpt2-untied": ModelSection(arch="gpt2", ffn_dim=72, tie_embeddings=False, **SMALL),
    "bert": ModelSection(arch="bert", **SMALL),
    "bert-untied": ModelSection(arch="bert", ffn_dim=72, tie_embeddings=False, **SMALL),
    **{
        arch: small(arch, ffn_dim=fields.get("expert_ffn_dim", 72), **SMALL)
        for arch, fields in FAMILIES.items()
        if "linear_key_heads" not in fields  # test_qwen3_next.py
    },
    "mistral-full": ModelSection(arch="mistral", **SMALL),
    "gemma3-linear": small("gemma3", rope_factor=4.0, rope_scaling="linear", tie_embeddings=False, **SMALL),
    "glm4-biased": small("glm4", attention_bias=True, head_dim=10, **SMALL),
    "gemma3-scaled-scores": small("gemma3", score_width=21, **SMALL),
    "gemma2-uncapped": ModelSection(arch="gemma2", head_dim=10, sliding_window=3, **SMALL),
    "llama-yarn-exact": ModelSection(
        arch="llama", rope_factor=6.0, rope_scaling="yarn", rope_context=16, rope_truncate=False, **SMALL
    ),
    "phi3-whole-heads": ModelSection(arch="phi3", sliding_window=3, **SMALL),
}


@pytest.fixture(params=MODELS, scope="module")
def pair(request):
    """(our module, theirs with the same weights, the model section). Weights are large, biases and norms are
    random: at their initial values a misplaced one would not show."""
    model = resolve_model(MODELS[request.param], vocab_size=128)
    ours = build(model, device="cpu", seed=3)
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in ours.parameters():
            noise = torch.randn(parameter.shape, generator=random)
            parameter.copy_(parameter + 0.3 * noise if parameter.ndim == 1 else 0.15 * noise)
    config = transformers.AutoConfig.for_model(**hf_config(model))
    kind = getattr(transformers, hf_config(model)["architectures"][0])
    theirs = kind._from_config(config, attn_implementation="eager").eval()
    result = theirs.load_state_dict(to_hf(ours.state_dict(), model), strict=False)
    assert not result.unexpected_keys
    assert set(result.missing_keys) <= {*theirs.all_tied_weights_keys, "cls.predictions.bias"}, result
    theirs.tie_weights()
    return ours, theirs, model


def batch(model: ModelSection) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets (3, 32); bert's targets are sparse, as masked ones are."""
    random = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, 128, (3, 32), generator=random)
    targets = torch.randint(0, 128, (3, 32), generator=random)
    hidden = torch.rand(3, 32, generator=random) < (0.85 if model.arch == "bert" else 0.2)
    return tokens, targets.masked_fill(hidden, -100)


def their_loss(theirs, model: ModelSection, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """bert's own loss; a decoder of transformers shifts its labels, ours come shifted from the data."""
    if model.arch == "bert":
        return theirs(tokens, labels=targets).loss
    return torch.nn.functional.cross_entropy(theirs(tokens).logits.flatten(0, 1), targets.flatten())


def test_logits_equal(pair):
    ours, theirs, model = pair
    tokens, _ = batch(model)
    with torch.no_grad():
        expected, got = theirs(tokens).logits, ours(tokens)
    assert expected.std() > 0.3  # not a comparison of zeros
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_loss_and_gradients_equal(pair):
    ours, theirs, model = pair
    tokens, targets = batch(model)
    ours.zero_grad()
    theirs.zero_grad()
    loss, expected = ours(tokens, targets), their_loss(theirs, model, tokens, targets)
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)
    loss.backward()
    expected.backward()
    got = to_hf({name: p.grad for name, p in ours.named_parameters()}, model)
    named = dict(theirs.named_parameters())
    assert len(got) == len(named) - (model.arch == "bert" and not model.tie_embeddings)
    whole = torch.cat([p.grad.flatten() for p in named.values() if p.grad is not None]).norm()
    for name, gradient in got.items():
        if name.endswith("self.key.bias"):  # adds the same to all scores of a query: no effect, gradient 0
            assert gradient.norm() < 1e-6 * whole, name
            continue
        difference = (gradient - named[name].grad).norm() / named[name].grad.norm()
        assert difference < 2e-5, f"{name}: relative difference {difference:.2e}"


def test_state_survives_the_way_out_and_back(pair):
    ours, _, model = pair
    state = ours.state_dict()
    back = from_hf(to_hf(state, model), model)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) for name in state)


def test_config_survives_the_way_out_and_back(pair):
    model = pair[2]
    assert from_hf_config(hf_config(model)) == model


def test_config_of_transformers_is_read(pair):
    """What `save_pretrained` writes (another set of keys than ours) gives the same model."""
    _, theirs, model = pair
    assert from_hf_config(theirs.config.to_dict()) == model


def test_parameters_are_as_many_as_counted(pair):
    ours, _, model = pair
    assert sum(p.numel() for p in ours.parameters()) == count_parameters(model)


def test_bf16_is_close_to_fp32(pair):
    """The module runs in the dtype of its parameters; a loss stays fp32."""
    ours, _, model = pair
    tokens, targets = batch(model)
    half = build(model, device="cpu", seed=None).to(torch.bfloat16)
    half.load_state_dict(ours.state_dict())
    with torch.no_grad():
        logits, expected = half(tokens), ours(tokens)
        loss = half(tokens, targets)
    assert logits.dtype == loss.dtype == torch.float32
    assert (logits - expected).norm() / expected.norm() < 0.03
    assert abs(loss - ours(tokens, targets)) < 0.03


@pytest.mark.parametrize("theta", [10000.0, 500.0])
def test_rotary_table_is_theirs_to_the_bit(theta):
    """Also far out, where angles are large."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    model = resolve_model(ModelSection(dim=256, heads=4, rope_theta=theta, vocab_size=64), vocab_size=64)
    config = transformers.LlamaConfig(**hf_config(model))
    positions = torch.arange(3, 9000)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    got = rope_table(torch.arange(3, 9000), model)
    assert torch.equal(got[0], cos[0, :, :32])
    assert torch.equal(got[1], sin[0, :, :32])


@pytest.mark.parametrize(("theta", "context"), [(100.0, 8192), (10.0, 8192), (10000.0, 4096), (10000.0, 8)])
def test_yarn_has_their_frequencies(theta, context):
    """Also where the limits are beyond the last pair, or before the first."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled = {"rope_scaling": "yarn", "rope_factor": 8.0, "rope_context": context, "rope_high": 32.0}
    section = ModelSection(dim=256, heads=4, rope_theta=theta, vocab_size=64, **scaled)
    model = resolve_model(section, vocab_size=64)
    expected, amplitude = ROPE_INIT_FUNCTIONS["yarn"](transformers.LlamaConfig(**hf_config(model)), "cpu")
    found = rope_frequencies(model, torch.device("cpu"))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert model.rope_amplitude == pytest.approx(amplitude)
