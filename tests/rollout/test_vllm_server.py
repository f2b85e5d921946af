"""What a vLLM server leaves behind, with another program in its place. With a real one: tests/engines."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from headrace.errors import ConfigError
from headrace.rollout.engine_vllm import Server, refusal
from headrace.types import Sampling

PROGRAM = """
import time
from headrace.rollout.engine_vllm import Server
server = Server("sh -c 'sleep 1000 & sleep 1000'", "", lambda directory: None, False, 0)
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
    server = Server("sh -c 'echo no such model; exit 3'", "", lambda directory: None, False, 0)
    with pytest.raises(ConfigError, match="did not come up; its last lines:\nno such model"):
        server.wait_ready()
    server.close()


@pytest.mark.parametrize(
    ("command", "why"), [("nowhere", "No such file"), ("", "Errno"), ("python 'x", "No closing quotation")]
)
def test_a_command_that_cannot_be_started_is_told(command: str, why: str):
    with pytest.raises(ConfigError, match=rf"rollout\.command = '{command}' cannot be started: .*{why}"):
        Server(command, "", lambda directory: None, False, 0)


def test_what_training_could_not_repeat_is_refused():
    assert not refusal(Sampling(max_new_tokens=8, top_k=20, top_p=0.9))
    assert "top_k up to 256" in refusal(Sampling(max_new_tokens=8, top_p=0.9))
    assert "JSON schema" in refusal(Sampling(max_new_tokens=8, grammar="start: /a/"))
