"""The dtypes of training: which there are, and what each implies. No torch."""

from fivefold.precision.modes import DTYPES, MASTER, TRAINED, Dtype, chosen, token_bytes, torch_dtype

__all__ = ["DTYPES", "MASTER", "TRAINED", "Dtype", "chosen", "token_bytes", "torch_dtype"]
