"""Mixed precision with loss scaling by hand (arXiv 1710.03740): fp16 computes, fp32 remembers.

The weights that compute are a rounded copy of the masters. The loss is multiplied by a factor before backward, so that
small gradients do not become zero; the update divides by it. An overflow halves the factor, and the step is skipped.
After some steps without one the factor doubles.

python examples/lectures/mixed_precision.py
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

V, D, T, ROWS, STEPS = 64, 64, 16, 8, 12  # vocabulary, width, length, rows of a batch, steps
LR, B1, B2, EPS = 1e-2, 0.9, 0.95, 1e-6
FIRST, EVERY = 2.0**24, 4  # the factor at the start, and the steps after which it doubles


class Model(nn.Module):
    """Predicts each number from the one before it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.inner, self.head = nn.Embedding(V, D), nn.Linear(D, D), nn.Linear(D, V)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """(B, T) each -> mean loss. The loss itself is computed in fp32: its sum runs over a vocabulary."""
        x = self.head(torch.tanh(self.inner(self.embed(inputs))))
        return nn.functional.cross_entropy(x.flatten(0, 1).float(), targets.flatten())


def batch(step: int) -> tuple[Tensor, Tensor]:
    x = torch.randint(0, V, (ROWS, T), generator=torch.Generator().manual_seed(step))
    return x, (5 * x + 1) % V


@dataclass
class Scale:
    """The factor on the loss. good: steps without an overflow since it last changed."""

    factor: float = FIRST
    good: int = 0

    def update(self, overflow: bool) -> None:
        self.good = 0 if overflow else self.good + 1
        if overflow:
            self.factor /= 2
        elif self.good == EVERY:
            self.factor, self.good = self.factor * 2, 0


@dataclass
class Trained:
    losses: list[float] = field(default_factory=list)
    factors: list[float] = field(default_factory=list)  # at the beginning of each step
    skipped: list[int] = field(default_factory=list)  # steps


def train(model: nn.Module, steps: int = STEPS) -> tuple[Trained, dict[str, Tensor]]:
    """Trains a model whose weights become fp16; the fp32 masters by name."""
    masters = {name: p.detach().float().clone() for name, p in model.named_parameters()}
    moments = {name: (torch.zeros_like(w), torch.zeros_like(w)) for name, w in masters.items()}
    model.half()
    done, scale, updates = Trained(), Scale(), 0
    for step in range(steps):
        model.zero_grad()
        loss = model(*batch(step))
        (loss * scale.factor).backward()
        gradients = {
            name: p.grad.float() / scale.factor for name, p in model.named_parameters() if p.grad is not None
        }
        overflow = not all(g.isfinite().all() for g in gradients.values())
        done.losses.append(loss.item())
        done.factors.append(scale.factor)
        scale.update(overflow)
        if overflow:
            done.skipped.append(step)
            continue
        updates += 1
        for name, parameter in model.named_parameters():
            (m, v), g, w = moments[name], gradients[name], masters[name]
            m.lerp_(g, 1 - B1)
            v.lerp_(g.square(), 1 - B2)
            w -= LR * (m / (1 - B1**updates)) / ((v / (1 - B2**updates)).sqrt() + EPS)
            parameter.data.copy_(w)  # rounded to fp16
    return done, masters


def lost(factor: float) -> float:
    """The share of gradients that are zero in fp16 and not in fp32. The loss is a 30,000th of the usual one, as where
    a batch has many more tokens."""
    zero, nonzero = 0, 0
    for dtype in (torch.float32, torch.float16):
        model = Model().to(dtype)
        (model(*batch(0)) / 30_000 * factor).backward()
        count = sum(int((p.grad != 0).sum()) for p in model.parameters() if p.grad is not None)
        zero, nonzero = nonzero - count, max(nonzero, count)
    return zero / nonzero


def main() -> None:
    for exponent in (0, 5, 10):
        print(f"factor 2^{exponent}: fp16 loses {lost(2.0**exponent):.0%} of the gradients")
    w16, w32 = torch.ones((), dtype=torch.float16), torch.ones(())
    for _ in range(100):
        w16 -= 1e-4
        w32 -= 1e-4
    print(f"1 minus a hundred times 0.0001: {w16.item():.4f} in fp16, {w32.item():.4f} in fp32")
    done, masters = train(Model())
    print(
        f"{sum(w.numel() for w in masters.values())} parameters: 2 bytes to compute, 4 for the master, 8 for moments"
    )
    for step, (loss, factor) in enumerate(zip(done.losses, done.factors, strict=True)):
        what = "overflow: skipped, the factor halves" if step in done.skipped else "updated"
        print(f"step {step:>2}  factor 2^{factor.hex().partition('p+')[2]:<2}  loss {loss:.3f}  {what}")


if __name__ == "__main__":
    main()
