"""Trajectories come one by one as they finish, with the books told first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from plain_forward import Steps, make_engine, prompt_ids, stock_model
from plain_forward import plain_logprobs as expected_logprobs

from headrace.errors import DataError
from headrace.policy.policy import Policy
from headrace.rollout.actor import RolloutActor
from headrace.rollout.engine import Engine
from headrace.rollout.rows import Generation
from headrace.types import FinishReason, Order, Prompt, Sampling, Span, Trajectory

pytestmark = pytest.mark.usefixtures("endless")  # so that the length of an answer is known

PROMPTS = [Prompt(id=f"p{n}", text="?" * n, token_ids=prompt_ids(n)) for n in (4, 9, 17)]
LONG, MIDDLE, SHORT = (Sampling(max_new_tokens=n) for n in (90, 25, 6))


class Thread:
    """Device work off the event loop."""

    async def run(self, work: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.to_thread(work, *args)


@dataclass
class Scene:
    """An actor that runs, and what it told."""

    actor: RolloutActor
    running: asyncio.Task[None]
    clock: Steps
    booked: list[int]
    stages: list[str]
    futures: dict[str, asyncio.Future[Trajectory]]

    def start(
        self, serial: int, prompt: Prompt, samplings: Sequence[Sampling], *, counted: bool = True
    ) -> list[asyncio.Future[Trajectory]]:
        order = order_of(serial, prompt, samplings, counted=counted)
        futures = {order.request_id(i): asyncio.get_running_loop().create_future() for i in range(len(samplings))}
        self.futures |= futures
        self.actor.start(order)
        return list(futures.values())


def order_of(serial: int, prompt: Prompt, samplings: Sequence[Sampling], *, counted: bool = True) -> Order:
    indices = tuple(range(len(samplings)))
    return Order(serial=serial, prompt=prompt, samplings=tuple(samplings), indices=indices, counted=counted)


@asynccontextmanager
async def acting(policy: Policy, *, seed: int = 0, **settings: Any) -> AsyncIterator[Scene]:
    clock = Steps()
    booked: list[int] = []
    stages: list[str] = []
    futures: dict[str, asyncio.Future[Trajectory]] = {}

    @contextmanager
    def span(stage: str) -> Iterator[None]:
        stages.append(stage)
        clock.now += 1
        yield

    engine = make_engine(policy, clock=clock, **settings)
    actor = RolloutActor(
        engine,
        Thread(),  # type: ignore[arg-type]
        seed=seed,
        clock=clock,
        span=span,
        on_sampled=booked.append,
        on_begun=lambda serial, version: None,
        on_finished=lambda trajectory: futures[trajectory.id].set_result(trajectory),
    )
    running = asyncio.create_task(actor.run())
    try:
        yield Scene(actor, running, clock, booked, stages, futures)
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError, ZeroDivisionError):
            await running


async def test_trajectories_are_complete(policy: Policy):
    model = stock_model(policy)
    samplings = [SHORT, MIDDLE, Sampling(max_new_tokens=9, top_k=5, temperature=0.8)]
    async with acting(policy) as scene:
        futures = [f for serial, p in enumerate(PROMPTS, 40) for f in scene.start(serial, p, samplings)]
        trajectories = await asyncio.gather(*futures)
    assert [t.id for t in trajectories] == [f"{40 + i}:{p.id}/{j}" for i, p in enumerate(PROMPTS) for j in range(3)]
    for i, t in enumerate(trajectories):
        prompt, sampling = PROMPTS[i // 3], samplings[i % 3]
        start, end = len(prompt.token_ids), len(prompt.token_ids) + sampling.max_new_tokens
        assert (t.prompt_id, t.index, t.finish) == (prompt.id, i % 3, FinishReason.LENGTH)
        np.testing.assert_array_equal(t.token_ids[:start], prompt.token_ids)
        np.testing.assert_array_equal(t.sampled, np.arange(end) >= start)
        assert t.spans == (Span(version=0, start=start, end=end),)
        expected = expected_logprobs(model, prompt.token_ids, t.token_ids[start:], sampling)
        np.testing.assert_allclose(t.logprobs[start:], expected, rtol=0, atol=1e-5)
        assert (t.logprobs[:start] == 0).all()
        assert t.text == policy.tokenizer.decode(t.token_ids[start:], skip_special_tokens=True)
        assert (t.replay is not None) == sampling.truncates
        assert t.reward is None
        assert 0 == t.timing.submitted_s < t.timing.started_s <= t.timing.finished_s


async def test_trajectories_come_as_they_finish(policy: Policy):
    order: list[str] = []
    async with acting(policy) as scene:
        futures = scene.start(0, PROMPTS[0], [LONG, SHORT, MIDDLE])
        for future in futures:
            future.add_done_callback(lambda done: order.append(done.result().id[-1]))
        short = await futures[1]
        assert not futures[0].done()
        assert scene.actor.engine.has_work
        later = scene.start(1, PROMPTS[1], [SHORT])
        await asyncio.gather(*futures, *later)
        assert not scene.actor.engine.has_work
    assert order == ["1", "2", "0"]
    assert short.timing.finished_s < futures[0].result().timing.finished_s


async def test_the_first_answers_end_the_others_at_that_engine_step(policy: Policy):
    """However the event loop is held up: what they have sampled depends on the lengths alone."""
    samplings = [LONG, SHORT, MIDDLE, SHORT, LONG]
    ended = []
    for _ in range(2):
        async with acting(policy) as scene:
            order = replace(order_of(0, PROMPTS[0], samplings), first=3)
            scene.futures |= {order.request_id(i): asyncio.get_running_loop().create_future() for i in range(5)}
            scene.actor.start(order)
            whole = scene.start(1, PROMPTS[0], samplings)
            answers = await asyncio.gather(*(scene.futures[order.request_id(i)] for i in range(5)))
            others = await asyncio.gather(*whole)
        ended.append([(t.num_sampled_tokens, t.finish) for t in answers])
        assert sum(scene.booked) == sum(t.num_sampled_tokens for t in [*answers, *others])
        assert [t.num_sampled_tokens for t in others] == [90, 6, 25, 6, 90]
    assert ended[0] == ended[1]
    assert ended[0][1:4] == [(6, FinishReason.LENGTH), (25, FinishReason.LENGTH), (6, FinishReason.LENGTH)]
    for num_tokens, finish in (ended[0][0], ended[0][4]):
        assert finish is FinishReason.ABORT
        assert 25 <= num_tokens < 90, "they ended soon after the third"


async def test_a_group_that_goes_on_counts_what_is_complete(policy: Policy):
    """As after a restart, or when a worker has died."""
    async with acting(policy) as scene:
        known = await asyncio.gather(*scene.start(0, PROMPTS[1], [SHORT, MIDDLE]))
        so_far = {t.index: t for t in known}
        order = replace(order_of(0, PROMPTS[1], [SHORT, MIDDLE, LONG]), first=2, so_far=so_far, attempt=2)
        scene.futures |= {order.request_id(i): asyncio.get_running_loop().create_future() for i in range(3)}
        scene.actor.start(order)
        late = await scene.futures[order.request_id(2)]
    assert late.finish is FinishReason.ABORT
    assert late.num_sampled_tokens < 90


async def test_the_actor_waits_for_work_and_takes_it_up_again(policy: Policy):
    async with acting(policy) as scene:
        for serial in range(3):
            await asyncio.gather(*scene.start(serial, PROMPTS[serial], [SHORT] * 2))
            calls = len(scene.stages)
            await asyncio.sleep(0.01)
            assert len(scene.stages) == calls, "an idle engine is not stepped"
        assert sum(scene.booked) == 3 * 2 * 6


# ---- books


async def test_tokens_are_booked_before_their_trajectories(policy: Policy):
    delivered = 0
    balances: list[int] = []

    async with acting(policy, max_running=4) as scene:

        def arrived(future: asyncio.Future[Trajectory]) -> None:
            nonlocal delivered
            delivered += future.result().num_sampled_tokens
            balances.append(sum(scene.booked) - delivered)

        futures = [f for serial, p in enumerate(PROMPTS) for f in scene.start(serial, p, [LONG, SHORT, MIDDLE])]
        for future in futures:
            future.add_done_callback(arrived)
        await asyncio.gather(*futures)
    assert len(balances) == 9
    assert min(balances) >= 0
    assert sum(scene.booked) == delivered == 3 * (90 + 25 + 6)
    assert all(count > 0 for count in scene.booked)
    assert len(scene.booked) > 3, "tokens are booked as they come, not at the end"


async def test_the_future_resolves_only_after_the_booking(policy: Policy, monkeypatch: pytest.MonkeyPatch):
    """`set_result` itself, not only its callbacks, comes after `on_sampled`."""
    events: list[tuple[str, int]] = []
    deliver = RolloutActor._deliver

    def delivered(actor: RolloutActor, generation: Generation) -> None:
        events.append(("delivered", len(generation.token_ids)))
        deliver(actor, generation)

    monkeypatch.setattr(RolloutActor, "_deliver", delivered)
    async with acting(policy) as scene:
        scene.actor.on_sampled = lambda count: events.append(("booked", count))
        await asyncio.gather(*scene.start(0, PROMPTS[0], [SHORT, MIDDLE]))
    balance = 0
    for kind, count in events:
        balance += count if kind == "booked" else -count
        assert balance >= 0
    assert balance == 0


async def test_evaluation_draws_other_noise_and_does_not_count(policy: Policy):
    async with acting(policy) as scene:
        counted = scene.start(0, PROMPTS[0], [MIDDLE] * 3)
        evaluation = scene.start(0, PROMPTS[0], [MIDDLE] * 3, counted=False)
        ours, theirs = await asyncio.gather(*counted), await asyncio.gather(*evaluation)
    assert sum(scene.booked) == scene.actor.engine.sampled_tokens == 3 * 25
    assert [t.id for t in theirs] == [f"eval:0:p4/{i}" for i in range(3)]
    answers = {tuple(t.token_ids) for t in (*ours, *theirs)}
    assert len(answers) == 6
    assert all(t.num_sampled_tokens == 25 for t in theirs)


async def test_evaluation_alone_is_booked_to_its_own_stage(policy: Policy):
    async with acting(policy) as scene:
        await asyncio.gather(*scene.start(0, PROMPTS[0], [SHORT] * 2, counted=False))
        assert set(scene.stages) == {"evaluate"}
        assert scene.booked == []
        scene.stages.clear()
        long = scene.start(1, PROMPTS[1], [MIDDLE])
        await asyncio.gather(*long, *scene.start(0, PROMPTS[0], [SHORT], counted=False))
        assert scene.stages[0] == "rollout"
        assert sum(scene.booked) == 25


async def test_noise_follows_from_seed_and_serial_and_index(policy: Policy):
    async def answers(seed: int, *serials: int) -> list[tuple[int, ...]]:
        async with acting(policy, seed=seed) as scene:
            futures = [f for serial in serials for f in scene.start(serial, PROMPTS[0], [MIDDLE] * 2)]
            return [tuple(t.token_ids) for t in await asyncio.gather(*futures)]

    first = await answers(0, 5, 6)
    assert await answers(0, 6, 5) == [*first[2:], *first[:2]]
    other = await answers(1, 5, 6)
    assert len({*first, *other}) == 8


# ---- ends


async def test_abort_gives_what_was_sampled_so_far(policy: Policy):
    async with acting(policy, max_running=3) as whole_scene:
        whole = [await f for f in whole_scene.start(0, PROMPTS[0], [LONG] * 2)]
    async with acting(policy, max_running=3) as scene:
        running = scene.start(0, PROMPTS[0], [LONG, LONG])
        beside = scene.start(1, PROMPTS[1], [MIDDLE])
        waiting = scene.start(2, PROMPTS[2], [LONG] * 3)

        def abort_at_first_tokens(count: int) -> None:
            if not scene.booked:
                scene.actor.abort([0, 2])
            scene.booked.append(count)

        scene.actor.on_sampled = abort_at_first_tokens
        aborted = await asyncio.gather(*running)
        nothing = await asyncio.gather(*waiting)
        (other,) = await asyncio.gather(*beside)
    assert {t.finish for t in (*aborted, *nothing)} == {FinishReason.ABORT}
    for t, full in zip(aborted, whole, strict=True):
        assert 0 < t.num_sampled_tokens < 90
        np.testing.assert_array_equal(t.token_ids, full.token_ids[: len(t.token_ids)])
        np.testing.assert_allclose(t.logprobs, full.logprobs[: len(t.token_ids)], rtol=0, atol=1e-5)
    for t in nothing:
        assert (t.num_sampled_tokens, t.spans, t.text) == (0, (), "")
        np.testing.assert_array_equal(t.token_ids, PROMPTS[2].token_ids)
    assert (other.finish, other.num_sampled_tokens) == (FinishReason.LENGTH, 25)
    assert sum(scene.booked) == 25 + sum(t.num_sampled_tokens for t in aborted)


async def test_a_group_that_starts_as_another_is_aborted_finishes(policy: Policy):
    async with acting(policy) as scene:
        old = scene.start(0, PROMPTS[0], [LONG] * 2)
        scene.actor.abort([0])
        new = scene.start(1, PROMPTS[1], [SHORT] * 2)
        async with asyncio.timeout(30):
            trajectories = await asyncio.gather(*old, *new)
    assert [t.num_sampled_tokens for t in trajectories] == [0, 0, 6, 6]


async def test_abort_leaves_evaluation_alone(policy: Policy):
    async with acting(policy) as scene:
        counted = scene.start(0, PROMPTS[0], [LONG])
        evaluation = scene.start(0, PROMPTS[0], [MIDDLE], counted=False)
        scene.actor.abort([0])
        assert (await counted[0]).finish is FinishReason.ABORT
        assert (await evaluation[0]).num_sampled_tokens == 25


async def test_a_stop_string_ends_the_text(policy: Policy):
    sampling = Sampling(max_new_tokens=60, temperature=0.5, top_k=12)
    async with acting(policy) as scene:
        text = (await scene.start(0, PROMPTS[0], [sampling])[0]).text
    stop = text[20:23]
    async with acting(policy) as scene:
        stopping = Sampling(max_new_tokens=60, temperature=0.5, top_k=12, stop=(stop,))
        trajectory = await scene.start(0, PROMPTS[0], [stopping])[0]
    assert trajectory.finish is FinishReason.STOP
    assert trajectory.text == text[: text.index(stop) + 3]


async def test_an_engine_error_ends_the_actor(policy: Policy, monkeypatch: pytest.MonkeyPatch):
    decode = Engine._decode
    steps = 0

    def breaking(engine: Engine, wanted: int) -> int:
        nonlocal steps
        steps += 1
        if steps == 12:
            raise ZeroDivisionError("the engine broke")
        return decode(engine, wanted)

    monkeypatch.setattr(Engine, "_decode", breaking)
    async with acting(policy) as scene:
        short = scene.start(0, PROMPTS[0], [SHORT])
        futures = [f for serial, p in enumerate(PROMPTS, 1) for f in scene.start(serial, p, [LONG] * 2)]
        assert (await short[0]).num_sampled_tokens == 6
        with pytest.raises(ZeroDivisionError, match="the engine broke"):
            await scene.running
        assert not any(future.done() for future in futures)


async def test_what_cannot_fit_the_context_is_refused(make_policy: Callable[..., Policy]):
    policy = make_policy(max_position_embeddings=20)
    async with acting(policy) as scene:
        with pytest.raises(DataError, match="prompt 'p17' has 17 tokens and may get 6 new ones"):
            scene.start(0, PROMPTS[2], [Sampling(max_new_tokens=3), SHORT])
        (trajectory,) = await asyncio.gather(*scene.start(0, PROMPTS[2], [Sampling(max_new_tokens=3)]))
        assert len(trajectory.token_ids) == 20


def test_ids_tell_epochs_prompts_and_samples_apart():
    orders = [order_of(serial, prompt, [SHORT] * 4) for serial in (1, 11) for prompt in PROMPTS]
    assert len({order.request_id(i) for order in orders for i in (0, 1)}) == 12
    order = order_of(40, PROMPTS[0], [SHORT] * 4)
    assert order.request_id(3) == "40:p4/3"
    assert replace(order, attempt=2, counted=False).request_id(3) == "eval:40.2:p4/3"
