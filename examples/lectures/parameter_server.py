"""A parameter server by hand: rank 0 keeps the weights, workers pull them, and push gradients of their rows.

torchrun --nproc-per-node 3 examples/lectures/parameter_server.py [RUN_FOLDER]
"""

import os
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import fivefold
from fivefold.models.base import build
from fivefold.recipe import resolve

V, T, B = 32, 16, 8  # vocabulary, length, rows of a batch
STEPS, LR = 20, 0.5
SETTINGS = (
    f"model.layers=2 model.dim=32 model.heads=2 model.vocab_size={V} model.seq_len={T} train.global_batch_size={B} "
    f"train.steps={STEPS} precision.mode=fp32 optim.name=sgd optim.lr={LR} optim.schedule=constant "
    "optim.warmup_steps=0 optim.weight_decay=0 optim.grad_clip=0 sync.method=server layout.dp_replicate=2"
).split()


class Data:
    def batch(self, i: int, rows: range) -> tuple[np.ndarray, np.ndarray]:
        """These rows of batch i, the same on every rank: each number is the one before, times 5, plus 1."""
        x = np.random.default_rng(i).integers(0, V, (B, T))[rows.start : rows.stop]
        return x, (5 * x + 1) % V


def serve(model: torch.nn.Module, workers: int) -> None:
    """Sends the weights, waits for the gradients of all workers (synchronous training), and updates."""
    weights = parameters_to_vector(model.parameters()).detach()
    for _ in range(STEPS):
        for worker in range(1, workers + 1):
            dist.send(weights, dst=worker)
        gradients = torch.empty(workers, len(weights))
        for worker in range(1, workers + 1):
            dist.recv(gradients[worker - 1], src=worker)
        weights -= LR * gradients.mean(0)
    vector_to_parameters(weights, model.parameters())


def work(model: torch.nn.Module, worker: int, workers: int) -> None:
    weights = parameters_to_vector(model.parameters()).detach()
    mine = range(worker * B // workers, (worker + 1) * B // workers)
    for step in range(STEPS):
        dist.recv(weights, src=0)
        vector_to_parameters(weights, model.parameters())
        model.zero_grad()
        model(*map(torch.from_numpy, Data().batch(step, mine))).backward()
        dist.send(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]), dst=0)


def main(out: Path) -> None:
    recipe = resolve(fivefold.load("quickstart", SETTINGS), vocab_size=V)
    dist.init_process_group("gloo")
    rank, workers = dist.get_rank(), dist.get_world_size() - 1
    model = build(recipe.model, device="cpu", seed=recipe.train.seed)
    serve(model, workers) if rank == 0 else work(model, rank - 1, workers)
    dist.destroy_process_group()

    run = fivefold.train(recipe, out, data=Data())  # one server and the layout's two workers
    if os.environ["RANK"] == "0":
        saved = run.weights()
        apart = max((w - saved[name]).abs().max().item() for name, w in model.named_parameters())
        losses = [line["loss"] for line in run.metrics() if "loss" in line]
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {STEPS} steps")
        print(f"largest difference of a weight, by hand and by Fivefold: {apart:.1e}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/parameter_server"))
