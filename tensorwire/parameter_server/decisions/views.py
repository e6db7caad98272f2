"""A cluster's layout: shards, their chains of servers, the map from slots to shards, the trainers.

A view is one value in the group's store, replaced by compare-and-set only, with a number that
grows. It says what shall be; the coordinator (``coordination``) makes the shards follow.

A chain is the servers that keep one shard: the first is its head, which decides, the others
are backups. Who is named by the view is a *life* of a server: after a restart it is another.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from tensorwire.parameter_server.decisions.samples import Account
from tensorwire.parameter_server.decisions.slots import evenly, moved

_OLDER: Final = 15
"""Snapshots that are remembered besides the last."""

_VERSIONS: Final = 3
"""Published versions that are remembered, the last one included."""

KEPT: Final = "kept:"
"""Begins the text of what a restored snapshot has, and nobody has declared yet."""


@dataclass(frozen=True, slots=True, order=True)
class Server:
    """One life of a server process.

    Args:
        name: the worker's.
        incarnation: which life of that name.
    """

    name: str
    incarnation: int

    def __str__(self) -> str:
        return f"{self.name}/{self.incarnation}"

    def is_of(self, role: str) -> bool:
        """True of a worker of that role of a job, as ``ps:3`` is of ``ps``."""
        name, _, number = self.name.rpartition(":")
        return name == role and number.isdecimal()

    def number_in_role(self) -> int:
        """Its number, if it is a worker of some role."""
        return int(self.name.rpartition(":")[2])


@dataclass(frozen=True, slots=True, order=True)
class Client:
    """Somebody who pushes, from when it joins until it has finished.

    Args:
        name: the worker's.
        incarnation: which life of that name.
        session: how often this life has joined before.
    """

    name: str
    incarnation: int
    session: int = 0


@dataclass(frozen=True, slots=True)
class Trainer:
    """A client that has joined.

    Args:
        number: in the cluster; never given twice.
        client: who it is.
    """

    number: int
    client: Client


@dataclass(frozen=True, slots=True)
class Left:
    """A trainer that has finished or was lost since the last snapshot.

    Args:
        number: the trainer's.
        name: the worker's.
        begin: number of its first push; None if it was lost and did not say.
        end: number behind its last push that counts.
    """

    number: int
    name: str
    begin: int | None
    end: int

    def encode(self) -> list[Any]:
        """As a value of JSON."""
        return [self.number, self.name, self.begin, self.end]

    def undone_by(self, snapshot: Snapshot) -> int:
        """The number of its pushes that are not in a snapshot."""
        first = snapshot.time if self.begin is None else self.begin
        return max(0, self.end - snapshot.counts.get(self.number, first))


@dataclass(frozen=True, slots=True)
class Shard:
    """One share of the state.

    Args:
        number: never given twice.
        chain: the servers that keep it, the head first.
        version: number of the view in which the chain became what it is.
    """

    number: int
    chain: tuple[Server, ...]
    version: int = 0

    @property
    def head(self) -> Server:
        """The server that decides."""
        return self.chain[0]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Where a snapshot is, and of which point in everybody's pushes.

    Args:
        folder: where its files are.
        counts: by trainer, how many of its pushes are in it.
        time: pushes of the fastest trainer.
        accounts: of samples, by the name of the sampler.
    """

    folder: str
    counts: Mapping[int, int]
    time: int
    accounts: Mapping[str, Account] = field(default_factory=dict)

    def encode(self) -> list[Any]:
        """As a value of JSON."""
        accounts = {name: each.encode() for name, each in self.accounts.items()}
        return [self.folder, sorted(self.counts.items()), self.time, accounts]

    @classmethod
    def decode(cls, value: list[Any]) -> Snapshot:
        """The inverse of :meth:`encode`."""
        folder, counts, time, accounts = value
        decoded = {name: Account.decode(each) for name, each in accounts.items()}
        return cls(folder, dict(counts), time, decoded)


@dataclass(frozen=True, slots=True)
class Older:
    """A snapshot that is not the last.

    Args:
        snapshot: the snapshot.
        left: trainers that left after it, and of which the next one has everything.
    """

    snapshot: Snapshot
    left: tuple[Left, ...] = ()


@dataclass(frozen=True, slots=True)
class Publisher:
    """Somebody who publishes versions, for whom shards note what changes.

    Args:
        client: who it is.
        folder: of the chain of versions.
        chain: names the chain; whoever begins to publish gives it another name.
    """

    client: Client
    folder: str
    chain: str

    def encode(self) -> list[Any]:
        """As a value of JSON."""
        who = self.client
        return [who.name, who.incarnation, who.session, self.folder, self.chain]

    @classmethod
    def decode(cls, value: list[Any]) -> Publisher:
        """The inverse of :meth:`encode`."""
        *client, folder, chain = value
        return cls(Client(*client), folder, chain)


@dataclass(frozen=True, slots=True)
class View:
    """The layout of a cluster.

    Args:
        number: grows with every change.
        generation: how often the cluster went back to a snapshot.
        coordinator: the server that changes the view.
        term: number of the view in which it began to; orders of earlier terms are refused.
        servers: those that may keep shards, in the order in which they coordinate.
        backups: servers that each chain shall have beside its head.
        shards: the shards.
        epoch: numbers the maps.
        slots: by slot, its shard, in this epoch.
        trainers: the trainers.
        joined: trainers there ever were.
        made: shards there ever were.
        declared: by name of a table or dense group, what it is, as text.
        snapshot: the last whole snapshot, to which the cluster can go back.
        older: snapshots before it, the latest first, to go back to if it is damaged.
        settings: what everybody who connects must agree about.
        broken: the reason for which the cluster cannot go on; empty if it can.
        left: trainers that have left since the last snapshot.
        undone: by name of trainers that had left, pushes that the last roll-back undid.
        samplers: by name of a sampler whose samples are counted, what it is, as text.
        publisher: who publishes versions; None if nobody does.
    """

    number: int
    generation: int
    coordinator: Server
    term: int
    servers: tuple[Server, ...]
    backups: int
    shards: tuple[Shard, ...]
    epoch: int
    slots: tuple[int, ...]
    trainers: tuple[Trainer, ...] = ()
    joined: int = 0
    made: int = 0
    declared: Mapping[str, str] = field(default_factory=dict)
    snapshot: Snapshot | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    broken: str = ""
    left: tuple[Left, ...] = ()
    undone: Mapping[str, int] = field(default_factory=dict)
    older: tuple[Older, ...] = ()
    samplers: Mapping[str, str] = field(default_factory=dict)
    publisher: Publisher | None = None

    @property
    def snapshots(self) -> tuple[Snapshot, ...]:
        """All snapshots to which the cluster may go back, the latest first."""
        latest = () if self.snapshot is None else (self.snapshot,)
        return (*latest, *(each.snapshot for each in self.older))

    def shard(self, number: int) -> Shard | None:
        """The shard of that number, if there still is one."""
        return next((each for each in self.shards if each.number == number), None)

    @property
    def active(self) -> tuple[int, ...]:
        """The shards that keep anything in this epoch; pushes go to each of them."""
        return tuple(sorted(set(self.slots)))

    @property
    def is_together(self) -> bool:
        """True under BSP: the pushes of one step of all trainers are one update."""
        kind, *_ = self.settings.get("consistency", ("BSP",))
        return bool(kind == "BSP")

    def trainer(self, client: Client) -> Trainer | None:
        """The trainer that this client is; None if it has not joined, or no longer."""
        return next((each for each in self.trainers if each.client == client), None)

    # --- as text

    def encode(self) -> str:
        """As JSON."""
        runs = runs_of(self.slots)
        return json.dumps(
            {
                "number": self.number,
                "generation": self.generation,
                "coordinator": _pair(self.coordinator),
                "term": self.term,
                "servers": [_pair(each) for each in self.servers],
                "backups": self.backups,
                "shards": [
                    [s.number, [_pair(each) for each in s.chain], s.version] for s in self.shards
                ],
                "epoch": self.epoch,
                "slots": runs,
                "trainers": [
                    [t.number, t.client.name, t.client.incarnation, t.client.session]
                    for t in self.trainers
                ],
                "joined": self.joined,
                "made": self.made,
                "declared": dict(self.declared),
                "snapshot": self.snapshot.encode() if self.snapshot else None,
                "settings": dict(self.settings),
                "broken": self.broken,
                "left": [each.encode() for each in self.left],
                "undone": dict(self.undone),
                "older": [
                    [each.snapshot.encode(), [left.encode() for left in each.left]]
                    for each in self.older
                ],
                "samplers": dict(self.samplers),
                "publisher": self.publisher.encode() if self.publisher else None,
            }
        )

    @classmethod
    def decode(cls, text: str) -> View:
        """The inverse of :meth:`encode`."""
        fields = json.loads(text)
        fields["coordinator"] = Server(*fields["coordinator"])
        fields["servers"] = tuple(Server(*each) for each in fields["servers"])
        fields["shards"] = tuple(
            Shard(number, tuple(Server(*each) for each in chain), version)
            for number, chain, version in fields["shards"]
        )
        fields["slots"] = tuple(shard for shard, count in fields["slots"] for _ in range(count))
        if fields["snapshot"] is not None:
            fields["snapshot"] = Snapshot.decode(fields["snapshot"])
        fields["trainers"] = tuple(
            Trainer(number, Client(*client)) for number, *client in fields["trainers"]
        )
        fields["left"] = tuple(Left(*each) for each in fields["left"])
        if fields["publisher"] is not None:
            fields["publisher"] = Publisher.decode(fields["publisher"])
        fields["older"] = tuple(
            Older(Snapshot.decode(snapshot), tuple(Left(*each) for each in left))
            for snapshot, left in fields["older"]
        )
        return cls(**fields)


def _pair(server: Server) -> list[Any]:
    return [server.name, server.incarnation]


def runs_of(slots: Sequence[int]) -> list[list[int]]:
    """Shards with how many slots in a row each has, as values of JSON."""
    runs: list[list[int]] = []
    for shard in slots:
        if runs and runs[-1][0] == shard:
            runs[-1][1] += 1
        else:
            runs.append([shard, 1])
    return runs


# --- how views follow each other


def beginning_with(
    view: View, snapshot: Snapshot, declared: Mapping[str, str], samplers: Mapping[str, str]
) -> View:
    """A new cluster that begins as a snapshot of another one is, with trainers of its own.

    Args:
        view: the new cluster.
        snapshot: where it begins.
        declared: what is in the snapshot, by name.
        samplers: whose samples it counts, by name.
    """
    accounts = {name: each.unassigned() for name, each in snapshot.accounts.items()}
    begins = replace(snapshot, counts={}, accounts=accounts)
    return replace(view, snapshot=begins, declared=declared, samplers=samplers)


def first(servers: Sequence[Server], backups: int, settings: Mapping[str, Any]) -> View:
    """A new cluster: a shard on each server, its backups on those that follow it."""
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
    """``server`` coordinates from now on."""
    number = view.number + 1
    servers = view.servers if server in view.servers else (*view.servers, server)
    return replace(view, number=number, coordinator=server, term=number, servers=servers)


def without(view: View, lost: Collection[Server]) -> View:
    """These servers are gone: backups take over from their heads."""
    number = view.number + 1
    shards = tuple(_without(shard, lost, number) for shard in view.shards)
    servers = tuple(each for each in view.servers if each not in lost)
    return replace(view, number=number, servers=servers, shards=shards)


def _without(shard: Shard, gone: Collection[Server], number: int) -> Shard:
    """The shard with none of these servers in its chain, as from view ``number``."""
    chain = tuple(each for each in shard.chain if each not in gone)
    return shard if chain == shard.chain else replace(shard, chain=chain, version=number)


def with_server(view: View, server: Server) -> View:
    """A server came, or came back; it keeps nothing yet."""
    servers = tuple(each for each in view.servers if each.name != server.name)
    return replace(view, number=view.number + 1, servers=(*servers, server))


def wanting(view: View, living: Collection[Server]) -> tuple[int, Server] | None:
    """A shard that has too few backups, and the server that should be one."""
    load = Counter(server for shard in view.shards for server in shard.chain)
    for shard in view.shards:
        if not shard.chain or len(shard.chain) > view.backups:
            continue
        free = [each for each in view.servers if each in living and each not in shard.chain]
        if free:
            return shard.number, min(free, key=lambda each: (load[each], view.servers.index(each)))
    return None


def backed_up(view: View, number: int, server: Server) -> View:
    """``server`` has all of a shard and is its backup from now on."""
    next_view = view.number + 1
    shards = tuple(
        replace(each, chain=(*each.chain, server), version=next_view)
        if each.number == number
        else each
        for each in view.shards
    )
    return replace(view, number=next_view, shards=shards)


def with_trainers(view: View, arrivals: Iterable[Client]) -> View:
    """These join; they are numbered in the order of their names."""
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
    """There is a sampler of that name; the first to name it says what it is."""
    if name in view.samplers:
        return view
    return replace(view, number=view.number + 1, samplers={**view.samplers, name: text})


def with_publisher(view: View, publisher: Publisher | None) -> View:
    """Somebody publishes versions, or nobody does any more."""
    if view.publisher == publisher:
        return view
    return replace(view, number=view.number + 1, publisher=publisher)


def without_trainers(view: View, numbers: Collection[int]) -> View:
    """These have finished or were lost."""
    staying = tuple(each for each in view.trainers if each.number not in numbers)
    return replace(view, number=view.number + 1, trainers=staying)


def with_left(view: View, left: Left) -> View:
    """So much counts of a trainer that has left."""
    others = [each for each in view.left if each.number != left.number]
    return replace(view, number=view.number + 1, left=(*others, left))


def saved(view: View, snapshot: Snapshot, without: Collection[int]) -> View:
    """There is a later snapshot; trainers that left after its cut are not wholly in it.

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
    """Without snapshots that were overwritten; who left between goes to the one before."""
    kept: list[Older] = []
    left: tuple[Left, ...] = ()
    for each in older:
        left = (*left, *each.left)
        if each.snapshot.folder != folder:
            kept.append(Older(each.snapshot, left))
            left = ()
    return tuple(kept)


def published(view: View, snapshot: Snapshot, without: Collection[int]) -> View:
    """As :func:`saved`, of a version; of its chain, only the last ones are gone back to.

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
    """The snapshots after this one are given up, as they are damaged."""
    left, older = view.left, view.older
    latest = view.snapshot
    while latest != snapshot:
        left, latest, older = (*left, *older[0].left), older[0].snapshot, older[1:]
    return replace(view, number=view.number + 1, snapshot=latest, left=left, older=older)


def resized(view: View, servers: Sequence[Server]) -> View:
    """Each of these servers is to be the head of one shard that has its share of the slots.

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
    """Shards without slots are no more, and servers that were not named keep nothing.

    Unless they are the last that have a shard, as those that were named have died.
    """
    number = view.number + 1
    leaving = _keepers(view.shards) - set(view.servers)
    shards = []
    for shard in view.shards:
        if shard.number in view.active:
            only = leaving.issuperset(shard.chain)
            shards.append(shard if only else _without(shard, leaving, number))
    servers = (*view.servers, *sorted(_keepers(shards) - set(view.servers)))
    return replace(view, number=number, shards=tuple(shards), servers=servers)


def _keepers(shards: Iterable[Shard]) -> set[Server]:
    return {each for shard in shards for each in shard.chain}


def keepers(view: View) -> set[Server]:
    """The servers that keep a share of the state."""
    return _keepers(view.shards)


def servers_of(view: View) -> set[Server]:
    """Everybody whom a view names as a server."""
    return {*view.servers, *keepers(view)}


def names(view: View, server: Server) -> bool:
    """True if a server has any part in a view."""
    return server in {*servers_of(view), view.coordinator}


def is_outdated(view: View | None, shard: int, version: int) -> bool:
    """True if a view knows a later chain of a shard than that version, or that it is no more."""
    if view is None:
        return False
    found = view.shard(shard)
    return found.version > version if found is not None else shard < view.made


def is_next_coordinator(view: View, me: Server, living: Collection[Server]) -> bool:
    """True if this server must take over, as the coordinator and all before it are gone."""
    if view.coordinator in living:
        return False
    candidates = [each for each in view.servers if each in living]
    return candidates[0] == me if candidates else True


def rolled_back(view: View, servers: Sequence[Server]) -> View:
    """All state is lost or given up: new shards, to be filled from the snapshot."""
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
