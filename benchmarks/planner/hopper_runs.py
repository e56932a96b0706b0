"""Published runs on H100, H200 and H800, as `published.py` compares them: NeMo in fp8, FSDP2 with PyTorch's own tensor
parallelism, llm-foundry, DeepSeek-V3; and this program's own on an H100. One constant was chosen by llm-foundry's and
torchtitan's (`Device.contended`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from fivefold.models.operations import TensorWay
from fivefold.models.section import ModelSection
from fivefold.recipe import load, resolve_model
from fivefold.sharding.layout import Layout
from fivefold_plan.cluster.clusters import parse
from fivefold_plan.predict import predict
from fivefold_plan.setting import FIVEFOLD, Setting, Software, States, setting
from fivefold_plan.software import PROGRAMS

Row = dict[str, str]


class Run(NamedTuple):
    """A run as the planner sees it, with the seconds of a step that were measured. gib: the peak of allocated memory;
    0: not published."""

    name: str
    setting: Setting
    seconds: float
    gib: float = 0.0


# Layers, width, heads, key-value heads, feed-forward, vocabulary; Nemotron and GPT-3 without gates.
MODELS = {
    "llama3.1-8b": (32, 4096, 32, 8, 14336, 128256),
    "llama3.1-70b": (80, 8192, 64, 8, 28672, 128256),
    "llama3.1-405b": (126, 16384, 128, 8, 53248, 128256),
    "nemotron4-15b": (32, 6144, 48, 8, 24576, 256000),
    "nemotron4-340b": (96, 18432, 96, 8, 73728, 256000),
    "gpt3-175b": (96, 12288, 96, 96, 49152, 51200),
}


def nemo(rows: list[Row]) -> Iterator[Run]:
    """NVIDIA's own runs in fp8 with delayed scaling, nothing recomputed."""
    for row in rows:
        layers, dim, heads, kv_heads, ffn_dim, vocabulary = MODELS[row["model"]]
        pp, tp, cp, virtual, gpus, B, batch = (
            int(row[name]) for name in ("pp", "tp", "cp", "vp", "gpus", "mbs", "gbs")
        )
        section = ModelSection(
            arch="llama" if row["model"].startswith("llama") else "gpt2",
            layers=int(row["layers"] or layers),
            dim=dim,
            heads=heads,
            kv_heads=kv_heads,
            ffn_dim=ffn_dim,
            seq_len=int(row["seq"]),
            tie_embeddings=row["model"].startswith("gpt3"),
        )
        layout = Layout(
            pp=pp,
            tp=tp,
            sp=tp > 1,
            sp_regather=tp > 1,
            cp=cp,
            dp_shard=gpus // (pp * tp * cp),
            zero=1,
            schedule="interleaved" if virtual > 1 else "1f1b",
            virtual_stages=virtual,
        )
        model, count = resolve_model(section, vocab_size=vocabulary), batch // layout.dp // B
        s = setting(model, layout, parse(f"h100:{gpus}"), B, count, "fp8", PROGRAMS["nemo"])
        yield Run(f"{row['model']} on {gpus}", s, float(row["step_s"]))


# torch.compile, full recomputation, all states in bf16, nodes of 4 devices, sequences of 4096 (its mfu_bench.sh).
# Each projection gathers its input, and all ranks gather the logits (its tensor_parallel.py).
KEMPNER = replace(
    PROGRAMS["torchtitan"],
    name="KempnerForge",
    step=Software.step,
    states={"bf16": States(2, 0, 2, 4, 2)},
    tensor=TensorWay(each=True, copied=True, whole_logits=True),
)
KEMPNER_MODELS = {"7B": (32, 4096, 32, 14336), "13B": (40, 5120, 40, 17920)}


def kempner(rows: list[Row]) -> Iterator[Run]:
    """FSDP2 with PyTorch's tensor parallelism."""
    for row in rows:
        layers, dim, heads, ffn_dim = KEMPNER_MODELS[row["model"]]
        gpus, tp = int(row["gpus"]), int(row["tp"])
        section = ModelSection(layers=layers, dim=dim, heads=heads, kv_heads=8, ffn_dim=ffn_dim, seq_len=4096)
        layout = Layout(dp_shard=int(row["fsdp"]), tp=tp, sp=True, zero=3, recompute="full")
        cluster = parse(f"h200:{max(1, gpus // 4)}x4")
        model, B, count = resolve_model(section, vocab_size=128256), int(row["mbs"]), int(row["grad_accum"])
        s = setting(model, layout, cluster, B, count, "bf16", KEMPNER)
        # its "GB" are 1024^3 bytes, as PyTorch's allocator counts them (its memory.py)
        yield Run(f"{row['model']} on {gpus}, tp {tp}", s, float(row["step_s"]), float(row["mem_gb"]))


# FSDP of PyTorch 2.0 and operations one by one.
FOUNDRY = Software(
    name="llm-foundry",
    fused=False,
    loss="plain",
    states={name: States(2, 4, 4, 8, 2) for name in ("bf16", "fp8")},
    checked=False,
)
MPT = {
    "70b": (80, 8192, 64),
    "30b": (48, 7168, 56),
    "13b": (40, 5120, 40),
    "7b": (32, 4096, 32),
    "3b": (32, 2560, 20),
    "1b": (24, 2048, 16),
    "760m": (24, 1536, 12),
}


def foundry(rows: list[Row]) -> Iterator[Run]:
    """MosaicML's runs of MPT shapes, of 2023."""
    for row in rows:
        layers, dim, heads = MPT[row["Model"]]
        gpus, T = int(row["# GPUs"]), int(row["SeqLen (T)"])
        section = ModelSection(
            arch="gpt2", layers=layers, dim=dim, heads=heads, seq_len=T, tie_embeddings=True
        )
        layout = Layout(
            dp_shard=gpus,
            zero=3 if row["Sharding Strategy"] == "FULL_SHARD" else 2,
            recompute="full" if row["Activation Checkpointing"] == "True" else "none",
        )
        model, B, count = (
            resolve_model(section, vocab_size=50368),
            int(row["MicroBatchSize"]),
            int(row["GradAccum"]),
        )
        s = setting(
            model, layout, parse(f"h100:{gpus}"), B, count, row["Precision"].removeprefix("amp_"), FOUNDRY
        )
        seconds = int(row["GlobalBatchSize"]) * T / float(row["Throughput (T/s/GPU)"]) / gpus
        yield Run(f"{row['Model']} on {gpus}, {T} tokens, {row['Precision']}", s, seconds)


# HAI-LLM, as arXiv 2412.19437 describes it: fp8 in all matmuls of the blocks, experts as well (section 3.3.1), kept
# activations and the gate's input in fp8, moments in bf16 (3.3.3), rows to experts in fp8 and at most once to each of
# 4 nodes (3.2.2, 3.3.3), norms and what latent vectors are made into computed again (3.2.3). Attention as fast as
# cuDNN's, and router weights before the last matmul of an expert, are not in the paper.
HAI_LLM = replace(
    PROGRAMS["megatron-core"],
    name="HAI-LLM",
    selective="latent",
    overlap_data=True,
    overlap_pipeline=True,
    library="cudnn",
    narrow_factors=True,
    narrow_gates=True,
    narrow_experts=True,
    early_weights=True,
    late_experts=True,
    once_per_node=True,
    fp8_dispatch=True,
    partition="balanced",
    states={"fp8": States(2, 4, 4, 4, 2)},
)
COMMUNICATING = 20
"""Of the 132 processors of an H800, those that send and receive rows (3.2.2)."""
MATMUL_FP8 = 1402.6 / 1978.9
"""What matmuls of fp8 reach on an H100 (stas00/ml-engineering, "MAMF" table); 1,408 TFLOP/s on another one
(benchmarks/results/gpu_h100.json)."""


def deepseek(rows: list[Row]) -> Iterator[Run]:
    """DeepSeek-V3. The hours are of steps without evaluation, as far as the paper says."""
    h800 = parse("h800")
    left = 1 - COMMUNICATING / h800.device.units
    slower = {dtype: rate * left for dtype, rate in h800.device.peak.items()}
    units = h800.device.units - COMMUNICATING
    device = replace(h800.device, units=units, peak=slower, matmul_fp8=MATMUL_FP8)
    for row in rows:
        recipe = load("deepseek-v3")
        gpus, batch = int(row["gpus"]), int(row["sequences"])
        layout = Layout(
            pp=int(row["pp"]),
            ep=int(row["ep"]),
            dp_shard=gpus // int(row["pp"]),
            zero=1,
            schedule="dualpipe_paired",
            virtual_stages=2,
            recompute="selective",
        )
        model, count = resolve_model(recipe.model, vocab_size=129280), batch // layout.dp
        s = setting(model, layout, replace(h800, device=device), 1, count, "fp8", HAI_LLM)
        seconds = 3600 * float(row["hours_per_1e12"]) * batch * model.seq_len / 1e12 / gpus
        yield Run(f"DeepSeek-V3 on {gpus}", s, seconds)


def own(result: dict[str, Any]) -> Iterator[Run]:
    """This program on an H100, without documents, where PyTorch takes cuDNN's attention."""
    two = result["step of llama-1b"]["microbatches of 2, in another session"]
    four = {row["name"]: row["measured"] for row in result["parts"]["memory"]["llama-1b"]["rows"]}
    for size, seconds, gib in (
        (2, two["ours_s"], two["peak_gib"]),
        (4, four["step"], four["memory"]),
    ):
        sets = ["model.layers=16", "model.dim=2048", "model.ffn_dim=8192", "data.document_masks=false"]
        sets += [f"train.global_batch_size={size}", f"train.microbatch_size={size}"]
        recipe = load("llama3-8b", sets, "dp=1")
        plan = predict(recipe, parse("h100"), replace(FIVEFOLD, library="cudnn"))
        yield Run(f"Llama 1B, {size} sequences", plan.setting, seconds, gib)
