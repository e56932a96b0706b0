"""Greedy generation beside Hugging Face's `generate`, one sequence, with key-value caches.

    python benchmarks/generation.py [--rounds 5] [--threads 1] [--out benchmarks/results/generation.json]

The models are Llamas with the same sizes and random weights. The two take turns in one process; tokens/s are medians,
the ratio is taken within each turn.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from fivefold.models.base import build
from fivefold.recipe import load, resolve
from fivefold.train.generate import Sampling, generate

SIZES = {"14M": (4096, 384, 6, 6, 1024), "124M": (32000, 768, 12, 12, 2048)}
PROMPT, TOKENS = list(range(1, 17)), 64


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = {}
    for size in SIZES:
        for dtype in (torch.bfloat16, torch.float32):
            key = f"{size} {str(dtype).removeprefix('torch.')}"
            ours, theirs = fivefold(size, dtype), hugging_face(size, dtype)
            for warm_up in (ours, theirs):
                warm_up()
            pairs = [(ours(), theirs()) for _ in range(args.rounds)]
            rows[key] = {
                "tokens_per_s": median(a for a, _ in pairs),
                "hugging_face": median(b for _, b in pairs),
                "ratio": median(a / b for a, b in pairs),
                "pairs": pairs,
            }
            print(
                key, {name: round(rows[key][name], 2) for name in ("tokens_per_s", "hugging_face", "ratio")}
            )
    if args.out:
        from fivefold.host.machine import describe

        found = {"threads": args.threads, "machine": describe(), "rows": rows}
        args.out.write_text(json.dumps(found, indent=1) + "\n")


def fivefold(size: str, dtype: torch.dtype):
    V, D, L, H, F = SIZES[size]
    fields = {"layers": L, "dim": D, "heads": H, "ffn_dim": F, "seq_len": 256}
    sets = [f"model.{key}={value}" for key, value in fields.items()]
    recipe = resolve(load("quickstart", sets, "dp=1"), vocab_size=V)
    module = build(recipe.model, device="cpu", seed=0).to(dtype)

    def run() -> float:
        began = time.perf_counter()
        count = len(list(generate(module, recipe.model, PROMPT, Sampling(max_tokens=TOKENS, temperature=0))))
        return count / (time.perf_counter() - began)

    return run


def hugging_face(size: str, dtype: torch.dtype):
    from transformers import LlamaConfig, LlamaForCausalLM

    V, D, L, H, F = SIZES[size]
    config = LlamaConfig(
        vocab_size=V, hidden_size=D, num_hidden_layers=L, num_attention_heads=H, num_key_value_heads=H,
        intermediate_size=F, max_position_embeddings=256, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)  # its own types deny `to` and `generate`
    model = model.to(dtype).eval()
    prompt = torch.tensor([PROMPT])
    mask = torch.ones_like(prompt)

    def run() -> float:
        began = time.perf_counter()
        with torch.no_grad():
            found = model.generate(prompt, attention_mask=mask, max_new_tokens=TOKENS, do_sample=False)
        return (found.shape[1] - len(PROMPT)) / (time.perf_counter() - began)

    return run


if __name__ == "__main__":
    main()
