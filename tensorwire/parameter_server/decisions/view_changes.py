"""Makes the views that follow on another: without a server, with a trainer, after a snapshot.

Pure functions; each returns a view that the coordinator (``coordination``) stores with a number
that is higher by one, or the same view if nothing changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from tensorwire.parameter_server.decisions.slots import evenly, moved
from tensorwire.parameter_server.decisions.views import (
    Client,
    Left,
    Older,
    Publisher,
    Server,
    Shard,
    Snapshot,
    Trainer,
    View,
    keepers_of,
)
from tensorwire.parameter_server.opaque import Json

_OLDER: Final = 15
"""Snapshots that are remembered besides the last."""

_VERSIONS: Final = 3
"""Published versions that are remembered, the last one included."""


def first(servers: Sequence[Server], backups: int, settings: Mapping[str, Json]) -> View:
    """The view of a new cluster: a shard on each server, its backups on those that follow it."""
    count = len(servers)
    length = min(backups + 1, count)
    shards = tuple(
        Shard(number, tuple(servers[(number + k) % count] for k in range(length)))
        for number in range(count)
    )
    slots = evenly(range(count))
    return View(
        0,
        0,
        servers[0],
        0,
        tuple(servers),
        backups,
        shards,
        0,
        slots,
        made=count,
        settings=settings,
    )


def coordinated(view: View, server: Server) -> View:
    """The view in which ``server`` coordinates from now on."""
    number = view.number + 1
    servers = view.servers if server in view.servers else (*view.servers, server)
    return replace(view, number=number, coordinator=server, term=number, servers=servers)


def taken_over(
    view: View, server: Server, lost: Collection[Server], trainers: Collection[int]
) -> View:
    """The view in which ``server`` coordinates, without these servers and trainers: one vote."""
    after = view if view.coordinator == server else coordinated(view, server)
    if lost:
        after = without(replace(after, number=view.number), lost)
    if trainers:
        after = without_trainers(replace(after, number=view.number), trainers)
    return after


def without(view: View, lost: Collection[Server]) -> View:
    """The view without these servers: backups take over from their heads."""
    number = view.number + 1
    shards = tuple(_without(shard, lost, number) for shard in view.shards)
    servers = tuple(each for each in view.servers if each not in lost)
    return replace(view, number=number, servers=servers, shards=shards)


def _without(shard: Shard, gone: Collection[Server], number: int) -> Shard:
    """The shard with none of these servers in its chain, as from view ``number``."""
    chain = tuple(each for each in shard.chain if each not in gone)
    return shard if chain == shard.chain else replace(shard, chain=chain, version=number)


def with_server(view: View, server: Server) -> View:
    """The view with a server that came, or came back; it keeps nothing yet."""
    servers = tuple(each for each in view.servers if each.name != server.name)
    return replace(view, number=view.number + 1, servers=(*servers, server))


def backed_up(view: View, number: int, server: Server) -> View:
    """The view in which ``server``, which has all of a shard, is its backup from now on."""
    next_view = view.number + 1
    shards = tuple(
        replace(each, chain=(*each.chain, server), version=next_view)
        if each.number == number
        else each
        for each in view.shards
    )
    return replace(view, number=next_view, shards=shards)


def with_trainers(view: View, arrivals: Iterable[Client]) -> View:
    """The view with trainers who join; they are numbered in the order of their names."""
    new = tuple(
        Trainer(view.joined + place, client) for place, client in enumerate(sorted(arrivals))
    )
    return replace(
        view,
        number=view.number + 1,
        trainers=view.trainers + new,
        joined=view.joined + len(new),
    )


def with_sampler(view: View, name: str, text: str) -> View:
    """The view with a sampler of that name; the first to name it says what it is."""
    if name in view.samplers:
        return view
    return replace(view, number=view.number + 1, samplers={**view.samplers, name: text})


def with_publisher(view: View, publisher: Publisher | None) -> View:
    """The view in which somebody publishes versions, or nobody does any more."""
    if view.publisher == publisher:
        return view
    return replace(view, number=view.number + 1, publisher=publisher)


def without_trainers(view: View, numbers: Collection[int]) -> View:
    """The view without trainers that have finished or were lost."""
    staying = tuple(each for each in view.trainers if each.number not in numbers)
    return replace(view, number=view.number + 1, trainers=staying)


def with_left(view: View, left: Left) -> View:
    """The view in which so much counts of a trainer that has left."""
    others = [each for each in view.left if each.number != left.number]
    return replace(view, number=view.number + 1, left=(*others, left))


def saved(view: View, snapshot: Snapshot, without: Collection[int]) -> View:
    """The view with a later snapshot; trainers that left after its cut are not wholly in it.

    Args:
        view: the one before.
        snapshot: the snapshot.
        without: numbers of those who had left before.
    """
    left = tuple(each for each in view.left if each.number not in without)
    older = view.older
    if view.snapshot is not None:
        within = tuple(each for each in view.left if each.number in without)
        older = (Older(view.snapshot, within), *older)[:_OLDER]
    older = _without_folder(older, snapshot.folder)
    return replace(view, number=view.number + 1, snapshot=snapshot, left=left, older=older)


def _without_folder(older: tuple[Older, ...], folder: str) -> tuple[Older, ...]:
    """The view without overwritten snapshots; who left between goes to the one before."""
    kept: list[Older] = []
    left: tuple[Left, ...] = ()
    for each in older:
        left = (*left, *each.left)
        if each.snapshot.folder != folder:
            kept.append(Older(each.snapshot, left))
            left = ()
    return tuple(kept)


def published(view: View, snapshot: Snapshot, without: Collection[int]) -> View:
    """The view with a published version; of its chain, only the last ones are gone back to.

    So versions do not crowd out snapshots, and what a chain no longer keeps is not looked for.
    """
    after = saved(view, snapshot, without)
    chain = snapshot.folder.rpartition("/")[0]
    same = [e.snapshot.folder for e in after.older if e.snapshot.folder.startswith(f"{chain}/")]
    older = after.older
    for folder in same[_VERSIONS - 1 :]:
        older = _without_folder(older, folder)
    return replace(after, older=older)


def going_back(view: View, snapshot: Snapshot) -> View:
    """The view without the snapshots after this one, as they are damaged."""
    left, older = view.left, view.older
    latest = view.snapshot
    while latest != snapshot:
        left, latest, older = (*left, *older[0].left), older[0].snapshot, older[1:]
    return replace(view, number=view.number + 1, snapshot=latest, left=left, older=older)


def resized(view: View, servers: Sequence[Server]) -> View:
    """The view in which each of these servers is to head one shard with its share of the slots.

    Servers that head a shard keep it; the others get a new one. Shards of servers that
    are not named lose their slots; :func:`trimmed` removes them once they are empty.
    """
    number = view.number + 1
    kept = {shard.head: shard for shard in reversed(view.shards) if shard.chain}
    new: list[Shard] = []
    staying: list[int] = []
    for place, server in enumerate(servers):
        if server in kept:
            staying.append(kept[server].number)
        else:
            followers = (*servers[place + 1 :], *servers[:place])[: view.backups]
            new.append(Shard(view.made + len(new), (server, *followers), number))
            staying.append(new[-1].number)
    return replace(
        view,
        number=number,
        servers=tuple(servers),
        shards=(*view.shards, *new),
        epoch=view.epoch + 1,
        slots=moved(view.slots, staying),
        made=view.made + len(new),
    )


def trimmed(view: View) -> View:
    """The view without shards that have no slots; servers that were not named keep nothing.

    Unless they are the last that have a shard, as those that were named have died.
    """
    number = view.number + 1
    leaving = keepers_of(view.shards) - set(view.servers)
    shards = []
    for shard in view.shards:
        if shard.number in view.active:
            only = leaving.issuperset(shard.chain)
            shards.append(shard if only else _without(shard, leaving, number))
    servers = (*view.servers, *sorted(keepers_of(shards) - set(view.servers)))
    return replace(view, number=number, shards=tuple(shards), servers=servers)


def rolled_back(view: View, servers: Sequence[Server]) -> View:
    """The view of new shards, to be filled from the snapshot, as all state is lost or given up."""
    number = view.number + 1
    fresh = first(servers, view.backups, view.settings)
    undone: Counter[str] = Counter()
    for each in view.left:
        undone[each.name] += each.undone_by(view.snapshot or Snapshot("", {}, 0))
    shards = tuple(
        replace(each, number=each.number + view.made, version=number) for each in fresh.shards
    )
    return replace(
        view,
        number=number,
        generation=view.generation + 1,
        shards=shards,
        epoch=view.epoch + 1,
        slots=tuple(shard + view.made for shard in fresh.slots),
        made=view.made + len(shards),
        left=(),
        undone=dict(undone),
        publisher=None,
    )
