"""A link places, announces and takes back the parts of one frame."""

from __future__ import annotations

import errno
import os
from collections import Counter

import pytest
import torch

from rpc.transports.base import Frame, FrameKind, Unreceived
from rpc.transports.host.copying import CopyThreads
from rpc.transports.host.frame_table import Item, Placement, look_at
from rpc.transports.host.segments import (
    SHARED_FROM,
    Budget,
    Copy,
    ReceivedSegments,
    SendPool,
    SharedSlot,
)
from rpc.transports.tensorwire.channel import QueuedFrame
from rpc.transports.tensorwire.device_maps import PeerDeviceMap
from rpc.transports.tensorwire.framing import SegmentOffered, WireKind, pack_pair
from rpc.transports.tensorwire.link import Link, Resources
from rpc.transports.tensorwire.receive_buffers import ReceiveBuffers

LIMIT = 1 << 30
AWAKE_SECONDS = 100e-6
KB = 1 << 10


class Main:
    """The writing half of a main channel; notes what is sent."""

    def __init__(self, told: list[str]) -> None:
        self.told = told

    def send(self, frame: object) -> None:
        self.told.append("sent")

    def send_small(self, *frame: object) -> None:
        self.told.append("sent")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lists what happens, in order; there is always room in shared memory."""
    order: list[str] = []

    def put(pool: SendPool, address: int, length: int, copy: Copy) -> SharedSlot:
        copy(0, address, length)
        return SharedSlot(1, 4096)

    def copy(copier: CopyThreads, target: int, source: int, length: int) -> None:
        order.append(f"copied {length >> 10} KB to {target >> 10}")

    monkeypatch.setattr("rpc.transports.tensorwire.link._ANEW_SECONDS", 0.0)
    monkeypatch.setattr(SendPool, "put", put)
    monkeypatch.setattr(CopyThreads, "copy", copy)
    return order


def link(told: list[str], *, same_host: bool = True) -> Link:
    resources = Resources(
        Budget(LIMIT), ReceiveBuffers(LIMIT), LIMIT, CopyThreads("test", 0), AWAKE_SECONDS
    )
    made = Link(resources, "bob", PeerDeviceMap("bob", {}), same_host=same_host)
    made.main = Main(told)  # type: ignore[assignment]
    made.announce = lambda: told.append("announced")
    return made


def send(made: Link, *sizes: int) -> None:
    tensors = tuple(torch.zeros(size, dtype=torch.uint8) for size in sizes)
    frame = Frame(FrameKind.REQUEST, 1, b"header", b"payload", tensors)
    made.send(frame, [look_at(tensor) for tensor in tensors])


def test_large_tensors_are_announced_before_they_are_copied(told: list[str]) -> None:
    send(link(told), 100, 64 * KB, 192 * KB)
    assert told == ["announced", "copied 64 KB to 0", "copied 192 KB to 0", "sent"]


def test_very_large_ones_are_announced_when_little_is_left_to_copy(told: list[str]) -> None:
    send(link(told), 1024 * KB)
    assert told == ["copied 768 KB to 0", "announced", "copied 256 KB to 768", "sent"]


def test_what_is_left_is_what_is_left_of_all(told: list[str]) -> None:
    send(link(told), 1024 * KB, 192 * KB, 64 * KB)
    assert told == [
        *("copied 1024 KB to 0", "announced", "copied 192 KB to 0", "copied 64 KB to 0", "sent")
    ]
    told.clear()
    send(link(told), 1024 * KB, 192 * KB)
    assert told == [
        *("copied 960 KB to 0", "announced", "copied 64 KB to 960", "copied 192 KB to 0", "sent")
    ]


def test_a_large_payload_is_announced_too(told: list[str]) -> None:
    link(told).send(Frame(FrameKind.REQUEST, 1, b"header", bytes(64 * KB)))
    assert told == ["announced", "copied 64 KB to 0", "sent"]


def test_small_frames_are_not_announced(told: list[str]) -> None:
    send(link(told), 100, SHARED_FROM - 1)
    assert told == ["sent"]


def test_shared_memory_of_a_message_that_cannot_be_sent_is_free_again(told: list[str]) -> None:
    made = link(told)
    taken: list[SharedSlot] = []
    made._pool.take_back = taken.extend  # type: ignore[union-attr,method-assign]
    with pytest.raises(RuntimeError, match="data pointer"):
        send_without_memory(made, torch.ones(SHARED_FROM))
    assert taken == [SharedSlot(1, 4096)]
    assert "sent" not in told


@pytest.mark.parametrize(
    ("error", "free"), [(MemoryError, [SharedSlot(1, 4096)]), (KeyboardInterrupt, [])]
)
def test_so_is_that_of_one_which_the_channel_does_not_take(
    told: list[str],
    monkeypatch: pytest.MonkeyPatch,
    error: type[BaseException],
    free: list[SharedSlot],
) -> None:
    made = link(told)
    taken: list[SharedSlot] = []
    made._pool.take_back = taken.extend  # type: ignore[union-attr,method-assign]

    def refuse(*_: object) -> None:
        raise error  # an interrupt may come when it has been taken

    monkeypatch.setattr(Main, "send_small", refuse)
    with pytest.raises(error):
        send(made, SHARED_FROM)
    assert taken == free


@pytest.mark.parametrize("problem", ["no memory for a transfer", ""])
def test_what_cannot_be_taken_in_gives_its_shared_memory_back(
    monkeypatch: pytest.MonkeyPatch, problem: str
) -> None:
    made, claimed = link([]), Counter[int]()
    monkeypatch.setattr(made._segments, "array", lambda _, at, length: claim(claimed, at, length))
    tensors = [Item(Placement.SHARED, 1, at, 8, torch.int64, (1,), (1,), "") for at in range(4)]
    tensors[1] = tensors[1]._replace(device="no device of this name")
    items = [Item(Placement.INLINE, 0, 0, 0, None, (), (), ""), *tensors]
    frame = Frame(FrameKind.REQUEST, 1, b"header", b"")
    taken_in = made._assemble(frame, items, {}, problem)
    assert isinstance(taken_in.payload, Unreceived)
    assert claimed == {0: 1, 1: 1, 2: 1, 3: 1}


def claim(claimed: Counter[int], at: int, length: int) -> bytearray:
    """Notes that a slot was claimed; what is claimed twice would be given back twice."""
    claimed[at] += 1
    return bytearray(length)


def send_without_memory(made: Link, first: torch.Tensor) -> None:
    """Sends a tensor, and after it one that looks like any other, but has no memory."""

    def send_both(second: torch.Tensor) -> None:
        frame = Frame(FrameKind.REQUEST, 1, b"header", b"payload", (first, second))
        made.send(frame, [look_at(tensor) for tensor in frame.tensors])

    torch.vmap(send_both)(torch.ones(2, SHARED_FROM))


class Bulk:
    """The writing half of a bulk channel; keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[QueuedFrame] = []

    def send(self, frame: QueuedFrame) -> None:
        self.sent.append(frame)


@pytest.mark.parametrize("error", [errno.ENOMEM, errno.EPERM])
def test_a_segment_that_cannot_be_mapped_is_refused_with_the_reason_which_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: int
) -> None:
    made, bulk = link([]), Bulk()

    def refuse(*_: object) -> None:
        raise OSError(error, "it is refused")

    monkeypatch.setattr(ReceivedSegments, "add", refuse)
    for number in (3, 4):
        descriptor = os.memfd_create("test")
        made.bulk_event(SegmentOffered(number, 4096), bulk, [descriptor])  # type: ignore[arg-type]
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(descriptor)
    answers = [(frame.kind, frame.correlation, frame.header) for frame in bulk.sent]
    refused = WireKind.SEGMENT_REFUSED
    assert answers == [(refused, 3, pack_pair(error, 0)), (refused, 4, pack_pair(error, 0))]
    (record,) = caplog.records
    assert "it is refused" in record.getMessage()


def test_a_segment_whose_descriptor_got_lost_is_refused_for_want_of_descriptors(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made, bulk = link([]), Bulk()
    made.bulk_event(SegmentOffered(3, 4096), bulk, [])  # type: ignore[arg-type]
    (answer,) = bulk.sent
    assert (answer.kind, answer.correlation) == (WireKind.SEGMENT_REFUSED, 3)
    assert answer.header == pack_pair(errno.EMFILE, 0)
    assert "its file did not arrive" in caplog.text


def test_what_was_announced_just_now_is_not_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now, order = [100.0], list[str]()
    monkeypatch.setattr("rpc.transports.tensorwire.link.time.perf_counter", lambda: now[0])
    made = link(order)
    made.tell_soon()
    now[0] += 40e-6
    made.tell_soon()
    assert order == ["announced"]
    now[0] += 40e-6
    made.tell_soon()
    assert order == ["announced"] * 2


def test_whoever_was_heard_of_just_now_is_awake(monkeypatch: pytest.MonkeyPatch) -> None:
    now, order = [100.0], list[str]()
    monkeypatch.setattr("rpc.transports.tensorwire.link.time.perf_counter", lambda: now[0])
    made = link(order)
    made.heard_at = now[0]
    now[0] += 0.9 * AWAKE_SECONDS
    made.tell_soon()
    assert order == []
    now[0] += 0.2 * AWAKE_SECONDS
    made.tell_soon()
    assert order == ["announced"]


def test_nothing_is_announced_where_nothing_is_copied(told: list[str]) -> None:
    made = link(told, same_host=False)
    send(made, SHARED_FROM // 4, SHARED_FROM // 4)
    assert told == ["sent"]
