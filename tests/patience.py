"""How many times as long as usual tests wait, for a machine that is slow, or busy with other things."""

import os

PATIENCE = float(os.environ.get("FIVEFOLD_TEST_PATIENCE", "1"))
