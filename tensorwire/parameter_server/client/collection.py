"""Modules that look many features up in many tables in one pass.

All features cost one de-duplication, one message to each server, one gather and one sum. Results
and gradients have the bits of one :class:`Embedding` or :class:`EmbeddingBag` a feature.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from operator import is_
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from tensorwire.parameter_server.client.distinct import distinct, distinct_many
from tensorwire.parameter_server.client.embedding import (
    MODES,
    Lookup,
    LookupTable,
    in_order,
    version_of,
)
from tensorwire.parameter_server.client.features import FeatureIds, feature_ids, given
from tensorwire.parameter_server.client.gradient import watch
from tensorwire.parameter_server.client.lookup import spread
from tensorwire.parameter_server.client.pooling import Pooling, pooled
from tensorwire.parameter_server.kernels import kernels
from tensorwire.parameter_server.messaging.messages import TableIds
from tensorwire.parameter_server.rows.device_memory import to_device


class _Fetcher(Protocol):
    def fetch_all(self, ids: Sequence[TableIds]) -> list[Tensor]: ...


class _Source(Protocol):
    @property
    def rows(self) -> _Fetcher: ...


class CollectionTable(LookupTable, Protocol):
    """The part of a table that collections need: a cluster's, or one that is followed."""

    order: str

    @property
    def cluster(self) -> _Source:
        """The source of its rows."""

    @property
    def kind(self) -> Hashable:
        """Tables of one kind are looked up together."""


@dataclass(frozen=True, slots=True)
class Feature:
    """One feature of a collection.

    Args:
        table: where its rows are; several features may share one.
        mode: ``"sum"``, ``"mean"`` or ``"max"``; None for that of the collection.
        weighted: whether each id has a factor; only with ``mode="sum"``. Default False.
    """

    table: CollectionTable
    mode: str | None = None
    weighted: bool = False


class KeyedTensor:
    """The vectors of several features of one batch.

    Args:
        names: the features, in the order in which the collection was given them.
        tensors: of each feature.
        together: all of them side by side; None to put them so when they are asked for.
    """

    def __init__(
        self, names: Sequence[str], tensors: Sequence[Tensor], together: Tensor | None = None
    ) -> None:
        self._tensors = dict(zip(names, tensors, strict=True))
        self._together = together

    def keys(self) -> list[str]:
        """The names of the features."""
        return list(self._tensors)

    def values(self) -> Tensor:
        """All features side by side along the last dimension, in their order.

        Raises:
            ValueError: they have different numbers of rows; take them one by one.
        """
        if self._together is None:
            shapes = {tuple(each.shape[:-1]) for each in self._tensors.values()}
            if len(shapes) > 1 or any(each.is_nested for each in self._tensors.values()):
                raise ValueError("values(): features have different numbers of ids; use "
                                 "to_dict(), or [name]")  # fmt: skip
            self._together = torch.cat(list(self._tensors.values()), -1)
        return self._together

    def to_dict(self) -> dict[str, Tensor]:
        """The tensor of each feature."""
        return dict(self._tensors)

    def __getitem__(self, name: str) -> Tensor:
        """The tensor of one feature.

        Raises:
            KeyError: there is no such feature.
        """
        if name not in self._tensors:
            raise KeyError(f"no feature {name!r}; there are {', '.join(map(repr, self._tensors))}")
        return self._tensors[name]

    def __repr__(self) -> str:
        shapes = ", ".join(f"{n!r}: {tuple(each.shape)}" for n, each in self._tensors.items())
        return f"KeyedTensor({shapes})"


@dataclass(frozen=True, slots=True)
class _Group:
    """Features whose tables are of one kind.

    Args:
        features: their places in the collection, those of one table together.
        tables: each once, in the same order.
        counts: features of each table.
    """

    features: tuple[int, ...]
    tables: tuple[CollectionTable, ...]
    counts: tuple[int, ...]


@dataclass(slots=True)
class _Batch:
    """The needs of one batch, from when its ids are known until its forward pass.

    Args:
        given: the tensors that its ids came in.
        versions: of those; others if they were changed in place.
        features: the ids of each feature.
        ids: for each group the different ids.
        places: for each group the places of all ids among those.
        poolings: for each group how one kernel sums the bags of its features, or None.
        slow: features that torch sums, by their places in the collection.
    """

    given: list[object]
    versions: list[object]
    features: list[FeatureIds]
    ids: list[TableIds]
    places: list[Tensor]
    poolings: list[Pooling | None] = field(default_factory=list)
    slow: set[int] = field(default_factory=set)

    def is_of(self, tensors: list[object], versions: list[object]) -> bool:
        """True if it was made of just these tensors."""
        if self.versions != versions or len(self.given) != len(tensors):
            return False
        return all(map(is_, self.given, tensors))


class _Collection(Lookup):
    """The base of both collections."""

    def __init__(self, features: Mapping[str, CollectionTable | Feature], mode: str) -> None:
        super().__init__()
        where = type(self).__name__
        if not isinstance(features, Mapping) or not features:
            raise TypeError(f"{where}: features={features!r} must be a dict from features to "
                            "tables, with one at least")  # fmt: skip
        checked = {name: _feature(where, name, each, mode) for name, each in features.items()}
        self.features = checked
        self.mode = mode
        self._names = list(checked)
        self._weighted = [each.weighted for each in checked.values()]
        self._groups = _groups(list(checked.values()))
        self.tables = [table for group in self._groups for table in group.tables]
        clusters = {id(each.table.cluster) for each in checked.values()}
        if len(clusters) > 1:
            raise ValueError(f"{where}: tables are of several clusters; make a collection of each")
        for number, table in enumerate(self.tables):
            self.register_parameter(f"rows_{number}", table.gradient.parameter)
        self._batches: list[_Batch] = []

    def wanted(self, ids: object) -> list[TableIds]:
        """The different ids that a forward pass with just this batch will fetch.

        Args:
            ids: as they will be given to :meth:`forward`. That call does not do the work again.
        """
        self.require_no_transform()
        tensors, versions = self._given(ids)
        batch = next((each for each in self._batches if each.is_of(tensors, versions)), None)
        if batch is None:
            batch = self._needs(ids, tensors, versions)
            self._prepare(batch)
        self._batches = [*self._batches[1 - self.batches_known :], batch]
        return batch.ids

    def _prepare(self, batch: _Batch) -> None:
        """Does what a backward pass will need."""

    def _batch(self, ids: object) -> _Batch:
        """The needs of just these ids, found before or now; drops those of earlier batches."""
        self.require_no_transform()
        tensors, versions = self._given(ids)
        for place, batch in enumerate(self._batches):
            if batch.is_of(tensors, versions):
                self._batches = self._batches[place + 1 :]
                return batch
        return self._needs(ids, tensors, versions)

    def _given(self, ids: object) -> tuple[list[object], list[object]]:
        """The tensors of a batch, and their versions."""
        tensors = given(type(self).__name__, self._names, self._weighted, ids)
        return tensors, [_version(each) for each in tensors]

    def _needs(self, ids: object, tensors: list[object], versions: list[object]) -> _Batch:
        features = feature_ids(type(self).__name__, self._names, self._weighted, ids)
        batch = _Batch(tensors, versions, features, [], [])
        for group in self._groups:
            own = [features[place] for place in group.features]
            wanted, places = _distinct(group, own)
            batch.ids.append(wanted)
            batch.places.append(places)
        return batch

    def _rows(self, batch: _Batch) -> list[Tensor]:
        """The rows of each group, where the ids are, with a gradient of their own."""
        looked_up = []
        device = batch.features[0].ids.device
        own = self._parameters.values()  # of this copy of the module
        trained = {
            table.name: table.gradient
            for table, rows in zip(self.tables, own, strict=True)
            if rows is not None and rows.requires_grad
        }
        fetched = self.tables[0].cluster.rows.fetch_all(batch.ids)
        for group, ids, fresh in zip(self._groups, batch.ids, fetched, strict=True):
            rows = to_device(fresh, device)
            if torch.is_grad_enabled():
                gradients = [trained.get(table.name) for table in group.tables]
                if any(gradients):
                    rows.requires_grad_()
                    watch(gradients, ids, rows)
            looked_up.append(rows)
        return looked_up

    def extra_repr(self) -> str:
        """Returns the text for ``print(model)``."""
        return ", ".join(f"{n}: {each.table.name!r}" for n, each in self.features.items())


def _version(tensor: object) -> object:
    if isinstance(tensor, Tensor):
        version = version_of(tensor)
        return object() if version is None else version  # equal to nothing else
    if isinstance(tensor, tuple):
        return tuple([_version(each) for each in tensor])
    return tensor


def _feature(where: str, name: str, value: CollectionTable | Feature, mode: str) -> Feature:
    """A feature with a mode of its own."""
    feature = value if isinstance(value, Feature) else Feature(value)
    if not isinstance(name, str):
        raise TypeError(f"{where}: the name of a feature must be a text, not {name!r}")
    if not hasattr(feature.table, "gradient"):
        raise TypeError(
            f"{where}: feature {name!r} is a {type(feature.table).__name__}, neither what "
            "cluster.table() returns nor a ps.Feature"
        )
    chosen = feature.mode or mode
    if chosen not in MODES:
        raise ValueError(f"{where}: feature {name!r}: mode={chosen!r} must be one of "
                         f"{', '.join(MODES)}")  # fmt: skip
    if feature.weighted and chosen != "sum":
        raise ValueError(f"{where}: feature {name!r} is weighted, so its mode must be 'sum', not "
                         f"{chosen!r}")  # fmt: skip
    return Feature(feature.table, chosen, feature.weighted)


def _groups(features: Sequence[Feature]) -> list[_Group]:
    kinds: dict[object, dict[str, list[int]]] = {}
    for place, feature in enumerate(features):
        kind = kinds.setdefault(feature.table.kind, {})
        kind.setdefault(feature.table.name, []).append(place)
    groups = []
    for kind in kinds.values():
        places = sorted(kind.values(), key=lambda own: features[own[0]].table.order)
        tables = tuple([features[own[0]].table for own in places])
        counts = tuple([len(own) for own in places])
        groups.append(_Group(tuple([p for own in places for p in own]), tables, counts))
    return groups


def _distinct(group: _Group, features: Sequence[FeatureIds]) -> tuple[TableIds, Tensor]:
    """The different ids of each table, and the place of each id among them."""
    sizes = [feature.ids.numel() for feature in features]
    if len(sizes) > len(group.tables):
        begins = [0, *accumulate(group.counts)]
        sizes = [sum(sizes[a:b]) for a, b in pairwise(begins)]
    every = torch.cat([feature.ids for feature in features])
    unique, places, counts = distinct_many(every, sizes)
    return TableIds(tuple([table.name for table in group.tables]), counts, unique), places


class EmbeddingBagCollection(_Collection):
    """Looks many features up and reduces the rows of each bag to one.

    Args:
        features: by name, the table of each feature, or a :class:`Feature`. Several may share a
            table; tables may have different rules, widths, caches and wires.
        mode: ``"sum"``, ``"mean"`` or ``"max"``, of features that say nothing else. Default
            ``"sum"``.

    Raises:
        TypeError: ``features`` is no dict of tables.
        ValueError: there is no such mode, or tables are of several clusters.

    Example::

        bags = ps.EmbeddingBagCollection({"user": users, "item": items}, mode="sum")
        found = bags({"user": torch.tensor([[3], [9]]), "item": torch.tensor([[1, 2], [2, 7]])})
        found.values()                            # (2, users.dim + items.dim)
    """

    def __init__(
        self, features: Mapping[str, CollectionTable | Feature], mode: str = "sum"
    ) -> None:
        super().__init__(features, mode)
        self._modes = [each.mode for each in self.features.values()]
        dims = [each.table.dim for each in self.features.values()]
        self._dims = dims
        self._columns = [0, *accumulate(dims)]

    def forward(self, features: object) -> KeyedTensor:
        """Returns a vector for each bag of each feature.

        Args:
            features: by name, ids of shape ``(batch, n)`` or nested, each row a bag; of weighted
                features ``(ids, weights)``. Or anything with ``keys()``, ``values()``,
                ``lengths()`` and ``weights_or_none()``, as TorchRec's ``KeyedJaggedTensor``.

        Returns:
            Of each feature ``(batch, dim)``.

        Raises:
            KeyError: a feature is missing.
            TypeError: ids are no whole numbers.
            ValueError: shapes do not fit each other.
        """
        batch = self._batch(features)
        if not batch.poolings:
            self._pool(batch)
        rows = self._rows(batch)
        fast = [(p, own) for p, own in zip(batch.poolings, rows, strict=True) if p is not None]
        together = None
        if fast:
            together = pooled([p for p, _ in fast], [own for _, own in fast], self._columns[-1])
        slow = self._one_by_one(batch, rows) if batch.slow else {}
        if together is not None and not slow:
            return KeyedTensor(self._names, together.split_with_sizes(self._dims, 1), together)
        parts = [
            slow[place] if place in slow else _columns_of(together, begin, begin + dim)
            for place, (begin, dim) in enumerate(zip(self._columns, self._dims, strict=False))
        ]
        return KeyedTensor(self._names, parts)

    def _prepare(self, batch: _Batch) -> None:
        self._pool(batch)
        for pooling in batch.poolings:
            if pooling is not None:
                pooling.order()

    def _pool(self, batch: _Batch) -> None:
        """Says how each group's bags are summed by one kernel; not at all if none can be."""
        ids = enumerate(zip(batch.features, self._modes, strict=True))
        batch.slow = {place for place, (each, mode) in ids if not _is_fast(each, mode)}
        for group, places in zip(self._groups, batch.places, strict=True):
            mine = [p for p in group.features if p not in batch.slow]
            if not mine:
                batch.poolings.append(None)
                continue
            whole = len(mine) == len(group.features)
            if not whole:
                sizes = [batch.features[p].ids.numel() for p in group.features]
                parts = zip(group.features, places.split_with_sizes(sizes), strict=True)
                places = torch.cat([own for p, own in parts if p in mine])
            batch.poolings.append(
                Pooling(
                    [batch.features[p] for p in mine],
                    places,
                    [self._modes[p] == "mean" for p in mine],
                    [self._columns[p] for p in mine],
                    whole,
                )
            )

    def _one_by_one(self, batch: _Batch, rows: Sequence[Tensor]) -> dict[int, Tensor]:
        """The vectors of features that torch sums."""
        outputs = {}
        for group, places, own in zip(self._groups, batch.places, rows, strict=True):
            sizes = [batch.features[p].ids.numel() for p in group.features]
            for p, at in zip(group.features, places.split_with_sizes(sizes), strict=True):
                if p in batch.slow:
                    mode = self._modes[p] or self.mode
                    outputs[p] = _by_torch(batch.features[p], at, own, mode)
        return outputs


def _is_fast(ids: FeatureIds, mode: str | None) -> bool:
    """True if a kernel sums this feature; else torch does."""
    weights = ids.weights
    if weights is not None and (weights.dtype != torch.float32 or weights.requires_grad):
        return False
    return mode != "max" and ids.ids.is_cpu and kernels().NAME == "numba"


def _columns_of(together: Tensor | None, begin: int, end: int) -> Tensor:
    assert together is not None
    return together[:, begin:end]


def _by_torch(ids: FeatureIds, places: Tensor, rows: Tensor, mode: str) -> Tensor:
    """The vectors of one feature, by torch's own code on its own rows in the order of its ids."""
    unique, at = in_order(*distinct(ids.ids))
    where = torch.empty(len(unique), dtype=torch.int64)
    where[at] = places
    device = rows.device
    own = rows.index_select(0, to_device(where, device))
    if not len(own):
        own = torch.cat((own, own.new_zeros(1, rows.shape[1])))  # torch wants a row at least
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), ids.sizes().cumsum(0)))
    return functional.embedding_bag(
        to_device(at, device),
        own,
        to_device(offsets, device),
        mode=mode,
        per_sample_weights=ids.weights,
        include_last_offset=True,
    )


class EmbeddingCollection(_Collection):
    """Looks many features up, one row for each id.

    Args:
        features: by name, the table of each feature. Several may share a table; tables may have
            different rules, widths, caches and wires.

    Raises:
        TypeError: ``features`` is no dict of tables.
        ValueError: tables are of several clusters, or a feature is weighted.

    Example::

        words = ps.EmbeddingCollection({"query": words, "title": words})
        found = words({"query": torch.tensor([[3, 1]]), "title": torch.tensor([[4, 4, 9]])})
        found["title"]                            # (1, 3, dim)
    """

    def __init__(self, features: Mapping[str, CollectionTable | Feature]) -> None:
        super().__init__(features, "sum")
        for name, each in features.items():
            if isinstance(each, Feature) and (each.weighted or each.mode is not None):
                raise ValueError(f"EmbeddingCollection: feature {name!r} has a mode or weights; "
                                 "only an EmbeddingBagCollection pools")  # fmt: skip

    def forward(self, features: object) -> KeyedTensor:
        """Returns the rows of the ids of each feature.

        Args:
            features: by name, ids of shape ``(batch, n)`` or nested; or anything like TorchRec's
                ``KeyedJaggedTensor``.

        Returns:
            Of each feature ``(batch, n, dim)``, or nested where its rows have different lengths.

        Raises:
            KeyError: a feature is missing.
            TypeError: ids are no whole numbers.
            ValueError: shapes do not fit each other.
        """
        batch = self._batch(features)
        rows = self._rows(batch)
        outputs: dict[int, Tensor] = {}
        for group, places, own in zip(self._groups, batch.places, rows, strict=True):
            ids = [batch.features[p] for p in group.features]
            flat = _looked_up(group, ids, own, to_device(places, own.device))
            for p, each, looked_up in zip(group.features, ids, flat, strict=True):
                outputs[p] = _shaped(each, looked_up)
        return KeyedTensor(self._names, [outputs[p] for p in range(len(self._names))])


def _looked_up(
    group: _Group, ids: Sequence[FeatureIds], rows: Tensor, places: Tensor
) -> Iterator[Tensor]:
    """The rows of each feature's ids.

    The gradients of features that share a table are added up by torch, as those of modules are.
    """
    sizes = [len(each.ids) for each in ids]
    if len(group.tables) == len(group.features):
        yield from spread(rows, places).split_with_sizes(sizes)
        return
    for own in places.split_with_sizes(sizes):
        yield functional.embedding(own, rows)


def _shaped(ids: FeatureIds, rows: Tensor) -> Tensor:
    if ids.each is not None:
        return rows.view(ids.batch, ids.each, rows.shape[1])
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), ids.sizes().cumsum(0)))
    return torch.nested.nested_tensor_from_jagged(rows, to_device(offsets, rows.device))
