"""The values of a pickle as tuples, lists, numbers and texts. Nothing is imported or called.

A pickle is a program for a machine with a stack; Python's `pickletools` explains its opcodes. `values` knows those of
PyTorch's checkpoints. Names become texts if they are on a list, and what a pickle would call becomes a `Made`.
Dictionaries are lists of (key, value), so nothing of a stranger is hashed.
"""

from __future__ import annotations

import pickletools
from collections.abc import Set
from typing import Any, NamedTuple

from fivefold.errors import shortened

MOST_STACK = 1 << 16
"""Values that wait for their list, tuple or object. Pickles fill lists in pieces of 1,000."""
_COUNTS = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3, "APPEND": 1, "SETITEM": 2}
"""Values that an opcode takes. Others take those behind the last mark."""


class Name(str):
    """A class or function, as "MODULE NAME"."""


class Made(NamedTuple):
    """What a pickle would make: `name` called with `args`. state: what it would set then."""

    name: str
    args: Any
    state: list[Any]


def values(content: bytes, names: Set[str]) -> Any:
    """What a pickle holds. names: all that it may name. Raises ValueError, LookupError, TypeError or AttributeError: it
    is damaged, or does something else."""
    stack, marks, memo = list[Any](), [0], list[Any]()

    def pop(count: int | None) -> list[Any]:
        start = marks.pop() if count is None else len(stack) - count
        if start < marks[-1]:
            raise IndexError("its stack is empty")
        found = stack[start:]
        del stack[start:]
        return found

    given: Any
    for opcode, given, at in pickletools.genops(content):
        match opcode.name:
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[given])
            case "MEMOIZE" | "BINPUT" | "LONG_BINPUT":
                place = len(memo) if given is None else given
                if place > len(memo):
                    raise IndexError("its memo has gaps")
                memo[place : place + 1] = stack[-1:]
            case "BININT" | "BININT1" | "BININT2" | "LONG1" | "BINUNICODE" | "SHORT_BINUNICODE" | "NONE":
                stack.append(given)
            case "EMPTY_TUPLE" | "TUPLE" | "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack.append(tuple(pop(_COUNTS.get(opcode.name))))
            case "EMPTY_LIST" | "EMPTY_DICT":
                stack.append([])
            case "APPEND" | "APPENDS" | "SETITEM" | "SETITEMS" as name:
                items = pop(_COUNTS.get(name))
                stack[-1].extend(items if "APPEND" in name else zip(items[::2], items[1::2], strict=True))
            case "REDUCE" | "NEWOBJ":
                name, args = pop(2)
                if not isinstance(name, Name):
                    raise TypeError("it calls something that is not a name")
                stack.append(Made(name, args, []))
            case "BUILD":
                (state,) = pop(1)
                stack[-1].state.append(state)
            case "GLOBAL" | "STACK_GLOBAL":
                name = " ".join(pop(2)) if given is None else given
                if name not in names:
                    raise ValueError(f"it names {shortened(name, 80)}, which no checkpoint needs")
                stack.append(Name(name))
            case "NEWTRUE" | "NEWFALSE":
                stack.append(opcode.name == "NEWTRUE")
            case "BINPERSID":
                stack.append(Made("persistent", pop(1)[0], []))
            case "MARK":
                marks.append(len(stack))
            case "PROTO" | "FRAME" | "STOP":
                pass
            case _:
                raise ValueError(f"it has the opcode {opcode.name} at byte {at}, which no checkpoint needs")
        if len(stack) + len(marks) > MOST_STACK:
            raise ValueError(f"more than {MOST_STACK:,} values wait on its stack")
    (found,) = stack
    return found
