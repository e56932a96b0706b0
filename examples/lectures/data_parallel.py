"""Data parallelism by hand: each rank computes its rows of the batch, and all add up their gradients.

torchrun --nproc-per-node 2 examples/lectures/data_parallel.py [RUN_FOLDER]
"""

import os
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fivefold

V, T, D, B = 32, 16, 64, 12  # vocabulary, length, width, rows of a batch
STEPS, LR = 20, 0.5
SETTINGS = (
    f"model.seq_len={T} train.global_batch_size={B} train.steps={STEPS} precision.mode=fp32 optim.name=sgd "
    f"optim.lr={LR} optim.schedule=constant optim.warmup_steps=0 optim.weight_decay=0 optim.grad_clip=0"
).split()


class Model(nn.Module):
    """Predicts each number from the one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(V, D), nn.Linear(D, D), nn.ReLU(), nn.Linear(D, V))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:  # (B, T) each, int64 -> scalar mean loss
        return nn.functional.cross_entropy(self.layers(inputs).flatten(0, 1), targets.flatten())


class Data:
    def batch(self, i: int, rows: range) -> tuple[np.ndarray, np.ndarray]:
        """These rows of batch i, the same on every rank: each number is the one before, times 5, plus 1."""
        x = np.random.default_rng(i).integers(0, V, (B, T))[rows.start : rows.stop]
        return x, (5 * x + 1) % V


def by_hand(model: nn.Module) -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine = range(rank * B // ranks, (rank + 1) * B // ranks)
    for step in range(STEPS):
        inputs, targets = map(torch.from_numpy, Data().batch(step, mine))
        model.zero_grad()
        (model(inputs, targets) * len(mine) / B).backward()  # this rank's part of the batch's mean
        for parameter in model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)  # the sum over ranks: all have the batch's gradient now
            parameter.data -= LR * parameter.grad
    dist.destroy_process_group()


def main(out: Path) -> None:
    torch.manual_seed(0)  # so that all ranks begin with the same weights
    model, ours = Model(), Model()
    ours.load_state_dict(model.state_dict())
    by_hand(model)

    run = fivefold.train(fivefold.load("quickstart", SETTINGS), out, model=ours, data=Data())

    if os.environ["RANK"] == "0":
        saved = run.weights()
        apart = max((w - saved[name]).abs().max().item() for name, w in model.named_parameters())
        losses = [line["loss"] for line in run.metrics() if "loss" in line]
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {STEPS} steps")
        print(f"largest difference of a weight, by hand and by Fivefold: {apart:.1e}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/data_parallel"))
