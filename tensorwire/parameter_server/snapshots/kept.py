"""Stand-ins for tables and dense groups of a restored snapshot until they are declared.

They belong to the cluster from its start: their rows are in snapshots, move with a resize, and are
copied to backups. They cannot be pulled or pushed, as nobody knows the rule's or optimizer's code.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor
from torch.optim import Optimizer

from tensorwire.parameter_server.decisions.views import KEPT
from tensorwire.parameter_server.declarations import spec as specs
from tensorwire.parameter_server.declarations.dense_spec import DenseSpec
from tensorwire.parameter_server.declarations.initialisers import Constant
from tensorwire.parameter_server.declarations.lifetimes import MinCount, UnusedFor
from tensorwire.parameter_server.declarations.rules import Per, Rule
from tensorwire.parameter_server.declarations.spec import TableSpec
from tensorwire.parameter_server.snapshots.saved import Saved, SavedDense, SavedTable


@dataclass(frozen=True)
class Keeping:
    """A table or dense group that is kept until it is declared.

    Args:
        saved: what the snapshot says of it.
        folder: of the snapshot.
        strict: whether it must be declared as it was saved.
    """

    saved: Saved
    folder: str
    strict: bool

    def encode(self) -> str:
        """Encodes it as text, for the cluster's view."""
        kind = "table" if isinstance(self.saved, SavedTable) else "dense"
        return KEPT + json.dumps([kind, self.saved.encode(), self.folder, self.strict])

    @classmethod
    def decode(cls, text: str) -> Keeping | None:
        """The inverse of :meth:`encode`; None if the text is a declaration."""
        if not text.startswith(KEPT):
            return None
        kind, value, folder, strict = json.loads(text.removeprefix(KEPT))
        saved = SavedTable.decode(value) if kind == "table" else SavedDense.decode(value)
        return cls(saved, folder, strict)


@dataclass(frozen=True)
class KeptRule(Rule):
    """The rule of a table that nobody has declared: it has state, and moves nothing.

    Args:
        saved: what the snapshot says of the table.
    """

    saved: SavedTable

    @property
    def state(self) -> Mapping[str, Per]:  # type: ignore[override]
        """The state that was saved."""
        return self.saved.state

    def hyper(self) -> tuple[float, ...]:
        """Returns nothing, as nobody pushes."""
        return ()

    def with_hyper(self, values: tuple[float, ...]) -> Rule:
        """Returns the same rule."""
        return self

    def update(self, weight: Tensor, grad: Tensor, state: Mapping[str, Tensor], step: int) -> None:
        """Raises: nobody pushes."""
        raise AssertionError("a push to a table that nobody has declared")


class KeptOptimizer(Optimizer):
    """The optimizer of a dense group that nobody has declared: it has state, and moves nothing."""

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Raises: nobody pushes."""
        raise AssertionError("a push to dense parameters that nobody has declared")


@dataclass(frozen=True)
class KeptDense(DenseSpec):
    """A dense group that nobody has declared."""

    saved: SavedDense = field(kw_only=True)


def spec_of(name: str, text: str) -> TableSpec | DenseSpec:
    """The table or dense group that a text of the cluster's view stands for."""
    keeping = Keeping.decode(text)
    if keeping is None:
        spec: TableSpec | DenseSpec = specs.decode(text)
        return spec
    saved = keeping.saved
    return _table(name, saved) if isinstance(saved, SavedTable) else _dense(name, saved)


def _table(name: str, saved: SavedTable) -> TableSpec:
    return TableSpec(
        name,
        saved.dim,
        KeptRule(saved),
        Constant(),
        MinCount(saved.admit) if saved.admit else None,
        UnusedFor(saved.evict) if saved.evict else None,
        saved.precision,
    )


def _dense(name: str, saved: SavedDense) -> DenseSpec:
    groups: tuple[Mapping[str, object], ...] = tuple({} for _ in saved.groups)
    return KeptDense(
        name, KeptOptimizer, saved.shapes, saved.dtypes, saved.pieces, saved.spread, {}, groups, {},
        saved.names, saved=saved,
    )  # fmt: skip
