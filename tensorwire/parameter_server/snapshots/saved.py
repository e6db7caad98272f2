"""Descriptions of tables and dense groups, as a snapshot has them: plain JSON, no code.

A description says all that rows and pieces need in order to be read: names, shapes, dtypes, the
rule or optimizer with its hyper-parameters, and which state is kept. Reading one checks every
field.
"""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from typing import Final, TypeVar

import torch

from tensorwire.parameter_server.decisions.slots import SLOTS
from tensorwire.parameter_server.declarations import rules
from tensorwire.parameter_server.declarations.dense_spec import DenseSpec, Piece, Spread
from tensorwire.parameter_server.declarations.rules import Per, Rule
from tensorwire.parameter_server.declarations.spec import Precision, TableSpec
from tensorwire.parameter_server.errors import SnapshotError

_MOST: Final = 1 << 48
_T = TypeVar("_T")


@dataclass(frozen=True)
class SavedTable:
    """A table in a snapshot.

    Args:
        dim: columns of a row.
        precision: of the rows.
        rule: name of the rule's class; with its module, unless it is one of ours.
        hyper: the rule's hyper-parameters at that moment.
        state: the state kept for each row, by name.
        init: how rows began, as text.
        admit: pushes after which an id gets a row; None for the first.
        evict: steps after which a row that is not used goes; None for never.
    """

    dim: int
    precision: Precision
    rule: str
    hyper: Mapping[str, object]
    state: Mapping[str, Per]
    init: str
    admit: int | None
    evict: int | None

    def encode(self) -> dict[str, object]:
        """Encodes it as a value of JSON."""
        state = {name: per.name for name, per in self.state.items()}
        return {**asdict(self), "precision": self.precision.name, "state": state}

    @classmethod
    def decode(cls, value: object) -> SavedTable:
        """The inverse of :meth:`encode`.

        Raises:
            SnapshotError: it is no description of a table.
        """
        entry = typed(value, dict, "a table")
        state = typed(entry.get("state"), dict, "state")
        return cls(
            count(entry.get("dim"), "dim", least=1),
            _member(Precision, entry.get("precision"), "precision"),
            typed(entry.get("rule"), str, "rule"),
            typed(entry.get("hyper"), dict, "hyper"),
            {name: _member(Per, each, f"state {name!r}") for name, each in state.items()},
            typed(entry.get("init"), str, "init"),
            _optional(entry.get("admit"), "admit"),
            _optional(entry.get("evict"), "evict"),
        )


@dataclass(frozen=True)
class SavedDense:
    """A group of dense parameters in a snapshot.

    Args:
        optimizer: name of its class, with its module.
        shapes: of the parameters.
        dtypes: theirs.
        names: theirs in the model, if they were known.
        groups: the hyper-parameters of each group; what is no plain data is left out.
        owners: by parameter, its group.
        spread: how parameters are cut.
        pieces: all of them.
    """

    optimizer: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    names: tuple[str, ...]
    groups: tuple[Mapping[str, object], ...]
    spread: Spread
    pieces: tuple[Piece, ...]

    def encode(self) -> dict[str, object]:
        """Encodes it as a value of JSON."""
        return {
            "optimizer": self.optimizer,
            "shapes": [list(shape) for shape in self.shapes],
            "dtypes": [str(dtype).removeprefix("torch.") for dtype in self.dtypes],
            "names": list(self.names),
            "groups": [dict(group) for group in self.groups],
            "spread": self.spread.name,
            "pieces": [[p.parameter, p.group, p.start, p.stop, p.slot] for p in self.pieces],
        }

    @classmethod
    def decode(cls, value: object) -> SavedDense:
        """The inverse of :meth:`encode`.

        Raises:
            SnapshotError: it is no description of a dense group.
        """
        entry = typed(value, dict, "a dense group")
        shapes = tuple(_shape(each) for each in typed(entry.get("shapes"), list, "shapes"))
        dtypes = tuple(_dtype(each) for each in typed(entry.get("dtypes"), list, "dtypes"))
        names = tuple(typed(n, str, "a name") for n in typed(entry.get("names"), list, "names"))
        groups = tuple(
            typed(each, dict, "a group") for each in typed(entry.get("groups"), list, "groups")
        )
        pieces = tuple(
            _piece(each, shapes, len(groups)) for each in typed(entry.get("pieces"), list, "pieces")
        )
        require(len(dtypes) == len(shapes), "there are as many dtypes as shapes")
        require(len(names) in (0, len(shapes)), "there are as many names as shapes")
        _require_all_elements(shapes, pieces)
        return cls(
            typed(entry.get("optimizer"), str, "optimizer"), shapes, dtypes, names, groups,
            _member(Spread, entry.get("spread"), "spread"), pieces,
        )  # fmt: skip


Saved = SavedTable | SavedDense


# --- from what is declared


def saved_table(spec: TableSpec, rule: Rule) -> SavedTable:
    """The description of a table that moves by ``rule``."""
    return SavedTable(
        spec.dim,
        spec.precision,
        class_name(type(rule), rules.__name__),
        {each.name: plain(getattr(rule, each.name)) for each in fields(rule)},  # type: ignore[arg-type]
        dict(spec.rule.state),
        shown(spec.init),
        spec.admit.pushes if spec.admit else None,
        spec.evict.steps if spec.evict else None,
    )


def without_state(saved: SavedTable) -> SavedTable:
    """The description of a table of which only rows are kept."""
    return replace(saved, state={}, admit=None, evict=None)


def saved_dense(spec: DenseSpec, groups: tuple[Mapping[str, object], ...]) -> SavedDense:
    """The description of a dense group whose hyper-parameters are these now."""
    kept = tuple(
        {key: plain(value) for key, value in group.items() if _is_plain(value)} for group in groups
    )
    return SavedDense(
        class_name(spec.optimizer), spec.shapes, spec.dtypes, spec.names, kept,
        spec.spread, spec.pieces,
    )  # fmt: skip


def class_name(cls: type[object], ours: str = "") -> str:
    """The name of a class, with its module unless that is ``ours``."""
    return cls.__qualname__ if cls.__module__ == ours else f"{cls.__module__}.{cls.__qualname__}"


def shown(value: object) -> str:
    """An object of a declaration as text that is the same in each process."""
    return repr(value) if is_dataclass(value) else class_name(type(value))


def plain(value: object) -> object:
    """A hyper-parameter as a value of JSON; a number that JSON lacks becomes a text."""
    if isinstance(value, torch.Tensor):
        value = value.item()
    if isinstance(value, tuple | list):
        return [plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)


def _is_plain(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def text_of(saved: Saved) -> str:
    """A description as text, the same for equal ones."""
    return json.dumps(saved.encode(), sort_keys=True)


# --- checks


def typed(value: object, kind: type[_T], name: str) -> _T:
    """The value, if it is of that kind.

    Raises:
        SnapshotError: it is not.
    """
    require(type(value) is kind, f"{name} is a {kind.__name__}")
    return value  # type: ignore[return-value]  # checked in the line above


def count(value: object, name: str, least: int = 0) -> int:
    """The value, if it is a whole number in range.

    Raises:
        SnapshotError: it is not.
    """
    number = typed(value, int, name)
    require(least <= number < _MOST, f"{name} is at least {least}")
    return number


def require(held: bool, what: str) -> None:
    """Refuses a snapshot of which something does not hold.

    Raises:
        SnapshotError: it does not.
    """
    if not held:
        raise SnapshotError(f"the snapshot is damaged: it is not so that {what}")


_Member = TypeVar("_Member", bound=enum.Enum)


def _optional(value: object, name: str) -> int | None:
    return None if value is None else count(value, name, least=1)


def _member(kind: type[_Member], value: object, name: str) -> _Member:
    names = kind.__members__
    require(isinstance(value, str) and value in names, f"{name} is one of {', '.join(names)}")
    return kind[str(value)]


def _shape(value: object) -> tuple[int, ...]:
    sizes = tuple(count(each, "a size") for each in typed(value, list, "a shape"))
    require(math.prod(sizes) < _MOST, "a parameter has a size that memory could hold")
    return sizes


def _dtype(value: object) -> torch.dtype:
    dtype = getattr(torch, typed(value, str, "a dtype"), None)
    require(isinstance(dtype, torch.dtype), "dtypes are those of torch")
    assert isinstance(dtype, torch.dtype)
    return dtype


def _piece(value: object, shapes: tuple[tuple[int, ...], ...], groups: int) -> Piece:
    numbers = [count(each, "a number of a piece") for each in typed(value, list, "a piece")]
    require(len(numbers) == 5, "a piece has five numbers")
    piece = Piece(*numbers)
    require(piece.parameter < len(shapes) and piece.group < groups, "pieces are of parameters")
    require(piece.start <= piece.stop <= math.prod(shapes[piece.parameter]), "pieces lie in them")
    require(piece.slot < SLOTS, "pieces lie in slots")
    return piece


def _require_all_elements(shapes: tuple[tuple[int, ...], ...], pieces: tuple[Piece, ...]) -> None:
    """Each element of each parameter is in one piece, in order."""
    ends = [0] * len(shapes)
    for piece in pieces:
        require(piece.start == ends[piece.parameter], "pieces follow each other")
        ends[piece.parameter] = piece.stop
    whole = all(end == math.prod(shape) for end, shape in zip(ends, shapes, strict=True))
    require(whole, "all elements are in pieces")
