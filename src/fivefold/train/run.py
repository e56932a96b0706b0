"""One rank's part of a run: builds model, optimizer and data from the recipe, resumes, trains, reports."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fivefold.checkpoint import store
from fivefold.data import NOT_COUNTED, Batches, DataSet, Prefetch
from fivefold.errors import UserError
from fivefold.host import memory_bytes
from fivefold.kernels import native
from fivefold.layout import Layout
from fivefold.models import flops_per_token
from fivefold.observe.console import Console
from fivefold.observe.machine import describe, device_peak, has_fast_bf16, peak_memory_bytes
from fivefold.observe.metrics import MetricsWriter, read_metrics
from fivefold.observe.pipeline_trace import write_pipeline_trace
from fivefold.observe.report import write_report
from fivefold.observe.summary import summarize
from fivefold.optim import MOMENTS, build_adamw, load_state, state_tensors
from fivefold.parallel.context import take
from fivefold.parallel.data import DataParallel
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.parallelize import Parallel, parallelize
from fivefold.parallel.ranks import Ranks
from fivefold.parallel.replica import assert_owned_once
from fivefold.recipe import Recipe, count_parameters, to_toml, tokens_per_step
from fivefold.sharding import Part, boxes, held, local_shape, size_of, whole
from fivefold.train.generate import Sampling, generate_text, open_run
from fivefold.train.interrupt import Interrupt
from fivefold.train.loop import Hooks, Microbatch, State, evaluate, train_loop

MAX_SAMPLED = 1_000_000_000  # parameters of a divided model that rank 0 puts together for a sample (4 GB)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class BatchSource(Protocol):
    """Where batches come from: `data.Batches`, or any object of the user's with this method."""

    def batch(self, i: int, rows: range) -> tuple[Any, Any]:
        """Inputs and targets (arrays or tensors, (len(rows), T) int64) of rows `rows` of global batch i."""
        ...


@dataclass(frozen=True)
class Job:
    """A run as every rank gets it. `recipe` is resolved; `data` is the recipe's data set, or None when the user
    brings `batches`; `module` the user's own model, in fp32 on the CPU, the same on every rank."""

    recipe: Recipe
    out: Path
    data: DataSet | None = None
    module: nn.Module | None = None
    batches: BatchSource | None = None
    val_batches: BatchSource | None = None
    resume: bool = False
    resume_command: str = ""


def run_rank(job: Job, ranks: Ranks) -> int | None:
    """Trains. Returns the signal that stopped the run early, or None when it is complete."""
    recipe = job.recipe
    with ExitStack() as stack:
        message = "stopping: finishing this step, then saving" if ranks.first else ""
        interrupt = stack.enter_context(Interrupt(message))
        state = build_state(recipe, ranks, job.module)
        for replica in state.parallel.replicas:
            stack.callback(replica.close)
        resumed = job.resume and _resume(state, job)
        if ranks.world > 1:
            make_equal(state, ranks, own=job.module is not None)
        console = stack.enter_context(
            Console(
                recipe.train.steps or 0,
                rank=ranks.rank,
                start_step=state.step,
                log_every=recipe.observe.log_every,
            )
        )
        metrics = None
        if ranks.first:
            _write_run_files(job)
            metrics = stack.enter_context(MetricsWriter(job.out, recipe.observe.tensorboard, step=state.step))
        _introduce(console, state, job, ranks)
        if job.resume:
            console.note(
                f"resuming after step {state.step}" if resumed else "no checkpoint yet: starting from step 0"
            )
        batches = stack.enter_context(_reader(job, state.mesh, state.step))
        stop_wanted = interrupt.wanted
        hooks = _hooks(state, job, ranks, console, metrics, batches, stop_wanted)
        complete = train_loop(state, recipe, hooks)
        if ranks.first:
            _conclude(console, job, complete)
        if ranks.world > 1:
            dist.barrier()  # the ranks leave together: a launcher stops the others when one is gone
        return None if complete else interrupt.signal or 15


def build_state(recipe: Recipe, ranks: Ranks, module: nn.Module | None = None) -> State:
    """Model, master weights and optimizer of a resolved recipe, at step 0: this rank's part of them."""
    layout = Layout.from_recipe(recipe.layout)
    if module is None and ranks.device.type == "cpu":
        _fits(recipe, layout, ranks)
    mesh = Mesh(layout, ranks)
    dtype = DTYPES[compute_mode(recipe, ranks.device, module is not None)]
    reduce = DTYPES[recipe.precision.reduce]
    if module is None:
        parallel = parallelize(recipe, mesh, dtype, reduce)
        assert_owned_once(parallel.replicas, mesh, count_parameters(recipe.model))
    else:
        parallel = _replicated(module, mesh, dtype, reduce)
    for stage in parallel.stages:
        stage.train()
    masters = {name: w for replica in parallel.replicas for name, w in replica.masters.items()}
    optim = recipe.optim
    optimizer = build_adamw(masters, optim.lr, optim.betas, optim.eps, optim.weight_decay)
    return State(parallel, mesh, optimizer)


def _fits(recipe: Recipe, layout: Layout, ranks: Ranks) -> None:
    """Refuses a model whose states alone are larger than the machine."""
    kept = sum(size_of(part.keeps) for part in held(recipe.model, layout, ranks.rank).values())
    needed = 16 * kept  # fp32: weight, gradient, two moments
    if needed * ranks.local_world > memory_bytes():
        raise UserError(
            f"the model needs at least {needed / 2**30:,.1f} GiB a rank (16 bytes a parameter) for {ranks.local_world} "
            f"rank(s), and this machine has {memory_bytes() / 2**30:,.1f} GiB"
        )


def _replicated(module: nn.Module, mesh: Mesh, dtype: torch.dtype, reduce: torch.dtype) -> Parallel:
    """A user's own module, whole on every rank.

    Raises:
        UserError: it has frozen parameters, or the layout divides it.
    """
    frozen = [name for name, p in module.named_parameters() if not p.requires_grad]
    if frozen:
        raise UserError(
            f"the module has frozen parameters ({', '.join(frozen[:3])}): this version trains all or none"
        )
    if mesh.layout.divided:
        raise UserError(
            "a module of your own trains on replicas only: nobody knows how to divide it. Use --layout dp=N"
        )
    module = module.float().to(mesh.device)
    if mesh.device.type == "cuda":
        module.compile()
    params = dict(module.named_parameters())
    spans = {name: whole(tuple(p.shape)) for name, p in params.items()}
    parts = {n: Part(tuple(p.shape), spans[n], spans[n], mesh.index("batch") == 0) for n, p in params.items()}
    return Parallel([module], [DataParallel(params, parts, dtype, mesh.group("batch"), reduce)])


def compute_mode(recipe: Recipe, device: torch.device, own_module: bool = False) -> str:
    """ "fp32" or "bf16": the recipe's, or where it says auto what is fast on the device. A user's own module runs in
    bf16 only when the recipe says so: nobody knows whether its buffers would follow."""
    if recipe.precision.mode != "auto":
        return recipe.precision.mode
    if own_module:
        return "fp32"
    return "bf16" if has_fast_bf16(device.type) else "fp32"


def _resume(state: State, job: Job) -> bool:
    """Loads the latest checkpoint; False where there is none yet."""
    if not store.checkpoints(job.out):
        return False
    folder = store.latest(job.out)
    checkpoint = store.Reader(folder)
    meta, steps = checkpoint.meta, job.recipe.train.steps or 0
    for key, now in identity(job).items():
        if key in meta and meta[key] != now:
            raise UserError(
                f"{folder} was trained with {key} = {meta[key]}, and now it is {now}: the run would not go on where it "
                "stopped. Undo the change, or start a new run"
            )
    try:
        load_checkpoint(state, checkpoint)
    except (ValueError, KeyError) as error:
        raise UserError(f"{folder} does not fit the recipe: {error}") from None
    if state.step > steps:
        raise UserError(f"train.steps = {steps}, but {folder} is further: set at least {state.step}")
    return True


def load_checkpoint(state: State, checkpoint: store.Reader) -> None:
    """Sets weights, moments, buffers and counts: this rank reads its own parts, whatever layout wrote them.

    Raises:
        ValueError: a name is missing, unknown, or has another shape.
    """
    parts = {name: part for r in state.parallel.replicas for name, part in r.parts.items()}
    buffers = {name: b for stage in state.parallel.stages for name, b in stage.named_buffers()}
    shapes = {name: part.shape for name, part in parts.items()} | {
        n: tuple(b.shape) for n, b in buffers.items()
    }
    saved = set(checkpoint.names("model"))
    whole_model = len(state.parallel.stages) == 1 and state.mesh.size("pp") == 1
    wrong = sorted(set(shapes) - saved | (saved - set(shapes) if whole_model else set()))
    wrong += [name for name in shapes if name in saved and checkpoint.shape("model", name) != shapes[name]]
    if wrong:
        raise ValueError(f"these weights do not fit the model: {', '.join(wrong[:5])}")
    masters = state.masters()
    for name, weight in masters.items():
        weight.copy_(_read(checkpoint, "model", name, parts[name]))
    for name, buffer in buffers.items():
        buffer.copy_(checkpoint.read("model", name))
    for replica in state.parallel.replicas:
        replica.refresh()
    meta = checkpoint.meta
    state.step, state.updates = int(meta["step"]), int(meta.get("updates", meta["step"]))
    state.skipped = int(meta.get("skipped", 0))
    if state.updates:
        moments = {
            f"{moment}.{name}": _read(checkpoint, "optimizer", f"{moment}.{name}", parts[name])
            for name in masters
            for moment in MOMENTS
        }
        load_state(state.optimizer, masters, moments, state.updates)


def _read(checkpoint: store.Reader, kind: str, name: str, part: Part) -> Tensor:
    """The part of a tensor that this rank keeps."""
    out = torch.empty(local_shape(part.keeps))
    for where, box in boxes(part.keeps):
        out[where] = checkpoint.read(kind, name, box)
    return out


def identity(job: Job) -> dict[str, Any]:
    """What the position in the data follows from: a run cannot go on when one of these has changed."""
    recipe = job.recipe
    found: dict[str, Any] = {
        "model.seq_len": recipe.model.seq_len,
        "train.global_batch_size": recipe.train.global_batch_size,
        "train.seed": recipe.train.seed,
    }
    if job.data is not None:
        found["the data's fingerprint"] = job.data.info.get("fingerprint")
    return found


def make_equal(state: State, ranks: Ranks, own: bool) -> None:
    """Every rank starts at the same step (a shared disk may show them different checkpoints), and with rank 0's
    weights where the module is the user's own: it may have been initialised anew on each."""
    steps = torch.tensor([state.step, -state.step], device=ranks.device)
    dist.all_reduce(steps, dist.ReduceOp.MAX)
    if steps[0] != -steps[1]:
        raise UserError(
            f"ranks see different checkpoints: steps {-int(steps[1])} to {int(steps[0])}. Is the disk shared?"
        )
    if own:
        for replica in state.parallel.replicas:
            for weight in replica.masters.values():
                dist.broadcast(weight, 0)
            replica.refresh()


def _write_run_files(job: Job) -> None:
    job.out.mkdir(parents=True, exist_ok=True)
    (job.out / "recipe.toml").write_text(to_toml(job.recipe), encoding="utf-8")
    (job.out / "machine.json").write_text(json.dumps(describe(), indent=2) + "\n", encoding="utf-8")
    if job.data is not None and job.data.tokenizer is not None and not (job.out / "tokenizer.json").exists():
        job.data.tokenizer.save(job.out / "tokenizer.json")


def _introduce(console: Console, state: State, job: Job, ranks: Ranks) -> None:
    recipe = job.recipe
    own = sum(w.numel() for w in state.masters().values())
    parameters = count_parameters(recipe.model) if job.module is None else own
    where = torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else "CPU"
    name = recipe.model.arch if job.module is None else type(job.module).__name__
    mode = compute_mode(recipe, ranks.device, job.module is not None)
    console.note(
        f"{name}, {parameters:,} parameters, {mode}; {ranks.world} rank(s) on {where}; "
        f"{tokens_per_step(recipe):,} tokens a step; run folder {job.out}"
    )
    if ranks.device.type == "cpu" and native.why_not():
        console.note(f"fused CPU kernels are off, training is slower: {native.why_not()}")


@contextmanager
def _reader(job: Job, mesh: Mesh, start: int) -> Iterator[Callable[[], tuple[list[Microbatch], float]]]:
    """Reads this rank's share of each global batch ahead, in microbatches."""
    recipe, batches = job.recipe, job.batches
    if batches is None:
        assert job.data is not None
        batches = batches_of(recipe, job.data, job.data.train, recipe.train.global_batch_size, shuffle=True)

    def fetch(i: int) -> list[Microbatch]:
        return share_of(batches, i, recipe.train.global_batch_size, recipe.train.microbatch_size or 1, mesh)

    with Prefetch(fetch, start, recipe.train.steps) as prefetch:
        yield prefetch.next


def share_of(
    batches: BatchSource, i: int, size: int, microbatch: int, mesh: Mesh, equal: bool = False
) -> list[Microbatch]:
    """This rank's rows of global batch i, of `size` rows, and its columns of them, in microbatches on its device.

    equal: all ranks get equally many microbatches, all of them full, filled up with rows that do not count. Where ranks
    compute a model together, one that has nothing to do still has to take part.
    """
    index, ranks = mesh.index("dp"), mesh.size("dp")
    start, stop = size * index // ranks, size * (index + 1) // ranks
    parts = [range(row, min(row + microbatch, stop)) for row in range(start, stop, microbatch)]
    if equal:
        most = -(-size // ranks)  # rows of a rank
        parts += [range(0)] * (-(-most // microbatch) - len(parts))
    found = []
    for rows in parts:
        inputs, targets = (take(_tensor(x, mesh.device), mesh) for x in batches.batch(i, rows or range(1)))
        found.append(_fill(inputs, targets, len(rows), microbatch) if equal else (inputs, targets))
    return found


def _fill(inputs: Tensor, targets: Tensor, real: int, rows: int) -> Microbatch:
    """At most `rows` sequences, of which `real` count -> `rows` sequences, of which the others do not count."""
    both = [torch.cat([x, x[:1].expand(rows - len(x), -1)]) for x in (inputs, targets)]
    both[1][real:] = NOT_COUNTED
    return both[0], both[1]


def _tensor(array: np.ndarray | Tensor, device: torch.device) -> Tensor:
    return torch.as_tensor(array).to(device, torch.int64, non_blocking=True)


def batches_of(recipe: Recipe, data: DataSet, tokens: Any, size: int, shuffle: bool) -> Batches:
    assert recipe.model.vocab_size is not None
    objective = "mlm" if recipe.model.arch == "bert" else "causal"
    seq_len, seed = recipe.model.seq_len, recipe.train.seed
    return Batches(tokens, seq_len, size, seed, objective, data.mask_id, data.vocab_size, shuffle)


def _hooks(
    state: State,
    job: Job,
    ranks: Ranks,
    console: Console,
    metrics: MetricsWriter | None,
    next_batch: Callable[[], tuple[list[Microbatch], float]],
    stop_wanted: Callable[[], bool],
) -> Hooks:
    """What happens around the steps. Files and console belong to rank 0 alone."""
    recipe = job.recipe
    tokens = tokens_per_step(recipe)
    flops = flops_per_token(recipe.model) if job.module is None else None
    peak = _peak_flops(recipe, ranks) if flops else None

    def write(line: dict[str, Any]) -> None:
        if metrics is not None:
            metrics.write(line)

    def record(line: dict[str, Any]) -> None:
        speed = tokens / line["step_s"]
        line |= {"tokens": line["step"] * tokens, "tokens_per_s": speed}
        line |= {"peak_memory_bytes": peak_memory_bytes(str(ranks.device))}
        if flops and peak:
            line["mfu"] = speed * flops / peak
        write(line)
        console.step(line)
        pipeline = state.parallel.pipeline
        if ranks.first and pipeline is not None and pipeline.recording and pipeline.recorded is not None:
            path = write_pipeline_trace(job.out / "traces", line["step"], *pipeline.recorded)
            console.note(f"timeline of the pipeline in step {line['step']}: {path}")
        if state.skipped:
            console.note(f"step {line['step']}: the gradient is not finite, its update is skipped")

    def validate(step: int) -> None:
        if job.val_batches is None and (job.data is None or job.data.val is None):
            return  # nothing is held out, on any rank
        microbatches, token_bytes = _validation_set(
            job, state.mesh
        )  # perhaps none for this rank: it still takes part
        line = {"step": step, **evaluate(state, microbatches, token_bytes)}
        write(line)
        console.validation(line)

    def sample(step: int) -> None:
        tokenizer = job.data.tokenizer if job.data is not None else None
        if not ranks.first or tokenizer is None or job.module is not None or recipe.model.arch == "bert":
            return
        train = recipe.train
        sampling = Sampling(max_tokens=train.sample_tokens, seed=train.seed)
        try:
            module = _whole_model(state, job, step)
            pieces = generate_text(module, recipe.model, tokenizer, train.sample_prompt, sampling)
            text = train.sample_prompt + "".join(pieces)
        except UserError as error:  # a diverged model cannot write: no reason to end the run here
            console.note(f"step {step}: no sample: {error}")
            return
        write({"step": step, "sample": text})
        console.sample(text, step)

    def save(step: int) -> None:
        save_state(state, job.out, identity(job) | {"tokens": step * tokens}, recipe.checkpoint.keep_last)

    return Hooks(next_batch, stop_wanted, record, validate, sample, save)


def _whole_model(state: State, job: Job, step: int) -> nn.Module:
    """The model that one rank can compute alone: its own, or where ranks divide it that of this step's checkpoint.

    Raises:
        UserError: the model is divided, and this step is not saved or the model too large for one rank.
    """
    layout = state.mesh.layout
    if not layout.divided:
        return state.module
    if store.folder_of(job.out, step) not in store.checkpoints(job.out):
        raise UserError("the ranks divide the model, and only steps that are saved write samples then")
    if count_parameters(job.recipe.model) > MAX_SAMPLED:
        raise UserError(
            "the ranks divide the model, which is too large for one of them: use `fivefold generate`"
        )
    return open_run(job.out, checkpoint=store.folder_of(job.out, step), device=state.mesh.device)[0]


def save_state(state: State, out: Path, meta: dict[str, Any], keep_last: int) -> Path:
    """Writes a checkpoint of the state, with `meta`, into the run folder; removes those beyond `keep_last`. All ranks
    call it, and each writes what it owns."""
    counts = {"step": state.step, "updates": state.updates, "skipped": state.skipped}
    folder = store.folder_of(out, state.step)
    model = [*owned_pieces(state, state.masters()), *buffer_pieces(state)]
    moments = state_tensors(state.optimizer, state.masters())
    write_pieces(folder, model, owned_pieces(state, moments), counts | meta, state.mesh)
    if state.mesh.rank == 0:
        store.prune(out, keep_last)
    return folder


def write_pieces(
    folder: Path, model: list[store.Piece], optimizer: list[store.Piece], meta: dict[str, Any], mesh: Mesh
) -> None:
    """`store.save` by all ranks of a mesh together."""

    def agree(fine: bool) -> bool:
        all_fine = torch.tensor(float(fine), device=mesh.device)
        if mesh.size("all") > 1:
            dist.all_reduce(all_fine, dist.ReduceOp.MIN)
        return all_fine.item() > 0

    store.save(folder, model, optimizer, meta, rank=mesh.rank, ranks=mesh.size("all"), agree=agree)


def owned_pieces(state: State, tensors: dict[str, Tensor]) -> list[store.Piece]:
    """What this rank owns of tensors that have the shapes of its masters; their names are a parameter's, perhaps with
    "exp_avg." or the like before it."""
    parts = {name: part for r in state.parallel.replicas for name, part in reversed(r.parts.items())}
    prefixes = ("", *(f"{moment}." for moment in MOMENTS))
    return [
        store.Piece(prefix + name, tensors[prefix + name][where], part.shape, box)
        for name, part in parts.items()
        if part.owned
        for prefix in prefixes
        if prefix + name in tensors
        for where, box in boxes(part.keeps)
    ]


def buffer_pieces(state: State) -> list[store.Piece]:
    """Buffers are equal on all ranks that have them; the first of each pipeline stage writes them."""
    buffers = {name: b for stage in state.parallel.stages for name, b in stage.named_buffers()}
    first = state.mesh.index("batch") == 0 and state.mesh.index("tp") == 0
    return store.whole_pieces(buffers) if first else []


def _validation_set(job: Job, mesh: Mesh) -> tuple[list[Microbatch], Tensor | None]:
    """This rank's share of the validation sequences, and the bytes a token stands for where they are known."""
    recipe, size = job.recipe, job.recipe.train.val_sequences
    batches, token_bytes = job.val_batches, None
    if batches is None:
        assert job.data is not None
        assert job.data.val is not None
        batches = batches_of(recipe, job.data, job.data.val, size, shuffle=False)
        size = min(size, batches.sequences)
        if job.data.tokenizer is not None and recipe.model.arch != "bert":
            token_bytes = torch.as_tensor(job.data.tokenizer.token_bytes, device=mesh.device)
    together = mesh.layout.divided
    share = share_of(batches, 0, size, recipe.train.microbatch_size or 1, mesh, equal=together)
    return share, token_bytes


def _peak_flops(recipe: Recipe, ranks: Ranks) -> float:
    """FLOP/s of all the run's devices together; ranks on one machine's CPU share its cores."""
    mode = compute_mode(recipe, ranks.device)
    if ranks.device.type == "cpu":
        return device_peak("cpu", mode) * ranks.world / ranks.local_world
    return device_peak(str(ranks.device), mode) * ranks.world


def _conclude(console: Console, job: Job, complete: bool) -> None:
    out = job.out
    figures = summarize(read_metrics(out / "metrics.jsonl"))
    report = write_report(out)
    paths = {"checkpoint": store.latest(out), "report": report}
    if not complete:
        console.note("stopped before the end; everything up to this step is saved")
    console.summary(figures, paths, _next_commands(job) if complete else [job.resume_command])


def _next_commands(job: Job) -> list[str]:
    """What can be done with a run that is complete."""
    if job.module is not None:
        return []
    commands = [f"fivefold export {job.out} exported/"]
    if job.recipe.model.arch != "bert" and job.data is not None and job.data.tokenizer is not None:
        prompt = shlex.quote(job.recipe.train.sample_prompt or "The ")
        commands.insert(0, f"fivefold generate {job.out} --prompt {prompt}")
    return commands
