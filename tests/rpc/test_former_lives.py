"""Things that a life of a worker sent are never taken for what its successor sent."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

import rpc
from rpc.agent import Agent
from rpc.ids import Life
from rpc.testing import local_group
from rpc.transports.base import Frame, FrameKind
from rpc.wire.control import Leaving, encode_batch
from tests.waiting import until

GOODBYE = Frame(FrameKind.NOTICE, 0, b"", encode_batch(0, [Leaving(0)]))

_ran: list[int] = []


@rpc.functions.idempotent
def note(number: int) -> None:
    _ran.append(number)


class Server:
    """A worker whose client ``bob`` dies and returns, and which gets what bob sent late."""

    def __init__(self, agent: Agent, bob: Agent, patched: pytest.MonkeyPatch) -> None:
        self.agent = agent
        self.former = bob.life
        self._bob = bob
        self._patched = patched

    def intercept(self, call: Callable[[Agent], object]) -> Frame:
        """The frame that arrives here when bob does something; it is not taken in."""
        came: list[Frame] = []
        with self._patched.context() as patched:
            keep: Callable[..., None] = lambda _, frame, *rest, **more: came.append(frame)  # noqa: E731
            patched.setattr(self.agent.inbound, "deliver", keep)
            call(self._bob)
            until(lambda: bool(came))
        return came[0]

    def replace_bob(self) -> None:
        """Bob is lost, and back."""
        with self._patched.context() as patched:
            patched.setattr(self.agent.transport, "add_peer", lambda peer: None)
            peer = self.agent.group.peer(self.former.worker)
            self.agent.add_peer(replace(peer, incarnation=self.former.incarnation + 1))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    _ran.clear()
    with local_group("server", "bob") as (agent, bob):
        yield Server(agent, bob, monkeypatch)


CALLS: dict[str, Callable[[Agent], object]] = {
    "call": lambda bob: bob.rpc_async("server", note, (1,)),
    "remote": lambda bob: bob.remote("server", note, (1,)),
    "retry": lambda bob: bob.rpc_async("server", note, (1,), retry=rpc.Retry()),
}


@pytest.mark.parametrize("kind", CALLS)
def test_a_request_of_a_former_life_does_not_run(
    server: Server, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    late = server.intercept(CALLS[kind])
    server.replace_bob()
    with caplog.at_level(logging.DEBUG, "rpc"):
        server.agent.inbound.deliver(server.former, late)
    assert f"dropped a message from {server.former}: that life is over" in caplog.messages
    assert server.agent.callee.quiet()
    assert server.agent.rpc_sync("server", len, ([],)) == 0
    assert _ran == []


def test_one_that_is_being_taken_in_as_its_life_ends_does_not_run(server: Server) -> None:
    late = server.intercept(CALLS["call"])
    server.replace_bob()
    server.agent.callee.take_request(server.former, late)
    assert server.agent.callee.quiet()
    assert _ran == []


@pytest.mark.interpreted
def test_one_that_waited_for_a_thread_has_no_outcome_for_its_successor(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting: list[Callable[[], object]] = []
    late = server.intercept(CALLS["retry"])
    with monkeypatch.context() as patched:
        patched.setattr(server.agent.executor, "run_here", lambda run, inline: waiting.append(run))
        server.agent.inbound.deliver(server.former, late)
    server.replace_bob()
    waiting.pop()()
    assert server.agent.callee.kept_outcomes() == 0
    assert _ran == []


def test_a_former_life_does_not_cancel_what_its_successor_asks(server: Server) -> None:
    late = server.intercept(CALLS["call"])
    server.replace_bob()
    server.agent.callee.cancel(server.former, [late.correlation])
    server.agent.inbound.deliver(server.agent.group.life(server.former.worker), late)
    until(lambda: _ran == [1])


def test_a_former_life_that_leaves_does_not_take_its_successor_along(server: Server) -> None:
    server.replace_bob()
    server.agent.inbound.deliver(server.former, GOODBYE)
    assert server.agent.group.lives("bob")


@pytest.mark.parametrize("stranger", [Life(9, 0), Life(1, 99)])
def test_a_frame_of_a_life_that_never_joined_is_reported(
    server: Server, stranger: Life, caplog: pytest.LogCaptureFixture
) -> None:
    server.agent.inbound.deliver(stranger, GOODBYE)
    assert f"dropped a message from {stranger}: it is not in the group" in caplog.messages
