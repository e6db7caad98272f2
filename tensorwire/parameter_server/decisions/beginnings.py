"""Decides where shards and trainers begin: at a cut, after a move, after a roll-back. Sans-IO."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from tensorwire.parameter_server.decisions import orders
from tensorwire.parameter_server.decisions.pushes import Cut, Status
from tensorwire.parameter_server.decisions.samples import Account
from tensorwire.parameter_server.decisions.views import Snapshot, View


def meeting(view: View, change: int, statuses: Iterable[Status], joins: Collection[int]) -> Cut:
    """The first point that no shard is beyond.

    Args:
        view: of the cluster.
        change: the number of the cut.
        statuses: of the shards, which hold.
        joins: numbers of the trainers that begin there.
    """
    vector: dict[int, int] = {}
    time, finished = 0, set[int]()
    for status in statuses:
        time = max(time, status.time)
        finished |= status.counts.keys() - status.members
        for trainer, count in status.counts.items():
            vector[trainer] = max(vector.get(trainer, 0), count)
    trainers = frozenset(trainer.number for trainer in view.trainers)
    staying = trainers - set(joins) - finished  # who may not have left the view yet
    start = min((vector[each] for each in staying if each in vector), default=time)
    return Cut(change, vector, dict.fromkeys(joins, start), time=time, trainers=trainers)


def primes(view: View, cut: Cut, old: Collection[int]) -> dict[int, orders.Order]:
    """The orders with which new shards begin in a move.

    Args:
        view: with the new map.
        cut: at which the others move.
        old: numbers of the shards of the old map.
    """
    staying = {trainer.number for trainer in view.trainers}
    counts = {each: count for each, count in cut.vector.items() if each in staying}
    prime = orders.Prime(
        counts,
        cut.time,
        view.epoch,
        view.slots,
        frozenset(old),
        view.declared,
    )
    return {s.number: prime for s in view.shards if s.number not in old}


def beginning(view: View) -> orders.Prime:
    """The order with which all shards of a view begin: with its snapshot, or with nothing."""
    snapshot = view.snapshot or Snapshot("", {}, 0)
    known = [
        snapshot.counts[trainer.number]
        for trainer in view.trainers
        if trainer.number in snapshot.counts
    ]
    start = min(known, default=snapshot.time)
    counts = {t.number: snapshot.counts.get(t.number, start) for t in view.trainers}
    accounts = {n: snapshot.accounts.get(n, Account()) for n in view.samplers}
    return orders.Prime(
        counts,
        snapshot.time,
        view.epoch,
        view.slots,
        declared=view.declared,
        folder=snapshot.folder,
        accounts=accounts,
    )
