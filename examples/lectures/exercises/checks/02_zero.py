"""Checks of 02_zero.py."""


def check_bytes_per_rank(bytes_per_rank):
    paper = (120.0e9, 31.40625e9, 16.640625e9, 1.875e9)  # arXiv 1910.02054, figure 1, before rounding
    for stage, wanted in enumerate(paper):
        bytes_per_rank.gives(wanted, 7.5e9, 64, stage, why="figure 1 of the paper")
    for stage in range(4):
        bytes_per_rank.gives(16.0, 1.0, 1, stage, why="one rank stores everything")


def check_owned(owned):
    owned.gives([(0, 0, 4)], [6, 2], 2, 0)
    owned.gives([(0, 4, 6), (1, 0, 2)], [6, 2], 2, 1, why="a part may begin within a parameter")
    for sizes, ranks in (([6, 2], 2), ([5, 1, 9, 2], 4), ([1, 1], 5), ([7], 3)):
        parts = [owned(sizes, ranks, rank) for rank in range(ranks)]
        elements = [(number, i) for part in parts for number, first, end in part for i in range(first, end)]
        if elements != [(number, i) for number, size in enumerate(sizes) for i in range(size)]:
            owned.wrong(
                f"parameters of {sizes} on {ranks} ranks: {parts} are not each element once, in order"
            )
        most = -(-sum(sizes) // ranks)
        if any(sum(end - first for _, first, end in part) > most for part in parts):
            owned.wrong(f"parameters of {sizes} on {ranks} ranks: {parts} have a part of more than {most}")


def check_sent(sent):
    for stage, wanted in ((1, 2), (2, 2), (3, 3)):
        sent.gives(wanted, stage, 1, why="with one microbatch")
    sent.gives(2, 1, 8, why="stage 1 sums gradients once, behind the last microbatch")
    sent.gives(9, 2, 8, why="a reduce-scatter per microbatch, and one all-gather")
    sent.gives(24, 3, 8, why="two all-gathers and a reduce-scatter per microbatch")


def check_fewest_ranks(fewest_ranks):
    fewest_ranks.gives(120, 7.5e9, 1e9, 3, why="120 GB of states, one GB each")
    fewest_ranks.gives(None, 7.5e9, 30e9, 1, why="weights and gradients alone take 30 GB on every rank")
    fewest_ranks.gives(None, 7.5e9, 80e9, 0, why="nothing is divided")
    fewest_ranks.gives(1, 1e9, 16e9, 0, why="16 GB fit exactly")
    fewest_ranks.gives(14, 1e9, 3e9, 2, why="2 GB of weights, and 14 GB divided by 14")
    fewest_ranks.gives(1, 1e9, 80e9, 1, why="16 GB fit")
    fewest_ranks.gives(2, 1e9, 10e9, 1, why="4 GB, and 12 divided by 2")
    fewest_ranks.gives(3, 1e9, 8.0e9, 1, why="4 GB, and 12 divided by 3, are 8 GB exactly")
    fewest_ranks.gives(3, 1e9, 9.0e9, 1, why="4 GB, and 12 divided by 2, are more than 9 GB")
