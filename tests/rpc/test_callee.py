"""Serving requests: what becomes of one whose caller is gone, and of what does not fit."""

from __future__ import annotations

import asyncio
import io
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from rpc import callee, deadlines
from rpc.agent import Agent
from rpc.current import current_agent
from rpc.errors import RpcError, RpcTimeoutError, RRefCreationError, WorkerLostError
from rpc.testing import MemoryHub, connect, local_group
from rpc.transports.base import Frame, Peer
from tests import waiting

SECONDS = 30.0


class Gate:
    """Holds a handler until the test lets it go on."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.open = threading.Event()

    def pass_through(self) -> None:
        self.reached.set()
        assert self.open.wait(SECONDS)


old_gate, new_gate = Gate(), Gate()


def serve_old() -> str:
    old_gate.pass_through()
    return "for the old life"


def serve_new() -> str:
    new_gate.pass_through()
    return "for the new life"


gates: defaultdict[str, Gate] = defaultdict(Gate)


def pass_gate(name: str) -> None:
    gates[name].pass_through()


until = partial(waiting.until, seconds=SECONDS)


def come_back(agent: Agent, hub: MemoryHub, others: list[Agent]) -> Agent:
    """A worker that was cut off returns under the next incarnation."""
    returned = Agent(agent.info, agent.life.incarnation + 1, hub.transport())
    me = Peer(agent.info, returned.life.incarnation, returned.start())
    returned.join([me, *(other.group.peer(other.info.id) for other in others)])
    for other in others:
        other.add_peer(me)
    return returned


@contextmanager
def closing(*agents: Agent) -> Iterator[None]:
    try:
        yield
    finally:
        for gate in (old_gate, new_gate):
            gate.open.set()
        for agent in agents:
            agent.shutdown(graceful=False)


def test_what_was_asked_by_an_earlier_life_is_not_answered_to_the_next() -> None:
    """Both lives number their requests alike, so that the reply would be taken for another."""
    hub = MemoryHub()
    alice, bob = connect("alice", "bob", hub=hub)
    alice.rpc_async("bob", serve_old)
    assert old_gate.reached.wait(SECONDS)
    hub.cut(alice.info.id)
    returned = come_back(alice, hub, [bob])
    with closing(alice, returned, bob):
        answer = returned.rpc_async("bob", serve_new)
        assert new_gate.reached.wait(SECONDS)
        served = bob.callee.handled()
        old_gate.open.set()
        until(lambda: bob.callee.handled() > served)
        new_gate.open.set()
        assert answer.wait() == "for the new life"


@pytest.mark.parametrize("leaver", ["alice", "bob"])
def test_a_function_whose_reply_nobody_takes_did_not_fail(
    leaver: str, capfd: pytest.CaptureFixture[str]
) -> None:
    alice, bob = connect("alice", "bob")
    asked = alice.rpc_async("bob", pass_gate, (f"asked before {leaver} left",))
    made = alice.remote("bob", pass_gate, (f"made before {leaver} left",))
    passed = [gates[f"{what} before {leaver} left"] for what in ("asked", "made")]
    assert all(gate.reached.wait(SECONDS) for gate in passed)
    leaving = {"alice": alice, "bob": bob}[leaver]
    with closing(alice, bob), ThreadPoolExecutor(1) as pool:
        left = pool.submit(leaving.shutdown, graceful=False)
        with pytest.raises(RpcError):
            asked.wait()
        if leaver == "alice":  # bob's shutdown waits for its handlers
            left.result(SECONDS)
        for gate in passed:
            gate.open.set()
        until(lambda: bob.callee.handled() == 2)
        assert not any(series.errors for series in bob.callee.metrics())
    del made
    assert "Traceback" not in capfd.readouterr().err


class Overheard:
    """Counts the bytes of tensors that go from worker 1 to worker 0."""

    def __init__(self) -> None:
        self.bytes = 0

    def delay(self, source: int, destination: int, frame: Frame) -> float:
        if source == 1:
            self.bytes += sum(tensor.nbytes for tensor in frame.tensors)
        return 0.0


def make_large(gate: str) -> torch.Tensor:
    pass_gate(gate)
    return torch.ones(100_000)


def test_what_nobody_waits_for_any_more_is_not_sent() -> None:
    made, *asked = (Gate() for _ in range(4))
    gates.update({"made": made} | {f"asked {n}": gate for n, gate in enumerate(asked)})
    heard = Overheard()
    with local_group("here", "there", hub=MemoryHub(script=heard)) as (here, there):
        rref = here.remote("there", make_large, ("made",))
        futures = [here.rpc_async("there", make_large, (f"asked {n}",)) for n in range(3)]
        assert all(gate.reached.wait(SECONDS) for gate in (made, *asked))
        for _ in range(3):
            with pytest.raises(RpcTimeoutError):
                rref.to_here(timeout=0.01)
        assert all(future.cancel() for future in futures)
        until(lambda: sum(s.cancelled for s in there.callee._serving) == 6)
        for gate in (made, *asked):
            gate.open.set()
        until(lambda: there.callee.quiet() and here.caller.quiet())
        assert heard.bytes == 0
        assert rref.to_here().sum() == 100_000
        assert heard.bytes == 400_000


def refuse() -> None:
    raise ValueError("naïve")


class FullDisk(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


def closed_log() -> io.TextIOBase:
    log = io.StringIO()
    log.close()
    return log


@pytest.mark.parametrize(
    "log",
    [io.TextIOWrapper(io.BytesIO(), encoding="ascii"), FullDisk(), closed_log()],
    ids=["ascii", "full disk", "closed"],
)
def test_a_handler_that_fails_replies_although_its_traceback_cannot_be_printed(
    log: io.TextIOBase, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with local_group("here", "there") as (here, there):
        monkeypatch.setattr(callee, "sys", SimpleNamespace(stderr=log))
        with pytest.raises(ValueError, match="naïve"):
            here.rpc_sync("there", refuse, timeout=10)
        until(there.callee.quiet)
        assert "sys.stderr does not take this traceback" in caplog.text


def test_a_traceback_is_printed_at_once_under_the_name_of_the_worker_it_is_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written: list[str] = []
    with local_group("here", "there") as (here, there):
        log = SimpleNamespace(write=written.append)
        monkeypatch.setattr(callee, "sys", SimpleNamespace(stderr=log))
        with pytest.raises(ValueError, match="naïve"):
            here.rpc_sync("there", refuse, timeout=10)
        until(there.callee.quiet)
    (text,) = written
    assert text.startswith("On WorkerInfo(id=1, name=there):\nTraceback (most recent call last):\n")
    assert text.endswith("\nValueError: naïve\n")


def test_an_operator_that_does_not_fit_says_so_in_torchs_words_and_what_it_takes() -> None:
    with local_group("here", "there") as (here, _):
        with pytest.raises(
            RuntimeError, match=r"failed to match any schema: .*invalid combination"
        ) as caught:
            here.rpc_sync("there", torch.add, ())
        assert isinstance(caught.value, TypeError)
        with pytest.raises(TypeError, match="expected at least 1 argument") as caught:
            here.rpc_sync("there", max, ())
        assert "schema" not in str(caught.value)


def test_a_call_whose_time_is_over_before_it_starts_timed_out_for_its_caller_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(deadlines, "is_over", lambda *_: True)
    with (
        local_group("here", "there") as (here, _),
        pytest.raises(RpcTimeoutError, match="RPC ran for more than"),
    ):
        here.rpc_sync("there", abs, (-1,), timeout=60)


async def wait_in_a_coroutine() -> None:
    gates["shutdown"].reached.set()
    await asyncio.sleep(SECONDS)


def wait_for_a_call() -> None:
    current_agent().rpc_sync("alice", pass_gate, ("shutdown",))


@pytest.mark.parametrize("handler", [wait_in_a_coroutine, wait_for_a_call])
@pytest.mark.parametrize("through", ["rpc_async", "remote"])
def test_what_a_shutdown_ends_is_a_loss_to_its_caller_and_no_error_of_the_function(
    pair: list[Agent],
    handler: Callable[[], object],
    through: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    alice, bob = pair
    gates.pop("shutdown", None)
    outcome = getattr(alice, through)("bob", handler)
    assert gates["shutdown"].reached.wait(SECONDS)
    bob.shutdown(graceful=False)
    gates["shutdown"].open.set()
    with pytest.raises((WorkerLostError, RRefCreationError), match=r"'bob' .*was lost"):
        outcome.wait() if through == "rpc_async" else outcome.to_here()
    assert capsys.readouterr().err == ""
