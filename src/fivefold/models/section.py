"""The `[model]` section of a recipe: the architecture and its sizes. No torch.

Sizes: T sequence, D model, H heads, K key-value heads, F feed-forward, V vocabulary, L layers, E experts.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from fivefold.models import ARCHITECTURES
from fivefold.precision import MOST_IDS

T = TypeVar("T")
if TYPE_CHECKING:
    Arch = str
else:
    Arch = Literal[ARCHITECTURES]


# Limits, several times beyond what anybody trains. Whoever reads a recipe or a config.json may do work in proportion.
MOST_LAYERS = 4096
MOST_DEPTH = 1024
WIDEST = 1 << 20
"""Features, heads."""
LONGEST = 1 << 27
"""Tokens of a sequence."""
MOST_EXPERTS = 1 << 14
MOST_AHEAD = 64
"""Modules of multi-token prediction."""
LARGEST = 1 << 53
"""Any other whole number: so a float holds it exactly."""
_PHASE = "0*[1-9][0-9]{0,8}:0*[1-9][0-9]{0,14}"
RAMP = rf"^({_PHASE}(\+{_PHASE})*)?$"
"""A ramp, such as `4:100+8:200`: 4 in 100 steps, then 8 in 200."""


def phases(ramp: str) -> list[tuple[int, int]]:
    """[(value, number of steps)] of a ramp."""
    pairs = (phase.split(":") for phase in ramp.split("+") if phase)
    return [(int(value), int(steps)) for value, steps in pairs]


class Section(BaseModel):
    """A section of a recipe: strict types, no unknown keys, no infinities, no change after creation.

    `fivefold check --explain` prints the docstring under a field.
    """

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


def _of(fact: str, default: Any, **rules: Any) -> Any:
    """A field that only models have whose cards have this fact."""
    return Field(default=default, json_schema_extra={"fact": fact}, **rules)


class ModelSection(Section):
    """Fields that no card gives a default for have one here. `rules.meaning` adds to the docstring of a field which
    architectures have it, and their defaults."""

    if TYPE_CHECKING:

        def __hash__(self) -> int: ...  # frozen: pydantic makes it

    arch: Arch = "llama"
    """Architecture."""
    layers: int = Field(default=6, ge=1, le=MOST_LAYERS)
    """L: number of transformer blocks."""
    dim: int = Field(default=384, ge=1, le=WIDEST)
    """D: width of the model. Must be divisible by `heads`, unless `head_dim` is set."""
    heads: int = Field(default=6, ge=1, le=WIDEST)
    """H: number of query heads."""
    kv_heads: int | None = Field(default=None, ge=1, le=WIDEST)
    """K: number of key-value heads (grouped-query attention, arXiv 2305.13245). It must divide `heads`."""
    head_dim: int | None = _of("free_heads", None, ge=1, le=WIDEST)
    """d: width of a head, if it is not D / H."""
    attention_bias: bool = _of("attention_biases", False)
    """The projections of attention have biases."""
    query_rank: int | None = _of("latent_attention", None, ge=0, le=WIDEST)
    """Width of the latent vector that a token's queries are made from (MLA, arXiv 2405.04434). 0: they are made from
    the block's input itself."""
    kv_rank: int | None = _of("latent_attention", None, ge=1, le=WIDEST)
    """Width of the latent vector that a token's keys and values are made from."""
    nope_dim: int | None = _of("latent_attention", None, ge=1, le=WIDEST)
    """Width of the part of each query and key head without positions."""
    rope_dim: int | None = _of("latent_attention", None, ge=2, le=WIDEST)
    """Width of the part with rotary positions. All heads of a token share this part of the key."""
    value_dim: int | None = _of("latent_attention", None, ge=1, le=WIDEST)
    """Width of a value head. At most `nope_dim + rope_dim`."""
    ffn_dim: int | None = Field(default=None, ge=1, le=WIDEST)
    """F: inner width of the feed-forward layer (with experts: of the `dense_layers`)."""
    vocab_size: int | None = Field(default=None, ge=2, le=MOST_IDS)
    """V: size of the vocabulary. Unset: the tokenizer's, rounded up to a multiple of 64."""
    seq_len: int = Field(default=256, ge=2, le=LONGEST)
    """T: tokens per training sequence."""
    tie_embeddings: bool | None = None
    """The output layer shares the embedding's weight."""
    norm_eps: float | None = Field(default=None, gt=0)
    """Added to the variance in RMSNorm and LayerNorm."""
    rope_theta: float = _of("rotary", 10000.0, gt=0)
    """Base of the rotary position embedding (arXiv 2104.09864)."""
    rope_factor: float = _of("rotary", 1.0, ge=1)
    """Scaling of rotary positions for long contexts: wavelengths of more than `rope_context / rope_low` tokens are
    stretched by this factor, those of less than `rope_context / rope_high` are not, those between in part. 1: none."""
    rope_scaling: Literal["llama3", "yarn", "linear"] = _of("rotary", "llama3")
    """Only with `rope_factor`. Share of the wavelengths between the two limits: linear in the turns within the context
    (`llama3`, arXiv 2407.21783), or in the number of the rotated pair (`yarn`, arXiv 2309.00071; there `rope_high` is
    usually 32). `linear`: all are stretched (arXiv 2306.15595)."""
    rope_mscale: float = _of("rotary", 1.0, ge=0)
    """Only with `rope_scaling = "yarn"`, which multiplies attention's scores by (1 + 0.1 `rope_mscale`
    ln(`rope_factor`)) squared."""
    rope_truncate: bool = _of("rotary", True)
    """Only with `rope_scaling = "yarn"`: the two limits are whole numbers of pairs (gpt-oss: false)."""
    rope_low: float = _of("rotary", 1.0, gt=0)
    """Only with `rope_factor`."""
    rope_high: float = _of("rotary", 4.0, gt=0)
    """Only with `rope_factor`. Above `rope_low`."""
    rope_context: int = _of("rotary", 8192, ge=1, le=LONGEST)
    """Tokens of the context before it was stretched. Only with `rope_factor`."""
    sliding_window: int = _of("windows", 0, ge=0, le=LONGEST)
    """Keys that a query sees, its own the last of them, in blocks with a sliding window (arXiv 2004.05150, 2310.06825).
    0: all earlier ones."""
    window_ramp: str = _of("windows", "", pattern=RAMP, examples=["128:1000+256:2000"])
    """Smaller windows in the first steps: `128:1000+256:2000` has 128 keys in 1000 steps, 256 in the next 2000, and
    `sliding_window` in the others. Plans, and the FLOPs in metrics, count the last one."""
    full_every: int = _of("patterned", 0, ge=0, le=MOST_LAYERS)
    """Every so many blocks one attends to the whole sequence, the last of them (Gemma 3: 6, OLMo 3 and Qwen3-Next: 4,
    gpt-oss: 2). 0: all blocks have the window, or linear attention. With windows only with `sliding_window`."""
    rope_local_theta: float = _of("local_rotation", 0.0, ge=0)
    """Base in blocks with a sliding window, which scaling leaves alone (Gemma 3: 10000). 0: as in the others."""
    score_width: int | None = _of("scaled_scores", None, ge=1, le=WIDEST)
    """Attention's scores are divided by the square root of it (Gemma 2 27B: 144). Unset: the width of a head."""
    score_cap: float = _of("capped", 0.0, ge=0)
    """Attention's scores x become c tanh(x / c) with this c (Gemma 2, arXiv 2408.00118: 50). 0: they stay."""
    logit_cap: float = _of("capped", 0.0, ge=0)
    """So do the model's logits, with this c (Gemma 2: 30). 0: they stay."""
    no_rope_every: int = _of("unrotated", 0, ge=0, le=MOST_LAYERS)
    """Every so many blocks one has no positions, the last of them (SmolLM3: 4; NoPE, arXiv 2305.19466). 0: none."""
    rotary_dim: int | None = _of("partly_rotated", None, ge=2, le=WIDEST)
    """Features of a query head that rotary positions turn. Unset: all."""
    linear_heads: int | None = _of("linear_attention", None, ge=1, le=WIDEST)
    """Value heads of blocks with linear attention (gated delta rule, arXiv 2412.06464), each with its own state."""
    linear_key_heads: int | None = _of("linear_attention", None, ge=1, le=WIDEST)
    """Query and key heads there. Must divide `linear_heads`."""
    linear_key_dim: int | None = _of("linear_attention", None, ge=1, le=WIDEST)
    """Width of a query and of a key head there."""
    linear_value_dim: int | None = _of("linear_attention", None, ge=1, le=WIDEST)
    """Width of a value head there."""
    linear_conv: int = _of("linear_attention", 4, ge=2, le=64)
    """Tokens of the causal convolution of queries, keys and values there."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Probability of dropout on embeddings, attention outputs and feed-forward outputs."""
    freeze: str = ""
    """Parameters that are not trained, by patterns of their names: `embed*, blocks.[0-3].*`. They have no gradient and
    no optimizer state, and lie in the dtype of computation. Usually with `train.init_from`."""
    init_std: float = Field(default=0.02, gt=0)
    """Standard deviation of the initial weights. Projections back into the residual stream get this divided by
    sqrt(2 L) (GPT-2)."""
    zero_init: bool = False
    """The projections back into the residual stream start at zero, so that each block starts as the identity."""
    squared_relu: bool | None = _of("extras", None)
    """The square of ReLU in place of SwiGLU (Primer, arXiv 2109.08668)."""
    value_embeddings: bool | None = _of("extras", None)
    """In each block a token adds a vector of its own to its values (github.com/KellerJordan/modded-nanogpt)."""
    skips: bool | None = _of("extras", None)
    """The n-th block from the end also gets the output of the n-th block, times a learned factor per feature (as in
    U-Net, arXiv 1505.04597)."""
    depth: int | None = Field(default=None, ge=1, le=MOST_DEPTH)
    """One dial for a whole run: sets the fields that its table names, such as `layers`, `dim`, `train.tokens` and
    `optim.lr`, where they are left open. What a shipped recipe says of them gives way to a depth of your own. `fivefold
    check --explain` names the source of each."""
    base_dim: int | None = Field(default=None, ge=1, le=WIDEST)
    """Width at which `init_std` and the learning rates hold as they are given. At other widths they are scaled by mu-P
    (arXiv 2203.03466), so that what was found on a small model holds for a large one; so is weight decay, such that
    rate times decay stays. Heads should have the same width in both. Unset: as given at every width."""
    base_layers: int | None = Field(default=None, ge=1, le=MOST_LAYERS)
    """With `base_dim`: the number of blocks at which they hold as given. In models of other depths, initial weights and
    rates of the projections back into the residual stream are divided by L / `base_layers` (CompleteP, arXiv
    2505.01618). Unset: they depend on the width only."""
    experts: int | None = _of("has_experts", None, ge=1, le=MOST_EXPERTS)
    """E: routed experts per block."""
    experts_per_token: int | None = _of("has_experts", None, ge=1, le=MOST_EXPERTS)
    """Routed experts per token."""
    shared_experts: int | None = _of("has_experts", None, ge=0, le=MOST_EXPERTS)
    """Additional experts that compute every token (DeepSeekMoE, arXiv 2401.06066)."""
    expert_ffn_dim: int | None = _of("has_experts", None, ge=1, le=WIDEST)
    """Inner width of an expert."""
    dense_layers: int = _of("has_experts", 0, ge=0, le=MOST_LAYERS)
    """Number of first blocks with an ordinary feed-forward layer instead of experts."""
    router_score: Literal["softmax", "sigmoid"] | None = _of("has_experts", None)
    """Function from the router's logits to a token's scores: `softmax` (Mixtral), `sigmoid` (DeepSeek-V3)."""
    router_normalize: bool | None = _of("has_experts", None)
    """Divide the scores of a token's experts by their sum."""
    router_scale: float = _of("has_experts", 1.0, gt=0)
    """Factor on the results of the routed experts (DeepSeek-V3: 2.5)."""
    expert_groups: int = _of("has_experts", 1, ge=1, le=MOST_EXPERTS)
    """Groups of experts, of which a token uses only some (DeepSeek-V3: 8). Must divide `experts`."""
    groups_per_token: int = _of("has_experts", 1, ge=1, le=MOST_EXPERTS)
    """Groups of experts that a token uses: those whose two best experts have the highest sum of scores (DeepSeek-V3:
    4)."""
    balance: Literal["aux", "bias", "none"] | None = _of("has_experts", None)
    """Balancing of the experts' load: `aux` (a term of the loss, Switch, arXiv 2101.03961), `bias` (loss-free: a bias
    per expert, added to its scores when experts are chosen, follows the load, arXiv 2408.15664), `none`."""
    aux_loss_weight: float = _of("has_experts", 0.01, ge=0)
    """Weight of the balance term, which is 1 at even load. Only with `balance = "aux"`."""
    balance_scope: Literal["microbatch", "batch"] = _of("has_experts", "microbatch")
    """Tokens whose load the balance term weighs: of the microbatch, or of the whole global batch (arXiv 2501.11873), so
    experts may specialise. That load is the last step's: no microbatch knows the ones behind it. The first step has no
    balance term then. Only with `balance = "aux"`."""
    balance_rate: float = _of("has_experts", 0.001, ge=0)
    """Change of an expert's bias per step. Only with `balance = "bias"`."""
    z_loss_weight: float = _of("has_experts", 0.0, ge=0)
    """Weight of the router z-loss (arXiv 2202.08906; 0.001 there), the mean squared log-sum-exp of the router's logits.
    It keeps them small."""
    mtp_depth: int = _of("multi_token", 0, ge=0, le=MOST_AHEAD)
    """Modules behind the blocks, each with a block of its own, that predict one token further each (multi-token
    prediction, DeepSeek-V3, arXiv 2412.19437, section 2.2). They run in training only. 0: none."""
    mtp_weight: float = _of("multi_token", 0.3, ge=0)
    """Weight of the mean of their losses beside the main one (DeepSeek-V3: 0.3, later 0.1). Only with `mtp_depth`."""
    capacity_factor: float = _of("has_experts", 0.0, ge=0)
    """Maximum load of an expert in training, relative to its even share of a microbatch's tokens. Further tokens skip
    the expert (arXiv 2101.03961). 0: no limit, no token is dropped."""

    @property
    def blocks(self) -> int:
        """Number of all blocks, with those of multi-token prediction. These are the last."""
        return self.layers + self.mtp_depth

    @property
    def head_width(self) -> int:
        """d: width of a query head."""
        if self.nope_dim and self.rope_dim:
            return self.nope_dim + self.rope_dim
        return self.head_dim or self.dim // self.heads

    def window(self, number: int) -> int:
        """The keys that a query sees in a block; 0: all."""
        return 0 if self._full(number) else self.sliding_window

    def linear(self, number: int) -> bool:
        """True if a block of a resolved model has linear attention."""
        return bool(self.linear_heads) and not self._full(number)

    def _full(self, number: int) -> bool:
        """True if `full_every` says that a block attends to the whole sequence."""
        return self.full_every > 0 and (number + 1) % self.full_every == 0

    def ramped(self, step: int) -> int:
        """The windows of a step (0, 1, ...) of training, if they grow; else 0."""
        for window, steps in phases(self.window_ramp):
            if step < steps:
                return window
            step -= steps
        return self.sliding_window if self.window_ramp else 0

    @property
    def ramps(self) -> tuple[tuple[str, str, str], ...]:
        """(key, ramp, what the steps behind it have) of each field that changes over the first steps."""
        return (("model.window_ramp", self.window_ramp, f"model.sliding_window = {self.sliding_window:,}"),)

    @property
    def grown(self) -> ModelSection:
        """The model behind its ramp, which plans price."""
        return self.model_copy(update={"window_ramp": ""}) if self.window_ramp else self

    def rotates(self, number: int) -> bool:
        """True if a block has rotary positions, in models that have them."""
        return not self.no_rope_every or (number + 1) % self.no_rope_every > 0

    @property
    def local(self) -> ModelSection | None:
        """The model as blocks with a window rotate; None: as the others."""
        if not self.rope_local_theta:
            return None
        return self.model_copy(update={"rope_theta": self.rope_local_theta, "rope_factor": 1.0})

    @property
    def rotary_width(self) -> int:
        """Features of a query head that rotary positions turn."""
        return self.rope_dim or self.rotary_dim or self.head_width

    @property
    def score_amplitude(self) -> float:
        """The factor on queries and keys that `score_width` asks for."""
        return (self.head_width / self.score_width) ** 0.25 if self.score_width else 1.0

    @property
    def rope_amplitude(self) -> float:
        """The factor on queries and keys that scaling by YaRN asks for."""
        return 1 + 0.1 * self.rope_mscale * math.log(self.rope_factor) if self.rope_scaling == "yarn" else 1.0


def known(value: T | None) -> T:
    """The value of a field of a resolved model."""
    assert value is not None, "a resolved recipe has every field of [model]"
    return value


def expert_capacity(factor: float, tokens: float, per_token: int, experts: int) -> int:
    """Most rows of an expert by `capacity_factor`: of its even share, and at most one of each token. 0: no limit."""
    return min(math.ceil(tokens), math.ceil(factor * tokens * per_token / experts))


FACTS: dict[str, str] = {
    name: field.json_schema_extra["fact"]  # type: ignore[misc]
    for name, field in ModelSection.model_fields.items()
    if isinstance(field.json_schema_extra, dict)
}
"""Fields that only some architectures have, and the fact of their cards."""
