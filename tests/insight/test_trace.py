from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from big_ledger import make_big_ledger
from insight_runs import hand_made_run
from test_cli import headrace, problem

from headrace.insight.reading import write_trace
from headrace.ledger.journal import Restart
from headrace.ledger.ledger import Ledger
from headrace.ledger.recovery import Recovery

REQUIRED = {"X": {"ts", "dur"}, "i": {"ts", "s"}, "C": {"ts"}, "M": set()}


def events_of(path: Path) -> list[dict[str, Any]]:
    """The events of a file that has the form the viewers want."""
    trace = json.loads(path.read_text(encoding="utf-8"))
    events: list[dict[str, Any]] = trace["traceEvents"]
    named: set[tuple[str, int, int]] = set()
    last_us = 0
    for event in events:
        assert {"name", "ph", "pid", "tid", "args"} | REQUIRED[event["ph"]] <= event.keys(), event
        if event["ph"] == "M":
            named.add((event["name"], event["pid"], event["tid"]))
            continue
        assert ("process_name", event["pid"], 0) in named, "a track is named before its first event"
        assert ("thread_name", event["pid"], event["tid"]) in named
        assert isinstance(event["ts"], int)
        assert event["ts"] >= last_us, "in the order of time"
        last_us = event["ts"]
        assert event.get("dur", 0) >= 0
        if event["ph"] == "C":
            assert all(isinstance(value, int | float) for value in event["args"].values())
    return events


def tracks_of(events: list[dict[str, Any]]) -> dict[tuple[str, str], list[tuple[int, int]]]:
    """By the names of process and thread, begin and end of every span; on one track they must not overlap."""
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found = defaultdict(list)
    for e in events:
        if e["ph"] == "X":
            track = found[processes[e["pid"]], threads[e["pid"], e["tid"]]]
            assert not track or track[-1][1] <= e["ts"], (e, track[-1])
            track.append((e["ts"], e["ts"] + e["dur"]))
    return dict(found)


def counter(events: list[dict[str, Any]], name: str) -> list[tuple[int, dict[str, float]]]:
    return [(e["ts"], e["args"]) for e in events if e["ph"] == "C" and e["name"] == name]


def test_every_span_of_a_known_run_is_on_the_track_of_its_stage(known_run: Path):
    path, num_events = write_trace(known_run)
    events = events_of(path)
    assert (path, num_events) == (known_run / "trace.json", len(events))
    tracks = tracks_of(events)
    second = 1_000_000
    assert tracks["device (local)", "train"] == [
        (b * second + 6 * second, b * second + 9 * second) for b in (0, 10, 25)
    ]
    assert tracks["reward (local)", "reward"][:2] == [(2 * second, 4 * second), (4_500_000, 7 * second)]
    assert tracks["reward (local)", "reward 2"][0] == (6 * second, 8 * second), "what overlaps is on a track beside"
    assert tracks["run", "steps"] == [(0, 10 * second), (10 * second, 20 * second), (25 * second, 35 * second)]
    assert ("device (local)", "evaluate") in tracks
    assert ("device (local)", "checkpoint") in tracks


def test_versions_restarts_and_counters_are_there(known_run: Path):
    with Ledger.reopen(known_run) as ledger:
        more = {"redone_steps": 1, "retrained_tokens": 60, "lost_tokens": 0, "lost_trajectories": 0}
        Recovery(ledger).restarted(Restart(number=1, at_s=22.0, checkpoint=1, version=2, rule="requeue", **more))
    events = events_of(write_trace(known_run)[0])
    marks = [(e["name"], e["ts"]) for e in events if e["ph"] == "i"]
    assert marks == [
        ("version 1", 10_000_000),
        ("version 2", 20_000_000),
        ("restart 1", 22_000_000),
        ("version 3", 35_000_000),
    ]
    assert [values["max"] for _, values in counter(events, "lag")] == [0, 0, 1]
    in_flight = counter(events, "trajectories in flight")
    assert in_flight[0] == (0, {"trajectories": 3})
    assert max(values["trajectories"] for _, values in in_flight) == 5
    assert in_flight[-1] == (33_000_000, {"trajectories": 0})
    buffered = [values["tokens"] for _, values in counter(events, "tokens buffered")]
    assert [amount for amount in buffered if amount] == [60, 60, 60]
    assert buffered[-1] == 0


def test_numbers_that_json_does_not_have_are_left_out(known_run: Path):
    text = write_trace(known_run)[0].read_text()
    assert "NaN" not in text
    assert "Infinity" not in text


def test_a_real_run_has_a_sound_timeline(real_run: Path, tmp_path: Path):
    events = events_of(write_trace(real_run, tmp_path / "t.json")[0])
    tracks = tracks_of(events)
    with Ledger.open(real_run) as ledger:
        stages = Counter(stage for (stage,) in ledger.read("SELECT stage FROM spans"))
    kinds = Counter(e["name"] for e in events if e["ph"] == "X" and e["cat"] != "step")
    assert kinds == stages
    assert {"rollout", "train", "publish", "evaluate"} <= {thread for _, thread in tracks}
    assert len(tracks["run", "steps"]) == 6


def test_a_restart_shows_and_every_step_is_there_once(resumed_run: Path, tmp_path: Path):
    events = events_of(write_trace(resumed_run, tmp_path / "t.json")[0])
    assert len(tracks_of(events)["run", "steps"]) == 4
    marks = [e["name"] for e in events if e["ph"] == "i"]
    assert marks == ["version 1", "version 2", "version 1", "version 2", "restart 1", "version 3", "version 4"]


def test_a_run_that_goes_on_has_a_timeline(tmp_path: Path):
    assert events_of(write_trace(hand_made_run(tmp_path / "a", num_steps=1, close=False))[0])
    assert events_of(write_trace(hand_made_run(tmp_path / "b", num_steps=0, close=False))[0]) == []


def test_a_long_run_is_written_in_order(tmp_path: Path):
    run = make_big_ledger(tmp_path / "run", num_steps=100)
    events = events_of(write_trace(run)[0])
    assert len(tracks_of(events)["device (local)", "rollout"]) == 2000


def test_the_command_says_where_to_open_it(known_run: Path, tmp_path: Path):
    shown = headrace("trace", known_run, "--out", tmp_path / "mine.json").output
    assert f"wrote {tmp_path / 'mine.json'}" in shown
    assert "ui.perfetto.dev" in shown
    assert "chrome://tracing" in shown
    said = json.loads(headrace("trace", known_run, "--json").output)
    assert said == {"file": str(known_run / "trace.json"), "events": len(events_of(known_run / "trace.json"))}


@pytest.mark.parametrize("out", ["no/such/directory/t.json", "."])
def test_a_file_that_cannot_be_written_gets_a_message(known_run: Path, out: str):
    assert "cannot write" in problem(headrace("trace", known_run, "--out", out))
