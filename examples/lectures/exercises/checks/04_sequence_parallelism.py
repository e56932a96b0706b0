"""Checks of 04_sequence_parallelism.py."""

import numpy as np

DRAW = np.random.default_rng(0)


def dot(left, right):
    return sum(float((x * y).sum()) for x, y in zip(left, right, strict=True))


def check_all_gather(all_gather):
    parts = [np.full((2, 3), float(rank)) for rank in range(3)]
    whole = all_gather(parts)
    if [w.shape for w in whole] != [(6, 3)] * 3:
        all_gather.wrong(f"three ranks with 2 tokens each have {[w.shape for w in whole]}, not (6, 3) each")
    if any(w[:, 0].tolist() != [0, 0, 1, 1, 2, 2] for w in whole):
        all_gather.wrong("the tokens are not in the order of the ranks, on every rank")


def check_reduce_scatter(reduce_scatter):
    parts = [DRAW.normal(size=(6, 3)) for _ in range(3)]
    reduce_scatter.gives([(parts[0] + parts[1] + parts[2])[2 * r : 2 * r + 2] for r in range(3)], parts)
    gather = reduce_scatter.others["all_gather"]
    x = [DRAW.normal(size=(2, 3)) for _ in range(3)]
    if not np.isclose(dot(gather(x), parts), dot(x, reduce_scatter(parts))):
        reduce_scatter.wrong("it is not the backward of all_gather: <gather(x), y> is not <x, scatter(y)>")


def check_layer(layer):
    x, a, b = DRAW.normal(size=(6, 4)), DRAW.normal(size=(4, 9)), DRAW.normal(size=(9, 4))
    found = layer(np.split(x, 3), np.split(a, 3, 1), np.split(b, 3))
    if [part.shape for part in found] != [(2, 4)] * 3:
        layer.wrong(f"the ranks have {[part.shape for part in found]}, not their two tokens each")
    if not np.allclose(np.concatenate(found), np.maximum(x @ a, 0) @ b):
        layer.wrong("the ranks' tokens together are not relu(X A) B")


def check_block_bytes(block_bytes):
    gpt3 = 2048, 1, 12288, 96
    block_bytes.gives(578_813_952.0, *gpt3, 8, False, why="GPT-3 on 8 ranks, as the page prints: 578.8 MB")
    block_bytes.gives(358_612_992.0, *gpt3, 8, True, why="the same with sequence parallelism: 358.6 MB")
    block_bytes.gives(8 * 358_612_992.0, *gpt3, 1, False, why="one rank keeps everything")
