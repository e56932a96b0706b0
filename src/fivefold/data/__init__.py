"""Data: text to tokens to packed batches.

`prepare(recipe)` finds the sources, tokenizes them once into memory-mapped shards and returns a `DataSet`. `Batches`
cuts them into batches that depend on (seed, step) only. `order.py` says which sequence of which source comes where.
`Prefetch` keeps the next batches ready. This room needs no torch.
"""

from fivefold.data.batches import Batches, Prefetch, objective_of
from fivefold.data.check import check
from fivefold.data.cut import NOT_COUNTED, Batch
from fivefold.data.mixture import prepare
from fivefold.data.prepare import progress_bar
from fivefold.data.tokenizer import Tokenizer, load_tokenizer
from fivefold.data.tokens import DataSet, Tokens

__all__ = [
    "NOT_COUNTED",
    "Batch",
    "Batches",
    "DataSet",
    "Prefetch",
    "Tokenizer",
    "Tokens",
    "check",
    "load_tokenizer",
    "objective_of",
    "prepare",
    "progress_bar",
]
