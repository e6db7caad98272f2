"""What torch's agent is asked to do, and what is done where it does not come back."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from rpc.transports import tensorpipe_torch
from rpc.transports.tensorpipe_threads import PoolThreads
from rpc.transports.tensorpipe_torch import TorchAgent


class Agent:
    """Stands for one of torch's, whose end waits for what seldom never comes."""

    def __init__(self, may_stop: threading.Event) -> None:
        self.may_stop = may_stop
        self.stopping = threading.Event()

    def join(self, shutdown: bool) -> None:
        """It is alone in its group."""

    def shutdown(self) -> None:
        self.stopping.set()
        self.may_stop.wait()


class Module:
    """Stands for the part of torch that makes agents."""

    def __init__(self) -> None:
        self.may_stop = threading.Event()
        self.current: Agent | None = None
        self.made: list[Agent] = []

    def _TensorPipeRpcBackendOptionsBase(self, *_: Any) -> None:
        """What it makes does not matter."""

    def TensorPipeAgent(self, *_: Any) -> Agent:
        self.made.append(Agent(self.may_stop))
        return self.made[-1]

    def _set_and_start_rpc_agent(self, agent: Agent) -> None:
        self.current = agent

    def _rref_context_get_debug_info(self) -> None:
        assert self.current is not None

    def _reset_current_rpc_agent(self) -> None:
        self.current = None

    def _get_current_rpc_agent(self) -> Agent | None:
        return self.current

    def _is_current_rpc_agent_set(self) -> bool:
        return self.current is not None


@pytest.fixture
def module() -> Iterator[Module]:
    made = Module()
    yield made
    made.may_stop.set()


def test_the_agent_that_torch_keeps_is_stopped(module: Module) -> None:
    module.may_stop.set()
    tensorpipe_torch._give_torch_an_agent_to_keep(module)
    (kept,) = module.made
    assert kept.stopping.is_set()
    assert module.current is None


def test_one_that_does_not_stop_holds_nobody_up(
    module: Module, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tensorpipe_torch, "_SECONDS_TO_STOP_KEPT", 0.01)
    caplog.set_level(logging.INFO)
    tensorpipe_torch._give_torch_an_agent_to_keep(module)
    assert module.current is None
    assert "did not stop" in caplog.text


def test_of_an_agent_that_does_not_stop_its_worker_says_so_and_goes_on(
    module: Module, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    abandoned: list[threading.Thread] = []
    monkeypatch.setattr(tensorpipe_torch, "_SECONDS_TO_STOP", 0.01)
    monkeypatch.setattr(tensorpipe_torch, "abandon", lambda threads, _: abandoned.extend(threads))
    agent = TorchAgent.__new__(TorchAgent)
    agent._torch, agent._agent, agent.threads = module, Agent(module.may_stop), PoolThreads(1)
    agent.stop(time.monotonic())
    assert "torch's agent does not stop" in caplog.text
    (stopping,) = abandoned
    assert stopping.is_alive()
