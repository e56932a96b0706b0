"""Speed and memory of `fivefold tokenize` beside the library's own `encode_batch_fast`, on the same text and tokenizer.

    python benchmarks/tokenizing.py [--mb 160] [--repeat 1] [--out benchmarks/results/tokenizing.json]

Both are whole processes. The library's reads the documents of a .jsonl into a list, encodes them at once with a thread
per core and counts the ids. Fivefold also hashes the source, writes shards with their hashes and flushes them. The
text is the source code of Python's standard library and of the packages that are installed. Memory is the peak of the
resident sets of a process and its children together, read 20 times a second.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from statistics import median

from fivefold.data.sources import find
from fivefold.data.tokenizer import train_bpe

LIBRARY = """
import json, sys
from tokenizers import Tokenizer
inner = Tokenizer.from_file(sys.argv[1])
inner.encode_special_tokens = True
texts = [json.loads(line)["text"] for line in open(sys.argv[2], encoding="utf-8")]
found = inner.encode_batch_fast(texts, add_special_tokens=False)
print(sum(len(one.ids) for one in found) + len(found))
"""
OURS = """
import sys
from fivefold.data import prepare
from fivefold.recipe import load
found = prepare(load("quickstart", sys.argv[1:])).info
print(found["tokens"]["train"])
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mb", type=int, default=160)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        text, tokenizer = corpus(Path(folder), args.mb * 1_000_000)
        rows: dict[str, list[tuple[float, float, int]]] = {"encode_batch_fast": [], "fivefold": []}
        for number in range(args.repeat):
            rows["encode_batch_fast"].append(measured([LIBRARY, str(tokenizer), str(text)]))
            settings = [f"data.source={text}", f"data.tokenizer={tokenizer}", "data.val_fraction=0.0"]
            rows["fivefold"].append(measured([OURS, *settings, f"data.cache={folder}/cache-{number}"]))
        size = text.stat().st_size
    tokens = {row[2] for found in rows.values() for row in found}
    assert len(tokens) == 1, f"they do not have the same number of tokens: {tokens}"
    found = {
        "command": "python benchmarks/tokenizing.py " + " ".join(sys.argv[1:]),
        "machine": f"{platform.processor() or platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        "bytes": size,
        "tokens": tokens.pop(),
    }
    for name, measures in rows.items():
        seconds, memory = (median(row[i] for row in measures) for i in (0, 1))
        found[name] = {
            "seconds": round(seconds, 2),
            "mb_s": round(size / 1e6 / seconds, 1),
            "peak_mib": round(memory),
        }
        print(f"{name:18} {seconds:7.2f} s  {size / 1e6 / seconds:6.1f} MB/s  {memory:7.0f} MiB")
    library, ours = found["encode_batch_fast"], found["fivefold"]
    found["speed"] = round(ours["mb_s"] / library["mb_s"], 2)
    found["memory"] = round(ours["peak_mib"] / library["peak_mib"], 3)
    print(f"fivefold: {found['speed']:.2f} of its speed, in {found['memory']:.3f} of its memory")
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


def corpus(folder: Path, size: int) -> tuple[Path, Path]:
    """A .jsonl of at most so many bytes, and a tokenizer with 32,000 tokens that was learned from its beginning."""
    documents, written = [], 0
    with open(folder / "text.jsonl", "w", encoding="utf-8") as out:
        for file in [*find("stdlib").files, *find(f"{sysconfig.get_path('purelib')}/**/*.py").files]:
            text = file.path.read_text("utf-8", errors="replace")
            for start in range(0, len(text), 20_000):
                documents.append(text[start : start + 20_000])
                written += out.write(json.dumps({"text": documents[-1]}, ensure_ascii=False) + "\n")
            if written >= size:
                break
    train_bpe(documents[:500], 32_000).save(folder / "tokenizer.json")
    return folder / "text.jsonl", folder / "tokenizer.json"


def measured(command: list[str]) -> tuple[float, float, int]:
    """(seconds, peak MiB of the process and its children, what it printed)."""
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "true"}
    began, peak = time.perf_counter(), 0.0
    process = subprocess.Popen([sys.executable, "-c", *command], stdout=subprocess.PIPE, env=environment)
    while process.poll() is None:
        peak = max(peak, sum(map(resident, family(process.pid))))
        time.sleep(0.05)
    seconds = time.perf_counter() - began
    assert process.stdout is not None
    assert process.returncode == 0, command[1:]
    return seconds, peak, int(process.stdout.read())


def family(pid: int) -> list[int]:
    try:
        tasks = Path(f"/proc/{pid}/task").iterdir()
        children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return []
    return [pid, *(one for child in children for one in family(child))]


def resident(pid: int) -> float:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    except (OSError, IndexError):
        return 0.0


if __name__ == "__main__":
    main()
