"""Tensor and sequence parallelism compute what one process computes: loss, gradients, norm, weights, validation."""

from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import stored
import torch
from marks import all_but, slow_but
from parity import assert_equal, state_of, steps
from pool_runs import assert_close_tensors, lines, train_rank
from ranks import run_ranks

from fivefold.checkpoint import store
from fivefold.comm import Axis
from fivefold.errors import UserError
from fivefold.parallel.tensor import sum_gradients
from fivefold.recipe import Recipe, change, load, resolve
from fivefold.sharding.layout import Layout
from fivefold.step.step import agree, forward_backward, update
from fivefold_plan.trace.traffic import Collectives

ROWS, T, V = 8, 16, 128
MODELS = {
    "llama": ["model.kv_heads=4", "model.heads=8"],
    "llama tied": ["model.kv_heads=4", "model.tie_embeddings=true"],
    "gpt2": ["model.arch=gpt2", "model.kv_heads=4"],
    "gpt2 untied": ["model.arch=gpt2", "model.kv_heads=4", "model.tie_embeddings=false"],
    "bert": ["model.arch=bert", "model.kv_heads=4"],
    "moe": [
        "model.arch=moe",
        "model.kv_heads=4",
        "model.experts=4",
        "model.experts_per_token=2",
        "model.dense_layers=1",
        "model.shared_experts=1",
    ],
}
TINY = [
    "model.layers=2", "model.dim=32", "model.heads=4", f"model.seq_len={T}", f"model.vocab_size={V}",
    "model.init_std=0.1", "train.steps=6", f"train.global_batch_size={ROWS}", "train.microbatch_size=2",
    "train.sample_every=0", "optim.lr=1e-3", "optim.warmup_steps=1", "optim.grad_clip=0.5", "precision.mode=fp32",
    "layout.dp_replicate=1", "observe.tracker=none",
]  # fmt: skip


# Adam divides a gradient by its own size. That of a key's bias is 0 but for rounding (softmax does not see it), and its
# updates would be rounding noise as large as any: eps is above the noise.
TINY.append("optim.eps=1e-4")


def recipe_of(model: str, *overrides: str) -> Recipe:
    return resolve(change(load("quickstart", TINY), [*MODELS[model], *overrides]), vocab_size=V)


class Source:
    """Random tokens and targets. For BERT one target of four counts: as many in each row, so that microbatches have
    equal weight."""

    def __init__(self, model: str):
        self.counted = torch.arange(T) % 4 == 1 if model == "bert" else torch.ones(T, dtype=torch.bool)

    def batch(self, i: int, rows: range) -> tuple[torch.Tensor, torch.Tensor]:
        draw = torch.Generator().manual_seed(i)
        tokens, targets = torch.randint(0, V, (2, ROWS, T), generator=draw)[:, list(rows)]
        return tokens, targets.masked_fill(~self.counted, -100)


@cache
def one_process(model: str) -> dict:
    # The balance of experts is a matter of each microbatch: for them the same ones.
    rows = 2 if model == "moe" else 8
    return steps(0, 1, recipe_of(model, f"train.microbatch_size={rows}"), Source(model))


LAYOUTS = [
    "tp=2",
    "tp=2,sp=true",
    "tp=2,sp=true,sp_regather=true",
    "tp=4",
    "tp=4,sp=true",
    "tp=2,dp_replicate=2",
    "tp=2,dp_replicate=2,sp=true",
]
QUICK = [("llama", layout) for layout in LAYOUTS] + [(model, "tp=2,sp=true") for model in list(MODELS)[1:]]
QUICK += [("bert", "tp=2"), ("gpt2", "tp=2,sp=true,sp_regather=true")]


@all_but("llama-tp=4", "llama-tp=2,dp_replicate=2", "gpt2 untied*", "llama-tp=2,sp=true,sp_regather=true")
@pytest.mark.parametrize(
    ("model", "layout"),
    [
        pytest.param(m, layout, marks=[] if (m, layout) in QUICK else pytest.mark.slow)
        for m in MODELS
        for layout in LAYOUTS
        if not (m == "moe" and "dp" in layout)
    ],
)
def test_equals_one_process(model, layout):
    recipe = recipe_of(model, *(f"layout.{part}" for part in layout.split(",")))
    world = Layout.from_recipe(recipe.layout).ranks
    assert_equal(run_ranks(world, steps, recipe, Source(model)), one_process(model))


CHUNKED = [
    ("llama", "tp=2,sp=true,sp_regather=true,tp_chunks=2"), ("llama", "tp=2,sp=true,tp_chunks=8"),
    ("llama", "tp=4,sp=true,tp_chunks=2"), ("llama", "tp=2,cp=2,sp=true,tp_chunks=4"),
    ("llama", "tp=2,pp=2,sp=true,schedule=zb_h1,tp_chunks=2"), ("gpt2", "tp=2,sp=true,tp_chunks=2,recompute=full"),
    ("bert", "tp=2,dp_shard=2,zero=3,sp=true,tp_chunks=4"), ("moe", "tp=2,sp=true,tp_chunks=2"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "layout"), slow_but(CHUNKED[:1], CHUNKED))
def test_chunks_equal_one_process(model: str, layout: str) -> None:
    test_equals_one_process(model, layout)


def collectives(rank: int, world: int, recipe: Recipe) -> dict[tuple[str, str], list[int]]:
    """Calls and bytes of the collectives of one microbatch, forward and backward."""
    state = state_of(rank, world, recipe)
    with Collectives(state.mesh) as sent:
        forward_backward(state, [Source("llama").batch(0, range(ROWS))], seed=0)
    return sent.found


def test_what_is_communicated():
    """Megatron's volume: a layer sums two activations in forward and two in backward; with sp each sum is a scatter and
    a gather, and with sp_regather there is one more gather for each column layer, in backward. And the loss: three
    numbers a token from each rank, never logits."""
    L, activation, statistics = 2, 4 * ROWS * T * 32, 4 * 2 * 3 * ROWS * T
    wanted = {
        ("all_reduce", "tp"): [4 * L + 2, (4 * L + 2) * activation],
        ("all_gather", "tp"): [1, statistics],
    }
    assert run_ranks(2, collectives, recipe_of("llama", "layout.tp=2")) == [wanted] * 2
    for regather in (False, True):
        gathers = 4 * L + 2 + 2 * L * regather
        wanted = {
            ("reduce_scatter", "tp"): [4 * L + 2, (4 * L + 2) * activation],
            ("all_gather", "tp"): [gathers + 1, gathers * activation + statistics],
            ("all_reduce", "tp"): [1, 4 * (2 * L + 1) * 32],  # norms
        }
        recipe = recipe_of(
            "llama", "layout.tp=2", "layout.sp=true", f"layout.sp_regather={str(regather).lower()}"
        )
        assert run_ranks(2, collectives, recipe) == [wanted] * 2


def loss_of_parts(rank: int, world: int, x, weight, bias, targets, chunks: bool, native: bool) -> tuple:
    """Loss and gradients by the vocabulary-parallel layer."""
    import torch.distributed as dist

    from fivefold.kernels import native, sizes
    from fivefold.parallel.autograd import TensorAxis
    from fivefold.parallel.tensor import VocabularyOutput

    rows = weight.shape[0] // world
    leaves = [x, weight[rows * rank : rows * (rank + 1)], bias[rows * rank : rows * (rank + 1)]]
    x, weight, bias = (t.clone().requires_grad_() for t in leaves)
    output = VocabularyOutput(
        TensorAxis(Axis("tp", range(world), rank, torch.device("cpu"), dist.group.WORLD), sp=False)
    )
    with pytest.MonkeyPatch.context() as patch:
        if chunks:
            patch.setattr(sizes, "MIN_ROWS", 7)
            patch.setattr(sizes, "SUM_SIZE", 0)
            patch.setitem(sizes.LOGITS_BYTES, "cpu", 1)
        if not native:
            patch.setattr(native, "usable", lambda *tensors: False)
        found = output(x, weight, targets, bias)
        found.backward(torch.tensor(0.5), retain_graph=True)
        with pytest.raises(RuntimeError, match="a second backward of the same loss"):
            found.backward(torch.tensor(0.5))
        with torch.no_grad():
            logits = output(x, weight, None, bias)
            assert output(x, weight, targets, bias).item() == pytest.approx(found.item(), rel=1e-6)
    return found.item(), x.grad, weight.grad, bias.grad, logits


@pytest.mark.parametrize("chunks", [False, True])
@pytest.mark.parametrize("native", [False, True])
def test_vocabulary_parallel_loss(chunks, native):
    """Large logits (their exponentials overflow), targets that do not count, several chunks, a bias, plain PyTorch."""
    torch.manual_seed(0)
    x, weight, bias = torch.randn(3, 10, 16) * 8, torch.randn(24, 16) * 8, torch.randn(24)
    targets = torch.randint(24, (3, 10)).masked_fill(torch.rand(3, 10) < 0.3, -100)
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    logits = (leaves[0] @ leaves[1].T + leaves[2]).double()
    wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    wanted.backward(torch.tensor(0.5))
    answers = run_ranks(2, loss_of_parts, x, weight, bias, targets, chunks, native)
    got = [answers[0][1], *(torch.cat([answer[i] for answer in answers]) for i in (2, 3))]
    for answer in answers:
        assert answer[0] == pytest.approx(wanted.item(), rel=1e-6)
        assert torch.equal(answer[1], got[0]), "all ranks have the same gradient of x"
        assert torch.allclose(answer[4], logits.float(), rtol=1e-5, atol=1e-4)
    for tensor, leaf in zip(got, leaves, strict=True):
        assert (
            (tensor - leaf.grad).norm() / leaf.grad.norm()
        ).item() < 1e-5  # logits near 250 are rounded by as much


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["layout.tp=4", "model.heads=4", "model.kv_heads=2"],
         "layout.tp = 4 must divide model.kv_heads = 2: each rank has whole heads. "
         "Nearest valid: layout.tp = 2, or model.kv_heads = 4"),
        (["layout.tp=4", "model.ffn_dim=66"], "= 66: .* Nearest valid: layout.tp = 2, or model.ffn_dim = 64"),
        (["layout.tp=2", "model.vocab_size=257"], "Nearest valid: layout.tp = 1, or model.vocab_size = 258"),
        (["layout.tp=2", "layout.sp=true", "model.seq_len=15"], "layout.tp = 2 must divide model.seq_len = 15"),
        (["layout.tp=4", "layout.sp=true", "layout.cp=2", "model.seq_len=20"],
         r"layout.tp = 4 must divide model.seq_len = 20 / layout.cp = 10: with sp"),
        (["layout.sp=true"], "it needs tp > 1"),
        (["layout.tp=2", "layout.sp_regather=true"], "it needs sp=true"),
        (["layout.tp=2", "layout.tp_chunks=2"], "it needs sp=true. Nearest valid: tp_chunks=1"),
        (["layout.tp=2", "layout.sp=true", "layout.tp_chunks=3"],
         "layout.tp_chunks = 3 must divide the 8 tokens of a sequence .* Nearest valid: layout.tp_chunks = 2"),
    ],
)  # fmt: skip
def test_what_cannot_be_divided_is_refused(overrides, message):
    with pytest.raises(UserError, match=message):
        change(load("quickstart", TINY), overrides)


def test_a_size_known_after_the_data_is_refused_too():
    """Three ranks cannot share what turns out to be 128 tokens."""
    recipe = load(
        "quickstart",
        ["model.heads=3", "model.kv_heads=3", "model.ffn_dim=96", "layout.tp=3", "data.tokenizer=chars"],
    )
    with pytest.raises(UserError, match=r"layout.tp = 3 must divide model.vocab_size = 128"):
        resolve(recipe, vocab_size=100)


@pytest.mark.parametrize("sp", [pytest.param("false", marks=pytest.mark.slow), "true"])
def test_a_run_goes_on_in_one_process(tmp_path, sp):
    """Four steps at tp 2, saved; two more by one process: losses, norms, validation and weights of a run by one."""
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    source = [
        f"data.source={tmp_path / 'text.txt'}",
        f"data.cache={tmp_path / 'cache'}",
        "data.tokenizer=bytes",
    ]
    size = ["model.vocab_size=320", "train.val_every=2", "optim.schedule=constant", "data.val_fraction=0.1"]
    size += ["train.val_sequences=8", "train.sample_tokens=4"]
    recipe = change(load("quickstart", TINY), [*MODELS["llama"], *source, *size])
    train_rank(0, 1, recipe, tmp_path / "one")
    two = change(recipe, ["train.steps=4", "layout.tp=2", f"layout.sp={sp}"])
    run_ranks(2, train_rank, two, tmp_path / "two")
    train_rank(0, 1, recipe, tmp_path / "two", True)
    for key in ("loss", "grad_norm", "val_loss"):
        assert lines(tmp_path / "two", key) == pytest.approx(lines(tmp_path / "one", key), rel=1e-5)
    one, two = (stored.load(store.latest(tmp_path / name)) for name in ("one", "two"))
    assert_close_tensors(two.model, one.model)


def test_dropout_is_the_same_on_whole_activations(tmp_path):
    """Without sp the ranks must drop the same elements: the whole parameters stay equal on all."""
    for sp in ("false", "true"):
        recipe = recipe_of("gpt2", "layout.tp=2", f"layout.sp={sp}", "model.dropout=0.3")
        first, second = run_ranks(2, whole_weights, recipe)
        assert all(torch.equal(first[name], second[name]) for name in first)


def whole_weights(rank: int, world: int, recipe: Recipe) -> dict[str, torch.Tensor]:
    state = state_of(rank, world, recipe)
    forward_backward(state, [Source("gpt2").batch(0, range(ROWS))], seed=0)
    norm = agree(state, torch.zeros(()), 0.0)[1]
    update(state, recipe.optim, norm, torch.zeros(()), 6)
    return {n: w.clone() for n, w in state.masters().items() if "norm" in n or n == "embed_positions.weight"}


@pytest.mark.parametrize("shapes", [[(1, 6)], [(6,)], [(2, 3), (4,)]], ids=str)
def test_gradients_in_host_memory_are_summed_on_the_device(shapes: list[tuple[int, ...]]) -> None:
    """So the sum is another tensor than the only gradient of a message, whatever that one's shape."""
    gradients = {str(number): torch.randn(shape) for number, shape in enumerate(shapes)}
    wanted = {name: 2 * gradient for name, gradient in gradients.items()}
    axis = SimpleNamespace(start_all_reduce=lambda flat: lambda: 2 * flat)
    mesh: Any = SimpleNamespace(axis=lambda _: axis, device=torch.device("cpu"))
    replica: Any = SimpleNamespace(gradients=gradients)
    sum_gradients([replica], [list(gradients)], mesh)()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, wanted[name])


def test_gradients_in_host_memory_come_to_the_device_message_by_message() -> None:
    """Those of many experts would not fit there together."""
    gradients, there, most = {str(number): torch.randn(4) for number in range(3)}, [0], [0]

    def start(flat: torch.Tensor) -> Any:
        assert flat.device.type == "meta"
        there[0] += 1
        most[0] = max(most[0], there[0])

        def wait() -> torch.Tensor:
            there[0] -= 1
            return torch.zeros(len(flat))

        return wait

    mesh: Any = SimpleNamespace(
        axis=lambda _: SimpleNamespace(start_all_reduce=start), device=torch.device("meta")
    )
    replica: Any = SimpleNamespace(gradients=gradients)
    sum_gradients([replica], [[name] for name in gradients], mesh)()
    assert most == [1]
    assert not any(gradient.any() for gradient in gradients.values())
