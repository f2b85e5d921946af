"""Headrace from Python: what the commands do, as functions.

Example:
    import headrace
    config = headrace.load_config("my.toml", ["loop.steps=20"])
    summary = headrace.train(config)
    print(summary["score_before"], "->", summary["score_after"])
"""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
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
from headrace.loop.summary import summarise
from headrace.loop.watchdog import STACKS, Watchdog
from headrace.place.memory import STEPS, memory_for
from headrace.place.place import Place
from headrace.place.places import open_place
from headrace.roles import Sink, Watcher
from headrace.row import Row

WHERE = ("model.threads", "rollout.workers", "reward.workers", "learner.ranks", "publish.", "place.")


class Nobody:
    """Watches nothing."""

    def header(self, config: Config, run_dir: Path, facts: Mapping[str, str]) -> None:
        """Ignore."""

    def phase(self, text: str) -> None:
        """Ignore."""

    def progress(self, done: int, total: int, text: str) -> None:
        """Ignore."""

    def row(self, row: Row) -> None:
        """Ignore."""

    def note(self, text: str) -> None:
        """Ignore."""


def train(config: Config, watcher: Watcher | None = None) -> dict[str, Any]:
    """Train as the settings say; returns what `summary.json` in the run directory holds."""
    run_dir = prepare_run_dir(config)
    with claimed(run_dir), memory_for("training", STEPS):
        return _to_the_end(config, run_dir, watcher or Nobody(), resumed=False)


def resume(run_dir: Path | str, watcher: Watcher | None = None, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Go on with a run that was interrupted or died; returns what `summary.json` holds then.

    `overrides` may change where it runs and on how many workers, from here on. What it computes stays.
    """
    run_dir = Path(run_dir)
    config = run_config(run_dir, overrides)
    if fixed := [word for word in overrides if not word.startswith(WHERE)]:
        raise RunError(
            f"{', '.join(fixed)}: a run that goes on keeps its settings, but for where it runs ({', '.join(WHERE)})"
        )
    if says_finished(run_dir):
        raise RunError(f"{run_dir} has finished: there is nothing to resume")
    with claimed(run_dir), memory_for("training", STEPS):
        if any(word.startswith("rollout.workers") for word in overrides):
            (run_dir / WANTED_WORKERS).unlink(missing_ok=True)
        # what died before its first checkpoint has nothing to go on from
        begun = is_complete(run_dir)
        if not begun:
            remove_database(run_dir)
        return _to_the_end(config, run_dir, watcher or Nobody(), resumed=begun)


def _to_the_end(config: Config, run_dir: Path, watcher: Watcher, *, resumed: bool) -> dict[str, Any]:
    """Train; as often as the learner is lost, go on from the last checkpoint, unless it comes no further."""
    reached = -1
    while True:
        try:
            return asyncio.run(_train(config, run_dir, watcher, resumed=resumed))
        except LearnerLostError as lost:
            resumed = is_complete(run_dir)
            with Ledger.open(run_dir) if resumed else nullcontext() as ledger:
                version = len(ledger.rows()) if ledger else 0
            if version <= reached:
                raise RunError(
                    f"{lost}. It was lost at step {version + 1} before: `headrace resume {run_dir}`"
                ) from lost
            reached = version
            watcher.note(f"{lost}. The run goes on from its last checkpoint")


def evaluate_run(run_dir: Path | str, *, samples: int | None = None) -> float | None:
    """The held-out score of a finished run's weights."""
    run_dir = Path(run_dir)
    config = run_config(run_dir)
    loop = config.loop if samples is None else config.loop.model_copy(update={"eval_samples": samples})
    model = config.model.model_copy(update={"path": str(weights_dir(run_dir)), "tokenizer": ""})
    buffer = config.buffer.model_copy(update={"filters": ()})  # their files may be gone, and nothing is trained on
    changed = {
        "model": model,
        "loop": loop,
        "buffer": buffer,
        "place": config.place.model_copy(update={"cluster": "local"}),
        "rollout": config.rollout.model_copy(update={"workers": 1}),
        "learner": config.learner.model_copy(update={"ranks": 1}),
    }
    return asyncio.run(_evaluate(config.model_copy(update=changed), run_dir))


def export(run_dir: Path | str, out: Path | str) -> Path:
    """Copy a run's weights and tokenizer to `out`, as a directory that `transformers` and engines load."""
    source, out = weights_dir(Path(run_dir)), Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RunError(f"{out} exists and is not an empty directory")
    shutil.copytree(source, out, dirs_exist_ok=True)
    return out


def prepare_run_dir(config: Config) -> Path:
    """An empty directory for a new run; an earlier run is only replaced when told to."""
    run_dir = Path(config.run.dir or "runs")
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        if not config.run.dir:
            run_dir = _new_run_dir(run_dir)
        with claimed(run_dir):
            if (run_dir / FILE_NAME).exists():
                if not config.run.overwrite:
                    raise RunError(
                        f"{run_dir} holds an earlier run. Go on with it by `headrace resume {run_dir}`, choose another "
                        "run.dir, or replace it with run.overwrite=true"
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
    """Delete what an earlier run left, and nothing else: a new run that fails must not pass off old weights."""
    remove_database(run_dir)
    for name in (SUMMARY, SETTINGS, STACKS, "rows.jsonl"):
        (run_dir / name).unlink(missing_ok=True)
    for name in (WEIGHTS, START, CHECKPOINTS, REFERENCE, "tensorboard", "wandb"):
        shutil.rmtree(run_dir / name, ignore_errors=True)


def weights_dir(run_dir: Path) -> Path:
    """Where a run left its weights."""
    path = run_dir / WEIGHTS
    if not path.exists():
        raise RunError(f"{run_dir} has no weights: there is no {WEIGHTS} directory in it; did the run finish?")
    return path


async def _train(config: Config, run_dir: Path, watcher: Watcher, *, resumed: bool = False) -> dict[str, Any]:
    place = open_place(config, run_dir, resumed=resumed, on_note=watcher.note)
    dump(config, run_dir / SETTINGS)  # a run that is resumed may go on elsewhere, now that this is known to work
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
    """The steps between two evaluations; what `summary.json` holds at their end."""
    run_dir = place.run_dir
    summary = _Summary(place, loop, run_dir, await _before(place, loop, watcher))
    watcher.phase("training")
    try:
        await _interruptible(loop)
    finally:  # whatever ended the steps, what they led to is kept; where they hang, it may be half changed
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
    """How the policy does before the first step, and how far engine and learner are apart; measured once in a run."""
    assert place.ledger is not None
    known = place.ledger.remembered()
    if "before" in known:
        return json.loads(known["before"])  # type: ignore[no-any-return]
    found: dict[str, float | None] = {"score_before": None, "mismatch_before": None}
    if loop.version == 0:
        watcher.phase("evaluation before")
        found = {"score_before": await _score(place), "mismatch_before": await _self_check(place, loop, watcher)}
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
        done += f"; {restart.lost_trajectories} answers under way are lost with {restart.lost_tokens} tokens, {fate}"
    elif restart.rule == "resume":
        done += f"; answers under way go on, without {restart.lost_tokens} tokens sampled since the checkpoint"
    return f"{done} (recovery.in_flight = {restart.rule})"


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """A full disk becomes a message."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise RunError(
            f"{path} could not be written: {error}. Once there is room, `headrace resume {path.parent}` goes on from "
            "the last checkpoint"
        ) from error


class _Summary:
    """`summary.json`, written when the steps end and again with the last evaluation."""

    def __init__(self, place: Place, loop: Loop, run_dir: Path, before: dict[str, float | None]) -> None:
        self.content: dict[str, Any] = {}
        self._place, self._loop, self._run_dir, self._before = place, loop, run_dir, before

    def write(self, *, finished: bool, after: float | None) -> dict[str, Any]:
        """Bring the file up to date; returns its content."""
        assert self._place.ledger is not None
        totals = summarise(self._place.ledger, self._loop, wall_s=self._place.clock.now())
        known = {"run_dir": str(self._run_dir), "finished": finished, **self._before, "score_after": after}
        self.content = known | totals
        with _writing(self._run_dir / SUMMARY):
            (self._run_dir / SUMMARY).write_text(json.dumps(self.content, indent=2) + "\n")
        return self.content


async def _interruptible(loop: Loop) -> None:
    """Run the loop so that Ctrl-C, or the SIGTERM of a cluster, ends it with everything accounted for."""
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


async def _self_check(place: Place, loop: Loop, watcher: Watcher) -> float | None:
    """How far engine and learner are apart before the first step; the user hears of it when that is far.

    In exact mode, any distance ends the run.
    """
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
    facts = place.facts
    where = f"{facts.device}, {facts.dtype}"
    return {
        "policy": f"{facts.name}, {facts.num_weights / 1e6:.1f}M weights, {where}",
        "data": f"{place.prompts.num_train} prompts to train on, {len(place.prompts.held_out)} held out",
        "reward": place.scorer.function,
    }


__all__ = ["evaluate_run", "export", "load_config", "resume", "train"]
