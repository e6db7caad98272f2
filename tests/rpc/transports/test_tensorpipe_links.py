"""Two workers part in every order of events without either reading from a closed pipe."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import cast

import pytest
import torch

from rpc.transports.base import Frame, FrameKind, Peer
from rpc.transports.tensorpipe_links import AnswerFuture, Link
from rpc.worker_info import WorkerInfo


def link(peer: int, me: int) -> Link:
    info = WorkerInfo(f"worker{peer}", peer)
    route = cast("object", None)
    return Link(Peer(info, 1, b""), route, peer < me, {}, {})  # type: ignore[arg-type]


def future() -> AnswerFuture:
    return torch.futures.Future()


class TestCalls:
    def test_notices_queue_behind_the_batch_before_them(self) -> None:
        peer = link(1, 0)
        notices = [Frame(FrameKind.NOTICE, 0, b"%d" % number) for number in range(3)]
        peer.notices.append(notices[0])
        assert peer.take_batch() == notices[:1]
        peer.notices += notices[1:]
        assert peer.take_batch() == []
        peer.batch_under_way = False
        assert peer.take_batch() == notices[1:]

    def test_what_is_held_is_handed_out_once(self) -> None:
        peer = link(1, 0)
        request, lifeline = future(), future()
        peer.hold(FrameKind.REQUEST, 5, request)
        peer.hold(16, 0, lifeline)
        assert (peer.take_asked(), peer.take_lifelines()) == ([request], [lifeline])
        assert (peer.take_asked(), peer.take_lifelines()) == ([], [])

    def test_the_first_reason_for_a_loss_is_kept(self) -> None:
        peer = link(1, 0)
        peer.lose("it shut down")
        peer.break_off("eof")
        assert peer.lost == "it shut down"
        assert peer.is_finished()


class Side:
    """One worker of a simulated pair, doing what the transport does."""

    def __init__(self, me: int, peer: int, pipe: deque[tuple[str, bytes]]) -> None:
        self.link = link(peer, me)
        self.link.watched = self.link.lifeline_open = True
        self.link.lifelines.append(future())
        self.out = pipe
        self.stopped = False
        self.reading = 1

    def call(self) -> None:
        if self.link.lost is None and not self.link.said_farewell:
            self.link.begin_call()
            self.reading += 1
            self.out.append(("call", b""))

    def leave(self) -> None:
        if self.link.lost is None and not self.link.said_farewell:
            self.link.say_farewell()
            self.reading += 1
            self.out.append(("farewell", str(self.link.sent).encode()))

    def receive(self, kind: str, data: bytes) -> None:
        if kind == "call":
            self.link.taken += 1
            self.out.append(("done", b""))
        elif kind == "done":
            self.link.under_way -= 1
            self.reading -= 1
        elif kind == "lifeline":
            self.link.lifeline_ended("it shut down")
            self.reading -= 1
        elif kind == "farewell":
            self.link.lose("it shut down")
            self.link.farewell, self.link.announced = future(), int(data)
            self.answer_lifelines()
        else:
            self.reading -= 1
            self.link.farewell_confirmed(data)
            self.answer_lifelines()
        due = self.link.take_due_confirmation()
        if due is not None:
            self.out.append(("confirm", due[1]))

    def answer_lifelines(self) -> None:
        for _ in self.link.take_lifelines():
            self.out.append(("lifeline", b""))


@pytest.mark.parametrize("seed", range(300))
def test_in_any_order_both_finish_and_neither_reads_when_the_other_stops(seed: int) -> None:
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
