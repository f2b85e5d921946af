from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hand_made import group_of, trajectory
from insight_runs import hand_made_run
from tiny_runs import rows_of

from headrace.insight.reading import family_text, metrics_text
from headrace.ledger.ledger import Ledger
from headrace.measured import STAGES

NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\\\|\\"|\\n)*)"(,|$)')
SAMPLE = re.compile(rf"({NAME})(?:\{{(.*)\}})? (NaN|[+-]Inf|[-+0-9.e]+)")
UNESCAPED = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}


@dataclass
class Family:
    kind: str = ""
    samples: dict[tuple[tuple[str, str], ...], float] = field(default_factory=dict)


def parsed(text: str) -> dict[str, Family]:
    """The families of an exposition, by the rules of the text format; anything against them fails."""
    assert text.endswith("\n")
    families: dict[str, Family] = {}
    for line in text[:-1].split("\n"):
        if line.startswith("# HELP "):
            name, _ = line[len("# HELP ") :].split(" ", 1)
            assert re.fullmatch(NAME, name)
            assert name not in families, "a family is told once, in one piece"
            families[name] = Family()
            continue
        newest = next(reversed(families))
        if line.startswith("# TYPE "):
            name, kind = line[len("# TYPE ") :].split(" ")
            assert name == newest
            assert kind in ("counter", "gauge")
            assert not families[name].samples
            assert (kind == "counter") == name.endswith("_total")
            families[name].kind = kind
            continue
        found = SAMPLE.fullmatch(line)
        assert found, line
        name, inside, value = found.groups()
        assert name == newest, "samples follow their family's HELP and TYPE"
        assert families[name].kind
        labels = _labels(inside or "")
        assert labels not in families[name].samples
        families[name].samples[labels] = float(value.replace("Inf", "inf"))
        assert families[name].kind == "gauge" or float(value) >= 0
    return families


def _labels(text: str) -> tuple[tuple[str, str], ...]:
    found, position = [], 0
    while position < len(text):
        label = LABEL.match(text, position)
        assert label, text
        found.append((label[1], re.sub(r'\\[\\"n]', lambda match: UNESCAPED[match[0]], label[2])))
        position = label.end()
    return tuple(found)


def value(families: dict[str, Family], name: str, **labels: str) -> float:
    return families[name].samples[tuple(labels.items())]


def test_a_known_run_has_its_numbers(known_run: Path):
    found = parsed(metrics_text(known_run))
    assert value(found, "headrace_step") == 3
    assert value(found, "headrace_steps_wanted") == 3
    assert value(found, "headrace_running") == 0
    assert value(found, "headrace_info", run="run", state="stopped", version="0.1.0") == 1
    assert value(found, "headrace_generated_tokens_total") == 190
    assert value(found, "headrace_trained_tokens_total") == 180
    assert value(found, "headrace_dropped_tokens_total", reason="no_signal") == 10
    assert value(found, "headrace_trained_trajectories_total") == 9
    assert value(found, "headrace_buffered_tokens") == value(found, "headrace_in_flight_tokens") == 0
    seconds = [value(found, "headrace_stage_seconds_total", stage=stage) for stage in STAGES]
    assert seconds == [18.0, 16.5, 0.0, 9.0, 1.5]
    assert value(found, "headrace_wall_seconds_total") == 30.0
    assert value(found, "headrace_goodput_tokens_per_second") == 6.0
    assert value(found, "headrace_lag_max") == 1
    assert value(found, "headrace_reward_mean") == 0.5
    assert value(found, "headrace_publish_bytes_total") == 192
    assert value(found, "headrace_preemptions_total") == 6


def test_totals_only_grow_while_the_run_goes_on(tmp_path: Path):
    before = parsed(metrics_text(hand_made_run(tmp_path / "a", num_steps=1, close=False)))
    after = parsed(metrics_text(hand_made_run(tmp_path / "b", num_steps=2, close=False)))
    for name, family in before.items():
        for labels, amount in family.samples.items() if family.kind == "counter" else ():
            assert after[name].samples[labels] >= amount, name
    assert value(after, "headrace_trained_tokens_total") == 2 * value(before, "headrace_trained_tokens_total")


def test_a_run_without_steps_has_what_is_known(tmp_path: Path):
    found = parsed(metrics_text(hand_made_run(tmp_path / "run", num_steps=0)))
    assert value(found, "headrace_step") == 0
    assert value(found, "headrace_stage_seconds_total", stage="rollout") == 0
    assert "headrace_reward_mean" not in found


def test_numbers_that_are_none_are_said_so(tmp_path: Path):
    found = parsed(metrics_text(hand_made_run(tmp_path / "run", num_steps=2)))
    assert math.isnan(value(found, "headrace_loss"))


def test_names_that_users_gave_are_escaped(tmp_path: Path):
    run, nasty = hand_made_run(tmp_path / 'a "b" \\n', num_steps=1), 'filter:my "own" \\ rule\nof two lines'
    with Ledger.reopen(run) as ledger:
        ledger.started(1)
        ledger.sampled(4)
        answer = trajectory(serial=99, answer=(7, 8, 9, 1))
        ledger.dropped(group_of(answer, serial=99), [(answer, nasty)], was_buffered=False)
    found = parsed(metrics_text(run))
    assert value(found, "headrace_dropped_tokens_total", reason=nasty) == 4
    assert value(found, "headrace_info", run='a "b" \\n', state="stopped", version="0.1.0") == 1


@pytest.mark.parametrize(
    ("number", "text"), [(2.0, "2"), (0.1, "0.1"), (math.inf, "+Inf"), (-math.inf, "-Inf"), (1e300, "1e+300")]
)
def test_a_number_is_written_as_the_format_wants_it(number: float, text: str):
    assert family_text("x", "h", number).splitlines()[2:] == [f"headrace_x {text}"]


def test_a_real_run_is_told_as_its_rows_say(real_run: Path):
    found, rows = parsed(metrics_text(real_run)), rows_of(real_run)
    assert value(found, "headrace_stage_seconds_total", stage="train") == pytest.approx(
        sum(row.stage_s.train for row in rows)
    )
    assert value(found, "headrace_reward_mean") == pytest.approx(rows[-1].reward_mean)
    assert value(found, "headrace_held_out_score") >= 0
