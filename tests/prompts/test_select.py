"""Prompts that are drawn by what is known of them."""

import json
import random
from collections import Counter

import numpy as np
import pytest

from headrace.config import PromptsSection
from headrace.errors import DataError
from headrace.prompts.select import EXPLORE, HALF_LIFE, REST, Selection, chance_of
from headrace.prompts.stream import PromptStream
from headrace.types import Known


def known_of(num):
    return lambda: [Known(id=f"p{i}", fields={"prompt": f"{i}=", "level": i % 3}) for i in range(num)]


def order(num):
    return lambda epoch: np.random.default_rng([7, epoch]).permutation(num)


def signal(kinds):
    return Selection("signal", kinds, known_of(len(kinds)), order(len(kinds)))


def function(tmp_path, body, kinds=(0, 0, 0, 0)):
    path = tmp_path / "mine.py"
    path.write_text(body)
    return Selection(f"{path}:choose", list(kinds), known_of(len(kinds)), order(len(kinds)))


def test_what_one_group_says():
    assert chance_of((1.0, 1.0, 0.0, 0.0)) == 1 - 0.5**4
    assert chance_of((1.0, 1.0, 1.0, 0.0)) == 1 - 0.75**4
    assert chance_of((0.3, 0.3)) == 0
    assert chance_of((0.1, 0.2, 0.3, 0.4)) == 1 - 0.25**4, "rewards need not be right or wrong"


def test_the_estimate_worked_by_hand():
    """Prompts 0 and 1 are alike. 0 gives half and half at version 0, and 2 the same reward HALF_LIFE versions on."""
    known = signal([0, 0, 1])
    assert known._scores.tolist() == [0.5, 0.5, 0.5]
    known.restore([0])
    known.heed({0: (0, (1, 1, 0, 0))})
    run = (0.9375 + 0.5) / 2
    alike = (0.9375 + run) / 2
    assert known._scores.tolist() == [(0.9375 + alike) / 2, alike, run]
    known.drawn.append(2)
    known.awaited.add(1)
    known.heed({1: (int(HALF_LIFE), (0, 0, 0, 0))})
    run = (0.9375 / 2 + 0.5) / 2.5
    alike, other = (0.9375 / 2 + run) / 1.5, run / 2
    assert known._scores == pytest.approx([(0.9375 / 2 + alike) / 1.5, alike, other / 2])
    assert known.awaited == set()


def test_outcomes_that_say_nothing_change_no_estimate():
    known = signal([0, 0])
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
    known = signal([0] * 400)
    draws(known, EXPLORE * 400, rates, random.Random(0))
    times = Counter(known.drawn)
    assert set(times) == set(range(400)), "one epoch of the uniform order has gone by"
    late = known.drawn[-400:]
    assert sum(rates[i] == 0.5 for i in late) > 0.6 * len(late), "a uniform draw has a quarter of them"
    explored = known.drawn[::EXPLORE]
    assert explored == order(400)(0).tolist(), "the known share follows the uniform order"
    by_score = [i for serial, i in enumerate(known.drawn) if serial % EXPLORE]
    assert all(len(set(by_score[at : at + 90])) == 90 for at in range(0, len(by_score) - 90)), f"none within {REST}"


def test_prompts_alike_are_judged_by_each_other():
    """Unseen prompts of the kind that differs come before unseen ones of the kind that does not."""
    rates, kinds = [0.5] * 300 + [1.0] * 300, [0] * 300 + [1] * 300
    known = signal(kinds)
    draws(known, 160, rates, random.Random(0))
    late = [i for serial, i in enumerate(known.drawn) if serial % EXPLORE and serial >= 80]
    assert sum(i < 300 for i in late) > 0.9 * len(late)


def test_a_restart_draws_what_the_dead_process_would_have_drawn():
    rates = np.random.default_rng(0).random(60).tolist()
    unbroken = signal([i % 3 for i in range(60)])
    draws(unbroken, 240, rates, random.Random(0))
    outcomes = {}
    first = signal([i % 3 for i in range(60)])
    told, first.heed = first.heed, lambda found: (outcomes.update(found), told(found))
    rng = random.Random(0)
    draws(first, 120, rates, rng)
    second = signal([i % 3 for i in range(60)])
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
    known = signal([0] * num)
    assert {known.draw() for _ in range(20)} == set(range(num))


def test_a_function_of_the_users(tmp_path):
    known = function(tmp_path, "def choose(known):\n    return [-k.fields['level'] - 10 * k.seen for k in known]\n")
    assert {known.draw(), known.draw()} == {0, 3}, "both of level 0, before those of 1 and 2"
    known.heed({0: (3, [1.0, 0.0])})
    seen = known._known[known.drawn[0]]
    assert (seen.seen, seen.rewards, seen.version) == (1, (1.0, 0.0), 3)
    assert [known.draw(), known.draw()] == [1, 2], "those drawn before rest, as half of all prompts do"


def test_equal_scores_go_through_all_prompts(tmp_path):
    known = function(tmp_path, "def choose(known):\n    return [0 for _ in known]\n", kinds=[0] * 9)
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
