"""Tables as parameter groups: their rules' fields are hyper-parameters, as schedulers know them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from operator import itemgetter
from typing import Final

from tensorwire.parameter_server.client.table import Table
from tensorwire.parameter_server.declarations.rules import Rule

_logger: Final = logging.getLogger("tensorwire")


def defaults(tables: Sequence[Table]) -> dict[str, object]:
    """The hyper-parameters that some of these tables have, as an optimizer's defaults."""
    hyper: dict[str, object] = {}
    for table in reversed(tables):
        hyper.update(_hyper(table.rule))
    return hyper


def group_of(table: Table, others: Mapping[str, object]) -> dict[str, object]:
    """A table as a parameter group.

    Args:
        table: the table.
        others: hyper-parameters of the other groups. Schedulers such as ``OneCycleLR`` expect them
            in each group; those that are none of the rule's have no effect on rows.
    """
    mine = {"params": [table.gradient.parameter], "table": table.name, **_hyper(table.rule)}
    return {**others, **mine}


class GroupRule:
    """Keeps the rule of a table as its parameter group says.

    Args:
        table: the table.
        group: its group, which schedulers change.
    """

    def __init__(self, table: Table, group: Mapping[str, object]) -> None:
        self.table = table
        self._group = group
        self._values = itemgetter("table", *_hyper(table.rule))
        self._seen: object = None
        self._hyper: tuple[float, ...] | None = None
        self._rests_at_zero = table.rule.rests_at_zero

    def follow(self) -> bool:
        """Gives the table a rule with the hyper-parameters that the group has now.

        Returns:
            False if rows do not move at all with these.
        """
        table, group = self.table, self._group
        if self._rests_at_zero and group.get("lr") == 0.0:
            return False
        values = self._values(group)
        if values == self._seen and table.hyper is self._hyper:
            return True
        changed = {k: group[k] for k, old in _hyper(table.rule).items() if group[k] != old}
        for name in [each for each in changed if not _keeps_state(table.rule, each, group[each])]:
            del changed[name]
            self._leave(name)
        if changed:
            table.rule = replace(table.rule, **changed)  # type: ignore[type-var]
        self._seen, self._hyper = values, table.hyper
        self._rests_at_zero = table.rule.rests_at_zero
        return True

    def _leave(self, name: str) -> None:
        table = self.table
        if name not in table.ignored:
            table.ignored.add(name)
            _logger.warning("table %r was declared with %r, whose rows keep no state for %s; it is "
                            "not changed", table.name, table.spec.rule, name)  # fmt: skip


def _hyper(rule: Rule) -> dict[str, object]:
    return {each.name: getattr(rule, each.name) for each in fields(rule)}  # type: ignore[arg-type]


def _keeps_state(rule: Rule, name: str, value: object) -> bool:
    """True if rows have the state that the rule wants with this value, too."""
    try:
        changed: Rule = replace(rule, **{name: value})  # type: ignore[type-var]
    except ValueError:  # it may be right together with others
        return True
    return set(changed.state) == set(rule.state)
