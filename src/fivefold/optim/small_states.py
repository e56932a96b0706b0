"""AdamW with moments of 8 bits (arXiv 2110.02861): 2.03 bytes per parameter instead of 8. And Adafactor (arXiv
1804.04235): of a matrix's squared gradients only the averages of rows and columns are kept.

AdamW: each row of a matrix is cut into blocks of 256 elements. A block has its largest value in fp32, and for each
element a code of 8 bits. Codes follow the paper's dynamic map, which has values close together near zero. Blocks stay
within rows, so ranks that keep rows keep whole blocks. Vectors have fp32 moments.

Adafactor: an update whose root mean square is beyond LONGEST is shortened. The learning rate is the recipe's, not
relative to the size of the weights. Experts are stacks of matrices or vectors, each with its own averages and root mean
square; so are several in one parameter. Otherwise it is torch.optim.Adafactor, which waits for the device twice per
parameter.
"""

from __future__ import annotations

from fivefold.optim.adamw import ADAMW
from fivefold.optim.card import CODES, OptimizerCard, OptimizerState, Tensor, Update
from fivefold.schedules.compression import dynamic
from fivefold.sharding.parts import Shape, is_matrix

BLOCK = 256
EPS = 2.0**-23
DECAY = -0.8  # the averages take in a share of t^DECAY of the squared gradients in step t
LONGEST = 1.0  # root mean square of an update


def adamw8bit(g: Tensor, states: dict[str, Tensor], u: Update) -> Tensor:
    (b1, b2), t = u.fields["betas"], u.step
    signed, unsigned = (u.constant(dynamic(signs), g.device) for signs in (True, False))
    mean = decode(states["mean_codes"], states["mean_scales"], signed).lerp_(g, 1 - b1)
    square = decode(states["square_codes"], states["square_scales"], unsigned)
    square.mul_(b2).addcmul_(g, g, value=1 - b2)
    encode(mean, states["mean_codes"], states["mean_scales"], signed)
    encode(square, states["square_codes"], states["square_scales"], unsigned, lowest=1)
    return mean.div_(1 - b1**t).div_(square.div_(1 - b2**t).sqrt_().add_(u.fields["eps"]))


def decode(codes: Tensor, scales: Tensor, table: Tensor) -> Tensor:
    """fp32 values, of the codes' shape. scales: (..., blocks). table: (256)."""
    values = table.take(codes.long())
    return values.mul_(scales.repeat_interleave(BLOCK, -1)[..., : codes.shape[-1]])


def encode(x: Tensor, codes: Tensor, scales: Tensor, table: Tensor, lowest: int = 0) -> None:
    """Writes the nearest codes of x, from `lowest` on, and the largest value of each block. Without signs nothing
    becomes 0: an update divides by its root."""
    import torch

    blocks = torch.nn.functional.pad(x, (0, -x.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
    scales.copy_(blocks.abs().amax(-1))
    shares = (blocks / scales.clamp(min=1e-30).unsqueeze(-1)).flatten(-2)[..., : x.shape[-1]].contiguous()
    nearest = torch.bucketize(shares, (table[1:] + table[:-1]) / 2)
    codes.copy_(nearest.clamp_(min=lowest))


def _scales(shape: Shape) -> Shape:
    return (*shape[:-1], -(-shape[-1] // BLOCK))


def adafactor(g: Tensor, states: dict[str, Tensor], u: Update) -> Tensor:
    weight = u.step**DECAY
    dims = (-1,) if "variance" in states else (-2, -1)  # of a vector or a matrix, of which g may be a stack
    if "variance" in states:
        variance = states["variance"].lerp_(g.square(), weight.float()).clone()
    else:  # (..., r, 1) x (..., 1, c)
        rows = states["rows"].lerp_(g.square().mean(-1, keepdim=True), weight.float())
        columns = states["columns"].lerp_(g.square().mean(-2, keepdim=True), weight.float())
        variance = (rows @ columns).div_(rows.mean(-2, keepdim=True).clamp(min=EPS))
    direction = variance.clamp_(min=EPS * EPS).rsqrt_().mul_(g)
    size = direction.square().mean(dims, keepdim=True).sqrt()
    return direction.div_((size / LONGEST).clamp_(min=1.0))


CARDS = (
    OptimizerCard(
        "adamw8bit",
        source="arXiv 2110.02861",
        rule=adamw8bit,
        fields=ADAMW.fields,
        states=(
            OptimizerState("mean_codes", CODES),
            OptimizerState("mean_scales", shape=_scales),
            OptimizerState("square_codes", CODES),
            OptimizerState("square_scales", shape=_scales),
        ),
        counts=True,
        second_moment="exp_avg_sq",
        needs="rows",
        applies=lambda name, shape: len(shape) > 1,
        width_power=1.0,
        rest=ADAMW,
        jumps="rounding may choose the next code",
        reads=5.0,
    ),
    OptimizerCard(
        "adafactor",
        source="arXiv 1804.04235",
        rule=adafactor,
        states=(
            OptimizerState("rows", shape=lambda shape: (*shape[:-1], 1), applies=is_matrix),
            OptimizerState("columns", shape=lambda shape: (*shape[:-2], 1, shape[-1]), applies=is_matrix),
            OptimizerState("variance", applies=lambda name, shape: not is_matrix(name, shape)),
        ),
        counts=True,
        needs="matrices",
        reads=4.0,
    ),
)
