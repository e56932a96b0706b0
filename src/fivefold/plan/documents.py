"""What attention computes where a sequence holds several documents: counted in the data, or in documents of an assumed
length. Otherwise sequences count as whole, which is an upper bound."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from fivefold.errors import UserError
from fivefold.kernels import sizes
from fivefold.models.card import card_of
from fivefold.models.operations import WHOLE_SEQUENCES, Program, Seen
from fivefold.models.section import ModelSection
from fivefold.recipe import Recipe
from fivefold.sharding.layout import Layout
from fivefold.sharding.parts import ring_columns

if TYPE_CHECKING:
    from fivefold.kernels.tiling import Sample

SOURCES = {
    "data": "counted in the data",
    "assumed": "assumed",
    "unknown": "where documents end is not known (--document-tokens N)",
}


@dataclass(frozen=True, eq=False)
class Documents:
    """The documents of a run. sample: some of its sequences, of the model's length; None: not known."""

    source: Literal["data", "assumed", "unknown"]
    sample: Sample | None = None

    def pairs(self, model: ModelSection) -> float:
        """The share of the pairs of tokens that see each other."""
        return 1.0 if self.sample is None else self.sample.pairs(card_of(model).causal)

    def seen(
        self, model: ModelSection, layout: Layout, B: int, element_size: float, program: Program
    ) -> Seen:
        """What the kernels compute that run there: on CPUs tiles, on GPUs in 16 bits document by document. Other
        kernels compute whole sequences."""
        sample = self.sample
        if sample is None:
            return WHOLE_SEQUENCES
        causal, ring = card_of(model).causal, _ring(layout)
        if program.attention == "blocks":
            ranks = [ring_columns(layout, model.seq_len, i, causal) for i in range(layout.cp)] if ring else ()
            return Seen(sample.computed(B, causal, int(element_size), ranks))
        if program.attention == "flash" and not ring and sizes.any_length(element_size, model.head_width):
            return Seen(sample.pairs(causal), sample.seen)
        return WHOLE_SEQUENCES

    def line(self, model: ModelSection, layout: Layout, seen: Seen) -> str:
        """What attention is priced by, in a sentence; nothing if each sequence is one document."""
        sample, pairs = self.sample, self.pairs(model)
        if sample is None:
            return f"whole sequences, an upper bound: {SOURCES[self.source]}"
        if pairs == 1:
            return ""
        work = f"{100 * seen.share:.3g}% of the work of whole sequences"
        if seen == WHOLE_SEQUENCES:
            why = "its kernel for documents has no price" if _ring(layout) else "its kernel skips nothing"
            work = f"priced as whole sequences ({why})"
        return (
            f"documents of {sample.tokens:.0f} tokens on average in a sequence ({SOURCES[self.source]}): "
            f"{100 * pairs:.3g}% of the pairs, {work}"
        )

    def as_json(self, model: ModelSection, seen: Seen) -> dict[str, Any]:
        """`attention` of `fivefold plan --json`."""
        tokens = None if self.sample is None else self.sample.tokens
        return {
            "documents": self.source,
            "document_tokens": tokens,
            "pairs": self.pairs(model),
            "work": seen.share,
        }


def _ring(layout: Layout) -> bool:
    return layout.cp > 1 and layout.cp_method == "ring"


def documents_of(recipe: Recipe, tokens: float | None = None) -> Documents | None:
    """The documents of a recipe: of `tokens` on average, else those of data that are tokenized already. None: they see
    each other.

    Raises:
        UserError: `tokens` is out of range or has no effect.
    """
    T, masks = recipe.model.seq_len, recipe.data.document_masks
    if tokens is None:
        return _known(recipe) if masks else None
    if not masks:
        raise UserError(
            "--document-tokens has no effect with data.document_masks = false; leave one of them out"
        )
    if not 1 <= tokens <= T:
        raise UserError(
            f"--document-tokens {tokens:g}: must be from 1 to model.seq_len = {T}. Nearest valid: "
            f"{T if tokens > T else 1}"
        )
    from fivefold.kernels.tiling import assumed

    return Documents("assumed", assumed(T, tokens))


def _known(recipe: Recipe) -> Documents:
    from fivefold.data.facts import known, sample

    with suppress(UserError):  # tokens on this disk may be damaged, which is no fault of a plan
        if (data := known(recipe)) is not None and (found := sample(recipe, data)) is not None:
            return Documents("data", found)
    return Documents("unknown")
