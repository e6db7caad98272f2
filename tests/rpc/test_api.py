"""The work of the module-level functions besides delegating to the agent."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import pytest
import torch
import torch.distributed.rpc
from torch.distributed import TCPStore

import rpc
from rpc import api, current
from rpc.agent import Agent
from rpc.errors import BringUpError, RpcError
from rpc.outcomes import collecting
from rpc.testing import as_worker, local_group


@pytest.fixture
def worker() -> Iterator[Agent]:
    """This process is a worker, of a group that is in this process as a whole."""
    with local_group("here", "there") as (here, _):
        api._set_and_start_rpc_agent(here)
        yield here
        if api._is_current_rpc_agent_set():
            rpc.shutdown(graceful=False)


def test_a_worker_ends_torchs_wait_all_with_the_first_error(worker: Agent) -> None:
    assert torch._C._collect_all is collecting.collect_all
    rpc.shutdown(graceful=False)
    assert torch._C._collect_all is not collecting.collect_all


def test_a_program_may_put_its_own_waiting_in_the_place_of_ours(
    worker: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(timeout: float) -> None:
        raise RuntimeError(f"not within {timeout} seconds")

    monkeypatch.setattr(api, "_wait_all_workers", refuse)
    with pytest.raises(RuntimeError, match=r"not within 3.0 seconds"):
        rpc.shutdown(timeout=3.0)
    assert not api._is_current_rpc_agent_set()
    with pytest.raises(RuntimeError, match="shut"):
        worker.rpc_sync("there", abs, (1,))


def test_a_second_shutdown_does_nothing(worker: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(current.Process, "joined", True)  # as init_rpc does
    rpc.shutdown(graceful=False)
    rpc.shutdown()
    rpc.shutdown(graceful=False)


def test_a_shutdown_that_another_thread_cut_short_leaves_the_next_session_alone(
    worker: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, goes_on = threading.Event(), threading.Event()
    shut_down = worker.shutdown

    def late(graceful: bool, timeout: float) -> None:
        if graceful:
            waits.set()
            assert goes_on.wait(20)
        shut_down(graceful=False)

    monkeypatch.setattr(worker, "shutdown", late)
    first = threading.Thread(target=rpc.shutdown, daemon=True)
    first.start()
    assert waits.wait(20)
    rpc.shutdown(graceful=False)
    assert not api._is_current_rpc_agent_set()
    with local_group("here", "there") as (again, _):
        api._set_and_start_rpc_agent(again)
        goes_on.set()
        first.join(20)
        assert rpc.get_worker_info() is again.info
        assert torch._C._collect_all is collecting.collect_all
        rpc.shutdown(graceful=False)


def test_no_reference_is_made_after_a_shutdown(worker: Agent) -> None:
    rpc.RRef(1)
    rpc.shutdown(graceful=False)
    with pytest.raises(RpcError, match="Current RPC agent is not set"):
        rpc.RRef(1)


@pytest.mark.parametrize(
    ("seconds", "error"),
    [(-1.0, ValueError), (float("nan"), ValueError), ("5", TypeError), (None, TypeError)],
)
def test_a_shutdown_that_is_told_to_wait_nonsense_changes_nothing(
    worker: Agent, seconds: Any, error: type[Exception]
) -> None:
    with pytest.raises(error, match=f"timeout={seconds!r} "):
        rpc.shutdown(timeout=seconds)
    assert rpc.rpc_sync("there", abs, (-1,), timeout=20) == 1


def test_a_shutdown_that_is_refused_in_a_handler_changes_nothing(worker: Agent) -> None:
    with pytest.raises(RpcError, match="called in a handler"):
        rpc.rpc_sync("here", rpc.shutdown, timeout=20)
    assert api._is_current_rpc_agent_set()
    assert rpc.rpc_sync("here", abs, (-1,), timeout=20) == 1


@pytest.mark.parametrize("seconds", [-1.0, float("nan")])
def test_a_default_timeout_must_be_a_time(worker: Agent, seconds: float) -> None:
    with pytest.raises(ValueError, match=f"rpc_timeout must be >= 0 seconds, but got {seconds}"):
        api._set_rpc_timeout(seconds)
    assert rpc.rpc_sync("there", abs, (-1,)) == 1


@pytest.mark.parametrize("seconds", [float("inf"), 1e9, 1e300])
def test_a_default_timeout_of_ages_is_none(worker: Agent, seconds: float) -> None:
    api._set_rpc_timeout(seconds)
    assert rpc.get_rpc_timeout() == 0.0


def test_a_default_timeout_is_a_number_of_any_type(worker: Agent) -> None:
    api._set_rpc_timeout(Decimal(20))  # type: ignore[arg-type]
    assert rpc.get_rpc_timeout() == 20.0
    assert rpc.rpc_sync("there", abs, (-1,)) == 1
    with pytest.raises(TypeError, match="rpc_timeout must be a number of seconds, but got None"):
        api._set_rpc_timeout(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"name": 5}, TypeError, "name=5 is a int"),
        ({"rank": "0"}, TypeError, "rank='0' is a str"),
        ({"rank": None}, TypeError, "rank=None is a NoneType"),
        ({"rank": 0.5}, TypeError, "rank=0.5 is a float"),
        ({"rank": -2}, ValueError, "rank=-2 is negative"),
        ({"world_size": "1"}, TypeError, "world_size='1' is a str"),
        ({"world_size": 1.0}, TypeError, "world_size=1.0 is a float"),
        ({"world_size": True}, TypeError, "world_size=True is a bool"),
        ({"world_size": -3}, ValueError, "world_size=-3 is negative"),
    ],
)
def test_an_argument_of_the_wrong_kind_is_named_before_anybody_is_waited_for(
    given: dict[str, Any], error: type[Exception], message: str
) -> None:
    arguments: dict[str, Any] = {"name": "w", "rank": 0, "world_size": 1} | given
    with pytest.raises(error, match=message):
        rpc.init_rpc(**arguments)
    assert not api._is_current_rpc_agent_set()


def test_a_process_that_is_a_worker_is_not_initialized_again() -> None:
    with (
        local_group("alice") as (alice,),
        as_worker(alice),
        pytest.raises(RpcError, match=r"already initialized; call rpc\.shutdown"),
    ):
        rpc.init_rpc("w", rank=0, world_size=1)


def test_of_two_threads_that_initialize_at_once_one_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opening, go_on = threading.Event(), threading.Event()

    def open_slowly(*_: object) -> None:
        opening.set()
        go_on.wait(20)
        raise BringUpError("nobody came")

    monkeypatch.setattr(api, "open_store", open_slowly)
    first = threading.Thread(target=initialize_in_vain)
    first.start()
    assert opening.wait(20)
    with pytest.raises(RpcError, match="being initialized by another thread"):
        rpc.init_rpc("w", rank=0, world_size=1)
    go_on.set()
    first.join()
    initialize_in_vain()


def initialize_in_vain() -> None:
    with pytest.raises(BringUpError, match="nobody came"):
        rpc.init_rpc("w", rank=0, world_size=1)


def test_a_function_may_require_that_this_process_is_a_worker(worker: Agent) -> None:
    @api._require_initialized
    def how_many(factor: int, *, more: int = 0) -> int:
        """Counts."""
        return factor * len(rpc.workers()) + more

    assert how_many(3, more=1) == 7
    assert how_many.__doc__ == "Counts."
    rpc.shutdown(graceful=False)
    with pytest.raises(RuntimeError, match="RPC has not been initialized"):
        how_many(3)


def test_a_prefix_of_names_is_text(worker: Agent) -> None:
    assert [each.name for each in rpc.workers("the")] == ["there"]
    wrong: Any = 5
    with pytest.raises(TypeError, match="prefix=5 is a int, not a str"):
        rpc.workers(wrong)


def test_all_that_the_original_makes_public_is_there_once_rpc_is_imported() -> None:
    missing = [name for name in torch.distributed.rpc.__all__ if not hasattr(rpc, name)]
    assert not missing
    modules = "api", "backend_registry", "constants", "extend", "functions", "internal", "options"
    attributes = [*modules, "rref_proxy"]
    script = f"import rpc; assert all(hasattr(rpc, name) for name in {attributes})"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_no_other_names_are_public_than_those_that_are_meant_to_be() -> None:
    original = {*torch.distributed.rpc.__all__}
    beyond = {name for name in rpc.__all__ if name not in original and not name.endswith("Error")}
    assert sorted(beyond) == [
        "Future",
        "MembershipChange",
        "MembershipEvent",
        "PyRRef",
        "Retry",
        "RpcAgent",
        "RpcBackendOptions",
        "TensorPipeAgent",
        "TensorWireRpcBackendOptions",
        "TlsOptions",
        "WhenFull",
        "WorkerInfo",
        "_set_rpc_timeout",
        "api",
        "backend_registry",
        "cancelled",
        "constants",
        "debug_info",
        "enable_gil_profiling",
        "functions",
        "get_rpc_timeout",
        "install_debug_signal",
        "metrics",
        "on_membership",
        "options",
        "progress",
        "serve",
        "set_event",
        "slow_phase",
        "tracing",
        "workers",
    ]
    assert all(hasattr(rpc, name) for name in rpc.__all__)


def test_methods_of_references_are_made_as_in_the_original(worker: Agent) -> None:
    rref = rpc.remote("there", abs, (-1,))
    owner_name = rpc.method_factory("owner_name", "Tells where it is.")
    assert owner_name(rref) == "there"
    assert owner_name.__doc__ == "Tells where it is."
    assert rpc.new_method(rref, timeout=20) == 1
    assert rpc.new_method.__doc__ == rpc.RRef.to_here.__doc__
    with pytest.raises(AttributeError, match="nothing"):
        rpc.method_factory("nothing", None)


def test_the_states_of_a_gathering_begin_as_in_the_original() -> None:
    states = rpc.AllGatherStates()
    assert states.gathered_objects == {}
    assert not states.proceed_signal.is_set()


def test_no_reference_is_made_of_plain_data() -> None:
    with pytest.raises(RpcError, match="cannot be made of tuple data: it arrives only in"):
        rpc.RRef._deserialize((0, 0, 0))


def test_init_rpc_without_arguments_takes_the_seat_that_rpcrun_gave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for kept in ("store", "joined"):
        monkeypatch.setattr(current.Process, kept, getattr(current.Process, kept))
    monkeypatch.setenv("RPC_WORKER_NAME", "trainer:3")
    monkeypatch.setenv("RPC_WORKER_ID", "7")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    monkeypatch.setenv("RPC_INIT_METHOD", f"tcp://127.0.0.1:{store.port}")
    monkeypatch.setenv("RPC_BACKEND", "TENSORWIRE")
    monkeypatch.setenv("WORLD_SIZE", "9")  # of all seats, which need not be taken
    rpc.init_rpc()
    try:
        assert rpc.get_worker_info() == rpc.WorkerInfo("trainer:3", 7)
        assert rpc.rpc_sync("trainer:3", torch.add, (1, 2)) == 3
    finally:
        rpc.shutdown()
