"""A store whose values only those can write who know a secret.

PyTorch's stores believe everybody who reaches them. Here every value carries a code of its key and content (HMAC,
RFC 2104). Others can still read values, remove keys, or keep the store busy.
The store also knows which keys were written through it, gloo's too, so that they can be removed.
"""

from __future__ import annotations

import hmac
import os
from datetime import timedelta

import torch.distributed as dist

from fivefold.errors import UserError

SECRET = "FIVEFOLD_SECRET"
LEAST = 16
"""Characters of a secret."""


def sealed(store: dist.Store) -> Sealed:
    """The store, sealed with the secret of the environment. Without one, values carry no code.

    Raises:
        UserError: the secret is short.
    """
    secret = os.environ.get(SECRET, "")
    if 0 < len(secret) < LEAST:
        raise UserError(
            f"the environment variable {SECRET} has {len(secret)} characters; use at least {LEAST}"
        )
    return Sealed(store, secret.encode("utf-8", "surrogateescape"))


class Sealed(dist.Store):
    def __init__(self, store: dist.Store, secret: bytes):
        super().__init__()
        self.store, self.secret, self.written = store, secret, set[str]()

    def set(self, key: str, value: str | bytes) -> None:
        self.written.add(key)
        content = value.encode() if isinstance(value, str) else bytes(value)
        self.store.set(key, self._code(key, content) + content)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        """The value of a key.

        Raises:
            UserError: who wrote it does not know the secret.
        """
        found = self.store.get(key)
        size = len(self._code(key, b""))
        code, content = found[:size], found[size:]
        if not hmac.compare_digest(code, self._code(key, content)):
            raise UserError(
                f"a message to '{key}' was not written with our {SECRET}. All sites need the same one; or somebody "
                "else writes there"
            )
        return content

    def check(self, keys: list[str]) -> bool:
        return self.store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self.store.wait(keys) if timeout is None else self.store.wait(keys, timeout)

    def delete_key(self, key: str) -> bool:
        return self.store.delete_key(key)

    def forget(self, prefix: str) -> None:
        """Removes the keys with this prefix that were written here."""
        for key in [key for key in self.written if key.startswith(prefix)]:
            self.written.discard(key)
            self.store.delete_key(key)

    def set_timeout(self, timeout: timedelta) -> None:
        self.store.set_timeout(timeout)

    def _code(self, key: str, content: bytes) -> bytes:
        return b"" if not self.secret else hmac.digest(self.secret, key.encode() + b"\0" + content, "sha256")
