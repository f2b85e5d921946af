"""The reward functions of recipes/: a reward model and a judge, in the processes that a run has for them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForSequenceClassification

from headrace.config import RewardSection
from headrace.policy.demo import character_tokenizer
from headrace.reward.scorer import Scorer
from headrace.types import Completion, DropReason, Score

RECIPES = Path(__file__).parents[2] / "recipes"


def completion(text: str, prompt: str = "2 + 3 =") -> Completion:
    return Completion(prompt=prompt, text=text, fields={}, num_tokens=len(text), finish="eos")


async def scores(function: str, *texts: str, **settings: float) -> list[Score]:
    section = RewardSection(function=f"{RECIPES}/{function}", timeout_s=60, **settings)  # type: ignore[arg-type]
    scorer = Scorer(section, max_new_tokens=100)
    await scorer.start()
    try:
        return [await scorer.score(completion(text)) for text in texts]
    finally:
        await scorer.close()


# ---- a reward model


@pytest.fixture
def classifier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tokenizer = character_tokenizer()
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    config = Qwen3Config(vocab_size=len(tokenizer), num_key_value_heads=2, head_dim=8, num_labels=1, **shape)
    model = Qwen3ForSequenceClassification(config)
    model.config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(tmp_path / "classifier")
    tokenizer.save_pretrained(tmp_path / "classifier")
    monkeypatch.setenv("REWARD_MODEL", str(tmp_path / "classifier"))
    return tmp_path / "classifier"


async def test_a_reward_model_rates_answers(classifier: Path):
    texts = ["5", "a longer answer", "6"]
    found = await scores("reward_model.py:score", *texts)
    model = Qwen3ForSequenceClassification.from_pretrained(classifier)
    tokenizer = character_tokenizer()
    for text, score in zip(texts, found, strict=True):
        ids = torch.tensor([tokenizer("2 + 3 =" + text)["input_ids"]])
        with torch.no_grad():
            assert score.reward == pytest.approx(float(model(ids).logits[0, 0]), abs=1e-5)
    assert len({score.reward for score in found}) == 3


# ---- a judge

REPLIES = {
    "5": [(200, "It is right. Mark: 10")],
    "6": [(200, "It should be 5, not 6.\nMark: **2.5**")],
    "7": [(500, ""), (200, "Mark: 3")],  # asked again
    "8": [(200, "I do not like it.")],
    "9": [(503, "")] * 3,
}


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """An address that answers by REPLIES; the tasks that it was asked about."""
    asked: list[str] = []
    left = {answer: list(replies) for answer, replies in REPLIES.items()}

    class Judge(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            (message,) = request["messages"]
            asked.append(message["content"])
            answer = message["content"].split("<answer>\n")[1].split("\n</answer>")[0]
            status, text = left[answer].pop(0)
            choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
            usage = {"prompt_tokens": 90, "completion_tokens": 8, "total_tokens": 98}
            body = {"id": "1", "object": "chat.completion", "created": 0, "model": request["model"], "usage": usage}
            sent = json.dumps({**body, "choices": [choice]}).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(sent)))
            self.end_headers()
            self.wfile.write(sent)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("JUDGE_BASE_URL", f"http://127.0.0.1:{server.server_port}/v1")
    monkeypatch.setenv("JUDGE_MODEL", "judge")
    monkeypatch.setenv("JUDGE_COSTS", str(tmp_path / "costs.jsonl"))
    yield asked
    server.shutdown()
    server.server_close()


async def test_a_judge_marks_answers(judge: list[str], tmp_path: Path):
    pytest.importorskip("openai")
    right, wrong, late, nothing, lost, again = await scores("judge.py:score", "5", "6", "7", "8", "9", "5", retries=2)
    assert [score.reward for score in (right, wrong, late, again)] == [1.0, 0.25, 0.3, 1.0]
    assert right.parts == {"judge": 1.0}
    assert nothing.failure is DropReason.REWARD_ERROR
    assert "I do not like it." in nothing.detail
    assert lost.failure is DropReason.REWARD_UNAVAILABLE
    assert len(judge) == 1 + 1 + 2 + 1 + 3, "the same answer is marked once, a busy judge is asked again"
    assert "<task>\n2 + 3 =\n</task>" in judge[0]
    costs = [json.loads(line) for line in (tmp_path / "costs.jsonl").read_text().splitlines()]
    assert costs == [{"prompt_tokens": 90, "completion_tokens": 8}] * 4
