"""Initial weights: good normal numbers, the same on every layout, fast."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.kernels.hashing import keys
from fivefold.models.base import build, fill_normal_
from fivefold.recipe import ModelSection, resolve_model

N = 1 << 20


def first(count: int, seed: int = 0, name: str = "w", std: float = 1.0) -> torch.Tensor:
    """The first elements of a parameter."""
    return init_box(seed, name, (count,), std, [(0, count)])


def init_box(
    seed: int, name: str, shape: Sequence[int], std: float, box: Sequence[tuple[int, int]]
) -> torch.Tensor:
    out = torch.empty([stop - start for start, stop in box])
    fill_normal_(out, keys(f"{seed}/{name}"), std, tuple(shape), box)
    return out


@pytest.fixture(scope="module")
def numbers() -> torch.Tensor:
    return first(N, name="blocks.0.mlp.down.weight").double()


def test_first_four_moments_are_those_of_a_normal(numbers):
    # Allowed: four standard errors, sqrt(variance of x^n / N).
    for power, mean, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((numbers**power).mean() - mean) < 4 * math.sqrt(variance / N), power


def test_distribution_is_normal_everywhere(numbers):
    """Kolmogorov-Smirnov: largest distance of the distribution functions; 1.95 / sqrt(N) has p = 0.001."""
    cdf = torch.special.ndtr(numbers.sort().values)
    steps = torch.arange(1, N + 1, dtype=torch.float64) / N
    assert (cdf - steps).abs().max() < 1.95 / math.sqrt(N)


def test_tails_are_there(numbers):
    for bound in (3.0, 4.0):
        expected = N * 2 * torch.special.ndtr(torch.tensor(-bound, dtype=torch.float64)).item()
        assert abs((numbers.abs() > bound).sum() - expected) < 4 * math.sqrt(expected)


def test_elements_do_not_follow_each_other(numbers):
    """Correlation at many distances, of values and of squares: standard error 1 / sqrt(N)."""
    for values in (numbers, (numbers**2 - 1) / math.sqrt(2)):
        for lag in (1, 2, 3, 4, 64, 384, 1024, 4096, 65536):
            correlation = (values[:-lag] * values[lag:]).mean()
            assert abs(correlation) < 4.5 / math.sqrt(N - lag), lag


def test_names_and_seeds_are_independent():
    """Also neighbouring seeds, and names that differ in one digit."""
    names = [(s, f"blocks.{i}.{x}.weight") for s in (0, 1, 2**40) for i in (0, 1, 10) for x in ("a", "b")]
    rows = torch.stack([first(1 << 14, seed, name) for seed, name in names])
    for a, b in itertools.combinations(range(len(names)), 2):
        assert abs((rows[a] * rows[b]).mean()) < 5 / math.sqrt(1 << 14), (names[a], names[b])
        assert len(set(rows[a].tolist()) & set(rows[b].tolist())) < 100  # not the same numbers elsewhere


@settings(max_examples=30, deadline=None)
@given(start=st.integers(0, 300_000), length=st.integers(0, 200_000))
def test_any_slice_has_the_bits_of_the_whole(start, length):
    whole, stop = first(500_000, 5, std=0.02), start + length
    assert torch.equal(init_box(5, "w", (500_000,), 0.02, [(start, stop)]), whole[start:stop])


@settings(max_examples=40, deadline=None)
@given(data=st.data(), shape=st.lists(st.integers(1, 40), min_size=1, max_size=4))
def test_any_box_has_the_bits_of_the_whole(data, shape):
    box = [tuple(sorted(data.draw(st.lists(st.integers(0, n), min_size=2, max_size=2)))) for n in shape]
    whole = first(math.prod(shape), 5, std=0.02).view(shape)
    assert torch.equal(init_box(5, "w", shape, 0.02, box), whole[tuple(slice(a, b) for a, b in box)])


def test_values_beyond_two_to_the_32_elements():
    far = init_box(0, "w", (2**34,), 1.0, [(2**33, 2**33 + 50_000)])
    assert abs(far.mean()) < 0.02
    assert not torch.equal(far, first(50_000))


def test_values_are_as_described():
    """Against a restatement with Python's integers and its mathematical library."""
    digest = hashlib.blake2b(b"7/embed.weight", digest_size=16).digest()
    key_a, key_b = (int.from_bytes(digest[i : i + 8], "little") for i in (0, 8))
    expected = []
    for index in range(1000):
        x = (index * 0x9E3779B97F4A7C15 + key_a) % 2**64
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64 ^ key_b
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
        x ^= x >> 31
        radius, angle = (x >> 32) / 2**32, (x % 2**32) / 2**32 - 0.5
        expected.append(math.sqrt(-2 * math.log(radius)) * math.sin(math.pi * angle))
    got = first(1000, 7, "embed.weight")
    torch.testing.assert_close(got, torch.tensor(expected), atol=1e-5, rtol=1e-5)


def test_the_first_values_never_change():
    """To the bit: a change of the generator would silently make every published seed another run."""
    values = [0.24205341935157776, -0.9440692067146301, 0.38297778367996216, -0.15496514737606049]
    assert first(4, name="embed.weight").tolist() == values


@pytest.mark.parametrize("arch", ["llama", "gpt2", "bert"])
def test_every_parameter_gets_its_own_kind_of_value(arch):
    section = ModelSection(arch=arch, layers=4, dim=128, heads=4, vocab_size=512, init_std=0.03)
    module = build(resolve_model(section, vocab_size=512), device="cpu", seed=1)
    for name, parameter in module.named_parameters():
        value, kind = parameter.detach(), name.rsplit(".", 2)[-2:]
        if name.endswith("bias"):
            assert not value.any(), name
        elif "norm" in kind[0] or kind[0].endswith("norm"):
            assert (value == 1).all(), name
        else:
            std = 0.03 / math.sqrt(8) if name.endswith(("attention.out.weight", "mlp.down.weight")) else 0.03
            assert value.ndim == 2
            assert abs(value.std() / std - 1) < 4.5 / math.sqrt(2 * value.numel()), name


def test_build_on_meta_takes_no_memory_and_seeds_differ():
    section = resolve_model(ModelSection(layers=1, dim=64, heads=2, vocab_size=64), vocab_size=64)
    assert all(p.is_meta for p in build(section).parameters())
    a, b, c = (build(section, device="cpu", seed=seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["embed.weight"], c["embed.weight"])
