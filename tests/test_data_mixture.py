"""Mixtures: which source stands where, weights, stages, validation sets, and runs that resume in them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import stored
from data_recipes import write
from pool_runs import assert_same_tensors, lines, train_rank
from ranks import run_ranks

from fivefold.checkpoint import store
from fivefold.data import Batches, Tokens, check, prepare
from fivefold.data.batches import Order, Stage, permute, whole_weights
from fivefold.data.dataset import amounts, order_of, seen
from fivefold.errors import UserError
from fivefold.observe.report import write_report
from fivefold.recipe import Recipe, change, leave_out, load, resolve, to_toml
from fivefold.train.job import Job, identity
from fivefold.train.resume import assert_identity
from fivefold.train.share import batches_of


@pytest.mark.parametrize("seed", range(8))
def test_weights_are_met_in_every_prefix(seed: int) -> None:
    """Each source has less than 2 items more or fewer than its weight says, and takes its items in order."""
    random = np.random.default_rng(seed)
    weights = random.random(random.integers(1, 12)) ** random.choice([1, 4])
    weights[random.random(len(weights)) < 0.2] = 0
    weights[0] += 1e-3
    order = Order([Stage(0, whole_weights(weights.tolist()))])
    places = np.arange(4000)
    sources, uses = order.at(places)
    counts = np.cumsum(np.eye(len(weights))[sources], 0)
    assert np.abs(counts - (places[:, None] + 1) * weights / weights.sum()).max() < 2
    for source in range(len(weights)):
        assert uses[sources == source].tolist() == list(range(int(counts[-1, source])))
    for place in (0, 1, 77, 4000):
        assert order.before(place) == (counts[place - 1] if place else 0 * weights).astype(int).tolist()
    some = random.integers(0, 4000, 50)  # a function of the place, whichever others are asked for
    for found, wanted in zip(order.at(some), (sources, uses), strict=True):
        assert np.array_equal(found, wanted[some])


def test_stages_go_on_where_the_one_before_ended() -> None:
    order = Order([Stage(0, whole_weights([1, 1, 0])), Stage(101, whole_weights([0, 1, 4]))])
    sources, uses = order.at(np.arange(201))
    assert sorted(set(sources[:101])) == [0, 1]
    assert sorted(set(sources[101:])) == [1, 2]
    assert order.before(201) == [51, 70, 80]
    assert uses[sources == 1].tolist() == list(range(70))
    assert Order().at(np.array([7, 2**52]))[1].tolist() == [7, 2**52]


SIZES = {"a": 1700, "b": 900, "c": 400}
TINY = [
    "model.layers=2", "model.dim=32", "model.heads=4", "model.kv_heads=2", "model.ffn_dim=48", "model.seq_len=16",
    "data.tokenizer=bytes", "data.val_fraction=0.1", "train.global_batch_size=4", "train.microbatch_size=1",
    "train.steps=6", "train.val_sequences=4", "train.val_every=3", "train.sample_tokens=4", "train.sample_every=0",
    "optim.lr=1e-2", "optim.warmup_steps=0", "optim.schedule=constant", "observe.tracker=none",
    "precision.mode=fp32", "layout.dp_replicate=1", "optim.eps=1e-4", "train.sample_prompt=a",
]  # fmt: skip


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    for name, size in SIZES.items():
        text = "".join(f"{name}{i * i % 89} " for i in range(size))
        write(tmp_path / f"{name}.txt", text)
        write(tmp_path / name / "1.txt", text[: size // 2])
        write(tmp_path / name / "2.txt", text[size // 2 :])
    return tmp_path


def mixed(texts: Path, *more: str, stages: str = "", validation: str = "") -> Recipe:
    sources = ", ".join(
        f'{{name = "{name}", source = "{texts / name}.txt", weight = {weight}}}'
        for name, weight in (("a", 5), ("b", 3), ("c", 2))
    )
    lists = [f"data.sources=[{sources}]"]
    lists += [f"data.stages={stages}"] * bool(stages) + [f"data.validation={validation}"] * bool(validation)
    return load("quickstart", [*TINY, f"data.cache={texts / 'cache'}", *lists, *more])


STAGES = "[{share = 0.5}, {share = 0.5, weights = {c = 1, a = 1}}]"


def test_one_source_has_the_order_it_always_had(texts: Path) -> None:
    recipe = load("quickstart", [*TINY, f"data.source={texts / 'a.txt'}", f"data.cache={texts / 'cache'}"])
    data = prepare(recipe)
    batches = batches_of(
        recipe.model_copy(update={"model": recipe.model.model_copy(update={"vocab_size": 512})}), data
    )
    places = np.arange(4 * 500, 4 * 501)
    numbers = [
        permute(np.asarray(p % batches.sequences), batches.sequences, 0, int(p // batches.sequences))
        for p in places
    ]
    wanted = data.train.rows(np.array(numbers) * 16, 17)
    inputs, targets, _ = batches.batch(500)
    assert np.array_equal(inputs, wanted[:, :-1])
    assert np.array_equal(targets, wanted[:, 1:])


def test_batches_hold_the_sources_that_the_order_says(texts: Path) -> None:
    """However ranks and microbatches cut a batch; each source is one text of its own letter."""
    recipe = mixed(texts, stages=STAGES)
    data = prepare(recipe)
    order = order_of(recipe, amounts(recipe, data))
    assert [stage.begin for stage in order.stages] == [0, 12]
    batches = Batches(list(data.sources.values()), 16, 4, 0, order=order)
    for i in range(6):
        inputs, *_ = batches.batch(i)
        sources, _ = order.at(np.arange(4 * i, 4 * i + 4))
        letters = [next(chr(c) for c in row if chr(c) in "abc") for row in inputs.tolist()]
        assert letters == ["abc"[source] for source in sources]
        cut = np.concatenate([batches.batch(i, range(k, k + 1))[0] for k in range(4)])
        assert np.array_equal(cut, inputs)


def test_weights_by_documents_by_size_and_what_is_left_out(texts: Path) -> None:
    """Two documents each: the shares of tokens are those of the documents' lengths. Without weights: those of sizes."""
    folders = ", ".join(f'{{name = "{n}", source = "{texts / n}", weight = 1}}' for n in SIZES)
    recipe = mixed(texts, "data.val_fraction=0", f"data.sources=[{folders}]", "data.weigh_by=documents")
    found = amounts(recipe, prepare(recipe))
    shares = [stage / sum(s) for s in [order_of(recipe, found).stages[0].weights] for stage in s]
    whole = sum(amount.tokens for amount in found.values())
    assert shares == pytest.approx([amount.tokens / whole for amount in found.values()])
    plain = mixed(texts, f"data.sources=[{folders.replace(', weight = 1', '')}]", "data.val_fraction=0")
    epochs = [row.epochs for row in seen(plain, found, 6).values()]
    assert max(epochs) - min(epochs) < 2 / min(amount.items for amount in found.values())
    left_out = leave_out(plain.train, (), 2, 4)  # steps 3 and 4 are not seen; later ones are
    order, rows = order_of(plain, found), seen(plain, found, 6, left_out)
    taken = np.bincount(order.at(np.r_[0:8, 16:32])[0], minlength=3)
    assert [row.items for row in rows.values()] == taken.tolist()


def test_epochs_count_packed_sequences(texts: Path) -> None:
    rows = "".join(json.dumps({"text": "c" * (i % 30)}) + "\n" for i in range(200))
    sources = [f"data.sources.c.source={write(texts / 'c.jsonl', rows)}", "data.packing=best_fit"]
    recipe = mixed(texts, *sources)
    data = prepare(recipe)
    found, batches = amounts(recipe, data), batches_of(resolve(recipe, vocab_size=257), data)
    assert [amount.items for amount in found.values()] == batches.counts
    assert found["c"].items > found["c"].tokens // 16


@pytest.mark.parametrize("tokenizer", ["bpe:300", "chars"])
def test_one_tokenizer_for_all_sources_and_sets(texts: Path, tokenizer: str) -> None:
    write(texts / "own.txt", "a1 z?? " * 40)
    own = f'[{{name = "own", source = "{texts / "own.txt"}"}}]'
    recipe = mixed(texts, f"data.tokenizer={tokenizer}", validation=own)
    assert any(line.startswith("c: about 2") for line in check(recipe))
    data = prepare(recipe)
    assert data.tokenizer is not None
    for part in (*data.parts, *data.validation):
        assert isinstance(part.train, Tokens)
        text = data.tokenizer.decode(part.train[:40])
        assert text.startswith("a1 z" if part.name == "own" else part.name)
    assert list(data.validation_sets) == ["a", "b", "c", "own"]
    assert prepare(recipe).info["cached"]
    assert any("(in the cache)" in line for line in check(recipe))


def test_validation_sets_do_not_change_what_is_trained_on(texts: Path) -> None:
    plain = load(
        "quickstart",
        [*TINY, f"data.source={texts / 'a.txt'}", f"data.cache={texts / 'cache'}", "data.tokenizer=bpe:300"],
    )
    recipe = change(plain, [f'data.validation=[{{name = "own", source = "{texts / "b.txt"}"}}]'])
    one, other = prepare(plain), prepare(recipe)
    assert one.info["fingerprint"] == other.info["fingerprint"]
    assert list(other.validation_sets) == ["held_out", "own"]
    assert other.tokenizer is not None
    own = other.validation[0].train
    assert isinstance(own, Tokens)
    text = other.tokenizer.decode(own[:200])
    assert (texts / "b.txt").read_text().startswith(text)


def test_a_run_resumes_in_stages_on_any_layout(texts: Path) -> None:
    """From step 2, before the border of the stages after step 3: on one rank with the same bits, on two with the same
    losses."""
    own = f'[{{name = "own", source = "{texts / "b.txt"}"}}]'
    recipe = mixed(texts, "checkpoint.every=2", "checkpoint.keep_last=9", stages=STAGES, validation=own)
    whole = texts / "whole"
    train_rank(0, 1, recipe, whole)
    for name in ("one", "two"):
        shutil.copytree(whole, texts / name)
        for later in store.checkpoints(texts / name)[1:]:
            shutil.rmtree(later)
    train_rank(0, 1, recipe, texts / "one", True)
    run_ranks(2, train_rank, change(recipe, layout="dp=2,zero=1"), texts / "two", True, timeout_s=60)
    for name in ("one", "two"):
        assert lines(texts / name, "loss") == pytest.approx(lines(whole, "loss"), rel=1e-5)
        assert lines(texts / name, "source_tokens") == lines(whole, "source_tokens")
    assert_same_tensors(
        stored.load(store.latest(texts / "one")).model, stored.load(store.latest(whole)).model
    )
    assert lines(texts / "one", "val_losses") == lines(whole, "val_losses")
    seen_tokens = lines(whole, "source_tokens")
    assert seen_tokens[2] == {"a": 6 * 16, "b": 4 * 16, "c": 2 * 16}
    assert seen_tokens[-1] == {"a": 12 * 16, "b": 4 * 16, "c": 8 * 16}
    last = lines(whole, "val_losses")[-1]
    assert last.keys() == {"a", "b", "c", "own"}
    assert lines(whole, "val_loss")[-1] == pytest.approx(np.mean([last[name] for name in "abc"]))
    page = write_report(whole).read_text()
    for part in ("Loss by validation set", "trained on a mixture of a, b, c", '<th scope="row">c</th>'):
        assert part in page


def test_conversations_and_texts_in_one_mixture(texts: Path) -> None:
    """Of conversations only answers count, of texts everything. A step is the mean over all that counts, however it is
    cut, and a run that resumes has the same bits."""
    talks = [
        [{"role": "user", "content": "q" * (1 + n % 9)}, {"role": "assistant", "content": "A" * (2 + n % 7)}]
        for n in range(60)
    ]
    write(texts / "talk.jsonl", "".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    sources = f'[{{name = "talk", source = "{texts / "talk"}.jsonl", weight = 1}}, '
    sources += f'{{name = "a", source = "{texts / "a"}.txt", weight = 1}}]'
    sets = [*TINY, f"data.cache={texts / 'cache'}", f"data.sources={sources}", "data.chat_template=plain"]
    sets += ["model.seq_len=32", "data.document_masks=true", "checkpoint.every=2", "checkpoint.keep_last=9"]
    recipe = load("quickstart", sets)
    data = prepare(recipe)
    assert data.tokenizer is not None
    batches = batches_of(resolve(recipe, vocab_size=data.vocab_size), data)
    for step in range(4):
        batch = batches.batch(step)
        numbers, _ = batches.order.at(np.arange(4 * step, 4 * step + 4))
        assert sorted(numbers.tolist()) == [0, 0, 1, 1]
        assert batch.first is not None
        for number, x, y, first in zip(
            numbers.tolist(), batch.inputs, batch.targets, batch.first, strict=True
        ):
            counted = y != -100
            if number:
                assert counted.all()
                assert not first.any()
            else:
                assert set(y[counted].tolist()) <= {ord("A"), ord("\n"), ord(" "), data.tokenizer.end_id}
                asks = (x[:-1] == ord("q")) & (x[1:] == ord("q"))
                assert not counted[:-1][asks].any()
                assert len(set(first.tolist())) > 1
    whole = texts / "whole"
    train_rank(0, 1, recipe, whole)
    shutil.copytree(whole, texts / "again")
    for later in store.checkpoints(texts / "again")[1:]:
        shutil.rmtree(later)
    train_rank(0, 1, recipe, texts / "again", True)
    final = [stored.load(store.latest(texts / name)).model for name in ("whole", "again")]
    assert_same_tensors(*final)
    run_ranks(2, train_rank, change(recipe, layout="dp=2"), texts / "two", timeout_s=60)
    train_rank(0, 1, change(recipe, ["train.microbatch_size=4"]), texts / "one-microbatch")
    for name in ("two", "one-microbatch"):
        assert lines(texts / name, "loss") == pytest.approx(lines(whole, "loss"), rel=1e-5)


def test_resuming_checks_sources_and_begun_stages(texts: Path) -> None:
    """A stage that has not begun may change; so may the number of steps, while it moves no border that was crossed."""
    recipe = mixed(texts, stages=STAGES)

    def meta(recipe: Recipe, step: int = 2) -> Any:
        data = prepare(recipe)
        return identity(Job(resolve(recipe, vocab_size=data.vocab_size), texts, data)) | {"step": step}

    def resume(recipe: Recipe, then: Any) -> None:
        data = prepare(recipe)
        job = Job(resolve(recipe, vocab_size=data.vocab_size), texts, data)
        checkpoint: Any = SimpleNamespace(folder=texts, meta=json.loads(json.dumps(then)))
        assert_identity(job, checkpoint)

    early, late = meta(recipe, 3), meta(recipe, 4)
    other = change(recipe, ["data.stages=[{share = 0.5}, {share = 0.5, weights = {b = 1}}]"])
    for fine, then in ((recipe, late), (other, early), (change(recipe, ["train.steps=12"]), early)):
        resume(fine, then)
    for wrong in (other, change(recipe, ["train.steps=12"]), change(recipe, ["data.sources.b.weight=9"])):
        with pytest.raises(
            UserError, match=r"other weights of data\.sources, or other data\.stages, up to step 4"
        ):
            resume(wrong, late)
    with pytest.raises(UserError, match=r"trained with data\.packing = concat, and now it is best_fit"):
        resume(change(recipe, ["data.packing=best_fit"]), early)
    write(texts / "b.txt", "something else " * 90)
    with pytest.raises(UserError, match=r"the data of data\.sources \(b\) changed since"):
        resume(recipe, early)


@pytest.mark.parametrize(
    ("sets", "part"),
    [
        (["data.sources.a.weight=0", "data.sources.b.weight=0", "data.sources.c.weight=0"], "every weight is 0"),
        (["data.sources.a.weight=1e308"], r"number 1: weight = 1e\+308: must be a number >= 0 and <= 1000000000"),
        (["data.sources.a.weigth=1"], "number 1: weigth = 1: unknown key; did you mean 'weight'"),
        (["data.sources.b.weight=none"], "data.sources: b has no weight, and others have one"),
        (["data.stages=[{share = 0.5}, {share = 0.3}]"], r"shares 0\.5 \+ 0\.3 sum to 0\.8; they must sum to 1"),
        (["data.stages=[{share = 1, weights = {d = 1}}]"], "a weight of d, which is no source; there are a, b, c"),
        (["data.stages=[{share = 1, weights = {a = 0}}]"], "every weight of stage 1 is 0"),
        (["data.stages=[{share = 0.99}, {share = 0.01}]"], "stage 2 with share = 0.01 has no step in a run of 6"),
        (["data.stages=[{share = 2}]"], r"number 1: share = 2: must be a number > 0 and <= 1"),
        (["data.validation=[{name = 'a', source = 'x'}]"], "the name a comes twice"),
        (["data.sources=[{name = 'a b', source = 'x'}]"], "must be 1 to 60 letters"),
        (["data.sources=[]", "data.stages=[{share = 1}]"], r"there is no \[\[data\.sources\]\]"),
        (["data.source=x.txt", "data.sources=[{name = 'a', source = 'x'}]"], "are both set; set only one"),
        (["data.sources.a.source=nowhere.txt"], "data.sources, a: data.source: no such file"),
        (["data.sources.a.max_epochs=1", "train.steps=600"], "its max_epochs allows 1. Give it a smaller weight. Use"),
    ],
)  # fmt: skip
def test_one_clear_message(texts: Path, sets: list[str], part: str) -> None:
    with pytest.raises(UserError, match=part):
        prepare(mixed(texts, *sets))


def test_a_validation_set_of_tokens_is_all_of_it(texts: Path, tmp_path: Path) -> None:
    for name, count in (("train.bin", 400), ("val.bin", 200), ("more/a.bin", 100), ("more/b.bin", 50)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        np.arange(count, dtype="<u2").tofile(tmp_path / name)

    def with_set(source: str) -> Recipe:
        own = f'[{{name = "own", source = "tokens:{source}"}}]'
        sets = [
            f"data.source=tokens:{tmp_path / 'train.bin'}",
            f"data.validation={own}",
            "model.vocab_size=512",
        ]
        return load("quickstart", [*sets, "model.seq_len=16", f"data.cache={tmp_path / 'cache'}"])

    assert len(prepare(with_set(f"{tmp_path / 'more'}")).validation_sets["own"]) == 150
    assert len(prepare(with_set(f"{tmp_path / 'val'}")).validation_sets["own"]) == 200
    for function in (prepare, check):
        with pytest.raises(UserError, match=r"data.validation, own: .*train.bin.*tokens:.*val.bin"):
            function(with_set(f"{tmp_path}"))


def test_sources_that_do_not_go_together(texts: Path) -> None:
    np.full(600, 700, "<u2").tofile(texts / "t.bin")
    tokens = f"data.sources.a.source=tokens:{texts / 't.bin'}"
    with pytest.raises(UserError, match=r"has the id 700, and data\.tokenizer = 'bytes' has 257 ids"):
        prepare(mixed(texts, tokens))
    with pytest.raises(UserError, match=r"'bpe:300' is learned from the text of the others"):
        prepare(mixed(texts, tokens, "data.tokenizer=bpe:300"))
    write(texts / "small.txt", "b" * 12)
    with pytest.raises(
        UserError, match=r"data\.sources, b: .* has \d+ training tokens, fewer than one sequence"
    ):
        prepare(mixed(texts, f"data.sources.b.source={texts / 'small.txt'}"))
    write(texts / "empty.txt", "")
    with pytest.raises(UserError, match=r"data\.sources, b: data\.source: .*holds no text"):
        prepare(mixed(texts, f"data.sources.b.source={texts / 'empty.txt'}"))
    np.full(600, 200, "<u2").tofile(texts / "t.bin")
    with pytest.raises(UserError, match=r"data\.end_token = 7: documents of text end with 256"):
        prepare(mixed(texts, tokens, "data.end_token=7"))
    assert prepare(mixed(texts, tokens)).vocab_size == 257


def test_check_names_the_set_that_training_would_refuse(texts: Path) -> None:
    np.zeros(3, "<u2").tofile(texts / "t.bin")
    for source, message in (
        (f"tokens:{texts / 't.bin'}", r"^data\.validation, v: 3 tokens, fewer than one sequence"),
        ("nowhere.txt", r"^data\.validation, v: data\.source: no such file"),
    ):
        with pytest.raises(UserError, match=message):
            check(mixed(texts, validation=f"[{{name = 'v', source = '{source}'}}]"))
    with pytest.raises(UserError, match=r"^data\.sources, b: data\.source: no such file"):
        check(mixed(texts, "data.sources.b.source=nowhere.txt"))


def test_a_mixture_as_a_file(texts: Path) -> None:
    recipe = mixed(texts, stages=STAGES, validation="[{name = 'v', source = 'stdlib'}]")
    text = to_toml(recipe)
    assert "[[data.sources]]" in text
    assert 'source = "stdlib"' in text.split("[[data.validation]]")[1]
    assert "stdlib" not in text.split("[[data.sources]]")[0].split("[data]")[1]
    (texts / "recipe.toml").write_text(text)
    assert load(texts / "recipe.toml") == recipe
    assert load(texts / "recipe.toml", ["data.source=stdlib"]).data.sources == ()
    assert load(texts / "recipe.toml", ["data.sources.b.weight=0.25"]).data.sources[1].weight == 0.25
    assert load(texts / "recipe.toml", over=["data.sources.b.weight=0.75"]).data.sources[1].weight == 0.75
    (texts / "more.toml").write_text('base = "shakespeare"\n[[data.sources]]\nname = "x"\nsource = "y"\n')
    assert load(texts / "more.toml").data.specs == {"x": "y"}
