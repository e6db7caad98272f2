"""The facts known of a group before its workers have met."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from rpc import bring_up, builtin_backends
from rpc._testing import FaultyTensorPipeRpcBackendOptions
from rpc._testing import backend as faulty_backends
from rpc.agent import Agent
from rpc.backend_registry import BackendType
from rpc.bring_up import address_towards, is_crowded
from rpc.group.member_list import MemberList, MemberTable
from rpc.options import TensorPipeRpcBackendOptions
from rpc.transports.tensorwire import TensorWireRpcBackendOptions
from tests.rpc.stores import signed


@pytest.fixture(autouse=True)
def _two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bring_up, "usable_cores", lambda: 2)
    for name in ("LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    "init_method",
    [
        "tcp://127.0.0.1:29500",
        "tcp://localhost:29500",
        "tcp://[::1]:29500",
        "env://",
        "file:///tmp/store",
    ],
)
def test_more_workers_than_cores_at_a_loopback_address_or_a_file_crowd(
    init_method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert not is_crowded(init_method, 2)
    assert is_crowded(init_method, 3)
    assert address_towards(init_method) is None


@pytest.mark.parametrize("init_method", ["env://", "tcp://nowhere.invalid:1"])
def test_workers_that_may_be_on_several_hosts_do_not(init_method: str) -> None:
    assert not is_crowded(init_method, 300)
    assert address_towards(init_method) is None


def test_the_stores_other_host_says_nothing_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bring_up, "_address_towards", lambda host: "192.0.2.7")
    assert not is_crowded("tcp://192.0.2.1:29500", 300)
    assert address_towards("tcp://192.0.2.1:29500") == "192.0.2.7"


def test_what_torchrun_says_counts_where_it_says_where_the_store_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert is_crowded("env://", 30)
    assert not is_crowded("tcp://127.0.0.1:29500", 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert not is_crowded("env://", 30)


class _MadeError(Exception):
    """A transport was asked for."""


@pytest.mark.parametrize(
    ("backend", "module"),
    [("TENSORPIPE", builtin_backends), ("FAULTY_TENSORPIPE", faulty_backends)],
)
@pytest.mark.parametrize("crowded", [False, True])
@pytest.mark.parametrize("world_size", [2, None])
def test_torch_is_not_asked_to_look_out_where_cores_or_peers_are_scarce(
    crowded: bool,
    world_size: int | None,
    backend: str,
    module: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[bool] = []

    def make(options: object, over_tcp: bool) -> None:
        taken.append(over_tcp)
        raise _MadeError

    monkeypatch.setattr(module, "TensorPipeTransport", make)
    monkeypatch.setattr(bring_up, "is_crowded", lambda *_: crowded)
    options = FaultyTensorPipeRpcBackendOptions()
    with pytest.raises(_MadeError):
        BackendType[backend].value.init_backend_handler(
            HashStore(), "alice", 0, world_size, options
        )
    assert taken == [crowded or world_size is None]


def test_a_launcher_finds_workers_also_of_a_transport_that_uses_no_key(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    key = tmp_path / "key"
    key.write_text("0123456789abcdef")
    key.chmod(0o600)
    monkeypatch.setenv("RPC_GROUP_KEY_FILE", str(key))
    store = HashStore()
    options = TensorPipeRpcBackendOptions(
        init_method="tcp://127.0.0.1:1", liveness_timeout=0, rpc_timeout=60
    )
    init = BackendType["TENSORPIPE"].value.init_backend_handler
    agent = init(store, "stage:0", 0, None, options)
    try:
        found = MemberList(store, key.read_bytes()).find("stage:0")
        assert found is not None
        assert found.pid == os.getpid()
    finally:
        agent.shutdown(graceful=False)


Maps = dict[str, dict[str, int]]
"""By destination worker, from this worker's devices to the numbers of GPUs."""


class TestDeviceMapsOfADynamicGroup:
    @pytest.fixture
    def store(self) -> HashStore:
        return HashStore()

    @pytest.fixture
    def join(self, store: HashStore) -> Iterator[Callable[[str, Maps], Agent]]:
        """Brings a worker into one group; no host has so many GPUs as its map may name."""
        agents: list[Agent] = []

        def join(name: str, maps: Maps) -> Agent:
            options = TensorWireRpcBackendOptions(
                init_method="tcp://127.0.0.1:1", device_maps=maps, liveness_timeout=0
            )
            rank = len(agents)
            init = BackendType["TENSORWIRE"].value.init_backend_handler
            agents.append(init(store, name, rank, None, options))
            return agents[-1]

        yield join
        for agent in agents:
            agent.shutdown(graceful=False)

    def names(self, store: HashStore) -> list[str]:
        return [member.name for member in MemberTable(signed(store)).members()]

    def test_who_joins_with_one_that_leads_nowhere_is_refused(
        self, store: HashStore, join: Callable[[str, Maps], Agent]
    ) -> None:
        join("alice", {})
        with pytest.raises(ValueError, match="Node bob has target devices with invalid indices"):
            join("bob", {"alice": {"cpu": 99}})
        assert self.names(store) == ["alice"]

    def test_so_is_one_to_whom_a_members_leads_nowhere(
        self, store: HashStore, join: Callable[[str, Maps], Agent]
    ) -> None:
        join("alice", {"bob": {"cpu": 99}})
        with pytest.raises(ValueError, match="Node alice has target devices with invalid indices"):
            join("bob", {})
        join("carol", {"dave": {"cpu": 0}})
        assert self.names(store) == ["alice", "carol"]


class TestAHostWhoseNameStandsForItsLoopbackInterface:
    @pytest.fixture(autouse=True)
    def _debian(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(bring_up, "_address_towards", lambda host: "127.0.1.1")
        monkeypatch.setattr(bring_up, "outward_address", lambda addresses: "192.0.2.7")
        monkeypatch.setenv("MASTER_ADDR", "head")

    @pytest.mark.parametrize("init_method", ["env://", "tcp://head:29500"])
    def test_is_told_to_others_by_another_address_in_a_group_with_a_key(
        self, init_method: str
    ) -> None:
        assert address_towards(init_method, b"key") == "192.0.2.7"
        assert address_towards(init_method) is None

    def test_keeps_to_itself_what_is_known_to_be_on_it(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert address_towards("tcp://127.0.0.1:29500", b"key") is None
        assert address_towards("tcp://localhost:29500", b"key") is None
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            monkeypatch.setenv(name, "2")
        assert address_towards("env://", b"key") is None
        monkeypatch.setenv("WORLD_SIZE", "4")
        assert address_towards("env://", b"key") == "192.0.2.7"
