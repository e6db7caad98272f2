"""Which life of a peer a frame is for."""

from __future__ import annotations

import threading
from typing import Any

import torch

from rpc.transports.base import Frame, FrameKind, Patience, Peer
from rpc.transports.flow import FlowWindow
from rpc.transports.tensorpipe_ledger import Calls, Served
from rpc.transports.tensorpipe_links import Link
from rpc.transports.tensorpipe_parting import Exit
from rpc.transports.tensorpipe_roster import Roster
from rpc.transports.tensorpipe_sending import Outgoing
from rpc.transports.tensorpipe_wire import Envelope
from rpc.worker_info import WorkerInfo
from tests.waiting import until

PEER = 1
REQUEST = 7


class Nobody:
    """Stands in for torch's threads; there are none."""

    threads: Any

    def is_here(self) -> bool:
        return False


def link_with_a_request(incarnation: int) -> Link:
    peer = Peer(WorkerInfo("peer", PEER), incarnation, b"")
    calls, served = Calls(remembers=True), Served(keeps=True)
    link = Link(peer, None, False, {}, {}, calls, served, 5.0)
    link.reply_window = FlowWindow("peer", 100_000, gives_way=False)
    request = Envelope(FrameKind.REQUEST, PEER, incarnation, REQUEST, 1)
    link.take(request, Frame(FrameKind.REQUEST, REQUEST, b""), torch.futures.Future())
    return link


def test_a_reply_that_waited_for_room_is_not_given_to_a_later_life() -> None:
    lock, roster, nobody = threading.Lock(), Roster("life"), Nobody()
    nobody.threads = nobody
    stand_in: Any = nobody
    outgoing = Outgoing(
        WorkerInfo("me", 0),
        lock,
        Exit(lock),
        roster,
        stand_in,
        stand_in,
        stand_in,
        stand_in,
        lambda _: Patience.WAITS,
        lambda *_: None,
    )
    former, later = link_with_a_request(1), link_with_a_request(2)
    roster.add(former)
    assert former.reply_window.try_charge(99, 100_000)
    reply = Frame(FrameKind.REPLY, REQUEST, b"", bytes(70_000))
    replying = threading.Thread(target=outgoing.send, args=(PEER, reply))
    replying.start()
    until(lambda: former.reply_window.waiting == 1)
    with lock:
        roster.remove(PEER)
        roster.add(later)
        former.forget_contents()
    replying.join(10)
    assert not replying.is_alive()
    assert later.awaits(REQUEST)
