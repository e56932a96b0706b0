"""Compares the weights that several ranks keep, by hashes of their bits.

Ranks that keep the same part of a parameter compute the same update of it, bit for bit. So a difference is a fault: of
memory, of a processor, of a message. It stays in the tensor in which it happened, as gradients are the same for all.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from fivefold.comm import told
from fivefold.kernels.hashing import digest, keys
from fivefold.sharding.parts import Ranges
from fivefold.step.state import State


def compare(state: State) -> str:
    """What differs, in words, the same on all ranks: the first tensor, and which ranks have other bits; "" if nothing
    does. All ranks call it."""
    run, tensors = state.mesh.axis("run"), _kept(state)
    size = int(run.all_reduce(torch.tensor(len(tensors), device=run.device), "max"))
    mine = torch.zeros(1, size, 2, dtype=torch.int64, device=run.device)
    for row, (text, tensor) in enumerate(tensors.items()):
        mine[0, row, 0], mine[0, row, 1] = keys(text)[0], digest(tensor)
    found = run.all_gather(mine).tolist()  # (ranks, tensors, 2)
    holders: dict[int, dict[int, int]] = {}  # of each part: the hash by rank
    for rank, rows in enumerate(found):
        for key, value in rows:
            if key:
                holders.setdefault(key, {})[rank] = value
    wrong = {key for key, values in holders.items() if len(set(values.values())) > 1}
    if not wrong:
        return ""
    teller = next(rank for rank, rows in enumerate(found) if any(key in wrong for key, _ in rows))
    first = next(key for key, _ in found[teller] if key in wrong)
    name = next((text for text in tensors if keys(text)[0] == first), "")  # this rank may lack it
    name = told(name.partition(" ")[2], teller, run)
    more = f" (and {len(wrong) - 1} other tensors)" if len(wrong) > 1 else ""
    return f"after step {state.step} ranks differ in {name}{more}: {_odd(holders[first])}"


def _kept(state: State) -> dict[str, Tensor]:
    """This rank's part of each parameter. Its key is the same on ranks that must have the same bits."""
    parts = {name: part for replica in state.parallel.replicas for name, part in replica.parts.items()}
    found = {f"site{state.mesh.site} {_named(n, parts[n].keeps)}": w for n, w in state.masters().items()}
    if state.outer is not None:
        common = {f"common {_named(n, parts[n].keeps)}": w for n, w in state.outer.weights.items()}
        found |= common
    return {text: tensor for text, tensor in found.items() if tensor.numel()}


def _named(name: str, keeps: Ranges) -> str:
    """A part of a parameter: `blocks.0.mlp.up.weight[0:16,0:32]`."""
    return f"{name}[{','.join('+'.join(f'{a}:{b}' for a, b in dim) for dim in keeps)}]"


def _odd(values: dict[int, int]) -> str:
    """Which ranks have other bits than most."""
    count = Counter(values.values())
    (usual, most), *others = count.most_common()
    if others and others[0][1] == most:
        groups = [_those([rank for rank, v in values.items() if v == value]) for value in count]
        return f"{' and '.join(groups)} have different bits; which are right cannot be said"
    odd = [rank for rank, value in values.items() if value != usual]
    return f"{_those(odd)} {'have' if len(odd) > 1 else 'has'} other bits than {most} other ranks"


def _those(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
