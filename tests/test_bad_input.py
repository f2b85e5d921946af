"""What goes wrong at start-up is said with its numbers and the setting to change."""

from __future__ import annotations

import json
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles import tiny_model
from tiny_runs import Workshop, write_prompts
from transformers import AutoModelForCausalLM

from headrace import api
from headrace.config_file import load_config
from headrace.errors import ConfigError, DataError, ModelError, RunError
from headrace.learner import learner
from headrace.measured import Row
from headrace.roles import Watcher
from headrace.rollout import engine


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("bad"))


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        ("frobnicate", r"'frobnicate', which transformers \S+ does not know"),
        ("t5", "not as a causal LM"),
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
    with pytest.raises(ConfigError, match=r"rollout\.max_new_tokens = 256 leaves no room .* context of 256"):
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
        (AutoModelForCausalLM, "from_pretrained", r"the model: Tried to allocate 20\.00 GiB\. .*model\.path"),
        (engine, "RowStore", r"the key/value cache \(0\.1 GiB in all\): Tried to .*rollout\.kv_tokens"),
        (learner, "Optimizer", r"the optimizer and the reference policy.*: Tried to .*learner\.kl_coef"),
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
    monkeypatch.setattr("headrace.place.rollout_worker.kv_budget", lambda policy, kv_tokens, reserved: 15)
    with pytest.raises(ConfigError, match=re.escape("a key/value cache of 15 tokens, and one sequence may need 17")):
        api.train(workshop.config("small"))


# ---- numbers of absurd size

HUGE = 10**12


@pytest.mark.parametrize(
    ("word", "allowed"),
    [
        (f"model.threads={HUGE}", "at most 512"),
        (f"rollout.samples={HUGE}", "at most 10,000"),
        (f"rollout.max_running={HUGE}", "at most 65,536"),
        (f"rollout.workers={HUGE}", "at most 1,024"),
        (f"reward.workers={HUGE}", "at most 1,024"),
        (f"reward.retries={HUGE}", "at most 1,000"),
        (f"learner.ranks={HUGE}", "from 1 to 1,024"),
        (f"learner.lora_rank={HUGE}", "at most 16,384"),
        (f"loop.steps={HUGE}", "at most 1,000,000,000"),
        (f"loop.groups_per_step={HUGE}", "at most 100,000"),
        (f"loop.max_lag={HUGE}", "at most 10,000"),
        (f"loop.eval_samples={HUGE}", "at most 10,000"),
        (f"prompts.count={HUGE}", "at most 10,000,000"),
        (f"prompts.eval_count={HUGE}", "at most 1,000,000"),
        (f"warmstart.examples={HUGE}", "at most 100,000"),
        (f"rollout.kv_tokens={HUGE}", "at most 1,000,000,000"),
        (f"recovery.journal_steps={HUGE}", "at most 1,000,000,000"),
        (f"run.seed={2**63}", "at most 9,223,372,036,854,775,807"),
        ("reward.timeout_s=inf", "at most 100,000,000"),
        ("reward.timeout_s=1e-9", "at least 0.01"),
        ("recovery.hang_s=1e30", "at most 100,000,000"),
        ("learner.lr=inf", "at most 1,000,000,000"),
        ("learner.betas=[1, 0.9]", "below 1"),
        ("learner.betas=[0.9]", "a number at least 0 and below 1 and a number"),
        ("rollout.temperature=1e-300", "at least 1e-06"),
        ("rollout.top_p=1e-300", "at least 1e-06"),
        ("loop.eval_temperature=1e-300", "use 0, which is greedy, or at least 1e-06"),
        ("run.dir=a\0b", 'expected text; got "a\\u0000b"'),
        ("model.path=a\0b", "expected text"),
        ("reward.function=a\0b.py:f", "expected text"),
        ('rollout.stop=["x", ""]', "would end every answer at its first token"),
    ],
)
def test_a_number_of_absurd_size_is_refused_with_what_is_allowed(word: str, allowed: str):
    with pytest.raises(ConfigError) as caught:
        load_config(None, [word])
    assert word.partition("=")[0] in str(caught.value)
    assert allowed in str(caught.value)


def test_settings_that_are_absurd_only_together():
    words = ["rollout.samples=1000", "loop.groups_per_step=500"]
    assert load_config(None, [*words, "loop.max_lag=1"]).loop.max_lag == 1
    with pytest.raises(ConfigError, match=r"rollout\.samples = 1000, .* = 500 and loop\.max_lag = 2: 1,500,000 traj"):
        load_config(None, [*words, "loop.max_lag=2"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[loop]\nsteps = " + "[" * 5000, "is not valid TOML"),
        ("a." * 3000 + "b = 1", "is not valid TOML"),
        ("\0", "is not valid TOML"),
    ],
    ids=["a list in a list", "a table in a table", "a zero byte"],
)
def test_a_settings_file_that_cannot_be_read(tmp_path: Path, text: str, message: str):
    (tmp_path / "bad.toml").write_text(text)
    with pytest.raises(ConfigError, match=rf"bad\.toml {message}"):
        load_config(tmp_path / "bad.toml")
    with pytest.raises(ConfigError, match=r"loop\.steps: expected a whole number"):
        load_config(None, ["loop.steps=" + "[" * 5000])


# ---- prompts


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


@pytest.mark.parametrize("depth", [101, 5000])
@pytest.mark.parametrize("field", ["meta", "messages"])
def test_deeply_nested_prompts_are_refused(workshop: Workshop, depth: int, field: str):
    path = workshop.directory / "deep.jsonl"
    path.write_text(f'{{"prompt": "1+1="}}\n{{"prompt": "1+1=", "{field}": {nested(depth)}}}\n')
    with pytest.raises(DataError, match=r"deep\.jsonl, line 2: lists and objects are nested more than 100 deep"):
        api.train(workshop.config("deep", f"prompts.source={path}"))


def test_prompts_nested_a_little_are_taken(workshop: Workshop):
    path = write_prompts(workshop.directory / "nested.jsonl", meta=[json.loads(nested(99))])
    assert api.train(workshop.config("nested", f"prompts.source={path}", "loop.steps=1", reward="dense"))["finished"]


def test_an_id_that_is_not_unicode_is_refused_before_the_run(workshop: Workshop):
    path = write_prompts(workshop.directory / "ids.jsonl", id=["\u00e4", "b\ud800", *map(str, range(48))])
    with pytest.raises(DataError, match=r"record 2 has the id 'b\\ud800', which is not valid Unicode text"):
        api.train(workshop.config("ids", f"prompts.source={path}"))


def test_text_that_is_not_unicode_is_refused_before_the_run(workshop: Workshop):
    path = write_prompts(workshop.directory / "surrogate.jsonl", prompt=["1+1=", "\ud800", "1+1="])
    with pytest.raises(DataError, match="prompt 'p1' is not valid Unicode text"):
        api.train(workshop.config("surrogate", f"prompts.source={path}"))


ENDLESS = "{% for a in range(9999) %}" * 4 + "{% endfor %}" * 4
TEMPLATES = {
    "endless": (ENDLESS, "did not come to an end in 0.2 s"),
    "large range": ("{% for a in range(10**9) %}{% endfor %}", "Range too big"),
    "division": ("{{ 1 / 0 }}", "division by zero"),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "maximum recursion depth"),
    "syntax": ("{% for %}", "Expected an expression"),
    "refusal": ("{{ raise_exception('no system message') }}", "no system message"),
    "number": (7, "Can't compile"),
}


@pytest.mark.parametrize("kind", TEMPLATES)
def test_a_chat_template_that_fails_is_refused_with_the_prompt(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, kind: str
):
    template, message = TEMPLATES[kind]
    if kind == "endless":
        monkeypatch.setattr("headrace.prompts.stream.TEMPLATE_S", 0.2)
    directory = workshop.directory / f"template-{kind}"
    shutil.copytree(workshop.model, directory)
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))

    def train() -> None:
        with pytest.raises(DataError, match=rf"prompt 'p4\d': .*chat template refuses it: .*{message}"):
            api.train(workshop.config(f"t-{kind}", f"model.path={directory}"))

    train()
    with ThreadPoolExecutor(1) as elsewhere:  # not in the main thread, where signals would do
        elsewhere.submit(train).result()


# ---- models and places


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("model.device=mps", r"model\.device = 'mps' is not supported; use auto, cpu, cuda or cuda:0"),
        ("model.device=meta", r"model\.device = 'meta' is not supported"),
        ("model.path=" + "x" * 5000, r"x+': no such directory"),
        ("model.tokenizer=/", r"model\.tokenizer = '/' has no tokenizer"),
    ],
)
def test_a_model_that_is_not_there(workshop: Workshop, word: str, message: str):
    with pytest.raises(ModelError, match=message):
        api.train(workshop.config("model", word, "run.overwrite=true"))


@pytest.mark.parametrize("source", ["x" * 5000 + ".jsonl", "x" * 5000])
def test_prompts_that_are_not_there(workshop: Workshop, source: str):
    with pytest.raises(DataError, match="is not there; use"):
        api.train(workshop.config("prompts", f"prompts.source={source}", "run.overwrite=true"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 0, "layer_types": []}, "Qwen3ForCausalLM has no layers"),
        ({"extra": json.loads(nested(900))}, "cannot be loaded"),
    ],
    ids=["no layers", "deep"],
)
def test_a_config_that_is_no_model(workshop: Workshop, changes: dict[str, Any], message: str):
    directory = workshop.directory / f"config-{'-'.join(changes)}"
    shutil.copytree(workshop.model, directory)
    config = json.loads((directory / "config.json").read_text())
    text = json.dumps(config | changes)
    (directory / "config.json").write_text(text.replace(nested(900), nested(5000)))
    with pytest.raises(ModelError, match=message):
        api.train(workshop.config("config", f"model.path={directory}", "run.overwrite=true"))


class Stopper(Watcher):
    """Ends a run as Ctrl-C outside of training does."""

    def row(self, row: Row) -> None:
        """After the second step."""
        if row.step == 2:
            raise KeyboardInterrupt


@pytest.mark.parametrize("change", [{"hidden_size": 64}, {"intermediate_size": 24}], ids=str)
def test_a_run_cannot_go_on_with_another_model(tmp_path: Path, change: dict[str, int]):
    own = Workshop(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        api.train(own.config("run", "recovery.every_steps=1", reward="dense"), Stopper())
    tiny_model(own.model, **change)
    with pytest.raises(RunError, match=r"step-\d+ does not fit .* Has the model at model\.path changed") as caught:
        api.resume(tmp_path / "run")
    assert "\n" not in str(caught.value)
