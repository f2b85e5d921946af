"""Headrace from Python: what the commands do, as functions (see the example in `__init__.py`)."""

import asyncio
import json
import shutil
import signal
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from headrace.config import Config
from headrace.config_file import cost_of, load_config, num_devices, rooted
from headrace.errors import LearnerLostError, RunError
from headrace.ledger import files
from headrace.ledger.database import FILE_NAME, claimed, is_complete
from headrace.ledger.journal import Restart
from headrace.ledger.ledger import Ledger
from headrace.ledger.recovery import FIXED, book_origin, refuse_unasked
from headrace.ledger.sinks import open_sinks
from headrace.loop.checkpoint import Checkpoints
from headrace.loop.groups import evaluate, samplings_of
from headrace.loop.loop import Loop
from headrace.loop.resume import resume as resume_loop
from headrace.loop.self_check import NUM_SAMPLES, few_answers, verdict
from headrace.loop.watchdog import Watchdog
from headrace.measured import Row, Sample, stages_of
from headrace.place.device import STEPS, memory_for
from headrace.place.place import Place, Reward, open_place
from headrace.policy import hub
from headrace.policy.policy import ADAPTER_DIR
from headrace.roles import R, Sink, Watcher
from headrace.serve.front_desk import Visitors

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_TRAINING: dict[asyncio.AbstractEventLoop, Loop] = {}  # what Ctrl-C in another thread interrupts


def train(config: Config, watcher: Watcher | None = None, *, reward: Reward = None) -> dict[str, Any]:
    """Train by `config`; returns the content of the run directory's `summary.json`.

    `watcher` is told about progress: a subclass of `headrace.Watcher` with the methods it wants.
    `reward` is a function to use instead of the one that `reward.function` names (for what it gets
    and returns see docs/guides/own-reward.md). Works in a notebook too. What the summary calls
    unfinished was interrupted, and can be resumed.
    """
    config = rooted(config)
    run_dir = files.prepare_run_dir(config)
    with claimed(run_dir), files.starting(run_dir), memory_for("training", STEPS):
        return _to_the_end(config, run_dir, watcher or Watcher(), reward, resumed=False)


def resume(
    run_dir: Path | str, watcher: Watcher | None = None, overrides: Sequence[str] = (), *, reward: Reward = None
) -> dict[str, Any]:
    """Go on with a run that was interrupted or died; returns the content of its `summary.json`.

    `overrides` such as "loop.steps=200" change settings, even of a finished run; it is booked.
    """
    run_dir = Path(run_dir)
    config = rooted(files.run_config(run_dir, overrides))
    if fixed := [word for word in overrides if word.startswith(FIXED)]:
        raise RunError(f"{', '.join(fixed)}: that cannot change in the middle of a run")
    _refuse_finished(run_dir, config)
    with claimed(run_dir), memory_for("training", STEPS):
        if any(word.startswith("rollout.workers") for word in overrides):
            (run_dir / files.WANTED_WORKERS).unlink(missing_ok=True)
        if begun := is_complete(run_dir):
            with Ledger.open(run_dir) as ledger:
                refuse_unasked(ledger, config, overrides, _name_of(reward))
        else:
            _refuse_without_ledger(run_dir)
        return _to_the_end(config, run_dir, watcher or Watcher(), reward, resumed=begun)


def _refuse_finished(run_dir: Path, config: Config) -> None:
    summary = files.read_summary(run_dir)
    if summary.get("finished") is not True:
        return
    steps, why = int(summary["steps"]), summary.get("ended_early", "")
    told, more = f"{run_dir} has finished its {steps} steps", f"headrace resume {run_dir} loop.steps={2 * steps}"
    if why:
        told = f"{run_dir} has finished after {steps} steps: {why}"
        more += " loop.target_reward=inf"
    before, wanted = files.run_config(run_dir).loop, config.loop
    if wanted.steps <= steps or (why and wanted.target_reward == before.target_reward):
        raise RunError(f"{told}. To train on: {more}")


def _refuse_without_ledger(run_dir: Path) -> None:
    """A run without a ledger starts anew, unless it had come further than its first checkpoint."""
    steps = [version for version in Checkpoints(run_dir, 1).versions if version]
    weights = f"headrace train model.path={run_dir / files.WEIGHTS}" if (run_dir / files.WEIGHTS).exists() else ""
    if steps or weights:
        left = f"the checkpoints of steps {', '.join(map(str, steps))}" if steps else "its weights"
        gone = f"its ledger ({FILE_NAME}) is missing or empty, and with it the account of what was trained on"
        more = f", and a new run can start from its weights: {weights}" if weights else ""
        helps = f"Put a copy of it back. Without one, {left} are left{more}"
        raise RunError(f"{run_dir} cannot be resumed: {gone}. {helps}")
    files.undo_start(run_dir, keep=files.SETTINGS)  # without them, another kill would leave nothing to resume


def _name_of(reward: Reward) -> str:
    return "" if reward is None else getattr(reward, "__name__", type(reward).__name__)


def _to_the_end(config: Config, run_dir: Path, watcher: Watcher, reward: Reward, *, resumed: bool) -> dict[str, Any]:
    """Train. When the learner is lost, resume, unless no step was done since it was lost before."""
    reached = -1
    while True:
        try:
            return _run_events(partial(_train, config, run_dir, watcher, reward, resumed=resumed))
        except LearnerLostError as lost:
            resumed = is_complete(run_dir)
            with Ledger.open(run_dir) if resumed else nullcontext() as ledger:
                version = len(ledger.rows()) if ledger else 0
            if version <= reached:
                again = f"It was lost at step {version + 1} before: `headrace resume {run_dir}`"
                raise RunError(f"{lost}. {again}") from lost
            reached = version
            watcher.note(f"{lost}. The run goes on from its last checkpoint")


def _run_events(work: Callable[[], Coroutine[None, None, R]]) -> R:
    """Run a coroutine to its end, also from a notebook, whose event loop runs in this thread."""
    ours = None
    with suppress(RuntimeError):
        ours = asyncio.get_running_loop()
    if ours is None:  # outside of the exception: what the run raises has nothing to do with it
        return asyncio.run(work())
    events = asyncio.new_event_loop()

    def run() -> R:
        with asyncio.Runner(loop_factory=lambda: events) as runner:
            return runner.run(work())

    with ThreadPoolExecutor(1) as beside:
        running = beside.submit(run)
        try:
            return running.result()
        except KeyboardInterrupt:
            events.call_soon_threadsafe(_interrupt, events)
            return running.result()


def _interrupt(events: asyncio.AbstractEventLoop) -> None:
    """Stop a run as Ctrl-C does: in an orderly way if it trains, else by cancelling it."""
    if (loop := _TRAINING.get(events)) is not None:
        loop.interrupt()
        return
    for task in asyncio.all_tasks(events):
        task.cancel()


def evaluate_run(
    run_dir: Path | str, overrides: Sequence[str] = (), *, best: bool = False, reward: Reward = None
) -> float | None:
    """The held-out score of a run's weights, or of its `best` ones.

    `overrides` are settings, such as "prompts.eval_source=other.jsonl" or "loop.eval_samples=8".
    """
    return _with_engines(Path(run_dir), overrides, _score, best, reward)


def serve_run(
    run_dir: Path | str, on_ready: Callable[[str], None], *, host: str, port: int, key: str, best: bool = False
) -> None:
    """Serve a run's weights, or its `best` ones, to clients of the OpenAI API that have the key, until interrupted.

    `on_ready(base_url)` is called when it listens.
    """

    async def work(place: Place) -> None:
        (sampling,) = samplings_of(place.config, place.config.rollout.temperature, 1)
        name = Path(run_dir).resolve().name
        visits = place.episodes_of(partial(Visitors, name, key, (host, port), sampling), on_ready)
        try:
            await visits.prepare()
            await asyncio.Event().wait()
        finally:
            await visits.close()

    _with_engines(Path(run_dir), ["episode.environment=", "episode.agent="], work, best)


def _with_engines(
    run_dir: Path, overrides: Sequence[str], work: Callable[[Place], Awaitable[R]], best: bool, reward: Reward = None
) -> R:
    """Do `work` with a run's weights and settings, in this process."""
    config = rooted(files.run_config(run_dir, overrides))
    if config.rollout.addresses and files.is_claimed(run_dir):
        told = f"{run_dir} is training with the servers of its rollout.command"
        raise RunError(f"{told}; wait for its end, or set rollout.engine=embedded rollout.command=")
    config = config.but(
        model={"path": str(weights_dir(run_dir, best=best)), "tokenizer": ""},
        buffer={"filters": ()},  # their files may be gone, and nothing is trained on
        place={"cluster": "local"},
        rollout={"workers": 1},
        learner={"ranks": 1, "loss": "ppo", "advantage": "grpo", "teacher": ""},
    )

    async def run() -> R:
        place = open_place(config, run_dir, reward=reward)
        try:
            await place.start_user_code()
            await place.start_engines()
            return await work(place)
        finally:
            await place.close()

    return _run_events(run)


def export(run_dir: Path | str, out: Path | str, *, best: bool = False, adapter: bool = False, push: str = "") -> Path:
    """Copy a run's model to the directory `out`, in the format of `transformers`, with a model card.

    `best`: the weights with the best held-out score. `adapter`: not the whole model with the
    adapter in its weights, but the adapter alone, in the format of `peft`. `push` is a repository
    of the Hugging Face hub, owner/name, that gets it too.
    """
    run_dir, out = Path(run_dir), Path(out)
    source = weights_dir(run_dir, best=best) / (ADAPTER_DIR if adapter else "")
    if not source.exists():
        raise RunError(f"{run_dir} has no adapter: it trained all weights (learner.lora_rank = 0), or is older")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RunError(f"{out} exists and is not an empty directory")
    shutil.copytree(source, out, dirs_exist_ok=True, ignore=shutil.ignore_patterns(ADAPTER_DIR))
    card = hub.model_card(files.run_config(run_dir), files.read_summary(run_dir))
    (out / hub.CARD).write_text(card, encoding="utf-8")
    if push:
        hub.push(out, push)
    return out


def weights_dir(run_dir: Path, *, best: bool = False) -> Path:
    """Where a run left its weights, or those with the best held-out score."""
    path = run_dir / (files.BEST if best else files.WEIGHTS)
    if not path.exists():
        told = f"weights (no {path.name} directory); did the run finish?"
        if best:
            told = f"{path.name} directory: it trained without loop.keep_best, or made no evaluation"
        raise RunError(f"{run_dir} has no {told}")
    return path


async def _train(config: Config, run_dir: Path, watcher: Watcher, reward: Reward, *, resumed: bool) -> dict[str, Any]:
    place = open_place(config, run_dir, resumed=resumed, on_note=watcher.note, reward=reward)
    sinks: list[Sink] = []
    limit_s = config.recovery.hang_s and config.recovery.hang_s + config.reward.timeout_s
    watchdog = Watchdog(limit_s, place.progress, place.clock, run_dir, watcher.note)
    try:
        await place.start_user_code()
        watchdog.start()
        sinks = open_sinks(config, run_dir, place.ledger.rows() if place.ledger is not None else [])
        watcher.header(config, run_dir, _facts(place))
        if (steps := config.warmstart.steps) and not resumed:
            watcher.phase(f"warm start: {steps} supervised steps on worked examples")
            with place.clock.span("warm start"):
                async for done, loss in place.warm_start():
                    place.clock.moved("warm start")
                    watcher.progress(done, steps, f"loss {loss:.3f}")

        def on_row(row: Row) -> None:
            if row.skipped:
                watcher.note(f"step {row.step}: the gradient was not finite; the weights stay as they were")
            for told in (*sinks, watcher):
                told.row(row)

        def on_sample(sample: Sample) -> None:
            for told in (*sinks, watcher):
                told.sample(sample)

        loop = await place.loop(on_row, on_sample)
        files.save_settings(config, run_dir)  # with what `resume` overrides, now that it works
        book_origin(loop.stages.ledger, config, _name_of(reward))
        (run_dir / files.SUMMARY).unlink(missing_ok=True)
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
    run_dir, before = place.run_dir, await _before(place, loop, watcher)
    score = before["score_before"]
    watcher.phase("training" if score is None else f"training; held-out score before: {score:.3f}")
    stopped = ""
    try:
        await _interruptible(loop)
        stopped = "it was interrupted" if loop.ending.asked else ""
    except Exception as error:
        stopped = str(error)
        raise
    finally:  # however training ended, its weights are kept; of a hung run they may be half updated
        if not watchdog.hung and not place.ranks.lost:
            with _writing(run_dir / files.WEIGHTS):
                await place.device.run(place.ranks.save, run_dir / files.WEIGHTS)
        summary = _summary(loop, finished=False, stopped=stopped, **before, score_after=None)
    if loop.ending.asked:
        return summary
    if loop.ending.early:
        watcher.note(f"training ends here: {loop.ending.early}")
    watcher.phase("evaluation after")
    after = await _score(place) if loop.version else score  # without a step the policy is the same
    return _summary(loop, finished=True, stopped="", **before, score_after=after)


async def _before(place: Place, loop: Loop, watcher: Watcher) -> dict[str, float | None]:
    """The held-out score and the mismatch before the first step; measured once in a run."""
    if "before" in (known := loop.stages.ledger.remembered()):
        return json.loads(known["before"])  # type: ignore[no-any-return]
    if loop.version:
        return {"score_before": None, "mismatch_before": None}
    watcher.phase("evaluation before")
    found = {"score_before": await _score(place), "mismatch_before": await _self_check(place, watcher)}
    loop.stages.ledger.remember("before", json.dumps(found))
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
        told = f"`headrace resume {path.parent}` goes on from the last checkpoint"
        raise RunError(f"{path} could not be written: {error}. Once there is room, {told}") from error


def _summary(loop: Loop, **told: Any) -> dict[str, Any]:
    """Write `summary.json`, when the steps end and after the last evaluation; returns its content.

    `told` is what the loop does not know; `stopped` is why an unfinished run trains no more.
    `wall_s` is the seconds of the whole command, `loop_s` of the steps alone. `wall` is the
    bottleneck: the stage that was busy longest.
    """
    stages, ending, run_dir = loop.stages, loop.ending, loop.stages.ledger.run_dir
    rows, books, counts = stages.ledger.rows(), stages.ledger.totals(), stages.pool.counts
    wall_s, loop_s = stages.clock.now(), sum(row.wall_s for row in rows)
    stage_s, wall = stages_of(rows)
    lags = sum(row.lag_mean * row.trained_tokens for row in rows)
    content = {
        "run_dir": str(run_dir),
        **told,
        "wall_s": wall_s,
        "loop_s": loop_s,
        "steps": len(rows),
        "version": loop.version,
        "generated_tokens": books.generated.tokens,
        "trained_tokens": books.trained.tokens,
        "dropped_tokens": {reason: a.tokens for reason, a in sorted(books.dropped.items())},
        "goodput_tokens_per_s": books.trained.tokens / loop_s if loop_s else 0.0,
        "device_hours": num_devices(loop.config) * wall_s / 3600,
        "dollars": cost_of(loop.config, wall_s),
        "mean_lag_seen": lags / max(1, books.trained.tokens),
        "max_lag_seen": max((row.lag_max for row in rows), default=0),
        "stage_s": stage_s,
        "wall": wall,
        "drafted_tokens": counts.drafted_tokens,
        "accepted_tokens": counts.accepted_tokens,
        "reward_failure": loop.rows.first_reward_failure,
        "best_score": ending.best_score if ending.best_step else None,
        "best_step": ending.best_step or None,
        "ended_early": ending.early,
    }
    with _writing(run_dir / files.SUMMARY):
        (run_dir / files.SUMMARY).write_text(json.dumps(content, indent=2) + "\n")
    return content


async def _interruptible(loop: Loop) -> None:
    """Run the loop so that Ctrl-C, or a cluster's SIGTERM, interrupts it in an orderly way."""
    events = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in STOPPING}
    if before[signal.SIGHUP] is signal.SIG_IGN:  # by nohup: it is to go on
        del before[signal.SIGHUP]
    _TRAINING[events] = loop
    with suppress(NotImplementedError, RuntimeError):  # not in the main thread, or not here
        for number in before:
            events.add_signal_handler(number, loop.interrupt)
    try:
        await loop.run()
    finally:
        del _TRAINING[events]
        with suppress(NotImplementedError, RuntimeError, TypeError, ValueError):
            for number, handler in before.items():
                events.remove_signal_handler(number)
                signal.signal(number, handler)


async def _score(place: Place) -> float | None:
    """The held-out score."""
    return await evaluate(place.answers, place.scorer, place.prompts.held_out, place.config)


async def _self_check(place: Place, watcher: Watcher) -> float | None:
    """The mismatch of engine and learner before the first step; the user is told if it is large."""
    if not place.config.loop.steps:
        return None
    heats = place.config.rollout.temperature[: 1 if place.config.learner.loss == "tba" else None]
    samplings = samplings_of(place.config, heats, NUM_SAMPLES)
    answers = await few_answers(place.pool, place.prompts.held_out, samplings)
    found = await place.device.run(place.ranks.mismatch, answers)
    told = verdict(found, place.facts.dtype, exact=place.config.model.exact is True)
    if place.facts.exact and found.mean_abs:
        far = f"{found.mean_abs:.2g} nats between engine and learner on average"
        told = told or f"exact mode, but the start-up check found {far}: set model.exact = false, and please report it"
    for text in filter(None, (told, place.facts.unchecked)):
        watcher.note(text)
    return found.mean_abs


def _facts(place: Place) -> dict[str, str]:
    f, e, reward = place.facts, place.config.episode, place.scorer.function
    if played := e.environment or e.agent:
        reward = f"by {played}" + f", and {reward}" * bool(place.config.reward.function)
    on, told = ("on", "have the same bits") if f.exact else ("off", "differ by rounding")
    return {
        "policy": f"{f.name}, {f.num_weights / 1e6:.1f}M weights, {f.device}, {f.dtype}",
        "exact": f"{on}: sampled and trained log-probs {told}",
        "data": f"{place.prompts.num_train} prompts to train on, {len(place.prompts.held_out)} held out",
        "reward": reward,
    }


__all__ = ["Watcher", "evaluate_run", "export", "load_config", "resume", "serve_run", "train"]
