"""The dtypes and modes of training: which there are, and what each implies. No torch.

A new mode is a file in this folder, with its CARDS listed here.
"""

from fivefold.precision import fp8, mxfp8
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

ROUNDINGS = ("stochastic", "kahan", "nearest")
"""The values of `precision.rounding`; see optim/rounding.py."""
PLAIN = (
    Mode("fp32", "fp32", auto=True),
    Mode("tf32", "fp32", products="tf32", gpu=True),
    Mode("bf16", "bf16", auto=True),
    Mode("bf16_pure", "bf16", master="bf16", gradient="bf16", state="bf16", fields=("rounding",)),
    Mode("fp16", "fp16", scaled=True, fields=("loss_scale", "loss_scale_every")),
)
"""The modes whose matmuls round no factor."""
PRECISIONS: dict[str, Mode] = {mode.name: mode for mode in (*PLAIN, *fp8.CARDS, *mxfp8.CARDS)}
FIELDS: dict[str, list[str]] = {
    field: [mode.name for mode in PRECISIONS.values() if field in mode.fields]
    for field in dict.fromkeys(field for mode in PRECISIONS.values() for field in mode.fields)
}
"""The fields of [precision] that only some modes have, with these modes."""


def chosen(mode: str, fast_bf16: bool) -> str:
    """The mode that `precision.mode` stands for. "auto" is bf16 on devices that compute it faster than fp32."""
    return ("bf16" if fast_bf16 else MASTER) if mode == "auto" else mode
