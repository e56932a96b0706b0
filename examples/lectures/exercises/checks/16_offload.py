"""Checks of 16_offload.py."""


def check_link_seconds(link_seconds):
    link_seconds.gives(1.04, 13e9, 50e9, why="13 billion parameters over 50 GB/s: 26 GB out, 26 GB back")


def check_streamed(streamed):
    streamed.gives(3.0, 1, 2.0, 1.0, 1, why="a copy, and then computing")
    streamed.gives(12.0, 4, 2.0, 1.0, 1, why="a window of one block: nothing overlaps")
    streamed.gives(9.0, 4, 2.0, 1.0, 2, why="only the first copy is waited for")
    streamed.gives(9.0, 4, 1.0, 2.0, 2, why="the link is the bottleneck: four copies, and the last block")
    streamed.gives(9.0, 4, 1.0, 2.0, 4, why="a wider window does not make a link faster")


def check_hidden(hidden):
    hidden.gives(0.0, 4, 2.0, 1.0, 1)
    hidden.gives(0.75, 4, 2.0, 1.0, 2, why="three of four copies")
    hidden.gives(0.375, 4, 1.0, 2.0, 2, why="5 of 8 s are waited for")


def check_fewest_sequences(fewest_sequences):
    fewest_sequences.gives(1, 1e9, 1e15, 1e15, 1e12, why="a copy takes a millisecond, computing a second")
    for block, flops, rate, link in ((600e6, 4e12, 6e14, 50e9), (1e9, 1e12, 1e15, 2e9)):
        found = fewest_sequences(block, flops, rate, link)
        enough = [n * flops / rate >= block / link for n in (found - 1, found)]
        if enough != [False, True]:
            fewest_sequences.wrong(
                f"a copy takes {block / link:.4g} s, a sequence {flops / rate:.4g} s: {found} is not the fewest"
            )
