"""Checkpoints: what is written comes back, and every damage is one clear error."""

import errno
import hashlib
import json
import re
from pathlib import Path

import pytest
import stored
import torch
from pool_runs import mend
from pydantic import ValidationError
from safetensors.torch import load_file, save_file

from fivefold.checkpoint import keep, manifest, store, write
from fivefold.checkpoint.manifest import Damaged
from fivefold.errors import UserError
from fivefold.files.reading import DEEPEST, LONGEST_NUMBER


@pytest.fixture
def saved(tmp_path):
    model = {"b": torch.randn(3, 5), "a": torch.randn(4).bfloat16(), "empty": torch.empty(0, 2)}
    moments = {"exp_avg.b": torch.randn(3, 5)}
    folder = store.folder_of(tmp_path, 7)
    write.save(folder, model, moments, {"step": 7, "tokens": 99}, max_shard_bytes=16)
    return folder, model, moments


def fill(folder, name, value):
    """Puts a number into the first file of a tensor, and mends all hashes."""
    path = next(folder.glob(f"{name}-*"))
    tensors = load_file(path)
    tensors["b" if name == "model" else "exp_avg.b"][1, 2] = value
    save_file(tensors, path)

    def mended(found):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        found["files"][path.name] = {"sha256": digest, "bytes": path.stat().st_size}

    mend(folder, mended)


def test_round_trip(saved):
    folder, model, moments = saved
    assert len(list(folder.glob("model-*"))) == 2, "cut at max_shard_bytes"
    found = stored.load(folder)
    assert found.meta == {"step": 7, "tokens": 99}
    assert found.model.keys() == model.keys()
    assert all(torch.equal(found.model[k], v) and found.model[k].dtype == v.dtype for k, v in model.items())
    assert torch.equal(found.optimizer["exp_avg.b"], moments["exp_avg.b"])
    assert stored.load(folder, ["model"]).optimizer == {}
    assert [p.name for p in folder.parent.iterdir()] == ["step-00000007"], "no temporary folder is left"


def test_saving_again_replaces(saved):
    folder, model, _ = saved
    write.save(folder, {"b": model["b"] + 1}, None, {"step": 7})
    assert torch.equal(stored.load(folder).model["b"], model["b"] + 1)
    assert not list(folder.glob("optimizer-*"))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda p: p.unlink(), "is missing"),
        (lambda p: p.write_bytes(p.read_bytes()[:-1]), "bytes, the manifest says"),
        (lambda p: p.write_bytes(p.read_bytes()[:-1] + b"\xff"), "does not match the hash in the manifest"),
    ],
)
def test_damaged_files_are_named(saved, damage, says):
    folder, *_ = saved
    path = folder / "model-00000-00001.safetensors"
    damage(path)
    with pytest.raises(UserError, match=says) as error:
        stored.load(folder)
    assert str(path) in str(error.value)


def test_a_disk_that_fails_is_named(saved, monkeypatch):
    """A user error like any damage: ranks that check together tell each other of it."""
    folder, *_ = saved

    def fails(path):
        raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr(store, "sha256", fails)
    with pytest.raises(UserError, match=r"model-.* cannot be read: Input/output error"):
        stored.load(folder)


def test_a_tensor_with_a_hole_is_not_read(tmp_path):
    w = torch.arange(12.0).view(6, 2)
    pieces = [write.Piece("w", w[i : i + 2], (6, 2), ((i, i + 2), (0, 2))) for i in (0, 2, 4)]
    folder = write.save(store.folder_of(tmp_path, 1), pieces, [], {"step": 1})
    assert torch.equal(stored.load(folder).model["w"], w)
    reader = store.Reader(folder)
    assert torch.equal(reader.read("model", "w", ((1, 4), (1, 2))), w[1:4, 1:])
    assert reader.read("model", "w", ((3, 3), (0, 2))).shape == (0, 2)
    mend(folder, lambda found: found["tensors"]["model"]["w"]["pieces"].pop(1))
    with pytest.raises(Damaged, match=r"manifest\.json .*model tensor 'w'.* hold 8 of its 12 elements"):
        store.Reader(folder)


def test_latest_and_prune(tmp_path):
    with pytest.raises(UserError, match="no checkpoint yet"):
        store.latest(tmp_path)
    for step in (5, 20, 100):
        write.save(store.folder_of(tmp_path, step), {"w": torch.ones(1)}, None, {"step": step})
    home = tmp_path / "checkpoints"
    for other in ("step-00000200.bak", "step-200", ".step-00000200.writing", "damaged-step-00000200"):
        (home / other).mkdir()
    assert store.latest(tmp_path).name == "step-00000100"
    keep.prune(tmp_path, 1, every=10)
    assert [p.name for p in store.checkpoints(tmp_path)] == ["step-00000020", "step-00000100"]
    assert not (home / ".step-00000200.writing").exists()
    keep.prune(tmp_path, 1)
    assert [p.name for p in store.checkpoints(tmp_path)] == ["step-00000100"]
    assert (home / "step-00000200.bak").exists()
    (home / "step-00000200").mkdir()
    with pytest.raises(
        Damaged, match=r"step-00000200 is not a complete checkpoint: it has no manifest\.json"
    ):
        stored.load(store.latest(tmp_path))


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "checkpoints").write_text("a file is in the way")
    with pytest.raises(UserError, match="cannot write the checkpoint"):
        write.save(store.folder_of(tmp_path, 1), {"w": torch.ones(1)}, None, {})


def test_no_room_on_the_disk(saved, monkeypatch):
    folder, model, _ = saved
    monkeypatch.setattr(write.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1 << 20}))
    with pytest.raises(
        UserError, match=r"it needs \d\.\d MiB and 16 MiB to spare, and the disk has 1 MiB free\. Make room"
    ):
        write.save(folder, model, None, {"step": 7})
    assert stored.load(folder).optimizer, "the one before is as it was"
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]


# Damage


def test_every_bit_of_a_manifest_counts(saved):
    folder, *_ = saved
    path = folder / "manifest.json"
    content = path.read_bytes()
    for bit in range(8 * len(content)):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(UserError):
            manifest.parse(bytes(changed), path)
    assert manifest.parse(content, path).meta == {"step": 7, "tokens": 99}


def swapped(found):
    """`b` and a tensor of the same shape each under the other's key."""
    tensors = found["tensors"]
    one, other = tensors["model"]["b"]["pieces"][0], tensors["optimizer"]["exp_avg.b"]["pieces"][0]
    one["key"], other["key"] = other["key"], one["key"]


def deep(found):
    found["tensors"]["model"]["b"]["shape"] = json.loads("[" * 20 + "]" * 20)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (swapped, "has a piece with the key 'exp_avg.b' instead of 'b'"),
        (lambda m: m["meta"].update(step=-3), "meta.step: Input should be greater than or equal to 0, not -3"),
        (lambda m: m["meta"].update(step=8), "meta.step is 8, but the folder is called step-00000007"),
        (lambda m: m["meta"].pop("step"), "meta.step is missing"),
        (lambda m: m["meta"].update(step=True), "meta.step: Input should be a valid integer"),
        (lambda m: m["meta"].update(tokens=1e9), "meta.tokens: Input should be a valid integer"),
        (lambda m: m.update(format=0), "a hash of its own, and format is 0"),
        (lambda m: m.update(meta=[]), "meta: Input should be a valid dictionary"),
        (lambda m: m["tensors"].pop("optimizer"), "tensors must have the parts"),
        (lambda m: m["tensors"].update(other={}), "tensors must have the parts"),
        (lambda m: m["tensors"]["model"]["b"].update(dtype="F8"), "b.dtype: Input should be 'F64'"),
        (lambda m: m["tensors"]["model"]["b"].update(dtype="F16"), "is of torch.float32, shape"),
        (lambda m: m["tensors"]["model"]["b"].update(shape=[5, 3]), "has a piece at"),
        (lambda m: m["tensors"]["model"]["b"]["pieces"].append(m["tensors"]["model"]["b"]["pieces"][0]), "hold 30 of"),
        (lambda m: m["tensors"]["model"].pop("b"), "does not have the tensors that the manifest names: 'b'"),
        (lambda m: m["files"]["model-00000-00001.safetensors"].update(bytes=-1), "should be greater than"),
        (lambda m: m["files"]["model-00000-00001.safetensors"].update(sha256="x"), "should match pattern"),
        (lambda m: m["files"].update({"../m.safetensors": {"bytes": 1, "sha256": "0" * 64}}), "outside its folder"),
        (lambda m: m["files"].pop("model-00000-00001.safetensors"), "which is not among its files"),
        (deep, "shape.0: Input should be a valid integer"),
    ],
)  # fmt: skip
def test_a_manifest_with_a_mended_hash_is_checked_too(saved, change, says):
    folder, *_ = saved
    mend(folder, change)
    with pytest.raises(Damaged, match=re.escape(says)):
        stored.load(folder)


def test_a_hostile_list_is_read_to_its_first_error():
    """Collecting all errors of a few megabytes takes minutes and gigabytes."""
    file = {"shape": [0], "dtype": "F32", "pieces": [0] * 1000}
    for entry in (
        file,
        file | {"pieces": [{"file": "a", "key": "a", "box": [0] * 1000}]},
        file | {"shape": ["x"] * 9, "pieces": []},
    ):
        with pytest.raises(ValidationError) as caught:
            manifest._ENTRY.validate_python(entry)
        assert caught.value.error_count() == 1


NO_MANIFESTS = [
    b"[" * (DEEPEST + 1),
    b'{"format": ' + b"9" * (LONGEST_NUMBER + 1) + b"}",
    b"\xff",
    b"",
    b"null",
    b"{",
    b"[]",
    b'{"format": 0}',
]


def test_what_is_no_manifest_is_one_clear_error(saved):
    folder, *_ = saved
    for text in NO_MANIFESTS:
        (folder / "manifest.json").write_bytes(text)
        with pytest.raises(Damaged, match=r"manifest\.json is damaged"):
            stored.load(folder)
    (folder / "manifest.json").write_bytes(b'{"format": 99, "files": {}, "meta": {}}')
    with pytest.raises(UserError, match=r"manifest\.json is of format 99, and this version reads 4"):
        stored.load(folder)


def test_a_part_is_read_from_the_pieces_that_it_meets(tmp_path):
    """Pieces that share rows or columns with it, but no element, are not opened."""
    whole, halves = torch.arange(16.0).view(4, 4), ((0, 2), (2, 4))
    pieces = [
        write.Piece("w", whole[slice(*rows), slice(*columns)], (4, 4), (rows, columns))
        for rows in halves
        for columns in halves
    ]
    folder = write.save(store.folder_of(tmp_path, 1), pieces, [], {"step": 1})
    reader = store.Reader(folder)
    assert [common for _, common in reader._pieces("model", "w", ((1, 2), (0, 4)))] == [
        ((1, 2), (0, 2)),
        ((1, 2), (2, 4)),
    ]


def test_pieces_may_not_overlap(tmp_path):
    """Two rows twice and two never: as many elements as the tensor has."""
    boxes = [((0, 2), (0, 2)), ((2, 4), (0, 1)), ((2, 4), (1, 2)), ((4, 6), (0, 2))]
    pieces = [write.Piece("w", torch.zeros([b - a for a, b in box]), (6, 2), box) for box in boxes]
    folder = write.save(store.folder_of(tmp_path, 1), pieces, [], {"step": 1})

    def overlap(found):
        piece = found["tensors"]["model"]["w"]["pieces"][3]
        piece["box"], piece["key"] = [[1, 3], [0, 2]], "w[1:3,0:2]"

    mend(folder, overlap)
    with pytest.raises(Damaged, match=r"'w', .* has pieces that overlap"):
        store.Reader(folder)


@pytest.mark.parametrize("kind", ["model", "optimizer"])
@pytest.mark.parametrize(
    ("value", "says"),
    [(float("nan"), "not finite"), (float("-inf"), "not finite"), (1e38, r"holds 1.0e\+38")],
)
def test_numbers_that_no_state_has_are_refused(saved, kind, value, says):
    """Where hashes are mended, and by whoever would write them."""
    folder, model, moments = saved
    fill(folder, kind, value)
    with pytest.raises(Damaged, match=rf"{kind}-00000-00001\.safetensors is damaged: '.*b' .*{says}"):
        stored.load(folder)
    (model["b"] if kind == "model" else moments["exp_avg.b"])[0, 0] = value
    with pytest.raises(UserError, match=rf"cannot write the checkpoint .* '.*b' .*{says}"):
        write.save(folder, model, moments, {"step": 7})
    assert not list(folder.parent.glob(".*")), "nothing incomplete is left"


HEADERS = [
    b"\xff" * 8,
    (1000).to_bytes(8, "little"),
    b"{}",
    b"[]" + b" " * 6,
    b"[" * (DEEPEST + 1),
    b'{"b": 1}',
    b'{"b": {"dtype": "F32", "shape": [-3, -5], "data_offsets": [0, 60]}}',
    b'{"b": {"dtype": "F32", "shape": [3, 5], "data_offsets": [0, 6000]}}',
    b'{"b": {"dtype": "PICKLE", "shape": [3, 5], "data_offsets": [0, 60]}}',
    b'{"b": {"dtype": "F32", "shape": "3", "data_offsets": {}}}',
]


@pytest.mark.parametrize("header", HEADERS)
def test_a_damaged_header_is_one_clear_error(saved, header):
    folder, *_ = saved
    path = folder / "model-00000-00001.safetensors"
    path.write_bytes(header if len(header) == 8 else len(header).to_bytes(8, "little") + header + bytes(60))

    def mended(found):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        found["files"][path.name] = {"sha256": digest, "bytes": path.stat().st_size}

    mend(folder, mended)
    with pytest.raises(Damaged, match=r"model-00000-00001\.safetensors is damaged"):
        stored.load(folder)


def test_what_cannot_be_read_is_not_absent(saved, monkeypatch):
    folder, *_ = saved
    run = folder.parent.parent

    def forbidden(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "iterdir", forbidden)
        with pytest.raises(UserError, match="the checkpoints cannot be read: Permission denied"):
            store.checkpoints(run)
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "open_file", forbidden)
        with pytest.raises(UserError, match=r"manifest\.json cannot be read: Permission denied") as error:
            stored.load(folder)
        assert not isinstance(error.value, Damaged)


# Copies


def test_copies_are_checked(saved, tmp_path):
    folder, model, _ = saved
    out = keep.copy(folder, tmp_path / "backup")
    assert torch.equal(stored.load(out).model["b"], model["b"])
    with pytest.raises(UserError, match="exists already"):
        keep.copy(folder, tmp_path / "backup")
    assert keep.verify(folder) == ""
    path = next(folder.glob("optimizer-*"))
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    assert "does not match the hash" in keep.verify(folder)
    with pytest.raises(Damaged):
        keep.copy(folder, tmp_path / "other")
    assert list((tmp_path / "other").iterdir()) == []
