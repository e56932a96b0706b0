"""Writing a checkpoint: every rank the pieces that it owns, together whole or not at all (see `store.py`)."""

from __future__ import annotations

import hashlib
import json
import mmap
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from fivefold.checkpoint.manifest import DTYPES, KINDS, MANIFEST, Box, checked, join, key_of, to_bytes
from fivefold.checkpoint.store import all_of, odd_numbers
from fivefold.comm import ALONE, Axis, all_or_none
from fivefold.comm.progress import progress
from fivefold.errors import BusyError, UserError, system_error
from fivefold.files import flush, make_folder, remove, rename, stream
from fivefold.files import write as write_file
from fivefold.models.weights import Weight

MAX_SHARD_BYTES = 256 << 20
"""Of a file. Several are hashed at once when they are read."""
CHUNK = 4 << 20
"""Bytes that are hashed and written at once."""
SPARE_BYTES = 16 << 20
"""Of a disk, beside what is written: manifest, names, metrics."""
REPLACED = ".replaced"
"""After the name of a checkpoint while another one gets its name (`keep.recover`)."""
_CODES = {name: code for code, name in DTYPES.items()}


@dataclass(frozen=True)
class Piece:
    """A box of tensor `name`: the elements [start, stop) along each dim of its shape. buffer: as in `Entry`. read:
    reads them when they are written; `tensor` then has only a shape and a dtype."""

    name: str
    tensor: Tensor
    shape: tuple[int, ...]
    box: Box
    buffer: bool = False
    read: Callable[[], Tensor] | None = None


Pieces = Mapping[str, Iterable[Piece]]
"""What a rank owns: "model" and "optimizer"."""


def whole_pieces(tensors: Mapping[str, Tensor], buffers: bool = False) -> list[Piece]:
    return [Piece(n, t, tuple(t.shape), all_of(t.shape), buffers) for n, t in tensors.items()]


def unread(weights: Mapping[str, Weight]) -> list[Piece]:
    """Pieces of weights that are read one by one, each when it is written."""
    about = {name: torch.empty(w.shape, dtype=w.dtype, device="meta") for name, w in weights.items()}
    return [replace(piece, read=weights[piece.name].read) for piece in whole_pieces(about)]


@dataclass(frozen=True)
class Writing:
    """A checkpoint that the ranks of `axis` write to a disk that they share. `begin` and `save` are called by all of
    them together. `write_part` and `finish` send no messages, so a thread may call them.

    finite: refuses numbers that no training state has, which `store.Reader` would refuse as well. before,
    after: called on the first rank before and after the folder gets its name.
    """

    folder: Path
    pieces: Pieces
    meta: Mapping[str, Any]
    axis: Axis = ALONE
    max_shard_bytes: int = MAX_SHARD_BYTES
    finite: bool = True
    before: Callable[[], None] = lambda: None
    after: Callable[[], object] = lambda: None

    @property
    def temporary(self) -> Path:
        return self.folder.with_name(f".{self.folder.name}.writing")

    @property
    def first(self) -> bool:
        return self.axis.index == 0

    def save(self) -> Path:
        """Writes the checkpoint and returns its folder. It replaces an older one of the same name. Raises UserError:
        the disk is full, the folder cannot be written, or numbers are not finite. Nothing incomplete is left, and an
        older checkpoint is as before."""
        try:
            self.begin()
            with all_or_none(self.axis):
                self.write_part()
            with all_or_none(self.axis):
                if self.first:
                    self.finish()
        finally:
            self.abandon()
        return self.folder

    def begin(self) -> None:
        """Makes the temporary folder, if the disk has room for the pieces of all ranks. Raises UserError: it has not.
        On all ranks."""
        own = sum(piece.tensor.nbytes for pieces in self.pieces.values() for piece in pieces)
        needed = int(self.axis.all_reduce(torch.tensor(own, dtype=torch.int64, device=self.axis.device)))
        with all_or_none(self.axis), self._explained():
            if self.first:
                remove(self.temporary)  # of a process that was killed
                make_folder(self.temporary)
                free = shutil.disk_usage(self.temporary).free
                if free < needed + SPARE_BYTES:
                    remove(self.temporary)
                    raise BusyError(
                        f"cannot write the checkpoint {self.folder}: it needs "
                        f"{needed / (1 << 20):,.1f} MiB and {SPARE_BYTES >> 20} MiB to spare, and the disk has "
                        f"{free / (1 << 20):,.0f} MiB free. Make room there, or keep fewer (checkpoint.keep_last)"
                    )

    def write_part(self) -> None:
        """Writes this rank's files and a list of their content."""
        with self._explained():
            listed: dict[str, Any] = {"files": {}, "tensors": []}
            for kind in KINDS:
                for number, shard in enumerate(cut(self.pieces[kind], self.max_shard_bytes), 1):
                    name = f"{kind}-{self.axis.index:05d}-{number:05d}.safetensors"
                    listed["files"][name] = self.write_shard(self.temporary / name, shard)
                    listed["tensors"] += [
                        [kind, p.name, p.shape, _code(p.tensor), name, p.box, p.buffer] for p in shard
                    ]
            part = self.part(self.axis.index)
            unready = part.with_name(f".{part.name}")
            write_file(unready, json.dumps(listed))
            rename(unready, part)

    def finish(self) -> None:
        """Joins the lists of all ranks into the manifest, checks that nothing is missing, and gives the folder its
        name. The first rank does it."""
        with self._explained():
            parts = [json.loads(self.part(rank).read_bytes()) for rank in range(self.axis.size)]
            try:
                manifest = checked(join(parts, self.meta))
            except ValueError as error:
                raise AssertionError(f"the ranks wrote no whole checkpoint: {self.folder}: {error}") from None
            for rank in range(self.axis.size):
                remove(self.part(rank))
            write_file(self.temporary / MANIFEST, to_bytes(manifest))
            flush(self.temporary / MANIFEST)
            flush(self.temporary)
            self.before()
            old = self.folder.with_name(f".{self.folder.name}{REPLACED}")
            if self.folder.exists():
                rename(self.folder, old)
            rename(self.temporary, self.folder)
            remove(old)
            self.after()

    def abandon(self) -> None:
        """Removes what is not complete."""
        if self.first:
            remove(self.temporary)

    def part(self, rank: int) -> Path:
        """The list of a rank's files, once they are written."""
        return self.temporary / f"part-{rank:05d}.json"

    def write_shard(self, path: Path, shard: list[Piece], **about: str) -> dict[str, Any]:
        """Writes a safetensors file and returns its hash and size. about: what it says of itself."""
        header, start = {"__metadata__": about} if about else dict[str, Any](), 0
        for piece in shard:
            stop = start + piece.tensor.nbytes
            shape = [b - a for a, b in piece.box]
            header[key_of(piece.name, piece.shape, piece.box)] = {
                "dtype": _code(piece.tensor),
                "shape": shape,
                "data_offsets": [start, stop],
            }
            start = stop
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # tensors begin at multiples of 8
        digest = hashlib.sha256()
        with stream(path) as file:
            _put(file, digest, len(text).to_bytes(8, "little") + text)
            for piece in shard:
                tensor = (piece.read() if piece.read else piece.tensor).detach().cpu().contiguous()
                if self.finite and (why := odd_numbers(tensor, piece.buffer)):
                    raise UserError(f"cannot write the checkpoint {self.folder}: {piece.name!r:.120} {why}")
                _put(file, digest, tensor.reshape(-1).view(torch.uint8).numpy().data)
        flush(path)
        return {"sha256": digest.hexdigest(), "bytes": 8 + len(text) + start}

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise system_error(f"cannot write the checkpoint {self.folder}: {error}", error) from error


def save(
    folder: Path,
    model: Iterable[Piece] | Mapping[str, Tensor],
    optimizer: Iterable[Piece] | Mapping[str, Tensor] | None,
    meta: Mapping[str, Any],
    *,
    axis: Axis = ALONE,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    finite: bool = True,
) -> Path:
    """Writes a checkpoint and returns its folder: see `Writing`. Every rank of the axis calls it with its own pieces,
    which make up each tensor exactly once; or one process with whole tensors, by their names."""
    kinds = {"model": model, "optimizer": optimizer or ()}
    pieces = {k: whole_pieces(v) if isinstance(v, Mapping) else list(v) for k, v in kinds.items()}
    return Writing(folder, pieces, meta, axis, max_shard_bytes, finite).save()


def _put(file: IO[bytes], digest: Any, content: bytes | memoryview) -> None:
    for start in range(0, len(content), CHUNK):
        chunk = content[start : start + CHUNK]
        digest.update(chunk)
        file.write(chunk)
        progress.get_on()


def cut(pieces: Iterable[Piece], max_bytes: int) -> Iterator[list[Piece]]:
    """The pieces of each file: those with the largest elements first, so that all begin at a multiple of their size."""
    shards: list[list[Piece]] = []
    size = 0
    for piece in pieces:
        if not shards or size + piece.tensor.nbytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(piece)
        size += piece.tensor.nbytes
    for shard in shards:
        yield sorted(shard, key=lambda piece: piece.tensor.element_size(), reverse=True)


def _code(tensor: Tensor) -> str:
    """safetensors' name of a tensor's dtype."""
    return _CODES[str(tensor.dtype).removeprefix("torch.")]


POLL_S = 0.02
"""Between two looks of the first rank for the others' parts."""


class Background:
    """One save on its way. `Writing.begin` has been called, on all ranks.

    written: this rank's part is written, or failed. ended: the first rank has finished, too. error: why it failed.
    cancelled: once it is set, the first rank does not wait for the other ranks' parts any more.
    """

    def __init__(self, writing: Writing):
        self.writing = writing
        self.error: BaseException | None = None
        self.written, self.ended, self.cancelled = threading.Event(), threading.Event(), threading.Event()
        self._copy = Copy(writing.pieces)
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def wait_for_copy(self) -> float:
        """Waits until what is saved may change. Returns the seconds that the host waited."""
        begin = time.perf_counter()
        self._copy.wait()
        return time.perf_counter() - begin

    def join(self, timeout_s: float | None = None) -> None:
        self._thread.join(timeout_s)

    def _run(self) -> None:
        writing = self.writing
        try:
            replace(writing, pieces=self._copy.run()).write_part()
            self.written.set()
            if writing.first:
                # Each part is looked for until it is there, and then no more: on a disk in a network that is a message
                for rank in range(writing.axis.size):
                    while not (writing.part(rank).exists() or self.cancelled.is_set()):
                        self.cancelled.wait(POLL_S)
                if not self.cancelled.is_set():
                    writing.finish()
        except BaseException as error:  # whatever it is, all ranks have to learn of it
            self.error = error
        finally:
            self._copy.done.set()
            self.written.set()
            self.ended.set()


class Copy:
    """A copy of pieces in host memory. On GPUs it begins now; on CPUs `run` makes it."""

    def __init__(self, pieces: Pieces):
        self.pieces, self.done = pieces, threading.Event()
        tensors = [piece.tensor for owned in pieces.values() for piece in owned]
        self.hosts = _hosts(tensors)
        self.event: torch.cuda.Event | None = None
        devices = {tensor.device for tensor in tensors if tensor.is_cuda}
        if devices:
            (device,) = devices
            side = torch.cuda.Stream(device)
            side.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(side):
                for tensor, host in zip(tensors, self.hosts, strict=True):
                    host.copy_(tensor.detach(), non_blocking=True)
                self.event = torch.cuda.Event()
                self.event.record(side)

    def run(self) -> Pieces:
        """The pieces with tensors in host memory, once they are copied."""
        if self.event is not None:
            self.event.synchronize()
        else:
            tensors = (piece.tensor for owned in self.pieces.values() for piece in owned)
            for tensor, host in zip(tensors, self.hosts, strict=True):
                # numpy: on one core, without the interpreter's lock
                np.copyto(_bits(host), _bits(tensor.detach()))
        self.done.set()
        left = iter(self.hosts)
        return {
            kind: [replace(piece, tensor=next(left)) for piece in owned]
            for kind, owned in self.pieces.items()
        }

    def wait(self) -> None:
        """Returns when the tensors may change: on a GPU for what is queued after this call."""
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)
        else:
            self.done.wait()


def _hosts(tensors: list[Tensor]) -> list[Tensor]:
    """Room for a copy of each tensor: pinned for those on a GPU, otherwise in one mapping, which goes back to the
    system with the last of them."""
    if any(tensor.is_cuda for tensor in tensors):
        return [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
    starts, size = [], 0
    for tensor in tensors:
        starts.append(size)
        size += -(-tensor.nbytes // 64) * 64
    content = mmap.mmap(-1, max(1, size))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        content.madvise(mmap.MADV_HUGEPAGE)
    return [
        torch.frombuffer(content, dtype=tensor.dtype, count=tensor.numel(), offset=start).view(tensor.shape)
        if tensor.numel()
        else torch.empty_like(tensor)
        for tensor, start in zip(tensors, starts, strict=True)
    ]


def _bits(tensor: Tensor) -> np.ndarray:
    """The same memory as numbers of a type that numpy has."""
    return tensor.view(_BITS[tensor.element_size()]).numpy()


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
