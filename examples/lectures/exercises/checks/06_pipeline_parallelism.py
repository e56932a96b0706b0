"""Checks of 06_pipeline_parallelism.py."""


def check_gpipe(gpipe):
    gpipe.gives([("F", 0), ("F", 1), ("F", 2), ("B", 2), ("B", 1), ("B", 0)], 3)


def check_one_f_one_b(one_f_one_b):
    one_f_one_b.gives(
        [("F", 0), ("B", 0), ("F", 1), ("B", 1)], 1, 2, 2, why="the last stage never waits to go back"
    )
    one_f_one_b.gives([("F", 0), ("F", 1), ("B", 0), ("F", 2), ("B", 1), ("B", 2)], 0, 2, 3)
    one_f_one_b.gives([("F", 0), ("B", 0)], 0, 4, 1, why="one microbatch only")
    for stage in range(4):
        order = one_f_one_b(stage, 4, 9)
        if sorted(order) != sorted((kind, i) for kind in "FB" for i in range(9)):
            one_f_one_b.wrong(f"stage {stage} of 4 with 9 microbatches does not do each work once: {order}")


def check_kept(kept):
    kept.gives(2, [("F", 0), ("F", 1), ("B", 1), ("F", 2), ("B", 2), ("B", 0)])
    schedule, flushing = kept.others["one_f_one_b"], kept.others["gpipe"]
    kept.gives(8, flushing(8), why="GPipe keeps all microbatches")
    for stage in range(4):
        kept.gives(4 - stage, schedule(stage, 4, 8), why=f"1F1B keeps p - stage, on stage {stage} of 4")


def check_bubble(bubble):
    bubble.gives(0.375, 4, 8)
    bubble.gives(0.1875, 4, 8, 2)
    bubble.gives(0.0, 1, 8, why="one stage never waits")


def check_finished(finished):
    one = [("F", 0), ("B", 0)]
    finished.gives(3.0, [one], 1.0, 2.0)
    finished.gives(3.0, [[("F", 0), ("F", 1)]] * 2, 1.0, 2.0, why="two forwards on two stages")
    finished.gives(9.0, [one] * 3, 1.0, 2.0, why="three forwards and three backwards, one after the other")
    for p, m in ((2, 2), (4, 8), (3, 7)):
        wanted = (m + p - 1) * 3.0
        finished.gives(
            wanted, [in_turns(p - 1 - stage, m) for stage in range(p)], 1.0, 2.0, why=f"1F1B, {p} stages"
        )
        flushing = [("F", i) for i in range(m)] + [("B", i) for i in range(m)]
        finished.gives(wanted, [flushing] * p, 1.0, 2.0, why=f"all forwards first, {p} stages")


def in_turns(warm, m):
    """`warm` forwards ahead, then a backward behind each forward while there are any."""
    order = [("F", i) for i in range(min(warm, m))]
    for i in range(m):
        order += [("F", i + warm)] * (i + warm < m) + [("B", i)]
    return order
