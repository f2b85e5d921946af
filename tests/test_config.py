from __future__ import annotations

from pathlib import Path

import pytest

from headrace.config import Config
from headrace.config_file import DEMO, SETTINGS, changed, explain, load_config, rooted, to_toml
from headrace.errors import ConfigError
from headrace.ledger.files import write_whole


def message(path: Path | None = None, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


@pytest.fixture
def toml(tmp_path: Path):
    def write(text: str) -> Path:
        path = tmp_path / "my.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_nothing_given_is_the_defaults():
    assert load_config(None, []) == Config()


def test_command_line_wins_over_file(toml):
    config = load_config(toml("[loop]\nsteps = 5\nmax_lag = 2\n"), ["loop.steps=7"])
    assert (config.loop.steps, config.loop.max_lag) == (7, 2)


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("model.path=my/dir", "model", "path", "my/dir"),
        ('model.path="my/dir"', "model", "path", "my/dir"),
        ("learner.lr=3e-6", "learner", "lr", 3e-6),
        ("learner.lr=1", "learner", "lr", 1.0),
        ('rollout.stop=["a","b"]', "rollout", "stop", ("a", "b")),
        ("run.overwrite=true", "run", "overwrite", True),
        ("run.overwrite=True", "run", "overwrite", True),
        ("run.dir=2026", "run", "dir", "2026"),
        ("run.dir=2026-01-02", "run", "dir", "2026-01-02"),
        ("model.tokenizer=", "model", "tokenizer", ""),
        ("prompts.system=a = b", "prompts", "system", "a = b"),
        ("learner.loss=gspo", "learner", "loss", "gspo"),
        ("loop.steps = 9", "loop", "steps", 9),
    ],
)
def test_overrides_are_toml_or_plain_text(override, section, key, value):
    assert getattr(getattr(load_config(None, [override]), section), key) == value


@pytest.mark.parametrize(
    ("key", "suggestion"),
    [
        ("learner.learning_rate", "learner.lr"),
        ("learning_rate", "learner.lr"),
        ("steps", "loop.steps"),
        ("learner.steps", "loop.steps"),
        ("rollout.temprature", "rollout.temperature"),
        ("lerner.lr", "learner.lr"),
        ("learner.adam.beta", "learner.betas"),
        ("max_lagg", "loop.max_lag"),
    ],
)
def test_unknown_setting_suggests_the_nearest(key, suggestion):
    text = message(None, f"{key}=1")
    assert text.startswith(f"unknown setting {key}; did you mean {suggestion}")
    assert "(command line)" in text


def test_far_fetched_setting_gets_no_suggestion():
    assert message(None, "zzz.qqq=1") == "unknown setting zzz.qqq (command line)"


def test_a_selection_that_does_not_exist(toml):
    told = r"prompts\.select = 'signals' is none of 'uniform', 'in-order', 'signal', and names no 'file\.py:function'"
    with pytest.raises(ConfigError, match=told):
        load_config(None, ["prompts.select=signals"])
    with pytest.raises(ConfigError, match=r"prompts\.select: expected text; got true"):
        load_config(toml("[prompts]\nselect = true\n"))
    assert load_config(None, ["prompts.select=mine.py:choose"]).prompts.select == "mine.py:choose"


def test_section_is_not_a_setting(toml):
    assert "learner is a section, not a setting" in message(None, "learner=3")
    assert "unknown setting lerner; did you mean learner?" in message(toml("[lerner]\n"))


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("loop.steps=many", 'loop.steps: expected a whole number at least 0; got "many" (command line)'),
        ("loop.steps=2.5", "loop.steps: expected a whole number at least 0; got 2.5 (command line)"),
        ("loop.steps=true", "loop.steps: expected a whole number at least 0; got true (command line)"),
        ("rollout.top_p=1.5", "rollout.top_p: expected a number at least 1e-06 and at most 1; got 1.5 (command line)"),
        (
            "learner.schedule=cosin",
            'learner.schedule: expected one of "constant", "linear", "cosine"; got "cosin" (command line)',
        ),
        ("rollout.stop=x", 'rollout.stop: expected a list of text, such as ["text"]; got "x" (command line)'),
        ("run.overwrite=maybe", 'run.overwrite: expected true or false; got "maybe" (command line)'),
    ],
)
def test_wrong_value_says_what_was_expected(override, expected):
    assert message(None, override) == expected


def test_wrong_value_names_its_file(toml):
    path = toml("[loop]\nsteps = -1\n")
    assert message(path) == f"loop.steps: expected a whole number at least 0; got -1 ({path})"


def test_all_mistakes_come_at_once(toml):
    path = toml('[learner]\nlearning_rate = 1\nloss = "pop"\n[rollout]\nsamples = 1\n')
    lines = message(path, "steps=3", "loop.max_lag=-1", "loop.steps").splitlines()
    assert lines[0] == "7 problems with the settings:"
    order = [
        "loop.steps has no value",
        "learner.learning_rate",
        "unknown setting steps",
        "loop.max_lag",
        "rollout.samples = 1 and learner.advantage",
        "rollout.samples = 1 and buffer.drop = 'no_signal'",
        "learner.loss",
    ]
    assert all(part in line for part, line in zip(order, lines[1:], strict=True)), lines


def test_contradiction_names_both_keys():
    text = message(None, "reward.overlong_tokens=100", "rollout.max_new_tokens=50")
    assert text == "reward.overlong_tokens is larger than rollout.max_new_tokens"


def test_an_adapter_is_published_only_if_there_is_one():
    found = message(None, "publish.encoding=adapter")
    assert found.startswith("publish.encoding = 'adapter' and learner.lora_rank = 0")


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("model.exact=true", "not the learner's to the bit"),
        ("rollout.speculate=4", "put its own flags into rollout.command"),
        ("rollout.kv_tokens=4096", "put its own flags into rollout.command"),
        ("rollout.max_wall_s=3", "cannot lay answers aside"),
        ("rollout.top_p=0.9", "only with a top_k up to 256"),
        ("rollout.top_k=1000", "only with a top_k up to 256"),
        ("place.layout=colocated", "a device of its own"),
    ],
)
def test_what_a_server_cannot_do_is_refused(engine: str, override: str, expected: str):
    with pytest.raises(ConfigError, match=rf"rollout\.engine = '{engine}' and .*{expected}"):
        load_config(None, [f"rollout.engine={engine}", override])
    load_config(None, [f"rollout.engine={engine}", "rollout.top_k=20", "rollout.top_p=0.9"])


def test_a_command_or_an_address_without_its_engine_is_refused():
    for command in ("http://a:8000", "python -m vllm.entrypoints.openai.api_server"):
        with pytest.raises(ConfigError, match=r"which has no server: set rollout\.engine"):
            load_config(None, [f"rollout.command={command}"])


@pytest.mark.parametrize("flag", ["--config my.yaml", "--api-key=x", "--admin-api-key x"])
def test_a_server_of_sglang_takes_no_key_of_the_user(flag: str):
    command = f"rollout.command=python -m sglang.launch_server {flag}"
    load_config(None, ["rollout.engine=vllm", command])
    with pytest.raises(ConfigError, match=r"rollout\.engine = 'sglang' and --config or --api-key in rollout\.command"):
        load_config(None, ["rollout.engine=sglang", command])


def test_contradiction_with_a_value_that_is_wrong_anyway_is_not_reported():
    text = message(None, "reward.overlong_tokens=100", "rollout.max_new_tokens=x")
    assert text.startswith("rollout.max_new_tokens: expected a whole number")
    assert "\n" not in text


def test_missing_file(tmp_path):
    assert message(tmp_path / "no.toml") == f"there is no file {tmp_path / 'no.toml'}"
    assert message(Path("loop.steps")) == "there is no file loop.steps; to set loop.steps write loop.steps=VALUE"
    assert message(tmp_path) == f"cannot read {tmp_path}: it is a directory"


def test_override_without_value():
    assert message(None, "loop.steps") == "loop.steps has no value; write loop.steps=VALUE (command line)"
    assert message(None, "fast") == "'fast' is not of the form section.key=value (command line)"


def test_bad_toml_names_file_and_line(toml):
    path = toml("[loop]\nsteps == 3\n")
    assert message(path).startswith(f"{path} is not valid TOML: ")
    assert "line 2" in message(path)


def test_toml_round_trip(tmp_path):
    overrides = [
        'prompts.system="say \\"hi\\"\\n\\tplease \\\\ \\u007f é 😀"',
        'rollout.stop=["\\n\\n", "[x]"]',
        'ledger.sinks=["jsonl"]',
        "learner.lr=1e-7",
        "run.overwrite=true",
    ]
    config = load_config(None, overrides)
    write_whole(tmp_path / "config.toml", to_toml(config))
    assert load_config(tmp_path / "config.toml") == config
    assert "lr = 1e-07" in to_toml(config)


def test_changed_settings_are_overrides_that_give_them_back():
    config = load_config(None, ['rollout.stop=["a"]', "learner.lr=0.5", "model.path=x y"])
    assert changed(config) == ['model.path="x y"', 'rollout.stop=["a"]', "learner.lr=0.5"]
    assert load_config(None, changed(config)) == config


def test_explain():
    by_key = {setting.key: setting for setting in explain(None)}
    assert by_key["learner.lr"] == ("learner.lr", "a number at least 0", "1e-06", "learning rate")
    assert {setting.key for setting in explain("ledger")} == {"ledger.samples_every", "ledger.sinks"}
    assert [setting.key for setting in explain("loop.steps")] == ["loop.steps"]
    with pytest.raises(ConfigError, match="did you mean learner"):
        explain("lerner")


# ---- numbers that are not finite

FLOATS = [key for key, field in SETTINGS.items() if field.annotation is float]


@pytest.mark.parametrize("value", ["inf", "-inf", "nan"])
@pytest.mark.parametrize("key", FLOATS)
def test_a_number_that_is_not_finite_is_refused(key: str, value: str):
    if (key, value) == ("loop.target_reward", "inf"):  # which is never reached
        assert load_config(None, [f"{key}={value}"]).loop.target_reward == float("inf")
    else:
        text = message(None, f"{key}={value}")
        assert text.startswith(f"{key}: expected a finite number")
        assert text.endswith(f"got {value} (command line)")


# ---- paths


@pytest.mark.parametrize("key", ["run.dir", "model.path", "model.tokenizer", "prompts.source", "prompts.eval_source"])
def test_a_tilde_is_the_home_directory(key: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", "/home/of/ada")
    section, name = key.split(".")
    words = [f"{key}=~/x", "warmstart.steps=1"]
    assert getattr(getattr(load_config(None, words), section), name) == "/home/of/ada/x"


def test_rooted_paths_are_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("model", "words", "demo"):
        (tmp_path / name).mkdir()
    for name in ("train.jsonl", "eval.jsonl", "scores.py", "json.py"):
        (tmp_path / name).touch()
    words = ["model.path=model", "model.tokenizer=./words", "prompts.source=train.jsonl"]
    words += ["prompts.eval_source=~/eval.jsonl", "run.dir=runs/1", "reward.function=scores:score"]
    words += ["prompts.select=scores:next"]
    words += ['buffer.filters=["~/f.py:keep", "d/f.py:keep", "json:keep", "a.b:keep", "scores:keep"]']
    config = rooted(load_config(None, words))
    assert (config.model.path, config.model.tokenizer) == (f"{tmp_path}/model", f"{tmp_path}/words")
    assert config.prompts.source == f"{tmp_path}/train.jsonl"
    assert config.prompts.eval_source == f"{tmp_path}/eval.jsonl"
    assert config.prompts.select == f"{tmp_path}/scores.py:next"
    assert config.run.dir == f"{tmp_path}/runs/1"
    assert config.reward.function == f"{tmp_path}/scores.py:score"
    files = [f"{tmp_path}/{name}" for name in ("f.py:keep", "d/f.py:keep")]
    # of the standard library, which is found first; and of a package
    assert config.buffer.filters == (*files, "json:keep", "a.b:keep", f"{tmp_path}/scores.py:keep")
    assert rooted(config) == config


@pytest.mark.parametrize(
    "agent", ["python a.py --judge http://localhost:8000/v1", "node bin/agent.js --mode=a:b", "./run.sh a:b", "remote"]
)
def test_a_command_is_not_rooted(agent: str):
    config = load_config(None, [f"episode.agent={agent}"])
    assert rooted(config).episode.agent == agent


@pytest.mark.parametrize("pattern", [r"</think>\s*Answer: (\d+)", r"(\d+)", "a" * 300 + ":b", r"(?:x/y)+"])
def test_a_regular_expression_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, toml, pattern: str):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "regex.py").touch()
    path = toml(f"[reward]\nfunction = 'regex:{pattern}'\n")
    assert rooted(load_config(path)).reward.function == f"regex:{pattern}"


@pytest.mark.parametrize("word", ["buffer.first=1", "buffer.first=8", "buffer.first=2 episode.agent=remote"])
def test_the_first_answers_are_some_and_not_all_of_a_group(word: str):
    assert "0 (wait for all), or at least 2 and less than rollout.samples = 8" in message(None, *word.split())


def test_what_is_no_path_is_not_rooted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for name in ("demo", "exact"):
        (tmp_path / name).mkdir()
    assert rooted(Config()) == Config()
    words = ["model.path=owner/name", "prompts.source=/no/such.jsonl", "reward.function=exact"]
    assert rooted(load_config(None, words)) == load_config(None, words)


def test_a_recipe_has_its_own_files_even_where_others_have_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "arithmetic.py").write_text("")
    monkeypatch.chdir(tmp_path)
    config = load_config(DEMO)
    assert config.prompts.source == f"{DEMO.parent}/arithmetic.py:tasks"
    assert config.reward.function == f"{DEMO.parent}/arithmetic.py:score"


def test_every_unknown_setting_of_a_file_is_told_at_once(toml):
    text = message(toml("[learner]\nbeta1 = 0.8\n[prompts]\nshuffle = false\n[publish]\nbucket_mb = 32\n"))
    for key in ("learner.beta1", "prompts.shuffle", "publish.bucket_mb"):
        assert f"unknown setting {key}" in text


def test_an_older_runs_setting_that_is_gone_matters_only_if_it_says_something(toml):
    assert load_config(toml('[reward]\npattern = ""\nretries = 3\n')).reward.retries == 3
    assert "unknown setting reward.pattern" in message(toml('[reward]\npattern = "[0-9]+"\n'))


def test_files_are_searched_beside_the_settings(toml):
    filters = 'filters = ["losses.py:keep", "elsewhere:keep"]'
    path = toml(f'[learner]\nloss = "losses.py:topr"\nkl_coef = 1\nteacher = "big.gguf"\n[buffer]\n{filters}\n')
    for name in ("losses.py", "big.gguf"):
        (path.parent / name).touch()
    assert load_config(path).buffer.filters == (f"{path.parent / 'losses.py'}:keep", "elsewhere:keep")
    learner = load_config(path).learner
    assert learner.loss == f"{path.parent / 'losses.py'}:topr"
    assert learner.teacher == str(path.parent / "big.gguf")
