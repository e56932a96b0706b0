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
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import TracingContext, detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode

import fivefold
from fivefold.models.card import card_of
from fivefold.models.mixture import Mixture
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.operators import MESSAGES
from fivefold.parallel.parallelize import cut
from fivefold.precision import torch_dtype
from fivefold.recipe import Recipe
from fivefold.sharding.layout import Layout
from fivefold.sharding.parts import held
from fivefold.step.state import compute_mode
from fivefold_plan.trace import step
from fivefold_plan.trace.blocks import Block, kinds, living_on, trained_inputs
from fivefold_plan.trace.fake import FakeMode
from fivefold_plan.trace.memory import OWN, is_free
from fivefold_plan.trace.step import DEVICE, Creating, a_gpu, microbatch, one_of, replaced, share_evenly
from fivefold_plan.trace.traffic import formula_of, size_of

PACKAGE = os.path.dirname(fivefold.__file__) + os.sep  # the trainer's
PROCESSORS = 132
"""Of the GPU that kernels are chosen for: an H100's."""


COMPILE = torch.compile


class Later:
    """A function that the trainer compiles by itself. run: what it is meanwhile, and what is made of it."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self.run = run

    def __call__(self, *args: Any) -> Any:
        return self.run(*args)


class Compiler:
    """A back end of `torch.compile` that counts instead of generating code. Beside it, `see` counts the operations that
    run one by one. there: shapes and dtypes of tensors that live longer than a block's pass. within: True while a
    graph's own operations run. backward: True in the second half of the pass."""

    def __init__(self, block: Block, there: set[tuple[Any, ...]]) -> None:
        self.block, self.there = block, there
        self.within = self.backward = False

    def see(self, func: Any, args: Any, out: Any) -> None:
        if self.within or TracingContext.try_get() is not None or func.namespace not in OWN or is_free(func):
            return
        self.block.count(self.backward, 1, 0 if formula_of(func) else size_of((args, out)))

    def __call__(self, graph: Any, inputs: Sequence[Tensor]) -> Callable[..., Any]:
        from torch._dynamo.backends.common import aot_autograd
        from torch._inductor.decomposition import select_decomp_table

        self.block.graphs += 1
        reason = graph.compile_subgraph_reason
        if reason.graph_break:
            frame = next((f for f in reversed(reason.user_stack) if f.filename.startswith(PACKAGE)), None)
            place = f"{frame.filename[len(PACKAGE) :]}:{frame.lineno}" if frame else "elsewhere:0"
            self.block.breaks.append({"why": reason.reason.splitlines()[0], "at": place})
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

        with V.set_fake_mode(detect_fake_mode(inputs)):
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

        self.block.count(backward, *_kernels(graph, inputs))

        def run(*given: Any) -> Any:
            before, self.within = self.within, True
            try:
                return graph.forward(*given)
            finally:
                self.within = before

        return make_boxed_func(run)


def _kernels(graph: Any, inputs: Sequence[Tensor]) -> tuple[int, int]:
    """Number of kernels that Inductor's scheduler makes of a graph, without messages, and the bytes that those read and
    write which it generates: all but matmuls and attention."""
    from torch._inductor import scheduler
    from torch._inductor.compile_fx import view_to_reshape
    from torch._inductor.debug import DebugContext
    from torch._inductor.fx_passes.post_grad import post_grad_passes
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    graph = copy.deepcopy(graph)
    with V.set_fake_mode(detect_fake_mode(inputs)):
        view_to_reshape(graph)
        post_grad_passes(graph, False)
        lowering = GraphLowering(graph, example_inputs=inputs)
        with V.set_graph_handler(lowering), V.set_debug_handler(DebugContext()):
            lowering.run(*inputs)
            nodes = scheduler.Scheduler(lowering.operations).nodes
            nothing = ("NopKernelSchedulerNode", "MultiOutput")
            nodes = [
                n
                for n in nodes
                if not {type(n).__name__, type(n.node).__name__} & {*nothing}
                and str(getattr(n.node, "op_overload", "")).rpartition(".")[0].replace(".", "::")
                not in MESSAGES
            ]
            return len(nodes), sum(n.get_read_write_buffers_sizes() for n in nodes if not n.is_extern())


def blocks(recipe: Recipe, rank: int) -> dict[str, Block]:
    """Each kind of block (`blocks.kinds`) on a rank of a resolved recipe."""
    layout, card = Layout.from_recipe(recipe.layout), card_of(recipe.model)
    by_number, trained = kinds(recipe), trained_inputs(recipe)
    found, by_trainer = dict[str, Block](), set[nn.Module]()
    with ExitStack() as stack:
        ranks = stack.enter_context(one_of(rank, layout.ranks, DEVICE))
        stack.enter_context(a_gpu())
        stack.enter_context(_for_compiler())
        replaced(stack, nn.Module, "compile", lambda module, *_, **__: by_trainer.add(module))
        replaced(stack, torch, "compile", lambda function, **_: Later(function))
        mesh = Mesh(layout, ranks, causal=card.causal)
        working = torch_dtype(compute_mode(recipe, DEVICE).working)
        with Creating(FakeTensorMode(allow_non_fake_inputs=True)):
            numbered, parallel = cut(recipe, mesh, working, working, card, held(card, layout, rank))
        stack.callback(parallel.close)
        for stage in numbered.values():
            stage.train()
            for name, block in stage.get_submodule(card.stack).named_children():
                if (kind := by_number[int(name)]) not in found:
                    compiled = block in by_trainer
                    found[kind] = _analyse(recipe, mesh, stage, block, compiled, trained[int(name)])
    return found


def _analyse(
    recipe: Recipe, mesh: Mesh, stage: Any, block: nn.Module, compiled: bool, trained: bool
) -> Block:
    """Runs a block. trained: its input gets a gradient."""
    model, found = recipe.model, Block(compiled)
    chosen = partial(step.chosen_elements, model, model.seq_len // mesh.layout.cp)
    fake = FakeTensorMode(allow_non_fake_inputs=True) if compiled else FakeMode(chosen)
    share_evenly(block)
    with fake:
        block.to_empty(device=DEVICE)
        for module in block.modules():
            if isinstance(module, Mixture):
                module.stats.start(module.count, torch.empty(2, device=DEVICE))
        batch = microbatch(recipe, mesh)
        given, (B, T) = batch._replace(positions=None).options(), batch.inputs.shape
        t, working = T // mesh.layout.tp if mesh.layout.sp else T, next(block.parameters()).dtype
        x = torch.empty(B, t, model.dim, dtype=working, device=DEVICE, requires_grad=trained)
        if getattr(block, "ahead", None) is not None:  # of multi-token prediction
            given |= {"tokens": torch.empty_like(x, requires_grad=trained)}
        tables = stage.context(torch.empty(T, dtype=torch.int64, device=DEVICE))
        own, named = stage.besides(block, x, batch.inputs)
    there = {(tuple(tensor.shape), tensor.dtype) for tensor in living_on(block, tables, given)}
    compiler = Compiler(found, there)
    torch._dynamo.reset()
    run: Any = COMPILE(block._call_impl, backend=compiler) if compiled else block
    for module in block.modules():
        for inner in (one for one in vars(module).values() if isinstance(one, Later)):
            inner.run = COMPILE(inner.run, backend=compiler)

    def both() -> None:
        compiler.backward = False
        y = run(x, *tables, *own, **given, **named)
        compiler.backward = True
        if y.requires_grad:
            y.backward(torch.empty_like(y))

    before = type(fake).__torch_dispatch__

    def seen(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = before(mode, func, types, args, kwargs)
        compiler.see(func, args, out)
        return out

    with ExitStack() as stack, fake:
        both()  # now it is compiled
        block.zero_grad()  # a trainer adds gradients elsewhere
        x.grad = None
        # Not a class of its own, which the compiler would not take.
        replaced(stack, type(fake), "__torch_dispatch__", seen)
        both()
    return found


@contextmanager
def _for_compiler() -> Iterator[None]:
    """What PyTorch's compiler asks of a GPU."""
    from torch._functorch import config as functorch
    from torch._inductor import config, scheduler
    from torch._inductor.fx_passes import joint_graph
    from torch._inductor.runtime.hints import DeviceProperties

    major, minor = step.CAPABILITY
    properties = DeviceProperties(
        "cuda", 0, PROCESSORS, 10 * major + minor, major,
        regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, warp_size=32,
    )  # fmt: skip
    gpu = SimpleNamespace(name="", major=major, minor=minor, multi_processor_count=PROCESSORS, gcnArchName="")
    with ExitStack() as stack:
        replaced(stack, torch.cuda, "get_device_properties", lambda device=None: gpu)
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
