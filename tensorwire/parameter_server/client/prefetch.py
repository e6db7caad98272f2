"""Fetches the rows of the next batches while this one trains."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, TypeVar

import torch
from torch import Tensor, nn

from tensorwire.parameter_server.client.cluster import Cluster
from tensorwire.parameter_server.client.distinct import distinct
from tensorwire.parameter_server.client.embedding import Lookup
from tensorwire.parameter_server.client.lookahead import Lookahead
from tensorwire.parameter_server.client.table import Table
from tensorwire.parameter_server.client.tracking import Tracked
from tensorwire.parameter_server.decisions.consistency import BSP
from tensorwire.parameter_server.declarations.arguments import instance, whole
from tensorwire.parameter_server.declarations.wire import BFloat16, Float16, Float32, Int8
from tensorwire.parameter_server.errors import RolledBack
from tensorwire.parameter_server.messaging.messages import TableIds
from tensorwire.parameter_server.opaque import Function, UserValue

Batch = TypeVar("Batch")
Ids = Callable[[UserValue], UserValue]

_ROW_BY_ROW: Final = (Float32, BFloat16, Float16, Int8)
"""Kinds that pack each row by itself, so that a row which is kept is the one that would come."""


def prefetch(
    loader: Iterable[Batch], *modules: nn.Module, ids: Ids, ahead: int = 1
) -> Iterator[Batch]:
    """Yields the batches of a loader, ``ahead + 1`` behind what it reads; fetches rows beforehand.

    With ``ps.BSP()`` the rows of the next batch come with the answer to this step's push: one
    message a server and step, and the same results as without. With ``ps.SSP`` and
    ``ps.Async`` they are asked for before this batch trains, so that nobody waits for them:
    they lack this step.

    With ``ahead`` more than 1, rows that a batch within the next ``ahead`` steps wants stay at the
    trainer. The answer to a step brings only those rows of the next batch that the step has
    changed; a second message to each server, whose answer no step waits for, brings the others
    before. Results are the same, to the bit.

    Args:
        loader: what is iterated over.
        modules: the model, whose modules that look rows up are found; or those modules
            themselves. The rows of all of them come in one message.
        ids: of a batch, what the module will get, the very tensors. Of a model with several such
            modules a dict by their names, as ``model.named_modules()`` has them; of several
            modules as many, in their order.
        ahead: batches whose ids are known before they train. Default 1. More need ``ps.BSP()``
            and tables without a cache.

    Yields:
        The batches.

    Raises:
        TypeError: the loader cannot be iterated over, a module is none, ``ids`` is no function, or
            ``ahead`` no whole number.
        ValueError: no module is given or found, tables are of several clusters, ``ids`` leaves
            a module out, or with this consistency or these tables ``ahead`` must be 1.

    Example::

        for batch in ps.prefetch(loader, model, ids=lambda b: {"user": b.user, "item": b.item}):
            ...
    """
    if not callable(ids):
        raise TypeError(f"prefetch: ids={ids!r} is a {type(ids).__name__}, not a function")
    instance("prefetch", "loader", loader, Iterable, "an iterable of batches")
    whole("prefetch", "ahead", ahead)
    wants = _wants(modules, ids)
    wants.require_one_cluster()
    if ahead > 1:
        wants.require_exact(ahead)
    reading = partial(_batches_ahead, ahead=ahead) if ahead > 1 else _batches
    if isinstance(loader, Tracked):
        return _tracked_batches(loader, wants, reading)
    return reading(loader, wants)


def _tracked_batches(tracked: Tracked, wants: _Wants, reading: Function) -> Iterator[Batch]:
    """Yields what ``reading`` does; drops what was read ahead when samples are dealt anew."""
    for turn in tracked.turns():
        try:
            yield from reading(turn, wants, turn.give)
        except RolledBack as error:  # raised here by what is fetched, not where batches are used
            turn.recover(error)


def _wants(modules: Sequence[nn.Module], ids: Ids) -> _Wants:
    """Finds the modules, and how each gets its ids from a batch."""
    if not modules:
        raise ValueError("prefetch: give the modules whose rows it is to fetch, or their model")
    for module in modules:
        instance(
            "prefetch",
            "module",
            module,
            nn.Module,
            "a ps.Embedding, a ps.EmbeddingBag, a collection or a model of such",
        )
    if len(modules) == 1 and not isinstance(modules[0], Lookup):
        named = {n: each for n, each in modules[0].named_modules() if isinstance(each, Lookup)}
        if not named:
            raise ValueError("prefetch: the model has no module that looks rows up in tables, such "
                             "as ps.EmbeddingBagCollection")  # fmt: skip
        return _Wants(list(named.values()), list(named), ids)
    for module in modules:
        instance("prefetch", "module", module, Lookup, "a ps.Embedding, ps.EmbeddingBag or "
                 "collection, as there are several")  # fmt: skip
    return _Wants([each for each in modules if isinstance(each, Lookup)], [], ids)


def _always() -> bool:
    return True


def _batches(
    loader: Iterable[Batch], wants: _Wants, may_give: Callable[[], bool] = _always
) -> Iterator[Batch]:
    """Yields batches, two behind what is read; ends before one that may not be given out now."""
    batches = iter(loader)
    known = deque(itertools.islice(batches, 1))
    if known:
        wants.cluster.rows.bring(wants.of(known[0]))
    while known:
        known.extend(itertools.islice(batches, 3 - len(known)))
        if len(known) > 1:
            wants.cluster.rows.announce(wants.of(known[1]))
        if len(known) > 2:
            wants.look_later(known[2])
        if not may_give():
            return
        yield known.popleft()


def _batches_ahead(
    loader: Iterable[Batch],
    wants: _Wants,
    may_give: Callable[[], bool] = _always,
    *,
    ahead: int,
) -> Iterator[Batch]:
    batches = iter(loader)
    rows = wants.cluster.rows
    before, rows.ahead = rows.ahead, Lookahead(wants.cluster)
    window = rows.ahead
    known = deque(itertools.islice(batches, 1))
    try:
        for batch in known:
            window.admit(wants.of(batch))
            rows.bring_ahead()
        admitted = len(known)
        while known:
            known.extend(itertools.islice(batches, ahead + 2 - len(known)))
            window.advance()
            for batch in itertools.islice(known, admitted, ahead + 1):
                window.admit(wants.of(batch))
            admitted = min(len(known), ahead + 1) - 1
            look = partial(wants.look, known[-1]) if len(known) > ahead + 1 else None
            if not may_give():
                return
            wants.cluster.meanwhile = partial(window.use_the_wait, look)
            yield known.popleft()
    finally:
        window.close()
        rows.ahead = before


class _Wants:
    """Finds the different ids of a batch, while a step waits for servers if it does.

    Args:
        modules: that look rows up.
        names: of the modules in their model; empty if they were given by themselves.
        ids: of a batch, what the modules get.
    """

    def __init__(self, modules: Sequence[Lookup], names: Sequence[str], ids: Ids) -> None:
        self._modules = modules
        self._names = names
        self._ids = ids
        self._found: tuple[object, list[TableIds]] | None = None

    @property
    def cluster(self) -> Cluster:
        """The cluster that has the tables."""
        cluster: Cluster = self._modules[0].tables[0].cluster
        return cluster

    def require_one_cluster(self) -> None:
        """Refuses tables of several clusters, whose rows cannot come in one message."""
        every = [table.cluster for module in self._modules for table in module.tables]
        clusters = {id(each): repr(each) for each in every}
        if len(clusters) > 1:
            raise ValueError(
                f"prefetch: the modules' tables are of {len(clusters)} clusters, "
                f"{', '.join(clusters.values())}; call ps.prefetch once for each of them"
            )

    def require_exact(self, ahead: int) -> None:
        """Refuses to keep rows where they would not have the bits that their servers have.

        Args:
            ahead: batches that are to be known.
        """
        consistency = self.cluster.consistency
        if not isinstance(consistency, BSP):
            raise ValueError(
                f"prefetch: ahead={ahead} keeps the bits of ps.BSP(), and this cluster has "
                f"{consistency}, which lets rows be fetched before the step as it is; leave out "
                "ahead="
            )
        for module in self._modules:
            module.batches_known = max(module.batches_known, ahead + 2)
            for table in module.tables:
                if table.cache is not None:
                    raise ValueError(
                        f"prefetch: ahead={ahead} keeps rows up to date, and table {table.name!r} "
                        f"has cache={table.cache.rules!r}, which hands out older ones; leave out "
                        "one of the two"
                    )
                if type(table.spec.wire.pull) not in _ROW_BY_ROW:
                    raise ValueError(
                        f"prefetch: ahead={ahead} keeps rows as they came, and table "
                        f"{table.name!r} has a wire of its own, {table.spec.wire.pull!r}, which "
                        "may pack a row otherwise beside others; leave out one of the two"
                    )

    def look_later(self, batch: object) -> None:
        """Has the next step look at a batch."""
        self.cluster.meanwhile = partial(self.look, batch)

    def look(self, batch: object) -> None:
        """Finds the ids of a batch, for :meth:`of`."""
        with suppress(Exception):  # it is raised where the batch is to be fetched
            self._found = batch, self._wanted(batch)

    def of(self, batch: object) -> list[TableIds]:
        """The different ids of a batch, those of tables of one kind together."""
        looked_up, self._found = self._found, None
        if looked_up is not None and looked_up[0] is batch:
            return looked_up[1]
        return self._wanted(batch)

    def _wanted(self, batch: object) -> list[TableIds]:
        given = self._given(self._ids(batch))
        needs = [
            need
            for module, each in zip(self._modules, given, strict=True)
            for need in module.wanted(each)
        ]
        return _together(self._modules, needs)

    def _given(self, returned: UserValue) -> Sequence[object]:
        """The input of each module."""
        if len(self._modules) == 1:
            return [self._given_to_one(returned)]
        if self._names:
            return self._given_by_name(returned)
        given = [returned] if isinstance(returned, Tensor) else list(returned)
        if len(given) != len(self._modules):
            raise ValueError(
                f"prefetch: ids returned {len(given)} tensors for {len(self._modules)} modules"
            )
        return given

    def _given_to_one(self, returned: UserValue) -> UserValue:
        named = self._names and isinstance(returned, Mapping) and set(returned) == {self._names[0]}
        if named and not hasattr(self._modules[0], "features"):
            return returned[self._names[0]]
        if isinstance(returned, (list, tuple)) and not hasattr(self._modules[0], "features"):
            if len(returned) != 1:
                raise ValueError(f"prefetch: ids returned {len(returned)} tensors for 1 modules")
            return returned[0]
        return returned

    def _given_by_name(self, returned: UserValue) -> Sequence[object]:
        if not isinstance(returned, Mapping):
            raise TypeError(
                f"prefetch: ids returned a {type(returned).__name__}, not a dict by module name, "
                f"for the modules {', '.join(map(repr, self._names))}"
            )
        missing = [name for name in self._names if name not in returned]
        if missing or len(returned) > len(self._names):
            wrong = f"leaves out {missing[0]!r}" if missing else "has others"
            raise ValueError(
                f"prefetch: ids returned {', '.join(map(repr, returned))}, which {wrong}; the "
                f"modules are {', '.join(map(repr, self._names))}"
            )
        return [returned[name] for name in self._names]


def _together(modules: Sequence[Lookup], needs: list[TableIds]) -> list[TableIds]:
    """The same ids: those of all tables of one kind together, and no table twice."""
    if len(modules) == 1:
        return needs
    tables: dict[str, Table] = {t.name: t for module in modules for t in module.tables}
    names = [name for each in needs for name in each.tables]
    if len(set(names)) < len(names):
        return _united(next(iter(tables.values())).cluster, needs)
    kinds: dict[object, list[TableIds]] = {}
    for each in needs:
        kinds.setdefault(tables[each.tables[0]].kind, []).append(each)
    return [_joined(some) for some in kinds.values()]


def _joined(needs: list[TableIds]) -> TableIds:
    if len(needs) == 1:
        return needs[0]
    return TableIds(
        tuple([name for each in needs for name in each.tables]),
        tuple([size for each in needs for size in each.sizes]),
        torch.cat([each.ids for each in needs]),
    )


def _united(cluster: Cluster, needs: Sequence[TableIds]) -> list[TableIds]:
    """Ids of tables some of which several modules use."""
    parts: dict[str, list[Tensor]] = {}
    for each in needs:
        for name, ids in zip(each.tables, each.ids.split_with_sizes(each.sizes), strict=True):
            parts.setdefault(name, []).append(ids)
    return cluster.rows.grouped({
        name: some[0] if len(some) == 1 else distinct(torch.cat(some))[0]
        for name, some in parts.items()
    })  # fmt: skip
