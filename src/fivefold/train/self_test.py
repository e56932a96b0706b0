"""How a run multiplies, settled when it starts, for all ranks, so that it multiplies as before when it resumes: which
library does (RUN/products.json and checkpoints), and which layers round factors, by a test (RUN/fp8.json).

The test is of modes that round factors: each layer's three matmuls on random rows and its own weights, against the
working dtype. Each factor of a matmul is rounded by at most u = 2^-(fraction bits + 1) of its size. The roundings are
independent, so the error of a product's feature is at most sqrt(u_a^2 + u_b^2) of its norm, on average half of that. It
is more if many numbers are too small for their tile's scale, and if a device's matmul is wrong. Such layers multiply in
the working dtype.
"""

from __future__ import annotations

import json
import math
import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from fivefold.comm import Axis, everyone, told
from fivefold.errors import UserError
from fivefold.files import make_folder, read_json, understood, write_atomically
from fivefold.kernels import native
from fivefold.kernels.elementwise import to_device
from fivefold.kernels.gpu import registry
from fivefold.kernels.matmul import input_gradient, linear, weight_gradient
from fivefold.kernels.rounded import RoundedMatmuls
from fivefold.launch.ranks import Ranks
from fivefold.models.card import card_of
from fivefold.parallel.parallelize import rounded_layers, rounding
from fivefold.precision import PRECISIONS, torch_dtype
from fivefold.recipe import Recipe
from fivefold.step.state import State
from fivefold.train.job import Job

FILE, LIBRARY = "fp8.json", "products.json"
ROWS = 128  # random rows; a tile of them shares a scale
PRODUCTS = ("output", "gradient of its input", "gradient of its weight")


@dataclass(frozen=True)
class Tested:
    """errors: of the three products of each weight: that of the worst feature, relative to its norm; infinite if one is
    not finite. allowed: the bound of each."""

    errors: dict[str, tuple[float, ...]]
    allowed: tuple[float, ...]

    @property
    def failed(self) -> dict[str, str]:
        """The layers that are too far from the working dtype, and why."""
        reasons: dict[str, str] = {}
        for name, errors in self.errors.items():
            for product, error, bound in zip(PRODUCTS, errors, self.allowed, strict=True):
                if error > bound:
                    off = f"the {product} is {error:.1%} off, allowed {bound:.1%}"
                    why = off if math.isfinite(error) else f"its {product} is not finite"
                    reasons.setdefault(name.rpartition(".")[0], why)
        return reasons


def self_test(state: State, recipe: Recipe, axis: Axis) -> Tested:
    """Tests the weights that each rank keeps, in a mode that rounds factors. All ranks of the axis get the largest
    errors."""
    how = rounding(recipe)
    assert how is not None
    working = torch_dtype(PRECISIONS[recipe.precision.mode].working)
    masters, names = state.masters(), list(card_of(recipe.model).parameters)
    table = torch.full((len(names), len(PRODUCTS)), -1.0, dtype=torch.float64)
    for stage in state.parallel.stages:
        for layer, module in rounded_layers(stage):
            for leaf, _ in module.named_parameters(recurse=False):
                master = masters.get(name := f"{layer}.{leaf}")
                if leaf != "bias" and master is not None and master.numel():
                    weights = master.to(state.mesh.device, working).reshape(-1, *master.shape[-2:])
                    of_expert = master.dim() == 3
                    each = [
                        _errors(weight, how, f"{name} {i}", of_expert) for i, weight in enumerate(weights)
                    ]
                    table[names.index(name)] = torch.tensor(each, dtype=torch.float64).amax(0)
    found = axis.all_reduce(table.to(axis.device), "max").tolist()
    errors = {name: tuple(row) for name, row in zip(names, found, strict=True) if row[0] >= 0}
    forward, backward = (2.0 ** -(form.fraction + 1) for form in (how.inputs, how.gradients))
    allowed = math.hypot(forward, forward), math.hypot(backward, forward), math.hypot(backward, forward)
    return Tested(errors, allowed)


def fall_back(state: State, failed: set[str]) -> None:
    """Lets these layers multiply in the working dtype."""
    for stage in state.parallel.stages:
        for name, module in list(rounded_layers(stage)):
            if name in failed:
                module.rounded = None
    for replica in state.parallel.replicas if failed else ():
        replica.refresh()  # the masters themselves compute, if the layer kept rounded weights


@torch.no_grad()
def _errors(weight: Tensor, how: RoundedMatmuls, name: str, of_expert: bool = False) -> list[float]:
    """Of one weight (F, D), by the grouped matmuls if it is an expert's."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    x, dy = (torch.randn(ROWS, size, generator=generator).to(weight) for size in weight.shape[::-1])
    try:
        if of_expert:
            stack, ends = weight[None], to_device(torch.tensor([ROWS], dtype=torch.int32), weight.device)
            found = (
                how.grouped(x, stack, ends), how.grouped_input_gradient(dy, stack, ends),
                how.grouped_weight_gradient(dy, x, ends)[0],
            )  # fmt: skip
        else:
            found = how.forward(x, weight), how.input_gradient(dy, weight), how.weight_gradient(dy, x)
    except RuntimeError:  # the device's library does not take these shapes
        return [math.inf] * len(PRODUCTS)
    wanted = linear(x, weight), input_gradient(dy, weight), weight_gradient(dy, x)
    return [_relative(a, b, dim) for a, b, dim in zip(found, wanted, (0, 0, 1), strict=True)]


def _relative(found: Tensor, wanted: Tensor, dim: int) -> float:
    """The largest relative error of a feature: the norms are over the other dim."""
    difference, size = (found.float() - wanted.float()).norm(dim=dim), wanted.float().norm(dim=dim)
    error = torch.where(difference == 0, 0.0, difference / size).max().item()
    return error if math.isfinite(error) else math.inf


def _kernels(table: native.Table) -> str:
    """What the console says of kernels in Triton. Raises UserError: they compute on the first rank, and cannot here."""
    why = registry.why_not()
    if table.triton and why:
        raise UserError(f"{why} on this machine, but the first rank computes with kernels in Triton")
    if table.triton:
        return f"kernels in Triton: {'; '.join(table.triton)}"
    if not why and not registry.measured():
        return "no kernel in Triton is used: `fivefold bench gpu --part kernels` has not measured them on this GPU"
    if not why and registry.faster():
        return "no kernel in Triton is used: the first rank, or the run's checkpoint, has none"
    return f"no kernel in Triton is used: {why or 'PyTorch has been faster on this GPU'}"


def settle(state: State, job: Job, ranks: Ranks, resumed: bool) -> list[str]:
    """Decides which library multiplies, and which layers round factors. Returns what the console shall say. All ranks
    call it together.

    resumed: rank 0's counts."""
    lines, axis = list[str](), everyone(ranks)
    gpu, mine = ranks.device.type == "cuda", native.UNMEASURED
    here = f"{torch.cuda.get_device_name(ranks.device)}, GPU" if gpu else native.place()
    if ranks.first:  # its checkpoint decides, or else its machine
        mine = state.products or (native.Table(here, [], registry.faster()) if gpu else native.table())
        mine = mine._replace(triton=[] if registry.why_not() else mine.triton)
    text = told(json.dumps(mine._asdict(), indent=1), 0, axis)
    state.products = native.Table(**json.loads(text))
    native.hold(state.products)
    if ranks.first:
        write_atomically(job.out / LIBRARY, text + "\n")
    if state.products.processor != here:
        began = state.products.processor.rpartition(", ")[0]
        lines.append(f"this run began on another processor ({began}), so its last bits may differ here")
    if gpu:
        lines.append(_kernels(state.products))
    if job.module is not None or rounding(job.recipe) is None:
        return lines
    mode = PRECISIONS[job.recipe.precision.mode]
    if (layers := _read(axis, job, resumed)) is not None:
        fall_back(state, layers)
        before = f"{mode.name}, except in {', '.join(sorted(layers))}, as before"
        return [*lines, before] if layers else lines
    tested = self_test(state, job.recipe, axis)
    fall_back(state, set(tested.failed))
    if ranks.first:
        make_folder(job.out)
        errors = {n: [str(e) if e == math.inf else e for e in each] for n, each in tested.errors.items()}
        facts = {"products": PRODUCTS, "allowed": tested.allowed, "errors": errors, "in_bf16": tested.failed}
        write_atomically(job.out / FILE, json.dumps(facts, indent=1) + "\n")
    if not tested.errors:
        empty = f"WARNING: precision.fp8_skip_first and fp8_skip_last leave no block in {mode.name}"
        return [*lines, empty]
    largest = [max(errors) for errors in zip(*tested.errors.values(), strict=True)]
    each = ", ".join(
        f"{product} {error:.1%} (allowed {bound:.1%})"
        for product, error, bound in zip(PRODUCTS, largest, tested.allowed, strict=True)
    )
    lines.append(f"self-test of {mode.name} in {len(tested.errors)} weights, largest relative errors: {each}")
    failed = f"failed the self-test of {mode.name} and computes in {mode.working}"
    return [*lines, *(f"WARNING: {name} {failed}: {why}" for name, why in tested.failed.items())]


def _read(axis: Axis, job: Job, resumed: bool) -> set[str] | None:
    """The layers that an earlier part of the run computes in bf16, as rank 0 reads them; None: there is no file, or no
    such part."""
    names = list(card_of(job.recipe.model).parameters)
    flags = torch.zeros(len(names) + 1, device=axis.device)
    path = job.out / FILE
    if axis.rank == 0 and resumed and path.is_file():
        with understood(path):
            failed = {str(name) for name in read_json(path)["in_bf16"]}
        flags[-1] = 1
        for place, name in enumerate(names):
            flags[place] = name.rpartition(".")[0] in failed
    flags = axis.all_reduce(flags).tolist()
    if not flags[-1]:
        return None
    return {name.rpartition(".")[0] for name, flag in zip(names, flags, strict=False) if flag}
