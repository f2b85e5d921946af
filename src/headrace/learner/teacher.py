"""A teacher elsewhere, asked by a function of the user's: how likely it finds what the policy has sampled."""

from collections.abc import Iterator

import numpy as np

from headrace.errors import ModelError
from headrace.learner.objective import users_function
from headrace.types import FloatArray, Group, IntArray, Trajectory
from headrace.user_code import short_traceback


def teacher_logprobs(spec: str, group: Group) -> list[FloatArray]:
    """Of each answer's sampled tokens, by the function `learner.teacher = spec`, at a temperature of 1.

    It gets sequences of tokens, all answers and all branches of an episode, and returns log-probs of
    their tokens. That of a first token does not matter.
    """
    answers = group.trajectories
    paths = [(i, path) for i, t in enumerate(answers) for path in _paths(t)]
    found = [np.full(len(t.token_ids), np.nan, np.float32) for t in answers]
    try:
        ask = users_function("learner.teacher", spec)
        told = ask([answers[i].token_ids[path].tolist() for i, path in paths])
        for (i, path), values in zip(paths, told, strict=True):
            found[i][path] = np.asarray(values, np.float32).reshape(len(path))
        sampled = [known[t.sampled] for known, t in zip(found, answers, strict=True)]
        if not np.isfinite(np.concatenate(sampled)).all():
            raise ValueError("they are not all finite numbers")
    except Exception as error:  # of the user's code, or of what it returned
        needed = "must return a log-prob for each token of each sequence"
        raise ModelError(f"learner.teacher = '{spec}' {needed}:\n{short_traceback(error)}") from error
    return sampled


def _paths(t: Trajectory) -> Iterator[IntArray]:
    """For each branch the tokens from the root to its end."""
    for end in (*(segment.start - 1 for segment in t.segments), len(t.token_ids) - 1):
        yield np.concatenate([np.arange(*part, dtype=np.int32) for part in t.ranges(end)])
