"""Training: the loop, one page (`loop.py`), and what starts it.

The package shares its name with the public function `fivefold.train`, so it can be called as that function:
importing any module of the package would otherwise hide the function behind the package.
"""

import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from fivefold.train.api import train

        return train(*args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage
