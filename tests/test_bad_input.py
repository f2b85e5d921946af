"""What goes wrong at start-up is said with its numbers and the setting to change."""

from __future__ import annotations

import json
import re
import shutil
from typing import Any

import pytest
import torch
from tiny_runs import Workshop, write_prompts

from headrace import api
from headrace.config_file import load_config
from headrace.errors import ConfigError, DataError, ModelError
from headrace.learner import learner
from headrace.policy import policy
from headrace.rollout import engine


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("bad"))


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        ("frobnicate", r"'frobnicate', which transformers \S+ does not know"),
        ("t5", "not as a causal language model"),
    ],
)
def test_an_architecture_that_cannot_be_run_is_named(workshop: Workshop, architecture: str, message: str):
    directory = workshop.directory / architecture
    shutil.copytree(workshop.model, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"model_type": architecture}))
    with pytest.raises(ModelError, match=message):
        api.train(workshop.config("arch", f"model.path={directory}"))


def test_a_training_prompt_longer_than_the_context_is_refused_before_the_run(workshop: Workshop):
    path = write_prompts(workshop.directory / "long.jsonl", prompt=["1+1=", "1+" * 150, "1+1="])
    with pytest.raises(DataError, match=r"'p1' has 300 tokens, but .* room for 244 beside .* rollout\.max_new_tokens"):
        api.train(workshop.config("long", f"prompts.source={path}"))
    with pytest.raises(ConfigError, match=r"rollout\.max_new_tokens = 256 leaves no room .* context is 256"):
        api.train(workshop.config("longer", "rollout.max_new_tokens=256"))


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        (["prompts.source=x.jsonl"], ["prompts.source = 'x.jsonl'", "model.path"]),
        (["loop.target_reward=nan"], ["loop.target_reward", "got nan"]),
        (["loop.target_reward=high"], ["loop.target_reward", "expected a number", '"high"']),
        (["rollout.max_new_tokens=0"], ["rollout.max_new_tokens", "at least 1", "got 0"]),
        (["rollout.on_wall=park"], ["rollout.on_wall", "rollout.max_wall_s"]),
    ],
)
def test_a_setting_that_cannot_be_is_named(words: list[str], keys: list[str]):
    with pytest.raises(ConfigError) as caught:
        load_config(None, words)
    assert all(key in str(caught.value) for key in keys)


def raising(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has 3.00 GiB free. ..")


@pytest.mark.parametrize(
    ("where", "name", "message"),
    [
        (policy, "_load_model", r"the model: Tried to allocate 20\.00 GiB\. .*model\.path"),
        (engine, "make_store", r"the key/value cache \(0\.1 GiB in all\): Tried to .*rollout\.kv_tokens"),
        (learner, "Optimizer", r"the optimizer and the reference policy: Tried to .*learner\.kl_coef"),
        (learner, "pack", r"training: Tried to .*learner\.micro_batch_tokens"),
    ],
)
def test_out_of_memory_says_for_what_and_which_setting_asks_for_less(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, where: Any, name: str, message: str
):
    monkeypatch.setattr(where, name, raising)
    with pytest.raises(ConfigError, match=f"out of memory for {message}"):
        api.train(workshop.config(f"memory-{name}", reward="dense"))


def test_memory_too_small_for_one_sequence(workshop: Workshop, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("headrace.place.build.kv_budget", lambda policy, kv_tokens, reserved: 15)
    with pytest.raises(ConfigError, match=re.escape("a key/value cache of 15 tokens, and one sequence may need 17")):
        api.train(workshop.config("small"))
