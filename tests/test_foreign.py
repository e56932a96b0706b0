"""Configurations of Hugging Face, torchtitan and Megatron-LM, read as recipes by `fivefold plan`."""

import json
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from typer.testing import CliRunner

from fivefold.cli.main import app
from fivefold.data import prepare
from fivefold.errors import UserError
from fivefold.observe.metrics import read_metrics
from fivefold.recipe import Recipe, load
from fivefold.recipe.load import read_foreign
from fivefold.recipe.messages import KEYS, SECTIONS
from fivefold.train.start import run_command
from fivefold_plan.commands import plan as plan_cli
from fivefold_plan.foreign import KINDS, Reading
from fivefold_plan.foreign import tables as tables_of

MEGATRON = """#!/bin/bash
TP=2   # a comment with --num-layers 99
SIZE=${SIZE:-"256"}
GPUS_PER_NODE=8
MODEL_ARGS=(
    --num-layers 8
    --hidden-size $SIZE
    --ffn-hidden-size 512
    --num-attention-heads 8
    --group-query-attention
    --num-query-groups 4
    --seq-length 1024
    --max-position-embeddings 1024
    --position-embedding-type rope
    --rotary-base 500000
    --swiglu
    --normalization RMSNorm
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0.1
    --hidden-dropout 0.0
)
TRAINING_ARGS="--micro-batch-size 2 --global-batch-size 64 \\
  --train-samples 6400 --lr 0.0003 --min-lr=3e-5 --lr-decay-style cosine --weight-decay 0.1 --adam-beta2 0.95 --bf16"
LAYOUT=(--tensor-model-parallel-size ${TP} --sequence-parallel --pipeline-model-parallel-size 2
  --num-layers-per-virtual-pipeline-stage 2 --use-distributed-optimizer --recompute-granularity full
  --recompute-method block --recompute-num-layers 1 --overlap-grad-reduce --made-up-option 7 --data-path $DATA)
torchrun --nproc_per_node $GPUS_PER_NODE --nnodes 1 pretrain_gpt.py ${MODEL_ARGS[@]} ${TRAINING_ARGS} ${LAYOUT[@]} \\
  --vocab-size 32000 --tensorboard-dir logs
"""
TORCHTITAN = """
[job]
description = "a run"
[model]
name = "llama3"
flavor = "8B"
converters = ["float8"]
[optimizer]
lr = 3e-4
[lr_scheduler]
decay_type = "cosine"
min_lr_factor = 0.1
[training]
local_batch_size = 2
seq_len = 8192
steps = 3000
dataset = "c4"
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 8
enable_async_tensor_parallel = true
pipeline_parallel_degree = 2
pipeline_parallel_schedule = "Interleaved1F1B"
pipeline_parallel_layers_per_stage = 9
[activation_checkpoint]
mode = "full"
[quantize.linear.float8]
recipe_name = "rowwise"
[my_section]
my_key = 1
"""
HUGGING_FACE = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "pretraining_tp": 1,
    "attention_dropout": 0.1,
    "torch_dtype": "bfloat16",
    "made_up": 3,
}
RUNNER = CliRunner()


def write(folder: Path, name: str, text: str | dict[str, Any]) -> Path:
    path = folder / name
    path.write_text(text if isinstance(text, str) else json.dumps(text))
    return path


def reading(path: Path, devices: int = 0) -> Reading:
    found = read_foreign(path, devices)
    assert found is not None
    return found


def planned(path: Path, devices: int, *options: str) -> tuple[str, Recipe]:
    """What `plan` prints, and the recipe that it saves, which `check` accepts."""
    saved = path.with_name("saved.toml")
    words = [str(path), "--cluster", f"h100:{devices}", "--save", str(saved), *options]
    result = RUNNER.invoke(app, ["plan", *words])
    assert result.exit_code == 0, result.output
    checked = RUNNER.invoke(app, ["check", str(saved), "--no-data"])
    assert checked.exit_code == 0, checked.output
    return result.stdout, load(saved)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.NAME)
def test_tables_name_fields_of_the_schema(kind: Any) -> None:
    tables = tables_of(kind)
    copied, words = tables.get("copied", {}), tables.get("words", {})
    fields = {*copied.values(), *tables.get("meant", {})}
    fields |= {name for names in tables.get("derived", {}).values() for name in names.split(", ")}
    assert fields - {"[model]", "--cluster", ""} <= KEYS.keys()
    assert words.keys() <= copied.keys()
    assert not copied.keys() & tables.get("derived", {}).keys()
    known = {*copied, *tables.get("derived", {}), *" ".join(tables.get("lacking", {}).values()).split()}
    assert {new.partition("=")[0] for new in tables.get("earlier", {}).values()} <= known
    for key, table in words.items():
        for word, ours in table.items():
            for name, value in (ours if isinstance(ours, dict) else {copied[key]: ours}).items():
                if word != "*":
                    section, _, field = name.partition(".")
                    SECTIONS[section].model_validate({field: value})
    for models in tables.get("flavors", {}).values():
        for model in models.values():
            assert f"model.{next(iter(model.keys() - {'base'}), 'arch')}" in KEYS
            assert load(model["base"])


def test_megatron(tmp_path: Path) -> None:
    path = write(tmp_path, "train.sh", MEGATRON)
    text, recipe = planned(path, 16)
    model, layout, optim, train = recipe.model, recipe.layout, recipe.optim, recipe.train
    assert (model.arch, model.layers, model.dim, model.heads, model.kv_heads) == ("llama", 8, 256, 8, 4)
    assert (model.ffn_dim, model.vocab_size, model.seq_len) == (512, 32000, 1024)
    assert (model.rope_theta, model.tie_embeddings, model.dropout) == (500000.0, False, 0.0)
    assert (layout.tp, layout.sp, layout.pp, layout.dp_shard, layout.zero) == (2, True, 2, 4, 1)
    assert (layout.schedule, layout.virtual_stages, layout.recompute) == (
        "interleaved", 2, "full")  # fmt: skip
    assert (train.microbatch_size, train.global_batch_size, train.tokens) == (2, 64, 6400 * 1024)
    assert (optim.lr, optim.min_lr, optim.schedule, optim.betas) == (3e-4, 3e-5, "cosine", (0.9, 0.95))
    assert recipe.precision.mode == "bf16"
    assert "searched" not in text
    assert "not understood: --made-up-option = 7: not known here" in text
    assert "not understood: --attention-dropout = 0.1: " in text
    assert "not understood: --recompute-method = block: layout.recompute lists blocks" in text
    for key in ("--tensorboard-dir", "--data-path", "--overlap-grad-reduce", "--max-position-embeddings"):
        assert re.search(rf"no effect on a plan \(.*\): .*{key}\b", text), key


def test_megatron_has_the_devices_of_its_launcher(tmp_path: Path) -> None:
    """Where --cluster has no number."""
    path = write(tmp_path, "train.sh", MEGATRON)
    assert reading(path).fields["layout.dp_shard"] == 2
    assert reading(path, 64).fields["layout.dp_shard"] == 16
    path.write_text(MEGATRON.replace("--nnodes 1", "--nnodes $NODES"))
    found = reading(path)
    assert (found.fields["layout.dp_shard"], found.fields["layout.zero"]) == (1, 0)
    assert any("4 devices" in note for note in found.notes)
    assert "--nnodes = $NODES" in found.missing


def test_megatron_yaml(tmp_path: Path) -> None:
    """The same keys in YAML, flat or below sections, with dashes or not."""
    lines = {
        "num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 128, "bf16": "true",
        "micro_batch_size": 1, "train_iters": 10, "lr": "1.5e-4", "sequence_parallel": "false",
        "tokenizer_type": "GPT2BPETokenizer", "lr_decay_style": "inverse-square-root", "hidden_dropout": 0.0,
        "recompute_granularity": "selective",
    }  # fmt: skip
    text = 'ENV_VARS:\n  NCCL_IB_SL: 1\nMETRICS:\n  - "loss"\nMODEL_ARGS:\n'
    dashed = text + "".join(f"  --{key.replace('_', '-')}: {value}\n" for key, value in lines.items())
    plain = "language_model:\n" + "".join(f"  {key}: {value}  # why\n" for key, value in lines.items())
    one = reading(write(tmp_path, "one.yaml", dashed), 2)
    two = reading(write(tmp_path, "two.yml", plain), 2)
    assert one.fields == two.fields
    assert one.missing == two.missing
    assert one.unused["how processes start"] == ["--NCCL_IB_SL", "--METRICS"]
    assert one.unused["switched off"] == ["--sequence-parallel"]
    fields = one.fields
    assert (fields["model.arch"], fields["model.vocab_size"], fields["model.ffn_dim"]) == ("gpt2", 50304, 256)
    assert (fields["layout.dp_replicate"], fields["layout.zero"], "layout.sp" in fields) == (2, 0, False)
    assert (fields["optim.lr"], fields["optim.schedule"], fields["model.dropout"]) == (1.5e-4, "linear", 0.0)
    assert (fields["layout.recompute"], fields["train.global_batch_size"]) == ("selective", 2)
    assert one.missing["--lr-decay-style = inverse-square-root"].startswith("optim.schedule has only")
    assert planned(tmp_path / "one.yaml", 2)[1].model.vocab_size == 50304
    more = "\n  moe_freq:\n    - 1\n    - 2\n  finetune:\n    false\n  fp8_hybrid: false\n"
    three = reading(write(tmp_path, "three.yaml", plain + more), 2)
    assert (three.fields, three.missing["--moe-freq = 1 2"]) == (two.fields, "not known here")
    assert three.unused["switched off"] == ["--sequence-parallel", "--fp8-hybrid"]


def test_megatron_experts(tmp_path: Path) -> None:
    experts = "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 128 --expert-model-parallel-size 4"
    more = "--moe-shared-expert-intermediate-size 256 --moe-aux-loss-coeff 1e-2"
    text = MEGATRON.replace("--swiglu", f"--swiglu {experts} {more}")
    _, recipe = planned(write(tmp_path, "moe.sh", text), 16)
    model = recipe.model
    assert (model.arch, model.experts, model.experts_per_token, model.expert_ffn_dim) == ("moe", 8, 2, 128)
    assert (model.shared_experts, model.aux_loss_weight, recipe.layout.ep) == (2, 0.01, 4)
    sigmoid = "--moe-router-score-function sigmoid --moe-router-pre-softmax --moe-layer-freq 2"
    found = reading(write(tmp_path, "sigmoid.sh", text.replace("256 --moe", f"192 {sigmoid} --moe")), 16)
    assert "model.router_normalize" not in found.fields  # scores are always divided by their sum there
    assert (found.fields["model.shared_experts"], "model.dense_layers" in found.fields) == (1, False)
    assert {"--moe-layer-freq = 2", "--moe-shared-expert-intermediate-size = 192"} <= found.missing.keys()


CUT = "--expert-tensor-parallel-size"


@pytest.mark.parametrize(
    ("cut", "sp", "fold", "missing"),
    [
        (1, True, True, ""),
        (2, False, None, ""),
        (2, True, None, "experts are whole with layout.sp, and cut by layout.tp without it"),
        (1, False, None, "experts are whole with layout.sp, and cut by layout.tp without it"),
        (4, True, None, "an expert is whole, or cut by all of layout.tp = 2"),
    ],
)
def test_megatron_experts_cut_by_tensor_parallelism(
    tmp_path: Path, cut: int, sp: bool, fold: bool | None, missing: str
):
    """Whole ones are on an expert axis that takes in the tensor axis: 8 of them on 16 devices in two stages."""
    experts = f"--num-experts 8 --moe-ffn-hidden-size 128 --expert-model-parallel-size 8 {CUT} {cut}"
    text = MEGATRON.replace("--swiglu", f"--swiglu {experts}")
    path = write(tmp_path, "moe.sh", text if sp else text.replace("--sequence-parallel", ""))
    found = reading(path, 16)
    assert found.fields.get("layout.ep_fold") == fold
    assert found.missing.get(f"{CUT} = {cut}", "") == missing
    assert (CUT in found.understood) == (not missing)
    if fold:
        assert planned(path, 16)[1].layout.ep == 8


def test_experts_cut_by_themselves(tmp_path: Path) -> None:
    """What the other program does where its file does not say how experts are cut: by all of tp, or not at all."""
    text = MEGATRON.replace("--swiglu", "--swiglu --num-experts 8 --expert-model-parallel-size 4")
    (note,) = (note for note in reading(write(tmp_path, "moe.sh", text), 16).notes if "--expert" in note)
    assert note.startswith(f"{CUT} is 2 there by itself: experts are whole")
    titan = '[model]\nname = "qwen3"\nflavor = "30B-A3B"\n[parallelism]\ntensor_parallel_degree = 4\n'
    path = write(tmp_path, "moe.toml", titan + "expert_parallel_degree = 32\n")
    assert reading(path, 64).fields["layout.ep_fold"]
    assert planned(path, 64)[1].layout.ep == 32


@pytest.mark.parametrize(("old", "new", "words"), [
    ("--swiglu", "--squared-relu", "the nearest is llama, which has no --squared-relu"),
    ("--swiglu", "--swiglu --multi-latent-attention", "the nearest is llama, which has no --multi-latent"),
    ("pretrain_gpt.py", "pretrain_bert.py", "the nearest is llama, which has no --pretrain_bert"),
    ("--hidden-size $SIZE", "", "--hidden-size has no value, or several: must be a whole number >= 1"),
    ("--num-attention-heads 8", "--num-attention-heads many", '-heads: heads = "many": must be a whole number'),
    ("--global-batch-size 64", "--global-batch-size -64", "-size: global_batch_size = -64: must be a whole"),
    ("--num-layers-per-virtual-pipeline-stage 2", "--num-layers-per-virtual-pipeline-stage x",
     "--num-layers-per-virtual-pipeline-stage = 'x': must be a whole number >= 0"),
])  # fmt: skip
def test_megatron_mistakes(tmp_path: Path, old: str, new: str, words: str) -> None:
    path = write(tmp_path, "train.sh", MEGATRON.replace(old, new))
    result = RUNNER.invoke(app, ["plan", str(path), "--cluster", "h100:16"])
    assert words in str(result.exception)
    assert isinstance(result.exception, UserError)


def test_megatron_small_differences_are_named(tmp_path: Path) -> None:
    """They hardly change a plan. Numbers may begin with a point."""
    text = MEGATRON.replace("--disable-bias-linear", "--add-qkv-bias").replace("--lr 0.0003", "--lr .0003")
    found = reading(write(tmp_path, "train.sh", text.replace("RMSNorm", "LayerNorm")), 16)
    normed = "the nearest is llama, which has --normalization=RMSNorm"
    assert found.missing["--normalization = LayerNorm"] == normed
    assert found.missing["--add-qkv-bias = True"] == "the nearest is llama, which has no --add-qkv-bias"
    assert (
        found.missing["--disable-bias-linear = None"]
        == "the nearest is llama, which has --disable-bias-linear"
    )
    assert (found.fields["model.arch"], found.fields["optim.lr"]) == ("llama", 3e-4)


def test_megatron_in_a_shell(tmp_path: Path) -> None:
    """Arrays and assignments on a line, redirections and other commands behind an argument, arguments in a variable."""
    start, end = MEGATRON.index("LAYOUT=("), MEGATRON.index("torchrun")
    layout = """A=1; TP=2
MORE="--use-distributed-optimizer"
LAYOUT=(--sequence-parallel $MORE --tensor-model-parallel-size $TP --pipeline-model-parallel-size 2)
"""
    text = (
        MEGATRON[:start] + layout + MEGATRON[end:].replace("--tensorboard-dir logs", "--bf16 2>&1 | tee log")
    )
    found = reading(write(tmp_path, "train.sh", text), 16)
    fields = found.fields
    assert [fields[f"layout.{name}"] for name in ("tp", "pp", "sp", "zero")] == [2, 2, True, 1]
    assert fields["precision.mode"] == "bf16"
    for words, zero in (("--use-megatron-fsdp", 3), ("--use-megatron-fsdp --data-parallel-sharding-strategy optim", 1),
                        ("--data-parallel-sharding-strategy optim_grads", 1), ("--use-torch-fsdp2", 3)):  # fmt: skip
        assert reading(write(tmp_path, "fsdp.sh", f"{text} {words}"), 16).fields["layout.zero"] == zero


def test_megatron_names_what_has_no_effect_or_two_values(tmp_path: Path) -> None:
    text = MEGATRON.replace(
        "--group-query-attention", "--num-layer 4 --lr 0.1 --save-interval 5 --save-interval 6"
    )
    found = reading(write(tmp_path, "train.sh", text), 16)
    assert "model.kv_heads" not in found.fields
    assert found.missing["--num-query-groups = 4"] == "it has no effect without --group-query-attention"
    assert found.missing["--num-layer = 4"] == "not known here; did you mean '--num-layers'?"
    assert found.missing["--lr (earlier) = 0.1"] == "the last one counts"
    assert (found.fields["optim.lr"], found.fields["checkpoint.every"]) == (3e-4, 6)


def test_a_variable_does_not_grow_without_end(tmp_path: Path) -> None:
    lines = "A=12345678\n" + "\n".join(f"A{i + 1}=$A{i}$A{i}" for i in range(60)).replace("$A0", "$A")
    found = reading(write(tmp_path, "train.sh", MEGATRON + lines + "\n--split $A60 --made-up $A60\n"), 16)
    assert max(map(len, found.missing)) < 200


def test_a_variable_with_two_values_is_not_guessed(tmp_path: Path) -> None:
    text = MEGATRON.replace("TP=2", "if [ $BIG ]; then\nTP=8\nelse\nTP=2\nfi\n")
    found = reading(write(tmp_path, "train.sh", text), 16)
    assert found.missing["--tensor-model-parallel-size = $TP"] == "the file does not say its value"
    assert "layout.tp" not in found.fields


def test_torchtitan(tmp_path: Path) -> None:
    text, recipe = planned(write(tmp_path, "llama.toml", TORCHTITAN), 32)
    model, layout, optim, train = recipe.model, recipe.layout, recipe.optim, recipe.train
    assert (model.arch, model.layers, model.dim, model.kv_heads, model.ffn_dim) == (
        "llama",
        32,
        4096,
        8,
        14336,
    )
    assert (model.vocab_size, model.seq_len, model.rope_factor) == (128256, 8192, 8.0)
    assert (layout.tp, layout.sp, layout.pp, layout.dp_shard, layout.zero) == (8, True, 2, 2, 2)
    assert (layout.schedule, layout.virtual_stages, layout.recompute) == ("interleaved", 2, "full")
    assert (train.steps, train.microbatch_size, train.global_batch_size) == (3000, 1, 4)
    assert (optim.schedule, optim.lr, optim.min_lr, optim.warmup_steps) == (
        "cosine",
        3e-4,
        pytest.approx(3e-5),
        200,
    )
    assert (recipe.precision.mode, recipe.precision.fp8_scaling) == ("fp8", "row")
    assert "searched" not in text
    assert "not understood: my_section.my_key = 1: not known here" in text
    assert (
        "not understood: parallelism.pipeline_parallel_layers_per_stage = 9: set layout.virtual_stages"
        in text
    )
    assert "not understood: parallelism.enable_async_tensor_parallel = True: layout.tp_chunks" in text
    assert "training.dataset" in text
    assert "job.description" in text


def test_torchtitan_defaults_and_earlier_names(tmp_path: Path) -> None:
    text = '[model]\nflavor="debugmodel"\n[training]\nbatch_size = 4\ntensor_parallel_degree = 2\nwarmup_steps = 7\n'
    found = reading(write(tmp_path, "old.toml", text), 8)
    fields = found.fields
    assert (fields["layout.tp"], fields["layout.dp_shard"], fields["layout.zero"]) == (2, 4, 3)
    assert (fields["train.microbatch_size"], fields["train.global_batch_size"]) == (4, 16)
    assert (fields["optim.warmup_steps"], fields["model.dim"], fields["train.steps"]) == (7, 256, 10_000)
    assert fields["layout.recompute"] == "selective"
    assert any(key.startswith("activation_checkpoint.selective_ac_option") for key in found.missing)
    assert fields["data.tokenizer"] == "bpe:2048"
    for name in ("float8", "quantize.linear.float8"):
        converted = reading(
            write(tmp_path, "fp8.toml", text.replace("[training]", f'converters=["{name}"]\n[training]'))
        )
        assert converted.fields["precision.mode"] == "fp8"


@pytest.mark.parametrize(("name", "text", "words"), [
    ("a.toml", TORCHTITAN.replace("8B", "debug"), "model.flavor = 'debug': no such model here; did you mean"),
    ("a.toml", TORCHTITAN.replace("llama3", "llama4"), "model.name = 'llama4': no such model here; did you mean"),
    ("a.toml", TORCHTITAN.replace("8192", '"long"'), 'training.seq_len: seq_len = "long": must be'),
    ("a.toml", TORCHTITAN.replace("3000", "[1, 2]"), "training.steps: steps = [1, 2]: must be a whole number"),
    ("a.toml", "[training]\nsteps = = 3\n", "not valid TOML"),
    ("a.py", "from torchtitan.trainer import Trainer\n", "configurations in Python are programs"),
    ("a.json", '{"hidden_size": 3}', 'model_type = "None" is not supported'),
    ("a.json", '{"model_type": "llama",', "a.json"),
    ("a.json", json.dumps(HUGGING_FACE | {"model_type": "granite"}), 'model_type = "granite" is not supported; the '
     "nearest kind is llama, and the first difference: llama has no made_up = 3"),
    ("a.json", json.dumps(HUGGING_FACE | {"hidden_act": "gelu"}), "hidden_act = gelu; only silu or swish"),
    ("a.yaml", "num_layers: 3\nwhat is this\n", '--num-layers: layers = "3 what is this": must be'),
    ("a.toml", TORCHTITAN + "[checkpoint]\ninterval = 'often'", 'checkpoint.interval: every = "often": must be'),
    ("a.toml", TORCHTITAN.replace("batch_size = 2", "batch_size = 3").replace("pipeline_parallel_layers_per_stage = 9",
     "pipeline_parallel_microbatch_size = 2"), "training.local_batch_size: must be a multiple of 2"),
    ("a.json", '["model_type"]', "a.json"),
])  # fmt: skip
def test_mistakes(tmp_path: Path, name: str, text: str, words: str) -> None:
    result = RUNNER.invoke(app, ["plan", str(write(tmp_path, name, text)), "--cluster", "h100:16"])
    assert isinstance(result.exception, UserError)
    assert words in str(result.exception)


def test_hugging_face(tmp_path: Path) -> None:
    path = write(tmp_path, "config.json", HUGGING_FACE)
    text, recipe = planned(path, 1)
    model = recipe.model
    assert (model.arch, model.layers, model.dim, model.heads, model.kv_heads) == ("llama", 4, 256, 8, 2)
    assert (model.ffn_dim, model.vocab_size, model.rope_theta, model.norm_eps) == (688, 32000, 500000.0, 1e-5)
    assert (model.seq_len, recipe.train.global_batch_size) == (2048, 2048)
    assert "not understood: made_up = 3: not known here" in text
    assert "not understood: attention_dropout = 0.1: here it is 0.0" in text
    assert "(about stored weights, generation, code): torch_dtype" in text
    assert reading(path).understood["pretraining_tp"] == "[model]"
    assert reading(tmp_path).fields == reading(path).fields


@pytest.mark.slow
def test_a_search_says_it_too(tmp_path: Path) -> None:
    """As does a plan whose layout is searched, since such a file has none."""
    path = write(tmp_path, "config.json", HUGGING_FACE)
    words = [str(tmp_path), "--cluster", "h100:2", "--top", "1"]
    assert "not understood: made_up = 3" in RUNNER.invoke(app, ["plan", "search", *words]).stdout
    text, recipe = planned(path, 2)
    assert f"searched: the layout of {path}" in text
    assert recipe.layout.dp_replicate * recipe.layout.dp_shard == 2


def test_json_has_it(tmp_path: Path) -> None:
    path = write(tmp_path, "config.json", HUGGING_FACE)
    found = json.loads(RUNNER.invoke(app, ["plan", str(path), "--cluster", "h100:1", "--json"]).stdout)[
        "read"
    ]
    assert found["kind"] == "Hugging Face"
    assert found["missing"]["made_up = 3"] == "not known here"
    assert found["understood"]["hidden_size"] == "[model]"


def test_nothing_is_measured_for_a_recipe() -> None:
    with mock.patch.object(plan_cli, "ensure_measured") as measured:
        assert plan_cli.told("quickstart", "cpu:2", json=True) == {}
    measured.assert_not_called()


@pytest.mark.parametrize("command", ["check", "train"])
@pytest.mark.parametrize(("name", "text", "kind"), [
    ("run.sh", MEGATRON, "Megatron-LM"),
    ("run.toml", TORCHTITAN, "torchtitan"),
    ("config.json", json.dumps(HUGGING_FACE), "Hugging Face"),
])  # fmt: skip
def test_other_commands_say_what_to_do(tmp_path: Path, command: str, name: str, text: str, kind: str) -> None:
    path = write(tmp_path, name, text)
    with pytest.raises(UserError, match=f"is a configuration of {kind}, not a recipe.*--save recipe.toml"):
        load(path)
    assert kind in str(RUNNER.invoke(app, [command, str(path)]).exception)


def tiny_script() -> str:
    script = MEGATRON
    for old, new in (("1024", "32"), ("256", "32"), ("TP=2", "TP=1"), ("parallel-size 2", "parallel-size 1"), (
        "32000", "384"), ("--train-samples 6400", "--train-iters 2"), ("batch-size 64", "batch-size 8")):  # fmt: skip
        script = script.replace(old, new)
    return script


@pytest.mark.slow
@pytest.mark.parametrize(("name", "text", "devices", "sets"), [
    ("train.sh", tiny_script(), 2, []),
    ("train.toml", '[model]\nflavor="debugmodel"\n[training]\nlocal_batch_size=2\nseq_len=32\nsteps=2\n', 2, []),
    ("config.json", json.dumps(HUGGING_FACE | {"max_position_embeddings": 32}), 1,
     ["train.steps=2", "train.global_batch_size=4"]),
], ids=("Megatron-LM", "torchtitan", "Hugging Face"))  # fmt: skip
def test_what_was_read_trains(tmp_path: Path, name: str, text: str, devices: int, sets: list[str]) -> None:
    data = tmp_path / "text.txt"
    data.write_text("".join(f"{i} squared is {i * i}, and the next one follows. " for i in range(600)))
    sets = [*sets, f"data.source={data}", "data.tokenizer=bytes", f"data.cache={tmp_path / 'cache'}"]
    options = [word for text in sets for word in ("--set", text)]
    _, recipe = planned(write(tmp_path, name, text), devices, *options)
    prepare(recipe)
    out = run_command(recipe, out=tmp_path / "run", fork=False)
    assert [line["step"] for line in read_metrics(out / "metrics.jsonl") if "loss" in line] == [1, 2]
