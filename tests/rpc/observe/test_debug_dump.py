"""A worker tells about itself, and a signal makes it tell."""

from __future__ import annotations

import asyncio
import io
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import rpc
from rpc.agent import Agent
from rpc.observe.debug_dump import DebugSignal, describe, install_debug_signal
from rpc.testing import VirtualClock, as_worker, local_group
from tests.rpc.gates import gate, wait_at_the_gate
from tests.waiting import until


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def pair(clock: VirtualClock) -> Iterator[list[Agent]]:
    """Two workers; code in the test runs as alice."""
    with local_group("alice", "bob", clock=clock) as agents, as_worker(agents[0]):
        yield agents


def dumps_in(file: io.StringIO) -> int:
    """Counts the dumps that were written; the stacks in one may quote any line of this file."""
    return len(re.findall("^=== ", file.getvalue(), re.MULTILINE))


@pytest.fixture
def stuck(pair: list[Agent], clock: VirtualClock) -> Iterator[list[Agent]]:
    """A call from alice to bob has been under way for 12.5 seconds."""
    gate.clear()
    future = pair[0].rpc_async("bob", wait_at_the_gate, timeout=0)
    # Its name is known before its thread has begun.
    until(lambda: "gate.wait(20)" in describe(pair[1]))
    clock.advance(12.5)
    yield pair
    gate.set()
    future.wait()


class TestDescribe:
    def test_calls_are_told_with_age_and_destination(self, stuck: list[Agent]) -> None:
        assert "12.500 s  wait_at_the_gate -> bob" in describe(stuck[0])

    def test_requests_are_told_with_age_and_origin(self, stuck: list[Agent]) -> None:
        assert "12.500 s  wait_at_the_gate <- alice (CALL)" in describe(stuck[1])

    def test_handlers_are_told_with_their_stack(self, stuck: list[Agent]) -> None:
        text = describe(stuck[1])
        (stack,) = re.findall(r"thread rpc-bob-handler \[\d+\]:\n((?: .*\n)+)", text)
        assert "in wait_at_the_gate\n    gate.wait(20)" in stack

    @pytest.mark.interpreted  # compiled functions are in no stack
    def test_threads_without_work_are_only_counted(self, pair: list[Agent]) -> None:
        assert pair[0].rpc_sync("bob", os.getpid) == os.getpid()
        until(lambda: "threads rpc-bob-handler: 1 without work" in describe(pair[1]))

    def test_references_are_told_with_their_holders(self, pair: list[Agent]) -> None:
        rref = pair[0].remote("bob", torch.ones, (2,))
        rref.to_here()
        assert "Tensor, held by worker 0 (incarnation 0)" in describe(pair[1])
        until(lambda: "on worker 1 (incarnation 0): confirmed" in describe(pair[0]))
        del rref

    def test_values_that_are_not_there_are_told_apart(self, stuck: list[Agent]) -> None:
        rref = stuck[0].remote("bob", wait_at_the_gate, timeout=0)
        until(lambda: "not there yet, held by worker 0" in describe(stuck[1]))
        assert "creating" in describe(stuck[0])
        gate.set()
        rref.to_here()
        del rref

    def test_a_section_that_cannot_be_told_does_not_hide_the_others(
        self, pair: list[Agent], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail() -> None:
            raise KeyError("broken")

        monkeypatch.setattr(pair[0], "inventory", fail)
        text = describe(pair[0])
        assert "cannot tell: KeyError('broken')" in text
        assert "requests being served: none" in text


class TestSignal:
    def test_a_signal_makes_the_worker_tell(self, stuck: list[Agent]) -> None:
        file = io.StringIO()
        with install_debug_signal(file=file):
            for count in (1, 2):
                os.kill(os.getpid(), signal.SIGUSR1)
                until(lambda count=count: dumps_in(file) == count)
        assert file.getvalue().count("12.500 s  wait_at_the_gate -> bob") == 2

    def test_it_works_while_the_main_thread_waits_inside_torch(self, stuck: list[Agent]) -> None:
        file = io.StringIO()
        future: torch.futures.Future[int] = torch.futures.Future()

        def ask() -> None:
            os.kill(os.getpid(), signal.SIGUSR1)
            until(lambda: "WorkerInfo" in file.getvalue())
            future.set_result(1)

        with install_debug_signal(file=file):
            helper = threading.Thread(target=ask)
            helper.start()
            assert future.wait() == 1
            helper.join()
        assert "in test_it_works_while_the_main_thread_waits_inside_torch" in file.getvalue()

    def test_it_works_beside_an_asyncio_loop(self, pair: list[Agent]) -> None:
        file = io.StringIO()

        async def program() -> None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, lambda: None)
            os.kill(os.getpid(), signal.SIGUSR1)
            while "WorkerInfo" not in file.getvalue():
                await asyncio.sleep(0.002)

        with install_debug_signal(file=file):
            asyncio.run(asyncio.wait_for(program(), 20))
        assert file.getvalue().count("WorkerInfo(id=0, name=alice), process") == 1

    def test_without_rpc_the_threads_are_told(self) -> None:
        file = io.StringIO()
        with install_debug_signal(signal.SIGUSR2, file):
            os.kill(os.getpid(), signal.SIGUSR2)
            until(lambda: "thread MainThread" in file.getvalue())
        assert "RPC is not initialized" in file.getvalue()

    def test_the_standard_error_stream_is_the_default(
        self, pair: list[Agent], capsys: pytest.CaptureFixture[str]
    ) -> None:
        told = ""
        with rpc.install_debug_signal():
            os.kill(os.getpid(), signal.SIGUSR1)
            deadline = time.monotonic() + 20
            while "counts" not in told and time.monotonic() < deadline:
                time.sleep(0.002)
                told += capsys.readouterr().err
        assert "WorkerInfo(id=0, name=alice)" in told

    def test_closing_restores_what_was(self) -> None:
        before = signal.getsignal(signal.SIGUSR1)
        with install_debug_signal() as installed:
            assert signal.getsignal(signal.SIGUSR1) == installed._received
        assert signal.getsignal(signal.SIGUSR1) == before
        assert signal.set_wakeup_fd(-1) == -1

    def test_a_signal_that_cannot_be_handled_is_named(self) -> None:
        wrong: Any = "USR1"
        with pytest.raises(TypeError, match="signal_number='USR1' is a str"):
            install_debug_signal(wrong)
        with pytest.raises(ValueError, match=f"signal {int(signal.SIGKILL)} cannot be handled"):
            install_debug_signal(int(signal.SIGKILL))

    def test_only_the_main_thread_can_install_it(self) -> None:
        errors: list[BaseException] = []

        def install() -> None:
            try:
                DebugSignal(signal.SIGUSR1, None)
            except ValueError as error:
                errors.append(error)

        thread = threading.Thread(target=install)
        thread.start()
        thread.join()
        assert len(errors) == 1
