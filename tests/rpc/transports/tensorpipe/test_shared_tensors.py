"""Tensors that go through shared memory arrive as they were; what cannot, goes through torch."""

from __future__ import annotations

import errno
import os
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rpc.errors import FrameError
from rpc.transports.base import Frame, FrameKind, Unreceived
from rpc.transports.host.frame_table import Placement, join_rows, payload_row
from rpc.transports.host.segments import SHARED_FROM, SegmentOffer, SendPool
from rpc.transports.tensorpipe import wire as wire
from rpc.transports.tensorpipe.shared_tensors import HostMemory, SharedTensors, nothing_shared
from rpc.transports.tensorpipe.wire import Envelope, PlacedFrame

ENVELOPE = Envelope(FrameKind.REQUEST, 3, 1, 7)
OFFER = struct.Struct("<QQii16s")
LARGE = SHARED_FROM // 4
LIMIT = 64 << 20


def request(*tensors: torch.Tensor, payload: bytes | memoryview = b"value") -> Frame:
    return Frame(FrameKind.REQUEST, 7, b"header", payload, tensors)


@dataclass
class Pair:
    """A sender and a receiver, joined without a transport."""

    sender: SharedTensors = field(default_factory=lambda: shared(LIMIT))
    receiver: SharedTensors = field(default_factory=lambda: shared(LIMIT))

    def offer(self, change: Callable[[bytes], bytes] = bytes) -> None:
        """Hands over the memory that a frame found missing."""
        offer = self.sender.take_offer()
        assert offer is not None
        self.sender.answered(self.receiver.map(change(bytes(offer.payload))).payload)

    def prepare(self) -> Pair:
        frame = request(torch.ones(LARGE))
        assert self.sender.place(frame) is frame
        self.offer()
        return self

    def carry(self, frame: Frame) -> Frame:
        """Takes a frame through memory and torch's message."""
        placed = self.sender.place(frame)
        assert type(placed) is PlacedFrame
        envelope, found = wire.unpack(*wire.pack(ENVELOPE, placed))
        assert envelope == ENVELOPE
        assert type(found) is PlacedFrame
        return self.receiver.open(found)

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()


def shared(
    limit: int, host: str | None = None, clock: Callable[[], float] = time.monotonic
) -> SharedTensors:
    memory = HostMemory("test", limit, clock)
    return memory.shared_with("peer", memory.host if host is None else host)


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


class TestPlacing:
    @settings(max_examples=30)
    @given(
        st.lists(st.sampled_from([0, 3, LARGE, 3 * LARGE + 5]), min_size=1, max_size=5),
        st.sampled_from([torch.float32, torch.bfloat16, torch.bool, torch.complex128]),
        st.sampled_from([0, 10, SHARED_FROM, wire.TENSOR_PAYLOAD_MIN]),
    )
    def test_what_is_placed_is_found_again(
        self, sizes: list[int], dtype: torch.dtype, payload_size: int
    ) -> None:
        pair = Pair().prepare()
        try:
            large = torch.arange(4 * LARGE).reshape(4, LARGE).t()
            given = [large, *(torch.arange(size).to(dtype) for size in sizes)]
            payload = bytes(range(256)) * (payload_size // 256 + 1)
            found = pair.carry(request(*given, payload=payload[:payload_size]))
            assert found[:3] == (FrameKind.REQUEST, 7, b"header")
            assert bytes(found.payload) == payload[:payload_size]
            assert found.tensors[0].stride() == large.stride()
            for there, here in zip(found.tensors, given, strict=True):
                assert there.dtype == here.dtype
                assert torch.equal(there, here)
        finally:
            pair.close()

    def test_a_large_payload_alone_is_placed(self, pair: Pair) -> None:
        payload = memoryview(bytes(range(256)) * (SHARED_FROM // 256))
        assert bytes(pair.prepare().carry(request(payload=payload)).payload) == payload

    def test_the_copy_is_made_at_once(self, pair: Pair) -> None:
        tensor = torch.ones(LARGE)
        placed = pair.prepare().sender.place(request(tensor))
        tensor.zero_()
        assert type(placed) is PlacedFrame
        assert placed.tensors == ()
        assert pair.receiver.open(placed).tensors[0].sum() == LARGE

    def test_memory_is_used_again_when_the_tensors_in_it_are_dead(self, pair: Pair) -> None:
        pair.prepare()
        places = {
            tensor.data_ptr()
            for number in range(100)
            for tensor in pair.carry(request(torch.full((1 << 18,), number))).tensors
        }
        assert len(places) == 2, "one is taken while the loop holds the tensor in the other"

    @pytest.mark.parametrize(
        "tensor",
        [
            torch.ones(LARGE - 1),
            torch.ones(LARGE, device="meta"),
            torch.ones(LARGE, dtype=torch.complex64).conj(),
            torch.ones(LARGE, 2).to_sparse(),
        ],
        ids=["small", "meta", "conjugate", "sparse"],
    )
    def test_other_tensors_are_left_to_torch(self, pair: Pair, tensor: torch.Tensor) -> None:
        frame = request(tensor)
        assert pair.prepare().sender.place(frame) is frame

    def test_memory_of_a_message_that_cannot_be_sent_is_free_again(self, pair: Pair) -> None:
        pair.prepare()
        large = torch.ones(1 << 18)
        for _ in range(100):
            with pytest.raises(RuntimeError, match="data pointer"):  # inside vmap there is none
                torch.vmap(lambda each: pair.sender.place(request(large, each)))(
                    torch.ones(2, LARGE)
                )
        assert pair.sender.place(request(large)).tensors == ()

    def test_memory_of_a_message_that_was_not_sent_is_free_again(self, pair: Pair) -> None:
        pair.prepare()
        large, small = torch.ones(1 << 18), torch.ones(3)
        kept = pair.carry(request(torch.full((1 << 18,), 7.0))).tensors[0]
        for _ in range(100):
            placed = pair.sender.place(request(large, small, payload=bytes(SHARED_FROM)))
            assert type(placed) is PlacedFrame
            assert placed.tensors == (small,)
            assert not placed.payload
            pair.sender.take_back(placed)
        assert kept.sum() == 7 << 18

    def test_of_a_message_that_was_not_placed_nothing_is_taken_back(self, pair: Pair) -> None:
        for memory in (pair.prepare().sender, nothing_shared()):
            memory.take_back(request(torch.ones(LARGE), payload=bytes(SHARED_FROM)))

    def test_what_never_came_is_given_back_by_its_receiver(self, pair: Pair) -> None:
        pair.prepare()
        kept = pair.carry(request(torch.full((1 << 18,), 7.0))).tensors[0]
        for _ in range(20):
            placed = pair.sender.place(request(torch.ones(1 << 18), torch.ones(9)))
            assert type(placed) is PlacedFrame
            assert placed.tensors[0].numel() == 9, "there was room"
            pair.receiver.give_back(placed.split()[0])
        assert kept.sum() == 7 << 18

    @pytest.mark.parametrize(
        "table", [b"not a table", join_rows([payload_row(Placement.SHARED, 9, 0, 1)])]
    )
    def test_what_was_never_shared_is_not_given_back(self, pair: Pair, table: bytes) -> None:
        pair.prepare().receiver.give_back(b"")
        with pytest.raises(FrameError):
            pair.receiver.give_back(table)

    def test_what_finds_no_room_goes_beside(self, pair: Pair) -> None:
        pair.prepare()
        third = torch.ones(6 << 18)
        kept = [pair.carry(request(third)).tensors[0] for _ in range(2)]
        placed = pair.sender.place(request(third, torch.full((LARGE,), 2)))
        assert placed.tensors == (third,)
        assert type(placed) is PlacedFrame
        assert [float(each.sum()) for each in pair.receiver.open(placed).tensors] == [
            6.0 * (1 << 18),
            2.0 * LARGE,
        ]
        assert all(tensor.sum() == 6 << 18 for tensor in kept)

    def test_what_cannot_be_taken_in_says_so_and_gives_its_memory_back(
        self, pair: Pair, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pair.prepare()
        large = torch.ones(1 << 18)

        def refuse(*_: object) -> torch.Tensor:
            raise MemoryError("nothing is left")

        with monkeypatch.context() as patched:
            patched.setattr("rpc.transports.tensorpipe.shared_tensors.tensor_over", refuse)
            for _ in range(100):
                found = pair.carry(request(large, large, payload=bytes(SHARED_FROM)))
                assert found[:3] == (FrameKind.REQUEST, 7, b"header")
                assert isinstance(found.payload, Unreceived)
                what = f"a message of {SHARED_FROM + 2 * large.nbytes} bytes from worker 'peer'"
                why = f"{what} could not be taken in: MemoryError: nothing is left"
                assert found.payload.decode() == why
            placed = pair.sender.place(Frame(FrameKind.NOTICE, 0, b"", b"", (large,)))
            assert type(placed) is PlacedFrame
            with pytest.raises(FrameError, match="could not be taken in"):
                pair.receiver.open(placed)
        assert pair.carry(request(large)).tensors[0].sum() == large.numel()


class TestHandingOver:
    @pytest.mark.parametrize("host", ["", "another"])
    def test_nothing_is_offered_to_another_host(self, host: str) -> None:
        memory = shared(LIMIT, host)
        frame = request(torch.ones(LARGE))
        assert memory.place(frame) is frame
        assert memory.untold is None

    def test_a_worker_may_have_none(self) -> None:
        memory = HostMemory("test", 0)
        assert memory.host == ""

    def test_an_offer_is_made_once(self, pair: Pair) -> None:
        for _ in range(3):
            pair.sender.place(request(torch.ones(LARGE)))
        assert pair.sender.untold is not None
        assert pair.sender.take_offer() is not None
        assert pair.sender.take_offer() is None
        pair.sender.place(request(torch.ones(LARGE)))
        assert pair.sender.untold is None

    @pytest.mark.parametrize("wrong", ["process", "descriptor", "token", "file"])
    def test_what_is_not_what_was_meant_is_refused_and_torch_carries_all(
        self, pair: Pair, wrong: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
    ) -> None:
        other = os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT)

        def change(offer: bytes) -> bytes:
            number, size, process, descriptor, token = OFFER.unpack(offer)
            if wrong == "process":
                process = 2**31 - 1
            elif wrong == "descriptor":
                descriptor = 2**31 - 1
            elif wrong == "token":
                token = bytes(16)
            else:
                descriptor = other
            return OFFER.pack(number, size, process, descriptor, token)

        frame = request(torch.ones(LARGE))
        pair.sender.place(frame)
        pair.offer(change)
        os.close(other)
        assert [record.args[0] for record in caplog.records] == ["peer", "peer"]
        assert pair.sender.place(frame) is frame
        assert pair.sender.untold is None

    def test_a_receiver_that_is_short_of_descriptors_is_asked_again_later(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def none_left(*_: object) -> int:
            raise OSError(errno.EMFILE, "Too many open files")

        now = [0.0]
        pair = Pair(shared(LIMIT, clock=lambda: now[0]))
        frame = request(torch.ones(LARGE))
        for now[0] in (0.0, 10.0):
            pair.sender.place(frame)
            with monkeypatch.context() as short:
                short.setattr("rpc.transports.tensorpipe.shared_tensors.os.open", none_left)
                pair.offer()
            assert pair.sender.place(frame) is frame
            assert pair.sender.untold is None
        assert [record.args[0] for record in caplog.records] == ["peer", "peer"]
        now[0] = 20.0
        pair.prepare()
        assert type(pair.sender.place(frame)) is PlacedFrame
        pair.close()

    def test_no_descriptor_stays_open(self, pair: Pair) -> None:
        before = os.listdir("/proc/self/fd")
        pair.prepare()
        another = Pair()
        another.sender.place(request(torch.ones(LARGE)))
        another.close()
        assert os.listdir("/proc/self/fd") == before

    def test_nor_does_one_that_is_offered_while_the_peer_is_given_up(
        self, pair: Pair, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def given_up_meanwhile(pool: SendPool, length: int) -> SegmentOffer | None:
            found = offer(pool, length)
            pair.sender.stop_sending()
            return found

        before, offer = os.listdir("/proc/self/fd"), SendPool.offer
        monkeypatch.setattr(SendPool, "offer", given_up_meanwhile)
        frame = request(torch.ones(LARGE))
        assert pair.sender.place(frame) is frame
        assert os.listdir("/proc/self/fd") == before

    def test_an_answer_that_comes_after_the_end_is_ignored(self, pair: Pair) -> None:
        pair.sender.place(request(torch.ones(LARGE)))
        offer = pair.sender.take_offer()
        assert offer is not None
        answer = pair.receiver.map(offer.payload)
        pair.sender.stop_sending()
        pair.sender.answered(answer.payload)
        frame = request(torch.ones(LARGE))
        assert pair.sender.place(frame) is frame


class TestWhatIsMalformed:
    @given(st.binary(max_size=60))
    def test_bytes_that_are_no_offer_and_no_answer(self, data: bytes) -> None:
        pair = Pair()
        for take, size in ((pair.receiver.map, OFFER.size), (pair.sender.answered, 13)):
            if len(data) != size:
                with pytest.raises(FrameError, match="bytes about shared memory"):
                    take(data)

    def test_a_place_in_memory_that_was_never_handed_over(self, pair: Pair) -> None:
        placed = pair.prepare().sender.place(request(torch.ones(LARGE)))
        assert type(placed) is PlacedFrame
        with pytest.raises(FrameError, match="which was never handed over"):
            nothing_shared().open(placed)

    def test_a_tensor_that_should_have_come_beside(self, pair: Pair) -> None:
        placed = pair.prepare().sender.place(request(torch.ones(LARGE), torch.ones(3)))
        assert type(placed) is PlacedFrame
        with pytest.raises(FrameError, match="tensor 0 of 0 that came beside"):
            pair.receiver.open(placed._replace(tensors=()))

    @given(st.binary(max_size=100))
    def test_a_header_that_is_no_table(self, header: bytes) -> None:
        with pytest.raises(FrameError):
            nothing_shared().open(PlacedFrame(FrameKind.REQUEST, 1, header))
