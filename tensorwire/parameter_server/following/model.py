"""A model that is published while it is trained, as a process outside the group reads it."""

from __future__ import annotations

import contextvars
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rpc import TlsOptions
from tensorwire.checkpoint.following import Followed, Follower, Held, begun
from tensorwire.checkpoint.remote.sources import source_of
from tensorwire.parameter_server.client.distinct import distinct
from tensorwire.parameter_server.client.gradient import RowGradient
from tensorwire.parameter_server.declarations.arguments import instance, number, whole
from tensorwire.parameter_server.errors import DeclarationError
from tensorwire.parameter_server.following.content import (
    Content,
    DenseContent,
    TableContent,
    taken,
)
from tensorwire.parameter_server.messaging.messages import TableIds
from tensorwire.parameter_server.opaque import UserValue

if TYPE_CHECKING:
    pass


class FollowedView:
    """One version of a followed model. Made by ``FollowedModel.pinned``; never changes.

    Attributes:
        version: its number.
        step: of the training.
        extra: plain data of who published it.
    """

    def __init__(self, held: Held[Content]) -> None:
        self.version = held.version.number
        self.step = held.version.step
        self.extra: UserValue = held.value.extra
        self._content = held.value

    @property
    def tables(self) -> list[str]:
        """The names of the tables that there are."""
        return sorted(self._content.tables)

    def pull(self, table: str, ids: Tensor) -> Tensor:
        """The rows of ids in this version; ids without a row read their initial values.

        Args:
            table: name of the table.
            ids: int64, of any shape, on the CPU.

        Returns:
            ``(*ids.shape, dim)``, float32.

        Raises:
            DeclarationError: there is no such table in this version.
            TypeError: ``ids`` are not int64.
        """
        _check_ids(table, ids)
        unique, inverse = distinct(ids)
        return self.fetch(TableIds((table,), (len(unique),), unique))[inverse]

    def fetch(self, ids: TableIds) -> Tensor:
        """The rows of ids that are all different within a table, those of tables one by one.

        Args:
            ids: of tables of one width.

        Returns:
            ``(n, dim)``, float32, the caller's own.
        """
        parts = [
            table_of(self._content, name).pull(own)
            for name, own in zip(ids.tables, ids.ids.split_with_sizes(ids.sizes), strict=True)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def dense(self, name: str = "model") -> list[Tensor]:
        """The dense parameters of a model, in the order in which its optimizer had them.

        Tensors are shared by all who ask, and must not be changed.

        Args:
            name: of the dense parameters in the cluster. Default as :class:`Optimizer` has it.

        Raises:
            DeclarationError: there are none of that name in this version.
        """
        return list(self._dense(name).values)

    def load_into(self, module: nn.Module, name: str = "model") -> None:
        """Copies dense parameters into a model; its tables are read as they are.

        Args:
            module: whose parameters that are no rows of tables are set, on any device.
            name: of the dense parameters in the cluster. Default as :class:`Optimizer` has it.

        Raises:
            DeclarationError: there are none of that name in this version.
            ValueError: the module has others.
        """
        group = self._dense(name)
        names = group.saved.names
        mine = {n: p for n, p in module.named_parameters() if p.numel() and p.requires_grad}
        chosen = [mine[n] for n in names if n in mine] if names else list(mine.values())
        shapes = [tuple(each.shape) for each in chosen]
        if shapes != list(group.saved.shapes):
            raise ValueError(
                f"load_into: {name!r} has parameters {list(names)} of shapes "
                f"{list(group.saved.shapes)}, but the module has {list(mine)} of shapes "
                f"{[tuple(each.shape) for each in mine.values()]}"
            )
        with torch.no_grad():
            for parameter, value in zip(chosen, group.values, strict=True):
                parameter.copy_(value)

    def _dense(self, name: str) -> DenseContent:
        group = self._content.dense.get(name)
        if group is None:
            names = sorted(self._content.dense)
            raise DeclarationError(f"there are no dense parameters {name!r}, but {names}")
        return group


class FollowedTable:
    """A table of a followed model, read-only. Made by ``FollowedModel.table``.

    Modules such as :class:`EmbeddingBag` take it in the place of a cluster's table.

    Attributes:
        name: of the table.
        dim: columns of a row.
        cluster: the followed model.
        gradient: stands for rows in modules; is never given a gradient.
        kind: tables of the same kind are as wide, and are fetched together.
        order: the same for all.
    """

    def __init__(self, model: FollowedModel, name: str, dim: int) -> None:
        self.cluster = model
        self.name = name
        self.dim = dim
        self.gradient = RowGradient(dim, self)
        self.gradient.parameter.requires_grad_(False)
        self.kind = (dim, "followed", False)
        self.order = ""

    def __repr__(self) -> str:
        return f"FollowedTable({self.name!r}, dim={self.dim})"

    def __deepcopy__(self, memo: object) -> FollowedTable:
        """Returns the same table, as a cluster's table does."""
        return self

    def pull(self, ids: Tensor) -> Tensor:
        """The rows of ids, all of one version; ids without a row read their initial values.

        Args:
            ids: int64, of any shape, on the CPU.

        Returns:
            ``(*ids.shape, dim)``, float32.

        Raises:
            TypeError: ``ids`` are not int64.
        """
        return self.cluster.view().pull(self.name, ids)

    def fetch(self, ids: Tensor) -> Tensor:
        """The rows of ids that are all different.

        Args:
            ids: int64, ``(n,)``, on the CPU.

        Returns:
            ``(n, dim)``, float32, the caller's own.
        """
        return self.cluster.view().fetch(TableIds((self.name,), (len(ids),), ids))


class _Fetcher:
    """Fetches rows for collections, as a cluster's ``rows`` does."""

    def __init__(self, model: FollowedModel) -> None:
        self._model = model

    def fetch_all(self, ids: Sequence[TableIds]) -> list[Tensor]:
        """The rows of all that one forward pass looks up, of one version."""
        view = self._model.view()
        return [view.fetch(each) for each in ids]


class FollowedModel(Followed[Content]):
    """The newest version of a model that is published while it is trained. Made by :func:`follow`.

    May be used by several threads. Used as a context manager, it is closed at the end.

    Attributes:
        rows: fetches the rows that collections look up.
    """

    def __init__(self, follower: Follower[Content]) -> None:
        super().__init__(follower)
        self._lock = threading.Lock()
        self._tables: dict[str, FollowedTable] = {}
        self._view: contextvars.ContextVar[FollowedView | None] = contextvars.ContextVar(
            "view", default=None
        )
        self.rows = _Fetcher(self)

    def __repr__(self) -> str:
        version = self._follower.held.version
        return f"FollowedModel(version={version.number}, step={version.step}, tables={self.tables})"

    def view(self) -> FollowedView:
        """The version that this thread has pinned; else the newest."""
        return self._view.get() or FollowedView(self._follower.held)

    @property
    def tables(self) -> list[str]:
        """The names of the tables that there are."""
        return self.view().tables

    def table(self, name: str) -> FollowedTable:
        """A table to look rows up in.

        Args:
            name: of the table in the cluster.

        Raises:
            DeclarationError: there is no such table.
        """
        dim = table_of(self._follower.held.value, name).saved.dim
        with self._lock:
            table = self._tables.get(name)
            if table is None or table.dim != dim:
                table = self._tables[name] = FollowedTable(self, name, dim)
        return table

    def dense(self, name: str = "model") -> list[Tensor]:
        """The dense parameters of a model, of the newest version or of the pinned one.

        Args:
            name: of the dense parameters in the cluster.

        Raises:
            DeclarationError: there are none of that name.
        """
        return self.view().dense(name)

    def load_into(self, module: nn.Module, name: str = "model") -> None:
        """Copies dense parameters of the newest or the pinned version into a model.

        Args:
            module: whose dense parameters are set.
            name: of the dense parameters in the cluster.

        Raises:
            DeclarationError: there are none of that name.
            ValueError: the module has others.
        """
        self.view().load_into(module, name)

    @property
    def version(self) -> int:
        """The number of the newest version that is ready, or of the pinned one; only rises."""
        return self.view().version

    @property
    def step(self) -> int:
        """The step of the training at which it was cut; falls if training went back."""
        return self.view().step

    @contextmanager
    def pinned(self) -> Iterator[FollowedView]:
        """Holds one version: all lookups in the block, in this thread, are of it.

        Modules and tables of this model read it, too. Lookups outside a block are each of one
        version, but the next one may be of a newer.

        Example::

            with model.pinned() as view:
                scores = net(features)          # its lookups in all tables fit together
                answer = {"version": view.version, "scores": scores.tolist()}
        """
        with self._follower.pinned() as held:
            view = FollowedView(held)
            token = self._view.set(view)
            try:
                yield view
            finally:
                self._view.reset(token)


def follow(
    folder: str | Path,
    *,
    key_file: str | os.PathLike[str] | None = None,
    tls: TlsOptions | None = None,
    cache: str | Path | None = None,
    timeout: float = 60.0,
    interval: float = 0.2,
    max_pinned: int = 2,
) -> FollowedModel:
    """Follows the versions that ``Cluster.publish`` writes, in any process that sees the folder.

    The process needs no group and no servers, and changes nothing. A newer version is made ready
    beside the one that is read, and takes its place at once. If a version is missing, damaged or
    of another folder, the one before is read on; the log and ``error`` say why.

    Args:
        folder: that versions are published in. Or ``tensorwire://host:port`` of a publisher, or
            a URL of an object store into which one copies.
        key_file: with the reader key; for a publisher's address, which needs it.
        tls: certificates of which this end's is for the name ``reader``, if the publisher has
            TLS. Default none.
        cache: folder of this process alone that keeps what was fetched from a URL, so that a
            restart fetches only what is new. Default a temporary one, which keeps nothing.
        timeout: seconds in which there must be a first version. Default 60.
        interval: seconds between two looks for newer versions. Default 0.2.
        max_pinned: versions that ``pinned`` may hold at a time; while as many are held, newer
            ones wait. Default 2.

    Raises:
        CheckpointError: what is there is damaged, or of something else.
        TimeoutError: nothing is there after ``timeout`` seconds.
        TypeError: an argument is of a wrong kind.
        ValueError: an argument is out of range, or for another kind of place.
        WrongKeyError: the publisher has another key.

    Example::

        model = ps.follow("folder/model")   # or ps.follow("tensorwire://host:7000", key_file=...)
        bag = ps.EmbeddingBag(model.table("items"), mode="sum")
        with torch.inference_mode(), model.pinned():
            vectors = bag(torch.tensor([[3, 1], [3, 8]]))
    """
    instance("follow", "folder", folder, (str, Path), "the path of a folder, or a URL")
    number("follow", "timeout", timeout)
    number("follow", "interval", interval, least=0.001)
    whole("follow", "max_pinned", max_pinned)
    source = source_of(folder, key_file, tls, cache)
    follower = begun(source, taken, interval, max_pinned, timeout)
    return FollowedModel(follower)


def table_of(content: Content, name: str) -> TableContent:
    """A table of a version.

    Raises:
        DeclarationError: there is none of that name.
    """
    table = content.tables.get(name)
    if table is None:
        raise DeclarationError(f"there is no table {name!r}, but {sorted(content.tables)}")
    return table


def _check_ids(table: str, ids: Tensor) -> None:
    if not isinstance(ids, Tensor) or ids.dtype != torch.int64:
        kind = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
        raise TypeError(f"table {table!r}: ids are {kind}, not torch.int64")
    if ids.device.type != "cpu" or ids.layout != torch.strided:
        raise ValueError(f"table {table!r}: ids are {ids.layout} on {ids.device}, not on the CPU")
