"""`headrace runs` and `headrace show`, as a user types them."""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from doubles import tiny_model
from hand_made import group, group_of, trajectory
from test_cli import headrace, problem
from tiny_runs import Workshop, select
from tokenizers import Tokenizer, decoders, models

from headrace import api
from headrace.ledger.database import claimed
from headrace.ledger.files import save_settings
from headrace.ledger.ledger import Ledger
from headrace.ledger.recovery import Recovery
from headrace.runs.facts import RunState, read_run, read_runs
from headrace.runs.show import DROP_WORDS, TokenTexts, TrajectoryDetails, newest_ids, token_texts
from headrace.types import Attempt, DropReason, Span


class Clumsy(api.Watcher):
    """Ends a run with an error after its second step."""

    def row(self, row: object) -> None:
        if row.step == 2:  # type: ignore[attr-defined]
            raise OSError("stumbled")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, one that was resumed, and one that stopped, from the oldest to the newest."""
    workshop = Workshop(tmp_path_factory.mktemp("runs"))
    settings = ("loop.steps=4", "recovery.every_steps=1")
    api.train(workshop.config("finished", *settings, "loop.max_lag=1"))
    with pytest.raises(OSError, match="stumbled"):
        api.train(workshop.config("resumed", *settings), Clumsy())
    shutil.copytree(workshop.directory / "resumed", workshop.directory / "stopped")
    api.resume(workshop.directory / "resumed")
    for age_s, name in enumerate(("stopped", "resumed", "finished")):
        for file in (workshop.directory / name).iterdir():
            os.utime(file, (1e9 - age_s, 1e9 - age_s))
    return workshop.directory


def lines_of(text: str, word: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if word in line.split()]


def one_id(run: Path, where: str) -> str:
    return str(select(run, f"SELECT id FROM trajectories WHERE {where} ORDER BY id")[0][0])


def test_runs_are_listed_newest_first_with_how_they_stand(runs: Path):
    shown = headrace("runs", runs).output
    names = [line.split()[0] for line in shown.splitlines()[1:4]]
    assert names == ["stopped", "resumed", "finished"]
    assert lines_of(shown, "2/4")[0][1] == "stopped"
    restarts = {facts.path.name: facts.num_restarts for facts in read_runs(runs)}
    assert restarts == {"stopped": 0, "resumed": 1, "finished": 0}
    trained = select(runs / "finished", "SELECT tokens FROM accounts WHERE name = 'trained'")[0][0]
    finished = lines_of(shown, "4/4")[-1]
    assert finished[:2] == ["finished", "finished"]
    assert f"{trained:,}" in finished


@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_stopped_run_says_how_it_is_resumed_in_one_piece(runs: Path, width: int):
    for words in (("runs", runs), ("show", runs / "stopped")):
        assert f"  headrace resume {runs / 'stopped'}\n" in headrace(*words, width=width).output


def test_a_run_that_a_process_holds_is_running(runs: Path):
    with claimed(runs / "stopped"):
        assert read_run(runs / "stopped").state is RunState.RUNNING
        assert "headrace resume" not in headrace("runs", runs).output
    assert read_run(runs / "stopped").state is RunState.STOPPED


def test_looking_leaves_no_lock_behind(runs: Path, tmp_path: Path):
    shutil.copytree(runs / "stopped", tmp_path / "run")
    (tmp_path / "run" / "lock").unlink()
    assert read_run(tmp_path / "run").state is RunState.STOPPED
    assert not (tmp_path / "run" / "lock").exists()


def test_a_run_without_a_ledger_yet_is_listed(runs: Path, tmp_path: Path):
    with claimed(tmp_path):
        save_settings(api.files.run_config(runs / "finished"), tmp_path)
        assert read_run(tmp_path).state is RunState.RUNNING
        assert headrace("show", tmp_path).exit_code == 0
    assert read_run(tmp_path).can_be_resumed, "it starts afresh"


def test_a_run_without_checkpoints_is_not_said_to_be_resumable(runs: Path, tmp_path: Path):
    shutil.copytree(runs / "stopped", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    shown = headrace("runs", tmp_path).output
    assert "cannot be resumed: no checkpoint is left" in shown
    assert "headrace resume" not in shown


def test_a_damaged_run_does_not_hide_the_others(runs: Path, tmp_path: Path):
    shutil.copytree(runs / "finished", tmp_path / "sound")
    shutil.copytree(runs / "finished", tmp_path / "damaged")
    (tmp_path / "damaged" / "ledger.sqlite").write_bytes(b"not a database" * 100)
    shown = headrace("runs", tmp_path).output
    assert lines_of(shown, "damaged")[0][1] == "unreadable"
    assert "ledger.sqlite is damaged" in " ".join(shown.split())
    assert lines_of(shown, "sound")[0][1] == "finished"
    assert "is damaged" in problem(headrace("show", tmp_path / "damaged"))


def test_a_directory_without_runs_gets_a_message(tmp_path: Path):
    assert "there is no run in" in problem(headrace("runs", tmp_path))
    assert "there is no directory" in problem(headrace("runs", tmp_path / "nowhere"))
    assert "holds no run" in problem(headrace("show", tmp_path))


def test_show_has_settings_accounts_restarts_and_rows(runs: Path):
    shown = headrace("show", runs / "resumed").output
    assert "recovery.every_steps=1" in shown
    assert "checkpoints  of step 4, step 3" in shown
    assert re.search(r"prompts +\d+ solved, \d+ learning, \d+ unsolved, \d+ not yet seen", shown)
    with Ledger.open(runs / "resumed") as ledger:
        (restart,), books, rows = ledger.restarts(), ledger.totals(), ledger.rows()
    assert f"step {restart.checkpoint}" in shown
    for reason, amount in books.dropped.items():
        (line,) = lines_of(shown.partition("samples  ")[0], reason)
        mean = f"{amount.tokens / amount.trajectories:.1f}"
        assert [f"{amount.tokens:,}", f"{amount.trajectories:,}", mean] == [line[2], line[4], line[5]]
    assert all(lines_of(shown, f"{row.reward_mean:.3f}") for row in rows)


def test_a_trained_trajectory_is_shown_token_by_token(runs: Path):
    id = one_id(runs / "finished", "state = 'trained' AND num_tokens > 3")
    found = TrajectoryDetails(runs / "finished", id)
    assert found.whole is not None
    shown = headrace("show", runs / "finished", "--trajectory", id, width=45).output  # one token to a line
    assert f"trained on in step {found.step} with lag {found.lag}" in " ".join(shown.split())
    lines = [line.strip() for line in shown.splitlines()]
    assert lines[lines.index("answer") + 1] == found.whole.text.strip()
    sampled = found.whole.token_ids[found.whole.sampled]
    rows = lines[-len(sampled) :]
    assert [row.split()[-2] for row in rows] == [f"{p:.3f}" for p in found.whole.logprobs[found.whole.sampled]]
    versions = [f"v{span.version}" for span in found.spans for _ in range(span.start, span.end)]
    assert [row.split()[-1] for row in rows] == versions
    assert all(repr(char) in row for char, row in zip(found.whole.text, rows, strict=False))


def test_a_trajectory_that_never_reached_the_buffer_can_be_read(runs: Path):
    id = one_id(runs / "finished", "drop_reason = 'no_signal'")
    shown = " ".join(headrace("show", runs / "finished", "--trajectory", id).output.split())
    assert "dropped as no_signal" in shown
    assert DROP_WORDS[DropReason.NO_SIGNAL] in shown
    found = TrajectoryDetails(runs / "finished", id)
    assert found.whole is not None
    assert f"prompt {found.whole.prompt_id.removeprefix('p')}+" in shown
    assert "answer" in shown


def test_show_has_a_sample_of_what_was_trained_and_of_what_was_dropped(runs: Path):
    run = runs / "finished"
    shown = headrace("show", run).output
    samples = shown.partition("samples  ")[2]
    for account in ("trained", "dropped:no_signal"):
        found = TrajectoryDetails(run, newest_ids(run)[account])
        assert found.whole is not None
        number = int(found.whole.prompt_id.removeprefix("p"))
        assert f"{found.id}: reward {found.whole.reward:.3f}" in samples
        assert f"prompt  {number}+{number % 7}=" in samples
        assert f"expected  {number + number % 7}" in samples


def test_every_reason_for_a_drop_is_explained():
    assert set(DROP_WORDS) == set(DropReason)


def test_an_unknown_trajectory_is_answered_with_similar_ones(runs: Path):
    id = one_id(runs / "finished", "state = 'trained'")
    for wrong in (f"{id}9", id.split(":")[1], id.replace(":", ";")):
        message = problem(headrace("show", runs / "finished", "--trajectory", wrong))
        assert f"there is no trajectory {wrong}" in message
        assert id in message
        assert message.count("/") <= 5 + str(runs / "finished").count("/") + 1, "five ids and the one asked for"


def test_without_a_tokenizer_the_ids_are_shown(runs: Path, tmp_path: Path):
    shutil.copytree(runs / "finished", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "model")
    config = api.files.run_config(runs / "finished")
    save_settings(config.but(model={"path": str(tmp_path / "gone")}), tmp_path / "run")
    id = one_id(tmp_path / "run", "state = 'trained'")
    shown = headrace("show", tmp_path / "run", "--trajectory", id).output
    assert "the run's tokenizer cannot be read" in shown
    found = TrajectoryDetails(tmp_path / "run", id)
    assert found.whole is not None
    assert all(lines_of(shown, str(token_id)) for token_id in found.whole.token_ids[found.whole.sampled])


def test_a_trajectory_of_two_versions_an_attempt_that_was_lost_and_one_under_way(runs: Path, tmp_path: Path):
    run = tmp_path / "run"
    two = trajectory(serial=1, spans=(Span(version=3, start=2, end=3), Span(version=4, start=3, end=5)))
    lost = Attempt(serial=0, number=1, prompt_id="p0", wave=0, version=0)
    with Ledger.create(run) as ledger:
        ledger.started(2, lost)
        Recovery(ledger).lose([], DropReason.REDONE)
        ledger.started(2, Attempt(serial=0, number=2, prompt_id="p0", wave=0, version=0))
        ledger.started(1)
        ledger.sampled(3)
        ledger.dropped(group_of(two, serial=1), [(two, "filter:mine")], was_buffered=False, version=5)
    save_settings(api.files.run_config(runs / "finished"), run)
    shown = " ".join(headrace("show", run, "--trajectory", two.id).output.split())
    assert "version 3 sampled 1 token, then version 4 sampled 2 tokens" in shown
    assert "your filter mine said no" in shown
    message = problem(headrace("show", run, "--trajectory", "0:p0/1"))
    assert "nothing of it is kept; another attempt took its place" in message
    assert "0.2:p0/1 is under way" in problem(headrace("show", run, "--trajectory", "0.2:p0/1"))


def test_control_characters_of_an_answer_do_not_reach_the_terminal(runs: Path, tmp_path: Path):
    nasty = group(0).trajectories[0]
    object.__setattr__(nasty, "text", "red \x1b[31m [bold]")
    whole = group(0)
    object.__setattr__(whole, "trajectories", (nasty,))
    with Ledger.create(tmp_path) as ledger:
        ledger.started(1)
        ledger.sampled(3)
        ledger.buffered(whole)
    save_settings(api.files.run_config(runs / "finished"), tmp_path)
    shown = headrace("show", tmp_path, "--trajectory", nasty.id).output
    assert r"red \x1b[31m [bold]" in shown
    assert "\x1b" not in shown


def test_damaged_tokens_are_named(runs: Path, tmp_path: Path):
    shutil.copytree(runs / "finished", tmp_path / "run")
    id = one_id(tmp_path / "run", "state = 'trained'")
    with closing(sqlite3.connect(tmp_path / "run" / "ledger.sqlite")) as connection, connection:
        connection.execute("UPDATE journal SET data = x'00ff' WHERE trajectory_id = ?", (id,))
    message = problem(headrace("show", tmp_path / "run", "--trajectory", id))
    assert f"the tokens of trajectory {id} are damaged" in message


def words(decoder: decoders.Decoder, *vocabulary: str) -> TokenTexts:
    """A tokenizer of these words, in the order of their ids."""
    tokenizer = Tokenizer(models.WordLevel({word: id for id, word in enumerate(vocabulary)}, unk_token=vocabulary[0]))
    tokenizer.decoder = decoder
    return TokenTexts(tokenizer)


def test_pieces_keep_their_spaces():
    for space, decoder in (("Ġ", decoders.ByteLevel()), ("▁", decoders.Metaspace())):
        texts = words(decoder, "?", f"{space}the", f"{space}cat", "s", "<eos>")
        assert texts.pieces([3, 1, 2, 3, 2, 4]) == ["s", " the", " cat", "s", " cat", "<eos>"]


def test_a_token_that_is_part_of_a_character_is_named():
    texts = words(decoders.ByteLevel(), "?", "a", "Ã", "©")  # the two bytes of é
    assert texts.pieces([1, 2, 3, 1]) == ["a", "Ã", "©", "a"]


def test_a_tokenizer_that_cannot_be_read_is_passed_over(tmp_path: Path):
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "tokenizer.json").write_text("{")
    settings = [f"model.path={tmp_path / 'good'}", f"model.tokenizer={tmp_path / 'bad'}"]
    save_settings(api.load_config(None, settings), tmp_path)  # there is no tokenizer in WEIGHTS, either
    assert token_texts(tmp_path) is None
    tiny_model(tmp_path / "good")
    texts = token_texts(tmp_path)
    assert texts is not None
    assert texts.pieces([20, 3, 3, 1]) == ["1", " ", " ", "<eos>"]


def test_reading_needs_no_torch(runs: Path):
    id = one_id(runs / "finished", "state = 'trained'")
    without = "import sys; sys.modules |= {'torch': None, 'transformers': None}; from headrace.cli import app; app()"
    run = str(runs / "finished")
    for words in (["runs", str(runs)], ["show", run], ["show", run, "--trajectory", id]):
        done = subprocess.run([sys.executable, "-c", without, *words], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
