"""DCP folders of somebody else: whatever they hold, nothing is imported or run, and one sentence says what is wrong."""

from __future__ import annotations

import io
import os
import pickle
import random
import re
import resource
import struct
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from marks import only, slow
from test_dcp import described, make_run, model_of, weights_of
from titan import of_titan
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

from fivefold.checkpoint.dcp import opcodes, read
from fivefold.checkpoint.dcp.read import METADATA, tensors
from fivefold.checkpoint.source import export_run, import_folder
from fivefold.errors import UserError
from fivefold.models.hf import to_hf

NAME = "layers.0.attention.wk.weight"  # (12, 24) in fp32


def leave_a_trace(where: str) -> None:
    """What a pickle may name and call without harm; no list of ours has it."""
    Path(where).touch()


class Evil:
    """Its pickle calls something."""

    def __init__(self, function: Callable[..., Any], *args: Any):
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


@pytest.fixture(scope="module")
def pristine(tmp_path_factory) -> Path:
    home = tmp_path_factory.mktemp("dcp")
    return export_run(make_run(home / "run", model_of()), home / "dcp", dcp=True)


@pytest.fixture
def folder(pristine, tmp_path) -> Path:
    (tmp_path / "dcp").mkdir()
    for path in pristine.iterdir():
        (tmp_path / "dcp" / path.name).write_bytes(path.read_bytes())
    return tmp_path / "dcp"


def refused(folder: Path) -> str:
    """What the import says, which leaves nothing behind, imports no module and takes no memory."""
    modules, before = set(sys.modules), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError) as error:
        import_folder(folder, folder.parent / "run")
    assert not (folder.parent / "run").exists()
    assert not (folder.parent / "run-by-a-pickle").exists()
    new = {
        name for name in set(sys.modules) - modules if not name.startswith("fivefold.models.")
    }  # maps of names
    assert new <= {"encodings.cp437"}  # names in a zip
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400 << 10
    assert "\n" not in str(error.value).removeprefix("the weights do not fit config.json:\n")
    assert len(str(error.value)) < 900
    return str(error.value)


def change(folder: Path, to: Callable[[Metadata], object]) -> None:
    """Changes the metadata, which these tests have written themselves."""
    metadata = pickle.loads((folder / METADATA).read_bytes())
    to(metadata)
    (folder / METADATA).write_bytes(pickle.dumps(metadata))


def place(metadata: Metadata, **fields: Any) -> None:
    for name in (NAME, NAME.replace(".wk", ".qkv_linear.wk")):
        index = MetadataIndex(name, torch.Size([0, 0]))
        metadata.storage_data[index] = _StorageInfo(**{**vars(metadata.storage_data[index]), **fields})


def chunks(metadata: Any, *boxes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    """Cuts the tensor into chunks (offsets, sizes), whose bytes are those of the whole one."""
    found = [ChunkStorageMetadata(torch.Size(a), torch.Size(n)) for a, n in boxes]
    for name in (NAME, NAME.replace(".wk", ".qkv_linear.wk")):
        metadata.state_dict_metadata[name].chunks = found
        lies = metadata.storage_data.pop(MetadataIndex(name, torch.Size([0, 0])))
        metadata.storage_data |= {MetadataIndex(name, c.offsets): lies for c in found}


def more(metadata: Metadata) -> None:
    """One more tensor, with the bytes of another."""
    metadata.state_dict_metadata["more"] = metadata.state_dict_metadata[NAME]
    index = MetadataIndex(NAME, torch.Size([0, 0]))
    metadata.storage_data[MetadataIndex("more", torch.Size([0, 0]))] = metadata.storage_data[index]


def text(word: str) -> bytes:
    return b"\x8c" + bytes([len(word)]) + word.encode()


def glob(module: str, name: str) -> bytes:
    return text(module) + text(name) + b"\x93"


META = "torch.distributed.checkpoint.metadata"
DOUBLED = b"()\x94" + b"".join(b"h%ch%c\x86\x94" % (n, n) for n in range(3)) + b"t"
"""A tuple of pairs of pairs of one thing: its hash or text takes twice as long with each pair."""
EVIL = {
    "a call": (b"ctest_dcp_hostile\nleave_a_trace\n(S'run-by-a-pickle'\ntR.", "it names test_dcp_hostile leave"),
    "a call by the stack": (glob("os", "getcwd") + b")R.", "it names os getcwd"),
    "builtins": (glob("builtins", "len") + text("1") + b"\x85R.", "it names builtins len"),
    "getattr": (glob(META, "Metadata.__doc__") + b".", "it names torch.dis.*__doc__"),
    "another class of torch": (glob("torch", "is_tensor") + text("x") + b"\x85R.", "it names torch is_tensor"),
    "another module of torch": (glob("torch._utils", "_rebuild_tensor_v2") + b".", "it names torch._utils _rebuild"),
    "a name of two lines": (b"ctorch.distributed.checkpoint.metadata Metadata\nx\n.", "it names"),
    "a name that is a tuple": (b"))\x93.", "TypeError"),
    "a call of a text": (text(f"{META} Metadata") + b")R.", "it calls something that is not a name"),
    "a call of a tuple": (b"))R.", "it calls something that is not a name"),
    "INST": (b"(ios\ngetcwd\n.", "opcode INST"),
    "OBJ": (b"(" + glob("torch", "Size") + b"o.", "opcode OBJ"),
    "NEWOBJ_EX": (glob("torch", "Size") + b")}\x92.", "opcode NEWOBJ_EX"),
    "an extension": (b"\x82\x01.", "opcode EXT1"),
    "a persistent text": (b"Px\n.", "opcode PERSID"),
    "bytes": (b"\x80\x04\x8e" + struct.pack("<q", 1000) + b"x" * 9 + b".", "ValueError"),
    "a text of 1,000 bytes in 10": (b"\x8d" + struct.pack("<q", 1000) + b"x" * 9 + b".", "ValueError"),
    "a short text of 1,000 bytes in 10": (b"X" + struct.pack("<i", 1000) + b"x" * 9 + b".", "ValueError"),
    "a number of 1,000 bytes in 10": (b"\x8b" + struct.pack("<i", 1000) + b"x" * 9 + b".", "ValueError"),
    "a number in words": (b"L5L\n.", "opcode LONG"),
    "a frame of 1,000 bytes in 2": (b"\x80\x04\x95" + struct.pack("<q", 1000) + b"N.", "no Metadata"),
    "a place of the memo": (b"Nr\x05\0\0\0.", "its memo has gaps"),
    "an empty place of the memo": (b"h\x07.", "IndexError"),
    "an empty stack": (b"R.", "its stack is empty"),
    "a mark below": (b"N(\x85.", "its stack is empty"),
    "no mark": (b"Nt.", "IndexError"),
    "a stack without end": (b"N" * 101 + b".", "more than 100 values wait"),
    "marks without end": (b"(" * 101 + b".", "more than 100 values wait"),
    "two values": (b"NN.", "ValueError"),
    "nothing": (b"", "ValueError"),
    "no end": (b"N", "ValueError"),
    "a deep tuple": (b")" + b"\x85" * 11 + b".", "no Metadata"),
    "tuples that double": (DOUBLED + b".", "no Metadata"),
    "a list in itself": (b"]\x94h\0a.", "no Metadata"),
    "a dictionary with three parts": (b"}(NNNu.", "ValueError"),
    "a list that is none": (b")Na.", "AttributeError"),
    "no object": (b")}b.", "AttributeError"),
    "two states": (glob(META, "Metadata") + b")R}b}b.", "TypeError"),
    "a key that doubles": (glob(META, "Metadata") + b")R}" + DOUBLED + b"Nsb.", "no text"),
    "no UTF-8": (b"X\x01\0\0\0\xff.", "ValueError|UnicodeDecodeError"),
    "a number as the file": (b"K\x01.", "no Metadata"),
}  # fmt: skip


@only("a call", "a call by the stack", "getattr", "tuples that double", "a stack without end")
@pytest.mark.parametrize("name", EVIL)
def test_hostile_pickles(folder, name, monkeypatch):
    monkeypatch.chdir(folder.parent)
    monkeypatch.setattr(opcodes, "MOST_STACK", 100)
    content, words = EVIL[name]
    (folder / METADATA).write_bytes(content)
    with pytest.raises(UserError, match=words):
        tensors(folder)
    assert METADATA in refused(folder)


def test_members_of_enumerations_as_older_pythons_pickle_them():
    """Before 3.11.4 as a call of getattr, which is read and not made."""
    member = (
        glob("builtins", "getattr") + glob(META, "_MEM_FORMAT_ENCODING") + text("TORCH_CONTIGUOUS_FORMAT")
    )
    found = opcodes.values(b"\x80\x04" + member + b"\x86R.", read._NAMES)
    assert found.name == "builtins getattr"
    assert found.args == (f"{META} _MEM_FORMAT_ENCODING", "TORCH_CONTIGUOUS_FORMAT")


@only("leave_a_trace-4")
@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    "function", [leave_a_trace, len, torch.is_tensor, Path.exists], ids=lambda f: f.__name__
)
def test_pickles_that_call(folder, protocol, function, monkeypatch):
    monkeypatch.chdir(folder.parent)
    for where in (Evil(function, "run-by-a-pickle"), [Metadata({}, Evil(function, "x"), {})]):
        (folder / METADATA).write_bytes(pickle.dumps(where, protocol))
        assert METADATA in refused(folder)


LIES: dict[str, tuple[Callable[[Metadata], object], str]] = {
    "a file above": (lambda m: place(m, relative_path="../dcp/__0_0.distcp"), "cannot be"),
    "a file elsewhere": (lambda m: place(m, relative_path="/etc/passwd"), "cannot be"),
    "a folder": (lambda m: place(m, relative_path="."), "cannot be"),
    "two dots": (lambda m: place(m, relative_path=".."), "behind the end|not a regular file|cannot be"),
    "no name": (lambda m: place(m, relative_path=""), "not a regular file"),
    "a name with NUL": (lambda m: place(m, relative_path="a\0b"), "NUL|null"),
    "a name of bytes": (lambda m: place(m, relative_path=3), "no text"),
    "a missing file": (lambda m: place(m, relative_path="gone.distcp"), "No such file"),
    "another file": (lambda m: place(m, relative_path="config.json"), "behind the end"),
    "an offset below": (lambda m: place(m, offset=-1), "no sizes"),
    "an offset beyond": (lambda m: place(m, offset=1), "behind the end of __0_"),
    "an offset of 2^80": (lambda m: place(m, offset=1 << 80), "no sizes"),
    "an offset that is true": (lambda m: place(m, offset=True), "no sizes"),
    "too few bytes": (lambda m: place(m, length=12 * 24 * 4 - 1), "cannot be 1,151 bytes"),
    "too many bytes": (lambda m: place(m, length=12 * 24 * 4 + read.MOST_MORE + 1), "cannot be 1,049,729 bytes"),
    "less than the zip": (lambda m: place(m, length=12 * 24 * 4), "BadZipFile"),
    "compressed": (lambda m: place(m, transform_descriptors=["zstd"]), "cannot be"),
    "no place": (lambda m: m.storage_data.clear(), "KeyError"),
    "no tensors": (lambda m: m.state_dict_metadata.clear(), "the weight tok_embeddings.weight is missing"),
    "a weight less": (lambda m: [m.state_dict_metadata.pop(n) for n in (NAME, NAME.replace(".wk", ".qkv_linear.wk"))],
                      f"the weight {NAME} is missing"),
    "a gap": (lambda m: chunks(m, ((0, 0), (6, 24)), ((7, 0), (5, 24))), "hold 264 of its 288 elements"),
    "an overlap": (lambda m: chunks(m, ((0, 0), (6, 24)), ((5, 0), (6, 24))), "pieces that overlap"),
    "an overlap in columns": (lambda m: chunks(m, ((0, 0), (12, 12)), ((0, 11), (12, 12))), "pieces that overlap"),
    "nothing at all": (lambda m: chunks(m), "hold 0 of its 288"),
    "beyond the shape": (lambda m: chunks(m, ((1, 0), (12, 24))), "shape .12, 24., cannot be"),
    "a chunk of three dims": (lambda m: chunks(m, ((0, 0, 0), (12, 24, 1))), "ValueError"),
    "chunks of less": (lambda m: chunks(m, ((0, 0), (6, 24)), ((6, 0), (6, 24))), "no tensor of torch.float32"),
    "another shape": (lambda m: setattr(m.state_dict_metadata[NAME], "size", torch.Size([2**40, 24])), "hold 288 of"),
    "many dims": (lambda m: setattr(m.state_dict_metadata[NAME], "size", torch.Size([1] * 17)), "no sizes"),
    "another dtype": (lambda m: setattr(m.state_dict_metadata[NAME], "properties", replace(
        m.state_dict_metadata[NAME].properties, dtype=torch.float64)), "has dtype float64"),
    "two weights for one": (lambda m: m.storage_data.update({MetadataIndex(NAME, torch.Size([0, 0])): m.storage_data[
        MetadataIndex(NAME.replace("wk", "wv"), torch.Size([0, 0]))]}), "two tensors for one weight"),
    "an unknown weight": (lambda m: more(m), "more is not part of LlamaForCausalLM"),
}  # fmt: skip


@only("a file above", "a gap", "an overlap in columns", "an offset beyond", "two weights for one")
@pytest.mark.parametrize("name", LIES)
def test_metadata_that_lies(folder, name):
    lie, words = LIES[name]
    change(folder, lie)
    message = refused(folder)
    assert re.search(words, message), message


def test_a_link_out_of_the_folder(folder):
    path = folder / "__0_3.distcp"
    path.rename(folder.parent / "elsewhere")
    path.symlink_to(folder.parent / "elsewhere")
    assert "leads out of" in refused(folder)
    path.unlink()
    os.mkfifo(path)
    assert "neither a file nor a folder" in refused(folder)


def test_large_metadata(folder, monkeypatch):
    monkeypatch.setattr(read, "MOST_METADATA", 1 << 10)
    (folder / METADATA).write_bytes(bytes((1 << 10) + 1))
    assert "has more than 1,024 bytes" in refused(folder)


def saved(what: Any, **how: Any) -> bytes:
    content = io.BytesIO()
    torch.save(what, content, **how)
    return content.getvalue()


def zipped(compress: int = zipfile.ZIP_STORED, **change: bytes | None) -> bytes:
    """A chunk zipped anew. change: records by name, with a dot as _, other than PyTorch's (None: left out)."""
    content = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(saved(KEY))) as old, zipfile.ZipFile(content, "w", compress) as new:
        for name in old.namelist():
            record = change.get(name.rpartition("/")[2].replace(".", "_"), old.read(name))
            if record is not None:
                new.writestr(name, record)
    return content.getvalue()


KEY = torch.arange(12 * 24, dtype=torch.float32).view(12, 24)
CHUNKS: dict[str, tuple[Callable[[], bytes], str]] = {
    "the old format": (lambda: saved(KEY, _use_new_zipfile_serialization=False), "BadZipFile|has"),
    "a call": (
        lambda: zipped(data_pkl=pickle.dumps(Evil(leave_a_trace, "run-by-a-pickle"), 2)),
        "it names",
    ),
    "another dtype": (
        lambda: saved(torch.zeros(24, 24, dtype=torch.bfloat16)),
        "no tensor of torch.float32, shape .12, 24.",
    ),
    "quantised": (
        lambda: saved(torch.quantize_per_tensor(torch.zeros(12, 96), 0.1, 0, torch.quint8)),
        "it names",
    ),
    "another shape": (lambda: saved(KEY.view(24, 12)), "no tensor"),
    "columns first": (lambda: saved(KEY.view(24, 12).t()), "with its elements in order"),
    "a part of more": (lambda: saved(torch.zeros(13, 24)[1:]), "no tensor"),
    "a list": (lambda: saved([KEY]), "ValueError|AttributeError|TypeError"),
    "compressed": (lambda: zipped(zipfile.ZIP_DEFLATED) + b"\0" * 600, "BadZipFile|no tensor|bytes"),
    "deflated": (lambda: zipped(zipfile.ZIP_DEFLATED, more=b""), "no tensor|bytes"),
    "big-endian": (lambda: zipped(byteorder=b"big"), "big-endian"),
    "no bytes": (lambda: zipped(**{"0": b""}), "bytes|no tensor"),
    "fewer bytes": (lambda: zipped(**{"0": bytes(1148)}), "no tensor"),
    "no record": (lambda: zipped(**{"0": None}) + bytes(1200), "BadZipFile|KeyError"),
    "no pickle": (lambda: zipped(data_pkl=None), "ValueError"),
    "a flipped bit": (lambda: saved(KEY).replace(b"\0\0\x80?", b"\0\0\x81?"), "Bad CRC-32"),
    "a table of contents that is too large": (lambda: zip_of_many(), "BadZipFile|bytes"),
    "no zip": (lambda: os.urandom(2000), "BadZipFile"),
}


def zip_of_many() -> bytes:
    """A zip whose table of contents is said to have 1 KiB, where there are 100 bytes."""
    return bytes(100) + b"PK\5\6" + struct.pack("<HHHHIIH", 0, 0, 9, 9, 1 << 10, 0, 0)


@only("a call", "columns first", "a flipped bit", "big-endian")
@pytest.mark.parametrize("name", CHUNKS)
def test_chunks_that_are_something_else(folder, name, monkeypatch):
    monkeypatch.chdir(folder.parent)
    make, words = CHUNKS[name]
    where = next(
        i for i in pickle.loads((folder / METADATA).read_bytes()).storage_data.items() if i[0].fqn == NAME
    )[1]
    (folder / where.relative_path).write_bytes(content := make())
    change(folder, lambda m: place(m, length=len(content)))
    message = refused(folder)
    assert re.search(words, message), message


@pytest.mark.parametrize("seed", [0, *slow(*range(1, 12))])
def test_damaged_folders(folder, seed):
    """Cut or changed at random: refused by one sentence, or read without harm. A changed weight is always refused."""
    dice, whole = random.Random(seed), {path: path.read_bytes() for path in folder.iterdir()}
    wanted = {name: weight.read() for name, weight in tensors(folder)[0].items()}
    said: list[str] = []
    for _ in range(15 if seed == 0 else 60):
        path = dice.choice([folder / METADATA, folder / METADATA, *folder.glob("*.distcp")])
        content = bytearray(whole[path])
        if dice.random() < 0.3:
            del content[dice.randrange(len(content)) :]
        for _ in range(dice.choice((0, 1, 3, 30)) if content else 0):
            content[dice.randrange(len(content))] = dice.choice(
                (0, 255, ord("R"), ord("("), dice.randrange(256))
            )
        path.write_bytes(content)
        try:
            for name, weight in tensors(folder)[0].items():
                found = weight.read()
                assert path.name == METADATA or torch.equal(found, wanted[name])
        except UserError as error:
            said.append(str(error))
        path.write_bytes(whole[path])
    assert len(said) > 5
    assert not any("\n" in sentence for sentence in said)


def test_every_beginning_of_the_metadata_is_refused(folder):
    content = (folder / METADATA).read_bytes()
    for size in range(0, len(content), 197):
        (folder / METADATA).write_bytes(content[:size])
        with pytest.raises(UserError, match="damaged, or not written by PyTorch"):
            tensors(folder)


def test_weights_that_are_not_supported_are_named(folder, tmp_path):
    model = model_of()
    for dtype in (torch.int8, torch.float8_e4m3fn, torch.complex64):
        titan = of_titan(to_hf(weights_of(model), model), model)
        titan[NAME] = torch.zeros(12, 24).to(dtype)
        path = tmp_path / str(dtype)
        dcp.save(titan, checkpoint_id=path, no_dist=True)
        with pytest.raises(UserError, match=rf"k_proj\.weight has dtype {path.suffix[1:]}; allowed: "):
            import_folder(described(path, model), tmp_path / "run")


def test_other_architectures_and_lacking_names_are_refused(tmp_path):
    model = model_of(arch="qwen3", kv_heads=2)
    run = make_run(tmp_path / "run", model)
    with pytest.raises(UserError, match="DCP is read and written for llama, not for qwen3"):
        export_run(run, tmp_path / "dcp", dcp=True)
    biased = make_run(tmp_path / "biased", model_of(attention_bias=True))
    with pytest.raises(UserError, match=r"torchtitan has no name for model\.layers.0.self_attn.q_proj.bias"):
        export_run(biased, tmp_path / "dcp", dcp=True)
    assert not (tmp_path / "dcp").exists()
