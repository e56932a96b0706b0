"""The shapes of `best.py`, and the settings of Fivefold's recipe for each."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Shape:
    """A model and its batch. arch: of Fivefold. V vocabulary, D width, L layers, H heads, K key-value heads, F
    feed-forward width, T tokens of a sequence, B sequences of a step, in microbatches of b."""

    arch: str
    V: int
    D: int
    L: int
    H: int
    F: int
    T: int
    B: int
    b: int
    K: int = 0
    tied: bool = False
    experts: int = 0
    per_token: int = 0
    mode: str = "bf16"

    @property
    def key_heads(self) -> int:
        return self.K or self.H

    def sets(self) -> list[str]:
        """Overrides of a recipe."""
        width = "expert_ffn_dim" if self.experts else "ffn_dim"
        sizes = {
            "arch": f'"{self.arch}"',
            "vocab_size": self.V,
            "dim": self.D,
            "layers": self.L,
            "heads": self.H,
            width: self.F,
            "seq_len": self.T,
            "tie_embeddings": str(self.tied).lower(),
        }
        if self.K:
            sizes["kv_heads"] = self.K
        if self.experts:
            sizes |= {"experts": self.experts, "experts_per_token": self.per_token}
        batch = {"steps": 1000, "global_batch_size": self.B, "microbatch_size": self.b}
        return [
            *(f"model.{key}={value}" for key, value in sizes.items()),
            *(f"train.{key}={value}" for key, value in batch.items()),
            f"precision.mode={self.mode}",
        ]


COMMON = Shape("llama", V=4096, D=384, L=6, H=6, F=1024, T=256, B=16, b=8)
SHAPES = {
    "common work": COMMON,
    "common work, fp32": replace(COMMON, mode="fp32"),
    "Llama 47M": Shape("llama", V=8192, D=512, L=12, H=8, F=1408, T=512, B=8, b=4),
    "Llama 100M, T 2048": Shape(
        "llama", V=32000, D=768, L=12, H=12, K=4, F=2048, T=2048, B=2, b=1, tied=True
    ),
    "Llama 342M": Shape("llama", V=16384, D=1024, L=24, H=16, F=2816, T=512, B=4, b=2),
    "GPT-2 124M": Shape("gpt2", V=50304, D=768, L=12, H=12, F=3072, T=1024, B=2, b=1, tied=True),
    "BERT base, T 128": Shape("bert", V=30528, D=768, L=12, H=12, F=3072, T=128, B=16, b=8, tied=True),
    "moe-tiny": Shape(
        "moe", V=4096, D=192, L=4, H=4, F=256, T=256, B=16, b=8, tied=True, experts=8, per_token=2
    ),
}
MASKED = 0.15
"""Share of BERT's tokens that are masked."""
