"""`fivefold eval` beside lm-evaluation-harness (PyPI `lm_eval`) on the exported folder of the same run, in fp32.

    python benchmarks/eval_beside.py RUN --lm-eval PYTHON [--copies 20] [--out benchmarks/results/eval_lm_eval.json]

PYTHON is that of an environment with `lm_eval[hf]`. Its own definitions of HellaSwag, ARC and LAMBADA read the items
of tests/tasks instead of the published data, with 0 and 5 examples. A task of our own form and two texts are
added. Compared are the prompts, the log-likelihood of each choice, and the figures. The seconds are processor time for
HellaSwag with 2 examples, its items `copies` times: all of `evaluate` here, `loglikelihood` alone there.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parent.parent
ITEMS, TEXTS = REPO / "tests" / "tasks", ["LICENSE", "tests/tasks/choices.jsonl"]
"""None of the texts has what looks like a special token: theirs would make one of it."""
SEED, BATCH, MANY_SHOTS = 1234, 32, 2
ACCURACY = {"accuracy": "acc", "accuracy_norm": "acc_norm"}
FIGURES = {
    "hellaswag": ACCURACY,
    "arc": ACCURACY,
    "choices": ACCURACY,
    "lambada": {"accuracy": "acc", "perplexity": "perplexity"},
    "texts": {"bits_per_byte": "bits_per_byte", "word_perplexity": "word_perplexity"},
}
"""Our names of the figures, and theirs."""
TASKS = {0: ("hellaswag", "arc", "choices", "lambada"), 5: ("hellaswag", "arc", "choices")}
"""By the number of examples. Their examples of LAMBADA have two blanks before the target, ours one."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--lm-eval", metavar="PYTHON")
    parser.add_argument("--copies", type=int, default=20)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:  # in the other environment
        print(json.dumps(theirs(args.run, args.worker)))
        return
    with tempfile.TemporaryDirectory() as folder:
        found = compare(args.run, args.lm_eval, Path(folder), args.copies)
    for name, row in found["rows"].items():
        print(name, json.dumps(row))
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


def compare(run: Path, python: str, folder: Path, copies: int) -> dict[str, Any]:
    from importlib.metadata import version

    from fivefold.checkpoint.source import export_run
    from fivefold.host.machine import describe

    write_tasks(folder, copies)
    export_run(run, folder / "exported")
    command = [python, "-P", __file__, str(folder / "exported"), "--worker", str(folder)]
    environment = {
        **os.environ,
        "HF_HOME": str(folder / "cache"),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "DISABLE_MULTIPROC": "1",
    }
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    their = json.loads(done.stdout.splitlines()[-1])
    our = ours(run, folder)
    rows = {name: beside(name, our["rows"][name], their["rows"][name]) for name in our["rows"]}
    return {
        "run": our["run"],
        "rows": rows,
        "processor_seconds": {
            "fivefold": our["processor_seconds"],
            "lm_eval": their["processor_seconds"],
            "items": 10 * copies,
        },
        "versions": {**their["versions"], "fivefold": version("fivefold")},
        "machine": describe(),
    }


def write_tasks(folder: Path, copies: int) -> None:
    """The items as each side reads them."""
    for name in ("hellaswag", "arc", "lambada", "choices"):
        rows = [
            json.loads(line) for line in (ITEMS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        ]
        rows = [row for row in rows if row.get("join", " ") == " "]  # theirs joins all with a blank
        write_lines(folder / f"{name}.jsonl", rows)
        if name == "hellaswag":
            write_lines(folder / "many.jsonl", rows * copies)
        if name == "arc":
            rows = [hub_form(row) for row in rows]
        write_lines(folder / f"{name}.theirs.jsonl", rows)
    texts = [(REPO / name).read_text(encoding="utf-8") for name in TEXTS]
    write_lines(folder / "texts.jsonl", [{"text": text} for text in texts])


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def hub_form(row: dict[str, Any]) -> dict[str, Any]:
    """ARC's row as the Hugging Face hub has it, which their task reads."""
    choices = row["question"]["choices"]
    lists = {key: [choice[key] for choice in choices] for key in ("text", "label")}
    return {
        "id": row["id"],
        "question": row["question"]["stem"],
        "choices": lists,
        "answerKey": row["answerKey"],
    }


def ours(run: Path, folder: Path) -> dict[str, Any]:
    from fivefold.data.eval_docs import prompts, read_items
    from fivefold.train.evaluate import Evaluation, evaluate

    rows, found = {}, {}
    for shots, names in TASKS.items():
        how = Evaluation(shots=shots, seed=SEED, dtype="fp32")
        texts = [folder / "texts.jsonl"] if shots == 0 else []
        found = evaluate(run, texts, [folder / f"{name}.jsonl" for name in names], how)
        for name, row in zip(names, found["tasks"], strict=True):
            _, items = read_items(folder / f"{name}.jsonl")
            contexts = list(prompts(items, shots, items, SEED, same=True))
            row["prompts"] = contexts
            row["scores"] = [p for detail in row.pop("details") for p in detail["log_likelihoods"]]
            rows[f"{name}, {shots} examples"] = row
        for row in found["texts"]:
            rows["texts"] = row | {"scores": [-row["nats"]], "prompts": []}
    began = time.process_time()
    evaluate(run, [], [folder / "many.jsonl"], Evaluation(shots=MANY_SHOTS, seed=SEED, dtype="fp32"))
    seconds = time.process_time() - began
    return {
        "rows": rows,
        "processor_seconds": seconds,
        "run": {k: found[k] for k in ("step", "dtype", "context")},
    }


def theirs(model: Path, folder: Path) -> dict[str, Any]:
    """Runs in the other environment."""
    from importlib.metadata import version

    import lm_eval  # pyright: ignore[reportMissingImports]
    from lm_eval.models.huggingface import HFLM  # pyright: ignore[reportMissingImports]
    from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

    package = Path(str(lm_eval.__file__)).parent / "tasks"
    (folder / "tasks").mkdir()
    for name in (*FIGURES, "many"):
        task = their_task(name, package, folder)
        (folder / "tasks" / f"{name}.yaml").write_text(json.dumps(task))  # JSON is YAML
    manager = TaskManager(include_path=str(folder / "tasks"), include_defaults=False)
    lm = HFLM(pretrained=str(model), dtype="float32", device="cpu", batch_size=BATCH)
    seconds, likelihood = [0.0], lm.loglikelihood

    def timed(*args: Any, **named: Any) -> Any:
        began = time.process_time()
        found = likelihood(*args, **named)
        seconds.append(time.process_time() - began)
        return found

    lm.loglikelihood = timed
    rows: dict[str, Any] = {}

    def evaluated(names: list[str], shots: int) -> dict[str, Any]:
        return lm_eval.simple_evaluate(
            model=lm,
            tasks=[f"{name}_here" for name in names],
            num_fewshot=shots,
            task_manager=manager,
            bootstrap_iters=10,  # 0 would leave out all standard errors
            fewshot_random_seed=SEED,
        )

    for shots, few in TASKS.items():
        names = [*few, "texts"] if shots == 0 else [*few]
        found = evaluated(names, shots)
        for name in names:
            samples = sorted(found["samples"][f"{name}_here"], key=lambda sample: sample["doc_id"])
            if name == "texts":
                scores, prompts = [float(sum(s["resps"][0][0] for s in samples))], []
            else:
                scores = [float(reply[0][0]) for s in samples for reply in s["resps"]]
                prompts = [s["arguments"][0][0] for s in samples]
            key = name if name == "texts" else f"{name}, {shots} examples"
            rows[key] = {**found["results"][f"{name}_here"], "scores": scores, "prompts": prompts}
    evaluated(["many"], MANY_SHOTS)
    versions = {name: version(name) for name in ("lm_eval", "torch", "transformers")}
    return {"rows": rows, "processor_seconds": seconds[-1], "versions": versions}


def their_task(name: str, package: Path, folder: Path) -> dict[str, Any]:
    """A task of theirs on our items."""
    published = {
        "hellaswag": package / "hellaswag" / "hellaswag.yaml",
        "many": package / "hellaswag" / "hellaswag.yaml",
        "arc": package / "arc" / "arc_easy.yaml",
        "lambada": package / "lambada" / "lambada_openai.yaml",
    }
    file = folder / f"{name}.jsonl"
    if (own := folder / f"{name}.theirs.jsonl").exists():
        file = own
    task: dict[str, Any] = {
        "task": f"{name}_here",
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {"test": str(file)}},
        "training_split": None,
        "validation_split": None,
        "test_split": "test",
        "fewshot_split": "test",
    }
    if name in published:
        task["include"] = str(published[name])
    elif name == "choices":
        task |= {"output_type": "multiple_choice", "doc_to_text": "context", "doc_to_choice": "choices"}
        task |= {
            "doc_to_target": "answer",
            "metric_list": [{"metric": metric} for metric in ("acc", "acc_norm")],
        }
    else:
        task |= {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "text"}
        task["metric_list"] = [{"metric": metric} for metric in ("bits_per_byte", "word_perplexity")]
    return task


def beside(name: str, our: dict[str, Any], their: dict[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {
        "same_prompts": our["prompts"] == their["prompts"],
        "scores": len(our["scores"]),
        "largest_difference": max(abs(a - b) for a, b in zip(our["scores"], their["scores"], strict=True)),
        "largest_score": max(map(abs, our["scores"])),
    }
    for mine, theirs in FIGURES[name.partition(",")[0]].items():
        row[mine] = {"fivefold": our[mine], "lm_eval": their[f"{theirs},none"]}
        if f"{mine}_stderr" in our:
            error = {"fivefold": our[f"{mine}_stderr"], "lm_eval": their[f"{theirs}_stderr,none"]}
            row[f"{mine}_stderr"] = error
    return row


if __name__ == "__main__":
    main()
