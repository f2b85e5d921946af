"""How long a device takes, from the bytes it must move and the products it must compute.

A decode step reads every weight once and every running sequence's cache once, for one token each: it is bound by
bandwidth, and a batch shares the reading of the weights. Prefill, reference and training handle many tokens per weight
read: they are bound by the matrix products. Per token a forward pass computes 2 products per weight, forward and backward 6, and
attention adds to that with the length of the context.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.insight.checks import check_above, check_at_least
from headrace.insight.hardware import Device
from headrace.insight.memory_bill import most_running
from headrace.insight.model_shape import ModelShape
from headrace.insight.tails import LogNormal


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """What is reached of a device's datasheet.

    The defaults for decoding are those of Headrace's engine on one H200 with models of 28 layers (docs/results/gpu.md).
    Its learner reached an MFU of 0.46 and 0.55 there; spread over many GPUs 0.35 to 0.45 is usual.

    Example:
        Efficiency(bandwidth=0.7, mfu=0.5)
    """

    bandwidth: float = 0.84  # of the memory's, while decoding
    layer_overhead_s: float = 38e-6  # of a decode step, whatever its batch: launches, small kernels, waiting
    mfu: float = 0.4  # of the matrix products'

    def __post_init__(self) -> None:
        check_above(0.0, bandwidth=self.bandwidth, mfu=self.mfu)
        check_at_least(0.0, layer_overhead_s=self.layer_overhead_s)


MEASURED = Efficiency()


def decode_step_s(
    model: ModelShape,
    device: Device,
    *,
    batch: float,
    context_tokens: float,
    tensor_parallel: int = 1,
    efficiency: Efficiency = MEASURED,
) -> float:
    """One token for each of `batch` sequences of that mean length, on an engine of `tensor_parallel` devices."""
    read_bytes = model.params_read(batch) * device.number_bytes
    read_bytes += batch * context_tokens * model.kv_bytes_per_token(device.number_bytes)
    read_s = read_bytes / (device.memory_bytes_per_s * efficiency.bandwidth)
    compute_s = 2 * model.num_active_params * batch / (device.flops_per_s * efficiency.mfu)
    return max(read_s, compute_s) / tensor_parallel + model.num_layers * efficiency.layer_overhead_s


def forward_flops(model: ModelShape, *, num_tokens: float, sequence_tokens: float) -> float:
    """Of `num_tokens` in sequences of that length: a token attends to half of its sequence on average."""
    return num_tokens * (2 * model.num_active_params + 2 * model.num_layers * model.attention_size * sequence_tokens)


def train_flops(model: ModelShape, *, num_tokens: float, sequence_tokens: float) -> float:
    """Forward and backward; what is computed again to save memory is not counted, as is the custom for MFU."""
    return 3 * forward_flops(model, num_tokens=num_tokens, sequence_tokens=sequence_tokens)


def forward_s(
    model: ModelShape,
    device: Device,
    *,
    num_tokens: float,
    sequence_tokens: float,
    num_devices: int = 1,
    efficiency: Efficiency = MEASURED,
) -> float:
    """Prefill, or the reference's log-probs."""
    check_at_least(1, num_devices=num_devices)
    flops = forward_flops(model, num_tokens=num_tokens, sequence_tokens=sequence_tokens)
    return flops / (num_devices * device.flops_per_s * efficiency.mfu)


def train_s(
    model: ModelShape,
    device: Device,
    *,
    num_tokens: float,
    sequence_tokens: float,
    num_devices: int = 1,
    efficiency: Efficiency = MEASURED,
) -> float:
    """One optimizer step on `num_tokens`, prompts included."""
    check_at_least(1, num_devices=num_devices)
    flops = train_flops(model, num_tokens=num_tokens, sequence_tokens=sequence_tokens)
    return flops / (num_devices * device.flops_per_s * efficiency.mfu)


def answer_finish_s(
    model: ModelShape,
    device: Device,
    lengths: LogNormal,
    *,
    num_answers: int,
    num_samples: int = 1,
    prompt_tokens: float = 0.0,
    num_engines: int = 1,
    tensor_parallel: int = 1,
    max_running: int | None = None,
    efficiency: Efficiency = MEASURED,
) -> npt.NDArray[np.float64]:
    """When the answers of the slowest engine end, in the order of their start; a rollout's time is the last.

    The answers are spread evenly. Each engine's have the distribution's lengths, and the slowest engine also has the one
    that is expected to be the longest of all. It runs as many at a time as its memory holds, or `max_running`, and
    begins the next when one ends. Towards the end its batch shrinks, and a step then takes what its weights take.
    Answers to one prompt share its prefill.
    """
    check_at_least(1, num_answers=num_answers, num_samples=num_samples, num_engines=num_engines)
    check_at_least(0, prompt_tokens=prompt_tokens)
    context_tokens = prompt_tokens + lengths.cut_mean
    room = most_running(model, device, context_tokens=context_tokens, tensor_parallel=tensor_parallel)
    prefill_s = forward_s(
        model,
        device,
        num_tokens=prompt_tokens / num_samples,
        sequence_tokens=prompt_tokens,
        num_devices=tensor_parallel,
        efficiency=efficiency,
    )
    tokens = _lengths_of_one_engine(lengths, num_answers, num_engines)
    starts, running, now_s, clock = 0.0, list[tuple[float, int]](), 0.0, 0.0
    slots = min(room, max_running or room, tokens.size)
    ends_s = np.zeros(tokens.size)
    begun: list[float] = []
    while len(begun) < tokens.size or running:
        while len(begun) < tokens.size and len(running) < slots:
            heapq.heappush(running, (clock + float(tokens[len(begun)]), len(begun)))
            begun.append(clock)
            starts, now_s = starts + clock, now_s + prefill_s
        end, index = running[0]
        batch = len(running)
        step_s = decode_step_s(
            model,
            device,
            batch=batch,
            context_tokens=prompt_tokens + (clock + end) / 2 - starts / batch,  # half-way to the next end
            tensor_parallel=tensor_parallel,
            efficiency=efficiency,
        )
        now_s, clock = now_s + (end - clock) * step_s, end
        heapq.heappop(running)
        starts -= begun[index]
        ends_s[index] = now_s
    return ends_s


def rollout_s(
    model: ModelShape,
    device: Device,
    lengths: LogNormal,
    *,
    num_answers: int,
    num_samples: int = 1,
    prompt_tokens: float = 0.0,
    num_engines: int = 1,
    tensor_parallel: int = 1,
    max_running: int | None = None,
    efficiency: Efficiency = MEASURED,
) -> float:
    """Until the last of `num_answers` is there, on so many engines that batch continuously: τR behind a batch barrier."""
    ends_s = answer_finish_s(
        model,
        device,
        lengths,
        num_answers=num_answers,
        num_samples=num_samples,
        prompt_tokens=prompt_tokens,
        num_engines=num_engines,
        tensor_parallel=tensor_parallel,
        max_running=max_running,
        efficiency=efficiency,
    )
    return float(ends_s.max())


def _lengths_of_one_engine(lengths: LogNormal, num_answers: int, num_engines: int) -> npt.NDArray[np.float64]:
    """Evenly spaced quantiles in a mixed order that is always the same, the last of them the longest of all answers."""
    num = -(-num_answers // num_engines)
    tokens = np.array([lengths.quantile((i + 0.5) / num) for i in range(num)])
    tokens[-1] = lengths.expected_max(num_answers)
    return np.random.default_rng(0).permutation(tokens)
