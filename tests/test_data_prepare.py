"""prepare(): from text to shards and back; splits, cache, concurrency, workers, bounded memory."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_recipes import recipe_of, write

from fivefold.data import Batches, build, check, prepare
from fivefold.data.dataset import DataSet
from fivefold.data.kinds.kind import Fields
from fivefold.data.one_source import prepare_source
from fivefold.data.sources import FileSplit, find
from fivefold.data.tokenizer import Tokenizer, train_bpe
from fivefold.data.tokens import BLOCK, SEAL, SHARD_TOKENS, ShardWriter
from fivefold.errors import UserError
from fivefold.files import write_atomically
from fivefold.recipe import DataSection
from fivefold.recipe.entries import SourceEntry

END = 256  # of the tokenizer `bytes`
SHAKESPEARE = Path(__file__).parents[1] / ".." / "shared" / "data" / "tinyshakespeare.txt"


def texts_of(data: DataSet) -> tuple[list[str], list[str]]:
    """The documents of both splits, decoded from a `bytes` set."""

    def documents(ids: np.ndarray) -> list[str]:
        *whole, rest = np.split(ids, np.flatnonzero(ids == END) + 1)
        assert len(rest) == 0  # every document ends with the end token
        return [bytes(d[:-1].astype(np.uint8)).decode() for d in whole]

    return documents(data.train[:]), documents(data.val[:] if data.val else np.empty(0, np.int64))


def test_documents_are_separated_and_split_whole(tmp_path: Path):
    files = {f"{i:02d}.txt": f"document {i} " * 20 for i in range(20)}
    for name, text in files.items():
        write(tmp_path / "in" / name, text)
    data = prepare(recipe_of(tmp_path / "in", tmp_path / "cache", val_fraction=0.2))
    train, val = texts_of(data)
    assert train == [files[name] for name in sorted(files) if files[name] in train]  # in the order of names
    assert sorted(train + val) == sorted(files.values())
    assert 3 <= len(val) <= 4  # whole documents, at most the share asked
    assert data.info["documents"] == {"train": len(train), "val": len(val)}
    assert data.info["bytes"]["val"] == sum(map(len, val))
    assert data.info["tokens"] == {"train": len(data.train), "val": len(data.val or [])}


def test_the_split_does_not_depend_on_where_the_folder_lies(tmp_path: Path):
    for place in ("a", "elsewhere/b"):
        for i in range(10):
            write(tmp_path / place / "sub" / f"{i}.md", f"text {i} " * 9)
    sets = [
        prepare(recipe_of(tmp_path / p, tmp_path / "cache", val_fraction=0.3)) for p in ("a", "elsewhere/b")
    ]
    assert texts_of(sets[0]) == texts_of(sets[1])
    assert sets[1].info["cached"]  # the content decides: moving a set costs nothing


@pytest.mark.parametrize("fraction", [0.001, 0.5, 0.999])
@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_two_documents_make_two_splits(tmp_path: Path, fraction: float, kind: str):
    if kind == "txt":
        write(tmp_path / "in" / "a.txt", "first document")
        write(tmp_path / "in" / "b.txt", "second document")
    else:
        write(tmp_path / "in" / "a.jsonl", '{"text": "first document"}\n{"text": "second document"}\n')
    data = prepare(recipe_of(tmp_path / "in", tmp_path / "cache", val_fraction=fraction))
    train, val = texts_of(data)
    assert sorted(train + val) == ["first document", "second document"]
    assert len(train) == len(val) == 1


def test_a_huge_file_is_not_chosen_for_a_small_validation(tmp_path: Path):
    for seed in range(5):
        write(tmp_path / f"{seed}" / f"large{seed}.txt", "x" * 5000)
        write(tmp_path / f"{seed}" / "small.txt", "small document")
        data = prepare(recipe_of(tmp_path / f"{seed}", tmp_path / "cache"))
        assert texts_of(data)[1] == ["small document"]


@pytest.mark.parametrize("content", ["plain text " * 50, "ünïcödé ☂ \U0001f600 text " * 40])
def test_a_single_text_is_cut_at_its_end_by_characters(tmp_path: Path, content: str):
    path = write(tmp_path / "one.txt", content)
    data = prepare(recipe_of(path, tmp_path / "cache", tokenizer="chars", val_fraction=0.1))
    assert data.tokenizer is not None
    assert data.val is not None
    cut = int(len(content) * 0.9)
    assert data.tokenizer.decode(data.train[:]) == content[:cut]
    assert data.tokenizer.decode(data.val[:]) == content[cut:]
    assert len(data.train) == cut  # no end token: there is nothing to separate


def test_a_single_json_document_is_cut_too(tmp_path: Path):
    path = write(tmp_path / "one.jsonl", json.dumps({"text": "0123456789" * 10}))
    data = prepare(recipe_of(path, tmp_path / "cache", val_fraction=0.1))
    assert data.val is not None
    assert bytes(data.train[:].astype(np.uint8)).decode() == "0123456789" * 9
    assert bytes(data.val[:].astype(np.uint8)).decode() == "0123456789"


@pytest.mark.skipif(
    not SHAKESPEARE.exists(), reason="../shared/data/tinyshakespeare.txt is not on this machine"
)
def test_tinyshakespeare_is_split_as_nanogpt_does(tmp_path: Path):
    text = SHAKESPEARE.read_text("utf-8")
    data = prepare(recipe_of(SHAKESPEARE.resolve(), tmp_path / "cache", tokenizer="chars", val_fraction=0.1))
    ids = {c: i for i, c in enumerate(sorted(set(text)))}
    expected = np.array([ids[c] for c in text])
    cut = int(len(text) * 0.9)
    assert data.val is not None
    assert (len(data.train), len(data.val)) == (1003854, 111540)  # the figures in nanoGPT's own script
    np.testing.assert_array_equal(data.train[:], expected[:cut])
    np.testing.assert_array_equal(data.val[:], expected[cut:])
    assert data.vocab_size == len(ids) + 1


@pytest.mark.slow
def test_the_standard_library_is_a_source(tmp_path: Path):
    recipe = recipe_of("stdlib", tmp_path / "cache", seq_len=256, batch=16)
    facts = check(recipe)
    size = float(re.search(r"([\d.]+) MB", facts[0])[1])  # type: ignore[index]
    assert size > 5
    data = prepare(recipe)
    assert data.info["documents"]["train"] > 300
    assert 0.03 < data.info["bytes"]["val"] / sum(data.info["bytes"].values()) <= 0.05
    assert prepare(recipe).info["cached"]


def test_jsonl_and_parquet_give_the_same_documents(tmp_path: Path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    documents = [f"row {i} ☂ " + "words " * (i % 7) for i in range(500)]
    lines = "\n".join(json.dumps({"body": d, "n": 1}) for d in documents) + "\n\n"
    write(tmp_path / "json" / "a.jsonl", "\ufeff" + lines)
    (tmp_path / "parquet").mkdir()
    table = pa.table({"n": list(range(500)), "body": documents})
    pq.write_table(table, tmp_path / "parquet" / "a.parquet", row_group_size=130)
    for kind in ("json", "parquet"):
        data = prepare(recipe_of(tmp_path / kind, tmp_path / "cache", val_fraction=0.1, text_key="body"))
        train, val = texts_of(data)
        assert sorted(train + val) == sorted(documents)
        assert train == [d for d in documents if d in train]
        assert 25 < len(val) < 80  # 50 expected, 6.7 the standard deviation


def mixed_source(folder: Path) -> Path:
    """About 4 MB in all shapes that can be cut: many small files, one large one, JSON lines, no lines."""
    rng = np.random.default_rng(0)
    words = [bytes(rng.integers(97, 123, n).astype(np.uint8)).decode() for n in rng.integers(1, 9, 500)]
    text = " ".join(rng.choice(words, 250_000).tolist()).replace(" e", "\nu ☂")
    write(folder / "large.txt", text)
    for i in range(30):
        write(folder / "small" / f"{i}.py", text[i * 1000 : i * 1000 + 1000 + i])
    write(
        folder / "rows.jsonl",
        "\n".join(json.dumps({"text": text[i : i + 2000]}) for i in range(0, 1_100_000, 2000)),
    )
    write(folder / "lines" / "none.txt", "\U0001f600" * 300_000)  # no line break to cut at
    return folder


def contents(folder: str) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in Path(folder).iterdir() if p.suffix in (".bin", ".json")}


@pytest.mark.slow
def test_shards_do_not_depend_on_the_number_of_workers(tmp_path: Path):
    source = mixed_source(tmp_path / "in")
    train_bpe([(source / "large.txt").read_text()[:100_000]], 400).save(tmp_path / "tokenizer.json")
    folders = []
    for workers in (1, 2, 3):
        cache, tokenizer = tmp_path / f"cache{workers}", str(tmp_path / "tokenizer.json")
        recipe = recipe_of(source, cache, tokenizer=tokenizer, val_fraction=0.2)
        data = prepare(recipe, workers=workers)
        folders.append(contents(data.info["folder"]))
    assert folders[0] == folders[1] == folders[2]
    assert data.tokenizer is not None
    decoded = data.tokenizer.decode(data.train[:]) + data.tokenizer.decode(data.val[:])  # type: ignore[index]
    assert len(decoded.encode()) == sum(data.info["bytes"].values())
    assert decoded.count("\U0001f600") == 300_000


def test_a_sample_is_spread_over_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A kilobyte from each of a few places, which goes on in the next file; all of a small source."""
    rows = [json.dumps({"text": f"{i:04d} " + "x" * 95}) for i in range(1000)]
    write(tmp_path / "a.jsonl", "\n".join(rows[:905]))
    write(tmp_path / "b.jsonl", "\n".join(rows[905:]))
    split = FileSplit(find(str(tmp_path / "*.jsonl")).files)
    assert len([*split.samples(Fields("text"), 4)]) == 1000
    monkeypatch.setattr("fivefold.data.sources.SPAN", 1 << 10)
    numbers = [int(document.text[:4]) for document in split.samples(Fields("text"), 4)]
    places = [low for low, high in pairwise([-2, *numbers]) if high != low + 1]
    assert numbers == sorted(numbers)
    assert len(places) == 5
    assert len(numbers) == 5 * 11
    assert numbers[0] == 0
    assert numbers[-1] > 900


def test_a_sample_of_a_table_takes_as_much_of_each_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Reading can begin at a group of rows only, and a group may be many times as long as a sample's step."""
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    texts = [f"{i:04d} " + "".join(str(i * j % 7) for j in range(95)) for i in range(1000)]
    pq.write_table(
        pa.table({"text": texts}),
        tmp_path / "a.parquet",
        row_group_size=250,
        compression="none",
        use_dictionary=False,
    )
    split = FileSplit(find(str(tmp_path / "a.parquet")).files)
    monkeypatch.setattr("fivefold.data.sources.SPAN", 1 << 10)
    numbers = [int(document.text[:4]) for document in split.samples(Fields("text"), 8)]
    assert numbers == sorted(set(numbers))
    assert {number // 250 for number in numbers} == {0, 1, 2, 3}
    assert 8 * 1024 <= 100 * len(numbers) < 10 * 1024


def test_who_stops_does_not_wait_for_documents_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rows = [json.dumps({"text": f"{i:04d}"}) for i in range(4000)]
    recipe = recipe_of(write(tmp_path / "a.jsonl", "\n".join(rows)), tmp_path / "cache")
    encode, groups, seen = Tokenizer.encode_array, build._groups, list[str]()

    def slow(tokenizer: Tokenizer, text: str, continues: bool = False) -> np.ndarray:
        seen.append(text)
        time.sleep(0.01)
        return encode(tokenizer, text, continues)

    def interrupted(*arguments: Any) -> Iterator[Any]:
        yield next(groups(*arguments))
        time.sleep(0.2)
        raise KeyboardInterrupt

    monkeypatch.setattr(Tokenizer, "encode_array", slow)
    monkeypatch.setattr(build, "_groups", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare(recipe, workers=2)
    assert 0 < len(seen) < 1000


def test_a_changed_source_is_never_read_stale(tmp_path: Path):
    path = write(tmp_path / "in" / "a.txt", "the first text")
    write(tmp_path / "in" / "b.txt", "the other text")
    recipe = recipe_of(tmp_path / "in", tmp_path / "cache", val_fraction=0.0)

    def documents() -> list[str]:
        return texts_of(prepare(recipe))[0]

    assert documents() == ["the first text", "the other text"]
    before = path.stat()
    write(path, "THE FIRST TEXT")  # the same size, and the time of change put back
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert documents() == ["THE FIRST TEXT", "the other text"]
    write(tmp_path / "in" / "c.txt", "a new one")
    assert len(documents()) == 3
    path.unlink()
    assert documents() == ["the other text", "a new one"]


def test_an_old_file_is_hashed_once_and_still_never_read_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The remembered hash is used (files older than two seconds), and dropped when the change time moves."""
    hashed = []
    original = prepare_source.__globals__["sha256"]
    monkeypatch.setitem(
        prepare_source.__globals__, "sha256", lambda *a: hashed.append(a[0].name) or original(*a)
    )
    path = write(tmp_path / "in" / "a.txt", "the first text")
    recipe = recipe_of(path, tmp_path / "cache", val_fraction=0.0)
    prepare(recipe)
    time.sleep(2.1)
    prepare(recipe)
    hashed.clear()
    assert prepare(recipe).info["cached"]
    assert hashed == []
    before = path.stat()
    path.write_text("THE FIRST TEXT")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert bytes(prepare(recipe).train[:].astype(np.uint8)) == b"THE FIRST TEXT"
    assert hashed[0] == "a.txt"


def test_settings_and_tokenizer_have_their_own_entries(tmp_path: Path):
    path = write(tmp_path / "a.txt", "some text " * 100)
    keys = {
        prepare(recipe_of(path, tmp_path / "cache", **change)).info["fingerprint"]
        for change in (
            {},
            {"tokenizer": "chars"},
            {"tokenizer": "bpe:260"},
            {"val_fraction": 0.2},
            {"arch": "bert"},
            {"text_key": "other"},
        )
    }
    assert len(keys) == 6
    saved = prepare(recipe_of(path, tmp_path / "cache", tokenizer="bpe:260"))
    again = prepare(recipe_of(path, tmp_path / "cache", tokenizer=saved.info["folder"] + "/tokenizer.json"))
    assert again.info["fingerprint"] not in keys
    np.testing.assert_array_equal(again.train[:], saved.train[:])


def test_damaged_shards_are_made_again(tmp_path: Path):
    path = write(tmp_path / "a.txt", "some text " * 100)
    recipe = recipe_of(path, tmp_path / "cache")
    first = prepare(recipe)
    before = contents(first.info["folder"])
    shard = Path(first.info["folder"]) / "train-00000.bin"
    shard.write_bytes(shard.read_bytes()[:-2])
    again = prepare(recipe)
    assert not again.info["cached"]
    assert contents(again.info["folder"]) == before


def test_two_processes_prepare_at_once(tmp_path: Path):
    for i in range(30):
        write(tmp_path / "in" / f"{i}.txt", f"text {i} " * 10_000)
    code = (
        "import sys; from data_recipes import recipe_of; from fivefold.data import prepare;"
        "d = prepare(recipe_of(sys.argv[1], sys.argv[2], tokenizer='bpe:300'));"
        "print(d.info['fingerprint'], d.info['cached'], len(d.train), int(d.train[:].sum()))"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-c", code, str(tmp_path / "in"), str(tmp_path / "cache")]
    started = [
        subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) for _ in range(3)
    ]
    printed = [p.communicate(timeout=300)[0].split() for p in started]
    assert all(p.returncode == 0 for p in started)
    assert len({(key, length, total) for key, _, length, total in printed}) == 1
    assert sorted(cached for _, cached, _, _ in printed) == ["False", "True", "True"]  # one worked
    left = [p.name for p in (tmp_path / "cache" / "data").iterdir()]
    assert not [name for name in left if ".tmp-" in name]


def test_a_killed_run_leaves_nothing_in_the_way(tmp_path: Path):
    """Killed while threads work: the next run continues and leaves nothing else."""
    source = mixed_source(tmp_path / "in")
    code = (
        "import os, signal, sys\nfrom data_recipes import recipe_of\n"
        "from fivefold.data import prepare\n"
        "def tell(stage, done, total):\n"
        "    if stage == 'tokenizing' and done > 2e6: os.kill(os.getpid(), signal.SIGKILL)\n"
        "prepare(recipe_of(sys.argv[1], sys.argv[2]), tell)"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-c", code, str(source), str(tmp_path / "cache")]
    assert subprocess.run(command, env=environment).returncode == -9
    assert list((tmp_path / "cache" / "data").glob("*.part"))
    data = prepare(recipe_of(source, tmp_path / "cache"))
    assert not data.info["cached"]
    left = list((tmp_path / "cache" / "data").iterdir())
    assert not [path for path in left if path.suffix == ".part" or ".tmp-" in path.name]


def test_memory_is_bounded_on_large_files(tmp_path: Path):
    """64 MB of text, and as much in JSON lines, by a process whose memory may grow by 40 MB."""
    line = b'{"text": "' + b"some words of text " * 500 + b'"}\n'
    for name in ("a.txt", "b.jsonl"):
        with open(tmp_path / name, "wb") as f:
            for _ in range((64_000_000) // len(line)):
                f.write(line)
        code = (
            "import sys, resource; from data_recipes import recipe_of; from fivefold.data import prepare\n"
            "from pathlib import Path; Path(sys.argv[1] + '.small.txt').write_text('words ' * 1000)\n"
            "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024\n"
            "prepare(recipe_of(sys.argv[1] + '.small.txt', sys.argv[2]), workers=1); before = peak()\n"
            "d = prepare(recipe_of(sys.argv[1], sys.argv[2]), workers=1)\n"
            "print(peak() - before, len(d.train) + len(d.val))"
        )
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
        command = [sys.executable, "-c", code, str(tmp_path / name), str(tmp_path / "cache")]
        printed = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True
        ).stdout.split()
        assert float(printed[0]) < 40, name
        assert int(printed[1]) > 62e6


def test_shards_have_a_fixed_size(tmp_path: Path):
    writer = ShardWriter(tmp_path, "train", "<u2", shard_tokens=100)
    for n in (30, 250, 20, 0, 1):
        writer.write(np.arange(n))
    writer.close()
    assert [e["tokens"] for e in writer.entries()] == [100, 100, 100, 1]
    joined = np.concatenate([np.fromfile(tmp_path / e["file"], "<u2") for e in writer.entries()])
    np.testing.assert_array_equal(joined, np.concatenate([np.arange(30), np.arange(250), np.arange(20), [0]]))
    assert SHARD_TOKENS >= 1 << 20


def test_bert_gets_a_mask_token(tmp_path: Path):
    path = write(tmp_path / "a.txt", "some text " * 100)
    for tokenizer, vocab_size in (("bytes", 258), ("bpe:260", 260), ("chars", 9)):
        data = prepare(recipe_of(path, tmp_path / "cache", arch="bert", tokenizer=tokenizer))
        assert data.tokenizer is not None
        assert data.vocab_size == vocab_size
        assert data.mask_id == data.tokenizer.mask_id
        assert data.mask_id not in data.train[:]
        x, *_ = Batches(data.train, 16, 2, 0, "mlm", mask_id=data.mask_id, vocab_size=data.vocab_size).batch(
            0
        )
        assert (x == data.mask_id).any()


def test_progress_is_told(tmp_path: Path):
    path = write(tmp_path / "a.txt", "some text " * 100)
    told: list[tuple[str, int, int | None]] = []
    prepare(recipe_of(path, tmp_path / "cache", tokenizer="bpe:260"), lambda *facts: told.append(facts))
    last = {stage: (done, total) for stage, done, total in told}
    assert last["tokenizing"] == (1000, 1000)
    assert last["reading"] == (1000, 1000)
    assert "learning the vocabulary" in last


def test_check_estimates_first_and_knows_afterwards(tmp_path: Path):
    path = write(tmp_path / "a.txt", "some text " * 1000)
    recipe = recipe_of(path, tmp_path / "cache", seq_len=9, batch=10, steps=200, val_fraction=0.1)
    facts = check(recipe)
    assert facts == [
        "data: 1 file, 0.0 MB",
        "tokens: about 9,000 for training (not tokenized yet)",
        "passes over the training set: about 2.00",
    ]
    prepare(recipe)
    assert check(recipe)[1:] == [
        "tokens: 9,000 for training, 1,000 for validation (in the cache)",
        "passes over the training set: 2.00",
    ]


def test_the_cache_is_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FIVEFOLD_CACHE", str(tmp_path / "from-env"))
    path = write(tmp_path / "a.txt", "some text " * 100)
    recipe = recipe_of(path, tmp_path / "unused")
    recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"cache": None})})
    assert prepare(recipe).info["folder"].startswith(str(tmp_path / "from-env"))


def test_processes_of_one_number_on_two_hosts_do_not_share_temporary_files(tmp_path, monkeypatch):
    """With a common disk: while one has written its file, the other writes and renames its own."""
    replace, file = os.replace, tmp_path / "file"

    def interrupted(temporary: Path, path: Path) -> None:
        monkeypatch.setattr(os, "replace", replace)
        write_atomically(path, "the other's")
        replace(temporary, path)

    monkeypatch.setattr(os, "getpid", lambda: 7)
    monkeypatch.setattr(os, "replace", interrupted)
    write_atomically(file, "mine")
    assert file.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [file]


def test_a_changed_byte_of_a_shard_is_noticed(tmp_path: Path):
    """In whichever block, when it is first read, and not before. The next run makes the shards again, as they were."""
    recipe = recipe_of(
        write(tmp_path / "text.txt", "some words, again and again. " * 9000), tmp_path / "cache"
    )
    data = prepare(recipe)
    shard, whole = Path(data.info["folder"]) / "train-00000.bin", data.train[:].copy()
    good = shard.read_bytes()
    assert len(good) > 3 * BLOCK
    for byte in (0, BLOCK - 1, BLOCK, len(good) - 1):
        shard.write_bytes(good[:byte] + bytes([good[byte] ^ 4]) + good[byte + 1 :])
        data, at = prepare(recipe), byte // 2
        assert data.info["cached"]
        other = 0 if byte >= 2 * BLOCK else len(whole) - 100
        assert (data.train[other : other + 9] == whole[other : other + 9]).all(), "another block"
        with pytest.raises(
            UserError, match=r"train-00000\.bin is damaged: bytes [\d,]+ to [\d,]+ are not what was"
        ):
            data.train.rows(np.array([max(0, at - 3)]), 4)
        again = prepare(recipe)
        assert not again.info["cached"]
        assert (again.train[:] == whole).all()
    digests = shard.with_suffix(".digests")
    digests.write_bytes(digests.read_bytes()[::-1])
    assert not prepare(recipe).info["cached"]


def exchanged(path: Path) -> None:
    """Two tokens have each other's id."""
    told = json.loads(path.read_text())
    vocab = told["model"]["vocab"]
    a, b = sorted(vocab, key=vocab.get)[-2:]
    vocab[a], vocab[b] = vocab[b], vocab[a]
    path.write_text(json.dumps(told))


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "two tokens are exchanged": ("tokenizer.json", exchanged),
    "a bit is flipped": ("tokenizer.json", flipped),
    "it is cut": ("tokenizer.json", lambda path: path.write_bytes(path.read_bytes()[:-100])),
    "it is empty": ("tokenizer.json", lambda path: path.write_bytes(b"")),
    "it is gone": ("tokenizer.json", Path.unlink),
    "a bit of the config is flipped": ("tokenizer_config.json", flipped),
    "the config is gone": ("tokenizer_config.json", Path.unlink),
}


def cached(tmp_path: Path, kind: str, **options: Any) -> Any:
    """A recipe whose tokenizer is learned."""
    for number in range(20):
        write(tmp_path / "in" / f"{number}.txt", f"document {number} of {number * number} words " * 20)
    if kind == "several":
        entries = tuple(SourceEntry(name=name, source=str(tmp_path / "in")) for name in "ab")
        return recipe_of(DataSection().source, tmp_path / "cache", sources=entries, **options)
    return recipe_of(tmp_path / "in", tmp_path / "cache", stream=kind == "stream", **options)


def folder_of(tmp_path: Path, kind: str) -> Path:
    """The folder in the cache that has the learned tokenizer."""
    name = "tokenizer-*" if kind == "several" else "*"
    (found,) = (path.parent for path in (tmp_path / "cache" / "data").glob(f"{name}/tokenizer.json"))
    return found


@pytest.mark.parametrize("kind", ["one", "several"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_tokenizer_in_the_cache_is_made_again(tmp_path: Path, damage: str, kind: str):
    recipe = cached(tmp_path, kind, tokenizer="bpe:300", val_fraction=0.0)
    first = prepare(recipe)
    folder = folder_of(tmp_path, kind)
    name, harm = DAMAGES[damage]
    whole = (folder / name).read_bytes()
    harm(folder / name)
    if kind == "one":
        assert f"warning: {folder} is damaged, so the text will be tokenized anew" in check(recipe)
    again = prepare(recipe)
    assert (folder / name).read_bytes() == whole
    assert again.tokenizer is not None
    assert first.tokenizer is not None
    assert again.tokenizer.fingerprint == first.tokenizer.fingerprint
    assert again.info["fingerprint"] == first.info["fingerprint"]
    np.testing.assert_array_equal(again.train[:], first.train[:])
    assert not any("damaged" in fact for fact in check(recipe))


@pytest.mark.parametrize("harm", [exchanged, Path.unlink])
def test_a_stream_with_a_damaged_tokenizer_does_not_train(tmp_path: Path, harm: Any):
    """It is learned again, or the message names the folder that must go."""
    recipe = cached(tmp_path, "stream", tokenizer="bpe:300", val_fraction=0.0)
    data = prepare(recipe)
    assert data.tokenizer is not None
    folder = data.train.folder
    harm(folder / "tokenizer.json")
    try:
        again = prepare(recipe)
    except UserError as error:
        assert f"the tokenizer in {folder} is damaged. Remove this folder" in str(error)  # noqa: PT017, either is right
    else:
        assert again.tokenizer is not None
        assert again.tokenizer.fingerprint == data.tokenizer.fingerprint


def test_a_cache_without_a_note_of_its_tokenizer_is_used(tmp_path: Path):
    """As older versions made it. It is noted, so later damage is found; one that cannot be loaded is made again."""
    recipe = cached(tmp_path, "one", tokenizer="bpe:300", val_fraction=0.0)
    prepare(recipe)
    folder = folder_of(tmp_path, "one")
    (folder / SEAL).unlink()
    before = (folder / "train-00000.bin").stat().st_ino
    assert prepare(recipe).info["cached"]
    assert (folder / "train-00000.bin").stat().st_ino == before
    assert (folder / SEAL).is_file()
    (folder / SEAL).unlink()
    flipped_at_the_start = b"x" + (folder / "tokenizer.json").read_bytes()[1:]
    (folder / "tokenizer.json").write_bytes(flipped_at_the_start)
    assert not prepare(recipe).info["cached"]
