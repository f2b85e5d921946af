"""How long a rollout takes: many answers of different lengths on engines that batch continuously."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.insight.checks import check_at_least
from headrace.insight.hardware import Device
from headrace.insight.memory_bill import most_running
from headrace.insight.model_shape import ModelShape
from headrace.insight.roofline import MEASURED, Efficiency, decode_step_s, forward_s
from headrace.insight.tails import LogNormal


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutWork:
    """Answers to generate, and what with.

    Example:
        RolloutWork(model=model_shape("7B"), device=find_device("H100"), lengths=LogNormal(mean=1024, cv=1.0),
                    num_answers=1024, num_samples=16, prompt_tokens=200, num_engines=4)
    """

    model: ModelShape
    device: Device
    lengths: LogNormal
    num_answers: int  # prompts x samples
    num_samples: int = 1  # of a prompt, which share its prefill
    prompt_tokens: float = 0.0
    num_engines: int = 1
    tensor_parallel: int = 1  # devices of an engine
    max_running: int | None = None  # per engine; None for what its memory holds
    efficiency: Efficiency = MEASURED

    def __post_init__(self) -> None:
        check_at_least(1, num_answers=self.num_answers, num_samples=self.num_samples, num_engines=self.num_engines)
        check_at_least(1, tensor_parallel=self.tensor_parallel, max_running=self.max_running or 1)
        check_at_least(0, prompt_tokens=self.prompt_tokens)

    @property
    def slots(self) -> int:
        """Sequences that an engine runs at a time."""
        context_tokens = self.prompt_tokens + self.lengths.cut_mean
        room = most_running(
            self.model, self.device, context_tokens=context_tokens, tensor_parallel=self.tensor_parallel
        )
        return min(room, self.max_running or room)


def rollout_s(work: RolloutWork) -> float:
    """Until the last answer is there: τR, behind a batch barrier."""
    return float(answer_finish_s(work).max())


def answer_finish_s(work: RolloutWork) -> npt.NDArray[np.float64]:
    """When the answers of the slowest engine end, in the order of their start.

    The answers are spread evenly. Each engine's have the distribution's lengths, and the slowest engine has also the
    one that is expected to be the longest of all. It begins another when one ends. Towards the end its batch shrinks,
    a step takes what reading the weights takes, and the time that is left is the last answers' length times that.
    """
    tokens = _lengths_of_one_engine(work)
    slots, prefill_s = work.slots, _prefill_s(work)
    running: list[tuple[float, int]] = []  # (clock at its end, index); the clock counts engine steps
    begun: list[float] = []  # clock at the start of each
    now_s, clock, begun_sum = 0.0, 0.0, 0.0  # the sum is over those that run
    ends_s = np.zeros(tokens.size)
    while len(begun) < tokens.size or running:
        while len(begun) < tokens.size and len(running) < slots:
            heapq.heappush(running, (clock + float(tokens[len(begun)]), len(begun)))
            begun.append(clock)
            begun_sum, now_s = begun_sum + clock, now_s + prefill_s
        end, index = heapq.heappop(running)
        batch = len(running) + 1
        half_way_tokens = (clock + end) / 2 - begun_sum / batch
        step_s = decode_step_s(
            work.model,
            work.device,
            batch=batch,
            context_tokens=work.prompt_tokens + half_way_tokens,
            tensor_parallel=work.tensor_parallel,
            efficiency=work.efficiency,
        )
        now_s, clock = now_s + (end - clock) * step_s, end
        begun_sum -= begun[index]
        ends_s[index] = now_s
    return ends_s


def _prefill_s(work: RolloutWork) -> float:
    """One answer's part of its prompt's prefill, in which decoding stands still."""
    return forward_s(
        work.model,
        work.device,
        num_tokens=work.prompt_tokens / work.num_samples,
        sequence_tokens=work.prompt_tokens,
        num_devices=work.tensor_parallel,
        efficiency=work.efficiency,
    )


def _lengths_of_one_engine(work: RolloutWork) -> npt.NDArray[np.float64]:
    """Evenly spaced quantiles, mixed always in the same way, the highest of them the longest of all answers."""
    num = -(-work.num_answers // work.num_engines)
    tokens = np.array([work.lengths.quantile((i + 0.5) / num) for i in range(num)])
    tokens[-1] = work.lengths.expected_max(work.num_answers)
    return np.random.default_rng(0).permutation(tokens)
