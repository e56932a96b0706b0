"""A checkpoint on disk: safetensors shards and a JSON manifest with the hash of every file (docs/checkpoint-format.md).

Every rank writes the pieces of tensors that it owns. The manifest says where each piece lies in its tensor. So a
checkpoint knows no layout, and a reader can ask for any box of any tensor.

A folder is written (`write.py`) under a temporary name, flushed to disk and renamed, so a folder called step-... is
complete. Every file is checked against the manifest before it is read: its bytes, its tensors' names, shapes and
dtypes, and that all numbers are finite. A truncated or changed file is an error that names it.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fivefold import files
from fivefold.checkpoint.manifest import (
    DTYPES,
    Box,
    Damaged,
    Entry,
    File,
    Stored,
    folder_name,
    read,
    step_of,
    unreadable,
)
from fivefold.checkpoint.manifest import MANIFEST as MANIFEST
from fivefold.comm.progress import progress
from fivefold.errors import UserError, system_error
from fivefold.files import open_file, parse_json
from fivefold.host import cores

MOST_HEADER = 1 << 28
"""Bytes of a safetensors header."""
LARGEST = 1e30
"""No number of a checkpoint is beyond it. In fp32 the square of a weight or gradient would not be finite any more."""
MOST_THREADS = 8


class Reader:
    """Reads any part of any tensor of a checkpoint. Each file is checked against the manifest before its first use.

    Tensors that it returns may lie in memory-mapped files: copy what shall be changed. finite: refuses numbers that no
    training state has.
    """

    def __init__(self, folder: Path, *, finite: bool = True):
        self.folder, self.finite = folder, finite
        self.manifest, self.content = read(folder)
        self.meta: dict[str, Any] = self.manifest.meta
        self._checked: set[str] = set()
        self._open: dict[str, dict[str, Tensor]] = {}

    def names(self, kind: str) -> list[str]:
        return list(self.manifest.tensors[kind])

    def shape(self, kind: str, name: str) -> tuple[int, ...]:
        """The shape of a tensor. Raises KeyError if the checkpoint lacks it."""
        return self.manifest.tensors[kind][name].shape

    def dtype(self, kind: str, name: str) -> torch.dtype:
        """Raises KeyError if the checkpoint lacks the tensor."""
        return getattr(torch, DTYPES[self.manifest.tensors[kind][name].dtype])

    def read(self, kind: str, name: str, box: Box | None = None) -> Tensor:
        """The elements of a tensor in a box (None: all).

        Raises:
            KeyError: the checkpoint has no such tensor.
            UserError: a file is missing, truncated or changed.
        """
        box = all_of(self.shape(kind, name)) if box is None else box
        sizes, out = [stop - start for start, stop in box], None
        for piece, common in self._pieces(kind, name, box):
            self.check(piece.file)
            found = self._tensors(piece.file)[piece.key][_within(common, piece.box)]
            if common == tuple(box):
                return found
            out = torch.empty(sizes, dtype=found.dtype) if out is None else out
            out[_within(common, box)] = found
        return torch.empty(sizes) if out is None else out  # None: an empty box

    @property
    def files(self) -> list[str]:
        """Names of all files except the manifest."""
        return list(self.manifest.files)

    def files_of(self, kind: str, name: str, box: Box) -> set[str]:
        """The files that a read opens."""
        return {piece.file for piece, _ in self._pieces(kind, name, box)}

    def check(self, *files: str, threads: int = 1) -> None:
        """Checks files, each once: their bytes, and the tensors in them.

        Raises:
            Damaged: one is missing, truncated or changed, or holds numbers that no checkpoint has.
            UserError: one cannot be read.
        """
        left = [file for file in dict.fromkeys(files) if file not in self._checked]
        left.sort(key=lambda file: self.manifest.files[file].bytes, reverse=True)
        if threads > 1 and len(left) > 1:
            with ThreadPoolExecutor(min(threads, len(left))) as pool:
                list(pool.map(self._check, left))
        else:
            for file in left:
                self._check(file)
        self._checked.update(left)

    def trust(self, files: Iterable[str]) -> None:
        """Marks files as checked, because another process that reads the same disk has checked them."""
        self._checked.update(files)

    def _pieces(self, kind: str, name: str, box: Box) -> Iterator[tuple[Stored, Box]]:
        """The pieces that overlap a box, each with its overlap. Raises ValueError: the box lies beyond the tensor."""
        entry = self.manifest.tensors[kind][name]
        if len(box) != len(entry.shape) or any(s[1] > size for s, size in zip(box, entry.shape, strict=True)):
            raise ValueError(f"{kind} tensor {name!r:.120} has the shape {list(entry.shape)}")
        for piece in entry.pieces:
            common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, piece.box, strict=True))
            if all(start < stop for start, stop in common):
                yield piece, common

    def _check(self, file: str) -> None:
        _verify(self.folder / file, self.manifest.files[file])
        wrong, tensors, wanted = "", self._tensors(file), self._wanted.get(file, {})
        if odd := sorted(wanted.keys() ^ tensors.keys()):
            wrong = f"it does not have the tensors that the manifest names: {odd[0]!r:.120}"
            wanted = {}
        for key, (name, shape, entry) in wanted.items():
            tensor, dtype = tensors[key], entry.dtype
            if tuple(tensor.shape) != shape or str(tensor.dtype) != f"torch.{DTYPES[dtype]}":
                wrong = (
                    f"{name!r:.120} is of {tensor.dtype}, shape {list(tensor.shape)}, unlike in the manifest"
                )
            elif self.finite and (why := odd_numbers(tensor, entry.buffer)):
                wrong = f"{name!r:.120} {why}"
            if wrong:
                break
        if wrong:
            raise Damaged(f"{self.folder / file} is damaged: {wrong}")

    @cached_property
    def _wanted(self) -> dict[str, dict[str, tuple[str, tuple[int, ...], Entry]]]:
        """{file: {key: (tensor, shape of the piece, what there is of the tensor)}}"""
        found: dict[str, dict[str, tuple[str, tuple[int, ...], Entry]]] = {}
        for tensors in self.manifest.tensors.values():
            for name, entry in tensors.items():
                for piece in entry.pieces:
                    sizes = tuple(stop - start for start, stop in piece.box)
                    found.setdefault(piece.file, {})[piece.key] = (name, sizes, entry)
        return found

    def _tensors(self, file: str) -> dict[str, Tensor]:
        """The tensors of a safetensors file, mapped into memory without a copy.

        Raises:
            Damaged: it is not one.
            UserError: it cannot be read.
        """
        if file in self._open:
            return self._open[file]
        path = self.folder / file
        try:
            with open_file(path) as opened:
                size = int.from_bytes(opened.read(8), "little")
                if size > MOST_HEADER:
                    raise Damaged(f"{path} is damaged: a header of {size} bytes")
                header = parse_json(opened.read(size))
                # A private mapping may be written to, as torch asks; nothing does, and nothing would reach the file.
                content = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
            header.pop("__metadata__", None)
            self._open[file] = {key: _tensor(content, 8 + size, about) for key, about in header.items()}
        except OSError as error:
            raise unreadable(path, error) from None
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            if isinstance(error, UserError):
                raise
            raise Damaged(f"{path} is damaged: not a safetensors file: {error!r:.200}") from None
        return self._open[file]


def odd_numbers(tensor: Tensor, buffer: bool = False) -> str:
    """Why no checkpoint may hold this tensor; empty if it may. buffer: it may hold any number, as masks do."""
    if str(tensor.dtype).removeprefix("torch.") not in DTYPES.values():
        return f"is of {tensor.dtype}"
    if not tensor.is_floating_point() or not tensor.numel():
        return ""
    low, high = torch.aminmax(tensor if tensor.element_size() > 1 else tensor.float())
    if buffer:
        return "holds NaN" if bool(low.isnan()) else ""
    if low >= -LARGEST and high <= LARGEST:
        return ""
    if not bool(tensor.isfinite().all()):
        return "holds numbers that are not finite"
    return f"holds {max(-low.item(), high.item()):.1e}; the largest number of a checkpoint is {LARGEST:.0e}"


def all_of(shape: Sequence[int]) -> Box:
    return tuple((0, size) for size in shape)


def _within(inner: Sequence[tuple[int, int]], outer: Sequence[Sequence[int]]) -> tuple[slice, ...]:
    """The slices of `outer` that `inner` covers."""
    return tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(inner, outer, strict=True))


def threads(processes: int = 1) -> int:
    """Threads that check files in each of so many processes of this machine."""
    return max(1, min(MOST_THREADS, cores() // processes))


def latest(run: Path) -> Path:
    """The newest checkpoint of a run. Raises UserError: the run has none, or its folder cannot be read."""
    if folders := checkpoints(run):
        return folders[-1]
    raise UserError(f"{run} has no checkpoint yet: {run / 'checkpoints'} holds none")


def chosen(run: Path, step: int | None) -> Path:
    """The checkpoint of a step; None: the newest. Raises UserError: the run has none, or none of this step."""
    if step is None:
        return latest(run)
    if folder_of(run, step) not in (found := checkpoints(run)):
        there = ", ".join(str(step_in(folder)) for folder in found[-20:])
        raise UserError(f"step = {step}: {run} has no checkpoint of this step; it has {there or 'none'}")
    return folder_of(run, step)


def checkpoints(run: Path) -> list[Path]:
    """The checkpoints of a run, oldest first: all folders that are called exactly like one. They may be damaged. Raises
    UserError: they cannot be read. "There is none" would be another answer."""
    home = run / "checkpoints"
    try:
        found = [path for path in home.iterdir() if step_of(path.name) is not None and path.is_dir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise system_error(f"{home}: the checkpoints cannot be read: {error.strerror}", error) from None
    return sorted(found, key=step_in)


def step_in(folder: Path) -> int:
    """The step of a checkpoint; 0 for a folder that is not called like one."""
    return step_of(folder.name) or 0


def folder_of(run: Path, step: int) -> Path:
    return run / "checkpoints" / folder_name(step)


def _verify(path: Path, expected: File) -> None:
    """Raises:
    Damaged: the file is missing, or its bytes are others.
    UserError: it cannot be read.
    """
    try:
        size = path.stat().st_size
        if size != expected.bytes:
            raise Damaged(f"{path} is damaged: {size} bytes, the manifest says {expected.bytes}")
        found = sha256(path)
    except FileNotFoundError:
        raise Damaged(f"{path} is missing, though the manifest names it") from None
    except OSError as error:
        raise unreadable(path, error) from None
    if found != expected.sha256:
        raise Damaged(f"{path} is damaged: its content does not match the hash in the manifest")


def sha256(path: Path) -> str:
    return files.sha256(path, lambda size: progress.get_on())


def _tensor(content: mmap.mmap, begin: int, about: Any) -> Tensor:
    """A tensor of a file, by its entry in the header. Raises ValueError and others if the entry is not valid."""
    dtype, shape = getattr(torch, DTYPES[about["dtype"]]), about["shape"]
    start, stop = about["data_offsets"]
    if any(type(n) is not int or n < 0 for n in (start, stop, *shape)):
        raise ValueError("a header with numbers that are not whole")
    count = math.prod(shape)
    if count * dtype.itemsize != stop - start or begin + stop > len(content):
        raise ValueError("a header that does not fit the file")
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(content, dtype=dtype, count=count, offset=begin + start).view(shape)
