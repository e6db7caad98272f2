"""Takes tables out of an optimizer of torch that was given their modules' parameters."""

from __future__ import annotations

import logging
from dataclasses import fields
from typing import Final

from torch.optim import Optimizer

from tensorwire.parameter_server.client.gradient import StandIn
from tensorwire.parameter_server.client.table import Table

_logger: Final = logging.getLogger("tensorwire")


def tables_of(optimizer: Optimizer) -> list[Table]:
    """The tables whose rows stand among the parameters of an optimizer.

    Raises:
        ValueError: a parameter group is for tables alone, and contradicts their rules.
    """
    every = []
    for number, group in enumerate(optimizer.param_groups):
        tables = [each.gradient.table for each in group["params"] if isinstance(each, StandIn)]
        for table in tables:
            if len(tables) == len(group["params"]):
                _require_agreement(number, group, table)
            elif _differences(group, table):
                _logger.warning("table %r: rows move by the table's rule, %r, not by the "
                                "hyper-parameters of parameter group %d", table.name, table.rule,
                                number)  # fmt: skip
        every += tables
    return every


def remove(optimizer: Optimizer) -> None:
    """Leaves the dense parameters; the groups stay the same objects."""
    for group in optimizer.param_groups:
        kept = [n for n, each in enumerate(group["params"]) if not isinstance(each, StandIn)]
        for key in group.keys() & {"params", "param_names"}:
            group[key] = [group[key][place] for place in kept]


def _require_agreement(number: int, group: dict[str, object], table: Table) -> None:
    different = _differences(group, table)
    if different:
        raise ValueError(
            f"wrap: parameter group {number} is for table {table.name!r}, whose rows move by its "
            f"own rule, {table.rule!r}, but the group has {', '.join(different)}; say it in the "
            "rule, and leave it out of the group"
        )


def _differences(group: dict[str, object], table: Table) -> list[str]:
    """The hyper-parameters of a group that a table's rule has, too, and others."""
    return [
        f"{each.name}={group[each.name]!r}"
        for each in fields(table.rule)  # type: ignore[arg-type]
        if each.name in group and group[each.name] != getattr(table.rule, each.name)
    ]
