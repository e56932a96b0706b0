"""Grades an exercise of the lectures, and says of each function what is wrong.

python examples/lectures/exercises/grade.py NUMBER [FILE]

NUMBER is that of the lecture's page, such as 06. FILE is graded instead of the exercise's own, for example its
solution. `checks/` has a function `check_NAME` for each function NAME that is to be written. It gets that function as a
`Graded`, and ends at the first thing that is wrong.
"""

from __future__ import annotations

import math
import runpy
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

HERE = Path(__file__).resolve().parent
PATIENCE_S = 20  # for all checks of a function


class Wrong(Exception):
    """What is wrong with a function, in a sentence."""


class Graded:
    """A function of an exercise. Calling it returns what it returns; an error of its own is said to be wrong.

    others: all functions of the exercise, by name.
    """

    def __init__(self, name: str, defined: Mapping[str, Any], file: Path):
        self.name, self.defined, self.file = name, defined, file

    @property
    def others(self) -> dict[str, Graded]:
        return {
            name: Graded(name, self.defined, self.file) for name, f in self.defined.items() if callable(f)
        }

    def __call__(self, *arguments: Any) -> Any:
        function = self.defined.get(self.name)
        if not callable(function):
            raise Wrong(f"{self.file.name} has no function of this name")
        try:
            return function(*arguments)
        except NotImplementedError:
            raise Wrong("not written yet") from None
        except Wrong:  # it takes too long
            raise
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            line = [frame.lineno for frame in frames if Path(frame.filename) == self.file][-1:]
            where = f", in line {line[0]}" if line else ""
            what = f"{type(error).__name__}: {error}".rstrip(": ")
            raise Wrong(f"{self.called(*arguments)} ends with {what}{where}") from None

    def called(self, *arguments: Any) -> str:
        """The call as a text."""
        return f"{self.name}({', '.join(map(short, arguments))})"

    def gives(self, wanted: Any, *arguments: Any, why: str = "") -> None:
        """Checks what a call returns: equal, for numbers to nine digits."""
        found = self(*arguments)
        if not same(found, wanted):
            reason = f": {why}" if why else ""
            self.wrong(f"{self.called(*arguments)} is {short(found)}, expected {short(wanted)}{reason}")

    def wrong(self, why: str) -> NoReturn:
        raise Wrong(why)


def same(found: Any, wanted: Any) -> bool:
    """Equal values of the same shape; numbers to nine digits."""
    if hasattr(found, "tolist") and not hasattr(wanted, "tolist"):  # numbers of NumPy are numbers, too
        return same(found.tolist(), wanted)
    if hasattr(wanted, "tolist"):  # an array or a tensor
        return getattr(found, "shape", None) == wanted.shape and same(found.tolist(), wanted.tolist())
    if isinstance(wanted, Mapping):
        return isinstance(found, Mapping) and found.keys() == wanted.keys() and all(
            same(found[key], value) for key, value in wanted.items()
        )  # fmt: skip
    if isinstance(wanted, Sequence) and not isinstance(wanted, str):
        return (
            isinstance(found, Sequence)
            and len(found) == len(wanted)
            and all(same(f, w) for f, w in zip(found, wanted, strict=True))
        )
    if isinstance(wanted, float) or isinstance(found, float):
        if not isinstance(found, int | float) or not isinstance(wanted, int | float):
            return False
        return found == wanted or math.isclose(found, wanted, rel_tol=1e-9, abs_tol=1e-12)
    return found == wanted


def short(value: Any) -> str:
    """A value for people: numbers with six digits, long ones cut."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if hasattr(value, "tolist"):
        return short(value.tolist())
    if isinstance(value, tuple | list):
        left, right = "[]" if isinstance(value, list) else "()"
        text = f"{left}{', '.join(map(short, value))}{right}"
    else:
        text = repr(value)
    return text if len(text) <= 160 else f"{text[:150]} ... "


def too_long(*_: object) -> NoReturn:
    raise Wrong(f"does not end within {PATIENCE_S} s")


def grade(number: str, file: Path | None = None) -> tuple[list[str], bool]:
    """The lines that say how an exercise went, and whether all is right."""
    found = sorted(HERE.glob(f"{number}_*.py"))
    if len(found) != 1:
        numbers = ", ".join(sorted(path.name[:2] for path in HERE.glob("[0-9]*_*.py")))
        return [f"there is no exercise {number!r}; there are: {numbers}"], False
    exercise = (file or found[0]).resolve()
    checks = runpy.run_path(str(HERE / "checks" / found[0].name))
    signal.signal(signal.SIGALRM, too_long)
    signal.alarm(PATIENCE_S)
    try:
        defined = runpy.run_path(str(exercise))
    except (Exception, SystemExit) as error:
        return [f"{exercise.name} cannot be run: {type(error).__name__}: {error}"], False
    finally:
        signal.alarm(0)
    lines, right = [exercise.name], 0
    names = [name.removeprefix("check_") for name in checks if name.startswith("check_")]
    for name in names:
        signal.alarm(PATIENCE_S)
        try:
            checks[f"check_{name}"](Graded(name, defined, exercise))
        except Wrong as wrong:
            lines.append(f"  {'no':<4} {name}: {wrong}")
        except Exception as error:  # of a check, which could not use what it got
            what = f"{type(error).__name__}: {error}"
            lines.append(
                f"  {'no':<4} {name}: what it returns is not of the kind that its text asks for ({what})"
            )
        else:
            lines.append(f"  {'yes':<4} {name}")
            right += 1
        finally:
            signal.alarm(0)
    return [*lines, f"{right} of {len(names)} functions are right"], right == len(names)


def main(arguments: list[str]) -> int:
    if not 1 <= len(arguments) <= 2:
        print("usage: python examples/lectures/exercises/grade.py NUMBER [FILE]")
        return 2
    lines, right = grade(arguments[0], Path(arguments[1]) if arguments[1:] else None)
    print("\n".join(lines))
    return int(not right)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
