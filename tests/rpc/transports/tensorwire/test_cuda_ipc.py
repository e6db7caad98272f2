"""Tensors go from device to device on one host, or through host memory where that cannot be."""

from __future__ import annotations

import contextlib
import errno
import os
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rpc.errors import FrameError
from rpc.transports.base import Frame, FrameKind, Unreceived
from rpc.transports.host.copying import CopyThreads
from rpc.transports.host.frame_table import HOST_PLACEMENTS, Placement, look_at, unpack_table
from rpc.transports.host.segments import Budget
from rpc.transports.tensorwire.channel import QueuedFrame
from rpc.transports.tensorwire.cuda_ipc import (
    LENT_FROM,
    CudaMemory,
    DeviceMemory,
    DeviceOffer,
    Handle,
    LentMemory,
    accept,
    borrow,
)
from rpc.transports.tensorwire.device_maps import PeerDeviceMap
from rpc.transports.tensorwire.framing import DeviceAnswered, DeviceOffered, WireKind
from rpc.transports.tensorwire.link import Link, Resources
from rpc.transports.tensorwire.receive_buffers import ReceiveBuffers
from tests.fake_streams import Gpus, GpuTensor, Stream, gpus

__all__ = ["gpus"]

GPU0, GPU1 = torch.device("cuda:0"), torch.device("cuda:1")
LIMIT = 1 << 30
ELEMENTS = LENT_FROM // 4


class Card:
    """Device memory for two workers that see the same devices: what torch and the driver do."""

    def __init__(self, gpus: Gpus) -> None:
        self.gpus = gpus
        self.needed: dict[bytes, int] = {}
        self.copied_on: list[tuple[Stream, Stream]] = []
        self.refuses_to_lend = self.refuses_to_open = self.is_full = False
        self.now = 0.0
        self._memory: dict[bytes, torch.Tensor] = {}

    def uuid(self, index: int) -> bytes:
        return f"GPU-{index}".encode()

    def token_on(self, token: torch.Tensor, device: torch.device) -> torch.Tensor:
        return self.gpus.tensor(token, device.index)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.is_full:
            raise torch.OutOfMemoryError("the device is full")
        return self.gpus.tensor(tensor.data.clone(), tensor.device.index)

    def share(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        if self.refuses_to_lend:
            raise RuntimeError("no more events")
        name = f"memory {len(self._memory)}".encode()
        self._memory[name] = tensor
        self.needed[name] = 1
        return 0, name, tensor.nbytes, 0, name, 7, b"event", True

    def open(
        self,
        handle: Handle,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        device: str,
    ) -> torch.Tensor:
        if self.refuses_to_open:
            self.release(handle.counter, handle.counter_offset)
            raise RuntimeError("invalid device context")
        lent = self._memory[handle.memory]
        assert lent.nbytes == handle.size
        self.release(handle.counter, handle.counter_offset)
        values = torch.empty_strided(shape, strides, dtype=dtype, device="cpu")
        values.copy_(lent.as_subclass(torch.Tensor))
        if torch.device(device).type == "cpu":
            return values
        return self.gpus.tensor(values, torch.device(device).index)

    def release(self, name: bytes, offset: int) -> None:
        assert offset == 7
        self.needed[name] -= 1


@pytest.fixture
def card(gpus: Gpus) -> Card:
    return Card(gpus)


@contextlib.contextmanager
def another_process(monkeypatch: pytest.MonkeyPatch) -> Any:
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        yield


def try_it(offer: DeviceOffer, memory: DeviceMemory) -> None:
    """Accepts an offer, and closes its file."""
    try:
        accept(offer.descriptor, offer.size, memory)
    finally:
        os.close(offer.descriptor)


def offer_in_vain(lent: LentMemory, device: torch.device) -> None:
    """Offers a device to a peer that never looks; what it would answer is for others to say."""
    offer = lent.offer(device)
    assert offer is not None
    os.close(offer.descriptor)


HANDLE = Handle(b"GPU-1", b"memory 0", b"/counter", b"event", 1 << 40, 512, 7, True)


class TestHandle:
    def test_it_arrives_as_it_was_sent_whatever_stands_behind_it(self) -> None:
        assert Handle.decode(memoryview(HANDLE.encode() + b"more")) == HANDLE

    @given(st.integers(0, len(HANDLE.encode()) - 1))
    def test_what_ends_early_is_refused(self, length: int) -> None:
        with pytest.raises(FrameError, match="ends early"):
            Handle.decode(HANDLE.encode()[:length])

    @given(st.binary(max_size=100))
    def test_any_bytes_are_a_handle_or_refused(self, data: bytes) -> None:
        with contextlib.suppress(FrameError):
            Handle.decode(data)

    def test_a_tensor_that_is_larger_than_the_memory_is_refused_before_that_is_opened(self) -> None:
        small = HANDLE._replace(size=100).encode()
        for shape, strides in [((26,), (1,)), ((5, 5), (6, 1)), ((0,), (1,))]:
            with pytest.raises(FrameError, match="in 100 bytes of memory"):
                borrow(small, torch.float32, shape, strides, "cuda:0", CudaMemory())


class TestLending:
    def test_nothing_is_lent_before_the_peer_has_read_what_was_offered(
        self, card: Card, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lent = LentMemory("bob", card)
        offer = lent.offer(GPU0)
        assert offer is not None
        assert lent.offer(GPU0) is None
        assert lent.lend(gpus.tensor()) is None
        with another_process(monkeypatch):
            try_it(offer, card)
        lent.answered(0, True)
        assert lent.lend(gpus.tensor()) is not None
        assert lent.lend(gpus.tensor(index=1)) is None

    def test_each_device_is_offered(self, card: Card) -> None:
        lent = LentMemory("bob", card)
        offers = [lent.offer(device) for device in (GPU0, GPU1)]
        assert [offer.device for offer in offers if offer is not None] == [0, 1]
        for offer in offers:
            assert offer is not None
            os.close(offer.descriptor)

    def test_a_refusal_is_logged_once_and_nothing_is_lent(
        self, card: Card, gpus: Gpus, caplog: pytest.LogCaptureFixture
    ) -> None:
        lent = LentMemory("bob", card)
        offer_in_vain(lent, GPU1)
        lent.answered(1, False)
        assert (lent.lend(gpus.tensor(index=1)), lent.offer(GPU1)) == (None, None)
        (record,) = caplog.records
        assert "worker bob cannot open memory of cuda:1" in record.getMessage()

    def test_memory_that_cannot_be_lent_is_not_offered(
        self, card: Card, caplog: pytest.LogCaptureFixture
    ) -> None:
        card.refuses_to_lend = True
        lent = LentMemory("bob", card)
        assert [lent.offer(GPU0), lent.offer(GPU0)] == [None, None]
        (record,) = caplog.records
        assert "cannot be lent to worker bob (no more events)" in record.getMessage()

    def test_an_offer_that_cannot_be_written_leaves_nothing_open(
        self, card: Card, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def refuse(*_: object) -> None:
            raise OSError(errno.ENOSPC, "no space is left")

        monkeypatch.setattr(os, "ftruncate", refuse)
        before = os.listdir("/proc/self/fd")
        assert LentMemory("bob", card).offer(GPU0) is None
        assert os.listdir("/proc/self/fd") == before
        assert "no space is left" in caplog.text

    def test_when_lending_fails_later_tensors_go_another_way_from_then_on(
        self, card: Card, gpus: Gpus, caplog: pytest.LogCaptureFixture
    ) -> None:
        lent = LentMemory("bob", card)
        offer_in_vain(lent, GPU0)
        lent.answered(0, True)
        card.refuses_to_lend = True
        assert [lent.lend(gpus.tensor()), lent.lend(gpus.tensor())] == [None, None]
        assert len(caplog.records) == 1

    @pytest.mark.parametrize("error", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
    def test_a_device_for_which_the_peer_lacks_something_is_offered_again_after_a_pause(
        self, card: Card, gpus: Gpus, error: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        lent = LentMemory("bob", card, lambda: card.now)
        for pause in (1, 2, 4, 8, 16, 32, 32):
            offer_in_vain(lent, GPU1)
            assert lent.offer(GPU1) is None
            lent.answered(1, False, error)
            card.now += pause - 0.5
            assert (lent.offer(GPU1), lent.lend(gpus.tensor(index=1))) == (None, None)
            card.now += 0.5
        offer_in_vain(lent, GPU1)
        lent.answered(1, True)
        assert lent.lend(gpus.tensor(index=1)) is not None
        (record,) = caplog.records
        assert record.getMessage().endswith("through host memory, for now")

    def test_a_handle_that_did_not_arrive_is_given_back_by_the_one_who_lent(
        self, card: Card
    ) -> None:
        lent = LentMemory("bob", card)
        offer_in_vain(lent, GPU0)
        lent.answered(0, False, errno.EMFILE)
        assert set(card.needed.values()) == {0}

    def test_a_device_that_is_full_is_lent_again_when_it_has_room(
        self,
        card: Card,
        gpus: Gpus,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        lent = LentMemory("bob", card, lambda: card.now)
        offer_in_vain(lent, GPU0)
        lent.answered(0, True)

        card.is_full = True
        assert lent.lend(gpus.tensor()) is None
        card.is_full = False
        assert lent.lend(gpus.tensor()) is None
        card.now += 1
        assert lent.lend(gpus.tensor()) is not None
        assert "(the device is full)" in caplog.text

    def test_an_answer_to_nothing_is_refused(self, card: Card) -> None:
        with pytest.raises(FrameError, match="that was not made"):
            LentMemory("bob", card).answered(0, True)


class TestAccepting:
    def test_a_process_does_not_open_its_own_memory(self, card: Card) -> None:
        offer = LentMemory("bob", card).offer(GPU0)
        assert offer is not None
        with pytest.raises(OSError, match="of its own"):
            try_it(offer, card)

    def test_memory_in_which_something_else_stands_is_refused(
        self, card: Card, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        offer = LentMemory("bob", card).offer(GPU0)
        assert offer is not None
        os.pwrite(offer.descriptor, b"another token!!!", 8)
        with another_process(monkeypatch), pytest.raises(OSError, match="something else"):
            try_it(offer, card)

    def test_memory_that_cannot_be_opened_is_refused(
        self, card: Card, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        offer = LentMemory("bob", card).offer(GPU0)
        assert offer is not None
        card.refuses_to_open = True
        with another_process(monkeypatch), pytest.raises(OSError, match="invalid device context"):
            try_it(offer, card)

    def test_a_file_without_an_offer_is_a_fault_of_the_peer(self, card: Card) -> None:
        descriptor = os.memfd_create("test")
        with pytest.raises(FrameError, match="ends early"):
            try_it(DeviceOffer(0, 4096, descriptor), card)


class MappedHere(CudaMemory):
    """Maps memory of this process in place of another's.

    Attributes:
        mapped_on: the streams on which it did, of the device that it is on.
        released: the counters that were counted down.
    """

    def __init__(self, gpus: Gpus) -> None:
        self._gpus = gpus
        self.mapped_on: list[Stream] = []
        self.released: list[tuple[bytes, int]] = []

    def uuid(self, index: int) -> bytes:
        return f"GPU-{index}".encode()

    def map(self, handle: Handle, index: int) -> torch.UntypedStorage:
        self.mapped_on.append(self._gpus.current(index))
        return torch.arange(6.0).untyped_storage()

    def release(self, counter: bytes, offset: int) -> None:
        self.released.append((counter, offset))


class TestOpening:
    """The part that is torch's, with memory of this process in place of another's."""

    @pytest.fixture
    def memory(self, gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> MappedHere:
        monkeypatch.setattr(torch.cuda, "stream", gpus.on)
        return MappedHere(gpus)

    def test_a_copy_is_made_on_the_default_stream_of_the_device(
        self, gpus: Gpus, memory: MappedHere
    ) -> None:
        with gpus.side_stream(1):
            tensor = borrow(HANDLE.encode(), torch.float32, (3, 2), (1, 3), "cpu", memory)
        assert tensor.tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
        assert tensor.stride() == (1, 3)
        assert memory.mapped_on == [gpus.default(1)]

    def test_memory_of_a_device_that_is_not_visible_is_given_back(self, memory: MappedHere) -> None:
        hidden = HANDLE._replace(uuid=b"GPU-9").encode()
        with pytest.raises(RuntimeError, match="GPU-9 is not visible"):
            borrow(hidden, torch.float32, (2,), (1,), "cpu", memory)
        assert (memory.released, memory.mapped_on) == ([(b"/counter", 7)], [])


class Sending:
    """A writing half; keeps what is sent, but for shared segments, which nobody maps here."""

    def __init__(self) -> None:
        self.sent: list[QueuedFrame] = []

    def send(self, frame: QueuedFrame) -> None:
        if frame.kind == WireKind.SEGMENT:
            os.close(frame.descriptor)
        else:
            self.sent.append(frame)

    def send_small(self, *parts: Any) -> None:
        kind, correlation, header, table, inline = parts
        self.send(QueuedFrame(kind, correlation, header, table, (inline,), len(inline)))


class Ends:
    """A link at the worker that sends, and at the one that receives."""

    def __init__(self, card: Card, *, same_host: bool = True) -> None:
        self.card = card
        self.main, self.bulk, self.answers = Sending(), Sending(), Sending()
        self.sender, self.receiver = self._link(same_host), self._link(same_host)
        self.sender.main = self.main  # type: ignore[assignment]
        self.sender.bulk = [self.bulk]  # type: ignore[list-item]

    def _link(self, same_host: bool) -> Link:
        resources = Resources(
            Budget(LIMIT), ReceiveBuffers(LIMIT), LIMIT, CopyThreads("test", 0), 100e-6, self.card
        )
        return Link(resources, "bob", PeerDeviceMap("bob", {GPU0: GPU1}), same_host=same_host)

    def send(self, *tensors: torch.Tensor) -> QueuedFrame:
        frame = Frame(FrameKind.REQUEST, 1, b"header", b"payload", tensors)
        self.sender.send(frame, [look_at(tensor) for tensor in tensors])
        return self.main.sent[-1]

    def receive(self, sent: QueuedFrame) -> Frame:
        inline = bytearray(b"".join(sent.parts))
        frame = Frame(FrameKind.REQUEST, 1, b"header", inline)
        taken = self.receiver.open(frame, sent.table)
        assert taken is not None
        return taken

    def agree(self, *, arrives: bool = True) -> None:
        """Has the receiver try what was offered last, and the sender take the answer."""
        offer = [each for each in self.bulk.sent if each.kind == WireKind.DEVICE][-1]
        descriptors = [offer.descriptor]
        if not arrives:
            os.close(descriptors.pop())
        event = DeviceOffered(offer.correlation, 4096)
        self.receiver.bulk_event(event, self.answers, descriptors)  # type: ignore[arg-type]
        answer = self.answers.sent[-1]
        usable = answer.kind == WireKind.DEVICE_READY
        error = int.from_bytes(answer.header[:8], "little")
        said = DeviceAnswered(answer.correlation, usable, error)
        self.sender.bulk_event(said, self.bulk, [])  # type: ignore[arg-type]

    def places(self, sent: QueuedFrame) -> list[Placement]:
        return [each.place for each in unpack_table(sent.table, LIMIT, LIMIT, tuple(Placement))[1:]]


class TestLink:
    def test_tensors_are_lent_once_that_was_seen_to_work(
        self, card: Card, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ends = Ends(card)
        values = torch.arange(2.0 * ELEMENTS).reshape(2, -1).t()
        first = ends.send(gpus.tensor(values))
        assert Placement.LENT not in ends.places(first)
        with another_process(monkeypatch):
            ends.agree()
        sent = ends.send(gpus.tensor(values), torch.ones(3), gpus.tensor(torch.ones(5)))
        assert ends.places(sent) == [Placement.LENT, Placement.INLINE, Placement.INLINE]
        monkeypatch.setattr(
            "rpc.transports.tensorwire.link.to_device", lambda tensor, _: gpus.tensor(tensor, 1)
        )
        large, host, small = ends.receive(sent).tensors
        assert isinstance(large, GpuTensor)
        assert (large.device, large.stride(), host.is_cuda, small.is_cuda) == (
            GPU1,
            (1, ELEMENTS),
            False,
            True,
        )
        assert torch.equal(large.as_subclass(torch.Tensor), values)
        assert set(card.needed.values()) == {0}

    def test_what_the_sender_writes_after_it_has_sent_is_not_seen(
        self, card: Card, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ends = Ends(card)
        tensor = gpus.tensor(torch.ones(ELEMENTS))
        ends.send(tensor)
        with another_process(monkeypatch):
            ends.agree()
        sent = ends.send(tensor)
        tensor.as_subclass(torch.Tensor).zero_()
        (found,) = ends.receive(sent).tensors
        assert found.as_subclass(torch.Tensor).sum() == ELEMENTS

    def test_a_device_that_cannot_be_opened_is_not_used_and_both_ends_say_so(
        self,
        card: Card,
        gpus: Gpus,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        ends = Ends(card)
        ends.send(gpus.tensor(torch.ones(ELEMENTS)))
        card.refuses_to_open = True
        with another_process(monkeypatch):
            ends.agree()
        sent = ends.send(gpus.tensor(torch.ones(ELEMENTS)))
        assert Placement.LENT not in ends.places(sent)
        theirs, ours = [record.getMessage() for record in caplog.records]
        assert "memory of worker bob's cuda:0 cannot be opened (" in theirs
        assert "worker bob cannot open memory of cuda:0" in ours

    def test_tensors_are_lent_although_the_first_offers_lost_their_files_on_the_way(
        self,
        card: Card,
        gpus: Gpus,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        monkeypatch.setattr("rpc.transports.host.backoff.FIRST_PAUSE_SECONDS", 0.0)
        ends = Ends(card)
        for arrives in (False, False, True):
            ends.send(gpus.tensor(torch.ones(ELEMENTS)))
            with another_process(monkeypatch):
                ends.agree(arrives=arrives)
        sent = ends.send(gpus.tensor(torch.ones(ELEMENTS)))
        assert ends.places(sent) == [Placement.LENT]
        theirs, ours = [record.getMessage() for record in caplog.records]
        assert "its file did not arrive" in theirs
        assert ours.endswith("for now")

    def test_a_tensor_that_cannot_be_opened_any_more_fails_its_call_and_no_other(
        self, card: Card, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ends = Ends(card)
        tensors = [gpus.tensor(torch.ones(ELEMENTS)) for _ in range(3)]
        ends.send(tensors[0])
        with another_process(monkeypatch):
            ends.agree()
        sent = ends.send(*tensors)
        card.refuses_to_open = True
        taken = ends.receive(sent)
        assert isinstance(taken.payload, Unreceived)
        assert b"invalid device context" in taken.payload
        assert set(card.needed.values()) == {0}

    def test_what_is_lent_for_a_message_that_is_not_sent_comes_back(
        self, card: Card, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ends = Ends(card)
        tensor = gpus.tensor(torch.ones(ELEMENTS))
        ends.send(tensor)
        with another_process(monkeypatch):
            ends.agree()

        def send(without_memory: torch.Tensor) -> None:
            ends.send(tensor, without_memory)

        with pytest.raises(RuntimeError):
            torch.vmap(send)(torch.ones(2, ELEMENTS))
        assert len(card.needed) == 2
        assert set(card.needed.values()) == {0}

    def test_nothing_is_lent_to_another_host_nor_taken_from_there(
        self, card: Card, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        far, near = Ends(card, same_host=False), Ends(card)
        far.send(gpus.tensor(torch.ones(ELEMENTS)))
        assert [each for each in far.bulk.sent if each.kind == WireKind.DEVICE] == []
        near.send(gpus.tensor(torch.ones(ELEMENTS)))
        with another_process(monkeypatch):
            near.agree()
        with pytest.raises(FrameError, match=f"place {int(Placement.LENT)}"):
            far.receive(near.send(gpus.tensor(torch.ones(ELEMENTS))))

    def test_a_tensor_for_host_memory_is_not_lent(self, card: Card, gpus: Gpus) -> None:
        ends = Ends(card)
        ends.send(torch.ones(ELEMENTS))
        assert ends.bulk.sent == [each for each in ends.bulk.sent if each.kind != WireKind.DEVICE]


def test_the_places_of_other_transports_are_in_host_memory() -> None:
    assert HOST_PLACEMENTS == (Placement.INLINE, Placement.SHARED, Placement.STREAM)
