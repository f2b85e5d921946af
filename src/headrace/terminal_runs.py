"""Runs, one run and one trajectory in a terminal: what `headrace runs` and `headrace show` print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from headrace.config_file import changed
from headrace.ledger.journal import Restart
from headrace.ledger.ledger import Amount, Books
from headrace.runs.facts import RunFacts, RunState
from headrace.runs.show import FINISH_WORDS, RunDetails, TokenTexts, TrajectoryDetails, fate, why_dropped
from headrace.terminal import Terminal
from headrace.types import FinishReason, Row, Trajectory

MOST_PROBLEMS = 3  # told at length below the list of runs
TOKEN_COLUMNS = 40  # characters for a token with its number, log-prob and version
LONGEST_WORD = 14  # of a token's text, with its quotes


class RunsTerminal(Terminal):
    """Shows what runs left on disk."""

    def runs(self, found: Sequence[RunFacts]) -> None:
        """A line for each, and below what can be done about those that did not finish."""
        name, state = Column("run", overflow="fold"), Column("state", no_wrap=True)
        numbers = [Column(title, justify="right") for title in ("steps", "held-out", "restarts", "trained")]
        table = Table(name, state, *numbers, Column("written", no_wrap=True), box=None, pad_edge=False)
        for facts in found:
            cells = [f"{facts.steps}/{facts.wanted_steps}", self._scores(facts).replace(" ", "")]
            cells += [str(facts.num_restarts or "-"), _short(facts.trained_tokens)]
            if facts.state is RunState.UNREADABLE:
                cells = [""] * len(cells)
            table.add_row(Text(facts.path.name or str(facts.path)), facts.state, *cells, _ago(facts.written))
        self._print(table)
        lost = [f for f in found if f.state in (RunState.STOPPED, RunState.UNREADABLE) and not f.can_be_resumed]
        for facts in lost[:MOST_PROBLEMS]:
            self._print()
            self._paragraph(f"{facts.path.name}: {self._standing(facts)}")
        if len(lost) > MOST_PROBLEMS:
            self._print()
            self._paragraph(f"... and {len(lost) - MOST_PROBLEMS} more; `headrace show` says what is wrong with each")
        self._next([("resume", facts.path, "") for facts in found if facts.can_be_resumed])

    def run(self, details: RunDetails) -> None:
        """A run at length."""
        facts, config = details.facts, details.config
        settings = [text for text in changed(config) if not text.startswith("run.dir=")]
        steps = ", ".join(f"step {step}" for step in facts.checkpoints)
        self._print(Text(str(facts.path), style="bold"))
        self._pairs(
            {
                "state": self._standing(facts),
                "set": "  ".join(settings) or "every setting is at its default",
                "held-out": self._scores(facts),
                "checkpoints": f"of {steps}" if steps else "none",
                "written": f"{facts.written:%Y-%m-%d %H:%M:%S} ({_ago(facts.written)})",
            }
        )
        self._show_restarts(details.restarts)
        if details.books is not None:
            self._show_accounts(details.books, details.examples)
        self._show_rows(details.rows)
        examples = [details.examples[account] for account in sorted(details.examples, reverse=True)]  # trained first
        more = [("resume", facts.path, "")] if facts.can_be_resumed else []
        self._next([*more, *(("show", facts.path, f" --trajectory {id}") for id in examples[:1])])

    def trajectory(self, found: TrajectoryDetails, texts: TokenTexts | None) -> None:
        """One trajectory, token by token."""
        self._print(Text(f"trajectory {found.id}", style="bold"))
        parts = "  ".join(f"{name} {value:g}" for name, value in found.reward_parts.items())
        finish = f"{found.finish}: {FINISH_WORDS[FinishReason(found.finish)]}" if found.finish else "not finished"
        reward = "none" if found.reward is None else f"{found.reward:g}"
        versions = [f"version {span.version} sampled {_count(span.end - span.start, 'token')}" for span in found.spans]
        times = [f"{name} {at_s:.2f}" for name, at_s in found.times_s.items()]
        facts = {
            "fate": fate(found),
            "prompt id": found.prompt_id,
            "group": "not known" if found.serial is None else f"{found.serial}, attempt {found.attempt}",
            "finish": f"{finish}, after {_count(found.num_tokens, 'token')}",
            "reward": f"{reward}  ({parts})" if parts else reward,
            "policy": ", then ".join(versions) or "not known",
            "seconds": "  ".join(times),
        }
        self._pairs(facts)
        if found.whole is None:
            self._section("tokens")
            pruned = "buffered" in found.times_s
            why = "this old (recovery.journal_steps)" if pruned else "that never reached the buffer"
            self._paragraph(f"No tokens are kept of a trajectory {why}.")
            return
        ids, sampled = found.whole.token_ids.tolist(), found.whole.sampled.tolist()
        prompt_ids = ids[: sampled.index(True)] if True in sampled else ids
        self._show_text("prompt", texts.text(prompt_ids) if texts else f"token ids {prompt_ids}")
        self._show_text("answer", found.whole.text)
        self._show_tokens_of(found, found.whole, texts)

    # Parts of a run

    def _scores(self, facts: RunFacts) -> str:
        scores = [f"{score:.3f}" for score in (facts.score_before, facts.score_after) if score is not None]
        return f" {self._glyphs.arrow} ".join(scores) or "-"

    def _standing(self, facts: RunFacts) -> str:
        if facts.state is RunState.UNREADABLE:
            return facts.problem
        done = f"{facts.state} after step {facts.steps} of {facts.wanted_steps}"
        if facts.state is not RunState.STOPPED:
            return done
        return f"{done}; {'can be resumed' if facts.can_be_resumed else 'cannot be resumed: no checkpoint is left'}"

    def _next(self, commands: Sequence[tuple[str, Path, str]]) -> None:
        """Commands to copy: never broken into lines."""
        if commands:
            self._section("next")
        for verb, run, rest in commands:
            self._print(Text(f"  headrace {verb} {run}{rest}"), one_line=True)

    def _show_restarts(self, restarts: Sequence[Restart]) -> None:
        if not restarts:
            return
        self._section("restarts", "what each found, and did again")
        table = _table("", "at", "checkpoint", "resumed at", "taken again", "lost", "in flight")
        for r in restarts:
            again = f"{_count(r.redone_steps, 'step')}, {_count(r.retrained_tokens, 'token')}"
            lost = f"{_count(r.lost_trajectories, 'answer')}, {_count(r.lost_tokens, 'token')}"
            steps = (f"step {r.checkpoint}", f"step {r.version}")
            table.add_row(str(r.number), f"{r.at_s:,.0f} s", *steps, again, lost, r.rule)
        self._print(_indented(table))

    def _show_accounts(self, books: Books, examples: Mapping[str, str]) -> None:
        self._section("accounts", "what became of every sampled token")
        table = _table("", "tokens", "share", "answers", "mean length", "newest", numbers=4)
        dropped = sorted(books.dropped.items(), key=lambda item: -item[1].tokens)
        amounts: dict[str, tuple[str, Amount]] = {
            "generated": ("", books.generated),
            "trained": ("trained", books.trained),
            **{f"dropped: {reason}": (f"dropped:{reason}", amount) for reason, amount in dropped},
            "buffered": ("buffered", books.buffered),
            "in flight": ("", books.in_flight),
        }
        for name, (account, amount) in amounts.items():
            share = amount.tokens / books.generated.tokens if books.generated.tokens else 0.0
            length = f"{amount.tokens / amount.trajectories:.1f}" if amount.trajectories else "-"
            numbers = (f"{amount.tokens:,}", f"{share:.1%}", f"{amount.trajectories:,}", length)
            table.add_row(Text(name), *numbers, Text(examples.get(account, "")))
        self._print(_indented(table))
        if dropped:
            self._print()
        for reason, amount in dropped:
            if amount != Amount():
                self._paragraph(f"{reason}: {why_dropped(reason)}.", hang=2)

    def _show_rows(self, rows: Sequence[Row]) -> None:
        if not rows:
            return
        self._section("last rows")
        titles = ("reward", "held-out", "length", "lag", "trained", "dropped", "seconds", "wall")
        table = _table("step", *titles, numbers=len(titles) - 1)
        for row in rows:
            learnt = (f"{row.reward_mean:.3f}", "-" if row.score is None else f"{row.score:.3f}")
            tokens = (f"{row.trained_tokens:,}", f"{sum(row.dropped_tokens.values()):,}")
            lag = f"{row.lag_mean:.1f}/{row.lag_max}"
            wall = "step skipped" if row.skipped else row.stage_s.wall
            table.add_row(str(row.step), *learnt, f"{row.length_mean:.1f}", lag, *tokens, f"{row.wall_s:.2f}", wall)
        self._print(_indented(table))

    # Parts of a trajectory

    def _show_text(self, title: str, text: str) -> None:
        self._section(title)
        self._print(_indented(Text(_printable(text), overflow="fold")))

    def _show_tokens_of(self, found: TrajectoryDetails, whole: Trajectory, texts: TokenTexts | None) -> None:
        """Several tokens to a line, in reading order."""
        self._section("tokens", "" if texts else "as ids: the run's tokenizer cannot be read")
        ids = whole.token_ids.tolist()
        words = [_shortened(repr(piece)) for piece in texts.pieces(ids)] if texts else [str(id) for id in ids]
        by = [(span.version, position) for span in found.spans for position in range(span.start, span.end)]
        cells = [
            (str(number), words[position], f"{whole.logprobs[position]:.3f}", f"v{version}")
            for number, (version, position) in enumerate(by, 1)
        ]
        across = max(1, min(self.console.width // TOKEN_COLUMNS, len(cells)))
        table = Table(box=None, pad_edge=False, padding=(0, 1))
        for _ in range(across):
            table.add_column("", justify="right", no_wrap=True)
            table.add_column("token", no_wrap=True)
            table.add_column("log-prob", justify="right", no_wrap=True)
            table.add_column("policy", no_wrap=True)
        for start in range(0, len(cells), across):
            table.add_row(*(Text(cell) for token in cells[start : start + across] for cell in token))
        self._print(_indented(table))


def _table(first: str, *titles: str, numbers: int = 0) -> Table:
    """Columns without lines between them; so many after the first are of numbers."""
    table = Table(Column(first, no_wrap=True), box=None, pad_edge=False, padding=(0, 1))
    for place, title in enumerate(titles):
        table.add_column(title, justify="right" if place < numbers else "left", overflow="fold")
    return table


def _indented(content: RenderableType) -> Padding:
    return Padding(content, (0, 0, 0, 2), expand=False)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _short(number: int) -> str:
    """In a few characters."""
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= 10 * size:
            return f"{number / size:,.0f} {unit}"
    return f"{number:,}"


def _printable(text: str) -> str:
    """What a policy writes may hold control characters, and they are not for the reader's terminal to obey."""
    return "".join(char if char.isprintable() or char in "\n\t" else repr(char)[1:-1] for char in text)


def _shortened(word: str) -> str:
    return word if len(word) <= LONGEST_WORD else f"{word[: LONGEST_WORD - 3]}..."


def _ago(then: datetime) -> str:
    seconds = max(0.0, (datetime.now() - then).total_seconds())
    for unit, unit_s in (("days", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"
