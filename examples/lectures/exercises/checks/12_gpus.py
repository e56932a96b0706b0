"""Checks of 12_gpus.py."""


def check_matmul(matmul):
    matmul.gives((2, 6), 1, 1, 1)
    matmul.gives((2 * 24, 2 * (8 + 12 + 6)), 2, 3, 4)
    matmul.gives((2 * 24, 4 * (8 + 12 + 6)), 2, 3, 4, 4, why="numbers of 4 bytes")


def check_seconds(seconds):
    seconds.gives(2.0, 20.0, 5.0, 10.0, 5.0, why="computing takes 2 s, moving 1 s")
    seconds.gives(4.0, 20.0, 20.0, 10.0, 5.0, why="computing takes 2 s, moving 4 s")


def check_tiled_reads(tiled_reads):
    for n, tile in ((4, 1), (4, 2), (8, 8), (12, 3)):
        reads = 0
        for _ in range(0, n, tile):  # rows of tiles of the result
            for _ in range(0, n, tile):  # columns
                for _ in range(0, n, tile):  # tiles that meet
                    reads += 2 * tile**2
        tiled_reads.gives(reads, n, tile, why=f"counted; without tiles it is {2 * n**3}")


def check_smallest_batch(smallest_batch):
    matmul = smallest_batch.others["matmul"]
    for k, n, peak, bandwidth in (
        (4096, 4096, 989e12, 3.35e12),
        (128, 512, 10e12, 1e12),
        (4096, 16384, 312e12, 2e12),
    ):
        found = smallest_batch(k, n, peak, bandwidth)
        times = []
        for m in (found - 1, found):
            flops, moved = matmul(m, n, k)
            times.append((flops / peak, moved / bandwidth))
        if times[1][0] < times[1][1] or times[0][0] >= times[0][1]:
            smallest_batch.wrong(
                f"k = {k}, n = {n}: {found} rows, but {found - 1} and {found} rows take (to compute, to move) {times} s"
            )


def check_utilisation(utilisation):
    utilisation.gives((0.5, 0.5), 1000.0, 1e9, 0.0, 12e12)
    utilisation.gives((0.3, 0.4), 600.0, 1e9, 1.0, 12e12, why="full recomputation adds a third")
    utilisation.gives((0.3, 0.35), 600.0, 1e9, 0.5, 12e12, why="half of the blocks are recomputed")
