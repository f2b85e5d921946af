"""Prompts that are drawn by what is known of them."""

import json
import random
from collections import Counter

import numpy as np
import pytest

from headrace.config import PromptsSection
from headrace.errors import DataError
from headrace.prompts.select import EXPLORE, HALF_LIFE, PARTS, PRIOR, REST, SOLVED, UNSOLVED, Selection
from headrace.prompts.stream import PromptStream
from headrace.types import Known


def known_of(num):
    return lambda: [Known(id=f"p{i}", fields={"prompt": f"{i}=", "level": i % 3}) for i in range(num)]


def order(num):
    return lambda epoch: np.random.default_rng([7, epoch]).permutation(num)


def signal(num):
    return Selection("signal", num, known_of(num), order(num))


def function(tmp_path, body, num=4):
    path = tmp_path / "mine.py"
    path.write_text(body)
    return Selection(f"{path}:choose", num, known_of(num), order(num))


def test_the_chances_worked_by_hand():
    """Of four prompts, 0 was right twice of four times, and 1 never; groups have four answers, PRIOR is four groups."""
    assert (PRIOR, PARTS) == (4, 4)
    known = signal(4)
    assert known._scores.tolist() == [0.5] * 4
    known.restore([0, 1, 0, 0])
    known.heed({0: (0, (1, 1, 0, 0)), 1: (0, (0, 0, 0, 0))})
    guess = 1 - 0.625**4 - 0.375**4  # of those right in from two to three of four
    unseen = (1 + 4 * 0.5) / (2 + 4)  # one of the two groups of prompts that were unseen differed
    assert known._scores.tolist() == [guess, 0, unseen, unseen], "no group followed one like theirs so far"
    known.heed({2: (int(HALF_LIFE), (1, 0, 1, 1))})  # half of every count is left
    guess = 1 - 0.875**4 - 0.125**4  # of those right in more than three of four, where 0 is now
    assert known._scores == pytest.approx([guess, 0, (0.5 + 4 * 0.5) / 5, (0.5 + 4 * 0.5) / 5])
    known.heed({3: (int(HALF_LIFE), (1, 1, 1, 1))})
    assert known._scores[0] == 0, "solved, and no solved prompt was drawn again"
    assert known._groups.tolist() == [0, 0, 1, 1, 1, 0, 0]
    assert known._differed.tolist() == [0, 0, 1, 0, 0.5, 0, 0]
    assert known.awaited == set()


@pytest.mark.parametrize(
    ("rewards", "standing"),
    [
        ((0.0, 0.0), UNSOLVED),
        ((1.0, 1.0), SOLVED),
        ((0.0, 0.4, 0.1, 0.2), 0),
        ((0.0, 1.0), 2),
        ((0.9, 0.8, 1.0), PARTS - 1),
        ((0.0, 0.0, 0.0, 0.9), 1),
    ],
)
def test_where_a_prompt_stands_after_a_group(rewards, standing):
    """The rewards of the run are from 0 to 1, and need not be one of these."""
    known = signal(2)
    known.restore([0, 1])
    known.heed({0: (0, (0.0, 1.0)), 1: (0, rewards)})
    assert known._standing[1] == standing


@pytest.mark.parametrize("rewards", [(1e308, -1e308), (1e308,) * 8, (-1e308,) * 8, (5e-324, 0.0)])
def test_rewards_of_any_size(rewards):
    known = signal(1)
    known.restore([0])
    known.heed({0: (0, rewards)})
    assert np.isfinite(known._scores).all()


def test_outcomes_that_say_nothing_change_no_estimate():
    known = signal(2)
    known.restore([0, 1])
    known.heed({0: (0, ()), 1: (0, (1.0,))})
    assert known._scores.tolist() == [0.5, 0.5]
    assert known.awaited == set()


def draws(known, num, rates, rng, per_wave=8):
    """Waves of groups of 8 answers, each right with the rate of its prompt."""
    for version in range(num // per_wave):
        serials = range(len(known.drawn), len(known.drawn) + per_wave)
        for _ in serials:
            known.draw()
        found = [[float(rng.random() < rates[known.drawn[serial]]) for _ in range(8)] for serial in serials]
        known.heed({serial: (version, rewards) for serial, rewards in zip(serials, found, strict=True)})


def test_prompts_that_differ_come_first_and_every_prompt_is_reached():
    """400 prompts, one in four of which can be learned from: the others are half always, half never solved."""
    rates = [(0.0, 0.5, 1.0, 0.0)[i % 4] for i in range(400)]
    known = signal(400)
    draws(known, EXPLORE * 400, rates, random.Random(0))
    times = Counter(known.drawn)
    assert set(times) == set(range(400)), "one epoch of the uniform order has gone by"
    late = known.drawn[-400:]
    assert sum(rates[i] == 0.5 for i in late) > 0.6 * len(late), "a uniform draw has a quarter of them"
    explored = known.drawn[::EXPLORE]
    assert explored == order(400)(0).tolist(), "the known share follows the uniform order"
    by_score = [i for serial, i in enumerate(known.drawn) if serial % EXPLORE]
    width = REST * (EXPLORE - 1) // EXPLORE
    assert all(len(set(by_score[at : at + width])) == width for at in range(len(by_score) - width)), "they rest"


def test_a_restart_draws_what_the_dead_process_would_have_drawn():
    rates = np.random.default_rng(0).random(60).tolist()
    unbroken = signal(60)
    draws(unbroken, 240, rates, random.Random(0))
    outcomes = {}
    first = signal(60)
    told, first.heed = first.heed, lambda found: (outcomes.update(found), told(found))
    rng = random.Random(0)
    draws(first, 120, rates, rng)
    second = signal(60)
    second.restore(first.drawn)
    second.heed(outcomes)
    assert second._scores.tolist() == first._scores.tolist(), "at once or one by one, to the last bit"
    for version in range(15, 30):
        serials = range(len(second.drawn), len(second.drawn) + 8)
        drawn = [second.draw() for _ in serials]
        found = [[float(rng.random() < rates[i]) for _ in range(8)] for i in drawn]
        second.heed({serial: (version, rewards) for serial, rewards in zip(serials, found, strict=True)})
    assert second.drawn == unbroken.drawn


@pytest.mark.parametrize("num", [1, 2, 3])
def test_few_prompts(num):
    known = signal(num)
    assert {known.draw() for _ in range(20)} == set(range(num))


def test_a_function_of_the_users(tmp_path):
    known = function(tmp_path, "def choose(known):\n    return [-k.fields['level'] - 10 * k.seen for k in known]\n")
    assert {known.draw(), known.draw()} == {0, 3}, "both of level 0, before those of 1 and 2"
    known.heed({0: (3, [1.0, 0.0])})
    seen = known._known[known.drawn[0]]
    assert (seen.seen, seen.rewards, seen.version) == (1, (1.0, 0.0), 3)
    assert [known.draw(), known.draw()] == [1, 2], "those drawn before rest, as half of all prompts do"


def test_equal_scores_go_through_all_prompts(tmp_path):
    known = function(tmp_path, "def choose(known):\n    return [0 for _ in known]\n", num=9)
    drawn = [known.draw() for _ in range(27)]
    assert all(sorted(drawn[at : at + 9]) == list(range(9)) for at in (0, 9, 18))


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("def other(known): pass", r"has no function 'choose'"),
        ("def choose(known): return 1 / 0", r"failed:(.|\n)*ZeroDivisionError"),
        ("def choose(known): return None", r"failed:(.|\n)*not iterable"),
        ("def choose(): return []", r"failed:(.|\n)*takes 0 positional arguments"),
        ("def choose(known): return [1, 2]", r"for each of the 4 prompts is needed, and it returned \[1\. 2\.\]"),
        ("def choose(known): return []", r"for each of the 4 prompts is needed, and it returned \[\]"),
        ("def choose(known): return [float('nan')] * 4", r"needed, and it returned \[nan nan nan nan\]"),
        ("def choose(known): return [[1]] * 4", r"for each of the 4 prompts is needed"),
        ("def choose(known): return ['high'] * 4", r"failed:(.|\n)*could not convert"),
        ("import nothing_of_that_name", r"cannot be imported"),
    ],
)
def test_a_function_that_does_not_work_is_told_before_the_run(tmp_path, body, told):
    with pytest.raises(DataError, match=rf"prompts\.select(.|\n)*{told}"):
        function(tmp_path, body)


def test_the_stream_draws_and_restores_by_id(tmp_path, plain):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i}=" * (1 + i % 2), "id": f"n{i}"}) + "\n" for i in range(30)))
    section = PromptsSection(source=str(path), eval_count=3, select="signal")
    whole, first, second = (PromptStream(section, plain, 0) for _ in range(3))

    def go_on(prompts, num):
        drawn = []
        for _ in range(num):
            prompts.heed(lambda serials: {serial: (0, (serial % 2, 1)) for serial in serials})
            drawn.append(prompts.next()[1].id)
        return drawn

    expected = go_on(whole, 40)
    drawn = go_on(first, 20)
    second.restore(json.loads(json.dumps(first.state())), dict(enumerate(drawn)))
    assert [second.at(serial).id for serial in range(20)] == drawn
    assert drawn + go_on(second, 20) == expected
    other = PromptStream(section.model_copy(update={"select": "uniform"}), plain, 0)
    with pytest.raises(DataError, match="select was signal, is uniform"):
        other.restore(first.state(), dict(enumerate(drawn)))
