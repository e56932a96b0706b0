"""`config.json` of Hugging Face `transformers`: the model only. The tables are those of import (`models/*/hf.py`)."""

from __future__ import annotations

from fivefold.files import read_json
from fivefold.models import file_of
from fivefold.models.hf import from_hf_config, hf_config
from fivefold.recipe.hugging_face import fields_of
from fivefold_plan.foreign.reading import Reading

NAME = "Hugging Face"

TOKENS = 1 << 22
"""Tokens of a step: the batch of Llama 2 (arXiv 2307.09288)."""
given = read_json


def derive(reading: Reading) -> None:
    """Reads the model as import does. A key is understood if export would write the same value."""
    config, folder = reading.given, reading.path.parent
    model = from_hf_config({k: v for k, v in config.items() if k != "quantization_config"}, folder)
    written, checked = hf_config(model), file_of(model.arch, "hf").SUPPORTED
    for key, value in config.items():
        if key in checked or value == written.get(key, {}) or (key in written and isinstance(value, dict)):
            reading.understood[key] = "[model]"
        elif key in written and value is not None and not key.endswith(("dtype", "_token_id")):
            reading.lacks(key, f"here it is {written[key]}")
    fields = fields_of(model) | {"dropout": model.dropout}
    batch = TOKENS // fields["seq_len"] or 1
    reading.fields |= {f"model.{name}": value for name, value in fields.items()}
    reading.fields["train.global_batch_size"] = batch
    if (tokenizer := folder / "tokenizer.json").is_file():
        reading.fields["data.tokenizer"] = str(tokenizer.absolute())
    reading.notes.append(
        f"the file is about the model only; {batch:,} sequences of {fields['seq_len']:,} tokens a step, lr 3e-4 (--set "
        "train.global_batch_size, model.seq_len, optim.lr)"
    )
