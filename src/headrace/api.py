"""Headrace from Python: what the commands do, as functions (see the example in `__init__.py`)."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from headrace.config import Config
from headrace.config_file import dump, load_config
from headrace.errors import LearnerLostError, RunError
from headrace.ledger.database import FILE_NAME, claimed, is_complete, remove_database
from headrace.ledger.files import (
    CHECKPOINTS,
    REFERENCE,
    SETTINGS,
    START,
    SUMMARY,
    WANTED_WORKERS,
    WEIGHTS,
    read_summary,
    run_config,
    says_finished,
)
from headrace.ledger.journal import Restart
from headrace.ledger.ledger import Ledger
from headrace.ledger.sinks import open_sinks
from headrace.loop.groups import evaluate, sampling_of
from headrace.loop.loop import Loop
from headrace.loop.resume import resume as resume_loop
from headrace.loop.self_check import refuse_inexact, self_check, warning
from headrace.loop.watchdog import STACKS, Watchdog
from headrace.place.device import STEPS, memory_for
from headrace.place.place import Place
from headrace.place.places import open_place
from headrace.policy import hub
from headrace.roles import Sink, Watcher
from headrace.row import Row
from headrace.types import STAGES, StageTimes

WHERE = ("model.threads", "rollout.workers", "reward.workers", "learner.ranks", "publish.", "place.")


class Nobody(Watcher):
    """Watches nothing."""


def train(config: Config, watcher: Watcher | None = None) -> dict[str, Any]:
    """Train by `config`; returns the content of the run directory's `summary.json`."""
    run_dir = prepare_run_dir(config)
    with claimed(run_dir), memory_for("training", STEPS):
        return _to_the_end(config, run_dir, watcher or Nobody(), resumed=False)


def resume(run_dir: Path | str, watcher: Watcher | None = None, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Go on with a run that was interrupted or died; returns the content of its `summary.json`.

    `overrides` may change where it runs and on how many workers, not what it computes.
    """
    run_dir = Path(run_dir)
    config = run_config(run_dir, overrides)
    if fixed := [word for word in overrides if not word.startswith(WHERE)]:
        where = ", ".join(WHERE)
        raise RunError(f"{', '.join(fixed)}: a run that goes on keeps its settings, except for {where}")
    if says_finished(run_dir):
        raise RunError(f"{run_dir} has finished: there is nothing to resume")
    with claimed(run_dir), memory_for("training", STEPS):
        if any(word.startswith("rollout.workers") for word in overrides):
            (run_dir / WANTED_WORKERS).unlink(missing_ok=True)
        begun = is_complete(run_dir)
        if not begun:  # it died before its first checkpoint, and starts anew
            remove_database(run_dir)
        return _to_the_end(config, run_dir, watcher or Nobody(), resumed=begun)


def _to_the_end(config: Config, run_dir: Path, watcher: Watcher, *, resumed: bool) -> dict[str, Any]:
    """Train. When the learner is lost, resume, unless no step was done since it was lost before."""
    reached = -1
    while True:
        try:
            return asyncio.run(_train(config, run_dir, watcher, resumed=resumed))
        except LearnerLostError as lost:
            resumed = is_complete(run_dir)
            with Ledger.open(run_dir) if resumed else nullcontext() as ledger:
                version = len(ledger.rows()) if ledger else 0
            if version <= reached:
                again = f"It was lost at step {version + 1} before: `headrace resume {run_dir}`"
                raise RunError(f"{lost}. {again}") from lost
            reached = version
            watcher.note(f"{lost}. The run goes on from its last checkpoint")


def evaluate_run(run_dir: Path | str, *, samples: int | None = None) -> float | None:
    """The held-out score of a run's weights, with `samples` answers per prompt."""
    run_dir = Path(run_dir)
    config = run_config(run_dir)
    changed: dict[str, dict[str, Any]] = {
        "model": {"path": str(weights_dir(run_dir)), "tokenizer": ""},
        "loop": {} if samples is None else {"eval_samples": samples},
        "buffer": {"filters": ()},  # their files may be gone, and nothing is trained on
        "place": {"cluster": "local"},
        "rollout": {"workers": 1},
        "learner": {"ranks": 1},
    }
    sections = {name: getattr(config, name).model_copy(update=new) for name, new in changed.items()}
    return asyncio.run(_evaluate(config.model_copy(update=sections), run_dir))


def export(run_dir: Path | str, out: Path | str, *, push: str = "") -> Path:
    """Copy a run's model to the directory `out`, in the format of `transformers`, with a model card.

    `push` is a repository of the Hugging Face hub, owner/name, that gets it too.
    """
    run_dir, out = Path(run_dir), Path(out)
    source = weights_dir(run_dir)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RunError(f"{out} exists and is not an empty directory")
    shutil.copytree(source, out, dirs_exist_ok=True)
    card = hub.model_card(run_config(run_dir), read_summary(run_dir))
    (out / hub.CARD).write_text(card, encoding="utf-8")
    if push:
        hub.push(out, push)
    return out


def prepare_run_dir(config: Config) -> Path:
    """The directory of a new run. An earlier run in it is replaced only with `run.overwrite`."""
    run_dir = Path(config.run.dir or "runs")
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        if not config.run.dir:
            run_dir = _new_run_dir(run_dir)
        with claimed(run_dir):
            if (run_dir / FILE_NAME).exists():
                if not config.run.overwrite:
                    raise RunError(
                        f"{run_dir} holds an earlier run. Go on with it by `headrace resume {run_dir}`, "
                        "choose another run.dir, or replace it with run.overwrite=true"
                    )
                _remove_run(run_dir)
            (run_dir / WANTED_WORKERS).unlink(missing_ok=True)
            dump(config, run_dir / SETTINGS)
    except OSError as error:
        raise RunError(f"run.dir = '{run_dir}' cannot be written: {error.strerror}") from error
    return run_dir


def _new_run_dir(runs: Path) -> Path:
    """A directory that was not there before, even if several runs start within one second."""
    name, number = f"{datetime.now():%Y%m%d-%H%M%S}", 1
    while True:
        run_dir = runs / (name if number == 1 else f"{name}-{number}")
        try:
            run_dir.mkdir()
            return run_dir
        except FileExistsError:
            number += 1


def _remove_run(run_dir: Path) -> None:
    """Delete what an earlier run left, and nothing else; no old weights may stay if the new run fails."""
    remove_database(run_dir)
    for name in (SUMMARY, SETTINGS, STACKS, "rows.jsonl"):
        (run_dir / name).unlink(missing_ok=True)
    for name in (WEIGHTS, START, CHECKPOINTS, REFERENCE, "tensorboard", "wandb"):
        shutil.rmtree(run_dir / name, ignore_errors=True)


def weights_dir(run_dir: Path) -> Path:
    """Where a run left its weights."""
    path = run_dir / WEIGHTS
    if not path.exists():
        raise RunError(f"{run_dir} has no weights (no {WEIGHTS} directory); did the run finish?")
    return path


async def _train(config: Config, run_dir: Path, watcher: Watcher, *, resumed: bool = False) -> dict[str, Any]:
    place = open_place(config, run_dir, resumed=resumed, on_note=watcher.note)
    dump(config, run_dir / SETTINGS)  # with the overrides of `resume`, now that they are known to work
    sinks: list[Sink] = []
    limit_s = config.recovery.hang_s and config.recovery.hang_s + config.reward.timeout_s
    watchdog = Watchdog(limit_s, place.progress, place.clock, run_dir, watcher.note)
    try:
        await place.scorer.start()
        watchdog.start()
        past = place.ledger.rows() if place.ledger is not None else []
        sinks = open_sinks(config.ledger, run_dir, config.model_dump(mode="json"), past)
        watcher.header(config, run_dir, _facts(place))
        if not resumed:
            await _warm_start(place, watcher)

        def on_row(row: Row) -> None:
            for sink in sinks:
                sink.write(row)
            if row.skipped:
                watcher.note(f"step {row.step}: the gradient was not finite; the weights stay as they were")
            watcher.row(row)

        loop = await place.loop(on_row)
        if resumed:
            watcher.phase("resuming")
            watcher.note(_told(await resume_loop(loop, watcher.note), loop.over))
        return await _run(place, loop, watcher, watchdog)
    finally:
        watchdog.stop()
        for sink in sinks:
            sink.close()
        await place.close(hung=bool(watchdog.hung))
        watchdog.check()


async def _run(place: Place, loop: Loop, watcher: Watcher, watchdog: Watchdog) -> dict[str, Any]:
    """Evaluate, train, evaluate; returns the content of `summary.json`."""
    run_dir = place.run_dir
    summary = _Summary(loop, await _before(place, loop, watcher))
    watcher.phase("training")
    try:
        await _interruptible(loop)
    finally:  # however training ended, its weights are kept; of a hung run they may be half updated
        if not watchdog.hung and not place.ranks.lost:
            with _writing(run_dir / WEIGHTS):
                await place.device.run(place.ranks.save, run_dir / WEIGHTS)
        summary.write(finished=False, after=None)
    if loop.ending.asked:
        return summary.content
    if loop.ending.solved:
        target = place.config.loop.target_reward
        watcher.note(f"training ends here: the reward has reached {target:g} (loop.target_reward)")
    watcher.phase("evaluation after")
    return summary.write(finished=True, after=await _score(place))


async def _before(place: Place, loop: Loop, watcher: Watcher) -> dict[str, float | None]:
    """The held-out score and the mismatch before the first step; measured once in a run."""
    assert place.ledger is not None
    known = place.ledger.remembered()
    if "before" in known:
        return json.loads(known["before"])  # type: ignore[no-any-return]
    found: dict[str, float | None] = {"score_before": None, "mismatch_before": None}
    if loop.version == 0:
        watcher.phase("evaluation before")
        score = await _score(place)
        found = {"score_before": score, "mismatch_before": await _self_check(place, watcher)}
        place.ledger.remember("before", json.dumps(found))
    return found


def _told(restart: Restart, over: bool) -> str:
    """A restart in a sentence."""
    done = f"resumed at step {restart.version}, from the checkpoint of step {restart.checkpoint}"
    if restart.redone_steps:
        done += f" and {restart.redone_steps} steps taken again"
    fate = {"requeue": "their prompts start again", "drop": "their prompts are left out"}.get(restart.rule, "")
    fate = "and all steps are done without them" if over else fate
    if restart.lost_trajectories:
        lost = f"{restart.lost_trajectories} answers under way are lost with {restart.lost_tokens} tokens"
        done += f"; {lost}, {fate}"
    elif restart.rule == "resume":
        lost = f"without {restart.lost_tokens} tokens sampled since the checkpoint"
        done += f"; answers under way go on, {lost}"
    return f"{done} (recovery.in_flight = {restart.rule})"


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turn a failed write (a full disk, say) into a message for the user."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise RunError(
            f"{path} could not be written: {error}. Once there is room, `headrace resume {path.parent}` "
            "goes on from the last checkpoint"
        ) from error


class _Summary:
    """`summary.json`, written when the steps end and again with the last evaluation."""

    def __init__(self, loop: Loop, before: dict[str, float | None]) -> None:
        self.content: dict[str, Any] = {}
        self._loop, self._before, self._run_dir = loop, before, loop.stages.ledger.run_dir

    def write(self, *, finished: bool, after: float | None) -> dict[str, Any]:
        """Write the file; returns its content."""
        known = {"run_dir": str(self._run_dir), "finished": finished, **self._before, "score_after": after}
        self.content = known | self._totals()
        with _writing(self._run_dir / SUMMARY):
            (self._run_dir / SUMMARY).write_text(json.dumps(self.content, indent=2) + "\n")
        return self.content

    def _totals(self) -> dict[str, Any]:
        """`wall_s` is the seconds of the whole command, `loop_s` of the steps alone.

        `wall` is the bottleneck: the stage that was busy longest.
        """
        stages = self._loop.stages
        rows, books, counts = stages.ledger.rows(), stages.ledger.totals(), stages.pool.counts
        loop_s = sum(row.wall_s for row in rows)
        stage_s = {stage: sum(getattr(row.stage_s, stage) for row in rows) for stage in STAGES}
        lags = sum(row.lag_mean * row.trained_tokens for row in rows)
        return {
            "wall_s": stages.clock.now(),
            "loop_s": loop_s,
            "steps": len(rows),
            "version": self._loop.version,
            "generated_tokens": books.generated.tokens,
            "trained_tokens": books.trained.tokens,
            "dropped_tokens": {reason: a.tokens for reason, a in sorted(books.dropped.items())},
            "goodput_tokens_per_s": books.trained.tokens / loop_s if loop_s else 0.0,
            "mean_lag_seen": lags / max(1, books.trained.tokens),
            "max_lag_seen": max((row.lag_max for row in rows), default=0),
            "stage_s": stage_s,
            "wall": StageTimes(**stage_s).wall,
            "drafted_tokens": counts.drafted_tokens,
            "accepted_tokens": counts.accepted_tokens,
            "reward_failure": self._loop.rows.first_reward_failure,
        }


async def _interruptible(loop: Loop) -> None:
    """Run the loop so that Ctrl-C, or a cluster's SIGTERM, interrupts it in an orderly way."""
    events = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with suppress(NotImplementedError, RuntimeError):  # not in the main thread, or not on this platform
        for number in before:
            events.add_signal_handler(number, loop.interrupt)
    try:
        await loop.run()
    finally:
        with suppress(NotImplementedError, RuntimeError, TypeError, ValueError):
            for number, handler in before.items():
                events.remove_signal_handler(number)
                signal.signal(number, handler)


async def _warm_start(place: Place, watcher: Watcher) -> None:
    section = place.config.warmstart
    if not section.steps:
        return
    watcher.phase(f"warm start: {section.steps} supervised steps on worked examples")
    events, stopped = asyncio.get_running_loop(), threading.Event()

    def on_step(done: int, loss: float) -> None:
        if stopped.is_set():
            raise RunError("interrupted")
        place.clock.moved("warm start")
        events.call_soon_threadsafe(watcher.progress, done, section.steps, f"loss {loss:.3f}")

    try:
        with place.clock.span("warm start"):
            await place.warm_start(on_step)
    finally:
        stopped.set()  # a cancelled wait does not stop the device thread


async def _score(place: Place) -> float | None:
    """The held-out score."""
    await place.start_engines()
    return await evaluate(place.pool, place.scorer, place.prompts.held_out, place.config)


async def _self_check(place: Place, watcher: Watcher) -> float | None:
    """The mismatch of engine and learner before the first step; the user is told if it is large."""
    if not place.config.loop.steps:
        return None
    mismatch, prompts = place.ranks.mismatch, place.prompts.held_out
    found = await self_check(place.pool, mismatch, place.device, prompts, sampling_of(place.config))
    if place.config.model.exact:
        refuse_inexact(found)
    for text in (warning(found, place.facts.dtype), place.facts.unchecked):
        if text:
            watcher.note(text)
    return found.mean_abs


async def _evaluate(config: Config, run_dir: Path) -> float | None:
    place = open_place(config, run_dir)
    try:
        await place.scorer.start()
        return await _score(place)
    finally:
        await place.close()


def _facts(place: Place) -> dict[str, str]:
    f = place.facts
    return {
        "policy": f"{f.name}, {f.num_weights / 1e6:.1f}M weights, {f.device}, {f.dtype}",
        "data": f"{place.prompts.num_train} prompts to train on, {len(place.prompts.held_out)} held out",
        "reward": place.scorer.function,
    }


__all__ = ["evaluate_run", "export", "load_config", "resume", "train"]
