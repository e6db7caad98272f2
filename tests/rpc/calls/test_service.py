"""Serving one request: what is replied, printed and counted, however its handler ends."""

from __future__ import annotations

import asyncio
import io
import itertools
import logging
import re
import sys
import threading
from collections.abc import Callable, Iterable
from functools import partial
from types import SimpleNamespace
from typing import ClassVar, NoReturn

import pytest
import torch

import rpc
from rpc import functions
from rpc.agent import Agent
from rpc.calls import service
from rpc.current import current_agent
from rpc.errors import RemoteError, RpcTimeoutError, RRefCreationError, WorkerLostError
from rpc.functions import idempotent
from rpc.runtime import streams
from rpc.runtime.clock import MonotonicClock
from rpc.testing import MemoryHub, local_group
from rpc.transports.base import Frame
from rpc.transports.tensorwire.settings import Settings
from rpc.transports.tensorwire.transport import TensorWireTransport
from tests import waiting
from tests.rpc.gates import Gate, gates, pass_gate

SECONDS = 30.0

until = partial(waiting.until, seconds=SECONDS)


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
        served = there.callee.serving
        until(lambda: [row["cancelled"] for row in served()] == [False, True, True, True])
        for gate in (made, *asked):
            gate.open.set()
        until(lambda: there.callee.quiet() and here.caller.quiet())
        assert heard.bytes == 0
        assert rref.to_here().sum() == 100_000
        assert heard.bytes == 400_000


@idempotent
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
        monkeypatch.setattr(sys, "stderr", log)
        with pytest.raises(ValueError, match="naïve"):
            here.remote("there", refuse, timeout=10).to_here()
        until(there.callee.quiet)
        assert "sys.stderr does not take this traceback" in caplog.text


def fail_at_length() -> None:
    raise ValueError("x" * 100_000)


def test_an_error_that_is_too_long_to_be_sent_is_told_in_short() -> None:
    settings = Settings(max_message_bytes=8192)
    with local_group("here", "there", transport=lambda: TensorWireTransport(settings)) as agents:
        with pytest.raises(RemoteError, match=r"cannot be sent: EncodeError\(.* the limit is 8192"):
            agents[0].rpc_sync("there", fail_at_length, timeout=10)
        until(agents[1].callee.quiet)


def raise_memory_error(*_: object) -> NoReturn:
    raise MemoryError


def test_a_request_whose_reply_cannot_be_sent_at_all_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    with local_group("here", "there") as (here, there):
        monkeypatch.setattr(there.transport, "send", raise_memory_error)
        future = here.rpc_async("there", refuse, timeout=0)
        until(lambda: there.callee.handled() > 0 and there.callee.quiet())
        assert future.cancel()


@pytest.mark.parametrize("retry", [None, rpc.Retry()])
def test_a_caller_gets_a_reply_although_telling_the_error_failed(
    retry: rpc.Retry | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(service.Service, "_fail", raise_memory_error)
    with local_group("here", "there") as (here, there):
        with pytest.raises(RemoteError, match="and so did telling why"):
            here.rpc_sync("there", refuse, timeout=10, retry=retry)
        until(there.callee.quiet)
    assert "refuse failed, and so did telling why" in caplog.text


def test_a_traceback_is_the_callers_and_the_worker_it_is_from_says_one_line(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rpc")
    with local_group("here", "there") as (here, there):
        with pytest.raises(ValueError, match="naïve\n\nOn WorkerInfo"):
            here.rpc_sync("there", refuse, timeout=10)
        until(there.callee.quiet)
    (line,) = caplog.messages
    assert re.fullmatch(
        r"on 'there', .*refuse raised ValueError\('naïve'\); worker 0, which called it, has the "
        r"traceback",
        line,
    )
    assert "Traceback" not in capfd.readouterr().err


def test_a_traceback_of_an_object_is_printed_at_once_under_the_name_of_the_worker_it_is_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written: list[str] = []
    with local_group("here", "there") as (here, there):
        log = SimpleNamespace(write=written.append)
        monkeypatch.setattr(sys, "stderr", log)
        with pytest.raises(ValueError, match="naïve"):
            here.remote("there", refuse, timeout=10).to_here()
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


def test_a_call_whose_time_is_over_before_it_starts_timed_out_for_its_caller_too() -> None:
    clocks = {"here": MonotonicClock(), "there": FastClock()}
    with (
        local_group(*clocks, clock=clocks) as (here, _),
        pytest.raises(RpcTimeoutError, match="and did not start before it was over"),
    ):
        here.rpc_sync("there", abs, (-1,), timeout=60)


class FastClock(MonotonicClock):
    """A minute and more passes whenever it is looked at."""

    def __init__(self) -> None:
        minutes = itertools.count(0, 100)
        self.now = lambda: float(next(minutes))


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
    with pytest.raises((WorkerLostError, RRefCreationError), match=r"'bob' .*(was lost|left)"):
        outcome.wait() if through == "rpc_async" else outcome.to_here()
    assert capsys.readouterr().err == ""


class Kernel(torch.futures.Future[int]):
    """Acts like one with devices: only ``wait`` has the streams of the thread wait."""

    waits: ClassVar[list[str]] = []

    def wait(self) -> int:
        self.waits.append(threading.current_thread().name)
        return super().wait()


@functions.async_execution
def start_a_kernel() -> torch.futures.Future[int]:
    future = Kernel()
    future.set_result(7)
    return future


def test_what_an_asynchronous_handler_made_is_waited_for_where_it_is_sent() -> None:
    Kernel.waits.clear()
    with local_group("here", "there") as (here, _):
        assert here.rpc_sync("there", start_a_kernel, timeout=10) == 7
    assert len(Kernel.waits) == 1


def double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.mul(2)


def test_tensors_leave_the_streams_of_who_sends_them_and_are_taken_by_who_gets_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Threads that send again, or late, have the default streams current."""
    seen: list[tuple[str, int]] = []

    def note(what: str) -> Callable[[Iterable[torch.Tensor]], None]:
        def look(tensors: Iterable[torch.Tensor]) -> None:
            if count := sum(each.numel() for each in tensors):
                seen.append((what, count))

        return look

    monkeypatch.setattr(streams, "leave_tensors", note("leave"))
    monkeypatch.setattr(streams, "take_tensors", note("take"))
    with local_group("here", "there") as (here, _):
        result = here.rpc_sync("there", double, (torch.ones(100_000),), timeout=10)
    assert result.sum() == 200_000
    sent = ("leave", 100_000), ("leave", 100_000), ("take", 100_000)  # by us, and by the way there
    assert seen == [*sent, *sent]
