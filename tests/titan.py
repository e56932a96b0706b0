"""torchtitan's llama3 as far as its checkpoints go: names, order of rows, and how FSDP2 and tensor parallelism cut it.
Written from torchtitan/models/llama3 and torchtitan/components/checkpointer of August 2026 and of 2024."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fivefold.recipe import ModelSection

BLOCK = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
ENDS = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}


def of_titan(theirs: dict[str, Tensor], model: ModelSection) -> dict[str, Tensor]:
    """Weights of Hugging Face as torchtitan's of 2025, row by row."""
    found = {
        f"{here}.weight": theirs[f"{there}.weight"]
        for here, there in ENDS.items()
        if f"{there}.weight" in theirs
    }
    found.setdefault("output.weight", found["tok_embeddings.weight"])
    for i in range(model.layers):
        for here, there in BLOCK.items():
            weight = theirs[f"model.layers.{i}.{there}.weight"]
            if here in ("attention.wq", "attention.wk"):
                heads = model.heads if here == "attention.wq" else (model.kv_heads or model.heads)
                d = len(weight) // heads
                # row 2j of a head is its row j there, row 2j + 1 the one half a head behind it
                rows = [
                    h * d + j + half * (d // 2)
                    for h in range(heads)
                    for j in range(d // 2)
                    for half in (0, 1)
                ]
                weight = weight[rows]
            found[f"layers.{i}.{here}.weight"] = weight
    return found


def renamed(titan: dict[str, Tensor]) -> dict[str, Tensor]:
    """The names since April 2026."""
    new = {name.replace("attention.w", "attention.qkv_linear.w") if ".wo." not in name else name: t
           for name, t in titan.items()}  # fmt: skip
    return {("lm_head.weight" if name == "output.weight" else name): t for name, t in new.items()}


class Module(nn.Module):
    """A module with parameters of these names, that can be cut as torchtitan cuts its own."""

    def __init__(self, weights: dict[str, Tensor]):
        super().__init__()
        for name, weight in weights.items():
            *path, last = name.split(".")
            at: nn.Module = self
            for i, word in enumerate(path):
                if not hasattr(at, word):
                    leaf = (
                        nn.Linear(*weight.shape[::-1], bias=False, device="meta")
                        if weight.ndim == 2
                        else nn.Module()
                    )
                    at.add_module(word, leaf if i == len(path) - 1 else nn.Module())
                at = getattr(at, word)
            setattr(at, last, nn.Parameter(weight.clone()))


def saved(rank: int, world: int, path: Path, weights: dict[str, Tensor], tp: int, more: str) -> None:
    """A rank's part of `dcp.save`. more: "": weights only; "flat": with the rest of a checkpoint beside them; "nested":
    as in 2024, when the weights were below "model"."""
    module = Module(weights)
    if world > 1:
        mesh = init_device_mesh("cpu", (world // tp, tp), mesh_dim_names=("dp", "tp"))
        if tp > 1:
            cut = {"wo": RowwiseParallel(), "w2": RowwiseParallel(), "tok_embeddings": RowwiseParallel()}
            plan = {
                name: cut.get(name.rpartition(".")[2], ColwiseParallel())
                for name, part in module.named_modules()
                if isinstance(part, nn.Linear)
            }
            parallelize_module(module, mesh["tp"], plan)
        for layer in module.layers.children():  # type: ignore[union-attr, operator]
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(module, mesh=mesh["dp"])
    state: dict[str, Any] = module.state_dict()
    if more:
        optim = {f"state.{name}.exp_avg": tensor * 0 for name, tensor in state.items()}
        rest = {"optimizer": optim | {"param_groups.norm.weight.lr": 0.1}, "train_state": {"step": torch.tensor(7)},
                "dataloader": {"dp_rank_0": b"state"}, "lr_scheduler": {"last_epoch": 7}}  # fmt: skip
        if more == "nested":
            state |= {"freqs_cis": torch.ones(8, 4, dtype=torch.complex64)}
            state = {"model": state}
        state |= rest
    dcp.save(state, checkpoint_id=path, no_dist=world == 1)
    if dist.is_initialized():
        dist.barrier()


def loaded(path: Path, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same weights as PyTorch's own `load` reads them from a folder, which has to have all of these names."""
    found = {name: torch.full_like(weight, 7) for name, weight in weights.items()}
    dcp.load(found, checkpoint_id=path, no_dist=True)
    return found
