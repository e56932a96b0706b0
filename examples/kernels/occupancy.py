"""How many blocks of a kernel an SM holds at once, what limits them, and in how many waves a launch runs. No Triton.

python examples/kernels/occupancy.py h100 --threads 128 --registers 64 --shared 32768 --blocks 4096
"""

import argparse
from typing import NamedTuple

from fivefold.host.devices import SHEETS, Sheet

WARP = 32  # threads
KIB = 1024
PARTS = 4  # of an SM: each has a scheduler, and a quarter of the warps and registers
REGISTERS_AT_ONCE = 256  # a warp gets multiples of it
SHARED_AT_ONCE = 128  # bytes; a block gets multiples of it
RESERVED = 1 * KIB  # bytes of shared memory that the system takes of each block


class Limits(NamedTuple):
    """What an SM has. warps, blocks: at once. registers: of 32 bits. shared: bytes, of all blocks and of one.

    Source: CUDA C++ Programming Guide, technical specifications per compute capability. How registers and shared memory
    are rounded: NVIDIA's cuda_occupancy.h, with which a test compares.
    """

    capability: str
    warps: int
    blocks: int
    registers: int
    shared: int
    shared_of_one: int


LIMITS = {
    "Ampere": Limits("8.0", 64, 32, 65536, 164 * KIB, 163 * KIB),
    "Ada": Limits("8.9", 48, 24, 65536, 100 * KIB, 99 * KIB),
    "Hopper": Limits("9.0", 64, 32, 65536, 228 * KIB, 227 * KIB),
    "Blackwell": Limits("10.0", 64, 32, 65536, 228 * KIB, 227 * KIB),
}
"""By generation of a data sheet. Of Ampere it is A100 and its like; cards of that generation for games have less."""
DEVICES = {sheet.name: sheet for sheet in SHEETS if sheet.generation.split(" (")[0] in LIMITS}


class Block(NamedTuple):
    """threads of a block, registers of a thread, bytes of shared memory of a block."""

    threads: int
    registers: int
    shared: int


def limits_of(sheet: Sheet) -> Limits:
    return LIMITS[sheet.generation.split(" (")[0]]


def up(value: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-value // step) * step


def blocks_by(limits: Limits, block: Block) -> dict[str, int]:
    """Blocks of an SM that each resource has room for. The smallest counts."""
    warps = up(block.threads, WARP) // WARP
    of_a_warp = up(max(block.registers, 1) * WARP, REGISTERS_AT_ONCE)
    with_registers = limits.registers // PARTS // of_a_warp * PARTS
    room = block.shared <= limits.shared_of_one
    return {
        "warps": limits.warps // warps,
        "registers": with_registers // warps,
        "shared memory": room * limits.shared // up(block.shared + RESERVED, SHARED_AT_ONCE),
        "blocks": limits.blocks,
    }


class Occupancy(NamedTuple):
    """blocks: on an SM at once. share: of its warps. limit: what there is no more of."""

    blocks: int
    share: float
    limit: str


def occupancy(limits: Limits, block: Block) -> Occupancy:
    by = blocks_by(limits, block)
    limit = min(by, key=lambda name: by[name])
    return Occupancy(by[limit], by[limit] * up(block.threads, WARP) / WARP / limits.warps, limit)


def waves(blocks: int, at_once: int) -> tuple[int, float]:
    """Waves of a launch of `blocks`, of which the device runs `at_once`; the share of their places that are used."""
    count = -(-blocks // at_once)
    return count, blocks / (count * at_once)


def main() -> None:
    parser = argparse.ArgumentParser(description="Occupancy and waves of a kernel.")
    parser.add_argument("device", nargs="?", choices=DEVICES)
    for name, default in (("threads", 128), ("registers", 32), ("shared", 0), ("blocks", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    if given.device is None:
        print(
            "device      generation       capability  SMs  warps  blocks  registers  shared KiB  of a block"
        )
        for sheet in DEVICES.values():
            name, of = sheet.generation.split(" (")[0], limits_of(sheet)
            print(f"{sheet.name:<12}{name:<17}{of.capability:<10}{sheet.units:>5}{of.warps:>7}{of.blocks:>8}"
                  f"{of.registers:>11,}{of.shared // KIB:>12}{of.shared_of_one // KIB:>12}")  # fmt: skip
        return
    sheet = DEVICES[given.device]
    block = Block(given.threads, given.registers, given.shared)
    for name, count in blocks_by(limits_of(sheet), block).items():
        print(f"{name:<14} room for {count:>2} blocks")
    found = occupancy(limits_of(sheet), block)
    print(f"occupancy {found.share:.0%}: {found.blocks} blocks per SM, limited by {found.limit}")
    if given.blocks and found.blocks:
        at_once = found.blocks * sheet.units
        count, used = waves(given.blocks, at_once)
        print(
            f"{sheet.units} SMs run {at_once:,} blocks at once: {count} waves, {used:.1%} of their places used"
        )


if __name__ == "__main__":
    main()
