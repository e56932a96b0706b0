"""Checks of 14_putting_it_together.py."""

SIZES = 2, 3, 4


def check_coordinates(coordinates):
    wanted = [(p, d, t) for p in range(2) for d in range(3) for t in range(4)]
    for rank, place in enumerate(wanted):
        coordinates.gives(place, rank, SIZES, why="(pp, dp, tp) of 2 x 3 x 4 ranks")


def check_group(group):
    group.gives([4, 5, 6, 7], 5, 2, SIZES, why="the tensor group has neighbouring ranks")
    group.gives([1, 5, 9], 5, 1, SIZES)
    group.gives([5, 17], 5, 0, SIZES)
    for axis, size in enumerate(SIZES):
        groups = {tuple(group(rank, axis, SIZES)) for rank in range(24)}
        if sorted(rank for one in groups for rank in one) != list(range(24)) or {*map(len, groups)} != {size}:
            group.wrong(f"the groups of axis {axis} do not hold each of the 24 ranks once: {sorted(groups)}")


def check_layouts(layouts):
    layouts.gives([(1, 1, 1)], 1, 8, 4, 2, 8)
    layouts.gives([(1, 1, 4), (1, 2, 2), (1, 4, 1), (2, 1, 2), (2, 2, 1)], 4, 4, 4, 2, 4,
                  why="a pipeline of 4 stages needs 4 layers")  # fmt: skip
    layouts.gives([(1, 4, 2), (1, 8, 1), (2, 2, 2), (2, 4, 1), (4, 1, 2), (4, 2, 1), (8, 1, 1)], 8, 2, 6, 8, 8,
                  why="tp stays within a node of 2")  # fmt: skip
    layouts.gives([(4, 1, 1)], 4, 4, 3, 4, 1, why="3 heads and one sequence leave the pipeline only")


def check_weights_per_rank(weights_per_rank):
    weights_per_rank.gives(3.0, (2, 3, 4), 24.0, False)
    weights_per_rank.gives(1.0, (2, 3, 4), 24.0, True)


def check_step_time(step_time):
    step_time.gives(80.0, (1, 1, 1), 4, 2.0, 1.0, 10, why="4 sequences of 10 blocks of 2 s")
    step_time.gives(40.0, (1, 2, 1), 4, 2.0, 1.0, 10, why="each replica has 2 of them")
    step_time.gives(
        80.0, (1, 1, 2), 4, 2.0, 1.0, 10, why="half of the computing, and a second per block and message"
    )
    step_time.gives(
        50.0, (2, 1, 1), 4, 2.0, 1.0, 10, why="5 blocks each, 4 microbatches, and one more of waiting"
    )
