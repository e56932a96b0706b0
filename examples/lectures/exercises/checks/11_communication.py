"""Checks of 11_communication.py: a ring's steps are run, and times are added up round by round."""


def check_ring_step(ring_step):
    ring_step.gives((1, 0, True), 0, 4, 0)
    for ranks in (2, 3, 4, 7):
        have = [
            [{rank} for _ in range(ranks)] for rank in range(ranks)
        ]  # whose part each chunk of each rank has
        for number in range(2 * (ranks - 1)):
            moves = [(rank, *ring_step(rank, ranks, number)) for rank in range(ranks)]
            before = [[set(chunk) for chunk in chunks] for chunks in have]
            for rank, to, chunk, adds in moves:
                if to != (rank + 1) % ranks:
                    ring_step.wrong(
                        f"in round {number} of {ranks} ranks, rank {rank} sends to {to}, not to its neighbour"
                    )
                if adds and before[rank][chunk] & before[to][chunk]:
                    ring_step.wrong(
                        f"in round {number} of {ranks} ranks, rank {to} adds parts of chunk {chunk} twice"
                    )
                have[to][chunk] = before[to][chunk] | before[rank][chunk] if adds else before[rank][chunk]
        for rank, chunks in enumerate(have):
            for chunk, parts in enumerate(chunks):
                if parts != set(range(ranks)):
                    ring_step.wrong(
                        f"behind all rounds of {ranks} ranks, chunk {chunk} of rank {rank} is the sum of the parts of "
                        f"ranks {sorted(parts)} only"
                    )


def added(rounds):
    """Seconds of rounds that each send so many bytes."""
    return sum(2.0 + size * 0.5 for size in rounds)


def check_ring_time(ring_time):
    for ranks in (2, 4, 5):
        wanted = added([40 / ranks] * (2 * (ranks - 1)))
        ring_time.gives(wanted, ranks, 40.0, 2.0, 0.5, why="2 (n - 1) rounds, each with an n-th of the bytes")


def check_tree_time(tree_time):
    tree_time.gives(added([40] * 2), 2, 40.0, 2.0, 0.5)
    tree_time.gives(added([40] * 6), 8, 40.0, 2.0, 0.5, why="three rounds up, three down")


def check_halving_time(halving_time):
    halving_time.gives(added([20, 20]), 2, 40.0, 2.0, 0.5)
    halving_time.gives(added([20, 10, 5, 5, 10, 20]), 8, 40.0, 2.0, 0.5)


def check_crossover(crossover):
    ring, tree = (crossover.others[name] for name in ("ring_time", "tree_time"))
    for ranks in (4, 8, 64):
        size = crossover(ranks, 3e-6, 1e-11)
        below, above = (
            [time(ranks, part * size, 3e-6, 1e-11) for time in (ring, tree)] for part in (0.99, 1.01)
        )
        if not (below[0] > below[1] and above[0] < above[1]):
            times = [time(ranks, size, 3e-6, 1e-11) for time in (ring, tree)]
            crossover.wrong(
                f"on {ranks} ranks {size:.6g} bytes; a ring takes {times[0]:.6g} s there, and a tree {times[1]:.6g} s"
            )
