"""Where the host waits for a GPU beside the steps: validation, samples, evaluation, checks and checkpoints, traced on a
machine without a GPU. docs/gpu.md has the same table."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from beside_steps import MICROBATCHES, TOKENS

from fivefold_plan.trace import gpu

pytestmark = pytest.mark.skipif(bool(gpu.why_not()), reason=gpu.why_not())

LOADING = """
import ctypes, os, sys
folder, *libraries = sys.argv[1:]
for library in libraries:
    ctypes.CDLL(library, ctypes.RTLD_GLOBAL)
from pathlib import Path
from beside_steps import main
main(Path(folder))
sys.stdout.flush()
os._exit(0)
"""
SETS = 2  # of validation
PIECES = 3 * 14  # a checkpoint's tensors on one rank: weights and two moments


def saved(written: int, told: int, pieces: int = 0) -> dict[str, int]:
    """Of a save: four numbers of the state, and two for each message by which ranks learn what the others have or want,
    where the checkpoint is written and in the loop."""
    return {
        "item step/state.py": 2,
        "item train/saver.py": 2 + told,
        "to_copy train/saver.py": told,
        "item checkpoint/write.py": written,
        "to_copy checkpoint/write.py": written + pieces,
    }


EXPECTED = {
    "validation": {"item step/validation.py": SETS},
    "validation, cp": {"item step/validation.py": SETS},
    "validation, pp": {"item step/validation.py": SETS},
    "validation, bert": {
        "item step/validation.py": SETS,
        "nonzero models/bert/module.py": SETS * MICROBATCHES,
    },
    "checks": {"item train/faults.py": 1},
    "shares": {},
    "samples": {"to_copy train/generate.py": 2 * TOKENS},
    "evaluate": {"to_copy train/evaluate.py": 3, "index train/evaluate.py": 2},
    "save": saved(2, 4) | {"event checkpoint/write.py": 1},
    "last save": {name: times for name, times in saved(4, 0, PIECES).items() if times},
}


@pytest.fixture
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
    """And, of what waits by itself: reading a value, copies in both directions unless they say that nobody waits and
    the host's memory is pinned, and waiting."""
    assert found.pop("what waits") == {
        "event": 1,
        "item": 1,
        "to_copy": 4,
        "copy_": 1,
        "device": 1,
        "stream": 1,
        "nonzero": 2,
        "linalg_eigh": 1,
    }
    assert found == EXPECTED
