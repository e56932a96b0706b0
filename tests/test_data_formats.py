"""Kinds of files, addresses, hub data sets, Megatron-LM's files: the same text gives the same tokens from each."""

from __future__ import annotations

import bz2
import csv
import gzip
import html
import importlib
import io
import json
import struct
import sys
import threading
import types
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_recipes import recipe_of, write

from fivefold.data import check, one_source, prepare
from fivefold.data.dataset import Packed, cut_of, pieces
from fivefold.data.kinds import KINDS, describe_bad, parquet, remote, token_files, warc, wiki
from fivefold.data.kinds import csv as kinds_csv
from fivefold.data.kinds.hub import Hub, parse
from fivefold.data.kinds.json import _Characters
from fivefold.data.kinds.kind import Bad, Document, Fields, File
from fivefold.data.preparation import write_megatron
from fivefold.data.sources import FileSplit, find
from fivefold.data.tokenizer import train_bpe
from fivefold.data.tokens import Tokens
from fivefold.errors import UserError

DOCUMENTS = [f"row {i} ☂ " + "words and more\n" * (i % 90) for i in range(1800)]  # 1.2 MB: several blocks
TEXT = "".join(f"línea {i}\n" * 3 + "x" * (i % 50) for i in range(25_000))  # 1.1 MB


def packed(kind: str, content: bytes) -> bytes:
    if kind in ("gz", "bz2"):
        compress = gzip.compress if kind == "gz" else bz2.compress
        return compress(content[: len(content) // 2]) + compress(content[len(content) // 2 :])
    zstandard = pytest.importorskip("zstandard")
    return zstandard.compress(content[:1000]) + zstandard.compress(content[1000:])  # several frames


def rows() -> list[dict[str, object]]:
    return [{"id": i, "text": d, "meta": {"a": [1]}} for i, d in enumerate(DOCUMENTS)]


def lines() -> bytes:
    return "\n".join(json.dumps(row) for row in rows()).encode() + b"\n"


def tokens(source: object, cache: Path, **data: object) -> np.ndarray:
    found = prepare(recipe_of(str(source), cache, val_fraction=0.0, **data))  # type: ignore[arg-type]
    return found.train[:]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    folder = tmp_path_factory.mktemp("expected")
    return tokens(write(folder / "a.jsonl", lines()), folder / "cache")


@pytest.mark.parametrize("kind", ["jsonl.gz", "jsonl.zst", "json", "objects.json", "json.gz"])
def test_rows_of_each_kind_are_the_same(tmp_path: Path, expected: np.ndarray, kind: str):
    content = lines() if "jsonl" in kind else json.dumps(rows(), indent=1).encode()
    if kind == "objects.json":
        content = "\n\n".join(json.dumps(row, indent=2, ensure_ascii=False) for row in rows()).encode()
    ending = kind.rpartition(".")[2]
    path = write(tmp_path / f"a.{kind}", packed(ending, content) if ending in ("gz", "zst") else content)
    np.testing.assert_array_equal(tokens(path, tmp_path / "cache"), expected)


def test_a_csv_gives_the_tokens_of_its_rows(tmp_path: Path, expected: np.ndarray):
    """Texts with quotes and line breaks, from a place on, too; a fault has its row."""
    table = io.StringIO()
    writer = csv.writer(table)
    writer.writerows([("id", "text"), *enumerate(DOCUMENTS)])
    for name, content in (
        ("a.csv", table.getvalue().encode()),
        ("b.csv.gz", gzip.compress(table.getvalue().encode())),
    ):
        np.testing.assert_array_equal(tokens(write(tmp_path / name, content), tmp_path / "cache"), expected)
    file = find(str(tmp_path / "a.csv")).files[0]
    [(document, place)] = KINDS["csv"].read(0, file, 1799, Fields("text"))
    assert isinstance(document, Document)
    assert (document.text, place) == (DOCUMENTS[1799], 1800)
    for row, reason in (
        (b'"never ends\n', "row 1: not CSV"),
        (b"\xff\n", "row 1: not UTF-8: byte 0xff"),
        (b"one,two\n", "row 1: a row of 2 fields; the first line names 1"),
    ):
        with pytest.raises(UserError, match=reason):
            prepare(
                recipe_of(
                    write(tmp_path / "c.csv", b"text\nfine\n" + row), tmp_path / "cache", val_fraction=0.0
                )
            )


def record(kind: str, content: str | bytes, media: str = "text/plain") -> bytes:
    """A record of a web archive."""
    raw = content if isinstance(content, bytes) else content.encode()
    fields = f"WARC-Type: {kind}\r\nContent-Type: {media}\r\ncontent-length:{len(raw)}"
    return f"WARC/1.0\r\n{fields}\r\n\r\n".encode() + raw + b"\r\n\r\n"


def article(text: str, ns: int = 0, before: str = "") -> str:
    """A page of a dump of MediaWiki."""
    revision = f"<revision><id>2</id><text bytes='1'>{html.escape(text)}</text></revision>"
    return f"  <page>\n<title>A</title><ns>{ns}</ns>{before}{revision}</page>\n"


def dump(*pages: str) -> bytes:
    begin = "<mediawiki xmlns='http://www.mediawiki.org/xml/export-0.11/'><siteinfo/>\n"
    return (begin + "".join(pages) + "</mediawiki>\n").encode()


@pytest.mark.parametrize("name", ["a.warc.wet", "a.warc.wet.gz", "a.xml", "a.xml.bz2"])
def test_published_text_gives_the_tokens_of_its_documents(tmp_path: Path, expected: np.ndarray, name: str):
    """Common Crawl's text without what describes the archive; Wikipedia's articles without redirects, talk, empty pages
    and earlier revisions. From a place on, too."""
    if "wet" in name:
        content = record("warcinfo", "by: us\n", "application/warc-fields") + record("request", "GET /")
        content += b"".join(record("conversion", text) for text in DOCUMENTS) + record("conversion", "")
    else:
        old = "<revision><text>old</text></revision>"
        others = [article("x", 1), article("", 0, old), article("x", 0, "<redirect title='A'/>")]
        content = dump(*others, *(article(text, 0, old) for text in DOCUMENTS))
    ending = name.rpartition(".")[2]
    path = write(tmp_path / name, packed(ending, content) if ending in ("gz", "bz2") else content)
    np.testing.assert_array_equal(tokens(path, tmp_path / "cache"), expected)
    file, last = find(str(path)).files[0], len(DOCUMENTS) + (1 if "wet" in name else 2)
    [(document, place)] = KINDS[file.kind].read(0, file, last, Fields("body"))
    assert isinstance(document, Document)
    assert (document.text, place) == (DOCUMENTS[-1], last + 1)


def test_other_xml_of_a_folder_is_left_out(tmp_path: Path) -> None:
    """A file named by itself is refused, as `test_faults_of_published_text` says."""
    write(tmp_path / "pom.xml", b"<project></project>")
    write(tmp_path / "a.xml", dump(article("fine")))
    found = find(str(tmp_path))
    assert [file.name for file in found.files] == ["a.xml"]
    assert found.unknown == {".xml": 1}


PAGE = record("conversion", "fine")
ENTITIES = b"<!DOCTYPE x [<!ENTITY a 'aaaa'>]>"


@pytest.mark.parametrize(
    ("name", "content", "faults"),
    [
        ("a.wet", PAGE + record("conversion", b"\xff") + PAGE, ["row 1: not UTF-8: byte 0xff at 0"]),
        (
            "a.warc",
            record("response", "<p>", "application/http; msgtype=response") + PAGE,
            ["'application/http"],
        ),
        ("a.wet", PAGE[:-6], ["the file ends within a record"]),
        ("a.wet", PAGE + b"WARC/1.0\r\nContent-Length: 999999999999\r\n\r\n", ["ends within a record"]),
        (
            "a.wet",
            b"WARC/1.0\r\nContent-Length: " + b"9" * 50 + b"\r\n\r\n",
            ["without an end or a length"],
        ),
        ("a.wet", b"WARC/1.0\r\nContent-Length: \xc2\xb2\r\n\r\n", ["without an end or a length"]),
        (
            "a.wet",
            b"WARC/1.0\r\n" + b"".join(b"%d: x\r\n" % i for i in range(200)),
            ["header without an end"],
        ),
        ("a.wet", b"plain text\n", ["not WARC: a record begins with b'plain text"]),
        ("a.wet", record("conversion", b"x" * 3_000_000) + PAGE, ["a text of more than 2 MiB"]),
        ("a.xml", b"<html></html>", ["it does not begin with <mediawiki>"]),
        ("a.xml", dump(article("fine"))[:-9], ["the file ends before </mediawiki>"]),
        ("a.xml", dump("<page>&nbsp;</page>", article("fine")), ["row 0: not XML: undefined entity"]),
        ("a.xml", ENTITIES + dump("<page>&a;</page>", article("fine")), ["row 0: not XML: undefined entity"]),
        ("a.xml", ENTITIES + b"<!--<mediawiki--><page >&a;</page></mediawiki>", ["row 0: not XML: "]),
        ("a.xml", dump(article("x" * 3_000_000)), ["a page of more than 1 MiB"]),
        ("a.xml", dump("<page>" + "<a>" * 9 + "</a>" * 9 + "</page>", article("fine")), []),
        (
            "a.xml",
            dump("<page>" + "<a>" * 10 + "</a>" * 10 + "</page>", article("fine")),
            ["more than 10 levels deep"],
        ),
        ("a.xml.bz2", b"no bz2", ["Invalid data stream"]),
        ("a.xml.bz2", bz2.compress(dump(article("fine")))[:-9], ["cannot be decompressed: "]),
    ],
    ids=lambda value: value[:1] if isinstance(value, str) else str(len(value)),
)
def test_faults_of_published_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes, faults: list[str]
):
    """Each is one message, and what is behind it is still read where its beginning is known."""
    monkeypatch.setattr(warc, "LONGEST_LINE", 2 << 20)
    monkeypatch.setattr(wiki, "LONGEST_PAGE", 1 << 20)
    file = find(str(write(tmp_path / name, content))).files[0]
    found = [one for one, _ in KINDS[file.kind].read(0, file, 0, Fields("text"))]
    told = [describe_bad([file], one) for one in found if isinstance(one, Bad)]
    assert len(told) == len(faults)
    assert all(fault in said for fault, said in zip(faults, told, strict=True))
    fine = content.count(b"fine")
    assert [one.text for one in found if isinstance(one, Document)] == ["fine"] * fine


@pytest.mark.parametrize(("kind", "fraction"), [("gz", 0.3), ("zst", 0.0)])
def test_a_compressed_text_is_cut_where_the_plain_one_is(tmp_path: Path, kind: str, fraction: float):
    """Pieces of BPE depend on the cuts; the end is held out at the same character."""
    plain = write(tmp_path / "a.txt", TEXT)
    other = write(tmp_path / f"b.txt.{kind}", packed(kind, TEXT.encode()))
    train_bpe([TEXT[:5000]], 300).save(tmp_path / "tokenizer.json")
    bpe = {"tokenizer": str(tmp_path / "tokenizer.json"), "val_fraction": fraction}
    one, two = (prepare(recipe_of(p, tmp_path / "cache", **bpe)) for p in (plain, other))
    np.testing.assert_array_equal(one.train[:], two.train[:])
    if fraction:
        np.testing.assert_array_equal(one.val[:], two.val[:])  # type: ignore[index]


def test_a_folder_of_all_kinds(tmp_path: Path):
    """On several threads, too; an end token behind every document; other kinds are named, once, with their number."""
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    folder = tmp_path / "in"
    write(folder / "a.txt", "one")
    write(folder / "b.txt.gz", packed("gz", TEXT[:1_000_001].encode()))
    write(folder / "c.jsonl.zst", packed("zst", b'{"text": "three"}\n{"text": "four"}'))
    write(folder / "d.json", '[{"text": "five"}, {"text": "six"}]')
    pq.write_table(pa.table({"text": ["seven"]}), folder / "e.parquet")
    write(folder / "f.png", "x")
    write(folder / "g.png", "x")
    write(folder / "h.tar.gz", "x")
    recipe = recipe_of(folder, tmp_path / "cache", val_fraction=0.0)
    told: list[str] = []
    ids = prepare(recipe, lambda stage, *_: told.append(stage), workers=2).train[:]
    texts = [
        bytes(part[:-1].astype("u1")).decode() for part in np.split(ids, np.flatnonzero(ids == 256) + 1)[:-1]
    ]
    assert texts == ["one", TEXT[:1_000_001], "three", "four", "five", "six", "seven"]
    note = "note: 3 files of other kinds left out: 2 .png, 1 .tar.gz"
    assert told.count(note) == 1
    assert note in check(recipe)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt.gz", packed("gz", b"x" * 100_000)[:-20], "a.txt.gz: byte .*: cannot be decompressed: "),
        (
            "a.txt.zst",
            packed("zst", b"x" * 9999)[:-1],
            "cannot be decompressed: the file ends within a frame",
        ),
        ("a.jsonl.zst", b"no zstd at all", "a.jsonl.zst: byte 0: cannot be decompressed: "),
        ("a.json", b'[{"text": "a"}, {"text": "\xff"}]', "a.json: row 1: not JSON: 'utf-8' codec"),
        ("a.jsonl.gz", b"no gzip at all", "a.jsonl.gz: byte 0: cannot be decompressed: Not a gzipped file"),
        (
            "a.jsonl.gz",
            gzip.compress(b'{"text": "a"}\n{"text": ', mtime=0),  # its bytes are part of the test's name
            r"a.jsonl.gz: line 2 \(byte 14\): not JSON",
        ),
        ("a.json", '[{"text": "a"}, {"txt": "b"}]', r"a.json: row 1: no field 'text' \(fields: txt\)"),
        ("a.json", '[{"text": "a"}, 5]', "a.json: row 1: a JSON int; expected an object"),
        ("a.json", '[{"text": "a"}, {"text": "b"', "a.json: row 1: not JSON: "),
        ("a.json", '[{"text": "a"}', "a.json: row 1: not JSON: the array does not end"),
        ("a.json", '{"data": [{"text": "a"}]}', r"row 0: no field 'text' \(fields: data\)"),
    ],
)
def test_faults_of_files_that_are_read_from_their_start(
    tmp_path: Path, name: str, content: bytes, message: str
):
    with pytest.raises(UserError, match=message):
        prepare(recipe_of(write(tmp_path / name, content), tmp_path / "cache", val_fraction=0.0))


def test_a_fault_has_a_place_behind_it(tmp_path: Path):
    """Who continues behind a fault reads no row before it again, and the fault not either."""
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    content = json.dumps([{"text": "a"}] * 50_000)[:-1].encode() + b', {"text": "\xff"}]'
    bad = pa.array([b"one", b"\xff", b"three"]).view(pa.string())
    pq.write_table(pa.table({"text": bad}), tmp_path / "b.parquet")
    for path, places in ((write(tmp_path / "a.json", content), [50_001]), (tmp_path / "b.parquet", [3])):
        file = find(str(path)).files[0]
        done = list(KINDS[file.kind].read(0, file, 0, Fields("text")))
        assert done[-1][1] == places[0]
        for begin in (places[0] - 1, places[0]):
            left = [document.place for document, _ in KINDS[file.kind].read(0, file, begin, Fields("text"))]
            assert left == list(range(begin, places[0]))
    file = find(str(tmp_path / "b.parquet")).files[0]
    values = [value for _, value in KINDS["parquet"].rows(file, Fields("text"), 0)]
    assert [isinstance(value, dict) for value in values] == [True, False, True]
    recipe = recipe_of(tmp_path / "b.parquet", tmp_path / "cache", val_fraction=0.0, max_bad_fraction=0.5)
    assert prepare(recipe).info["documents"]["train"] == 2, "the rows behind a bad one are read"


def test_a_parquet_file_of_many_row_groups_is_opened_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: np.ndarray
):
    """Opening reads where all of them are."""
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": DOCUMENTS}), tmp_path / "a.parquet", row_group_size=30)
    opened, inner = [], parquet._open
    monkeypatch.setattr(parquet, "_open", lambda path: opened.append(path) or inner(path))
    np.testing.assert_array_equal(tokens(tmp_path / "a.parquet", tmp_path / "cache"), expected)
    assert len(opened) == 1, "of 60 row groups"


def test_an_object_too_long_is_not_held_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fivefold.data.kinds.json.LONGEST_LINE", 1 << 20)
    line = json.dumps({"text": "x" * 3_000_000})
    for name, content in (("a.json", f"[{line}]"), ("a.jsonl.gz", gzip.compress(line.encode()))):
        with pytest.raises(UserError, match="of more than 1 MiB"):
            prepare(recipe_of(write(tmp_path / name, content), tmp_path / "cache", val_fraction=0.0))


def test_blanks_between_objects_are_not_held_in_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fivefold.data.kinds.json.SPAN", 1 << 10)
    text = _Characters(io.BytesIO(b" " * 100_000 + b'{"a": 1}'))
    at = text.past_blanks(0)
    assert text.decoded(at)[0] == {"a": 1}
    assert len(text.text) < 3000


class _Handler(SimpleHTTPRequestHandler):
    """Without ranges, as Python's server is. breaks: how many answers break off in their middle."""

    breaks = 0

    def log_message(self, *_: object) -> None: ...

    def copyfile(self, source, outputfile):
        if type(self).breaks and self.command == "GET":
            type(self).breaks -= 1
            outputfile.write(source.read(2000))
            self.close_connection = True
            return
        super().copyfile(source, outputfile)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    folder = tmp_path / "served"
    write(folder / "set" / "a.jsonl.gz", packed("gz", lines()[:1000] + lines()[1000:]))
    write(folder / "set" / "notes.html", "x")
    http = ThreadingHTTPServer(("127.0.0.1", 0), lambda *a: _Handler(*a, directory=str(folder)))
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_port}/set/"
    finally:
        http.shutdown()
        http.server_close()


def test_files_of_a_web_server(
    tmp_path: Path, server: str, expected: np.ndarray, monkeypatch: pytest.MonkeyPatch
):
    """What breaks off goes on where it was; in the end there is one message."""
    pytest.importorskip("aiohttp")
    monkeypatch.setattr(remote, "DELAYS", (0.0, 0.0))
    monkeypatch.setattr(_Handler, "breaks", 2)
    np.testing.assert_array_equal(tokens(f"{server}a.jsonl.gz", tmp_path / "cache"), expected)
    found = find(server)
    assert [(f.name, f.kind, f.packed) for f in found.files] == [("a.jsonl.gz", "jsonl", ".gz")]
    assert found.unknown == {".html": 1}
    page = "".join(
        f'<a href="{to}">x</a>' for to in ("?C=N;O=D", "a.jsonl.gz", "notes.html")
    )  # as Apache has it
    write(tmp_path / "served" / "set" / "index.html", page)
    monkeypatch.setattr(_Handler, "breaks", 0)
    importlib.import_module("fsspec").filesystem("http").invalidate_cache()
    assert find(server) == found
    assert prepare(recipe_of(f"{server}a.jsonl.gz", tmp_path / "cache", val_fraction=0.0)).info["cached"]
    with pytest.raises(UserError, match="no such file"):
        find(f"{server}nothing.jsonl")
    monkeypatch.setattr(_Handler, "breaks", 1000)
    with pytest.raises(UserError, match=r"reading failed at byte \d.*, 3 times in a row: .* Run again when"):
        tokens(f"{server}a.jsonl.gz", tmp_path / "other")


def test_pages_without_end(server: str, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("aiohttp")
    monkeypatch.setattr(remote, "MOST_FOLDERS", 5)

    def page(self: _Handler) -> None:
        body = b'<a href="a/">a</a> <a href="b/">b</a> <a href="c.txt">c</a>'
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    monkeypatch.setattr(_Handler, "do_GET", page)
    with pytest.raises(UserError, match="more than 5 folders"):
        find(f"{server}endless/")


@pytest.mark.parametrize("kind", ["json", "parquet"])
def test_a_broken_network_is_no_bad_document(
    tmp_path: Path, server: str, monkeypatch: pytest.MonkeyPatch, kind: str
):
    """It would be skipped with all that is behind it."""
    pytest.importorskip("aiohttp")
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    monkeypatch.setattr(remote, "DELAYS", ())
    path = write(tmp_path / "served" / "set" / f"b.{kind}", json.dumps(rows()))
    if kind == "parquet":
        pq.write_table(pa.table({"text": DOCUMENTS}), path)
    monkeypatch.setattr(_Handler, "breaks", 1000)
    with pytest.raises(UserError, match="reading failed"):
        tokens(f"{server}b.{kind}", tmp_path / "cache", max_bad_fraction=0.9)


def test_files_in_memory(tmp_path: Path, expected: np.ndarray):
    """Through fsspec, as s3:// goes; a .parquet at an address is read by row groups."""
    fsspec = pytest.importorskip("fsspec")
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    system = fsspec.filesystem("memory")
    with system.open("/corpus/a.parquet", "wb") as f:
        pq.write_table(pa.table({"text": DOCUMENTS}), f, row_group_size=700)
    system.pipe("/corpus/deep/b.txt", b"last")
    system.pipe("/corpus/c.exe", b"x")
    end = np.array([*b"last", 256])
    np.testing.assert_array_equal(
        tokens("memory://corpus/", tmp_path / "cache"), np.concatenate([expected, end])
    )
    np.testing.assert_array_equal(tokens("memory://corpus/*.parquet", tmp_path / "cache"), expected)
    assert [f.name for f in find("memory://corpus").files] == ["a.parquet", "deep/b.txt"]
    with pytest.raises(UserError, match="no file"):
        find("memory://empty/")


def test_a_file_elsewhere_that_changes_while_it_is_tokenized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    system = pytest.importorskip("fsspec").filesystem("memory")
    system.pipe("/changing/a.txt", b"before")
    inner = one_source.build

    def build(*arguments: Any) -> Any:
        found = inner(*arguments)
        system.pipe("/changing/a.txt", b"behind")
        return found

    monkeypatch.setattr(one_source, "build", build)
    with pytest.raises(UserError, match="a file changed while it was tokenized"):
        tokens("memory://changing/", tmp_path / "cache")


def test_s3_through_its_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: np.ndarray):
    """A server of S3 on loopback: kinds of files, globs, folders, what is missing, what changes."""
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    server.start()
    names = {"ACCESS_KEY_ID": "x", "SECRET_ACCESS_KEY": "y", "DEFAULT_REGION": "us-east-1"}
    names["ENDPOINT_URL"] = "http://{}:{}".format(*server.get_host_and_port())
    for name, value in names.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    fsspec = importlib.import_module("fsspec")
    try:
        system = fsspec.filesystem("s3", skip_instance_cache=True)
        system.mkdir("corpus")
        pq.write_table(pa.table({"text": DOCUMENTS}), tmp_path / "b.parquet", row_group_size=700)
        contents = {"a.jsonl": lines(), "c.jsonl.gz": packed("gz", lines())}
        for name, content in (contents | {"b.parquet": (tmp_path / "b.parquet").read_bytes()}).items():
            system.pipe(f"corpus/{name}", content)
            np.testing.assert_array_equal(tokens(f"s3://corpus/{name}", tmp_path / "cache"), expected)
        assert [f.name for f in find("s3://corpus/*.jsonl*").files] == ["a.jsonl", "c.jsonl.gz"]
        assert [f.name for f in find("s3://corpus").files] == ["a.jsonl", "b.parquet", "c.jsonl.gz"]
        for wrong in ("s3://corpus/none.txt", "s3://nobody/a.txt"):
            with pytest.raises(UserError, match="no such file"):
                find(wrong)
        system.pipe("corpus/a.jsonl", lines() + b'{"text": "new"}')
        assert len(tokens("s3://corpus/a.jsonl", tmp_path / "cache")) == len(expected) + 4
    finally:
        server.stop()


@pytest.mark.parametrize("kind", ["json", "parquet"])
def test_a_local_folder_through_the_hubs_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: np.ndarray, kind: str
):
    """`hf:` with a folder needs no network: splits, rows, what is missing, what changes."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    pytest.importorskip("datasets")
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    folder = tmp_path / "set"
    write(folder / "test.jsonl", lines())
    if kind == "parquet":
        (folder / "test.jsonl").unlink()
        pq.write_table(pa.table({"text": DOCUMENTS}), folder / "test.parquet", row_group_size=700)
    spec = f"hf:{folder}::test"
    np.testing.assert_array_equal(tokens(spec, tmp_path / "cache"), expected)
    part = tokens(f"{spec}[1000:1200]", tmp_path / "cache")
    begin = np.flatnonzero(expected == 256)[999] + 1
    np.testing.assert_array_equal(part, expected[begin : begin + len(part)])
    assert (part == 256).sum() == 200
    for wrong, said in (
        (f"hf:{folder}::nosplit", "Bad split"),
        (f"hf:{tmp_path / 'none'}", "find any data file"),
    ):
        with pytest.raises(UserError, match=said):
            tokens(wrong, tmp_path / "cache")
    (file,) = folder.iterdir()
    if kind == "json":
        write(file, lines() + b'{"id": 1, "text": "new", "meta": {"a": [1]}}')
        assert len(tokens(spec, tmp_path / "cache")) == len(expected) + 4, (
            "the cache has the tokens of before"
        )


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("https://me:secret@host/a.jsonl", "a user, a password or a query"),
        ("https://host/a.jsonl?X-Amz-Signature=secret", "a user, a password or a query"),
        ("ftp://host/a.jsonl", "no such protocol; known: https:// http:// s3:// memory://"),
        ("https://host/a::file:///etc/passwd", "no such protocol"),
    ],
)
def test_addresses_that_are_refused(source: str, message: str):
    with pytest.raises(UserError, match=message) as caught:
        find(source)
    assert "secret" not in str(caught.value)


def test_secrets_in_messages_of_libraries_are_left_out():
    said = "Cannot connect to https://me:secret@host/a.gz?token=secret, tried 'http://x/y?k=secret'"
    assert remote.shown(said) == "Cannot connect to https://host/a.gz tried 'http://x/y'"


@pytest.mark.parametrize(
    ("module", "source", "extra"),
    [("zstandard", "a.txt.zst", "zstd"), ("fsspec", "https://host/a.txt", "remote")],
)
def test_a_missing_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, source: str, extra: str
):
    monkeypatch.setitem(sys.modules, module, None)
    path = source if "://" in source else str(write(tmp_path / source, b"x"))
    with pytest.raises(UserError, match=rf"needs the extra `{extra}`: pip install 'fivefold\[{extra}\]'"):
        prepare(recipe_of(path, tmp_path / "cache", val_fraction=0.0))


def test_splits_and_rows_of_a_hub_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Rows(list):
        def skip(self, n: int) -> Rows:
            return Rows(self[n:])

    breaks = [3]

    def load_dataset(name, config, *, split, streaming):
        assert (name, config, split, streaming) == ("some/set", None, "test", True)
        found = Rows({"text": f"row {i}"} for i in range(20))

        class Broken(Rows):
            def skip(self, n: int) -> Rows:
                return found.skip(n)

            def __iter__(self):
                yield from found[: breaks.pop()]
                raise ConnectionError("reset")

        return Broken() if breaks else found

    module = types.ModuleType("datasets")
    builder = types.SimpleNamespace(
        hash="a", config=types.SimpleNamespace(name="default"), info=types.SimpleNamespace(version="1")
    )
    vars(module).update(load_dataset=load_dataset, load_dataset_builder=lambda name, config: builder)
    monkeypatch.setitem(sys.modules, "datasets", module)
    monkeypatch.setattr(remote, "DELAYS", (0.0,))

    def texts(spec: str) -> list[str]:
        ids = tokens(spec, tmp_path / "cache")
        return [
            bytes(part[:-1].astype("u1")).decode()
            for part in np.split(ids, np.flatnonzero(ids == 256) + 1)[:-1]
        ]

    assert texts("hf:some/set::test[:6]") == [f"row {i}" for i in range(6)]  # after it broke off at row 3
    assert texts("hf:some/set::test[2:4]") == ["row 2", "row 3"]
    assert parse("hf:a:b:c[5:]") == Hub("a", "b", "c", 5, None)
    for wrong in ("hf:a:b:c[5]", "hf:a[3:2]", "hf::x"):
        with pytest.raises(UserError, match=r"data\.source = 'hf:"):
            find(wrong)


def index(code: int, lengths: list[int], borders: list[int], item: int, version: int = 1) -> bytes:
    """An .idx by hand, as megatron/core/datasets/indexed_dataset.py writes it."""
    begins = [sum(lengths[:i]) * item for i in range(len(lengths))]
    head = b"MMIDIDX\x00\x00" + struct.pack("<Q", version) + struct.pack("<B", code)
    head += struct.pack("<Q", len(lengths)) + struct.pack("<Q", len(borders))
    return (
        head
        + struct.pack(f"<{len(lengths)}i", *lengths)
        + struct.pack(f"<{len(lengths)}q", *begins)
        + struct.pack(f"<{len(borders)}q", *borders)
    )


@pytest.mark.parametrize(("code", "dtype"), [(8, "<u2"), (4, "<i4"), (5, "<i8"), (1, "|u1")])
def test_megatron_files_made_by_hand(tmp_path: Path, code: int, dtype: str):
    ids = np.arange(40) % 37
    write(tmp_path / "x_text_document.bin", ids.astype(dtype).tobytes())
    write(tmp_path / "x_text_document.idx", index(code, [15, 5, 20], [0, 2, 3], np.dtype(dtype).itemsize))
    for name in ("x_text_document", "x_text_document.bin", "x_text_document.idx", ""):
        np.testing.assert_array_equal(tokens(f"tokens:{tmp_path / name}", tmp_path / "cache"), ids)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (index(8, [15, 5, 20], [0, 3], 2)[:-1], "bytes, but 3 sequences and 2 borders are"),
        (index(8, [15, 5, 21], [0, 3], 2), "truncated: its index says 41 ids, but the file ends after 40"),
        (index(8, [15, 5, 20], [0, 3], 4), "do not lie one behind the other"),
        (index(8, [15, 5, 20], [0, 2], 2), "do not go from 0 to the number"),
        (index(8, [15, 5, 20], [1, 3], 2), "do not go from 0 to the number"),
        (index(8, [15, 5, 20], [0, 1, 2, 1, 3], 2), "do not go from 0 to the number"),
        (index(6, [15, 5, 20], [0, 3], 2), "dtype float64"),
        (index(8, [15, 5, 20], [0, 3], 2, version=2), "unknown version 2"),
        (index(8, [15, 5, 20], [0, 3], 2) + b"\0\0\0", "files with images are not supported"),
        (b"x" * 100, "not an index of Megatron-LM"),
    ],
)
def test_damaged_indexes_of_megatron(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: bytes, message: str
):
    monkeypatch.setattr(token_files, "CHUNK", 2)
    write(tmp_path / "x.bin", np.arange(40).astype("<u2").tobytes())
    write(tmp_path / "x.idx", made)
    with pytest.raises(UserError, match=message):
        tokens(f"tokens:{tmp_path / 'x'}", tmp_path / "cache")


@pytest.mark.parametrize("end", [None, 36])
def test_an_index_says_where_documents_end(tmp_path: Path, end: int | None):
    """Of documents that end with the end token, it belongs to the next one, too. Others begin with themselves."""
    ids = (np.arange(41) + 1) % 38
    ids[[9, 20]] = 36  # one is inside of a document
    lengths, borders = (
        [4, 6, 5, 1, 0, 16, 9],
        [0, 0, 2, 3, 4, 4, 6, 7],
    )  # documents end behind 10, 15, 16, 32, 41
    write(tmp_path / "x.bin", ids.astype("<u2").tobytes())
    write(tmp_path / "x.idx", index(8, lengths, borders, 2))
    recipe = recipe_of(
        f"tokens:{tmp_path / 'x'}", tmp_path / "cache", val_fraction=0.0, end_token=end, vocab_size=64
    )
    data = prepare(recipe)
    assert isinstance(data.train, Tokens)
    assert data.train.ends(0, 41, end).tolist() == [9, 14, 15, 31, 40]
    assert Tokens(data.train.shards, 12, 40).ends(2, 20, end).tolist() == [2, 3, 19]
    cut = cut_of(recipe, data, data.train)
    found = cut.read(np.arange(5))
    assert cut.uneven
    assert found.first is not None
    begins, lost = {10, 15, 16, 32}, {10, 15, 16, 32}
    if end is not None:
        begins, lost = {9, 15, 16, 32}, {15, 16, 32}
    assert [int(x) for x in np.flatnonzero(found.first.ravel() == np.tile(range(8), 5))] == sorted(
        {*range(0, 40, 8), *begins}
    )
    wanted = [-100 if at in lost else ids[at] for at in range(1, 41)]
    assert found.targets.ravel().tolist() == wanted
    plain = recipe.model_copy(update={"data": recipe.data.model_copy(update={"document_masks": False})})
    assert cut_of(plain, prepare(plain), prepare(plain).train).read(np.arange(5)).first is None
    write(tmp_path / "x.idx", index(8, lengths, [0, 7], 2))
    assert (
        prepare(plain).info["fingerprint"] == prepare(plain).info["fingerprint"] != data.info["fingerprint"]
    )
    assert prepare(recipe).info["fingerprint"] not in (
        data.info["fingerprint"],
        prepare(plain).info["fingerprint"],
    )
    if end is not None:
        write(tmp_path / "x.idx", index(8, lengths, borders, 2))
        tokens = prepare(recipe).train
        assert isinstance(tokens, Tokens)
        starts, sizes = pieces(tokens, 8, end)
        assert sorted(np.concatenate([np.arange(s, s + n) for s, n in zip(starts, sizes, strict=True)])) == [
            at for at in range(41) if at not in lost
        ]
        packed = Packed(tokens, 8, end).read(np.arange(Packed(tokens, 8, end).count))
        assert sorted(packed.targets[packed.targets >= 0]) == sorted(
            ids[at] for at in range(41) if at not in lost
        )


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
def test_out_to_megatron_and_in_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: str):
    monkeypatch.setattr(token_files, "CHUNK", 1000)
    write(tmp_path / "in" / "a.jsonl", lines()[:200_000].rpartition(b"\n")[0])
    recipe = recipe_of(tmp_path / "in", tmp_path / "cache", val_fraction=0.2, tokenizer=tokenizer)
    data = prepare(recipe)
    train, val = write_megatron(data, recipe, tmp_path / "out" / "set")
    back = prepare(recipe_of(f"tokens:{tmp_path / 'out'}", tmp_path / "cache"))
    np.testing.assert_array_equal(back.train[:], data.train[:])
    np.testing.assert_array_equal(back.val[:], data.val[:])  # type: ignore[index]
    ends = np.flatnonzero(data.train[:] == data.tokenizer.end_id) + 1  # type: ignore[union-attr]
    raw = train.with_suffix(".idx").read_bytes()
    count = len(ends)
    assert raw == index(8, np.diff(ends, prepend=0).tolist(), list(range(count + 1)), 2)
    written = token_files.DocIndex(val.with_suffix(".idx"))
    assert (written.dtype, written.count()) == ("<u2", len(data.val))  # type: ignore[arg-type]
    end = data.tokenizer.end_id  # type: ignore[union-attr]
    same = recipe_of(f"tokens:{tmp_path / 'out'}", tmp_path / "cache", end_token=end)
    mine, theirs = cut_of(recipe, data, data.train), cut_of(same, prepare(same), prepare(same).train)
    for ours, read in zip(mine.read(np.arange(99)), theirs.read(np.arange(99)), strict=True):
        np.testing.assert_array_equal(ours, read)  # type: ignore[arg-type]
    (once_more, _) = write_megatron(back, same, tmp_path / "again" / "set")
    assert once_more.with_suffix(".idx").read_bytes() == raw, "the borders of an index stay"


def test_parquet_with_input_ids(tmp_path: Path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    found = [[1, 2, 3], [], [4, 9], [5]]
    pq.write_table(
        pa.table({"input_ids": found, "n": [1, 2, 3, 4]}), tmp_path / "a.parquet", row_group_size=2
    )
    source = f"tokens:{tmp_path / 'a.parquet'}"
    assert tokens(source, tmp_path / "cache", seq_len=2).tolist() == [1, 2, 3, 4, 9, 5]
    with_ends = tokens(source, tmp_path / "cache", seq_len=2, end_token=9)
    assert with_ends.tolist() == [1, 2, 3, 9, 9, 4, 9, 5, 9]
    assert "about 7 tokens" in check(recipe_of(source, tmp_path / "cache", seq_len=2, val_fraction=0.0))[0]
    pq.write_table(pa.table({"input_ids": [[1, None]]}), tmp_path / "b.parquet")
    with pytest.raises(UserError, match=r"b.parquet: row 0: input_ids must hold ids from 0"):
        tokens(f"tokens:{tmp_path / 'b.parquet'}", tmp_path / "cache")
    pq.write_table(pa.table({"input_ids": ["text"]}), tmp_path / "c.parquet")
    with pytest.raises(UserError, match="expected lists of whole numbers"):
        tokens(f"tokens:{tmp_path / 'c.parquet'}", tmp_path / "cache")
    with pytest.raises(UserError, match="for its column input_ids write tokens:PATH"):
        tokens(tmp_path / "a.parquet", tmp_path / "cache")


def test_a_broken_row_group_ends_only_itself(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path, texts = (
        tmp_path / "a.parquet",
        [f"{word} {i} " * 40 for word in ("one", "two", "three") for i in range(9)],
    )
    pq.write_table(pa.table({"text": texts}), path, row_group_size=9, use_dictionary=False)
    column = pq.ParquetFile(path).metadata.row_group(1).column(0)
    content = bytearray(path.read_bytes())
    begin = column.data_page_offset
    content[begin : begin + column.total_compressed_size] = b"\xff" * column.total_compressed_size
    path.write_bytes(content)
    found = [*parquet._rows(path, Fields("text"), 0)]
    assert [value["text"] for _, value in found if isinstance(value, dict)] == texts[:9] + texts[18:]
    assert [number for number, value in found if isinstance(value, str)] == [9]


def test_a_fault_in_a_csv_is_one_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those behind it are read. Lines in quotes are a row, whose bytes are bounded together."""
    monkeypatch.setattr(kinds_csv, "LONGEST_LINE", 1000)
    long = b'"' + b"many\n" * 300 + b'"\n'
    content = b'text\ngood\n"stray"quote\n\xff\none,two\n\n"of\ntwo"\n' + b"x" * 2000 + b"\nlast\n"
    file = find(str(write(tmp_path / "a.csv", content))).files[0]
    found = [value for _, value in KINDS["csv"].rows(file, Fields("text"), 0)]  # type: ignore[attr-defined]
    assert [value["text"] for value in found if isinstance(value, dict)] == ["good", "of\ntwo", "last"]
    reasons = [value.split(":")[0] for value in found if isinstance(value, str)]
    assert reasons == ["not CSV", "not UTF-8", "a row of 2 fields; the first line names 1", "not CSV"]
    file = find(str(write(tmp_path / "b.csv", b"text\n" + long))).files[0]
    first = next(KINDS["csv"].rows(file, Fields("text"), 0))[1]  # type: ignore[attr-defined]
    assert str(first).startswith("not CSV: a row of more than")


@pytest.mark.parametrize("kind", ["csv", "json"])
def test_a_file_that_became_unreadable_is_said_when_a_run_goes_on(tmp_path: Path, kind: str) -> None:
    content = b"text\n" + b"row\n" * 9 if kind == "csv" else json.dumps([{"text": "row"}] * 9).encode()
    path = write(tmp_path / f"a.{kind}", content)
    file = find(str(path)).files[0]
    path.unlink()
    [(bad, place)] = KINDS[kind].read(0, file, 5, Fields("text"))
    assert isinstance(bad, Bad)
    assert (bad.place, bad.reason[:14]) == (5, "cannot be read")
    assert [*FileSplit([file]).read(0, Fields("text"), place)] == [], "it is said once"


def test_a_text_that_ends_with_a_long_line_ends_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A reader that begins behind the last piece has missed no end."""
    monkeypatch.setattr("fivefold.data.kinds.text.SPAN", 64)
    for size in (60, 64, 65, 100, 128, 200):
        (tmp_path / "one.txt").write_text("a" * 40 + "\n" + "b" * (size - 42) + "\n")
        file = File("one.txt", tmp_path / "one.txt", "text", size)
        read = list(FileSplit([file, file]).read(0, Fields("text", False)))
        documents = [document for document, _ in read if isinstance(document, Document)]
        assert [document.ends for document in documents] == [*[False] * (len(documents) - 1), True]
        assert all(document.text for document in documents)
        assert read[-1][1] == size
