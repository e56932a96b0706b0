"""A BERT-like classifier under DDP: 30522 x 256, 4 heads, 2 layers, length 128, two classes, made-up data.
torchrun --nproc-per-node 2 examples/lectures/bert_classifier.py [FOLDER] [STEPS]
On each of two machines, add --nnodes 2 --rdzv-backend c10d --rdzv-endpoint HOST:29400, and a FOLDER that both see.
With --nnodes 1:2 --max-restarts 3 one of them may come later or go: all ranks start again from what is saved.
"""

import sys
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fivefold

V, D, HEADS, LAYERS, T, B = 30522, 256, 4, 2, 128, 8  # B rows in the batch of all ranks
SETTINGS = f"""model.seq_len={T} train.global_batch_size={B} precision.mode=fp32 checkpoint.every=10
optim.schedule=constant optim.warmup_steps=0 optim.lr=1e-4 optim.betas=[0.9,0.999] optim.eps=1e-6
optim.weight_decay=0 optim.grad_clip=0""".split()


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)  # the same weights on every rank
        self.embed, self.positions, self.head = nn.Embedding(V, D), nn.Embedding(T, D), nn.Linear(D, 2)
        block = nn.TransformerEncoderLayer(D, HEADS, 4 * D, 0.0, "gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(block, LAYERS)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:  # (B, T), (B, 1) int64 -> scalar mean loss
        x_BTD = self.encoder(self.embed(inputs) + self.positions.weight)
        return nn.functional.cross_entropy(self.head(x_BTD[:, 0]), targets[:, 0])  # as of [CLS]


class Data:  # texts of class 1 use the upper half of the vocabulary
    def batch(self, i: int, rows: range) -> tuple[np.ndarray, np.ndarray]:
        random = np.random.default_rng(i)
        classes = random.integers(0, 2, (B, 1))
        return (random.integers(0, V // 2, (B, T)) + classes * (V // 2))[rows], classes[rows]


def by_hand(saved: Path, steps: int) -> nn.Module:  # from what is saved, if anything is
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = nn.parallel.DistributedDataParallel(Classifier())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, (0.9, 0.999), 1e-6, weight_decay=0)
    parts = model, optimizer
    found = torch.load(saved, weights_only=True) if saved.exists() else [*(p.state_dict() for p in parts), 0]
    for part, state in zip(parts, found, strict=False):
        part.load_state_dict(state)
    for step in range(found[-1], steps):
        mine = range(rank * B // ranks, (rank + 1) * B // ranks)
        optimizer.zero_grad()
        model(*map(torch.from_numpy, Data().batch(step, mine))).backward()  # sums gradients meanwhile
        optimizer.step()
        if rank == 0 and step % 10 == 9:
            torch.save([*(p.state_dict() for p in parts), step + 1], new := saved.with_suffix(".new"))
            new.rename(saved)  # whole, or not there
    return model.module


def main(out: Path, steps: int) -> None:
    out.mkdir(parents=True, exist_ok=True)
    # After a restart a rank may call an old address. A minute later all try again; the usual 30 would be lost.
    dist.init_process_group("gloo", timeout=timedelta(minutes=1))
    first, model = dist.get_rank() == 0, by_hand(out / "by_hand.pt", steps)
    dist.destroy_process_group()
    train = fivefold.resume if (out / "run" / "recipe.toml").exists() else fivefold.train
    recipe = fivefold.load("quickstart", [*SETTINGS, f"train.steps={steps}"])
    run = train(recipe=recipe, out=out / "run", model=Classifier(), data=Data())
    if first:
        ours = run.weights()
        apart = max((w - ours[name]).abs().max().item() for name, w in model.named_parameters())
        print(f"largest difference of a weight, by DDP and by Fivefold: {apart:.1e}")


if __name__ == "__main__":
    main(Path([*sys.argv, "runs/bert_classifier"][1]), int([*sys.argv, "", "6"][2] or 6))
