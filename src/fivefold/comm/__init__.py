"""Messages between training ranks. All of them go through an `Axis`."""

from fivefold.comm.axis import ALONE, Axis, Started, all_or_none, everyone, told
from fivefold.comm.execute import Beside, Scheduled
