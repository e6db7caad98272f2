"""The thread that waits reads replies, or the background thread when none does."""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rpc.constants import DEFAULT_BUSY_POLL_SEC
from rpc.transports.base import Frame
from rpc.transports.host.copying import CopyThreads
from rpc.transports.host.segments import Budget
from rpc.transports.tensorwire.channel import Sender
from rpc.transports.tensorwire.device_maps import PeerDeviceMap
from rpc.transports.tensorwire.framing import pack_fixed
from rpc.transports.tensorwire.link import Link, Resources
from rpc.transports.tensorwire.main_reader import MainReader
from rpc.transports.tensorwire.receive_buffers import ReceiveBuffers
from rpc.transports.tensorwire.replies import ChannelEvents, ReplySide
from tests.waiting import until

SECONDS = 20.0


class Side:
    """A reply side with one channel, whose other end the test writes to."""

    def __init__(
        self,
        *outstanding: Callable[[], int],
        reading: Callable[[socket.socket], socket.socket] = lambda sock: sock,
    ) -> None:
        self.replies = ReplySide("test-replies", DEFAULT_BUSY_POLL_SEC, *outstanding)
        self.replies.start()
        mine, self.other = socket.socketpair()
        self.mine = reading(mine)
        self.mine.setblocking(False)
        link = Link(
            Resources(Budget(0), ReceiveBuffers(0), 1 << 30, CopyThreads("test", 0), 0.0),
            "peer",
            PeerDeviceMap("peer", {}),
            same_host=False,
        )
        self.link = link
        self.changed = threading.Condition()
        self.arrived: dict[int, int] = {}
        self.ended: list[str] = []
        self.sequence = 0
        self.sender = Sender(self.mine, link.unsent, lambda wanted: None)
        reader = MainReader(
            self.mine, link, 1 << 30, ReceiveBuffers(0), self.sender, lambda _: None
        )
        self.replies.add_main(
            self.mine, reader, ChannelEvents(self.deliver, lambda: None, self.end)
        )

    def deliver(self, frame: Frame) -> None:
        with self.changed:
            self.arrived[frame.correlation] = threading.get_ident()
            self.changed.notify_all()

    def end(self, reason: str) -> None:
        self.replies.remove(self.mine)
        with self.changed:
            self.ended.append(reason)
            self.changed.notify_all()

    def reply(self, correlation: int) -> None:
        sequence = self.sequence
        self.sequence += 1  # before sending: what is sent may be answered by another reply
        self.other.sendall(pack_fixed(2, correlation, sequence, 0, 0, 0))

    def block(self, correlation: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: correlation in self.arrived, SECONDS)

    def wait(self, correlation: int) -> None:
        self.replies.wait(lambda: correlation in self.arrived, lambda: self.block(correlation))

    def hold(self, correlation: int) -> None:
        self.sender.hold_small(1, correlation, b"", b"", b"")
        self.replies.flush_soon(self.sender)

    def close(self) -> None:
        self.replies.close()
        self.mine.close()
        self.other.close()


@pytest.fixture
def side() -> Iterator[Side]:
    made = Side()
    yield made
    made.close()


def test_without_a_thread_it_is_said_why_and_closing_joins_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    replies = ReplySide("test-replies", DEFAULT_BUSY_POLL_SEC)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            replies.start()
    replies.close()


def test_replies_are_read_when_nobody_waits(side: Side) -> None:
    for number in range(100):
        side.reply(number)
    side.block(99)
    assert threading.get_ident() not in side.arrived.values()


class Failing(socket.socket):
    """Fails when it is read, as code that reads it may, as long as there are errors."""

    def __init__(self, sock: socket.socket, errors: list[BaseException]) -> None:
        super().__init__(fileno=sock.detach())
        self.errors = errors

    def recv(self, *arguments: int) -> bytes:
        if self.errors:
            raise self.errors.pop()
        return super().recv(*arguments)


@pytest.mark.parametrize("error", [RecursionError("too deep"), SystemExit("not for this")])
def test_a_channel_that_fails_does_not_end_the_reading(
    caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    errors = [error] * 2
    side = Side(reading=lambda sock: Failing(sock, errors))
    side.reply(1)
    until(lambda: not errors)
    side.reply(2)
    side.block(1)
    side.block(2)
    side.close()
    assert str(error) in caplog.text


@pytest.mark.interpreted
def test_a_socket_that_takes_bytes_again_is_told_although_a_signal_came_just_then(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = threading.Event()
    mine, other = socket.socketpair()
    reader = MainReader(mine, side.link, 1 << 30, ReceiveBuffers(0), side.sender, lambda _: None)
    mine.setblocking(False)
    wait = side.replies._poller.wait

    def interrupted(seconds: float) -> list[tuple[int, int]]:
        ready = wait(seconds)
        if any(events & select.EPOLLOUT for _, events in ready):
            raise KeyboardInterrupt
        return ready

    def end(_: str) -> None:
        side.replies.remove(mine)

    with mine, other:
        side.replies.add_main(mine, reader, ChannelEvents(side.deliver, told.set, end))
        monkeypatch.setattr(side.replies._poller, "wait", interrupted)
        timer = threading.Timer(0.05, side.replies.watch_writable, (mine, True))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            side.replies.wait(lambda: False, lambda: None)
        timer.join()
        assert told.is_set()
        side.replies.remove(mine)


def test_a_waiting_thread_reads_its_reply_itself(side: Side) -> None:
    mine = 0
    for number in range(50):
        timer = threading.Timer(0.005, side.reply, (number,))
        timer.start()
        side.wait(number)
        timer.join()
        mine += side.arrived[number] == threading.get_ident()
    assert mine > 25


def test_what_the_reading_thread_delivers_to_itself_wakes_nobody(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, plain = threading.Event(), side.deliver
    woken: list[int] = []

    def done() -> bool:
        began.set()
        return 1 in side.arrived

    def deliver(frame: Frame) -> None:
        plain(frame)
        side.replies.wake()

    side.replies._channels[side.mine.fileno()]._deliver = deliver
    monkeypatch.setattr(os, "eventfd_write", lambda wake_up, _: woken.append(wake_up))
    waiter = threading.Thread(target=side.replies.wait, args=(done, lambda: side.block(1)))
    waiter.start()
    assert began.wait(SECONDS)
    side.reply(1)
    waiter.join(SECONDS)
    monkeypatch.undo()
    assert side.arrived[1] == waiter.ident
    assert not woken


def test_every_waiter_gets_its_reply_whoever_reads_it(side: Side) -> None:
    threads = [threading.Thread(target=side.wait, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for number in reversed(range(8)):
        side.reply(number)
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive()


def test_hammering_from_many_threads_loses_no_wake_up(side: Side) -> None:
    def calls(thread: int) -> None:
        for step in range(200):
            number = thread * 1000 + step
            with lock:
                side.reply(number)
            side.wait(number)

    lock = threading.Lock()
    threads = [threading.Thread(target=calls, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive()
    assert len(side.arrived) == 800


def test_held_requests_leave_although_nobody_waits_or_replies(side: Side) -> None:
    side.other.settimeout(SECONDS)
    size = len(pack_fixed(1, 0, 0, 0, 0, 0))
    for number in range(3):  # the first wakes the thread, the others find the thread ticking
        side.hold(number)
        assert len(side.other.recv(size, socket.MSG_WAITALL)) == size


def test_held_requests_leave_when_they_are_many(side: Side) -> None:
    side.replies._ticking = True  # so that nothing wakes the thread
    side.other.setblocking(False)
    for number in range(15):
        side.hold(number)
    with pytest.raises(BlockingIOError):
        side.other.recv(1)
    side.hold(15)
    assert len(side.other.recv(1 << 16)) == 16 * len(pack_fixed(1, 0, 0, 0, 0, 0))


def test_held_requests_leave_before_a_thread_waits_and_after_replies_were_read(side: Side) -> None:
    side.replies._ticking = True
    side.other.settimeout(SECONDS)
    side.hold(1)
    waiter = threading.Thread(target=side.wait, args=(1,))
    waiter.start()
    assert side.other.recv(1 << 16)
    side.hold(2)
    side.reply(1)
    waiter.join(SECONDS)
    assert side.other.recv(1 << 16)


def test_a_callback_on_the_background_thread_may_wait_for_a_reply(side: Side) -> None:
    nested = threading.Event()
    plain = side.deliver

    def deliver(frame: Frame) -> None:
        plain(frame)
        if frame.correlation == 1:
            side.reply(2)
            side.wait(2)
            nested.set()

    side.replies._channels[side.mine.fileno()]._deliver = deliver
    side.reply(1)
    assert nested.wait(SECONDS)


def test_the_end_of_a_channel_is_told_once(side: Side) -> None:
    side.reply(1)
    side.other.close()
    with side.changed:
        assert side.changed.wait_for(lambda: bool(side.ended), SECONDS)
    assert 1 in side.arrived
    assert len(side.ended) == 1


def test_closing_releases_a_waiting_thread(side: Side) -> None:
    released = threading.Event()
    began = threading.Event()

    def done() -> bool:
        began.set()
        return released.is_set()

    waiter = threading.Thread(target=side.replies.wait, args=(done, released.wait))
    waiter.start()
    assert began.wait(SECONDS)
    side.replies.close()
    released.set()
    waiter.join(SECONDS)
    assert not waiter.is_alive()
    side.replies = ReplySide("unused", DEFAULT_BUSY_POLL_SEC)


def test_who_waits_after_the_end_blocks_as_asked(side: Side) -> None:
    side.replies.close()
    blocked: list[bool] = []
    side.replies.wait(lambda: False, lambda: blocked.append(True))
    assert blocked == [True]
    side.replies = ReplySide("unused", DEFAULT_BUSY_POLL_SEC)


def test_the_reading_thread_may_close(side: Side) -> None:
    began, plain, errors = threading.Event(), side.deliver, list[BaseException]()

    def done() -> bool:
        began.set()
        return 1 in side.arrived

    def deliver(frame: Frame) -> None:
        side.replies.close()
        plain(frame)

    def wait() -> None:
        try:
            side.replies.wait(done, lambda: side.block(1))
        except BaseException as error:
            errors.append(error)

    side.replies._channels[side.mine.fileno()]._deliver = deliver
    waiter = threading.Thread(target=wait)
    waiter.start()
    assert began.wait(SECONDS)
    side.reply(1)
    waiter.join(SECONDS)
    assert side.arrived[1] == waiter.ident
    assert errors == []
    side.replies = ReplySide("unused", DEFAULT_BUSY_POLL_SEC)


class Epoll:
    """An epoll that does something just after it was told to look at other descriptors."""

    def __init__(self, real: select.epoll, then: Callable[[int], None]) -> None:
        self._real, self._then = real, then

    def modify(self, descriptor: int, events: int) -> None:
        self._real.modify(descriptor, events)
        self._then(events)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def watched(side: Side, then: Callable[[int], None]) -> None:
    side.replies._background = Epoll(side.replies._background, then)  # type: ignore[assignment]


def test_a_leader_that_goes_is_not_woken_by_the_thread_that_takes_over(side: Side) -> None:
    rang: list[bool] = []

    def take_over(events: int) -> None:
        if events:  # the background thread may run now, as if the leader had lost the interpreter
            thread = threading.Thread(target=side.replies.wake)
            thread.start()
            thread.join(SECONDS)
            bell = side.replies._wake_up.descriptor
            rang.append(bool(select.select([bell], [], [], 0)[0]))

    watched(side, take_over)
    for correlation in range(3):
        side.reply(correlation)
        side.wait(correlation)
    assert rang
    assert not any(rang)


def test_a_wait_within_a_wait_leaves_the_channels_to_the_leader(side: Side) -> None:
    armed: list[int] = []
    watched(side, armed.append)
    inner: list[list[int]] = []

    def done() -> bool:
        if not inner:
            inner.append([])
            side.reply(1)
            side.replies.wait(lambda: 1 in side.arrived, lambda: side.block(1))
            inner.append(armed.copy())
            side.reply(2)
        return 2 in side.arrived

    side.replies.wait(done, lambda: side.block(2))
    assert inner[1] == [0], "silenced once, by the outer wait, and not armed by the inner one"
    assert armed == [0, select.EPOLLIN]


class CountingEpoll:
    """An epoll that counts how often it is told what to look at."""

    def __init__(self, real: select.epoll) -> None:
        self._real = real
        self.told = 0

    def modify(self, descriptor: int, events: int) -> None:
        self.told += 1
        self._real.modify(descriptor, events)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


@pytest.fixture
def lazy() -> Iterator[tuple[Side, CountingEpoll, list[int]]]:
    """A side that is told how many replies are to come, and how often its epoll is told."""
    to_come: list[int] = []
    side = Side(lambda: len(to_come))
    counted = CountingEpoll(side.replies._background)
    side.replies._background = counted  # type: ignore[assignment]
    yield side, counted, to_come
    side.close()


Lazy = tuple[Side, CountingEpoll, list[int]]


def test_waits_one_after_the_other_do_not_tell_epoll_each_time(lazy: Lazy) -> None:
    side, counted, _ = lazy
    for correlation in range(200):
        side.reply(correlation)
        side.wait(correlation)
    assert counted.told <= 20  # a busy machine may take longer than the pause between two looks


def test_a_reply_that_nobody_waits_for_is_read_at_once_if_it_was_announced(lazy: Lazy) -> None:
    side, counted, _ = lazy
    side.reply(0)
    side.wait(0)
    assert not side.replies.attended
    side.replies.attend()
    assert side.replies.attended
    told = counted.told
    side.reply(1)
    side.block(1)
    assert counted.told == told


def test_a_leader_that_goes_lets_others_replies_be_read(lazy: Lazy) -> None:
    side, _, to_come = lazy
    to_come.append(1)
    side.reply(0)
    side.wait(0)
    assert side.replies.attended
    side.reply(1)
    side.block(1)


def test_what_comes_unannounced_is_read_some_time(lazy: Lazy) -> None:
    side, _, _ = lazy
    side.reply(0)
    side.wait(0)
    side.reply(1)
    side.block(1)


def test_who_waits_while_another_leads_is_not_forgotten(lazy: Lazy) -> None:
    side, _, _ = lazy
    leads = threading.Event()

    def done() -> bool:
        leads.set()
        return 0 in side.arrived

    leader = threading.Thread(target=side.replies.wait, args=(done, lambda: side.block(0)))
    leader.start()
    assert leads.wait(SECONDS)
    other = threading.Thread(target=side.wait, args=(1,))
    other.start()
    until(lambda: side.replies._to_be_attended)
    side.reply(0)
    leader.join(SECONDS)
    assert side.replies.attended
    side.reply(1)
    other.join(SECONDS)
    assert not other.is_alive()
