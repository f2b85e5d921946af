"""A judge as a reward function: a model behind an OpenAI-compatible address marks each answer by a rubric.

    JUDGE_BASE_URL=http://host:8000/v1 JUDGE_API_KEY=... JUDGE_MODEL=NAME \
        headrace train my.toml reward.function=recipes/judge.py:score reward.timeout_s=60 reward.retries=4

Needs pip install openai. A busy or lost judge is asked again (reward.retries), the same answer is marked once
(reward.cache), and up to 64 are marked at a time. A reply without a mark is a drop with its text, not a zero.
JUDGE_COSTS=FILE gets a line for each reply with the tokens that were paid for.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import openai

from headrace.types import Completion

RUBRIC = """You mark an answer to a task. 10 is right and complete, 5 is right in part, 0 is wrong or no answer.
{notes}
<task>
{task}
</task>
<answer>
{answer}
</answer>
Say in one sentence what is wrong with the answer, if anything. End with "Mark: N", where N is a number from 0 to 10."""
MARK = re.compile(r"Mark:\s*\**\s*(\d+(?:\.\d+)?)")
if missing := [name for name in ("JUDGE_BASE_URL", "JUDGE_MODEL") if name not in os.environ]:
    raise ValueError(f"set {' and '.join(missing)}: where the judge is, and which of its models")
CLIENT = openai.AsyncOpenAI(
    base_url=os.environ["JUDGE_BASE_URL"], api_key=os.environ.get("JUDGE_API_KEY", "none"), max_retries=0
)


async def score(completion: Completion) -> dict[str, float]:
    """The mark, from 0 to 1. A prompt's `rubric` field adds to the rubric."""
    notes, answer = str(completion.fields.get("rubric", "")), completion.text.replace("</answer>", "")
    asked = RUBRIC.format(notes=notes, task=completion.prompt, answer=answer)
    reply = await CLIENT.chat.completions.create(
        model=os.environ["JUDGE_MODEL"], messages=[{"role": "user", "content": asked}], temperature=0
    )
    if (costs := os.environ.get("JUDGE_COSTS")) and reply.usage is not None:
        with Path(costs).open("a", encoding="utf-8") as file:
            file.write(json.dumps(reply.usage.model_dump(include={"prompt_tokens", "completion_tokens"})) + "\n")
    said = reply.choices[0].message.content or ""
    marks = MARK.findall(said)
    if not marks or float(marks[-1]) > 10:
        raise ValueError(f"the judge gave no mark from 0 to 10: {said[-200:]!r}")
    return {"judge": float(marks[-1]) / 10}
