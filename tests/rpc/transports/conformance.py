"""The promises of every transport, as tests: subclass :class:`TransportConformance`.

The subclass says how to make transports that can reach each other inside one
process; everything else is here. Only what ``rpc/transports/base.py`` promises
is tested, so nothing about order, and nothing about what memory tensors use.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import pytest
import torch

from rpc.errors import RpcError, UnknownWorkerError, WorkerLostError
from rpc.ids import Life
from rpc.transports.base import Frame, FrameKind, Patience, Peer, Transport
from rpc.worker_info import WorkerInfo

SECONDS = 20.0

_DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.bool, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
)

_SHAPES = (
    torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1),
    torch.arange(90_000.0).reshape(300, 300).t(),
    torch.tensor(2.5),
    torch.empty(0, 3),
    torch.empty(2, 0, 5).transpose(0, 2),
    torch.arange(8.0)[2:6],
    torch.arange(5.0).reshape(1, 5, 1),
    torch.zeros(64, 3, 17, 19).contiguous(memory_format=torch.channels_last),
)

Answer = Callable[["Worker", int, Frame], None]


def echo(worker: Worker, sender: int, frame: Frame) -> None:
    """Answers a request with what it carries."""
    worker.transport.send(sender, frame._replace(kind=FrameKind.REPLY))


@dataclass(slots=True)
class Worker:
    """One end: a transport, and all it was told.

    Args:
        transport: ours to start and close.
        info: who this is.
        answer: what to do with requests.
    """

    transport: Transport
    info: WorkerInfo
    answer: Answer = echo
    incarnation: int = 1
    address: bytes = b""
    changed: threading.Condition = field(default_factory=threading.Condition)
    received: list[tuple[int, Frame]] = field(default_factory=list)
    senders: set[Life] = field(default_factory=set)
    replies: dict[int, Frame] = field(default_factory=dict)
    lost: list[tuple[Life, str]] = field(default_factory=list)
    in_batch: list[bytes] = field(default_factory=list)
    closed: bool = False
    told_after_close: int = 0
    correlations: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def start(self) -> None:
        self.address = self.transport.start(self.info, self.incarnation, self)

    def peer(self) -> Peer:
        return Peer(self.info, self.incarnation, self.address)

    def deliver(self, sender: Life, frame: Frame, in_batch: bool = False) -> None:
        with self.changed:
            self.told_after_close += self.closed
            self.senders.add(sender)
            if in_batch:
                self.in_batch.append(frame.header)
            if frame.kind is FrameKind.REPLY:
                assert frame.correlation not in self.replies
                self.replies[frame.correlation] = frame
            else:
                self.received.append((sender.worker, frame))
            self.changed.notify_all()
        if frame.kind is FrameKind.REQUEST:
            with suppress(RpcError):
                self.answer(self, sender.worker, frame)

    def take_request(self, sender: Life, frame: Frame, in_batch: bool = False) -> None:
        self.deliver(sender, frame, in_batch)

    def take_reply(self, sender: Life, frame: Frame, in_batch: bool = False) -> None:
        self.deliver(sender, frame, in_batch)

    def patience(self, correlation: int) -> Patience:
        return Patience.WAITS

    def peer_lost(self, life: Life, reason: str) -> None:
        with self.changed:
            self.told_after_close += self.closed
            self.lost.append((life, reason))
            self.changed.notify_all()

    def until(self, condition: Callable[[], bool]) -> None:
        """Waits for what ``deliver`` and ``peer_lost`` bring about; fails after a while."""
        with self.changed:
            assert self.changed.wait_for(condition, SECONDS), "nothing happened"

    def notify(self, to: Worker, header: bytes, *tensors: torch.Tensor) -> None:
        self.transport.send(to.info.id, Frame(FrameKind.NOTICE, 0, header, b"", tensors))

    def ask(self, to: Worker, header: bytes, payload: bytes = b"", *tensors: torch.Tensor) -> int:
        """Sends a request; returns its correlation."""
        correlation = next(self.correlations)
        frame = Frame(FrameKind.REQUEST, correlation, header, payload, tensors)
        self.transport.send(to.info.id, frame)
        return correlation

    def reply(self, correlation: int) -> Frame:
        """Waits for a reply, the way a caller does."""

        def block() -> None:
            self.until(lambda: correlation in self.replies)

        self.transport.wait(lambda: correlation in self.replies, block)
        return self.replies.pop(correlation)

    def call(
        self, to: Worker, header: bytes, payload: bytes = b"", *tensors: torch.Tensor
    ) -> Frame:
        return self.reply(self.ask(to, header, payload, *tensors))

    def check_echoes(
        self, of: Worker, header: bytes, payload: bytes, tensors: Sequence[torch.Tensor]
    ) -> None:
        """Asks with all tensors, one in each request; each must come back as it was."""
        asked = [self.ask(of, header, payload, tensor) for tensor in tensors]
        for correlation, tensor in zip(asked, tensors, strict=True):
            found = self.reply(correlation)
            assert torch.equal(found.tensors[0], tensor)
            assert bytes(found.payload) == payload

    def close(self, flush_seconds: float = 2.0) -> None:
        if not self.closed:
            self.transport.close(flush_seconds)
            with self.changed:
                self.closed = True


def introduce(workers: Sequence[Worker]) -> None:
    """Makes each known to all, itself included."""
    for worker in workers:
        for other in workers:
            worker.transport.add_peer(other.peer())


def check_that_requests_wait(a: Worker, b: Worker, room: int) -> None:
    """``a`` asks ``b`` more often than there is room for: each answer lets one more leave."""
    b.answer = lambda *_: None
    count = 2 * room + 8
    through = threading.Event()

    def ask() -> None:
        for _ in range(count):
            a.ask(b, b"h")
        through.set()

    asking = threading.Thread(target=ask)
    asking.start()
    b.until(lambda: len(b.received) == room)
    assert not through.wait(0.1)
    assert len(b.received) == room
    for answered in range(count):
        b.until(lambda seen=answered: len(b.received) > seen)  # type: ignore[misc]
        assert len(b.received) <= answered + room
        echo(b, *b.received[answered])
    asking.join()
    assert through.is_set()


def _memory(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor in the order of its strides."""
    flat = tensor.as_strided((tensor.numel(),), (1,)).contiguous()
    return bytes(memoryview(flat.view(torch.uint8).numpy()))


def _same(found: torch.Tensor, sent: torch.Tensor) -> bool:
    return (
        found.dtype == sent.dtype
        and found.shape == sent.shape
        and found.stride() == sent.stride()
        and _memory(found) == _memory(sent)
    )


def _in_threads(count: int, work: Callable[[int], None]) -> None:
    """Runs ``work(0) ... work(count - 1)`` at the same time; raises what one raised."""
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]


class TransportConformance:
    """The tests. Subclasses provide :meth:`transports`."""

    @pytest.fixture
    def transports(self) -> Callable[[], Transport]:
        """Overridden: returns a maker of transports that can reach each other."""
        raise AssertionError("a subclass must override the fixture `transports`")

    @pytest.fixture
    def group(self, transports: Callable[[], Transport]) -> Iterator[Callable[[int], list[Worker]]]:
        """Makes groups of workers that know each other; closes them after the test."""
        made: list[Worker] = []

        def make(count: int) -> list[Worker]:
            workers = [Worker(transports(), WorkerInfo(f"worker{i}", i)) for i in range(count)]
            made.extend(workers)
            for worker in workers:
                worker.start()
            introduce(workers)
            return workers

        yield make
        _in_threads(len(made), lambda number: made[number].close(0.5))
        assert [worker.told_after_close for worker in made] == [0] * len(made)

    def test_a_notice_arrives_as_it_was_sent(self, group: Callable[[int], list[Worker]]) -> None:
        a, b = group(2)
        sent = Frame(FrameKind.NOTICE, 0, b"header", b"payload", (torch.arange(6.0),))
        a.transport.send(1, sent)
        b.until(lambda: bool(b.received))
        ((sender, frame),) = b.received
        assert (sender, frame.kind, frame.correlation) == (0, FrameKind.NOTICE, 0)
        assert (frame.header, bytes(frame.payload)) == (b"header", b"payload")
        assert _same(frame.tensors[0], sent.tensors[0])

    def test_empty_frames_arrive(self, group: Callable[[int], list[Worker]]) -> None:
        a, b = group(2)
        reply = a.call(b, b"")
        assert (reply.header, bytes(reply.payload), reply.tensors) == (b"", b"", ())

    def test_payloads_of_every_size_come_back(self, group: Callable[[int], list[Worker]]) -> None:
        a, b = group(2)
        for size in (1, 4095, 65536, 70001, 1 << 20, 9_000_001):
            payload = (bytes(range(256)) * (size // 256 + 1))[:size]
            for _ in range(2):
                assert bytes(a.call(b, b"h", payload).payload) == payload

    def test_bytearrays_and_memoryviews_are_payloads(
        self, group: Callable[[int], list[Worker]]
    ) -> None:
        a, _ = group(2)
        data = bytes(range(200))
        for payload in (bytearray(data), memoryview(data), memoryview(data * 3)[200:400]):
            frame = Frame(FrameKind.REQUEST, next(a.correlations), b"", payload)
            a.transport.send(1, frame)
            assert bytes(a.reply(frame.correlation).payload) == data

    def test_a_header_may_be_large(self, group: Callable[[int], list[Worker]]) -> None:
        a, b = group(2)
        header = bytes(range(256)) * 1200
        assert a.call(b, header, b"p").header == header

    def test_tensors_of_every_dtype_come_back(self, group: Callable[[int], list[Worker]]) -> None:
        a, b = group(2)
        for dtype in _DTYPES:
            for count in (3, 50_000):
                sent = (torch.arange(count) % 100).to(torch.float32).to(dtype)
                (found,) = a.call(b, b"h", b"", sent).tensors
                assert _same(found, sent), dtype

    def test_shapes_and_strides_arrive_as_they_are(
        self, group: Callable[[int], list[Worker]]
    ) -> None:
        a, b = group(2)
        for sent in _SHAPES:
            (found,) = a.call(b, b"h", b"", sent).tensors
            assert _same(found, sent), (sent.shape, sent.stride())

    def test_many_tensors_of_mixed_sizes_keep_their_places(
        self, group: Callable[[int], list[Worker]]
    ) -> None:
        a, b = group(2)
        sizes = [7, 100_000, 0, 9_000, 1, 40_000, 300, 20_000, 250_000, 33] * 3
        sent = [torch.full((size,), index, dtype=torch.int32) for index, size in enumerate(sizes)]
        for payload in (b"", b"small", b"x" * 100_000):
            reply = a.call(b, b"h", payload, *sent)
            assert bytes(reply.payload) == payload
            assert all(map(_same, reply.tensors, sent))

    def test_a_received_tensor_belongs_to_its_receiver(
        self, group: Callable[[int], list[Worker]]
    ) -> None:
        a, b, c = group(3)
        for count in (10, 100_000):
            sent = torch.ones(count)
            before = len(b.received), len(c.received)
            for _ in range(3):
                a.notify(b, b"h", sent)
                a.notify(c, b"h", sent)
            b.until(lambda before=before: len(b.received) == before[0] + 3)
            c.until(lambda before=before: len(c.received) == before[1] + 3)
            found = [f.tensors[0] for _, f in (b.received[before[0] :] + c.received[before[1] :])]
            for number, tensor in enumerate(found):
                tensor.fill_(number + 2)
            assert all(bool((t == n + 2).all()) for n, t in enumerate(found))
            assert bool((sent == 1).all())

    def test_received_tensors_can_be_kept(self, group: Callable[[int], list[Worker]]) -> None:
        a, b = group(2)
        kept = [
            a.call(b, b"h", b"", torch.full((60_000,), float(number))).tensors[0]
            for number in range(40)
        ]
        assert all(bool((tensor == n).all()) for n, tensor in enumerate(kept))

    def test_a_received_tensor_survives_the_transport(
        self, group: Callable[[int], list[Worker]]
    ) -> None:
        a, b = group(2)
        (found,) = a.call(b, b"h", b"", torch.full((200_000,), 3.0)).tensors
        a.close()
        b.close()
        found.add_(1)
        assert bool((found == 4).all())

    def test_frames_to_oneself_arrive(self, group: Callable[[int], list[Worker]]) -> None:
        (a,) = group(1)
        sent = torch.arange(100_000)
        reply = a.call(a, b"self", b"payload", sent)
        assert (reply.header, bytes(reply.payload)) == (b"self", b"payload")
        assert _same(reply.tensors[0], sent)
        reply.tensors[0].zero_()
        assert sent.any()

    def test_replies_find_their_requests_among_thousands(
        self, group: Callable[[int], list[Worker]]
    ) -> None:
        a, b = group(2)
        asked = {a.ask(b, b"%d" % number): number for number in range(2000)}
        for correlation, number in asked.items():
            assert a.reply(correlation).header == b"%d" % number

    def test_everything_arrives_exactly_once_from_many_threads_both_ways(
        self, group: Callable[[int], list[Worker]]
    ) -> None:
        workers = group(3)
        large = torch.zeros(20_000)

        def send(number: int) -> None:
            worker = workers[number % 3]
            for step in range(100):
                for to in workers:
                    tensors = (large,) if step % 50 == 0 else ()
                    worker.notify(to, b"%d %d" % (number, step), *tensors)

        _in_threads(6, send)
        expected = Counter((n % 3, b"%d %d" % (n, step)) for n in range(6) for step in range(100))
        for worker in workers:
            worker.until(lambda worker=worker: len(worker.received) >= 600)
            found = Counter((sender, frame.header) for sender, frame in worker.received)
            assert found == expected

    def test_many_threads_wait_for_their_own_replies(
        self, group: Callable[[int], list[Worker]]
    ) -> None:
        a, b = group(2)

        def calls(number: int) -> None:
            for step in range(50):
                header = b"%d %d" % (number, step)
                assert a.call(b, header).header == header

        _in_threads(8, calls)

    def test_wait_returns_at_once_when_done(self, group: Callable[[int], list[Worker]]) -> None:
        (a,) = group(1)
        a.transport.wait(lambda: True, lambda: None)

    def test_wait_returns_when_something_else_makes_it_done(
        self, group: Callable[[int], list[Worker]]
    ) -> None:
        a, b = group(2)
        a.call(b, b"connect")
        happened = threading.Event()

        def happen() -> None:
            happened.set()
            a.transport.wake()

        timer = threading.Timer(0.05, happen)
        timer.start()
        a.transport.wait(happened.is_set, happened.wait)
        timer.join()
        assert happened.is_set()

    def test_a_request_that_blocks_holds_up_no_other(
        self, group: Callable[[int], list[Worker]]
    ) -> None:
        a, b = group(2)
        if b.transport.inline_handlers < 6:
            pytest.skip("this transport lends too few threads to handlers")
        released = threading.Event()

        def answer(worker: Worker, sender: int, frame: Frame) -> None:
            if frame.header == b"block":
                assert released.wait(SECONDS)
            elif frame.header == b"release":
                released.set()
            echo(worker, sender, frame)

        b.answer = answer
        blocked = [a.ask(b, b"block") for _ in range(5)]
        assert a.call(b, b"quick").header == b"quick"
        a.call(b, b"release")
        for correlation in blocked:
            assert a.reply(correlation).header == b"block"

    def test_handlers_that_call_back_and_forth_do_not_deadlock(
        self, group: Callable[[int], list[Worker]]
    ) -> None:
        a, b = group(2)
        if b.transport.inline_handlers < 20:
            pytest.skip("this transport lends too few threads to handlers")

        def countdown(worker: Worker, sender: int, frame: Frame) -> None:
            left = int(frame.header)
            if left:
                other = a if worker is b else b
                assert worker.call(other, b"%d" % (left - 1)).header == b"done"
            worker.transport.send(sender, frame._replace(kind=FrameKind.REPLY, header=b"done"))

        a.answer = b.answer = countdown
        assert a.call(b, b"20").header == b"done"

    def test_two_that_flood_each_other_do_not_deadlock(
        self, group: Callable[[int], list[Worker]]
    ) -> None:
        a, b = group(2)
        payload = b"x" * 300_000

        def flood(number: int) -> None:
            one, other = ((a, b), (b, a))[number % 2]
            asked = [one.ask(other, b"h", payload) for _ in range(30)]
            for correlation in asked:
                assert len(one.reply(correlation).payload) == len(payload)

        _in_threads(4, flood)

    def test_an_unknown_worker_is_refused(self, group: Callable[[int], list[Worker]]) -> None:
        (a,) = group(1)
        with pytest.raises(UnknownWorkerError):
            a.transport.send(7, Frame(FrameKind.NOTICE, 0, b""))

    def test_the_end_of_a_peer_is_reported_once_and_its_frames_before_that(
        self, group: Callable[[int], list[Worker]]
    ) -> None:
        a, b, c = group(3)
        a.call(b, b"h")
        b.call(a, b"h")
        a.call(c, b"h")
        b.notify(a, b"last words")
        b.close()
        a.until(lambda: bool(a.lost))
        assert [life for life, _ in a.lost] == [Life(1, b.incarnation)]
        assert (1, b"last words") in [(sender, frame.header) for sender, frame in a.received]
        with pytest.raises(WorkerLostError, match="worker1"):
            a.notify(b, b"h")
        assert a.call(c, b"still there").header == b"still there"

    def test_requests_under_way_end_in_a_reply_or_a_loss(
        self, group: Callable[[int], list[Worker]]
    ) -> None:
        a, b = group(2)
        b.answer = lambda *_: None
        asked = a.ask(b, b"never answered")
        b.until(lambda: bool(b.received))
        b.close()
        a.until(lambda: bool(a.lost))
        assert asked not in a.replies

    def test_a_removed_peer_is_unknown_and_not_lost(
        self, group: Callable[[int], list[Worker]]
    ) -> None:
        a, b, c = group(3)
        a.call(b, b"h")
        a.transport.remove_peer(1)
        with pytest.raises(UnknownWorkerError):
            a.notify(b, b"h")
        assert a.call(c, b"h").header == b"h"
        assert a.lost == []
        a.transport.remove_peer(1)

    def test_a_peer_comes_back_under_a_higher_incarnation(
        self, transports: Callable[[], Transport], group: Callable[[int], list[Worker]]
    ) -> None:
        a, b = group(2)
        a.call(b, b"h")
        b.close()
        a.until(lambda: bool(a.lost))
        again = Worker(transports(), b.info, incarnation=2)
        try:
            again.start()
            again.transport.add_peer(a.peer())
            a.transport.add_peer(again.peer())
            assert a.call(again, b"hello again").header == b"hello again"
            assert again.call(a, b"and back").header == b"and back"
            assert a.senders == {Life(b.info.id, 1), Life(b.info.id, 2)}
        finally:
            again.close()

    def test_closing_flushes_what_was_accepted(self, group: Callable[[int], list[Worker]]) -> None:
        a, b = group(2)
        for number in range(300):
            a.notify(b, b"%d" % number, torch.zeros(10_000 if number % 10 == 0 else 10))
        a.close(SECONDS)
        b.until(lambda: len(b.received) == 300)
        assert {frame.header for _, frame in b.received} == {b"%d" % n for n in range(300)}

    def test_closing_amid_traffic_ends_for_everyone(
        self, group: Callable[[int], list[Worker]]
    ) -> None:
        workers = group(3)
        stop = threading.Event()

        def traffic(number: int) -> None:
            if number == 3:
                workers[0].until(lambda: len(workers[0].received) > 200)
                workers[1].close(0.2)
                stop.set()
                return
            with suppress(RpcError):
                while not stop.wait(0.0005):  # else queues grow that take long to send
                    for to in workers:
                        workers[number].notify(to, b"h")

        _in_threads(4, traffic)

    def test_closing_twice_and_closing_unused_are_fine(
        self, group: Callable[[int], list[Worker]]
    ) -> None:
        a, _ = group(2)
        a.transport.close(0)
        a.transport.close(1)
