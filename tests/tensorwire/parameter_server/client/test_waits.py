"""Nobody waits for ever: every public call of a cluster that cannot serve it ends with an error."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import rpc
from rpc.runtime import wait_log
from rpc.testing import MemoryHub, as_worker, local_group
from tensorwire import parameter_server as ps
from tensorwire.parameter_server.client.patience import Patience
from tests.tensorwire.parameter_server.clusters import server_names
from tests.waiting import eventually

_SECONDS = 60.0
"""A deadline that only a call that hangs reaches."""
_PATIENCE = 0.3

Calls = dict[str, Callable[[], object]]


def _calls(cluster: ps.Cluster, table: ps.Table, folder: Path) -> Calls:
    """Every public call that asks a server."""
    ids, grad = torch.arange(4), torch.ones(4, 2)
    layer = torch.nn.Linear(2, 1)
    group = {"push": lambda: cluster.push({table: (ids, grad)})}
    return group | {
        "table": lambda: cluster.table("other", 2, ps.SGD(lr=1.0)),
        "dense": lambda: cluster.dense("dense", torch.optim.SGD(layer.parameters(), lr=1.0)),
        "pull": lambda: table.pull(ids),
        "push of a table": lambda: table.push(ids, grad),
        "snapshot": lambda: cluster.snapshot(folder / "snapshot").wait(),
        "resize": lambda: cluster.resize(server_names(1), timeout=_PATIENCE),
        "fetch": lambda: table.fetch(ids),
        "pass_step": cluster.pass_step,
        "reload": cluster.reload,
        "samples": lambda: cluster.samples(8, batch_size=2),
        "pull of a reader": lambda: cluster.reader(_PATIENCE).pull({"items": ids}),
        "finish": cluster.finish,
    }


def _errors_of(calls: Calls) -> dict[str, BaseException | None]:
    """The error of each call, made on a thread of its own: one that hangs fails the test."""
    raised: dict[str, BaseException | None] = {}
    agent = rpc.current.current_agent()

    def make(name: str, call: Callable[[], object]) -> None:
        try:
            with as_worker(agent):
                call()
            raised[name] = None
        except BaseException as error:
            raised[name] = error

    for name, call in calls.items():
        thread = threading.Thread(target=make, args=(name, call), daemon=True)
        thread.start()
        thread.join(_SECONDS)
        assert name in raised, f"{name} hangs"
    return raised


def _require_errors(raised: dict[str, BaseException | None], *kinds: type[Exception]) -> None:
    wrong = {name: error for name, error in raised.items() if not isinstance(error, kinds)}
    assert not wrong


def _connected() -> tuple[ps.Cluster, ps.Table]:
    cluster = ps.connect(server_names(2))
    table = cluster.table("items", 2, ps.SGD(lr=1.0))
    table.push(torch.arange(4), torch.ones(4, 2))
    return cluster, table


def _impatient() -> tuple[ps.Cluster, ps.Table]:
    """As :func:`_connected`; gives up soon from now on."""
    cluster, table = _connected()
    cluster.session.servers.patience.limit = _PATIENCE
    return cluster, table


def test_every_call_of_a_cluster_whose_servers_are_out_of_reach_ends_with_an_error(
    tmp_path: Path,
) -> None:
    hub = MemoryHub()
    with local_group(*server_names(2), "trainer", hub=hub) as agents, as_worker(agents[-1]):
        cluster, table = _impatient()
        for server in range(2):
            hub.cut(server)
        raised = _errors_of(_calls(cluster, table, tmp_path))
        _require_errors(raised, rpc.RpcError, TimeoutError)
        assert isinstance(raised["push"], ps.UnreachableError)
        assert cluster.stats()["servers"] == {}


def test_finish_of_a_trainer_that_reaches_no_server_ends_with_an_error() -> None:
    hub = MemoryHub()
    with local_group(*server_names(2), "trainer", hub=hub) as agents, as_worker(agents[-1]):
        cluster, _ = _impatient()
        for server in range(2):
            hub.cut(server)
        raised = _errors_of({"finish": cluster.finish})
        assert isinstance(raised["finish"], ps.UnreachableError)


def test_every_call_of_a_cluster_that_lost_its_state_says_so(tmp_path: Path) -> None:
    hub = MemoryHub()
    with local_group(*server_names(2), "trainer", hub=hub) as agents, as_worker(agents[-1]):
        cluster = ps.connect(server_names(2))
        table = cluster.table("items", 2, ps.SGD(lr=1.0))
        table.push(torch.arange(4), torch.ones(4, 2))
        hub.cut(1)
        raised = _errors_of(_calls(cluster, table, tmp_path))
        _require_errors(raised, rpc.RpcError, TimeoutError)
        assert isinstance(raised["push"], ps.ServerLostError)
        assert isinstance(raised["table"], ps.ParameterServerError)


def test_every_call_of_a_cluster_that_was_left_says_so(tmp_path: Path) -> None:
    with local_group(*server_names(2), "trainer") as agents, as_worker(agents[-1]):
        cluster, table = _impatient()
        cluster.session.close()
        raised = _errors_of(_calls(cluster, table, tmp_path))
        _require_errors(raised, rpc.RpcError, TimeoutError)


def test_patience_ends_after_a_row_of_vain_tries() -> None:
    patience = Patience(5.0)
    assert [patience.failed(0, now) for now in (0.0, 3.0, 5.0)] == [False, False, True]


def test_patience_begins_anew_after_an_answer_and_after_a_sleep() -> None:
    patience = Patience(5.0)
    patience.failed(0, 0.0)
    patience.answered(0)
    assert not patience.failed(0, 6.0)
    assert not patience.failed(0, 100.0)
    assert not patience.failed(1, 100.0)


def test_finish_says_in_the_log_at_which_servers_pushes_are_not_safe(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(wait_log, "FIRST", (0.05,))
    caplog.set_level(logging.WARNING)
    hub, told = MemoryHub(), []
    line = (  # a step is safe at none while one of them has not said that it has it
        "finish has waited 0 s until the pushes of trainer 'trainer' are safe at ps0, ps1\n"
    )

    def thaw() -> None:
        told.append(eventually(lambda: line in caplog.text, _SECONDS))
        hub.thaw(1)

    with local_group(*server_names(2), "trainer", hub=hub) as agents, as_worker(agents[-1]):
        cluster, _ = _connected()
        hub.freeze(1)
        thread = threading.Thread(target=thaw)
        thread.start()
        cluster.finish()
        thread.join()
    assert told == [True]
