"""Every program in examples/ is short, runs as it says, and does what it is an example of."""

import email
import re
from pathlib import Path

import pytest
from commands import REPO, run

import fivefold

EXAMPLES = sorted((REPO / "examples").glob("*.py"))
COMMANDS = {"torchrun_script.py": "torchrun --nproc-per-node 2 {}"}
GIVEN = {"train_and_sample.py": f" {Path(email.__file__).parent}"}
"""A text that does not change, as our own source does."""


def column(run_folder: Path, key: str) -> list[float]:
    return [line[key] for line in fivefold.Run(run_folder).metrics() if key in line]


def check_train_and_sample(folder: Path, printed: str) -> None:
    bits = column(folder / "runs" / "run-1", "val_bits_per_byte")
    assert bits[-1] < bits[0] - 0.3
    assert f"validation: {bits[0]:.2f} -> {bits[-1]:.2f} bits per byte\ndef " in printed


def check_resume(folder: Path, printed: str) -> None:
    whole, parts = (column(folder / "runs" / name, "loss") for name in ("run-1", "run-2"))
    assert len(whole) == 40
    assert whole == parts
    assert f"step 40: loss {whole[-1]!r} in one go, {parts[-1]!r} in two parts" in printed


def check_own_model(folder: Path, printed: str) -> None:
    assert re.search(r"Recall, .* parameters, .* 2 ranks", printed)
    losses = column(folder / "runs" / "run-1", "val_loss")
    assert losses[-1] < 0.8 * losses[0]


def check_lora(folder: Path, printed: str) -> None:
    base, adapted = (fivefold.Run(folder / "runs" / name) for name in ("run-1", "run-2"))
    assert column(adapted.path, "val_loss")[-1] < column(base.path, "val_loss")[-1] - 0.02
    before, after = (
        sum(f.stat().st_size for f in run.checkpoints()[-1].glob("model-*")) for run in (base, adapted)
    )
    assert after < 0.5 * before, "the checkpoints hold adapters only"
    assert fivefold.load("continue", [f"train.init_from={folder / 'exported'}"]).model.dim == 64


def check_torchrun_script(folder: Path, printed: str) -> None:
    out = Path("runs", "torchrun")
    assert f"trained on 2 ranks: {out / 'checkpoints' / 'step-00000030'}\n" in printed
    losses = column(folder / out, "loss")
    assert len(losses) == 30
    assert losses[-1] < losses[0] - 1


CHECKS = {
    f"{check.__name__.removeprefix('check_')}.py": check
    for check in (check_train_and_sample, check_resume, check_own_model, check_lora, check_torchrun_script)
}


LONG = {"lora.py", "own_model.py", "torchrun_script.py"}
"""Run by `make test-all`. test_own.py trains adapters and own models on several ranks; the README has a command for
torchrun."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [pytest.param(p, marks=pytest.mark.slow if p.name in LONG else ()) for p in EXAMPLES],
    ids=lambda path: path.name,
)
def test_example(path: Path, tmp_path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) < (60 if path.name == "lora.py" else 40)
    assert f"\n{COMMANDS.get(path.name, 'python {}').format(f'examples/{path.name}')}" in text, (
        "says how to run"
    )
    command = COMMANDS.get(path.name, "python {}").format(path) + GIVEN.get(path.name, "")
    CHECKS[path.name](tmp_path, run(command, tmp_path))
