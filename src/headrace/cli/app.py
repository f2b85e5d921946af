"""What all commands share: the application, messages instead of tracebacks, settings, and what they print on."""

import gc
import importlib
import json
import os
import signal
import sys
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from textwrap import TextWrapper
from typing import Annotated, Any

import rich.table
import typer
from pydantic_core import to_jsonable_python
from rich.console import Console, JustifyMethod, RenderableType
from rich.padding import Padding
from rich.text import Text
from typer import Argument, Option
from typer.core import TyperGroup

from headrace import __version__
from headrace.config import Config
from headrace.config_file import DEMO, load_config
from headrace.errors import HeadraceError, HungError
from headrace.runs.report import Report, Table, printable

# For terminals that know no other characters than these.
ASCII = str.maketrans({"█": "#", "░": ".", "▸": ">", "→": "->", "┤": "|", "└": "+", "─": "-"})
SAMPLE_CHARS = 600  # of a prompt or an answer
TEXT_COLUMNS = 30  # characters of a column of text, before its table counts as tight


class Commands(TyperGroup):
    """All commands. What a user can mend is said without a traceback."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """~ is the home directory, also where a shell leaves it: `--out=~/file`."""
        told = []
        for word in args:
            name, equals, value = word.rpartition("=") if word.startswith("--") else ("", "", word)
            told.append(name + equals + (value if "\0" in value else os.path.expanduser(value)))
        return super().parse_args(ctx, told)

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            try:
                return super().main(*args, **kwargs)
            finally:
                if sys.stdout is not None:
                    sys.stdout.flush()
        except OSError as error:
            try:
                print(flush=True)
            except OSError:  # it takes nothing more: what is left for it is thrown away
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            else:
                raise
            if not isinstance(error, BrokenPipeError):  # `| head` has read enough
                print(f"error: the output cannot be written: {error.strerror}", file=sys.stderr)
            sys.exit(2)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except HeadraceError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            if isinstance(error, HungError):
                os._exit(2)  # the libraries' own clearing up could wait for what hangs
            raise typer.Exit(2) from error
        except KeyboardInterrupt as error:
            print("interrupted", file=sys.stderr)
            raise typer.Exit(130) from error


app = typer.Typer(cls=Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

RunDir = Annotated[Path, Argument(metavar="RUN", help="a run directory")]
Settings = Annotated[list[str] | None, Argument(metavar="[FILE.toml] [section.key=value ...]", help="settings")]
Json = Annotated[bool, Option("--json", help="for programs")]


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"headrace {__version__}")
        raise typer.Exit


Version = Annotated[bool, Option("--version", is_eager=True, callback=_print_version, help="print the version")]


@app.callback()
def headrace(version: Version = False) -> None:
    """Headrace trains language models by reinforcement learning."""


def prepare_process() -> None:
    """SIGTERM, with which clusters preempt, and SIGHUP do what Ctrl-C does; for commands, not for who imports us."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is imported: no spinning beside user code
    with suppress(ValueError):  # not in the main thread
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started in the background
            signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in (signal.SIGTERM, signal.SIGHUP):
            if number is signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(number, lambda *_: signal.raise_signal(signal.SIGINT))
    importlib.import_module("headrace.api")
    gc.freeze()  # what is imported is for ever: to look through it at each collection stops all threads for long
    gc.set_threshold(50_000, 20, 20)  # and what lives for a step is looked through less often


def settings_from(words: list[str] | None) -> Config:
    """Settings from a file, if the first word is one, and overrides.

    Without a file they start from the demo's, or from the defaults if the prompts are the user's.
    """
    words = list(words or [])
    if words and "=" not in words[0]:
        return load_config(Path(words.pop(0)), words)
    own_prompts = any(word.startswith("prompts.source=") for word in words)
    return load_config(None if own_prompts else DEMO, words)


class Paper:
    """What commands print on. Paths, commands and ids are never cut: a reader may copy them."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()
        self.fine = self.console.encoding.lower().startswith("utf")

    def report(self, report: Report) -> None:
        self.paragraph(report.title, indent=0, style="bold")
        for section in report.sections:
            self.section(section.title)
            self.facts(section.facts)
            for table in section.tables:
                if section.facts:
                    self.print()
                self.table(table)
            if section.sentences and (section.facts or section.tables):
                self.print()
            for sentence in section.sentences:
                self.paragraph(sentence, hang=2 * sentence.startswith("- "))

    def section(self, title: str, explanation: str = "") -> None:
        self.print()
        if title:
            self.print(Text.assemble((title, "bold"), (f"  {explanation}" if explanation else "", "dim")))

    def facts(self, pairs: Collection[tuple[str, str]]) -> None:
        column = max((len(name) for name, _ in pairs), default=0) + 2
        for name, value in pairs:
            self.paragraph(f"{name:<{column}}{value}", hang=column)

    def table(self, table: Table, *, indent: int = 2, whole: Collection[int] = ()) -> None:
        """Numbers and the columns in `whole` are not broken into lines; their titles are, if it is tight."""
        whole, last = {*whole, *table.numeric}, len(table.columns) - 1
        room = self.console.width - indent
        for place, name in enumerate(table.columns):
            widest = max(map(len, (name, *(row[place] for row in table.rows if place < len(row)))))
            room -= widest if place in whole else min(widest, TEXT_COLUMNS)
        apart = 2 if room >= 2 * last else 1
        shown = rich.table.Table(box=None, pad_edge=False, padding=(0, apart, 0, 0))
        for place, name in enumerate(table.columns):
            title = name.replace(" ", "\n") if place in whole and room < last else name
            side: JustifyMethod = "right" if place in table.numeric else "left"
            shown.add_column(Text(title), justify=side, no_wrap=place in whole, overflow="fold")
        for row in table.rows:
            shown.add_row(*map(Text, row))
        self.indented(shown, indent)

    def paragraph(self, text: str, *, indent: int = 2, hang: int = 0, style: str = "") -> None:
        wrap = TextWrapper(self.console.width, break_long_words=False, break_on_hyphens=False)
        wrap.initial_indent, wrap.subsequent_indent = " " * indent, " " * (indent + hang)
        for line in wrap.wrap(text):
            self.line(line, style=style)

    def line(self, text: str, *, style: str = "") -> None:
        self.print(Text(text, style=style), one_line=True)

    def sample(self, name: str, reward: float | None, fate: str, texts: Mapping[str, str]) -> None:
        given = "no reward" if reward is None else f"reward {reward:.3f}"
        self.indented(Text(f"{name}: {given}, {fate}", style="dim"))
        for name, text in texts.items():
            text = printable(text)
            text = text if len(text) <= SAMPLE_CHARS else f"{text[:SAMPLE_CHARS]}... ({len(text):,} characters)"
            self.indented(Text(f"{name}  {text}", style="dim", overflow="fold"), 4)

    def commands(self, commands: Mapping[str, str]) -> None:
        if commands:
            self.section("next")
        for command, effect in commands.items():
            self.line(f"  {f'headrace {command}':<40}  # {effect}" if effect else f"  headrace {command}")

    def indented(self, content: RenderableType, indent: int = 2) -> None:
        self.print(Padding(content, (0, 0, 0, indent), expand=False))

    def print(self, content: RenderableType = "", *, one_line: bool = False) -> None:
        self.console.print(content, highlight=False, soft_wrap=one_line)

    def drawn(self, text: str) -> str:
        return text if self.fine else text.translate(ASCII)


def tell(report: Report, for_programs: dict[str, Any], as_json: bool) -> None:
    if as_json:
        plain = to_jsonable_python(for_programs, fallback=vars, inf_nan_mode="null")
        print(json.dumps(plain, indent=1))
    else:
        Paper().report(report)
