"""Load, limit and quieten code that is not ours: functions of users, and libraries."""

import ast
import contextlib
import ctypes
import difflib
import hashlib
import importlib
import importlib.util
import logging
import os
import re
import sys
import threading
import traceback
import warnings
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from headrace.errors import HeadraceError, MissingExtraError, RewardError

MAX_DETAIL_CHARS = 1500
TEMPLATE_S = 10.0  # a chat template that takes longer is taken to run for ever
LOADED_FROM: set[str] = set()  # folders


def load_function(spec: str, setting: str, error: type[HeadraceError]) -> Callable[..., Any]:
    """The function that `spec` names: 'module:function' or 'path/to/file.py:function'.

    The working directory is searched for modules, too, and a file may import the files beside it.
    Problems are raised as `error`, with the name of the `setting`.
    """
    place, _, name = spec.rpartition(":")
    if not place or not name:
        raise error(f"{setting} = '{spec}': expected 'module:function' or 'path/to/file.py:function'")
    path = Path(os.path.expanduser(place)) if names_file(place) else None
    if path is not None and not path.is_file():
        raise error(f"{setting}: there is no file {path.absolute()}")
    try:
        # a console script does not search the working directory by itself
        folder = str(Path.cwd() if path is None else path.resolve().parent)
        if folder not in sys.path:
            sys.path.append(folder)
            LOADED_FROM.add(os.path.realpath(folder))
        module = importlib.import_module(place) if path is None else _load_file(path.resolve())
    except (Exception, SystemExit) as wrong:  # importing runs the user's code
        told = f"'{place}' cannot be imported:\n{short_traceback(wrong)}"
        # the module itself is missing, or a package it is in, and not something that it imports
        if path is None and isinstance(wrong, ModuleNotFoundError) and f"{place}.".startswith(f"{wrong.name}."):
            told = f"there is no module '{place}' ({wrong})"
        raise error(f"{setting}: {told}") from wrong
    if (found := getattr(module, name, None)) is None:
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("__")]
        near = difflib.get_close_matches(name, functions, n=1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        raise error(f"{setting}: '{place}' has no function '{name}'{hint}")
    if not callable(found):
        raise error(f"{setting}: '{name}' in '{place}' is a {type(found).__name__}, not a function")
    return found  # type: ignore[no-any-return]


def load_optional(module: str, library: str, extra: str) -> Any:
    """Import `module`, which needs `library`; if that is missing, name the `extra` that has it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != library:
            raise
        raise MissingExtraError(library, extra) from error


@contextlib.contextmanager
def quiet(logger_name: str, warning: str = "") -> Iterator[None]:
    """Inside, the logger reports errors only; warnings that begin with `warning` are ignored."""
    logger = logging.getLogger(logger_name)
    before = logger.level
    with warnings.catch_warnings():
        if warning:
            warnings.filterwarnings("ignore", message=warning)
        # A level this high may have been set here by another thread, which will restore it.
        if before < logging.ERROR:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            if before < logging.ERROR:
                logger.setLevel(before)


class TooLongError(HeadraceError):
    """A user's code ran longer than its limit."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TooLongError in the block after `seconds`, at the next instruction; in any thread."""
    thread_id, lock, over = threading.get_ident(), threading.Lock(), threading.Event()

    def interrupt() -> None:
        while not over.wait(seconds):  # Python drops an exception that is raised in a destructor: then again
            with lock:
                if not over.is_set():  # the C function makes the exception from its class
                    raised = ctypes.py_object(TooLongError)
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), raised)

    threading.Thread(target=interrupt, daemon=True).start()
    try:
        yield
    except TooLongError as error:
        raise TooLongError(f"it did not come to an end in {seconds:g} s") from error
    finally:
        with lock:
            over.set()


def names_file(place: str) -> bool:
    """Whether the part before the colon is a file, not a module."""
    return place.endswith(".py") or "/" in place or os.sep in place


def names_function(agent: str) -> bool:
    """Whether it is file.py:function or module:function, not a command with colons."""
    return ":" in agent and not any(map(str.isspace, agent)) and agent.rpartition(":")[2].isidentifier()


@cache
def gpus_said(spec: str) -> float:
    """The number in a line `GPUS = 0.5` of the function's file, which is not run for that, or 0."""
    place, lines, value = spec.rpartition(":")[0], list[ast.stmt](), "0"
    with contextlib.suppress(OSError, SyntaxError, ValueError):  # loading it says what is wrong
        lines = ast.parse(Path(os.path.expanduser(place)).read_bytes()).body if names_file(place) else []
    for line in lines:
        if isinstance(line, ast.Assign | ast.AnnAssign) and line.value:
            target = line.target if isinstance(line, ast.AnnAssign) else line.targets[0]
            value = ast.unparse(line.value) if ast.unparse(target) == "GPUS" else value
    if not re.fullmatch(r"0?\.\d+|\d+(\.0)?", value):
        told = "is neither a share of a GPU, such as 0.5, nor a whole number"
        raise RewardError(f"{place}: GPUS = {value} {told}")
    return float(value)


def source_hash(spec: str) -> str:
    """A digest of the function's file; empty if `spec` names no readable file."""
    place, _, _ = spec.rpartition(":")
    with contextlib.suppress(OSError):
        return hashlib.sha256(Path(place).read_bytes()).hexdigest() if names_file(place) else ""
    return ""


def search_path() -> list[str]:
    """The module search path for a process with user code, as absolute paths.

    The standard library comes first, the working directory and the folder of the main script come
    last. So a `types.py` of the user hides no library.
    """
    library, users = os.path.dirname(os.path.realpath(os.__file__)), user_folders()

    def rank(folder: str) -> int:
        folder = os.path.realpath(folder)
        return 0 if folder in (library, os.path.join(library, "lib-dynload")) else 1 + (folder in users)

    return sorted(map(os.path.abspath, sys.path), key=rank)


def user_folders() -> set[str]:
    """The working directory, the folder of the main script, and those of users' files that were loaded here."""
    home = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    script = getattr(sys.modules["__main__"], "__file__", None)
    folders = {os.path.realpath(os.getcwd())} | ({os.path.dirname(os.path.realpath(script))} if script else set())
    return (folders | LOADED_FROM) - {home}


def short_traceback(error: BaseException) -> str:
    return "".join(traceback.format_exception(error, limit=-3)).strip()[-MAX_DETAIL_CHARS:]


def _load_file(path: Path) -> ModuleType:
    name = f"headrace_user_{path.stem}_{zlib.crc32(str(path).encode()):08x}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up by name
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
