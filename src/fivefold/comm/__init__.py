"""Messages between training ranks. All of them go through an `Axis`."""

from fivefold.comm.agree import all_or_none
from fivefold.comm.axis import ALONE, Axis, Started, everyone

__all__ = ["ALONE", "Axis", "Started", "all_or_none", "everyone"]
