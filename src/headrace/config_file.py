"""Settings from a TOML file and `section.key=value` overrides; all mistakes are told at once."""

import importlib.util
import json
import math
import os
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from difflib import SequenceMatcher, get_close_matches
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from headrace.config import BUILT_IN, DEMOS, MOST, Config, RolloutSection
from headrace.errors import ConfigError
from headrace.user_code import gpus_said, names_file, names_function

COMMAND_LINE = "command line"
NAME_FUNCTIONS = (*BUILT_IN, "reward.function", "buffer.filters", "episode.environment", "episode.agent")
NAME_SOURCES = ("prompts.source", "prompts.eval_source", "warmstart.source", "learner.teacher")  # or a function
NAME_MODELS = ("model.path", "model.tokenizer", "learner.critic")
NAME_FILES = (*NAME_FUNCTIONS, *NAME_SOURCES, *NAME_MODELS)
DEMO = Path(__file__).parent / "recipes" / "demo.toml"  # what `headrace train` runs without a file
HARDWARE = Path(__file__).with_name("hardware.toml")  # what devices can do and cost
SECTIONS: dict[str, type[BaseModel]] = {name: type(field.default) for name, field in Config.model_fields.items()}
Given = tuple[Any, str]  # a value somebody wrote, and where
SETTINGS = {f"{name}.{key}": field for name, model in SECTIONS.items() for key, field in model.model_fields.items()}


class Explained(NamedTuple):
    """One setting, in words."""

    key: str
    type_text: str
    default: str
    doc: str


def load_config(path: Path | str | None, overrides: Sequence[str] = ()) -> Config:
    """The settings of `path` (the defaults if None) with `overrides` on top."""
    given: dict[str, Given] = {}
    file_problems = [] if path is None else _read_file(Path(path), given)
    problems = file_problems + _read_overrides(overrides, given)
    problems += [_unknown(key, given.pop(key)[1]) for key in list(given) if key not in SETTINGS]
    config, invalid = _validate(given, file_is_whole=not file_problems)
    problems += invalid
    if len(problems) > 1:
        problems = [f"{len(problems)} problems with the settings:", *(f"  - {problem}" for problem in problems)]
    if config is None or problems:
        raise ConfigError("\n".join(problems))
    return config


def to_toml(config: Config) -> str:
    return "\n".join(
        f"[{section}]\n" + "".join(f"{key} = {_toml_value(v)}\n" for key, v in values.items())
        for section, values in config.model_dump().items()
    )


def rooted(config: Config) -> Config:
    """`config` with absolute paths: the run it starts can be continued from any directory.

    What is no path of an existing file stays as it is, such as 'demo' or a dotted module's name.
    """
    changes: dict[str, Any] = {"run": {"dir": config.run.dir and os.path.abspath(config.run.dir)}}
    for key in NAME_FILES:
        section, _, name = key.partition(".")
        changes.setdefault(section, {})[name] = _absolute(key, attrgetter(key)(config))
    return config.but(**changes)


def _absolute(key: str, spec: Any) -> Any:
    """Also of a function in a module that is a file here, unless an installed one has its name."""
    if isinstance(spec, tuple):
        return tuple(_absolute(key, one) for one in spec)
    if not isinstance(spec, str):
        return spec  # a number in its place
    place, colon, name = spec.rpartition(":")
    if spec.startswith("regex:") or (key == "episode.agent" and not names_function(spec)):
        return spec
    if names_file(place) and key not in NAME_MODELS:
        return f"{os.path.abspath(os.path.expanduser(place))}:{name}"
    if key in (*NAME_SOURCES, *NAME_MODELS):
        is_name = spec in ("", *DEMOS)  # even where a file has that name
        return spec if is_name or not os.path.exists(spec) else os.path.abspath(spec)
    file = os.path.abspath(f"{place}.py")
    if not colon or not place.isidentifier() or not os.path.isfile(file):
        return spec
    found = importlib.util.find_spec(place)
    return f"{file}:{name}" if found is None or found.origin == file else spec


def explain(section_filter: str | None = None) -> list[Explained]:
    """Every setting with its type, default and meaning, or those of one section, or one setting."""
    rows = [
        Explained(key, _type_text(field), _toml_value(field.default), field.description or "")
        for key, field in SETTINGS.items()
        if section_filter is None or key == section_filter or key.startswith(f"{section_filter}.")
    ]
    if not rows:
        raise ConfigError(_unknown(str(section_filter)))
    return rows


def changed(config: Config) -> list[str]:
    """The settings that differ from their defaults, as `section.key=value`."""
    default = values(Config())
    return [f"{key}={value}" for key, value in values(config).items() if value != default[key]]


def values(config: Config) -> dict[str, str]:
    """Without the keys of servers: they are shown, and put into model cards."""
    sections = config.but(rollout={"command": without_keys(config.rollout.command)}).model_dump()
    return {f"{name}.{key}": _toml_value(v) for name, section in sections.items() for key, v in section.items()}


def without_keys(addresses: str) -> str:
    return re.sub("//[^,@]*@", "//", addresses)


def gpus_of(section: RolloutSection) -> int:
    """Of one engine: as many as the flags of its server's command say; none where that has addresses."""
    if section.addresses:
        return 0
    return math.prod(map(int, re.findall(r"-(?:parallel-size|tp-size|pp-size|tp)[ =](\d+)", section.command)))


def gpus_of_rewards(config: Config) -> float:
    """Those that the files of reward functions and filters ask for, on Ray."""
    functions = config.reward.function, *config.buffer.filters
    return config.reward.workers * sum(map(gpus_said, functions))


def num_devices(config: Config) -> float:
    """The GPUs that a run asks for, or where its model is on CPUs the workers."""
    if config.place.cluster == "local":
        return 1
    ranks = math.prod(config.learner.mesh) + gpus_of_rewards(config)
    return ranks if config.place.layout == "colocated" else ranks + config.rollout.workers * gpus_of(config.rollout)


def cost_of(config: Config, seconds: float) -> float | None:
    """Dollars, if `run.dollars_per_hour` says what a device costs."""
    return num_devices(config) * seconds / 3600 * config.run.dollars_per_hour or None


def read_toml(path: Path, kind: str = "file") -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"there is no {kind} {path}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    except (OSError, ValueError) as error:  # not UTF-8, or a path with a zero byte
        reason = "it is a directory" if os.path.isdir(path) else str(error)
        raise ConfigError(f"cannot read {path}: {reason}") from error


def letters(name: str) -> str:
    """Of a device's name, however it is spelt."""
    return "".join(filter(str.isalnum, name.casefold()))


def _read_file(path: Path, given: dict[str, Given]) -> list[str]:
    try:
        # an older run's file names settings that are gone; what it left empty changes nothing
        leaves = [(key, value) for key, value in _leaves(read_toml(path)) if value != "" or key in SETTINGS]
    except RecursionError as error:
        return [f"{path} is not valid TOML: {error}"]
    except ConfigError as error:
        is_setting = str(path) in SETTINGS and not path.exists()
        return [f"{error}; to set {path} write {path}=VALUE" if is_setting else str(error)]
    given.update({key: (_beside(path, key, value), str(path)) for key, value in leaves})
    return []


def _beside(path: Path, key: str, value: Any) -> Any:
    """A file that a setting names is searched here, then beside the settings; a recipe's own is beside it."""
    if isinstance(value, list):
        return [_beside(path, key, one) for one in value]
    if key not in NAME_FILES or not isinstance(value, str) or value.startswith("regex:"):
        return value
    names_code = key not in NAME_MODELS and ":" in value
    file, colon, name = value.rpartition(":") if names_code else (value, "", "")
    found = path.parent / file
    is_recipe = path.parent.resolve() == DEMO.parent.resolve()
    wanted = file and found.is_file() and (is_recipe or not os.path.exists(os.path.expanduser(file)))
    return f"{found}{colon}{name}" if wanted else value


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{key}.")
        elif value != {} or key not in SECTIONS:  # a misspelt empty section is still reported
            yield key, value


def _read_overrides(overrides: Sequence[str], given: dict[str, Given]) -> list[str]:
    problems = []
    for override in overrides:
        key, equals, text = override.partition("=")
        key, text = key.strip(), text.strip()
        if not equals and key in SETTINGS:
            problems.append(f"{key} has no value; write {key}=VALUE ({COMMAND_LINE})")
        elif not equals or not key:
            problems.append(f"{override!r} is not of the form section.key=value ({COMMAND_LINE})")
        else:
            wanted = SETTINGS[key].annotation if key in SETTINGS else None
            wants_text = wanted is str or (get_origin(wanted) is Literal and True not in get_args(wanted))
            given[key] = _parse(text, wants_text), COMMAND_LINE
    return problems


def _parse(text: str, wants_text: bool) -> Any:
    """A TOML value, or the text itself, so that `model.path=my/dir` needs no quotes."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (tomllib.TOMLDecodeError, RecursionError):
        return text == "True" if text in ("True", "False") and not wants_text else text
    if len(parsed) > 1 or (wants_text and not isinstance(parsed["value"], str)):
        return text
    return parsed["value"]


def _validate(given: Mapping[str, Given], file_is_whole: bool) -> tuple[Config | None, list[str]]:
    """The config, or what is wrong: first with each value alone, then with their combination."""
    bools = [key for key, field in SETTINGS.items() if True in (field.annotation is bool, *get_args(field.annotation))]
    # Pydantic would take true for 1.
    flags = [key for key, (value, _) in given.items() if isinstance(value, bool)]
    wrong = dict.fromkeys(key for key in flags if key not in bools)
    config, errors = _build(given, wrong)
    wrong |= dict.fromkeys(".".join(loc[:2]) for loc, _ in errors if loc)
    if wrong and not any(not loc for loc, _ in errors):
        # Contradictions are found only if each value is valid: leave the others at their defaults.
        config, errors = _build(given, wrong)
    problems = [
        f"{key}: expected {_type_text(field, value)}; got {_toml_value(value)} ({place})"
        for key, field, (value, place) in ((key, SETTINGS[key], given[key]) for key in wrong)
    ]
    if file_is_whole:
        lines = [line for loc, message in errors if not loc for line in message.splitlines()]
        problems += [line for line in lines if not any(key in line for key in wrong)]
    return config, problems


def _build(given: Mapping[str, Given], without: Collection[str]) -> tuple[Config | None, list[tuple[Any, str]]]:
    tree: dict[str, dict[str, Any]] = {}
    for dotted, (value, _) in given.items():
        if dotted not in without:
            section, _, key = dotted.partition(".")
            tree.setdefault(section, {})[key] = value
    try:
        return Config.model_validate(tree), []
    except ValidationError as error:
        # Of our own validators the message as it stands, without pydantic's "Value error, ".
        errors = error.errors(include_url=False)
        return None, [(e["loc"], str(e.get("ctx", {}).get("error", e["msg"]))) for e in errors]


def _unknown(key: str, place: str = "") -> str:
    where = f" ({place})" if place else ""
    section, _, rest = key.partition(".")
    if key in SECTIONS:
        example = next(iter(SECTIONS[key].model_fields))
        return f"{key} is a section, not a setting; set one of its keys, such as {key}.{example}{where}"
    if f"{section}.{rest.partition('.')[0]}" in SETTINGS:
        return f"unknown setting {key}; {section}.{rest.partition('.')[0]} has no keys of its own{where}"
    near = next((known for known in SETTINGS if key.startswith(f"{known}_")), "") or _nearest(key)
    return f"unknown setting {key}" + (f"; did you mean {near}?" if near else "") + where


def _nearest(key: str) -> str:
    """The most similar dotted keys of all sections, by their names or their documentation."""
    section, _, name = key.rpartition(".")
    scores = {}
    for known, field in SETTINGS.items():
        known_section, _, known_name = known.partition(".")
        called = (field.description or "").lower().replace(" ", "_")
        score = max(_similarity(name, known_name), _similarity(name, called))
        same_section = _similarity(section, known_section) > 0.7  # perhaps misspelt
        scores[known] = 0.75 * score + 0.25 * same_section if section else score
    scores |= {known: _similarity(key, known) for known in SECTIONS if not section}
    best = max(scores.values())
    nearest = [known for known, score in scores.items() if score > best - 0.01][:3]
    return " or ".join(nearest) if best >= 0.6 else ""


def did_you_mean(missing: str) -> str:
    """`; did you mean 'that path'?`, of an existing one. Each part of the path may be mistyped."""
    near = Path()
    with suppress(OSError, IndexError):  # not a directory, not ours to read, or nothing in it is similar
        for part in Path(missing).parts:
            is_known = os.path.isdir(near / part)
            near /= part if is_known else get_close_matches(part, os.listdir(near), n=1)[0]
        return f"; did you mean '{near}'?" if missing else ""
    return ""


def _similarity(one: str, other: str) -> float:
    return SequenceMatcher(None, one.lower(), other.lower(), autojunk=False).ratio()


def _type_text(field: FieldInfo, value: Any = None) -> str:
    """What a setting may be. The bound `MOST` is named only if `value` is beyond it."""
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    found = ((name, getattr(limit, name, math.inf)) for limit in field.metadata for name in words)
    bounds = {name: bound for name, bound in found if math.isfinite(bound)}
    if bounds.get("le") == MOST and not (isinstance(value, int | float) and value > MOST):
        del bounds["le"]
    if value is None and {"ge", "le"} <= bounds.keys():  # for a table, in fewer words
        return f"{_annotation_text(field.annotation)} from {bounds['ge']:,} to {bounds['le']:,}"
    limits = " and ".join(f"{words[name]} {bounds[name]:,}" for name in words if name in bounds)
    finite = "" if not isinstance(value, float) or math.isfinite(value) else "finite "
    return f"{_annotation_text(field.annotation)} {limits}".rstrip().replace("number", f"{finite}number")


def _annotation_text(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(map(_toml_value, get_args(annotation)))
    if get_origin(annotation) is Union:
        return " or ".join(map(_annotation_text, get_args(annotation)))
    if get_origin(annotation) is Annotated:
        kind, limits = get_args(annotation)[:2]
        return _type_text(limits).replace("a number", _annotation_text(kind), 1)
    if get_origin(annotation) is tuple:
        item = get_args(annotation)[0]
        if get_origin(item) is Annotated:
            each = [_annotation_text(one) for one in get_args(annotation) if one is not ...]
            return f"a list of {' and '.join(each)}" if len(each) > 1 else f"{each[0]}, or a list of such"
        example = get_args(item)[0] if get_origin(item) is Literal else "text"
        return f'a list of {_annotation_text(item).removeprefix("one of ")}, such as ["{example}"]'
    return {bool: "true or false", int: "a whole number", str: "text"}.get(annotation, "a number")


def _toml_value(value: Any) -> str:
    if isinstance(value, bool | str):
        # JSON's words and escapes are TOML's too, except that TOML also wants DEL escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_toml_value(item)}" for key, item in value.items()) + "}"
    return str(value)
