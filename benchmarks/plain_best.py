"""The yardstick: what a skilled person would write in PyTorch for these shapes, without a framework.

fp32 masters with bf16 working weights, fused projections, one compiled graph, AdamW fused over the masters, the
allocator's settings of `fivefold train`. What may be faster in either form is a choice, which `best.py` measures:

- attention: written out, or PyTorch's scaled_dot_product_attention;
- in fp32: linear layers by PyTorch's default library, or by oneDNN, with or without the weight gradient;
- experts: a loop over them, or the grouped matmul; or Mixtral of the `transformers` library.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.nn.functional as F
from shapes import MASKED, Shape
from torch import Tensor, nn
from torch.autograd import Function


def choices(shape: Shape) -> list[str]:
    """The forms of a shape's yardstick."""
    if shape.arch == "moe":
        return ["loop", "grouped", "mixtral"]
    attention = ["sdpa", "written"]
    if shape.mode == "bf16":
        return attention
    return [f"{kind} {library}" for kind in attention for library in ("mkl", "onednn", "onednn+weights")]


class _OneDNN(Function):
    """A linear layer by oneDNN. whole: its weight gradient, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, whole: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.whole = whole
        return product(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        (x, weight), dy = ctx.saved_tensors, grads[0]
        rows, dy_rows = x.flatten(0, -2), dy.flatten(0, -2)
        dweight = product(dy_rows.t(), rows.t()) if ctx.whole else dy_rows.t() @ rows
        return product(dy, weight.t()), dweight, None


@torch.library.custom_op("plain_best::product", mutates_args=())
def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x @ weight.T, opaque to the compiler, which takes this operator with constant weights only."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


@product.register_fake
def _(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


class Linear(nn.Linear):
    library = "mkl"

    def forward(self, input: Tensor) -> Tensor:
        if self.library == "mkl":
            return super().forward(input)
        return _OneDNN.apply(input, self.weight, self.library == "onednn+weights")


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, kind: str) -> Tensor:
    """q (B, H, T, d), k and v (B, K, T, d) -> (B, H, T, d)."""
    (B, H, T, d), K = q.shape, k.shape[1]
    if kind == "sdpa":
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=H != K)
    grouped = q.reshape(B, K, H // K * T, d)
    scores = (grouped @ k.transpose(-1, -2)).view(B, H, T, T) * d**-0.5
    if causal:
        hidden = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    probabilities = scores.float().softmax(-1).to(q.dtype).view(B, K, H // K * T, T)
    return (probabilities @ v).view(B, H, T, d)


class Attention(nn.Module):
    def __init__(self, shape: Shape, kind: str, bias: bool, causal: bool):
        super().__init__()
        self.shape, self.kind, self.causal = shape, kind, causal
        d = shape.D // shape.H
        self.sizes = (shape.D, shape.key_heads * d, shape.key_heads * d)
        self.qkv = Linear(shape.D, sum(self.sizes), bias=bias)
        self.out = Linear(shape.D, shape.D, bias=bias)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor] | None = None) -> Tensor:
        B, T, D = x.shape
        parts = self.qkv(x).split(self.sizes, -1)
        q, k, v = (part.view(B, T, -1, D // self.shape.H).transpose(1, 2) for part in parts)
        if angles is not None:
            q, k = rotate(q, *angles), rotate(k, *angles)
        y = attend(q, k, v, self.causal, self.kind)
        return self.out(y.transpose(1, 2).reshape(B, T, D))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class SwiGLU(nn.Module):
    def __init__(self, D: int, width: int):
        super().__init__()
        self.gate_up, self.down = Linear(D, 2 * width, bias=False), Linear(width, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class GELU(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.up, self.down = Linear(shape.D, shape.F), Linear(shape.F, shape.D)
        self.approximate = "tanh" if shape.arch == "gpt2" else "none"

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate=self.approximate))


class Experts(nn.Module):
    """A router, and SwiGLUs of which each token uses a few; the load-balance term of the loss is left in `aux`."""

    def __init__(self, shape: Shape, kind: str):
        super().__init__()
        self.count, self.per_token, self.kind = shape.experts, shape.per_token, kind
        self.router = nn.Linear(shape.D, shape.experts, bias=False)
        self.gate_up = nn.Parameter(torch.empty(shape.experts, 2 * shape.F, shape.D))
        self.down = nn.Parameter(torch.empty(shape.experts, shape.D, shape.F))
        self.aux: Tensor = torch.zeros(())

    def forward(self, x_BTD: Tensor) -> Tensor:
        x = x_BTD.flatten(0, 1)
        logits = F.linear(x.float(), self.router.weight.float())
        shares = logits.softmax(-1)
        weights, chosen = shares.topk(self.per_token, -1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        counts = torch.zeros(self.count, dtype=torch.int64).scatter_add_(
            0, chosen.flatten(), torch.ones_like(chosen.flatten())
        )
        balance = self.count * (counts / counts.sum() * shares.mean(0)).sum()
        self.aux = 0.01 * balance + 0.001 * logits.logsumexp(-1).square().mean()
        order = chosen.flatten().argsort(stable=True)  # slots, by expert
        tokens = order // self.per_token
        rows = x.index_select(0, tokens)
        if self.kind == "grouped":
            ends = counts.cumsum(0).to(torch.int32)
            gate, up = F.grouped_mm(rows, self.gate_up.transpose(1, 2), offs=ends).chunk(2, -1)
            found = F.grouped_mm(F.silu(gate) * up, self.down.transpose(1, 2), offs=ends)
        else:
            done = []
            for expert, part in enumerate(rows.split(counts.tolist())):
                gate, up = F.linear(part, self.gate_up[expert]).chunk(2, -1)
                done.append(F.linear(F.silu(gate) * up, self.down[expert]))
            found = torch.cat(done)
        weighted = found * weights.flatten()[order][:, None]
        return torch.zeros_like(x).index_add(0, tokens, weighted).view_as(x_BTD)


class Block(nn.Module):
    """Of Llama and of mixtures (RMSNorm, rotary positions), GPT-2 (LayerNorm) or BERT (LayerNorm behind)."""

    def __init__(self, shape: Shape, kind: str):
        super().__init__()
        self.arch, rotary = shape.arch, shape.arch in ("llama", "moe")
        norm = RMSNorm if rotary else nn.LayerNorm
        self.norm1, self.norm2 = norm(shape.D, eps=1e-5), norm(shape.D, eps=1e-5)
        self.attention = Attention(
            shape, "written" if shape.arch == "moe" else kind, not rotary, shape.arch != "bert"
        )
        if shape.arch == "moe":
            self.mlp: nn.Module = Experts(shape, kind)
        else:
            self.mlp = SwiGLU(shape.D, shape.F) if rotary else GELU(shape)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor] | None = None) -> Tensor:
        if self.arch == "bert":
            x = self.norm1(x + self.attention(x))
            return self.norm2(x + self.mlp(x))
        x = x + self.attention(self.norm1(x), angles)
        return x + self.mlp(self.norm2(x))


class RMSNorm(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return (F.rms_norm(x.float(), self.normalized_shape, eps=self.eps) * self.weight).to(x.dtype)


class Model(nn.Module):
    def __init__(self, shape: Shape, kind: str):
        super().__init__()
        self.shape, self.rotary = shape, shape.arch in ("llama", "moe")
        norm = RMSNorm if self.rotary else nn.LayerNorm
        self.embed = nn.Embedding(shape.V, shape.D)
        self.blocks = nn.ModuleList(Block(shape, kind) for _ in range(shape.L))
        self.norm = norm(shape.D, eps=1e-5)
        self.head = None if shape.tied else Linear(shape.D, shape.V, bias=False)
        if not self.rotary:
            self.positions = nn.Embedding(shape.T, shape.D)
        if shape.arch == "bert":
            self.embed_norm, self.transform = norm(shape.D), Linear(shape.D, shape.D)
            self.bias = nn.Parameter(torch.zeros(shape.V))
        d = shape.D // shape.H
        table = torch.outer(torch.arange(shape.T).float(), 10000.0 ** -(torch.arange(0, d, 2) / d))
        self.cos, self.sin = table.cos(), table.sin()  # no buffers: they stay in fp32
        for name, p in self.named_parameters():
            if p.dim() > 1:
                nn.init.normal_(
                    p, std=0.02 / (2 * shape.L) ** 0.5 if "out." in name or "down" in name else 0.02
                )

    def forward(self, tokens: Tensor, targets: Tensor, masked: Tensor | None) -> Tensor:
        """masked: positions of BERT's targets, all others are not predicted."""
        x, angles = self.embed(tokens), (self.cos, self.sin) if self.rotary else None
        if not self.rotary:
            x = x + self.positions.weight[: tokens.shape[1]]
        if self.shape.arch == "bert":
            x = self.embed_norm(x)
        for block in self.blocks:
            x = block(x, angles)
        x = x.flatten(0, 1)
        if masked is not None:
            x, targets = F.gelu(self.transform(x.index_select(0, masked))), targets.flatten()[masked]
        x, bias = self.norm(x), self.bias if masked is not None else None
        logits = F.linear(x, self.embed.weight, bias) if self.head is None else self.head(x)
        loss = F.cross_entropy(logits.float(), targets.flatten())
        for block in self.blocks:
            if isinstance(block.mlp, Experts):
                loss = loss + block.mlp.aux
        return loss


def mixtral(shape: Shape) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=shape.V, hidden_size=shape.D, intermediate_size=shape.F, num_hidden_layers=shape.L,
            num_attention_heads=shape.H, num_key_value_heads=shape.key_heads, num_local_experts=shape.experts,
            num_experts_per_tok=shape.per_token, max_position_embeddings=shape.T, output_router_logits=True,
            tie_word_embeddings=shape.tied, use_cache=False,
        )
    )  # fmt: skip


def batch(shape: Shape) -> tuple[Tensor, Tensor]:
    """Random tokens and targets (B, T); of BERT's targets the same number counts in each sequence, the others are
    -100."""
    generator = torch.Generator().manual_seed(0)
    tokens, targets = (torch.randint(shape.V, (shape.B, shape.T), generator=generator) for _ in range(2))
    if shape.arch == "bert":
        drawn = torch.rand(shape.B, shape.T, generator=generator).argsort(-1) < round(MASKED * shape.T)
        targets = targets.where(drawn, -100)
    return tokens, targets


def plain_step(shape: Shape, choice: str):
    """Returns the function of one step."""
    torch.manual_seed(0)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if choice == "mixtral":
        model = mixtral(shape)
    else:
        kind, _, Linear.library = choice.partition(" ")
        Linear.library = Linear.library or "mkl"
        model = Model(shape, kind)
    masters = [p.detach() for p in model.parameters()]
    mixed = shape.mode == "bf16"
    if mixed:
        masters = [p.clone() for p in masters]
        model = model.bfloat16()
    working: list[Tensor] = list(model.parameters())
    compiled = model if shape.experts else torch.compile(model, dynamic=False)
    optimizer = torch.optim.AdamW(masters if mixed else working, lr=1e-3, betas=(0.9, 0.95), fused=True)
    owned = masters if mixed else working
    tokens, targets = batch(shape)
    parts = []
    for x, y in zip(tokens.split(shape.b), targets.split(shape.b), strict=True):
        parts.append((x, y, (y != -100).flatten().nonzero()[:, 0] if shape.arch == "bert" else None))

    def step() -> float:
        total = 0.0
        for x, y, masked in parts:
            mine = choice != "mixtral"
            loss = compiled(x, y, masked) if mine else compiled(input_ids=x, labels=y).loss
            (loss / len(parts)).backward()
            total += loss.item() / len(parts)
        if mixed:
            for master, p in zip(masters, working, strict=True):
                assert p.grad is not None
                master.grad, p.grad = p.grad.float(), None
        torch.nn.utils.clip_grad_norm_(owned, 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if mixed:
            with torch.no_grad():
                torch._foreach_copy_(working, masters)
        return total

    return step
