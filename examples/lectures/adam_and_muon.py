"""Adam and Muon by hand: what they remember of the gradients, and what they make of them.

Adam (arXiv 1412.6980, with decoupled decay 1711.05101) divides the mean gradient of each element by its usual size.
Muon (Jordan et al. 2024, arXiv 2502.16982) takes a matrix as a whole: it makes all singular values of the mean gradient
about 1, by a polynomial that is applied five times. It serves the matrices inside blocks; Adam takes the rest.

python examples/lectures/adam_and_muon.py
"""

import torch
from torch import Tensor, nn

V, D, T, ROWS, STEPS = 32, 48, 16, 8, 30  # vocabulary, width, length, rows of a batch, steps
LR, DECAY, B1, B2, EPS, MOMENTUM = 5e-3, 0.1, 0.9, 0.95, 1e-6, 0.95


class Model(nn.Module):
    """Predicts each number from the one before it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(V, D), nn.Linear(D, V)
        self.blocks = nn.ModuleList(nn.Linear(D, D) for _ in range(2))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:  # (B, T) each -> mean loss
        x = self.embed(inputs)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def batch(step: int) -> tuple[Tensor, Tensor]:
    x = torch.randint(0, V, (ROWS, T), generator=torch.Generator().manual_seed(step))
    return x, (5 * x + 1) % V


class Adam:
    """Two moments per element, which begin at zero: the first steps divide by what is missing."""

    bytes_per_element = 8

    def __init__(self, weight: Tensor):
        self.m, self.v, self.steps = torch.zeros_like(weight), torch.zeros_like(weight), 0

    def direction(self, g: Tensor) -> Tensor:
        self.steps += 1
        self.m += (1 - B1) * (g - self.m)
        self.v += (1 - B2) * (g * g - self.v)
        m, v = self.m / (1 - B1**self.steps), self.v / (1 - B2**self.steps)
        return m / (v.sqrt() + EPS)


def orthogonal(g: Tensor) -> Tensor:
    """U V^T of g = U S V^T, about: Newton-Schulz moves each singular value s to a s + b s^3 + c s^5, which is near 1
    after five times."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = (g.T if g.shape[0] > g.shape[1] else g) / g.norm()
    for _ in range(5):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x.T if g.shape[0] > g.shape[1] else x


class Muon:
    """One moment per element. The direction looks one gradient ahead (Nesterov). Its factor gives it the usual size of
    Adam's, so one learning rate suits both."""

    bytes_per_element = 4

    def __init__(self, weight: Tensor):
        self.m = torch.zeros_like(weight)

    def direction(self, g: Tensor) -> Tensor:
        self.m += (1 - MOMENTUM) * (g - self.m)
        ahead = (1 - MOMENTUM) * g + MOMENTUM * self.m
        return 0.2 * max(g.shape) ** 0.5 * orthogonal(ahead)


def train(model: nn.Module, name: str, steps: int = STEPS) -> tuple[list[float], int]:
    """Trains in place by "adam" or "muon"; the loss of each step, and the bytes of states."""
    states = {}
    for parameter, w in model.named_parameters():
        by_muon = name == "muon" and parameter.startswith("blocks.") and w.dim() == 2
        states[parameter] = Muon(w.detach()) if by_muon else Adam(w.detach())
    losses = []
    for step in range(steps):
        model.zero_grad()
        loss = model(*batch(step))
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for parameter, w in model.named_parameters():
                assert w.grad is not None
                direction = states[parameter].direction(w.grad)
                w *= 1 - LR * (DECAY if w.dim() > 1 else 0)  # decay of matrices only
                w -= LR * direction
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    return losses, sum(sizes[name] * state.bytes_per_element for name, state in states.items())


def main() -> None:
    torch.manual_seed(1)
    g = torch.randn(D, 2 * D) @ torch.diag(torch.logspace(0, -2, 2 * D))
    before, after = torch.linalg.svdvals(g / g.norm()), torch.linalg.svdvals(orthogonal(g))
    print(f"singular values of a gradient: {before.max():.3f} to {before.min():.3f}")
    print(f"of Muon's direction:           {after.max():.2f} to {after.min():.2f}")
    first = Adam(g).direction(g)
    print(f"Adam's first direction is the gradient's sign: {bool((first - g.sign()).abs().median() < 0.01)}")
    for name in ("adam", "muon"):
        losses, size = train(Model(), name)
        print(f"{name}: loss {losses[0]:.2f} -> {losses[-1]:.2f} in {STEPS} steps, {size} bytes of states")


if __name__ == "__main__":
    main()
