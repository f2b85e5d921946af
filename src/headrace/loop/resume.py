"""Go on where a run stood that ended too soon.

The newest complete checkpoint gives the weights of some version. The steps after it are taken again, with the groups
that the ledger kept, in the order they were trained on: that leads to the weights the dead process had, to the last
bit. Groups that waited in the buffer wait there again. What was under way is started again or left out, by
`recovery.in_flight`; its tokens are booked as redone, or crashed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from headrace.errors import RunError
from headrace.ledger.journal import Attempt, Restart
from headrace.loop.loop import Loop
from headrace.types import DropReason, Group


async def resume(loop: Loop, on_note: Callable[[str], None]) -> Restart:
    """Bring the loop to where the run stood; the engine must not be running yet."""
    stages = loop.stages
    ledger = stages.ledger
    checkpoint = stages.checkpoints.newest(on_note)
    if checkpoint is None:
        raise RunError(f"{ledger.run_dir} has no checkpoint that can be read: the run cannot be resumed")
    next_serial = max((attempt.serial for attempt in ledger.attempts()), default=-1) + 1
    stages.prompts.restore({**checkpoint.facts["prompts"], "serial": next_serial})
    await stages.device.run(checkpoint.load, stages.learner.tensors())
    await stages.device.run(stages.learner.loaded, checkpoint.version)
    await stages.device.run(stages.publisher.commit, checkpoint.version)
    loop.version = checkpoint.version
    redone = await _redo_steps(loop, on_note)
    again, lost_tokens, lost_trajectories = _take_up(loop)
    restart = Restart(
        number=len(ledger.restarts()) + 1,
        at_s=stages.clock.now(),
        checkpoint=checkpoint.version,
        version=loop.version,
        rule=loop.config.recovery.in_flight,
        redone_steps=len(redone),
        retrained_tokens=sum(group.num_sampled_tokens for groups in redone for group in groups),
        lost_tokens=lost_tokens,
        lost_trajectories=lost_trajectories,
    )
    ledger.restarted(restart)
    loop.again = again
    return restart


async def _redo_steps(loop: Loop, on_note: Callable[[str], None]) -> list[list[Group]]:
    """The steps after the checkpoint, once more; the groups of each."""
    ledger = loop.stages.ledger
    rows = {row.step: row for row in ledger.rows()}
    loop.rows.restore(ledger.scored_since_row())
    for row in rows.values():
        loop.solved = loop.reached(row.reward_mean)
    redone = []
    for step, named in ledger.steps_after(loop.version):
        groups = [_group(loop, serial, attempt) for serial, attempt in named]
        stats = await loop.redo(groups)
        if step not in rows:  # the process died between the update and its booking
            await loop.conclude(step, groups, stats, may_evaluate=False)
        elif (stats.loss, stats.grad_norm) != (rows[step].loss, rows[step].grad_norm) and not stats.skipped:
            on_note(
                f"step {step} came out differently the second time (gradient norm {stats.grad_norm:.6g}, before "
                f"{rows[step].grad_norm:.6g}): this machine does not compute the same twice"
            )
        redone.append(groups)
    return redone


def _take_up(loop: Loop) -> tuple[list[Attempt], int, int]:
    """Buffer what waited, lose what was under way; what is to be started again, and what was lost."""
    ledger, drop = loop.stages.ledger, loop.config.recovery.in_flight == "drop" or loop.over
    redo = ledger.attempts("state = 'open'")
    if loop.config.loop.max_lag == 0 and not drop and not loop.stages.actor.engine.policy.exact:
        # company changes bits: strictly on-policy, a wave is generated again as a whole, or not at all
        waves = {attempt.wave for attempt in redo}
        redo = [attempt for wave in sorted(waves) for attempt in ledger.attempts("wave = ?", (wave,))]
    lost = ledger.lose([] if drop else redo, DropReason.CRASHED if drop else DropReason.REDONE)
    loop.rows.restore(ledger.scored_since_row())  # without what will be scored again
    buffered = [_group(loop, serial, attempt) for serial, attempt in ledger.buffered_groups()]
    last_wave = max((attempt.wave for attempt in ledger.attempts()), default=0)
    loop.stages.buffer.restore(version=loop.version, wave=last_wave, buffered=buffered)
    # also those that an earlier restart did not come to start
    newest = {attempt.serial: attempt for attempt in sorted(ledger.attempts(), key=lambda a: a.number)}
    redone = {(attempt.serial, attempt.number) for attempt in ledger.attempts("state = 'redone'")}
    again = [a for _, a in sorted(newest.items()) if (a.serial, a.number) in redone]
    return [replace(attempt, number=attempt.number + 1) for attempt in again], lost.tokens, lost.trajectories


def _group(loop: Loop, serial: int, attempt: int) -> Group:
    trajectories = tuple(loop.stages.ledger.trajectories(serial, attempt))
    prompt = loop.stages.prompts.at(serial)
    version = min(t.oldest_version for t in trajectories)
    return Group(serial=serial, prompt=prompt, version=version, trajectories=trajectories, attempt=attempt)
