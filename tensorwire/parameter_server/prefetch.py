"""Fetches the rows of the next batch while this one trains."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from tensorwire.parameter_server.client.exchange import Exchanging, Wanted
from tensorwire.parameter_server.client.table import Table
from tensorwire.parameter_server.distinct import distinct
from tensorwire.parameter_server.embedding import Embedding, EmbeddingBag

Batch = TypeVar("Batch")
Ids = Callable[[Any], "Tensor | Sequence[Tensor]"]


def prefetch(
    loader: Iterable[Batch], *modules: Embedding | EmbeddingBag, ids: Ids
) -> Iterator[Batch]:
    """Yields the batches of a loader, one behind what it reads, and fetches rows beforehand.

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
        ValueError: no module is given, or ``ids`` returns another number of tensors.

    Example::

        for batch in ps.prefetch(loader, model.users, model.items, ids=lambda b: (b.user, b.item)):
            ...
    """
    if not modules:
        raise ValueError("prefetch: give the modules whose rows it is to fetch")
    batches = iter(loader)
    missing: Any = object()
    batch: Any = next(batches, missing)
    if batch is not missing:
        _fetch(_wanted(modules, ids, batch), 0)
    while batch is not missing:
        following: Any = next(batches, missing)
        if following is not missing:
            _announce(_wanted(modules, ids, following))
        yield batch
        batch = following


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
