"""Compression of gradient sums as data: what each compressor puts on the wire and keeps, by the shapes of a bucket's
parameters. `comm/compress` executes these sizes, and the planner reads them. No torch."""

from fivefold.schedules.compression.compressor import Compressor, Wire
from fivefold.schedules.compression.registry import NONE, TEXTS, compressor, problem
