"""A cluster of servers, as a trainer or reader holds it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import overload

from torch import Tensor
from torch.optim import Optimizer

from tensorwire.parameter_server import errors
from tensorwire.parameter_server.client import first_values
from tensorwire.parameter_server.client.account import Account
from tensorwire.parameter_server.client.cache import Cache
from tensorwire.parameter_server.client.counting import Counting
from tensorwire.parameter_server.client.declared import Declared
from tensorwire.parameter_server.client.dense import DenseGroup
from tensorwire.parameter_server.client.exchange import (
    Answer,
    Exchanging,
    Gradients,
    Pulled,
    PullRequest,
    Step,
)
from tensorwire.parameter_server.client.files import Files
from tensorwire.parameter_server.client.finding import (
    lives_to_come,
    role_of,
    role_or_names,
    those_there,
)
from tensorwire.parameter_server.client.membership import Membership
from tensorwire.parameter_server.client.publishing import Every, Publishing, begin_publishing
from tensorwire.parameter_server.client.reader import Reader
from tensorwire.parameter_server.client.row_fetcher import RowFetcher
from tensorwire.parameter_server.client.samples import Samples
from tensorwire.parameter_server.client.sampling import (
    SamplerArguments,
    batches_of,
    files_of,
    require_no_batches,
)
from tensorwire.parameter_server.client.saving import Saving
from tensorwire.parameter_server.client.session import Session
from tensorwire.parameter_server.client.static_share import share_of
from tensorwire.parameter_server.client.stepper import NanPolicy, Stepper
from tensorwire.parameter_server.client.table import Table
from tensorwire.parameter_server.client.telling import told_of
from tensorwire.parameter_server.client.tracking import Given
from tensorwire.parameter_server.decisions import orders
from tensorwire.parameter_server.decisions.consistency import (
    BSP,
    Consistency,
    staleness_of,
)
from tensorwire.parameter_server.decisions.views import Snapshot
from tensorwire.parameter_server.declarations.arguments import instance, number
from tensorwire.parameter_server.declarations.dense_spec import (
    DenseSpec,
    describe,
    parameters_of,
    require_step,
    spread_of,
)
from tensorwire.parameter_server.declarations.initialisers import Constant, Initialiser
from tensorwire.parameter_server.declarations.lifetimes import MinCount, UnusedFor
from tensorwire.parameter_server.declarations.rules import Rule
from tensorwire.parameter_server.declarations.spec import Precision, TableSpec
from tensorwire.parameter_server.declarations.wire import FLOAT32, Kind, Wire, both_ways
from tensorwire.parameter_server.messaging.settings import consistency_of
from tensorwire.parameter_server.opaque import Json


class Cluster:
    """The servers that keep tables and dense parameters. Made by :func:`connect`.

    Attributes:
        session: this worker's dealings with the servers.
        name: of the cluster.
        consistency: between trainers.
        meanwhile: done once, while the next step waits for servers; None for nothing.
        publishing: the versions that this trainer publishes; None if it does not.
        rows: fetches the rows that modules look up.
        stepper: sends pushes and pulls.
        account: of this worker's exchanges.
        given: the batches whose samples the next push has trained, if they are counted.
        counting: asks for accounts of samples, and for batches.
    """

    def __init__(self, session: Session, membership: Membership, nans: NanPolicy) -> None:
        self.session = session
        self.name = session.cluster
        self.consistency: Consistency = consistency_of(session.view.settings)
        self.meanwhile: Callable[[], object] | None = None
        self.publishing: Publishing | None = None
        self.account = Account()
        self.given = Given()
        self.counting = Counting(session)
        self._membership = membership
        self._declared = Declared(session)
        self.rows = RowFetcher(self)
        self.stepper = Stepper(
            session, membership, self._declared, self.account, self.given, nans, self._pushed
        )

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
        """Declares a table. All who declare it must describe it alike.

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
        return self.declared(spec, cache)

    def declared(self, spec: TableSpec, cache: Cache | None) -> Table:
        """Declares a table that is described already; see :meth:`table`."""
        known = self._declared.tables.get(spec.name)
        before = None if known is None or known.cache is None else known.cache.rules
        if known is not None and before != cache:
            raise errors.DeclarationError(
                f"{spec.name!r} was declared otherwise before: cache={before!r}, not {cache!r}"
            )
        self._declared.announce(spec)
        if known is None:
            known = self._declared.tables[spec.name] = Table(self, spec, cache)
        return known

    def dense(self, name: str, optimizer: Optimizer) -> DenseGroup:
        """Declares the parameters of a constructed optimizer, which servers then keep and move.

        The first trainer's values are where all begin; here, too, the parameters are
        overwritten by them.

        Args:
            name: unique in the cluster.
            optimizer: of any class but those that need a closure.

        Raises:
            DeclarationError: there is a table or dense group of that name that is another, or it
                names other parameters of this trainer.
            ValueError: the optimizer needs a closure, or cannot step where servers keep its
                parameters.
        """
        return self.load_dense(self.declare_dense(name, optimizer), optimizer)

    def declare_dense(self, name: str, optimizer: Optimizer) -> DenseSpec:
        """Declares dense parameters and moves nothing: the first half of :meth:`dense`."""
        spec = describe(name, optimizer, spread_of(optimizer))
        require_step(spec)
        self._declared.require_free(name, parameters_of(optimizer))
        self._declared.announce(spec)
        return spec

    def load_dense(self, spec: DenseSpec, optimizer: Optimizer) -> DenseGroup:
        """Has servers begin with these values, or gets theirs: the second half of :meth:`dense`."""
        group = DenseGroup(self, spec, optimizer)
        self._declared.hold(group)
        with self.account.stopped():
            first_values.begin(group)
        return group

    def release(self, name: str) -> None:
        """Frees the name of dense parameters for another model of this trainer, which then has
        what servers keep under it.

        Args:
            name: of a dense group; nothing happens if there is none.
        """
        self._declared.release(name)

    def reader(self, timeout: float = 10.0) -> Reader:
        """Reads whole steps: rows of all servers that are of one step, such as for an evaluator.

        Args:
            timeout: seconds in which a pull must find all servers at one step. Default 10.

        Raises:
            TypeError: ``timeout`` is no number.
            ValueError: trainers are not kept together by ``BSP``, so there are no steps; or
                ``timeout`` is negative.

        Example::

            whole = cluster.reader().pull({"items": ids}, dense=["model"])
            print(whole.step, whole.tables["items"], whole.dense["model"])
        """
        number("reader", "timeout", timeout)
        if not isinstance(self.consistency, BSP):
            raise ValueError(
                f"reader: the cluster has {self.consistency}, under which servers make no steps "
                "together; only ps.BSP() has whole ones"
            )
        return Reader(self, timeout)

    # --- training

    @property
    def nans(self) -> NanPolicy:
        """The treatment of gradients that are infinite or not a number."""
        return self.stepper.nans

    @property
    def bad_steps(self) -> int:
        """Steps with such gradients that were pushed, or skipped."""
        return self.stepper.bad_steps

    @property
    def step(self) -> int:
        """Pushes that this trainer has made; :meth:`finish` makes one more."""
        return self.session.trainer.next

    @property
    def is_stale(self) -> bool:
        """True if a pull may lack the last pushes of its trainer and of others."""
        return staleness_of(self.consistency) != 0

    @property
    def number(self) -> int:
        """This trainer's number in the cluster; -1 if it is none."""
        return self.session.trainer.number

    def join(self) -> None:
        """Becomes a trainer, if this is none yet; under BSP all others then wait for its pushes.

        The first time, waits until as many as ``connect`` was told want to. One that has finished
        is a new trainer from here on, which begins where the others are.
        """
        self._membership.join(again=True)

    def finish(self) -> None:
        """Leaves the clock: from here on nobody waits for pushes of this trainer.

        Returns when all its pushes are safe. Pulls are possible afterwards, pushes are not before
        it has called :meth:`join` again.

        Raises:
            RolledBack: see there; it is a trainer still.
        """
        self.session.servers.require_own_process()
        self._membership.finish()

    def push(self, gradients: Mapping[Table, tuple[Tensor, Tensor]]) -> None:
        """Pushes gradients of rows of several tables: one step of this trainer.

        Args:
            gradients: by table, ids and gradients as in :meth:`Table.push`.

        Raises:
            GradientError: gradients are not finite; see :class:`NanPolicy`.
            OutOfMemoryError: a server has no room for these rows.
            TypeError: ``gradients`` are not by table, or of a wrong kind.
            ValueError: the shapes do not fit.
        """
        if not isinstance(gradients, Mapping) or not all(isinstance(t, Table) for t in gradients):
            raise TypeError("push: gradients must be a dict from tables to ids and gradients, not "
                            f"{_kinds(gradients)}")  # fmt: skip
        for table in gradients:
            if table.cluster is not self:
                raise ValueError(f"push: table {table.name!r} is of {table.cluster!r}, not of "
                                 f"{self!r}")  # fmt: skip
        tables = {t.name: t.gradient_of(*given) for t, given in gradients.items()}
        self.exchange(Gradients(tables), None).wait()

    def exchange(
        self, push: Gradients | None, pull: PullRequest | None, skip: bool = False
    ) -> Exchanging[Pulled | None]:
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
            TypeError: ids or gradients are of a wrong kind.
            ValueError: their shapes do not fit.
        """
        for each in (push, pull):
            self._declared.require(each)
        rows = [] if push is None else self.rows.gradients_of(push.tables)
        wanted = [] if pull is None else self.rows.grouped(pull.tables)
        names = () if pull is None else pull.dense
        dense = {} if push is None else push.dense
        gone = Step(rows, dense) if push is not None else None
        sent = self.stepper.send(gone, wanted, names, skip)

        def finish(timeout: float | None) -> Pulled | None:
            answer = sent.wait(timeout)
            if answer is None:
                return None if pull is None else Pulled({}, {}, 0)
            tables: dict[str, Tensor] = {}
            for ids, rows in zip(wanted, answer.rows, strict=True):
                tables.update(zip(ids.tables, rows.split_with_sizes(ids.sizes), strict=True))
            return Pulled(tables, answer.dense, answer.low)

        return Exchanging(finish)

    @property
    def tables(self) -> list[Table]:
        """The tables that were declared here."""
        return list(self._declared.tables.values())

    def known(self, *names: str) -> list[Table]:
        """The declared tables of these names."""
        return [self._declared.tables[name] for name in names]

    def _pushed(self) -> None:
        if self.publishing is not None:
            self.publishing.note_step(self.step)

    def use_the_wait(self) -> None:
        """Does work that was put off to a time at which this trainer waits."""
        what, self.meanwhile = self.meanwhile, None
        if what is not None:
            what()

    def pass_step(self) -> None:
        """Makes a step without gradients while others train and this trainer has nothing to."""
        self._accept_dense(self.stepper.send(None, (), tuple(self._declared.dense), skip=True))

    def reload(self) -> None:
        """Gets the dense parameters that were declared here as the servers have them."""
        self._accept_dense(self.stepper.send(None, (), tuple(self._declared.dense)))

    def _accept_dense(self, sent: Exchanging[Answer | None]) -> None:
        answer = sent.wait()
        for name, values in (answer.dense if answer is not None else {}).items():
            group = self._declared.dense.get(name)
            if group is not None and values is not None:
                group.accept(values)

    # --- samples

    @overload
    def samples(
        self,
        length: int,
        *,
        batch_size: int,
        shuffle: bool = False,
        seed: int = 0,
        epochs: int = 1,
        drop_last: bool | None = None,
        name: str = "samples",
        assignment: str = "dynamic",
        rank: int | None = None,
        num_replicas: int | None = None,
    ) -> Samples: ...

    @overload
    def samples(
        self,
        *,
        files: Sequence[object],
        shuffle: bool = False,
        seed: int = 0,
        epochs: int = 1,
        name: str = "samples",
        assignment: str = "dynamic",
        rank: int | None = None,
        num_replicas: int | None = None,
    ) -> Files: ...

    def samples(
        self,
        length: int | None = None,
        *,
        files: Sequence[object] | None = None,
        batch_size: int | None = None,
        shuffle: bool = False,
        seed: int = 0,
        epochs: int = 1,
        drop_last: bool | None = None,
        name: str = "samples",
        assignment: str = "dynamic",
        rank: int | None = None,
        num_replicas: int | None = None,
    ) -> Samples | Files:
        """A sampler that divides samples among all trainers, each of which counts once, whoever
        dies, joins or leaves. All who name it must describe it alike.

        This worker becomes a trainer, if it is none yet. Under ``ps.BSP()`` batches, or files, are
        dealt to trainers in turn, the same ones in every run; under ``ps.SSP`` and ``ps.Async``
        each trainer takes some whenever it has none left.

        Args:
            length: samples in an epoch, as ``len(dataset)``. Gives a batch sampler.
            files: the samples' files instead: sources that the data set understands, such as
                paths, each of which can be pickled. Gives :class:`Files`, over which the data set
                iterates. All trainers, and those that restore a snapshot, must give equal sources
                in the same order: their pickles are compared.
            batch_size: samples in a batch of one trainer; with files it is the loader's.
            shuffle: whether each epoch has an order of its own. Default no: that of the indices.
            seed: of these orders, 0 or more.
            epochs: how often each sample is trained.
            drop_last: whether the last batch of an epoch is left out if it is smaller than the
                others. Default no.
            name: unique in the cluster.
            assignment: ``"dynamic"``, as said above, or ``"static"``: each trainer has every
                ``num_replicas``-th batch, or file, for itself, counted over all epochs. Nobody else
                trains them, so if it dies the others wait until a trainer of its rank is back.
            rank: this trainer's, from 0, if the assignment is static. Default ``ROLE_RANK``, which
                ``rpcrun`` sets.
            num_replicas: how many there are then. Default ``ROLE_WORLD_SIZE``.

        Raises:
            DeclarationError: it is another than before, or than in the snapshot that was restored.
            TypeError: an argument is of a wrong kind.
            ValueError: an argument is out of range, files and a length are given, or a file is
                there twice, two spellings of its path included.

        Example::

            data = cluster.samples(len(dataset), batch_size=1024, shuffle=True, seed=7, epochs=3)
            loader = DataLoader(dataset, batch_sampler=data, num_workers=4)
            for batch in data.track(loader):
                ...
                optimizer.step()
        """
        share = share_of(assignment, rank, num_replicas)
        about = SamplerArguments(name, shuffle, seed, epochs, share)
        if files is not None:
            require_no_batches(length, batch_size, drop_last)
            return files_of(self, files, about)
        return batches_of(self, length, batch_size, drop_last, about)

    # --- the cluster as a whole

    def snapshot(
        self, folder: str | os.PathLike[str], extra: object = None, *, overwrite: bool = False
    ) -> Saving:
        """Writes everything as it is at one point in everybody's pushes, while training goes on.

        If servers are lost of which there is no backup, everything goes back to the last one that
        is whole. All trainers may ask for the same folder at the same step: that is one snapshot.

        Args:
            folder: where it will be; all servers must see it under this path.
            extra: plain JSON data that is kept with it.
            overwrite: whether a snapshot that is there is replaced once this one is whole, such as
                that of a step to which everything went back. Default False.

        Raises:
            TypeError: ``folder`` is no path, or ``extra`` is no JSON.
            ValueError: ``folder`` is empty.
        """
        instance("snapshot", "folder", folder, (str, os.PathLike), "a folder")
        try:
            json.dumps(extra, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise TypeError(f"snapshot: extra={extra!r} is no plain JSON data: {error}") from None
        if not os.fspath(folder):
            raise ValueError(f"snapshot: folder={folder!r} must have at least one character")
        path = str(Path(folder).absolute())
        instance("snapshot", "overwrite", overwrite, bool, "True or False")
        step = self.step if self.number >= 0 else -1
        what = orders.TakeSnapshot(path, "", extra, overwrite, self.session.client, step)
        progress = self.session.worker.progress

        def take() -> Snapshot:
            with progress.phase("snapshot"):
                taken: Snapshot = self.session.servers.ask_coordinator(what, patient=False)
            return taken

        return Saving(take)

    def publish(
        self,
        folder: str | os.PathLike[str],
        every: Every,
        base_every: int = 100,
        *,
        state: bool = False,
        precision: Precision | None = None,
        keep_bases: int = 2,
        extra: object = None,
    ) -> Publishing:
        """Publishes versions of everything from now on, while training goes on; on one trainer.

        The first version is a base, which has all rows, and is due at once. Deltas follow, with the
        rows that have changed, the ids of those that were evicted, and dense parameters. Versions
        are of one point in everybody's pushes each, and their numbers only rise. Changes that
        cannot be written, as where a disk is full, are in the next version.

        Args:
            folder: of the versions; all servers must see it under this path.
            every: when versions are due, ``ps.Steps(500)`` or ``ps.Seconds(10)``.
            base_every: deltas between two bases, at least 1. Default 100.
            state: whether versions have what training goes on from: the state of rules and
                optimizers, ages of rows, and ids that wait for one. Then the cluster goes back to
                the last version if it must, and ``ps.connect(restore=folder)`` begins with it bit
                for bit. Default False: rows and dense parameters, for serving.
            precision: what float32 rows of tables are rounded to, the nearest, in versions for
                serving, such as ``ps.Precision.BFLOAT16``, or ``INT8`` with a scale for each row.
                Default None, as they are kept.
            keep_bases: as many of the newest bases stay, with the deltas after them. Default 2.
            extra: plain JSON data that is kept with each version.

        Raises:
            BlockingIOError: another process publishes into this folder.
            CheckpointError: the folder holds other things, or safetensors is not installed.
            ParameterServerError: this trainer publishes already.
            TypeError: an argument is of a wrong kind.
            ValueError: an argument is out of range.
        """
        if self.publishing is not None and self.publishing.is_running:
            raise errors.ParameterServerError(
                f"this trainer publishes into {str(self.publishing.folder)!r} already; stop() that"
            )
        self.session.servers.require_own_process()
        self.publishing = begin_publishing(
            self,
            folder,
            every,
            base_every,
            state=state,
            precision=precision,
            keep_bases=keep_bases,
            extra=extra,
        )
        return self.publishing

    def resize(self, servers: Sequence[str] | str | None = None, *, timeout: float = 60.0) -> None:
        """Has these servers keep everything from now on, while training goes on.

        Args:
            servers: names of workers, each of which heads its share, or their role: all of its
                workers that are there. Default the role of the present servers.
            timeout: seconds that a server has to come into the group.

        Raises:
            ParameterServerError: one of them is gone again.
            TimeoutError: one of them did not come.
            TypeError: ``servers`` are no names.
            ValueError: there is no such role.
        """
        number("resize", "timeout", timeout)
        wanted = role_of(self.session.view.servers) if servers is None else servers
        role, names = role_or_names("resize", wanted)
        worker = self.session.worker
        lives = those_there(role) if role else lives_to_come("resize", worker, names, timeout)
        with worker.progress.phase("resize"):
            self.session.servers.ask_coordinator(orders.Resize(tuple(lives)))
            self.session.refresh()

    def stats(self) -> dict[str, Json]:
        """All that the servers and this worker can say of themselves, as plain data.

        Servers that cannot be reached, and the progress that only they know, are left out.
        """
        return told_of(self)


def _kinds(given: object) -> str:
    if not isinstance(given, Mapping):
        return type(given).__name__
    return f"{type(given).__name__} from {', '.join(type(each).__name__ for each in given)}"
