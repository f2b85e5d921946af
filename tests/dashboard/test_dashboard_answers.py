"""Answers on the page: the list and its filters, one answer and its neighbours, all answers to one prompt."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_runs import select

from headrace.dashboard import books as module
from headrace.dashboard.books import Answer, GroupAnswers, Page, Wanted
from headrace.runs.facts import UnknownNameError
from headrace.runs.show import TokenTexts, TrajectoryDetails, prompt_ids, tokens, trajectory_facts
from headrace.types import Trajectory


def test_pages_hold_every_trajectory_once_in_both_directions(real_run: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "PAGE_SIZE", 7)
    places = [place for (place,) in select(real_run, "SELECT rowid FROM trajectories ORDER BY rowid DESC")]
    page, seen = Page(real_run, Wanted()), []
    assert not page.has_newer
    while True:
        seen += page.places
        if not page.has_older:
            break
        page = Page(real_run, Wanted(), older=page.places[-1])
    assert seen == places
    back = list(page.places)
    while page.has_newer:
        page = Page(real_run, Wanted(), newer=page.places[0])
        back = [*page.places, *back]
    assert back == places


def test_pages_are_filtered(real_run: Path):
    def column(title: str, wanted: Wanted) -> set[str]:
        return {row[module.PAGE_COLUMNS.index(title)] for row in Page(real_run, wanted).rows}

    assert column("fate", Wanted(state="trained")) == {"trained"}
    assert column("fate", Wanted(state="dropped", reason="no_signal")) == {"dropped: no_signal"}
    assert column("step", Wanted(step=3)) == {"3"}
    assert column("reward", Wanted(least=0.5)) == {"1"}
    assert column("reward", Wanted(least=0.0, most=0.5)) == {"0"}
    assert column("answer", Wanted(state="'; DROP TABLE rows")) == set()


def longest_answer(run: Path) -> tuple[TrajectoryDetails, TokenTexts, Trajectory]:
    id = select(run, "SELECT id FROM trajectories WHERE state = 'trained' ORDER BY num_tokens DESC")[0][0]
    read = Answer(run, id, Wanted())
    found, texts = read.found, read.texts
    assert texts is not None
    assert found.whole is not None
    return found, texts, found.whole


def test_an_answer_has_its_tokens_with_version_mask_and_log_prob(real_run: Path):
    found, texts, whole = longest_answer(real_run)
    shown, told = list(tokens(whole, texts)), trajectory_facts(found)
    assert [token.id for token in shown] == whole.token_ids.tolist()
    assert [token.logprob is not None for token in shown] == whole.sampled.tolist()
    assert [token.logprob or 0.0 for token in shown] == whole.logprobs.tolist()
    versions = [span.version for span in whole.spans for _ in range(span.end - span.start)]
    assert [token.version for token in shown if token.logprob is not None] == versions
    assert "".join(token.text for token in shown).startswith(texts.text(prompt_ids(whole)) or "-")
    assert "trained on in step" in told["fate"]
    reward = told["reward"].split()[0]
    assert told["reward"] == f"{reward}  (score {reward})"


def test_a_long_answer_is_shown_in_pieces(real_run: Path):
    _, texts, whole = longest_answer(real_run)
    pieces = [list(tokens(whole, texts, start, 4)) for start in range(0, len(whole.token_ids), 4)]
    assert [token for piece in pieces for token in piece] == list(tokens(whole, texts))
    assert {len(piece) for piece in pieces[:-1]} == {4}


def test_an_answer_that_was_dropped_says_why(real_run: Path):
    id = select(real_run, "SELECT id FROM trajectories WHERE drop_reason = 'no_signal'")[0][0]
    found = Answer(real_run, id, Wanted()).found
    assert "all answers of its group got the same reward" in trajectory_facts(found)["fate"]
    assert found.whole is not None


def test_the_list_has_what_each_answer_says(real_run: Path):
    trained = Page(real_run, Wanted(state="trained")).rows
    dropped = Page(real_run, Wanted(state="dropped", reason="no_signal")).rows
    assert trained
    assert dropped
    for id, *_, text in (*trained, *dropped):
        whole = Answer(real_run, id, Wanted()).found.whole
        assert whole is not None
        assert text == " ".join(whole.text.split())


def test_filters_are_read_from_an_address(real_run: Path):
    assert Wanted.of({"state": "dropped", "step": "3", "least": "0.5", "most": "", "other": "x"}) == Wanted(
        state="dropped", step=3, least=0.5
    )
    for wrong in ({"step": "three"}, {"least": "nan"}, {"step": "9" * 30}):
        with pytest.raises(UnknownNameError, match="in the address"):
            Wanted.of(wrong)


def test_neighbours_of_an_answer_are_those_that_the_filter_lets_through(real_run: Path):
    wanted = Wanted(state="trained", least=1.0)
    listed = [row[0] for row in Page(real_run, wanted).rows]
    found = [Answer(real_run, id, wanted) for id in listed[:4]]
    assert [answer.newer for answer in found] == [None, *listed[:3]]
    assert [answer.older for answer in found] == listed[1:5]


@pytest.mark.parametrize("state", ["trained", "dropped"])
def test_a_group_shows_all_answers_to_one_prompt(real_run: Path, state: str):
    (serial, prompt_id) = select(
        real_run, f"SELECT serial, prompt_id FROM trajectories WHERE state = '{state}' AND reward IS NOT NULL"
    )[0]
    stored = select(
        real_run, f"SELECT id, reward, num_tokens FROM trajectories WHERE serial = {serial} ORDER BY attempt, idx"
    )
    group = GroupAnswers(real_run, serial)
    assert group.prompt_id == prompt_id
    assert [id for id, _, _ in group.answers] == [id for id, _, _ in stored]
    assert [facts["reward"] for _, facts, _ in group.answers] == [f"{reward:g}" for _, reward, _ in stored]
    assert all("part score" in facts for _, facts, _ in group.answers)
    assert [facts["length"].split()[0] for _, facts, _ in group.answers] == [str(num) for *_, num in stored]
    assert (group.prompt or "").endswith("=")
    assert all(text is not None for *_, text in group.answers)
    if state == "dropped":
        assert "all answers of its group got the same reward" in group.answers[0][1]["fate"]
    neighbour = GroupAnswers(real_run, group.older if group.older is not None else group.newer)
    assert serial in (neighbour.newer, neighbour.older)
    asked = (group.prompt or "").removesuffix("=").split("+")
    assert group.fields["answer"] == str(sum(map(int, asked)))


def test_a_group_that_is_not_there_is_said_to_be_missing(real_run: Path):
    with pytest.raises(UnknownNameError, match="There is no group 99999 in real: they go from 0 to"):
        GroupAnswers(real_run, 99_999)
