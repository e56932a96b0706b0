"""Token files of others: nanoGPT's and llm.c's .bin, .npy; and a hub's set through a stand-in."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_recipes import recipe_of

from fivefold.data import Batches, check, prepare
from fivefold.data.dataset import unseparated_parts
from fivefold.data.kinds import remote
from fivefold.errors import UserError
from fivefold.recipe import DataSection, Recipe
from fivefold.recipe.entries import SourceEntry, ValidationEntry

IDS = np.arange(1000) % 500


def llmc(
    path: Path, ids: np.ndarray, magic: int = 20240520, version: int = 1, count: int | None = None
) -> Path:
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(ids) if count is None else count
    path.write_bytes(header.tobytes() + ids.astype("<u2" if version == 1 else "<u4").tobytes())
    return path


def test_nanogpt_files(tmp_path: Path):
    IDS.astype("<u2").tofile(tmp_path / "train.bin")
    IDS[:100].astype("<u2").tofile(tmp_path / "val.bin")
    data = prepare(recipe_of(f"tokens:{tmp_path}", tmp_path / "cache"))
    np.testing.assert_array_equal(data.train[:], IDS)
    assert data.val is not None
    np.testing.assert_array_equal(data.val[:], IDS[:100])
    assert data.tokenizer is None
    assert data.vocab_size == 500
    x, y, _ = Batches(data.train, 8, 2, 0).batch(0)
    assert ((y - x) % 500 == 1).all()
    assert (
        check(recipe_of(f"tokens:{tmp_path}", tmp_path / "cache"))[0] == "data: 2 token files, 1,100 tokens"
    )


@pytest.mark.parametrize(("magic", "version", "dtype"), [(20240520, 1, "u2"), (20240801, 7, "u4")])
def test_llmc_files(tmp_path: Path, magic: int, version: int, dtype: str):
    for part in range(3):
        llmc(tmp_path / f"fineweb_train_{part:06d}.bin", IDS + part, magic, version)
    llmc(tmp_path / "fineweb_val_000000.bin", IDS[:50], magic, version)
    data = prepare(recipe_of(f"tokens:{tmp_path}/fineweb_*.bin", tmp_path / "cache"))
    np.testing.assert_array_equal(data.train[:], np.concatenate([IDS, IDS + 1, IDS + 2]))
    assert data.train[:].dtype == dtype
    assert data.val is not None
    assert len(data.val) == 50


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "int32", "int64"])
def test_npy_files_and_the_end_as_validation(tmp_path: Path, dtype: str):
    np.save(tmp_path / "ids.npy", IDS.astype(dtype))
    data = prepare(recipe_of(f"tokens:{tmp_path / 'ids.npy'}", tmp_path / "cache", val_fraction=0.1))
    assert data.val is not None
    np.testing.assert_array_equal(data.train[:], IDS[:900])
    np.testing.assert_array_equal(data.val[:], IDS[900:])
    assert prepare(recipe_of(f"tokens:{tmp_path / 'ids.npy'}", tmp_path / "c2", val_fraction=0.0)).val is None


def test_uint32_without_a_header(tmp_path: Path):
    (IDS + 70_000).astype("<u4").tofile(tmp_path / "a.bin")
    data = prepare(
        recipe_of(f"tokens:{tmp_path / 'a.bin'}", tmp_path / "cache", token_dtype="uint32", val_fraction=0.0)
    )
    np.testing.assert_array_equal(data.train[:], IDS + 70_000)


def refused(source: Path | str, cache: Path, look=prepare, **options) -> str:
    with pytest.raises(UserError) as caught:
        look(recipe_of(f"tokens:{source}", cache, **options))
    return str(caught.value)


def test_ids_beyond_the_vocabulary(tmp_path: Path):
    ids = IDS.copy()
    ids[700] = 5000
    path = llmc(tmp_path / "a.bin", ids)
    message = refused(path, tmp_path / "cache", vocab_size=500)
    assert f"{path}: token 700 (byte {1024 + 1400:,}) has id 5,000, beyond the vocabulary of 500" in message
    assert prepare(recipe_of(f"tokens:{path}", tmp_path / "cache", vocab_size=5001)).vocab_size == 5001
    assert "token 700" in refused(
        path, tmp_path / "cache", vocab_size=5000
    )  # the scan is remembered, the limit is not
    np.save(tmp_path / "b.npy", np.where(IDS == 3, -1, IDS).astype(np.int32))
    assert "b.npy: token 3 (byte 140) has id -1" in refused(
        tmp_path / "b.npy", tmp_path / "cache", vocab_size=500
    )


def test_a_negative_id_is_refused_without_a_vocabulary_too(tmp_path: Path):
    np.save(tmp_path / "b.npy", np.where(IDS == 3, -1, IDS).astype(np.int32))
    assert "b.npy: token 3 (byte 140) has id -1" in refused(tmp_path / "b.npy", tmp_path / "cache")


@pytest.mark.parametrize("look", [check, prepare])
def test_truncated_and_foreign_files(tmp_path: Path, look):
    path = tmp_path / "a.bin"
    path.write_bytes(b"x" * 2001)
    assert "a.bin: truncated: 2,001 bytes are not a whole number" in refused(path, tmp_path / "c", look)
    llmc(path, IDS, count=1500)
    message = refused(path, tmp_path / "c", look)
    assert "truncated: its header says 1,500 tokens, but the file ends after 1,000 (byte 3,024)" in message
    llmc(path, IDS, version=3)
    assert "unknown version 3 of an llm.c file" in refused(path, tmp_path / "c", look)
    npy = tmp_path / "a.npy"
    np.save(npy, IDS.astype(np.uint16))
    npy.write_bytes(npy.read_bytes()[:-100])
    assert "a.npy: not a complete .npy file" in refused(npy, tmp_path / "c", look)
    IDS.astype(np.uint16).tofile(npy)
    assert (said := refused(npy, tmp_path / "c", look)).startswith(f"data.source: {npy}: no .npy file: ")
    assert said.count("data.source") == 1
    assert "named .bin" in said
    np.save(npy, IDS.astype(np.float32))
    assert "holds float32 of shape (1000,)" in refused(npy, tmp_path / "c", look)
    np.save(npy, np.array([{"pickled": 1}], dtype=object), allow_pickle=True)
    assert "a.npy" in refused(npy, tmp_path / "c", look)
    assert "token files end in .bin" in refused(Path(__file__), tmp_path / "c", look)
    assert "no token file" in refused(tmp_path / "none.bin", tmp_path / "c", look)
    path.write_bytes(b"")
    assert "has 0 training tokens" in refused(path, tmp_path / "c", look)


def test_a_changed_token_file_is_scanned_again(tmp_path: Path):
    path = tmp_path / "a.bin"
    IDS.astype("<u2").tofile(path)
    first = prepare(recipe_of(f"tokens:{path}", tmp_path / "cache", vocab_size=500))
    (IDS + 1).astype("<u2").tofile(path)
    assert "token 499" in refused(path, tmp_path / "cache", vocab_size=500)
    assert (
        prepare(recipe_of(f"tokens:{path}", tmp_path / "cache")).info["fingerprint"]
        != first.info["fingerprint"]
    )


def test_the_mask_of_token_files_is_the_last_id_of_the_vocabulary(tmp_path: Path):
    IDS.astype("<u2").tofile(tmp_path / "a.bin")
    data = prepare(recipe_of(f"tokens:{tmp_path}", tmp_path / "cache", arch="bert"))
    assert (data.vocab_size, data.mask_id) == (501, 500)
    message = refused(tmp_path, tmp_path / "cache", arch="bert", vocab_size=500)
    assert "token 499" in message
    assert "reserved for the mask token" in message


def stand_in(rows: Iterable[dict], revision: str) -> types.ModuleType:
    """What `hub` uses of the library `datasets`: the shape of its answers, nothing of its behaviour."""
    module = types.ModuleType("datasets")
    builder = types.SimpleNamespace(
        hash=revision,
        config=types.SimpleNamespace(name="default"),
        info=types.SimpleNamespace(version="1.0.0"),
    )

    def load_dataset(name, config, *, split, streaming):
        assert (name, config, split, streaming) == ("some/set", "en", "train", True)
        return iter(rows)

    vars(module).update(load_dataset=load_dataset, load_dataset_builder=lambda name, config: builder)
    return module


@pytest.mark.parametrize("workers", [1, 2])
def test_a_hub_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int):
    rows = [{"text": f"row {i} " * 200, "meta": {"x": 1}} for i in range(2000)]
    monkeypatch.setitem(sys.modules, "datasets", stand_in(rows, "a"))
    recipe = recipe_of("hf:some/set:en", tmp_path / "cache", val_fraction=0.1)
    data = prepare(recipe, workers=workers)
    documents = bytes(data.train[:].astype(np.uint8)).split(b"\0")[:-1]  # 256, the end token, is 0 as a byte
    assert len(documents) == data.info["documents"]["train"]
    assert 140 < data.info["documents"]["val"] < 260
    assert documents == [r["text"].encode() for r in rows if r["text"].encode() in set(documents)]
    assert prepare(recipe).info["cached"]
    rows[5] = {"content": "x", "meta": {}}
    monkeypatch.setitem(sys.modules, "datasets", stand_in(rows, "b"))
    with pytest.raises(UserError, match=r"row 5: no field 'text' \(fields: content, meta\)"):
        prepare(recipe, workers=workers)


def test_a_hub_set_that_breaks_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def rows():
        yield from ({"text": "x" * 2_000_000} for _ in range(3))
        raise ConnectionError("reset by peer")

    monkeypatch.setattr(remote, "DELAYS", ())
    for workers in (1, 2):
        monkeypatch.setitem(sys.modules, "datasets", stand_in(rows(), "a"))
        with pytest.raises(UserError, match="reading stopped after 3 rows: ConnectionError: reset by peer"):
            prepare(recipe_of("hf:some/set:en", tmp_path / "cache"), workers=workers)


def test_a_file_that_changes_after_its_scan_is_noticed(tmp_path: Path):
    """In place while it is mapped; and digests that were removed are made again."""
    path = llmc(tmp_path / "train.bin", IDS)
    recipe = recipe_of(f"tokens:{path}", tmp_path / "cache", val_fraction=0.0)
    data = prepare(recipe)
    with path.open("r+b") as file:
        file.seek(256 * 4 + 100)
        file.write(b"\1")
    with pytest.raises(
        UserError, match=r"is damaged: bytes 1,024 to 3,024 are not what was written\. The file"
    ):
        data.train.rows(np.array([0]), 8)
    assert not np.array_equal(prepare(recipe).train[:], IDS), "another file"
    (digests,) = (tmp_path / "cache" / "data").glob("*.digests")
    digests.unlink()
    assert len(prepare(recipe).train[:]) == len(IDS)
    assert digests.is_file()


WIDE = {  # a file without a header, how it is read, and what is wrong
    "uint32, small ids": (IDS % 300, "<u4", {}, "seems to hold uint32: set data.token_dtype"),
    "uint32, tiny ids": (IDS % 5, "<u4", {}, "seems to hold uint32: set data.token_dtype"),
    "uint32, large ids": (IDS * 240, "<u4", {}, "seems to hold uint32: set data.token_dtype"),
    "uint32, said to be uint16": (IDS, "<u4", {"token_dtype": "uint16"}, "seems to hold uint32"),
    "int64": (IDS, "<i8", {}, "seems to hold uint32"),
    "int64, said to be uint32": (IDS, "<i8", {"token_dtype": "uint32"}, "seems to hold int64"),
    "uint16, said to be uint32": (IDS, "<u2", {"token_dtype": "uint32", "vocab_size": 500}, "holds uint16"),
    "uint16 cannot be": (IDS, "<u2", {"vocab_size": 128256}, "Set data.token_dtype: uint32"),
}
RIGHT = {
    "uint16": (IDS, "<u2", {}),
    "uint16, tiny ids": (IDS % 5, "<u2", {}),
    "uint16, many zeros": (IDS * (IDS % 3 == 0), "<u2", {}),
    "uint16 all the same": (IDS, "<u2", {"token_dtype": "uint16", "vocab_size": 128256}),
    "uint32": (IDS * 240, "<u4", {"token_dtype": "uint32", "vocab_size": 128256}),
    "nothing but zeros": (IDS * 0, "<u2", {}),
}


@pytest.mark.parametrize("case", WIDE)
@pytest.mark.parametrize("look", [check, prepare])
def test_a_file_without_a_header_is_not_taken_at_its_word(tmp_path: Path, case: str, look):
    ids, dtype, options, wrong = WIDE[case]
    ids.astype(dtype).tofile(tmp_path / "a.bin")
    if look is check and wrong == "holds uint16":
        pytest.skip("ids beyond the vocabulary are found by reading all of them")
    assert wrong in refused(tmp_path / "a.bin", tmp_path / "cache", look, **options)


@pytest.mark.parametrize("case", RIGHT)
def test_a_file_of_the_right_type_is_read(tmp_path: Path, case: str):
    ids, dtype, options = RIGHT[case]
    ids.astype(dtype).tofile(tmp_path / "a.bin")
    recipe = recipe_of(f"tokens:{tmp_path / 'a.bin'}", tmp_path / "cache", val_fraction=0.0, **options)
    assert check(recipe)
    np.testing.assert_array_equal(prepare(recipe).train[:], ids)


def test_files_that_say_their_type_need_no_word_with_a_large_vocabulary(tmp_path: Path):
    llmc(tmp_path / "llmc.bin", IDS, 20240801, 7)
    np.save(tmp_path / "numpy.npy", IDS.astype(np.uint32))
    for name in ("llmc.bin", "numpy.npy"):
        recipe = recipe_of(f"tokens:{tmp_path / name}", tmp_path / "cache", vocab_size=128256)
        assert check(recipe)
        assert prepare(recipe).vocab_size == 128256


def mixed(tmp_path: Path, kind: str, **options) -> Recipe:
    """A recipe with the file b.bin beside another source, or as a validation set."""
    np.save(tmp_path / "a.npy", (IDS * 200).astype(np.uint32))
    first, second = f"tokens:{tmp_path / 'a.npy'}", f"tokens:{tmp_path / 'b.bin'}"
    if kind == "validation":
        own = (ValidationEntry(name="b", source=second),)
        return recipe_of(first, tmp_path / "cache", validation=own, **options)
    both = SourceEntry(name="a", source=first), SourceEntry(name="b", source=second)
    return recipe_of(DataSection().source, tmp_path / "cache", sources=both, **options)


@pytest.mark.parametrize("kind", ["sources", "validation"])
def test_several_sources_are_not_taken_at_their_word(tmp_path: Path, kind: str):
    IDS.astype("<u4").tofile(tmp_path / "b.bin")
    for look in (check, prepare):
        with pytest.raises(UserError, match=r"b: .*seems to hold uint32"):
            look(mixed(tmp_path, kind))
    IDS.astype("<u2").tofile(tmp_path / "b.bin")
    with pytest.raises(UserError, match="uint16 has too few for a vocabulary of 99,801"):
        prepare(mixed(tmp_path, kind))
    assert prepare(mixed(tmp_path, kind, token_dtype="uint16")).vocab_size == 99801
    with pytest.raises(UserError, match=r"data.end_token = 99801 is beyond the vocabulary of 99,801"):
        prepare(mixed(tmp_path, kind, token_dtype="uint16", end_token=99801))


@pytest.mark.parametrize("kind", ["nanogpt", "llmc", "npy", "parquet"])
def test_an_end_token_that_no_file_has(tmp_path: Path, kind: str):
    """Beyond the vocabulary it is refused; of one that never comes the user is told."""
    path = tmp_path / f"a.{kind if kind in ('npy', 'parquet') else 'bin'}"
    if kind == "nanogpt":
        IDS.astype("<u2").tofile(path)
    elif kind == "llmc":
        llmc(path, IDS)
    elif kind == "npy":
        np.save(path, IDS.astype(np.uint16))
    else:
        pq.write_table(pa.table({"input_ids": [IDS.tolist()] * 4}), path)

    def recipe(end: int, **options) -> Recipe:
        return recipe_of(f"tokens:{path}", tmp_path / "cache", end_token=end, **options)

    with pytest.raises(UserError, match=r"data.end_token = 50256 is beyond the vocabulary of 1,000"):
        prepare(recipe(50256, vocab_size=1000))
    with pytest.raises(UserError, match=r"data.end_token = 1000 is beyond"):
        check(recipe(1000, vocab_size=1000))
    warned = ["data.end_token = 700: none of the first"] * (kind != "parquet")
    for end, wanted in ((700, warned), (499, [])):
        given = recipe(end, vocab_size=1000)
        facts = [fact.removeprefix("warning: ") for fact in check(given) if fact.startswith("warning: ")]
        told = [fact for fact in facts if "end_token" in fact]
        assert [text[: len("data.end_token = 700: none of the first")] for text in told] == wanted
        assert list(unseparated_parts(given, prepare(given))) == told
    unused = recipe(700, vocab_size=1000, document_masks=False)
    assert not list(unseparated_parts(unused, prepare(unused)))
