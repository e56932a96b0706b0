"""Data: text to tokens to packed batches.

`prepare(recipe)` finds the sources, tokenizes them once into memory-mapped shards and returns a `DataSet`. `Batches`
cuts them into batches that depend on (seed, step) only. `Prefetch` keeps the next batches ready. This room needs no
torch.
"""

from fivefold.data.batches import NOT_COUNTED, Batch, Batches, Prefetch
from fivefold.data.dataset import DataSet
from fivefold.data.facts import check
from fivefold.data.one_source import progress_bar
from fivefold.data.preparation import prepare
from fivefold.data.tokens import Tokens
