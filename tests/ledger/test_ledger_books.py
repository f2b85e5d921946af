"""Any legal sequence of events keeps the books balanced; an illegal one is refused and changes nothing."""

from __future__ import annotations

import sqlite3
import tempfile
from pathlib import Path

import pytest
from hand_made import accounts, balances
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.ledger.ledger import Ledger
from headrace.runs.audit import audit

EVENTS = ("start", "sample", "buffer", "train", "drop", "drop_buffered", "train_again", "train_unbuffered", "overdraw")
LENGTHS = st.lists(st.integers(0, 5), min_size=1, max_size=3)


class Model:
    """What the accounts should hold, kept by hand beside the ledger."""

    def __init__(self, ledger, make_group):
        self.ledger, self.make_group = ledger, make_group
        self.waiting, self.in_flight, self.buffered, self.gone = [], [], [], []
        self.num_started = self.num_sampled = self.num_groups = self.num_trained = 0
        self.dropped = {}

    def start(self, data):
        group = self.make_group(self.num_groups, data.draw(LENGTHS))
        self.num_groups += 1
        self.ledger.started(len(group.trajectories))
        self.num_started += len(group.trajectories)
        self.waiting.append(group)

    def sample(self, _):
        if self.waiting:
            group = self.waiting.pop(0)
            self.ledger.sampled(group.num_sampled_tokens)
            self.num_sampled += group.num_sampled_tokens
            self.in_flight.append(group)

    def buffer(self, _):
        if self.in_flight:
            self.ledger.buffered(self.in_flight[0])
            self.buffered.append(self.in_flight.pop(0))

    def train(self, _):
        if self.buffered:
            self.ledger.trained(self.buffered[0], version=0)
            self.num_trained += self.buffered[0].num_sampled_tokens
            self.gone.append(self.buffered.pop(0))

    def _drop(self, was_buffered, groups, data):
        if groups:
            group, reason = groups.pop(0), data.draw(st.sampled_from(["stale", "filter:mine"]))
            self.ledger.dropped(group, [(t, reason) for t in group.trajectories], was_buffered=was_buffered)
            self.dropped[reason] = self.dropped.get(reason, 0) + group.num_sampled_tokens
            self.gone.append(group)

    def drop(self, data):
        self._drop(False, self.in_flight, data)

    def drop_buffered(self, data):
        self._drop(True, self.buffered, data)

    def _refused(self, call):
        before = accounts(self.ledger)
        with pytest.raises(sqlite3.IntegrityError):
            call()
        assert accounts(self.ledger) == before

    def train_again(self, _):
        if self.gone:
            self._refused(lambda: self.ledger.trained(self.gone[-1], version=0))

    def train_unbuffered(self, _):
        if self.in_flight:
            self._refused(lambda: self.ledger.trained(self.in_flight[0], version=0))

    def overdraw(self, _):
        (in_flight, _), serial = accounts(self.ledger)["in_flight"], 10_000
        self._refused(lambda: self.ledger.buffered(self.make_group(serial, [in_flight + 1])))

    def check(self):
        totals = self.ledger.totals()
        held = [*self.waiting, *self.in_flight]
        assert balances(totals)
        assert sum(tokens for tokens, _ in accounts(self.ledger).values()) == 0
        assert sum(trajectories for _, trajectories in accounts(self.ledger).values()) == 0
        assert (totals.generated.tokens, totals.generated.trajectories) == (self.num_sampled, self.num_started)
        assert totals.in_flight.tokens == sum(group.num_sampled_tokens for group in self.in_flight)
        assert totals.in_flight.trajectories == sum(len(group.trajectories) for group in held)
        assert totals.buffered.tokens == sum(group.num_sampled_tokens for group in self.buffered)
        assert totals.buffered.trajectories == sum(len(group.trajectories) for group in self.buffered)
        assert totals.trained.tokens == self.num_trained
        dropped = self.ledger.totals().dropped
        assert {reason: amount.tokens for reason, amount in dropped.items()} == self.dropped


@settings(max_examples=40, deadline=None)
@given(events=st.lists(st.sampled_from(EVENTS), max_size=40), data=st.data())
def test_the_books_balance_after_every_event(events, data, make_group):
    with tempfile.TemporaryDirectory() as directory:
        with Ledger.create(Path(directory)) as ledger:
            model = Model(ledger, make_group)
            for event in events:
                getattr(model, event)(data)
                model.check()
        assert audit(Path(directory)) == []
