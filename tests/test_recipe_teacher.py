"""The recipe `teacher_server.py` asks a server that is busy, refuses, or tells nothing. Real ones: tests/engines."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from headrace.config_file import DEMO

RECIPE = str(DEMO.parent / "teacher_server.py")
Answer = Callable[[dict[str, Any]], tuple[int, Any]]


class Asked:
    """A server at `url` that says what `answer` returns for a body, and has heard `bodies` and `keys`."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.answer: Answer = told
        asked = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                asked.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                asked.keys.append(self.headers["Authorization"])
                status, said = asked.answer(asked.bodies[-1]) if self.path == "/v1/completions" else (404, self.path)
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps(said).encode())

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1/"


def told(body: dict[str, Any]) -> tuple[int, Any]:
    """Each prompt with a token more; the last one first."""
    known = [[None, *(-float(token) for token in ids[1:]), -0.5] for ids in body["prompt"]]
    choices = [{"index": i, "text": "", "logprobs": {"token_logprobs": values}} for i, values in enumerate(known)]
    return 200, {"choices": choices[::-1]}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Asked]:
    asked = Asked()
    Thread(target=asked.server.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setenv("TEACHER_BASE_URL", asked.url)
    monkeypatch.setenv("TEACHER_MODEL", "big")
    monkeypatch.delenv("TEACHER_TOKENIZER", raising=False)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    yield asked
    asked.server.shutdown()
    asked.server.server_close()


def test_log_probs_come_in_the_order_of_the_sequences(server: Asked, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TEACHER_API_KEY", "secret")
    logprobs = runpy.run_path(RECIPE)["logprobs"]
    assert logprobs([[7, 8, 9], [3]]) == [[None, -8.0, -9.0], [None]]
    assert server.bodies[-1] == {
        "model": "big", "prompt": [[7, 8, 9], [3]], "echo": True, "logprobs": 1, "max_tokens": 1,
    }  # fmt: skip
    assert set(server.keys) == {"Bearer secret"}


def test_a_busy_server_is_asked_again_and_one_that_refuses_is_not(server: Asked):
    logprobs = runpy.run_path(RECIPE)["logprobs"]
    server.bodies.clear()
    server.answer = lambda body: told(body) if len(server.bodies) > 3 else (503, "busy")
    assert logprobs([[7, 8]]) == [[None, -8.0]]
    assert len(server.bodies) == 4
    server.answer = lambda body: (400, "the context has 512 tokens")
    with pytest.raises(RuntimeError, match=r"answers 400: .*the context has 512 tokens"):
        logprobs([[7, 8]])
    assert len(server.bodies) == 5


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda body: (200, {"choices": [{"index": 0, "text": ""}]}), "it must know echo with logprobs"),
        (lambda body: (404, "no model big"), "answers 404: .*no model big"),
        (lambda body: (503, "busy"), "answers 503"),
    ],
)
def test_what_is_wrong_is_told_at_the_start(server: Asked, answer: Answer, message: str):
    server.answer = answer
    with pytest.raises(RuntimeError, match=message):
        runpy.run_path(RECIPE)
    assert len(server.bodies) == 1, "without waiting"


def test_another_vocabulary_is_told_at_the_start(server: Asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from headrace.policy.demo import character_tokenizer

    tokenizer = character_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    monkeypatch.setenv("TEACHER_TOKENIZER", str(tmp_path))
    shown = [tokenizer.decode]

    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        status, said = told(body)
        for choice in said["choices"]:
            choice["text"] = shown[0](body["prompt"][choice["index"]]) + "!"
        return status, said

    server.answer = answer
    runpy.run_path(RECIPE)
    shown[0] = lambda ids: tokenizer.decode([id + 1 for id in ids])
    with pytest.raises(ValueError, match="another vocabulary"):
        runpy.run_path(RECIPE)


def test_without_an_address_it_is_asked_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TEACHER_BASE_URL", raising=False)
    monkeypatch.setenv("TEACHER_MODEL", "big")
    with pytest.raises(ValueError, match="set TEACHER_BASE_URL: where the teacher is"):
        runpy.run_path(RECIPE)
