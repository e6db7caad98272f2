"""Libraries that import torch's RPC run on ours, on both backends, unedited.

Two in our own words, and two real ones where they are installed: they come with
``pip install tensorwire[libraries]``.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import rpc
from tensorwire import dropin
from tests.free_ports import free_port
from tests.rpc.worker_processes import WorkerProcess

pytestmark = pytest.mark.slow

_ROOT = Path(__file__).parents[3]
_LIBRARIES = "tests.tensorwire.dropin.libraries"
Maker = Callable[[], WorkerProcess]


@pytest.fixture(params=["TENSORPIPE", "TENSORWIRE"])
def backend(request: pytest.FixtureRequest) -> str:
    """The backend that the groups of a library are formed over."""
    return str(request.param)


_EITHER_ORDER = pytest.mark.parametrize(
    ("backend", "library_first"),
    [("TENSORPIPE", False), ("TENSORWIRE", True)],
    ids=["TENSORPIPE-installed-first", "TENSORWIRE-library-first"],
)


def _load(library: str, backend: str, library_first: bool) -> None:
    if library_first:
        importlib.import_module(library)
    dropin.install(backend)
    importlib.import_module(library)


def _join(name: str, rank: int, port: int) -> None:
    from torch.distributed import rpc as torchs

    options = torchs.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}")
    torchs.init_rpc(
        name,
        rank=rank,
        world_size=2,
        backend=torchs.BackendType.TENSORPIPE,
        rpc_backend_options=options,
    )


def _backend_of_this_worker() -> str:
    return type(rpc._get_current_rpc_agent().transport).__name__.removesuffix("Transport").upper()


def _use_a_replay_buffer() -> tuple[int, torch.Tensor, str]:
    library = importlib.import_module(f"{_LIBRARIES}.replay")
    buffer = library.RemoteReplayBuffer("buffer", capacity=3)
    buffer.extend(torch.arange(4.0).view(2, 2))
    kept = buffer.extend(torch.arange(4.0, 8.0).view(2, 2))
    return kept, buffer.newest(2), _backend_of_this_worker()


@_EITHER_ORDER
def test_a_replay_buffer_takes_itself_out_of_references(
    make_process: Maker, backend: str, library_first: bool
) -> None:
    port, (actor, buffer) = free_port(), (make_process(), make_process())
    for rank, (name, process) in enumerate((("actor", actor), ("buffer", buffer))):
        process.do(_load, f"{_LIBRARIES}.replay", backend, library_first)
        process.begin(_join, name, rank, port)
    actor.result(), buffer.result()
    kept, newest, used = actor.do(_use_a_replay_buffer)
    assert (kept, used) == (3, backend)
    assert newest.tolist() == [[4.0, 5.0], [6.0, 7.0]]
    for process in (actor, buffer):
        process.begin(rpc.shutdown)
    actor.result(), buffer.result()


def _start_a_store(rank: int, port: int) -> None:
    library: Any = importlib.import_module(f"{_LIBRARIES}.features")
    library.Features(10 * rank, torch.arange(10 * rank, 10 * rank + 10).view(10, 1).float())
    library.start(f"store-{rank}", rank, 2, port)
    library.start(f"store-{rank}", rank, 2, port)  # it sees that it runs


def _look_up(*numbers: int) -> tuple[torch.Tensor, str]:
    library: Any = importlib.import_module(f"{_LIBRARIES}.features")
    return library.look_up(torch.tensor(numbers), 10), _backend_of_this_worker()


@_EITHER_ORDER
def test_features_are_looked_up_where_they_are(
    make_process: Maker, backend: str, library_first: bool
) -> None:
    port, stores = free_port(), (make_process(), make_process())
    for rank, store in enumerate(stores):
        store.do(_load, f"{_LIBRARIES}.features", backend, library_first)
        store.begin(_start_a_store, rank, port)
    assert [store.result() for store in stores] == [None, None]
    rows, used = stores[0].do(_look_up, 17, 3, 12, 0)
    assert (rows.flatten().tolist(), used) == ([17.0, 3.0, 12.0, 0.0], backend)
    for store in stores:
        store.begin(rpc.shutdown)
    assert [store.result() for store in stores] == [None, None]


# --- Real ones


def _needs(library: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(library) is None
    reason = f"{library} is not installed; it comes with tensorwire[libraries]"
    return pytest.mark.skipif(missing, reason=reason)


@_needs("torchrl")
def test_torchrl_collects_frames(backend: str) -> None:
    """Its collector starts processes of its own, which have to find our names as well."""
    script = Path(__file__).parent / "libraries" / "collecting.py"
    words = ["-m", "tensorwire.dropin", "--backend", backend, str(script), str(free_port())]
    variables = os.environ.copy()
    variables["PYTHONPATH"] = f"{_ROOT}:{variables.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [sys.executable, *words],
        env=variables,
        stdout=subprocess.PIPE,
        text=True,
        timeout=110,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == f"40 frames over {backend}"


def _serve_features_with_pyg(backend: str, rank: int, port: int) -> torch.Tensor:
    dropin.install(backend)
    from torch_geometric.distributed import rpc as pyg
    from torch_geometric.distributed.dist_context import DistContext

    context = DistContext(rank, rank, 2, 2, group_name="worker")
    pyg.init_rpc(context, "127.0.0.1", port, rpc_timeout=60.0)
    rows = torch.arange(5.0) + 100 * rank

    class Rows(pyg.RPCCallBase):
        def rpc_sync(self, numbers: torch.Tensor) -> torch.Tensor:
            return rows[numbers]

        def rpc_async(self, numbers: torch.Tensor) -> torch.Tensor:
            return rows[numbers]

    call = pyg.rpc_register(Rows())
    pyg.global_barrier()
    workers = pyg.rpc_partition_to_workers(context, 2, rank)
    other = pyg.RPCRouter(workers).get_to_worker(1 - rank)
    found: torch.Tensor = pyg.rpc_async(other, call, args=(torch.tensor([1, 3]),)).wait()
    pyg.shutdown_rpc(graceful=True)
    return found


@_needs("torch_geometric")
def test_pyg_looks_features_up(make_process: Maker, backend: str) -> None:
    port, workers = free_port(), (make_process(), make_process())
    for rank, worker in enumerate(workers):
        worker.begin(_serve_features_with_pyg, backend, rank, port)
    found = [worker.result().tolist() for worker in workers]
    assert found == [[101.0, 103.0], [1.0, 3.0]]
