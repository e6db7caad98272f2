"""Whose calls are taken, whose wait, and whose are refused."""

from __future__ import annotations

import pytest

from rpc.devices import DeviceInfo
from rpc.transports.base import Frame, FrameKind, Peer
from rpc.transports.tensorpipe import peers as roster
from rpc.transports.tensorpipe.address import Address
from rpc.transports.tensorpipe.ledger import Calls, Served, Taken
from rpc.transports.tensorpipe.links import Link
from rpc.transports.tensorpipe.peers import Roster
from rpc.transports.tensorpipe.wire import Envelope
from rpc.worker_info import WorkerInfo

LIFE = "this very one"


def link(worker_id: int, incarnation: int = 1) -> Link:
    peer = Peer(WorkerInfo(f"worker{worker_id}", worker_id), incarnation, b"")
    calls, served = Calls(remembers=True), Served(keeps=True)
    return Link(peer, None, False, {}, {}, calls, served, 5.0)


def sent_by(worker_id: int, incarnation: int = 1) -> Envelope:
    return Envelope(FrameKind.NOTICE, worker_id, incarnation)


def test_the_calls_of_a_life_that_is_not_known_yet_wait_for_it() -> None:
    known = Roster(LIFE)
    frame = Frame(FrameKind.NOTICE, 0, b"")
    mine, other = (sent_by(1, 2), frame, None), (sent_by(2), frame, None)
    known.add(link(1))
    assert known.member(sent_by(1, 2)) is None
    assert known.refusal(sent_by(1, 2)) is None
    known.early += [mine, other]
    later = link(1, 2)
    assert known.add(later) == [mine]
    assert known.early == [other]
    assert known.member(sent_by(1, 2)) is later


def test_those_of_a_life_that_is_over_are_refused() -> None:
    known = Roster(LIFE)
    known.add(link(1, 2))
    known.add(link(2))
    removed = known.remove(2)
    assert known.refusal(sent_by(1, 1)) == roster.OLD_LIFE
    assert known.refusal(sent_by(2)) == roster.REMOVED
    assert known.refusal(sent_by(2, 2)) is None
    assert known.of_sender(sent_by(2)) is removed
    assert known.of_sender(sent_by(2, 2)) is None
    assert known.everyone() == [known.links[1], removed]
    known.open = False
    assert known.refusal(sent_by(3)) == roster.SHUT_DOWN


def test_not_everything_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roster, "EARLY_LIMIT", 1)
    known = Roster(LIFE)
    known.early.append((sent_by(1), Frame(FrameKind.NOTICE, 0, b""), None))
    assert known.refusal(sent_by(1)) == roster.OVERRUN


class TestResuming:
    def test_a_member_hears_what_was_taken_from_it(self) -> None:
        known, peer = Roster(LIFE), link(1)
        known.add(peer)
        peer.served.taken.take(1)
        assert known.resume(sent_by(1), LIFE) is peer.served.taken

    def test_from_one_that_is_not_known_yet_nothing_was_taken(self) -> None:
        taken = Roster(LIFE).resume(sent_by(1), LIFE)
        assert isinstance(taken, Taken)
        assert 1 not in taken

    @pytest.mark.parametrize(
        ("sender", "life", "reason"),
        [
            (sent_by(1), "another", roster.SOMEBODY_ELSE),
            (sent_by(1, 0), LIFE, roster.OLD_LIFE),
            (sent_by(2), LIFE, roster.REMOVED),
            (sent_by(3), LIFE, roster.GIVEN_UP),
            (sent_by(4), LIFE, roster.GIVEN_UP),
        ],
    )
    def test_one_that_is_not_meant_or_no_member_is_refused(
        self, sender: Envelope, life: str, reason: str
    ) -> None:
        known = Roster(LIFE)
        for number in range(1, 5):
            known.add(link(number))
        known.remove(2)
        known.links[3].break_off("eof")
        known.links[4].seconds = 0.0
        assert known.resume(sender, life) == reason

    def test_who_leaves_does_not_go_on(self) -> None:
        known = Roster(LIFE)
        known.add(link(1))
        known.open = False
        assert known.resume(sent_by(1), LIFE) == roster.SHUT_DOWN


def test_what_waits_for_a_pipe_is_not_flushed() -> None:
    known, peer = Roster(LIFE), link(1)
    known.add(peer)
    assert not known.is_flushed()
    peer.lose("gone")
    assert known.is_flushed()


def test_an_address_says_what_it_was_given() -> None:
    address = Address("uv://127.0.0.1:5", DeviceInfo(1), "x", "a host")
    assert Address.decode(address.encode()) == address
