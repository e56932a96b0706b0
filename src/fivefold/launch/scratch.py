"""The private folder of a launcher: its ranks' store and verdicts. No torch.

The launcher and its ranks hold a lock on it, which ends with them, whatever ends them. So a folder that was left behind
is known, and the next launcher removes it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX, OWNER = "fivefold-", "owner"


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A new folder, which is removed at the end."""
    remove_stale()
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    try:
        with open(folder / ".owner", "w") as lock:
            with contextlib.suppress(OSError):  # a file system without locks: the folder may stay
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.replace(folder / ".owner", folder / OWNER)  # locked before others see it
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_stale() -> list[Path]:
    """Removes this user's folders whose launcher and ranks have ended."""
    removed = []
    for owner in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{OWNER}"):
        with contextlib.suppress(OSError):
            if owner.parent.is_symlink() or owner.parent.stat().st_uid != os.getuid():
                continue
            with open(os.open(owner, os.O_RDWR | os.O_NOFOLLOW)) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(owner.parent)
                removed.append(owner.parent)
    return removed
