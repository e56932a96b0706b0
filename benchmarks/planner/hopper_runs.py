"""Published runs on H100 and H200, as `published.py` compares them: NeMo in fp8, FSDP2 with PyTorch's own tensor
parallelism, llm-foundry. One constant was chosen by llm-foundry's and torchtitan's (`Device.contended`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from fivefold.models.operations import TensorWay
from fivefold.models.section import ModelSection
from fivefold.plan.cluster.clusters import parse
from fivefold.plan.setting import Setting, Software, States, setting
from fivefold.plan.software import NEMO, TORCHTITAN
from fivefold.recipe import resolve_model
from fivefold.sharding.layout import Layout

Row = dict[str, str]


class Run(NamedTuple):
    """A published run as the planner sees it, with the seconds of a step that were measured."""

    name: str
    setting: Setting
    seconds: float
    memory_gb: float = 0.0


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
        s = setting(model, layout, parse(f"h100:{gpus}"), B, count, "fp8", NEMO)
        yield Run(f"{row['model']} on {gpus}", s, float(row["step_s"]))


# torch.compile, full recomputation, all states in bf16, nodes of 4 devices, sequences of 4096 (its mfu_bench.sh).
# Each projection gathers its input, and all ranks gather the logits (its tensor_parallel.py).
KEMPNER = replace(
    TORCHTITAN,
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
