"""Facts about the machine, and the matmul rate: measured once, in a process of its own, whoever asks."""

from __future__ import annotations

import json
import mmap
import multiprocessing
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import versions

from fivefold import files, host
from fivefold.errors import UserError
from fivefold.host.machine import (
    TORCH,
    TUNABLES,
    TUNED,
    describe,
    has_fast_bf16,
    peak_memory_bytes,
    resident_bytes,
    untried_torch,
)
from fivefold.kernels import matmul
from fivefold.observe import report
from fivefold.observe.console import summary_rows
from fivefold.observe.summary import summarize
from fivefold.train import peak


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these settings")
def test_a_command_restarts_with_tuned_malloc_unless_the_user_has_settings() -> None:
    code = (
        "import os; from fivefold.host import machine; machine.restart_with_tuned_malloc(); print(os.environ"
    )
    command = [sys.executable, "-c", f"{code}['{TUNABLES}'])"]
    mine = "glibc.malloc.check=0"
    for given, expected in (({}, TUNED[TUNABLES]), ({TUNABLES: mine}, mine)):
        environment = {key: value for key, value in os.environ.items() if key != TUNABLES} | given
        assert subprocess.check_output(command, env=environment, text=True).strip() == expected


def test_describe_is_json_and_plausible() -> None:
    facts = describe()
    assert json.loads(json.dumps(facts)) == facts
    assert facts["cores"] >= 1
    assert facts["memory_bytes"] > 2**28
    assert {"cpu", "os", "python", "torch", "gpus", "fast_bf16", "fivefold"} <= facts.keys()


def test_versions_of_torch_that_nobody_tried_are_named() -> None:
    """Those tried are the range of the package and what `make test-versions` installs."""
    assert [untried_torch(version) for version in ("2.11.0+cu130", "2.13.1", "2.15.0")] == ["", "", ""]
    assert untried_torch("2.16.0.dev20261120+cpu").startswith(
        "PyTorch 2.16.0.dev20261120+cpu has not been tried"
    )
    assert untried_torch("2.9.1")
    assert untried_torch("3.0.0")
    oldest, newest = TORCH
    assert f'"torch>={oldest}"' in (versions.ROOT / "pyproject.toml").read_text()
    assert [versions.VERSIONS[0], versions.VERSIONS[-1]] == [f"{oldest}.0", f"{newest}.0"]
    assert all((versions.ROOT / f"tests/test_{name}.py").exists() for name in versions.FILES)


def test_peak_memory_follows_an_allocation() -> None:
    before = peak_memory_bytes()
    block = mmap.mmap(-1, 2**26)  # not through malloc, which another test may have told to keep what is freed
    block.write(b"x" * 2**26)
    assert peak_memory_bytes() >= resident_bytes()[0] >= len(block)
    assert peak_memory_bytes() >= before
    high = peak_memory_bytes()
    block.close()
    assert (
        peak_memory_bytes() > high - 2**22
    )  # the kernel counts pages per processor, and adds them up now and then
    assert resident_bytes()[0] < high - 2**25


def test_cpuinfo_of_other_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "cpuinfo", lambda: {"model name": "Some CPU", "flags": "sse avx2"})
    assert host.cpu_model() == "Some CPU"
    assert not has_fast_bf16()
    monkeypatch.setattr(
        host, "cpuinfo", lambda: {"Features": "fp asimd bf16", "cpu family": "1", "model": "2"}
    )
    assert has_fast_bf16()
    monkeypatch.setattr(host, "cpuinfo", dict)
    assert host.cpu_model()


def test_cgroup_quotas_bound_cores_and_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpu.max").write_text("150000 100000")
    (tmp_path / "memory.max").write_text(str(2**28))
    monkeypatch.setattr(host, "control_groups", lambda controller: [tmp_path])
    assert host.cores() == 1
    assert host.memory_bytes() == 2**28
    (tmp_path / "cpu.max").write_text("max 100000")
    (tmp_path / "memory.max").write_text("max")
    assert host.cores() >= 1
    assert host.memory_bytes() > 2**28


@pytest.mark.parametrize(
    ("name", "dtype", "teraflops"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 PCIe", "bf16", 756.5),
        ("NVIDIA H100 NVL", "bf16", 835.5),
        ("NVIDIA H200", "fp32", 66.9),
        ("NVIDIA B200", "fp16", 2250),
        ("NVIDIA GB200", "tf32", 1250),
        ("AMD Instinct MI300X", "bf16", 1307.4),
        ("NVIDIA L40S", "bf16", 362.05),
        ("NVIDIA L4", "bf16", 121),
        ("NVIDIA L40", "bf16", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16", None),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None),
        ("Tesla V100-SXM2-32GB", "bf16", None),
        ("AMD Instinct MI250X", "tf32", None),
    ],
)
def test_listed_peaks(name: str, dtype: str, teraflops: float | None) -> None:
    assert peak.listed_peak(name, dtype) == (teraflops and float(f"{teraflops}e12"))


@pytest.mark.slow
def test_rate_is_measured_once_without_torch_here(tmp_path: Path) -> None:
    program = (
        "import sys, os; from fivefold.train.peak import matmul_rate as rate\n"
        "first = rate('fp32', 1); assert 'torch' not in sys.modules\n"
        "print(first, rate('fp32', 1))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"FIVEFOLD_CACHE": str(tmp_path), "PATH": "/usr/bin:/bin", "RANK": "0", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    first, second = map(float, done.stdout.split())
    (record,) = json.loads((tmp_path / "matmul_rates.json").read_text()).values()
    assert 1e9 < first < 1e14
    assert record["rate"] == first == second


def _ask(folder: str) -> float:
    """In a forked process: the rate, by a measurement that leaves a mark."""
    path = Path(folder) / "marks"

    def measure() -> dict:
        with path.open("a") as file:
            file.write("x")
        return {"rate": 2e9, "share": 1.0}

    return peak._cached("key", measure)


def test_processes_that_ask_together_measure_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIVEFOLD_CACHE", str(tmp_path))
    with multiprocessing.get_context("fork").Pool(4) as pool:
        assert pool.map(_ask, [str(tmp_path)] * 8) == [2e9] * 8
    assert (tmp_path / "marks").read_text() == "x"


def test_a_disturbed_measurement_is_repeated_after_some_time_and_the_best_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FIVEFOLD_CACHE", str(tmp_path))
    now = [1e9]
    monkeypatch.setattr(peak.time, "time", lambda: now[0])
    results = iter([(1e9, 0.5), (3e9, 0.6), (2e9, 0.99), (9e9, 1.0)])

    def measure() -> dict:
        rate, share = next(results)
        return {"rate": rate, "share": share}

    assert [peak._cached("key", measure) for _ in range(2)] == [1e9, 1e9], "ranks take what there is"
    assert peak._cached("key", measure, improve=True) == 1e9, "it is ten minutes old at most"
    for _ in range(3):
        now[0] += 700
        assert peak._cached("key", measure, improve=True) == 3e9
    assert next(results) == (9e9, 1.0), "an undisturbed measurement is the last"


def test_the_fastest_lap_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others take the cores in most laps: the peak, MFU's denominator, stays."""
    now, seconds = [0.0], iter([9.0, 9.0, 0.3, 0.1, 0.3] * 2)
    clock = SimpleNamespace(perf_counter=lambda: now[0], process_time=lambda: now[0] / 2)
    monkeypatch.setattr(peak, "time", clock)

    def multiplies(x: torch.Tensor, weight: torch.Tensor) -> None:
        now[0] += next(seconds)

    monkeypatch.setattr(matmul, "linear", multiplies)
    found = peak._measure("cpu", "bf16", 1)
    assert found == {"rate": pytest.approx(2 * 2048**3 / 0.1), "size": 2048, "share": pytest.approx(0.5)}


def test_a_peak_measured_on_a_busy_machine_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIVEFOLD_CACHE", str(tmp_path))
    assert peak.busy_share("cpu", "fp32") is None, "no rate is known"
    share = [0.47]
    monkeypatch.setattr(peak, "measure_apart", lambda *_: {"rate": 2e9, "share": share[0]})
    assert peak.device_peak("cpu", "fp32") == 2e9
    assert (peak.busy_share("cpu", "fp32"), peak.busy_share("cuda", "fp32")) == (0.47, None)
    lines = [{"step": 1, "mfu": 0.68, "tokens_per_s": 9.0, "peak_share": 0.47}]
    rows = dict(summary_rows(summarize(lines)))
    assert rows["MFU"] == "68.0% (the peak was measured while the machine was busy)"
    assert "busy" in report._headline(summarize(lines))
    later = [*lines, {"step": 2, "mfu": 0.4, "tokens_per_s": 9.0}]
    share[0] = 1.0
    monkeypatch.setattr(peak, "_DISTURBED_S", -1.0)
    peak.matmul_rate("fp32", peak.cores(), improve=True)
    assert peak.busy_share("cpu", "fp32") is None
    assert "peak_share" in summarize(later), "a median over steps of both kinds"


def test_a_broken_cache_is_measured_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIVEFOLD_CACHE", str(tmp_path))
    for broken in ("{not json", '{"key": 3}', "[]"):
        (tmp_path / "matmul_rates.json").write_text(broken)
        assert peak._cached("key", lambda: {"rate": 1e9, "share": 1.0}) == 1e9


def test_a_cache_that_cannot_be_written_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIVEFOLD_CACHE", "/dev/null/cache")
    assert peak._cached("key", lambda: {"rate": 1e9, "share": 1.0}) == 1e9


def test_without_a_home_the_cache_is_temporary(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("FIVEFOLD_CACHE")
    monkeypatch.setattr(Path, "expanduser", unknown)
    assert files.cache_folder().parent == Path(tempfile.gettempdir())


def test_unknown_dtype_is_a_clear_error() -> None:
    with pytest.raises(UserError, match=r"'fp8'.*fp32.*bf16"):
        peak.matmul_rate("fp8", 2)
