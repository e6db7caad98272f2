"""Keeps rows that batches ahead want at the trainer, and has them brought up to date.

The answer to a step brings of the next batch's rows only those that the step has changed. All
others were brought before, by a pull that goes beside the step and waits for nobody's next batch:
it asks for what is not here of all batches that are known, and for what the batch after the next
one lacks. The servers say what has changed (``storage.last_changes``), so a row that is used has
the bits that it has at its server. The idea is that of BagPipe (Agarwal et al., 2023), whose cache
is kept exact by looking at what the coming batches want.

The answer to a pull beside a step has until the answer to the *next* step to come. That step is
sent before, and has to say up to which change its rows are known. It says so of rows under way,
too: their pull is read after the step beside which it went, and each step is one change at least.
What was said is compared with the answer; if it was too much, all rows are fetched anew.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
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


@dataclass(frozen=True, slots=True)
class _Aside:
    """A pull beside a step.

    Args:
        number: counts them, from 1.
        pull: as it was sent.
        asked: the rows that it asks for.
        promised: by shard, the change up to which its answer will know them at least.
    """

    number: int
    pull: PendingPull
    asked: _Batch
    promised: Mapping[int, int]


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
        self._numbers: dict[int, int] = {}
        self._asides = 0
        self._aside: _Aside | None = None  # sent beside the step that is under way
        self._due: _Aside | None = None  # sent beside the step before that

    def __len__(self) -> int:
        """Rows that are kept here."""
        return sum(len(kept) for kept in self._kept.values())

    def admit(self, wanted: Sequence[TableIds]) -> None:
        """Adds a batch that is known now.

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
        """Goes on to the next batch; nobody wants the rows of the one before."""
        for wish in self._current:
            wish.kept.release(wish.places)
        self._current = self._coming.popleft()

    def forget(self) -> None:
        """Notes that nothing that is here may be used, as after a roll-back."""
        self.close()
        for kept in self._kept.values():
            kept.forget()

    def close(self) -> None:
        """Waits for nothing that is under way."""
        for aside in (self._due, self._aside):
            if aside is not None:
                self._cluster.session.drop(aside.pull)
        self._due = self._aside = None

    def next_rows(self, tables: Set[str], step: int) -> list[StepRows]:
        """The rows of the next batch, to be pulled with a step.

        Args:
            tables: rows of others are left out.
            step: in which they will be used.
        """
        if not self._take_in_due():  # which is here only if the step before brought nothing
            self.forget()
        self._due, self._aside = self._aside, None
        coming = self._coming[0] if self._coming else []
        return [
            StepRows(wish.ids, step, wish.kept.dim, known=self._known(wish))
            for wish in coming
            if tables >= set(wish.ids.tables)
        ]

    def _known(self, wish: _Wish) -> KnownRows:
        """The rows that are known here, to be told with those that are asked for now."""
        if self._due is None:
            return KnownRows(dict(self._lives), wish.kept.known(wish.places, 0))
        known = wish.kept.known(wish.places, self._due.number)
        return KnownRows(dict(self._lives), known, self._due.promised)

    def arrived(self, rows: Sequence[StepRows], answer: Answer) -> None:
        """Takes in the rows of :meth:`next_rows`."""
        by_ids = {id(wish.ids): wish for wish in self._coming[0]} if rows else {}
        asked = [by_ids[id(each.ids)] for each in rows]
        if not self._take_in_due():
            answer = self._fetched_anew(asked)
        lives, self._numbers = _lives_of(answer), _numbers_of(answer)
        if rows and lives != self._lives:  # other servers count now: nobody knows what has changed
            self._lives = lives
            self.forget()
        self._store(asked, answer)
        for each, wish in zip(rows, asked, strict=True):
            each.promise(partial(wish.kept.rows, wish.places))

    def _fetched_anew(self, asked: _Batch) -> Answer:
        self.forget()
        ids, known = [wish.ids for wish in asked], [self._known(wish) for wish in asked]
        answer = self._cluster.stepper.send(None, ids, known=known).wait()
        assert answer is not None
        return answer

    def use_the_wait(self, then: Callable[[], object] | None) -> None:
        """Sets out for rows of later batches, beside a step that was sent just now.

        Args:
            then: is done afterwards; None for nothing.
        """
        asked = self._lacking()
        if asked:
            wanted, known = [wish.ids for wish in asked], [self._known(wish) for wish in asked]
            pull, self._asides = self._cluster.stepper.send_aside(wanted, known), self._asides + 1
            promised = {shard: number + 1 for shard, number in self._numbers.items()}
            self._aside = _Aside(self._asides, pull, asked, promised)
            for wish in asked:
                wish.kept.ask(wish.places, self._asides)
        if then is not None:
            then()

    def _lacking(self) -> _Batch:
        if len(self._coming) < 2:
            return []
        wishes, pull = [], 0 if self._due is None else self._due.number
        for kept in self._kept.values():
            ids, places = kept.lacking([_places(batch, kept) for batch in self._coming], pull)
            if len(places):
                wishes.append(_Wish(ids, kept, places))
        return wishes

    def _take_in_due(self) -> bool:
        """Waits for what was asked for beside the step before.

        Returns:
            False if it does not know what was said that it would.
        """
        due, self._due = self._due, None
        if due is None:
            return True
        answer = self._cluster.stepper.wait_aside(due.pull)
        numbers = _numbers_of(answer)
        if _lives_of(answer) != self._lives or any(
            numbers[shard] < due.promised.get(shard, 0) for shard in numbers
        ):
            return False
        self._store(due.asked, answer)
        return True

    def _store(self, asked: Sequence[_Wish], answer: Answer) -> None:
        for wish, parts in zip(asked, answer.changes, strict=True):
            for part in parts:
                wish.kept.store(wish.places, part)


def _places(batch: _Batch, kept: KeptRows) -> Ints:
    """The places of a batch's rows that are kept there."""
    matching = [wish.places for wish in batch if wish.kept is kept]
    return matching[0] if matching else np.empty(0, np.int64)


def _lives_of(answer: Answer) -> dict[int, int]:
    return {part.shard: part.life for parts in answer.changes for part in parts}


def _numbers_of(answer: Answer) -> dict[int, int]:
    return {part.shard: part.number for parts in answer.changes for part in parts}
