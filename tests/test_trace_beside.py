"""Where the host waits for a GPU beside the steps: validation, samples, evaluation, checks and checkpoints, traced on a
machine without a GPU. docs/gpu.md has the same table."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from beside_steps import MICROBATCHES, TOKENS

from fivefold.trace import gpu

pytestmark = pytest.mark.skipif(bool(gpu.why_not()), reason=gpu.why_not())

LOADING = """
import ctypes, sys
folder, *libraries = sys.argv[1:]
for library in libraries:
    ctypes.CDLL(library, ctypes.RTLD_GLOBAL)
from pathlib import Path
from beside_steps import main
main(Path(folder))
"""
SETS = 2  # of validation
PIECES = 3 * 15  # a checkpoint's tensors on one rank: weights and two moments
PREPARED = {"item train/saver.py": 2, "item step/state.py": 2, "item checkpoint/write.py": 1}
"""Numbers of the state that stand in the manifest, and the bytes of all ranks."""
EXPECTED = {
    "validation": {"item step/step.py": SETS},
    "validation, cp": {"item step/step.py": SETS},
    "validation, pp": {"item step/step.py": SETS},
    "validation, bert": {"item step/step.py": SETS, "nonzero models/bert/module.py": SETS * MICROBATCHES},
    "checks": {"item train/faults.py": 1},
    "shares": {},
    "samples": {"to_copy train/generate.py": 2 * TOKENS},
    "evaluate": {"to_copy train/evaluate.py": 3, "index train/evaluate.py": 2},
    "save": PREPARED | {"event checkpoint/write.py": 1},
    "last save": PREPARED | {"to_copy checkpoint/write.py": PIECES},
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    """Host syncs of each case, from one other process."""
    folder = str(tmp_path_factory.mktemp("beside"))
    done = subprocess.run(
        [sys.executable, "-c", LOADING, folder, *gpu.libraries()],
        capture_output=True, text=True, cwd=Path(__file__).parent, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_where_the_host_waits_beside_steps(found: dict[str, dict[str, int]]) -> None:
    assert {name: syncs for name, syncs in found.items() if name != "what waits"} == EXPECTED


def test_what_waits_is_found(found: dict[str, dict[str, int]]) -> None:
    """Reading a value, copies in both directions unless they say that nobody waits and the host's memory is pinned, and
    waiting itself."""
    assert found["what waits"] == {
        "event": 1,
        "item": 1,
        "to_copy": 4,
        "copy_": 1,
        "device": 1,
        "stream": 1,
        "nonzero": 2,
        "linalg_eigh": 1,
    }
