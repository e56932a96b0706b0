"""Megatron-LM's arguments: a shell script, a text file with the list, or YAML. A key is the argument, `--num-layers`.
Of a shell, assignments, `$NAME` and `${NAME:-DEFAULT}` are followed, and nothing is run. Of YAML, lines `key: value`
are read, whatever section they are in."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from fivefold.errors import UserError
from fivefold.models.card import round_up
from fivefold.models.recomputation import PREFIX, runs_of
from fivefold.recipe.foreign.reading import Reading

NAME = "Megatron-LM"

NEEDED = ("--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length")
LONGEST = 256
"""Characters of a variable: one may have another one in it many times."""
_ASSIGNED = re.compile(r"\s*(?:export\s+)?([A-Za-z_]\w*)=(?!\(|--)(\S*)")
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?-([^}]*))?\}|(\w+))")
_COMMENT = re.compile(r"(^|\s)#.*$", re.MULTILINE)


def given(path: Path) -> dict[str, Any]:
    text = _COMMENT.sub("", path.read_text("utf-8").replace("\\\n", " "))
    pairs = _yaml(path, text) if path.suffix in (".yaml", ".yml") else _shell(re.sub("[\"']", "", text))
    programs = re.findall(r"\b(pretrain_\w+)\.py", text)  # which is no argument, but says the kind of model
    return {f"--{name}": True for name in programs} | {key: _value(word) for key, word in pairs}


def _value(text: str) -> Any:
    """A number, true, false, or the text itself. An argument without a value is true."""
    with suppress(ValueError, RecursionError):
        found = json.loads(re.sub(r"^-?(?=\.)", r"\g<0>0", text.lower()) or "true")
        return text if isinstance(found, list | dict) else found
    return text


def _yaml(path: Path, text: str) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        if found := re.fullmatch(r"\s*(?:--)?([\w.-]+)\s*:(?:\s+(.*?))?\s*", line):
            name = found[1].rpartition(".")[2]
            if found[2]:
                yield "--" + (name if name.isupper() else name.replace("_", "-")), found[2].strip("\"'")
        elif not re.fullmatch(r"\s*(-\s.*|---)?\s*", line):
            raise UserError(f"{path}:{number}: {line.strip():.60}: must be a line `key: value`")


def _shell(text: str) -> Iterator[tuple[str, str]]:
    """Each argument with the first word behind it, or all of --recompute-modules. A variable to which two values are
    assigned stays unknown: no condition is evaluated."""
    known: dict[str, str] = {}
    for line in text.splitlines():
        line = _VARIABLE.sub(lambda f: known.get(f[1] or f[3], f[2] or f"${f[1] or f[3]}"), line)
        if one := _ASSIGNED.match(line):
            known[one[1]] = one[2][:LONGEST] if known.get(one[1], one[2]) == one[2] else f"${one[1]}"
        words = [re.sub(r"^[A-Za-z_]\w*\+?=\(?|(?<![\])\d])\)$", "", word) for word in line.split()]
        starts = [place for place, word in enumerate(words) if re.match("--[A-Za-z]", word)]
        for start, end in pairwise([*starts, len(words)]):
            key, equals, first = words[start].partition("=")
            rest = [word for word in words[start + 1 : end] if word.strip("()") and "[@]" not in word]
            yield key, first if equals else " ".join(rest if key == "--recompute-modules" else rest[:1])


def derive(reading: Reading) -> None:
    given, fields, number = reading.given, reading.fields, reading.number
    arch = _architecture(reading)
    _, D, heads, _ = (number(key, None, 1) for key in NEEDED)
    fields["model.arch"] = arch
    fields.setdefault("model.ffn_dim", max(1, 8 * D // 3 // 64) * 64 if given.get("--swiglu") else 4 * D)
    if given.get("--multi-latent-attention") or fields.get("model.head_dim") == D // heads:
        fields.pop("model.head_dim", None)
    size = given.get("--vocab-size") or reading.tables["tokenizers"].get(given.get("--tokenizer-type"))
    if isinstance(size, int):
        unit = number("--make-vocab-size-divisible-by", 128, 1) * fields.get("layout.tp", 1)
        fields["model.vocab_size"] = round_up(size, unit)
    else:
        reading.notes.append("model.vocab_size is the tokenizer's: the file does not say it")
    if "model.experts" in fields:
        width = fields.setdefault("model.expert_ffn_dim", fields["model.ffn_dim"])
        if fields.setdefault("model.balance", "aux") == "aux":
            fields["model.aux_loss_weight"] = given.get("--moe-aux-loss-coeff", 0.0)
        fields["model.shared_experts"] = number("--moe-shared-expert-intermediate-size", 0) // width
        if dense := re.fullmatch(r"\(?\[0\]\*(\d+)\+\[1\]\*\d+\)?", str(given.get("--moe-layer-freq"))):
            fields["model.dense_layers"] = int(dense[1])
    if "--train-samples" in given:
        fields["train.tokens"] = number("--train-samples", 1, 1) * fields.get("model.seq_len", 1)
    fields["optim.betas"] = (given.get("--adam-beta1", 0.9), given.get("--adam-beta2", 0.999))
    if all(isinstance(given.get(key), int) for key in ("--nproc_per_node", "--nnodes")):
        reading.devices = reading.devices or given["--nproc_per_node"] * given["--nnodes"]
    _layout(reading, fields.get("layout.pp", 1))


def _architecture(reading: Reading) -> str:
    """Raises UserError: there is none with these arguments. It names the nearest, and the first difference."""
    given = reading.given
    traits = {arch: set(words.split()) for arch, words in reading.tables["architectures"].items()}
    others, soft, defaults = (traits.pop(name) for name in ("others", "soft", "defaults"))
    default = dict(word.split("=") for word in defaults)
    has = {word for word in others.union(soft, *traits.values()) - default.keys() if given.get(word)}
    has |= {f"{key}={given.get(key, value)}" for key, value in default.items()}
    differing = {arch: sorted(has - own) + sorted(own - has) for arch, own in traits.items()}
    hard = {arch: [w for w in words if w.partition("=")[0] not in soft] for arch, words in differing.items()}
    arch = min(traits, key=lambda arch: (len(hard[arch]), len(differing[arch])))
    for word in hard[arch] or differing[arch]:
        differs = f"{arch}, which has {'no ' * (word in has)}{word}"
        if hard[arch]:
            raise UserError(f"{reading.path}: no architecture here has this shape; the nearest is {differs}")
        reading.lacks(word.partition("=")[0], f"the nearest is {differs}")
    return arch


def _layout(reading: Reading, pp: int) -> None:
    """Stages of the pipeline, ZeRO, and what each of a stage's blocks recomputes."""
    given, fields, number = reading.given, reading.fields, reading.number
    layers, modules = fields.get("model.layers", 1), reading.tables["modules"]
    if each := number("--num-layers-per-virtual-pipeline-stage", 0):
        fields["layout.virtual_stages"] = max(1, layers // (pp * each))
    if fields.get("layout.virtual_stages", 1) > 1:
        fields["layout.schedule"] = reading.tables["virtual_stages"]
    if not (given.get("--use-megatron-fsdp") or given.get("--use-torch-fsdp2")):
        fields["layout.zero"] = int(bool(given.get("--use-distributed-optimizer")))
    mode = fields.get("layout.recompute")
    named = str(given.get("--recompute-modules", "core_attn")).split()
    if mode == "full" and given.get("--recompute-method") == "block":
        first = min(layers // pp, number("--recompute-num-layers", 1))
        fields["layout.recompute"] = runs_of((["full"] * first + ["none"] * (layers // pp - first)) * pp)
    elif mode == "selective" and not set(named) <= modules.keys():
        reading.lacks("--recompute-modules", f"layout.recompute has only what is like {', '.join(modules)}")
    elif mode == "selective" and named != ["core_attn"]:
        fields["layout.recompute"] = PREFIX + "+".join(dict.fromkeys(modules[name] for name in named))
