"""Parameter servers: bytes at a server, and how stale gradients become.

Time: forty minutes. Data: none. Plain Python.
"""


def server_bytes(workers: int, servers: int, size: float) -> float:
    """Bytes that a server receives in a step: each worker pushes `size` bytes of gradients, which the servers
    share."""
    raise NotImplementedError


def synchronous(seconds: list[float], steps: int) -> float:
    """The time of so many steps if everybody waits for the slowest worker. seconds: of each worker's gradient."""
    raise NotImplementedError


def asynchronous(seconds: list[float], updates: int) -> list[tuple[int, int]]:
    """The first `updates` updates of a server, in order: (worker, staleness). Each worker pulls at time 0 and computes
    for its seconds; the server applies its gradient at once, and it pulls and begins anew. Staleness: how many updates
    the server has made between this worker's pull and its push. Of several pushes at one time the worker with the
    smallest number comes first."""
    raise NotImplementedError


def may_begin(done: list[int], worker: int, bound: int) -> bool:
    """Bounded staleness (arXiv 1312.7869): whether a worker may begin its next step. done: steps that each worker has
    finished. It may be at most `bound` steps ahead of the slowest."""
    raise NotImplementedError
