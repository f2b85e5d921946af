"""The peer of generation alone: `model.generate` of transformers.

It returns no log-probs, which the engine does: the peer has less to do.
"""

from __future__ import annotations

import time

import numpy as np
import torch
from cpu_job import SAMPLES, Job, Record, prompt_batches
from transformers import AutoModelForCausalLM, AutoTokenizer


def run(job: Job) -> Record:
    torch.set_num_threads(job.threads)
    torch.manual_seed(job.seed)
    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32, attn_implementation="sdpa").eval()
    tokenizer = AutoTokenizer.from_pretrained(job.model)
    record = Record()
    for texts in prompt_batches(job.steps):
        started = time.perf_counter()
        ids = torch.tensor(tokenizer(texts)["input_ids"]).repeat_interleave(SAMPLES, dim=0)
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=job.max_new_tokens,
            )
        record.seconds.append(time.perf_counter() - started)
        record.lengths.append(lengths(out[:, ids.shape[1] :].numpy(), tokenizer.eos_token_id))
    return record


def lengths(tokens: np.ndarray, eos: int) -> list[int]:
    """Tokens up to the first end token and with it, or all of them."""
    ends = tokens == eos
    return np.where(ends.any(1), ends.argmax(1) + 1, tokens.shape[1]).tolist()
