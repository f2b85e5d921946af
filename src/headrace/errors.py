"""Errors whose messages tell the user what to do. The commands print them without a traceback."""


class HeadraceError(Exception):
    """Any error whose message is meant for the user."""


class ConfigError(HeadraceError):
    """Settings that are unknown, of the wrong type, or that contradict each other."""


class DataError(HeadraceError):
    """A prompt file or data set that cannot be used."""


class ModelError(HeadraceError):
    """A model directory that cannot be loaded, or does not fit the task."""


class RewardError(HeadraceError):
    """A reward function that cannot be found or called."""


class ChatError(HeadraceError, ValueError):
    """Messages that a chat template refuses, or a history that it would rewrite."""


class ToolArgumentsError(HeadraceError):
    """Arguments that a tool cannot take. The message is for the model that wrote them."""


class UnavailableError(HeadraceError):
    """For reward functions to raise: a service they need is unavailable; retrying may help.

    Example: raise headrace.UnavailableError("the judge's queue is full")
    """


class SandboxError(HeadraceError):
    """Code cannot be isolated here: a program or a right of the system is missing."""


class RunError(HeadraceError):
    """A run directory that is missing, in use or damaged."""


class StalledError(HeadraceError):
    """The loop cannot make progress: nothing it generates is trainable."""


class HungError(HeadraceError):
    """The run makes no progress. What hangs may hang for ever, in a thread that cannot be ended."""


class PublishError(HeadraceError):
    """A version of the weights did not arrive intact. The receiver keeps the version it has."""


class WorkerLostError(HeadraceError):
    """A worker's process or node died, or does not answer in time."""


class LearnerLostError(HeadraceError):
    """A rank of the learner is lost, with its weights: the run resumes from a checkpoint."""


class MissingExtraError(HeadraceError):
    """An optional library is not installed."""

    def __init__(self, library: str, extra: str) -> None:
        super().__init__(f"{library} is not installed. Run, in your checkout of Headrace: pip install -e '.[{extra}]'")
