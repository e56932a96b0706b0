"""The tensors of a DCP folder. What it says is checked when it is opened: that the chunks of a tensor lie within their
files and make it up exactly once. A chunk is read when it is needed."""

from __future__ import annotations

import mmap
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fivefold import files
from fivefold.checkpoint.dcp.opcodes import Made, values
from fivefold.checkpoint.manifest import MOST_DIMS, Box, once
from fivefold.errors import UserError, shortened, system_error
from fivefold.models.weights import Weight
from fivefold.sharding.parts import Shape

METADATA = ".metadata"
MOST_METADATA = 256 << 20
"""Bytes of the metadata: about 150 for each chunk of a tensor. Objects in memory take 12 times as much, at worst 50."""
MOST_MORE = 1 << 20
"""Bytes of a chunk in its file beyond its elements. PyTorch needs about 1,500."""
PIECE = 4 << 20
"""Bytes that are read at once."""
OTHERS = ("optimizer", "lr_scheduler", "dataloader", "train_state", "freqs_cis")
"""How the names of torchtitan's values begin that are no weights."""
_META, _FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
_DTYPES = {f"torch {name}": dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)}
_STORAGES = {
    getattr(torch, dtype): f"torch {name}Storage"
    for name, dtype in {"Float": "float32", "BFloat16": "bfloat16", "Half": "float16"}.items()
}
_OF_TENSOR = {"torch._utils _rebuild_tensor_v2", "collections OrderedDict", *_STORAGES.values()}
_NAMES = {
    *(f"{_META} {kind}" for kind in ("Metadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")),
    *(f"{_META} {kind}StorageMetadata" for kind in ("Tensor", "Bytes", "Chunk")),
    *(f"{_META} TensorProperties", f"{_FILES} _StorageInfo", "torch Size", "torch.serialization _get_layout"),
    "builtins getattr",  # by which Python before 3.11.4 pickles a member of an enumeration; nothing is called here
    *("pathlib PosixPath", "pathlib._local PosixPath", *_DTYPES),
}
Chunk = tuple[Box, str, int, int]
"""Where it lies in its tensor; its file, first byte and number of bytes."""


@dataclass(frozen=True)
class Stored(Weight):
    """A tensor of a folder."""

    chunks: tuple[Chunk, ...]


def tensors(folder: Path) -> tuple[dict[str, Stored], Counter[str]]:
    """The tensors of a folder by name, and how many values it has besides (`OTHERS`, and whatever is no tensor), by how
    their names begin. Raises UserError: something is damaged."""
    found, others, places = dict[str, Stored](), Counter[str](), dict[Any, dict[str, Any]]()
    with _sound(folder / METADATA):
        meta = _fields(values(files.read_bytes(folder / METADATA, MOST_METADATA), _NAMES), "Metadata")
        for index, info in meta["storage_data"]:
            if (of := _fields(index, "MetadataIndex")).get("offset"):
                places[_text(of["fqn"]), _whole(*of["offset"].args)] = _fields(info, "_StorageInfo")
        for name, entry in _table(meta["state_dict_metadata"]).items():
            inner = name.removeprefix("model.")
            if inner.startswith(OTHERS) or entry.name == f"{_META} BytesStorageMetadata":
                others[inner.partition(".")[0]] += 1
                continue
            about = _fields(entry, "TensorStorageMetadata")
            shape, dtype = _whole(*about["size"].args), _DTYPES[_text(about["properties"].state[0][0])]
            chunks = tuple(_chunks(folder, name, shape, dtype.itemsize, about["chunks"], places))
            once(f"{name!r:.120}, shape {list(shape)},", shape, [chunk[0] for chunk in chunks])
            found[name] = Stored(shape, dtype, partial(_read, folder, shape, dtype, chunks), chunks)
    return found, others


def _chunks(folder: Path, name: str, shape: Shape, itemsize: int, chunks: Any, places: Any) -> Iterator[Any]:
    for chunk in (_fields(chunk, "ChunkStorageMetadata") for chunk in chunks):
        offsets, sizes = _whole(*chunk["offsets"].args), _whole(*chunk["sizes"].args)
        lies, least = places[name, offsets], prod(sizes) * itemsize
        file, (start, size) = _text(lies["relative_path"]), _whole([lies["offset"], lies["length"]])
        box = tuple((a, a + n) for a, n in zip(offsets, sizes, strict=True))
        fits = (
            all(b <= n for (_, b), n in zip(box, shape, strict=True)) and least <= size <= least + MOST_MORE
        )
        if not fits or Path(file).name != file or "transform_descriptors" in lies:
            where = f"{size:,} bytes of {file!r:.80}, at byte {start:,}"
            raise ValueError(f"the chunk at {box} of {name!r:.120}, shape {list(shape)}, cannot be {where}")
        if start + size > (folder / file).stat().st_size:
            raise ValueError(f"the chunk at {box} of {name!r:.120} lies behind the end of {file}")
        yield box, file, start, size


def _read(folder: Path, shape: Shape, dtype: torch.dtype, chunks: Sequence[Chunk]) -> Tensor:
    """A tensor, put together. Raises UserError: a chunk is damaged."""
    out = torch.empty(shape, dtype=dtype)
    for box, name, start, size in chunks:
        part = out[tuple(slice(*span) for span in box)]
        whole = part if part.is_contiguous() else torch.empty(part.shape, dtype=dtype)
        with _sound(folder / name), files.open_file(folder / name) as file:
            content: Any = _UpTo(file.fileno(), start + size, access=mmap.ACCESS_READ)
            _fill(whole, zipfile.ZipFile(content))
        part.copy_(whole)  # does nothing if it is the same
    return out


class _UpTo(mmap.mmap):
    """The beginning of a file, of which nobody reads much at once."""

    def seekable(self) -> bool:
        return True

    def read(self, size: int | None = None, /) -> bytes:
        return super().read(PIECE if size is None or size < 0 else min(size, PIECE))


def _fill(out: Tensor, archive: zipfile.ZipFile) -> None:
    """Reads what torch.save wrote of a tensor. Raises ValueError and others: it is another one, or damaged."""
    (pickled,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
    home = pickled.removesuffix("data.pkl")
    function, (storage, *order), _ = values(archive.read(pickled), _OF_TENSOR)
    _, (_, kind, key, _, count), _ = storage
    record, byteorder = archive.getinfo(f"{home}data/{_text(key)}"), f"{home}byteorder"
    said = function, _text(kind), *order[:3], count, record.file_size, record.compress_type
    wanted = 0, tuple(out.shape), out.stride(), out.numel(), out.nbytes, zipfile.ZIP_STORED
    if said != ("torch._utils _rebuild_tensor_v2", _STORAGES[out.dtype], *wanted):
        raise ValueError(f"no tensor of {out.dtype}, shape {list(out.shape)}, with its elements in order")
    if byteorder in archive.namelist() and archive.read(byteorder) != b"little":
        raise ValueError("its bytes are in big-endian order")
    content = out.reshape(-1).view(torch.uint8).numpy().data
    with archive.open(record) as elements:
        for at in range(0, out.nbytes, PIECE):
            content[at : at + PIECE] = elements.read(PIECE)  # behind the last one, their checksum is compared


@contextmanager
def _sound(path: Path) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except OSError as error:
        raise system_error(f"{path}: cannot be read: {error.strerror or error}", error) from None
    except (*files.BROKEN, EOFError, RuntimeError, zipfile.BadZipFile) as error:
        why = shortened(f"{type(error).__name__}: {error}", 300)
        raise UserError(f"{path}: damaged, or not written by PyTorch ({why})") from None


def _fields(made: Any, name: str) -> dict[str, Any]:
    """The fields of an object of PyTorch's class `name`."""
    if not isinstance(made, Made) or made.name.partition(" ")[2] != name:
        raise TypeError(f"no {name} where one is needed")
    return _table(*made.state)


def _table(pairs: Any) -> dict[str, Any]:
    return {_text(key): value for key, value in pairs}


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("no text where one is needed")
    return value


def _whole(found: Any) -> Shape:
    if len(found) > MOST_DIMS or not all(type(n) is int and 0 <= n < 2**62 for n in found):
        raise TypeError("no sizes where they are needed")
    return tuple(found)
