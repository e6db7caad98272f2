"""The scopes that extensions enter around a handler, and how it is left."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from types import TracebackType
from typing import Any, ClassVar

import pytest
import torch

import rpc
from rpc.agent import Agent
from rpc.calls.extension_set import Scopes, leave
from rpc.errors import RpcTimeoutError
from rpc.observe.debug_dump import describe
from rpc.testing import VirtualClock, local_group
from tests.waiting import until


class Scope:
    def __init__(self, name: str, left: list[object], error: BaseException | None = None) -> None:
        self._name, self._left, self._error = name, left, error

    def __enter__(self) -> None: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._left.append((self._name, kind, error, trace is not None))
        if self._error is not None:
            raise self._error


def test_scopes_are_left_in_reverse_order() -> None:
    left: list[object] = []
    scopes: Scopes = [Scope("first", left), Scope("second", left)]
    leave(scopes, None)
    assert left == [("second", None, None, False), ("first", None, None, False)]
    assert scopes == []


def test_scopes_learn_what_was_raised_in_them() -> None:
    left: list[object] = []
    with pytest.raises(KeyError) as raised:
        raise KeyError("x")
    leave([Scope("one", left)], raised.value)
    assert left == [("one", KeyError, raised.value, True)]


def test_all_scopes_are_left_though_one_raises() -> None:
    left: list[object] = []
    scopes: Scopes = [Scope("first", left), Scope("second", left, ValueError("no"))]
    with pytest.raises(ValueError, match="no"):
        leave(scopes, None)
    assert [row[0] for row in left] == ["second", "first"]  # type: ignore[index]


class Answering:
    """An extension whose hooks return what is wanted, but for one."""

    name: ClassVar[str] = __name__
    wrong: ClassVar[dict[str, Any]] = {}

    def __init__(self, agent: Agent) -> None: ...

    def outgoing_request(self, to: int, tensors: object) -> Any:
        return self.wrong.get("outgoing_request", b"q")

    def incoming_request(self, sender: int, metadata: bytes, tensors: object) -> Any:
        return self.wrong.get("incoming_request", (tensors, nullcontext()))

    def outgoing_reply(self, to: int, request_metadata: bytes, tensors: object) -> Any:
        return self.wrong.get("outgoing_reply", b"r")

    def incoming_reply(self, sender: int, request: bytes, reply: bytes, tensors: object) -> Any:
        return self.wrong.get("incoming_reply", tensors)

    def on_message(self, sender: int, body: bytes, tensors: object) -> Any:
        return self.wrong.get("on_message", b"a")

    def on_worker_lost(self, worker_id: int, reason: str) -> None:
        error = self.wrong.get("on_worker_lost")
        if error is not None:
            raise error

    def debug_info(self) -> Any:
        answer = self.wrong.get("debug_info", {"answered": 1})
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None: ...


RPC_EXTENSION = Answering


def add_one(tensor: torch.Tensor) -> torch.Tensor:
    return tensor + 1


@pytest.fixture
def pair() -> Iterator[list[Agent]]:
    with local_group("alice", "bob") as agents:
        agents[0].extensions.load(__name__)
        yield agents


@pytest.mark.parametrize(
    ("hook", "answer", "wanted"),
    [
        ("outgoing_request", "text", "bytes or None"),
        ("incoming_request", None, "a pair of tensors and a context manager"),
        ("incoming_request", ([], nullcontext()), "a list of 1 tensors"),
        ("outgoing_reply", 5, "bytes or None"),
        ("incoming_reply", None, "a list of 1 tensors"),
        ("incoming_reply", [], "a list of 1 tensors"),
    ],
)
def test_a_hook_that_returns_what_it_must_not_is_named(
    pair: list[Agent], hook: str, answer: object, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = torch.ones(2)
    assert pair[0].rpc_sync("bob", add_one, (tensor,)).tolist() == [2, 2]
    monkeypatch.setitem(Answering.wrong, hook, answer)
    with pytest.raises(TypeError, match=f"{hook} of the extension .* must return {wanted}"):
        pair[0].rpc_sync("bob", add_one, (tensor,))


def test_an_answer_to_a_message_is_bytes(
    pair: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert pair[0].send_extension_message(1, __name__, b"").wait() == b"a"
    monkeypatch.setitem(Answering.wrong, "on_message", "text")
    with pytest.raises(TypeError, match=r"on_message of the extension .* must return bytes"):
        pair[0].send_extension_message(1, __name__, b"").wait()


def test_one_that_cannot_be_told_of_a_loss_keeps_nobody_waiting_for_the_lost(
    pair: list[Agent], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    alice, bob = pair
    monkeypatch.setitem(Answering.wrong, "on_worker_lost", ValueError("no"))
    assert alice.worker_loss.lost(bob.life, "it was cut off")
    alice.shutdown(timeout=20.0)
    assert f"the extension {__name__!r} could not be told of a loss" in caplog.text


@pytest.mark.parametrize(("default", "timeout"), [(math.inf, -1.0), (1e300, -1.0), (60.0, 1e300)])
def test_a_message_may_have_ages(pair: list[Agent], default: float, timeout: float) -> None:
    pair[0].rpc_timeout = default
    assert pair[0].send_extension_message(1, __name__, b"", timeout).wait() == b"a"


@pytest.mark.parametrize("timeout", [5.0, 0.0], ids=["times out", "is cancelled"])
def test_an_answer_that_never_comes_keeps_nothing_once_nobody_waits(
    timeout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, answer = VirtualClock(), rpc.Future[bytes]()
    monkeypatch.setitem(Answering.wrong, "on_message", answer)
    with local_group("alice", "bob", clock=clock) as (alice, bob):
        asked = alice.send_extension_message(1, __name__, b"", timeout)
        until(lambda: bool(bob.callee.serving()))
        if timeout:
            clock.advance(timeout + 1)
            with pytest.raises(RpcTimeoutError):
                asked.wait()
        else:
            assert asked.cancel()
        until(lambda: alice.caller.quiet() and bob.callee.quiet())
        handled = bob.callee.handled()
        answer.set_result(b"late")
        assert bob.callee.handled() == handled


class _Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize(
    ("answer", "shown"),
    [
        (ValueError("no counts"), "debug_info failed: ValueError: no counts"),
        (_Unspeakable(), "debug_info failed: _Unspeakable: "),
        ([("a", 1)], "debug_info failed: TypeError: debug_info of the extension"),
    ],
    ids=["raises", "raises what has no text", "returns no mapping"],
)
def test_an_extension_that_cannot_count_is_named_among_what_the_others_count(
    pair: list[Agent],
    answer: object,
    shown: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    alice = pair[0]
    alice.extensions.load("rpc.tracing")
    assert alice.debug_info()["answered"] == 1
    monkeypatch.setitem(Answering.wrong, "debug_info", answer)
    found = alice.debug_info()
    assert found[__name__].startswith(shown)
    assert (found["traces"], found["calls"]) == (0, [])
    assert f"debug_info of the extension {__name__!r} failed" in caplog.text
    assert shown in describe(alice)
