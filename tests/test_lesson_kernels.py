"""The lectures' kernels (examples/kernels): what they compute in Triton's interpreter is what PyTorch computes, and
what the page says of SMs is what NVIDIA's own rules say. test_lectures.py runs the page's commands."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from commands import REPO
from lessons import FOLDER, SHOWN, kernels, without_compiler, without_triton
from test_readme import blocks

needs_triton = pytest.mark.skipif(bool(without_triton()), reason=without_triton())
OCCUPANCY: dict[str, Any] = runpy.run_path(str(FOLDER / "occupancy.py"))
LIMITS = OCCUPANCY["LIMITS"]
GRID = [
    (threads, registers, shared)
    for threads in (32, 96, 128, 256, 1000, 1024)
    for registers in (16, 32, 33, 64, 97, 128, 168, 255)
    for shared in (0, 1000, 49152, 98304, 101376, 166912, 232448)
]


def occupied(generation: str, *block: int) -> tuple[int, str]:
    found = OCCUPANCY["occupancy"](LIMITS[generation], OCCUPANCY["Block"](*block))
    return found.blocks, found.limit


def test_occupancy_and_waves() -> None:
    """By hand, for each limit."""
    assert occupied("Hopper", 128, 16, 0) == (16, "warps")
    assert occupied("Hopper", 32, 16, 0) == (32, "blocks")
    # a warp gets 47 x 32 = 1504 registers, rounded to 1536: 10 in each of four parts
    assert occupied("Hopper", 128, 47, 0) == (10, "registers")
    assert occupied("Hopper", 128, 16, 49152) == (4, "shared memory")  # 48 + 1 KiB of 228
    assert occupied("Ampere", 128, 16, 49152) == (3, "shared memory")
    assert occupied("Ada", 128, 16, 0) == (12, "warps")
    assert occupied("Ampere", 128, 16, 200 * 1024) == (0, "shared memory")
    waves = OCCUPANCY["waves"]
    assert waves(132, 132) == (1, 1.0)
    assert waves(133, 132) == (2, 133 / 264)


NVIDIA = """
#include <cstdio>
#include <cuda_occupancy.h>
int main() {
  cudaOccDeviceProp of;
  int threads, registers, shared, major, minor, warps, per_sm, per_block;
  while (scanf("%d %d %d %d %d %d %d %d", &major, &minor, &warps, &per_sm, &per_block, &threads, &registers, &shared)
         == 8) {
    of.computeMajor = major, of.computeMinor = minor, of.maxThreadsPerBlock = 1024, of.warpSize = 32, of.numSms = 100;
    of.maxThreadsPerMultiprocessor = 32 * warps, of.regsPerBlock = of.regsPerMultiprocessor = 65536;
    of.sharedMemPerBlock = 48 * 1024, of.sharedMemPerMultiprocessor = per_sm, of.sharedMemPerBlockOptin = per_block;
    of.reservedSharedMemPerBlock = 1024;
    cudaOccFuncAttributes kernel = {};
    kernel.maxThreadsPerBlock = 1024, kernel.numRegs = registers, kernel.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
    kernel.maxDynamicSharedSizeBytes = per_block;
    cudaOccDeviceState state = {};
    state.carveoutConfig = 100;
    cudaOccResult result;
    if (cudaOccMaxActiveBlocksPerMultiprocessor(&result, &of, &kernel, &state, threads, shared)) return 1;
    printf("%d\\n", result.activeBlocksPerMultiprocessor);
  }
}
"""


@needs_triton
@pytest.mark.slow
@pytest.mark.skipif(bool(without_compiler()), reason=without_compiler())
def test_occupancy_is_that_of_nvidia(tmp_path: Path) -> None:
    """Against the header that comes with Triton, for each generation, over a grid of kernels."""
    package = metadata.distribution("triton").locate_file("triton/backends/nvidia/include")
    source, program = tmp_path / "occupancy.cpp", tmp_path / "occupancy"
    source.write_text(NVIDIA, encoding="utf-8")
    subprocess.run(["c++", f"-I{package}", "-o", str(program), str(source)], check=True)
    cases = [(name, *block) for name in LIMITS for block in GRID]
    lines = []
    for name, *block in cases:
        of = LIMITS[name]
        lines.append(f"{of.capability.replace('.', ' ')} {of.warps} {of.shared} {of.shared_of_one} "
                     f"{' '.join(map(str, block))}")  # fmt: skip
    told = subprocess.run(
        [program], input="\n".join(lines), capture_output=True, text=True, check=True
    ).stdout
    theirs = [int(line) for line in told.split()]
    ours = [occupied(name, *block)[0] for name, *block in cases]
    assert {c: pair for c, *pair in zip(cases, ours, theirs, strict=True) if pair[0] != pair[1]} == {}
    assert len(set(theirs)) > 8


def test_the_picture_shows_what_a_warp_fetches() -> None:
    picture = runpy.run_path(str(REPO / "examples" / "pictures" / "gpu_kernels.py"))
    assert [len(picture["fetched"](stride)) for stride in (1, 2, 4, 8, 32)] == [4, 8, 16, 32, 32]
    assert max(share for _, share in picture["used"](3)) == 100
    assert dict(picture["used"](1))[136] == pytest.approx(100 * 136 / 264)


def test_code_on_the_page_is_that_of_the_kernels() -> None:
    page = REPO / "docs" / "lectures" / "18_kernels.md"
    sources = [path.read_text(encoding="utf-8") for path in FOLDER.glob("*.py")]
    shown = [block.text for block in blocks(page) if block.kind == "text"]
    assert len(shown) == 2
    assert [text for text in shown if not any(text in source for source in sources)] == []


def test_counts_on_the_page_are_those_of_the_pinned_compiler() -> None:
    """So `make test-all`, which installs this version, compares them."""
    page = (REPO / "docs" / "lectures" / "18_kernels.md").read_text(encoding="utf-8")
    pins = (REPO / "constraints.txt").read_text(encoding="utf-8")
    assert set(SHOWN.findall(page)) == set(re.findall(r"^triton==(\S+)$", pins, re.MULTILINE))


@needs_triton
@pytest.mark.slow
def test_kernels_compute_what_pytorch_computes(tmp_path: Path) -> None:
    """All kernels, forward and backward, in fp32 and fp16, on shapes that are no multiples of tiles, also those that
    `measure.py` times. bf16 is refused where the interpreter is wrong."""
    code, said = kernels(str(REPO / "tests" / "lesson_cases.py"), cache=tmp_path)
    assert code == 0, said
    found: dict[str, list[float]] = json.loads(said.splitlines()[-1])
    assert len(found) > 90
    assert {name: pair for name, pair in found.items() if not pair[0] <= pair[1]} == {}


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("device", ["a100", "h100", "b200"])
def test_registers_suffice(device: str, tmp_path: Path) -> None:
    """The compiler spills none of the kernels but that whose tile the page calls too large."""
    code, said = kernels("counts.py", device, cache=tmp_path)
    assert code == 0, said
    rows = re.findall(r"^(\S.*?) {2,}(\d+) +(\d+) +(\d+) +([\d.]+) +(\d+) +(\d+)%", said, re.MULTILINE)
    assert len(rows) >= 14
    spilled = {name for name, _, _, spilled, *_ in rows if int(spilled)}
    assert spilled <= {"matmul 256x128"}
    assert (spilled == {"matmul 256x128"}) or device == "b200"
    assert all(int(blocks) > 0 for *_, blocks, _ in rows), "each fits into an SM"


@needs_triton
@pytest.mark.slow
def test_the_kernel_to_write(tmp_path: Path) -> None:
    """The grader refuses the unwritten kernel and one that forgets the mask, and takes the solution."""
    solution = FOLDER / "solutions" / "layernorm.py"
    code, said = kernels("exercise.py", cache=tmp_path)
    assert (code, said.count("nothing is stored")) == (1, 3), said
    assert kernels("exercise.py", str(solution), cache=tmp_path) == (0, "yes  layernorm\n")
    text = solution.read_text(encoding="utf-8")
    wrong = tmp_path / "wrong.py"
    wrong.write_text(text.replace("tl.where(inside, value - mean, 0.0)", "value - mean"), encoding="utf-8")
    code, said = kernels("exercise.py", str(wrong), cache=tmp_path)
    assert code == 1
    assert "64 columns" not in said, "there is no mask"
    assert said.count("no   layernorm: 100 columns in float") == 2
    assert "apart from PyTorch's" in said


@pytest.mark.slow
@pytest.mark.skipif(bool(without_compiler()), reason=without_compiler())
def test_the_extension(tmp_path: Path) -> None:
    code, said = kernels("extension.py", cache=tmp_path)
    assert code == 0, said
    assert said.count(": True\n") == 3, said
    assert "calls in the profile: 10" in said


@pytest.mark.slow
def test_without_triton_they_say_so(tmp_path: Path) -> None:
    (tmp_path / "triton.py").write_text("raise ImportError\n", encoding="utf-8")
    program = tmp_path / "elementwise.py"
    for name in ("elementwise.py", "lab.py"):
        (tmp_path / name).write_text((FOLDER / name).read_text(encoding="utf-8"), encoding="utf-8")
    code, said = kernels(str(program), cache=tmp_path)
    assert code == 1
    assert said == "These kernels need Triton: pip install triton (Linux; no GPU is needed)\n"
