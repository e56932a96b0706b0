"""Messages between training ranks. All of them go through an `Axis`."""

from fivefold.comm.agree import all_or_none, told
from fivefold.comm.axis import ALONE, Axis, Started, everyone
from fivefold.comm.execute import Beside, Summation
