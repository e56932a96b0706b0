"""The tracker of memory: storages, not tensors; resized, seen late, and freed ones."""

import numpy as np
import pytest
import torch

from fivefold.launch.ranks import Ranks
from fivefold.recipe import load, resolve
from fivefold.step.state import build_state
from fivefold_plan.trace.memory import CATEGORIES, Tracker


def test_tracker_follows_views_resizing_and_frees() -> None:
    with Tracker() as tracker:
        x = torch.zeros(100)
        y = x.view(10, 10)[2:]
        big = torch.zeros(1000)
        big.untyped_storage().resize_(0)
        z = torch.zeros(500)
        assert tracker.made() == 2400
        del x
        assert tracker.made() == 2400, "a view keeps it"
        del y, z, big
        assert tracker.made() == 0
    assert tracker.peak().total == 4400


def test_tracker_counts_what_it_did_not_see_made() -> None:
    weight = torch.zeros(8, 8, requires_grad=True)
    with Tracker({"params": lambda: [weight]}) as tracker:
        hidden = torch.from_numpy(np.zeros((4, 8), dtype=np.float32))
        loss = (hidden @ weight).square().sum()
        loss.backward()
    peak = tracker.peak()
    assert peak.highest["params"] == 256
    assert peak.highest["activations"] == 128 + 4 + 4, "the product, which square needs; the loss and a one"
    assert peak.highest["buffers"] >= 128 + 256, "the input and the gradient, of which nothing was said"
    assert set(peak.highest) == set(CATEGORIES)


@pytest.mark.parametrize("mode", ["fp32", "bf16"])
def test_start_up_never_holds_the_weights_twice(mode: str) -> None:
    sizes = ["model.layers=8", "model.dim=64", "model.heads=4", "model.kv_heads=2", "model.ffn_dim=128"]
    recipe = resolve(load("quickstart", [*sizes, f"precision.mode={mode}"], "dp=1"), vocab_size=96)
    tracker = Tracker()
    state = build_state(recipe, Ranks(0, 1, 0, 1, torch.device("cpu")), memory=tracker)
    (replica,) = state.parallel.replicas
    kept = [*replica.masters.values(), *replica.gradients.values()]
    if mode == "bf16":
        kept += replica.kept()["params"]
    assert tracker.peak().total < 1.3 * sum(t.numel() * t.element_size() for t in kept)
