"""A model of ours in the folder of Hugging Face's format, read by `transformers`."""

import json
from pathlib import Path

import pytest
from safetensors.torch import save_file
from torch import nn

from fivefold.models.hf import hf_config, to_hf
from fivefold.models.section import ModelSection


def read_by_transformers(ours: nn.Module, model: ModelSection, folder: Path) -> nn.Module:
    """Their module with the weights of ours, none missing and none too many."""
    transformers = pytest.importorskip("transformers")
    config = hf_config(model)
    weights = {name: tensor.contiguous() for name, tensor in to_hf(ours.state_dict(), model).items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    theirs, report = getattr(transformers, config["architectures"][0]).from_pretrained(
        folder, attn_implementation="eager", output_loading_info=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    return theirs.eval()
