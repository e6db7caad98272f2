"""Plays what lets calls over TensorPipe outlive their pipes: a seed says what happens.

Keeps beside the decisions what is true, by other means, and holds them to it.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import cast

import pytest
import torch

from rpc.protocol.resumption import ReconnectEpoch
from rpc.transports.base import Frame, FrameKind
from rpc.transports.tensorpipe import ledger as ledger
from rpc.transports.tensorpipe.ledger import (
    Again,
    AnswerFuture,
    Calls,
    Mending,
    Served,
    Step,
    Taken,
)
from rpc.transports.tensorpipe.wire import AGAIN, RECEIPT, VOID, Envelope


def future(pipe: int = 0) -> AnswerFuture:
    """Stands for one; says which pipe it answers on."""
    return cast("AnswerFuture", pipe)


BODIES: tuple[tuple[bytes, tuple[torch.Tensor, ...]], ...] = (
    (b"", ()),
    (b"x" * 63, ()),
    (b"x" * 64, ()),
    (b"x", (torch.zeros(15),)),
    (b"xxxx", (torch.zeros(12), torch.zeros(3))),
    (b"x" * 100, (torch.zeros(4),)),
)
KINDS = (FrameKind.REQUEST, FrameKind.REQUEST, FrameKind.NOTICE, VOID)


def weight(frame: Frame) -> int:
    """What a frame takes, in bytes."""
    tensors = sum(4 * tensor.numel() for tensor in frame.tensors)
    return len(frame.header) + len(frame.payload) + tensors


@dataclass
class Game:
    """A worker that calls, one that is called, and the pipes between them.

    What was read from a pipe that broke may still come up, in any order, long after.
    Beside what the two decide, it keeps what is true.

    Args:
        lasting: whether another pipe is opened when one breaks; the peer is lost if not.
    """

    lasting: bool = True
    calls: Calls = field(init=False)
    served: Served = field(init=False)
    attempt: int = 0
    questions: list[tuple[Envelope, Frame]] = field(default_factory=list)
    answers: list[tuple[int, Frame]] = field(default_factory=list)
    notes: list[tuple[list[int], bytes]] = field(default_factory=list)
    delivered: Counter[tuple[int, int]] = field(default_factory=Counter)
    replies: Counter[int] = field(default_factory=Counter)
    said: dict[int, ledger.Call] = field(default_factory=dict)
    """What each call that has not come back would say on another pipe."""
    correlations: dict[int, int] = field(default_factory=dict)
    waiting: dict[int, tuple[int, int]] = field(default_factory=dict)
    """The number of each request whose handler runs, and which pipe its answer takes."""
    kept: dict[int, Frame] = field(default_factory=dict)
    dropped: set[int] = field(default_factory=set)
    """Requests whose replies are kept no more, though nobody said that they had come."""
    unnamed: list[tuple[int, Frame]] = field(default_factory=list)
    """Replies that came, and that no receipt has named."""
    large: list[int] = field(default_factory=list)
    lost: bool = False

    def __post_init__(self) -> None:
        self.calls = Calls(self.lasting, ledger.RECEIPT_AFTER_BYTES)
        self.served = Served(self.lasting)

    def play(self, steps: Iterable[tuple[str, int]]) -> None:
        for name, argument in steps:
            if not self.lost:
                getattr(self, name)(argument)
                self.check()
        self.end()

    # What may happen

    def call(self, what: int) -> None:
        kind, body = KINDS[what % 4], BODIES[what // 4 % len(BODIES)]
        used = {self.correlations[number] for number in self.said}
        correlation = next(n for n in itertools.count(1) if n not in used)
        frame = Frame(FrameKind.REQUEST, correlation, b"", *body)
        if kind != FrameKind.REQUEST:
            frame = Frame(FrameKind.NOTICE, 0, b"", *body)
        if kind == VOID:
            number = self.begin(FrameKind.REQUEST, frame)
            assert self.calls.void(number)
            self.said[number] = VOID, ledger._NOTHING
            self.put(number, *self.said[number])
        else:
            self.put(self.begin(kind, frame), kind, frame)

    def begin(self, kind: int, frame: Frame) -> int:
        assert ledger.size(frame) == weight(frame)
        number = self.calls.begin(kind, frame)
        self.correlations[number] = frame.correlation
        self.said[number] = kind, frame if self.lasting else ledger._NOTHING
        return number

    def put(self, number: int, kind: int, frame: Frame) -> None:
        self.questions.append(
            (Envelope(kind, 1, 1, frame.correlation, number, self.attempt), frame)
        )

    def take(self, place: int) -> None:
        if not self.questions:
            return
        envelope, frame = self.questions.pop(place % len(self.questions))
        held = future(envelope.attempt) if envelope.kind in (FrameKind.REQUEST, AGAIN) else None
        if envelope.kind != AGAIN and self.served.take(envelope, frame, held):
            self.deliver(envelope, frame)
        elif held is not None:
            self.ask_again(envelope, held)
        if held is None:
            self.answer(envelope.attempt, envelope.number, ledger._NOTHING)

    def deliver(self, envelope: Envelope, frame: Frame) -> None:
        self.served.delivered += 1
        self.delivered[envelope.kind, envelope.number] += 1
        if envelope.kind == FrameKind.REQUEST:
            self.waiting[envelope.correlation] = envelope.number, envelope.attempt
            if self.lasting and weight(frame) >= ledger.LARGE:
                self.large.append(envelope.number)
        elif envelope.kind == RECEIPT:
            received, _ = ledger.decode_receipt(frame.payload)
            self.served.acknowledged(received)
            for number in received:
                self.kept.pop(number, None)

    def ask_again(self, envelope: Envelope, held: AnswerFuture) -> None:
        number, pipe = self.waiting.get(envelope.correlation, (0, 0))
        again, kept = self.served.ask_again(envelope, held)
        if number == envelope.number:
            assert (again, kept) == (
                (Again.HELD if pipe < envelope.attempt else Again.STALE),
                None,
            )
            self.waiting[envelope.correlation] = number, max(pipe, envelope.attempt)
        elif envelope.number in self.kept:
            assert again is Again.ANSWERED
            assert kept is self.kept[envelope.number]
            self.answer(envelope.attempt, envelope.number, kept)
        else:
            assert (again, kept) == (Again.FORGOTTEN, None)
            if envelope.number in self.said:
                assert envelope.number in self.dropped
                if envelope.attempt == self.attempt:
                    self.lose()

    def finish(self, what: int) -> None:
        """A handler ends."""
        if not self.waiting:
            return
        correlation = list(self.waiting)[what % len(self.waiting)]
        frame = Frame(FrameKind.REPLY, correlation, b"", *BODIES[what // 8 % len(BODIES)])
        held = self.served.reply(frame)
        assert self.served.reply(frame) is None
        assert held is not None
        envelope, pipe = held
        assert (envelope.number, cast("int", pipe)) == self.waiting.pop(correlation)
        self.keep(envelope.number, frame)
        self.answer(cast("int", pipe), envelope.number, frame)

    def keep(self, number: int, frame: Frame) -> None:
        self.kept[number] = frame
        while self.kept and (
            not self.lasting
            or sum(map(weight, self.kept.values())) > ledger.MOST_BYTES_KEPT
            or len(self.kept) > ledger.MOST_REPLIES_KEPT
        ):
            oldest = next(iter(self.kept))
            del self.kept[oldest]
            self.dropped.add(oldest)

    def answer(self, pipe: int, number: int, frame: Frame) -> None:
        if pipe == self.attempt:
            self.answers.append((number, frame))

    def hear(self, place: int) -> None:
        if not self.answers:
            return
        number, frame = self.answers.pop(place % len(self.answers))
        first = self.said.pop(number, None) is not None
        assert (self.calls.came_back(number) is not None) is first
        assert self.calls.came_back(number) is None
        assert not self.calls.void(number)
        if not first:
            return
        self.calls.under_way -= 1
        if frame.kind is FrameKind.REPLY:
            self.replies[number] += 1
            if self.lasting:
                self.hear_reply(number, frame)

    def hear_reply(self, number: int, frame: Frame) -> None:
        self.unnamed.append((number, frame))
        much = sum(weight(each) for _, each in self.unnamed) >= ledger.RECEIPT_AFTER_BYTES
        many = len(self.unnamed) >= ledger.RECEIPT_AFTER
        assert self.calls.received(number, frame) == (much or many)

    def receipt(self, _: int) -> None:
        """The caller says what it has."""
        received = self.calls.take_received()
        assert received == [number for number, _ in self.unnamed]
        self.unnamed.clear()
        if received:
            frame = Frame(FrameKind.NOTICE, 0, b"", ledger.encode_receipt(received, []))
            self.put(self.begin(RECEIPT, frame), RECEIPT, frame)

    def note(self, _: int) -> None:
        """The other side says which large requests it has, in a receipt of its own."""
        arrived = self.served.take_arrived()
        waiting = {number for number, _ in self.waiting.values()}
        assert arrived == [number for number in self.large if number in waiting]
        self.large.clear()
        self.notes.append((arrived, ledger.encode_receipt([1, 2], arrived)))

    def arrive(self, place: int) -> None:
        """Such a receipt comes, maybe late."""
        if not self.notes:
            return
        arrived, receipt = self.notes.pop(place % len(self.notes))
        assert ledger.decode_receipt(receipt) == ([1, 2], arrived)
        self.calls.arrived(arrived)
        for number in arrived:
            if number in self.said:
                self.remind(number)

    def remind(self, number: int) -> None:
        correlation = self.said[number][1].correlation
        self.said[number] = AGAIN, Frame(FrameKind.REQUEST, correlation, b"")

    def cut(self, lost: int) -> None:
        """The pipe breaks; some of what was on it is lost, the rest was read, both ways."""
        if not self.lasting:
            self.lose()
            return
        self.questions = [each for n, each in enumerate(self.questions) if lost >> n & 1]
        self.answers = [each for n, each in enumerate(self.answers) if lost >> n & 2]
        self.attempt += 1
        taken = Taken.decode(self.served.taken.encode())
        numbers = {number for _, number in self.delivered}
        assert all((n in taken) == (n in numbers) for n in range(1, self.calls.sent + 2))
        back = [each for n, each in self.said.items() if n in numbers and not self.asks(n)]
        assert self.calls.settle(taken) == back
        self.calls.under_way -= len(back)
        for number in [n for n in self.said if n in numbers]:
            if self.asks(number):
                self.remind(number)
            else:
                del self.said[number]
        for number, (kind, frame) in self.calls.after(0):
            self.put(number, kind, frame)

    def asks(self, number: int) -> bool:
        return self.said[number][0] in (FrameKind.REQUEST, AGAIN)

    def part(self, _: int) -> None:
        """The other side is no peer any more: no other pipe is opened."""
        self.lasting = False
        self.calls.forget_contents()
        self.served.forget()
        self.said = {number: (kind, ledger._NOTHING) for number, (kind, _) in self.said.items()}
        self.dropped.update(self.kept)
        self.kept.clear()
        self.large.clear()

    def lose(self) -> None:
        """The peer is lost."""
        self.lost, self.lasting = True, False
        self.calls.forget()
        asked = {
            envelope.correlation: (envelope.number, cast("int", pipe))
            for envelope, pipe in self.served.take_asked()
        }
        assert asked == self.waiting
        self.served.forget()
        for each in (self.said, self.waiting, self.kept, self.large, self.unnamed):
            each.clear()
        for each in (self.questions, self.answers):
            each.clear()

    # What must hold

    def check(self) -> None:
        half = self.calls.sent // 2
        assert list(self.calls.unanswered.items()) == list(self.said.items())
        assert self.calls.after(half) == [each for each in self.said.items() if each[0] > half]
        assert self.calls.under_way == len(self.said)
        assert self.served.kept_bytes == sum(map(weight, self.kept.values()))
        asked = self.served.asked
        assert {
            correlation: (envelope.number, envelope.attempt, cast("int", pipe))
            for correlation, (envelope, pipe) in asked.items()
        } == {
            correlation: (number, pipe, pipe)
            for correlation, (number, pipe) in self.waiting.items()
        }

    def end(self) -> None:
        """Until nothing is left to happen, with a last pipe; then all is done, and forgotten."""
        self.play_on()
        if self.lasting:
            self.cut(0)
            self.play_on()
        self.receipt(0)
        self.play_on()
        self.check()
        assert set(self.delivered.values()) <= {1}
        assert not self.kept
        if not self.lost:
            self.check_all_came()

    def play_on(self) -> None:
        while self.questions or self.answers or self.waiting:
            self.take(0)
            self.finish(0)
            self.hear(0)

    def check_all_came(self) -> None:
        assert sorted(number for _, number in self.delivered) == [*range(1, self.calls.sent + 1)]
        requests = [number for kind, number in self.delivered if kind == FrameKind.REQUEST]
        assert self.replies == dict.fromkeys(requests, 1)
        assert self.served.delivered == self.calls.sent
        assert self.calls.unanswered == {}
        assert not self.served.taken._ahead


def check_calls(seed: int) -> None:
    """A few calls over pipes that break, where little is large and little is kept."""
    draw = random.Random(seed)
    names = ["call", "take", "finish", "hear"] * 4 + ["receipt", "note", "arrive"] * 2
    names += ["cut"] * draw.choice((1, 3)) + ["part"] * (draw.random() < 0.2)
    steps = [(draw.choice(names), draw.randrange(1 << 10)) for _ in range(draw.randint(1, 50))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ledger, "LARGE", 64)
        patch.setattr(ledger, "RECEIPT_AFTER", 3)
        patch.setattr(ledger, "RECEIPT_AFTER_BYTES", 126)
        patch.setattr(ledger, "MOST_REPLIES_KEPT", draw.choice((1, 2, 1000)))
        patch.setattr(ledger, "MOST_BYTES_KEPT", draw.choice((64, 127, 100_000)))
        Game(lasting=draw.random() < 0.9).play(steps)


def check_mending(seed: int) -> None:
    """A broken pipe: attempts that fail, that say nothing, or that the peer agrees to."""
    draw = random.Random(seed)
    now, seconds = draw.choice((0.0, 1000.0)), draw.choice((0.0, 0.5, 3.0))
    epoch = ReconnectEpoch()
    epoch.broke(now, "eof")
    repair = Repair(Mending(epoch, seconds, now), now, now + seconds)
    while repair.goes_on():
        repair.happen(draw)


@dataclass
class Repair:
    """Plays a ``Mending``, and knows what it is to do."""

    mending: Mending
    now: float
    over: float
    due: float = field(init=False)
    pause: float = ledger.FIRST_PAUSE_SECONDS
    made: list[int] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)
    agreed: tuple[int, Taken] | None = None
    problem: str = ""
    hopeless: str = ""

    def __post_init__(self) -> None:
        self.due = self.now

    def goes_on(self) -> bool:
        """Checks what is to be done, and does it; False if that was the last."""
        patience = self.mending.patience(self.now)
        assert patience == max(0.0, min(self.due, self.over) - self.now)
        step = self.mending.step(self.now)
        assert step is self.expected()
        assert self.mending.hopeless == self.hopeless
        assert self.mending.agreed == self.agreed
        if step is Step.TRY:
            self.made.append(self.mending.begin(self.now))
            self.pending.append(self.made[-1])
            self.due = self.now + ledger.PATIENCE_SECONDS
            assert self.made == [*range(1, len(self.made) + 1)]
        for each in self.made:
            pends = each in self.pending and self.agreed is None
            assert self.mending.is_pending(each) == pends
        return step is not Step.GIVE_UP

    def expected(self) -> Step:
        if self.hopeless:
            return Step.GIVE_UP
        if self.agreed is not None:
            return Step.GO_ON
        if self.now >= self.over:
            problem = f": {self.problem}" if self.problem else ""
            self.hopeless = f"it was not opened again within {self.mending.seconds:g} s{problem}"
            return Step.GIVE_UP
        return Step.TRY if self.now >= self.due else Step.WAIT

    def happen(self, draw: random.Random) -> None:
        """Time passes, or something is heard of an attempt, or of one that is none of ours."""
        chance = draw.random()
        if chance < 0.5 or not self.made:
            self.now = min(max(self.now, self.due), self.over)
            if self.agreed is not None:
                self.hear_end(draw)
        elif chance < 0.8:
            self.now += draw.choice((0.0, 0.25))
            self.hear_failure(draw.choice([*self.made, 99]), draw.choice(("", "reset")))
        elif chance < 0.95:
            self.hear_agreement(draw.choice([*self.made, 99]))
        else:
            self.hear_end(draw)

    def hear_failure(self, attempt: int, problem: str) -> None:
        self.mending.failed(attempt, self.now, problem)
        if attempt not in self.pending:
            return
        self.pending.remove(attempt)
        self.problem = problem
        if not self.pending:
            self.due = self.now + self.pause
            self.pause = min(2 * self.pause, ledger.LONGEST_PAUSE_SECONDS)

    def hear_agreement(self, attempt: int) -> None:
        taken = Taken()
        first = attempt in self.pending and self.agreed is None
        assert self.mending.agree(attempt, taken) is first
        if first:
            self.agreed = attempt, taken

    def hear_end(self, draw: random.Random) -> None:
        for reason in draw.choices(("nobody listens", "somebody else answers"), k=2):
            self.mending.end(reason)
            self.hopeless = self.hopeless or reason
