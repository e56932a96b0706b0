"""AdamW (arXiv 1711.05101), whose weight decay is decoupled, and Adam (arXiv 1412.6980), which adds it to the gradient:
fused kernels over the fp32 master weights."""

from dataclasses import replace

from fivefold.optim.card import OptimizerCard, OptimizerState, fused

MOMENTS = (OptimizerState("exp_avg"), OptimizerState("exp_avg_sq"))
ADAMW = OptimizerCard(
    "adamw",
    source="arXiv 1711.05101",
    build=fused("AdamW", "fivefold.kernels.adamw"),
    fields={"betas": (0.9, 0.95), "eps": 1e-8},
    states=MOMENTS,
    counts=True,
    second_moment="exp_avg_sq",
    finds_largest=True,
    width_power=1.0,
)
CARDS = (
    ADAMW,
    replace(
        ADAMW,
        name="adam",
        source="arXiv 1412.6980",
        build=fused("Adam"),
        finds_largest=False,
        width_power=None,
    ),
)
