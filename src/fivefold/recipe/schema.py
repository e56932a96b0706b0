"""The schema of a recipe: its sections and fields, as typed data.

Every section is strict (no silent conversion), frozen and closed (an unknown key is an error). `fivefold check
--explain` prints the docstring under a field. `[model]` is in models/section.py.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from fivefold.models.section import LARGEST, MOST_LAYERS, RAMP, ModelSection, Section
from fivefold.optim import DEFAULT, OPTIMIZERS, OUTER
from fivefold.precision import DTYPES, MASTER, PRECISIONS, ROUNDINGS, TRAINED
from fivefold.precision.fp8 import GRADIENTS, SCALINGS
from fivefold.recipe.entries import SourceEntry, StageEntry, Steps, TrackerNames, ValidationEntry
from fivefold.schedules.collectives.registry import ALL_REDUCES, AUTO, GATHERS, LIBRARY, SCATTERS
from fivefold.schedules.compression import NONE
from fivefold.schedules.priority import ORDER, ORDERS, PRIORITY, Order
from fivefold.sharding.layout import BUCKET_BYTES, Counts
from fivefold.sharding.layout_rules import MOST_RANKS
from fivefold.sharding.sync import ONE_REPLICA_GROUP, SERVER, UNBOUNDED, ReplicaGroups, Servers
from fivefold.sharding.tiers import BESIDE, NOT_OFFLOADED, WINDOW

if TYPE_CHECKING:  # a type checker reads no tables
    Dtype = Fp8Gradient = Mode = Rounding = Scaling = OptimizerName = SyncMethod = str
    AllGather = AllReduce = ReduceScatter = str
else:
    Dtype, Mode = Literal[TRAINED], Literal["auto", *PRECISIONS]
    Scaling, Fp8Gradient, Rounding = Literal[SCALINGS], Literal[tuple(GRADIENTS)], Literal[ROUNDINGS]
    OptimizerName, AllReduce = Literal[tuple(OPTIMIZERS)], Literal[ALL_REDUCES]
    AllGather, ReduceScatter = Literal[GATHERS], Literal[SCATTERS]
    SyncMethod = Literal["all", SERVER, *OUTER]
Beta = Annotated[float, Field(ge=0, lt=1)]
MOST_SEQUENCES = 1 << 30
"""Sequences of a batch."""
MOST_SECONDS = 10**7
"""Longest time-out: the backends count nanoseconds."""


class DataSection(Section):
    source: str = "stdlib"
    """Source of the text: `stdlib` (the source code of this machine's Python standard library), `talk` (the shipped
    conversations), a file, folder or glob of .txt .md .py .json .jsonl .csv .parquet .wet .warc .xml, texts also as
    .gz, .bz2 or .zst, here or at an address (https, s3); `tokens:PATH` (token files: .bin of nanoGPT, llm.c or Megatron
    with its .idx, .npy, .parquet with a column `input_ids`); `hf:NAME:CONFIG:SPLIT[FROM:TO]` (rows of a Hugging Face
    data set; all but the name may be left out). Relative paths start at the current folder, not at the recipe's."""
    tokenizer: str = "bpe:4096"
    """`bpe:N` (byte-level BPE with N tokens, trained on the training text), `bytes`, `chars`, or the path of a
    Hugging Face `tokenizer.json`. `tokens:` does not use it."""
    val_fraction: float = Field(default=0.05, ge=0, lt=1)
    """Share of the text held out for validation: whole documents, or the end of a single document."""
    text_key: str = "text"
    """Name of the text field in .json, .jsonl, .csv and .parquet files and in `hf:` data sets."""
    stream: bool = False
    """Train while the text is being tokenized. Sequences are shuffled within windows of `stream_window` tokens."""
    stream_window: int = Field(default=1 << 22, ge=1, le=LARGEST)
    """Tokens of a window of `stream`. Training begins when the first window is tokenized. 1: no shuffling."""
    stream_gib: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """GiB of tokens that `stream` keeps of each source on disk. Beyond it, used tokens are deleted, and tokenized again
    if they are needed again. 0: no limit."""
    chat_template: str = ""
    """How a conversation becomes text: `chatml`, `plain` (needs no special tokens), `tokenizer` (the template beside
    `data.tokenizer`), or the path of a Jinja file, as Hugging Face's `chat_template.jinja`. Rows with a list of
    `messages` (`role`, `content`) are conversations; only the answers (role `assistant`) count in the loss. Other rows
    are texts. Unset: all rows are texts."""
    max_bad_fraction: float = Field(default=0.0, ge=0, le=1)
    """Share of documents that may be unreadable (not UTF-8, broken JSON). They are counted and skipped. If there are
    more, the run stops with an error that names file and offset. (Each megabyte of a long text is a document.)
    Empty documents are skipped without limit."""
    max_epochs: int = Field(default=0, ge=0, le=LARGEST)
    """Most passes over the training set, each shuffled anew; a run that needs more is an error. 0: no limit."""
    token_dtype: Literal["uint16", "uint32"] | None = None
    """Type of the ids in .bin files of `tokens:PATH` without a header (nanoGPT's). Unset: uint16, up to 65,536 ids."""
    end_token: int | None = Field(default=None, ge=0, le=(1 << 31) - 1)
    """Id of the token between documents in the files of `tokens:PATH`. Unset: a sequence counts as one document."""
    document_masks: bool = True
    """Attention does not cross borders of documents, where positions begin anew. `false`: a sequence is one text."""
    packing: Literal["concat", "best_fit"] = "concat"
    """How documents become sequences. `concat`: one behind the other, cut wherever a sequence ends. `best_fit`: only
    documents longer than a sequence are cut; the others are put together by best-fit decreasing (arXiv 2404.10830).
    What is left empty is filled with tokens that do not count."""
    cache: str | None = None
    """Folder of tokenized shards. Unset: $FIVEFOLD_CACHE, else ~/.cache/fivefold."""
    sources: tuple[SourceEntry, ...] = ()
    """A mixture: several sources instead of `source`, each a `[[data.sources]]`."""
    weigh_by: Literal["tokens", "documents"] = "tokens"
    """What the weights of `sources` and `stages` are shares of. `documents`: longer ones give more tokens."""
    stages: tuple[StageEntry, ...] = ()
    """Parts of the run with other weights of the sources, one after the other, each a `[[data.stages]]`."""
    validation: tuple[ValidationEntry, ...] = ()
    """Validation sets beside what `val_fraction` holds out, each a `[[data.validation]]` with a curve of its own."""

    @property
    def specs(self) -> dict[str, str]:
        """What is trained on: {name: source} of each source; the only one has no name."""
        return {entry.name: entry.source for entry in self.sources} or {"": self.source}

    @property
    def token_files(self) -> list[str]:
        """Those of its sources that are token files."""
        return [spec for spec in self.specs.values() if spec.startswith("tokens:")]

    def first_steps(self, steps: int) -> list[int]:
        """The first step (0, 1, ...) of each stage in a run of `steps`. Without stages there is one, the run."""
        shares = [stage.share for stage in self.stages] or [1.0]
        return [round(math.fsum(shares[:number]) * steps) for number in range(len(shares))]


class TrainSection(Section):
    steps: int | None = Field(default=None, ge=1, le=LARGEST)
    """Number of optimizer steps. Set exactly one of `steps` and `tokens`."""
    tokens: int | None = Field(default=None, ge=1, le=LARGEST)
    """Number of tokens to train on, rounded up to whole steps."""
    init_from: str = ""
    """Weights to start from: a run folder (its newest checkpoint), a checkpoint, or a Hugging Face folder. Data,
    schedule and optimizer states begin anew. What you leave open of `[model]`, and the tokenizer, are those of this
    folder, also where a shipped recipe says otherwise. Unset: random weights."""
    global_batch_size: int = Field(default=16, ge=1, le=MOST_SEQUENCES)
    """Sequences per optimizer step, over all ranks."""
    batch_ramp: str = Field(default="", pattern=RAMP, examples=["4:100+8:200"])
    """Smaller batches of the first steps: `4:100+8:200` has 4 sequences in 100 steps, 8 in the next 200, and
    `global_batch_size` in the others."""
    microbatch_size: int | None = Field(default=None, ge=1, le=MOST_SEQUENCES)
    """Sequences that one rank computes at once. Gradients accumulate over microbatches. It must divide the batch. Ranks
    take whole microbatches, some perhaps one more than others. Unset: a rank's whole share, at most 8, or fewer where
    that makes shares more equal."""
    z_loss: float = Field(default=0.0, ge=0)
    """Factor of the squared log-sum-exp of logits in the training loss (z-loss, arXiv 2204.02311; 1e-4 there). It keeps
    logits from drifting. Validation leaves it out, and so do modules of your own."""
    seed: int = Field(default=0, ge=0, le=2**63 - 1)
    """Seed of the initial weights, the order of the data and dropout."""
    val_every: int = Field(default=0, ge=0, le=LARGEST)
    """Steps between validations. 0: ten validations per run."""
    val_sequences: int = Field(default=64, ge=1, le=MOST_SEQUENCES)
    """Sequences per validation of each set (the same ones every time)."""
    sample_every: int = Field(default=0, ge=0, le=LARGEST)
    """Steps between samples of generated text. 0: at the end only."""
    sample_prompt: str = ""
    """Prompt of a sample."""
    sample_tokens: int = Field(default=128, ge=1, le=LARGEST)
    """Length of a sample in tokens."""


class OptimSection(Section):
    name: OptimizerName = DEFAULT
    """Optimizer. Gradient descent: plain (`sgd`), with `momentum` (Polyak, 1964), with Nesterov's (`nesterov`:
    Sutskever et al., ICML 2013). A rate per weight: `adagrad` (JMLR 2011), `rmsprop` (Hinton, 2012), `adam` (arXiv
    1412.6980), `adamw` (arXiv 1711.05101), `radam` (arXiv 1908.03265), `nadam` (Dozat, 2016), `adamsage` (guided by
    sensitivity, arXiv 2202.02664). Less memory: `adafactor` (arXiv 1804.04235), `adamw8bit` (arXiv 2110.02861), `lion`
    (arXiv 2302.06675). Curvature: `sophia` (arXiv 2305.14342). Whole matrices: `soap` (arXiv 2409.11321), `muon` (arXiv
    2502.16982)."""
    lr: float = Field(default=1e-3, gt=0)
    """Peak learning rate."""
    min_lr: float | None = Field(default=None, ge=0)
    """Learning rate at the end of the schedule. Unset: a tenth of `lr`; `constant` has none."""
    warmup_steps: int | None = Field(default=None, ge=0, le=LARGEST)
    """Steps in which the learning rate grows linearly from 0. Unset: 2% of the run, between 1 and 2000."""
    lr_embeddings: float | None = Field(default=None, gt=0)
    """Peak learning rate of embeddings and of the output layer. Unset: `lr`. In a module of your own: of `nn.Embedding`
    and of matrices with `vocab_size` rows."""
    lr_vectors: float | None = Field(default=None, gt=0)
    """Peak learning rate of norms and biases. Unset: `lr`."""
    groups: str = ""
    """Groups of parameters, by patterns of their names, with factors on learning rate and weight decay:
    `blocks.[0-3].*: lr=0.1, *.norm*: lr=2, head*: lr=0.5 decay=0`. The last one that matches a name counts."""
    schedule: Literal["cosine", "linear", "wsd", "constant", "restarts"] = "cosine"
    """Learning rate after warm-up. `cosine` and `linear` decay to `min_lr`. `wsd` (warm-up, stable, decay: arXiv
    2404.06395) stays at `lr` and decays linearly in the last `decay_fraction`. `constant` stays at `lr`. `restarts`
    decays by a cosine again and again (SGDR, arXiv 1608.03983)."""
    restart_steps: int | None = Field(default=None, ge=1, le=LARGEST)
    """Steps of the first cycle of `restarts`. Unset: a quarter of the run."""
    restart_growth: float = Field(default=1.0, ge=1)
    """Length of a cycle of `restarts` relative to the one before."""
    decay_fraction: float = Field(default=0.2, gt=0, le=1)
    """Share of the run in which `wsd` decays."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Weight decay on matrices (not on norms and biases). It is added to the gradient in `sgd`, `momentum`, `nesterov`,
    `adagrad`, `rmsprop`, `adam`, `radam` and `nadam`, and decoupled in all others."""
    betas: tuple[Beta, Beta] | None = None
    """Decay rates of the first and second moment; in `lion` of the direction and of the momentum. Unset: [0.9, 0.95];
    [0.9, 0.999] in `radam` and `nadam`, [0.9, 0.99] in `lion`, [0.965, 0.99] in `sophia`."""
    eps: float | None = Field(default=None, gt=0)
    """Added to the root of the second moment. Unset: 1e-08; 1e-10 in `adagrad`, 1e-15 in `sophia`."""
    momentum: float | None = Field(default=None, gt=0, lt=1)
    """Share of the last step's direction that the next one keeps. `momentum`, `nesterov` and `muon` only. Unset: 0.9;
    0.95 in `muon`."""
    smoothing: float | None = Field(default=None, gt=0, lt=1)
    """Decay rate of the squared gradient. `rmsprop` only. Unset: 0.99."""
    gamma: float | None = Field(default=None, gt=0)
    """Factor of the curvature: the smaller, the more elements move by the whole learning rate. `sophia` only. Unset:
    0.05."""
    estimator: Literal["fisher", "gnb"] | None = None
    """Estimate of the curvature. `fisher`: from the step's own gradient. `gnb` (Gauss-Newton-Bartlett: of labels that
    the model draws) takes another forward and backward. `sophia` only. Unset: `fisher`."""
    estimate_every: int | None = Field(default=None, ge=1, le=LARGEST)
    """Steps between estimates of the curvature. `sophia` only. Unset: 10."""
    basis_every: int | None = Field(default=None, ge=1, le=LARGEST)
    """Steps between updates of the preconditioner's eigenbasis. `soap` only. Unset: 10."""
    ns_steps: int | None = Field(default=None, ge=1, le=LARGEST)
    """Newton-Schulz iterations by which a matrix is made orthogonal. `muon` only. Unset: 5."""
    qk_clip: float = Field(default=0.0, ge=0)
    """Limit of attention's scores (QK-clip, arXiv 2507.20534; 100 there): heads whose bound |q| |k| / sqrt(d) is above
    it in a step get smaller weights of queries and keys. 0: none."""
    grad_clip: float = Field(default=1.0, ge=0)
    """Largest norm of the whole gradient. 0: no clipping."""


class LayoutSection(Section, Counts):
    dp_replicate: int = Field(default=1, ge=1, le=MOST_RANKS)
    """Data-parallel replicas (DDP)."""
    dp_shard: int = Field(default=1, ge=1, le=MOST_RANKS)
    """Data-parallel ranks that shard states (ZeRO)."""
    tp: int = Field(default=1, ge=1, le=MOST_RANKS)
    """Tensor-parallel ranks."""
    sp: bool = False
    """Megatron sequence parallelism on the tensor axis."""
    sp_regather: bool = False
    """With `sp`: keep only a rank's piece of the inputs that are gathered, and gather them again in backward, as
    Megatron-LM does (arXiv 2205.05198). Less memory for one more gather per attention and feed-forward."""
    tp_chunks: int = Field(default=1, ge=1, le=MOST_SEQUENCES)
    """With `sp`: chunks of a rank's tokens; the message of one travels beside the product of another."""
    cp: int = Field(default=1, ge=1, le=MOST_RANKS)
    """Context-parallel ranks. Each has a part of every sequence."""
    cp_method: Literal["ring", "ulysses", "all_gather"] = "ring"
    """Context-parallel attention: `ring` sends keys and values round the ranks (arXiv 2310.01889), `ulysses` exchanges
    heads for sequence by all-to-all (arXiv 2309.14509), `all_gather` gathers keys and values (arXiv 2407.21783) and
    balances the work of packed documents."""
    pp: int = Field(default=1, ge=1, le=MOST_RANKS)
    """Pipeline-parallel ranks."""
    ep: int = Field(default=1, ge=1, le=MOST_RANKS)
    """Expert-parallel ranks, taken from the data and context axes."""
    ep_fold: bool = False
    """With `ep`, `tp`, `sp`: the expert axis takes in the tensor axis, so that `ep` may be up to tp x cp x dp (MoE
    parallel folding, arXiv 2504.14960; Megatron-LM's `--expert-tensor-parallel-size 1`)."""
    expert_chunks: int = Field(default=1, ge=1, le=MOST_SEQUENCES)
    """With `ep`: parts of each expert's rows. While experts compute one, the others travel."""
    expert_buffer: float = Field(default=0.0, ge=0, le=MOST_RANKS)
    """With `ep`, in training: rows for each rank, in times of the mean; missing ones are filled up. So the host waits
    for no number. More end the run with an error. 0: as many as there are."""
    zero: int = Field(default=0, ge=0, le=3)
    """ZeRO stage."""
    schedule: str = "1f1b"
    """Pipeline schedule."""
    virtual_stages: int = Field(default=1, ge=1, le=MOST_LAYERS)
    """Pipeline stages per rank."""
    round_microbatches: int | None = Field(default=None, ge=1, le=MOST_SEQUENCES)
    """With `schedule = "interleaved"`: microbatches that a stage computes before the rank's next stage (N in section
    3.3.2 of arXiv 2407.21783). A remainder is spread over the rounds. Unset: as many as `pp`. Fewer hold fewer
    activations, but ranks wait for each round to come back."""
    zb_costs: str = ""
    """With `schedule = "zb_auto"`: times of forward, input gradients, weight gradients and a transfer between ranks, in
    any unit, as `F:I:W:transfer`. Empty: `1:1:1:0`. `fivefold plan --explain` prints the predicted ones."""
    zb_live: int | None = Field(default=None, ge=1, le=MOST_SEQUENCES)
    """With `schedule = "zb_auto"`: the most microbatches that a rank holds. Unset: 2 pp - 1."""
    bare_ends: bool = False
    """The first stage may have the embedding alone, and the last one the head alone, where that divides the work more
    evenly (as in section 3.3.2 of arXiv 2407.21783)."""
    microbatches: int | None = Field(default=None, ge=1, le=MOST_SEQUENCES)
    """Microbatches per step, equally many on every rank. Unset: by `global_batch_size` and `microbatch_size`."""
    recompute: str = "none"
    """Activation recomputation in backward. `selective`: attention's scores, softmax and dropout (arXiv 2205.05198).
    `full`: whole blocks, from their inputs (arXiv 1604.06174). `ops:attention+gate+norm`: the operations named, here
    all there are. `budget:6GiB`: as little as keeps the tensors of a rank within so many bytes, block by block, chosen
    by the planner before the run. `full*3/none*9`: modes of the first three blocks and of the nine behind them."""
    offload: Literal[
        "none", "activations:tp", "activations", "states:host", "states:disk", "all:host", "all:disk"
    ] = NOT_OFFLOADED
    """What leaves the device; with ZeRO, of a rank's rows. `activations:tp`: with recompute = full, tensor-parallel
    ranks keep a part each of blocks' inputs (ZeRO-R's Pa, arXiv 1910.02054). `activations`: what forward saves.
    `states:host`: gradients during backward, masters and states, to host memory, where the update runs (ZeRO-Offload,
    2101.06840). `states:disk`: masters and states. `all:*`: also weights of blocks (ZeRO-Infinity, 2104.07857)."""
    offload_dir: str = ""
    """Folder for `offload`, on a local disk. Its files vanish with the process. Unset: in the cache folder."""
    offload_window: int = Field(default=WINDOW, ge=0, le=LARGEST)
    """Blocks with weights on the device at once under `all:*`. 0: as few as hide the copying (STRONGHOLD, SC 2022)."""
    offload_update: Literal["beside", "early"] = BESIDE
    """`beside` the next forward, or `early`: block by block beside backward. That needs grad_clip = 0, and no skips."""
    compress: str = NONE
    """Sums gradients over replicas with fewer bytes, and adds what was left out to the next step's (error feedback,
    arXiv 1901.09847). `int8`, `int4`; `nf4`, `dynamic8`, whose levels are closer near zero (arXiv 2305.14314,
    2110.02861); `1bit` (arXiv 2102.02888); `topk:0.01`, the largest hundredth; `randk:0.01`, a random hundredth;
    `powersgd:4`, matrices of rank 4 (arXiv 1905.13727). Needs zero = 0."""
    compress_after: int | None = Field(default=None, ge=0, le=LARGEST)
    """First steps of the run, whose sums are not compressed. Unset: a tenth; none with 8 and 4 bits per element."""
    all_reduce: AllReduce = AUTO
    """Algorithm that sums gradients over replicas, bucket by bucket, while backward runs. `library`: gloo's or NCCL's.
    The others are those of `fivefold collectives --draw`. `auto`: across CPU hosts with several ranks each
    `hierarchical`; on one machine whichever `fivefold bench collectives` found fastest for a bucket's size; else
    `library`."""
    all_gather: AllGather = LIBRARY
    """Algorithm by which ZeRO gathers weights. `library`: gloo's or NCCL's. The others are those of
    `fivefold collectives --primitive all_gather`, such as `broadcasts`, by which ZeRO-3 began (arXiv 1910.02054)."""
    reduce_scatter: ReduceScatter = LIBRARY
    """Algorithm by which ZeRO sums gradients and scatters them to the ranks that keep the rows. `library`: NCCL's; on
    CPUs, since gloo has none, each rank sends every other one its part."""
    zeropp: str = NONE
    """ZeRO++ (arXiv 2306.10209), for less traffic between nodes: some of `weights` (gathered as int8), `hier` (each
    node keeps a copy of what was gathered until the weights change) and `gradients` (summed as int4 inside the nodes,
    then across; `gradients:int8`), such as `weights,hier,gradients`. Needs zero = 3."""
    ranks_per_node: int | None = Field(default=None, ge=1, le=MOST_RANKS)
    """Ranks that `zeropp` takes as a node. Unset: those of a machine."""
    bucket_mib: float = Field(default=BUCKET_BYTES / 2**20, ge=0, allow_inf_nan=False)
    """Minimum MiB of fp32 gradients per bucket. Replicas sum a bucket while backward computes the others (zero = 0).
    0: one bucket, which is summed after backward."""


class SyncSection(Section):
    method: SyncMethod = "all"
    """When ranks synchronise. `all`: all of them, in every step. `server`: the replicas (`dp_replicate`) are workers.
    They push gradients to parameter servers, which keep the master weights, and pull weights (Li et al., OSDI 2014).
    `local` and `diloco`: the replicas are replica groups that train apart. Every so many steps they take their mean
    weights (local SGD, arXiv 1805.09767), or a step of an outer optimizer with Nesterov's momentum towards them
    (DiLoCo, arXiv 2311.08105)."""
    every: int = Field(default=50, ge=1, le=LARGEST)
    """Inner steps between two outer steps. `local` and `diloco` only."""
    replica_groups: int | None = Field(default=None, ge=1, le=MOST_RANKS)
    """Number of replica groups. Replicas within a replica group sum gradients in every step. Unset: each replica is a
    replica group."""
    fragments: int = Field(default=1, ge=1, le=MOST_LAYERS)
    """Parts of the model that synchronise in turn, each once in `every` steps (streaming DiLoCo, arXiv 2501.18512)."""
    overlap: int = Field(default=0, ge=0, le=LARGEST)
    """Inner steps that a replica group takes while the sum of an outer gradient is under way. It then takes the mean of
    its own and the common weights (arXiv 2501.18512). 0: it waits."""
    patience: float = Field(default=60.0, gt=0, le=MOST_SECONDS)
    """Seconds that replica groups which are launches of their own (`fivefold train --replica-group`) wait for each
    other in an outer step. It must suffice for each of its messages. The ranks of a replica group wait for each other
    for longer."""
    outer_dtype: Literal["fp32", "bf16", "int8"] = "fp32"
    """Dtype in which outer gradients are sent. `int8` has a scale per 256 elements, and is summed in fp32."""
    outer_lr: float | None = Field(default=None, gt=0)
    """Learning rate of the outer step. Unset: 1.0 for `local` (the mean weights), 0.7 for `diloco`."""
    outer_momentum: float | None = Field(default=None, gt=0, lt=1)
    """Momentum of the outer step. `diloco` only. Unset: 0.6. DiLoCo's paper has 0.9, for hundreds of outer steps."""
    servers: int = Field(default=1, ge=1, le=MOST_RANKS)
    """Number of parameter servers: processes beside the layout's ranks, before them. Each keeps a share of the rows of
    every parameter. `server` only."""
    staleness: int = Field(default=0, ge=UNBOUNDED, le=LARGEST)
    """0: synchronous. Each step has the mean gradient of all workers. N: a worker's gradient is applied by itself, and
    its weights lack no update of steps more than N before (arXiv 1312.7869). -1: unbounded; workers do not wait for
    each other while they train. `server` only."""
    order: str = Field(default=PRIORITY, pattern=ORDER, examples=[*ORDERS, "priority:256KiB"])
    """Which message goes first. `fifo`: the gradient that is ready first. `priority`: the layer nearest to the input,
    which the next forward needs first. Messages are cut into parts of 1 MiB of fp32, or of the size behind a colon
    (ByteScheduler, SOSP 2019). `server` only."""


class PrecisionSection(Section):
    mode: Mode = "auto"
    """Precision of training. `auto`: bf16 if the processor supports it, else fp32. `bf16`: weights and activations in
    bf16, with fp32 master weights, gradient sums and optimizer states. `bf16_pure`: everything in bf16, 8 bytes per
    parameter with AdamW. `fp16`: as `bf16`, with a scaled loss. `tf32`: fp32, which GPUs multiply with 11 bits. `fp8`,
    `mxfp8`: as `bf16`, with factors of blocks' matmuls in 8 bits. `nanotron`: also weights, gradients and moments."""
    loss_scale: float = Field(default=2.0**16, ge=1, le=2.0**24)
    """Factor on the loss at the start, a power of two. `fp16` only. An overflow halves it and skips the step (arXiv
    1710.03740)."""
    loss_scale_every: int = Field(default=2000, ge=1, le=LARGEST)
    """Steps without an overflow after which the factor doubles. `fp16` only."""
    reduce: Dtype = "fp32"
    """Dtype in which gradients are summed over ranks. `bf16_pure` always takes bf16."""
    rounding: Rounding = "stochastic"
    """How an update is rounded to bf16. `nearest` loses small updates. `stochastic` (arXiv 1502.02551) rounds up or
    down at random. `kahan` (arXiv 2010.06192) keeps what rounding cuts off, 2 more bytes per parameter.
    `bf16_pure` and `nanotron` only; the latter's moments always go to the nearest number in fp8."""
    fp8_scaling: Scaling = "block"
    """What shares a scale in `mode = "fp8"`. `block`: 128 numbers of activations and gradients, 128 x 128 of weights
    (DeepSeek-V3, arXiv 2412.19437). `row`: the numbers that are summed. `tensor`: all. Scales are powers of two."""
    fp8_backward: Fp8Gradient = "e5m2"
    """Format of gradients in `mode = "fp8"`. `e5m2` has the wider range, `e4m3` is finer, but small gradients round
    differently where a layout cuts a tile."""
    fp8_dispatch: bool = False
    """Rows travel to experts in 8 bits in `mode = "fp8"`, with a scale per 128 features, and so do the gradients of
    their results (DeepSeek-V3, arXiv 2412.19437)."""
    fp8_skip_first: int = Field(default=0, ge=0, le=MOST_LAYERS)
    """First blocks that stay in bf16 in the modes `fp8` and `mxfp8`. Embedding, output layer, norms, routers and
    attention's own matmuls always do."""
    fp8_skip_last: int = Field(default=0, ge=0, le=MOST_LAYERS)
    """Last blocks that stay in bf16 in the modes `fp8` and `mxfp8`."""


class CheckpointSection(Section):
    every: int = Field(default=0, ge=0, le=LARGEST)
    """Steps between checkpoints. 0: only by `minutes`, at the end of the run, and when it is interrupted."""
    minutes: float = Field(default=15.0, ge=0, le=LARGEST, allow_inf_nan=False)
    """Minutes since the last checkpoint, or since the start, after which there is another one. 0: never."""
    keep_last: int = Field(default=2, ge=1, le=LARGEST)
    """Number of checkpoints to keep, whatever they were saved for. Older ones are removed."""
    keep_every: int = Field(default=0, ge=0, le=LARGEST)
    """Checkpoints of steps that this number divides stay, too. 0: none."""
    frozen: bool = True
    """Keep parameters in checkpoints that are not trained (`model.freeze`). `false`: they are read from
    `train.init_from` again, so checkpoints are small, and that folder must stay."""
    asynchronous: bool = True
    """Write checkpoints beside the steps that follow, from a copy in host memory. Where that has no room for the copy,
    the step waits. The last checkpoint of a run is always written at once."""


class FaultsSection(Section):
    on_nonfinite: Literal["skip", "rollback", "abort"] = "skip"
    """If loss or gradient are not finite. Such a step never changes the weights. `skip`: the run goes on, and ends
    after 5 of them in a row. `rollback`: it goes back to the newest checkpoint before the step, and leaves out the data
    since. `abort`: it ends."""
    on_spike: Literal["tell", "skip", "rollback", "abort"] = "tell"
    """If the loss or the norm of the gradient is far above its running distribution. `tell`: it is said. `skip`: the
    step does not change the weights. `rollback`, `abort`: as for `on_nonfinite`."""
    spike_limit: float = Field(default=6.0, ge=0)
    """Standard deviations above its running mean, over about 50 steps, from which the logarithm of a loss or norm is a
    spike. (It is at least a fifth above the mean.) 0: never."""
    rollbacks: int = Field(default=3, ge=0, le=LARGEST)
    """How often a run goes back, at most. Then it ends."""
    hash_every: int = Field(default=0, ge=0, le=LARGEST)
    """Steps between comparisons of the weights that several ranks keep, by a hash. 0: never."""
    on_corruption: Literal["rollback", "abort"] = "abort"
    """If hashes differ. `rollback`: the run goes back to the newest checkpoint up to the last step whose
    comparison was right, and takes the same data again. `abort`: it ends."""


class ObserveSection(Section):
    log_every: int = Field(default=0, ge=0, le=LARGEST)
    """Steps between console lines. 0: on a terminal every step; in a file or a pipe about 20 lines, at least one a
    minute."""
    tracker: TrackerNames = "tensorboard"
    """Where the numbers of metrics.jsonl also go: `tensorboard` (event files in RUN/tensorboard), `csv`
    (RUN/metrics.csv), `wandb` (Weights & Biases; extra `wandb`), `mlflow` (MLflow; extra `mlflow`), `none`; several as
    `tensorboard,wandb` or as a list. Logins come from the environment, never from a recipe."""
    noise_scale: bool = False
    """Measure the gradient noise scale (arXiv 1812.06162). Batches larger than this number of tokens save few steps.
    The metric is `noise_scale`, averaged over about 50 steps. Not supported with cp, ep, sp, tp under ZeRO, or a
    pipeline whose first and last stage share the embedding."""
    memory_step: int = Field(default=0, ge=0, le=LARGEST)
    """The step whose tensors are tracked, beside those of the first step; both are slower. RUN/traces gets the bytes of
    each category over time; `fivefold draw RUN` and the report draw them. From the second step on, plan.json gets the
    peak of rank 0. On GPUs RUN/traces gets PyTorch's own memory snapshots instead. 0: none; the report has the peak
    memory of the process."""
    trace_step: int = Field(default=0, ge=0, le=LARGEST)
    """The step whose timeline is measured: computing and messages of each rank, on CPUs; with pp > 1 also the pipeline,
    action by action. RUN/traces gets the times, and the planned ones; `fivefold draw RUN` and the report draw them.
    0: none."""
    profile_steps: Steps = ""
    """The steps that PyTorch's profiler records, such as `10` or `10-12`; at most 100. Each rank writes a trace into
    RUN/traces, for ui.perfetto.dev, with forward, backward, update and messages named. These steps are slower. Empty:
    none."""
    hang_s: float = Field(default=30.0, ge=0, allow_inf_nan=False)
    """Seconds that a message between ranks may take, or three usual steps if they are longer. After that the run says
    which rank is missing, writes the stacks of all ranks into RUN/traces, and ends. A rank that starts, compiles,
    saves, samples or calls back has ten times as long. 0: only the backend's limit, `launch.timeout`."""
    histogram_step: int = Field(default=0, ge=0, le=LARGEST)
    """The step whose weights, activations and gradients are counted by exponent, into RUN/traces. `fivefold formats
    --run RUN` compares them with the range of each format. That step is slower. 0: none."""


class LaunchSection(Section):
    restarts: int = Field(default=10, ge=0, le=LARGEST)
    """Restarts of the local ranks, after one has died or hung, until a newer checkpoint is saved; then they count
    anew. A death at the same step as the one before counts three times. 0: none."""
    grace: float = Field(default=30.0, gt=0)
    """Seconds without progress, beyond the time of two steps, after which ranks are killed when a signal stops the run.
    They finish their step or validation, save and leave. A large save makes progress while it writes."""
    timeout: float = Field(default=600.0, gt=0, le=MOST_SECONDS)
    """Seconds until a message between ranks fails, by the backend (gloo, NCCL). `observe.hang_s` finds a missing rank
    sooner, and names it."""
    meet: float = Field(default=600.0, gt=0, le=MOST_SECONDS)
    """Seconds for which ranks wait for each other when they start. Hosts of a cluster may come minutes apart."""


class Sections(Section):
    """All sections. `Recipe` (load.py) also checks what their fields must agree on."""

    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    train: TrainSection = TrainSection()
    optim: OptimSection = OptimSection()
    layout: LayoutSection = LayoutSection()
    sync: SyncSection = SyncSection()
    precision: PrecisionSection = PrecisionSection()
    checkpoint: CheckpointSection = CheckpointSection()
    faults: FaultsSection = FaultsSection()
    observe: ObserveSection = ObserveSection()
    launch: LaunchSection = LaunchSection()

    @property
    def replica_groups(self) -> ReplicaGroups:
        """The replica groups of the run: one, unless replicas train apart."""
        sync = self.sync
        if sync.method not in OUTER:
            return ONE_REPLICA_GROUP
        kept = DTYPES[MASTER].bytes + OUTER[sync.method].card.bytes
        count = sync.replica_groups or self.layout.dp_replicate
        return ReplicaGroups(count, sync.every, sync.fragments, sync.outer_dtype, kept, sync.overlap)

    @property
    def servers(self) -> Servers:
        """The parameter servers of the run: none, unless replicas are workers."""
        sync, judging = self.sync, self.faults.on_nonfinite == "skip" or self.optim.grad_clip > 0
        if sync.method != SERVER:
            return Servers()
        return Servers(sync.servers, sync.staleness, Order.parse(sync.order), judging or sync.staleness != 0)
