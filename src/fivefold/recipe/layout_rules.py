"""What a layout and a model must agree on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fivefold.layout import Layout, problems, stages_of_a_rank

if TYPE_CHECKING:
    from fivefold.recipe.schema import ModelSection, Recipe

Contradiction = tuple[set[str], str]
"""The keys that disagree, and what must hold between them."""


def layout_rules(recipe: Recipe) -> Iterator[Contradiction]:
    """Every rule between layout and model that a recipe breaks."""
    for names, message in problems(Layout.from_recipe(recipe.layout)):
        yield {f"layout.{name}" for name in names}, f"layout: {message}"
    yield from _tensor(recipe)
    yield from _context(recipe)
    yield from _pipeline(recipe)
    yield from _noise(recipe)


def _tensor(recipe: Recipe) -> Iterator[Contradiction]:
    """What tensor and sequence parallelism divide must be divisible."""
    from fivefold.recipe.resolve import expected_vocab_size, resolve_model

    layout, tp = recipe.layout, recipe.layout.tp
    model = resolve_model(recipe.model, vocab_size=1)  # what is left open gets its default
    heads = "kv_heads" if recipe.model.kv_heads else "heads"
    divided = {heads: (model.kv_heads or 1, "a rank has whole heads")}
    divided["ffn_dim"] = (model.ffn_dim or 1, "a rank has equally many columns")
    model = model.model_copy(update={"vocab_size": expected_vocab_size(recipe) or tp})
    divided["vocab_size"] = (model.vocab_size or tp, "a rank has equally many rows")
    if layout.sp:
        divided["seq_len"] = (model.seq_len // layout.cp, "with sp a rank has equally many tokens")
    fitting = max(n for n in range(1, tp + 1) if not any(size % n for size, _ in divided.values()))
    for name, (size, why) in divided.items():
        if size % tp:
            over = f" / layout.cp = {size}" if name == "seq_len" and layout.cp > 1 else ""
            given = model.seq_len if over else size
            other = _nearest(name, model, tp)
            nearest = f"layout.tp = {fitting}" + (f", or model.{name} = {other}" if other else "")
            yield (
                {f"model.{name}", "layout.tp"} | ({"layout.sp", "layout.cp"} if name == "seq_len" else set()),
                f"layout.tp = {tp} must divide model.{name} = {given}{over}: {why}. Nearest valid: {nearest}",
            )


def _context(recipe: Recipe) -> Iterator[Contradiction]:
    """Ranks of the context axis have equally many tokens, and with `ulysses` whole heads."""
    T, layout, kv_heads = recipe.model.seq_len, recipe.layout, recipe.model.kv_heads or recipe.model.heads
    cp, ulysses = layout.cp, layout.cp_method == "ulysses"
    keys = {"model.seq_len", "layout.cp", "layout.cp_method"}

    def fits(ranks: int) -> bool:
        return T % (ranks if ulysses or ranks == 1 else 2 * ranks) == 0 and not (
            ulysses and kv_heads % (ranks * layout.tp)
        )

    nearest = max((ranks for ranks in range(1, cp + 1) if fits(ranks)), default=1)
    if cp > 1 and not ulysses and T % (2 * cp):
        more = -(-T // (2 * cp)) * 2 * cp
        yield (
            keys,
            f"2 x layout.cp = {2 * cp} must divide model.seq_len = {T}: in the ring a rank has a chunk from the front "
            f"and one from the back. Nearest valid: layout.cp = {nearest}, or model.seq_len = {more}",
        )
    if cp > 1 and ulysses and T % cp:
        yield (
            keys,
            f"layout.cp = {cp} must divide model.seq_len = {T}: a rank has equally many tokens. "
            f"Nearest valid: layout.cp = {nearest}, or model.seq_len = {-(-T // cp) * cp}",
        )
    if cp > 1 and ulysses and kv_heads % (cp * layout.tp):
        name = "kv_heads" if recipe.model.kv_heads else "heads"
        yield (
            {f"model.{name}", "layout.cp", "layout.tp", "layout.cp_method"},
            f"layout.cp x layout.tp = {cp * layout.tp} must divide model.{name} = {kv_heads}: with cp_method = ulysses "
            f"a rank has whole heads. Nearest valid: layout.cp = {nearest}, or layout.cp_method = ring",
        )


def _nearest(name: str, model: ModelSection, ranks: int) -> int | None:
    """The value of a field of the model, closest to its own, that `ranks` divides; of those that the model can have."""
    size = getattr(model, name) or 0
    multiples = range(ranks, max(size, model.heads) + ranks, ranks)
    if name == "heads":  # heads of even width, as many as divide the model's
        multiples = [n for n in multiples if model.dim % (2 * n) == 0]
    elif name == "kv_heads":
        multiples = [n for n in multiples if model.heads % n == 0]
    elif name == "vocab_size":
        multiples = [n for n in multiples if n >= size]  # the tokens there are
    elif name == "seq_len":
        return None  # shorter or longer sequences are another task
    return min(multiples, key=lambda n: abs(n - size), default=None)


def _noise(recipe: Recipe) -> Iterator[Contradiction]:
    """Where no rank sees the gradients of single microbatches, or of its own share, whole."""
    layout, model = recipe.layout, recipe.model
    tied = model.tie_embeddings if model.tie_embeddings is not None else model.arch in ("gpt2", "bert")
    parts = (
        ({"layout.cp"}, layout.cp > 1, "cp: a rank sees parts of sequences"),
        ({"layout.ep"}, layout.ep > 1, "ep: experts get tokens of several ranks at once"),
        ({"layout.sp"}, layout.sp, "sp: gradients of norms are sums over the tensor axis"),
        ({"layout.tp", "layout.zero"}, layout.tp > 1 and layout.zero > 0, "tp under ZeRO: what tensor ranks share "
            "and what each has of its own is sent together"),
        ({"layout.pp", "model.tie_embeddings"}, layout.pp > 1 and tied, "pp with tied embeddings: two stages have a "
            "part of the gradient each"),
    )  # fmt: skip
    for keys, wrong, why in parts:
        if recipe.observe.noise_scale and wrong:
            instead = "layout.zero = 0" if "layout.zero" in keys else "observe.noise_scale = false"
            message = f"observe.noise_scale cannot be measured with {why}. Nearest valid: {instead}"
            yield keys | {"observe.noise_scale"}, message


def _pipeline(recipe: Recipe) -> Iterator[Contradiction]:
    model, layout = recipe.model, Layout.from_recipe(recipe.layout)
    if any({"schedule", "virtual_stages"} & names for names, _ in problems(layout)):
        return  # said already
    a_rank = stages_of_a_rank(layout)
    if layout.pp * a_rank > model.layers:
        name = "layout.virtual_stages" if layout.virtual_stages == a_rank else f"{layout.schedule}'s"
        fitting = max(1, model.layers // a_rank)
        yield (
            {"model.layers", "layout.pp", "layout.virtual_stages", "layout.schedule"},
            f"layout.pp = {layout.pp} x {name} {a_rank} = {layout.pp * a_rank} stages, more than model.layers = "
            f"{model.layers}: each has at least one. Nearest valid: layout.pp = {fitting}",
        )
