"""The tracker of memory: storages, not tensors; resized, seen late, and freed ones."""

import numpy as np
import torch

from fivefold.observe.tracking import CATEGORIES, Tracker


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
