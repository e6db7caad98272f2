"""A cluster of servers, as a trainer or reader holds it; ``connect``."""

from __future__ import annotations

import contextvars
import enum
import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

import rpc
from rpc import extend
from tensorwire.checkpoint import Checkpoint
from tensorwire.parameter_server import errors, messages
from tensorwire.parameter_server import spec as specs
from tensorwire.parameter_server.arguments import instance, whole
from tensorwire.parameter_server.cache import Cache
from tensorwire.parameter_server.client.account import Account
from tensorwire.parameter_server.client.dense import DenseGroup
from tensorwire.parameter_server.client.exchange import (
    Exchanging,
    Gradients,
    Pulled,
    Wanted,
    Whole,
)
from tensorwire.parameter_server.client.session import Session
from tensorwire.parameter_server.client.splitting import WholeDense, WholeTable
from tensorwire.parameter_server.client.table import Table
from tensorwire.parameter_server.decisions import orders, views
from tensorwire.parameter_server.decisions.clock import PushKind
from tensorwire.parameter_server.decisions.consistency import (
    BSP,
    SSP,
    Async,
    Consistency,
    staleness_of,
)
from tensorwire.parameter_server.decisions.lives import Verdict
from tensorwire.parameter_server.decisions.views import Server, Snapshot, View
from tensorwire.parameter_server.dense_spec import describe, spread_of
from tensorwire.parameter_server.initialisers import Constant, Initialiser
from tensorwire.parameter_server.lifetimes import MinCount, UnusedFor
from tensorwire.parameter_server.rules import Rule
from tensorwire.parameter_server.server.calling import LOST, own_incarnation, verdict_on
from tensorwire.parameter_server.settings import Meeting, consistency_of, settings_of
from tensorwire.parameter_server.spec import Precision, TableSpec
from tensorwire.parameter_server.storage.device_memory import to_host
from tensorwire.parameter_server.wire import FLOAT32, Kind, Wire, both_ways

_NAME: Final = "default"
_PAUSE: Final = 0.05
_SECONDS_TO_ANSWER: Final = 30.0


class NanPolicy(enum.Enum):
    """The treatment of a step with a gradient that is infinite or not a number."""

    RAISE = "raise"
    """``GradientError``; nothing is pushed, and no clock moves."""
    SKIP = "skip"
    """An empty push goes out in its place, and is counted in ``Cluster.stats``."""
    COUNT = "count"
    """It is pushed as it is, and counted."""


class Saving:
    """A snapshot that is being written. Made by ``Cluster.snapshot``."""

    def __init__(self, take: Any) -> None:
        self._error: BaseException | None = None
        self._snapshot: Snapshot | None = None
        context = contextvars.copy_context()  # of this worker
        self._thread = threading.Thread(
            target=context.run, args=(self._run, take), name="tensorwire-ps", daemon=True
        )
        self._thread.start()

    def _run(self, take: Any) -> None:
        try:
            self._snapshot = take()
        except BaseException as error:
            self._error = error

    def wait(self, timeout: float | None = None) -> Snapshot:
        """Waits until the snapshot is whole, and on disk.

        Args:
            timeout: seconds; default none.

        Returns:
            Where it is, and how many pushes of each trainer are in it.

        Raises:
            SnapshotError: it could not be written.
            TimeoutError: it takes longer.
        """
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"the snapshot was not written in {timeout} seconds")
        if isinstance(self._error, errors.ParameterServerError):
            raise errors.SnapshotError(str(self._error)) from self._error
        if self._error is not None:
            raise self._error
        assert self._snapshot is not None
        return self._snapshot

    def done(self) -> bool:
        """True once :meth:`wait` would return, or raise, at once."""
        return not self._thread.is_alive()


class Cluster:
    """The servers that keep tables and dense parameters. Made by :func:`connect`.

    Attributes:
        name: of the cluster.
        consistency: between trainers.
        nans: what happens to gradients that are no numbers.
    """

    def __init__(self, session: Session, nans: NanPolicy) -> None:
        self.session = session
        self.name = session.cluster
        self.consistency: Consistency = consistency_of(session.view.settings)
        self.nans = nans
        self.bad_steps = 0
        self._account = Account()
        self._tables: dict[str, Table] = {}
        self._dense: dict[str, DenseGroup] = {}

    def __repr__(self) -> str:
        view = self.session.view
        names = ", ".join(server.name for server in view.servers)
        return f"Cluster({self.name!r}, servers=[{names}], {self.consistency})"

    # --- what there is

    def table(
        self,
        name: str,
        dim: int,
        optimizer: Rule,
        *,
        init: Initialiser | None = None,
        admit: MinCount | None = None,
        evict: UnusedFor | None = None,
        precision: Precision = Precision.FLOAT32,
        wire: Kind | Wire = FLOAT32,
        cache: Cache | None = None,
    ) -> Table:
        """Declares a table. All who declare it must say the same of it.

        Args:
            name: unique in the cluster.
            dim: columns of a row.
            optimizer: how rows move, e.g. ``ps.SGD(lr=0.1)``.
            init: how rows begin. Default all zeros.
            admit: which ids get a row. Default all.
            evict: when rows go. Default never.
            precision: of the rows at the servers. Default float32.
            wire: how rows and gradients are packed on their way. Default as they are.
            cache: which rows this worker keeps. Default none.

        Raises:
            DeclarationError: there is a table or dense group of that name that is another.
            TypeError: an argument is of a wrong kind.
            ValueError: an argument is out of range.
        """
        instance(f"table {name!r}", "cache", cache, (Cache, type(None)), "a ps.Cache or None")
        spec = TableSpec(
            name, dim, optimizer, init or Constant(), admit, evict, precision, both_ways(wire)
        )
        self._declare(name, spec, specs.encode(spec))
        if name not in self._tables:
            self._tables[name] = Table(self, spec, cache)
        return self._tables[name]

    def dense(self, name: str, optimizer: Optimizer) -> DenseGroup:
        """Declares the parameters of a constructed optimizer, which servers then keep and move.

        The first trainer's values are where all begin; here, too, the parameters are
        overwritten by them.

        Args:
            name: unique in the cluster.
            optimizer: of any class but those that need a closure.

        Raises:
            DeclarationError: there is a table or dense group of that name that is another.
            ValueError: the optimizer needs a closure.
        """
        spec = describe(name, optimizer, spread_of(optimizer))
        self._declare(name, spec, specs.encode(spec))
        group = self._dense[name] = DenseGroup(self, spec, optimizer)
        self._load(group)
        return group

    def _declare(self, name: str, spec: Any, text: str) -> None:
        found = specs.decode(self.session.ask_coordinator(orders.Announce(name, text)))
        differences = spec.differences(found)
        if differences:
            raise errors.DeclarationError(
                f"{name!r} was declared otherwise before: {'; '.join(differences)}"
            )
        self.session.knows(name, spec)

    def _load(self, group: DenseGroup) -> None:
        """Sets the values of a dense group, or gets them from whoever has."""
        while True:
            values = self.exchange(None, Wanted(dense=(group.name,))).wait().dense[group.name]
            if values is not None:
                group.accept(values)
                return
            if self._is_loader(group):
                group.upload(keeps_state=False)
            else:
                time.sleep(_PAUSE)

    def _is_loader(self, group: DenseGroup) -> bool:
        """True if it is this worker that says how the group begins; another that died is none."""
        meeting, view = Meeting(self.session.worker), self.session.view
        key = f"{self.name}/{group.name}/{view.generation}"
        me = f"{self.session.client.name}\n{self.session.client.incarnation}"
        found = meeting.claim(key, None, me)
        if found == me or found is None:
            return True
        name, _, incarnation = found.partition("\n")
        loader = Server(name, int(incarnation))
        is_over = verdict_on(self.session.worker, loader) is Verdict.OVER
        return is_over and meeting.claim(key, found, me) == me

    # --- training

    @property
    def step(self) -> int:
        """Pushes that this trainer has made."""
        return self.session.next

    @property
    def is_stale(self) -> bool:
        """True if a pull may lack the last pushes of its trainer and of others."""
        return staleness_of(self.consistency) != 0

    @property
    def number(self) -> int:
        """This trainer's number in the cluster; -1 if it is none."""
        return self.session.number

    def join(self) -> None:
        """Becomes a trainer, if this is none yet; under BSP all others then wait for its pushes.

        The first time, waits until as many as ``connect`` was told want to.
        """
        if self.session.number < 0:
            self.session.join()

    def finish(self) -> None:
        """Leaves the clock: from here on nobody waits for pushes of this trainer.

        Returns when all its pushes are safe. Pulls are possible afterwards; who pushes again
        joins again.

        Raises:
            RolledBack: see there; it is a trainer still.
        """
        if self.session.number >= 0:
            self.session.finish()

    def push(self, gradients: Mapping[Table, tuple[Tensor, Tensor]]) -> None:
        """Pushes gradients of rows of several tables: one step of this trainer.

        Args:
            gradients: by table, ids and gradients as in :meth:`Table.push`.

        Raises:
            GradientError: gradients are not finite; see :class:`NanPolicy`.
            OutOfMemoryError: a server has no room for these rows.
        """
        tables = {t.name: t.gradient_of(*given) for t, given in gradients.items()}
        self.exchange(Gradients(tables), None).wait()

    def exchange(
        self, push: Gradients | None, pull: Wanted | None, skip: bool = False
    ) -> Exchanging:
        """Pushes a step and pulls for the next, in one message to each server.

        Args:
            push: the gradients, which must not change until ``wait`` of what is returned has
                come back; None for none.
            pull: what to pull; None for nothing.
            skip: pushes an empty step if ``push`` is None, so that nobody waits for it.

        Raises:
            GradientError: gradients are not finite; see :class:`NanPolicy`.
            ParameterServerError: a table or dense group was not declared here.
            RolledBack: see there.
        """
        for each in (push, pull):
            self._require_known(each)
        gone: Whole | None = None
        if push is not None or skip:
            self.join()
            gone = self._whole(push)
        with self._account.timed("sending"):
            number, asked = self.session.send(gone, pull)

        def finish(timeout: float | None) -> Pulled | None:
            try:
                with self._account.timed("waiting"):
                    if asked is not None:
                        return self._account.counted(asked, self.session.wait_for(asked, timeout))
                    if number >= 0:
                        self.session.wait_until_safe(number, timeout)
                return None
            finally:
                self.session.keep(number)

        return Exchanging(finish)

    def _whole(self, push: Gradients | None) -> Whole:
        if push is None:
            return Whole(PushKind.SKIP)
        bad = _not_finite(push)
        if bad:
            if self.nans is NanPolicy.RAISE:
                raise errors.GradientError(f"the gradient of {bad} is not finite")
            self.bad_steps += 1
            if self.nans is NanPolicy.SKIP:
                return Whole(PushKind.SKIP)
        tables = {}
        for name, (ids, grad) in push.tables.items():
            table = self._tables[name]
            if table.feedback is not None:
                grad = table.feedback.corrected(ids, grad)
            tables[name] = WholeTable(table.spec, ids, grad, table.rule.hyper())
        dense = {}
        for name, grads in push.dense.items():
            group = self._dense[name]
            flat = [None if g is None else to_host(g.detach()).reshape(-1) for g in grads]
            dense[name] = WholeDense(group.spec, flat, group.hyper())
        return Whole(PushKind.UPDATE, tables, dense)

    def _require_known(self, what: Gradients | Wanted | None) -> None:
        for name in what.tables if what is not None else ():
            if name not in self._tables:
                raise errors.ParameterServerError(
                    f"there is no table {name!r} here; declare it with cluster.table({name!r}, ...)"
                )
        for name in what.dense if what is not None else ():
            if name not in self._dense:
                raise errors.ParameterServerError(
                    f"there is no dense group {name!r} here; declare it with "
                    f"cluster.dense({name!r}, optimizer)"
                )

    # --- the cluster as a whole

    def snapshot(self, folder: str | os.PathLike[str], extra: Any = None) -> Saving:
        """Writes everything as it is at one point in everybody's pushes, while training goes on.

        If servers are lost of which there is no backup, everything goes back to the last one.

        Args:
            folder: where it will be; all servers must see it under this path.
            extra: plain JSON data that is kept with it.

        Raises:
            TypeError: ``folder`` is no path.
        """
        path = str(Path(folder).absolute())
        what = orders.TakeSnapshot(path, "", extra)
        return Saving(lambda: self.session.ask_coordinator(what, patient=False))

    def resize(self, servers: Sequence[str]) -> None:
        """Has these servers keep everything from now on, while training goes on.

        Args:
            servers: names of workers, each of which heads its share.

        Raises:
            ParameterServerError: one of them is not there.
            TypeError: ``servers`` are no names.
        """
        names = _names("resize", servers)
        worker = self.session.worker
        lives = tuple(_server(worker, name) for name in names)
        self.session.ask_coordinator(orders.Resize(lives))
        self.session.refresh()

    def stats(self) -> dict[str, Any]:
        """All that the servers and this worker can say of themselves, as plain data."""
        self.session.refresh()
        answers = self.session.ask_servers(messages.Describe())
        view = self.session.view
        return {
            "cluster": self.name,
            "epoch": view.epoch,
            "generation": view.generation,
            "coordinator": view.coordinator.name,
            "trainers": {t.client.name: t.number for t in view.trainers},
            "servers": {s.name: each for s, each in answers.items() if each is not LOST},
            "step": self.step,
            "bad_steps": self.bad_steps,
            "rollbacks": self.session.rollbacks,
            **self._account.told(),
        }


def _not_finite(push: Gradients) -> str:
    """The table or dense group with a gradient that is not finite; empty if there is none."""
    for name, (_, grad) in push.tables.items():
        if not _is_finite(grad):
            return f"table {name!r}"
    for name, grads in push.dense.items():
        for place, each in enumerate(grads):
            if each is not None and not _is_finite(each):
                return f"parameter {place} of {name!r}"
    return ""


def _is_finite(grad: Tensor) -> bool:
    if not grad.is_floating_point():
        return True
    return bool(torch.isfinite(grad.sum())) or bool(torch.isfinite(grad).all())


# --- connecting


class _Connected:
    """The clusters that one worker is connected to."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.clusters: dict[str, Cluster] = {}
        self.sessions: dict[str, int] = {}

    def close(self) -> None:
        for cluster in self.clusters.values():
            cluster.session.close()


def connect(
    servers: Sequence[str],
    *,
    backups: int = 0,
    consistency: Consistency | None = None,
    trainers: int | None = None,
    name: str = _NAME,
    nans: NanPolicy = NanPolicy.RAISE,
    restore: str | os.PathLike[str] | None = None,
    timeout: float = 60.0,
) -> Cluster:
    """Connects to the servers, which need nothing but to be in the group; the first one who
    does says what the cluster is.

    Args:
        servers: names of the workers that keep the state, each its share.
        backups: servers that have a copy of each share, and take over when its own is lost.
        consistency: ``ps.BSP()``, which is the default, ``ps.SSP(steps)`` or ``ps.Async()``.
        trainers: how many wait for each other to begin. Default: as many as the role of this
            worker has under rpcrun, else 1. Others may join later.
        name: of the cluster, if there are several in the group.
        nans: what happens to gradients that are no numbers.
        restore: folder of a snapshot to begin with.
        timeout: seconds that servers have to come into the group.

    Raises:
        DeclarationError: there is such a cluster, and it is another.
        TypeError: an argument is of a wrong kind.
        ValueError: an argument is out of range.
        TimeoutError: a server did not come.
    """
    consistency = BSP() if consistency is None else consistency
    instance("connect", "consistency", consistency, (BSP, SSP, Async), "ps.BSP(), ps.SSP(n) or "
             "ps.Async()")  # fmt: skip
    instance("connect", "nans", nans, NanPolicy, "a ps.NanPolicy")
    whole("connect", "backups", backups, least=0)
    names = _names("connect", servers)
    if backups >= len(names):
        raise ValueError(f"connect: backups={backups} needs more than {len(names)} servers")
    count = int(os.environ.get("ROLE_WORLD_SIZE", "1")) if trainers is None else trainers
    whole("connect", "trainers", count)
    settings = settings_of(consistency, names, count)
    worker = extend.worker()
    connected = extend.worker_state(_Connected, _Connected, _Connected.close)
    with connected.lock:
        known = connected.clusters.get(name)
        if known is not None and not known.session.is_closed:
            _require_same(known.session.view, settings, backups)
            return known
        view = _meet(worker, name, settings, backups, restore, timeout)
        session = Session(worker, name, view, connected.sessions.get(name, 0))
        connected.sessions[name] = connected.sessions.get(name, 0) + 1
        cluster = connected.clusters[name] = Cluster(session, nans)
    session.spread()
    return cluster


def _meet(
    worker: extend.Worker,
    name: str,
    settings: Mapping[str, Any],
    backups: int,
    restore: str | os.PathLike[str] | None,
    timeout: float,
) -> View:
    """The view of the cluster; makes the first one if there is none."""
    meeting = Meeting(worker)
    view = meeting.view(name)
    if view is None:
        deadline = time.monotonic() + timeout
        lives = [_wait_for(each, deadline) for each in settings["servers"]]
        first = views.first(lives, backups, settings)
        if restore is not None:
            first = _restored(first, restore)
        meeting.enter(name)
        view = meeting.replace(name, None, first)
    _require_same(view, settings, backups)
    return view


def _restored(view: View, folder: str | os.PathLike[str]) -> View:
    saved = Checkpoint.open(Path(folder))
    meta = saved.meta
    if "parameter_server" not in meta:
        raise ValueError(f"connect: restore={str(folder)!r} is no snapshot of a parameter server")
    snapshot = Snapshot(str(saved.path), dict(meta["counts"]), meta["time"])
    return views.beginning_with(view, snapshot)


def _require_same(view: View, settings: Mapping[str, Any], backups: int) -> None:
    different = [
        f"{key}={view.settings[key]!r}, not {settings[key]!r}"
        for key in ("consistency", "trainers")
        if list_of(view.settings[key]) != list_of(settings[key])
    ]
    if view.backups != backups:
        different.append(f"backups={view.backups}, not {backups}")
    current = [server.name for server in view.servers]
    if settings["servers"] not in (list(view.settings["servers"]), current):
        different.append(f"servers={current}, not {settings['servers']}")
    if different:
        raise errors.DeclarationError(
            f"the cluster was set up otherwise before: {'; '.join(different)}"
        )


def list_of(value: Any) -> Any:
    """A tuple as the list that it becomes in JSON."""
    return list(value) if isinstance(value, tuple) else value


def _names(where: str, servers: Sequence[str]) -> list[str]:
    if isinstance(servers, str) or not all(isinstance(each, str) for each in servers):
        raise TypeError(f"{where}: servers={servers!r} must be a list of names of workers")
    names = list(servers)
    if not names or len(set(names)) < len(names):
        raise ValueError(f"{where}: servers={names!r} must be at least one name, each once")
    return names


def _server(worker: extend.Worker, name: str) -> Server:
    """The present life of a server, which it says itself."""
    try:
        worker.life_of(name)  # who was never there is not waited for
        return _asked(name, _SECONDS_TO_ANSWER)
    except rpc.RpcError as error:
        raise errors.ParameterServerError(f"server {name!r} is not in the group") from error


def _wait_for(name: str, deadline: float) -> Server:
    """As :func:`_server`, for one that may be yet to come.

    What this worker has heard of it may be about a former life of that name.
    """
    while True:
        try:
            return _asked(name, max(deadline - time.monotonic(), _PAUSE))
        except (rpc.UnknownWorkerError, rpc.WorkerLostError, rpc.RpcTimeoutError) as error:
            if time.monotonic() > deadline:
                raise TimeoutError(f"server {name!r} did not come into the group") from error
        time.sleep(_PAUSE)


def _asked(name: str, timeout: float) -> Server:
    return Server(name, rpc.rpc_sync(name, own_incarnation, timeout=timeout))
