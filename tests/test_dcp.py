"""PyTorch's distributed checkpoints: read without pickle, written so that PyTorch reads them, one weight at a time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import stored
import torch
from ranks import Pool
from titan import loaded, of_titan, renamed, saved

from fivefold.checkpoint import store, write
from fivefold.checkpoint.dcp.read import METADATA, tensors
from fivefold.checkpoint.source import Source, export_run, fingerprint, import_folder
from fivefold.errors import UserError
from fivefold.models.base import build
from fivefold.models.hf import hf_config, to_hf
from fivefold.recipe import ModelSection, Recipe, TrainSection, resolve, to_toml

SMALL = {"layers": 2, "dim": 24, "heads": 4, "kv_heads": 2, "ffn_dim": 40, "seq_len": 16, "vocab_size": 30}


def model_of(**fields) -> ModelSection:
    return resolve(
        Recipe(model=ModelSection(**SMALL | fields), train=TrainSection(steps=1)), vocab_size=30
    ).model


def weights_of(model: ModelSection, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return build(model, device="cpu", seed=3).to(dtype).state_dict()


def described(folder: Path, model: ModelSection) -> Path:
    (folder / "config.json").write_text(json.dumps(hf_config(model)))
    return folder


def make_run(folder: Path, model: ModelSection, dtype: torch.dtype = torch.float32) -> Path:
    folder.mkdir()
    (folder / "recipe.toml").write_text(to_toml(Recipe(model=model, train=TrainSection(steps=1))))
    write.save(store.folder_of(folder, 1), weights_of(model, dtype), None, {"step": 1, "tokens": 64})
    return folder


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        assert torch.equal(a[name], b[name]), name


@pytest.fixture(scope="module")
def pools():
    found = {}
    yield lambda world: found.setdefault(world, Pool(world))
    for pool in found.values():
        pool.close()


@pytest.mark.parametrize(
    ("world", "tp", "more", "fields", "dtype"),
    [
        (1, 1, "", {}, torch.float32),
        (1, 1, "nested", {"tie_embeddings": True}, torch.bfloat16),
        (2, 1, "", {}, torch.float32),
        (2, 2, "flat", {}, torch.float32),
        (4, 2, "nested", {"dim": 20, "head_dim": 6, "vocab_size": 31}, torch.bfloat16),
        (4, 4, "", {"kv_heads": 4}, torch.float32),
    ],
)
@pytest.mark.parametrize("names", ["2025", "2026"])
def test_what_pytorch_writes_is_read_bit_by_bit(tmp_path, pools, world, tp, more, fields, dtype, names):
    """FSDP2 cuts the first dimension, tensor parallelism the first or the second; some ranks have nothing of a weight."""
    model = model_of(**fields)
    ours = weights_of(model, dtype)
    titan = of_titan(to_hf(ours, model), model)
    titan = renamed(titan) if names == "2026" else titan
    if world == 1:
        saved(0, 1, tmp_path / "dcp", titan, tp, more)
    else:
        pools(world).run(saved, tmp_path / "dcp", titan, tp, more)
    import_folder(described(tmp_path / "dcp", model), tmp_path / "run")
    same(stored.load(store.folder_of(tmp_path / "run", 0)).model, ours)
    found, others = tensors(tmp_path / "dcp")
    assert len(found) == len(titan)
    assert ("optimizer" in others) == bool(more)
