"""metrics.jsonl and TensorBoard events: written, cut, resumed, read back."""

from __future__ import annotations

import json
import math
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from fivefold.errors import UserError
from fivefold.observe.metrics import MetricsWriter, read_metrics
from fivefold.observe.summary import summarize
from fivefold.observe.trackers import TensorBoard


def train_line(step: int, **more) -> dict:
    return {"step": step, "tokens": 100 * step, "loss": 5 / step, "step_s": 0.5, "data_wait_s": 0.005, **more}


def write(folder: Path, steps: range, **options) -> None:
    with closing(MetricsWriter(folder, tracker="none", **options)) as writer:
        for step in steps:
            writer.write(train_line(step))


def events(folder: Path) -> list:
    """Every event of `folder`, in the order of files and records, read by TensorBoard's own loader."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    return [e for file in sorted(folder.iterdir()) for e in LegacyEventFileLoader(str(file)).Load()]


def test_lines_read_back_as_written(tmp_path: Path) -> None:
    lines = [
        train_line(1),
        {"step": 1, "val_loss": 4.5, "val_bits_per_byte": 1.2},
        {"step": 1, "sample": "a\n\u2028ü"},
    ]
    with closing(MetricsWriter(tmp_path, tracker="none")) as writer:
        for line in lines:
            writer.write(line)
        assert read_metrics(tmp_path) == lines, "visible at once, before the file is closed"
    assert read_metrics(tmp_path / "metrics.jsonl") == lines


def test_numbers_from_numpy_are_plain(tmp_path: Path) -> None:
    with closing(MetricsWriter(tmp_path, tracker="none")) as writer:
        writer.write({"step": np.int64(3), "loss": np.float32(1.5), "mfu": None, "sample": "lone \ud800"})
    assert read_metrics(tmp_path) == [{"step": 3, "loss": 1.5, "sample": "lone \\ud800"}]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_not_finite_is_strict_json_and_reads_as_nan(tmp_path: Path, value: float) -> None:
    with closing(MetricsWriter(tmp_path)) as writer:
        writer.write({"step": 1, "loss": value})

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text, parse_constant=refuse) == {"step": 1, "loss": None}
    assert math.isnan(read_metrics(tmp_path)[0]["loss"])


def test_truncated_last_line_is_left_out_and_cut_at_resume(tmp_path: Path) -> None:
    write(tmp_path, range(1, 4))
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-10])
    assert [line["step"] for line in read_metrics(path)] == [1, 2]
    path.write_bytes(path.read_bytes() + "ü".encode()[:1])
    write(tmp_path, range(3, 5), step=2)
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 3, 4]


def test_resume_drops_the_steps_that_are_done_again(tmp_path: Path) -> None:
    write(tmp_path, range(1, 11))
    write(tmp_path, range(8, 10), step=7)
    assert [line["step"] for line in read_metrics(tmp_path)] == list(range(1, 10))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.jsonl"], "no temporary file stays"


def test_start_at_zero_begins_anew(tmp_path: Path) -> None:
    write(tmp_path, range(1, 5))
    write(tmp_path, range(1, 3))
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2]


def test_broken_line_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nnot json\n{"step": 2}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 2: .*'not json'"):
        read_metrics(tmp_path)
    with pytest.raises(UserError, match="no metrics here"):
        read_metrics(tmp_path / "elsewhere")


def test_tensorboard_reads_the_events(tmp_path: Path) -> None:
    with closing(MetricsWriter(tmp_path)) as writer:
        writer.write({"step": 1, "loss": 2.5, "lr": 0.1})
        writer.write({"step": 2, "val_loss": 2.0})
        writer.write({"step": 2, "sample": "def f():\n    pass"})
        with open("/dev/full", "wb", buffering=0) as full:
            board = writer._trackers._open["tensorboard"]
            assert isinstance(board, TensorBoard)
            (own := board._file).flush()
            board._file = board._records._writer = full
            assert "tracker tensorboard ends at step 3: OSError" in writer.write({"step": 3, "loss": 2.0})
            assert writer.write({"step": 4, "loss": 2.0}) == "", "said once"
            own.close()
    found = events(tmp_path / "tensorboard")
    assert found[0].file_version == "brain.Event:2"
    scalars = {(e.step, v.tag): v.simple_value for e in found for v in e.summary.value if v.tag != "sample"}
    assert scalars == {(1, "train/loss"): 2.5, (1, "train/lr"): pytest.approx(0.1), (2, "val/loss"): 2.0}
    (text,) = [v for e in found for v in e.summary.value if v.tag == "sample"]
    assert text.tensor.string_val[0].decode() == "    def f():\n        pass\n"


def test_tensorboard_hides_the_steps_that_are_done_again(tmp_path: Path) -> None:
    for start in (0, 3):
        with closing(MetricsWriter(tmp_path, step=start)) as writer:
            for step in range(start + 1, 6):
                writer.write({"step": step, "loss": float(start)})
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(tmp_path / "tensorboard"))
    accumulator.Reload()
    assert [(s.step, s.value) for s in accumulator.Scalars("train/loss")] == [
        *((step, 0.0) for step in (1, 2, 3)),
        *((step, 3.0) for step in (4, 5)),
    ]


def test_lines_that_a_power_cut_damaged_are_dropped(tmp_path: Path) -> None:
    """Zeros and a cut line, before the last checkpoint and after it."""
    write(tmp_path, range(1, 4))
    path = tmp_path / "metrics.jsonl"
    first, second, third = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + bytes(30) + second[:20] + b"\n" + third + bytes(50) + b"\n" + bytes(9))
    with closing(MetricsWriter(tmp_path, tracker="none", step=3)) as writer:
        assert writer.damaged == 1
        writer.write(train_line(4))
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 3, 4]


def test_a_full_disk_delays_lines(tmp_path: Path) -> None:
    with (
        closing(MetricsWriter(tmp_path, tracker="none")) as writer,
        open("/dev/full", "ab", buffering=0) as full,
    ):
        assert writer.write(train_line(1)) == ""
        disk, writer._file._file = writer._file._file, full  # type: ignore[assignment]
        assert "No space left" in writer.write(train_line(2))
        assert writer.write(train_line(3)) == "", "said once"
        writer.flush()
        writer._file._file = disk
        writer.write(train_line(4))
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3, 4]


def test_lines_that_a_full_disk_kept_back_are_written_when_the_file_closes(tmp_path: Path) -> None:
    with (
        closing(MetricsWriter(tmp_path, tracker="none")) as writer,
        open("/dev/full", "ab", buffering=0) as full,
    ):
        disk, writer._file._file = writer._file._file, full  # type: ignore[assignment]
        assert "No space left" in writer.write(train_line(1))
        writer._file._file = disk
        writer.close()
        writer.flush()
    assert [line["step"] for line in read_metrics(tmp_path)] == [1]


def test_summary_of_a_run() -> None:
    lines = [train_line(step, tokens_per_s=1000.0 if step < 5 else 2000.0, mfu=0.5) for step in range(1, 41)]
    lines += [{"step": 20, "val_loss": 1.5, "val_bits_per_byte": 0.9}, {"step": 40, "val_loss": 1.75}]
    found = summarize(lines)
    assert found["steps"] == 40
    assert found["tokens"] == 4000
    assert found["train_s"] == pytest.approx(20)
    assert found["data_wait"] == pytest.approx(0.01)
    assert found["tokens_per_s"] == 2000
    assert found["loss"] == pytest.approx((5 / 39 + 5 / 40) / 2)
    assert (found["val_loss"], found["best_val_loss"], found["best_val_step"]) == (1.75, 1.5, 20)
    assert "nonfinite" not in found


def test_summary_of_scarce_lines() -> None:
    assert summarize([]) == {}
    assert summarize([{"step": 1, "loss": math.nan}])["nonfinite_step"] == 1
    every_tenth = [{"step": step, "step_s": 0.5} for step in range(10, 101, 10)]
    assert summarize(every_tenth)["train_s"] == pytest.approx(45.5, rel=0.1), (
        "the steps between count as well"
    )
