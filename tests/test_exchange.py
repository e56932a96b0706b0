"""What other libraries write is read, or named with the way out; and what `check` knows without data."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from test_cli import run as command
from test_hf import make_run

from fivefold.checkpoint import source
from fivefold.checkpoint.source import export_run, import_folder
from fivefold.data.sources import find
from fivefold.errors import UserError
from fivefold.train.generate import open_run

LITDATA = {
    "chunks": [{"filename": "chunk-0-0.bin", "dim": 500}],
    "config": {"data_format": ["no_header_tensor:16"]},
}
MDS = {"version": 2, "shards": [{"format": "mds", "raw_data": {"basename": "shard.00000.mds"}}]}
MDS_JSON = {"version": 2, "shards": [{"format": "json", "raw_data": {"basename": "shard.00000.json"}}]}
FOLDERS: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "litdata": ("index.json", LITDATA, "chunk-0-0.bin", "of litdata, .*tokens:FILE"),
    "mds": ("index.json", MDS, "shard.00000.mds", "mosaicml-streaming"),
    "mds of JSON": ("index.json", MDS_JSON, "shard.00000.json", r"mosaicml-streaming.*shard\.\*\.json"),
    "save_to_disk": (
        "state.json",
        {"_data_files": [{"filename": "data-0.arrow"}]},
        "dataset_info.json",
        "to_parquet",
    ),
    "splits": ("dataset_dict.json", {"splits": ["train"]}, "readme.txt", "one split at a time"),
}


@pytest.mark.parametrize("kind", FOLDERS)
@pytest.mark.parametrize("spec", ["{}", "tokens:{}", "hf:{}", "tokens:{}/*.bin", "{}/.."])
def test_folders_of_other_libraries_are_named(
    kind: str, spec: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = tmp_path / "in" / "D"
    folder.mkdir(parents=True)
    name, index, part, words = FOLDERS[kind]
    (folder / name).write_text(json.dumps(index))
    (folder / part).write_bytes(b"{}" * 100)
    if spec.startswith("tokens:"):
        (folder / "a.bin").write_bytes(bytes(64))
    with pytest.raises(UserError, match=words):
        find(spec.format(folder))
    if spec == "{}":
        assert command("check", "quickstart", "--set", f"data.source={folder}") == 2
        assert str(folder) in capsys.readouterr().err


def test_a_folder_without_token_files_says_what_it_holds(tmp_path: Path):
    with pytest.raises(UserError, match=r"no token file \(\.bin.*; .* holds no file"):
        find(f"tokens:{tmp_path}")
    (tmp_path / "shard.00000.mds").write_bytes(b"{}")
    with pytest.raises(UserError, match=r"no token file \(\.bin.*; .* holds \.mds"):
        find(f"tokens:{tmp_path}")
    (tmp_path / "index.json").write_text(json.dumps(MDS))
    with pytest.raises(UserError, match="of mosaicml-streaming"):
        find(f"tokens:{tmp_path}")


def test_a_full_disk_names_the_folder_of_the_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ran, _ = make_run(tmp_path / "run", "llama", tie_embeddings=True)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(source, "_write_weights", full)
    with pytest.raises(OSError, match="No space left") as caught:
        export_run(ran, tmp_path / "hf")
    assert caught.value.filename == str(tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize(
    "index",
    [
        '[{"text": "a"}]',
        '{"shards": 5}',
        '{"shards": [1]}',
        '{"chunks": [], "config": 5}',
        '{"splits": null}',
    ],
)
def test_an_index_of_ones_own_is_a_text(tmp_path: Path, index: str):
    (tmp_path / "index.json").write_text(index)
    assert len(find(str(tmp_path)).files) == 1


def test_raw_ids_with_the_wrong_name(tmp_path: Path):
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "raw.npy")
    assert command("check", "quickstart", "--set", f"data.source=tokens:{tmp_path / 'raw.npy'}") == 2
    from fivefold.data.kinds.token_files import Npy

    with pytest.raises(UserError, match=r"without numpy's header\. Raw ids.*named \.bin"):
        Npy().shard(tmp_path / "raw.npy", "uint16")


def test_a_tied_tensor_that_is_stored_once(tmp_path: Path):
    """As safetensors' save_model writes it: under the name that sorts last, the other one in the metadata."""
    ran, _ = make_run(tmp_path / "run", "llama", tie_embeddings=True)
    export_run(ran, tmp_path / "hf")
    from safetensors.torch import load_file

    weights = load_file(tmp_path / "hf" / "model.safetensors")
    one, other = "model.embed_tokens.weight", "lm_head.weight"
    weights[other] = weights.pop(one) if one in weights else weights[other]
    save_file(weights, tmp_path / "hf" / "model.safetensors", metadata={one: other})
    again = open_run(import_folder(tmp_path / "hf", tmp_path / "again"))[0].state_dict()
    for name, tensor in open_run(ran)[0].state_dict().items():
        torch.testing.assert_close(again[name], tensor, atol=0, rtol=0)


@pytest.mark.parametrize(
    ("sets", "code", "words"),
    [
        (["data.tokenizer=gpt2"], 0, "data.tokenizer = 'gpt2': no such file"),
        (
            ["data.tokenizer=bytes", "model.vocab_size=100"],
            2,
            "model.vocab_size = 100 is smaller than the vocabulary",
        ),
        (["data.tokenizer=bpe:4096", "model.vocab_size=100"], 2, "model.vocab_size = 100 is smaller"),
        (["data.tokenizer=chars", "model.vocab_size=100"], 0, ""),
        (["data.source=tokens:x.bin", "data.tokenizer=gpt2", "model.vocab_size=100"], 0, ""),
    ],
)
def test_check_without_data_says_what_it_knows(
    sets: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
):
    assert command("check", "quickstart", "--no-data", *(f"--set={one}" for one in sets)) == code
    said = capsys.readouterr()
    assert words in said.out + said.err
    assert words or "data.tokenizer" not in said.out + said.err
