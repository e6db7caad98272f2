"""Fetches the rows of the next batch while this one trains."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from tensorwire.parameter_server.client.distinct import distinct
from tensorwire.parameter_server.client.embedding import Embedding, EmbeddingBag
from tensorwire.parameter_server.client.exchange import Exchanging, Wanted
from tensorwire.parameter_server.client.table import Table
from tensorwire.parameter_server.declarations.arguments import instance

Batch = TypeVar("Batch")
Ids = Callable[[Any], "Tensor | Sequence[Tensor]"]


def prefetch(
    loader: Iterable[Batch], *modules: Embedding | EmbeddingBag, ids: Ids
) -> Iterator[Batch]:
    """Yields the batches of a loader, two behind what it reads, and fetches rows beforehand.

    With ``ps.BSP()`` the rows of the next batch come with the answer to this step's push: one
    message a server and step, and the same results as without. With ``ps.SSP`` and
    ``ps.Async`` they are asked for before this batch trains, so that nobody waits for them:
    they lack this step.

    Args:
        loader: what is iterated over.
        modules: those whose rows are fetched; all tables in one message.
        ids: of a batch, the very tensor that the module will get; for several modules, as many.

    Yields:
        The batches.

    Raises:
        TypeError: the loader cannot be iterated over, a module is none of these, or ``ids`` is no
            function.
        ValueError: no module is given, or ``ids`` returns another number of tensors.

    Example::

        for batch in ps.prefetch(loader, model.users, model.items, ids=lambda b: (b.user, b.item)):
            ...
    """
    if not modules:
        raise ValueError("prefetch: give the modules whose rows it is to fetch")
    for module in modules:
        instance("prefetch", "module", module, (Embedding, EmbeddingBag), "a ps.Embedding or "
                 "ps.EmbeddingBag")  # fmt: skip
    if not callable(ids):
        raise TypeError(f"prefetch: ids={ids!r} is a {type(ids).__name__}, not a function")
    instance("prefetch", "loader", loader, Iterable, "an iterable of batches")
    batches = iter(loader)
    ahead = _Ahead(modules, ids)
    known = deque(itertools.islice(batches, 1))
    if known:
        _fetch(ahead.wanted(known[0]), 0)
    while known:
        known.extend(itertools.islice(batches, 3 - len(known)))
        if len(known) > 1:
            _announce(ahead.wanted(known[1]))
        if len(known) > 2:
            ahead.look_later(known[2])
        yield known.popleft()


class _Ahead:
    """Finds the different ids of a batch, while a step waits for servers if it does."""

    def __init__(self, modules: Sequence[Embedding | EmbeddingBag], ids: Ids) -> None:
        self._modules = modules
        self._ids = ids
        self._found: tuple[Any, dict[Table, Tensor]] | None = None

    def look_later(self, batch: Any) -> None:
        """Has the next step look at a batch."""
        table: Any = self._modules[0].table
        table.cluster.meanwhile = partial(self._look, batch)

    def _look(self, batch: Any) -> None:
        with suppress(Exception):  # it is raised where the batch is to be fetched
            self._found = batch, _wanted(self._modules, self._ids, batch)

    def wanted(self, batch: Any) -> dict[Table, Tensor]:
        """The different ids of a batch by table."""
        found, self._found = self._found, None
        if found is not None and found[0] is batch:
            return found[1]
        return _wanted(self._modules, self._ids, batch)


def _wanted(
    modules: Sequence[Embedding | EmbeddingBag], ids: Ids, batch: Any
) -> dict[Table, Tensor]:
    """The different ids of a batch by table."""
    found = ids(batch)
    given = [found] if isinstance(found, Tensor) else list(found)
    if len(given) != len(modules):
        raise ValueError(f"prefetch: ids returned {len(given)} tensors for {len(modules)} modules")
    parts: dict[Table, list[Tensor]] = {}
    for module, each in zip(modules, given, strict=True):
        table: Any = module.table
        parts.setdefault(table, []).append(module.needed(each))
    return {
        table: some[0] if len(some) == 1 else distinct(torch.cat(some))[0]
        for table, some in parts.items()
    }


def _announce(wanted: dict[Table, Tensor]) -> None:
    """Has the rows of the next batch come with this step, or sets out for them now."""
    cluster = next(iter(wanted)).cluster
    if cluster.is_stale:
        _fetch(wanted, 1)
    else:
        for table, ids in wanted.items():
            table.next_ids = ids


def _fetch(wanted: dict[Table, Tensor], later: int) -> None:
    """Asks for rows now, of all tables in one message, for a step to come."""
    wishes = {table: table.wish(ids, later) for table, ids in wanted.items()}
    cluster = next(iter(wanted)).cluster
    asking = cluster.exchange(None, Wanted({t.name: wish.missing for t, wish in wishes.items()}))
    for table, wish in wishes.items():
        wish.promise(partial(_of, asking, table.name))
        table.bring(wish)


def _of(asking: Exchanging, name: str) -> Tensor:
    rows: Tensor = asking.wait().tables[name]
    return rows
