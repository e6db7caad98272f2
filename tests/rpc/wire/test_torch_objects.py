"""The fate of objects of torch.distributed.rpc, in a program that kept some of its imports."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed.nn
import torch.distributed.rpc as torchs

import rpc
from optim_dist import DistributedOptimizer
from remote_module import RemoteModule
from rpc import api, backend_registry
from rpc.agent import Agent
from rpc.errors import EncodeError
from rpc.testing import as_worker, local_group
from rpc.wire import torch_objects


@pytest.fixture
def worker() -> Iterator[Agent]:
    with local_group("here", "there") as (here, _), as_worker(here):
        yield here


def torchs_rref() -> Any:
    return torchs.RRef.__new__(torchs.RRef)  # a whole one needs a group of torch's


def test_torchs_backend_type_is_taken_for_ours_of_that_name() -> None:
    theirs: Any = torchs.BackendType.TENSORPIPE
    assert backend_registry.ours(theirs) is rpc.BackendType.TENSORPIPE
    made = rpc.construct_rpc_backend_options(theirs, num_worker_threads=3)
    assert isinstance(made, rpc.TensorPipeRpcBackendOptions)


def test_torchs_options_are_refused_and_the_error_says_what_to_import() -> None:
    theirs: Any = torchs.TensorPipeRpcBackendOptions(num_worker_threads=3)
    with pytest.raises(TypeError, match="import TensorPipeRpcBackendOptions from rpc instead"):
        rpc.init_rpc("here", rank=0, world_size=1, rpc_backend_options=theirs)
    assert not api._is_current_rpc_agent_set()


def test_torchs_worker_info_is_no_destination_and_the_error_says_what_to_import(
    worker: Agent,
) -> None:
    theirs: Any = torchs.WorkerInfo("there", 1)
    for use in (rpc.rpc_sync, rpc.rpc_async, rpc.remote):
        with pytest.raises(ValueError, match="import WorkerInfo from rpc instead"):
            use(theirs, operator.add, (1, 2))


def test_torchs_rref_is_not_sent_and_the_error_says_what_to_import(worker: Agent) -> None:
    with pytest.raises(EncodeError, match=r"argument 0 \(list\).*import RRef from rpc instead"):
        rpc.rpc_sync("there", len, ([torchs_rref()],))


def test_torchs_rref_is_no_parameter_and_the_error_says_what_to_import(worker: Agent) -> None:
    with pytest.raises(TypeError, match="import RRef from rpc instead"):
        DistributedOptimizer(torch.optim.SGD, [torchs_rref()], lr=0.1)


def test_torchs_rref_is_no_module_and_the_error_says_what_to_import(worker: Agent) -> None:
    with pytest.raises(TypeError, match="import RRef from rpc instead"):
        RemoteModule.init_from_module_rref("there", torchs_rref())


def test_torchs_remote_module_is_not_sent_and_the_error_says_what_to_import(
    worker: Agent,
) -> None:
    theirs = torch.distributed.nn.RemoteModule.__new__(torch.distributed.nn.RemoteModule)
    with pytest.raises(EncodeError, match="import RemoteModule from remote_module instead"):
        rpc.rpc_sync("there", id, (theirs,))


def test_a_class_derived_from_torchs_is_known_too() -> None:
    class Mine(torchs.TensorPipeRpcBackendOptions):  # type: ignore[misc]
        pass

    assert "import TensorPipeRpcBackendOptions from rpc" in torch_objects.import_remedy(Mine())


@pytest.mark.parametrize("value", [3, "worker", torch.ones(1), rpc.WorkerInfo("here", 0)])
def test_nothing_is_said_of_what_is_not_torchs(value: object) -> None:
    assert torch_objects.import_remedy(value) == ""


@pytest.mark.parametrize(
    "name",
    [
        "PyRRef",
        "RpcAgent",
        "RpcBackendOptions",
        "TensorPipeAgent",
        "WorkerInfo",
        "_get_current_rpc_agent",
        "_is_current_rpc_agent_set",
        "_rref_context_get_debug_info",
        "_set_rpc_timeout",
        "enable_gil_profiling",
        "get_rpc_timeout",
    ],
)
def test_what_programs_take_from_torchs_c_module_is_in_rpc(name: str) -> None:
    assert hasattr(torch._C._distributed_rpc, name)
    assert hasattr(rpc, name)


def test_a_backend_that_only_torch_has_is_refused() -> None:
    class BackendType:
        name = "FAULTY"

    BackendType.__module__ = "torch.distributed.rpc.backend_registry"
    theirs: Any = BackendType()
    with pytest.raises(TypeError, match="import BackendType from rpc instead"):
        backend_registry.ours(theirs)
