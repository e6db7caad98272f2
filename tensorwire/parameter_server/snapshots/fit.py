"""Compares what was saved with what is declared: the same, to be converted, or something else.

Equal parts are loaded bit for bit. A conversion changes values, drops some or makes some up;
it is made only if the user wants that (``strict=False``), and is said in the log.
"""

from __future__ import annotations

import copy
import enum
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import torch

from tensorwire.parameter_server.declarations.dense_spec import DenseSpec, Piece, state_keys
from tensorwire.parameter_server.declarations.rules import FTRL, Per
from tensorwire.parameter_server.declarations.spec import Precision, TableSpec
from tensorwire.parameter_server.errors import RestoreError
from tensorwire.parameter_server.snapshots.kept import Keeping
from tensorwire.parameter_server.snapshots.saved import (
    Saved,
    SavedDense,
    SavedTable,
    class_name,
    plain,
    saved_table,
)

_logger: Final = logging.getLogger("tensorwire")
_SUMS_OF_SQUARES: Final = {"Adagrad", "FTRL", "RowwiseAdagrad"}
"""Rules whose state ``sum`` is of squared gradients."""


class Carry(enum.Enum):
    """The ways in which a rule takes state over that another rule kept."""

    SAME = "as it is"
    MEAN = "the mean of a row's columns"
    SPREAD = "for each column of the row"


@dataclass(frozen=True, slots=True)
class Fit:
    """The differences between a saved table or dense group and its declaration.

    Args:
        conversions: what is changed on the way.
        misfits: what makes it something else.
    """

    conversions: tuple[str, ...] = ()
    misfits: tuple[str, ...] = ()

    @property
    def is_exact(self) -> bool:
        """True if every bit stays."""
        return not self.conversions and not self.misfits


def require_fit(name: str, keeping: Keeping, spec: TableSpec | DenseSpec) -> None:
    """Checks a declaration against what a snapshot has under its name; logs conversions.

    Raises:
        RestoreError: it is something else, or would have to be converted.
    """
    fit = fit_of(keeping.saved, spec)
    kind = "dense parameters" if isinstance(keeping.saved, SavedDense) else "table"
    which = f"{kind} {name!r} of the snapshot {keeping.folder!r}"
    if fit.misfits:
        raise RestoreError(f"{which} cannot be restored as declared: {'; '.join(fit.misfits)}")
    if fit.conversions and keeping.strict:
        raise RestoreError(
            f"{which} is not as declared: {'; '.join(fit.conversions)}. Declare it as it was "
            "saved, or convert it with ps.connect(..., restore=..., strict=False)"
        )
    for each in fit.conversions:
        _logger.warning("%s is converted: %s", which, each)


def fit_of(saved: Saved, spec: TableSpec | DenseSpec) -> Fit:
    """Compares a saved table or dense group with a declaration."""
    if isinstance(saved, SavedTable):
        if isinstance(spec, TableSpec):
            return _fit_of_table(saved, spec)
        return Fit(misfits=("a table was saved, dense parameters are declared",))
    if isinstance(spec, DenseSpec):
        return _fit_of_dense(saved, spec)
    return Fit(misfits=("dense parameters were saved, a table is declared",))


# --- tables


def _fit_of_table(saved: SavedTable, spec: TableSpec) -> Fit:
    mine = saved_table(spec, spec.rule)
    misfits, conversions = [], []
    if saved.dim != mine.dim:
        misfits.append(f"dim={saved.dim} was saved, dim={mine.dim} is declared")
    if saved.rule != mine.rule and isinstance(spec.rule, FTRL):
        misfits.append(
            f"optimizer={saved.rule} was saved, FTRL is declared, whose rows are functions of its "
            "own state"
        )
    elif (saved.rule, dict(saved.state)) != (mine.rule, dict(mine.state)):
        conversions.append(_rule_changes(saved, mine))
    if saved.precision is not mine.precision:
        conversions.append(_precision_changes(saved.precision, mine.precision))
    if saved.init != mine.init:
        conversions.append(
            f"init={saved.init} was saved, init={mine.init} is declared, as which rows begin that "
            "are not in the snapshot"
        )
    if saved.admit is not None and mine.admit is None:
        conversions.append(
            f"admit=MinCount({saved.admit}) was saved, None is declared: the pushes of ids without "
            "a row are forgotten"
        )
    if (saved.evict is None) != (mine.evict is None):
        then = "ages are forgotten" if mine.evict is None else "all rows count as used just now"
        conversions.append(f"evict={saved.evict} was saved, {mine.evict} is declared: {then}")
    return Fit(tuple(conversions), tuple(misfits))


def _rule_changes(saved: SavedTable, mine: SavedTable) -> str:
    carries = carries_of(saved, mine)
    parts = [f"{name} is taken over, {how.value}" for name, how in carries.items()]
    parts += [f"{name} begins anew" for name in mine.state if name not in carries]
    parts += [f"{name} is dropped" for name in saved.state if name not in carries]
    before = f"optimizer={saved.rule} with state {_state(saved)} was saved"
    return (
        f"{before}, {mine.rule} with {_state(mine)} is declared: {', '.join(parts) or 'as it is'}"
    )


def _state(saved: SavedTable) -> str:
    return f"({', '.join(saved.state)})" if saved.state else "none"


def _precision_changes(saved: Precision, mine: Precision) -> str:
    then = "rows are rounded"
    if mine is Precision.FLOAT32:
        then = "rows stay as they are"
    elif mine is Precision.FLOAT16:
        then = "rows are rounded, and what is beyond 65504 becomes that"
    return f"precision={saved.name} was saved, {mine.name} is declared: {then}"


def carries_of(saved: SavedTable, mine: SavedTable) -> dict[str, Carry]:
    """The way in which each state of the rule is taken over; what is missing begins anew."""
    both_sum = {saved.rule, mine.rule} <= _SUMS_OF_SQUARES
    carries: dict[str, Carry] = {}
    for name, per in mine.state.items():
        before = saved.state.get(name)
        if before is None or not (saved.rule == mine.rule or (both_sum and name == "sum")):
            continue
        if before is per:
            carries[name] = Carry.SAME
        else:
            carries[name] = Carry.MEAN if per is Per.ROW else Carry.SPREAD
    return carries


def keeps_steps(saved: SavedTable, mine: SavedTable) -> bool:
    """True if the updates that were made before count for the declared rule, too."""
    return saved.rule == mine.rule or bool(carries_of(saved, mine))


# --- dense parameters


def _fit_of_dense(saved: SavedDense, spec: DenseSpec) -> Fit:
    misfits, conversions = [], []
    if saved.shapes != spec.shapes:
        misfits.append(
            f"shapes {_some(saved.shapes)} were saved, {_some(spec.shapes)} are declared"
        )
    elif _places(saved.pieces) != _places(spec.pieces):
        misfits.append(
            f"optimizer={saved.optimizer} cuts parameters otherwise than {spec.optimizer.__name__}"
        )
    if saved.names and spec.names and saved.names != spec.names:
        misfits.append(
            f"parameters {_some(saved.names)} were saved, {_some(spec.names)} are declared"
        )
    if misfits:
        return Fit(misfits=tuple(misfits))
    if saved.dtypes != spec.dtypes:
        conversions.append(
            f"dtypes {_some(saved.dtypes)} were saved, {_some(spec.dtypes)} are declared: values "
            "are converted, the optimizer's state begins anew"
        )
    if not keeps_state(saved, spec):
        conversions.append(
            f"optimizer={_optimizer(saved.optimizer, saved.groups)} was saved, "
            f"{_optimizer(class_name(spec.optimizer), spec.groups)} is declared: its state begins "
            "anew"
        )
    return Fit(tuple(conversions))


def keeps_state(saved: SavedDense, spec: DenseSpec) -> bool:
    """True if the declared optimizer goes on with the state that was saved."""
    owners = [[piece.group for piece in pieces] for pieces in (saved.pieces, spec.pieces)]
    if saved.optimizer != class_name(spec.optimizer) or owners[0] != owners[1]:
        return False
    if saved.dtypes != spec.dtypes:
        return False
    before = tuple(
        {**mine, **{k: _as(v, mine.get(k)) for k, v in group.items() if k in mine}}
        for mine, group in zip(copy.deepcopy(spec.groups), saved.groups, strict=True)
    )
    if _plain(before) == _plain(spec.groups):
        return True
    try:
        return state_keys(replace_groups(spec, before)) == state_keys(spec)
    except ValueError:
        return False


def replace_groups(spec: DenseSpec, groups: tuple[Mapping[str, object], ...]) -> DenseSpec:
    """The same group with other hyper-parameters."""
    return replace(spec, groups=groups)


def _plain(groups: tuple[Mapping[str, object], ...]) -> list[dict[str, object]]:
    return [{key: plain(value) for key, value in group.items()} for group in groups]


def _as(value: object, like: object) -> object:
    """A hyper-parameter of a snapshot as the declared one is: JSON has lists for tuples."""
    if isinstance(like, tuple) and isinstance(value, list):
        return tuple(value)
    if isinstance(like, torch.Tensor):
        return torch.tensor(value, dtype=like.dtype)
    return value


def _places(pieces: tuple[Piece, ...]) -> list[tuple[int, int, int, int]]:
    return [(p.parameter, p.start, p.stop, p.slot) for p in pieces]


def _optimizer(name: str, groups: tuple[Mapping[str, object], ...]) -> str:
    shown = ", ".join(f"{k}={v}" for k, v in (groups[0] if groups else {}).items() if k != "lr")
    return f"{name.rpartition('.')[2]}({shown})"


def _some(values: tuple[object, ...]) -> str:
    text = ", ".join(str(each) for each in values[:6])
    return f"({text}, ... {len(values)} in all)" if len(values) > 6 else f"({text})"
