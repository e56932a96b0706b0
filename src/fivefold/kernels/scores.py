"""What models change about the scores of attention. Each function that attends computes it or refuses it by name."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from fivefold.errors import UserError


class Scores(NamedTuple):
    """window: the keys that a query of causal attention sees, its own the last of them (arXiv 2004.05150); 0: all.
    soft_cap: scores x become soft_cap * tanh(x / soft_cap) (Gemma 2, arXiv 2408.00118); 0: they stay. sink: (H), a
    score beside those of each head's keys, whose value is 0 (the idea: arXiv 2309.17453)."""

    window: int = 0
    soft_cap: float = 0.0
    sink: Tensor | None = None

    @property
    def changed(self) -> bool:
        return bool(self.window or self.soft_cap) or self.sink is not None

    def refuse(self, names: tuple[str, ...], why: str) -> None:
        """Raises UserError: one of these is set. why: what does not compute it, and what does."""
        for name in names:
            value = getattr(self, name)
            if isinstance(value, Tensor) or value:
                shown = name if isinstance(value, Tensor) else f"{name} = {value}"
                raise UserError(f"attention with {shown}: not supported by {why}")


PLAIN = Scores()
