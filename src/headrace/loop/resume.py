"""Resume a run that ended too soon.

The newest complete checkpoint gives the weights of some version. The steps after it are taken
again, with the groups that the ledger kept, in the order they were trained on. That gives the
weights that the dead process had, to the last bit if the number of CPU threads is the same.
Buffered groups are buffered again. Groups in flight are started again, continued, or left out, by
`recovery.in_flight`; tokens that are lost with them are booked as redone or crashed.
"""

from collections.abc import Callable
from functools import partial

from headrace.errors import RunError
from headrace.ledger.files import REFERENCE
from headrace.ledger.journal import Restart
from headrace.ledger.ledger import Amount
from headrace.ledger.recovery import Recovery, changes
from headrace.loop.checkpoint import Checkpoints
from headrace.loop.groups import Again, in_flight_rule, redoes_waves
from headrace.loop.loop import Loop
from headrace.loop.replay import group_of
from headrace.types import DropReason, Group


async def resume(loop: Loop, on_note: Callable[[str], None]) -> Restart:
    """Bring `loop` to where the run stood. The engine must not be running yet."""
    stages = loop.stages
    ledger, recovery = stages.ledger, Recovery(stages.ledger)
    if (checkpoint := stages.checkpoints.newest(on_note)) is None:
        raise RunError(f"{ledger.run_dir} cannot be resumed: it has no checkpoint that can be read")
    drawn = {attempt.serial: attempt.prompt_id for attempt in recovery.attempts()}
    stages.prompts.restore({**checkpoint.facts["prompts"], "serial": len(drawn)}, drawn)
    await stages.device.run(stages.ranks.load, checkpoint.tensors, checkpoint.version)
    await stages.device.run(stages.publisher.commit, checkpoint.version)
    stages.books.reached(checkpoint.version)
    if stages.ranks.keeps_reference:
        if (kept := Checkpoints(ledger.run_dir, 1, REFERENCE).newest(on_note)) is None:
            raise RunError(f"{ledger.run_dir / REFERENCE} cannot be read, and learner.kl_coef needs it")
        await stages.device.run(partial(stages.ranks.load, kept.tensors, 0, reference=True))
    redone = await _redo_steps(loop, on_note)
    rule = in_flight_rule(loop.config)
    again, lost = _take_up(loop, "drop" if loop.over else rule)
    loop.again.extend(again)
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


async def _redo_steps(loop: Loop, on_note: Callable[[str], None]) -> list[list[Group]]:
    """Take the steps after the checkpoint again; returns the groups of each."""
    ledger, recovery = loop.stages.ledger, Recovery(loop.stages.ledger)
    rows = {row.step: row for row in ledger.rows()}
    for known in rows.values():
        loop.ending.row(known)
    heated = max((c.step for c in changes(loop.stages.ledger) if c.key == "rollout.temperature"), default=0)
    for step, named in recovery.steps_after(heated) if loop.config.buffer.replay[0] else ():
        if step in rows:  # `conclude` will tell of the others
            loop.replay.trained(step, named, skipped=rows[step].skipped)
    redone = []
    for step, named in recovery.steps_after(loop.version):
        groups = [group_of(loop.stages, *group) for group in named]
        stats = await loop.redo(groups)
        if (row := rows.get(step)) is None:  # the process died between the update and its booking
            loop.on_row(await loop.conclude(step, groups, stats, may_evaluate=False))
        elif not stats.skipped and (stats.loss, stats.grad_norm) != (row.loss, row.grad_norm):
            norms = f"gradient norm {stats.grad_norm:.6g}, before {row.grad_norm:.6g}"
            told = "first taken on another machine, or this one does not compute the same twice"
            on_note(f"step {step} came out differently the second time ({norms}): it was {told}")
        redone.append(groups)
    return redone


def _take_up(loop: Loop, rule: str) -> tuple[list[Again], Amount]:
    """Buffer the groups that waited; returns the groups to start again, and what was lost."""
    recovery = Recovery(loop.stages.ledger)
    under_way = recovery.attempts(state="open")
    again: list[Again] = []
    if rule == "requeue" and redoes_waves(loop.config):
        waves = sorted({attempt.wave for attempt in under_way})
        under_way = [attempt for wave in waves for attempt in recovery.attempts(wave=wave)]
    if rule == "resume":
        so_far = {attempt.serial: recovery.partials(attempt.serial) for attempt in under_way}
        kept = [t for answers in so_far.values() for t in answers.values()]
        lost = recovery.carry_on(under_way, sum(t.num_sampled_tokens for t in kept))
        again = [(a.serial, a.number + 1, so_far[a.serial]) for a in under_way]
    elif rule == "requeue":
        lost = recovery.lose(under_way, DropReason.REDONE)
    else:
        lost = recovery.lose([], DropReason.CRASHED)
    # also those that an earlier restart did not get to start
    newest = {a.serial: a for a in sorted(recovery.attempts(), key=lambda a: a.number)}
    redone = set(recovery.attempts(state="redone"))
    again += [(serial, a.number + 1, None) for serial, a in sorted(newest.items()) if a in redone]
    buffered = [group_of(loop.stages, *group) for group in recovery.buffered_groups()]
    finished = [a.version for serial, a in newest.items() if serial not in {serial for serial, *_ in again}]
    steps = recovery.steps_after(0)
    before = {group for step, groups in steps if step < loop.version for group in groups}
    trained = {group for step, groups in steps if step == loop.version for group in groups} - before
    loop.stages.buffer.restore(
        version=loop.version,
        wave=max((attempt.wave for attempt in newest.values()), default=0),
        buffered=buffered,
        num_again=len(again),
        begun=(finished.count(loop.version - 1), finished.count(loop.version)),
        kept=(len(trained), len(buffered)),
    )
    return again, lost
