"""Modules that look rows up in tables: as ``torch.nn``'s, but the rows are on the servers.

A forward pass fetches each different id once. What follows is torch's own code on those rows, or
adds in torch's order, so results and gradients have the bits of ``torch.nn.Embedding`` and
``torch.nn.EmbeddingBag``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from tensorwire.parameter_server.client.distinct import distinct
from tensorwire.parameter_server.client.features import factors_of, packed
from tensorwire.parameter_server.client.gradient import RowGradient, watch
from tensorwire.parameter_server.client.lookup import spread
from tensorwire.parameter_server.messaging.messages import TableIds
from tensorwire.parameter_server.opaque import AnyTable, Untyped
from tensorwire.parameter_server.rows.device_memory import to_device

MODES: Final = ("sum", "mean", "max")
"""The ways in which the rows of a bag become one."""
KNOWN: Final = 3
"""Batches whose ids may be known before they are looked up: this one, and two more."""


class LookupTable(Protocol):
    """The part of a table that modules need."""

    name: str
    dim: int
    gradient: RowGradient

    def fetch(self, ids: Tensor) -> Tensor:
        """Returns the rows of different ids, in a tensor of their own."""


@dataclass(frozen=True, slots=True)
class _UniqueIds:
    """The unique ids of a batch, as ``torch.unique`` returns them, and the batch.

    Args:
        given: the ids as they were given.
        version: of that tensor; another one if it was changed in place, None if it does not say.
        unique: the different ids, without the one that pads.
        inverse: for each id its place in ``unique``, after ``padding`` has been put in.
        padding: where among ``unique`` the row of zeros belongs; None if there is none.
    """

    given: Tensor
    version: int | None
    unique: Tensor
    inverse: Tensor
    padding: int | None

    def is_of(self, ids: Tensor) -> bool:
        """True if it was made of just this tensor."""
        return self.given is ids and self.version is not None and self.version == version_of(ids)


class Lookup(nn.Module):
    """The base of all modules that look rows up in tables.

    Attributes:
        tables: where they look; each once.
        batches_known: batches whose ids may be known before they are looked up, this one included.
    """

    tables: list[AnyTable]
    batches_known: int = KNOWN

    def __init_subclass__(cls, **options: object) -> None:
        """Has ``torch.compile`` leave the lookup to Python, as it leaves other messages."""
        super().__init_subclass__(**options)
        if "forward" in vars(cls):  # as ``torch.compiler.disable``, which imports the compiler now
            cls.forward = torch._disable_dynamo(cls.forward)  # type: ignore[attr-defined]

    def require_no_transform(self) -> None:
        """Refuses to fetch where tensors have no memory of their own.

        Raises:
            RuntimeError: a transform of ``torch.func`` is under way.
        """
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise RuntimeError(
                f"{type(self).__name__}: rows of table {self.tables[0].name!r} cannot be looked up "
                "within torch.func.grad, vmap and their like; look them up outside, and transform "
                "a function of what comes"
            )

    def wanted(self, ids: Untyped) -> Sequence[TableIds]:
        """The different ids that a forward pass with just this batch will fetch.

        Args:
            ids: as they will be given to ``forward``. That call does not do the work again.
        """
        raise NotImplementedError

    def __getattr__(self, name: str) -> Tensor | nn.Module:
        """Raises an error that says where the weight is that modules of torch have."""
        if name == "weight":
            raise AttributeError(
                f"{type(self).__name__} has no weight: its rows are on the servers; read some with "
                "table.pull(ids), and let them begin with cluster.table(..., init=)"
            )
        return super().__getattr__(name)

    def __getstate__(self) -> dict[str, object]:
        """Makes copies and pickles share the tables; rows stay at the servers."""
        left: dict[str, list[object]] = {"_unique": [], "_batches": []}
        return {name: left.get(name, value) for name, value in vars(self).items()}

    def _save_to_state_dict(self, destination: object, prefix: str, keep_vars: bool) -> None:
        """Saves nothing: rows are saved by ``cluster.snapshot``."""

    def _load_from_state_dict(self, *args: object, **kwargs: object) -> None:
        """Loads nothing: rows are on the servers."""


class _Module(Lookup):
    """The base of modules with one table, and ids that may be known beforehand."""

    _is_ordered = False

    def __init__(self, table: LookupTable, padding_idx: int | None) -> None:
        super().__init__()
        if not hasattr(table, "gradient"):
            raise TypeError(
                f"{type(self).__name__}: table={table!r} is a {type(table).__name__}, not what "
                "cluster.table() returns"
            )
        if padding_idx is not None and (
            isinstance(padding_idx, bool) or not isinstance(padding_idx, int)
        ):
            raise TypeError(
                f"{type(self).__name__}: padding_idx={padding_idx!r} is not an id or None"
            )
        self.table = table
        self.tables = [table]
        self.padding_idx = padding_idx
        self.rows = table.gradient.parameter
        self._unique: list[_UniqueIds] = []

    @property
    def embedding_dim(self) -> int:
        """Columns of the table."""
        return self.table.dim

    def wanted(self, ids: Tensor) -> Sequence[TableIds]:
        """See :class:`Lookup`."""
        unique = self.needed(ids)
        return [TableIds((self.table.name,), (len(unique),), unique)]

    def needed(self, ids: Tensor) -> Tensor:
        """The different ids that a forward pass with just this tensor will fetch.

        Args:
            ids: as they will be given to :meth:`forward`. That call does not do the work again.
        """
        ids = self._checked(ids)
        latest = _unique_ids(ids, self.padding_idx, self._is_ordered)
        self._unique = [*self._unique[1 - self.batches_known :], latest]
        return latest.unique

    def _checked(self, ids: Tensor) -> Tensor:
        """The ids as one strided tensor.

        Raises:
            TypeError: they are no whole numbers.
            ValueError: they are nested in another layout than ``torch.jagged``.
        """
        if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32):
            kind = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
            raise TypeError(f"table {self.table.name!r}: ids must be an int64 tensor, not {kind}")
        return packed(f"table {self.table.name!r}", ids).values() if ids.is_nested else ids

    def _fetch(self, ids: Tensor) -> tuple[Tensor, Tensor, int | None]:
        """Rows, the place of each id among them, and the place of padding."""
        self.require_no_transform()
        wanted = self._take_unique(ids)
        rows = to_device(self.table.fetch(wanted.unique), ids.device)
        if torch.is_grad_enabled() and self.rows.requires_grad:
            rows.requires_grad_()
            unique = TableIds((self.table.name,), (len(rows),), wanted.unique)
            watch([self.table.gradient], unique, rows)
        rows = rows.to(self.rows.dtype)  # another one after ``model.half()``
        places = to_device(wanted.inverse, ids.device)
        where = wanted.padding if len(rows) else 0  # torch wants a row, even for no id at all
        if where is None:
            return rows, places, None
        zeros = rows.new_zeros(1, rows.shape[1])
        return torch.cat((rows[:where], zeros, rows[where:])), places, where

    def _take_unique(self, ids: Tensor) -> _UniqueIds:
        """The unique ids of just this tensor, found before or now."""
        for place, known in enumerate(self._unique):
            if known.is_of(ids):
                self._unique = self._unique[place + 1 :]
                return known
        return _unique_ids(ids, self.padding_idx, self._is_ordered)

    def extra_repr(self) -> str:
        """Returns the text for ``print(model)``."""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.table.name!r}, dim={self.table.dim}{padding}"


def in_order(unique: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the same places, with the different ids in ascending order."""
    unique, order = torch.sort(unique)
    moved = torch.empty_like(order)
    moved[order] = torch.arange(len(order))
    return unique, moved[places]


def version_of(tensor: Tensor) -> int | None:
    """Returns a number that each change in place changes; None for an inference tensor."""
    return None if tensor.is_inference() else tensor._version


def _unique_ids(ids: Tensor, padding_idx: int | None, ordered: bool) -> _UniqueIds:
    unique, inverse = in_order(*distinct(ids.long())) if ordered else distinct(ids.long())
    padding = [] if padding_idx is None else torch.nonzero(unique == padding_idx).flatten().tolist()
    if not padding:
        return _UniqueIds(ids, version_of(ids), unique, inverse, None)
    others = torch.cat((unique[: padding[0]], unique[padding[0] + 1 :]))
    return _UniqueIds(ids, version_of(ids), others, inverse, padding[0])


class Embedding(_Module):
    """Looks up one row for each id, as :class:`torch.nn.Embedding`.

    Args:
        table: where the rows are; from ``cluster.table``.
        padding_idx: an id that reads as zeros, gets no gradient and is never sent. Default None.

    Raises:
        TypeError: ``table`` is no table, or ``padding_idx`` no id.

    Example::

        words = ps.Embedding(cluster.table("words", dim=64, optimizer=ps.Adam(), init=ps.Normal()))
        vectors = words(torch.tensor([[3, 1 << 40], [3, -7]]))          # (2, 2, 64)
    """

    def __init__(self, table: LookupTable, padding_idx: int | None = None) -> None:
        super().__init__(table, padding_idx)

    def forward(self, ids: Tensor) -> Tensor:
        """Returns the rows of ``ids``.

        Args:
            ids: int64 of any shape, or a nested tensor in the layout ``torch.jagged``.

        Returns:
            ``(*ids.shape, dim)``.
        """
        rows, places, padding = self._fetch(self._checked(ids))
        if padding is None:
            output = spread(rows, places)
        else:
            output = functional.embedding(places, rows, padding_idx=padding)
        return _nested_like(output, ids) if ids.is_nested else output


def _nested_like(values: Tensor, ids: Tensor) -> Tensor:
    return torch.nested.nested_tensor_from_jagged(values, _offsets(ids))


def _offsets(ids: Tensor) -> Tensor:
    offsets: Tensor = packed("ids", ids).offsets()
    return offsets


class EmbeddingBag(_Module):
    """Looks up rows and reduces those of each bag to one, as :class:`torch.nn.EmbeddingBag`.

    Args:
        table: where the rows are; from ``cluster.table``.
        mode: ``"sum"``, ``"mean"`` or ``"max"``. Default ``"mean"``, as in torch.
        include_last_offset: if offsets name the end of the last bag too. Default False.
        padding_idx: an id that does not count, gets no gradient and is never sent. Default None.

    Raises:
        TypeError: ``table`` is no table, or ``padding_idx`` no id.
        ValueError: there is no such mode.

    Example::

        items = ps.EmbeddingBag(table, mode="sum")
        vectors = items(torch.tensor([3, 1, 3, 8]), torch.tensor([0, 3]))    # two bags: (2, dim)
    """

    _is_ordered = True  # torch's backward sorts, and adds up equal ids in an order that it leaves

    def __init__(
        self,
        table: LookupTable,
        mode: str = "mean",
        include_last_offset: bool = False,
        padding_idx: int | None = None,
    ) -> None:
        super().__init__(table, padding_idx)
        if mode not in MODES:
            raise ValueError(f"EmbeddingBag: mode={mode!r} must be one of {', '.join(MODES)}")
        self.mode = mode
        self.include_last_offset = include_last_offset

    def forward(
        self,
        ids: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """Returns one row for each bag.

        Args:
            ids: ``(bags, length)``; or ``(n,)`` with offsets; or a nested tensor in the layout
                ``torch.jagged``, each part of which is a bag.
            offsets: where each bag begins.
            per_sample_weights: a factor for each id; only with ``mode="sum"``.

        Returns:
            ``(bags, dim)``.

        Raises:
            ValueError: offsets are missing, or given where the shape says it all; or nested weights
                are divided into bags in another way than the ids.
        """
        flat = self._checked(ids)
        last = self.include_last_offset
        if ids.is_nested:
            offsets, last = _offsets(ids), True
            if per_sample_weights is not None:
                whose = f"table {self.table.name!r}"
                per_sample_weights = factors_of(whose, per_sample_weights, offsets)
        rows, places, padding = self._fetch(flat)
        return functional.embedding_bag(
            places,
            rows,
            offsets,
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=last,
            padding_idx=padding,
        )

    def extra_repr(self) -> str:
        """Returns the text for ``print(model)``."""
        return f"{super().extra_repr()}, mode={self.mode!r}"


def tables_of(model: nn.Module) -> list[LookupTable]:
    """The tables that the modules of a model look rows up in, each once."""
    modules = [each for each in model.modules() if isinstance(each, Lookup)]
    every: Sequence[LookupTable] = [table for each in modules for table in each.tables]
    return list({id(table): table for table in every}.values())
