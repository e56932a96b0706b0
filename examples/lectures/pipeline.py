"""A pipeline of two stages by hand: activations go forward, gradients come back, one microbatch after the other.

torchrun --nproc-per-node 2 examples/lectures/pipeline.py
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fivefold.launch.ranks import join
from fivefold.models.base import LanguageModel, block_dict
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.pipeline import Microbatch, Pipeline
from fivefold.sharding.layout import Layout

V, D, B, T, M = 32, 16, 2, 8, 4  # vocabulary, width, rows of a microbatch, length, microbatches


class Net(LanguageModel):
    """An embedding, four layers, an output layer: one half in stage 0, the other in stage 1."""

    def __init__(self, stage: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)  # the same weights on every rank
        self.embed, self.head = nn.Embedding(V, D), nn.Linear(D, V)
        layers = block_dict([nn.Sequential(nn.Linear(D, D), nn.Tanh()) for _ in range(4)])
        self.blocks = nn.ModuleDict({n: layers[n] for n in {None: "0123", 0: "01", 1: "23"}[stage]})
        self.first, self.last = stage != 1, stage != 0

    def begin(self, tokens_BT: Tensor, positions_T: Tensor) -> Tensor:
        return self.embed(tokens_BT)

    def end(self, x_BTD: Tensor, targets_BT: Tensor | None) -> Tensor:
        assert targets_BT is not None
        return nn.functional.cross_entropy(self.head(x_BTD).flatten(0, 1), targets_BT.flatten())


def by_hand(stage: Net, microbatches: list[Microbatch]) -> None:
    """All forwards, then all backwards in reverse order (GPipe, arXiv 1811.06965)."""
    kept = []
    for x, targets, *_ in microbatches:
        if stage.last:
            dist.recv(x := torch.empty(B, T, D), src=0)
            x.requires_grad_()
        y = stage(x, targets)
        kept.append((x, y))
        if stage.first:
            dist.send(y.detach(), dst=1)
    for x, y in reversed(kept):
        dy = torch.tensor(1 / M)  # of the mean over microbatches
        if stage.first:
            dist.recv(dy := torch.empty(B, T, D), src=1)
        y.backward(dy)
        if stage.last:
            dist.send(x.grad, dst=0)


def main() -> None:
    data = torch.randint(0, V, (M, 2, B, T), generator=torch.Generator().manual_seed(1))
    microbatches = [Microbatch(tokens, targets) for tokens, targets in data]
    whole = Net()  # on one device
    for tokens, targets, *_ in microbatches:
        (whole(tokens, targets) / M).backward()
    with join() as ranks:
        hand, ours = Net(ranks.rank), Net(ranks.rank)
        by_hand(hand, microbatches)
        mesh = Mesh(Layout(pp=2, schedule="1f1b"), ranks)
        pipeline = Pipeline({ranks.rank: ours}, mesh, D, torch.float32)
        pipeline.forward_backward(microbatches, 1 / M, lambda microbatch, stage: None)

        for how, net in (("on one device", whole), ("by Fivefold", ours)):
            pairs = [(p.grad, net.get_parameter(name).grad) for name, p in hand.named_parameters()]
            apart = max((g - h).abs().max().item() for g, h in pairs if g is not None and h is not None)
            print(f"rank {ranks.rank}: largest difference of a gradient, by hand and {how}: {apart:.1e}")


if __name__ == "__main__":
    main()
