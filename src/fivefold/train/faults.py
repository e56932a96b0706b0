"""What a run does when a number is not finite, or a loss or norm is a spike: the policies of `[faults]`.

All ranks know the same figures, so they act alike. Such a step has not changed the weights (step/step.py), unless the
recipe only wants to be told of it. `train/run.py` goes back to a checkpoint. RUN/rollbacks.json says what was left out
then, and checkpoints repeat it. So every resume takes the same data, from whichever checkpoint.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fivefold.checkpoint.store import LARGEST
from fivefold.comm import told
from fivefold.errors import UserError
from fivefold.files import read_json
from fivefold.kernels.hashing import digest, keys
from fivefold.observe.faults import GROWTH, described, found_in
from fivefold.recipe import FaultsSection, Recipe
from fivefold.step.state import State
from fivefold.step.step import last_update
from fivefold.train.restart import newest

MAX_SKIPPED = 5  # steps in a row with a non-finite loss or gradient before the run stops
ROLLBACKS = "rollbacks.json"
UPDATED = ("the update is skipped", "early updates may have used it")
ADVICE = "a smaller optim.lr or optim.grad_clip"


class Fault(UserError):
    """Something after which the run does not go on as before.

    step: the one (1, 2, ...) in which it was found. act: "rollback" or "abort". back_to: checkpoints up to this step
    may be used. leaves_out: the data since then are to blame. good: the weights are what they were before the fault,
    and may be saved. advice: with what to resume if not.
    """

    def __init__(
        self,
        step: int,
        said: str,
        act: str,
        back_to: int,
        leaves_out: bool = True,
        good: bool = True,
        advice: str = ADVICE,
    ):
        super().__init__(said)
        self.advice = advice
        self.step, self.said, self.act, self.back_to = step, said, act, back_to
        self.leaves_out, self.good = leaves_out, good

    def ended(self, run: Path) -> UserError:
        """The error with which the run ends. It says what to do if the weights are not good."""
        where = f"Resume from step {saved}" if (saved := newest(run)) else "Start again"
        return (
            self if self.good else UserError(f"{self.said}. They are not saved. {where} with {self.advice}")
        )


def policy(faults: FaultsSection, kind: str) -> str:
    """What the recipe wants done after a fault of this kind: "tell", "skip", "rollback" or "abort"."""
    if kind == "overflow":
        return "skip"
    if kind == "destroyed":  # to skip this step would not bring the weights back
        return "rollback" if faults.on_nonfinite == "rollback" else "abort"
    return faults.on_nonfinite if kind == "nonfinite" else faults.on_spike


def goes_back(faults: FaultsSection) -> bool:
    """True if any policy goes back to a checkpoint."""
    return "rollback" in (faults.on_nonfinite, faults.on_spike, faults.on_corruption)


def read_rollbacks(out: Path) -> dict[str, Any]:
    """RUN/rollbacks.json: "rollbacks", pairs of the step of a fault and the one that the run went back to, and
    "left_out", as in `State`. Raises UserError: it is damaged."""
    path = out / ROLLBACKS
    try:
        past = read_json(path)
        pairs = [*past["rollbacks"], *past["left_out"]]
        if all(isinstance(n, int) and n >= 0 for first, second in pairs for n in (first, second)):
            return past
    except FileNotFoundError:
        return {"rollbacks": [], "left_out": []}
    except (OSError, UserError, ValueError, LookupError, TypeError):
        pass
    raise UserError(f"{path} is damaged: it says which data the run leaves out, so it cannot resume exactly")


def _early(recipe: Recipe) -> bool:
    """True if weights may change before their step is judged."""
    return recipe.layout.early or not recipe.servers.judging


def note(recipe: Recipe, figures: Mapping[str, Any]) -> str:
    """The line that the console says of a step; "" if nothing is wrong with it."""
    if not (kinds := found_in(figures)):
        return ""
    used = all(policy(recipe.faults, kind) == "tell" for kind in kinds)
    said = "; ".join(described(kind, figures) for kind in kinds)
    act = "the update is used all the same" if used else UPDATED[_early(recipe)]
    return f"step {figures['step']}: {said}; {act}"


def judged(recipe: Recipe, figures: Mapping[str, Any], skipped: int) -> Fault | None:
    """What ends the run as it is, if anything in a step's figures does. skipped: as in `step.Done`."""
    step, faults, early = figures["step"], recipe.faults, _early(recipe)
    if skipped >= MAX_SKIPPED and faults.on_nonfinite == "skip":
        diverged = (
            f"loss or gradient were not finite in {MAX_SKIPPED} steps in a row, up to step {step}: the run has "
            f"diverged. These steps did not change the weights. Resume with {ADVICE}, or from an older checkpoint"
        )
        return Fault(step, diverged, "abort", step - skipped)
    if (lost := figures.get("dropped_share", 0)) and recipe.layout.expert_buffer:
        given = recipe.layout.expert_buffer
        said = f"step {step}: layout.expert_buffer = {given:g} had no room for {lost:.2%} of experts' rows"
        said, instead = f"{said}, which the new weights lack", f"layout.expert_buffer above {given:g}, or 0"
        return Fault(step, said, "abort", step - 1, good=False, advice=instead)
    for kind in found_in(figures):
        if (act := policy(faults, kind)) in ("rollback", "abort"):
            said = f"step {step}: {described(kind, figures)}"
            if kind == "destroyed":
                return Fault(step, said, act, step - 2, good=False)
            return Fault(step, f"{said}; {UPDATED[early]}", act, step - 1, good=not early)
    return None


def destroyed_after(step: int, faults: FaultsSection) -> Fault:
    """The fault of weights or states that are found destroyed after this step."""
    said = (
        f"after step {step} weights or optimizer states are not finite, beyond {LARGEST:.0e}, or grew "
        f"{GROWTH:,.0f}-fold in a step, or a buffer holds NaN: an update has destroyed them"
    )
    return Fault(step, said, policy(faults, "destroyed"), step - 1, good=False)


@torch.no_grad()
def weights_fault(state: State, faults: FaultsSection) -> Fault | None:
    """A fault if a weight or a state of the optimizer is not finite or beyond LARGEST, or a buffer holds NaN, or the
    last update has destroyed weights (step/step.py), on any rank. All ranks call it."""
    common = state.outer.weights if state.outer is not None else {}
    worst = torch.zeros((), dtype=torch.float64, device=state.mesh.device)
    for tensors in (state.masters(), state.moments(), common):
        for tensor in tensors.values():
            if tensor.numel() and tensor.is_floating_point():
                largest = torch.linalg.vector_norm(tensor.detach(), torch.inf).to(worst)
                worst = torch.maximum(worst, largest)
                if state.parallel.disk is not None:
                    state.parallel.disk.touched(tensor.nbytes)
    wrong = torch.maximum((~(worst <= LARGEST)).float(), last_update(state)[0])
    for buffer in state.buffers().values():
        if buffer.is_floating_point():
            wrong = torch.maximum(wrong, buffer.float().isnan().any().float())
    anywhere = state.mesh.axis("run").all_reduce(wrong, "max").item()
    return destroyed_after(state.step, faults) if anywhere else None


def corrupted(state: State, moments: bool = False) -> str:
    """Compares the weights that several ranks keep, by hashes of their bits. Returns what differs, in words, the same
    on all ranks: the first tensor, and which ranks have other bits; "" if nothing does. All ranks call it. moments: the
    optimizer's states and the buffers, too.

    Ranks that keep the same part of a parameter compute the same update of it, bit for bit. So a difference is a fault:
    of memory, of a processor, of a message. It stays in the tensor in which it happened, as gradients are the same for
    all.
    """
    run, parts, tensors = state.mesh.axis("run"), state.parts(), dict[str, Tensor]()
    common = state.outer.weights if state.outer is not None else {}
    # This rank's part of each parameter. Its key is the same on ranks that must have the same bits
    own, states = f"replica_group{state.mesh.replica_group}", state.moments() if moments else {}
    held = [(own, name, weight, parts[name].keeps) for name, weight in state.masters().items()]
    held += [("common", name, weight, parts[name].keeps) for name, weight in common.items()]
    for (moment, name), part in state.moment_parts().items() if moments else ():
        if (key := f"{moment}.{name}") in states:
            held.append((own, key, states[key], part.keeps))
    held += [(own, name, buffer, ()) for name, buffer in state.buffers().items() if moments]
    for whose, name, tensor, keeps in held:
        if tensor.numel():
            place = ",".join("+".join(f"{a}:{b}" for a, b in dim) for dim in keeps)
            tensors[f"{whose} {name}[{place}]"] = tensor
    size = int(run.all_reduce(torch.tensor(len(tensors), device=run.device), "max"))
    hashes = torch.zeros(1, size, 2, dtype=torch.int64, device=run.device)
    for row, (text, tensor) in enumerate(tensors.items()):
        hashes[0, row, 0], hashes[0, row, 1] = keys(text)[0], digest(tensor)
    by_rank = run.all_gather(hashes).tolist()  # (ranks, tensors, 2)
    holders: dict[int, dict[int, int]] = {}  # of each part: the hash by rank
    for rank, rows in enumerate(by_rank):
        for key, value in rows:
            if key:
                holders.setdefault(key, {})[rank] = value
    wrong = {key for key, values in holders.items() if len(set(values.values())) > 1}
    if not wrong:
        return ""
    teller = next(rank for rank, rows in enumerate(by_rank) if any(key in wrong for key, _ in rows))
    first = next(key for key, _ in by_rank[teller] if key in wrong)
    name = next((text for text in tensors if keys(text)[0] == first), "")  # this rank may lack it
    name = told(name.partition(" ")[2], teller, run)
    more = f" (and {len(wrong) - 1} other tensors)" if len(wrong) > 1 else ""
    return f"after step {state.step} ranks differ in {name}{more}: {_odd(holders[first])}"


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
