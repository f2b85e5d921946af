import json

import pytest

from headrace.prompts.stream import Cursor, Drawn


def test_every_record_once_per_epoch_in_a_new_order():
    cursor = Cursor(50, seed=1, shuffle=True)
    draws = [cursor.next() for _ in range(150)]
    assert [draw.serial for draw in draws] == list(range(150))
    epochs = [[draw.index for draw in draws if draw.epoch == epoch] for epoch in range(3)]
    assert all(sorted(order) == list(range(50)) for order in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert [Cursor(50, seed=2, shuffle=True).next() for _ in range(1)] != draws[:1]


def test_without_shuffle_the_order_is_the_file():
    cursor = Cursor(3, seed=1, shuffle=False)
    assert [cursor.next() for _ in range(4)] == [Drawn(0, 0, 0), Drawn(1, 0, 1), Drawn(2, 0, 2), Drawn(3, 1, 0)]


@pytest.mark.parametrize("stop", [0, 1, 6, 7, 8, 20])
@pytest.mark.parametrize("shuffle", [True, False])
def test_resume_continues_exactly(stop, shuffle):
    whole = Cursor(7, seed=5, shuffle=shuffle)
    expected = [whole.next() for _ in range(30)]
    first = Cursor(7, seed=5, shuffle=shuffle)
    before = [first.next() for _ in range(stop)]
    second = Cursor.restore(json.loads(json.dumps(first.state())))
    assert before + [second.next() for _ in range(30 - stop)] == expected


def test_a_state_can_be_set_back_to_an_earlier_draw():
    cursor = Cursor(7, seed=5, shuffle=True)
    draws = [cursor.next() for _ in range(12)]
    assert Cursor.restore({**cursor.state(), "serial": 4}).next() == draws[4] == cursor.at(4)
    assert cursor.next().serial == 12


def test_no_prompts():
    with pytest.raises(ValueError, match="at least one"):
        Cursor(0, seed=0, shuffle=True)
