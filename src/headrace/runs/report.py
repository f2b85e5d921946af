"""What commands print and the page shows, described once; and how numbers and times are written."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple, Self


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of text under column titles. `numeric` holds the indices of right-aligned columns."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    numeric: Collection[int] = ()

    @classmethod
    def of(cls, lines: Sequence[Mapping[str, str]], **more: Any) -> Self:
        """A table of lines that each have their cells by column."""
        return cls(columns=list(lines[0]) if lines else (), rows=[list(line.values()) for line in lines], **more)


class Section(NamedTuple):
    """Facts (name and value), then tables, then sentences: shown in that order."""

    title: str = ""
    facts: tuple[tuple[str, str], ...] = ()
    tables: tuple[Table, ...] = ()
    sentences: tuple[str, ...] = ()


class Report(NamedTuple):
    """What a command or a page tells."""

    title: str
    sections: tuple[Section, ...]


def count(number: int, noun: str) -> str:
    """`1 token`, `2,000 tokens`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def short(number: float) -> str:
    """A number in a few characters: `0.123`, `2,080`, `81.9 k`, `1.2 M`."""
    for unit, size, least in (("G", 1e9, 1e9), ("M", 1e6, 1e6), ("k", 1e3, 1e4)):
        if abs(number) >= least:
            return f"{number / size:{',.0f' if abs(number) >= 100 * size else '.3g'}} {unit}"
    return f"{number:,.0f}" if abs(number) >= 100 or number == int(number) else f"{number:.3g}"


def or_dash(value: float | None, form: str = "") -> str:
    """In this format, or else as `short` writes it; a dash for what is not known."""
    return "-" if value is None else f"{value:{form}}" if form else short(value)


def percent(share: float | None, digits: int = 0) -> str:
    """`83%`; a dash for what is not known."""
    return "-" if share is None or math.isnan(share) else f"{share:.{digits}%}"


def dollars(amount: float) -> str:
    """To the cent, or to two digits where that would be nothing."""
    return f"${amount:,.2f}" if amount >= 0.1 or amount == 0 else f"${amount:.2g}"


def seconds(value: float, digits: int = 3) -> str:
    """A measured time: `0.0123 s`, `1.31 s`."""
    return f"{value:,.{digits}g} s"


def duration(value_s: float) -> str:
    """How long something took: `42 s`, `3 min 20 s`, `2 h 05 min`."""
    if value_s < 60:
        return f"{value_s:.0f} s"
    minutes, rest_s = divmod(round(value_s), 60)
    hours, rest_min = divmod(minutes, 60)
    return f"{hours} h {rest_min:02d} min" if hours else f"{minutes} min {rest_s:02d} s"


def ago(then: datetime) -> str:
    """`12 s ago`, `5 min ago`, `3 h ago`, `4 days ago`."""
    passed_s = max(0.0, (datetime.now() - then).total_seconds())
    for unit, unit_s in (("days", 86_400), ("h", 3600), ("min", 60)):
        if passed_s >= 2 * unit_s:
            return f"{passed_s / unit_s:.0f} {unit} ago"
    return f"{passed_s:.0f} s ago"


def printable(text: str) -> str:
    """Control characters spelt out: what a policy writes must not steer the reader's terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)
