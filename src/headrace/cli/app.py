"""What all commands share: the application, messages instead of tracebacks, settings from words."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option
from typer.core import TyperGroup

from headrace.config import Config
from headrace.config_file import DEMO, load_config
from headrace.errors import HeadraceError, HungError


class Commands(TyperGroup):
    """All commands. Errors meant for the user are shown as a message, without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except HungError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            os._exit(2)  # the libraries' own clearing up could wait for what hangs
        except HeadraceError as error:
            print(f"error: {error}", file=sys.stderr)
            raise typer.Exit(2) from error
        except KeyboardInterrupt as error:
            print("interrupted", file=sys.stderr)
            raise typer.Exit(130) from error


app = typer.Typer(
    cls=Commands,
    help="Headrace trains language models by reinforcement learning.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

RunDir = Annotated[Path, Argument(metavar="RUN", help="a run directory")]
Settings = Annotated[list[str] | None, Argument(metavar="[FILE.toml] [section.key=value ...]", help="settings")]
Json = Annotated[bool, Option("--json", help="for programs")]


def settings_from(words: list[str] | None) -> Config:
    """Settings from a file, if the first word is one, and overrides.

    Without a file they start from the demo's; where the prompts are the user's own, from the defaults.
    """
    words = list(words or [])
    if words and "=" not in words[0]:
        return load_config(Path(words.pop(0)), words)
    own_prompts = any(word.startswith("prompts.source=") for word in words)
    return load_config(None if own_prompts else DEMO, words)
