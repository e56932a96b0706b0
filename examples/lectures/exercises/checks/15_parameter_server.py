"""Checks of 15_parameter_server.py."""


def check_server_bytes(server_bytes):
    server_bytes.gives(30.0, 3, 1, 10.0, why="one server gets everything (incast)")
    server_bytes.gives(10.0, 3, 3, 10.0)


def check_synchronous(synchronous):
    synchronous.gives(12.0, [1.0, 3.0, 2.0], 4, why="the slowest takes 3 s")


def check_asynchronous(asynchronous):
    asynchronous.gives([(0, 0), (0, 0), (0, 0)], [1.0], 3, why="a single worker is never stale")
    asynchronous.gives([(0, 0), (1, 1), (0, 1), (1, 1)], [1.0, 1.0], 4, why="two that are as fast take turns")
    asynchronous.gives([(0, 0), (0, 0), (0, 0), (1, 3), (0, 1)], [1.0, 3.5], 5,
                       why="a slow worker's gradient is three updates old")  # fmt: skip
    asynchronous.gives([(0, 0), (0, 0), (1, 2), (0, 1), (0, 0), (1, 2)], [1.0, 2.0], 6,
                       why="at 2 s both push; the worker with the smaller number is first")  # fmt: skip
    stale = [s for _, s in asynchronous([1.0, 1.1, 1.2, 1.3], 400)][100:]
    if not 2.9 < sum(stale) / len(stale) < 3.1:
        mean = sum(stale) / len(stale)
        asynchronous.wrong(
            f"four workers that are about as fast are {mean:.2f} updates stale in the mean, not about 3"
        )


def check_may_begin(may_begin):
    may_begin.gives(True, [3, 3], 0, 0, why="everybody is as far")
    may_begin.gives(False, [4, 3], 0, 0, why="it would be ahead")
    may_begin.gives(True, [4, 3], 0, 1)
    may_begin.gives(False, [5, 3, 9], 0, 1, why="the slowest counts")
    may_begin.gives(True, [5, 3, 9], 1, 0, why="the slowest itself may always begin")
