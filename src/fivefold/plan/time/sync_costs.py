"""Seconds of gradient sums and weight gathers: within a microbatch, once per step, and what of them is exposed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator

from fivefold.plan.memory.model_states import Elements
from fivefold.plan.messages import communication, volume
from fivefold.plan.messages.communication import collective, exposed, held
from fivefold.plan.setting import Setting
from fivefold.plan.time.cost import Cost, stream
from fivefold.precision import DTYPES, MASTER, PRECISIONS
from fivefold.schedules.collectives.registry import LIBRARY
from fivefold.schedules.compression import NONE, compressor
from fivefold.schedules.timelines import exposed_in_pieces
from fivefold.sharding.parts import sharing_group
from fivefold.sharding.units import Sync, bucket_bytes, scattered_once


def accumulate(elements: float, s: Setting) -> Cost:
    """Cost of adding a microbatch's gradient to the sum."""
    measured = s.cluster.device.measured
    if s.microbatches == 1 and not PRECISIONS[s.mode].copies and not measured:
        return Cost()
    if measured and s.layout.zero and not scattered_once(s.layout.zero, s.layout.pp):
        return Cost()  # only the rank's own rows are summed
    size = elements * (s.sizes.e + 2 * s.states.gradient)
    return Cost(weight=stream(size, s.cluster.device, "accumulate", s.dtype))


def per_microbatch(own: Elements, cost: Cost, s: Setting) -> Cost:
    """Cost of the messages of data parallelism that a block sends in every microbatch.

    Those that the software overlaps run beside the neighbouring block, which costs as much. Beside those of the
    parameters outside of blocks, which are needed first and summed last, there is nothing.
    """
    forward = scattered = into = out = 0.0
    busy = [0.0, 0.0]  # seconds of gathers and scatters in which the CPU itself copies
    for sync, seconds, copied in synced(own, s):
        if sync.each:
            busy[sync.what != "gather"] += held(seconds, s.group(sync.group), s.cluster)
        if sync.each and sync.what == "gather":  # before forward and before backward
            forward, into = forward + seconds, into + copied
        elif sync.each:
            scattered, out = scattered + seconds, out + copied
    if not forward + scattered:
        return Cost()
    backward = forward + scattered
    if s.software.overlap_data:
        forward = exposed(forward, busy[0], cost.forward)
        alone, copying = (0.0, sum(busy)) if s.software.overlap_scatter else (scattered, busy[0])
        backward = alone + exposed(backward - alone, copying, cost.input + cost.weight)
    return Cost(forward + into, backward + into + out, 0.0, forward, backward)


def synced(own: Elements, s: Setting) -> Iterator[tuple[Sync, float, float]]:
    """(message, its seconds, seconds of FSDP2's copies for it) of data parallelism for a rank's elements."""
    if s.layout.compress != NONE:
        return  # see compressed_sums
    for _, keeps, expert, _, still in own.groups():
        ranks = sharing_group(s.layout, expert)[1]
        whole = keeps * ranks
        for sync, size in volume.synced(s, whole, expert, trained=whole - still * ranks):
            yield sync, _seconds(sync, size, whole, s), _copied(sync, keeps, whole, s)


def _seconds(sync: Sync, size: float, whole: float, s: Setting) -> float:
    """Seconds of a message of data parallelism. whole: elements of its parameters on all ranks that share them."""
    among = s.group(sync.group)
    if sync.what == "gather":
        return collective("all_gather", size, among, s.cluster)
    if sync.what == "scatter":
        if sync.blocks:
            return collective("all_to_all", size, among, s.cluster)
        return communication.scatter_gradients(size, among, s.cluster)
    by = communication.summed_by(s.layout.all_reduce, among, s.cluster)
    if by == LIBRARY:
        return collective("all_reduce", size, among, s.cluster)
    number = 1 if sync.rows else bucket_number(s, whole)
    return number * communication.sum_gradients(size / number, among, s.cluster, by)


def bucket_number(s: Setting, elements: float) -> int:
    """About how many buckets these gradients of a flat buffer have."""
    gradient = DTYPES[MASTER].bytes
    return max(1, math.ceil(elements * gradient / bucket_bytes(s.layout)))


def _copied(sync: Sync, keeps: float, whole: float, s: Setting) -> float:
    """Seconds of FSDP2's copies: into and out of a gather, with its cast, or into a scatter; and of ZeRO++'s, which
    encode and decode.

    On an accelerator they are negligible beside the messages.
    """
    device, e, gather = s.cluster.device, s.sizes.e, sync.what == "gather"
    if not device.measured or sync.what == "sum":
        return 0.0
    moved = 0.0
    if sync.group != "across":
        moved += keeps * (4 + e) + 2 * whole * e if gather else whole * (e + 4)
    if sync.blocks or sync.group == "inside":
        number, of = sync.blocks.per_element if sync.blocks else e, sync.part * whole
        moved += (keeps if gather else of) * (e if gather else 4) + of * (2 * number + (e if gather else 4))
    return stream(moved, device, "copy", s.dtype)


def per_step(s: Setting, own: Elements, backward: float, forward: float) -> tuple[float, float]:
    """Seconds that gradient sums and weight gathers add to a step of a rank with these elements.

    backward, forward: seconds of one of its microbatches, with which they overlap.
    """
    blocks = max(1, s.model.layers // s.layout.pp)
    reduced = gathered = alone = 0.0
    copies = [0.0, 0.0]  # into scatters, out of gathers
    busy = [0.0, 0.0]  # seconds of sums and gathers in which the CPU itself copies
    for sync, seconds, copied in synced(own, s):
        if sync.each:
            continue
        if sync.what == "scatter" and not s.software.overlap_scatter:
            alone, copies[0] = alone + seconds, copies[0] + copied
            continue
        busy[sync.what == "gather"] += held(seconds, s.group(sync.group), s.cluster)
        if sync.what == "gather":
            gathered, copies[1] = gathered + seconds, copies[1] + copied
        else:
            reduced, copies[0] = reduced + seconds, copies[0] + copied
    if s.layout.compress != NONE:
        reduced, *after = compressed_sums(s, own)
        copies[0], busy[0] = sum(after), held(reduced, s.group("batch"), s.cluster)
    if s.software.overlap_data:
        reduced = exposed_in_pieces(reduced, busy[0], backward, summed_pieces(s, own))
        gathered = exposed_in_pieces(gathered, busy[1], forward, blocks)
    return reduced + alone + copies[0], gathered + copies[1]


def summed_pieces(s: Setting, own: Elements) -> int:
    """Number of messages by which a rank sums gradients while backward computes: one per block, unless buckets are
    larger. (Smaller ones are priced as one per block.)"""
    blocks = max(1, s.model.layers // s.layout.pp)
    if s.layout.zero:
        return blocks
    return max(1, min(blocks, sum(bucket_number(s, computes) for computes, *_ in own.groups() if computes)))


def compressed_sums(s: Setting, own: Elements) -> tuple[float, float, float]:
    """Seconds of a rank's compressed gradient sums: of the first messages, which overlap with backward; of those that
    follow; of encoding and decoding."""
    first = later = encoding = 0.0
    compress = compressor(s.layout.compress)
    for computes, _, expert, *_ in own.groups():
        messages = volume.compressed(s, expert) if computes else []
        seconds = [message_seconds([(what, axis, size * computes)], s) for what, axis, size in messages]
        first, later = first + sum(seconds[:1]), later + sum(seconds[1:])
        if compress is not None and messages:
            device = s.cluster.device
            each = device.measured.encoding(compress.text) if device.measured else None
            if each is None:  # memory traffic
                took = stream(compress.passes * DTYPES[MASTER].bytes * computes, device, "copy", MASTER)
            else:
                took = computes * each
            encoding += s.cluster.oversubscription * took
    return first, later, encoding


def shared_sums(s: Setting, position: int) -> tuple[float, float]:
    """Seconds of the gradient sums that a pipeline position does besides its replicas': (over the tensor axis, of tied
    embeddings)."""
    messages = volume.shared(s, position)
    tensor = [message for message in messages if message[1] == "tp"]
    tied = [message for message in messages if message[1] != "tp"]
    return message_seconds(tensor, s), message_seconds(tied, s)


def message_seconds(messages: Iterable[volume.Sent], s: Setting) -> float:
    """Seconds of messages, one after the other."""
    total = 0.0
    for what, axis, size in messages:
        if what == "send":
            total += communication.send(size, s.group(axis).nodes > 1, s.cluster)
        elif what != "receive":  # which goes on beside a send
            total += collective(what, size, s.group(axis), s.cluster)
    return total


def _outer_elements(s: Setting, position: int) -> tuple[int, ...]:
    """Elements of each fragment on the first rank of a pipeline position, which has most."""
    rank = s.layout.rank({"pp": position})
    return tuple(sum(volume.outer_elements(s, rank, number)) for number in range(s.sites.fragments))


def outer_seconds(s: Setting, inner: float = 0.0) -> float:
    """Seconds of all outer steps of `sites.every` inner steps. Each fragment's messages go out together, and overlap
    with `sites.overlap` inner steps of `inner` seconds. The slowest pipeline position decides."""
    slowest, hidden = 0.0, inner * s.sites.overlap
    for position in range(s.layout.pp if s.sites.count > 1 else 0):
        rank, total = s.layout.rank({"pp": position}), 0.0
        for number in range(s.sites.fragments):
            messages = itertools.chain(*volume.outer(s, rank, number))
            sent = sum(collective(what, size, s.group("sites"), s.cluster) for what, size in messages)
            total += max(0.0, sent - hidden)
        # common weights and momentum are read and written; masters are read for the difference, and written
        moved = sum(_outer_elements(s, position)) * (2 * s.sites.kept + 4 * DTYPES[MASTER].bytes)
        update = stream(moved, s.cluster.device, "optimizer", s.dtype)
        slowest = max(slowest, total + s.cluster.oversubscription * update)
    return slowest


def outer_buffers(s: Setting, position: int) -> float:
    """Bytes of the outer gradients that are under way at once: a fragment's, or with overlap those of several."""
    if s.sites.count == 1:
        return 0.0
    return DTYPES[MASTER].bytes * sum(sorted(_outer_elements(s, position))[-s.sites.at_once :])
