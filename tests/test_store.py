"""Checkpoints: what is written comes back, and every damage is one clear error."""

import errno
import json

import pytest
import torch

from fivefold.checkpoint import store, write
from fivefold.errors import UserError


@pytest.fixture
def saved(tmp_path):
    model = {"b": torch.randn(3, 5), "a": torch.randn(4).bfloat16(), "empty": torch.empty(0, 2)}
    moments = {"exp_avg.b": torch.randn(3, 5)}
    folder = store.folder_of(tmp_path, 7)
    write.save_whole(folder, model, moments, {"step": 7, "tokens": 99}, max_shard_bytes=16)
    return folder, model, moments


def test_round_trip(saved):
    folder, model, moments = saved
    assert len(list(folder.glob("model-*"))) == 2, "cut at max_shard_bytes"
    found = store.load(folder)
    assert found.meta == {"step": 7, "tokens": 99}
    assert found.model.keys() == model.keys()
    assert all(torch.equal(found.model[k], v) and found.model[k].dtype == v.dtype for k, v in model.items())
    assert torch.equal(found.optimizer["exp_avg.b"], moments["exp_avg.b"])
    assert store.load(folder, ["model"]).optimizer == {}
    assert [p.name for p in folder.parent.iterdir()] == ["step-00000007"], "no temporary folder is left"


def test_saving_again_replaces(saved):
    folder, model, _ = saved
    write.save_whole(folder, {"b": model["b"] + 1}, None, {"step": 7})
    assert torch.equal(store.load(folder).model["b"], model["b"] + 1)
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
        store.load(folder)
    assert str(path) in str(error.value)


def test_a_disk_that_fails_is_named(saved, monkeypatch):
    """A user error like any damage: ranks that check together tell each other of it."""
    folder, *_ = saved

    def fails(path):
        raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr(store, "sha256", fails)
    with pytest.raises(UserError, match=r"model-.* cannot be read: Input/output error"):
        store.load(folder)


def test_a_tensor_with_a_hole_is_not_read(tmp_path):
    """Two pieces of three: what they hold can be read, the whole cannot."""
    w = torch.arange(12.0).view(6, 2)
    pieces = [write.Piece("w", w[i : i + 2], (6, 2), ((i, i + 2), (0, 2))) for i in (0, 2, 4)]
    folder = write.save(store.folder_of(tmp_path, 1), pieces, [], {})
    assert torch.equal(store.load(folder).model["w"], w)
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["tensors"]["model"]["w"]["pieces"][1]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    reader = store.Reader(folder)
    assert torch.equal(reader.read("model", "w", ((0, 2), (0, 2))), w[:2])
    assert reader.read("model", "w", ((3, 3), (0, 2))).shape == (0, 2)
    for box, says in ((None, "hold 8 of the 12 elements"), (((1, 4), (0, 2)), "hold 2 of the 6 elements")):
        with pytest.raises(UserError, match=rf"manifest\.json: .*model tensor 'w'.* {says}"):
            reader.read("model", "w", box)


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 99, "files": {}, "meta": {}}', '{"format": 1}'])
def test_bad_manifests(saved, text):
    folder, *_ = saved
    (folder / "manifest.json").write_text(text)
    with pytest.raises(UserError, match=r"manifest\.json"):
        store.load(folder)


def test_a_manifest_cannot_name_files_elsewhere(saved):
    folder, *_ = saved
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"] = {"../model.safetensors": {"bytes": 1, "sha256": ""}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="outside its folder"):
        store.load(folder)


def test_a_manifest_that_does_not_list_a_file(saved):
    folder, *_ = saved
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["files"]["model-00000-00001.safetensors"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(
        UserError, match=r"manifest\.json: .*'model-00000-00001\.safetensors'.* not among its files"
    ):
        store.load(folder)


def test_latest_and_prune(tmp_path):
    with pytest.raises(UserError, match="no checkpoint yet"):
        store.latest(tmp_path)
    for step in (5, 20, 100):
        write.save_whole(store.folder_of(tmp_path, step), {"w": torch.ones(1)}, None, {"step": step})
    (tmp_path / "checkpoints" / "step-00000200").mkdir()  # not whole: no manifest
    assert store.latest(tmp_path).name == "step-00000100"
    store.prune(tmp_path, 2)
    assert [p.name for p in store.checkpoints(tmp_path)] == ["step-00000020", "step-00000100"]


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "checkpoints").write_text("a file is in the way")
    with pytest.raises(UserError, match="cannot write the checkpoint"):
        write.save_whole(store.folder_of(tmp_path, 1), {"w": torch.ones(1)}, None, {})
