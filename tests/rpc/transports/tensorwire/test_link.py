"""What a link does around the bytes of one frame."""

from __future__ import annotations

import pytest
import torch

from rpc.transports.base import Frame, FrameKind
from rpc.transports.copying import CopyCrew
from rpc.transports.frame_table import look_at
from rpc.transports.shared_memory import SHARED_FROM, Budget, SendPool, Slot
from rpc.transports.tensorwire.devices import DeviceMap
from rpc.transports.tensorwire.link import Link, Resources
from rpc.transports.tensorwire.receive_buffers import ReceiveBuffers

LIMIT = 1 << 30


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
    """What happens, in order; there is always room in shared memory."""
    order: list[str] = []

    def put(pool: SendPool, address: int, length: int) -> Slot:
        order.append("copied")
        return Slot(1, 4096)

    monkeypatch.setattr(SendPool, "put", put)
    return order


def link(told: list[str], *, shared: bool = True) -> Link:
    resources = Resources(Budget(LIMIT), ReceiveBuffers(LIMIT), LIMIT, CopyCrew("test", 0))
    made = Link(resources, "bob", DeviceMap("bob", {}), shared=shared)
    made.main = Main(told)  # type: ignore[assignment]
    made.announce = lambda: told.append("announced")
    return made


def send(made: Link, *sizes: int) -> None:
    tensors = tuple(torch.zeros(size, dtype=torch.uint8) for size in sizes)
    frame = Frame(FrameKind.REQUEST, 1, b"header", b"payload", tensors)
    made.send(frame, [look_at(tensor) for tensor in tensors])


def test_large_tensors_are_announced_once_before_they_are_copied(told: list[str]) -> None:
    send(link(told), 100, SHARED_FROM, 10 * SHARED_FROM)
    assert told == ["announced", "copied", "copied", "sent"]


def test_a_large_payload_is_announced_too(told: list[str]) -> None:
    link(told).send(Frame(FrameKind.REQUEST, 1, b"header", bytes(SHARED_FROM)))
    assert told == ["announced", "copied", "sent"]


def test_small_frames_are_not_announced(told: list[str]) -> None:
    send(link(told), 100, SHARED_FROM - 1)
    assert told == ["sent"]


def test_nothing_is_announced_where_nothing_is_copied(told: list[str]) -> None:
    made = link(told, shared=False)
    send(made, SHARED_FROM // 4, SHARED_FROM // 4)
    assert told == ["sent"]
