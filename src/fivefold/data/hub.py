"""Data sets of the Hugging Face hub, streamed: nothing is downloaded but the rows as they are read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fivefold.data.spans import SPAN
from fivefold.errors import UserError

SPLIT = "train"  # of the data set; validation is held out of it by `val_fraction`, as for any source


def fingerprint(name: tuple[str, str | None]) -> list[str]:
    """What identifies the content of the set: the hash that `datasets` gives its revision and its files."""
    builder = _call("load_dataset_builder", *name)
    return ["hf", name[0], builder.config.name, str(builder.hash), str(builder.info.version)]


def jobs(name: tuple[str, str | None], text_key: str) -> Iterator[list[tuple[int, dict[str, Any]]]]:
    """(number, row) of every row, gathered into jobs of about SPAN characters."""
    job: list[tuple[int, dict[str, Any]]] = []
    size = 0
    for number, row in enumerate(_rows(name)):
        text = row.get(text_key)
        # Only the text travels to the worker; of a row without it, the names of its fields (for the message).
        job.append((number, {text_key: text} if isinstance(text, str) else dict.fromkeys(map(str, row))))
        size += len(text) if isinstance(text, str) else 1
        if size >= SPAN:
            yield job
            job, size = [], 0
    if job:
        yield job


def _rows(name: tuple[str, str | None]) -> Iterator[dict[str, Any]]:
    rows, read = iter(_call("load_dataset", *name, split=SPLIT, streaming=True)), 0
    while True:
        try:
            row = next(rows)
        except StopIteration:
            return
        except Exception as error:  # the network, or a file of the set that the library cannot read
            reason = f"{type(error).__name__}: {error}"
            raise UserError(
                f"data.source = 'hf:{name[0]}': reading ended after {read:,} rows: {reason}"
            ) from error
        yield row
        read += 1


def _call(function: str, name: str, config: str | None, **options: Any) -> Any:
    try:
        import datasets  # type: ignore[import-not-found]  # the optional extra
    except ImportError:
        raise UserError(
            f"data.source = 'hf:{name}' needs the extra `hf`: pip install 'fivefold[hf]'"
        ) from None
    try:
        return getattr(datasets, function)(name, config, **options)
    except Exception as error:  # not found, no network, a gated set, a missing config: it has no common base
        raise UserError(f"data.source = 'hf:{name}': {type(error).__name__}: {error}") from error
