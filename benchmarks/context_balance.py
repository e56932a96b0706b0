"""Context parallelism under document masks: is attention's work even over the ranks? Largest over mean of its FLOPs.

    python benchmarks/context_balance.py PATH/TO/tinyshakespeare.txt [--out benchmarks/results/context_balance.json]

Of each sequence of a run, one in a microbatch, two counts are taken per rank: pairs of a query and a key that see each
other, which FLOPs are proportional to, and scores of the tiles that the kernels for CPUs compute for them. The table
has the mean over sequences of the largest rank's count relative to the mean rank's (1 is even), and the worst sequence;
and the tiles of the slowest rank relative to those of the zig-zag's slowest: small blocks of queries need more tiles.

- neighbours: each rank has one contiguous part.
- zig-zag: a chunk from the front and its mirror image from the back, as in the ring.
- dealt: blocks dealt by the pairs of these documents (`cp_method=all_gather`; `sharding/sequence.py`).

Texts: the quickstart's (the Python standard library, a file is a document), tinyshakespeare (a speech is a document),
both packed as training packs them; and lengths drawn from a lognormal (sigma 1.8) and a Pareto (alpha 1.2)
distribution around a 64th of a sequence, with a fixed seed. Nothing is timed, so other work does not matter. A minute.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from fivefold.data import prepare
from fivefold.data.facts import sample
from fivefold.kernels.tiling import Tiling, scores
from fivefold.recipe import load
from fivefold.sharding.layout import Layout
from fivefold.sharding.parts import Columns
from fivefold.sharding.sequence import token_spans

LENGTHS, RANKS, ROWS, BF16 = (2048, 8192, 32768), (2, 4, 8, 16), 16, 2


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("text", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = []
    with TemporaryDirectory() as folder:
        speeches = Path(folder) / "speeches.jsonl"
        parts = args.text.read_text(encoding="utf-8").split("\n\n")
        speeches.write_text("".join(json.dumps({"text": f"{part}\n\n"}) + "\n" for part in parts))
        texts: dict[str, Callable[[int], np.ndarray]] = {
            "quickstart": lambda T: of_text(T, "data.tokenizer=bpe:4096"),
            "tinyshakespeare": lambda T: of_text(T, f"data.source={speeches}", "data.tokenizer=bytes"),
            "lognormal": lambda T: drawn(T, lambda draw: draw.lognormal(np.log(T / 64), 1.8)),
            "Pareto": lambda T: drawn(T, lambda draw: T / 64 * (draw.pareto(1.2) + 1)),
        }
        for name, firsts in texts.items():
            for T in LENGTHS:
                first_RT = firsts(T)
                for ranks in RANKS:
                    rows.append({"text": name, "T": T, "cp": ranks, **balance(first_RT, ranks)})
                    print(line(rows[-1]), flush=True)
    if args.out:
        args.out.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


def of_text(T: int, *sets: str) -> np.ndarray:
    """The column at which the document of each token begins, in sequences from all parts of a run."""
    recipe = load("quickstart", [f"model.seq_len={T}", "data.document_masks=true", "train.steps=20", *sets])
    found = sample(recipe, prepare(recipe))
    assert found is not None
    return found.tiling.first_BT[:ROWS]


def drawn(T: int, length: Callable[[np.random.Generator], float]) -> np.ndarray:
    """Documents one behind the other, cut by sequences."""
    draw, begins = np.random.default_rng(0), np.zeros(ROWS * T, bool)
    at = 0
    while at < len(begins):
        begins[at] = True
        at += 1 + int(length(draw))
    begins_RT = begins.reshape(ROWS, T)
    return np.maximum.accumulate(np.where(begins_RT, np.arange(T), 0), axis=1)


def balance(first_RT: np.ndarray, ranks: int) -> dict[str, Any]:
    """Largest over mean of the ranks: mean and worst over sequences, of pairs and of scores in tiles, by division."""
    T, found = first_RT.shape[1], dict[str, dict[str, list[float]]]()
    zigzag = Layout(cp=ranks, cp_method="all_gather")
    fixed = {
        "neighbours": [((T // ranks * i, T // ranks * (i + 1)),) for i in range(ranks)],
        "zig-zag": [tuple(token_spans(zigzag, T, i)) for i in range(ranks)],
    }
    for first_T in first_RT:
        tiling = Tiling(first_T[None])
        ways = {**fixed, "dealt": tiling.dealt(ranks, True)}
        tiles = {name: [computed(tiling, columns) for columns in every] for name, every in ways.items()}
        for name, every in ways.items():
            row = found.setdefault(name, {"pairs": [], "tiles": [], "slowest": []})
            row["pairs"].append(uneven([pairs(first_T, columns) for columns in every]))
            row["tiles"].append(uneven(tiles[name]))
            row["slowest"].append(max(tiles[name]) / max(tiles["zig-zag"]))
    return {
        name: {kind: [float(np.mean(values)), max(values)] for kind, values in row.items()}
        for name, row in found.items()
    }


def pairs(first_T: np.ndarray, columns: Columns) -> int:
    return sum(int((np.arange(a, b) - first_T[a:b] + 1).sum()) for a, b in columns)


def computed(tiling: Tiling, columns: Columns) -> int:
    whole = ((0, tiling.shape[1]),)
    return scores(tiling, [((span,), whole) for span in columns], True, BF16)


def uneven(work: Sequence[int]) -> float:
    return max(work) / float(np.mean(work))


def line(row: dict[str, Any]) -> str:
    ways = (
        f"{way} {row[way]['pairs'][0]:.3f} (worst {row[way]['pairs'][1]:.3f}; tiles {row[way]['tiles'][0]:.3f}, "
        f"slowest {row[way]['slowest'][0]:.2f})"
        for way in ("neighbours", "zig-zag", "dealt")
    )
    return f"{row['text']:16} T {row['T']:6} cp {row['cp']:2}: " + "   ".join(ways)


if __name__ == "__main__":
    main()
