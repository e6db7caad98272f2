"""A ``torch.optim.Optimizer`` whose parameters and tables servers keep and move."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tensorwire.parameter_server.client.cluster import Cluster
from tensorwire.parameter_server.client.dense import DenseGroup
from tensorwire.parameter_server.client.exchange import Gradients, Pulled, Wanted
from tensorwire.parameter_server.client.table import Table


class Optimizer(torch.optim.Optimizer):
    """Steps the dense parameters and the tables of a model at the servers.

    Its ``param_groups`` are those of the dense optimizer, and one for each table with the rows
    that were used since the last step: schedulers, clipping of gradients and ``GradScaler``
    work on them as on any other. A step is one message to each server: its gradients, and
    what the next step needs.

    Args:
        cluster: where the parameters are.
        model: its dense parameters are moved, and the tables that its modules use.
        dense: class of the optimizer of dense parameters. Default none: they stay as they are.
        tables: further tables.
        name: of the dense parameters in the cluster; models of one cluster need different ones.
        hyper: arguments of ``dense``.

    Raises:
        DeclarationError: another trainer has another model under this name.
        ValueError: there is nothing to optimize.
        TypeError: ``dense`` does not take these arguments.

    Example::

        optimizer = ps.Optimizer(cluster, model, dense=torch.optim.Adam, lr=1e-3)
    """

    _step_supports_amp_scaling = True

    def __init__(
        self,
        cluster: Cluster,
        model: nn.Module | None = None,
        dense: Callable[..., torch.optim.Optimizer] | None = None,
        *,
        tables: Iterable[Table] = (),
        name: str = "model",
        **hyper: Any,
    ) -> None:
        parameters = [] if model is None else [p for p in model.parameters() if p.requires_grad]
        local = dense(parameters, **hyper) if dense is not None and parameters else None
        self._begin(cluster, local, [*_tables_of(model), *tables], name)

    def _begin(
        self,
        cluster: Cluster,
        local: torch.optim.Optimizer | None,
        tables: Iterable[Table],
        name: str,
    ) -> None:
        self.cluster = cluster
        self.tables = list(dict.fromkeys(tables))
        self.group: DenseGroup | None = None
        if local is None and not self.tables:
            raise ValueError("ps.Optimizer: the model has no tables, and no optimizer for others")
        super().__init__([{"params": []}], {})
        cluster.join()
        if local is not None:
            self.group = cluster.dense(name, local)
        dense_groups = local.param_groups if local is not None else []
        self._table_groups = [_group_of(table) for table in self.tables]
        self.param_groups: list[dict[str, Any]] = [*dense_groups, *self._table_groups]
        for table, group in zip(self.tables, self._table_groups, strict=True):
            table.used = partial(_show, table, group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets all gradients, and the rows that were used for them.

        Args:
            set_to_none: as in torch.
        """
        super().zero_grad(set_to_none)
        for table in self.tables:
            table.uses.clear()
            table.used()

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Pushes the gradients, and gets what the next step needs.

        Args:
            closure: computes the loss and its gradients, once. Default none.

        Returns:
            What ``closure`` returned, or None.

        Raises:
            GradientError: gradients are not finite; see ``NanPolicy``.
            RolledBack: see there; the parameters are as in that snapshot.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        push = None if self._is_skipped() else self._gradients()
        try:
            pulled = self.cluster.exchange(push, self._wanted(), skip=True).wait()
        finally:
            for table in self.tables:
                table.uses.clear()
                table.used()
        self._accept(pulled)
        return loss

    def skip(self) -> None:
        """A step without gradients, so that nobody waits for this trainer's."""
        for table in self.tables:
            table.uses.clear()
            table.used()
        self._accept(self.cluster.exchange(None, self._wanted(), skip=True).wait())

    def reload(self) -> None:
        """Gets the dense parameters as the servers have them, after ``RolledBack``."""
        if self.group is not None:
            wanted = Wanted(dense=(self.group.name,))
            self._accept(self.cluster.exchange(None, wanted).wait())

    def _is_skipped(self) -> bool:
        """True if ``GradScaler`` has found gradients that are not finite; else unscales them."""
        found = getattr(self, "found_inf", None)
        scale = getattr(self, "grad_scale", None)
        if found is not None and bool(found):
            return True
        if scale is not None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.div_(scale.to(parameter.grad.device))
        return False

    def _gradients(self) -> Gradients:
        tables = {}
        for table, group in zip(self.tables, self._table_groups, strict=True):
            _set_rule(table, group)
            found = table.take_gradient()
            if found is not None:
                tables[table.name] = found
        dense: dict[str, list[Tensor | None]] = {}
        if self.group is not None:
            dense[self.group.name] = self.group.gradients()
        return Gradients(tables, dense)

    def _wanted(self) -> Wanted | None:
        tables = {t.name: t.next_ids for t in self.tables if t.next_ids is not None}
        dense = () if self.group is None else (self.group.name,)
        return Wanted(tables, dense) if tables or dense else None

    def _accept(self, pulled: Pulled | None) -> None:
        if pulled is None:
            return
        if self.group is not None:
            values = pulled.dense[self.group.name]
            if values is not None:
                self.group.accept(values)
        for table in self.tables:
            if table.next_ids is not None and table.name in pulled.tables:
                table.bring(table.next_ids, pulled.tables[table.name])
                table.next_ids = None


def _tables_of(model: nn.Module | None) -> list[Table]:
    modules = [] if model is None else list(model.modules())
    found: list[Any] = [getattr(module, "table", None) for module in modules]
    return [table for table in found if isinstance(table, Table)]


def _group_of(table: Table) -> dict[str, Any]:
    """A table as a parameter group: its rule's fields are the hyper-parameters."""
    hyper = {each.name: getattr(table.rule, each.name) for each in fields(table.rule)}  # type: ignore[arg-type]
    return {"params": [], "table": table.name, **hyper}


def _set_rule(table: Table, group: dict[str, Any]) -> None:
    """The rule with the hyper-parameters that the group has now."""
    names = [each.name for each in fields(table.rule)]  # type: ignore[arg-type]
    if any(getattr(table.rule, each) != group[each] for each in names):
        table.rule = type(table.rule)(**{each: group[each] for each in names})


def _show(table: Table, group: dict[str, Any]) -> None:
    group["params"] = [use.rows for use in table.uses]
