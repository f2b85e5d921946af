"""Servers that the user has started, with a program of few lines in place of vLLM. With real ones: tests/engines."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny_policies import tiny_policy

from headrace.config import Config, RolloutSection
from headrace.config_file import gpus_of
from headrace.errors import ConfigError, WorkerLostError
from headrace.policy.policy import Policy
from headrace.rollout.engine_vllm import VllmEngine
from headrace.rollout.rows import Generation, Request
from headrace.types import FinishReason, Sampling

PROMPT = np.arange(3, 9, dtype=np.int32)


class Stand(ThreadingHTTPServer):
    """Answers with the tokens 1, 2, 3 ..., one at a time, each of the version that it has then."""

    daemon_threads = True

    def __init__(self, port: int = 0, release: str = "0.32.0", gate: threading.Event | None = None) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.address, self.release = f"http://127.0.0.1:{self.server_address[1]}", release
        self.gate = gate or threading.Event()  # tokens come while it is set
        self.version, self.loaded, self.asked, self.keys = "", list[float](), 0, set[str]()
        self.ended = threading.Event()
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        """As if it had been killed."""
        self.ended.set()
        self.shutdown()
        self.server_close()

    def handle_error(self, *unused: Any) -> None:
        """Nobody listens any more."""


class Handler(BaseHTTPRequestHandler):
    server: Stand

    def log_message(self, *unused: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.tell({"version": self.server.release})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"null")
        self.server.keys.add(self.headers.get("Authorization", ""))
        if self.path == "/collective_rpc":
            path = Path(body["kwargs"]["weights_path"])
            self.server.loaded.append(float(load_file(path / "model.safetensors")["model.norm.weight"][0]))
        elif self.path == "/update_weight_version":
            self.server.version = body["new_version"]
        elif self.path == "/inference/v1/generate":
            return self.generate(body)
        self.tell({})

    def tell(self, said: Any) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(said).encode())

    def generate(self, body: dict[str, Any]) -> None:
        first, most = len(body["token_ids"]) - len(PROMPT), body["sampling_params"]["max_tokens"]
        if not body.get("stream"):
            return self.tell({"choices": [self.choice([5], -0.5)]})
        self.server.asked += 1
        versions = []
        self.send_response(200)
        self.end_headers()
        for number in range(most):
            while not self.server.gate.wait(0.01):
                if self.server.ended.is_set():
                    return
            versions.append(self.server.version)
            choice = self.choice([first + number + 1], -1.0)
            if number == most - 1:
                spans = [{"version": v, "start": i, "end": i + 1} for i, v in enumerate(versions)]
                choice |= {"finish_reason": "length", "weight_versions": spans}
            self.wfile.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
            self.wfile.flush()
            time.sleep(0.002)

    def choice(self, tokens: list[int], logprob: float) -> dict[str, Any]:
        content = [{"token_id": token, "logprob": logprob, "top_logprobs": []} for token in tokens]
        return {"token_ids": tokens, "logprobs": {"content": content}, "finish_reason": None}


@pytest.fixture(scope="module")
def policy() -> Policy:
    return tiny_policy("Qwen3")


@pytest.fixture
def stands() -> Iterator[Callable[..., Stand]]:
    made = []

    def make(*args: Any, **named: Any) -> Stand:
        made.append(Stand(*args, **named))
        return made[-1]

    yield make
    for stand in made:
        with suppress(OSError):
            stand.stop()


def engine_at(policy: Policy, shared: Path, *addresses: str) -> VllmEngine:
    section = RolloutSection(engine="vllm", command=",".join(addresses), max_running=8)
    return VllmEngine(policy, section, 256, time.monotonic, shared=str(shared))


def requests(count: int, most: int) -> list[Request]:
    return [Request(id=f"r{i}", sampling=Sampling(max_new_tokens=most), seed=i, counted=True) for i in range(count)]


def until(engine: VllmEngine, done: Callable[[], Any]) -> list[Generation]:
    found, deadline = [], time.monotonic() + 30
    while not done():
        assert time.monotonic() < deadline
        found += engine.advance()
    return found


def finished(engine: VllmEngine) -> list[Generation]:
    return until(engine, lambda: not engine.has_work) + engine.advance()


def norm_of(policy: Policy, value: float | None = None) -> float:
    weight = policy.model.model.norm.weight.data
    if value is not None:
        weight.fill_(value)
    return float(weight[0])


def test_all_of_them_get_every_version_and_a_share_of_the_answers(
    policy: Policy, stands: Callable[..., Stand], tmp_path: Path
):
    gate = threading.Event()
    both = [stands(gate=gate), stands(gate=gate)]
    engine = engine_at(policy, tmp_path / "served", *(stand.address for stand in both))
    before = norm_of(policy)
    engine.submit(PROMPT, requests(6, most=20))
    until(engine, lambda: both[0].asked + both[1].asked == 6)
    assert [stand.asked for stand in both] == [3, 3]
    norm_of(policy, 2.5)
    engine.weights_changed(1)
    gate.set()
    answers = finished(engine)
    assert {tuple(answer.token_ids) for answer in answers} == {tuple(range(1, 21))}
    assert {span.version for answer in answers for span in answer.spans} == {1}
    assert [stand.loaded for stand in both] == [[pytest.approx(before), 2.5]] * 2
    assert engine.greedy(PROMPT) == [(5, -0.5)] * 2
    engine.close()
    assert not (tmp_path / "served").exists()
    assert both[0].keys == {""}


def test_the_others_go_on_without_one_that_is_lost_until_it_is_back(
    policy: Policy, stands: Callable[..., Stand], tmp_path: Path
):
    """Tokens that it had sampled before the last update are kept; it gets the weights it has missed."""
    gate = threading.Event()
    lost, other = stands(gate=gate), stands(gate=gate)
    engine = engine_at(policy, tmp_path / "served", lost.address, other.address)
    engine.submit(PROMPT, requests(4, most=400))
    gate.set()
    until(engine, lambda: len(engine.under_way()) == 4)
    gate.clear()
    lost.stop()
    until(engine, lambda: other.asked == 4)
    assert any(f"the server at {lost.address} is left out" in note for note in engine.notes)
    norm_of(policy, 3.5)
    engine.weights_changed(1)
    back = stands(port=int(lost.address.rpartition(":")[2]), gate=gate)
    until(engine, lambda: any("is used again" in note for note in engine.notes))
    assert (back.loaded, other.loaded[-1]) == ([3.5], 3.5)
    assert back.version == other.version == f"{engine.mark}1"
    gate.set()
    answers = finished(engine)
    assert sorted(answer.id for answer in answers) == ["r0", "r1", "r2", "r3"]
    assert all(answer.token_ids.tolist() == list(range(1, 401)) for answer in answers)
    assert all([span.version for span in answer.spans] == [0, 1] for answer in answers)
    engine.submit(PROMPT, requests(2, most=3))
    finished(engine)
    assert back.asked
    engine.close()


def test_answers_wait_while_there_is_no_server(
    policy: Policy, stands: Callable[..., Stand], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    only = stands()
    engine = engine_at(policy, tmp_path / "served", only.address)
    only.stop()
    engine.submit(PROMPT, requests(2, most=5))
    until(engine, lambda: any("left out" in note for note in engine.notes))
    engine.abort({"r1"})
    (aborted,) = until(engine, lambda: "r1" not in engine._asked) + engine.advance()
    assert (aborted.id, aborted.finish) == ("r1", FinishReason.ABORT)
    norm_of(policy, 4.5)
    engine.weights_changed(1)
    back = stands(port=int(only.address.rpartition(":")[2]))
    back.gate.set()
    (answer,) = finished(engine)
    assert (answer.id, answer.token_ids.tolist(), back.loaded) == ("r0", [1, 2, 3, 4, 5], [4.5])
    back.stop()
    engine.submit(PROMPT, requests(1, most=5))
    monkeypatch.setattr("headrace.rollout.engine_server.START_S", 0.2)
    with pytest.raises(WorkerLostError, match=r"no server of rollout\.command answered"):
        until(engine, lambda: False)
    engine.close()


def test_weights_that_cannot_be_written_go_to_nobody(
    policy: Policy, stands: Callable[..., Stand], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The servers are left out, and get them once there is room."""
    both = [stands(), stands()]
    engine = engine_at(policy, tmp_path / "served", *(stand.address for stand in both))
    norm_of(policy, 5.5)

    def full(directory: Path) -> None:
        monkeypatch.undo()
        raise OSError("No space left on device")

    monkeypatch.setattr(engine, "write_weights", full)
    engine.weights_changed(1)
    assert [len(stand.loaded) for stand in both] == [1, 1]
    assert all("version 1 was not taken: No space left" in note for note in engine.notes)
    until(engine, lambda: len(engine._servers) == 2)
    assert [stand.loaded[1:] for stand in both] == [[5.5], [5.5]]
    engine.close()


def test_tokens_of_other_weights_are_not_kept(policy: Policy, stands: Callable[..., Stand], tmp_path: Path):
    """As where a server was started anew between two requests."""
    stand = stands()
    engine = engine_at(policy, tmp_path / "served", stand.address)
    stand.version = "default"
    stand.gate.set()
    engine.submit(PROMPT, requests(3, most=30))
    until(engine, lambda: engine.notes)
    assert "it has weights that are not of this run" in engine.notes[0]
    assert not engine.under_way()
    before = engine.sampled_tokens
    answers = finished(engine)
    assert engine.sampled_tokens - before == 90
    assert all(answer.token_ids.tolist() == list(range(1, 31)) for answer in answers)
    assert len(stand.loaded) == 2
    engine.close()


def test_many_may_be_lost_at_once(policy: Policy, stands: Callable[..., Stand], tmp_path: Path):
    gate = threading.Event()
    several = [stands(gate=gate) for _ in range(6)]
    engine = engine_at(policy, tmp_path / "served", *(stand.address for stand in several))
    engine.submit(PROMPT, requests(12, most=5))
    until(engine, lambda: sum(stand.asked for stand in several) == 12)
    for stand in several[:5]:
        stand.stop()
    until(engine, lambda: several[5].asked == 12)
    gate.set()
    assert len(finished(engine)) == 12
    engine.close()


def test_what_is_asked_ends_with_the_engine(policy: Policy, stands: Callable[..., Stand], tmp_path: Path):
    """Else its threads would keep the process alive."""
    stand = stands()
    engine = engine_at(policy, tmp_path / "served", stand.address)
    engine.submit(PROMPT, requests(3, most=5))
    until(engine, lambda: stand.asked == 3)
    engine.close()
    engine._threads.shutdown(wait=True)


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("http://127.0.0.1:9", "Connection refused"),
        ("http://127.0.0.1:x", "Port could not be cast"),
        ("https://127.0.0.1:9", "has to begin with http://"),
    ],
)
def test_an_address_that_cannot_be_used_is_told(policy: Policy, tmp_path: Path, address: str, why: str):
    told = rf"rollout\.command: the server at {address} cannot be used, for weights in .*served: .*{why}"
    with pytest.raises(ConfigError, match=told):
        engine_at(policy, tmp_path / "served", address)


def test_a_key_may_stand_in_the_address(policy: Policy, stands: Callable[..., Stand], tmp_path: Path):
    stand = stands()
    engine_at(policy, tmp_path / "served", stand.address.replace("//", "//:secret@")).close()
    assert stand.keys == {"Bearer secret"}
    with pytest.raises(ConfigError, match=r"the server at http://127\.0\.0\.1:9 cannot be used"):
        engine_at(policy, tmp_path / "served", "http://:secret@127.0.0.1:9")


def test_an_old_release_is_told(policy: Policy, stands: Callable[..., Stand], tmp_path: Path):
    with pytest.raises(ConfigError, match=r"too old: 0\.31\.0 does not tell what weights sampled a token; 0\.32 does"):
        engine_at(policy, tmp_path / "served", stands(release="0.31.0").address)


def test_one_worker_asks_all_addresses_and_needs_no_gpu():
    section = {"engine": "vllm", "command": "http://a:8000,http://b:8000"}
    assert gpus_of(RolloutSection.model_validate(section)) == 0
    with pytest.raises(ValueError, match=r"several rollout\.workers: one asks all addresses of rollout\.command"):
        Config.model_validate({"rollout": section | {"workers": 2}, "place": {"cluster": "ray"}})
