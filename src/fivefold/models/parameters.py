"""Names, shapes and cuts of the layers that architectures share, for their cards. No torch.

Sizes: D model, d head, K key-value heads, F feed-forward, V vocabulary.
"""

from __future__ import annotations

from fivefold.models.section import ModelSection
from fivefold.sharding.parts import Cut, Shape


def under(prefix: str, table: dict[str, Shape]) -> dict[str, Shape]:
    """Prefixes the names, for the parameters of a module called `prefix`."""
    return {f"{prefix}.{name}": shape for name, shape in table.items()}


def rms_norm(D: int) -> dict[str, Shape]:
    return {"weight": (D,)}


def layer_norm(D: int) -> dict[str, Shape]:
    return {"weight": (D,), "bias": (D,)}


def block(
    norm: dict[str, Shape], attention: dict[str, Shape], mlp: dict[str, Shape], post_norm: bool = False
) -> dict[str, Shape]:
    """Parameters of a block: two sublayers, each with a norm before it (post_norm: behind it)."""
    table: dict[str, Shape] = {}
    for half in ({"norm1": norm, "attention": attention}, {"norm2": norm, "mlp": mlp}):
        for name in reversed(half) if post_norm else half:
            table |= under(name, half[name])
    return table


def attention(model: ModelSection, bias: bool) -> dict[str, Shape]:
    """Parameters of attention. Rows of `qkv`: query heads, key heads, value heads."""
    D, d, H, K = model.dim, model.head_width, model.heads, model.kv_heads or model.heads
    return linear("qkv", D, d * (H + 2 * K), bias) | linear("out", d * H, D, bias)


def swiglu(D: int, F: int) -> dict[str, Shape]:
    """Parameters of SwiGLU. Rows of `gate_up`: the gate, then up."""
    return linear("gate_up", D, 2 * F, bias=False) | linear("down", F, D, bias=False)


def gelu(D: int, F: int) -> dict[str, Shape]:
    return linear("up", D, F, bias=True) | linear("down", F, D, bias=True)


def linear(name: str, inputs: int, outputs: int, bias: bool) -> dict[str, Shape]:
    weight: dict[str, Shape] = {f"{name}.weight": (outputs, inputs)}
    return weight | {f"{name}.bias": (outputs,)} if bias else weight


def cut_of(name: str, shape: Shape, model: ModelSection) -> Cut | None:
    """The cut of a parameter of these layers under tensor and expert parallelism; None: it is whole on every rank.

    name: without "blocks.N.".
    """
    d, H, K = model.head_width, model.heads, model.kv_heads or model.heads
    match name:
        case "embed.weight" | "head.weight" | "head_bias":
            return Cut("vocab", 0, shape[:1])
        case "attention.qkv.weight" | "attention.qkv.bias":
            return Cut("column", 0, (d * H, d * K, d * K))
        case "mlp.gate_up.weight":
            return Cut("column", 0, (shape[0] // 2,) * 2)
        case "mlp.experts.gate_up":
            columns = Cut("column", 1, (shape[1] // 2,) * 2, whole_tokens=True)
            return Cut("expert", 0, shape[:1], within=columns)
        case "mlp.experts.down":
            return Cut("expert", 0, shape[:1], within=Cut("row", 2, shape[2:], whole_tokens=True))
        case "mlp.shared.gate_up.weight":
            return Cut("column", 0, (shape[0] // 2,) * 2, whole_tokens=True)
        case "mlp.shared.down.weight":
            return Cut("row", 1, shape[1:], whole_tokens=True)
        case "mlp.up.weight" | "mlp.up.bias":
            return Cut("column", 0, shape[:1])
        case "attention.out.weight" | "mlp.down.weight":
            return Cut("row", 1, shape[1:])
    return None


PARTS = {
    "embed_positions": "positions",
    "embed": "embedding",
    "attention": "attention",
    "mlp.router": "router",
    "mlp.experts": "experts",
    "mlp.shared": "shared experts",
    "mlp": "MLP",
}
"""Parts of a model by the beginning of a parameter's name. All norms are one part, wherever they are."""


def part_of(name: str) -> str:
    """The part of the model that a parameter belongs to, in a reader's words."""
    local = name.split(".", 2)[-1] if name.startswith("blocks.") else name
    if "norm" in local:
        return "norms"
    known = (part for prefix, part in PARTS.items() if local.startswith(prefix))
    return next(known, local.partition(".")[0] if local != name else "output layer")
