"""Rewards for the steps of an answer (process rewards): its tokens are credited with what came after them."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from hand_made import trajectory
from kills import killed_runs
from tiny_runs import Workshop, same_bits, weights
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from headrace import api
from headrace.ledger.database import open_database
from headrace.ledger.journal import read_trajectories
from headrace.loop.groups import Groups
from headrace.runs.audit import audit
from headrace.types import Sampling

REWARD = """
def score(completion):
    n = len(completion.text)
    last = len(set(completion.text)) / 16
    return {"steps": [[n // 2, 0.25 * (n % 3)], [n, last]] if n > 1 else [[0, 0.0], [1, last]]}
"""


def test_each_half_of_an_answer_has_a_reward_of_its_own(workshop: Workshop):
    rewards = workshop.directory / "halves.py"
    rewards.write_text(REWARD)
    settings = (f"reward.function={rewards}:score", "learner.credit=turn", "loop.steps=3", "recovery.every_steps=2")
    for run, unbroken in killed_runs(workshop, "halves", settings):
        assert audit(run) == []
        assert same_bits(weights(run), weights(unbroken))
        with closing(open_database(run)) as connection:
            found = read_trajectories(connection, "t.state = 'trained'", ())
        halved = [t for t in found if len(t.text) > 1]
        assert halved
        for t in found:
            sampled = np.flatnonzero(t.sampled)
            assert [t.turns[0].start, t.turns[-1].end] == [sampled[0], sampled[-1] + 1]
            assert sum(turn.reward or 0.0 for turn in t.turns) == pytest.approx(t.reward)
        for t in halved:
            first, second = t.turns
            assert (first.end, first.end - first.start) == (second.start, len(t.text) // 2)
            assert (first.text, second.text) == (t.text[: len(first.text)], t.text[len(first.text) :])
            assert first.reward == 0.25 * (len(t.text) % 3)


def test_without_credit_for_turns_the_sum_counts(workshop: Workshop):
    rewards = workshop.directory / "halves.py"
    rewards.write_text(REWARD)
    api.train(workshop.config("sums", f"reward.function={rewards}:score", "loop.steps=2"))
    run = workshop.directory / "sums"
    assert audit(run) == []
    with closing(open_database(run)) as connection:
        found = read_trajectories(connection, "t.state = 'trained'", ())
    assert {t.reward for t in found} == {sum(turn.reward or 0.0 for turn in t.turns) for t in found} != {0.0}


def turns_of(pieces: list[str], answer: list[int], *steps: tuple[int, float]) -> list[tuple[int, int, str]]:
    """Start, end and text of the steps of an answer in a vocabulary with bytes; its prompt has two tokens."""
    backend = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token=pieces[0]))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", clean_up_tokenization_spaces=False)
    stages, sampling = SimpleNamespace(tokenizer=tokenizer), Sampling(max_new_tokens=9, temperature=0.7)
    groups = SimpleNamespace(_stages=stages, _samplings=[sampling])
    text = str(tokenizer.decode(answer, skip_special_tokens=True))
    t = replace(trajectory(prompt=[0, 0], answer=answer), index=0, text=text)
    found = Groups._split(groups, t, steps).turns  # type: ignore[arg-type]
    assert {turn.temperature for turn in found} == {0.7}
    assert [turn.reward for turn in found] == [reward for _, reward in steps]
    assert "".join(turn.text for turn in found) == text
    return [(turn.start, turn.end, turn.text) for turn in found]


def test_a_character_of_several_tokens_belongs_to_one_step():
    turns = partial(turns_of, ["a", "b", "<0xC3>", "<0xA9>", "<eos>"], [0, 2, 3, 1, 1, 4])  # aébb
    assert turns((1, 1.0), (2, 2.0), (4, 4.0)) == [(2, 3, "a"), (3, 5, "é"), (5, 8, "bb")]
    assert turns((2, 1.0), (3, 2.0)) == [(2, 5, "aé"), (5, 8, "bb")], "the last goes on to the end"
    assert turns((4, 1.0), (99, 2.0)) == [(2, 7, "aébb"), (7, 8, "")], "what begins beyond the text has its end"
    assert turns((0, 1.0), (1, 2.0), (1, 3.0), (4, 4.0)) == [(2, 2, ""), (2, 3, "a"), (3, 3, ""), (3, 8, "ébb")]


def test_a_token_of_several_steps_belongs_to_the_first():
    turns = partial(turns_of, ["x", "\n\n", "y", "<eos>"], [0, 1, 2, 3])
    assert turns((2, 1.0), (3, 2.0), (4, 3.0)) == [(2, 4, "x\n"), (4, 4, "\n"), (4, 6, "y")]


def test_bytes_that_are_no_character_are_split_as_well():
    turns = partial(turns_of, ["a", "<0x0A>", "<0xF0>", "<eos>"], [1, 2, 0, 3])
    assert turns((1, 1.0), (3, 2.0))[-1][1] == 6
    assert turns((1, 1.0))[0][:2] == (2, 6)
