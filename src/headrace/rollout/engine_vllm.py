"""vLLM as a `ServerEngine`, asked over a unix socket."""

import json
import os
import shlex
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from headrace.config import COMMANDS, MOST_TOP_K
from headrace.rollout.engine_server import FINISH, Part, ServerEngine
from headrace.rollout.server import START_S, Launch, Server, ServerLostError, numbers
from headrace.types import FinishReason, IntArray, Sampling

LABEL, ABORT, OLD_ABORT = "/update_weight_version", "/inference/v1/abort_requests", "/abort_requests"
LABELS, SCALE_OUT = "0.32", "0.30"  # the first releases that tell versions, and that have the flag
RELEASE = "import vllm; print(vllm.__version__)"
OUTSIDE = -9000.0  # log-probs below: top-k, top-p or min-p left the token out
CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


class VllmEngine(ServerEngine):
    """Its requests, answers and weight updates."""

    name, generate = "vLLM", "/inference/v1/generate"

    def launch(self, directory: Path) -> Launch:
        path, context = str(directory / "socket"), self.max_context
        flags = (
            f"--model {directory} --uds {path} --served-model-name policy --generation-config vllm "
            f"--dtype {str(self.policy.dtype).removeprefix('torch.')} --max-model-len {context} "
            f"--max-num-seqs {self.section.max_running} --stream-interval 16 "
            f"--logprobs-mode processed_logprobs --max-logprobs {MOST_TOP_K} --disable-uvicorn-access-log"
        )
        env = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
        if numbers(installed(self.section.command or COMMANDS["vllm"])) >= numbers(SCALE_OUT):
            flags += " --enable-scale-out"
        if not self.on_gpu:  # there it fails where a request with a seed is prefilled in chunks
            flags += f" --enforce-eager --no-enable-chunked-prefill --max-num-batched-tokens {max(8192, context)}"
            env |= CPU | {name: value for name, value in os.environ.items() if name in CPU}
        greeting = (LABEL, {"new_version": f"{self.mark}{self.version}"})
        return Launch(flags.split(), env, path, labels=LABELS, may_be_older=True, greeting=greeting)

    def write_weights(self, directory: Path) -> None:
        super().write_weights(directory)
        if self.policy.config.tie_word_embeddings:  # on a CPU, vLLM has a copy of the head
            head = self.policy.head_weight.detach().contiguous()
            save_file({"lm_head.weight": head}, directory / "head.safetensors")

    def body(self, id: str, tokens: IntArray, sampling: Sampling, max_tokens: int, seed: int) -> dict[str, Any]:
        own = {"ignore_eos": True, "logprobs": sampling.top_k, "detokenize": bool(sampling.stop)}
        return {
            "request_id": id,
            "token_ids": tokens.tolist(),
            "model": "policy",
            "cache_salt": f"v{self.version}",  # else old weights' prefixes would serve
            "sampling_params": self.sampling_params(sampling) | own | {"max_tokens": max_tokens, "seed": seed},
        }

    def part(self, answer: dict[str, Any], truncates: bool, so_far: int) -> Part:
        if not answer:  # an old release says nothing else at an abort
            return Part([], [], finish=FinishReason.ABORT)
        if "choices" not in answer:
            raise ServerLostError(json.dumps(answer)[:500])
        choice = answer["choices"][0]
        finish = FINISH[choice["finish_reason"]] if choice.get("finish_reason") else None
        if isinstance(choice.get("stop_reason"), str):
            finish = FinishReason.STOP
        entries = choice["logprobs"]["content"] if choice["token_ids"] else []
        tops = (entry["top_logprobs"] for entry in entries if truncates)
        supports = [[_token(top) for top in left if top["logprob"] > OUTSIDE] for left in tops]
        logprobs = [entry["logprob"] for entry in entries]
        return Part(choice["token_ids"], logprobs, supports, finish, choice.get("weight_versions") or ())

    def hold(self, server: Server) -> None:
        if not server.tells_versions:
            server.post("/pause?mode=abort")

    def load(self, server: Server) -> None:
        clears = str(self.section.on_update != "keep").lower()  # the cache
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(server.directory)}}
        if server.tells_versions:
            server.post(f"/pause?mode=keep&clear_cache={clears}")
        server.post("/collective_rpc", reload, timeout_s=START_S)
        if server.tells_versions:
            server.post(LABEL, {"new_version": f"{self.mark}{self.version}"})
        server.post("/resume")

    def end(self, server: Server, ids: Sequence[str]) -> None:
        path = ABORT if server.tells_versions else OLD_ABORT
        server.post(path, {"request_ids": [f"generate-tokens-{id}" for id in ids]})


def installed(command: str) -> str:
    """The release of vLLM that a command's Python has; a new one if that cannot be seen."""
    with suppress(OSError, subprocess.SubprocessError, ValueError, IndexError):
        asked = [shlex.split(command)[0], "-E", "-c", RELEASE]  # its server has no PYTHONPATH of ours
        return subprocess.run(asked, capture_output=True, text=True, timeout=START_S, check=True).stdout
    return LABELS


def _token(entry: dict[str, Any]) -> int:
    return int(entry["token_id"] if "token_id" in entry else entry["token"].removeprefix("token_id:"))
