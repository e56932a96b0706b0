"""A worker of a run with parameter servers: computes the shares that the first server hands out."""

from __future__ import annotations

import json
import time
from contextlib import nullcontext

from fivefold.comm.progress import progress
from fivefold.errors import UserError
from fivefold.host.machine import peak_memory_bytes
from fivefold.launch.interrupt import Interrupt
from fivefold.launch.ranks import Ranks
from fivefold.parallel.link import Kind, Note
from fivefold.parallel.parallelize import rounding
from fivefold.parallel.replica import gradient_square
from fivefold.parallel.worker import Exchange
from fivefold.step.servers import worker_state
from fivefold.step.state import State
from fivefold.step.step import forward_backward, validate
from fivefold.train.hooks import sampled
from fivefold.train.job import Job
from fivefold.train.loop import names_step
from fivefold.train.self_test import settle
from fivefold.train.server_run import connect
from fivefold.train.share import batches_of, share_of, validation_sets


def work(job: Job, ranks: Ranks, interrupt: Interrupt) -> bool:
    """A worker's part: does what the first server orders. Returns True if the run is complete."""
    with progress.phase("starting"):
        state, exchange = worker_state(job.recipe, ranks, connect(job, ranks))
        trained = validated = False
        if rounding(job.recipe) is not None:
            exchange.need_all(pull=True)
        settle(state, job, ranks, False)  # the first server knows whether the run is resumed
    while (note := exchange.order()).kind != Kind.END:
        if note.kind == Kind.TRAIN:
            slower = nullcontext() if trained else progress.phase("a slower step")  # it may compile
            with slower, names_step(state):
                _train(job, ranks, state, exchange, note, interrupt)
            trained = True
        elif note.kind == Kind.VALIDATE:
            with nullcontext() if validated else progress.phase("the first validation"):
                figures = validate(state, validation_sets(job, state.mesh))
            validated = True
            exchange.report(note.first, json.dumps(figures))
        else:
            exchange.need_all()
            assert job.data
            assert job.data.tokenizer
            try:
                with progress.phase("sampling"):
                    text = sampled(state, job, note.first, job.data.tokenizer)
                exchange.report(note.first, text)
            except UserError as error:  # a diverged model cannot write; the run continues
                exchange.report(note.first, str(error), (1.0,))
    exchange.close()
    state.parallel.close()
    return bool(note.first)


def _train(
    job: Job, ranks: Ranks, state: State, exchange: Exchange, order: Note, interrupt: Interrupt
) -> None:
    """Computes the gradient of a share."""
    recipe, train = job.recipe, job.recipe.train
    begin, clock = time.time(), time.perf_counter()  # the hosts' clock may jump, the other one does not
    step, share, before = order.first, order.second, exchange.waited
    batches = job.batches
    if batches is None:
        assert job.data is not None
        batches = batches_of(recipe, job.data, module=job.module)
    count = ranks.world - recipe.servers.count
    microbatches = share_of(
        batches, step, train.global_batch_size, train.microbatch_size or 1, state.mesh, share=(share, count)
    )
    read = time.perf_counter() - clock
    state.step = exchange.step = step
    loss = forward_backward(state, microbatches, train.seed).item()
    square = 0.0
    if not recipe.servers.synchronous:
        square = gradient_square(state.parallel.replicas, state.mesh).item()
        if loss - loss != 0:  # not finite: then no server takes the gradient
            square = float("nan")
    waited, memory = exchange.waited - before, float(peak_memory_bytes("cpu"))
    end = begin + time.perf_counter() - clock
    figures = loss, square, float(interrupt.wanted()), begin, end, waited, read, memory
    exchange.computed(step, share, figures)
    progress.end_step(step + 1, time.perf_counter() - clock, read)
