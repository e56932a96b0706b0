"""What `torch.compile` makes of a block, found without a GPU.

A rank's block runs forward and backward once, on PyTorch's own fake tensors, compiled by all of PyTorch's compiler but
its last step: Dynamo cuts the code into graphs, AOTAutograd's partitioner chooses the tensors that are kept for
backward, and Inductor's scheduler joins operations into kernels. No code is generated, so neither a GPU nor Triton is
needed. What runs between the graphs, and blocks that are not compiled, launch one kernel for each operation that is no
view.

A trace (step.py) runs blocks operation by operation, and lets them keep for backward what the compiled ones keep
(`Kept`). Only in a process with the guard of gpu.py.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from fivefold.kernels.blockwise_attention import Documents
from fivefold.models.card import card_of
from fivefold.parallel.expert import AllToAll
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.parallelize import cut
from fivefold.precision import torch_dtype
from fivefold.recipe import Recipe
from fivefold.sharding.layout import Layout
from fivefold.sharding.parts import held
from fivefold.step.state import compute_mode
from fivefold.trace.blocks import Block, Break, kinds
from fivefold.trace.fake import FakeMode
from fivefold.trace.memory import tensors_in
from fivefold.trace.step import DEVICE, Creating, a_gpu, chosen_elements, even, firsts, one_of, replaced

PACKAGE = str(Path(__file__).parents[1]) + os.sep
DISABLE = torch.compiler.disable
PROCESSORS, CAPABILITY = 132, (9, 0)
"""Of the GPU that kernels are chosen for: an H100's."""


class Launches:
    """Counts the kernels of operations that run one by one, and the bytes that they read and write. within: True while
    a graph's own operations run."""

    def __init__(self) -> None:
        self.kernels = self.moved = 0
        self.within = False

    def see(self, func: Any, args: Any, out: Any) -> None:
        if self.within or TracingContext.try_get() is not None or func.namespace != "aten" or _is_free(func):
            return
        self.kernels += 1
        if not func.name().startswith(PRODUCTS):
            self.moved += sum(t.numel() * t.element_size() for t in (*tensors_in(args), *tensors_in(out)))


PRODUCTS = tuple(
    f"aten::{name}"
    for name in (
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "_grouped_mm",
        "_scaled_mm",
        "_scaled_dot_product",
        "_flash",
    )
)
"""Matmuls and attention."""


@contextmanager
def _counted(mode: type, launches: Launches) -> Iterator[None]:
    """Lets operations on this kind of fake tensors be counted. PyTorch's compiler takes no other class than its own."""
    before = mode.__torch_dispatch__

    def seen(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = before(self, func, types, args, kwargs)
        launches.see(func, args, out)
        return out

    mode.__torch_dispatch__ = seen
    try:
        yield
    finally:
        mode.__torch_dispatch__ = before


def _is_free(func: Any) -> bool:
    """True for views and memory without values."""
    views = any(
        given.alias_info is not None and not given.alias_info.is_write for given in func._schema.returns
    )
    return views or func.__name__.startswith(("empty", "new_empty", "detach", "lift_fresh"))


class Compiler:
    """A back end of `torch.compile` that counts instead of generating code. there: shapes and dtypes of tensors that
    live longer than a block's pass."""

    def __init__(self, block: Block, launches: Launches, there: set[tuple[Any, ...]]) -> None:
        self.block, self.launches, self.there = block, launches, there

    def __call__(self, graph: Any, inputs: Sequence[Tensor]) -> Callable[..., Any]:
        from torch._dynamo.backends.common import aot_autograd
        from torch._inductor.decomposition import select_decomp_table

        self.block.graphs += 1
        reason = graph.compile_subgraph_reason
        if reason.graph_break:
            frame = next((f for f in reversed(reason.user_stack) if f.filename.startswith(PACKAGE)), None)
            place = f"{frame.filename[len(PACKAGE) :]}:{frame.lineno}" if frame else "elsewhere:0"
            self.block.breaks.append(Break(reason.reason.splitlines()[0], place))
        compile_ = aot_autograd(
            fw_compiler=partial(self._compiled, backward=False),
            bw_compiler=partial(self._compiled, backward=True),
            partition_fn=self._partitioned,
            decompositions=select_decomp_table(),
        )
        return compile_(graph, inputs)

    def _partitioned(self, joint: Any, inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        """Cuts the joint graph as Inductor does, and notes what its first half keeps for the second."""
        from torch._functorch.partitioners import min_cut_rematerialization_partition
        from torch._inductor.fx_passes.joint_graph import joint_graph_passes
        from torch._inductor.virtualized import V

        with V.set_fake_mode(_mode_of(joint)):
            joint = joint_graph_passes(joint)
        forward, backward = min_cut_rematerialization_partition(
            joint, inputs, compiler="inductor", num_fwd_outputs=num_fwd_outputs, **options
        )
        (results,) = (node.args[0] for node in forward.graph.nodes if node.op == "output")
        storages: dict[int, int] = {}
        for node in results[num_fwd_outputs:]:
            value = getattr(node, "meta", {}).get("val")
            if not isinstance(value, Tensor) or not value.numel():
                continue
            if node.op == "placeholder" and (tuple(value.shape), value.dtype) in self.there:
                continue
            storage = value.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
        self.block.kept += storages.values()
        return forward, backward

    def _compiled(self, graph: Any, inputs: Sequence[Tensor], backward: bool) -> Callable[..., Any]:
        from functorch.compile import make_boxed_func

        kernels, moved = _kernels(graph, inputs)
        self.block.moved[backward] += moved
        if backward:
            self.block.backward += kernels
        else:
            self.block.forward += kernels

        def run(*given: Any) -> Any:
            before, self.launches.within = self.launches.within, True
            try:
                return graph.forward(*given)
            finally:
                self.launches.within = before

        return make_boxed_func(run)


def _kernels(graph: Any, inputs: Sequence[Tensor]) -> tuple[int, int]:
    """Number of kernels that Inductor's scheduler makes of a graph, and the bytes that those read and write which it
    generates: all but matmuls and attention."""
    from torch._inductor import scheduler
    from torch._inductor.compile_fx import view_to_reshape
    from torch._inductor.debug import DebugContext
    from torch._inductor.fx_passes.post_grad import post_grad_passes
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    graph = copy.deepcopy(graph)
    with V.set_fake_mode(_mode_of(graph)):
        view_to_reshape(graph)
        post_grad_passes(graph, False)
        lowering = GraphLowering(graph, example_inputs=inputs)
        with V.set_graph_handler(lowering), V.set_debug_handler(DebugContext()):
            lowering.run(*inputs)
            nodes = scheduler.Scheduler(lowering.operations).nodes
            nothing = ("NopKernelSchedulerNode", "MultiOutput")
            nodes = [n for n in nodes if not {type(n).__name__, type(n.node).__name__} & {*nothing}]
            return len(nodes), sum(n.get_read_write_buffers_sizes() for n in nodes if not n.is_extern())


def _mode_of(graph: Any) -> Any:
    """The mode of a graph's fake tensors."""
    values = (node.meta.get("val") for node in graph.graph.nodes)
    return next(value.fake_mode for value in values if isinstance(value, FakeTensor))


def blocks(recipe: Recipe, rank: int) -> dict[str, Block]:
    """Each kind of block on a rank of a resolved recipe: by its mode of recomputation, with " with experts" if it has
    any."""
    layout = Layout.from_recipe(recipe.layout)
    card, by_number = card_of(recipe.model), kinds(recipe)
    found, by_trainer = dict[str, Block](), set[nn.Module]()
    with ExitStack() as stack:
        ranks = stack.enter_context(one_of(rank, layout.ranks, DEVICE))
        stack.enter_context(a_gpu())
        stack.enter_context(_for_compiler())
        replaced(stack, nn.Module, "compile", lambda module, *_, **__: by_trainer.add(module))
        mesh = Mesh(layout, ranks)
        mode = compute_mode(recipe, DEVICE)
        working = torch_dtype(mode.working)
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with Creating(fake):
            numbered, parallel = cut(
                recipe, mesh, working, torch_dtype(mode.master), card, held(card, layout, rank)
            )
        try:
            for stage in numbered.values():
                stage.train()
                for number, block in stage.get_submodule(card.stack).named_children():
                    if (kind := by_number[int(number)]) not in found:
                        found[kind] = _analyse(
                            recipe, mesh, stage, block, block in by_trainer, working, parallel.positions
                        )
        finally:
            parallel.close()
    return found


def _analyse(
    recipe: Recipe,
    mesh: Mesh,
    stage: Any,
    block: nn.Module,
    compiled: bool,
    working: torch.dtype,
    positions: Any,
) -> Block:
    layout, model, found, launches = mesh.layout, recipe.model, Block(compiled), Launches()
    chosen = partial(chosen_elements, model, model.seq_len // layout.cp)
    fake = FakeTensorMode(allow_non_fake_inputs=True) if compiled else FakeMode(chosen)
    B, T = recipe.train.microbatch_size or 1, model.seq_len // layout.cp
    for module in block.modules():
        if isinstance(module, AllToAll):
            module.splits = even
    with fake:
        _with_memory(block, working)
        t = T // layout.tp if layout.sp else T
        x = torch.empty(B, t, model.dim, dtype=working, device=DEVICE, requires_grad=True)
        here = torch.empty(T, dtype=torch.int64, device=DEVICE)
        tables = stage.context(here)
        given = {}
        if recipe.data.document_masks:
            given["documents"] = Documents(firsts(B, model.seq_len), DEVICE)
    run: Any = block
    if compiled:
        longer = [*block.parameters(), *block.buffers(), *tables]
        longer += [one for documents in given.values() for one in (documents.first, documents.cumulative)]
        there = {(tuple(tensor.shape), tensor.dtype) for tensor in longer}
        torch._dynamo.reset()
        run = torch.compile(block._call_impl, backend=Compiler(found, launches, there))
    with fake:
        y = run(x, *tables, **given)  # now it is compiled
        y.backward(torch.empty_like(y))
        with _counted(type(fake), launches):
            y = run(x, *tables, **given)
            ahead = launches.kernels, launches.moved
            y.backward(torch.empty_like(y))
    found.forward, found.backward = found.forward + ahead[0], found.backward + launches.kernels - ahead[0]
    found.moved = [found.moved[0] + ahead[1], found.moved[1] + launches.moved - ahead[1]]
    return found


def _with_memory(block: nn.Module, working: torch.dtype) -> None:
    """Gives a block on "meta" fake weights."""
    for module in block.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            weight = torch.empty(parameter.shape, dtype=working, device=DEVICE)
            setattr(module, name, nn.Parameter(weight, parameter.requires_grad))
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype, device=DEVICE))


class Device:
    """In place of `torch.cuda.device`, a class because PyTorch asks whether something is one."""

    def __init__(self, *_: Any) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *_: Any) -> None: ...


@contextmanager
def _for_compiler() -> Iterator[None]:
    """What PyTorch's compiler asks of a GPU."""
    from torch._functorch import config as functorch
    from torch._inductor import config, scheduler
    from torch._inductor.fx_passes import joint_graph
    from torch._inductor.runtime.hints import DeviceProperties

    properties = DeviceProperties(
        "cuda", 0, PROCESSORS, 10 * CAPABILITY[0] + CAPABILITY[1], CAPABILITY[0],
        regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, warp_size=32,
    )  # fmt: skip
    known = SimpleNamespace(
        name="a GPU",
        major=CAPABILITY[0],
        minor=CAPABILITY[1],
        multi_processor_count=PROCESSORS,
        gcnArchName="",
    )
    with ExitStack() as stack:
        replaced(stack, torch.compiler, "disable", DISABLE)
        replaced(stack, torch.cuda, "get_device_properties", lambda device=None: known)
        replaced(stack, torch.cuda, "device", Device)
        replaced(stack, Tensor, "pin_memory", lambda tensor: tensor)  # unknown to PyTorch's fake tensors
        replaced(stack, DeviceProperties, "create", lambda device: properties)
        replaced(stack, scheduler, "has_triton", lambda: True)
        # Else a generator on the GPU is an input of graphs that draw numbers again, and no CPU makes one.
        stack.enter_context(functorch.patch(graphsafe_rng_functionalization=False))
        # Its patterns (attention written out, matmuls with odd sizes) are made of tensors on the GPU.
        replaced(stack, joint_graph, "lazy_init", lambda *_: None)
        # It computes with numbers, which fake tensors have none of.
        stack.enter_context(config.patch(joint_graph_constant_folding=False))
        yield
