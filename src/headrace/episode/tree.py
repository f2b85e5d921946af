"""The tokens of an episode as they come: what it is told and what it samples, perhaps in branches.

A place in the tree is the index of a token; what comes next goes on after it. -1 is before the
first token. Nothing is changed: each function returns a longer trajectory.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from headrace.types import BoolArray, FloatArray, IntArray, Replay, RouteArray, Segment, Span, Trajectory, Turn


def place_before(t: Trajectory, token: int) -> int:
    return next((segment.after for segment in t.segments if segment.start == token), token - 1)


def indices(t: Trajectory, place: int) -> IntArray:
    return np.concatenate([np.empty(0, np.int32), *(np.arange(*part, dtype=np.int32) for part in t.ranges(place))])


def context(t: Trajectory, place: int) -> tuple[IntArray, RouteArray | None]:
    """The tokens from the root to `place`, and the experts of those that were computed already."""
    at = indices(t, place)
    if t.replay is None or t.replay.routes is None:
        return t.token_ids[at], None
    computed = _computed(t)[at]
    return t.token_ids[at], t.replay.routes[at[: len(at) if computed.all() else int(computed.argmin())]]


def told(t: Trajectory, tokens: IntArray, after: int) -> Trajectory:
    """`tokens` that the policy did not sample come after the place `after`."""
    replay, count = t.replay, len(tokens)
    if replay is not None and replay.routes is not None:
        replay = replace(replay, routes=_padded(replay.routes, count))
    return replace(t, **_longer(t, tokens, np.zeros(count, np.float32), after, sampled=False), replay=replay)


def turned(t: Trajectory, answer: Trajectory, after: int, turn: Turn) -> Trajectory:
    """The turn `answer`, sampled after the place `after`. Start and end of `turn` are set here."""
    at, first = indices(t, after), len(t.token_ids)
    tokens, moved = answer.token_ids[len(at) :], first - len(at)
    spans = tuple(Span(version=s.version, start=s.start + moved, end=s.end + moved) for s in answer.spans)
    earlier = (*(replace(old, snapshot="") if old.snapshot else old for old in t.turns[:-1]), *t.turns[-1:])
    started_s = t.timing.started_s if t.turns else answer.timing.started_s
    return replace(
        t,
        **_longer(t, tokens, answer.logprobs[len(at) :], after, sampled=True),
        spans=t.spans + spans,
        finish=answer.finish,
        text=turn.text,
        replay=_joined(t, answer, at),
        turns=(*earlier, replace(turn, start=first, end=first + len(tokens), finish=answer.finish)),
        timing=replace(t.timing, started_s=started_s, finished_s=answer.timing.finished_s),
    )


def _longer(t: Trajectory, tokens: IntArray, logprobs: FloatArray, after: int, *, sampled: bool) -> dict[str, Any]:
    branch = () if after == len(t.token_ids) - 1 else (Segment(start=len(t.token_ids), after=after),)
    return {
        "token_ids": np.concatenate([t.token_ids, tokens]).astype(np.int32),
        "logprobs": np.concatenate([t.logprobs, logprobs]),
        "sampled": np.concatenate([t.sampled, np.full(len(tokens), sampled)]),
        "segments": t.segments + branch,
    }


def _joined(t: Trajectory, answer: Trajectory, at: IntArray) -> Replay | None:
    """What the learner chooses again: with the experts of `answer` for what it computed first."""
    earlier, later = t.replay, answer.replay
    supports = [replay.supports if replay else [] for replay in (earlier, later)]
    if any(supports):  # an empty support stands for the whole vocabulary
        whole = [[np.empty(0, np.int32)] * x.num_sampled_tokens for x in (t, answer)]
        supports = [found or all_of_it for found, all_of_it in zip(supports, whole, strict=True)]
    routes = None
    if later is not None and later.routes is not None:
        known = later.routes[:0] if earlier is None or earlier.routes is None else earlier.routes
        routes = _padded(known, len(t.token_ids) - len(known))
        fresh = ~_computed(t)[at]
        routes[at[fresh]] = later.routes[: len(at)][fresh]
        routes = np.concatenate([routes, later.routes[len(at) :]])
    return Replay.of([*supports[0], *supports[1]], routes)


def _computed(t: Trajectory) -> BoolArray:
    """Which tokens were an input of the model: all before a sampled one."""
    found = np.zeros(len(t.token_ids), np.bool_)
    for turn in t.turns:
        found[indices(t, turn.end - 1)[:-1]] = True
    return found


def _padded(routes: RouteArray, count: int) -> RouteArray:
    return np.concatenate([routes, np.zeros((count, *routes.shape[1:]), routes.dtype)])
