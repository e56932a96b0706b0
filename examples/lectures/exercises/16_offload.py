"""Offload: copies over a link beside computing, and how many blocks a device must hold so that they hide.

Time: three quarters of an hour. Data: none. Plain Python.
"""


def link_seconds(psi: float, rate: float) -> float:
    """ZeRO-Offload: seconds for the gradients of a step to go out (2 bytes each) and the new weights to come back (2
    bytes each), one after the other, over a link of `rate` bytes/s."""
    raise NotImplementedError


def streamed(blocks: int, compute: float, copy: float, window: int) -> float:
    """Seconds of a forward whose blocks come from the host, one copy after the other. The device holds at most `window`
    blocks, among them the one that computes. So block i may begin to arrive when block i - window has been computed.
    It computes when it is there and the one before is done."""
    raise NotImplementedError


def hidden(blocks: int, compute: float, copy: float, window: int) -> float:
    """The share of all copies' time that does not lengthen the forward: 1 if it takes as long as computing alone."""
    raise NotImplementedError


def fewest_sequences(block: float, flops: float, rate: float, link: float) -> int:
    """The fewest sequences per microbatch with which computing a block takes at least as long as its copy. block: bytes
    of its weights. flops: of a block and a sequence. rate: FLOP/s. link: bytes/s."""
    raise NotImplementedError
