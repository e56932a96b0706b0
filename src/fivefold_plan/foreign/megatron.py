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
from fivefold_plan.foreign.reading import Reading

NAME = "Megatron-LM"

NEEDED = ("--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length")
LONGEST = 256
"""Characters of a variable: one may have another one in it many times."""
_ASSIGNED = re.compile(r"(?:^|[\s;])([A-Za-z_]\w*)=([^\s;]*)")
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?[-=]([^}]*))?\}|(\w+))")
_NO_VALUE = re.compile(r"--[A-Za-z]|\d*[<>|&]|\S*\[@\]")
"""The next argument, a redirection or another command, an array."""
_COMMENT = re.compile(r"(^|\s)#.*$", re.MULTILINE)


def given(path: Path) -> dict[str, Any]:
    text = _COMMENT.sub("", path.read_text("utf-8").replace("\\\n", " "))
    pairs = _yaml(text) if path.suffix in (".yaml", ".yml") else _shell(re.sub("[\"']", "", text))
    programs = re.findall(r"\b(pretrain_\w+)\.py", text)  # which is no argument, but says the kind of model
    found: dict[str, Any] = {f"--{name}": True for name in programs}
    for key, word in pairs:
        value = _value(word)
        if found.get(key, value) != value:
            found[f"{key} (earlier)"] = found[key]
        found[key] = value
    return found


def _value(text: str) -> Any:
    """A number, true, false, or the text itself. An argument without a value is true."""
    with suppress(ValueError, RecursionError):
        found = json.loads(re.sub(r"^-?(?=\.)", r"\g<0>0", text.lower()) or "true")
        return text if isinstance(found, list | dict) else found
    return text


def _yaml(text: str) -> Iterator[tuple[str, str]]:
    """Lines without a key belong to the key before them, which is a list or a text of several lines."""
    pairs = [("--", "")]
    for line in text.splitlines():
        if found := re.fullmatch(r"\s*(?:--)?([\w.-]+)\s*:(?:\s+(.*?))?\s*", line):
            name = found[1].rpartition(".")[2]
            pairs.append(("--" + (name if name.isupper() else name.replace("_", "-")), found[2] or ""))
        elif line.strip() not in ("", "---"):
            pairs[-1] = (pairs[-1][0], f"{pairs[-1][1]} {line.strip().removeprefix('- ')}".strip())
    return ((key, value.strip("\"'")) for key, value in pairs if value)


def _shell(text: str) -> Iterator[tuple[str, str]]:
    """Each argument with the word behind it. A variable to which two values are assigned stays unknown: no condition is
    evaluated. One that holds arguments is empty, as they are read where they stand."""
    known: dict[str, str] = {}
    for line in text.splitlines():
        line = _VARIABLE.sub(lambda f: known.get(f[1] or f[3], f[2] or f"${f[1] or f[3]}"), line)
        for name, value in _ASSIGNED.findall(line):
            value = "" if value.startswith(("--", "(")) else value[:LONGEST]
            known[name] = value if known.get(name, value) == value else f"${name}"
        words = [*map(_bare, line.split()), ""]
        for word, behind in pairwise(words):
            if re.match("--[A-Za-z]", word):
                key, equals, first = word.partition("=")
                yield key, first if equals or re.match(_NO_VALUE, behind) else behind


def _bare(word: str) -> str:
    """Without the assignment that it begins, and the parenthesis or the command that it ends."""
    word = re.sub(r"^[A-Za-z_]\w*\+?=\(?|;$", "", word)
    return word.removesuffix(")") if word.count(")") > word.count("(") else word


def derive(reading: Reading) -> None:
    given, fields, number = reading.given, reading.fields, reading.number
    layers, D, heads, _ = (number(key, None, 1) for key in NEEDED)
    fields["model.arch"] = _architecture(reading)
    fields.setdefault("model.ffn_dim", 8 * D // 3 // 64 * 64 if given.get("--swiglu") else 4 * D)
    if given.get("--multi-latent-attention") or fields.get("model.head_dim") == D // heads:
        fields.pop("model.head_dim", None)
    if fields.get("model.kv_heads") and not given.get("--group-query-attention"):
        del fields["model.kv_heads"]
        reading.lacks("--num-query-groups", "it has no effect without --group-query-attention")
    size = given.get("--vocab-size") or reading.tables["tokenizers"].get(given.get("--tokenizer-type"))
    if isinstance(size, int):
        unit = number("--make-vocab-size-divisible-by", 128, 1) * fields.get("layout.tp", 1)
        fields.setdefault("model.vocab_size", round_up(size, unit))
    if "model.experts" in fields:
        _experts(reading)
    if "--train-samples" in given:
        fields["train.tokens"] = number("--train-samples", 1, 1) * fields.get("model.seq_len", 1)
    fields["optim.betas"] = (given.get("--adam-beta1", 0.9), given.get("--adam-beta2", 0.999))
    if all(isinstance(given.get(key), int) for key in ("--nproc_per_node", "--nnodes")):
        reading.devices = reading.devices or given["--nproc_per_node"] * given["--nnodes"]
    if not (given.get("--use-megatron-fsdp") or given.get("--use-torch-fsdp2")):
        fields["layout.zero"] = int(bool(given.get("--use-distributed-optimizer")))
    if each := number("--num-layers-per-virtual-pipeline-stage", 0):
        fields["layout.virtual_stages"] = max(1, layers // (fields.get("layout.pp", 1) * each))
    if fields.get("layout.virtual_stages", 1) > 1:
        fields["layout.schedule"] = reading.tables["virtual_stages"]


def _experts(reading: Reading) -> None:
    given, fields = reading.given, reading.fields
    width = fields.setdefault("model.expert_ffn_dim", fields["model.ffn_dim"])
    if fields.setdefault("model.balance", "aux") == "aux":
        fields["model.aux_loss_weight"] = given.get("--moe-aux-loss-coeff", 0.0)
    if fields.get("model.router_score") == "sigmoid":  # whose scores are always normalised there
        fields.pop("model.router_normalize", None)
    shared, rest = divmod(reading.number("--moe-shared-expert-intermediate-size", 0), width)
    fields["model.shared_experts"] = shared
    if rest:
        reading.lacks("--moe-shared-expert-intermediate-size", "shared experts are as wide as the others")
    reading.cut_experts("--expert-tensor-parallel-size", fields.get("layout.tp", 1))
    often = str(given.get("--moe-layer-freq", 1))
    if dense := re.fullmatch(r"\(?\[0\]\*(\d+)\+\[1\]\*\d+\)?", often):
        fields["model.dense_layers"] = int(dense[1])
    elif often != "1":
        reading.lacks("--moe-layer-freq", "dense blocks are the first ones (model.dense_layers)")


def _architecture(reading: Reading) -> str:
    """That with the fewest differences, large ones first. Raises UserError: a large one is left."""
    given, tables = reading.given, reading.tables
    own = {arch: {*words.split()} for arch, words in tables["architectures"].items()}
    known = {*tables["small"], *tables["others"]}.union(*own.values()) - tables["absent"].keys()
    has = {word for word in known if given.get(word)}
    has |= {f"{key}={given.get(key, value)}" for key, value in tables["absent"].items()}

    def order(word: str) -> tuple[bool, bool, str]:
        return word.partition("=")[0] in tables["small"], word not in has, word

    differing = {arch: sorted(has ^ words, key=order) for arch, words in own.items()}
    arch = min(own, key=lambda arch: (sum(not order(w)[0] for w in differing[arch]), len(differing[arch])))
    for word in differing[arch]:
        differs = f"{arch}, which has {'no ' * (word in has)}{word}"
        if not order(word)[0]:
            raise UserError(f"{reading.path}: no architecture here has this shape; the nearest is {differs}")
        reading.lacks(word.partition("=")[0], f"the nearest is {differs}")
    return arch
