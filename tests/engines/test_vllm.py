"""A real vLLM server as the rollout engine. VLLM_PYTHON names the Python of an environment that has vLLM."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from tiny_policies import tiny_policy

import headrace
from headrace.config import RolloutSection
from headrace.config_file import DEMO, load_config
from headrace.errors import ConfigError
from headrace.ledger.ledger import Ledger
from headrace.policy.policy import Policy
from headrace.rollout.engine_vllm import VllmEngine
from headrace.rollout.rows import Generation, Request
from headrace.runs.audit import audit
from headrace.types import FinishReason, Sampling

PYTHON = os.environ.get("VLLM_PYTHON", "") and os.path.abspath(os.environ["VLLM_PYTHON"])
COMMAND = f"{PYTHON} -m vllm.entrypoints.openai.api_server"
pytestmark = pytest.mark.skipif(not PYTHON, reason="VLLM_PYTHON names no Python with vLLM")

PROMPT = np.arange(3, 12, dtype=np.int32)
NUMBERS = itertools.count()


def section(**settings: object) -> RolloutSection:
    return RolloutSection.model_validate(
        {"engine": "vllm", "command": COMMAND, "max_running": 32, "top_k": 12} | settings
    )


@pytest.fixture(scope="module")
def policy() -> Policy:
    return tiny_policy("Qwen3", head_dim=32)  # smaller heads are not for vLLM


@pytest.fixture(scope="module")
def engine(policy: Policy) -> Iterator[VllmEngine]:
    engine = VllmEngine(policy, section(), 512, time.monotonic)
    try:
        engine.weights_changed(0)
        yield engine
    finally:
        engine.close()


@pytest.fixture(scope="module")
def weights(policy: Policy) -> list[dict[str, torch.Tensor]]:
    """Of three policies, one of them the present one."""
    states = [
        policy.model.state_dict(),
        *(tiny_policy("Qwen3", seed=seed, head_dim=32).model.state_dict() for seed in (1, 2)),
    ]
    return [{name: tensor.clone() for name, tensor in state.items()} for state in states]


def set_weights(policy: Policy, state: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        policy.model.load_state_dict(state)


def requests(count: int, **sampling: object) -> list[Request]:
    made = Sampling(**{"max_new_tokens": 32, "temperature": 0.7, "top_k": 12} | sampling)  # type: ignore[arg-type]
    return [Request(id=f"r{next(NUMBERS)}", sampling=made, seed=seed) for seed in range(count)]


def finished(engine: VllmEngine) -> list[Generation]:
    found: list[Generation] = []
    while engine.has_work:
        found += engine.advance()
    return found


def under_way(engine: VllmEngine, count: int, tokens: int) -> dict[str, Generation]:
    """Advance until `count` answers have `tokens` tokens each."""
    while True:
        assert not engine.advance()
        found = engine.under_way()
        if sum(len(generation.token_ids) >= tokens for generation in found.values()) >= count:
            return found


@torch.no_grad()
def logprobs(policy: Policy, generation: Generation, temperature: float = 0.7) -> np.ndarray:
    """What `transformers` computes for the sampled tokens, over their supports."""
    tokens = torch.tensor(np.concatenate([PROMPT, generation.token_ids])).long()
    with policy.stock_attention():
        logits = policy.model(tokens[None]).logits[0, len(PROMPT) - 1 : -1].float() / temperature
    assert generation.replay is not None
    for row, support in zip(logits, generation.replay.supports, strict=True):
        outside = torch.ones(len(row), dtype=torch.bool)
        outside[torch.from_numpy(support).long()] = False
        row[outside] = -torch.inf
    return logits.log_softmax(-1).gather(1, tokens[len(PROMPT) :, None])[:, 0].numpy()


@torch.no_grad()
def difference(engine: VllmEngine, policy: Policy) -> float:
    """Of the log-prob of a fixed prompt's next token."""
    token, logprob = engine.greedy(PROMPT) or (0, 0.0)
    with policy.stock_attention():
        expected = policy.model(torch.tensor(PROMPT[None]).long()).logits[0, -1].log_softmax(-1)
    return abs(logprob - float(expected[token]))


def test_log_probs_are_those_of_the_distribution_sampled_from(engine: VllmEngine, policy: Policy):
    before = engine.sampled_tokens
    engine.submit(PROMPT, requests(8, top_p=0.9))
    found = finished(engine)
    assert len(found) == 8
    assert engine.sampled_tokens - before == sum(len(generation.token_ids) for generation in found)
    assert len({tuple(generation.token_ids) for generation in found}) == 8
    for generation in found:
        assert np.abs(logprobs(policy, generation) - generation.logprobs).max() < 1e-5
        assert generation.finish in (FinishReason.EOS, FinishReason.LENGTH)


def test_the_same_seed_gives_the_same_answer(engine: VllmEngine):
    answers = []
    for _ in range(2):
        engine.submit(PROMPT, requests(2))
        answers.append({tuple(generation.token_ids) for generation in finished(engine)})
    assert answers[0] == answers[1]


def test_an_answer_ends_after_a_stop_string(engine: VllmEngine, policy: Policy):
    engine.submit(PROMPT, requests(16, stop=("a", "e", "i")))
    found = [generation for generation in finished(engine) if generation.finish is FinishReason.STOP]
    assert found
    assert all(policy.tokenizer.decode(generation.token_ids)[-1] in "aei" for generation in found)


@pytest.mark.parametrize("on_update", ["recompute", "keep", "drain"])
def test_versions_are_exact_over_twenty_updates(
    engine: VllmEngine, policy: Policy, weights: list[dict[str, torch.Tensor]], on_update: str, endless: None
):
    engine.section = section(on_update=on_update)
    first = engine.version
    engine.submit(PROMPT, requests(32, max_new_tokens=480))  # so many that they take longer than the updates
    under_way(engine, 32, 1)
    found: list[Generation] = []
    for version in range(first + 1, first + 21):
        set_weights(policy, weights[version % 3])
        engine.weights_changed(version)
        found += engine.advance()
    found += finished(engine)
    assert len(found) == 32
    assert max(len(generation.spans) for generation in found) >= 10
    for generation in found:
        versions = [span.version for span in generation.spans]
        assert versions == sorted(set(versions))
        assert versions[0] == first
        for span in generation.spans if on_update == "recompute" else generation.spans[:1]:
            set_weights(policy, weights[span.version % 3])
            part = slice(span.start - len(PROMPT), span.end - len(PROMPT))
            assert np.abs(logprobs(policy, generation) - generation.logprobs)[part].max() < 1e-4
    set_weights(policy, weights[engine.version % 3])
    assert difference(engine, policy) < 1e-5


def test_an_abort_ends_exactly_the_answers_it_names(engine: VllmEngine, endless: None):
    several = requests(11, max_new_tokens=400)
    engine.submit(PROMPT, several)
    under_way(engine, 11, 1)
    engine.abort({"of an answer that has ended"})
    engine.abort({several[1].id})
    found = {generation.id: generation for generation in finished(engine)}
    assert found[several[1].id].finish is FinishReason.ABORT
    assert 0 < len(found[several[1].id].token_ids) < 400
    assert sum(generation.finish is FinishReason.LENGTH for generation in found.values()) == 10


def server_processes() -> list[psutil.Process]:
    found = psutil.Process().children(recursive=True)
    return [process for process in found if "VLLM" in process.name() or "api_server" in " ".join(process.cmdline())]


@pytest.mark.parametrize("which", [0, 1, 2])
def test_answers_go_on_where_a_server_process_was_killed(
    engine: VllmEngine, policy: Policy, weights: list[dict[str, torch.Tensor]], which: int, endless: None
):
    set_weights(policy, weights[engine.version % 3])
    before, old = engine.sampled_tokens, server_processes()
    engine.submit(PROMPT, requests(4, max_new_tokens=400))
    known = under_way(engine, 4, 20)
    os.kill(old[which % len(old)].pid, signal.SIGKILL)
    found = finished(engine)
    assert [len(generation.token_ids) for generation in found] == [400] * 4
    assert engine.sampled_tokens - before == 1600
    for generation in found:
        assert np.array_equal(generation.token_ids[:20], known[generation.id].token_ids[:20])
        assert np.abs(logprobs(policy, generation) - generation.logprobs).max() < 1e-4
    assert not any(process.is_running() for process in old)
    assert engine.notes.pop().startswith("a vLLM server was lost (")


def test_a_version_that_the_server_refuses_is_taken_by_another_server(
    engine: VllmEngine,
    policy: Policy,
    weights: list[dict[str, torch.Tensor]],
    monkeypatch: pytest.MonkeyPatch,
    endless: None,
):
    def damaged(directory: Path) -> None:
        (directory / "model.safetensors").write_bytes(b"nothing")
        monkeypatch.setattr(engine, "_write_weights", write)

    write = engine._write_weights
    version = engine.version + 1
    set_weights(policy, weights[version % 3])
    engine.submit(PROMPT, requests(4, max_new_tokens=400))
    under_way(engine, 4, 10)
    monkeypatch.setattr(engine, "_write_weights", damaged)
    engine.weights_changed(version)
    assert f"version {version} was not taken" in engine.notes.pop()
    assert len(finished(engine)) == 4
    engine.submit(PROMPT, requests(2))
    for generation in finished(engine):
        assert {span.version for span in generation.spans} == {version}
        assert np.abs(logprobs(policy, generation) - generation.logprobs).max() < 1e-5


def test_the_canary_sees_a_version_without_some_tensors(
    engine: VllmEngine, policy: Policy, weights: list[dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
):
    """vLLM takes it: those tensors keep their old values."""
    version = engine.version + 1
    set_weights(policy, weights[version % 3])

    def only_the_head(directory: Path) -> None:
        write(directory)
        (directory / "model.safetensors").unlink()

    write = engine._write_weights
    monkeypatch.setattr(engine, "_write_weights", only_the_head)
    engine.weights_changed(version)
    assert not engine.notes
    assert difference(engine, policy) > 0.1
    monkeypatch.undo()
    engine.weights_changed(version)
    assert difference(engine, policy) < 1e-5


def test_a_server_that_hangs_is_replaced(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch, endless: None):
    monkeypatch.setattr("headrace.rollout.engine_vllm.HUNG_S", 5.0)
    old = server_processes()
    engine.submit(PROMPT, requests(4, max_new_tokens=400))
    under_way(engine, 4, 20)
    os.kill(old[1].pid, signal.SIGSTOP)
    assert [len(generation.token_ids) for generation in finished(engine)] == [400] * 4
    assert "there was no token for 5 s" in engine.notes.pop()
    assert not any(process.is_running() for process in old)


def test_a_server_that_cannot_start_is_told_with_its_last_lines(policy: Policy, tmp_path: Path):
    script = tmp_path / "server.sh"
    script.write_text("#!/bin/sh\necho no such model\nexit 3\n")
    script.chmod(0o755)
    engine = VllmEngine(policy, section(command=str(script)), 64, time.monotonic)
    with pytest.raises(ConfigError, match="did not come up; its last lines:\nno such model"):
        engine.greedy(PROMPT)
    engine.close()
    with pytest.raises(ConfigError, match=r"rollout\.command = 'nowhere' cannot be started: .*No such file"):
        VllmEngine(policy, section(command="nowhere"), 64, time.monotonic)


def test_a_run_trains_with_it_and_its_books_balance(tmp_path: Path):
    overrides = ["rollout.engine=vllm", f"rollout.command={COMMAND}", "warmstart.steps=30", "loop.steps=4"]
    overrides += ["loop.max_lag=1", "loop.groups_per_step=4", "prompts.eval_count=16", f"run.dir={tmp_path / 'run'}"]
    before = server_processes()  # of the tests above
    summary = headrace.train(load_config(DEMO, overrides))
    assert summary["finished"] is True
    assert summary["version"] == 4
    assert summary["mismatch_before"] < 1e-5
    assert audit(tmp_path / "run") == []
    with Ledger.open(tmp_path / "run") as ledger:
        assert max(row.mismatch_mean for row in ledger.rows() if not row.lag_max) < 1e-5
    assert server_processes() == before
    assert headrace.evaluate_run(tmp_path / "run") == summary["score_after"]
