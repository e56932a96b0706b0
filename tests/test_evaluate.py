"""Evaluation: windows, log-likelihoods against the model itself, task files, prompts, layouts, the command."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from pool_runs import ranks_of
from ranks import run_ranks
from test_cli import run as command

from fivefold.checkpoint import store, write
from fivefold.checkpoint.source import export_run, import_folder
from fivefold.data.eval_docs import Item, prompts, read_items
from fivefold.data.tokenizer import load_tokenizer, train_bpe
from fivefold.errors import UserError
from fivefold.models.base import build
from fivefold.recipe import ModelSection, Recipe, TrainSection, load, resolve, resolve_model, to_toml
from fivefold.step.state import build_state
from fivefold.train.api import Run
from fivefold.train.evaluate import Evaluation, Request, Score, Scorer, _Scores, evaluate, score, windows
from fivefold.train.generate import open_run
from fivefold.train.saver import prepare

TASKS = Path(__file__).parent / "tasks"
TEXT = "".join(path.read_text(encoding="utf-8") for path in sorted(TASKS.glob("*.jsonl")))
SMALL = {"layers": 2, "dim": 32, "heads": 4, "seq_len": 128, "init_std": 0.3}
ARCHS = {
    "llama": {"kv_heads": 2},
    "gpt2": {},
    "moe": {"experts": 4},
    "deepseek": {"rope_dim": 4, "value_dim": 5},
    "qwen3_next": {"full_every": 2, "experts": 4, "norm_eps": 0.1},
}


def make_run(folder: Path, arch: str = "llama", **fields) -> Path:
    """A run folder with random weights and a small BPE, as training leaves it."""
    tokenizer = train_bpe([TEXT], 400, mask=arch == "bert")
    section = ModelSection(arch=arch, **{**SMALL, "vocab_size": 416, **fields})
    recipe = resolve(Recipe(model=section, train=TrainSection(steps=1)), vocab_size=tokenizer.vocab_size)
    folder.mkdir()
    (folder / "recipe.toml").write_text(to_toml(recipe), encoding="utf-8")
    tokenizer.save(folder / "tokenizer.json")
    for step in (1, 2):
        state = build(recipe.model, device="cpu", seed=step).state_dict()
        write.save(store.folder_of(folder, step), state, None, {"step": step, "tokens": 64})
    return folder


@pytest.fixture(scope="module")
def a_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("eval") / "run")


@torch.no_grad()
def directly(module: torch.nn.Module, tokens: list[int], scored: int) -> tuple[float, bool]:
    """Log-likelihood of the last tokens, from the logits of all positions in fp64; whether each is the likeliest."""
    log_p = module(torch.tensor([tokens[:-1]]))[0].double().log_softmax(-1)[-scored:]
    targets = torch.tensor(tokens[-scored:])
    greedy = bool((log_p.argmax(-1) == targets).all())
    return log_p.gather(1, targets[:, None]).sum().item(), greedy


# Windows


def test_windows_are_those_of_the_documentation() -> None:
    found = [(list(w.tokens), w.scored, w.cut) for w in windows(np.arange(11), 4, 4)]
    assert found == [
        ([0, 1, 2, 3, 4], 4, False),
        ([4, 5, 6, 7, 8], 4, True),
        ([6, 7, 8, 9, 10], 2, True),  # a whole context, though only two tokens are left
    ]
    found = [(list(w.tokens), w.scored) for w in windows(np.arange(8), 4, 2)]
    assert found == [([0, 1, 2, 3, 4], 4), ([2, 3, 4, 5, 6], 2), ([3, 4, 5, 6, 7], 1)]


def test_windows_score_each_token_once_with_the_context_that_there_is() -> None:
    for n in range(14):
        for context in range(1, 7):
            for stride in range(1, context + 1):
                seen = []
                for window in windows(np.arange(n + 1), context, stride):
                    inputs, scored = window.tokens[:-1], window.tokens[-window.scored :]
                    assert len(inputs) == (context if seen else min(context, n))
                    assert not seen or len(scored) <= stride
                    seen += list(scored)
                assert seen == list(range(1, n + 1))


# Log-likelihoods


@pytest.mark.parametrize("arch", ARCHS)
def test_scores_are_those_of_the_models_logits(arch: str) -> None:
    section = ModelSection(arch=arch, **{**SMALL, "seq_len": 40, "vocab_size": 60, **ARCHS[arch]})
    model = resolve_model(section, vocab_size=60)
    module = build(model, device="cpu", seed=3)
    module.train()
    draw = np.random.default_rng(0)
    requests = [
        Request(draw.integers(0, 60, n + 1), scored) for n, scored in ((1, 1), (40, 40), (7, 2), (30, 1))
    ]
    for shared, count in ((9, 3), (9, 4), (20, 2)):  # questions, whose choices share their first tokens
        front = draw.integers(0, 60, shared)
        for length in range(1, count + 1):
            tokens = np.concatenate([front, draw.integers(0, 60, length + 1)])
            requests.append(Request(tokens, length, shared))
    with torch.no_grad():  # and one that the model would write itself
        best = int(module.eval()(torch.tensor(front[None]))[0, -1].argmax())
    requests += [Request(np.append(front, best), 1), Request(np.append(front, (best + 1) % 60), 1)]
    wanted = [directly(module, list(r.tokens), r.scored) for r in requests]
    module.train()
    for batch_tokens in (40, 100, 10_000):
        found = list(score(module, model, iter(requests), batch_tokens))
        assert [request for request, _ in found] == requests
        torch.testing.assert_close(
            torch.tensor([s.log_p for _, s in found]),
            torch.tensor([p for p, _ in wanted]),
            atol=1e-4,
            rtol=1e-5,
        )
        assert [s.greedy for _, s in found] == [greedy for _, greedy in wanted]
    assert wanted[-2][1]
    assert not wanted[-1][1]
    assert module.training
    assert type(module.output) is not _Scores


def test_batches_hold_no_more_tokens_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(1)
    shapes: list[tuple[int, int]] = []

    def note(module, model, batch):
        shapes.append((len(batch), max(len(r.tokens) for r in batch) - 1))
        assert len({r.shared for r in batch}) == 1
        return [Score(float(r.tokens[0]), False) for r in batch]

    monkeypatch.setattr("fivefold.train.evaluate._score_batch", note)
    front = np.arange(10)
    requests = [Request(np.append(n, draw.integers(0, 9, draw.integers(1, 60))), 1) for n in range(300)]
    requests += [Request(np.append(front, draw.integers(0, 9, 5)), 1, shared=10) for _ in range(30)]
    module = build(resolve_model(ModelSection(**SMALL), vocab_size=9), device="meta")
    found = list(score(module, None, iter(requests), 64))  # type: ignore[arg-type]
    assert [s.log_p for _, s in found] == [float(r.tokens[0]) for r in requests]
    assert all(rows * length <= 64 for rows, length in shapes)
    assert sum(rows for rows, _ in shapes) == 330
    assert len(shapes) < 220  # those of about the same length go together


def test_a_diverged_model_is_named(a_run: Path) -> None:
    module, recipe, _ = open_run(a_run)
    module.embed.weight.data[:] = float("nan")  # type: ignore[union-attr]
    with pytest.raises(UserError, match="not finite"):
        list(score(module, recipe.model, [Request(np.arange(4), 2)], 100))


# Texts


def test_text_figures(a_run: Path, tmp_path: Path) -> None:
    texts = {"short.txt": "Grass is green.", "long.md": TEXT[:2000], "naïve.txt": " é\n\n日本 "}
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    lines = [json.dumps({"body": text}) for text in ("one", "", "two and three")]
    (tmp_path / "lines.jsonl").write_text("\n".join(lines), encoding="utf-8")
    files = [tmp_path / name for name in [*texts, "lines.jsonl"]]
    how = Evaluation(dtype="fp32", context=24, stride=7, text_key="body")
    found = evaluate(a_run, files, how=how)
    assert (found["step"], found["dtype"], found["context"], found["stride"]) == (2, "fp32", 24, 7)
    module, _, tokenizer = open_run(a_run)
    assert tokenizer is not None
    total = [0.0, 0, 0, 0]
    for row, documents in zip(
        found["texts"], [[t] for t in texts.values()] + [["one", "", "two and three"]], strict=False
    ):
        nats = 0.0
        for text in documents:
            tokens = [tokenizer.end_id, *tokenizer.encode(text)]
            nats -= sum(
                directly(module, list(w.tokens), w.scored)[0] for w in windows(np.array(tokens), 24, 7)
            )
        size, count = len("".join(documents).encode()), sum(len(tokenizer.encode(t)) for t in documents)
        assert (row["documents"], row["bytes"], row["tokens"]) == (len(documents), size, count)
        assert row["nats"] == pytest.approx(nats, rel=1e-5)
        assert row["perplexity"] == pytest.approx(math.exp(nats / count), rel=1e-4)
        assert row["bits_per_byte"] == pytest.approx(nats / math.log(2) / size, rel=1e-5)
        total = [a + b for a, b in zip(total, (nats, size, count, row["words"]), strict=True)]
    last = found["texts"][-1]
    assert (last["file"], last["documents"], last["bytes"], last["tokens"]) == (
        "all files",
        6,
        total[1],
        total[2],
    )
    assert last["bits_per_byte"] == pytest.approx(total[0] / math.log(2) / total[1], rel=1e-5)
    assert last["word_perplexity"] == pytest.approx(math.exp(total[0] / total[3]), rel=1e-4)
    whole = evaluate(a_run, files[1:2], how=Evaluation(dtype="fp32"))["texts"][0]
    assert (whole["tokens"], whole["nats"] < found["texts"][1]["nats"] * 2) == (
        found["texts"][1]["tokens"],
        True,
    )
    assert whole["nats"] != found["texts"][1]["nats"]


# Tasks


def test_items_of_each_schema() -> None:
    """The first of each file, and one with the schema's peculiarities."""
    read = {name: read_items(TASKS / f"{name}.jsonl") for name in
            ("hellaswag", "arc", "lambada", "choices", "completion")}  # fmt: skip
    assert {name: (schema, len(items)) for name, (schema, items) in read.items()} == {
        name: (name, 10) for name in read
    }
    swag, arc = read["hellaswag"][1], read["arc"][1]
    assert swag[0] == Item(
        "Washing dishes: A woman stands at a sink full of plates. She",
        (
            "rinses a plate and puts it on the rack.",
            "throws the sink over her shoulder.",
            "paints the plate with a long brush.",
            "dives into the water and swims away.",
        ),
        0,
    )
    assert (
        swag[4].context == "Home and Garden: How to grow basil. Choose a pot. Basil needs room for its roots."
    )
    assert swag[4].choices[0].endswith("can drain.. Fill it with loose soil.")
    assert swag[4].choices[3] == "Feed the roots with bread and cheese. Repeat at noon."
    assert arc[2] == Item(
        "Question: At sea level water boils at\nAnswer:",
        ("0 degrees Celsius", "37 degrees Celsius", "100 degrees Celsius", "500 degrees Celsius"),
        2,
    )
    assert read["lambada"][1][1].choices == ("key",)
    assert read["lambada"][1][1].solved.endswith("bent down and picked up the key")
    assert read["choices"][1][5].solved == "import numpy as np"
    assert read["completion"][1][4] == Item("def __init__(", ("self",), 0, "")
    assert [item.line for item in arc] == list(range(1, 11))


def test_arc_and_hellaswag_in_the_form_of_the_hub(tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (TASKS / "arc.jsonl").read_text().splitlines()]
    for row in rows:
        choices = row["question"]["choices"]
        row["choices"] = {key: [choice[key] for choice in choices] for key in ("text", "label")}
        row["question"] = row["question"]["stem"]
    path = tmp_path / "arc.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    assert read_items(path) == read_items(TASKS / "arc.jsonl")
    swag = (TASKS / "hellaswag.jsonl").read_text().replace('"label": 2', '"label": "2"')
    path.write_text(swag)
    assert read_items(path) == read_items(TASKS / "hellaswag.jsonl")


@pytest.mark.parametrize("name", ["hellaswag", "arc", "choices", "lambada", "completion"])
def test_task_figures_are_those_of_the_models_logits(a_run: Path, name: str) -> None:
    how = Evaluation(dtype="fp32", shots=1 if name == "arc" else 0)
    (row,) = evaluate(a_run, tasks=[TASKS / f"{name}.jsonl"], how=how)["tasks"]
    module, _, tokenizer = open_run(a_run)
    assert tokenizer is not None
    _, items = read_items(TASKS / f"{name}.jsonl")
    contexts = prompts(items, how.shots, items, 1234, same=True)
    right, right_norm, all_log_p = [], [], []
    for item, context, detail in zip(items, contexts, row["details"], strict=True):
        log_p, greedy = [], []
        for choice in item.choices:
            front = context.rstrip()
            whole = tokenizer.encode(context + item.join + choice)
            count = len(whole) - len(tokenizer.encode(front))
            tokens = whole if front else [tokenizer.end_id, *whole]
            p, is_greedy = directly(module, tokens[-129:], count)
            log_p.append(p)
            greedy.append(is_greedy)
        assert detail["log_likelihoods"] == pytest.approx(log_p, abs=1e-3, rel=1e-5)
        assert (detail["greedy"], detail["line"]) == (greedy, item.line)
        by_length = [p / len(choice) for p, choice in zip(log_p, item.choices, strict=True)]
        right.append(greedy[0] if len(log_p) == 1 else np.argmax(log_p) == item.answer)
        right_norm.append(np.argmax(by_length) == item.answer)
        all_log_p.append(log_p[0])
    assert row["accuracy"] == np.mean(right)
    assert row["accuracy_stderr"] == pytest.approx(np.std(right, ddof=1) / 10**0.5)
    if name in ("lambada", "completion"):
        assert row["perplexity"] == pytest.approx(np.exp(-np.mean(all_log_p)), rel=1e-4)
    else:
        assert row["accuracy_norm"] == np.mean(right_norm)
        assert row["accuracy_norm_stderr"] == pytest.approx(np.std(right_norm, ddof=1) / 10**0.5)


def test_a_prompt_that_is_too_long_loses_its_beginning(a_run: Path) -> None:
    how = Evaluation(dtype="fp32", shots=5, context=64, limit=4)
    (row,) = evaluate(a_run, tasks=[TASKS / "hellaswag.jsonl"], how=how)["tasks"]
    assert (row["items"], row["cut"]) == (4, 4)
    module, recipe, tokenizer = open_run(a_run)
    assert tokenizer is not None
    scorer = Scorer(module, tokenizer, recipe.model, 8)
    (request,) = scorer.continuations("one two three four five six seven eight", [" nine"])
    assert request.cut
    assert list(request.tokens) == tokenizer.encode("one two three four five six seven eight nine")[-9:]
    with pytest.raises(UserError, match="tokens; must be 1 to 8"):
        scorer.continuations("one", [" two three four five six seven eight nine ten eleven twelve"])


def test_blanks_before_the_border_go_to_the_continuation(a_run: Path) -> None:
    module, recipe, tokenizer = open_run(a_run)
    assert tokenizer is not None
    scorer = Scorer(module, tokenizer, recipe.model, 128)
    (blank,) = scorer.continuations("The sun rises in the ", ["east"])
    (word,) = scorer.continuations("The sun rises in the", [" east"])
    assert (list(blank.tokens), blank.scored) == (list(word.tokens), word.scored)
    (nothing,) = scorer.continuations(" \n", ["east"])
    assert (list(nothing.tokens), nothing.scored) == (
        [tokenizer.end_id, *tokenizer.encode(" \neast")],
        len(tokenizer.encode(" \neast")),
    )


# Few-shot prompts


def item(number: int) -> Item:
    return Item(f"Q{number}:", ("yes", "no"), number % 2)


def test_few_shot_prompts() -> None:
    """The numbers are those that lm-evaluation-harness 0.4.13 draws with fewshot_random_seed = 1234."""
    items = [item(n) for n in range(10)]
    others = [item(n) for n in range(100, 110)]
    assert list(prompts(items[:2], 0, items, 1234, same=True)) == ["Q0:", "Q1:"]
    drawn = list(prompts(items[:2], 2, others, 1234, same=False))
    assert drawn == [
        "Q107: no\n\nQ101: no\n\nQ0:",
        "Q100: yes\n\nQ101: no\n\nQ1:",
    ]
    own = list(prompts(items[:3], 3, items, 1234, same=True))
    assert own == list(prompts(items, 3, items, 1234, same=True))[:3]  # a limit does not change them
    assert own != list(prompts(items[:3], 3, items, 5, same=True))
    for number, text in enumerate(prompts(items, 8, items, 0, same=True)):
        shots = text.split("\n\n")
        assert shots[-1] == f"Q{number}:"
        assert len(set(shots)) == 9
        assert not any(shot.startswith(f"Q{number}: ") for shot in shots)


def test_an_item_that_stands_twice_in_its_file_is_no_example_of_itself() -> None:
    items = [item(0), item(0), item(0), item(1), item(2)]
    for text in prompts(items[:3], 2, items, 0, same=True):
        assert "Q0: yes" not in text
        assert text.count("\n\n") == 2


# What is refused


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 3: not JSON: Expecting property name"),
        ("[1]", "line 3: a JSON list; expected an object"),
        ("\ud800", "line 3: not UTF-8: byte 0xed at 0 in the line"),
        ('{"context": "a", "choices": ["b"], "answer": 0}', "line 3: choices must be 2 or more"),
        ('{"context": "a", "choices": ["b", ""], "answer": 0}', "line 3: choice 1 is empty"),
        ('{"context": "a", "choices": ["b", "c"], "answer": 2}', "line 3: answer = 2: must be|answer = 2 must be"),
        ('{"context": "a", "choices": ["b", "c"], "answer": true}', "answer = True must be a whole number"),
        ('{"context": "a", "choices": ["b", 5], "answer": 0}', "choices = 5 must be text"),
        ('{"context": "a", "choices": "bc", "answer": 0}', "choices must be a list of texts"),
        ('{"context": "a", "choices": ["b", "c"], "anwser": 0}', "unknown field 'anwser'.* did you mean 'answer'"),
        ('{"context": "a", "choices": ["b", "c"]}', "no field 'answer'"),
        ('{"context": "a\\ud800", "choices": ["b", "c"], "answer": 0}', "context holds a lone surrogate"),
        ('{"context": "a", "choices": ["b", "c"], "answer": 1' + "0" * 60 + "}", "must be a whole number from 0 to 1"),
    ],
)  # fmt: skip
def test_bad_lines_are_named(tmp_path: Path, line: str, words: str) -> None:
    good = '{"context": "a", "choices": ["b", "c"], "answer": 1}'
    path = tmp_path / "task.jsonl"
    path.write_bytes(f"{good}\n\n{line}\n".encode("utf-8", "surrogatepass"))
    with pytest.raises(UserError, match=words) as error:
        read_items(path)
    assert str(error.value).startswith(f"{path}, line 3: ")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"question": "a"}', "no known schema: it has none of the fields 'endings' .hellaswag."),
        ('{"activity_label": "a", "ctx_a": "b", "ctx_b": "c", "endings": ["d", "e"]}', "no 'label': HellaSwag's test"),
        ('{"question": {"stem": "a", "choices": [{"text": "b", "label": "A"}]}, "answerKey": "B"}', "answerKey = 'B'"),
        ('{"question": {"stem": "a", "choices": 5}, "answerKey": "B"}', "question.choices must be a list"),
        ('{"question": "a", "choices": ["b"], "answerKey": "B"}', "choices must be an object"),
        ('{"text": "one"}', "text must have a last word"),
        ('{"context": "a", "target": ""}', "choice 0 is empty"),
    ],
)  # fmt: skip
def test_bad_items_of_published_schemas_are_named(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "task.jsonl"
    path.write_text(line)
    with pytest.raises(UserError, match=words):
        read_items(path)


def test_what_cannot_be_evaluated_is_refused(a_run: Path, tmp_path: Path) -> None:
    text, arc = tmp_path / "text.txt", TASKS / "arc.jsonl"
    text.write_text("words")
    for expected, texts, tasks, how, step in (
        ("nothing to evaluate", [], [], {}, None),
        ("context = 129: must be at most 128", [text], [], {"context": 129}, None),
        ("stride = 9: must be at most 8", [text], [], {"context": 8, "stride": 9}, None),
        ("batch_tokens = 100: must be 128 or more", [text], [], {"batch_tokens": 100}, None),
        ("step = 7: .* it has 1, 2", [text], [], {}, 7),
        ("shots = 10: .* has 9 examples", [], [arc], {"shots": 10}, None),
        ("dtype = fp8", [text], [], {"dtype": "fp8"}, None),
        ("shots_from", [], [arc], {"shots_from": arc}, None),
        ("no such file: .*did you mean .*text.txt", [tmp_path / "test.txt"], [], {}, None),
        ("is not a regular file", [tmp_path], [], {}, None),
        (
            "line 1: no field 'txt'; did you mean",
            [TASKS / "lambada.jsonl"],
            [],
            {"text_key": "txt"},
            None,
        ),
    ):
        with pytest.raises(UserError, match=expected):
            evaluate(a_run, texts, tasks, Evaluation(**how), step=step)
    text.write_bytes(b"a\xff")
    with pytest.raises(UserError, match="not UTF-8 text at byte 1"):
        evaluate(a_run, [text])
    text.write_text("")
    with pytest.raises(UserError, match="holds no text"):
        evaluate(a_run, [text])
    with pytest.raises(UserError, match="bert is bidirectional"):
        evaluate(make_run(tmp_path / "bert", "bert"), tasks=[arc])
    plain = make_run(tmp_path / "tokens", layers=1)
    (plain / "tokenizer.json").unlink()
    with pytest.raises(
        UserError, match=r"its folder has no tokenizer\.json\. Put the model's tokenizer\.json"
    ):
        evaluate(plain, tasks=[arc])
    recipe = load(plain / "recipe.toml")
    data = recipe.data.model_copy(update={"source": "tokens:some.bin"})
    (plain / "recipe.toml").write_text(to_toml(recipe.model_copy(update={"data": data})))
    with pytest.raises(UserError, match="it was trained on token files"):
        evaluate(plain, tasks=[arc])


# Runs of all kinds


def save_rank(rank: int, world: int, recipe: Recipe, out: Path) -> None:
    """Saves the initial weights, as training in this layout does."""
    prepare(build_state(recipe, ranks_of(rank, world)), out, {"tokens": 0}).save()


def test_a_run_of_any_layout_gives_the_same_figures(tmp_path: Path, a_run: Path) -> None:
    tokenizer, figures = (a_run / "tokenizer.json").read_text(), []
    sets = ["precision.mode=fp32", *(f"model.{name}={value}" for name, value in SMALL.items())]
    for layout in ("dp=1", "tp=2", "pp=2", "dp=2,zero=3"):
        recipe, out = resolve(load("quickstart", sets, layout), vocab_size=416), tmp_path / layout
        out.mkdir()
        (out / "recipe.toml").write_text(to_toml(recipe))
        (out / "tokenizer.json").write_text(tokenizer)
        if layout == "dp=1":
            save_rank(0, 1, recipe, out)
        else:
            run_ranks(2, save_rank, recipe, out)
        found = evaluate(out, [TASKS / "arc.jsonl"], [TASKS / "arc.jsonl"], Evaluation(text_key="id"))
        assert (found["step"], found["dtype"]) == (0, "fp32")
        log_p = [detail["log_likelihoods"] for detail in found["tasks"][0]["details"]]
        figures.append((found["texts"][0]["nats"], log_p))
    assert all(other == figures[0] for other in figures)  # the same weights, and so the same bits


def test_an_imported_model_begins_as_its_tokenizer_says(a_run: Path, tmp_path: Path) -> None:
    """A tokenizer that puts a token of its own before each text, as Llama's."""
    export_run(a_run, tmp_path / "hf")
    path = tmp_path / "hf" / "tokenizer.json"
    spec = json.loads(path.read_text())
    bos = spec["model"]["vocab"]["Q"]
    template = {"SpecialToken": {"id": "Q", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    spec["post_processor"] = {
        "type": "TemplateProcessing",
        "single": template,
        "pair": template,
        "special_tokens": {"Q": {"id": "Q", "ids": [bos], "tokens": ["Q"]}},
    }
    path.write_text(json.dumps(spec))
    config = json.loads((path.parent / "tokenizer_config.json").read_text())
    (path.parent / "tokenizer_config.json").write_text(json.dumps(config | {"bos_token": "Q"}))
    ours = import_folder(tmp_path / "hf", tmp_path / "run")
    module, recipe, tokenizer = open_run(ours)
    assert tokenizer is not None
    assert tokenizer.start_ids == tokenizer.begin_ids == [bos]
    scorer = Scorer(module, tokenizer, recipe.model, 128)
    (request,) = scorer.continuations("One two", [" three"])
    assert list(request.tokens) == [bos, *tokenizer.encode("One two three")]
    assert scorer.document("One")[0] == bos
    own = load_tokenizer(a_run / "tokenizer.json")
    assert own.start_ids == own.begin_ids == [own.end_id]


def test_the_command(a_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text(TEXT[:300])
    arguments = ["eval", str(a_run), str(tmp_path / "a.txt"), "--task", str(TASKS / "arc.jsonl")]
    arguments += ["--task", str(TASKS / "lambada.jsonl"), "--shots", "2", "--step", "1", "--dtype", "bf16"]
    assert command(*arguments, "--json", "--out", str(tmp_path / "out.json")) == 0
    printed = json.loads(capsys.readouterr().out)
    written = json.loads((tmp_path / "out.json").read_text())
    assert (printed["step"], printed["dtype"]) == (1, "bf16")
    assert len(written["tasks"][0].pop("details")) == len(written["tasks"][1].pop("details")) == 10
    assert written == printed
    how = {"tasks": [TASKS / "arc.jsonl", TASKS / "lambada.jsonl"], "shots": 2, "dtype": "bf16"}
    again = Run(a_run).evaluate(tmp_path / "a.txt", step=1, **how)
    assert again["texts"] == printed["texts"]  # the same bits
    assert [t["accuracy"] for t in again["tasks"]] == [t["accuracy"] for t in printed["tasks"]]
    assert command(*arguments) == 0
    out = capsys.readouterr().out
    assert "step 1, in bf16 on cpu, context 128 tokens, stride 128" in out
    assert f"perplexity {printed['texts'][0]['perplexity']:.4g}, bits per byte" in out
    first = printed["tasks"][0]
    assert f"accuracy {first['accuracy']:.3f} +- {first['accuracy_stderr']:.3f}, by length" in out
    assert "(lambada, 10 items, 2 shots)" in out
    assert command("eval", str(a_run), "--task", str(tmp_path / "none")) == 2
