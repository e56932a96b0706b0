"""Data: text to tokens to packed batches.

`prepare(recipe)` finds the source, tokenizes it once into memory-mapped shards and returns a `DataSet`. `Batches`
cuts it into batches that depend on (seed, step) only. `Prefetch` keeps the next ones ready. This room needs no torch.
"""

from fivefold.data.batches import NOT_COUNTED, Batches, Prefetch, epochs, objective_of
from fivefold.data.check import check
from fivefold.data.prepare import prepare, progress_bar
from fivefold.data.tokenizer import Tokenizer, load_tokenizer
from fivefold.data.tokens import DataSet, Tokens

__all__ = [
    "NOT_COUNTED",
    "Batches",
    "DataSet",
    "Prefetch",
    "Tokenizer",
    "Tokens",
    "check",
    "epochs",
    "load_tokenizer",
    "objective_of",
    "prepare",
    "progress_bar",
]
