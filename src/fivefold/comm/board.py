"""Where the ranks of a run post what they are doing, so that others can read it when one hangs.

Ranks that Fivefold started on this machine post in files of the launch's private folder. Others, perhaps on several
hosts, use the store in which they met. A thread of its own talks to the store, because a store that cannot be reached
never answers.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fivefold.files import make_folder

MOST = 1 << 16  # bytes of a post
HEAD = 8  # digits of its length


class Files:
    """A file per rank in a folder of this machine. Each post takes the place of the one before by one write.

    every_s: seconds between posts. answers: grows when other ranks' posts have been read."""

    def __init__(self, folder: Path, rank: int, every_s: float):
        make_folder(folder, mode=0o700)
        self.folder, self.every_s, self.answers = folder, every_s, 0
        self._own = os.open(folder / str(rank), os.O_WRONLY | os.O_CREAT, 0o600)
        self._others: dict[int, int] = {}

    def post(self, said: str) -> None:
        content = said.encode()[:MOST]
        with suppress(OSError):  # a full disk
            os.pwrite(self._own, b"%0*d" % (HEAD, len(content)) + content, 0)

    def read(self, ranks: Iterable[int]) -> dict[int, dict[str, Any]]:
        """What was last posted, by rank."""
        found = {}
        for rank in ranks:
            with suppress(OSError, ValueError):  # not there yet, or it was just being written
                if rank not in self._others:
                    self._others[rank] = os.open(self.folder / str(rank), os.O_RDONLY)
                content = os.pread(self._others[rank], HEAD + MOST, 0)
                found[rank] = json.loads(content[HEAD : HEAD + int(content[:HEAD])])
        self.answers += 1
        return found

    def claim(self) -> bool:
        """True for the first rank that calls it."""
        with suppress(OSError):
            os.close(os.open(self.folder / "claimed", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            return True
        return False

    def close(self) -> None:
        for file in (self._own, *self._others.values()):
            os.close(file)
        self._others.clear()


class Store:
    """Keys of the store in which the ranks met. every_s: seconds between posts. It reads only what is asked
    for: rank 0's post at first, everybody's when something hangs. The store keeps the posts of hosts that are lost."""

    def __init__(self, store: dist.Store, rank: int, every_s: float):
        self.store, self.rank, self.every_s, self.answers = store, rank, every_s, 0
        self._said, self._wanted = "", set[int]()
        self._found: dict[int, dict[str, Any]] = {}
        self._over, self._claim = threading.Event(), threading.Event()
        self._claimed: bool | None = None
        self._hurry = threading.Event()
        self._thread = threading.Thread(target=self._run, name="posts of ranks", daemon=True)
        self._thread.start()

    def post(self, said: str) -> None:
        self._said = said

    def read(self, ranks: Iterable[int]) -> dict[int, dict[str, Any]]:
        """What was last posted, by rank: what an earlier call has asked for."""
        self._wanted = set(ranks)
        return dict(self._found)

    def claim(self) -> bool:
        """A store that does not answer within two seconds cannot say no."""
        self._claim.set()
        self._hurry.set()
        self._over.wait(2)
        return self._claimed is not False

    def close(self) -> None:
        self._over.set()
        self._hurry.set()
        self._thread.join(2)

    def _run(self) -> None:
        with suppress(RuntimeError):  # the store has ended: so does the run
            store = dist.PrefixStore("ranks", self.store.clone())  # pyright: ignore[reportAttributeAccessIssue]
            store.set_timeout(timedelta(days=1))
            while not self._over.is_set():
                if self._said:
                    store.set(str(self.rank), self._said)
                if self._claim.is_set() and self._claimed is None:
                    self._claimed = store.add("claimed", 1) == 1
                    self._over.set()
                wanted, self._wanted = self._wanted, set[int]()
                there = [
                    str(rank) for rank in sorted(wanted) if rank in self._found or store.check([str(rank)])
                ]
                if there:
                    for rank, content in zip(there, store.multi_get(there), strict=True):
                        with suppress(ValueError):
                            self._found[int(rank)] = json.loads(content)
                self.answers += 1
                self._hurry.wait(self.every_s)


Board = Files | Store
