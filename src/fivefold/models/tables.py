"""Names and shapes of the parameters of layers that architectures share, for the cards. No torch."""

from __future__ import annotations

from fivefold.models.section import ModelSection
from fivefold.sharding.parts import Shape


def under(prefix: str, table: dict[str, Shape]) -> dict[str, Shape]:
    """Prefixes the names, for the parameters of a module called `prefix`."""
    return {f"{prefix}.{name}": shape for name, shape in table.items()}


def rms_norm(D: int) -> dict[str, Shape]:
    return {"weight": (D,)}


def unit_rms_norm(D: int) -> dict[str, Shape]:
    return {"delta": (D,)}


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


def attention(
    model: ModelSection, bias: bool, out_bias: bool = True, gated: bool = False
) -> dict[str, Shape]:
    """Parameters of attention. Rows of `qkv`: query heads, key heads, value heads, with `gated` those of the query
    heads' gates. out_bias: of `out`, with `bias`."""
    D, d, H, K = model.dim, model.head_width, model.heads, model.kv_heads or model.heads
    rows = d * (H + 2 * K + H * gated)
    return linear("qkv", D, rows, bias) | linear("out", d * H, D, bias and out_bias)


def ahead(D: int) -> dict[str, Shape]:
    """Parameters that a block of multi-token prediction has besides."""
    norms = {name: under(name, rms_norm(D)) for name in ("token_norm", "hidden_norm", "norm")}
    return norms["token_norm"] | norms["hidden_norm"] | linear("project", 2 * D, D, False) | norms["norm"]


def swiglu(D: int, F: int) -> dict[str, Shape]:
    """Parameters of SwiGLU. Rows of `gate_up`: the gate, then up."""
    return linear("gate_up", D, 2 * F, bias=False) | linear("down", F, D, bias=False)


def gelu(D: int, F: int) -> dict[str, Shape]:
    return linear("up", D, F, bias=True) | linear("down", F, D, bias=True)


def linear(name: str, inputs: int, outputs: int, bias: bool) -> dict[str, Shape]:
    weight: dict[str, Shape] = {f"{name}.weight": (outputs, inputs)}
    return weight | {f"{name}.bias": (outputs,)} if bias else weight
