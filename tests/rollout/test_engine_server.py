"""What a server leaves behind, with another program in its place. With real ones: tests/engines."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from headrace.errors import ConfigError, ModelError
from headrace.rollout.engine_server import refusal
from headrace.rollout.engine_sglang import SglangEngine
from headrace.rollout.engine_vllm import LABELS, VllmEngine, installed
from headrace.rollout.server import Launch, Server, ServerLostError, TheirServer, numbers
from headrace.types import FinishReason, Sampling

PROGRAM = """
import time
from headrace.rollout.server import Launch, Server
server = Server("sh -c 'sleep 1000 & sleep 1000'", lambda directory: None, lambda directory: Launch())
print(server._process.pid, server.directory, flush=True)
time.sleep(1000)
"""


def test_no_process_and_no_file_outlives_a_run_that_is_killed():
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        pid, directory = run.stdout.readline().split()
        processes = [psutil.Process(int(pid))]
        while len(processes) < 2:
            processes = [psutil.Process(int(pid)), *psutil.Process(int(pid)).children()]
        os.kill(run.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    deadline = time.monotonic() + 20
    while Path(directory).exists():
        assert time.monotonic() < deadline


def test_a_server_that_ends_at_once_is_told_with_its_last_lines():
    server = Server("sh -c 'echo no such model; exit 3'", lambda directory: None, lambda directory: Launch())
    with pytest.raises(ConfigError, match="did not come up; its last lines:\nno such model"):
        server.wait_ready()
    server.close()


@pytest.mark.parametrize(
    ("command", "why"), [("nowhere", "No such file"), ("", "Errno"), ("python 'x", "No closing quotation")]
)
def test_a_command_that_cannot_be_started_is_told(command: str, why: str):
    with pytest.raises(ConfigError, match=rf"rollout\.command = '{command}' cannot be started: .*{why}"):
        Server(command, lambda directory: None, lambda directory: Launch())


def test_what_training_could_not_repeat_is_refused():
    for engine in ("vllm", "sglang"):
        assert not refusal(engine, Sampling(max_new_tokens=8, top_k=20, top_p=0.9))
        assert "top_k up to 256" in refusal(engine, Sampling(max_new_tokens=8, top_p=0.9))
        assert "JSON schema" in refusal(engine, Sampling(max_new_tokens=8, grammar="start: /a/"))
    assert not refusal("embedded", Sampling(max_new_tokens=8, top_p=0.9, grammar="start: /a/"))


TELLS = """
import http.server, json, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"version": sys.argv[2]}).encode())
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.mark.parametrize(
    ("release", "least", "is_old"),
    [
        ("0.5.18", "0.5.19", True),
        ("0.5.19.post1", "0.5.19", False),
        ("0.31.2", "0.32", True),
        ("0.32.0", "0.32", False),
    ],
)
def test_a_release_that_does_not_tell_versions_is_refused(release: str, least: str, is_old: bool):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launch = Launch([str(port), release], address=("127.0.0.1", port), labels=least)
    command = shlex.join([sys.executable, "-c", TELLS])
    server = Server(command, lambda directory: None, lambda directory: launch)
    try:
        if is_old:
            with pytest.raises(ConfigError, match=rf"too old: {release} .*; {least} does"):
                server.wait_ready()
        else:
            server.wait_ready()
    finally:
        server.close()


def test_a_server_of_ours_may_have_a_release_that_does_not_tell_versions(tmp_path: Path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launch = Launch([str(port), "0.26.0"], address=("127.0.0.1", port), labels="0.32", may_be_older=True)
    server = Server(shlex.join([sys.executable, "-c", TELLS]), lambda directory: None, lambda directory: launch)
    try:
        server.wait_ready()
        assert not server.tells_versions
        theirs = TheirServer(f"http://127.0.0.1:{port}", tmp_path, lambda directory: launch)
        with pytest.raises(ConfigError, match=r"too old: 0\.26\.0 does not tell .*; 0\.32 does"):
            theirs.wait_ready()
    finally:
        server.close()


def test_the_release_is_that_of_the_python_in_the_command(tmp_path: Path):
    package = tmp_path / "site" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("__version__ = '0.26.0'\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\ncd {tmp_path}/site && exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    assert numbers(installed(f"{python} -m vllm.entrypoints.openai.api_server")) == [0, 26, 0]
    for unknown in (f"{sys.executable} -m vllm", "nowhere", "", "python 'x"):
        assert installed(unknown) == LABELS


def test_what_an_old_release_of_vllm_says():
    engine = object.__new__(VllmEngine)
    tops = [{"token": "token_id:7", "logprob": -0.5}, {"token": "token_id:9", "logprob": -9999.0}]
    entry = {"token": "token_id:7", "logprob": -0.5, "top_logprobs": tops}
    choice = {"token_ids": [7], "logprobs": {"content": [entry]}, "finish_reason": "length"}
    part = engine.part({"choices": [choice]}, True, so_far=0)
    assert (part.tokens, part.logprobs, part.supports, part.finish) == ([7], [-0.5], [[7]], FinishReason.LENGTH)
    assert not part.spans
    assert engine.part({}, True, so_far=1).finish is FinishReason.ABORT  # the end of its stream


def sglang_answer(tokens: list[int], total: int, finish: dict[str, object] | None = None) -> dict[str, object]:
    told = {"finish_reason": finish, "completion_tokens": total, "weight_versions": []}
    told["output_token_logprobs"] = [[-1.0, token, None] for token in tokens]
    return {"output_ids": tokens, "meta_info": told}


def test_what_sglang_repeats_at_an_abort_is_not_counted_twice():
    engine = object.__new__(SglangEngine)
    aborted = {"type": "abort", "message": "Abort in waiting queue"}
    part = engine.part(sglang_answer([7], total=5, finish=aborted), False, so_far=5)
    assert (part.tokens, part.logprobs, part.finish) == ([], [], FinishReason.ABORT)
    part = engine.part(sglang_answer([5, 6, 7, 7], total=5, finish=aborted), False, so_far=2)
    assert (part.tokens, len(part.logprobs)) == ([5, 6, 7], 3)


def test_what_sglang_refuses_is_an_error_of_the_request_and_no_lost_server():
    engine = object.__new__(SglangEngine)
    with pytest.raises(ModelError, match="too long"):
        engine.part({"error": {"message": "too long", "code": 400}}, False, 0)
    with pytest.raises(ServerLostError):
        engine.part({"error": {"message": "out of memory", "code": 500}}, False, 0)
