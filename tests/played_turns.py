"""Sessions of several turns, played directly on an engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from headrace.rollout.engine import Engine
from headrace.rollout.rows import Generation, Request
from headrace.types import IntArray, RouteArray, Sampling

SAMPLING = Sampling(max_new_tokens=9, temperature=0.8)
Asked = tuple[IntArray, list[Request], RouteArray | None]


def words(length: int, seed: int = 0) -> IntArray:
    return np.random.default_rng([length, seed]).integers(3, 99, length).astype(np.int32)


def asked(session: int, turn: int, context: IntArray, routes: RouteArray | None = None) -> Asked:
    request = Request(id=f"{session}#{turn}", sampling=SAMPLING, seed=100 * session + turn, session=f"s{session}")
    return context, [request], routes


def known(generation: Generation) -> RouteArray | None:
    """The experts that a turn knows of the tokens before it: all but of the newest token."""
    replay = generation.replay
    return None if replay is None or replay.routes is None else replay.routes[:-1]


def play(engine: Engine, num_sessions: int, num_turns: int, told: int = 7) -> dict[str, tuple[Asked, Generation]]:
    """Sessions side by side; after each turn every session is told a few tokens more."""
    questions = [asked(s, 1, words(20 + s, 1)) for s in range(num_sessions)]
    played: dict[str, tuple[Asked, Generation]] = {}
    for turn in range(2, num_turns + 2):
        answers = run(engine, *questions)
        played |= {question[1][0].id: (question, answers[question[1][0].id]) for question in questions}
        for s, (context, (request,), _) in enumerate(questions):
            answer = answers[request.id]
            context = np.concatenate([context, answer.token_ids, words(told, 100 * turn + s)])
            questions[s] = asked(s, turn, context, known(answer))
    return played


def run(engine: Engine, *questions: Asked) -> dict[str, Generation]:
    """Ask them one after the other, a decode step apart."""
    found: dict[str, Generation] = {}
    for question in questions:
        engine.submit(*question)
        found |= {generation.id: generation for generation in engine.advance(max_steps=1)}
    while engine.has_work:
        found |= {generation.id: generation for generation in engine.advance()}
    return found


def assert_as_from_scratch(fresh: Callable[[], Engine], played: dict[str, tuple[Asked, Generation]]) -> None:
    """Each turn has the bits of an engine that computes its whole context anew."""
    for (context, (request,), routes), answer in played.values():
        (expected,) = run(fresh(), (context, [replace(request, session="")], routes)).values()
        assert answer.token_ids.tolist() == expected.token_ids.tolist()
        assert answer.logprobs.tobytes() == expected.logprobs.tobytes()
        if expected.replay is not None:
            assert answer.replay is not None
            np.testing.assert_array_equal(answer.replay.routes, expected.replay.routes)
