"""The terms of a prediction as lines of text."""

from __future__ import annotations

from collections.abc import Iterator

from fivefold.plan.terms import Asked, Term


def lines(asked: Asked, found: dict[str, list[Term]]) -> Iterator[str]:
    """The terms as lines of text."""
    titles = {
        "states": f"states, convention {asked.how.states}",
        "activations": f"activations, convention {asked.how.activations}",
        "flops": "FLOPs",
    }
    for section, some in found.items():
        yield ""
        yield titles.get(section, section)
        rows = [(term.name, term.formula, _value(term), term.note) for term in some]
        name, formula, value, _ = (max(map(len, column)) for column in zip(*rows, strict=True))
        for row in rows:
            yield f"  {row[0]:{name}}  {row[1]:{formula}}  {row[2]:>{value}}  {row[3]}".rstrip()


def _value(term: Term) -> str:
    """A value with its unit. Bytes are decimal, as in the papers, and binary, as in the rest of a plan."""
    match term.unit:
        case "bytes":
            return f"{scaled(term.value, 1000, 'B')} ({scaled(term.value, 1024, 'iB')})"
        case "parameters" | "elements" | "devices":
            return f"{term.value:,.0f} {term.unit}"
        case "share":
            return f"{100 * term.value:.1f}%"
        case "days":
            return f"{term.value:,.1f} days"
        case "FLOPs":
            return f"{term.value:.3g} FLOPs"
        case "FLOP/s":
            return f"{term.value / 1e12:,.4g} TFLOP/s"
        case _:
            return f"{term.value:.4g} {term.unit}"


def scaled(size: float, base: int, unit: str) -> str:
    """Bytes with a prefix, decimal (base 1000, unit "B") or binary (1024, "iB"). Giga stays until ten tera: the papers'
    states are thousands of GB."""
    for prefix, power, least in (("T", 4, 10), ("G", 3, 1), ("M", 2, 0.1), ("K", 1, 0)):
        if size >= least * base**power:
            return f"{size / base**power:,.1f} {prefix}{unit}"
    raise AssertionError(size)
