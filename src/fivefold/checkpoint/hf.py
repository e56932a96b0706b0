"""Exports runs as Hugging Face folders and imports them. Only safetensors and JSON are read, never pickle."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from fivefold.checkpoint import store, write
from fivefold.checkpoint.source import read_config, read_weights, tokenizer_of, weights_of
from fivefold.data.chat import TEMPLATE_FILE, ChatTemplate, beside
from fivefold.data.tokenizer import KNOWN_MASKS, NoSuchToken, Tokenizer, load_tokenizer
from fivefold.data.tokenizer import MOST_BYTES as MOST_TOKENIZER
from fivefold.errors import UserError
from fivefold.files import MOST_JSON, flush_all, guard, make_folder, own_word, read_bytes, remove, rename
from fivefold.files import write as write_file
from fivefold.models.card import card_of
from fivefold.models.hf import INDEX, WEIGHTS, from_hf, from_hf_config, hf_config, to_hf
from fivefold.precision import torch_dtype
from fivefold.recipe import DataSection, Recipe, TrainSection, load, to_toml

MAX_SHARD_BYTES = 5_000_000_000  # the limit that transformers uses
TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    TEMPLATE_FILE,
)


def export_run(
    run: Path,
    out: Path,
    *,
    checkpoint: Path | None = None,
    weights: Mapping[str, Tensor] | None = None,
    dtype: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Path:
    """Writes a run's weights as a folder that `transformers` loads: config.json, generation_config.json,
    model.safetensors (several and an index beyond `max_shard_bytes`), and the tokenizer if the run has one.

    Args:
        checkpoint: folder of the checkpoint; None: the run's latest.
        weights: by name, to be written instead, such as merged ones.
        dtype: "fp32" or "bf16" to convert to; None: as stored.

    Raises:
        UserError: the run has no checkpoint, or `out` exists and is not empty.
    """
    guard(run)
    recipe = load(run / "recipe.toml")
    checkpoint = checkpoint or store.latest(run)
    state = dict(weights) if weights is not None else weights_of(checkpoint)
    if dtype is not None:
        state = {
            name: tensor if name in card_of(recipe.model).buffers else tensor.to(torch_dtype(dtype))
            for name, tensor in state.items()
        }
    theirs = to_hf(state, recipe.model)
    tokenizer = None
    with suppress(NoSuchToken):  # without an end token it is exported as it is
        tokenizer = tokenizer_of(run, checkpoint)
    with _new_folder(out) as folder:
        token_ids = _write_text_files(run, folder, recipe, tokenizer)
        config = hf_config(recipe.model, next(iter(theirs.values())).dtype)
        _write_json(folder / "config.json", config | token_ids)
        _write_weights(folder, theirs, max_shard_bytes)
    return out


def import_folder(source: Path, out: Path) -> Path:
    """Makes a run folder (recipe.toml, a checkpoint of step 0, the tokenizer) of a Hugging Face folder.

    The weights keep their dtypes, so that an export of the new run holds the same bytes. Data and length of the
    training are a recipe's defaults. Change them in recipe.toml or with `--set`: fields that follow from others, such
    as the steps of warm-up, are not set.

    Raises:
        UserError: Fivefold cannot compute the model exactly. The message names the keys, weights or files.
    """
    guard(source)
    config = read_config(source / "config.json")
    model = from_hf_config(config, source)
    state = from_hf(read_weights(source), model)
    assert model.vocab_size is not None
    if has_tokenizer := (source / "tokenizer.json").is_file():
        with suppress(NoSuchToken):  # an end token can be named later
            load_tokenizer(source / "tokenizer.json")
    data = DataSection(tokenizer=str((out / "tokenizer.json").absolute()) if has_tokenizer else "bytes")
    recipe = Recipe(
        model=model, data=data, train=TrainSection(steps=1000)
    )  # what follows from others stays open
    with _new_folder(out) as folder:
        text = to_toml(recipe, f"Weights imported from a Hugging Face {config['model_type']}.")
        write_file(folder / "recipe.toml", text)
        _copy_text_files(source, folder)
        write.save_whole(store.folder_of(folder, 0), state, None, {"step": 0, "tokens": 0})
    return out


def _write_weights(folder: Path, weights: Mapping[str, Tensor], max_shard_bytes: int) -> None:
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in weights.items():
        if shards[-1] and size + tensor.nbytes > max_shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    if len(shards) == 1:
        save_file(shards[0], folder / WEIGHTS, metadata={"format": "pt"})
        return
    files = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    for file, shard in zip(files, shards, strict=True):
        save_file(shard, folder / file, metadata={"format": "pt"})
    weight_map = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
    total = sum(tensor.nbytes for tensor in weights.values())
    _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _write_text_files(run: Path, folder: Path, recipe: Recipe, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Writes the tokenizer and generation_config.json. Returns the special token ids for config.json.

    Files of an imported run are copied. Missing ones are made from the run's tokenizer.
    """
    _copy_text_files(run, folder)
    tokens = _special_tokens(tokenizer) if tokenizer is not None else {}
    if tokens and not (folder / "tokenizer_config.json").exists():
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": recipe.model.seq_len}
        names = {f"{role}_token": token for role, (token, _) in tokens.items()}
        _write_json(
            folder / "tokenizer_config.json", {**settings, **names, "clean_up_tokenization_spaces": False}
        )
    if not (folder / "generation_config.json").exists():
        ids: dict[str, Any] = {
            f"{role}_token_id": tokens[role][1] if role in tokens else None for role in ("bos", "eos")
        }
        if tokenizer is not None and (template := beside(run)):
            ends = sorted(ChatTemplate(template, tokenizer).end_ids)
            ids["eos_token_id"] = ends if len(ends) > 1 else ends[0]
        _write_json(folder / "generation_config.json", ids)
    generation = read_config(folder / "generation_config.json")
    return {key: generation.get(key) for key in ("bos_token_id", "eos_token_id")}


def _copy_text_files(source: Path, folder: Path) -> None:
    """Raises UserError: one is too large."""
    for name in TEXT_FILES:
        if (source / name).is_file():
            most = MOST_TOKENIZER if name == "tokenizer.json" else MOST_JSON
            write_file(folder / name, read_bytes(source / name, most))


def _special_tokens(tokenizer: Tokenizer) -> dict[str, tuple[str, int]]:
    """Role -> (text, id) of the end token (documents also begin after it) and of BERT's mask token."""
    added = {entry["id"]: entry["content"] for entry in json.loads(tokenizer.to_json())["added_tokens"]}
    end = (added[tokenizer.end_id], tokenizer.end_id)
    mask = [(text, i) for i, text in added.items() if text in KNOWN_MASKS]
    return {"bos": end, "eos": end} | ({"mask": mask[0]} if mask else {})


@contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    """A temporary folder beside `out`. It is renamed to `out` at the end, and removed if something fails.

    If `out` is an empty folder, its content moves there instead.
    """
    out = out.absolute()  # "." has no name
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is not an empty folder; name a new one")
    make_folder(out.parent)
    temporary = out.parent / f".{out.name}.{own_word()}"
    make_folder(temporary)
    try:
        yield temporary
        flush_all(temporary)
        if not out.exists():
            rename(temporary, out)
            return
        for item in list(temporary.iterdir()):
            rename(item, out / item.name)
    finally:
        remove(temporary)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_file(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
