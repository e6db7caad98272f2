"""Signs of life between c10d stores of this process."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from chaos.worker import cut_off
from rpc.group.probes import Answer, StoreProber
from rpc.ids import Life
from tests.waiting import until

ALICE, BOB = Life(0, 1), Life(1, 1)


class Pair:
    def __init__(self) -> None:
        self.alice, self.bob = StoreProber(), StoreProber()
        self.addresses = self.alice.start(ALICE), self.bob.start(BOB)

    def answers(self, address: str, wanted: int = 1) -> list[Answer]:
        """What bob answers alice, who asks until she has enough."""
        found: list[Answer] = []
        deadline = time.monotonic() + 20
        while len(found) < wanted:
            assert time.monotonic() < deadline
            self.alice.ask(BOB, address)
            found += self.alice.collect()
            time.sleep(0.002)
        return found


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.alice.close()
    made.bob.close()


def test_one_that_is_there_answers_each_question(pair: Pair) -> None:
    assert pair.answers(pair.addresses[1], 5) == [Answer(BOB, expelled=False)] * 5


def test_it_is_asked_once_at_a_time(pair: Pair) -> None:
    for _ in range(100):
        pair.alice.ask(BOB, pair.addresses[1])
    until(lambda: len(pair.alice.collect()) == 1)
    time.sleep(0.05)
    assert pair.alice.collect() == []


def test_one_that_ended_does_not_answer(pair: Pair) -> None:
    pair.answers(pair.addresses[1])
    pair.bob.close()
    deadline = time.monotonic() + 0.3
    late: list[Answer] = []
    while time.monotonic() < deadline:
        pair.alice.ask(BOB, pair.addresses[1])
        late = pair.alice.collect()
    assert late == []


def test_another_process_at_its_address_does_not_count(pair: Pair) -> None:
    host, port, _ = json.loads(pair.addresses[1])
    elsewhere = json.dumps([host, port, "another token"])
    deadline = time.monotonic() + 0.3
    while time.monotonic() < deadline:
        pair.alice.ask(BOB, elsewhere)
        assert pair.alice.collect() == []


def test_it_answers_again_after_the_connection_broke(pair: Pair) -> None:
    pair.answers(pair.addresses[1])
    pair.alice.forget(BOB)
    assert pair.answers(pair.addresses[1])


def test_one_that_is_declared_lost_finds_a_note(pair: Pair) -> None:
    assert pair.bob.verdict() is None
    pair.alice.condemn(pair.addresses[1], "too silent")
    until(lambda: pair.bob.verdict() == "too silent")
    assert pair.alice.verdict() is None


def test_it_also_hears_it_from_those_it_asks(pair: Pair) -> None:
    pair.bob.condemn(pair.addresses[0], "too silent")
    assert pair.answers(pair.addresses[1], 3)[-1] == Answer(BOB, expelled=True)


def test_a_note_for_one_that_is_gone_holds_nothing_up(pair: Pair) -> None:
    pair.bob.close()
    pair.alice.condemn(pair.addresses[1], "too silent")
    pair.alice.collect()
    assert not pair.alice._parting


def test_it_finds_its_note_after_all_its_connections_broke(pair: Pair) -> None:
    pair.alice.condemn(pair.addresses[1], "too silent")
    until(lambda: pair.bob.verdict() == "too silent")
    cut_off()
    assert pair.bob.verdict() == "too silent"
    assert pair.answers(pair.addresses[1])
