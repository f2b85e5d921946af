"""Tables, facts and tokens as HTML. Everything that comes from a run is escaped: a policy may write anything."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple
from urllib.parse import quote, urlencode

Number = tuple[str, str, str]  # its name, the number, what it means


class Link(NamedTuple):
    """A text that leads somewhere.

    Example:
        Link("40:train-17/3", "/run/a/trajectory?id=40%3Atrain-17%2F3")
    """

    text: str
    target: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One token of a trajectory; `version` and `logprob` only where it was sampled.

    Example:
        Token(position=7, id=13, text="2", sampled=True, logprob=-0.1, version=7)
    """

    position: int
    id: int
    text: str
    sampled: bool
    logprob: float | None = None
    version: int | None = None

    @property
    def probability(self) -> float | None:
        """What the policy gave this token when it chose it."""
        return None if self.logprob is None else math.exp(min(self.logprob, 0.0))


def table(
    titles: Sequence[str],
    rows: Iterable[Sequence[str | Link]],
    *,
    numbers: Container[str] = (),
    wide: Container[str] = (),
) -> str:
    """A table that scrolls sideways if it must; columns of these titles are numbers, or not for a narrow screen."""
    kinds = ["number " * (title in numbers) + "wide" * (title in wide) for title in titles]
    head = "".join(f"<th class='{kind}'>{_shown(title)}</th>" for title, kind in zip(titles, kinds, strict=True))
    lines = (
        "".join(f"<td class='{kind}'>{_content(cell)}</td>" for cell, kind in zip(row, kinds, strict=True))
        for row in rows
    )
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<div class='scroll'><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def facts(pairs: Mapping[str, str]) -> str:
    """Names and what they are; beside each other also on a narrow screen, if they are short."""
    kind = " class='short'" if all(len(name + text) < 30 for name, text in pairs.items()) else ""
    lines = (f"<dt>{_shown(name)}</dt><dd>{_shown(text)}</dd>" for name, text in pairs.items())
    return f"<dl{kind}>{''.join(lines)}</dl>"


def numbers(shown: Iterable[Number]) -> str:
    """Numbers with their names and meanings, a box each."""
    boxes = (
        f"<section class='card'><div class='name'>{_shown(name)}</div>"
        f"<div class='value{' long' if len(value) > 9 else ''}'>{_shown(value)}</div>"
        f"<div class='says'>{_shown(says)}</div></section>"
        for name, value, says in shown
    )
    return f"<div class='numbers'>{''.join(boxes)}</div>"


def card(title: str, *content: str) -> str:
    """A box around markup."""
    return f"<section class='card'><h2>{_shown(title)}</h2>{''.join(content)}</section>"


def paragraphs(*texts: str) -> str:
    """Sentences, as text."""
    return "".join(f"<p>{_shown(text)}</p>" for text in texts)


def problem(text: str) -> str:
    """What is wrong, or missing."""
    return f"<p class='message' role='status'>{_shown(text)}</p>"


def more(title: str, *content: str) -> str:
    """Markup that is shown when somebody asks for it."""
    return f"<details><summary>{_shown(title)}</summary>{''.join(content)}</details>"


def pair(*content: str) -> str:
    """Beside each other where there is room."""
    return f"<div class='pair'>{''.join(content)}</div>"


def points(texts: Iterable[str]) -> str:
    """A list of remarks."""
    return f"<ul>{''.join(f'<li>{_shown(text)}</li>' for text in texts)}</ul>"


def line_of(links: Iterable[Link]) -> str:
    """Links beside each other."""
    return f"<div class='line'>{''.join(map(_content, links))}</div>"


def text_block(text: str) -> str:
    """Text as it was written, spaces and lines too."""
    return f"<pre>{_shown(text)}</pre>"


def tokens(shown: Sequence[Token]) -> str:
    """Tokens in reading order: the surer the policy was, the paler; what it did not write is grey."""
    parts, version = [], None
    for token in shown:
        if token.version is not None and token.version != version:
            parts.append(f"<sup class='version'>v{token.version}</sup>")
            version = token.version
        text = _shown(token.text).replace("\n", "⏎<br>").replace("\t", "⇥\t") or "∅"
        if not token.sampled or token.probability is None:
            parts.append(f"<span class='token given' title='token {token.position}: given'>{text}</span>")
            continue
        surprise = round(0.75 * (1.0 - token.probability), 3)
        title = f"token {token.position}, id {token.id}: log-prob {token.logprob:.3f}, version {token.version}"
        parts.append(f"<span class='token' style='--surprise:{surprise}' title='{title}'>{text}</span>")
    return f"<div class='tokens'>{''.join(parts)}</div>"


def token_table(shown: Sequence[Token]) -> str:
    """The same, one token to a line."""
    titles = ("place", "token", "id", "log-prob", "probability", "version", "mask")
    rows = [
        (
            str(token.position),
            repr(token.text),
            str(token.id),
            "" if token.logprob is None else f"{token.logprob:.3f}",
            "" if token.probability is None else f"{token.probability:.1%}",
            "" if token.version is None else str(token.version),
            "sampled" if token.sampled else "given",
        )
        for token in shown
    ]
    return table(titles, rows, numbers=set(titles) - {"token", "mask"}, wide=("id", "mask"))


def address(*parts: str, **query: object) -> str:
    """An address on this site; what is None is left out of the query."""
    path = "/" + "/".join(quote(part, safe="") for part in parts)
    given = {name: value for name, value in query.items() if value is not None}
    return f"{path}?{urlencode(given)}" if given else path


def printable(text: str) -> str:
    """Without characters that a screen would obey instead of show."""
    return "".join(char if char.isprintable() or char in "\n\t" else repr(char)[1:-1] for char in text)


def short(number: float) -> str:
    """A large number in a few characters."""
    for unit, size, least in (("G", 1e9, 1e9), ("M", 1e6, 1e6), ("k", 1e3, 1e4)):
        if abs(number) >= least:
            return f"{number / size:,.0f} {unit}" if abs(number) >= 100 * size else f"{number / size:.3g} {unit}"
    return f"{number:,.0f}" if abs(number) >= 100 or number == int(number) else f"{number:.3g}"


def dollars(amount: float) -> str:
    """To the cent, or to two digits where that would be nothing."""
    return f"${amount:,.2f}" if amount >= 0.1 or amount == 0 else f"${amount:.2g}"


def duration(seconds: float) -> str:
    """Seconds as people say them."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def _content(cell: str | Link) -> str:
    return f'<a href="{escape(cell.target)}">{_shown(cell.text)}</a>' if isinstance(cell, Link) else _shown(cell)


def _shown(text: str) -> str:
    return escape(printable(text))
