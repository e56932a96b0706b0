"""The architectures, a folder each. Models know nothing of ranks. No torch here, nor in the cards and what they use.

A folder `models/NAME` holds the files that the rest of the program loads for `arch = "NAME"`:

- `card.py`: class `Card`, a `fivefold.models.card.Card`: the architecture as data;
- `module.py`: class `Model`, a `fivefold.models.base.LanguageModel`; without it, that of the architecture whose card
  its own extends;
- `hf.py`: the map to and from Hugging Face (see `fivefold/models/hf.py`), where there is such a model.

Below them, what models learn to predict.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Literal

ARCHITECTURES: tuple[str, ...] = tuple(
    sorted(file.parent.name for file in Path(__file__).parent.glob("*/card.py"))
)
EXCHANGED = tuple(arch for arch in ARCHITECTURES if (Path(__file__).parent / arch / "hf.py").is_file())
"""Those that have a counterpart in Hugging Face `transformers`."""


def file_of(arch: str, name: Literal["card", "module", "hf"]) -> ModuleType:
    """Imports a file of an architecture's folder, at first use."""
    assert arch in ARCHITECTURES, f"{arch}: there are {ARCHITECTURES}"
    if name == "module" and not (Path(__file__).parent / arch / "module.py").is_file():
        return file_of(file_of(arch, "card").Card.__base__.__module__.split(".")[-2], name)
    return import_module(f"fivefold.models.{arch}.{name}")


Objective = Literal["causal", "mlm"]
"""`causal`: the next token at every position. `mlm`: the masked tokens (arXiv 1810.04805)."""
MASKED_SHARE = 0.15
"""Share of the tokens that `mlm` predicts."""


def predicted(objective: Objective, T: int) -> int:
    """Number of predicted tokens in a sequence of T tokens."""
    return T if objective == "causal" else max(1, round(MASKED_SHARE * T))
