"""Calls are taken, wait or are refused by who made them."""

from __future__ import annotations

from typing import Any, cast

from rpc.devices import DeviceInfo
from rpc.transports.base import Frame, FrameKind, Peer
from rpc.transports.tensorpipe import peers
from rpc.transports.tensorpipe.address import TensorPipeAddress
from rpc.transports.tensorpipe.links import PeerLink
from rpc.transports.tensorpipe.peers import Peers
from rpc.transports.tensorpipe.wire import Envelope
from rpc.worker_info import WorkerInfo


def link(worker_id: int, incarnation: int = 1) -> PeerLink:
    peer, route = (
        Peer(WorkerInfo(f"worker{worker_id}", worker_id), incarnation, b""),
        cast(Any, None),
    )
    return PeerLink(peer, route, False, {}, {})


def sent_by(worker_id: int, incarnation: int = 1) -> Envelope:
    return Envelope(FrameKind.NOTICE, worker_id, incarnation)


def test_the_calls_of_a_life_that_is_not_known_yet_wait_for_it() -> None:
    known = Peers()
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
    known = Peers()
    known.add(link(1, 2))
    known.add(link(2))
    removed = known.remove(2)
    assert known.refusal(sent_by(1, 1)) == peers.OLD_LIFE
    assert known.refusal(sent_by(2)) == peers.REMOVED
    assert known.refusal(sent_by(2, 2)) is None
    assert known.of_sender(sent_by(2)) is removed
    assert known.of_sender(sent_by(2, 2)) is None
    assert known.everyone() == [known.links[1], removed]
    known.open = False
    assert known.refusal(sent_by(3)) == peers.SHUT_DOWN


def test_not_everything_waits() -> None:
    known = Peers(early_limit=1)
    known.early.append((sent_by(1), Frame(FrameKind.NOTICE, 0, b""), None))
    assert known.refusal(sent_by(1)) == peers.OVERRUN


def test_what_waits_for_the_batch_before_it_is_not_flushed() -> None:
    known, peer = Peers(), link(1)
    known.add(peer)
    peer.outbox.append(Frame(FrameKind.NOTICE, 0, b""))
    assert not known.is_flushed()
    peer.lose("gone")
    assert known.is_flushed()


def test_an_address_says_what_it_was_given() -> None:
    address = TensorPipeAddress("uv://127.0.0.1:5", DeviceInfo(1), "a host")
    assert TensorPipeAddress.decode(address.encode()) == address
