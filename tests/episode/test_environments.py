"""Episodes with environments: sampled, replied to, rewarded, trained on and booked, with the real engine."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from chat_runs import ChatWorkshop
from doubles import tiny_model
from tiny_runs import play, rank_of, rows_of, same_bits, select, weights

from headrace import api
from headrace.config import Config, EpisodeSection
from headrace.episode.environment import Environments
from headrace.episode.session import EpisodeFailedError
from headrace.errors import ConfigError, DataError, StalledError
from headrace.insight.scenario import calibrate
from headrace.insight.triage import Bottleneck, Triage
from headrace.ledger.journal import read_trajectories
from headrace.ledger.ledger import Ledger
from headrace.loop.loop import Loop
from headrace.place.place import Place
from headrace.policy.demo import chat_tokenizer
from headrace.reward.pool import JudgePool, Setup
from headrace.runs.audit import audit, books
from headrace.types import Item, Prompt, Trajectory


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> ChatWorkshop:
    return ChatWorkshop(tmp_path_factory.mktemp("chats"))


def trained(run: Path) -> list[Trajectory]:
    with Ledger.open(run) as ledger:
        return read_trajectories(ledger.connection, "t.state = 'trained'", ())


async def test_an_episode_is_one_trajectory_of_its_turns(workshop: ChatWorkshop):
    await play(workshop.config("turns"))
    run = workshop.directory / "turns"
    assert audit(run) == []
    assert all(row.mismatch_mean < 1e-4 for row in rows_of(run))
    found = trained(run)
    assert len(found) == 3 * 4 * 4
    for t in found:
        assert len(t.turns) == 3
        assert sum(turn.end - turn.start for turn in t.turns) == t.num_sampled_tokens
        assert all(t.sampled[turn.start : turn.end].all() for turn in t.turns)
        assert [turn.state for turn in t.turns] == ["0", "1", "2"]
        assert t.reward == pytest.approx(sum(turn.reward or 0.0 for turn in t.turns))
        assert t.reward_parts == {"turns": t.reward}
        assert all(turn.replies[0].startswith("I heard") for turn in t.turns[:-1])
        assert t.turns[-1].replies == ("enough",)


async def test_where_the_template_rewrites_history_every_turn_is_a_branch(workshop: ChatWorkshop):
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ 'once: ' if m.role == 'assistant' and not loop.last }}"
        "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tiny_model(workshop.directory / "rewriting", tokenizer=tokenizer)
    config = workshop.config("branches", "model.exact=true", f"model.path={workshop.directory / 'rewriting'}")
    await play(config)
    run = workshop.directory / "branches"
    assert audit(run) == []
    assert [row.mismatch_mean for row in rows_of(run)] == [0.0, 0.0, 0.0]
    found = trained(run)
    assert {(len(t.turns), len(t.segments)) for t in found} == {(3, 2)}
    assert all(t.sampled[turn.start : turn.end].all() for t in found for turn in t.turns)


async def test_in_exact_mode_the_learner_has_the_bits_of_every_turn(workshop: ChatWorkshop):
    policies = []
    await play(
        workshop.config("exact", "model.exact=true", "rollout.temperature=0.7"),
        lambda place, loop: policies.append(rank_of(place).policy),
    )
    assert [row.mismatch_mean for row in rows_of(workshop.directory / "exact")] == [0.0, 0.0, 0.0]
    assert len(policies) == 1


async def test_turns_are_served_from_the_cache_of_earlier_ones(workshop: ChatWorkshop):
    pools = []
    await play(workshop.config("cached", "loop.steps=1"), lambda place, loop: pools.append(place.pool))
    counts = pools[0].counts
    assert counts.cached_tokens > 0.5 * counts.prompt_tokens  # three short turns, whose first has nothing to go on from


@pytest.mark.parametrize("credit", ["turn", "state"])
async def test_turns_can_have_credit_of_their_own(workshop: ChatWorkshop, credit: str):
    seen: list[Item] = []

    def meddle(place: Place, loop: Loop) -> None:
        rank = rank_of(place)
        accumulate = rank.accumulate
        rank.accumulate = lambda items: (seen.extend(items), accumulate(items))[1]  # type: ignore[method-assign]

    await play(workshop.config(f"credit-{credit}", f"learner.credit={credit}", "loop.steps=1"), meddle)
    assert len(seen) == 16
    for item in seen:
        assert isinstance(item.advantage, np.ndarray)
        assert item.advantage.shape == (item.trajectory.num_sampled_tokens,)
    if credit == "turn":
        sizes = [[turn.end - turn.start for turn in item.trajectory.turns] for item in seen]
        parts = [np.split(item.advantage, np.cumsum(n)[:-1]) for item, n in zip(seen, sizes, strict=True)]
        assert all(len(set(part.tolist())) == 1 for turns in parts for part in turns)
        assert any(len({turn[0] for turn in turns}) == 3 for turns in parts)


def test_what_an_environment_does_wrong_is_a_drop_with_its_reason(workshop: ChatWorkshop):
    config = workshop.config(
        "moody", "loop.steps=2", "loop.max_lag=1", "episode.timeout_s=1.5", "episode.workers=2", reward="Moody"
    )
    summary = api.train(config)
    run = workshop.directory / "moody"
    assert summary["finished"]
    assert audit(run) == []
    assert books(run).dropped["env_error"].tokens > 0
    found = select(run, "SELECT drop_reason FROM trajectories WHERE state = 'dropped'")
    assert Counter(reason for (reason,) in found)["env_error"] >= 2
    # an episode whose neighbour ended their common process goes on in another one
    assert all(len(t.turns) == 3 for t in trained(run))


SHARED = """
import os

class Shared:
    def start(self, prompt):
        self.ends, self.count = prompt.text == "ends its process", 0

    def reply(self, text):
        self.count += 1
        if self.ends and self.count == 2:
            os._exit(3)
        return f"{self.count}"
"""


async def test_who_ends_a_process_is_dropped_and_its_neighbours_go_on(tmp_path: Path):
    """Those are made again as often as it takes: also if another one ends the process while they are."""
    (tmp_path / "shared.py").write_text(SHARED)
    name = f"{tmp_path / 'shared.py'}:Shared"
    setup = Setup(function=name, timeout_s=30.0, setting="episode.environment")
    environments = Environments([JudgePool(setup, num_workers=1, retries=0)], EpisodeSection(environment=name))
    await environments.start()

    async def play(text: str, i: int) -> list[str]:
        environment = environments.open(f"{text} {i}", Prompt(id="", text=text, token_ids=np.empty(0, np.int32)))
        await environment.start()
        return ["".join((await environment.turn({"text": "on"})).replies) for _ in range(4)]

    names = ["ends its process", "goes on"] * 6
    found = await asyncio.gather(*(play(text, i) for i, text in enumerate(names)), return_exceptions=True)
    await environments.close()
    assert found[1::2] == [["1", "2", "3", "4"]] * 6
    assert all(isinstance(error, EpisodeFailedError) and "exit code 3" in str(error) for error in found[::2])


@pytest.mark.slow
def test_a_slow_environment_is_the_bottleneck(workshop: ChatWorkshop):
    """Its seconds are no row's: what was simulated is as long as what was measured, and without it most of it goes."""
    summary = api.train(workshop.config("sleepy", "loop.steps=4", reward="Sleepy"))
    run = workshop.directory / "sleepy"
    assert summary["wall"] == "environment"
    assert sum(summary["stage_s"].values()) <= summary["loop_s"] + 1e-6
    found = Triage(run)
    assert found.bottleneck is Bottleneck.ENVIRONMENT
    measured_s = np.median([row.wall_s for row in rows_of(run)])
    assert found.simulated_s == pytest.approx(measured_s, rel=0.4)
    assert found.without[Bottleneck.ENVIRONMENT] < 0.6 * found.simulated_s
    assert 1.2 <= calibrate(run).workload.environment_s < 2.4


def test_ten_turns_are_served_from_the_cache(workshop: ChatWorkshop):
    tiny_model(workshop.directory / "wide", tokenizer=chat_tokenizer(), max_position_embeddings=1024)
    api.train(workshop.config("long", "loop.steps=2", f"model.path={workshop.directory / 'wide'}", reward="Long"))
    run = workshop.directory / "long"
    assert {len(t.turns) for t in trained(run)} == {10}
    for row in rows_of(run):
        assert row.cached_share >= 0.95


def test_a_missing_reward_is_a_drop_and_not_a_zero(workshop: ChatWorkshop):
    config = workshop.config("unpaid", "loop.steps=1", "buffer.patience=1", reward="Unpaid")
    with pytest.raises(Exception, match="nothing to train on") as raised:
        api.train(config)
    assert "env_error" in str(raised.value)
    assert "ended without a reward" in str(raised.value)


def test_a_first_message_that_fills_the_context_is_told(workshop: ChatWorkshop):
    config = workshop.config("full", "loop.steps=1", "buffer.patience=1", "episode.max_tokens=8")
    with pytest.raises(StalledError, match=r"the first message has .* tokens, which leaves no room for a turn"):
        api.train(config)
    assert audit(workshop.directory / "full") == []


def test_a_model_without_a_chat_template_is_refused_by_name(tmp_path: Path, workshop: ChatWorkshop):
    tiny_model(tmp_path / "plain")
    with pytest.raises(ConfigError, match=r"model\.path: .* no chat template.* which environments and agents need"):
        api.train(workshop.config("plain", f"model.path={tmp_path / 'plain'}"))


class Told(api.Watcher):
    """Keeps the first lines of a run."""

    def header(self, config: Config, run_dir: Path, facts: Mapping[str, str]) -> None:
        self.facts = facts


def test_a_turn_limit_is_an_end_with_a_reward(workshop: ChatWorkshop):
    watcher = Told()
    api.train(workshop.config("endless", "loop.steps=1", "buffer.drop=nothing", reward="Endless"), watcher)
    assert watcher.facts["reward"].endswith(":Endless")
    found = trained(workshop.directory / "endless")
    assert {(len(t.turns), t.reward) for t in found} == {(2, 0.0)}


def test_a_reward_function_adds_to_what_the_environment_gives(workshop: ChatWorkshop):
    function = f"reward.function={workshop.directory / 'rewards.py'}:score"
    watcher = Told()
    api.train(workshop.config("both", "loop.steps=1", function), watcher)
    assert re.fullmatch(r"by .+:\w+, and .+:score", watcher.facts["reward"])
    for t in trained(workshop.directory / "both"):
        assert set(t.reward_parts) == {"turns", "score"}
        assert t.reward == pytest.approx(sum(t.reward_parts.values()))


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("class E:\n    def start(self, prompt): ...", "has no tools"),
        ("def E(prompt): ...", "must be a class with a method start"),
        (
            "class E:\n    max_turns = 'x'\n    def start(self, p): ...\n    def reply(self, t): ...",
            "is not a limit",
        ),
        (
            "class E:\n    max_turns = {1}\n    def start(self, p): ...\n    def reply(self, t): ...",
            "JSON has no form for",
        ),
        ("import nothing_like_it", "cannot be imported"),
        ("class E:\n    def start(self, p): ...\n    def add(self, *numbers): ...", "'add'"),
    ],
)
def test_a_class_that_is_no_environment_is_refused_before_the_run(
    workshop: ChatWorkshop, tmp_path: Path, code: str, message: str
):
    (tmp_path / "wrong.py").write_text(code, encoding="utf-8")
    environment = f"episode.environment={tmp_path / 'wrong.py'}:E"
    with pytest.raises(ConfigError, match=message):
        api.train(workshop.config("wrong", environment))
    assert not (workshop.directory / "wrong").exists()


def test_the_same_seed_gives_the_same_weights(workshop: ChatWorkshop):
    for name in ("one", "two"):
        api.train(workshop.config(name, "model.exact=true", "episode.workers=2", reward="Slow"))
    assert same_bits(weights(workshop.directory / "one"), weights(workshop.directory / "two"))


def test_worked_chats_teach_tool_calls(tmp_path: Path):
    """The real thing in small: after a warm start on worked games, the model calls the tool."""
    recipe = Path(__file__).parents[2] / "src" / "headrace" / "recipes" / "guess.toml"
    settings = ["warmstart.steps=25", "warmstart.lr=1e-2", "warmstart.examples=8", "loop.steps=1"]
    settings += ["loop.groups_per_step=2", "prompts.count=60", "prompts.eval_count=4", "model.threads=1"]
    settings += [f"run.dir={tmp_path / 'run'}"]
    api.train(api.load_config(recipe, settings))
    turns = [turn for t in trained(tmp_path / "run") for turn in t.turns]
    called = [turn for turn in turns if "tool_call" in turn.text and turn.replies and " to " in turn.replies[0]]
    assert len(called) > len(turns) / 3
    assert json.loads(called[0].text.split("<tool_call>")[1].split("</tool_call>")[0])["name"] == "guess"


def test_a_worked_chat_without_an_answer_is_told(tmp_path: Path):
    source = tmp_path / "prompts.jsonl"
    source.write_text(
        "".join(
            json.dumps({"id": f"p{i}", "prompt": "x", "n": 3, "worked": [{"role": "user", "content": "Find it."}]})
            + "\n"
            for i in range(9)
        )
    )
    recipe = Path(__file__).parents[2] / "src" / "headrace" / "recipes" / "guess.toml"
    settings = [f"prompts.source={source}", "prompts.eval_count=1", f"run.dir={tmp_path / 'run'}"]
    with pytest.raises(DataError, match=r"prompt 'p\d': its worked chat has no answer"):
        api.train(api.load_config(recipe, settings))
