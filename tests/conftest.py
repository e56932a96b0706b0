"""Every test: one thread, a cache folder of its own that all tests share, no colour."""

import os
import tempfile

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.pop("FORCE_COLOR", None)
if "FIVEFOLD_CACHE" not in os.environ:  # kept between runs: a second `make test` starts at once
    os.environ["FIVEFOLD_CACHE"] = os.path.join(tempfile.gettempdir(), f"fivefold-tests-{os.getuid()}")
