"""The dtypes and modes of training: which there are, and what each implies. No torch."""

from fivefold.precision.modes import (
    DTYPES,
    MASTER,
    MOST_IDS,
    PRECISIONS,
    ROUNDINGS,
    TRAINABLE,
    TRAINED,
    Dtype,
    Mode,
    chosen,
    sent,
    token_bytes,
    torch_dtype,
)
