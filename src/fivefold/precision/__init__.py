"""The dtypes and modes of training: which there are, and what each implies. No torch."""

from fivefold.precision.card import (
    DTYPES,
    MASTER,
    MOST_IDS,
    TRAINED,
    Dtype,
    Mode,
    sent,
    token_bytes,
    torch_dtype,
)
from fivefold.precision.registry import FIELDS, PRECISIONS, ROUNDINGS, chosen
