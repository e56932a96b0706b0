"""Takes one wait out of the program at a time, and traces what it belongs to. In a process that stands for a GPU:

    python without_waits.py LIBRARY... < PLACES

PLACES has one line of JSON, a list of `places`. A file or a function alone takes nothing out. "FILE messages" takes
out, one at a time, what waits for a started message. It answers one line of JSON for each: what `Races` has found, or
how the trace failed; of messages, that of each line.
"""

from __future__ import annotations

import ast
import ctypes
import importlib
import inspect
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import CodeType, ModuleType
from typing import Any
from unittest.mock import patch

from sources import FILES, SRC, name_of

METHODS = {"wait", "wait_stream", "wait_event", "synchronize", "record", "record_event", "record_stream"}


def places() -> Iterator[str]:
    """Every call of such a method outside of traces: "FILE FUNCTION METHOD", and " N" if the function has several."""
    for path in FILES:
        file = name_of(path).removeprefix("fivefold/")
        if not file.startswith("fivefold_plan/trace/"):
            yield from (f"{file} {name}" for name in calls(ast.parse(path.read_text())))


def calls(tree: ast.AST) -> dict[str, ast.Call]:
    """The calls in a file, by "FUNCTION METHOD"."""
    found: dict[str, ast.Call] = {}

    def visit(node: ast.AST, within: str) -> None:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in METHODS:
            name, number = f"{within} {node.func.attr}", 1
            while (key := name if number == 1 else f"{name} {number}") in found:
                number += 1
            found[key] = node
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            within = f"{within}.{node.name}".lstrip(".")
        for child in ast.iter_child_nodes(node):
            visit(child, within)

    visit(tree, "")
    return found


@contextmanager
def without(place: str) -> Iterator[None]:
    """The program does not make this call."""
    file, _, name = place.partition(" ")
    path = SRC / file if (SRC / file).exists() else SRC / "fivefold" / file
    tree = ast.parse(path.read_text())
    call = calls(tree)[name]

    class Remove(ast.NodeTransformer):
        def visit_Call(self, node: ast.Call) -> ast.AST:
            return ast.copy_location(ast.Constant(None), node) if node is call else self.generic_visit(node)

    code = compile(Remove().visit(tree), str(path), "exec", dont_inherit=True)
    found: Any = importlib.import_module(name_of(path).removesuffix(".py").replace("/", "."))
    names = []
    for part in name.split()[0].split("."):  # a function inside of another comes with it
        if isinstance(found, ModuleType | type):
            found = vars(found)[part]
            names.append(part)
    found = inspect.unwrap(getattr(found, "fget", None) or getattr(found, "func", None) or found)
    right = found.__code__
    found.__code__ = next(each for each in codes(code) if each.co_qualname == ".".join(names))
    try:
        yield
    finally:
        found.__code__ = right


@contextmanager
def waiting(but: str = "") -> Iterator[set[str]]:
    """Yields the lines that wait for a started message, as `callers`. but: this one does not."""
    from fivefold.comm.axis import Started

    wait, lines = Started.__call__, set[str]()

    def called(started: Started) -> Any:
        if started.work is None:  # one rank sends nothing
            return wait(started)
        lines.add(line := callers())
        return started.result if line == but else wait(started)

    Started.__call__ = called
    try:
        yield lines
    finally:
        Started.__call__ = wait


def callers() -> str:
    """The three innermost lines of the program outside of axes and traces, such as "parallel/tensor.py:70 sum_over".
    One line may wait for several others, to which it was handed on."""
    frame, found = sys._getframe(1), list[str]()
    while frame and len(found) < 3:
        name, code = frame.f_code.co_filename, frame.f_code
        file = name.removeprefix(f"{SRC}/").removeprefix("fivefold/")
        outside = name == file or file.startswith(("fivefold_plan/trace/", "comm/axis.py"))
        if not outside and code.co_name not in ("<listcomp>", "<genexpr>"):
            found.append(f"{file}:{frame.f_lineno} {code.co_qualname}")
        frame = frame.f_back
    return " < ".join(found)


def codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from codes(constant)


def saved() -> dict[str, int]:
    """A checkpoint beside the next update, which changes the weights; the host reads the copy."""
    import torch
    from stream_cases import watched

    from fivefold.checkpoint.write import Copy, whole_pieces
    from fivefold_plan.trace.step import DEVICE

    with watched() as races:
        weights = torch.zeros(64, device=DEVICE)
        copy = Copy({"model": whole_pieces({"weights": weights})})
        copy.wait()
        weights.add_(1)
        for piece in copy.run()["model"]:
            piece.tensor.sum()
    return races.found


def read() -> dict[str, int]:
    """A loop reads the figures of its steps."""
    import torch
    from stream_cases import watched

    from fivefold.step.step import SECONDS, Done
    from fivefold_plan.trace.step import DEVICE

    with watched() as races:
        figures = {"loss": torch.zeros((), device=DEVICE)}
        assert Done(0.1, figures).loss
        assert Done(0.1, figures, torch.zeros(2, len(SECONDS), device=DEVICE)).seconds
    return races.found


def prefetched() -> dict[str, int]:
    """A batch is copied beside a step, which uses it and drops it."""
    import torch
    from stream_cases import watched

    from fivefold.parallel.mesh import Microbatch, Share
    from fivefold.train.share import Copies
    from fivefold_plan.trace.step import DEVICE

    with watched() as races:
        given = torch.zeros(1, 4, dtype=torch.int64, device=DEVICE)
        copies = Copies(DEVICE)

        def read() -> Share:
            tokens = torch.zeros(1, 4, dtype=torch.int64).pin_memory().to(DEVICE, non_blocking=True)
            return Share([Microbatch(tokens, tokens + given)], 1, 1)

        share = copies.wait(*copies.begin(read))
        used = share[0].inputs * share[0].targets
        del share
        used.add_(1)
    return races.found


def traced(layout: str, arch: str, *sets: str) -> dict[str, int]:
    from test_trace_gpu import recipe_of

    from fivefold.recipe import microbatches_per_step
    from fivefold_plan.trace.step import DEVICE, trace

    recipe = recipe_of(layout, arch, *sets)
    return trace(recipe, 0, microbatches_per_step(recipe), DEVICE).races


def unused() -> dict[str, int]:
    """A step in which a weight has no gradient, and one in which a block has none in the last of two microbatches.
    Their earlier sums come from the host once more: for zeros in them, and for the sum over ranks."""
    from fivefold.parallel.replica import Hooked

    take, found = Hooked._take, Counter[str]()
    for ranks, weights, microbatches in ((1, "norm.weight", {0, 1}), (2, "blocks.1.", {1})):
        seen = Counter[str]()

        def taken(replica: Any, index: int, p: Any, seen=seen, weights=weights, lost=microbatches) -> None:
            name = replica.names[index]
            if name.startswith(weights) and seen[name] % 2 in lost:
                p.grad = None
            seen[name] += 1
            take(replica, index, p)

        sets = [f"train.global_batch_size={2 * ranks}", "train.microbatch_size=1", *LARGE]
        with patch.object(Hooked, "_take", taken), patch.object(Hooked, "allow_zeros", lambda *_: None):
            found.update(traced(f"dp={ranks},offload=states:host", "llama", *sets))
    return found


LARGE = ["model.seq_len=512", "model.dim=64", "model.vocab_size=4096"]
"""A model of which some activations are large enough to leave the device."""
RING = partial(traced, "cp=2", "llama")
OUTER = partial(
    traced, "dp=2", "llama", "sync.method=diloco", "sync.every=4", "sync.overlap=1", "sync.outer_dtype=int8"
)
TO_DISK = partial(traced, "dp=1", "llama", "layout.offload=all:disk", *LARGE)
TO_HOST = partial(
    traced, "dp=1,offload=all:host,offload_update=early,offload_window=3", "llama", "optim.grad_clip=0",
    "faults.on_nonfinite=abort", *LARGE,
)  # fmt: skip
TRACES: dict[str, Callable[[], dict[str, int]]] = {
    "checkpoint/write.py": saved,
    "train/share.py": prefetched,
    "comm/axis.py": RING,
    "comm/execute.py": OUTER,
    "parallel/context.py": RING,
    "parallel/data.py": partial(traced, "dp=2,all_reduce=ring", "llama"),
    "parallel/diloco.py": OUTER,
    "parallel/expert.py": partial(
        traced, "dp=2,ep=2", "moe", "precision.mode=fp8", "precision.fp8_dispatch=true"
    ),
    "parallel/offload/activations.py": partial(traced, "dp=1", "llama", "layout.offload=activations", *LARGE),
    "parallel/offload/disk.py": TO_HOST,
    "parallel/offload/pages.py": TO_HOST,
    "parallel/offload/rows.py": partial(traced, "dp=2,zero=2", "llama", "layout.offload=all:host", *LARGE),
    "parallel/offload/update.py": TO_DISK,
    "kernels/private.py": partial(traced, "dp=2,zero=3", "llama", "layout.offload=all:disk", *LARGE),
    "parallel/pipeline.py": partial(traced, "pp=2,schedule=1f1b", "llama"),
    "parallel/tensor.py": partial(traced, "tp=2,sp=true", "moe"),
    "parallel/zero.py": partial(
        traced, "dp_replicate=2,dp_shard=2,zero=2", "llama", "train.global_batch_size=16"
    ),
    "step/step.py": read,
}
"""By file, what uses its waits. Other files have none on the path of a step."""
RARE = dict.fromkeys(("Pages.lacking", "Paged.finish"), unused)
"""By function, what uses its waits where the trace of its file does not."""


def tried(trace: Callable[[], dict[str, int]]) -> dict[str, int] | str:
    try:
        return dict(trace())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def messages(trace: Callable[[], dict[str, int]]) -> dict[str, dict[str, int] | str]:
    with waiting() as lines:
        trace()
    found = {}
    for line in sorted(lines):
        with waiting(but=line):
            found[line] = tried(trace)
    return found


def main() -> None:
    for library in sys.argv[1:]:
        ctypes.CDLL(library, ctypes.RTLD_GLOBAL)
    for place in json.loads(sys.stdin.readline()):
        file, _, name = place.partition(" ")
        if name == "messages":
            found = messages(TRACES[file])
        else:
            trace = next((trace for key, trace in RARE.items() if name.startswith(key)), TRACES[file])
            with without(place) if " " in name else nullcontext():
                found = tried(trace)
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
