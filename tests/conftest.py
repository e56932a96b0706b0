"""Every test: one thread, a cache folder of its own that all tests share, no colour."""

import gc
import os
import resource
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
from marks import mark_slow

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.pop("FORCE_COLOR", None)
if "FIVEFOLD_CACHE" not in os.environ:  # kept between runs: a second `make test` starts at once
    os.environ["FIVEFOLD_CACHE"] = os.path.join(tempfile.gettempdir(), f"fivefold-tests-{os.getuid()}")
if (
    "FIVEFOLD_MUTATED" not in os.environ
):  # else a hundred processes would compile the package, each for itself
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
_, MOST_FILES = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(
    resource.RLIMIT_NOFILE, (MOST_FILES, MOST_FILES)
)  # each tensor that a rank returns is an open file
if "PYTEST_XDIST_WORKER" in os.environ:
    gc.disable()  # until all tests are there: what collection makes stays


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """A browser for all tests that look at a page (`observe_browser.Browser`)."""
    import observe_browser

    if (program := observe_browser.find()) is None:
        pytest.skip(observe_browser.MISSING)
    with observe_browser.Browser(program, timeout=60) as found:
        yield found


@pytest.fixture(scope="module")
def hosts() -> Iterator[Any]:
    """Two hosts, network namespaces of this machine, with 200 Mbit/s between them."""
    from namespaces import Hosts, Unavailable

    try:
        with Hosts(2, "200mbit") as found:
            yield found
    except Unavailable as reason:
        pytest.skip(str(reason))


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what `-m` does not select
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mark_slow(items, selected=any("::" in argument for argument in config.args))


def pytest_collection_finish() -> None:
    """What is there stays to the end, so it is not looked through again and again for what could be freed."""
    gc.freeze()
    gc.enable()
