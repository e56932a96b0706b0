"""Tokenizer files of others: looked through, then tried in a child process with little memory and time.

The library that reads a tokenizer.json is fast because it trusts the file. A normalizer may turn every "e" into a
megabyte, and a process that runs out of memory is aborted, without an exception. So a file that is not made as ours are
is loaded and used once in a process that may write nothing and must end soon. What has passed is remembered by its
hash: a mark in the cache folder.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import resource
import signal
import struct
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from fivefold.errors import UserError
from fivefold.files import cache_folder, parse_json, writable, write_atomically
from fivefold.precision import MOST_IDS

MOST_BYTES = 64 << 20
"""Size of a tokenizer.json; that of Gemma 3 has 33 MB."""
MOST_GROWTH = 256
"""How many times longer a text may become by normalizing. NFKC makes 18 characters of one."""
CHILD_BYTES = 6 << 30
CHILD_SECONDS = 60
COMMAND = [sys.executable, "-P", "-c", "from fivefold.data.tokenizer_check import child; child()"]
PROBE = "".join(map(chr, [*range(1, 0x3000, 3), *range(0xFB00, 0xFE00), *range(0x1F300, 0x1F600)])) + (
    "The quick brown fox jumps over the lazy dog, 12345 times\n\n\t  " * 100 + "e" * 2000
)
"""Text of many scripts, and long runs."""

_passed: set[str] = set()


def require_harmless(path: Path, content: bytes, spec: Any, ours: bool) -> None:
    """Refuses a tokenizer.json that takes too much memory or time. ours: its parts are those that Fivefold writes.

    Raises:
        UserError: it does.
        Exception: it is not a tokenizer.json.
    """
    problem = problem_of(spec)
    digest = hashlib.sha256(content).hexdigest()
    if not problem and not ours and digest not in _passed:
        mark = cache_folder() / "tokenizers" / digest
        if not mark.is_file():
            problem = _try(content)
            if not problem:
                with suppress(UserError), writable(mark.parent):
                    write_atomically(mark, f"{path}\n".encode("utf-8", "backslashreplace").decode())
    if problem:
        raise UserError(f"data.tokenizer: {path} is refused: {problem}")
    _passed.add(digest)


def problem_of(spec: Any) -> str:
    """What is wrong with the content of a tokenizer.json, without loading it; "" if nothing."""
    model = spec["model"]
    vocab = model.get("vocab") or {}
    ids = vocab.values() if isinstance(vocab, dict) else range(len(vocab))
    highest = max([*ids, *(entry["id"] for entry in spec.get("added_tokens") or [])], default=0)
    if not 0 <= highest < MOST_IDS:
        return f"it has the id {highest:,}; ids must be below {MOST_IDS:,}"
    for part in ("normalizer", "decoder"):
        if (grows := growth(spec.get(part) or {})) > MOST_GROWTH:
            return f"its {part} makes a text up to {grows:.0f} times as long; at most {MOST_GROWTH} times is accepted"
    return ""


def growth(part: dict[str, Any]) -> float:
    """How many times longer a text may become by a normalizer or decoder."""
    kind = part.get("type")
    if kind == "Sequence":
        return math.prod(map(growth, [*part.get("normalizers", ()), *part.get("decoders", ())]))
    if kind == "Replace":
        plain = part["pattern"].get("String")
        return max(1.0, len(part["content"]) / len(plain) if plain else 1 + len(part["content"]))
    if kind == "Prepend":
        return 1.0 + len(part["prepend"])
    if kind == "Precompiled":
        return _longest_replacement(part["precompiled_charsmap"])
    return 1.0


def _longest_replacement(charsmap: str) -> float:
    """The longest of a SentencePiece map's replacements: behind a trie of so many bytes they end with zeros."""
    raw = base64.b64decode(charsmap)
    (trie,) = struct.unpack_from("<I", raw)
    return max([1, *map(len, raw[4 + trie :].split(b"\0"))])


def _try(content: bytes) -> str:
    """Lets a child load a tokenizer.json and use it. Returns what was wrong, or ""."""
    root = str(Path(__file__).parents[2])  # the child must find the same package, installed or not
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MALLOC_ARENA_MAX": "2",
    }
    try:
        done = subprocess.run(
            COMMAND, input=content, capture_output=True, env=environment, timeout=4 * CHILD_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"loading it takes more than {4 * CHILD_SECONDS} seconds"
    if done.returncode == 0:
        return json.loads(done.stdout)
    if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        return f"loading it takes more than {CHILD_SECONDS} seconds"
    said = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:] or [""]
    return f"loading it takes more than {CHILD_BYTES >> 30} GiB of memory, or crashes ({said[0][:200]})"


def child() -> None:
    """Entry point of the child: the file on stdin, a JSON text on stdout, which says what is wrong."""
    limit()
    import tokenizers

    try:
        content = sys.stdin.buffer.read()
        spec = parse_json(content)
        inner: Any = tokenizers.Tokenizer.from_str(json.dumps(spec))
        inner.no_truncation()
        inner.no_padding()
        inner.encode_special_tokens = True
        inner.get_vocab(with_added_tokens=True)
        found = ""
        with suppress(Exception):  # some have no token for an unknown character
            (encoding,) = inner.encode_batch_fast([PROBE], add_special_tokens=False)
            inner.decode(encoding.ids, skip_special_tokens=True)
    except MemoryError:
        found = f"loading it takes more than {CHILD_BYTES >> 30} GiB of memory"
    except Exception as error:  # the library raises a bare Exception for a file that it cannot parse
        found = f"not a tokenizer.json: {str(error)[:300]}"
    print(json.dumps(found))


def limit() -> None:
    """Bounds this process: memory, time, no file, no core dump."""
    for what, most in (
        (resource.RLIMIT_AS, CHILD_BYTES),
        (resource.RLIMIT_CPU, CHILD_SECONDS),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        with suppress(ValueError, OSError):  # a system that does not limit this, or limits it more
            resource.setrlimit(what, (most, most))
