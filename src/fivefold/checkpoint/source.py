"""Weights to start from: a checkpoint or a Hugging Face folder, read part by part. Checkpoints may leave frozen weights
to such a source (`checkpoint.frozen = false`). Runs as Hugging Face folders, and such folders as runs. Only safetensors
and JSON are read, and DCP folders by a reader of their own, never by pickle."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from fivefold import files
from fivefold.checkpoint import store, write
from fivefold.checkpoint.dcp.read import METADATA, tensors
from fivefold.checkpoint.dcp.titan import from_titan, to_titan
from fivefold.checkpoint.manifest import MANIFEST, Box, Damaged
from fivefold.data.chat import TEMPLATE_FILE, ChatTemplate, beside
from fivefold.data.tokenizer import KNOWN_MASKS, NoSuchToken, Tokenizer, load_tokenizer
from fivefold.data.tokenizer import MOST_BYTES as MOST_TOKENIZER
from fivefold.errors import UserError
from fivefold.models.card import card_of
from fivefold.models.hf import INDEX, WEIGHTS, for_hf, from_hf_config, hf_config, made_from_hf
from fivefold.models.section import ModelSection
from fivefold.models.weights import Weight, held
from fivefold.recipe import DataSection, Recipe, TrainSection, load, to_toml
from fivefold.recipe.load import hf_model
from fivefold.sharding.parts import Shape

FROZEN = "frozen"
"""A key of a checkpoint's meta: true if it has frozen weights, in the dtype in which they compute."""
ELSEWHERE = "weights_elsewhere"
"""The key of a checkpoint's meta: where its frozen weights are (`Elsewhere`)."""
TOKENIZER = "the tokenizer's fingerprint"
"""The key of a checkpoint's meta: which tokenizer.json the run folder has. Imported runs have none."""


class Source:
    """Weights by name. folder: of the run, or a Hugging Face folder. checkpoint: of the run; None for Hugging Face's.

    Files of a Hugging Face folder are mapped into memory, and fused matrices are put together one at a time.
    """

    def __init__(self, folder: Path, checkpoint: Path | None):
        """Raises UserError: a checkpoint's manifest is damaged, or the weights are not those of config.json."""
        self.folder, self.checkpoint = folder, checkpoint
        self.reader = store.Reader(checkpoint) if checkpoint is not None else None
        if self.reader is None:
            model = ModelSection(**hf_model(folder))
            self._made = made_from_hf(read_weights(folder, model), model)

    def names(self) -> list[str]:
        return self.reader.names("model") if self.reader else list(self._made)

    def shape(self, name: str) -> Shape:
        return self.reader.shape("model", name) if self.reader else self._made[name].shape

    def weight(self, name: str) -> Weight:
        """A weight that is read when it is needed."""
        shape = self.shape(name)
        dtype = self.reader.dtype("model", name) if self.reader else self._made[name].dtype

        def read(rows: tuple[int, int] | None = None) -> Tensor:
            return self.read(name, rows and (rows, *store.all_of(shape[1:])))

        return Weight(shape, dtype, read)

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """The elements of a weight in a box (None: all). Raises UserError: they are damaged, or not finite."""
        if self.reader:
            return self.reader.read("model", name, box)
        tensor = self._made[name].read(box[0] if box else None)
        if box is not None:
            tensor = tensor[(slice(None), *(slice(*span) for span in box[1:]))]
        if why := store.odd_numbers(tensor):
            raise UserError(f"{self.folder}: weight {name} {why}")
        return tensor


def fingerprint(folder: Path, checkpoint: Path | None) -> str:
    """A hash of all weights. A manifest has the hash of each file of its checkpoint. Of a Hugging Face folder
    config.json and all bytes of the weights count."""
    if checkpoint is not None:
        return store.sha256(checkpoint / MANIFEST)
    digest = hashlib.sha256()
    for file in ["config.json", *weight_files(folder)]:
        digest.update(store.sha256(folder / file).encode())
    return digest.hexdigest()


@dataclass(frozen=True)
class Elsewhere:
    """The weights that a checkpoint leaves to a source. names: {a parameter's name: its name there}."""

    where: str
    checkpoint: str
    fingerprint: str
    names: Mapping[str, str]

    @classmethod
    def of(cls, checkpoint: Path, meta: Mapping[str, Any]) -> Elsewhere | None:
        """None: the checkpoint has all its weights. Raises Damaged: the entry is none."""
        if meta.get(ELSEWHERE) is None:
            return None
        try:
            return TypeAdapter(cls).validate_python(meta[ELSEWHERE])
        except ValidationError:
            path = checkpoint / MANIFEST
            raise Damaged(f"{path} is damaged: {ELSEWHERE} must say where weights are") from None

    def open(self) -> Source:
        """Whoever wrote the checkpoint has chosen the folder, so nothing there is used before its hash is right. Raises
        UserError: the source is gone, or has other weights."""
        folder, checkpoint = Path(self.where), Path(self.checkpoint) if self.checkpoint else None
        here = checkpoint or folder
        if not here.is_dir():
            raise UserError(
                f"{here} is gone: the frozen weights of this run are there (checkpoint.frozen = false). Put it back"
            )
        files.guard(folder, look=False)
        try:
            found = fingerprint(folder, checkpoint)
        except OSError as error:
            raise UserError(f"{here}: cannot be read: {error.strerror}") from None
        if found != self.fingerprint:
            raise UserError(
                f"{here} has other weights than those that this run's frozen weights were. Put it back"
            )
        source = Source(folder, checkpoint)
        if unknown := sorted(set(self.names.values()) - set(source.names())):
            raise UserError(f"{here} has no weight {unknown[0]!r:.120}, which the checkpoint names")
        return source


def tokenizer_of(run: Path, checkpoint: Path) -> Tokenizer | None:
    """The tokenizer in a run folder; None: the run has none. Raises UserError: it is damaged, not that of the
    checkpoint, or has no end token (NoSuchToken)."""
    path, said = run / "tokenizer.json", store.Reader(checkpoint).meta.get(TOKENIZER)
    if not path.is_file() and said is None:
        return None
    if not path.is_file():
        raise UserError(f"{path} is missing: the run was trained with a tokenizer. Restore the file")
    found = load_tokenizer(path)
    if said is None:
        return found.imported(_ends(run / GENERATION))
    if said != found.fingerprint:
        raise UserError(f"{path} has other tokens than those of {checkpoint}. Restore the file")
    return found


def _ends(generation: Path) -> list[int]:
    """The ids that end a text, by a generation_config.json."""
    ids = read_config(generation).get("eos_token_id") if generation.is_file() else None
    return [i for i in (ids if isinstance(ids, list) else [ids]) if isinstance(i, int)]


def weights_of(checkpoint: Path) -> dict[str, Tensor]:
    """All weights of a checkpoint, also those that it leaves to a source, in one dtype where some are frozen: the
    widest of any. Raises UserError: a file is damaged or missing."""
    return {name: weight.read() for name, weight in unread_weights(checkpoint).items()}


def unread_weights(checkpoint: Path) -> dict[str, Weight]:
    """The same, each read when it is needed."""
    source = Source(checkpoint, checkpoint)
    reader = source.reader
    assert reader is not None
    reader.check(*(file for file in reader.files if file.startswith("model")), threads=store.threads())
    found = {name: source.weight(name) for name in source.names()}
    left = Elsewhere.of(checkpoint, reader.meta)
    if left is not None:
        source = left.open()
        if source.reader is not None:
            source.reader.check(*source.reader.files)
        found |= {name: source.weight(there) for name, there in left.names.items()}
    real = {w.dtype for w in found.values() if w.dtype.is_floating_point}
    if len(real) < 2 or not reader.meta.get(FROZEN):
        return found
    widest = max(real, key=lambda dtype: dtype.itemsize)

    def wide(weight: Weight) -> Weight:
        return replace(weight, dtype=widest, read=lambda rows=None: weight.read(rows).to(widest))

    return {name: wide(w) if w.dtype.is_floating_point else w for name, w in found.items()}


def weight_files(source: Path) -> list[str]:
    """model.safetensors, the files that its index names, or those of a DCP folder."""
    if (source / INDEX).is_file():
        weight_map = read_config(source / INDEX, files.MOST_INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
            raise UserError(f"{source / INDEX}: weight_map is missing or is not a table of file names")
        names = sorted(set(weight_map.values()))
        for file in names:
            if Path(file).name != file:  # a file elsewhere on this machine is not part of the model
                raise UserError(f"{source / INDEX}: {file!r} is not the name of a file beside it")
    elif (source / WEIGHTS).is_file():
        names = [WEIGHTS]
    elif _is_dcp(source):
        names = [METADATA, *sorted({file for t in tensors(source)[0].values() for _, file, *_ in t.chunks})]
    elif pickles := sorted(f.name for pattern in ("*.bin", "*.pt", "*.pth") for f in source.glob(pattern)):
        raise UserError(
            f"{source / pickles[0]}: pickle files are refused, because opening one can run any code. Use the "
            f"model's safetensors files ({WEIGHTS}). If it has none and you trust it, load it with transformers on a "
            "disposable machine and write it with save_pretrained(FOLDER)"
        )
    else:
        raise UserError(f"{source} has neither {WEIGHTS} nor {INDEX}")
    return names


def _is_dcp(source: Path) -> bool:
    return (source / METADATA).is_file() and not any((source / name).is_file() for name in (INDEX, WEIGHTS))


def left_out(source: Path) -> dict[str, int]:
    """How many values a DCP folder has that an import leaves out, by how their names begin: {"optimizer": 870, ...}."""
    return dict(tensors(source)[1]) if _is_dcp(source) else {}


def read_weights(source: Path, model: ModelSection) -> dict[str, Weight]:
    """All tensors of a folder by Hugging Face's names; safetensors are mapped into memory."""
    if _is_dcp(source):
        return from_titan(source, model)
    weights: dict[str, Tensor] = {}
    for file in weight_files(source):
        try:
            with files.open_file(source / file) as opened:
                same = Path(f"/proc/self/fd/{opened.fileno()}")  # whatever has its name by now
                path = same if same.exists() else source / file
                weights.update(load_file(path))
                # save_model writes a tied tensor once, and its other names here
                with safe_open(path, "pt") as shared:
                    names = (shared.metadata() or {}).items()
                weights |= {
                    other: weights[name] for other, name in names if name in weights and other not in weights
                }
        except FileNotFoundError:
            raise UserError(f"{source / file} is missing, though {INDEX} names it") from None
        except SafetensorError as error:
            raise UserError(f"{source / file} is not a complete safetensors file: {error}") from None
    return held(weights)


def read_config(path: Path, most: int = files.MOST_JSON) -> dict[str, Any]:
    try:
        return files.read_json(path, most)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None


GENERATION = "generation_config.json"
MAX_SHARD_BYTES = 5_000_000_000  # the limit that transformers uses
TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    GENERATION,
    TEMPLATE_FILE,
)


def export_run(
    run: Path,
    out: Path,
    *,
    checkpoint: Path | None = None,
    weights: Mapping[str, Tensor] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    dcp: bool = False,
) -> Path:
    """Writes a run's weights as a folder that `transformers` loads: config.json, generation_config.json,
    model.safetensors (several and an index beyond `max_shard_bytes`), and the tokenizer if the run has one. Weights are
    read and written one by one.

    Args:
        checkpoint: folder of the checkpoint; None: the run's latest.
        weights: by name, to be written instead, such as merged ones.
        dcp: writes PyTorch's distributed format with torchtitan's names, instead of safetensors.

    Raises:
        UserError: the run has no checkpoint, or `out` exists and is not empty.
    """
    files.guard(run)
    recipe = load(run / "recipe.toml")
    checkpoint = checkpoint or store.latest(run)
    theirs = for_hf(held(weights) if weights is not None else unread_weights(checkpoint), recipe.model)
    titan = to_titan(theirs, recipe.model) if dcp else {}
    tokenizer, trained = None, store.Reader(checkpoint).meta.get(TOKENIZER) is not None
    with suppress(NoSuchToken):  # without an end token it is exported as it is
        tokenizer = tokenizer_of(run, checkpoint)
    with _new_folder(out) as folder:
        token_ids = _write_text_files(run, folder, recipe, tokenizer, trained)
        config = hf_config(recipe.model, next(iter(theirs.values())).dtype)
        _write_json(folder / "config.json", config | token_ids)
        if dcp:
            from fivefold.checkpoint.dcp.write import save  # PyTorch's writer takes a second to import

            save(folder, titan)
        else:
            _write_weights(folder, theirs, max_shard_bytes)
    return out


def import_folder(source: Path, out: Path) -> Path:
    """Makes a run folder (recipe.toml, a checkpoint of step 0, the tokenizer) of a Hugging Face folder.

    The weights keep their dtypes, so that an export of the new run holds the same bytes. Data and length of the
    training are a recipe's defaults. Change them in recipe.toml or with `--set`: fields that follow from others, such
    as the steps of warm-up, are not set. Raises UserError: Fivefold cannot compute the model exactly. The message names
    the keys, weights or files."""
    files.guard(source)
    config = read_config(source / "config.json")
    model = from_hf_config(config, source)
    weights = made_from_hf(read_weights(source, model), model)
    assert model.vocab_size is not None
    if has_tokenizer := (source / "tokenizer.json").is_file():
        with suppress(NoSuchToken):  # an end token can be named later
            load_tokenizer(source / "tokenizer.json")
    data = DataSection(tokenizer=str((out / "tokenizer.json").absolute()) if has_tokenizer else "bytes")
    # what follows from others stays open
    recipe = Recipe(model=model, data=data, train=TrainSection(steps=1000))
    with _new_folder(out) as folder:
        kind = "DCP checkpoint of a" if _is_dcp(source) else "Hugging Face"
        text = to_toml(recipe, f"Weights imported from a {kind} {config['model_type']}.")
        files.write(folder / "recipe.toml", text)
        _copy_text_files(source, folder)
        ends = {key: config[key] for key in ("bos_token_id", "eos_token_id") if key in config}
        if ends and not (folder / GENERATION).exists():
            _write_json(folder / GENERATION, ends)
        write.save(store.folder_of(folder, 0), write.unread(weights), None, {"step": 0, "tokens": 0})
    return out


def _write_weights(folder: Path, weights: Mapping[str, Weight], max_shard_bytes: int) -> None:
    shards = list(write.cut(write.unread(weights), max_shard_bytes))
    names, count = [WEIGHTS], len(shards)
    if count > 1:
        names = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    writing = write.Writing(folder, {}, {}, finite=False)
    for file, shard in zip(names, shards, strict=True):
        writing.write_shard(folder / file, shard, format="pt")
    if count > 1:
        weight_map = {piece.name: file for file, shard in zip(names, shards, strict=True) for piece in shard}
        total = sum(piece.tensor.nbytes for shard in shards for piece in shard)
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _write_text_files(
    run: Path, folder: Path, recipe: Recipe, tokenizer: Tokenizer | None, trained: bool
) -> dict[str, Any]:
    """Writes the tokenizer and generation_config.json. Returns the special token ids for config.json.

    Files of an imported run are copied. Missing ones are made from the run's tokenizer. trained: the run has learned
    with its tokenizer, so texts begin with the end token in other programs, too.
    """
    _copy_text_files(run, folder)
    tokens: dict[str, tuple[str, int]] = {}  # (text, id) by role
    if tokenizer is not None:
        added = {entry["id"]: entry["content"] for entry in json.loads(tokenizer.to_json())["added_tokens"]}
        end = (added[tokenizer.end_id], tokenizer.end_id)  # documents also begin after it
        named = [(text, i) for i, text in added.items() if text == tokenizer.begin]
        tokens = {"bos": (named or [end])[0], "eos": end}
        if masks := [(text, i) for i, text in added.items() if text in KNOWN_MASKS]:  # BERT's
            tokens["mask"] = masks[0]
    if trained and tokenizer is not None and card_of(recipe.model).causal:
        files.write(folder / "tokenizer.json", tokenizer.to_begun_json())
    path = folder / "tokenizer_config.json"
    if tokens and (trained or not path.exists()):
        # transformers 4 gives a model its tokenizer's own inputs, of which Llama knows no token_type_ids
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": recipe.model.seq_len}
        settings["model_input_names"] = ["input_ids", "attention_mask"]
        names = {f"{role}_token": token for role, (token, _) in tokens.items()}
        kept = read_config(path) if path.exists() else {}
        _write_json(path, {**settings, **names, "clean_up_tokenization_spaces": False, **kept})
    if not (folder / GENERATION).exists():
        ids: dict[str, Any] = {
            f"{role}_token_id": tokens[role][1] if role in tokens else None for role in ("bos", "eos")
        }
        if tokenizer is not None and (template := beside(run)):
            ends = sorted(ChatTemplate(template, tokenizer).end_ids)
            ids["eos_token_id"] = ends if len(ends) > 1 else ends[0]
        _write_json(folder / GENERATION, ids)
    generation = read_config(folder / GENERATION)
    return {key: generation.get(key) for key in ("bos_token_id", "eos_token_id")}


def _copy_text_files(source: Path, folder: Path) -> None:
    """Raises UserError: one is too large."""
    for name in TEXT_FILES:
        if (source / name).is_file():
            most = MOST_TOKENIZER if name == "tokenizer.json" else files.MOST_JSON
            files.write(folder / name, files.read_bytes(source / name, most))


@contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    """A temporary folder beside `out`. It is renamed to `out` at the end, and removed if something fails.

    If `out` is an empty folder, its content moves there instead.
    """
    out = out.absolute()  # "." has no name
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is not an empty folder; name a new one")
    files.make_folder(out.parent)
    temporary = out.parent / f".{out.name}.{files.own_word()}"
    files.make_folder(temporary)
    try:
        yield temporary
        files.flush_all(temporary)
        if not out.exists():
            files.rename(temporary, out)
            return
        for item in list(temporary.iterdir()):
            files.rename(item, out / item.name)
    except OSError as error:
        error.filename = error.filename or str(out)  # a full disk names none
        raise
    finally:
        files.remove(temporary)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    files.write(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
