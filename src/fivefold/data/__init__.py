"""Data: text to tokens to packed batches.

`prepare(recipe)` finds the sources, tokenizes them once into memory-mapped shards and returns a `DataSet`. `Batches`
cuts them into batches that depend on (seed, step) only. `Prefetch` keeps the next batches ready. This room needs no
torch.

Names are imported when they are first used, so the process that tries a tokenizer loads nothing else.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fivefold.data.batches import NOT_COUNTED, Batch, Batches, Prefetch, objective_of
    from fivefold.data.dataset import DataSet
    from fivefold.data.facts import check
    from fivefold.data.one_source import progress_bar
    from fivefold.data.preparation import prepare
    from fivefold.data.tokenizer import Tokenizer, load_tokenizer
    from fivefold.data.tokens import Tokens

_HOMES = {
    "NOT_COUNTED": "batches",
    "Batch": "batches",
    "Batches": "batches",
    "DataSet": "dataset",
    "Prefetch": "batches",
    "Tokenizer": "tokenizer",
    "Tokens": "tokens",
    "load_tokenizer": "tokenizer",
    "check": "facts",
    "objective_of": "batches",
    "prepare": "preparation",
    "progress_bar": "one_source",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fivefold.data' has no attribute '{name}'")
    value = getattr(import_module(f"fivefold.data.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
