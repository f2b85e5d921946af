"""The peers of the engine: `generate` and continuous batching of transformers, on the engine's shapes and prompts.

Both sample from the whole vocabulary at temperature 1 and give the log-probs of what they sampled, as the engine does.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from gpu_record import synchronise
from torch import Tensor
from transformers import ContinuousBatchingConfig, GenerationConfig, LogitsProcessor, LogitsProcessorList

SAMPLED = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
PATIENCE_S = 120.0  # without an answer from continuous batching before the peer is given up


class LogprobTaker(LogitsProcessor):
    """Takes the log-prob of each sampled token while `generate` runs, and the time of each step.

    It sees a step's scores before the token is drawn, and the token at the next step: one [batch, vocabulary] tensor is
    kept, where `output_scores` would keep one for each step.
    """

    def __init__(self) -> None:
        self.logprobs: list[Tensor] = []
        self.times_s: list[float] = []
        self._before: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores stay as they are."""
        if self._before is not None:
            self.take(input_ids[:, -1:])
        self._before = scores.float().log_softmax(-1)
        synchronise(scores.device)
        self.times_s.append(time.perf_counter())
        return scores

    def take(self, tokens: Tensor) -> None:
        """What was drawn from the scores seen last."""
        assert self._before is not None
        self.logprobs.append(self._before.gather(1, tokens).squeeze(1))


@torch.inference_mode()
def run_generate(model: Any, prompts: Sequence[Sequence[int]], new_tokens: int) -> tuple[float, list[float]]:
    """Seconds of the whole call, and of each decode step in it, for prompts of equal length."""
    ids = torch.tensor(prompts, device=model.device)
    taker = LogprobTaker()
    synchronise(model.device)
    started = time.perf_counter()
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        generation_config=GenerationConfig(max_new_tokens=new_tokens, pad_token_id=0, **SAMPLED),
        logits_processor=LogitsProcessorList([taker]),
    )
    taker.take(out[:, -1:])
    logprobs = torch.stack(taker.logprobs).cpu()
    total_s = time.perf_counter() - started
    assert logprobs.shape == (new_tokens, len(prompts)), logprobs.shape
    return total_s, [b - a for a, b in zip(taker.times_s, taker.times_s[1:], strict=False)]


def run_continuous(
    model: Any, prompts: Sequence[Sequence[int]], limits: Sequence[int]
) -> tuple[float, list[list[float]]]:
    """Seconds from the first request to the last token, and when each token of each request came."""
    config = GenerationConfig(max_new_tokens=max(limits), eos_token_id=-1, pad_token_id=0, **SAMPLED)
    # left to itself it takes most of the memory: right on a GPU, and slow to touch on a CPU
    blocks = {} if model.device.type == "cuda" else {"num_blocks": 64, "max_batch_tokens": 256}
    batching = ContinuousBatchingConfig(return_logprobs=True, seed=0, **blocks)
    with model.continuous_batching_context_manager(config, continuous_batching_config=batching, timeout=30) as manager:
        _drain(manager, prompts[:2], [4] * len(prompts[:2]))  # the first requests wait for what is made when needed
        started = time.perf_counter()
        outputs = _drain(manager, prompts, limits)
        total_s = time.perf_counter() - started
    wrong = [o.error or "length" for o in outputs.values() if o.error or len(o.logprobs) != len(o.generated_tokens)]
    if wrong:
        raise RuntimeError(f"continuous batching failed on {len(wrong)} of {len(outputs)} requests: {wrong[0]}")
    assert sum(len(o.logprobs) for o in outputs.values()) == sum(limits)
    return total_s, [list(o.timestamps) for o in outputs.values()]


def _drain(manager: Any, prompts: Sequence[Sequence[int]], limits: Sequence[int]) -> dict[str, Any]:
    for prompt, limit in zip(prompts, limits, strict=True):
        manager.add_request(list(map(int, prompt)), max_new_tokens=int(limit), record_timestamps=True, eos_token_id=-1)
    outputs: dict[str, Any] = {}
    heard_s = time.perf_counter()
    while len(outputs) < len(prompts):
        result = manager.get_result(timeout=1)
        if result is not None and result.is_finished():
            outputs[result.request_id] = result
            heard_s = time.perf_counter()
        elif not manager.is_running() or time.perf_counter() - heard_s > PATIENCE_S:
            raise RuntimeError(f"continuous batching stopped after {len(outputs)} of {len(prompts)} requests")
    return outputs
