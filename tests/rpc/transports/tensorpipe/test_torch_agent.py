"""The right things are asked of torch's agent, and nobody hangs where it does not come back."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from rpc.devices import DeviceMap
from rpc.errors import DeviceMapError
from rpc.options import TensorPipeRpcBackendOptions
from rpc.transports.tensorpipe import scheduling
from rpc.transports.tensorpipe import torch_agent as tensorpipe_torch
from rpc.transports.tensorpipe.pool_threads import PoolThreads
from rpc.transports.tensorpipe.torch_agent import TorchAgent


class Agent:
    """Stands for one of torch's, whose end waits for what seldom never comes."""

    def __init__(
        self,
        may_stop: threading.Event,
        reverse_maps: Mapping[str, DeviceMap] = {},
        devices: list[torch.device] | None = None,
    ) -> None:
        self.may_stop = may_stop
        self.stopping = threading.Event()
        self.reverse_maps = dict(reverse_maps)
        self.devices = list(devices or ())
        self.lacked: list[str] = []
        """The peers that had no reverse map for a moment."""

    def join(self, shutdown: bool) -> None:
        """It is alone in its group."""

    def _update_group_membership(
        self,
        worker: tuple[str, int],
        devices: list[torch.device],
        reverse_maps: dict[str, DeviceMap],
        joins: bool,
    ) -> None:
        """Acts like torch's: joining replaces no map, leaving removes what is not passed."""
        if joins:
            self.reverse_maps = reverse_maps | self.reverse_maps
            self.devices += [each for each in devices if each not in self.devices]
            return
        kept = {name: map_ for name, map_ in self.reverse_maps.items() if name in reverse_maps}
        self.lacked += self.reverse_maps.keys() - kept
        self.reverse_maps = kept
        self.devices = [each for each in self.devices if each in devices]

    def shutdown(self) -> None:
        self.stopping.set()
        self.may_stop.wait()


class Module:
    """Stands for the part of torch that makes agents."""

    def __init__(self) -> None:
        self.may_stop = threading.Event()
        self.current: Agent | None = None
        self.made: list[Agent] = []

    def _TensorPipeRpcBackendOptionsBase(self, *_: Any, **__: Any) -> None:
        """Makes nothing that matters."""

    def WorkerInfo(self, name: str, torch_id: int) -> tuple[str, int]:
        return name, torch_id

    def TensorPipeAgent(self, store: Any, name: str, *rest: Any) -> Agent:
        store.set(f"addrs/{name}", "an address")
        *_, reverse_maps, devices = rest
        self.made.append(Agent(self.may_stop, reverse_maps, devices))
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


CPU = torch.device("cpu")
GPUS = [torch.device("cuda", index) for index in range(3)]


class TestDevices:
    """The devices that torch is told of, in a process that seems to have two."""

    @pytest.fixture
    def begun(self) -> list[list[torch.device]]:
        """The devices that torch knew whenever CUDA was initialised."""
        return []

    @pytest.fixture
    def agent(
        self,
        module: Module,
        begun: list[list[torch.device]],
        monkeypatch: pytest.MonkeyPatch,
    ) -> TorchAgent:
        return self._make(module, begun, monkeypatch, [], {})

    @staticmethod
    def _make(
        module: Module,
        begun: list[list[torch.device]],
        monkeypatch: pytest.MonkeyPatch,
        devices: list[torch.device],
        own: DeviceMap,
    ) -> TorchAgent:
        module.may_stop.set()
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        known = lambda: list(module.made[-1].devices) if module.made else []  # noqa: E731
        monkeypatch.setattr(torch.cuda, "init", lambda: begun.append(known()))
        monkeypatch.setattr(torch._C, "_distributed_rpc", module)
        monkeypatch.setattr(tensorpipe_torch, "_allow_calls", lambda: None)
        monkeypatch.setattr(scheduling, "reactors", list)
        return TorchAgent("me", TensorPipeRpcBackendOptions(), None, devices, own)

    def test_cuda_is_initialised_before_torch_hears_of_a_device_that_only_a_peer_names(
        self, agent: TorchAgent, module: Module, begun: list[list[torch.device]]
    ) -> None:
        assert begun == []
        agent.reach("trainer", b"there", {CPU: CPU})
        assert begun == []
        agent.reach("trainer", b"there", {GPUS[1]: GPUS[2]})
        assert begun == [[]]
        assert module.made[-1].devices == [GPUS[1]]

    def test_and_before_it_is_told_of_those_that_a_peer_asks_for(
        self, agent: TorchAgent, module: Module, begun: list[list[torch.device]]
    ) -> None:
        agent.use([CPU, GPUS[1]])
        agent.use([GPUS[0], GPUS[1]])
        assert begun == [[], [GPUS[1]]]
        assert module.made[-1].devices == [GPUS[1], GPUS[0]]

    def test_torch_hears_of_one_again_of_which_it_could_not_be_told(
        self, agent: TorchAgent, module: Module, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*_: object) -> None:
            raise RuntimeError("not now")

        for begin in (agent.use, lambda gpus: agent.reach("w", b"there", {gpus[0]: CPU})):
            with monkeypatch.context() as patched:
                patched.setattr(module.made[-1], "_update_group_membership", refuse)
                with pytest.raises(RuntimeError, match="not now"):
                    begin([GPUS[0]])
        assert module.made[-1].devices == []
        agent.use([GPUS[0]])
        assert module.made[-1].devices == [GPUS[0]]

    def test_torch_hears_of_no_device_that_is_not_there(
        self, agent: TorchAgent, module: Module, begun: list[list[torch.device]]
    ) -> None:
        with pytest.raises(DeviceMapError, match="leads to cuda:2, but this process has 2 CUDA"):
            agent.reach("trainer", b"there", {GPUS[0]: CPU, GPUS[2]: CPU})
        with pytest.raises(DeviceMapError):
            agent.use([GPUS[2]])
        assert module.made[-1].devices == module.made[-1].lacked == begun == []

    def test_a_worker_that_returns_is_answered_by_its_new_map(
        self, agent: TorchAgent, module: Module
    ) -> None:
        known = module.made[-1]
        agent.reach("other", b"there", {GPUS[0]: CPU})
        for device_map in ({GPUS[0]: GPUS[0]}, {GPUS[1]: GPUS[0]}, {}, {GPUS[0]: GPUS[1]}):
            agent.reach("trainer", b"there", device_map)
            assert known.reverse_maps.get("trainer", {}) == device_map
        assert known.reverse_maps["other"] == {GPUS[0]: CPU}

    def test_one_that_returns_with_the_same_map_is_never_without_it(
        self, agent: TorchAgent, module: Module
    ) -> None:
        for _ in range(3):
            agent.reach("trainer", b"there", {GPUS[0]: GPUS[0]})
        assert module.made[-1].lacked == []

    def test_the_map_of_a_worker_for_itself_is_known_from_the_beginning(
        self,
        module: Module,
        begun: list[list[torch.device]],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        agent = self._make(module, begun, monkeypatch, GPUS[:2], {GPUS[1]: GPUS[0]})
        assert begun == [[]]
        known = module.made[-1]
        assert (known.reverse_maps, known.devices) == ({"me": {GPUS[1]: GPUS[0]}}, GPUS[:2])
        agent.reach("other", b"there", {})
        agent.reach("other", b"there", {})
        assert known.reverse_maps == {"me": {GPUS[1]: GPUS[0]}}


def test_an_error_of_a_pipe_is_no_answer() -> None:
    def ended(error: Exception | None) -> str:
        future: torch.futures.Future[None] = torch.futures.Future()
        future.set_exception(error) if error else future.set_result(None)  # type: ignore[arg-type]
        return tensorpipe_torch.refusal_of(future)

    assert ended(None) == ""
    assert ended(RuntimeError("pipe closed (this error originated at tensorpipe/a.cc:1)")) == ""
    assert (
        ended(RuntimeError("device mapping is not available")) == "device mapping is not available"
    )
    assert ended(ValueError()) == "ValueError"
