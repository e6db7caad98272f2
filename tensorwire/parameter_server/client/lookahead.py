"""Keeps rows that batches ahead want at the trainer, and has them brought up to date.

The answer to a step brings of the next batch's rows only those that the step has changed. All
others were brought before, by a pull that goes beside the step and waits for nobody's next batch:
it asks for what is not here of all batches that are known, and for what the batch after the next
one lacks. The servers say what has changed (``storage.changes``), so a row that is used has the
bits that it has at its server. The idea is that of BagPipe (Agarwal et al., 2023), whose cache
is kept exact by looking at what the coming batches want.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from tensorwire.parameter_server.client.exchange import Answer, KnownRows, PendingPull
from tensorwire.parameter_server.client.kept_rows import KeptRows
from tensorwire.parameter_server.client.step_rows import StepRows
from tensorwire.parameter_server.kernels.arrays import Ints
from tensorwire.parameter_server.messaging.messages import TableIds

if TYPE_CHECKING:
    from tensorwire.parameter_server.client.cluster import Cluster


@dataclass(frozen=True, slots=True)
class _Wish:
    """The rows of one kind of tables that one batch wants.

    Args:
        ids: of the rows.
        kept: where they are kept.
        places: of each there.
    """

    ids: TableIds
    kept: KeptRows
    places: Ints


_Batch = list[_Wish]


class Lookahead:
    """The batches that one trainer knows, and the rows that they want.

    Args:
        cluster: where the tables are.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._kept: dict[tuple[str, ...], KeptRows] = {}
        self._current: _Batch = []
        self._coming: deque[_Batch] = deque()
        self._lives: dict[int, int] = {}
        self._aside: tuple[PendingPull, _Batch] | None = None

    def __len__(self) -> int:
        """Rows that are kept here."""
        return sum(len(kept) for kept in self._kept.values())

    def admit(self, wanted: Sequence[TableIds]) -> None:
        """One more batch is known.

        Args:
            wanted: ids of tables, those of one kind together.
        """
        batch = []
        for ids in wanted:
            kept = self._kept.get(ids.tables)
            if kept is None:
                dim = self._cluster.known(ids.tables[0])[0].dim
                kept = self._kept[ids.tables] = KeptRows(ids.tables, dim)
            batch.append(_Wish(ids, kept, kept.admit(ids)))
        self._coming.append(batch)

    def advance(self) -> None:
        """The next batch is trained now; nobody wants the rows of the one before."""
        for wish in self._current:
            wish.kept.release(wish.places)
        self._current = self._coming.popleft()

    def forget(self) -> None:
        """Nothing that is here may be used, as after a roll-back."""
        self.close()
        for kept in self._kept.values():
            kept.forget()

    def close(self) -> None:
        """Waits for nothing that is under way."""
        aside, self._aside = self._aside, None
        if aside is not None:
            self._cluster.session.drop(aside[0])

    def next_rows(self, tables: Set[str], step: int) -> list[StepRows]:
        """The rows of the next batch, to be pulled with a step.

        Args:
            tables: rows of others are left out.
            step: in which they will be used.
        """
        self._take_in_aside()
        coming = self._coming[0] if self._coming else []
        return [
            StepRows(wish.ids, step, wish.kept.dim, known=self._known(wish))
            for wish in coming
            if tables >= set(wish.ids.tables)
        ]

    def _known(self, wish: _Wish) -> KnownRows:
        return KnownRows(dict(self._lives), wish.kept.known(wish.places))

    def arrived(self, rows: Sequence[StepRows], answer: Answer) -> None:
        """The rows of :meth:`next_rows` are here."""
        by_ids = {id(wish.ids): wish for wish in self._coming[0]} if rows else {}
        asked = [by_ids[id(each.ids)] for each in rows]
        lives = _lives_of(answer)
        if rows and lives != self._lives:  # other servers count now: nobody knows what has changed
            self._lives = lives
            for kept in self._kept.values():
                kept.forget()
        self._store(asked, answer)
        for each, wish in zip(rows, asked, strict=True):
            each.promise(partial(wish.kept.rows, wish.places))

    def use_the_wait(self, then: Callable[[], object] | None) -> None:
        """Sets out for rows of later batches, beside a step that was sent just now.

        Args:
            then: is done afterwards; None for nothing.
        """
        asked = self._lacking()
        if asked:
            wanted, known = [wish.ids for wish in asked], [self._known(wish) for wish in asked]
            self._aside = self._cluster.stepper.send_aside(wanted, known), asked
        if then is not None:
            then()

    def _lacking(self) -> _Batch:
        if len(self._coming) < 2:
            return []
        found = []
        for kept in self._kept.values():
            ids, places = kept.lacking([_places(batch, kept) for batch in self._coming])
            if len(places):
                found.append(_Wish(ids, kept, places))
        return found

    def _take_in_aside(self) -> None:
        """Waits for what was asked for beside the last step."""
        aside, self._aside = self._aside, None
        if aside is not None:
            pending, asked = aside
            answer = self._cluster.stepper.wait_aside(pending)
            if _lives_of(answer) == self._lives:
                self._store(asked, answer)

    def _store(self, asked: Sequence[_Wish], answer: Answer) -> None:
        for wish, parts in zip(asked, answer.changes, strict=True):
            for part in parts:
                wish.kept.store(wish.places, part)


def _places(batch: _Batch, kept: KeptRows) -> Ints:
    """The places of a batch's rows that are kept there."""
    found = [wish.places for wish in batch if wish.kept is kept]
    return found[0] if found else np.empty(0, np.int64)


def _lives_of(answer: Answer) -> dict[int, int]:
    return {part.shard: part.life for parts in answer.changes for part in parts}
