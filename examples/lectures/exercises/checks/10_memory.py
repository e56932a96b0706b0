"""Checks of 10_memory.py."""


def check_block_bytes(block_bytes):
    gpt3 = 2048, 1, 12288, 96
    for recompute, wanted, printed in (
        ("none", 2_868_903_936, "2.9 GB"), ("selective", 855_638_016, "855.6 MB"), ("full", 50_331_648, "50.3 MB"),
    ):  # fmt: skip
        block_bytes.gives(float(wanted), *gpt3, recompute, why=f"the page prints {printed}")


def check_peak(peak):
    peak.gives(5.0, [("a", 2.0), ("b", 3.0), ("a", 0.0), ("c", 1.0)])
    peak.gives(
        7.0, [("a", 2.0), ("a", 0.0), ("b", 7.0), ("b", 0.0), ("c", 1.0)], why="freed memory is used again"
    )
    peak.gives(0.0, [])


def check_peak_of_step(peak_of_step):
    for blocks, inside, given in ((4, 16.0, 1.0), (1, 3.0, 2.0), (10, 5.0, 5.0)):
        for recompute in (False, True):
            now = most = 0.0
            for _ in range(blocks):  # forward
                now += given
                most = max(most, now + inside)
                now += 0 if recompute else inside
            for _ in range(blocks):  # backward
                now += inside if recompute else 0
                most = max(most, now)
                now -= given + inside
            how = "with" if recompute else "without"
            peak_of_step.gives(
                most, blocks, inside, given, recompute, why=f"a simulated step {how} recomputation"
            )


def check_best_interval(best_interval):
    best_interval.gives(
        6, 36, 0.0, 1.0, why="about the root of the number of blocks, if a block keeps its input only"
    )
    best_interval.gives(1, 32, 16.0, 1.0 / 8, why="inputs are small: each block by itself")
    for blocks, inside, given in ((48, 2.0, 1.0), (24, 5.0, 1.0), (60, 1.0, 4.0)):
        peaks = {}
        for k in range(1, blocks + 1):
            if blocks % k == 0:
                inputs = len(range(0, blocks, k))
                within = sum((given if place else 0.0) + inside for place in range(k))
                peaks[k] = inputs * given + within
        found = best_interval(blocks, inside, given)
        if found not in peaks or peaks[found] > min(peaks.values()):
            wanted = min(peaks, key=lambda k: peaks[k])
            best_interval.wrong(f"{blocks} blocks, inside {inside}, given {given}: {found}, but k = {wanted} has the "
                                f"lowest peak, {peaks[wanted]:.6g}")  # fmt: skip
