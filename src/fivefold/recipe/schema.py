"""What to train, as typed data: the sections of a recipe and what each field means.

Every model here is strict (no silent conversion), frozen and closed (an unknown key is an error). The
docstring under a field is what `fivefold check --explain` prints. Sizes: B batch, T sequence, D model,
H heads, K key-value heads, F feed-forward, V vocabulary, L layers, E experts.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Arch = Literal["llama", "gpt2", "bert", "moe"]
Dtype = Literal["fp32", "bf16"]
Beta = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """What all sections share: strict types, no unknown keys, no infinities, no change after creation."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class ModelSection(Section):
    arch: Arch = "llama"
    """Architecture: `llama` (RMSNorm, RoPE, SwiGLU, GQA), `gpt2` (LayerNorm, learned positions, GELU), `bert`
    (bidirectional encoder, masked-language-model loss), `moe` (llama with a mixture of experts for
    feed-forward)."""
    layers: int = Field(default=6, ge=1)
    """L: number of transformer blocks."""
    dim: int = Field(default=384, ge=1)
    """D: width of the model. Must be divisible by `heads`."""
    heads: int = Field(default=6, ge=1)
    """H: number of query heads."""
    kv_heads: int | None = Field(default=None, ge=1)
    """K: number of key-value heads (grouped-query attention, arXiv 2305.13245); must divide `heads`.
    Unset: as many as `heads`. Only `llama` and `moe` have fewer."""
    ffn_dim: int | None = Field(default=None, ge=1)
    """F: inner width of the feed-forward layer (of the `dense_layers`, in `moe`). Unset: 4 D for `gpt2` and
    `bert`; for `llama` and `moe` 8/3 D, rounded up to a multiple of 64."""
    vocab_size: int | None = Field(default=None, ge=2)
    """V: size of the vocabulary. Unset: the tokenizer's, rounded up to a multiple of 64."""
    seq_len: int = Field(default=256, ge=2)
    """T: tokens in a training sequence."""
    tie_embeddings: bool | None = None
    """The output layer shares the embedding's weight. Unset: true for `gpt2` and `bert`, else
    false."""
    norm_eps: float | None = Field(default=None, gt=0)
    """Added to the variance in RMSNorm and LayerNorm. Unset: 1e-5, but 1e-12 for `bert`."""
    rope_theta: float = Field(default=10000.0, gt=0)
    """Base of the rotary position embedding (arXiv 2104.09864). `llama` and `moe` only."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Probability of dropout on embeddings, attention outputs and feed-forward outputs."""
    init_std: float = Field(default=0.02, gt=0)
    """Standard deviation of the initial weights; the projections back into the residual stream get this
    divided by sqrt(2 L) (GPT-2)."""
    experts: int | None = Field(default=None, ge=1)
    """E: routed experts of a block (`moe` only, like all fields from here on). Unset: 8."""
    experts_per_token: int | None = Field(default=None, ge=1)
    """Routed experts that compute a token. Unset: 2, or 1 where there is one expert."""
    shared_experts: int = Field(default=0, ge=0)
    """Experts that compute every token besides (DeepSeekMoE, arXiv 2401.06066)."""
    expert_ffn_dim: int | None = Field(default=None, ge=1)
    """Inner width of an expert. Unset: `ffn_dim`."""
    dense_layers: int = Field(default=0, ge=0)
    """The first blocks that have an ordinary feed-forward layer instead of experts."""
    router_score: Literal["softmax", "sigmoid"] = "softmax"
    """What makes a token's scores of the experts out of the router's logits: `softmax` (Mixtral), `sigmoid`
    (DeepSeek-V3)."""
    router_normalize: bool | None = None
    """The scores of a token's experts are divided by their sum. Unset: true, but false with one expert a token:
    a score divided by itself teaches the router nothing."""
    balance: Literal["aux", "bias", "none"] = "aux"
    """What keeps the load of the experts even: `aux` (a term of the loss, Switch, arXiv 2101.03961), `bias`
    (loss-free: a number an expert, added to its scores when experts are chosen, follows the load: arXiv
    2408.15664), `none`."""
    aux_loss_weight: float = Field(default=0.01, ge=0)
    """Weight of the load-balance term, which is 1 at even load. With `balance = "aux"` only."""
    balance_rate: float = Field(default=0.001, ge=0)
    """Change of an expert's number in a step. With `balance = "bias"` only."""
    z_loss_weight: float = Field(default=0.0, ge=0)
    """Weight of the mean squared logarithm of the sum of exponentials of the router's logits, which keeps them
    small (router z-loss, arXiv 2202.08906; 0.001 there)."""
    capacity_factor: float = Field(default=0.0, ge=0)
    """An expert computes at most this many times its even share of a microbatch's tokens in training; those
    beyond it pass by the expert (arXiv 2101.03961). 0: no limit, none is dropped."""


class DataSection(Section):
    source: str = "stdlib"
    """Where the text comes from: `stdlib` (the Python standard library's own source on this machine), a file,
    folder or glob of .txt .md .py .jsonl .parquet, `tokens:PATH` (uint16/uint32 token files: .bin of nanoGPT
    or llm.c, .npy), `hf:NAME` or `hf:NAME:CONFIG` (a Hugging Face data set; needs the extra `hf`).
    Relative paths are relative to the current folder, not to the recipe's."""
    tokenizer: str = "bpe:4096"
    """`bpe:N` (byte-level BPE of N tokens, trained on the training text), `bytes`, `chars`, or the path of a
    Hugging Face `tokenizer.json`. Not used by `tokens:`."""
    val_fraction: float = Field(default=0.05, ge=0, lt=1)
    """Share of the text held out for validation: whole documents, or the end of the text when there is just
    one."""
    text_key: str = "text"
    """The field that holds the text, in .jsonl and .parquet files and in `hf:` data sets."""
    max_bad_fraction: float = Field(default=0.0, ge=0, le=1)
    """Share of documents that may be unreadable (not UTF-8, broken JSON): up to it they are counted and
    skipped, beyond it the run stops with an error that names file and offset. (Of a long text each megabyte
    counts as one.) Empty documents are skipped without limit."""
    max_epochs: int = Field(default=0, ge=0)
    """Passes over the training set that the run may take; more is an error. 0: any number, reshuffled."""
    token_dtype: Literal["uint16", "uint32"] = "uint16"
    """Type of the ids in the .bin files of `tokens:PATH` that have no header (nanoGPT's)."""
    cache: str | None = None
    """Folder of tokenized shards. Unset: $FIVEFOLD_CACHE, else ~/.cache/fivefold."""


class TrainSection(Section):
    steps: int | None = Field(default=None, ge=1)
    """Optimizer steps. Exactly one of `steps` and `tokens` is given."""
    tokens: int | None = Field(default=None, ge=1)
    """Tokens to train on; rounded up to whole steps."""
    global_batch_size: int = Field(default=16, ge=1)
    """Sequences in an optimizer step, over all ranks."""
    microbatch_size: int | None = Field(default=None, ge=1)
    """Sequences that one rank computes at once; gradients accumulate over microbatches. Unset: the whole
    share of a rank, at most 8."""
    seed: int = Field(default=0, ge=0, le=2**63 - 1)
    """Initial weights, order of the data and dropout follow from it."""
    val_every: int = Field(default=0, ge=0)
    """Steps between validations. 0: ten times in a run."""
    val_sequences: int = Field(default=64, ge=1)
    """Sequences in a validation (the same ones every time)."""
    sample_every: int = Field(default=0, ge=0)
    """Steps between samples of generated text. 0: at the end only."""
    sample_prompt: str = ""
    """How a sample starts."""
    sample_tokens: int = Field(default=128, ge=1)
    """Length of a sample."""


class OptimSection(Section):
    name: Literal["adamw"] = "adamw"
    """Optimizer: AdamW (arXiv 1711.05101)."""
    lr: float = Field(default=1e-3, gt=0)
    """Peak learning rate."""
    min_lr: float | None = Field(default=None, ge=0)
    """Learning rate at the end of the schedule. Unset: a tenth of `lr`."""
    warmup_steps: int | None = Field(default=None, ge=0)
    """Steps in which the learning rate grows linearly from 0. Unset: 2% of the run, at least 1 and at most
    2000."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """After warm-up: cosine or linear decay to `min_lr`; `wsd` (warm-up, stable, decay: arXiv 2404.06395)
    stays at `lr` and decays linearly in the last `decay_fraction`; or constant."""
    decay_fraction: float = Field(default=0.2, gt=0, le=1)
    """Share of the run in which `wsd` decays."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decoupled weight decay, on matrices only (not on norms and biases)."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Decay rates of the first and second moment."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment."""
    grad_clip: float = Field(default=1.0, ge=0)
    """Largest norm of the whole gradient. 0: no clipping."""


class LayoutSection(Section):
    dp_replicate: int = Field(default=1, ge=1)
    """Data-parallel replicas (DDP)."""
    dp_shard: int = Field(default=1, ge=1)
    """Data-parallel ranks that share states (ZeRO)."""
    tp: int = Field(default=1, ge=1)
    """Tensor-parallel ranks."""
    sp: bool = False
    """Megatron sequence parallelism on the tensor axis."""
    cp: int = Field(default=1, ge=1)
    """Context-parallel ranks: each has a part of every sequence."""
    cp_method: Literal["ring", "ulysses"] = "ring"
    """How attention sees the other ranks' tokens: keys and values travel round them (`ring`, arXiv 2310.01889), or
    heads and sequence change places (`ulysses`, arXiv 2309.14509)."""
    pp: int = Field(default=1, ge=1)
    """Pipeline stages' ranks."""
    ep: int = Field(default=1, ge=1)
    """Expert-parallel ranks (re-divides the data and context axes)."""
    zero: int = Field(default=0, ge=0, le=3)
    """ZeRO stage."""
    schedule: str = "1f1b"
    """Pipeline schedule."""
    virtual_stages: int = Field(default=1, ge=1)
    """Pipeline stages a rank."""
    microbatches: int | None = Field(default=None, ge=1)
    """Microbatches in a step, a rank. Unset: follows from `global_batch_size` and `microbatch_size`."""
    recompute: Literal["none", "full", "selective"] = "none"
    """Activations computed again in backward."""


class PrecisionSection(Section):
    mode: Literal["auto", "fp32", "bf16"] = "auto"
    """Dtype of the computation. `auto`: bf16 where the processor has it, else fp32. Master weights and
    optimizer states stay fp32 in every mode."""
    reduce: Dtype = "fp32"
    """Dtype in which gradients are summed over ranks."""


class CheckpointSection(Section):
    every: int = Field(default=0, ge=0)
    """Steps between checkpoints. 0: at the end of the run (and when it is interrupted) only."""
    keep_last: int = Field(default=2, ge=1)
    """Checkpoints kept; older ones are removed."""


class ObserveSection(Section):
    log_every: int = Field(default=1, ge=1)
    """Steps between console lines."""
    tensorboard: bool = True
    """Write TensorBoard event files into RUN/tensorboard."""
    noise_scale: bool = False
    """Measure the gradient noise scale (arXiv 1812.06162): the batch, in tokens, beyond which larger ones save few
    steps. Metric `noise_scale`, averaged over about 50 steps. Not with cp, ep, sp, tp under ZeRO, or a pipeline whose
    first and last stage share the embedding."""
    trace_step: int = Field(default=0, ge=0)
    """With pp > 1: the step whose pipeline is measured, action by action. RUN/traces gets a picture of it beside
    the planned one. 0: none."""


class Recipe(Section):
    """What to train. Sections may be left out: every field has a default, except one of steps and tokens.

    Raises:
        pydantic.ValidationError: a field is wrong, or fields contradict one another (see `rules.py`).
    """

    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    train: TrainSection = TrainSection()
    optim: OptimSection = OptimSection()
    layout: LayoutSection = LayoutSection()
    precision: PrecisionSection = PrecisionSection()
    checkpoint: CheckpointSection = CheckpointSection()
    observe: ObserveSection = ObserveSection()

    @model_validator(mode="after")
    def _fields_agree(self) -> Recipe:
        from fivefold.recipe.rules import contradictions  # imports this file for its types only

        found = [message for _, message in contradictions(self)]
        if found:
            raise ValueError("; ".join(found))
        return self
