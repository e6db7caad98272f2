"""Fetches the rows that modules look up: now, or one step before they are used."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tensorwire.parameter_server.client.exchange import Answer, Exchanging, StepGradient
from tensorwire.parameter_server.client.lookahead import Lookahead
from tensorwire.parameter_server.client.step_rows import StepRows
from tensorwire.parameter_server.messaging.messages import TableIds

if TYPE_CHECKING:
    from tensorwire.parameter_server.client.cluster import Cluster
    from tensorwire.parameter_server.client.table import Table, TableKind


class RowFetcher:
    """The rows of this step and the next, at one trainer.

    Args:
        cluster: where the tables are.

    Attributes:
        ahead: the batches that are known if rows are kept for them; else None.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.ahead: Lookahead | None = None
        self._cluster = cluster
        self._announced: list[TableIds] = []
        self._ready: list[StepRows] = []
        self._rollbacks = 0

    def fetch(self, ids: TableIds) -> Tensor:
        """The rows of ids: prefetched, kept here, or pulled now.

        Args:
            ids: of tables of one kind.

        Returns:
            ``(n, dim)``, float32, the caller's own.
        """
        self._forget_what_was_undone()
        step = self._cluster.step
        for each in self._ready:
            prefetched = each.take(ids) if each.step == step else None
            if prefetched is not None:
                return prefetched
        rows = self._step_rows(ids, 0)
        rows.promise(lambda: self._pull(rows.missing))
        taken = rows.take(ids)
        assert taken is not None
        return taken

    def fetch_all(self, ids: Sequence[TableIds]) -> list[Tensor]:
        """The rows of all that one forward pass looks up; see :meth:`fetch`.

        Args:
            ids: of tables, those of one kind together.
        """
        return [self.fetch(each) for each in ids]

    def _pull(self, ids: TableIds) -> Tensor:
        if not len(ids.ids):
            return torch.empty(0, self._cluster.known(ids.tables[0])[0].dim)
        answer = self._cluster.stepper.send(None, [ids]).wait()
        assert answer is not None  # something was asked for
        return answer.rows[0]

    def gradients_of(self, tables: Mapping[str, tuple[Tensor, Tensor]]) -> list[StepGradient]:
        """Gradients of tables, those of one kind together.

        Args:
            tables: by name, ids that are all different and a row for each.
        """
        gradients = []
        for ids in self.grouped({name: given for name, (given, _) in tables.items()}):
            grads = [tables[name][1] for name in ids.tables]
            gradients.append(StepGradient(ids, grads[0] if len(grads) == 1 else torch.cat(grads)))
        return gradients

    def grouped(self, wanted: Mapping[str, Tensor]) -> list[TableIds]:
        """Ids of rows, those of tables of one kind together.

        Args:
            wanted: by the name of the table, ids that are all different.
        """
        kinds: dict[TableKind, list[Table]] = {}
        for table in self._cluster.known(*wanted):
            kinds.setdefault(table.kind, []).append(table)
        for tables in kinds.values():
            tables.sort(key=_order_of)
        return [_joined(tables, [wanted[t.name] for t in tables]) for tables in kinds.values()]

    def as_pulled(self, gradients: Sequence[StepGradient]) -> list[StepGradient]:
        """The same gradients; those of rows that were pulled together are put together.

        So servers need not look for these rows again.

        Args:
            gradients: no table twice.
        """
        alone = {each.ids.tables[0]: each for each in gradients if len(each.ids.tables) == 1}
        whole = [each for each in gradients if len(each.ids.tables) > 1]
        for ids in [each.ids for each in self._ready if each.step == self._cluster.step]:
            if len(ids.tables) > 1 and alone.keys() >= set(ids.tables):
                parts = [alone[name] for name in ids.tables]
                given = [each.ids.ids for each in parts]
                if _sizes(given) == ids.sizes and torch.equal(torch.cat(given), ids.ids):
                    whole.append(StepGradient(ids, torch.cat([each.grad for each in parts])))
                    for name in ids.tables:
                        del alone[name]
        return [*whole, *alone.values()]

    def announce(self, wanted: Sequence[TableIds]) -> None:
        """Has rows of the next batch come with the next step, or begins to fetch them now.

        Args:
            wanted: ids of tables, those of one kind together.
        """
        if self._cluster.is_stale:
            self.bring(wanted, 1)
        else:
            self._announced = list(wanted)

    def bring(self, wanted: Sequence[TableIds], later: int = 0) -> None:
        """Begins to fetch rows, in one message to each server.

        Args:
            wanted: ids of tables, those of one kind together.
            later: steps until they are used.
        """
        self._forget_what_was_undone()
        rows = [self._step_rows(ids, later) for ids in wanted]
        self.promised(rows, self._cluster.stepper.send(None, [each.missing for each in rows]))

    def announced(self, tables: Collection[str]) -> list[StepRows]:
        """The rows that were announced, if they are of these tables; they are to be pulled now."""
        self._forget_what_was_undone()
        announced, self._announced = self._announced, []
        known = set(tables)
        if self.ahead is not None:
            return self.ahead.next_rows(known, self._cluster.step + 1)
        return [self._step_rows(ids, 1) for ids in announced if known.issuperset(ids.tables)]

    def promised(self, rows: Sequence[StepRows], sent: Exchanging[Answer | None]) -> None:
        """Notes rows that come with an answer; :meth:`fetch` hands them out in their step."""
        step = self._cluster.step
        self._ready = [each for each in self._ready if each.step >= step]
        if self.ahead is not None and rows and rows[0].known is not None:
            answer = sent.wait()
            assert answer is not None
            self.ahead.arrived(rows, answer)
            self._ready += rows
            return
        for place, each in enumerate(rows):
            each.promise(partial(_rows_of, sent, place))
            self._ready.append(each)

    def bring_ahead(self) -> None:
        """Begins to fetch the rows of the first batch of those that are known ahead."""
        assert self.ahead is not None
        self._forget_what_was_undone()
        tables = {table.name for table in self._cluster.tables}
        rows = self.ahead.next_rows(tables, self._cluster.step)
        known = [each.known for each in rows if each.known is not None]
        sent = self._cluster.stepper.send(None, [each.missing for each in rows], known=known)
        self.promised(rows, sent)

    def _step_rows(self, ids: TableIds, later: int) -> StepRows:
        tables = self._cluster.known(*ids.tables)
        caches = [table.cache for table in tables if table.cache is not None]
        return StepRows(ids, self._cluster.step + later, tables[0].dim, caches)

    def _forget_what_was_undone(self) -> None:
        if self._rollbacks != self._cluster.session.rollbacks:
            self._rollbacks = self._cluster.session.rollbacks
            self._ready.clear()
            if self.ahead is not None:
                self.ahead.forget()
            for table in self._cluster.tables:
                table.forget()


def _rows_of(sent: Exchanging[Answer | None], place: int) -> Tensor:
    answer = sent.wait()
    assert answer is not None
    return answer.rows[place]


def _order_of(table: Table) -> str:
    return table.order


def _joined(tables: Sequence[Table], ids: Sequence[Tensor]) -> TableIds:
    """The ids of several tables, those of one table after those of another."""
    every = ids[0] if len(ids) == 1 else torch.cat(list(ids))
    names = tuple([table.name for table in tables])
    return TableIds(names, _sizes(ids), every)


def _sizes(ids: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple([len(each) for each in ids])
