"""A teacher behind an OpenAI-compatible address, such as vLLM or SGLang: on-policy distillation from it.

    TEACHER_BASE_URL=http://host:8000/v1 TEACHER_MODEL=NAME headrace train my.toml buffer.drop=nothing \
        learner.teacher=recipes/teacher_server.py:logprobs learner.kl_coef=1 learner.kl_estimator=k2

The server is asked for the log-probs of given tokens (`echo` with `logprobs`, in /v1/completions), all answers to a
prompt at once; TEACHER_API_KEY is its key. Its model must have the vocabulary of the policy: with
TEACHER_TOKENIZER=DIR, a directory with the policy's tokenizer, that is tried out at the start. A server that is busy or
away later on is asked again for about four minutes; then the run ends, and can be resumed.
"""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

WAITS_S = (1, 2, 4, 8, 16, 32, 64, 128)  # before each further try
TIMEOUT_S = 600.0
if missing := [name for name in ("TEACHER_BASE_URL", "TEACHER_MODEL") if name not in os.environ]:
    raise ValueError(f"set {' and '.join(missing)}: where the teacher is, and which of its models")
URL = os.environ["TEACHER_BASE_URL"].rstrip("/") + "/completions"
HEADERS = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ.get('TEACHER_API_KEY', 'none')}"}


def logprobs(sequences: Sequence[Sequence[int]], waits_s: Sequence[float] = WAITS_S) -> list[list[float | None]]:
    """Of each sequence's tokens, given those before them; the first one's is None."""
    known = [choice.get("logprobs") for choice in _choices(sequences, waits_s)]
    if None in known:
        raise RuntimeError(f"the teacher at {URL} tells no log-probs of given tokens: it must know echo with logprobs")
    return [told["token_logprobs"][: len(sequence)] for told, sequence in zip(known, sequences, strict=True)]


def _choices(sequences: Sequence[Sequence[int]], waits_s: Sequence[float]) -> list[Any]:
    body = {"model": os.environ["TEACHER_MODEL"], "prompt": sequences, "echo": True, "logprobs": 1, "max_tokens": 1}
    request = urllib.request.Request(URL, json.dumps(body).encode(), HEADERS)
    for wait_s in (*waits_s, None):
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
                return sorted(json.load(reply)["choices"], key=lambda choice: int(choice["index"]))
        except urllib.error.HTTPError as error:
            told = f"the teacher at {URL} answers {error.code}: {error.read(500).decode(errors='replace')}"
            passes = error.code == 429 or error.code >= 500
        except OSError as error:
            told, passes = f"the teacher at {URL} cannot be reached: {error}", True
        if wait_s is None or not passes:
            break
        time.sleep(wait_s)
    raise RuntimeError(told)


def _try_out(directory: str) -> None:
    from transformers import AutoTokenizer

    text = "Is 3 + 4 = 7? Yes, it is."
    tokens = AutoTokenizer.from_pretrained(directory)(text, add_special_tokens=False)["input_ids"]
    (choice,) = _choices([tokens], ())
    if not choice["text"].startswith(text):
        raise ValueError(f"the teacher reads the policy's tokens of {text!r} as {choice['text']!r}: another vocabulary")


logprobs([[0, 1]], ())  # so that a wrong address or name is told at the start
if "TEACHER_TOKENIZER" in os.environ:
    _try_out(os.environ["TEACHER_TOKENIZER"])
