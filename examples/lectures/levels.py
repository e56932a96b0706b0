"""Gradients in few bits by hand: levels that are equally far apart, and levels that follow the numbers.

A block of numbers is sent as codes and one scale, its largest element. A code stands for a level, a share of the scale
between -1 and 1. Most numbers of a gradient are far smaller than the largest of their block. Of levels that are equally
far apart most therefore stand for few numbers. Quantiles of normal numbers (QLoRA, arXiv 2305.14314) each stand for
about as many; the dynamic map (arXiv 2110.02861) keeps small numbers to about the same relative distance as large ones.

What is lost is not lost for good: error feedback adds it to the next step's gradient (arXiv 1901.09847).

python examples/lectures/levels.py
"""

import torch
from torch import Tensor

BLOCK, N, STEPS = (
    256,
    1 << 16,
    50,
)  # elements that share a scale, elements of the gradient, steps with feedback


def equal(bits: int) -> Tensor:
    """Ascending levels from -1 to 1, equally far apart, zero among them."""
    most = 2 ** (bits - 1) - 1
    return torch.arange(-most, most + 1) / most


def normal() -> Tensor:
    """16 quantiles of normal numbers: 7 below zero, zero, 8 above. The outermost ones are -1 and 1."""
    last = 1 - (1 / 30 + 1 / 32) / 2  # the mean of the last quantile of 15 and of 16 equal parts
    below, above = (torch.special.ndtri(torch.linspace(0.5, last, n + 1).double())[1:] for n in (7, 8))
    return torch.cat([-below.flip(0) / below[-1], torch.zeros(1), above / above[-1]]).float()


def dynamic() -> Tensor:
    """256 levels: 1, 2, 4 ... 64 fractions of 1e-6, 1e-5 ... 1, below and above zero; zero and 1."""
    found = []
    for power in range(7):
        parts = 2**power
        found.append(
            10.0 ** (power - 6) * (0.1 + 0.9 * (torch.arange(parts, dtype=torch.float64) + 0.5) / parts)
        )
    fractions = torch.cat(found)
    return torch.cat([-fractions, torch.zeros(1), fractions, torch.ones(1)]).sort().values.float()


def rounded(x: Tensor, levels: Tensor) -> Tensor:
    """What arrives of x (N): each number becomes the nearest level of its block."""
    blocks = x.view(-1, BLOCK)
    scales = blocks.abs().amax(1, keepdim=True)
    middles = (levels[1:] + levels[:-1]) / 2
    return (levels[torch.bucketize(blocks / scales, middles)] * scales).view(-1)


def gradient(seed: int) -> Tensor:
    """Normal numbers, of which some neighbours are larger than others, as in real gradients."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(N, generator=draw) * torch.randn(N, generator=draw).exp()


def lost(x: Tensor, back: Tensor) -> float:
    return ((back - x).norm() / x.norm()).item()


def sums(levels: Tensor, feedback: bool) -> float:
    """The share that is lost of a sum over STEPS gradients."""
    whole, arrived, left = torch.zeros(N), torch.zeros(N), torch.zeros(N)
    for step in range(STEPS):
        x = gradient(step)
        sent = rounded(x + left, levels)
        left = x + left - sent if feedback else left
        whole, arrived = whole + x, arrived + sent
    return lost(whole, arrived)


if __name__ == "__main__":
    x = gradient(0)
    named = {"int4": equal(4), "nf4": normal(), "int8": equal(8), "dynamic8": dynamic()}
    print("          levels   lost   become zero   lost of 50 steps   with feedback")
    for name, levels in named.items():
        back = rounded(x, levels)
        zeros = (back == 0).float().mean().item()
        first = f"{name:8}  {len(levels):6}  {lost(x, back):5.1%}  {zeros:11.1%}"
        print(f"{first}  {sums(levels, False):17.1%}  {sums(levels, True):14.2%}")
