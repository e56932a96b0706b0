"""A store whose values only those can write who know a secret.

PyTorch's stores believe everybody who reaches them. Here every value carries a code of its key and content (HMAC,
RFC 2104). Others can still read values, remove keys, or keep the store busy.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from datetime import timedelta

import torch.distributed as dist

from fivefold.errors import UserError

SECRET = "FIVEFOLD_SECRET"
LEAST = 16
"""Characters of a secret."""


def sealed(store: dist.Store) -> dist.Store:
    """The store, sealed with the secret of the environment if it has one.

    Raises:
        UserError: the secret is short.
    """
    secret = os.environ.get(SECRET, "")
    if not secret:
        return store
    if len(secret) < LEAST:
        raise UserError(
            f"the environment variable {SECRET} has {len(secret)} characters; use at least {LEAST}"
        )
    return Sealed(store, secret.encode("utf-8", "surrogateescape"))


class Sealed(dist.Store):
    def __init__(self, store: dist.Store, secret: bytes):
        super().__init__()
        self.store, self.secret = store, secret

    def set(self, key: str, value: str | bytes) -> None:
        content = value.encode() if isinstance(value, str) else bytes(value)
        self.store.set(key, self._code(key, content) + content)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        """The value of a key.

        Raises:
            UserError: who wrote it does not know the secret.
        """
        found = self.store.get(key)
        size = hashlib.sha256().digest_size
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

    def set_timeout(self, timeout: timedelta) -> None:
        self.store.set_timeout(timeout)

    def _code(self, key: str, content: bytes) -> bytes:
        return hmac.digest(self.secret, key.encode() + b"\0" + content, "sha256")
