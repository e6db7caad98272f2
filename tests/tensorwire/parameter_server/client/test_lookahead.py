"""Rows of batches ahead are right whatever servers do in between: seeded games without messages."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from tensorwire.parameter_server.client.cluster import Cluster
from tensorwire.parameter_server.client.exchange import Answer, KnownRows, ShardChanges
from tensorwire.parameter_server.client.kept_rows import KeptRows
from tensorwire.parameter_server.client.lookahead import Lookahead
from tensorwire.parameter_server.client.step_rows import StepRows
from tensorwire.parameter_server.messaging.messages import TableIds

KINDS = ((("a", "b"), 3), (("wide",), 5))
IDS, SHARDS, STEPS = 12, 2, 15
GAMES = 25


@dataclass
class Shard:
    """A shard's count of changes at its head; another head begins to count anew."""

    life: int = 1
    number: int = 0
    last: dict[tuple[str, int], int] = field(default_factory=dict)


class Servers:
    """All rows, and the shards that count their changes. Stands for a cluster."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.session = self.stepper = self
        self.values: dict[tuple[str, int], float] = {}
        self.shards = [Shard() for _ in range(SHARDS)]
        self.sent = 0
        self.losses = draw.choice([0.0, 0.05, 0.3])

    def change(self, rows: set[tuple[str, int]]) -> None:
        """A step; one that changes nothing may not be counted."""
        for shard in self.shards if rows or self.draw.random() < 0.5 else ():
            shard.number += 1
        for table, each in rows:
            self.values[table, each] = self.draw.random()
            shard = self.shards[each % SHARDS]
            shard.last[table, each] = shard.number

    def maybe_lose_a_head(self) -> None:
        if self.draw.random() < self.losses:
            place = self.draw.randrange(SHARDS)
            self.shards[place] = Shard(self.draw.randrange(1 << 40), self.draw.randrange(30))

    def rows(self, ids: TableIds, dim: int) -> Tensor:
        names = np.repeat(ids.tables, ids.sizes).tolist()
        found = [self.values.get(row, 0.0) for row in zip(names, ids.ids.tolist(), strict=True)]
        return torch.tensor(found).unsqueeze(1).expand(-1, dim).contiguous()

    def answer(self, wanted: list[TableIds], known: list[KnownRows]) -> Answer:
        changes = [
            [self._changes(place, ids, each) for place in range(SHARDS)]
            for ids, each in zip(wanted, known, strict=True)
        ]
        return Answer([], {}, 0, changes)

    def _changes(self, place: int, ids: TableIds, known: KnownRows) -> ShardChanges:
        shard, dim = self.shards[place], dict(KINDS)[ids.tables]
        places = np.flatnonzero(ids.ids.numpy() % SHARDS == place)
        names = np.repeat(ids.tables, ids.sizes)[places].tolist()
        rows = list(zip(names, ids.ids.numpy()[places].tolist(), strict=True))
        told = known.at(place, places)
        numbers = np.broadcast_to(told.numbers.numpy(), len(rows)).tolist()
        which = np.array(
            [
                told.life != shard.life or number < 0 or shard.last.get(row, 0) > number
                for row, number in zip(rows, numbers, strict=True)
            ],
            bool,
        )
        values = self.rows(ids, dim)[torch.from_numpy(places)][torch.from_numpy(which)]
        self.sent += len(values)
        return ShardChanges(place, shard.life, shard.number, places, which, values)

    # --- as a cluster

    def known(self, *names: str) -> list[Any]:
        dims = {name: dim for tables, dim in KINDS for name in tables}
        return [type("Table", (), {"dim": dims[name]}) for name in names]

    def send(self, push: None, wanted: list[TableIds], *, known: list[KnownRows]) -> Any:
        answer = self.answer(wanted, known)
        return SimpleNamespace(wait=lambda: answer)

    def send_aside(self, wanted: list[TableIds], known: list[KnownRows]) -> Any:
        at_once = self.answer(wanted, known)
        return at_once if self.draw.random() < 0.5 else (wanted, known)

    def wait_aside(self, asked: Any) -> Answer:
        return asked if isinstance(asked, Answer) else self.answer(*asked)

    def drop(self, asked: Any) -> None:
        pass


def batch(draw: random.Random) -> list[TableIds]:
    found = []
    for tables, _ in KINDS:
        ids = [draw.sample(range(IDS), draw.randrange(1, 5)) for _ in tables]
        every = torch.tensor([each for own in ids for each in own])
        found.append(TableIds(tables, tuple(map(len, ids)), every))
    return found


def rows_in(given: list[TableIds]) -> set[tuple[str, int]]:
    return {
        (name, each)
        for ids in given
        for name, each in zip(
            np.repeat(ids.tables, ids.sizes).tolist(), ids.ids.tolist(), strict=True
        )
    }


def play(seed: int, ahead: int) -> None:
    draw = random.Random(seed)
    servers = Servers(draw)
    window = Lookahead(cast(Cluster, servers))
    given = [batch(draw) for _ in range(STEPS)]
    tables = {name for names, _ in KINDS for name in names}
    window.admit(given[0])
    for step in range(STEPS):
        rows = window.next_rows(tables, step)
        if draw.random() < 0.9:  # else the step failed before it was sent
            _get(servers, window, rows, given[step], is_first=not step, name=(seed, ahead, step))
        window.advance()
        for later in given[step + 1 if not step else step + ahead :][: ahead if not step else 1]:
            window.admit(later)
        if draw.random() < 0.03:
            window.forget()
        others = {(name, draw.randrange(IDS)) for name in tables}
        servers.change(set() if draw.random() < 0.1 else rows_in(given[step]) | others)


def _get(
    servers: Servers, window: Lookahead, rows: list[StepRows], given: list[TableIds], *,
    is_first: bool, name: tuple[int, int, int],
) -> None:  # fmt: skip
    """The answer to a step comes, and brings the rows as they are at their servers."""
    draw, known = servers.draw, [each.known for each in rows if each.known is not None]
    asks_beside_first = draw.random() < 0.5  # as a head that is lost has answered it only
    if not is_first and asks_beside_first:
        window.use_the_wait(None)
    servers.maybe_lose_a_head()
    answer = servers.answer([each.missing for each in rows], known)
    truth = [servers.rows(ids, dim) for ids, (_, dim) in zip(given, KINDS, strict=True)]
    if not is_first and not asks_beside_first:
        window.use_the_wait(None)
    servers.maybe_lose_a_head()
    window.arrived(rows, answer)
    for each, ids, expected in zip(rows, given, truth, strict=True):
        found = each.take(ids)
        assert found is not None
        assert torch.equal(found, expected), "play({}, {}), step {}".format(*name)


@pytest.mark.parametrize("ahead", [2, 3, 5])
def test_rows_are_those_of_their_servers_though_others_change_them_and_heads_are_lost(
    ahead: int,
) -> None:
    for seed in range(GAMES):
        play(seed, ahead)


def test_places_of_rows_that_nobody_wants_are_used_again() -> None:
    kept = KeptRows(("t",), 2)
    first = kept.admit(TableIds(("t",), (3,), torch.tensor([1, 2, 3])))
    second = kept.admit(TableIds(("t",), (2,), torch.tensor([3, 4])))
    assert second[0] == first[2]
    assert len(kept) == 4
    kept.release(first)
    third = kept.admit(TableIds(("t",), (3,), torch.tensor([9, 4, 8])))
    assert third[1] == second[1]
    assert kept.known(third, 0).tolist() == [-1] * 3
    assert len(kept) == 4
    fourth = kept.admit(TableIds(("t",), (1,), torch.tensor([7])))
    assert {*third[[0, 2]], *fourth} & {*first[:2]}
