"""What takes a while to pack is announced before that, so that the receiver is awake for it."""

from __future__ import annotations

import operator
from collections.abc import Iterator

import pytest
import torch

import autograd_dist
import rpc
from rpc.agent import Agent
from rpc.testing import MemoryHub, MemoryTransport, as_worker, local_group
from rpc.transports.base import Frame, FrameKind

LARGE = torch.ones(64 * 1024)
Note = tuple[str, int, FrameKind]


class Announcing(MemoryTransport):
    """Notes what is announced, and what is sent but for notices, in order."""

    notes: list[Note]

    def announce(self, to: int, kind: FrameKind) -> None:
        self.notes.append(("announced", to, kind))

    def send(self, to: int, frame: Frame) -> None:
        if frame.kind is not FrameKind.NOTICE:
            self.notes.append(("sent", to, frame.kind))
        super().send(to, frame)


@pytest.fixture
def group() -> Iterator[tuple[Agent, list[Note]]]:
    """The agent that asks, and what both ends note."""
    hub, notes = MemoryHub(), list[Note]()

    def transport() -> Announcing:
        made = Announcing(hub)
        made.notes = notes
        return made

    with local_group("alice", "bob", transport=transport) as (alice, _), as_worker(alice):
        rpc.rpc_sync("bob", operator.neg, (1,))
        notes.clear()
        yield alice, notes


REQUEST = [("announced", 1, FrameKind.REQUEST), ("sent", 1, FrameKind.REQUEST)]
REPLY = [("announced", 0, FrameKind.REPLY), ("sent", 0, FrameKind.REPLY)]


def test_a_call_that_is_packed_at_once_is_not_announced(group: tuple[Agent, list[Note]]) -> None:
    assert rpc.rpc_sync("bob", torch.add, (torch.ones(4), 1)).tolist() == [2.0] * 4
    assert group[1] == [REQUEST[1], REPLY[1]]


def test_a_large_argument_announces_the_request(group: tuple[Agent, list[Note]]) -> None:
    assert rpc.rpc_sync("bob", torch.numel, (LARGE,)) == LARGE.numel()
    assert group[1] == [*REQUEST, REPLY[1]]


def test_a_large_result_announces_the_reply(group: tuple[Agent, list[Note]]) -> None:
    assert rpc.rpc_sync("bob", torch.ones, (LARGE.numel(),)).equal(LARGE)
    assert group[1] == [REQUEST[1], *REPLY]
    group[1].clear()
    assert rpc.rpc_sync("bob", tuple, ([1, LARGE],))[1].equal(LARGE)
    assert group[1] == [REQUEST[1], *REPLY]


def test_all_that_distributed_autograd_asks_is_announced(group: tuple[Agent, list[Note]]) -> None:
    leaf = torch.ones(2, requires_grad=True)
    with autograd_dist.context() as context_id:
        autograd_dist.backward(context_id, [rpc.rpc_sync("bob", torch.sum, (leaf,))])
        assert autograd_dist.get_gradients(context_id)[leaf].tolist() == [1.0, 1.0]
    sent = [note for note in group[1] if note[0] == "sent"]
    announced = [note for note in group[1] if note[0] == "announced"]
    assert group[1][:4] == [*REQUEST, *REPLY]
    assert sorted(note[1:] for note in announced) == sorted(note[1:] for note in sent)
