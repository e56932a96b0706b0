"""Export to Hugging Face folders and import from them, against transformers itself."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import stored
import torch
from marks import only
from safetensors.torch import load_file, save_file

from fivefold import files
from fivefold.checkpoint import store, write
from fivefold.checkpoint.source import export_run, import_folder
from fivefold.data import tokenizer
from fivefold.data.tokenizer import train_bpe
from fivefold.errors import UserError
from fivefold.models.base import build
from fivefold.models.hf import from_hf_config, hf_config
from fivefold.recipe import ModelSection, Recipe, TrainSection, load, resolve, resolve_model, to_toml
from fivefold.train.generate import open_run

transformers = pytest.importorskip("transformers")

SMALL = {"layers": 2, "dim": 32, "heads": 4, "seq_len": 16, "vocab_size": 320}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
ARCHS = ("llama", "gpt2", "bert", "qwen3", "olmo2")


def make_run(folder, arch="llama", dtype=torch.float32, tokenizer=True, **fields):
    """A run folder with random weights, as training leaves it."""
    section = ModelSection(arch=arch, **{**SMALL, **fields})
    recipe = resolve(Recipe(model=section, train=TrainSection(steps=1)), vocab_size=300)
    folder.mkdir()
    (folder / "recipe.toml").write_text(to_toml(recipe))
    if tokenizer:
        train_bpe(["the cat sat on the mat. " * 50], 300, mask=arch == "bert").save(folder / "tokenizer.json")
    state = build(recipe.model, device="cpu", seed=2).to(dtype).state_dict()
    write.save(folder / "checkpoints" / "step-00000001", state, None, {"step": 1, "tokens": 64})
    return folder, recipe.model


@only("dtype0-*")
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformers_loads_an_export_and_gives_the_same_logits(tmp_path, arch, dtype):
    run, _ = make_run(tmp_path / "run", arch, dtype)
    export_run(run, tmp_path / "hf")
    auto = transformers.AutoModelForMaskedLM if arch == "bert" else transformers.AutoModelForCausalLM
    theirs, report = auto.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(report.values()), report
    assert theirs.dtype == dtype
    tokens = torch.randint(0, 320, (2, 16))
    ours = open_run(run)[0]
    with torch.no_grad():
        difference = (theirs.eval()(tokens).logits - ours(tokens)).abs().max()
    assert difference < (1e-4 if dtype == torch.float32 else 5e-3)


def test_transformers_loads_the_tokenizer_and_generates(tmp_path):
    run, _ = make_run(tmp_path / "run")
    export_run(run, tmp_path / "hf")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    _, _, ours = open_run(run)
    text = "the cat sät on\n  the mat 123"
    assert theirs(text, add_special_tokens=False).input_ids == ours.encode(text)
    assert theirs.decode(ours.encode(text)) == text
    assert theirs.eos_token_id == ours.end_id
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert model.generation_config.eos_token_id == model.config.eos_token_id == ours.end_id
    assert model.generate(torch.tensor([[1, 2]]), max_new_tokens=3, do_sample=False).shape[1] <= 5


def test_bert_export_knows_its_mask_token(tmp_path):
    run, _ = make_run(tmp_path / "run", "bert")
    export_run(run, tmp_path / "hf")
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "hf").mask_token == "<|mask|>"


@only("True-dtype0-*", "False-dtype1-llama")
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
def test_export_import_export_gives_the_same_bytes(tmp_path, arch, dtype, tied):
    run, model = make_run(tmp_path / "run", arch, dtype, tie_embeddings=tied)
    export_run(run, tmp_path / "first")
    import_folder(tmp_path / "first", tmp_path / "again")
    export_run(tmp_path / "again", tmp_path / "second")
    assert load(tmp_path / "again" / "recipe.toml").model == model
    names = sorted(path.name for path in (tmp_path / "first").iterdir())
    assert "tokenizer_config.json" in names
    assert names == sorted(path.name for path in (tmp_path / "second").iterdir())
    for name in names:
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes(), name


def test_sharded_export_is_read_by_transformers_and_by_us(tmp_path):
    run, _ = make_run(tmp_path / "run")
    export_run(run, tmp_path / "whole")
    export_run(run, tmp_path / "hf", max_shard_bytes=40_000)
    shards = sorted((tmp_path / "hf").glob("model-*.safetensors"))
    assert len(shards) > 2
    assert not (tmp_path / "hf" / "model.safetensors").exists()
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for s in shards for t in load_file(s).values())
    assert all(
        sum(t.nbytes for t in load_file(s).values()) <= 40_000 or len(load_file(s)) == 1 for s in shards
    )
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    ours = open_run(import_folder(tmp_path / "hf", tmp_path / "again"))[0]
    tokens = torch.randint(0, 320, (1, 16))
    with torch.no_grad():
        torch.testing.assert_close(theirs.eval()(tokens).logits, ours(tokens), atol=1e-4, rtol=1e-4)
    export_run(tmp_path / "again", tmp_path / "joined")
    name = "model.safetensors"
    assert (tmp_path / "joined" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_folder_saved_by_transformers_is_imported(tmp_path):
    config = transformers.LlamaConfig(
        vocab_size=77, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=24, tie_word_embeddings=True,
    )  # fmt: skip
    theirs = transformers.LlamaForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path / "hf")
    ours, recipe, tokenizer = open_run(import_folder(tmp_path / "hf", tmp_path / "run"))
    assert recipe.model.tie_embeddings
    assert recipe.model.vocab_size == 77
    assert tokenizer is None
    tokens = torch.randint(0, 77, (1, 24))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, atol=1e-4, rtol=1e-4)


def test_first_gpt2_files_without_prefix_and_with_masks_are_imported(tmp_path):
    run, _ = make_run(tmp_path / "run", "gpt2")
    export_run(run, tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    weights = {name.removeprefix("transformer."): t for name, t in load_file(path).items()}
    save_file(weights | {"h.0.attn.bias": torch.ones(1, 1, 16, 16)}, path)
    import_folder(tmp_path / "hf", tmp_path / "again")
    a, b = (stored.load(store.latest(r)).model for r in (run, tmp_path / "again"))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_first_bert_files_with_gamma_and_pooler_are_imported(tmp_path):
    run, _ = make_run(tmp_path / "run", "bert")
    export_run(run, tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    weights = {}
    for name, tensor in load_file(path).items():
        former = next((name.replace(a, b) for a, b in old.items() if a in name), name)
        weights[former] = tensor
    extra = {"bert.pooler.dense.weight": torch.ones(32, 32), "cls.seq_relationship.bias": torch.ones(2)}
    save_file(weights | extra, path)
    import_folder(tmp_path / "hf", tmp_path / "again")
    a, b = (stored.load(store.latest(r)).model for r in (run, tmp_path / "again"))
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(
    ("arch", "change", "words"),
    [
        (
            "llama",
            {"rope_scaling": {"type": "longrope", "factor": 2.0}},
            ["rope_scaling", '"longrope"', "default", '"linear"'],
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5}},
            ["'factor' is missing"],
        ),
        (
            "llama",
            {"rope_scaling": {"rope_type": "dynamic"}},
            ["rope_scaling", '"dynamic"', '"llama3"', '"yarn"'],
        ),
        ("llama", {"rope_scaling": {"rope_type": "yarn"}}, ["'factor' is missing"]),
        ("llama", {"rope_scaling": YARN | {"attention_factor": 0.5}}, ["attention_factor of 0.5"]),
        ("llama", {"hidden_act": "gelu", "mlp_bias": True}, ["hidden_act = gelu", "silu", "mlp_bias = true"]),
        ("llama", {"sliding_window": 4096}, ["sliding_window = 4096", "null"]),
        ("llama", {"head_dim": 7}, ["model.head_dim = 7 must be even"]),
        (
            "llama",
            {"model_type": "gemma"},
            ['"gemma"', "bert, deepseek_v3, gemma2, gemma3_text, glm4, gpt2, gpt_oss, llama, mis"],
        ),
        ("qwen2", {"use_sliding_window": True}, ["use_sliding_window = true"]),
        ("smollm3", {"no_rope_layers": [1, 0, 0, 1]}, ["no_rope_layers has another pattern", "every n"]),
        (
            "olmo3",
            {"layer_types": ["full_attention", "sliding_attention"]},
            ["layer_types has another pattern"],
        ),
        (
            "olmo3",
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4}, "sliding_attention": YARN}},
            ["scale sliding_attention by themselves"],
        ),
        ("gemma3", {"final_logit_softcapping": 30.0}, ["final_logit_softcapping = 30.0"]),
        ("phi3", {"rope_scaling": {"type": "longrope", "factor": 2.0}}, ['"longrope"']),
        ("qwen3", {"use_sliding_window": True}, ["use_sliding_window = true"]),
        (
            "qwen3_moe",
            {"mlp_only_layers": [0], "decoder_sparse_step": 2},
            ["mlp_only_layers = [0]", "step = 2"],
        ),
        ("olmo2", {"hidden_act": "gelu"}, ["hidden_act = gelu", "silu"]),
        ("llama", {"quantization_config": {"bits": 4}}, ["quantization_config"]),
        ("llama", {"hidden_size": None}, ["dim", "integer"]),
        ("llama", {"num_hidden_layers": 2.5}, ["layers", "integer"]),
        ("llama", {"num_attention_heads": 3, "head_dim": None}, ["model.dim = 32", "model.heads = 3"]),
        ("llama", {"num_key_value_heads": 3}, ["model.kv_heads = 3"]),
        ("llama", {"rms_norm_eps": None}, ["wrong type"]),
        ("llama", {"rope_scaling": [1]}, ["wrong type"]),
        ("llama", {"model_type": ["llama"]}, ["model_type", "supported"]),
        ("llama", {"hidden_size": -32, "head_dim": None}, ["dim"]),
        ("llama", {"num_attention_heads": 0}, ["heads"]),
        ("gpt2", {"activation_function": "relu"}, ["activation_function = relu", "gelu_new"]),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, ["scale_attn_by_inverse_layer_idx"]),
        ("bert", {"hidden_act": "gelu_new"}, ["hidden_act = gelu_new"]),
        ("bert", {"position_embedding_type": "relative_key"}, ["position_embedding_type = relative_key"]),
        ("bert", {"type_vocab_size": 3}, ["type_vocab_size = 3", "2"]),
    ],
)
def test_configs_that_we_do_not_compute_are_refused(arch, change, words):
    model = resolve(
        Recipe(model=ModelSection(arch=arch, **SMALL), train=TrainSection(steps=1)), vocab_size=300
    )
    config = hf_config(model.model) | change
    with pytest.raises(UserError) as refusal:
        from_hf_config(config)
    assert all(word in str(refusal.value) for word in ["config.json", *words]), str(refusal.value)


@pytest.mark.parametrize(
    ("kind", "weights", "words"),
    [
        (
            "gemma",
            [],
            "kind is llama, and the first difference: hidden_act = gelu_pytorch_tanh; only silu or",
        ),
        ("gpt_neox", [], "kind is smollm3, and the first difference: hidden_act = gelu; only silu or"),
        ("phimoe", [], "kind is mixtral, and the first difference: router_jitter_noise = 0.01; only 0.0"),
        (
            "granite",
            [],
            "kind is smollm3, and the first difference: smollm3 has no attention_multiplier = 1.0, embedding_",
        ),
        ("stablelm", [], "kind is smollm3, and the first difference: .*partial_rotary_factor 0.25"),
        ("glm", [], "kind is llama, and the first difference: rope_parameters has partial_rotary_factor 0.5"),
        (
            "olmo",
            ["q_proj.weight", "q_scale.weight"],
            r"kind is .*: model.layers.0.self_attn.q_scale.weight is no weight of ",
        ),
    ],
)
def test_of_an_unknown_kind_the_nearest_and_the_first_difference_are_named(tmp_path, kind, weights, words):
    config = json.loads(transformers.AutoConfig.for_model(kind).to_json_string())
    names = [f"model.layers.3.self_attn.{name}" for name in weights]
    if names:
        save_file({name: torch.zeros(1) for name in names}, tmp_path / "model.safetensors")
    with pytest.raises(
        UserError, match=f'"{kind}" is not supported; the nearest {words}.*Supported: bert, deep'
    ):
        from_hf_config(config, tmp_path)


def test_llama_3_1_and_heads_of_their_own_width_are_read():
    model = resolve_model(ModelSection(**SMALL), vocab_size=300)
    scaled = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaled |= {"rope_type": "llama3", "original_max_position_embeddings": 8192}
    config = hf_config(model) | {"rope_scaling": scaled, "head_dim": 64, "attention_bias": True}
    got = from_hf_config(config)
    assert (got.rope_factor, got.rope_low, got.rope_high, got.rope_context) == (8, 1, 4, 8192)
    assert (got.head_width, got.attention_bias) == (64, True)


@pytest.mark.parametrize(
    ("more", "mscale"),
    [
        ({}, 1.0),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 0.0),
        ({"attention_factor": 1 + 0.2 * math.log(4)}, 2.0),
    ],
)
def test_yarn_is_read(more, mscale):
    model = resolve_model(ModelSection(**SMALL), vocab_size=300)
    got = from_hf_config(hf_config(model) | {"rope_scaling": YARN | more})
    assert (got.rope_scaling, got.rope_factor, got.rope_low, got.rope_high, got.rope_context) == (
        "yarn",
        4,
        1,
        32,
        64,
    )
    assert got.rope_mscale == mscale
    assert from_hf_config(hf_config(got)) == got


@pytest.fixture
def exported(tmp_path):
    run, _ = make_run(tmp_path / "run", tie_embeddings=True)
    return export_run(run, tmp_path / "hf")


def refusal(folder, tmp_path) -> str:
    with pytest.raises(UserError) as error:
        import_folder(folder, tmp_path / "new")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "run"]  # nothing half-made stays behind
    return str(error.value)


def change_weights(folder, **change) -> None:
    """A value of None removes the weight."""
    path = folder / "model.safetensors"
    weights = load_file(path) | {name.replace("__", "."): t for name, t in change.items()}
    save_file({name: t for name, t in weights.items() if t is not None}, path)


def test_missing_unknown_and_misshaped_weights_are_named(exported, tmp_path):
    change_weights(exported, model__norm__weight=None, extra=torch.ones(1))
    message = refusal(exported, tmp_path)
    assert "model.norm.weight is missing" in message
    assert "extra is not part of LlamaForCausalLM" in message
    change_weights(exported, model__norm__weight=torch.ones(31), extra=None)
    message = refusal(exported, tmp_path)
    assert "model.norm.weight has shape (31,), config.json asks for (32,)" in message


def test_tied_weight_stored_twice_must_be_equal(exported, tmp_path):
    change_weights(exported, lm_head__weight=torch.ones(320, 32))
    assert "lm_head.weight differs from model.embed_tokens.weight" in refusal(exported, tmp_path)
    embedding = load_file(exported / "model.safetensors")["model.embed_tokens.weight"]
    change_weights(exported, lm_head__weight=embedding.clone())
    import_folder(exported, tmp_path / "new")


def test_quantised_and_mixed_weights_are_refused(exported, tmp_path):
    name = "model.layers.0.self_attn.q_proj.weight"
    change_weights(exported, **{name: torch.ones(32, 32, dtype=torch.int8)})
    assert f"{name} has dtype int8" in refusal(exported, tmp_path)


def test_pickles_are_refused_and_never_opened(exported, tmp_path):
    (exported / "model.safetensors").unlink()
    (exported / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    message = refusal(exported, tmp_path)
    assert "pytorch_model.bin" in message
    assert "save_pretrained" in message


def test_broken_files_are_named(exported, tmp_path):
    path = exported / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    assert "model.safetensors is not a complete safetensors file" in refusal(exported, tmp_path)
    path.unlink()
    assert "neither model.safetensors nor" in refusal(exported, tmp_path)
    path.write_bytes(whole)
    (exported / "config.json").write_text('{"model_type": ')
    assert "config.json: not JSON" in refusal(exported, tmp_path)
    (exported / "config.json").unlink()
    assert "config.json: cannot be read" in refusal(exported, tmp_path)


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("../secret.safetensors", "not the name of a file beside it"),
        ("gone.safetensors", "gone.safetensors is missing"),
        ("a\0.safetensors", "its name has a NUL"),
    ],
)
def test_index_may_name_only_files_beside_it(exported, tmp_path, file, words):
    index = {"weight_map": {"model.norm.weight": file}}
    (exported / "model.safetensors.index.json").write_text(json.dumps(index))
    assert words in refusal(exported, tmp_path)


def test_weights_of_a_module_of_the_users_own_are_named(tmp_path):
    """`fivefold.train(model=...)` writes a recipe whose [model] does not describe the weights."""
    recipe = load("quickstart", ["model.layers=1", "model.vocab_size=64", "train.steps=1"])
    (tmp_path / "recipe.toml").write_text(to_toml(resolve(recipe, vocab_size=64)))
    write.save(store.folder_of(tmp_path, 1), {"mine.weight": torch.zeros(2)}, None, {"step": 1, "tokens": 1})
    with pytest.raises(UserError, match="custom module"):
        export_run(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match="custom module"):
        open_run(tmp_path)


def test_a_recipe_of_another_size_is_said(tmp_path):
    run, _ = make_run(tmp_path / "run")
    recipe = run / "recipe.toml"
    recipe.write_text(recipe.read_text().replace("dim = 32", "dim = 64"))
    for read in (open_run, lambda run: export_run(run, tmp_path / "out")):
        with pytest.raises(UserError, match=r"has shape \(.*32\), but \[model\] in recipe.toml asks for"):
            read(run)


def test_a_tokenizer_that_is_none_is_not_imported(exported, tmp_path, monkeypatch):
    path = exported / "tokenizer.json"
    path.write_bytes(bytes(1000))
    assert "not a tokenizer.json" in refusal(exported, tmp_path)
    monkeypatch.setattr(tokenizer, "MOST_BYTES", 1 << 10)
    path.write_bytes(bytes((1 << 10) + 1))
    assert "tokenizer.json has more than 1,024 bytes" in refusal(exported, tmp_path)
    path.unlink()
    monkeypatch.setattr(files, "MOST_JSON", 1 << 10)
    (exported / "generation_config.json").write_bytes(bytes((1 << 10) + 1))
    assert "generation_config.json has more than 1,024 bytes" in refusal(exported, tmp_path)


def test_the_current_folder_is_filled_when_it_is_empty(exported, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    export_run(tmp_path / "run", Path("."))
    assert {p.name for p in Path().iterdir()} == {p.name for p in exported.iterdir()}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["here", "hf", "run"]


def test_an_existing_folder_is_not_overwritten(exported, tmp_path):
    with pytest.raises(UserError, match="exists and is not an empty folder"):
        export_run(tmp_path / "run", exported)
    with pytest.raises(UserError, match="exists and is not an empty folder"):
        import_folder(exported, tmp_path / "run")
