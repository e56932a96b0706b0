"""An operator of one's own in C++: compiled, loaded, compared, made known to torch.compile, and profiled. No Triton.

python examples/kernels/extension.py
python examples/kernels/extension.py --cuda    # with its twin for GPUs, which is untried
"""

import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils import cpp_extension

SOURCES = Path(__file__).with_name("extension")
EPS, CALLS = 1e-5, 10


def load(folder: str, cuda: bool) -> None:
    """Compiles the sources into `folder` and loads the library. From then on there is torch.ops.lesson.rmsnorm."""
    for tool in ("ninja", cpp_extension.get_cxx_compiler()):
        if shutil.which(tool) is None:
            raise SystemExit(
                f"{tool} is missing: an extension needs a C++ compiler and ninja (pip install ninja)"
            )
    if cuda and not (torch.cuda.is_available() and cpp_extension.CUDA_HOME):
        raise SystemExit("--cuda needs a GPU and CUDA's compiler (nvcc)")
    sources = [str(SOURCES / name) for name in ("rmsnorm.cpp", *["rmsnorm.cu"] * cuda)]
    flags = ["-O3"]
    cpp_extension.load(
        "lesson", sources, flags, [*flags, "-DUSE_CUDA"], build_directory=folder, is_python_module=False
    )

    @torch.library.register_fake("lesson::rmsnorm")
    def _(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return torch.empty_like(x)  # shape and dtype are all that a compiler asks


def profiled(x: Tensor, weight: Tensor) -> dict[str, int]:
    """How often PyTorch's profiler saw each operation."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        for _ in range(CALLS):
            torch.ops.lesson.rmsnorm(x, weight, EPS)
    return {event.key: event.count for event in seen.key_averages()}


def main(cuda: bool) -> None:
    torch.manual_seed(0)
    with TemporaryDirectory() as folder:
        load(folder, cuda)
        x, weight = torch.randn(64, 600), torch.randn(600)
        found = torch.ops.lesson.rmsnorm(x, weight, EPS)
        wanted = torch.nn.functional.rms_norm(x, (600,), weight, EPS)
        print(
            f"lesson::rmsnorm equals PyTorch's to 1e-5: {torch.allclose(found, wanted, rtol=1e-5, atol=1e-5)}"
        )
        if cuda:
            there = torch.ops.lesson.rmsnorm(x.cuda(), weight.cuda(), EPS).cpu()
            print(f"on the GPU, too: {torch.allclose(there, wanted, rtol=1e-5, atol=1e-5)}")
        try:
            torch.ops.lesson.rmsnorm(x.half(), weight, EPS)
        except RuntimeError as error:
            print(f"in 16 bits it refuses: {'x is not in fp32' in str(error)}")
        graph = torch.compile(torch.ops.lesson.rmsnorm, fullgraph=True, backend="aot_eager")
        print(f"in a compiled graph it gives the same: {torch.equal(graph(x, weight, EPS), found)}")
        print(f"calls in the profile: {profiled(x, weight)['lesson::rmsnorm']}")


if __name__ == "__main__":
    main("--cuda" in sys.argv[1:])
