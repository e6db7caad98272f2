"""Unpacking gives what was packed, and torch loads the pickles that we make."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator

import pytest
import torch

from rpc.errors import FrameError
from rpc.transports.base import Frame, FrameKind
from rpc.transports.tensorpipe import wire as wire
from rpc.transports.tensorpipe.wire import Envelope, TorchAnswer

ENVELOPE = Envelope(FrameKind.REQUEST, 3, 2**63 + 1, 2**64 - 1)


class Recorder:
    """A bus that remembers."""

    def __init__(self) -> None:
        self.questions: list[tuple[Envelope, Frame]] = []
        self.answers: list[tuple[Envelope, Frame]] = []

    def question(self, envelope: Envelope, frame: Frame) -> TorchAnswer:
        self.questions.append((envelope, frame))
        return TorchAnswer(*wire.pack(envelope, frame))

    def answer(self, envelope: Envelope, frame: Frame) -> None:
        self.answers.append((envelope, frame))


@pytest.fixture
def tables() -> threading.local:
    return threading.local()


@pytest.fixture
def bus(tables: threading.local) -> Iterator[Recorder]:
    recorder = Recorder()
    wire.attach(recorder, tables)
    yield recorder
    wire.detach(recorder)


def round_trip(frame: Frame) -> Frame:
    envelope, found = wire.unpack(*wire.pack(ENVELOPE, frame, wire.TENSOR_PAYLOAD_MIN))
    assert envelope == ENVELOPE
    return found


class TestPacking:
    @pytest.mark.parametrize("size", [0, 1, 100, wire.TENSOR_PAYLOAD_MIN, 1 << 20])
    @pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
    def test_frames_survive(self, size: int, kind: type) -> None:
        payload = bytes(range(256)) * (size // 256 + 1)
        tensor = torch.arange(3)
        frame = Frame(FrameKind.REQUEST, 2**64 - 1, b"header", kind(payload[:size]), (tensor,))
        found = round_trip(frame)
        assert (found.kind, found.correlation) == (frame.kind, frame.correlation)
        assert (found.header, bytes(found.payload)) == (b"header", payload[:size])
        assert found.tensors == (tensor,)

    def test_large_payloads_are_lent_not_copied(self) -> None:
        payload = bytearray(wire.TENSOR_PAYLOAD_MIN)
        frame = Frame(FrameKind.NOTICE, 0, b"", payload)
        _, (carrier,) = wire.pack(ENVELOPE, frame, wire.TENSOR_PAYLOAD_MIN)
        payload[5] = 77
        assert carrier[5] == 77

    def test_a_payload_lives_as_long_as_the_tensor_that_carries_it(self) -> None:
        def pack() -> torch.Tensor:
            payload = b"\x07" * wire.TENSOR_PAYLOAD_MIN
            frame = Frame(FrameKind.NOTICE, 0, b"", payload)
            return wire.pack(ENVELOPE, frame, wire.TENSOR_PAYLOAD_MIN)[1][0]

        assert set(pack().tolist()) == {7}

    @pytest.mark.parametrize("target", ["meta", "cpu"])
    def test_a_payload_is_no_tensor_where_a_map_moves_host_memory(self, target: str) -> None:
        size = wire.lent_from({torch.device("cpu"): torch.device(target)})
        frame = Frame(FrameKind.REQUEST, 1, b"h", b"x" * wire.TENSOR_PAYLOAD_MIN)
        data, tensors = wire.pack(ENVELOPE, frame, size)
        arrived = [tensor.to(target) for tensor in tensors]
        assert len(arrived) == (target == "cpu")
        assert bytes(wire.unpack(data, arrived)[1].payload) == frame.payload

    def test_only_what_a_view_shows_leaves(self) -> None:
        view = torch.arange(1000.0)[10:20]
        _, (sent,) = wire.pack(ENVELOPE, Frame(FrameKind.NOTICE, 0, b"", b"", (view,)))
        assert sent.untyped_storage().nbytes() == 40
        assert torch.equal(sent, view)

    def test_a_view_in_a_compact_frame_is_not_copied_again(self) -> None:
        frame = Frame(FrameKind.REPLY, 7, b"h", b"value", (torch.arange(1000.0)[10:13],))
        compact = wire.compact(frame)
        assert compact[:4] == frame[:4]
        assert compact.tensors[0].tolist() == [10.0, 11.0, 12.0]
        assert wire.pack(ENVELOPE, compact)[1][0] is compact.tensors[0]

    def test_the_order_of_strides_is_kept_when_a_view_is_copied(self) -> None:
        view = torch.arange(24.0).reshape(4, 6)[:2].t()
        _, (sent,) = wire.pack(ENVELOPE, Frame(FrameKind.NOTICE, 0, b"", b"", (view,)))
        assert sent.stride() == view.stride()

    @pytest.mark.parametrize("data", [b"", b"\x00" * 10, b"\xff" * 28, b"\x01" * 40])
    def test_other_bytes_are_refused(self, data: bytes) -> None:
        with pytest.raises(FrameError):
            wire.unpack(data, [])

    @pytest.mark.parametrize("kind", FrameKind)
    def test_frames_share_a_payload(self, kind: FrameKind) -> None:
        frames = [Frame(kind, 2**64 - 1 - n, b"h" * n, b"p" * (5 - n)) for n in range(6)]
        assert wire.split(wire.join(frames)) == frames


class TestPickles:
    """Loaded the way torch's deserializer does: plain ``pickle`` beside a table of tensors."""

    def test_a_call_reaches_the_bus(self, bus: Recorder, tables: threading.local) -> None:
        sent = Frame(FrameKind.REQUEST, 2**64 - 1, b"h", b"p", (torch.ones(2),))
        data, tables.recv_tables = wire.pack(ENVELOPE, sent)
        call = pickle.loads(wire.call_pickle(data))
        call.func(*call.args, **call.kwargs)
        ((envelope, found),) = bus.questions
        assert envelope == ENVELOPE
        assert (found.header, found.payload) == (b"h", b"p")
        assert found.tensors[0] is sent.tensors[0]

    def test_an_answer_delivers_itself(self, bus: Recorder, tables: threading.local) -> None:
        tensor = torch.ones(2)
        sent = Frame(FrameKind.REPLY, 5, b"h", b"p", (tensor,))
        answer = TorchAnswer(*wire.pack(ENVELOPE._replace(kind=FrameKind.REPLY), sent))
        tables.send_tables = []
        data = pickle.dumps(answer)
        tables.recv_tables = tables.send_tables
        del tables.send_tables
        assert pickle.loads(data) is None
        ((envelope, found),) = bus.answers
        assert envelope.kind == FrameKind.REPLY
        assert found.tensors[0] is tensor

    def test_an_answer_lets_go_of_its_tensors_when_torch_has_them(
        self, bus: Recorder, tables: threading.local
    ) -> None:
        answer = TorchAnswer(b"", [torch.ones(2)])
        tables.send_tables = []
        pickle.dumps(answer)
        assert answer.tensors == []

    def test_an_answer_shows_its_tensors_when_torch_only_looks_for_them(
        self, bus: Recorder
    ) -> None:
        tensor = torch.ones(2)
        assert TorchAnswer(b"", [tensor]).__reduce__() == (tuple, ([tensor],))

    def test_without_a_transport_a_call_is_refused_and_an_answer_dropped(self) -> None:
        data, _ = wire.pack(ENVELOPE, Frame(FrameKind.NOTICE, 0, b""))
        with pytest.raises(FrameError, match="no TensorWire transport"):
            wire.receive_question(data)
        with pytest.raises(ValueError, match="unregistered extension code"):
            pickle.loads(wire.call_pickle(data))
        wire.receive_answer(data)

    def test_another_transport_is_not_detached(
        self, bus: Recorder, tables: threading.local
    ) -> None:
        tables.recv_tables = []
        wire.detach(Recorder())
        data, _ = wire.pack(ENVELOPE, Frame(FrameKind.NOTICE, 0, b""))
        wire.receive_answer(data)
        assert len(bus.answers) == 1
