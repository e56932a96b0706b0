"""ZeRO by hand (arXiv 1910.02054): who keeps which part of weights, gradients and Adam's states.

The parameters of each layer, one after the other, are a flat vector. Rank r owns the r-th part of it, and Adam's states
of that part only. What else a rank keeps between two layers depends on the stage:

1. all weights and all gradients. 2. all weights, and its part of the gradients: a layer's gradients are summed as soon
as they are there, and dropped. 3. its part of the weights, too: a layer's weights are gathered before it computes, in
forward and once more in backward, and dropped behind it.

torchrun --nproc-per-node 4 examples/lectures/zero.py
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

V, D, T, ROWS, STEPS = 32, 64, 16, 8, 3  # vocabulary, width, length, rows of the batch, steps
LR, B1, B2, EPS = 1e-2, 0.9, 0.95, 1e-6


class Model(nn.Module):
    """Predicts each number from the one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(V, D), nn.Linear(D, V)
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(3))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:  # (B, T) each -> scalar mean loss
        x = self.embed(inputs)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def batch(step: int, rows: slice) -> tuple[Tensor, Tensor]:
    x = torch.randint(0, V, (ROWS, T), generator=torch.Generator().manual_seed(step))[rows]
    return x, (5 * x + 1) % V


class Unit:
    """A layer's parameters: `whole`, of which they are views, and this rank's parts of them, of the gradient and of
    Adam's moments."""

    def __init__(self, layer: nn.Module, stage: int):
        self.stage, self.ranks, self.rank = stage, dist.get_world_size(), dist.get_rank()
        self.parameters = list(layer.parameters())
        flat = torch.cat([p.detach().flatten() for p in self.parameters])
        self.size = -(-len(flat) // self.ranks) * self.ranks  # rounded up to a multiple of the ranks
        self.whole = torch.zeros(self.size)
        self.whole[: len(flat)] = flat
        views = self.whole[: len(flat)].split([p.numel() for p in self.parameters])
        for p, view in zip(self.parameters, views, strict=True):
            p.data = view.view_as(p)
            p.register_post_accumulate_grad_hook(self.count)
        self.part = self.whole.chunk(self.ranks)[self.rank].clone()  # the masters
        self.gradient, self.m, self.v = (
            torch.empty(0),
            torch.zeros_like(self.part),
            torch.zeros_like(self.part),
        )
        self.left, self.sent = len(self.parameters), 0
        if stage == 3:
            self.drop()
            layer.register_forward_pre_hook(lambda *_: self.gather())
            layer.register_forward_hook(self.behind)

    def behind(self, layer: nn.Module, inputs: object, output: Tensor) -> None:
        """Behind a layer's forward. Backward of the layer begins with the gradient of its output."""
        self.drop()
        output.register_hook(lambda _: self.gather())

    def drop(self) -> None:
        self.whole.untyped_storage().resize_(0)

    def gather(self) -> None:
        """Everybody sends its part to all: (n - 1) / n of the layer, in a ring."""
        self.whole.untyped_storage().resize_(4 * self.size)
        dist.all_gather(list(self.whole.chunk(self.ranks)), self.part)
        self.sent += self.size - len(self.part)

    def count(self, parameter: Tensor) -> None:
        """Called when a parameter has its gradient. Behind the last one stages 2 and 3 sum the layer's."""
        self.left -= 1
        if self.left == 0 and self.stage > 1:
            self.scatter()
            if self.stage == 3:
                self.drop()

    def scatter(self) -> None:
        """Sums the layer's gradients over the ranks, and keeps this rank's part."""
        flat = torch.cat([p.grad.flatten() for p in self.parameters if p.grad is not None])
        flat = nn.functional.pad(flat, (0, self.size - len(flat)))
        self.gradient = torch.empty_like(self.part)
        dist.reduce_scatter(self.gradient, list(flat.chunk(self.ranks)))
        self.sent += self.size - len(self.part)
        for p in self.parameters:
            p.grad = None

    def update(self, step: int) -> None:
        """Adam on this rank's part (arXiv 1412.6980)."""
        self.m.lerp_(self.gradient, 1 - B1)
        self.v.lerp_(self.gradient.square(), 1 - B2)
        m, v = self.m / (1 - B1**step), self.v / (1 - B2**step)
        self.part -= LR * m / (v.sqrt() + EPS)
        self.left, self.gradient = len(self.parameters), torch.empty(0)
        if self.stage < 3:
            self.gather()

    def kept(self) -> int:
        """Elements of weights and gradients that this rank has now, beside its masters."""
        gradients = len(self.gradient) + sum(p.grad.numel() for p in self.parameters if p.grad is not None)
        return self.whole.untyped_storage().nbytes() // 4 + gradients


def train(model: nn.Module, stage: int, steps: int = STEPS) -> tuple[list[Unit], list[float], int]:
    """Trains in place; the units, the loss of each step, and the most weights and gradients behind a backward."""
    layers = [m for m in model.modules() if not list(m.children())]
    units, losses, most = [Unit(layer, stage) for layer in layers], [], 0
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for step in range(steps):
        loss = model(*batch(step, slice(rank * ROWS // ranks, (rank + 1) * ROWS // ranks))) / ranks
        loss.backward()
        most = max(most, sum(unit.kept() for unit in units))
        for unit in units:
            if stage == 1:
                unit.scatter()
            unit.update(step + 1)
        dist.all_reduce(total := loss.detach().clone())
        losses.append(total.item())
    return units, losses, most


def main() -> None:
    dist.init_process_group("gloo")
    for stage in (1, 2, 3):
        torch.manual_seed(0)  # all ranks begin with the same weights
        units, losses, most = train(Model(), stage)
        psi = sum(unit.size for unit in units)
        states, sent = sum(3 * len(unit.part) for unit in units), sum(unit.sent for unit in units) / STEPS
        if dist.get_rank() == 0:
            print(f"ZeRO {stage}: losses {', '.join(f'{loss:.4f}' for loss in losses)}")
            print(f"  of Psi = {psi} parameters a rank has {most / psi:.2f} Psi as weights and gradients")
            print(f"  behind backward, and {states / psi:.2f} Psi as masters and moments")
            print(f"  it sends {sent / psi:.2f} Psi per step")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
