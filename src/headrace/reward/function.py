"""The setting `reward.function` as a RewardFunction, and what it returns as a Score.

Optional libraries of built-in functions are loaded by the files of their names (`builtin_*.py`).
"""

import ast
import asyncio
import contextlib
import difflib
import hashlib
import inspect
import math
import os
import pickle
import re
import reprlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from headrace.errors import ConfigError, RewardError, UnavailableError
from headrace.types import Command, Completion, DropReason, Group, Score
from headrace.user_code import MAX_DETAIL_CHARS, load_function, load_optional, short_traceback, source_hash

Reward = Callable[[Completion], float]
Judged = Completion | Group | Command  # by a reward function, a filter or an environment
Mode = Literal["single", "async", "batch"]  # with one completion, awaited, or with a list

BUILTIN_NAMES = ("exact", "regex:PATTERN", "math")
BATCH_PARAMETER = "completions"
STEPS = "steps"  # a part of the reward that is given step by step
# Temporary errors of Python, requests, httpx and openai, by name: a function may use any or none.
_PASSING = {"ConnectionError", "TimeoutError", "Timeout", "TransportError"}
_PASSING |= {"APIConnectionError", "RateLimitError", "InternalServerError"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFunction:
    """A reward function, or a filter, ready to be called."""

    name: str  # also the name of the reward part, if the function returns a plain number
    call: Callable[[Any], Any]
    mode: Mode = "single"
    read: Callable[[Any], Score] | None = None  # an environment's or agent's verdict; None: `read_verdict` does

    def invoke(self, completions: Sequence[Judged]) -> Any:
        """One call, whose result may be awaitable. Only BATCH takes several completions."""
        return self.call(list(completions) if self.mode == "batch" else completions[0])

    def scores(self, verdict: Any, num_items: int) -> list[Score]:
        if self.mode == "batch":
            return read_verdicts(verdict, self.name, num_items)
        return [self.read(verdict) if self.read else read_verdict(verdict, self.name)]

    async def judge(self, read: Callable[[], Judged], limit_s: float, *caught: type[BaseException]) -> Score:
        """One call for what `read` gives. What it raises of `caught` is a failure.

        `limit_s` limits coroutines.
        """
        began, limit = time.perf_counter(), asyncio.timeout(limit_s)
        try:
            async with limit:
                verdict = self.invoke([read()])
                if inspect.isawaitable(verdict):
                    verdict = await verdict
            score = self.scores(verdict, 1)[0]
        except caught as error:
            score = failure_of(error)
            if isinstance(error, TimeoutError) and limit.expired():
                score = failure(f"no verdict in {limit_s:g} s", DropReason.REWARD_TIMEOUT)
        return replace(score, seconds=time.perf_counter() - began)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a function is loaded from; settings are of built-in ones. Workers get it first."""

    function: str  # 'exact', or 'rewards.py:score'
    answer_field: str = "answer"
    timeout_s: float
    pickled: bytes = b""  # the function itself; its name then says nothing
    setting: str = "reward.function"  # that names it, or "buffer.filters", "episode.environment", "episode.agent"
    sandbox: bool = False
    hidden: tuple[str, ...] = ()  # directories that a sandbox does not show

    def load(self) -> RewardFunction:
        section, _, kind = self.setting.partition(".")
        if section == "buffer":
            return filter_function(self.function)
        if section == "episode":  # loaded here: what it needs takes long to load
            return getattr(import_module(f"headrace.reward.{kind}"), f"{kind}_function")(self.function)  # type: ignore[no-any-return]
        if not self.pickled:
            return resolve(self.function, answer_field=self.answer_field)
        try:
            return own_function(pickle.loads(self.pickled))
        except Exception as error:  # unpickling runs the user's code
            raise RewardError(f"it cannot be unpickled ({error!r})") from error


def resolve(spec: str, *, answer_field: str = "answer") -> RewardFunction:
    """The function that `reward.function = spec` names. Imports the user's code."""
    if spec in BUILTIN_NAMES or (spec.startswith("regex:") and spec != "regex:"):
        return RewardFunction(name=spec.partition(":")[0], call=builtin_function(spec, answer_field))
    if ":" in spec:
        call = load_function(spec, "reward.function", RewardError)
        return RewardFunction(name=spec.rpartition(":")[2], call=call, mode=_mode(call, spec))
    near = difflib.get_close_matches(spec, BUILTIN_NAMES, n=1)
    there = f"did you mean '{near[0]}'? There are" if near else "there are"
    told = "an own function is named 'module:function' or 'path/to/file.py:function'"
    raise RewardError(f"reward.function = '{spec}' is not built in; {there} {', '.join(BUILTIN_NAMES)}; {told}")


def own_function(call: Callable[[Any], Any]) -> RewardFunction:
    """A function, or another object that can be called, as it was given."""
    name = getattr(call, "__name__", type(call).__name__)
    return RewardFunction(name=name, call=call, mode=_mode(call, name))


def shipped(function: Callable[[Any], Any], setup: Setup) -> tuple[Setup, str]:
    """The setup for workers that call `function`, or why there can be none."""
    setup = replace(setup, function=own_function(function).name)
    if getattr(function, "__module__", "") == "__main__":  # a worker has another main module
        return _from_script(function, setup)
    try:
        return replace(setup, pickled=pickle.dumps(function)), ""
    except Exception as error:  # pickling runs the object's own code
        return setup, f"it cannot be pickled ({error})"


def _from_script(function: Callable[[Any], Any], setup: Setup) -> tuple[Setup, str]:
    """A worker imports the script, which must not train again: it needs a main guard."""
    main = sys.modules["__main__"]
    path = Path(getattr(main, "__file__", None) or "")
    names = [name for name, value in vars(main).items() if value is function]
    if not names or not path.is_file():
        return setup, "it is in no file that could be imported"
    tests = [ast.unparse(node.test) for node in ast.parse(path.read_bytes()).body if isinstance(node, ast.If)]
    if not any("__name__" in test for test in tests):
        return setup, f"{path} trains when it is imported, as it has no line \"if __name__ == '__main__':\""
    return replace(setup, function=f"{path.resolve()}:{names[0]}"), ""


def digest(setup: Setup, function: Callable[[Any], Any] | None) -> str:
    """Equal for two runs only if their functions are; of one whose content is not known, never."""
    if not setup.pickled:
        return source_hash(setup.function) if function is None or ":" in setup.function else os.urandom(16).hex()
    source = b""
    with contextlib.suppress(OSError, TypeError):  # built in, or made at run time
        file = inspect.getsourcefile(function if inspect.isroutine(function) else type(function))
        source = Path(file or "").read_bytes()
    return hashlib.sha256(setup.pickled + source).hexdigest()


def filter_function(spec: str) -> RewardFunction:
    """A function of `buffer.filters`.

    Its verdict on a group is 1 to keep it, 0 to drop it, or further rewards by an answer's index and turn.
    """
    keep, name = load_function(spec, "buffer.filters", ConfigError), spec.rpartition(":")[2]
    if inspect.iscoroutinefunction(keep):
        raise ConfigError(f"buffer.filters: '{spec}' is an async function; a filter must be an ordinary one")

    def ask(group: Group) -> bool | dict[str, Any]:
        verdict = keep(group)
        if hasattr(verdict, "tolist"):  # an array, or a number of one
            verdict = verdict.tolist()
        if isinstance(verdict, Mapping | Iterator):
            raise RewardError(f"'{name}' returned a {type(verdict).__name__}; rewards of a group are a list")
        if not isinstance(verdict, list | tuple):
            return bool(verdict)
        if len(verdict) != (wanted := len(group.trajectories)):
            raise RewardError(f"'{name}' returned {len(verdict)} rewards for {wanted} answers")
        found: dict[str, Any] = {}
        for t, reward in zip(group.trajectories, verdict, strict=True):
            of_turns = reward if isinstance(reward, list | tuple) else [reward]
            if of_turns is reward and len(reward) != len(t.turns):
                raise RewardError(f"'{name}' returned {len(reward)} rewards for an answer of {len(t.turns)} turns")
            found |= {f"{t.index} {k}": own for k, own in enumerate(of_turns)}
        return found

    return RewardFunction(name=name, call=ask)


def read_verdict(verdict: Any, name: str) -> Score:
    """What one call returned. Anything but finite numbers is a failure, never a zero."""
    if verdict is None:
        return failure("the reward function returned None: it cannot judge this answer")
    parts: dict[str, float] = {}
    given = verdict if isinstance(verdict, Mapping) else {name: verdict}
    steps = _steps(given.get(STEPS))
    for key, value in given.items():
        of_steps = key == STEPS and steps is not None
        number = sum((reward for _, reward in steps or ()), 0.0) if of_steps else _number(value)
        if number is None or not isinstance(key, str):
            inside = f" (part {reprlib.repr(key)})" if isinstance(verdict, Mapping) else ""
            wanted = "a finite number" + ", or [end, reward] pairs, ends whole and not falling" * (key == STEPS)
            return failure(f"the reward function returned {_describe(verdict)}{inside}, not {wanted}")
        parts[key] = number
    reward = sum(parts.values())
    if not parts or not math.isfinite(reward):
        return failure(f"the reward function returned {_describe(verdict)}, which has no finite sum")
    return Score(reward=reward, parts=parts, steps=steps or ())


def _steps(given: Any) -> tuple[tuple[int, float], ...] | None:
    """Where each step of an answer ends in its text, and its reward; None if it is none of that."""
    read: list[tuple[int, float]] = []
    for pair in given if isinstance(given, list | tuple) else [None]:
        end, reward = map(_number, pair) if isinstance(pair, list | tuple) and len(pair) == 2 else (None, None)
        if end is None or reward is None or end != int(end) or end < (read[-1][0] if read else 0):
            return None
        read.append((int(end), reward))
    return tuple(read)


def read_verdicts(verdicts: Any, name: str, num_items: int) -> list[Score]:
    """What a batch call returned, one Score per completion."""
    if getattr(verdicts, "ndim", None) == 1 and hasattr(verdicts, "tolist"):
        verdicts = verdicts.tolist()
    if not isinstance(verdicts, list | tuple):
        found = f"{_describe(verdicts)}, not a list of {num_items} verdicts"
    elif len(verdicts) != num_items:
        found = f"{len(verdicts)} verdicts for {num_items} completions"
    else:
        return [read_verdict(verdict, name) for verdict in verdicts]
    return [failure(f"the batch reward function returned {found}")] * num_items


def failure(detail: str, reason: DropReason = DropReason.REWARD_ERROR) -> Score:
    shown = detail[-MAX_DETAIL_CHARS:].encode(errors="replace").decode()  # no lone surrogates
    return Score(failure=reason, detail=shown)


def failure_of(error: BaseException) -> Score:
    """An exception of the function as a failure: unavailable (retried) or error (not retried)."""
    names = {c.__name__ for c in type(error).__mro__}
    unavailable = isinstance(error, UnavailableError) or bool(names & _PASSING)
    reason = DropReason.REWARD_UNAVAILABLE if unavailable else DropReason.REWARD_ERROR
    return failure(short_traceback(error), reason)


def _number(value: Any) -> float | None:
    """A finite float, or None. Accepts numpy and torch scalars, but not text."""
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    with contextlib.suppress(OverflowError):
        if isinstance(value, int | float) and math.isfinite(float(value)):
            return float(value)
    return None


def _describe(value: Any) -> str:
    return f"{reprlib.repr(value)} ({type(value).__name__})"


def _mode(call: Callable[[Any], Any], spec: str) -> Mode:
    """BATCH by the name of its one parameter, ASYNC if it is a coroutine function."""
    try:
        signature = inspect.signature(call)
    except (TypeError, ValueError):
        return "single"  # written in C, without a signature: the first call will tell
    try:
        signature.bind(None)
    except TypeError as error:
        names = ", ".join(map(str, signature.parameters.values()))
        told = f"a single Completion, or a list of them if it is called '{BATCH_PARAMETER}'"
        wrong = f"has the wrong parameters ({names})"
        raise RewardError(f"reward.function = '{spec}' {wrong}: it must take one, {told}") from error
    if next(iter(signature.parameters)) == BATCH_PARAMETER:
        return "batch"
    is_async = inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(getattr(call, "__call__", None))  # noqa: B004
    return "async" if is_async else "single"


def builtin_function(name: str, answer_field: str) -> Reward:
    if name == "exact":  # 1 if the text is the expected answer, ignoring white space around it
        return lambda c: float(c.text.strip() == expected_answer(c, answer_field))
    if name.startswith("regex:"):
        return regex(answer_field, name.removeprefix("regex:"))
    # "math": 1 if the answer is mathematically equal to the expected one
    equal = load_optional("headrace.reward.builtin_math_verify", "math_verify", "tasks").math_equal
    return lambda c: float(equal(c.text, expected_answer(c, answer_field)))


def regex(answer_field: str, pattern: str) -> Reward:
    """1 if the last match of `pattern` (its first group, if it has one) is the expected answer."""
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise RewardError(f"reward.function = 'regex:{pattern}' is not a regular expression: {error}") from error

    def score(completion: Completion) -> float:
        matches = list(compiled.finditer(completion.text))
        found = matches[-1].group(1 if compiled.groups else 0) if matches else None
        return float(found is not None and found.strip() == expected_answer(completion, answer_field))

    return score


def expected_answer(completion: Completion, answer_field: str) -> str:
    if answer_field not in completion.fields:
        there = ", ".join(map(str, completion.fields)) or "none"
        raise RewardError(f"reward.answer_field = '{answer_field}' is not a field of the prompt; there are: {there}")
    return str(completion.fields[answer_field]).strip()
