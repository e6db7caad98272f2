"""Two workers close in every order of events, and neither reads from a closed pipe."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rpc.transports.base import Frame, FrameKind, Peer
from rpc.transports.tensorpipe.links import PeerLink
from rpc.transports.tensorpipe.outstanding import AnswerFuture
from rpc.transports.tensorpipe.wire import LIFELINE, Envelope
from rpc.worker_info import WorkerInfo


def link(peer: int, me: int) -> PeerLink:
    route: Any = None
    return PeerLink(Peer(WorkerInfo(f"worker{peer}", peer), 1, b""), route, peer < me, {}, {})


def future() -> AnswerFuture:
    return torch.futures.Future()


class TestCalls:
    def test_frames_queue_behind_the_batch_before_them(self) -> None:
        peer = link(1, 0)
        frames = [Frame(FrameKind.NOTICE, 0, b"%d" % number) for number in range(3)]
        peer.outbox.append(frames[0])
        assert peer.take_batch() == frames[:1]
        peer.outbox += frames[1:]
        assert peer.take_batch() == []
        peer.batch_under_way = False
        assert peer.take_batch() == frames[1:]

    def test_a_batch_does_not_grow_without_bound(self) -> None:
        peer = link(1, 0)
        peer.outbox += [Frame(FrameKind.NOTICE, 0, b"", bytes(10_000)) for _ in range(100)]
        sizes = []
        while peer.outbox:
            sizes.append(len(peer.take_batch()))
            peer.batch_under_way = False
        assert sum(sizes) == 100
        assert max(sizes) * 10_000 < 300_000

    def test_a_request_that_came_in_a_batch_is_answered_once(self) -> None:
        peer = link(1, 0)
        peer.loose.update((4, 5))
        assert [peer.take_loose(number) for number in (4, 4, 6)] == [True, False, False]
        peer.lose("it shut down")
        assert not peer.take_loose(5)

    @pytest.mark.parametrize("end", [lambda peer: peer.lose("eof"), PeerLink.close_windows])
    def test_nobody_waits_for_a_peer_that_is_gone(self, end: Callable[[PeerLink], None]) -> None:
        peer = link(1, 0)
        for window in (peer.window, peer.reply_window):
            assert window.try_charge(1, 1 << 30)
        end(peer)
        for window in (peer.window, peer.reply_window):
            assert not window.charge(2, 1 << 30, lambda: True)

    def test_what_is_held_is_handed_out_once(self) -> None:
        peer = link(1, 0)
        request, lifeline = future(), future()
        asked = Envelope(FrameKind.REQUEST, 1, 1, 5, number=1)
        assert peer.take(asked, request)
        assert peer.take(Envelope(LIFELINE, 1, 1), lifeline)
        assert peer.take_asked() == [(asked, request)]
        assert peer.take_lifelines() == [lifeline]
        assert (peer.take_asked(), peer.take_lifelines()) == ([], [])

    def test_the_first_reason_for_a_loss_is_kept(self) -> None:
        peer = link(1, 0)
        peer.lose("it shut down")
        peer.break_off("eof")
        assert peer.lost == "it shut down"
        assert peer.is_finished()

    def test_one_that_closed_without_all_answers_is_not_waited_for(self) -> None:
        peer = link(1, 0)
        peer.lifeline_open = peer.watched = True
        peer.calls.begin(FrameKind.REQUEST, 1)
        peer.close_request = future()
        peer.lifeline_ended("it shut down")
        assert not peer.is_finished()
        peer.left = True
        assert peer.is_finished()


class TestBursts:
    @staticmethod
    def busy_link() -> PeerLink:
        peer = link(1, 0)
        for _ in range(4):
            peer.calls.begin(FrameKind.REQUEST)
        return peer

    def test_requests_that_follow_each_other_closely_are_a_burst(self) -> None:
        peer = self.busy_link()
        found = [peer.in_burst(1.0 + number * 100e-6) for number in range(20)]
        assert not any(found[:8])
        assert all(found[8:])

    def test_a_pause_ends_a_burst(self) -> None:
        peer = self.busy_link()
        assert [peer.in_burst(1.0 + number * 100e-6) for number in range(20)][-1]
        assert not peer.in_burst(1.1)

    def test_a_caller_that_waits_for_each_reply_makes_no_burst(self) -> None:
        peer = link(1, 0)
        peer.calls.begin(FrameKind.REQUEST)
        assert not any(peer.in_burst(1.0 + number * 100e-6) for number in range(100))

    def test_slow_calls_make_no_burst(self) -> None:
        peer = self.busy_link()
        assert not any(peer.in_burst(1.0 + number * 1e-3) for number in range(100))

    def test_replies_that_may_be_on_other_devices_need_calls_of_their_own(self) -> None:
        cuda = torch.device("cuda", 0)
        peer = self.busy_link()
        peer.replies = {cuda: cuda}
        assert not any(peer.in_burst(1.0 + number * 100e-6) for number in range(100))


class Side:
    """One worker of a simulated pair, doing what the transport does."""

    def __init__(self, me: int, peer: int, pipe: deque[tuple[str, bytes]]) -> None:
        self.link = link(peer, me)
        self.link.watched = self.link.lifeline_open = True
        self.link.lifeline = future()
        self.out = pipe
        self.stopped = False
        self.reading = 1

    def call(self) -> None:
        if self.link.lost is None and not self.link.close_sent:
            self.link.calls.begin(FrameKind.REQUEST)
            self.reading += 1
            self.out.append(("call", b""))

    def leave(self) -> None:
        if self.link.lost is None and not self.link.close_sent:
            self.link.send_close()
            self.reading += 1
            self.out.append(("close", str(self.link.calls.sent).encode()))

    def receive(self, kind: str, data: bytes) -> None:
        if kind == "call":
            self.link.taken.delivered += 1
            self.out.append(("done", b""))
        elif kind == "done":
            self.link.calls.under_way -= 1
            self.reading -= 1
        elif kind == "lifeline":
            self.link.lifeline_ended("it shut down")
            self.reading -= 1
        elif kind == "close":
            self.link.lose("it shut down")
            self.link.close_request, self.link.announced = future(), int(data)
            self.answer_lifelines()
        else:
            self.reading -= 1
            self.link.close_was_confirmed(data)
            self.answer_lifelines()
        due = self.link.take_due_confirmation()
        if due is not None:
            self.out.append(("confirm", due[1]))

    def answer_lifelines(self) -> None:
        for _ in self.link.take_lifelines():
            self.out.append(("lifeline", b""))


def test_in_any_order_both_finish_and_neither_reads_when_the_other_stops() -> None:
    for seed in range(300):
        close_in_some_order(seed)


def close_in_some_order(seed: int) -> None:
    chance = random.Random(seed)
    pipes: tuple[deque[tuple[str, bytes]], ...] = (deque(), deque())
    sides = (Side(0, 1, pipes[0]), Side(1, 0, pipes[1]))
    leavers = chance.choice([{0}, {1}, {0, 1}])
    left: set[int] = set()
    for _ in range(400):
        moves: list[Callable[[], None]] = []
        for number, side in enumerate(sides):
            if side.stopped:
                continue
            incoming = pipes[1 - number]
            if incoming:  # torch's pool takes what was read from a pipe in nearly any order
                index = chance.randrange(min(3, len(incoming)))
                moves += [lambda s=side, q=incoming, i=index: _take(s, q, i)] * 3
            if number not in left:
                moves.append(side.call)
            if number in leavers and number not in left:
                moves.append(lambda s=side, n=number: (s.leave(), left.add(n))[0])
            if number in left and side.link.is_finished():
                moves.append(lambda s=side, o=sides[1 - number]: _stop(s, o))
        if not moves:
            break
        chance.choice(moves)()
    assert all(sides[number].stopped for number in leavers), seed


def _take(side: Side, queue: deque[tuple[str, bytes]], index: int) -> None:
    kind, data = queue[index]
    del queue[index]
    side.receive(kind, data)


def _stop(side: Side, other: Side) -> None:
    side.stopped = True
    answers = [kind for kind, _ in side.out if kind in ("done", "lifeline", "confirm")]
    assert other.stopped or other.reading <= len(answers), "the peer would read from nothing"
