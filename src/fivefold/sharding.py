"""What parameters a model has and how each is cut between ranks, as data. No torch.

`parameters` lists names and shapes; `cuts` says which of them tensor and expert parallelism cut, and along which
dim. The trainer builds its shards from these tables, the checkpoint places them by them, the planner counts them.

The part of a parameter that a rank holds is written as `Ranges`: for each dim the spans [start, stop) of the whole
that it has, in the order in which it has them. A fused matrix (query, key and value heads in one) is cut section by
section, so a rank's rows come from several spans.

Sizes: D model, H heads, K key-value heads, d head, F feed-forward, V vocabulary, T sequence, L layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any

from fivefold.layout import Layout, index_in, stages_of_a_rank
from fivefold.recipe.count import MASKED_SHARE
from fivefold.recipe.schema import ModelSection
from fivefold.schedules.pipeline import SCHEDULES, cut, place

Shape = tuple[int, ...]
Span = tuple[int, int]
Ranges = tuple[tuple[Span, ...], ...]
TIED = "embed.weight"
"""The parameter that the output layer shares where embeddings are tied."""


@dataclass(frozen=True)
class Cut:
    """How a parameter is divided: `axis` of the mesh, `dim` of the tensor; each section of the dim (their sizes
    sum to it) is divided evenly by itself.

    kind: "column" (output features), "row" (input features), "vocab" (rows of the vocabulary), "expert".
    """

    kind: str
    dim: int
    sections: tuple[int, ...]

    @property
    def axis(self) -> str:
        return "ep" if self.kind == "expert" else "tp"


def parameters(model: ModelSection) -> dict[str, Shape]:
    """Names and shapes of a resolved model's parameters, in the module's order."""
    V, D, F, T = model.vocab_size or 0, model.dim, model.ffn_dim or 0, model.seq_len
    found: dict[str, Shape] = {"head_bias": (V,)} if model.arch == "bert" else {}
    found["embed.weight"] = (V, D)
    if model.arch in ("gpt2", "bert"):
        found["embed_positions.weight"] = (T, D)
    if model.arch == "bert":
        found |= {"embed_types.weight": (2, D)} | _affine("embed_norm", D)
    for i in range(model.layers):
        found |= {f"blocks.{i}.{name}": shape for name, shape in _block(model, F, i).items()}
    if model.arch == "bert":
        found |= {"transform.weight": (D, D), "transform.bias": (D,)}
    found |= {"norm.weight": (D,)} if model.arch in ("llama", "moe") else _affine("norm", D)
    if not model.tie_embeddings:
        found["head.weight"] = (V, D)
    return found


def _block(model: ModelSection, F: int, number: int) -> dict[str, Shape]:
    D = model.dim
    qkv = D + 2 * (D // model.heads) * (model.kv_heads or model.heads)
    if model.arch in ("llama", "moe"):
        mixed = model.arch == "moe" and number >= model.dense_layers
        mlp = _mixture(model) if mixed else {"gate_up.weight": (2 * F, D), "down.weight": (D, F)}
        return {
            "norm1.weight": (D,),
            "attention.qkv.weight": (qkv, D),
            "attention.out.weight": (D, D),
            "norm2.weight": (D,),
        } | {f"mlp.{name}": shape for name, shape in mlp.items()}
    norm1, norm2 = _affine("norm1", D), _affine("norm2", D)
    attention = {"qkv.weight": (qkv, D), "qkv.bias": (qkv,), "out.weight": (D, D), "out.bias": (D,)}
    attention = {f"attention.{name}": shape for name, shape in attention.items()}
    mlp = {"mlp.up.weight": (F, D), "mlp.up.bias": (F,), "mlp.down.weight": (D, F), "mlp.down.bias": (D,)}
    if model.arch == "bert":  # post-norm: the norms come behind
        return attention | norm1 | mlp | norm2
    return norm1 | attention | norm2 | mlp


def _mixture(model: ModelSection) -> dict[str, Shape]:
    """Router, routed experts (each SwiGLU: gate and up in one matrix, down), shared experts as one wide SwiGLU."""
    D, E, F, shared = model.dim, model.experts or 0, model.expert_ffn_dim or 0, model.shared_experts
    found: dict[str, Shape] = {
        "router.weight": (E, D),
        "experts.gate_up": (E, 2 * F, D),
        "experts.down": (E, D, F),
    }
    if shared:
        found |= {"shared.gate_up.weight": (2 * shared * F, D), "shared.down.weight": (D, shared * F)}
    return found


def _affine(name: str, D: int) -> dict[str, Shape]:
    return {f"{name}.weight": (D,), f"{name}.bias": (D,)}


def cuts(model: ModelSection) -> dict[str, Cut]:
    """Each parameter that is cut, and how. The others are whole on every rank."""
    found = {}
    for name, shape in parameters(model).items():
        cut = _cut(name.split(".", 2)[-1] if name.startswith("blocks.") else name, shape, model)
        if cut is not None:
            found[name] = cut
    return found


def _cut(name: str, shape: Shape, model: ModelSection) -> Cut | None:
    """name: without "blocks.N."."""
    d, K = model.dim // model.heads, model.kv_heads or model.heads
    match name:
        case "embed.weight" | "head.weight" | "head_bias":
            return Cut("vocab", 0, shape[:1])
        case "attention.qkv.weight" | "attention.qkv.bias":
            return Cut("column", 0, (model.dim, d * K, d * K))
        case "mlp.gate_up.weight":
            return Cut("column", 0, (shape[0] // 2,) * 2)
        case "mlp.experts.gate_up" | "mlp.experts.down":
            return Cut("expert", 0, shape[:1])
        case "mlp.up.weight" | "mlp.up.bias":
            return Cut("column", 0, shape[:1])
        case "attention.out.weight" | "mlp.down.weight":
            return Cut("row", 1, shape[1:])
    return None


@dataclass(frozen=True)
class Part:
    """What a rank holds of a parameter.

    shape: of the whole. computes: the part it computes with. keeps: the part of it whose master weight and optimizer
    state it keeps; the same, unless ZeRO shares states. owned: of all ranks that keep this part, this one counts it in
    norms and writes it to checkpoints, so that every element is counted once.
    """

    shape: Shape
    computes: Ranges
    keeps: Ranges
    owned: bool
    expert: bool = False


def parts(model: ModelSection, layout: Layout, rank: int) -> dict[str, Part]:
    """What a rank holds of each parameter, if every stage of the pipeline were its own."""
    table = cuts(model)
    return {name: _part(shape, table.get(name), layout, rank) for name, shape in parameters(model).items()}


def held(model: ModelSection, layout: Layout, rank: int) -> dict[str, Part]:
    """What a rank holds of each parameter of its own pipeline stages, in the module's order. A tied embedding is on the
    first and on the last stage; the first owns it."""
    table, mine = parts(model, layout, rank), stages_of(layout, index_in(layout, "pp", rank))
    by_stage = stage_parameters(model, layout)
    names = {name for stage in mine for name in by_stage[stage]}
    owned = {name for stage in mine for name in by_stage[stage] if not _again(name, stage)}
    return {n: p if n in owned else replace(p, owned=False) for n, p in table.items() if n in names}


def stages_of(layout: Layout, pp_index: int) -> list[int]:
    """The pipeline stages of the ranks with this index on the pp axis."""
    if layout.pp == 1:
        return [0]
    rank_of = place(SCHEDULES[layout.schedule].placement, layout.pp, stages_of_a_rank(layout))
    return [stage for stage, owner in enumerate(rank_of) if owner == pp_index]


def stage_blocks(model: ModelSection, layout: Layout) -> tuple[range, ...]:
    """The blocks of each pipeline stage: cut as evenly as possible, in FLOPs; embedding and head count."""
    hashed: Any = model  # frozen: pydantic gives it a hash
    return _stage_blocks(hashed, layout.pp * stages_of_a_rank(layout))


@lru_cache(maxsize=1024)
def _stage_blocks(model: Any, stages: int) -> tuple[range, ...]:
    blocks, first, last = _costs(model)
    return cut(blocks, stages, first, last)


@lru_cache(maxsize=64)
def _costs(model: Any) -> tuple[list[float], float, float]:
    return stage_costs(model)


def stage_costs(model: ModelSection) -> tuple[list[float], float, float]:
    """FLOPs a token, forward and backward, of each block, of what comes before them and of what comes after."""
    attention = 6.0 * model.dim * model.seq_len * (2 if model.arch == "bert" else 1)
    blocks, head = [attention] * model.layers, 0.0
    for name, shape in parameters(model).items():
        product = 6.0 * math.prod(shape) if len(shape) > 1 else 0.0
        if ".experts." in name:  # of which a token uses some
            product *= (model.experts_per_token or 0) / (model.experts or 1)
        if name.startswith("blocks."):
            blocks[int(name.split(".")[1])] += product
        elif not name.startswith("embed") or (name == TIED and model.tie_embeddings):
            head += product
    embedding = 12.0 * model.dim  # no product: a row is read, and its gradient added
    return blocks, embedding, head * (MASKED_SHARE if model.arch == "bert" else 1.0)


def stage_parameters(model: ModelSection, layout: Layout) -> list[list[str]]:
    """Names of the parameters of each pipeline stage: embeddings on the first, blocks where they are cut, the rest on
    the last, which has a tied embedding, too."""
    blocks = stage_blocks(model, layout)
    stage_of = {str(block): stage for stage, part in enumerate(blocks) for block in part}
    found: list[list[str]] = [[] for _ in blocks]
    for name in parameters(model):
        if name.startswith("blocks."):
            found[stage_of[name.split(".")[1]]].append(name)
        else:
            found[0 if name.startswith("embed") else -1].append(name)
    if model.tie_embeddings and len(blocks) > 1:
        found[-1].append(TIED)
    return found


def _again(name: str, stage: int) -> bool:
    """Whether this is the last stage's copy of a tied embedding."""
    return name == TIED and stage > 0


def _part(shape: Shape, cut: Cut | None, layout: Layout, rank: int) -> Part:
    computes, expert = whole(shape), cut is not None and cut.kind == "expert"
    ranks = 1 if cut is None else layout.ep if expert else layout.tp
    if cut is not None and ranks > 1:
        computes = divide(computes, cut, index_in(layout, cut.axis, rank), ranks)
    first = {name: index_in(layout, name, rank) == 0 for name in ("tp", "replicate", "batch", "edp")}
    owned = first["tp"] or (cut is not None and cut.axis == "tp")
    if not layout.zero:
        return Part(shape, computes, computes, owned and first["edp" if expert else "batch"], expert)
    shard = layout.dp_shard * layout.cp // (layout.ep if expert else 1)
    dim = shard_dim(local_shape(computes), shard)
    start, stop = chunk(
        local_shape(computes)[dim], index_in(layout, "eshard" if expert else "shard", rank), shard
    )
    return Part(shape, computes, narrow(computes, dim, start, stop), owned and first["replicate"], expert)


def token_spans(layout: Layout, T: int, index: int) -> list[Span]:
    """The parts [start, stop) of a sequence of T tokens that rank `index` of the context axis has, in order: a chunk
    from the front and its mirror image from the back, or one chunk for `ulysses`, where all see equally much."""
    c = layout.cp
    if layout.cp_method == "ulysses":
        return [(T // c * index, T // c * (index + 1))]
    n = T // (2 * c)
    return [(n * i, n * (i + 1)) for i in (index, 2 * c - 1 - index)]


def shard_dim(shape: Shape, ranks: int) -> int:
    """The dim along which ZeRO divides a parameter, of this shape on a rank, between `ranks`: its rows. Experts, which
    are a stack of matrices, are divided by experts where that comes out even; else by the rows of each matrix, if that
    does: few experts over many ranks would be padding for the most part."""
    return 1 if len(shape) > 2 and shape[0] % ranks and shape[1] % ranks == 0 else 0


def chunk(size: int, index: int, ranks: int) -> Span:
    """Rows of shard `index` when `size` rows are divided as FSDP2 does: chunks of equal size, rounded up, of which
    the last may be smaller or empty."""
    rows = -(-size // ranks)
    return min(size, rows * index), min(size, rows * (index + 1))


def whole(shape: Shape) -> Ranges:
    """All of a parameter."""
    return tuple(((0, size),) for size in shape)


def divide(ranges: Ranges, cut: Cut, index: int, ranks: int) -> Ranges:
    """The part of rank `index` of `ranks` of a parameter that is whole along the cut's dim."""
    assert len(ranges[cut.dim]) == 1, "cut before"
    spans, start = [], 0
    for size in cut.sections:
        assert size % ranks == 0, f"section {size} over {ranks} ranks"
        spans.append((start + size // ranks * index, start + size // ranks * (index + 1)))
        start += size
    assert start == ranges[cut.dim][0][1], "the sections are the dim"
    return (*ranges[: cut.dim], joined(spans), *ranges[cut.dim + 1 :])


def narrow(ranges: Ranges, dim: int, start: int, stop: int) -> Ranges:
    """Elements start .. stop, as the holder counts them, along a dim."""
    spans, offset = [], 0
    for first, last in ranges[dim]:
        a, b = max(start - offset, 0), min(stop - offset, last - first)
        if a < b:
            spans.append((first + a, first + b))
        offset += last - first
    return (*ranges[:dim], tuple(spans), *ranges[dim + 1 :])


def local_shape(ranges: Ranges) -> Shape:
    return tuple(sum(stop - start for start, stop in spans) for spans in ranges)


def size_of(ranges: Ranges) -> int:
    """Number of elements."""
    return math.prod(local_shape(ranges))


def boxes(ranges: Ranges) -> Iterator[tuple[tuple[slice, ...], tuple[Span, ...]]]:
    """The rectangular pieces of a part: (where in the local tensor, which box of the whole)."""
    placed = []
    for spans in ranges:
        offset, dim = 0, []
        for start, stop in spans:
            dim.append((slice(offset, offset + stop - start), (start, stop)))
            offset += stop - start
        placed.append(dim)
    for combination in product(*placed):
        yield tuple(where for where, _ in combination), tuple(box for _, box in combination)


def joined(spans: list[Span]) -> tuple[Span, ...]:
    """Neighbouring spans as one."""
    out: list[Span] = []
    for start, stop in spans:
        if out and out[-1][1] == start:
            out[-1] = (out[-1][0], stop)
        else:
            out.append((start, stop))
    return tuple(out)
