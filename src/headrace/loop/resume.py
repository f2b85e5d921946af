"""Go on where a run stood that ended too soon.

The newest complete checkpoint gives the weights of some version. The steps after it are taken again, with the groups
that the ledger kept, in the order they were trained on: that leads to the weights the dead process had, to the last
bit. Groups that waited in the buffer wait there again. What was under way is started again, gone on with, or left out,
by `recovery.in_flight`; the tokens that are lost with it are booked as redone, or crashed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from headrace.errors import RunError
from headrace.ledger.files import REFERENCE
from headrace.ledger.journal import Restart
from headrace.ledger.ledger import Amount
from headrace.ledger.recovery import Recovery
from headrace.loop.checkpoint import Checkpoints
from headrace.loop.groups import Again
from headrace.loop.loop import Loop
from headrace.types import DropReason, Group


async def resume(loop: Loop, on_note: Callable[[str], None]) -> Restart:
    """Bring the loop to where the run stood; the engine must not be running yet."""
    stages = loop.stages
    ledger, recovery = stages.ledger, Recovery(stages.ledger)
    checkpoint = stages.checkpoints.newest(on_note)
    if checkpoint is None:
        raise RunError(f"{ledger.run_dir} has no checkpoint that can be read: the run cannot be resumed")
    next_serial = max((attempt.serial for attempt in recovery.attempts()), default=-1) + 1
    stages.prompts.restore({**checkpoint.facts["prompts"], "serial": next_serial})
    await stages.device.run(stages.ranks.load, checkpoint.tensors, checkpoint.version)
    await stages.device.run(stages.publisher.commit, checkpoint.version)
    stages.books.version = checkpoint.version
    if stages.ranks.uses_reference:
        await _load_reference(loop, on_note)
    redone = await _redo_steps(loop, on_note)
    rule = _rule(loop)
    loop.again, lost = _take_up(loop, rule)
    restart = Restart(
        number=len(ledger.restarts()) + 1,
        at_s=stages.clock.now(),
        checkpoint=checkpoint.version,
        version=loop.version,
        rule=rule,
        redone_steps=len(redone),
        retrained_tokens=sum(group.num_sampled_tokens for groups in redone for group in groups),
        lost_tokens=lost.tokens,
        lost_trajectories=lost.trajectories,
    )
    recovery.restarted(restart)
    return restart


async def _load_reference(loop: Loop, on_note: Callable[[str], None]) -> None:
    """The weights before the first step, from which training is not to stray."""
    stages = loop.stages
    kept = Checkpoints(stages.ledger.run_dir, 1, REFERENCE).newest(on_note)
    if kept is None:
        raise RunError(f"{stages.ledger.run_dir / REFERENCE} cannot be read: without it learner.kl_coef has no meaning")
    await stages.device.run(partial(stages.ranks.load, kept.tensors, 0, reference=True))


async def _redo_steps(loop: Loop, on_note: Callable[[str], None]) -> list[list[Group]]:
    """The steps after the checkpoint, once more; the groups of each."""
    ledger, recovery = loop.stages.ledger, Recovery(loop.stages.ledger)
    rows = {row.step: row for row in ledger.rows()}
    loop.rows.restore(recovery.scored_since_row())
    for row in rows.values():
        loop.ending.rewarded(row.reward_mean)
    redone = []
    for step, named in recovery.steps_after(loop.version):
        groups = [_group(loop, serial, attempt) for serial, attempt in named]
        stats = await loop.redo(groups)
        if step not in rows:  # the process died between the update and its booking
            loop.on_row(await loop.conclude(step, groups, stats, may_evaluate=False))
        elif (stats.loss, stats.grad_norm) != (rows[step].loss, rows[step].grad_norm) and not stats.skipped:
            on_note(
                f"step {step} came out differently the second time (gradient norm {stats.grad_norm:.6g}, before "
                f"{rows[step].grad_norm:.6g}): it was taken elsewhere, or this machine does not compute the same twice"
            )
        redone.append(groups)
    return redone


def _redoes_waves(loop: Loop) -> bool:
    """A batch changes bits: strictly on-policy, a wave is generated again as a whole, or not at all."""
    return loop.config.loop.max_lag == 0 and not loop.stages.pool.exact


def _rule(loop: Loop) -> str:
    """What becomes of answers under way: `recovery.in_flight`, where that can be had."""
    rule = loop.config.recovery.in_flight
    return "requeue" if rule == "resume" and _redoes_waves(loop) else rule


def _take_up(loop: Loop, rule: str) -> tuple[list[Again], Amount]:
    """Buffer what waited, lose what was under way; what is to be started again, and what was lost."""
    recovery, rule = Recovery(loop.stages.ledger), "drop" if loop.over else rule
    under_way, again = recovery.attempts(state="open"), []
    if rule == "requeue" and _redoes_waves(loop):
        waves = sorted({attempt.wave for attempt in under_way})
        under_way = [attempt for wave in waves for attempt in recovery.attempts(wave=wave)]
    if rule == "resume":
        so_far = {attempt.serial: recovery.partials(attempt.serial) for attempt in under_way}
        kept_tokens = sum(t.num_sampled_tokens for answers in so_far.values() for t in answers.values())
        lost = recovery.carry_on(under_way, kept_tokens)
        again = [Again(replace(a, number=a.number + 1), so_far[a.serial]) for a in under_way]
    elif rule == "requeue":
        lost = recovery.lose(under_way, DropReason.REDONE)
    else:
        lost = recovery.lose([], DropReason.CRASHED)
    loop.rows.restore(recovery.scored_since_row())  # without what will be scored again
    # also those that an earlier restart did not come to start
    newest = {attempt.serial: attempt for attempt in sorted(recovery.attempts(), key=lambda a: a.number)}
    redone = {(attempt.serial, attempt.number) for attempt in recovery.attempts(state="redone")}
    again += [
        Again(replace(a, number=a.number + 1)) for _, a in sorted(newest.items()) if (a.serial, a.number) in redone
    ]
    buffered = [_group(loop, serial, attempt) for serial, attempt in recovery.buffered_groups()]
    last_wave = max((attempt.wave for attempt in recovery.attempts()), default=0)
    loop.stages.buffer.restore(version=loop.version, wave=last_wave, buffered=buffered, num_again=len(again))
    return again, lost


def _group(loop: Loop, serial: int, attempt: int) -> Group:
    trajectories = tuple(Recovery(loop.stages.ledger).trajectories(serial, attempt))
    prompt = loop.stages.prompts.at(serial)
    version = min(t.oldest_version for t in trajectories)
    return Group(serial=serial, prompt=prompt, version=version, trajectories=trajectories, attempt=attempt)
