"""Real servers as the rollout engine. VLLM_PYTHON and SGLANG_PYTHON name the Pythons of environments that have them."""

from __future__ import annotations

import http.client
import itertools
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from hand_made import group_of, trajectory
from safetensors.torch import load_file, save_file
from tiny_policies import tiny_policy

import headrace
from headrace.config import COMMANDS, RolloutSection
from headrace.config_file import DEMO, load_config
from headrace.learner.ranks import teacher_logprobs
from headrace.ledger.ledger import Ledger
from headrace.place.rollout_worker import SERVERS
from headrace.policy.attention import PackedPlan
from headrace.policy.policy import Policy
from headrace.rollout import engine_vllm
from headrace.rollout.engine_server import ServerEngine
from headrace.rollout.engine_vllm import CPU, VllmEngine
from headrace.rollout.rows import Generation, Request
from headrace.runs.audit import audit
from headrace.types import FinishReason, Sampling, Span

PROMPT = np.arange(3, 12, dtype=np.int32)
NUMBERS = itertools.count()


@pytest.fixture(scope="module", params=[*SERVERS, "vllm as if it were old"])
def which(request: pytest.FixtureRequest) -> Iterator[str]:
    """The engine, if there is one."""
    name = str(request.param).split()[0]
    if not os.environ.get(python := f"{name.upper()}_PYTHON"):
        pytest.skip(f"{python} names no Python with it")
    with pytest.MonkeyPatch.context() as patch:
        if name != request.param:
            patch.setattr("headrace.rollout.engine_vllm.LABELS", "99")  # what it tells of versions is not looked at
            part = VllmEngine.part
            patch.setattr(VllmEngine, "part", lambda *of: replace(part(*of), spans=()))
        yield name


def command(which: str) -> str:
    python = os.path.abspath(os.environ[f"{which.upper()}_PYTHON"])
    return COMMANDS[which].replace("python", python, 1)


def section(which: str, **settings: object) -> RolloutSection:
    given = {"engine": which, "command": command(which), "max_running": 32, "top_k": 12}
    return RolloutSection.model_validate(given | settings)


@pytest.fixture(scope="module")
def policy() -> Policy:
    return tiny_policy("Qwen3", head_dim=32)  # smaller heads are not for vLLM


@pytest.fixture(scope="module")
def engine(which: str, policy: Policy) -> Iterator[ServerEngine]:
    engine = SERVERS[which](policy, section(which), 512, time.monotonic)
    try:
        engine.weights_changed(0)
        yield engine
    finally:
        engine.close()


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that fails leaves no answers and no notes to the next one."""
    yield
    if "engine" in request.fixturenames:
        engine = request.getfixturevalue("engine")
        engine.abort(set(engine._asked))
        finished(engine)
        engine.notes.clear()


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


def finished(engine: ServerEngine) -> list[Generation]:
    found: list[Generation] = []
    while engine.has_work:
        found += engine.advance()
    return found


def under_way(engine: ServerEngine, count: int, tokens: int) -> dict[str, Generation]:
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
def difference(engine: ServerEngine, policy: Policy) -> float:
    """Of the log-prob of a fixed prompt's next token."""
    ((token, logprob),) = engine.greedy(PROMPT)
    with policy.stock_attention():
        expected = policy.model(torch.tensor(PROMPT[None]).long()).logits[0, -1].log_softmax(-1)
    return abs(logprob - float(expected[token]))


def test_log_probs_are_those_of_the_distribution_sampled_from(engine: ServerEngine, policy: Policy):
    before = engine.sampled_tokens
    engine.submit(PROMPT, requests(8, top_p=0.9))
    found = finished(engine)
    assert len(found) == 8
    assert engine.sampled_tokens - before == sum(len(generation.token_ids) for generation in found)
    assert len({tuple(generation.token_ids) for generation in found}) == 8
    for generation in found:
        assert np.abs(logprobs(policy, generation) - generation.logprobs).max() < 1e-5
        assert generation.finish in (FinishReason.EOS, FinishReason.LENGTH)


def test_the_same_seed_gives_the_same_answer(engine: ServerEngine, which: str):
    if which == "sglang":
        pytest.skip("SGLang follows no seed of a request")
    answers = []
    for _ in range(2):
        engine.submit(PROMPT, requests(2))
        answers.append({tuple(generation.token_ids) for generation in finished(engine)})
    assert answers[0] == answers[1]


def test_an_answer_ends_after_a_stop_string(engine: ServerEngine, policy: Policy):
    engine.submit(PROMPT, requests(16, stop=("a", "e", "i")))
    found = [generation for generation in finished(engine) if generation.finish is FinishReason.STOP]
    assert found
    assert all(policy.tokenizer.decode(generation.token_ids)[-1] in "aei" for generation in found)


def update_twenty_times(engine: ServerEngine, policy: Policy, weights: list[dict[str, torch.Tensor]]) -> None:
    """In the middle of answers; and check what they were sampled by."""
    first, recomputes = engine.version, engine.section.on_update != "keep"
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
        check_spans(policy, weights, generation, generation.spans if recomputes else generation.spans[:1])
    set_weights(policy, weights[engine.version % 3])
    assert difference(engine, policy) < 1e-5
    assert not engine.notes


def check_spans(
    policy: Policy, weights: list[dict[str, torch.Tensor]], generation: Generation, spans: Sequence[Span]
) -> None:
    """These tokens are of the versions that they are said to be of."""
    for span in spans:
        set_weights(policy, weights[span.version % 3])
        part = slice(span.start - len(PROMPT), span.end - len(PROMPT))
        assert np.abs(logprobs(policy, generation) - generation.logprobs)[part].max() < 1e-4


@pytest.mark.parametrize("on_update", ["keep", "drain"])
def test_versions_are_exact_over_twenty_updates(
    engine: ServerEngine,
    which: str,
    policy: Policy,
    weights: list[dict[str, torch.Tensor]],
    on_update: str,
    endless: None,
):
    engine.section = section(which, on_update=on_update)
    update_twenty_times(engine, policy, weights)


def test_an_answer_may_fill_the_whole_context(engine: ServerEngine, endless: None):
    engine.submit(PROMPT, requests(1, max_new_tokens=512 - len(PROMPT)))
    assert [len(generation.token_ids) for generation in finished(engine)] == [512 - len(PROMPT)]
    engine.submit(np.arange(511, dtype=np.int32) % 90 + 3, requests(1, max_new_tokens=1))
    assert [len(generation.token_ids) for generation in finished(engine)] == [1]


def test_an_abort_ends_exactly_the_answers_it_names(engine: ServerEngine, endless: None):
    several = requests(11, max_new_tokens=400)
    engine.submit(PROMPT, several)
    under_way(engine, 11, 1)
    engine.abort({"of an answer that has ended"})
    engine.abort({several[1].id})
    found = {generation.id: generation for generation in finished(engine)}
    assert found[several[1].id].finish is FinishReason.ABORT
    assert 0 < len(found[several[1].id].token_ids) < 400
    assert sum(generation.finish is FinishReason.LENGTH for generation in found.values()) == 10


def processes(engine: ServerEngine) -> list[psutil.Process]:
    """Of its server: the main one, then those with names of their own, as vLLM's engine and worker, then others."""
    found = psutil.Process(group := engine._servers[0]._process.pid).children(recursive=True)
    assert {os.getpgid(process.pid) for process in found} == {group}
    return [psutil.Process(group), *sorted(found, key=lambda process: (":" not in process.name(), process.pid))]


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    def ended(process: psutil.Process) -> bool:
        with suppress(psutil.NoSuchProcess):
            return process.status() == psutil.STATUS_ZOMBIE
        return True

    deadline = time.monotonic() + 20
    while (left := [process for process in processes if not ended(process)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


@pytest.mark.parametrize("index", [0, 1, 2])
def test_answers_go_on_where_a_server_process_was_killed(
    engine: ServerEngine,
    which: str,
    policy: Policy,
    weights: list[dict[str, torch.Tensor]],
    index: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    endless: None,
):
    monkeypatch.setattr("headrace.rollout.engine_server.HUNG_S", 60.0)
    starts, script = command(which), tmp_path / "start"
    if index == 0:  # the first server in its place does not come up
        script.write_text(f'[ -e "$0.tried" ] || {{ touch "$0.tried"; echo broken; exit 1; }}\nexec {starts} "$@"\n')
        starts = f"sh {script}"
    engine.section = section(which, on_update="recompute", command=starts)  # for the next server
    set_weights(policy, weights[engine.version % 3])
    before, old = engine.sampled_tokens, processes(engine)
    engine.submit(PROMPT, requests(4, max_new_tokens=400))
    known = under_way(engine, 4, 20)
    os.kill(old[index].pid, signal.SIGKILL)
    found = finished(engine)
    assert [len(generation.token_ids) for generation in found] == [400] * 4
    assert engine.sampled_tokens - before == 1600
    for generation in found:
        assert np.array_equal(generation.token_ids[:20], known[generation.id].token_ids[:20])
        assert np.abs(logprobs(policy, generation) - generation.logprobs).max() < 1e-4
    assert not alive(old)
    if index == 0:
        assert "did not come up; its last lines:\nbroken" in engine.notes.pop()
    assert engine.notes.pop().startswith(f"a server of {engine.name} was lost (")


def test_versions_are_exact_where_the_cache_is_computed_again(
    engine: ServerEngine, policy: Policy, weights: list[dict[str, torch.Tensor]], endless: None
):
    """By a server that was started for it: SGLang's then schedules ahead."""
    assert engine.section.on_update == "recompute"
    update_twenty_times(engine, policy, weights)


def test_an_abort_right_after_an_update_repeats_no_token(
    engine: ServerEngine, policy: Policy, weights: list[dict[str, torch.Tensor]], endless: None
):
    """SGLang has put the answers back into its queue then."""
    several = requests(8, max_new_tokens=400)
    engine.submit(PROMPT, several)
    known = under_way(engine, 8, 20)
    set_weights(policy, weights[(engine.version + 1) % 3])
    engine.weights_changed(engine.version + 1)
    engine.abort({request.id for request in several})
    found = finished(engine)
    assert {generation.finish for generation in found} == {FinishReason.ABORT}
    for generation in found:
        assert np.array_equal(generation.token_ids[:20], known[generation.id].token_ids[:20])
        check_spans(policy, weights, generation, generation.spans)


def test_a_version_that_the_server_refuses_is_taken_by_another_server(
    engine: ServerEngine,
    policy: Policy,
    weights: list[dict[str, torch.Tensor]],
    monkeypatch: pytest.MonkeyPatch,
    endless: None,
):
    def damaged(directory: Path) -> None:
        (directory / "model.safetensors").write_bytes(b"nothing")
        monkeypatch.setattr(engine, "write_weights", write)

    write = engine.write_weights
    version = engine.version + 1
    set_weights(policy, weights[version % 3])
    engine.submit(PROMPT, requests(4, max_new_tokens=400))
    under_way(engine, 4, 10)
    monkeypatch.setattr(engine, "write_weights", damaged)
    engine.weights_changed(version)
    assert f"version {version} was not taken" in engine.notes.pop()
    assert len(finished(engine)) == 4
    engine.submit(PROMPT, requests(2))
    for generation in finished(engine):
        assert {span.version for span in generation.spans} == {version}
        assert np.abs(logprobs(policy, generation) - generation.logprobs).max() < 1e-5


def test_the_canary_sees_a_version_without_some_tensors(
    engine: ServerEngine, policy: Policy, weights: list[dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
):
    """Engines take it: those tensors keep their old values."""
    version = engine.version + 1
    set_weights(policy, weights[version % 3])

    def only_one_layer(directory: Path) -> None:
        write(directory)
        tensors = load_file(directory / "model.safetensors")
        save_file({name: tensors[name] for name in tensors if ".0." in name}, directory / "model.safetensors")

    write = engine.write_weights
    monkeypatch.setattr(engine, "write_weights", only_one_layer)
    engine.weights_changed(version)
    assert not engine.notes
    assert difference(engine, policy) > 0.1
    monkeypatch.undo()
    engine.weights_changed(version)
    assert difference(engine, policy) < 1e-5


def test_a_server_that_hangs_is_replaced(engine: ServerEngine, monkeypatch: pytest.MonkeyPatch, endless: None):
    monkeypatch.setattr("headrace.rollout.engine_server.HUNG_S", 5.0)
    old = processes(engine)
    engine.submit(PROMPT, requests(4, max_new_tokens=400))
    under_way(engine, 4, 20)
    os.kill(old[1].pid, signal.SIGSTOP)
    assert [len(generation.token_ids) for generation in finished(engine)] == [400] * 4
    assert "there was no token for 5 s" in engine.notes.pop()
    assert not alive(old)


def test_no_other_user_can_ask_the_server(engine: ServerEngine, which: str):
    """A key is asked for, which stands in no list of processes; or a file of ours is the only way."""
    launch = engine._servers[0]._launch
    if isinstance(launch.address, str):
        assert not engine._servers[0].directory.stat().st_mode & 0o077
        return
    key = launch.headers["Authorization"].split()[1]
    assert not [p for p in processes(engine) if key in " ".join(p.cmdline())]
    for headers in ({}, {"Authorization": "Bearer guessed"}):
        for path in (engine.generate, "/pause_generation", "/update_weights_from_disk", "/abort_request"):
            connection = http.client.HTTPConnection(*launch.address, timeout=60)
            connection.request("POST", path, "{}", {"Content-Type": "application/json"} | headers)
            assert connection.getresponse().status == 401
            connection.close()


@pytest.mark.parametrize("cluster", ["local", "ray"])
def test_a_run_trains_with_it_and_its_books_balance(which: str, cluster: str, tmp_path: Path):
    overrides = [f"rollout.engine={which}", f"rollout.command={command(which)}", "warmstart.steps=30", "loop.steps=4"]
    overrides += ["loop.max_lag=1", "loop.groups_per_step=4", "prompts.eval_count=16", f"run.dir={tmp_path / 'run'}"]
    overrides += ["loop.eval_temperature=0"]  # SGLang follows no seed
    if cluster == "ray":
        pytest.importorskip("ray")
        overrides += ["place.cluster=ray", "rollout.workers=2"]
    before = set(Path("/dev/shm").glob("headrace-*"))  # of the tests above
    summary = headrace.train(load_config(DEMO, overrides))
    assert summary["finished"] is True
    assert summary["version"] == 4
    assert summary["mismatch_before"] < 1e-5
    assert audit(tmp_path / "run") == []
    with Ledger.open(tmp_path / "run") as ledger:
        assert max(row.mismatch_mean for row in ledger.rows() if not row.lag_max) < 1e-5
    assert headrace.evaluate_run(tmp_path / "run") == summary["score_after"]
    deadline = time.monotonic() + 20
    while set(Path("/dev/shm").glob("headrace-*")) - before:
        assert time.monotonic() < deadline


AS_IN_THE_GUIDE = {
    "vllm": "--model {model} --served-model-name policy --generation-config vllm --enable-scale-out "
    "--logprobs-mode processed_logprobs --max-logprobs 256 --stream-interval 16 --port {port}",
    "sglang": "--model-path {model} --stream-interval 16 --incremental-streaming-output --port {port}",
}
ON_A_CPU = {
    "vllm": "--enforce-eager --no-enable-chunked-prefill --max-num-batched-tokens 8192 --max-model-len 512 "
    "--dtype float32",
    "sglang": "--device cpu --dtype float32 --context-length 520 --max-total-tokens 16384 --skip-server-warmup",
}
VARIABLES = {
    "vllm": CPU | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"},
    "sglang": {
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    },
}


def start_as_its_user(which: str, model: Path, port: int) -> subprocess.Popen[bytes]:
    words = f"{command(which)} {AS_IN_THE_GUIDE[which]} {ON_A_CPU[which]}".format(model=model, port=port).split()
    own = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    with (model.parent / f"log-{port}").open("wb") as log:
        told = {"stdout": log, "stderr": log, "start_new_session": True}
        return subprocess.Popen(words, env=own | VARIABLES[which] | {"HF_HUB_OFFLINE": "1"}, **told)


def await_answer(port: int, process: subprocess.Popen[bytes]) -> None:
    while True:
        assert process.poll() is None, "see its log"
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.5)


def end(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def test_servers_of_the_users_own_are_asked_together(
    which: str, policy: Policy, weights: list[dict[str, torch.Tensor]], tmp_path: Path, endless: None
):
    """Versions are exact in all of them; the other goes on with the answers of one that is killed, until it is back."""
    if engine_vllm.LABELS == "99":
        pytest.skip("the user's servers have to tell versions: tests/rollout/test_engine_server.py")
    set_weights(policy, weights[0])
    policy.save(tmp_path / "model")
    ports = [free_port(), free_port()]
    running = [start_as_its_user(which, tmp_path / "model", port) for port in ports]
    try:
        for port, process in zip(ports, running, strict=True):
            await_answer(port, process)
        addresses = ",".join(f"http://127.0.0.1:{port}" for port in ports)
        given = section(which, command=addresses, on_update="recompute")
        engine = SERVERS[which](policy, given, 512, time.monotonic, shared=str(tmp_path / "served"))
        engine.submit(PROMPT, requests(16, max_new_tokens=480))
        found = engine.advance()
        assert [server.num_asked for server in engine._servers] == [8, 8]
        while len(engine.under_way()) + len(found) < 16:
            found += engine.advance()
        for version in range(1, 6):
            set_weights(policy, weights[version % 3])
            engine.weights_changed(version)
            found += engine.advance()
        found += finished(engine)
        assert {0, 5} < {span.version for generation in found for span in generation.spans}
        engine.submit(PROMPT, requests(16, max_new_tokens=480))
        under_way(engine, 16, 1)
        end(running[0])
        found += finished(engine)
        assert [len(generation.token_ids) for generation in found] == [480] * 32
        for generation in found:
            check_spans(policy, weights, generation, generation.spans)
        assert f"the server at http://127.0.0.1:{ports[0]} is left out" in engine.notes[0]
        set_weights(policy, weights[6 % 3])
        engine.weights_changed(6)
        running[0] = start_as_its_user(which, tmp_path / "model", ports[0])
        while len(engine._servers) < 2:
            assert running[0].poll() is None
            engine.advance()
        both = engine.greedy(PROMPT)
        assert len(both) == 2
        assert abs(both[0][1] - both[1][1]) < 1e-5
        engine.submit(PROMPT, requests(8))
        for generation in finished(engine):
            check_spans(policy, weights, generation, generation.spans)
        engine.close()
    finally:
        for process in running:
            end(process)


def test_a_server_is_a_teacher(which: str, policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    policy.save(tmp_path / "model")
    port = free_port()
    process = start_as_its_user(which, tmp_path / "model", port)
    try:
        await_answer(port, process)
        monkeypatch.setenv("TEACHER_BASE_URL", f"http://127.0.0.1:{port}/v1")
        monkeypatch.setenv("TEACHER_MODEL", {"vllm": "policy", "sglang": str(tmp_path / "model")}[which])
        monkeypatch.setenv("TEACHER_TOKENIZER", str(tmp_path / "model"))
        teacher = f"{DEMO.parent / 'teacher_server.py'}:logprobs"
        rng = np.random.default_rng(0)
        answers = [rng.integers(3, 30, n).tolist() for n in (1, 7, 60)]
        group = group_of(*(trajectory(prompt=PROMPT.tolist(), answer=answer) for answer in answers))
        found = teacher_logprobs(teacher, group)
        for answer, told in zip(answers, found, strict=True):
            ids = torch.tensor([*PROMPT.tolist(), *answer])
            plan, at = PackedPlan([len(ids)], ids.device), torch.arange(len(PROMPT), len(ids))
            with torch.no_grad():
                expected = policy.logprobs(ids, plan, at, 1.0)[0].numpy()
            np.testing.assert_allclose(told, expected, atol=1e-5)
    finally:
        end(process)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
