"""SGLang as a `ServerEngine`, asked over a port of this machine with a key that only we know."""

import secrets
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.errors import ModelError
from headrace.rollout.engine import kv_bytes_per_token
from headrace.rollout.engine_server import FINISH, Part, ServerEngine
from headrace.rollout.server import START_S, Launch, Server, ServerLostError
from headrace.types import FinishReason, IntArray, Sampling

HOST = "127.0.0.1"
SPARE = 8  # tokens, at the end of its context, that it does not use


class SglangEngine(ServerEngine):
    """Its requests, answers and weight updates."""

    name, generate = "SGLang", "/generate"

    def launch(self, directory: Path) -> Launch:
        with socket.create_server((HOST, 0)) as free:
            port = int(free.getsockname()[1])
        key, settings = secrets.token_hex(16), directory / "server.yaml"
        settings.write_text(f'api-key: "{key}"\n')  # every user of the machine can read flags
        running, context = self.section.max_running, self.max_context + SPARE
        flags = (
            f"--config {settings} --model-path {directory} --served-model-name policy --host {HOST} --port {port} "
            f"--dtype {str(self.policy.dtype).removeprefix('torch.')} --context-length {context} "
            f"--max-running-requests {running} --stream-interval 16 --incremental-streaming-output "
            f"--weight-version {self.mark}{self.version} --skip-server-warmup --log-level warning"
        )
        env = {"SGLANG_RETURN_ORIGINAL_LOGPROB": "0", "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
        if self.section.on_update == "keep":  # else a token under way counts as the next version's
            flags += " --disable-overlap-schedule"
        if not self.on_gpu:
            kv_tokens = max(context, min(running * context, 2**30 // kv_bytes_per_token(self.policy)))
            flags += f" --device cpu --max-total-tokens {kv_tokens} --sleep-on-idle"
            env |= {"SGLANG_USE_CPU_ENGINE": "1"}
        headers = {"Authorization": f"Bearer {key}"}
        return Launch(flags.split(), env, (HOST, port), headers, release="/server_info", labels="0.5.19")

    def body(self, id: str, tokens: IntArray, sampling: Sampling, max_tokens: int, seed: int) -> dict[str, Any]:
        """SGLang has no use for the seed."""
        own = {"max_new_tokens": max_tokens, "top_k": sampling.top_k or -1}
        own |= {"ignore_eos": not self.policy.eos_ids}  # true would ignore stop_token_ids too
        return {
            "rid": id,
            "input_ids": tokens.tolist(),
            "return_logprob": True,
            "return_sampling_mask": sampling.truncates,
            "cache_salt": f"v{self.version}",  # else prefixes of old weights would serve it
            "sampling_params": self.sampling_params(sampling) | own,
        }

    def part(self, answer: dict[str, Any], truncates: bool, so_far: int) -> Part:
        if "meta_info" not in answer:
            error = answer["error"]
            raise ModelError(error["message"]) if error["code"] == 400 else ServerLostError(str(error))
        told, finish = answer["meta_info"], None
        if reason := told["finish_reason"]:
            by_text = isinstance(reason.get("matched"), str)
            finish = FinishReason.STOP if by_text else FINISH[reason["type"]]
        fresh = told["completion_tokens"] - so_far  # an abort of a queued request repeats what was streamed
        logprobs = [entry[0] for entry in told.get("output_token_logprobs", [])]
        if truncates:  # those are of all tokens
            logprobs = told.get("output_token_sampling_logprobs", [])
        supports = told.get("output_token_sampling_mask", [])[:fresh]
        spans = told.get("weight_versions", [])
        return Part(answer["output_ids"][:fresh], logprobs[:fresh], supports, finish, spans)

    def load(self, server: Server) -> None:
        keeps = self.section.on_update == "keep"  # the cache
        update = {"model_path": str(server.directory), "weight_version": f"{self.mark}{self.version}"}
        server.post("/pause_generation", {"mode": "in_place" if keeps else "retract"})
        server.post("/update_weights_from_disk", update | {"flush_cache": not keeps}, timeout_s=START_S)
        server.post("/continue_generation", {})

    def end(self, server: Server, ids: Sequence[str]) -> None:
        for id in ids:
            server.post("/abort_request", {"rid": id})
