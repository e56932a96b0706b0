"""PyTorch's distributed checkpoints: read without pickle, written so that PyTorch reads them, one weight at a time."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import stored
import torch
from marks import only
from ranks import Pool
from test_out_of_memory import group_of
from titan import loaded, of_titan, renamed, saved
from typer.testing import CliRunner

from fivefold.checkpoint import store, write
from fivefold.checkpoint.dcp.read import METADATA, tensors
from fivefold.checkpoint.source import Source, export_run, fingerprint, import_folder
from fivefold.cli.main import app
from fivefold.models.base import build
from fivefold.models.hf import hf_config, to_hf
from fivefold.recipe import ModelSection, Recipe, TrainSection, resolve, to_toml

SMALL: dict[str, Any] = {
    "layers": 2,
    "dim": 24,
    "heads": 4,
    "kv_heads": 2,
    "ffn_dim": 40,
    "seq_len": 16,
    "vocab_size": 30,
}


def model_of(**fields: Any) -> ModelSection:
    section = ModelSection(**SMALL | fields)
    return resolve(Recipe(model=section, train=TrainSection(steps=1)), vocab_size=section.vocab_size).model


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


@only("2025-1-1-nested-*", "2026-1-1--*")
@pytest.mark.parametrize(
    ("world", "tp", "more", "fields", "dtype"),
    [
        (1, 1, "", {}, torch.float32),
        (1, 1, "nested", {"tie_embeddings": True}, torch.bfloat16),
        (2, 1, "", {}, torch.float32),
        (2, 2, "flat", {}, torch.float32),
        (4, 2, "nested", {"dim": 20, "head_dim": 6, "vocab_size": 31}, torch.bfloat16),
        (4, 4, "", {"kv_heads": 4}, torch.float32),
        (4, 1, "flat", {"vocab_size": 9}, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("names", ["2025", "2026"])
def test_what_pytorch_writes_is_read_bit_by_bit(tmp_path, pools, world, tp, more, fields, dtype, names):
    """FSDP2 cuts the first dim, tensor parallelism the first or the second; some ranks have nothing of a weight."""
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
    cut = {
        sum(b - a < n for (a, b), n in zip(c[0], t.shape, strict=True))
        for t in found.values()
        for c in t.chunks
    }
    assert (2 in cut) == (1 < tp < world)  # both dimensions of one matrix
    columns = [
        c for t in found.values() for c in t.chunks if len(t.shape) == 2 and c[0][1] != (0, t.shape[1])
    ]
    assert bool(columns) == (tp > 1)
    listed = pickle.loads((tmp_path / "dcp" / METADATA).read_bytes()).state_dict_metadata
    empty = [c for about in listed.values() for c in getattr(about, "chunks", ()) if 0 in c.sizes]
    assert bool(empty) == (model.vocab_size == 9)  # 3, 3, 3 and no row
    assert ("optimizer" in others) == bool(more)


@only("2025-fields0", "2026-fields1")
@pytest.mark.parametrize("fields", [{}, {"tie_embeddings": True, "head_dim": 10}])
@pytest.mark.parametrize("names", ["2025", "2026"])
def test_what_is_written_is_loaded_by_pytorch_bit_by_bit(tmp_path, fields, names):
    model = model_of(**fields)
    run = make_run(tmp_path / "run", model, torch.bfloat16)
    export_run(run, tmp_path / "dcp", dcp=True)
    titan = of_titan(to_hf(weights_of(model, torch.bfloat16), model), model)
    titan = renamed(titan) if names == "2026" else titan
    same(loaded(tmp_path / "dcp", titan), titan)
    assert str(tmp_path).encode() not in (tmp_path / "dcp" / METADATA).read_bytes()


def test_export_and_import_give_the_same_bytes(tmp_path):
    model = model_of(tie_embeddings=True)
    run = make_run(tmp_path / "run", model)
    export_run(run, tmp_path / "first", dcp=True)
    again = import_folder(tmp_path / "first", tmp_path / "again")
    same(stored.load(store.latest(again)).model, weights_of(model))
    assert (
        (again / "recipe.toml").read_text().startswith("# Weights imported from a DCP checkpoint of a llama.")
    )
    export_run(again, tmp_path / "second", dcp=True)
    names = sorted(path.name for path in (tmp_path / "first").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "second").iterdir())
    for name in names:
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes(), name


def test_a_run_starts_from_such_a_folder(tmp_path):
    model = model_of()
    export_run(make_run(tmp_path / "run", model), tmp_path / "dcp", dcp=True)
    source, ours = Source(tmp_path / "dcp", None), weights_of(model)
    same({name: source.read(name) for name in source.names()}, ours)
    name = "blocks.1.attention.qkv.weight"
    assert torch.equal(source.read(name, ((3, 9), (0, 5))), ours[name][3:9, :5])
    before = fingerprint(tmp_path / "dcp", None)
    path = next(path for path in sorted((tmp_path / "dcp").glob("*.distcp")))
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    assert fingerprint(tmp_path / "dcp", None) != before


def test_order_of_rows_rotates_the_same_pairs(tmp_path):
    """Scores of rotated heads: torchtitan multiplies neighbours as one complex number, Hugging Face turns halves."""
    model, T = model_of(), 5
    theirs = to_hf(weights_of(model), model)
    titan, d = of_titan(theirs, model), model.head_width
    x = torch.randn(T, model.dim, generator=torch.Generator().manual_seed(1))
    angles = torch.outer(torch.arange(T), 10000.0 ** -(torch.arange(0, d, 2) / d))
    turns = torch.polar(torch.ones_like(angles), angles)[:, None]

    def pairs(weight: torch.Tensor) -> torch.Tensor:
        rows = (x @ weight.t()).view(T, -1, d // 2, 2)
        return torch.view_as_real(torch.view_as_complex(rows) * turns).flatten(2)

    def halves(weight: torch.Tensor) -> torch.Tensor:
        rows = (x @ weight.t()).view(T, -1, d)
        cos, sin = (torch.cat([f(angles), f(angles)], 1)[:, None] for f in (torch.cos, torch.sin))
        return rows * cos + torch.cat([-rows[..., d // 2 :], rows[..., : d // 2]], -1) * sin

    scores = []
    for q, k, turned in [
        ("layers.0.attention.wq.weight", "layers.0.attention.wk.weight", pairs),
        ("model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight", halves),
    ]:
        weights = titan if turned is pairs else theirs
        queries, keys = turned(weights[q]).unflatten(1, (2, 2)), turned(weights[k])
        scores.append(torch.einsum("tghd,sgd->ghts", queries, keys))
    torch.testing.assert_close(*scores)


def test_the_command_says_what_it_leaves_out(tmp_path):
    model = model_of()
    saved(0, 1, tmp_path / "dcp", of_titan(to_hf(weights_of(model), model), model), 1, "flat")
    command = ["import", str(tmp_path / "dcp"), "--out", str(tmp_path / "run")]
    assert "Put the model's beside the DCP checkpoint" in str(CliRunner().invoke(app, command).exception)
    described(tmp_path / "dcp", model)
    found = CliRunner().invoke(app, command)
    assert found.exit_code == 0
    assert "left out: 1 of dataloader, 1 of lr_scheduler, 22 of optimizer, 1 of train_state" in sorted_words(
        found.output
    )


def sorted_words(text: str) -> str:
    line = next(line for line in text.splitlines() if line.startswith("left out: "))
    parts = line.removeprefix("left out: ").split(", ")
    return "left out: " + ", ".join(sorted(parts, key=lambda part: part.split()[-1]))


@pytest.mark.slow
def test_a_model_larger_than_the_memory_goes_through(tmp_path):
    """In a control group of less memory than the weights take. Without one, what is measured has to suffice."""
    group, layers = group_of(400 << 20), 40

    def enter() -> None:
        if group is not None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

    try:
        done = subprocess.run(
            [sys.executable, str(Path(__file__).parent / "dcp_memory.py"), str(tmp_path), str(layers)],
            capture_output=True, text=True, check=False, preexec_fn=enter, timeout=300,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
    finally:
        if group is not None:
            group.rmdir()
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found.pop("weights") > 600 << 20
    largest = found.pop("largest")
    assert max(found.values()) < 5 * largest, found
