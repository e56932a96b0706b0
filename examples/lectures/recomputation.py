"""Recomputation by hand (arXiv 1604.06174): a block keeps its input only, and backward runs it again.

An autograd function runs the block without a graph. Its backward runs it once more, now with a graph, and goes through
that at once. Dropout must drop the same elements again, so the random state is kept and put back.

python examples/lectures/recomputation.py
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks

B, T, D, BLOCKS = 4, 32, 64, 6  # sequences, tokens, width, blocks


class Block(nn.Module):
    """A feed-forward layer with a norm in front and dropout behind."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(nn.functional.gelu(self.up(self.norm(x))))
        return x + nn.functional.dropout(y, 0.1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D) -> scalar
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Again(Function):
    """block(x), of which only x and the random state are kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, block: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.block, ctx.random = block, torch.get_rng_state()
        ctx.save_for_backward(x)
        return block(x)  # without a graph: a function's forward never builds one

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        now = torch.get_rng_state()
        torch.set_rng_state(ctx.random)
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.block(x)
        torch.set_rng_state(now)
        y.backward(grads[0])  # also gives the block's parameters their gradients
        return x.grad, None


def recompute(model: Model) -> None:
    """Makes the blocks keep their inputs only, in place."""
    for block in model.blocks:
        forward = block.forward
        block.forward = lambda x, forward=forward: Again.apply(x, forward)


def step(model: nn.Module, x: Tensor) -> tuple[float, dict[str, Tensor], int]:
    """Loss, gradients, and the bytes of activations that forward keeps for backward."""
    kept = dict[int, int]()
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def keep(saved: Tensor) -> Tensor:
        if (where := saved.untyped_storage().data_ptr()) not in weights:
            kept[where] = saved.untyped_storage().nbytes()
        return saved

    torch.manual_seed(1)  # for dropout
    with saved_tensors_hooks(keep, lambda saved: saved):
        loss = model(x.clone().requires_grad_())
    loss.backward()
    return (
        loss.item(),
        {n: p.grad for n, p in model.named_parameters() if p.grad is not None},
        sum(kept.values()),
    )


def main() -> None:
    x = torch.randn(B, T, D, generator=torch.Generator().manual_seed(2))
    plain, again = Model(), Model()
    recompute(again)
    runs = [0, 0]  # of blocks, in forward and backward
    for number, model in enumerate((plain, again)):
        for norm in (part for part in model.modules() if isinstance(part, nn.LayerNorm)):
            # a norm runs as often as its block
            norm.register_forward_hook(lambda *_, number=number: runs.__setitem__(number, runs[number] + 1))
    loss, gradients, kept = step(plain, x)
    loss_again, gradients_again, kept_again = step(again, x)
    print(f"a block's input takes {x.nbytes} bytes")
    print(f"without recomputation {BLOCKS} blocks keep {kept} bytes, and run {runs[0]} times")
    print(f"with it they keep {kept_again} bytes, and run {runs[1]} times")
    same = all(torch.equal(g, gradients_again[name]) for name, g in gradients.items())
    print(f"the same loss: {loss == loss_again}; the same bits in every gradient: {same}")


if __name__ == "__main__":
    main()
