"""News from a transport to an agent while newcomers are being made known, and of whom."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

import rpc
from rpc.agent import Agent
from rpc.errors import UnknownWorkerError, WorkerLostError
from rpc.group.events import MembershipChange
from rpc.ids import Life
from rpc.transports.base import Frame, FrameKind, Peer, Transport
from rpc.wire.control import Leaving, encode_batch
from rpc.worker_info import WorkerInfo
from tests.waiting import until

_other_call = threading.Event()


class Adding:
    """A transport to which peers are added as the test says."""

    def __init__(self, inner: Transport, add_peer: Callable[[Peer], None]) -> None:
        self._inner = inner
        self.add_peer = add_peer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def whoami() -> str:
    return rpc.get_worker_info().name


def wait_for_the_other() -> bool:
    return _other_call.wait(20)


def be_the_other() -> None:
    _other_call.set()


def test_calls_that_came_before_the_group_was_known_may_wait_for_each_other(
    pair: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    alice, bob = pair
    monkeypatch.setattr(type(bob.transport), "inline_handlers", 1 << 30)
    came: list[object] = []
    keep = bob.inbound.early.keep
    monkeypatch.setattr(bob.inbound.early, "keep", lambda *frame: came.append(0) or keep(*frame))
    _other_call.clear()
    with bob.inbound.early.held_back():
        first, second = (alice.rpc_async("bob", f) for f in (wait_for_the_other, be_the_other))
        until(lambda: len(came) == 2)
    second.wait()
    assert first.wait() is True


def test_a_newcomer_is_in_the_group_once_it_can_be_reached(
    pair: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    alice, _ = pair
    add, before = alice.transport.add_peer, alice.group.version

    def look_and_add(peer: Peer) -> None:
        assert not alice.group.knows("carol")
        add(peer)
        alice.inbound.deliver(
            Life(9, 1), Frame(FrameKind.NOTICE, 0, b"", encode_batch(0, [Leaving(0)]))
        )

    monkeypatch.setattr(alice, "transport", Adding(alice.transport, look_and_add))
    changes: list[MembershipChange] = []
    alice.events.subscribe(lambda event: changes.append(event.change))
    alice.add_peer(Peer(WorkerInfo("carol", 9), 1, alice.group.peer(1).address))
    assert alice.group.version == before + 2
    until(lambda: len(changes) == 2)
    assert changes == [MembershipChange.JOINED, MembershipChange.LEFT]


def test_a_newcomer_that_is_lost_at_once_is_known_to_be(
    pair: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    alice, _ = pair
    lose = partial(alice.inbound.peer_lost, Life(9, 1), "its process ended")
    monkeypatch.setattr(alice, "transport", Adding(alice.transport, lambda peer: lose()))
    alice.add_peer(Peer(WorkerInfo("carol", 9), 1, b""))
    with pytest.raises(WorkerLostError, match=r"carol.*its process ended"):
        alice.rpc_sync("carol", whoami)


def test_a_newcomer_outlives_the_late_news_that_its_former_life_is_lost(
    pair: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    alice, bob = pair
    lose = partial(alice.inbound.peer_lost, bob.life, "its process ended")
    monkeypatch.setattr(alice, "transport", Adding(alice.transport, lambda peer: lose()))
    alice.add_peer(replace(alice.group.peer(1), incarnation=bob.life.incarnation + 1))
    assert alice.group.lives("bob")


def test_a_newcomer_did_not_send_what_is_held_back_of_its_former_life(
    pair: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    alice, bob = pair
    lost = alice.worker_loss.lost

    def hear_it_say_goodbye(life: Life, reason: str) -> bool:
        alice.inbound.deliver(
            bob.life, Frame(FrameKind.NOTICE, 0, b"", encode_batch(0, [Leaving(0)]))
        )
        return lost(life, reason)

    monkeypatch.setattr(alice.worker_loss, "lost", hear_it_say_goodbye)
    monkeypatch.setattr(alice, "transport", Adding(alice.transport, lambda peer: None))
    alice.add_peer(replace(alice.group.peer(1), incarnation=bob.life.incarnation + 1))
    assert alice.group.lives("bob")


def test_one_that_the_transport_refuses_is_not_in_the_group(
    pair: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    alice, bob = pair

    def refuse(peer: Peer) -> None:
        raise ValueError("no such address")

    monkeypatch.setattr(alice, "transport", Adding(alice.transport, refuse))
    with pytest.raises(ValueError, match="no such address"):
        alice.add_peer(Peer(WorkerInfo("carol", 9), 1, b""))
    assert alice.get_worker_infos() == [alice.info, bob.info]
    with pytest.raises(UnknownWorkerError, match="carol"):
        alice.rpc_sync("carol", whoami)
    assert alice.rpc_sync("bob", whoami) == "bob"
