"""Text to token ids and back: byte-level BPE, plain bytes, characters, or the user's tokenizer.json.

Each wraps a Hugging Face `tokenizers.Tokenizer`, so `transformers` can open a run's tokenizer.json. Text never becomes
a special token. A document that contains "<|end|>" gets the ordinary tokens of these characters. Otherwise any web page
could end a document, or hide a word from the loss.

Tokenizer files of others are looked through, then tried in a child process with little memory and time. The library
that reads a tokenizer.json is fast because it trusts the file. A normalizer may turn every "e" into a megabyte, and a
process that runs out of memory is aborted, without an exception. So a file that is not made as ours are is loaded and
used once in a process that may write nothing and must end soon. What has passed is remembered by its hash: a mark in
the cache folder.
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
from collections.abc import Iterable, Sequence
from contextlib import suppress
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers

from fivefold.data.beginning import adds_blank, begin_template, starts, types_of
from fivefold.data.pieces import Pieces, cut_text
from fivefold.errors import UserError
from fivefold.files import cache_folder, parse_json, read_bytes, read_json, writable, write_atomically
from fivefold.precision import MOST_IDS

END, MASK = "<|end|>", "<|mask|>"
KNOWN_ENDS = [END, "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "<|im_end|>", "[SEP]"]
KNOWN_MASKS = [MASK, "[MASK]", "<mask>"]

# BPE merges only within one of these: a word with one sign before it, up to three digits, a run of signs, line breaks
# with the indentation that follows (source code gets 3% shorter than with GPT-2's pattern), other blanks. Runs end
# after 64 characters, because training time is quadratic in the length of a word: a page without blanks would take
# minutes.
WORDS = (
    r"[^\r\n\p{L}\p{N}]?\p{L}{1,64}|\p{N}{1,3}| ?[^\s\p{L}\p{N}]{1,64}"
    r"|[\r\n]{1,64}[ \t]{0,64}|\s{1,64}(?!\S)|\s{1,64}"
)
MOST_BYTES = 64 << 20
"""Size of a tokenizer.json; that of Gemma 3 has 33 MB."""
MOST_GROWTH = 256
"""How many times longer a text may become by normalizing. NFKC makes 18 characters of one."""
CHILD_BYTES = 6 << 30
CHILD_SECONDS = 60
COMMAND = [sys.executable, "-P", __file__]
PROBE = "".join(map(chr, [*range(1, 0x3000, 3), *range(0xFB00, 0xFE00), *range(0x1F300, 0x1F600)])) + (
    "The quick brown fox jumps over the lazy dog, 12345 times\n\n\t  " * 100 + "e" * 2000
)
"""Text of many scripts, and long runs."""


class NoSuchToken(UserError):
    """A tokenizer.json has no end token, or no mask token where one is needed."""


class Tokenizer:
    """Encodes and decodes text, and describes the vocabulary.

    vocab_size: all ids are below it. end_id: the token between documents. end_ids: those that end a generated text.
    begin: the token that the file's config calls bos_token. start_ids: what stands before a text: the end token, as in
    training, or for an imported model what its own file says (`imported`). prefixes: the text's beginning gets a blank
    that is not there, as SentencePiece's and RoBERTa's do. byte_ids: tokens of single bytes that become text or not as
    a whole run (SentencePiece's byte fallback). mask_id: the token that hides a word where the objective is `mlm`, or
    None. special_tokens: text -> id. chat_template: the Jinja text of conversations that a run has learned from; "":
    none. token_bytes (V,) int64: UTF-8 bytes of text per id, 0 for special tokens. They are exact for byte-level
    vocabularies (`bpe:N`, `bytes`, GPT-2, Llama 3 ...), `chars` and byte fallback, else an estimate (BERT's lower-
    casing).
    """

    def __init__(self, inner: tokenizers.Tokenizer, end: str, mask: str | None, begin: str | None = None):
        inner.no_truncation()
        inner.no_padding()
        inner.encode_special_tokens = True  # those in the text are text; the file does not save it
        self._inner = inner
        spec, vocab = json.loads(inner.to_str()), inner.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values()) + 1
        named = {"bos_token": begin, "eos_token": end, "mask_token": mask}
        self._names = {role: token for role, token in named.items() if token is not None}
        self.begin, self.end_id = begin, vocab[end]
        self.end_ids, self.start_ids = frozenset([self.end_id]), [self.end_id]
        self._file_starts, self._begin_id = starts(spec.get("post_processor") or {}), vocab[begin or end]
        self.mask_id = None if mask is None else vocab[mask]
        self.special_tokens = {t["content"]: t["id"] for t in spec["added_tokens"] if t["special"]}
        self.chat_template = ""
        model = spec["model"]
        letters = {letter: byte for byte, letter in byte_letters().items()}
        plain = (model["type"], model.get("merges"), spec["normalizer"]) == ("BPE", [], None)
        self._is_bytes = plain and model["vocab"] == letters
        self._char_ids = _character_table(spec)
        self.token_bytes = self._count_bytes(spec, vocab)
        self.prefixes = adds_blank(spec)
        fallback = "ByteFallback" in types_of(spec, "decoder")
        self.byte_ids = frozenset(i for t, i in vocab.items() if fallback and _is_byte(t))

    def imported(self, end_ids: Iterable[int] = ()) -> Tokenizer:
        """Of a model that was trained elsewhere: texts begin as the file's own template says, which may be without any
        token, and end at end_ids, if there are any."""
        found = copy(self)
        found.start_ids, found.end_ids = self._file_starts, frozenset(end_ids) or self.end_ids
        return found

    @property
    def begin_ids(self) -> list[int]:
        """What stands before a document whose first token is predicted, too: start_ids, or at least the BOS or end
        token."""
        return self.start_ids or [self._begin_id]

    def begun(self, text: str) -> list[int]:
        """Ids of a text from its beginning on, as a model has learned to read it."""
        ids = self.encode(text)
        return [*self.start_ids, *ids] if ids else self.begin_ids

    def encode(self, text: str) -> list[int]:
        """Ids of the text. Raises UserError for a lone surrogate, or a character unknown to `chars`."""
        return self.encode_array(text).tolist()

    def encode_array(self, text: str, continues: bool = False) -> np.ndarray:
        """Ids of the text as an array (int64, or a smaller type for a small vocabulary). continues: it is no beginning,
        so it gets no blank that only begins a text."""
        try:
            raw = text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UserError(
                f"the text holds a lone surrogate at character {error.start}: not valid Unicode"
            ) from None
        if self._is_bytes:
            return np.frombuffer(raw, np.uint8).astype(np.uint16)
        if self._char_ids is not None:
            char_ids = self._char_ids[np.frombuffer(text.encode("utf-32-le"), np.uint32)]
            if len(char_ids) and char_ids.min() < 0:
                at = int(char_ids.argmin())
                raise UserError(
                    f"character {text[at]!r} at position {at} is not in the tokenizer's vocabulary"
                )
            return char_ids
        return Pieces(self._inner, self.prefixes).encode(text, continues)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids, without special tokens and without ids beyond the vocabulary (a model may pad)."""
        return self._inner.decode(
            [i for i in map(int, ids) if 0 <= i < self.vocab_size], skip_special_tokens=True
        )

    def vocabulary(self) -> dict[str, int]:
        """The id of each token, special ones included."""
        return self._inner.get_vocab(with_added_tokens=True)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the tokens, their ids and the merges: what gives a text its ids."""
        merges = json.loads(self._inner.to_str())["model"].get("merges", [])
        pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]  # texts, if old
        return hashlib.sha256(json.dumps([sorted(self.vocabulary().items()), pairs]).encode()).hexdigest()

    def to_json(self) -> str:
        """The content of a tokenizer.json."""
        return self._inner.to_str(pretty=True)

    def to_begun_json(self) -> str:
        """The same with a template that puts the end token before a text, as training does: for other programs."""
        spec, template = json.loads(self.to_json()), begin_template(self._names["eos_token"], self.end_id)
        return json.dumps(spec | {"post_processor": template}, indent=2, ensure_ascii=False)

    def save(self, path: Path) -> None:
        """Writes tokenizer.json, and tokenizer_config.json, which names the special tokens."""
        write_atomically(path, self.to_json())
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **self._names}
        if self.chat_template:
            config["chat_template"] = self.chat_template
        write_atomically(path.with_name("tokenizer_config.json"), json.dumps(config, indent=2))

    def _count_bytes(self, spec: dict[str, Any], vocab: dict[str, int]) -> np.ndarray:
        counts = np.zeros(self.vocab_size, np.int64)
        byte_level = "ByteLevel" in types_of(spec, "decoder", "pre_tokenizer")
        added = {t["content"] for t in spec["added_tokens"]}
        continues = spec["model"].get("continuing_subword_prefix") if not byte_level else None
        for token, i in vocab.items():
            if i in self.special_tokens.values():
                continue
            if byte_level and token not in added:  # each character stands for one byte
                counts[i] = len(token)
            elif _is_byte(token):
                counts[i] = 1
            elif continues:  # WordPiece: "##ing" continues a word, any other token follows a blank
                counts[i] = len(token.removeprefix(continues).encode()) + (not token.startswith(continues))
            else:
                counts[i] = len(token.replace("\u2581", " ").encode("utf-8", "surrogatepass"))
        return counts


def train_bpe(
    texts: Iterable[str], vocab_size: int, mask: bool = False, more: Sequence[str] = ()
) -> Tokenizer:
    """Trains a byte-level BPE with at most vocab_size tokens (arXiv 1508.07909 on UTF-8 bytes, as GPT-2).

    The same texts give the same tokenizer, because merges are ordered by count, then by ids. more: special tokens
    besides our own.
    """
    special = [*([END, MASK] if mask else [END]), *more]
    check_bpe_size(vocab_size, len(special))
    inner = _plain("bpe", models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in special],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    pieces = (piece for text in texts for piece in cut_text(text))
    inner.train_from_iterator(pieces, trainer=trainer)
    return Tokenizer(inner, END, MASK if mask else None)


def check_bpe_size(vocab_size: int, special: int) -> None:
    least = 256 + special
    if vocab_size < least:
        raise UserError(
            f"data.tokenizer = bpe:{vocab_size}: needs at least {least} tokens (256 bytes and the special tokens)"
        )


def bytes_tokenizer(mask: bool = False) -> Tokenizer:
    """A tokenizer of UTF-8 bytes: ids 0 to 255 are the bytes, 256 is the end token, 257 the mask."""
    letters = byte_letters()
    return _with_special(_plain("bytes", models.BPE({letters[b]: b for b in range(256)}, [])), mask)


def chars_tokenizer(characters: Iterable[str], mask: bool = False) -> Tokenizer:
    """A tokenizer with one id per character, in code-point order (as nanoGPT's), then the special tokens."""
    vocab = {c: i for i, c in enumerate(sorted(set(characters)))}
    return _with_special(_plain("chars", models.WordLevel(vocab, unk_token="<|unknown|>")), mask)


def _plain(kind: Literal["bpe", "bytes", "chars"], model: Any) -> tokenizers.Tokenizer:
    """A tokenizer without special tokens."""
    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner: Any = tokenizers.Tokenizer(model)
    inner.pre_tokenizer, inner.decoder = {
        "bpe": (
            pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(WORDS), "isolated"), spelled]),
            decoders.ByteLevel(),
        ),
        "bytes": (spelled, decoders.ByteLevel()),
        "chars": (pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated"), decoders.Fuse()),
    }[kind]
    return inner


def load_tokenizer(path: Path, mask: bool = False) -> Tokenizer:
    """Loads a Hugging Face tokenizer.json, or the one in a folder.

    tokenizer_config.json beside it names the end and mask tokens (eos_token, mask_token). Without it the usual names
    are tried. mask: a mask token is required. Raises UserError if the file or a token is missing, or if the file takes
    too much memory or time.
    """
    path = path / "tokenizer.json" if path.is_dir() else path
    config_path = path.with_name("tokenizer_config.json")
    try:
        content = read_bytes(path, MOST_BYTES)
        spec = parse_json(content)
        config = read_json(config_path) if config_path.exists() else {}
        require_harmless(path, content, spec, _is_ours(spec))
        vocab = spec["model"].get("vocab")
        if isinstance(vocab, dict):
            vocab = vocab | {token["content"]: token["id"] for token in spec.get("added_tokens") or ()}
        else:  # the library knows
            vocab = tokenizers.Tokenizer.from_str(json.dumps(spec)).get_vocab(with_added_tokens=True)
        end = _find_token(path, vocab, config.get("eos_token"), KNOWN_ENDS, "end")
        named_mask = config.get("mask_token")
        mask_token = _find_token(path, vocab, named_mask, KNOWN_MASKS, "mask") if mask or named_mask else None
        # Text that looks like these tokens stays text where the file's content marks them as special.
        added = {entry["content"]: entry for entry in spec.setdefault("added_tokens", [])}
        for token in [end] if mask_token is None else [end, mask_token]:
            if token not in added:
                flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
                added[token] = {"id": vocab[token], "content": token, **flags}
                spec["added_tokens"].append(added[token])
            added[token]["special"] = True
        spec["added_tokens"].sort(key=lambda entry: entry["id"])
        begin = _named(config.get("bos_token"))
        known = begin if begin in vocab else None
        return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(spec)), end, mask_token, known)
    except (UserError, MemoryError):
        raise
    except OSError as error:
        raise UserError(f"data.tokenizer: cannot read {path}: {error.strerror}") from None
    except Exception as error:  # the library raises a bare Exception for a file that it cannot parse
        raise UserError(f"data.tokenizer: {path} is not a tokenizer.json: {str(error)[:300]}") from None


def with_special(tokenizer: Tokenizer, tokens: Sequence[str]) -> Tokenizer:
    """The tokenizer with these special tokens, too. Those that its vocabulary lacks get the next ids."""
    if set(tokens) <= tokenizer.special_tokens.keys():
        return tokenizer
    names = {number: text for text, number in tokenizer.special_tokens.items()}
    inner = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    inner.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in tokens])
    mask = None if tokenizer.mask_id is None else names[tokenizer.mask_id]
    return Tokenizer(inner, names[tokenizer.end_id], mask, tokenizer.begin)


def byte_letters() -> dict[int, str]:
    """The printable letter for each byte in byte-level vocabularies (GPT-2's convention).

    Bytes that are printable in Latin-1 stand for themselves. The others get the letters from U+0100 on.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in plain]
    return {b: chr(b) for b in plain} | {b: chr(256 + n) for n, b in enumerate(others)}


def _with_special(inner: tokenizers.Tokenizer, mask: bool) -> Tokenizer:
    special = [END, MASK] if mask else [END]
    inner.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    return Tokenizer(inner, END, MASK if mask else None)


def _find_token(path: Path, vocab: dict[str, int], named: Any, usual: list[str], role: str) -> str:
    for token in [_named(named), *usual]:
        if token is not None and token in vocab:
            return token
    raise NoSuchToken(
        f"data.tokenizer: {path} has no {role} token; name it in tokenizer_config.json beside it, "
        f"or use one of {', '.join(usual)}"
    )


def _is_byte(token: str) -> bool:
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")


def _named(token: Any) -> str | None:
    """A special token of tokenizer_config.json: text, or an object with its content."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _is_ours(spec: Any) -> bool:
    """True if a tokenizer.json has no parts but those of `_plain`. Its vocabulary may be any."""
    parts = ("normalizer", "pre_tokenizer", "decoder")
    plain = [json.loads(_plain(kind, models.BPE()).to_str()) for kind in ("bpe", "bytes", "chars")]
    known = [[ours[part] for part in parts] for ours in plain]
    return (
        isinstance(spec, dict)
        and isinstance(spec.get("model"), dict)
        and spec["model"].get("type") in ("BPE", "WordLevel")
        and [spec.get(part) for part in parts] in known
        and spec.get("post_processor")
        in (None, *(begin_template(END, t["id"]) for t in spec.get("added_tokens") or ()))
    )


def _character_table(spec: dict[str, Any]) -> np.ndarray | None:
    """Maps code points to ids (-1: unknown) if every token is one character. Otherwise None."""
    model, split = spec["model"], spec["pre_tokenizer"] or {}
    if model["type"] != "WordLevel" or split.get("pattern") != {"Regex": r"[\s\S]"} or spec["normalizer"]:
        return None
    table = np.full(0x110000, -1, np.int32)
    for character, i in model["vocab"].items():
        table[ord(character)] = i
    return table


_passed: set[str] = set()


def require_harmless(path: Path, content: bytes, spec: Any, ours: bool) -> None:
    """Refuses a tokenizer.json that takes too much memory or time. ours: its parts are those that Fivefold writes.

    Raises:
        UserError: it does.
        Exception: it is not a tokenizer.json.
    """
    vocab, fault = spec["model"].get("vocab") or {}, ""
    ids = vocab.values() if isinstance(vocab, dict) else range(len(vocab))
    highest = max([*ids, *(entry["id"] for entry in spec.get("added_tokens") or [])], default=0)
    if not 0 <= highest < MOST_IDS:
        fault = f"it has the id {highest:,}; ids must be below {MOST_IDS:,}"
    for part in ("normalizer", "decoder"):
        if not fault and (grows := growth(spec.get(part) or {})) > MOST_GROWTH:
            fault = f"its {part} makes a text up to {grows:.0f} times as long; at most {MOST_GROWTH} times is accepted"
    digest = hashlib.sha256(content).hexdigest()
    if not fault and not ours and digest not in _passed:
        mark = cache_folder() / "tokenizers" / digest
        if not mark.is_file():
            fault = _try(content)
            if not fault:
                with suppress(UserError), writable(mark.parent):
                    write_atomically(mark, f"{path}\n".encode("utf-8", "backslashreplace").decode())
    if fault:
        raise UserError(f"data.tokenizer: {path} is refused: {fault}")
    _passed.add(digest)


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
        raw = base64.b64decode(part["precompiled_charsmap"])  # of SentencePiece: a trie of so many bytes
        (trie,) = struct.unpack_from("<I", raw)
        return max([1, *map(len, raw[4 + trie :].split(b"\0"))])  # and behind it texts that end with zeros
    return 1.0


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
    last = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:] or [""]
    return f"loading it takes more than {CHILD_BYTES >> 30} GiB of memory, or crashes ({last[0][:200]})"


def child() -> None:
    """Entry point of the child: the file on stdin, a JSON text on stdout, which says what is wrong."""
    limit()
    try:
        content = sys.stdin.buffer.read()
        spec = parse_json(content)
        inner: Any = tokenizers.Tokenizer.from_str(json.dumps(spec))
        inner.no_truncation()
        inner.no_padding()
        inner.encode_special_tokens = True
        inner.get_vocab(with_added_tokens=True)
        problem = ""
        with suppress(Exception):  # some have no token for an unknown character
            (encoding,) = inner.encode_batch_fast([PROBE], add_special_tokens=False)
            inner.decode(encoding.ids, skip_special_tokens=True)
    except MemoryError:
        problem = f"loading it takes more than {CHILD_BYTES >> 30} GiB of memory"
    except Exception as error:  # the library raises a bare Exception for a file that it cannot parse
        problem = f"not a tokenizer.json: {str(error)[:300]}"
    print(json.dumps(problem))


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


if __name__ == "__main__":
    child()
