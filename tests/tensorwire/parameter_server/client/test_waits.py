"""Nobody waits for ever: every public call of a cluster that cannot serve it ends with an error."""

from __future__ import annotations

import contextlib
import logging
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

import rpc
from rpc.agent import Agent
from rpc.runtime import wait_log
from rpc.testing import MemoryHub, as_worker, local_group
from tensorwire import parameter_server as ps
from tensorwire.parameter_server.client.counted import Counted
from tensorwire.parameter_server.client.exchange import Gradients
from tensorwire.parameter_server.client.patience import Patience
from tensorwire.parameter_server.declarations.spec import TableSpec
from tests.tensorwire.parameter_server.clusters import server_names
from tests.waiting import eventually

_SECONDS = 60.0
"""A deadline that only a call that hangs reaches."""
_PATIENCE = 0.3

Calls = dict[str, Callable[[], object]]


class _Trainer:
    """A trainer that has declared and pushed something of each kind, and gives up soon.

    Args:
        worker: what it is.
        newcomer: another worker, that is connected and no trainer.
    """

    def __init__(self, worker: Agent, newcomer: Agent) -> None:
        with as_worker(newcomer):
            self.newcomer = ps.connect(server_names(2))
        with as_worker(worker):
            self.cluster = ps.connect(server_names(2))
        self.table = self.cluster.table("items", 2, ps.SGD(lr=1.0))
        self.layer = torch.nn.Linear(2, 1)
        self.optimizer = ps.Optimizer(self.cluster, self.layer, torch.optim.SGD, lr=1.0)
        self.unloaded = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=1.0)
        self.declared = self.cluster.declare_dense("declared", self.unloaded)
        self.state = self.optimizer.state_dict()
        self.samples = self.cluster.samples(8, batch_size=2)
        self.tracked = self.samples.track(DataLoader(range(8), batch_sampler=self.samples))  # type: ignore[arg-type]
        self.trained = self.samples.state_dict()
        self.bags = {"f": torch.nested.nested_tensor([[1, 2], [3]], layout=torch.jagged)}
        self.table.push(torch.arange(4), torch.ones(4, 2))
        for cluster in (self.cluster, self.newcomer):
            cluster.session.servers.patience.limit = _PATIENCE

    @property
    def publishing(self) -> ps.Publishing:
        assert self.cluster.publishing is not None
        return self.cluster.publishing


_CLASSES = (
    ps.Cluster,
    ps.Table,
    ps.DenseGroup,
    ps.Optimizer,
    ps.Samples,
    ps.Tracked,
    ps.Reader,
    ps.Saving,
    ps.Publishing,
    ps.Embedding,
    ps.EmbeddingBag,
    ps.EmbeddingCollection,
    ps.EmbeddingBagCollection,
)
"""The public classes whose methods may ask a server."""

_ONLY_END = {"Cluster.stats", "Publishing.stop"}
"""They tell what there is, or stop what goes on, also without servers."""

_ASKS_NOBODY = {
    "Cluster": "bad_steps is_stale known nans number reader release step tables use_the_wait",
    "Table": "check check_ids forget gradient_of gradients rule",
    "DenseGroup": "accept gradients hyper is_changed values",
    "Optimizer": "add_param_group",
    "Samples": "position set_epoch track",
    "Tracked": "give next_batch require_latest",
    "Saving": "done",
    "Publishing": "is_running note_step version",
    "EmbeddingBag": "extra_repr",
}
"""Public names that need no server, by class."""


def _calls(trainer: _Trainer, folder: Path) -> Calls:
    """Every public call that asks a server, by its class and name."""
    cluster, table, optimizer = trainer.cluster, trainer.table, trainer.optimizer
    ids, grad, group = torch.arange(4), torch.ones(4, 2), optimizer.group
    other, rule = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=1.0), ps.SGD(lr=1.0)
    went_back = ps.RolledBack(0, {}, "")
    gradients = Gradients({"items": (ids, grad)})
    assert group is not None
    return {
        "Cluster.table": lambda: cluster.table("second", 2, rule),
        "Cluster.declared": lambda: cluster.declared(
            TableSpec("third", 2, rule, ps.Constant()), None
        ),
        "Cluster.dense": lambda: cluster.dense("dense", other),
        "Cluster.declare_dense": lambda: cluster.declare_dense("dense", other),
        "Cluster.load_dense": lambda: cluster.load_dense(trainer.declared, trainer.unloaded),
        "Cluster.join": trainer.newcomer.join,
        "Cluster.push": lambda: cluster.push({table: (ids, grad)}),
        "Cluster.exchange": lambda: cluster.exchange(gradients, None).wait(),
        "Cluster.pass_step": cluster.pass_step,
        "Cluster.reload": cluster.reload,
        "Cluster.samples": lambda: cluster.samples(8, batch_size=2, name="others"),
        "Cluster.snapshot": lambda: cluster.snapshot(folder / "snapshot").wait(),
        "Cluster.resize": lambda: cluster.resize(server_names(1), timeout=_PATIENCE),
        "Cluster.publish": lambda: cluster.publish(folder / "published", ps.Steps(1)).wait(),
        "Cluster.stats": cluster.stats,
        "Table.pull": lambda: table.pull(ids),
        "Table.fetch": lambda: table.fetch(ids),
        "Table.fill": lambda: table.fill(ids, grad),
        "Table.push": lambda: table.push(ids, grad),
        "DenseGroup.upload": group.upload,
        "DenseGroup.state": group.state,
        "Optimizer.wrap": lambda: ps.Optimizer.wrap(other, cluster, name="wrapped"),
        "Optimizer.step": optimizer.step,
        "Optimizer.skip": optimizer.skip,
        "Optimizer.reload": optimizer.reload,
        "Optimizer.upload": optimizer.upload,
        "Optimizer.state_dict": optimizer.state_dict,
        "Optimizer.load_state_dict": lambda: optimizer.load_state_dict(trainer.state),
        "Samples.progress": lambda: trainer.samples.progress,
        "Samples.state_dict": trainer.samples.state_dict,
        "Samples.load_state_dict": lambda: trainer.samples.load_state_dict(trainer.trained),
        "Tracked.turns": lambda: next(trainer.tracked.turns()),
        "Tracked.recover": lambda: trainer.tracked.recover(went_back),
        "Reader.pull": lambda: cluster.reader(_PATIENCE).pull({"items": ids}),
        "Saving.wait": lambda: cluster.snapshot(folder / "another").wait(),
        "Embedding.forward": lambda: ps.Embedding(table)(ids),
        "EmbeddingBag.forward": lambda: ps.EmbeddingBag(table)(ids.view(2, 2)),
        "EmbeddingCollection.forward": lambda: ps.EmbeddingCollection({"f": table})(trainer.bags),
        "EmbeddingBagCollection.forward": lambda: ps.EmbeddingBagCollection({"f": table})(
            trainer.bags
        ),
        "Publishing.wait": lambda: trainer.publishing.wait(),
        "Publishing.take": lambda: (trainer.publishing.take(), trainer.publishing.wait()),
        "Publishing.stop": lambda: trainer.publishing.stop(),
        "Cluster.finish": cluster.finish,
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


def _require_errors(raised: dict[str, BaseException | None]) -> None:
    kinds = rpc.RpcError, TimeoutError
    wrong = {
        name: error
        for name, error in raised.items()
        if not isinstance(error, kinds) and not (name in _ONLY_END and error is None)
    }
    assert not wrong


@contextlib.contextmanager
def _trainer() -> Iterator[tuple[_Trainer, MemoryHub]]:
    hub = MemoryHub()
    with (
        local_group(*server_names(2), "newcomer", "trainer", hub=hub) as agents,
        as_worker(agents[-1]),
    ):
        yield _Trainer(agents[-1], agents[-2]), hub


def test_every_public_method_has_a_case_or_asks_nobody(tmp_path: Path) -> None:
    with _trainer() as (trainer, _):
        cases = set(_calls(trainer, tmp_path))
    local = {f"{each}.{name}" for each, names in _ASKS_NOBODY.items() for name in names.split()}
    assert not cases & local
    assert cases | local == {
        f"{each.__name__}.{name}"
        for each in _CLASSES
        for name in {*vars(each), *(vars(Counted) if issubclass(each, Counted) else ())}
        if name[0] != "_"
    }


def test_every_call_of_a_cluster_whose_servers_are_out_of_reach_ends_with_an_error(
    tmp_path: Path,
) -> None:
    with _trainer() as (trainer, hub):
        for server in range(2):
            hub.cut(server)
        raised = _errors_of(_calls(trainer, tmp_path))
        _require_errors(raised)
        assert isinstance(raised["Cluster.push"], ps.UnreachableError)
        assert trainer.cluster.stats()["servers"] == {}


def test_finish_of_a_trainer_that_reaches_no_server_ends_with_an_error() -> None:
    with _trainer() as (trainer, hub):
        for server in range(2):
            hub.cut(server)
        raised = _errors_of({"finish": trainer.cluster.finish})
        assert isinstance(raised["finish"], ps.UnreachableError)


def test_every_call_of_a_cluster_that_lost_its_state_says_so(tmp_path: Path) -> None:
    with _trainer() as (trainer, hub):
        hub.cut(1)
        raised = _errors_of(_calls(trainer, tmp_path))
        _require_errors(raised)
        assert isinstance(raised["Cluster.push"], ps.ServerLostError)
        assert isinstance(raised["Cluster.table"], ps.ParameterServerError)


def test_every_call_of_a_cluster_that_was_left_says_so(tmp_path: Path) -> None:
    with _trainer() as (trainer, _):
        for cluster in (trainer.cluster, trainer.newcomer):
            cluster.session.close()
        _require_errors(_errors_of(_calls(trainer, tmp_path)))


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


def test_a_declaration_that_waits_for_long_is_told_of_ends_and_may_be_made_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(wait_log, "FIRST", (0.05,))
    hub, rule = MemoryHub(), ps.SGD(lr=1.0)
    with local_group(*server_names(2), "trainer", hub=hub) as agents, as_worker(agents[-1]):
        cluster = ps.connect(server_names(2))
        cluster.table("items", 2, rule).push(torch.arange(4), torch.ones(4, 2))
        patience = cluster.session.servers.patience
        usual, patience.limit = patience.limit, _PATIENCE
        hub.freeze(1)
        raised = _errors_of(
            {
                "announce": lambda: cluster.table("second", 2, rule),
                "countsamples": lambda: cluster.samples(8, batch_size=2, name="second"),
            }
        )
        hub.thaw(1)
        patience.limit = usual
        for name, error in raised.items():
            assert isinstance(error, ps.UnreachableError)
            assert "'ps0', which coordinates, has not done within 0.3 s what" in str(error)
            line = (
                rf"{name} has waited \d+ s for the declaration of 'second', which waits while rows"
            )
            assert re.search(line, caplog.text)
        cluster.table("second", 2, rule).push(torch.arange(4), torch.ones(4, 2))
        cluster.samples(8, batch_size=2, name="second")
        cluster.finish()


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
        cluster = ps.connect(server_names(2))
        cluster.table("items", 2, ps.SGD(lr=1.0)).push(torch.arange(4), torch.ones(4, 2))
        hub.freeze(1)
        thread = threading.Thread(target=thaw)
        thread.start()
        cluster.finish()
        thread.join()
    assert told == [True]
